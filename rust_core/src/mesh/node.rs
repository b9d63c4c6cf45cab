//! A process among those of a mesh: its listener, its connections, its mailboxes and its open calls.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::socket::{getsockopt, sockopt};
use nix::unistd::geteuid;

use super::far::Group;
use super::gather::{Gather, Outcome};
use super::lead::{Lead, Waiter};
use super::link::{After, Link};
use super::mailbox::{Mailbox, Origin, Request};
use super::memory::Pool;
use super::packet::{Packet, VERSION};
use super::payload::{Blob, Memory, Payload};
use super::poller::Poller;
use super::sync::{AtomicBool, AtomicU64, Ordering};
use crate::{Error, ErrorKind, Result};

/// The "connection" of a process to itself.
pub(super) const LOCAL: u64 = u64::MAX;
/// Stands for the connection of a message that is on none.
pub(super) const NOWHERE: u64 = 0;
const LISTENER: u64 = 1;
/// The mailbox of the process itself.
const ITSELF: u64 = 0;
/// What it is told, with the number of the actor: a message has come for one that nobody has made here.
const STRAY: &str = "stray";
/// Mailboxes of one process: an id that a peer makes up reserves one.
const MOST_MAILBOXES: usize = 1 << 16;
/// Connections of one process.
const MOST_LINKS: usize = 1 << 14;

/// What a node is made with.
#[derive(Clone)]
pub struct NodeOptions {
    /// Path of its socket, which names it among the processes of the mesh.
    pub address: PathBuf,
    /// Secret of the mesh: a peer without it is refused.
    pub token: String,
    /// How long a sender waits for a receiver that does not keep up.
    pub send_limit: Duration,
}

impl std::fmt::Debug for NodeOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeOptions").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Whom a call is for.
#[derive(Clone, Debug)]
pub struct Target {
    /// Path of the process's socket.
    pub address: String,
    /// Where in the mesh that is called it is; empty where it is its own place.
    pub place: String,
}

