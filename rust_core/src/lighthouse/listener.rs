//! The lighthouse's port: inherited from the agent or bound here, and which connections are open on it.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::os::fd::RawFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Sleep, sleep};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::Stream;
use tonic::transport::server::Connected;

use super::registry::ConnectionId;
use crate::wire::inherited::{self, LISTEN_FD_ENV, LISTEN_FDS_ENV};
use crate::{Error, ErrorKind, Result};

/// Open connections beyond which newcomers are closed at once.
const MAX_CONNECTIONS: usize = 16_384;

/// Pause after an accept that failed for want of descriptors or memory.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(50);

/// The inherited socket where `SKY_MONARCH_LISTEN_FD` names one (it stays open with the agent while we are down, so
/// that nobody is refused), else one bound to `address`.
///
/// `secured`: what arrives there is encrypted, and shows a certificate of the run. Without that only loopback is served.
pub fn open(
    environment: &BTreeMap<String, String>,
    address: SocketAddr,
    secured: bool,
) -> Result<StdListener> {
    const OPERATION: &str = "open the lighthouse's port";
    let loopback_only = |bound: SocketAddr| {
        if secured || bound.ip().is_loopback() {
            return Ok(());
        }
        let message = format!(
            "{bound} is not loopback, and there is no TLS: that needs `identities.lighthouse` in private.json, \
             and no `tls: false`"
        );
        Err(Error::new(ErrorKind::InvalidInput, OPERATION, message))
    };
    let listener = match environment.get(LISTEN_FD_ENV) {
        Some(number) => inherit(LISTEN_FD_ENV, number, 0)?,
        None => {
            loopback_only(address)?;
            StdListener::bind(address).map_err(|error| {
                Error::new(ErrorKind::Io, OPERATION, format!("{address}: {error}")).with_source(error)
            })?
        }
    };
    loopback_only(listener.local_addr().map_err(|error| Error::io(OPERATION, error))?)?;
    listener.set_nonblocking(true).map_err(|error| Error::io(OPERATION, error))?;
    Ok(listener)
}

/// The second inherited socket, for the control channel; none where there is only one.
pub fn inherited_control(environment: &BTreeMap<String, String>) -> Result<Option<StdListener>> {
    let count = environment.get(LISTEN_FDS_ENV).map_or("1", String::as_str);
    match (environment.get(LISTEN_FD_ENV), count) {
        (Some(first), "2") => inherit(LISTEN_FD_ENV, first, 1).map(Some),
        (_, "1") => Ok(None),
        _ => {
            let message = format!("{LISTEN_FDS_ENV}={count}: a lighthouse has one socket or two");
            Err(Error::new(ErrorKind::InvalidInput, "inherit the lighthouse's ports", message))
        }
    }
}

fn inherit(name: &str, number: &str, offset: RawFd) -> Result<StdListener> {
    const OPERATION: &str = "inherit the lighthouse's port";
    let invalid =
        |why: &str| Error::new(ErrorKind::InvalidInput, OPERATION, format!("{name}={number}: {why}"));
    let first: RawFd = number.parse().map_err(|_| invalid("no number"))?;
    let fd = first.checked_add(offset).ok_or_else(|| invalid("no descriptor"))?;
    inherited::listener(fd).map_err(|error| invalid(error.message()))
}

/// Told when a connection ends.
pub type OnClose = Arc<dyn Fn(ConnectionId) + Send + Sync>;

/// The connections as they arrive, each numbered and reported when it ends.
pub struct Incoming {
    listener: TcpListener,
    on_close: OnClose,
    open: Arc<AtomicUsize>,
    next: AtomicU64,
    backoff: Option<Pin<Box<Sleep>>>,
}

impl Incoming {
    /// Accepts from `listener`; `on_close` is called once for every connection.
    pub fn new(listener: StdListener, on_close: OnClose) -> Result<Self> {
        let listener = TcpListener::from_std(listener)
            .map_err(|error| Error::io("serve the lighthouse's port", error))?;
        Ok(Self { listener, on_close, open: Arc::default(), next: AtomicU64::new(0), backoff: None })
    }
}

