//! Channels between real sockets: who gets in, what slows whom, and what each end learns.

#![allow(missing_docs, clippy::unwrap_used, reason = "a test")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use sky_monarch_core::ErrorKind;
use sky_monarch_core::channel::{self, Channel, Credentials, Limits, Listener, Server, ServerEvent};
use sky_monarch_core::protocol::{Command, Hello, Peer, Report, VERSION, Welcome};
use sky_monarch_core::wire::{Address, Frame, FrameReader, FrameWriter};
use tempfile::TempDir;
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout};

const SOON: Duration = Duration::from_secs(20);

type Near = Channel<Command, Report>;
type Far = Channel<Report, Command>;

async fn soon<T>(future: impl Future<Output = T>) -> T {
    timeout(SOON, future).await.expect("within twenty seconds")
}

fn address() -> (TempDir, Address) {
    let folder = tempfile::tempdir().unwrap();
    let address = format!("unix:{}", folder.path().join("a.sock").display()).parse().unwrap();
    (folder, address)
}

fn agent(host: &str) -> Peer {
    Peer::Agent {
        host: host.into(),
        attempt: 0,
        pid: 1,
        incarnation: 2,
        groups: Vec::new(),
        probe: None,
        examining: false,
    }
}

fn ours() -> Credentials {
    Credentials::new("run-1", "token")
}

fn chunk(request: u64, bytes: usize) -> Report {
    Report::LogChunk { request, offset: 0, data: vec![1; bytes], eof: false }
}

fn small() -> Limits {
    Limits { queue: 4, linger: Duration::from_millis(200), ..Limits::default() }
}

/// A connected pair, the listener still open.
async fn pair(limits: Limits) -> (Near, Far, Listener, TempDir) {
    let (folder, address) = address();
    let mut listener = Listener::bind(&address, ours(), limits).await.unwrap();
    let dialling =
        tokio::spawn(async move { channel::connect(&address, agent("a"), &ours(), &limits, SOON).await });
    let near = soon(listener.accept()).await.unwrap().welcome().await.unwrap();
    (near, dialling.await.unwrap().unwrap(), listener, folder)
}

/// Says `hello` by hand and returns the answer.
async fn say(address: &Address, hello: &impl serde::Serialize) -> Welcome {
    let Address::Unix(path) = address else { panic!("a unix address") };
    let (read, write) = UnixStream::connect(path).await.unwrap().into_split();
    FrameWriter::new(write, 1 << 20).write(&Frame::from_message(hello).unwrap()).await.unwrap();
    let answer = soon(FrameReader::new(read, 1 << 20).read()).await.unwrap().expect("an answer");
    answer.message().unwrap()
}

