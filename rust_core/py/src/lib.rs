//! `sky_monarch._core`: converts, releases the GIL, calls the core, maps the error.

use pyo3::prelude::*;

#[pymodule]
fn _core(_module: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
