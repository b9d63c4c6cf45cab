//! The control channel: supervisors tell who died, and hear of it. Unix sockets and TLS, token, one answer a request.

use std::time::Instant;

use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinSet;

use super::protocol::{LighthouseAnswer, LighthouseCommand, LighthouseReply, LighthouseRequest};
use super::registry::Gone;
use super::service::Shared;
use crate::channel::{Listener, Pending};
use crate::protocol::Peer;
use crate::{Error, ErrorKind, Result};

/// Serves supervisors until the listener ends, which is an error.
pub async fn serve(mut listener: Listener, shared: Shared) -> Result<()> {
    let mut supervisors = JoinSet::new();
    loop {
        tokio::select! {
            pending = listener.accept() => {
                let pending = pending?;
                let shared = shared.clone();
                supervisors.spawn(async move {
                    if let Err(error) = converse(pending, &shared).await {
                        tracing::debug!(%error, "a supervisor left");
                    }
                });
            }
            Some(_) = supervisors.join_next() => {}
        }
    }
}

async fn converse(pending: Pending, shared: &Shared) -> Result<()> {
    let Peer::Supervisor { pid } = *pending.peer() else {
        pending.refuse("the lighthouse's control channel is for supervisors").await?;
        return Err(Error::new(ErrorKind::Refused, "serve a supervisor", "the peer is something else"));
    };
    let (mut news, standing) = shared.lock().subscribe();
    let mut channel = pending.welcome::<LighthouseAnswer, LighthouseRequest>().await?;
    tracing::debug!(pid, "a supervisor dialled");
    if let Some(gone) = standing {
        channel.try_send(&tell(gone))?;
    }
    loop {
        // Never a wait for room: whoever does not read what it is told is disconnected, and dials anew.
        tokio::select! {
            biased; // who asks is answered first, then told the news that its own command made
            request = channel.recv() => {
                let LighthouseRequest { seq, command } = request?;
                channel.try_send(&LighthouseAnswer { seq, reply: handle(shared, &command) })?;
            }
            gone = news.recv() => {
                channel.try_send(&tell(gone.map_err(|error| behind(&error))?))?;
            }
        }
    }
}

fn tell(Gone { quorum_id, reason }: Gone) -> LighthouseAnswer {
    LighthouseAnswer { seq: 0, reply: LighthouseReply::Gone { quorum_id, reason } }
}

fn behind(error: &RecvError) -> Error {
    Error::new(ErrorKind::TooLarge, "tell a supervisor the news", error.to_string())
}

/// Carries out one command.
pub fn handle(shared: &Shared, command: &LighthouseCommand) -> LighthouseReply {
    let now = Instant::now();
    match *command {
        LighthouseCommand::Evict { replica, generation } => {
            let quorum_id = shared.lock().evict(now, replica, generation);
            shared.wake();
            tracing::info!(replica, generation, quorum_id, "evicted");
            LighthouseReply::Evicted { quorum_id }
        }
        LighthouseCommand::Expect { replicas } => {
            shared.lock().expect(now, replicas);
            shared.wake();
            tracing::info!(replicas, "another number of groups is expected");
            LighthouseReply::Expected
        }
        LighthouseCommand::State => {
            let snapshot = shared.lock().snapshot(now);
            serde_json::to_string(&snapshot).map_or_else(
                |error| LighthouseReply::Failed { reason: error.to_string() },
                |json| LighthouseReply::State { json },
            )
        }
    }
}
