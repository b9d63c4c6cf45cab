//! Streams: dialled or accepted, and authenticated as far as the transport can.

use std::io;
use std::net::TcpListener as StdListener;
use std::os::fd::AsFd;
use std::sync::Arc;

use nix::sys::socket::{setsockopt, sockopt};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener};

use super::address::Address;
use super::tls::{self, Identity};
use super::unix;
use crate::{Error, ErrorKind, Result};

/// Seconds of silence before TCP asks whether the peer's host still lives, between questions, and questions.
const KEEPALIVE: (u32, u32, u32) = (3, 1, 3);
/// What was sent and stays unacknowledged for so long, in milliseconds, ends the connection. Without it a host that
/// talks all the time would never ask, and would take itself for connected for a quarter of an hour.
const UNACKNOWLEDGED_MS: u32 = 8_000;

/// What a stream reads and writes.
trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// A connected stream whose peer the transport has authenticated.
pub struct Stream {
    io: Box<dyn Duplex>,
    peer_name: Option<String>,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").field("peer_name", &self.peer_name).finish_non_exhaustive()
    }
}

impl Stream {
    fn new(io: impl Duplex + 'static, peer_name: Option<String>) -> Self {
        Self { io: Box::new(io), peer_name }
    }

    /// Name in the peer's certificate; none on a unix socket, whose peer is this user.
    pub fn peer_name(&self) -> Option<&str> {
        self.peer_name.as_deref()
    }

    /// Reading and writing half.
    pub fn split(
        self,
    ) -> (impl AsyncRead + Send + Unpin + 'static, impl AsyncWrite + Send + Unpin + 'static) {
        tokio::io::split(self.io)
    }
}

/// Dials `address`. The server must show a certificate of the run's authority for `server_name` (`tls:` only).
///
/// Has no deadline of its own: the caller's covers the handshake above too.
pub async fn dial(address: &Address, identity: Option<&Identity>, server_name: &str) -> Result<Stream> {
    match address {
        Address::Unix(path) => Ok(Stream::new(unix::dial(path).await?, None)),
        Address::Tls { host, port } => {
            let connector = tls::connector(needed(identity)?)?;
            let name = tls::server_name(server_name)?;
            let tcp = TcpStream::connect((host.as_str(), *port)).await;
            let tcp = tcp.map_err(|error| io_error("dial", error))?;
            keep_alive(&tcp)?;
            let tls = connector.connect(name, tcp).await.map_err(|error| io_error("dial", error))?;
            let name = tls::peer_name(tls.get_ref().1.peer_certificates())?;
            Ok(Stream::new(tls, Some(name)))
        }
    }
}

fn needed(identity: Option<&Identity>) -> Result<&Identity> {
    identity.ok_or_else(|| {
        Error::new(ErrorKind::InvalidInput, "use a `tls:` address", "no certificate was given to this side")
    })
}

/// A bound listener.
pub struct Acceptor {
    socket: Socket,
    address: Address,
}

enum Socket {
    Unix(UnixListener, #[expect(dead_code, reason = "removes the path when dropped")] unix::BoundPath),
    Tls(TcpListener, tokio_rustls::TlsAcceptor),
}

impl std::fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Acceptor").field("address", &self.address).finish_non_exhaustive()
    }
}

/// A connection of which only the kernel knows; [`Incoming::authenticate`] makes it a [`Stream`].
pub(crate) enum Incoming {
    Unix(tokio::net::UnixStream),
    Tls(TcpStream, tokio_rustls::TlsAcceptor),
}

impl Acceptor {
    /// Binds `address`. A dead listener's unix socket is replaced, a live one's is an error.
    pub async fn bind(address: &Address, identity: Option<&Identity>) -> Result<Self> {
        match address {
            Address::Unix(path) => {
                let (listener, bound) = unix::bind(path)?;
                Ok(Self { socket: Socket::Unix(listener, bound), address: address.clone() })
            }
            Address::Tls { host, port } => {
                let acceptor = tls::acceptor(needed(identity)?)?;
                let bound = TcpListener::bind((host.as_str(), *port)).await;
                let listener = bound.map_err(|error| {
                    let kind = Error::io("listen", io::Error::from(error.kind())).kind();
                    Error::new(kind, "listen", format!("{address}: {error}")).with_source(error)
                })?;
                let port = listener.local_addr().map_err(|error| Error::io("listen", error))?.port();
                let address = Address::Tls { host: host.clone(), port };
                Ok(Self { socket: Socket::Tls(listener, acceptor), address })
            }
        }
    }

