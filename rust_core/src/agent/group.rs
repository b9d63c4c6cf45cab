//! One replica group: generation after generation, until its work is done, its budget is spent or it is stopped.
//!
//! ```text
//!  start ─▶ generation n ── every rank finished ─────────────▶ Done
//!             ▲        └── stop ─────────────────────────────▶ Stopped
//!             │        └── a rank died, or commits nothing ─▶ evict, kill the rest, ask the budget ─▶ GivenUp
//!             └───────────────── n + 1, after its delay ◀───────────────────────┘
//! ```
//!
//! Of a group that has several hosts this is the part on one of them. Its controller has the budget and says what is
//! next: see [`part`].

mod futile;
mod generation;
mod live;
mod part;
pub mod rank;
mod rescue;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep};

use super::budget::{Budget, Verdict};
use super::context::{Context, Shared};
use super::env;
use super::evict::Evictor;
use super::inject::Rehearsal;
use super::mutant;
use super::sessions::SessionEvent;
use super::standby::Standbys;
use crate::protocol::{Cause, Event, GroupPlan, GroupSnapshot, GroupState, RankCommand, Slot};
use generation::{Ended, Outcome};
use part::{Herald, Word};
use rescue::Rescue;

/// Messages that may wait for a group; sessions wait behind it.
const MAILBOX: usize = 1024;

/// What sessions tell their group.
#[derive(Debug)]
pub enum Message {
    /// A session of one of its ranks did something.
    Session {
        /// Whose session.
        rank: u32,
        /// Which generation it belongs to.
        generation: u64,
        /// What it did.
        event: SessionEvent,
    },
}

/// A request to stop.
#[derive(Clone, Debug, PartialEq)]
pub struct Stop {
    /// When its ranks get KILL.
    pub deadline: Instant,
    /// Shown in the events.
    pub reason: String,
    /// The host is about to be taken away.
    pub is_notice: bool,
}

/// The agent's hold on a group.
#[derive(Debug)]
pub struct Handle {
    stop: watch::Sender<Option<Stop>>,
    release: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
    herald: Herald,
    /// It is one of several parts of its group.
    pub is_part: bool,
    /// Time between TERM and KILL that its job asked for.
    pub grace_s: f64,
}

impl Handle {
    /// Asks the group to end; of several requests the earliest deadline counts.
    pub fn stop(&self, grace_s: f64, reason: &str) {
        self.end_by(Instant::now() + seconds(grace_s), reason, false);
    }

    /// The same where the host is about to be taken away.
    pub fn leave(&self, deadline: Instant, reason: &str) {
        self.end_by(deadline, reason, true);
    }

    fn end_by(&self, deadline: Instant, reason: &str, is_notice: bool) {
        self.stop.send_if_modified(|stop| {
            let sooner = stop.as_ref().is_none_or(|stop| deadline < stop.deadline);
            if sooner {
                let is_notice = is_notice || stop.as_ref().is_some_and(|stop| stop.is_notice);
                *stop = Some(Stop { deadline, reason: reason.to_owned(), is_notice });
            }
            sooner
        });
    }

    /// Its donors may leave once it is done.
    pub fn release(&self) {
        self.release.send_replace(true);
    }

    /// Goes on with the generation of `plan`, where it is a part of a group that has several hosts and its task still
    /// waits for that. False where it has to be started anew.
    pub fn go_on(&self, plan: &GroupPlan) -> bool {
        let takes = self.is_part && !self.is_over() && self.stop.borrow().is_none();
        if takes {
            self.herald.go_on(plan);
        }
        takes
    }

    /// A generation has ended on another host of the group.
    pub fn end_generation(&self, generation: u64, reason: &str) {
        self.herald.end(generation, reason);
    }

    /// True when nothing of it is left.
    pub fn is_over(&self) -> bool {
        self.task.is_finished()
    }
}

/// A duration that an outsider named: never a reason to panic.
pub fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value.clamp(0.0, 1e9)).unwrap_or_default()
}

/// One replica group.
pub struct Group {
    context: Shared,
    plan: GroupPlan,
    mailbox: mpsc::Receiver<Message>,
    address: mpsc::Sender<Message>,
    stop: watch::Receiver<Option<Stop>>,
    release: watch::Receiver<bool>,
    word: watch::Receiver<Word>,
    evictor: Arc<dyn Evictor>,
    budget: Budget,
    rehearsal: Rehearsal,
    standbys: Standbys,
    born: Instant,
    /// Ranks that have had a session in this or an earlier generation.
    session_seen: Vec<bool>,
    /// A generation has run for long without any session.
    is_plain: bool,
    /// Generations in a row whose command did not run at all.
    futile: u32,
}

