//! The agent's own loop: commands, signals, and the end.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::Signal;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout_at};

use super::context::Shared;
use super::group::{self, Group, Handle, seconds};
use super::link::Standing;
use super::mutant;
use super::notice::{self, Notice, Notices};
use super::probe::Probe;
use super::services::Services;
use super::setup::Setup;
use super::tree::{self, Family};
use crate::protocol::{
    Command, Event, GroupPlan, GroupSnapshot, GroupState, LogRead, ProbeTarget, Reached, SessionCommand,
};

const LOOK: Duration = Duration::from_millis(50);
/// Adopted zombies are looked for this often, beside each SIGCHLD.
const REAP: Duration = Duration::from_secs(1);
/// Processes that a dead agent left get this long between TERM and KILL.
const SWEEP_GRACE: Duration = Duration::from_secs(2);
/// An agent without groups lingers this many times as long as one whose groups are done.
const NEVER_ASKED: u32 = 10;
/// Exit code of an agent that was told to leave its host: as a shell has it of one that SIGTERM ended.
const NOTICED: i32 = 143;
/// What nobody owns any more at the very end.
const LAST_GRACE: Duration = Duration::from_secs(1);

/// Exit code where the lease was over.
const LEASE_OVER: i32 = 1;

/// SIGTERM, SIGINT, SIGCHLD, SIGUSR1.
pub type Signals = (Signal, Signal, Signal, Signal);
/// How long the host stays after a signal, and the notices that are none.
pub type Leave = (Notices, mpsc::Receiver<Notice>);

const fn is_settled(state: GroupState) -> bool {
    matches!(state, GroupState::Done | GroupState::GivenUp | GroupState::Stopped)
}

/// Why the agent ends.
struct End {
    code: i32,
}

/// Everything the agent looks after.
pub struct Supervisor {
    context: Shared,
    services: Services,
    probe: Option<Arc<Probe>>,
    limits: Limits,
    groups: BTreeMap<u32, Handle>,
    setup: Option<Setup>,
    released: bool,
    end: Option<End>,
    fenced: bool,
    notices: Notices,
    noticed: mpsc::Receiver<Notice>,
    /// It was told so.
    leaving: bool,
    /// When the host is taken away, as far as was said.
    gone: Option<Instant>,
}

/// How long an agent does without its controller.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// At the end, where all is done.
    pub linger: Duration,
    /// At any time; none: for ever.
    pub lease: Option<Duration>,
}

/// Ends what an agent of this run that is dead has left: two agents must not both have a live generation.
pub async fn sweep(context: &Shared) {
    let family =
        || Family::Strays { run_id: context.run.run_id.clone(), host: context.host.name().to_owned() };
    let until = Instant::now() + SWEEP_GRACE;
    let (pids, survivors) = tree::end(family, &context.registry, || until, context.limits.kill_s).await;
    if !pids.is_empty() {
        context.outbox.emit(Event::Swept { pids });
    }
    if !survivors.is_empty() {
        let message = format!("processes of an earlier agent survived SIGKILL: {survivors:?}");
        context.outbox.emit(Event::Notice { replica: None, message });
    }
}

impl Supervisor {
    /// Looks after nothing yet.
    pub fn new(
        context: Shared,
        services: Services,
        probe: Option<Arc<Probe>>,
        limits: Limits,
        (notices, noticed): Leave,
    ) -> Self {
        Self {
            context,
            services,
            probe,
            limits,
            groups: BTreeMap::new(),
            setup: None,
            released: false,
            end: None,
            fenced: false,
            notices,
            noticed,
            leaving: false,
            gone: None,
        }
    }

    /// Runs until the end. Returns the exit code.
    pub async fn run(mut self, mut commands: mpsc::Receiver<Command>, signals: Signals) -> i32 {
        let (mut terminate, mut interrupt, mut child, mut warning) = signals;
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut reaped = Instant::now();
        let mut orphans = false;
        let code = loop {
            tokio::select! {
                biased;
                Some(_) = terminate.recv() => self.leave(self.notices.terminated(), NOTICED),
                Some(_) = interrupt.recv() => self.leave(Notice::interrupted(), 130),
                Some(_) = warning.recv() => self.leave(self.notices.warned(), NOTICED),
                Some(notice) = self.noticed.recv() => self.leave(notice, NOTICED),
                Some(command) = commands.recv() => self.obey(command).await,
                Some(_) = child.recv() => orphans = true,
                _ = look.tick() => {
                    if orphans || reaped.elapsed() >= REAP {
                        (orphans, reaped) = (false, Instant::now());
                        let registry = self.context.registry.clone();
                        let _ = tokio::task::spawn_blocking(move || tree::reap_adopted(&registry)).await;
                    }
                    self.heed_standing();
                    if let Some(code) = self.is_over() {
                        break code;
                    }
                }
            }
        };
        self.finish().await;
        code
    }

