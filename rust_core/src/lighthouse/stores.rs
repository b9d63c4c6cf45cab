//! A TCPStore for each quorum, outside every rank: the death of a rank takes no store with it.
//!
//! ```text
//!  registry ── take(quorum) ──▶ spare ▶ serving ── close(quorum), superseded ──▶ closed (tombstone)
//!                                 ▲ refilled                                       │ ends at once whoever
//!  keeper ── open, close ──▶ helper process (torch)                                ▼ is in it or comes late
//! ```
//!
//! A quorum never waits: it takes a store that is served already, or none, and then the members' own stores stay
//! in it, as with TorchFT. The store of a quorum that lost a member is closed at once; its port then answers the
//! greeting of TCPStore clients and hangs up, since a refused connection would be tried again until their timeout.
//! TCPStores know no authentication: they are served on loopback only, unless the configuration names an address.

mod helper;
mod tombstone;

use std::collections::VecDeque;
use std::net::{IpAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use crate::agent::mutant;
use crate::{Error, ErrorKind, Result};
pub use helper::Command;
use helper::Helper;
use tombstone::Tombstones;

/// Stores kept ready: deaths come in bursts.
const SPARES: usize = 4;
/// Quorums whose store stays open: the newest, and the one before for members that are slow to leave it.
const SERVING: usize = 2;
/// From the start of the helper to a store that serves: it imports torch.
const FIRST_LIMIT: Duration = Duration::from_secs(120);
/// For a helper that has imported torch to open or close a store (it takes 1 to 3 ms); then it is ended, and with it
/// all connections to its stores.
const LIMIT: Duration = Duration::from_secs(1);
/// Helpers that may end in a row without serving a store before no more are tried.
const MAX_FAILURES: u32 = 3;
const FIRST_DELAY: Duration = Duration::from_millis(50);
const LONGEST_DELAY: Duration = Duration::from_secs(5);
/// A helper that ran this long starts the delays anew.
const STEADY: Duration = Duration::from_secs(10);

/// The stores of a lighthouse; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Stores {
    state: Arc<Mutex<State>>,
    changed: Arc<Notify>,
}

#[derive(Debug, Default)]
struct State {
    wanted: bool,
    spare: VecDeque<Open>,
    serving: VecDeque<(i64, Open)>,
    closing: Vec<Open>,
}

/// A store that the helper serves.
#[derive(Debug)]
struct Open {
    id: u64,
    address: String,
    /// The same socket as the helper's: it outlives the store.
    listener: TcpListener,
}

impl Stores {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// There will be a quorum of several members. The helper starts with the first call: torch costs seconds.
    pub fn want(&self) {
        if !std::mem::replace(&mut self.lock().wanted, true) {
            self.changed.notify_one();
        }
    }

    /// The address of a fresh store for `quorum_id`; none where none is ready.
    pub fn take(&self, quorum_id: i64) -> Option<String> {
        let mut state = self.lock();
        let open = state.spare.pop_front();
        let address = open.as_ref().map(|open| open.address.clone());
        state.serving.extend(open.map(|open| (quorum_id, open)));
        while state.serving.len() > SERVING {
            let superseded = state.serving.pop_front();
            state.closing.extend(superseded.map(|(_, open)| open));
        }
        drop(state);
        self.changed.notify_one();
        address
    }

