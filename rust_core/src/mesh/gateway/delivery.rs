//! Messages that have come from a process of another host, for processes of this one, and their answers.
//!
//! Each process hears them as if they came from this host: over a connection of its own for each session. What is owed
//! an answer is kept count of, so that the answers to a cast go back together and the end of a process is told.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use tokio::net::UnixStream;

use super::super::far::GATEWAY;
use super::super::gather::VALUE;
use super::super::packet::{Packet, Part, VERSION};
use super::hop::{Hop, What};
use super::peer::Peer;
use super::session::{Inlet, MOST_SESSIONS, Session};
use super::socket::{self, Reader, Unsent};
use super::{Inner, locked, memory};
use crate::wire::{Frame, MAX_SEGMENTS};
use crate::{Error, ErrorKind, Result};

/// Answers that wait for the others of their cast: no more bytes than that.
const MOST_HELD: usize = 1 << 20;
const DELIVER: &str = "reach a process";

/// Begins a session that the host `from` has opened.
pub(super) fn begin(inner: &Arc<Inner>, peer: &Arc<Peer>, from: String, number: u64) {
    let sessions = locked(&inner.sessions);
    if sessions.len() >= MOST_SESSIONS || sessions.contains_key(&number) {
        let reason = format!("{MOST_SESSIONS} sessions are the most");
        let (to, from) = (from, inner.folder.clone());
        return peer.tell(&Hop::Session { to, from, number, what: What::Close { reason } });
    }
    drop(sessions);
    let (session, inlet) = Session::new(inner, peer, from, number);
    let delivery = Delivery { inner: Arc::clone(inner), session, owed: Arc::default(), next: 1.into() };
    inner.spawn(async move { delivery.run(inlet).await });
}

/// A connection to a process, with the number that tells it from those before and after it.
#[derive(Clone)]
struct Receiver {
    number: u64,
    socket: Arc<UnixStream>,
}

struct Delivery {
    inner: Arc<Inner>,
    session: Arc<Session>,
    owed: Arc<Mutex<Owed>>,
    next: AtomicU64,
}

impl Delivery {
    async fn run(self, mut inlet: Inlet) {
        let mut receivers: HashMap<String, Receiver> = HashMap::new();
        let reason = loop {
            let arrived = match inlet.recv(&self.session).await {
                Ok(arrived) => arrived,
                Err(reason) => break reason,
            };
            let done = match arrived.frame.message() {
                Ok(packet @ Packet::Cast { .. }) => {
                    self.cast(&mut receivers, packet, arrived.frame.segments, arrived.memory).await
                }
                Ok(Packet::Cancel { call, actor }) => self.cancel(&receivers, call, actor).await,
                Ok(_) => Err(Error::new(ErrorKind::Protocol, "read a message", "not for a gateway")),
                Err(error) => Err(error),
            };
            if let Err(error) = done {
                break error.to_string();
            }
            self.session.credit(arrived.cost);
        };
        self.inner.forget(&self.session);
        if self.session.reason().is_none() {
            self.session.close(&reason);
        }
        for name in receivers.keys() {
            self.session.hang_up(name);
        }
    }

    async fn cast(
        &self,
        receivers: &mut HashMap<String, Receiver>,
        packet: Packet,
        segments: Vec<Bytes>,
        memory: Option<Arc<OwnedFd>>,
    ) -> Result<()> {
        let Packet::Cast { call, actor, method, to, gather, parts } = packet else { return Ok(()) };
        if call != 0 {
            locked(&self.owed).open(call, to.iter().map(|(_, slot, _)| *slot), gather);
        }
        for (name, slot, place) in to {
            let packet = Packet::Call {
                call,
                slot,
                actor,
                method: method.clone(),
                place,
                parts: parts.clone(),
                memory: 0,
            };
            let frame = Frame { segments: segments.clone(), ..Frame::from_message(&packet)? };
            if let Err(error) = self.deliver(receivers, &name, (call, slot), &frame, memory.as_ref()).await {
                let out = match call {
                    0 => vec![(undelivered(&name, error.message())?, None)],
                    _ => locked(&self.owed).gone(call, &[slot], error.message()),
                };
                send_all(&self.session, out).await?;
            }
        }
        Ok(())
    }

