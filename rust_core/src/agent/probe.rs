//! The test of the data plane, pair by pair, before the first step: does this host reach the others at the addresses that
//! ranks will use, and is who answers there who it should be?
//!
//! ```text
//!  agent a ── from a's address, to b's ──▶ agent b's probe port    TCP, then TLS: b shows the certificate of its attempt
//!          ══ more bytes than fit in one packet ══▶
//!          ◀═ the same ══
//! ```
//!
//! Two private networks may use the same addresses, so the certificate counts, not the answer. A path that drops large
//! packets lets every handshake pass and stalls the first collective: hence the bytes.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::protocol::{ProbeTarget, Reached, certificate_name};
use crate::tunnel::Tunnel;
use crate::wire::tls::{self, Identity};
use crate::{Error, ErrorKind, Result};

/// Bytes that go there and back.
const BYTES: usize = 32 * 1024;
/// Conversations at a time at the port; more wait in the kernel's backlog.
const MOST_GUESTS: usize = 64;
/// Longest conversation.
const GUEST_LIMIT: Duration = Duration::from_secs(15);
/// Pause after an accept that failed for want of descriptors or memory.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);
/// Bounds of what a question may ask for.
const LONGEST_S: f64 = 60.0;
const MOST_TARGETS: usize = 4096;
/// Questions answered at a time.
const MOST_QUESTIONS: usize = 4;

/// This host's end of the test: a port that answers, for as long as this lives, and the questions it asks.
#[derive(Debug)]
pub struct Probe {
    host: String,
    address: IpAddr,
    port: SocketAddr,
    connector: Connector,
    tunnel: Option<Tunnel>,
    questions: Semaphore,
    _answering: JoinSet<()>,
}

/// A `TlsConnector`, which shows nothing.
struct Connector(TlsConnector);

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Connector(…)")
    }
}

impl Probe {
    /// Answers at a port of `address`, which has to be this host's. Must run inside a Tokio runtime.
    pub async fn open(host: &str, address: IpAddr, identity: &Identity) -> Result<Self> {
        let acceptor = tls::acceptor(identity)?;
        let connector = Connector(tls::connector(identity)?);
        let listener = TcpListener::bind((address, 0)).await.map_err(|cause| {
            let message = format!("`address` is {address}, where ranks of this host cannot listen: {cause}");
            Error::new(ErrorKind::InvalidInput, "open the port for probes", message).with_source(cause)
        })?;
        let port = listener.local_addr().map_err(|cause| Error::io("open the port for probes", cause))?;
        let mut answering = JoinSet::new();
        answering.spawn(answer(listener, acceptor));
        let questions = Semaphore::new(MOST_QUESTIONS);
        let (host, tunnel) = (host.to_owned(), None);
        Ok(Self { host, address, port, connector, tunnel, questions, _answering: answering })
    }

    /// The same, whose questions go the way that ranks' connections go.
    #[must_use]
    pub fn through(mut self, tunnel: Option<Tunnel>) -> Self {
        self.tunnel = tunnel;
        self
    }

    /// Where it answers.
    pub const fn port(&self) -> SocketAddr {
        self.port
    }

    /// Where it asks from.
    pub const fn address(&self) -> IpAddr {
        self.address
    }

    /// Tries all targets at once; each has its answer within `deadline_s`.
    pub async fn reach(self: Arc<Self>, mut targets: Vec<ProbeTarget>, deadline_s: f64) -> Vec<Reached> {
        targets.truncate(MOST_TARGETS);
        let _turn = self.questions.acquire().await;
        let deadline =
            Duration::from_secs_f64(if deadline_s.is_nan() { 0.0 } else { deadline_s.clamp(0.0, LONGEST_S) });
        let mut asked = JoinSet::new();
        for (index, target) in targets.iter().cloned().enumerate() {
            let probe = Arc::clone(&self);
            asked.spawn(async move { (index, probe.reach_one(&target, deadline).await) });
        }
        let mut answers: Vec<_> = targets.iter().map(|_| Err("its probe failed".to_owned())).collect();
        while let Some(asked) = asked.join_next().await {
            if let Ok((index, answer)) = asked {
                answers[index] = answer;
            }
        }
        targets.into_iter().zip(answers).map(|(target, answer)| self.reached(target, answer)).collect()
    }

