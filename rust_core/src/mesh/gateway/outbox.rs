//! What is sent to another gateway, in order, and kept until that has said that it has it: a connection that breaks
//! loses nothing of it, and what is sent again is sent once.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

use super::locked;
use crate::wire::Frame;

/// Bounded by its senders: of each session no more is under way than its window, and what goes without one is small
/// and rare. What was heard is said often enough that little more than that is kept.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    kept: Mutex<Kept>,
    changed: Notify,
    answer: AtomicBool,
}

#[derive(Debug, Default)]
struct Kept {
    frames: VecDeque<Frame>,
    /// Frames before the first of these, which the other side has.
    heard: u64,
    /// Of these, how many have been written to the connection of now.
    written: usize,
    closed: bool,
}

impl Outbox {
    /// Queues a frame. It is dropped where the connection has ended for good, as everything under way is.
    pub(super) fn push(&self, frame: Frame) {
        let mut kept = locked(&self.kept);
        if !kept.closed {
            kept.frames.push_back(frame);
            drop(kept);
            self.changed.notify_one();
        }
    }

    /// Has whoever writes say now what has been heard.
    pub(super) fn answer(&self) {
        self.answer.store(true, Ordering::SeqCst);
        self.changed.notify_one();
    }

    /// The next frames to be written, of about so many bytes, and whether it is time to say what has been heard.
    pub(super) fn take(&self, bytes: usize) -> (Vec<Frame>, bool) {
        let answer = self.answer.swap(false, Ordering::SeqCst);
        let mut kept = locked(&self.kept);
        let (mut taken, mut size) = (Vec::new(), 0);
        while let Some(frame) = kept.frames.get(kept.written) {
            size += frame.wire_len();
            taken.push(frame.clone());
            kept.written += 1;
            if size >= bytes {
                break;
            }
        }
        (taken, answer)
    }

    /// Waits until there is something to take.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// The other side has so many frames, counted from the first one. False where it cannot have.
    pub(super) fn heard(&self, count: u64) -> bool {
        let mut kept = locked(&self.kept);
        let Some(more) = count.checked_sub(kept.heard) else { return true };
        let Some(more) = usize::try_from(more).ok().filter(|more| *more <= kept.written) else {
            return false;
        };
        kept.frames.drain(..more);
        kept.written -= more;
        kept.heard = count;
        true
    }

    /// There is another connection, whose other end has so many frames: all after them are written again. False where
    /// it cannot have so many, or these are not kept any more.
    pub(super) fn resume(&self, count: u64) -> bool {
        let known = locked(&self.kept).heard <= count && self.heard(count);
        if known {
            locked(&self.kept).written = 0;
            self.changed.notify_one();
        }
        known
    }

    /// Nothing of it is wanted any more.
    pub(super) fn close(&self) {
        let mut kept = locked(&self.kept);
        kept.closed = true;
        kept.frames.clear();
        kept.written = 0;
    }

    /// Frames that are kept.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        locked(&self.kept).frames.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(number: u8) -> Frame {
        Frame { header: vec![number].into(), segments: Vec::new() }
    }

    fn numbers(outbox: &Outbox) -> Vec<u8> {
        outbox.take(usize::MAX).0.iter().map(|frame| frame.header[0]).collect()
    }

    #[test]
    fn what_the_other_side_has_not_heard_is_sent_again_once_and_in_order() {
        let outbox = Outbox::default();
        (0..5).for_each(|number| outbox.push(frame(number)));
        assert_eq!(numbers(&outbox), [0, 1, 2, 3, 4]);
        assert!(outbox.heard(2));
        outbox.push(frame(5));
        assert!(outbox.resume(3));
        assert_eq!(numbers(&outbox), [3, 4, 5], "three were heard, two of which were known to be");
        assert_eq!(numbers(&outbox), [0_u8; 0]);
        assert!(outbox.heard(6));
        assert_eq!(outbox.len(), 0, "nothing is kept of what was heard");
    }

    #[test]
    fn a_count_that_cannot_be_is_refused() {
        let outbox = Outbox::default();
        outbox.push(frame(0));
        assert!(!outbox.heard(1), "it was not written yet");
        assert_eq!(numbers(&outbox), [0]);
        assert!(outbox.heard(1) && outbox.heard(0), "an older word is late, no lie");
        assert!(!outbox.resume(0), "what was heard once is not kept");
        assert!(!outbox.resume(2));
    }
}
