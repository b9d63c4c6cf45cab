//! Streams and events with an owner, and waits that end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::abi::device::{EventHandle, StreamHandle};
use super::error::{GpuError, GpuResult};
use super::runtime::GpuRuntime;

/// Between two looks at a stream: short at first, as most copies take microseconds.
const FIRST_LOOK: Duration = Duration::from_micros(5);
const LAST_LOOK: Duration = Duration::from_millis(2);

/// Set when a wait was given up: what a device still does cannot be known, so nothing of any device is freed from then
/// on (freeing waits, too), and the process is to end.
static WEDGED: AtomicBool = AtomicBool::new(false);

/// Whether a wait was given up in this process.
pub(super) fn wedged() -> bool {
    WEDGED.load(Ordering::Relaxed)
}

/// Ask until it is so or the time is over. A vendor's own wait would not end when the device hangs.
fn wait_until(
    what: &'static str,
    limit: Duration,
    mut done: impl FnMut() -> GpuResult<bool>,
) -> GpuResult<()> {
    let begun = Instant::now();
    let mut pause = FIRST_LOOK;
    while !done()? {
        if begun.elapsed() >= limit {
            WEDGED.store(true, Ordering::Relaxed);
            return Err(GpuError::TimedOut { what, after: limit });
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LAST_LOOK);
    }
    Ok(())
}

/// A stream.
pub struct Stream {
    handle: StreamHandle,
    runtime: &'static dyn GpuRuntime,
}

// SAFETY: the vendors let any thread use a stream.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream that does not wait for the default one.
    ///
    /// # Errors
    /// Where there is no such device.
    pub fn new(runtime: &'static dyn GpuRuntime, ordinal: u32) -> GpuResult<Self> {
        Ok(Self { handle: runtime.create_stream(ordinal)?, runtime })
    }

    /// The vendor's handle, alive as long as this.
    pub const fn handle(&self) -> StreamHandle {
        self.handle
    }

    /// Wait until all that was put on it is done.
    ///
    /// # Errors
    /// What went wrong on it; [`GpuError::TimedOut`] when it is not done in time. Its device may then still write, so
    /// from then on this process frees nothing of any device any more: it is to end.
    pub fn wait(&self, limit: Duration) -> GpuResult<()> {
        // SAFETY: alive.
        wait_until("a stream", limit, || unsafe { self.runtime.stream_idle(self.handle) })
    }

    /// Let what is put on it from now on wait for an event, on the device.
    ///
    /// # Errors
    /// What the runtime returns.
    pub fn wait_event(&self, event: &Event) -> GpuResult<()> {
        // SAFETY: both are alive.
        unsafe { self.runtime.wait_event(self.handle, event.handle) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if wedged() {
            return; // destroying it would wait for what does not end
        }
        // SAFETY: owned, and dropped once.
        if let Err(error) = unsafe { self.runtime.destroy_stream(self.handle) } {
            tracing::warn!(%error, "a stream was not destroyed");
        }
    }
}

/// An event.
pub struct Event {
    handle: EventHandle,
    runtime: &'static dyn GpuRuntime,
}

// SAFETY: the vendors let any thread use an event.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event; timed ones cost more.
    ///
    /// # Errors
    /// Where there is no such device.
    pub fn new(runtime: &'static dyn GpuRuntime, ordinal: u32, timed: bool) -> GpuResult<Self> {
        Ok(Self { handle: runtime.create_event(ordinal, timed)?, runtime })
    }

    /// Record it on a stream.
    ///
    /// # Errors
    /// What the runtime returns.
    pub fn record(&self, stream: &Stream) -> GpuResult<()> {
        // SAFETY: both are alive.
        unsafe { self.runtime.record(self.handle, stream.handle) }
    }

    /// Wait until what was before it is done.
    ///
    /// # Errors
    /// As [`Stream::wait`].
    pub fn wait(&self, limit: Duration) -> GpuResult<()> {
        // SAFETY: alive.
        wait_until("an event", limit, || unsafe { self.runtime.event_done(self.handle) })
    }

    /// Time since an earlier one, where both are timed and done.
    ///
    /// # Errors
    /// Where one is not done, or not timed.
    pub fn since(&self, earlier: &Self) -> GpuResult<Duration> {
        // SAFETY: both are alive.
        unsafe { self.runtime.elapsed(earlier.handle, self.handle) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if wedged() {
            return;
        }
        // SAFETY: owned, and dropped once.
        if let Err(error) = unsafe { self.runtime.destroy_event(self.handle) } {
            tracing::warn!(%error, "an event was not destroyed");
        }
    }
}
