//! Agent to controller: events with their place in its history, and progress.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Fault, Slot};

/// Agent to controller.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Report {
    /// Something happened. Sent again after a reconnect until acked.
    Event(Stamped),
    /// Latest progress of one rank; older ones are overwritten, never queued.
    Progress(Progress),
    /// Answer to [`Command::ReadLog`].
    LogChunk {
        /// From the question.
        request: u64,
        /// Offset of the first byte of `data`: larger than asked for where older output was rotated away.
        offset: u64,
        /// The bytes, exactly as the process wrote them.
        #[serde(with = "serde_bytes")]
        data: Vec<u8>,
        /// True when no more can follow (the process has ended and everything was read).
        eof: bool,
    },
}

/// An event with its place in the agent's history.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stamped {
    /// Counts from 1 in each agent incarnation, without gaps.
    pub seq: u64,
    /// When it happened.
    pub mono_ns: u64,
    /// The same for people: Unix time in milliseconds.
    pub wall_ms: u64,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    /// It exited with this code.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
}

/// What a process that was killed had of the host's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// The most that it, or one of the processes it waited for, ever had resident: the kernel's account.
    pub peak_bytes: u64,
    /// What all processes of the host, or of the agent's control group, may have together.
    pub limit_bytes: Option<u64>,
    /// Whose limit that is: `cgroup` or `host`.
    pub limit_of: String,
}

/// Whether one host was reached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reached {
    /// Its name.
    pub host: String,
    /// Where it was looked for.
    pub address: String,
    /// Bytes went there and came back, and who sent them back is who it should be.
    pub ok: bool,
    /// Why not, naming both hosts and addresses.
    pub error: Option<String>,
    /// Time that a connect took.
    pub rtt_s: Option<f64>,
}

/// One thing that the doctor found on a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The check that found it, such as `gpu.memory_errors`.
    pub check: String,
    /// `error`, `warning`, `info` or `ok`.
    pub severity: String,
    /// What is so, and what it does.
    pub message: String,
    /// What to do; none where nothing is to be done.
    pub fix: Option<String>,
}

/// How a generation got its state from a donor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Heal {
    /// When it had all of it.
    pub at_ns: u64,
    /// How long that took.
    pub took_s: f64,
    /// Bytes that the rank which committed first has received.
    pub bytes: u64,
    /// Replica group that gave it; none: it did not say.
    pub donor: Option<u32>,
    /// Step of the state.
    pub step: u64,
}

/// Why a process or a generation ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "cause", rename_all = "snake_case")]
pub enum Cause {
    /// A rank ended by itself (or by somebody else's signal).
    RankExited {
        /// The first rank that ended.
        rank: u32,
        /// How.
        exit: Exit,
        /// It ended with code 0 before its session reported the target step: `(step, target)`.
        early: Option<(u64, u64)>,
    },
    /// No first commit within `startup_limit_s`.
    StartupLimit {
        /// The limit.
        limit_s: f64,
    },
    /// No commit within `progress_limit_s`.
    ProgressLimit {
        /// The limit.
        limit_s: f64,
    },
    /// It could not be started at all.
    SpawnFailed {
        /// The operating system's words, and what was tried.
        error: String,
    },
    /// Its command does not run at all: that was tried more than once.
    CannotStart {
        /// What its last output, or the operating system, says.
        error: String,
        /// Tries in a row.
        times: u32,
    },
    /// The agent failed at looking after it: a defect of ours, in its own words.
    AgentFailed {
        /// What the panic said.
        error: String,
    },
    /// It ended on another host of its group.
    Elsewhere {
        /// What the controller says of it.
        reason: String,
    },
    /// Asked for.
    Stopped {
        /// By whom or why.
        reason: String,
    },
}