    async fn obey(&mut self, command: Command) {
        match command {
            Command::Setup(mut plan) => match &mut self.setup {
                Some(setup) => {
                    // A controller that has just started asks again: it gets the answer again.
                    if let Some(event) = setup.result().await {
                        self.context.outbox.emit(event);
                    }
                }
                None if self.end.is_some() => {}
                None => {
                    self.context.host.settle(&mut plan.workdir, &mut plan.envs);
                    self.setup = Some(Setup::start(Arc::clone(&self.context), plan));
                }
            },
            Command::StartGroup(mut plan) => {
                self.context.host.settle(&mut plan.workdir, &mut plan.envs);
                self.start(*plan);
            }
            Command::Probe { targets, deadline_s } => self.reach(targets, deadline_s),
            Command::StopGroup { replica, grace_s, reason } => self.stop(replica, grace_s, &reason),
            Command::WhoSaves { replica, reason } => self.tell_who_saves(replica, &reason),
            Command::EndGeneration { replica, generation, reason } => {
                self.end_generation(replica, generation, &reason);
            }
            Command::Release => self.release(),
            Command::ReadLog(question) => self.read(question),
            // The link keeps these for itself.
            Command::Ack { .. } | Command::Dropped { .. } => {}
            Command::Shutdown { grace_s, reason } => self.stop_all(Some(grace_s), &reason, 0),
        }
    }

    fn start(&mut self, plan: GroupPlan) {
        if self.end.is_some() {
            return;
        }
        let replica = plan.replica;
        let mut before = None;
        if let Some(handle) = self.groups.get(&replica) {
            let last = self.context.groups().get(&replica).map(|last| (last.generation, last.state));
            let settled =
                last.is_some_and(|(_, state)| is_settled(state)) && !mutant::is_on("start_only_anew");
            // The task of one that is done or stopped ends any moment, and would not hear of it.
            if !settled && handle.go_on(&plan) {
                return;
            }
            let ended = handle.is_over() || settled || handle.is_part;
            if !ended || last.is_some_and(|(generation, _)| plan.generation <= generation) {
                return;
            }
            if handle.is_part && !handle.is_over() {
                handle.stop(0.0, "a newer generation is wanted");
            }
            before = self.groups.remove(&replica);
        }
        match Group::start(Arc::clone(&self.context), plan.clone(), self.released, before) {
            Ok(handle) => drop(self.groups.insert(replica, handle)),
            Err(error) => drop(tokio::spawn(group::refuse(Arc::clone(&self.context), plan, error))),
        }
    }

    fn tell_who_saves(&self, saver: Option<u32>, reason: &str) {
        tracing::info!(?saver, reason, "who saves before this host is gone");
        for replica in self.groups.keys() {
            let command = SessionCommand::WhoSaves { is_you: saver == Some(*replica) };
            self.context.sessions.tell_group(*replica, &command);
        }
    }

    /// Ends this host's part of a generation that has ended on another one.
    fn end_generation(&self, replica: u32, generation: u64, reason: &str) {
        let group = self.groups.get(&replica).filter(|group| !group.is_over());
        if let Some(group) = group {
            group.end_generation(generation, reason);
        }
        if group.is_none() || self.is_done(replica) {
            self.context.outbox.emit(group::nothing_left(replica, generation, reason));
        }
    }

    fn stop(&self, replica: u32, grace_s: f64, reason: &str) {
        let group = self.groups.get(&replica);
        if let Some(group) = group {
            group.stop(grace_s, reason);
        }
        if group.is_none_or(|group| group.is_part && (group.is_over() || self.is_done(replica))) {
            self.context.outbox.emit(Event::GroupStopped { replica, generation: 0 });
        }
    }

    /// Whether nothing of a group is left, its work done. Its task looks once more when it has shown that: from then on
    /// it is for us to answer.
    fn is_done(&self, replica: u32) -> bool {
        let done = |last: &GroupSnapshot| last.state == GroupState::Done && last.pids.is_empty();
        self.context.groups().get(&replica).is_some_and(done)
    }

    fn release(&mut self) {
        self.released = true;
        self.groups.values().for_each(Handle::release);
    }

    fn read(&self, question: LogRead) {
        let context = Arc::clone(&self.context);
        tokio::task::spawn_blocking(move || context.outbox.answer(context.logs.read(&question)));
    }

    /// Finds out whether this host reaches others, beside everything else.
    fn reach(&self, targets: Vec<ProbeTarget>, deadline_s: f64) {
        let outbox = self.context.outbox.clone();
        let Some(probe) = self.probe.clone() else {
            let cannot = |ProbeTarget { host, address, .. }: ProbeTarget| {
                let error = format!("{host} ({address}) cannot be looked for: this host has no certificate");
                Reached { host, address, ok: false, error: Some(error), rtt_s: None }
            };
            let (from, targets) = (String::new(), targets.into_iter().map(cannot).collect());
            outbox.emit(Event::Reached { from, targets });
            return;
        };
        tokio::spawn(async move {
            let from = probe.address().to_string();
            let targets = probe.reach(targets, deadline_s).await;
            outbox.emit(Event::Reached { from, targets });
        });
    }

