//! Payloads of actor messages between Python's buffers and the core's.

use std::os::raw::c_int;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList};
use sky_monarch_core::mesh::{Blob, Payload};

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

/// A payload from a body and buffers; large ones are copied once, into shared memory, with the GIL released.
pub fn from_objects(py: Python<'_>, body: &[u8], buffers: Option<Vec<PyBuffer<u8>>>) -> PyResult<Payload> {
    let buffers = buffers.unwrap_or_default();
    let mut parts = Vec::with_capacity(1 + buffers.len());
    parts.push(body);
    for buffer in &buffers {
        if !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err("an out-of-band buffer is not contiguous"));
        }
        if buffer.len_bytes() == 0 {
            parts.push(&[]);
            continue;
        }
        // SAFETY: `buffers` holds the export, so the memory stays where it is; that nobody writes to it meanwhile is up
        // to the program, as with every buffer that Python hands to a system call.
        parts.push(unsafe {
            std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>().cast_const(), buffer.len_bytes())
        });
    }
    py.detach(|| Payload::from_parts(parts.into_iter())).map_err(|error| to_python(py, &error))
}
