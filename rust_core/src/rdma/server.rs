//! The owner's end: answers requests, one thread a connection.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::socket::{Shutdown, shutdown};
use rand::RngCore;

use super::board::Board;
use super::domain::Limits;
use super::memory::{self, Digest, cut};
use super::protocol::{
    Greeting, MAGIC, MAX_NAME, MAX_PARTS, NONCE, Op, PROOF, Request, Secret, Side, encode_reply,
};
use super::registry::{Lease, Purpose, Registry};
use super::socket::{Cutter, STALL, Socket};
use super::tcp::CHUNK;
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
/// Between two tries to accept, where the system has no room.
const BREATH: Duration = Duration::from_millis(50);

/// What all connections of a domain share.
pub(super) struct Shared {
    pub secret: Secret,
    pub registry: Registry,
    pub board: Board,
    pub limits: Limits,
    cookie: Box<[u8; 16]>,
    open: Mutex<HashMap<u64, Cutter>>,
    next: AtomicU64,
    closing: AtomicBool,
    /// When the next byte may leave, where there is a limit.
    paced_until: Mutex<Instant>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Of this kernel since its last boot; zeros where it does not say.
pub(super) fn boot() -> [u8; 16] {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).unwrap_or_default().to_be_bytes()
}

/// Of this process; 0 where the system does not say.
pub(super) fn pid_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |metadata| metadata.ino())
}

impl Shared {
    pub(super) fn new(secret: Secret, limits: Limits) -> Self {
        let mut cookie = Box::new([0; 16]);
        rand::rng().fill_bytes(&mut cookie[..]);
        Self {
            secret,
            registry: Registry::default(),
            board: Board::default(),
            limits,
            cookie,
            open: Mutex::default(),
            next: AtomicU64::new(0),
            closing: AtomicBool::new(false),
            paced_until: Mutex::new(Instant::now()),
        }
    }

    fn greeting(&self) -> Greeting {
        Greeting {
            pid: std::process::id(),
            // What others read by themselves cannot be held to a limit.
            direct: self.limits.bytes_per_s.is_none(),
            pid_namespace: pid_namespace(),
            boot: boot(),
            cookie: *self.cookie,
            cookie_address: self.cookie.as_ptr() as u64,
        }
    }

    fn pace(&self, bytes: usize) {
        let Some(rate) = self.limits.bytes_per_s else { return };
        let wait = {
            let mut until = lock(&self.paced_until);
            let now = Instant::now();
            let from = (*until).max(now);
            *until = from + Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64);
            from - now
        };
        std::thread::sleep(wait);
    }
}

/// Listens, until dropped.
pub(super) struct Server {
    pub address: SocketAddr,
    listener: Arc<TcpListener>,
    shared: Arc<Shared>,
    accepting: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    pub(super) fn start(address: IpAddr, shared: Arc<Shared>) -> Result<Self> {
        const LISTEN: &str = "listen for those who read memory";
        let listener = TcpListener::bind((address, 0)).map_err(|error| Error::io(LISTEN, error))?;
        let address = listener.local_addr().map_err(|error| Error::io(LISTEN, error))?;
        let listener = Arc::new(listener);
        let (accepted, owner) = (Arc::clone(&listener), Arc::clone(&shared));
        let accepting = std::thread::Builder::new()
            .name("rdma-accept".to_owned())
            .spawn(move || accept(&accepted, &owner))
            .map_err(|error| Error::io(LISTEN, error))?;
        Ok(Self { address, listener, shared, accepting: Some(accepting) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        self.shared.board.close();
        // Ends the accept under way.
        let _ended = shutdown(self.listener.as_raw_fd(), Shutdown::Both);
        if let Some(accepting) = self.accepting.take() {
            let _panicked = accepting.join();
        }
        for cutter in lock(&self.shared.open).values() {
            cutter.cut();
        }
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    while !shared.closing.load(Ordering::SeqCst) {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                if !shared.closing.load(Ordering::SeqCst) {
                    tracing::debug!(%error, "cannot accept a connection");
                    std::thread::sleep(BREATH);
                }
                continue;
            }
        };
        // One more than the limit is hung up on: its requester reads elsewhere.
        if lock(&shared.open).len() >= shared.limits.max_connections {
            tracing::warn!("too many connections: one is refused");
            continue;
        }
        let id = shared.next.fetch_add(1, Ordering::Relaxed);
        let Ok(socket) = Socket::new(stream) else { continue };
        let Ok(cutter) = socket.cutter() else { continue };
        lock(&shared.open).insert(id, cutter);
        let owner = Arc::clone(shared);
        let spawned = std::thread::Builder::new().name("rdma-serve".to_owned()).spawn(move || {
            let ended = Serving { socket, shared: &owner, held: None }.run();
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection ended");
            }
            lock(&owner.open).remove(&id);
        });
        if spawned.is_err() {
            lock(&shared.open).remove(&id);
        }
    }
}

