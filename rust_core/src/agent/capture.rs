//! What a rank prints: its pipe is read to the last byte, into files, and its last lines are remembered.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::unix::pipe::Receiver;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::evidence;
use super::outbox::Outbox;
use super::segments::{Target, Writer};
use crate::protocol::Event;
use crate::{Error, Result};

/// Bytes read at once.
const CHUNK: usize = 64 * 1024;
/// Lines remembered for events.
pub const TAIL_LINES: usize = 20;
/// Bytes remembered for them.
const TAIL_BYTES: usize = 32 * 1024;
/// Characters of a line shown.
const TAIL_CHARS: usize = 1000;
/// Wanted size of the pipe: a writer meets a slow disk later.
const PIPE_BYTES: i32 = 1024 * 1024;
/// Chunks read to catch up with a writer that has ended; a descendant may go on writing for ever. The capacity of the
/// pipe is less, also where `F_SETPIPE_SZ` was not allowed.
const CATCH_UP_CHUNKS: usize = 64;

enum Control {
    /// What follows goes to another stream; what was written before does not.
    Switch(Target, oneshot::Sender<()>),
    /// Read what is there now, then close.
    Finish(oneshot::Sender<()>),
}

/// The last bytes of a stream.
#[derive(Debug, Default)]
pub struct Tail(Vec<u8>);

impl Tail {
    /// Appends to the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
        if self.0.len() > 2 * TAIL_BYTES {
            self.0.drain(..self.0.len() - TAIL_BYTES);
        }
    }

    /// The last lines, for people: bad UTF-8 replaced, of a line that was redrawn with `\r` the last state.
    pub fn lines(&self) -> Vec<String> {
        let text = String::from_utf8_lossy(&self.0);
        let mut lines: Vec<String> = text
            .trim_end_matches(['\n', '\r'])
            .rsplit('\n')
            .take(TAIL_LINES)
            .map(|line| {
                let line = line.trim_end_matches('\r');
                line.rsplit('\r').next().unwrap_or(line).chars().take(TAIL_CHARS).collect()
            })
            .collect();
        if lines.len() == 1 && lines[0].is_empty() {
            lines.clear();
        }
        lines.reverse();
        lines
    }
}

/// What was read from a pipe.
#[derive(Debug)]
struct Intake {
    tail: Tail,
    /// Read, and not yet on its way to the disk.
    unwritten: Vec<u8>,
    buffer: Vec<u8>,
}

impl Intake {
    fn keep(&mut self, n: usize) {
        self.tail.push(&self.buffer[..n]);
        self.unwritten.extend_from_slice(&self.buffer[..n]);
    }
}

/// A pipe and what was read from it. Two read from it, both under the lock, so that the bytes stay in order: a task, as
/// they come, and whoever wants the last words of a process, which cannot wait for that task or for a disk.
#[derive(Debug)]
struct Stream {
    pipe: Receiver,
    intake: Mutex<Intake>,
}

impl Stream {
    fn intake(&self) -> MutexGuard<'_, Intake> {
        self.intake.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads once, where the runtime says that there is something. False at the end of the stream.
    fn take_in(&self) -> bool {
        let mut intake = self.intake();
        match self.pipe.try_read(&mut intake.buffer) {
            Ok(0) => false,
            Ok(n) => {
                intake.keep(n);
                true
            }
            Err(cause) => matches!(cause.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
        }
    }

    /// Reads what is there now, straight from the pipe: the runtime may not have heard of it yet.
    fn catch_up(&self) -> MutexGuard<'_, Intake> {
        let mut intake = self.intake();
        for _ in 0..CATCH_UP_CHUNKS {
            match nix::unistd::read(&self.pipe, &mut intake.buffer) {
                Ok(n) if n > 0 => intake.keep(n),
                Err(nix::errno::Errno::EINTR) => {}
                _ => break,
            }
        }
        intake
    }
}

/// The running capture of one process.
#[derive(Debug)]
pub struct Capture {
    control: mpsc::Sender<Control>,
    stream: Arc<Stream>,
    reader: JoinHandle<()>,
}

/// Makes the pipe of a process: our end, and the end for its stdout and stderr.
pub fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    let (read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)
        .map_err(|errno| Error::io("make a pipe", errno.into()))?;
    // Best effort: an unprivileged user may have used up the pages it has for pipes.
    let _ = nix::fcntl::fcntl(&write, nix::fcntl::FcntlArg::F_SETPIPE_SZ(PIPE_BYTES));
    Ok((read, write))
}

