//! CUDA's names and numbers, on whichever vendor's device this process uses.
//!
//! The numbers are CUDA's everywhere; where HIP has another one (attributes of a device, kinds of memory in HIP 5) it is
//! translated here, and nowhere above. Without a device each call returns [`CUDA_ERROR_NOT_INITIALIZED`].

#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals, reason = "the names are CUDA's")]
#![allow(missing_docs, reason = "CUDA documents them")]

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use crate::gpu::abi::device::{
    AccessFlags, AllocationType, Attribute, CopyKind, CudaAttribute, Granularity, HandleType, LocationType,
    MemoryType, PointerAttribute, RangeHandleType, Status,
};
use crate::gpu::platform;
use crate::gpu::runtime::vendor_of;
use crate::gpu::vendor::VendorRuntime;

pub use crate::gpu::abi::device::{
    AllocationHandle as CUmemGenericAllocationHandle, ContextHandle as CUcontext, CopyKind as cudaMemcpyKind,
    Device as CUdevice, DevicePointer as CUdeviceptr, EventHandle as cudaEvent_t,
    MemAccessDesc as CUmemAccessDesc, MemAllocationProp as CUmemAllocationProp, MemLocation as CUmemLocation,
    Status as CUresult, Status as cudaError_t, StreamHandle as cudaStream_t, StreamHandle as CUstream,
    StreamObject as CUstream_st, StreamObject as ihipStream_t,
};

pub type CUdevice_attribute = CudaAttribute;
pub type CUpointer_attribute = PointerAttribute;

pub const CUDA_SUCCESS: CUresult = Status::SUCCESS;
pub const CUDA_ERROR_INVALID_VALUE: CUresult = Status::INVALID_VALUE;
pub const CUDA_ERROR_NOT_INITIALIZED: CUresult = Status::NOT_INITIALIZED;
pub const CUDA_ERROR_NOT_SUPPORTED: CUresult = Status::NOT_SUPPORTED;
pub const cudaSuccess: cudaError_t = Status::SUCCESS;
pub const CU_POINTER_ATTRIBUTE_CONTEXT: CUpointer_attribute = PointerAttribute::CONTEXT;
pub const CU_POINTER_ATTRIBUTE_MEMORY_TYPE: CUpointer_attribute = PointerAttribute::MEMORY_TYPE;
pub const CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: CUpointer_attribute = PointerAttribute::DEVICE_ORDINAL;
pub const CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: CUdevice_attribute = CudaAttribute::PCI_BUS;
pub const CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID: CUdevice_attribute = CudaAttribute::PCI_DEVICE;
pub const CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: CUdevice_attribute = CudaAttribute::PCI_DOMAIN;
pub const CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED: CUdevice_attribute = CudaAttribute::DMA_BUF;
pub const CU_MEMORYTYPE_HOST: c_uint = MemoryType::HOST.0;
pub const CU_MEMORYTYPE_DEVICE: c_uint = MemoryType::DEVICE.0;
pub const CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD: RangeHandleType = RangeHandleType::DMA_BUF_FD;
pub const CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: HandleType = HandleType::POSIX_FILE_DESCRIPTOR;
pub const CU_MEM_ALLOCATION_TYPE_PINNED: AllocationType = AllocationType::PINNED;
pub const CU_MEM_LOCATION_TYPE_DEVICE: LocationType = LocationType::DEVICE;
pub const CU_MEM_ALLOC_GRANULARITY_MINIMUM: Granularity = Granularity::MINIMUM;
pub const CU_MEM_ACCESS_FLAGS_PROT_READWRITE: AccessFlags = AccessFlags::READ_WRITE;
pub const cudaMemcpyHostToDevice: cudaMemcpyKind = CopyKind::HOST_TO_DEVICE;
pub const cudaMemcpyDeviceToHost: cudaMemcpyKind = CopyKind::DEVICE_TO_HOST;
pub const cudaMemcpyDeviceToDevice: cudaMemcpyKind = CopyKind::DEVICE_TO_DEVICE;
pub const cudaMemcpyDefault: cudaMemcpyKind = CopyKind::DEFAULT;

