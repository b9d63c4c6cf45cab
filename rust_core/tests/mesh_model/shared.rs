//! A process of the model: the real lead, mailboxes and gathers, with an inbox in place of sockets.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::Result;
use crate::aside::{Aside, Haste};
use crate::gather::{Gather, Outcome};
use crate::lead::{Lead, Waiter};
use crate::link::{In, Link};
use crate::mailbox::{Mailbox, Origin, Request};
use crate::packet::Packet;
use crate::payload::{Blob, Payload};
use crate::poller::Poller;
use crate::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering};

pub const LOCAL: u64 = u64::MAX;
/// The only actor of each process.
pub const ACTOR: u64 = 1;

/// Something that has come over a link of this node; without a packet its end.
#[derive(Debug)]
pub struct Event {
    pub link: Arc<Link>,
    pub packet: Option<Packet>,
    pub segments: Vec<Bytes>,
}

#[derive(Debug)]
pub struct Shared {
    lead: Lead,
    pub poller: Poller,
    pub closing: AtomicBool,
    aside: Aside<Arc<Link>>,
    next: AtomicU64,
    links: Mutex<HashMap<u64, Arc<Link>>>,
    calls: Mutex<HashMap<u64, Weak<Gather>>>,
    mailbox: Arc<Mailbox>,
    me: Weak<Shared>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no panic")
}

impl Shared {
    pub fn new() -> Arc<Self> {
        Arc::new_cyclic(|me: &Weak<Self>| Self {
            lead: Lead::new(),
            poller: Poller::default(),
            closing: AtomicBool::new(false),
            aside: Aside::new(),
            next: AtomicU64::new(1),
            links: Mutex::new(HashMap::new()),
            calls: Mutex::new(HashMap::new()),
            mailbox: Arc::new(Mailbox::new(me.clone())),
            me: me.clone(),
        })
    }

    /// Connects two nodes; returns the end of the first.
    pub fn connect(a: &Arc<Self>, b: &Arc<Self>) -> Arc<Link> {
        let ends = [a, b].map(|node| {
            let link = Arc::new(Link::new(node.next.fetch_add(1, Ordering::SeqCst)));
            locked(&node.links).insert(link.id(), Arc::clone(&link));
            link
        });
        ends[0].join(b, &ends[1]);
        ends[1].join(a, &ends[0]);
        Arc::clone(&ends[0])
    }

    pub const fn aside(&self) -> &Aside<Arc<Link>> {
        &self.aside
    }

    pub fn write_aside(&self) {
        self.aside.take().iter().for_each(|link| link.write_aside());
    }

    pub const fn lead(&self) -> &Lead {
        &self.lead
    }

    pub fn actor(&self) -> &Arc<Mailbox> {
        &self.mailbox
    }

    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    pub fn notify(&self, waiter: &Waiter) {
        self.lead.notify(waiter, &self.poller);
    }

    pub fn wait(&self, limit: Option<Duration>, ready: impl FnMut() -> bool) -> bool {
        self.write_aside();
        self.lead.wait(limit.map(|limit| Instant::now() + limit), ready, |_| self.poll())
    }

    pub fn wait_aside(&self, limit: Option<Duration>, ready: impl FnMut() -> bool) -> bool {
        self.write_aside();
        Lead::wait_aside(limit.map(|limit| Instant::now() + limit), ready)
    }

