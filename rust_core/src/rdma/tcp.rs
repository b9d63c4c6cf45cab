//! Over the connection itself: wherever the owner is.

use super::connection::{Ask, Connection};
use super::memory::{self, Digest, Segment, cut};
use super::path::{Path, PathKind};
use super::protocol::Op;
use crate::{Error, ErrorKind, Result};

/// Moved by one call, and hashed while it is in the cache.
pub(super) const CHUNK: usize = 256 * 1024;

pub(super) struct Tcp {
    connection: Connection,
}

impl Tcp {
    pub(super) const fn new(connection: Connection) -> Self {
        Self { connection }
    }
}

impl Path for Tcp {
    fn kind(&self) -> PathKind {
        PathKind::Tcp
    }

    unsafe fn read(&mut self, ask: &Ask<'_>, into: &[Segment]) -> Result<u64> {
        let granted = self.connection.ask(&ask.request(Op::Read), ask.deadline)?;
        if granted != ask.length {
            let why = format!("it sends {granted} bytes where {} were asked for", ask.length);
            return Err(Error::new(ErrorKind::Protocol, "read the memory of a peer", why));
        }
        let mut digest = Digest::default();
        for chunk in cut(into, CHUNK) {
            memory::fetch_pages(chunk);
            // SAFETY: as the caller promises.
            unsafe {
                self.connection.socket.receive(chunk)?;
                if ask.digest {
                    digest.add(memory::bytes(chunk));
                }
            }
        }
        // The owner's last word: whether what it sent counts, and what it was.
        let theirs = self.connection.answer()?;
        if ask.digest && theirs != digest.value() {
            let why = "what arrived is not what was sent";
            return Err(Error::new(ErrorKind::Corrupt, "read the memory of a peer", why));
        }
        Ok(digest.value())
    }

    unsafe fn write(&mut self, ask: &Ask<'_>, from: &[Segment]) -> Result<()> {
        self.connection.ask(&ask.request(Op::Write), ask.deadline)?;
        let mut digest = Digest::default();
        for chunk in cut(from, CHUNK) {
            // SAFETY: as the caller promises.
            unsafe {
                self.connection.socket.send(chunk)?;
                if ask.digest {
                    digest.add(memory::bytes(chunk));
                }
            }
        }
        self.connection.socket.write(&digest.value().to_le_bytes())?;
        self.connection.answer().map(|_| ())
    }
}
