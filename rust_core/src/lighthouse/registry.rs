//! Everything the lighthouse knows, and the only place where it changes.
//!
//! No I/O but the ledger, no clock but the `now` that callers pass: requests, evictions and timers come in as method
//! calls under one lock, and each of them ends with a decision of [`quorum_compute`].

mod fencing;
mod returning;
mod silence;
mod split;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use split::Split;
use tokio::sync::{broadcast, oneshot};

use super::identity::Identity;
use super::ledger::{Ledger, MemberEntry};
use super::quorum::{
    Ask, Decision, Departure, FormReason, Options, PreviousMember, State, WaitReason, quorum_compute,
};
use super::refusal::Refusal;
use super::snapshot::{Counters, QuorumRecord, RecordLeft, RecordMember};
use super::stores::Stores;
use crate::agent::mutant;
use crate::torchft::{Quorum, QuorumMember};

/// Quorums remembered with their reasons.
const HISTORY: usize = 256;
/// Evicting this generation evicts the replica group for good: nothing of it is let in again, or waited for.
pub const FOR_GOOD: u64 = u64::MAX;

/// Generations per replica of which the last quorum is remembered.
const HELD_GENERATIONS: usize = 8;

/// News kept for a supervisor that does not read; one that falls further behind is disconnected.
const NEWS: usize = 256;

/// A member of the quorums up to this one is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gone {
    /// Last quorum that held it.
    pub quorum_id: i64,
    /// Who, and how that is known.
    pub reason: String,
}

