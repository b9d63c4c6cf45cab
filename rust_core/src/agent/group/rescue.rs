//! What becomes of a group whose own task panics: a defect of the agent must leave nobody unsupervised.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::seconds;
use crate::actor::panic_message;
use crate::agent::context::Shared;
use crate::agent::evict::{Eviction, Evictor};
use crate::agent::pidfd::Process;
use crate::agent::tree::{self, Family, Root};
use crate::protocol::{Cause, Event, GroupSnapshot, GroupState, SessionCommand, Slot};

/// A group as those see it who have to clean up after it.
pub(super) struct Rescue {
    pub context: Shared,
    pub evictor: Arc<dyn Evictor>,
    pub replica: u32,
    pub ranks: Range<u32>,
    /// Generation of the first start.
    pub generation: u64,
}

impl Rescue {
    /// Runs a group to its end. Where it panics, its processes are ended and it is given up with the panic's words.
    pub(super) async fn watch(self, run: impl Future<Output = ()> + Send + 'static) {
        let Err(end) = tokio::spawn(run).await else { return };
        // The only other error is a runtime that shuts down.
        let Ok(panic) = end.try_into_panic() else { return };
        self.give_up(panic_message(panic.as_ref())).await;
    }

    async fn give_up(self, error: String) {
        tracing::error!(replica = self.replica, error, "the task of a replica group panicked");
        let Self { context, replica, .. } = &self;
        let replica = *replica;
        context.sessions.fence(replica);
        context.roll_call().leave(replica);
        let last = context.groups().get(&replica).cloned();
        let (generation, pids) = last.map_or_else(
            || (self.generation, Default::default()),
            |GroupSnapshot { generation, pids, .. }| (generation, pids),
        );
        let evicting = async {
            let (may, limit) = (context.may_be_replaced(), seconds(context.limits.evict_s));
            match self.evictor.retire(replica, generation, may, limit).await {
                Ok(Eviction::Known(quorum_id)) => {
                    context.outbox.emit(Event::Evicted { replica, generation, quorum_id, orderly: false });
                    if let Some(quorum_id) = quorum_id {
                        context.sessions.tell_others(replica, &SessionCommand::Dead { quorum_id });
                    }
                }
                Ok(Eviction::Untold) => {}
                Err(error) => {
                    let message =
                        format!("generation {generation} was not evicted at the lighthouse: {error}");
                    context.outbox.emit(Event::Notice { replica: Some(replica), message });
                }
            }
        };
        let now = Instant::now();
        let family = || Family::Spawns(roots(&context.owned(replica)));
        let ending = tree::end(family, &context.registry, || now, context.limits.kill_s);
        let ((), (_, survivors)) = tokio::join!(evicting, ending);
        if !survivors.is_empty() {
            let message = format!("processes of replica group {replica} survived SIGKILL: {survivors:?}");
            context.outbox.emit(Event::Notice { replica: Some(replica), message });
        }
        for (spawn_id, process) in context.owned(replica) {
            let exited = timeout(Duration::from_secs(1), process.exited()).await;
            let rank = pids.iter().find(|(_, pid)| **pid == process.pid).map(|(rank, _)| *rank);
            if let (Ok(exited), Some(rank)) = (exited, rank) {
                let (pid, exit) = (process.pid, exited.exit);
                let (collateral, oom, tail) = (true, false, Vec::new());
                let event = Event::RankExited {
                    replica,
                    rank,
                    generation,
                    pid,
                    exit,
                    collateral,
                    oom,
                    tail,
                    traceback: Vec::new(),
                    memory: None,
                };
                context.outbox.emit_at(exited.at_ns, event);
            }
            context.disown(&spawn_id);
        }
        context.sessions.forget(replica);
        for rank in self.ranks.clone() {
            for stream in [generation, 0] {
                context.logs.close(Some(Slot { replica, rank }), stream);
            }
        }
        let restarts = context.groups().get(&replica).map_or(0, |snapshot| snapshot.restarts);
        let pids = Default::default();
        let state = GroupState::GivenUp;
        context.groups().insert(replica, GroupSnapshot { replica, generation, state, restarts, pids });
        let cause = Cause::AgentFailed { error };
        context.outbox.emit(Event::GenerationEnded {
            replica,
            generation,
            cause: cause.clone(),
            step: None,
            never_ran: None,
        });
        context.outbox.emit(Event::GroupGivenUp { replica, generation, cause, restarts });
    }
}

fn roots(owned: &[(String, Process)]) -> HashMap<String, Root> {
    let root = |process: &Process| Root { pid: process.pid, alive: process.exit().is_none() };
    owned.iter().map(|(spawn_id, process)| (spawn_id.clone(), root(process))).collect()
}
