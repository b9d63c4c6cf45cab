//! The lighthouse beyond this machine: with certificates on both sides, or not at all.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use sky_monarch_core::channel::Credentials;
use sky_monarch_core::lighthouse::{Config, ControlClient, Server};
use sky_monarch_core::wire::Address;
use sky_monarch_core::wire::tls::{Authority, Identity};
use sky_monarch_core::{Error, ErrorKind};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

const TOKEN: &str = "s3cret-token";
const SOON: Duration = Duration::from_secs(20);

fn authority() -> Authority {
    Authority::new("run", Duration::from_secs(3600)).unwrap()
}

/// Opens a lighthouse whose `private.json` holds `identity`, or says why not.
async fn open(
    folder: &tempfile::TempDir,
    identity: Option<&Identity>,
    settings: Value,
) -> Result<Server, Error> {
    let private = match identity {
        Some(identity) => json!({"token": TOKEN, "identities": {"lighthouse": identity}}),
        None => json!({"token": TOKEN}),
    };
    let path = folder.path().join("private.json");
    std::fs::write(&path, private.to_string()).unwrap();
    let mut config = json!({"run_id": "run", "private": path, "min_replicas": 1});
    config.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
    Server::open(&Config::parse(&config.to_string()).unwrap(), &BTreeMap::new()).await
}

/// A lighthouse on loopback that speaks TLS, its port, and a client's view of its authority.
async fn serve(run: &Authority) -> (tempfile::TempDir, u16, tokio::task::JoinHandle<()>) {
    let folder = tempfile::tempdir().unwrap();
    let identity = run.issue("lighthouse").unwrap();
    let server = open(&folder, Some(&identity), json!({"tls": true})).await.unwrap();
    let port = server.address().port();
    (folder, port, tokio::spawn(async move { server.serve().await.unwrap() }))
}

fn connector(ca_pem: &str, own: Option<&Identity>) -> TlsConnector {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca_pem.as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let config = match own {
        None => config.with_no_client_auth(),
        Some(own) => {
            let chain = vec![CertificateDer::from_pem_slice(own.cert_pem.as_bytes()).unwrap()];
            let key = PrivateKeyDer::from_pem_slice(own.key_pem.as_bytes()).unwrap();
            config.with_client_auth_cert(chain, key).unwrap()
        }
    };
    TlsConnector::from(Arc::new(config))
}

/// What comes back to one request for a page; nothing where the connection is cut before.
async fn page(mut stream: impl AsyncRead + AsyncWrite + Unpin, path: &str, token: &str) -> String {
    let request = format!(
        "GET {path} HTTP/1.1\r\nhost: lighthouse\r\nconnection: close\r\nauthorization: Bearer {token}\r\n\r\n"
    );
    let _ = stream.write_all(request.as_bytes()).await;
    let _ = stream.flush().await;
    let mut answer = Vec::new();
    // An alert, or a reset, is an end too.
    let _ = tokio::time::timeout(SOON, stream.read_to_end(&mut answer)).await.unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn tools_read_the_pages_with_a_certificate_of_the_run_and_the_token() {
    let run = authority();
    let (_folder, port, serving) = serve(&run).await;
    let own = run.issue("tool").unwrap();
    for (path, token, status, words) in [
        ("/status.json", TOKEN, "200", "\"run_id\":\"run\""),
        ("/metrics", TOKEN, "200", "_total"),
        ("/status.json", "other", "401", "no valid bearer token"),
        ("/metrics", "", "401", "no valid bearer token"),
    ] {
        let tcp = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let tls = connector(&own.ca_pem, Some(&own)).connect("lighthouse".try_into().unwrap(), tcp).await;
        let answer = page(tls.unwrap(), path, token).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains(words), "{answer}");
    }
    serving.abort();
}

#[tokio::test]
async fn who_shows_no_certificate_of_the_run_gets_no_answer_whatever_its_token() {
    let (run, other) = (authority(), authority());
    let (_folder, port, serving) = serve(&run).await;
    let ca_pem = run.issue("tool").unwrap().ca_pem;
    let stranger = other.issue("tool").unwrap();
    for own in [None, Some(&stranger)] {
        let tcp = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        // In TLS 1.3 the client learns of the refusal only when it reads.
        let tls = connector(&ca_pem, own).connect("lighthouse".try_into().unwrap(), tcp).await.unwrap();
        assert_eq!(page(tls, "/status.json", TOKEN).await, "");
    }
    let plain = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let answer = page(plain, "/status.json", TOKEN).await;
    assert!(!answer.contains("HTTP"), "{answer}");
    serving.abort();
}

