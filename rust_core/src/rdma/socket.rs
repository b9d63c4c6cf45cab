//! A blocking TCP connection that waits for nothing without an end, and moves bytes from and to plain memory.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use super::memory::Segment;
use crate::{Error, ErrorKind, Result};

const MOVE: &str = "talk to a peer";

/// Not a byte for so long: the peer hangs, or its host is gone.
pub(super) const STALL: Duration = Duration::from_secs(2);

pub(super) struct Socket {
    stream: TcpStream,
    deadline: Instant,
}

impl Socket {
    pub(super) fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true).map_err(|error| Error::io(MOVE, error))?;
        let socket = Self { stream, deadline: Instant::now() };
        Ok(socket)
    }

    /// Sets the end of all that follows, and the longest wait for one byte.
    pub(super) fn until(&mut self, deadline: Instant, stall: Duration) -> Result<()> {
        self.deadline = deadline;
        let left = deadline.saturating_duration_since(Instant::now()).min(stall);
        if left.is_zero() {
            return Err(late());
        }
        let left = left.max(Duration::from_millis(1));
        self.stream
            .set_read_timeout(Some(left))
            .and_then(|()| self.stream.set_write_timeout(Some(left)))
            .map_err(|error| Error::io(MOVE, error))
    }

    /// Fills `into`.
    pub(super) fn read(&self, into: &mut [u8]) -> Result<()> {
        let segment = Segment { address: into.as_mut_ptr() as usize, length: into.len() };
        // SAFETY: the slice is ours for as long as this takes.
        unsafe { self.receive(segment) }
    }

    /// Sends all of `from`.
    pub(super) fn write(&self, from: &[u8]) -> Result<()> {
        // SAFETY: the slice lives for as long as this takes.
        unsafe { self.send(Segment { address: from.as_ptr() as usize, length: from.len() }) }
    }

    /// Fills a segment.
    ///
    /// # Safety
    /// It must be writable.
    pub(super) unsafe fn receive(&self, into: Segment) -> Result<()> {
        self.each(into, |address, length| {
            // SAFETY: as the caller promises.
            unsafe { libc::recv(self.stream.as_raw_fd(), address as *mut libc::c_void, length, 0) }
        })
    }

    /// Sends a segment.
    ///
    /// # Safety
    /// It must be readable.
    pub(super) unsafe fn send(&self, from: Segment) -> Result<()> {
        self.each(from, |address, length| {
            let flags = libc::MSG_NOSIGNAL;
            // SAFETY: as the caller promises.
            unsafe { libc::send(self.stream.as_raw_fd(), address as *const libc::c_void, length, flags) }
        })
    }

    fn each(&self, segment: Segment, mut call: impl FnMut(usize, usize) -> isize) -> Result<()> {
        let mut done = 0;
        while done < segment.length {
            match call(segment.address + done, segment.length - done) {
                0 => return Err(Error::new(ErrorKind::Closed, MOVE, "the peer hung up")),
                count if count > 0 => done += count.unsigned_abs(),
                _ => {
                    let error = io::Error::last_os_error();
                    match error.kind() {
                        io::ErrorKind::Interrupted => {}
                        io::ErrorKind::WouldBlock => {
                            let why = "the peer has not moved a byte for too long";
                            return Err(Error::new(ErrorKind::TimedOut, MOVE, why));
                        }
                        _ => return Err(Error::io(MOVE, error)),
                    }
                }
            }
            if Instant::now() > self.deadline {
                return Err(late());
            }
        }
        Ok(())
    }

    /// To be watched for the peer's end.
    pub(super) fn raw_fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    /// A second way to the same connection, to end it from another thread.
    pub(super) fn cutter(&self) -> Result<Cutter> {
        self.stream.try_clone().map(Cutter).map_err(|error| Error::io(MOVE, error))
    }
}

fn late() -> Error {
    Error::new(ErrorKind::TimedOut, MOVE, "the deadline has passed")
}

/// Ends a connection from outside.
pub(super) struct Cutter(TcpStream);

impl Cutter {
    pub(super) fn cut(&self) {
        // Where it is closed already there is nothing left to end.
        let _closed = self.0.shutdown(Shutdown::Both);
    }
}
