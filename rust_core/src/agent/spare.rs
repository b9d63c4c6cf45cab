//! A spare process of a service: started and waiting, so that a death costs no start of an interpreter.
//!
//! ```text
//!  agent ── SKY_MONARCH_SPARE=1, a socket as stdin ──▶ spare: imports, reads its configuration, waits
//!        ── one byte ──▶ it opens what it serves, and is the service from now on
//!        ── end of file ──▶ it ends: it was not needed
//! ```

use std::io::{self, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::sync::{Notify, watch};
use tokio::time::sleep;

use super::mutant;
use super::services::{Life, Starter};
use super::tree::Entry;
use crate::{Error, Result};

/// Tells a process that it is a spare.
pub const SPARE_ENV: &str = "SKY_MONARCH_SPARE";

/// From the start of a service to its spare's: the two do not compete, nor does it with whoever waits for the service.
const SETTLE: Duration = Duration::from_secs(1);
/// Spares that may end by themselves in a row before no more are tried.
const MAX_FAILURES: u32 = 3;

/// The spare of one service: one at a time, filled up by a task of its own.
pub(super) struct Spares {
    shared: Arc<Inner>,
    stop: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct Inner {
    spare: Mutex<Option<Spare>>,
    taken: Notify,
}

struct Spare {
    life: Life,
    /// The agent's end of its standard input.
    line: UnixStream,
}

impl Spares {
    /// Starts one, a moment later, and another one whenever it is taken or ends.
    pub(super) fn start(starter: Arc<Starter>) -> Self {
        let shared = Arc::<Inner>::default();
        let (stop, asked) = watch::channel(false);
        let task = tokio::spawn(Arc::clone(&shared).fill(starter, asked));
        Self { shared, stop, task }
    }

    /// The spare, told to go on as the service; none where none is there, or it has just died.
    pub(super) fn take(&self) -> Option<Life> {
        if mutant::is_on("promote_no_spare") {
            return None;
        }
        let Spare { life, mut line } = self.shared.spare().take()?;
        self.shared.taken.notify_one();
        // A stopped process would be the service by name alone, and everybody would wait for it.
        let is_stopped = Entry::read(life.process.pid).is_some_and(|entry| entry.state == b'T');
        let told = if is_stopped { Err(io::Error::other("it is stopped")) } else { line.write_all(b"1") };
        if let Err(cause) = told {
            tracing::warn!(pid = life.process.pid, %cause, "a spare cannot be told: it is ended");
            let _ = life.process.signal(libc::SIGKILL);
            return None;
        }
        Some(life)
    }

    /// Ends the spare and whatever it left behind.
    pub(super) async fn end(self) {
        self.stop.send_replace(true);
        let _ = self.task.await;
    }
}

impl Inner {
    fn spare(&self) -> MutexGuard<'_, Option<Spare>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn fill(self: Arc<Self>, starter: Arc<Starter>, mut stop: watch::Receiver<bool>) {
        let service = starter.service.name.clone();
        let mut failures = 0;
        while failures < MAX_FAILURES {
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => return,
                () = sleep(SETTLE) => {}
            }
            let (life, line) = match spawn(&starter).await {
                Ok(spawned) => spawned,
                Err(error) => {
                    failures += 1;
                    tracing::warn!(service, %error, "a spare does not start");
                    continue;
                }
            };
            let process = life.process.clone();
            *self.spare() = Some(Spare { life, line });
            let stopped = tokio::select! {
                biased;
                () = self.taken.notified() => { failures = 0; false }
                _ = stop.wait_for(|stop| *stop) => true,
                exited = process.exited() => {
                    failures += 1;
                    tracing::warn!(service, pid = process.pid, exit = ?exited.exit, "a spare ended");
                    false
                }
            };
            // Taken, it is not here any more.
            let unused = self.spare().take();
            if let Some(Spare { life, line }) = unused {
                drop(line);
                starter.end(&life).await;
            }
            if stopped {
                return;
            }
        }
        tracing::error!(service, "no more spares: its next start will take longer");
    }
}

async fn spawn(starter: &Starter) -> Result<(Life, UnixStream)> {
    let (line, theirs) = UnixStream::pair().map_err(|cause| Error::io("make a spare's line", cause))?;
    Ok((starter.spawn(Some(OwnedFd::from(theirs))).await?, line))
}

/// In a spare: waits until it is wanted. False: it never will be.
///
/// Must run inside a Tokio runtime. Where this process is no spare, returns true at once.
pub async fn wanted() -> Result<bool> {
    const OPERATION: &str = "wait as a spare";
    if std::env::var_os(SPARE_ENV).is_none() {
        return Ok(true);
    }
    // SAFETY: standard input is this process's own, and nothing else reads it.
    let line = UnixStream::from(unsafe { OwnedFd::from_raw_fd(0) });
    let copy = line.try_clone();
    // It stays open, whatever becomes of `line`: another file as standard input would surprise.
    std::mem::forget(line);
    let copy = copy.and_then(|copy| copy.set_nonblocking(true).map(|()| copy));
    let told = async { tokio::net::UnixStream::from_std(copy?)?.read(&mut [0]).await };
    told.await.map(|bytes| bytes > 0).map_err(|cause: io::Error| Error::io(OPERATION, cause))
}
