//! Standbys: one process a slot, waiting to become a rank; warm when it is past its imports, hot when its script has run
//! up to its session.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout};

use super::capture::{self, Capture};
use super::context::Shared;
use super::env::{self, Place};
use super::group::rank::Tracked;
use super::mutant;
use super::pidfd::Process;
use crate::protocol::{Event, GroupPlan, StandbyUntil};
use crate::{Error, Result};

/// A standby yields to ranks while it imports, but not by much. Where processors are idle, more changes nothing; where
/// they are busy, it takes as much from the ranks, only later, and the slot goes without a standby meanwhile: with 10,
/// four standbys beside four busy ranks on two cores were not ready within a minute.
const NICE: i32 = 1;
/// A session's share may be changed ten times a second by all who lack `CAP_SYS_ADMIN` together; then the kernel says
/// "again".
const SESSION_NICE_TRIES: u32 = 40;
const SESSION_NICE_PAUSE: Duration = Duration::from_millis(50);
const FIRST_RETRY_S: f64 = 1.0;
/// Standbys of a slot that may die in a row before no more are made.
const MAX_DEATHS: u32 = 5;
/// Longest run of a script ahead of its promotion. One that never enters a session is not left to train in secret.
const AHEAD_LIMIT: Duration = Duration::from_secs(600);
/// The promotion fits into the socket's buffer; a standby that is stuck does not read it.
const PROMOTION_LIMIT: Duration = Duration::from_secs(1);

/// How far a standby has come.
#[derive(Clone, Debug, Default)]
struct Stage(Arc<AtomicU8>);

impl Stage {
    /// It waits for its promotion.
    const READY: u8 = 1;
    /// Its script ended ahead of a session: it began again, and stops at its imports.
    const EARLY: u8 = 2;

    fn reach(&self, stage: u8) {
        self.0.fetch_or(stage, Ordering::Relaxed);
    }

    fn has(&self, stage: u8) -> bool {
        self.0.load(Ordering::Relaxed) & stage != 0
    }
}

/// A process that waits to become a rank.
#[derive(Debug)]
struct Standby {
    tracked: Tracked,
    promotion: Promotion,
    until: StandbyUntil,
    started: Instant,
}

/// Our end of the standby's descriptor 3.
#[derive(Debug)]
struct Promotion {
    write: tokio::net::unix::OwnedWriteHalf,
    stage: Stage,
    ears: tokio::task::JoinHandle<()>,
}

/// The standby of one slot, and when the next one is made.
#[derive(Debug, Default)]
pub struct Slot {
    standby: Option<Standby>,
    due: Option<Instant>,
    deaths: u32,
    /// Its script cannot be run ahead: standbys of it stop at their imports.
    tepid: bool,
}

/// The standbys of one group.
#[derive(Debug)]
pub struct Standbys {
    context: Shared,
    slots: Vec<Slot>,
}

impl Standbys {
    /// None yet. For a plan without standbys, or whose command cannot be kept warm, there never are any.
    pub fn new(context: Shared, plan: &GroupPlan) -> Self {
        let wanted = plan.recovery.standby > 0 && env::python_command(&plan.command).is_some();
        let slots = if wanted { (0..plan.world_size).map(|_| Slot::default()).collect() } else { Vec::new() };
        Self { context, slots }
    }

    /// Whether slots have standbys at all.
    pub fn are_wanted(&self) -> bool {
        !self.slots.is_empty()
    }

    /// Every slot without a standby gets one at the next look.
    pub fn refill(&mut self) {
        for slot in &mut self.slots {
            if slot.standby.is_none() && slot.due.is_none() && slot.deaths < MAX_DEATHS {
                slot.due = Some(Instant::now());
            }
        }
    }

    /// Looks after the slots: forgets dead standbys, starts those that are due.
    pub async fn look(&mut self, plan: &GroupPlan) {
        for rank in 0..self.slots.len() {
            let slot = &mut self.slots[rank];
            if let Some(standby) = &slot.standby {
                slot.tepid |= standby.promotion.stage.has(Stage::EARLY);
            }
            if let Some(dead) = slot.standby.take_if(|standby| standby.tracked.process.exit().is_some()) {
                slot.deaths += 1;
                // Killed on its way, it proves nothing about its script; but the next one need not try that again.
                slot.tepid |= dead.is_ahead();
                let tail = dead.tracked.capture.tail();
                let last =
                    tail.last().map(|line| env::redact(line, &self.context.run.token)).unwrap_or_default();
                let again_s = FIRST_RETRY_S * f64::from(1 << slot.deaths.min(6));
                let more = slot.deaths < MAX_DEATHS && !mutant::is_on("lose_standby");
                slot.due = more.then(|| Instant::now() + Duration::from_secs_f64(again_s));
                let then =
                    if more { format!("the next one in {again_s} s") } else { "no more are made".into() };
                let message = format!("a standby of rank {rank} died ({last}); {then}");
                self.context.outbox.emit(Event::Notice { replica: Some(plan.replica), message });
                dead.end(&self.context).await;
            }
            let late = |standby: &mut Standby| standby.is_ahead() && standby.started.elapsed() > AHEAD_LIMIT;
            if let Some(late) = slot.standby.take_if(late) {
                (slot.tepid, slot.due) = (true, Some(Instant::now()));
                let limit_s = AHEAD_LIMIT.as_secs();
                let message = format!(
                    "the standby of rank {rank} entered no session within {limit_s} s; the next one stops at its imports"
                );
                self.context.outbox.emit(Event::Notice { replica: Some(plan.replica), message });
                late.end(&self.context).await;
            }
            let slot = &mut self.slots[rank];
            if mutant::is_on("first_rank_stands_by") && rank > 0 {
                continue;
            }
            if slot.due.is_some_and(|due| due <= Instant::now()) {
                slot.due = None;
                let rank = u32::try_from(rank).unwrap_or(u32::MAX);
                let until = if slot.tepid && !mutant::is_on("run_ahead_again") {
                    StandbyUntil::Imports
                } else {
                    plan.recovery.standby_until
                };
                match Standby::start(&self.context, plan, rank, until).await {
                    Ok(standby) => slot.standby = Some(standby),
                    Err(error) => {
                        slot.deaths = MAX_DEATHS;
                        let message = format!("no standby for rank {rank}: {error}");
                        self.context.outbox.emit(Event::Notice { replica: Some(plan.replica), message });
                    }
                }
            }
        }
    }