impl Capture {
    /// Starts to read `pipe` into `target`. Trouble with the disk is told through `outbox`, once an outage.
    pub fn start(pipe: OwnedFd, target: Target, outbox: Outbox, replica: Option<u32>) -> Result<Self> {
        let pipe = Receiver::from_owned_fd(pipe).map_err(|cause| Error::io("read a pipe", cause))?;
        let (control, commands) = mpsc::channel(8);
        let intake = Intake { tail: Tail::default(), unwritten: Vec::new(), buffer: vec![0; CHUNK] };
        let stream = Arc::new(Stream { pipe, intake: Mutex::new(intake) });
        let reader =
            Reader { stream: Arc::clone(&stream), writer: Some(Writer::new(target)), outbox, replica };
        Ok(Self { control, stream, reader: tokio::spawn(reader.run(commands)) })
    }

    /// Sends what is printed from now on to another stream.
    pub async fn switch(&self, target: Target) {
        let (done, wait) = oneshot::channel();
        if self.control.send(Control::Switch(target, done)).await.is_ok() {
            let _ = wait.await;
        }
    }

    /// The last lines, those included that the process wrote just before it ended. Never waits.
    pub fn tail(&self) -> Vec<String> {
        self.stream.catch_up().tail.lines()
    }

    /// The last lines, and the last traceback, which may be longer.
    pub fn last_words(&self) -> (Vec<String>, Vec<String>) {
        let intake = self.stream.catch_up();
        (intake.tail.lines(), evidence::traceback(&String::from_utf8_lossy(&intake.tail.0)))
    }

    /// Ends the capture: all that is in the pipe now is still read, within `limit`.
    pub async fn finish(mut self, limit: Duration) {
        let (done, wait) = oneshot::channel();
        let asked = async {
            if self.control.send(Control::Finish(done)).await.is_ok() {
                let _ = wait.await;
            }
            let _ = (&mut self.reader).await;
        };
        if timeout(limit, asked).await.is_err() {
            self.reader.abort();
        }
    }
}

struct Reader {
    stream: Arc<Stream>,
    writer: Option<Writer>,
    outbox: Outbox,
    replica: Option<u32>,
}

impl Reader {
    async fn run(mut self, mut commands: mpsc::Receiver<Control>) {
        let mut open = true;
        loop {
            tokio::select! {
                biased;
                command = commands.recv() => match command {
                    Some(Control::Switch(target, done)) => {
                        drop(self.stream.catch_up());
                        self.write().await;
                        self.writer = Some(Writer::new(target));
                        let _ = done.send(());
                    }
                    Some(Control::Finish(done)) => {
                        drop(self.stream.catch_up());
                        self.write().await;
                        let _ = done.send(());
                        return;
                    }
                    None => return,
                },
                ready = self.stream.pipe.readable(), if open => {
                    open = ready.is_ok() && self.stream.take_in();
                    // Also where it found nothing: somebody else may have read it.
                    self.write().await;
                }
            }
        }
    }

    /// Writes what was read, off the runtime: a disk may take its time. Nothing more is read meanwhile, so a process
    /// that prints faster than its disk waits for it.
    async fn write(&mut self) {
        let bytes = std::mem::take(&mut self.stream.intake().unwritten);
        if bytes.is_empty() {
            return;
        }
        let Some(mut writer) = self.writer.take() else { return };
        let written = tokio::task::spawn_blocking(move || {
            let result = writer.append(&bytes);
            (writer, result)
        });
        let Ok((writer, result)) = written.await else { return };
        self.writer = Some(writer);
        if let Err(cause) = result {
            let message = format!("output of a rank is lost, its log cannot be written: {cause}");
            self.outbox.emit(Event::Notice { replica: self.replica, message });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_is_readable_whatever_was_printed() {
        let mut tail = Tail::default();
        assert!(tail.lines().is_empty());
        tail.push(b"10%\r50%\r100%\nwindows\r\n\xff\xfe bad\npartial");
        assert_eq!(tail.lines(), ["100%", "windows", "\u{fffd}\u{fffd} bad", "partial"]);
        for i in 0..100_000 {
            tail.push(format!("line {i}\n").as_bytes());
        }
        assert_eq!(tail.lines().len(), TAIL_LINES);
        assert_eq!(tail.lines().last().map(String::as_str), Some("line 99999"));
        assert!(tail.0.len() <= 2 * TAIL_BYTES);
    }
}
