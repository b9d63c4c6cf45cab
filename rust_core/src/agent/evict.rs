//! How a dead generation is taken out of the lighthouse's quorums.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::Result;
use crate::channel::Credentials;
use crate::lighthouse::ControlClient;

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
        Box::pin(async move { ControlClient::evict(self, replica, generation, limit).await.map(Eviction::Known) })
    }
}

/// The evictor for a lighthouse with this control address; none: TorchFT's.
pub fn for_lighthouse(control: Option<&str>, credentials: &Credentials) -> Result<Arc<dyn Evictor>> {
    match control {
        None => Ok(Arc::new(Deaf)),
        Some(address) => Ok(Arc::new(ControlClient::new(address.parse()?, credentials.clone()))),
    }
}