#[tokio::test]
async fn a_silent_connection_holds_nobody_up() {
    let run = authority();
    let (_folder, port, serving) = serve(&run).await;
    let own = run.issue("tool").unwrap();
    let mut tries = 0;
    loop {
        let mut silent = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let tcp = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let dialling = connector(&own.ca_pem, Some(&own)).connect("lighthouse".try_into().unwrap(), tcp);
        let tls = tokio::time::timeout(SOON, dialling).await.unwrap().unwrap();
        // The silent one still has time for its handshake: nobody has waited for its end.
        let waits = Duration::from_millis(1);
        let still_there = tokio::time::timeout(waits, silent.read(&mut [0])).await.is_err();
        assert!(page(tls, "/status.json", TOKEN).await.starts_with("HTTP/1.1 200 "));
        if still_there {
            break;
        }
        // All of this may have been held up for as long as that.
        tries += 1;
        assert!(tries < 3, "it was waited for, each time");
    }
    serving.abort();
}

#[tokio::test]
async fn nothing_is_served_beyond_this_machine_without_certificates() {
    let folder = tempfile::tempdir().unwrap();
    let identity = authority().issue("lighthouse").unwrap();
    let everywhere = "0.0.0.0:0";
    for (with, settings, words) in [
        (None, json!({"listen": everywhere}), "0.0.0.0:0 is not loopback"),
        (None, json!({"listen": everywhere, "tls": true}), "0.0.0.0:0 is not loopback"),
        (Some(&identity), json!({"listen": everywhere, "tls": false}), "0.0.0.0:0 is not loopback"),
        (None, json!({"listen": everywhere, "private": null}), "0.0.0.0:0 is not loopback"),
        (None, json!({"tls": true}), "identities.lighthouse"),
        (None, json!({"control": "tls:0.0.0.0:0"}), "no certificate"),
    ] {
        let error = open(&folder, with, settings.clone()).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{settings}");
        assert!(error.to_string().contains(words), "{settings}: {error}");
        assert!(!format!("{error:?}").contains("PRIVATE KEY"));
    }
    // It takes no more than the certificate: encryption is not something to forget.
    let server = open(&folder, Some(&identity), json!({"listen": everywhere})).await.unwrap();
    let port = server.address().port();
    let serving = tokio::spawn(async move { server.serve().await });
    let plain = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let answer = page(plain, "/status.json", TOKEN).await;
    assert!(!answer.contains("HTTP"), "{answer}");
    serving.abort();
}

#[tokio::test]
async fn a_supervisor_on_another_host_is_known_by_its_certificate_and_the_token() {
    let (run, other) = (authority(), authority());
    let folder = tempfile::tempdir().unwrap();
    // Free, and nobody else's: no other test binds there.
    let free = std::net::TcpListener::bind("127.200.77.2:0").unwrap().local_addr().unwrap();
    let control: Address = format!("tls:{free}").parse().unwrap();
    let lighthouse = run.issue("lighthouse").unwrap();
    let settings = json!({"control": control.to_string()});
    let server = open(&folder, Some(&lighthouse), settings).await.unwrap();
    let serving = tokio::spawn(async move { server.serve().await });

    let dial = |token: &str, identity: Identity| {
        ControlClient::new(control.clone(), Credentials::new("run", token).with_identity(identity))
    };
    let host = run.issue("host-1").unwrap();
    assert_eq!(dial(TOKEN, host.clone()).evict(0, 1, SOON).await.unwrap(), None);
    let refused = dial("other", host).evict(0, 1, SOON).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Refused, "{refused}");
    let stranger = Identity { ca_pem: lighthouse.ca_pem.clone(), ..other.issue("host-1").unwrap() };
    let refused = dial(TOKEN, stranger).evict(0, 1, Duration::from_millis(500)).await.unwrap_err();
    assert!(matches!(refused.kind(), ErrorKind::Refused | ErrorKind::TimedOut), "{refused}");
    serving.abort();
}
