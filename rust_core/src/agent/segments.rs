//! Captured output on disk: one stream of bytes, cut into files that are named by the offset of their first byte.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// After a write has failed, output is dropped for this long before the next try.
const RETRY: Duration = Duration::from_secs(1);

/// One file of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Offset of its first byte in the stream.
    pub base: u64,
    /// Its bytes.
    pub len: u64,
    /// Where it is.
    pub path: PathBuf,
}

impl Segment {
    /// Offset behind its last byte.
    pub const fn end(&self) -> u64 {
        self.base + self.len
    }
}

/// The files of the stream `stem` in `folder`, by offset.
pub fn list(folder: &Path, stem: &str) -> Vec<Segment> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<Segment> = entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name();
            let base = name.to_str()?.strip_prefix(stem)?.strip_prefix('-')?.strip_suffix(".log")?;
            let base = base.parse().ok()?;
            Some(Segment { base, len: fs::metadata(entry.path()).ok()?.len(), path: entry.path() })
        })
        .collect();
    found.sort_by_key(|segment| segment.base);
    found
}

/// Where a stream goes and how much of it is kept.
#[derive(Clone, Debug)]
pub struct Target {
    /// Folder of the slot.
    pub folder: PathBuf,
    /// First part of the file names: `g3`.
    pub stem: String,
    /// Bytes a file holds.
    pub segment_bytes: u64,
    /// Files kept; the oldest go first.
    pub segments: u32,
}

/// Appends to a stream. A disk that is full costs the bytes that do not fit, never the writer its life.
#[derive(Debug)]
pub struct Writer {
    target: Target,
    file: Option<File>,
    files: VecDeque<PathBuf>,
    /// Offset of the next byte of the stream, written or lost.
    offset: u64,
    /// Offset at which the current file is full.
    full_at: u64,
    failed_at: Option<Instant>,
}

impl Writer {
    /// Goes on where an earlier writer of the same stream has ended.
    pub fn new(target: Target) -> Self {
        let existing = list(&target.folder, &target.stem);
        let offset = existing.last().map_or(0, Segment::end);
        let files = existing.into_iter().map(|segment| segment.path).collect();
        Self { target, file: None, files, offset, full_at: 0, failed_at: None }
    }

    /// Offset behind the last byte of the stream.
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// Appends bytes. An error is reported once an outage; the bytes that it cost leave a gap in the offsets.
    pub fn append(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        if self.failed_at.is_some_and(|at| at.elapsed() < RETRY) {
            self.offset += bytes.len() as u64;
            return Ok(());
        }
        while !bytes.is_empty() {
            match self.append_some(bytes) {
                Ok(written) => {
                    bytes = &bytes[written..];
                    self.failed_at = None;
                }
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) => {
                    self.offset += bytes.len() as u64;
                    // The next bytes start a file of their own, named by their offset: the gap shows.
                    self.file = None;
                    let first = self.failed_at.replace(Instant::now()).is_none();
                    return if first { Err(cause) } else { Ok(()) };
                }
            }
        }
        Ok(())
    }

    fn append_some(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.file.is_none() || self.offset >= self.full_at {
            self.file = None;
            self.file = Some(self.open()?);
            self.full_at = self.offset + self.target.segment_bytes.max(1);
        }
        let room = usize::try_from(self.full_at - self.offset).unwrap_or(usize::MAX).min(bytes.len());
        let file = self.file.as_mut().ok_or(io::ErrorKind::NotFound)?;
        let written = file.write(&bytes[..room])?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        self.offset += written as u64;
        Ok(written)
    }

    fn open(&mut self) -> io::Result<File> {
        fs::create_dir_all(&self.target.folder)?;
        // First the old, then the new: a full disk has room again.
        while self.files.len() >= self.target.segments.max(1) as usize {
            if let Some(oldest) = self.files.pop_front() {
                let _ = fs::remove_file(oldest);
            }
        }
        let path = self.target.folder.join(format!("{}-{:012}.log", self.target.stem, self.offset));
        let file = OpenOptions::new().create(true).append(true).open(&path)?;
        if self.files.back() != Some(&path) {
            self.files.push_back(path);
        }
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(folder: &Path, segment_bytes: u64, segments: u32) -> Target {
        Target { folder: folder.into(), stem: "g1".into(), segment_bytes, segments }
    }

    #[test]
    fn bytes_are_kept_exactly_across_rotation_and_restart_of_the_writer() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let bytes: Vec<u8> = (0..10_000_u32).map(|i| (i * 31 % 256) as u8).collect();
        for part in bytes.chunks(997) {
            let mut writer = Writer::new(target(folder.path(), 1024, 100));
            writer.append(part).expect("the disk has room");
        }
        let segments = list(folder.path(), "g1");
        let read: Vec<u8> = segments.iter().flat_map(|s| fs::read(&s.path).expect("a segment")).collect();
        assert_eq!(read, bytes);
        assert!(segments.windows(2).all(|pair| pair[0].end() == pair[1].base), "no gap");
    }

    #[test]
    fn the_oldest_files_go_and_the_newest_bytes_stay() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut writer = Writer::new(target(folder.path(), 100, 3));
        writer.append(&[b'a'; 1000]).expect("the disk has room");
        writer.append(b"the end").expect("the disk has room");
        let segments = list(folder.path(), "g1");
        assert_eq!(segments.iter().map(|s| s.base).collect::<Vec<_>>(), [800, 900, 1000]);
        assert_eq!(fs::read(&segments[2].path).expect("a segment"), b"the end");
    }

    #[test]
    fn bytes_that_cannot_be_written_are_lost_once_reported_and_leave_a_gap() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let blocked = folder.path().join("blocked");
        fs::write(&blocked, "a file where a folder should be").expect("the disk has room");
        let mut writer = Writer::new(target(&blocked, 100, 3));
        assert!(writer.append(b"lost").is_err());
        assert!(writer.append(b"lost too").is_ok(), "one report an outage");
        fs::remove_file(&blocked).expect("the file is there");
        writer.failed_at = Instant::now().checked_sub(RETRY * 2);
        writer.append(b"kept").expect("the folder can be made now");
        let segments = list(&blocked, "g1");
        assert_eq!((segments[0].base, segments[0].len), (12, 4));
    }
}
