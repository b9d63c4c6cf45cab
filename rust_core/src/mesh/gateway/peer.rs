//! Another gateway: who it is, how both meet, and what waits to be sent to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use super::hop::{Hop, PROTOCOL};
use super::line::{self, Dialled, PING};
use super::outbox::Outbox;
use super::socket::MAX_OUT;
use super::{CLIENT_NAME, HANDSHAKE, HOST_NAME, Inner, locked};
use crate::wire::tls::Identity;
use crate::wire::{Acceptor, Address, Frame, FrameReader, Stream};
use crate::{Error, ErrorKind, Result};

/// Of the first frame.
const MAX_HELLO: u32 = 16 * 1024;
/// A hop's own header, at the most.
const HEADER: u32 = 64 * 1024;
/// Longest path of a folder: a socket in it has to fit in 107 bytes.
const LONGEST_FOLDER: usize = 100;

const MEET: &str = "trust a gateway";

/// One TLS connection, from which no hop was read yet, or whose hops are being read.
pub(super) struct Connection {
    pub reader: FrameReader<Box<dyn AsyncRead + Send + Unpin>>,
    pub write: Box<dyn AsyncWrite + Send + Unpin>,
}

impl Connection {
    fn new(stream: Stream) -> Self {
        let (read, write) = stream.split();
        Self { reader: FrameReader::new(Box::new(read), MAX_HELLO), write: Box::new(write) }
    }

    /// Sends the first frame of this side.
    pub(super) async fn greet(&mut self, hop: &Hop) -> Result<()> {
        let io = |error| Error::io("write to a gateway", error);
        self.write.write_all(&hop.frame(Vec::new())?.head()?).await.map_err(io)?;
        self.write.flush().await.map_err(io)
    }

    async fn greeting(&mut self) -> Result<Hop> {
        let heard = timeout(HANDSHAKE, self.reader.read()).await.map_err(|_| {
            Error::new(ErrorKind::TimedOut, MEET, format!("it said nothing for {} s", HANDSHAKE.as_secs()))
        })??;
        let heard = heard.ok_or_else(|| Error::new(ErrorKind::Closed, MEET, "it closed the connection"))?;
        match heard.message()? {
            Hop::Refused { reason } => Err(Error::new(ErrorKind::Refused, MEET, reason)),
            hop @ (Hop::Hello { .. } | Hop::Killed { .. }) => Ok(hop),
            _ => Err(Error::new(ErrorKind::Protocol, MEET, "it did not begin with a hello")),
        }
    }

    fn open(self) -> Self {
        Self { reader: self.reader.with_max_frame(MAX_OUT + HEADER), ..self }
    }
}

/// What is said of a gateway beside the connection to it.
pub(super) enum Word {
    /// It goes on over another connection.
    Again(Again),
    /// It was killed.
    Killed,
}

/// Another connection in place of one that has broken.
pub(super) struct Again {
    pub connection: Connection,
    /// Numbered frames that the other side has heard of this one.
    pub heard: u64,
}

/// Another gateway, connected; or both are at it.
pub(super) struct Peer {
    folder: String,
    host: String,
    certificate: String,
    /// Names what both ends say to each other, over one connection or several.
    line: u64,
    pub(super) outbox: Outbox,
    /// Numbered frames that were heard.
    pub(super) heard: AtomicU64,
    words: mpsc::Sender<Word>,
    pub(super) ended: watch::Sender<bool>,
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer").field("folder", &self.folder).field("host", &self.host).finish_non_exhaustive()
    }
}

impl Peer {
    fn new(who: (String, String, String), line: u64) -> (Arc<Self>, mpsc::Receiver<Word>) {
        let (words, said) = mpsc::channel(1);
        let (folder, host, certificate) = who;
        let outbox = Outbox::default();
        let (heard, ended) = (AtomicU64::new(0), watch::Sender::new(false));
        (Arc::new(Self { folder, host, certificate, line, outbox, heard, words, ended }), said)
    }

    /// This gateway as its own peer: what a process of this host says to one that has the place of a lost one.
    pub(super) fn itself(inner: &Inner) -> Arc<Self> {
        let who = (inner.folder.clone(), inner.options.host.clone(), String::new());
        Self::new(who, 0).0
    }

    pub(super) fn folder(&self) -> &str {
        &self.folder
    }

    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// Names what both ends say to each other.
    pub(super) const fn line(&self) -> u64 {
        self.line
    }

    /// Name in its certificate.
    pub(super) fn certificate(&self) -> &str {
        &self.certificate
    }

