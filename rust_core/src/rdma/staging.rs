//! Memory of the host that stands in for memory that the host may not follow, piece by piece: few buffers, which are used
//! again and again.

use std::any::Any;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::memory::{self, Memory, Place, Segment};
use super::registry::Purpose;
use crate::gpu::{self, GpuRuntime, MemoryKind, Platform, PointerKind, Stream};
use crate::{Error, ErrorKind, Result};

/// Bytes of a buffer: what is staged at a time.
pub(super) const MOST: u64 = 4 << 20;
/// Buffers of a pool: 32 MiB together.
const BUFFERS: usize = 8;

const STAGE: &str = "stage memory of a device";

/// A device that does not copy that in this time hangs. Not the deadline of a peer: a wait that is given up costs the
/// process its devices.
const COPY: Duration = Duration::from_secs(30);

/// Copies bytes that no runtime of [`crate::gpu`] can get at, but the framework whose they are. Every call returns when it
/// is done; any thread may make it.
pub trait Carrier: Send + Sync {
    /// Memory of the host, `bytes` long, of the kind that copies best.
    ///
    /// # Errors
    /// [`ErrorKind::Device`] where there is none.
    fn room(&self, bytes: usize) -> Result<Room>;

    /// Fills `into`, which lies in a room, with what begins at `offset` of the range.
    ///
    /// # Errors
    /// [`ErrorKind::Device`]: what `into` holds is undefined then.
    fn fetch(&self, offset: u64, into: Segment) -> Result<()>;

    /// The other way.
    ///
    /// # Errors
    /// [`ErrorKind::Device`]: what the range holds is undefined then.
    fn store(&self, offset: u64, from: Segment) -> Result<()>;
}

/// Memory of the host that a [`Carrier`] gave.
pub struct Room {
    /// Where it begins.
    pub address: usize,
    /// Keeps it.
    pub owner: Box<dyn Any + Send + Sync>,
}

/// Memory of the host that is used again and again: to pin memory takes longer than to copy it.
struct Buffer {
    segment: Segment,
    kept: Kept,
}

/// What keeps it.
enum Kept {
    Pinned { platform: Platform, _memory: gpu::Memory },
    Plain { _memory: Vec<u8> },
    Carried { _room: Room },
}

impl Buffer {
    fn new(place: &Place) -> Result<Option<Self>> {
        let length = MOST as usize;
        Ok(match place {
            Place::Host => None,
            Place::Device(runtime) => {
                let (address, kept) = match gpu::Memory::new(*runtime, MemoryKind::Pinned, length) {
                    Ok(memory) => {
                        let address = memory.address() as usize;
                        (address, Kept::Pinned { platform: runtime.platform(), _memory: memory })
                    }
                    Err(error) => {
                        tracing::warn!(%error, "copies of a device go through memory that is not pinned");
                        let memory = vec![0u8; length];
                        (memory.as_ptr() as usize, Kept::Plain { _memory: memory })
                    }
                };
                Some(Self { segment: Segment { address, length }, kept })
            }
            Place::Carried(carrier) => {
                let room = carrier.room(length)?;
                let segment = Segment { address: room.address, length };
                Some(Self { segment, kept: Kept::Carried { _room: room } })
            }
        })
    }

    /// Whoever made a room: it is the host's.
    fn serves(&self, place: &Place) -> bool {
        match (&self.kept, place) {
            (Kept::Pinned { platform, .. }, Place::Device(runtime)) => *platform == runtime.platform(),
            (Kept::Plain { .. }, Place::Device(_)) | (Kept::Carried { .. }, Place::Carried(_)) => true,
            _ => false,
        }
    }
}

/// The buffers of one direction, made as they are needed: [`BUFFERS`] of [`MOST`] bytes. A domain has one pool for what it
/// gives and one for what it takes. Were it one, two that read from each other could wait for each other: all buffers
/// hold what is to come, and none is left for what is to go.
#[derive(Default)]
pub(super) struct Pool {
    state: Mutex<Pooled>,
    given_back: Condvar,
}

