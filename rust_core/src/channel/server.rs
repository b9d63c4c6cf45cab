//! A listener that keeps its channels and merges what arrives on them into one bounded queue.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};
use tokio::task::JoinSet;

use super::{Channel, Credentials, Endpoint, Limits, Listener, Pending, Sender};
use crate::protocol::Peer;
use crate::wire::Address;
use crate::{Error, ErrorKind, Result};

/// Identity of one connection, unique in its server and never used again.
pub type ConnectionId = u64;

/// What happened on one connection. For each: one `Opened`, any number of `Message`, one `Closed`.
#[derive(Debug)]
pub enum ServerEvent<In> {
    /// A peer was welcomed.
    Opened {
        /// Who it is, by its own words.
        peer: Peer,
        /// Name in its certificate; none on a unix socket.
        certificate: Option<String>,
    },
    /// It sent something.
    Message(In),
    /// It is gone, for this reason.
    Closed(String),
}

/// An event on its way to the application. What it holds is its share of its connection's bytes, so that all that waits
/// here is bounded by [`Limits::queue_bytes`] for each connection.
struct Queued<In> {
    connection: ConnectionId,
    event: ServerEvent<In>,
    _held: Option<OwnedSemaphorePermit>,
}

type Senders<Out> = Arc<Mutex<HashMap<ConnectionId, Sender<Out>>>>;

/// Keeps many connections. Dropping it closes them all.
pub struct Server<Out, In> {
    addresses: Vec<Address>,
    senders: Senders<Out>,
    events: mpsc::Receiver<Queued<In>>,
    closing: watch::Sender<bool>,
    task: Option<tokio::task::JoinHandle<()>>,
}

impl<Out, In> std::fmt::Debug for Server<Out, In> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

impl<Out, In> Server<Out, In>
where
    Out: Serialize + 'static,
    In: DeserializeOwned + Send + 'static,
{
    /// Listens at `address`. `admit` decides about each peer (`Err` holds the reason of the refusal); `ready` is
    /// called, from any thread, after something was queued for [`try_next`](Self::try_next).
    pub async fn start(
        address: &Address,
        credentials: Credentials,
        limits: Limits,
        admit: impl Fn(&Pending) -> Result<(), String> + Send + 'static,
        ready: impl Fn() + Clone + Send + Sync + 'static,
    ) -> Result<Self> {
        let endpoints = vec![Endpoint::Bind(address.clone())];
        Self::open(endpoints, credentials, limits, admit, ready).await
    }

    /// The same at several places.
    pub async fn open(
        endpoints: Vec<Endpoint>,
        credentials: Credentials,
        limits: Limits,
        admit: impl Fn(&Pending) -> Result<(), String> + Send + 'static,
        ready: impl Fn() + Clone + Send + Sync + 'static,
    ) -> Result<Self> {
        let listener = Listener::open(endpoints, credentials, limits).await?;
        let addresses = listener.addresses().to_vec();
        let senders = Senders::default();
        let (queue, events) = mpsc::channel(limits.queue.max(1));
        let (closing, closed) = watch::channel(false);
        let kept = Arc::clone(&senders);
        let task = tokio::spawn(async move { serve(listener, kept, queue, closed, admit, ready).await });
        Ok(Self { addresses, senders, events, closing, task: Some(task) })
    }

    /// The next event; none once the server is closed and everything was read. Cancel safe.
    pub async fn next(&mut self) -> Option<(ConnectionId, ServerEvent<In>)> {
        self.events.recv().await.map(|queued| (queued.connection, queued.event))
    }

    /// The next event, where there is one.
    pub fn try_next(&mut self) -> Option<(ConnectionId, ServerEvent<In>)> {
        self.events.try_recv().ok().map(|queued| (queued.connection, queued.event))
    }

    /// Queues a message for one connection without waiting.
    ///
    /// [`ErrorKind::Closed`] when the connection is gone, [`ErrorKind::TooLarge`] when its queue is full.
    pub fn send(&self, connection: ConnectionId, message: &Out) -> Result<()> {
        let sender = lock(&self.senders).get(&connection).cloned();
        let gone =
            || Error::new(ErrorKind::Closed, "send a message", format!("connection {connection} is gone"));
        sender.ok_or_else(gone)?.try_send(message)
    }
}

