//! The process that standbys are forked from: it has imported what the job preloads, once for all of this host.
//!
//! A standby that imports for itself costs seconds of processor time after each recovery, which the survivors pay; one
//! that is forked costs next to nothing. `sky_monarch/fork_server.py` is the process; this is the agent's end of it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::sys::memfd::{MFdFlags, memfd_create};
use tokio::sync::{Mutex, MutexGuard, watch};
use tokio::time::{sleep, timeout};

use super::capture::{self, Capture};
use super::context::{Context, Shared};
use super::env;
use super::group::rank::Tracked;
use super::mutant;
use super::pidfd::{self, Process};
use super::spawn::Spawned;
use super::standby::NICE;
use crate::protocol::{Event, GroupPlan, RankCommand, StandbyStart, StandbyUntil};
use crate::seqpacket::{Message, Packets};
use crate::{Error, ErrorKind, Result};

/// From its start to the end of its imports; they may come from a cold network disk.
const READY_LIMIT: Duration = Duration::from_secs(600);
/// From the request to a process of its own: two forks, where the processors are busy.
const FORK_LIMIT: Duration = Duration::from_secs(10);
/// The same where nobody wants the process any more: whoever ends the group waits for this.
const UNWANTED_LIMIT: Duration = Duration::from_millis(500);
/// Forks that may fail in a row, with their server or without it, before standbys import for themselves.
const MAX_FAILURES: u32 = 3;

/// The fork server of an agent.
#[derive(Clone, Debug, Default)]
pub struct ForkServer {
    state: Arc<Mutex<State>>,
    /// It was told that something cannot be imported.
    is_short: Arc<AtomicBool>,
}

#[derive(Debug, Default)]
struct State {
    server: Option<Server>,
    failures: u32,
    births: u64,
    /// Said once: no process can be forked from it.
    is_refused: bool,
}

#[derive(Debug)]
struct Server {
    tracked: Tracked,
    packets: Packets,
    imports: Imports,
    is_ready: bool,
}

/// What a fork server has to have in common with whom it is forked for.
#[derive(Debug, PartialEq)]
struct Imports {
    command: RankCommand,
    preload: Vec<String>,
    envs: BTreeMap<String, String>,
    workdir: String,
}

/// A process to fork.
#[derive(Debug)]
pub struct Birth {
    /// Its whole environment.
    pub env: BTreeMap<String, String>,
    /// Marks its tree.
    pub spawn_id: String,
    /// How far it goes.
    pub until: StandbyUntil,
    /// Its stdout and stderr.
    pub output: OwnedFd,
    /// Its file descriptor 3.
    pub promotion: OwnedFd,
    /// Its niceness.
    pub nice: i32,
}

impl ForkServer {
    /// Whether standbys of this plan are to be forked at all: without imports there is nothing to save.
    pub fn serves(plan: &GroupPlan) -> bool {
        plan.recovery.standby_start == StandbyStart::Fork && !plan.preload.is_empty()
    }

    /// Waits until the fork server can fork, starting it where there is none. False where standbys of this plan have to
    /// be started in another way, or as soon as `wanted` turns false.
    pub async fn is_ready(
        &self,
        context: &Shared,
        plan: &GroupPlan,
        wanted: &mut watch::Receiver<bool>,
    ) -> bool {
        let mut unwanted = wanted.clone();
        let Some(mut state) = self.lock(wanted).await else { return false };
        state.bury(context).await;
        if state.is_refused {
            return false;
        }
        if state.server.is_none() {
            match Server::start(context, plan).await {
                Ok(server) => state.server = Some(server),
                Err(error) => {
                    state.refuse(context, &error.to_string());
                    return false;
                }
            }
        }
        let Some(server) = &mut state.server else { return false };
        if server.imports != Imports::of(plan) {
            return false;
        }
        if server.is_ready {
            return true;
        }
        let message = loop {
            let message = tokio::select! {
                message = timeout(READY_LIMIT, server.packets.receive()) => message,
                _ = unwanted.wait_for(|wanted| !wanted) => return false,
            };
            match &message {
                Ok(Ok(Some(Message { text, .. }))) if text.starts_with("short ") => {
                    self.tell_short(context, &text["short ".len()..]);
                }
                _ => break message,
            }
        };
        match message {
            Ok(Ok(Some(Message { text, .. }))) if text == "ready" => {
                server.is_ready = true;
                true
            }
            Ok(Ok(Some(Message { text, .. }))) => {
                state.refuse(context, text.strip_prefix("refused ").unwrap_or(&text));
                state.end(context).await;
                false
            }
            Ok(Ok(None) | Err(_)) => {
                state.died(context, "it ended before its imports did").await;
                false
            }
            Err(_) => {
                state.died(context, &format!("its imports took longer than {READY_LIMIT:?}")).await;
                false
            }
        }
    }

