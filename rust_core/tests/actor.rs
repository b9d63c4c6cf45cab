//! Supervision as seen by an owner: every end is reported once, in the right words, and children never outlive.

#![allow(missing_docs, clippy::unwrap_used, reason = "a test")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sky_monarch_core::actor::{self, Actor, ActorRef, Context, Ending, Options, SupervisionEvent};
use sky_monarch_core::{Error, ErrorKind, Result};
use tokio::sync::{Notify, oneshot};

const SOON: Duration = Duration::from_secs(20);

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, future).await.expect("within twenty seconds")
}

/// Does what it is told; counts its drops.
#[derive(Default)]
struct Child {
    drops: Arc<AtomicUsize>,
    seen: Arc<Mutex<Vec<u32>>>,
}

enum Do {
    Fail,
    Panic,
    Sleep(Arc<Notify>),
    Note(u32),
    Echo(u32, oneshot::Sender<u32>),
}

impl Actor for Child {
    type Msg = Do;

    async fn handle(&mut self, msg: Do, _ctx: &mut Context<Self>) -> Result<()> {
        match msg {
            Do::Fail => return Err(Error::new(ErrorKind::Io, "do as told", "told to fail")),
            Do::Panic => panic!("told to panic"),
            Do::Sleep(entered) => {
                entered.notify_one();
                tokio::time::sleep(Duration::from_secs(3600)).await;
            }
            Do::Note(number) => self.seen.lock().unwrap().push(number),
            Do::Echo(number, reply) => drop(reply.send(number)),
        }
        Ok(())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Ordering::SeqCst);
    }
}

/// Keeps children; passes on every supervision event it gets.
struct Parent {
    events: tokio::sync::mpsc::UnboundedSender<SupervisionEvent>,
    children: Vec<(&'static str, Child)>,
    refs: Option<oneshot::Sender<Vec<ActorRef<Do>>>>,
}

impl Actor for Parent {
    type Msg = ();

    async fn started(&mut self, ctx: &mut Context<Self>) -> Result<()> {
        let mut refs = Vec::new();
        for (name, child) in self.children.drain(..) {
            refs.push(ctx.spawn(name, Options::default(), child)?);
        }
        drop(self.refs.take().unwrap().send(refs));
        Ok(())
    }

    async fn handle(&mut self, (): (), _ctx: &mut Context<Self>) -> Result<()> {
        Ok(())
    }

