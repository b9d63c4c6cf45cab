//! Who is let in, and who never again: identities, second copies, fences.

use std::time::Instant;

use super::{ConnectionId, FOR_GOOD, Known, Registry};
use crate::agent::mutant;
use crate::lighthouse::identity::Identity;
use crate::lighthouse::quorum::Departure;
use crate::lighthouse::refusal::{MAX_ID_BYTES, MAX_REPLICAS, Refusal};

impl Registry {
    /// A connection is closed: it carries no replica any more.
    pub fn disconnected(&mut self, connection: ConnectionId) {
        for known in self.known.values_mut() {
            known.connections.remove(&connection);
        }
    }

    /// Lets `id` in and notes that it lives, or says why not.
    pub(super) fn admit(
        &mut self,
        now: Instant,
        connection: ConnectionId,
        identity: Option<Identity>,
        id: &str,
    ) -> Result<(), Refusal> {
        if id.is_empty() || id.len() > MAX_ID_BYTES {
            return Err(Refusal::Malformed("the replica id is empty or too long"));
        }
        if let Some(identity) = identity {
            let fence = self.fence_of(identity.replica);
            if identity.generation < fence {
                return Err(Refusal::Fenced { identity, fence });
            }
            let newer =
                |held: &Identity| held.replica == identity.replica && held.generation < identity.generation;
            match self.known.get(id).map(|known| known.identity) {
                // scripts may keep their replica id over generations: the newer one takes it
                Some(Some(held)) if newer(&held) => self.fence(identity.replica, identity.generation),
                Some(held) if held != Some(identity) => return Err(Refusal::TakenId),
                _ => {}
            }
            if self.known.get(id).is_none_or(|known| known.identity != Some(identity)) {
                self.refuse_second_copy(now, identity, id)?;
            }
        } else if self.known.get(id).is_some_and(|known| known.identity.is_some()) {
            return Err(Refusal::TakenId);
        }
        let fences = &self.ledger.entry.fences;
        let new_replica = identity.is_some_and(|identity| !fences.contains_key(&identity.replica));
        if (self.known.len() >= MAX_REPLICAS && !self.known.contains_key(id))
            || (fences.len() >= MAX_REPLICAS && new_replica)
        {
            return Err(Refusal::Full);
        }
        let known = self.known.entry(id.into()).or_default();
        known.identity = identity;
        known.connections.insert(connection);
        self.state.heard.insert(id.into(), now);
        Ok(())
    }

    /// Two processes of one generation would both vote (TorchFT tells them apart by a random id).
    fn refuse_second_copy(&mut self, now: Instant, identity: Identity, id: &str) -> Result<(), Refusal> {
        if mutant::is_on("let_copies_in") {
            return Ok(());
        }
        let other = |(held, known): &(&String, &Known)| *held != id && known.identity == Some(identity);
        let Some((holder, known)) = self.known.iter().find(other) else { return Ok(()) };
        let holder = holder.clone();
        if !known.connections.is_empty() && self.state.is_alive(&holder, now, &self.options) {
            return Err(Refusal::SecondCopy { identity, holder });
        }
        self.drop_replica(&holder, identity, identity.generation);
        Ok(())
    }

    /// Lowest generation of `replica` let in.
    pub(super) fn fence_of(&self, replica: u32) -> u64 {
        self.ledger.entry.fences.get(&replica).copied().unwrap_or(0)
    }

    /// Raises the fence of `replica` to `fence`, for good, and drops whoever is below.
    pub(super) fn fence(&mut self, replica: u32, fence: u64) {
        if self.fence_of(replica) >= fence {
            return;
        }
        self.ledger.entry.fences.insert(replica, fence);
        self.state.retired = self.retired();
        self.store();
        let below: Vec<(String, Identity)> = self
            .known
            .iter()
            .filter_map(|(id, known)| known.identity.map(|identity| (id.clone(), identity)))
            .filter(|(_, identity)| identity.replica == replica && identity.generation < fence)
            .collect();
        for (id, identity) in below {
            tracing::info!(%id, %identity, fence, "dropped");
            self.drop_replica(&id, identity, fence);
        }
    }

    /// Replica groups that were evicted for good, of those that are expected.
    pub(super) fn retired(&self) -> usize {
        let is_expected = |replica: u32| self.ledger.entry.expect.is_none_or(|replicas| replica < replicas);
        let fences = self.ledger.entry.fences.iter();
        fences.filter(|(replica, fence)| **fence == FOR_GOOD && is_expected(**replica)).count()
    }

    fn drop_replica(&mut self, id: &str, identity: Identity, fence: u64) {
        self.known.remove(id);
        self.state.heard.remove(id);
        self.state.asks.remove(id);
        self.depart(id, Departure::Evicted);
        if let Some(waiter) = self.waiters.remove(id) {
            self.refuse(waiter, Refusal::Fenced { identity, fence });
        }
    }
}
