//! What a communicator and its watcher share: its state in the library, and its end.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::bounded::{Looks, end_process, or_end};
use super::pending::Pending;
use crate::gpu::abi::ccl::{CclResult, CommunicatorHandle};
use crate::gpu::table::ccl::Ccl;
use crate::gpu::{ErrorClass, GpuError, GpuResult, GpuRuntime};

/// Bounds of what a communicator waits for.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// For all ranks to come.
    pub start_limit: Duration,
    /// For a collective, from when those before it were done. Ranks that are behind count: it is what one waits for others.
    pub operation_limit: Duration,
    /// For an abort, and for what it frees; then the process ends itself.
    pub abort_limit: Duration,
}

impl Default for Options {
    fn default() -> Self {
        let (start_s, operation_s, abort_s) = (120, 600, 30);
        Self {
            start_limit: Duration::from_secs(start_s),
            operation_limit: Duration::from_secs(operation_s),
            abort_limit: Duration::from_secs(abort_s),
        }
    }
}

/// A handle, while the library may be called with it.
#[derive(Clone, Copy)]
pub struct Handle(pub CommunicatorHandle);

// SAFETY: the vendors let one thread at a time use a communicator, and any thread abort it and ask for its state.
unsafe impl Send for Handle {}

/// Why a communicator is over.
#[derive(Clone, Debug)]
pub struct Failure {
    pub why: String,
    pub class: ErrorClass,
}

#[derive(Default)]
pub struct State {
    /// None once nobody may call the library with it any more.
    pub handle: Option<Handle>,
    pub failure: Option<Failure>,
    /// Nothing of it is left in the library.
    pub over: bool,
    /// A call that has not returned, and since when.
    pub calling: Option<(&'static str, Instant)>,
    pub pending: Pending,
}

/// What the communicator and its watcher share.
pub struct Shared {
    pub ccl: &'static Ccl,
    pub runtime: &'static dyn GpuRuntime,
    pub ordinal: u32,
    pub options: Options,
    state: Mutex<State>,
    pub changed: Condvar,
}

impl Shared {
    pub fn new(
        ccl: &'static Ccl,
        (runtime, ordinal): (&'static dyn GpuRuntime, u32),
        options: Options,
        handle: CommunicatorHandle,
    ) -> Self {
        let state = Mutex::new(State { handle: Some(Handle(handle)), ..State::default() });
        Self { ccl, runtime, ordinal, options, state, changed: Condvar::new() }
    }

    /// Nothing of it is left in the library.
    pub fn set_over(&self) {
        self.state().over = true;
        self.changed.notify_all();
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn error_of(&self, api: &'static str, code: CclResult, starting: bool) -> GpuError {
        GpuError::Ccl { api, code, text: self.ccl.text_of(code), starting }
    }

    pub fn lost(state: &State) -> GpuError {
        let closed = || Failure { why: "it was closed".into(), class: ErrorClass::CommunicatorFatal };
        let Failure { why, class } = state.failure.clone().unwrap_or_else(closed);
        GpuError::Lost { why, class }
    }

    pub fn handle(&self) -> GpuResult<Handle> {
        let state = self.state();
        state.handle.ok_or_else(|| Self::lost(&state))
    }

    /// What the library says of it, unless it is over. Takes no time.
    pub fn asked(&self, state: &State) -> Option<CclResult> {
        let Handle(handle) = state.handle?;
        let mut said = CclResult::SUCCESS;
        // SAFETY: the handle is alive while the state is locked, and any thread may ask.
        let asked = unsafe { (self.ccl.table.comm_get_async_error)(handle, &mut said) };
        Some(if asked == CclResult::SUCCESS { said } else { asked })
    }

    /// Wait until a call that did not block is through. What it returned then stays the state of a communicator that does
    /// not block, whatever it was: an error is the end of it.
    pub fn through(
        &self,
        api: &'static str,
        returned: CclResult,
        limit: Duration,
        starting: bool,
    ) -> GpuResult<()> {
        let mut said = returned;
        let mut looks = Looks::new();
        while said == CclResult::IN_PROGRESS {
            if looks.elapsed() >= limit {
                let why =
                    format!("{api} was not through after {:.1} s: a rank is missing", limit.as_secs_f64());
                let class = if starting { ErrorClass::Retryable } else { ErrorClass::CommunicatorFatal };
                return Err(GpuError::Lost { why, class });
            }
            looks.pause();
            let state = self.state();
            said = self.asked(&state).ok_or_else(|| Self::lost(&state))?;
        }
        match said {
            CclResult::SUCCESS => Ok(()),
            code => Err(self.error_of(api, code, starting)),
        }
    }

    /// The communicator is over for this reason, unless it was already for another one: that is returned, after the abort.
    pub fn fail(&self, error: GpuError) -> GpuError {
        let class = error.class();
        let why = match error {
            GpuError::Lost { why, .. } => why,
            other => other.to_string(),
        };
        self.abort(Failure { why, class });
        Self::lost(&self.state())
    }

    /// Take it from the library, and free what waits on streams. Ends the process where that takes longer than its limit.
    pub fn abort(&self, failure: Failure) {
        let limit = self.options.abort_limit;
        let taken = {
            let mut state = self.state();
            let taken = state.handle.take();
            if taken.is_some() {
                tracing::info!(why = failure.why, "a communicator is aborted");
                state.failure.get_or_insert(failure);
            }
            taken
        };
        let Some(Handle(handle)) = taken else {
            // Another thread is at it, within the same limit, or was.
            let state = self.state();
            drop(self.changed.wait_timeout_while(state, limit * 2, |state| !state.over));
            return;
        };
        let call = self.ccl.table.comm_abort;
        let handle = Handle(handle);
        let begun = Instant::now();
        let result = or_end("the abort of a communicator", limit, move || {
            let Handle(handle) = { handle };
            // SAFETY: taken above: nobody calls with it any more. A call that is under way is what it frees.
            unsafe { call(handle) }
        });
        if !matches!(result, CclResult::SUCCESS | CclResult::IN_PROGRESS) {
            tracing::warn!(?result, "a communicator was not aborted in order");
        }
        self.free_streams(begun + limit);
        self.set_over();
    }

    /// Wait for what the abort lets end. Memory that a device still uses can be given back by no other means than an end.
    fn free_streams(&self, until: Instant) {
        let mut looks = Looks::new();
        loop {
            let mut state = self.state();
            if state.calling.is_none() {
                match state.pending.settle() {
                    Ok(()) if state.pending.oldest().is_none() => return,
                    Ok(()) => {}
                    Err(error) => {
                        tracing::warn!(%error, "after an abort a device cannot be asked");
                        state.pending.give_up();
                        return;
                    }
                }
            }
            drop(state);
            if Instant::now() >= until {
                end_process(
                    "what a device was at when its communicator was aborted",
                    self.options.abort_limit,
                );
            }
            looks.pause();
        }
    }
}

/// A collective that takes too long.
pub fn overdue(what: &str, limit: Duration) -> GpuError {
    GpuError::Lost {
        why: format!("{what} was not done after {:.1} s: a rank is missing or hangs", limit.as_secs_f64()),
        class: ErrorClass::CommunicatorFatal,
    }
}
