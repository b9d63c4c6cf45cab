//! How an event loop hears of what is done: here it waits for the tokens themselves.

use crate::sync::{Condvar, Mutex};

#[derive(Debug, Default)]
pub struct Notifier {
    tokens: Mutex<Vec<u64>>,
    changed: Condvar,
}

impl Notifier {
    pub fn push(&self, token: u64) {
        self.tokens.lock().expect("no panic").push(token);
        self.changed.notify_all();
    }

    pub fn wait(&self) -> Vec<u64> {
        let mut tokens = self.tokens.lock().expect("no panic");
        while tokens.is_empty() {
            tokens = self.changed.wait(tokens).expect("no panic");
        }
        std::mem::take(&mut *tokens)
    }
}
