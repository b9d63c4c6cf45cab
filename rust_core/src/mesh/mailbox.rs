//! The queue of one actor's messages, and what a message is to its receiver.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::aside::Haste;
use super::gather::Outcome;
use super::lead::Waiter;
use super::link::Link;
use super::notifier::Notifier;
use super::packet::Packet;
use super::payload::{Blob, Memory, Payload};
use super::shared::{LOCAL, Shared};
use super::sync::{AtomicBool, Condvar, Mutex, MutexGuard, Ordering};
use crate::{Error, ErrorKind, Result};

/// Messages that may wait. One more stops the reading of its sender's connection.
const MOST: usize = 1024;
/// Bytes in this process's memory that may wait. A larger message passes alone.
const MOST_BYTES: usize = 32 << 20;

/// Kind of the answer to a message that was thrown away: its actor ended before it came to it.
pub const THROWN_AWAY: u8 = 255;

/// Where a message came from.
#[derive(Clone, Debug)]
pub(super) enum Origin {
    Local,
    Link(Arc<Link>),
}

impl Origin {
    pub(super) fn id(&self) -> u64 {
        match self {
            Self::Local => LOCAL,
            Self::Link(link) => link.id(),
        }
    }
}

/// A message for an actor. Dropped without an answer, it answers that it was thrown away.
#[derive(Debug)]
pub struct Request {
    pub(super) node: Weak<Shared>,
    pub(super) origin: Origin,
    pub(super) call: u64,
    pub(super) slot: u32,
    pub(super) method: String,
    pub(super) place: String,
    pub(super) blobs: Vec<Blob>,
    pub(super) answered: AtomicBool,
}

impl Request {
    /// What the actor is asked for.
    pub fn method(&self) -> &str {
        &self.method
    }

    /// Where in the mesh that was called this actor is; empty where it is its own place.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// Parts of the payload.
    pub fn blobs(&self) -> &[Blob] {
        &self.blobs
    }

    /// The call's number and the connection's: what a [`Delivery::Cancel`] names.
    pub fn key(&self) -> (u64, u64) {
        (self.origin.id(), self.call)
    }

    /// True where the caller waits for an answer.
    pub const fn wants_answer(&self) -> bool {
        self.call != 0
    }

    /// Answers. The second answer to a message, and one that nobody waits for, are dropped.
    pub fn reply(&self, kind: u8, payload: &Payload) -> Result<()> {
        self.answer(kind, payload, Haste::Patient)
    }

    /// The same; the answer leaves within a millisecond, or when a thread of this process waits for something.
    pub fn reply_soon(&self, kind: u8, payload: &Payload) -> Result<()> {
        self.answer(kind, payload, Haste::Together)
    }

    /// From the parts of an answer, in order. See [`Node::payload`](super::Node::payload).
    pub fn payload<'a>(&self, parts: impl Iterator<Item = &'a [u8]>) -> Result<Payload> {
        let borrows = match &self.origin {
            Origin::Local => true,
            Origin::Link(link) => link.borrows(),
        };
        match self.node.upgrade().filter(|_| borrows) {
            Some(node) => node.payload(parts),
            None => Payload::from_parts(parts),
        }
    }

    fn answer(&self, kind: u8, payload: &Payload, haste: Haste) -> Result<()> {
        if self.call == 0 || self.answered.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        let Some(node) = self.node.upgrade() else { return Ok(()) };
        match &self.origin {
            Origin::Local => {
                let outcome = Outcome::Answer { kind, blobs: payload.blobs()? };
                node.complete(LOCAL, self.call, self.slot, outcome);
                Ok(())
            }
            Origin::Link(link) => {
                let packed = payload.packed();
                let memory = packed.memory.as_ref().map_or(0, Memory::id);
                let packet =
                    Packet::Reply { call: self.call, slot: self.slot, kind, parts: packed.parts, memory };
                link.send(&node, &packet, packed.segments, packed.memory, haste)
            }
        }
    }

    fn weight(&self) -> usize {
        self.blobs.iter().filter_map(Blob::bytes).map(bytes::Bytes::len).sum()
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        // A caller that cannot be reached any more is told by its own side of the connection.
        drop(self.answer(THROWN_AWAY, &Payload::default(), Haste::AtOnce));
    }
}

/// What an actor finds in its mailbox.
#[derive(Debug)]
pub enum Delivery {
    /// A message.
    Call(Request),
    /// Nobody waits any more for the answer to the message of this key.
    Cancel(u64, u64),
}

#[derive(Debug)]
struct State {
    queue: VecDeque<Delivery>,
    bytes: usize,
    waiters: Vec<Waiter>,
    notify: Option<Arc<Notifier>>,
    stalled: Vec<u64>,
    closed: bool,
}

impl State {
    fn is_full(&self) -> bool {
        !self.queue.is_empty() && (self.queue.len() >= MOST || self.bytes >= MOST_BYTES)
    }
}

/// Messages of one actor, in the order of their arrival.
#[derive(Debug)]
pub struct Mailbox {
    node: Weak<Shared>,
    state: Mutex<State>,
    room: Condvar,
}

