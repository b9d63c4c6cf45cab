//! Starts processes: fork and exec on one thread that lives as long as the agent.
//!
//! One thread, because the death signal of a child fires when the *thread* that forked it ends. The child resets
//! what it would inherit (signal mask and dispositions, open files, niceness) before it executes its program.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::mpsc;

use tokio::sync::oneshot;

use super::mutant;
use super::tree::Registry;
use crate::{Error, ErrorKind, Result};

/// Longest time from fork to exec (a working folder on a dead network share can block it).
const EXEC_LIMIT_MS: i32 = 30_000;
/// Files that are handed to the child are first moved up here, out of the way of 0 to 2 and of what is passed.
const HIGH_FD: RawFd = 10;
/// Where the descriptors that a child gets begin.
pub const FIRST_PASSED: RawFd = 3;

/// One process to start.
#[derive(Debug)]
pub struct Request {
    /// Program, looked up in the `PATH` of `env`, and its arguments.
    pub argv: Vec<String>,
    /// Its whole environment.
    pub env: BTreeMap<String, String>,
    /// Its standard input; none: `/dev/null`.
    pub stdin: Option<OwnedFd>,
    /// Its working folder; none: the agent's.
    pub workdir: Option<PathBuf>,
    /// Its stdout and stderr.
    pub output: OwnedFd,
    /// Its file descriptors from 3 on, seven at most.
    pub passed: Vec<OwnedFd>,
    /// Its niceness.
    pub nice: i32,
    /// Its limit of open files; none: the agent's.
    pub files: Option<libc::rlimit>,
}

/// A process that was started.
#[derive(Debug)]
pub struct Spawned {
    /// Its pid.
    pub pid: u32,
    /// Refers to this very process, never to a later one of the same pid.
    pub pidfd: OwnedFd,
}

type Job = (Prepared, oneshot::Sender<Result<Spawned>>);

/// Handle of the spawn thread.
#[derive(Clone, Debug)]
pub struct Spawner {
    jobs: mpsc::SyncSender<Job>,
}

impl Spawner {
    /// Starts the spawn thread. It ends with the last handle, which the agent keeps until its process ends.
    pub fn start(registry: Registry) -> Result<Self> {
        let (jobs, queue) = mpsc::sync_channel::<Job>(64);
        std::thread::Builder::new()
            .name("spawn".into())
            .spawn(move || {
                // A signal between fork and exec would run the agent's handlers in the child, which share their
                // pipe with the agent: the child unblocks only once the dispositions are its own.
                let _ = nix::sys::signal::SigSet::all().thread_block();
                while let Ok((prepared, answer)) = queue.recv() {
                    let _ = answer.send(fork_exec(&prepared, &registry));
                }
            })
            .map_err(|cause| Error::io("start the spawn thread", cause))?;
        Ok(Self { jobs })
    }

    /// Starts a process; returns once its program runs. The error names what was tried and why it failed.
    pub async fn spawn(&self, request: Request) -> Result<Spawned> {
        let prepared = Prepared::new(request)?;
        let (answer, result) = oneshot::channel();
        let jobs = self.jobs.clone();
        // Bounded queue: a full one waits on a blocking thread, not on the runtime.
        match jobs.try_send((prepared, answer)) {
            Ok(()) => {}
            Err(mpsc::TrySendError::Full(job)) => {
                let sent = tokio::task::spawn_blocking(move || jobs.send(job).is_ok()).await;
                if !matches!(sent, Ok(true)) {
                    return Err(gone());
                }
            }
            Err(mpsc::TrySendError::Disconnected(_)) => return Err(gone()),
        }
        result.await.map_err(|_| gone())?
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::Closed, "start a process", "the spawn thread has ended")
}

/// A request with everything allocated that the child needs: between fork and exec nothing may allocate.
struct Prepared {
    program: String,
    path: Option<String>,
    candidates: Vec<CString>,
    _strings: Vec<CString>,
    argv: Pointers,
    envp: Pointers,
    workdir: Option<CString>,
    stdin: OwnedFd,
    output: OwnedFd,
    passed: Vec<OwnedFd>,
    nice: i32,
    files: Option<libc::rlimit>,
    /// Always, but for a defect that was chosen: looked up here, since the forked child may not allocate.
    dies_with_us: bool,
}

/// A null-terminated array of pointers into strings that live beside it.
struct Pointers(Vec<*const libc::c_char>);

// SAFETY: the pointers lead into `CString`s that move together with them and are never changed.
unsafe impl Send for Pointers {}

