//! How often and how fast a group may restart. Pure: the caller brings the time.

use std::collections::VecDeque;

use super::mutant;
use crate::protocol::Recovery;

/// Restarts of one group: those inside the window, and how many in a row brought no progress.
#[derive(Clone, Debug)]
pub struct Budget {
    max_restarts: u32,
    window_s: f64,
    backoff_s: f64,
    backoff_max_s: f64,
    spent: VecDeque<f64>,
    fruitless: u32,
}

/// What to do about a generation that died.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Verdict {
    /// Start the next one after this delay.
    Restart {
        /// Seconds to wait.
        delay_s: f64,
        /// Restarts left in the window, this one counted as spent.
        left: u32,
    },
    /// The budget is spent.
    GiveUp {
        /// Restarts spent in the window.
        restarts: u32,
    },
}

impl Budget {
    /// The budget as earlier agents have left it, at 0 s of the caller's time.
    pub fn new(recovery: &Recovery) -> Self {
        // A moment that cannot be is as bad as now: rather too few restarts are left than too many.
        let ages = recovery.spent_s.iter().map(|age| if age.is_finite() { age.max(0.0) } else { 0.0 });
        let mut spent: Vec<f64> = ages.map(|age| -age).collect();
        spent.sort_by(f64::total_cmp);
        let earlier = u32::try_from(spent.len()).unwrap_or(u32::MAX);
        Self {
            max_restarts: recovery.max_restarts.saturating_add(earlier),
            window_s: recovery.window_s,
            backoff_s: recovery.backoff_s,
            backoff_max_s: recovery.backoff_max_s,
            spent: spent.into(),
            fruitless: 0,
        }
    }

    /// Decides after a death at `now_s`; `progressed` says whether the dead generation had brought progress.
    pub fn decide(&mut self, now_s: f64, progressed: bool) -> Verdict {
        if !mutant::is_on("never_forget") {
            self.spent.retain(|spent| now_s - *spent <= self.window_s);
        }
        let restarts = self.restarts(now_s);
        if restarts >= self.max_restarts && !mutant::is_on("no_budget") {
            return Verdict::GiveUp { restarts };
        }
        if progressed {
            self.fruitless = 0;
        }
        let delay_s = match self.fruitless {
            _ if mutant::is_on("no_backoff") => 0.0,
            0 => 0.0,
            n => {
                (self.backoff_s * 2f64.powi(i32::try_from(n - 1).unwrap_or(i32::MAX))).min(self.backoff_max_s)
            }
        };
        self.fruitless = self.fruitless.saturating_add(1);
        self.spent.push_back(now_s);
        Verdict::Restart { delay_s, left: self.max_restarts.saturating_sub(restarts + 1) }
    }

    /// Restarts spent inside the window that ends at `now_s`.
    pub fn restarts(&self, now_s: f64) -> u32 {
        let forgets = !mutant::is_on("never_forget");
        let inside = self.spent.iter().filter(|spent| now_s - **spent <= self.window_s || !forgets);
        u32::try_from(inside.count()).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::ProgressLimit;

    fn budget(max_restarts: u32) -> Budget {
        left_by_others(max_restarts, Vec::new())
    }

    fn left_by_others(max_restarts: u32, spent_s: Vec<f64>) -> Budget {
        Budget::new(&Recovery {
            max_restarts,
            window_s: 100.0,
            spent_s,
            backoff_s: 1.0,
            backoff_max_s: 5.0,
            startup_limit_s: None,
            progress_limit_s: ProgressLimit::Off,
            grace_s: 1.0,
            standby: 0,
            standby_until: crate::protocol::StandbyUntil::Imports,
            standby_start: crate::protocol::StandbyStart::Fork,
        })
    }

    fn delay(verdict: Verdict) -> f64 {
        match verdict {
            Verdict::Restart { delay_s, .. } => delay_s,
            Verdict::GiveUp { .. } => f64::NAN,
        }
    }

    #[test]
    fn first_restart_is_immediate_and_fruitless_ones_double_up_to_the_longest() {
        let mut budget = budget(10);
        let delays: Vec<f64> = (0..6).map(|i| delay(budget.decide(f64::from(i), false))).collect();
        assert_eq!(delays, [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]);
    }

    #[test]
    fn progress_resets_the_delay_but_not_the_count() {
        let mut budget = budget(4);
        for i in 0..3 {
            budget.decide(f64::from(i), false);
        }
        assert_eq!(budget.decide(3.0, true), Verdict::Restart { delay_s: 0.0, left: 0 });
        assert_eq!(budget.decide(4.0, true), Verdict::GiveUp { restarts: 4 });
    }

    #[test]
    fn restarts_never_exceed_the_budget_inside_any_window() {
        let mut budget = budget(3);
        let mut granted: Vec<f64> = Vec::new();
        let mut now_s = 0.0;
        for i in 0..2000_u32 {
            now_s += f64::from((i * 7919) % 61);
            if matches!(budget.decide(now_s, i % 5 == 0), Verdict::Restart { .. }) {
                granted.push(now_s);
            }
            assert!(granted.iter().filter(|at| now_s - **at <= 100.0).count() <= 3);
        }
        assert!(granted.len() > 100, "a window without failure frees the budget");
    }

    #[test]
    fn what_an_earlier_agent_has_spent_is_given_back_when_it_would_have_been_without_its_death() {
        let mut budget = left_by_others(1, vec![10.0, 90.0]);
        assert_eq!(budget.restarts(0.0), 2);
        assert_eq!(budget.decide(1.0, true), Verdict::Restart { delay_s: 0.0, left: 0 });
        assert_eq!(budget.decide(9.0, true), Verdict::GiveUp { restarts: 3 }, "the older one is 99 s old");
        assert_eq!(budget.decide(11.0, true), Verdict::Restart { delay_s: 0.0, left: 0 });
        assert_eq!(left_by_others(0, vec![0.0]).decide(99.0, true), Verdict::GiveUp { restarts: 1 });
        assert_eq!(left_by_others(0, vec![0.0]).restarts(101.0), 0);
        assert_eq!(left_by_others(0, vec![f64::NAN, -5.0, f64::INFINITY]).restarts(99.0), 3);
    }

    #[test]
    fn no_budget_means_no_restart() {
        assert_eq!(budget(0).decide(0.0, true), Verdict::GiveUp { restarts: 0 });
    }
}
