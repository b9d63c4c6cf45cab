//! The live phase of a generation: deaths, sessions, limits, rehearsed faults.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

use super::generation::{Generation, Outcome};
use super::rank::Rank;
use super::{Group, Message, Stop, seconds};
use crate::agent::clock;
use crate::agent::evidence::{self, Stuck};
use crate::agent::mutant;
use crate::agent::pidfd::Exited;
use crate::agent::roll_call::{Answer, NEARLY, Sentence};
use crate::agent::sessions::SessionEvent;
use crate::protocol::{
    Cause, Event, Exit, Fault, GroupState, Heal, Injection, LEAVING, Progress, SessionCommand, SessionReport,
    WAITING,
};

const LOOK: Duration = Duration::from_millis(200);
/// A look this late says that the agent itself was not running: silence then proves nothing.
const AWAY: Duration = Duration::from_secs(1);
/// Without a session, a rank counts as up this long after its start.
const UP: Duration = Duration::from_secs(2);
/// Ranks of a group that hangs that are looked at.
const EXAMINED: usize = 16;

impl Group {
    /// Watches over a generation until something ends it.
    pub(super) async fn live(&mut self, live: &mut Generation) -> Outcome {
        self.context.roll_call().enter(self.plan.replica);
        let outcome = self.watch(live).await;
        self.context.roll_call().leave(self.plan.replica);
        outcome
    }

