//! How a dead generation is taken out of the lighthouse's quorums.

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::mutant;
use super::sessions::Sessions;
use crate::Result;
use crate::channel::Credentials;
use crate::lighthouse::control_client::OnGone;
use crate::lighthouse::{ControlClient, FOR_GOOD};
use crate::protocol::SessionCommand;

/// What came of an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eviction {
    /// The lighthouse knows; this is the last quorum that held the generation.
    Known(Option<i64>),
    /// This lighthouse cannot be told: it waits until the heartbeats of the dead are stale.
    Untold,
}

/// An eviction under way.
pub type Evicting<'a> = Pin<Box<dyn Future<Output = Result<Eviction>> + Send + 'a>>;

/// Tells the lighthouse that a generation is dead. Called before its replacement is spawned.
pub trait Evictor: fmt::Debug + Send + Sync {
    /// Evicts `generation` and every older one of `replica`; tries again, where that may help, until `limit` is over.
    fn evict(&self, replica: u32, generation: u64, limit: Duration) -> Evicting<'_>;

    /// Evicts `replica`, whose last generation this was, for good: nobody waits for it any more. Not where another host
    /// `may` have gone on with it meanwhile, of which this one would not know.
    fn retire(&self, replica: u32, generation: u64, may: bool, limit: Duration) -> Evicting<'_> {
        self.evict(replica, if may { generation } else { FOR_GOOD }, limit)
    }
}

/// For TorchFT's lighthouse, which has no ear for this.
#[derive(Clone, Copy, Debug, Default)]
struct Deaf;

impl Evictor for Deaf {
    fn evict(&self, _replica: u32, _generation: u64, _limit: Duration) -> Evicting<'_> {
        Box::pin(std::future::ready(Ok(Eviction::Untold)))
    }
}

impl Evictor for ControlClient {
    fn evict(&self, replica: u32, generation: u64, limit: Duration) -> Evicting<'_> {
        Box::pin(
            async move { ControlClient::evict(self, replica, generation, limit).await.map(Eviction::Known) },
        )
    }
}

/// The lines of one agent to lighthouses: one each, whatever the number of groups.
#[derive(Debug)]
pub struct Lighthouses {
    credentials: Credentials,
    sessions: Sessions,
    lines: Mutex<HashMap<String, Arc<ControlClient>>>,
}

impl Lighthouses {
    /// No lines yet. What a lighthouse tells unasked goes to `sessions`.
    pub fn new(credentials: Credentials, sessions: Sessions) -> Self {
        Self { credentials, sessions, lines: Mutex::default() }
    }

    /// The evictor for a lighthouse with this control address; none: TorchFT's. Must run inside a Tokio runtime.
    pub fn evictor(&self, control: Option<&str>) -> Result<Arc<dyn Evictor>> {
        let Some(address) = control else { return Ok(Arc::new(Deaf)) };
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = lines.get(address) {
            return Ok(Arc::clone(line) as Arc<dyn Evictor>);
        }
        let line = Arc::new(
            ControlClient::new(address.parse()?, self.credentials.clone()).with_news(self.on_gone()),
        );
        lines.insert(address.to_owned(), Arc::clone(&line));
        let standing = Arc::clone(&line);
        tokio::spawn(async move { standing.stay_connected().await });
        Ok(line)
    }

    /// Passes the news of a death on as an eviction of our own does, to everyone: whose death it is, is not said, and
    /// the floor concerns nobody who was not in those quorums.
    fn on_gone(&self) -> OnGone {
        let sessions = self.sessions.clone();
        Arc::new(move |quorum_id, reason| {
            if mutant::is_on("drop_news") {
                return;
            }
            sessions.tell_all(&SessionCommand::Dead { quorum_id });
            tracing::info!(quorum_id, reason, "the lighthouse tells of a death");
        })
    }
}