    /// Ends what must not go on without the controller, or against its word.
    fn heed_standing(&mut self) {
        let standing = self.context.standing.borrow().clone();
        match standing {
            Standing::Fenced(reason) if !self.fenced => {
                self.fenced = true;
                self.stop_all(Some(0.0), &reason, 0);
            }
            Standing::Away(since) if self.end.is_none() => {
                let lease = self.limits.lease.filter(|lease| since.elapsed() >= *lease);
                if let (Some(lease), false) = (lease, mutant::is_on("no_lease")) {
                    let reason = format!("no controller for {} s: the lease is over", lease.as_secs_f64());
                    tracing::error!(reason, "the agent ends");
                    self.stop_all(None, &reason, LEASE_OVER);
                }
            }
            _ => {}
        }
    }

    /// Leaves the host in order, within the grace time of a notice; without one, groups have their job's.
    fn leave(&mut self, Notice { kind, reason, grace }: Notice, code: i32) {
        let now = Instant::now();
        let is_sooner = grace.is_some_and(|grace| self.gone.is_none_or(|gone| now + grace < gone));
        if self.leaving && !is_sooner {
            return;
        }
        self.leaving = true;
        self.gone = grace.map(|grace| now + grace);
        let own = || self.groups.values().map(|group| group.grace_s).fold(0.0, f64::max);
        let grace_s = grace.map_or_else(own, |grace| grace.as_secs_f64());
        tracing::warn!(kind, reason, grace_s, "the agent is asked to leave");
        self.context.outbox.emit(Event::HostLeaving { kind, reason: reason.clone(), grace_s });
        for group in self.groups.values() {
            let left = grace.map_or_else(|| seconds(group.grace_s), notice::for_ranks);
            group.leave(now + left, &reason);
        }
        self.end_rest(code);
    }

    /// Stops everything, each group within `grace_s` or its own grace time.
    fn stop_all(&mut self, grace_s: Option<f64>, reason: &str, code: i32) {
        for group in self.groups.values() {
            group.stop(grace_s.unwrap_or(group.grace_s), reason);
        }
        self.end_rest(code);
    }

    fn end_rest(&mut self, code: i32) {
        self.end.get_or_insert(End { code });
        if let Some(setup) = &self.setup {
            setup.stop();
        }
    }

    /// The exit code, once nothing is left to look after.
    fn is_over(&mut self) -> Option<i32> {
        let idle =
            self.groups.values().all(Handle::is_over) && self.setup.as_ref().is_none_or(Setup::is_over);
        if let Some(End { code }) = self.end {
            return idle.then_some(code);
        }
        // Nothing waits for the controller, except here: it may have something to say about what comes next.
        let (away, linger) = (self.context.standing.borrow().away(), self.limits.linger);
        if self.groups.is_empty() {
            // Never asked for anything: a controller may be slow to start, but not that slow.
            let forgotten = idle && away >= linger * NEVER_ASKED;
            return forgotten.then(|| {
                tracing::error!(?away, "no controller has asked for anything: the agent ends");
                1
            });
        }
        if away < linger {
            return None;
        }
        if idle {
            return Some(0);
        }
        if !self.released && self.context.groups().values().all(|group| is_settled(group.state)) {
            tracing::warn!("all work is done and no controller answers: donors may leave");
            self.release();
        }
        None
    }

    /// That long from now, but not after the host was taken away.
    fn bounded(&self, wait: Duration) -> Instant {
        let until = Instant::now() + wait;
        self.gone.map_or(until, |gone| gone.min(until))
    }

    async fn finish(mut self) {
        let context = Arc::clone(&self.context);
        context.store.end(&context).await;
        context.fork_server.end(&context).await;
        self.services.stop(|name| name != "controller").await;
        // Whatever is left below the agent, save the controller, belongs to nobody.
        let spared: HashSet<u32> = context.registry.with_lock(|pids| pids.clone());
        let until = self.bounded(LAST_GRACE);
        let family = || Family::AllBut(spared.clone());
        tree::end(family, &context.registry, || until, context.limits.kill_s).await;
        let stored = async {
            while !context.outbox.is_acked() {
                sleep(Duration::from_millis(10)).await;
            }
        };
        // A controller that has another agent in this one's place stores nothing of it.
        let flush_s = if self.fenced { 0.0 } else { context.limits.flush_s };
        if timeout_at(self.bounded(seconds(flush_s)), stored).await.is_err() {
            tracing::warn!("the controller has not stored the last events");
        }
        self.services.stop(|_| true).await;
        tree::reap_adopted(&context.registry);
    }
}
