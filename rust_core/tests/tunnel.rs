//! The tunnel: real hosts' ends, a real relay and real ranks (processes of their own), all on loopback.

#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, reason = "a test")]

#[path = "tunnel/rank.rs"]
mod rank;
#[path = "tunnel/scene.rs"]
mod scene;

use std::time::{Duration, Instant};

use sky_monarch_core::ErrorKind;
use sky_monarch_core::agent::probe::Probe;
use sky_monarch_core::protocol::ProbeTarget;
use sky_monarch_core::tunnel::{Limits, address_of};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use rank::Rank;
use scene::{RUN, SOON, Scene, pattern, there_and_back};

/// Shorter than any limit that would end the same wait, and long for a machine that does other things, too.
const AT_ONCE: Duration = Duration::from_secs(6);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_go_both_ways_and_each_way_ends_by_itself() {
    let scene = Scene::open(Limits::default()).await;
    let rank = Rank::start("echo", "127.64.0.3", RUN);
    let mut stream = scene.hosts[0].open(rank.at()).await.unwrap().joined();
    let sent = pattern(3 << 20);
    assert_eq!(there_and_back(&mut stream, &sent).await, sent);
    // Our way has ended, theirs had not: what came last came after it.
    assert_eq!(scene.relay.total(), 2 * sent.len() as u64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_death_of_a_rank_reaches_its_peer_at_once() {
    let scene = Scene::open(Limits::default()).await;
    let mut rank = Rank::start("echo", "127.64.0.3", RUN);
    let mut stream = scene.hosts[0].open(rank.at()).await.unwrap().joined();
    stream.write_all(b"hello").await.unwrap();
    stream.flush().await.unwrap();
    stream.read_exact(&mut [0; 5]).await.unwrap();
    let killed = Instant::now();
    rank.kill();
    let end = timeout(SOON, stream.read(&mut [0; 16])).await.unwrap();
    assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
    assert!(killed.elapsed() < AT_ONCE, "{:?}", killed.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_arrives_as_a_reset_and_not_as_an_end() {
    let scene = Scene::open(Limits::default()).await;
    // That rank aborts each connection at its first byte.
    let rank = Rank::start("abort", "127.64.0.3", RUN);
    let mut stream = scene.hosts[0].open(rank.at()).await.unwrap().joined();
    stream.write_all(b"x").await.unwrap();
    stream.flush().await.unwrap();
    let end = timeout(SOON, stream.read(&mut [0; 16])).await.unwrap();
    assert!(end.is_err(), "an end in order would be taken for a whole answer: {end:?}");

    // The other way: who hangs up without a word is told of as a reset there.
    let mut rank = Rank::start("tell", "127.64.0.3", RUN);
    let mut stream = scene.hosts[0].open(rank.at()).await.unwrap().joined();
    stream.write_all(b"x").await.unwrap();
    stream.flush().await.unwrap();
    assert_eq!(rank.line(), "1 bytes");
    drop(stream);
    assert_eq!(rank.line(), "reset");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_does_not_read_holds_up_nobody_but_who_writes_to_it() {
    let scene = Scene::open(Limits::default()).await;
    let (deaf, rank) = (Rank::start("deaf", "127.64.0.3", RUN), Rank::start("echo", "127.64.0.3", RUN));
    let mut slow = scene.hosts[0].open(deaf.at()).await.unwrap().joined();
    let piece = pattern(1 << 20);
    let mut taken = 0;
    while timeout(Duration::from_millis(300), slow.write_all(&piece)).await.is_ok() {
        taken += piece.len();
        assert!(taken < 256 << 20, "nothing bounds what waits for it");
    }
    // The same two hosts, the same line and the same relay: a stream and a wish for a stream pass it by.
    let mut stream = scene.hosts[0].open(rank.at()).await.unwrap().joined();
    assert_eq!(there_and_back(&mut stream, &piece).await, piece);
    println!("{} MiB waited for who did not read", taken >> 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_reached_but_where_a_process_of_the_run_listens_for_others() {
    let scene = Scene::open(Limits::default()).await;
    let (private, stranger) =
        (Rank::start("echo", "127.0.0.1", RUN), Rank::start("echo", "127.64.0.3", "another"));
    let open_to_all = Rank::start("echo", "0.0.0.0", RUN);
    let h1 = address_of("job-h1").unwrap();
    for (port, words) in
        [(private.port, "nobody listens"), (stranger.port, "no process of this run"), (1, "nobody listens")]
    {
        let refused = scene.hosts[0].open(std::net::SocketAddrV4::new(h1, port)).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Refused, "{refused}");
        assert!(refused.message().contains(words), "{refused}");
    }
    let mut stream =
        scene.hosts[0].open(std::net::SocketAddrV4::new(h1, open_to_all.port)).await.unwrap().joined();
    assert_eq!(there_and_back(&mut stream, b"all").await, b"all");

    for (elsewhere, words) in [
        ("127.64.0.9:80", "has no line"), // a host that never came
        ("127.0.0.1:22", "has no line"),  // the head's own services are no host's
        ("10.0.0.1:80", "has no line"),
        ("127.64.0.1:1", "nobody listens"), // the head has stores there, and else nothing
    ] {
        let refused = scene.hosts[0].open(elsewhere.parse().unwrap()).await.unwrap_err();
        assert!(refused.message().contains(words), "{elsewhere}: {refused}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_heads_own_stores_are_reached_as_a_hosts_ranks_are() {
    let scene = Scene::open(Limits::default()).await;
    let store = Rank::start("echo", "127.64.0.1", RUN);
    let mut stream = scene.hosts[1].open(store.at()).await.unwrap().joined();
    assert_eq!(there_and_back(&mut stream, b"a key").await, b"a key");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_are_counted_and_the_last_one_too_many_is_refused_with_the_number() {
    let scene = Scene::open(Limits { streams: 2, ..Limits::default() }).await;
    let rank = Rank::start("echo", "127.64.0.3", RUN);
    let first = scene.hosts[0].open(rank.at()).await.unwrap();
    let _second = scene.hosts[0].open(rank.at()).await.unwrap();
    let refused = scene.hosts[0].open(rank.at()).await.unwrap_err();
    assert!(refused.message().contains("too many streams (2"), "{refused}");
    // Another host's are its own, as far as the taker has room.
    let refused = scene.hosts[2].open(rank.at()).await.unwrap_err();
    assert!(refused.message().contains("2 streams are open there"), "{refused}");
    drop(first);
    let began = Instant::now();
    while scene.hosts[0].open(rank.at()).await.is_err() {
        assert!(began.elapsed() < SOON, "a place that is free again stays taken");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_newest_attempt_at_a_host_of_this_run_is_let_in() {
    let scene = Scene::open(Limits::default()).await;
    let rank = Rank::start("echo", "127.64.0.3", RUN);
    scene.hosts[0].open(rank.at()).await.unwrap();

    let posing = scene.host("job-h0", 1, "job-h2-a1").unwrap();
    let refused = posing.open(rank.at()).await.unwrap_err();
    assert!(refused.message().contains("does not speak for job-h0-a1"), "{refused}");
    let other = scene.stranger("job-h5").open(rank.at()).await.unwrap_err();
    assert!(matches!(other.kind(), ErrorKind::Refused | ErrorKind::Closed), "{other}");

    // The host was lost, and is there again: what is left of the old attempt gets nothing any more.
    let again = scene.host("job-h0", 2, "job-h0-a2").unwrap();
    again.open(rank.at()).await.unwrap();
    let refused = scene.hosts[0].open(rank.at()).await.unwrap_err();
    assert!(refused.message().contains("attempt 2 has the place of job-h0"), "{refused}");

    let misplaced = scene.misplaced("job-h6", "127.64.0.3".parse().unwrap()).unwrap_err();
    assert!(misplaced.to_string().contains("know host job-h6 as 127.64.0.8"), "{misplaced}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_say_nothing_keep_no_host_out() {
    let patience = Duration::from_secs(40);
    let scene = Scene::open(Limits { handshake: patience, ..Limits::default() }).await;
    let rank = Rank::start("echo", "127.64.0.3", RUN);
    let mut stream = scene.hosts[0].open(rank.at()).await.unwrap().joined();
    assert_eq!(there_and_back(&mut stream, b"before").await, b"before");
    // From here on: more than the backlog holds, they themselves wait where nobody is sent away.
    let began = Instant::now();
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(tokio::net::TcpStream::connect(scene.listening()).await.unwrap());
    }
    let mut stream = scene.hosts[0].open(rank.at()).await.unwrap().joined();
    assert_eq!(there_and_back(&mut stream, b"after").await, b"after");
    assert!(began.elapsed() < patience / 2, "{:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_that_was_started_anew_is_found_again() {
    let mut scene = Scene::open(Limits::default()).await;
    let rank = Rank::start("echo", "127.64.0.3", RUN);
    let mut stream = scene.hosts[0].open(rank.at()).await.unwrap().joined();
    stream.write_all(b"x").await.unwrap();
    scene.restart().await;
    let end = timeout(SOON, async {
        // What was under way comes first.
        while let Ok(1..) = stream.read(&mut [0; 16]).await {}
    });
    end.await.expect("who was in a stream learns of it");
    // It waits for the other host's line, which is a moment away.
    let began = Instant::now();
    let mut stream = loop {
        match scene.hosts[0].open(rank.at()).await {
            Ok(ends) => break ends.joined(),
            Err(error) => assert!(began.elapsed() < SOON, "{error}"),
        }
    };
    assert_eq!(there_and_back(&mut stream, b"again").await, b"again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mirror_is_there_while_a_rank_keeps_it_and_resets_where_nobody_listens() {
    let scene = Scene::open(Limits { mirrors: 2, ..Limits::default() }).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tunnel.sock");
    scene.hosts[0].serve(&format!("unix:{}", path.display()).parse().unwrap()).await.unwrap();
    // Of this kernel all hosts are one: what is free now leads to a host where nobody listens.
    // Bound at the same time, or one might be the other.
    let bound = [(); 3].map(|()| std::net::TcpListener::bind("127.64.0.4:0").unwrap());
    let [one, two, three] = bound.map(|free| free.local_addr().unwrap());
    let own: std::net::SocketAddr = "127.64.0.2:9".parse().unwrap();

    let mut rank = AskedRank::dial(&path).await;
    assert_eq!(rank.ask("mesh", &[one, own]).await, None);
    assert_eq!(rank.ask("store", &[two]).await, None);
    let mut near = tokio::net::TcpStream::connect(one).await.unwrap();
    let began = Instant::now();
    let end = timeout(SOON, near.read(&mut [0; 1])).await.unwrap();
    assert_eq!(end.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());

    let refused = rank.ask("donors", &[three]).await.unwrap();
    assert!(refused.contains("2 addresses of other hosts are in use"), "{refused}");
    // What it kept under that name goes, and so does all with its connection.
    assert_eq!(rank.ask("mesh", &[]).await, None);
    gone(one).await;
    assert_eq!(rank.ask("donors", &[three]).await, None);
    assert!(rank.say("{\"keep\": 1}\n").await.unwrap().contains("invalid type"));
    drop(rank);
    gone(two).await;
    gone(three).await;
}

async fn gone(address: std::net::SocketAddr) {
    let began = Instant::now();
    while tokio::net::TcpStream::connect(address).await.is_ok() {
        assert!(began.elapsed() < SOON, "{address} still leads somewhere");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A rank's line to its agent.
struct AskedRank(tokio::io::BufReader<tokio::net::UnixStream>);

impl AskedRank {
    async fn dial(path: &std::path::Path) -> Self {
        Self(tokio::io::BufReader::new(tokio::net::UnixStream::connect(path).await.unwrap()))
    }

    async fn ask(&mut self, keep: &str, reach: &[std::net::SocketAddr]) -> Option<String> {
        self.say(&format!("{}\n", serde_json::json!({"keep": keep, "reach": reach}))).await
    }

    /// The error that it is told.
    async fn say(&mut self, line: &str) -> Option<String> {
        self.0.get_mut().write_all(line.as_bytes()).await.unwrap();
        let mut answer = String::new();
        timeout(SOON, self.0.read_line(&mut answer)).await.unwrap().unwrap();
        let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
        answer["error"].as_str().map(str::to_owned)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pair_test_goes_the_way_that_ranks_go() {
    const AGAIN: &str = "the_pair_test_goes_the_way_that_ranks_go";
    if std::env::var("SKY_MONARCH_RUN_ID").as_deref() != Ok(RUN) {
        // Agents are processes of the run, too: what they were started with says so.
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        let done = again.args(["--exact", AGAIN]).env("SKY_MONARCH_RUN_ID", RUN).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
        return;
    }
    let scene = Scene::open(Limits::default()).await;
    let probe = async |host: &str| {
        let identity = scene.identity(&format!("{host}-a1"));
        Probe::open(host, address_of(host).unwrap().into(), &identity).await.unwrap()
    };
    let (one, other) = (probe("job-h0").await, probe("job-h1").await);
    let target = |host: &str, attempt: u32, address: std::net::SocketAddr| ProbeTarget {
        host: host.into(),
        attempt,
        address: address.to_string(),
    };
    let absent: std::net::SocketAddr = "127.64.0.9:9".parse().unwrap();
    let targets = vec![
        target("job-h1", 1, other.port()),
        target("job-h1", 2, other.port()),
        target("job-h7", 1, absent),
    ];
    let asking = std::sync::Arc::new(one.through(Some(scene.hosts[0].clone())));
    let reached = asking.reach(targets, 10.0).await;
    assert!(reached[0].ok && reached[0].rtt_s.is_some(), "{:?}", reached[0]);
    for (reached, words) in reached[1..].iter().zip(["is not job-h1-a2", "127.64.0.9 has no line"]) {
        let error = reached.error.as_deref().unwrap();
        assert!(
            error.starts_with("job-h0 (127.64.0.2) cannot reach job-h") && error.contains(words),
            "{error}"
        );
    }
    assert!(scene.relay.total() > 64 << 10, "32 KiB there and back, through the relay");
}

/// No bound: what is told is a figure for the docs, the best of three.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn how_fast_it_is_beside_loopback_itself() {
    let scene = Scene::open(Limits::default()).await;
    let rank = Rank::start("echo", "127.64.0.3", RUN);
    let sent = pattern(8 << 20);
    let mut best_s = [f64::INFINITY; 2];
    for _ in 0..3 {
        let began = Instant::now();
        let mut direct = tokio::net::TcpStream::connect(rank.at()).await.unwrap();
        assert_eq!(there_and_back(&mut direct, &sent).await.len(), sent.len());
        best_s[0] = best_s[0].min(began.elapsed().as_secs_f64());
        let began = Instant::now();
        let mut stream = scene.hosts[0].open(rank.at()).await.unwrap().joined();
        assert_eq!(there_and_back(&mut stream, &sent).await.len(), sent.len());
        best_s[1] = best_s[1].min(began.elapsed().as_secs_f64());
    }
    let [direct_s, tunnel_s] = best_s;
    let mib = (2 * sent.len()) as f64 / f64::from(1 << 20);
    println!(
        "there and back: loopback {:.0} MiB/s, tunnel {:.0} MiB/s, ratio {:.2}",
        mib / direct_s,
        mib / tunnel_s,
        direct_s / tunnel_s
    );
}

/// With a step left out the test that is about it turns red.
#[cfg(feature = "mutants")]
#[test]
fn each_defect_turns_its_test_red() {
    for (point, test) in [
        ("tunnel_any_port", "nothing_is_reached_but_where_a_process_of_the_run_listens_for_others"),
        ("tunnel_ends_resets", "a_reset_arrives_as_a_reset_and_not_as_an_end"),
        ("tunnel_old_attempts", "only_the_newest_attempt_at_a_host_of_this_run_is_let_in"),
        ("tunnel_one_line", "a_relay_that_was_started_anew_is_found_again"),
        ("tunnel_patient_strangers", "connections_that_say_nothing_keep_no_host_out"),
    ] {
        let run = |defect: &str| {
            let mut test_again = std::process::Command::new(std::env::current_exe().unwrap());
            test_again.args(["--exact", test]).env("SKY_MONARCH_MUTANT", defect).output().unwrap()
        };
        assert!(run("none").status.success(), "{test} fails anyway");
        let red = run(point);
        let said = String::from_utf8_lossy(&red.stdout).into_owned();
        assert!(!red.status.success() && said.contains("1 failed"), "{point} survives {test}: {said}");
    }
}