#[derive(Default)]
struct Pooled {
    idle: Vec<Buffer>,
    /// With those in use, and those that are lost.
    made: usize,
    lost: usize,
    /// Of runtimes that nobody is using, each with its device.
    streams: Vec<(Platform, u32, Stream)>,
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Pooled> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer for `place`; none for memory of the host.
    ///
    /// [`ErrorKind::TimedOut`] where none is free until `until`, [`ErrorKind::Device`] where none ever will be.
    fn take(&self, place: &Place, until: Instant) -> Result<Option<Buffer>> {
        let mut state = self.lock();
        loop {
            if let Some(found) = state.idle.iter().position(|idle| idle.serves(place)) {
                return Ok(Some(state.idle.swap_remove(found)));
            }
            // One for others makes room.
            let other = if state.made < BUFFERS { None } else { state.idle.pop() };
            if state.made < BUFFERS || other.is_some() {
                state.made += usize::from(other.is_none());
                drop(state);
                drop(other);
                let made = Buffer::new(place);
                if !matches!(made, Ok(Some(_))) {
                    self.lock().made -= 1;
                    self.given_back.notify_one();
                }
                return made;
            }
            if state.lost == BUFFERS {
                let why = format!("all {BUFFERS} buffers are lost to copies that failed");
                return Err(Error::new(ErrorKind::Device, STAGE, why));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let why = format!("all {BUFFERS} buffers are in use");
                return Err(Error::new(ErrorKind::TimedOut, STAGE, why));
            }
            state = self.given_back.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn give_back(&self, buffer: Buffer) {
        self.lock().idle.push(buffer);
        self.given_back.notify_one();
    }

    /// What a device may still be using is used for nothing else, ever.
    fn lose(&self, buffer: Buffer) {
        std::mem::forget(buffer);
        self.lock().lost += 1;
        self.given_back.notify_all();
    }

    /// A stream of the device of `ordinal` that nobody else puts something on.
    fn stream(&self, runtime: &'static dyn GpuRuntime, ordinal: u32) -> Result<Stream> {
        let mut state = self.lock();
        let same = |one: &(Platform, u32, Stream)| (one.0, one.1) == (runtime.platform(), ordinal);
        if let Some(found) = state.streams.iter().position(same) {
            return Ok(state.streams.swap_remove(found).2);
        }
        drop(state);
        Ok(Stream::new(runtime, ordinal)?)
    }
}

/// As long as the parts that it stands in for.
pub(super) struct Staging<'a> {
    pool: &'a Pool,
    place: Place,
    parts: Vec<Segment>,
    length: usize,
    /// Until it is given back.
    buffer: Option<Buffer>,
    address: usize,
}

impl<'a> Staging<'a> {
    /// For `parts` of `memory`, with a buffer of `pool`; none where they are the host's, and need none.
    ///
    /// [`ErrorKind::TimedOut`] where all buffers are in use until `until`.
    pub(super) fn of(
        pool: &'a Pool,
        memory: &Memory,
        parts: &[Segment],
        until: Instant,
    ) -> Result<Option<Self>> {
        if memory.is_of_host() || parts.is_empty() {
            return Ok(None);
        }
        let length = memory::total(parts);
        if length > MOST {
            let why = format!("{length} bytes at a time, where {MOST} can be");
            return Err(Error::new(ErrorKind::TooLarge, STAGE, why));
        }
        let Some(buffer) = pool.take(memory.place(), until)? else { return Ok(None) };
        let (address, place) = (buffer.segment.address, memory.place().clone());
        Ok(Some(Self {
            pool,
            place,
            parts: parts.to_vec(),
            length: length as usize,
            buffer: Some(buffer),
            address,
        }))
    }

