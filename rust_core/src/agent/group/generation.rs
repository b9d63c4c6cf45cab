//! One generation of a group: its ranks are started together and ended together.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

use super::futile;
use super::rank::{Rank, Tracked, oom_kills};
use super::{Group, Stop, seconds};
use crate::agent::capture::{self, Capture};
use crate::agent::context::Context;
use crate::agent::env::{self, Place};
use crate::agent::evict::{Eviction, Evictor};
use crate::agent::evidence::Files;
use crate::agent::mutant;
use crate::agent::pidfd::{Exited, Process};
use crate::agent::progress::Watchdog;
use crate::agent::store::Lease;
use crate::agent::tree::{self, Entry, Family};
use crate::protocol::{Cause, Event, Exit, GroupState, RankCommand, SessionCommand};
use crate::{Error, ErrorKind, Result};

/// How a generation came to its end.
#[derive(Debug)]
pub enum Outcome {
    /// Its work is done.
    Done,
    /// It was asked to stop.
    Stopped,
    /// It died, or was ended because it did nothing.
    Died(Cause),
}

/// What is left of a generation.
#[derive(Debug)]
pub struct Ended {
    /// How it came to its end.
    pub outcome: Outcome,
    /// It has brought the work forward.
    pub progressed: bool,
    /// Processes that SIGKILL did not end.
    pub survivors: Vec<u32>,
    /// Why its command did not run at all.
    pub futile: Option<String>,
}

/// The live generation of a group.
#[derive(Debug)]
pub(super) struct Generation {
    pub number: u64,
    pub ranks: Vec<Rank>,
    /// One task a rank, which completes when its process ends.
    pub exits: JoinSet<(u32, Exited)>,
    pub started: Instant,
    pub first_commit: Option<u64>,
    pub last_step: Option<u64>,
    pub first_exit_0: Option<Instant>,
    pub last_look: Instant,
    pub refilled: bool,
    /// It was told that all its ranks run without a session.
    pub up: bool,
    pub oom_kills: u64,
    /// Nothing is rehearsed on it any more.
    pub ending: bool,
    /// It asks for no quorum any more, but has something to save.
    pub leaving: bool,
    /// The lighthouse was told that it is over.
    pub evicted: bool,
}

impl Group {
    /// Runs one generation from its first spawn until no process of it is left.
    pub(super) async fn generation(&mut self, number: u64) -> Ended {
        let replica = self.plan.replica;
        let now = Instant::now();
        let mut live = Generation {
            number,
            ranks: Vec::new(),
            exits: JoinSet::new(),
            started: now,
            first_commit: None,
            last_step: None,
            first_exit_0: None,
            last_look: now,
            refilled: false,
            up: false,
            oom_kills: oom_kills(),
            ending: false,
            leaving: false,
            evicted: false,
        };
        self.context.sessions.open(replica, number, self.plan.ranks(), self.address.clone());
        for rank in self.plan.ranks() {
            self.context.logs.open(Some(self.slot(rank)), number);
        }
        self.show(number, GroupState::Starting);
        let store = self.context.store.lease(&self.context, &self.plan);
        let address = store.as_ref().filter(|_| self.plan.span.is_some()).map(Lease::address);
        self.emit(Event::GenerationStarted { replica, generation: number, store: address });

        let is_served = store.is_some() || self.plan.span.as_ref().is_none_or(|span| span.node > 0);
        let spawned = if is_served {
            self.spawn_all(&mut live, store.as_ref().map_or(0, Lease::port)).await
        } else {
            Err(Error::new(ErrorKind::Io, "start a generation", "the group's store cannot be served"))
        };
        let spawn_is_final = spawned.as_ref().is_err_and(futile::is_final);
        let outcome = match spawned {
            Ok(()) => {
                self.show_live(&live, GroupState::Starting);
                self.live(&mut live).await
            }
            Err(error) => Outcome::Died(Cause::SpawnFailed { error: error.message().to_owned() }),
        };
        let outcome = match outcome {
            Outcome::Done => {
                self.done(&mut live).await;
                let stopped = self.stop.borrow().is_some();
                let elsewhere = self.over_elsewhere(number).filter(|_| !stopped);
                elsewhere.map_or(Outcome::Done, Outcome::Died)
            }
            outcome => outcome,
        };
        let progressed = self.has_progressed(&live);
        let survivors = self.end_generation(&mut live, &outcome).await;
        drop(store);
        let futile = match &outcome {
            Outcome::Died(cause) if !progressed => futile::why(cause, &live.ranks, spawn_is_final),
            _ => None,
        };
        for rank in live.ranks.drain(..) {
            rank.finish(&self.context).await;
        }
        for rank in self.plan.ranks() {
            self.context.logs.close(Some(self.slot(rank)), number);
        }
        let step = live.last_step;
        match &outcome {
            Outcome::Done => {}
            Outcome::Stopped => {
                let reason = self.stop.borrow().as_ref().map(|stop| stop.reason.clone()).unwrap_or_default();
                let cause = Cause::Stopped { reason };
                let never_ran = None;
                self.emit(Event::GenerationEnded { replica, generation: number, cause, step, never_ran });
            }
            Outcome::Died(cause) => {
                let cause = cause.clone();
                // Who counts the tries of a part is the controller.
                let part = futile.as_ref().filter(|_| self.plan.span.is_some());
                let never_ran = part.map(|error| env::redact(error, &self.context.run.token));
                self.emit(Event::GenerationEnded { replica, generation: number, cause, step, never_ran });
            }
        }
        Ended { outcome, progressed, survivors, futile }
    }

