//! A command that cannot be started at all: who tries it again and again learns nothing new.

use std::error::Error as _;

use super::rank::Rank;
use crate::Error;
use crate::protocol::{Cause, Exit};

/// Generations in a row whose command could not be started, after which a group is given up, whatever is left of its
/// budget. A disk that comes late, or a full table of processes, is through by then: there is a pause before the last.
pub const MOST_TRIES: u32 = 3;

/// What `execve` says of a program that is not there, or is none. All else may be a matter of the moment.
const FINAL: [i32; 6] =
    [libc::ENOENT, libc::EACCES, libc::ENOEXEC, libc::ENOTDIR, libc::ELOOP, libc::ENAMETOOLONG];

/// Whether another try at starting these ranks is of no use, as far as the kernel's word goes.
pub fn is_final(error: &Error) -> bool {
    let cause = error.source().and_then(|source| source.downcast_ref::<std::io::Error>());
    cause.and_then(std::io::Error::raw_os_error).is_some_and(|errno| FINAL.contains(&errno))
}

/// Why the command of a generation that died did not run at all, in words; none where it did, or may have.
pub fn why(cause: &Cause, ranks: &[Rank], spawn_is_final: bool) -> Option<String> {
    match cause {
        Cause::SpawnFailed { error } => spawn_is_final.then(|| error.clone()),
        Cause::RankExited { rank, exit: Exit::Code(code), .. } => {
            let of = ranks.iter().find(|of| of.rank == *rank).filter(|of| of.session.is_none())?;
            of_exit(*code, &of.tracked.capture.tail())
        }
        _ => None,
    }
}

fn of_exit(code: i32, tail: &[String]) -> Option<String> {
    let last = tail.iter().rev().find(|line| !line.trim().is_empty()).map(|line| line.trim());
    let says = last.map(|line| format!(": {line}")).unwrap_or_default();
    match code {
        // What a shell says of a program that it cannot execute, and of one that it does not find.
        126 | 127 => Some(format!("exit code {code}{says}")),
        // What Python says of a script, and of a folder without `__main__`.
        2 if last.is_some_and(|line| line.contains("can't open file '")) => Some(says[2..].to_owned()),
        1 if last.is_some_and(is_no_module) => Some(says[2..].to_owned()),
        _ => None,
    }
}

/// `python: No module named train`, which is said of `python -m train`: a traceback says it in other words.
fn is_no_module(line: &str) -> bool {
    line.split_once(": No module named ").is_some_and(|(who, _)| {
        let program = who.rsplit('/').next().unwrap_or(who);
        program.starts_with("python") && !who.contains(' ')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(code: i32, lines: &[&str]) -> Option<String> {
        of_exit(code, &lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn only_what_never_ran_is_futile() {
        let lost = "/usr/bin/python: can't open file '/job/train.py': [Errno 2] No such file or directory";
        assert_eq!(said(2, &[lost]).as_deref(), Some(lost));
        assert_eq!(said(2, &["usage: train.py [-h]", "train.py: error: no --steps"]), None);
        let shell = "bash: line 1: trian: command not found";
        assert_eq!(said(127, &[shell, ""]), Some(format!("exit code 127: {shell}")));
        assert_eq!(said(126, &[]).as_deref(), Some("exit code 126"));
        let module = "/opt/venv/bin/python3: No module named trian";
        assert_eq!(said(1, &[module]).as_deref(), Some(module));
        assert_eq!(said(1, &["ModuleNotFoundError: No module named 'torch'"]), None, "it ran");
        assert_eq!(said(1, &["could not run python: No module named x"]), None);
        assert_eq!(said(1, &[]), None);
    }

    #[test]
    fn what_the_kernel_refuses_for_a_moment_is_not_final() {
        let error = |errno| Error::io("start a process", std::io::Error::from_raw_os_error(errno));
        assert!(is_final(&error(libc::ENOENT)));
        assert!(!is_final(&error(libc::EAGAIN)));
        assert!(!is_final(&Error::new(crate::ErrorKind::Io, "start", "the group's store cannot be served")));
    }
}
