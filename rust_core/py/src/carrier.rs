//! Memory that only Python's objects can get at: they copy it, piece by piece.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use sky_monarch_core::gpu::{self, Platform, PointerKind};
use sky_monarch_core::rdma::{Carrier, Memory, Room, Segment};
use sky_monarch_core::{Error, ErrorKind, Result};

use crate::convert::duration;

/// Threads of the core that are in Python, or wait to be.
static IN_PYTHON: AtomicUsize = AtomicUsize::new(0);
/// None may go there any more.
static ENDING: AtomicBool = AtomicBool::new(false);

/// A thread of the core's in Python: while Python ends, it would abort the process.
struct Visit;

impl Visit {
    /// None once Python is about to end.
    fn begin() -> Option<Self> {
        IN_PYTHON.fetch_add(1, Ordering::SeqCst);
        let visit = Self;
        (!ENDING.load(Ordering::SeqCst)).then_some(visit)
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        IN_PYTHON.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Waits until no thread of the core is in Python, `limit` at the most.
pub fn await_visits(limit: Duration) {
    let until = Instant::now() + limit;
    while IN_PYTHON.load(Ordering::SeqCst) > 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Lets no thread of the core into Python any more, for Python is about to end, and waits for those that are there.
#[pyfunction]
pub fn end_carriers(py: Python<'_>, timeout_s: f64) -> PyResult<()> {
    let limit = duration(py, "timeout_s", timeout_s)?;
    ENDING.store(true, Ordering::SeqCst);
    py.detach(|| await_visits(limit));
    Ok(())
}

/// `Carrier` of `_core.pyi`.
struct PyCarrier(Py<PyAny>);

impl PyCarrier {
    /// Runs `call` with the GIL, for a thread of the core's.
    fn with<T>(&self, call: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> Result<T> {
        let failed = |why: String| Error::new(ErrorKind::Device, "copy memory of a device", why);
        let Some(_visit) = Visit::begin() else { return Err(failed("Python is ending".into())) };
        let done = Python::try_attach(|py| call(self.0.bind(py)).map_err(|error| failed(error.to_string())));
        done.unwrap_or_else(|| Err(failed("Python is ending".into())))
    }

    fn copy(&self, name: &str, offset: u64, host: Segment) -> Result<()> {
        self.with(|carrier| carrier.call_method1(name, (offset, host.address, host.length)).map(drop))
    }
}

impl Carrier for PyCarrier {
    fn room(&self, bytes: usize) -> Result<Room> {
        self.with(|carrier| {
            let (address, owner): (usize, Py<PyAny>) = carrier.call_method1("room", (bytes,))?.extract()?;
            Ok(Room { address, owner: Box::new(owner) })
        })
    }

    fn fetch(&self, offset: u64, into: Segment) -> Result<()> {
        self.copy("fetch", offset, into)
    }

    fn store(&self, offset: u64, from: Segment) -> Result<()> {
        self.copy("store", offset, from)
    }
}

/// Memory as Python describes it: segments of `owner`'s, which lie at `place`.
pub fn memory(
    py: Python<'_>,
    segments: Vec<(usize, usize)>,
    owner: Py<PyAny>,
    place: Option<Py<PyAny>>,
) -> Result<Memory> {
    let segments = segments.into_iter().map(|(address, length)| Segment { address, length });
    let Some(place) = place else {
        // SAFETY: the caller passes memory of an object that it passes along, as `_core.pyi` demands.
        return unsafe { Memory::new(segments, owner) };
    };
    if place.extract::<&str>(py).is_ok_and(|name| name == "device") {
        let runtime = gpu::runtime().map_err(|error| {
            Error::new(ErrorKind::Device, "open the runtime of the devices", error.to_string())
        })?;
        // SAFETY: as above; the caller has waited for the device.
        return unsafe { Memory::of_device(runtime, segments, owner) };
    }
    let length = segments.map(|segment| segment.length).sum();
    Memory::of_carrier(length, Arc::new(PyCarrier(place)))
}

/// Whether an address is one of an accelerator that this process's runtime knows.
#[pyfunction]
pub fn is_device_memory(py: Python<'_>, address: u64) -> bool {
    py.detach(|| {
        gpu::runtime().is_ok_and(|runtime| {
            runtime.platform() != Platform::Host
                && runtime.pointer(address).is_ok_and(|found| found.kind == PointerKind::Device)
        })
    })
}
