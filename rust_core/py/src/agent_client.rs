//! `AgentClient`: a session's connection to its agent.

use std::collections::BTreeMap;
use std::time::Duration;

use pyo3::prelude::*;
use sky_monarch_core::agent_client::AgentClient as Client;
use sky_monarch_core::channel::Credentials;
use sky_monarch_core::protocol::{Peer, Slot};
use sky_monarch_core::wire::Address;
use sky_monarch_core::{Error, Result};

use crate::convert::{duration, to_object};
use crate::error::to_python;
use crate::runtime::{Local, wait};

/// Time that `close` gives the last reports to leave.
const CLOSE_DEADLINE: Duration = Duration::from_secs(3);

/// A session's connection to its agent.
#[pyclass(frozen, module = "sky_monarch._core")]
pub struct AgentClient {
    client: Local<Client>,
}

#[pymethods]
impl AgentClient {
    #[new]
    #[pyo3(signature = (address, token, run_id, replica, rank, generation, target_step, timeout_s))]
    #[expect(clippy::too_many_arguments, reason = "all are keywords in Python")]
    fn new(
        py: Python<'_>,
        address: &str,
        token: &str,
        run_id: &str,
        replica: u32,
        rank: u32,
        generation: u64,
        target_step: Option<u64>,
        timeout_s: f64,
    ) -> PyResult<Self> {
        let address: Address = address.parse().map_err(|error: Error| to_python(py, &error))?;
        let deadline = duration(py, "timeout_s", timeout_s)?;
        let slot = Slot { replica, rank };
        let peer = Peer::Session { slot, generation, pid: std::process::id(), target_step };
        let client = wait(py, Client::connect(address, peer, Credentials::new(run_id, token), deadline))?;
        Ok(Self { client: Local::new(client) })
    }

    #[pyo3(signature = (step, quorum_id=None, participants=None, metrics=None))]
    fn committed(
        &self,
        py: Python<'_>,
        step: u64,
        quorum_id: Option<i64>,
        participants: Option<u32>,
        metrics: Option<BTreeMap<String, f64>>,
    ) -> PyResult<()> {
        let client = self.client.get(py, "report a commit")?;
        let said = client.committed(step, quorum_id, participants, metrics.unwrap_or_default());
        said.map_err(|error| to_python(py, &error))
    }

    fn done(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        self.client.get(py, "report the end")?.done(step).map_err(|error| to_python(py, &error))
    }

    fn pause(&self, py: Python<'_>, what: &str, limit_s: f64) -> PyResult<()> {
        let client = self.client.get(py, "report a pause")?;
        let limit = duration(py, "limit_s", limit_s)?;
        client.pause(what, limit).map_err(|error| to_python(py, &error))
    }

    fn recv<'py>(&self, py: Python<'py>, timeout_s: f64) -> PyResult<Option<Bound<'py, PyAny>>> {
        let client = self.client.get(py, "receive a command")?;
        let limit = duration(py, "timeout_s", timeout_s)?;
        let command = wait(py, client.recv(limit))?;
        command.map(|command| to_object(py, &command)).transpose()
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Some(client) = self.client.here() else { return Ok(()) };
        let closing = async {
            client.close(CLOSE_DEADLINE).await;
            Result::Ok(())
        };
        wait(py, closing)
    }
}
