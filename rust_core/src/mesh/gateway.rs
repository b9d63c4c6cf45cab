//! How the processes of a host reach those of others: one TLS connection for each pair of hosts, shared by all.
//!
//! ```text
//!  process ═ unix ═▶ gateway ═══ TLS: hops of many sessions ═══▶ gateway ═ unix ═▶ each process that it is for
//!            link.rs          near.rs   line.rs, peer.rs  session.rs         delivery.rs
//! ```
//!
//! A *session* is one process's connection to one other host. What one process sends there arrives in its order; each
//! session has a window of its own, so a receiver that does not keep up stops its senders and nobody else. Large parts
//! are read out of the sender's sealed memory and into memory that the receiver maps.
//!
//! Both ends of a TLS connection show a certificate of the program's authority before a byte of them is decoded. Where
//! two hosts do not reach each other, the hub (the program that has attached to both) passes their hops on. A host may
//! take the place of one that was lost, or several those of its processes (`places.rs`, `spread.rs`): what is addressed
//! to that one then comes to them.

mod delivery;
mod hop;
mod line;
mod memory;
mod near;
mod outbox;
mod peer;
mod places;
mod session;
mod socket;
mod spread;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;

use self::hop::{Hop, What};
use self::peer::Peer;
use self::places::Places;
use self::session::Session;
use crate::wire::tls::Identity;
use crate::wire::{Acceptor, Address};
use crate::{Error, ErrorKind, Result};

/// Name in the certificate of a program.
pub const CLIENT_NAME: &str = "actor-client";
/// Name in the certificate of a host.
pub const HOST_NAME: &str = "actor-host";

/// Strangers whose handshakes are under way; more wait in the kernel.
const MOST_STRANGERS: usize = 64;
/// Longest handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Longest try to reach a host directly, before its hops go through the hub.
const DIRECT: Duration = Duration::from_secs(2);
/// Longest wait for the others to hear that this gateway closes in order.
const LEAVE: Duration = Duration::from_millis(300);

/// What a gateway is made with.
pub struct GatewayOptions {
    /// Where the sockets of this host are: names the host.
    pub folder: PathBuf,
    /// Secret of this host's mesh.
    pub token: String,
    /// What people call this host.
    pub host: String,
    /// Of this installation: peers of another one are refused.
    pub version: String,
    /// This host's certificate.
    pub identity: Identity,
    /// Whether this is the program's own host, which all others are attached to.
    pub hub: bool,
}

impl std::fmt::Debug for GatewayOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GatewayOptions").field("folder", &self.folder).finish_non_exhaustive()
    }
}

/// What has happened to another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// It is connected.
    Joined {
        /// Folder of its sockets, which names it.
        folder: String,
        /// What people call it.
        host: String,
        /// Name in its certificate.
        certificate: String,
    },
    /// It is not connected any more. Of hosts that the hub has lost the others hear too.
    Lost {
        /// Which.
        folder: String,
        /// Why, in words.
        reason: String,
        /// Whether it has taken its leave, and is neither cut off nor killed.
        left: bool,
    },
}

/// How a host is reached that is not connected.
#[derive(Clone, Debug)]
struct Route {
    address: Option<Address>,
    via: String,
}

