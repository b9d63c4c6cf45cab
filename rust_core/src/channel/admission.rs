//! Whom a controller lets in.

use super::Pending;
use crate::protocol::{Peer, certificate_name};

/// Only agents are welcome, and over TLS only under the name in their certificate.
pub fn admit_agent(pending: &Pending) -> Result<(), String> {
    let Peer::Agent { host, attempt, .. } = pending.peer() else {
        return Err("this is the controller: sessions dial their agent".to_owned());
    };
    let Some(name) = pending.peer_name() else { return Ok(()) };
    if name == certificate_name(host, *attempt) {
        return Ok(());
    }
    Err(format!("the certificate of {name} does not speak for host {host}, attempt {attempt}"))
}
