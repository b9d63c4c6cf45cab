//! Pinned memory of the host that stands in for memory of an accelerator, piece by piece.

use std::time::Duration;

use super::memory::{self, Memory, Segment};
use crate::gpu::{self, GpuRuntime, MemoryKind, Stream};
use crate::{Error, ErrorKind, Result};

/// Bytes that are staged at a time: as many as the largest piece of a transfer.
pub(super) const MOST: u64 = 16 << 20;

/// A device that does not copy that in this time hangs. Not the deadline of a peer: a wait that is given up costs the
/// process its devices.
const COPY: Duration = Duration::from_secs(30);

/// As long as the parts that it stands in for.
pub(super) struct Staging {
    parts: Vec<Segment>,
    pinned: gpu::Memory,
    stream: Stream,
    runtime: &'static dyn GpuRuntime,
}

impl Staging {
    /// For `parts` of an accelerator.
    pub(super) fn new(runtime: &'static dyn GpuRuntime, parts: &[Segment]) -> Result<Self> {
        let length = memory::total(parts);
        let at = parts.first().map_or(0, |part| part.address as u64);
        if length == 0 || length > MOST {
            let why = format!("{length} bytes at a time, where 1 to {MOST} can be");
            return Err(Error::new(ErrorKind::TooLarge, "stage memory of a device", why));
        }
        let ordinal = runtime.pointer(at)?.ordinal.unwrap_or(0);
        let pinned = gpu::Memory::new(runtime, MemoryKind::Pinned, length as usize)?;
        Ok(Self { parts: parts.to_vec(), pinned, stream: Stream::new(runtime, ordinal)?, runtime })
    }

    /// For `parts` of `memory`; none where they are the host's, and need none.
    pub(super) fn of(memory: &Memory, parts: &[Segment]) -> Result<Option<Self>> {
        match memory.device() {
            Some(runtime) if !parts.is_empty() => Self::new(runtime, parts).map(Some),
            _ => Ok(None),
        }
    }

    /// What stands in for them.
    pub(super) fn segment(&self) -> Segment {
        Segment { address: self.pinned.address() as usize, length: self.pinned.bytes() }
    }

    /// From the device.
    pub(super) fn fill(&self) -> Result<()> {
        self.copy(|here, there| (here, there))
    }

    /// To the device.
    pub(super) fn drain(&self) -> Result<()> {
        self.copy(|here, there| (there, here))
    }

    fn copy(&self, order: impl Fn(u64, u64) -> (u64, u64)) -> Result<()> {
        let mut here = self.pinned.address();
        for part in &self.parts {
            let (to, from) = order(here, part.address as u64);
            // SAFETY: both live until the wait below ends; where it is given up, nothing of a device is freed any more.
            unsafe { self.runtime.copy(to, from, part.length, self.stream.handle())? };
            here += part.length as u64;
        }
        Ok(self.stream.wait(COPY)?)
    }
}

/// `parts` in runs that can be staged at a time; all of them in one where `memory` is the host's.
pub(super) fn runs(memory: &Memory, parts: Vec<Segment>) -> Vec<Vec<Segment>> {
    if memory.device().is_none() || parts.is_empty() {
        return vec![parts];
    }
    let (mut runs, mut run, mut room) = (Vec::new(), Vec::new(), MOST as usize);
    for mut part in parts {
        while part.length > 0 {
            let length = part.length.min(room);
            run.push(Segment { address: part.address, length });
            part.address += length;
            part.length -= length;
            room -= length;
            if room == 0 {
                runs.push(std::mem::take(&mut run));
                room = MOST as usize;
            }
        }
    }
    if !run.is_empty() {
        runs.push(run);
    }
    runs
}
