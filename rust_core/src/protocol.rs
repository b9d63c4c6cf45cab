//! What agent, controller and session say to each other.
//!
//! ```text
//!  session ──Hello(Session), Report/Done──▶ agent ──Hello(Agent), Event/Progress──▶ controller
//!  session ◀──Drain/Inject/Release───────── agent ◀──StartGroup/StopGroup/Ack────── controller
//! ```
//!
//! Every value travels as one msgpack map with named fields in a frame of [`crate::wire`]. Unknown fields are
//! ignored and missing ones take their default, so that a newer peer may add fields; [`VERSION`] changes when a
//! meaning does. Durations are seconds (`_s`), instants are nanoseconds of `CLOCK_MONOTONIC` (`_ns`), which all
//! processes of one host share; `wall_ms` (Unix time) is for people only and never subtracted.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Version of the meanings in this file. Peers of different versions refuse each other, naming both.
pub const VERSION: u32 = 1;

/// A place for one process: which rank of which replica group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Slot {
    /// Replica group, `0..replicas`.
    pub replica: u32,
    /// Rank inside the group, `0..world_size`.
    pub rank: u32,
}

/// First frame on every connection, sent by the side that dials; answered by [`Welcome`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`] of the dialling side.
    pub version: u32,
    /// The run that the dialling side belongs to.
    pub run_id: String,
    /// Secret of the run: the accepting side drops the connection where it differs.
    pub token: String,
    /// Who dials.
    pub peer: Peer,
}

/// Who dials, with what only that kind of peer can say.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum Peer {
    /// A host's agent, dialling the controller.
    Agent {
        /// Name of the host, unique in the run.
        host: String,
        /// Pid of the agent.
        pid: u32,
        /// Random per agent process: a reconnect keeps it, a restart changes it, and sequence numbers restart.
        incarnation: u64,
        /// What it supervises now: the truth for a controller that has just started.
        groups: Vec<GroupSnapshot>,
    },
    /// A rank process, dialling its agent.
    Session {
        /// Which process.
        slot: Slot,
        /// Generation it was started as; an older one than the current is refused.
        generation: u64,
        /// Pid of the rank process.
        pid: u32,
        /// Step at which its work is done; none where the script does not know one.
        target_step: Option<u64>,
    },
    /// Whoever evicts, dialling the lighthouse's control channel (`lighthouse::protocol`).
    Supervisor {
        /// Pid of the dialling process.
        pid: u32,
    },
}

/// Answer to [`Hello`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Welcome {
    /// [`VERSION`] of the accepting side.
    pub version: u32,
    /// Why the connection is refused; none when it is accepted.
    pub refused: Option<String>,
}

/// One group as its agent sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupSnapshot {
    /// Replica group.
    pub replica: u32,
    /// Current (or last) generation.
    pub generation: u64,
    /// What the group is doing.
    pub state: GroupState,
    /// Restarts spent inside the current window.
    pub restarts: u32,
    /// Live ranks: pid by rank.
    pub pids: BTreeMap<u32, u32>,
}

/// What a group is doing, as its agent knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupState {
    /// Its host's `setup` runs.
    Setup,
    /// Its ranks are up and have committed nothing yet.
    Starting,
    /// It has committed a step in this generation (or has no session that could say so).
    Running,
    /// Its generation ended; the next one waits for its back-off.
    Restarting,
    /// Asked to stop: its ranks are inside their grace time.
    Stopping,
    /// All its work is done.
    Done,
    /// It spent its restart budget; it is not started again.
    GivenUp,
    /// It was stopped on request.
    Stopped,
}

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
    /// Every group is done, or the drain window is over: sessions that wait for that may leave.
    Release,
    /// Read captured output; answered by [`Report::LogChunk`].
    ReadLog(LogRead),
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
    /// Ranks in this group, all on this host.
    pub world_size: u32,
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
    /// The agent failed at looking after it: a defect of ours, in its own words.
    AgentFailed {
        /// What the panic said.
        error: String,
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
        /// It was a warm standby a moment ago.
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

/// Session to agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum SessionReport {
    /// A step was committed. Latest wins.
    Committed {
        /// Steps committed.
        step: u64,
        /// Quorum in which it was committed.
        quorum_id: Option<i64>,
        /// Replica groups that took part.
        participants: Option<u32>,
        /// Whatever else was measured.
        #[serde(default)]
        metrics: BTreeMap<String, f64>,
    },
    /// The target step is committed: the rank waits for [`SessionCommand::Release`] and leaves.
    Done {
        /// Steps committed.
        step: u64,
    },
    /// For the next `limit_s` no commit is expected (evaluation, a long save); 0 ends the pause.
    Pause {
        /// Shown in status.
        what: String,
        /// Longest pause.
        limit_s: f64,
    },
}

/// Agent to session.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum SessionCommand {
    /// Finish the step, leave the quorum, exit with code 0 within `grace_s`.
    Drain {
        /// Time left.
        grace_s: f64,
        /// Why.
        reason: String,
    },
    /// Carry out a rehearsed fault on yourself ([`Fault::Exit`], [`Fault::Oom`]).
    Inject {
        /// What.
        fault: Fault,
    },
    /// Nobody needs this rank as a donor any more: a rank that reported done may leave.
    Release,
    /// A member of every quorum up to `quorum_id` is dead: cut their collectives and rendezvous loose.
    Dead {
        /// The floor of the push.
        quorum_id: i64,
    },
}
