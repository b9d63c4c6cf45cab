//! Memory that the device may reach: registered as it is, or what stands in for it.

use std::ffi::c_int;
use std::fmt;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use super::super::memory::Segment;
use super::fabric::{Fabric, errno, failed};
use super::fragments::Keyed;
use crate::gpu::GpuRuntime;
use crate::gpu::abi::verbs::{Access, MemoryRegion};
use crate::{Error, ErrorKind, Result};

const REGISTER: &str = "register memory with an RDMA device";
/// What a dmabuf is cut in.
const PAGE: u64 = 4096;

/// What others, and the device itself, may do with a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdma) enum Rights {
    /// The device reads it, to write it to a peer.
    Source,
    /// The device writes what it reads from a peer.
    Target,
    /// Peers read.
    RemoteRead,
    /// Peers read and write.
    RemoteWrite,
}

impl Rights {
    const fn flags(self) -> u32 {
        match self {
            Self::Source => 0,
            Self::Target => Access::LOCAL_WRITE.0,
            Self::RemoteRead => Access::REMOTE_READ.0,
            // Who lets others write has to let the device.
            Self::RemoteWrite => Access::LOCAL_WRITE.0 | Access::REMOTE_READ.0 | Access::REMOTE_WRITE.0,
        }
    }
}

/// How the device reaches memory of an accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// As a dmabuf that the accelerator's driver exports.
    Dmabuf,
    /// By its address: a module of the kernel lets the two drivers at each other.
    PeerMemory,
    /// Not at all: the bytes go through memory of the host.
    Staging,
}

impl Way {
    /// Name, as reports have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dmabuf => "dmabuf",
            Self::PeerMemory => "peer-mem",
            Self::Staging => "staging",
        }
    }
}

/// The way that was taken, and why each better one was not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Taken.
    pub way: Way,
    /// Tried before, with the reason.
    pub refused: Vec<(Way, String)>,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.way.name())?;
        for (way, why) in &self.refused {
            write!(f, "; not {}: {why}", way.name())?;
        }
        Ok(())
    }
}

/// Registered until dropped.
#[derive(Debug)]
pub(in crate::rdma) struct Region {
    raw: *mut MemoryRegion,
    fabric: Arc<Fabric>,
}

// SAFETY: the library lets any thread use a region.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fabric({}:{})", self.device, self.port)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: registered by us, and deregistered once. The kernel waits for what the device is doing with it.
        let code = unsafe { (self.fabric.verbs.table.dereg_mr)(self.raw) };
        if code != 0 {
            tracing::warn!(code, "memory is still registered with an RDMA device");
        }
    }
}

impl Region {
    /// Registers memory of the host.
    ///
    /// [`ErrorKind::Device`] where the device does not take it; mostly more is locked then than the process may.
    ///
    /// # Safety
    /// It must be valid, and writable where `rights` say so, until the region is dropped.
    pub(in crate::rdma) unsafe fn host(
        fabric: &Arc<Fabric>,
        segment: Segment,
        rights: Rights,
    ) -> Result<Self> {
        // SAFETY: as the caller promises.
        let raw = unsafe {
            (fabric.verbs.table.reg_mr)(
                fabric.domain,
                segment.address as *mut _,
                segment.length,
                rights.flags() as c_int,
            )
        };
        if raw.is_null() {
            let what = format!("{} bytes on {} (see `ulimit -l`)", segment.length, fabric.device);
            return Err(failed(REGISTER, &what, errno()));
        }
        Ok(Self { raw, fabric: Arc::clone(fabric) })
    }

