//! Typed, bounded, authenticated channels between agent, controller and session.
//!
//! ```text
//!  connect ── Hello ─▶ Listener          version, run and token are checked; then the application decides
//!          ◀─ Welcome ──┘                (Pending::welcome or Pending::refuse), all within one deadline
//!
//!  Sender ─▶ outbound queue ─▶ writer ═══ wire ═══ reader ─▶ inbound queue ─▶ Receiver
//! ```
//!
//! Both queues are bounded by messages and by bytes. A full inbound queue stops the reader, which fills the wire,
//! which stops the peer's writer, which fills its outbound queue: a slow consumer slows its own sender and nobody else.

mod admission;
mod handshake;
mod listener;
mod pump;
mod server;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use crate::wire::Frame;
use crate::wire::tls::Identity;
use crate::{Error, ErrorKind, Result};
pub use admission::admit_agent;
pub use handshake::connect;
pub use listener::{Endpoint, Listener, Pending};
use pump::{Budget, Closing};
pub use server::{ConnectionId, Server, ServerEvent};

/// What a run's peers have in common, and what this one proves itself with.
#[derive(Clone)]
pub struct Credentials {
    /// The run.
    pub run_id: String,
    /// Secret of the run.
    pub token: String,
    /// Certificate of this peer; needed for `tls:` addresses only.
    pub identity: Option<Identity>,
    /// Name that the certificate of a dialled server must hold; `tls:` only.
    pub server_name: String,
}

impl Credentials {
    /// Credentials for unix sockets.
    pub fn new(run_id: impl Into<String>, token: impl Into<String>) -> Self {
        Self {
            run_id: run_id.into(),
            token: token.into(),
            identity: None,
            server_name: "controller".to_owned(),
        }
    }

    /// The same with a certificate, for `tls:` addresses.
    #[must_use]
    pub fn with_identity(mut self, identity: Identity) -> Self {
        self.identity = Some(identity);
        self
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("run_id", &self.run_id).finish_non_exhaustive()
    }
}

/// Bounds of a channel and of a listener.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of one frame.
    pub max_frame: u32,
    /// Messages in each queue.
    pub queue: usize,
    /// Bytes in each queue. A larger frame passes alone.
    pub queue_bytes: u32,
    /// Connections that a listener keeps; one more is refused with that reason.
    pub max_connections: usize,
    /// Connections of a listener that may be in their handshake; more wait in the kernel's backlog.
    pub max_handshakes: usize,
    /// From accept to Welcome. A dialler that stays silent loses its place then.
    pub handshake: Duration,
    /// What is queued when a sender closes has this long to leave.
    pub linger: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_frame: 16 << 20,
            queue: 1024,
            queue_bytes: 32 << 20,
            max_connections: 4096,
            max_handshakes: 64,
            handshake: Duration::from_secs(5),
            linger: Duration::from_secs(2),
        }
    }
}

/// Both halves of an open channel.
#[derive(Debug)]
pub struct Channel<Out, In> {
    sender: Sender<Out>,
    receiver: Receiver<In>,
}

impl<Out: Serialize, In: DeserializeOwned> Channel<Out, In> {
    /// Queues a message, waiting while the queue is full.
    pub async fn send(&self, message: &Out) -> Result<()> {
        self.sender.send(message).await
    }

    /// Queues a message without waiting. See [`Sender::try_send`].
    pub fn try_send(&self, message: &Out) -> Result<()> {
        self.sender.try_send(message)
    }

    /// The next message. See [`Receiver::recv`].
    pub async fn recv(&mut self) -> Result<In> {
        self.receiver.recv().await
    }

    /// The two halves, to be used from two tasks. The channel closes when either is gone.
    pub fn split(self) -> (Sender<Out>, Receiver<In>) {
        (self.sender, self.receiver)
    }
}

/// Sending half; clones share the queue. The channel closes, after what is queued, when the last one is dropped.
pub struct Sender<Out> {
    queue: mpsc::Sender<(Frame, OwnedSemaphorePermit)>,
    budget: Budget,
    closing: Arc<Closing>,
    max_frame: u32,
    message: std::marker::PhantomData<fn(Out)>,
}

