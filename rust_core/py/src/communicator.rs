//! `Communicator` and `DeviceBuffer`: collectives between devices, and memory of one.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use sky_monarch_core::comm::{self, Buffer, Options, Transfer};
use sky_monarch_core::gpu::abi::ccl::{DataType, ReduceOp};
use sky_monarch_core::gpu::abi::device::StreamHandle;
use sky_monarch_core::gpu::{self, GpuError, GpuResult, GpuRuntime, Memory, MemoryKind, Stream};
use sky_monarch_core::{Error, ErrorKind};

use crate::convert::duration;
use crate::error::to_python;

/// How long Ctrl-C may have to wait.
const SIGNAL_CHECK: Duration = Duration::from_millis(100);
/// For one copy of a `DeviceBuffer`.
const COPY_LIMIT: Duration = Duration::from_secs(60);

/// Address and length of a device's memory.
type Range = (u64, usize);

fn refused(py: Python<'_>, error: GpuError) -> PyErr {
    to_python(py, &error.into())
}

fn invalid(py: Python<'_>, why: String) -> PyErr {
    to_python(py, &Error::new(ErrorKind::InvalidInput, "use a communicator", why))
}

fn runtime(py: Python<'_>) -> PyResult<&'static dyn GpuRuntime> {
    gpu::runtime().map_err(|error| {
        to_python(py, &Error::new(ErrorKind::Device, "open the runtime of the devices", error.to_string()))
    })
}

fn dtype(py: Python<'_>, name: &str) -> PyResult<DataType> {
    Ok(match name {
        "int8" => DataType::INT8,
        "uint8" => DataType::UINT8,
        "int32" => DataType::INT32,
        "uint32" => DataType::UINT32,
        "int64" => DataType::INT64,
        "uint64" => DataType::UINT64,
        "float16" => DataType::FLOAT16,
        "bfloat16" => DataType::BFLOAT16,
        "float32" => DataType::FLOAT32,
        "float64" => DataType::FLOAT64,
        "float8_e4m3fn" => DataType::FLOAT8_E4M3,
        "float8_e5m2" => DataType::FLOAT8_E5M2,
        _ => return Err(invalid(py, format!("elements of type {name} cannot be exchanged"))),
    })
}

fn op(py: Python<'_>, name: &str) -> PyResult<ReduceOp> {
    Ok(match name {
        "sum" => ReduceOp::SUM,
        "prod" => ReduceOp::PROD,
        "max" => ReduceOp::MAX,
        "min" => ReduceOp::MIN,
        "avg" => ReduceOp::AVG,
        _ => return Err(invalid(py, format!("{name:?} is no reduction: sum, prod, max, min or avg"))),
    })
}

const fn buffer((address, bytes): Range) -> Buffer {
    Buffer { address, bytes }
}

/// A new id, which one rank makes and every rank starts with.
#[pyfunction]
pub fn communicator_id<'py>(py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
    let platform = runtime(py)?.platform();
    let id = py.detach(|| comm::unique_id(platform)).map_err(|error| refused(py, error))?;
    Ok(PyBytes::new(py, &id))
}

/// A stream of the runtime, or one of somebody else's.
#[derive(Clone, Copy)]
struct On(StreamHandle);

// SAFETY: the vendors let any thread use a stream.
unsafe impl Send for On {}

struct Inner {
    comm: comm::Communicator,
    stream: Stream,
}

/// A rank's end of a communicator.
#[pyclass(frozen, module = "sky_monarch._core")]
pub struct Communicator {
    inner: Mutex<Option<Arc<Inner>>>,
    pid: u32,
    rank: u32,
    ranks: u32,
}

impl Communicator {
    fn inner(&self, py: Python<'_>) -> PyResult<Arc<Inner>> {
        let open = self.inner.lock().unwrap_or_else(PoisonError::into_inner).clone();
        open.filter(|_| self.pid == std::process::id()).ok_or_else(|| {
            let why = "it was closed, or belongs to the process that forked this one";
            to_python(py, &Error::new(ErrorKind::Communicator, "use a communicator", why))
        })
    }

    /// Put a collective on a stream, with the GIL released: the library may wait for its own threads.
    fn put(
        &self,
        py: Python<'_>,
        stream: Option<usize>,
        run: impl FnOnce(&comm::Communicator, StreamHandle) -> GpuResult<()> + Send,
    ) -> PyResult<()> {
        let inner = self.inner(py)?;
        let on = On(stream.map_or_else(|| inner.stream.handle(), |handle| handle as StreamHandle));
        py.detach(move || {
            let On(handle) = { on };
            run(&inner.comm, handle)
        })
        .map_err(|error| refused(py, error))
    }
}

