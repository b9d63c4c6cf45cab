//! What is registered: pieces of this process's memory, as one range of bytes.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::staging::Carrier;
use crate::gpu::GpuRuntime;
use crate::{Error, ErrorKind, Result};

pub(super) use sky_monarch_digest::Digest;

/// A contiguous piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where it begins.
    pub address: usize,
    /// Bytes.
    pub length: usize,
}

/// How others may map memory that was allocated here: a file without a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SharedFile {
    pub fd: i32,
    pub device: u64,
    pub inode: u64,
}

/// Who can follow the addresses of a range.
#[derive(Clone)]
pub(super) enum Place {
    /// This process.
    Host,
    /// A runtime of accelerators.
    Device(&'static dyn GpuRuntime),
    /// Nobody: they are counted from [`CARRIED`], and this copies what they stand for.
    Carried(Arc<dyn Carrier>),
}

/// Where the addresses of carried memory begin: no processor has addresses up there, so that one which somebody follows all
/// the same faults, in place of being something else's.
const CARRIED: usize = 1 << 62;

/// Segments in order, addressed as one range `0..length`, and what keeps them alive. A clone is of the same bytes.
#[derive(Clone)]
pub struct Memory {
    segments: Vec<Segment>,
    /// Where each segment begins in the range.
    starts: Vec<u64>,
    length: u64,
    shared: Option<SharedFile>,
    place: Place,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { segments, length, .. } = self;
        f.debug_struct("Memory").field("segments", &segments.len()).field("length", length).finish()
    }
}

impl Memory {
    /// Segments that live as long as `owner`. Empty ones are left out.
    ///
    /// [`ErrorKind::InvalidInput`] where they are longer together than can be counted, or one wraps around.
    ///
    /// # Safety
    /// Each segment must be readable, and writable where it is written to, until `owner` is dropped. Others may change
    /// the bytes meanwhile, but not as Rust values that depend on them.
    pub unsafe fn new(
        segments: impl IntoIterator<Item = Segment>,
        owner: impl Any + Send + Sync,
    ) -> Result<Self> {
        let bad = |why: &str| Error::new(ErrorKind::InvalidInput, "take memory", why);
        let (mut kept, mut starts, mut length) = (Vec::new(), Vec::new(), 0u64);
        for segment in segments {
            if segment.length == 0 {
                continue;
            }
            if segment.address == 0 || segment.address.checked_add(segment.length).is_none() {
                return Err(bad("a segment is nowhere"));
            }
            starts.push(length);
            kept.push(segment);
            length = length.checked_add(segment.length as u64).ok_or_else(|| bad("it is too long"))?;
        }
        Ok(Self { segments: kept, starts, length, shared: None, place: Place::Host, _owner: Arc::new(owner) })
    }

    /// The same of an accelerator: addresses that the host may not follow.
    ///
    /// # Safety
    /// Each segment must lie in an allocation of `runtime` until `owner` is dropped, and what its device was to do with
    /// it must be done. Some may be the host's.
    pub unsafe fn of_device(
        runtime: &'static dyn GpuRuntime,
        segments: impl IntoIterator<Item = Segment>,
        owner: impl Any + Send + Sync,
    ) -> Result<Self> {
        // SAFETY: as the caller promises; nothing here reads it by its address once `place` says what it is.
        let mut memory = unsafe { Self::new(segments, owner) }?;
        memory.place = Place::Device(runtime);
        Ok(memory)
    }

    /// `length` bytes that only `carrier` can get at.
    ///
    /// [`ErrorKind::InvalidInput`] where they cannot be counted.
    pub fn of_carrier(length: usize, carrier: Arc<dyn Carrier>) -> Result<Self> {
        // SAFETY: nothing here reads it by its address once `place` says what it is.
        let mut memory = unsafe { Self::new([Segment { address: CARRIED, length }], ()) }?;
        memory.place = Place::Carried(carrier);
        Ok(memory)
    }

    /// Where a part of carried memory begins in its range.
    pub(super) const fn offset_of(part: Segment) -> u64 {
        (part.address - CARRIED) as u64
    }

    pub(super) const fn place(&self) -> &Place {
        &self.place
    }

    /// Whether the host can follow its addresses.
    pub(super) const fn is_of_host(&self) -> bool {
        matches!(self.place, Place::Host)
    }

    pub(super) fn with_shared(mut self, shared: SharedFile) -> Self {
        self.shared = Some(shared);
        self
    }

    pub(super) const fn shared(&self) -> Option<SharedFile> {
        self.shared
    }

