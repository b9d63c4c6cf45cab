//! What the agent has to tell the controller: kept until it is acked, so that nothing waits for the controller.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::clock;
use crate::protocol::{Event, Progress, Report, Slot, Stamped};

/// Events kept for a controller that is away; the oldest go first beyond it.
const MAX_EVENTS: usize = 65_536;
/// Answers kept; a controller that asks for more at once asks again.
const MAX_ANSWERS: usize = 256;
/// How often the progress of a rank is told while nothing else happens. Each commit on its own would cost controller and
/// agent a millisecond of processor time a step and group, which the ranks of a small host pay for.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

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
    /// What was told of a rank last, and when.
    told: BTreeMap<Slot, Told>,
    answers: VecDeque<Report>,
}

#[derive(Debug)]
struct Told {
    at: Instant,
    generation: u64,
    quorum_id: Option<i64>,
}

impl State {
    fn unsent(&self) -> usize {
        self.events.partition_point(|event| event.seq <= self.sent)
    }

    /// From when on the waiting progress of a rank is told: at once where it is in another quorum than it was.
    fn due(&self, progress: &Progress) -> Option<Instant> {
        let told = self.told.get(&progress.slot)?;
        let same = (told.generation, told.quorum_id) == (progress.generation, progress.quorum_id);
        same.then(|| told.at + PROGRESS_EVERY)
    }

    /// Progress that is told now: with events all of it, so that it is never later than they are.
    fn take_progress(&mut self, limit: usize, now: Instant, with_events: bool) -> Vec<Report> {
        let is_due = |progress: &Progress| with_events || self.due(progress).is_none_or(|due| due <= now);
        let slots: Vec<Slot> =
            self.progress.values().filter(|one| is_due(one)).map(|one| one.slot).take(limit).collect();
        let taken: Vec<Progress> = slots.iter().filter_map(|slot| self.progress.remove(slot)).collect();
        for progress in &taken {
            let &Progress { generation, quorum_id, .. } = progress;
            self.told.insert(progress.slot, Told { at: now, generation, quorum_id });
        }
        taken.into_iter().map(Report::Progress).collect()
    }
}

impl Outbox {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells an event that happens now; its sequence number.
    pub fn emit(&self, event: Event) -> u64 {
        self.emit_at(clock::mono_ns(), event)
    }

    /// Tells an event that happened at `mono_ns`; its sequence number.
    pub fn emit_at(&self, mono_ns: u64, event: Event) -> u64 {
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
        seq
    }

    /// True when the controller has stored the event of that number.
    pub fn is_stored(&self, seq: u64) -> bool {
        self.state().events.front().is_none_or(|event| event.seq > seq)
    }

    /// Tells how far a rank is, in place of what was told and not sent before; see [`PROGRESS_EVERY`].
    pub fn progress(&self, progress: Progress) {
        let mut state = self.state();
        let now = Instant::now();
        // Who sleeps until the first of those that wait need not know of another one.
        let wake = state.progress.is_empty() || state.due(&progress).is_none_or(|due| due <= now);
        state.progress.insert(progress.slot, progress);
        drop(state);
        if wake {
            self.0.changed.notify_one();
        }
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
        state.told.clear();
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
        let start = state.unsent();
        let mut reports: Vec<Report> =
            state.events.iter().skip(start).take(limit).cloned().map(Report::Event).collect();
        if let Some(Report::Event(last)) = reports.last() {
            state.sent = last.seq;
        }
        let (room, with_events) = (limit - reports.len(), !reports.is_empty());
        reports.extend(state.take_progress(room, Instant::now(), with_events));
        while reports.len() < limit {
            match state.answers.pop_front() {
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
        let due = {
            let state = self.state();
            let now = Instant::now();
            state.progress.values().map(|progress| state.due(progress).unwrap_or(now)).min()
        };
        match due {
            Some(due) => tokio::select! {
                () = self.0.changed.notified() => {}
                () = sleep_until(due) => {}
            },
            None => self.0.changed.notified().await,
        }
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

    fn progress(step: u64, quorum_id: i64) -> Progress {
        Progress {
            slot: Slot { replica: 0, rank: 0 },
            generation: 1,
            mono_ns: 0,
            step,
            target_step: None,
            quorum_id: Some(quorum_id),
            participants: None,
            metrics: BTreeMap::new(),
        }
    }

    fn steps(reports: &[Report]) -> Vec<u64> {
        reports.iter().filter_map(|r| if let Report::Progress(p) = r { Some(p.step) } else { None }).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn commits_of_one_quorum_are_told_ten_times_a_second_and_none_is_the_last_that_is_not() {
        let outbox = Outbox::default();
        let mut told = Vec::new();
        for step in 0..100 {
            outbox.progress(progress(step, 7));
            told.extend(steps(&outbox.take(9)));
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(told, [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]);
        let began = Instant::now();
        outbox.changed().await; // it was told of something, once
        while steps(&outbox.take(9)).is_empty() {
            outbox.changed().await;
            assert!(began.elapsed() <= PROGRESS_EVERY, "the last commit is told by itself");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_quorum_an_event_and_a_new_connection_hold_nothing_back() {
        let outbox = Outbox::default();
        let next = |step, quorum_id| {
            outbox.progress(progress(step, quorum_id));
            steps(&outbox.take(9))
        };
        assert_eq!(next(1, 7), [1]);
        assert!(next(2, 7).is_empty());
        assert_eq!(next(3, 8), [3], "of another quorum");
        assert!(next(4, 8).is_empty());
        outbox.emit(Event::SetupStarted);
        assert_eq!(next(5, 8), [5], "not later than an event");
        assert!(next(6, 8).is_empty());
        outbox.reconnected();
        assert_eq!(next(7, 8), [7]);
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