    /// A commit is progress; where no session could say so, a life longer than the longest delay is.
    fn has_progressed(&self, live: &Generation) -> bool {
        let lasted = live.started.elapsed().as_secs_f64() > self.plan.recovery.backoff_max_s;
        live.first_commit.is_some() || (lasted && live.ranks.iter().all(|rank| rank.session.is_none()))
    }

    async fn spawn_all(&mut self, live: &mut Generation, master_port: u16) -> Result<()> {
        for rank in self.plan.ranks() {
            let (tracked, warm) = self.spawn(live.number, rank, master_port).await?;
            let process = tracked.process.clone();
            let pid = process.pid;
            live.exits.spawn(async move { (rank, process.exited().await) });
            let watchdog = Watchdog::new(self.now_s());
            let (replica, generation) = (self.plan.replica, live.number);
            let files = Files::new(&self.context.run_dir, replica, rank, generation);
            live.ranks.push(Rank { rank, tracked, files, session: None, watchdog, told: false });
            self.emit(Event::RankSpawned { replica, rank, generation, pid, warm });
        }
        Ok(())
    }

    async fn spawn(&mut self, generation: u64, rank: u32, master_port: u16) -> Result<(Tracked, bool)> {
        let spawn_id = self.context.spawn_id();
        let place = Place { rank, generation, master_port, spawn_id: &spawn_id };
        if let Some(promoted) = self.standbys.promote(&self.plan, &place).await {
            return Ok(promoted);
        }
        let env = env::rank_env(&self.context.run, &self.plan, &place);
        let argv = match &self.plan.command {
            RankCommand::Exec { argv } => argv.clone(),
            RankCommand::Shell { script } => {
                ["bash", "-o", "pipefail", "-c", script].map(str::to_owned).to_vec()
            }
        };
        let (read, write) = capture::pipe()?;
        // What can fail comes before the process does: one that runs must have somebody who holds it.
        let target = self.context.logs.target(&self.plan, rank, generation);
        let capture = Capture::start(read, target, self.context.outbox.clone(), Some(self.plan.replica))?;
        let spawned = self.context.spawn(argv, env, &self.plan.workdir, write, None, 0).await?;
        let process = Process::watch(spawned, self.context.registry.clone())?;
        self.context.own(self.plan.replica, &spawn_id, &process);
        Ok((Tracked { process, spawn_id, capture }, false))
    }