    /// Says that all of it is about to be written, so that memory which nobody has touched yet comes in huge pages: as much
    /// of it as the host has in such. Beyond that it would move other pages about to make some, which costs more than they
    /// save. None in a virtual machine whose own host takes them back while they are free: there it is just these for which
    /// that one has to find memory first, while small ones are used again sooner.
    pub(super) fn expect_all(&self) {
        if !self.is_of_host() || free_pages_go_back(PAGE_REPORTING) {
            return;
        }
        let runs = huge_runs(&self.segments);
        if runs.is_empty() {
            return;
        }
        for run in within(runs, free_in_huge_pages() / 2) {
            // SAFETY: advice changes no byte, nor what may be done with the pages. Where the kernel takes none, all goes on
            // as before.
            let _no_use =
                unsafe { libc::madvise(run.address as *mut libc::c_void, run.length, libc::MADV_HUGEPAGE) };
        }
    }

    /// Bytes of all segments.
    pub const fn length(&self) -> u64 {
        self.length
    }

    /// Its pieces, in order.
    pub(super) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The segments of `offset..offset + length`, `most` of them at the most; together they may then be shorter.
    ///
    /// [`ErrorKind::OutOfBounds`] where the range is not inside.
    pub fn parts(&self, offset: u64, length: u64, most: usize) -> Result<Vec<Segment>> {
        let parts = self.indexed_parts(offset, length, most)?;
        Ok(parts.into_iter().map(|(_, part)| part).collect())
    }

    /// The same, each with the index of the segment that it lies in.
    pub(super) fn indexed_parts(
        &self,
        offset: u64,
        length: u64,
        most: usize,
    ) -> Result<Vec<(usize, Segment)>> {
        let end = offset.checked_add(length).filter(|end| *end <= self.length);
        let Some(end) = end else {
            let why = format!("bytes {offset} to {offset} + {length} of {}", self.length);
            return Err(Error::new(ErrorKind::OutOfBounds, "find a range", why));
        };
        let mut at = offset;
        let mut index = self.starts.partition_point(|start| *start <= offset).saturating_sub(1);
        let mut parts = Vec::new();
        while at < end && parts.len() < most {
            let (segment, start) = (self.segments[index], self.starts[index]);
            // Both fit: they are no longer than the segment.
            let skip = (at - start) as usize;
            let take = (segment.length - skip).min((end - at) as usize);
            parts.push((index, Segment { address: segment.address + skip, length: take }));
            at += take as u64;
            index += 1;
        }
        Ok(parts)
    }
}

/// Of x86 and of most ARM kernels; elsewhere the advice is of no use, and does no harm.
const HUGE_PAGE: usize = 2 << 20;
const PAGE: usize = 4096;
/// Neighbours of one allocator lie so close.
const BESIDE: usize = 2 * PAGE;
/// Advice splits a mapping, and a process may have 65,530 of them.
const MOST_ADVISED: usize = 4096;

/// What is worth advice: runs of segments that lie beside each other, from one huge page to another.
fn huge_runs(segments: &[Segment]) -> Vec<Segment> {
    let mut sorted = segments.to_vec();
    sorted.sort_unstable_by_key(|segment| segment.address);
    let mut runs: Vec<Segment> = Vec::new();
    for segment in sorted {
        match runs.last_mut() {
            Some(run) if segment.address.saturating_sub(run.address + run.length) < BESIDE => {
                run.length = run.length.max(segment.address + segment.length - run.address);
            }
            _ => runs.push(segment),
        }
    }
    let inner = runs.iter().filter_map(|run| {
        let from = run.address.checked_next_multiple_of(HUGE_PAGE)?;
        let to = (run.address + run.length) / HUGE_PAGE * HUGE_PAGE;
        (to > from).then(|| Segment { address: from, length: to - from })
    });
    let mut inner: Vec<Segment> = inner.collect();
    inner.sort_unstable_by_key(|run| std::cmp::Reverse(run.length));
    inner.truncate(MOST_ADVISED);
    inner
}

/// The first of `runs` that are no longer together than `most`, in whole huge pages.
fn within(runs: Vec<Segment>, mut most: usize) -> impl Iterator<Item = Segment> {
    runs.into_iter().map_while(move |run| {
        let length = run.length.min(most / HUGE_PAGE * HUGE_PAGE);
        most -= length;
        (length > 0).then_some(Segment { address: run.address, length })
    })
}

