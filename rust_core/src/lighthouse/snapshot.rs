//! What the lighthouse shows: one value for `/status.json`, the control channel and `/metrics`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::identity::Identity;
use super::quorum::FormReason;
use super::refusal::Refusal;
use super::registry::Registry;

/// One quorum of the history.
#[derive(Clone, Debug, Serialize)]
pub struct QuorumRecord {
    /// Its id.
    pub quorum_id: i64,
    /// When, in Unix time: for people.
    pub wall_ms: u64,
    /// One word: why.
    pub kind: &'static str,
    /// Why, in words.
    pub reason: String,
    /// Who.
    pub members: Vec<RecordMember>,
    /// Who left the quorum before it.
    pub left: Vec<RecordLeft>,
    /// Its store; none: it had the members' own.
    pub store_address: Option<String>,
}

/// One member that left.
#[derive(Clone, Debug, Serialize)]
pub struct RecordLeft {
    /// Wire id.
    pub id: String,
    /// Who that was, where known.
    #[serde(flatten)]
    pub identity: Option<Identity>,
    /// `evicted`, or `silent` and how long.
    pub why: String,
}

/// One member of a quorum in the history.
#[derive(Clone, Debug, Serialize)]
pub struct RecordMember {
    /// Wire id.
    pub id: String,
    /// Who that is, where known.
    #[serde(flatten)]
    pub identity: Option<Identity>,
    /// Step at which it came in.
    pub step: i64,
}

/// Counts since the start of the process.
#[derive(Clone, Debug, Serialize)]
pub struct Counters {
    /// Heartbeats accepted.
    pub heartbeats: u64,
    /// Quorum requests accepted.
    pub asks: u64,
    /// Requests whose client left or whose deadline passed.
    pub withdrawn: u64,
    /// Evictions told by a supervisor.
    pub evictions: u64,
    /// Times this process found itself stopped or starved.
    pub pauses: u64,
    /// Writes of the state file that failed.
    pub store_failures: u64,
    /// Members that left their quorum, by reason: `evicted` (told), `silent`.
    pub drops: BTreeMap<&'static str, u64>,
    /// Quorums by reason.
    pub quorums: BTreeMap<&'static str, u64>,
    /// Refusals by reason.
    pub refusals: BTreeMap<&'static str, u64>,
    /// Time that answered requests waited, seconds.
    pub wait_s: f64,
    /// Requests answered with a quorum.
    pub answered: u64,
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            heartbeats: 0,
            asks: 0,
            withdrawn: 0,
            evictions: 0,
            pauses: 0,
            store_failures: 0,
            drops: [("evicted", 0), ("silent", 0)].into(),
            quorums: BTreeMap::new(),
            refusals: BTreeMap::new(),
            wait_s: 0.0,
            answered: 0,
        }
    }
}

impl Counters {
    pub(super) fn refused(&mut self, refusal: &Refusal) {
        *self.refusals.entry(refusal.kind()).or_default() += 1;
    }

    pub(super) fn formed(&mut self, reason: &FormReason) {
        *self.quorums.entry(reason.kind()).or_default() += 1;
    }

    pub(super) fn waited(&mut self, waited: Duration) {
        self.wait_s += waited.as_secs_f64();
        self.answered += 1;
    }
}

/// One live replica.
#[derive(Clone, Debug, Serialize)]
pub struct Replica {
    /// Wire id.
    pub id: String,
    /// Who that is, where known.
    #[serde(flatten)]
    pub identity: Option<Identity>,
    /// Step it last asked with; none: it has not asked yet.
    pub step: Option<i64>,
    /// It waits for a quorum.
    pub asking: bool,
    /// Time since it last waited for a quorum, seconds: 0 while it does; none: it never has.
    pub idle_s: Option<f64>,
    /// It is in the last quorum.
    pub in_quorum: bool,
    /// Time since it was last heard of, seconds.
    pub silent_s: f64,
}

/// Everything at one moment.
#[derive(Clone, Debug, Serialize)]
pub struct Snapshot {
    /// Last quorum id given out by this process or its predecessors; none before the first.
    pub quorum_id: Option<i64>,
    /// Store of the last quorum; none: it has the members' own, or it lost a member and its store is closed.
    pub store_address: Option<String>,
    /// Members of the last quorum that were not dropped since.
    pub participants: usize,
    /// What the next quorum waits for; none right after one was formed.
    pub waiting_for: Option<String>,
    /// Live replicas, sorted by wire id. The dead are never listed.
    pub replicas: Vec<Replica>,
    /// Lowest generation let in, by replica.
    pub fences: BTreeMap<u32, u64>,
    /// Quorums with a new id, oldest first; bounded.
    pub history: Vec<QuorumRecord>,
    /// Counts.
    pub counters: Counters,
    /// The rules' knobs.
    pub options: ShownOptions,
}

/// The rules' knobs, as shown.
#[derive(Clone, Debug, Serialize)]
pub struct ShownOptions {
    min_replicas: usize,
    expect: usize,
    join_timeout_s: f64,
    heartbeat_timeout_s: f64,
}

impl Registry {
    /// What there is to see at `now`.
    pub fn snapshot(&self, now: Instant) -> Snapshot {
        let replicas: Vec<Replica> = self
            .known
            .iter()
            .filter(|(id, _)| self.state.is_alive(id, now, &self.options))
            .map(|(id, known)| Replica {
                id: id.clone(),
                identity: known.identity,
                step: known.step,
                asking: self.state.asks.contains_key(id),
                idle_s: if self.state.asks.contains_key(id) {
                    Some(0.0)
                } else {
                    known.answered.map(|at| now.saturating_duration_since(at).as_secs_f64())
                },
                in_quorum: self.state.was_in(id),
                silent_s: self
                    .state
                    .heard
                    .get(id)
                    .map_or(0.0, |at| now.saturating_duration_since(*at).as_secs_f64()),
            })
            .collect();
        let quorum_id = self.ledger.entry.quorum_id;
        Snapshot {
            quorum_id: (quorum_id > 0).then_some(quorum_id),
            store_address: self.store_address.clone(),
            participants: replicas.iter().filter(|replica| replica.in_quorum).count(),
            waiting_for: self.waiting_for.as_ref().map(ToString::to_string),
            replicas,
            fences: self.ledger.entry.fences.clone(),
            history: self.history.iter().cloned().collect(),
            counters: self.counters.clone(),
            options: ShownOptions {
                min_replicas: self.options.min_replicas,
                expect: self.options.expect,
                join_timeout_s: self.options.join_timeout.as_secs_f64(),
                heartbeat_timeout_s: self.options.heartbeat_timeout.as_secs_f64(),
            },
        }
    }
}
