//! Sealed memory between a unix socket and the network: read without a copy, filled as it comes.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::Bytes;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::stat::fstat;

use super::super::payload::MOST_BYTES;
use crate::{Error, ErrorKind, Result};

const READ: &str = "read shared memory";
const FILL: &str = "fill shared memory";

struct View {
    address: NonNull<c_void>,
    len: NonZeroUsize,
}

// SAFETY: plain memory that this value alone owns, and that nobody can change: it is sealed.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl AsRef<[u8]> for View {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: mapped below with this length, until drop; sealed against writing and shrinking.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr().cast(), self.len.get()) }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: `address` and `len` are those of the mmap below.
        let _ = unsafe { munmap(self.address, self.len.get()) };
    }
}

/// All of a process's sealed memory, without a copy. Refused where it could still change or shrink.
pub(super) fn view(fd: &OwnedFd) -> Result<Bytes> {
    let io = |error: Errno| Error::io(READ, error.into());
    let needed = (SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_WRITE).bits();
    if fcntl(fd, FcntlArg::F_GET_SEALS).map_err(io)? & needed != needed {
        return Err(Error::new(ErrorKind::Protocol, READ, "the memory is not sealed"));
    }
    let size = usize::try_from(fstat(fd).map_err(io)?.st_size).unwrap_or(0);
    let Some(len) = NonZeroUsize::new(size) else { return Ok(Bytes::new()) };
    // SAFETY: a fresh mapping at an address of the kernel's choice; its seals say that it stays as it is.
    let address =
        unsafe { mmap(None, len, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, fd, 0) }.map_err(io)?;
    Ok(Bytes::from_owner(View { address, len }))
}

/// Memory that is filled piece by piece, in order.
#[derive(Debug, Default)]
pub(super) struct Filling {
    fd: Option<OwnedFd>,
    at: usize,
}

impl Filling {
    /// Appends a piece.
    pub(super) fn append(&mut self, piece: &[u8]) -> Result<()> {
        if self.at.saturating_add(piece.len()) > MOST_BYTES {
            return Err(Error::new(ErrorKind::TooLarge, FILL, "the message is too large"));
        }
        let fd = match &self.fd {
            Some(fd) => fd,
            None => {
                let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
                let made = memfd_create(c"sky-monarch", flags);
                self.fd.insert(made.map_err(|error| Error::io(FILL, error.into()))?)
            }
        };
        let mut written = 0;
        while written < piece.len() {
            let at = i64::try_from(self.at + written).unwrap_or(i64::MAX);
            match nix::sys::uio::pwrite(fd, &piece[written..], at) {
                Ok(count) => written += count,
                Err(Errno::EINTR) => {}
                Err(error) => return Err(Error::io(FILL, error.into())),
            }
        }
        self.at += piece.len();
        Ok(())
    }

    /// Seals it and begins anew.
    pub(super) fn finish(&mut self) -> Result<Arc<OwnedFd>> {
        let missing = || Error::new(ErrorKind::Protocol, FILL, "its memory is missing");
        let fd = std::mem::take(self).fd.ok_or_else(missing)?;
        let seals =
            SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SEAL;
        fcntl(&fd, FcntlArg::F_ADD_SEALS(seals)).map_err(|error| Error::io(FILL, error.into()))?;
        Ok(Arc::new(fd))
    }
}
