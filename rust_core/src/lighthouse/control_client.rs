//! The supervisor's end of the control channel.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout_at};

use super::SERVER_NAME;
use super::protocol::{LighthouseAnswer, LighthouseCommand, LighthouseReply, LighthouseRequest};
use crate::channel::{Channel, Credentials, Limits, Receiver, Sender, connect};
use crate::protocol::Peer;
use crate::wire::Address;
use crate::{Error, ErrorKind, Result};

/// First pause before another try; doubles up to [`BACKOFF_MAX`].
const BACKOFF: Duration = Duration::from_millis(5);

/// Longest pause between two tries.
const BACKOFF_MAX: Duration = Duration::from_millis(100);

/// For one try of [`ControlClient::stay_connected`].
const DIAL_LIMIT: Duration = Duration::from_secs(5);

/// Called, from the connection's task, with what the lighthouse tells unasked: the last quorum that nobody can finish
/// any more, and why. Must not block.
pub type OnGone = Arc<dyn Fn(i64, &str) + Send + Sync>;

/// Tells the lighthouse who died, and hears from it who did. Keeps one connection, dials anew where it broke.
pub struct ControlClient {
    address: Address,
    credentials: Credentials,
    on_gone: Option<OnGone>,
    /// Locked while it is dialled, not while an answer is awaited.
    line: tokio::sync::Mutex<Option<Arc<Line>>>,
    seq: AtomicU64,
}

impl fmt::Debug for ControlClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlClient").field("address", &self.address).finish_non_exhaustive()
    }
}

/// An open connection.
struct Line {
    sender: Sender<LighthouseRequest>,
    waiting: Waiting,
}

/// Who waits for which answer.
#[derive(Clone, Default)]
struct Waiting(Arc<Mutex<HashMap<u64, oneshot::Sender<LighthouseReply>>>>);

/// Gives a place among the waiting back, answered or not.
struct Place<'a>(&'a Waiting, u64);

impl ControlClient {
    /// A client of the lighthouse at `address`; dials with the first call.
    pub fn new(address: Address, credentials: Credentials) -> Self {
        let (line, seq) = (tokio::sync::Mutex::default(), AtomicU64::new(1));
        let credentials = Credentials { server_name: SERVER_NAME.into(), ..credentials };
        Self { address, credentials, on_gone: None, line, seq }
    }

    /// The same, with an ear for what the lighthouse tells unasked. See [`Self::stay_connected`].
    #[must_use]
    pub fn with_news(mut self, on_gone: OnGone) -> Self {
        self.on_gone = Some(on_gone);
        self
    }

    /// Evicts every generation of `replica` up to `generation`, and returns the last quorum that held one of them.
    ///
    /// While the lighthouse is down (its agent restarts it), tries again until `deadline` passes:
    /// [`ErrorKind::TimedOut`], naming what stood in the way. [`ErrorKind::Refused`] ends it at once. After an error
    /// the lighthouse may have evicted or not; to repeat it is harmless.
    pub async fn evict(&self, replica: u32, generation: u64, deadline: Duration) -> Result<Option<i64>> {
        match self.request(&LighthouseCommand::Evict { replica, generation }, deadline).await? {
            LighthouseReply::Evicted { quorum_id } => Ok(quorum_id),
            other => Err(unexpected(other)),
        }
    }

