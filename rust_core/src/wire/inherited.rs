//! Listening sockets that whoever started this process has passed to it: they stay open with the agent while the process is
//! down, so that nobody is refused and a port is never lost.

use std::net::TcpListener;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::socket::{getsockopt, sockopt};

use crate::{Error, ErrorKind, Result};

/// Environment variable with the number of the (first) inherited listening socket.
pub const LISTEN_FD_ENV: &str = "SKY_MONARCH_LISTEN_FD";

/// Environment variable with the count of the inherited sockets, whose numbers follow each other; one where it is absent.
pub const LISTEN_FDS_ENV: &str = "SKY_MONARCH_LISTEN_FDS";

const OPERATION: &str = "take over a listening socket";

/// Takes over the listening TCP socket with this number. An error leaves what is there as it was.
pub fn listener(fd: RawFd) -> Result<TcpListener> {
    let invalid =
        |why: &str| Error::new(ErrorKind::InvalidInput, OPERATION, format!("descriptor {fd}: {why}"));
    if fd <= 2 {
        return Err(invalid("no descriptor above 2"));
    }
    // SAFETY: only queries the number; a closed descriptor answers EBADF.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } == -1 {
        return Err(invalid("not open"));
    }
    // SAFETY: the descriptor is open, and it was passed for us to own: nothing else in this process uses it.
    let owned = unsafe { OwnedFd::from_raw_fd(fd) };
    if !getsockopt(&owned, sockopt::AcceptConn).unwrap_or(false) {
        // Not ours after all: left as it was.
        std::mem::forget(owned);
        return Err(invalid("no listening socket"));
    }
    let listener = TcpListener::from(owned);
    if listener.local_addr().is_err() {
        std::mem::forget(listener);
        return Err(invalid("it listens, but not on TCP"));
    }
    fcntl(&listener, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))
        .map_err(|errno| Error::io(OPERATION, errno.into()))?;
    listener.set_nonblocking(true).map_err(|error| Error::io(OPERATION, error))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, IntoRawFd};

    use super::*;

    #[test]
    fn a_listening_tcp_socket_is_taken_over_as_it_is() {
        let bound = TcpListener::bind("127.0.0.1:0").expect("bound");
        let address = bound.local_addr().expect("address");
        let taken = listener(bound.into_raw_fd()).expect("taken");
        assert_eq!(taken.local_addr().expect("address"), address);
        assert_eq!(fcntl(&taken, FcntlArg::F_GETFD).expect("flags") & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
    }

    #[test]
    fn whatever_else_is_refused_and_left_open() {
        let folder = tempfile::tempdir().expect("folder");
        let file = tempfile::tempfile().expect("file");
        let unix = std::os::unix::net::UnixListener::bind(folder.path().join("s")).expect("bound");
        for (fd, words) in [
            (file.as_raw_fd(), "no listening socket"),
            (unix.as_raw_fd(), "not on TCP"),
            (2, "above 2"),
            (-1, "above 2"),
            (987_654, "not open"),
        ] {
            let error = listener(fd).expect_err(words);
            assert!(error.kind() == ErrorKind::InvalidInput && error.to_string().contains(words), "{error}");
        }
        file.metadata().expect("still open");
        unix.local_addr().expect("still open");
    }
}
