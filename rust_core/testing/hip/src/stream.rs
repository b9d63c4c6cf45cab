//! Streams, a thread each, and events.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::memory::reach;
use crate::{Handle, INVALID_HANDLE, INVALID_VALUE, NOT_READY, SUCCESS, async_fault, entries, settings};

/// What each piece of work takes at least, so that a wait that was forgotten shows.
const SLOWNESS: Duration = Duration::from_millis(3);

type Work = Box<dyn FnOnce() -> c_int + Send>;

/// How much was put on a stream, how much of it is done, and the first thing that went wrong.
#[derive(Default)]
struct Progress {
    put: u64,
    done: u64,
    failed: c_int,
}

struct Stream {
    work: Mutex<Sender<Work>>,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Default)]
struct Event {
    /// Set when it is recorded: the stream's count that has to be done, and when that was so.
    recorded: Mutex<Option<(Arc<Stream>, u64)>>,
    at: Arc<Mutex<Option<Instant>>>,
}

static STREAMS: Mutex<BTreeMap<usize, Arc<Stream>>> = Mutex::new(BTreeMap::new());
static EVENTS: Mutex<BTreeMap<usize, Arc<Event>>> = Mutex::new(BTreeMap::new());
static NEXT: AtomicUsize = AtomicUsize::new(0x1000);

impl Stream {
    fn start() -> Arc<Self> {
        let (work, todo) = channel::<Work>();
        let stream =
            Arc::new(Self { work: Mutex::new(work), progress: Mutex::default(), changed: Condvar::new() });
        let own = Arc::downgrade(&stream);
        std::thread::spawn(move || {
            for work in todo {
                while settings().fault == "hang" {
                    std::thread::sleep(Duration::from_secs(1));
                }
                std::thread::sleep(SLOWNESS);
                let status = work();
                let Some(stream) = own.upgrade() else { return };
                let mut progress = stream.progress.lock().unwrap();
                progress.done += 1;
                if progress.failed == SUCCESS {
                    progress.failed = status;
                }
                stream.changed.notify_all();
            }
        });
        stream
    }

    fn put(&self, work: Work) -> u64 {
        let mut progress = self.progress.lock().unwrap();
        progress.put += 1;
        let _ = self.work.lock().unwrap().send(work);
        progress.put
    }

    fn state(&self, upto: u64) -> c_int {
        let progress = self.progress.lock().unwrap();
        if progress.failed != SUCCESS {
            progress.failed
        } else if progress.done < upto {
            NOT_READY
        } else {
            SUCCESS
        }
    }

    fn wait(&self, upto: u64) -> c_int {
        let mut progress = self.progress.lock().unwrap();
        while progress.done < upto && progress.failed == SUCCESS {
            progress = self.changed.wait(progress).unwrap();
        }
        progress.failed
    }

    fn count(&self) -> u64 {
        self.progress.lock().unwrap().put
    }
}

/// The stream of a handle; null is one of its own.
fn stream_of(handle: Handle) -> Option<Arc<Stream>> {
    let mut streams = STREAMS.lock().unwrap();
    if handle.is_null() {
        return Some(streams.entry(0).or_insert_with(Stream::start).clone());
    }
    streams.get(&(handle as usize)).cloned()
}

fn event_of(handle: Handle) -> Option<Arc<Event>> {
    EVENTS.lock().unwrap().get(&(handle as usize)).cloned()
}

fn new_handle() -> Handle {
    NEXT.fetch_add(16, Ordering::Relaxed) as Handle
}

/// Wait for all that is under way.
pub(crate) fn drain() -> c_int {
    let streams: Vec<Arc<Stream>> = STREAMS.lock().unwrap().values().cloned().collect();
    streams
        .iter()
        .map(|stream| stream.wait(stream.count()))
        .find(|status| *status != SUCCESS)
        .unwrap_or(SUCCESS)
}