fn vendor() -> Option<&'static VendorRuntime> {
    vendor_of(platform::current().ok()?.platform).ok()?
}

macro_rules! runtime_calls {
    ($($cuda:ident = $entry:ident($($name:ident: $type:ty),*);)*) => { $(
        /// # Safety
        /// As CUDA's function of this name.
        pub unsafe fn $cuda($($name: $type),*) -> cudaError_t {
            match vendor() {
                // SAFETY: of the caller.
                Some(vendor) => unsafe { (vendor.runtime.$entry)($($name),*) },
                None => CUDA_ERROR_NOT_INITIALIZED,
            }
        }
    )* };
}

runtime_calls! {
    cudaGetDeviceCount = get_device_count(count: *mut c_int);
    cudaSetDevice = set_device(device: c_int);
    cudaGetDevice = get_device(device: *mut c_int);
    cudaGetLastError = get_last_error();
    cudaDeviceSynchronize = device_synchronize();
    cudaMemGetInfo = mem_get_info(free: *mut usize, total: *mut usize);
    cudaMalloc = malloc(address: *mut *mut c_void, bytes: usize);
    cudaFree = free(address: *mut c_void);
    cudaHostAlloc = host_alloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
    cudaFreeHost = host_free(address: *mut c_void);
    cudaMemcpy = memcpy(to: *mut c_void, from: *const c_void, bytes: usize, kind: cudaMemcpyKind);
    cudaMemcpyAsync =
        memcpy_async(to: *mut c_void, from: *const c_void, bytes: usize, kind: cudaMemcpyKind, stream: cudaStream_t);
    cudaMemsetAsync = memset_async(to: *mut c_void, value: c_int, bytes: usize, stream: cudaStream_t);
    cudaStreamCreateWithFlags = stream_create_with_flags(stream: *mut cudaStream_t, flags: c_uint);
    cudaStreamDestroy = stream_destroy(stream: cudaStream_t);
    cudaStreamSynchronize = stream_synchronize(stream: cudaStream_t);
    cudaStreamQuery = stream_query(stream: cudaStream_t);
    cudaStreamWaitEvent = stream_wait_event(stream: cudaStream_t, event: cudaEvent_t, flags: c_uint);
    cudaEventCreateWithFlags = event_create_with_flags(event: *mut cudaEvent_t, flags: c_uint);
    cudaEventDestroy = event_destroy(event: cudaEvent_t);
    cudaEventRecord = event_record(event: cudaEvent_t, stream: cudaStream_t);
    cudaEventQuery = event_query(event: cudaEvent_t);
    cudaEventSynchronize = event_synchronize(event: cudaEvent_t);
}

/// # Safety
/// As CUDA's function of this name. Null where there is no device.
pub unsafe fn cudaGetErrorString(error: cudaError_t) -> *const c_char {
    // SAFETY: takes a number.
    vendor().map_or(std::ptr::null(), |vendor| unsafe { (vendor.runtime.get_error_string)(error) })
}

macro_rules! driver_calls {
    ($($cuda:ident = $entry:ident($($name:ident: $type:ty),*);)*) => { $(
        /// # Safety
        /// As CUDA's function of this name.
        pub unsafe fn $cuda($($name: $type),*) -> CUresult {
            match vendor().and_then(|vendor| vendor.driver().ok()) {
                // SAFETY: of the caller.
                Some(driver) => unsafe { (driver.$entry)($($name),*) },
                None => CUDA_ERROR_NOT_INITIALIZED,
            }
        }
    )* };
}

driver_calls! {
    cuInit = init(flags: c_uint);
    cuDeviceGet = device_get(device: *mut CUdevice, ordinal: c_int);
    cuMemGetAddressRange = mem_get_address_range(base: *mut CUdeviceptr, bytes: *mut usize, address: CUdeviceptr);
}

