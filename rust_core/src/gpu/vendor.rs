//! HIP and CUDA: one implementation over the tables, which know the vendors' names.

use std::ffi::{CStr, c_int};
use std::fmt::Write as _;
use std::sync::OnceLock;

use super::abi::device::{
    AccessFlags, AllocationType, Attribute, Granularity, HIP_WITH_CUDA_LAYOUT, HandleType, LocationType,
    MemAccessDesc, MemAllocationProp, MemLocation, MemoryType, Status, Uuid,
};
use super::error::{GpuError, GpuResult};
use super::library::Library;
use super::memory::MemoryKind;
use super::runtime::{GpuRuntime, RawMemory};
use super::table::Entry;
use super::table::device::{CUDA, CUDA_LIBRARY, CUDART_LIBRARY, DriverTable, HIP, HIP_LIBRARY, RuntimeTable};

/// Call an entry; what it returns other than success becomes an error, and is cleared so that nobody else finds it.
macro_rules! call {
    ($self:ident, runtime.$entry:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the arguments live as long as the call; handles are this runtime's by the contract of the trait.
        let status = unsafe { ($self.runtime.$entry)($($argument),*) };
        $self.check(RuntimeTable::ENTRIES, stringify!($entry), status)
    }};
    ($self:ident, driver.$entry:ident($($argument:expr),* $(,)?)) => {{
        let driver = $self.driver()?;
        // SAFETY: as above.
        let status = unsafe { (driver.$entry)($($argument),*) };
        $self.check(DriverTable::ENTRIES, stringify!($entry), status)
    }};
    ($self:ident, optional.$entry:ident($($argument:expr),* $(,)?)) => {{
        let entry = $self.driver()?.$entry.ok_or_else(|| $self.lacks(stringify!($entry)))?;
        // SAFETY: as above.
        let status = unsafe { entry($($argument),*) };
        $self.check(DriverTable::ENTRIES, stringify!($entry), status)
    }};
}

mod calls;

/// A vendor's runtime, open.
pub struct VendorRuntime {
    vendor: usize,
    /// Runtime entries.
    pub runtime: RuntimeTable,
    driver: GpuResult<DriverTable>,
    initialised: OnceLock<Status>,
    library: Library,
    version: c_int,
}

impl VendorRuntime {
    /// Open HIP.
    ///
    /// # Errors
    /// Where there is none, or it lacks an entry.
    pub fn hip() -> GpuResult<Self> {
        let library = Library::open(&HIP_LIBRARY)?;
        let driver = Ok(DriverTable::load(&library, HIP)?);
        Self::opened(HIP, library, driver)
    }

    /// Open CUDA: its runtime, and its driver where there is one.
    ///
    /// # Errors
    /// Where there is no runtime, or it lacks an entry.
    pub fn cuda() -> GpuResult<Self> {
        let library = Library::open(&CUDART_LIBRARY)?;
        let driver = Library::open(&CUDA_LIBRARY).and_then(|library| DriverTable::load(&library, CUDA));
        Self::opened(CUDA, library, driver)
    }

    fn opened(vendor: usize, library: Library, driver: GpuResult<DriverTable>) -> GpuResult<Self> {
        let runtime = RuntimeTable::load(&library, vendor)?;
        let mut version = 0;
        // SAFETY: writes one int; touches no device.
        let status = unsafe { (runtime.runtime_get_version)(&mut version) };
        let opened = Self { vendor, runtime, driver, initialised: OnceLock::new(), library, version };
        opened.check(RuntimeTable::ENTRIES, "runtime_get_version", status)?;
        Ok(opened)
    }

    /// The library of the runtime entries.
    pub const fn library(&self) -> &Library {
        &self.library
    }

    /// The version that the runtime says.
    pub const fn version(&self) -> c_int {
        self.version
    }

    /// The driver-style entries, initialised when they are first used.
    ///
    /// # Errors
    /// Where there is no driver, or it cannot be initialised.
    pub fn driver(&self) -> GpuResult<&DriverTable> {
        let driver = self
            .driver
            .as_ref()
            .map_err(|why| GpuError::Unsupported { what: "the CUDA driver", why: why.to_string() })?;
        // SAFETY: takes a number.
        let status = *self.initialised.get_or_init(|| unsafe { (driver.init)(0) });
        self.check(DriverTable::ENTRIES, "init", status)?;
        Ok(driver)
    }

    /// The number of an attribute, in this vendor's numbering.
    pub const fn attribute_number(&self, attribute: Attribute) -> c_int {
        if self.vendor == HIP { attribute.hip().0 } else { attribute.cuda().0 }
    }

    /// What this runtime's number for a kind of memory means.
    pub const fn memory_type(&self, value: u32) -> MemoryType {
        if self.vendor == HIP { MemoryType::of_hip(value, self.version) } else { MemoryType(value) }
    }

    /// Whether allocation properties lie as they are declared; HIP 5's do not.
    pub const fn has_known_layout(&self) -> bool {
        self.vendor != HIP || self.version >= HIP_WITH_CUDA_LAYOUT
    }

