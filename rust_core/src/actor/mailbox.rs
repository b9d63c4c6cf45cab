//! The mailbox: one bounded queue for each priority class, read in the order Signal > Stop > SupervisionEvent >
//! Message.
//!
//! A signal and a stop are one slot each (the first reason stays). Supervision events have room by reservation, one
//! a child. Only messages can fill up, and then they make their sender wait.

use tokio::sync::{mpsc, watch};

use super::supervision::SupervisionEvent;

/// Sending ends that every handle shares. A slot holds the reason, once there is one.
#[derive(Debug)]
pub(super) struct Control {
    kill: watch::Sender<Option<String>>,
    stop: watch::Sender<Option<String>>,
    ended: watch::Sender<bool>,
}

impl Control {
    pub(super) fn new() -> Self {
        Self {
            kill: watch::Sender::new(None),
            stop: watch::Sender::new(None),
            ended: watch::Sender::new(false),
        }
    }

    pub(super) fn kill(&self, reason: &str) {
        set_once(&self.kill, reason);
    }

    pub(super) fn stop(&self, reason: &str) {
        set_once(&self.stop, reason);
    }

    pub(super) fn mark_ended(&self) {
        self.ended.send_replace(true);
    }

    pub(super) fn has_ended(&self) -> bool {
        *self.ended.borrow()
    }

    pub(super) async fn wait_ended(&self) {
        // The sender lives in `self`, so this cannot fail before the value comes.
        drop(self.ended.subscribe().wait_for(|ended| *ended).await);
    }

    /// Completes with the reason of the kill signal.
    pub(super) async fn killed(&self) -> String {
        wait_for_reason(&self.kill).await
    }

    pub(super) async fn stopped(&self) -> String {
        wait_for_reason(&self.stop).await
    }
}

fn set_once(slot: &watch::Sender<Option<String>>, reason: &str) {
    slot.send_if_modified(|current| {
        let first = current.is_none();
        if first {
            *current = Some(reason.to_owned());
        }
        first
    });
}

async fn wait_for_reason(slot: &watch::Sender<Option<String>>) -> String {
    let mut receiver = slot.subscribe();
    // The sender lives in `slot`, so this cannot fail before the reason comes.
    let reason = receiver.wait_for(Option::is_some).await;
    reason.ok().and_then(|reason| reason.clone()).unwrap_or_default()
}

/// Receiving end, owned by the actor's task.
pub(super) struct Mailbox<M> {
    pub(super) messages: mpsc::Receiver<M>,
    pub(super) supervision: mpsc::Receiver<SupervisionEvent>,
}

/// What the actor does next.
pub(super) enum Next<M> {
    Stop(String),
    Supervision(SupervisionEvent),
    Message(M),
}

impl<M> Mailbox<M> {
    /// The most urgent thing there is; waits where there is none. (Signals interrupt from outside: see `run`.)
    pub(super) async fn next(&mut self, control: &Control) -> Next<M> {
        tokio::select! {
            biased;
            reason = control.stopped() => Next::Stop(reason),
            Some(event) = self.supervision.recv() => Next::Supervision(event),
            Some(message) = self.messages.recv() => Next::Message(message),
            // Unreachable: the context holds a sender of both queues.
            else => Next::Stop("every handle is gone".to_owned()),
        }
    }
}