#[derive(Debug)]
pub(super) struct Shared {
    options: NodeOptions,
    address: String,
    folder: String,
    poller: Poller,
    lead: Lead,
    closing: AtomicBool,
    next: AtomicU64,
    listener: UnixListener,
    links: Mutex<HashMap<u64, Arc<Link>>>,
    dialled: Mutex<HashMap<String, Arc<Link>>>,
    mailboxes: Mutex<HashMap<u64, Arc<Mailbox>>>,
    calls: Mutex<HashMap<u64, Weak<Gather>>>,
    pool: Arc<Pool>,
    me: Weak<Shared>,
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) const fn options(&self) -> &NodeOptions {
        &self.options
    }

    pub(super) const fn poller(&self) -> &Poller {
        &self.poller
    }

    /// Where the sockets of its host are.
    pub(super) fn folder(&self) -> &str {
        &self.folder
    }

    pub(super) const fn dialled(&self) -> &Mutex<HashMap<String, Arc<Link>>> {
        &self.dialled
    }

    pub(super) const fn lead(&self) -> &Lead {
        &self.lead
    }

    pub(super) const fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    pub(super) fn notify(&self, waiter: &Waiter) {
        self.lead.notify(waiter, &self.poller);
    }

    pub(super) fn wait(&self, limit: Option<Duration>, ready: impl FnMut() -> bool) -> bool {
        let deadline = limit.map(|limit| Instant::now() + limit);
        self.lead.wait(deadline, ready, |left| self.poll(left))
    }

    pub(super) fn wait_aside(&self, limit: Option<Duration>, ready: impl FnMut() -> bool) -> bool {
        Lead::wait_aside(limit.map(|limit| Instant::now() + limit), ready)
    }

    fn poll(&self, limit: Option<Duration>) {
        let Some(me) = self.me.upgrade() else { return };
        self.poller.wait(limit, |key, readable, writable| {
            if key == LISTENER {
                me.accept();
                return;
            }
            let Some(link) = locked(&me.links).get(&key).cloned() else { return };
            if writable && let After::Over(reason) = link.flush(&me) {
                me.lose(&link, &reason);
                return;
            }
            if readable && let After::Over(reason) = link.read(&me) {
                me.lose(&link, &reason);
            }
        });
    }

    fn accept(self: &Arc<Self>) {
        while let Ok((socket, _)) = self.listener.accept() {
            // A stranger, or one too many, is hung up on before a byte of it is read.
            let known = getsockopt(&socket, sockopt::PeerCredentials)
                .is_ok_and(|peer| peer.uid() == geteuid().as_raw());
            self.lead.matters();
            if known && locked(&self.links).len() < MOST_LINKS {
                // Where the kernel cannot watch it, it is dropped, and so its peer is told.
                drop(self.join(socket, true));
            }
        }
    }

    fn join(self: &Arc<Self>, socket: UnixStream, accepted: bool) -> Result<Arc<Link>> {
        socket.set_nonblocking(true).map_err(|error| Error::io(DIAL, error))?;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let link = Arc::new(Link::new(id, socket, accepted));
        locked(&self.links).insert(id, Arc::clone(&link));
        if let Err(error) = self.poller.add(&*link, id) {
            locked(&self.links).remove(&id);
            return Err(error);
        }
        Ok(link)
    }

    fn link_to(self: &Arc<Self>, address: &str) -> Result<Arc<Link>> {
        let mut dialled = locked(&self.dialled);
        if let Some(link) = dialled.get(address) {
            return Ok(Arc::clone(link));
        }
        if self.is_closing() {
            return Err(Error::new(ErrorKind::Closed, DIAL, "this process is closing"));
        }
        let socket = UnixStream::connect(address).map_err(|error| {
            let kind = match error.kind() {
                std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused => ErrorKind::Closed,
                _ => ErrorKind::Io,
            };
            Error::new(kind, DIAL, format!("nobody answers at {address}")).with_source(error)
        })?;
        let link = self.greet(socket)?;
        dialled.insert(address.to_owned(), Arc::clone(&link));
        Ok(link)
    }

    /// Makes a dialled socket a connection: the peer is of this user, and hears the secret first.
    pub(super) fn greet(self: &Arc<Self>, socket: UnixStream) -> Result<Arc<Link>> {
        if self.is_closing() {
            return Err(Error::new(ErrorKind::Closed, DIAL, "this process is closing"));
        }
        let peer =
            getsockopt(&socket, sockopt::PeerCredentials).map_err(|error| Error::io(DIAL, error.into()))?;
        if peer.uid() != geteuid().as_raw() {
            return Err(Error::new(ErrorKind::Refused, DIAL, "it runs as another user"));
        }
        let link = self.join(socket, false)?;
        let hello = Packet::Hello { version: VERSION, token: self.options.token.clone(), borrows: true };
        link.send(self, &hello, Vec::new(), None, false)?;
        Ok(link)
    }

    /// A connection is over: every answer that was to come over it has failed.
    pub(super) fn lose(&self, link: &Arc<Link>, reason: &str) {
        tracing::debug!(link = link.id(), reason, "a connection between actors is over");
        link.end();
        self.poller.remove(&**link);
        locked(&self.links).remove(&link.id());
        locked(&self.dialled).retain(|_, dialled| dialled.id() != link.id());
        self.pool().lose(link.id());
        let calls: Vec<Arc<Gather>> = locked(&self.calls).values().filter_map(Weak::upgrade).collect();
        for gather in calls {
            if gather.lose(self, link.id(), reason) {
                self.forget(gather.call());
            }
        }
    }

    pub(super) fn resume(&self, id: u64) {
        let Some(me) = self.me.upgrade() else { return };
        let Some(link) = locked(&self.links).get(&id).cloned() else { return };
        if let After::Over(reason) = link.resume(&me) {
            self.lose(&link, &reason);
        }
    }

    /// The mailbox of `actor`: made when the first message comes, which may be before the actor.
    pub(super) fn mailbox(&self, actor: u64) -> Result<Arc<Mailbox>> {
        self.open(actor).map(|(mailbox, _)| mailbox)
    }

    /// The mailbox that a message is for. Where none has opened it the process itself is told, by a message of its own
    /// behind those that have come before: the actor is on its way, or there is none.
    pub(super) fn mailbox_of_message(&self, actor: u64) -> Result<Arc<Mailbox>> {
        let (mailbox, made) = self.open(actor)?;
        if made && actor != ITSELF {
            let notice = Request {
                node: self.me.clone(),
                origin: Origin::Local,
                call: 0,
                slot: 0,
                method: STRAY.to_owned(),
                place: actor.to_string(),
                blobs: vec![Blob::new(&b""[..])],
                answered: false.into(),
            };
            // Not refused where that queue is full: there is one for each mailbox, and those are limited.
            self.mailbox(ITSELF)?.put_at_once(self, notice);
        }
        Ok(mailbox)
    }

    fn open(&self, actor: u64) -> Result<(Arc<Mailbox>, bool)> {
        let mut mailboxes = locked(&self.mailboxes);
        if let Some(mailbox) = mailboxes.get(&actor) {
            return Ok((Arc::clone(mailbox), false));
        }
        if mailboxes.len() >= MOST_MAILBOXES {
            let why = format!("{MOST_MAILBOXES} mailboxes are the most");
            return Err(Error::new(ErrorKind::TooLarge, "open a mailbox", why));
        }
        let mailbox = Arc::new(Mailbox::new(self.me.clone()));
        mailboxes.insert(actor, Arc::clone(&mailbox));
        Ok((mailbox, true))
    }

    pub(super) fn payload<'a>(&self, parts: impl Iterator<Item = &'a [u8]>) -> Result<Payload> {
        let payload = Payload::lent(parts, self.pool())?;
        if payload.is_lent() && !self.pool().is_watched() {
            // Where no more follows, it is to go back.
            self.lead.remind(&self.poller);
        }
        Ok(payload)
    }

    pub(super) fn complete(&self, link: u64, call: u64, slot: u32, outcome: Outcome) {
        let gather = locked(&self.calls).get(&call).and_then(Weak::upgrade);
        if let Some(gather) = gather
            && gather.complete(self, link, slot, outcome)
        {
            self.forget(call);
        }
    }

    pub(super) fn forget(&self, call: u64) {
        locked(&self.calls).remove(&call);
    }

    pub(super) fn cancel(&self, call: u64, actor: u64, owing: &[u64]) {
        for id in owing {
            if *id == LOCAL {
                if let Ok(mailbox) = self.mailbox(actor) {
                    mailbox.cancel(self, LOCAL, call);
                }
                continue;
            }
            let link = locked(&self.links).get(id).cloned();
            if let Some(link) = link {
                // A connection that ended meanwhile has nothing to cancel.
                drop(link.send(self, &Packet::Cancel { call, actor }, Vec::new(), None, false));
            }
        }
    }

    fn send_one(
        self: &Arc<Self>,
        target: &Target,
        (call, slot, actor): (u64, u32, u64),
        method: &str,
        payload: &Payload,
        mut sent_to: impl FnMut(u64),
    ) -> Result<()> {
        if target.address == self.address {
            let request = Request {
                node: self.me.clone(),
                origin: Origin::Local,
                call,
                slot,
                method: method.to_owned(),
                place: target.place.clone(),
                blobs: payload.blobs()?,
                answered: false.into(),
            };
            sent_to(LOCAL);
            return self.mailbox_of_message(actor)?.put(
                self,
                request,
                Instant::now() + self.options.send_limit,
            );
        }
        let packed = payload.packed();
        let packet = Packet::Call {
            call,
            slot,
            actor,
            method: method.to_owned(),
            place: target.place.clone(),
            parts: packed.parts,
            memory: packed.memory.as_ref().map_or(0, Memory::id),
        };
        let link = self.link_to(&target.address)?;
        sent_to(link.id());
        let sent = link.send(self, &packet, packed.segments.clone(), packed.memory.clone(), true);
        let Err(error) = sent else { return Ok(()) };
        if error.kind() != ErrorKind::Closed {
            return Err(error);
        }
        // Nothing of it has left. The process has ended, and another one may have its place by now.
        sent_to(NOWHERE);
        self.lose(&link, "the process closed the connection");
        let link = self.link_to(&target.address)?;
        sent_to(link.id());
        link.send(self, &packet, packed.segments, packed.memory, true)
    }
}