impl Prepared {
    fn new(request: Request) -> Result<Self> {
        let Some(program) = request.argv.first().filter(|program| !program.is_empty()).cloned() else {
            return Err(Error::new(ErrorKind::InvalidInput, "start a process", "the command is empty"));
        };
        let path = request.env.get("PATH").cloned();
        let mut strings = Vec::new();
        for argument in &request.argv {
            strings.push(c_string(argument, "an argument")?);
        }
        let arguments = strings.len();
        for (name, value) in &request.env {
            if name.is_empty() || name.contains('=') {
                let message = format!("`{name}` cannot be the name of a variable");
                return Err(Error::new(ErrorKind::InvalidInput, "start a process", message));
            }
            strings.push(c_string(&format!("{name}={value}"), name)?);
        }
        let pointers = |strings: &[CString]| {
            Pointers(strings.iter().map(|s| s.as_ptr()).chain(std::iter::once(std::ptr::null())).collect())
        };
        let candidates = if program.contains('/') {
            vec![c_string(&program, "the program")?]
        } else {
            let folders = path.as_deref().unwrap_or("/usr/local/bin:/usr/bin:/bin");
            let joined = folders.split(':').map(|folder| match folder {
                "" => c_string(&format!("./{program}"), "the program"),
                folder => c_string(&format!("{folder}/{program}"), "the program"),
            });
            joined.collect::<Result<_>>()?
        };
        let workdir = match &request.workdir {
            Some(folder) => Some(c_string(&folder.to_string_lossy(), "the working folder")?),
            None => None,
        };
        let stdin = match request.stdin {
            Some(stdin) => stdin,
            None => File::open("/dev/null").map_err(|cause| Error::io("open /dev/null", cause))?.into(),
        };
        Ok(Self {
            argv: pointers(&strings[..arguments]),
            envp: pointers(&strings[arguments..]),
            _strings: strings,
            program,
            path,
            candidates,
            workdir,
            stdin: raised(stdin)?,
            output: raised(request.output)?,
            passed: request.passed.into_iter().map(raised).collect::<Result<_>>()?,
            nice: request.nice,
            dies_with_us: !mutant::is_on("no_death_signal"),
            files: request.files,
        })
    }

    fn explain(&self, stage: Stage, errno: i32) -> Error {
        let cause = io::Error::from_raw_os_error(errno);
        let program = &self.program;
        let workdir = self.workdir.as_deref().map(|folder| folder.to_string_lossy()).unwrap_or_default();
        let message = match (stage, errno) {
            (Stage::Workdir, _) => format!("cannot enter the working folder `{workdir}`: {cause}"),
            (Stage::Exec, libc::ENOENT) if !program.contains('/') => {
                let path = self.path.as_deref().unwrap_or("(unset)");
                format!("no program `{program}` in PATH ({path}): {cause}")
            }
            (Stage::Exec, libc::ENOENT) if std::path::Path::new(program).exists() => {
                format!(
                    "cannot execute `{program}`: the interpreter that its first line names does not exist"
                )
            }
            (Stage::Exec, libc::ENOEXEC) => format!("cannot execute `{program}`: {cause} (no `#!` line?)"),
            (Stage::Exec, _) => format!("cannot execute `{program}`: {cause}"),
            (Stage::Prepare, _) => format!("cannot prepare the process of `{program}`: {cause}"),
        };
        Error::new(ErrorKind::Io, "start a process", message).with_source(cause)
    }
}

fn c_string(text: &str, what: &str) -> Result<CString> {
    CString::new(text).map_err(|_| {
        Error::new(ErrorKind::InvalidInput, "start a process", format!("{what} contains a NUL character"))
    })
}

/// Moves a descriptor to [`HIGH_FD`] or above, close-on-exec.
fn raised(fd: OwnedFd) -> Result<OwnedFd> {
    // SAFETY: `fd` is open; the call returns a new descriptor or -1.
    let high = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, HIGH_FD) };
    if high < 0 {
        return Err(Error::io("duplicate a descriptor", io::Error::last_os_error()));
    }
    // SAFETY: `high` was just made and belongs to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(high) })
}

#[derive(Clone, Copy)]
enum Stage {
    Prepare = 0,
    Workdir = 1,
    Exec = 2,
}