/// One connection.
struct Serving<'a> {
    socket: Socket,
    shared: &'a Shared,
    /// What was granted and is not released yet.
    held: Option<(Lease, Purpose, Instant)>,
}

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        // Reached with a grant where the peer hung up, which a requester does only after its system call has returned;
        // where this end gave up, it may still be writing.
        if let Some((lease, Purpose::Write, _)) = self.held.take()
            && self.shared.closing.load(Ordering::SeqCst)
        {
            std::mem::forget(lease);
        }
    }
}

impl Serving<'_> {
    fn run(mut self) -> Result<()> {
        self.handshake()?;
        loop {
            let Some(request) = self.next()? else { return Ok(()) };
            match request.op {
                Op::Read => self.send(&request)?,
                Op::Write => self.receive(&request)?,
                Op::GrantRead => self.grant(&request, Purpose::Read)?,
                Op::GrantWrite => self.grant(&request, Purpose::Write)?,
                Op::Release => self.release()?,
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
            let until = self.held.as_ref().map_or(now + IDLE, |(_, _, until)| (*until).max(now + STALL));
            self.socket.until(until, IDLE)?;
            match self.socket.read(&mut bytes) {
                Ok(()) => return Request::decode(&bytes).map(Some),
                Err(error) if error.kind() == ErrorKind::Closed => return Ok(None),
                // Who may write to our memory by itself is waited for: nothing else can stop it.
                Err(error)
                    if error.kind() == ErrorKind::TimedOut
                        && matches!(self.held, Some((_, Purpose::Write, _))) => {}
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
        self.begin(request)?;
        let Some(lease) = self.leased(request, Purpose::Read)? else { return Ok(()) };
        let parts = lease.memory().parts(request.offset, request.length, usize::MAX)?;
        self.answer(&Ok(request.length))?;
        let mut digest = Digest::default();
        for chunk in cut(&parts, CHUNK) {
            self.shared.pace(chunk.length);
            // SAFETY: inside what was registered, which the lease keeps.
            unsafe {
                self.socket.send(chunk)?;
                if request.digest {
                    digest.add(memory::bytes(chunk));
                }
            }
        }
        self.answer(&lease.check().map(|()| digest.value()))
    }

    fn receive(&mut self, request: &Request) -> Result<()> {
        self.begin(request)?;
        let Some(lease) = self.leased(request, Purpose::Write)? else { return Ok(()) };
        let parts = lease.memory().parts(request.offset, request.length, usize::MAX)?;
        self.answer(&Ok(request.length))?;
        let mut digest = Digest::default();
        for chunk in cut(&parts, CHUNK) {
            // SAFETY: inside what was registered to be written to, which the lease keeps.
            unsafe {
                self.socket.receive(chunk)?;
                if request.digest {
                    digest.add(memory::bytes(chunk));
                }
            }
        }
        let mut theirs = [0; 8];
        self.socket.read(&mut theirs)?;
        if request.digest && u64::from_le_bytes(theirs) != digest.value() {
            let why = "what arrived is not what was sent: the range holds something else now";
            return self.answer(&Err(Error::new(ErrorKind::Corrupt, "write memory", why)));
        }
        self.answer(&lease.check().map(|()| request.length))
    }

    fn grant(&mut self, request: &Request, purpose: Purpose) -> Result<()> {
        let deadline = self.begin(request)?;
        if self.held.is_some() || !self.shared.greeting().direct {
            let why = "another grant is not released yet, or none are given";
            return Err(Error::new(ErrorKind::Protocol, "grant access", why));
        }
        let Some(lease) = self.leased(request, purpose)? else { return Ok(()) };
        let parts = lease.memory().parts(request.offset, request.length, MAX_PARTS)?;
        let mut answer = encode_reply(&Ok(memory::total(&parts)));
        // No more than MAX_PARTS.
        answer.extend((parts.len() as u32).to_le_bytes());
        for part in &parts {
            answer.extend((part.address as u64).to_le_bytes());
            answer.extend((part.length as u64).to_le_bytes());
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
        self.held = Some((lease, purpose, deadline));
        self.socket.write(&answer)
    }

    fn release(&mut self) -> Result<()> {
        self.socket.until(Instant::now() + STALL, STALL)?;
        let Some((lease, _, _)) = self.held.take() else {
            return Err(Error::new(ErrorKind::Protocol, "release a grant", "there is none"));
        };
        let counts = lease.check().map(|()| 0);
        drop(lease);
        self.answer(&counts)
    }

    fn digest(&mut self, request: &Request) -> Result<()> {
        self.begin(request)?;
        let Some(lease) = self.leased(request, Purpose::Read)? else { return Ok(()) };
        let parts = lease.memory().parts(request.offset, request.length, usize::MAX)?;
        // SAFETY: inside what was registered, which the lease keeps.
        let digest = unsafe { memory::digest(&parts) };
        self.answer(&lease.check().map(|()| digest))
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
