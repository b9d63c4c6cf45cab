//! A process's place among those that share memory: what it has registered, and how it reaches the others.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::Connection;
use super::gather::{self, Options, Report};
use super::handle::{Access, Handle};
use super::memory::Memory;
use super::protocol::Secret;
use super::server::{Server, Shared};
use crate::{Error, ErrorKind, Result};

/// Bounds of a domain.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections of requesters; one more is hung up on.
    pub max_connections: usize,
    /// What may leave in all, in bytes a second; none for as much as there is. With a limit nobody may read by itself.
    pub bytes_per_s: Option<u64>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { max_connections: 256, bytes_per_s: None }
    }
}

/// Registers memory of this process, and reads and writes that of others. Blocking; for any thread.
pub struct Domain {
    shared: Arc<Shared>,
    server: Server,
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Domain").field("address", &self.server.address).finish_non_exhaustive()
    }
}

impl Domain {
    /// Listens at a free port of `address`; who cannot prove that it has `secret` is refused.
    pub fn open(address: IpAddr, secret: &str, limits: Limits) -> Result<Self> {
        if address.is_unspecified() {
            let why = format!("{address} is every interface: name the one that peers reach");
            return Err(Error::new(ErrorKind::InvalidInput, "open a domain", why));
        }
        let shared = Arc::new(Shared::new(Secret::new(secret)?, limits, address));
        let server = Server::start(address, Arc::clone(&shared))?;
        Ok(Self { shared, server })
    }

    /// Where peers ask.
    pub const fn address(&self) -> SocketAddr {
        self.server.address
    }

    /// Lets peers reach `memory` until [`Domain::deregister`].
    pub fn register(&self, memory: Memory, access: Access, epoch: u64) -> Result<Handle> {
        let (length, device) = (memory.length(), !memory.is_of_host());
        let token = self.shared.registry.register(memory, access, epoch)?;
        Ok(Handle { address: self.address(), length, access, epoch, token, device })
    }

    /// Lets nobody reach it any more, and waits for who is just doing so. True if readers had to be revoked after
    /// `limit`: what they have read does not count. Does nothing for what is not registered.
    ///
    /// [`ErrorKind::TimedOut`] where after `limit` something may still be written. The memory stays alive until that has
    /// ended.
    pub fn deregister(&self, handle: &Handle, limit: Duration) -> Result<bool> {
        self.shared.registry.deregister(handle.token, limit)
    }

    /// Lets peers find `text` by `name` and `serial`.
    pub fn announce(&self, name: &str, serial: u64, text: &str) -> Result<()> {
        self.shared.board.announce(name, serial, text)
    }

    /// Takes back all announcements up to `serial`, for good.
    pub fn retract(&self, serial: u64) {
        self.shared.board.retract(serial);
    }

    /// What the domain at `address` has announced, or announces within `limit`.
    ///
    /// [`ErrorKind::Stale`] where it has gone on to a higher serial, [`ErrorKind::Closed`] where it is gone.
    pub fn lookup(&self, address: SocketAddr, name: &str, serial: u64, limit: Duration) -> Result<String> {
        let deadline = Instant::now() + limit;
        Connection::open(address, &self.shared.secret, deadline)?.lookup(name, serial, deadline)
    }

    /// Fills `into` from `sources`, which hold the same bytes from `offset` on; see [`Options`].
    pub fn read_into(
        &self,
        sources: &[Handle],
        offset: u64,
        into: &Memory,
        options: &Options,
    ) -> Result<Report> {
        gather::read(&self.shared, sources, offset, into, options)
    }

    /// Writes `from` to `handle`, from `offset` on. After an error the range is undefined.
    pub fn write_from(
        &self,
        handle: &Handle,
        offset: u64,
        from: &Memory,
        options: &Options,
    ) -> Result<Report> {
        gather::write(&self.shared, handle, offset, from, options)
    }
}
