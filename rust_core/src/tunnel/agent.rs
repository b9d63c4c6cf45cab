//! A host's end of the tunnel: its line to the relay, the streams that it opens, and those that it takes.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::allowed::Allowed;
use super::limits::Limits;
use super::message::{self, Answer, Declined, Hello, Wanted, Wish};
use super::mirror::Mirrors;
use super::relay::SERVER_NAME;
use super::splice::{self, Counts, Ends};
use super::{address_of, is_inside};
use crate::agent::mutant;
use crate::protocol;
use crate::wire::tls::Identity;
use crate::wire::{self, Acceptor, Address};
use crate::{Error, ErrorKind, Result};

/// Pause before the relay is dialled again: doubles from the first to the last.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));
/// A line that lasted this long starts the pauses anew.
const STEADY: Duration = Duration::from_secs(5);
/// Words that wait for a line.
const MOST_WORDS: usize = 256;

/// Who a host is in the tunnel.
#[derive(Clone, Debug)]
pub struct Place {
    /// Where the relay is, `tls:<host>:<port>`.
    pub relay: Address,
    /// The certificate of this attempt at the host.
    pub identity: Identity,
    /// The run.
    pub run_id: String,
    /// Its secret.
    pub token: String,
    /// This host.
    pub host: String,
    /// How often it has been provisioned.
    pub attempt: u32,
    /// Where its ranks listen: [`address_of`] its name.
    pub address: IpAddr,
}

/// The tunnel of one host; clones are the same one.
#[derive(Clone)]
pub struct Tunnel(Arc<Shared>);

struct Shared {
    place: Place,
    address: Ipv4Addr,
    limits: Limits,
    allowed: Allowed,
    streams: Arc<Semaphore>,
    counts: Counts,
    mirrors: Mirrors,
}

impl fmt::Debug for Tunnel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tunnel").field("address", &self.0.address).finish_non_exhaustive()
    }
}

impl Tunnel {
    /// Keeps a line to the relay from now on. Must run inside a Tokio runtime.
    ///
    /// [`ErrorKind::InvalidInput`] where the host's address is not the one that the others know it by.
    pub fn start(place: Place, limits: Limits) -> Result<Self> {
        let invalid = |why: String| Error::new(ErrorKind::InvalidInput, "open the tunnel", why);
        let Place { host, address, .. } = &place;
        let known = address_of(host);
        let own = known.ok_or_else(|| {
            invalid(format!("host {host} has no address in it: it needs a name that ends in -h<number>"))
        })?;
        if *address != IpAddr::V4(own) {
            return Err(invalid(format!("`address` is {address}, and the others know host {host} as {own}")));
        }
        let tunnel = Self(Arc::new(Shared {
            address: own,
            allowed: Allowed::new(&place.run_id, own),
            streams: Arc::new(Semaphore::new(limits.streams)),
            counts: Counts::default(),
            mirrors: Mirrors::new(limits.mirrors),
            limits,
            place,
        }));
        tokio::spawn(tunnel.clone().keep_line());
        Ok(tunnel)
    }

    /// Serves the ranks of this host at a unix socket: they say whom they are about to dial.
    pub async fn serve(&self, socket: &Address) -> Result<()> {
        let acceptor = Acceptor::bind(socket, None).await?;
        tokio::spawn(self.clone().serve_ranks(acceptor));
        Ok(())
    }

    /// A stream to a port of another host's ranks, within [`Limits::open`] and the handshake.
    pub async fn open(&self, to: SocketAddrV4) -> Result<Ends> {
        self.dial(Wish::Open { to }).await
    }

    pub(super) fn mirrors(&self) -> &Mirrors {
        &self.0.mirrors
    }

    /// Whether an address is that of another host of the tunnel.
    pub(super) fn is_elsewhere(&self, to: &SocketAddr) -> Option<SocketAddrV4> {
        let SocketAddr::V4(to) = to else { return None };
        (is_inside(IpAddr::V4(*to.ip())) && *to.ip() != self.0.address && to.port() != 0).then_some(*to)
    }

    /// Carries a connection that a rank has made to a mirror.
    pub(super) async fn carry(&self, near: TcpStream, to: SocketAddrV4) {
        let _ = near.set_nodelay(true);
        let Ok(_stream) = Arc::clone(&self.0.streams).try_acquire_owned() else {
            tracing::warn!(%to, limit = self.0.limits.streams, "no stream: too many");
            return splice::reset(&near);
        };
        match self.open(to).await {
            Ok(far) => {
                if let Err(error) = splice::join(near, far, &self.0.counts).await {
                    tracing::debug!(%to, %error, "a stream was reset");
                }
            }
            Err(error) => {
                tracing::warn!(%to, %error, "no stream");
                splice::reset(&near);
            }
        }
    }

