//! The core of sky-monarch, as a library that knows no Python.

pub mod agent;
pub mod error;
pub mod protocol;

pub use error::{Error, ErrorKind, Result};