struct Inner {
    options: GatewayOptions,
    folder: String,
    handle: Handle,
    closing: AtomicBool,
    peers: Mutex<HashMap<String, Arc<Peer>>>,
    routes: Mutex<HashMap<String, Route>>,
    lost: Mutex<HashMap<String, String>>,
    places: Places,
    sessions: Mutex<HashMap<u64, Arc<Session>>>,
    events: Mutex<Option<mpsc::UnboundedSender<Event>>>,
    tasks: Mutex<JoinSet<()>>,
    strangers: Arc<Semaphore>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    /// Runs `task` until it ends or the gateway closes.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = locked(&self.tasks);
        while tasks.try_join_next().is_some() {}
        if !self.closing.load(Ordering::SeqCst) {
            tasks.spawn_on(task, &self.handle);
        }
    }

    /// Whether this host serves no other program than that of `folder`.
    fn is_free(&self, certificate: &str, folder: &str) -> Result<(), String> {
        let peers = locked(&self.peers);
        let other = peers.values().find(|peer| peer.certificate() == CLIENT_NAME && peer.folder() != folder);
        match other {
            Some(other) if certificate == CLIENT_NAME => {
                Err(format!("it serves another program, on {}", other.host()))
            }
            _ => Ok(()),
        }
    }

    /// Takes in a connected peer.
    fn joined(&self, peer: &Arc<Peer>) {
        locked(&self.lost).remove(peer.folder());
        locked(&self.peers).insert(peer.folder().to_owned(), Arc::clone(peer));
        if self.options.hub {
            self.places.all().iter().for_each(|placed| peer.tell(placed));
        }
        let (folder, host) = (peer.folder().to_owned(), peer.host().to_owned());
        self.tell(Event::Joined { folder, host, certificate: peer.certificate().to_owned() });
    }

    fn tell(&self, event: Event) {
        // There is no queue any more: then the gateway is closing.
        drop(locked(&self.events).as_ref().map(|events| events.send(event)));
    }

    /// A connection has ended, and with it all sessions on it. `left`: the other side has taken its leave.
    fn lose(&self, peer: &Arc<Peer>, reason: &str, left: bool) {
        let was_it = {
            let mut peers = locked(&self.peers);
            let was_it = peers.get(peer.folder()).is_some_and(|found| Arc::ptr_eq(found, peer));
            if was_it {
                peers.remove(peer.folder());
            }
            was_it
        };
        // Of a program that has closed its connection a host knows no more than that it is over.
        let is_over = peer.certificate() == CLIENT_NAME && reason == line::ENDED;
        let words = if is_over {
            format!("the program on {} has ended", peer.host())
        } else {
            format!("{} is lost: {reason}", peer.host())
        };
        for session in self.sessions_where(|session| session.is_on(peer)) {
            session.end(&words);
        }
        // Between two attached hosts it is only a way that has gone: the hub decides which host is lost.
        let decides = self.options.hub || peer.certificate() == CLIENT_NAME;
        if was_it && decides && !self.closing.load(Ordering::SeqCst) {
            self.gone(peer.folder(), &words, left);
            self.pass_on(&Hop::Gone { folder: peer.folder().to_owned(), reason: words });
        }
    }

    /// A host is lost, to everybody.
    fn gone(&self, folder: &str, words: &str, left: bool) {
        locked(&self.lost).insert(folder.to_owned(), words.to_owned());
        for session in self.sessions_where(|session| session.remote() == folder) {
            session.end(words);
        }
        self.tell(Event::Lost { folder: folder.to_owned(), reason: words.to_owned(), left });
    }

    fn pass_on(&self, hop: &Hop) {
        let peers: Vec<_> = locked(&self.peers).values().cloned().collect();
        for peer in peers {
            peer.tell(hop);
        }
    }

    fn sessions_where(&self, which: impl Fn(&Session) -> bool) -> Vec<Arc<Session>> {
        locked(&self.sessions).values().filter(|session| which(session)).cloned().collect()
    }

    /// The connection that leads to `folder`, dialled now where that is possible, and who is at its other end: another
    /// host, where that has its place.
    async fn way(self: &Arc<Self>, folder: String) -> Result<(Arc<Peer>, String)> {
        let folder = self.places.of(folder);
        let peer = if folder == self.folder { places::itself(self) } else { self.way_to(&folder).await? };
        Ok((peer, folder))
    }

    async fn way_to(self: &Arc<Self>, folder: &str) -> Result<Arc<Peer>> {
        let none = |why: String| Error::new(ErrorKind::Closed, "reach another host", why);
        if let Some(peer) = locked(&self.peers).get(folder) {
            return Ok(Arc::clone(peer));
        }
        if let Some(reason) = locked(&self.lost).get(folder) {
            return Err(none(reason.clone()));
        }
        let route = locked(&self.routes).get(folder).cloned();
        let route = route.ok_or_else(|| none(format!("no host of this mesh has the folder {folder}")))?;
        if let Some(address) = &route.address {
            match tokio::time::timeout(DIRECT, peer::dial(self, address, HOST_NAME)).await {
                Ok(Ok(peer)) if peer.folder() == folder => return Ok(peer),
                outcome => {
                    tracing::debug!(folder, ?outcome, "not reached directly: its hops go through the hub");
                    if let Some(route) = locked(&self.routes).get_mut(folder) {
                        route.address = None;
                    }
                }
            }
        }
        let hub = locked(&self.peers).get(&route.via).cloned();
        hub.ok_or_else(|| none("the program that it belongs to is lost".to_owned()))
    }

    /// Handles one hop that `peer` has sent. Returns whether it is one of those that are counted.
    fn hop(self: &Arc<Self>, peer: &Arc<Peer>, frame: crate::wire::Frame) -> Result<bool> {
        match frame.message()? {
            Hop::Ping { heard } => {
                let known = peer.outbox.heard(heard);
                let bad = || Error::new(ErrorKind::Protocol, "read a hop", "it has heard what nobody said");
                return known.then_some(false).ok_or_else(bad);
            }
            Hop::Gone { folder, reason } if peer.certificate() == CLIENT_NAME => {
                self.gone(&folder, &reason, false);
            }
            Hop::Placed { folder, by } if peer.certificate() == CLIENT_NAME => self.places.put(folder, by),
            Hop::Session { to, from, number, .. } if to != self.folder => {
                let next = locked(&self.peers).get(&to).cloned();
                match next {
                    Some(next) if self.options.hub => next.push(frame),
                    _ => {
                        let reason = locked(&self.lost).get(&to).cloned();
                        let reason = reason.unwrap_or_else(|| "the hub knows no such host".to_owned());
                        peer.tell(&Hop::Session { to: from, from: to, number, what: What::Close { reason } });
                    }
                }
            }
            Hop::Session { from, number, what: What::Open, .. } => {
                delivery::begin(self, peer, from, number);
            }
            Hop::Session { number, what, .. } => {
                let session = locked(&self.sessions).get(&number).cloned();
                // Of one that has ended the rest may still be under way.
                if let Some(session) = session {
                    session.take(what, frame.segments)?;
                }
            }
            Hop::Gone { .. }
            | Hop::Placed { .. }
            | Hop::Hello { .. }
            | Hop::Killed { .. }
            | Hop::Refused { .. } => {
                return Err(Error::new(ErrorKind::Protocol, "read a hop", "it has no business here"));
            }
        }
        Ok(true)
    }

    fn forget(&self, session: &Session) {
        locked(&self.sessions).remove(&session.number());
    }
}

