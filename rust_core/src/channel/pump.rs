//! The two tasks of an open channel, and what they share.

use std::pin::Pin;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};

use super::{Channel, Limits, Receiver, Sender};
use crate::wire::{Frame, FrameReader, FrameWriter};
use crate::{Error, ErrorKind, Result};

/// Reading half of any stream.
pub(super) type Reader = FrameReader<Pin<Box<dyn AsyncRead + Send>>>;
/// Writing half of any stream.
pub(super) type Writer = FrameWriter<Pin<Box<dyn AsyncWrite + Send>>>;

/// Bytes that a queue may still take.
#[derive(Clone, Debug)]
pub(super) struct Budget {
    bytes: Arc<Semaphore>,
    total: u32,
}

impl Budget {
    fn new(total: u32) -> Self {
        let total = total.max(1);
        Self { bytes: Arc::new(Semaphore::new(total as usize)), total }
    }

    fn share(&self, len: usize) -> u32 {
        u32::try_from(len).unwrap_or(u32::MAX).min(self.total)
    }

    pub(super) async fn take(&self, len: usize) -> OwnedSemaphorePermit {
        match Arc::clone(&self.bytes).acquire_many_owned(self.share(len)).await {
            Ok(permit) => permit,
            Err(_) => std::future::pending().await, // Nobody closes the semaphore.
        }
    }

    pub(super) fn try_take(&self, len: usize) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.bytes).try_acquire_many_owned(self.share(len)).ok()
    }
}

/// Whether the channel is closed, and why. The first reason stays.
#[derive(Debug)]
pub(super) struct Closing {
    reason: watch::Sender<Option<(ErrorKind, String)>>,
    written: watch::Sender<bool>,
}

impl Closing {
    fn new() -> Self {
        Self { reason: watch::Sender::new(None), written: watch::Sender::new(false) }
    }

    pub(super) fn close(&self, kind: ErrorKind, reason: String) {
        self.reason.send_if_modified(|current| {
            let first = current.is_none();
            if first {
                *current = Some((kind, reason));
            }
            first
        });
    }

    fn close_with(&self, error: &Error) {
        self.close(error.kind(), error.to_string());
    }

    pub(super) fn is_closed(&self) -> bool {
        self.reason.borrow().is_some()
    }

    pub(super) async fn closed(&self) {
        // The sender lives in `self`, so this cannot fail before the reason comes.
        drop(self.reason.subscribe().wait_for(Option::is_some).await);
    }

    /// Completes when the writer has ended.
    pub(super) async fn finished(&self) {
        drop(self.written.subscribe().wait_for(|written| *written).await);
    }

    pub(super) fn reason(&self) -> Option<String> {
        self.reason.borrow().as_ref().map(|(_, reason)| reason.clone())
    }

    pub(super) fn error(&self, operation: &'static str) -> Error {
        let closed = self.reason.borrow().clone();
        let (kind, reason) =
            closed.unwrap_or_else(|| (ErrorKind::Closed, "the channel is closed".to_owned()));
        Error::new(kind, operation, reason)
    }
}

/// Starts both tasks. `slot` is given back when the connection is gone.
pub(super) fn start<Out, In>(
    reader: Reader,
    writer: Writer,
    limits: &Limits,
    slot: Option<OwnedSemaphorePermit>,
) -> Channel<Out, In>
where
    In: DeserializeOwned + Send + 'static,
{
    let closing = Arc::new(Closing::new());
    let (outbound, out_queue) = mpsc::channel(limits.queue.max(1));
    let (inbound, in_queue) = mpsc::channel(limits.queue.max(1));
    let slot = Arc::new(slot);
    let limits = *limits;

    let (state, held) = (Arc::clone(&closing), Arc::clone(&slot));
    tokio::spawn(async move {
        let _slot = held;
        write(writer.with_max_frame(limits.max_frame), out_queue, &state, limits).await;
        state.written.send_replace(true);
    });
    let state = Arc::clone(&closing);
    tokio::spawn(async move {
        let _slot = slot;
        read(reader.with_max_frame(limits.max_frame), inbound, &state, limits).await;
    });
    Channel {
        sender: Sender {
            queue: outbound,
            budget: Budget::new(limits.queue_bytes),
            closing: Arc::clone(&closing),
            max_frame: limits.max_frame,
            message: std::marker::PhantomData,
        },
        receiver: Receiver { queue: in_queue, closing },
    }
}

async fn read<In: DeserializeOwned>(
    mut reader: Reader,
    queue: mpsc::Sender<(In, OwnedSemaphorePermit)>,
    closing: &Closing,
    limits: Limits,
) {
    let budget = Budget::new(limits.queue_bytes);
    let receiving = async {
        while let Some(frame) = reader.read().await? {
            let message = frame.message()?;
            let permit = budget.take(frame.wire_len()).await;
            if queue.send((message, permit)).await.is_err() {
                break;
            }
        }
        Ok(())
    };
    let outcome: Option<Result<()>> = tokio::select! {
        biased;
        () = closing.closed() => None,
        outcome = receiving => Some(outcome),
    };
    match outcome {
        Some(Ok(())) => closing.close(ErrorKind::Closed, "the peer closed the connection".to_owned()),
        Some(Err(error)) => closing.close_with(&error),
        None => {
            drop(queue);
            // Bytes left unread would turn our orderly end into a reset that can cost the peer our last messages.
            let discard = async { while let Ok(Some(_)) = reader.read().await {} };
            drop(tokio::time::timeout(limits.linger, discard).await);
        }
    }
}

async fn write(
    mut writer: Writer,
    mut queue: mpsc::Receiver<(Frame, OwnedSemaphorePermit)>,
    closing: &Closing,
    limits: Limits,
) {
    let sending = async {
        loop {
            let next = tokio::select! {
                biased;
                next = queue.recv() => next,
                // Takes no more; what is queued still comes out of `recv`, then none.
                () = closing.closed() => {
                    queue.close();
                    queue.recv().await
                }
            };
            match next {
                Some((frame, _permit)) => writer.write(&frame).await?,
                None => return writer.shutdown().await,
            }
        }
    };
    let cut = async {
        closing.closed().await;
        tokio::time::sleep(limits.linger).await;
    };
    let outcome = tokio::select! {
        outcome = sending => outcome,
        () = cut => Ok(()),
    };
    if let Err(error) = outcome {
        queue.close();
        // The peer's last words may still be unread: its end of the stream is the better reason, if it comes.
        drop(tokio::time::timeout(limits.linger, closing.closed()).await);
        closing.close_with(&error);
    }
    closing.close(ErrorKind::Closed, "this side closed the channel".to_owned());
}
