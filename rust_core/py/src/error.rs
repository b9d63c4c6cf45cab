//! Core errors as the classes of `sky_monarch/errors.py`: one kind, one class.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyType;
use sky_monarch_core::{Error, ErrorKind};

/// Name of the class that stands for `kind`.
const fn class_name(kind: ErrorKind) -> Option<&'static str> {
    match kind {
        ErrorKind::InvalidInput => Some("ConfigError"),
        ErrorKind::Refused => Some("PeerRefusedError"),
        ErrorKind::TimedOut => Some("ChannelTimeoutError"),
        ErrorKind::Closed => Some("ChannelClosedError"),
        ErrorKind::TooLarge => Some("FrameTooLargeError"),
        ErrorKind::Protocol => Some("ProtocolError"),
        ErrorKind::Io => Some("SystemCallError"),
        ErrorKind::Quorum => Some("QuorumError"),
        ErrorKind::Device => Some("DeviceError"),
        ErrorKind::NotJoined => Some("NotJoinedError"),
        ErrorKind::Communicator => Some("CommunicatorError"),
        ErrorKind::OutOfBounds => Some("OutOfBoundsError"),
        ErrorKind::Forbidden => Some("AccessForbiddenError"),
        ErrorKind::Stale => Some("StaleHandleError"),
        ErrorKind::Corrupt => Some("DigestError"),
        // The enum may grow: a test holds this table to `ErrorKind::ALL`.
        _ => None,
    }
}

/// The exception for a core error. The classes are looked up when the first one is raised, not at import.
pub fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    let class = class_name(error.kind()).unwrap_or("SkyMonarchError");
    let lookup = || -> PyResult<PyErr> {
        let class = py.import("sky_monarch.errors")?.getattr(class)?.cast_into::<PyType>()?;
        Ok(PyErr::from_type(class, error.to_string()))
    };
    lookup().unwrap_or_else(|lookup| {
        let broken = PyRuntimeError::new_err(error.to_string());
        broken.set_cause(py, Some(lookup));
        broken
    })
}

/// Names of all kinds of error that the core knows.
#[pyfunction]
pub fn error_kinds() -> Vec<&'static str> {
    ErrorKind::ALL.iter().map(|kind| kind.name()).collect()
}

/// Raises the error class of one kind, so that the mapping can be checked from outside.
#[pyfunction]
pub fn raise_kind(py: Python<'_>, kind: &str, message: &str) -> PyResult<()> {
    let known = ErrorKind::ALL.into_iter().find(|known| known.name() == kind);
    let error = match known {
        Some(known) => Error::new(known, "do this", message),
        None => {
            Error::new(ErrorKind::InvalidInput, "raise an error", format!("{kind:?} is no kind of error"))
        }
    };
    Err(to_python(py, &error))
}
