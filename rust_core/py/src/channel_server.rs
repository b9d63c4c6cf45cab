//! `ChannelServer`: the controller's end of its channels to the agents.

use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};
use pyo3::prelude::*;
use sky_monarch_core::channel::{ConnectionId, Credentials, Limits, Pending, Server, ServerEvent};
use sky_monarch_core::protocol::{Command, Peer, Report};
use sky_monarch_core::wire::Address;
use sky_monarch_core::{Error, ErrorKind, Result};

use crate::convert::{from_object, to_object};
use crate::error::to_python;
use crate::runtime::{Local, wait};

type AgentServer = Server<Command, Report>;

/// Listens for agents.
#[pyclass(frozen, module = "sky_monarch._core")]
pub struct ChannelServer {
    server: Local<Mutex<Option<AgentServer>>>,
    address: String,
    ready: Arc<EventFd>,
}

#[pymethods]
impl ChannelServer {
    #[new]
    fn new(py: Python<'_>, address: &str, token: &str, run_id: &str) -> PyResult<Self> {
        let address: Address = address.parse().map_err(|error: Error| to_python(py, &error))?;
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let ready = EventFd::from_value_and_flags(0, flags)
            .map_err(|errno| to_python(py, &Error::io("make an eventfd", errno.into())))?;
        let ready = Arc::new(ready);
        let waker = Arc::clone(&ready);
        // It can only fail when the counter is full: then it is readable anyway.
        let wake = move || {
            let _ = waker.write(1);
        };
        let credentials = Credentials::new(run_id, token);
        let server = wait(py, Server::start(&address, credentials, Limits::default(), admit, wake))?;
        let address = server.address().to_string();
        Ok(Self { server: Local::new(Mutex::new(Some(server))), address, ready })
    }

    #[getter]
    fn address(&self) -> &str {
        &self.address
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

/// Only agents are welcome, and over TLS only under the name in their certificate.
fn admit(pending: &Pending) -> Result<(), String> {
    let Peer::Agent { host, .. } = pending.peer() else {
        return Err("this is the controller: sessions dial their agent".to_owned());
    };
    match pending.peer_name() {
        Some(name) if name != host => {
            Err(format!("the certificate of {name} does not speak for host {host}"))
        }
        _ => Ok(()),
    }
}

fn drained<'py>(
    py: Python<'py>,
    connection: ConnectionId,
    event: &ServerEvent<Report>,
) -> PyResult<Drained<'py>> {
    Ok(match event {
        ServerEvent::Opened(peer) => (connection, "opened", to_object(py, peer)?),
        ServerEvent::Message(report) => (connection, "message", to_object(py, report)?),
        ServerEvent::Closed(reason) => (connection, "closed", to_object(py, reason)?),
    })
}
