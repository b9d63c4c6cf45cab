//! Two connections made one.

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::socket::{setsockopt, sockopt};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::agent::mutant;
use crate::wire::Stream;

/// Bytes that wait between the two connections, each way; the rest waits in the kernel's own buffers.
const BUFFER: usize = 64 * 1024;

/// Both halves of a connection of the tunnel.
pub struct Ends {
    pub(super) read: Box<dyn AsyncRead + Send + Unpin>,
    pub(super) write: Box<dyn AsyncWrite + Send + Unpin>,
}

impl fmt::Debug for Ends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ends(…)")
    }
}

impl Ends {
    pub(super) fn of(stream: Stream) -> Self {
        let (read, write) = stream.split();
        Self { read: Box::new(read), write: Box::new(write) }
    }

    /// As one stream.
    pub fn joined(self) -> impl AsyncRead + AsyncWrite + Send + Unpin {
        tokio::io::join(self.read, self.write)
    }
}

/// Bytes that have gone either way.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) sent: AtomicU64,
    pub(super) received: AtomicU64,
}

impl Counts {
    pub(super) fn add(&self, sent: u64, received: u64) {
        self.sent.fetch_add(sent, Ordering::Relaxed);
        self.received.fetch_add(received, Ordering::Relaxed);
    }

    /// Sent and received, so far.
    pub(super) fn read(&self) -> (u64, u64) {
        (self.sent.load(Ordering::Relaxed), self.received.load(Ordering::Relaxed))
    }
}

/// Joins a connection of this machine with one of the tunnel, until both ways have ended; resets it where the other ended
/// otherwise than in order. What the tunnel's end says counts as sent.
pub(super) async fn join(mut near: TcpStream, mut far: Ends, counts: &Counts) -> io::Result<()> {
    let joined = {
        let (read, write) = near.split();
        both((&mut far.read, &mut far.write), (read, write), counts).await
    };
    if joined.is_err() && mutant::is_on("tunnel_ends_resets") {
        let _ = far.write.shutdown().await;
    } else if joined.is_err() {
        reset(&near);
    }
    joined
}

/// Joins two connections of the tunnel, until both ways have ended. Where one ends otherwise than in order both are
/// dropped, without the word that it was in order.
pub(super) async fn pass(mut near: Ends, mut far: Ends, counts: &Counts) -> io::Result<()> {
    both((&mut near.read, &mut near.write), (&mut far.read, &mut far.write), counts).await
}

async fn both<A, B, C, D>(near: (A, B), far: (C, D), counts: &Counts) -> io::Result<()>
where
    A: AsyncRead + Unpin,
    B: AsyncWrite + Unpin,
    C: AsyncRead + Unpin,
    D: AsyncWrite + Unpin,
{
    let (out, back) = (one_way(near.0, far.1, &counts.sent), one_way(far.0, near.1, &counts.received));
    tokio::try_join!(out, back).map(|_| ())
}

async fn one_way(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    count: &AtomicU64,
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let length = from.read(&mut buffer).await?;
        if length == 0 {
            return to.shutdown().await;
        }
        to.write_all(&buffer[..length]).await?;
        to.flush().await?;
        count.fetch_add(length as u64, Ordering::Relaxed);
    }
}

/// Has the peer of a connection that is about to be dropped see a reset, at once: what a dead process's looks like.
pub(super) fn reset(stream: &TcpStream) {
    let at_once = libc::linger { l_onoff: 1, l_linger: 0 };
    // Where it fails the connection is gone already.
    let _ = setsockopt(&stream.as_fd(), sockopt::Linger, &at_once);
}
