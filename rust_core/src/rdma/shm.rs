//! Memory that two processes have mapped: a file without a name, which cannot shrink under who uses it.

use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::unistd::ftruncate;

use super::connection::{Ask, Connection};
use super::handle::Access;
use super::memory::{self, Digest, Memory, Segment, SharedFile, cut};
use super::path::{Path, PathKind};
use super::protocol::{Greeting, Op};
use super::server;
use crate::{Error, ErrorKind, Result};

const CHUNK: usize = 512 * 1024;

/// A whole file, mapped until dropped.
pub(super) struct Mapped {
    at: NonNull<c_void>,
    length: usize,
    file: SharedFile,
    _fd: Option<OwnedFd>,
}

// SAFETY: it is an address and a length; what happens to the bytes there is the business of who uses them.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by us with this length, and unmapped once.
        let _gone = unsafe { munmap(self.at, self.length) };
    }
}

fn system(error: nix::Error) -> Error {
    Error::io("share memory", error.into())
}

/// `length` bytes, zeroed, in memory that peers on this host can map.
pub fn allocate(length: usize) -> Result<Memory> {
    let size = NonZeroUsize::new(length);
    let size = size.ok_or_else(|| Error::new(ErrorKind::InvalidInput, "share memory", "it has no length"))?;
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let fd = memfd_create("sky-monarch-rdma", flags).map_err(system)?;
    ftruncate(&fd, length as i64).map_err(system)?;
    // Else a peer could shrink it, and end us by SIGBUS.
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&fd, FcntlArg::F_ADD_SEALS(seals)).map_err(system)?;
    let metadata = File::from(fd.try_clone().map_err(|error| Error::io("share memory", error))?)
        .metadata()
        .map_err(|error| Error::io("share memory", error))?;
    let shared = SharedFile { fd: fd.as_raw_fd(), device: metadata.dev(), inode: metadata.ino() };
    let mapped = map_file(&fd, size, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)?;
    let segment = Segment { address: mapped.as_ptr() as usize, length };
    let owner = Mapped { at: mapped, length, file: shared, _fd: Some(fd) };
    // SAFETY: mapped for reading and writing until `owner` is dropped.
    unsafe { Memory::new([segment], owner) }.map(|memory| memory.with_shared(shared))
}

fn map_file(fd: impl AsFd, size: NonZeroUsize, rights: ProtFlags) -> Result<NonNull<c_void>> {
    // SAFETY: a fresh mapping, at an address that the kernel chooses.
    unsafe { mmap(None, size, rights, MapFlags::MAP_SHARED, fd, 0) }.map_err(system)
}

pub(super) struct Shm {
    connection: Connection,
    mapped: Mapped,
}

impl Shm {
    pub(super) const fn new(connection: Connection, mapped: Mapped) -> Self {
        Self { connection, mapped }
    }

    /// Maps the owner's file; none where it cannot be reached from here.
    pub(super) fn map(owner: &Greeting, file: SharedFile, access: Access) -> Option<Mapped> {
        if server::boot() != owner.boot || server::pid_namespace() != owner.pid_namespace {
            return None;
        }
        let writable = access == Access::ReadWrite;
        let path = format!("/proc/{}/fd/{}", owner.pid, file.fd);
        let opened = OpenOptions::new().read(true).write(writable).open(path).ok()?;
        let metadata = opened.metadata().ok()?;
        if (metadata.dev(), metadata.ino()) != (file.device, file.inode) {
            return None;
        }
        let length = usize::try_from(metadata.len()).ok()?;
        let rights =
            if writable { ProtFlags::PROT_READ | ProtFlags::PROT_WRITE } else { ProtFlags::PROT_READ };
        let at = map_file(&opened, NonZeroUsize::new(length)?, rights).ok()?;
        Some(Mapped { at, length, file, _fd: None })
    }

    /// Grants, copies and releases; `copy` gets what is mine and what is theirs, of one length.
    fn transfer(
        &mut self,
        ask: &Ask<'_>,
        op: Op,
        mine: &[Segment],
        mut copy: impl FnMut(Segment, Segment),
    ) -> Result<()> {
        let grant = self.connection.grant(ask, op)?;
        let stale = |why| Error::new(ErrorKind::Stale, "use shared memory", why);
        let Some((file, at)) = grant.shared else { return Err(stale("it is not shared any more")) };
        if file != self.mapped.file || grant.length != ask.length {
            return Err(stale("it is another piece of memory by now"));
        }
        let inside = at.checked_add(ask.length).is_some_and(|end| end <= self.mapped.length as u64);
        if !inside {
            return Err(Error::new(ErrorKind::OutOfBounds, "use shared memory", "its file is shorter"));
        }
        let mut theirs = self.mapped.at.as_ptr() as usize + at as usize;
        for chunk in cut(mine, CHUNK) {
            copy(chunk, Segment { address: theirs, length: chunk.length });
            theirs += chunk.length;
            if std::time::Instant::now() > ask.deadline {
                return Err(Error::new(ErrorKind::TimedOut, "use shared memory", "the deadline has passed"));
            }
        }
        self.connection.release(ask)
    }
}

impl Path for Shm {
    fn kind(&self) -> PathKind {
        PathKind::Shm
    }

    unsafe fn read(&mut self, ask: &Ask<'_>, into: &[Segment]) -> Result<u64> {
        let mut digest = Digest::default();
        self.transfer(ask, Op::GrantRead, into, |mine, theirs| {
            memory::fetch_pages(mine);
            // SAFETY: `mine` as the caller promises; `theirs` was found inside the mapping, which cannot shrink.
            unsafe {
                std::ptr::copy(theirs.address as *const u8, mine.address as *mut u8, mine.length);
                if ask.digest {
                    digest.add(memory::bytes(mine));
                }
            }
        })?;
        Ok(digest.value())
    }

    unsafe fn write(&mut self, ask: &Ask<'_>, from: &[Segment]) -> Result<()> {
        self.transfer(ask, Op::GrantWrite, from, |mine, theirs| {
            // SAFETY: as above, and the mapping of what may be written to is writable.
            unsafe { std::ptr::copy(mine.address as *const u8, theirs.address as *mut u8, mine.length) }
        })
    }
}
