//! What every platform can do, whichever vendor is below.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::time::Duration;

use super::abi::device::{EventHandle, StreamHandle};
use super::error::{GpuError, GpuResult};
use super::host::HostRuntime;
use super::memory::MemoryKind;
use super::platform::{self, Platform};
use super::vendor::VendorRuntime;

/// Versions as the libraries say them: HIP 7.1.25424 is 70125424, CUDA 13.0 is 13000.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The driver's.
    pub driver: i32,
    /// The runtime's.
    pub runtime: i32,
}

/// What this copy of the runtime can do, by the entries that it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Allocations that can be exported to another process.
    pub virtual_memory: bool,
    /// Any allocation as a dmabuf.
    pub dmabuf: bool,
    /// What an address is.
    pub pointer_attributes: bool,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its index among those that this process may use.
    pub ordinal: u32,
    /// PCI address, such as `0000:c1:00.0`.
    pub pci: String,
    /// Unique id as hexadecimal digits; `None` where the runtime cannot say.
    pub uuid: Option<String>,
    /// Compute units.
    pub multiprocessors: u32,
    /// Lanes of a wavefront.
    pub warp_size: u32,
}

/// Memory of a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Free, whoever else uses the device.
    pub free_bytes: u64,
    /// All.
    pub total_bytes: u64,
}

/// Whose memory an address is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PointerKind {
    /// The host's, known to the runtime or not.
    Host,
    /// A device's.
    Device,
    /// Something that this version does not know, in the vendor's number.
    Other(u32),
}

/// What an address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PointerInfo {
    /// Whose memory.
    pub kind: PointerKind,
    /// The device it belongs to.
    pub ordinal: Option<u32>,
}

/// An allocation, without an owner: see [`super::Memory`] for one with.
#[derive(Debug)]
pub struct RawMemory {
    /// Where it begins, on the device or the host.
    pub address: u64,
    /// Bytes that were asked for.
    pub bytes: usize,
    /// Bytes that it takes: a multiple of the granularity where there is one.
    pub reserved: usize,
    /// What it is.
    pub kind: MemoryKind,
    /// The vendor's handle of an exportable allocation; 0 otherwise.
    pub handle: u64,
}

/// A platform's runtime. Devices are named by their index among those that the process may use.
///
/// No call changes the current device of the calling thread, nor leaves an error behind for torch to find.
pub trait GpuRuntime: Send + Sync {
    /// Whose devices.
    fn platform(&self) -> Platform;

    /// Whether it is a software double.
    fn simulated(&self) -> bool;

    /// Versions of driver and runtime.
    ///
    /// # Errors
    /// What the runtime returns.
    fn versions(&self) -> GpuResult<Versions>;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// How many devices this process may use; 0 is no error.
    ///
    /// # Errors
    /// What the runtime returns, but for "no device".
    fn device_count(&self) -> GpuResult<u32>;

    /// A device.
    ///
    /// # Errors
    /// Where there is no such device.
    fn device(&self, ordinal: u32) -> GpuResult<DeviceInfo>;

    /// Its memory. Makes a context on it, which costs time and memory.
    ///
    /// # Errors
    /// Where there is no such device.
    fn memory_info(&self, ordinal: u32) -> GpuResult<MemoryInfo>;

    /// Run something with a device as the calling thread's current one, and put back what was: for libraries that look
    /// there.
    ///
    /// # Errors
    /// Where there is no such device; `run` was then not called.
    fn on_device(&self, ordinal: u32, run: &mut dyn FnMut()) -> GpuResult<()>;

    /// What an address is.
    ///
    /// # Errors
    /// Where the runtime cannot say.
    fn pointer(&self, address: u64) -> GpuResult<PointerInfo>;

    /// The whole allocation that an address of a device lies in.
    ///
    /// # Errors
    /// Where there is none.
    fn allocation_of(&self, address: u64) -> GpuResult<Range<u64>>;

    /// Allocate; the contents are undefined.
    ///
    /// # Errors
    /// Out of memory, no such device, or not supported. Zero bytes are refused.
    fn allocate(&self, kind: MemoryKind, bytes: usize) -> GpuResult<RawMemory>;

    /// Free what [`GpuRuntime::allocate`] gave.
    ///
    /// # Errors
    /// What the runtime returns; the memory is then lost.
    ///
    /// # Safety
    /// Nothing uses it any more, on any stream.
    unsafe fn release(&self, memory: &RawMemory) -> GpuResult<()>;