    /// What stands in for them.
    pub(super) const fn segment(&self) -> Segment {
        Segment { address: self.address, length: self.length }
    }

    /// From the device.
    pub(super) fn fill(&mut self) -> Result<()> {
        self.copy(true)
    }

    /// To the device.
    pub(super) fn drain(&mut self) -> Result<()> {
        self.copy(false)
    }

    fn copy(&mut self, to_host: bool) -> Result<()> {
        let copied = match &self.place {
            Place::Host => Ok(()),
            Place::Carried(carrier) => self.carry(&**carrier, to_host),
            Place::Device(runtime) => self.copy_by(*runtime, to_host),
        };
        if copied.is_err()
            && let Some(buffer) = self.buffer.take()
        {
            self.pool.lose(buffer);
        }
        copied
    }

    /// Each part with what stands in for it.
    fn pairs(&self) -> impl Iterator<Item = (Segment, Segment)> {
        self.parts.iter().scan(self.address, |here, part| {
            let beside = Segment { address: *here, length: part.length };
            *here += part.length;
            Some((*part, beside))
        })
    }

    fn carry(&self, carrier: &dyn Carrier, to_host: bool) -> Result<()> {
        for (part, beside) in self.pairs() {
            let offset = Memory::offset_of(part);
            if to_host { carrier.fetch(offset, beside)? } else { carrier.store(offset, beside)? }
        }
        Ok(())
    }

    fn copy_by(&self, runtime: &'static dyn GpuRuntime, to_host: bool) -> Result<()> {
        let ordinal = self.parts.iter().find_map(|part| runtime.pointer(part.address as u64).ok()?.ordinal);
        let ordinal = ordinal.unwrap_or(0);
        let stream = self.pool.stream(runtime, ordinal)?;
        let queued = self.pairs().try_for_each(|(part, beside)| {
            let (to, from) = if to_host { (beside, part) } else { (part, beside) };
            // SAFETY: both are valid until the wait below ends; where it is given up, nothing of a device is freed any more.
            unsafe { copy(runtime, &stream, to, from, part) }
        });
        // Also where one could not be queued: those before it are under way.
        stream.wait(COPY)?;
        queued?;
        self.pool.lock().streams.push((runtime.platform(), ordinal, stream));
        Ok(())
    }
}

impl Drop for Staging<'_> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pool.give_back(buffer);
        }
    }
}

/// Puts a copy on the stream. Of a state that lies on a device some is the host's all the same: that is copied here.
///
/// # Safety
/// `to` and `from` must be valid until the stream is through with them; `part` is the one of them that is not pinned.
unsafe fn copy(
    runtime: &dyn GpuRuntime,
    stream: &Stream,
    to: Segment,
    from: Segment,
    part: Segment,
) -> Result<()> {
    if runtime.pointer(part.address as u64)?.kind == PointerKind::Host {
        // SAFETY: both are the host's; as the caller promises.
        unsafe { std::ptr::copy(from.address as *const u8, to.address as *mut u8, part.length) };
        return Ok(());
    }
    // SAFETY: as the caller promises.
    unsafe { runtime.copy(to.address as u64, from.address as u64, part.length, stream.handle()) }?;
    Ok(())
}

/// Shows `each` all of `parts`, in order: as they lie, or in pieces what stands in for them, in a buffer of `pool` that is
/// had until `until`; what it has written there is then written to them.
pub(super) fn through(
    pool: &Pool,
    memory: &Memory,
    parts: Vec<Segment>,
    purpose: Purpose,
    until: Instant,
    mut each: impl FnMut(&[Segment]) -> Result<()>,
) -> Result<()> {
    for run in runs(memory, parts) {
        let Some(mut staged) = Staging::of(pool, memory, &run, until)? else {
            each(&run)?;
            continue;
        };
        if purpose == Purpose::Read {
            staged.fill()?;
        }
        each(&[staged.segment()])?;
        if purpose == Purpose::Write {
            staged.drain()?;
        }
    }
    Ok(())
}