impl Stream for Incoming {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(backoff) = &mut self.backoff {
                ready!(backoff.as_mut().poll(context));
                self.backoff = None;
            }
            match ready!(self.listener.poll_accept(context)) {
                Ok(_) if self.open.load(Ordering::Relaxed) >= MAX_CONNECTIONS => {
                    tracing::warn!(limit = MAX_CONNECTIONS, "connection closed: too many are open");
                }
                Ok((stream, _)) => {
                    // small requests, small answers: never wait to fill a segment
                    if let Err(error) = stream.set_nodelay(true) {
                        tracing::debug!(%error, "the peer left at once");
                        continue;
                    }
                    self.open.fetch_add(1, Ordering::Relaxed);
                    let id = self.next.fetch_add(1, Ordering::Relaxed);
                    let guard =
                        Guard { id, open: Arc::clone(&self.open), on_close: Arc::clone(&self.on_close) };
                    return Poll::Ready(Some(Ok(Connection { stream: Io::Plain(stream), guard })));
                }
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    self.backoff = Some(Box::pin(sleep(ACCEPT_BACKOFF)));
                }
            }
        }
    }
}

/// One accepted connection.
pub struct Connection {
    stream: Io,
    guard: Guard,
}

enum Io {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// The stream inside, whichever it is, pinned.
macro_rules! inner {
    ($connection:ident, $stream:ident => $work:expr) => {
        match &mut $connection.stream {
            Io::Plain(stream) => {
                let $stream = Pin::new(stream);
                $work
            }
            Io::Tls(stream) => {
                let $stream = Pin::new(stream.as_mut());
                $work
            }
        }
    };
}

impl Connection {
    /// The same connection once its peer has shown a certificate of the run.
    pub(super) async fn secure(self, acceptor: &TlsAcceptor) -> io::Result<Self> {
        let Self { stream, guard } = self;
        let stream = match stream {
            Io::Plain(stream) => Io::Tls(Box::new(acceptor.accept(stream).await?)),
            tls => tls,
        };
        Ok(Self { stream, guard })
    }
}

struct Guard {
    id: ConnectionId,
    open: Arc<AtomicUsize>,
    on_close: OnClose,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
        (self.on_close)(self.id);
    }
}

/// Number of the connection that a request came in on, in the request's extensions.
#[derive(Clone, Copy, Debug)]
pub struct Via(pub ConnectionId);

impl Connected for Connection {
    type ConnectInfo = Via;

    fn connect_info(&self) -> Via {
        Via(self.guard.id)
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        inner!(self, stream => stream.poll_read(context, into))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        inner!(self, stream => stream.poll_write(context, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        inner!(self, stream => stream.poll_write_vectored(context, slices))
    }

    fn is_write_vectored(&self) -> bool {
        match &self.stream {
            Io::Plain(stream) => stream.is_write_vectored(),
            Io::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        inner!(self, stream => stream.poll_flush(context))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        inner!(self, stream => stream.poll_shutdown(context))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, IntoRawFd};

    use nix::fcntl::{FcntlArg, fcntl};

    use super::*;

    fn any() -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], 0))
    }

    #[test]
    fn an_inherited_listener_is_served_as_it_is() {
        let bound = StdListener::bind(any()).expect("bound");
        let address = bound.local_addr().expect("address");
        let environment = BTreeMap::from([(LISTEN_FD_ENV.to_owned(), bound.into_raw_fd().to_string())]);
        let listener = open(&environment, any(), false).expect("inherited");
        assert_eq!(listener.local_addr().expect("address"), address);
        let flags = fcntl(&listener, FcntlArg::F_GETFD).expect("flags");
        assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
    }

    #[test]
    fn whatever_is_no_listening_socket_is_refused_and_left_open() {
        let file = tempfile::tempfile().expect("file");
        let number = file.as_raw_fd().to_string();
        for given in [number.as_str(), "2", "x", "-1", "987654"] {
            let environment = BTreeMap::from([(LISTEN_FD_ENV.to_owned(), given.to_owned())]);
            let error = open(&environment, any(), true).expect_err(given);
            assert!(error.to_string().contains(LISTEN_FD_ENV), "{error}");
        }
        file.metadata().expect("still open");
    }

    #[test]
    fn without_tls_only_loopback_is_served() {
        let everywhere = SocketAddr::from(([0, 0, 0, 0], 0));
        let error = open(&BTreeMap::new(), everywhere, false).expect_err("open to all");
        assert!(error.to_string().contains("no TLS"), "{error}");
        open(&BTreeMap::new(), everywhere, true).expect("guarded by certificates");
        let inherited = StdListener::bind(everywhere).expect("bound").into_raw_fd();
        let environment = BTreeMap::from([(LISTEN_FD_ENV.to_owned(), inherited.to_string())]);
        open(&environment, any(), false).expect_err("inherited, open to all");
    }
}
