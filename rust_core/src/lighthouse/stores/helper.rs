//! The process that serves the stores.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};

use crate::agent::mutant;
use crate::store_helper::Line;
use crate::{Error, ErrorKind, Result};

/// The helper's end of the line, in the helper.
const LINE_FD: RawFd = 3;

/// How a helper is started.
#[derive(Clone, Debug)]
pub struct Command {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// `PATH` of the helper, where its program is looked up too; none: our own.
    pub path: Option<String>,
}

/// A running helper. Dropping it kills it.
#[derive(Debug)]
pub(super) struct Helper {
    child: Option<Child>,
    pub(super) line: Line,
}

impl Helper {
    /// Starts one: it says on our standard error what it has to say, and ends with us.
    pub(super) fn start(command: &Command) -> Result<Self> {
        const OPERATION: &str = "start the stores' helper";
        let Some((program, arguments)) = command.argv.split_first() else {
            return Err(Error::new(ErrorKind::Refused, OPERATION, "its command is empty"));
        };
        let (line, theirs) = Line::pair()?;
        let theirs = raised(&theirs)?;
        let fd = theirs.as_raw_fd();
        let mut starting = std::process::Command::new(program);
        starting.args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
        if let Some(path) = &command.path {
            starting.env("PATH", path);
        }
        let dies_with_us = !mutant::is_on("no_death_signal");
        let prepare = move || {
            // SAFETY: async-signal-safe calls with plain numbers; `fd` is open in the child, as in us.
            unsafe {
                if libc::dup2(fd, LINE_FD) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                // Where it cannot see the end of the line (stopped), it must not outlive us either.
                if dies_with_us {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                }
                // Its import of torch, seconds, must not stand in the way of the ranks'.
                libc::setpriority(libc::PRIO_PROCESS, 0, 0);
            }
            Ok(())
        };
        // SAFETY: `prepare` calls only async-signal-safe functions.
        let spawned = unsafe { starting.pre_exec(prepare) }.spawn();
        let child = spawned.map_err(|cause| {
            Error::new(ErrorKind::Io, OPERATION, format!("{program}: {cause}")).with_source(cause)
        })?;
        Ok(Self { child: Some(child), line })
    }

    /// Its pid.
    pub(super) fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// Gives it our own niceness, now that torch is imported: ranks wait for it. Where that takes a right that we
    /// do not have, it stays as it is.
    pub(super) fn promote(&self) {
        // SAFETY: both take plain numbers; 0 is this process. The child is not reaped yet, so the pid is its own.
        unsafe {
            let own = libc::getpriority(libc::PRIO_PROCESS, 0);
            libc::setpriority(libc::PRIO_PROCESS, self.pid(), own);
        }
    }

    /// Kills and reaps it.
    pub(super) async fn end(mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            // a killed process ends in milliseconds, but not at once
            let _ = tokio::task::spawn_blocking(move || child.wait()).await;
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A copy of a descriptor out of the way of [`LINE_FD`], close-on-exec.
fn raised(fd: &OwnedFd) -> Result<OwnedFd> {
    // SAFETY: `fd` is open; the call returns a new descriptor or -1.
    let high = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, LINE_FD + 1) };
    if high < 0 {
        return Err(Error::io("duplicate a descriptor", std::io::Error::last_os_error()));
    }
    // SAFETY: `high` was just made and belongs to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(high) })
}
