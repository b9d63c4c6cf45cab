//! Unix sockets that only this user can use.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::{Path, PathBuf};

use nix::sys::socket::{self, AddressFamily, Backlog, SockFlag, SockType, UnixAddr};
use nix::sys::stat::{Mode, fchmod};
use nix::unistd::geteuid;
use tokio::net::{UnixListener, UnixStream};

use crate::{Error, ErrorKind, Result};

/// Removes a socket's path when dropped, unless somebody else's socket is there by then.
#[derive(Debug)]
pub(super) struct BoundPath {
    path: PathBuf,
    inode: (u64, u64),
}

impl Drop for BoundPath {
    fn drop(&mut self) {
        if inode(&self.path).is_ok_and(|inode| inode == self.inode) {
            // Nothing can be done about a failure here; the next bind replaces a dead socket anyway.
            drop(fs::remove_file(&self.path));
        }
    }
}

fn inode(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|meta| (meta.dev(), meta.ino()))
}

pub(super) fn bind(path: &Path) -> Result<(UnixListener, BoundPath)> {
    let failed = |error: io::Error| {
        let kind = match error.kind() {
            io::ErrorKind::NotFound => ErrorKind::InvalidInput,
            _ => ErrorKind::Io,
        };
        Error::new(kind, "listen", format!("{}: {error}", path.display())).with_source(error)
    };
    let socket = match bind_socket(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && remove_if_dead(path).map_err(failed)? => {
            bind_socket(path)
        }
        result => result,
    };
    let socket = socket.map_err(failed)?;
    let inode = inode(path).map_err(failed)?;
    let bound = BoundPath { path: path.to_owned(), inode };
    let listener = std::os::unix::net::UnixListener::from(socket);
    listener.set_nonblocking(true).map_err(failed)?;
    Ok((UnixListener::from_std(listener).map_err(failed)?, bound))
}

fn bind_socket(path: &Path) -> io::Result<OwnedFd> {
    let socket = socket::socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    // Linux gives the path the mode of the socket: set before the bind, there is no moment in which others could dial.
    fchmod(&socket, Mode::S_IRUSR | Mode::S_IWUSR)?;
    socket::bind(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    socket::listen(&socket, Backlog::new(1024)?)?;
    Ok(socket)
}

/// Removes what a dead listener left; false where somebody listens there, or where it is no socket.
fn remove_if_dead(path: &Path) -> io::Result<bool> {
    if !fs::symlink_metadata(path)?.file_type().is_socket() {
        return Ok(false);
    }
    match StdUnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map(|()| true)
        }
        _ => Ok(false),
    }
}

pub(super) async fn dial(path: &Path) -> Result<UnixStream> {
    let stream = UnixStream::connect(path).await.map_err(|error| {
        let kind = match error.kind() {
            // Nobody is there (yet, or any more): the caller may try again.
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => ErrorKind::Closed,
            _ => ErrorKind::Io,
        };
        Error::new(kind, "dial", format!("{}: {error}", path.display())).with_source(error)
    })?;
    check_peer(&stream)?;
    Ok(stream)
}

/// Both ends check: a socket in a folder that others can write to might be anybody's.
pub(super) fn check_peer(stream: &UnixStream) -> Result<()> {
    let peer = stream.peer_cred().map_err(|error| Error::io("check the user of a peer", error))?.uid();
    let me = geteuid().as_raw();
    if peer != me {
        let what = format!("it runs as user {peer}; this process runs as user {me}");
        return Err(Error::new(ErrorKind::Refused, "trust a peer", what));
    }
    Ok(())
}
