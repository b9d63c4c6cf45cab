//! Over an RDMA device, by libibverbs: reliable connected queue pairs, plain verbs alone.
//!
//! ```text
//!  requester                                     owner
//!  Pair (INIT) ── Join, its end ─────▶  Pair (INIT ─▶ RTR ─▶ RTS)     over the connection that both proved themselves on
//!  (RTR ─▶ RTS) ◀── the owner's end, and a key for 16 random bytes ──
//!  RDMA READ of those: does the fabric lead there?
//!  Lend ─▶ (checked: token, epoch, rights, range) ─▶ addresses and keys
//!  RDMA READ | WRITE, in messages, 16 at a time
//!  Release; or Quit where it failed: the owner destroys its queue pair before it lets the memory go
//! ```
//!
//! What fails on the fabric, and not by the owner's word, goes over the connection itself from then on, unless this way
//! was asked for by name.

mod endpoint;
mod fabric;
mod fragments;
mod outcome;
mod owner;
mod pair;
mod port;
mod region;
#[cfg(test)]
mod rxe_tests;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub(super) use endpoint::Endpoint;
pub(super) use fabric::Fabric;
pub(super) use fragments::Keyed;
pub(super) use owner::{JOINED, OwnerEnd, keyed, regions};
pub use region::{Placement, Way};
pub(super) use region::{Region, Rights};

use self::fragments::{fragments, take};
use self::outcome::{Failure, MOVE};
use self::pair::{Direction, Pair};
use self::region::Registered;
use super::connection::{Ask, Connection};
use super::memory::{self, Digest, Segment};
use super::path::{Path, PathKind};
use super::protocol::Op;
use super::tcp;
use crate::gpu::GpuRuntime;
use crate::{Error, ErrorKind, Result};

/// To make two queue pairs ready, and to read 16 bytes through them.
const SET_UP: Duration = Duration::from_millis(2500);
/// An owner that this way does not lead to is not tried again for so long.
const AVOID: Duration = Duration::from_secs(60);
/// Owners that are remembered so.
const MOST_AVOIDED: usize = 1024;

/// Owners that have a device, and that the fabric does not lead to.
#[derive(Default)]
pub(super) struct Avoided(Mutex<HashMap<SocketAddr, Instant>>);

impl Avoided {
    pub(super) fn has(&self, owner: SocketAddr) -> bool {
        let avoided = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        avoided.get(&owner).is_some_and(|until| Instant::now() < *until)
    }

    pub(super) fn add(&self, owner: SocketAddr) {
        let mut avoided = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        avoided.retain(|_, until| now < *until);
        if avoided.len() < MOST_AVOIDED {
            avoided.insert(owner, now + AVOID);
        }
    }
}

/// One way to one owner over a fabric.
pub(super) struct VerbsPath {
    connection: Connection,
    fabric: Arc<Fabric>,
    /// None before the first use, and after a failure.
    pair: Option<Pair>,
    /// Whether what the fabric fails at may go over the connection.
    may_fall_back: bool,
    fallen_back: bool,
    /// Memory of an accelerator, for the operation that comes next.
    ready: Option<Registered>,
}

impl VerbsPath {
    /// Connects, and tries whether packets get there.
    ///
    /// The connection comes back with the reason where this does not lead there.
    pub(super) fn open(
        connection: Connection,
        fabric: Arc<Fabric>,
        may_fall_back: bool,
        deadline: Instant,
    ) -> Result<Self, Box<(Connection, Error)>> {
        let mut path =
            Self { connection, fabric, pair: None, may_fall_back, fallen_back: false, ready: None };
        match path.join(deadline) {
            Ok(()) => Ok(path),
            Err(error) => Err(Box::new((path.connection, error))),
        }
    }

    /// A new queue pair to the owner's new one.
    fn join(&mut self, deadline: Instant) -> Result<()> {
        let deadline = deadline.min(Instant::now() + SET_UP);
        let mut pair = Pair::new(&self.fabric)?;
        let (theirs, cookie) = self.connection.join(&pair.end(), deadline)?;
        pair.join(&theirs)?;
        let mut found = [0u8; 16];
        let mine = Segment { address: found.as_mut_ptr() as usize, length: found.len() };
        // SAFETY: `found` outlives the region, and the pair ends before both where it fails.
        let tried = unsafe {
            let registered = Registered::host(&self.fabric, &[mine], Rights::Target)?;
            let messages = fragments(&registered.keyed, &[cookie], pair.max_message());
            let tried = pair.transfer(Direction::FromThem, &messages, self.socket(), deadline, |_| {});
            match tried {
                Ok(()) => Ok(pair),
                Err(failure) => {
                    drop(pair);
                    Err(failure.error)
                }
            }
        };
        let pair = tried?;
        if found != self.connection.greeting.cookie {
            let why = "the queue pair leads to another process";
            return Err(Error::new(ErrorKind::Protocol, "connect a queue pair", why));
        }
        self.pair = Some(pair);
        Ok(())
    }

    fn socket(&self) -> RawFd {
        self.connection.socket.raw_fd()
    }

