//! Nodes on several hosts: their gateways over TLS on loopback, and strangers that dial them.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sky_monarch_core::ErrorKind;
use sky_monarch_core::mesh::{
    Delivery, Event, Gateway, GatewayOptions, Mailbox, Node, NodeOptions, Outcome, Payload, Target, VALUE,
};
use sky_monarch_core::wire::Address;
use sky_monarch_core::wire::tls::{Authority, Identity};
use tokio::runtime::Runtime;

const LIMIT: Option<Duration> = Some(Duration::from_secs(20));
const SOON: Duration = Duration::from_secs(20);
/// Longer than anything here takes: who waits for room is to get it.
const SEND_LIMIT: Duration = Duration::from_secs(60);

/// A folder of sockets and what serves it: a host, as far as the core is concerned.
struct Host {
    folder: tempfile::TempDir,
    gateway: Gateway,
}

impl Host {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn name(&self) -> String {
        self.folder.path().to_string_lossy().into_owned()
    }

    fn node(&self, name: &str) -> Node {
        let address = self.path(name);
        let listener = OwnedFd::from(UnixListener::bind(&address).expect("a socket"));
        let options = NodeOptions { address, token: self.name(), send_limit: SEND_LIMIT };
        Node::new(options, listener).expect("a node")
    }

    fn address(&self) -> Address {
        self.gateway.address().expect("it listens").clone()
    }
}

struct World {
    runtime: Runtime,
    authority: Authority,
}

impl World {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let authority = Authority::new("actors", Duration::from_secs(3600)).expect("an authority");
        Self { runtime: runtime.expect("a runtime"), authority }
    }

    fn identity(&self, name: &str) -> Identity {
        self.authority.issue(name).expect("a certificate")
    }

    fn host(&self, label: &str, hub: bool, version: &str) -> Host {
        let folder = tempfile::tempdir().expect("a folder");
        let options = GatewayOptions {
            folder: folder.path().to_owned(),
            token: folder.path().to_string_lossy().into_owned(),
            host: label.to_owned(),
            version: version.to_owned(),
            identity: self.identity(if hub { "actor-client" } else { "actor-host" }),
            hub,
        };
        let at = "tls:127.0.0.1:0".parse().expect("an address");
        let gateway = self.runtime.block_on(Gateway::start(options, Some(&at))).expect("a gateway");
        Host { folder, gateway }
    }

    fn attach(&self, client: &Host, host: &Host) {
        let address = host.address();
        let dialled = client.gateway.dial(&address, "actor-host", SOON);
        assert_eq!(self.runtime.block_on(dialled).expect("attached").0, host.name());
    }

    fn pair(&self) -> (Host, Host) {
        let (client, host) = (self.host("here", true, "1"), self.host("there", false, "1"));
        self.attach(&client, &host);
        (client, host)
    }

    fn lost(&self, host: &Host) -> String {
        loop {
            match self.runtime.block_on(host.gateway.event(SOON)).expect("an event") {
                Event::Lost { reason, .. } => return reason,
                Event::Joined { .. } => {}
            }
        }
    }
}

fn to(nodes: &[&Node]) -> Vec<Target> {
    let target = |node: &&Node| Target { address: node.address().to_owned(), place: String::new() };
    nodes.iter().map(target).collect()
}

fn body(bytes: &[u8]) -> Payload {
    Payload::from_parts([bytes].into_iter()).expect("a payload")
}

/// Answers each call with its body and one letter, until the mailbox closes.
fn echo(mailbox: Arc<Mailbox>, letter: u8) -> std::thread::JoinHandle<Vec<Vec<u8>>> {
    std::thread::spawn(move || {
        let mut heard = Vec::new();
        while !mailbox.is_closed() {
            mailbox.wait(LIMIT, true);
            for delivery in mailbox.take(64) {
                let Delivery::Call(request) = delivery else { continue };
                let mut bytes = request.blobs()[0].bytes().cloned().unwrap_or_default().to_vec();
                heard.push(bytes.clone());
                bytes.push(letter);
                drop(request.reply(VALUE, &body(&bytes)));
            }
        }
        heard
    })
}

