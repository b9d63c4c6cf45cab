//! Cross-memory attach: the kernel copies from one process to another, and the other need not run for that.

use std::io;

use super::connection::{Ask, Connection};
use super::memory::{self, Digest, Segment};
use super::path::{Path, PathKind};
use super::protocol::{Greeting, Op};
use super::server;
use crate::{Error, ErrorKind, Result};

/// Copied by one call, and hashed while it is in the cache.
const CHUNK: usize = 512 * 1024;
/// Segments of one call: `UIO_MAXIOV`.
const MAX_SEGMENTS: usize = 1024;

pub(super) struct Cma {
    connection: Connection,
}

#[derive(Clone, Copy)]
enum Way {
    FromThem,
    ToThem,
}

impl Cma {
    pub(super) const fn new(connection: Connection) -> Self {
        Self { connection }
    }

    /// Whether the memory of the owner can be read from here: tries it, since nothing else can tell.
    pub(super) fn reaches(owner: &Greeting) -> bool {
        if server::boot() != owner.boot || server::pid_namespace() != owner.pid_namespace {
            return false;
        }
        let mut cookie = [0u8; 16];
        let local = Segment { address: cookie.as_mut_ptr() as usize, length: cookie.len() };
        let remote = Segment { address: owner.cookie_address as usize, length: cookie.len() };
        // SAFETY: `cookie` is ours.
        let copied = unsafe { copy(owner.pid, &[(local, remote)], Way::FromThem) };
        copied.is_ok() && cookie == owner.cookie
    }

    /// # Safety
    /// `mine` must be readable, or writable, as `way` needs it.
    unsafe fn transfer(&mut self, ask: &Ask<'_>, mine: &[Segment], way: Way) -> Result<u64> {
        let op = match way {
            Way::FromThem => Op::GrantRead,
            Way::ToThem => Op::GrantWrite,
        };
        let (mut mine, mut done, mut digest) = (mine.to_vec(), 0, Digest::default());
        // Once even for nothing: the handle may be stale.
        loop {
            let rest = Ask { offset: ask.offset + done, length: ask.length - done, ..*ask };
            let grant = self.connection.grant(&rest, op)?;
            let mut theirs = grant.parts;
            loop {
                let batch = next_batch(&mut mine, &mut theirs);
                if batch.is_empty() {
                    break;
                }
                if matches!(way, Way::FromThem) {
                    for (local, _) in &batch {
                        memory::fetch_pages(*local);
                    }
                }
                // SAFETY: as the caller promises; what is theirs is for the kernel to check.
                unsafe {
                    copy(self.connection.greeting.pid, &batch, way)?;
                    if ask.digest && matches!(way, Way::FromThem) {
                        for (local, _) in &batch {
                            digest.add(memory::bytes(*local));
                        }
                    }
                }
                if std::time::Instant::now() > ask.deadline {
                    return Err(Error::new(ErrorKind::TimedOut, COPY, "the deadline has passed"));
                }
            }
            self.connection.release(&rest)?;
            done += grant.length;
            if done == ask.length {
                return Ok(digest.value());
            }
        }
    }
}

impl Path for Cma {
    fn kind(&self) -> PathKind {
        PathKind::Cma
    }

    unsafe fn read(&mut self, ask: &Ask<'_>, into: &[Segment]) -> Result<u64> {
        // SAFETY: as the caller promises.
        unsafe { self.transfer(ask, into, Way::FromThem) }
    }

    unsafe fn write(&mut self, ask: &Ask<'_>, from: &[Segment]) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.transfer(ask, from, Way::ToThem) }.map(|_| ())
    }
}

const COPY: &str = "copy from process to process";

/// Takes one call's worth off the front of both: pairs of the same length.
fn next_batch(mine: &mut Vec<Segment>, theirs: &mut Vec<Segment>) -> Vec<(Segment, Segment)> {
    let (mut batch, mut bytes) = (Vec::new(), 0);
    let (mut left, mut right) = (0, 0);
    while bytes < CHUNK && batch.len() < MAX_SEGMENTS && left < mine.len() && right < theirs.len() {
        let length = mine[left].length.min(theirs[right].length).min(CHUNK - bytes);
        let take = |segment: &mut Segment| {
            let taken = Segment { address: segment.address, length };
            segment.address += length;
            segment.length -= length;
            taken
        };
        batch.push((take(&mut mine[left]), take(&mut theirs[right])));
        bytes += length;
        left += usize::from(mine[left].length == 0);
        right += usize::from(theirs[right].length == 0);
    }
    mine.drain(..left);
    theirs.drain(..right);
    batch
}

/// # Safety
/// The first of each pair must be readable, or writable, as `way` needs it.
unsafe fn copy(pid: u32, pairs: &[(Segment, Segment)], way: Way) -> Result<()> {
    let vector = |segment: &Segment| libc::iovec {
        iov_base: segment.address as *mut libc::c_void,
        iov_len: segment.length,
    };
    let local: Vec<libc::iovec> = pairs.iter().map(|(local, _)| vector(local)).collect();
    let remote: Vec<libc::iovec> = pairs.iter().map(|(_, remote)| vector(remote)).collect();
    let wanted: usize = pairs.iter().map(|(local, _)| local.length).sum();
    let pid = pid.cast_signed();
    let count = local.len() as libc::c_ulong;
    // SAFETY: the vectors live until the call returns, what they point to as the caller promises.
    let copied = unsafe {
        match way {
            Way::FromThem => libc::process_vm_readv(pid, local.as_ptr(), count, remote.as_ptr(), count, 0),
            Way::ToThem => libc::process_vm_writev(pid, local.as_ptr(), count, remote.as_ptr(), count, 0),
        }
    };
    if usize::try_from(copied).is_ok_and(|copied| copied == wanted) {
        return Ok(());
    }
    if copied >= 0 {
        return Err(Error::new(ErrorKind::Stale, COPY, "the memory of the peer is not there any more"));
    }
    let error = io::Error::last_os_error();
    let kind = match error.raw_os_error() {
        Some(libc::ESRCH) => ErrorKind::Closed,
        Some(libc::EPERM) => ErrorKind::Forbidden,
        Some(libc::EFAULT) => ErrorKind::Stale,
        _ => ErrorKind::Io,
    };
    Err(Error::new(kind, COPY, error.to_string()).with_source(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_pair_up_what_is_cut_differently() {
        let mut mine = vec![Segment { address: 0, length: 5 }, Segment { address: 100, length: CHUNK }];
        let mut theirs = vec![Segment { address: 1000, length: CHUNK }, Segment { address: 9, length: 5 }];
        let first = next_batch(&mut mine, &mut theirs);
        assert_eq!(first.iter().map(|(local, _)| local.length).sum::<usize>(), CHUNK);
        assert!(first.iter().all(|(local, remote)| local.length == remote.length));
        let second = next_batch(&mut mine, &mut theirs);
        assert_eq!(
            second,
            [(Segment { address: 100 + CHUNK - 5, length: 5 }, Segment { address: 9, length: 5 })]
        );
        assert!(next_batch(&mut mine, &mut theirs).is_empty());
    }
}
