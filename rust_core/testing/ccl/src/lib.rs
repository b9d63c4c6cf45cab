//! A SIMULATED RCCL, for tests: communicators of real processes, over sockets of this machine, on streams of the double
//! of HIP (`SKY_MONARCH_HIP_LIB`). Refused unless `SKY_MONARCH_TEST_SIMULATED_GPU` is set.
//!
//! Start is always as with `blocking = 0`: [`IN_PROGRESS`] until every rank has come. When a peer is gone the communicator
//! has an asynchronous error, and what is on the stream stays there until it is aborted, as with RCCL.
//!
//! Faults, by `SKY_DOUBLE_CCL_FAULT`: `hang` (no collective ends before an abort), `abort-hang` (that, and an abort never
//! ends either), `async:CODE` (each collective fails with it), `death` (the process is killed at its first collective),
//! `late` (each call is in progress for a while). `SKY_DOUBLE_CCL_VERSION` is the version it says; before 21700
//! a configuration of later ones is refused.

#![allow(non_snake_case, clippy::missing_safety_doc, reason = "the names and contracts are RCCL's")]

mod mesh;
mod reduce;

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use mesh::Mesh;

const SUCCESS: c_int = 0;
const SYSTEM_ERROR: c_int = 2;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;

/// By its presence a library is known as a double.
#[unsafe(no_mangle)]
pub static sky_monarch_simulated: c_int = 1;

/// `ncclUniqueId`: the name under which the ranks find each other.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; 128]);

/// A communicator, shared with the work on its streams.
pub struct Communicator {
    rank: usize,
    ranks: usize,
    state: AtomicI32,
    aborted: Arc<AtomicBool>,
    mesh: Mutex<Option<Mesh>>,
}

type Handle = *mut Arc<Communicator>;
type Stream = *mut c_void;

/// Made by `ncclCommInitRankConfig`, and alive: of the caller.
unsafe fn of<'a>(handle: Handle) -> &'a Arc<Communicator> {
    unsafe { &*handle }
}

fn fault() -> &'static str {
    static FAULT: OnceLock<String> = OnceLock::new();
    FAULT.get_or_init(|| std::env::var("SKY_DOUBLE_CCL_FAULT").unwrap_or_default())
}

fn allowed() -> bool {
    static ALLOWED: OnceLock<bool> = OnceLock::new();
    *ALLOWED.get_or_init(|| {
        let allowed = std::env::var_os("SKY_MONARCH_TEST_SIMULATED_GPU").is_some();
        eprintln!(
            "SIMULATED: a software double of RCCL{}",
            if allowed { "" } else { ", refused outside tests" }
        );
        allowed
    })
}

/// What is called of the double of HIP.
struct Hip {
    launch: unsafe extern "C" fn(Stream, unsafe extern "C" fn(*mut c_void), *mut c_void) -> c_int,
    reach: unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void,
    get_device: unsafe extern "C" fn(*mut c_int) -> c_int,
}

fn hip() -> Option<&'static Hip> {
    static HIP: OnceLock<Option<Hip>> = OnceLock::new();
    HIP.get_or_init(|| {
        let path = std::ffi::CString::new(std::env::var("SKY_MONARCH_HIP_LIB").ok()?).ok()?;
        // SAFETY: the double, which the process has loaded already.
        unsafe {
            let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
            let [launch, reach, get_device] = [c"hipLaunchHostFunc", c"sky_double_reach", c"hipGetDevice"]
                .map(|name| {
                    if library.is_null() { std::ptr::null_mut() } else { libc::dlsym(library, name.as_ptr()) }
                });
            if launch.is_null() || reach.is_null() || get_device.is_null() {
                return None;
            }
            Some(Hip {
                launch: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(Stream, unsafe extern "C" fn(*mut c_void), *mut c_void) -> c_int,
                >(launch),
                reach: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void,
                >(reach),
                get_device: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int) -> c_int>(
                    get_device,
                ),
            })
        }
    })
    .as_ref()
}

type Run = Box<dyn FnOnce(&mut Mesh) -> std::io::Result<()> + Send>;

/// One piece of work on a stream.
struct Work {
    communicator: Arc<Communicator>,
    run: Run,
}

unsafe extern "C" fn perform(work: *mut c_void) {
    // SAFETY: boxed by `enqueue`, and run once.
    let work = unsafe { Box::from_raw(work.cast::<Work>()) };
    let communicator = work.communicator;
    let failed = match fault().strip_prefix("async:").and_then(|code| code.parse().ok()) {
        Some(code) => Some(code),
        None if fault().ends_with("hang") => None,
        None => match communicator.mesh.lock().unwrap().as_mut().map(work.run) {
            Some(Ok(())) => return,
            _ => Some(REMOTE_ERROR),
        },
    };
    if let Some(code) = failed {
        communicator.state.store(code, Ordering::SeqCst);
    }
    // What failed stays on the stream until somebody aborts.
    while !communicator.aborted.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(2));
    }
}

