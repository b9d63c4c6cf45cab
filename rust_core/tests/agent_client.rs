//! A session's client: it never waits to report, the latest word wins, and it comes back after the agent was away.

#![allow(missing_docs, clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeMap;
use std::time::Duration;

use sky_monarch_core::ErrorKind;
use sky_monarch_core::agent_client::AgentClient;
use sky_monarch_core::channel::{Channel, Credentials, Limits, Listener};
use sky_monarch_core::protocol::{Peer, SessionCommand, SessionReport, Slot};
use sky_monarch_core::wire::Address;
use tempfile::TempDir;
use tokio::time::{Instant, timeout};

const SOON: Duration = Duration::from_secs(20);

type Agent = Channel<SessionCommand, SessionReport>;

async fn soon<T>(future: impl Future<Output = T>) -> T {
    timeout(SOON, future).await.expect("within twenty seconds")
}

fn ours() -> Credentials {
    Credentials::new("run-1", "token")
}

fn session() -> Peer {
    Peer::Session { slot: Slot { replica: 1, rank: 0 }, generation: 3, pid: 1, target_step: Some(9) }
}

fn address() -> (TempDir, Address) {
    let folder = tempfile::tempdir().unwrap();
    let address = format!("unix:{}", folder.path().join("a.sock").display()).parse().unwrap();
    (folder, address)
}

async fn listen(address: &Address) -> Listener {
    let limits = Limits { queue: 4, linger: Duration::from_millis(200), ..Limits::default() };
    Listener::bind(address, ours(), limits).await.unwrap()
}

async fn accept(listener: &mut Listener) -> Agent {
    soon(listener.accept()).await.unwrap().welcome().await.unwrap()
}

async fn connected(address: &Address) -> (AgentClient, Agent, Listener) {
    let mut listener = listen(address).await;
    let dialling = tokio::spawn(AgentClient::connect(address.clone(), session(), ours(), SOON));
    let agent = accept(&mut listener).await;
    (dialling.await.unwrap().unwrap(), agent, listener)
}

/// The agent goes, and its address is free for the next.
async fn away(agent: Agent, listener: Listener) {
    drop(agent);
    listener.close().await;
}

fn commit(client: &AgentClient, step: u64) {
    client.committed(step, Some(1), Some(2), BTreeMap::from([("loss".to_owned(), 0.5)])).unwrap();
}

#[tokio::test]
async fn an_agent_that_comes_late_is_waited_for_and_one_that_never_comes_is_named() {
    let (_folder, address) = address();
    let dialling = tokio::spawn(AgentClient::connect(address.clone(), session(), ours(), SOON));
    tokio::time::sleep(Duration::from_millis(150)).await;
    let mut listener = listen(&address).await;
    let _agent = accept(&mut listener).await;
    dialling.await.unwrap().unwrap();

    let (folder, nowhere) = self::address();
    let started = Instant::now();
    let limit = Duration::from_millis(300);
    let error = AgentClient::connect(nowhere, session(), ours(), limit).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(error.to_string().contains(folder.path().to_str().unwrap()), "{error}");
    assert!(started.elapsed() >= limit && started.elapsed() < SOON);
}

#[tokio::test]
async fn a_slow_agent_gets_the_latest_commit_and_the_session_never_waits() {
    let (_folder, address) = address();
    let (client, mut agent, _listener) = connected(&address).await;
    // Metrics of 4 kB each: 20000 of them fit into no queue and no socket buffer.
    let fat: BTreeMap<String, f64> =
        (0..200).map(|number| (format!("a metric named {number}"), 0.5)).collect();
    for step in 1..=20_000 {
        client.committed(step, None, None, fat.clone()).unwrap();
        if step % 1000 == 0 {
            tokio::task::yield_now().await;
        }
    }
    // It has not waited: nobody has read anything so far.
    let (mut received, mut latest) = (0, 0);
    while latest < 20_000 {
        let SessionReport::Committed { step, .. } = soon(agent.recv()).await.unwrap() else {
            panic!("a commit")
        };
        assert!(step > latest, "{step} after {latest}");
        (received, latest) = (received + 1, step);
    }
    assert!(received < 1000, "{received} of 20000 were sent: nothing was coalesced");
}

