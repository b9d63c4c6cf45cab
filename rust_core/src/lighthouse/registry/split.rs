//! What the death of a lighthouse may leave: a round of answers of which some arrived and some did not.
//!
//! Whoever got its answer is in a collective with those who did not, and waits there; they ask the next lighthouse,
//! which waits for those in the collective. Nobody is dead, so nothing would end this before the timeout of the process
//! group, tens of seconds. The lighthouse that comes next cannot know what its predecessor has answered, but it sees
//! who asks and who does not.

use std::time::{Duration, Instant};

use tokio::sync::broadcast;

use super::{Gone, Registry, State};
use crate::agent::mutant;

/// From the first ask after a restart to the verdict. Members that commit the same step ask within milliseconds of each
/// other, on busy machines within tens of them. One that is cut before it has committed heals; one that was not in a
/// collective loses nothing, since the next quorum has a new id in any case.
pub(super) const PATIENCE: Duration = Duration::from_millis(200);

/// What is known of the round that a dead lighthouse may have split.
#[derive(Default)]
pub(super) struct Split {
    asked: Option<Instant>,
    told: Option<Gone>,
}

impl Registry {
    /// News of members that leave, from now on; and what holds since before, until the next quorum.
    pub fn subscribe(&self) -> (broadcast::Receiver<Gone>, Option<Gone>) {
        (self.news.subscribe(), self.split.told.clone())
    }

    /// Ends the restored quorum for everyone once some of its members ask and others do not.
    pub(super) fn tell_of_split(&mut self, now: Instant) {
        if self.split_at().is_none_or(|at| now < at) || mutant::is_on("ignore_split") {
            return;
        }
        let missing = self.missing_members();
        if missing.is_empty() {
            return;
        }
        let quorum_id = self.ledger.entry.quorum_id;
        let reason = format!(
            "the lighthouse was restarted, and does not know whom it answered: {}",
            missing.join(", ")
        );
        tracing::info!(quorum_id, reason, "nobody can finish the last quorum");
        let gone = Gone { quorum_id, reason };
        self.split.told = Some(gone.clone());
        // nobody listens: whoever dials hears it then
        let _ = self.news.send(gone);
    }

    /// Someone asks.
    pub(super) fn note_ask(&mut self, now: Instant) {
        if self.state.restored {
            self.split.asked.get_or_insert(now);
        }
    }

    /// When the verdict is due; none where it was given, or nothing is to be judged.
    pub(super) fn split_at(&self) -> Option<Instant> {
        let open = self.state.restored && self.split.told.is_none();
        self.split.asked.filter(|_| open).map(|at| at + PATIENCE)
    }

    /// Members of the last quorum that have neither left nor asked.
    fn missing_members(&self) -> Vec<String> {
        let State { previous, asks, .. } = &self.state;
        let missing =
            previous.iter().filter(|member| member.gone.is_none() && !asks.contains_key(&member.id));
        missing.map(|member| member.id.clone()).collect()
    }
}
