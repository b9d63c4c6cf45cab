//! What can still be said of a rank that failed: the exception it left, the memory it had, where it hung.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::pidfd::Process;
use crate::protocol::Memory;

/// Makes a rank write the Python stacks of all its threads into its stacks file. A real-time signal, which nobody else
/// uses; its default action would end the process, so it is sent only to one that catches it.
/// The same number as in `sky_monarch/stacks.py`.
pub const STACKS_SIGNAL: i32 = 44;
/// An error file that is longer holds no exception of a person's script.
const ERROR_BYTES: u64 = 256 * 1024;
/// Lines of a traceback or a dump that are told.
const LINES: usize = 200;
/// Characters of each.
const CHARS: usize = 400;
/// Threads that are looked at from outside.
const THREADS: usize = 64;
/// Frames of the kernel's stack of each.
const KERNEL_FRAMES: usize = 4;
const LOOK_AGAIN: Duration = Duration::from_millis(20);
const HEADER: &str = "Traceback (most recent call last)";

/// The files that a rank leaves its last words in: torch-elastic's error file, and the stacks.
#[derive(Clone, Debug)]
pub struct Files {
    /// `TORCHELASTIC_ERROR_FILE`.
    pub error: PathBuf,
    /// `SKY_MONARCH_STACKS`.
    pub stacks: PathBuf,
}

impl Files {
    /// Those of one process, in the folder of the run.
    pub fn new(run_dir: &Path, replica: u32, rank: u32, generation: u64) -> Self {
        let folder = folder(run_dir);
        let stem = format!("r{replica}-{rank}-g{generation}");
        Self {
            error: folder.join(format!("{stem}.error.json")),
            stacks: folder.join(format!("{stem}.stacks")),
        }
    }

    /// Nobody needs them any more: what they say is in the events.
    pub fn remove(&self) {
        let _ = fs::remove_file(&self.error);
        let _ = fs::remove_file(&self.stacks);
    }

    /// The exception that a script decorated with torch-elastic's `@record` has written: its traceback by lines.
    pub fn exception(&self) -> Vec<String> {
        let mut text = String::new();
        let Ok(file) = fs::File::open(&self.error) else { return Vec::new() };
        if file.take(ERROR_BYTES).read_to_string(&mut text).is_err() {
            return Vec::new();
        }
        let Ok(value) = serde_json::from_str::<serde_json::Value>(&text) else { return Vec::new() };
        let message = &value["message"];
        let stack = message["extraInfo"]["py_callstack"].as_str().filter(|stack| !stack.trim().is_empty());
        let words = message["message"].as_str().or_else(|| message.as_str());
        bounded(stack.or(words).unwrap_or_default())
    }
}

/// Where a run keeps them; made by the agent.
pub fn folder(run_dir: &Path) -> PathBuf {
    run_dir.join("evidence")
}

/// The lines of a text, not too many and not too long: of a long traceback both ends count.
fn bounded(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.trim_end().lines().collect();
    let short = |line: &&str| line.chars().take(CHARS).collect::<String>();
    if lines.len() <= LINES {
        return lines.iter().map(short).collect();
    }
    let half = LINES / 2;
    let left_out = format!("  … {} lines left out …", lines.len() - 2 * half);
    let (head, tail) = (&lines[..half], &lines[lines.len() - half..]);
    head.iter().map(short).chain([left_out]).chain(tail.iter().map(short)).collect()
}

/// The last traceback in what a process has printed, up to its exception; empty where there is none. Torch puts the rank
/// before each line of it.
pub fn traceback(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().map(|line| line.trim_end_matches('\r')).map(without_rank).collect();
    let Some(start) = lines.iter().rposition(|line| line.contains(HEADER)) else { return Vec::new() };
    let is_frame = |line: &str| line.starts_with(' ') || line.is_empty();
    let frames = lines[start + 1..].iter().take_while(|line| is_frame(line)).count();
    let end = (start + frames + 2).min(lines.len());
    bounded(&lines[start..end].join("\n"))
}

fn without_rank(line: &str) -> &str {
    let rest = line.strip_prefix("[rank").and_then(|rest| rest.split_once("]: "));
    rest.filter(|(rank, _)| rank.bytes().all(|byte| byte.is_ascii_digit())).map_or(line, |(_, rest)| rest)
}

/// What a rank that was killed had, and could have had.
pub fn memory(peak_bytes: u64) -> Memory {
    let cgroup = cgroup_limit();
    let limit_of = if cgroup.is_some() { "cgroup" } else { "host" };
    Memory { peak_bytes, limit_bytes: cgroup.or_else(host_bytes), limit_of: limit_of.into() }
}

fn host_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.split_ascii_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// The tightest limit of the control groups that this agent is in, where it is less than what the host has.
fn cgroup_limit() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    let (mount, path, file) = text
        .lines()
        .find_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
            let is_memory = controllers.split(',').any(|controller| controller == "memory");
            is_memory.then_some(("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes"))
        })
        .or_else(|| {
            Some(("/sys/fs/cgroup", text.lines().find_map(|line| line.strip_prefix("0::"))?, "memory.max"))
        })?;
    // In a container the path may be that of the host, and the mount its end.
    let paths = Path::new(path.trim_start_matches('/')).ancestors();
    let limits = paths.filter_map(|path| {
        fs::read_to_string(Path::new(mount).join(path).join(file)).ok()?.trim().parse::<u64>().ok()
    });
    let host = host_bytes().unwrap_or(u64::MAX);
    limits.min().filter(|limit| *limit < host)
}

