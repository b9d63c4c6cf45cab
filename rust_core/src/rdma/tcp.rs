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
        // SAFETY: as the caller promises.
        unsafe { read(&mut self.connection, ask, into) }
    }

    unsafe fn write(&mut self, ask: &Ask<'_>, from: &[Segment]) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { write(&mut self.connection, ask, from) }
    }
}

/// # Safety
/// As [`Path::read`].
pub(super) unsafe fn read(connection: &mut Connection, ask: &Ask<'_>, into: &[Segment]) -> Result<u64> {
    let granted = connection.ask(&ask.request(Op::Read), ask.deadline)?;
    if granted != ask.length {
        let why = format!("it sends {granted} bytes where {} were asked for", ask.length);
        return Err(Error::new(ErrorKind::Protocol, "read the memory of a peer", why));
    }
    let mut digest = Digest::default();
    for chunk in cut(into, CHUNK) {
        memory::fetch_pages(chunk);
        // SAFETY: as the caller promises.
        unsafe {
            connection.socket.receive(chunk)?;
            if ask.digest {
                digest.add(memory::bytes(chunk));
            }
        }
    }
    // The owner's last word: whether what it sent counts, and what it was.
    let theirs = connection.answer()?;
    if ask.digest && theirs != digest.value() {
        let why = "what arrived is not what was sent";
        return Err(Error::new(ErrorKind::Corrupt, "read the memory of a peer", why));
    }
    Ok(digest.value())
}

/// # Safety
/// As [`Path::write`].
pub(super) unsafe fn write(connection: &mut Connection, ask: &Ask<'_>, from: &[Segment]) -> Result<()> {
    connection.ask(&ask.request(Op::Write), ask.deadline)?;
    let mut digest = Digest::default();
    for chunk in cut(from, CHUNK) {
        // SAFETY: as the caller promises.
        unsafe {
            connection.socket.send(chunk)?;
            if ask.digest {
                digest.add(memory::bytes(chunk));
            }
        }
    }
    connection.socket.write(&digest.value().to_le_bytes())?;
    connection.answer().map(|_| ())
}
