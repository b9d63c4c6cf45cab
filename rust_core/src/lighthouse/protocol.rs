//! What a supervisor and the lighthouse say to each other, on the framed channel.
//!
//! The supervisor dials as [`crate::protocol::Peer::Supervisor`]; each request gets one answer with its `seq`.

use serde::{Deserialize, Serialize};

/// Supervisor to lighthouse.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LighthouseRequest {
    /// Repeated in the answer.
    pub seq: u64,
    /// What is wanted.
    pub command: LighthouseCommand,
}

/// What a supervisor may want. Every command may be repeated without harm.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum LighthouseCommand {
    /// Every generation of `replica` up to `generation` is over: it leaves the quorum now and is never let in again.
    Evict {
        /// Replica group.
        replica: u32,
        /// Newest generation that is over.
        generation: u64,
    },
    /// The run has another number of replica groups: a start waits for so many, also after a restart.
    Expect {
        /// How many: those with the lowest numbers.
        replicas: u32,
    },
    /// Everything the lighthouse knows.
    State,
}

/// Lighthouse to supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LighthouseAnswer {
    /// [`LighthouseRequest::seq`].
    pub seq: u64,
    /// What came of it.
    pub reply: LighthouseReply,
}

/// What came of a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum LighthouseReply {
    /// The fence is up and written down.
    Evicted {
        /// Last quorum that held one of the evicted generations; none: no quorum did.
        quorum_id: Option<i64>,
    },
    /// A start waits for so many from now on, and that is written down.
    Expected,
    /// The snapshot of `/status.json`, as JSON text.
    State {
        /// The text.
        json: String,
    },
    /// Unasked, with a `seq` of 0, to every supervisor: a member of the quorums up to this one is gone, so nothing that
    /// they do together can succeed any more.
    Gone {
        /// Last quorum that held it.
        quorum_id: i64,
        /// Who, and how that is known.
        reason: String,
    },
    /// The command could not be carried out.
    Failed {
        /// Why.
        reason: String,
    },
}
