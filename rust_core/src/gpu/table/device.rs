//! Runtime and driver-style entries of HIP and CUDA: one table each, under neutral names, filled from either vendor.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::gpu::abi::device::{
    AllocationHandle, ContextHandle, CopyKind, Device, DevicePointer, EventHandle, Granularity, HandleType,
    IpcMemHandle, MemAccessDesc, MemAllocationProp, PointerAttribute, RangeHandleType, Status, StreamHandle,
    Uuid,
};
use crate::gpu::library::Names;

/// Position of HIP in these tables.
pub const HIP: usize = 0;
/// Position of CUDA in these tables.
pub const CUDA: usize = 1;

/// HIP: runtime and driver-style entries lie in one library.
pub const HIP_LIBRARY: Names = Names {
    purpose: "HIP",
    stem: "libamdhip64",
    sonames: &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"],
    override_env: "SKY_MONARCH_HIP_LIB",
    home_envs: &["ROCM_PATH", "ROCM_HOME"],
};

/// CUDA's runtime.
pub const CUDART_LIBRARY: Names = Names {
    purpose: "CUDA runtime",
    stem: "libcudart",
    sonames: &["libcudart.so.13", "libcudart.so.12"],
    override_env: "SKY_MONARCH_CUDART_LIB",
    home_envs: &["CUDA_HOME", "CUDA_PATH"],
};

/// CUDA's driver.
pub const CUDA_LIBRARY: Names = Names {
    purpose: "CUDA driver",
    stem: "libcuda",
    sonames: &["libcuda.so.1"],
    override_env: "SKY_MONARCH_CUDA_LIB",
    home_envs: &[],
};

vendor_table! {
    /// The runtime's entries.
    pub struct RuntimeTable {
        required {
            get_device_count ["hipGetDeviceCount", "cudaGetDeviceCount"]: fn(*mut c_int) -> Status;
            driver_get_version ["hipDriverGetVersion", "cudaDriverGetVersion"]: fn(*mut c_int) -> Status;
            runtime_get_version ["hipRuntimeGetVersion", "cudaRuntimeGetVersion"]: fn(*mut c_int) -> Status;
            set_device ["hipSetDevice", "cudaSetDevice"]: fn(c_int) -> Status;
            get_device ["hipGetDevice", "cudaGetDevice"]: fn(*mut c_int) -> Status;
            get_last_error ["hipGetLastError", "cudaGetLastError"]: fn() -> Status;
            get_error_string ["hipGetErrorString", "cudaGetErrorString"]: fn(Status) -> *const c_char;
            device_synchronize ["hipDeviceSynchronize", "cudaDeviceSynchronize"]: fn() -> Status;
            device_get_attribute ["hipDeviceGetAttribute", "cudaDeviceGetAttribute"]:
                fn(*mut c_int, c_int, c_int) -> Status;
            device_get_pci_bus_id ["hipDeviceGetPCIBusId", "cudaDeviceGetPCIBusId"]:
                fn(*mut c_char, c_int, c_int) -> Status;
            mem_get_info ["hipMemGetInfo", "cudaMemGetInfo"]: fn(*mut usize, *mut usize) -> Status;
            malloc ["hipMalloc", "cudaMalloc"]: fn(*mut *mut c_void, usize) -> Status;
            free ["hipFree", "cudaFree"]: fn(*mut c_void) -> Status;
            host_alloc ["hipHostMalloc", "cudaHostAlloc"]: fn(*mut *mut c_void, usize, c_uint) -> Status;
            host_free ["hipHostFree", "cudaFreeHost"]: fn(*mut c_void) -> Status;
            memcpy ["hipMemcpy", "cudaMemcpy"]: fn(*mut c_void, *const c_void, usize, CopyKind) -> Status;
            memcpy_async ["hipMemcpyAsync", "cudaMemcpyAsync"]:
                fn(*mut c_void, *const c_void, usize, CopyKind, StreamHandle) -> Status;
            memset_async ["hipMemsetAsync", "cudaMemsetAsync"]: fn(*mut c_void, c_int, usize, StreamHandle) -> Status;
            stream_create_with_flags ["hipStreamCreateWithFlags", "cudaStreamCreateWithFlags"]:
                fn(*mut StreamHandle, c_uint) -> Status;
            stream_destroy ["hipStreamDestroy", "cudaStreamDestroy"]: fn(StreamHandle) -> Status;
            stream_synchronize ["hipStreamSynchronize", "cudaStreamSynchronize"]: fn(StreamHandle) -> Status;
            stream_query ["hipStreamQuery", "cudaStreamQuery"]: fn(StreamHandle) -> Status;
            stream_wait_event ["hipStreamWaitEvent", "cudaStreamWaitEvent"]:
                fn(StreamHandle, EventHandle, c_uint) -> Status;
            event_create_with_flags ["hipEventCreateWithFlags", "cudaEventCreateWithFlags"]:
                fn(*mut EventHandle, c_uint) -> Status;
            event_destroy ["hipEventDestroy", "cudaEventDestroy"]: fn(EventHandle) -> Status;
            event_record ["hipEventRecord", "cudaEventRecord"]: fn(EventHandle, StreamHandle) -> Status;
            event_query ["hipEventQuery", "cudaEventQuery"]: fn(EventHandle) -> Status;
            event_synchronize ["hipEventSynchronize", "cudaEventSynchronize"]: fn(EventHandle) -> Status;
            event_elapsed_time ["hipEventElapsedTime", "cudaEventElapsedTime"]:
                fn(*mut f32, EventHandle, EventHandle) -> Status;
        }
        optional {
            ipc_get_mem_handle ["hipIpcGetMemHandle", "cudaIpcGetMemHandle"]:
                fn(*mut IpcMemHandle, *mut c_void) -> Status;
            ipc_open_mem_handle ["hipIpcOpenMemHandle", "cudaIpcOpenMemHandle"]:
                fn(*mut *mut c_void, IpcMemHandle, c_uint) -> Status;
            ipc_close_mem_handle ["hipIpcCloseMemHandle", "cudaIpcCloseMemHandle"]: fn(*mut c_void) -> Status;
        }
    }
}

