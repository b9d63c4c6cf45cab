//! Nodes of a mesh, as their processes use them: over real sockets, with real peers that misbehave.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sky_monarch_core::mesh::{
    Delivery, Gather, Mailbox, Node, NodeOptions, Outcome, Payload, SHARED_FROM, Target, VALUE,
};

const LIMIT: Option<Duration> = Some(Duration::from_secs(20));
/// Longer than anything here takes: who waits for room is to get it.
const SEND_LIMIT: Duration = Duration::from_secs(60);

fn node(folder: &Path, name: &str) -> Node {
    node_with(folder, name, "secret")
}

fn to(node: &Node) -> Vec<Target> {
    vec![Target { address: node.address().to_owned(), place: String::new() }]
}

fn body(bytes: &[u8]) -> Payload {
    Payload::from_parts([bytes].into_iter()).expect("a payload")
}

/// Answers every call with its own body until the mailbox closes; returns how many there were.
fn echo(mailbox: Arc<Mailbox>) -> std::thread::JoinHandle<usize> {
    std::thread::spawn(move || {
        let mut count = 0;
        while !mailbox.is_closed() {
            mailbox.wait(LIMIT, true);
            for delivery in mailbox.take(64) {
                if let Delivery::Call(request) = delivery {
                    let bytes = request.blobs()[0].bytes().cloned().unwrap_or_default();
                    request.reply(VALUE, &body(&bytes)).expect("an answer");
                    count += 1;
                }
            }
        }
        count
    })
}

fn bytes_of(gather: &Gather) -> Vec<u8> {
    assert!(gather.wait(LIMIT), "it answers");
    let answers = gather.take();
    let [answer] = &answers[..] else { panic!("one answer: {answers:?}") };
    let Outcome::Answer { kind: VALUE, blobs } = &answer.outcome else { panic!("{answer:?}") };
    blobs[0].bytes().expect("small").to_vec()
}

#[test]
fn mailboxes_that_are_closed_leave_their_room_to_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let a = node(folder.path(), "a");
    let kept = a.mailbox(1 << 40).expect("the first one");
    for actor in 1..70_000 {
        a.mailbox(actor).expect("there is room").close();
    }
    assert!(!kept.is_closed());
    let again = a.mailbox(1 << 40).expect("the same one");
    assert!(Arc::ptr_eq(&kept, &again), "one that is open stays");
}

#[test]
fn calls_are_answered_between_nodes_and_within_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let (a, b) = (node(folder.path(), "a"), node(folder.path(), "b"));
    let serving = [echo(b.mailbox(7).expect("b")), echo(a.mailbox(7).expect("a"))];
    for round in 0..200_u32 {
        for target in [&b, &a] {
            let gather = a.call(&to(target), 7, "echo", &body(&round.to_le_bytes()), false).expect("sent");
            assert_eq!(bytes_of(&gather), round.to_le_bytes());
        }
    }
    assert_eq!(a.open_calls(), 0, "nothing is kept of what is answered");
    drop((a, b));
    assert_eq!(serving.map(|thread| thread.join().expect("it ends")), [200, 200]);
}

#[test]
fn a_message_for_an_actor_that_nobody_has_made_is_told_to_the_process_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let (a, b) = (node(folder.path(), "a"), node(folder.path(), "b"));
    let itself = b.mailbox(0).expect("its own");
    let known = b.mailbox(7).expect("an actor");
    for (actor, place) in [(7, ""), (8, "3|gpus|4\t/by/whom"), (8, ""), (9, "")] {
        let target = Target { address: b.address().to_owned(), place: place.to_owned() };
        let gather = a.call(&[target], actor, "work", &body(b"x"), false).expect("sent");
        assert!(!gather.wait(Some(Duration::from_millis(50))), "nobody has answered");
    }
    assert!(itself.wait(LIMIT, true));
    let told: Vec<_> = itself
        .take(64)
        .into_iter()
        .filter_map(|delivery| match delivery {
            Delivery::Call(request) => Some((request.method().to_owned(), request.place().to_owned())),
            Delivery::Cancel(..) => None,
        })
        .collect();
    let stray = |place: &str| ("stray".to_owned(), place.to_owned());
    assert_eq!(told, [stray("8\t/by/whom"), stray("9")]);
    assert_eq!(known.take(64).len(), 1);
    let first = b.mailbox(8).expect("it waits").take(1).remove(0);
    assert!(
        matches!(first, Delivery::Call(request) if request.place() == "3|gpus|4"),
        "the rest is the place"
    );
}