macro_rules! optional_calls {
    ($($cuda:ident = $entry:ident($($name:ident: $type:ty),*) $(where $layout:ident)?;)*) => { $(
        /// # Safety
        /// As CUDA's function of this name. [`CUDA_ERROR_NOT_SUPPORTED`] where the library lacks it.
        pub unsafe fn $cuda($($name: $type),*) -> CUresult {
            let Some(vendor) = vendor() else { return CUDA_ERROR_NOT_INITIALIZED };
            $( if !vendor.$layout() { return CUDA_ERROR_NOT_SUPPORTED; } )?
            match vendor.driver().map(|driver| driver.$entry) {
                // SAFETY: of the caller.
                Ok(Some(entry)) => unsafe { entry($($name),*) },
                Ok(None) => CUDA_ERROR_NOT_SUPPORTED,
                Err(_) => CUDA_ERROR_NOT_INITIALIZED,
            }
        }
    )* };
}

optional_calls! {
    cuCtxGetCurrent = context_get_current(context: *mut CUcontext);
    cuMemCreate = mem_create(
        handle: *mut CUmemGenericAllocationHandle, bytes: usize, properties: *const CUmemAllocationProp, flags: c_ulonglong
    ) where has_known_layout;
    cuMemRelease = mem_release(handle: CUmemGenericAllocationHandle);
    cuMemAddressReserve = mem_address_reserve(
        address: *mut CUdeviceptr, bytes: usize, alignment: usize, wanted: CUdeviceptr, flags: c_ulonglong
    );
    cuMemAddressFree = mem_address_free(address: CUdeviceptr, bytes: usize);
    cuMemMap = mem_map(
        address: CUdeviceptr, bytes: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: c_ulonglong
    );
    cuMemUnmap = mem_unmap(address: CUdeviceptr, bytes: usize);
    cuMemSetAccess =
        mem_set_access(address: CUdeviceptr, bytes: usize, access: *const CUmemAccessDesc, count: usize);
    cuMemGetAllocationGranularity = mem_get_allocation_granularity(
        granularity: *mut usize, properties: *const CUmemAllocationProp, option: Granularity
    ) where has_known_layout;
    cuMemExportToShareableHandle = mem_export_to_shareable_handle(
        shareable: *mut c_void, handle: CUmemGenericAllocationHandle, kind: HandleType, flags: c_ulonglong
    );
    cuMemGetHandleForAddressRange = mem_get_handle_for_address_range(
        handle: *mut c_void, address: CUdeviceptr, bytes: usize, kind: RangeHandleType, flags: c_ulonglong
    );
}

/// # Safety
/// As CUDA's function of this name. An attribute that is not declared here is invalid, as HIP's number of it is unknown.
pub unsafe fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: CUdevice_attribute,
    device: CUdevice,
) -> CUresult {
    let Some(vendor) = vendor() else { return CUDA_ERROR_NOT_INITIALIZED };
    let Some(attribute) = Attribute::of_cuda(attribute.0) else { return CUDA_ERROR_INVALID_VALUE };
    match vendor.driver() {
        // SAFETY: of the caller.
        Ok(driver) => unsafe {
            (driver.device_get_attribute)(value, vendor.attribute_number(attribute), device)
        },
        Err(_) => CUDA_ERROR_NOT_INITIALIZED,
    }
}

/// # Safety
/// As CUDA's function of this name.
pub unsafe fn cuPointerGetAttribute(
    value: *mut c_void,
    attribute: CUpointer_attribute,
    address: CUdeviceptr,
) -> CUresult {
    let Some(vendor) = vendor() else { return CUDA_ERROR_NOT_INITIALIZED };
    let entry = match vendor.driver().map(|driver| driver.pointer_get_attribute) {
        Ok(Some(entry)) => entry,
        Ok(None) => return CUDA_ERROR_NOT_SUPPORTED,
        Err(_) => return CUDA_ERROR_NOT_INITIALIZED,
    };
    // SAFETY: of the caller.
    let status = unsafe { entry(value, attribute, address) };
    if status == CUDA_SUCCESS && attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE {
        let kind = value.cast::<c_uint>();
        // SAFETY: this attribute is an unsigned int, which was just written.
        unsafe { *kind = vendor.memory_type(*kind).0 };
    }
    status
}
