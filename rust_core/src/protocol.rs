//! What agent, controller and session say to each other.
//!
//! ```text
//!  session ──Hello(Session), Report/Done──▶ agent ──Hello(Agent), Event/Progress──▶ controller
//!  session ◀──Drain/Inject/Release───────── agent ◀──StartGroup/StopGroup/Ack────── controller
//! ```
//!
//! Every value travels as one msgpack map with named fields in a frame of [`crate::wire`]. Unknown fields are
//! ignored and missing ones take their default, so that a newer peer may add fields; [`VERSION`] changes when a
//! meaning does. Durations are seconds (`_s`), instants are nanoseconds of `CLOCK_MONOTONIC` (`_ns`), which all
//! processes of one host share; `wall_ms` (Unix time) is for people only and never subtracted.

mod command;
mod report;
mod session;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use command::*;
pub use report::*;
pub use session::*;

/// Version of the meanings in this file. Peers of different versions refuse each other, naming both.
pub const VERSION: u32 = 1;

/// How a reason begins that is for good: another agent has taken this one's place.
pub const FENCED: &str = "fenced:";

/// The name that an agent's certificate holds: each attempt at a host has one of its own, so that a host which was
/// given up and comes back cannot speak for the one that was provisioned in its place.
pub fn certificate_name(host: &str, attempt: u32) -> String {
    if attempt == 0 { host.to_owned() } else { format!("{host}-a{attempt}") }
}

/// A place for one process: which rank of which replica group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Slot {
    /// Replica group, `0..replicas`.
    pub replica: u32,
    /// Rank inside the group, `0..world_size`.
    pub rank: u32,
}

/// First frame on every connection, sent by the side that dials; answered by [`Welcome`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`] of the dialling side.
    pub version: u32,
    /// The run that the dialling side belongs to.
    pub run_id: String,
    /// Secret of the run: the accepting side drops the connection where it differs.
    pub token: String,
    /// Who dials.
    pub peer: Peer,
}

/// Who dials, with what only that kind of peer can say.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum Peer {
    /// A host's agent, dialling the controller.
    Agent {
        /// Name of the host, unique in the run.
        host: String,
        /// How often this host had been provisioned when the agent was started; 0: never, it is simply there.
        #[serde(default)]
        attempt: u32,
        /// Pid of the agent.
        pid: u32,
        /// Random per agent process: a reconnect keeps it, a restart changes it, and sequence numbers restart.
        incarnation: u64,
        /// What it supervises now: the truth for a controller that has just started.
        groups: Vec<GroupSnapshot>,
        /// Where other agents find out whether they reach this host ([`Command::Probe`]), `address:port`; none: nowhere.
        #[serde(default)]
        probe: Option<String>,
        /// The host is being looked at ([`Event::Examined`]): none of its groups is to start before that is told.
        #[serde(default)]
        examining: bool,
    },
    /// A rank process, dialling its agent.
    Session {
        /// Which process.
        slot: Slot,
        /// Generation it was started as; an older one than the current is refused.
        generation: u64,
        /// Pid of the rank process.
        pid: u32,
        /// Step at which its work is done; none where the script does not know one.
        target_step: Option<u64>,
    },
    /// Whoever evicts, dialling the lighthouse's control channel (`lighthouse::protocol`).
    Supervisor {
        /// Pid of the dialling process.
        pid: u32,
    },
}

/// Answer to [`Hello`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Welcome {
    /// [`VERSION`] of the accepting side.
    pub version: u32,
    /// Why the connection is refused; none when it is accepted.
    pub refused: Option<String>,
}

/// One group as its agent sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupSnapshot {
    /// Replica group.
    pub replica: u32,
    /// Current (or last) generation.
    pub generation: u64,
    /// What the group is doing.
    pub state: GroupState,
    /// Restarts spent inside the current window.
    pub restarts: u32,
    /// Live ranks: pid by rank.
    pub pids: BTreeMap<u32, u32>,
}

/// What a group is doing, as its agent knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupState {
    /// Its host's `setup` runs.
    Setup,
    /// Its ranks are up and have committed nothing yet.
    Starting,
    /// It has committed a step in this generation (or has no session that could say so).
    Running,
    /// Its generation ended; the next one waits for its back-off.
    Restarting,
    /// Asked to stop: its ranks are inside their grace time.
    Stopping,
    /// All its work is done.
    Done,
    /// It spent its restart budget; it is not started again.
    GivenUp,
    /// It was stopped on request.
    Stopped,
}