#[pymethods]
impl Communicator {
    #[new]
    #[pyo3(signature = (unique_id, rank, ranks, *, device, start_s, operation_s, abort_s))]
    #[expect(clippy::too_many_arguments, reason = "all but three are keywords in Python")]
    fn new(
        py: Python<'_>,
        unique_id: Vec<u8>,
        rank: u32,
        ranks: u32,
        device: u32,
        start_s: f64,
        operation_s: f64,
        abort_s: f64,
    ) -> PyResult<Self> {
        let options = Options {
            start_limit: duration(py, "start_s", start_s)?,
            operation_limit: duration(py, "operation_s", operation_s)?,
            abort_limit: duration(py, "abort_s", abort_s)?,
        };
        let runtime = runtime(py)?;
        let joined = py.detach(|| {
            let stream = Stream::new(runtime, device)?;
            let comm = comm::Communicator::start(runtime, device, &unique_id, (rank, ranks), options)?;
            Ok(Inner { comm, stream })
        });
        let inner = Mutex::new(Some(Arc::new(joined.map_err(|error| refused(py, error))?)));
        Ok(Self { inner, pid: std::process::id(), rank, ranks })
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.rank
    }

    #[getter]
    fn ranks(&self) -> u32 {
        self.ranks
    }

    #[pyo3(signature = (send, receive, dtype, op, owner, *, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "as the core's")]
    fn all_reduce(
        &self,
        py: Python<'_>,
        send: Range,
        receive: Range,
        dtype: &str,
        op: &str,
        owner: Py<PyAny>,
        stream: Option<usize>,
    ) -> PyResult<()> {
        let (dtype, op) = (self::dtype(py, dtype)?, self::op(py, op)?);
        let ends = (buffer(send), buffer(receive));
        // SAFETY: here and below: memory of `owner`, which is kept; stream and order are the caller's, as `_core.pyi` says.
        self.put(py, stream, |comm, on| unsafe { comm.all_reduce(ends, dtype, op, on, Box::new(owner)) })
    }

    #[pyo3(signature = (send, receive, dtype, root, owner, *, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "as the core's")]
    fn broadcast(
        &self,
        py: Python<'_>,
        send: Range,
        receive: Range,
        dtype: &str,
        root: u32,
        owner: Py<PyAny>,
        stream: Option<usize>,
    ) -> PyResult<()> {
        let dtype = self::dtype(py, dtype)?;
        let ends = (buffer(send), buffer(receive));
        // SAFETY: as above.
        self.put(py, stream, |comm, on| unsafe { comm.broadcast(ends, dtype, root, on, Box::new(owner)) })
    }

    #[pyo3(signature = (send, receive, dtype, owner, *, stream=None))]
    fn all_gather(
        &self,
        py: Python<'_>,
        send: Range,
        receive: Range,
        dtype: &str,
        owner: Py<PyAny>,
        stream: Option<usize>,
    ) -> PyResult<()> {
        let dtype = self::dtype(py, dtype)?;
        let ends = (buffer(send), buffer(receive));
        // SAFETY: as above.
        self.put(py, stream, |comm, on| unsafe { comm.all_gather(ends, dtype, on, Box::new(owner)) })
    }

