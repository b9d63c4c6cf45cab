//! The gRPC face: `torchft.LighthouseService`, as TorchFT 0.2.0's managers speak it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::Notify;
use tokio::time::sleep_until;
use tonic::{Request, Response, Status};

use super::identity::Identity;
use super::listener::Via;
use super::registry::{ConnectionId, Registry};
use crate::torchft::lighthouse_service_server::LighthouseService;
use crate::torchft::{
    LighthouseHeartbeatRequest, LighthouseHeartbeatResponse, LighthouseQuorumRequest,
    LighthouseQuorumResponse,
};

/// Who sent a request, put into its extensions once it is authenticated; none: nobody that we know.
#[derive(Clone, Copy, Debug)]
pub struct Caller(pub Option<Identity>);

/// The registry, shared by the service, the control channel, the HTTP routes and the timer.
#[derive(Clone)]
pub struct Shared {
    registry: Arc<Mutex<Registry>>,
    changed: Arc<Notify>,
}

impl Shared {
    /// Shares `registry`.
    pub fn new(registry: Registry) -> Self {
        Self { registry: Arc::new(Mutex::new(registry)), changed: Arc::default() }
    }

    /// The registry, for a moment: never held over an await.
    pub fn lock(&self) -> MutexGuard<'_, Registry> {
        // a panic under the lock is a bug that a restart cures sooner than a refusal of everything
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the timer after a change of what is waited for.
    pub fn wake(&self) {
        self.changed.notify_one();
    }

    /// Runs the registry's clock for ever: in short intervals (so that a pause of this process shows) and whenever
    /// silence or a join timeout may change the decision.
    pub async fn run_timer(&self) {
        loop {
            let latest = {
                let mut registry = self.lock();
                registry.tick(Instant::now());
                Instant::now() + registry.tick_interval()
            };
            loop {
                let recheck_at = self.lock().recheck_at();
                let wake_at = recheck_at.map_or(latest, |at| at.min(latest));
                tokio::select! {
                    () = sleep_until(wake_at.into()) => break,
                    // every change has been decided on already: only the time of the next look may differ
                    () = self.changed.notified() => {}
                }
            }
        }
    }
}

/// Withdraws a request that ends without an answer: its client left, or its `grpc-timeout` passed.
struct Withdraw<'a> {
    shared: &'a Shared,
    id: String,
    ticket: u64,
    answered: bool,
}

impl Drop for Withdraw<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.shared.lock().withdraw(Instant::now(), &self.id, self.ticket);
            self.shared.wake();
        }
    }
}

/// The service itself.
pub struct Service {
    shared: Shared,
}

impl Service {
    /// Serves what is in `shared`.
    pub const fn new(shared: Shared) -> Self {
        Self { shared }
    }
}

fn caller<T>(request: &Request<T>) -> Result<(ConnectionId, Option<Identity>), Status> {
    let extensions = request.extensions();
    match (extensions.get::<Via>(), extensions.get::<Caller>()) {
        (Some(Via(connection)), Some(Caller(identity))) => Ok((*connection, *identity)),
        _ => Err(Status::internal("the request was not authenticated")),
    }
}

#[tonic::async_trait]
impl LighthouseService for Service {
    async fn quorum(
        &self,
        request: Request<LighthouseQuorumRequest>,
    ) -> Result<Response<LighthouseQuorumResponse>, Status> {
        let (connection, identity) = caller(&request)?;
        let requester = request
            .into_inner()
            .requester
            .ok_or_else(|| Status::invalid_argument("the requester is missing"))?;
        let id = requester.replica_id.clone();
        let (ticket, answer) = self.shared.lock().ask(Instant::now(), connection, identity, requester)?;
        self.shared.wake();
        let mut withdraw = Withdraw { shared: &self.shared, id, ticket, answered: false };
        let answered = answer.await.map_err(|_| Status::unavailable("the lighthouse is shutting down"))?;
        withdraw.answered = true;
        let quorum = Some(Arc::unwrap_or_clone(answered?));
        Ok(Response::new(LighthouseQuorumResponse { quorum }))
    }

    async fn heartbeat(
        &self,
        request: Request<LighthouseHeartbeatRequest>,
    ) -> Result<Response<LighthouseHeartbeatResponse>, Status> {
        let (connection, identity) = caller(&request)?;
        let id = request.into_inner().replica_id;
        self.shared.lock().heartbeat(Instant::now(), connection, identity, &id)?;
        Ok(Response::new(LighthouseHeartbeatResponse {}))
    }
}
