//! One process's connection to one other host, as both gateways see it: its window, and its way through them.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use nix::sys::socket::{Shutdown, shutdown};
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc};

use super::hop::{Hop, What};
use super::memory::Filling;
use super::peer::Peer;
use super::{Inner, locked};
use crate::wire::Frame;
use crate::{Error, ErrorKind, Result};

/// What may be under way in each direction, in the measure of [`cost`]: more waits at its sender.
const WINDOW: u32 = 4 << 20;
/// What the receiver may keep to itself of what it has taken, before it says so.
const KEPT: u32 = WINDOW / 4;
/// Of one frame, so that any number of empty ones is bounded too.
const LEAST: u32 = 256;
/// Of the memory of a message, in one hop.
const CHUNK: usize = 256 * 1024;
/// Sessions of one gateway.
pub(super) const MOST_SESSIONS: usize = 1 << 14;

const SEND: &str = "send to another host";

/// What a frame takes of the window. A larger one than fits goes when all before it has been taken.
pub(super) fn cost(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX).saturating_add(LEAST).min(WINDOW - KEPT)
}

enum Item {
    Chunk(Bytes),
    Frame(Frame, bool),
    Over(String),
}

/// One session.
pub(super) struct Session {
    number: u64,
    here: String,
    remote: String,
    peer: Arc<Peer>,
    window: Semaphore,
    sending: tokio::sync::Mutex<()>,
    inlet: mpsc::UnboundedSender<Item>,
    taken: Mutex<Taken>,
    over: Mutex<Option<String>>,
    /// Connections to processes of this host, by the names of their sockets.
    pub(super) receivers: Mutex<HashMap<String, Arc<UnixStream>>>,
}

#[derive(Default)]
struct Taken {
    /// Received, and not given back to the sender's window.
    outstanding: u32,
    /// Handled, and not given back.
    owed: u32,
}

impl Session {
    /// A session with the host `remote`, of which the gateway hears by `number`.
    pub(super) fn new(inner: &Inner, peer: &Arc<Peer>, remote: String, number: u64) -> (Arc<Self>, Inlet) {
        let (inlet, items) = mpsc::unbounded_channel();
        let session = Arc::new(Self {
            number,
            here: inner.folder.clone(),
            remote,
            peer: Arc::clone(peer),
            window: Semaphore::new(WINDOW as usize),
            sending: tokio::sync::Mutex::new(()),
            inlet,
            taken: Mutex::default(),
            over: Mutex::default(),
            receivers: Mutex::default(),
        });
        locked(&inner.sessions).insert(number, Arc::clone(&session));
        (session, Inlet { items, filling: Filling::default() })
    }

    pub(super) const fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn remote(&self) -> &str {
        &self.remote
    }

    pub(super) fn is_on(&self, peer: &Arc<Peer>) -> bool {
        Arc::ptr_eq(&self.peer, peer)
    }

    /// Why it was ended, where it was.
    pub(super) fn reason(&self) -> Option<String> {
        locked(&self.over).clone()
    }

    /// Ends it here.
    pub(super) fn end(&self, reason: &str) {
        locked(&self.over).get_or_insert_with(|| reason.to_owned());
        self.window.close();
        // The other end of the queue is gone: then it has ended already.
        drop(self.inlet.send(Item::Over(reason.to_owned())));
    }

    /// Ends it on both sides.
    pub(super) fn close(&self, reason: &str) {
        self.end(reason);
        self.tell(What::Close { reason: reason.to_owned() });
    }

    /// Queues what needs no window.
    pub(super) fn tell(&self, what: What) {
        self.peer.tell(&self.hop(what));
    }

    fn hop(&self, what: What) -> Hop {
        Hop::Session { to: self.remote.clone(), from: self.here.clone(), number: self.number, what }
    }

