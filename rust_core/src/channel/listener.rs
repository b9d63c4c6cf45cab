//! Accepts connections, many handshakes at a time, and hands over those that proved who they are.

use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::pump::{self, Reader, Writer};
use super::{Channel, Credentials, Limits, handshake};
use crate::protocol::{Hello, Peer};
use crate::wire::{Acceptor, Address};
use crate::{Error, ErrorKind, Result};

/// A bound address at which peers of the run arrive. Dropping it stops listening soon; open channels go on.
#[derive(Debug)]
pub struct Listener {
    address: Address,
    arrivals: mpsc::Receiver<Pending>,
    task: tokio::task::JoinHandle<()>,
}

impl Listener {
    /// Binds `address` and starts to accept.
    ///
    /// An empty token is refused: it would make every process of this user a peer.
    pub async fn bind(address: &Address, credentials: Credentials, limits: Limits) -> Result<Self> {
        if credentials.token.is_empty() {
            return Err(Error::new(ErrorKind::InvalidInput, "listen", "the run's token is empty"));
        }
        let acceptor = Acceptor::bind(address, credentials.identity.as_ref()).await?;
        let address = acceptor.address().clone();
        let (arrived, arrivals) = mpsc::channel(1);
        let task = tokio::spawn(accept(acceptor, Arc::new(credentials), limits, arrived));
        Ok(Self { address, arrivals, task })
    }

    /// Where it listens: the port that was chosen in place of 0.
    pub const fn address(&self) -> &Address {
        &self.address
    }

    /// The next peer that has proved who it is; it waits for [`Pending::welcome`]. Cancel safe.
    pub async fn accept(&mut self) -> Result<Pending> {
        let gone = || Error::new(ErrorKind::Closed, "accept a peer", "the listener has ended");
        self.arrivals.recv().await.ok_or_else(gone)
    }

    /// Stops listening; when this returns, the address is free again. (A drop does the same a moment later.)
    pub async fn close(mut self) {
        self.task.abort();
        drop((&mut self.task).await);
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A peer of the run that waits for its answer. Dropping it hangs up.
pub struct Pending {
    peer: Peer,
    peer_name: Option<String>,
    reader: Reader,
    writer: Writer,
    limits: Limits,
    deadline: Instant,
    slot: OwnedSemaphorePermit,
}

impl std::fmt::Debug for Pending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl Pending {
    /// Who dials, by its own words.
    pub const fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Name in its certificate; none on a unix socket.
    pub fn peer_name(&self) -> Option<&str> {
        self.peer_name.as_deref()
    }

    /// Opens the channel.
    pub async fn welcome<Out, In>(mut self) -> Result<Channel<Out, In>>
    where
        Out: Serialize,
        In: DeserializeOwned + Send + 'static,
    {
        by(self.deadline, handshake::answer(&mut self.writer, None)).await?;
        Ok(pump::start(self.reader, self.writer, &self.limits, Some(self.slot)))
    }

    /// Tells the peer why it is not welcome, and hangs up.
    pub async fn refuse(mut self, reason: impl Into<String>) -> Result<()> {
        by(self.deadline, handshake::answer(&mut self.writer, Some(reason.into()))).await
    }
}

async fn by<T>(deadline: Instant, work: impl Future<Output = Result<T>>) -> Result<T> {
    let late = |_| Error::new(ErrorKind::TimedOut, "accept a peer", "its handshake took too long");
    timeout_at(deadline, work).await.map_err(late)?
}

async fn accept(
    acceptor: Acceptor,
    credentials: Arc<Credentials>,
    limits: Limits,
    arrived: mpsc::Sender<Pending>,
) {
    let slots = Arc::new(Semaphore::new(limits.max_connections.max(1)));
    // Dropped with this task, which ends every handshake under way.
    let mut handshakes = JoinSet::new();
    loop {
        while handshakes.len() >= limits.max_handshakes.max(1) {
            drop(handshakes.join_next().await);
        }
        let incoming = tokio::select! {
            incoming = acceptor.incoming() => incoming,
            Some(_) = handshakes.join_next() => continue,
        };
        let incoming = match incoming {
            Ok(incoming) => incoming,
            Err(error) => {
                // Out of file descriptors, most likely: the connection stays in the backlog, others may end meanwhile.
                tracing::warn!(%error, "cannot accept");
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                continue;
            }
        };
        let (credentials, slots, arrived) = (Arc::clone(&credentials), Arc::clone(&slots), arrived.clone());
        handshakes.spawn(async move {
            let deadline = Instant::now() + limits.handshake;
            let greeted = by(deadline, async {
                let stream = incoming.authenticate().await?;
                greet(stream, &credentials, limits, slots, deadline).await
            });
            match greeted.await {
                // Waits for the application: then later dialers wait too, and the bounds hold.
                Ok(pending) => drop(arrived.send(pending).await),
                Err(error) => tracing::debug!(%error, "a connection was not accepted"),
            }
        });
    }
}

async fn greet(
    stream: crate::wire::Stream,
    credentials: &Credentials,
    limits: Limits,
    slots: Arc<Semaphore>,
    deadline: Instant,
) -> Result<Pending> {
    let peer_name = stream.peer_name().map(str::to_owned);
    let (mut reader, mut writer) = handshake::halves(stream);
    let greeting = async {
        let Hello { peer, .. } = handshake::receive(&mut reader, credentials).await?;
        let slot = slots.try_acquire_owned().map_err(|_| {
            let what = format!("{} connections are open already", limits.max_connections);
            Error::new(ErrorKind::Refused, "accept a peer", what)
        })?;
        Ok::<_, Error>((peer, slot))
    };
    match greeting.await {
        Ok((peer, slot)) => Ok(Pending { peer, peer_name, reader, writer, limits, deadline, slot }),
        Err(error) => {
            if error.kind() != ErrorKind::Closed {
                drop(handshake::answer(&mut writer, Some(error.message().to_owned())).await);
                drop(writer.shutdown().await);
            }
            Err(error)
        }
    }
}
