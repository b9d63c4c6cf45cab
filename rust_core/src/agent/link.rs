//! The connection to the controller: dialled again and again, sends the outbox, brings commands.

use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep};

use super::outbox::Outbox;
use crate::channel::{Channel, Credentials, Limits, connect};
use crate::protocol::{Command, GroupSnapshot, Peer, Report};
use crate::wire::Address;
use crate::Error;

const DIAL_LIMIT: Duration = Duration::from_secs(5);
const FIRST_DELAY: Duration = Duration::from_millis(20);
const LONGEST_DELAY: Duration = Duration::from_secs(1);
/// A connection that held this long starts the delays anew.
const STEADY: Duration = Duration::from_secs(5);
/// Reports taken from the outbox at once.
const BATCH: usize = 256;

/// Since when the controller has been away; none while it is connected.
pub type Away = watch::Receiver<Option<Instant>>;

/// What a connection needs.
pub struct Link<F> {
    /// Where the controller listens.
    pub address: Address,
    /// Proof that this agent belongs to the run.
    pub credentials: Credentials,
    /// Name of this host.
    pub host: String,
    /// Random per agent process.
    pub incarnation: u64,
    /// What is sent.
    pub outbox: Outbox,
    /// What the agent supervises at the moment of the call.
    pub snapshot: F,
    /// Where commands go.
    pub commands: mpsc::Sender<Command>,
}

impl<F> Link<F>
where
    F: Fn() -> Vec<GroupSnapshot> + Send + Sync + 'static,
{
    /// Keeps the connection up on a task of its own.
    pub fn start(self) -> (tokio::task::JoinHandle<()>, Away) {
        let (tell, away) = watch::channel(Some(Instant::now()));
        (tokio::spawn(self.run(tell)), away)
    }

    async fn run(self, tell: watch::Sender<Option<Instant>>) {
        let mut delay = FIRST_DELAY;
        loop {
            let since = Instant::now();
            let error = match self.dial().await {
                Ok(channel) => {
                    tracing::info!(controller = %self.address, "connected to the controller");
                    tell.send_replace(None);
                    let error = self.talk(channel).await;
                    tell.send_replace(Some(Instant::now()));
                    error
                }
                Err(error) => error,
            };
            if self.commands.is_closed() {
                return;
            }
            tracing::debug!(%error, "no connection to the controller");
            delay = if since.elapsed() >= STEADY { FIRST_DELAY } else { (delay * 2).min(LONGEST_DELAY) };
            sleep(delay).await;
        }
    }

    async fn dial(&self) -> Result<Channel<Report, Command>, Error> {
        let peer = Peer::Agent {
            host: self.host.clone(),
            pid: std::process::id(),
            incarnation: self.incarnation,
            groups: (self.snapshot)(),
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
                    Ok(command) => {
                        if self.commands.send(command).await.is_err() {
                            return Error::new(crate::ErrorKind::Closed, "serve the controller", "the agent ends");
                        }
                    }
                    Err(error) => return error,
                }
            }
        };
        tokio::select! {
            error = sending => error,
            error = receiving => error,
        }
    }
}
