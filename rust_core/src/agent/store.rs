//! The group's own rendezvous store: a listening socket a generation, served by one lazy helper.
//!
//! `MASTER_PORT` is bound before the ranks start, so it is never taken and never refused. Only the first connection
//! to it starts the helper, which gets the socket itself over a `SOCK_SEQPACKET` pair on its descriptor 3.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::Interest;
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::capture::{self, Capture};
use super::context::{Context, Shared};
use super::env::{self, Place};
use super::group::rank::Tracked;
use super::pidfd::Process;
use super::watched::watched;
use crate::protocol::{Event, GroupPlan};
use crate::store_helper::{Line, MODULE};
use crate::{Error, ErrorKind, Result};

/// From the start of the helper to a store that serves: it imports torch.
const READY_LIMIT: Duration = Duration::from_secs(60);
/// Helpers that may die at the start in a row before no more are tried.
const MAX_DEATHS: u32 = 3;

/// The stores of an agent.
#[derive(Clone, Debug, Default)]
pub struct Store {
    helper: Arc<Mutex<HelperState>>,
    ids: Arc<AtomicU64>,
    fallback_python: Option<String>,
}

#[derive(Debug, Default)]
struct HelperState {
    helper: Option<Helper>,
    deaths: u32,
}

#[derive(Debug)]
struct Helper {
    tracked: Tracked,
    line: Line,
}

/// One generation's store. Dropping it frees the port.
#[derive(Debug)]
pub struct Lease {
    id: u64,
    address: SocketAddr,
    waiting: JoinHandle<()>,
    store: Store,
}

impl Lease {
    /// The port that is `MASTER_PORT` of the generation.
    pub const fn port(&self) -> u16 {
        self.address.port()
    }

    /// Where other hosts of the group reach it.
    pub fn address(&self) -> String {
        self.address.to_string()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.waiting.abort();
        let (store, id) = (self.store.clone(), self.id);
        tokio::spawn(async move {
            if let Some(helper) = &store.helper.lock().await.helper {
                // A helper that is gone has closed everything already.
                let _ = helper.line.tell_close(id).await;
            }
        });
    }
}

impl Store {
    /// No store yet. `fallback_python` is the interpreter for jobs that name none of their own.
    pub fn new(fallback_python: Option<String>) -> Self {
        Self { fallback_python, ..Self::default() }
    }

    /// Binds the port of a generation. None where another host of the group serves its store, or (told as a notice) where
    /// that fails: then there is no `MASTER_PORT`.
    pub fn lease(&self, context: &Shared, plan: &GroupPlan) -> Option<Lease> {
        if plan.span.as_ref().is_some_and(|span| span.node > 0) {
            return None;
        }
        match self.bind(context, plan) {
            Ok(lease) => Some(lease),
            Err(error) => {
                notice(context, plan, &error);
                None
            }
        }
    }

    fn bind(&self, context: &Shared, plan: &GroupPlan) -> Result<Lease> {
        let io = |cause| Error::io("bind the port of the group's store", cause);
        let at = plan.span.as_ref().map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), |_| context.run.address);
        let listener = TcpListener::bind((at, 0)).map_err(io)?;
        let address = listener.local_addr().map_err(io)?;
        listener.set_nonblocking(true).map_err(io)?;
        let listener = watched(OwnedFd::from(listener), Interest::READABLE).map_err(io)?;
        let id = self.ids.fetch_add(1, Ordering::Relaxed) + 1;
        let (store, context, plan) = (self.clone(), Arc::clone(context), plan.clone());
        let serving = self.clone();
        let waiting = tokio::spawn(async move {
            let arrived = listener.readable().await.map(|_| ());
            let listener = listener.into_inner();
            if arrived.is_err() {
                return;
            }
            // From here on the helper holds the socket; with ours closed too, its end is seen by the ranks.
            if let Err(error) = serving.serve(&context, &plan, id, &listener).await {
                notice(&context, &plan, &error);
            }
        });
        Ok(Lease { id, address, waiting, store })
    }

    async fn serve(&self, context: &Shared, plan: &GroupPlan, id: u64, listener: &OwnedFd) -> Result<()> {
        // One at a time: answers of the helper belong to the question before.
        let mut state = self.helper.lock().await;
        if let Some(dead) = state.helper.take_if(|helper| helper.tracked.process.exit().is_some()) {
            dead.tracked.end(context, Duration::ZERO).await;
        }
        if state.helper.is_none() {
            if state.deaths >= MAX_DEATHS {
                return Err(refused("its helper died too often".into()));
            }
            state.helper = Some(Helper::start(context, plan, self.fallback_python.as_deref()).await?);
        }
        let Some(helper) = &state.helper else { return Ok(()) };
        let answer = timeout(READY_LIMIT, helper.line.open(id, listener)).await;
        let result = match answer {
            Ok(result) => result,
            Err(_) => Err(refused(format!("its helper did not answer for {READY_LIMIT:?}"))),
        };
        match &result {
            Ok(()) => state.deaths = 0,
            Err(_) => {
                state.deaths += 1;
                if let Some(helper) = state.helper.take() {
                    let tail = helper.tracked.capture.tail();
                    let last = tail.last().cloned().unwrap_or_default();
                    helper.tracked.end(context, Duration::from_secs(1)).await;
                    return result.map_err(|error| refused(format!("{}; {last}", error.message())));
                }
            }
        }
        result
    }

    /// Ends the helper.
    pub async fn end(&self, context: &Context) {
        if let Some(Helper { tracked, line }) = self.helper.lock().await.helper.take() {
            drop(line);
            tracked.end(context, Duration::from_secs(2)).await;
        }
    }
}

fn refused(message: String) -> Error {
    Error::new(ErrorKind::Io, "serve the group's store", message)
}

fn notice(context: &Context, plan: &GroupPlan, error: &Error) {
    let message = env::redact(&error.to_string(), &context.run.token);
    context.outbox.emit(Event::Notice { replica: Some(plan.replica), message });
}

impl Helper {
    async fn start(context: &Shared, plan: &GroupPlan, fallback: Option<&str>) -> Result<Self> {
        let (line, theirs) = Line::pair()?;
        let python = env::python_command(&plan.command)
            .map(|words| words[0].as_str())
            .or(fallback)
            .unwrap_or("python3");
        let argv = [python, "-m", MODULE].map(str::to_owned).to_vec();
        let spawn_id = context.spawn_id();
        // The job's environment, since it is the job's interpreter; of the rank's variables only the marks are used.
        let place = Place { rank: 0, generation: 0, master_port: 0, spawn_id: &spawn_id };
        let env = env::rank_env(&context.run, plan, &place);
        let (read, write) = capture::pipe()?;
        let capture = Capture::start(read, context.logs.store_target(), context.outbox.clone(), None)?;
        let spawned = context.spawn(argv, env, &plan.workdir, write, Some(theirs), 0).await?;
        let process = Process::watch(spawned, context.registry.clone())?;
        Ok(Self { tracked: Tracked { process, spawn_id, capture }, line })
    }
}
