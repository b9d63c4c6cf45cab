//! Whether a rank with a session still commits: the watchdog's limits. Pure: the caller brings the time.

use std::collections::VecDeque;

use crate::protocol::{Cause, ProgressLimit, Recovery};

/// Shortest limit that `auto` ever sets.
const AUTO_MIN_S: f64 = 60.0;
/// `auto` allows this many median steps.
const AUTO_STEPS: f64 = 10.0;
/// Steps the median is taken over.
const REMEMBERED: usize = 64;

/// The commits of one rank of one generation.
#[derive(Clone, Debug)]
pub struct Watchdog {
    since_s: f64,
    /// Of the last commit.
    committed_s: Option<f64>,
    paused_until_s: Option<f64>,
    /// The last that it said is that it waits for others.
    waits: bool,
    intervals_s: VecDeque<f64>,
}

impl Watchdog {
    /// Nothing committed yet; the generation started at `now_s`.
    pub fn new(now_s: f64) -> Self {
        Self {
            since_s: now_s,
            committed_s: None,
            paused_until_s: None,
            waits: false,
            intervals_s: VecDeque::new(),
        }
    }

    /// A step was committed.
    pub fn committed(&mut self, now_s: f64) {
        // Waits for other groups are told as pauses, and belong to the step: the median forgets the odd evaluation.
        if let Some(last_s) = self.committed_s.replace(now_s) {
            if self.intervals_s.len() == REMEMBERED {
                self.intervals_s.pop_front();
            }
            self.intervals_s.push_back(now_s - last_s);
        }
        (self.paused_until_s, self.waits) = (None, false);
        self.since_s = now_s;
    }

    /// No commit is expected for `limit_s`, since others are waited for (`waits`) or for another reason; 0 ends the pause.
    pub fn pause(&mut self, now_s: f64, limit_s: f64, waits: bool) {
        self.paused_until_s = (limit_s > 0.0).then_some(now_s + limit_s);
        self.waits = waits && limit_s > 0.0;
        self.since_s = now_s;
    }

    /// Whether the last that it said is that it waits for others.
    pub const fn waits(&self) -> bool {
        self.waits
    }

    /// Starts the current wait anew: the watcher itself was away, so the silence proves nothing.
    pub fn refresh(&mut self, now_s: f64) {
        self.since_s = self.since_s.max(now_s);
        self.paused_until_s = self.paused_until_s.map(|until_s| until_s.max(now_s));
    }

    /// The limit that is exceeded at `now_s`, if one is.
    pub fn verdict(&self, now_s: f64, recovery: &Recovery) -> Option<Cause> {
        self.overdue(now_s, recovery, 1.0)
    }

    /// The same for this `part` of the limit for a step; the limit for the first one stays whole.
    pub fn overdue(&self, now_s: f64, recovery: &Recovery, part: f64) -> Option<Cause> {
        if self.committed_s.is_none() {
            let limit_s = recovery.startup_limit_s?;
            return (now_s > self.since_s.max(self.paused_until_s.unwrap_or(0.0)) + limit_s)
                .then_some(Cause::StartupLimit { limit_s });
        }
        let limit_s = match recovery.progress_limit_s {
            ProgressLimit::Off => return None,
            ProgressLimit::Seconds(limit_s) => limit_s,
            ProgressLimit::Auto => self.auto_limit_s(),
        };
        let from_s = self.paused_until_s.unwrap_or(self.since_s);
        (now_s > from_s + part * limit_s).then_some(Cause::ProgressLimit { limit_s })
    }

    fn auto_limit_s(&self) -> f64 {
        let mut sorted: Vec<f64> = self.intervals_s.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).map_or(AUTO_MIN_S, |median_s| (AUTO_STEPS * median_s).max(AUTO_MIN_S))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recovery(progress_limit_s: ProgressLimit) -> Recovery {
        Recovery {
            max_restarts: 3,
            window_s: 100.0,
            spent_s: Vec::new(),
            backoff_s: 1.0,
            backoff_max_s: 5.0,
            startup_limit_s: Some(30.0),
            progress_limit_s,
            grace_s: 1.0,
            standby: 0,
            standby_until: crate::protocol::StandbyUntil::Imports,
            standby_start: crate::protocol::StandbyStart::Fork,
        }
    }