    async fn watch(&mut self, live: &mut Generation) -> Outcome {
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            if live.ranks.iter().all(Rank::is_finished) {
                return Outcome::Done;
            }
            if self.stop.borrow_and_update().is_some() {
                return Outcome::Stopped;
            }
            if let Some(cause) = self.over_elsewhere(live.number) {
                return Outcome::Died(cause);
            }
            tokio::select! {
                biased;
                Some(Ok((rank, exited))) = live.exits.join_next() => {
                    // What its session said before it ended lies in the mailbox: first hear, then judge.
                    while let Ok(message) = self.mailbox.try_recv() {
                        self.hear(live, message);
                    }
                    if let Some(cause) = self.judge_exit(live, rank, exited).await {
                        return Outcome::Died(cause);
                    }
                }
                Ok(()) = self.stop.changed() => {}
                Ok(()) = self.word.changed() => {}
                Some(message) = self.mailbox.recv() => {
                    self.hear(live, message);
                }
                _ = look.tick() => {
                    if let Some(cause) = self.look(live).await {
                        return Outcome::Died(cause);
                    }
                }
            }
        }
    }

    /// The cause of death, if this exit ends the generation.
    async fn judge_exit(&mut self, live: &mut Generation, rank: u32, exited: Exited) -> Option<Cause> {
        let index = live.ranks.iter().position(|r| r.rank == rank)?;
        if exited.exit == Exit::Code(0) && live.ranks[index].early().is_some() {
            self.hear_last_words(live, rank).await;
        }
        let of = &live.ranks[index];
        if !of.is_finished() {
            return Some(Cause::RankExited {
                rank,
                exit: exited.exit,
                early: early_if_0(exited.exit, of.early()),
            });
        }
        live.first_exit_0.get_or_insert_with(Instant::now);
        self.tell_exit(live, rank, false);
        self.show_live(live, self.state(live));
        None
    }

    /// A process ends faster than its last words travel: waits until its connection is read to the end.
    async fn hear_last_words(&mut self, live: &mut Generation, rank: u32) {
        let deadline = Instant::now() + Duration::from_millis(500);
        loop {
            let of = live.ranks.iter().find(|r| r.rank == rank).and_then(|r| r.session.as_ref());
            if of.is_none_or(|session| !session.open) {
                return;
            }
            match tokio::time::timeout_at(deadline, self.mailbox.recv()).await {
                Ok(Some(message)) => {
                    self.hear(live, message);
                }
                _ => return,
            }
        }
    }

    fn state(&self, live: &Generation) -> GroupState {
        if live.first_commit.is_some() || live.up { GroupState::Running } else { GroupState::Starting }
    }

    /// It has no session that could tell, and has run long enough to count as up.
    fn is_up(&self, live: &Generation) -> bool {
        live.started.elapsed() >= UP && live.ranks.iter().all(|rank| self.has_never_had_a_session(rank))
    }

    fn has_never_had_a_session(&self, rank: &Rank) -> bool {
        rank.session.is_none()
            && !self.session_seen.get(self.plan.local_rank(rank.rank) as usize).copied().unwrap_or(false)
    }

    /// Takes in what a session of this generation says; what older ones say is not heard.
    pub(super) fn hear(&mut self, live: &mut Generation, message: Message) {
        let Message::Session { rank, generation, event } = message;
        let now_s = self.now_s();
        let Some(of) = live.ranks.iter_mut().find(|r| r.rank == rank).filter(|_| generation == live.number)
        else {
            return;
        };
        match event {
            SessionEvent::Connected(target) => {
                if let Some(seen) = self.session_seen.get_mut(self.plan.local_rank(rank) as usize) {
                    *seen = true;
                }
                let session = of.session.get_or_insert_default();
                (session.open, session.target) = (true, target);
            }
            SessionEvent::Closed => {
                if let Some(session) = &mut of.session {
                    session.open = false;
                }
            }
            SessionEvent::Said(SessionReport::Pause { what, .. }) if what == LEAVING => live.leaving = true,
            SessionEvent::Said(SessionReport::Pause { what, limit_s }) => {
                tracing::debug!(rank, what, limit_s, "a session pauses");
                let waits = what == WAITING;
                if mutant::is_on("blame_waiting") && waits {
                    of.watchdog.pause(now_s - 3600.0, limit_s, waits); // as if whoever waits were the one that hangs
                } else if !mutant::is_on("deaf_to_pauses") || waits {
                    of.watchdog.pause(now_s, limit_s, waits);
                }
            }
            SessionEvent::Said(SessionReport::Done { step }) => {
                let session = of.session.get_or_insert_default();
                (session.done, session.step) = (true, Some(step));
                live.last_step = live.last_step.max(Some(step));
            }
            SessionEvent::Said(SessionReport::Committed { step, quorum_id, participants, mut metrics }) => {
                let heal = take_heal(&mut metrics);
                of.watchdog.committed(now_s);
                let session = of.session.get_or_insert_default();
                session.step = Some(step);
                let progress = Progress {
                    slot: self.slot(rank),
                    generation,
                    mono_ns: clock::mono_ns(),
                    step,
                    target_step: session.target,
                    quorum_id,
                    participants,
                    metrics,
                };
                live.last_step = live.last_step.max(Some(step));
                self.context.outbox.progress(progress);
                if live.first_commit.is_none() {
                    live.first_commit = Some(step);
                    self.emit(Event::FirstCommit { replica: self.plan.replica, generation, step, heal });
                    self.show_live(live, GroupState::Running);
                }
                self.rehearse(live, rank);
            }
        }
    }

    /// Looks at everything that time alone changes.
    async fn look(&mut self, live: &mut Generation) -> Option<Cause> {
        let now_s = self.now_s();
        mutant::panic_if("panic_in_group", self.plan.replica == 0 && live.started.elapsed() > LOOK);
        if live.last_look.elapsed() > AWAY && !mutant::is_on("blame_own_pause") {
            live.ranks.iter_mut().for_each(|rank| rank.watchdog.refresh(now_s));
        }
        live.last_look = Instant::now();
        for rank in self.plan.ranks() {
            self.rehearse(live, rank);
        }
        if let Some(cause) = self.answer_roll_call(live, now_s).await {
            return Some(cause);
        }
        let limit_s = self.context.limits.siblings_s;
        if live.first_exit_0.is_some_and(|at| at.elapsed().as_secs_f64() > limit_s)
            && live.ranks.iter().all(|rank| rank.session.is_none())
        {
            self.examine(live, self.plan.ranks().start).await;
            return Some(Cause::ProgressLimit { limit_s });
        }
        let up = self.is_up(live);
        let patience = if self.is_plain { UP } else { seconds(self.context.limits.session_s) };
        if up && !live.up && live.started.elapsed() >= patience {
            (live.up, self.is_plain) = (true, true);
            self.emit(Event::RanksUp { replica: self.plan.replica, generation: live.number });
        }
        if self.standbys.are_wanted() {
            let quiet_s = live.started.elapsed().as_secs_f64();
            let silent = live.ranks.iter().all(|rank| self.has_never_had_a_session(rank))
                && quiet_s >= self.context.limits.standby_s;
            if !live.refilled && (live.first_commit.is_some() || silent) {
                live.refilled = true;
                self.standbys.refill();
            }
            self.standbys.look(&self.plan).await;
        }
        self.show_live(live, self.state(live));
        None
    }

    /// Finds out where the ranks of a generation hang that is about to be ended, `late` the first of them.
    async fn examine(&self, live: &Generation, late: u32) {
        let limit = seconds(self.context.limits.stacks_s);
        let alive = live.ranks.iter().filter(|rank| rank.exit().is_none());
        let mut alive: Vec<&Rank> = alive.collect();
        alive.sort_by_key(|rank| (rank.rank != late, rank.rank));
        let look = |rank: &&Rank| {
            let (process, files) = (rank.tracked.process.clone(), rank.files.clone());
            (rank.rank, process.pid, tokio::spawn(evidence::examine(process, files, limit)))
        };
        let looks: Vec<_> = alive.iter().take(EXAMINED).map(look).collect();
        for (rank, pid, looking) in looks {
            let Stuck { state, stacks, threads } = looking.await.unwrap_or_default();
            let (replica, generation) = (self.plan.replica, live.number);
            self.emit(Event::Hung { replica, rank, generation, pid, state, stacks, threads });
        }
    }

    /// Has every rank's watchdog look; the cause of death, where this generation is to be ended for what they see.
    async fn answer_roll_call(&self, live: &mut Generation, now_s: f64) -> Option<Cause> {
        if mutant::is_on("no_watchdog") {
            return None;
        }
        let recovery = &self.plan.recovery;
        let (mut answer, mut late, mut calls) = (Answer::default(), None, false);
        for rank in live.ranks.iter().filter(|rank| rank.exit().is_none() && !rank.is_finished()) {
            let watched = rank
                .session
                .as_ref()
                .map_or_else(|| !self.has_never_had_a_session(rank), |session| session.open);
            let Some(cause) = rank.watchdog.overdue(now_s, recovery, NEARLY).filter(|_| watched) else {
                continue;
            };
            if !matches!(cause, Cause::ProgressLimit { .. }) {
                self.examine(live, rank.rank).await;
                return Some(cause);
            }
            calls |= rank.watchdog.verdict(now_s, recovery).is_some();
            let mine = if rank.watchdog.waits() { Answer::Waits } else { Answer::Hangs };
            if mine > answer {
                (answer, late) = (mine, Some((rank.rank, cause)));
            }
        }
        let heard = self.context.roll_call().look(Instant::now(), self.plan.replica, answer, calls);
        let Sentence { ends, protocol } = heard?;
        if let Some(message) = protocol {
            self.emit(Event::Notice { replica: None, message });
        }
        // One that has committed since it answered is none to end.
        if let Some((rank, cause)) = late.filter(|_| ends) {
            self.examine(live, rank).await;
            return Some(cause);
        }
        if answer > Answer::Well {
            live.ranks.iter_mut().for_each(|rank| rank.watchdog.refresh(now_s));
        }
        None
    }

    /// Carries out the faults that are due for a rank.
    fn rehearse(&mut self, live: &Generation, rank: u32) {
        let Some(of) = live.ranks.iter().find(|r| r.rank == rank).filter(|r| r.exit().is_none()) else {
            return;
        };
        if live.ending {
            return;
        }
        let step = of.session.as_ref().and_then(|session| session.step);
        for Injection { id, slot, fault, .. } in self.rehearsal.due(rank, step, self.now_s()) {
            let (replica, generation) = (self.plan.replica, live.number);
            self.emit(Event::Injected { id, replica, rank, generation, fault });
            let carried_out = match fault {
                Fault::Kill => of.tracked.process.signal(libc::SIGKILL).is_ok(),
                Fault::Hang => of.tracked.process.signal(libc::SIGSTOP).is_ok(),
                Fault::Exit | Fault::Oom => {
                    self.context.sessions.tell(slot, &SessionCommand::Inject { fault })
                }
            };
            if !carried_out {
                let message =
                    format!("injection {id} had no effect: rank {rank} has no session that could do it");
                self.emit(Event::Notice { replica: Some(replica), message });
            }
        }
    }

    /// The work is done: donors stay up until the controller releases them, or a stop ends them.
    pub(super) async fn done(&mut self, live: &mut Generation) {
        let replica = self.plan.replica;
        let told = live.ranks.iter().filter_map(|rank| rank.session.as_ref());
        let step = told.filter(|session| session.done).filter_map(|session| session.step).max();
        self.show_live(live, GroupState::Done);
        self.emit(Event::GroupDone { replica, generation: live.number, step });
        self.standbys.end().await;
        if self.await_release(live).await {
            self.context.sessions.tell_group(replica, &SessionCommand::Release);
        }
        let stop = self.stop.borrow().clone();
        let collateral = stop.is_some();
        let deadline = match stop {
            Some(Stop { deadline, reason, .. }) => {
                let grace_s = deadline.saturating_duration_since(Instant::now()).as_secs_f64();
                let command = SessionCommand::Drain { grace_s, reason, save: false };
                self.context.sessions.tell_group(replica, &command);
                self.context.sessions.tell_group(replica, &SessionCommand::Release);
                deadline
            }
            None => Instant::now() + seconds(self.context.limits.drain_s),
        };
        self.await_exits(live, deadline, collateral).await;
    }

    /// True once donors may leave; false when there are none left, or a stop came first.
    async fn await_release(&mut self, live: &mut Generation) -> bool {
        loop {
            if *self.release.borrow_and_update() {
                return true;
            }
            if self.stop.borrow_and_update().is_some() || self.over_elsewhere(live.number).is_some() {
                return false;
            }
            tokio::select! {
                biased;
                exit = live.exits.join_next() => match exit {
                    Some(Ok((rank, _))) => {
                        self.tell_exit(live, rank, false);
                        self.show_live(live, GroupState::Done);
                    }
                    Some(Err(_)) => {}
                    None => return false,
                },
                Some(message) = self.mailbox.recv() => { self.hear(live, message); }
                Ok(()) = self.release.changed() => {}
                Ok(()) = self.stop.changed() => {}
                Ok(()) = self.word.changed() => {}
            }
        }
    }
}

/// What a session says, in the metrics of a commit, of the state that it got from a donor.
fn take_heal(metrics: &mut BTreeMap<String, f64>) -> Option<Heal> {
    let mut take = |name: &str| metrics.remove(name).filter(|value| value.is_finite() && *value >= 0.0);
    let (at_s, took_s) = (take("heal_at_s"), take("heal_took_s"));
    let (bytes, donor, step) = (take("heal_bytes"), take("heal_donor"), take("heal_step"));
    // Conversions of floats saturate.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a script may say anything")]
    let whole = |value: f64| value as u64;
    Some(Heal {
        at_ns: whole(at_s? * 1e9),
        took_s: took_s?,
        bytes: whole(bytes?),
        donor: donor.and_then(|donor| u32::try_from(whole(donor)).ok()),
        step: whole(step?),
    })
}

fn early_if_0(exit: Exit, early: Option<(u64, u64)>) -> Option<(u64, u64)> {
    early.filter(|_| exit == Exit::Code(0))
}
