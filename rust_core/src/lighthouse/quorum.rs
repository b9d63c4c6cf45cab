//! Who forms the next quorum, and why: a pure function of time, state and options.
//!
//! The supervisor tells the lighthouse of deaths, so there is no guessing here: whoever was in the last quorum and is
//! neither evicted nor silent is waited for; a newcomer counts from the moment it asks (one that only heartbeats, such
//! as a standby, holds nobody up). There is no majority rule: one lighthouse per run, told by the agents, is the authority.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// The rules' knobs.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Never form a quorum of fewer members; at least 1.
    pub min_replicas: usize,
    /// Askers that a start does not wait beyond; at least `min_replicas`.
    pub expect: usize,
    /// Longest wait of a start for the expected askers, from the first asker on.
    pub join_timeout: Duration,
    /// Silence after which a replica counts as gone, told or not.
    pub heartbeat_timeout: Duration,
}

/// One replica that waits for a quorum.
#[derive(Clone, Debug)]
pub struct Ask {
    /// When it asked.
    pub since: Instant,
    /// Its last commit failed: its collectives need a fresh quorum id even where the members stay.
    pub commit_failed: bool,
    /// It wants no newcomers in this quorum.
    pub shrink_only: bool,
}

/// One member of the last quorum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreviousMember {
    /// Wire id.
    pub id: String,
    /// It left since, and why; whoever asks again is a newcomer.
    pub gone: Option<Departure>,
}

/// Why a member left the quorum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Departure {
    /// The supervisor (or a newer generation) ended it.
    Evicted,
    /// Nothing was heard of it for this long; it may come back.
    Silent(Duration),
}

impl Departure {
    /// Stable one-word name, for metrics.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Evicted => "evicted",
            Self::Silent(_) => "silent",
        }
    }
}

impl fmt::Display for Departure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Evicted => f.write_str("evicted"),
            Self::Silent(time) => write!(f, "silent {:.1} s", time.as_secs_f64()),
        }
    }
}

/// Everything a decision depends on. What is evicted has left `asks` and `heard` already.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// Waiting replicas by wire id.
    pub asks: BTreeMap<String, Ask>,
    /// When each replica was last heard of, by wire id.
    pub heard: BTreeMap<String, Instant>,
    /// The last quorum, sorted by id; empty before the first.
    pub previous: Vec<PreviousMember>,
    /// `previous` is what an earlier lighthouse process left behind: its id is not carried on, members or not.
    pub restored: bool,
    /// Replica groups that were evicted for good: a start does not wait for them.
    pub retired: usize,
}

impl State {
    /// Whether `id` was heard of recently enough to count.
    pub fn is_alive(&self, id: &str, now: Instant, options: &Options) -> bool {
        self.heard.get(id).is_some_and(|at| now.saturating_duration_since(*at) < options.heartbeat_timeout)
    }

    /// How long `id` has been silent; one that was never heard of, for as long as it takes to be dropped.
    pub fn silence_of(&self, id: &str, now: Instant, options: &Options) -> Duration {
        let heard = self.heard.get(id).map(|at| now.saturating_duration_since(*at));
        heard.unwrap_or(options.heartbeat_timeout)
    }

    /// Whether `id` was in the last quorum and has not left it since.
    pub fn was_in(&self, id: &str) -> bool {
        let found = self.previous.binary_search_by(|member| member.id.as_str().cmp(id));
        found.is_ok_and(|index| self.previous[index].gone.is_none())
    }
}

/// What to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Answer these replicas.
    Form {
        /// Wire ids, sorted.
        members: Vec<String>,
        /// The members or their collectives changed: the quorum needs an id that was never used.
        new_id: bool,
        /// Why.
        reason: FormReason,
    },
    /// Go on waiting.
    Wait {
        /// What for.
        reason: WaitReason,
        /// When the answer may change without anybody saying anything.
        recheck_at: Option<Instant>,
    },
}

