//! `LighthouseClient`: asks a lighthouse for quorums.

use pyo3::prelude::*;
use sky_monarch_core::lighthouse_client::{LighthouseClient as Client, Member};

use crate::convert::{duration, to_object};
use crate::runtime::{Local, wait};

/// A connection to a lighthouse.
#[pyclass(frozen, module = "sky_monarch._core")]
pub struct LighthouseClient {
    client: Local<Client>,
}

#[pymethods]
impl LighthouseClient {
    #[new]
    fn new(py: Python<'_>, address: &str, connect_timeout_s: f64) -> PyResult<Self> {
        let deadline = duration(py, "connect_timeout_s", connect_timeout_s)?;
        let client = wait(py, Client::connect(address, deadline))?;
        Ok(Self { client: Local::new(client) })
    }

    #[pyo3(signature = (replica_id, timeout_s=5.0))]
    fn heartbeat(&self, py: Python<'_>, replica_id: &str, timeout_s: f64) -> PyResult<()> {
        let client = self.client.get(py, "send a heartbeat")?;
        let deadline = duration(py, "timeout_s", timeout_s)?;
        wait(py, client.heartbeat(replica_id, deadline))
    }

    #[pyo3(signature = (
        replica_id, step, *, address="", store_address="", world_size=1, shrink_only=false, data="",
        commit_failures=0, timeout_s
    ))]
    #[expect(clippy::too_many_arguments, reason = "all but two are keywords in Python")]
    fn quorum<'py>(
        &self,
        py: Python<'py>,
        replica_id: String,
        step: i64,
        address: &str,
        store_address: &str,
        world_size: u64,
        shrink_only: bool,
        data: &str,
        commit_failures: i64,
        timeout_s: f64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client.get(py, "get a quorum")?;
        let deadline = duration(py, "timeout_s", timeout_s)?;
        let member = Member {
            replica_id,
            address: address.to_owned(),
            store_address: store_address.to_owned(),
            step,
            world_size,
            shrink_only,
            data: data.to_owned(),
            commit_failures,
        };
        let quorum = wait(py, client.quorum(member, deadline))?;
        to_object(py, &quorum)
    }
}
