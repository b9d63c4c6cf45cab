//! What was put on streams and is not known to be done.

use std::any::Any;
use std::time::Instant;

use crate::gpu::abi::device::{EventHandle, StreamHandle};
use crate::gpu::{GpuResult, GpuRuntime};

/// What has to live until a collective is done.
pub type Keep = Box<dyn Any + Send>;

/// Collectives whose memory is kept at the most; who puts more waits.
pub const MOST_KEPT: usize = 1024;

/// An event behind some collectives.
struct Mark {
    what: &'static str,
    event: EventHandle,
    runtime: &'static dyn GpuRuntime,
    /// When it became the first one that is not done.
    since: Instant,
    kept: Vec<Keep>,
    given_up: bool,
}

// SAFETY: the vendors let any thread use an event.
unsafe impl Send for Mark {}

impl Drop for Mark {
    fn drop(&mut self) {
        if self.given_up {
            // The device may still use what was kept.
            self.kept.drain(..).for_each(std::mem::forget);
            return;
        }
        // SAFETY: made by `put`, of this runtime, and not used again. One that is not done is released when it is.
        if let Err(error) = unsafe { self.runtime.destroy_event(self.event) } {
            tracing::warn!(%error, "an event was not destroyed");
        }
    }
}

/// The first collective that is not done, and the last one: what is between is done before the last.
#[derive(Default)]
pub struct Pending {
    first: Option<Mark>,
    last: Option<Mark>,
}

impl Pending {
    /// Mark what was put on a stream just now.
    ///
    /// # Errors
    /// What the runtime returns; what was to be kept is then kept for ever.
    ///
    /// # Safety
    /// The stream is the runtime's, of device `ordinal`, and alive.
    pub unsafe fn put(
        &mut self,
        what: &'static str,
        (runtime, ordinal): (&'static dyn GpuRuntime, u32),
        stream: StreamHandle,
        keep: Keep,
    ) -> GpuResult<()> {
        let event = match runtime.create_event(ordinal, false) {
            Ok(event) => event,
            Err(error) => {
                std::mem::forget(keep);
                return Err(error);
            }
        };
        let mut mark =
            Mark { what, event, runtime, since: Instant::now(), kept: vec![keep], given_up: false };
        // SAFETY: of the caller; the event was made above.
        if let Err(error) = unsafe { runtime.record(event, stream) } {
            mark.given_up = true;
            return Err(error);
        }
        if self.first.is_none() {
            self.first = Some(mark);
            return Ok(());
        }
        if let Some(mut before) = self.last.take() {
            // The library itself orders what one communicator does, whatever the streams.
            before.kept.append(&mut mark.kept);
            std::mem::swap(&mut before.kept, &mut mark.kept);
        }
        self.last = Some(mark);
        Ok(())
    }

    /// Let go of what is done.
    ///
    /// # Errors
    /// What went wrong on the device.
    pub fn settle(&mut self) -> GpuResult<()> {
        while let Some(first) = &self.first {
            // SAFETY: the event is alive, and of this runtime.
            if !unsafe { first.runtime.event_done(first.event) }? {
                return Ok(());
            }
            self.first = self.last.take();
            if let Some(next) = &mut self.first {
                next.since = Instant::now();
            }
        }
        Ok(())
    }

    /// What is not done, and since when it could have been.
    pub fn oldest(&self) -> Option<(&'static str, Instant)> {
        self.first.as_ref().map(|first| (first.what, first.since))
    }

    /// Whether no more fits.
    pub fn is_full(&self) -> bool {
        self.last.as_ref().is_some_and(|last| last.kept.len() >= MOST_KEPT)
    }

    /// The device cannot be asked any more: nothing of this is freed, ever.
    pub fn give_up(&mut self) {
        for mark in [self.first.take(), self.last.take()].into_iter().flatten() {
            let mut mark = mark;
            mark.given_up = true;
        }
    }
}
