//! The tunnel: ranks of hosts that can only dial out reach each other through the head.
//!
//! ```text
//!  rank ── its peer's address ──▶ mirror (agent) ══ TLS, dialled out ══▶ relay (head)
//!                                                                          │ line: "a stream for your port 41234"
//!  rank ◀── its own address ───── taker (agent)  ══ TLS, dialled out ══▶   ┘ and joins the two
//! ```
//!
//! Each host has an address of its own inside of `127.64.0.0/10` ([`address_of`]), where its ranks listen: all of
//! `127.0.0.0/8` is local on Linux, without any right or set-up. On the *other* hosts that address is free, so their
//! agents listen there, at a port that a rank asks for before it dials ([`mirror`]). Every stream is a connection of its
//! own on both of its legs, so TCP bounds and paces each by itself, whatever the distance; only "who is wanted" travels
//! on the line that each agent keeps.
//!
//! A stream ends as the connection that it stands for: half-closed by TLS's own `close_notify`; reset where a leg ends
//! without one, which is what a death looks like.

mod agent;
mod allowed;
mod limits;
mod message;
mod mirror;
mod relay;
mod splice;

use std::net::{IpAddr, Ipv4Addr};

pub use agent::{Place, Tunnel};
pub use limits::Limits;
pub use relay::{Relay, SERVER_NAME, run};
pub use splice::Ends;

/// Where the head's own ports are: the rendezvous stores of quorums.
pub const HEAD: Ipv4Addr = Ipv4Addr::new(127, 64, 0, 1);

/// Length of the prefix that all addresses of a tunnel share.
const PREFIX: u32 = 10;

/// Hosts that have an address.
const MOST_HOSTS: u32 = (1 << (32 - PREFIX)) - 2;

/// The address of a host in the tunnel: the same on all hosts. None for a name that does not end in `-h<number>`.
pub fn address_of(host: &str) -> Option<Ipv4Addr> {
    let (_, number) = host.rsplit_once("-h")?;
    let index: u32 = number.parse().ok()?;
    // `07` and `+7` would share an address with `7`.
    (index < MOST_HOSTS && index.to_string() == number).then(|| Ipv4Addr::from(u32::from(HEAD) + 1 + index))
}

/// Whether an address is one of a tunnel.
pub fn is_inside(address: IpAddr) -> bool {
    let IpAddr::V4(address) = address else { return false };
    u32::from(address) >> (32 - PREFIX) == u32::from(HEAD) >> (32 - PREFIX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_host_has_an_address_of_its_own_and_the_head_another() {
        let text = |host: &str| address_of(host).map(|address| address.to_string());
        assert_eq!(text("demo-h0").as_deref(), Some("127.64.0.2"));
        assert_eq!(text("my-h-h300").as_deref(), Some("127.64.1.46"));
        for host in ["demo", "demo-h", "demo-h01", "demo-h+1", "demo-h-1", "demo-h4194302", "demo-head", ""] {
            assert_eq!(text(host), None, "{host}");
        }
        let last = address_of("demo-h4194301").expect("the last one");
        assert!(is_inside(last.into()) && last == Ipv4Addr::new(127, 127, 255, 255), "{last}");
        for outside in ["127.0.0.1", "127.63.255.255", "127.128.0.0", "10.64.0.1", "::1"] {
            assert!(!is_inside(outside.parse().expect("an address")), "{outside}");
        }
    }
}
