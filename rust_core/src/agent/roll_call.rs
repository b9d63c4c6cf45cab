//! One roll-call of all groups of this host, where one of them commits nothing any more: who hangs, and who waits for
//! those. Pure: the caller brings the time.
//!
//! A group that hangs holds up all others, and after a while all of them may exceed their limits together. So the first
//! that does calls the roll; each group answers in its next look. Those that hang are ended, all at once: one after the
//! other, each in a window of its own, would take as many windows. Those that wait for others are left alone. Where
//! none can be told apart (all hang, or all have waited for longer than any wait may take), all are ended, once; what
//! comes after that is up to the budget of each.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use super::mutant;

/// What a group that does not answer is waited for: its task is busy with its end.
const LISTEN: Duration = Duration::from_secs(1);
/// Who has used up so much of its limit when another one calls the roll hangs as well: groups that train together have
/// committed their last step at about the same time.
pub const NEARLY: f64 = 0.75;

/// What a group says of itself. The worst comes last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Answer {
    /// It is within its limit, or in a pause or a wait that is not over.
    #[default]
    Well,
    /// It is at its limit, and the last that it said is that it waits for others.
    Waits,
    /// It is at its limit.
    Hangs,
}

/// What a group hears when all have answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sentence {
    /// It is to be ended; else, where it is at its limit, it gets a fresh window.
    pub ends: bool,
    /// Told once, where more than one group is at its limit: who answered what.
    pub protocol: Option<String>,
}

/// The roll of the live groups, and whether it is being called.
#[derive(Debug, Default)]
pub struct RollCall {
    present: BTreeSet<u32>,
    open: Option<Open>,
    ends: BTreeMap<u32, bool>,
}

#[derive(Debug)]
struct Open {
    until: Instant,
    answers: BTreeMap<u32, Answer>,
}

impl RollCall {
    /// A generation of the group is live: it will answer.
    pub fn enter(&mut self, replica: u32) {
        self.present.insert(replica);
    }

    /// It is not any more.
    pub fn leave(&mut self, replica: u32) {
        self.present.remove(&replica);
        self.ends.remove(&replica);
        if let Some(open) = &mut self.open {
            open.answers.remove(&replica);
        }
    }

    /// A group looks, says how it is, and calls the roll where it exceeds its limit. Hears what follows, once.
    pub fn look(&mut self, now: Instant, replica: u32, answer: Answer, calls: bool) -> Option<Sentence> {
        if let Some(ends) = self.ends.remove(&replica) {
            return Some(Sentence { ends, protocol: None });
        }
        if calls && self.open.is_none() {
            self.open = Some(Open { until: now + LISTEN, answers: BTreeMap::new() });
        }
        let open = self.open.as_mut()?;
        open.answers.insert(replica, answer);
        if now < open.until && !self.present.iter().all(|one| open.answers.contains_key(one)) {
            return None;
        }
        let answers = self.open.take()?.answers;
        self.ends = judge(&answers);
        let protocol = self.protocol(&answers);
        Some(Sentence { ends: self.ends.remove(&replica)?, protocol })
    }

    fn protocol(&self, answers: &BTreeMap<u32, Answer>) -> Option<String> {
        let who = |wanted: Answer| {
            let said = answers.iter().filter(|(_, answer)| **answer == wanted);
            said.map(|(replica, _)| *replica).collect::<Vec<u32>>()
        };
        let (hang, wait) = (who(Answer::Hangs), who(Answer::Waits));
        let ended: Vec<u32> = self.ends.iter().filter(|(_, ends)| **ends).map(|(one, _)| *one).collect();
        (hang.len() + wait.len() > 1).then(|| {
            format!(
                "roll-call: replicas {hang:?} hang, {wait:?} wait for others; {ended:?} are restarted at once"
            )
        })
    }
}

/// Whom of those that answered to end.
fn judge(answers: &BTreeMap<u32, Answer>) -> BTreeMap<u32, bool> {
    let worst = answers.values().copied().max().unwrap_or_default();
    let mut ends: BTreeMap<u32, bool> = answers
        .iter()
        .map(|(replica, answer)| {
            let guilty = if mutant::is_on("blame_all") { *answer >= Answer::Waits } else { *answer == worst };
            (*replica, guilty && worst > Answer::Well)
        })
        .collect();
    if mutant::is_on("one_by_one") {
        ends.values_mut().filter(|ends| **ends).skip(1).for_each(|ends| *ends = false);
    }
    ends
}

#[cfg(test)]
mod tests {
    use super::Answer::{Hangs, Waits, Well};
    use super::*;

    /// Who is ended where all answer at once, the first of them having called.
    fn ended(answers: &[Answer]) -> Vec<u32> {
        let (mut roll, now) = (RollCall::default(), Instant::now());
        let replicas = 0..u32::try_from(answers.len()).expect("few");
        replicas.clone().for_each(|replica| roll.enter(replica));
        let mut heard = BTreeMap::new();
        for _ in 0..2 {
            for (replica, answer) in replicas.clone().zip(answers) {
                if let Some(sentence) = roll.look(now, replica, *answer, replica == 0) {
                    heard.entry(replica).or_insert(sentence.ends);
                }
            }
        }
        assert_eq!(heard.len(), answers.len(), "each hears what follows");
        heard.into_iter().filter(|(_, ends)| *ends).map(|(replica, _)| replica).collect()
    }

    #[test]
    fn who_hangs_is_ended_and_who_waits_for_it_is_not() {
        assert_eq!(ended(&[Hangs, Well, Well]), [0]);
        assert_eq!(ended(&[Waits, Hangs, Waits]), [1], "whoever called");
        assert_eq!(ended(&[Hangs, Waits, Hangs, Well]), [0, 2], "all that hang, at once");
        assert_eq!(ended(&[Waits, Well]), [0], "a wait that is over is no excuse");
    }

    #[test]
    fn where_none_can_be_told_apart_all_are_ended() {
        assert_eq!(ended(&[Hangs, Hangs, Hangs]), [0, 1, 2]);
        assert_eq!(ended(&[Waits, Waits]), [0, 1]);
    }

    #[test]
    fn a_group_that_does_not_answer_is_waited_for_no_longer_than_a_second() {
        let (mut roll, now) = (RollCall::default(), Instant::now());
        (0..3).for_each(|replica| roll.enter(replica));
        assert_eq!(roll.look(now, 0, Hangs, true), None);
        assert_eq!(roll.look(now, 1, Well, false), None);
        roll.leave(1);
        let sentence = roll.look(now + LISTEN, 0, Hangs, true).expect("the roll was called");
        assert_eq!(sentence, Sentence { ends: true, protocol: None });
        assert_eq!(roll.look(now + LISTEN, 2, Well, false), None, "it is over");
    }

    #[test]
    fn nobody_is_asked_where_nobody_calls_and_what_was_said_is_told_once() {
        let (mut roll, now) = (RollCall::default(), Instant::now());
        (0..2).for_each(|replica| roll.enter(replica));
        assert_eq!(roll.look(now, 0, Hangs, false), None);
        assert_eq!(roll.look(now, 1, Waits, true), None);
        let sentence = roll.look(now, 0, Hangs, true).expect("all have answered");
        let protocol = sentence.protocol.expect("two are at their limit");
        assert!(protocol.contains("[0] hang, [1] wait for others; [0] are restarted"), "{protocol}");
        assert_eq!(roll.look(now, 1, Waits, true), Some(Sentence { ends: false, protocol: None }));
    }
}
