//! Entries of RCCL and NCCL, which export the same names.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use crate::gpu::Platform;
use crate::gpu::abi::ccl::{CclResult, CommunicatorHandle, Config, DataType, ReduceOp, UniqueId};
use crate::gpu::abi::device::StreamHandle;
use crate::gpu::error::{GpuError, GpuResult};
use crate::gpu::library::{Library, Names};

/// AMD's.
pub const RCCL_LIBRARY: Names = Names {
    purpose: "RCCL",
    stem: "librccl",
    sonames: &["librccl.so.1", "librccl.so"],
    override_env: "SKY_MONARCH_RCCL_LIB",
    home_envs: &["ROCM_PATH", "ROCM_HOME"],
};

/// NVIDIA's.
pub const NCCL_LIBRARY: Names = Names {
    purpose: "NCCL",
    stem: "libnccl",
    sonames: &["libnccl.so.2"],
    override_env: "SKY_MONARCH_NCCL_LIB",
    home_envs: &["CUDA_HOME", "CUDA_PATH"],
};

vendor_table! {
    /// RCCL or NCCL.
    pub struct CclTable {
        required {
            get_version ["ncclGetVersion"]: fn(*mut c_int) -> CclResult;
            get_unique_id ["ncclGetUniqueId"]: fn(*mut UniqueId) -> CclResult;
            get_error_string ["ncclGetErrorString"]: fn(CclResult) -> *const c_char;
            comm_init_rank_config ["ncclCommInitRankConfig"]:
                fn(*mut CommunicatorHandle, c_int, UniqueId, c_int, *mut Config) -> CclResult;
            comm_finalize ["ncclCommFinalize"]: fn(CommunicatorHandle) -> CclResult;
            comm_destroy ["ncclCommDestroy"]: fn(CommunicatorHandle) -> CclResult;
            comm_abort ["ncclCommAbort"]: fn(CommunicatorHandle) -> CclResult;
            comm_get_async_error ["ncclCommGetAsyncError"]: fn(CommunicatorHandle, *mut CclResult) -> CclResult;
            comm_count ["ncclCommCount"]: fn(CommunicatorHandle, *mut c_int) -> CclResult;
            comm_device ["ncclCommCuDevice"]: fn(CommunicatorHandle, *mut c_int) -> CclResult;
            comm_user_rank ["ncclCommUserRank"]: fn(CommunicatorHandle, *mut c_int) -> CclResult;
            all_reduce ["ncclAllReduce"]:
                fn(*const c_void, *mut c_void, usize, DataType, ReduceOp, CommunicatorHandle, StreamHandle) -> CclResult;
            broadcast ["ncclBroadcast"]:
                fn(*const c_void, *mut c_void, usize, DataType, c_int, CommunicatorHandle, StreamHandle) -> CclResult;
            reduce ["ncclReduce"]:
                fn(
                    *const c_void, *mut c_void, usize, DataType, ReduceOp, c_int, CommunicatorHandle, StreamHandle,
                ) -> CclResult;
            all_gather ["ncclAllGather"]:
                fn(*const c_void, *mut c_void, usize, DataType, CommunicatorHandle, StreamHandle) -> CclResult;
            reduce_scatter ["ncclReduceScatter"]:
                fn(*const c_void, *mut c_void, usize, DataType, ReduceOp, CommunicatorHandle, StreamHandle) -> CclResult;
            send ["ncclSend"]:
                fn(*const c_void, usize, DataType, c_int, CommunicatorHandle, StreamHandle) -> CclResult;
            recv ["ncclRecv"]:
                fn(*mut c_void, usize, DataType, c_int, CommunicatorHandle, StreamHandle) -> CclResult;
            group_start ["ncclGroupStart"]: fn() -> CclResult;
            group_end ["ncclGroupEnd"]: fn() -> CclResult;
        }
        optional {
            get_last_error ["ncclGetLastError"]: fn(CommunicatorHandle) -> *const c_char;
            comm_split ["ncclCommSplit"]:
                fn(CommunicatorHandle, c_int, c_int, *mut CommunicatorHandle, *mut Config) -> CclResult;
            comm_shrink ["ncclCommShrink"]:
                fn(CommunicatorHandle, *mut c_int, c_int, *mut CommunicatorHandle, *mut Config, c_int) -> CclResult;
            comm_revoke ["ncclCommRevoke"]: fn(CommunicatorHandle, c_int) -> CclResult;
            comm_get_unique_id ["ncclCommGetUniqueId"]: fn(CommunicatorHandle, *mut UniqueId) -> CclResult;
            comm_grow ["ncclCommGrow"]:
                fn(
                    CommunicatorHandle, c_int, *const UniqueId, c_int, *mut CommunicatorHandle, *mut Config,
                ) -> CclResult;
            comm_suspend ["ncclCommSuspend"]: fn(CommunicatorHandle, c_int) -> CclResult;
            comm_resume ["ncclCommResume"]: fn(CommunicatorHandle) -> CclResult;
            comm_init_rank_scalable ["ncclCommInitRankScalable"]:
                fn(*mut CommunicatorHandle, c_int, c_int, c_int, *mut UniqueId, *mut Config) -> CclResult;
            comm_register ["ncclCommRegister"]:
                fn(CommunicatorHandle, *mut c_void, usize, *mut *mut c_void) -> CclResult;
            comm_deregister ["ncclCommDeregister"]: fn(CommunicatorHandle, *mut c_void) -> CclResult;
            comm_window_register ["ncclCommWindowRegister"]:
                fn(CommunicatorHandle, *mut c_void, usize, *mut *mut c_void, c_int) -> CclResult;
            mem_alloc ["ncclMemAlloc"]: fn(*mut *mut c_void, usize) -> CclResult;
            mem_free ["ncclMemFree"]: fn(*mut c_void) -> CclResult;
        }
    }
}

