//! One lighthouse, opened and served.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_stream::Stream;
use tonic::transport::Server as Transport;

use super::config::{Config, Secrets};
use super::ledger::Ledger;
use super::listener::{self, Connection, Incoming, OnClose};
use super::registry::Registry;
use super::secured::Secured;
use super::service::Shared;
use super::stores::{Command, Stores};
use super::{control, http};
use crate::channel::{self, Credentials, Endpoint, Limits};
use crate::wire::{Address, tls};
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
    tls: Option<TlsAcceptor>,
    control: Option<channel::Listener>,
    stores: Option<(Stores, Command)>,
    /// Where stores are served, where the configuration says so.
    stores_at: Option<IpAddr>,
    shared: Shared,
    token: Option<String>,
    run_id: String,
}

impl Server {
    /// Reads token and state, and binds the port and the control channel. Must run inside a Tokio runtime.
    ///
    /// `environment` may name inherited listening sockets ([`crate::wire::inherited`]).
    pub async fn open(config: &Config, environment: &BTreeMap<String, String>) -> Result<Self> {
        const OPERATION: &str = "open the lighthouse";
        let (token, identity) = match config.read_secrets()? {
            Some(Secrets { token, identity }) => (Some(token), identity),
            None => (None, None),
        };
        let control = config.control.iter().map(|text| text.parse()).collect::<Result<Vec<Address>>>()?;
        if !control.is_empty() && token.is_none() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                OPERATION,
                "control needs a token: set 'private'",
            ));
        }
        let ledger = Ledger::open(config.state.as_deref(), &config.run_id)?;
        // All that can be wrong with a certificate is found before anything is bound.
        let acceptor = identity.as_ref().map(tls::acceptor).transpose()?;
        let can_secure = acceptor.is_some() && config.tls != Some(false);
        let bound = listener::open(environment, config.listen, can_secure)?;
        let address = bound.local_addr().map_err(|error| Error::io(OPERATION, error))?;
        let tls = match (config.tls.unwrap_or(!address.ip().is_loopback()), acceptor) {
            (false, _) => None,
            (true, Some(acceptor)) => Some(acceptor),
            (true, None) => {
                let message = "tls needs a certificate: `identities.lighthouse` in private.json";
                return Err(Error::new(ErrorKind::InvalidInput, OPERATION, message));
            }
        };
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
        let endpoints = endpoints(control, listener::inherited_control(environment)?)?;
        let control = match &token {
            Some(token) if !endpoints.is_empty() => {
                let limits =
                    Limits { max_connections: MAX_SUPERVISORS, queue: SUPERVISOR_QUEUE, ..Limits::default() };
                let credentials = Credentials { identity, ..Credentials::new(&config.run_id, token) };
                Some(channel::Listener::open(endpoints, credentials, limits).await?)
            }
            _ => None,
        };
        let supervised = control.iter().flat_map(channel::Listener::addresses).map(ToString::to_string);
        let supervised = supervised.collect::<Vec<_>>().join(" ");
        tracing::info!(%address, control = supervised, run_id = config.run_id, auth = token.is_some(), tls = tls.is_some(), "lighthouse is up");
        let (stores_at, run_id) = (config.address, config.run_id.clone());
        Ok(Self { address, incoming, tls, control, stores, stores_at, shared, token, run_id })
    }

    /// The address that managers reach it at.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until something fails. Dropping the future ends the port and the control channel; connections that are
    /// open then end with the Tokio runtime.
    pub async fn serve(self) -> Result<()> {
        let routes = http::routes(self.shared.clone(), self.token.as_deref(), &self.run_id);
        let incoming: Pin<Box<dyn Stream<Item = io::Result<Connection>> + Send>> = match self.tls {
            Some(acceptor) => Box::pin(Secured::new(self.incoming, acceptor)),
            None => Box::pin(self.incoming),
        };
        let grpc = Transport::builder()
            .accept_http1(true)
            .http2_keepalive_interval(Some(KEEPALIVE))
            .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
            .max_concurrent_streams(MAX_STREAMS)
            .add_routes(routes)
            .serve_with_incoming(incoming);
        let supervisors = async {
            match self.control {
                Some(listener) => control::serve(listener, self.shared.clone()).await,
                None => std::future::pending().await,
            }
        };
        // On a task of its own: what it does to its helper takes a moment, and ends with the guard.
        let _keeper = self.stores.map(|(stores, command)| {
            let mut keeper = JoinSet::new();
            keeper.spawn(stores.keep(self.address.ip(), self.stores_at, command));
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

/// Where supervisors dial: as configured, but on the inherited socket in place of the (first) address beyond unix.
fn endpoints(control: Vec<Address>, mut inherited: Option<std::net::TcpListener>) -> Result<Vec<Endpoint>> {
    let endpoint = |address| match address {
        Address::Tls { .. } => inherited.take().map_or(Endpoint::Bind(address), Endpoint::Inherited),
        Address::Unix(_) => Endpoint::Bind(address),
    };
    let endpoints = control.into_iter().map(endpoint).collect();
    if inherited.is_some() {
        let message = "a second socket was inherited, but no address in `control` begins with `tls:`";
        return Err(Error::new(ErrorKind::InvalidInput, "open the lighthouse", message));
    }
    Ok(endpoints)
}
