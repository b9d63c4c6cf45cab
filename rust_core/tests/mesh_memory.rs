//! Lent memory: used again when all have let go of it, and never while anybody may still see it.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork, pipe, read, write};
use sky_monarch_core::mesh::{
    Blob, Delivery, Mailbox, Node, NodeOptions, Outcome, Payload, Request, Target, VALUE,
};

const LIMIT: Option<Duration> = Some(Duration::from_secs(20));
const LARGE: usize = 3 << 20;

/// What is counted is of the whole process, so one test runs at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn node(folder: &Path, name: &str) -> Node {
    let address = folder.join(name);
    let listener = OwnedFd::from(UnixListener::bind(&address).expect("a socket"));
    let limit = Duration::from_secs(20);
    let options = NodeOptions { address, token: "secret".to_owned(), send_limit: limit };
    Node::new(options, listener).expect("a node")
}

fn send(from: &Node, to: &Node, byte: u8) {
    let target = [Target { address: to.address().to_owned(), place: String::new() }];
    let large = vec![byte; LARGE];
    let payload = from.payload(&target, [&b"small"[..], &large].into_iter()).expect("a payload");
    assert!(from.send(&target, 1, "take", &payload).expect("sent").is_empty());
}

/// Waits until `from` has heard all that `to` has given back so far: it comes before the answer, on the same connection.
fn hear(from: &Node, to: &Node, mailbox: &Mailbox) {
    let target = [Target { address: to.address().to_owned(), place: String::new() }];
    let small = Payload::from_parts([&b"small"[..]].into_iter()).expect("a payload");
    let gather = from.call(&target, 1, "hear", &small, false).expect("sent");
    take(mailbox).reply(VALUE, &small).expect("answered");
    assert!(gather.wait(LIMIT), "it answers");
}

fn take(mailbox: &Mailbox) -> Request {
    assert!(mailbox.wait(LIMIT, true), "it arrives");
    let Some(Delivery::Call(request)) = mailbox.take(1).pop() else { panic!("a call") };
    request
}

fn bytes(blob: &Blob) -> &[u8] {
    // SAFETY: the blob keeps its memory mapped for as long as it lives.
    unsafe { std::slice::from_raw_parts(blob.as_ptr(), blob.len()) }
}

fn is_all(blob: &Blob, byte: u8) -> bool {
    bytes(blob).len() == LARGE && bytes(blob).iter().all(|found| *found == byte)
}

/// Inodes of the segments that this process may write to as their sender.
fn segments() -> BTreeSet<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("proc");
    let ours = maps.lines().filter(|line| line.contains("memfd:sky-monarch") && line.contains("rw-s"));
    ours.filter_map(|line| line.split_whitespace().nth(4).map(str::to_owned)).collect()
}

