//! Actors: one message at a time, a bounded mailbox, and an owner who hears of every end exactly once.
//!
//! ```text
//!  Signal            ends the actor at once, even inside a handler
//!  Stop              ends it after the handler under way; messages still queued are dropped
//!  SupervisionEvent  a child ended
//!  Message           bounded; a full mailbox makes its senders wait
//! ```
//!
//! An actor lives until it is stopped, killed, or fails. On a stop or a failure its children end before it does: they
//! are stopped, and killed where that takes longer than [`Options::children_grace`]. A killed (or panicking) actor
//! takes its children with it at once. An actor must not `send` to its own full mailbox and wait: it is the one who
//! would make room (use `try_send`).

mod mailbox;
mod run;
mod supervision;

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use crate::{Error, ErrorKind, Result};
use mailbox::{Control, Mailbox};
pub(crate) use run::panic_message;
pub use supervision::{ActorId, Ending, SupervisionEvent};
use supervision::{DropGuard, Owner};

/// State and behaviour of an actor. Its methods never run at the same time as each other.
pub trait Actor: Send + Sized + 'static {
    /// What it is sent.
    type Msg: Send + 'static;

    /// Runs before the first message. An error ends the actor as [`Ending::Failed`].
    fn started(&mut self, ctx: &mut Context<Self>) -> impl Future<Output = Result<()>> + Send {
        let _ = ctx;
        async { Ok(()) }
    }

    /// Handles one message. An error ends the actor as [`Ending::Failed`], which its owner hears.
    fn handle(&mut self, msg: Self::Msg, ctx: &mut Context<Self>) -> impl Future<Output = Result<()>> + Send;

    /// A child ended. By default a failure escalates (this actor fails too) and an orderly stop is ignored.
    fn handle_supervision(
        &mut self,
        event: SupervisionEvent,
        ctx: &mut Context<Self>,
    ) -> impl Future<Output = Result<()>> + Send {
        let _ = ctx;
        async move {
            if event.ending.is_failure() {
                let what = format!("child {} {}", event.name, event.ending);
                return Err(Error::new(ErrorKind::Closed, "go on without a child", what));
            }
            Ok(())
        }
    }

    /// Runs once on an orderly stop, before the children are stopped.
    fn stopping(&mut self, reason: &str, ctx: &mut Context<Self>) -> impl Future<Output = ()> + Send {
        let _ = (reason, ctx);
        async {}
    }
}

/// Bounds of one actor.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Messages that may wait; one more makes its sender wait.
    pub mailbox: usize,
    /// Children alive (or ended and not yet handled) at a time; one more is refused.
    pub children: usize,
    /// Time for the children to stop in order when this actor ends.
    pub children_grace: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { mailbox: 1024, children: 1024, children_grace: Duration::from_secs(5) }
    }
}

/// A handle to an actor: cheap to clone, keeps nothing alive.
pub struct ActorRef<M> {
    id: ActorId,
    name: Arc<str>,
    messages: mpsc::Sender<M>,
    control: Arc<Control>,
}

impl<M> Clone for ActorRef<M> {
    fn clone(&self) -> Self {
        Self {
            id: self.id,
            name: Arc::clone(&self.name),
            messages: self.messages.clone(),
            control: Arc::clone(&self.control),
        }
    }
}

impl<M> fmt::Debug for ActorRef<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ActorRef({}, id {})", self.name, self.id)
    }
}

impl<M: Send + 'static> ActorRef<M> {
    /// Identity of the actor.
    pub const fn id(&self) -> ActorId {
        self.id
    }

    /// Name of the actor, as given at the spawn.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Queues a message, waiting while the mailbox is full. [`ErrorKind::Closed`] when the actor has ended.
    pub async fn send(&self, msg: M) -> Result<()> {
        self.messages.send(msg).await.map_err(|_| self.gone())
    }

    /// Queues a message without waiting. [`ErrorKind::TooLarge`] when the mailbox is full.
    pub fn try_send(&self, msg: M) -> Result<()> {
        self.messages.try_send(msg).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Error::new(
                ErrorKind::TooLarge,
                "send to an actor",
                format!("the mailbox of {} is full", self.name),
            ),
            mpsc::error::TrySendError::Closed(_) => self.gone(),
        })
    }

    /// Sends what `make` makes around a reply slot and waits for the reply, `deadline` at most.
    pub async fn ask<R: Send>(
        &self,
        deadline: Duration,
        make: impl FnOnce(oneshot::Sender<R>) -> M,
    ) -> Result<R> {
        let (reply, answer) = oneshot::channel();
        let asking = async {
            self.send(make(reply)).await?;
            answer.await.map_err(|_| self.gone())
        };
        tokio::time::timeout(deadline, asking).await.map_err(|_| {
            let what = format!("{} gave no answer within {deadline:?}", self.name);
            Error::new(ErrorKind::TimedOut, "ask an actor", what)
        })?
    }

    /// Asks for an orderly end. The first reason stays; later calls do nothing.
    pub fn stop(&self, reason: &str) {
        self.control.stop(reason);
    }

    /// Ends the actor at once, dropping the handler under way at its next `.await`; its children too.
    pub fn kill(&self, reason: &str) {
        self.control.kill(reason);
    }

    /// True once the actor has ended and its owner has been told.
    pub fn has_ended(&self) -> bool {
        self.control.has_ended()
    }

    /// Completes once [`has_ended`](Self::has_ended).
    pub async fn ended(&self) {
        self.control.wait_ended().await;
    }

    fn gone(&self) -> Error {
        Error::new(ErrorKind::Closed, "send to an actor", format!("{} has ended", self.name))
    }
}

