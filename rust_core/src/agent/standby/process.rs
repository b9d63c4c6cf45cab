//! One standby: how it is started, how it says how far it is, and how it is told who it becomes.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::super::capture::{self, Capture};
use super::super::context::Shared;
use super::super::env::{self, Place};
use super::super::fork_server::{Birth, ForkServer};
use super::super::group::rank::Tracked;
use super::super::mutant;
use super::super::pidfd::Process;
use super::super::spawn::Spawned;
use crate::protocol::{Event, GroupPlan, StandbyUntil};
use crate::{Error, ErrorKind, Result};

/// A standby that imports for itself yields to ranks, but not by much. Where processors are idle, more changes nothing;
/// where they are busy, it takes as much from the ranks, only later, and the slot goes without a standby meanwhile: with
/// 10, four standbys beside four busy ranks on two cores were not ready within a minute.
pub const NICE: i32 = 1;
/// One that is forked has next to nothing to do: a moment of what the ranks leave idle is enough for it, and it costs
/// them nothing.
const FORKED_NICE: i32 = 19;
/// Where they leave nothing idle, it takes its part after [`FORKED_PATIENCE`]: a slot must not go without for long.
const FORKED_NICE_LATER: i32 = 5;
const FORKED_PATIENCE: Duration = Duration::from_secs(2);
/// The kernel's own limit.
const MOST_NICE: i32 = 19;
/// A session's share may be changed ten times a second by all who lack `CAP_SYS_ADMIN` together; then the kernel says
/// "again".
const SESSION_NICE_TRIES: u32 = 40;
const SESSION_NICE_PAUSE: Duration = Duration::from_millis(50);
/// The promotion fits into the socket's buffer; a standby that is stuck does not read it.
const PROMOTION_LIMIT: Duration = Duration::from_secs(1);

/// Bytes of a line that a standby says.
const MOST_WORDS: u64 = 4096;

/// How far a standby has come.
#[derive(Clone, Debug, Default)]
struct Stage(Arc<AtomicU8>);

impl Stage {
    /// It waits for its promotion.
    const READY: u8 = 1;
    /// Its script ended ahead of a session: it began again, and stops at its imports.
    const EARLY: u8 = 2;
    /// Not everything that it was to import could be imported: the rank has to find out for itself.
    const SHORT: u8 = 4;

    fn reach(&self, stage: u8) {
        self.0.fetch_or(stage, Ordering::Relaxed);
    }

    fn has(&self, stage: u8) -> bool {
        self.0.load(Ordering::Relaxed) & stage != 0
    }
}

/// The niceness of a standby, until its promotion takes it over.
#[derive(Clone, Debug, Default)]
struct Share(Arc<Mutex<bool>>);

impl Share {
    /// Does `change` unless the process is a rank by now.
    fn while_standby(&self, change: impl FnOnce()) {
        if !*self.promoted() {
            change();
        }
    }

    fn promote(&self) {
        *self.promoted() = true;
    }

    fn promoted(&self) -> MutexGuard<'_, bool> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A process that waits to become a rank.
#[derive(Debug)]
pub struct Standby {
    /// The process.
    pub tracked: Tracked,
    write: tokio::net::unix::OwnedWriteHalf,
    stage: Stage,
    ears: tokio::task::JoinHandle<()>,
    share: Share,
    until: StandbyUntil,
    /// When.
    pub started: Instant,
}

impl Standby {
    /// Starts one: forked where the fork server can, by itself otherwise. None as soon as `wanted` turns false.
    pub async fn start(
        context: &Shared,
        plan: &GroupPlan,
        rank: u32,
        until: StandbyUntil,
        mut wanted: watch::Receiver<bool>,
    ) -> Result<Option<Self>> {
        let can_fork =
            ForkServer::serves(plan) && context.fork_server.is_ready(context, plan, &mut wanted).await;
        if can_fork && *wanted.borrow() {
            match Self::begin(context, plan, rank, until, Some(&mut wanted)).await {
                Ok(standby) => return Ok(Some(standby)),
                // What ails the fork server must not use up the tries of the slot.
                Err(error) => tracing::warn!(%error, "a standby imports for itself"),
            }
        }
        if !*wanted.borrow() {
            return Ok(None);
        }
        Self::begin(context, plan, rank, until, None).await.map(Some)
    }

