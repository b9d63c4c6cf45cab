//! How many files may be open: the agent holds several for each rank, so it takes all that it may have.

use super::mutant;

/// Raises the limit of this process to the most that is allowed. Returns what it was before, for its children: programs
/// that use `select(2)` break where descriptors go beyond 1024.
pub fn raise() -> Option<libc::rlimit> {
    let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `before` is valid for writing.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut before) } != 0 {
        return None;
    }
    if mutant::is_on("few_files") {
        return Some(before);
    }
    let most = libc::rlimit { rlim_cur: before.rlim_max, ..before };
    // SAFETY: `most` is valid for reading.
    (unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const most) } == 0).then_some(before)
}
