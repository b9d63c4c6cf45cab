//! Unix sockets between a gateway and a process of its host: frames, and descriptors beside them.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use tokio::io::Interest;
use tokio::net::UnixStream;

use super::super::link::{MAX_FRAME, MOST_FDS};
use super::super::packet::{Packet, Part};
use crate::wire::{Frame, decode};
use crate::{Error, ErrorKind, Result};

/// Room for one read.
const READ: usize = 64 * 1024;
/// Until descriptors that are on their way have been taken by their receivers.
const BUSY: Duration = Duration::from_millis(1);

/// Where the lengths of a cast's targets exceed what one process would send to another.
pub(super) const MAX_OUT: u32 = MAX_FRAME + (1 << 20);

/// Something was not sent.
#[derive(Debug)]
pub(super) struct Unsent {
    /// Not a byte of it has left.
    pub nothing: bool,
    pub error: Error,
}

/// Sends one frame, with its memory. Not cancel safe.
pub(super) async fn send(
    socket: &UnixStream,
    frame: &Frame,
    memory: Option<&Arc<OwnedFd>>,
) -> Result<(), Unsent> {
    let framed = frame.check(MAX_OUT).and_then(|()| frame.whole());
    let bytes = framed.map_err(|error| Unsent { nothing: true, error })?;
    let (mut bytes, mut memory, mut nothing) = (bytes, memory, true);
    while !bytes.is_empty() {
        let fds: Vec<RawFd> = memory.iter().map(|fd| fd.as_raw_fd()).collect();
        let sent = socket.async_io(Interest::WRITABLE, || write(socket.as_raw_fd(), &bytes, &fds)).await;
        match sent {
            Ok(count) => {
                bytes.advance(count);
                (memory, nothing) = (None, false);
            }
            Err(error) if error.raw_os_error() == Some(libc::ETOOMANYREFS) => tokio::time::sleep(BUSY).await,
            Err(error) => return Err(Unsent { nothing, error: Error::io("send to a process", error) }),
        }
    }
    Ok(())
}

fn write(socket: RawFd, bytes: &Bytes, fds: &[RawFd]) -> io::Result<usize> {
    let rights = [ControlMessage::ScmRights(fds)];
    let control = if fds.is_empty() { &[][..] } else { &rights[..] };
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    Ok(sendmsg::<()>(socket, &[IoSlice::new(bytes)], control, flags, None)?)
}

/// Reads frames off such a socket.
pub(super) struct Reader {
    socket: Arc<UnixStream>,
    buffer: BytesMut,
    scratch: Box<[u8]>,
    fds: VecDeque<OwnedFd>,
}

impl Reader {
    pub(super) fn new(socket: Arc<UnixStream>) -> Self {
        Self {
            socket,
            buffer: BytesMut::new(),
            scratch: vec![0; READ].into_boxed_slice(),
            fds: VecDeque::new(),
        }
    }

    /// The next frame and what it says; none when the process has closed.
    pub(super) async fn read(&mut self) -> Result<Option<(Packet, Frame)>> {
        loop {
            if let Some(frame) = decode(&mut self.buffer, MAX_OUT)? {
                return Ok(Some((frame.message()?, frame)));
            }
            let Self { socket, buffer, scratch, fds } = self;
            let fd = socket.as_raw_fd();
            let count = socket.async_io(Interest::READABLE, || receive(fd, scratch, fds)).await;
            match count {
                Ok(0) => return Ok(None),
                Ok(count) => buffer.extend_from_slice(&scratch[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::io("read from a process", error)),
            }
            if self.fds.len() > MOST_FDS {
                return Err(Error::new(ErrorKind::Protocol, "read from a process", "too many descriptors"));
            }
        }
    }

    /// The memory that goes with a frame of `parts`.
    pub(super) fn memory(&mut self, parts: &[Part]) -> Result<Option<OwnedFd>> {
        if !parts.iter().any(|part| matches!(part, Part::Shared(..))) {
            return Ok(None);
        }
        let missing = || Error::new(ErrorKind::Protocol, "read a message", "its shared memory is missing");
        self.fds.pop_front().map(Some).ok_or_else(missing)
    }
}

fn receive(socket: RawFd, scratch: &mut [u8], fds: &mut VecDeque<OwnedFd>) -> io::Result<usize> {
    let mut space = nix::cmsg_space!([RawFd; 4]);
    let mut slices = [IoSliceMut::new(scratch)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
    let message = recvmsg::<()>(socket, &mut slices, Some(&mut space), flags)?;
    let count = message.bytes;
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(taken) = control {
            for fd in taken {
                // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
                fds.push_back(unsafe { OwnedFd::from_raw_fd(fd) });
            }
        }
    }
    Ok(count)
}