    /// Starts one: forked while it is `wanted`, by itself where nothing is said of that.
    async fn begin(
        context: &Shared,
        plan: &GroupPlan,
        rank: u32,
        until: StandbyUntil,
        wanted: Option<&mut watch::Receiver<bool>>,
    ) -> Result<Self> {
        let (ours, theirs) = promotion_pair()?;
        let (read, write) = capture::pipe()?;
        let spawn_id = context.spawn_id();
        let place = Place { rank, generation: 0, master_port: 0, spawn_id: &spawn_id };
        let env = env::rank_env(&context.run, plan, &place);
        let target = context.logs.target(plan, rank, 0);
        let capture = Capture::start(read, target, context.outbox.clone(), Some(plan.replica))?;
        let (spawned, nice) = if let Some(wanted) = wanted {
            let nice = context.job_nice + if context.can_renice { FORKED_NICE } else { 0 };
            let nice = nice.min(MOST_NICE);
            let birth =
                Birth { env, spawn_id: spawn_id.clone(), until, output: write, promotion: theirs, nice };
            (context.fork_server.fork(context, birth, wanted).await?, FORKED_NICE)
        } else {
            let nice = if context.can_renice { NICE } else { 0 };
            let argv = worker_command(plan, until)?;
            (context.spawn(argv, env, &plan.workdir, write, Some(theirs), nice).await?, NICE)
        };
        let _ = nice_session(spawned.pid, nice); // without, it only costs speed
        let standby = Self::watch(context, plan, (rank, spawn_id), until, (spawned, capture, ours))?;
        if nice == FORKED_NICE {
            let later = (context.job_nice + FORKED_NICE_LATER).min(MOST_NICE);
            tokio::spawn(standby.hurry(context.can_renice.then_some(later)));
        }
        Ok(standby)
    }

    fn watch(
        context: &Shared,
        plan: &GroupPlan,
        (rank, spawn_id): (u32, String),
        until: StandbyUntil,
        (spawned, capture, ours): (Spawned, Capture, UnixStream),
    ) -> Result<Self> {
        let pid = spawned.pid;
        let process = Process::watch(spawned, context.registry.clone())?;
        context.own(plan.replica, &spawn_id, &process);
        let (read, write) = ours.into_split();
        let (outbox, replica) = (context.outbox.clone(), plan.replica);
        let shared = Arc::clone(context);
        let stage = Stage::default();
        let reached = stage.clone();
        let ears = tokio::spawn(async move {
            // The standby says `ready` once it waits. It can be promoted before, only not as fast.
            let mut read = BufReader::new(read);
            let mut line = Vec::new();
            loop {
                line.clear();
                let said = (&mut read).take(MOST_WORDS).read_until(b'\n', &mut line).await;
                match line.as_slice() {
                    _ if said.is_err() => return,
                    b"ready\n" => {
                        reached.reach(Stage::READY);
                        outbox.emit(Event::StandbyReady { replica, rank, pid });
                    }
                    b"early\n" => {
                        reached.reach(Stage::EARLY);
                        let message = format!(
                            "the script of rank {rank} cannot be run ahead: it ended before it entered a session; its \
                             standby stops at the imports"
                        );
                        outbox.emit(Event::Notice { replica: Some(replica), message });
                    }
                    words => {
                        let Some(what) = words.strip_prefix(b"short ") else { return };
                        reached.reach(Stage::SHORT);
                        shared.fork_server.tell_short(&shared, String::from_utf8_lossy(what).trim());
                    }
                }
            }
        });
        let tracked = Tracked { process, spawn_id, capture };
        let (share, started) = (Share::default(), Instant::now());
        Ok(Self { tracked, write, stage, ears, share, until, started })
    }

    /// Lets it take its part of busy processors after a while.
    fn hurry(&self, nice: Option<i32>) -> impl Future<Output = ()> + use<> {
        let (pid, process) = (self.tracked.process.pid, self.tracked.process.clone());
        let (share, stage) = (self.share.clone(), self.stage.clone());
        async move {
            sleep(FORKED_PATIENCE).await;
            share.while_standby(|| {
                if process.exit().is_some() || stage.has(Stage::READY) {
                    return;
                }
                if let Some(nice) = nice {
                    renice(pid, nice);
                }
                let _ = nice_session(pid, FORKED_NICE_LATER);
            });
        }
    }

