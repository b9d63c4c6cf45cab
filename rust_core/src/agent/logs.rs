//! Answers to questions about captured output.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::segments::{self, Segment, Target};
use crate::protocol::{GroupPlan, LogRead, Report, Slot};

/// Most bytes of one answer.
const MAX_ANSWER: u32 = 256 * 1024;

/// Whose output (none: that of `setup`), and of which generation.
type Stream = (Option<Slot>, u64);

/// The logs of this host, and which of them may still grow.
#[derive(Clone, Debug)]
pub struct Logs {
    root: PathBuf,
    growing: Arc<Mutex<HashMap<Stream, u32>>>,
}

impl Logs {
    /// Logs below `root`.
    pub fn new(root: PathBuf) -> Self {
        Self { root, growing: Arc::default() }
    }

    fn folder(&self, slot: Option<Slot>) -> PathBuf {
        match slot {
            Some(Slot { replica, rank }) => self.root.join(format!("r{replica}-{rank}")),
            None => self.root.join("setup"),
        }
    }

    /// Where the output of one process goes: a rank of a generation, or with generation 0 its standby.
    pub fn target(&self, plan: &GroupPlan, rank: u32, generation: u64) -> Target {
        let slot = Slot { replica: plan.replica, rank };
        let stem = if generation == 0 { "standby".to_owned() } else { format!("g{generation}") };
        let (segment_bytes, segments) = (plan.log_segment_bytes, plan.log_segments);
        Target { folder: self.folder(Some(slot)), stem, segment_bytes, segments }
    }

    /// Where the output of `setup` goes.
    pub fn setup_target(&self) -> Target {
        Target { folder: self.folder(None), stem: "g1".into(), segment_bytes: 16 << 20, segments: 4 }
    }

    /// Where the output of the store helper goes.
    pub fn store_target(&self) -> Target {
        Target { folder: self.root.join("store"), stem: "g1".into(), segment_bytes: 1 << 20, segments: 2 }
    }

    /// Where the output of the fork server goes: what its imports print.
    pub fn fork_server_target(&self) -> Target {
        Target {
            folder: self.root.join("fork-server"),
            stem: "g1".into(),
            segment_bytes: 1 << 20,
            segments: 2,
        }
    }

    /// Says that a stream may grow. Generation 0 stands for generations still to come.
    pub fn open(&self, slot: Option<Slot>, generation: u64) {
        *self.growing().entry((slot, generation)).or_default() += 1;
    }

    /// Says that a stream is complete, once for each [`Logs::open`]: the next life of a group may begin before the
    /// last one has ended.
    pub fn close(&self, slot: Option<Slot>, generation: u64) {
        if let Entry::Occupied(mut times) = self.growing().entry((slot, generation)) {
            *times.get_mut() -= 1;
            if *times.get() == 0 {
                times.remove();
            }
        }
    }

    fn growing(&self) -> MutexGuard<'_, HashMap<Stream, u32>> {
        self.growing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers a question. Reads files: not for the runtime's own threads.
    pub fn read(&self, question: &LogRead) -> Report {
        let &LogRead { request, slot, generation, offset, max_bytes } = question;
        // First this, then the files: what is complete now cannot grow while it is read.
        let complete = {
            let growing = self.growing();
            !growing.keys().any(|(s, g)| *s == slot && (generation == 0 || *g == generation))
        };
        let folder = self.folder(slot);
        let streams = match generation {
            0 => whole(&folder),
            generation => segments::list(&folder, &format!("g{generation}")),
        };
        let limit = max_bytes.clamp(1, MAX_ANSWER) as usize;
        let end = streams.last().map_or(0, Segment::end);
        // A question past the end is answered with the end: a reader who wants the last lines learns it at once.
        let (offset, data) = read_from(&streams, offset.min(end), limit);
        let eof = complete && offset + data.len() as u64 >= end;
        Report::LogChunk { request, offset, data, eof }
    }
}

/// All generations of a slot as one stream.
fn whole(folder: &Path) -> Vec<Segment> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut generations: Vec<u64> =
        names.filter_map(|name| name.strip_prefix('g')?.split_once('-')?.0.parse().ok()).collect();
    generations.sort_unstable();
    generations.dedup();
    let mut start = 0;
    let mut all = Vec::new();
    for generation in generations {
        let mut stream = segments::list(folder, &format!("g{generation}"));
        for segment in &mut stream {
            segment.base += start;
        }
        start = stream.last().map_or(start, Segment::end);
        all.extend(stream);
    }
    all
}

