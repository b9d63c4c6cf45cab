//! The supervisor's end of the control channel.

use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, sleep, timeout_at};

use super::protocol::{LighthouseAnswer, LighthouseCommand, LighthouseReply, LighthouseRequest};
use crate::channel::{Channel, Credentials, Limits, connect};
use crate::protocol::Peer;
use crate::wire::Address;
use crate::{Error, ErrorKind, Result};

/// First pause before another try; doubles up to [`BACKOFF_MAX`].
const BACKOFF: Duration = Duration::from_millis(5);

/// Longest pause between two tries.
const BACKOFF_MAX: Duration = Duration::from_millis(100);

/// Tells the lighthouse who died. Keeps one connection, dials anew where it broke; one request at a time.
#[derive(Debug)]
pub struct ControlClient {
    address: Address,
    credentials: Credentials,
    connection: Mutex<Connection>,
}

#[derive(Debug, Default)]
struct Connection {
    channel: Option<Channel<LighthouseRequest, LighthouseAnswer>>,
    seq: u64,
}

impl ControlClient {
    /// A client of the lighthouse at `address`; dials with the first call.
    pub fn new(address: Address, credentials: Credentials) -> Self {
        Self { address, credentials, connection: Mutex::default() }
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

    /// Everything the lighthouse knows, as the JSON text of its snapshot. Errors as in [`Self::evict`].
    pub async fn state(&self, deadline: Duration) -> Result<String> {
        match self.request(&LighthouseCommand::State, deadline).await? {
            LighthouseReply::State { json } => Ok(json),
            other => Err(unexpected(other)),
        }
    }

    async fn request(&self, command: &LighthouseCommand, deadline: Duration) -> Result<LighthouseReply> {
        let until = Instant::now() + deadline;
        let (mut backoff, mut last) = (BACKOFF, None::<Error>);
        loop {
            let tried = timeout_at(until, async {
                let mut connection = self.connection.lock().await;
                self.try_once(&mut connection, command, until).await
            })
            .await;
            let error = match tried {
                Ok(Ok(reply)) => return Ok(reply),
                Ok(Err(error)) => Some(error),
                Err(_) => None,
            };
            match error {
                Some(error) if matches!(error.kind(), ErrorKind::Refused | ErrorKind::InvalidInput) => {
                    return Err(error);
                }
                Some(error) => last = Some(error),
                None => {}
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

    async fn try_once(
        &self,
        connection: &mut Connection,
        command: &LighthouseCommand,
        until: Instant,
    ) -> Result<LighthouseReply> {
        // only a channel whose answer came is put back: a late answer belongs to nobody
        let mut channel = match connection.channel.take() {
            Some(channel) => channel,
            None => {
                let peer = Peer::Supervisor { pid: std::process::id() };
                let left = until.saturating_duration_since(Instant::now());
                connect(&self.address, peer, &self.credentials, &Limits::default(), left).await?
            }
        };
        connection.seq += 1;
        let seq = connection.seq;
        channel.send(&LighthouseRequest { seq, command: command.clone() }).await?;
        let answer = channel.recv().await?;
        if answer.seq != seq {
            let message = format!("answer {} to request {seq}", answer.seq);
            return Err(Error::new(ErrorKind::Protocol, "ask the lighthouse", message));
        }
        connection.channel = Some(channel);
        Ok(answer.reply)
    }
}

fn unexpected(reply: LighthouseReply) -> Error {
    let message = match reply {
        LighthouseReply::Failed { reason } => reason,
        other => format!("the answer is of another kind: {other:?}"),
    };
    Error::new(ErrorKind::Protocol, "ask the lighthouse", message)
}
