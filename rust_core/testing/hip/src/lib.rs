//! A SIMULATED HIP, for tests: the entries that sky-monarch calls, under AMD's names and under CUDA's.
//!
//! Memory of a device cannot be read by the host, as on a real one: its address is mapped without any access, and the
//! double itself uses another mapping of the same pages. Each stream is a thread that takes its time, so that a wait
//! that was forgotten shows. Refused, with "no device", unless a test says so (`SKY_MONARCH_TEST_SIMULATED_GPU=1`).
//!
//! What it can show: declarations, calling convention, states, limits of time, mapping of errors. What it cannot: anything
//! of a real device, its ordering, its speed.
//!
//! Faults, by `SKY_DOUBLE_FAULT`: `hang` (a stream never does its work), `async:CODE` (each copy fails with it, later),
//! `corrupt` (a copy brings other bytes), `death` (the process is killed at its first copy), `pin:BYTES` (there is no
//! pinned memory of just so many). `SKY_DOUBLE_VERSION` is the version it says; below 60000000 it numbers memory as
//! HIP 5 did. `SKY_DOUBLE_DEVICES` is how many it has (2).

#![allow(non_snake_case, clippy::missing_safety_doc, reason = "the names and contracts are HIP's")]

mod memory;
mod stream;

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

pub(crate) const SUCCESS: c_int = 0;
pub(crate) const INVALID_VALUE: c_int = 1;
pub(crate) const OUT_OF_MEMORY: c_int = 2;
const NO_DEVICE: c_int = 100;
const INVALID_DEVICE: c_int = 101;
pub(crate) const INVALID_HANDLE: c_int = 400;
pub(crate) const NOT_READY: c_int = 600;

/// By its presence a library is known as a double.
#[unsafe(no_mangle)]
pub static sky_monarch_simulated: c_int = 1;

thread_local! {
    static LAST_ERROR: Cell<c_int> = const { Cell::new(SUCCESS) };
    static CURRENT: Cell<c_int> = const { Cell::new(0) };
}

pub(crate) struct Settings {
    allowed: bool,
    devices: c_int,
    version: c_int,
    pub(crate) fault: String,
}

pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let number =
            |name, default| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default);
        let allowed = std::env::var_os("SKY_MONARCH_TEST_SIMULATED_GPU").is_some();
        eprintln!(
            "SIMULATED: a software double of HIP{}",
            if allowed { "" } else { ", refused outside tests" }
        );
        Settings {
            allowed,
            devices: number("SKY_DOUBLE_DEVICES", 2),
            version: number("SKY_DOUBLE_VERSION", 70_125_424),
            fault: std::env::var("SKY_DOUBLE_FAULT").unwrap_or_default(),
        }
    })
}

/// The code of `async:CODE`.
pub(crate) fn async_fault() -> Option<c_int> {
    settings().fault.strip_prefix("async:").and_then(|code| code.parse().ok())
}

pub(crate) fn current() -> c_int {
    CURRENT.get()
}

fn exists(device: c_int) -> bool {
    (0..settings().devices).contains(&device)
}

/// Every entry that returns a status goes through here: refused outside tests; an error stays until it is asked for.
pub(crate) fn entered(run: impl FnOnce() -> c_int) -> c_int {
    let status = if settings().allowed { run() } else { NO_DEVICE };
    if status != SUCCESS && status != NOT_READY {
        LAST_ERROR.set(status);
    }
    status
}

/// Declares an entry under HIP's name, and under CUDA's where it is the same. Neither calls the other: a test takes one
/// of them away.
macro_rules! entries {
    ($( $hip:ident [$($cuda:ident)?] $arguments:tt $body:block )*) => { $(
        $crate::entries! { @entry $hip $arguments $body }
        $( $crate::entries! { @entry $cuda $arguments $body } )?
    )* };
    (@entry $hip:ident ($($name:ident: $type:ty),* $(,)?) $body:block) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $hip($($name: $type),*) -> c_int {
            $crate::entered(|| {
                // Of the caller, as for HIP's own function.
                #[allow(unused_unsafe, reason = "not every entry needs it")]
                unsafe { $body }
            })
        }
    };
}
pub(crate) use entries;