fn copy(to: usize, from: usize, bytes: usize, stream: &Stream) -> c_int {
    let (Some(to), Some(from)) = (reach(to, bytes), reach(from, bytes)) else { return INVALID_VALUE };
    if settings().fault == "death" {
        // SAFETY: ends this process, as it was asked for.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
    stream.put(Box::new(move || {
        if let Some(code) = async_fault() {
            return code;
        }
        // SAFETY: the caller keeps both ranges valid until the stream has done this, as for HIP itself.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
        if settings().fault == "corrupt" {
            // SAFETY: as above.
            unsafe { *(to as *mut u8) = (*(to as *const u8)).wrapping_add(1) };
        }
        SUCCESS
    }));
    SUCCESS
}

entries! {
    hipMemcpyAsync [cudaMemcpyAsync] (to: *mut c_void, from: *const c_void, bytes: usize, _kind: c_int, stream: Handle) {
        let Some(stream) = stream_of(stream) else { return INVALID_HANDLE };
        copy(to as usize, from as usize, bytes, &stream)
    }

    hipMemcpy [cudaMemcpy] (to: *mut c_void, from: *const c_void, bytes: usize, _kind: c_int) {
        let Some(stream) = stream_of(std::ptr::null_mut()) else { return INVALID_HANDLE };
        match copy(to as usize, from as usize, bytes, &stream) {
            SUCCESS => stream.wait(stream.count()),
            status => status,
        }
    }

    hipMemsetAsync [cudaMemsetAsync] (to: *mut c_void, value: c_int, bytes: usize, stream: Handle) {
        let Some(stream) = stream_of(stream) else { return INVALID_HANDLE };
        let Some(to) = reach(to as usize, bytes) else { return INVALID_VALUE };
        stream.put(Box::new(move || {
            // SAFETY: as in `copy`.
            unsafe { std::ptr::write_bytes(to as *mut u8, value as u8, bytes) };
            SUCCESS
        }));
        SUCCESS
    }

    hipLaunchHostFunc [cudaLaunchHostFunc] (stream: Handle, run: Option<unsafe extern "C" fn(*mut c_void)>, with: *mut c_void) {
        let (Some(stream), Some(run)) = (stream_of(stream), run) else { return INVALID_HANDLE };
        let with = with as usize;
        stream.put(Box::new(move || {
            // Of the caller: it stays valid until it has run.
            unsafe { run(with as *mut c_void) };
            SUCCESS
        }));
        SUCCESS
    }

    hipStreamCreateWithFlags [cudaStreamCreateWithFlags] (stream: *mut Handle, _flags: c_uint) {
        *stream = new_handle();
        STREAMS.lock().unwrap().insert(*stream as usize, Stream::start());
        SUCCESS
    }

    hipStreamDestroy [cudaStreamDestroy] (stream: Handle) {
        let Some(gone) = STREAMS.lock().unwrap().remove(&(stream as usize)) else { return INVALID_HANDLE };
        gone.wait(gone.count());
        SUCCESS
    }

    hipStreamSynchronize [cudaStreamSynchronize] (stream: Handle) {
        stream_of(stream).map_or(INVALID_HANDLE, |stream| stream.wait(stream.count()))
    }

    hipStreamQuery [cudaStreamQuery] (stream: Handle) {
        stream_of(stream).map_or(INVALID_HANDLE, |stream| stream.state(stream.count()))
    }

    hipStreamWaitEvent [cudaStreamWaitEvent] (stream: Handle, event: Handle, _flags: c_uint) {
        let (Some(stream), Some(event)) = (stream_of(stream), event_of(event)) else { return INVALID_HANDLE };
        let before = event.recorded.lock().unwrap().clone();
        if let Some((other, upto)) = before {
            stream.put(Box::new(move || other.wait(upto)));
        }
        SUCCESS
    }

    hipEventCreateWithFlags [cudaEventCreateWithFlags] (event: *mut Handle, _flags: c_uint) {
        *event = new_handle();
        EVENTS.lock().unwrap().insert(*event as usize, Arc::default());
        SUCCESS
    }

    hipEventDestroy [cudaEventDestroy] (event: Handle) {
        if EVENTS.lock().unwrap().remove(&(event as usize)).is_some() { SUCCESS } else { INVALID_HANDLE }
    }

    hipEventRecord [cudaEventRecord] (event: Handle, stream: Handle) {
        let (Some(stream), Some(event)) = (stream_of(stream), event_of(event)) else { return INVALID_HANDLE };
        let at = event.at.clone();
        let upto = stream.put(Box::new(move || {
            *at.lock().unwrap() = Some(Instant::now());
            SUCCESS
        }));
        *event.recorded.lock().unwrap() = Some((stream, upto));
        SUCCESS
    }

    hipEventQuery [cudaEventQuery] (event: Handle) {
        let Some(event) = event_of(event) else { return INVALID_HANDLE };
        let recorded = event.recorded.lock().unwrap().clone();
        recorded.map_or(SUCCESS, |(stream, upto)| stream.state(upto))
    }

    hipEventSynchronize [cudaEventSynchronize] (event: Handle) {
        let Some(event) = event_of(event) else { return INVALID_HANDLE };
        let recorded = event.recorded.lock().unwrap().clone();
        recorded.map_or(SUCCESS, |(stream, upto)| stream.wait(upto))
    }

    hipEventElapsedTime [cudaEventElapsedTime] (milliseconds: *mut f32, from: Handle, to: Handle) {
        let (Some(from), Some(to)) = (event_of(from), event_of(to)) else { return INVALID_HANDLE };
        let (from, to) = (*from.at.lock().unwrap(), *to.at.lock().unwrap());
        let (Some(from), Some(to)) = (from, to) else { return NOT_READY };
        *milliseconds = to.saturating_duration_since(from).as_secs_f32() * 1000.0;
        SUCCESS
    }
}
