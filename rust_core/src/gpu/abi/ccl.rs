//! RCCL and NCCL: one ABI, of which this declares what both have.

use std::ffi::{c_char, c_int, c_uint};
use std::mem::{offset_of, size_of};
use std::ptr;

use super::open_enum;

open_enum! {
    /// `ncclResult_t`.
    pub struct CclResult(c_int) {
        SUCCESS = 0 ["ncclSuccess"],
        UNHANDLED_DEVICE_ERROR = 1 ["ncclUnhandledCudaError"],
        SYSTEM_ERROR = 2 ["ncclSystemError"],
        INTERNAL_ERROR = 3 ["ncclInternalError"],
        INVALID_ARGUMENT = 4 ["ncclInvalidArgument"],
        INVALID_USAGE = 5 ["ncclInvalidUsage"],
        REMOTE_ERROR = 6 ["ncclRemoteError"],
        IN_PROGRESS = 7 ["ncclInProgress"],
        /// From NCCL 2.30 on; before it, the number of results.
        TIMEOUT = 8 ["ncclTimeout"],
    }
}

open_enum! {
    /// `ncclDataType_t`. gfx942 encodes its eight-bit floats otherwise (FNUZ) than these two say.
    pub struct DataType(c_int) {
        INT8 = 0 ["ncclInt8"],
        UINT8 = 1 ["ncclUint8"],
        INT32 = 2 ["ncclInt32"],
        UINT32 = 3 ["ncclUint32"],
        INT64 = 4 ["ncclInt64"],
        UINT64 = 5 ["ncclUint64"],
        FLOAT16 = 6 ["ncclFloat16"],
        FLOAT32 = 7 ["ncclFloat32"],
        FLOAT64 = 8 ["ncclFloat64"],
        BFLOAT16 = 9 ["ncclBfloat16"],
        FLOAT8_E4M3 = 10 ["ncclFloat8e4m3"],
        FLOAT8_E5M2 = 11 ["ncclFloat8e5m2"],
    }
}

open_enum! {
    /// `ncclRedOp_t`.
    pub struct ReduceOp(c_int) {
        SUM = 0 ["ncclSum"],
        PROD = 1 ["ncclProd"],
        MAX = 2 ["ncclMax"],
        MIN = 3 ["ncclMin"],
        AVG = 4 ["ncclAvg"],
    }
}

/// What a communicator handle points to.
#[repr(C)]
pub struct CommunicatorObject {
    _private: [u8; 0],
}
/// `ncclComm_t`.
pub type CommunicatorHandle = *mut CommunicatorObject;

/// `ncclUniqueId`, passed *by value*.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId {
    /// Opaque.
    pub internal: [u8; 128],
}

/// `ncclConfig_t` as of 2.17. The library reads `size` and `version` and takes its own defaults for fields added since (96
/// bytes in RCCL 2.30, more in NCCL 2.32), which are only ever appended. Of the one of 2.14, the first, it is the beginning.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    /// 0: calls return [`CclResult::IN_PROGRESS`] instead of waiting.
    pub blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    /// Network plugin; null for the library's choice.
    pub net_name: *const c_char,
    /// Whether splits share the parent's resources.
    pub split_share: c_int,
}

impl Config {
    const UNDEFINED: c_int = c_int::MIN;
    /// As it was from 2.14 to 2.16: up to `blocking`, and padding.
    const FIRST_SIZE: usize = 24;
    const GREW_IN: c_int = 21_700;

    /// Everything as a library of that version would have it, but that no call waits.
    pub const fn non_blocking(version: c_int) -> Self {
        let is_first = version < Self::GREW_IN;
        Self {
            size: if is_first { Self::FIRST_SIZE } else { size_of::<Self>() },
            magic: 0xcafe_beef,
            version: if is_first { 21_400 } else { 21_700 },
            blocking: 0,
            cga_cluster_size: Self::UNDEFINED,
            min_ctas: Self::UNDEFINED,
            max_ctas: Self::UNDEFINED,
            net_name: ptr::null(),
            split_share: Self::UNDEFINED,
        }
    }
}

const _: () = {
    assert!(size_of::<UniqueId>() == 128 && size_of::<Config>() == 48);
    assert!(offset_of!(Config, version) == 12 && offset_of!(Config, blocking) == 16);
    assert!(offset_of!(Config, cga_cluster_size) == 20 && Config::FIRST_SIZE == 24);
    assert!(offset_of!(Config, net_name) == 32 && offset_of!(Config, split_share) == 40);
};