    fn name_of(&self, entries: &'static [Entry], field: &str) -> &'static str {
        entries.iter().find(|entry| entry.field == field).map_or("?", |entry| entry.symbols[self.vendor])
    }

    fn lacks(&self, field: &'static str) -> GpuError {
        GpuError::Unsupported {
            what: self.name_of(DriverTable::ENTRIES, field),
            why: format!("{} does not have it", self.library.path().display()),
        }
    }

    fn check(&self, entries: &'static [Entry], field: &'static str, status: Status) -> GpuResult<()> {
        if status == Status::SUCCESS {
            return Ok(());
        }
        // SAFETY: takes a number and gives a string of the library, or null.
        let text = unsafe { (self.runtime.get_error_string)(status) };
        let text = if text.is_null() {
            "unknown error".into()
        } else {
            // SAFETY: a C string that lives as long as the library.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        // SAFETY: no arguments. Otherwise torch's next look at its own last error would find ours.
        let _ = unsafe { (self.runtime.get_last_error)() };
        Err(GpuError::Status { api: self.name_of(entries, field), code: status, text })
    }

    /// Run with `ordinal` as the thread's current device, and put back what was.
    fn on<T>(&self, ordinal: u32, run: impl FnOnce() -> GpuResult<T>) -> GpuResult<T> {
        let wanted = c_int::try_from(ordinal).map_err(|_| GpuError::Invalid(format!("device {ordinal}")))?;
        let mut before = 0;
        call!(self, runtime.get_device(&mut before))?;
        if before == wanted {
            return run();
        }
        call!(self, runtime.set_device(wanted))?;
        let result = run();
        call!(self, runtime.set_device(before))?;
        result
    }

    fn attribute(&self, ordinal: u32, attribute: Attribute) -> GpuResult<u32> {
        let mut value = 0;
        let ordinal = c_int::try_from(ordinal).map_err(|_| GpuError::Invalid(format!("device {ordinal}")))?;
        call!(self, runtime.device_get_attribute(&mut value, self.attribute_number(attribute), ordinal))?;
        u32::try_from(value)
            .map_err(|_| GpuError::Invalid(format!("{attribute:?} of device {ordinal} is {value}")))
    }

    fn uuid(&self, ordinal: u32) -> GpuResult<String> {
        let mut device = 0;
        call!(self, driver.device_get(&mut device, ordinal as c_int))?;
        let mut uuid = Uuid::default();
        call!(self, optional.device_get_uuid(&mut uuid, device))?;
        // HIP writes the digits of the unique id, as ROCR_VISIBLE_DEVICES takes them; CUDA writes bytes.
        if uuid.bytes.iter().all(u8::is_ascii_hexdigit) {
            return Ok(uuid.bytes.iter().map(|byte| char::from(*byte).to_ascii_lowercase()).collect());
        }
        Ok(uuid.bytes.iter().fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        }))
    }

    /// One chunk of device memory that can be exported, mapped for its own device.
    fn allocate_exportable(&self, ordinal: u32, bytes: usize) -> GpuResult<RawMemory> {
        if !self.capabilities().virtual_memory {
            return Err(GpuError::Unsupported {
                what: "exportable memory",
                why: format!(
                    "this runtime (version {}) has no virtual memory management that is known",
                    self.version
                ),
            });
        }
        let location = MemLocation { kind: LocationType::DEVICE, id: ordinal as c_int };
        let properties = MemAllocationProp {
            kind: AllocationType::PINNED,
            requested_handle_types: HandleType::POSIX_FILE_DESCRIPTOR,
            location,
            win32_handle_meta_data: std::ptr::null_mut(),
            alloc_flags: [0; 8],
        };
        let mut granularity = 0;
        call!(
            self,
            optional.mem_get_allocation_granularity(&mut granularity, &properties, Granularity::MINIMUM)
        )?;
        let reserved = bytes
            .checked_next_multiple_of(granularity.max(1))
            .ok_or_else(|| GpuError::Invalid(format!("an allocation of {bytes} bytes")))?;
        let mut handle = 0;
        call!(self, optional.mem_create(&mut handle, reserved, &properties, 0))?;
        let mut address = 0;
        let access = MemAccessDesc { location, flags: AccessFlags::READ_WRITE };
        let kind = MemoryKind::Exportable { ordinal };
        let mapped =
            call!(self, optional.mem_address_reserve(&mut address, reserved, 0, 0, 0)).and_then(|()| {
                call!(self, optional.mem_map(address, reserved, 0, handle, 0))
                    .and_then(|()| {
                        call!(self, optional.mem_set_access(address, reserved, &access, 1))
                            .inspect_err(|_| drop(self.unmap(address, reserved)))
                    })
                    .inspect_err(|_| drop(self.free_addresses(address, reserved)))
            });
        if let Err(error) = mapped {
            call!(self, optional.mem_release(handle))?;
            return Err(error);
        }
        Ok(RawMemory { address, bytes, reserved, kind, handle })
    }

    fn unmap(&self, address: u64, bytes: usize) -> GpuResult<()> {
        call!(self, optional.mem_unmap(address, bytes))
    }

    fn free_addresses(&self, address: u64, bytes: usize) -> GpuResult<()> {
        call!(self, optional.mem_address_free(address, bytes))
    }

    /// Ask whether something is done: "not ready" is an answer, not an error.
    fn done(&self, asked: GpuResult<()>) -> GpuResult<bool> {
        match asked {
            Ok(()) => Ok(true),
            Err(error) if error.code() == Some(Status::NOT_READY) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
