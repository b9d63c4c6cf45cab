//! One lighthouse, opened and served.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tonic::transport::Server as Transport;

use super::config::Config;
use super::ledger::Ledger;
use super::listener::{self, Incoming, OnClose};
use super::registry::Registry;
use super::service::Shared;
use super::stores::{Command, Stores};
use super::{control, http};
use crate::channel::{self, Credentials, Limits};
use crate::wire::Address;
use crate::{Error, ErrorKind, Result};

/// A peer that acknowledges nothing for so long, and then not for [`KEEPALIVE_TIMEOUT`] more, is disconnected.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// Time to answer a keepalive.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Requests at a time on one connection; a manager has two.
const MAX_STREAMS: u32 = 256;

/// Supervisors at a time.
const MAX_SUPERVISORS: usize = 1_024;

/// Messages that may wait for a supervisor to read them.
const SUPERVISOR_QUEUE: usize = 256;

/// A lighthouse whose addresses are bound.
pub struct Server {
    address: SocketAddr,
    incoming: Incoming,
    control: Option<channel::Listener>,
    stores: Option<(Stores, Command)>,
    shared: Shared,
    token: Option<String>,
    run_id: String,
}

impl Server {
    /// Reads token and state, and binds the port and the control channel. Must run inside a Tokio runtime.
    ///
    /// `environment` may name an inherited listening socket ([`listener::LISTEN_FD_ENV`]).
    pub async fn open(config: &Config, environment: &BTreeMap<String, String>) -> Result<Self> {
        const OPERATION: &str = "open the lighthouse";
        let token = config.read_token()?;
        let control = config.control.as_deref().map(str::parse::<Address>).transpose()?;
        if matches!(control, Some(Address::Tls { .. })) {
            return Err(Error::new(ErrorKind::InvalidInput, OPERATION, "control must be unix:<path>"));
        }
        if control.is_some() && token.is_none() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                OPERATION,
                "control needs a token: set 'private'",
            ));
        }
        let ledger = Ledger::open(config.state.as_deref(), &config.run_id)?;
        let bound = listener::open(environment, config.listen, token.is_some())?;
        let address = bound.local_addr().map_err(|error| Error::io(OPERATION, error))?;
        let mut registry = Registry::new(Instant::now(), config.options()?, ledger);
        let stores = config.store_argv.clone().map(|argv| {
            let stores = Stores::default();
            registry.serve_stores(stores.clone());
            (stores, Command { argv, path: config.store_path.clone() })
        });
        let shared = Shared::new(registry);
        let closing = shared.clone();
        let on_close: OnClose = Arc::new(move |connection| closing.lock().disconnected(connection));
        let incoming = Incoming::new(bound, on_close)?;
        let control = match (control, &token) {
            (Some(at), Some(token)) => {
                let limits =
                    Limits { max_connections: MAX_SUPERVISORS, queue: SUPERVISOR_QUEUE, ..Limits::default() };
                Some(channel::Listener::bind(&at, Credentials::new(&config.run_id, token), limits).await?)
            }
            _ => None,
        };
        tracing::info!(%address, control = config.control, run_id = config.run_id, auth = token.is_some(), "lighthouse is up");
        Ok(Self { address, incoming, control, stores, shared, token, run_id: config.run_id.clone() })
    }

    /// The address that managers reach it at.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until something fails. Dropping the future ends the port and the control channel; connections that are
    /// open then end with the Tokio runtime.
    pub async fn serve(self) -> Result<()> {
        let routes = http::routes(self.shared.clone(), self.token.as_deref(), &self.run_id);
        let grpc = Transport::builder()
            .accept_http1(true)
            .http2_keepalive_interval(Some(KEEPALIVE))
            .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
            .max_concurrent_streams(MAX_STREAMS)
            .add_routes(routes)
            .serve_with_incoming(self.incoming);
        let supervisors = async {
            match self.control {
                Some(listener) => control::serve(listener, self.shared.clone()).await,
                None => std::future::pending().await,
            }
        };
        // On a task of its own: what it does to its helper takes a moment, and ends with the guard.
        let _keeper = self.stores.map(|(stores, command)| {
            let mut keeper = JoinSet::new();
            keeper.spawn(stores.keep(self.address.ip(), command));
            keeper
        });
        tokio::select! {
            served = grpc => served.map_err(|error| {
                Error::new(ErrorKind::Io, "serve the lighthouse's port", error.to_string()).with_source(error)
            }),
            served = supervisors => served,
            () = self.shared.run_timer() => Ok(()),
        }
    }
}
