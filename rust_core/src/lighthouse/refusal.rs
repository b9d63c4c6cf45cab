//! Why the lighthouse says no, and as which gRPC status.

use std::fmt;

use tonic::{Code, Status};

use super::identity::Identity;

/// Longest wire id that is accepted, bytes.
pub const MAX_ID_BYTES: usize = 512;

/// Replicas known at one time; beyond it newcomers are refused.
pub const MAX_REPLICAS: usize = 16_384;

/// An answer other than a quorum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The request cannot be used.
    Malformed(&'static str),
    /// The generation was evicted, or a newer one has asked.
    Fenced {
        /// Who asks.
        identity: Identity,
        /// Lowest generation let in.
        fence: u64,
    },
    /// Another live process has the same replica and generation.
    SecondCopy {
        /// Who both claim to be.
        identity: Identity,
        /// Wire id of the one that was first.
        holder: String,
    },
    /// The wire id belongs to somebody else.
    TakenId,
    /// The same replica asked again; only its newest request is answered.
    Repeated,
    /// Too many replicas at once.
    Full,
}

impl Refusal {
    /// Stable one-word name, for metrics.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Malformed(_) => "malformed",
            Self::Fenced { .. } => "fenced",
            Self::SecondCopy { .. } => "second_copy",
            Self::TakenId => "taken_id",
            Self::Repeated => "repeated",
            Self::Full => "full",
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed(why) => f.write_str(why),
            Self::Fenced { identity, fence } => {
                write!(f, "{identity} is over: generation {fence} is the first let in")
            }
            Self::SecondCopy { identity, holder } => write!(f, "{identity} is live already, as {holder}"),
            Self::TakenId => f.write_str("this replica id belongs to another replica"),
            Self::Repeated => f.write_str("the same replica asked again"),
            Self::Full => write!(f, "{MAX_REPLICAS} replicas are known already"),
        }
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        let code = match &refusal {
            Refusal::Malformed(_) => Code::InvalidArgument,
            Refusal::Fenced { .. } => Code::FailedPrecondition,
            Refusal::SecondCopy { .. } => Code::AlreadyExists,
            Refusal::TakenId => Code::PermissionDenied,
            Refusal::Repeated => Code::Aborted,
            Refusal::Full => Code::ResourceExhausted,
        };
        Self::new(code, refusal.to_string())
    }
}
