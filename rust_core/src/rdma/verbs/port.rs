//! Which device, port and address of it are used.

use std::net::{IpAddr, Ipv6Addr};

use crate::{Error, ErrorKind, Result};

/// What the port's link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::rdma) enum Layer {
    InfiniBand = 1,
    Ethernet = 2,
}

/// What an entry of the port's table of addresses is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GidKind {
    InfiniBand,
    RoceV1,
    RoceV2,
    /// The library cannot say.
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GidOffer {
    pub index: u32,
    pub gid: [u8; 16],
    pub kind: GidKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PortOffer {
    pub device: String,
    pub number: u8,
    pub active: bool,
    /// None for one that is neither.
    pub layer: Option<Layer>,
    pub gids: Vec<GidOffer>,
}

/// Device and port, `mlx5_0` or `mlx5_0:1`.
pub(super) const DEVICE_ENV: &str = "SKY_MONARCH_RDMA_DEVICE";
/// Index in the port's table of addresses.
pub(super) const GID_ENV: &str = "SKY_MONARCH_RDMA_GID_INDEX";

/// What somebody has asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wish {
    pub device: Option<String>,
    pub port: Option<u8>,
    pub gid_index: Option<u32>,
    /// Of the domain: a port that has it leads where its peers are.
    pub address: IpAddr,
}

impl Wish {
    /// Of the environment.
    pub(super) fn from_env(address: IpAddr) -> Result<Self> {
        let read = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        Self::parse(address, read(DEVICE_ENV).as_deref(), read(GID_ENV).as_deref())
    }

    fn parse(address: IpAddr, device: Option<&str>, gid: Option<&str>) -> Result<Self> {
        let bad = |name: &str, text: &str, what: &str| {
            Error::new(ErrorKind::InvalidInput, CHOOSE, format!("{name}={text} is not {what}"))
        };
        let mut wish = Self { device: None, port: None, gid_index: None, address };
        if let Some(text) = device {
            let (name, port) = text.split_once(':').map_or((text, None), |(name, port)| (name, Some(port)));
            let what = "a device, with or without a port, such as mlx5_0:1";
            if name.is_empty() {
                return Err(bad(DEVICE_ENV, text, what));
            }
            wish.device = Some(name.to_owned());
            wish.port = port.map(|port| port.parse().map_err(|_| bad(DEVICE_ENV, text, what))).transpose()?;
        }
        if let Some(text) = gid {
            wish.gid_index = Some(text.parse().map_err(|_| bad(GID_ENV, text, "a number"))?);
        }
        Ok(wish)
    }
}

const CHOOSE: &str = "choose an RDMA device";

/// How good an address is, best first; none where it cannot be used.
fn rank(offer: &GidOffer, layer: Layer, address: IpAddr) -> Option<u8> {
    if offer.gid == [0; 16] {
        return None;
    }
    if layer == Layer::InfiniBand {
        return Some(0);
    }
    // The first version does not leave the segment, and switches of today drop it.
    if !matches!(offer.kind, GidKind::RoceV2 | GidKind::Unknown) {
        return None;
    }
    let gid = Ipv6Addr::from(offer.gid);
    let is_domains = gid.to_canonical() == address.to_canonical();
    Some(match (is_domains, gid.to_ipv4_mapped()) {
        (true, _) => 0,
        (false, Some(_)) => 1,
        (false, None) if gid.segments()[0] & 0xffc0 != 0xfe80 => 2,
        // Of one link alone.
        (false, None) => 3,
    })
}

