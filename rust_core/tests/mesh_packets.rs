//! What a peer may send: every mangled stream is refused or understood, in bounded memory, and the node serves on.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use proptest::prelude::*;
use sky_monarch_core::mesh::{Delivery, Mailbox, Node, NodeOptions, Outcome, Payload, Target, VALUE};
use sky_monarch_core::wire::{Frame, decode};

#[allow(dead_code, reason = "the node's own, read here from outside")]
#[path = "../src/mesh/packet.rs"]
mod packet;

use packet::{Packet, Part, VERSION};

const MAX_FRAME: u32 = 16 << 20;
const TOKEN: &str = "secret";

/// Counts what each thread has allocated at the most, beyond what it had when it was asked to count.
struct Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

fn count(by: isize) {
    // A thread that is ending has no counters any more, and nobody asks.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + by);
        let _ = MOST.try_with(|most| most.set(most.get().max(held.get())));
    });
}

// SAFETY: it hands everything on to the system's allocator, and only counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(isize::try_from(layout.size()).unwrap_or(isize::MAX));
        // SAFETY: as asked for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-isize::try_from(layout.size()).unwrap_or(isize::MAX));
        // SAFETY: as asked for.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What `work` has allocated at a time at the most.
fn most_of(work: impl FnOnce()) -> usize {
    HELD.set(0);
    MOST.set(0);
    work();
    usize::try_from(MOST.get()).unwrap_or(0)
}

fn some_parts() -> impl Strategy<Value = Vec<Part>> {
    let part = prop_oneof![
        3 => Just(Part::Segment),
        1 => (any::<u64>(), any::<u64>()).prop_map(|(offset, len)| Part::Shared(offset, len)),
    ];
    prop::collection::vec(part, 0..6)
}

fn some_packet() -> impl Strategy<Value = Packet> {
    prop_oneof![
        (any::<u32>(), "[a-z]{0,12}", any::<bool>()).prop_map(|(version, token, borrows)| Packet::Hello {
            version,
            token,
            borrows
        }),
        (any::<u64>(), any::<u32>(), any::<u64>(), "\\PC{0,20}", "\\PC{0,20}", some_parts(), any::<u64>())
            .prop_map(|(call, slot, actor, method, place, parts, memory)| {
                Packet::Call { call, slot, actor, method, place, parts, memory }
            }),
        (any::<u64>(), any::<u32>(), any::<u8>(), some_parts(), any::<u64>())
            .prop_map(|(call, slot, kind, parts, memory)| Packet::Reply { call, slot, kind, parts, memory }),
        (any::<u64>(), any::<u64>()).prop_map(|(call, actor)| Packet::Cancel { call, actor }),
        (any::<u64>(), any::<bool>()).prop_map(|(memory, clean)| Packet::Release { memory, clean }),
    ]
}

fn some_frame() -> impl Strategy<Value = Vec<u8>> {
    let segments = prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..6);
    (some_packet(), segments).prop_map(|(packet, segments)| encode(&packet, segments))
}

fn encode(packet: &Packet, segments: Vec<Vec<u8>>) -> Vec<u8> {
    let frame = Frame::from_message(packet).expect("a frame");
    let frame = Frame { segments: segments.into_iter().map(Bytes::from).collect(), ..frame };
    let mut bytes = Vec::new();
    bytes.extend(u32::try_from(frame.wire_len()).expect("small").to_le_bytes());
    bytes.push(sky_monarch_core::wire::VERSION);
    bytes.extend(u16::try_from(frame.segments.len()).expect("few").to_le_bytes());
    for part in std::iter::once(&frame.header).chain(&frame.segments) {
        bytes.extend(u32::try_from(part.len()).expect("small").to_le_bytes());
    }
    for part in std::iter::once(&frame.header).chain(&frame.segments) {
        bytes.extend(part);
    }
    bytes
}

/// One change to a valid stream.
#[derive(Clone, Debug)]
enum Change {
    Set(prop::sample::Index, u8),
    Flip(prop::sample::Index, u8),
    Number(prop::sample::Index, u32),
    Cut(prop::sample::Index),
    Twice(prop::sample::Index, usize),
    Drop(prop::sample::Index, usize),
}

fn some_change() -> impl Strategy<Value = Change> {
    let at = any::<prop::sample::Index>;
    prop_oneof![
        (at(), any::<u8>()).prop_map(|(at, byte)| Change::Set(at, byte)),
        (at(), 0..8_u8).prop_map(|(at, bit)| Change::Flip(at, bit)),
        (at(), prop_oneof![Just(0), Just(1), Just(u32::MAX), Just(MAX_FRAME), any::<u32>()])
            .prop_map(|(at, number)| Change::Number(at, number)),
        at().prop_map(Change::Cut),
        (at(), 1..40_usize).prop_map(|(at, len)| Change::Twice(at, len)),
        (at(), 1..40_usize).prop_map(|(at, len)| Change::Drop(at, len)),
    ]
}