    #[test]
    fn startup_and_progress_have_their_own_limits() {
        let recovery = recovery(ProgressLimit::Seconds(5.0));
        let mut dog = Watchdog::new(0.0);
        assert_eq!(dog.verdict(29.0, &recovery), None);
        assert_eq!(dog.verdict(31.0, &recovery), Some(Cause::StartupLimit { limit_s: 30.0 }));
        dog.committed(31.0);
        assert_eq!(dog.verdict(35.0, &recovery), None);
        assert_eq!(dog.verdict(36.5, &recovery), Some(Cause::ProgressLimit { limit_s: 5.0 }));
    }

    #[test]
    fn auto_is_ten_median_steps_and_never_under_a_minute() {
        let recovery = recovery(ProgressLimit::Auto);
        let mut dog = Watchdog::new(0.0);
        for i in 0..20 {
            dog.committed(f64::from(i) * 20.0);
        }
        assert_eq!(dog.verdict(380.0 + 199.0, &recovery), None);
        assert_eq!(dog.verdict(380.0 + 201.0, &recovery), Some(Cause::ProgressLimit { limit_s: 200.0 }));
        let mut quick = Watchdog::new(0.0);
        quick.committed(0.1);
        quick.committed(0.2);
        assert_eq!(quick.verdict(60.0, &recovery), None);
        assert_eq!(quick.verdict(60.3, &recovery), Some(Cause::ProgressLimit { limit_s: 60.0 }));
    }

    #[test]
    fn a_pause_holds_the_limit_off_and_its_end_starts_a_fresh_one() {
        let recovery = recovery(ProgressLimit::Seconds(5.0));
        let mut dog = Watchdog::new(0.0);
        dog.committed(1.0);
        dog.pause(2.0, 100.0, false);
        assert_eq!(dog.verdict(101.0, &recovery), None);
        dog.pause(101.0, 0.0, false);
        assert_eq!(dog.verdict(105.0, &recovery), None);
        assert!(dog.verdict(107.0, &recovery).is_some());
    }

    #[test]
    fn a_rank_that_keeps_saying_that_it_waits_outlives_the_one_that_says_nothing() {
        let recovery = recovery(ProgressLimit::Seconds(5.0));
        let (mut waits, mut hangs) = (Watchdog::new(0.0), Watchdog::new(0.0));
        waits.committed(1.0);
        hangs.committed(1.0);
        for now_s in [2.0, 3.0, 4.0, 5.0, 6.0, 7.0] {
            waits.pause(now_s, 3.0, true);
        }
        assert!(hangs.verdict(7.0, &recovery).is_some());
        assert_eq!(waits.verdict(7.0, &recovery), None);
        assert!(waits.verdict(15.5, &recovery).is_some(), "its word does not hold for ever");
    }

    #[test]
    fn the_last_word_is_that_it_waits_until_it_says_something_else() {
        let recovery = recovery(ProgressLimit::Seconds(4.0));
        let mut dog = Watchdog::new(0.0);
        dog.committed(1.0);
        assert!(!dog.waits());
        dog.pause(2.0, 3.0, true);
        assert!(dog.waits() && dog.overdue(5.0, &recovery, 0.75).is_none());
        assert!(
            dog.waits()
                && dog.overdue(8.1, &recovery, 0.75).is_some()
                && dog.verdict(8.1, &recovery).is_none()
        );
        dog.pause(8.5, 60.0, false);
        assert!(!dog.waits(), "an evaluation is no wait");
        dog.pause(9.0, 3.0, true);
        dog.committed(9.5);
        assert!(!dog.waits());
    }

    #[test]
    fn steps_that_contain_waits_still_count_in_full() {
        let recovery = recovery(ProgressLimit::Auto);
        let mut dog = Watchdog::new(0.0);
        for i in 0..20 {
            dog.pause(f64::from(i) * 20.0 - 1.0, 3.0, false);
            dog.committed(f64::from(i) * 20.0);
        }
        assert_eq!(dog.verdict(380.0 + 199.0, &recovery), None);
        assert!(dog.verdict(380.0 + 201.0, &recovery).is_some());
    }

    #[test]
    fn off_never_fires() {
        let mut dog = Watchdog::new(0.0);
        dog.committed(1.0);
        assert_eq!(dog.verdict(1e9, &recovery(ProgressLimit::Off)), None);
    }
}
