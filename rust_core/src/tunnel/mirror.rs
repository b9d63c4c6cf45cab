//! Mirrors: listening sockets of an agent at the addresses of other hosts' ranks, for as long as a rank wants them.
//!
//! A rank says whom it is about to dial on a unix socket, one JSON object a line, and waits for the answer before it dials:
//!
//! ```text
//!  {"keep": "mesh", "reach": ["127.64.0.3:41234", …]}      what it kept under that name before, it keeps no longer
//!  {"error": null}                                          or why it cannot be; then nothing has changed
//! ```
//!
//! The end of that connection, which is that of the process, lets go of all. Streams that were made go on.

use std::collections::{BTreeMap, HashMap};
use std::net::{SocketAddr, SocketAddrV4};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::agent::Tunnel;
use crate::wire::Stream;

/// Bytes of one question.
const MAX_QUESTION: u64 = 1 << 20;
/// Names under which one rank keeps mirrors.
const MOST_NAMES: usize = 16;
/// Tries of an address, and the pause between two: the mirror that was there may just be on its way out.
const BIND_TRIES: u32 = 5;
const BIND_PAUSE: Duration = Duration::from_millis(20);
/// Pause after an accept that failed for want of descriptors or memory.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// The mirrors of one host.
#[derive(Debug)]
pub(super) struct Mirrors {
    most: usize,
    open: Mutex<HashMap<SocketAddrV4, Weak<Mirror>>>,
}

/// One of them: open while somebody holds it.
#[derive(Debug)]
pub(super) struct Mirror {
    accepting: JoinHandle<()>,
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    keep: String,
    reach: Vec<SocketAddr>,
}

#[derive(Serialize)]
struct Answer {
    error: Option<String>,
}

impl Mirrors {
    pub(super) fn new(most: usize) -> Self {
        Self { most, open: Mutex::default() }
    }

    /// The mirror of an address: one for all who want it.
    fn hold(&self, tunnel: &Tunnel, to: SocketAddrV4) -> Result<Arc<Mirror>, String> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mirror) = open.get(&to).and_then(Weak::upgrade) {
            return Ok(mirror);
        }
        open.retain(|_, mirror| mirror.strong_count() > 0);
        if open.len() >= self.most {
            return Err(format!("{} addresses of other hosts are in use", self.most));
        }
        // A process of this host may listen at that port of every address.
        let listener = std::net::TcpListener::bind(to)
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .and_then(TcpListener::from_std)
            .map_err(|error| format!("{to} cannot be had on this host: {error}"))?;
        let accepting = tokio::spawn(accept(tunnel.clone(), listener, to));
        let mirror = Arc::new(Mirror { accepting });
        open.insert(to, Arc::downgrade(&mirror));
        Ok(mirror)
    }
}

async fn accept(tunnel: Tunnel, listener: TcpListener, to: SocketAddrV4) {
    loop {
        match listener.accept().await {
            Ok((near, _)) => {
                let tunnel = tunnel.clone();
                tokio::spawn(async move { tunnel.carry(near, to).await });
            }
            Err(error) => {
                tracing::warn!(%to, %error, "cannot accept a connection");
                sleep(ACCEPT_BACKOFF).await;
            }
        }
    }
}

impl Tunnel {
    /// Answers one rank until it hangs up.
    pub(super) async fn serve_rank(&self, stream: Stream) {
        let (read, mut write) = stream.split();
        let mut read = BufReader::new(read);
        let mut kept: BTreeMap<String, Vec<Arc<Mirror>>> = BTreeMap::new();
        let mut line = Vec::new();
        loop {
            line.clear();
            match (&mut read).take(MAX_QUESTION).read_until(b'\n', &mut line).await {
                Ok(length) if length > 0 && line.ends_with(b"\n") => {}
                _ => return,
            }
            let mut answer = self.answer(&line, &mut kept);
            for _ in 1..BIND_TRIES {
                if answer.is_ok() {
                    break;
                }
                sleep(BIND_PAUSE).await;
                answer = self.answer(&line, &mut kept);
            }
            let error = answer.err();
            let Ok(mut answer) = serde_json::to_vec(&Answer { error }) else { return };
            answer.push(b'\n');
            if write.write_all(&answer).await.is_err() || write.flush().await.is_err() {
                return;
            }
        }
    }

    fn answer(&self, line: &[u8], kept: &mut BTreeMap<String, Vec<Arc<Mirror>>>) -> Result<(), String> {
        let Question { keep, reach } = serde_json::from_slice(line).map_err(|error| error.to_string())?;
        if !kept.contains_key(&keep) && kept.len() >= MOST_NAMES {
            return Err(format!("{MOST_NAMES} names are in use"));
        }
        let mut held = Vec::with_capacity(reach.len());
        for to in reach {
            // What is here needs no mirror.
            if let Some(to) = self.is_elsewhere(&to) {
                held.push(self.mirrors().hold(self, to)?);
            }
        }
        kept.insert(keep, held);
        Ok(())
    }
}
