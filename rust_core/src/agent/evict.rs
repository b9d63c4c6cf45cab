//! How a dead generation is taken out of the lighthouse's quorums.

use std::fmt;
use std::pin::Pin;

use crate::Result;

/// Answer of an eviction: the last quorum that held the generation.
pub type Evicting<'a> = Pin<Box<dyn Future<Output = Result<Option<i64>>> + Send + 'a>>;

/// Tells the lighthouse that a generation is dead. Called before its replacement is spawned.
pub trait Evictor: fmt::Debug + Send + Sync {
    /// Evicts `generation` and every older one of `replica`. May be called again for the same generation.
    fn evict(&self, replica: u32, generation: u64) -> Evicting<'_>;
}

/// TorchFT's lighthouse cannot be told: it waits until the heartbeats of the dead are stale.
#[derive(Clone, Copy, Debug, Default)]
pub struct Untold;

impl Evictor for Untold {
    fn evict(&self, _replica: u32, _generation: u64) -> Evicting<'_> {
        Box::pin(std::future::ready(Ok(None)))
    }
}

/// Makes the evictor of a lighthouse, by the address of its control channel.
pub type EvictorFactory = fn(Option<&str>) -> std::sync::Arc<dyn Evictor>;

/// The evictor for a group whose lighthouse has this control address.
pub fn for_lighthouse(control: Option<&str>) -> std::sync::Arc<dyn Evictor> {
    if let Some(address) = control {
        tracing::debug!(address, "no client for this lighthouse's control channel: nothing is evicted");
    }
    std::sync::Arc::new(Untold)
}
