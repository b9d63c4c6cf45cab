//! The host agent: starts ranks, sees their deaths, evicts, restarts, reports; nothing of it waits for the controller.
//!
//! | part | what it does |
//! |---|---|
//! | [`spawn`], [`pidfd`], [`tree`] | processes: start one, see one die, end everything that descends from one |
//! | [`capture`], [`segments`], [`logs`] | output: pipe → files → answers |
//! | [`group`], [`budget`], [`progress`], [`roll_call`], [`inject`], [`standby`], [`store`], [`evict`], [`env`] | one replica group |
//! | [`sessions`] ◀ ranks · [`door`] ▶ lighthouse · [`outbox`], [`link`] ▶ controller · [`probe`] ◀▶ other agents | who it talks to |
//! | [`setup`], [`doctor`], [`services`], [`ports`], [`host`], [`config`] | before and beside the groups |
//! | [`notice`] | the host is about to be taken away |

pub mod budget;
pub mod capture;
pub mod clock;
pub mod config;
pub mod context;
pub mod doctor;
pub mod door;
pub mod env;
pub mod evict;
pub mod evidence;
pub mod files;
pub mod fork_server;
pub mod forked;
pub mod group;
pub mod host;
pub mod inject;
pub mod keeper;
pub mod link;
pub mod logs;
pub mod mutant;
pub mod notice;
pub mod outbox;
pub mod pidfd;
mod ports;
pub mod probe;
pub mod progress;
pub mod roll_call;
pub mod segments;
pub mod services;
pub mod sessions;
pub mod setup;
pub mod spare;
mod spawn;
pub mod standby;
pub mod store;
mod supervise;
pub mod tree;
pub(crate) mod watched;

use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::channel::Credentials;
use crate::tunnel::{self, Tunnel};
use crate::wire::Address;
use crate::wire::tls::Identity;
use crate::{Error, ErrorKind, Result};
use config::{Config, Secrets};
use context::Context;
use door::Door;
use env::RunEnv;
use evict::Lighthouses;
use fork_server::ForkServer;
use host::Host;
use link::{Link, Standing};
use logs::Logs;
use outbox::Outbox;
use probe::Probe;
use services::Services;
use sessions::Sessions;
use spawn::Spawner;
use store::Store;
use supervise::Supervisor;
use tree::Registry;

/// Niceness of the agent itself, where it may: it sleeps nearly always, and what it does must not wait for ranks.
const OWN_NICE: i32 = -10;

/// Longest wait for the connection to the controller to be closed in order: it is told before that the agent ends.
const FAREWELL: std::time::Duration = std::time::Duration::from_millis(500);

/// Runs an agent until its work is over. Returns the exit code of its process.
///
/// `config_json` is the text of `agent.json`. Must be called on the main thread of a process of its own: the agent
/// takes over child processes, SIGTERM, SIGINT, SIGUSR1 and SIGCHLD.
pub fn run(config_json: &str) -> Result<i32> {
    let config = Config::parse(config_json)?;
    let secrets = config.secrets()?;
    let controller: Address = config.controller.parse()?;
    // An ignored SIGCHLD, inherited from whoever started us, would throw exit codes away.
    // SAFETY: resets a disposition; no handler of ours exists yet.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    tree::become_subreaper()?;
    let files = files::raise();
    // SAFETY: integers only; niceness of the calling thread, which every thread made from here on inherits.
    let job_nice = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
    // SAFETY: as above. Without the right to it, nothing changes.
    let can_renice = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, OWN_NICE.min(job_nice)) } == 0;
    let own_nice = if can_renice { OWN_NICE.min(job_nice) } else { job_nice };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("agent")
        .enable_all()
        .build()
        .map_err(|cause| Error::io("start the runtime", cause))?;
    let inherited = Inherited { nice: job_nice, own_nice, can_renice, files };
    let code = runtime.block_on(agent(config, secrets, controller, inherited));
    // A disk that hangs may hold a log writer: the agent's end does not wait for it.
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    code
}

/// What the agent was started with and has changed for itself: its children get it back.
struct Inherited {
    nice: i32,
    own_nice: i32,
    can_renice: bool,
    files: Option<libc::rlimit>,
}