/// What an agent saw or did. `replica`, `rank` and `generation` say whose event it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// `setup` began.
    SetupStarted,
    /// `setup` ended.
    SetupFinished {
        /// How.
        exit: Exit,
        /// It ran into its time limit.
        timed_out: bool,
        /// Its last lines (20 at most).
        tail: Vec<String>,
    },
    /// A generation begins: its ranks are about to be spawned.
    GenerationStarted {
        /// Whose.
        replica: u32,
        /// Which.
        generation: u64,
        /// Where this host serves the store of a group that has several, for the others: `address:port`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        store: Option<String>,
    },
    /// A rank process runs.
    RankSpawned {
        /// Whose.
        replica: u32,
        /// Which rank.
        rank: u32,
        /// Which generation.
        generation: u64,
        /// Its pid.
        pid: u32,
        /// It was a standby a moment ago, and ready.
        warm: bool,
    },
    /// A rank process ended.
    RankExited {
        /// Whose.
        replica: u32,
        /// Which rank.
        rank: u32,
        /// Which generation.
        generation: u64,
        /// Its pid.
        pid: u32,
        /// How it ended.
        exit: Exit,
        /// We ended it (because another rank of its group had died, or on request): not a root cause.
        collateral: bool,
        /// The kernel's OOM killer did it, as far as its counters tell.
        oom: bool,
        /// Its last lines (20 at most).
        tail: Vec<String>,
        /// The exception that ended it, from `TORCHELASTIC_ERROR_FILE` or the last traceback that it printed.
        #[serde(default)]
        traceback: Vec<String>,
        /// Where SIGKILL ended it and we did not send that.
        #[serde(default)]
        memory: Option<Memory>,
    },
    /// A rank is about to be ended because it does nothing: where it hangs.
    Hung {
        /// Whose.
        replica: u32,
        /// Which rank.
        rank: u32,
        /// Which generation.
        generation: u64,
        /// Its pid.
        pid: u32,
        /// What the kernel says it does: `S (sleeping)`.
        state: String,
        /// Stacks of its Python threads; empty where it could not write them.
        stacks: Vec<String>,
        /// Its threads from outside, one a line: id, name, state, where in the kernel it waits.
        threads: Vec<String>,
    },
    /// A generation is over: no process of it is left.
    GenerationEnded {
        /// Whose.
        replica: u32,
        /// Which.
        generation: u64,
        /// Root cause.
        #[serde(flatten)]
        cause: Cause,
        /// Last step its session reported as committed.
        step: Option<u64>,
        /// Of a group that has several hosts: why the command did not run here at all; none where it did, or may have.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        never_ran: Option<String>,
    },
    /// The next generation starts in `delay_s`.
    RestartScheduled {
        /// Whose.
        replica: u32,
        /// The generation that will start.
        generation: u64,
        /// Back-off.
        delay_s: f64,
        /// Restarts left in the window.
        restarts_left: u32,
    },
    /// First committed step of a generation.
    FirstCommit {
        /// Whose.
        replica: u32,
        /// Which generation.
        generation: u64,
        /// The step.
        step: u64,
        /// Where it got its state; none: it began with it.
        #[serde(default)]
        heal: Option<Heal>,
    },
    /// All ranks of a generation run and none of them has a session that could tell of a commit: it counts as running.
    RanksUp {
        /// Whose.
        replica: u32,
        /// Which generation.
        generation: u64,
    },
    /// The restart budget is spent.
    GroupGivenUp {
        /// Whose.
        replica: u32,
        /// Last generation.
        generation: u64,
        /// Root cause of the last death.
        #[serde(flatten)]
        cause: Cause,
        /// Restarts spent in the window.
        restarts: u32,
    },
    /// The group's work is done.
    GroupDone {
        /// Whose.
        replica: u32,
        /// Which generation finished it.
        generation: u64,
        /// The step that the session reported; none: every rank exited with code 0.
        step: Option<u64>,
    },
    /// The group was stopped on request.
    GroupStopped {
        /// Whose.
        replica: u32,
        /// Last generation.
        generation: u64,
    },
    /// A warm standby is ready for its slot.
    StandbyReady {
        /// Whose.
        replica: u32,
        /// Which rank.
        rank: u32,
        /// Its pid.
        pid: u32,
    },
    /// The host is about to be taken away, or the agent is told to leave it: it ends its groups in order, and then itself.
    HostLeaving {
        /// Who says so: a signal, `hook`, or the cloud whose metadata service was asked.
        kind: String,
        /// In words.
        reason: String,
        /// Until then.
        grace_s: f64,
    },
    /// A rehearsed fault was carried out.
    Injected {
        /// [`Injection::id`]; not called so on the wire, where journal and API keep the event's own `id`.
        #[serde(rename = "injection")]
        id: u32,
        /// Whose.
        replica: u32,
        /// Which rank.
        rank: u32,
        /// Which generation.
        generation: u64,
        /// What.
        fault: Fault,
    },
    /// The lighthouse was told that a generation is over, before its replacement was spawned.
    Evicted {
        /// Whose.
        replica: u32,
        /// Which generation.
        generation: u64,
        /// Last quorum that held it.
        quorum_id: Option<i64>,
        /// It had ended in order, done or stopped on request: it left.
        #[serde(default)]
        orderly: bool,
    },
    /// Answer to [`Command::Probe`](super::Command::Probe).
    Reached {
        /// The address that this host tried from.
        from: String,
        /// What came of each target, in the order of the question.
        targets: Vec<Reached>,
    },
    /// The host was looked at, once in the life of an agent.
    Examined {
        /// Worst first.
        findings: Vec<Finding>,
        /// How long that took.
        took_s: f64,
    },
    /// Processes of this run that no agent owned were found and ended.
    Swept {
        /// Their pids.
        pids: Vec<u32>,
    },
    /// Something worth knowing that changes nothing by itself.
    Notice {
        /// Whose, if anybody's.
        replica: Option<u32>,
        /// One sentence.
        message: String,
    },
}

/// How far one rank is. Latest wins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Which process.
    pub slot: Slot,
    /// Which generation.
    pub generation: u64,
    /// When.
    pub mono_ns: u64,
    /// Steps committed.
    pub step: u64,
    /// Step at which the work is done.
    pub target_step: Option<u64>,
    /// Quorum in which the step was committed.
    pub quorum_id: Option<i64>,
    /// Replica groups that took part.
    pub participants: Option<u32>,
    /// Whatever else the session measured: `loss`, `lr`, `tokens_per_s`…
    #[serde(default)]
    pub metrics: BTreeMap<String, f64>,
}
