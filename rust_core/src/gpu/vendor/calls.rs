//! The calls of [`GpuRuntime`], on either vendor's tables.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::VendorRuntime;
use crate::gpu::abi::device::{
    Attribute, CopyKind, EVENT_DISABLE_TIMING, EventHandle, HOST_ALLOC_PORTABLE, HandleType, MemoryType,
    PointerAttribute, RangeHandleType, STREAM_NON_BLOCKING, Status, StreamHandle,
};
use crate::gpu::error::{GpuError, GpuResult};
use crate::gpu::host::owned;
use crate::gpu::memory::MemoryKind;
use crate::gpu::platform::Platform;
use crate::gpu::runtime::{
    Capabilities, DeviceInfo, GpuRuntime, MemoryInfo, PointerInfo, PointerKind, RawMemory, Versions,
};
use crate::gpu::table::device::{DriverTable, HIP, RuntimeTable};

impl GpuRuntime for VendorRuntime {
    fn platform(&self) -> Platform {
        if self.vendor == HIP { Platform::Rocm } else { Platform::Cuda }
    }

    fn simulated(&self) -> bool {
        self.library.simulated()
    }

    fn versions(&self) -> GpuResult<Versions> {
        let mut driver = 0;
        call!(self, runtime.driver_get_version(&mut driver))?;
        Ok(Versions { driver, runtime: self.version })
    }

    fn capabilities(&self) -> Capabilities {
        let Ok(driver) = self.driver.as_ref() else { return Capabilities::default() };
        Capabilities {
            virtual_memory: driver.has_virtual_memory() && self.has_known_layout(),
            dmabuf: driver.mem_get_handle_for_address_range.is_some(),
            pointer_attributes: driver.pointer_get_attribute.is_some(),
        }
    }

    fn device_count(&self) -> GpuResult<u32> {
        let mut count = 0;
        match call!(self, runtime.get_device_count(&mut count)) {
            Ok(()) => Ok(u32::try_from(count).unwrap_or(0)),
            Err(error) if error.code() == Some(Status::NO_DEVICE) => Ok(0),
            Err(error) => Err(error),
        }
    }

    fn device(&self, ordinal: u32) -> GpuResult<DeviceInfo> {
        let mut pci = [0; 64];
        call!(self, runtime.device_get_pci_bus_id(pci.as_mut_ptr(), pci.len() as c_int, ordinal as c_int))?;
        let pci: Vec<u8> = pci.iter().map(|byte| *byte as u8).take_while(|byte| *byte != 0).collect();
        Ok(DeviceInfo {
            ordinal,
            pci: String::from_utf8_lossy(&pci).to_ascii_lowercase(),
            uuid: self.uuid(ordinal).ok(),
            multiprocessors: self.attribute(ordinal, Attribute::Multiprocessors)?,
            warp_size: self.attribute(ordinal, Attribute::WarpSize)?,
        })
    }

    fn memory_info(&self, ordinal: u32) -> GpuResult<MemoryInfo> {
        self.on(ordinal, || {
            let (mut free, mut total) = (0, 0);
            call!(self, runtime.mem_get_info(&mut free, &mut total))?;
            Ok(MemoryInfo { free_bytes: free as u64, total_bytes: total as u64 })
        })
    }

    fn on_device(&self, ordinal: u32, run: &mut dyn FnMut()) -> GpuResult<()> {
        self.on(ordinal, || {
            run();
            Ok(())
        })
    }

    fn pointer(&self, address: u64) -> GpuResult<PointerInfo> {
        let mut kind = 0_u32;
        let out = (&raw mut kind).cast::<c_void>();
        match call!(self, optional.pointer_get_attribute(out, PointerAttribute::MEMORY_TYPE, address)) {
            Ok(()) => {}
            // Memory that the runtime does not know is the host's.
            Err(error) if error.code() == Some(Status::INVALID_VALUE) => {
                return Ok(PointerInfo { kind: PointerKind::Host, ordinal: None });
            }
            Err(error) => return Err(error),
        }
        let kind = match self.memory_type(kind) {
            MemoryType::DEVICE => PointerKind::Device,
            // 0: HIP 6 and later say so of memory that they do not know.
            MemoryType::HOST | MemoryType(0) => {
                return Ok(PointerInfo { kind: PointerKind::Host, ordinal: None });
            }
            MemoryType(other) => PointerKind::Other(other),
        };
        let mut ordinal: c_int = 0;
        let out = (&raw mut ordinal).cast::<c_void>();
        call!(self, optional.pointer_get_attribute(out, PointerAttribute::DEVICE_ORDINAL, address))?;
        Ok(PointerInfo { kind, ordinal: u32::try_from(ordinal).ok() })
    }

    fn allocation_of(&self, address: u64) -> GpuResult<Range<u64>> {
        let (mut base, mut bytes) = (0, 0);
        call!(self, driver.mem_get_address_range(&mut base, &mut bytes, address))?;
        Ok(base..base + bytes as u64)
    }

