//! A connection between two nodes of the model: what is sent is in the other one's inbox, in order; some of it later.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock, Weak};

use bytes::Bytes;

use crate::aside::Haste;
use crate::mailbox::{Mailbox, Request};
use crate::packet::Packet;
use crate::payload::Memory;
use crate::shared::{Event, Shared};
use crate::sync::{AtomicBool, Mutex, Ordering};
use crate::{Error, ErrorKind, Result};

/// What has come and is not handed on.
#[derive(Debug, Default)]
pub struct In {
    /// A message whose mailbox has no room.
    pub stalled: Option<(Arc<Mailbox>, Request)>,
    /// What has come behind it.
    pub unread: VecDeque<Event>,
}

/// What was laid aside, as the node's own connections have it.
#[derive(Debug, Default)]
struct Out {
    queue: VecDeque<Event>,
    aside: bool,
}

/// One end: it is read by its own node, and writes to the other end's.
#[derive(Debug)]
pub struct Link {
    id: u64,
    /// Node and link at the other end.
    peer: OnceLock<(Weak<Shared>, Weak<Link>)>,
    dead: AtomicBool,
    out: Mutex<Out>,
    pub input: Mutex<In>,
}

impl Link {
    pub fn new(id: u64) -> Self {
        let (dead, out) = (AtomicBool::new(false), Mutex::new(Out::default()));
        Self { id, peer: OnceLock::new(), dead, out, input: Mutex::new(In::default()) }
    }

    pub fn join(&self, node: &Arc<Shared>, link: &Arc<Self>) {
        self.peer.set((Arc::downgrade(node), Arc::downgrade(link))).expect("joined once");
    }

    pub const fn id(&self) -> u64 {
        self.id
    }

    pub const fn borrows(&self) -> bool {
        false
    }

    pub fn end(&self) {
        self.dead.store(true, Ordering::SeqCst);
    }

    pub fn send(
        self: &Arc<Self>,
        node: &Shared,
        packet: &Packet,
        segments: Vec<Bytes>,
        _memory: Option<Memory>,
        haste: Haste,
    ) -> Result<()> {
        if self.dead.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Closed, "send", "the connection has ended"));
        }
        let (_, link) = self.peer.get().expect("joined");
        let Some(link) = link.upgrade() else { return Ok(()) };
        let mut out = self.out.lock().expect("no panic");
        out.queue.push_back(Event { link, packet: Some(packet.clone()), segments });
        if haste == Haste::Together && node.lead().naps() {
            if !out.aside {
                out.aside = true;
                node.aside().add(Arc::clone(self));
            }
            if node.lead().naps() {
                return Ok(());
            }
        }
        self.write_all(&mut out);
        Ok(())
    }

    /// Writes what was laid aside.
    pub fn write_aside(&self) {
        let mut out = self.out.lock().expect("no panic");
        out.aside = false;
        self.write_all(&mut out);
    }

    fn write_all(&self, out: &mut Out) {
        for event in out.queue.drain(..) {
            self.write(event);
        }
    }

    /// The other end of it.
    pub fn peer_link(&self) -> Arc<Self> {
        self.peer.get().and_then(|(_, link)| link.upgrade()).expect("joined")
    }

    /// The process at this end has ended.
    pub fn hang_up(&self) {
        let (_, link) = self.peer.get().expect("joined");
        if let Some(link) = link.upgrade() {
            self.write(Event { link, packet: None, segments: Vec::new() });
        }
    }

    fn write(&self, event: Event) {
        let (node, _) = self.peer.get().expect("joined");
        if let Some(node) = node.upgrade() {
            node.poller.deliver(event);
        }
    }
}
