//! What two ends of a queue pair have to know of each other, and what they agree on.

use super::super::protocol::{Put, Take};
use super::port::Layer;
use crate::{Error, ErrorKind, Result};

/// One end, as the other is told over the connection that both have proved themselves on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdma) struct Endpoint {
    pub layer: Layer,
    /// As `enum ibv_mtu`: 1 is 256 bytes, 5 is 4096.
    pub mtu: u8,
    /// Reads that it answers at a time.
    pub reads: u8,
    /// 24 bits.
    pub number: u32,
    /// Of its first packet, 24 bits.
    pub sequence: u32,
    /// Of InfiniBand; else 0.
    pub lid: u16,
    pub gid: [u8; 16],
}

const AGREE: &str = "agree on a queue pair";

impl Endpoint {
    pub(in crate::rdma) const LENGTH: usize = 3 + 4 + 4 + 2 + 16;

    pub(in crate::rdma) fn encode(&self) -> [u8; Self::LENGTH] {
        let mut out = [0; Self::LENGTH];
        let mut at = Put(&mut out);
        at.put(&[self.layer as u8, self.mtu, self.reads]);
        at.put(&self.number.to_le_bytes());
        at.put(&self.sequence.to_le_bytes());
        at.put(&self.lid.to_le_bytes());
        at.put(&self.gid);
        out
    }

    /// [`ErrorKind::Protocol`] where no queue pair can be so.
    pub(in crate::rdma) fn decode(bytes: &[u8; Self::LENGTH]) -> Result<Self> {
        let mut at = Take(bytes);
        let [layer, mtu, reads] = at.take();
        let layer = [Layer::InfiniBand, Layer::Ethernet].into_iter().find(|known| *known as u8 == layer);
        let number = u32::from_le_bytes(at.take());
        let sequence = u32::from_le_bytes(at.take());
        let (lid, gid) = (u16::from_le_bytes(at.take()), at.take());
        match layer {
            Some(layer) if (1..=5).contains(&mtu) && number >> 24 == 0 && sequence >> 24 == 0 => {
                Ok(Self { layer, mtu, reads, number, sequence, lid, gid })
            }
            _ => Err(Error::new(ErrorKind::Protocol, AGREE, "the peer's end is none")),
        }
    }

    /// Whether packets may get from one to the other at all; whether they do, only trying tells.
    ///
    /// [`ErrorKind::Io`] where they cannot.
    pub(super) fn shares_a_fabric(&self, other: &Self) -> Result<()> {
        let apart = |why: String| Err(Error::new(ErrorKind::Io, AGREE, why));
        if self.layer != other.layer {
            return apart(format!("one end is {:?}, the other {:?}", self.layer, other.layer));
        }
        match self.layer {
            Layer::InfiniBand if self.gid[..8] != other.gid[..8] => {
                apart("the ends are in different InfiniBand subnets".to_owned())
            }
            Layer::Ethernet if mapped(self.gid) != mapped(other.gid) => {
                apart("one end has an IPv4 address, the other an IPv6 one".to_owned())
            }
            _ => Ok(()),
        }
    }
}

fn mapped(gid: [u8; 16]) -> bool {
    std::net::Ipv6Addr::from(gid).to_ipv4_mapped().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end() -> Endpoint {
        let gid = std::net::Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped().octets();
        Endpoint { layer: Layer::Ethernet, mtu: 5, reads: 16, number: 17, sequence: 0xff_ffff, lid: 0, gid }
    }

    #[test]
    fn an_end_survives_the_way_and_what_is_none_is_refused() {
        let bytes = end().encode();
        assert_eq!(Endpoint::decode(&bytes).expect("one"), end());
        for (at, value) in [(0, 3), (1, 0), (1, 6), (6, 1), (10, 1)] {
            let mut wrong = bytes;
            wrong[at] = value;
            assert_eq!(
                Endpoint::decode(&wrong).expect_err("none").kind(),
                ErrorKind::Protocol,
                "{at} {value}"
            );
        }
    }

    #[test]
    fn ends_of_different_fabrics_are_told_apart_before_anything_is_tried() {
        let mut other = end();
        end().shares_a_fabric(&other).expect("the same");
        other.gid[15] = 2;
        end().shares_a_fabric(&other).expect("another host of it");
        other.gid = [0xfe; 16];
        assert!(end().shares_a_fabric(&other).is_err(), "IPv6");
        other.layer = Layer::InfiniBand;
        assert!(end().shares_a_fabric(&other).is_err());
        let (one, mut subnet) = (Endpoint { layer: Layer::InfiniBand, ..end() }, other);
        subnet.gid = one.gid;
        subnet.gid[15] = 9;
        one.shares_a_fabric(&subnet).expect("the same subnet");
        subnet.gid[0] = 1;
        assert!(one.shares_a_fabric(&subnet).is_err());
    }
}