    /// # Safety
    /// `mine` must be readable, or writable, as `direction` needs it.
    unsafe fn transfer(
        &mut self,
        ask: &Ask<'_>,
        mine: &[Segment],
        direction: Direction,
    ) -> Result<u64, Failure> {
        let (op, rights) = match direction {
            Direction::FromThem => (Op::LendRead, Rights::Target),
            Direction::ToThem => (Op::LendWrite, Rights::Source),
        };
        // On a failure the pair ends before this does.
        let registered = match self.ready.take() {
            Some(ready) => ready,
            // SAFETY: as the caller promises.
            None => unsafe { Registered::host(&self.fabric, mine, rights) }
                .map_err(|error| Failure { fabric: true, error })?,
        };
        let (mut mine, mut done, mut digest) = (registered.keyed.clone(), 0, Digest::default());
        // Once even for nothing: the handle may be stale.
        loop {
            if self.pair.is_none() {
                self.join(ask.deadline).map_err(|error| Failure { fabric: true, error })?;
            }
            let rest = Ask { offset: ask.offset + done, length: ask.length - done, ..*ask };
            let grant = self.connection.grant(&rest, op).map_err(|error| Failure {
                // Its device does not take the memory.
                fabric: error.kind() == ErrorKind::Io,
                error,
            })?;
            let theirs: Vec<Keyed> = grant
                .parts
                .iter()
                .zip(&grant.keys)
                .map(|(segment, key)| Keyed { segment: *segment, key: *key })
                .collect();
            let taken = take(&mut mine, grant.length);
            // SAFETY: as the caller promises.
            let moved = unsafe {
                self.move_lent(&taken, &theirs, direction, ask.deadline, |local| {
                    if ask.digest && direction == Direction::FromThem {
                        digest.add(memory::bytes(local));
                    }
                })
            };
            if let Err(failure) = moved {
                return Err(self.give_up(&rest, failure));
            }
            self.connection.release(&rest)?;
            done += grant.length;
            if done >= ask.length {
                return Ok(digest.value());
            }
        }
    }

    /// # Safety
    /// `mine` must be registered, as `direction` needs it.
    unsafe fn move_lent(
        &mut self,
        mine: &[Keyed],
        theirs: &[Keyed],
        direction: Direction,
        deadline: Instant,
        mut done: impl FnMut(Segment),
    ) -> Result<(), Failure> {
        let peer = self.socket();
        let no_pair = || Failure::from(Error::new(ErrorKind::Closed, MOVE, "there is no queue pair"));
        let pair = self.pair.as_mut().ok_or_else(no_pair)?;
        let messages = fragments(mine, theirs, pair.max_message());
        // SAFETY: as the caller promises; the pair ends before the regions where it fails.
        let moved =
            unsafe { pair.transfer(direction, &messages, peer, deadline, |one| done(one.mine.segment)) };
        if moved.is_err() {
            self.pair = None;
        }
        moved
    }

    /// Tells the owner that its queue pair is to end, and asks whether it was by its word that this failed.
    fn give_up(&mut self, ask: &Ask<'_>, failure: Failure) -> Failure {
        self.pair = None;
        match self.connection.quit(ask) {
            // It has withdrawn the memory, and with it the key.
            Err(error) if error.kind() == ErrorKind::Stale => error.into(),
            // The owner is gone: that is why.
            Err(error) if error.kind() == ErrorKind::Closed => error.into(),
            _ => failure,
        }
    }

    fn falls_back(&mut self, failure: &Failure) -> bool {
        if !failure.fabric || !self.may_fall_back || failure.error.kind() == ErrorKind::TimedOut {
            return false;
        }
        tracing::warn!(error = %failure.error, "the RDMA fabric fails: going on over TCP");
        self.fallen_back = true;
        self.pair = None;
        true
    }
}

impl Path for VerbsPath {
    fn kind(&self) -> PathKind {
        if self.fallen_back { PathKind::Tcp } else { PathKind::Verbs }
    }

    unsafe fn takes_device(
        &mut self,
        runtime: &'static dyn GpuRuntime,
        mine: &[Segment],
        ask: &Ask<'_>,
        writes: bool,
    ) -> bool {
        // What is read is hashed by the host, so it has to come by it.
        if self.fallen_back || (ask.digest && !writes) || mine.is_empty() {
            return false;
        }
        let rights = if writes { Rights::Source } else { Rights::Target };
        // SAFETY: as the caller promises.
        match unsafe { Registered::device(&self.fabric, runtime, mine, rights) } {
            Ok(ready) => self.ready = Some(ready),
            Err(placement) => tracing::debug!(%placement, "memory of a device is staged"),
        }
        self.ready.is_some()
    }

    unsafe fn read(&mut self, ask: &Ask<'_>, into: &[Segment]) -> Result<u64> {
        if !self.fallen_back {
            let of_host = self.ready.is_none();
            // SAFETY: as the caller promises.
            match unsafe { self.transfer(ask, into, Direction::FromThem) } {
                Ok(digest) => return Ok(digest),
                Err(failure) if self.falls_back(&failure) && of_host => {}
                Err(failure) => return Err(failure.error),
            }
        }
        // SAFETY: as the caller promises.
        unsafe { tcp::read(&mut self.connection, ask, into) }
    }

    unsafe fn write(&mut self, ask: &Ask<'_>, from: &[Segment]) -> Result<()> {
        if !self.fallen_back {
            let of_host = self.ready.is_none();
            // SAFETY: as the caller promises.
            match unsafe { self.transfer(ask, from, Direction::ToThem) } {
                Ok(_) => return Ok(()),
                Err(failure) if self.falls_back(&failure) && of_host => {}
                Err(failure) => return Err(failure.error),
            }
        }
        // SAFETY: as the caller promises.
        unsafe { tcp::write(&mut self.connection, ask, from) }
    }
}
