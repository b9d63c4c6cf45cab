//! Notices that this host is about to be taken away: where they come from, and how long they leave.
//!
//! | kind | where it comes from |
//! |---|---|
//! | `sigterm`, `sigint`, `sigusr1` | whoever may signal the agent: `docker stop`, Slurm, a person |
//! | `hook` | `python -m sky_monarch.agent --notice`, through a file in the run folder |
//! | `azure`, `oci`, `aws`, `gcp` | the cloud's metadata service, asked every few seconds |
//!
//! A notice names its own grace time, where its source does; ranks get most of it, and the agent the rest.

pub mod documents;
mod poll;

use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::clock;
use super::config::Config;
use super::context::Context;
use super::group::seconds;
use super::mutant;

/// Where every cloud has its metadata service.
const METADATA: &str = "http://169.254.169.254";
/// RunPod's documentation, "Pod pricing": "SIGTERM signal, followed by SIGKILL" with a "5-second warning".
/// <https://docs.runpod.io/pods/pricing>
const RUNPOD_GRACE_S: f64 = 5.0;
/// Slurm's `--signal=USR1@120`, as our guide has it.
const WARNING_S: f64 = 120.0;
const LOOK: Duration = Duration::from_millis(200);
/// The agent's own part of a grace time is a fifth, but not more: to evict, to end what is left, to report.
const OWN_PART: u32 = 5;
const OWN_MOST: Duration = Duration::from_secs(2);

/// That the host is about to be taken away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Who says so.
    pub kind: String,
    /// In words.
    pub reason: String,
    /// Until then; none: nobody said.
    pub grace: Option<Duration>,
}

impl Notice {
    /// SIGINT.
    pub fn interrupted() -> Self {
        Self { kind: "sigint".into(), reason: "interrupted (SIGINT)".into(), grace: None }
    }
}

/// Whose metadata service is asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Nobody's.
    #[default]
    Off,
    /// Azure's scheduled events.
    Azure,
    /// Oracle's instance metadata, and a relay of its events where there is one.
    Oci,
    /// Nobody's: RunPod sends SIGTERM.
    Runpod,
    /// The spot instance action of EC2.
    Aws,
    /// The `preempted` flag of Compute Engine.
    Gcp,
}

/// `notices` of `agent.json`.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct Notices {
    /// Whose metadata service is asked.
    pub kind: Kind,
    /// Where that is.
    pub url: String,
    /// How often.
    pub every_s: f64,
    /// Of Oracle: `http` address that answers with the last message of its Events service for this host.
    pub events: Option<String>,
    /// From SIGTERM to the end of the host; none: as long as the job lets its groups have.
    pub term_s: Option<f64>,
    /// From SIGUSR1 to the end of the host.
    pub warning_s: f64,
}

impl Default for Notices {
    fn default() -> Self {
        Self {
            kind: Kind::Off,
            url: METADATA.into(),
            every_s: 2.0,
            events: None,
            term_s: None,
            warning_s: WARNING_S,
        }
    }
}

impl Notices {
    /// Says what is wrong with it.
    pub fn check(&self) -> Result<(), String> {
        for url in [Some(&self.url), self.events.as_ref()].into_iter().flatten() {
            if !url.starts_with("http://") {
                return Err(format!("{url:?} does not begin with http://"));
            }
        }
        let spans = [self.every_s, self.term_s.unwrap_or(1.0), self.warning_s];
        match spans.into_iter().find(|span| !(0.05..=86_400.0).contains(span)) {
            Some(span) => Err(format!("{span} is no number of seconds between 0.05 and 86400")),
            None => Ok(()),
        }
    }

    /// SIGTERM.
    pub fn terminated(&self) -> Notice {
        let usual = (self.kind == Kind::Runpod).then_some(RUNPOD_GRACE_S);
        Notice {
            kind: "sigterm".into(),
            reason: "the host is about to be taken away (SIGTERM)".into(),
            grace: self.term_s.or(usual).map(seconds),
        }
    }