    /// Serves a TCP socket that listens already.
    pub fn inherit(listener: StdListener, identity: Option<&Identity>) -> Result<Self> {
        const OPERATION: &str = "listen";
        let acceptor = tls::acceptor(needed(identity)?)?;
        listener.set_nonblocking(true).map_err(|error| Error::io(OPERATION, error))?;
        let listener = TcpListener::from_std(listener).map_err(|error| Error::io(OPERATION, error))?;
        let at = listener.local_addr().map_err(|error| Error::io(OPERATION, error))?;
        let address = Address::Tls { host: at.ip().to_string(), port: at.port() };
        Ok(Self { socket: Socket::Tls(listener, acceptor), address })
    }

    /// Where it listens: the port that was chosen in place of 0.
    pub const fn address(&self) -> &Address {
        &self.address
    }

    /// The next connection, authenticated. Tests of the transport use this; channels authenticate many at a time.
    pub async fn accept(&self) -> Result<Stream> {
        self.incoming().await?.authenticate().await
    }

    /// The next connection, not yet authenticated. Cancel safe.
    pub(crate) async fn incoming(&self) -> Result<Incoming> {
        let incoming = match &self.socket {
            Socket::Unix(listener, _) => listener.accept().await.map(|(stream, _)| Incoming::Unix(stream)),
            Socket::Tls(listener, acceptor) => {
                listener.accept().await.map(|(stream, _)| Incoming::Tls(stream, acceptor.clone()))
            }
        };
        incoming.map_err(|error| Error::io("accept a connection", error))
    }
}

impl Incoming {
    /// Checks who it is, before one byte of it is decoded as ours.
    pub(crate) async fn authenticate(self) -> Result<Stream> {
        match self {
            Self::Unix(stream) => {
                unix::check_peer(&stream)?;
                Ok(Stream::new(stream, None))
            }
            Self::Tls(stream, acceptor) => {
                keep_alive(&stream)?;
                let tls =
                    acceptor.accept(stream).await.map_err(|error| io_error("accept a connection", error))?;
                let name = tls::peer_name(tls.get_ref().1.peer_certificates())?;
                Ok(Stream::new(tls, Some(name)))
            }
        }
    }
}

/// Small frames go out at once, and a peer whose host vanished is noticed within ten seconds.
fn keep_alive(stream: &TcpStream) -> Result<()> {
    stream.set_nodelay(true).map_err(|error| Error::io("set up a connection", error))?;
    let (idle, interval, count) = KEEPALIVE;
    let fd = stream.as_fd();
    setsockopt(&fd, sockopt::KeepAlive, &true)
        .and_then(|()| setsockopt(&fd, sockopt::TcpKeepIdle, &idle))
        .and_then(|()| setsockopt(&fd, sockopt::TcpKeepInterval, &interval))
        .and_then(|()| setsockopt(&fd, sockopt::TcpKeepCount, &count))
        .and_then(|()| setsockopt(&fd, sockopt::TcpUserTimeout, &UNACKNOWLEDGED_MS))
        .map_err(|errno| Error::io("set up a connection", errno.into()))
}

/// An I/O error; what TLS refused, or was refused, is [`ErrorKind::Refused`].
pub(crate) fn io_error(operation: &'static str, error: io::Error) -> Error {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()).cloned();
    match inner {
        Some(refusal) => {
            let kind = if matches!(refusal, rustls::Error::InvalidMessage(_)) {
                ErrorKind::Protocol
            } else {
                ErrorKind::Refused
            };
            Error::new(kind, operation, refusal.to_string()).with_source(Arc::new(refusal))
        }
        None => Error::io(operation, error),
    }
}
