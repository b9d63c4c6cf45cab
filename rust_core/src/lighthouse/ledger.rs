//! What must outlive a restart of the lighthouse: quorum ids used, fences, and the last members.
//!
//! One small JSON file, replaced by rename. It is not synced to the disk: it guards against the end of the
//! *process*; a host that goes down takes the run's processes with it, and ids also start from the wall clock.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind as IoErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::identity::Identity;
use crate::agent::mutant;
use crate::{Error, ErrorKind, Result};

const VERSION: u32 = 1;

/// The content of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    version: u32,
    run_id: String,
    /// Highest quorum id ever given out.
    pub quorum_id: i64,
    /// Lowest generation still let in, by replica.
    pub fences: BTreeMap<u32, u64>,
    /// Members of the last quorum.
    pub members: Vec<MemberEntry>,
    /// Groups that a start waits for, where the run was scaled since it began.
    #[serde(default)]
    pub expect: Option<u32>,
}

/// One member of the last quorum.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberEntry {
    /// Wire id.
    pub id: String,
    /// Who that is, where known.
    pub identity: Option<Identity>,
}

/// The file, or nothing where the lighthouse was given no path.
#[derive(Debug)]
pub struct Ledger {
    path: Option<PathBuf>,
    /// What the file holds (or would).
    pub entry: Entry,
}

impl Ledger {
    /// Reads `path`, or starts anew where it does not exist.
    ///
    /// A file that cannot be understood is moved aside (`.unreadable`) and reported: the run goes on, its quorum ids
    /// still above all earlier ones by the wall clock. A file of another run is refused.
    pub fn open(path: Option<&Path>, run_id: &str) -> Result<Self> {
        const OPERATION: &str = "open the lighthouse's state file";
        let fresh = Entry { version: VERSION, run_id: run_id.into(), ..Entry::default() };
        let Some(path) = path else { return Ok(Self { path: None, entry: fresh }) };
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == IoErrorKind::NotFound => {
                let mut ledger = Self { path: Some(path.into()), entry: fresh };
                ledger.store()?; // an unusable path is told now, not at the first death
                return Ok(ledger);
            }
            Err(error) => return Err(Error::io(OPERATION, error)),
        };
        let text = if mutant::is_on("forget_state") { String::new() } else { text };
        let entry = match serde_json::from_str::<Entry>(&text) {
            Ok(entry) if entry.version == VERSION => entry,
            read => {
                let why =
                    read.map_or_else(|error| error.to_string(), |entry| format!("version {}", entry.version));
                tracing::error!(path = %path.display(), %why, "state file not understood: fences are lost, it is moved aside");
                fs::rename(path, path.with_extension("unreadable"))
                    .map_err(|error| Error::io(OPERATION, error))?;
                fresh
            }
        };
        if entry.run_id != run_id {
            let message = format!("{} belongs to run {}, not {run_id}", path.display(), entry.run_id);
            return Err(Error::new(ErrorKind::InvalidInput, OPERATION, message));
        }
        Ok(Self { path: Some(path.into()), entry })
    }

    /// The next quorum id: above every one given out before, and (for a lost file) above the wall clock's seconds.
    pub fn next_quorum_id(&self) -> i64 {
        if mutant::is_on("forget_state") {
            return self.entry.quorum_id.saturating_add(1);
        }
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        self.entry.quorum_id.saturating_add(1).max(i64::try_from(seconds).unwrap_or(i64::MAX))
    }

    /// Replaces the file by the current content.
    pub fn store(&mut self) -> Result<()> {
        const OPERATION: &str = "write the lighthouse's state file";
        let Some(path) = &self.path else { return Ok(()) };
        let text = serde_json::to_vec(&self.entry)
            .map_err(|error| Error::new(ErrorKind::Protocol, OPERATION, error.to_string()))?;
        let next = path.with_extension("next");
        let written = fs::File::create(&next).and_then(|mut file| file.write_all(&text));
        written.and_then(|()| fs::rename(&next, path)).map_err(|error| Error::io(OPERATION, error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_stored_is_read_again() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("lighthouse.state");
        let mut ledger = Ledger::open(Some(&path), "run").expect("fresh");
        ledger.entry.quorum_id = i64::MAX - 7;
        ledger.entry.fences.insert(3, 9);
        ledger
            .entry
            .members
            .push(MemberEntry { id: "r3:x".into(), identity: Some(Identity { replica: 3, generation: 9 }) });
        ledger.store().expect("stored");
        let again = Ledger::open(Some(&path), "run").expect("read");
        assert_eq!(again.entry, ledger.entry);
        assert_eq!(again.next_quorum_id(), i64::MAX - 6);
    }

    #[test]
    fn a_first_id_is_above_every_earlier_second() {
        let ledger = Ledger::open(None, "run").expect("fresh");
        assert!(ledger.next_quorum_id() > 1_700_000_000);
    }

    #[test]
    fn a_file_of_another_run_is_refused_and_left_alone() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("lighthouse.state");
        Ledger::open(Some(&path), "one").expect("fresh");
        let error = Ledger::open(Some(&path), "two").expect_err("another run");
        assert!(error.to_string().contains("belongs to run one"), "{error}");
        Ledger::open(Some(&path), "one").expect("still there");
    }

    #[test]
    fn a_torn_file_is_moved_aside() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("lighthouse.state");
        for text in [
            "",
            "{\"version\": 1,",
            "{\"version\": 2, \"run_id\": \"run\", \"quorum_id\": 1, \"fences\": {}, \"members\": []}",
        ] {
            fs::write(&path, text).expect("written");
            let ledger = Ledger::open(Some(&path), "run").expect("goes on");
            assert_eq!(ledger.entry.quorum_id, 0);
            assert_eq!(fs::read_to_string(path.with_extension("unreadable")).expect("kept"), text);
        }
    }

    #[test]
    fn a_path_that_cannot_be_written_is_told_at_the_start() {
        let folder = tempfile::tempdir().expect("folder");
        let error = Ledger::open(Some(&folder.path().join("none/state")), "run").expect_err("no such folder");
        assert_eq!(error.kind(), ErrorKind::Io);
    }
}
