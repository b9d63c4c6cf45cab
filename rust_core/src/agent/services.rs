//! The head's own services, controller and lighthouse: started again whenever they end.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::config::Service;
use super::context::Shared;
use super::mutant;
use super::pidfd::Process;
use super::ports;
use super::spare::{SPARE_ENV, Spares};
use super::spawn::{FIRST_PASSED, Request};
use super::tree::{self, Entry, Family, RUN_ID, Root, SPAWN_ID};
use crate::wire::inherited::{LISTEN_FD_ENV, LISTEN_FDS_ENV};
use crate::{Error, ErrorKind, Result};

const FIRST_DELAY: Duration = Duration::from_millis(50);
const LONGEST_DELAY: Duration = Duration::from_secs(5);
/// A service that ran this long is started again at once: everybody waits for it, and it does not fail in a loop.
const STEADY: Duration = Duration::from_secs(2);
/// Time between TERM and KILL.
const GRACE: Duration = Duration::from_secs(10);
/// A service that is stopped (SIGSTOP, a debugger) for so long is replaced by its spare: everybody waits for it.
const STOPPED_LIMIT: Duration = Duration::from_secs(5);
/// Between two looks at whether a service is stopped.
const STOPPED_POLL: Duration = Duration::from_secs(1);
/// Dead lives whose remains may be ended at a time, beside the one that lives.
const MAX_ENDING: usize = 4;

/// The services of one agent.
#[derive(Debug, Default)]
pub struct Services {
    running: Vec<Running>,
}

#[derive(Debug)]
struct Running {
    name: String,
    stop: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
}

impl Services {
    /// Binds the addresses of all services, then starts them all.
    ///
    /// `is_known`: hosts elsewhere know the ports, so an agent that is started in place of this one needs the same.
    pub fn start(context: &Shared, services: &[Service], is_known: bool) -> Result<Self> {
        let mut addresses = BTreeMap::new();
        let mut bound = Vec::new();
        for service in services {
            let file = is_known.then(|| service.pid_file.with_extension("ports"));
            let listeners = ports::bind(service, file.as_deref())?;
            addresses.extend(ports::variables(service, &listeners)?);
            // TorchFT's lighthouse binds for itself: it gets a number that was free a moment ago.
            let is_reserved = service.listen_env.as_deref() == Some("reserve");
            let sockets: Vec<_> = listeners.into_iter().filter(|_| !is_reserved).map(OwnedFd::from).collect();
            bound.push((service.clone(), sockets));
        }
        let addresses = Arc::new(addresses);
        let running = bound.into_iter().map(|(service, sockets)| {
            let (stop, asked) = watch::channel(false);
            let name = service.name.clone();
            let context = Arc::clone(context);
            let starter = Starter { context, service, sockets, addresses: Arc::clone(&addresses) };
            Running { name, stop, task: tokio::spawn(Arc::new(starter).keep(asked)) }
        });
        Ok(Self { running: running.collect() })
    }

    /// Ends services (TERM, wait, KILL): those that `wanted` names.
    pub async fn stop(&mut self, wanted: impl Fn(&str) -> bool) {
        let (ending, staying): (Vec<_>, Vec<_>) =
            self.running.drain(..).partition(|service| wanted(&service.name));
        self.running = staying;
        for service in &ending {
            service.stop.send_replace(true);
        }
        for service in ending {
            let _ = service.task.await;
        }
    }
}

/// How processes of one service are started.
pub(super) struct Starter {
    pub(super) context: Shared,
    pub(super) service: Service,
    sockets: Vec<OwnedFd>,
    addresses: Arc<BTreeMap<String, String>>,
}

/// One process of a service.
pub(super) struct Life {
    pub(super) process: Process,
    spawn_id: String,
}