impl Group {
    /// Starts to keep a group alive. The plan is checked first: an error says what is wrong with it.
    ///
    /// `before` is what keeps an earlier life of the same group: its end is told before all of it is gone, so
    /// whoever starts the group again at that word must neither be turned away nor meet what is left.
    pub fn start(
        context: Shared,
        mut plan: GroupPlan,
        released: bool,
        before: Option<Handle>,
    ) -> Result<Handle, String> {
        check(&plan)?;
        let evictor = context.lighthouses.evictor(plan.lighthouse_control.as_deref());
        let evictor = evictor.map_err(|error| error.to_string())?;
        // TorchFT's lighthouse is dialled as it is: nothing of what the door checks is known there.
        if plan.lighthouse_control.is_some() {
            let door = context.door.lead(plan.replica, &plan.lighthouse);
            plan.lighthouse = door.map_err(|error| error.to_string())?;
        }
        let (stop, stop_asked) = watch::channel(None);
        let (release, release_asked) = watch::channel(released);
        let (herald, word) = Herald::new();
        let is_part = plan.span.is_some();
        let (address, mailbox) = mpsc::channel(MAILBOX);
        let grace_s = plan.recovery.grace_s;
        let own: Vec<_> =
            plan.injections.iter().filter(|i| i.slot.replica == plan.replica).cloned().collect();
        let group = Self {
            evictor,
            budget: Budget::new(&plan.recovery),
            rehearsal: Rehearsal::new(&own, context.run_dir.join(format!("injected-r{}", plan.replica))),
            standbys: Standbys::new(Arc::clone(&context), &plan),
            born: Instant::now(),
            session_seen: vec![false; plan.world_size as usize],
            is_plain: false,
            futile: 0,
            mailbox,
            address,
            stop: stop_asked,
            release: release_asked,
            word,
            context,
            plan,
        };
        // At once, or who asks now is told that nothing will come.
        for rank in group.plan.ranks() {
            group.context.logs.open(Some(group.slot(rank)), 0);
        }
        group.show(group.plan.generation, GroupState::Starting);
        let rescue = Rescue {
            context: Arc::clone(&group.context),
            evictor: Arc::clone(&group.evictor),
            replica: group.plan.replica,
            ranks: group.plan.ranks(),
            generation: group.plan.generation,
        };
        let run = async {
            if let Some(before) = before {
                let _ = before.task.await;
            }
            group.run().await;
        };
        Ok(Handle { stop, release, task: tokio::spawn(rescue.watch(run)), herald, is_part, grace_s })
    }

    async fn run(mut self) {
        let mut number = self.plan.generation.max(1);
        let replica = self.plan.replica;
        loop {
            let Ended { outcome, progressed, survivors, futile } = self.generation(number).await;
            let mut cause = match outcome {
                Outcome::Done => {
                    self.show(number, GroupState::Done);
                    // Of a part it has to be said, for others of its group may go on. What comes from here on the
                    // supervisor answers.
                    if self.plan.span.is_some() && self.stop.borrow().is_some() {
                        self.stopped(number);
                    } else if let Some(Cause::Elsewhere { reason }) = self.over_elsewhere(number) {
                        self.emit(Self::ended_event(replica, number, &reason));
                    }
                    break;
                }
                Outcome::Stopped => {
                    self.stopped(number);
                    break;
                }
                Outcome::Died(_) if self.stop.borrow().is_some() => {
                    self.stopped(number);
                    break;
                }
                Outcome::Died(_)
                    if self.plan.span.is_some()
                        && survivors.is_empty()
                        && !mutant::is_on("restart_alone") =>
                {
                    self.show(number, GroupState::Restarting);
                    let Some(next) = self.next_wanted(number).await else {
                        self.stopped(number);
                        break;
                    };
                    number = next;
                    continue;
                }
                Outcome::Died(cause) => cause,
            };
            let now_s = self.born.elapsed().as_secs_f64();
            self.futile = if futile.is_some() { self.futile + 1 } else { 0 };
            let is_futile = self.futile >= futile::MOST_TRIES && !mutant::is_on("try_in_vain");
            let verdict = if let Some(error) = futile.filter(|_| is_futile) {
                let error = env::redact(&error, &self.context.run.token);
                cause = Cause::CannotStart { error, times: self.futile };
                Verdict::GiveUp { restarts: self.budget.restarts(now_s) }
            } else if survivors.is_empty() {
                self.budget.decide(now_s, progressed)
            } else {
                // Two live generations would be worse than none.
                let message = format!(
                    "processes survived SIGKILL, so replica group {replica} is given up: {survivors:?}"
                );
                self.context.outbox.emit(Event::Notice { replica: Some(replica), message });
                Verdict::GiveUp { restarts: self.budget.restarts(now_s) }
            };
            match verdict {
                Verdict::GiveUp { restarts } => {
                    self.show(number, GroupState::GivenUp);
                    self.emit(Event::GroupGivenUp { replica, generation: number, cause, restarts });
                    retire(&self.context, self.evictor.as_ref(), replica, number).await;
                    break;
                }
                Verdict::Restart { delay_s, left } => {
                    // From here on the next generation is the one that is spoken of, also before it starts.
                    let next = number + 1;
                    self.show(next, GroupState::Restarting);
                    self.emit(Event::RestartScheduled {
                        replica,
                        generation: next,
                        delay_s,
                        restarts_left: left,
                    });
                    let delay_s = if mutant::is_on("drop_restart") { 3600.0 } else { delay_s };
                    if self.rest(seconds(delay_s)).await {
                        self.stopped(next);
                        break;
                    }
                    number = next;
                }
            }
        }
        self.standbys.end().await;
        for rank in self.plan.ranks() {
            self.context.logs.close(Some(self.slot(rank)), 0);
        }
    }

