//! Between a session and its agent.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Fault;

/// What a session pauses for that waits for others: where all groups stand still, these are not to blame.
pub const WAITING: &str = "waiting for other replica groups";

/// What a session pauses for that asks for no quorum any more, but has to save its state before it exits.
pub const LEAVING: &str = "leaving the quorum";

/// Session to agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum SessionReport {
    /// A step was committed. Latest wins.
    Committed {
        /// Steps committed.
        step: u64,
        /// Quorum in which it was committed.
        quorum_id: Option<i64>,
        /// Replica groups that took part.
        participants: Option<u32>,
        /// Whatever else was measured.
        #[serde(default)]
        metrics: BTreeMap<String, f64>,
    },
    /// The target step is committed: the rank waits for [`SessionCommand::Release`] and leaves.
    Done {
        /// Steps committed.
        step: u64,
    },
    /// For the next `limit_s` no commit is expected (evaluation, a long save); 0 ends the pause.
    Pause {
        /// Shown in status; [`WAITING`] for a wait, [`LEAVING`] for the last save.
        what: String,
        /// Longest pause.
        limit_s: f64,
    },
}

/// Agent to session.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum SessionCommand {
    /// Finish the step, leave the quorum, exit with code 0 within `grace_s`.
    Drain {
        /// Time left.
        grace_s: f64,
        /// Why.
        reason: String,
        /// The host is about to be taken away: a job that wants so saves its state meanwhile.
        #[serde(default)]
        save: bool,
    },
    /// After a drain before which the state may be saved: whether this group is the one that has to, since no other that
    /// has it stays.
    WhoSaves {
        /// It is.
        is_you: bool,
    },
    /// Carry out a rehearsed fault on yourself ([`Fault::Exit`], [`Fault::Oom`]).
    Inject {
        /// What.
        fault: Fault,
    },
    /// Nobody needs this rank as a donor any more: a rank that reported done may leave.
    Release,
    /// A member of every quorum up to `quorum_id` is dead: cut their collectives and rendezvous loose.
    Dead {
        /// The floor of the push.
        quorum_id: i64,
    },
}
