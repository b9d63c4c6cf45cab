//! The door to the lighthouse: a port on 127.0.0.1 that ranks dial in its place, and never the lighthouse itself.
//!
//! ```text
//!  torchft.Manager ──gRPC──▶ identify ─▶ Porter ──one connection for each of theirs──▶ lighthouse
//!                        who, which secret,  │ while the lighthouse is away, a question for
//!                        still live here?    └ a quorum waits here and is asked again
//! ```
//!
//! It is bound before the first rank is spawned and stays for the life of the agent. A generation that this agent has
//! ended is refused here, whether the lighthouse can be reached or not.

mod upstream;

use std::collections::HashMap;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request as HttpRequest, State as Held};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response as HttpResponse};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_stream::StreamExt;
use tonic::service::Routes;
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Server};
use tonic::{Code, Request, Response, Status};

use super::config::Token;
use super::mutant;
use super::sessions::Sessions;
use crate::lighthouse::identity::{Identity, Unauthenticated, authenticate};
use crate::lighthouse::listener::{Incoming, OnClose, Via};
use crate::lighthouse::registry::ConnectionId;
use crate::lighthouse_client::innermost;
use crate::torchft::lighthouse_service_client::LighthouseServiceClient;
use crate::torchft::lighthouse_service_server::{LighthouseService, LighthouseServiceServer};
use crate::torchft::{
    LighthouseHeartbeatRequest, LighthouseHeartbeatResponse, LighthouseQuorumRequest,
    LighthouseQuorumResponse,
};
use crate::wire::tls;
use crate::{Error, Result};
use upstream::Upstream;

/// Connections of ranks that may speak at a time. A group has one, two while its manager is replaced.
const MAX_LINKS: usize = 1_024;
/// Requests at a time on one connection; a manager has two.
const MAX_STREAMS: u32 = 64;
/// Longest request body that is decoded; the lighthouse's own bound.
const MAX_REQUEST_BYTES: usize = 1 << 20;
/// Pause before an absent lighthouse is asked again: doubles from the first to the last. It is back in 0.1 to 0.4 s.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));
/// Longest that a question without a deadline of its own waits for an absent lighthouse.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest that a heartbeat waits. A manager sends the next one only after this one's answer, whichever that is.
const HEARTBEAT_LIMIT: Duration = Duration::from_secs(2);

type Client = LighthouseServiceClient<Channel>;

/// The door of one agent; clones are the same one.
#[derive(Clone)]
pub struct Door {
    token: Token,
    /// Shows this host's certificate; none: it has none.
    certificate: Option<TlsConnector>,
    sessions: Sessions,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    address: Option<SocketAddr>,
    /// The lighthouse of each replica group.
    lighthouses: HashMap<u32, Upstream>,
    /// Every open connection, with the one behind it once it has said who it is.
    links: HashMap<ConnectionId, Option<Link>>,
}

struct Link {
    identity: Identity,
    client: Client,
}

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Door").field("address", &self.state().address).finish_non_exhaustive()
    }
}

impl Door {
    /// A door that is not there yet: the first [`Self::lead`] binds it. What it dials beyond this machine it shows the
    /// certificate of `identity`.
    pub fn new(token: Token, identity: Option<&tls::Identity>, sessions: Sessions) -> Result<Self> {
        let certificate = identity.map(tls::connector).transpose()?;
        Ok(Self { token, certificate, sessions, state: Arc::default() })
    }

    /// Leads the ranks of `replica` to `lighthouse` (`http://host:port` on this machine, `https://host:port`) from now
    /// on, and returns the URL to give to them in its place. Must run inside a Tokio runtime.
    pub fn lead(&self, replica: u32, lighthouse: &str) -> Result<String> {
        const OPERATION: &str = "open the door to the lighthouse";
        let upstream = Upstream::new(lighthouse, self.certificate.as_ref())?;
        let mut state = self.state();
        let address = match state.address {
            Some(address) => address,
            None => {
                let io = |cause| Error::io(OPERATION, cause);
                let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(io)?;
                listener.set_nonblocking(true).map_err(io)?;
                let address = listener.local_addr().map_err(io)?;
                self.serve(listener)?;
                *state.address.insert(address)
            }
        };
        state.lighthouses.insert(replica, upstream);
        Ok(format!("http://{address}"))
    }