impl<Out, In> Server<Out, In> {
    /// Closes one connection, after what is queued for it; nothing happens where it is gone.
    pub fn disconnect(&self, connection: ConnectionId, reason: &str) {
        let sender = lock(&self.senders).get(&connection).cloned();
        if let Some(sender) = sender {
            sender.close(reason);
        }
    }

    /// Where it listens (first).
    pub fn address(&self) -> &Address {
        &self.addresses[0]
    }

    /// Everywhere it listens, in the order of its endpoints.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Stops listening and closes every connection, after what is queued for it; waits for that.
    pub async fn close(&mut self) {
        self.closing.send_replace(true);
        // What nobody reads any more must not hold the connections back.
        self.events.close();
        while self.events.recv().await.is_some() {}
        if let Some(task) = self.task.take() {
            drop(task.await);
        }
    }
}

impl<Out, In> Drop for Server<Out, In> {
    fn drop(&mut self) {
        self.closing.send_replace(true);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it holds one of these.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Completes when the server shall close. (By value of `()`: the guard of the watch must not live across an await.)
async fn asked(closing: &mut watch::Receiver<bool>) {
    drop(closing.wait_for(|closing| *closing).await);
}

async fn serve<Out, In>(
    mut listener: Listener,
    senders: Senders<Out>,
    queue: mpsc::Sender<Queued<In>>,
    mut closing: watch::Receiver<bool>,
    admit: impl Fn(&Pending) -> Result<(), String> + Send + 'static,
    ready: impl Fn() + Clone + Send + Sync + 'static,
) where
    Out: Serialize + 'static,
    In: DeserializeOwned + Send + 'static,
{
    let mut connections = JoinSet::new();
    let mut next_id: ConnectionId = 1;
    loop {
        let pending = tokio::select! {
            biased;
            () = asked(&mut closing) => break,
            Some(_) = connections.join_next() => continue,
            pending = listener.accept() => match pending {
                Ok(pending) => pending,
                Err(_) => break,
            },
        };
        let verdict = admit(&pending);
        let (id, senders, queue) = (next_id, Arc::clone(&senders), queue.clone());
        let (ready, mut closing) = (ready.clone(), closing.clone());
        next_id += 1;
        connections.spawn(async move {
            if let Err(reason) = verdict {
                drop(pending.refuse(reason).await);
                return;
            }
            let certificate = pending.peer_name().map(str::to_owned);
            let opened = ServerEvent::Opened { peer: pending.peer().clone(), certificate };
            let Ok(channel) = pending.welcome().await else { return };
            keep(id, opened, channel, senders, queue, ready, &mut closing).await;
        });
    }
    listener.close().await;
    while connections.join_next().await.is_some() {}
}

async fn keep<Out, In>(
    id: ConnectionId,
    opened: ServerEvent<In>,
    channel: Channel<Out, In>,
    senders: Senders<Out>,
    queue: mpsc::Sender<Queued<In>>,
    ready: impl Fn() + Sync,
    closing: &mut watch::Receiver<bool>,
) where
    Out: Serialize,
    In: DeserializeOwned,
{
    let (sender, mut receiver) = channel.split();
    lock(&senders).insert(id, sender.clone());
    let push = async |event, held| {
        // It fails only when the server is closed: then nobody asks.
        drop(queue.send(Queued { connection: id, event, _held: held }).await);
        ready();
    };
    push(opened, None).await;
    let error = loop {
        tokio::select! {
            biased;
            () = asked(closing) => {
                sender.close("the server is closed");
                break sender.close_reason().unwrap_or_default();
            }
            message = receiver.recv_held() => match message {
                Ok((message, held)) => push(ServerEvent::Message(message), Some(held)).await,
                Err(error) => break error.message().to_owned(),
            },
        }
    };
    lock(&senders).remove(&id);
    push(ServerEvent::Closed(error), None).await;
    drop(receiver);
    // Its last messages leave, for as long as the channel lingers.
    sender.finished().await;
}