unsafe fn enqueue(
    handle: Handle,
    stream: Stream,
    run: impl FnOnce(&mut Mesh) -> std::io::Result<()> + Send + 'static,
) -> c_int {
    if fault() == "death" {
        // SAFETY: ends this process, which is what its peers have to meet.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
    let (Some(hip), false) = (hip(), handle.is_null()) else { return INVALID_ARGUMENT };
    let communicator = unsafe { of(handle) }.clone();
    match communicator.state.load(Ordering::SeqCst) {
        SUCCESS => {}
        IN_PROGRESS => return INVALID_USAGE,
        other => return other,
    }
    let work = Box::new(Work { communicator: communicator.clone(), run: Box::new(run) });
    let (stream, work) = (stream as usize, Box::into_raw(work) as usize);
    // SAFETY: `perform` takes the box back.
    let put = move || unsafe { (hip.launch)(stream as Stream, perform, work as *mut c_void) };
    if fault() != "late" {
        return if put() == 0 { SUCCESS } else { 1 };
    }
    communicator.state.store(IN_PROGRESS, Ordering::SeqCst);
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        let state = if put() == 0 { SUCCESS } else { 1 };
        communicator.state.store(state, Ordering::SeqCst);
    });
    IN_PROGRESS
}

/// One direction between two ranks, as `ncclSend` and `ncclRecv` say it.
enum Transfer {
    Send(usize, &'static [u8]),
    Receive(usize, &'static mut [u8]),
}

struct Group {
    depth: u32,
    handle: Handle,
    stream: Stream,
    transfers: Vec<Transfer>,
}

thread_local! {
    static GROUP: RefCell<Group> = const {
        RefCell::new(Group {
            depth: 0, handle: std::ptr::null_mut(), stream: std::ptr::null_mut(), transfers: Vec::new(),
        })
    };
}

/// Inside of a group: only noted. One communicator and one stream a group is enough here.
unsafe fn transfer(handle: Handle, stream: Stream, transfer: Transfer) -> c_int {
    let noted = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Err(transfer);
        }
        (group.handle, group.stream) = (handle, stream);
        group.transfers.push(transfer);
        Ok(())
    });
    match noted {
        Ok(()) => SUCCESS,
        Err(alone) => unsafe { enqueue(handle, stream, move |mesh| mesh.exchange(vec![alone])) },
    }
}

