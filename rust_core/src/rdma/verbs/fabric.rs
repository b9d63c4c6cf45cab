//! A device that is open, the port of it that is used, and what belongs to both.

use std::ffi::CStr;
use std::net::IpAddr;
use std::sync::Arc;

use super::port::{self, GidKind, GidOffer, Layer, PortOffer, Wish};
use crate::gpu::abi::verbs::{
    Context, DeviceAttributes, DeviceObject, Gid, GidEntry, LINK_LAYER_ETHERNET, LINK_LAYER_INFINIBAND,
    PortAttributes, PortState, ProtectionDomain,
};
use crate::gpu::table::verbs::Verbs;
use crate::{Error, ErrorKind, Result};

const OPEN: &str = "open an RDMA device";
/// Entries of a port's table of addresses that are looked at.
const GIDS: u32 = 256;

/// An open device, one port of it, and a protection domain; closed when nobody uses it any more.
pub(in crate::rdma) struct Fabric {
    pub(super) verbs: &'static Verbs,
    pub(super) context: *mut Context,
    pub(super) domain: *mut ProtectionDomain,
    /// Name of the device.
    pub device: String,
    /// Number of the port.
    pub port: u8,
    pub(super) layer: Layer,
    pub(super) gid: GidOffer,
    pub(super) lid: u16,
    /// As `enum ibv_mtu`.
    pub(super) mtu: u8,
    pub(super) max_message: u32,
    pub(super) max_requests: u32,
    /// Reads that this device answers at a time, and asks at a time, for each queue pair.
    pub(super) reads: (u8, u8),
}

// SAFETY: the library lets any thread use a device and a protection domain.
unsafe impl Send for Fabric {}
// SAFETY: as above.
unsafe impl Sync for Fabric {}

impl Drop for Fabric {
    fn drop(&mut self) {
        // SAFETY: regions and queue pairs of it hold it, so there are none left.
        let codes = unsafe {
            [(self.verbs.table.dealloc_pd)(self.domain), (self.verbs.table.close_device)(self.context)]
        };
        if codes != [0, 0] {
            tracing::warn!(device = self.device, ?codes, "an RDMA device was not closed");
        }
    }
}

/// A device that is open only until a port is chosen.
struct Opened {
    verbs: &'static Verbs,
    context: *mut Context,
    device: String,
    limits: DeviceAttributes,
}

impl Drop for Opened {
    fn drop(&mut self) {
        if !self.context.is_null() {
            // SAFETY: opened by us, and nothing was made of it.
            let _code = unsafe { (self.verbs.table.close_device)(self.context) };
        }
    }
}

pub(super) fn failed(operation: &'static str, what: &str, errno: i32) -> Error {
    let error = std::io::Error::from_raw_os_error(errno);
    Error::new(ErrorKind::Device, operation, format!("{what}: {error}")).with_source(error)
}

pub(super) fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

impl Fabric {
    /// Opens the device whose port is best for a domain at `address`, or that the environment names.
    ///
    /// [`ErrorKind::Device`] where there is none; [`ErrorKind::InvalidInput`] where the environment cannot be meant.
    pub(in crate::rdma) fn open(address: IpAddr) -> Result<Arc<Self>> {
        Self::open_for(&Wish::from_env(address)?)
    }

    fn open_for(wish: &Wish) -> Result<Arc<Self>> {
        let verbs = Verbs::get().map_err(|error| Error::new(ErrorKind::Device, OPEN, error.to_string()))?;
        if let Some(fork_init) = verbs.table.fork_init {
            // SAFETY: takes nothing. Only kernels before 5.12 need it; elsewhere it does nothing.
            let code = unsafe { fork_init() };
            if code != 0 {
                tracing::debug!(code, "libibverbs cannot protect its memory from forks");
            }
        }
        let mut devices = opened(verbs);
        let (mut offers, mut ports) = (Vec::new(), Vec::new());
        for (index, device) in devices.iter().enumerate() {
            for number in 1..=device.limits.phys_port_cnt {
                let (offer, attributes) = device.port(number)?;
                offers.push(offer);
                ports.push((index, attributes));
            }
        }
        let (at, gid) = port::choose(&offers, wish)?;
        let (index, attributes) = &ports[at];
        let mut device = devices.swap_remove(*index);
        // SAFETY: the context is open.
        let domain = unsafe { (verbs.table.alloc_pd)(device.context) };
        if domain.is_null() {
            return Err(failed(OPEN, &format!("no protection domain on {}", device.device), errno()));
        }
        let small = |number: i32| u8::try_from(number.clamp(1, 16)).unwrap_or(1);
        let limits = &device.limits;
        let fabric = Self {
            verbs,
            domain,
            port: offers[at].number,
            // The choice is of those that have one.
            layer: offers[at].layer.unwrap_or(Layer::Ethernet),
            gid,
            lid: attributes.lid,
            mtu: u8::try_from(attributes.active_mtu.clamp(1, 5)).unwrap_or(1),
            max_message: attributes.max_msg_sz,
            max_requests: u32::try_from(limits.max_qp_wr.min(limits.max_cqe)).unwrap_or(1).max(1),
            reads: (small(limits.max_qp_rd_atom), small(limits.max_qp_init_rd_atom)),
            context: std::mem::replace(&mut device.context, std::ptr::null_mut()),
            device: std::mem::take(&mut device.device),
        };
        tracing::info!(
            device = fabric.device,
            port = fabric.port,
            gid = fabric.gid.index,
            "RDMA device in use"
        );
        Ok(Arc::new(fabric))
    }
}

