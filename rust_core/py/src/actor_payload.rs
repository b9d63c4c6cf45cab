//! Payloads of actor messages between Python's buffers and the core's.

use std::os::raw::c_int;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList};
use sky_monarch_core::Result;
use sky_monarch_core::mesh::{Blob, Pages, Payload, SHARED_FROM, copy};

use crate::error::to_python;

/// Received memory, writable: a private copy-on-write mapping of what the sender shared.
#[pyclass(frozen, module = "sky_monarch._core")]
pub struct ActorBuffer {
    blob: Blob,
}

#[pymethods]
impl ActorBuffer {
    fn __len__(&self) -> usize {
        self.blob.len()
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("there is no view to fill"));
        }
        let (address, len) = {
            let this = slf.get();
            (this.blob.as_ptr().cast_mut(), this.blob.len())
        };
        let len = ffi::Py_ssize_t::try_from(len).map_err(|_| PyBufferError::new_err("it is too large"))?;
        let readonly = c_int::from(!slf.get().blob.is_shared());
        // SAFETY: the memory lives as long as this object, to which the view holds a reference; it is writable where
        // `readonly` is 0 (see `Blob::is_shared`).
        let filled =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), address.cast(), len, readonly, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// A message's body and its out-of-band buffers, as Python reads them.
pub fn to_objects<'py>(py: Python<'py>, blobs: &[Blob]) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyList>)> {
    let buffers = PyList::empty(py);
    let Some((body, rest)) = blobs.split_first() else {
        return Ok((PyBytes::new(py, b"").into_any(), buffers));
    };
    let body = match body.bytes() {
        Some(bytes) => PyBytes::new(py, bytes).into_any(),
        None => Bound::new(py, ActorBuffer { blob: body.clone() })?.into_any(),
    };
    for blob in rest {
        match blob.bytes() {
            // Writable, as it was where it comes from: an array on top of it may be changed in place.
            Some(bytes) => buffers.append(PyByteArray::new(py, bytes))?,
            None => buffers.append(Bound::new(py, ActorBuffer { blob: blob.clone() })?)?,
        }
    }
    Ok((body, buffers))
}

/// A payload from a body and buffers; `make` copies large ones into shared memory, with the GIL released.
pub fn from_objects(
    py: Python<'_>,
    body: &[u8],
    buffers: Option<Vec<PyBuffer<u8>>>,
    make: impl FnOnce(&mut dyn Iterator<Item = &[u8]>) -> Result<Payload> + Send,
) -> PyResult<Payload> {
    let buffers = buffers.unwrap_or_default();
    let mut parts = Vec::with_capacity(1 + buffers.len());
    parts.push(body);
    for buffer in &buffers {
        parts.push(bytes_in(buffer)?);
    }
    let large = parts.iter().any(|part| part.len() >= SHARED_FROM);
    let mut parts = parts.into_iter();
    // Small parts are copied sooner than the GIL is given up and taken back.
    let made = if large { py.detach(|| make(&mut parts)) } else { make(&mut parts) };
    made.map_err(|error| to_python(py, &error))
}

fn bytes_in(buffer: &PyBuffer<u8>) -> PyResult<&[u8]> {
    if !buffer.is_c_contiguous() {
        return Err(PyBufferError::new_err("an out-of-band buffer is not contiguous"));
    }
    if buffer.len_bytes() == 0 {
        return Ok(&[]);
    }
    // SAFETY: `buffer` holds the export, so the memory stays where it is; that nobody writes to it meanwhile is up to
    // the program, as with every buffer that Python hands to a system call.
    Ok(unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>().cast_const(), buffer.len_bytes()) })
}

/// The bytes of a large buffer, copied by several threads, with the GIL released.
#[pyfunction]
pub fn actor_bytes<'py>(py: Python<'py>, buffer: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    let buffer = PyBuffer::<u8>::get(buffer)?;
    let from = bytes_in(&buffer)?;
    let len = ffi::Py_ssize_t::try_from(from.len())?;
    // SAFETY: a new object, whose bytes are not set yet; without memory for it, it is null, with an exception set.
    let made = unsafe {
        let made = ffi::PyBytes_FromStringAndSize(std::ptr::null(), len);
        Bound::from_owned_ptr_or_err(py, made)?.cast_into_unchecked::<PyBytes>()
    };
    // SAFETY: `made` is a bytes object.
    let address = unsafe { ffi::PyBytes_AsString(made.as_ptr()) }.cast::<u8>().expose_provenance();
    py.detach(|| {
        let to = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: it has room for so many bytes, and nobody else knows it yet.
        unsafe { copy(from, to, Pages::Fresh) };
    });
    Ok(made)
}
