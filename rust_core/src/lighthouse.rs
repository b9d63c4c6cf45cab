//! The lighthouse: forms quorums for TorchFT's managers, and is *told* who died.
//!
//! ```text
//!  torchft.Manager ──gRPC Quorum, Heartbeat──▶ http ─▶ service ─▶ registry ─▶ quorum_compute (pure)
//!  agent ──Evict over the framed channel─────▶ control ──────────▶    │
//!  you ──GET /status.json, /metrics──────────▶ http ◀── snapshot ◀────┤
//!                                                       ledger ◀──────┤ ids and fences, over restarts
//!                                   helper (torch) ◀── stores ◀──────┘ a rendezvous store for each quorum
//! ```

pub mod config;
pub mod control;
pub mod control_client;
pub mod http;
pub mod identity;
pub mod ledger;
pub mod listener;
pub mod metrics;
pub mod protocol;
pub mod quorum;
pub mod refusal;
pub mod registry;
pub mod secured;
pub mod server;
pub mod service;
pub mod snapshot;
pub mod stores;

use tokio::signal::unix::{SignalKind, signal};

pub use config::Config;
pub use control_client::ControlClient;
pub use registry::FOR_GOOD;
pub use secured::SERVER_NAME;
pub use server::Server;

use crate::agent::spare;
use crate::{Error, ErrorKind, Result};

/// Runs a lighthouse as this process until SIGTERM or SIGINT, and returns its exit code.
///
/// `config_json` is a [`Config`]; a listening socket named by `SKY_MONARCH_LISTEN_FD` is taken over. Everything is
/// checked before anything is opened; a spare of the agent's opens nothing before it is wanted. Nothing is printed; `tracing` gets what there is to say.
pub fn run(config_json: &str) -> Result<i32> {
    const OPERATION: &str = "run the lighthouse";
    let config = Config::parse(config_json)?;
    let environment = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    if let Some(nice) = config.nice {
        renice(nice);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2) // tiny requests, all under one lock: more threads only wait for it
        .thread_name("lighthouse")
        .enable_all()
        .build()
        .map_err(|error| Error::io(OPERATION, error))?;
    let ended = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).map_err(|error| Error::io(OPERATION, error))?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(|error| Error::io(OPERATION, error))?;
        // Nothing is opened before: the state file is another process's until then.
        tokio::select! {
            wanted = spare::wanted() => if !wanted? { return Ok(()) },
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
        }
        let server = Server::open(&config, &environment).await?;
        tokio::select! {
            served = server.serve() => served,
            _ = terminate.recv() => Ok(()),
            _ = interrupt.recv() => Ok(()),
        }
    });
    // waiting requests are cut off: their managers ask again
    runtime.shutdown_background();
    ended.map(|()| 0)
}

/// Takes a niceness for this process; without the right to a lower one it goes on as it is.
fn renice(nice: i32) {
    // SAFETY: takes plain numbers; 0 is this process.
    let answer = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
    if answer != 0 {
        let error = Error::new(
            ErrorKind::Io,
            "take the configured niceness",
            std::io::Error::last_os_error().to_string(),
        );
        tracing::warn!(nice, %error, "going on");
    }
}