    /// SIGUSR1.
    pub fn warned(&self) -> Notice {
        Notice {
            kind: "sigusr1".into(),
            reason: "the host is about to be taken away (SIGUSR1)".into(),
            grace: Some(seconds(self.warning_s)),
        }
    }
}

/// What ranks get of a grace time.
pub fn for_ranks(grace: Duration) -> Duration {
    if mutant::is_on("whole_grace") {
        return grace;
    }
    grace - (grace / OWN_PART).min(OWN_MOST)
}

/// Looks out for notices that are no signals, for the life of the agent.
pub fn watch(config: &Config, context: &Context) -> mpsc::Receiver<Notice> {
    let (tell, told) = mpsc::channel(4);
    tokio::spawn(watch_file(file_of(config), tell.clone()));
    if let Some(source) = poll::Source::new(&config.notices).filter(|_| !mutant::is_on("deaf_to_clouds")) {
        tokio::spawn(source.watch(tell, context.outbox.clone()));
    }
    told
}

/// The agent leaves: whoever gave the notice by file learns of it.
pub fn forget(config: &Config) {
    let _ = std::fs::remove_file(file_of(config));
}

/// What a hook writes. By the host's name: where several of them are one machine, they share the folder.
fn file_of(config: &Config) -> PathBuf {
    config.run_dir.join(format!("notice-{}.json", config.host))
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Written {
    reason: Option<String>,
    until_mono_ns: Option<u64>,
}

/// Reads the file that a hook writes, once. One that cannot be understood is a notice all the same.
async fn watch_file(path: PathBuf, tell: mpsc::Sender<Notice>) {
    let text = loop {
        match tokio::fs::read(&path).await {
            Ok(text) if !mutant::is_on("deaf_to_hooks") => break text,
            _ => sleep(LOOK).await,
        }
    };
    let Written { reason, until_mono_ns } = serde_json::from_slice(&text).unwrap_or_default();
    let left = |until: u64| Duration::from_nanos(until.saturating_sub(clock::mono_ns()));
    let notice = Notice {
        kind: "hook".into(),
        reason: reason.unwrap_or_else(|| "the host is about to be taken away (hook)".into()),
        grace: until_mono_ns.map(left),
    };
    let _ = tell.send(notice).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_said_has_its_default_and_nothing_is_asked() {
        let notices: Notices = serde_json::from_str("{}").expect("defaults");
        assert_eq!((notices.kind, notices.url.as_str()), (Kind::Off, METADATA));
        assert_eq!(notices.terminated().grace, None, "as long as the job says");
        assert_eq!(notices.warned().grace, Some(Duration::from_secs(120)));
        assert!(notices.check().is_ok() && poll::Source::new(&notices).is_none());
    }

    #[test]
    fn on_runpod_sigterm_leaves_five_seconds_unless_said_otherwise() {
        let read = |text: &str| serde_json::from_str::<Notices>(text).expect("notices").terminated().grace;
        assert_eq!(read(r#"{"kind": "runpod"}"#), Some(Duration::from_secs(5)));
        assert_eq!(read(r#"{"kind": "runpod", "term_s": 30}"#), Some(Duration::from_secs(30)));
        assert_eq!(read(r#"{"kind": "azure"}"#), None);
    }

    #[test]
    fn the_agent_keeps_a_fifth_for_itself_and_no_more_than_it_needs() {
        assert_eq!(for_ranks(Duration::from_secs(5)), Duration::from_secs(4));
        assert_eq!(for_ranks(Duration::from_secs(120)), Duration::from_secs(118));
        assert_eq!(for_ranks(Duration::ZERO), Duration::ZERO);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for text in [
            r#"{"url": "https://x"}"#,
            r#"{"events": "ftp://x"}"#,
            r#"{"every_s": 0}"#,
            r#"{"term_s": -1}"#,
            r#"{"warning_s": 1e9}"#,
        ] {
            let notices: Notices = serde_json::from_str(text).expect("well formed");
            assert!(notices.check().is_err(), "{text}");
        }
        assert!(serde_json::from_str::<Notices>(r#"{"kind": "abacus"}"#).is_err());
    }
}
