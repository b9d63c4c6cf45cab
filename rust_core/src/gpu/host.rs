//! The platform without devices: no device, memory of the host, streams on which everything is done at once.

use std::ops::Range;
use std::os::fd::{FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use super::abi::device::{EventHandle, StreamHandle};
use super::error::{GpuError, GpuResult};
use super::memory::MemoryKind;
use super::platform::Platform;
use super::runtime::{
    Capabilities, DeviceInfo, GpuRuntime, MemoryInfo, PointerInfo, PointerKind, RawMemory, Versions,
};

/// A host without accelerators. Its only memory is [`MemoryKind::Pinned`], which is not pinned here.
pub struct HostRuntime;

fn no_device<T>(ordinal: u32) -> GpuResult<T> {
    Err(GpuError::Unsupported {
        what: "a device",
        why: format!("device {ordinal} was asked for and this host has none"),
    })
}

fn last_os_error(what: &'static str) -> GpuError {
    GpuError::Unsupported { what, why: std::io::Error::last_os_error().to_string() }
}

impl GpuRuntime for HostRuntime {
    fn platform(&self) -> Platform {
        Platform::Host
    }

    fn simulated(&self) -> bool {
        false
    }

    fn versions(&self) -> GpuResult<Versions> {
        Ok(Versions { driver: 0, runtime: 0 })
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { pointer_attributes: true, ..Capabilities::default() }
    }

    fn device_count(&self) -> GpuResult<u32> {
        Ok(0)
    }

    fn device(&self, ordinal: u32) -> GpuResult<DeviceInfo> {
        no_device(ordinal)
    }

    fn memory_info(&self, ordinal: u32) -> GpuResult<MemoryInfo> {
        no_device(ordinal)
    }

    fn on_device(&self, ordinal: u32, _: &mut dyn FnMut()) -> GpuResult<()> {
        no_device(ordinal)
    }

    fn pointer(&self, _: u64) -> GpuResult<PointerInfo> {
        Ok(PointerInfo { kind: PointerKind::Host, ordinal: None })
    }

    fn allocation_of(&self, _: u64) -> GpuResult<Range<u64>> {
        Err(GpuError::Unsupported {
            what: "the range of an allocation",
            why: "this is memory of the host".into(),
        })
    }

    fn allocate(&self, kind: MemoryKind, bytes: usize) -> GpuResult<RawMemory> {
        let (MemoryKind::Device { ordinal } | MemoryKind::Exportable { ordinal }) = kind else {
            if bytes == 0 {
                return Err(GpuError::Invalid("an allocation of 0 bytes".into()));
            }
            // SAFETY: a new anonymous mapping, which touches nothing that exists.
            let address = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    bytes,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                    -1,
                    0,
                )
            };
            if address == libc::MAP_FAILED {
                return Err(last_os_error("memory of the host"));
            }
            return Ok(RawMemory { address: address as u64, bytes, reserved: bytes, kind, handle: 0 });
        };
        no_device(ordinal)
    }

    unsafe fn release(&self, memory: &RawMemory) -> GpuResult<()> {
        // SAFETY: mapped by `allocate`; of the caller.
        if unsafe { libc::munmap(memory.address as *mut _, memory.reserved) } != 0 {
            return Err(last_os_error("giving memory of the host back"));
        }
        Ok(())
    }

    fn export(&self, _: &RawMemory) -> GpuResult<OwnedFd> {
        Err(GpuError::Unsupported { what: "export of memory", why: "this is memory of the host".into() })
    }

    fn export_dmabuf(&self, _: Range<u64>) -> GpuResult<OwnedFd> {
        Err(GpuError::Unsupported { what: "a dmabuf", why: "this is memory of the host".into() })
    }

    fn create_stream(&self, _: u32) -> GpuResult<StreamHandle> {
        Ok(std::ptr::null_mut())
    }

    unsafe fn destroy_stream(&self, _: StreamHandle) -> GpuResult<()> {
        Ok(())
    }

    unsafe fn stream_idle(&self, _: StreamHandle) -> GpuResult<bool> {
        Ok(true)
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: usize, _: StreamHandle) -> GpuResult<()> {
        // SAFETY: of the caller. They may overlap.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
        Ok(())
    }

    fn create_event(&self, _: u32, _: bool) -> GpuResult<EventHandle> {
        Ok(Box::into_raw(Box::new(None::<Instant>)).cast())
    }

    unsafe fn destroy_event(&self, event: EventHandle) -> GpuResult<()> {
        // SAFETY: made by `create_event`; of the caller.
        drop(unsafe { Box::from_raw(event.cast::<Option<Instant>>()) });
        Ok(())
    }

    unsafe fn record(&self, event: EventHandle, _: StreamHandle) -> GpuResult<()> {
        // SAFETY: as above.
        unsafe { *event.cast::<Option<Instant>>() = Some(Instant::now()) };
        Ok(())
    }

    unsafe fn wait_event(&self, _: StreamHandle, _: EventHandle) -> GpuResult<()> {
        Ok(())
    }

    unsafe fn event_done(&self, _: EventHandle) -> GpuResult<bool> {
        Ok(true)
    }

    unsafe fn elapsed(&self, from: EventHandle, to: EventHandle) -> GpuResult<Duration> {
        // SAFETY: as above.
        match unsafe { (*from.cast::<Option<Instant>>(), *to.cast::<Option<Instant>>()) } {
            (Some(from), Some(to)) => Ok(to.saturating_duration_since(from)),
            _ => Err(GpuError::Invalid("an event that was not recorded".into())),
        }
    }
}

