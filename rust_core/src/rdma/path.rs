//! How bytes get from one process to another: one interface, one file a way.

use std::fmt;
use std::str::FromStr;

use super::cma::Cma;
use super::connection::{Ask, Connection};
use super::handle::Handle;
use super::memory::Segment;
use super::protocol::{Op, Secret};
use super::shm::Shm;
use super::tcp::Tcp;
use crate::{Error, ErrorKind, Result};
use std::time::Instant;

/// A way that bytes can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PathKind {
    /// `process_vm_readv` and `process_vm_writev`: same host, and the kernel lets one process at the other's memory.
    Cma,
    /// A file in memory that both have mapped: same host, and the owner allocated it for that ([`super::allocate`]).
    Shm,
    /// Over the connection itself.
    Tcp,
}

impl PathKind {
    /// Name, as reports and options have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cma => "cma",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
    }
}

impl fmt::Display for PathKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PathKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        [Self::Cma, Self::Shm, Self::Tcp].into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
            let why = format!("{text:?} is none of cma, shm and tcp");
            Error::new(ErrorKind::InvalidInput, "choose a transport", why)
        })
    }
}

/// One way to one owner. Each call asks the owner first, and is over when it returns.
pub(super) trait Path: Send {
    fn kind(&self) -> PathKind;

    /// Reads the range into `into`, which is as long; returns the digest of what was read, where it was asked for.
    ///
    /// # Safety
    /// `into` must be writable.
    unsafe fn read(&mut self, ask: &Ask<'_>, into: &[Segment]) -> Result<u64>;

    /// Writes `from` into the range, which is as long.
    ///
    /// # Safety
    /// `from` must be readable.
    unsafe fn write(&mut self, ask: &Ask<'_>, from: &[Segment]) -> Result<()>;
}

/// The best way to the owner of `handle`, or `wanted`.
///
/// [`ErrorKind::Io`] where the wanted one does not lead there.
pub(super) fn open(
    handle: &Handle,
    secret: &Secret,
    wanted: Option<PathKind>,
    deadline: Instant,
) -> Result<Box<dyn Path>> {
    let mut connection = Connection::open(handle.address, secret, deadline)?;
    if wanted == Some(PathKind::Tcp) {
        return Ok(Box::new(Tcp::new(connection)));
    }
    if connection.greeting.direct {
        if wanted != Some(PathKind::Cma) {
            // What the owner says of the range is asked for with nothing of it.
            let ask = Ask { handle, offset: 0, length: 0, digest: false, deadline };
            let grant = connection.grant(&ask, Op::GrantRead)?;
            connection.release(&ask)?;
            if let Some((file, _)) = grant.shared
                && let Some(mapped) = Shm::map(&connection.greeting, file, handle.access)
            {
                return Ok(Box::new(Shm::new(connection, mapped)));
            }
        }
        if wanted != Some(PathKind::Shm) && Cma::reaches(&connection.greeting) {
            return Ok(Box::new(Cma::new(connection)));
        }
    }
    match wanted {
        Some(kind) => {
            let why = format!("{kind} does not lead to {}", handle.address);
            Err(Error::new(ErrorKind::Io, "reach the memory of a peer", why))
        }
        None => Ok(Box::new(Tcp::new(connection))),
    }
}
