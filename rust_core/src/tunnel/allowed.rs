//! Which ports of a host the tunnel reaches: those where a process of the run listens, at the host's own address of the
//! tunnel or at every address. Nothing else of the host, and nothing at `127.0.0.1`.

use std::collections::HashSet;
use std::fs;
use std::net::Ipv4Addr;
use std::sync::{Mutex, PoisonError};

use crate::agent::mutant;
use crate::agent::tree::{RUN_ID, variable};

/// What `/proc/net/tcp` calls a listening socket.
const LISTENING: &str = "0A";
/// Sockets that are remembered as the run's.
const MOST_KNOWN: usize = 4096;

/// The ports of one host of a run.
#[derive(Debug)]
pub(super) struct Allowed {
    run_id: String,
    address: Ipv4Addr,
    /// Inodes of sockets that were found to be of the run. A number is given anew only after its socket is gone.
    known: Mutex<HashSet<u64>>,
}

impl Allowed {
    pub(super) fn new(run_id: &str, address: Ipv4Addr) -> Self {
        Self { run_id: run_id.to_owned(), address, known: Mutex::default() }
    }

    /// Whether a stream may go to that port. Reads the process table where the socket is new: not for the runtime's
    /// own threads.
    pub(super) fn check(&self, port: u16) -> Result<(), String> {
        if mutant::is_on("tunnel_any_port") {
            return Ok(());
        }
        let mut sockets = Vec::new();
        for table in ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"] {
            let text = fs::read_to_string(table).unwrap_or_default();
            sockets.extend(listeners(&text, self.address, port));
        }
        if sockets.is_empty() {
            return Err(format!("nobody listens at {}:{port}", self.address));
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if sockets.iter().any(|inode| known.contains(inode)) {
            return Ok(());
        }
        let Some(found) = sockets.into_iter().find(|inode| is_of_run(*inode, &self.run_id)) else {
            return Err(format!("who listens at {}:{port} is no process of this run", self.address));
        };
        if known.len() >= MOST_KNOWN {
            known.clear();
        }
        known.insert(found);
        Ok(())
    }
}

/// Inodes of the sockets that take connections to `address:port`.
fn listeners(table: &str, address: Ipv4Addr, port: u16) -> Vec<u64> {
    let own = format!("{:08X}", u32::from_ne_bytes(address.octets()));
    let places = [own.clone(), format!("0000000000000000{:08X}{own}", u32::from_ne_bytes([0, 0, 255, 255]))];
    let mut found = Vec::new();
    for line in table.lines().skip(1) {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let (Some(local), Some(&state), Some(inode)) = (fields.get(1), fields.get(3), fields.get(9)) else {
            continue;
        };
        let Some((at, at_port)) = local.split_once(':') else { continue };
        let here = places.iter().any(|place| place == at) || at.bytes().all(|digit| digit == b'0');
        if state == LISTENING && here && u16::from_str_radix(at_port, 16) == Ok(port) {
            found.extend(inode.parse::<u64>().ok());
        }
    }
    found
}

fn is_of_run(inode: u64, run_id: &str) -> bool {
    let wanted = format!("socket:[{inode}]");
    let Ok(processes) = fs::read_dir("/proc") else { return false };
    let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| variable(*pid, RUN_ID).as_deref() == Some(run_id)).any(|pid| {
        let Ok(open) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
        open.flatten()
            .any(|fd| fs::read_link(fd.path()).is_ok_and(|link| link.as_os_str() == wanted.as_str()))
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const OWN: Ipv4Addr = Ipv4Addr::new(127, 64, 9, 2);

    fn found(listener: &TcpListener) -> usize {
        let port = listener.local_addr().expect("bound").port();
        ["tcp", "tcp6"]
            .iter()
            .map(|table| fs::read_to_string(format!("/proc/thread-self/net/{table}")).unwrap_or_default())
            .map(|text| listeners(&text, OWN, port).len())
            .sum()
    }

    #[test]
    fn a_listener_counts_at_the_address_of_the_tunnel_and_at_all_addresses_and_nowhere_else() {
        for (address, count) in [
            ("127.64.9.2:0", 1),
            ("0.0.0.0:0", 1),
            ("127.0.0.1:0", 0),
            ("127.64.9.3:0", 0),
            ("[::]:0", 1),
            ("[::1]:0", 0),
        ] {
            match TcpListener::bind(address) {
                Ok(listener) => assert_eq!(found(&listener), count, "{address}"),
                Err(error) => assert!(address.starts_with('['), "{address}: {error}"), // no IPv6 here
            }
        }
    }

    #[test]
    fn a_process_of_another_run_is_not_reached() {
        let listener = TcpListener::bind((OWN, 0)).expect("bound");
        let port = listener.local_addr().expect("bound").port();
        let refused = Allowed::new("some-run-that-is-not-this", OWN).check(port).expect_err("not ours");
        assert!(refused.contains("no process of this run"), "{refused}");
        drop(listener);
        let refused = Allowed::new("some-run", OWN).check(port).expect_err("closed");
        assert!(refused.contains("nobody listens"), "{refused}");
    }
}