#[test]
fn a_peer_that_does_not_know_the_secret_is_hung_up_on_before_it_is_heard() {
    let folder = tempfile::tempdir().expect("a folder");
    let a = node(folder.path(), "a");
    let stranger = node_with(folder.path(), "stranger", "guessed");
    let mailbox = a.mailbox(1).expect("a mailbox");

    let gather = stranger.call(&to(&a), 1, "attack", &body(b"x"), false).expect("sent");
    assert!(gather.wait(LIMIT));
    assert!(matches!(gather.take()[0].outcome, Outcome::Dead { .. }));
    assert!(!mailbox.wait(Some(Duration::from_millis(50)), true), "nothing has come in");

    // Bytes that are no frame, a length that nobody has, and a call without a hello.
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &u32::MAX.to_le_bytes(), &[5, 0, 0, 0, 1, 0, 0, 0, 0]] {
        let mut raw = UnixStream::connect(a.address()).expect("it listens");
        raw.write_all(bytes).expect("written");
        raw.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
        assert_eq!(raw.read(&mut [0; 8]).unwrap_or(0), 0, "hung up on");
    }
    assert!(!mailbox.wait(Some(Duration::from_millis(50)), true));
}

fn node_with(folder: &Path, name: &str, token: &str) -> Node {
    let address = folder.join(name);
    let listener = OwnedFd::from(UnixListener::bind(&address).expect("a socket"));
    let options = NodeOptions { address, token: token.to_owned(), send_limit: SEND_LIMIT };
    Node::new(options, listener).expect("a node")
}

#[test]
fn a_full_mailbox_slows_its_sender_and_nobody_else_and_loses_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let (a, b, c) = (node(folder.path(), "a"), node(folder.path(), "b"), node(folder.path(), "c"));
    let slow = b.mailbox(1).expect("slow");
    let quick = echo(b.mailbox(2).expect("quick"));
    let many = 40_000_u32;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let payload = [0_u8; 1024];
            for number in 0..many {
                let mut bytes = payload.to_vec();
                bytes[..4].copy_from_slice(&number.to_le_bytes());
                assert!(a.send(&to(&b), 1, "flood", &body(&bytes)).expect("sent").is_empty());
            }
        });
        let started = Instant::now();
        for _ in 0..100 {
            let gather = c.call(&to(&b), 2, "echo", &body(b"quick"), false).expect("sent");
            assert_eq!(bytes_of(&gather), b"quick", "others are served meanwhile");
        }
        assert!(started.elapsed() < SEND_LIMIT / 2, "nor for as long as the sender would wait");
        let mut expected = 0;
        while expected < many {
            assert!(slow.wait(LIMIT, true), "all of it arrives: {expected}");
            let taken = slow.take(64);
            assert!(taken.len() <= 1024, "bounded");
            for delivery in taken {
                let Delivery::Call(request) = delivery else { continue };
                let number = &request.blobs()[0].bytes().expect("small")[..4];
                assert_eq!(number, expected.to_le_bytes(), "in order");
                expected += 1;
            }
        }
    });
    drop((a, b, c));
    assert_eq!(quick.join().expect("it ends"), 100);
}

