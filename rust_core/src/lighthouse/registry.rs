//! Everything the lighthouse knows, and the only place where it changes.
//!
//! No I/O but the ledger, no clock but the `now` that callers pass: requests, evictions and timers come in as method
//! calls under one lock, and each of them ends with a decision of [`quorum_compute`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::oneshot;

use super::identity::Identity;
use super::ledger::{Ledger, MemberEntry};
use super::quorum::{Ask, Decision, FormReason, Options, PreviousMember, State, WaitReason, quorum_compute};
use super::refusal::{MAX_ID_BYTES, MAX_REPLICAS, Refusal};
use super::snapshot::{Counters, QuorumRecord, RecordMember};
use crate::torchft::{Quorum, QuorumMember};

/// Quorums remembered with their reasons.
const HISTORY: usize = 256;
/// Evicting this generation evicts the replica group for good: nothing of it is let in again, or waited for.
pub const FOR_GOOD: u64 = u64::MAX;

/// Generations per replica of which the last quorum is remembered.
const HELD_GENERATIONS: usize = 8;

/// What a waiting replica gets.
pub type Answer = Result<Quorum, Refusal>;

/// One connection, numbered in the order of arrival.
pub type ConnectionId = u64;

/// A request that waits.
struct Waiter {
    ticket: u64,
    requester: QuorumMember,
    reply: oneshot::Sender<Answer>,
}

/// A replica that was heard of.
#[derive(Default)]
pub(super) struct Known {
    pub(super) identity: Option<Identity>,
    pub(super) step: Option<i64>,
    /// When it last got a quorum.
    pub(super) answered: Option<Instant>,
    /// It sends heartbeats: then its silence means something even while it asks.
    beats: bool,
    connections: BTreeSet<ConnectionId>,
}

/// The state of one lighthouse.
pub struct Registry {
    pub(super) options: Options,
    pub(super) state: State,
    pub(super) known: BTreeMap<String, Known>,
    pub(super) ledger: Ledger,
    pub(super) history: VecDeque<QuorumRecord>,
    pub(super) counters: Counters,
    pub(super) waiting_for: Option<WaitReason>,
    waiters: BTreeMap<String, Waiter>,
    held: BTreeMap<Identity, i64>,
    next_id: i64,
    next_ticket: u64,
    recheck_at: Option<Instant>,
    observed_at: Instant,
}

impl Registry {
    /// A lighthouse that goes on where `ledger` ended: members of the last quorum get a whole heartbeat timeout to
    /// be heard of again.
    pub fn new(now: Instant, options: Options, ledger: Ledger) -> Self {
        let mut registry = Self {
            options,
            state: State::default(),
            known: BTreeMap::new(),
            history: VecDeque::new(),
            counters: Counters::default(),
            waiting_for: None,
            waiters: BTreeMap::new(),
            held: BTreeMap::new(),
            next_id: ledger.next_quorum_id(),
            next_ticket: 0,
            recheck_at: None,
            observed_at: now,
            ledger,
        };
        registry.state.retired = retired(&registry.ledger.entry.fences);
        for MemberEntry { id, identity } in registry.ledger.entry.members.clone() {
            registry.state.restored = true;
            let evicted =
                identity.is_some_and(|identity| identity.generation < registry.fence_of(identity.replica));
            if !evicted {
                registry.state.heard.insert(id.clone(), now);
                registry.known.insert(id.clone(), Known { identity, ..Known::default() });
            }
            registry.state.previous.push(PreviousMember { id, evicted });
            if let Some(identity) = identity {
                registry.held.insert(identity, registry.ledger.entry.quorum_id);
            }
        }
        registry
    }

    /// Longest time between two calls of [`Self::tick`]; a longer gap means that this process itself was stopped.
    pub fn tick_interval(&self) -> Duration {
        self.options.heartbeat_timeout / 10
    }

    /// When the decision may change by itself.
    pub const fn recheck_at(&self) -> Option<Instant> {
        self.recheck_at
    }