    fn reached(&self, target: ProbeTarget, answer: Result<Duration, String>) -> Reached {
        let ProbeTarget { host, address, .. } = target;
        let (rtt_s, error) = match answer {
            Ok(rtt) => (Some(rtt.as_secs_f64()), None),
            Err(why) => (
                None,
                Some(format!("{} ({}) cannot reach {host} ({address}): {why}", self.host, self.address)),
            ),
        };
        Reached { host, address, ok: error.is_none(), error, rtt_s }
    }

    /// The time of the connect.
    async fn reach_one(&self, target: &ProbeTarget, deadline: Duration) -> Result<Duration, String> {
        let until = Instant::now() + deadline;
        let late = |what: &str| format!("{what} within {} s", deadline.as_secs_f64());
        let address: SocketAddr = target.address.parse().map_err(|_| "that is no address".to_owned())?;
        let name = certificate_name(&target.host, target.attempt);
        let server = tls::server_name(&name).map_err(|error| error.message().to_owned())?;
        let started = Instant::now();
        let stream = timeout_at(until, self.connect(address)).await;
        let stream = stream.map_err(|_| late("no answer"))?.map_err(|cause| cause.to_string())?;
        let rtt = started.elapsed();
        let stream = timeout_at(until, self.connector.0.connect(server, stream)).await;
        let stream = stream.map_err(|_| late("who is there did not prove to be it"))?;
        let stream = stream.map_err(|cause| format!("who is there is not {name}: {cause}"))?;
        match timeout_at(until, there_and_back(stream)).await {
            Ok(Ok(true)) => Ok(rtt),
            Ok(Ok(false)) => Err("other bytes came back than were sent".to_owned()),
            Ok(Err(cause)) => Err(format!("{BYTES} bytes did not come back: {cause}")),
            Err(_) => Err(late(&format!(
                "{BYTES} bytes did not come back (large packets may be dropped on the way)"
            ))),
        }
    }

    /// From the address that ranks use: another one of this host might go another way.
    async fn connect(&self, address: SocketAddr) -> std::io::Result<Box<dyn Way>> {
        if let (Some(tunnel), SocketAddr::V4(to)) = (&self.tunnel, address) {
            let ends =
                tunnel.open(to).await.map_err(|error| std::io::Error::other(error.message().to_owned()))?;
            return Ok(Box::new(ends.joined()));
        }
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.bind(SocketAddr::new(self.address, 0))?;
        Ok(Box::new(socket.connect(address).await?))
    }
}

/// What a question goes along: a connection, or a stream of the tunnel.
trait Way: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Way for T {}

async fn there_and_back(stream: tokio_rustls::client::TlsStream<Box<dyn Way>>) -> std::io::Result<bool> {
    let sent: Vec<u8> = (0..BYTES).map(|index| (index % 251) as u8).collect();
    let mut back = vec![0; BYTES];
    let (mut read, mut write) = tokio::io::split(stream);
    // At the same time: who answers sends before it has read everything.
    let sending = async {
        write.write_all(&sent).await?;
        write.flush().await
    };
    tokio::try_join!(sending, read.read_exact(&mut back))?;
    Ok(back == sent)
}

