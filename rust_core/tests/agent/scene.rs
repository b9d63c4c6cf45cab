//! A scene: a run folder, an agent, and a controller that records what it hears.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sky_monarch_core::channel::{Channel, Credentials, Limits, Listener};
use sky_monarch_core::protocol::{
    Command, Event, Fault, GroupPlan, Injection, Peer, Progress, ProgressLimit, RankCommand, Recovery,
    Report, Slot, Stamped, StandbyStart, StandbyUntil, Trigger,
};
use sky_monarch_core::wire::Address;
use tokio::sync::mpsc;

pub const TOKEN: &str = "0123456789abcdef";
/// Longest wait for anything that is expected to happen.
pub const SOON: Duration = Duration::from_secs(20);
/// The same where a mutant is expected to make it fail.
const SOON_MUTANT: Duration = Duration::from_secs(4);

pub type Outcome = Result<(), String>;

/// What the controller of a scene has heard.
#[derive(Debug, Default)]
pub struct Heard {
    pub events: Vec<(Instant, Stamped)>,
    pub progress: BTreeMap<Slot, Progress>,
    pub chunks: BTreeMap<u64, (u64, Vec<u8>, bool)>,
    pub hellos: Vec<Peer>,
}

pub struct Scene {
    pub folder: tempfile::TempDir,
    pub run_id: String,
    pub heard: Arc<Mutex<Heard>>,
    pub mutant: Option<&'static str>,
    /// With which words the controller refuses whoever dials; none: it welcomes all.
    pub refusal: Arc<Mutex<Option<String>>>,
    commands: Arc<Mutex<Option<mpsc::UnboundedSender<Command>>>>,
    agent: Option<Child>,
    next_request: u64,
    controller: tokio::task::JoinHandle<()>,
}

impl Scene {
    /// A scene whose controller listens, with an agent that was started as `patch` changes its configuration.
    pub async fn with(mutant: Option<&'static str>, patch: impl Fn(&mut serde_json::Value)) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let name = folder.path().file_name().expect("a name").to_string_lossy().replace('.', "");
        let run_id = format!("test-{}-{name}", std::process::id());
        let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
        std::fs::write(path("private.json"), format!("{{\"token\": \"{TOKEN}\"}}")).expect("a file");
        let mut config = serde_json::json!({
            "run_id": run_id, "host": "host-0", "run_dir": folder.path(), "private": path("private.json"),
            "socket": path("agent.sock"), "controller": format!("unix:{}", path("controller.sock")),
            "services": [], "linger_s": 60.0, "limits": {"drain_s": 3.0, "session_s": 2.0, "siblings_s": 2.0, "flush_s": 2.0, "evict_s": 2.0, "standby_s": 1.0},
        });
        patch(&mut config);
        std::fs::write(path("agent.json"), config.to_string()).expect("a file");
        let heard = Arc::default();
        let commands = Arc::default();
        let refusal = Arc::<Mutex<Option<String>>>::default();
        let address: Address = format!("unix:{}", path("controller.sock")).parse().expect("an address");
        let listener = Listener::bind(&address, Credentials::new(run_id.clone(), TOKEN), Limits::default());
        let listener = listener.await.expect("a free address");
        let controller =
            tokio::spawn(control(listener, Arc::clone(&heard), Arc::clone(&commands), Arc::clone(&refusal)));
        let mut scene = Self {
            folder,
            run_id,
            heard,
            mutant,
            refusal,
            commands,
            agent: None,
            next_request: 0,
            controller,
        };
        scene.start_agent();
        scene
    }

    pub async fn new(mutant: Option<&'static str>) -> Self {
        Self::with(mutant, |_| {}).await
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn start_agent(&mut self) {
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.path("agent.log"))
            .expect("a log");
        let mut process = Process::new(std::env::current_exe().expect("this binary"));
        process.args(["--exact", "process::agent_process", "--nocapture"]);
        process.env("TEST_AGENT_JSON", self.path("agent.json")).stdin(Stdio::null());
        process.stdout(log.try_clone().expect("a log")).stderr(log);
        if let Some(mutant) = self.mutant {
            process.env("SKY_MONARCH_MUTANT", mutant);
        }
        self.agent = Some(process.spawn().expect("an agent"));
    }

    pub fn agent_pid(&self) -> u32 {
        self.agent.as_ref().map_or(0, Child::id)
    }