/// `parts` in runs that can be staged at a time; all of them in one where `memory` is the host's.
fn runs(memory: &Memory, parts: Vec<Segment>) -> Vec<Vec<Segment>> {
    if memory.is_of_host() || parts.is_empty() {
        return vec![parts];
    }
    let (mut runs, mut run, mut room) = (Vec::new(), Vec::new(), MOST as usize);
    for mut part in parts {
        while part.length > 0 {
            let length = part.length.min(room);
            run.push(Segment { address: part.address, length });
            part.address += length;
            part.length -= length;
            room -= length;
            if room == 0 {
                runs.push(std::mem::take(&mut run));
                room = MOST as usize;
            }
        }
    }
    if !run.is_empty() {
        runs.push(run);
    }
    runs
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Bytes that only it gets at.
    #[derive(Default)]
    struct Device {
        bytes: Mutex<Vec<u8>>,
        rooms: AtomicUsize,
    }

    impl Carrier for Device {
        fn room(&self, bytes: usize) -> Result<Room> {
            self.rooms.fetch_add(1, Ordering::Relaxed);
            let room = vec![0u8; bytes];
            Ok(Room { address: room.as_ptr() as usize, owner: Box::new(room) })
        }

        fn fetch(&self, offset: u64, into: Segment) -> Result<()> {
            let (bytes, offset) = (self.bytes.lock().expect("whole"), offset as usize);
            let from = &bytes[offset..offset + into.length];
            // SAFETY: a room, which is long enough.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into.address as *mut u8, from.len()) };
            Ok(())
        }

        fn store(&self, _: u64, _: Segment) -> Result<()> {
            Err(Error::new(ErrorKind::Device, "copy", "it hangs"))
        }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(20)
    }

    /// One of `pool` for part of a device's memory.
    fn take<'a>(pool: &'a Pool, device: &Arc<Device>) -> Result<Staging<'a>> {
        let carrier: Arc<dyn Carrier> = device.clone();
        let memory = Memory::of_carrier(100, carrier).expect("a range");
        let parts = memory.parts(10, 5, 9).expect("inside");
        Staging::of(pool, &memory, &parts, soon()).map(|made| made.expect("a device's"))
    }

    #[test]
    fn buffers_are_few_used_again_by_all_and_waited_for_with_an_end() {
        let device = Arc::new(Device { bytes: Mutex::new((0..100).collect()), ..Device::default() });
        let pool = Pool::default();
        let mut held: Vec<_> = (0..BUFFERS).map(|_| take(&pool, &device).expect("room")).collect();
        assert_eq!(take(&pool, &device).err().expect("all are in use").kind(), ErrorKind::TimedOut);
        held[0].fill().expect("a copy");
        // SAFETY: a buffer of the host.
        assert_eq!(unsafe { memory::bytes(held[0].segment()) }, [10, 11, 12, 13, 14]);
        let first = held.remove(0).segment();
        let other = Arc::new(Device::default());
        assert_eq!(take(&pool, &other).expect("given back").segment(), first, "also by another's");
        assert_eq!(other.rooms.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_buffer_that_a_device_may_still_be_using_is_never_used_again() {
        let (device, pool) = (Arc::new(Device::default()), Pool::default());
        let mut lost = take(&pool, &device).expect("room");
        lost.drain().expect_err("it hangs");
        let segment = lost.segment();
        drop(lost);
        let left: Vec<_> = (1..BUFFERS).map(|_| take(&pool, &device).expect("room")).collect();
        assert!(left.iter().all(|one| one.segment().address != segment.address));
        assert_eq!(take(&pool, &device).err().expect("one is lost").kind(), ErrorKind::TimedOut);
        for mut one in left {
            one.drain().expect_err("it hangs");
        }
        assert_eq!(take(&pool, &device).err().expect("all are lost").kind(), ErrorKind::Device);
    }
}