    fn allocate(&self, kind: MemoryKind, bytes: usize) -> GpuResult<RawMemory> {
        if bytes == 0 {
            return Err(GpuError::Invalid("an allocation of 0 bytes".into()));
        }
        let mut address = std::ptr::null_mut();
        match kind {
            MemoryKind::Pinned => call!(self, runtime.host_alloc(&mut address, bytes, HOST_ALLOC_PORTABLE))?,
            MemoryKind::Device { ordinal } => {
                self.on(ordinal, || call!(self, runtime.malloc(&mut address, bytes)))?;
            }
            MemoryKind::Exportable { ordinal } => {
                return self.on(ordinal, || self.allocate_exportable(ordinal, bytes));
            }
        }
        Ok(RawMemory { address: address as u64, bytes, reserved: bytes, kind, handle: 0 })
    }

    unsafe fn release(&self, memory: &RawMemory) -> GpuResult<()> {
        let address = memory.address as *mut c_void;
        match memory.kind {
            MemoryKind::Pinned => call!(self, runtime.host_free(address)),
            MemoryKind::Device { ordinal } => self.on(ordinal, || call!(self, runtime.free(address))),
            MemoryKind::Exportable { .. } => {
                self.unmap(memory.address, memory.reserved)?;
                self.free_addresses(memory.address, memory.reserved)?;
                call!(self, optional.mem_release(memory.handle))
            }
        }
    }

    fn export(&self, memory: &RawMemory) -> GpuResult<OwnedFd> {
        if !matches!(memory.kind, MemoryKind::Exportable { .. }) {
            return Err(GpuError::Invalid(format!("memory of kind {:?} cannot be exported", memory.kind)));
        }
        let mut fd: c_int = -1;
        let (out, kind) = ((&raw mut fd).cast::<c_void>(), HandleType::POSIX_FILE_DESCRIPTOR);
        call!(self, optional.mem_export_to_shareable_handle(out, memory.handle, kind, 0))?;
        owned(fd)
    }

    fn export_dmabuf(&self, range: Range<u64>) -> GpuResult<OwnedFd> {
        const PAGE: u64 = 4096;
        if range.is_empty() || !range.start.is_multiple_of(PAGE) || !range.end.is_multiple_of(PAGE) {
            return Err(GpuError::Invalid(format!(
                "{:#x}..{:#x} is not whole pages",
                range.start, range.end
            )));
        }
        let mut fd: c_int = -1;
        let out = (&raw mut fd).cast::<c_void>();
        let bytes = (range.end - range.start) as usize;
        let kind = RangeHandleType::DMA_BUF_FD;
        call!(self, optional.mem_get_handle_for_address_range(out, range.start, bytes, kind, 0))?;
        owned(fd)
    }

    fn create_stream(&self, ordinal: u32) -> GpuResult<StreamHandle> {
        let mut stream = std::ptr::null_mut();
        self.on(ordinal, || call!(self, runtime.stream_create_with_flags(&mut stream, STREAM_NON_BLOCKING)))?;
        Ok(stream)
    }

    unsafe fn destroy_stream(&self, stream: StreamHandle) -> GpuResult<()> {
        call!(self, runtime.stream_destroy(stream))
    }

    unsafe fn stream_idle(&self, stream: StreamHandle) -> GpuResult<bool> {
        self.done(call!(self, runtime.stream_query(stream)))
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: usize, stream: StreamHandle) -> GpuResult<()> {
        let (to, from) = (to as *mut c_void, from as *const c_void);
        call!(self, runtime.memcpy_async(to, from, bytes, CopyKind::DEFAULT, stream))
    }

    fn create_event(&self, ordinal: u32, timed: bool) -> GpuResult<EventHandle> {
        let mut event = std::ptr::null_mut();
        let flags = if timed { 0 } else { EVENT_DISABLE_TIMING };
        self.on(ordinal, || call!(self, runtime.event_create_with_flags(&mut event, flags)))?;
        Ok(event)
    }

    unsafe fn destroy_event(&self, event: EventHandle) -> GpuResult<()> {
        call!(self, runtime.event_destroy(event))
    }

    unsafe fn record(&self, event: EventHandle, stream: StreamHandle) -> GpuResult<()> {
        call!(self, runtime.event_record(event, stream))
    }

    unsafe fn wait_event(&self, stream: StreamHandle, event: EventHandle) -> GpuResult<()> {
        call!(self, runtime.stream_wait_event(stream, event, 0))
    }

    unsafe fn event_done(&self, event: EventHandle) -> GpuResult<bool> {
        self.done(call!(self, runtime.event_query(event)))
    }

    unsafe fn elapsed(&self, from: EventHandle, to: EventHandle) -> GpuResult<Duration> {
        let mut milliseconds = 0_f32;
        call!(self, runtime.event_elapsed_time(&mut milliseconds, from, to))?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1000.0))
    }
}