impl<Out> Clone for Sender<Out> {
    fn clone(&self) -> Self {
        Self {
            queue: self.queue.clone(),
            budget: self.budget.clone(),
            closing: Arc::clone(&self.closing),
            max_frame: self.max_frame,
            message: std::marker::PhantomData,
        }
    }
}

impl<Out> fmt::Debug for Sender<Out> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").field("closing", &self.closing).finish_non_exhaustive()
    }
}

const SEND: &str = "send a message";

impl<Out: Serialize> Sender<Out> {
    fn frame(&self, message: &Out) -> Result<Frame> {
        let frame = Frame::from_message(message)?;
        frame.check(self.max_frame)?;
        Ok(frame)
    }

    /// Queues a message, waiting while the queue is full.
    ///
    /// [`ErrorKind::TooLarge`] when the message exceeds [`Limits::max_frame`] (nothing was sent, the channel lives),
    /// [`ErrorKind::Closed`] when the channel is closed. A queued message may still be lost with the connection.
    pub async fn send(&self, message: &Out) -> Result<()> {
        let frame = self.frame(message)?;
        tokio::select! {
            biased;
            () = self.closing.closed() => Err(self.closing.error(SEND)),
            sent = async {
                let permit = self.budget.take(frame.wire_len()).await;
                self.queue.send((frame, permit)).await
            } => sent.map_err(|_| self.closing.error(SEND)),
        }
    }

    /// Queues a message without waiting. [`ErrorKind::TooLarge`] when it or the queue exceeds its bound.
    pub fn try_send(&self, message: &Out) -> Result<()> {
        let frame = self.frame(message)?;
        if self.closing.is_closed() {
            return Err(self.closing.error(SEND));
        }
        let full = || Error::new(ErrorKind::TooLarge, SEND, "the queue is full: the peer does not keep up");
        let permit = self.budget.try_take(frame.wire_len()).ok_or_else(full)?;
        self.queue.try_send((frame, permit)).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => full(),
            mpsc::error::TrySendError::Closed(_) => self.closing.error(SEND),
        })
    }
}

impl<Out> Sender<Out> {
    /// Closes the channel; what is queued has [`Limits::linger`] to leave. The first reason stays.
    pub fn close(&self, reason: &str) {
        self.closing.close(ErrorKind::Closed, reason.to_owned());
    }

    /// Completes when the channel is closed, by either side, for whatever reason.
    pub async fn closed(&self) {
        self.closing.closed().await;
    }

    /// Why the channel is closed; none while it is open.
    pub fn close_reason(&self) -> Option<String> {
        self.closing.reason()
    }

    /// Completes when the connection is gone: what was queued has been written, or cannot be any more.
    pub async fn finished(&self) {
        self.closing.finished().await;
    }
}

/// Receiving half. The channel closes when it is dropped.
pub struct Receiver<In> {
    queue: mpsc::Receiver<(In, OwnedSemaphorePermit)>,
    closing: Arc<Closing>,
}

impl<In> fmt::Debug for Receiver<In> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver").field("closing", &self.closing).finish_non_exhaustive()
    }
}

impl<In> Receiver<In> {
    /// The next message. Cancel safe.
    ///
    /// After the last message that arrived: why there are no more, as [`ErrorKind::Closed`],
    /// [`ErrorKind::Protocol`] or [`ErrorKind::TooLarge`]; the same again on each further call.
    pub async fn recv(&mut self) -> Result<In> {
        self.recv_held().await.map(|(message, _held)| message)
    }

    /// The same with the message's share of the queue's bytes, for whoever queues it again.
    async fn recv_held(&mut self) -> Result<(In, OwnedSemaphorePermit)> {
        match self.queue.recv().await {
            Some(received) => Ok(received),
            None => Err(self.closing.error("receive a message")),
        }
    }
}

impl<In> Drop for Receiver<In> {
    fn drop(&mut self) {
        self.closing.close(ErrorKind::Closed, "this side stopped receiving".to_owned());
    }
}
