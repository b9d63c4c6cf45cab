//! The lines of hosts, and the streams that were asked for on them.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use crate::agent::mutant;
use crate::tunnel::message::{self, Declined, Wanted};
use crate::tunnel::splice::Ends;

/// Questions that a line holds; a host that takes none is asked for nothing more.
const MOST_QUESTIONS: usize = 1024;

/// The end of a stream, or why there is none.
type Found = Result<Ends, String>;

/// All lines of a relay.
pub(super) struct Lines {
    state: Mutex<State>,
    /// Counts up with every new line.
    changed: watch::Sender<u64>,
    next: AtomicU64,
}

#[derive(Default)]
struct State {
    by_address: HashMap<Ipv4Addr, Line>,
    /// The newest attempt that was heard of, by host: older ones have lost their place.
    attempts: HashMap<String, u32>,
    waiting: HashMap<u64, Waiting>,
}

struct Line {
    serial: u64,
    host: String,
    attempt: u32,
    questions: mpsc::Sender<Wanted>,
}

struct Waiting {
    host: String,
    attempt: u32,
    found: oneshot::Sender<Found>,
}

impl Default for Lines {
    fn default() -> Self {
        Self { state: Mutex::default(), changed: watch::channel(0).0, next: AtomicU64::new(1) }
    }
}

impl Lines {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether that attempt at a host is the newest. An older line, and what was asked on it, ends.
    pub(super) fn admit(&self, host: &str, attempt: u32) -> Result<(), String> {
        let mut state = self.lock();
        let newest = state.attempts.entry(host.to_owned()).or_insert(attempt);
        if attempt < *newest && !mutant::is_on("tunnel_old_attempts") {
            return Err(format!("attempt {newest} has the place of {host}"));
        }
        if attempt > *newest {
            *newest = attempt;
            state.by_address.retain(|_, line| line.host != host);
        }
        Ok(())
    }

    /// Serves a host's line until it ends, or a newer one is there.
    pub(super) async fn serve(&self, address: Ipv4Addr, host: &str, attempt: u32, ends: Ends) {
        let serial = self.next.fetch_add(1, Ordering::Relaxed);
        let (questions, mut asked) = mpsc::channel(MOST_QUESTIONS);
        let line = Line { serial, host: host.to_owned(), attempt, questions };
        self.lock().by_address.insert(address, line);
        self.changed.send_modify(|count| *count += 1);
        tracing::info!(host, attempt, %address, "a host's line");
        let Ends { mut read, mut write } = ends;
        let asking = async {
            while let Some(wanted) = asked.recv().await {
                if message::write(&mut write, &wanted).await.is_err() {
                    break;
                }
            }
        };
        let hearing = async {
            while let Ok(Some(Declined { id, why })) = message::read(&mut read).await {
                if let Some(found) = self.waiting(id, host, attempt) {
                    drop(found.send(Err(why)));
                }
            }
        };
        tokio::select! {
            () = asking => {}
            () = hearing => {}
        }
        let mut state = self.lock();
        if state.by_address.get(&address).is_some_and(|line| line.serial == serial) {
            state.by_address.remove(&address);
        }
        // Whatever it was asked and has not taken yet it may still take: the question has its own limit.
        drop(state);
        tracing::info!(host, attempt, "a host's line has ended");
    }

    /// Who waits for that stream, which was asked of that host.
    pub(super) fn waiting(&self, id: u64, host: &str, attempt: u32) -> Option<oneshot::Sender<Found>> {
        let mut state = self.lock();
        let asked = state.waiting.get(&id)?;
        if asked.host != host || asked.attempt != attempt {
            return None;
        }
        state.waiting.remove(&id).map(|waiting| waiting.found)
    }

    /// A stream to a port of the host with that address, which waits for its line for `patience`.
    pub(super) async fn want(&self, address: Ipv4Addr, port: u16, patience: Duration) -> Found {
        let mut changed = self.changed.subscribe();
        let asking = async {
            loop {
                changed.mark_unchanged();
                if let Some(asked) = self.ask(address, port) {
                    return asked;
                }
                if changed.changed().await.is_err() {
                    return Err("the relay ends".to_owned());
                }
            }
        };
        let asked = timeout(patience, asking).await;
        let (id, found) =
            asked.unwrap_or_else(|_| Err(format!("the host at {address} has no line to the head")))?;
        let _forget = Forget { lines: self, id };
        found.await.unwrap_or_else(|_| Err("the host has lost its place".to_owned()))
    }

    /// None where there is no line.
    fn ask(&self, address: Ipv4Addr, port: u16) -> Option<Result<(u64, oneshot::Receiver<Found>), String>> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let mut state = self.lock();
        let line = state.by_address.get(&address)?;
        match line.questions.try_send(Wanted { id, port }) {
            Err(mpsc::error::TrySendError::Closed(_)) => return None,
            Err(mpsc::error::TrySendError::Full(_)) => {
                return Some(Err(format!("host {} answers no more", line.host)));
            }
            Ok(()) => {}
        }
        let (found, finding) = oneshot::channel();
        let waiting = Waiting { host: line.host.clone(), attempt: line.attempt, found };
        state.waiting.insert(id, waiting);
        Some(Ok((id, finding)))
    }
}

/// Who asked waits no more, whichever way that came about.
struct Forget<'a> {
    lines: &'a Lines,
    id: u64,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.lines.lock().waiting.remove(&self.id);
    }
}