/// The bytes from `offset` on, or from the first ones behind a gap there; never across a gap.
fn read_from(stream: &[Segment], offset: u64, limit: usize) -> (u64, Vec<u8>) {
    let mut data = Vec::new();
    let mut start = offset;
    for segment in stream {
        if segment.end() <= start || data.len() >= limit {
            continue;
        }
        if segment.base > start + data.len() as u64 {
            if !data.is_empty() {
                break;
            }
            start = segment.base;
        }
        let at = start + data.len() as u64 - segment.base;
        let want = (limit - data.len()).min(usize::try_from(segment.len - at).unwrap_or(usize::MAX));
        let before = data.len();
        if read_part(&segment.path, at, want, &mut data).is_err() || data.len() < before + want {
            break;
        }
    }
    (start, data)
}

fn read_part(path: &Path, at: u64, want: usize, data: &mut Vec<u8>) -> io::Result<()> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(at))?;
    file.take(want as u64).read_to_end(data).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOT: Slot = Slot { replica: 2, rank: 1 };

    fn logs(files: &[(&str, &[u8])]) -> (tempfile::TempDir, Logs) {
        let root = tempfile::tempdir().expect("a temporary folder");
        let folder = root.path().join("r2-1");
        std::fs::create_dir(&folder).expect("a new folder");
        for (name, bytes) in files {
            std::fs::write(folder.join(name), bytes).expect("the disk has room");
        }
        let logs = Logs::new(root.path().into());
        (root, logs)
    }

    fn ask(logs: &Logs, generation: u64, offset: u64, max_bytes: u32) -> (u64, Vec<u8>, bool) {
        match logs.read(&LogRead { request: 7, slot: Some(SLOT), generation, offset, max_bytes }) {
            Report::LogChunk { request: 7, offset, data, eof } => (offset, data, eof),
            other => panic!("no answer to the question: {other:?}"),
        }
    }

    #[test]
    fn one_generation_is_read_by_its_own_offsets_and_a_rotated_start_shows() {
        let (_root, logs) = logs(&[
            ("g3-000000000010.log", b"0123456789"),
            ("g3-000000000020.log", b"abc"),
            ("standby-000000000000.log", b"not this"),
        ]);
        assert_eq!(ask(&logs, 3, 0, 100), (10, b"0123456789abc".to_vec(), true));
        assert_eq!(ask(&logs, 3, 15, 7), (15, b"56789ab".to_vec(), false));
        assert_eq!(ask(&logs, 3, 23, 7), (23, Vec::new(), true));
        logs.open(Some(SLOT), 3);
        assert_eq!(ask(&logs, 3, 23, 7), (23, Vec::new(), false));
    }

    #[test]
    fn a_question_past_the_end_is_answered_with_the_end() {
        let (_root, logs) = logs(&[("g3-000000000010.log", b"0123456789")]);
        assert_eq!(ask(&logs, 3, 1 << 62, 1), (20, Vec::new(), true));
        assert_eq!(ask(&logs, 0, 1 << 62, 1), (20, Vec::new(), true));
        assert_eq!(ask(&logs, 9, 1 << 62, 1), (0, Vec::new(), true), "nothing was printed");
    }

    #[test]
    fn all_generations_are_one_stream() {
        let (_root, logs) = logs(&[
            ("g2-000000000000.log", b"two"),
            ("g10-000000000000.log", b"ten"),
            ("g10-000000000003.log", b"!"),
        ]);
        assert_eq!(ask(&logs, 0, 0, 100), (0, b"twoten!".to_vec(), true));
        assert_eq!(ask(&logs, 0, 4, 2), (4, b"en".to_vec(), false));
    }

    #[test]
    fn an_answer_never_joins_bytes_across_a_gap() {
        let (_root, logs) = logs(&[("g1-000000000000.log", b"head"), ("g1-000000000009.log", b"tail")]);
        assert_eq!(ask(&logs, 1, 0, 100), (0, b"head".to_vec(), false));
        assert_eq!(ask(&logs, 1, 4, 100), (9, b"tail".to_vec(), true));
    }
}
