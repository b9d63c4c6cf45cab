//! Mutual TLS: only certificates of the run's own authority open a connection, in both directions.

#![allow(missing_docs, clippy::unwrap_used, reason = "a test")]

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use sky_monarch_core::channel::{self, Channel, Credentials, Limits, Listener};
use sky_monarch_core::protocol::{Command, Peer, Report};
use sky_monarch_core::wire::tls::{Authority, Identity};
use sky_monarch_core::wire::{Acceptor, Address, Frame, FrameReader, FrameWriter, dial};
use sky_monarch_core::{Error, ErrorKind};

const HOUR: Duration = Duration::from_secs(3600);
const SOON: Duration = Duration::from_secs(10);
const BOUND: u32 = 1 << 24;

fn loopback() -> Address {
    "tls:127.0.0.1:0".parse().unwrap()
}

/// Both ends of one connection between `server` and `client`, as far as each got: one frame each way.
async fn meet(
    server: Identity,
    client: Identity,
    name: &str,
) -> (Result<String, Error>, Result<String, Error>) {
    let acceptor = Acceptor::bind(&loopback(), Some(&server)).await.unwrap();
    let address = acceptor.address().clone();
    let serving = tokio::spawn(async move {
        let stream = acceptor.accept().await?;
        let peer = stream.peer_name().unwrap().to_owned();
        let (read, write) = stream.split();
        let frame = FrameReader::new(read, BOUND).read().await?.unwrap();
        FrameWriter::new(write, BOUND).write(&frame).await?;
        Ok(peer)
    });
    let dialling = async {
        let stream = dial(&address, Some(&client), name).await?;
        let peer = stream.peer_name().unwrap().to_owned();
        let (read, write) = stream.split();
        let frame =
            Frame { header: Bytes::from_static(b"hello"), segments: vec![Bytes::from(vec![7; 100_000])] };
        FrameWriter::new(write, BOUND).write(&frame).await?;
        let closed = || Error::new(ErrorKind::Closed, "read", "closed");
        let echo = FrameReader::new(read, BOUND).read().await?.ok_or_else(closed)?;
        assert_eq!(echo, frame);
        Ok(peer)
    };
    let client = tokio::time::timeout(SOON, dialling).await.unwrap();
    let server = tokio::time::timeout(SOON, serving).await.unwrap().unwrap();
    (server, client)
}

#[tokio::test]
async fn peers_of_one_run_meet_and_know_each_other_by_name() {
    let run = Authority::new("run-1", HOUR).unwrap();
    let (server, client) =
        meet(run.issue("controller").unwrap(), run.issue("host-7").unwrap(), "controller").await;
    assert_eq!(server.unwrap(), "host-7");
    assert_eq!(client.unwrap(), "controller");
}

#[tokio::test]
async fn a_client_of_another_authority_is_refused() {
    let (run, other) = (Authority::new("run-1", HOUR).unwrap(), Authority::new("run-1", HOUR).unwrap());
    let mut stranger = other.issue("host-7").unwrap();
    // It even trusts the right authority: only its own certificate is wrong.
    stranger.ca_pem = run.issue("controller").unwrap().ca_pem;
    let (server, client) = meet(run.issue("controller").unwrap(), stranger, "controller").await;
    assert_eq!(server.unwrap_err().kind(), ErrorKind::Refused);
    assert!(matches!(client.unwrap_err().kind(), ErrorKind::Refused | ErrorKind::Closed));
}

#[tokio::test]
async fn a_server_of_another_authority_or_name_is_refused() {
    let (run, other) = (Authority::new("run-1", HOUR).unwrap(), Authority::new("run-1", HOUR).unwrap());
    let (server, client) =
        meet(other.issue("controller").unwrap(), run.issue("host-7").unwrap(), "controller").await;
    assert_eq!(client.unwrap_err().kind(), ErrorKind::Refused);
    assert!(server.is_err());
    // A rank's host of the same run cannot pose as the controller.
    let (server, client) =
        meet(run.issue("host-8").unwrap(), run.issue("host-7").unwrap(), "controller").await;
    let error = client.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert!(server.is_err());
}

#[tokio::test]
async fn an_expired_certificate_is_refused_on_either_side() {
    let run = Authority::new("run-1", HOUR).unwrap();
    let past = SystemTime::now() - Duration::from_secs(60);
    let (good, late) = (run.issue("controller").unwrap(), run.issue_until("host-7", past).unwrap());
    let (server, client) = meet(good.clone(), late, "controller").await;
    let error = server.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.to_string().contains("xpired"), "{error}");
    assert!(client.is_err());

    let late = run.issue_until("controller", past).unwrap();
    let (server, client) = meet(late, run.issue("host-7").unwrap(), "controller").await;
    assert_eq!(client.unwrap_err().kind(), ErrorKind::Refused);
    assert!(server.is_err());
}