    /// Ends what is left of a generation: evict, TERM, KILL. Returns what survived.
    async fn end_generation(&mut self, live: &mut Generation, outcome: &Outcome) -> Vec<u32> {
        let replica = self.plan.replica;
        let started = Instant::now();
        let grace = seconds(self.plan.recovery.grace_s);
        let died = matches!(outcome, Outcome::Died(_));
        live.ending = true;
        if died {
            self.show_live(live, GroupState::Restarting);
            self.context.sessions.fence(replica);
        } else if matches!(outcome, Outcome::Stopped) {
            self.show_live(live, GroupState::Stopping);
            self.drain(live).await;
            self.context.sessions.fence(replica);
        }
        let context = Arc::clone(&self.context);
        let evictor = Arc::clone(&self.evictor);
        let evicting = evict(&context, evictor.as_ref(), (replica, live.number), !died);
        let is_evicted = live.evicted;
        let stop = self.stop.clone();
        let ending = async {
            // The first death is told while the eviction is under way, the rest of the group as it follows.
            if let Outcome::Died(Cause::RankExited { rank, .. }) = outcome {
                self.tell_exit(live, *rank, false);
            }
            self.end_tree(live, started + grace, &stop).await
        };
        // Survivors are told of the death as soon as the lighthouse knows, not when the last sibling has ended.
        let evicted = async {
            let quorum_id = if is_evicted { None } else { evicting.await };
            if let (true, Some(quorum_id)) = (died, quorum_id) {
                context.sessions.tell_others(replica, &SessionCommand::Dead { quorum_id });
            }
        };
        let (survivors, ()) = tokio::join!(ending, evicted);
        for index in 0..live.ranks.len() {
            live.ranks[index].reaped().await;
            let rank = live.ranks[index].rank;
            let collateral = !matches!(outcome, Outcome::Done);
            self.tell_exit(live, rank, collateral);
        }
        // The last commits may still have been on their way when their rank died.
        while let Ok(message) = self.mailbox.try_recv() {
            self.hear(live, message);
        }
        self.context.sessions.forget(replica);
        survivors
    }

    async fn end_tree(
        &self,
        live: &Generation,
        term_until: Instant,
        stop: &watch::Receiver<Option<Stop>>,
    ) -> Vec<u32> {
        if mutant::is_on("no_tree_kill") {
            for rank in &live.ranks {
                let _ = rank.tracked.process.signal(libc::SIGKILL);
            }
            return Vec::new();
        }
        let family =
            || Family::Spawns(live.ranks.iter().map(|rank| rank.tracked.root()).collect::<HashMap<_, _>>());
        let until = || stop.borrow().as_ref().map_or(term_until, |stop| stop.deadline.min(term_until));
        let kill_s = self.context.limits.kill_s;
        tree::end(family, &self.context.registry, until, kill_s).await.1
    }

    /// Gives ranks their grace time: sessions hear of it, TERM goes to the ranks alone (a rank that finishes its
    /// step still needs its children) or, under a shell, to everything.
    async fn drain(&mut self, live: &mut Generation) {
        let Some(stop) = self.stop.borrow().clone() else { return };
        if mutant::is_on("no_drain") {
            return;
        }
        self.tell_drain(&stop);
        if matches!(self.plan.command, RankCommand::Shell { .. }) {
            let family = Family::Spawns(live.ranks.iter().map(|rank| rank.tracked.root()).collect());
            for entry in tree::look(family, &self.context.registry).await.members.values() {
                tree::signal(entry, entry.last_signal());
            }
        } else {
            for rank in &live.ranks {
                if let Some(entry) = Entry::read(rank.tracked.process.pid) {
                    tree::signal(&entry, entry.last_signal());
                }
            }
        }
        self.await_exits(live, stop.deadline, true).await;
    }

    fn tell_drain(&self, Stop { deadline, reason, is_notice }: &Stop) {
        let left = deadline.saturating_duration_since(Instant::now());
        let (reason, save) = (reason.clone(), *is_notice);
        let command = SessionCommand::Drain { grace_s: left.as_secs_f64(), reason, save };
        self.context.sessions.tell_group(self.plan.replica, &command);
    }

