//! `RdmaDomain`: memory of this process that others read and write, and theirs.

use std::ffi::{c_int, c_void};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use sky_monarch_core::rdma::{self, Access, Domain, Handle, Limits, Memory, Options, Report};
use sky_monarch_core::{Error, ErrorKind, Result};

use crate::carrier;
use crate::convert::duration;
use crate::error::to_python;
use crate::runtime::Local;

/// How long Ctrl-C may have to wait.
const SIGNAL_CHECK: Duration = Duration::from_millis(100);

/// For copies under way in Python when a domain is closed.
const LAST_VISITS: Duration = Duration::from_secs(2);

/// Pairs of address and length.
type Segments = Vec<(usize, usize)>;

/// Registers memory, and reads and writes that of others.
#[pyclass(frozen, module = "sky_monarch._core")]
pub struct RdmaDomain {
    domain: Local<Mutex<Option<Arc<Domain>>>>,
    address: String,
}

fn parsed<T: std::str::FromStr>(py: Python<'_>, text: &str, what: &str) -> PyResult<T> {
    text.parse().map_err(|_| {
        let why = format!("{text:?} is no {what}: it must be numeric");
        to_python(py, &Error::new(ErrorKind::InvalidInput, "read an address", why))
    })
}

fn memory(
    py: Python<'_>,
    segments: Segments,
    owner: Py<PyAny>,
    place: Option<Py<PyAny>>,
) -> PyResult<Memory> {
    carrier::memory(py, segments, owner, place).map_err(|error| to_python(py, &error))
}

/// Runs `job` in a thread of its own with the GIL released; Python's signal handlers run meanwhile.
fn waited<T: Send + 'static>(
    py: Python<'_>,
    job: impl FnOnce() -> Result<T> + Send + 'static,
    cancel: impl Fn(),
) -> PyResult<T> {
    let (done, outcome) = mpsc::sync_channel(1);
    std::thread::spawn(move || {
        // Nobody waits any more after Ctrl-C.
        let _unheard = done.send(job());
    });
    let outcome = Mutex::new(outcome);
    loop {
        let slice =
            py.detach(|| outcome.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(SIGNAL_CHECK));
        match slice {
            Ok(outcome) => return outcome.map_err(|error| to_python(py, &error)),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                if let Err(interrupt) = py.check_signals() {
                    cancel();
                    return Err(interrupt);
                }
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                let error = Error::new(ErrorKind::Io, "move memory", "its thread ended");
                return Err(to_python(py, &error));
            }
        }
    }
}

fn report<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let owners = PyList::empty(py);
    for owner in &report.owners {
        let entry = PyDict::new(py);
        entry.set_item("bytes", owner.bytes)?;
        entry.set_item("path", owner.path.map(rdma::PathKind::name))?;
        entry.set_item("lost", owner.lost.as_deref())?;
        owners.append(entry)?;
    }
    let out = PyDict::new(py);
    out.set_item("bytes", report.bytes)?;
    out.set_item("kept", report.kept)?;
    out.set_item("again", report.again)?;
    out.set_item("owners", owners)?;
    Ok(out)
}

impl RdmaDomain {
    fn domain(&self, py: Python<'_>, operation: &'static str) -> PyResult<Arc<Domain>> {
        let open = self.domain.get(py, operation)?.lock().unwrap_or_else(PoisonError::into_inner).clone();
        open.ok_or_else(|| to_python(py, &Error::new(ErrorKind::Closed, operation, "the domain is closed")))
    }
}

fn handle(py: Python<'_>, text: &str) -> PyResult<Handle> {
    Handle::from_text(text).map_err(|error| to_python(py, &error))
}

fn options(
    py: Python<'_>,
    timeout_s: f64,
    digest: bool,
    streams: Option<usize>,
    path: Option<&str>,
) -> PyResult<Options> {
    let path = path.map(str::parse).transpose().map_err(|error: Error| to_python(py, &error))?;
    Ok(Options { digest, streams, path, ..Options::new(duration(py, "timeout_s", timeout_s)?) })
}

#[pymethods]
impl RdmaDomain {
    #[new]
    #[pyo3(signature = (address, secret, *, max_connections=256, bytes_per_s=None))]
    fn new(
        py: Python<'_>,
        address: &str,
        secret: &str,
        max_connections: usize,
        bytes_per_s: Option<u64>,
    ) -> PyResult<Self> {
        let address: IpAddr = parsed(py, address, "address")?;
        let limits = Limits { max_connections, bytes_per_s };
        let domain = Domain::open(address, secret, limits).map_err(|error| to_python(py, &error))?;
        let address = domain.address().to_string();
        Ok(Self { domain: Local::new(Mutex::new(Some(Arc::new(domain)))), address })
    }

    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    #[pyo3(signature = (segments, owner, *, epoch=0, writable=false, place=None))]
    fn register(
        &self,
        py: Python<'_>,
        segments: Segments,
        owner: Py<PyAny>,
        epoch: u64,
        writable: bool,
        place: Option<Py<PyAny>>,
    ) -> PyResult<String> {
        let domain = self.domain(py, "register memory")?;
        let access = if writable { Access::ReadWrite } else { Access::Read };
        let shared = owner.cast_bound::<SharedBuffer>(py).ok().map(|buffer| buffer.get().memory.clone());
        let memory = match shared {
            Some(shared) => shared,
            None => memory(py, segments, owner, place)?,
        };
        let handle = domain.register(memory, access, epoch).map_err(|error| to_python(py, &error))?;
        Ok(handle.to_text())
    }

