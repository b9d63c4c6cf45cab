//! What a process says to those of a lost host, whose places may be on several others.
//!
//! Each message goes to where its receivers are now, over a session for each of those hosts. Their answers leave over
//! the process's one connection, so what each of the sessions owes is kept count of: where one ends, its own calls fail
//! and no others.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use tokio::net::UnixStream;

use super::super::packet::Packet;
use super::hop::What;
use super::session::{Inlet, MOST_SESSIONS, Session};
use super::socket::{self, Reader};
use super::{Inner, locked, memory};
use crate::wire::Frame;
use crate::{Error, ErrorKind, Result};

/// Name of a process's socket, slot and place, as in a cast.
type To = (String, u32, String);

struct Spread {
    inner: Arc<Inner>,
    folder: String,
    stream: Arc<UnixStream>,
    writing: tokio::sync::Mutex<()>,
    /// By the folder of the host.
    branches: Mutex<HashMap<String, Arc<Session>>>,
    /// By call and slot, the number of the session that owes an answer.
    owed: Mutex<HashMap<u64, HashMap<u32, u64>>>,
}

/// Serves a process until it closes its connection to the processes of the lost host `folder`.
pub(super) async fn serve(inner: &Arc<Inner>, folder: String, mut reader: Reader, stream: Arc<UnixStream>) {
    let spread = Arc::new(Spread {
        inner: Arc::clone(inner),
        folder,
        stream,
        writing: tokio::sync::Mutex::default(),
        branches: Mutex::default(),
        owed: Mutex::default(),
    });
    let reason = loop {
        match spread.pass_on(&mut reader).await {
            Ok(true) => {}
            Ok(false) => break "the process closed the connection".to_owned(),
            Err(error) => break error.to_string(),
        }
    };
    let branches: Vec<_> = locked(&spread.branches).drain().collect();
    for (_, session) in branches {
        session.close(&reason);
    }
}

impl Spread {
    /// Passes the next message on; false where there is none any more.
    async fn pass_on(self: &Arc<Self>, reader: &mut Reader) -> Result<bool> {
        let Some((packet, frame)) = reader.read().await? else { return Ok(false) };
        match packet {
            Packet::Cast { call, actor, method, to, gather, parts } => {
                let memory = reader.memory(&parts)?.as_ref().map(memory::view).transpose()?;
                for (by, to) in self.sorted(to) {
                    let targets = to.clone();
                    let (method, parts) = (method.clone(), parts.clone());
                    let packet = Packet::Cast { call, actor, method, to, gather, parts };
                    let frame = Frame { segments: frame.segments.clone(), ..Frame::from_message(&packet)? };
                    if let Err(error) = self.cast(&by, call, &targets, &frame, memory.as_ref()).await {
                        self.refuse(call, &targets, error.message()).await;
                    }
                }
            }
            Packet::Cancel { call, .. } => {
                let owing = locked(&self.owed).remove(&call).unwrap_or_default();
                let branches: Vec<_> = locked(&self.branches).values().cloned().collect();
                for session in branches {
                    if owing.values().any(|number| *number == session.number()) {
                        // One that has ended meanwhile has nothing to cancel.
                        drop(session.send(frame.clone(), None).await);
                    }
                }
            }
            _ => return Err(Error::new(ErrorKind::Protocol, "read a message", "not for a gateway")),
        }
        Ok(true)
    }

    /// The targets of a cast, by the host where they are, in their order.
    fn sorted(&self, to: Vec<To>) -> Vec<(String, Vec<To>)> {
        let mut found: Vec<(String, Vec<To>)> = Vec::new();
        for target in to {
            let by = self.inner.places.of_process(&self.folder, &target.0);
            match found.iter_mut().find(|(host, _)| *host == by) {
                Some((_, targets)) => targets.push(target),
                None => found.push((by, vec![target])),
            }
        }
        found
    }

    async fn cast(
        self: &Arc<Self>,
        by: &str,
        call: u64,
        to: &[To],
        frame: &Frame,
        memory: Option<&Bytes>,
    ) -> Result<()> {
        for last in [false, true] {
            let session = self.branch(by).await?;
            if call != 0 {
                let slots = to.iter().map(|(_, slot, _)| (*slot, session.number()));
                locked(&self.owed).entry(call).or_default().extend(slots);
            }
            match session.send(frame.clone(), memory.cloned()).await {
                Err(error) if last || error.kind() != ErrorKind::Closed => return Err(error),
                // The session had ended before. Another one says why, or has a way again.
                Err(_) => self.drop_branch(&session),
                Ok(()) => break,
            }
        }
        Ok(())
    }