/// Why a quorum was formed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FormReason {
    /// A start: everyone that was waited for has asked.
    Started {
        /// How many that were.
        expected: usize,
    },
    /// A start: the join timeout passed with enough askers.
    JoinTimeout {
        /// Askers.
        asked: usize,
        /// How many were waited for.
        expected: usize,
    },
    /// The same members as before.
    Unchanged,
    /// The same members as before this lighthouse was restarted.
    Restored,
    /// The same members, of which some could not commit.
    CommitFailed {
        /// Wire ids of those.
        failed: Vec<String>,
    },
    /// Members joined or left.
    Changed {
        /// Newcomers.
        joined: Vec<String>,
        /// Left because they were evicted.
        evicted: Vec<String>,
        /// Left because they fell silent, for so long.
        silent: Vec<(String, Duration)>,
    },
}

impl FormReason {
    /// Stable one-word name, for metrics and the history.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Started { .. } => "started",
            Self::JoinTimeout { .. } => "join_timeout",
            Self::Unchanged => "unchanged",
            Self::Restored => "restored",
            Self::CommitFailed { .. } => "commit_failed",
            Self::Changed { .. } => "changed",
        }
    }
}

impl fmt::Display for FormReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Started { expected } => write!(f, "all {expected} expected replicas asked"),
            Self::JoinTimeout { asked, expected } => {
                write!(f, "the join timeout passed with {asked} of {expected} expected replicas")
            }
            Self::Unchanged => write!(f, "same members"),
            Self::Restored => write!(f, "same members; the lighthouse was restarted"),
            Self::CommitFailed { failed } => {
                write!(f, "same members; the last commit failed on {}", failed.join(", "))
            }
            Self::Changed { joined, evicted, silent } => {
                let parts = [("joined", joined), ("evicted", evicted)];
                let told = parts
                    .iter()
                    .filter(|(_, ids)| !ids.is_empty())
                    .map(|(what, ids)| format!("{what}: {}", ids.join(", ")));
                let guessed = silent.iter().map(|(id, time)| format!("{}: {id}", Departure::Silent(*time)));
                let said: Vec<String> = told.chain(guessed).collect();
                write!(f, "{}", said.join("; "))
            }
        }
    }
}

/// What a quorum waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitReason {
    /// Somebody who asks.
    NobodyAsks,
    /// Live members of the last quorum that have not asked.
    MembersMissing {
        /// Their wire ids.
        missing: Vec<String>,
    },
    /// More askers: `min_replicas` is not reached.
    TooFew {
        /// Askers that count.
        asked: usize,
        /// How many it takes.
        min_replicas: usize,
    },
    /// The rest of a start.
    Starting {
        /// Askers that count.
        asked: usize,
        /// How many are waited for until the join timeout.
        expected: usize,
    },
}

impl WaitReason {
    /// Stable one-word name.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::NobodyAsks => "nobody_asks",
            Self::MembersMissing { .. } => "members_missing",
            Self::TooFew { .. } => "too_few",
            Self::Starting { .. } => "starting",
        }
    }
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NobodyAsks => write!(f, "no live replica asks"),
            Self::MembersMissing { missing } => write!(f, "waiting for live members: {}", missing.join(", ")),
            Self::TooFew { asked, min_replicas } => {
                write!(f, "{asked} asked, min_replicas is {min_replicas}")
            }
            Self::Starting { asked, expected } => {
                write!(f, "starting: {asked} of {expected} expected replicas asked")
            }
        }
    }
}

