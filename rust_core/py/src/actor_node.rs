//! `ActorNode`: this process among those of a mesh, and the calls that it makes.

use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use sky_monarch_core::mesh::{Answer, Gather, Node, NodeOptions, Notifier, Outcome, Target};
use sky_monarch_core::{Error, ErrorKind};

use crate::actor_mailbox::ActorMailbox;
use crate::actor_payload::{from_objects, to_objects};
use crate::convert::duration;
use crate::error::to_python;

/// How long Ctrl-C may have to wait.
const SIGNAL_CHECK: Duration = Duration::from_millis(100);

/// Kind of an answer that never comes.
const DEAD: i32 = -1;

/// Waits with the GIL released, `wait(slice)` at a time; Python's signal handlers run meanwhile in the main thread.
pub fn patiently(
    py: Python<'_>,
    limit: Option<Duration>,
    wait: impl Fn(Option<Duration>) -> bool + Sync,
) -> PyResult<bool> {
    let main = nix::unistd::gettid() == nix::unistd::getpid();
    if !main {
        return Ok(py.detach(|| wait(limit)));
    }
    let deadline = limit.map(|limit| Instant::now() + limit);
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let slice = left.map_or(SIGNAL_CHECK, |left| left.min(SIGNAL_CHECK));
        if py.detach(|| wait(Some(slice))) {
            return Ok(true);
        }
        py.check_signals()?;
        if left.is_some_and(|left| left <= slice) {
            return Ok(false);
        }
    }
}

/// A limit in seconds; none is for ever.
pub fn limit(py: Python<'_>, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    seconds.map(|seconds| duration(py, "timeout_s", seconds)).transpose()
}

/// When a call was made, as Python's `time.monotonic` counts.
fn called_s(gather: &Gather) -> f64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
    now.saturating_sub(gather.called().elapsed()).as_secs_f64()
}

/// A process among those of a mesh.
#[pyclass(frozen, module = "sky_monarch._core")]
pub struct ActorNode {
    node: ManuallyDrop<Node>,
    pid: u32,
}

impl ActorNode {
    fn here(&self, py: Python<'_>) -> PyResult<&Node> {
        if self.pid == std::process::id() {
            return Ok(&self.node);
        }
        let why = format!("it belongs to process {} and does not survive a fork: make another", self.pid);
        Err(to_python(py, &Error::new(ErrorKind::Closed, "use an actor node", why)))
    }
}

impl Drop for ActorNode {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            // SAFETY: nothing else takes it out, and `self` is not used after its drop.
            unsafe { ManuallyDrop::drop(&mut self.node) };
        }
    }
}

#[pymethods]
impl ActorNode {
    #[new]
    fn new(
        py: Python<'_>,
        address: &str,
        token: &str,
        listener_fd: i32,
        send_limit_s: f64,
    ) -> PyResult<Self> {
        let send_limit = duration(py, "send_limit_s", send_limit_s)?;
        if token.is_empty() || listener_fd < 0 {
            let why = "it needs a token and a listening socket";
            return Err(to_python(py, &Error::new(ErrorKind::InvalidInput, "make an actor node", why)));
        }
        // SAFETY: the caller hands the descriptor over, and does not use it any more.
        let listener = unsafe { OwnedFd::from_raw_fd(listener_fd) };
        let options = NodeOptions { address: address.into(), token: token.to_owned(), send_limit };
        let node = Node::new(options, listener).map_err(|error| to_python(py, &error))?;
        Ok(Self { node: ManuallyDrop::new(node), pid: std::process::id() })
    }

    #[getter]
    fn address(&self) -> &str {
        self.node.address()
    }

    fn mailbox(&self, py: Python<'_>, actor: u64) -> PyResult<ActorMailbox> {
        let mailbox = self.here(py)?.mailbox(actor).map_err(|error| to_python(py, &error))?;
        Ok(ActorMailbox::new(mailbox))
    }

    #[pyo3(signature = (targets, actor, method, body, buffers=None, each=false))]
    #[expect(clippy::too_many_arguments, reason = "the hot path makes no object to hold them")]
    fn call(
        &self,
        py: Python<'_>,
        targets: &ActorTargets,
        actor: u64,
        method: &str,
        body: &[u8],
        buffers: Option<Vec<PyBuffer<u8>>>,
        each: bool,
    ) -> PyResult<ActorReplies> {
        let node = self.here(py)?;
        let payload = from_objects(py, body, buffers, |parts| node.payload(&targets.0, parts))?;
        let called = py.detach(|| node.call(&targets.0, actor, method, &payload, each));
        let gather = called.map_err(|error| to_python(py, &error))?;
        Ok(ActorReplies { gather })
    }