/// Every device that this user can open.
fn opened(verbs: &'static Verbs) -> Vec<Opened> {
    let mut count = 0;
    // SAFETY: writes the count and hands out a list that is freed below.
    let list = unsafe { (verbs.table.get_device_list)(&mut count) };
    if list.is_null() {
        return Vec::new();
    }
    let devices = (0..usize::try_from(count).unwrap_or(0))
        // SAFETY: the list has `count` devices.
        .filter_map(|index| open_one(verbs, unsafe { *list.add(index) }))
        .collect();
    // SAFETY: the list came from the library; contexts that are open outlive it.
    unsafe { (verbs.table.free_device_list)(list) };
    devices
}

fn open_one(verbs: &'static Verbs, device: *mut DeviceObject) -> Option<Opened> {
    // SAFETY: of the list, which is alive.
    let (name, context) =
        unsafe { ((verbs.table.get_device_name)(device), (verbs.table.open_device)(device)) };
    if name.is_null() || context.is_null() {
        return None;
    }
    // SAFETY: a C string of the library.
    let device = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    // SAFETY: numbers, for which zero is a value.
    let mut opened = Opened { verbs, context, device, limits: unsafe { std::mem::zeroed() } };
    // SAFETY: the context is open, and the struct is as long as the library's.
    let code = unsafe { (verbs.table.query_device)(context, &mut opened.limits) };
    (code == 0).then_some(opened)
}

impl Opened {
    fn port(&self, number: u8) -> Result<(PortOffer, PortAttributes)> {
        // SAFETY: numbers, for which zero is a value.
        let mut attributes: PortAttributes = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, and the struct at least as long as the library's.
        let code = unsafe { (self.verbs.table.query_port)(self.context, number, &mut attributes) };
        if code != 0 {
            return Err(failed(OPEN, &format!("port {number} of {}", self.device), code));
        }
        let layer = match attributes.link_layer {
            // Devices of before there was another.
            0 | LINK_LAYER_INFINIBAND => Some(Layer::InfiniBand),
            LINK_LAYER_ETHERNET => Some(Layer::Ethernet),
            _ => None,
        };
        let length = u32::try_from(attributes.gid_tbl_len).unwrap_or(0).min(GIDS);
        let gids = (0..length).filter_map(|index| self.gid(number, index)).collect();
        let active = attributes.state == PortState::ACTIVE;
        Ok((PortOffer { device: self.device.clone(), number, active, layer, gids }, attributes))
    }

    fn gid(&self, port: u8, index: u32) -> Option<GidOffer> {
        if let Some(query) = self.verbs.table.query_gid_entry {
            let mut entry = GidEntry::default();
            let size = std::mem::size_of::<GidEntry>();
            // SAFETY: the context is open, and the library is told how long the struct is.
            let code = unsafe { query(self.context, u32::from(port), index, &mut entry, 0, size) };
            let kind = match entry.gid_type {
                0 => GidKind::InfiniBand,
                1 => GidKind::RoceV1,
                2 => GidKind::RoceV2,
                _ => GidKind::Unknown,
            };
            return (code == 0).then_some(GidOffer { index, gid: entry.gid.raw, kind });
        }
        let mut gid = Gid::default();
        // SAFETY: the context is open.
        let code =
            unsafe { (self.verbs.table.query_gid)(self.context, port, i32::try_from(index).ok()?, &mut gid) };
        (code == 0).then_some(GidOffer { index, gid: gid.raw, kind: GidKind::Unknown })
    }
}