vendor_table! {
    /// The driver-style entries.
    pub struct DriverTable {
        required {
            init ["hipInit", "cuInit"]: fn(c_uint) -> Status;
            device_get ["hipDeviceGet", "cuDeviceGet"]: fn(*mut Device, c_int) -> Status;
            device_get_attribute ["hipDeviceGetAttribute", "cuDeviceGetAttribute"]:
                fn(*mut c_int, c_int, Device) -> Status;
            mem_get_address_range ["hipMemGetAddressRange", "cuMemGetAddressRange_v2"]:
                fn(*mut DevicePointer, *mut usize, DevicePointer) -> Status;
        }
        optional {
            device_get_uuid ["hipDeviceGetUuid", "cuDeviceGetUuid_v2"]: fn(*mut Uuid, Device) -> Status;
            primary_context_state ["hipDevicePrimaryCtxGetState", "cuDevicePrimaryCtxGetState"]:
                fn(Device, *mut c_uint, *mut c_int) -> Status;
            context_get_current ["hipCtxGetCurrent", "cuCtxGetCurrent"]: fn(*mut ContextHandle) -> Status;
            pointer_get_attribute ["hipPointerGetAttribute", "cuPointerGetAttribute"]:
                fn(*mut c_void, PointerAttribute, DevicePointer) -> Status;
            mem_create ["hipMemCreate", "cuMemCreate"]:
                fn(*mut AllocationHandle, usize, *const MemAllocationProp, u64) -> Status;
            mem_release ["hipMemRelease", "cuMemRelease"]: fn(AllocationHandle) -> Status;
            mem_address_reserve ["hipMemAddressReserve", "cuMemAddressReserve"]:
                fn(*mut DevicePointer, usize, usize, DevicePointer, u64) -> Status;
            mem_address_free ["hipMemAddressFree", "cuMemAddressFree"]: fn(DevicePointer, usize) -> Status;
            mem_map ["hipMemMap", "cuMemMap"]: fn(DevicePointer, usize, usize, AllocationHandle, u64) -> Status;
            mem_unmap ["hipMemUnmap", "cuMemUnmap"]: fn(DevicePointer, usize) -> Status;
            mem_set_access ["hipMemSetAccess", "cuMemSetAccess"]:
                fn(DevicePointer, usize, *const MemAccessDesc, usize) -> Status;
            mem_get_allocation_granularity ["hipMemGetAllocationGranularity", "cuMemGetAllocationGranularity"]:
                fn(*mut usize, *const MemAllocationProp, Granularity) -> Status;
            mem_export_to_shareable_handle ["hipMemExportToShareableHandle", "cuMemExportToShareableHandle"]:
                fn(*mut c_void, AllocationHandle, HandleType, u64) -> Status;
            mem_get_handle_for_address_range ["hipMemGetHandleForAddressRange", "cuMemGetHandleForAddressRange"]:
                fn(*mut c_void, DevicePointer, usize, RangeHandleType, u64) -> Status;
        }
    }
}

impl DriverTable {
    /// Whether every entry of virtual memory management is there.
    pub const fn has_virtual_memory(&self) -> bool {
        self.mem_create.is_some()
            && self.mem_release.is_some()
            && self.mem_address_reserve.is_some()
            && self.mem_address_free.is_some()
            && self.mem_map.is_some()
            && self.mem_unmap.is_some()
            && self.mem_set_access.is_some()
            && self.mem_get_allocation_granularity.is_some()
            && self.mem_export_to_shareable_handle.is_some()
    }
}
