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

/// Where a listener listens.
#[derive(Debug)]
pub enum Endpoint {
    /// An address that it binds itself.
    Bind(Address),
    /// A TCP socket that listens already; TLS is spoken there.
    Inherited(std::net::TcpListener),
}

/// Bound addresses at which peers of the run arrive. Dropping it stops listening soon; open channels go on.
#[derive(Debug)]
pub struct Listener {
    addresses: Vec<Address>,
    arrivals: mpsc::Receiver<Pending>,
    /// One an address: strangers at one of them hold nobody up at another.
    tasks: JoinSet<()>,
}

impl Listener {
    /// Binds `address` and starts to accept.
    ///
    /// An empty token is refused: it would make every process of this user a peer.
    pub async fn bind(address: &Address, credentials: Credentials, limits: Limits) -> Result<Self> {
        Self::open(vec![Endpoint::Bind(address.clone())], credentials, limits).await
    }

    /// The same at several places, whose connections are bounded together.
    pub async fn open(endpoints: Vec<Endpoint>, credentials: Credentials, limits: Limits) -> Result<Self> {
        let unusable = |why| Err(Error::new(ErrorKind::InvalidInput, "listen", why));
        if credentials.token.is_empty() {
            return unusable("the run's token is empty");
        }
        if endpoints.is_empty() {
            return unusable("no address was given");
        }
        let mut acceptors = Vec::new();
        for endpoint in endpoints {
            let identity = credentials.identity.as_ref();
            acceptors.push(match endpoint {
                Endpoint::Bind(address) => Acceptor::bind(&address, identity).await?,
                Endpoint::Inherited(listener) => Acceptor::inherit(listener, identity)?,
            });
        }
        let addresses = acceptors.iter().map(|acceptor| acceptor.address().clone()).collect();
        let (arrived, arrivals) = mpsc::channel(1);
        let credentials = Arc::new(credentials);
        let slots = Arc::new(Semaphore::new(limits.max_connections.max(1)));
        let mut tasks = JoinSet::new();
        for acceptor in acceptors {
            let (credentials, slots) = (Arc::clone(&credentials), Arc::clone(&slots));
            tasks.spawn(accept(acceptor, credentials, limits, slots, arrived.clone()));
        }
        Ok(Self { addresses, arrivals, tasks })
    }

    /// Where it listens (first): the port that was chosen in place of 0.
    pub fn address(&self) -> &Address {
        &self.addresses[0]
    }

    /// Everywhere it listens, in the order of its endpoints.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// The next peer that has proved who it is; it waits for [`Pending::welcome`]. Cancel safe.
    pub async fn accept(&mut self) -> Result<Pending> {
        let gone = || Error::new(ErrorKind::Closed, "accept a peer", "the listener has ended");
        self.arrivals.recv().await.ok_or_else(gone)
    }

    /// Stops listening; when this returns, the address is free again. (A drop does the same a moment later.)
    pub async fn close(mut self) {
        self.tasks.shutdown().await;
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
    slots: Arc<Semaphore>,
    arrived: mpsc::Sender<Pending>,
) {
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
