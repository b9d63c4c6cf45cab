//! What two gateways say to each other: written, heard, taken up again where its connection breaks, and lost in the end.
//!
//! A connection that breaks while both live (a reset of a middlebox, a proxy that starts again, a half of it that nobody
//! answers) loses nothing: who has dialled dials again, each says how many frames it has heard, and what the other has
//! not heard is sent again. Who has ended in order says so (TLS has a word for that), and who is not to be reached
//! again within the limits below is lost.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::Inner;
use super::hop::Hop;
use super::peer::{Again, Connection, Peer, Word};
use crate::agent::mutant;
use crate::wire::{Address, Frame};
use crate::{Error, ErrorKind, Result};

/// Without anything else to say, somebody says so often that he is there.
pub(super) const PING: Duration = Duration::from_secs(2);
/// Who has dialled dials again after so much silence: the other may not know this connection any more.
const QUIET: Duration = Duration::from_secs(5);
/// Who is not heard of for so long is lost: a cable that was pulled tells nobody.
const SILENCE: Duration = Duration::from_secs(8);
/// Whoever was dialled waits so long for the other to dial again: the end of a connection looks alike, whether a host
/// was killed or a middlebox has cut it. A host tells the difference where something of it outlives its gateway.
const GRACE: Duration = Duration::from_secs(2);
/// Where nobody listens any more, nobody is there; but a proxy may be starting.
const NOBODY: Duration = Duration::from_millis(300);
/// Between two tries.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));
/// Of one try.
const TRY: Duration = Duration::from_secs(3);
/// What is written at a time, where much is waiting; a larger segment is written as it lies.
const TOGETHER: usize = 64 * 1024;
/// Frames, and bytes, after which is said that they were heard: the other side keeps them until then.
const SAY: (u32, usize) = (64, 256 * 1024);

pub(super) const ENDED: &str = "its end of the connection has ended";

/// Where the other gateway was dialled.
#[derive(Debug)]
pub(super) struct Dialled {
    pub address: Address,
    /// In its certificate.
    pub name: String,
}

/// How a connection has ended.
enum Over {
    /// It has broken: another one may be had.
    Broken(String),
    /// Both are through with each other. True where the other side has taken its leave.
    Lost(String, bool),
}

/// Serves a peer until it is lost.
pub(super) async fn serve(
    inner: Arc<Inner>,
    peer: Arc<Peer>,
    mut connection: Connection,
    mut words: mpsc::Receiver<Word>,
    dialled: Option<Dialled>,
) {
    let mut heard_at = Instant::now();
    let mut killed = false;
    let (reason, left) = loop {
        let quiet = match dialled {
            _ if killed => GRACE,
            Some(_) => QUIET,
            None => SILENCE,
        };
        let over = tokio::select! {
            over = converse(&inner, &peer, &mut connection, &mut heard_at, quiet) => over,
            Some(word) = words.recv() => match word {
                Word::Again(next) => match answer(&inner, &peer, next).await {
                    Ok(next) => {
                        connection = next;
                        continue;
                    }
                    Err(reason) => Over::Broken(reason),
                },
                // What it had said before is read first: its end of the connection ends by itself.
                Word::Killed => {
                    killed = true;
                    continue;
                }
            },
            () = ended(&peer) => {
                // It hears that this is meant so. Best effort: the end of the connection is seen anyway.
                drop(timeout(PING, connection.write.shutdown()).await);
                Over::Lost("the connection was ended here".to_owned(), true)
            }
        };
        let reason = match over {
            Over::Lost(reason, left) => break (reason, left),
            Over::Broken(_) if killed => break (ENDED.to_owned(), false),
            Over::Broken(reason) => reason,
        };
        tracing::debug!(host = peer.host(), reason, "a connection has broken");
        if mutant::is_on("break_is_loss") {
            break (reason, false);
        }
        let resumed = async {
            match &dialled {
                Some(to) => dial_again(&inner, &peer, to, heard_at + SILENCE, &reason).await,
                None => wait_again(&inner, &peer, &mut words).await,
            }
        };
        let resumed = tokio::select! {
            resumed = resumed => resumed,
            () = ended(&peer) => Err("the connection was ended here".to_owned()),
        };
        match resumed {
            Ok(next) => connection = next,
            Err(reason) => break (reason, false),
        }
        heard_at = Instant::now();
    };
    peer.end();
    peer.outbox.close();
    inner.lose(&peer, &reason, left);
}

/// Waits until the connection is to end.
async fn ended(peer: &Peer) {
    let mut ended = peer.ended.subscribe();
    // The sender lives as long as the peer, which is borrowed.
    drop(ended.wait_for(|ended| *ended).await);
}

/// Dials until there is a connection again, or why there will be none.
async fn dial_again(
    inner: &Arc<Inner>,
    peer: &Arc<Peer>,
    to: &Dialled,
    end: Instant,
    reason: &str,
) -> Result<Connection, String> {
    let (mut pause, longest) = PAUSE;
    let began = Instant::now();
    loop {
        let trying = async {
            let stream = crate::wire::dial(&to.address, Some(&inner.options.identity), &to.name).await?;
            peer.resumed(inner, stream).await
        };
        match timeout_at(end.min(Instant::now() + TRY), trying).await {
            Ok(Ok(Again { connection, heard })) => return resume(peer, heard).map(|()| connection),
            // It is there, and knows nothing of this any more.
            Ok(Err(error)) if matches!(error.kind(), ErrorKind::Refused | ErrorKind::Protocol) => {
                return Err(format!("{ENDED}: {}", error.message()));
            }
            Ok(Err(error)) if is_nobody(&error) && began.elapsed() > NOBODY => return Err(ENDED.to_owned()),
            _ => {}
        }
        if Instant::now() + pause > end {
            return Err(reason.to_owned());
        }
        sleep(pause).await;
        pause = longest.min(2 * pause);
    }
}

