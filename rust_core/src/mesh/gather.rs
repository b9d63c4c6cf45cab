//! Answers to one call: one a target, or several of each for a stream.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::lead::Waiter;
use super::notifier::Notifier;
use super::payload::Blob;
use super::shared::Shared;
use super::sync::{Mutex, MutexGuard};

/// Kind of an answer that is a value. All others are failures.
pub const VALUE: u8 = 0;

/// What came back from one target.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// An answer: its kind is the callers' own affair.
    Answer {
        /// A value, an exception, …
        kind: u8,
        /// Parts of the payload.
        blobs: Vec<Blob>,
    },
    /// The process ended, or refused the connection, before it answered.
    Dead {
        /// In words.
        reason: String,
    },
}

/// One outcome and whose it is.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Which target.
    pub slot: u32,
    /// What came.
    pub outcome: Outcome,
}

#[derive(Debug)]
struct State {
    /// Link of each target; none once it has answered.
    open: Vec<Option<u64>>,
    left: usize,
    arrived: VecDeque<Answer>,
    cancelled: bool,
    /// One target has answered with other than a value, or will never answer.
    failed: bool,
    waiters: Vec<Waiter>,
    notify: Vec<(Arc<Notifier>, u64)>,
}

/// The call, seen from its caller. Dropping it takes back the wish for an answer, not the call.
#[derive(Debug)]
pub struct Gather {
    call: u64,
    actor: u64,
    called: Instant,
    node: Weak<Shared>,
    state: Mutex<State>,
    /// Every answer is told of, not only the last one.
    each: bool,
}

impl Gather {
    pub(super) fn new(call: u64, actor: u64, node: Weak<Shared>, targets: usize, each: bool) -> Self {
        let state = State {
            open: vec![None; targets],
            left: targets,
            arrived: VecDeque::with_capacity(targets),
            cancelled: false,
            failed: false,
            waiters: Vec::new(),
            notify: Vec::new(),
        };
        Self { call, actor, called: Instant::now(), node, state: Mutex::new(state), each }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self, state: &State) -> bool {
        let over = state.left == 0 || state.cancelled;
        if self.each { over || !state.arrived.is_empty() } else { over || state.failed }
    }

    pub(super) const fn call(&self) -> u64 {
        self.call
    }

    /// When it was made.
    pub const fn called(&self) -> Instant {
        self.called
    }

    pub(super) fn sent_to(&self, slot: u32, link: u64) {
        if let Some(open) = self.state().open.get_mut(slot as usize) {
            *open = Some(link);
        }
    }

    /// Links that owe an answer.
    pub(super) fn owing(&self) -> Vec<u64> {
        let mut links: Vec<u64> = self.state().open.iter().copied().flatten().collect();
        links.sort_unstable();
        links.dedup();
        links
    }

    /// Takes an answer of `link`; true where it was the last one that is owed. What nobody waits for is dropped.
    pub(super) fn complete(&self, node: &Shared, link: u64, slot: u32, outcome: Outcome) -> bool {
        let mut state = self.state();
        match state.open.get_mut(slot as usize) {
            Some(open) if *open == Some(link) => *open = None,
            _ => return false,
        }
        state.left -= 1;
        state.failed |= !matches!(outcome, Outcome::Answer { kind: VALUE, .. });
        state.arrived.push_back(Answer { slot, outcome });
        let last = state.left == 0;
        if last {
            // Before anybody can see that it is done.
            node.forget(self.call);
        }
        self.tell(node, state, last);
        last
    }

    fn tell(&self, node: &Shared, mut state: MutexGuard<'_, State>, last: bool) {
        if !last && !self.each && !state.failed {
            return;
        }
        let waiters = std::mem::take(&mut state.waiters);
        let notify = std::mem::take(&mut state.notify);
        drop(state);
        node.lead().matters();
        for (notifier, token) in notify {
            notifier.push(token);
        }
        for waiter in &waiters {
            node.notify(waiter);
        }
    }

    /// Fails every answer that `link` owes; true where none is owed any more.
    pub(super) fn lose(&self, node: &Shared, link: u64, reason: &str) -> bool {
        let mut state = self.state();
        let mut lost = Vec::new();
        for (slot, open) in state.open.iter_mut().enumerate() {
            if *open == Some(link) {
                *open = None;
                lost.push(u32::try_from(slot).unwrap_or(u32::MAX));
            }
        }
        if lost.is_empty() {
            return state.left == 0;
        }
        state.left -= lost.len();
        state.failed = true;
        let outcome = Outcome::Dead { reason: reason.to_owned() };
        state.arrived.extend(lost.into_iter().map(|slot| Answer { slot, outcome: outcome.clone() }));
        let last = state.left == 0;
        if last {
            // Before anybody can see that it is done.
            node.forget(self.call);
        }
        self.tell(node, state, last);
        last
    }

    /// Waits until every answer is there (or the next one, where each is told of), or one has failed; false when time is
    /// up. One failure is enough: what the others do may depend on the one that is gone.
    pub fn wait(&self, limit: Option<Duration>) -> bool {
        let Some(node) = self.node.upgrade() else { return self.is_ready() };
        node.wait(limit, || {
            let mut state = self.state();
            let ready = self.is_over(&state);
            if !ready {
                Waiter::current().join(&mut state.waiters);
            }
            ready || node.is_closing()
        })
    }

    /// True where `wait` would return at once.
    pub fn is_ready(&self) -> bool {
        let state = self.state();
        self.is_over(&state)
    }

    /// Targets that have not answered.
    pub fn left(&self) -> usize {
        self.state().left
    }

    /// Has `token` left at `notifier` once, when `wait` would return.
    pub fn notify(&self, notifier: Arc<Notifier>, token: u64) {
        let mut state = self.state();
        if self.is_over(&state) {
            drop(state);
            notifier.push(token);
        } else {
            state.notify.push((notifier, token));
            drop(state);
            if let Some(node) = self.node.upgrade() {
                node.write_aside();
            }
        }
    }

    /// Takes the answers that have arrived.
    pub fn take(&self) -> Vec<Answer> {
        self.state().arrived.drain(..).collect()
    }

    /// Wants no answer any more, and says so to those who owe one.
    pub fn cancel(&self) {
        let owing = self.owing();
        {
            let mut state = self.state();
            if state.left == 0 || state.cancelled {
                return;
            }
            state.cancelled = true;
        }
        if let Some(node) = self.node.upgrade() {
            node.forget(self.call);
            node.cancel(self.call, self.actor, &owing);
            let state = self.state();
            self.tell(&node, state, true);
        }
    }
}

impl Drop for Gather {
    fn drop(&mut self) {
        if let Some(node) = self.node.upgrade() {
            node.forget(self.call);
        }
    }
}
