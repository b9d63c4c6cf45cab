//! The job's `setup`: runs once on a host, before any group.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::capture::{self, Capture};
use super::context::Shared;
use super::env;
use super::group::rank::Tracked;
use super::group::seconds;
use super::pidfd::Process;
use super::tree::{RUN_ID, SPAWN_ID};
use crate::Result;
use crate::protocol::{Event, Exit, SetupPlan};

/// Exit code that shells give for a command that cannot be executed.
const CANNOT_EXECUTE: i32 = 126;
/// Time between TERM and KILL for what the script has started.
const GRACE: Duration = Duration::from_secs(5);

/// A `setup` that runs or ran.
#[derive(Debug)]
pub struct Setup {
    stop: watch::Sender<bool>,
    task: tokio::task::JoinHandle<Event>,
    finished: Option<Event>,
}

impl Setup {
    /// Starts it. Its end is told as an event.
    pub fn start(context: Shared, plan: SetupPlan) -> Self {
        let (stop, asked) = watch::channel(false);
        context.logs.open(None, 1);
        let task = tokio::spawn(async move {
            context.outbox.emit(Event::SetupStarted);
            let event = match run(&context, &plan, asked).await {
                Ok(event) => event,
                Err(error) => Event::SetupFinished {
                    exit: Exit::Code(CANNOT_EXECUTE),
                    timed_out: false,
                    tail: vec![error.to_string()],
                },
            };
            context.logs.close(None, 1);
            context.outbox.emit(event.clone());
            event
        });
        Self { stop, task, finished: None }
    }

    /// Ends it, with everything it has started.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// True when nothing of it is left.
    pub fn is_over(&self) -> bool {
        self.task.is_finished()
    }

    /// How it ended, for a controller that asks again.
    pub async fn result(&mut self) -> Option<Event> {
        if self.finished.is_none() && self.task.is_finished() {
            self.finished = (&mut self.task).await.ok();
        }
        self.finished.clone()
    }
}

async fn run(context: &Shared, plan: &SetupPlan, mut stop: watch::Receiver<bool>) -> Result<Event> {
    let argv = ["bash", "-eo", "pipefail", "-c", &plan.script].map(str::to_owned).to_vec();
    let spawn_id = context.spawn_id();
    let mut env = plan.envs.clone();
    env.insert(RUN_ID.into(), context.run.run_id.clone());
    env.insert(SPAWN_ID.into(), spawn_id.clone());
    let (read, write) = capture::pipe()?;
    let deadline = Instant::now() + seconds(plan.timeout_s);
    let capture = Capture::start(read, context.logs.setup_target(), context.outbox.clone(), None)?;
    let spawned = context.spawn(argv, env, &plan.workdir, write, None, 0).await?;
    let process = Process::watch(spawned, context.registry.clone())?;
    let tracked = Tracked { process: process.clone(), spawn_id, capture };
    let (mut timed_out, mut own_exit) = (false, None);
    tokio::select! {
        biased;
        exited = process.exited() => own_exit = Some(exited),
        _ = stop.wait_for(|stop| *stop) => {}
        () = tokio::time::sleep_until(deadline) => timed_out = true,
    }
    let tail = tracked.capture.tail();
    let tail = tail.iter().map(|line| env::redact(line, &context.run.token)).collect();
    // After an end in order too: a setup leaves nothing running.
    tracked.end(context, GRACE).await;
    let exit = match own_exit {
        Some(exited) => exited.exit,
        None => timeout(Duration::from_secs(1), process.exited())
            .await
            .map_or(Exit::Signal(libc::SIGKILL), |e| e.exit),
    };
    Ok(Event::SetupFinished { exit, timed_out, tail })
}
