//! Hosts that have the places of lost ones: what is addressed to a lost host comes to the one that has its place.
//!
//! One host has the place of the lost host as such, which is where new processes of it are started. A process of it may
//! have its own place on another one: so the ranks of a lost host are spread over several (`spread.rs`).

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::hop::Hop;
use super::peer::Peer;
use super::{Inner, locked};
use crate::wire::Frame;

/// What is read of this gateway's own line at a time, in bytes.
const TOGETHER: usize = 1 << 20;

/// Who has whose place.
#[derive(Default)]
pub(super) struct Places {
    /// By the folder of a host, or the address of a process that is not where its host's place is.
    taken: Mutex<HashMap<String, String>>,
    itself: Mutex<Option<Arc<Peer>>>,
}

impl Places {
    /// The host `by` has the place of `what`, a host or a process of one, from here on.
    pub(super) fn put(&self, what: String, by: String) {
        // A host that is its own successor would lead nowhere.
        if self.of(by.clone()) != what {
            locked(&self.taken).insert(what, by);
        }
    }

    /// Whether another host has the place of `folder`.
    pub(super) fn is_taken(&self, folder: &str) -> bool {
        locked(&self.taken).contains_key(folder)
    }

    /// Where the process `name` of the host `folder` is.
    pub(super) fn of_process(&self, folder: &str, name: &str) -> String {
        let by = locked(&self.taken).get(&format!("{folder}/{name}")).cloned();
        self.of(by.unwrap_or_else(|| folder.to_owned()))
    }

    /// Who has the place of `folder`: it itself, as a rule.
    pub(super) fn of(&self, mut folder: String) -> String {
        let taken = locked(&self.taken);
        while let Some(by) = taken.get(&folder) {
            folder.clone_from(by);
        }
        folder
    }

    /// All of it, for a host that has come later.
    pub(super) fn all(&self) -> Vec<Hop> {
        let placed =
            |(folder, by): (&String, &String)| Hop::Placed { folder: folder.clone(), by: by.clone() };
        locked(&self.taken).iter().map(placed).collect()
    }

    /// Ends this gateway's line to itself.
    pub(super) fn clear(&self) {
        drop(locked(&self.itself).take());
    }
}

/// This gateway's line to itself, for what processes of this host say to those of a host whose place it has.
///
/// Both ends of a session are in one gateway then, which tells them apart by their numbers: each is the other's complement.
pub(super) fn itself(inner: &Arc<Inner>) -> Arc<Peer> {
    let mut found = locked(&inner.places.itself);
    if let Some(peer) = found.as_ref() {
        return Arc::clone(peer);
    }
    let peer = Peer::itself(inner);
    *found = Some(Arc::clone(&peer));
    inner.spawn(turn_round(Arc::clone(inner), Arc::clone(&peer)));
    peer
}

async fn turn_round(inner: Arc<Inner>, peer: Arc<Peer>) {
    let mut count = 0;
    loop {
        let (frames, _) = peer.outbox.take(TOGETHER);
        if frames.is_empty() {
            peer.outbox.changed().await;
            continue;
        }
        count += frames.len() as u64;
        peer.outbox.heard(count);
        for frame in frames {
            let turned = frame.message().and_then(|hop| match hop {
                Hop::Session { to, from, number, what } => {
                    let header =
                        Frame::from_message(&Hop::Session { to, from, number: !number, what })?.header;
                    inner.hop(&peer, Frame { header, segments: frame.segments })
                }
                _ => Ok(false),
            });
            if let Err(error) = turned {
                tracing::warn!(%error, "a hop of this gateway to itself");
            }
        }
    }
}
