//! Controller to agent: commands, and the plans that they carry.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::Slot;

/// Controller to agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Command {
    /// Run `setup` once on this host, before any group. Reported by [`Event::SetupFinished`].
    Setup(SetupPlan),
    /// Start a group, or go on with it where it runs already (idempotent per `generation`).
    StartGroup(Box<GroupPlan>),
    /// End a group in order: drain, TERM, wait for `grace_s`, KILL.
    StopGroup {
        /// Which group.
        replica: u32,
        /// Time between TERM and KILL.
        grace_s: f64,
        /// Shown in the events.
        reason: String,
    },
    /// A generation of a group that has several hosts is over on another one: end this host's part of it, at once. An
    /// older one than the newest here is over already.
    EndGeneration {
        /// Which group.
        replica: u32,
        /// The newest generation that is over.
        generation: u64,
        /// Shown in the events.
        reason: String,
    },
    /// Every group is done, or the drain window is over: sessions that wait for that may leave.
    Release,
    /// This host is about to be taken away, as it said: whether a group of it has to save what nobody else has.
    WhoSaves {
        /// That group; none: others stay that have it.
        replica: Option<u32>,
        /// Why.
        reason: String,
    },
    /// Read captured output; answered by [`Report::LogChunk`].
    ReadLog(LogRead),
    /// Find out whether this host reaches others; answered by [`Event::Reached`](super::Event::Reached).
    Probe {
        /// The others.
        targets: Vec<ProbeTarget>,
        /// Longest wait for any of them.
        deadline_s: f64,
    },
    /// The controller hangs up. A reason that begins with [`FENCED`](super::FENCED) is for good.
    Dropped {
        /// Why.
        reason: String,
    },
    /// Events up to `seq` are durable at the controller.
    Ack {
        /// Highest sequence number stored.
        seq: u64,
    },
    /// Stop every group, then end the agent itself with exit code 0.
    Shutdown {
        /// Time between TERM and KILL.
        grace_s: f64,
        /// Shown in the events.
        reason: String,
    },
}

/// A host to be reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeTarget {
    /// Its name.
    pub host: String,
    /// Which attempt at it: who answers must have the certificate of that one. As its agent said in its Hello.
    #[serde(default)]
    pub attempt: u32,
    /// Where its agent answers, `address:port`. As its agent said in its Hello.
    pub address: String,
}

/// How a host is prepared.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SetupPlan {
    /// Shell text, run with `bash -eo pipefail`.
    pub script: String,
    /// Working folder.
    pub workdir: String,
    /// Whole environment of the script.
    pub envs: BTreeMap<String, String>,
    /// Longest run time.
    pub timeout_s: f64,
}

/// Everything an agent needs to keep one replica group alive on its own.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GroupPlan {
    /// Replica group.
    pub replica: u32,
    /// Replica groups in the run.
    pub replicas: u32,
    /// Ranks of this group on this host: all of them, without a `span`.
    pub world_size: u32,
    /// Which part of the group this is, where it has several hosts.
    #[serde(default)]
    pub span: Option<Span>,
    /// Generation of the first start; the agent counts on from it.
    pub generation: u64,
    /// What each rank runs.
    pub command: RankCommand,
    /// Working folder of every rank.
    pub workdir: String,
    /// Whole environment of every rank, before the agent adds its own variables.
    pub envs: BTreeMap<String, String>,
    /// Devices of each rank, by rank: indices for the mask. Empty: the mask is left as it is.
    pub devices: Vec<Vec<u32>>,
    /// Name of the one mask variable, such as `HIP_VISIBLE_DEVICES`.
    pub device_env: Option<String>,
    /// Base address of the lighthouse, `http://127.0.0.1:port`.
    pub lighthouse: String,
    /// Address of the lighthouse's control channel; none for TorchFT's own.
    pub lighthouse_control: Option<String>,
    /// What to do when a rank dies.
    pub recovery: Recovery,
    /// Modules a warm standby imports; empty with `standby = 0`.
    pub preload: Vec<String>,
    /// Faults to rehearse.
    pub injections: Vec<Injection>,
    /// Bytes kept per log file before it rotates.
    pub log_segment_bytes: u64,
    /// Log files kept per rank and generation; the oldest go first.
    pub log_segments: u32,
}

/// One host's part of a replica group that has several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Which of the group's hosts this is, from 0. The first one serves the group's store.
    pub node: u32,
    /// Hosts of the group.
    pub nodes: u32,
    /// Its first rank here; the others follow.
    pub first_rank: u32,
    /// Its ranks on all hosts together.
    pub ranks: u32,
    /// Where its first host serves the store of this generation, `address:port`. None on that host itself.
    #[serde(default)]
    pub store: Option<String>,
}

impl GroupPlan {
    /// The group's ranks on this host.
    pub fn ranks(&self) -> Range<u32> {
        let first = self.span.as_ref().map_or(0, |span| span.first_rank);
        first..first.saturating_add(self.world_size)
    }

