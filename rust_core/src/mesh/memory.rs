//! Shared memory that a process fills and lends to others, and fills again when all of them have let go of it.
//!
//! Fresh memory costs more than the copy into it: its pages are to be found, mapped and given back. A segment that
//! comes back has all of them.
//!
//! Whoever is lent one maps it privately, and says when nothing of it is left there. Until then its sender leaves it
//! alone. It never fills a segment again which may still be seen: that of a receiver whose connection ended, or that
//! forked meanwhile (a child sees what its parent has mapped). Such a segment is given up, and stays as it is.

use std::collections::HashMap;
use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, Weak};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};
use nix::unistd::ftruncate;

use super::copying::{Pages, copy};
use super::payload::{Draft, SHARE};
use crate::{Error, Result};

/// Messages whose large parts have so many bytes or more are lent. To say when one is free again costs, too.
pub(super) const LENT_FROM: usize = 1 << 20;
/// Segments that may be lent at a time, each a descriptor of the sender: more go for good, as sealed memory does.
const MOST_LENT: usize = 64;
/// Bytes kept for later messages, and for how long.
const MOST_KEPT: usize = 256 << 20;
const KEPT_FOR: Duration = Duration::from_secs(10);

/// Memory of this process that others map, too.
#[derive(Debug)]
struct Segment {
    fd: OwnedFd,
    address: NonNull<c_void>,
    room: NonZeroUsize,
    /// Bytes from its beginning whose pages are mapped here.
    mapped: usize,
    /// The process that has it mapped: its children have not.
    pid: u32,
}

// SAFETY: the mapping is plain memory that this value alone writes to; it has no tie to a thread.
unsafe impl Send for Segment {}
// SAFETY: as above; shared access only reads the descriptor's number.
unsafe impl Sync for Segment {}

impl Drop for Segment {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            // SAFETY: `address` and `room` are those of the mmap in `new`, and nothing points there any more.
            let _ = unsafe { munmap(self.address, self.room.get()) };
        }
    }
}

impl Segment {
    /// From a draft: its bytes were written, so no page of it is mapped or was zeroed.
    fn new(draft: Draft, len: usize) -> Result<Self> {
        let io = |error: nix::errno::Errno| Error::io(SHARE, error.into());
        // Room for a message that is a little larger, of which no page exists before it comes.
        let room =
            NonZeroUsize::new(len.next_multiple_of(len.next_power_of_two() / 8)).unwrap_or(NonZeroUsize::MIN);
        let fd = draft.into_fd();
        ftruncate(&fd, i64::try_from(room.get()).unwrap_or(i64::MAX)).map_err(io)?;
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let address = unsafe { mmap(None, room, access, MapFlags::MAP_SHARED, &fd, 0) }.map_err(io)?;
        let made = Self { fd, address, room, mapped: 0, pid: std::process::id() };
        // SAFETY: only what a fork copies is changed. A child could not know when the memory is filled again.
        unsafe { madvise(address, room.get(), MmapAdvise::MADV_DONTFORK) }.map_err(io)?;
        // This mapping can be written to, and no other one from here on: a receiver cannot change what others see.
        let seals = SealFlag::F_SEAL_SHRINK
            | SealFlag::F_SEAL_GROW
            | SealFlag::F_SEAL_FUTURE_WRITE
            | SealFlag::F_SEAL_SEAL;
        fcntl(&made.fd, FcntlArg::F_ADD_SEALS(seals)).map_err(io)?;
        Ok(made)
    }

    /// Copies a part to `offset`, where there is room for it.
    fn fill(&mut self, offset: usize, part: &[u8]) {
        let end = offset + part.len();
        let pages = if end <= self.mapped { Pages::Mapped } else { Pages::Unmapped };
        // SAFETY: the caller has found room for it, and nobody sees the segment before it is lent.
        unsafe { copy(part, self.address.as_ptr().cast::<u8>().add(offset), pages) };
        self.mapped = self.mapped.max(end);
    }
}

/// A segment that holds a message. Back in its pool when the last one who holds this has let go of it.
#[derive(Debug)]
pub(super) struct Lease {
    id: u64,
    /// Always there until it is dropped.
    segment: Option<Segment>,
    /// It may still be seen after the last one has let go.
    given_up: AtomicBool,
    pool: Weak<Pool>,
}

impl Lease {
    /// Names it among those of its sender; never 0.
    pub(super) const fn id(&self) -> u64 {
        self.id
    }

    /// Raw number of its descriptor, for the kernel.
    pub(super) fn raw(&self) -> RawFd {
        self.segment.as_ref().map_or(-1, |segment| segment.fd.as_raw_fd())
    }

    pub(super) fn fd(&self) -> Option<&OwnedFd> {
        self.segment.as_ref().map(|segment| &segment.fd)
    }

    /// It is never filled again.
    pub(super) fn give_up(&self) {
        self.given_up.store(true, Ordering::SeqCst);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(pool) = self.pool.upgrade() else { return };
        // A child has a copy of this, but not the memory, nor may it wait for a lock of its parent.
        if self.segment.as_ref().is_some_and(|segment| segment.pid != std::process::id()) {
            return;
        }
        pool.lent.fetch_sub(1, Ordering::SeqCst);
        if let Some(segment) = self.segment.take()
            && !self.given_up.load(Ordering::SeqCst)
        {
            pool.keep(segment);
        }
    }
}

#[derive(Debug, Default)]
struct Kept {
    /// The one that came back last is at the end.
    free: Vec<(Segment, Instant)>,
    /// What each connection has been lent, and how often.
    loans: HashMap<(u64, u64), (Arc<Lease>, usize)>,
}

