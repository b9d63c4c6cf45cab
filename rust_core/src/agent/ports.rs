//! The ports of a service: bound by the agent, which keeps them open while the service is down. Hosts elsewhere know their
//! numbers, so an agent that is started in place of a dead one binds the same.

use std::fs;
use std::io;
use std::net::{TcpListener, ToSocketAddrs};
use std::path::Path;
use std::time::Duration;

use super::config::Service;
use crate::{Error, ErrorKind, Result};

/// For the processes of a dead agent to let go of its ports: its keeper has ended them before.
const TAKEN_LIMIT: Duration = Duration::from_secs(2);
const TAKEN_POLL: Duration = Duration::from_millis(100);

/// Binds the addresses of a service. `file` keeps the numbers of its ports: those that an earlier agent has written there
/// are bound again, where they are free. None: nobody beyond this machine knows them, so any do.
pub(super) fn bind(service: &Service, file: Option<&Path>) -> Result<Vec<TcpListener>> {
    let known = file.map_or_else(Vec::new, remembered);
    let mut listeners = Vec::new();
    for (index, address) in service.listen.iter().enumerate() {
        let again = known.get(index).and_then(|port| bind_again(service, address, *port));
        let listener = match again {
            Some(listener) => listener,
            None => TcpListener::bind(address).map_err(|cause| unbound(service, address, cause))?,
        };
        listeners.push(listener);
    }
    if let (Some(file), false) = (file, listeners.is_empty()) {
        remember(file, &listeners)?;
    }
    Ok(listeners)
}

/// What all services are told of those ports: `SKY_MONARCH_<NAME>_ADDR`, of the second `SKY_MONARCH_<NAME>_CONTROL_ADDR`.
pub(super) fn variables(service: &Service, listeners: &[TcpListener]) -> Result<Vec<(String, String)>> {
    let name = service.name.to_uppercase();
    let kinds = ["ADDR", "CONTROL_ADDR"];
    let told = listeners.iter().zip(kinds).map(|(listener, kind)| {
        let at = listener.local_addr().map_err(|cause| Error::io("bind a service's address", cause))?;
        Ok((format!("SKY_MONARCH_{name}_{kind}"), at.to_string()))
    });
    told.collect()
}

/// The same address with a port that an earlier agent had. Where the configuration names a port, that one counts.
fn bind_again(service: &Service, address: &str, port: u16) -> Option<TcpListener> {
    let mut at = address.to_socket_addrs().ok()?.next()?;
    if at.port() != 0 {
        return None;
    }
    at.set_port(port);
    let tries = TAKEN_LIMIT.as_millis() / TAKEN_POLL.as_millis();
    for _ in 0..tries {
        match TcpListener::bind(at) {
            Ok(listener) => return Some(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => std::thread::sleep(TAKEN_POLL),
            Err(error) => {
                tracing::error!(service = service.name, %at, %error, "the port that hosts know cannot be bound");
                return None;
            }
        }
    }
    tracing::error!(service = service.name, %at, "the port that hosts know was taken by another process");
    None
}

fn unbound(service: &Service, address: &str, cause: io::Error) -> Error {
    let message = format!("{address}, for {}: {cause}", service.name);
    Error::new(ErrorKind::Io, "bind a service's address", message).with_source(cause)
}

/// Nothing where there is no such file, or no sense in it: then any port will do.
fn remembered(file: &Path) -> Vec<u16> {
    fs::read(file).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

fn remember(file: &Path, listeners: &[TcpListener]) -> Result<()> {
    let failed = |cause| Error::io("write down a service's ports", cause);
    let ports = listeners.iter().map(|listener| listener.local_addr().map(|at| at.port()));
    let ports = ports.collect::<io::Result<Vec<_>>>().map_err(failed)?;
    let draft = file.with_extension("new");
    fs::write(&draft, format!("{}\n", serde_json::json!(ports)))
        .and_then(|()| fs::rename(&draft, file))
        .map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(listen: serde_json::Value) -> Service {
        let json = serde_json::json!({
            "name": "lighthouse", "argv": ["x"], "log": "/l", "pid_file": "/p", "listen": listen,
        });
        serde_json::from_value(json).expect("a service")
    }

    #[test]
    fn a_service_has_no_port_or_one_or_two_and_all_are_told_of_them() {
        for (listen, names) in [
            (serde_json::json!(null), &[][..]),
            (serde_json::json!("127.0.0.1:0"), &["SKY_MONARCH_LIGHTHOUSE_ADDR"]),
            (
                serde_json::json!(["127.0.0.1:0", "127.0.0.1:0"]),
                &["SKY_MONARCH_LIGHTHOUSE_ADDR", "SKY_MONARCH_LIGHTHOUSE_CONTROL_ADDR"],
            ),
        ] {
            let service = service(listen);
            let listeners = bind(&service, None).expect("bound");
            let told = variables(&service, &listeners).expect("addresses");
            assert_eq!(told.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), names);
            for ((_, address), listener) in told.iter().zip(&listeners) {
                assert_eq!(*address, listener.local_addr().expect("an address").to_string());
            }
        }
    }

    #[test]
    fn the_next_agent_binds_the_same_ports_or_others_where_they_are_taken() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("lighthouse.ports");
        // Nobody else takes a port there meanwhile.
        let both = service(serde_json::json!(["127.200.77.7:0", "127.200.77.7:0"]));
        let first = service(serde_json::json!("127.200.77.7:0"));
        let bound = |service: &Service| bind(service, Some(&file)).expect("bound");
        let ports = |listeners: &[TcpListener]| {
            let at = listeners.iter().map(|listener| listener.local_addr().expect("an address").port());
            at.collect::<Vec<_>>()
        };
        let known = ports(&bound(&both));
        let again = bound(&both);
        assert_eq!(ports(&again), known);
        // Taken meanwhile: a run whose hosts have to be provisioned again is better than none.
        assert!(ports(&bound(&first)).iter().all(|port| !known.contains(port)));
        fs::write(&file, "no JSON").expect("written");
        bound(&both);
    }
}