    fn serve(&self, listener: TcpListener) -> Result<()> {
        let closing = self.clone();
        let on_close: OnClose = Arc::new(move |connection| {
            if !mutant::is_on("door_keeps_links") {
                drop(closing.state().links.remove(&connection));
            }
        });
        let opening = self.clone();
        let incoming = Incoming::new(listener, on_close)?.map(move |connection| {
            if let Ok(connection) = &connection {
                opening.state().links.insert(connection.connect_info().0, None);
            }
            connection
        });
        let service =
            LighthouseServiceServer::new(Porter(self.clone())).max_decoding_message_size(MAX_REQUEST_BYTES);
        let routes =
            Routes::new(service).into_axum_router().layer(from_fn_with_state(self.clone(), identify));
        let server = Server::builder()
            .max_concurrent_streams(MAX_STREAMS)
            .add_routes(Routes::from(routes))
            .serve_with_incoming(incoming);
        tokio::spawn(async move {
            if let Err(error) = server.await {
                tracing::error!(%error, "the door to the lighthouse is shut");
            }
        });
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether that generation may speak: the lighthouse's own words where it may not.
    fn admit(&self, identity: Identity) -> std::result::Result<(), Status> {
        if mutant::is_on("door_no_fence") {
            return Ok(());
        }
        self.sessions.standing(identity).map_err(|refusal| match refusal {
            Some(refusal) => refusal.into(),
            None => Status::failed_precondition(format!("{identity} is not live on this host")),
        })
    }

    /// The connection behind `connection`; made with its first request.
    fn client(&self, connection: ConnectionId, identity: Identity) -> std::result::Result<Client, Status> {
        let mut state = self.state();
        // A request that outlives its connection must not leave another one behind.
        let known = state.links.get(&connection).ok_or_else(|| Status::cancelled("the client has left"))?;
        if let Some(link) = known {
            // The lighthouse tells two copies of a group apart by their connections.
            let same = link.identity == identity;
            return same
                .then(|| link.client.clone())
                .ok_or_else(|| Status::permission_denied("this connection belongs to another generation"));
        }
        if state.links.values().flatten().count() >= MAX_LINKS {
            return Err(Status::resource_exhausted(format!("{MAX_LINKS} connections are open already")));
        }
        let Identity { replica, generation } = identity;
        let upstream = state
            .lighthouses
            .get(&replica)
            .ok_or_else(|| Status::failed_precondition(format!("{identity} has no lighthouse")))?;
        let userinfo = format!("r{replica}.g{generation}.{}", self.token.reveal());
        let channel = upstream.channel(&userinfo).map_err(|error| Status::internal(error.to_string()))?;
        let client = LighthouseServiceClient::new(channel);
        state.links.insert(connection, Some(Link { identity, client: client.clone() }));
        Ok(client)
    }
}

/// Who speaks, in the request's extensions.
#[derive(Clone, Copy)]
struct Speaker(Identity);

/// Lets in, before a byte of the body is decoded, who is of this run and live here.
async fn identify(Held(door): Held<Door>, mut request: HttpRequest, next: Next) -> HttpResponse {
    let kind = request.headers().get(header::CONTENT_TYPE);
    if !kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc")) {
        return StatusCode::NOT_FOUND.into_response();
    }
    let authority = request.uri().authority().map(|authority| authority.as_str());
    let token = (!mutant::is_on("door_no_secret")).then(|| door.token.reveal());
    let refusal = match authenticate(authority, token) {
        Ok(Some(identity)) => match door.admit(identity) {
            Ok(()) => {
                request.extensions_mut().insert(Speaker(identity));
                return next.run(request).await;
            }
            Err(refusal) => refusal,
        },
        Ok(None) => Status::unauthenticated(Unauthenticated::NoUserinfo.to_string()),
        Err(why) => Status::unauthenticated(why.to_string()),
    };
    refusal.into_http::<Body>()
}

/// Carries requests to the lighthouse and its answers back.
struct Porter(Door);

