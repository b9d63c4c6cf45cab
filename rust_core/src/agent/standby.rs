//! Standbys: one process a slot, waiting to become a rank; warm when it is past its imports, hot when its script has run
//! up to its session.

mod process;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::context::Shared;
use super::env::{self, Place};
use super::group::rank::Tracked;
use super::mutant;
use crate::Result;
use crate::protocol::{Event, GroupPlan, StandbyUntil};
pub use process::NICE;
use process::Standby;

const FIRST_RETRY_S: f64 = 1.0;
/// Standbys of a slot that may die in a row before no more are made.
const MAX_DEATHS: u32 = 5;
/// Longest run of a script ahead of its promotion. One that never enters a session is not left to train in secret.
const AHEAD_LIMIT: Duration = Duration::from_secs(600);

/// The standby of one slot, and when the next one is made.
#[derive(Debug, Default)]
struct Slot {
    standby: Option<Standby>,
    coming: Option<Coming>,
    due: Option<Instant>,
    deaths: u32,
    /// Its script cannot be run ahead: standbys of it stop at their imports.
    tepid: bool,
}

/// A standby that is being started: beside the group, which has deaths to notice meanwhile.
#[derive(Debug)]
struct Coming {
    starting: JoinHandle<Result<Option<Standby>>>,
    wanted: watch::Sender<bool>,
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
            let has_one = slot.standby.is_some() || slot.coming.is_some() || slot.due.is_some();
            if !has_one && slot.deaths < MAX_DEATHS {
                slot.due = Some(Instant::now());
            }
        }
    }

    /// Looks after the slots: forgets dead standbys, starts those that are due.
    pub async fn look(&mut self, plan: &GroupPlan) {
        for (rank, slot) in (plan.ranks().start..).zip(&mut self.slots) {
            slot.welcome(&self.context, plan, rank).await;
            slot.bury(&self.context, plan, rank).await;
            if mutant::is_on("first_rank_stands_by") && plan.local_rank(rank) > 0 {
                continue;
            }
            if slot.due.is_some_and(|due| due <= Instant::now()) {
                slot.due = None;
                slot.coming = Some(slot.start(&self.context, plan, rank));
            }
        }
    }

    /// Turns the standby of `place`'s rank into the rank itself: gives it the final environment. None: start cold. Also
    /// says whether it was ready: one that is still on its way goes on, which is no faster than a cold start may be.
    pub async fn promote(&mut self, plan: &GroupPlan, place: &Place<'_>) -> Option<(Tracked, bool)> {
        let slot = self.slots.get_mut(plan.local_rank(place.rank) as usize)?;
        slot.welcome(&self.context, plan, place.rank).await;
        let standby = slot.standby.take()?;
        slot.due = None;
        slot.tepid |= standby.is_early();
        let too_late = mutant::is_on("promote_ready_only") && !standby.is_ready();
        if standby.tracked.process.exit().is_some() || too_late {
            slot.tepid |= standby.is_ahead();
            standby.end(&self.context).await;
            return None;
        }
        let promoted = standby.promote(&self.context, plan, place).await?;
        slot.deaths = 0;
        Some(promoted)
    }

    /// Ends all standbys.
    pub async fn end(&mut self) {
        for slot in &mut self.slots {
            slot.due = None;
            if let Some(Coming { starting, wanted }) = slot.coming.take() {
                let _ = wanted.send(false);
                if let Ok(Ok(Some(standby))) = starting.await {
                    standby.end(&self.context).await;
                }
            }
            if let Some(standby) = slot.standby.take() {
                standby.end(&self.context).await;
            }
        }
    }
}

impl Slot {
    fn start(&self, context: &Shared, plan: &GroupPlan, rank: u32) -> Coming {
        let until = if self.tepid && !mutant::is_on("run_ahead_again") {
            StandbyUntil::Imports
        } else {
            plan.recovery.standby_until
        };
        let (wanted, hears) = watch::channel(true);
        let (context, plan) = (Arc::clone(context), plan.clone());
        let starting = async move { Standby::start(&context, &plan, rank, until, hears).await };
        Coming { starting: tokio::spawn(starting), wanted }
    }

    /// Takes in the standby that was being started, once it is.
    async fn welcome(&mut self, context: &Shared, plan: &GroupPlan, rank: u32) {
        let Some(Coming { starting, .. }) = self.coming.take_if(|coming| coming.starting.is_finished())
        else {
            return;
        };
        match starting.await {
            Ok(Ok(standby)) => self.standby = standby,
            Ok(Err(error)) => self.fail(context, plan, &format!("no standby for rank {rank}: {error}")),
            Err(error) => self.fail(context, plan, &format!("no standby for rank {rank}: {error}")),
        }
    }

    async fn bury(&mut self, context: &Shared, plan: &GroupPlan, rank: u32) {
        if let Some(standby) = &self.standby {
            self.tepid |= standby.is_early();
        }
        if let Some(dead) = self.standby.take_if(|standby| standby.tracked.process.exit().is_some()) {
            // Killed on its way, it proves nothing about its script; but the next one need not try that again.
            self.tepid |= dead.is_ahead();
            let tail = dead.tracked.capture.tail();
            let last = tail.last().map(|line| env::redact(line, &context.run.token)).unwrap_or_default();
            self.fail(context, plan, &format!("a standby of rank {rank} died ({last})"));
            dead.end(context).await;
        }
        let is_late = |standby: &mut Standby| standby.is_ahead() && standby.started.elapsed() > AHEAD_LIMIT;
        if let Some(late) = self.standby.take_if(is_late) {
            (self.tepid, self.due) = (true, Some(Instant::now()));
            let limit_s = AHEAD_LIMIT.as_secs();
            let message = format!(
                "the standby of rank {rank} entered no session within {limit_s} s; the next one stops at its imports"
            );
            context.outbox.emit(Event::Notice { replica: Some(plan.replica), message });
            late.end(context).await;
        }
    }

    /// One more that came to nothing: the next one has to wait.
    fn fail(&mut self, context: &Shared, plan: &GroupPlan, what: &str) {
        self.deaths += 1;
        let again_s = FIRST_RETRY_S * f64::from(1 << self.deaths.min(6));
        let more = self.deaths < MAX_DEATHS && !mutant::is_on("lose_standby");
        self.due = more.then(|| Instant::now() + Duration::from_secs_f64(again_s));
        let then = if more { format!("the next one in {again_s} s") } else { "no more are made".into() };
        let message = format!("{what}; {then}");
        context.outbox.emit(Event::Notice { replica: Some(plan.replica), message });
    }
}
