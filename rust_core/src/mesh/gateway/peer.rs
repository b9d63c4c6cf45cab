//! The connection to one other gateway: who it is, what is sent, what is heard, and when it counts as lost.

use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use super::hop::{Hop, PROTOCOL};
use super::socket::MAX_OUT;
use super::{CLIENT_NAME, HANDSHAKE, HOST_NAME, Inner};
use crate::wire::{Acceptor, Frame, FrameReader, Stream};
use crate::{Error, ErrorKind, Result};

/// Without anything else to say, somebody says so often that he is there.
const PING: Duration = Duration::from_secs(2);
/// Who is not heard of for so long is lost: a cable that was pulled tells nobody.
const SILENCE: Duration = Duration::from_secs(8);
/// Of the first frame.
const MAX_HELLO: u32 = 16 * 1024;
/// A hop's own header, at the most.
const HEADER: u32 = 64 * 1024;
/// What is written at a time, where much is waiting; a larger segment is written as it lies.
const TOGETHER: usize = 64 * 1024;
/// Longest path of a folder: a socket in it has to fit in 107 bytes.
const LONGEST_FOLDER: usize = 100;

const MEET: &str = "trust a gateway";
const ENDED: &str = "its end of the connection has ended";

/// Another gateway, connected.
#[derive(Debug)]
pub(super) struct Peer {
    folder: String,
    host: String,
    certificate: String,
    // Its bound: of each session no more waits here than its window, and what goes without one is small and rare.
    queue: mpsc::UnboundedSender<Frame>,
    ended: watch::Sender<bool>,
}

impl Peer {
    pub(super) fn folder(&self) -> &str {
        &self.folder
    }

    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// Name in its certificate.
    pub(super) fn certificate(&self) -> &str {
        &self.certificate
    }

    /// Queues a frame. It is dropped where the connection has ended, as everything under way is.
    pub(super) fn push(&self, frame: Frame) {
        drop(self.queue.send(frame));
    }

    /// Queues a hop without segments.
    pub(super) fn tell(&self, hop: &Hop) {
        if let Ok(frame) = hop.frame(Vec::new()) {
            self.push(frame);
        }
    }

    /// Ends the connection.
    pub(super) fn end(&self) {
        self.ended.send_replace(true);
    }

    /// Exchanges hellos over an authenticated stream and serves it from then on.
    pub(super) async fn meet(inner: &Arc<Inner>, stream: Stream, dialled: bool) -> Result<Arc<Self>> {
        let refused = |why: String| Error::new(ErrorKind::Refused, MEET, why);
        let certificate = stream.peer_name().unwrap_or_default().to_owned();
        let allowed = certificate == HOST_NAME || (certificate == CLIENT_NAME && !inner.options.hub);
        let (read, mut write) = stream.split();
        let mut reader = FrameReader::new(read, MAX_HELLO);
        let hello = Hop::Hello {
            protocol: PROTOCOL,
            version: inner.options.version.clone(),
            folder: inner.folder.clone(),
            host: inner.options.host.clone(),
        };
        if dialled {
            write_all(&mut write, hello.frame(Vec::new())?).await?;
        }
        let heard = timeout(HANDSHAKE, reader.read()).await.map_err(|_| {
            Error::new(ErrorKind::TimedOut, MEET, format!("it said nothing for {} s", HANDSHAKE.as_secs()))
        })??;
        let heard = heard.ok_or_else(|| Error::new(ErrorKind::Closed, MEET, "it closed the connection"))?;
        let known = match heard.message()? {
            Hop::Hello { .. } if !allowed => {
                Err(format!("its certificate is of {certificate:?}, which has no business here"))
            }
            Hop::Hello { protocol, version, folder, host } => check(inner, protocol, &version, &folder)
                .and_then(|()| inner.is_free(&certificate, &folder))
                .map(|()| (folder, host)),
            Hop::Refused { reason } => return Err(refused(reason)),
            _ => return Err(Error::new(ErrorKind::Protocol, MEET, "it did not begin with a hello")),
        };
        let (folder, host) = match known {
            Ok(known) => known,
            Err(reason) => {
                if !dialled {
                    // Whether it hears that or not, it is refused.
                    drop(
                        write_all(&mut write, Hop::Refused { reason: reason.clone() }.frame(Vec::new())?)
                            .await,
                    );
                    drop(write.shutdown().await);
                }
                return Err(refused(reason));
            }
        };
        if !dialled {
            write_all(&mut write, hello.frame(Vec::new())?).await?;
        }
        let (queue, queued) = mpsc::unbounded_channel();
        let ended = watch::Sender::new(false);
        let peer = Arc::new(Self { folder, host, certificate, queue, ended });
        // Before the first hop is read: the answer to it needs to know the way.
        inner.joined(&peer);
        inner.spawn(speak(Arc::clone(inner), Arc::clone(&peer), write, queued));
        inner.spawn(hear(Arc::clone(inner), Arc::clone(&peer), reader.with_max_frame(MAX_OUT + HEADER)));
        Ok(peer)
    }
}

