//! Processes of this host that have something to say to another one.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nix::unistd::geteuid;
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

use super::super::far::GATEWAY;
use super::super::link::check_hello;
use super::super::packet::Packet;
use super::hop::What;
use super::session::{Inlet, MOST_SESSIONS, Session};
use super::socket::{self, Reader};
use super::{HANDSHAKE, Inner, locked, memory, spread};
use crate::wire::Frame;
use crate::{Error, ErrorKind, Result};

/// Longest wait for a process to take the reason why it is hung up on.
const FAREWELL: Duration = Duration::from_secs(1);

fn path(inner: &Inner) -> PathBuf {
    inner.options.folder.join(GATEWAY)
}

/// Listens in the folder of this host.
pub(super) async fn serve(inner: &Arc<Inner>) -> Result<()> {
    let io = |error: std::io::Error| Error::io("listen for processes of this host", error);
    let listener = UnixListener::bind(path(inner)).map_err(io)?;
    std::fs::set_permissions(path(inner), std::fs::Permissions::from_mode(0o600)).map_err(io)?;
    let accepting = Arc::clone(inner);
    inner.spawn(async move {
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let known = stream.peer_cred().is_ok_and(|peer| peer.uid() == geteuid().as_raw());
            if known && locked(&accepting.sessions).len() < MOST_SESSIONS {
                accepting.spawn(attend(Arc::clone(&accepting), stream));
            }
        }
    });
    Ok(())
}

/// Removes the socket.
pub(super) fn remove(inner: &Inner) {
    // The whole folder may be gone already.
    drop(std::fs::remove_file(path(inner)));
}

async fn attend(inner: Arc<Inner>, stream: UnixStream) {
    let stream = Arc::new(stream);
    let mut reader = Reader::new(Arc::clone(&stream));
    let begun = timeout(HANDSHAKE, begin(&inner, &mut reader)).await;
    let folder = match begun {
        Ok(Ok(folder)) => folder,
        Ok(Err(error)) => return tracing::debug!(%error, "a process was refused"),
        Err(_) => return,
    };
    if inner.places.is_taken(&folder) {
        return spread::serve(&inner, folder, reader, stream).await;
    }
    let reason = match inner.way(folder).await {
        Ok((peer, folder)) => {
            let (session, mut inlet) = Session::new(&inner, &peer, folder, rand::random());
            session.tell(What::Open);
            let outwards = outwards(&session, &mut reader);
            let reason = tokio::select! {
                reason = outwards => reason,
                reason = inwards(&session, &mut inlet, &stream) => reason,
            };
            inner.forget(&session);
            match session.reason() {
                Some(reason) => reason,
                None => return session.close(&reason),
            }
        }
        Err(error) => error.message().to_owned(),
    };
    if let Ok(frame) = Frame::from_message(&Packet::Over { reason }) {
        // Whether it reads that or not, the connection ends.
        drop(timeout(FAREWELL, socket::send(&stream, &frame, None)).await);
    }
}

async fn begin(inner: &Inner, reader: &mut Reader) -> Result<String> {
    const BEGIN: &str = "let a process in";
    let closed = || Error::new(ErrorKind::Closed, BEGIN, "it closed the connection");
    let (hello, _) = reader.read().await?.ok_or_else(closed)?;
    // Descriptors may have come with it already: they belong to a message right behind it.
    check_hello(&hello, &inner.options.token)?;
    match reader.read().await?.ok_or_else(closed)? {
        (Packet::Far { folder }, _) => Ok(folder),
        _ => Err(Error::new(ErrorKind::Protocol, BEGIN, "it names no host")),
    }
}

/// Passes on what comes for the process; returns why nothing more does.
async fn inwards(session: &Session, inlet: &mut Inlet, stream: &UnixStream) -> String {
    loop {
        let arrived = match inlet.recv(session).await {
            Ok(arrived) => arrived,
            Err(reason) => return reason,
        };
        if let Err(unsent) = socket::send(stream, &arrived.frame, arrived.memory.as_ref()).await {
            return unsent.error.to_string();
        }
        session.credit(arrived.cost);
    }
}

/// Passes on what the process sends; returns why it does no more.
async fn outwards(session: &Session, reader: &mut Reader) -> String {
    loop {
        let passed = async {
            let Some((packet, frame)) = reader.read().await? else { return Ok(false) };
            let memory = match packet {
                Packet::Cast { parts, .. } => {
                    reader.memory(&parts)?.as_ref().map(memory::view).transpose()?
                }
                Packet::Cancel { .. } => None,
                _ => return Err(Error::new(ErrorKind::Protocol, "read a message", "not for a gateway")),
            };
            session.send(frame, memory).await.map(|()| true)
        };
        match passed.await {
            Ok(true) => {}
            Ok(false) => return "the process closed the connection".to_owned(),
            Err(error) => return error.to_string(),
        }
    }
}
