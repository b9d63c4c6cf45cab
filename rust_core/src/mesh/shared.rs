//! What all threads of a process among those of a mesh share: its connections, its mailboxes and its open calls.

use super::aside::{Aside, Haste};
use super::gather::{Gather, Outcome};
use super::lead::{Lead, Waiter};
use super::link::{After, Link};
use super::mailbox::{Mailbox, Origin, Request};
use super::memory::Pool;
use super::node::{NodeOptions, Target};
use super::packet::{Packet, VERSION};
use super::payload::{Blob, Memory, Payload};
use super::poller::Poller;
use super::sync::{AtomicBool, AtomicU64, Ordering};
use super::undelivered::Undelivered;
use crate::{Error, ErrorKind, Result};
use nix::sys::socket::{getsockopt, sockopt};
use nix::unistd::geteuid;
use std::collections::HashMap;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// The "connection" of a process to itself.
pub(super) const LOCAL: u64 = u64::MAX;
/// Stands for the connection of a message that is on none.
pub(super) const NOWHERE: u64 = 0;
pub(super) const LISTENER: u64 = 1;
/// The mailbox of the process itself.
const ITSELF: u64 = 0;
/// What it is told, with the number of the actor, and behind a tab who has spawned it, where the message says that: a
/// message has come for one that nobody has made here.
const STRAY: &str = "stray";
/// Mailboxes of one process: an id that a peer makes up reserves one.
const MOST_MAILBOXES: usize = 1 << 16;
/// Connections of one process.
const MOST_LINKS: usize = 1 << 14;

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) options: NodeOptions,
    pub(super) address: String,
    pub(super) folder: String,
    pub(super) poller: Poller,
    pub(super) lead: Lead,
    pub(super) closing: AtomicBool,
    pub(super) next: AtomicU64,
    pub(super) listener: UnixListener,
    pub(super) links: Mutex<HashMap<u64, Arc<Link>>>,
    pub(super) dialled: Mutex<HashMap<String, Arc<Link>>>,
    pub(super) mailboxes: Mutex<HashMap<u64, Arc<Mailbox>>>,
    pub(super) calls: Mutex<HashMap<u64, Weak<Gather>>>,
    pub(super) pool: Arc<Pool>,
    pub(super) undelivered: Undelivered,
    pub(super) aside: Aside<Arc<Link>>,
    pub(super) me: Weak<Shared>,
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

    pub(super) const fn undelivered(&self) -> &Undelivered {
        &self.undelivered
    }

    pub(super) const fn lead(&self) -> &Lead {
        &self.lead
    }

    pub(super) const fn aside(&self) -> &Aside<Arc<Link>> {
        &self.aside
    }

    /// Writes what was laid aside: whoever is about to wait may wait for what comes of it.
    pub(super) fn write_aside(&self) {
        for link in self.aside.take() {
            if let After::Over(reason) = link.write_aside(self) {
                self.lose(&link, &reason);
            }
        }
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
        self.write_aside();
        let deadline = limit.map(|limit| Instant::now() + limit);
        self.lead.wait(deadline, ready, |left| self.poll(left))
    }

    pub(super) fn wait_aside(&self, limit: Option<Duration>, ready: impl FnMut() -> bool) -> bool {
        self.write_aside();
        Lead::wait_aside(limit.map(|limit| Instant::now() + limit), ready)
    }

    pub(super) fn poll(&self, limit: Option<Duration>) {
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
        link.send(self, &hello, Vec::new(), None, Haste::AtOnce)?;
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
    /// behind those that have come before: the actor is on its way, or there is none. What `place` says of the spawner is
    /// taken off it.
    pub(super) fn mailbox_of_message(&self, actor: u64, place: &mut String) -> Result<Arc<Mailbox>> {
        let spawner = place.find('\t').map(|at| place.split_off(at)).unwrap_or_default();
        let (mailbox, made) = self.open(actor)?;
        if made && actor != ITSELF {
            let notice = Request {
                node: self.me.clone(),
                origin: Origin::Local,
                call: 0,
                slot: 0,
                method: STRAY.to_owned(),
                place: format!("{actor}{spawner}"),
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
            // Those that are closed stay known while there is room: a message for one is answered at once.
            mailboxes.retain(|_, mailbox| !mailbox.is_closed());
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
                drop(link.send(self, &Packet::Cancel { call, actor }, Vec::new(), None, Haste::AtOnce));
            }
        }
    }

    pub(super) fn send_one(
        self: &Arc<Self>,
        target: &Target,
        (call, slot, actor): (u64, u32, u64),
        method: &str,
        payload: &Payload,
        mut sent_to: impl FnMut(u64),
    ) -> Result<()> {
        if target.address == self.address {
            let mut place = target.place.clone();
            let mailbox = self.mailbox_of_message(actor, &mut place)?;
            let request = Request {
                node: self.me.clone(),
                origin: Origin::Local,
                call,
                slot,
                method: method.to_owned(),
                place,
                blobs: payload.blobs()?,
                answered: false.into(),
            };
            sent_to(LOCAL);
            return mailbox.put(self, request, Instant::now() + self.options.send_limit);
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
        let haste = if call == 0 { Haste::Patient } else { link.ask(actor) };
        let sent = link.send(self, &packet, packed.segments.clone(), packed.memory.clone(), haste);
        let Err(error) = sent else { return Ok(()) };
        if error.kind() != ErrorKind::Closed {
            return Err(error);
        }
        // Nothing of it has left. The process has ended, and another one may have its place by now.
        sent_to(NOWHERE);
        self.lose(&link, "the process closed the connection");
        let link = self.link_to(&target.address)?;
        sent_to(link.id());
        link.send(self, &packet, packed.segments, packed.memory, Haste::Patient)
    }
}

const DIAL: &str = "reach a process";
