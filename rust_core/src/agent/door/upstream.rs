//! How the door dials the lighthouse: in plaintext on this machine, with the run's certificates beyond it.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::lighthouse::SERVER_NAME;
use crate::wire::tls;
use crate::{Error, ErrorKind, Result};

/// For one connect to the lighthouse, the handshake included.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);
/// A lighthouse whose host has vanished is noticed after the sum of the two.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(5));

/// One lighthouse.
#[derive(Clone)]
pub(super) struct Upstream {
    /// `host:port`.
    host: String,
    /// None: plaintext.
    tls: Option<TlsConnector>,
}

impl Upstream {
    /// Reads `http://host:port`, on loopback only, or `https://host:port`, which takes the certificate of this host.
    pub(super) fn new(url: &str, certificate: Option<&TlsConnector>) -> Result<Self> {
        let unusable = |why: &str| {
            let message = format!("{url}: {why}");
            Error::new(ErrorKind::InvalidInput, "open the door to the lighthouse", message)
        };
        let (host, tls) = if let Some(host) = url.strip_prefix("https://") {
            let none = "https takes this host's certificate: `identities.agent` in private.json";
            (host, Some(certificate.cloned().ok_or_else(|| unusable(none))?))
        } else if let Some(host) = url.strip_prefix("http://") {
            (host, None)
        } else {
            return Err(unusable("not of the form http://host:port or https://host:port"));
        };
        let uri: Uri = format!("http://{host}").parse().map_err(|_| unusable("not of the form host:port"))?;
        let plain = uri.path() == "/" && uri.query().is_none() && !host.contains(['@', '/']);
        if !plain || uri.port_u16().is_none() || uri.host().is_none_or(str::is_empty) {
            return Err(unusable("not of the form host:port"));
        }
        if tls.is_none() && !uri.host().is_some_and(is_loopback) {
            return Err(unusable("beyond this machine a lighthouse is dialled with https"));
        }
        Ok(Self { host: host.to_owned(), tls })
    }

    /// A connection to it, made with its first request. `userinfo` says who speaks.
    pub(super) fn channel(&self, userinfo: &str) -> Result<Channel> {
        // The scheme is that of what is spoken inside: TLS is the connector's own.
        let endpoint = Endpoint::from_shared(format!("http://{userinfo}@{}", self.host)).map_err(|_| {
            // Its own words would repeat the secret.
            Error::new(ErrorKind::InvalidInput, "dial the lighthouse", "its address cannot be used")
        })?;
        let endpoint = endpoint
            .connect_timeout(CONNECT_LIMIT)
            .http2_keep_alive_interval(KEEPALIVE.0)
            .keep_alive_timeout(KEEPALIVE.1)
            .keep_alive_while_idle(true)
            .tcp_nodelay(true);
        let Some(tls) = &self.tls else { return Ok(endpoint.connect_lazy()) };
        let (tls, host) = (tls.clone(), self.host.clone());
        let connector = tower::service_fn(move |_: Uri| {
            let (tls, host) = (tls.clone(), host.clone());
            async move {
                let late = |_| io::Error::new(io::ErrorKind::TimedOut, "the handshake took too long");
                timeout(CONNECT_LIMIT, handshake(&tls, &host)).await.map_err(late)?.map(TokioIo::new)
            }
        });
        Ok(endpoint.connect_with_connector_lazy(connector))
    }
}

async fn handshake(tls: &TlsConnector, host: &str) -> io::Result<TlsStream<TcpStream>> {
    let name = tls::server_name(SERVER_NAME).map_err(io::Error::other)?;
    let stream = TcpStream::connect(host).await?;
    stream.set_nodelay(true)?;
    tls.connect(name, stream).await
}

fn is_loopback(host: &str) -> bool {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    host == "localhost" || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::tls::Authority;

    #[test]
    fn nothing_leaves_this_machine_without_a_certificate() {
        let run = Authority::new("run", Duration::from_secs(60)).expect("an authority");
        let connector = tls::connector(&run.issue("host-1").expect("a certificate")).expect("a connector");
        for (url, with, without) in [
            ("http://127.0.0.1:80", true, true),
            ("http://[::1]:80", true, true),
            ("http://localhost:80", true, true),
            ("https://10.0.0.1:80", true, false),
            ("https://head.example:80", true, false),
            ("https://127.0.0.1:80", true, false),
            ("http://10.0.0.1:80", false, false),
            ("http://head.example:80", false, false),
            ("http://127.0.0.1.example:80", false, false),
            ("http://0.0.0.0:80", false, false),
            ("http://127.0.0.1", false, false),
            ("https://r0.g1.secret@10.0.0.1:80", false, false),
            ("https://10.0.0.1:80/path", false, false),
            ("https://10.0.0.1:80?query", false, false),
            ("https://:80", false, false),
            ("grpc://127.0.0.1:80", false, false),
            ("", false, false),
        ] {
            assert_eq!(Upstream::new(url, Some(&connector)).is_ok(), with, "{url}");
            assert_eq!(Upstream::new(url, None).is_ok(), without, "{url}, without a certificate");
        }
    }
}