fn fork_exec(prepared: &Prepared, registry: &Registry) -> Result<Spawned> {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for the two descriptors.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } < 0 {
        return Err(Error::io("start a process", io::Error::last_os_error()));
    }
    // SAFETY: both were just made and belong to nobody else.
    let (report, reporter) = unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) };
    let reporter = raised(reporter)?;
    // SAFETY: no arguments; cannot fail.
    let parent = unsafe { libc::getpid() };

    // The reaper of adopted zombies must not see a child that is not registered yet.
    let pid = registry.with_lock(|pids| {
        // SAFETY: the child calls only async-signal-safe functions until it executes its program or exits.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: this is the child of a fork, and everything it uses was allocated before.
            unsafe { child(prepared, reporter.as_raw_fd(), parent) }
        }
        if let Ok(child) = u32::try_from(pid) {
            pids.insert(child);
        }
        pid
    });
    let Ok(child) = u32::try_from(pid) else {
        return Err(prepared.explain(Stage::Prepare, io::Error::last_os_error().raw_os_error().unwrap_or(0)));
    };
    drop(reporter);

    let failure = read_report(report);
    let pidfd = match &failure {
        None => super::pidfd::open(child).map_err(|cause| Error::io("open a pidfd", cause)),
        Some((stage, errno)) => Err(prepared.explain(*stage, *errno)),
    };
    match pidfd {
        Ok(pidfd) => Ok(Spawned { pid: child, pidfd }),
        Err(error) => {
            // SAFETY: our own child, not reaped yet, so the pid is still its.
            unsafe {
                libc::kill(pid, libc::SIGKILL);
                libc::waitpid(pid, std::ptr::null_mut(), 0);
            }
            registry.with_lock(|pids| pids.remove(&child));
            Err(error)
        }
    }
}

/// What the child reports: nothing (end of file) when its program runs, else where it failed.
fn read_report(report: OwnedFd) -> Option<(Stage, i32)> {
    let mut poll = libc::pollfd { fd: report.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid entry.
    if unsafe { libc::poll(&raw mut poll, 1, EXEC_LIMIT_MS) } == 0 {
        return Some((Stage::Workdir, libc::ETIMEDOUT));
    }
    let mut bytes = [0; 5];
    match File::from(report).read_exact(&mut bytes) {
        Err(_) => None,
        Ok(()) => {
            let stage = match bytes[0] {
                0 => Stage::Prepare,
                1 => Stage::Workdir,
                _ => Stage::Exec,
            };
            Some((stage, i32::from_ne_bytes([bytes[1], bytes[2], bytes[3], bytes[4]])))
        }
    }
}

/// The child's side of the fork.
///
/// # Safety
/// Only between fork and exec: calls async-signal-safe functions only, and never returns.
unsafe fn child(prepared: &Prepared, reporter: RawFd, parent: libc::pid_t) -> ! {
    let fail = |stage: Stage| -> ! {
        // SAFETY: `__errno_location` is valid in every thread; write and _exit are async-signal-safe.
        unsafe {
            let errno = (*libc::__errno_location()).to_ne_bytes();
            let bytes = [stage as u8, errno[0], errno[1], errno[2], errno[3]];
            libc::write(reporter, bytes.as_ptr().cast(), bytes.len());
            libc::_exit(127)
        }
    };
    // SAFETY: plain system calls on descriptors and strings that were prepared before the fork.
    unsafe {
        libc::setsid();
        if prepared.dies_with_us && libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) < 0 {
            fail(Stage::Prepare);
        }
        if libc::getppid() != parent {
            libc::_exit(127);
        }
        for signal in 1..=libc::SIGRTMAX() {
            libc::signal(signal, libc::SIG_DFL);
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        libc::setpriority(libc::PRIO_PROCESS, 0, prepared.nice);
        if let Some(files) = &prepared.files {
            libc::setrlimit(libc::RLIMIT_NOFILE, files);
        }
        let output = prepared.output.as_raw_fd();
        if libc::dup2(prepared.stdin.as_raw_fd(), 0) < 0
            || libc::dup2(output, 1) < 0
            || libc::dup2(output, 2) < 0
        {
            fail(Stage::Prepare);
        }
        let mut first_closed = FIRST_PASSED;
        for passed in &prepared.passed {
            // Above are those that wait for their turn.
            if first_closed >= HIGH_FD || libc::dup2(passed.as_raw_fd(), first_closed) < 0 {
                fail(Stage::Prepare);
            }
            first_closed += 1;
        }
        // Also what the agent itself inherited without the flag. Kernels before 5.11 lack it: then the flag of each
        // file has to do.
        libc::syscall(libc::SYS_close_range, first_closed, libc::c_uint::MAX, 1_u32 << 2);
        if let Some(workdir) = &prepared.workdir
            && libc::chdir(workdir.as_ptr()) < 0
        {
            fail(Stage::Workdir);
        }
        let mut denied = false;
        for candidate in &prepared.candidates {
            libc::execve(candidate.as_ptr(), prepared.argv.0.as_ptr(), prepared.envp.0.as_ptr());
            match *libc::__errno_location() {
                libc::EACCES => denied = true,
                libc::ENOENT | libc::ENOTDIR => {}
                _ => fail(Stage::Exec),
            }
        }
        *libc::__errno_location() = if denied { libc::EACCES } else { libc::ENOENT };
        fail(Stage::Exec)
    }
}