    /// Sends a packet of one process to the other host, and the memory that goes with it. In turn.
    pub(super) async fn send(&self, frame: Frame, memory: Option<Bytes>) -> Result<()> {
        let _turn = self.sending.lock().await;
        let with_memory = memory.is_some();
        let mut rest = memory.unwrap_or_default();
        while !rest.is_empty() {
            let chunk = rest.split_to(rest.len().min(CHUNK));
            self.push(What::Chunk, chunk.len(), vec![chunk]).await?;
        }
        let bytes = frame.wire_len();
        let what = What::Frame { header: frame.header.to_vec(), memory: with_memory };
        self.push(what, bytes, frame.segments).await
    }

    async fn push(&self, what: What, bytes: usize, segments: Vec<Bytes>) -> Result<()> {
        let closed = || Error::new(ErrorKind::Closed, SEND, self.reason().unwrap_or_default());
        self.window.acquire_many(cost(bytes)).await.map_err(|_| closed())?.forget();
        self.peer.push(self.hop(what).frame(segments)?);
        Ok(())
    }

    /// Takes what the other side has sent. An error is a defect of the other gateway.
    pub(super) fn take(&self, what: What, segments: Vec<Bytes>) -> Result<()> {
        let bad = |why: &str| Error::new(ErrorKind::Protocol, "read a hop", why);
        let item = match what {
            What::Credit { cost } => {
                if self.window.available_permits() + cost as usize > WINDOW as usize {
                    return Err(bad("more is given back than was sent"));
                }
                self.window.add_permits(cost as usize);
                return Ok(());
            }
            What::Close { reason } => {
                self.end(&reason);
                return Ok(());
            }
            What::Open => return Err(bad("a session begins twice")),
            What::Chunk => match <[Bytes; 1]>::try_from(segments) {
                Ok([chunk]) => Item::Chunk(chunk),
                Err(_) => return Err(bad("a chunk is one segment")),
            },
            What::Frame { header, memory } => Item::Frame(Frame { header: header.into(), segments }, memory),
        };
        {
            let mut taken = locked(&self.taken);
            taken.outstanding += item.cost();
            if taken.outstanding > WINDOW {
                return Err(bad("more is sent than the window takes"));
            }
        }
        // It has ended meanwhile: nobody wants it.
        drop(self.inlet.send(item));
        Ok(())
    }

    /// What has that cost is handled: the sender may go on.
    pub(super) fn credit(&self, cost: u32) {
        let mut taken = locked(&self.taken);
        taken.owed += cost;
        if taken.owed >= KEPT {
            let cost = std::mem::take(&mut taken.owed);
            taken.outstanding -= cost;
            drop(taken);
            self.tell(What::Credit { cost });
        }
    }

    /// Ends the connection to a process of this host, as its own end would.
    pub(super) fn hang_up(&self, name: &str) {
        if let Some(socket) = locked(&self.receivers).get(name) {
            // It fails where the process has ended it already.
            let _ = shutdown(socket.as_raw_fd(), Shutdown::Both);
        }
    }
}

impl Item {
    fn cost(&self) -> u32 {
        match self {
            Self::Chunk(chunk) => cost(chunk.len()),
            Self::Frame(frame, _) => cost(frame.wire_len()),
            Self::Over(_) => 0,
        }
    }
}

/// A packet that has come out of a session.
pub(super) struct Arrived {
    pub frame: Frame,
    pub memory: Option<Arc<OwnedFd>>,
    /// To be credited when it is handled.
    pub cost: u32,
}

/// Where what comes out of a session is read.
pub(super) struct Inlet {
    items: mpsc::UnboundedReceiver<Item>,
    filling: Filling,
}

impl Inlet {
    /// The next packet, or why there is none any more.
    pub(super) async fn recv(&mut self, session: &Session) -> Result<Arrived, String> {
        loop {
            let Some(item) = self.items.recv().await else { return Err("the session has ended".to_owned()) };
            let cost = item.cost();
            match item {
                Item::Over(reason) => return Err(reason),
                Item::Chunk(chunk) => {
                    self.filling.append(&chunk).map_err(|error| error.to_string())?;
                    session.credit(cost);
                }
                Item::Frame(frame, memory) => {
                    let memory = match memory {
                        true => Some(self.filling.finish().map_err(|error| error.to_string())?),
                        false => None,
                    };
                    return Ok(Arrived { frame, memory, cost });
                }
            }
        }
    }
}
