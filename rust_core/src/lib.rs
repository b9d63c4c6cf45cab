//! The core of sky-monarch, as a library that knows no Python.

pub mod error;
pub mod lighthouse;
pub mod protocol;
pub mod torchft;

pub use error::{Error, ErrorKind, Result};
