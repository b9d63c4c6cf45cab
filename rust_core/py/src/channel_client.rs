//! `ChannelClient`: dials a channel and says whatever it is told to, for simulated agents and for hostile ones.

use std::time::Duration;

use pyo3::prelude::*;
use rmpv::Value;
use sky_monarch_core::channel::{self, Channel, Credentials, Limits};
use sky_monarch_core::protocol::Peer;
use sky_monarch_core::wire::Address;
use sky_monarch_core::{Error, ErrorKind, Result};
use tokio::sync::Mutex;

use crate::convert::{duration, from_object, identity, to_object};
use crate::error::to_python;
use crate::runtime::{Local, wait};

/// Time that `send` waits for a peer that does not keep up.
const SEND_DEADLINE: Duration = Duration::from_secs(10);

/// One connection; the messages are not checked.
#[pyclass(frozen, module = "sky_monarch._core")]
pub struct ChannelClient {
    channel: Local<Mutex<Option<Channel<Value, Value>>>>,
}

#[pymethods]
impl ChannelClient {
    #[new]
    #[pyo3(signature = (address, token, run_id, hello, timeout_s, identity=None))]
    fn new(
        py: Python<'_>,
        address: &str,
        token: &str,
        run_id: &str,
        hello: &Bound<'_, PyAny>,
        timeout_s: f64,
        identity: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let address: Address = address.parse().map_err(|error: Error| to_python(py, &error))?;
        let deadline = duration(py, "timeout_s", timeout_s)?;
        let peer: Peer = from_object(hello, "hello")?;
        let identity = identity.map(self::identity).transpose()?;
        let credentials = Credentials { identity, ..Credentials::new(run_id, token) };
        let limits = Limits::default();
        let channel = wait(py, channel::connect(&address, peer, &credentials, &limits, deadline))?;
        Ok(Self { channel: Local::new(Mutex::new(Some(channel))) })
    }

    fn send(&self, py: Python<'_>, message: &Bound<'_, PyAny>) -> PyResult<()> {
        let message: Value = from_object(message, "message")?;
        let channel = self.channel.get(py, SEND)?;
        let sending = async {
            let channel = channel.lock().await;
            let channel = channel.as_ref().ok_or_else(|| closed(SEND))?;
            let late = |_| Error::new(ErrorKind::TimedOut, SEND, "the peer does not keep up");
            tokio::time::timeout(SEND_DEADLINE, channel.send(&message)).await.map_err(late)?
        };
        wait(py, sending)
    }

    fn recv<'py>(&self, py: Python<'py>, timeout_s: f64) -> PyResult<Option<Bound<'py, PyAny>>> {
        let channel = self.channel.get(py, RECEIVE)?;
        let limit = duration(py, "timeout_s", timeout_s)?;
        let receiving = async {
            let mut channel = channel.lock().await;
            let channel = channel.as_mut().ok_or_else(|| closed(RECEIVE))?;
            tokio::time::timeout(limit, channel.recv()).await.ok().transpose()
        };
        let message: Option<Value> = wait(py, receiving)?;
        message.map(|message| to_object(py, &message)).transpose()
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Some(channel) = self.channel.here() else { return Ok(()) };
        let closing = async {
            drop(channel.lock().await.take());
            Result::Ok(())
        };
        wait(py, closing)
    }
}

const SEND: &str = "send a message";
const RECEIVE: &str = "receive a message";

fn closed(operation: &'static str) -> Error {
    Error::new(ErrorKind::Closed, operation, "the client is closed")
}
