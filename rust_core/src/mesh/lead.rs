//! Who reads the sockets: whoever waits for something.
//!
//! A thread that waits for an answer or a message takes the lead where nobody has it, and polls until its own wish is
//! fulfilled. So what it waits for needs no other thread to be woken first. The others park; who hands over the lead
//! wakes one of them. The node's own thread steps in where nobody waits: within [`NAP`] while there is traffic, at once
//! where there was none.
//!
//! Invariant: the node's thread sleeps without limit only while somebody leads, and who gives up the lead wakes it.

use std::collections::VecDeque;
use std::sync::{OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::poller::Poller;
use super::sync::{
    AtomicBool, AtomicU64, AtomicUsize, Mutex, Ordering, Thread, current, number, park, park_timeout,
};

/// How long bytes may lie unread when the last leader turned to its work.
const NAP: Duration = Duration::from_millis(1);
/// Naps without a change of the lead, after which the node's thread sleeps until it is woken.
const NAPS: u32 = 4;

/// A thread that waits, as those see it who fulfil its wish.
#[derive(Clone, Debug)]
pub(super) struct Waiter {
    thread: Thread,
    number: u64,
    leads: bool,
}

impl Waiter {
    pub(super) fn current() -> Self {
        Self { thread: current(), number: number(), leads: true }
    }

    /// The same for a thread that leaves the lead to others.
    pub(super) fn aside() -> Self {
        Self { leads: false, ..Self::current() }
    }

    /// Adds itself to `waiters`, once.
    pub(super) fn join(self, waiters: &mut Vec<Self>) {
        if !waiters.iter().any(|waiter| waiter.number == self.number) {
            waiters.push(self);
        }
    }
}

/// The one lead of a node.
#[derive(Debug)]
pub(super) struct Lead {
    /// Number of the thread that leads; 0 while nobody does.
    leader: AtomicU64,
    turns: AtomicU64,
    followers: Mutex<VecDeque<Waiter>>,
    deep: AtomicBool,
    own: OnceLock<Waiter>,
    /// Waiters that the node's own thread has woken while it led.
    woken: AtomicUsize,
    /// What was read since the own thread polled last: something that somebody may wait for, or only what waits itself.
    mattered: AtomicBool,
    waits: AtomicBool,
    /// The own thread sleeps for [`NAP`] at the most.
    naps: AtomicBool,
}

impl Lead {
    pub(super) fn new() -> Self {
        Self {
            leader: AtomicU64::new(0),
            turns: AtomicU64::new(0),
            followers: Mutex::new(VecDeque::new()),
            deep: AtomicBool::new(false),
            own: OnceLock::new(),
            woken: AtomicUsize::new(0),
            mattered: AtomicBool::new(false),
            waits: AtomicBool::new(false),
            naps: AtomicBool::new(false),
        }
    }

    /// True while the node's own thread sleeps, and looks at what was laid aside when it wakes, within a moment.
    pub(super) fn naps(&self) -> bool {
        self.naps.load(Ordering::SeqCst)
    }

    fn nap(&self, woken: &mut impl FnMut()) {
        self.naps.store(true, Ordering::SeqCst);
        park_timeout(NAP);
        self.naps.store(false, Ordering::SeqCst);
        woken();
    }

    fn take(&self) -> bool {
        let taken = self.leader.compare_exchange(0, number(), Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if taken {
            self.turns.fetch_add(1, Ordering::SeqCst);
        }
        taken
    }

    fn release(&self) {
        self.leader.store(0, Ordering::SeqCst);
        self.hand_on();
    }

    /// Wakes somebody who can lead, if nobody does.
    fn hand_on(&self) {
        if self.leader.load(Ordering::SeqCst) != 0 {
            return;
        }
        let next = self.followers.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        if let Some(next) = next {
            next.thread.unpark();
        } else if self.deep.load(Ordering::SeqCst) {
            self.wake_own();
        }
    }

    fn wake_own(&self) {
        if let Some(own) = self.own.get() {
            own.thread.unpark();
        }
    }

    /// Something was read that somebody may wait for.
    pub(super) fn matters(&self) {
        self.mattered.store(true, Ordering::SeqCst);
    }

    /// Something was read that waits behind other messages: its receiver is at work.
    pub(super) fn can_wait(&self) {
        self.waits.store(true, Ordering::SeqCst);
    }

    /// Has the node's own thread look at what it is to do beside reading.
    pub(super) fn remind(&self, poller: &Poller) {
        if let Some(own) = self.own.get() {
            if self.leader.load(Ordering::SeqCst) == own.number {
                poller.interrupt();
            }
            own.thread.unpark();
        }
    }

    /// Tells `waiter` that its wish may be fulfilled.
    pub(super) fn notify(&self, waiter: &Waiter, poller: &Poller) {
        let me = number();
        if waiter.number == me {
            return;
        }
        if self.leader.load(Ordering::SeqCst) == waiter.number {
            poller.interrupt();
        } else {
            waiter.thread.unpark();
            if waiter.leads && self.own.get().is_some_and(|own| own.number == me) {
                self.woken.fetch_add(1, Ordering::SeqCst);
            }
        }
    }

    /// Waits until `ready`, `deadline` at the most; true where it is. `ready` leaves word of this thread where it is not.
    /// `poll(limit)` reads what has arrived, and waits for that no longer than `limit`.
    pub(super) fn wait(
        &self,
        deadline: Option<Instant>,
        mut ready: impl FnMut() -> bool,
        mut poll: impl FnMut(Option<Duration>),
    ) -> bool {
        loop {
            if ready() {
                self.hand_on();
                return true;
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                self.hand_on();
                return false;
            }
            if self.take() {
                // Looked at again: who fulfilled the wish before this thread led has only unparked it.
                if !ready() {
                    poll(left);
                }
                while !ready() {
                    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                    if left.is_some_and(|left| left.is_zero()) {
                        self.release();
                        return false;
                    }
                    poll(left);
                }
                self.release();
                return true;
            }
            self.follow(left);
        }
    }

    /// Waits until `ready` and leaves the lead to others.
    pub(super) fn wait_aside(deadline: Option<Instant>, mut ready: impl FnMut() -> bool) -> bool {
        loop {
            if ready() {
                return true;
            }
            match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                Some(left) if left.is_zero() => return false,
                Some(left) => park_timeout(left),
                None => park(),
            }
        }
    }

    fn follow(&self, left: Option<Duration>) {
        let me = Waiter::current();
        let number = me.number;
        self.followers.lock().unwrap_or_else(PoisonError::into_inner).push_back(me);
        // The leader may have left before it could see this thread among its followers.
        if self.leader.load(Ordering::SeqCst) != 0 {
            match left {
                Some(left) => park_timeout(left),
                None => park(),
            }
        }
        let mut followers = self.followers.lock().unwrap_or_else(PoisonError::into_inner);
        followers.retain(|follower| follower.number != number);
    }

    /// What the node's own thread does until `closing`: it reads where nobody else does, and what `chores` does, which
    /// returns when it wants to be called again. After each nap it calls `woken`.
    pub(super) fn stand_in(
        &self,
        closing: &AtomicBool,
        mut poll: impl FnMut(Option<Duration>),
        mut chores: impl FnMut() -> Option<Duration>,
        mut woken: impl FnMut(),
    ) {
        // A second start would be a defect of the node, which starts one thread.
        drop(self.own.set(Waiter::current()));
        let mut naps = 0;
        let mut seen = 0;
        while !closing.load(Ordering::SeqCst) {
            if self.take() {
                self.woken.store(0, Ordering::SeqCst);
                while !closing.load(Ordering::SeqCst) && self.woken.load(Ordering::SeqCst) == 0 {
                    self.waits.store(false, Ordering::SeqCst);
                    self.mattered.store(false, Ordering::SeqCst);
                    poll(chores());
                    if self.waits.load(Ordering::SeqCst) && !self.mattered.load(Ordering::SeqCst) {
                        // All that came waits behind other messages: there is no hurry to read more.
                        break;
                    }
                }
                // Somebody came to wait, or is at work: the lead is theirs when they come back.
                self.release();
                naps = 0;
                self.nap(&mut woken);
                continue;
            }
            let turns = self.turns.load(Ordering::SeqCst);
            naps = if turns == seen { naps + 1 } else { 0 };
            seen = turns;
            if naps < NAPS {
                self.nap(&mut woken);
                continue;
            }
            self.deep.store(true, Ordering::SeqCst);
            let limit = chores();
            if self.leader.load(Ordering::SeqCst) != 0 && !closing.load(Ordering::SeqCst) {
                limit.map_or_else(park, park_timeout);
            }
            self.deep.store(false, Ordering::SeqCst);
            naps = 0;
        }
    }

    /// Wakes everybody, to see that the node is closing.
    pub(super) fn wake_all(&self, poller: &Poller) {
        poller.interrupt();
        self.wake_own();
        for follower in self.followers.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            follower.thread.unpark();
        }
    }
}