    pub fn payload<'a>(&self, parts: impl Iterator<Item = &'a [u8]>) -> Result<Payload> {
        Payload::from_parts(parts)
    }

    /// What the node's own thread does.
    pub fn stand_in(&self) {
        self.lead.stand_in(&self.closing, |_| self.poll(), || None, || self.write_aside());
    }

    pub fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
        self.mailbox.close();
        self.write_aside();
        self.lead.wake_all(&self.poller);
    }

    pub fn call(&self, link: &Arc<Link>, bytes: &Bytes) -> Arc<Gather> {
        self.call_with(link, bytes, Haste::Patient)
    }

    /// A call that may leave a moment later.
    pub fn call_soon(&self, link: &Arc<Link>, bytes: &Bytes) -> Arc<Gather> {
        self.call_with(link, bytes, Haste::Together)
    }

    fn call_with(&self, link: &Arc<Link>, bytes: &Bytes, haste: Haste) -> Arc<Gather> {
        let call = self.next.fetch_add(1, Ordering::SeqCst);
        let gather = Arc::new(Gather::new(call, ACTOR, self.me.clone(), 1, false));
        locked(&self.calls).insert(call, Arc::downgrade(&gather));
        gather.sent_to(0, link.id());
        let packet = Packet::Call {
            call,
            slot: 0,
            actor: ACTOR,
            method: String::new(),
            place: String::new(),
            parts: Vec::new(),
            memory: 0,
        };
        if link.send(self, &packet, vec![bytes.clone()], None, haste).is_err() {
            gather.lose(self, link.id(), "gone");
        }
        gather
    }

    fn poll(&self) {
        let Some(event) = self.poller.wait() else { return };
        let link = Arc::clone(&event.link);
        let mut input = locked(&link.input);
        input.unread.push_back(event);
        self.read(&link, input);
    }

    /// The mailbox has room again.
    pub fn resume(&self, id: u64) {
        let Some(link) = locked(&self.links).get(&id).cloned() else { return };
        let mut input = locked(&link.input);
        let Some((mailbox, request)) = input.stalled.take() else { return };
        input.stalled = mailbox.offer(self, id, request).map(|back| (mailbox, back));
        self.read(&link, input);
    }

    /// Hands on what has come, as far as there is room for it. Nobody else does so meanwhile.
    fn read(&self, link: &Arc<Link>, mut input: MutexGuard<'_, In>) {
        let mut over = false;
        while input.stalled.is_none()
            && let Some(Event { packet, segments, .. }) = input.unread.pop_front()
        {
            match packet {
                Some(packet) => input.stalled = self.handle(link, packet, segments),
                None => over = true,
            }
        }
        drop(input);
        if over {
            self.lose(link);
        }
    }

    fn handle(
        &self,
        link: &Arc<Link>,
        packet: Packet,
        segments: Vec<Bytes>,
    ) -> Option<(Arc<Mailbox>, Request)> {
        let blobs = segments.into_iter().map(Blob).collect();
        match packet {
            Packet::Call { call, slot, method, place, .. } => {
                let request = Request {
                    node: self.me.clone(),
                    origin: Origin::Link(Arc::clone(link)),
                    call,
                    slot,
                    method,
                    place,
                    blobs,
                    answered: AtomicBool::new(false),
                };
                let back = self.mailbox.offer(self, link.id(), request)?;
                return Some((Arc::clone(&self.mailbox), back));
            }
            Packet::Reply { call, slot, kind, .. } => {
                let gather = locked(&self.calls).get(&call).and_then(Weak::upgrade);
                if let Some(gather) = gather
                    && gather.complete(self, link.id(), slot, Outcome::Answer { kind, blobs })
                {
                    self.forget(call);
                }
            }
            Packet::Cancel { call, .. } => self.mailbox.cancel(self, link.id(), call),
            other => panic!("nobody sends {other:?} here"),
        }
        None
    }

    fn lose(&self, link: &Arc<Link>) {
        link.end();
        locked(&self.links).remove(&link.id());
        let calls: Vec<Arc<Gather>> = locked(&self.calls).values().filter_map(Weak::upgrade).collect();
        for gather in calls {
            if gather.lose(self, link.id(), "gone") {
                self.forget(gather.call());
            }
        }
    }

    pub fn complete(&self, _link: u64, _call: u64, _slot: u32, _outcome: Outcome) {
        panic!("nobody calls within a process here");
    }

    pub fn forget(&self, call: u64) {
        locked(&self.calls).remove(&call);
    }

    pub fn open_calls(&self) -> usize {
        locked(&self.calls).len()
    }

    pub fn cancel(&self, call: u64, actor: u64, owing: &[u64]) {
        for id in owing {
            let link = locked(&self.links).get(id).cloned();
            if let Some(link) = link {
                drop(link.send(self, &Packet::Cancel { call, actor }, Vec::new(), None, Haste::AtOnce));
            }
        }
    }
}
