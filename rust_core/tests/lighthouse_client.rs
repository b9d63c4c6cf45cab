//! The lighthouse's client against a lighthouse of this test: what travels, and what each refusal becomes.

#![allow(missing_docs, clippy::unwrap_used, reason = "a test")]

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sky_monarch_core::ErrorKind;
use sky_monarch_core::lighthouse_client::{LighthouseClient, Member};
use sky_monarch_core::torchft::lighthouse_service_server::{LighthouseService, LighthouseServiceServer};
use sky_monarch_core::torchft::{
    LighthouseHeartbeatRequest, LighthouseHeartbeatResponse, LighthouseQuorumRequest,
    LighthouseQuorumResponse, Quorum,
};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Request, Response, Status};

const SOON: Duration = Duration::from_secs(30);

/// Answers by the replica's name: `code:<n>` with that status, `never` not at all, others with a quorum of one.
#[derive(Clone, Default)]
struct Double {
    beats: Arc<Mutex<Vec<String>>>,
    timeouts: Arc<Mutex<Vec<String>>>,
}

#[tonic::async_trait]
impl LighthouseService for Double {
    async fn quorum(
        &self,
        request: Request<LighthouseQuorumRequest>,
    ) -> Result<Response<LighthouseQuorumResponse>, Status> {
        let timeout = request.metadata().get("grpc-timeout").unwrap().to_str().unwrap().to_owned();
        self.timeouts.lock().unwrap().push(timeout);
        let member = request.into_inner().requester.unwrap();
        if let Some(code) = member.replica_id.strip_prefix("code:") {
            return Err(Status::new(Code::from_i32(code.parse().unwrap()), "because"));
        }
        if member.replica_id == "never" {
            std::future::pending::<()>().await;
        }
        let created = Some(prost_types::Timestamp { seconds: 12, nanos: 345_999_999 });
        let quorum = (member.replica_id != "none").then(|| Quorum {
            quorum_id: 7,
            participants: vec![member],
            created,
        });
        Ok(Response::new(LighthouseQuorumResponse { quorum }))
    }

    async fn heartbeat(
        &self,
        request: Request<LighthouseHeartbeatRequest>,
    ) -> Result<Response<LighthouseHeartbeatResponse>, Status> {
        self.beats.lock().unwrap().push(request.into_inner().replica_id);
        Ok(Response::new(LighthouseHeartbeatResponse {}))
    }
}

/// A running lighthouse with a runtime of its own: when that goes, its connections go too, as with a dead process.
struct Up {
    address: SocketAddr,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Drop for Up {
    fn drop(&mut self) {
        self.runtime.take().unwrap().shutdown_background();
    }
}

fn serve(double: Double, at: SocketAddr) -> Up {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let incoming = {
        let _inside = runtime.enter();
        TcpIncoming::bind(at).unwrap()
    };
    let address = incoming.local_addr().unwrap();
    let service = Server::builder().add_service(LighthouseServiceServer::new(double));
    runtime.spawn(service.serve_with_incoming(incoming));
    Up { address, runtime: Some(runtime) }
}

fn any() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

fn member(replica_id: &str) -> Member {
    Member {
        replica_id: replica_id.into(),
        address: "http://a:1".into(),
        store_address: "b:2".into(),
        step: 3,
        world_size: 4,
        shrink_only: true,
        data: "{\"ü\": 1}".into(),
        commit_failures: 5,
    }
}

#[tokio::test]
async fn a_request_arrives_whole_and_the_quorum_comes_back_whole() {
    let double = Double::default();
    let up = serve(double.clone(), any());
    let client =
        LighthouseClient::connect(&format!("http://r1.g3.secret@{}", up.address), SOON).await.unwrap();
    client.heartbeat("r1", SOON).await.unwrap();
    assert_eq!(*double.beats.lock().unwrap(), ["r1"]);
    let quorum = client.quorum(member("r1"), Duration::from_millis(2500)).await.unwrap();
    assert_eq!((quorum.quorum_id, quorum.created_ms), (7, 12_345));
    assert_eq!(quorum.participants, [member("r1")]);
    assert_eq!(*double.timeouts.lock().unwrap(), ["2500000u"], "the lighthouse knows how long we wait");
}

#[tokio::test]
async fn each_refusal_has_its_kind_and_the_lighthouses_words() {
    let up = serve(Double::default(), any());
    let client = LighthouseClient::connect(&format!("http://{}", up.address), SOON).await.unwrap();
    for (code, kind) in [
        (Code::InvalidArgument, ErrorKind::InvalidInput),
        (Code::Unauthenticated, ErrorKind::Refused),
        (Code::PermissionDenied, ErrorKind::Refused),
        (Code::Unavailable, ErrorKind::Closed),
        (Code::DeadlineExceeded, ErrorKind::TimedOut),
        (Code::FailedPrecondition, ErrorKind::Quorum),
        (Code::Internal, ErrorKind::Quorum),
    ] {
        let error = client.quorum(member(&format!("code:{}", code as i32)), SOON).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{code:?}");
        assert!(error.to_string().contains("because") || kind == ErrorKind::TimedOut, "{error}");
    }
    let error = client.quorum(member("none"), SOON).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    let started = std::time::Instant::now();
    let error = client.quorum(member("never"), Duration::from_millis(200)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(started.elapsed() < SOON);
}

#[tokio::test]
async fn a_lighthouse_that_comes_late_or_comes_back_is_found() {
    // Free, and nobody else's: no other test binds there.
    let address = std::net::TcpListener::bind("127.200.77.1:0").unwrap().local_addr().unwrap();
    let dialled = format!("http://{address}");
    let dialling = tokio::spawn(async move { LighthouseClient::connect(&dialled, SOON).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    let up = again(address).await;
    let client = dialling.await.unwrap().unwrap();
    client.heartbeat("r1", SOON).await.unwrap();

    drop(up);
    let deadline = std::time::Instant::now() + SOON;
    while client.heartbeat("r1", SOON).await.is_ok() {
        assert!(std::time::Instant::now() < deadline, "the connections of a dead server end");
    }
    let _up = again(address).await;
    while client.heartbeat("r1", Duration::from_secs(2)).await.is_err() {
        assert!(std::time::Instant::now() < deadline, "the connection is made again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Serves at an address whose last server may be going away still.
async fn again(address: SocketAddr) -> Up {
    let deadline = std::time::Instant::now() + SOON;
    while let Err(error) = std::net::TcpListener::bind(address) {
        assert!(std::time::Instant::now() < deadline, "{error}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    serve(Double::default(), address)
}