    /// A member of `quorum_id` is gone: whoever is in its store, or an older one, must not wait there any longer.
    pub fn close(&self, quorum_id: i64) {
        if mutant::is_on("no_store_close") {
            return;
        }
        let mut state = self.lock();
        while state.serving.front().is_some_and(|(of, _)| *of <= quorum_id) {
            let over = state.serving.pop_front();
            state.closing.extend(over.map(|(_, open)| open));
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Keeps a helper running and stores ready, for ever; gives up (logged once) where no helper comes to serve one.
    ///
    /// They are served at `chosen`, else where the lighthouse is, at `lighthouse`.
    pub async fn keep(self, lighthouse: IpAddr, chosen: Option<IpAddr>, command: Command) {
        let host = chosen.unwrap_or(lighthouse);
        if chosen.is_none() && !host.is_loopback() {
            tracing::warn!(%host, "no stores for quorums: TCPStores know no authentication, and this is not loopback");
            return;
        }
        while !self.lock().wanted {
            self.changed.notified().await;
        }
        let (mut delay, mut failures, mut next_id) = (FIRST_DELAY, 0, 0);
        let mut tombstones = Tombstones::default();
        loop {
            let began = Instant::now();
            let first_id = next_id;
            let error = match Helper::start(&command) {
                Ok(helper) => self.serve(helper, host, &mut next_id, &mut tombstones).await,
                Err(error) => error,
            };
            self.bury(&mut tombstones);
            failures = if next_id > first_id { 0 } else { failures + 1 };
            // what it says itself (no torch) another one would say again
            let one_is_all = mutant::is_on("one_helper");
            if one_is_all || failures > 0 && (error.kind() == ErrorKind::Refused || failures >= MAX_FAILURES)
            {
                tracing::warn!(%error, ?command, "no stores for quorums: each has the one of its first member");
                return tombstones.forever().await;
            }
            tracing::warn!(%error, "the stores' helper ended: it is started again");
            if began.elapsed() >= STEADY {
                delay = FIRST_DELAY;
            }
            sleep(delay).await;
            delay = (delay * 2).min(LONGEST_DELAY);
        }
    }

    /// Serves until the helper fails, and says why it did.
    async fn serve(
        &self,
        helper: Helper,
        host: IpAddr,
        next_id: &mut u64,
        tombstones: &mut Tombstones,
    ) -> Error {
        let mut limit = FIRST_LIMIT;
        loop {
            let (closing, refill) = {
                let mut state = self.lock();
                (std::mem::take(&mut state.closing), state.spare.len() < SPARES)
            };
            if !closing.is_empty() {
                for Open { id, listener, .. } in closing {
                    tombstones.add(listener);
                    if let Err(error) = within(LIMIT, helper.line.close(id)).await {
                        helper.end().await;
                        return error;
                    }
                }
            } else if refill {
                match open(&helper, host, *next_id, limit).await {
                    Ok(open) => {
                        *next_id += 1;
                        if limit == FIRST_LIMIT {
                            tracing::info!(pid = helper.pid(), "stores for quorums are ready");
                            helper.promote();
                            limit = LIMIT;
                        }
                        self.lock().spare.push_back(open);
                    }
                    Err(error) => {
                        helper.end().await;
                        return error;
                    }
                }
            } else {
                tokio::select! {
                    () = self.changed.notified() => {}
                    () = helper.line.ended() => {
                        helper.end().await;
                        return Error::new(ErrorKind::Closed, "serve stores", "the helper ended");
                    }
                }
            }
        }
    }

    /// The helper is gone, and all its stores with it.
    fn bury(&self, tombstones: &mut Tombstones) {
        let mut state = self.lock();
        state.spare.clear();
        let State { serving, closing, .. } = &mut *state;
        let over = serving.drain(..).map(|(_, open)| open).chain(closing.drain(..));
        over.for_each(|open| tombstones.add(open.listener));
    }
}

async fn open(helper: &Helper, host: IpAddr, id: u64, limit: Duration) -> Result<Open> {
    let io = |cause| Error::io("bind the port of a quorum's store", cause);
    let listener = TcpListener::bind((host, 0)).map_err(io)?;
    let address = listener.local_addr().map_err(io)?.to_string();
    within(limit, helper.line.open(id, &listener)).await?;
    Ok(Open { id, address, listener })
}

async fn within<T>(limit: Duration, work: impl Future<Output = Result<T>>) -> Result<T> {
    let late = |_| Error::new(ErrorKind::TimedOut, "serve stores", format!("no answer within {limit:?}"));
    let limit = if mutant::is_on("wait_for_helper") { Duration::MAX } else { limit };
    timeout(limit, work).await.map_err(late)?
}

#[cfg(test)]
#[path = "stores_tests.rs"]
mod tests;