entries! {
    hipInit [cuInit] (_flags: c_uint) { SUCCESS }

    hipGetDeviceCount [cudaGetDeviceCount] (count: *mut c_int) {
        *count = settings().devices;
        if settings().devices == 0 { NO_DEVICE } else { SUCCESS }
    }

    hipDriverGetVersion [cudaDriverGetVersion] (version: *mut c_int) {
        *version = settings().version;
        SUCCESS
    }

    hipSetDevice [cudaSetDevice] (device: c_int) {
        if !exists(device) { return INVALID_DEVICE; }
        CURRENT.set(device);
        SUCCESS
    }

    hipGetDevice [cudaGetDevice] (device: *mut c_int) {
        *device = current();
        SUCCESS
    }

    hipDeviceGet [cuDeviceGet] (device: *mut c_int, ordinal: c_int) {
        if !exists(ordinal) { return INVALID_DEVICE; }
        *device = ordinal;
        SUCCESS
    }

    hipDeviceGetAttribute [] (value: *mut c_int, attribute: c_int, device: c_int) {
        attribute_of(value, device, match attribute {
            63 => "multiprocessors", 67 => "bus", 68 | 69 => "zero", 87 => "warp", 89 | 93 => "one", _ => "",
        })
    }

    cudaDeviceGetAttribute [cuDeviceGetAttribute] (value: *mut c_int, attribute: c_int, device: c_int) {
        attribute_of(value, device, match attribute {
            16 => "multiprocessors", 33 => "bus", 34 | 50 => "zero", 10 => "warp", 102 | 124 => "one", _ => "",
        })
    }

    hipDeviceGetPCIBusId [cudaDeviceGetPCIBusId] (text: *mut c_char, room: c_int, device: c_int) {
        if !exists(device) { return INVALID_DEVICE; }
        let address = format!("0000:{:02X}:00.0\0", 5 + 16 * device);
        if (room as usize) < address.len() { return INVALID_VALUE; }
        std::ptr::copy_nonoverlapping(address.as_ptr().cast(), text, address.len());
        SUCCESS
    }

    hipDeviceGetUuid [cuDeviceGetUuid_v2] (uuid: *mut [u8; 16], device: c_int) {
        if !exists(device) { return INVALID_DEVICE; }
        let text = format!("{:016x}", 0xabc0_0000_0000_0000_u64 + device as u64);
        (*uuid).copy_from_slice(text.as_bytes());
        SUCCESS
    }

    hipDeviceSynchronize [cudaDeviceSynchronize] () { stream::drain() }
}

unsafe fn attribute_of(value: *mut c_int, device: c_int, what: &str) -> c_int {
    if !exists(device) {
        return INVALID_DEVICE;
    }
    let found = match what {
        "multiprocessors" => 304,
        "bus" => 5 + 16 * device,
        "warp" => 64,
        "one" => 1,
        "zero" => 0,
        _ => return INVALID_VALUE,
    };
    // Of the caller.
    unsafe { *value = found };
    SUCCESS
}

/// Answers in a library that is refused too: it touches no device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipRuntimeGetVersion(version: *mut c_int) -> c_int {
    unsafe { *version = settings().version };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaRuntimeGetVersion(version: *mut c_int) -> c_int {
    unsafe { hipRuntimeGetVersion(version) }
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGetLastError() -> c_int {
    LAST_ERROR.replace(SUCCESS)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetLastError() -> c_int {
    hipGetLastError()
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorString(status: c_int) -> *const c_char {
    let text: &CStr = match status {
        SUCCESS => c"no error",
        INVALID_VALUE => c"invalid argument",
        OUT_OF_MEMORY => c"out of memory",
        NO_DEVICE => c"no ROCm-capable device is detected",
        INVALID_DEVICE => c"invalid device ordinal",
        INVALID_HANDLE => c"invalid resource handle",
        NOT_READY => c"device not ready",
        700 => c"an illegal memory access was encountered",
        _ => c"unknown error",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorString(status: c_int) -> *const c_char {
    hipGetErrorString(status)
}

/// What this version calls memory of a device and of the host.
pub(crate) fn memory_type(device: bool, cuda: bool) -> c_uint {
    let old = settings().version < 60_000_000 && !cuda;
    c_uint::from(device) + c_uint::from(!old)
}

pub(crate) type Handle = *mut c_void;
