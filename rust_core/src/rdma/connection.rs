//! The requester's end of a connection to an owner.

use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rand::RngCore;

use super::handle::Handle;
use super::memory::{Segment, SharedFile};
use super::protocol::{
    self, Greeting, MAGIC, MAX_PARTS, MAX_TEXT, NONCE, Op, PROOF, REPLY, Request, Secret, Side, Take,
};
use super::socket::{STALL, Socket};
use super::verbs::{Endpoint, JOINED, Keyed};
use crate::{Error, ErrorKind, Result};

/// The same where its bytes lie on a device, which has to copy them, after what it was told before.
pub(super) const DEVICE_STALL: Duration = Duration::from_secs(10);

/// What an owner lets a requester do by itself.
pub(super) struct Grant {
    /// Bytes, as many as were asked for or fewer.
    pub length: u64,
    /// Where they lie in the owner.
    pub parts: Vec<Segment>,
    /// One a part, where they are lent; else none.
    pub keys: Vec<u32>,
    /// The file that the first of them lies in, and where.
    pub shared: Option<(SharedFile, u64)>,
}

/// A range of a handle, and what is to be done with it.
#[derive(Clone, Copy)]
pub(super) struct Ask<'a> {
    pub handle: &'a Handle,
    pub offset: u64,
    pub length: u64,
    pub digest: bool,
    pub deadline: Instant,
}

