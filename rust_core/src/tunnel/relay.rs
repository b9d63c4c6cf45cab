//! The relay: the head's end of the tunnel, a service of the head's agent. Hosts dial it; it dials nobody but the head's
//! own rendezvous stores.

mod lines;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::net::{SocketAddrV4, TcpListener as StdListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{sleep, timeout};

use super::allowed::Allowed;
use super::limits::Limits;
use super::message::{self, Answer, Hello, Wish};
use super::splice::{self, Counts, Ends};
use super::{HEAD, address_of};
use crate::agent::mutant;
use crate::wire::inherited::{self, LISTEN_FD_ENV};
use crate::wire::tls::Identity;
use crate::wire::{Acceptor, Address, Stream};
use crate::{Error, ErrorKind, Result};
use lines::Lines;

/// The name in the relay's certificate, which every agent checks.
pub const SERVER_NAME: &str = "relay";

/// Connections at a time that have not said who they are.
const MOST_STRANGERS: usize = 128;
/// Pause after an accept that failed for want of descriptors or memory.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);
/// Between two looks at whether the counts have changed.
const COUNTS_POLL: Duration = Duration::from_secs(2);

const OPERATION: &str = "run the relay";

/// `relay.json`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The run.
    pub run_id: String,
    /// Path of `private.json`: the run's token, and `identities.relay`.
    pub private: PathBuf,
    /// File for the bytes that have passed, by host.
    pub counts: PathBuf,
}

#[derive(Deserialize)]
struct Private {
    token: String,
    identities: Identities,
}

#[derive(Deserialize)]
struct Identities {
    relay: Identity,
}

/// Runs a relay as this process until SIGTERM or SIGINT, on the listening socket that `SKY_MONARCH_LISTEN_FD` names;
/// returns its exit code.
pub fn run(config_json: &str) -> Result<i32> {
    let invalid = |why: String| Error::new(ErrorKind::InvalidInput, "read the relay's configuration", why);
    let config: Config = serde_json::from_str(config_json).map_err(|error| invalid(error.to_string()))?;
    let text = std::fs::read_to_string(&config.private)
        .map_err(|error| invalid(format!("{}: {error}", config.private.display())))?;
    // serde's words could repeat a value.
    let private: Private = serde_json::from_str(&text)
        .map_err(|_| invalid("private.json holds no token, or no identities.relay".to_owned()))?;
    let fd = std::env::var(LISTEN_FD_ENV).ok().and_then(|fd| fd.parse().ok());
    let fd = fd.ok_or_else(|| invalid(format!("{LISTEN_FD_ENV} names no descriptor: the agent sets it")))?;
    let listener = inherited::listener(fd)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .thread_name("relay")
        .enable_all()
        .build()
        .map_err(|error| Error::io(OPERATION, error))?;
    let ended = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).map_err(|error| Error::io(OPERATION, error))?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(|error| Error::io(OPERATION, error))?;
        let relay = Relay::open(
            listener,
            &private.identities.relay,
            &config.run_id,
            &private.token,
            Limits::default(),
        )?;
        relay.go_on_from(&config.counts);
        let counting = relay.clone().keep_counts(config.counts);
        tokio::select! {
            () = relay.serve() => {}
            () = counting => {}
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        Ok(0)
    });
    runtime.shutdown_background();
    ended
}

/// A relay; clones are the same one.
#[derive(Clone)]
pub struct Relay(Arc<Shared>);

struct Shared {
    acceptor: Acceptor,
    run_id: String,
    token: String,
    limits: Limits,
    lines: Lines,
    stores: Allowed,
    streams: Arc<Semaphore>,
    hosts: Mutex<BTreeMap<String, Arc<Traffic>>>,
}

/// What goes through the relay from and to one host.
#[derive(Debug)]
struct Traffic {
    /// Streams that it may still open.
    streams: Arc<Semaphore>,
    counts: Counts,
}

/// Bytes that have passed, as [`Config::counts`] has them.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Passed {
    sent: u64,
    received: u64,
}

/// [`Config::counts`].
#[derive(Deserialize)]
struct Kept {
    hosts: BTreeMap<String, Passed>,
}

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay").field("acceptor", &self.0.acceptor).finish_non_exhaustive()
    }
}

