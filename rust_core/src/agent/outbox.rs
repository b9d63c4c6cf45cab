//! What the agent has to tell the controller: kept until it is acked, so that nothing waits for the controller.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::clock;
use crate::protocol::{Event, Progress, Report, Slot, Stamped};

/// Events kept for a controller that is away; the oldest go first beyond it.
const MAX_EVENTS: usize = 65_536;
/// Answers kept; a controller that asks for more at once asks again.
const MAX_ANSWERS: usize = 256;

/// Events, progress and answers on their way to the controller.
#[derive(Clone, Debug, Default)]
pub struct Outbox(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    last_seq: u64,
    events: VecDeque<Stamped>,
    /// Highest sequence number sent over the present connection.
    sent: u64,
    progress: BTreeMap<Slot, Progress>,
    answers: VecDeque<Report>,
}

impl Outbox {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells an event that happens now.
    pub fn emit(&self, event: Event) {
        self.emit_at(clock::mono_ns(), event);
    }

    /// Tells an event that happened at `mono_ns`.
    pub fn emit_at(&self, mono_ns: u64, event: Event) {
        // The log comes last: its disk may be slow, and the controller is waiting.
        let logged = tracing::enabled!(tracing::Level::INFO).then(|| event.clone());
        let mut state = self.state();
        state.last_seq += 1;
        let seq = state.last_seq;
        if state.events.len() == MAX_EVENTS {
            state.events.pop_front();
        }
        state.events.push_back(Stamped { seq, mono_ns, wall_ms: clock::wall_ms(), event });
        drop(state);
        self.0.changed.notify_one();
        if let Some(event) = logged {
            tracing::info!(?event, "event");
        }
    }

    /// Tells how far a rank is, in place of what was told and not sent before.
    pub fn progress(&self, progress: Progress) {
        self.state().progress.insert(progress.slot, progress);
        self.0.changed.notify_one();
    }

    /// Answers a question of the controller.
    pub fn answer(&self, answer: Report) {
        let mut state = self.state();
        if state.answers.len() < MAX_ANSWERS {
            state.answers.push_back(answer);
        }
        drop(state);
        self.0.changed.notify_one();
    }

    /// A connection starts: what was not acked is sent again; answers were for the one before.
    pub fn reconnected(&self) {
        let mut state = self.state();
        state.sent = 0;
        state.answers.clear();
    }

    /// The controller has stored everything up to `seq`.
    pub fn acked(&self, seq: u64) {
        let mut state = self.state();
        while state.events.front().is_some_and(|event| event.seq <= seq) {
            state.events.pop_front();
        }
        drop(state);
        self.0.changed.notify_one();
    }

    /// True when the controller has stored every event.
    pub fn is_acked(&self) -> bool {
        self.state().events.is_empty()
    }

    /// The next things to send over the present connection (`limit` at most), events first and in order.
    pub fn take(&self, limit: usize) -> Vec<Report> {
        let mut state = self.state();
        let sent = state.sent;
        let start = state.events.partition_point(|event| event.seq <= sent);
        let mut reports: Vec<Report> =
            state.events.iter().skip(start).take(limit).cloned().map(Report::Event).collect();
        if let Some(Report::Event(last)) = reports.last() {
            state.sent = last.seq;
        }
        while reports.len() < limit {
            let next = state.progress.pop_first().map(|(_, progress)| Report::Progress(progress));
            match next.or_else(|| state.answers.pop_front()) {
                Some(report) => reports.push(report),
                None => break,
            }
        }
        if reports.len() == limit {
            self.0.changed.notify_one();
        }
        reports
    }

    /// Waits until there may be something to send.
    pub async fn changed(&self) {
        self.0.changed.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seqs(reports: &[Report]) -> Vec<u64> {
        reports.iter().filter_map(|r| if let Report::Event(e) = r { Some(e.seq) } else { None }).collect()
    }

    #[test]
    fn events_are_sent_again_after_a_reconnect_until_they_are_acked() {
        let outbox = Outbox::default();
        for _ in 0..5 {
            outbox.emit(Event::SetupStarted);
        }
        assert_eq!(seqs(&outbox.take(3)), [1, 2, 3]);
        assert_eq!(seqs(&outbox.take(3)), [4, 5]);
        assert!(outbox.take(3).is_empty());
        outbox.acked(2);
        outbox.reconnected();
        assert_eq!(seqs(&outbox.take(9)), [3, 4, 5]);
        outbox.acked(5);
        assert!(outbox.is_acked());
        outbox.emit(Event::SetupStarted);
        assert_eq!(seqs(&outbox.take(9)), [6], "numbers go on without a gap");
    }

    #[test]
    fn only_the_latest_progress_of_a_rank_is_kept() {
        let outbox = Outbox::default();
        for step in 0..1000 {
            let slot = Slot { replica: 0, rank: step as u32 % 2 };
            outbox.progress(Progress {
                slot,
                generation: 1,
                mono_ns: 0,
                step,
                target_step: None,
                quorum_id: None,
                participants: None,
                metrics: BTreeMap::new(),
            });
        }
        let steps: Vec<u64> = outbox
            .take(9)
            .iter()
            .filter_map(|r| if let Report::Progress(p) = r { Some(p.step) } else { None })
            .collect();
        assert_eq!(steps, [998, 999]);
    }

    #[test]
    fn the_outbox_is_bounded() {
        let outbox = Outbox::default();
        for _ in 0..MAX_EVENTS + 10 {
            outbox.emit(Event::SetupStarted);
        }
        assert_eq!(outbox.state().events.len(), MAX_EVENTS);
        assert_eq!(seqs(&outbox.take(1)), [11], "the oldest went");
    }
}