#[test]
fn a_cast_reaches_all_of_another_host_in_the_order_of_its_sender_and_is_answered_by_all() {
    let world = World::new();
    let (client, host) = world.pair();
    let (caller, b, c) = (client.node("client"), host.node("b"), host.node("c"));
    let serving = [echo(b.mailbox(7).expect("b"), b'b'), echo(c.mailbox(7).expect("c"), b'c')];
    for round in 0..200_u32 {
        let number = round.to_le_bytes();
        assert!(caller.send(&to(&[&b]), 7, "alone", &body(&number)).expect("sent").is_empty());
        let each = round % 2 == 0;
        let gather = caller.call(&to(&[&b, &c]), 7, "both", &body(&number), each).expect("sent");
        let mut answers = HashMap::new();
        while answers.len() < 2 {
            assert!(gather.wait(LIMIT), "they answer");
            for answer in gather.take() {
                let Outcome::Answer { kind: VALUE, blobs } = answer.outcome else { panic!("{answer:?}") };
                answers.insert(answer.slot, blobs[0].bytes().expect("small").to_vec());
            }
        }
        assert_eq!(answers[&0], [&number[..], b"b"].concat());
        assert_eq!(answers[&1], [&number[..], b"c"].concat());
    }
    assert_eq!(caller.open_calls(), 0);
    assert_eq!(client.gateway.sessions(), 1, "one connection, whatever the number of processes there");
    drop((caller, b, c));
    let [heard_b, heard_c] = serving.map(|thread| thread.join().expect("it ends"));
    let wanted = |times| (0..200_u32).flat_map(move |n| std::iter::repeat_n(n.to_le_bytes().to_vec(), times));
    assert_eq!(heard_b, wanted(2).collect::<Vec<_>>(), "casts and single messages in their order");
    assert_eq!(heard_c, wanted(1).collect::<Vec<_>>());
}

#[test]
fn a_large_part_arrives_in_memory_of_its_own_and_comes_back() {
    let world = World::new();
    let (client, host) = world.pair();
    let (caller, b) = (client.node("client"), host.node("b"));
    let mailbox = b.mailbox(1).expect("a mailbox");
    let serving = std::thread::spawn(move || {
        assert!(mailbox.wait(LIMIT, true));
        let Some(Delivery::Call(request)) = mailbox.take(1).pop() else { panic!("a call") };
        let blob = &request.blobs()[1];
        assert!(blob.is_shared());
        // SAFETY: the blob keeps its memory mapped for as long as it lives.
        let seen = unsafe { std::slice::from_raw_parts(blob.as_ptr(), blob.len()) };
        request.reply(VALUE, &body(seen)).expect("an answer");
    });
    // More than the window of a session, and no multiple of anything.
    let large: Vec<u8> = (0..(9 << 20) + 13).map(|n: u32| (n % 251) as u8).collect();
    let payload = Payload::from_parts([&b"small"[..], &large].into_iter()).expect("a payload");
    let gather = caller.call(&to(&[&b]), 1, "large", &payload, false).expect("sent");
    assert!(gather.wait(LIMIT));
    let answer = gather.take().remove(0);
    let Outcome::Answer { kind: VALUE, blobs } = &answer.outcome else { panic!("{answer:?}") };
    // SAFETY: as above.
    assert!(unsafe { std::slice::from_raw_parts(blobs[0].as_ptr(), blobs[0].len()) } == large);
    serving.join().expect("it ends");
}

