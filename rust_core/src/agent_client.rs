//! The session's end of its channel to the agent: it never blocks the training loop, and it reconnects.
//!
//! What a session says is state, not a log: the latest commit, whether it is done, the pause it is in. So there is one
//! place for each, a newer value takes an older one's, and after a reconnect all of them are said again (the agent
//! may be a new one, which knows nothing).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::Rng;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::channel::{self, Channel, Credentials, Limits};
use crate::protocol::{Peer, SessionCommand, SessionReport};
use crate::wire::Address;
use crate::{Error, ErrorKind, Result};

/// Delay before a lost agent is dialled again: doubles from the first to the last, plus up to a half at random.
const RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Longest wait for one answer while reconnecting.
const RECONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// Commands that may wait for [`AgentClient::recv`].
const COMMANDS: usize = 256;

type SessionChannel = Channel<SessionReport, SessionCommand>;

/// A session's connection to its agent. Cheap calls from any thread; the work is done on the Tokio runtime.
#[derive(Debug)]
pub struct AgentClient {
    outbox: Arc<Outbox>,
    commands: tokio::sync::Mutex<mpsc::Receiver<SessionCommand>>,
    /// Set once, when the client has ended: closed here, or refused by an agent.
    ended: watch::Receiver<Option<(ErrorKind, String)>>,
}

/// The latest of each thing to say.
#[derive(Debug)]
struct Outbox {
    state: Mutex<State>,
    changed: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    committed: Said<SessionReport>,
    done: Said<u64>,
    pause: Said<(String, Instant)>,
    turns: u64,
    closing: bool,
}

/// A value, whether this connection has carried it, and when it was said among the others.
#[derive(Debug)]
struct Said<T> {
    value: Option<T>,
    fresh: bool,
    turn: u64,
}

impl<T> Default for Said<T> {
    fn default() -> Self {
        Self { value: None, fresh: false, turn: 0 }
    }
}

impl<T: Clone> Said<T> {
    fn set(&mut self, value: T, turn: u64) {
        *self = Self { value: Some(value), fresh: true, turn };
    }

    fn take_fresh(&mut self) -> Option<(u64, T)> {
        if !std::mem::take(&mut self.fresh) {
            return None;
        }
        self.value.clone().map(|value| (self.turn, value))
    }

    fn say_again(&mut self) {
        self.fresh = self.value.is_some();
    }
}

impl Outbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes what there is to say; the change gets its turn among all others.
    fn change(&self, change: impl FnOnce(&mut State, u64)) {
        let mut state = self.lock();
        state.turns += 1;
        let turn = state.turns;
        change(&mut state, turn);
        drop(state);
        self.changed.send_modify(|count| *count += 1);
    }

    /// What is to be said now, in the order in which it was said: a commit ends a pause before it, and none after it.
    fn take(&self) -> Vec<SessionReport> {
        let mut state = self.lock();
        let pause = state.pause.take_fresh().map(|(turn, (what, until))| {
            let limit_s = until.saturating_duration_since(Instant::now()).as_secs_f64();
            (turn, SessionReport::Pause { what, limit_s })
        });
        let committed = state.committed.take_fresh();
        let done = state.done.take_fresh().map(|(turn, step)| (turn, SessionReport::Done { step }));
        let mut said: Vec<_> = [pause, committed, done].into_iter().flatten().collect();
        said.sort_by_key(|(turn, _)| *turn);
        said.into_iter().map(|(_, report)| report).collect()
    }
}

impl AgentClient {
    /// Dials the agent and says who we are (`peer` is a [`Peer::Session`]), within `deadline`. An agent that is not
    /// there yet is waited for; one that refuses us is an error at once.
    ///
    /// From then on a lost connection is dialled again for as long as this value lives.
    pub async fn connect(
        address: Address,
        peer: Peer,
        credentials: Credentials,
        deadline: Duration,
    ) -> Result<Self> {
        let until = Instant::now() + deadline;
        let (mut backoff, mut met) = (Backoff::default(), None);
        let channel = loop {
            let left = until.saturating_duration_since(Instant::now());
            match dial(&address, &peer, &credentials, left).await {
                Ok(channel) => break channel,
                // The last try may be cut short: what the ones before it met says more.
                Err(error) if error.kind() == ErrorKind::TimedOut => met = met.or(Some(error)),
                Err(error) if error.kind() == ErrorKind::Closed => {
                    met = Some(error);
                    tokio::time::sleep_until((Instant::now() + backoff.next()).min(until)).await;
                }
                Err(error) => return Err(error),
            }
            if let (Some(error), true) = (&met, Instant::now() >= until) {
                let what = format!("no agent within {deadline:?}: {}", error.message());
                return Err(Error::new(ErrorKind::TimedOut, "connect", what));
            }
        };
        let outbox = Arc::new(Outbox { state: Mutex::default(), changed: watch::Sender::new(0) });
        let (received, commands) = mpsc::channel(COMMANDS);
        let (end, ended) = watch::channel(None);
        let work = Link { address, peer, credentials, outbox: Arc::clone(&outbox), received };
        tokio::spawn(async move {
            let why = work.run(channel).await;
            end.send_replace(Some((why.kind(), why.message().to_owned())));
        });
        Ok(Self { outbox, commands: tokio::sync::Mutex::new(commands), ended })
    }

    /// A step was committed. Latest wins: where the agent is slow or away, older ones are dropped.
    pub fn committed(
        &self,
        step: u64,
        quorum_id: Option<i64>,
        participants: Option<u32>,
        metrics: BTreeMap<String, f64>,
    ) -> Result<()> {
        let report = SessionReport::Committed { step, quorum_id, participants, metrics };
        self.say(|state, turn| state.committed.set(report, turn))
    }