/// What a copy of the library can do, by the entries that it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CclCapabilities {
    /// Split a communicator.
    pub split: bool,
    /// Go on without the ranks that died.
    pub shrink: bool,
    /// End what is under way, without ending the communicator.
    pub revoke: bool,
    /// Take ranks in.
    pub grow: bool,
    /// Give memory back for a while.
    pub suspend: bool,
    /// Several unique ids at start.
    pub scalable_init: bool,
    /// Symmetric memory windows.
    pub window: bool,
}

/// RCCL or NCCL, open.
pub struct Ccl {
    /// The entries.
    pub table: CclTable,
    /// The library.
    pub library: Library,
    /// As `ncclGetVersion` says it: 23004 is 2.30.4.
    pub version: c_int,
}

impl Ccl {
    /// The library of a platform, opened when it is first asked for; what went wrong then stays.
    ///
    /// # Errors
    /// Where it cannot be opened, lacks an entry, or is not of major version 2.
    pub fn of(platform: Platform) -> Result<&'static Self, &'static GpuError> {
        static RCCL: OnceLock<GpuResult<Ccl>> = OnceLock::new();
        static NCCL: OnceLock<GpuResult<Ccl>> = OnceLock::new();
        static NONE: OnceLock<GpuResult<Ccl>> = OnceLock::new();
        let (cell, names) = match platform {
            Platform::Rocm => (&RCCL, Some(&RCCL_LIBRARY)),
            Platform::Cuda => (&NCCL, Some(&NCCL_LIBRARY)),
            Platform::Host => (&NONE, None),
        };
        cell.get_or_init(|| match names {
            Some(names) => Self::open(names),
            None => Err(GpuError::Unsupported {
                what: "a device communicator",
                why: "this host has no accelerators".into(),
            }),
        })
        .as_ref()
    }

    fn open(names: &Names) -> GpuResult<Self> {
        let library = Library::open(names)?;
        let table = CclTable::load(&library, 0).map_err(|error| match error {
            GpuError::MissingSymbol { path, symbol, .. } => {
                GpuError::MissingSymbol { path, symbol, version: said_version(&library) }
            }
            other => other,
        })?;
        let mut version = 0;
        // SAFETY: writes one int.
        let result = unsafe { (table.get_version)(&mut version) };
        let (major, ..) = version_parts(version);
        if result != CclResult::SUCCESS || major != 2 {
            return Err(GpuError::Unsupported {
                what: names.purpose,
                why: format!(
                    "{} says version {version} ({result:?}), and 2.x is needed",
                    library.path().display()
                ),
            });
        }
        Ok(Self { table, library, version })
    }

    /// What it can do.
    pub const fn capabilities(&self) -> CclCapabilities {
        CclCapabilities {
            split: self.table.comm_split.is_some(),
            shrink: self.table.comm_shrink.is_some(),
            revoke: self.table.comm_revoke.is_some(),
            grow: self.table.comm_grow.is_some() && self.table.comm_get_unique_id.is_some(),
            suspend: self.table.comm_suspend.is_some() && self.table.comm_resume.is_some(),
            scalable_init: self.table.comm_init_rank_scalable.is_some(),
            window: self.table.comm_window_register.is_some(),
        }
    }

    /// Its version for people, such as `2.30.4`.
    pub fn version_text(&self) -> String {
        version_text(self.version)
    }

    /// What the library says of a result.
    pub fn text_of(&self, result: CclResult) -> String {
        // SAFETY: takes a number and gives a string of the library, or null.
        let text = unsafe { (self.table.get_error_string)(result) };
        if text.is_null() {
            return "unknown result".into();
        }
        // SAFETY: a C string that lives as long as the library.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// Major, minor and patch: 2.9 and later count a minor version by hundreds, older ones by tens.
const fn version_parts(version: c_int) -> (c_int, c_int, c_int) {
    let unit = if version < 10_000 { 1000 } else { 10_000 };
    (version / unit, version % unit / 100, version % 100)
}

fn version_text(version: c_int) -> String {
    let (major, minor, patch) = version_parts(version);
    format!("{major}.{minor}.{patch}")
}

/// The version of a library whose table could not be loaded, for the message about it.
fn said_version(library: &Library) -> Option<String> {
    let address = library.symbol("ncclGetVersion")?;
    // SAFETY: the declaration is the vendors' for this symbol.
    let get_version =
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int) -> CclResult>(address) };
    let mut version = 0;
    // SAFETY: writes one int.
    (unsafe { get_version(&mut version) } == CclResult::SUCCESS).then(|| version_text(version))
}
