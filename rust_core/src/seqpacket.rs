//! A line of messages to a process of ours, with descriptors: one `SOCK_SEQPACKET` pair, whose other end it inherits.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg, sendmsg,
    socketpair,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::agent::watched::watched;
use crate::{Error, Result};

/// Longest message that is received.
const MESSAGE_BYTES: usize = 4096;
/// Most descriptors that come with a message.
const MAX_FDS: usize = 4;

/// Our end. Dropping it is what the other end sees as the end of the file.
#[derive(Debug)]
pub struct Packets {
    socket: AsyncFd<OwnedFd>,
}

/// A message, and the descriptors that came with it.
#[derive(Debug)]
pub struct Message {
    /// What it says.
    pub text: String,
    /// In the order in which they were sent.
    pub fds: Vec<OwnedFd>,
}

impl Packets {
    /// Our end, and the one for the process. Must run inside a Tokio runtime.
    pub fn pair() -> Result<(Self, OwnedFd)> {
        let io = |errno: nix::errno::Errno| Error::io("make a socket pair", errno.into());
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).map_err(io)?;
        nix::fcntl::fcntl(&ours, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK)).map_err(io)?;
        let socket = watched(ours, Interest::READABLE | Interest::WRITABLE)
            .map_err(|cause| Error::io("make a socket pair", cause))?;
        Ok((Self { socket }, theirs))
    }

    /// Sends a message as a whole, once there is room in the other end's queue.
    pub async fn send(&self, message: &str, fds: &[BorrowedFd<'_>]) -> std::io::Result<()> {
        let fds: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let sending = self.socket.async_io(Interest::WRITABLE, |socket| {
            let rights = [ControlMessage::ScmRights(&fds)];
            let rights = if fds.is_empty() { &[][..] } else { &rights[..] };
            let parts = [IoSlice::new(message.as_bytes())];
            sendmsg::<()>(socket.as_raw_fd(), &parts, rights, MsgFlags::MSG_NOSIGNAL, None)
                .map_err(std::io::Error::from)
        });
        sending.await.map(drop)
    }

    /// The next message; none at the end. What is longer than [`MESSAGE_BYTES`] is cut.
    pub async fn receive(&self) -> std::io::Result<Option<Message>> {
        let receiving = self.socket.async_io(Interest::READABLE, |socket| {
            let mut buffer = [0; MESSAGE_BYTES];
            let mut space = nix::cmsg_space!([RawFd; MAX_FDS]);
            let mut parts = [IoSliceMut::new(&mut buffer)];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            let received = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), flags)?;
            let mut fds = Vec::new();
            for control in received.cmsgs()? {
                if let ControlMessageOwned::ScmRights(raw) = control {
                    // SAFETY: the kernel has just made these descriptors for us; nobody else knows them.
                    fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                }
            }
            let n = received.bytes;
            Ok((n > 0)
                .then(|| Message { text: String::from_utf8_lossy(&buffer[..n]).trim().to_owned(), fds }))
        });
        receiving.await
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    use super::*;

    #[tokio::test]
    async fn a_message_arrives_as_a_whole_with_its_descriptors_in_their_order() {
        let (ours, theirs) = Packets::pair().expect("a pair");
        let theirs = watched(theirs, Interest::READABLE | Interest::WRITABLE).expect("watched");
        let theirs = Packets { socket: theirs };
        let (read, write) = nix::unistd::pipe().expect("a pipe");
        ours.send("first\n", &[read.as_fd(), write.as_fd()]).await.expect("sent");
        ours.send("second", &[]).await.expect("sent");
        let mut message = theirs.receive().await.expect("received").expect("a message");
        assert_eq!((message.text.as_str(), message.fds.len()), ("first", 2));
        drop((read, write));
        let write = message.fds.pop().expect("two descriptors");
        std::fs::File::from(write).write_all(b"through").expect("written");
        let mut text = String::new();
        let read = message.fds.pop().expect("two descriptors");
        std::fs::File::from(read).read_to_string(&mut text).expect("read");
        assert_eq!(text, "through");
        assert_eq!(theirs.receive().await.expect("received").expect("a message").text, "second");
        drop(ours);
        assert!(theirs.receive().await.expect("the end").is_none());
    }
}