#[tokio::test]
async fn a_restarted_agent_is_told_the_whole_state_again() {
    let (_folder, address) = address();
    let (client, mut agent, listener) = connected(&address).await;
    commit(&client, 7);
    assert!(matches!(soon(agent.recv()).await.unwrap(), SessionReport::Committed { step: 7, .. }));
    away(agent, listener).await;

    // Said while nobody is there.
    commit(&client, 8);
    commit(&client, 9);
    client.pause("save", Duration::from_secs(60)).unwrap();
    client.done(9).unwrap();
    assert!(client.recv(Duration::from_millis(200)).await.unwrap().is_none(), "away is no error");

    for _ in 0..2 {
        let mut listener = listen(&address).await;
        let mut agent = accept(&mut listener).await;
        // In the order in which it was said: a commit ends the pause before it.
        assert!(matches!(soon(agent.recv()).await.unwrap(), SessionReport::Committed { step: 9, .. }));
        let pause = soon(agent.recv()).await.unwrap();
        let SessionReport::Pause { what, limit_s } = pause else { panic!("then the pause: {pause:?}") };
        assert!(what == "save" && limit_s > 30.0 && limit_s < 60.0, "{what} {limit_s}: what is left of it");
        assert!(matches!(soon(agent.recv()).await.unwrap(), SessionReport::Done { step: 9 }));
        agent.send(&SessionCommand::Release).await.unwrap();
        assert!(matches!(client.recv(SOON).await.unwrap(), Some(SessionCommand::Release)));
        away(agent, listener).await;
    }

    commit(&client, 10);
    let mut listener = listen(&address).await;
    let mut agent = accept(&mut listener).await;
    assert!(matches!(soon(agent.recv()).await.unwrap(), SessionReport::Pause { .. }));
    assert!(matches!(soon(agent.recv()).await.unwrap(), SessionReport::Done { step: 9 }));
    assert!(matches!(soon(agent.recv()).await.unwrap(), SessionReport::Committed { step: 10, .. }));
}

#[tokio::test]
async fn a_refused_session_learns_why_and_does_not_ask_again() {
    let (_folder, address) = address();
    let (client, agent, listener) = connected(&address).await;
    away(agent, listener).await;
    let mut listener = listen(&address).await;
    soon(listener.accept()).await.unwrap().refuse("generation 4 has taken its place").await.unwrap();
    let error = client.recv(SOON).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.to_string().ends_with("generation 4 has taken its place"), "{error}");
    assert_eq!(client.done(9).unwrap_err().kind(), ErrorKind::Refused);
    let again = timeout(Duration::from_millis(500), listener.accept()).await;
    assert!(again.is_err(), "it does not ask again");
}

#[tokio::test]
async fn close_lets_the_last_report_leave_and_ends_every_call() {
    let (_folder, address) = address();
    let (client, mut agent, _listener) = connected(&address).await;
    commit(&client, 9);
    client.done(9).unwrap();
    soon(client.close(SOON)).await;
    assert!(matches!(soon(agent.recv()).await.unwrap(), SessionReport::Committed { step: 9, .. }));
    assert!(matches!(soon(agent.recv()).await.unwrap(), SessionReport::Done { step: 9 }));
    assert_eq!(soon(agent.recv()).await.unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(client.done(9).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(client.recv(SOON).await.unwrap_err().kind(), ErrorKind::Closed);
    soon(client.close(SOON)).await;
}

#[tokio::test]
async fn a_client_that_is_closed_while_the_agent_is_away_ends() {
    let (_folder, address) = address();
    let (client, agent, listener) = connected(&address).await;
    away(agent, listener).await;
    client.done(9).unwrap();
    let started = Instant::now();
    client.close(6 * SOON).await;
    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
    assert_eq!(client.recv(SOON).await.unwrap_err().kind(), ErrorKind::Closed);
}