async fn agent(
    config: Config,
    Secrets { token, identity }: Secrets,
    controller: Address,
    inherited: Inherited,
) -> Result<i32> {
    let io = |cause| Error::io("listen for signals", cause);
    let signals = (
        signal(SignalKind::terminate()).map_err(io)?,
        signal(SignalKind::interrupt()).map_err(io)?,
        signal(SignalKind::child()).map_err(io)?,
        signal(SignalKind::user_defined1()).map_err(io)?,
    );
    let socket = config.socket.to_str().ok_or_else(|| {
        Error::new(ErrorKind::InvalidInput, "read agent.json", "`socket` is not valid UTF-8")
    })?;
    let address: Address = format!("unix:{socket}").parse()?;
    let credentials =
        Credentials { identity: identity.clone(), ..Credentials::new(config.run_id.clone(), token.reveal()) };
    // Without it, there is less to say of a rank that fails.
    let _ = std::fs::DirBuilder::new().mode(0o700).create(evidence::folder(&config.run_dir));
    let registry = Registry::default();
    let outbox = Outbox::default();
    let sessions = Sessions::default();
    let incarnation = rand::random();
    let tunnel = open_tunnel(&config, identity.as_ref(), token.reveal()).await?;
    let probe = match &identity {
        // Before anything runs: an address that is not this host's is found out now.
        Some(identity) if config.attempt > 0 => {
            let probe = Probe::open(&config.host, config.address, identity).await?;
            Some(Arc::new(probe.through(tunnel.as_ref().map(|(tunnel, _)| tunnel.clone()))))
        }
        _ => None,
    };
    let serving = sessions.serve(&address, credentials.clone()).await?;
    let environment = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let (tell_standing, standing) = watch::channel(Standing::Away(Instant::now()));
    let fallback_python = config.services.first().and_then(|service| service.argv.first()).cloned();
    let context = Arc::new(Context {
        lighthouses: Lighthouses::new(credentials.clone(), sessions.clone()),
        door: Door::new(token.clone(), identity.as_ref(), sessions.clone())?,
        run: RunEnv {
            run_id: config.run_id.clone(),
            token,
            agent: address.to_string(),
            address: config.address,
            tunnel: tunnel.as_ref().map(|(_, socket)| format!("unix:{}", socket.display())),
            run_dir: config.run_dir.clone(),
        },
        run_dir: config.run_dir.clone(),
        attempt: config.attempt,
        host: Host::new(&config, environment),
        standing,
        limits: config.limits.clone(),
        incarnation,
        spawner: Spawner::start(registry.clone())?,
        registry: registry.clone(),
        outbox: outbox.clone(),
        sessions,
        logs: Logs::new(config.run_dir.join("logs")),
        store: Store::new(fallback_python),
        fork_server: ForkServer::default(),
        job_nice: inherited.nice,
        own_nice: inherited.own_nice,
        can_renice: inherited.can_renice,
        job_files: inherited.files,
        groups: std::sync::Mutex::default(),
        roll_call: std::sync::Mutex::default(),
        spawns: std::sync::atomic::AtomicU64::new(1),
        owned: std::sync::Mutex::default(),
    });
    supervise::sweep(&context).await;
    let services = Services::start(&context, &config.services, identity.is_some())?;
    let examining =
        config.doctor.clone().map(|examination| doctor::start(&context, examination)).unwrap_or_default();
    let (commands, inbox) = mpsc::channel(256);
    let shown = Arc::clone(&context);
    let link = Link {
        address: controller,
        credentials,
        host: config.host.clone(),
        attempt: config.attempt,
        probe: probe.as_ref().map(|probe| probe.port().to_string()),
        examining,
        incarnation,
        outbox,
        snapshot: move || shown.groups().values().cloned().collect(),
        commands,
        standing: tell_standing,
    };
    let mut linked = link.start();
    let notices = notice::watch(&config, &context);
    let leave = (config.notices.clone(), notices);
    let limits = supervise::Limits { linger: group::seconds(config.linger_s), lease: config.lease() };
    let supervisor = Supervisor::new(context, services, probe, limits, leave);
    let code = supervisor.run(inbox, signals).await;
    notice::forget(&config);
    // The inbox is gone: it hangs up, unless its peer does not listen.
    if tokio::time::timeout(FAREWELL, &mut linked).await.is_err() {
        linked.abort();
    }
    serving.abort();
    let _ = std::fs::remove_file(&config.socket);
    if let Some((_, socket)) = &tunnel {
        let _ = std::fs::remove_file(socket);
    }
    // Sockets outside of the run folder are removed by clients, who find them through it: not where it is gone.
    if let Some(folder) = config.socket.parent().filter(|_| !config.run_dir.exists())
        && folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with("sky-monarch-"))
    {
        let _ = std::fs::remove_dir_all(folder);
    }
    if config.attempt > 0 {
        forget(&config);
    }
    Ok(code)
}

/// The tunnel to the other hosts, where there is one, and the socket at which ranks use it: beside their agent's own.
async fn open_tunnel(
    config: &Config,
    identity: Option<&Identity>,
    token: &str,
) -> Result<Option<(Tunnel, PathBuf)>> {
    let Some(relay) = &config.relay else { return Ok(None) };
    let invalid = |why: &str| Error::new(ErrorKind::InvalidInput, "open the tunnel", why);
    let place = tunnel::Place {
        relay: relay.parse()?,
        identity: identity.cloned().ok_or_else(|| invalid("this host has no certificate"))?,
        run_id: config.run_id.clone(),
        token: token.to_owned(),
        host: config.host.clone(),
        attempt: config.attempt,
        address: config.address,
    };
    let socket = config.socket.with_file_name("tunnel.sock");
    let path = socket.to_str().ok_or_else(|| invalid("`socket` is not valid UTF-8"))?;
    let tunnel = Tunnel::start(place, tunnel::Limits::default())?;
    tunnel.serve(&format!("unix:{path}").parse()?).await?;
    Ok(Some((tunnel, socket)))
}

/// Leaves nothing that proves anything, and no folder of sockets: nobody comes to a host like this one to tidy up.
fn forget(config: &Config) {
    let _ = std::fs::remove_file(&config.private);
    if let Some(folder) = config.socket.parent().filter(|folder| **folder != config.run_dir) {
        let _ = std::fs::remove_dir(folder);
    }
}