#[tokio::test]
async fn another_version_token_or_run_is_refused_in_words() {
    let (_folder, address) = address();
    let mut listener = Listener::bind(&address, ours(), Limits::default()).await.unwrap();
    let hello = Hello { version: VERSION, run_id: "run-1".into(), token: "token".into(), peer: agent("a") };

    // A future Hello, of which only the version is known to this side.
    #[derive(serde::Serialize)]
    struct Future {
        version: u32,
        shape: &'static str,
    }
    let answer = say(&address, &Future { version: VERSION + 1, shape: "unknown" }).await;
    let reason = answer.refused.unwrap();
    assert!(reason.contains(&format!("version {}, this side speaks {VERSION}", VERSION + 1)), "{reason}");

    let answer = say(&address, &Hello { version: VERSION - 1, ..hello.clone() }).await;
    assert!(answer.refused.unwrap().contains(&format!("version {}", VERSION - 1)));

    for token in ["", "tokem", "tok", "tokenn"] {
        let reason = say(&address, &Hello { token: token.into(), ..hello.clone() }).await.refused.unwrap();
        assert_eq!(reason, "the token is not this run's", "{token:?}");
        assert!(!reason.contains("\"token\""));
    }
    let reason = say(&address, &Hello { run_id: "run-2".into(), ..hello.clone() }).await.refused.unwrap();
    assert_eq!(reason, r#"this is run "run-1", not "run-2""#);

    let bad = Credentials::new("run-1", "bad");
    let error =
        channel::connect::<Report, Command>(&address, agent("a"), &bad, &small(), SOON).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    // None of them has reached the application.
    assert!(timeout(Duration::from_millis(50), listener.accept()).await.is_err());
}

#[tokio::test]
async fn a_dialler_learns_that_a_server_is_of_another_version() {
    let (_folder, address) = address();
    let Address::Unix(path) = &address else { panic!("a unix address") };
    let listener = tokio::net::UnixListener::bind(path).unwrap();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let (_read, write) = stream.into_split();
        let welcome = Welcome { version: VERSION + 4, refused: None };
        FrameWriter::new(write, 1 << 20).write(&Frame::from_message(&welcome).unwrap()).await.unwrap();
    });
    let dialled = channel::connect::<Report, Command>(&address, agent("a"), &ours(), &small(), SOON).await;
    let error = dialled.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    let both = format!("version {}, this side speaks {VERSION}", VERSION + 4);
    assert!(error.to_string().contains(&both), "{error}");
}

#[tokio::test]
async fn the_application_may_refuse_with_a_reason() {
    let (_folder, address) = address();
    let mut listener = Listener::bind(&address, ours(), Limits::default()).await.unwrap();
    let dialled = address.clone();
    let dialling = tokio::spawn(async move {
        channel::connect::<Report, Command>(&dialled, agent("a"), &ours(), &small(), SOON).await
    });
    soon(listener.accept()).await.unwrap().refuse("generation 3 is over: 4 runs").await.unwrap();
    let error = dialling.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.to_string().ends_with("generation 3 is over: 4 runs"), "{error}");
}

#[tokio::test]
async fn silent_diallers_lose_their_places_and_hold_nobody_up() {
    let (_folder, address) = address();
    let limits = Limits { handshake: Duration::from_secs(1), max_handshakes: 2, ..small() };
    let mut listener = Listener::bind(&address, ours(), limits).await.unwrap();
    let Address::Unix(path) = &address else { panic!("a unix address") };
    let mut silent = Vec::new();
    for _ in 0..2 {
        silent.push(UnixStream::connect(path).await.unwrap());
    }
    // Every handshake place is taken by somebody who says nothing; the honest one gets in all the same.
    let dialled = address.clone();
    let honest = tokio::spawn(async move {
        channel::connect::<Report, Command>(&dialled, agent("honest"), &ours(), &small(), SOON).await
    });
    let pending = soon(listener.accept()).await.unwrap();
    assert!(matches!(pending.peer(), Peer::Agent { host, .. } if host == "honest"));
    let _open: Near = pending.welcome().await.unwrap();
    drop(soon(honest).await.unwrap().unwrap());
    for stream in &mut silent {
        // Told nothing worse than the end of the connection.
        let mut rest = Vec::new();
        soon(tokio::io::AsyncReadExt::read_to_end(stream, &mut rest)).await.unwrap();
    }
}

#[tokio::test]
async fn one_connection_over_the_bound_is_told_so_and_a_closed_one_makes_room() {
    let (_folder, address) = address();
    let limits = Limits { max_connections: 1, ..small() };
    let mut listener = Listener::bind(&address, ours(), limits).await.unwrap();
    let dial = |address: Address| {
        tokio::spawn(async move {
            channel::connect::<Report, Command>(&address, agent("a"), &ours(), &small(), SOON).await
        })
    };
    let first = dial(address.clone());
    let near: Near = soon(listener.accept()).await.unwrap().welcome().await.unwrap();
    let far = first.await.unwrap().unwrap();
    let error = soon(dial(address.clone())).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.to_string().contains("1 connections are open already"), "{error}");
    drop((near, far));
    let deadline = Instant::now() + SOON;
    loop {
        // Either it arrives, or it is refused: none is left behind that the next might be taken for.
        let mut again = dial(address.clone());
        tokio::select! {
            pending = listener.accept() => {
                let _near: Near = pending.unwrap().welcome().await.unwrap();
                soon(again).await.unwrap().unwrap();
                break;
            }
            refused = soon(&mut again) => {
                assert_eq!(refused.unwrap().unwrap_err().kind(), ErrorKind::Refused);
            }
        }
        assert!(Instant::now() < deadline, "no room was made");
    }
}