const DIAL: &str = "reach a process";

/// A process among those of a mesh. Closed when dropped.
#[derive(Debug)]
pub struct Node {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Node {
    /// Serves `listener`, which is bound to the address of `options`.
    pub fn new(options: NodeOptions, listener: OwnedFd) -> Result<Self> {
        let listener = UnixListener::from(listener);
        listener.set_nonblocking(true).map_err(|error| Error::io("listen", error))?;
        let poller = Poller::new()?;
        poller.add(&listener, LISTENER)?;
        let shared = Arc::new_cyclic(|me| Shared {
            address: options.address.to_string_lossy().into_owned(),
            folder: options.address.parent().map_or_else(String::new, |at| at.to_string_lossy().into_owned()),
            options,
            poller,
            lead: Lead::new(),
            closing: AtomicBool::new(false),
            next: AtomicU64::new(LISTENER + 1),
            listener,
            links: Mutex::default(),
            dialled: Mutex::default(),
            mailboxes: Mutex::default(),
            calls: Mutex::default(),
            pool: Arc::default(),
            me: me.clone(),
        });
        let serving = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("sky-monarch-io".to_owned())
            .spawn(move || {
                serving.lead.stand_in(&serving.closing, |limit| serving.poll(limit), || serving.pool.tidy());
            })
            .map_err(|error| Error::io("start the I/O thread", error))?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Path of its socket.
    pub fn address(&self) -> &str {
        &self.shared.address
    }

    /// The mailbox of `actor`.
    pub fn mailbox(&self, actor: u64) -> Result<Arc<Mailbox>> {
        self.shared.mailbox(actor)
    }

    /// From the parts of one message for `targets`, in order.
    pub fn payload<'a>(&self, targets: &[Target], parts: impl Iterator<Item = &'a [u8]>) -> Result<Payload> {
        let folder = |address: &str| Path::new(address).parent().map(Path::to_owned);
        let here = folder(&self.shared.address);
        // Sockets of other folders are not of this mesh's processes: nobody there gives memory back.
        if targets.iter().all(|target| folder(&target.address) == here) {
            self.shared.payload(parts)
        } else {
            Payload::from_parts(parts)
        }
    }

