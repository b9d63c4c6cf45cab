//! The line to a store helper (`sky_monarch/training/store.py`), which serves torch's TCPStores on sockets of ours.
//!
//! One `SOCK_SEQPACKET` pair, whose other end is the helper's descriptor 3. Agent and lighthouse have a helper each.

use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, recv, send, sendmsg, socketpair,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

use crate::agent::watched::watched;
use crate::{Error, ErrorKind, Result};

/// The module that is the helper.
pub const MODULE: &str = "sky_monarch.training.store";

/// Longest answer.
const MESSAGE_BYTES: usize = 4096;
/// Longest wait for room in the helper's queue.
const SEND_LIMIT: Duration = Duration::from_secs(2);

/// Our end. Dropping it ends the helper.
#[derive(Debug)]
pub struct Line {
    socket: AsyncFd<OwnedFd>,
}

impl Line {
    /// Our end, and the one for the helper. Must run inside a Tokio runtime.
    pub fn pair() -> Result<(Self, OwnedFd)> {
        let io = |errno: nix::errno::Errno| Error::io("make a socket pair", errno.into());
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).map_err(io)?;
        nix::fcntl::fcntl(&ours, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK)).map_err(io)?;
        let socket = watched(ours, Interest::READABLE | Interest::WRITABLE)
            .map_err(|cause| Error::io("make a socket pair", cause))?;
        Ok((Self { socket }, theirs))
    }

    /// Has a store served on `listener`, and waits until it is. One question at a time.
    pub async fn open(&self, id: u64, listener: &impl AsFd) -> Result<()> {
        self.tell(&format!("open {id}\n"), Some(listener.as_fd().as_raw_fd())).await?;
        self.answer(id).await
    }

    /// Ends a store and its connections, and waits until they are ended. One question at a time.
    pub async fn close(&self, id: u64) -> Result<()> {
        self.tell_close(id).await?;
        self.answer(id).await
    }

    /// Ends a store, without waiting for the answer.
    pub async fn tell_close(&self, id: u64) -> Result<()> {
        self.tell(&format!("close {id}\n"), None).await
    }

    /// Completes when the helper has ended; to be called while no question is open.
    pub async fn ended(&self) {
        while !matches!(self.receive().await, Ok(None) | Err(_)) {}
    }

    async fn tell(&self, message: &str, fd: Option<i32>) -> Result<()> {
        let sending = self.socket.async_io(Interest::WRITABLE, |socket| {
            let (to, message) = (socket.as_raw_fd(), message.as_bytes());
            let sent = match fd {
                None => send(to, message, MsgFlags::MSG_NOSIGNAL),
                Some(fd) => {
                    let fds = [fd];
                    let rights = [ControlMessage::ScmRights(&fds)];
                    sendmsg::<()>(to, &[IoSlice::new(message)], &rights, MsgFlags::MSG_NOSIGNAL, None)
                }
            };
            sent.map_err(std::io::Error::from)
        });
        let sent = timeout(SEND_LIMIT, sending).await;
        sent.map_err(|_| failed("it does not read".into()))?
            .map(drop)
            .map_err(|cause| Error::io("talk to the store's helper", cause))
    }

    async fn answer(&self, id: u64) -> Result<()> {
        loop {
            let Some(answer) = self.receive().await? else { return Err(failed("it ended".into())) };
            if answer == format!("ready {id}") {
                return Ok(());
            }
            if let Some(text) = answer.strip_prefix(&format!("error {id} ")) {
                return Err(Error::new(ErrorKind::Refused, "serve a store", text.trim().to_owned()));
            }
            // The answer to an earlier question that was given up.
        }
    }

    /// The next message; none at the end.
    async fn receive(&self) -> Result<Option<String>> {
        let mut buffer = [0; MESSAGE_BYTES];
        let receiving = self.socket.async_io(Interest::READABLE, |socket| {
            recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty()).map_err(std::io::Error::from)
        });
        let n = receiving.await.map_err(|cause| Error::io("talk to the store's helper", cause))?;
        Ok((n > 0).then(|| String::from_utf8_lossy(&buffer[..n]).trim().to_owned()))
    }
}

fn failed(message: String) -> Error {
    Error::new(ErrorKind::Io, "talk to the store's helper", message)
}
