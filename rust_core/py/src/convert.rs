//! Values between Python and the core.

use std::time::Duration;

use pyo3::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sky_monarch_core::{Error, ErrorKind};

use crate::error::to_python;

/// A duration from seconds.
pub fn duration(py: Python<'_>, name: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|error| {
        let why = format!("{name} = {seconds}: {error}");
        to_python(py, &Error::new(ErrorKind::InvalidInput, "read a duration", why))
    })
}

/// Plain Python data (dicts, lists, strings, numbers) from a core value.
pub fn to_object<'py, T: Serialize>(py: Python<'py>, value: &T) -> PyResult<Bound<'py, PyAny>> {
    pythonize::pythonize(py, value).map_err(PyErr::from)
}

/// A core value from plain Python data.
pub fn from_object<T: DeserializeOwned>(object: &Bound<'_, PyAny>, what: &str) -> PyResult<T> {
    pythonize::depythonize(object).map_err(|error| {
        let why = format!("this is no {what}: {error}");
        to_python(object.py(), &Error::new(ErrorKind::InvalidInput, "read a message", why))
    })
}