    #[pyo3(signature = (targets, actor, method, body, buffers=None))]
    fn send(
        &self,
        py: Python<'_>,
        targets: &ActorTargets,
        actor: u64,
        method: &str,
        body: &[u8],
        buffers: Option<Vec<PyBuffer<u8>>>,
    ) -> PyResult<Vec<(u32, String)>> {
        let node = self.here(py)?;
        let payload = from_objects(py, body, buffers, |parts| node.payload(&targets.0, parts))?;
        py.detach(|| node.send(&targets.0, actor, method, &payload)).map_err(|error| to_python(py, &error))
    }

    fn hang_up(&self, py: Python<'_>, address: &str, reason: &str) -> PyResult<()> {
        let node = self.here(py)?;
        py.detach(|| node.hang_up(address, reason));
        Ok(())
    }

    fn links(&self, py: Python<'_>) -> PyResult<usize> {
        self.here(py).map(Node::links)
    }

    fn open_calls(&self, py: Python<'_>) -> PyResult<usize> {
        self.here(py).map(Node::open_calls)
    }

    fn close(&self, py: Python<'_>) {
        if let Ok(node) = self.here(py) {
            py.detach(|| node.close());
        }
    }
}

/// Has this process killed when the thread that forked it ends; ends it at once where that has happened already.
#[pyfunction]
pub fn die_with_parent(py: Python<'_>, parent: i32) -> PyResult<()> {
    let set = nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL);
    set.map_err(|error| to_python(py, &Error::io("ask for a signal at the parent's death", error.into())))?;
    if nix::unistd::getppid().as_raw() != parent {
        std::process::exit(1);
    }
    Ok(())
}

/// Processes to be called, and the place of each in the mesh that is called.
#[pyclass(frozen, module = "sky_monarch._core")]
pub struct ActorTargets(Vec<Target>);

#[pymethods]
impl ActorTargets {
    #[new]
    fn new(targets: Vec<(String, String)>) -> Self {
        Self(targets.into_iter().map(|(address, place)| Target { address, place }).collect())
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }
}

/// The answers to one call.
#[pyclass(frozen, module = "sky_monarch._core")]
pub struct ActorReplies {
    gather: Arc<Gather>,
}

#[pymethods]
impl ActorReplies {
    #[pyo3(signature = (timeout_s=None))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        let limit = limit(py, timeout_s)?;
        patiently(py, limit, |slice| self.gather.wait(slice))
    }

    fn is_ready(&self) -> bool {
        self.gather.is_ready()
    }

    fn left(&self) -> usize {
        self.gather.left()
    }

    fn take<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let answers = PyList::empty(py);
        for Answer { slot, outcome } in self.gather.take() {
            let answer = match outcome {
                Outcome::Answer { kind, blobs } => {
                    let (body, buffers) = to_objects(py, &blobs)?;
                    (slot, i32::from(kind), body, buffers).into_pyobject(py)?
                }
                Outcome::Dead { reason } => {
                    let reason = reason.into_pyobject(py)?.into_any();
                    let called = PyList::new(py, [called_s(&self.gather)])?;
                    (slot, DEAD, reason, called).into_pyobject(py)?
                }
            };
            answers.append::<Bound<'py, PyTuple>>(answer)?;
        }
        Ok(answers)
    }

    fn notify(&self, notifier: &ActorNotifier, token: u64) {
        self.gather.notify(Arc::clone(&notifier.0), token);
    }

    fn cancel(&self, py: Python<'_>) {
        py.detach(|| self.gather.cancel());
    }
}

/// How an event loop hears of answers and messages.
#[pyclass(frozen, module = "sky_monarch._core")]
pub struct ActorNotifier(pub Arc<Notifier>);

#[pymethods]
impl ActorNotifier {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Self> {
        Notifier::new().map(|made| Self(Arc::new(made))).map_err(|error| to_python(py, &error))
    }

    fn fileno(&self) -> i32 {
        self.0.fd().as_raw_fd()
    }

    fn push(&self, token: u64) {
        self.0.push(token);
    }

    fn drain(&self) -> Vec<u64> {
        self.0.drain()
    }
}
