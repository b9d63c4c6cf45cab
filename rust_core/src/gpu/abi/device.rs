//! HIP and CUDA, runtime and driver-style entries. One declaration serves both: sizes and offsets are equal, and where
//! numbers differ there are two (`HipAttribute`, `CudaAttribute`).

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::mem::{offset_of, size_of};

use super::open_enum;

open_enum! {
    /// `hipError_t`, `cudaError_t` or `CUresult`: the numbers that matter here are the same in all three.
    pub struct Status(c_int) {
        SUCCESS = 0 ["hipSuccess", "cudaSuccess"],
        INVALID_VALUE = 1 ["hipErrorInvalidValue", "cudaErrorInvalidValue"],
        OUT_OF_MEMORY = 2 ["hipErrorOutOfMemory", "cudaErrorMemoryAllocation"],
        NOT_INITIALIZED = 3 ["hipErrorNotInitialized", "cudaErrorInitializationError"],
        DEINITIALIZED = 4 ["hipErrorDeinitialized", "cudaErrorCudartUnloading"],
        INSUFFICIENT_DRIVER = 35 ["hipErrorInsufficientDriver", "cudaErrorInsufficientDriver"],
        NO_DEVICE = 100 ["hipErrorNoDevice", "cudaErrorNoDevice"],
        INVALID_DEVICE = 101 ["hipErrorInvalidDevice", "cudaErrorInvalidDevice"],
        ECC_UNCORRECTABLE = 214 ["hipErrorECCNotCorrectable", "cudaErrorECCUncorrectable"],
        INVALID_HANDLE = 400 ["hipErrorInvalidHandle", "cudaErrorInvalidResourceHandle"],
        NOT_FOUND = 500 ["hipErrorNotFound", "cudaErrorSymbolNotFound"],
        NOT_READY = 600 ["hipErrorNotReady", "cudaErrorNotReady"],
        ILLEGAL_ADDRESS = 700 ["hipErrorIllegalAddress", "cudaErrorIllegalAddress"],
        CONTEXT_IS_DESTROYED = 709 ["hipErrorContextIsDestroyed", "cudaErrorContextIsDestroyed"],
        LAUNCH_FAILURE = 719 ["hipErrorLaunchFailure", "cudaErrorLaunchFailure"],
        NOT_SUPPORTED = 801 ["hipErrorNotSupported", "cudaErrorNotSupported"],
        UNKNOWN = 999 ["hipErrorUnknown", "cudaErrorUnknown"],
    }
}

open_enum! {
    /// Which way a copy goes.
    pub struct CopyKind(c_int) {
        HOST_TO_HOST = 0 ["hipMemcpyHostToHost", "cudaMemcpyHostToHost"],
        HOST_TO_DEVICE = 1 ["hipMemcpyHostToDevice", "cudaMemcpyHostToDevice"],
        DEVICE_TO_HOST = 2 ["hipMemcpyDeviceToHost", "cudaMemcpyDeviceToHost"],
        DEVICE_TO_DEVICE = 3 ["hipMemcpyDeviceToDevice", "cudaMemcpyDeviceToDevice"],
        /// By what the addresses are.
        DEFAULT = 4 ["hipMemcpyDefault", "cudaMemcpyDefault"],
    }
}

open_enum! {
    /// What can be asked of an address. HIP's and CUDA's numbers are equal.
    pub struct PointerAttribute(c_int) {
        CONTEXT = 1 ["HIP_POINTER_ATTRIBUTE_CONTEXT", "CU_POINTER_ATTRIBUTE_CONTEXT"],
        MEMORY_TYPE = 2 ["HIP_POINTER_ATTRIBUTE_MEMORY_TYPE", "CU_POINTER_ATTRIBUTE_MEMORY_TYPE"],
        DEVICE_ORDINAL = 9 ["HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL", "CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL"],
    }
}

open_enum! {
    /// Where memory is, in the numbers of CUDA and of HIP from release 6 on. HIP 5 said 1 for a device, which is a
    /// host here: see [`MemoryType::of_hip`].
    pub struct MemoryType(c_uint) {
        HOST = 1 ["hipMemoryTypeHost", "CU_MEMORYTYPE_HOST"],
        DEVICE = 2 ["hipMemoryTypeDevice", "CU_MEMORYTYPE_DEVICE"],
    }
}