#[test]
fn a_receiver_that_does_not_keep_up_slows_its_senders_and_nobody_else_and_loses_nothing() {
    let world = World::new();
    let (client, host) = world.pair();
    let (flood, other) = (client.node("flood"), client.node("other"));
    let b = host.node("b");
    let slow = b.mailbox(1).expect("slow");
    let quick = echo(b.mailbox(2).expect("quick"), b'!');
    let many = 30_000_u32;
    let all_sent = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..many {
                let mut bytes = vec![0_u8; 1024];
                bytes[..4].copy_from_slice(&number.to_le_bytes());
                assert!(flood.send(&to(&[&b]), 1, "flood", &body(&bytes)).expect("sent").is_empty());
            }
            all_sent.store(true, Ordering::SeqCst);
        });
        let started = Instant::now();
        for _ in 0..50 {
            let gather = other.call(&to(&[&b]), 2, "echo", &body(b"quick"), false).expect("sent");
            assert!(gather.wait(LIMIT), "others are served meanwhile");
            assert!(matches!(gather.take()[0].outcome, Outcome::Answer { kind: VALUE, .. }));
        }
        assert!(started.elapsed() < SEND_LIMIT / 2);
        assert!(
            !all_sent.load(Ordering::SeqCst),
            "more than the queues between them hold waits at the sender"
        );
        let mut expected = 0;
        while expected < many {
            assert!(slow.wait(LIMIT, true), "all of it arrives: {expected}");
            for delivery in slow.take(64) {
                let Delivery::Call(request) = delivery else { continue };
                assert_eq!(
                    request.blobs()[0].bytes().expect("small")[..4],
                    expected.to_le_bytes(),
                    "in order"
                );
                expected += 1;
            }
        }
    });
    drop((flood, other, b));
    assert_eq!(quick.join().expect("it ends").len(), 50);
}

#[test]
fn the_end_of_a_process_and_of_a_host_fail_what_they_owe_and_say_why() {
    let world = World::new();
    let (client, host) = world.pair();
    let (caller, b, c) = (client.node("client"), host.node("b"), host.node("c"));
    let waiting = |node: &Node| node.mailbox(1).expect("a mailbox").wait(LIMIT, true);
    let pending = caller.call(&to(&[&b, &c]), 1, "never", &body(b"x"), true).expect("sent");
    assert!(waiting(&b) && waiting(&c));
    host.gateway.hang_up("b");
    assert!(pending.wait(LIMIT));
    let answers = pending.take();
    assert!(answers.len() == 1 && answers[0].slot == 0, "the other one lives: {answers:?}");
    assert!(matches!(answers[0].outcome, Outcome::Dead { .. }), "{answers:?}");

    let nobody = vec![Target { address: format!("{}/nobody", host.name()), place: String::new() }];
    let refused = caller.call(&nobody, 1, "x", &body(b"x"), false).expect("sent");
    assert!(refused.wait(LIMIT));
    let Outcome::Dead { reason } = &refused.take()[0].outcome else { panic!("nobody is there") };
    assert!(reason.contains("nobody answers at"), "{reason}");

    host.gateway.close();
    assert!(pending.wait(LIMIT));
    let Outcome::Dead { reason } = &pending.take()[0].outcome else { panic!("its host is gone") };
    assert!(reason.contains("there is lost"), "{reason}");
    assert!(world.lost(&client).contains("there is lost"));
    let later = caller.call(&to(&[&c]), 1, "x", &body(b"x"), false).expect("sent");
    assert!(later.wait(LIMIT));
    let Outcome::Dead { reason } = &later.take()[0].outcome else { panic!("it stays gone") };
    assert!(reason.contains("there is lost"), "{reason}");
}