    /// It waits for its promotion.
    pub fn is_ready(&self) -> bool {
        self.stage.has(Stage::READY)
    }

    /// Its script runs ahead of the promotion, and has not come to its session yet.
    pub fn is_ahead(&self) -> bool {
        self.until == StandbyUntil::Session && !self.is_ready() && !self.is_early()
    }

    /// Its script ended ahead of a session.
    pub fn is_early(&self) -> bool {
        self.stage.has(Stage::EARLY)
    }

    /// Turns it into the rank of `place`, whose mark stays its own. Also says whether it was ready, with all that it was
    /// to import. None: it does not listen, and was ended.
    pub async fn promote(
        mut self,
        context: &Shared,
        plan: &GroupPlan,
        place: &Place<'_>,
    ) -> Option<(Tracked, bool)> {
        let place = Place { spawn_id: &self.tracked.spawn_id, ..place.clone() };
        let env = env::rank_env(&context.run, plan, &place);
        let line = format!("{}\n", serde_json::json!({ "env": env }));
        let line = if mutant::is_on("promote_nobody") { String::new() } else { line };
        let pid = self.tracked.process.pid;
        self.share.promote();
        if context.can_renice {
            renice(pid, context.job_nice);
        }
        tokio::spawn(equal_session(pid));
        self.tracked.capture.switch(context.logs.target(plan, place.rank, place.generation)).await;
        let written = timeout(PROMOTION_LIMIT, self.write.write_all(line.as_bytes())).await;
        if matches!(written, Ok(Ok(()))) {
            self.ears.abort();
            let is_warm = self.is_ready() && !self.stage.has(Stage::SHORT);
            return Some((self.tracked, is_warm));
        }
        self.end(context).await;
        None
    }

    /// Ends it and its tree.
    pub async fn end(self, context: &Shared) {
        self.ears.abort();
        drop(self.write);
        self.tracked.end(context, Duration::from_secs(1)).await;
    }
}

/// The command of a standby that imports for itself.
fn worker_command(plan: &GroupPlan, until: StandbyUntil) -> Result<Vec<String>> {
    let Some(command) = env::python_command(&plan.command) else {
        return Err(Error::new(ErrorKind::InvalidInput, "start a standby", "the command is not Python's"));
    };
    let preload = format!("--preload={}", plan.preload.join(","));
    let ahead: &[&str] = if until == StandbyUntil::Session { &["--until=session"] } else { &[] };
    let worker = [command[0].as_str(), "-m", "sky_monarch.worker", "--standby", &preload];
    let worker = worker.iter().chain(ahead).chain(&["--"]).map(|word| (*word).to_owned());
    Ok(worker.chain(command.iter().cloned()).collect())
}

fn promotion_pair() -> Result<(UnixStream, OwnedFd)> {
    let io = |errno: nix::errno::Errno| Error::io("make a socket pair", errno.into());
    let (ours, theirs) =
        socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::SOCK_CLOEXEC).map_err(io)?;
    let ours = std::os::unix::net::UnixStream::from(ours);
    ours.set_nonblocking(true).map_err(|cause| Error::io("make a socket pair", cause))?;
    Ok((UnixStream::from_std(ours).map_err(|cause| Error::io("make a socket pair", cause))?, theirs))
}

/// Niceness belongs to threads: every one of the process gets the new one.
fn renice(pid: u32, nice: i32) {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return };
    for thread in threads.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()) {
        // SAFETY: takes integers only.
        unsafe { libc::setpriority(libc::PRIO_PROCESS, thread, nice) };
    }
}

/// Where the kernel shares the processors out by session (`sched_autogroup_enabled`), niceness counts inside a session
/// only. Every rank and every standby leads one, so that of a standby is niced as a whole. Unlike niceness, this can be
/// taken back without privileges.
fn nice_session(pid: u32, nice: i32) -> std::io::Result<()> {
    std::fs::write(format!("/proc/{pid}/autogroup"), nice.to_string())
}

/// Gives a session the same share as all others, also where the kernel says "again".
async fn equal_session(pid: u32) {
    for _ in 0..SESSION_NICE_TRIES {
        match nice_session(pid, 0) {
            Err(cause) if cause.kind() == std::io::ErrorKind::WouldBlock => sleep(SESSION_NICE_PAUSE).await,
            // A kernel without such shares, or a process that has just died.
            _ => return,
        }
    }
}
