//! What is left at the port of a closed store: an answer to the greeting, and then the end.
//!
//! A TCPStore client tries again, until its timeout, where the connection is refused or the greeting goes wrong; the
//! loss of a connection after it fails its next call at once.

use std::collections::VecDeque;
use std::net::TcpListener as StdListener;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

/// Closed stores that still answer; by the time one goes, nobody has its address any more.
const MOST: usize = 64;
/// Conversations at a time at one port; more wait in the kernel's backlog.
const MOST_CLIENTS: usize = 64;
/// Longest conversation: from the greeting to the client's first question.
const LIMIT: Duration = Duration::from_secs(5);
/// Pause after an accept that failed for want of descriptors or memory.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(50);
/// `VALIDATE` (1 byte) with its magic number (4), `PING` (1) with a number to repeat (4).
const GREETING: usize = 10;
/// Where in the greeting the number to repeat starts.
const NUMBER: usize = 6;

/// The ports of closed stores; dropping it frees them.
#[derive(Debug, Default)]
pub(super) struct Tombstones(VecDeque<AbortHandle>);

impl Tombstones {
    /// Answers at `listener` from now on.
    pub(super) fn add(&mut self, listener: StdListener) {
        if self.0.len() >= MOST
            && let Some(oldest) = self.0.pop_front()
        {
            oldest.abort();
        }
        self.0.push_back(tokio::spawn(serve(listener)).abort_handle());
    }

    /// Goes on answering.
    pub(super) async fn forever(self) {
        let _held = self;
        std::future::pending::<()>().await;
    }
}

impl Drop for Tombstones {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

async fn serve(listener: StdListener) {
    let listener = listener.set_nonblocking(true).and_then(|()| TcpListener::from_std(listener));
    let listener = match listener {
        Ok(listener) => listener,
        Err(error) => return tracing::warn!(%error, "a closed store's port cannot be served"),
    };
    let mut clients = JoinSet::new();
    loop {
        if clients.len() >= MOST_CLIENTS {
            clients.join_next().await;
        }
        match listener.accept().await {
            Ok((client, _)) => drop(clients.spawn(timeout(LIMIT, hang_up(client)))),
            Err(error) => {
                tracing::debug!(%error, "accept failed");
                sleep(ACCEPT_BACKOFF).await;
            }
        }
        while clients.try_join_next().is_some() {}
    }
}

async fn hang_up(mut client: TcpStream) -> std::io::Result<()> {
    let mut greeting = [0; GREETING];
    client.read_exact(&mut greeting).await?;
    client.write_all(&greeting[NUMBER..]).await?;
    // the first question, or the client's own end
    client.read(&mut [0]).await.map(drop)
}
