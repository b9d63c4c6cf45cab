//! What a message carries: parts that are bytes of this process, or sealed memory that both processes see.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::stat::fstat;

use super::copying::in_parts;
use super::memory::{LENT_FROM, Lease, Pool, forks, unseen_since};
use super::packet::Part;
use crate::{Error, ErrorKind, Result};

/// Parts of so many bytes or more go by shared memory, where both ends are on one host.
pub const SHARED_FROM: usize = 64 * 1024;
/// Where parts begin in shared memory: what vector units and direct I/O like.
const ALIGN: usize = 64;
/// Bytes of one message at the most.
pub(super) const MOST_BYTES: usize = 1 << 40;

/// Told once when nothing of a lent mapping is left, and whether nobody can see its memory any more.
pub(super) type Returns = Box<dyn Fn(bool) + Send + Sync>;

/// A mapping of memory that another process has filled, private to this one: writing to it copies the page.
struct Mapping {
    address: NonNull<c_void>,
    len: NonZeroUsize,
    /// Where it is lent: whom to tell, and the process and its forks when it was mapped.
    lent: Option<(Returns, u32, u64)>,
}

// SAFETY: the mapping is plain memory that this value alone owns; it has no tie to a thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; shared access only reads the pointer.
unsafe impl Sync for Mapping {}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapping").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `address` and `len` are those of the mmap below, and every user holds an Arc of this.
        let _ = unsafe { munmap(self.address, self.len.get()) };
        if let Some((returns, pid, forks)) = &self.lent
            && *pid == std::process::id()
        {
            returns(unseen_since(*forks));
        }
    }
}

#[derive(Clone, Debug)]
enum Held {
    Bytes(Bytes),
    Shared { mapping: Arc<Mapping>, offset: usize, len: usize },
}

/// One part of a payload. Cloning it copies no bytes.
#[derive(Clone, Debug)]
pub struct Blob(Held);

impl Blob {
    /// Bytes of this process.
    pub fn new(bytes: impl Into<Bytes>) -> Self {
        Self(Held::Bytes(bytes.into()))
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        match &self.0 {
            Held::Bytes(bytes) => bytes.len(),
            Held::Shared { len, .. } => *len,
        }
    }

    /// True where it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True where the memory is a private copy-on-write mapping, which its one holder may write to.
    pub const fn is_shared(&self) -> bool {
        matches!(self.0, Held::Shared { .. })
    }

    /// Where its bytes are, for as long as the blob lives.
    pub fn as_ptr(&self) -> *const u8 {
        match &self.0 {
            Held::Bytes(bytes) => bytes.as_ptr(),
            // SAFETY: `offset` was checked against the length of the mapping.
            Held::Shared { mapping, offset, .. } => unsafe {
                mapping.address.as_ptr().cast::<u8>().cast_const().add(*offset)
            },
        }
    }

    /// The bytes, where they are of this process.
    pub fn bytes(&self) -> Option<&Bytes> {
        match &self.0 {
            Held::Bytes(bytes) => Some(bytes),
            Held::Shared { .. } => None,
        }
    }
}

/// Memory being filled by a sender, before anybody else sees it.
#[derive(Debug)]
pub(super) struct Draft {
    fd: OwnedFd,
}