    #[pyo3(signature = (send, receive, dtype, op, owner, *, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "as the core's")]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        send: Range,
        receive: Range,
        dtype: &str,
        op: &str,
        owner: Py<PyAny>,
        stream: Option<usize>,
    ) -> PyResult<()> {
        let (dtype, op) = (self::dtype(py, dtype)?, self::op(py, op)?);
        let ends = (buffer(send), buffer(receive));
        // SAFETY: as above.
        self.put(py, stream, |comm, on| unsafe { comm.reduce_scatter(ends, dtype, op, on, Box::new(owner)) })
    }

    /// Sends and receives at once, each `(peer, range)`.
    #[pyo3(signature = (sends, receives, owner, *, stream=None))]
    fn exchange(
        &self,
        py: Python<'_>,
        sends: Vec<(u32, Range)>,
        receives: Vec<(u32, Range)>,
        owner: Py<PyAny>,
        stream: Option<usize>,
    ) -> PyResult<()> {
        let sends = sends.into_iter().map(|(to, from)| Transfer::Send { to, from: buffer(from) });
        let receives =
            receives.into_iter().map(|(from, into)| Transfer::Receive { from, into: buffer(into) });
        let all: Vec<Transfer> = sends.chain(receives).collect();
        // SAFETY: as above.
        self.put(py, stream, |comm, on| unsafe { comm.exchange(&all, on, Box::new(owner)) })
    }

    /// Wait until a stream, by default the communicator's own, has done what is on it.
    #[pyo3(signature = (timeout_s, *, stream=None))]
    fn wait(&self, py: Python<'_>, timeout_s: f64, stream: Option<usize>) -> PyResult<()> {
        let limit = duration(py, "timeout_s", timeout_s)?;
        let (done, outcome) = std::sync::mpsc::sync_channel(1);
        let inner = self.inner(py)?;
        let on = On(stream.map_or_else(|| inner.stream.handle(), |handle| handle as StreamHandle));
        std::thread::spawn(move || {
            let On(handle) = { on };
            // SAFETY: the communicator's own stream lives in `inner`; another one is the caller's, for as long as this waits.
            let waited = unsafe { inner.comm.wait(handle, limit) };
            // Nobody waits any more after Ctrl-C.
            let _unheard = done.send(waited);
        });
        let outcome = Mutex::new(outcome);
        loop {
            let slice = py
                .detach(|| outcome.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(SIGNAL_CHECK));
            match slice {
                Ok(waited) => return waited.map_err(|error| refused(py, error)),
                Err(_) => py.check_signals()?,
            }
        }
    }

    /// Why it is over; None while it is not.
    fn failure(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let inner = self.inner(py)?;
        Ok(inner.comm.failure().map(|error| error.to_string()))
    }

    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner(py)?;
        py.detach(|| inner.comm.abort());
        Ok(())
    }

    /// End it in order; all ranks have to.
    fn close(&self, py: Python<'_>, timeout_s: f64) -> PyResult<()> {
        let limit = duration(py, "timeout_s", timeout_s)?;
        if self.pid != std::process::id() {
            return Ok(());
        }
        let taken = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(inner) = taken else { return Ok(()) };
        py.detach(|| match Arc::try_unwrap(inner) {
            Ok(Inner { comm, stream: _stream }) => comm.close(limit),
            // Another thread is at something with it: there is no end in order then.
            Err(shared) => {
                shared.comm.abort();
                Ok(())
            }
        })
        .map_err(|error| refused(py, error))
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let taken = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.pid != std::process::id() {
            std::mem::forget(taken); // its threads are the parent's
        } else if taken.is_some() {
            // An abort may take its time: not with the GIL.
            Python::attach(|py| py.detach(|| drop(taken)));
        }
    }
}

/// Memory of a device.
#[pyclass(frozen, module = "sky_monarch._core")]
pub struct DeviceBuffer {
    memory: Mutex<Memory>,
    stream: Stream,
    range: Range,
    device: u32,
}

#[pymethods]
impl DeviceBuffer {
    #[new]
    #[pyo3(signature = (nbytes, *, device=0))]
    fn new(py: Python<'_>, nbytes: usize, device: u32) -> PyResult<Self> {
        let runtime = runtime(py)?;
        let made = py.detach(|| {
            let memory = Memory::new(runtime, MemoryKind::Device { ordinal: device }, nbytes)?;
            Ok((memory, Stream::new(runtime, device)?))
        });
        let (memory, stream) = made.map_err(|error| refused(py, error))?;
        let range = (memory.address(), memory.bytes());
        Ok(Self { memory: Mutex::new(memory), stream, range, device })
    }

    #[getter]
    fn address(&self) -> u64 {
        self.range.0
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.range.1
    }

    #[getter]
    fn device(&self) -> u32 {
        self.device
    }

    #[pyo3(signature = (data, *, offset=0))]
    fn write(&self, py: Python<'_>, data: &[u8], offset: usize) -> PyResult<()> {
        py.detach(|| {
            let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
            memory.write(offset, data, &self.stream, COPY_LIMIT)
        })
        .map_err(|error| refused(py, error))
    }

    #[pyo3(signature = (nbytes=None, *, offset=0))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        nbytes: Option<usize>,
        offset: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let mut data = vec![0; nbytes.unwrap_or(self.range.1.saturating_sub(offset))];
        py.detach(|| {
            let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
            memory.read(offset, &mut data, &self.stream, COPY_LIMIT)
        })
        .map_err(|error| refused(py, error))?;
        Ok(PyBytes::new(py, &data))
    }
}
