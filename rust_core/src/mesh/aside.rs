//! Frames that may leave a moment later, together with those behind them: one system call for many.
//!
//! They leave when a thread of their process waits for something, when there are enough of them, and at the latest when
//! the node's own thread wakes from a nap, which is a millisecond. Only while it naps is anything laid aside.

use std::sync::PoisonError;

use super::sync::{AtomicBool, Mutex, Ordering};

/// How a frame leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Haste {
    /// At once, however much is queued before it.
    AtOnce,
    /// At once; where much is queued already, its sender waits.
    Patient,
    /// The same, or a moment later: nobody can have use for it yet.
    Together,
}

/// Connections on which something was laid aside.
///
/// Who lays something aside adds the connection first and looks at the nap then ([`Lead::naps`](super::lead::Lead::naps));
/// the node's own thread ends its nap first and looks here then. So one of the two writes.
#[derive(Debug)]
pub(super) struct Aside<L> {
    links: Mutex<Vec<L>>,
    some: AtomicBool,
}

impl<L> Aside<L> {
    pub(super) fn new() -> Self {
        Self { links: Mutex::new(Vec::new()), some: AtomicBool::new(false) }
    }

    /// Something is laid aside on `link`, where nothing was before.
    pub(super) fn add(&self, link: L) {
        self.links.lock().unwrap_or_else(PoisonError::into_inner).push(link);
        self.some.store(true, Ordering::SeqCst);
    }

    /// Takes all connections: their frames are to be written.
    pub(super) fn take(&self) -> Vec<L> {
        if !self.some.load(Ordering::SeqCst) {
            return Vec::new();
        }
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        self.some.store(false, Ordering::SeqCst);
        std::mem::take(&mut links)
    }
}