fn eventually(what: &str, mut found: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !found() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_segment_that_came_back_holds_the_next_message_and_no_other_is_made() {
    let _alone = ALONE.lock();
    let folder = tempfile::tempdir().expect("a folder");
    let (a, b) = (node(folder.path(), "a"), node(folder.path(), "b"));
    let mailbox = b.mailbox(1).expect("a mailbox");
    let mut seen = BTreeSet::new();
    for byte in 0..40 {
        send(&a, &b, byte);
        let request = take(&mailbox);
        assert!(is_all(&request.blobs()[1], byte), "message {byte}");
        seen.extend(segments());
        drop(request);
        hear(&a, &b, &mailbox);
    }
    assert!(seen.len() <= 3, "{} segments for 40 messages, one at a time", seen.len());
    drop((a, b));
    eventually("a node that is closed keeps none", || segments().is_empty());
}

#[test]
fn what_a_receiver_keeps_stays_as_it_is_and_what_it_writes_is_its_own() {
    let _alone = ALONE.lock();
    let folder = tempfile::tempdir().expect("a folder");
    let (a, b) = (node(folder.path(), "a"), node(folder.path(), "b"));
    let mailbox = b.mailbox(1).expect("a mailbox");
    let kept: Vec<Request> = (0..20_u8)
        .map(|byte| {
            send(&a, &b, byte);
            let request = take(&mailbox);
            let first = request.blobs()[1].as_ptr().cast_mut();
            // SAFETY: the mapping is private to this receiver, and this is its only holder.
            unsafe { *first = 255 };
            request
        })
        .collect();
    for (byte, request) in (0..).zip(&kept) {
        let found = bytes(&request.blobs()[1]);
        assert_eq!(found[0], 255, "its own");
        assert!(found[1..].iter().all(|one| *one == byte), "message {byte} is as it was sent");
    }
    // More than may be lent at a time go too, and none of them waits.
    let more: Vec<Request> = (0..70).map(|byte| (send(&a, &b, byte), take(&mailbox)).1).collect();
    assert!((0..).zip(&more).all(|(byte, request)| is_all(&request.blobs()[1], byte)));
    assert!(
        segments().len() <= 64,
        "a receiver that keeps everything does not cost its sender a descriptor each"
    );
}

#[test]
fn what_a_child_of_the_receiver_may_see_is_never_filled_again() {
    let _alone = ALONE.lock();
    let folder = tempfile::tempdir().expect("a folder");
    let (a, b) = (node(folder.path(), "a"), node(folder.path(), "b"));
    let mailbox = b.mailbox(1).expect("a mailbox");
    send(&a, &b, 1);
    let request = take(&mailbox);
    let before = segments();
    let (wait, wake) = pipe().expect("a pipe");
    // SAFETY: the child only reads, compares and leaves.
    let child = match unsafe { fork() }.expect("a child") {
        ForkResult::Child => {
            let mut byte = [0];
            let told = read(&wait, &mut byte).is_ok();
            let same = is_all(&request.blobs()[1], 1);
            // SAFETY: it ends the child, and runs nothing of the parent's.
            unsafe { libc::_exit(i32::from(!(told && same))) }
        }
        ForkResult::Parent { child } => child,
    };
    drop(request);
    hear(&a, &b, &mailbox);
    for byte in 2..8 {
        send(&a, &b, byte);
        assert!(is_all(&take(&mailbox).blobs()[1], byte));
    }
    assert!(segments().is_disjoint(&before), "that segment was given up");
    write(&wake, &[1]).expect("told");
    assert_eq!(waitpid(child, None).expect("its end"), WaitStatus::Exited(child, 0), "it sees what it had");
}

#[test]
fn what_was_lent_to_a_process_that_is_gone_is_not_waited_for() {
    let _alone = ALONE.lock();
    let folder = tempfile::tempdir().expect("a folder");
    let (a, b) = (node(folder.path(), "a"), node(folder.path(), "b"));
    let mailbox = b.mailbox(1).expect("a mailbox");
    send(&a, &b, 1);
    let request = take(&mailbox);
    assert_eq!(segments().len(), 1);
    drop(mailbox);
    drop(b);
    eventually("its sender has given it up", || segments().is_empty());
    assert!(is_all(&request.blobs()[1], 1), "whoever holds it, holds it");
}

#[test]
fn an_answer_of_large_parts_comes_back_and_leaves_no_segment_behind() {
    let _alone = ALONE.lock();
    let folder = tempfile::tempdir().expect("a folder");
    let (a, b) = (node(folder.path(), "a"), node(folder.path(), "b"));
    let mailbox = b.mailbox(1).expect("a mailbox");
    let target = [Target { address: b.address().to_owned(), place: String::new() }];
    let large = vec![9_u8; LARGE];
    for _ in 0..10 {
        let payload = a.payload(&target, [&large[..]].into_iter()).expect("a payload");
        let gather = a.call(&target, 1, "echo", &payload, false).expect("sent");
        let request = take(&mailbox);
        let answer = request.payload([bytes(&request.blobs()[0])].into_iter()).expect("a payload");
        request.reply(VALUE, &answer).expect("answered");
        assert!(gather.wait(LIMIT));
        let answers = gather.take();
        let Outcome::Answer { kind: VALUE, blobs } = &answers[0].outcome else { panic!("{answers:?}") };
        assert!(is_all(&blobs[0], 9));
        drop((answers, answer, payload, request));
        hear(&a, &b, &mailbox);
    }
    assert!(segments().len() <= 6, "{:?}", segments());
}