/// Where a process hangs.
#[derive(Debug, Default)]
pub struct Stuck {
    /// Its state, in the kernel's words: `T (stopped)`.
    pub state: String,
    /// The stacks of its Python threads.
    pub stacks: Vec<String>,
    /// Its threads as the kernel sees them: id, name, state, where it waits.
    pub threads: Vec<String>,
}

/// Looks at a process that hangs and lets it write its Python stacks, for `limit` at the most.
pub async fn examine(process: Process, files: Files, limit: Duration) -> Stuck {
    let pid = process.pid;
    let looking = tokio::task::spawn_blocking(move || (status(pid, "State:"), catches(pid), threads(pid)));
    let (state, catches, threads) = looking.await.unwrap_or_default();
    // One that is stopped would write them when it is dead.
    let can_answer = catches && !state.starts_with(['T', 't', 'Z', 'X']);
    if can_answer && process.signal(STACKS_SIGNAL).is_ok() {
        await_dump(&files.stacks, limit).await;
    }
    let text = fs::File::open(&files.stacks).ok().and_then(|file| {
        let mut bytes = Vec::new();
        file.take(ERROR_BYTES).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    });
    Stuck { state, stacks: bounded(&text.unwrap_or_default()), threads }
}

/// Waits until the file has been written to and does not grow any more.
async fn await_dump(path: &Path, limit: Duration) {
    let deadline = Instant::now() + limit;
    let mut before = 0;
    while Instant::now() < deadline {
        sleep(LOOK_AGAIN).await;
        let now = fs::metadata(path).map_or(0, |data| data.len());
        if now > 0 && now == before {
            return;
        }
        before = now;
    }
}

fn status(pid: u32, field: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    text.lines().find_map(|line| line.strip_prefix(field)).unwrap_or_default().trim().to_owned()
}

fn catches(pid: u32) -> bool {
    let mask = u64::from_str_radix(&status(pid, "SigCgt:"), 16).unwrap_or(0);
    mask >> (STACKS_SIGNAL - 1) & 1 == 1
}

fn threads(pid: u32) -> Vec<String> {
    let Ok(folder) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let mut ids: Vec<u32> = folder.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect();
    ids.sort_unstable();
    ids.truncate(THREADS);
    let thread = |id: u32| {
        let read = |name: &str| {
            let text = fs::read_to_string(format!("/proc/{pid}/task/{id}/{name}")).unwrap_or_default();
            text.trim().to_owned()
        };
        let stat = read("stat");
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.get(..1)).unwrap_or("?").to_owned();
        // Both are for root, or for nobody: then there is nothing, or a 0.
        let wchan = Some(read("wchan")).filter(|name| !name.is_empty() && name != "0");
        let frames = read("stack");
        let frames = frames
            .lines()
            .take(KERNEL_FRAMES)
            .filter_map(|line| line.rsplit_once(' '))
            .map(|(_, f)| f.split_once('+').map_or(f, |(name, _)| name));
        let place = wchan.into_iter().chain(frames.map(str::to_owned)).collect::<Vec<_>>().join(" < ");
        format!("{id} {} {state} {place}", read("comm")).trim_end().chars().take(CHARS).collect()
    };
    ids.into_iter().map(thread).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_traceback_is_found_whatever_surrounds_it() {
        let text = "step 1\nTraceback (most recent call last):\n  File \"old.py\", line 1\nOldError: x\nmore\n\
                    [rank3]: Traceback (most recent call last):\n[rank3]:   File \"a.py\", line 7, in <module>\n\
                    [rank3]:     f()\n[rank3]: ValueError: broken\n[rank3]:[W1] destroy_process_group was not called\n";
        let found = traceback(text);
        assert_eq!(found.first().map(String::as_str), Some("Traceback (most recent call last):"));
        assert_eq!(found.last().map(String::as_str), Some("ValueError: broken"));
        assert_eq!(found.len(), 4);
        assert!(traceback("nothing of the kind\n").is_empty());
        assert_eq!(traceback("Traceback (most recent call last):").len(), 1, "cut off");
    }

    #[test]
    fn of_a_long_one_both_ends_are_told() {
        let text: String = (0..5000).map(|i| format!("  line {i}\n")).collect();
        let found = bounded(&text);
        assert_eq!(found.len(), LINES + 1);
        assert_eq!((found[0].as_str(), found[LINES].as_str()), ("  line 0", "  line 4999"));
    }

    #[test]
    fn an_error_file_of_torch_elastic_is_read_and_anything_else_is_none() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir(super::folder(folder.path())).expect("its folder");
        let files = Files::new(folder.path(), 1, 0, 3);
        assert!(files.exception().is_empty());
        for (text, wanted) in [
            (
                r#"{"message": {"message": "E: x", "extraInfo": {"py_callstack": "Traceback\n  f\nE: x\n"}}}"#,
                3,
            ),
            (r#"{"message": {"message": "E: x"}}"#, 1),
            (r#"{"message": "E: x"}"#, 1),
            ("[1]", 0),
            ("{\"mess", 0),
        ] {
            fs::write(&files.error, text).expect("a file");
            assert_eq!(files.exception().len(), wanted, "{text}");
        }
        files.remove();
        assert!(!files.error.exists());
    }

    #[test]
    fn this_process_can_be_looked_at_and_catches_no_such_signal() {
        let pid = std::process::id();
        assert!(!threads(pid).is_empty() && !catches(pid) && status(pid, "State:").contains('('));
        let memory = memory(7);
        assert!(memory.limit_bytes.is_some_and(|bytes| bytes > 0), "{memory:?}");
    }
}
