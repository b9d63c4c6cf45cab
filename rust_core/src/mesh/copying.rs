//! Copies of large parts: by several threads, into memory whose pages are made at once.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::OnceLock;

use nix::sys::mman::{MmapAdvise, madvise};

/// Bytes that one thread copies at least: less is done before another one has started.
const EACH: usize = 8 << 20;
/// Threads at the most: a few fill the memory's bandwidth.
const MOST_THREADS: usize = 4;
const PAGE: usize = 4096;
/// Bytes whose pages are made at a time, a huge page: what was zeroed is still in the core's cache when it is copied to.
const STEP: usize = 2 << 20;
/// Fresh memory of so many bytes or more is asked for in huge pages, as numpy does it.
const HUGE_FROM: usize = 4 << 20;

/// What is known of the memory that is copied to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// All of its pages are mapped.
    Mapped,
    /// They are there, but not mapped here.
    Unmapped,
    /// It is private memory, which nobody has touched.
    Fresh,
}

/// Copies `from` to `to`.
///
/// # Safety
///
/// `to` has room for `from.len()` bytes, which do not overlap with `from` and which nobody else uses meanwhile.
pub unsafe fn copy(from: &[u8], to: *mut u8, pages: Pages) {
    if pages == Pages::Fresh && from.len() >= HUGE_FROM {
        advise(to, from.len(), MmapAdvise::MADV_HUGEPAGE);
    }
    // As a number: an address may go to other threads, a pointer may not.
    let address = to.expose_provenance();
    in_parts(from, |part, offset| {
        for (number, step) in part.chunks(STEP).enumerate() {
            let to = std::ptr::with_exposed_provenance_mut::<u8>(address + offset + number * STEP);
            if pages != Pages::Mapped && step.len() >= PAGE {
                advise(to, step.len(), MmapAdvise::MADV_POPULATE_WRITE);
            }
            // SAFETY: the caller vouches for the whole, and no two parts or steps overlap.
            unsafe { std::ptr::copy_nonoverlapping(step.as_ptr(), to, step.len()) };
        }
    });
}

/// Hands parts of `from`, and where each begins, to `work`: those of a large one to several threads at once.
pub(super) fn in_parts(from: &[u8], work: impl Fn(&[u8], usize) + Sync) {
    let threads = (from.len() / EACH).clamp(1, most_threads());
    let each = from.len().div_ceil(threads).next_multiple_of(PAGE);
    if threads == 1 {
        work(from, 0);
        return;
    }
    std::thread::scope(|scope| {
        let work = &work;
        for (number, part) in from.chunks(each).enumerate().skip(1) {
            let run = move || work(part, number * each);
            if std::thread::Builder::new().spawn_scoped(scope, run).is_err() {
                // There may be no more threads here: then it takes a little longer.
                run();
            }
        }
        work(&from[..each], 0);
    });
}

fn most_threads() -> usize {
    static FOUND: OnceLock<usize> = OnceLock::new();
    *FOUND
        .get_or_init(|| std::thread::available_parallelism().map_or(1, |cores| cores.get().min(MOST_THREADS)))
}

/// Says something of the whole pages of a range. Where the kernel does not know it, the copy only takes longer.
fn advise(at: *mut u8, len: usize, what: MmapAdvise) {
    let skipped = at.align_offset(PAGE);
    let Some(len) = len.checked_sub(skipped).map(|left| left / PAGE * PAGE).filter(|len| *len > 0) else {
        return;
    };
    let Some(at) = NonNull::new(at.wrapping_add(skipped).cast::<c_void>()) else { return };
    // SAFETY: neither advice changes what the memory holds; the range is within what the caller is to write to.
    let _ = unsafe { madvise(at, len, what) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_copied_once_whatever_the_length() {
        for len in [0, 1, PAGE - 1, PAGE + 1, EACH - 1, 2 * EACH + 12_345] {
            let from: Vec<u8> = (0..len).map(|at| (at / 7) as u8).collect();
            let mut to = vec![0_u8; len + 2];
            // SAFETY: `to` has the room behind its first byte.
            unsafe { copy(&from, to.as_mut_ptr().add(1), Pages::Fresh) };
            assert_eq!(&to[1..=len], &from[..], "{len}");
            assert_eq!((to[0], to[len + 1]), (0, 0), "nothing beside it is touched: {len}");
        }
    }
}
