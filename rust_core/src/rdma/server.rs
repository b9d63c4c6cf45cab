//! The owner's end: accepts connections, and what all of them share.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::socket::{Shutdown, shutdown};
use rand::RngCore;

use super::board::Board;
use super::domain::Limits;
use super::memory::Segment;
use super::protocol::{Greeting, Secret};
use super::registry::Registry;
use super::serving::Serving;
use super::socket::{Cutter, Socket};
use super::staging::Pool;
use super::verbs::{Avoided, Fabric};
use crate::{Error, Result};

/// Between two tries to accept, where the system has no room.
const BREATH: Duration = Duration::from_millis(50);

/// What all connections of a domain share.
pub(super) struct Shared {
    pub secret: Secret,
    pub registry: Registry,
    pub board: Board,
    pub limits: Limits,
    /// Where memory of devices is staged that others read and write.
    pub given: Pool,
    /// Where it is staged that this process reads into, and writes from.
    pub taken: Pool,
    cookie: Box<[u8; 16]>,
    open: Mutex<HashMap<u64, Cutter>>,
    next: AtomicU64,
    pub closing: AtomicBool,
    /// Where peers reach this domain: the RDMA port that has it is the one to take.
    address: IpAddr,
    /// Opened when it is first needed; what went wrong then stays.
    fabric: OnceLock<Result<Arc<Fabric>>>,
    pub avoided: Avoided,
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
    pub(super) fn new(secret: Secret, limits: Limits, address: IpAddr) -> Self {
        let mut cookie = Box::new([0; 16]);
        rand::rng().fill_bytes(&mut cookie[..]);
        Self {
            secret,
            registry: Registry::default(),
            board: Board::default(),
            limits,
            given: Pool::default(),
            taken: Pool::default(),
            cookie,
            open: Mutex::default(),
            next: AtomicU64::new(0),
            closing: AtomicBool::new(false),
            address,
            fabric: OnceLock::new(),
            avoided: Avoided::default(),
            paced_until: Mutex::new(Instant::now()),
        }
    }

    /// The RDMA device that this domain uses.
    ///
    /// [`Device`](crate::ErrorKind::Device) where there is none, [`InvalidInput`](crate::ErrorKind::InvalidInput) where another was asked for.
    pub(super) fn fabric(&self) -> Result<&Arc<Fabric>> {
        let fabric = self.fabric.get_or_init(|| Fabric::open(self.address)).as_ref();
        fabric.map_err(|error| Error::new(error.kind(), "open an RDMA device", error.message()))
    }

    /// Where its random bytes lie.
    pub(super) fn cookie(&self) -> Segment {
        Segment { address: self.cookie.as_ptr() as usize, length: self.cookie.len() }
    }

    pub(super) fn greeting(&self) -> Greeting {
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

    pub(super) fn pace(&self, bytes: usize) {
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
            let ended = Serving::new(socket, &owner).run();
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
