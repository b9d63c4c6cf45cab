//! What a message carries: parts that are bytes of this process, or sealed memory that both processes see.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::Bytes;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::stat::fstat;

use super::packet::Part;
use crate::{Error, ErrorKind, Result};

/// Parts of so many bytes or more go by shared memory, where both ends are on one host.
pub const SHARED_FROM: usize = 64 * 1024;
/// Where parts begin in shared memory: what vector units and direct I/O like.
const ALIGN: usize = 64;
/// Bytes of one message at the most.
pub(super) const MOST_BYTES: usize = 1 << 40;

/// A mapping of sealed memory, private to this process: writing to it copies the page.
#[derive(Debug)]
struct Mapping {
    address: NonNull<c_void>,
    len: NonZeroUsize,
}

// SAFETY: the mapping is plain memory that this value alone owns; it has no tie to a thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; shared access only reads the pointer.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `address` and `len` are those of the mmap below, and every user holds an Arc of this.
        let _ = unsafe { munmap(self.address, self.len.get()) };
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
pub struct Draft {
    fd: OwnedFd,
    at: usize,
}

impl Draft {
    /// Empty memory.
    pub fn new() -> Result<Self> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let fd = memfd_create(c"sky-monarch", flags).map_err(|error| Error::io(SHARE, error.into()))?;
        Ok(Self { fd, at: 0 })
    }

    /// Appends a part. Written, not mapped: the kernel needs no page fault for it, and no zeroing.
    pub fn append(&mut self, part: &[u8]) -> Result<(u64, u64)> {
        let offset = self.at.next_multiple_of(ALIGN);
        if offset + part.len() > MOST_BYTES {
            return Err(Error::new(ErrorKind::TooLarge, SHARE, "the message is too large"));
        }
        let mut written = 0;
        while written < part.len() {
            let at = i64::try_from(offset + written).unwrap_or(i64::MAX);
            match nix::sys::uio::pwrite(&self.fd, &part[written..], at) {
                Ok(count) => written += count,
                Err(nix::errno::Errno::EINTR) => {}
                Err(error) => return Err(Error::io(SHARE, error.into())),
            }
        }
        self.at = offset + part.len();
        Ok((offset as u64, part.len() as u64))
    }

    /// Seals it: neither side can change or shrink it from here on.
    pub fn seal(self) -> Result<OwnedFd> {
        let seals =
            SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SEAL;
        fcntl(&self.fd, FcntlArg::F_ADD_SEALS(seals)).map_err(|error| Error::io(SHARE, error.into()))?;
        Ok(self.fd)
    }
}

const SHARE: &str = "share memory";

/// The mapping of received memory. Refused where its sender could still change or shrink it.
fn map(fd: &OwnedFd) -> Result<(Arc<Mapping>, usize)> {
    let io = |error: nix::errno::Errno| Error::io(SHARE, error.into());
    let seals = fcntl(fd, FcntlArg::F_GET_SEALS).map_err(io)?;
    let needed = (SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_WRITE).bits();
    if seals & needed != needed {
        return Err(Error::new(ErrorKind::Protocol, SHARE, "the memory is not sealed"));
    }
    let size = usize::try_from(fstat(fd).map_err(io)?.st_size).unwrap_or(0);
    let len = NonZeroUsize::new(size)
        .ok_or_else(|| Error::new(ErrorKind::Protocol, SHARE, "the memory is empty"))?;
    // SAFETY: a fresh mapping at an address of the kernel's choice; its seals say that it stays as long as it is.
    let address = unsafe {
        mmap(None, len, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE, fd, 0)
    }
    .map_err(io)?;
    Ok((Arc::new(Mapping { address, len }), size))
}

/// What travels: where each part is, the segments, and the memory beside them.
pub(super) struct Packed {
    pub parts: Vec<Part>,
    pub segments: Vec<Bytes>,
    pub memory: Option<Arc<OwnedFd>>,
}

/// A payload on its way out. Large parts are in shared memory already, small ones are copies.
#[derive(Clone, Debug, Default)]
pub struct Payload {
    parts: Vec<Part>,
    segments: Vec<Bytes>,
    memory: Option<Arc<OwnedFd>>,
}

impl Payload {
    /// From the parts of one message, in order.
    pub fn from_parts<'a>(parts: impl Iterator<Item = &'a [u8]>) -> Result<Self> {
        let mut payload = Self::default();
        let mut draft = None;
        for part in parts {
            if part.len() < SHARED_FROM {
                payload.parts.push(Part::Segment);
                payload.segments.push(Bytes::copy_from_slice(part));
                continue;
            }
            let draft = match &mut draft {
                Some(draft) => draft,
                None => draft.insert(Draft::new()?),
            };
            let (offset, len) = draft.append(part)?;
            payload.parts.push(Part::Shared(offset, len));
        }
        payload.memory = draft.map(Draft::seal).transpose()?.map(Arc::new);
        Ok(payload)
    }

    pub(super) fn packed(&self) -> Packed {
        Packed { parts: self.parts.clone(), segments: self.segments.clone(), memory: self.memory.clone() }
    }

    /// The parts as a receiver of this process sees them.
    pub(super) fn blobs(&self) -> Result<Vec<Blob>> {
        unpack(&self.parts, self.segments.clone(), self.memory.as_deref())
    }
}

/// The parts of a frame that arrived. Checks every number that the peer gave.
pub(super) fn unpack(parts: &[Part], segments: Vec<Bytes>, memory: Option<&OwnedFd>) -> Result<Vec<Blob>> {
    let bad = |why: &str| Error::new(ErrorKind::Protocol, "read a message", why);
    let shared = parts.iter().any(|part| matches!(part, Part::Shared(..)));
    let mapped = match (shared, memory) {
        (true, Some(fd)) => Some(map(fd)?),
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

/// Raw number of a descriptor, for the kernel.
pub(super) fn raw(fd: &Arc<OwnedFd>) -> i32 {
    fd.as_raw_fd()
}
