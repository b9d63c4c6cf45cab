//! `ActorGateway`: how the processes of this host reach those of others.

use std::time::Duration;

use pyo3::prelude::*;
use sky_monarch_core::mesh::{Event, Gateway, GatewayOptions, report_killed};
use sky_monarch_core::wire::Address;

use crate::convert::{duration, identity};
use crate::error::to_python;
use crate::runtime::{Local, runtime, wait};

/// The gateway of this host.
#[pyclass(frozen, module = "sky_monarch._core")]
pub struct ActorGateway {
    gateway: Local<Gateway>,
}

fn address(py: Python<'_>, text: &str) -> PyResult<Address> {
    text.parse().map_err(|error| to_python(py, &error))
}

const USE: &str = "use an actor gateway";

#[pymethods]
impl ActorGateway {
    #[new]
    #[pyo3(signature = (folder, token, host, version, identity, *, hub, listen=None))]
    #[expect(clippy::too_many_arguments, reason = "made once; a dict would hide what is missing")]
    fn new(
        py: Python<'_>,
        folder: &str,
        token: &str,
        host: &str,
        version: &str,
        identity: &Bound<'_, PyAny>,
        hub: bool,
        listen: Option<&str>,
    ) -> PyResult<Self> {
        let options = GatewayOptions {
            folder: folder.into(),
            token: token.to_owned(),
            host: host.to_owned(),
            version: version.to_owned(),
            identity: self::identity(identity)?,
            hub,
        };
        let listen = listen.map(|listen| address(py, listen)).transpose()?;
        let gateway = wait(py, Gateway::start(options, listen.as_ref()))?;
        Ok(Self { gateway: Local::new(gateway) })
    }

    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<Option<String>> {
        Ok(self.gateway.get(py, USE)?.address().map(ToString::to_string))
    }

    fn dial(&self, py: Python<'_>, address: &str, name: &str, timeout_s: f64) -> PyResult<(String, String)> {
        let (address, limit) = (self::address(py, address)?, duration(py, "timeout_s", timeout_s)?);
        wait(py, self.gateway.get(py, USE)?.dial(&address, name, limit))
    }

    fn line(&self, py: Python<'_>, folder: &str) -> PyResult<Option<u64>> {
        Ok(self.gateway.get(py, USE)?.line(folder))
    }

    #[pyo3(signature = (folder, address, via))]
    fn route(&self, py: Python<'_>, folder: &str, address: Option<&str>, via: &str) -> PyResult<()> {
        let address = address.map(|address| self::address(py, address)).transpose()?;
        self.gateway.get(py, USE)?.route(folder, address, via);
        Ok(())
    }

    /// Not for the main thread: Ctrl-C does not end it.
    fn event(
        &self,
        py: Python<'_>,
        timeout_s: f64,
    ) -> PyResult<Option<(&'static str, String, String, String)>> {
        let limit: Duration = duration(py, "timeout_s", timeout_s)?;
        let gateway = self.gateway.get(py, USE)?;
        let runtime = runtime().map_err(|error| to_python(py, &error))?;
        Ok(py.detach(|| runtime.block_on(gateway.event(limit))).map(|event| match event {
            Event::Joined { folder, host, certificate } => ("joined", folder, host, certificate),
            Event::Lost { folder, reason, left } => {
                ("lost", folder, reason, if left { "left".to_owned() } else { String::new() })
            }
        }))
    }

    fn hang_up(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        self.gateway.get(py, USE)?.hang_up(name);
        Ok(())
    }

    fn drop_host(&self, py: Python<'_>, folder: &str, reason: &str) -> PyResult<()> {
        self.gateway.get(py, USE)?.drop_host(folder, reason);
        Ok(())
    }

    fn place(&self, py: Python<'_>, folder: &str, by: &str) -> PyResult<()> {
        self.gateway.get(py, USE)?.place(folder, by);
        Ok(())
    }

    fn sessions(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.gateway.get(py, USE)?.sessions())
    }

    fn close(&self, py: Python<'_>) {
        if let Some(gateway) = self.gateway.here() {
            py.detach(|| gateway.close());
        }
    }
}

/// Tells the gateway at `address` that the one which had dialled it was killed.
#[pyfunction]
pub fn actor_host_killed(
    py: Python<'_>,
    identity: &Bound<'_, PyAny>,
    address: (&str, &str),
    who: (&str, u64),
    timeout_s: f64,
) -> PyResult<()> {
    let (at, limit) = (self::address(py, address.0)?, duration(py, "timeout_s", timeout_s)?);
    let identity = self::identity(identity)?;
    wait(py, report_killed(&identity, (&at, address.1), who, limit))
}