    /// The actor is gone for good: messages for it are answered as thrown away, and nothing of it is kept but that.
    pub fn close_mailbox(&self, actor: u64) -> Result<()> {
        self.shared.mailbox(actor).map(|mailbox| mailbox.close())
    }

    /// Calls `method` of `actor` in each target. A target that cannot be reached has answered so already.
    ///
    /// With `each`, [`Gather::wait`] returns for every answer, not only when all are there.
    pub fn call(
        &self,
        targets: &[Target],
        actor: u64,
        method: &str,
        payload: &Payload,
        each: bool,
    ) -> Result<Arc<Gather>> {
        let shared = &self.shared;
        let call = shared.next.fetch_add(1, Ordering::Relaxed);
        let gather = Arc::new(Gather::new(call, actor, Arc::downgrade(shared), targets.len(), each));
        locked(&shared.calls).insert(call, Arc::downgrade(&gather));
        for (slot, target) in (0..).zip(targets).filter(|(_, target)| shared.far(&target.address).is_none()) {
            let mut link = None;
            let sent = shared.send_one(target, (call, slot, actor), method, payload, |id| {
                link = Some(id);
                gather.sent_to(slot, id);
            });
            match sent {
                Ok(()) => {}
                // Our own fault, or a receiver that does not keep up: said at once, and nothing waits for it.
                Err(error) if !matches!(error.kind(), ErrorKind::Closed | ErrorKind::Refused) => {
                    gather.cancel();
                    return Err(error);
                }
                Err(error) => {
                    let link = link.unwrap_or_else(|| {
                        gather.sent_to(slot, NOWHERE);
                        NOWHERE
                    });
                    gather.lose(shared, link, &error.to_string());
                }
            }
        }
        for group in Group::all(shared, targets) {
            let mut link = NOWHERE;
            let sent_to = |id| group.slots().for_each(|slot| gather.sent_to(slot, id));
            sent_to(NOWHERE);
            let sent = group.send(shared, (call, actor), method, payload, each, |id| {
                link = id;
                sent_to(id);
            });
            match sent {
                Ok(()) => {}
                Err(error) if !matches!(error.kind(), ErrorKind::Closed | ErrorKind::Refused) => {
                    gather.cancel();
                    return Err(error);
                }
                Err(error) => {
                    gather.lose(shared, link, &error.to_string());
                }
            }
        }
        Ok(gather)
    }