impl Relay {
    /// A relay on a socket that listens. Must run inside a Tokio runtime.
    pub fn open(
        listener: StdListener,
        identity: &Identity,
        run_id: &str,
        token: &str,
        limits: Limits,
    ) -> Result<Self> {
        let streams = Arc::new(Semaphore::new(limits.all_streams));
        Ok(Self(Arc::new(Shared {
            acceptor: Acceptor::inherit(listener, Some(identity))?,
            run_id: run_id.to_owned(),
            token: token.to_owned(),
            limits,
            lines: Lines::default(),
            stores: Allowed::new(run_id, HEAD),
            streams,
            hosts: Mutex::default(),
        })))
    }

    /// Where it listens.
    pub fn address(&self) -> &Address {
        self.0.acceptor.address()
    }

    /// Serves for ever.
    pub async fn serve(&self) {
        let mut strangers = Strangers::default();
        loop {
            match self.0.acceptor.incoming().await {
                Ok(incoming) => {
                    while mutant::is_on("tunnel_patient_strangers") && strangers.is_full() {
                        sleep(ACCEPT_BACKOFF).await;
                    }
                    let mut sent_away = strangers.admit();
                    let relay = self.clone();
                    tokio::spawn(async move {
                        let meeting = timeout(relay.0.limits.handshake, async {
                            let stream = incoming.authenticate().await?;
                            relay.meet(stream).await
                        });
                        let met = tokio::select! {
                            met = meeting => met,
                            _ = &mut sent_away => return tracing::info!("a stranger made room for others"),
                        };
                        drop(sent_away);
                        match met {
                            Ok(Ok(Some((hello, ends)))) => relay.grant(hello, ends).await,
                            Ok(Ok(None)) => {}
                            Ok(Err(error)) => tracing::info!(%error, "a stranger was turned away"),
                            Err(_) => tracing::info!("a stranger said nothing"),
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    sleep(ACCEPT_BACKOFF).await;
                }
            }
        }
    }

    /// Hears who it is and what it wants; none where it was refused.
    async fn meet(&self, stream: Stream) -> Result<Option<(Hello, Ends)>> {
        let certificate = stream.peer_name().map(str::to_owned);
        let mut ends = Ends::of(stream);
        let hello = message::hello(&mut ends.read).await?;
        let known = message::check(&hello, &self.0.run_id, &self.0.token, certificate.as_deref());
        let known = known.and_then(|()| self.0.lines.admit(&hello.host, hello.attempt));
        match known {
            Ok(()) => Ok(Some((hello, ends))),
            Err(why) => {
                tracing::warn!(host = hello.host, attempt = hello.attempt, why, "refused");
                answer(&mut ends, Some(why)).await?;
                Ok(None)
            }
        }
    }

    async fn grant(&self, hello: Hello, mut ends: Ends) {
        let Hello { host, attempt, wish, .. } = hello;
        match wish {
            Wish::Line => {
                let Some(address) = address_of(&host) else {
                    let why = format!("{host} has no address in the tunnel: its name ends in no -h<number>");
                    return drop(answer(&mut ends, Some(why)).await);
                };
                if answer(&mut ends, None).await.is_ok() {
                    self.0.lines.serve(address, &host, attempt, ends).await;
                }
            }
            Wish::Take { id } => match self.0.lines.waiting(id, &host, attempt) {
                Some(waiting) => {
                    if answer(&mut ends, None).await.is_ok() {
                        // Who waited may have given up: then it ends here.
                        drop(waiting.send(Ok(ends)));
                    }
                }
                None => drop(answer(&mut ends, Some("nobody waits for that stream any more".into())).await),
            },
            Wish::Open { to } => self.open_stream(&host, to, ends).await,
        }
    }

    async fn open_stream(&self, host: &str, to: SocketAddrV4, mut ends: Ends) {
        let traffic = self.traffic(host);
        let own = Arc::clone(&traffic.streams).try_acquire_owned();
        let shared = Arc::clone(&self.0.streams).try_acquire_owned();
        let (Ok(_own), Ok(_shared)) = (own, shared) else {
            let why = format!(
                "too many streams ({} of one host, {} in all)",
                self.0.limits.streams, self.0.limits.all_streams
            );
            tracing::warn!(host, why, "refused");
            return drop(answer(&mut ends, Some(why)).await);
        };
        let found = timeout(self.0.limits.open, self.find(to)).await;
        let found =
            found.unwrap_or_else(|_| Err(format!("{to} did not answer within {:?}", self.0.limits.open)));
        let far = match found {
            Ok(far) => far,
            Err(why) => {
                tracing::info!(host, %to, why, "no stream");
                return drop(answer(&mut ends, Some(why)).await);
            }
        };
        if answer(&mut ends, None).await.is_err() {
            return;
        }
        let joined = match far {
            Far::Head(stream) => splice::join(stream, ends, &traffic.counts).await,
            Far::Host(far) => splice::pass(ends, far, &traffic.counts).await,
        };
        if let Err(error) = joined {
            tracing::debug!(host, %to, %error, "a stream was reset");
        }
    }

    async fn find(&self, to: SocketAddrV4) -> Result<Far, String> {
        if *to.ip() != HEAD {
            let wanted = self.0.lines.want(*to.ip(), to.port(), self.0.limits.line);
            return wanted.await.map(Far::Host);
        }
        let shared = Arc::clone(&self.0);
        let allowed = tokio::task::spawn_blocking(move || shared.stores.check(to.port())).await;
        allowed.map_err(|error| error.to_string())??;
        let stream = TcpStream::connect(to).await.map_err(|error| error.to_string())?;
        let _ = stream.set_nodelay(true);
        Ok(Far::Head(stream))
    }

    fn traffic(&self, host: &str) -> Arc<Traffic> {
        let mut hosts = self.0.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || {
            let streams = Arc::new(Semaphore::new(self.0.limits.streams));
            Arc::new(Traffic { streams, counts: Counts::default() })
        };
        Arc::clone(hosts.entry(host.to_owned()).or_insert_with(new))
    }

    /// Bytes that each host has sent and got on the streams that it has opened.
    fn passed(&self) -> BTreeMap<String, Passed> {
        let hosts = self.0.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = hosts.iter().map(|(host, traffic)| {
            let (sent, received) = traffic.counts.read();
            (host.clone(), Passed { sent, received })
        });
        passed.collect()
    }

    /// Bytes that have passed in all, either way.
    pub fn total(&self) -> u64 {
        self.passed().values().map(|passed| passed.sent + passed.received).sum()
    }

    /// Counts on where a relay before this one has left off.
    fn go_on_from(&self, path: &Path) {
        let text = std::fs::read(path).unwrap_or_default();
        // None yet, or damaged: they are for people alone.
        let Ok(Kept { hosts }) = serde_json::from_slice(&text) else { return };
        for (host, Passed { sent, received }) in hosts {
            self.traffic(&host).counts.add(sent, received);
        }
    }

    /// Writes the counts down whenever they have changed, for ever.
    async fn keep_counts(self, path: PathBuf) {
        let mut written = BTreeMap::new();
        loop {
            let passed = self.passed();
            if passed != written {
                if let Err(error) = write_counts(&path, &passed) {
                    tracing::warn!(%error, path = %path.display(), "what has passed is not written down");
                }
                written = passed;
            }
            sleep(COUNTS_POLL).await;
        }
    }
}

/// Connections that have not said who they are, the oldest first.
///
/// Where there are too many the oldest goes: a host is known within moments, and who says nothing holds no place that a
/// host needs.
#[derive(Default)]
struct Strangers(VecDeque<oneshot::Sender<()>>);

impl Strangers {
    fn is_full(&mut self) -> bool {
        self.0.retain(|one| !one.is_closed());
        self.0.len() >= MOST_STRANGERS
    }

    /// Makes room for one more, whose receiver ends when it has to go.
    fn admit(&mut self) -> oneshot::Receiver<()> {
        if self.is_full() {
            self.0.pop_front();
        }
        let (stay, sent_away) = oneshot::channel();
        self.0.push_back(stay);
        sent_away
    }
}

/// Where a stream leads.
enum Far {
    Head(TcpStream),
    Host(Ends),
}

async fn answer(ends: &mut Ends, refused: Option<String>) -> Result<()> {
    message::write(&mut ends.write, &Answer { refused }).await
}

/// Complete at any moment.
fn write_counts(path: &Path, passed: &BTreeMap<String, Passed>) -> std::io::Result<()> {
    let draft = path.with_extension("new");
    std::fs::write(&draft, serde_json::to_vec(&serde_json::json!({ "hosts": passed }))?)?;
    std::fs::rename(&draft, path)
}