/// Decides whether the replicas that ask form a quorum at `now`.
///
/// - While members of the last quorum live, each of them must have asked; every live asker is in (with a
///   `shrink_only` asker: only those who were in already).
/// - Where none of them lives, it is a start: it waits for `expect` askers (after an earlier quorum: for no more
///   than that one had, since a group that was given up never asks again), or until the join timeout.
/// - Never fewer than `min_replicas`.
pub fn quorum_compute(now: Instant, state: &State, options: &Options) -> Decision {
    let askers: Vec<(&String, &Ask)> =
        state.asks.iter().filter(|(id, _)| state.is_alive(id, now, options)).collect();
    if askers.is_empty() {
        return Decision::Wait { reason: WaitReason::NobodyAsks, recheck_at: None };
    }
    let stayed = |member: &&PreviousMember| member.gone.is_none() && state.is_alive(&member.id, now, options);
    if state.previous.iter().any(|member| stayed(&member)) {
        go_on(now, state, options, askers)
    } else {
        start(now, state, options, &askers)
    }
}

fn go_on(now: Instant, state: &State, options: &Options, mut askers: Vec<(&String, &Ask)>) -> Decision {
    let (mut missing, mut evicted, mut silent, mut recheck_at) = (vec![], vec![], vec![], None::<Instant>);
    for member in &state.previous {
        let silence = match member.gone {
            Some(Departure::Silent(time)) => Some(time),
            Some(Departure::Evicted) => None,
            None => (!state.is_alive(&member.id, now, options))
                .then(|| state.silence_of(&member.id, now, options)),
        };
        if let Some(time) = silence {
            silent.push((member.id.clone(), time));
        } else if member.gone.is_some() {
            evicted.push(member.id.clone());
        } else if !state.asks.contains_key(&member.id) {
            missing.push(member.id.clone());
            let gone_at = state.heard.get(&member.id).map(|at| *at + options.heartbeat_timeout);
            recheck_at = [recheck_at, gone_at].into_iter().flatten().min();
        }
    }
    if !missing.is_empty() {
        return Decision::Wait { reason: WaitReason::MembersMissing { missing }, recheck_at };
    }
    let was_in = |id: &str| state.was_in(id);
    if askers.iter().any(|(_, ask)| ask.shrink_only) {
        askers.retain(|(id, _)| was_in(id));
    }
    if askers.len() < options.min_replicas {
        return too_few(askers.len(), options);
    }
    let members: Vec<String> = askers.iter().map(|(id, _)| (*id).clone()).collect();
    let joined: Vec<String> = members.iter().filter(|id| !was_in(id)).cloned().collect();
    let failed: Vec<String> =
        askers.iter().filter(|(_, ask)| ask.commit_failed).map(|(id, _)| (*id).clone()).collect();
    let reason = if !(joined.is_empty() && evicted.is_empty() && silent.is_empty()) {
        FormReason::Changed { joined, evicted, silent }
    } else if !failed.is_empty() {
        FormReason::CommitFailed { failed }
    } else if state.restored {
        FormReason::Restored
    } else {
        FormReason::Unchanged
    };
    Decision::Form { members, new_id: reason != FormReason::Unchanged, reason }
}

fn start(now: Instant, state: &State, options: &Options, askers: &[(&String, &Ask)]) -> Decision {
    let asked = askers.len();
    if asked < options.min_replicas {
        return too_few(asked, options);
    }
    let wanted = options.expect.saturating_sub(state.retired);
    let expected = match state.previous.len() {
        0 => wanted.max(options.min_replicas),
        last => wanted.min(last).max(options.min_replicas),
    };
    let join_at = askers.iter().map(|(_, ask)| ask.since + options.join_timeout).min();
    let reason = if asked >= expected {
        FormReason::Started { expected }
    } else if join_at.is_some_and(|at| at <= now) {
        FormReason::JoinTimeout { asked, expected }
    } else {
        return Decision::Wait { reason: WaitReason::Starting { asked, expected }, recheck_at: join_at };
    };
    Decision::Form { members: askers.iter().map(|(id, _)| (*id).clone()).collect(), new_id: true, reason }
}

fn too_few(asked: usize, options: &Options) -> Decision {
    let reason = WaitReason::TooFew { asked, min_replicas: options.min_replicas };
    Decision::Wait { reason, recheck_at: None }
}

#[cfg(test)]
#[path = "quorum_tests.rs"]
mod tests;
