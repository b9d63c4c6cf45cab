//! The line to a store helper (`sky_monarch/training/store.py`), which serves torch's TCPStores on sockets of ours.
//!
//! Agent and lighthouse have a helper each. Its end of the line is its descriptor 3.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use tokio::time::timeout;

use crate::seqpacket::Packets;
use crate::{Error, ErrorKind, Result};

/// The module that is the helper.
pub const MODULE: &str = "sky_monarch.training.store";

/// Longest wait for room in the helper's queue.
const SEND_LIMIT: Duration = Duration::from_secs(2);

/// Our end. Dropping it ends the helper.
#[derive(Debug)]
pub struct Line {
    packets: Packets,
}

impl Line {
    /// Our end, and the one for the helper. Must run inside a Tokio runtime.
    pub fn pair() -> Result<(Self, OwnedFd)> {
        let (packets, theirs) = Packets::pair()?;
        Ok((Self { packets }, theirs))
    }

    /// Has a store served on `listener`, and waits until it is. One question at a time.
    pub async fn open(&self, id: u64, listener: &impl AsFd) -> Result<()> {
        self.tell(&format!("open {id}\n"), &[listener.as_fd()]).await?;
        self.answer(id).await
    }

    /// Ends a store and its connections, and waits until they are ended. One question at a time.
    pub async fn close(&self, id: u64) -> Result<()> {
        self.tell_close(id).await?;
        self.answer(id).await
    }

    /// Ends a store, without waiting for the answer.
    pub async fn tell_close(&self, id: u64) -> Result<()> {
        self.tell(&format!("close {id}\n"), &[]).await
    }

    /// Completes when the helper has ended; to be called while no question is open.
    pub async fn ended(&self) {
        while !matches!(self.receive().await, Ok(None) | Err(_)) {}
    }

    async fn tell(&self, message: &str, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let sent = timeout(SEND_LIMIT, self.packets.send(message, fds)).await;
        sent.map_err(|_| failed("it does not read".into()))?
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
        let received = self.packets.receive().await;
        let received = received.map_err(|cause| Error::io("talk to the store's helper", cause))?;
        Ok(received.map(|message| message.text))
    }
}

fn failed(message: String) -> Error {
    Error::new(ErrorKind::Io, "talk to the store's helper", message)
}