/// The least block of free pages that the kernel reports to the machine below it, as its order. Where it reports none, newer
/// kernels say -1; older ones say the order of a huge page there too, and have their pages as if they did.
const PAGE_REPORTING: &str = "/sys/module/page_reporting/parameters/page_reporting_order";

/// Whether a machine below this one may have taken back the free huge pages: `file` is [`PAGE_REPORTING`].
fn free_pages_go_back(file: &str) -> bool {
    let order = std::fs::read_to_string(file).ok().and_then(|text| text.trim().parse::<u32>().ok());
    order.is_some_and(|order| PAGE.checked_shl(order).is_some_and(|size| size <= HUGE_PAGE))
}

/// Bytes of the host that are free in blocks of a huge page at the least; 0 where it does not say.
fn free_in_huge_pages() -> usize {
    std::fs::read_to_string("/proc/buddyinfo").map_or(0, |text| text.lines().map(free_huge_of_zone).sum())
}

/// Of one line, which ends with the number of free blocks of each order: 1, 2, 4 … pages. Those of the low zones are kept
/// for who needs them.
fn free_huge_of_zone(line: &str) -> usize {
    let Some((_, zone)) = line.split_once("zone") else { return 0 };
    let mut words = zone.split_whitespace();
    if words.next().is_none_or(|name| name.starts_with("DMA")) {
        return 0;
    }
    let blocks = words.map(|count| count.parse().unwrap_or(0usize));
    blocks
        .enumerate()
        .map(|(order, count)| (count, PAGE.checked_shl(order as u32).unwrap_or(0)))
        .filter(|(_, size)| *size >= HUGE_PAGE)
        .map(|(count, size)| count.saturating_mul(size))
        .sum()
}

/// Has the pages of `part`, which is about to be written, by one call in place of a fault for each.
pub(super) fn fetch_pages(part: Segment) {
    /// Shorter ones are not worth a call.
    const LEAST: usize = 64 * 1024;
    if part.length < LEAST {
        return;
    }
    let from = part.address / PAGE * PAGE;
    let length = part.address + part.length - from;
    // SAFETY: no byte changes. Where the kernel cannot (before 5.14, or a mapping of another kind), the write will.
    let _no_use = unsafe { libc::madvise(from as *mut libc::c_void, length, libc::MADV_POPULATE_WRITE) };
}

/// Bytes of `parts` together.
pub(super) fn total(parts: &[Segment]) -> u64 {
    parts.iter().map(|part| part.length as u64).sum()
}

/// The bytes of a segment, to be hashed.
///
/// # Safety
/// It must be readable for as long as the slice is used.
pub(super) unsafe fn bytes<'a>(segment: Segment) -> &'a [u8] {
    // SAFETY: as the caller promises. Another thread of the process may be writing there; then the digest is of no use,
    // and is told so by the epoch.
    unsafe { std::slice::from_raw_parts(segment.address as *const u8, segment.length) }
}

/// Digest of `parts`, in order.
///
/// # Safety
/// As [`bytes`].
pub(super) unsafe fn digest(parts: &[Segment]) -> u64 {
    let mut digest = Digest::default();
    for part in parts {
        // SAFETY: as the caller promises.
        digest.add(unsafe { bytes(*part) });
    }
    digest.value()
}

