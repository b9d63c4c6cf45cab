//! How bytes get from one process to another: one interface, one file a way.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

use super::cma::Cma;
use super::connection::{Ask, Connection};
use super::handle::Handle;
use super::memory::Segment;
use super::protocol::Op;
use super::server::Shared;
use super::shm::Shm;
use super::tcp::Tcp;
use super::verbs::VerbsPath;
use crate::gpu::GpuRuntime;
use crate::{Error, ErrorKind, Result};

/// A way that bytes can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PathKind {
    /// `process_vm_readv` and `process_vm_writev`: same host, and the kernel lets one process at the other's memory.
    Cma,
    /// A file in memory that both have mapped: same host, and the owner allocated it for that ([`super::allocate`]).
    Shm,
    /// An RDMA device of either, on one fabric.
    Verbs,
    /// Over the connection itself.
    Tcp,
}

impl PathKind {
    /// Name, as reports and options have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cma => "cma",
            Self::Shm => "shm",
            Self::Verbs => "ibverbs",
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
        [Self::Cma, Self::Shm, Self::Verbs, Self::Tcp]
            .into_iter()
            .find(|kind| kind.name() == text)
            .ok_or_else(|| {
                let why = format!("{text:?} is none of cma, shm, ibverbs and tcp");
                Error::new(ErrorKind::InvalidInput, "choose a transport", why)
            })
    }
}

/// One way to one owner. Each call asks the owner first, and is over when it returns.
pub(super) trait Path: Send {
    fn kind(&self) -> PathKind;

    /// Readies the way for `mine`, which lies on an accelerator; false where it has to be staged.
    ///
    /// # Safety
    /// `mine` must be allocations of `runtime` until the operation that follows is over.
    unsafe fn takes_device(
        &mut self,
        _runtime: &'static dyn GpuRuntime,
        _mine: &[Segment],
        _ask: &Ask<'_>,
        _writes: bool,
    ) -> bool {
        false
    }

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

/// Names the way that bytes take, where the caller does not.
const TRANSPORT_ENV: &str = "SKY_MONARCH_RDMA_TRANSPORT";

/// What `wanted` or the environment says; none for the best.
///
/// [`ErrorKind::InvalidInput`] where the environment names no way.
fn chosen(wanted: Option<PathKind>, environment: Option<&str>) -> Result<Option<PathKind>> {
    match (wanted, environment) {
        (Some(kind), _) => Ok(Some(kind)),
        (None, None | Some("")) => Ok(None),
        (None, Some(text)) => text.parse().map(Some).map_err(|error: Error| {
            let why = format!("{TRANSPORT_ENV}: {}", error.message());
            Error::new(ErrorKind::InvalidInput, "choose a transport", why)
        }),
    }
}

/// The best way to the owner of `handle`, or `wanted`, or what `SKY_MONARCH_RDMA_TRANSPORT` says: on one host what both
/// have mapped or cross-memory attach, else a fabric that leads there, else the connection.
///
/// [`ErrorKind::Io`] where the wanted one does not lead there.
pub(super) fn open(
    handle: &Handle,
    near: &Shared,
    wanted: Option<PathKind>,
    deadline: Instant,
) -> Result<Box<dyn Path>> {
    let wanted = chosen(wanted, std::env::var(TRANSPORT_ENV).ok().as_deref())?;
    let allowed = |kind| wanted.is_none_or(|wanted| wanted == kind);
    let mut connection = Connection::open_for(handle, &near.secret, deadline)?;
    if wanted == Some(PathKind::Tcp) {
        return Ok(Box::new(Tcp::new(connection)));
    }
    let mut refused = "its owner lets nobody read by itself".to_owned();
    if connection.greeting.direct {
        let of_host = !handle.device;
        if of_host && allowed(PathKind::Shm) {
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
        if of_host && allowed(PathKind::Cma) && Cma::reaches(&connection.greeting) {
            return Ok(Box::new(Cma::new(connection)));
        }
        "it is on another host, or out of reach there".clone_into(&mut refused);
        if allowed(PathKind::Verbs) && (wanted.is_some() || !near.avoided.has(handle.address)) {
            match over_fabric(connection, near, wanted.is_none(), deadline) {
                Ok(path) => return Ok(Box::new(path)),
                Err(refusal) if refusal.1.kind() == ErrorKind::InvalidInput => return Err(refusal.1),
                Err(refusal) => {
                    let (given_back, error) = *refusal;
                    if near.fabric().is_ok() {
                        tracing::info!(address = %handle.address, %error, "no RDMA to an owner");
                    }
                    // What has been said half-way cannot be gone on with.
                    connection = match given_back {
                        Some(connection) => connection,
                        None => Connection::open_for(handle, &near.secret, deadline)?,
                    };
                    near.avoided.add(handle.address);
                    refused = error.message().to_owned();
                }
            }
        }
    }
    match wanted {
        Some(kind) => {
            let why = format!("{kind} does not lead to {}: {refused}", handle.address);
            Err(Error::new(ErrorKind::Io, "reach the memory of a peer", why))
        }
        None => Ok(Box::new(Tcp::new(connection))),
    }
}

/// The fabric, where both have one; or the connection, if it can still be used, and why not.
fn over_fabric(
    connection: Connection,
    near: &Shared,
    may_fall_back: bool,
    deadline: Instant,
) -> Result<VerbsPath, Box<(Option<Connection>, Error)>> {
    let fabric = match near.fabric() {
        Ok(fabric) => Arc::clone(fabric),
        Err(error) => return Err(Box::new((Some(connection), error))),
    };
    VerbsPath::open(connection, fabric, may_fall_back, deadline).map_err(|refusal| {
        let (connection, error) = *refusal;
        let whole = matches!(error.kind(), ErrorKind::Io | ErrorKind::Device | ErrorKind::Forbidden);
        Box::new((whole.then_some(connection), error))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_caller_comes_before_the_environment_which_has_to_name_a_way() {
        assert_eq!(chosen(None, None).expect("one"), None);
        assert_eq!(chosen(None, Some("")).expect("one"), None);
        assert_eq!(chosen(None, Some("ibverbs")).expect("one"), Some(PathKind::Verbs));
        assert_eq!(chosen(Some(PathKind::Cma), Some("tcp")).expect("one"), Some(PathKind::Cma));
        let error = chosen(None, Some("rdma")).expect_err("none");
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains(TRANSPORT_ENV), "{error}");
    }
}