    /// Sleeps; true when it was asked to stop meanwhile.
    async fn rest(&mut self, delay: Duration) -> bool {
        let asked = async {
            if mutant::is_on("deaf_at_rest") {
                std::future::pending::<()>().await;
            }
            while self.stop.borrow_and_update().is_none() {
                if self.stop.changed().await.is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            biased;
            () = asked => true,
            () = sleep(delay) => false,
        }
    }

    fn stopped(&self, generation: u64) {
        self.show(generation, GroupState::Stopped);
        self.emit(Event::GroupStopped { replica: self.plan.replica, generation });
    }

    const fn slot(&self, rank: u32) -> Slot {
        Slot { replica: self.plan.replica, rank }
    }

    fn emit(&self, event: Event) {
        self.context.outbox.emit(event);
    }

    /// Shows what it is doing to a controller that connects now; no rank is live.
    fn show(&self, generation: u64, state: GroupState) {
        self.show_with(generation, state, std::collections::BTreeMap::new());
    }

    fn show_with(&self, generation: u64, state: GroupState, pids: std::collections::BTreeMap<u32, u32>) {
        let restarts = self.budget.restarts(self.born.elapsed().as_secs_f64());
        let replica = self.plan.replica;
        self.context.groups().insert(replica, GroupSnapshot { replica, generation, state, restarts, pids });
    }
}

fn check(plan: &GroupPlan) -> Result<(), String> {
    let ranks = plan.world_size as usize;
    if ranks == 0 {
        return Err("a group needs at least one rank".into());
    }
    if !plan.devices.is_empty() && plan.devices.len() != ranks {
        return Err(format!("{} lists of devices for {ranks} ranks", plan.devices.len()));
    }
    if !plan.devices.is_empty() && plan.device_env.is_none() {
        return Err("devices without the name of their mask variable".into());
    }
    part::check(plan)?;
    match &plan.command {
        RankCommand::Exec { argv } if argv.is_empty() => Err("the command is empty".into()),
        _ => Ok(()),
    }
}

/// What an agent says of a generation that has ended on another host of its group, where there is nothing of it here.
pub fn nothing_left(replica: u32, generation: u64, reason: &str) -> Event {
    Group::ended_event(replica, generation, reason)
}

/// Tells the lighthouse that a group does not come back, so that no start waits for it.
async fn retire(context: &Context, evictor: &dyn Evictor, replica: u32, generation: u64) {
    let (may, limit) = (context.may_be_replaced(), seconds(context.limits.evict_s));
    if let Err(error) = evictor.retire(replica, generation, may, limit).await {
        let message =
            format!("the lighthouse was not told that replica group {replica} is given up: {error}");
        context.outbox.emit(Event::Notice { replica: Some(replica), message });
    }
}

/// Gives a group up whose plan cannot be carried out.
pub async fn refuse(context: Shared, plan: GroupPlan, error: String) {
    let GroupPlan { replica, generation, .. } = plan;
    let cause = Cause::SpawnFailed { error };
    context.outbox.emit(Event::GroupGivenUp { replica, generation, cause, restarts: 0 });
    // Where its address is what cannot be used, nobody can be told.
    if let Ok(evictor) = context.lighthouses.evictor(plan.lighthouse_control.as_deref()) {
        retire(&context, evictor.as_ref(), replica, generation).await;
    }
}