/// What a waiting replica gets.
pub type Answer = Result<Arc<Quorum>, Refusal>;

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
    /// Of the last quorum; none: each member's own is in it.
    pub(super) store_address: Option<String>,
    stores: Option<Stores>,
    news: broadcast::Sender<Gone>,
    waiters: BTreeMap<String, Waiter>,
    held: BTreeMap<Identity, i64>,
    next_id: i64,
    next_ticket: u64,
    recheck_at: Option<Instant>,
    observed_at: Instant,
    split: Split,
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
            store_address: None,
            stores: None,
            news: broadcast::Sender::new(NEWS),
            waiters: BTreeMap::new(),
            held: BTreeMap::new(),
            next_id: ledger.next_quorum_id(),
            next_ticket: 0,
            recheck_at: None,
            observed_at: now,
            split: Split::default(),
            ledger,
        };
        if let Some(replicas) = registry.ledger.entry.expect {
            registry.options.expect = expected(replicas, &registry.options);
        }
        registry.state.retired = registry.retired();
        for MemberEntry { id, identity } in registry.ledger.entry.members.clone() {
            registry.state.restored = true;
            let evicted =
                identity.is_some_and(|identity| identity.generation < registry.fence_of(identity.replica));
            if !evicted && !mutant::is_on("no_time_after_restart") {
                registry.state.heard.insert(id.clone(), now);
                registry.known.insert(id.clone(), Known { identity, ..Known::default() });
            }
            let gone = evicted.then_some(Departure::Evicted);
            registry.state.previous.push(PreviousMember { id, gone });
            if let Some(identity) = identity {
                registry.held.insert(identity, registry.ledger.entry.quorum_id);
            }
        }
        registry
    }

    /// Gives each quorum from now on a store of its own, where one is ready.
    pub fn serve_stores(&mut self, stores: Stores) {
        self.stores = Some(stores);
    }

    /// When something may change by itself.
    pub fn recheck_at(&self) -> Option<Instant> {
        [self.recheck_at, self.split_at()].into_iter().flatten().min()
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
        let has_store = !requester.store_address.is_empty();
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
        self.note_ask(now);
        self.state.asks.insert(id.clone(), ask);
        if let Some(earlier) = self.waiters.insert(id, Waiter { ticket, requester, reply }) {
            self.refuse(earlier, Refusal::Repeated);
        }
        self.counters.asks += 1;
        if let Some(stores) = self.stores.as_ref().filter(|_| has_store && self.known.len() > 1) {
            stores.want();
        }
        if !self.is_short_of_members() {
            self.decide(now);
        }
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
        if !mutant::is_on("ignore_evict") {
            self.fence(replica, generation.saturating_add(1));
        }
        self.counters.evictions += 1;
        self.decide(now);
        let first = Identity { replica, generation: 0 };
        self.held.range(first..=Identity { replica, generation }).map(|(_, id)| *id).max()
    }

    /// The run has another number of replica groups, those with the lowest numbers: a start waits for so many.
    pub fn expect(&mut self, now: Instant, replicas: u32) {
        self.observe(now);
        self.options.expect = expected(replicas, &self.options);
        if self.ledger.entry.expect != Some(replicas) {
            self.ledger.entry.expect = Some(replicas);
            self.store();
        }
        self.state.retired = self.retired();
        self.decide(now);
    }

    /// Time passed.
    pub fn tick(&mut self, now: Instant) {
        self.observe(now);
        self.decide(now);
        self.forget_ghosts(now);
    }

    fn refuse(&mut self, waiter: Waiter, refusal: Refusal) {
        self.counters.refused(&refusal);
        // a client that is gone needs no answer
        let _ = waiter.reply.send(Err(refusal));
    }

    /// Whether more members of the last quorum are present than have asked: then no ask changes anything, and the whole
    /// decision, which looks at each of them, waits for the last ask, a departure or a timer.
    fn is_short_of_members(&self) -> bool {
        self.state.previous.iter().filter(|member| member.gone.is_none()).count() > self.state.asks.len()
    }

    fn decide(&mut self, now: Instant) {
        self.hear_open_requests(now);
        self.drop_silent(now);
        self.tell_of_split(now);
        let recheck_at = match quorum_compute(now, &self.state, &self.options) {
            Decision::Form { members, new_id, reason } => {
                self.form(now, &members, new_id, &reason);
                self.waiting_for = None;
                None
            }
            Decision::Wait { reason, recheck_at } => {
                if self.waiting_for.as_ref() != Some(&reason) && reason != WaitReason::NobodyAsks {
                    tracing::debug!(%reason, "no quorum yet");
                }
                self.waiting_for = Some(reason);
                recheck_at
            }
        };
        // also while nobody asks: whoever hangs in a collective with the silent one waits for this
        self.recheck_at = [recheck_at, self.next_silence()].into_iter().flatten().min();
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
            self.distrust_returning(&mut participants);
            self.renew(members, &participants, reason);
        }
        if let Some(address) = &self.store_address {
            // a client without a store (a tool, a test) has no use for one
            let with_store = participants.iter_mut().filter(|member| !member.store_address.is_empty());
            with_store.for_each(|member| member.store_address.clone_from(address));
        }
        let quorum_id = self.ledger.entry.quorum_id;
        self.counters.formed(reason);
        for identity in members.iter().filter_map(|id| self.known.get(id)?.identity) {
            self.held.insert(identity, quorum_id);
        }
        self.forget_generations();
        let created = Some(SystemTime::now().into());
        // One copy for all: each answer is made when it is sent, not a thousand of a thousand members under the lock.
        let quorum = Arc::new(Quorum { quorum_id, participants, created });
        for reply in answers {
            // a client that is gone needs no answer: it is missed at the next quorum
            let _ = reply.send(Ok(Arc::clone(&quorum)));
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
        let left = self.left();
        self.ledger.entry.quorum_id = self.next_id;
        self.ledger.entry.members = entries;
        self.next_id += 1;
        self.store_address = self.stores.as_ref().and_then(|stores| stores.take(self.ledger.entry.quorum_id));
        self.store();
        self.state.restored = false;
        self.split = Split::default();
        self.state.previous =
            members.iter().map(|id| PreviousMember { id: id.clone(), gone: None }).collect();
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
            left,
            store_address: self.store_address.clone(),
        });
    }

    /// Members of the last quorum that left it, and why.
    fn left(&self) -> Vec<RecordLeft> {
        let identity_of =
            |id: &str| self.ledger.entry.members.iter().find(|member| member.id == id)?.identity;
        let record = |member: &PreviousMember| {
            let (id, why) = (member.id.clone(), member.gone?.to_string());
            Some(RecordLeft { identity: identity_of(&id), id, why })
        };
        self.state.previous.iter().filter_map(record).collect()
    }

    /// A full disk must not end the run: the wall clock still keeps ids apart, and the supervisor kills what it fences.
    fn store(&mut self) {
        if let Err(error) = self.ledger.store() {
            self.counters.store_failures += 1;
            tracing::error!(%error, "a restart of the lighthouse would not know of this");
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

/// Never fewer than a quorum needs.
fn expected(replicas: u32, options: &Options) -> usize {
    usize::try_from(replicas).unwrap_or(usize::MAX).max(options.min_replicas)
}

#[cfg(test)]
#[path = "registry_tests.rs"]
mod tests;
