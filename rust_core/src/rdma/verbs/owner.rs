//! The owner's end: a queue pair that only answers, and the keys that it lends.

use std::sync::Arc;

use super::super::memory::{Memory, Place, Segment};
use super::super::protocol::Put;
use super::endpoint::Endpoint;
use super::fabric::Fabric;
use super::fragments::Keyed;
use super::pair::Pair;
use super::region::{Region, Rights};
use crate::Result;

/// What one connection has of the fabric.
#[derive(Default)]
pub(in crate::rdma) struct OwnerEnd {
    pair: Option<Pair>,
    /// The process's random bytes, by which a requester knows that it has got here.
    cookie: Option<Region>,
}

/// What a requester is told: the owner's end, and where its random bytes lie under which key.
pub(in crate::rdma) const JOINED: usize = Endpoint::LENGTH + 8 + 4;

impl OwnerEnd {
    /// A queue pair for the requester's, in place of the one before.
    pub(in crate::rdma) fn join(
        &mut self,
        fabric: &Arc<Fabric>,
        theirs: &Endpoint,
        cookie: Segment,
    ) -> Result<[u8; JOINED]> {
        self.part();
        let mut pair = Pair::new(fabric)?;
        pair.join(theirs)?;
        let region = match self.cookie.take() {
            Some(region) => region,
            // SAFETY: the process keeps it for as long as it serves anybody.
            None => unsafe { Region::host(fabric, cookie, Rights::RemoteRead) }?,
        };
        let mut out = [0; JOINED];
        let mut at = Put(&mut out);
        at.put(&pair.end().encode());
        at.put(&(cookie.address as u64).to_le_bytes());
        at.put(&region.remote_key().to_le_bytes());
        (self.pair, self.cookie) = (Some(pair), Some(region));
        Ok(out)
    }

    /// Destroys the queue pair: what the requester still sends reaches nothing any more.
    pub(in crate::rdma) fn part(&mut self) {
        self.pair = None;
    }
}

/// Registers each segment of `memory` for peers; none where it lies on an accelerator and has to be staged.
pub(in crate::rdma) fn regions(
    fabric: &Arc<Fabric>,
    memory: &Memory,
    rights: Rights,
) -> Result<Option<Vec<Region>>> {
    let rights = if crate::agent::mutant::is_on("lend_all_rights") { Rights::RemoteWrite } else { rights };
    let mut regions = Vec::new();
    for segment in memory.segments() {
        // The memory outlives its regions, and the segments are valid for as long as it lives.
        let region = match memory.place() {
            // SAFETY: valid for as long as the memory is, which outlives its regions.
            Place::Host => unsafe { Region::host(fabric, *segment, rights) }?,
            Place::Carried(_) => return Ok(None),
            Place::Device(runtime) => {
                // SAFETY: as above.
                let (region, placement) = unsafe { Region::device(fabric, *runtime, *segment, rights) };
                tracing::info!(%placement, bytes = segment.length, "how an RDMA device reaches memory of a device");
                let Some(region) = region else { return Ok(None) };
                region
            }
        };
        regions.push(region);
    }
    Ok(Some(regions))
}

/// What a range is lent as.
pub(in crate::rdma) fn keyed(parts: &[(usize, Segment)], regions: &[Region]) -> Vec<Keyed> {
    parts
        .iter()
        .filter_map(|(index, segment)| {
            regions.get(*index).map(|region| Keyed { segment: *segment, key: region.remote_key() })
        })
        .collect()
}
