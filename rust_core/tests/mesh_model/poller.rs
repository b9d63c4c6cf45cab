//! What a node waits on: what others have sent it, and an interruption.

use std::collections::VecDeque;

use crate::shared::Event;
use crate::sync::{Condvar, Mutex};

#[derive(Debug, Default)]
struct Inbox {
    events: VecDeque<Event>,
    interrupted: bool,
}

#[derive(Debug, Default)]
pub struct Poller {
    inbox: Mutex<Inbox>,
    changed: Condvar,
}

impl Poller {
    /// Waits for something and returns it; none where it was interrupted first.
    pub fn wait(&self) -> Option<Event> {
        let mut inbox = self.inbox.lock().expect("no panic");
        loop {
            if let Some(event) = inbox.events.pop_front() {
                return Some(event);
            }
            if std::mem::take(&mut inbox.interrupted) {
                return None;
            }
            inbox = self.changed.wait(inbox).expect("no panic");
        }
    }

    pub fn deliver(&self, event: Event) {
        self.inbox.lock().expect("no panic").events.push_back(event);
        self.changed.notify_all();
    }

    pub fn interrupt(&self) {
        self.inbox.lock().expect("no panic").interrupted = true;
        self.changed.notify_all();
    }
}