impl MemoryType {
    /// What a HIP of this version (as `hipRuntimeGetVersion` says it, 50221153 for 5.2) means by `value`.
    pub const fn of_hip(value: c_uint, version: c_int) -> Self {
        match value {
            0 | 1 if version < HIP_WITH_CUDA_LAYOUT => Self(value + 1),
            other => Self(other),
        }
    }
}

/// Attributes of a device, as they are asked for here; each vendor numbers them its own way.
#[allow(missing_docs, reason = "the vendors document them")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attribute {
    PciBus,
    PciDevice,
    PciDomain,
    Multiprocessors,
    WarpSize,
    VirtualMemory,
    DmaBuf,
}

open_enum! {
    /// `hipDeviceAttribute_t`.
    pub struct HipAttribute(c_int) {
        MULTIPROCESSORS = 63 ["hipDeviceAttributeMultiprocessorCount"],
        PCI_BUS = 67 ["hipDeviceAttributePciBusId"],
        PCI_DEVICE = 68 ["hipDeviceAttributePciDeviceId"],
        PCI_DOMAIN = 69 ["hipDeviceAttributePciDomainID"],
        WARP_SIZE = 87 ["hipDeviceAttributeWarpSize"],
        VIRTUAL_MEMORY = 89 ["hipDeviceAttributeVirtualMemoryManagementSupported"],
        DMA_BUF = 93 ["hipDeviceAttributeDmaBufSupported"],
    }
}

open_enum! {
    /// `CUdevice_attribute` and `cudaDeviceAttr`, which agree.
    pub struct CudaAttribute(c_int) {
        WARP_SIZE = 10 ["CU_DEVICE_ATTRIBUTE_WARP_SIZE"],
        MULTIPROCESSORS = 16 ["CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT"],
        PCI_BUS = 33 ["CU_DEVICE_ATTRIBUTE_PCI_BUS_ID"],
        PCI_DEVICE = 34 ["CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID"],
        PCI_DOMAIN = 50 ["CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID"],
        VIRTUAL_MEMORY = 102 ["CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"],
        DMA_BUF = 124 ["CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED"],
    }
}

impl Attribute {
    /// HIP's number.
    pub const fn hip(self) -> HipAttribute {
        match self {
            Self::PciBus => HipAttribute::PCI_BUS,
            Self::PciDevice => HipAttribute::PCI_DEVICE,
            Self::PciDomain => HipAttribute::PCI_DOMAIN,
            Self::Multiprocessors => HipAttribute::MULTIPROCESSORS,
            Self::WarpSize => HipAttribute::WARP_SIZE,
            Self::VirtualMemory => HipAttribute::VIRTUAL_MEMORY,
            Self::DmaBuf => HipAttribute::DMA_BUF,
        }
    }

    /// CUDA's number.
    pub const fn cuda(self) -> CudaAttribute {
        match self {
            Self::PciBus => CudaAttribute::PCI_BUS,
            Self::PciDevice => CudaAttribute::PCI_DEVICE,
            Self::PciDomain => CudaAttribute::PCI_DOMAIN,
            Self::Multiprocessors => CudaAttribute::MULTIPROCESSORS,
            Self::WarpSize => CudaAttribute::WARP_SIZE,
            Self::VirtualMemory => CudaAttribute::VIRTUAL_MEMORY,
            Self::DmaBuf => CudaAttribute::DMA_BUF,
        }
    }

    /// What CUDA's number means; `None` for one that nothing here asks for.
    pub const fn of_cuda(number: c_int) -> Option<Self> {
        Some(match CudaAttribute(number) {
            CudaAttribute::PCI_BUS => Self::PciBus,
            CudaAttribute::PCI_DEVICE => Self::PciDevice,
            CudaAttribute::PCI_DOMAIN => Self::PciDomain,
            CudaAttribute::MULTIPROCESSORS => Self::Multiprocessors,
            CudaAttribute::WARP_SIZE => Self::WarpSize,
            CudaAttribute::VIRTUAL_MEMORY => Self::VirtualMemory,
            CudaAttribute::DMA_BUF => Self::DmaBuf,
            _ => return None,
        })
    }
}

open_enum! {
    /// How an allocation is made.
    pub struct AllocationType(c_int) {
        PINNED = 1 ["hipMemAllocationTypePinned", "CU_MEM_ALLOCATION_TYPE_PINNED"],
    }
}

open_enum! {
    /// What an allocation can be exported as.
    pub struct HandleType(c_int) {
        NONE = 0 [],
        POSIX_FILE_DESCRIPTOR = 1 ["hipMemHandleTypePosixFileDescriptor", "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"],
    }
}