#[test]
fn hosts_that_do_not_reach_each_other_talk_through_the_hub() {
    for direct in [true, false] {
        let world = World::new();
        let client = world.host("here", true, "1");
        let (left, right) = (world.host("left", false, "1"), world.host("right", false, "1"));
        world.attach(&client, &left);
        world.attach(&client, &right);
        for (host, other) in [(&left, &right), (&right, &left)] {
            host.gateway.route(&other.name(), direct.then(|| other.address()), &client.name());
        }
        let (a, b) = (left.node("a"), right.node("b"));
        let serving = echo(b.mailbox(1).expect("b"), b'b');
        let gather = a.call(&to(&[&b]), 1, "echo", &body(b"far"), false).expect("sent");
        assert!(gather.wait(LIMIT));
        assert!(matches!(gather.take()[0].outcome, Outcome::Answer { kind: VALUE, .. }));
        // What the hub has lost is lost to all, whichever way they have.
        let pending = a.call(&to(&[&b]), 9, "never", &body(b"x"), false).expect("sent");
        client.gateway.drop_host(&right.name(), "a test says so");
        assert!(pending.wait(LIMIT));
        let Outcome::Dead { reason } = &pending.take()[0].outcome else { panic!("it is lost") };
        assert!(reason.contains("right is lost: a test says so"), "{direct}: {reason}");
        drop((a, b));
        assert_eq!(serving.join().expect("it ends").len(), 1);
    }
}

#[test]
fn what_is_said_to_a_lost_host_goes_to_where_each_of_its_processes_is_and_fails_with_that_alone() {
    let world = World::new();
    let client = world.host("here", true, "1");
    let (lost, first, second) =
        (world.host("lost", false, "1"), world.host("first", false, "1"), world.host("second", false, "1"));
    for host in [&lost, &first, &second] {
        world.attach(&client, host);
    }
    let folder = lost.name();
    drop(lost);
    world.lost(&client);
    let caller = client.node("client");
    let at = |name: &str| Target { address: format!("{folder}/{name}"), place: String::new() };
    client.gateway.place(&folder, &first.name());
    client.gateway.place(&format!("{folder}/c"), &second.name());
    let (b, c) = (first.node("b"), second.node("c"));
    let serving = [echo(b.mailbox(7).expect("b"), b'b'), echo(c.mailbox(7).expect("c"), b'c')];
    let both = [at("b"), at("c")];
    for round in 0..100_u32 {
        let number = round.to_le_bytes();
        let sent = &number[..];
        assert!(caller.send(&both[1..], 7, "alone", &body(sent)).expect("sent").is_empty());
        let gather = caller.call(&both, 7, "both", &body(sent), false).expect("sent");
        assert!(gather.wait(LIMIT), "they answer");
        let mut answers: Vec<_> =
            gather.take().into_iter().map(|answer| (answer.slot, bytes_of(&answer.outcome))).collect();
        answers.sort();
        for (answer, (slot, letter)) in answers.iter().zip([(0, b'b'), (1, b'c')]) {
            assert_eq!((answer.0, answer.1.as_slice()), (slot, [sent, &[letter]].concat().as_slice()));
        }
    }
    // What one of them owes fails with it, and nothing that the other one owes.
    let silent = [b.mailbox(8).expect("b"), c.mailbox(8).expect("c")];
    let whole = caller.call(&both, 8, "both", &body(b"?"), true).expect("sent");
    assert!(silent.iter().all(|mailbox| mailbox.wait(LIMIT, true)));
    let name = second.name();
    drop(second);
    assert!(whole.wait(LIMIT));
    let failed = whole.take();
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert!(
        matches!(&failed[0].outcome, Outcome::Dead { reason } if failed[0].slot == 1 && reason.contains("second")),
        "{failed:?}"
    );
    for delivery in silent[0].take(4) {
        let Delivery::Call(request) = delivery else { continue };
        request.reply(VALUE, &body(b"here")).expect("answered");
    }
    assert!(whole.wait(LIMIT));
    assert_eq!(bytes_of(&whole.take()[0].outcome), b"here");
    // A message without an answer is told of once; and once it has another place, all of it works again.
    caller.send(&both[1..], 7, "alone", &body(b"lost")).expect("sent");
    let end = Instant::now() + SOON;
    while caller.send(&both[1..], 7, "alone", &body(b"lost")).expect("sent").is_empty() {
        assert!(Instant::now() < end, "it is told of");
    }
    client.gateway.place(&name, &first.name());
    let again = first.node("c");
    let answering = echo(again.mailbox(7).expect("c"), b'C');
    let gather = caller.call(&both, 7, "both", &body(b"again"), false).expect("sent");
    assert!(gather.wait(LIMIT));
    let mut answers: Vec<_> = gather.take().into_iter().map(|answer| bytes_of(&answer.outcome)).collect();
    answers.sort();
    assert_eq!(answers, [b"againC".to_vec(), b"againb".to_vec()]);
    for node in [&b, &c, &again] {
        node.close();
    }
    let heard = serving.map(|one| one.join().expect("it ends"));
    assert_eq!(heard[1].len(), 200);
    drop(answering.join());
}