#[tokio::test]
async fn messages_arrive_once_and_in_order_in_both_directions() {
    let (mut near, mut far, _listener, _folder) = pair(small()).await;
    let (near_sender, _near_receiver) = {
        for seq in 0..4 {
            near.try_send(&Command::Ack { seq }).unwrap();
        }
        for wanted in 0..4 {
            assert!(matches!(soon(far.recv()).await.unwrap(), Command::Ack { seq } if seq == wanted));
        }
        far.send(&chunk(9, 10)).await.unwrap();
        assert!(matches!(soon(near.recv()).await.unwrap(), Report::LogChunk { request: 9, .. }));
        near.split()
    };
    let sending = tokio::spawn(async move {
        for seq in 0..500 {
            near_sender.send(&Command::Ack { seq }).await.unwrap();
        }
        near_sender
    });
    for wanted in 0..500 {
        assert!(matches!(soon(far.recv()).await.unwrap(), Command::Ack { seq } if seq == wanted));
    }
    sending.await.unwrap();
}

#[tokio::test]
async fn a_slow_receiver_stops_its_sender_and_loses_nothing() {
    let (mut near, far, _listener, _folder) = pair(small()).await;
    let sent = Arc::new(AtomicUsize::new(0));
    let (far_sender, _far_receiver) = far.split();
    let counter = Arc::clone(&sent);
    let sending = tokio::spawn(async move {
        for request in 0..200 {
            far_sender.send(&chunk(request, 100_000)).await.unwrap();
            counter.fetch_add(1, Ordering::SeqCst);
        }
    });
    // Nobody receives: the count comes to rest far below the total.
    let mut before = usize::MAX;
    soon(async {
        while before != sent.load(Ordering::SeqCst) || before == 0 {
            before = sent.load(Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    })
    .await;
    // Two queues of 4, one frame on each side, and what the socket's buffers hold.
    assert!(before < 20, "{before} were sent into nowhere");
    for wanted in 0..200 {
        assert!(
            matches!(soon(near.recv()).await.unwrap(), Report::LogChunk { request, .. } if request == wanted)
        );
    }
    sending.await.unwrap();
}

#[tokio::test]
async fn a_queue_is_bounded_by_bytes_too() {
    let limits = Limits { queue: 10_000, queue_bytes: 1_000_000, ..small() };
    let (mut near, far, _listener, _folder) = pair(limits).await;
    let mut accepted = 0;
    let error = loop {
        match far.try_send(&chunk(accepted, 100_000)) {
            Ok(()) => accepted += 1,
            Err(error) => break error,
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert!(accepted < 100, "no bound");
    };
    assert_eq!(error.kind(), ErrorKind::TooLarge);
    assert!(error.to_string().contains("does not keep up"), "{error}");
    for wanted in 0..accepted {
        assert!(
            matches!(soon(near.recv()).await.unwrap(), Report::LogChunk { request, .. } if request == wanted)
        );
    }
    // There is room again, even for a frame larger than the whole budget.
    far.send(&chunk(7, 2_000_000)).await.unwrap();
    assert!(matches!(soon(near.recv()).await.unwrap(), Report::LogChunk { request: 7, .. }));
}

#[tokio::test]
async fn a_message_over_the_bound_is_the_senders_error_and_the_channel_lives() {
    let limits = Limits { max_frame: 10_000, ..small() };
    let (mut near, far, _listener, _folder) = pair(limits).await;
    assert_eq!(far.send(&chunk(1, 10_000)).await.unwrap_err().kind(), ErrorKind::TooLarge);
    assert_eq!(far.try_send(&chunk(1, 10_000)).unwrap_err().kind(), ErrorKind::TooLarge);
    far.send(&chunk(2, 9_000)).await.unwrap();
    assert!(matches!(soon(near.recv()).await.unwrap(), Report::LogChunk { request: 2, .. }));
}

#[tokio::test]
async fn a_peer_that_breaks_the_protocol_loses_its_channel_with_the_reason() {
    for (bytes, kind) in [
        (vec![0xff, 0xff, 0xff, 0xff, 1], ErrorKind::TooLarge),
        (vec![8, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0xc0], ErrorKind::Protocol),
    ] {
        let (_folder, address) = address();
        let mut listener = Listener::bind(&address, ours(), small()).await.unwrap();
        let Address::Unix(path) = &address else { panic!("a unix address") };
        let mut stream = UnixStream::connect(path).await.unwrap();
        let hello =
            Hello { version: VERSION, run_id: "run-1".into(), token: "token".into(), peer: agent("a") };
        FrameWriter::new(&mut stream, 1 << 20).write(&Frame::from_message(&hello).unwrap()).await.unwrap();
        let mut near: Near = soon(listener.accept()).await.unwrap().welcome().await.unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut stream, &bytes).await.unwrap();
        assert_eq!(soon(near.recv()).await.unwrap_err().kind(), kind);
        assert_eq!(soon(near.recv()).await.unwrap_err().kind(), kind, "and the same again");
        assert_eq!(near.try_send(&Command::Release).unwrap_err().kind(), kind);
    }
}

#[tokio::test]
async fn what_was_queued_before_a_close_arrives_before_the_end() {
    let (near, mut far, _listener, _folder) = pair(small()).await;
    for seq in 0..4 {
        near.try_send(&Command::Ack { seq }).unwrap();
    }
    drop(near);
    for wanted in 0..4 {
        assert!(matches!(soon(far.recv()).await.unwrap(), Command::Ack { seq } if seq == wanted));
    }
    let error = soon(far.recv()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert!(error.to_string().contains("the peer closed the connection"), "{error}");
    let (sender, _receiver) = far.split();
    soon(sender.closed()).await;
    assert_eq!(sender.send(&chunk(1, 1)).await.unwrap_err().kind(), ErrorKind::Closed);
    soon(sender.finished()).await;
}

#[tokio::test]
async fn a_close_does_not_wait_longer_than_the_linger_for_a_peer_that_reads_nothing() {
    let (near, far, _listener, _folder) = pair(small()).await;
    let (sender, _receiver) = far.split();
    let mut queued = 0;
    while sender.try_send(&chunk(0, 1_000_000)).is_ok() || queued < 50 {
        queued += 1;
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert!(queued < 1000);
    }
    let started = Instant::now();
    sender.close("enough");
    soon(sender.finished()).await;
    assert!(started.elapsed() < SOON / 2, "{:?}", started.elapsed());
    assert_eq!(sender.close_reason().as_deref(), Some("enough"));
    drop(near);
}

#[tokio::test]
async fn nobody_there_and_no_answer_are_told_apart() {
    let (_folder, address) = address();
    let (ours, limits, wait) = (ours(), Limits::default(), Duration::from_millis(200));
    let dial = || channel::connect::<Report, Command>(&address, agent("a"), &ours, &limits, wait);
    assert_eq!(dial().await.unwrap_err().kind(), ErrorKind::Closed);
    let Address::Unix(path) = &address else { panic!("a unix address") };
    let _mute = tokio::net::UnixListener::bind(path).unwrap();
    let error = dial().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(error.to_string().contains("within 200ms"), "{error}");
}

#[tokio::test]
async fn an_empty_token_opens_no_listener() {
    let (_folder, address) = address();
    let bound = Listener::bind(&address, Credentials::new("run-1", ""), Limits::default()).await;
    assert_eq!(bound.unwrap_err().kind(), ErrorKind::InvalidInput);
}

#[tokio::test]
async fn what_waits_in_a_server_is_bounded_by_bytes() {
    let (_folder, address) = address();
    let limits = Limits { queue: 10_000, queue_bytes: 1_000_000, ..small() };
    let mut server: Server<Command, Report> =
        Server::start(&address, ours(), limits, |_| Ok(()), || {}).await.unwrap();
    let far: Far = channel::connect(&address, agent("a"), &ours(), &limits, SOON).await.unwrap();
    let mut sent = 0;
    while timeout(Duration::from_millis(300), far.send(&chunk(sent, 100_000))).await.is_ok() {
        sent += 1;
        assert!(sent < 100, "no bound");
    }
    assert!(matches!(soon(server.next()).await, Some((_, ServerEvent::Opened { .. }))));
    for wanted in 0..sent {
        let (_, event) = soon(server.next()).await.unwrap();
        assert!(matches!(event, ServerEvent::Message(Report::LogChunk { request, .. }) if request == wanted));
    }
}

#[tokio::test]
async fn a_server_keeps_many_connections_and_tells_each_life_in_order() {
    let (_folder, address) = address();
    let woken = Arc::new(AtomicUsize::new(0));
    let wake = Arc::clone(&woken);
    let ready = move || {
        wake.fetch_add(1, Ordering::SeqCst);
    };
    let admit = |pending: &channel::Pending| match pending.peer() {
        Peer::Agent { host, .. } if host == "unwanted" => Err("not you".to_owned()),
        _ => Ok(()),
    };
    let mut server: Server<Command, Report> =
        Server::start(&address, ours(), small(), admit, ready).await.unwrap();

    let unwanted =
        channel::connect::<Report, Command>(&address, agent("unwanted"), &ours(), &small(), SOON).await;
    assert!(unwanted.unwrap_err().to_string().ends_with("not you"));

    let mut far: Vec<Far> = Vec::new();
    for host in ["a", "b", "c"] {
        far.push(channel::connect(&address, agent(host), &ours(), &small(), SOON).await.unwrap());
    }
    let mut ids = std::collections::BTreeMap::new();
    for _ in 0..3 {
        let (id, event) = soon(server.next()).await.unwrap();
        let ServerEvent::Opened { peer: Peer::Agent { host, .. }, certificate: None } = event else {
            panic!("opened first")
        };
        ids.insert(host, id);
    }
    server.send(ids["b"], &Command::Ack { seq: 5 }).unwrap();
    assert!(matches!(soon(far[1].recv()).await.unwrap(), Command::Ack { seq: 5 }));
    far[2].send(&chunk(3, 3)).await.unwrap();
    let (id, event) = soon(server.next()).await.unwrap();
    assert!(id == ids["c"] && matches!(event, ServerEvent::Message(Report::LogChunk { request: 3, .. })));
    assert!(woken.load(Ordering::SeqCst) >= 4);

    drop(far.remove(0));
    let (id, event) = soon(server.next()).await.unwrap();
    assert!(id == ids["a"] && matches!(event, ServerEvent::Closed(why) if why.contains("the peer closed")));
    assert_eq!(server.send(ids["a"], &Command::Release).unwrap_err().kind(), ErrorKind::Closed);

    // What was queued before the close still arrives.
    server.send(ids["b"], &Command::Release).unwrap();
    soon(server.close()).await;
    assert!(matches!(soon(far[0].recv()).await.unwrap(), Command::Release));
    assert_eq!(soon(far[0].recv()).await.unwrap_err().kind(), ErrorKind::Closed);
    assert!(server.next().await.is_none());
}