    pub fn kill_agent(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            let _ = agent.kill();
            let _ = agent.wait();
        }
        self.commands.lock().expect("no poison").take();
    }

    /// Waits for the agent to end by itself.
    pub async fn agent_exit(&mut self) -> Result<i32, String> {
        let deadline = Instant::now() + self.soon();
        let Some(agent) = &mut self.agent else { return Err("no agent".into()) };
        while Instant::now() < deadline {
            if let Ok(Some(status)) = agent.try_wait() {
                return Ok(status.code().unwrap_or(-1));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Err("the agent does not end".into())
    }

    fn soon(&self) -> Duration {
        if self.mutant.is_some() { SOON_MUTANT } else { SOON }
    }

    pub async fn send(&self, command: Command) {
        let _ = self
            .until("the agent is connected", |_| {
                self.commands.lock().expect("no poison").as_ref().map(|_| ())
            })
            .await;
        if let Some(commands) = &*self.commands.lock().expect("no poison") {
            let _ = commands.send(command);
        }
    }

    /// Closes the controller's end of the connection.
    pub fn hang_up(&self) {
        self.commands.lock().expect("no poison").take();
    }

    /// The controller is gone, its socket too.
    pub fn stop_controller(&self) {
        self.controller.abort();
        self.hang_up();
        let _ = std::fs::remove_file(self.path("controller.sock"));
    }

    /// Waits until `look` finds something in what was heard.
    pub async fn until<T>(&self, what: &str, look: impl Fn(&Heard) -> Option<T>) -> Result<T, String> {
        let deadline = Instant::now() + self.soon();
        loop {
            if let Some(found) = look(&self.heard.lock().expect("no poison")) {
                return Ok(found);
            }
            if Instant::now() > deadline {
                let heard = self.heard.lock().expect("no poison");
                let events: Vec<_> = heard.events.iter().map(|(_, event)| &event.event).collect();
                let log = std::fs::read_to_string(self.path("agent.log")).unwrap_or_default();
                return Err(format!("not seen: {what}\nevents: {events:#?}\nlog: {log}"));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits for the first event of which `look` makes something.
    pub async fn event<T>(&self, what: &str, look: impl Fn(&Event) -> Option<T>) -> Result<T, String> {
        self.until(what, |heard| heard.events.iter().find_map(|(_, stamped)| look(&stamped.event))).await
    }

    /// Waits for the pid of a rank of a generation.
    pub async fn spawned(&self, replica: u32, rank: u32, generation: u64) -> Result<u32, String> {
        self.event(&format!("rank {rank} of r{replica}.g{generation} runs"), |event| match event {
            Event::RankSpawned { replica: r, rank: k, generation: g, pid, .. }
                if (*r, *k, *g) == (replica, rank, generation) =>
            {
                Some(*pid)
            }
            _ => None,
        })
        .await
    }

    /// All events so far.
    pub fn events(&self) -> Vec<Event> {
        self.heard
            .lock()
            .expect("no poison")
            .events
            .iter()
            .map(|(_, stamped)| stamped.event.clone())
            .collect()
    }

    /// All bytes of a stream, and the offset of the first.
    pub async fn log(&mut self, slot: Option<Slot>, generation: u64) -> Result<(u64, Vec<u8>), String> {
        let (mut first, mut all, mut offset) = (None, Vec::new(), 0);
        loop {
            self.next_request += 1;
            let request = self.next_request;
            let read =
                sky_monarch_core::protocol::LogRead { request, slot, generation, offset, max_bytes: 100_000 };
            self.send(Command::ReadLog(read)).await;
            let (at, data, eof) =
                self.until("an answer", |heard| heard.chunks.get(&request).cloned()).await?;
            first.get_or_insert(at);
            offset = at + data.len() as u64;
            all.extend(data);
            if eof {
                return Ok((first.unwrap_or(0), all));
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.kill_agent();
        self.controller.abort();
        // Whatever a mutant, or a failure, has left behind.
        for pid in marked(&self.run_id) {
            kill(pid, libc::SIGKILL);
        }
    }
}

async fn control(
    mut listener: Listener,
    heard: Arc<Mutex<Heard>>,
    commands: Arc<Mutex<Option<mpsc::UnboundedSender<Command>>>>,
    refusal: Arc<Mutex<Option<String>>>,
) {
    while let Ok(pending) = listener.accept().await {
        let refused = refusal.lock().expect("no poison").clone();
        if let Some(reason) = refused {
            let _ = pending.refuse(reason).await;
            continue;
        }
        let peer = pending.peer().clone();
        let Ok(mut channel): Result<Channel<Command, Report>, _> = pending.welcome().await else { continue };
        let (tell, mut told) = mpsc::unbounded_channel();
        *commands.lock().expect("no poison") = Some(tell);
        // Last: who has heard of it, speaks to this connection, and not to the one before.
        heard.lock().expect("no poison").hellos.push(peer);
        let heard = Arc::clone(&heard);
        tokio::spawn(async move {
            loop {
                let report = tokio::select! {
                    command = told.recv() => match command {
                        Some(command) => {
                            let _ = channel.send(&command).await;
                            continue;
                        }
                        None => return,
                    },
                    report = channel.recv() => match report {
                        Ok(report) => report,
                        Err(_) => return,
                    },
                };
                let mut ack = None;
                {
                    let mut heard = heard.lock().expect("no poison");
                    match report {
                        Report::Event(stamped) => {
                            ack = Some(stamped.seq);
                            heard.events.push((Instant::now(), stamped));
                        }
                        Report::Progress(progress) => drop(heard.progress.insert(progress.slot, progress)),
                        Report::LogChunk { request, offset, data, eof } => {
                            heard.chunks.insert(request, (offset, data, eof));
                        }
                    }
                }
                if let Some(seq) = ack {
                    let _ = channel.send(&Command::Ack { seq }).await;
                }
            }
        });
    }
}

/// A plan for one rank of shell text, with limits as short as a test wants them.
pub fn shell(replica: u32, script: &str) -> GroupPlan {
    let path = std::env::var("PATH").unwrap_or_default();
    GroupPlan {
        replica,
        replicas: 2,
        world_size: 1,
        span: None,
        generation: 1,
        command: RankCommand::Shell { script: script.into() },
        workdir: "/".into(),
        envs: BTreeMap::from([("PATH".to_owned(), path)]),
        devices: Vec::new(),
        device_env: None,
        lighthouse: "http://127.0.0.1:9".into(),
        lighthouse_control: None,
        recovery: Recovery {
            max_restarts: 3,
            window_s: 600.0,
            spent_s: Vec::new(),
            backoff_s: 0.05,
            backoff_max_s: 2.0,
            startup_limit_s: None,
            progress_limit_s: ProgressLimit::Off,
            grace_s: 2.0,
            standby: 0,
            standby_until: StandbyUntil::Imports,
            standby_start: StandbyStart::Fork,
        },
        preload: Vec::new(),
        injections: Vec::new(),
        log_segment_bytes: 1 << 20,
        log_segments: 8,
    }
}

/// Shell text of a rank that does `what` at SIGTERM; [`is_listening`] says when it has set that trap.
pub fn listens(scene: &Scene, replica: u32, what: &str) -> String {
    let ready = scene.path(&format!("listens-{replica}"));
    format!("trap '{what}' TERM; : > {}; while :; do sleep 0.05; done", ready.display())
}

pub async fn is_listening(scene: &Scene, replica: u32) -> Outcome {
    let ready = scene.path(&format!("listens-{replica}"));
    eventually("its shell has set the trap", SOON, || ready.exists()).await
}

/// The same for the rank with a session of `process.rs`.
pub fn session(replica: u32, mode: &str, target: u64) -> GroupPlan {
    let mut plan = shell(replica, "");
    let exe = std::env::current_exe().expect("this binary").to_string_lossy().into_owned();
    let argv = [&exe, "--exact", "process::rank_process", "--nocapture"];
    plan.command = RankCommand::Exec { argv: argv.map(str::to_owned).to_vec() };
    plan.envs.insert("TEST_RANK_MODE".into(), mode.into());
    plan.envs.insert("TEST_TARGET".into(), target.to_string());
    plan
}

pub fn start(plan: GroupPlan) -> Command {
    Command::StartGroup(Box::new(plan))
}

pub fn stop(replica: u32) -> Command {
    Command::StopGroup { replica, grace_s: 2.0, reason: "test".into() }
}

pub fn inject(id: u32, fault: Fault, trigger: Trigger) -> Injection {
    Injection { id, slot: Slot { replica: 0, rank: 0 }, fault, trigger }
}

pub fn kill(pid: u32, signal: i32) {
    // SAFETY: integers only.
    unsafe { libc::kill(pid as i32, signal) };
}

pub fn alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !matches!(stat.rsplit(')').next().and_then(|rest| rest.trim().chars().next()), None | Some('Z' | 'X'))
}

/// Processes that carry the mark of a run.
pub fn marked(run_id: &str) -> Vec<u32> {
    let mark = format!("SKY_MONARCH_RUN_ID={run_id}");
    let entries = std::fs::read_dir("/proc").expect("a process table").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| {
        let environ =
            std::fs::read(Path::new("/proc").join(pid.to_string()).join("environ")).unwrap_or_default();
        environ.split(|byte| *byte == 0).any(|pair| pair == mark.as_bytes()) && alive(*pid)
    })
    .collect()
}

/// Waits for something that no event tells.
pub async fn eventually(what: &str, soon: Duration, check: impl Fn() -> bool) -> Outcome {
    let deadline = Instant::now() + soon;
    while !check() {
        if Instant::now() > deadline {
            return Err(format!("not seen: {what}"));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

pub fn ensure(condition: bool, otherwise: impl Into<String>) -> Outcome {
    if condition { Ok(()) } else { Err(otherwise.into()) }
}

/// Declares a scenario as a test, and as one test for each mutant that must turn it red.
#[macro_export]
macro_rules! scenario {
    ($name:ident $(, $mutant:ident)*) => {
        mod $name {
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn holds() {
                if let Err(problem) = super::$name(None).await {
                    panic!("{problem}");
                }
            }
            $(
                #[cfg(feature = "mutants")]
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $mutant() {
                    assert!(super::$name(Some(stringify!($mutant))).await.is_err(), "the mutant survives");
                }
            )*
        }
    };
}
