//! Memory of devices, and of the host as far as HIP gave it out.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Mutex;

use crate::{
    INVALID_HANDLE, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS, current, entries, memory_type, settings, stream,
};

/// All of one device.
const DEVICE_BYTES: usize = 1 << 30;
const GRANULARITY: usize = 2 << 20;

/// One allocation of a device: the same pages without access at the address that was handed out, and with it at `alias`.
struct Allocation {
    bytes: usize,
    device: c_int,
    alias: usize,
    file: OwnedFd,
}

static ALLOCATIONS: Mutex<BTreeMap<usize, Allocation>> = Mutex::new(BTreeMap::new());
static PINNED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());
/// Made by `hipMemCreate`, by handle: file, bytes, device.
static CREATED: Mutex<BTreeMap<u64, (OwnedFd, usize, c_int)>> = Mutex::new(BTreeMap::new());

fn map(bytes: usize, protection: c_int, flags: c_int, fd: c_int, at: usize) -> Option<usize> {
    // SAFETY: a new mapping, or one over addresses that were reserved for it.
    let address = unsafe { libc::mmap(at as *mut c_void, bytes, protection, flags, fd, 0) };
    (address != libc::MAP_FAILED).then_some(address as usize)
}

fn file_of(bytes: usize) -> Option<OwnedFd> {
    // SAFETY: makes a file of memory that only this process has.
    let fd = unsafe { libc::memfd_create(c"simulated-device".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return None;
    }
    // SAFETY: just made, and given to nobody else.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: sets the size of our own file.
    (unsafe { libc::ftruncate(fd, bytes as libc::off_t) } == 0).then_some(file)
}

fn used(device: c_int) -> usize {
    let allocations = ALLOCATIONS.lock().unwrap();
    allocations.values().filter(|one| one.device == device).map(|one| one.bytes).sum()
}

/// Put the pages of a file at an address without access, or anywhere where `at` is 0.
fn place(file: OwnedFd, bytes: usize, device: c_int, at: usize) -> Result<usize, c_int> {
    const BOTH: c_int = libc::PROT_READ | libc::PROT_WRITE;
    let fixed = if at == 0 { 0 } else { libc::MAP_FIXED };
    let fd = file.as_raw_fd();
    let address = map(bytes, libc::PROT_NONE, libc::MAP_SHARED | fixed, fd, at).ok_or(OUT_OF_MEMORY)?;
    let alias = map(bytes, BOTH, libc::MAP_SHARED, fd, 0).ok_or(OUT_OF_MEMORY)?;
    ALLOCATIONS.lock().unwrap().insert(address, Allocation { bytes, device, alias, file });
    Ok(address)
}

fn unplace(address: usize) -> Option<Allocation> {
    let gone = ALLOCATIONS.lock().unwrap().remove(&address)?;
    // SAFETY: mapped by `place`, and known to nobody any more.
    unsafe { libc::munmap(gone.alias as *mut c_void, gone.bytes) };
    Some(gone)
}

/// Where the double itself reads and writes what is at an address; `None` for a range that leaves its allocation.
pub(crate) fn reach(address: usize, bytes: usize) -> Option<usize> {
    let allocations = ALLOCATIONS.lock().unwrap();
    match allocations.range(..=address).next_back() {
        Some((start, one)) if address < start + one.bytes => {
            (address + bytes <= start + one.bytes).then(|| one.alias + (address - start))
        }
        _ => Some(address),
    }
}

/// The same for the double of RCCL: its work runs on a stream of this double. Null for a range that leaves its allocation.
#[unsafe(no_mangle)]
pub extern "C" fn sky_double_reach(address: *mut c_void, bytes: usize) -> *mut c_void {
    reach(address as usize, bytes).map_or(std::ptr::null_mut(), |at| at as *mut c_void)
}

/// The device of an address, and its allocation.
fn owner(address: usize) -> Option<(c_int, usize, usize)> {
    let allocations = ALLOCATIONS.lock().unwrap();
    let (start, one) = allocations.range(..=address).next_back()?;
    (address < start + one.bytes).then_some((one.device, *start, one.bytes))
}

fn is_pinned(address: usize) -> bool {
    let pinned = PINNED.lock().unwrap();
    pinned.range(..=address).next_back().is_some_and(|(start, bytes)| address < start + bytes)
}

unsafe fn pointer_attribute(out: *mut c_void, attribute: c_int, address: u64, cuda: bool) -> c_int {
    let device = owner(address as usize).map(|(device, ..)| device);
    if device.is_none() && !is_pinned(address as usize) {
        return INVALID_VALUE;
    }
    match attribute {
        2 => unsafe { *out.cast::<c_uint>() = memory_type(device.is_some(), cuda) },
        9 => unsafe { *out.cast::<c_int>() = device.unwrap_or(0) },
        _ => return INVALID_VALUE,
    }
    SUCCESS
}

fn duplicate(fd: &OwnedFd, out: *mut c_void) -> c_int {
    let Ok(copy) = fd.try_clone() else { return OUT_OF_MEMORY };
    // SAFETY: the caller gives room for a descriptor.
    unsafe { *out.cast::<c_int>() = std::os::fd::IntoRawFd::into_raw_fd(copy) };
    SUCCESS
}

entries! {
    hipMalloc [cudaMalloc] (address: *mut *mut c_void, bytes: usize) {
        if bytes == 0 { return INVALID_VALUE; }
        let room = bytes.next_multiple_of(4096);
        if used(current()) + room > DEVICE_BYTES { return OUT_OF_MEMORY; }
        let Some(file) = file_of(room) else { return OUT_OF_MEMORY };
        match place(file, room, current(), 0) {
            Ok(at) => { *address = at as *mut c_void; SUCCESS }
            Err(status) => status,
        }
    }

    hipFree [cudaFree] (address: *mut c_void) {
        if address.is_null() { return SUCCESS; }
        // As on a device: what is under way is waited for.
        let status = stream::drain();
        match unplace(address as usize) {
            Some(gone) => { libc::munmap(address, gone.bytes); status }
            None => INVALID_VALUE,
        }
    }

    hipHostMalloc [cudaHostAlloc] (address: *mut *mut c_void, bytes: usize, _flags: c_uint) {
        if settings().fault == format!("pin:{bytes}") { return OUT_OF_MEMORY; }
        let both = libc::PROT_READ | libc::PROT_WRITE;
        let Some(at) = map(bytes, both, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) else { return OUT_OF_MEMORY };
        PINNED.lock().unwrap().insert(at, bytes);
        *address = at as *mut c_void;
        SUCCESS
    }

    hipHostFree [cudaFreeHost] (address: *mut c_void) {
        let status = stream::drain();
        match PINNED.lock().unwrap().remove(&(address as usize)) {
            Some(bytes) => { libc::munmap(address, bytes); status }
            None => INVALID_VALUE,
        }
    }

    hipMemGetInfo [cudaMemGetInfo] (free: *mut usize, total: *mut usize) {
        *free = DEVICE_BYTES - used(current());
        *total = DEVICE_BYTES;
        SUCCESS
    }

    hipMemGetAddressRange [cuMemGetAddressRange_v2] (base: *mut u64, bytes: *mut usize, address: u64) {
        let Some((_, start, room)) = owner(address as usize) else { return 500 };
        *base = start as u64;
        *bytes = room;
        SUCCESS
    }

    hipPointerGetAttribute [] (out: *mut c_void, attribute: c_int, address: u64) {
        pointer_attribute(out, attribute, address, false)
    }

    cuPointerGetAttribute [] (out: *mut c_void, attribute: c_int, address: u64) {
        pointer_attribute(out, attribute, address, true)
    }

    hipMemGetAllocationGranularity [cuMemGetAllocationGranularity] (
        granularity: *mut usize, _properties: *const c_int, _option: c_int,
    ) {
        *granularity = GRANULARITY;
        SUCCESS
    }

    hipMemCreate [cuMemCreate] (handle: *mut u64, bytes: usize, properties: *const c_int, _flags: u64) {
        // Type, handle type, kind of place, device: as HIP 7 and CUDA lay them out.
        let (kind, exported, place, device) =
            (*properties, *properties.add(1), *properties.add(2), *properties.add(3));
        if kind != 1 || exported != 1 || place != 1 || !bytes.is_multiple_of(GRANULARITY) { return INVALID_VALUE; }
        let Some(file) = file_of(bytes) else { return OUT_OF_MEMORY };
        let mut created = CREATED.lock().unwrap();
        *handle = created.keys().next_back().map_or(1, |last| last + 1);
        created.insert(*handle, (file, bytes, device));
        SUCCESS
    }

    hipMemRelease [cuMemRelease] (handle: u64) {
        if CREATED.lock().unwrap().remove(&handle).is_some() { SUCCESS } else { INVALID_HANDLE }
    }

    hipMemAddressReserve [cuMemAddressReserve] (address: *mut u64, bytes: usize, _alignment: usize, _at: u64, _flags: u64) {
        match map(bytes, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) {
            Some(at) => { *address = at as u64; SUCCESS }
            None => OUT_OF_MEMORY,
        }
    }

    hipMemAddressFree [cuMemAddressFree] (address: u64, bytes: usize) {
        if owner(address as usize).is_some() { return INVALID_VALUE; }
        libc::munmap(address as *mut c_void, bytes);
        SUCCESS
    }

    hipMemMap [cuMemMap] (address: u64, bytes: usize, _offset: usize, handle: u64, _flags: u64) {
        let created = CREATED.lock().unwrap();
        let Some((file, room, device)) = created.get(&handle) else { return INVALID_HANDLE };
        let Ok(file) = file.try_clone() else { return OUT_OF_MEMORY };
        if bytes != *room { return INVALID_VALUE; }
        place(file, bytes, *device, address as usize).map_or_else(|status| status, |_| SUCCESS)
    }

    hipMemUnmap [cuMemUnmap] (address: u64, _bytes: usize) {
        let status = stream::drain();
        if unplace(address as usize).is_some() { status } else { INVALID_VALUE }
    }

    hipMemSetAccess [cuMemSetAccess] (address: u64, _bytes: usize, access: *const c_int, _count: usize) {
        if owner(address as usize).is_none() || *access.add(2) != 3 { return INVALID_VALUE; }
        SUCCESS
    }

    hipMemExportToShareableHandle [cuMemExportToShareableHandle] (out: *mut c_void, handle: u64, kind: c_int, _flags: u64) {
        match CREATED.lock().unwrap().get(&handle) {
            Some((file, ..)) if kind == 1 => duplicate(file, out),
            _ => INVALID_HANDLE,
        }
    }

    hipMemGetHandleForAddressRange [cuMemGetHandleForAddressRange] (
        out: *mut c_void, address: u64, bytes: usize, kind: c_int, _flags: u64,
    ) {
        let allocations = ALLOCATIONS.lock().unwrap();
        match allocations.get(&(address as usize)) {
            Some(one) if kind == 1 && bytes <= one.bytes => duplicate(&one.file, out),
            _ => INVALID_VALUE,
        }
    }
}