    async fn deliver(
        &self,
        receivers: &mut HashMap<String, Receiver>,
        name: &str,
        (call, slot): (u64, u32),
        frame: &Frame,
        memory: Option<&Arc<OwnedFd>>,
    ) -> Result<()> {
        for last in [false, true] {
            let receiver = match receivers.get(name) {
                Some(receiver) => receiver.clone(),
                None => {
                    let receiver = self.dial(name).await?;
                    receivers.insert(name.to_owned(), receiver.clone());
                    receiver
                }
            };
            locked(&self.owed).owes(call, slot, receiver.number);
            match socket::send(&receiver.socket, frame, memory).await {
                Ok(()) => return Ok(()),
                Err(Unsent { nothing, error }) => {
                    receivers.remove(name);
                    // The process has ended; another one may have its place by now.
                    if last || !nothing {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }

    async fn dial(&self, name: &str) -> Result<Receiver> {
        let closed = |why: String| Error::new(ErrorKind::Closed, DELIVER, why);
        if name.is_empty() || name.contains('/') || name == GATEWAY || name.starts_with('.') {
            return Err(closed(format!("{name:?} names no process")));
        }
        let path = Path::new(&self.inner.folder).join(name);
        let nobody = |error| closed(format!("nobody answers at {}: {error}", path.display()));
        let socket = Arc::new(UnixStream::connect(&path).await.map_err(nobody)?);
        let peer = socket.peer_cred().map_err(|error| Error::io(DELIVER, error))?;
        if peer.uid() != nix::unistd::geteuid().as_raw() {
            return Err(Error::new(ErrorKind::Refused, DELIVER, "it runs as another user"));
        }
        let hello =
            Packet::Hello { version: VERSION, token: self.inner.options.token.clone(), borrows: false };
        socket::send(&socket, &Frame::from_message(&hello)?, None).await.map_err(|unsent| unsent.error)?;
        let receiver =
            Receiver { number: self.next.fetch_add(1, Ordering::Relaxed), socket: Arc::clone(&socket) };
        locked(&self.session.receivers).insert(name.to_owned(), Arc::clone(&socket));
        let (session, owed) = (Arc::clone(&self.session), Arc::clone(&self.owed));
        self.inner.spawn(answers(session, owed, name.to_owned(), receiver.clone()));
        Ok(receiver)
    }

    async fn cancel(&self, receivers: &HashMap<String, Receiver>, call: u64, actor: u64) -> Result<()> {
        let owing = locked(&self.owed).close(call);
        let frame = Frame::from_message(&Packet::Cancel { call, actor })?;
        for receiver in receivers.values().filter(|receiver| owing.contains(&receiver.number)) {
            // One that has ended meanwhile has nothing to cancel.
            drop(socket::send(&receiver.socket, &frame, None).await);
        }
        Ok(())
    }
}

fn undelivered(name: &str, reason: &str) -> Result<Frame> {
    Frame::from_message(&Packet::Undelivered { name: name.to_owned(), reason: reason.to_owned() })
}

/// Something for the session: a frame and its memory.
type Out = (Frame, Option<Bytes>);

async fn send_all(session: &Session, out: Vec<Out>) -> Result<()> {
    for (frame, memory) in out {
        session.send(frame, memory).await?;
    }
    Ok(())
}

/// Passes on what a process answers, until it ends.
async fn answers(session: Arc<Session>, owed: Arc<Mutex<Owed>>, name: String, receiver: Receiver) {
    let mut reader = Reader::new(Arc::clone(&receiver.socket));
    let passing = async {
        loop {
            let Some((packet, frame)) = reader.read().await? else { return Ok(()) };
            let Packet::Reply { call, slot, kind, parts, .. } = packet else {
                return Err(Error::new(ErrorKind::Protocol, "read an answer", "it is none"));
            };
            let memory = reader.memory(&parts)?.as_ref().map(memory::view).transpose()?;
            let out = locked(&owed).answered(receiver.number, call, slot, (kind, &parts), (frame, memory));
            send_all(&session, out).await?;
        }
    };
    let ended: Result<()> = passing.await;
    let reason =
        ended.err().map_or("the process closed the connection".to_owned(), |e| e.message().to_owned());
    {
        let mut receivers = locked(&session.receivers);
        if receivers.get(&name).is_some_and(|socket| Arc::ptr_eq(socket, &receiver.socket)) {
            receivers.remove(&name);
        }
    }
    let out = locked(&owed).ended(receiver.number, &reason);
    // Where the session has ended too, nobody waits for that.
    drop(send_all(&session, out).await);
}

/// What processes of this host owe to one process of another.
#[derive(Default)]
struct Owed {
    calls: HashMap<u64, Call>,
}

struct Call {
    /// Slots that have not answered, and the connections that they were called by.
    left: HashMap<u32, u64>,
    /// Answers that wait for the others; none where each goes by itself.
    held: Option<Vec<(u32, u8, Vec<Bytes>)>>,
    bytes: usize,
}

impl Call {
    /// The answers that were held, as one packet; from now on each goes by itself.
    fn release(&mut self, call: u64) -> Option<Out> {
        let held = self.held.take().filter(|held| !held.is_empty())?;
        let count = |segments: &Vec<Bytes>| u16::try_from(segments.len()).unwrap_or(u16::MAX);
        let answers = held.iter().map(|(slot, kind, segments)| (*slot, *kind, count(segments))).collect();
        let segments = held.into_iter().flat_map(|(_, _, segments)| segments).collect();
        // Our own packets can be encoded.
        let frame = Frame::from_message(&Packet::Replies { call, answers }).ok()?;
        Some((Frame { segments, ..frame }, None))
    }

    fn segments(&self) -> usize {
        self.held.iter().flatten().map(|(_, _, segments)| segments.len()).sum()
    }
}

impl Owed {
    fn open(&mut self, call: u64, slots: impl Iterator<Item = u32>, gather: bool) {
        let left = slots.map(|slot| (slot, 0)).collect();
        self.calls.insert(call, Call { left, held: gather.then(Vec::new), bytes: 0 });
    }

    fn owes(&mut self, call: u64, slot: u32, receiver: u64) {
        if let Some(number) = self.calls.get_mut(&call).and_then(|call| call.left.get_mut(&slot)) {
            *number = receiver;
        }
    }

    /// Nobody wants the answers of `call` any more; returns who was called.
    fn close(&mut self, call: u64) -> Vec<u64> {
        self.calls.remove(&call).map(|call| call.left.into_values().collect()).unwrap_or_default()
    }

    /// A process has answered. Returns what goes back now.
    fn answered(
        &mut self,
        receiver: u64,
        number: u64,
        slot: u32,
        (kind, parts): (u8, &[Part]),
        (frame, memory): Out,
    ) -> Vec<Out> {
        let Some(call) = self.calls.get_mut(&number) else { return Vec::new() };
        if call.left.get(&slot) != Some(&receiver) {
            return Vec::new();
        }
        call.left.remove(&slot);
        let bytes: usize = frame.segments.iter().map(Bytes::len).sum();
        let fits = memory.is_none()
            && call.bytes + bytes <= MOST_HELD
            && call.segments() + frame.segments.len() <= MAX_SEGMENTS
            && frame.segments.len() == parts.len();
        let mut out = Vec::new();
        match &mut call.held {
            Some(held) if fits => {
                held.push((slot, kind, frame.segments));
                call.bytes += bytes;
            }
            _ => {
                out.extend(call.release(number));
                out.push((frame, memory));
            }
        }
        if call.left.is_empty() || kind != VALUE {
            out.extend(call.release(number));
        }
        if call.left.is_empty() {
            self.calls.remove(&number);
        }
        out
    }

    /// These slots will not answer. Returns what goes back.
    fn gone(&mut self, number: u64, slots: &[u32], reason: &str) -> Vec<Out> {
        let Some(call) = self.calls.get_mut(&number) else { return Vec::new() };
        let mut out: Vec<Out> = call.release(number).into_iter().collect();
        call.left.retain(|slot, _| !slots.contains(slot));
        if call.left.is_empty() {
            self.calls.remove(&number);
        }
        let packet = Packet::Gone { call: number, slots: slots.to_vec(), reason: reason.to_owned() };
        out.extend(Frame::from_message(&packet).ok().map(|frame| (frame, None)));
        out
    }

    /// The process behind a connection has ended: what it owes has failed.
    fn ended(&mut self, receiver: u64, reason: &str) -> Vec<Out> {
        let of = |call: &Call| -> Vec<u32> {
            call.left.iter().filter(|(_, number)| **number == receiver).map(|(slot, _)| *slot).collect()
        };
        let lost: Vec<(u64, Vec<u32>)> =
            self.calls.iter().map(|(number, call)| (*number, of(call))).collect();
        let lost = lost.into_iter().filter(|(_, slots)| !slots.is_empty());
        lost.flat_map(|(number, slots)| self.gone(number, &slots, reason)).collect()
    }
}
