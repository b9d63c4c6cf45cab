//! One connection to another process of this host.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::{Buf, Bytes, BytesMut};
use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use subtle::ConstantTimeEq;

use super::aside::Haste;
use super::gather::Outcome;
use super::mailbox::{Mailbox, Origin, Request};
use super::packet::{Packet, Part, VERSION};
use super::payload::{Blob, Memory, Returns, unpack};
use super::shared::Shared;
use crate::wire::{Frame, decode};
use crate::{Error, ErrorKind, Result};

/// Bytes of one frame. What is larger goes by shared memory.
pub(super) const MAX_FRAME: u32 = 16 << 20;
/// Bytes and frames that may wait to be written; then the sender waits.
const MOST_BYTES: usize = 8 << 20;
const MOST_FRAMES: usize = 256;
/// Bytes taken off the socket at a time, and how often before others have their turn.
const READ: usize = 64 * 1024;
const READS: usize = 8;
/// Descriptors that may have come ahead of their frames.
pub(super) const MOST_FDS: usize = 64;
/// Chunks written at a time, and bytes and frames that are laid aside at the most.
const CHUNKS: usize = 32;
const ASIDE_BYTES: usize = 16 << 10;
/// An actor that owes so many answers is at work: it does not miss one more message.
const BUSY: usize = 8;

#[derive(Debug)]
struct Chunk {
    bytes: Bytes,
    memory: Option<Memory>,
}

#[derive(Debug, Default)]
struct Out {
    queue: VecDeque<Chunk>,
    bytes: usize,
    dead: bool,
    /// The socket is full: what is queued leaves when it takes bytes again.
    full: bool,
    /// It is among those of [`Aside`](super::aside::Aside), or about to be written by who took it from there.
    aside: bool,
}

#[derive(Debug)]
struct In {
    buffer: BytesMut,
    scratch: Box<[u8]>,
    fds: VecDeque<OwnedFd>,
    trusted: bool,
    /// A message whose mailbox has no room. Nothing behind it is looked at before it is in.
    stalled: Option<(Arc<Mailbox>, Request)>,
}

impl Out {
    /// So many bytes have left, and with the first of each chunk its memory.
    fn advance(&mut self, mut count: usize) {
        self.bytes -= count;
        while let Some(first) = self.queue.front_mut() {
            first.memory = None;
            if count < first.bytes.len() {
                first.bytes.advance(count);
                return;
            }
            count -= first.bytes.len();
            self.queue.pop_front();
            if count == 0 {
                return;
            }
        }
    }
}

/// What becomes of a connection after it was read.
pub(super) enum After {
    Open,
    /// It has ended, or cannot be read any further.
    Over(String),
}

/// A connection.
#[derive(Debug)]
pub(super) struct Link {
    id: u64,
    socket: UnixStream,
    out: Mutex<Out>,
    room: Condvar,
    input: Mutex<In>,
    borrows: AtomicBool,
    /// The actor that was called last, and about how many answers it owes.
    asked: AtomicU64,
    owed: AtomicUsize,
}

impl Link {
    /// Over a connected, non-blocking socket. Of one that was accepted the first frame has to be a hello.
    pub(super) fn new(id: u64, socket: UnixStream, accepted: bool) -> Self {
        let input = In {
            buffer: BytesMut::new(),
            scratch: vec![0; READ].into_boxed_slice(),
            fds: VecDeque::new(),
            trusted: !accepted,
            stalled: None,
        };
        let (out, input) = (Mutex::new(Out::default()), Mutex::new(input));
        Self {
            id,
            socket,
            out,
            room: Condvar::new(),
            input,
            borrows: AtomicBool::new(!accepted),
            asked: AtomicU64::new(0),
            owed: AtomicUsize::new(0),
        }
    }

    pub(super) const fn id(&self) -> u64 {
        self.id
    }

    /// True where its other side gives memory back.
    pub(super) fn borrows(&self) -> bool {
        self.borrows.load(Ordering::SeqCst)
    }

    /// One more answer is owed by `actor`; returns how the message that asks for it may leave.
    pub(super) fn ask(&self, actor: u64) -> Haste {
        // Roughly: what threads that call at the same time miscount only changes when something leaves.
        if self.asked.swap(actor, Ordering::Relaxed) != actor {
            self.owed.store(1, Ordering::Relaxed);
            return Haste::Patient;
        }
        let busy = self.owed.fetch_add(1, Ordering::Relaxed) >= BUSY;
        if busy { Haste::Together } else { Haste::Patient }
    }

