//! What a node waits on: sockets, and an event that interrupts the wait.

use std::os::fd::AsFd;
use std::time::Duration;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::{Error, Result};

/// Key of the interrupting event.
const INTERRUPT: u64 = 0;
/// Sockets whose events are taken at a time.
const BATCH: usize = 64;

/// An epoll set.
#[derive(Debug)]
pub(super) struct Poller {
    epoll: Epoll,
    event: EventFd,
}

const WATCH: &str = "watch a connection";

impl Poller {
    pub(super) fn new() -> Result<Self> {
        let io = |error: nix::errno::Errno| Error::io(WATCH, error.into());
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(io)?;
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).map_err(io)?;
        epoll.add(&event, EpollEvent::new(EpollFlags::EPOLLIN, INTERRUPT)).map_err(io)?;
        Ok(Self { epoll, event })
    }

    /// Watches `fd` under `key`, which is not 0.
    pub(super) fn add(&self, fd: impl AsFd, key: u64) -> Result<()> {
        let event = EpollEvent::new(EpollFlags::EPOLLIN, key);
        self.epoll.add(fd, event).map_err(|error| Error::io(WATCH, error.into()))
    }

    /// Changes what `fd` is watched for.
    pub(super) fn change(&self, fd: impl AsFd, key: u64, read: bool, write: bool) {
        let mut flags = EpollFlags::empty();
        flags.set(EpollFlags::EPOLLIN, read);
        flags.set(EpollFlags::EPOLLOUT, write);
        // It fails only for a descriptor that is not watched (any more): then there is nothing to change.
        let _ = self.epoll.modify(fd, &mut EpollEvent::new(flags, key));
    }

    /// Watches `fd` again that [`change`](Self::change) or [`remove`](Self::remove) has laid aside.
    pub(super) fn watch_again(&self, fd: impl AsFd, key: u64, write: bool) {
        let mut flags = EpollFlags::EPOLLIN;
        flags.set(EpollFlags::EPOLLOUT, write);
        if self.epoll.modify(&fd, &mut EpollEvent::new(flags, key)).is_err() {
            // It was removed: the peer had hung up while nobody could take what it had said.
            let _ = self.epoll.add(&fd, EpollEvent::new(flags, key));
        }
    }

    /// Watches it no longer.
    pub(super) fn remove(&self, fd: impl AsFd) {
        let _ = self.epoll.delete(fd);
    }

    /// Ends the wait under way, or the next one.
    pub(super) fn interrupt(&self) {
        // It fails only when the counter is full, and then the wait ends anyway.
        let _ = self.event.write(1);
    }

    /// Waits and hands each event to `handle(key, readable, writable)`.
    pub(super) fn wait(&self, limit: Option<Duration>, mut handle: impl FnMut(u64, bool, bool)) {
        let mut events = [EpollEvent::empty(); BATCH];
        // Rounded up: a wait that ends early would be repeated with nothing left to wait.
        let limit = limit.map_or(EpollTimeout::NONE, |limit| {
            let ms = limit.as_micros().div_ceil(1000).min(60_000);
            EpollTimeout::from(u16::try_from(ms).unwrap_or(60_000))
        });
        let count = self.epoll.wait(&mut events, limit).unwrap_or(0);
        for event in &events[..count] {
            if event.data() == INTERRUPT {
                let _ = self.event.read();
                continue;
            }
            let flags = event.events();
            let broken = flags.intersects(EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR);
            let readable = broken || flags.contains(EpollFlags::EPOLLIN);
            handle(event.data(), readable, broken || flags.contains(EpollFlags::EPOLLOUT));
        }
    }
}
