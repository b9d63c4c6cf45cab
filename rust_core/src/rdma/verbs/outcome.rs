//! What a completion says, as an error that says what to do.

use crate::gpu::abi::verbs::CompletionStatus;
use crate::{Error, ErrorKind};

pub(super) const MOVE: &str = "move memory by RDMA";

/// Why an operation failed, and whether another way may do it.
#[derive(Debug)]
pub(in crate::rdma) struct Failure {
    pub error: Error,
    /// The fabric failed, not the operation: the same over TCP may well succeed.
    pub fabric: bool,
}

impl Failure {
    /// Of the way between the two.
    pub(super) fn of_fabric(kind: ErrorKind, why: impl Into<String>) -> Self {
        Self { error: Error::new(kind, MOVE, why), fabric: true }
    }
}

/// Of the operation, whatever way it takes.
impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { error, fabric: false }
    }
}

/// The failure that a completion stands for; none where it succeeded. `text` is the library's own.
pub(super) fn failure(status: CompletionStatus, text: &str) -> Option<Failure> {
    let said = format!("{text} ({status:?})");
    let fabric = |kind, why: &str| Some(Failure::of_fabric(kind, format!("{why}: {said}")));
    let final_ = |kind, why: &str| Some(Failure::from(Error::new(kind, MOVE, format!("{why}: {said}"))));
    match status {
        CompletionStatus::SUCCESS => None,
        // The owner has checked range and rights before it gave the key, so the key is what it does not take (any more).
        CompletionStatus::REMOTE_ACCESS | CompletionStatus::REMOTE_INVALID_REQUEST => {
            final_(ErrorKind::Forbidden, "the key of the peer does not allow that, or not any more")
        }
        CompletionStatus::RETRIES_EXCEEDED | CompletionStatus::RECEIVER_NOT_READY => {
            fabric(ErrorKind::Closed, "the peer does not answer: it is dead, or the fabric is")
        }
        // Never the first of a failure: it stands behind another, or the queue pair was in error before.
        CompletionStatus::WORK_REQUEST_FLUSHED => {
            fabric(ErrorKind::Closed, "the queue pair had failed before")
        }
        CompletionStatus::LOCAL_PROTECTION | CompletionStatus::LOCAL_LENGTH => {
            fabric(ErrorKind::Io, "the device does not take what it was given here")
        }
        _ => fabric(ErrorKind::Io, "the device failed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_status_says_whether_the_peer_the_key_or_the_fabric_failed() {
        assert!(failure(CompletionStatus::SUCCESS, "").is_none());
        let cases = [
            (CompletionStatus::REMOTE_ACCESS, ErrorKind::Forbidden, false),
            (CompletionStatus::REMOTE_INVALID_REQUEST, ErrorKind::Forbidden, false),
            (CompletionStatus::RETRIES_EXCEEDED, ErrorKind::Closed, true),
            (CompletionStatus::RECEIVER_NOT_READY, ErrorKind::Closed, true),
            (CompletionStatus::WORK_REQUEST_FLUSHED, ErrorKind::Closed, true),
            (CompletionStatus::LOCAL_PROTECTION, ErrorKind::Io, true),
            (CompletionStatus(4711), ErrorKind::Io, true),
        ];
        for (status, kind, fabric) in cases {
            let failed = failure(status, "its text").expect("a failure");
            assert_eq!((failed.error.kind(), failed.fabric), (kind, fabric), "{status:?}");
            assert!(failed.error.to_string().contains("its text"), "{}", failed.error);
        }
    }
}
