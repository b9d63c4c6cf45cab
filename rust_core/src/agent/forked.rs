//! What a process does that a fork server has just made, to be as good as one that the agent has spawned itself.
//!
//! The fork server forks twice: the process in the middle ends at once, and the agent, being the nearest subreaper,
//! becomes the parent. So the agent reaps the process itself, and learns how it ended.

use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::Pid;

use super::mutant;
use super::tree::SPAWN_ID;
use crate::{Error, ErrorKind, Result};

/// Time between two looks at who the parent is.
const LOOK_AGAIN: Duration = Duration::from_micros(200);

/// Makes the calling process the leader of its own session, waits until `agent` is its parent, asks to die with it, and
/// puts the mark of its tree where the process table shows it.
///
/// For the only thread of a process that was forked a moment ago.
pub fn settle(agent: u32, spawn_id: &str, nice: i32, limit: Duration) -> Result<()> {
    let failed = |message: String| Error::new(ErrorKind::Io, "settle a forked process", message);
    let agent_pid = Pid::from_raw(i32::try_from(agent).map_err(|_| failed(format!("{agent} is no pid")))?);
    // SAFETY: no arguments. It fails only in the leader of a group, which a process that was just forked is not.
    unsafe { libc::setsid() };
    // SAFETY: takes integers. Without it only speed is lost.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
    let until = Instant::now() + limit;
    let is_adopted = || std::os::unix::process::parent_id() == agent;
    while !is_adopted() {
        // Without an agent nobody would end this process.
        let is_gone =
            matches!(kill(agent_pid, None), Err(Errno::ESRCH)) && !mutant::is_on("wait_for_dead_agent");
        if is_gone || Instant::now() >= until {
            return Err(failed(format!("the agent, process {agent}, did not become its parent")));
        }
        sleep(LOOK_AGAIN);
    }
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)
        .map_err(|errno| Error::io("ask to die with the agent", errno.into()))?;
    if !is_adopted() {
        return Err(failed("the agent died meanwhile".into()));
    }
    mark(spawn_id).map_err(failed)
}

/// Writes the spawn id over that of the fork server, in the very bytes that `/proc/<pid>/environ` shows. The environment
/// proper is set by whoever runs next; this is what a process that never calls `exec` is found by.
fn mark(spawn_id: &str) -> std::result::Result<(), String> {
    let stat = std::fs::read("/proc/self/stat").map_err(|cause| cause.to_string())?;
    let (start, end) = environment_bounds(&stat).ok_or("/proc/self/stat does not say where it is")?;
    // SAFETY: the kernel's own bounds of the strings that this process was started with, which stay mapped and
    // writable for as long as it runs; no other thread is there to read them now.
    let environment = unsafe { std::slice::from_raw_parts_mut(start as *mut u8, end - start) };
    let value = value_of(environment, SPAWN_ID).ok_or("it was started without a mark")?;
    if value.len() != spawn_id.len() {
        return Err(format!("a mark of {} bytes does not fit into {}", spawn_id.len(), value.len()));
    }
    value.copy_from_slice(spawn_id.as_bytes());
    Ok(())
}

/// `env_start` and `env_end` of proc(5).
fn environment_bounds(stat: &[u8]) -> Option<(usize, usize)> {
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(stat.get(name_end + 2..)?).ok()?;
    let mut fields = rest.split_ascii_whitespace().skip(47);
    let (start, end) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    (0 < start && start < end).then_some((start, end))
}

/// The bytes of a variable's value.
fn value_of<'a>(environment: &'a mut [u8], name: &str) -> Option<&'a mut [u8]> {
    environment
        .split_mut(|byte| *byte == 0)
        .find(|pair| pair.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.first() == Some(&b'=')))
        .map(|pair| &mut pair[name.len() + 1..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bounds_are_those_of_the_environment_whatever_the_name_of_the_process() {
        let stat = std::fs::read("/proc/self/stat").expect("an entry");
        let (start, end) = environment_bounds(&stat).expect("bounds");
        let shown = std::fs::read("/proc/self/environ").expect("an environment");
        assert_eq!(end - start, shown.len());
        assert_eq!(environment_bounds(b"1 (a) b)"), None);
    }

    #[test]
    fn only_the_value_of_the_very_variable_is_found() {
        let mut environment = b"XA=1\0A=23\0AB=4\0".to_vec();
        value_of(&mut environment, "A").expect("it is there").copy_from_slice(b"56");
        assert_eq!(environment, b"XA=1\0A=56\0AB=4\0");
        assert!(value_of(&mut environment, "B").is_none());
    }
}