impl Draft {
    /// Empty memory.
    pub(super) fn new() -> Result<Self> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let fd = memfd_create(c"sky-monarch", flags).map_err(|error| Error::io(SHARE, error.into()))?;
        Ok(Self { fd })
    }

    /// Puts a part at `offset`. Written, not mapped: the kernel needs no page fault for it, and no zeroing.
    pub(super) fn write(&self, offset: usize, part: &[u8]) -> Result<()> {
        let failed = Mutex::new(None);
        in_parts(part, |some, at| {
            if let Err(error) = self.write_all(offset + at, some) {
                *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    fn write_all(&self, offset: usize, part: &[u8]) -> Result<()> {
        let mut written = 0;
        while written < part.len() {
            let at = i64::try_from(offset + written).unwrap_or(i64::MAX);
            match nix::sys::uio::pwrite(&self.fd, &part[written..], at) {
                Ok(count) => written += count,
                Err(nix::errno::Errno::EINTR) => {}
                Err(error) => return Err(Error::io(SHARE, error.into())),
            }
        }
        Ok(())
    }

    /// As it is: to be sealed otherwise.
    pub(super) fn into_fd(self) -> OwnedFd {
        self.fd
    }

    /// Seals it: neither side can change or shrink it from here on.
    fn seal(self) -> Result<OwnedFd> {
        let seals =
            SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SEAL;
        fcntl(&self.fd, FcntlArg::F_ADD_SEALS(seals)).map_err(|error| Error::io(SHARE, error.into()))?;
        Ok(self.fd)
    }
}

pub(super) const SHARE: &str = "share memory";

/// The mapping of received memory. Refused where it could shrink, or where others than its sender could write to it.
fn map(fd: &OwnedFd, returns: Option<Returns>) -> Result<(Arc<Mapping>, usize)> {
    let io = |error: nix::errno::Errno| Error::io(SHARE, error.into());
    let seals = SealFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GET_SEALS).map_err(io)?);
    let kept = SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_FUTURE_WRITE;
    if !seals.contains(SealFlag::F_SEAL_SHRINK) || !seals.intersects(kept) {
        return Err(Error::new(ErrorKind::Protocol, SHARE, "the memory is not sealed"));
    }
    let size = usize::try_from(fstat(fd).map_err(io)?.st_size).unwrap_or(0);
    let len = NonZeroUsize::new(size)
        .ok_or_else(|| Error::new(ErrorKind::Protocol, SHARE, "the memory is empty"))?;
    // Before it is mapped: a fork in between counts.
    let lent = returns.map(|returns| (returns, std::process::id(), forks()));
    // SAFETY: a fresh mapping at an address of the kernel's choice; its seals say that it stays as long as it is.
    let address = unsafe {
        mmap(None, len, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE, fd, 0)
    }
    .map_err(io)?;
    Ok((Arc::new(Mapping { address, len, lent }), size))
}

/// Memory of a payload.
#[derive(Clone, Debug)]
pub(super) enum Memory {
    /// Nobody ever changes it: gone when nobody has it any more.
    Sealed(Arc<OwnedFd>),
    /// Its sender wants it back.
    Lent(Arc<Lease>),
}

impl Memory {
    /// Raw number of its descriptor, for the kernel.
    pub(super) fn raw(&self) -> RawFd {
        match self {
            Self::Sealed(fd) => fd.as_raw_fd(),
            Self::Lent(lease) => lease.raw(),
        }
    }

    /// What its receiver names when it has let go of it; 0 where nobody wants to know.
    pub(super) fn id(&self) -> u64 {
        self.lease().map_or(0, |lease| lease.id())
    }

    pub(super) fn lease(&self) -> Option<&Arc<Lease>> {
        match self {
            Self::Sealed(_) => None,
            Self::Lent(lease) => Some(lease),
        }
    }
}

/// What travels: where each part is, the segments, and the memory beside them.
pub(super) struct Packed {
    pub parts: Vec<Part>,
    pub segments: Vec<Bytes>,
    pub memory: Option<Memory>,
}

/// A payload on its way out. Large parts are in shared memory already, small ones are copies.
#[derive(Clone, Debug, Default)]
pub struct Payload {
    parts: Vec<Part>,
    segments: Vec<Bytes>,
    memory: Option<Memory>,
}

impl Payload {
    /// From the parts of one message, in order. Its memory is gone when nobody has it any more.
    pub fn from_parts<'a>(parts: impl Iterator<Item = &'a [u8]>) -> Result<Self> {
        Self::build(parts, None)
    }

    /// The same, with memory that comes back to `pool` where there is much of it.
    pub(super) fn lent<'a>(parts: impl Iterator<Item = &'a [u8]>, pool: &Arc<Pool>) -> Result<Self> {
        Self::build(parts, Some(pool))
    }

    fn build<'a>(parts: impl Iterator<Item = &'a [u8]>, pool: Option<&Arc<Pool>>) -> Result<Self> {
        let mut payload = Self::default();
        let mut large: Vec<(usize, &[u8])> = Vec::new();
        let mut end = 0_usize;
        for part in parts {
            if part.len() < SHARED_FROM {
                payload.parts.push(Part::Segment);
                payload.segments.push(Bytes::copy_from_slice(part));
                continue;
            }
            let offset = end.next_multiple_of(ALIGN);
            end = offset + part.len();
            if end > MOST_BYTES {
                return Err(Error::new(ErrorKind::TooLarge, SHARE, "the message is too large"));
            }
            payload.parts.push(Part::Shared(offset as u64, part.len() as u64));
            large.push((offset, part));
        }
        if large.is_empty() {
            return Ok(payload);
        }
        if let Some(pool) = pool.filter(|_| end >= LENT_FROM)
            && let Some(lease) = pool.fill(&large, end)?
        {
            payload.memory = Some(Memory::Lent(lease));
            return Ok(payload);
        }
        let draft = Draft::new()?;
        for (offset, part) in large {
            draft.write(offset, part)?;
        }
        payload.memory = Some(Memory::Sealed(Arc::new(draft.seal()?)));
        Ok(payload)
    }

    pub(super) fn packed(&self) -> Packed {
        Packed { parts: self.parts.clone(), segments: self.segments.clone(), memory: self.memory.clone() }
    }

    /// True where it has memory that comes back.
    pub(super) fn is_lent(&self) -> bool {
        matches!(self.memory, Some(Memory::Lent(_)))
    }

    /// The parts as a receiver of this process sees them.
    pub(super) fn blobs(&self) -> Result<Vec<Blob>> {
        let segments = self.segments.clone();
        match &self.memory {
            None => unpack(&self.parts, segments, None, None),
            Some(Memory::Sealed(fd)) => unpack(&self.parts, segments, Some(fd), None),
            Some(Memory::Lent(lease)) => {
                let held = Arc::clone(lease);
                let returns = move |clean: bool| {
                    if !clean {
                        held.give_up()
                    }
                };
                unpack(&self.parts, segments, lease.fd(), Some(Box::new(returns)))
            }
        }
    }
}

