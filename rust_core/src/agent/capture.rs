//! What a rank prints: its pipe is read to the last byte, into files, and its last lines are remembered.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;

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
/// Chunks read to catch up with a writer that has ended; a descendant may go on writing for ever.
const CATCH_UP_CHUNKS: usize = 64;

enum Control {
    /// What follows goes to another stream; what was written before does not.
    Switch(Target, oneshot::Sender<()>),
    /// Read what is there now.
    CatchUp(oneshot::Sender<()>),
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

/// The running capture of one process.
#[derive(Debug)]
pub struct Capture {
    control: mpsc::Sender<Control>,
    tail: Arc<Mutex<Tail>>,
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
        let tail = Arc::new(Mutex::new(Tail::default()));
        let reader = Reader { pipe, writer: Some(Writer::new(target)), tail: Arc::clone(&tail), outbox, replica };
        Ok(Self { control, tail, reader: tokio::spawn(reader.run(commands)) })
    }

    /// Sends what is printed from now on to another stream.
    pub async fn switch(&self, target: Target) {
        let (done, wait) = oneshot::channel();
        if self.control.send(Control::Switch(target, done)).await.is_ok() {
            let _ = wait.await;
        }
    }

    /// The last lines, those included that the process wrote just before it ended. Waits for `limit` at most.
    pub async fn tail(&self, limit: Duration) -> Vec<String> {
        let (done, wait) = oneshot::channel();
        let asked = async {
            if self.control.send(Control::CatchUp(done)).await.is_ok() {
                let _ = wait.await;
            }
        };
        let _ = timeout(limit, asked).await;
        self.tail.lock().unwrap_or_else(PoisonError::into_inner).lines()
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
    pipe: Receiver,
    writer: Option<Writer>,
    tail: Arc<Mutex<Tail>>,
    outbox: Outbox,
    replica: Option<u32>,
}

impl Reader {
    async fn run(mut self, mut commands: mpsc::Receiver<Control>) {
        let mut buffer = vec![0; CHUNK];
        let mut open = true;
        loop {
            tokio::select! {
                biased;
                command = commands.recv() => match command {
                    Some(Control::Switch(target, done)) => {
                        self.catch_up(&mut buffer).await;
                        self.writer = Some(Writer::new(target));
                        let _ = done.send(());
                    }
                    Some(Control::CatchUp(done)) => {
                        self.catch_up(&mut buffer).await;
                        let _ = done.send(());
                    }
                    Some(Control::Finish(done)) => {
                        self.catch_up(&mut buffer).await;
                        let _ = done.send(());
                        return;
                    }
                    None => return,
                },
                read = self.pipe.read(&mut buffer), if open => match read {
                    Ok(0) | Err(_) => open = false,
                    Ok(n) => buffer = self.keep(buffer, n).await,
                },
            }
        }
    }

    async fn catch_up(&mut self, buffer: &mut Vec<u8>) {
        for _ in 0..CATCH_UP_CHUNKS {
            // Straight from the pipe: the runtime may not have heard yet that there is something to read.
            match nix::unistd::read(&self.pipe, buffer) {
                Ok(n) if n > 0 => *buffer = self.keep(std::mem::take(buffer), n).await,
                Err(nix::errno::Errno::EINTR) => {}
                _ => return,
            }
        }
    }

    /// Remembers and writes `buffer[..n]`, off the runtime: a disk may take its time.
    async fn keep(&mut self, buffer: Vec<u8>, n: usize) -> Vec<u8> {
        self.tail.lock().unwrap_or_else(PoisonError::into_inner).push(&buffer[..n]);
        let Some(mut writer) = self.writer.take() else { return buffer };
        let written = tokio::task::spawn_blocking(move || {
            let result = writer.append(&buffer[..n]);
            (writer, buffer, result)
        });
        match written.await {
            Ok((writer, buffer, result)) => {
                if let Err(cause) = result {
                    let message = format!("output of a rank is lost, its log cannot be written: {cause}");
                    self.outbox.emit(Event::Notice { replica: self.replica, message });
                }
                self.writer = Some(writer);
                buffer
            }
            Err(_) => vec![0; CHUNK],
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
