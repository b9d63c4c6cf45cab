//! The two services that run as processes of their own: agent and lighthouse.

use pyo3::prelude::*;
use sky_monarch_core::{agent, lighthouse};
use tracing_subscriber::EnvFilter;

use crate::error::to_python;

/// Runs the agent until it ends; returns its exit code.
#[pyfunction]
pub fn run_agent(py: Python<'_>, config_json: &str) -> PyResult<i32> {
    log_to_stderr();
    py.detach(|| agent::run(config_json)).map_err(|error| to_python(py, &error))
}

/// Runs the lighthouse until it ends; returns its exit code.
#[pyfunction]
pub fn run_lighthouse(py: Python<'_>, config_json: &str) -> PyResult<i32> {
    log_to_stderr();
    py.detach(|| lighthouse::run(config_json)).map_err(|error| to_python(py, &error))
}

/// The process belongs to the service, so its standard error does too. `SKY_MONARCH_LOG` filters, `info` by default.
fn log_to_stderr() {
    let filter = EnvFilter::try_from_env("SKY_MONARCH_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(std::io::stderr);
    // An error means that it was set up already.
    drop(log.try_init());
}
