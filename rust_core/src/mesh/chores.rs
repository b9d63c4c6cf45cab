//! What the node's own thread does beside reading: answers that are held back leave, memory that nobody needs goes back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::link::{After, Link};
use super::memory::Pool;
use super::node::Shared;

/// What is left to do.
#[derive(Debug, Default)]
pub(super) struct Chores {
    /// Connections on which something is held back.
    held: Mutex<Vec<Arc<Link>>>,
    any_held: AtomicBool,
    pub(super) pool: Arc<Pool>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Has `link` sent what it holds back, within a nap of the node's own thread. False where that does not look so soon.
    pub(super) fn hold(&self, link: &Arc<Link>) -> bool {
        locked(&self.chores().held).push(Arc::clone(link));
        self.chores().any_held.store(true, Ordering::SeqCst);
        // It says that it wakes before it looks, so one of the two sees the other.
        self.lead().naps()
    }

    /// Sends what is held back.
    pub(super) fn let_go(&self) {
        if !self.chores().any_held.swap(false, Ordering::SeqCst) {
            return;
        }
        for link in std::mem::take(&mut *locked(&self.chores().held)) {
            if let After::Over(reason) = link.let_go(self) {
                self.lose(&link, &reason);
            }
        }
    }

    /// Does what is due. Returns when to look again; never, where nothing is left to do.
    pub(super) fn do_chores(&self) -> Option<Duration> {
        self.let_go();
        self.chores().pool.tidy()
    }
}
