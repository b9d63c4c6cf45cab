//! One connection of a requester, at its owner's end.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rand::RngCore;

use super::memory::{self, Digest, cut};
use super::protocol::{MAGIC, MAX_NAME, MAX_PARTS, NONCE, Op, PROOF, Request, Side, encode_reply};
use super::registry::{Lease, Purpose};
use super::server::Shared;
use super::socket::{STALL, Socket};
use super::staging::{self, Staging};
use super::tcp::CHUNK;
use super::verbs::{self, Endpoint, Keyed, OwnerEnd, Region, Rights};
use crate::agent::mutant;
use crate::{Error, ErrorKind, Result};

/// From accept to the proof.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// A requester that asks for nothing is let go.
const IDLE: Duration = Duration::from_secs(60);
/// Longest operation that a requester may announce.
const LONGEST: Duration = Duration::from_secs(600);
/// On top of what the requester announced, to say that it is done.
const MARGIN: Duration = Duration::from_secs(2);

/// One connection.
pub(super) struct Serving<'a> {
    socket: Socket,
    shared: &'a Shared,
    fabric_end: OwnerEnd,
    /// What was granted and is not released yet.
    held: Option<Held<'a>>,
}

/// What is registered of pinned memory, and that memory: they end in this order.
type StandIn<'a> = (Region, Staging<'a>);

struct Held<'a> {
    lease: Lease,
    purpose: Purpose,
    until: Instant,
    /// By RDMA: the end of our queue pair ends whatever the requester does.
    lent: bool,
    /// What was lent in place of memory of an accelerator. The key ends before what it opens.
    staged: Option<StandIn<'a>>,
}

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        // From here on nothing arrives by RDMA.
        self.fabric_end.part();
        // Reached with a grant where the peer hung up, which a requester does only after its system call has returned;
        // where this end gave up, it may still be writing.
        if let Some(Held { lease, purpose: Purpose::Write, lent: false, .. }) = self.held.take()
            && self.shared.closing.load(Ordering::SeqCst)
        {
            std::mem::forget(lease);
        }
    }
}

impl<'a> Serving<'a> {
    pub(super) fn new(socket: Socket, shared: &'a Shared) -> Self {
        Self { socket, shared, fabric_end: OwnerEnd::default(), held: None }
    }

    pub(super) fn run(mut self) -> Result<()> {
        self.handshake()?;
        loop {
            let Some(request) = self.next()? else { return Ok(()) };
            match request.op {
                Op::Read => self.send(&request)?,
                Op::Write => self.receive(&request)?,
                Op::GrantRead => self.grant(&request, Purpose::Read, false)?,
                Op::GrantWrite => self.grant(&request, Purpose::Write, false)?,
                Op::LendRead => self.grant(&request, Purpose::Read, true)?,
                Op::LendWrite => self.grant(&request, Purpose::Write, true)?,
                Op::Release => self.release()?,
                Op::Quit => {
                    self.fabric_end.part();
                    // What was written of it is not what was to be.
                    if let Some(held) = &mut self.held {
                        held.staged = None;
                    }
                    self.release()?;
                }
                Op::Join => self.join(&request)?,
                Op::Digest => self.digest(&request)?,
                Op::Lookup => self.lookup(&request)?,
            }
        }
    }

    /// Nothing of a peer is read as ours before it has proved that it has the secret.
    fn handshake(&mut self) -> Result<()> {
        self.socket.until(Instant::now() + HANDSHAKE, HANDSHAKE)?;
        let mut hello = [0; MAGIC.len() + NONCE];
        self.socket.read(&mut hello)?;
        let (magic, theirs) = hello.split_at(MAGIC.len());
        let theirs: Option<[u8; NONCE]> = theirs.try_into().ok();
        let Some(theirs) = theirs.filter(|_| magic == MAGIC) else {
            return Err(Error::new(ErrorKind::Protocol, "greet a peer", "it speaks something else"));
        };
        let mut nonce = [0; NONCE];
        rand::rng().fill_bytes(&mut nonce);
        let proof = self.shared.secret.proof(Side::Owner, &theirs, &nonce);
        self.socket.write(&[&MAGIC[..], &nonce, &proof].concat())?;
        let mut proof = [0; PROOF];
        self.socket.read(&mut proof)?;
        if !mutant::is_on("trust_strangers") {
            self.shared.secret.verify(Side::Requester, &theirs, &nonce, &proof)?;
        }
        self.socket.write(&self.shared.greeting().encode())
    }

