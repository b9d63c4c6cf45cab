//! Memory with an owner.

use std::time::Duration;

use super::error::{GpuError, GpuResult};
use super::runtime::{GpuRuntime, RawMemory};
use super::stream::{Stream, wedged};

/// What memory is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Of the host, pinned: a device copies to and from it without a detour.
    Pinned,
    /// Of a device.
    Device {
        /// Which.
        ordinal: u32,
    },
    /// Of a device, and exportable to other processes as a file descriptor.
    Exportable {
        /// Which.
        ordinal: u32,
    },
}

/// An allocation, freed when it is dropped: what uses it has to be done by then. Not freed in a process that gave a wait
/// up (see [`Stream::wait`]).
pub struct Memory {
    raw: RawMemory,
    runtime: &'static dyn GpuRuntime,
}

impl Memory {
    /// Allocate; the contents are undefined.
    ///
    /// # Errors
    /// As [`GpuRuntime::allocate`].
    pub fn new(runtime: &'static dyn GpuRuntime, kind: MemoryKind, bytes: usize) -> GpuResult<Self> {
        Ok(Self { raw: runtime.allocate(kind, bytes)?, runtime })
    }

    /// Where it begins.
    pub const fn address(&self) -> u64 {
        self.raw.address
    }

    /// Bytes that were asked for; never 0.
    pub const fn bytes(&self) -> usize {
        self.raw.bytes
    }

    /// What it is.
    pub const fn kind(&self) -> MemoryKind {
        self.raw.kind
    }

    /// As a file descriptor for another process.
    ///
    /// # Errors
    /// Where it is not exportable.
    pub fn export(&self) -> GpuResult<std::os::fd::OwnedFd> {
        self.runtime.export(&self.raw)
    }

    /// Copy `from` to `offset` through pinned memory, and wait.
    ///
    /// # Errors
    /// Out of bounds, or as the copy.
    pub fn write(&mut self, offset: usize, from: &[u8], stream: &Stream, limit: Duration) -> GpuResult<()> {
        let to = self.at(offset, from.len())?;
        let staging = Self::new(self.runtime, MemoryKind::Pinned, from.len())?;
        // SAFETY: pinned memory is the host's, as long as `from`, and nobody else has it.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), staging.address() as *mut u8, from.len()) };
        // SAFETY: both are valid; where the wait is given up, neither is freed.
        unsafe { self.runtime.copy(to, staging.address(), from.len(), stream.handle())? };
        stream.wait(limit)
    }

    /// Copy from `offset` into `into` through pinned memory, and wait.
    ///
    /// # Errors
    /// Out of bounds, or as the copy.
    pub fn read(&self, offset: usize, into: &mut [u8], stream: &Stream, limit: Duration) -> GpuResult<()> {
        let from = self.at(offset, into.len())?;
        let staging = Self::new(self.runtime, MemoryKind::Pinned, into.len())?;
        // SAFETY: as in `write`.
        unsafe { self.runtime.copy(staging.address(), from, into.len(), stream.handle())? };
        stream.wait(limit)?;
        // SAFETY: as in `write`; the device is done with it.
        unsafe {
            std::ptr::copy_nonoverlapping(staging.address() as *const u8, into.as_mut_ptr(), into.len())
        };
        Ok(())
    }

    /// Put a copy of another allocation's first bytes on a stream; does not wait.
    ///
    /// # Errors
    /// Out of bounds, or as the copy.
    ///
    /// # Safety
    /// Both live until the stream has done it.
    pub unsafe fn copy_from(&mut self, from: &Self, bytes: usize, stream: &Stream) -> GpuResult<()> {
        let (to, from) = (self.at(0, bytes)?, from.at(0, bytes)?);
        // SAFETY: in bounds; of the caller.
        unsafe { self.runtime.copy(to, from, bytes, stream.handle()) }
    }

    fn at(&self, offset: usize, bytes: usize) -> GpuResult<u64> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.raw.bytes => Ok(self.raw.address + offset as u64),
            _ => Err(GpuError::Invalid(format!(
                "bytes {offset} to {} of an allocation of {} bytes",
                offset.saturating_add(bytes),
                self.raw.bytes
            ))),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if wedged() {
            return;
        }
        // SAFETY: owned, and dropped once.
        if let Err(error) = unsafe { self.runtime.release(&self.raw) } {
            tracing::warn!(%error, bytes = self.raw.bytes, "memory of a device was not freed");
        }
    }
}