    /// Says, once, that not everything of `preload` could be imported: no standby of this host is warm then.
    pub fn tell_short(&self, context: &Context, what: &str) {
        if !self.is_short.swap(true, Ordering::Relaxed) {
            let what = env::redact(what, &context.run.token);
            let message = format!(
                "preload: {what}; standbys of this host take over, but cold: correct `preload`, or install it"
            );
            context.outbox.emit(Event::Notice { replica: None, message });
        }
    }

    /// The state, unless `wanted` turns false before nobody else needs it.
    async fn lock(&self, wanted: &mut watch::Receiver<bool>) -> Option<MutexGuard<'_, State>> {
        tokio::select! {
            state = self.state.lock() => Some(state),
            _ = wanted.wait_for(|wanted| !wanted) => None,
        }
    }

    /// Forks a process. An error says that it was not possible now; it may be later.
    pub async fn fork(
        &self,
        context: &Shared,
        birth: Birth,
        wanted: &mut watch::Receiver<bool>,
    ) -> Result<Spawned> {
        let Some(mut state) = self.lock(wanted).await else { return Err(failed("nobody needs it")) };
        state.births += 1;
        let id = state.births;
        let Some(server) = state.server.as_mut().filter(|server| server.is_ready) else {
            return Err(failed("the fork server is gone"));
        };
        let env = sealed(&serde_json::json!({ "env": birth.env }).to_string())?;
        let request = serde_json::json!({
            "id": id, "agent": std::process::id(), "spawn_id": birth.spawn_id, "nice": birth.nice,
            "until": birth.until,
        });
        let fds = [birth.output.as_fd(), birth.promotion.as_fd(), env.as_fd()];
        let asked = async {
            server.packets.send(&request.to_string(), &fds).await?;
            loop {
                let Some(message) = server.packets.receive().await? else { return Ok(None) };
                let answers = message.text == format!("born {id}")
                    || message.text.starts_with(&format!("failed {id} "));
                if answers || message.text.starts_with("refused ") {
                    return Ok(Some(message));
                }
                // It was given up, and comes late: nobody holds the other end of its promotion, so it ends by itself.
            }
        };
        let given_up = async {
            if mutant::is_on("wait_for_unwanted") {
                return sleep(FORK_LIMIT).await;
            }
            let _ = timeout(FORK_LIMIT - UNWANTED_LIMIT, wanted.wait_for(|wanted| !wanted)).await;
            sleep(UNWANTED_LIMIT).await;
        };
        let answer: std::io::Result<Option<Message>> = tokio::select! {
            answer = asked => answer,
            () = given_up => Err(std::io::ErrorKind::TimedOut.into()),
        };
        match answer {
            Ok(Some(Message { text, mut fds })) => {
                if let Some(reason) = text.strip_prefix("refused ") {
                    state.refuse(context, reason);
                    state.end(context).await;
                    return Err(failed(reason));
                }
                let born = fds.pop().and_then(|pidfd| Some(Spawned { pid: pid_of(&pidfd)?, pidfd }));
                let Some(spawned) = born else {
                    let why = text.strip_prefix(&format!("failed {id} ")).unwrap_or("it died at once");
                    state.failed(context, why).await;
                    return Err(failed(why));
                };
                state.failures = 0;
                context.registry.with_lock(|pids| pids.insert(spawned.pid));
                Ok(spawned)
            }
            Ok(None) => {
                state.died(context, "it ended").await;
                Err(failed("the fork server ended"))
            }
            Err(cause) => {
                state.died(context, &format!("it did not answer: {cause}")).await;
                Err(Error::io("fork a standby", cause))
            }
        }
    }

    /// Ends it.
    pub async fn end(&self, context: &Context) {
        self.state.lock().await.end(context).await;
    }
}

