//! A client of the lighthouse, TorchFT's or ours.

use std::error::Error as _;
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use crate::torchft::lighthouse_service_client::LighthouseServiceClient;
use crate::torchft::{self, LighthouseHeartbeatRequest, LighthouseQuorumRequest};
use crate::{Error, ErrorKind, Result};

/// Delay between tries to connect: doubles from the first to the last.
const RETRY: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// A lighthouse whose host vanished is noticed after the sum of the two.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(5));

/// A connection to a lighthouse; made again by itself where it is lost.
#[derive(Clone, Debug)]
pub struct LighthouseClient {
    service: LighthouseServiceClient<Channel>,
}

/// One member of a quorum.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Member {
    /// Replica id, as the member gave it.
    pub replica_id: String,
    /// Address of its manager.
    pub address: String,
    /// Address of its rendezvous store.
    pub store_address: String,
    /// Step it has reached.
    pub step: i64,
    /// Ranks in its group.
    pub world_size: u64,
    /// It wants a quorum without newcomers.
    pub shrink_only: bool,
    /// Free text, passed on to every member.
    pub data: String,
    /// Commits that failed in a row.
    pub commit_failures: i64,
}

/// A quorum as the lighthouse formed it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Quorum {
    /// Grows with every change of the membership.
    pub quorum_id: i64,
    /// Its members, sorted by replica id.
    pub participants: Vec<Member>,
    /// When it was formed: Unix time in milliseconds, for people.
    pub created_ms: i64,
}

impl LighthouseClient {
    /// Connects to `address` (`http://host:port`; what stands before an `@` travels in `:authority`). A lighthouse
    /// that is not there yet is tried again until `deadline`.
    pub async fn connect(address: &str, deadline: Duration) -> Result<Self> {
        let unusable = |why: String| Error::new(ErrorKind::InvalidInput, CONNECT, why);
        // The part before `@` is a secret: it is in no message.
        let shown = address.rsplit_once('@').map_or(address, |(_, host)| host).to_owned();
        if !address.starts_with("http://") {
            return Err(unusable(format!("{shown} is no http://host:port")));
        }
        let endpoint = Endpoint::from_shared(address.to_owned())
            .map_err(|error| unusable(format!("{shown}: {error}")))?
            .http2_keep_alive_interval(KEEPALIVE.0)
            .keep_alive_timeout(KEEPALIVE.1)
            .keep_alive_while_idle(true)
            .tcp_nodelay(true);
        let until = Instant::now() + deadline;
        let mut delay = RETRY.0;
        // The last try may be cut short: what the ones before it met says more.
        let mut failed = "no answer".to_owned();
        loop {
            match tokio::time::timeout_at(until, endpoint.connect()).await {
                Ok(Ok(channel)) => return Ok(Self { service: LighthouseServiceClient::new(channel) }),
                Ok(Err(error)) => failed = innermost(&error),
                Err(_) => {}
            }
            if Instant::now() >= until {
                let what = format!("no lighthouse at {shown} within {deadline:?}: {failed}");
                return Err(Error::new(ErrorKind::TimedOut, CONNECT, what));
            }
            tokio::time::sleep_until((Instant::now() + delay).min(until)).await;
            delay = (delay * 2).min(RETRY.1);
        }
    }

    /// Says that `replica_id` lives.
    pub async fn heartbeat(&self, replica_id: &str, deadline: Duration) -> Result<()> {
        let request = LighthouseHeartbeatRequest { replica_id: replica_id.to_owned() };
        let mut service = self.service.clone();
        within("send a heartbeat", deadline, service.heartbeat(timed(request, deadline))).await?;
        Ok(())
    }

    /// Asks for a quorum and waits until it has formed.
    ///
    /// [`ErrorKind::TimedOut`] where none forms within `deadline`, [`ErrorKind::Refused`] where the lighthouse does not
    /// know us (any more), [`ErrorKind::Closed`] where it is away, [`ErrorKind::Quorum`] for anything else it says.
    pub async fn quorum(&self, requester: Member, deadline: Duration) -> Result<Quorum> {
        let request = LighthouseQuorumRequest { requester: Some(requester.into()) };
        let mut service = self.service.clone();
        let answer = within("get a quorum", deadline, service.quorum(timed(request, deadline))).await?;
        let none = || Error::new(ErrorKind::Protocol, "get a quorum", "the lighthouse's answer holds none");
        let quorum = answer.quorum.ok_or_else(none)?;
        let created = quorum.created.unwrap_or_default();
        Ok(Quorum {
            quorum_id: quorum.quorum_id,
            participants: quorum.participants.into_iter().map(Member::from).collect(),
            created_ms: created
                .seconds
                .saturating_mul(1000)
                .saturating_add(i64::from(created.nanos) / 1_000_000),
        })
    }
}

const CONNECT: &str = "connect to the lighthouse";

fn timed<T>(message: T, deadline: Duration) -> Request<T> {
    let mut request = Request::new(message);
    // In gRPC's header: the lighthouse stops waiting when we do.
    request.set_timeout(deadline);
    request
}

async fn within<T>(
    operation: &'static str,
    deadline: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T> {
    let late = || Error::new(ErrorKind::TimedOut, operation, format!("not within {deadline:?}"));
    match tokio::time::timeout(deadline, call).await {
        Err(_) => Err(late()),
        Ok(Ok(response)) => Ok(response.into_inner()),
        // The client's own timer shows as Cancelled.
        Ok(Err(status)) if matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled) => Err(late()),
        Ok(Err(status)) => {
            let kind = match status.code() {
                Code::InvalidArgument => ErrorKind::InvalidInput,
                Code::Unauthenticated | Code::PermissionDenied => ErrorKind::Refused,
                Code::Unavailable => ErrorKind::Closed,
                // Not what the lighthouse says, but that it could say nothing: it died with the request under way.
                Code::Unknown if status.source().is_some() => ErrorKind::Closed,
                _ => ErrorKind::Quorum,
            };
            Err(Error::new(kind, operation, status.message()).with_source(status))
        }
    }
}

/// tonic's outermost words are "transport error"; the operating system's are at the bottom.
pub(crate) fn innermost(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

impl From<Member> for torchft::QuorumMember {
    fn from(member: Member) -> Self {
        let Member {
            replica_id,
            address,
            store_address,
            step,
            world_size,
            shrink_only,
            data,
            commit_failures,
        } = member;
        Self { replica_id, address, store_address, step, world_size, shrink_only, data, commit_failures }
    }
}

impl From<torchft::QuorumMember> for Member {
    fn from(member: torchft::QuorumMember) -> Self {
        let torchft::QuorumMember {
            replica_id,
            address,
            store_address,
            step,
            world_size,
            shrink_only,
            data,
            commit_failures,
        } = member;
        Self { replica_id, address, store_address, step, world_size, shrink_only, data, commit_failures }
    }
}
