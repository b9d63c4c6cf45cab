//! How an event loop hears of what is done: tokens in a queue, and a descriptor that is readable while there are some.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::{Error, Result};

/// A queue of tokens beside an eventfd. Bounded by those who ask: one token for each thing that they wait for.
#[derive(Debug)]
pub struct Notifier {
    tokens: Mutex<Vec<u64>>,
    event: EventFd,
}

impl Notifier {
    /// An empty one.
    pub fn new() -> Result<Self> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|error| Error::io("make an event", error.into()))?;
        Ok(Self { tokens: Mutex::new(Vec::new()), event })
    }

    /// Readable while there are tokens.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Leaves a token.
    pub fn push(&self, token: u64) {
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        tokens.push(token);
        if tokens.len() == 1 {
            // It fails only when the counter is full, and then the descriptor is readable.
            let _ = self.event.write(1);
        }
    }

    /// Takes all tokens; never waits.
    pub fn drain(&self) -> Vec<u64> {
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.event.read();
        std::mem::take(&mut *tokens)
    }
}