#[test]
fn an_answer_that_may_leave_a_moment_later_leaves_though_its_actor_works_on_and_waits_for_nothing() {
    const ROUNDS: usize = 50;
    let folder = tempfile::tempdir().expect("a folder");
    let (a, b) = (node(folder.path(), "a"), node(folder.path(), "b"));
    let mailbox = b.mailbox(1).expect("a mailbox");
    let (go_on, told) = std::sync::mpsc::channel();
    let serving = std::thread::spawn(move || {
        for _ in 0..ROUNDS {
            let mut answered = 0;
            while answered < 3 {
                mailbox.wait(LIMIT, true);
                for delivery in mailbox.take(64) {
                    let Delivery::Call(request) = delivery else { continue };
                    request.reply_soon(VALUE, &body(b"done")).expect("an answer");
                    answered += 1;
                    if answered == 1 {
                        // Its work on the second message: the node hears nothing of it meanwhile.
                        told.recv_timeout(Duration::from_secs(20)).expect("the first answer has come");
                    }
                }
            }
        }
    });
    for _ in 0..ROUNDS {
        let call = || a.call(&to(&b), 1, "work", &body(b"x"), false).expect("sent");
        let calls = [call(), call(), call()];
        assert_eq!(bytes_of(&calls[0]), b"done");
        go_on.send(()).expect("it serves");
        assert_eq!([bytes_of(&calls[1]), bytes_of(&calls[2])], [b"done", b"done"]);
    }
    serving.join().expect("it ends");
}

#[test]
fn the_end_of_a_process_fails_what_it_owes_and_another_takes_its_place() {
    let folder = tempfile::tempdir().expect("a folder");
    let (a, b) = (node(folder.path(), "a"), node(folder.path(), "b"));
    let target = to(&b);
    let pending = a.call(&target, 1, "never", &body(b"x"), false).expect("sent");
    let mailbox = b.mailbox(1).expect("a mailbox");
    assert!(mailbox.wait(LIMIT, true));
    drop(mailbox);
    drop(b);
    assert!(pending.wait(LIMIT));
    let answer = &pending.take()[0].outcome;
    // Closing answers what waits there as thrown away, or the connection ends first: both are no value.
    assert!(!matches!(answer, Outcome::Answer { kind: VALUE, .. }), "{answer:?}");

    let refused = a.call(&target, 1, "nobody", &body(b"x"), false).expect("sent");
    assert!(refused.is_ready(), "at once");
    std::fs::remove_file(&target[0].address).expect("the dead socket");
    let b = node(folder.path(), "b");
    let serving = echo(b.mailbox(1).expect("a mailbox"));
    let gather = a.call(&target, 1, "echo", &body(b"again"), false).expect("sent");
    assert_eq!(bytes_of(&gather), b"again");
    drop((a, b));
    assert_eq!(serving.join().expect("it ends"), 1);
}

#[test]
fn a_large_part_goes_through_sealed_memory_and_leaves_no_descriptor() {
    let folder = tempfile::tempdir().expect("a folder");
    let (a, b) = (node(folder.path(), "a"), node(folder.path(), "b"));
    let mailbox = b.mailbox(1).expect("a mailbox");
    let large = vec![7_u8; SHARED_FROM + 3];
    // By name: other tests of this process open and close descriptors meanwhile.
    let open = || {
        let fds = std::fs::read_dir("/proc/self/fd").expect("proc").flatten();
        let links = fds.filter_map(|fd| std::fs::read_link(fd.path()).ok());
        links.filter(|link| link.to_string_lossy().contains("memfd:sky-monarch")).count()
    };
    for _ in 0..20 {
        let parts = [&b"small"[..], &large, &b""[..], &large];
        let payload = Payload::from_parts(parts.into_iter()).expect("a payload");
        assert_eq!(open(), 1, "all large parts of a message share one");
        a.send(&to(&b), 1, "large", &payload).expect("sent");
        drop(payload);
        assert!(mailbox.wait(LIMIT, true));
        let Some(Delivery::Call(request)) = mailbox.take(1).pop() else { panic!("a call") };
        let blobs = request.blobs();
        assert_eq!(blobs.iter().map(|blob| blob.len()).collect::<Vec<_>>(), [5, large.len(), 0, large.len()]);
        assert!(blobs[1].is_shared() && blobs[3].is_shared());
        // SAFETY: the blob keeps its memory mapped for as long as it lives.
        let seen = unsafe { std::slice::from_raw_parts(blobs[3].as_ptr(), blobs[3].len()) };
        assert_eq!(seen, large);
        assert_eq!(open(), 0, "it is mapped, and closed");
    }
}