impl Ask<'_> {
    pub(super) fn request(&self, op: Op) -> Request {
        let limit = self.deadline.saturating_duration_since(Instant::now());
        Request {
            op,
            digest: self.digest,
            token: self.handle.token,
            epoch: self.handle.epoch,
            offset: self.offset,
            length: self.length,
            limit_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

/// Connected, and both ends have proved that they belong to the run.
pub(super) struct Connection {
    pub socket: Socket,
    pub greeting: Greeting,
    /// Longest wait for one byte.
    pub stall: Duration,
}

fn protocol(why: &str) -> Error {
    Error::new(ErrorKind::Protocol, "talk to an owner", why)
}

impl Connection {
    pub(super) fn open(address: SocketAddr, secret: &Secret, deadline: Instant) -> Result<Self> {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let stream = TcpStream::connect_timeout(&address, left.min(STALL)).map_err(|error| {
            let kind = match error.kind() {
                std::io::ErrorKind::ConnectionRefused => ErrorKind::Closed,
                std::io::ErrorKind::WouldBlock => ErrorKind::TimedOut,
                _ => Error::io("reach an owner", std::io::Error::from(error.kind())).kind(),
            };
            Error::new(kind, "reach an owner", format!("{address}: {error}")).with_source(error)
        })?;
        let mut socket = Socket::new(stream)?;
        socket.until(deadline, STALL)?;
        let mut nonce = [0; NONCE];
        rand::rng().fill_bytes(&mut nonce);
        socket.write(&[&MAGIC[..], &nonce].concat())?;
        let mut answer = [0; MAGIC.len() + NONCE + PROOF];
        socket.read(&mut answer)?;
        let (magic, rest) = answer.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(protocol("it speaks another protocol, or another version of this one"));
        }
        let (theirs, proof) = rest.split_at(NONCE);
        let theirs: [u8; NONCE] = theirs.try_into().map_err(|_| protocol("no nonce"))?;
        secret.verify(Side::Owner, &nonce, &theirs, proof)?;
        socket.write(&secret.proof(Side::Requester, &nonce, &theirs))?;
        let mut greeting = [0; Greeting::LENGTH];
        socket.read(&mut greeting)?;
        Ok(Self { socket, greeting: Greeting::decode(&greeting), stall: STALL })
    }

    /// The same for what is asked of the owner of `handle`, who says nothing while its device copies.
    pub(super) fn open_for(handle: &Handle, secret: &Secret, deadline: Instant) -> Result<Self> {
        let connection = Self::open(handle.address, secret, deadline)?;
        Ok(Self { stall: if handle.device { DEVICE_STALL } else { STALL }, ..connection })
    }

    /// Asks, and returns the number of the answer.
    pub(super) fn ask(&mut self, request: &Request, deadline: Instant) -> Result<u64> {
        self.socket.until(deadline, self.stall)?;
        self.socket.write(&request.encode())?;
        self.answer()
    }

    /// The beginning of the next answer.
    pub(super) fn answer(&mut self) -> Result<u64> {
        let mut head = [0; REPLY];
        self.socket.read(&mut head)?;
        match protocol::decode_reply(&head)? {
            Ok(value) => Ok(value),
            Err((kind, length)) => {
                let mut reason = vec![0; length];
                self.socket.read(&mut reason)?;
                Err(Error::new(kind, "use the memory of a peer", String::from_utf8_lossy(&reason)))
            }
        }
    }

    /// Asks to do it without the owner.
    pub(super) fn grant(&mut self, ask: &Ask<'_>, op: Op) -> Result<Grant> {
        let length = self.ask(&ask.request(op), ask.deadline)?;
        if length > ask.length {
            return Err(protocol("it grants more than it was asked for"));
        }
        let mut count = [0; 4];
        self.socket.read(&mut count)?;
        let count = u32::from_le_bytes(count) as usize;
        if count > MAX_PARTS {
            return Err(protocol("it grants too many segments"));
        }
        let lent = matches!(op, Op::LendRead | Op::LendWrite);
        let size = if lent { 20 } else { 16 };
        let mut packed = vec![0; count * size + 1];
        self.socket.read(&mut packed)?;
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap_or_default());
        let (packed, shared) = packed.split_at(count * size);
        let packed = packed.chunks_exact(size);
        let keys = packed.clone().filter(|_| lent);
        let keys = keys.map(|part| u32::from_le_bytes(part[16..].try_into().unwrap_or_default())).collect();
        let parts: Vec<Segment> = packed
            .map(|part| Segment {
                address: number(&part[..8]) as usize,
                length: number(&part[8..16]) as usize,
            })
            .collect();
        let mut sum = 0u64;
        for part in &parts {
            sum = sum.checked_add(part.length as u64).ok_or_else(|| protocol("its segments are too long"))?;
        }
        if sum != length || (length == 0 && ask.length > 0) {
            return Err(protocol("its segments do not add up"));
        }
        let shared = match shared {
            [0] => None,
            _ => {
                let mut file = [0; 28];
                self.socket.read(&mut file)?;
                let fd = i32::from_le_bytes(file[..4].try_into().unwrap_or_default());
                let (device, inode) = (number(&file[4..12]), number(&file[12..20]));
                Some((SharedFile { fd, device, inode }, number(&file[20..])))
            }
        };
        Ok(Grant { length, parts, keys, shared })
    }

    /// Says that what was granted is done; [`ErrorKind::Stale`] where it does not count.
    pub(super) fn release(&mut self, ask: &Ask<'_>) -> Result<()> {
        self.ask(&ask.request(Op::Release), ask.deadline).map(|_| ())
    }

    /// The same where what was lent has failed; [`ErrorKind::Stale`] where the owner has withdrawn it.
    pub(super) fn quit(&mut self, ask: &Ask<'_>) -> Result<()> {
        // Also after the deadline: the owner holds the memory until it hears this, or the connection ends.
        let deadline = ask.deadline.max(Instant::now() + self.stall);
        self.ask(&ask.request(Op::Quit), deadline).map(|_| ())
    }

    /// Has the owner make a queue pair for `mine`: its end, and where its cookie lies under which key.
    pub(super) fn join(&mut self, mine: &Endpoint, deadline: Instant) -> Result<(Endpoint, Keyed)> {
        self.socket.until(deadline, STALL)?;
        let limit = deadline.saturating_duration_since(Instant::now());
        let request = Request {
            op: Op::Join,
            digest: false,
            token: 0,
            epoch: 0,
            offset: 0,
            length: Endpoint::LENGTH as u64,
            limit_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
        };
        self.socket.write(&[&request.encode()[..], &mine.encode()].concat())?;
        if self.answer()? != JOINED as u64 {
            return Err(protocol("its end of a queue pair is none"));
        }
        let mut joined = [0; JOINED];
        self.socket.read(&mut joined)?;
        let mut at = Take(&joined);
        let theirs = Endpoint::decode(&at.take())?;
        let address = u64::from_le_bytes(at.take()) as usize;
        let key = u32::from_le_bytes(at.take());
        let segment = Segment { address, length: self.greeting.cookie.len() };
        Ok((theirs, Keyed { segment, key }))
    }

    /// What was announced as `name` with `serial`, waiting for it.
    pub(super) fn lookup(&mut self, name: &str, serial: u64, deadline: Instant) -> Result<String> {
        let limit = deadline.saturating_duration_since(Instant::now());
        let request = Request {
            op: Op::Lookup,
            digest: false,
            token: 0,
            epoch: serial,
            offset: 0,
            length: name.len() as u64,
            limit_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
        };
        // An owner that lives says nothing until there is something: its end is what breaks the wait.
        self.socket.until(deadline, limit)?;
        self.socket.write(&request.encode())?;
        self.socket.write(name.as_bytes())?;
        let length = self.answer()?;
        if length > MAX_TEXT as u64 {
            return Err(protocol("its announcement is too long"));
        }
        let mut text = vec![0; length as usize];
        self.socket.read(&mut text)?;
        String::from_utf8(text).map_err(|_| protocol("its announcement is no text"))
    }
}
