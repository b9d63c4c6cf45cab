//! What the threads of a node share, and wait with: std's.
//!
//! Named here so that a test can run this very code under a scheduler of its own, with thousands of interleavings
//! (`tests/mesh_model.rs`).

pub(super) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
pub(super) use std::sync::{Condvar, Mutex, MutexGuard};
pub(super) use std::thread::{Thread, current, park, park_timeout};

/// Number of this thread, never 0.
pub(super) fn number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local!(static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed));
    NUMBER.with(|number| *number)
}
