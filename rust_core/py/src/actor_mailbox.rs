//! `ActorMailbox` and `ActorRequest`: what an actor's thread reads, and how it answers.

use std::sync::Arc;

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyList;
use sky_monarch_core::mesh::{Delivery, Mailbox, Request};

use crate::actor_node::{ActorNotifier, limit, patiently};
use crate::actor_payload::{from_objects, to_objects};
use crate::error::to_python;

/// The queue of one actor.
#[pyclass(frozen, module = "sky_monarch._core")]
pub struct ActorMailbox {
    mailbox: Arc<Mailbox>,
}

impl ActorMailbox {
    pub const fn new(mailbox: Arc<Mailbox>) -> Self {
        Self { mailbox }
    }
}

#[pymethods]
impl ActorMailbox {
    #[pyo3(signature = (timeout_s=None, most=64, urgent=true))]
    fn recv<'py>(
        &self,
        py: Python<'py>,
        timeout_s: Option<f64>,
        most: usize,
        urgent: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let limit = limit(py, timeout_s)?;
        patiently(py, limit, |slice| self.mailbox.wait(slice, urgent))?;
        let taken = py.detach(|| self.mailbox.take(most));
        let messages = PyList::empty(py);
        for delivery in taken {
            match delivery {
                Delivery::Call(request) => messages.append(ActorRequest { request })?,
                Delivery::Cancel(link, call) => messages.append((link, call))?,
            }
        }
        Ok(messages)
    }

    fn notify(&self, notifier: &ActorNotifier) {
        self.mailbox.notify(Arc::clone(&notifier.0));
    }

    #[getter]
    fn closed(&self) -> bool {
        self.mailbox.is_closed()
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.mailbox.close());
    }
}

/// A message.
#[pyclass(frozen, module = "sky_monarch._core")]
pub struct ActorRequest {
    request: Request,
}

#[pymethods]
impl ActorRequest {
    #[getter]
    fn method(&self) -> &str {
        self.request.method()
    }

    #[getter]
    fn key(&self) -> (u64, u64) {
        self.request.key()
    }

    #[getter]
    fn wants_answer(&self) -> bool {
        self.request.wants_answer()
    }

    /// Method, place, body and buffers, in one step of the hot path.
    fn open<'py>(&self, py: Python<'py>) -> PyResult<(&str, &str, Bound<'py, PyAny>, Bound<'py, PyList>)> {
        let (body, buffers) = to_objects(py, self.request.blobs())?;
        Ok((self.request.method(), self.request.place(), body, buffers))
    }

    #[pyo3(signature = (kind, body, buffers=None, soon=false))]
    fn reply(
        &self,
        py: Python<'_>,
        kind: u8,
        body: &[u8],
        buffers: Option<Vec<PyBuffer<u8>>>,
        soon: bool,
    ) -> PyResult<()> {
        let payload = from_objects(py, body, buffers, |parts| self.request.payload(parts))?;
        let request = &self.request;
        py.detach(|| if soon { request.reply_soon(kind, &payload) } else { request.reply(kind, &payload) })
            .map_err(|error| to_python(py, &error))
    }
}