    /// Lets the others go on without a generation whose ranks only save their state any more: that takes longer than a
    /// step, and they would wait for it.
    async fn let_go(&self, live: &mut Generation, until: Instant) {
        if !live.leaving || live.evicted || !live.ending || mutant::is_on("stay_in_quorum") {
            return;
        }
        live.evicted = true;
        let told = evict(&self.context, self.evictor.as_ref(), (self.plan.replica, live.number), true);
        let _ = timeout_at(until, told).await;
    }

    /// Waits for all ranks to end, until `deadline` or an earlier one of a stop; keeps telling what happens.
    pub(super) async fn await_exits(&mut self, live: &mut Generation, deadline: Instant, collateral: bool) {
        loop {
            if !live.ending && self.over_elsewhere(live.number).is_some() {
                return;
            }
            let asked = self.stop.borrow_and_update().as_ref().map(|stop| stop.deadline);
            let until = asked.map_or(deadline, |asked| asked.min(deadline));
            tokio::select! {
                biased;
                exit = live.exits.join_next() => match exit {
                    Some(Ok((rank, _))) => self.tell_exit(live, rank, collateral),
                    Some(Err(_)) => {}
                    None => return,
                },
                Some(message) = self.mailbox.recv() => {
                    self.hear(live, message);
                    self.let_go(live, until).await;
                }
                Ok(()) = self.stop.changed() => {
                    // Whoever saves its state has less time for it now.
                    if let Some(stop) = self.stop.borrow().clone().filter(|_| live.ending) {
                        self.tell_drain(&stop);
                    }
                }
                Ok(()) = self.word.changed(), if !live.ending => {}
                () = sleep(until.saturating_duration_since(Instant::now())) => return,
            }
        }
    }

    /// Tells how a rank ended, once and at once.
    pub(super) fn tell_exit(&self, live: &mut Generation, rank: u32, collateral: bool) {
        let of = (self.plan.replica, live.number);
        let Some(rank) = live.ranks.iter_mut().find(|r| r.rank == rank) else { return };
        let killed = rank.exit().is_some_and(|exited| exited.exit == Exit::Signal(libc::SIGKILL));
        let kills = if killed { oom_kills() } else { live.oom_kills };
        let oom = killed && !collateral && kills > live.oom_kills;
        live.oom_kills = kills;
        if let Some((at_ns, event)) = rank.exited_event(&self.context, of, collateral, oom) {
            self.context.outbox.emit_at(at_ns, event);
        }
    }

    pub(super) fn show_live(&self, live: &Generation, state: GroupState) {
        let alive = live.ranks.iter().filter(|rank| rank.exit().is_none());
        let pids: BTreeMap<u32, u32> = alive.map(|rank| (rank.rank, rank.tracked.process.pid)).collect();
        self.show_with(live.number, state, pids);
    }

    pub(super) fn now_s(&self) -> f64 {
        self.born.elapsed().as_secs_f64()
    }
}

/// Evicts a generation. A lighthouse that has just died is back in a moment; one that stays away cannot hold the group
/// back for ever: a new one knows nothing of the dead generation, and the number of the next one fences that off.
async fn evict(
    context: &Context,
    evictor: &dyn Evictor,
    (replica, generation): (u32, u64),
    orderly: bool,
) -> Option<i64> {
    if mutant::is_on("skip_evict") {
        return None;
    }
    match evictor.evict(replica, generation, seconds(context.limits.evict_s)).await {
        Ok(Eviction::Known(quorum_id)) => {
            context.outbox.emit(Event::Evicted { replica, generation, quorum_id, orderly });
            quorum_id
        }
        Ok(Eviction::Untold) => None,
        Err(error) => {
            let message = format!("generation {generation} was not evicted at the lighthouse: {error}");
            context.outbox.emit(Event::Notice { replica: Some(replica), message });
            None
        }
    }
}