/// The gateway of one host. Closed when dropped.
pub struct Gateway {
    inner: Arc<Inner>,
    events: tokio::sync::Mutex<mpsc::UnboundedReceiver<Event>>,
    address: Option<Address>,
}

impl std::fmt::Debug for Gateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gateway").field("folder", &self.inner.folder).finish_non_exhaustive()
    }
}

impl Gateway {
    /// Serves the processes of this host, and hosts that dial `listen` (`tls:<host>:<port>`) where that is given.
    pub async fn start(options: GatewayOptions, listen: Option<&Address>) -> Result<Self> {
        let acceptor = match listen {
            Some(address) => Some(Acceptor::bind(address, Some(&options.identity)).await?),
            None => None,
        };
        let (events, heard) = mpsc::unbounded_channel();
        let inner = Arc::new(Inner {
            folder: options.folder.to_string_lossy().into_owned(),
            options,
            handle: Handle::current(),
            closing: AtomicBool::new(false),
            peers: Mutex::default(),
            routes: Mutex::default(),
            lost: Mutex::default(),
            places: Places::default(),
            sessions: Mutex::default(),
            events: Mutex::new(Some(events)),
            tasks: Mutex::default(),
            strangers: Arc::new(Semaphore::new(MOST_STRANGERS)),
        });
        near::serve(&inner).await?;
        let address = acceptor.as_ref().map(|acceptor| acceptor.address().clone());
        if let Some(acceptor) = acceptor {
            inner.spawn(peer::welcome(Arc::clone(&inner), acceptor));
        }
        Ok(Self { inner, events: tokio::sync::Mutex::new(heard), address })
    }