open_enum! {
    /// What an address range can be exported as.
    pub struct RangeHandleType(c_int) {
        DMA_BUF_FD = 1 ["hipMemRangeHandleTypeDmaBufFd", "CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD"],
    }
}

open_enum! {
    /// Where an allocation lives.
    pub struct LocationType(c_int) {
        DEVICE = 1 ["hipMemLocationTypeDevice", "CU_MEM_LOCATION_TYPE_DEVICE"],
    }
}

open_enum! {
    /// Who may do what with a mapping.
    pub struct AccessFlags(c_int) {
        READ_WRITE = 3 ["hipMemAccessFlagsProtReadWrite", "CU_MEM_ACCESS_FLAGS_PROT_READWRITE"],
    }
}

open_enum! {
    /// Which granularity is asked for.
    pub struct Granularity(c_int) {
        MINIMUM = 0 ["hipMemAllocationGranularityMinimum", "CU_MEM_ALLOC_GRANULARITY_MINIMUM"],
    }
}

/// Streams that do not wait for the legacy default stream.
pub const STREAM_NON_BLOCKING: c_uint = 1;
/// Events that only order.
pub const EVENT_DISABLE_TIMING: c_uint = 2;
/// Pinned memory that every device may use.
pub const HOST_ALLOC_PORTABLE: c_uint = 1;

/// A device as driver-style entries name it.
pub type Device = c_int;
/// An address on a device. `void *` in HIP and `unsigned long long` in CUDA: the same register.
pub type DevicePointer = c_ulonglong;
/// `hipMemGenericAllocationHandle_t` (a pointer) or `CUmemGenericAllocationHandle` (a number).
pub type AllocationHandle = c_ulonglong;

/// What a `hipStream_t` or `cudaStream_t` points to (`ihipStream_t`, `CUstream_st`).
#[repr(C)]
pub struct StreamObject {
    _private: [u8; 0],
}
/// A stream; null is the default one.
pub type StreamHandle = *mut StreamObject;

/// What an event handle points to.
#[repr(C)]
pub struct EventObject {
    _private: [u8; 0],
}
/// An event.
pub type EventHandle = *mut EventObject;

/// What a `CUcontext` or `hipCtx_t` points to.
#[repr(C)]
pub struct ContextObject {
    _private: [u8; 0],
}
/// A context.
pub type ContextHandle = *mut ContextObject;

/// `hipUUID`, `CUuuid`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uuid {
    /// Its bytes; ASCII digits from HIP.
    pub bytes: [u8; 16],
}

/// `hipMemLocation`, `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MemLocation {
    /// Kind of place.
    pub kind: LocationType,
    /// Device ordinal.
    pub id: c_int,
}

/// `hipMemAllocationProp`, `CUmemAllocationProp`. HIP 6.2 names the second field `requestedHandleType`, HIP 7 has a
/// union there; its place and width are the same. HIP 5.2 has the same size and *another order* (the location at 4, the
/// type at 16): see [`HIP_WITH_CUDA_LAYOUT`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MemAllocationProp {
    /// How it is made.
    pub kind: AllocationType,
    /// What it can be exported as.
    pub requested_handle_types: HandleType,
    /// Where it lives.
    pub location: MemLocation,
    /// Null on Linux.
    pub win32_handle_meta_data: *mut c_void,
    /// Compression, GPUDirect and usage: eight bytes of flags, zero by default.
    pub alloc_flags: [u8; 8],
}

/// The oldest HIP whose allocation properties are trusted to lie as [`MemAllocationProp`] says.
pub const HIP_WITH_CUDA_LAYOUT: c_int = 60_000_000;

/// `hipMemAccessDesc`, `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MemAccessDesc {
    /// Who.
    pub location: MemLocation,
    /// What.
    pub flags: AccessFlags,
}

/// `hipIpcMemHandle_t`, `cudaIpcMemHandle_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcMemHandle {
    /// Opaque.
    pub reserved: [u8; 64],
}

const _: () = {
    assert!(size_of::<Status>() == 4 && size_of::<Uuid>() == 16 && size_of::<IpcMemHandle>() == 64);
    assert!(size_of::<MemLocation>() == 8 && size_of::<MemAccessDesc>() == 12);
    assert!(size_of::<MemAllocationProp>() == 32);
    assert!(offset_of!(MemAllocationProp, location) == 8);
    assert!(offset_of!(MemAllocationProp, win32_handle_meta_data) == 16);
    assert!(size_of::<DevicePointer>() == size_of::<*mut c_void>());
};
