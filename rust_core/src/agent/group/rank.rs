//! One rank of a generation: its process, its output, and what its session has said.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use crate::agent::capture::Capture;
use crate::agent::context::Context;
use crate::agent::env;
use crate::agent::evidence::{self, Files};
use crate::agent::mutant;
use crate::agent::pidfd::{Exited, Process};
use crate::agent::progress::Watchdog;
use crate::agent::tree::{self, Family, Root};
use crate::protocol::{Event, Exit};

/// Longest wait for the bytes that are still in its pipe to be written.
const FINISH_LIMIT: Duration = Duration::from_secs(5);

/// A process of the job with everything that hangs on it.
#[derive(Debug)]
pub struct Tracked {
    /// The process.
    pub process: Process,
    /// Marks its tree.
    pub spawn_id: String,
    /// Its output.
    pub capture: Capture,
}

impl Tracked {
    /// The root of its tree, as of now.
    pub fn root(&self) -> (String, Root) {
        (self.spawn_id.clone(), Root { pid: self.process.pid, alive: self.process.exit().is_none() })
    }

    /// Ends its tree and its capture.
    pub async fn end(self, context: &Context, grace: Duration) {
        let until = Instant::now() + grace;
        let family = || Family::Spawns(HashMap::from([self.root()]));
        tree::end(family, &context.registry, || until, context.limits.kill_s).await;
        context.disown(&self.spawn_id);
        self.capture.finish(FINISH_LIMIT).await;
    }
}

/// What a session has said.
#[derive(Debug, Default)]
pub struct Session {
    /// Its connection is open.
    pub open: bool,
    /// Step at which its work is done.
    pub target: Option<u64>,
    /// Last step it reported as committed.
    pub step: Option<u64>,
    /// It reported its work as done.
    pub done: bool,
}

/// One rank of a live generation.
#[derive(Debug)]
pub struct Rank {
    /// Which.
    pub rank: u32,
    /// Its process.
    pub tracked: Tracked,
    /// Where it leaves its last words.
    pub files: Files,
    /// What its session has said; none before it has connected.
    pub session: Option<Session>,
    /// Watches its commits.
    pub watchdog: Watchdog,
    /// Its end was reported.
    pub told: bool,
}

impl Rank {
    /// How it ended, if it has.
    pub fn exit(&self) -> Option<Exited> {
        self.tracked.process.exit()
    }

    /// Its work is done: its session said so, or it left with code 0 and owes no step.
    pub fn is_finished(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.done)
            || (self.exit().is_some_and(|exited| exited.exit == Exit::Code(0)) && self.early().is_none())
    }

    /// The step it has reached and the one it owes, where its session told a target that is not reached.
    pub fn early(&self) -> Option<(u64, u64)> {
        let session = self.session.as_ref()?;
        let (step, target) = (session.step.unwrap_or(0), session.target?);
        (!session.done && step < target && !mutant::is_on("accept_early_exit")).then_some((step, target))
    }

    /// The event of its end, with its last lines. Waits for nothing: a death is told at once.
    pub fn exited_event(
        &mut self,
        context: &Context,
        (replica, generation): (u32, u64),
        collateral: bool,
        oom: bool,
    ) -> Option<(u64, Event)> {
        let exited = self.exit().filter(|_| !self.told)?;
        self.told = true;
        let (tail, mut traceback) = self.tracked.capture.last_words();
        let failed = !collateral && exited.exit != Exit::Code(0);
        let written = if failed { self.files.exception() } else { Vec::new() };
        if !written.is_empty() {
            traceback = written;
        }
        if !failed {
            traceback.clear();
        }
        let redacted = |lines: Vec<String>| {
            lines.iter().map(|line| env::redact(line, &context.run.token)).collect::<Vec<String>>()
        };
        let killed = failed && exited.exit == Exit::Signal(libc::SIGKILL);
        let event = Event::RankExited {
            replica,
            rank: self.rank,
            generation,
            pid: self.tracked.process.pid,
            exit: exited.exit,
            collateral,
            oom,
            tail: redacted(tail),
            traceback: redacted(traceback),
            memory: killed.then(|| evidence::memory(exited.peak_bytes)),
        };
        Some((exited.at_ns, event))
    }

    /// Waits for its watcher to have reaped it, once nothing of it is alive.
    pub async fn reaped(&self) {
        let _ = timeout(Duration::from_secs(1), self.tracked.process.exited()).await;
    }

    /// Ends its capture.
    pub async fn finish(self, context: &Context) {
        context.disown(&self.tracked.spawn_id);
        self.files.remove();
        self.tracked.capture.finish(FINISH_LIMIT).await;
    }
}

/// How often the kernel's OOM killer has killed on this host, and in this agent's own control group.
pub fn oom_kills() -> u64 {
    let counter = |text: String, name: &str| -> u64 {
        text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok()).unwrap_or(0)
    };
    let host = std::fs::read_to_string("/proc/vmstat").map_or(0, |text| counter(text, "oom_kill "));
    let group = std::fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| {
        let path = text.lines().find_map(|line| line.strip_prefix("0::"))?.to_owned();
        std::fs::read_to_string(format!("/sys/fs/cgroup{path}/memory.events")).ok()
    });
    host + group.map_or(0, |text| counter(text, "oom_kill "))
}