fn bytes_of(outcome: &Outcome) -> Vec<u8> {
    let Outcome::Answer { kind: VALUE, blobs } = outcome else { panic!("{outcome:?}") };
    blobs[0].bytes().expect("small").to_vec()
}

#[test]
fn strangers_are_refused_before_a_byte_of_them_is_decoded() {
    let (world, elsewhere) = (World::new(), World::new());
    let host = world.host("there", false, "1");
    let stranger = elsewhere.host("stranger", true, "1");
    let refused = elsewhere.runtime.block_on(stranger.gateway.dial(&host.address(), "actor-host", SOON));
    assert_eq!(refused.expect_err("another authority").kind(), ErrorKind::Refused);
    // A host's certificate is not a program's.
    let other = world.host("other", false, "1");
    let refused = world.runtime.block_on(other.gateway.dial(&host.address(), "actor-client", SOON));
    assert_eq!(refused.expect_err("it is a host").kind(), ErrorKind::Refused);

    let Address::Tls { host: at, port } = host.address() else { panic!("it listens on TCP") };
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &u32::MAX.to_le_bytes(), &[0x80, 4, 0x95, 0, 0, 0, 0, 1]] {
        let mut raw = TcpStream::connect((at.as_str(), port)).expect("it listens");
        raw.write_all(bytes).expect("written");
        raw.shutdown(std::net::Shutdown::Write).expect("no more comes");
        raw.set_read_timeout(Some(SOON)).expect("set");
        let mut said = Vec::new();
        // An alert of TLS at the most; a reset counts as hung up, too.
        drop(raw.read_to_end(&mut said));
        assert!(said.len() < 16, "{said:?}");
    }
    assert!(
        world.runtime.block_on(host.gateway.event(Duration::from_millis(50))).is_none(),
        "nobody came in"
    );
}

#[test]
fn a_host_serves_one_program_at_a_time() {
    let world = World::new();
    let (_client, host) = world.pair();
    let second = world.host("second", true, "1");
    let address = host.address();
    let refused = world.runtime.block_on(second.gateway.dial(&address, "actor-host", SOON));
    let error = refused.expect_err("it is taken");
    assert!(
        error.kind() == ErrorKind::Refused && error.to_string().contains("serves another program, on here")
    );
}

#[test]
fn another_version_is_refused_in_one_line_with_both_versions_on_both_sides() {
    let world = World::new();
    let (client, host) = (world.host("here", true, "0.2.0"), world.host("there", false, "0.1.0"));
    let refused = world.runtime.block_on(client.gateway.dial(&host.address(), "actor-host", SOON));
    let error = refused.expect_err("another version");
    assert_eq!(error.kind(), ErrorKind::Refused);
    let words = error.to_string();
    assert!(
        words.contains("0.2.0") && words.contains("0.1.0") && words.contains("install the same"),
        "{words}"
    );
    assert!(world.runtime.block_on(client.gateway.event(Duration::from_millis(50))).is_none());
}
