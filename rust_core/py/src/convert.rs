//! Values between Python and the core.

use std::time::Duration;

use pyo3::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sky_monarch_core::wire::tls::Identity;
use sky_monarch_core::{Error, ErrorKind};

use crate::error::to_python;

/// Thirty years: deadlines are added to clocks, which have an end.
const LONGEST_S: f64 = 1e9;

/// A duration from seconds.
pub fn duration(py: Python<'_>, name: &str, seconds: f64) -> PyResult<Duration> {
    if (0.0..=LONGEST_S).contains(&seconds) {
        return Ok(Duration::from_secs_f64(seconds));
    }
    let why = format!("{name} = {seconds} is not between 0 and {LONGEST_S} seconds");
    Err(to_python(py, &Error::new(ErrorKind::InvalidInput, "read a duration", why)))
}

/// Plain Python data (dicts, lists, strings, numbers) from a core value.
pub fn to_object<'py, T: Serialize>(py: Python<'py>, value: &T) -> PyResult<Bound<'py, PyAny>> {
    pythonize::pythonize(py, value).map_err(PyErr::from)
}

/// A certificate from its map of texts. The words of an error could repeat its key.
pub fn identity(object: &Bound<'_, PyAny>) -> PyResult<Identity> {
    pythonize::depythonize(object).map_err(|_| {
        let why = "it is no identity: {name, ca_pem, cert_pem, key_pem}";
        to_python(object.py(), &Error::new(ErrorKind::InvalidInput, "read a certificate", why))
    })
}

/// A core value from plain Python data.
pub fn from_object<T: DeserializeOwned>(object: &Bound<'_, PyAny>, what: &str) -> PyResult<T> {
    pythonize::depythonize(object).map_err(|error| {
        let why = format!("this is no {what}: {error}");
        to_python(object.py(), &Error::new(ErrorKind::InvalidInput, "read a message", why))
    })
}
