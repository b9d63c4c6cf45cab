//! `LighthouseControl`: tells a lighthouse who died.

use pyo3::prelude::*;
use sky_monarch_core::channel::Credentials;
use sky_monarch_core::lighthouse::ControlClient;

use crate::convert::duration;
use crate::error::to_python;
use crate::runtime::{Local, wait};

/// A supervisor's line to a lighthouse.
#[pyclass(frozen, module = "sky_monarch._core")]
pub struct LighthouseControl {
    client: Local<ControlClient>,
}

#[pymethods]
impl LighthouseControl {
    #[new]
    fn new(py: Python<'_>, address: &str, token: &str, run_id: &str) -> PyResult<Self> {
        let address = address.parse().map_err(|error| to_python(py, &error))?;
        Ok(Self { client: Local::new(ControlClient::new(address, Credentials::new(run_id, token))) })
    }

    fn evict(&self, py: Python<'_>, replica: u32, generation: u64, timeout_s: f64) -> PyResult<Option<i64>> {
        let client = self.client.get(py, "evict a generation")?;
        let deadline = duration(py, "timeout_s", timeout_s)?;
        wait(py, client.evict(replica, generation, deadline))
    }

    fn expect(&self, py: Python<'_>, replicas: u32, timeout_s: f64) -> PyResult<()> {
        let client = self.client.get(py, "tell the lighthouse")?;
        let deadline = duration(py, "timeout_s", timeout_s)?;
        wait(py, client.expect(replicas, deadline))
    }

    fn state(&self, py: Python<'_>, timeout_s: f64) -> PyResult<String> {
        let client = self.client.get(py, "look at the lighthouse")?;
        let deadline = duration(py, "timeout_s", timeout_s)?;
        wait(py, client.state(deadline))
    }
}