    /// Lets a start wait for `replicas` groups from now on. Errors as in [`Self::evict`].
    pub async fn expect(&self, replicas: u32, deadline: Duration) -> Result<()> {
        match self.request(&LighthouseCommand::Expect { replicas }, deadline).await? {
            LighthouseReply::Expected => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    /// Everything the lighthouse knows, as the JSON text of its snapshot. Errors as in [`Self::evict`].
    pub async fn state(&self, deadline: Duration) -> Result<String> {
        match self.request(&LighthouseCommand::State, deadline).await? {
            LighthouseReply::State { json } => Ok(json),
            other => Err(unexpected(other)),
        }
    }

    /// Keeps the connection up for ever, so that news comes at once and an eviction waits for no dialling.
    pub async fn stay_connected(&self) {
        let mut backoff = BACKOFF;
        loop {
            let until = Instant::now() + DIAL_LIMIT;
            match timeout_at(until, self.line(until)).await {
                Ok(Ok(line)) => {
                    backoff = BACKOFF;
                    line.sender.closed().await;
                    let reason = line.sender.close_reason();
                    tracing::debug!(address = %self.address, reason, "the line to the lighthouse is cut");
                }
                Ok(Err(error)) => tracing::debug!(%error, "no line to the lighthouse"),
                Err(_) => tracing::debug!(address = %self.address, "the lighthouse does not answer"),
            }
            sleep(backoff).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
        }
    }

    async fn request(&self, command: &LighthouseCommand, deadline: Duration) -> Result<LighthouseReply> {
        let until = Instant::now() + deadline;
        let (mut backoff, mut last) = (BACKOFF, None::<Error>);
        loop {
            let error = match timeout_at(until, self.try_once(command, until)).await {
                Ok(Ok(reply)) => return Ok(reply),
                Ok(Err(error)) => Some(error),
                Err(_) => None,
            };
            match error {
                Some(error) if matches!(error.kind(), ErrorKind::Refused | ErrorKind::InvalidInput) => {
                    return Err(error);
                }
                Some(error) => last = Some(error),
                // Who does not answer in time may never do: the next one gets a connection that is fresh.
                None => self.hang_up(),
            }
            if Instant::now() + backoff >= until {
                let why = last.as_ref().map_or_else(|| "no answer".to_owned(), ToString::to_string);
                let message = format!("not within {deadline:?}: {why}");
                return Err(Error::new(ErrorKind::TimedOut, "reach the lighthouse", message));
            }
            sleep(backoff).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
        }
    }

    async fn try_once(&self, command: &LighthouseCommand, until: Instant) -> Result<LighthouseReply> {
        let line = self.line(until).await?;
        let seq = self.seq.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        // Before it is sent: from then on either the answer comes or the end of the line, which ends the wait.
        line.waiting.lock().insert(seq, answer);
        let _place = Place(&line.waiting, seq);
        line.sender.send(&LighthouseRequest { seq, command: command.clone() }).await?;
        answered.await.map_err(|_| {
            let reason = line.sender.close_reason().unwrap_or_else(|| "the line was cut".to_owned());
            Error::new(ErrorKind::Closed, "ask the lighthouse", reason)
        })
    }

    /// The open connection; dialled where there is none.
    async fn line(&self, until: Instant) -> Result<Arc<Line>> {
        let mut line = self.line.lock().await;
        if let Some(open) = line.as_ref().filter(|line| line.sender.close_reason().is_none()) {
            return Ok(Arc::clone(open));
        }
        *line = None;
        let peer = Peer::Supervisor { pid: std::process::id() };
        let left = until.saturating_duration_since(Instant::now());
        let channel: Channel<LighthouseRequest, LighthouseAnswer> =
            connect(&self.address, peer, &self.credentials, &Limits::default(), left).await?;
        let (sender, receiver) = channel.split();
        let waiting = Waiting::default();
        tokio::spawn(hear(receiver, waiting.clone(), self.on_gone.clone()));
        Ok(Arc::clone(line.insert(Arc::new(Line { sender, waiting }))))
    }

    fn hang_up(&self) {
        // Locked: it is being dialled anew already.
        if let Ok(mut line) = self.line.try_lock()
            && let Some(line) = line.take()
        {
            line.sender.close("no answer in time");
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.sender.close("this side hung up");
    }
}

impl Waiting {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, oneshot::Sender<LighthouseReply>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.lock().remove(&self.1);
    }
}

/// Gives each answer to whoever waits for it, and passes news on, until the connection ends.
async fn hear(mut receiver: Receiver<LighthouseAnswer>, waiting: Waiting, on_gone: Option<OnGone>) {
    while let Ok(LighthouseAnswer { seq, reply }) = receiver.recv().await {
        match reply {
            LighthouseReply::Gone { quorum_id, reason } => {
                if let Some(on_gone) = &on_gone {
                    on_gone(quorum_id, &reason);
                }
            }
            reply => {
                // Nobody's: whoever asked has given up, and a late answer says nothing to anyone else.
                if let Some(answer) = waiting.lock().remove(&seq) {
                    let _ = answer.send(reply);
                }
            }
        }
    }
    waiting.lock().clear();
}

fn unexpected(reply: LighthouseReply) -> Error {
    let message = match reply {
        LighthouseReply::Failed { reason } => reason,
        other => format!("the answer is of another kind: {other:?}"),
    };
    Error::new(ErrorKind::Protocol, "ask the lighthouse", message)
}
