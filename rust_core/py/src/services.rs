//! The services that run as processes of their own: agent, lighthouse and relay.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use serde::Serialize;
use sky_monarch_core::agent::{self, forked, keeper};
use sky_monarch_core::lighthouse;
use sky_monarch_core::tunnel;
use sky_monarch_core::wire::tls::{Authority, KeptAuthority};
use sky_monarch_core::{Error, ErrorKind};
use tracing_subscriber::EnvFilter;

use crate::convert::duration;
use crate::error::to_python;

/// Runs the agent until it ends; returns its exit code.
#[pyfunction]
pub fn run_agent(py: Python<'_>, config_json: &str) -> PyResult<i32> {
    log_to_stderr();
    py.detach(|| agent::run(config_json)).map_err(|error| to_python(py, &error))
}

/// Makes the authority of one run, and a certificate of it for each name; JSON, identities by name. The authority itself
/// is gone with this call.
#[pyfunction]
pub fn issue_identities(
    py: Python<'_>,
    run_id: &str,
    names: Vec<String>,
    lifetime_s: f64,
) -> PyResult<String> {
    let lifetime = duration(py, "lifetime_s", lifetime_s)?;
    let issued = Authority::new(run_id, lifetime).and_then(|authority| {
        let named = names.iter().map(|name| Ok((name.clone(), authority.issue(name)?)));
        named.collect::<sky_monarch_core::Result<BTreeMap<_, _>>>()
    });
    to_json(&issued.map_err(|error| to_python(py, &error))?)
}

/// Makes the authority of one run; JSON.
#[pyfunction]
pub fn make_authority(py: Python<'_>, run_id: &str, lifetime_s: f64) -> PyResult<String> {
    let lifetime = duration(py, "lifetime_s", lifetime_s)?;
    let authority = Authority::new(run_id, lifetime).map_err(|error| to_python(py, &error))?;
    to_json(&authority.keep())
}

/// Issues a certificate of an authority; JSON.
#[pyfunction]
pub fn issue_identity(py: Python<'_>, authority: &str, name: &str) -> PyResult<String> {
    // serde's words could repeat the key.
    let damaged =
        |_| Error::new(ErrorKind::InvalidInput, "take up a certificate authority", "its JSON is damaged");
    let kept: Result<KeptAuthority, _> = serde_json::from_str(authority).map_err(damaged);
    let issued = kept.and_then(Authority::from_kept).and_then(|authority| authority.issue(name));
    to_json(&issued.map_err(|error| to_python(py, &error))?)
}

fn to_json(value: &impl Serialize) -> PyResult<String> {
    serde_json::to_string(value).map_err(|cause| pyo3::exceptions::PyRuntimeError::new_err(cause.to_string()))
}

/// Makes this process the one that the descendants of a dead child are handed to.
#[pyfunction]
pub fn adopt_orphans(py: Python<'_>) -> PyResult<()> {
    keeper::adopt_orphans().map_err(|error| to_python(py, &error))
}

/// Kills and reaps every descendant of this process; returns the pids killed, and those alive all the same.
#[pyfunction]
pub fn end_descendants(py: Python<'_>, limit_s: f64) -> PyResult<(Vec<u32>, Vec<u32>)> {
    let limit = duration(py, "limit_s", limit_s)?;
    Ok(py.detach(|| keeper::end_descendants(limit)))
}

/// Makes this process, which a fork server has just forked twice, as good as one that `agent` has started itself.
#[pyfunction]
pub fn settle_forked(py: Python<'_>, agent: u32, spawn_id: &str, nice: i32, limit_s: f64) -> PyResult<()> {
    let limit = duration(py, "limit_s", limit_s)?;
    forked::settle(agent, spawn_id, nice, limit).map_err(|error| to_python(py, &error))
}

/// Runs the lighthouse until it ends; returns its exit code.
#[pyfunction]
pub fn run_lighthouse(py: Python<'_>, config_json: &str) -> PyResult<i32> {
    log_to_stderr();
    py.detach(|| lighthouse::run(config_json)).map_err(|error| to_python(py, &error))
}

/// Runs the relay of a tunnel until it ends; returns its exit code.
#[pyfunction]
pub fn run_relay(py: Python<'_>, config_json: &str) -> PyResult<i32> {
    log_to_stderr();
    py.detach(|| tunnel::run(config_json)).map_err(|error| to_python(py, &error))
}

/// The process belongs to the service, so its standard error does too. `SKY_MONARCH_LOG` filters, `info` by default.
fn log_to_stderr() {
    let filter = EnvFilter::try_from_env("SKY_MONARCH_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(std::io::stderr);
    // An error means that it was set up already.
    drop(log.try_init());
}