/// The port, and the index of its address: what was asked for, or else the best of the first port that has one.
///
/// [`ErrorKind::Device`] where there is none; it names each port and why not.
pub(super) fn choose(offers: &[PortOffer], wish: &Wish) -> Result<(usize, GidOffer)> {
    let mut reasons = Vec::new();
    let mut best: Option<(u8, usize, GidOffer)> = None;
    for (at, offer) in offers.iter().enumerate() {
        let mut refuse = |why: &str| reasons.push(format!("{}:{} {why}", offer.device, offer.number));
        if wish.device.as_ref().is_some_and(|device| *device != offer.device)
            || wish.port.is_some_and(|port| port != offer.number)
        {
            refuse("was not asked for");
            continue;
        }
        let Some(layer) = offer.layer else {
            refuse("is neither InfiniBand nor Ethernet");
            continue;
        };
        if !offer.active {
            refuse("is not active");
            continue;
        }
        let found = offer
            .gids
            .iter()
            .filter(|gid| wish.gid_index.is_none_or(|index| index == gid.index))
            .filter_map(|gid| rank(gid, layer, wish.address).map(|rank| (rank, *gid)))
            .min_by_key(|(rank, gid)| (*rank, gid.index));
        match found {
            None => refuse("has no usable address (RoCE v2, or the index that was asked for)"),
            Some((rank, gid)) if best.is_none_or(|(least, _, _)| rank < least) => {
                best = Some((rank, at, gid))
            }
            Some(_) => {}
        }
    }
    let reasons = if reasons.is_empty() { "there is none".to_owned() } else { reasons.join("; ") };
    best.map(|(_, at, gid)| (at, gid)).ok_or_else(|| Error::new(ErrorKind::Device, CHOOSE, reasons))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u32, text: &str, kind: GidKind) -> GidOffer {
        GidOffer { index, gid: text.parse::<Ipv6Addr>().expect("one").octets(), kind }
    }

    fn port(device: &str, gids: Vec<GidOffer>) -> PortOffer {
        PortOffer { device: device.to_owned(), number: 1, active: true, layer: Some(Layer::Ethernet), gids }
    }

    /// As a Mellanox port has it: both versions of each address.
    fn both(device: &str, address: &str) -> PortOffer {
        let mapped = format!("::ffff:{address}");
        port(
            device,
            vec![
                gid(0, "fe80::1", GidKind::RoceV1),
                gid(1, "fe80::1", GidKind::RoceV2),
                gid(2, &mapped, GidKind::RoceV1),
                gid(3, &mapped, GidKind::RoceV2),
                gid(4, "::", GidKind::Unknown),
            ],
        )
    }

    fn wish(address: &str, device: Option<&str>, index: Option<&str>) -> Wish {
        Wish::parse(address.parse().expect("one"), device, index).expect("a wish")
    }

    fn chosen(offers: &[PortOffer], wish: &Wish) -> (String, u32) {
        let (at, gid) = choose(offers, wish).expect("one");
        (offers[at].device.clone(), gid.index)
    }

    #[test]
    fn the_port_that_has_the_address_of_the_domain_is_taken_with_its_roce_v2_entry() {
        let offers = [both("rdma0", "10.0.0.1"), both("rdma1", "10.0.1.1")];
        assert_eq!(chosen(&offers, &wish("10.0.1.1", None, None)), ("rdma1".into(), 3));
        assert_eq!(chosen(&offers, &wish("127.0.0.1", None, None)), ("rdma0".into(), 3), "else the first");
    }

    #[test]
    fn addresses_that_leave_the_link_come_before_those_that_do_not() {
        let global =
            port("a", vec![gid(0, "fe80::1", GidKind::RoceV2), gid(1, "2001:db8::1", GidKind::RoceV2)]);
        assert_eq!(chosen(&[global], &wish("10.0.0.9", None, None)), ("a".into(), 1));
        let link = port("a", vec![gid(0, "fe80::1", GidKind::RoceV2)]);
        assert_eq!(chosen(&[link], &wish("10.0.0.9", None, None)), ("a".into(), 0), "better than none");
    }

    #[test]
    fn what_was_asked_for_is_taken_or_refused_with_the_reason_of_each_port() {
        let offers = [both("rdma0", "10.0.0.1"), both("rdma1", "10.0.1.1")];
        assert_eq!(chosen(&offers, &wish("10.0.0.1", Some("rdma1:1"), Some("1"))), ("rdma1".into(), 1));
        for (device, index, why) in [
            (Some("rdma2"), None, "rdma0:1 was not asked for; rdma1:1 was not asked for"),
            (Some("rdma0:2"), None, "rdma0:1 was not asked for"),
            (Some("rdma0"), Some("2"), "rdma0:1 has no usable address"),
        ] {
            let error = choose(&offers, &wish("10.0.0.1", device, index)).expect_err("none");
            assert_eq!(error.kind(), ErrorKind::Device);
            assert!(error.to_string().contains(why), "{error}");
        }
        for (device, index) in [(Some(":1"), None), (Some("a:b"), None), (None, Some("-1"))] {
            let error = Wish::parse("10.0.0.1".parse().expect("one"), device, index).expect_err("none");
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn a_port_that_is_down_is_passed_over_and_named_where_there_is_no_other() {
        let mut down = both("rdma0", "10.0.0.1");
        down.active = false;
        let error = choose(std::slice::from_ref(&down), &wish("10.0.0.1", None, None)).expect_err("none");
        assert!(error.to_string().contains("rdma0:1 is not active"), "{error}");
        let up = both("rdma1", "10.0.1.1");
        assert_eq!(chosen(&[down, up], &wish("10.0.0.1", None, None)), ("rdma1".into(), 3));
        let none = choose(&[], &wish("10.0.0.1", None, None)).expect_err("none");
        assert!(none.to_string().contains("there is none"), "{none}");
    }

    #[test]
    fn infiniband_takes_the_first_entry_of_its_table() {
        let mut one = port("ib0", vec![gid(0, "fe80::2", GidKind::InfiniBand)]);
        one.layer = Some(Layer::InfiniBand);
        assert_eq!(chosen(&[one], &wish("10.0.0.1", None, None)), ("ib0".into(), 0));
    }
}