    /// The target step is committed.
    pub fn done(&self, step: u64) -> Result<()> {
        self.say(|state, turn| state.done.set(step, turn))
    }

    /// No commit is expected for `limit`; zero ends the pause.
    pub fn pause(&self, what: &str, limit: Duration) -> Result<()> {
        let until = Instant::now().checked_add(limit).ok_or_else(|| {
            Error::new(ErrorKind::InvalidInput, "pause", format!("{limit:?} lies too far in the future"))
        })?;
        self.say(|state, turn| state.pause.set((what.to_owned(), until), turn))
    }

    fn say(&self, change: impl FnOnce(&mut State, u64)) -> Result<()> {
        if let Some((kind, why)) = self.ended.borrow().clone() {
            return Err(Error::new(kind, "report to the agent", why));
        }
        self.outbox.change(change);
        Ok(())
    }

    /// The next command; none after `limit`. While the agent is away this waits; it fails once the client has ended.
    pub async fn recv(&self, limit: Duration) -> Result<Option<SessionCommand>> {
        let receiving = async { self.commands.lock().await.recv().await };
        match tokio::time::timeout(limit, receiving).await {
            Err(_) => Ok(None),
            Ok(Some(command)) => Ok(Some(command)),
            Ok(None) => {
                let mut ended = self.ended.clone();
                // Where the sender is gone without a word, the runtime is shutting down.
                let why = ended.wait_for(Option::is_some).await.ok().and_then(|why| why.clone());
                let (kind, why) =
                    why.unwrap_or_else(|| (ErrorKind::Closed, "the client has ended".to_owned()));
                Err(Error::new(kind, "receive a command", why))
            }
        }
    }

    /// Says what is left to say, where the agent is there, and ends; `deadline` at most.
    pub async fn close(&self, deadline: Duration) {
        self.outbox.change(|state, _| state.closing = true);
        let mut ended = self.ended.clone();
        drop(tokio::time::timeout(deadline, ended.wait_for(Option::is_some)).await);
    }
}

impl Drop for AgentClient {
    fn drop(&mut self) {
        self.outbox.change(|state, _| state.closing = true);
    }
}

async fn dial(
    address: &Address,
    peer: &Peer,
    credentials: &Credentials,
    limit: Duration,
) -> Result<SessionChannel> {
    // Few places: what waits in the queue is no longer the latest.
    let limits = Limits { queue: 4, ..Limits::default() };
    channel::connect(address, peer.clone(), credentials, &limits, limit).await
}

/// The task behind an [`AgentClient`].
struct Link {
    address: Address,
    peer: Peer,
    credentials: Credentials,
    outbox: Arc<Outbox>,
    received: mpsc::Sender<SessionCommand>,
}

impl Link {
    /// Keeps the connection until the client closes or an agent refuses it; returns why.
    async fn run(self, mut channel: SessionChannel) -> Error {
        let closed = || Error::new(ErrorKind::Closed, "talk to the agent", "the client was closed");
        loop {
            if self.serve(channel).await {
                return closed();
            }
            let mut backoff = Backoff::default();
            channel = loop {
                tokio::select! {
                    () = tokio::time::sleep(backoff.next()) => {}
                    () = self.closing() => return closed(),
                }
                match dial(&self.address, &self.peer, &self.credentials, RECONNECT_DEADLINE).await {
                    Ok(channel) => break channel,
                    // A newer generation has taken our place, or the run is another one: no use in asking again.
                    Err(error) if error.kind() == ErrorKind::Refused => return error,
                    Err(error) => tracing::debug!(%error, "the agent is away"),
                }
            };
            self.outbox.change(|state, _| {
                state.committed.say_again();
                state.done.say_again();
                state.pause.say_again();
            });
        }
    }

    /// Completes when the client is closing.
    async fn closing(&self) {
        let mut changed = self.outbox.changed.subscribe();
        while !self.outbox.lock().closing {
            drop(changed.changed().await);
        }
    }

    /// Carries reports and commands until the connection is lost (false) or the client closes (true).
    async fn serve(&self, channel: SessionChannel) -> bool {
        let (sender, mut receiver) = channel.split();
        let mut changed = self.outbox.changed.subscribe();
        let say = async {
            loop {
                changed.mark_unchanged();
                let closing = self.outbox.lock().closing;
                for report in self.outbox.take() {
                    if sender.send(&report).await.is_err() {
                        return closing;
                    }
                }
                if closing {
                    sender.close("the session has ended");
                    sender.finished().await;
                    return true;
                }
                drop(changed.changed().await);
            }
        };
        let hear = async {
            while let Ok(command) = receiver.recv().await {
                // The client holds the receiver for as long as it is not closing.
                if self.received.send(command).await.is_err() {
                    break;
                }
            }
            // Not `closed`: what `say` has queued is not written by then, and whoever closes us may exit at once.
            sender.finished().await;
            self.outbox.lock().closing
        };
        tokio::select! {
            biased;
            closed = say => closed,
            closed = hear => closed,
        }
    }
}

/// Doubling delays with jitter, so that the ranks of a host do not all dial at once.
#[derive(Debug)]
struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Self(RETRY.0)
    }
}

impl Backoff {
    fn next(&mut self) -> Duration {
        let delay = self.0;
        self.0 = (delay * 2).min(RETRY.1);
        delay.mul_f64(1.0 + rand::rng().random_range(0.0..0.5))
    }
}
