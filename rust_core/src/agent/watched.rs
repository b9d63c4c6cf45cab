//! Descriptors whose readiness wakes the runtime.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Watches an owned descriptor.
pub fn watched(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` names the same open description until it is dropped, which only the `AsyncFd` can do.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.map_err(io::Error::from)
}