    /// Registers memory of an accelerator in the best way that works; none where that is staging.
    ///
    /// # Safety
    /// It must be an allocation of `runtime` until the region is dropped.
    pub(in crate::rdma) unsafe fn device(
        fabric: &Arc<Fabric>,
        runtime: &dyn GpuRuntime,
        segment: Segment,
        rights: Rights,
    ) -> (Option<Self>, Placement) {
        let mut refused = Vec::new();
        // SAFETY: as the caller promises.
        match unsafe { Self::dmabuf(fabric, runtime, segment, rights) } {
            Ok(region) => return (Some(region), Placement { way: Way::Dmabuf, refused }),
            Err(error) => refused.push((Way::Dmabuf, error.message().to_owned())),
        }
        // SAFETY: the kernel refuses an address that it cannot get at.
        match unsafe { Self::host(fabric, segment, rights) } {
            Ok(region) => return (Some(region), Placement { way: Way::PeerMemory, refused }),
            Err(error) => refused.push((Way::PeerMemory, error.message().to_owned())),
        }
        (None, Placement { way: Way::Staging, refused })
    }

    unsafe fn dmabuf(
        fabric: &Arc<Fabric>,
        runtime: &dyn GpuRuntime,
        segment: Segment,
        rights: Rights,
    ) -> Result<Self> {
        let refuse = |why: String| Error::new(ErrorKind::Device, REGISTER, why);
        let register = fabric.verbs.table.reg_dmabuf_mr;
        let register =
            register.ok_or_else(|| refuse("this libibverbs has no ibv_reg_dmabuf_mr".to_owned()))?;
        let start = segment.address as u64;
        let first = start - start % PAGE;
        let last = (start + segment.length as u64).next_multiple_of(PAGE);
        let file = runtime.export_dmabuf(first..last).map_err(|error| refuse(error.to_string()))?;
        let flags = rights.flags() as c_int;
        // SAFETY: the file is open; the device maps what it stands for and holds it itself.
        let raw =
            unsafe { register(fabric.domain, start - first, segment.length, start, file.as_raw_fd(), flags) };
        if raw.is_null() {
            return Err(failed(REGISTER, &format!("a dmabuf on {}", fabric.device), errno()));
        }
        Ok(Self { raw, fabric: Arc::clone(fabric) })
    }

    /// The key for requests of this process.
    pub(in crate::rdma) fn local_key(&self) -> u32 {
        // SAFETY: registered until dropped.
        unsafe { (*self.raw).lkey }
    }

    /// The key that peers are told.
    pub(in crate::rdma) fn remote_key(&self) -> u32 {
        // SAFETY: registered until dropped.
        unsafe { (*self.raw).rkey }
    }
}

/// Memory of this process, registered for the time of one operation.
pub(super) struct Registered {
    pub keyed: Vec<Keyed>,
    _regions: Vec<Region>,
}

impl Registered {
    /// # Safety
    /// As [`Region::host`].
    pub(super) unsafe fn host(fabric: &Arc<Fabric>, parts: &[Segment], rights: Rights) -> Result<Self> {
        // SAFETY: as the caller promises.
        let one = |part: &Segment| unsafe { Region::host(fabric, *part, rights) };
        Ok(Self::of(parts, parts.iter().map(one).collect::<Result<_>>()?))
    }

    /// Memory of an accelerator; the placement where it has to be staged.
    ///
    /// # Safety
    /// As [`Region::device`].
    pub(super) unsafe fn device(
        fabric: &Arc<Fabric>,
        runtime: &dyn GpuRuntime,
        parts: &[Segment],
        rights: Rights,
    ) -> Result<Self, Placement> {
        let one = |part: &Segment| {
            // SAFETY: as the caller promises.
            let (region, placement) = unsafe { Region::device(fabric, runtime, *part, rights) };
            region.ok_or(placement)
        };
        Ok(Self::of(parts, parts.iter().map(one).collect::<Result<_, _>>()?))
    }

    fn of(parts: &[Segment], regions: Vec<Region>) -> Self {
        let keyed = parts.iter().zip(&regions);
        let keyed = keyed.map(|(part, region)| Keyed { segment: *part, key: region.local_key() }).collect();
        Self { keyed, _regions: regions }
    }
}