    /// Turns the standby of `rank` into the rank itself: gives it the final environment. None: start cold. Also says
    /// whether it was ready: one that is still on its way goes on, which is no faster than a cold start may be.
    pub async fn promote(&mut self, plan: &GroupPlan, place: &Place<'_>) -> Option<(Tracked, bool)> {
        let slot = self.slots.get_mut(place.rank as usize)?;
        let standby = slot.standby.take()?;
        slot.due = None;
        slot.tepid |= standby.promotion.stage.has(Stage::EARLY);
        let too_late = mutant::is_on("promote_ready_only") && !standby.promotion.stage.has(Stage::READY);
        if standby.tracked.process.exit().is_some() || too_late {
            slot.tepid |= standby.is_ahead();
            standby.end(&self.context).await;
            return None;
        }
        let Standby { tracked, mut promotion, until, started } = standby;
        let place = Place { spawn_id: &tracked.spawn_id, ..place.clone() };
        let env = env::rank_env(&self.context.run, plan, &place);
        let line = format!("{}\n", serde_json::json!({ "env": env }));
        let line = if mutant::is_on("promote_nobody") { String::new() } else { line };
        if self.context.can_renice {
            renice(tracked.process.pid, self.context.job_nice);
        }
        tokio::spawn(equal_session(tracked.process.pid));
        tracked.capture.switch(self.context.logs.target(plan, place.rank, place.generation)).await;
        let written = timeout(PROMOTION_LIMIT, promotion.write.write_all(line.as_bytes())).await;
        if matches!(written, Ok(Ok(()))) {
            slot.deaths = 0;
            promotion.ears.abort();
            let ready = promotion.stage.has(Stage::READY);
            return Some((tracked, ready));
        }
        Standby { tracked, promotion, until, started }.end(&self.context).await;
        None
    }

    /// Ends all standbys.
    pub async fn end(&mut self) {
        for slot in &mut self.slots {
            slot.due = None;
            if let Some(standby) = slot.standby.take() {
                standby.end(&self.context).await;
            }
        }
    }
}

impl Standby {
    /// Its script runs ahead of the promotion, and has not come to its session yet.
    fn is_ahead(&self) -> bool {
        let stage = &self.promotion.stage;
        self.until == StandbyUntil::Session && !stage.has(Stage::READY) && !stage.has(Stage::EARLY)
    }

    async fn start(context: &Shared, plan: &GroupPlan, rank: u32, until: StandbyUntil) -> Result<Self> {
        let Some(command) = env::python_command(&plan.command) else {
            return Err(Error::new(
                crate::ErrorKind::InvalidInput,
                "start a standby",
                "the command is not Python's",
            ));
        };
        let (ours, theirs) = promotion_pair()?;
        let (read, write) = capture::pipe()?;
        let spawn_id = context.spawn_id();
        let place = Place { rank, generation: 0, master_port: 0, spawn_id: &spawn_id };
        let env = env::rank_env(&context.run, plan, &place);
        let preload = format!("--preload={}", plan.preload.join(","));
        let ahead: &[&str] = if until == StandbyUntil::Session { &["--until=session"] } else { &[] };
        let worker = [command[0].as_str(), "-m", "sky_monarch.worker", "--standby", &preload];
        let worker = worker.iter().chain(ahead).chain(&["--"]).map(|word| (*word).to_owned());
        let argv = worker.chain(command.iter().cloned()).collect();
        let nice = if context.can_renice { NICE } else { 0 };
        let target = context.logs.target(plan, rank, 0);
        let capture = Capture::start(read, target, context.outbox.clone(), Some(plan.replica))?;
        let spawned = context.spawn(argv, env, &plan.workdir, write, Some(theirs), nice).await?;
        let pid = spawned.pid;
        let _ = nice_session(pid, NICE); // without, it only costs speed
        let process = Process::watch(spawned, context.registry.clone())?;
        context.own(plan.replica, &spawn_id, &process);
        let (mut read, write) = ours.into_split();
        let (outbox, replica) = (context.outbox.clone(), plan.replica);
        let stage = Stage::default();
        let reached = stage.clone();
        let ears = tokio::spawn(async move {
            // The standby says `ready` once it waits. It can be promoted before, only not as fast.
            let mut line = [0; 6];
            while read.read_exact(&mut line).await.is_ok() {
                match &line {
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
                    _ => return,
                }
            }
        });
        let tracked = Tracked { process, spawn_id, capture };
        let promotion = Promotion { write, stage, ears };
        Ok(Self { tracked, promotion, until, started: Instant::now() })
    }

    async fn end(self, context: &Shared) {
        self.promotion.ears.abort();
        drop(self.promotion.write);
        self.tracked.end(context, Duration::from_secs(1)).await;
    }
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
