//! How an actor ends, and the one report of it that its owner gets.
//!
//! The owner reserves room for the report *before* the child starts; the child's task carries that permit in a
//! [`DropGuard`]. Sending consumes the permit, so there can be no second report; dropping the guard sends, so
//! there is no way to end without one: an abort or a runtime that shuts down reports [`Ending::Dropped`].

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{mpsc, oneshot};

use super::mailbox::Control;
use crate::Error;

/// Identity of one actor, unique in its process and never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ActorId(u64);

impl ActorId {
    pub(super) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl fmt::Display for ActorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// What an owner learns when an actor of its own ends: exactly one for each.
#[derive(Debug)]
pub struct SupervisionEvent {
    /// Who ended.
    pub id: ActorId,
    /// Its name, as given at the spawn.
    pub name: Arc<str>,
    /// How it ended.
    pub ending: Ending,
}

/// How an actor ended.
#[derive(Debug)]
pub enum Ending {
    /// In order, because somebody asked.
    Stopped {
        /// The words of whoever asked.
        reason: String,
    },
    /// A handler returned an error.
    Failed {
        /// That error.
        error: Error,
    },
    /// A handler panicked.
    Panicked {
        /// What the panic said.
        message: String,
    },
    /// At once, whatever it was doing.
    Killed {
        /// The words of whoever asked.
        reason: String,
    },
    /// Its task went away without any of the above: aborted, or its runtime shut down.
    Dropped,
}

impl Ending {
    /// True for everything but an orderly stop.
    pub const fn is_failure(&self) -> bool {
        !matches!(self, Self::Stopped { .. })
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stopped { reason } => write!(f, "stopped: {reason}"),
            Self::Failed { error } => write!(f, "failed: {error}"),
            Self::Panicked { message } => write!(f, "panicked: {message}"),
            Self::Killed { reason } => write!(f, "killed: {reason}"),
            Self::Dropped => f.write_str("dropped before it could end"),
        }
    }
}

/// Where the report goes: room for it is reserved already.
pub(super) enum Owner {
    /// The mailbox of a parent actor.
    Parent(mpsc::OwnedPermit<SupervisionEvent>),
    /// The [`Running`](super::Running) of code that is no actor.
    Code(oneshot::Sender<SupervisionEvent>),
}

/// Reports the end of one actor, exactly once, and then marks it as ended.
pub(super) struct DropGuard {
    id: ActorId,
    name: Arc<str>,
    owner: Option<Owner>,
    control: Arc<Control>,
}

impl DropGuard {
    pub(super) const fn new(id: ActorId, name: Arc<str>, owner: Owner, control: Arc<Control>) -> Self {
        Self { id, name, owner: Some(owner), control }
    }

    /// Reports `ending` to the owner.
    pub(super) fn report(mut self, ending: Ending) {
        self.send(ending);
    }

    fn send(&mut self, ending: Ending) {
        let Some(owner) = self.owner.take() else { return };
        let event = SupervisionEvent { id: self.id, name: Arc::clone(&self.name), ending };
        match owner {
            Owner::Parent(permit) => {
                permit.send(event);
            }
            // Nobody waits any more: then nobody is owed the report either.
            Owner::Code(waiting) => drop(waiting.send(event)),
        }
    }
}

impl Drop for DropGuard {
    fn drop(&mut self) {
        self.send(Ending::Dropped);
        self.control.mark_ended();
    }
}