impl Mailbox {
    pub(super) fn new(node: Weak<Shared>) -> Self {
        let state = State {
            queue: VecDeque::new(),
            bytes: 0,
            waiters: Vec::new(),
            notify: None,
            stalled: Vec::new(),
            closed: false,
        };
        Self { node, state: Mutex::new(state), room: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a message of `link`; given back where there is no room, and then the link is resumed once there is.
    pub(super) fn offer(&self, node: &Shared, link: u64, request: Request) -> Option<Request> {
        let mut state = self.state();
        if state.is_full() && !state.closed {
            state.stalled.push(link);
            return Some(request);
        }
        self.push(node, state, Delivery::Call(request));
        None
    }

    /// Queues a message of this process, waiting for room until `deadline`.
    pub(super) fn put(&self, node: &Shared, request: Request, deadline: Instant) -> Result<()> {
        let mut state = self.state();
        while state.is_full() && !state.closed {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || node.is_closing() {
                request.answered.store(true, Ordering::SeqCst);
                return Err(Error::new(ErrorKind::TimedOut, "send to an actor", "its mailbox stays full"));
            }
            let slice = left.min(Duration::from_millis(100));
            state = self.room.wait_timeout(state, slice).unwrap_or_else(PoisonError::into_inner).0;
        }
        self.push(node, state, Delivery::Call(request));
        Ok(())
    }

    /// Queues a message whether there is room or not.
    pub(super) fn put_at_once(&self, node: &Shared, request: Request) {
        self.push(node, self.state(), Delivery::Call(request));
    }

    fn push(&self, node: &Shared, mut state: MutexGuard<'_, State>, delivery: Delivery) {
        if state.closed {
            // The request is dropped outside of the lock: it answers.
            drop(state);
            drop(delivery);
            return;
        }
        if let Delivery::Call(request) = &delivery {
            state.bytes += request.weight();
        }
        state.queue.push_back(delivery);
        let waiters = std::mem::take(&mut state.waiters);
        let first = state.queue.len() == 1;
        if first && let Some(notifier) = &state.notify {
            notifier.push(0);
        }
        drop(state);
        if first {
            node.lead().matters();
        } else {
            node.lead().can_wait();
        }
        for waiter in &waiters {
            node.notify(waiter);
        }
    }

    /// Takes a message out where it still waits, or leaves word for the actor that works on it.
    pub(super) fn cancel(&self, node: &Shared, link: u64, call: u64) {
        let mut state = self.state();
        let of_call = |delivery: &Delivery| matches!(delivery, Delivery::Call(r) if r.key() == (link, call));
        if let Some(at) = state.queue.iter().position(of_call) {
            let taken = state.queue.remove(at);
            if let Some(Delivery::Call(request)) = &taken {
                state.bytes -= request.weight();
                request.answered.store(true, Ordering::SeqCst);
            }
            return;
        }
        // Only loops that run several things at once can do something about it. Bounded like the messages.
        if state.notify.is_some() && state.queue.len() < 2 * MOST {
            self.push(node, state, Delivery::Cancel(link, call));
        }
    }

    /// Waits for a message, `limit` at the most; false when time is up. Not `urgent`, it leaves the reading of the sockets
    /// to other threads, which costs it a moment and them nothing.
    pub fn wait(&self, limit: Option<Duration>, urgent: bool) -> bool {
        let Some(node) = self.node.upgrade() else { return true };
        let ready = || {
            let mut state = self.state();
            let ready = !state.queue.is_empty() || state.closed || node.is_closing();
            if !ready {
                let me = if urgent { Waiter::current() } else { Waiter::aside() };
                me.join(&mut state.waiters);
            }
            ready
        };
        if urgent { node.wait(limit, ready) } else { node.wait_aside(limit, ready) }
    }

    /// Up to `most` messages of those that have arrived.
    pub fn take(&self, most: usize) -> Vec<Delivery> {
        let mut state = self.state();
        let count = state.queue.len().min(most);
        let taken: Vec<Delivery> = state.queue.drain(..count).collect();
        for delivery in &taken {
            if let Delivery::Call(request) = delivery {
                state.bytes -= request.weight();
            }
        }
        if !state.queue.is_empty()
            && let Some(notifier) = &state.notify
        {
            notifier.push(0);
        }
        let resumed = if state.queue.len() <= MOST / 2 && state.bytes <= MOST_BYTES / 2 {
            std::mem::take(&mut state.stalled)
        } else {
            Vec::new()
        };
        drop(state);
        self.room.notify_all();
        if !resumed.is_empty()
            && let Some(node) = self.node.upgrade()
        {
            for link in resumed {
                node.resume(link);
            }
        }
        taken
    }

    /// Has a token left at `notifier` when there is something, for an event loop; `take` takes it.
    pub fn notify(&self, notifier: Arc<Notifier>) {
        let mut state = self.state();
        if !state.queue.is_empty() {
            notifier.push(0);
        }
        state.notify = Some(notifier);
    }

    /// True once it takes no more messages.
    pub fn is_closed(&self) -> bool {
        self.state().closed
    }

    /// Takes no more messages: those that wait, and later ones, are answered as thrown away.
    pub fn close(&self) {
        let (queue, waiters, stalled, notify) = {
            let mut state = self.state();
            state.closed = true;
            state.bytes = 0;
            let queue = std::mem::take(&mut state.queue);
            let waiters = std::mem::take(&mut state.waiters);
            (queue, waiters, std::mem::take(&mut state.stalled), state.notify.clone())
        };
        drop(queue);
        self.room.notify_all();
        if let Some(notifier) = notify {
            notifier.push(0);
        }
        if let Some(node) = self.node.upgrade() {
            for waiter in &waiters {
                node.notify(waiter);
            }
            for link in stalled {
                node.resume(link);
            }
        }
    }
}
