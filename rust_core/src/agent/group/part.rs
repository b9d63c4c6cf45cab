//! A part of a group that has several hosts: its controller, which alone knows the others and keeps the budget of all of
//! them, says which generation is over and which one is next. What dies here is ended here at once, as ever.

use tokio::sync::watch;

use super::Group;
use crate::agent::mutant;
use crate::protocol::{Cause, Event, GroupPlan};

/// What the controller has said of a group's generations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Word {
    /// The newest that is over, and why.
    over: Option<(u64, String)>,
    /// The newest that is to run, and where its store is.
    wanted: Option<(u64, Option<String>)>,
}

/// The agent's end of it.
#[derive(Debug)]
pub(super) struct Herald(watch::Sender<Word>);

impl Herald {
    pub fn new() -> (Self, watch::Receiver<Word>) {
        let (sender, receiver) = watch::channel(Word::default());
        (Self(sender), receiver)
    }

    /// A generation, and every older one, is over. Said again it is heard again.
    pub fn end(&self, generation: u64, reason: &str) {
        self.0.send_modify(|word| {
            if word.over.as_ref().is_none_or(|(known, _)| *known < generation) {
                word.over = Some((generation, reason.to_owned()));
            }
        });
    }

    /// The generation of `plan` is to run; an older one that does so is over.
    pub fn go_on(&self, plan: &GroupPlan) {
        let generation = plan.generation;
        let store = plan.span.as_ref().and_then(|span| span.store.clone());
        self.0.send_modify(|word| {
            if word.wanted.as_ref().is_none_or(|(known, _)| *known < generation) {
                word.wanted = Some((generation, store));
            }
        });
        self.end(generation.saturating_sub(1), &format!("generation {generation} is wanted"));
    }
}

impl Group {
    /// Why a generation is over here, where it ended on another host.
    pub(super) fn over_elsewhere(&mut self, generation: u64) -> Option<Cause> {
        if mutant::is_on("deaf_to_other_hosts") {
            return None;
        }
        let word = self.word.borrow_and_update();
        let (_, reason) = word.over.as_ref().filter(|(over, _)| *over >= generation)?;
        Some(Cause::Elsewhere { reason: reason.clone() })
    }

    /// Waits for the generation after `generation`, with its standbys kept. None where it is asked to stop first.
    pub(super) async fn next_wanted(&mut self, generation: u64) -> Option<u64> {
        let mut asked = false;
        loop {
            if self.stop.borrow_and_update().is_some() {
                return None;
            }
            let wanted = self.word.borrow_and_update().wanted.clone().filter(|(next, _)| *next > generation);
            if let (Some((next, store)), Some(span)) = (wanted, self.plan.span.as_mut()) {
                span.store = store;
                return Some(next);
            }
            // Whoever asks for the end of it now does not know that it has ended.
            if let (true, Some(Cause::Elsewhere { reason })) = (asked, self.over_elsewhere(generation)) {
                self.emit(Self::ended_event(self.plan.replica, generation, &reason));
            }
            tokio::select! {
                changed = self.stop.changed() => changed.ok()?,
                changed = self.word.changed() => changed.ok()?,
            }
            asked = true;
        }
    }

    /// Tells once more that a generation has ended, where nothing is left that could be ended.
    pub(super) fn ended_event(replica: u32, generation: u64, reason: &str) -> Event {
        let cause = Cause::Elsewhere { reason: reason.to_owned() };
        Event::GenerationEnded { replica, generation, cause, step: None, never_ran: None }
    }
}

/// What is wrong with the part that a plan names.
pub(super) fn check(plan: &GroupPlan) -> Result<(), String> {
    let Some(span) = &plan.span else { return Ok(()) };
    if span.node >= span.nodes {
        return Err(format!("host {} of a group on {} hosts", span.node, span.nodes));
    }
    if span.first_rank.checked_add(plan.world_size).is_none_or(|end| end > span.ranks) {
        return Err(format!(
            "{} ranks from rank {} on, of a group of {}",
            plan.world_size, span.first_rank, span.ranks
        ));
    }
    if (span.node == 0) != span.store.is_none() {
        return Err(
            "the store of a group is served on its first host, and the others have to know where".into()
        );
    }
    Ok(())
}