#[tokio::test]
async fn a_client_without_a_certificate_is_refused_before_its_bytes_are_read() {
    let run = Authority::new("run-1", HOUR).unwrap();
    let server = run.issue("controller").unwrap();
    let acceptor = Acceptor::bind(&loopback(), Some(&server)).await.unwrap();
    let Address::Tls { port, .. } = acceptor.address().clone() else { panic!("a tls address") };
    let serving = tokio::spawn(async move { acceptor.accept().await.map(drop) });

    let mut roots = rustls::RootCertStore::empty();
    use rustls::pki_types::pem::PemObject;
    roots.add(rustls::pki_types::CertificateDer::from_pem_slice(server.ca_pem.as_bytes()).unwrap()).unwrap();
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(config));
    let tcp = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    // In TLS 1.3 the client learns of the refusal only when it reads.
    drop(connector.connect("controller".try_into().unwrap(), tcp).await);
    let error = tokio::time::timeout(SOON, serving).await.unwrap().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.to_string().contains("ertificate"), "{error}");
}

#[tokio::test]
async fn plain_bytes_are_no_way_in() {
    let run = Authority::new("run-1", HOUR).unwrap();
    let acceptor = Acceptor::bind(&loopback(), Some(&run.issue("controller").unwrap())).await.unwrap();
    let Address::Tls { port, .. } = acceptor.address().clone() else { panic!("a tls address") };
    let serving = tokio::spawn(async move { acceptor.accept().await.map(drop) });
    let mut tcp = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut tcp, &[5, 0, 0, 0, 1, 0, 0, 0, 0]).await.unwrap();
    let error = tokio::time::timeout(SOON, serving).await.unwrap().unwrap().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Protocol | ErrorKind::Refused), "{error}");
}

#[tokio::test]
async fn nothing_listens_beyond_this_machine_without_a_certificate() {
    let anywhere: Address = "tls:0.0.0.0:0".parse().unwrap();
    assert_eq!(Acceptor::bind(&anywhere, None).await.unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!("tcp:0.0.0.0:0".parse::<Address>().unwrap_err().kind(), ErrorKind::InvalidInput);
}

#[test]
fn names_that_are_no_dns_label_get_no_certificate() {
    let run = Authority::new("run-1", HOUR).unwrap();
    for name in ["", "a.b", "*", "-a", "a-", "a b", "ü", &"x".repeat(64)] {
        assert_eq!(run.issue(name).unwrap_err().kind(), ErrorKind::InvalidInput, "{name:?}");
    }
}

#[test]
fn secrets_are_in_no_debug_output() {
    let run = Authority::new("run-1", HOUR).unwrap();
    let identity = run.issue("host-7").unwrap();
    let credentials = Credentials::new("run-1", "s3cret").with_identity(identity.clone());
    let shown = format!("{run:?} {identity:?} {credentials:?}");
    assert!(!shown.contains("s3cret") && !shown.contains("PRIVATE"), "{shown}");
}

#[tokio::test]
async fn a_channel_works_over_tls_and_still_checks_the_token() {
    let run = Authority::new("run-1", HOUR).unwrap();
    let server = Credentials::new("run-1", "token").with_identity(run.issue("controller").unwrap());
    let mut listener = Listener::bind(&loopback(), server, Limits::default()).await.unwrap();
    let address = listener.address().clone();
    let peer = Peer::Agent { host: "host-7".into(), attempt: 0, pid: 1, incarnation: 2, groups: Vec::new(), probe: None };
    let identity = run.issue("host-7").unwrap();

    let wrong = Credentials::new("run-1", "other").with_identity(identity.clone());
    let refused =
        channel::connect::<Report, Command>(&address, peer.clone(), &wrong, &Limits::default(), SOON).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Refused);

    let right = Credentials::new("run-1", "token").with_identity(identity);
    let (limits, dialled) = (Limits::default(), address.clone());
    let dialling = tokio::spawn(async move {
        channel::connect::<Report, Command>(&dialled, peer, &right, &limits, SOON).await
    });
    let pending = tokio::time::timeout(SOON, listener.accept()).await.unwrap().unwrap();
    assert_eq!(pending.peer_name(), Some("host-7"));
    let mut near: Channel<Command, Report> = pending.welcome().await.unwrap();
    let mut far = dialling.await.unwrap().unwrap();
    near.send(&Command::Ack { seq: 7 }).await.unwrap();
    assert!(matches!(far.recv().await.unwrap(), Command::Ack { seq: 7 }));
    far.send(&Report::LogChunk { request: 1, offset: 0, data: vec![0xff; 1000], eof: true }).await.unwrap();
    drop(far);
    assert!(matches!(near.recv().await.unwrap(), Report::LogChunk { data, .. } if data == vec![0xff; 1000]));
    assert_eq!(near.recv().await.unwrap_err().kind(), ErrorKind::Closed);
}