    /// Export an exportable allocation as a file descriptor.
    ///
    /// # Errors
    /// Where it is not exportable.
    fn export(&self, memory: &RawMemory) -> GpuResult<OwnedFd>;

    /// Export whole pages of device memory as a dmabuf.
    ///
    /// # Errors
    /// Where the runtime or the kernel cannot: the caller then stages through pinned memory.
    fn export_dmabuf(&self, range: Range<u64>) -> GpuResult<OwnedFd>;

    /// A stream that does not wait for the default one.
    ///
    /// # Errors
    /// Where there is no such device.
    fn create_stream(&self, ordinal: u32) -> GpuResult<StreamHandle>;

    /// # Errors
    /// What the runtime returns.
    ///
    /// # Safety
    /// The stream is this runtime's, and is not used again.
    unsafe fn destroy_stream(&self, stream: StreamHandle) -> GpuResult<()>;

    /// Whether all that was put on the stream is done.
    ///
    /// # Errors
    /// What went wrong on it.
    ///
    /// # Safety
    /// The stream is this runtime's and alive.
    unsafe fn stream_idle(&self, stream: StreamHandle) -> GpuResult<bool>;

    /// Put a copy on a stream; which way it goes is seen from the addresses.
    ///
    /// # Errors
    /// What the runtime returns.
    ///
    /// # Safety
    /// Both ranges are valid until the stream has done it.
    unsafe fn copy(&self, to: u64, from: u64, bytes: usize, stream: StreamHandle) -> GpuResult<()>;

    /// An event; timed ones cost more.
    ///
    /// # Errors
    /// Where there is no such device.
    fn create_event(&self, ordinal: u32, timed: bool) -> GpuResult<EventHandle>;

    /// # Errors
    /// What the runtime returns.
    ///
    /// # Safety
    /// The event is this runtime's, and is not used again.
    unsafe fn destroy_event(&self, event: EventHandle) -> GpuResult<()>;

    /// Record an event on a stream.
    ///
    /// # Errors
    /// What the runtime returns.
    ///
    /// # Safety
    /// Both are this runtime's and alive.
    unsafe fn record(&self, event: EventHandle, stream: StreamHandle) -> GpuResult<()>;

    /// Let a stream wait for an event, on the device.
    ///
    /// # Errors
    /// What the runtime returns.
    ///
    /// # Safety
    /// Both are this runtime's and alive.
    unsafe fn wait_event(&self, stream: StreamHandle, event: EventHandle) -> GpuResult<()>;

    /// Whether what was before the event is done.
    ///
    /// # Errors
    /// What went wrong before it.
    ///
    /// # Safety
    /// The event is this runtime's and alive.
    unsafe fn event_done(&self, event: EventHandle) -> GpuResult<bool>;

    /// Time between two timed events that are done.
    ///
    /// # Errors
    /// Where one is not done, or not timed.
    ///
    /// # Safety
    /// Both are this runtime's and alive.
    unsafe fn elapsed(&self, from: EventHandle, to: EventHandle) -> GpuResult<Duration>;
}

/// The runtime of this process's platform, opened when it is first asked for; what went wrong then stays.
///
/// # Errors
/// Where the platform's library cannot be opened, or the forced platform is none.
pub fn runtime() -> Result<&'static dyn GpuRuntime, &'static GpuError> {
    runtime_of(platform::current()?.platform)
}

/// The runtime of a platform, opened when it is first asked for; what went wrong then stays.
///
/// # Errors
/// Where its library cannot be opened or lacks an entry.
pub fn runtime_of(platform: Platform) -> Result<&'static dyn GpuRuntime, &'static GpuError> {
    static HOST: HostRuntime = HostRuntime;
    Ok(match vendor_of(platform)? {
        Some(vendor) => vendor,
        None => &HOST,
    })
}

/// The vendor's runtime of a platform; none for the host.
pub(super) fn vendor_of(platform: Platform) -> Result<Option<&'static VendorRuntime>, &'static GpuError> {
    static HIP: OnceLock<GpuResult<VendorRuntime>> = OnceLock::new();
    static CUDA: OnceLock<GpuResult<VendorRuntime>> = OnceLock::new();
    match platform {
        Platform::Rocm => HIP.get_or_init(VendorRuntime::hip).as_ref().map(Some),
        Platform::Cuda => CUDA.get_or_init(VendorRuntime::cuda).as_ref().map(Some),
        Platform::Host => Ok(None),
    }
}