fn is_nobody(error: &Error) -> bool {
    let io = std::error::Error::source(error).and_then(|source| source.downcast_ref::<std::io::Error>());
    io.is_some_and(|io| io.kind() == std::io::ErrorKind::ConnectionRefused)
}

/// Waits to be dialled again, or for the word that nobody will.
async fn wait_again(
    inner: &Inner,
    peer: &Arc<Peer>,
    words: &mut mpsc::Receiver<Word>,
) -> Result<Connection, String> {
    let end = Instant::now() + GRACE;
    loop {
        match timeout_at(end, words.recv()).await {
            Ok(Some(Word::Again(next))) => match answer(inner, peer, next).await {
                Ok(connection) => return Ok(connection),
                Err(reason) if Instant::now() > end => return Err(reason),
                Err(_) => {}
            },
            _ => return Err(ENDED.to_owned()),
        }
    }
}

/// Goes on over the connection of who has dialled again.
async fn answer(inner: &Inner, peer: &Arc<Peer>, next: Again) -> Result<Connection, String> {
    let Again { mut connection, heard } = next;
    let greeted = timeout(GRACE, connection.greet(&peer.hello(inner, true))).await;
    match greeted {
        Ok(Ok(())) => resume(peer, heard).map(|()| connection),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("it does not take its greeting".to_owned()),
    }
}

fn resume(peer: &Peer, heard: u64) -> Result<(), String> {
    if mutant::is_on("resend_nothing") {
        return Ok(());
    }
    let known = peer.outbox.resume(heard);
    known.then_some(()).ok_or_else(|| "it has lost count of what was sent".to_owned())
}

/// Speaks and hears over one connection until that ends.
async fn converse(
    inner: &Arc<Inner>,
    peer: &Arc<Peer>,
    connection: &mut Connection,
    heard_at: &mut Instant,
    quiet: Duration,
) -> Over {
    let Connection { reader, write } = connection;
    let hearing = async {
        let (mut frames, mut bytes) = (0, 0);
        loop {
            let frame = match timeout(quiet, reader.read()).await {
                Err(_) => {
                    let words = format!("nothing was heard of it for {} s", SILENCE.as_secs());
                    return if quiet < SILENCE { Over::Broken(words) } else { Over::Lost(words, false) };
                }
                Ok(Ok(None)) => return Over::Lost(ENDED.to_owned(), true),
                Ok(Ok(Some(frame))) => frame,
                Ok(Err(error)) => {
                    let broken =
                        matches!(error.kind(), ErrorKind::Closed | ErrorKind::Io | ErrorKind::TimedOut);
                    // A process that is killed takes no leave, neither of TLS.
                    return if broken {
                        Over::Broken(ENDED.to_owned())
                    } else {
                        Over::Lost(error.to_string(), false)
                    };
                }
            };
            *heard_at = Instant::now();
            (frames, bytes) = (frames + 1, bytes + frame.wire_len());
            match inner.hop(peer, frame) {
                Ok(true) => {
                    peer.heard.fetch_add(1, Ordering::SeqCst);
                }
                Ok(false) => {}
                Err(error) => return Over::Lost(error.to_string(), false),
            }
            if frames >= SAY.0 || bytes >= SAY.1 {
                (frames, bytes) = (0, 0);
                peer.outbox.answer();
            }
        }
    };
    let speaking = async {
        match speak(peer, write).await {
            Err(error) if error.kind() == ErrorKind::TooLarge => Over::Lost(error.to_string(), false),
            Err(_) | Ok(()) => Over::Broken(ENDED.to_owned()),
        }
    };
    tokio::select! {
        over = hearing => over,
        over = speaking => over,
    }
}

async fn speak(peer: &Peer, write: &mut (impl AsyncWrite + Unpin)) -> Result<()> {
    let ping = || Hop::Ping { heard: peer.heard.load(Ordering::SeqCst) }.frame(Vec::new());
    // What was heard over a connection that has broken is said at once.
    let mut answer = true;
    loop {
        let (mut frames, asked): (Vec<Frame>, bool) = peer.outbox.take(TOGETHER);
        if answer || asked {
            frames.insert(0, ping()?);
            answer = false;
        }
        if frames.is_empty() {
            answer = timeout(PING, peer.outbox.changed()).await.is_err();
            continue;
        }
        let mut together = BytesMut::new();
        for frame in &frames {
            together.extend_from_slice(&frame.head()?);
            for segment in &frame.segments {
                if segment.len() < TOGETHER / 4 {
                    together.extend_from_slice(segment);
                    continue;
                }
                put(write, &together).await?;
                together.clear();
                put(write, segment).await?;
            }
        }
        put(write, &together).await?;
        write.flush().await.map_err(|error| Error::io("write to a gateway", error))?;
    }
}

async fn put(write: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> Result<()> {
    write.write_all(bytes).await.map_err(|error| Error::io("write to a gateway", error))
}
