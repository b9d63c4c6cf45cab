//! TLS on the lighthouse's port: who shows no certificate of the run never reaches a decoder.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_stream::{Stream, StreamExt};

use super::listener::{Connection, Incoming};

/// Name in the lighthouse's certificate, which everyone who dials it checks.
pub const SERVER_NAME: &str = "lighthouse";

/// Handshakes under way; more wait in the kernel's backlog.
const MAX_HANDSHAKES: usize = 256;
/// For one handshake. Who stays silent loses its place then.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);

/// The connections whose peers have shown their certificate. Dropping it stops listening.
pub struct Secured {
    done: mpsc::Receiver<Connection>,
    task: JoinHandle<()>,
}

impl Secured {
    /// Takes the connections of `incoming` through their handshake, many at a time. Must run inside a Tokio runtime.
    pub fn new(incoming: Incoming, acceptor: TlsAcceptor) -> Self {
        let (tell, done) = mpsc::channel(1);
        Self { done, task: tokio::spawn(accept(incoming, acceptor, tell)) }
    }
}

impl Stream for Secured {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.done.poll_recv(context).map(|connection| connection.map(Ok))
    }
}

impl Drop for Secured {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(mut incoming: Incoming, acceptor: TlsAcceptor, tell: mpsc::Sender<Connection>) {
    let mut handshakes = JoinSet::new();
    loop {
        tokio::select! {
            Some(connection) = incoming.next(), if handshakes.len() < MAX_HANDSHAKES => {
                // Incoming waits out its own errors.
                let Ok(connection) = connection else { continue };
                let (acceptor, tell) = (acceptor.clone(), tell.clone());
                handshakes.spawn(async move {
                    match timeout(HANDSHAKE_LIMIT, connection.secure(&acceptor)).await {
                        // Closed: nobody serves any more.
                        Ok(Ok(connection)) => drop(tell.send(connection).await),
                        Ok(Err(error)) => tracing::warn!(%error, "a connection was refused"),
                        Err(_) => tracing::warn!("a connection was refused: its handshake took too long"),
                    }
                });
            }
            Some(_) = handshakes.join_next() => {}
            else => return,
        }
    }
}
