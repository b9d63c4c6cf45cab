//! What the host's accelerators say of themselves, and what masks leave of them.

use pyo3::prelude::*;
use sky_monarch_core::gpu::{self, mask::Masks};

use crate::error::to_python;

/// Loads this platform's libraries and tries each device; JSON. May hang where a device does.
#[pyfunction]
#[pyo3(signature = (*, bench=false))]
pub fn gpu_report(py: Python<'_>, bench: bool) -> PyResult<String> {
    let report = py.detach(|| gpu::report(bench));
    serde_json::to_string(&report)
        .map_err(|cause| pyo3::exceptions::PyRuntimeError::new_err(cause.to_string()))
}

/// Indices of the devices that masks leave, in the order in which a process counts them.
#[pyfunction]
#[pyo3(signature = (uuids, *, rocr=None, hip=None, cuda=None))]
pub fn visible_devices(
    py: Python<'_>,
    uuids: Vec<String>,
    rocr: Option<String>,
    hip: Option<String>,
    cuda: Option<String>,
) -> PyResult<Vec<usize>> {
    Masks { rocr, hip, cuda }.visible(&uuids).map_err(|error| to_python(py, &error.into()))
}
