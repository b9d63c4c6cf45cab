//! Processes of other hosts that messages without an answer did not reach: whoever sends the next one is told.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::shared::locked;

/// More are not remembered: each is a process that is dead.
const MOST: usize = 4096;

/// What is known of them, by address.
#[derive(Debug, Default)]
pub(super) struct Undelivered {
    any: AtomicBool,
    why: Mutex<HashMap<String, String>>,
}

impl Undelivered {
    /// A message for the process at `address` was thrown away, or the next one would be.
    pub(super) fn put(&self, address: String, reason: &str) {
        let mut why = locked(&self.why);
        if why.len() < MOST || why.contains_key(&address) {
            why.insert(address, reason.to_owned());
            self.any.store(true, Ordering::SeqCst);
        }
    }

    /// Why the process at `address` was not reached. It is told once: another process may have its place by now.
    pub(super) fn take(&self, address: &str) -> Option<String> {
        // Looked at for each message to another host.
        if !self.any.load(Ordering::SeqCst) {
            return None;
        }
        let mut why = locked(&self.why);
        let found = why.remove(address);
        self.any.store(!why.is_empty(), Ordering::SeqCst);
        found
    }
}
