//! A look at this host before its first group starts, by a process of its own: no device is touched by the agent.

use std::collections::{BTreeMap, HashMap};
use std::fs::OpenOptions;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Deserialize;
use tokio::time::{Instant, sleep, timeout};

use super::context::Shared;
use super::mutant;
use super::pidfd::Process;
use super::tree::{self, Family, RUN_ID, Root, SPAWN_ID};
use crate::protocol::{Event, Exit, Finding};
use crate::{Error, Result};

/// Ranks and `setup` begin meanwhile, or wait for this: it gets out of the way of who runs.
const EXTRA_NICE: i32 = 5;
const MOST_FINDINGS: usize = 200;
const MOST_BYTES: u64 = 1 << 20;
const LOOK: Duration = Duration::from_millis(50);

/// What looks.
#[derive(Clone, Debug, Deserialize)]
pub struct Examination {
    /// Its command; `--out FILE` is added, where it writes its findings.
    pub argv: Vec<String>,
    /// How long it may take.
    pub limit_s: f64,
    /// Whether the controller starts no group of this host before it is through.
    #[serde(default)]
    pub holds: bool,
    /// Whether a host on which it is not through in time, or fails, is a bad one.
    #[serde(default)]
    pub strict: bool,
}

#[derive(Deserialize)]
struct Written {
    findings: Vec<Finding>,
}

/// Says whether the controller is to wait: until it has stored what was found.
#[derive(Clone, Debug, Default)]
pub struct Awaited(Arc<AtomicBool>);

impl Awaited {
    /// Whether it is to wait.
    pub fn get(&self) -> bool {
        self.0.load(Ordering::SeqCst) && !mutant::is_on("no_examining")
    }
}

/// Looks, beside everything else, and tells the controller what was found.
pub fn start(context: &Shared, examination: Examination) -> Awaited {
    let awaited = Awaited(Arc::new(AtomicBool::new(examination.holds)));
    let (context, told) = (Arc::clone(context), awaited.clone());
    tokio::spawn(async move {
        let begun = Instant::now();
        let findings = match look(&context, &examination).await {
            Ok(findings) => findings,
            Err(error) => vec![failed(&examination, error.to_string())],
        };
        let took_s = begun.elapsed().as_secs_f64();
        let seq = context.outbox.emit(Event::Examined { findings, took_s });
        // A controller that hears of the host before it hears of this must not start anything.
        while !context.outbox.is_stored(seq) {
            sleep(LOOK).await;
        }
        told.0.store(false, Ordering::SeqCst);
    });
    awaited
}

fn failed(examination: &Examination, why: String) -> Finding {
    let severity = if examination.strict { "error" } else { "warning" };
    Finding {
        check: "doctor".into(),
        severity: severity.into(),
        message: format!("this host could not be examined: {why}"),
        fix: Some("run `sky-monarch doctor` on it; `doctor: off` in the job leaves it out".into()),
    }
}

async fn look(context: &Shared, examination: &Examination) -> Result<Vec<Finding>> {
    let place = |suffix: &str| context.run_dir.join(format!("doctor-{}.{suffix}", context.host.name()));
    let out = place("json");
    let io = |cause| Error::io("examine the host", cause);
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(place("log")).map_err(io)?;
    // Of an agent before this one.
    let _ = std::fs::remove_file(&out);
    let spawn_id = context.spawn_id();
    let mut env: BTreeMap<String, String> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    env.insert(RUN_ID.into(), context.run.run_id.clone());
    env.insert(SPAWN_ID.into(), spawn_id.clone());
    let mut argv = examination.argv.clone();
    argv.extend(["--out".into(), out.display().to_string()]);
    let workdir = context.run_dir.display().to_string();
    let spawned = context.spawn(argv, env, &workdir, OwnedFd::from(log), None, EXTRA_NICE).await?;
    let process = Process::watch(spawned, context.registry.clone())?;
    let limit = super::group::seconds(examination.limit_s);
    let exited = timeout(limit, process.exited()).await.map(|exited| exited.exit);
    let now = Instant::now();
    let family = || {
        let root = Root { pid: process.pid, alive: process.exit().is_none() };
        Family::Spawns(HashMap::from([(spawn_id.clone(), root)]))
    };
    tree::end(family, &context.registry, || now, context.limits.kill_s).await;
    match exited {
        Ok(Exit::Code(0)) => read(out).await,
        Ok(Exit::Code(code)) => Err(told(format!("it ended with code {code}: {}", place("log").display()))),
        Ok(Exit::Signal(signal)) => Err(told(format!("it was ended by signal {signal}"))),
        Err(_) => Err(told(format!("it was not through after {} s", examination.limit_s))),
    }
}

fn told(why: String) -> Error {
    Error::new(crate::ErrorKind::Io, "examine the host", why)
}

async fn read(path: PathBuf) -> Result<Vec<Finding>> {
    let text = tokio::task::spawn_blocking(move || {
        use std::io::Read as _;
        let mut text = String::new();
        std::fs::File::open(path)?.take(MOST_BYTES).read_to_string(&mut text)?;
        std::io::Result::Ok(text)
    });
    let text = match text.await {
        Ok(text) => text.map_err(|cause| Error::io("read what was found", cause))?,
        Err(panicked) => return Err(told(panicked.to_string())),
    };
    let written: Written = serde_json::from_str(&text).map_err(|cause| told(cause.to_string()))?;
    Ok(written.findings.into_iter().take(MOST_FINDINGS).collect())
}