impl Starter {
    /// Keeps the service alive until it is told to stop.
    async fn keep(self: Arc<Self>, mut stop: watch::Receiver<bool>) {
        let mut delay = Duration::ZERO;
        let mut remains = JoinSet::new();
        let spares = self.service.spare.then(|| Spares::start(Arc::clone(&self)));
        loop {
            let started = Instant::now();
            let spare = spares.as_ref().and_then(Spares::take);
            let promoted = spare.is_some();
            let next = match spare {
                Some(life) => Ok(life),
                None => self.spawn(None).await,
            };
            match next {
                Ok(life) => {
                    // It runs, and must stay known to its keeper whatever the disk says: forgotten, it would run
                    // beside the next.
                    if let Err(error) = write_pid_file(&self.service.pid_file, life.process.pid) {
                        let service = &self.service.name;
                        tracing::warn!(service, %error, "nobody can look up the pid of a service");
                        if mutant::is_on("forget_unnamed") {
                            sleep(FIRST_DELAY).await;
                            continue;
                        }
                    }
                    let mut exited = tokio::select! {
                        biased;
                        exited = life.process.exited() => Some(exited),
                        _ = stop.wait_for(|stop| *stop) => None,
                        () = self.stopped_for_good(life.process.pid), if spares.is_some() => None,
                    };
                    if exited.is_none() && !*stop.borrow() {
                        let _ = life.process.signal(libc::SIGKILL);
                        exited = Some(life.process.exited().await);
                    }
                    let _ = fs::remove_file(&self.service.pid_file);
                    if let Some(exited) = exited {
                        tracing::warn!(service = self.service.name, exit = ?exited.exit, promoted, "a service ended");
                        // What it left behind takes its time to end (a helper with torch: 0.1 s), and holds nothing
                        // that the next one needs: nobody waits for it.
                        let starter = Arc::clone(&self);
                        remains.spawn(async move { starter.end(&life).await });
                        while remains.len() > MAX_ENDING {
                            let _ = remains.join_next().await;
                        }
                    } else {
                        self.end(&life).await;
                    }
                }
                Err(error) => {
                    tracing::error!(service = self.service.name, %error, "a service does not start")
                }
            }
            delay = match started.elapsed() {
                lived if lived >= STEADY => Duration::ZERO,
                _ => (delay * 2).clamp(FIRST_DELAY, LONGEST_DELAY),
            };
            if mutant::is_on("forget_service") {
                delay = LONGEST_DELAY * 1000;
            }
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => break,
                () = sleep(delay) => {}
            }
        }
        if let Some(spares) = spares {
            spares.end().await;
        }
        while remains.join_next().await.is_some() {}
    }

    /// Returns once the process has been found stopped at each look for [`STOPPED_LIMIT`]. Looks are counted, not time:
    /// an agent that was itself paused beside it gives it as long again.
    async fn stopped_for_good(&self, pid: u32) {
        let enough = STOPPED_LIMIT.as_secs() / STOPPED_POLL.as_secs();
        let mut looks = 0;
        while looks < enough || mutant::is_on("wait_for_stopped") {
            sleep(STOPPED_POLL).await;
            let is_stopped = Entry::read(pid).is_some_and(|entry| matches!(entry.state, b'T' | b't'));
            looks = if is_stopped { looks + 1 } else { 0 };
        }
        tracing::warn!(service = self.service.name, pid, "a service stays stopped: its spare goes on");
    }

    /// Ends a process of the service and whatever it left behind.
    pub(super) async fn end(&self, life: &Life) {
        let until = Instant::now() + GRACE;
        let family = || {
            let root = Root { pid: life.process.pid, alive: life.process.exit().is_none() };
            Family::Spawns([(life.spawn_id.clone(), root)].into())
        };
        tree::end(family, &self.context.registry, || until, self.context.limits.kill_s).await;
    }

    /// Starts a process of the service; one with a `line`, its standard input, as a spare.
    pub(super) async fn spawn(&self, line: Option<OwnedFd>) -> Result<Life> {
        let Service { argv, env, log, .. } = &self.service;
        let spawn_id = self.context.spawn_id();
        let output = OpenOptions::new().create(true).append(true).open(log);
        let output = output.map_err(|cause| {
            Error::new(ErrorKind::Io, "open a service's log", format!("{}: {cause}", log.display()))
        })?;
        let mut all: BTreeMap<String, String> = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect();
        all.remove(SPARE_ENV);
        all.extend(env.clone());
        all.extend(self.addresses.as_ref().clone());
        all.insert(RUN_ID.into(), self.context.run.run_id.clone());
        all.insert(SPAWN_ID.into(), spawn_id.clone());
        if line.is_some() {
            all.insert(SPARE_ENV.into(), "1".into());
        }
        all.remove(LISTEN_FD_ENV);
        all.remove(LISTEN_FDS_ENV);
        let passed = self.sockets.iter().map(OwnedFd::try_clone).collect::<std::io::Result<Vec<_>>>();
        let passed = passed.map_err(|cause| Error::io("pass a socket on", cause))?;
        if !passed.is_empty() {
            all.insert(LISTEN_FD_ENV.into(), FIRST_PASSED.to_string());
        }
        if passed.len() > 1 {
            all.insert(LISTEN_FDS_ENV.into(), passed.len().to_string());
        }
        // At the agent's own priority: these two are part of what notices deaths.
        let request = Request {
            argv: argv.clone(),
            env: all,
            stdin: line,
            workdir: None,
            output: output.into(),
            passed,
            nice: self.context.own_nice,
            files: None,
        };
        let spawned = self.context.spawner.spawn(request).await?;
        let process = Process::watch(spawned, self.context.registry.clone())?;
        Ok(Life { process, spawn_id })
    }
}

/// Names a process so that a later one of the same pid is told apart; complete at any moment.
fn write_pid_file(path: &Path, pid: u32) -> Result<()> {
    let start_ticks = Entry::read(pid).map_or(0, |entry| entry.start);
    let draft = path.with_extension("pid.new");
    fs::write(&draft, format!("{}\n", serde_json::json!({ "pid": pid, "start_ticks": start_ticks })))
        .and_then(|()| fs::rename(&draft, path))
        .map_err(|cause| Error::io("write a service's pid file", cause))
}
