//! `ChannelServer`: the controller's end of its channels to the agents.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};
use pyo3::prelude::*;
use sky_monarch_core::channel::{
    ConnectionId, Credentials, Endpoint, Limits, Server, ServerEvent, admit_agent,
};
use sky_monarch_core::protocol::{Command, Report};
use sky_monarch_core::wire::{Address, inherited};
use sky_monarch_core::{Error, ErrorKind, Result};

use crate::convert::{from_object, identity, to_object};
use crate::error::to_python;
use crate::runtime::{Local, wait};

type AgentServer = Server<Command, Report>;

/// Listens for agents.
#[pyclass(frozen, module = "sky_monarch._core")]
pub struct ChannelServer {
    server: Local<Mutex<Option<AgentServer>>>,
    address: String,
    tls_address: Option<String>,
    ready: Arc<EventFd>,
}

#[pymethods]
impl ChannelServer {
    #[new]
    #[pyo3(signature = (address, token, run_id, *, identity=None, listener_fd=None))]
    fn new(
        py: Python<'_>,
        address: &str,
        token: &str,
        run_id: &str,
        identity: Option<&Bound<'_, PyAny>>,
        listener_fd: Option<RawFd>,
    ) -> PyResult<Self> {
        let address: Address = address.parse().map_err(|error: Error| to_python(py, &error))?;
        let identity = identity.map(self::identity).transpose()?;
        let mut endpoints = vec![Endpoint::Bind(address)];
        if let Some(fd) = listener_fd {
            let listener = inherited::listener(fd).map_err(|error| to_python(py, &error))?;
            endpoints.push(Endpoint::Inherited(listener));
        }
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let ready = EventFd::from_value_and_flags(0, flags)
            .map_err(|errno| to_python(py, &Error::io("make an eventfd", errno.into())))?;
        let ready = Arc::new(ready);
        let waker = Arc::clone(&ready);
        // It can only fail when the counter is full: then it is readable anyway.
        let wake = move || {
            let _ = waker.write(1);
        };
        let credentials = Credentials { identity, ..Credentials::new(run_id, token) };
        let opening = Server::open(endpoints, credentials, Limits::default(), admit_agent, wake);
        let server = wait(py, opening)?;
        let mut addresses = server.addresses().iter().map(ToString::to_string);
        let (address, tls_address) = (addresses.next().unwrap_or_default(), addresses.next());
        Ok(Self { server: Local::new(Mutex::new(Some(server))), address, tls_address, ready })
    }

    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    #[getter]
    fn tls_address(&self) -> Option<&str> {
        self.tls_address.as_deref()
    }

    fn fileno(&self) -> i32 {
        self.ready.as_raw_fd()
    }

    #[pyo3(signature = (limit=1024))]
    fn drain<'py>(&self, py: Python<'py>, limit: usize) -> PyResult<Vec<Drained<'py>>> {
        // Cleared first: what arrives from here on makes it readable again.
        let _ = self.ready.read();
        let mut events = Vec::new();
        self.with(py, "read events", |server| {
            events.extend(std::iter::from_fn(|| server.try_next()).take(limit));
            Ok(())
        })?;
        if events.len() == limit {
            let _ = self.ready.write(1); // There may be more.
        }
        events.iter().map(|(connection, event)| drained(py, *connection, event)).collect()
    }

    fn send(&self, py: Python<'_>, connection: ConnectionId, command: &Bound<'_, PyAny>) -> PyResult<()> {
        let command: Command = from_object(command, "command")?;
        self.with(py, "send a command", |server| server.send(connection, &command))
    }

    fn disconnect(&self, py: Python<'_>, connection: ConnectionId, reason: &str) -> PyResult<()> {
        self.with(py, "disconnect a peer", |server| {
            // It fails where the agent is gone, or does not read: then nobody can be told.
            let _ = server.send(connection, &Command::Dropped { reason: reason.to_owned() });
            server.disconnect(connection, reason);
            Ok(())
        })
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Some(server) = self.server.here() else { return Ok(()) };
        let server = server.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut server) = server else { return Ok(()) };
        let closing = async {
            server.close().await;
            Result::Ok(())
        };
        wait(py, closing)
    }
}

type Drained<'py> = (ConnectionId, &'static str, Bound<'py, PyAny>);

impl ChannelServer {
    /// Calls `work` with the open server. Takes no time worth releasing the GIL for: nothing in it waits.
    fn with<T>(
        &self,
        py: Python<'_>,
        what: &'static str,
        work: impl FnOnce(&mut AgentServer) -> Result<T>,
    ) -> PyResult<T> {
        let mut server = self.server.get(py, what)?.lock().unwrap_or_else(PoisonError::into_inner);
        let closed = || Error::new(ErrorKind::Closed, what, "the server is closed");
        let outcome = server.as_mut().ok_or_else(closed).and_then(work);
        outcome.map_err(|error| to_python(py, &error))
    }
}

fn drained<'py>(
    py: Python<'py>,
    connection: ConnectionId,
    event: &ServerEvent<Report>,
) -> PyResult<Drained<'py>> {
    Ok(match event {
        ServerEvent::Opened { peer, certificate } => {
            let data = to_object(py, peer)?;
            data.set_item("certificate", certificate.as_deref())?;
            (connection, "opened", data)
        }
        ServerEvent::Message(report) => (connection, "message", to_object(py, report)?),
        ServerEvent::Closed(reason) => (connection, "closed", to_object(py, reason)?),
    })
}
