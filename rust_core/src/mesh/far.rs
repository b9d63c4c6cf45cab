//! Messages for processes of other hosts: one frame a host, whatever the number of its processes that it is for.
//!
//! They leave through the gateway of this host, over one connection for each other host: so they arrive in the order in
//! which this process has sent them, casts and single messages alike. The process that serves another host has a
//! connection of its own: what it is asked for waits behind no actor's messages.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use super::aside::Haste;
use super::link::Link;
use super::node::Target;
use super::packet::Packet;
use super::payload::Payload;
use super::shared::{NOWHERE, Shared, locked};
use crate::{Error, ErrorKind, Result};

/// Name of the gateway's socket in the folder of its host.
pub(super) const GATEWAY: &str = "gateway";
/// Name of the socket of the process that serves a host.
const SERVER: &str = "host";

/// Targets of one call on one other host.
#[derive(Debug)]
pub(super) struct Group<'a> {
    /// Names the connection that they are reached by.
    key: String,
    folder: &'a str,
    members: Vec<(u32, &'a Target)>,
}

impl<'a> Group<'a> {
    /// Sorts the targets that are on other hosts, by host. Slots are positions in `targets`.
    pub(super) fn all(shared: &Shared, targets: &'a [Target]) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        for (slot, target) in (0..).zip(targets) {
            let Some((folder, name)) = shared.far(&target.address) else { continue };
            let aside = if name == SERVER { SERVER } else { "" };
            let key = format!("{folder}//{aside}");
            match groups.iter_mut().find(|group| group.key == key) {
                Some(group) => group.members.push((slot, target)),
                None => groups.push(Self { key, folder, members: vec![(slot, target)] }),
            }
        }
        groups
    }

    /// Slots of its targets.
    pub(super) fn slots(&self) -> impl Iterator<Item = u32> + '_ {
        self.members.iter().map(|(slot, _)| *slot)
    }

    /// Sends the message. `sent_to` hears which connection owes the answers. Returns those targets that a message without
    /// an answer was not sent to: they are known to be dead, and why.
    pub(super) fn send(
        &self,
        shared: &Arc<Shared>,
        (call, actor): (u64, u64),
        method: &str,
        payload: &Payload,
        each: bool,
        mut sent_to: impl FnMut(u64),
    ) -> Result<Vec<(u32, String)>> {
        let mut dead = Vec::new();
        let known = |(slot, target): &&(u32, &Target)| match shared.undelivered().take(&target.address) {
            // Of a call its own answer is told, and who calls may know of another process in that place.
            Some(reason) if call == 0 => {
                dead.push((*slot, reason));
                false
            }
            _ => true,
        };
        let members: Vec<&(u32, &Target)> = self.members.iter().filter(known).collect();
        if members.is_empty() {
            return Ok(dead);
        }
        let name = |address: &str| address.rsplit('/').next().unwrap_or_default().to_owned();
        let packed = payload.packed();
        let packet = Packet::Cast {
            call,
            actor,
            method: method.to_owned(),
            to: members
                .iter()
                .map(|(slot, target)| (name(&target.address), *slot, target.place.clone()))
                .collect(),
            gather: !each && self.members.len() > 1,
            parts: packed.parts,
        };
        let link = self.link(shared)?;
        sent_to(link.id());
        let sent = link.send(shared, &packet, packed.segments.clone(), packed.memory.clone(), Haste::Patient);
        let Err(error) = sent else { return Ok(dead) };
        if error.kind() != ErrorKind::Closed {
            return Err(error);
        }
        // Nothing of it has left: the connection had ended before. Another one says why, or has a way again.
        sent_to(NOWHERE);
        shared.lose(&link, "the connection to its host has ended");
        let link = self.link(shared)?;
        sent_to(link.id());
        link.send(shared, &packet, packed.segments, packed.memory, Haste::Patient).map(|()| dead)
    }

    fn link(&self, shared: &Arc<Shared>) -> Result<Arc<Link>> {
        let mut dialled = locked(shared.dialled());
        if let Some(link) = dialled.get(&self.key) {
            return Ok(Arc::clone(link));
        }
        let gateway = Path::new(shared.folder()).join(GATEWAY);
        let socket = UnixStream::connect(gateway).map_err(|error| {
            let why = format!("{} is of another host, and this process is attached to none", self.folder);
            Error::new(ErrorKind::Closed, "reach another host", why).with_source(error)
        })?;
        let link = shared.greet(socket)?;
        let far = Packet::Far { folder: self.folder.to_owned() };
        link.send(shared, &far, Vec::new(), None, Haste::AtOnce)?;
        dialled.insert(self.key.clone(), Arc::clone(&link));
        Ok(link)
    }
}

impl Shared {
    /// A message did not reach the process `name` of the host that a connection leads to.
    pub(super) fn undelivered_by(&self, link: u64, name: &str, reason: &str) {
        let of = |(key, dialled): (&String, &Arc<Link>)| {
            (dialled.id() == link)
                .then(|| key.split_once("//").map(|(folder, _)| folder.to_owned()))
                .flatten()
        };
        let folder = locked(self.dialled()).iter().find_map(of);
        if let Some(folder) = folder {
            self.undelivered().put(format!("{folder}/{name}"), reason);
        }
    }

    /// Folder and name of a socket that is not in the folder of this process's host.
    pub(super) fn far<'a>(&self, address: &'a str) -> Option<(&'a str, &'a str)> {
        address.rsplit_once('/').filter(|(folder, _)| *folder != self.folder())
    }
}