    /// The place of a rank among those of this host.
    pub fn local_rank(&self, rank: u32) -> u32 {
        rank.saturating_sub(self.ranks().start)
    }
}

/// What a rank runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum RankCommand {
    /// A program and its arguments, executed without a shell.
    Exec {
        /// `argv[0]` is looked up in the `PATH` of `envs`.
        argv: Vec<String>,
    },
    /// Shell text, run with `bash -o pipefail -c`.
    Shell {
        /// The text.
        script: String,
    },
}

/// The restart budget leased to an agent, and its limits.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Recovery {
    /// Restarts allowed inside `window_s`.
    pub max_restarts: u32,
    /// Restarts older than this are forgotten.
    pub window_s: f64,
    /// How long ago earlier agents have spent restarts of this group, seconds. They are spent beside `max_restarts`, and
    /// allowed again once they are forgotten.
    #[serde(default)]
    pub spent_s: Vec<f64>,
    /// First delay of a restart; doubles with each restart that brought no progress. 0 for the first restart.
    pub backoff_s: f64,
    /// Longest delay.
    pub backoff_max_s: f64,
    /// Longest time from a generation's start to its first commit; none: unlimited.
    pub startup_limit_s: Option<f64>,
    /// Longest time between two commits. Applies to ranks with a session only.
    #[serde(default)]
    pub progress_limit_s: ProgressLimit,
    /// Time between TERM and KILL when a generation is replaced or stopped.
    pub grace_s: f64,
    /// Warm standbys per slot: 0 or 1.
    pub standby: u32,
    /// How far a standby gets ahead of its promotion.
    #[serde(default)]
    pub standby_until: StandbyUntil,
    /// Where its imports come from.
    #[serde(default)]
    pub standby_start: StandbyStart,
}

/// Where the imports of a standby come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StandbyStart {
    /// From a process that has done them once for the whole host, and is forked.
    #[default]
    Fork,
    /// Each does its own.
    Exec,
}

/// How far a standby gets ahead of its promotion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StandbyUntil {
    /// Its imports are done; nothing of the job's script has run.
    #[default]
    Imports,
    /// The script has run up to its session.
    Session,
}

/// Longest time between two commits. On the wire: `"off"`, `"auto"` or a number of seconds; `null` is `"off"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "ProgressLimitForm", into = "ProgressLimitForm")]
pub enum ProgressLimit {
    /// Unlimited.
    #[default]
    Off,
    /// The longer of 60 s and ten times the median step.
    Auto,
    /// This many seconds.
    Seconds(f64),
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum ProgressLimitForm {
    Seconds(f64),
    Word(ProgressLimitWord),
    Null(Option<()>),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ProgressLimitWord {
    Off,
    Auto,
}

impl From<ProgressLimitForm> for ProgressLimit {
    fn from(form: ProgressLimitForm) -> Self {
        match form {
            ProgressLimitForm::Seconds(limit_s) => Self::Seconds(limit_s),
            ProgressLimitForm::Word(ProgressLimitWord::Auto) => Self::Auto,
            ProgressLimitForm::Word(ProgressLimitWord::Off) | ProgressLimitForm::Null(_) => Self::Off,
        }
    }
}

impl From<ProgressLimit> for ProgressLimitForm {
    fn from(limit: ProgressLimit) -> Self {
        match limit {
            ProgressLimit::Seconds(limit_s) => Self::Seconds(limit_s),
            ProgressLimit::Auto => Self::Word(ProgressLimitWord::Auto),
            ProgressLimit::Off => Self::Word(ProgressLimitWord::Off),
        }
    }
}

/// A fault to rehearse, once per run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Injection {
    /// Unique in the run.
    pub id: u32,
    /// Which process.
    pub slot: Slot,
    /// What happens to it.
    pub fault: Fault,
    /// When.
    pub trigger: Trigger,
}

/// What happens to the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// SIGKILL.
    Kill,
    /// SIGSTOP: alive, but it does nothing.
    Hang,
    /// The session ends its process with exit code 1.
    Exit,
    /// The session caps its own address space and allocates until Python raises `MemoryError`.
    Oom,
}

/// When an injection fires.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Trigger {
    /// The session of that slot has reported this step as committed.
    Step(u64),
    /// This long after the group's first generation started.
    AfterS(f64),
}

/// Which captured output to read.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LogRead {
    /// Echoed in the answer.
    pub request: u64,
    /// Which process; none: the host's `setup`.
    pub slot: Option<Slot>,
    /// Which generation; 0: all of the slot's, in order, addressed by one running offset.
    pub generation: u64,
    /// First byte wanted; past the end, the answer is empty and has the end's.
    pub offset: u64,
    /// Most bytes wanted; the agent may send fewer.
    pub max_bytes: u32,
}