fn failed(why: &str) -> Error {
    Error::new(ErrorKind::Closed, "fork a standby", why.to_owned())
}

impl State {
    /// Forgets a fork server that has ended.
    async fn bury(&mut self, context: &Context) {
        if self.server.as_ref().is_some_and(|server| server.tracked.process.exit().is_some()) {
            self.died(context, "it ended").await;
        }
    }

    /// It lives, and has made no process.
    async fn failed(&mut self, context: &Context, how: &str) {
        self.failures += 1;
        if self.failures >= MAX_FAILURES {
            self.refuse(context, &format!("{how}, {MAX_FAILURES} times in a row"));
            self.end(context).await;
        }
    }

    async fn died(&mut self, context: &Context, how: &str) {
        let Some(server) = self.server.as_ref().filter(|_| !mutant::is_on("keep_dead_fork_server")) else {
            return;
        };
        self.failures += 1;
        let tail = server.tracked.capture.tail();
        let last = tail.last().map(|line| env::redact(line, &context.run.token)).unwrap_or_default();
        self.end(context).await;
        if self.failures >= MAX_FAILURES {
            self.refuse(context, &format!("{how}, {MAX_FAILURES} times in a row ({last})"));
        } else {
            tracing::warn!("the fork server is gone: {how} ({last})");
        }
    }

    fn refuse(&mut self, context: &Context, reason: &str) {
        if !self.is_refused {
            self.is_refused = true;
            let reason = env::redact(reason, &context.run.token);
            let message = format!("standbys import for themselves, none is forked: {reason}");
            context.outbox.emit(Event::Notice { replica: None, message });
        }
    }

    async fn end(&mut self, context: &Context) {
        if let Some(Server { tracked, packets, .. }) = self.server.take() {
            drop(packets);
            tracked.end(context, Duration::from_secs(1)).await;
        }
    }
}

impl Imports {
    fn of(plan: &GroupPlan) -> Self {
        Self {
            command: plan.command.clone(),
            preload: plan.preload.clone(),
            envs: plan.envs.clone(),
            workdir: plan.workdir.clone(),
        }
    }
}

impl Server {
    async fn start(context: &Shared, plan: &GroupPlan) -> Result<Self> {
        let Some(command) = env::python_command(&plan.command) else {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "start the fork server",
                "the command is not Python's",
            ));
        };
        let (packets, theirs) = Packets::pair()?;
        let (read, write) = capture::pipe()?;
        let spawn_id = context.spawn_id();
        // Nothing in it says which rank it is: what is imported here is everybody's.
        let env = env::shared_env(&context.run, plan, &spawn_id);
        let preload = format!("--preload={}", plan.preload.join(","));
        let worker = [command[0].as_str(), "-m", "sky_monarch.worker", "--serve", &preload, "--"];
        let argv = worker.map(str::to_owned).into_iter().chain(command.iter().cloned()).collect();
        let nice = if context.can_renice { NICE } else { 0 };
        let capture = Capture::start(read, context.logs.fork_server_target(), context.outbox.clone(), None)?;
        let spawned = context.spawn(argv, env, &plan.workdir, write, Some(theirs), nice).await?;
        let process = Process::watch(spawned, context.registry.clone())?;
        let tracked = Tracked { process, spawn_id, capture };
        Ok(Self { tracked, packets, imports: Imports::of(plan), is_ready: false })
    }
}

/// A file in memory that holds `text`, to be read from its start.
fn sealed(text: &str) -> Result<OwnedFd> {
    let io = |cause| Error::io("hand an environment on", cause);
    let file = memfd_create("environment", MFdFlags::MFD_CLOEXEC).map_err(|errno| io(errno.into()))?;
    let mut file = File::from(file);
    file.write_all(text.as_bytes()).map_err(io)?;
    std::io::Seek::rewind(&mut file).map_err(io)?;
    Ok(file.into())
}

/// Whom a pidfd refers to: a live process, or a child of ours that nobody has reaped.
fn pid_of(pidfd: &OwnedFd) -> Option<u32> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).ok()?;
    let pid = info.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok()?;
    // Signal 0 reaches nobody: it asks.
    pidfd::signal(pidfd, 0).is_ok().then_some(pid)
}
