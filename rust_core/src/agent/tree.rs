//! Whole process trees: who belongs to a generation, and how all of it is ended.
//!
//! The agent is a child subreaper, so whatever a rank leaves behind becomes a child of the agent, however often it
//! forked and whatever session it made. It is told apart by the marker that it inherited in its environment.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{mutant, pidfd};

/// Marks every process of a run.
pub const RUN_ID: &str = "SKY_MONARCH_RUN_ID";
/// Marks every process that descends from one spawn of the agent.
pub const SPAWN_ID: &str = "SKY_MONARCH_SPAWN_ID";

/// Time between two looks at a tree that is ending.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Looks that wait for processes inside of `execve`, which takes milliseconds.
const MAX_UNCLEAR_LOOKS: u32 = 100;

/// Pids of the agent's own children: those have a watcher that reaps them.
#[derive(Clone, Debug, Default)]
pub struct Registry(Arc<Mutex<HashSet<u32>>>);

impl Registry {
    /// Works on the set while no child is being made or reaped.
    pub fn with_lock<T>(&self, work: impl FnOnce(&mut HashSet<u32>) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// One line of the process table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its pid.
    pub pid: u32,
    /// Its parent.
    pub ppid: u32,
    /// Its session.
    pub sid: u32,
    /// `R`, `S`, `T`, `Z`…
    pub state: u8,
    /// Start time in ticks since boot: tells a reused pid apart.
    pub start: u64,
}

impl Entry {
    /// Reads one process; none when it is gone.
    pub fn read(pid: u32) -> Option<Self> {
        let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
        // The name (in parentheses) may hold anything, also spaces and parentheses: count from its end.
        let end = text.iter().rposition(|byte| *byte == b')')?;
        let rest = std::str::from_utf8(text.get(end + 2..)?).ok()?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        Some(Self {
            pid,
            state: *fields.first()?.as_bytes().first()?,
            ppid: fields.get(1)?.parse().ok()?,
            sid: fields.get(3)?.parse().ok()?,
            start: fields.get(19)?.parse().ok()?,
        })
    }

    /// The signal that asks it to end: TERM, or KILL where it is stopped. A stopped process would sleep through its grace
    /// time, and must not wake up to a world that has gone on without it.
    pub fn last_signal(&self) -> i32 {
        if self.state == b'T' && !mutant::is_on("wait_for_stopped") { libc::SIGKILL } else { libc::SIGTERM }
    }