/// Where the double reads or writes what is at an address.
unsafe fn slice<'a>(address: *const c_void, bytes: usize) -> Option<&'a mut [u8]> {
    let at = unsafe { (hip()?.reach)(address.cast_mut(), bytes) };
    // SAFETY: of the caller: both buffers live until the stream has done the work.
    (!at.is_null()).then(|| unsafe { std::slice::from_raw_parts_mut(at.cast(), bytes) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    unsafe { *version = said_version() };
    SUCCESS
}

fn said_version() -> c_int {
    let said = std::env::var("SKY_DOUBLE_CCL_VERSION").ok().and_then(|text| text.parse().ok());
    said.unwrap_or(22_707)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(result: c_int) -> *const c_char {
    match result {
        SUCCESS => c"no error",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        IN_PROGRESS => c"NCCL operation in progress",
        _ => c"an error",
    }
    .as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
    if !allowed() {
        return SYSTEM_ERROR;
    }
    let mut bytes = [0; 128];
    let Ok(random) = std::fs::read("/proc/sys/kernel/random/uuid") else { return SYSTEM_ERROR };
    bytes[..36].copy_from_slice(&random[..36]);
    unsafe { *id = UniqueId(bytes) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    handle: *mut Handle,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const [c_int; 4],
) -> c_int {
    // Size, magic and version come first; a structure that is not one is refused, and a later one by a version before it grew.
    if !allowed() || rank < 0 || rank >= ranks || config.is_null() {
        return INVALID_ARGUMENT;
    }
    let [size, _, magic, version] = unsafe { *config };
    let is_old = said_version() < 21_700;
    if magic as u32 != 0xcafe_beef || (is_old && (size > 24 || version > said_version())) {
        return INVALID_ARGUMENT;
    }
    let name = String::from_utf8_lossy(&id.0[..36]).into_owned();
    let communicator = Arc::new(Communicator {
        rank: rank as usize,
        ranks: ranks as usize,
        state: AtomicI32::new(IN_PROGRESS),
        aborted: Arc::default(),
        mesh: Mutex::new(None),
    });
    unsafe { *handle = Box::into_raw(Box::new(communicator.clone())) };
    std::thread::spawn(move || {
        let met = Mesh::meet(&name, communicator.rank, communicator.ranks, &communicator.aborted);
        let state = if met.is_ok() { SUCCESS } else { SYSTEM_ERROR };
        *communicator.mesh.lock().unwrap() = met.ok();
        communicator.state.store(state, Ordering::SeqCst);
    });
    IN_PROGRESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(handle: Handle, error: *mut c_int) -> c_int {
    unsafe { *error = of(handle).state.load(Ordering::SeqCst) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommFinalize(_handle: Handle) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(handle: Handle) -> c_int {
    if !handle.is_null() {
        unsafe { drop(Box::from_raw(handle)) };
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(handle: Handle) -> c_int {
    while fault() == "abort-hang" {
        std::thread::sleep(Duration::from_secs(1));
    }
    if !handle.is_null() {
        unsafe { of(handle).aborted.store(true, Ordering::SeqCst) };
    }
    unsafe { ncclCommDestroy(handle) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCount(handle: Handle, count: *mut c_int) -> c_int {
    unsafe { *count = of(handle).ranks as c_int };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommUserRank(handle: Handle, rank: *mut c_int) -> c_int {
    unsafe { *rank = of(handle).rank as c_int };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCuDevice(_handle: Handle, device: *mut c_int) -> c_int {
    // Of the thread that asks: the double keeps none.
    hip().map_or(INVALID_ARGUMENT, |hip| unsafe { (hip.get_device)(device) })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> c_int {
    GROUP.with_borrow_mut(|group| group.depth += 1);
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> c_int {
    let (handle, stream, transfers) = GROUP.with_borrow_mut(|group| {
        group.depth = group.depth.saturating_sub(1);
        let whole = if group.depth == 0 { std::mem::take(&mut group.transfers) } else { Vec::new() };
        (group.handle, group.stream, whole)
    });
    if transfers.is_empty() {
        return SUCCESS;
    }
    unsafe { enqueue(handle, stream, move |mesh| mesh.exchange(transfers)) }
}

/// The two buffers of a collective, in bytes; an unknown type or a range that leaves its allocation is refused.
macro_rules! buffers {
    ($send:expr, $sent:expr, $receive:expr, $received:expr, $dtype:expr) => {{
        let Some(width) = reduce::width($dtype) else { return INVALID_ARGUMENT };
        match unsafe { (slice($send, $sent * width), slice($receive, $received * width)) } {
            (Some(send), Some(receive)) => (send, receive),
            _ => return INVALID_ARGUMENT,
        }
    }};
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    handle: Handle,
    stream: Stream,
) -> c_int {
    let (send, receive) = buffers!(send, count, receive, count, dtype);
    if !reduce::knows(dtype, op) {
        return INVALID_ARGUMENT;
    }
    unsafe { enqueue(handle, stream, move |mesh| mesh.all_reduce(send, receive, dtype, op)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduce(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    root: c_int,
    handle: Handle,
    stream: Stream,
) -> c_int {
    let (send, receive) = buffers!(send, count, receive, count, dtype);
    if !reduce::knows(dtype, op) {
        return INVALID_ARGUMENT;
    }
    unsafe {
        enqueue(handle, stream, move |mesh| {
            let mut all = vec![0; send.len()];
            mesh.all_reduce(send, &mut all, dtype, op)?;
            if mesh.rank == root as usize {
                receive.copy_from_slice(&all);
            }
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduceScatter(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    handle: Handle,
    stream: Stream,
) -> c_int {
    if handle.is_null() {
        return INVALID_ARGUMENT;
    }
    let ranks = unsafe { of(handle).ranks };
    let (send, receive) = buffers!(send, count * ranks, receive, count, dtype);
    if !reduce::knows(dtype, op) {
        return INVALID_ARGUMENT;
    }
    unsafe {
        enqueue(handle, stream, move |mesh| {
            let mut all = vec![0; send.len()];
            mesh.all_reduce(send, &mut all, dtype, op)?;
            let part = receive.len();
            receive.copy_from_slice(&all[mesh.rank * part..][..part]);
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBroadcast(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    root: c_int,
    handle: Handle,
    stream: Stream,
) -> c_int {
    let (send, receive) = buffers!(send, count, receive, count, dtype);
    unsafe { enqueue(handle, stream, move |mesh| mesh.broadcast(send, receive, root as usize)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    handle: Handle,
    stream: Stream,
) -> c_int {
    if handle.is_null() {
        return INVALID_ARGUMENT;
    }
    let ranks = unsafe { of(handle).ranks };
    let (send, receive) = buffers!(send, count, receive, count * ranks, dtype);
    unsafe {
        enqueue(handle, stream, move |mesh| {
            let part = send.len();
            let own = send.to_vec();
            for root in 0..mesh.ranks {
                mesh.broadcast(&own, &mut receive[root * part..][..part], root)?;
            }
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(
    send: *const c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    handle: Handle,
    stream: Stream,
) -> c_int {
    let (send, _) = buffers!(send, count, send, count, dtype);
    unsafe { transfer(handle, stream, Transfer::Send(peer as usize, send)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    handle: Handle,
    stream: Stream,
) -> c_int {
    let (receive, _) = buffers!(receive, count, receive, count, dtype);
    unsafe { transfer(handle, stream, Transfer::Receive(peer as usize, receive)) }
}
