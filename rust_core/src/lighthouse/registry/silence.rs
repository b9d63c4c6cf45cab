//! Who left the quorum, by silence or told, and whether a silence means anything.

use std::time::{Duration, Instant};

use super::{Gone, Registry};
use crate::agent::mutant;
use crate::lighthouse::quorum::{Departure, State};

impl Registry {
    /// Longest time between two calls of [`Self::tick`]; a much longer gap means that this process itself was stopped.
    pub fn tick_interval(&self) -> Duration {
        self.options.heartbeat_timeout / 20
    }

    /// A gap in our own calls was our own pause (or starvation), in which nobody could be heard: it counts for nobody.
    pub(super) fn observe(&mut self, now: Instant) {
        let gap = now.saturating_duration_since(self.observed_at);
        if gap > self.tick_interval() * 2 && !mutant::is_on("blame_pauses") {
            self.state.heard.values_mut().for_each(|at| *at += gap);
            self.counters.pauses += 1;
            tracing::warn!(
                gap_s = gap.as_secs_f64(),
                "this process was stopped or starved: nobody is blamed for it"
            );
        }
        // callers read the clock before they get the lock: one that was held up must not set it back
        self.observed_at = self.observed_at.max(now);
    }

    /// Clients that never heartbeat (scripts, tools) live as long as their request is open.
    pub(super) fn hear_open_requests(&mut self, now: Instant) {
        for id in self.state.asks.keys() {
            if self.known.get(id).is_some_and(|known| !known.beats) {
                self.state.heard.insert(id.clone(), now);
            }
        }
    }

    /// Members that have been silent for too long leave, until they ask again.
    ///
    /// A closed connection is no sign of anything: a network that drops one, or a proxy that is restarted, would look
    /// like a death; of real ones the supervisor tells sooner.
    pub(super) fn drop_silent(&mut self, now: Instant) {
        if mutant::is_on("never_silent") {
            return;
        }
        let silent: Vec<(String, Duration)> = self
            .state
            .previous
            .iter()
            .filter(|member| member.gone.is_none() && !self.state.is_alive(&member.id, now, &self.options))
            .map(|member| (member.id.clone(), self.state.silence_of(&member.id, now, &self.options)))
            .collect();
        for (id, silence) in silent {
            self.depart(&id, Departure::Silent(silence));
        }
    }

    /// When the next member falls silent if nobody is heard any more.
    pub(super) fn next_silence(&self) -> Option<Instant> {
        let present = self.state.previous.iter().filter(|member| member.gone.is_none());
        let heard = present.filter_map(|member| self.state.heard.get(&member.id)).min();
        heard.map(|at| *at + self.options.heartbeat_timeout)
    }

    /// A member of the last quorum leaves it: what the others do together cannot succeed any more, so its store is
    /// closed and the supervisors hear of it. Once for each member: whoever left already has been told of.
    pub(super) fn depart(&mut self, id: &str, why: Departure) {
        let present = |member: &&mut super::PreviousMember| member.id == id && member.gone.is_none();
        let Some(member) = self.state.previous.iter_mut().find(present) else { return };
        member.gone = Some(why);
        *self.counters.drops.entry(why.kind()).or_default() += 1;
        let quorum_id = self.ledger.entry.quorum_id;
        if let Some(stores) = &self.stores {
            stores.close(quorum_id);
            self.store_address = None;
        }
        tracing::info!(%id, %why, quorum_id, "a member is gone");
        if mutant::is_on("no_news") {
            return;
        }
        // nobody listens: no supervisor is connected
        let _ = self.news.send(Gone { quorum_id, reason: format!("{id}: {why}") });
    }

    /// Drops what is silent, neither asks nor was in the last quorum: nothing refers to it, and no list shows it.
    pub(super) fn forget_ghosts(&mut self, now: Instant) {
        let State { asks, previous, .. } = &self.state;
        let ghosts: Vec<String> = self
            .known
            .keys()
            .filter(|id| !self.state.is_alive(id, now, &self.options) && !asks.contains_key(*id))
            .filter(|id| previous.iter().all(|member| member.id != **id))
            .cloned()
            .collect();
        for id in ghosts {
            self.known.remove(&id);
            self.state.heard.remove(&id);
        }
    }
}
