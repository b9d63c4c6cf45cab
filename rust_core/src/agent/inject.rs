//! Rehearsed faults: each is carried out once in a run, also where the group or the agent is started again.

use std::collections::HashSet;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

use crate::protocol::{Injection, Trigger};

/// The faults of one group that are still to come.
#[derive(Debug)]
pub struct Rehearsal {
    left: Vec<Injection>,
    record: PathBuf,
}

impl Rehearsal {
    /// Those of `injections` that the file `record` does not name as carried out.
    pub fn new(injections: &[Injection], record: PathBuf) -> Self {
        let text = std::fs::read_to_string(&record).unwrap_or_default();
        let fired: HashSet<u32> = text.lines().filter_map(|line| line.trim().parse().ok()).collect();
        let left = injections.iter().filter(|injection| !fired.contains(&injection.id)).cloned().collect();
        Self { left, record }
    }

    /// Takes the faults that are due for `rank`: it has committed `step`, and the group's first generation started
    /// `age_s` ago. They are recorded before anybody can carry them out.
    pub fn due(&mut self, rank: u32, step: Option<u64>, age_s: f64) -> Vec<Injection> {
        let is_due = |injection: &Injection| {
            injection.slot.rank == rank
                && match injection.trigger {
                    Trigger::Step(wanted) => step.is_some_and(|step| step >= wanted),
                    Trigger::AfterS(after_s) => age_s >= after_s,
                }
        };
        let due: Vec<Injection> = self.left.iter().filter(|injection| is_due(injection)).cloned().collect();
        self.left.retain(|injection| !is_due(injection));
        due.into_iter().filter(|injection| self.record(injection.id)).collect()
    }

    /// A fault that cannot be recorded is not carried out: it could come again in a loop.
    fn record(&self, id: u32) -> bool {
        let file = OpenOptions::new().create(true).append(true).open(&self.record);
        let written = file.and_then(|mut file| file.write_all(format!("{id}\n").as_bytes()));
        if let Err(cause) = &written {
            tracing::error!(%cause, id, "the injection is skipped, its record cannot be written");
        }
        written.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Fault, Slot};

    #[test]
    fn each_fault_is_due_once_also_for_a_new_agent() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let record = folder.path().join("injected");
        let slot = Slot { replica: 0, rank: 1 };
        let injections = [
            Injection { id: 1, slot, fault: Fault::Kill, trigger: Trigger::Step(30) },
            Injection { id: 2, slot, fault: Fault::Hang, trigger: Trigger::AfterS(5.0) },
        ];
        let mut rehearsal = Rehearsal::new(&injections, record.clone());
        assert!(rehearsal.due(0, Some(99), 99.0).is_empty(), "another rank");
        assert!(rehearsal.due(1, Some(29), 1.0).is_empty(), "too early");
        assert_eq!(rehearsal.due(1, Some(31), 1.0), injections[..1]);
        assert!(rehearsal.due(1, Some(40), 1.0).is_empty(), "once");
        let mut again = Rehearsal::new(&injections, record);
        assert_eq!(again.due(1, Some(99), 99.0), injections[1..]);
    }
}
