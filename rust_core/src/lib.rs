//! The core of sky-monarch, as a library that knows no Python.

pub mod actor;
pub mod agent;
pub mod agent_client;
pub mod channel;
pub mod comm;
pub mod error;
pub mod gpu;
pub mod lighthouse;
pub mod lighthouse_client;
pub mod mesh;
pub mod protocol;
pub mod rdma;
mod seqpacket;
mod store_helper;
pub mod torchft;
pub mod tunnel;
pub mod wire;

pub use error::{Error, ErrorKind, Result};