/// What a running actor may do besides changing its own state.
pub struct Context<A: Actor> {
    me: ActorRef<A::Msg>,
    options: Options,
    supervision: mpsc::Sender<SupervisionEvent>,
    children: Children,
}

impl<A: Actor> Context<A> {
    /// The handle to this actor, for timers and tasks of its own.
    pub const fn actor(&self) -> &ActorRef<A::Msg> {
        &self.me
    }

    /// Starts a child. Its end arrives at [`Actor::handle_supervision`], exactly once.
    ///
    /// [`ErrorKind::TooLarge`] when [`Options::children`] are alive already.
    pub fn spawn<C: Actor>(&mut self, name: &str, options: Options, child: C) -> Result<ActorRef<C::Msg>> {
        let permit = self.supervision.clone().try_reserve_owned().map_err(|_| {
            let what = format!("{} has {} children already", self.me.name, self.options.children);
            Error::new(ErrorKind::TooLarge, "start a child actor", what)
        })?;
        let actor = start(name, options, child, Owner::Parent(permit));
        self.children.0.insert(actor.id, Arc::clone(&actor.control));
        Ok(actor)
    }

    /// Asks this actor itself for an orderly end, after the handler under way.
    pub fn stop(&self, reason: &str) {
        self.me.stop(reason);
    }
}

/// Live children. Dropping it kills them, so that none outlives its parent, however that ended.
#[derive(Default)]
struct Children(HashMap<ActorId, Arc<Control>>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in self.0.values() {
            child.kill("its parent ended");
        }
    }
}

/// An actor owned by code that is no actor. Dropping it kills the actor.
#[derive(Debug)]
pub struct Running<M: Send + 'static> {
    actor: ActorRef<M>,
    end: oneshot::Receiver<SupervisionEvent>,
}

impl<M: Send + 'static> Running<M> {
    /// The handle.
    pub const fn actor(&self) -> &ActorRef<M> {
        &self.actor
    }

    /// Waits until the actor has ended. Cancel safe: the event is kept for the next call until it was returned.
    pub async fn wait(&mut self) -> Option<SupervisionEvent> {
        (&mut self.end).await.ok()
    }

    /// Stops the actor in order and waits for its end; kills it after `deadline`.
    pub async fn stop(mut self, reason: &str, deadline: Duration) -> Option<SupervisionEvent> {
        self.actor.stop(reason);
        if let Ok(event) = tokio::time::timeout(deadline, self.wait()).await {
            return event;
        }
        self.actor.kill(reason);
        self.wait().await
    }
}

impl<M: Send + 'static> Drop for Running<M> {
    fn drop(&mut self) {
        self.actor.kill("its owner is gone");
    }
}

/// Starts an actor without a parent, on the current Tokio runtime.
pub fn spawn<A: Actor>(name: &str, options: Options, actor: A) -> Running<A::Msg> {
    let (report, end) = oneshot::channel();
    Running { actor: start(name, options, actor, Owner::Code(report)), end }
}

fn start<A: Actor>(name: &str, options: Options, actor: A, owner: Owner) -> ActorRef<A::Msg> {
    let (messages, message_queue) = mpsc::channel(options.mailbox.max(1));
    let (supervision, supervision_queue) = mpsc::channel(options.children.max(1));
    let id = ActorId::next();
    let me = ActorRef { id, name: name.into(), messages, control: Arc::new(Control::new()) };
    let guard = DropGuard::new(id, Arc::clone(&me.name), owner, Arc::clone(&me.control));
    let mailbox = Mailbox { messages: message_queue, supervision: supervision_queue };
    let ctx = Context { me: me.clone(), options, supervision, children: Children::default() };
    tokio::spawn(run::run(actor, ctx, mailbox, guard));
    me
}