async fn answer(listener: TcpListener, acceptor: TlsAcceptor) {
    let mut guests = JoinSet::new();
    loop {
        while guests.len() >= MOST_GUESTS {
            drop(guests.join_next().await);
        }
        let guest = tokio::select! {
            guest = listener.accept() => guest,
            Some(_) = guests.join_next() => continue,
        };
        match guest {
            Ok((stream, _)) => {
                let acceptor = acceptor.clone();
                guests.spawn(async move { drop(timeout(GUEST_LIMIT, echo(stream, acceptor)).await) });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a probe");
                sleep(ACCEPT_BACKOFF).await;
            }
        }
    }
}

/// Sends back what comes, up to what a probe sends.
async fn echo(stream: TcpStream, acceptor: TlsAcceptor) -> std::io::Result<()> {
    let mut stream = acceptor.accept(stream).await?;
    let (mut buffer, mut left) = (vec![0; 4096], BYTES);
    while left > 0 {
        let count = stream.read(&mut buffer[..left.min(4096)]).await?;
        if count == 0 {
            break;
        }
        stream.write_all(&buffer[..count]).await?;
        stream.flush().await?;
        left -= count;
    }
    stream.shutdown().await
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::wire::tls::Authority;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn target(host: &str, attempt: u32, address: SocketAddr) -> ProbeTarget {
        ProbeTarget { host: host.into(), attempt, address: address.to_string() }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn each_host_is_reached_or_named_with_the_reason_and_all_within_the_deadline() {
        let hour = Duration::from_secs(3600);
        let (run, other) =
            (Authority::new("run", hour).expect("run"), Authority::new("run", hour).expect("other"));
        let open =
            async |host: &str, identity: Identity| Probe::open(host, HERE, &identity).await.expect("open");
        let own = Arc::new(open("job-h0", run.issue("job-h0-a1").expect("issued")).await);
        let good = open("job-h1", run.issue("job-h1-a3").expect("issued")).await;
        let stranger = open("job-h2", other.issue("job-h2-a1").expect("issued")).await;
        // Takes connections, and says nothing: what a path looks like that drops all but small packets.
        let silent = std::net::TcpListener::bind((HERE, 0)).expect("bound");
        // Nobody else takes a port there meanwhile.
        let closed =
            std::net::TcpListener::bind("127.200.77.6:0").expect("bound").local_addr().expect("address");
        let targets = vec![
            target("job-h1", 3, good.port()),
            target("job-h1", 2, good.port()), // an attempt that was given up
            target("job-h2", 1, stranger.port()),
            target("job-h3", 1, silent.local_addr().expect("address")),
            target("job-h4", 1, closed),
            ProbeTarget { host: "job-h5".into(), attempt: 1, address: "nowhere".into() },
        ];
        let began = Instant::now();
        let reached = Arc::clone(&own).reach(targets.clone(), 3.0).await;
        assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
        assert_eq!(reached.len(), targets.len());
        assert!(
            reached[0].ok && reached[0].error.is_none() && reached[0].rtt_s.is_some(),
            "{:?}",
            reached[0]
        );
        for (reached, (target, words)) in reached[1..].iter().zip(targets[1..].iter().zip([
            "is not job-h1-a2",
            "is not job-h2-a1",
            "did not prove to be it within 3 s",
            "refused",
            "no address",
        ])) {
            let error = reached.error.as_deref().expect("a reason");
            let pair = format!("job-h0 (127.0.0.1) cannot reach {} ({}): ", target.host, target.address);
            assert!(!reached.ok && error.starts_with(&pair) && error.contains(words), "{error}");
        }
    }

    #[tokio::test]
    async fn an_address_that_is_not_this_hosts_is_refused_at_once() {
        let run = Authority::new("run", Duration::from_secs(60)).expect("run");
        let elsewhere = "192.0.2.1".parse().expect("an address");
        let error = Probe::open("job-h0", elsewhere, &run.issue("job-h0-a1").expect("issued")).await;
        let error = error.expect_err("not ours");
        assert!(
            error.kind() == ErrorKind::InvalidInput && error.to_string().contains("192.0.2.1"),
            "{error}"
        );
    }
}
