//! A process among those of a mesh, as its owner sees it.

use super::aside::Aside;
use super::far::Group;
use super::gather::Gather;
use super::lead::Lead;
use super::mailbox::Mailbox;
use super::payload::Payload;
use super::poller::Poller;
use super::shared::{LISTENER, NOWHERE, Shared, locked};
use super::sync::{AtomicBool, AtomicU64, Ordering};
use super::undelivered::Undelivered;
use crate::{Error, ErrorKind, Result};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

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
            undelivered: Undelivered::default(),
            aside: Aside::new(),
            me: me.clone(),
        });
        let serving = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("sky-monarch-io".to_owned())
            .spawn(move || {
                serving.lead.stand_in(
                    &serving.closing,
                    |limit| serving.poll(limit),
                    || serving.pool.tidy(),
                    || {
                        serving.write_aside();
                    },
                );
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
                Ok(_) => {}
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
                Ok(dead) => lost.extend(dead),
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
        if self.shared.far(address).is_some() {
            self.shared.undelivered.put(address.to_owned(), reason);
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
        shared.write_aside();
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