    /// Queues a frame. It is dropped where the connection has ended for good, as everything under way is.
    pub(super) fn push(&self, frame: Frame) {
        self.outbox.push(frame);
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

    /// What this side says first; `resumes` where it goes on with what a broken connection carried.
    pub(super) fn hello(&self, inner: &Inner, resumes: bool) -> Hop {
        hello(inner, self.line, resumes.then(|| self.heard.load(Ordering::SeqCst)))
    }

    /// Meets the gateway that was dialled at `to`, and serves it from then on.
    pub(super) async fn dialled(inner: &Arc<Inner>, stream: Stream, to: Dialled) -> Result<Arc<Self>> {
        let certificate = stream.peer_name().unwrap_or_default().to_owned();
        let mut connection = Connection::new(stream);
        let line = rand::random();
        connection.greet(&hello(inner, line, None)).await?;
        let who = known(inner, connection.greeting().await?, certificate);
        let (who, ..) = who.map_err(|why| Error::new(ErrorKind::Refused, MEET, why))?;
        Ok(Self::begin(inner, who, line, connection, Some(to)))
    }

    /// Goes on with a gateway over another connection; returns how many frames it has heard.
    pub(super) async fn resumed(&self, inner: &Inner, stream: Stream) -> Result<Again> {
        let refused = |why: &str| Error::new(ErrorKind::Refused, MEET, why);
        let certificate = stream.peer_name().unwrap_or_default().to_owned();
        let mut connection = Connection::new(stream);
        connection.greet(&self.hello(inner, true)).await?;
        let who = known(inner, connection.greeting().await?, certificate);
        match who.map_err(|why| refused(&why))? {
            (who, line, Some(heard)) if line == self.line && who.0 == self.folder => {
                Ok(Again { connection: connection.open(), heard })
            }
            _ => Err(refused("somebody else answers")),
        }
    }

    /// Meets a gateway that has dialled this one.
    async fn accepted(inner: &Arc<Inner>, stream: Stream) -> Result<()> {
        let certificate = stream.peer_name().unwrap_or_default().to_owned();
        let mut connection = Connection::new(stream);
        let greeting = connection.greeting().await?;
        if let Hop::Killed { folder, line } = greeting {
            let peer = locked(&inner.peers).get(&folder).cloned();
            if let Some(peer) = peer.filter(|peer| peer.line == line && peer.certificate == certificate) {
                // Where it has another connection by now, it lives.
                drop(peer.words.try_send(Word::Killed));
            }
            drop(timeout(PING, connection.write.shutdown()).await);
            return Ok(());
        }
        let found = known(inner, greeting, certificate).and_then(|(who, line, heard)| {
            let Some(heard) = heard else { return Ok((who, line, None)) };
            let peer = locked(&inner.peers).get(&who.0).cloned();
            let same = peer.filter(|peer| peer.line == line && peer.certificate == who.2);
            let same = same.ok_or("it has ended here what it goes on with")?;
            Ok((who, line, Some((same, heard))))
        });
        match found {
            Ok((who, line, None)) => {
                connection.greet(&hello(inner, line, None)).await?;
                Self::begin(inner, who, line, connection, None);
                Ok(())
            }
            Ok((.., Some((peer, heard)))) => {
                // It is answered by whoever serves the peer, once nothing more is read from the broken connection. Where
                // that has ended meanwhile, or has another one already, this one is dropped.
                drop(peer.words.try_send(Word::Again(Again { connection: connection.open(), heard })));
                Ok(())
            }
            Err(reason) => {
                // Whether it hears that or not, it is refused.
                drop(connection.greet(&Hop::Refused { reason: reason.clone() }).await);
                drop(timeout(PING, connection.write.shutdown()).await);
                Err(Error::new(ErrorKind::Refused, MEET, reason))
            }
        }
    }

    fn begin(
        inner: &Arc<Inner>,
        who: (String, String, String),
        line: u64,
        connection: Connection,
        to: Option<Dialled>,
    ) -> Arc<Self> {
        let (peer, words) = Self::new(who, line);
        // Before the first hop is read: the answer to it needs to know the way.
        inner.joined(&peer);
        inner.spawn(line::serve(Arc::clone(inner), Arc::clone(&peer), connection.open(), words, to));
        peer
    }
}

fn hello(inner: &Inner, line: u64, heard: Option<u64>) -> Hop {
    Hop::Hello {
        protocol: PROTOCOL,
        version: inner.options.version.clone(),
        folder: inner.folder.clone(),
        host: inner.options.host.clone(),
        line,
        heard,
    }
}

/// Folder, name and certificate of who says hello, and what it says of the line; or why it is refused.
type Known = ((String, String, String), u64, Option<u64>);

fn known(inner: &Inner, hello: Hop, certificate: String) -> Result<Known, String> {
    let Hop::Hello { protocol, version, folder, host, line, heard } = hello else {
        return Err("it did not begin with a hello".to_owned());
    };
    if certificate != HOST_NAME && (certificate != CLIENT_NAME || inner.options.hub) {
        return Err(format!("its certificate is of {certificate:?}, which has no business here"));
    }
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
    inner.is_free(&certificate, &folder)?;
    Ok(((folder, host, certificate), line, heard))
}

/// Dials a gateway, whose certificate has to hold `name`.
pub(super) async fn dial(inner: &Arc<Inner>, address: &Address, name: &str) -> Result<Arc<Peer>> {
    let stream = crate::wire::dial(address, Some(&inner.options.identity), name).await?;
    Peer::dialled(inner, stream, Dialled { address: address.clone(), name: name.to_owned() }).await
}

/// Tells the gateway at `address` that the one of the host `folder`, which had dialled it, was killed.
pub(super) async fn report_killed(
    identity: &Identity,
    address: &Address,
    name: &str,
    folder: &str,
    line: u64,
) -> Result<()> {
    let mut connection = Connection::new(crate::wire::dial(address, Some(identity), name).await?);
    connection.greet(&Hop::Killed { folder: folder.to_owned(), line }).await?;
    // It hangs up once it has heard that.
    drop(connection.reader.read().await);
    Ok(())
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
                Peer::accepted(&meeting, incoming.authenticate().await?).await
            });
            match met.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::warn!(%error, "a stranger was refused"),
                Err(_) => tracing::warn!("a stranger took too long"),
            }
            drop(permit);
        });
    }
}