    fn deregister(&self, py: Python<'_>, handle: &str, timeout_s: f64) -> PyResult<bool> {
        let (domain, handle) = (self.domain(py, "deregister memory")?, self::handle(py, handle)?);
        let limit = duration(py, "timeout_s", timeout_s)?;
        py.detach(|| domain.deregister(&handle, limit)).map_err(|error| to_python(py, &error))
    }

    fn announce(&self, py: Python<'_>, name: &str, serial: u64, text: &str) -> PyResult<()> {
        let domain = self.domain(py, "announce a handle")?;
        domain.announce(name, serial, text).map_err(|error| to_python(py, &error))
    }

    fn retract(&self, py: Python<'_>, serial: u64) -> PyResult<()> {
        self.domain(py, "retract a handle")?.retract(serial);
        Ok(())
    }

    fn lookup(
        &self,
        py: Python<'_>,
        address: &str,
        name: &str,
        serial: u64,
        timeout_s: f64,
    ) -> PyResult<String> {
        let domain = self.domain(py, "look a handle up")?;
        let (address, name): (SocketAddr, String) =
            (parsed(py, address, "address with a port")?, name.to_owned());
        let limit = duration(py, "timeout_s", timeout_s)?;
        waited(py, move || domain.lookup(address, &name, serial, limit), || {})
    }

    #[pyo3(signature = (handles, segments, owner, *, timeout_s, offset=0, digest=true, keep=false, streams=None, path=None, place=None))]
    #[expect(clippy::too_many_arguments, reason = "all are keywords in Python")]
    fn read_into<'py>(
        &self,
        py: Python<'py>,
        handles: Vec<String>,
        segments: Segments,
        owner: Py<PyAny>,
        timeout_s: f64,
        offset: u64,
        digest: bool,
        keep: bool,
        streams: Option<usize>,
        path: Option<&str>,
        place: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let domain = self.domain(py, "read memory")?;
        let handles: Vec<Handle> = handles.iter().map(|text| handle(py, text)).collect::<PyResult<_>>()?;
        let (memory, options) =
            (memory(py, segments, owner, place)?, options(py, timeout_s, digest, streams, path)?);
        let options = Options { keep, ..options };
        let cancelled = Arc::clone(&options.cancelled);
        let read = move || domain.read_into(&handles, offset, &memory, &options);
        report(py, &waited(py, read, || cancelled.store(true, Ordering::Relaxed))?)
    }

    #[pyo3(signature = (handle, segments, owner, *, timeout_s, offset=0, digest=true, streams=None, path=None, place=None))]
    #[expect(clippy::too_many_arguments, reason = "all are keywords in Python")]
    fn write_from<'py>(
        &self,
        py: Python<'py>,
        handle: &str,
        segments: Segments,
        owner: Py<PyAny>,
        timeout_s: f64,
        offset: u64,
        digest: bool,
        streams: Option<usize>,
        path: Option<&str>,
        place: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let (domain, handle) = (self.domain(py, "write memory")?, self::handle(py, handle)?);
        let (memory, options) =
            (memory(py, segments, owner, place)?, options(py, timeout_s, digest, streams, path)?);
        let cancelled = Arc::clone(&options.cancelled);
        let write = move || domain.write_from(&handle, offset, &memory, &options);
        report(py, &waited(py, write, || cancelled.store(true, Ordering::Relaxed))?)
    }

    fn close(&self, py: Python<'_>) {
        let Some(domain) = self.domain.here() else { return };
        let open = domain.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| {
            drop(open);
            carrier::await_visits(LAST_VISITS);
        });
    }
}

/// Memory that processes of this host can map.
#[pyclass(frozen, module = "sky_monarch._core")]
pub struct SharedBuffer {
    memory: Memory,
}

#[pymethods]
impl SharedBuffer {
    #[new]
    fn new(py: Python<'_>, nbytes: usize) -> PyResult<Self> {
        let memory = rdma::allocate(nbytes).map_err(|error| to_python(py, &error))?;
        Ok(Self { memory })
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.memory.length()
    }

    #[allow(clippy::undocumented_unsafe_blocks, reason = "the caller is Python's buffer protocol")]
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let parts = slf.get().memory.parts(0, slf.get().memory.length(), 1);
        let Some(part) = parts.ok().and_then(|parts| parts.first().copied()) else {
            return Err(PyBufferError::new_err("it has no bytes"));
        };
        let length = ffi::Py_ssize_t::try_from(part.length)?;
        // SAFETY: `view` is Python's; the memory is writable, and lives as long as this object, which the view holds.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), part.address as *mut c_void, length, 0, flags)
        };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// Address and length of a contiguous buffer. Valid for as long as the caller holds a view of it.
#[pyfunction]
pub fn buffer_segment(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<(usize, usize)> {
    let flags = if writable { ffi::PyBUF_WRITABLE } else { ffi::PyBUF_SIMPLE };
    let mut view = ffi::Py_buffer::new();
    // SAFETY: the object is alive, and the view is released below if it was taken.
    if unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut view, flags) } != 0 {
        return Err(PyErr::fetch(object.py()));
    }
    let segment = (view.buf as usize, view.len.unsigned_abs());
    // SAFETY: taken above, once.
    unsafe { ffi::PyBuffer_Release(&raw mut view) };
    Ok(segment)
}