impl Porter {
    fn speaker<T>(request: &Request<T>) -> std::result::Result<(ConnectionId, Identity), Status> {
        match (request.extensions().get::<Via>(), request.extensions().get::<Speaker>()) {
            (Some(Via(connection)), Some(Speaker(identity))) => Ok((*connection, *identity)),
            _ => Err(Status::internal("the request was not authenticated")),
        }
    }
}

#[tonic::async_trait]
impl LighthouseService for Porter {
    /// To repeat the question is harmless: the lighthouse answers the newest of one replica only. When the client
    /// leaves, or its deadline passes, this future is dropped, which withdraws the question there too.
    async fn quorum(
        &self,
        request: Request<LighthouseQuorumRequest>,
    ) -> std::result::Result<Response<LighthouseQuorumResponse>, Status> {
        let (connection, identity) = Self::speaker(&request)?;
        let asked = Instant::now();
        let limit =
            request.metadata().get("grpc-timeout").and_then(|value| grpc_timeout(value.to_str().ok()?));
        let message = request.into_inner();
        let mut client = self.0.client(connection, identity)?;
        let (mut backoff, mut away_since) = (BACKOFF.0, None::<Instant>);
        loop {
            let mut question = Request::new(message.clone());
            if let Some(limit) = limit {
                question.set_timeout(limit.saturating_sub(asked.elapsed()));
            }
            let status = match client.quorum(question).await {
                Ok(answer) => return Ok(Response::new(answer.into_inner())),
                Err(status) => status,
            };
            if !is_away(&status) || mutant::is_on("door_gives_up") {
                return Err(told(&status));
            }
            let until = match limit {
                Some(limit) => asked + limit,
                None => *away_since.get_or_insert_with(Instant::now) + PATIENCE,
            };
            let left = until.saturating_duration_since(Instant::now());
            // The timer of the question itself, which goes with it, counts as late too.
            if left < Duration::from_millis(1) {
                return Err(Status::deadline_exceeded("no quorum in time"));
            }
            tracing::debug!(%identity, ?backoff, "the lighthouse is away: asking again");
            sleep(backoff.min(left)).await;
            backoff = (backoff * 2).min(BACKOFF.1);
            // Its generation may have ended meanwhile, and a lighthouse that is just back may not know.
            self.0.admit(identity)?;
        }
    }

    /// One that is late is worth nothing: the next one is on its way.
    async fn heartbeat(
        &self,
        request: Request<LighthouseHeartbeatRequest>,
    ) -> std::result::Result<Response<LighthouseHeartbeatResponse>, Status> {
        let (connection, identity) = Self::speaker(&request)?;
        let mut client = self.0.client(connection, identity)?;
        match timeout(HEARTBEAT_LIMIT, client.heartbeat(request.into_inner())).await {
            Ok(Ok(answer)) => Ok(Response::new(answer.into_inner())),
            Ok(Err(status)) => Err(told(&status)),
            Err(_) => Err(Status::unavailable("the lighthouse does not answer")),
        }
    }
}

/// Not what the lighthouse says, but that it can say nothing: it is down, or died with the request under way.
fn is_away(status: &Status) -> bool {
    use std::error::Error as _;
    status.code() == Code::Unavailable || status.source().is_some()
}

/// What the client hears of it: the lighthouse's own word, or that there is none.
fn told(status: &Status) -> Status {
    if is_away(status) {
        return Status::unavailable(format!("the lighthouse is away: {}", innermost(status)));
    }
    Status::new(status.code(), status.message())
}

/// The value of the header `grpc-timeout`: up to eight digits and a unit.
fn grpc_timeout(value: &str) -> Option<Duration> {
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    if digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(count * 3600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_read_as_grpc_writes_it() {
        for (text, limit) in [
            ("1H", Some(Duration::from_secs(3600))),
            ("2M", Some(Duration::from_secs(120))),
            ("60S", Some(Duration::from_secs(60))),
            ("150m", Some(Duration::from_millis(150))),
            ("60000000u", Some(Duration::from_secs(60))),
            ("99999999n", Some(Duration::from_nanos(99_999_999))),
            ("999999999n", None),
            ("-1S", None),
            ("S", None),
            ("", None),
            ("1", None),
            ("1é", None),
        ] {
            assert_eq!(grpc_timeout(text), limit, "{text}");
        }
    }
}