fn mangled() -> impl Strategy<Value = Vec<u8>> {
    let frames = prop::collection::vec(some_frame(), 1..5);
    (frames, prop::collection::vec(some_change(), 0..6)).prop_map(|(frames, changes)| {
        let mut bytes = frames.concat();
        for change in changes {
            if bytes.is_empty() {
                break;
            }
            let len = bytes.len();
            match change {
                Change::Set(at, byte) => bytes[at.index(len)] = byte,
                Change::Flip(at, bit) => bytes[at.index(len)] ^= 1 << bit,
                Change::Number(at, number) => {
                    let at = at.index(len);
                    for (place, byte) in bytes[at..].iter_mut().zip(number.to_le_bytes()) {
                        *place = byte;
                    }
                }
                Change::Cut(at) => bytes.truncate(at.index(len)),
                Change::Twice(at, count) => {
                    let at = at.index(len);
                    let again = bytes[at..len.min(at + count)].to_vec();
                    bytes.splice(at..at, again);
                }
                Change::Drop(at, count) => {
                    let at = at.index(len);
                    bytes.drain(at..len.min(at + count));
                }
            }
        }
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_mangled_stream_is_refused_or_understood_in_no_more_memory_than_it_has(
        bytes in mangled(), step in 1..200_usize
    ) {
        let most = most_of(|| {
            let mut buffer = BytesMut::new();
            'stream: for chunk in bytes.chunks(step) {
                buffer.extend_from_slice(chunk);
                loop {
                    match decode(&mut buffer, MAX_FRAME) {
                        Ok(Some(frame)) => {
                            // What it says is of no matter here, only that it is said or refused.
                            if frame.message::<Packet>().is_err() {
                                break 'stream;
                            }
                        }
                        Ok(None) => break,
                        Err(_) => break 'stream,
                    }
                }
            }
        });
        // Lists and strings grow with what is there, not with what is announced; errors have words.
        prop_assert!(most <= 64 * bytes.len() + 16_384, "{most} bytes for a stream of {}", bytes.len());
    }
}

fn node(folder: &std::path::Path, name: &str) -> Node {
    let address = folder.join(name);
    let listener = OwnedFd::from(UnixListener::bind(&address).expect("a socket"));
    let limit = Duration::from_secs(5);
    let options = NodeOptions { address, token: TOKEN.to_owned(), send_limit: limit };
    Node::new(options, listener).expect("a node")
}

fn answer_all(mailbox: &Mailbox) {
    while !mailbox.is_closed() {
        mailbox.wait(Some(Duration::from_secs(10)), true);
        for delivery in mailbox.take(64) {
            if let Delivery::Call(request) = delivery {
                // Of those who have gone meanwhile there is nobody to hear.
                drop(request.reply(VALUE, &Payload::default()));
            }
        }
    }
}

#[test]
fn a_trusted_peer_that_talks_nonsense_loses_its_connection_and_nobody_elses() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = || std::fs::read_dir("/proc/self/fd").expect("proc").count();
    let before = files();
    let (a, b) = (node(folder.path(), "a"), node(folder.path(), "b"));
    let mailbox = a.mailbox(1).expect("a mailbox");
    let serving = std::thread::spawn(move || answer_all(&mailbox));
    let target = [Target { address: a.address().to_owned(), place: String::new() }];
    let still_serves = || {
        let gather = b.call(&target, 1, "ping", &Payload::default(), false).expect("sent");
        assert!(gather.wait(Some(Duration::from_secs(20))));
        assert!(matches!(gather.take()[0].outcome, Outcome::Answer { kind: VALUE, .. }));
    };
    still_serves();
    let hello =
        encode(&Packet::Hello { version: VERSION, token: TOKEN.to_owned(), borrows: true }, Vec::new());
    let config = ProptestConfig { cases: 250, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(bytes in mangled())| {
        let mut peer = UnixStream::connect(a.address()).expect("it listens");
        peer.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
        // It may hang up while we still write.
        if peer.write_all(&hello).and_then(|()| peer.write_all(&bytes)).is_ok() {
            drop(peer.shutdown(std::net::Shutdown::Write));
        }
        // Whatever it answers, it comes to an end.
        let mut rest = Vec::new();
        if let Err(error) = peer.read_to_end(&mut rest) {
            prop_assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        }
        still_serves();
    });
    eventually("only one connection is left", || a.links() == 1);
    drop((a, b));
    serving.join().expect("it ends");
    // Not before: a message that waits for an actor that never comes holds its connection.
    eventually("no descriptor is left", || files() == before);
}

fn eventually(what: &str, found: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !found() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