    /// A replica asks for a quorum. The receiver gets the answer; the ticket is for [`Self::withdraw`].
    pub fn ask(
        &mut self,
        now: Instant,
        connection: ConnectionId,
        identity: Option<Identity>,
        requester: QuorumMember,
    ) -> Result<(u64, oneshot::Receiver<Answer>), Refusal> {
        self.observe(now);
        let id = requester.replica_id.clone();
        self.admit(now, connection, identity, &id).inspect_err(|refusal| self.counters.refused(refusal))?;
        if let Some(identity) = identity {
            // whoever asks is the group now: an older generation that nobody evicted is over
            self.fence(identity.replica, identity.generation);
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let (reply, answer) = oneshot::channel();
        let ask = Ask {
            since: now,
            commit_failed: requester.commit_failures > 0,
            shrink_only: requester.shrink_only,
        };
        if let Some(known) = self.known.get_mut(&id) {
            known.step = Some(requester.step);
        }
        self.state.asks.insert(id.clone(), ask);
        if let Some(earlier) = self.waiters.insert(id, Waiter { ticket, requester, reply }) {
            self.refuse(earlier, Refusal::Repeated);
        }
        self.counters.asks += 1;
        self.decide(now);
        Ok((ticket, answer))
    }

    /// The client of a waiting request is gone, or its deadline passed: the request counts no more.
    pub fn withdraw(&mut self, now: Instant, id: &str, ticket: u64) {
        self.observe(now);
        if self.waiters.get(id).is_some_and(|waiter| waiter.ticket == ticket) {
            self.waiters.remove(id);
            self.state.asks.remove(id);
            self.counters.withdrawn += 1;
            self.decide(now);
        }
    }

    /// A sign of life.
    pub fn heartbeat(
        &mut self,
        now: Instant,
        connection: ConnectionId,
        identity: Option<Identity>,
        id: &str,
    ) -> Result<(), Refusal> {
        self.observe(now);
        let revived = self.state.asks.contains_key(id) && !self.state.is_alive(id, now, &self.options);
        self.admit(now, connection, identity, id).inspect_err(|refusal| self.counters.refused(refusal))?;
        self.counters.heartbeats += 1;
        if let Some(known) = self.known.get_mut(id) {
            known.beats = true;
        }
        if revived {
            self.decide(now);
        }
        Ok(())
    }

    /// The supervisor ended every generation of `replica` up to `generation`: they leave now and never come back.
    ///
    /// Returns the last quorum that held one of them.
    pub fn evict(&mut self, now: Instant, replica: u32, generation: u64) -> Option<i64> {
        self.observe(now);
        self.fence(replica, generation.saturating_add(1));
        self.counters.evictions += 1;
        self.decide(now);
        let first = Identity { replica, generation: 0 };
        self.held.range(first..=Identity { replica, generation }).map(|(_, id)| *id).max()
    }

    /// A connection is closed: it carries no replica any more.
    pub fn disconnected(&mut self, connection: ConnectionId) {
        for known in self.known.values_mut() {
            known.connections.remove(&connection);
        }
    }

    /// Time passed.
    pub fn tick(&mut self, now: Instant) {
        self.observe(now);
        self.decide(now);
        self.forget_ghosts(now);
    }

    /// A gap in our own calls was our own pause (or starvation), in which nobody could be heard: it counts for nobody.
    fn observe(&mut self, now: Instant) {
        let gap = now.saturating_duration_since(self.observed_at);
        if gap > self.tick_interval() * 2 {
            self.state.heard.values_mut().for_each(|at| *at += gap);
            self.counters.pauses += 1;
        }
        self.observed_at = now;
    }

    /// Lets `id` in and notes that it lives, or says why not.
    fn admit(
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
    fn fence_of(&self, replica: u32) -> u64 {
        self.ledger.entry.fences.get(&replica).copied().unwrap_or(0)
    }

    /// Raises the fence of `replica` to `fence`, for good, and drops whoever is below.
    fn fence(&mut self, replica: u32, fence: u64) {
        if self.fence_of(replica) >= fence {
            return;
        }
        self.ledger.entry.fences.insert(replica, fence);
        self.state.retired = retired(&self.ledger.entry.fences);
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

    fn drop_replica(&mut self, id: &str, identity: Identity, fence: u64) {
        self.known.remove(id);
        self.state.heard.remove(id);
        self.state.asks.remove(id);
        self.state
            .previous
            .iter_mut()
            .filter(|member| member.id == id)
            .for_each(|member| member.evicted = true);
        if let Some(waiter) = self.waiters.remove(id) {
            self.refuse(waiter, Refusal::Fenced { identity, fence });
        }
    }

    fn refuse(&mut self, waiter: Waiter, refusal: Refusal) {
        self.counters.refused(&refusal);
        // a client that is gone needs no answer
        let _ = waiter.reply.send(Err(refusal));
    }

    /// Clients that never heartbeat (scripts, tools) live as long as their request is open.
    fn hear_open_requests(&mut self, now: Instant) {
        for id in self.state.asks.keys() {
            if self.known.get(id).is_some_and(|known| !known.beats) {
                self.state.heard.insert(id.clone(), now);
            }
        }
    }

    fn decide(&mut self, now: Instant) {
        self.hear_open_requests(now);
        match quorum_compute(now, &self.state, &self.options) {
            Decision::Form { members, new_id, reason } => {
                self.form(now, &members, new_id, &reason);
                self.waiting_for = None;
                self.recheck_at = None;
            }
            Decision::Wait { reason, recheck_at } => {
                if self.waiting_for.as_ref() != Some(&reason) && reason != WaitReason::NobodyAsks {
                    tracing::debug!(%reason, "no quorum yet");
                }
                self.waiting_for = Some(reason);
                self.recheck_at = recheck_at;
            }
        }
    }

    fn form(&mut self, now: Instant, members: &[String], new_id: bool, reason: &FormReason) {
        let mut participants = Vec::with_capacity(members.len());
        let mut answers = Vec::with_capacity(members.len());
        for id in members {
            let waited = self
                .state
                .asks
                .remove(id)
                .map_or(Duration::ZERO, |ask| now.saturating_duration_since(ask.since));
            self.counters.waited(waited);
            // every ask has its waiter; a member without one could not be answered and must not be listed
            let Some(Waiter { requester, reply, .. }) = self.waiters.remove(id) else { continue };
            if let Some(known) = self.known.get_mut(id) {
                known.answered = Some(now);
            }
            participants.push(requester);
            answers.push(reply);
        }
        if new_id {
            self.renew(members, &participants, reason);
        }
        let quorum_id = self.ledger.entry.quorum_id;
        self.counters.formed(reason);
        for identity in members.iter().filter_map(|id| self.known.get(id)?.identity) {
            self.held.insert(identity, quorum_id);
        }
        self.forget_generations();
        let created = Some(SystemTime::now().into());
        let quorum = Quorum { quorum_id, participants, created };
        for reply in answers {
            // a client that is gone needs no answer: it is missed at the next quorum
            let _ = reply.send(Ok(quorum.clone()));
        }
    }

    /// Starts the next quorum id, durable before anybody hears of it.
    fn renew(&mut self, members: &[String], participants: &[QuorumMember], reason: &FormReason) {
        let identity = |id: &String| self.known.get(id).and_then(|known| known.identity);
        let entries =
            members.iter().map(|id| MemberEntry { id: id.clone(), identity: identity(id) }).collect();
        let listed = participants
            .iter()
            .map(|member| RecordMember {
                id: member.replica_id.clone(),
                identity: identity(&member.replica_id),
                step: member.step,
            })
            .collect();
        self.ledger.entry.quorum_id = self.next_id;
        self.ledger.entry.members = entries;
        self.next_id += 1;
        self.store();
        self.state.restored = false;
        self.state.previous =
            members.iter().map(|id| PreviousMember { id: id.clone(), evicted: false }).collect();
        let wall_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
        let quorum_id = self.ledger.entry.quorum_id;
        tracing::info!(quorum_id, members = members.len(), %reason, "quorum");
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(QuorumRecord {
            quorum_id,
            wall_ms: u64::try_from(wall_ms).unwrap_or(u64::MAX),
            kind: reason.kind(),
            reason: reason.to_string(),
            members: listed,
        });
    }

    /// A full disk must not end the run: the wall clock still keeps ids apart, and the supervisor kills what it fences.
    fn store(&mut self) {
        if let Err(error) = self.ledger.store() {
            self.counters.store_failures += 1;
            tracing::error!(%error, "a restart of the lighthouse would not know of this");
        }
    }

    /// Drops what is silent, neither asks nor was in the last quorum: nothing refers to it, and no list shows it.
    fn forget_ghosts(&mut self, now: Instant) {
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

    fn forget_generations(&mut self) {
        let mut of_replica = BTreeMap::<u32, usize>::new();
        let newest_first = self.held.keys().rev().copied().collect::<Vec<_>>();
        for identity in newest_first {
            let count = of_replica.entry(identity.replica).or_default();
            *count += 1;
            if *count > HELD_GENERATIONS {
                self.held.remove(&identity);
            }
        }
    }
}

fn retired(fences: &BTreeMap<u32, u64>) -> usize {
    fences.values().filter(|fence| **fence == FOR_GOOD).count()
}

#[cfg(test)]
#[path = "registry_tests.rs"]
mod tests;