    /// One answer less is owed, or is wanted no more.
    fn answered(&self) {
        // It fails where there is none: then those of another actor were forgotten.
        let less = |owed: usize| owed.checked_sub(1);
        let _ = self.owed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    fn out(&self) -> MutexGuard<'_, Out> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn input(&self) -> MutexGuard<'_, In> {
        self.input.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a frame, or queues what the socket does not take.
    pub(super) fn send(
        self: &Arc<Self>,
        node: &Shared,
        packet: &Packet,
        segments: Vec<Bytes>,
        memory: Option<Memory>,
        haste: Haste,
    ) -> Result<()> {
        if matches!(packet, Packet::Cancel { .. }) {
            self.answered();
        }
        let frame = Frame { segments, ..Frame::from_compact(packet)? };
        frame.check(MAX_FRAME)?;
        let chunk = Chunk { bytes: frame.whole()?, memory };
        let Some(lease) = chunk.memory.as_ref().and_then(Memory::lease).cloned() else {
            return self.put(node, chunk, haste);
        };
        // Before it leaves: it may be back before this thread goes on.
        node.pool().lend(self.id, &lease);
        let sent = self.put(node, chunk, haste);
        if sent.is_err() {
            node.pool().take_back(self.id, lease.id(), false);
        }
        sent
    }

    fn put(self: &Arc<Self>, node: &Shared, chunk: Chunk, haste: Haste) -> Result<()> {
        let mut out = self.out();
        let mut deadline = None;
        while haste != Haste::AtOnce
            && !out.dead
            && (out.bytes >= MOST_BYTES || out.queue.len() >= MOST_FRAMES)
        {
            let now = Instant::now();
            let left = deadline.get_or_insert(now + node.options().send_limit).saturating_duration_since(now);
            if left.is_zero() || node.is_closing() {
                return Err(Error::new(ErrorKind::TimedOut, SEND, "the receiver does not keep up"));
            }
            out = self.room.wait_timeout(out, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        if out.dead {
            return Err(Error::new(ErrorKind::Closed, SEND, "the connection has ended"));
        }
        let together = haste == Haste::Together && chunk.memory.is_none();
        out.bytes += chunk.bytes.len();
        out.queue.push_back(chunk);
        if out.full || (together && self.lay_aside(node, &mut out)) {
            return Ok(());
        }
        self.write_all(node, &mut out).map_err(|error| Error::io(SEND, error.into()))
    }

    /// True where what is queued is written by others, in a moment.
    fn lay_aside(self: &Arc<Self>, node: &Shared, out: &mut Out) -> bool {
        if out.queue.len() >= CHUNKS || out.bytes >= ASIDE_BYTES || !node.lead().naps() {
            return false;
        }
        if !out.aside {
            out.aside = true;
            node.aside().add(Arc::clone(self));
        }
        // Looked at again, now that it is to be found.
        node.lead().naps()
    }

    /// Writes what was laid aside.
    pub(super) fn write_aside(&self, node: &Shared) -> After {
        let mut out = self.out();
        out.aside = false;
        if out.dead || out.full {
            return After::Open;
        }
        match self.write_all(node, &mut out) {
            // Who reads it finds its end, behind all that has come before.
            Ok(()) | Err(Errno::EPIPE | Errno::ECONNRESET) => After::Open,
            Err(error) => After::Over(error.to_string()),
        }
    }

    /// Writes all that is queued; what the socket does not take, once it does.
    fn write_all(&self, node: &Shared, out: &mut Out) -> Result<(), Errno> {
        let done = self.write(out)?;
        if done == out.full {
            out.full = !done;
            node.poller().change(&self.socket, self.id, self.is_reading(), out.full);
        }
        Ok(())
    }

    fn is_reading(&self) -> bool {
        // Held by the thread that reads: then it is reading, and sets what is right when it stops.
        self.input.try_lock().map_or(true, |input| input.stalled.is_none())
    }

    /// True where all is written; false where the socket is full.
    fn write(&self, out: &mut Out) -> Result<bool, Errno> {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        while let Some(first) = out.queue.front() {
            let fds: Vec<RawFd> = first.memory.iter().map(Memory::raw).collect();
            let rights = [ControlMessage::ScmRights(&fds)];
            let control = if fds.is_empty() { &[][..] } else { &rights[..] };
            // The kernel ends what it hands out at once where descriptors begin, so a chunk with some goes alone.
            let together = if fds.is_empty() { CHUNKS } else { 1 };
            let plain =
                out.queue.iter().take(together).take_while(|chunk| chunk.memory.is_some() != fds.is_empty());
            let slices: Vec<IoSlice> = plain.map(|chunk| IoSlice::new(&chunk.bytes)).collect();
            match sendmsg::<()>(self.socket.as_raw_fd(), &slices, control, flags, None) {
                Ok(count) => out.advance(count),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Ok(false),
                // Descriptors on their way are limited too: they leave as the receiver takes others.
                Err(Errno::ETOOMANYREFS) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// The socket takes bytes again.
    pub(super) fn flush(&self, node: &Shared) -> After {
        let mut out = self.out();
        if let Err(error) = self.write_all(node, &mut out) {
            return After::Over(error.to_string());
        }
        if out.bytes < MOST_BYTES / 2 && out.queue.len() < MOST_FRAMES / 2 {
            self.room.notify_all();
        }
        After::Open
    }

    /// Reads what has arrived and hands it on.
    pub(super) fn read(self: &Arc<Self>, node: &Arc<Shared>) -> After {
        let mut input = self.input();
        let input = &mut *input;
        if input.stalled.is_some() {
            // Only a hang-up comes here, which the kernel would repeat: what was said before it waits in the socket.
            node.poller().remove(self.as_ref());
            return After::Open;
        }
        for _ in 0..READS {
            let count = match receive(&self.socket, input) {
                Ok(0) => return After::Over("the process closed the connection".to_owned()),
                Ok(count) => count,
                Err(Errno::EAGAIN) => return After::Open,
                Err(Errno::EINTR) => continue,
                Err(error) => return After::Over(error.to_string()),
            };
            if let Err(error) = self.dispatch(node, input) {
                return After::Over(error.to_string());
            }
            if !input.trusted && !input.fds.is_empty() {
                return After::Over("a stranger sent descriptors".to_owned());
            }
            if input.stalled.is_some() || count < READ {
                return After::Open;
            }
        }
        After::Open
    }

    /// A mailbox has room again.
    pub(super) fn resume(self: &Arc<Self>, node: &Arc<Shared>) -> After {
        let mut input = self.input();
        let Some((mailbox, request)) = input.stalled.take() else { return After::Open };
        if let Some(request) = mailbox.offer(node, self.id, request) {
            input.stalled = Some((mailbox, request));
            return After::Open;
        }
        if let Err(error) = self.dispatch(node, &mut input) {
            return After::Over(error.to_string());
        }
        if input.stalled.is_none() {
            let writing = self.out().full;
            node.poller().watch_again(self.as_ref(), self.id, writing);
        }
        After::Open
    }

    fn dispatch(self: &Arc<Self>, node: &Arc<Shared>, input: &mut In) -> Result<()> {
        while let Some(frame) = decode(&mut input.buffer, MAX_FRAME)? {
            let packet: Packet = frame.message()?;
            if !input.trusted {
                self.borrows.store(check_hello(&packet, &node.options().token)?, Ordering::SeqCst);
                input.trusted = true;
                continue;
            }
            match packet {
                Packet::Call { call, slot, actor, method, mut place, parts, memory } => {
                    let blobs = self.blobs(node, &parts, frame.segments, memory, input)?;
                    let mailbox = node.mailbox_of_message(actor, &mut place)?;
                    let request = Request {
                        node: Arc::downgrade(node),
                        origin: Origin::Link(Arc::clone(self)),
                        call,
                        slot,
                        method,
                        place,
                        blobs,
                        answered: false.into(),
                    };
                    if let Some(request) = mailbox.offer(node, self.id, request) {
                        input.stalled = Some((mailbox, request));
                        let writing = self.out().full;
                        node.poller().change(&self.socket, self.id, false, writing);
                        return Ok(());
                    }
                }
                Packet::Reply { call, slot, kind, parts, memory } => {
                    let blobs = self.blobs(node, &parts, frame.segments, memory, input)?;
                    self.answered();
                    node.complete(self.id, call, slot, Outcome::Answer { kind, blobs });
                }
                Packet::Release { memory, clean } => node.pool().take_back(self.id, memory, clean),
                Packet::Cancel { call, actor } => node.mailbox(actor)?.cancel(node, self.id, call),
                Packet::Replies { call, answers } => {
                    let mut segments = frame.segments.into_iter();
                    for (slot, kind, count) in answers {
                        let blobs = segments.by_ref().take(count.into()).map(Blob::new).collect();
                        node.complete(self.id, call, slot, Outcome::Answer { kind, blobs });
                    }
                }
                Packet::Gone { call, slots, reason } => {
                    for slot in slots {
                        node.complete(self.id, call, slot, Outcome::Dead { reason: reason.clone() });
                    }
                }
                Packet::Undelivered { name, reason } => node.undelivered_by(self.id, &name, &reason),
                Packet::Over { reason } => return Err(Error::new(ErrorKind::Closed, REACH, reason)),
                Packet::Hello { .. } | Packet::Far { .. } | Packet::Cast { .. } => {
                    let why = "a second hello, or a message for a gateway";
                    return Err(Error::new(ErrorKind::Protocol, "read a message", why));
                }
            }
        }
        Ok(())
    }

    /// The parts of a message. Its memory is mapped, and its descriptor closed, before anybody gets them.
    fn blobs(
        self: &Arc<Self>,
        node: &Arc<Shared>,
        parts: &[Part],
        segments: Vec<Bytes>,
        memory: u64,
        input: &mut In,
    ) -> Result<Vec<Blob>> {
        let fd = take_fd(parts, input)?;
        unpack(parts, segments, fd.as_ref(), self.returns(node, memory))
    }

    /// Tells the other side that nothing is left of memory that it has lent.
    fn returns(self: &Arc<Self>, node: &Arc<Shared>, memory: u64) -> Option<Returns> {
        let (link, node) = (Arc::downgrade(self), Arc::downgrade(node));
        let tell = move |clean| {
            if let (Some(link), Some(node)) = (link.upgrade(), node.upgrade()) {
                // A connection that has ended returns nothing: its sender has given the memory up.
                drop(link.send(&node, &Packet::Release { memory, clean }, Vec::new(), None, Haste::AtOnce));
            }
        };
        (memory != 0).then(|| Box::new(tell) as Returns)
    }

    /// Ends it: whoever waits to write is told.
    pub(super) fn end(&self) {
        let mut out = self.out();
        out.dead = true;
        out.queue.clear();
        out.bytes = 0;
        self.room.notify_all();
        drop(out);
        // It fails where the peer has ended it already.
        drop(self.socket.shutdown(std::net::Shutdown::Both));
    }
}

const SEND: &str = "send to an actor";
const REACH: &str = "reach another host";

/// Whether the peer gives memory back.
pub(super) fn check_hello(packet: &Packet, token: &str) -> Result<bool> {
    let refuse = |why: String| Err(Error::new(ErrorKind::Refused, "trust a process", why));
    match packet {
        Packet::Hello { version, .. } if *version != VERSION => {
            refuse(format!("it speaks version {version}; this side speaks {VERSION}"))
        }
        Packet::Hello { token: shown, borrows, .. }
            if bool::from(shown.as_bytes().ct_eq(token.as_bytes())) =>
        {
            Ok(*borrows)
        }
        _ => refuse("it does not know the secret of this mesh".to_owned()),
    }
}

fn take_fd(parts: &[Part], input: &mut In) -> Result<Option<OwnedFd>> {
    if !parts.iter().any(|part| matches!(part, Part::Shared(..))) {
        return Ok(None);
    }
    let missing = || Error::new(ErrorKind::Protocol, "read a message", "its shared memory is missing");
    input.fds.pop_front().map(Some).ok_or_else(missing)
}

fn receive(socket: &UnixStream, input: &mut In) -> Result<usize, Errno> {
    let mut space = nix::cmsg_space!([RawFd; 4]);
    let mut slices = [IoSliceMut::new(&mut input.scratch)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut slices, Some(&mut space), flags)?;
    let count = message.bytes;
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(fds) = control {
            for fd in fds {
                // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
                input.fds.push_back(unsafe { OwnedFd::from_raw_fd(fd) });
            }
        }
    }
    if input.fds.len() > MOST_FDS {
        return Err(Errno::EPROTO);
    }
    input.buffer.extend_from_slice(&input.scratch[..count]);
    Ok(count)
}

/// The descriptor, for the poller.
impl std::os::fd::AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
