//! What threads share and wait with, under the simulated scheduler. Time does not pass there: a nap is over at once.

use std::time::Duration;

pub use shuttle::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
pub use shuttle::sync::{Condvar, Mutex, MutexGuard};
pub use shuttle::thread::{Thread, current, park};

/// Sleeps until it is woken, or just for a while.
pub fn park_timeout(_limit: Duration) {
    shuttle::thread::yield_now();
}

/// Number of this thread, never 0.
pub fn number() -> u64 {
    usize::from(current().id()) as u64 + 1
}
