//! A child process held by its pidfd: its death wakes the runtime, signals reach nobody else.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use nix::sys::wait::{Id, WaitPidFlag, waitid};
use tokio::io::Interest;
use tokio::sync::watch;

use super::clock;
use super::spawn::Spawned;
use super::tree::Registry;
use super::watched::watched;
use crate::protocol::Exit;
use crate::{Error, Result};

/// Opens a pidfd (close-on-exec) for a live process or an unreaped child.
pub fn open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: takes two integers; returns a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = i32::try_from(fd).unwrap_or(-1);
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just made and belongs to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sends a signal to exactly the process that `pidfd` refers to.
pub fn signal(pidfd: &OwnedFd, signal: i32) -> io::Result<()> {
    let none = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: an open descriptor, an integer and a null pointer, as pidfd_send_signal(2) allows.
    match unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, none, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// How and when a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exited {
    /// How.
    pub exit: Exit,
    /// When the agent saw it.
    pub at_ns: u64,
    /// The most that it ever had resident, as the kernel counts.
    pub peak_bytes: u64,
}

/// A child process of the agent.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its pid; may be somebody else's once [`Process::exited`] has answered.
    pub pid: u32,
    pidfd: Arc<OwnedFd>,
    exit: watch::Receiver<Option<Exited>>,
}

impl Process {
    /// Watches a child that was just started and reaps it when it ends. A child that cannot be watched, for want of
    /// descriptors most likely, is ended: nobody would know of it.
    pub fn watch(spawned: Spawned, registry: Registry) -> Result<Self> {
        let Spawned { pid, pidfd } = spawned;
        let pidfd = Arc::new(pidfd);
        let (tell, exit) = watch::channel(None);
        let watched = match pidfd.try_clone().and_then(|copy| watched(copy, Interest::READABLE)) {
            Ok(watched) => watched,
            Err(cause) => {
                let _ = self::signal(&pidfd, libc::SIGKILL);
                let _ = waitid(Id::PIDFd(pidfd.as_fd()), WaitPidFlag::WEXITED);
                registry.with_lock(|pids| pids.remove(&pid));
                return Err(Error::io("watch a process", cause));
            }
        };
        tokio::spawn(async move {
            let (exit, peak_bytes) = loop {
                let Ok(mut guard) = watched.readable().await else { break (Exit::Code(-1), 0) };
                match reap(watched.get_ref()) {
                    Some(reaped) => break reaped,
                    None => guard.clear_ready(),
                }
            };
            let _ = tell.send(Some(Exited { exit, at_ns: clock::mono_ns(), peak_bytes }));
            // First whoever waits for this death: a fork holds the lock for as long as it takes.
            tokio::task::yield_now().await;
            registry.with_lock(|pids| pids.remove(&pid));
        });
        Ok(Self { pid, pidfd, exit })
    }

    /// Sends a signal; an error says that the process has ended.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        self::signal(&self.pidfd, signal)
    }

    /// How it ended, if it has.
    pub fn exit(&self) -> Option<Exited> {
        *self.exit.borrow()
    }

    /// Waits for its end.
    pub async fn exited(&self) -> Exited {
        let mut exit = self.exit.clone();
        loop {
            if let Some(exited) = *exit.borrow_and_update() {
                return exited;
            }
            if exit.changed().await.is_err() {
                return Exited { exit: Exit::Code(-1), at_ns: clock::mono_ns(), peak_bytes: 0 };
            }
        }
    }
}

/// How it ended and the most memory it had, once it has ended. The system call itself: libc's `waitid` asks for no
/// account of what was used.
fn reap(pidfd: &OwnedFd) -> Option<(Exit, u64)> {
    // SAFETY: plain C structures, for which zeros are a value.
    let (mut info, mut used): (libc::siginfo_t, libc::rusage) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    let flags = libc::WEXITED | libc::WNOHANG;
    // SAFETY: an open descriptor, and pointers to two structures that outlive the call.
    let done = unsafe {
        let (info, used) = (&raw mut info, &raw mut used);
        libc::syscall(libc::SYS_waitid, libc::P_PIDFD, pidfd.as_raw_fd(), info, flags, used)
    };
    if done != 0 {
        let again = io::Error::last_os_error().kind() == io::ErrorKind::Interrupted;
        // Somebody else reaped it: it is gone, its status with it.
        return (!again).then_some((Exit::Code(-1), 0));
    }
    // SAFETY: waitid has filled it in, or left the zeros that it began with.
    let status = unsafe { info.si_status() };
    let exit = match info.si_code {
        libc::CLD_EXITED => Exit::Code(status),
        libc::CLD_KILLED | libc::CLD_DUMPED => Exit::Signal(status),
        _ => return None,
    };
    Some((exit, u64::try_from(used.ru_maxrss).unwrap_or(0) * 1024))
}