    /// Dials the relay and hears its word.
    async fn dial(&self, wish: Wish) -> Result<Ends> {
        const DIAL: &str = "reach the relay";
        let Place { relay, identity, run_id, token, host, attempt, .. } = &self.0.place;
        let late = || Error::new(ErrorKind::TimedOut, DIAL, "no answer in time");
        let said = async {
            let mut ends = Ends::of(wire::dial(relay, Some(identity), SERVER_NAME).await?);
            let (run_id, token, host) = (run_id.clone(), token.clone(), host.clone());
            let hello = Hello { version: protocol::VERSION, run_id, token, host, attempt: *attempt, wish };
            message::write(&mut ends.write, &hello).await?;
            Ok::<_, Error>(ends)
        };
        let mut ends = timeout(self.0.limits.handshake, said).await.map_err(|_| late())??;
        // The relay says itself that it took too long, and why.
        let patience = self.0.limits.open + self.0.limits.handshake;
        let answer =
            timeout(patience, message::read::<Answer>(&mut ends.read)).await.map_err(|_| late())??;
        let answer =
            answer.ok_or_else(|| Error::new(ErrorKind::Closed, DIAL, "it hung up without a word"))?;
        match answer.refused {
            Some(why) => Err(Error::new(ErrorKind::Refused, DIAL, why)),
            None => Ok(ends),
        }
    }

    async fn keep_line(self) {
        let mut pause = BACKOFF.0;
        loop {
            let began = Instant::now();
            match self.dial(Wish::Line).await {
                Ok(ends) => {
                    tracing::info!(address = %self.0.address, "the tunnel is open");
                    self.serve_line(ends).await;
                    tracing::warn!("the line to the relay was lost");
                }
                Err(error) => tracing::warn!(%error, ?pause, "no line to the relay"),
            }
            if mutant::is_on("tunnel_one_line") {
                return;
            }
            pause = if began.elapsed() >= STEADY { BACKOFF.0 } else { (pause * 2).min(BACKOFF.1) };
            sleep(pause).await;
        }
    }

    /// Until the line ends. Streams go on without it.
    async fn serve_line(&self, ends: Ends) {
        let Ends { mut read, mut write } = ends;
        let (words, mut said) = mpsc::channel(MOST_WORDS);
        let hearing = async {
            while let Ok(Some(Wanted { id, port })) = message::read(&mut read).await {
                let (tunnel, words) = (self.clone(), words.clone());
                tokio::spawn(async move {
                    if let Err(why) = tunnel.take(id, port).await {
                        tracing::info!(port, why, "a stream was declined");
                        drop(words.send(Declined { id, why }).await);
                    }
                });
            }
        };
        let saying = async {
            while let Some(declined) = said.recv().await {
                if message::write(&mut write, &declined).await.is_err() {
                    break;
                }
            }
        };
        tokio::select! {
            () = hearing => {}
            () = saying => {}
        }
    }

    /// Takes a stream for a port of this host's ranks, and carries it to its end.
    async fn take(&self, id: u64, port: u16) -> Result<(), String> {
        let stream = Arc::clone(&self.0.streams).try_acquire_owned();
        let stream = stream.map_err(|_| format!("{} streams are open there", self.0.limits.streams))?;
        let near = timeout(self.0.limits.open, self.connect(port)).await;
        let near = near.map_err(|_| format!("port {port} does not answer"))??;
        let far = self.dial(Wish::Take { id }).await.map_err(|error| error.to_string())?;
        let _stream = stream;
        if let Err(error) = splice::join(near, far, &self.0.counts).await {
            tracing::debug!(port, %error, "a stream was reset");
        }
        Ok(())
    }

    async fn connect(&self, port: u16) -> Result<TcpStream, String> {
        let shared = Arc::clone(&self.0);
        let allowed = tokio::task::spawn_blocking(move || shared.allowed.check(port)).await;
        allowed.map_err(|error| error.to_string())??;
        let connecting = async {
            let socket = TcpSocket::new_v4()?;
            socket.bind(SocketAddr::new(self.0.address.into(), 0))?;
            let stream = socket.connect(SocketAddr::new(self.0.address.into(), port)).await?;
            stream.set_nodelay(true)?;
            Ok(stream)
        };
        connecting.await.map_err(|error: std::io::Error| format!("{}:{port}: {error}", self.0.address))
    }

    async fn serve_ranks(self, acceptor: Acceptor) {
        let mut guests = JoinSet::new();
        loop {
            tokio::select! {
                Some(_) = guests.join_next() => {}
                stream = acceptor.accept() => match stream {
                    Ok(stream) => {
                        let tunnel = self.clone();
                        guests.spawn(async move { tunnel.serve_rank(stream).await });
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a rank");
                        sleep(BACKOFF.0).await;
                    }
                },
            }
        }
    }
}