/// Take a descriptor that a vendor's library handed out.
pub(super) fn owned(fd: i32) -> GpuResult<OwnedFd> {
    if fd < 0 {
        return Err(GpuError::Invalid(format!("a library handed out descriptor {fd}")));
    }
    // SAFETY: the library gives it away with the call.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{Event, Memory, Stream};

    static HOST: HostRuntime = HostRuntime;
    const LIMIT: Duration = Duration::from_secs(5);

    #[test]
    fn code_that_is_written_for_devices_runs_on_a_host_without_one() {
        let stream = Stream::new(&HOST, 0).expect("a stream");
        let mut memory = Memory::new(&HOST, MemoryKind::Pinned, 4096).expect("memory");
        memory.write(4090, b"abcdef", &stream, LIMIT).expect("in bounds");
        let mut back = [0; 6];
        memory.read(4090, &mut back, &stream, LIMIT).expect("in bounds");
        assert_eq!(&back, b"abcdef");
        let error = memory.write(4091, b"abcdef", &stream, LIMIT).expect_err("one too many");
        assert!(error.to_string().contains("bytes 4091 to 4097 of an allocation of 4096 bytes"), "{error}");
        assert!(memory.read(usize::MAX, &mut back, &stream, LIMIT).is_err(), "no overflow");

        let (from, to) =
            (Event::new(&HOST, 0, true).expect("event"), Event::new(&HOST, 0, true).expect("event"));
        assert!(to.since(&from).is_err(), "not recorded");
        from.record(&stream).expect("recorded");
        to.record(&stream).expect("recorded");
        to.wait(LIMIT).expect("done");
        assert!(to.since(&from).expect("both are recorded") < LIMIT);
    }

    #[test]
    fn a_host_without_devices_says_so_and_refuses_what_needs_one() {
        assert_eq!(HOST.device_count().expect("an answer"), 0);
        assert!(HOST.device(0).is_err() && HOST.memory_info(0).is_err());
        let refused = Memory::new(&HOST, MemoryKind::Device { ordinal: 3 }, 16).err().expect("no device");
        assert!(refused.to_string().contains("device 3 was asked for and this host has none"), "{refused}");
        assert!(Memory::new(&HOST, MemoryKind::Pinned, 0).is_err());
    }
}