    /// Whether it runs: a zombie does not.
    pub const fn is_alive(&self) -> bool {
        !matches!(self.state, b'Z' | b'X')
    }
}

/// The process table.
pub fn table() -> Vec<Entry> {
    let Ok(folder) = fs::read_dir("/proc") else { return Vec::new() };
    folder.flatten().filter_map(|entry| Entry::read(entry.file_name().to_str()?.parse().ok()?)).collect()
}

/// The value of a variable in the environment that a process was started with.
pub(crate) fn variable(pid: u32, name: &str) -> Option<String> {
    let environ = fs::read(format!("/proc/{pid}/environ")).ok()?;
    environ.split(|byte| *byte == 0).find_map(|pair| {
        let value = pair.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
        Some(String::from_utf8_lossy(value).into_owned())
    })
}

/// Whether a process is inside of `execve`: its old environment is gone, its new one not yet there.
fn is_in_exec(pid: u32) -> bool {
    let is_empty = |name: &str| fs::read(format!("/proc/{pid}/{name}")).is_ok_and(|bytes| bytes.is_empty());
    // Kernel threads have neither environment nor arguments for good, but no program either.
    is_empty("environ") && is_empty("cmdline") && fs::read_link(format!("/proc/{pid}/exe")).is_ok()
}

/// Which processes are meant.
#[derive(Clone, Debug)]
pub enum Family {
    /// What descends from these spawns of the agent: pid (unless reaped) and session by spawn id.
    Spawns(HashMap<String, Root>),
    /// Every descendant of the agent that is not one of these children of its.
    AllBut(HashSet<u32>),
    /// Every process of this host in this run that does not descend from this agent: a dead agent's.
    Strays {
        /// The run.
        run_id: String,
        /// Another host of it may be on the same kernel: several of a rehearsal, two allocations of one node.
        host: String,
    },
}

/// A process that the agent started, as the root of a tree.
#[derive(Clone, Copy, Debug)]
pub struct Root {
    /// Its pid, which is also the id of its session.
    pub pid: u32,
    /// It was not reaped yet, so the pid is still its own.
    pub alive: bool,
}

/// One look at a family.
#[derive(Debug, Default)]
pub struct Look {
    /// Its live members, by pid.
    pub members: BTreeMap<u32, Entry>,
    /// Some process could not be told to belong or not, just now.
    pub unclear: bool,
}

/// The live members of a family, looked for beside the runtime: the process table may be long, and deaths are told
/// meanwhile.
pub async fn look(family: Family, registry: &Registry) -> Look {
    let registry = registry.clone();
    tokio::task::spawn_blocking(move || look_at(table(), &family, &registry)).await.unwrap_or_default()
}

fn look_at(table: Vec<Entry>, family: &Family, registry: &Registry) -> Look {
    let own = std::process::id();
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in &table {
        children.entry(entry.ppid).or_default().push(entry.pid);
    }
    let tracked = registry.with_lock(|pids| pids.clone());
    let mut unclear = false;
    let seeds: Vec<u32> = match family {
        Family::Spawns(roots) => {
            let alive = roots.values().filter(|root| root.alive && tracked.contains(&root.pid));
            let mut seeds: Vec<u32> = alive.map(|root| root.pid).collect();
            for entry in &table {
                if entry.ppid != own || tracked.contains(&entry.pid) || !entry.is_alive() {
                    continue;
                }
                if roots.values().any(|root| root.pid == entry.sid)
                    || variable(entry.pid, SPAWN_ID).is_some_and(|id| roots.contains_key(&id))
                {
                    seeds.push(entry.pid);
                } else {
                    unclear |= is_in_exec(entry.pid);
                }
            }
            seeds
        }
        Family::AllBut(spared) => table
            .iter()
            .filter(|entry| entry.ppid == own && !spared.contains(&entry.pid))
            .map(|e| e.pid)
            .collect(),
        Family::Strays { run_id, host } => {
            let ours = descendants(&[own], &children);
            let above = ancestors(own, &table);
            // A stray inside of `execve` is missed by one look; the descendants of a dead agent had time to settle.
            let strays = table.iter().filter(|entry| {
                !ours.contains(&entry.pid)
                    && !above.contains(&entry.pid)
                    && variable(entry.pid, SPAWN_ID).is_some_and(|id| is_of(&id, host))
                    && variable(entry.pid, RUN_ID).as_ref() == Some(run_id)
            });
            strays.map(|entry| entry.pid).collect()
        }
    };
    let mut all = descendants(&seeds, &children);
    all.remove(&own);
    let members = table.into_iter().filter(|entry| all.contains(&entry.pid) && entry.is_alive());
    Look { members: members.map(|entry| (entry.pid, entry)).collect(), unclear }
}

/// Whether a mark is of an agent of that host.
fn is_of(spawn_id: &str, host: &str) -> bool {
    mutant::is_on("sweep_all_hosts") || spawn_id.rsplit_once(':').is_some_and(|(of, _)| of == host)
}

fn descendants(seeds: &[u32], children: &HashMap<u32, Vec<u32>>) -> HashSet<u32> {
    let mut found: HashSet<u32> = HashSet::new();
    let mut open = seeds.to_vec();
    while let Some(pid) = open.pop() {
        if found.insert(pid) {
            open.extend(children.get(&pid).into_iter().flatten());
        }
    }
    found
}

fn ancestors(pid: u32, table: &[Entry]) -> HashSet<u32> {
    let parents: HashMap<u32, u32> = table.iter().map(|entry| (entry.pid, entry.ppid)).collect();
    let mut found = HashSet::new();
    let mut next = Some(pid);
    while let Some(pid) = next.filter(|pid| *pid != 0 && found.insert(*pid)) {
        next = parents.get(&pid).copied();
    }
    found
}

/// Signals one process of the table, unless its pid has become somebody else's.
pub fn signal(entry: &Entry, signal: i32) {
    let Ok(pidfd) = pidfd::open(entry.pid) else { return };
    if Entry::read(entry.pid).is_some_and(|now| now.start == entry.start) {
        let name = if signal == libc::SIGKILL { "KILL" } else { "TERM" };
        tracing::info!(pid = entry.pid, signal = name, "ends a process");
        let _ = pidfd::signal(&pidfd, signal);
    }
}

/// Ends a family: TERM, wait until `term_until`, KILL, wait for `kill_s`. Returns every pid that was signalled, and
/// those that are alive all the same. `family` is asked again before each look: its roots may have been reaped.
pub async fn end(
    family: impl Fn() -> Family,
    registry: &Registry,
    term_until: impl Fn() -> Instant,
    kill_s: f64,
) -> (Vec<u32>, Vec<u32>) {
    let mut told: HashMap<(u32, u64), i32> = HashMap::new();
    let mut kill_from: Option<Instant> = None;
    let (mut looks_empty, mut unclear_looks) = (0, 0);
    loop {
        let (family, ours) = (family(), registry.clone());
        let looking = tokio::task::spawn_blocking(move || {
            let table = table();
            reap(&table, &ours);
            look_at(table, &family, &ours)
        });
        // It fails only where the runtime ends: what is unclear is looked at again.
        let unseen = Look { unclear: true, ..Look::default() };
        let Look { members: left, unclear } = looking.await.unwrap_or(unseen);
        let signalled = |told: &HashMap<(u32, u64), i32>| {
            let mut pids: Vec<u32> = told.keys().map(|(pid, _)| *pid).collect();
            pids.sort_unstable();
            pids
        };
        if left.is_empty() && unclear && unclear_looks < MAX_UNCLEAR_LOOKS {
            unclear_looks += 1;
            sleep(LOOK_AGAIN).await;
            continue;
        }
        if left.is_empty() {
            // One look is no snapshot: a process can fork behind it and end before it. Two in a row are.
            looks_empty += 1;
            if looks_empty == 2 {
                return (signalled(&told), Vec::new());
            }
            continue;
        }
        looks_empty = 0;
        let now = Instant::now();
        if now >= term_until() {
            let since = *kill_from.get_or_insert(now);
            if now.duration_since(since).as_secs_f64() > kill_s {
                return (signalled(&told), left.into_keys().collect());
            }
        }
        for entry in left.values() {
            let wanted = if kill_from.is_some() || mutant::is_on("kill_first") {
                libc::SIGKILL
            } else {
                entry.last_signal()
            };
            let last = told.entry((entry.pid, entry.start)).or_insert(0);
            if *last != wanted {
                *last = wanted;
                signal(entry, wanted);
            }
        }
        sleep(LOOK_AGAIN).await;
    }
}

/// Reaps dead children that have no watcher: what the agent adopted. Returns how many.
pub fn reap_adopted(registry: &Registry) -> usize {
    reap(&table(), registry)
}

fn reap(table: &[Entry], registry: &Registry) -> usize {
    let own = std::process::id();
    let dead: Vec<u32> =
        table.iter().filter(|e| e.ppid == own && !e.is_alive()).map(|entry| entry.pid).collect();
    // Under the lock no child can be made that is not registered yet. The table is read before: deaths wait for the lock.
    registry.with_lock(|tracked| {
        let adopted =
            dead.iter().filter(|pid| !tracked.contains(pid)).filter_map(|pid| i32::try_from(*pid).ok());
        // SAFETY: a zombie child that nobody else waits for; the status is not wanted.
        adopted
            .filter(|pid| unsafe { libc::waitpid(*pid, std::ptr::null_mut(), libc::WNOHANG) } == *pid)
            .count()
    })
}

/// Makes the calling process the one that orphans below it are handed to.
pub fn become_subreaper() -> crate::Result<()> {
    nix::sys::prctl::set_child_subreaper(true)
        .map_err(|errno| crate::Error::io("become a child subreaper", errno.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_entry_is_read_whatever_the_name_of_the_process() {
        let entry = Entry::read(std::process::id()).expect("this process has an entry");
        assert_eq!(entry.ppid, std::os::unix::process::parent_id());
        assert!(entry.is_alive() && entry.start > 0);
    }

    #[test]
    fn a_cycle_in_the_table_ends_the_walk() {
        let children = HashMap::from([(1, vec![2]), (2, vec![3, 1]), (3, vec![])]);
        assert_eq!(descendants(&[1], &children), HashSet::from([1, 2, 3]));
    }
}