/// The parts of a frame that arrived. Checks every number that the peer gave. `returns` is told when its memory is free.
pub(super) fn unpack(
    parts: &[Part],
    segments: Vec<Bytes>,
    memory: Option<&OwnedFd>,
    returns: Option<Returns>,
) -> Result<Vec<Blob>> {
    let bad = |why: &str| Error::new(ErrorKind::Protocol, "read a message", why);
    let shared = parts.iter().any(|part| matches!(part, Part::Shared(..)));
    let mapped = match (shared, memory) {
        (true, Some(fd)) => Some(map(fd, returns)?),
        (true, None) => return Err(bad("its shared memory is missing")),
        (false, _) => None,
    };
    let mut segments = segments.into_iter();
    let mut blobs = Vec::with_capacity(parts.len());
    for part in parts {
        blobs.push(Blob(match *part {
            Part::Segment => Held::Bytes(segments.next().ok_or_else(|| bad("a segment is missing"))?),
            Part::Shared(offset, len) => {
                let (mapping, size) = mapped.as_ref().ok_or_else(|| bad("its shared memory is missing"))?;
                let end = offset.checked_add(len).ok_or_else(|| bad("a length overflows"))?;
                if end > *size as u64 {
                    return Err(bad("a part lies beyond its shared memory"));
                }
                let (offset, len) = (offset as usize, len as usize);
                Held::Shared { mapping: Arc::clone(mapping), offset, len }
            }
        }));
    }
    if segments.next().is_some() {
        return Err(bad("there are more segments than parts"));
    }
    Ok(blobs)
}