fn check(inner: &Inner, protocol: u32, version: &str, folder: &str) -> Result<(), String> {
    if protocol != PROTOCOL || version != inner.options.version {
        return Err(format!(
            "one side runs sky-monarch {version} (protocol {protocol}), the other {} (protocol {PROTOCOL}): install \
             the same version on both",
            inner.options.version
        ));
    }
    if !folder.starts_with('/') || folder.len() > LONGEST_FOLDER || folder.contains('\0') {
        return Err("its folder is no path that a socket could have".to_owned());
    }
    if folder == inner.folder {
        return Err(format!("its folder is {folder}, as here: hosts are told apart by that"));
    }
    Ok(())
}

/// Waits until the connection is to end.
async fn over(peer: &Peer) {
    let mut ended = peer.ended.subscribe();
    // The sender lives as long as the peer, which is borrowed.
    drop(ended.wait_for(|ended| *ended).await);
}

async fn speak(
    inner: Arc<Inner>,
    peer: Arc<Peer>,
    mut write: impl AsyncWrite + Unpin,
    mut queued: mpsc::UnboundedReceiver<Frame>,
) {
    let speaking = async {
        loop {
            let Ok(first) = timeout(PING, queued.recv()).await else {
                write_all(&mut write, Hop::Ping.frame(Vec::new())?).await?;
                continue;
            };
            let Some(mut frame) = first else { return Ok(()) };
            let mut together = BytesMut::new();
            loop {
                together.extend_from_slice(&frame.head()?);
                for segment in &frame.segments {
                    if segment.len() < TOGETHER / 4 {
                        together.extend_from_slice(segment);
                        continue;
                    }
                    put(&mut write, &together).await?;
                    together.clear();
                    put(&mut write, segment).await?;
                }
                if together.len() >= TOGETHER {
                    break;
                }
                match queued.try_recv() {
                    Ok(next) => frame = next,
                    Err(_) => break,
                }
            }
            put(&mut write, &together).await?;
            write.flush().await.map_err(|error| Error::io("write to a gateway", error))?;
        }
    };
    let outcome: Result<()> = tokio::select! {
        outcome = speaking => outcome,
        () = over(&peer) => Ok(()),
    };
    // Best effort: the other side sees the end of the connection anyway.
    drop(timeout(PING, write.shutdown()).await);
    if let Err(error) = outcome {
        peer.end();
        inner.lose(&peer, &error.to_string());
    }
}

async fn put(write: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> Result<()> {
    write.write_all(bytes).await.map_err(|error| Error::io("write to a gateway", error))
}

async fn write_all(write: &mut (impl AsyncWrite + Unpin), frame: Frame) -> Result<()> {
    put(write, &frame.head()?).await?;
    write.flush().await.map_err(|error| Error::io("write to a gateway", error))
}

async fn hear(inner: Arc<Inner>, peer: Arc<Peer>, mut reader: FrameReader<impl AsyncRead + Unpin>) {
    let hearing = async {
        loop {
            match timeout(SILENCE, reader.read()).await {
                Err(_) => return format!("nothing was heard of it for {} s", SILENCE.as_secs()),
                // A process that is killed takes no leave, neither of TLS.
                Ok(Err(error)) if error.kind() == ErrorKind::Closed => return ENDED.to_owned(),
                Ok(Err(error)) => return error.to_string(),
                Ok(Ok(None)) => return ENDED.to_owned(),
                Ok(Ok(Some(frame))) => {
                    if let Err(error) = inner.hop(&peer, frame) {
                        return error.to_string();
                    }
                }
            }
        }
    };
    let reason = tokio::select! {
        reason = hearing => reason,
        () = over(&peer) => "the connection was ended here".to_owned(),
    };
    peer.end();
    inner.lose(&peer, &reason);
}

/// Lets hosts in that dial.
pub(super) async fn welcome(inner: Arc<Inner>, acceptor: Acceptor) {
    loop {
        let incoming = match acceptor.incoming().await {
            Ok(incoming) => incoming,
            Err(error) => {
                tracing::warn!(%error, "no host could be let in");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        // One stranger too many is hung up on.
        let Ok(permit) = Arc::clone(&inner.strangers).try_acquire_owned() else { continue };
        let meeting = Arc::clone(&inner);
        inner.spawn(async move {
            let met = timeout(2 * HANDSHAKE, async {
                Peer::meet(&meeting, incoming.authenticate().await?, false).await
            });
            match met.await {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => tracing::warn!(%error, "a stranger was refused"),
                Err(_) => tracing::warn!("a stranger took too long"),
            }
            drop(permit);
        });
    }
}
