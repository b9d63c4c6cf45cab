//! What outlives an agent that is killed: its descendants, until their adoptive parent ends them.
//!
//! The agent's process is the child of a keeper (`sky_monarch/keeper.py`), which starts it again. Ranks carry a death
//! signal; what they left behind does not, and may carry no mark of the run either. But whoever descends from the agent
//! is handed to the keeper when the agent dies, so the keeper finds all of it.

use std::collections::{HashMap, HashSet};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::mutant;
use super::tree::{self, Entry};

const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Makes the calling process the one that the descendants of a dead child are handed to.
pub fn adopt_orphans() -> crate::Result<()> {
    tree::become_subreaper()
}

/// Kills and reaps every descendant of this process, for at most `limit`. Returns the pids that were killed, and those
/// that are alive all the same (in an uninterruptible sleep, say).
///
/// For a process without threads and without children that anybody else waits for.
pub fn end_descendants(limit: Duration) -> (Vec<u32>, Vec<u32>) {
    if mutant::is_on("keep_orphans") {
        return (Vec::new(), Vec::new());
    }
    let until = Instant::now() + limit;
    let mut killed: HashSet<(u32, u64)> = HashSet::new();
    let mut looks_empty = 0;
    let left = loop {
        reap();
        let left = descendants(&tree::table());
        if left.is_empty() {
            // One look is no snapshot: a process can fork behind it and end before it. Two in a row are.
            looks_empty += 1;
            if looks_empty == 2 {
                break left;
            }
            continue;
        }
        looks_empty = 0;
        if Instant::now() >= until {
            break left;
        }
        for entry in &left {
            if killed.insert((entry.pid, entry.start)) {
                tree::signal(entry, libc::SIGKILL);
            }
        }
        sleep(LOOK_AGAIN);
    };
    let mut killed: Vec<u32> = killed.into_iter().map(|(pid, _)| pid).collect();
    killed.sort_unstable();
    (killed, left.iter().map(|entry| entry.pid).collect())
}

fn reap() {
    // SAFETY: children of this process that nobody else waits for; their status is not wanted.
    while unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) } > 0 {}
}

/// Live descendants of this process.
fn descendants(table: &[Entry]) -> Vec<Entry> {
    let mut children: HashMap<u32, Vec<&Entry>> = HashMap::new();
    for entry in table {
        children.entry(entry.ppid).or_default().push(entry);
    }
    let mut seen: HashSet<u32> = HashSet::from([std::process::id()]);
    let (mut open, mut found) = (vec![std::process::id()], Vec::new());
    while let Some(pid) = open.pop() {
        for entry in children.get(&pid).into_iter().flatten() {
            if seen.insert(entry.pid) {
                open.push(entry.pid);
                if entry.is_alive() {
                    found.push(**entry);
                }
            }
        }
    }
    found
}