    /// The next request; none where the peer has hung up, or has had nothing to ask for too long.
    fn next(&mut self) -> Result<Option<Request>> {
        let mut bytes = [0; Request::LENGTH];
        loop {
            let now = Instant::now();
            let until = self.held.as_ref().map_or(now + IDLE, |held| held.until.max(now + STALL));
            self.socket.until(until, IDLE)?;
            match self.socket.read(&mut bytes) {
                Ok(()) => return Request::decode(&bytes).map(Some),
                Err(error) if error.kind() == ErrorKind::Closed => return Ok(None),
                // Who may write to our memory by itself is waited for: nothing else can stop it, but for RDMA.
                Err(error)
                    if error.kind() == ErrorKind::TimedOut
                        && matches!(self.held, Some(Held { purpose: Purpose::Write, lent: false, .. })) => {}
                Err(error) if error.kind() == ErrorKind::TimedOut => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    /// Begins an operation that lasts as long as the requester waits.
    fn begin(&mut self, request: &Request) -> Result<Instant> {
        let deadline = Instant::now() + Duration::from_millis(request.limit_ms).min(LONGEST) + MARGIN;
        self.socket.until(deadline, STALL)?;
        Ok(deadline)
    }

    fn lease(&self, request: &Request, purpose: Purpose) -> Result<Lease> {
        let range = (request.offset, request.length);
        self.shared.registry.lease(request.token, request.epoch, purpose, range)
    }

    fn answer(&self, outcome: &Result<u64>) -> Result<()> {
        self.socket.write(&encode_reply(outcome))
    }

    /// `lease`, or the refusal is said and there is none.
    fn leased(&self, request: &Request, purpose: Purpose) -> Result<Option<Lease>> {
        match self.lease(request, purpose) {
            Ok(lease) => Ok(Some(lease)),
            Err(error) => self.answer(&Err(error)).map(|()| None),
        }
    }

    fn send(&mut self, request: &Request) -> Result<()> {
        let deadline = self.begin(request)?;
        let Some(lease) = self.leased(request, Purpose::Read)? else { return Ok(()) };
        let parts = lease.memory().parts(request.offset, request.length, usize::MAX)?;
        self.answer(&Ok(request.length))?;
        let mut digest = Digest::default();
        staging::through(&self.shared.given, lease.memory(), parts, Purpose::Read, deadline, |run| {
            for chunk in cut(run, CHUNK) {
                self.shared.pace(chunk.length);
                // SAFETY: inside what was registered, which the lease keeps, or what stands in for it.
                unsafe {
                    self.socket.send(chunk)?;
                    if request.digest {
                        digest.add(memory::bytes(chunk));
                    }
                }
            }
            Ok(())
        })?;
        self.answer(&lease.check().map(|()| digest.value()))
    }

    fn receive(&mut self, request: &Request) -> Result<()> {
        let deadline = self.begin(request)?;
        let Some(lease) = self.leased(request, Purpose::Write)? else { return Ok(()) };
        let parts = lease.memory().parts(request.offset, request.length, usize::MAX)?;
        self.answer(&Ok(request.length))?;
        let mut digest = Digest::default();
        staging::through(&self.shared.given, lease.memory(), parts, Purpose::Write, deadline, |run| {
            for chunk in cut(run, CHUNK) {
                // SAFETY: inside what was registered to be written to, which the lease keeps, or what stands in for it.
                unsafe {
                    self.socket.receive(chunk)?;
                    if request.digest {
                        digest.add(memory::bytes(chunk));
                    }
                }
            }
            Ok(())
        })?;
        let mut theirs = [0; 8];
        self.socket.read(&mut theirs)?;
        if request.digest && u64::from_le_bytes(theirs) != digest.value() {
            let why = "what arrived is not what was sent: the range holds something else now";
            return self.answer(&Err(Error::new(ErrorKind::Corrupt, "write memory", why)));
        }
        self.answer(&lease.check().map(|()| request.length))
    }

    /// A queue pair for the requester's, or the reason why there is none.
    fn join(&mut self, request: &Request) -> Result<()> {
        self.begin(request)?;
        if request.length != Endpoint::LENGTH as u64 || self.held.is_some() {
            return Err(Error::new(ErrorKind::Protocol, "join a queue pair", "it is not the time for it"));
        }
        let mut theirs = [0; Endpoint::LENGTH];
        self.socket.read(&mut theirs)?;
        let theirs = Endpoint::decode(&theirs)?;
        let made = match self.shared.fabric() {
            Ok(_) if !self.shared.greeting().direct => {
                Err(Error::new(ErrorKind::Device, "join a queue pair", "nobody may read by itself"))
            }
            Ok(fabric) => self.fabric_end.join(fabric, &theirs, self.shared.cookie()),
            Err(error) => Err(error),
        };
        match made {
            Ok(joined) => self.socket.write(&[&encode_reply(&Ok(joined.len() as u64))[..], &joined].concat()),
            Err(error) => self.answer(&Err(error)),
        }
    }

    /// The keys of a range, or of what stands in for the beginning of it.
    fn lend(
        &self,
        lease: &Lease,
        request: &Request,
        purpose: Purpose,
        until: Instant,
    ) -> Result<(Vec<Keyed>, Option<StandIn<'a>>)> {
        let (fabric, memory) = (self.shared.fabric()?, lease.memory());
        if let Some(regions) = lease.regions(fabric)? {
            let parts = memory.indexed_parts(request.offset, request.length, MAX_PARTS)?;
            return Ok((verbs::keyed(&parts, regions), None));
        }
        let parts = memory.parts(request.offset, request.length.min(staging::MOST), MAX_PARTS)?;
        let staged = Staging::of(&self.shared.given, memory, &parts, until)?;
        let Some(mut staged) = staged else { return Ok((Vec::new(), None)) };
        let rights = match purpose {
            Purpose::Read => {
                staged.fill()?;
                Rights::RemoteRead
            }
            Purpose::Write => Rights::RemoteWrite,
        };
        // SAFETY: it is kept for as long as what is registered of it.
        let region = unsafe { Region::host(fabric, staged.segment(), rights) }?;
        Ok((vec![Keyed { segment: staged.segment(), key: region.remote_key() }], Some((region, staged))))
    }

    fn grant(&mut self, request: &Request, purpose: Purpose, lend: bool) -> Result<()> {
        let deadline = self.begin(request)?;
        if self.held.is_some() || !self.shared.greeting().direct {
            let why = "another grant is not released yet, or none are given";
            return Err(Error::new(ErrorKind::Protocol, "grant access", why));
        }
        let Some(lease) = self.leased(request, purpose)? else { return Ok(()) };
        let (keyed, staged) = if lend {
            match self.lend(&lease, request, purpose, deadline - MARGIN) {
                Ok(lent) => lent,
                // It may well be had over the connection.
                Err(error) => {
                    return self.answer(&Err(Error::new(ErrorKind::Io, "lend memory", error.message())));
                }
            }
        } else if !lease.memory().is_of_host() {
            let why = "memory of an accelerator cannot be read by its address";
            return self.answer(&Err(Error::new(ErrorKind::Io, "grant access", why)));
        } else {
            let parts = lease.memory().parts(request.offset, request.length, MAX_PARTS)?;
            (parts.iter().map(|segment| Keyed { segment: *segment, key: 0 }).collect(), None)
        };
        let total = keyed.iter().map(|part| part.segment.length as u64).sum();
        let mut answer = encode_reply(&Ok(total));
        // No more than MAX_PARTS.
        answer.extend((keyed.len() as u32).to_le_bytes());
        for part in &keyed {
            answer.extend((part.segment.address as u64).to_le_bytes());
            answer.extend((part.segment.length as u64).to_le_bytes());
            if lend {
                answer.extend(part.key.to_le_bytes());
            }
        }
        match lease.memory().shared() {
            None => answer.push(0),
            Some(file) => {
                answer.push(1);
                answer.extend(file.fd.to_le_bytes());
                for number in [file.device, file.inode, request.offset] {
                    answer.extend(number.to_le_bytes());
                }
            }
        }
        self.held = Some(Held { lease, purpose, until: deadline, lent: lend, staged });
        self.socket.write(&answer)
    }

    fn release(&mut self) -> Result<()> {
        let Some(Held { lease, purpose, mut staged, .. }) = self.held.take() else {
            return Err(Error::new(ErrorKind::Protocol, "release a grant", "there is none"));
        };
        let counts = match &mut staged {
            Some((_, staged)) if purpose == Purpose::Write => staged.drain(),
            _ => Ok(()),
        };
        let counts = counts.and_then(|()| lease.check()).map(|()| 0);
        drop(staged);
        drop(lease);
        // From here on: a device may have taken its time over what was lent in its place.
        self.socket.until(Instant::now() + STALL, STALL)?;
        self.answer(&counts)
    }

    fn digest(&mut self, request: &Request) -> Result<()> {
        let deadline = self.begin(request)?;
        let Some(lease) = self.leased(request, Purpose::Read)? else { return Ok(()) };
        let parts = lease.memory().parts(request.offset, request.length, usize::MAX)?;
        let mut digest = Digest::default();
        staging::through(&self.shared.given, lease.memory(), parts, Purpose::Read, deadline, |run| {
            for part in run {
                // SAFETY: inside what was registered, which the lease keeps, or what stands in for it.
                digest.add(unsafe { memory::bytes(*part) });
            }
            Ok(())
        })?;
        self.answer(&lease.check().map(|()| digest.value()))
    }

    fn lookup(&mut self, request: &Request) -> Result<()> {
        let deadline = self.begin(request)?;
        if request.length > MAX_NAME as u64 {
            return Err(Error::new(ErrorKind::Protocol, "look a handle up", "its name is too long"));
        }
        let mut name = vec![0; request.length as usize];
        self.socket.read(&mut name)?;
        let name = String::from_utf8_lossy(&name);
        match self.shared.board.lookup(&name, request.epoch, deadline - MARGIN) {
            Ok(text) => {
                self.socket.write(&encode_reply(&Ok(text.len() as u64)))?;
                self.socket.write(text.as_bytes())
            }
            Err(error) => self.answer(&Err(error)),
        }
    }
}
