//! The process's one Tokio runtime, and how Python threads wait for it.

use std::mem::ManuallyDrop;
use std::pin::pin;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;

use pyo3::prelude::*;
use sky_monarch_core::{Error, ErrorKind, Result};
use tokio::runtime::Runtime;

use crate::error::to_python;

/// How long Ctrl-C may have to wait.
const SIGNAL_CHECK: Duration = Duration::from_millis(100);

struct Owned {
    pid: u32,
    runtime: Runtime,
}

/// The runtime of this process, made when first needed.
///
/// A forked child inherits the memory of its parent's runtime but none of its threads, so it gets one of its own; the
/// inherited one is left alone (it belongs to threads that do not exist). No lock is involved that a fork could copy
/// in its locked state.
pub fn runtime() -> Result<&'static Runtime> {
    static RUNTIME: AtomicPtr<Owned> = AtomicPtr::new(std::ptr::null_mut());
    let pid = std::process::id();
    let current = RUNTIME.load(Ordering::Acquire);
    // SAFETY: a pointer stored below comes from `Box::into_raw` and is never freed.
    if let Some(owned) = unsafe { current.as_ref() }
        && owned.pid == pid
    {
        return Ok(&owned.runtime);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("sky-monarch-io")
        .enable_all()
        .build()
        .map_err(|error| Error::io("start the I/O threads", error))?;
    let made = Box::into_raw(Box::new(Owned { pid, runtime }));
    match RUNTIME.compare_exchange(current, made, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: `made` was leaked on purpose just above and is never freed.
        Ok(_) => Ok(unsafe { &(*made).runtime }),
        Err(_) => {
            // Another thread of this process was quicker: `made` was never shared, and its threads end here.
            // SAFETY: it comes from `Box::into_raw` above and nobody else has seen it.
            let Owned { runtime, .. } = *unsafe { Box::from_raw(made) };
            runtime.shutdown_background();
            self::runtime()
        }
    }
}

/// Runs `future` with the GIL released; Python's signal handlers run meanwhile, and end the wait if they raise.
pub fn wait<T: Send>(py: Python<'_>, future: impl Future<Output = Result<T>> + Send) -> PyResult<T> {
    let runtime = runtime().map_err(|error| to_python(py, &error))?;
    let mut future = pin!(future);
    loop {
        let slice = py
            .detach(|| runtime.block_on(async { tokio::time::timeout(SIGNAL_CHECK, future.as_mut()).await }));
        match slice {
            Ok(outcome) => return outcome.map_err(|error| to_python(py, &error)),
            Err(_) => py.check_signals()?,
        }
    }
}

/// A value whose tasks live in the process that made it. In a forked child it is neither used nor dropped.
pub struct Local<T> {
    value: ManuallyDrop<T>,
    pid: u32,
}

impl<T> Local<T> {
    pub fn new(value: T) -> Self {
        Self { value: ManuallyDrop::new(value), pid: std::process::id() }
    }

    /// The value; none in a process that was forked from its maker.
    pub fn here(&self) -> Option<&T> {
        (self.pid == std::process::id()).then_some(&*self.value)
    }

    /// The value, or why there is none for `operation`.
    pub fn get(&self, py: Python<'_>, operation: &'static str) -> PyResult<&T> {
        self.here().ok_or_else(|| {
            let why = format!("it belongs to process {} and does not survive a fork: make another", self.pid);
            to_python(py, &Error::new(ErrorKind::Closed, operation, why))
        })
    }
}

impl<T> Drop for Local<T> {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            let _inside = runtime().map(Runtime::enter);
            // SAFETY: nothing else takes it out, and `self` is not used after its drop.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}
