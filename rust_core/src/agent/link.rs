//! The connection to the controller: dialled again and again, sends the outbox, brings commands.

use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep};

use super::doctor::Awaited;
use super::mutant;
use super::outbox::Outbox;
use crate::channel::{Channel, Credentials, Limits, connect};
use crate::protocol::{Command, FENCED, GroupSnapshot, Peer, Report};
use crate::wire::Address;
use crate::{Error, ErrorKind};

const DIAL_LIMIT: Duration = Duration::from_secs(5);
const FIRST_DELAY: Duration = Duration::from_millis(20);
const LONGEST_DELAY: Duration = Duration::from_secs(1);
/// A connection that held this long starts the delays anew.
const STEADY: Duration = Duration::from_secs(5);
/// Reports taken from the outbox at once.
const BATCH: usize = 256;

/// How an agent stands with its controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// They are connected.
    Connected,
    /// The controller has been away since then.
    Away(Instant),
    /// The controller has another agent in this one's place, for this reason. That is for good.
    Fenced(String),
}

impl Standing {
    /// How long the controller has been away.
    pub fn away(&self) -> Duration {
        if let Self::Away(since) = self { since.elapsed() } else { Duration::ZERO }
    }
}

/// What a connection needs.
pub struct Link<F> {
    /// Where the controller listens.
    pub address: Address,
    /// Proof that this agent belongs to the run.
    pub credentials: Credentials,
    /// Name of this host.
    pub host: String,
    /// How often it has been provisioned.
    pub attempt: u32,
    /// Where other agents find out whether they reach this host.
    pub probe: Option<String>,
    /// Whether the host is being looked at.
    pub examining: Awaited,
    /// Random per agent process.
    pub incarnation: u64,
    /// What is sent.
    pub outbox: Outbox,
    /// What the agent supervises at the moment of the call.
    pub snapshot: F,
    /// Where commands go.
    pub commands: mpsc::Sender<Command>,
    /// Who is told how this agent stands.
    pub standing: watch::Sender<Standing>,
}

impl<F> Link<F>
where
    F: Fn() -> Vec<GroupSnapshot> + Send + Sync + 'static,
{
    /// Keeps the connection up on a task of its own.
    pub fn start(self) -> tokio::task::JoinHandle<()> {
        tokio::spawn(self.run())
    }

    async fn run(self) {
        let mut delay = FIRST_DELAY;
        loop {
            let since = Instant::now();
            let dialled = tokio::select! {
                dialled = self.dial() => dialled,
                () = self.commands.closed() => return,
            };
            let error = match dialled {
                Ok(channel) => {
                    tracing::info!(controller = %self.address, "connected to the controller");
                    self.standing.send_replace(Standing::Connected);
                    let error = self.talk(channel).await;
                    self.standing.send_replace(Standing::Away(Instant::now()));
                    error
                }
                Err(error) => error,
            };
            let is_fence = error.kind() == ErrorKind::Refused && error.message().starts_with(FENCED);
            if is_fence && !mutant::is_on("deaf_to_fence") {
                tracing::error!(
                    reason = error.message(),
                    "the controller has another agent in this one's place"
                );
                self.standing.send_replace(Standing::Fenced(error.message().to_owned()));
                return;
            }
            if self.commands.is_closed() {
                return;
            }
            tracing::debug!(%error, "no connection to the controller");
            delay = if since.elapsed() >= STEADY { FIRST_DELAY } else { (delay * 2).min(LONGEST_DELAY) };
            tokio::select! {
                () = sleep(delay) => {}
                () = self.commands.closed() => return,
            }
        }
    }

    async fn dial(&self) -> Result<Channel<Report, Command>, Error> {
        let peer = Peer::Agent {
            host: self.host.clone(),
            attempt: self.attempt,
            pid: std::process::id(),
            incarnation: self.incarnation,
            groups: (self.snapshot)(),
            probe: self.probe.clone(),
            examining: self.examining.get(),
        };
        connect(&self.address, peer, &self.credentials, &Limits::default(), DIAL_LIMIT).await
    }

    async fn talk(&self, channel: Channel<Report, Command>) -> Error {
        self.outbox.reconnected();
        let (sender, mut receiver) = channel.split();
        let sending = async {
            loop {
                for report in self.outbox.take(BATCH) {
                    if let Err(error) = sender.send(&report).await {
                        return error;
                    }
                }
                self.outbox.changed().await;
            }
        };
        let receiving = async {
            loop {
                match receiver.recv().await {
                    Ok(Command::Ack { seq }) => self.outbox.acked(seq),
                    Ok(Command::Dropped { reason }) => {
                        return Error::new(ErrorKind::Refused, "serve the controller", reason);
                    }
                    Ok(command) => {
                        if self.commands.send(command).await.is_err() {
                            return Error::new(ErrorKind::Closed, "serve the controller", "the agent ends");
                        }
                    }
                    Err(error) => return error,
                }
            }
        };
        tokio::select! {
            error = sending => error,
            error = receiving => error,
            // In order, so that the controller is told of an end and not of a broken connection.
            () = self.commands.closed() => {
                sender.close("the agent ends");
                sender.finished().await;
                Error::new(ErrorKind::Closed, "serve the controller", "the agent ends")
            }
        }
    }
}