/// Cuts `parts` into pieces of at most `most` bytes, in order.
pub(super) fn cut(parts: &[Segment], most: usize) -> impl Iterator<Item = Segment> + '_ {
    parts.iter().flat_map(move |part| {
        (0..part.length.div_ceil(most)).map(move |index| Segment {
            address: part.address + index * most,
            length: most.min(part.length - index * most),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(lengths: &[usize]) -> Memory {
        let segments: Vec<Segment> = lengths
            .iter()
            .enumerate()
            .map(|(index, length)| Segment { address: 0x1000 * (index + 1), length: *length })
            .collect();
        // SAFETY: nothing here reads it.
        unsafe { Memory::new(segments, ()).expect("valid") }
    }

    #[test]
    fn huge_pages_that_a_machine_below_may_have_taken_back_are_not_asked_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("page_reporting_order");
        let path = file.to_str().expect("a path");
        assert!(!free_pages_go_back(path), "a kernel that cannot report any");
        for (text, goes_back) in [
            ("9\n", true),
            ("0\n", true),
            ("10\n", false),
            ("-1\n", false),
            ("4294967295\n", false),
            ("\n", false),
        ] {
            std::fs::write(&file, text).expect("written");
            assert_eq!(free_pages_go_back(path), goes_back, "{text:?}");
        }
    }

    #[test]
    fn a_range_is_found_across_segments() {
        let memory = memory(&[10, 0, 5, 20]);
        assert_eq!(memory.length(), 35);
        let parts = memory.parts(8, 10, 9).expect("inside");
        let found: Vec<(usize, usize)> = parts.iter().map(|part| (part.address, part.length)).collect();
        assert_eq!(found, [(0x1008, 2), (0x3000, 5), (0x4000, 3)]);
        assert_eq!(total(&memory.parts(0, 35, 2).expect("inside")), 15, "no more segments than wanted");
        assert!(memory.parts(35, 0, 9).expect("empty").is_empty());
    }

    #[test]
    fn addresses_of_carried_memory_are_nobodys() {
        const {
            assert!(
                CARRIED > 1 << 57,
                "the last one that a process can have mapped, with five levels of pages"
            )
        };
        assert_eq!(Memory::offset_of(Segment { address: CARRIED + 7, length: 1 }), 7);
        let mut byte = 0u8;
        let here = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let far = libc::iovec { iov_base: (CARRIED + (1 << 40)) as *mut libc::c_void, iov_len: 1 };
        // SAFETY: the kernel checks both.
        let read =
            unsafe { libc::process_vm_readv(libc::getpid(), &raw const here, 1, &raw const far, 1, 0) };
        assert_eq!((read, std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EFAULT)));
    }

    #[test]
    fn what_is_not_inside_is_refused() {
        let memory = memory(&[10]);
        for (offset, length) in [(0, 11), (11, 0), (10, 1), (u64::MAX, 1), (1, u64::MAX)] {
            let error = memory.parts(offset, length, 9).expect_err("outside");
            assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{offset} {length}");
        }
    }

    #[test]
    fn advice_is_given_for_whole_huge_pages_of_neighbours() {
        let segment = |address, length| Segment { address, length };
        let parts = [
            segment(5 * HUGE_PAGE, HUGE_PAGE),
            segment(HUGE_PAGE / 2, HUGE_PAGE),
            // Begins 64 bytes after the one before, and both hold one page together.
            segment(HUGE_PAGE / 2 + HUGE_PAGE + 64, HUGE_PAGE),
            segment(9 * HUGE_PAGE + 1, HUGE_PAGE),
        ];
        assert_eq!(huge_runs(&parts), [segment(HUGE_PAGE, HUGE_PAGE), segment(5 * HUGE_PAGE, HUGE_PAGE)]);
    }

    #[test]
    fn no_more_is_advised_than_there_is() {
        let run = |index: usize, pages: usize| Segment {
            address: index * 64 * HUGE_PAGE,
            length: pages * HUGE_PAGE,
        };
        let found = |most| within(vec![run(1, 5), run(2, 3)], most).collect::<Vec<_>>();
        assert_eq!(found(usize::MAX), [run(1, 5), run(2, 3)]);
        assert_eq!(found(7 * HUGE_PAGE + 1), [run(1, 5), run(2, 2)]);
        assert_eq!(found(5 * HUGE_PAGE), [run(1, 5)]);
        assert_eq!(found(HUGE_PAGE - 1), []);
    }

    #[test]
    fn free_huge_pages_are_counted_by_zone() {
        let zone = "Node 0, zone   Normal   7796  60571 151516  50531  11365   3002    438    126     17      2      3 ";
        assert_eq!(free_huge_of_zone(zone), 2 * HUGE_PAGE + 3 * 2 * HUGE_PAGE);
        assert_eq!(free_huge_of_zone(&zone.replace("Normal", "DMA32")), 0, "not for us");
        assert_eq!(free_huge_of_zone(""), 0);
    }

    #[test]
    fn pages_are_fetched_without_a_change_to_what_is_there() {
        let bytes = vec![7u8; 300_000];
        fetch_pages(Segment { address: bytes.as_ptr() as usize + 1, length: bytes.len() - 1 });
        fetch_pages(Segment { address: 1 << 20, length: 1 << 20 });
        assert!(bytes.iter().all(|byte| *byte == 7));
    }

    #[test]
    fn pieces_cover_the_parts() {
        let parts = [Segment { address: 100, length: 7 }, Segment { address: 200, length: 3 }];
        let pieces: Vec<(usize, usize)> = cut(&parts, 3).map(|piece| (piece.address, piece.length)).collect();
        assert_eq!(pieces, [(100, 3), (103, 3), (106, 1), (200, 3)]);
    }
}