    /// Where it listens for other hosts.
    pub const fn address(&self) -> Option<&Address> {
        self.address.as_ref()
    }

    /// Connects to the gateway at `address`, whose certificate has to hold `name`. Returns its folder and host name.
    pub async fn dial(&self, address: &Address, name: &str, limit: Duration) -> Result<(String, String)> {
        let peer =
            tokio::time::timeout(limit, peer::dial(&self.inner, address, name)).await.map_err(|_| {
                Error::new(
                    ErrorKind::TimedOut,
                    "dial a host",
                    format!("{address} gave no answer in {limit:?}"),
                )
            })??;
        Ok((peer.folder().to_owned(), peer.host().to_owned()))
    }

    /// What names the line to the host `folder`, where it is connected.
    pub fn line(&self, folder: &str) -> Option<u64> {
        locked(&self.inner.peers).get(folder).map(|peer| peer.line())
    }

    /// The host `folder` may be reached at `address`, and through `via` where it may not.
    pub fn route(&self, folder: &str, address: Option<Address>, via: &str) {
        locked(&self.inner.routes).insert(folder.to_owned(), Route { address, via: via.to_owned() });
    }

    /// The next event; none where there is none within `limit`, and after `close`.
    pub async fn event(&self, limit: Duration) -> Option<Event> {
        tokio::time::timeout(limit, async { self.events.lock().await.recv().await }).await.ok().flatten()
    }

    /// The process of this host with the socket `name` has ended, though a child of it may have kept its connections.
    pub fn hang_up(&self, name: &str) {
        for session in self.inner.sessions_where(|_| true) {
            session.hang_up(name);
        }
    }

    /// Hangs up on a host: it is lost, for that reason.
    pub fn drop_host(&self, folder: &str, reason: &str) {
        let peer = locked(&self.inner.peers).get(folder).cloned();
        if let Some(peer) = peer {
            // First: whoever serves the connection would say no more than that it has ended.
            self.inner.lose(&peer, reason, true);
            peer.end();
        }
    }

    /// The lost host `folder`, or the process of one with that address, has its place taken by another host, for all
    /// hosts: what is addressed to it goes there.
    pub fn place(&self, folder: &str, by: &str) {
        self.inner.places.put(folder.to_owned(), by.to_owned());
        self.inner.pass_on(&Hop::Placed { folder: folder.to_owned(), by: by.to_owned() });
    }

    /// Sessions that are open.
    pub fn sessions(&self) -> usize {
        locked(&self.inner.sessions).len()
    }

    /// Ends every connection.
    pub fn close(&self) {
        if self.inner.closing.swap(true, Ordering::SeqCst) {
            return;
        }
        locked(&self.inner.peers).values().for_each(|peer| peer.end());
        let end = std::time::Instant::now() + LEAVE;
        while !locked(&self.inner.peers).is_empty() && std::time::Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        locked(&self.inner.tasks).abort_all();
        self.inner.places.clear();
        drop(locked(&self.inner.events).take());
        locked(&self.inner.peers).clear();
        locked(&self.inner.sessions).clear();
        near::remove(&self.inner);
    }
}

/// Tells the gateway at `address`, whose certificate has to hold `name`, that the one which had dialled it from the host
/// `folder` was killed. `line` is what [`Gateway::line`] said there.
pub async fn report_killed(
    identity: &Identity,
    (address, name): (&Address, &str),
    (folder, line): (&str, u64),
    limit: Duration,
) -> Result<()> {
    let telling = peer::report_killed(identity, address, name, folder, line);
    let late = |_| Error::new(ErrorKind::TimedOut, "tell of a host", format!("no answer in {limit:?}"));
    tokio::time::timeout(limit, telling).await.map_err(late)?
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.close();
    }
}
