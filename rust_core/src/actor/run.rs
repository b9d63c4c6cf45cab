//! The life of one actor, from `started` to the report of its end.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;

use super::mailbox::{Control, Mailbox, Next};
use super::supervision::{DropGuard, Ending};
use super::{Actor, Context};
use crate::Result;

pub(super) async fn run<A: Actor>(actor: A, ctx: Context<A>, mailbox: Mailbox<A::Msg>, guard: DropGuard) {
    let control = Arc::clone(&ctx.me.control);
    let ending = tokio::select! {
        biased;
        reason = control.killed() => Ending::Killed { reason },
        ending = catch_panic(live(actor, ctx, mailbox)) => match ending {
            Ok(ending) => ending,
            Err(panic) => Ending::Panicked { message: panic_message(panic.as_ref()) },
        },
    };
    guard.report(ending);
}

/// Everything that the kill signal interrupts and whose panics are caught, the drop of the actor included.
async fn live<A: Actor>(mut actor: A, mut ctx: Context<A>, mut mailbox: Mailbox<A::Msg>) -> Ending {
    let control = Arc::clone(&ctx.me.control);
    let ending = match serve(&mut actor, &mut ctx, &mut mailbox, &control).await {
        Ok(reason) => {
            actor.stopping(&reason, &mut ctx).await;
            Ending::Stopped { reason }
        }
        Err(error) => Ending::Failed { error },
    };
    // From here on a sender is told at once instead of after the children's grace.
    mailbox.messages.close();
    stop_children(&mut ctx, &mut mailbox).await;
    ending
}

async fn serve<A: Actor>(
    actor: &mut A,
    ctx: &mut Context<A>,
    mailbox: &mut Mailbox<A::Msg>,
    control: &Control,
) -> Result<String> {
    actor.started(ctx).await?;
    loop {
        match mailbox.next(control).await {
            Next::Stop(reason) => return Ok(reason),
            Next::Supervision(event) => {
                ctx.children.0.remove(&event.id);
                actor.handle_supervision(event, ctx).await?;
            }
            Next::Message(message) => actor.handle(message, ctx).await?,
        }
    }
}

async fn stop_children<A: Actor>(ctx: &mut Context<A>, mailbox: &mut Mailbox<A::Msg>) {
    for child in ctx.children.0.values() {
        child.stop("its parent ended");
    }
    let grace = tokio::time::sleep(ctx.options.children_grace);
    let mut grace = pin!(grace);
    while !ctx.children.0.is_empty() {
        tokio::select! {
            Some(event) = mailbox.supervision.recv() => drop(ctx.children.0.remove(&event.id)),
            () = &mut grace => return, // What is left is killed when `children` drops.
        }
    }
}

async fn catch_panic<T>(future: impl Future<Output = T>) -> Result<T, Box<dyn Any + Send>> {
    let mut future = pin!(future);
    // Unwind safe: after a panic the future is dropped and nothing of it is looked at again.
    std::future::poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
        Ok(poll) => poll.map(Ok),
        Err(panic) => std::task::Poll::Ready(Err(panic)),
    })
    .await
}

/// The words of a panic.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a value that is no text".to_owned())
}