    async fn handle_supervision(&mut self, event: SupervisionEvent, _ctx: &mut Context<Self>) -> Result<()> {
        self.events.send(event).unwrap();
        Ok(())
    }
}

struct Family {
    parent: actor::Running<()>,
    children: Vec<ActorRef<Do>>,
    events: tokio::sync::mpsc::UnboundedReceiver<SupervisionEvent>,
    drops: Arc<AtomicUsize>,
}

async fn family(names: &[&'static str]) -> Family {
    let (events, received) = tokio::sync::mpsc::unbounded_channel();
    let (refs, children) = oneshot::channel();
    let drops = Arc::new(AtomicUsize::new(0));
    let kids =
        names.iter().map(|name| (*name, Child { drops: drops.clone(), seen: Arc::default() })).collect();
    let parent =
        actor::spawn("parent", Options::default(), Parent { events, children: kids, refs: Some(refs) });
    Family { parent, children: soon(children).await.unwrap(), events: received, drops }
}

#[tokio::test]
async fn each_way_to_end_reaches_the_owner_once_and_in_its_own_words() {
    let mut family = family(&["fails", "panics", "stops", "is killed"]).await;
    let entered = Arc::new(Notify::new());
    family.children[0].send(Do::Fail).await.unwrap();
    family.children[1].send(Do::Panic).await.unwrap();
    family.children[2].stop("enough");
    family.children[3].send(Do::Sleep(entered.clone())).await.unwrap();
    soon(entered.notified()).await;
    family.children[3].kill("now");

    let mut endings = std::collections::BTreeMap::new();
    for _ in 0..4 {
        let event = soon(family.events.recv()).await.unwrap();
        assert!(endings.insert(event.name.to_string(), event.ending.to_string()).is_none(), "one event each");
    }
    assert_eq!(endings["fails"], "failed: could not do as told: told to fail");
    assert_eq!(endings["panics"], "panicked: told to panic");
    assert_eq!(endings["stops"], "stopped: enough");
    assert_eq!(endings["is killed"], "killed: now");

    for child in &family.children {
        soon(child.ended()).await;
        child.stop("again");
        child.kill("again");
        assert_eq!(child.try_send(Do::Fail).unwrap_err().kind(), ErrorKind::Closed);
    }
    let end = soon(family.parent.stop("over", SOON)).await.unwrap();
    assert!(matches!(end.ending, Ending::Stopped { .. }));
    assert!(family.events.recv().await.is_none(), "no fifth event");
    assert_eq!(family.drops.load(Ordering::SeqCst), 4);
}

#[tokio::test]
async fn stop_goes_before_queued_messages_and_a_kill_before_a_stop() {
    let child = Child::default();
    let seen = Arc::clone(&child.seen);
    let mut running = actor::spawn("child", Options::default(), child);
    // One thread: the actor cannot run before this test waits.
    for number in 0..10 {
        running.actor().try_send(Do::Note(number)).unwrap();
    }
    running.actor().stop("first");
    running.actor().stop("second");
    let end = soon(running.wait()).await.unwrap();
    assert_eq!(end.ending.to_string(), "stopped: first");
    assert!(seen.lock().unwrap().is_empty());

    let mut running = actor::spawn("child", Options::default(), Child::default());
    running.actor().stop("in order");
    running.actor().kill("at once");
    assert_eq!(soon(running.wait()).await.unwrap().ending.to_string(), "killed: at once");
}

#[tokio::test]
async fn supervision_events_go_before_messages() {
    #[derive(Default)]
    struct Watcher(Arc<Mutex<Vec<&'static str>>>);
    impl Actor for Watcher {
        type Msg = &'static str;
        async fn started(&mut self, ctx: &mut Context<Self>) -> Result<()> {
            let child = ctx.spawn("child", Options::default(), Child::default())?;
            ctx.actor().try_send("message")?;
            child.kill("gone before the first message is read");
            child.ended().await;
            Ok(())
        }
        async fn handle(&mut self, msg: &'static str, ctx: &mut Context<Self>) -> Result<()> {
            self.0.lock().unwrap().push(msg);
            ctx.stop("seen both");
            Ok(())
        }
        async fn handle_supervision(
            &mut self,
            _event: SupervisionEvent,
            _ctx: &mut Context<Self>,
        ) -> Result<()> {
            self.0.lock().unwrap().push("supervision");
            Ok(())
        }
    }
    let watcher = Watcher::default();
    let seen = Arc::clone(&watcher.0);
    let mut running = actor::spawn("watcher", Options::default(), watcher);
    soon(running.wait()).await.unwrap();
    assert_eq!(*seen.lock().unwrap(), ["supervision", "message"]);
}

#[tokio::test]
async fn a_full_mailbox_makes_the_sender_wait_and_refuses_try_send() {
    let options = Options { mailbox: 2, ..Options::default() };
    let running = actor::spawn("busy", options, Child::default());
    let entered = Arc::new(Notify::new());
    running.actor().send(Do::Sleep(entered.clone())).await.unwrap();
    soon(entered.notified()).await;
    running.actor().try_send(Do::Note(1)).unwrap();
    running.actor().try_send(Do::Note(2)).unwrap();
    assert_eq!(running.actor().try_send(Do::Note(3)).unwrap_err().kind(), ErrorKind::TooLarge);
    let waiting = tokio::time::timeout(Duration::from_millis(50), running.actor().send(Do::Note(3))).await;
    assert!(waiting.is_err(), "the sender waits for room");
}

#[tokio::test]
async fn a_child_failure_escalates_by_default() {
    struct Strict(Option<oneshot::Sender<ActorRef<Do>>>);
    impl Actor for Strict {
        type Msg = ();
        async fn started(&mut self, ctx: &mut Context<Self>) -> Result<()> {
            let child = ctx.spawn("weak", Options::default(), Child::default())?;
            drop(self.0.take().unwrap().send(child));
            Ok(())
        }
        async fn handle(&mut self, (): (), _ctx: &mut Context<Self>) -> Result<()> {
            Ok(())
        }
    }
    let (give, take) = oneshot::channel();
    let mut running = actor::spawn("strict", Options::default(), Strict(Some(give)));
    soon(take).await.unwrap().send(Do::Panic).await.unwrap();
    let end = soon(running.wait()).await.unwrap();
    assert_eq!(
        end.ending.to_string(),
        "failed: could not go on without a child: child weak panicked: told to panic"
    );
}

#[tokio::test]
async fn no_child_outlives_its_parent_however_that_ends() {
    for how in ["stop", "kill", "drop"] {
        let family = family(&["asleep", "idle"]).await;
        let entered = Arc::new(Notify::new());
        family.children[1].send(Do::Sleep(entered.clone())).await.unwrap();
        soon(entered.notified()).await;
        match how {
            "stop" => {
                // A child inside a handler cannot stop in order: it is killed after the grace.
                family.children[1].kill("so that the test is quick");
                drop(soon(family.parent.stop("over", SOON)).await);
            }
            "kill" => family.parent.actor().kill("over"),
            _ => drop(family.parent),
        }
        for child in &family.children {
            soon(child.ended()).await;
        }
        assert_eq!(family.drops.load(Ordering::SeqCst), 2, "after {how}");
    }
}

#[tokio::test]
async fn a_child_that_does_not_stop_is_killed_after_the_grace() {
    struct Hasty(Option<oneshot::Sender<ActorRef<Do>>>);
    impl Actor for Hasty {
        type Msg = ();
        async fn started(&mut self, ctx: &mut Context<Self>) -> Result<()> {
            let child = ctx.spawn("slow", Options::default(), Child::default())?;
            drop(self.0.take().unwrap().send(child));
            Ok(())
        }
        async fn handle(&mut self, (): (), _ctx: &mut Context<Self>) -> Result<()> {
            Ok(())
        }
    }
    let (give, take) = oneshot::channel();
    let options = Options { children_grace: Duration::from_millis(50), ..Options::default() };
    let running = actor::spawn("hasty", options, Hasty(Some(give)));
    let child = soon(take).await.unwrap();
    let entered = Arc::new(Notify::new());
    child.send(Do::Sleep(entered.clone())).await.unwrap();
    soon(entered.notified()).await;
    let end = soon(running.stop("over", SOON)).await.unwrap();
    assert!(matches!(end.ending, Ending::Stopped { .. }), "{}", end.ending);
    soon(child.ended()).await;
}

#[test]
fn an_actor_whose_runtime_goes_away_still_reports() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut running = {
        let _inside = runtime.enter();
        actor::spawn("cut off", Options::default(), Child::default())
    };
    drop(runtime);
    let waiting = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let end = waiting.block_on(async { soon(running.wait()).await }).unwrap();
    assert!(matches!(end.ending, Ending::Dropped), "{}", end.ending);
    assert!(running.actor().has_ended());
}

#[tokio::test]
async fn children_over_the_bound_are_refused() {
    struct Full(Option<oneshot::Sender<ErrorKind>>);
    impl Actor for Full {
        type Msg = ();
        async fn started(&mut self, ctx: &mut Context<Self>) -> Result<()> {
            ctx.spawn("one", Options::default(), Child::default())?;
            let refused = ctx.spawn("two", Options::default(), Child::default()).unwrap_err();
            self.0.take().unwrap().send(refused.kind()).unwrap();
            Ok(())
        }
        async fn handle(&mut self, (): (), _ctx: &mut Context<Self>) -> Result<()> {
            Ok(())
        }
    }
    let (give, take) = oneshot::channel();
    let _running = actor::spawn("full", Options { children: 1, ..Options::default() }, Full(Some(give)));
    assert_eq!(soon(take).await.unwrap(), ErrorKind::TooLarge);
}

#[tokio::test]
async fn ask_returns_the_answer_or_says_who_gave_none() {
    let running = actor::spawn("child", Options::default(), Child::default());
    assert_eq!(running.actor().ask(SOON, |reply| Do::Echo(7, reply)).await.unwrap(), 7);
    let entered = Arc::new(Notify::new());
    running.actor().send(Do::Sleep(entered.clone())).await.unwrap();
    let late = running.actor().ask(Duration::from_millis(50), |reply| Do::Echo(7, reply)).await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::TimedOut);
    assert!(late.to_string().contains("child gave no answer within 50ms"), "{late}");
}