    /// The same, without an answer. Returns the targets that could not be reached, and why.
    pub fn send(
        &self,
        targets: &[Target],
        actor: u64,
        method: &str,
        payload: &Payload,
    ) -> Result<Vec<(u32, String)>> {
        let mut lost = Vec::new();
        let shared = &self.shared;
        for (slot, target) in (0..).zip(targets).filter(|(_, target)| shared.far(&target.address).is_none()) {
            match self.shared.send_one(target, (0, slot, actor), method, payload, |_| ()) {
                Ok(()) => {}
                Err(error) if matches!(error.kind(), ErrorKind::Closed | ErrorKind::Refused) => {
                    lost.push((slot, error.to_string()));
                }
                Err(error) => return Err(error),
            }
        }
        for group in Group::all(shared, targets) {
            match group.send(shared, (0, actor), method, payload, false, |_| ()) {
                Ok(()) => {}
                Err(error) if matches!(error.kind(), ErrorKind::Closed | ErrorKind::Refused) => {
                    lost.extend(group.slots().map(|slot| (slot, error.to_string())));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(lost)
    }

    /// The process at `address` has ended: every answer that it owes has failed, though a child of it may have kept
    /// its sockets open.
    pub fn hang_up(&self, address: &str, reason: &str) {
        let link = locked(&self.shared.dialled).get(address).cloned();
        if let Some(link) = link {
            self.shared.lose(&link, reason);
        }
    }

    /// Connections that are open.
    pub fn links(&self) -> usize {
        locked(&self.shared.links).len()
    }

    /// Calls that are owed an answer.
    pub fn open_calls(&self) -> usize {
        locked(&self.shared.calls).len()
    }

    /// Ends every connection and every wait.
    pub fn close(&self) {
        let shared = &self.shared;
        if shared.closing.swap(true, Ordering::SeqCst) {
            return;
        }
        let mailboxes: Vec<_> = locked(&shared.mailboxes).values().cloned().collect();
        for mailbox in mailboxes {
            mailbox.close();
        }
        let links: Vec<_> = locked(&shared.links).values().cloned().collect();
        for link in links {
            shared.lose(&link, "this process is closing");
        }
        shared.lead.wake_all(&shared.poller);
        if let Some(thread) = locked(&self.thread).take() {
            // It never panics on purpose; where it did, it has ended all the same.
            drop(thread.join());
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.close();
    }
}
