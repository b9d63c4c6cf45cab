//! The agent's own socket: sessions of live generations dial it, older ones are fenced off.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;

use super::group::Message;
use super::mutant;
use crate::Result;
use crate::channel::{Credentials, Limits, Listener, Pending, Sender};
use crate::lighthouse::identity::Identity;
use crate::lighthouse::refusal::Refusal;
use crate::protocol::{Peer, SessionCommand, SessionReport, Slot};
use crate::wire::Address;

/// What a session does, as its group hears it.
#[derive(Debug)]
pub enum SessionEvent {
    /// It has connected; its work is done at this step.
    Connected(Option<u64>),
    /// It says something.
    Said(SessionReport),
    /// Its connection is gone.
    Closed,
}

impl Group {
    fn admits(&self, generation: u64) -> bool {
        (generation == self.generation && !self.fenced) || mutant::is_on("no_fence")
    }
}

/// The sessions of this host.
#[derive(Clone, Debug, Default)]
pub struct Sessions(Arc<Mutex<HashMap<u32, Group>>>);

#[derive(Debug)]
struct Group {
    generation: u64,
    mailbox: mpsc::Sender<Message>,
    ranks: HashMap<u32, (u64, Sender<SessionCommand>)>,
    ranks_here: Range<u32>,
    connections: u64,
    /// Its generation is ending: what is connected may finish speaking, nobody new is let in.
    fenced: bool,
}

impl Sessions {
    fn groups(&self) -> MutexGuard<'_, HashMap<u32, Group>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts sessions of `generation` of a group, and of no other.
    pub fn open(
        &self,
        replica: u32,
        generation: u64,
        ranks_here: Range<u32>,
        mailbox: mpsc::Sender<Message>,
    ) {
        let group =
            Group { generation, mailbox, ranks: HashMap::new(), ranks_here, connections: 0, fenced: false };
        self.groups().insert(replica, group);
    }

    /// Accepts no session of the group any more.
    pub fn fence(&self, replica: u32) {
        if let Some(group) = self.groups().get_mut(&replica) {
            group.fenced = true;
        }
    }

    /// Drops the sessions of a group too: its generation is over. Only its number stays known.
    pub fn forget(&self, replica: u32) {
        if let Some(group) = self.groups().get_mut(&replica).filter(|_| !mutant::is_on("no_fence")) {
            group.fenced = true;
            group.ranks.clear();
        }
    }

    /// Whether that generation is live here; if not, the lighthouse's word for one that is over, or none for one that
    /// was never started here.
    pub fn standing(&self, identity: Identity) -> std::result::Result<(), Option<Refusal>> {
        let groups = self.groups();
        let group = groups.get(&identity.replica).ok_or(None)?;
        if group.admits(identity.generation) {
            return Ok(());
        }
        let fence = group.generation.saturating_add(u64::from(group.fenced));
        Err((identity.generation < fence).then_some(Refusal::Fenced { identity, fence }))
    }

    /// Tells one rank's session something; false when it has none.
    pub fn tell(&self, slot: Slot, command: &SessionCommand) -> bool {
        let sender = self.groups().get(&slot.replica).and_then(|group| group.ranks.get(&slot.rank)).cloned();
        sender.is_some_and(|(_, sender)| sender.try_send(command).is_ok())
    }

    /// Tells all sessions of a group.
    pub fn tell_group(&self, replica: u32, command: &SessionCommand) {
        for sender in self.senders(|of| of == replica) {
            let _ = sender.try_send(command);
        }
    }

    /// Tells the sessions of all groups.
    pub fn tell_all(&self, command: &SessionCommand) {
        for sender in self.senders(|_| true) {
            let _ = sender.try_send(command);
        }
    }

    /// Tells the sessions of all groups but one.
    pub fn tell_others(&self, replica: u32, command: &SessionCommand) {
        for sender in self.senders(|of| of != replica) {
            let _ = sender.try_send(command);
        }
    }

    fn senders(&self, wanted: impl Fn(u32) -> bool) -> Vec<Sender<SessionCommand>> {
        let groups = self.groups();
        let wanted = groups.iter().filter(|(replica, _)| wanted(**replica));
        wanted.flat_map(|(_, group)| group.ranks.values().map(|(_, sender)| sender.clone())).collect()
    }

    /// Binds the socket and serves it until the agent ends.
    pub async fn serve(
        &self,
        address: &Address,
        credentials: Credentials,
    ) -> Result<tokio::task::JoinHandle<()>> {
        let mut listener = Listener::bind(address, credentials, Limits::default()).await?;
        let sessions = self.clone();
        Ok(tokio::spawn(async move {
            while let Ok(pending) = listener.accept().await {
                tokio::spawn(sessions.clone().greet(pending));
            }
        }))
    }

    fn admit(&self, slot: Slot, generation: u64) -> Result<mpsc::Sender<Message>, String> {
        let groups = self.groups();
        let Slot { replica, rank } = slot;
        let group = groups
            .get(&replica)
            .ok_or_else(|| format!("replica group {replica} has no live generation here"))?;
        if !group.admits(generation) {
            let live = group.generation;
            return Err(format!(
                "generation {generation} of replica group {replica} is fenced off (the latest here is {live})"
            ));
        }
        if !group.ranks_here.contains(&rank) {
            return Err(format!("replica group {replica} has no rank {rank} here"));
        }
        Ok(group.mailbox.clone())
    }

    async fn greet(self, pending: Pending) {
        let Peer::Session { slot, generation, target_step, .. } = *pending.peer() else {
            drop(pending.refuse("only sessions dial this socket").await);
            return;
        };
        let mailbox = match self.admit(slot, generation) {
            Ok(mailbox) => mailbox,
            Err(reason) => {
                tracing::warn!(?slot, generation, reason, "a session is refused");
                drop(pending.refuse(reason).await);
                return;
            }
        };
        let Ok(channel) = pending.welcome::<SessionCommand, SessionReport>().await else { return };
        let (sender, mut receiver) = channel.split();
        let id = {
            let mut groups = self.groups();
            // The generation may have ended during the handshake.
            let Some(group) = groups.get_mut(&slot.replica).filter(|group| group.admits(generation)) else {
                return;
            };
            group.connections += 1;
            group.ranks.insert(slot.rank, (group.connections, sender));
            group.connections
        };
        let say = |event| mailbox.send(Message::Session { rank: slot.rank, generation, event });
        let mut open = say(SessionEvent::Connected(target_step)).await.is_ok();
        while open {
            open = match receiver.recv().await {
                Ok(report) => say(SessionEvent::Said(report)).await.is_ok(),
                Err(_) => false,
            };
        }
        let is_latest = {
            let mut groups = self.groups();
            let group = groups.get_mut(&slot.replica).filter(|group| group.generation == generation);
            match group {
                Some(group) if group.ranks.get(&slot.rank).is_some_and(|(latest, _)| *latest == id) => {
                    group.ranks.remove(&slot.rank);
                    true
                }
                _ => false,
            }
        };
        if is_latest {
            let _ = say(SessionEvent::Closed).await;
        }
    }
}