/// The segments of one process.
#[derive(Debug, Default)]
pub(super) struct Pool {
    kept: Mutex<Kept>,
    lent: AtomicUsize,
    next: AtomicU64,
    watched: AtomicBool,
}

impl Pool {
    /// True where somebody is to call [`tidy`](Self::tidy) in time.
    pub(super) fn is_watched(&self) -> bool {
        self.watched.load(Ordering::SeqCst)
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory with `parts` at the offsets given, which end at `len`; none where too much is lent already.
    pub(super) fn fill(self: &Arc<Self>, parts: &[(usize, &[u8])], len: usize) -> Result<Option<Arc<Lease>>> {
        if self.lent.fetch_add(1, Ordering::SeqCst) >= MOST_LENT {
            self.lent.fetch_sub(1, Ordering::SeqCst);
            return Ok(None);
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        // From here on its drop counts it down.
        let mut lease =
            Lease { id, segment: None, given_up: AtomicBool::new(false), pool: Arc::downgrade(self) };
        lease.segment = Some(match self.take(len) {
            Some(mut segment) => {
                for (offset, part) in parts {
                    segment.fill(*offset, part);
                }
                segment
            }
            None => {
                let draft = Draft::new()?;
                for (offset, part) in parts {
                    draft.write(*offset, part)?;
                }
                Segment::new(draft, len)?
            }
        });
        Ok(Some(Arc::new(lease)))
    }

    /// The smallest one that is large enough, and not much too large.
    fn take(&self, len: usize) -> Option<Segment> {
        let mut kept = self.kept();
        let fits = |segment: &Segment| (len..=len.saturating_mul(4)).contains(&segment.room.get());
        let found = kept.free.iter().enumerate().filter(|(_, (segment, _))| fits(segment));
        let at = found.min_by_key(|(_, (segment, _))| segment.room).map(|(at, _)| at)?;
        Some(kept.free.remove(at).0)
    }

    fn keep(&self, segment: Segment) {
        let mut kept = self.kept();
        kept.free.push((segment, Instant::now()));
        let mut bytes: usize = kept.free.iter().map(|(segment, _)| segment.room.get()).sum();
        let mut over = Vec::new();
        while bytes > MOST_KEPT {
            let (oldest, _) = kept.free.remove(0);
            bytes -= oldest.room.get();
            over.push(oldest);
        }
        // Outside of the lock: giving memory back takes long.
        drop(kept);
        drop(over);
    }

    /// A connection is about to be sent it.
    pub(super) fn lend(&self, link: u64, lease: &Arc<Lease>) {
        let mut kept = self.kept();
        kept.loans.entry((link, lease.id)).or_insert_with(|| (Arc::clone(lease), 0)).1 += 1;
    }

    /// A connection has let go of it; not `clean` where somebody behind it may see it still.
    pub(super) fn take_back(&self, link: u64, id: u64, clean: bool) {
        let mut kept = self.kept();
        // What a peer makes up names nothing that it was lent.
        let Some((lease, times)) = kept.loans.get_mut(&(link, id)) else { return };
        if !clean {
            lease.give_up();
        }
        *times -= 1;
        let over = if *times == 0 { kept.loans.remove(&(link, id)) } else { None };
        drop(kept);
        drop(over);
    }

    /// A connection is over: its process may be there still, with all that it was lent.
    pub(super) fn lose(&self, link: u64) {
        let mut kept = self.kept();
        let lost: Vec<_> = kept.loans.extract_if(|(of, _), _| *of == link).collect();
        drop(kept);
        for (_, (lease, _)) in lost {
            lease.give_up();
        }
    }

    /// Gives back what was not needed for a while. Returns when to look again; never, where there is nothing.
    pub(super) fn tidy(&self) -> Option<Duration> {
        let mut kept = self.kept();
        let now = Instant::now();
        let old: Vec<_> = kept.free.extract_if(.., |(_, since)| now - *since >= KEPT_FOR).collect();
        let oldest = kept.free.first().map(|(_, since)| KEPT_FOR.saturating_sub(now - *since));
        drop(kept);
        drop(old);
        // Before it is looked at: what is lent from here on reminds.
        self.watched.store(false, Ordering::SeqCst);
        let lent = self.lent.load(Ordering::SeqCst) > 0;
        let next = oldest.or_else(|| lent.then_some(KEPT_FOR));
        self.watched.store(next.is_some(), Ordering::SeqCst);
        next
    }
}

/// How often this process has forked, roughly: it is another number before a fork and after it.
pub(super) fn forks() -> u64 {
    static FORKS: AtomicU64 = AtomicU64::new(0);
    static WATCH: Once = Once::new();
    extern "C" fn count() {
        FORKS.fetch_add(1, Ordering::SeqCst);
    }
    WATCH.call_once(|| {
        // Before and after: what another thread maps in between is in the child, too.
        // SAFETY: the handlers only add to a number, which is allowed wherever a fork is.
        let failed = unsafe { libc::pthread_atfork(Some(count), Some(count), None) } != 0;
        if failed {
            // No memory for two pointers: then nothing is ever filled again.
            UNWATCHED.store(true, Ordering::SeqCst);
        }
    });
    FORKS.load(Ordering::SeqCst)
}

static UNWATCHED: AtomicBool = AtomicBool::new(false);

/// True where no child can see what was mapped when [`forks`] had returned `then`.
pub(super) fn unseen_since(then: u64) -> bool {
    forks() == then && !UNWATCHED.load(Ordering::SeqCst)
}