    async fn branch(self: &Arc<Self>, by: &str) -> Result<Arc<Session>> {
        if let Some(session) = locked(&self.branches).get(by) {
            return Ok(Arc::clone(session));
        }
        if locked(&self.inner.sessions).len() >= MOST_SESSIONS {
            let why = format!("{MOST_SESSIONS} sessions are the most");
            return Err(Error::new(ErrorKind::TooLarge, "reach another host", why));
        }
        let (peer, folder) = self.inner.way(by.to_owned()).await?;
        let (session, inlet) = Session::new(&self.inner, &peer, folder, rand::random());
        session.tell(What::Open);
        locked(&self.branches).insert(by.to_owned(), Arc::clone(&session));
        let (spread, serving) = (Arc::clone(self), Arc::clone(&session));
        self.inner.spawn(async move { spread.inwards(&serving, inlet).await });
        Ok(session)
    }

    fn drop_branch(&self, session: &Arc<Session>) {
        locked(&self.branches).retain(|_, branch| !Arc::ptr_eq(branch, session));
    }

    /// Passes on what comes from one host, until that is over.
    async fn inwards(&self, session: &Arc<Session>, mut inlet: Inlet) {
        let reason = loop {
            let arrived = match inlet.recv(session).await {
                Ok(arrived) => arrived,
                Err(reason) => break reason,
            };
            if let Ok(packet) = arrived.frame.message() {
                self.answered(&packet);
            }
            let turn = self.writing.lock().await;
            if let Err(unsent) = socket::send(&self.stream, &arrived.frame, arrived.memory.as_ref()).await {
                break unsent.error.to_string();
            }
            drop(turn);
            session.credit(arrived.cost);
        };
        self.inner.forget(session);
        if session.reason().is_none() {
            session.close(&reason);
        }
        self.drop_branch(session);
        for (call, slots) in self.owed_by(session.number()) {
            self.tell(&Packet::Gone { call, slots, reason: reason.clone() }).await;
        }
    }

    fn answered(&self, packet: &Packet) {
        let (call, slots) = match packet {
            Packet::Reply { call, slot, .. } => (*call, vec![*slot]),
            Packet::Replies { call, answers } => (*call, answers.iter().map(|(slot, ..)| *slot).collect()),
            Packet::Gone { call, slots, .. } => (*call, slots.clone()),
            _ => return,
        };
        self.settle(call, &slots);
    }

    /// These slots owe nothing any more. Returns those that did.
    fn settle(&self, call: u64, slots: &[u32]) -> Vec<u32> {
        let mut owed = locked(&self.owed);
        let Some(open) = owed.get_mut(&call) else { return Vec::new() };
        let settled = slots.iter().copied().filter(|slot| open.remove(slot).is_some()).collect();
        if open.is_empty() {
            owed.remove(&call);
        }
        settled
    }

    fn owed_by(&self, session: u64) -> Vec<(u64, Vec<u32>)> {
        let mut found = Vec::new();
        locked(&self.owed).retain(|call, open| {
            let slots: Vec<u32> =
                open.iter().filter(|(_, number)| **number == session).map(|(slot, _)| *slot).collect();
            open.retain(|_, number| *number != session);
            if !slots.is_empty() {
                found.push((*call, slots));
            }
            !open.is_empty()
        });
        found
    }

    /// A message cannot be sent to these targets.
    async fn refuse(&self, call: u64, to: &[To], reason: &str) {
        if call != 0 {
            self.settle(call, &to.iter().map(|(_, slot, _)| *slot).collect::<Vec<_>>());
            let slots = to.iter().map(|(_, slot, _)| *slot).collect();
            return self.tell(&Packet::Gone { call, slots, reason: reason.to_owned() }).await;
        }
        for (name, ..) in to {
            self.tell(&Packet::Undelivered { name: name.clone(), reason: reason.to_owned() }).await;
        }
    }

    async fn tell(&self, packet: &Packet) {
        let _turn = self.writing.lock().await;
        if let Ok(frame) = Frame::from_message(packet) {
            // Where the process is gone, nobody waits for that.
            drop(socket::send(&self.stream, &frame, None).await);
        }
    }
}
