//! Mutual TLS: only certificates of the run's own authority open a connection, in both directions.

#![allow(missing_docs, clippy::unwrap_used, reason = "a test")]

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use sky_monarch_core::channel::{
    self, Channel, Credentials, Endpoint, Limits, Listener, Server, ServerEvent, admit_agent,
};
use sky_monarch_core::protocol::{Command, Peer, Report};
use sky_monarch_core::wire::tls::{Authority, Identity};
use sky_monarch_core::wire::{Acceptor, Address, Frame, FrameReader, FrameWriter, dial};
use sky_monarch_core::{Error, ErrorKind};

const HOUR: Duration = Duration::from_secs(3600);
const SOON: Duration = Duration::from_secs(20);
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
    let peer = Peer::Agent {
        host: "host-7".into(),
        attempt: 0,
        pid: 1,
        incarnation: 2,
        groups: Vec::new(),
        probe: None,
        examining: false,
    };
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

/// Dials as `peer` with a certificate; the reason where it is refused.
async fn dial_as(address: &Address, identity: Identity, host: &str, attempt: u32) -> Result<(), Error> {
    let credentials = Credentials::new("run-1", "token").with_identity(identity);
    let peer = Peer::Agent {
        host: host.into(),
        attempt,
        pid: 1,
        incarnation: 2,
        groups: Vec::new(),
        probe: None,
        examining: false,
    };
    channel::connect::<Report, Command>(address, peer, &credentials, &Limits::default(), SOON).await.map(drop)
}

#[tokio::test]
async fn a_controller_lets_in_whom_a_certificate_of_its_run_names_on_a_socket_that_outlives_it() {
    let (run, other) = (Authority::new("run-1", HOUR).unwrap(), Authority::new("run-1", HOUR).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let near: Address = format!("unix:{}", folder.path().join("c.sock").display()).parse().unwrap();
    // As the head's agent does: bound once, and passed to each controller in turn.
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = socket.local_addr().unwrap().port();
    let far: Address = format!("tls:127.0.0.1:{port}").parse().unwrap();
    let name = |host: &str| run.issue(host).unwrap();
    for life in 0..2 {
        let credentials = Credentials::new("run-1", "token").with_identity(name("controller"));
        let endpoints = vec![Endpoint::Bind(near.clone()), Endpoint::Inherited(socket.try_clone().unwrap())];
        let mut server: Server<Command, Report> =
            Server::open(endpoints, credentials, Limits::default(), admit_agent, || {}).await.unwrap();
        assert_eq!(server.addresses(), [near.clone(), far.clone()], "life {life}");

        dial_as(&far, name("host-7-a2"), "host-7", 2).await.unwrap();
        let (_, event) = tokio::time::timeout(SOON, server.next()).await.unwrap().unwrap();
        let ServerEvent::Opened { peer: Peer::Agent { host, attempt: 2, .. }, certificate } = event else {
            panic!("{event:?}")
        };
        assert_eq!((host.as_str(), certificate.as_deref()), ("host-7", Some("host-7-a2")));

        // Another host's, an attempt that was given up, one that claims to be newer, the head's own.
        for (shown, host, attempt) in [
            ("host-8-a2", "host-7", 2),
            ("host-7-a1", "host-7", 2),
            ("host-7-a2", "host-7", 3),
            ("host-7-a2", "host-7", 0),
            ("controller", "host-7", 2),
        ] {
            let refused = dial_as(&far, name(shown), host, attempt).await.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Refused);
            let words =
                format!("the certificate of {shown} does not speak for host {host}, attempt {attempt}");
            assert_eq!(refused.message(), words);
        }
        let stranger = other.issue("host-7-a2").unwrap();
        let posing = Identity { ca_pem: name("x").ca_pem, ..stranger };
        let refused = dial_as(&far, posing, "host-7", 2).await.unwrap_err();
        assert!(matches!(refused.kind(), ErrorKind::Refused | ErrorKind::Closed), "{refused}");

        // On this machine the user is proof enough.
        dial_as(&near, name("controller"), "head", 0).await.unwrap();
        server.close().await;
        // Nobody is refused while there is no controller: the connection waits in the socket's backlog.
        let waiting = tokio::net::TcpStream::connect(("127.0.0.1", port)).await;
        assert!(waiting.is_ok(), "the socket outlives the controller");
    }
}

#[tokio::test]
async fn an_authority_that_was_kept_issues_what_the_first_one_trusts() {
    let run = Authority::new("run-1", HOUR).unwrap();
    let kept = serde_json::to_string(&run.keep()).unwrap();
    assert!(!format!("{:?}", run.keep()).contains("PRIVATE"));
    let again = Authority::from_kept(serde_json::from_str(&kept).unwrap()).unwrap();
    let (server, client) =
        meet(run.issue("controller").unwrap(), again.issue("host-7-a1").unwrap(), "controller").await;
    assert_eq!((server.unwrap().as_str(), client.unwrap().as_str()), ("host-7-a1", "controller"));
    let (server, client) =
        meet(again.issue("controller").unwrap(), run.issue("host-7-a1").unwrap(), "controller").await;
    assert!(server.is_ok() && client.is_ok());
    for damage in ["key_pem", "ca_pem"] {
        let mut kept: serde_json::Value = serde_json::from_str(&kept).unwrap();
        kept[damage] = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----".into();
        let error = Authority::from_kept(serde_json::from_value(kept).unwrap()).unwrap_err();
        assert!(error.kind() == ErrorKind::InvalidInput && !error.to_string().contains("AAAA"), "{error}");
    }
}
