//! What all parts of one agent share.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::config::Limits;
use super::door::Door;
use super::env::RunEnv;
use super::evict::Lighthouses;
use super::fork_server::ForkServer;
use super::host::Host;
use super::link::Standing;
use super::logs::Logs;
use super::outbox::Outbox;
use super::pidfd::Process;
use super::roll_call::RollCall;
use super::sessions::Sessions;
use super::spawn::{Request, Spawned, Spawner};
use super::store::Store;
use super::tree::Registry;
use crate::Result;
use crate::protocol::GroupSnapshot;

/// Shared by the groups, services and `setup` of an agent.
#[derive(Debug)]
pub struct Context {
    /// Run, secret and address of this agent.
    pub run: RunEnv,
    /// Run folder.
    pub run_dir: PathBuf,
    /// How often this host has been provisioned; 0: never.
    pub attempt: u32,
    /// What is this host's own in plans.
    pub host: Host,
    /// How this agent stands with its controller.
    pub standing: watch::Receiver<Standing>,
    /// Bounds of waits.
    pub limits: Limits,
    /// Random per agent process.
    pub incarnation: u64,
    /// Starts processes.
    pub spawner: Spawner,
    /// Children that have a watcher.
    pub registry: Registry,
    /// Events for the controller.
    pub outbox: Outbox,
    /// Where deaths are told, and heard of.
    pub lighthouses: Lighthouses,
    /// Where ranks reach the lighthouse.
    pub door: Door,
    /// Sessions of this host's ranks.
    pub sessions: Sessions,
    /// Captured output.
    pub logs: Logs,
    /// Rendezvous stores.
    pub store: Store,
    /// What standbys are forked from.
    pub fork_server: ForkServer,
    /// Niceness that processes of the job get.
    pub job_nice: i32,
    /// Niceness of the agent, and of the services that deaths are told to: none of them may wait for ranks.
    pub own_nice: i32,
    /// Limit of open files that processes of the job get; none: the agent's own.
    pub job_files: Option<libc::rlimit>,
    /// Niceness can be lowered again: a process may start niced and become a full one later.
    pub can_renice: bool,
    /// What each group is doing.
    pub groups: Mutex<BTreeMap<u32, GroupSnapshot>>,
    /// Who of the live groups hangs.
    pub roll_call: Mutex<RollCall>,
    /// Spawns so far.
    pub spawns: AtomicU64,
    /// Processes that groups have started and not yet seen the end of: group by spawn id.
    pub owned: Mutex<HashMap<String, (u32, Process)>>,
}

impl Context {
    /// A new mark for the tree of one process, unique in the run, which says whose it is: hosts of a run may share a
    /// kernel. All of an agent are of the same length: a forked process writes its own over that of the fork server.
    pub fn spawn_id(&self) -> String {
        let number = self.spawns.fetch_add(1, Ordering::Relaxed);
        format!("{}:{:016x}-{number:016x}", self.host.name(), self.incarnation)
    }

    /// Another agent may have this one's place by now: there was one to be had, and nobody says that it was not given.
    pub fn may_be_replaced(&self) -> bool {
        self.attempt > 0 && !matches!(*self.standing.borrow(), Standing::Connected)
    }

    /// What each group is doing.
    pub fn groups(&self) -> MutexGuard<'_, BTreeMap<u32, GroupSnapshot>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who of the live groups hangs.
    pub fn roll_call(&self) -> MutexGuard<'_, RollCall> {
        self.roll_call.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all_owned(&self) -> MutexGuard<'_, HashMap<String, (u32, Process)>> {
        self.owned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers a process for the case that its group's own task fails.
    pub fn own(&self, replica: u32, spawn_id: &str, process: &Process) {
        self.all_owned().insert(spawn_id.to_owned(), (replica, process.clone()));
    }

    /// Nothing of that spawn is left.
    pub fn disown(&self, spawn_id: &str) {
        self.all_owned().remove(spawn_id);
    }

    /// What a group has started and not yet seen the end of, by spawn id.
    pub fn owned(&self, replica: u32) -> Vec<(String, Process)> {
        let owned = self.all_owned();
        let of_group = owned.iter().filter(|(_, (of, _))| *of == replica);
        of_group.map(|(spawn_id, (_, process))| (spawn_id.clone(), process.clone())).collect()
    }

    /// Starts a process of the job.
    pub async fn spawn(
        &self,
        argv: Vec<String>,
        env: BTreeMap<String, String>,
        workdir: &str,
        output: OwnedFd,
        passed: Option<OwnedFd>,
        extra_nice: i32,
    ) -> Result<Spawned> {
        let nice = (self.job_nice + extra_nice).min(19);
        let workdir = Some(PathBuf::from(workdir));
        let files = self.job_files;
        let passed = passed.into_iter().collect();
        self.spawner.spawn(Request { argv, env, stdin: None, workdir, output, passed, nice, files }).await
    }
}

/// `Context`, as everybody holds it.
pub type Shared = Arc<Context>;
