//! The lead, the mailboxes and the gathers of a node under a simulated scheduler: thousands of interleavings, each found
//! again by its seed.
//!
//! It is the very code of `src/mesh`, with threads, locks and atomics of the scheduler, and inboxes for sockets. What
//! never happens shows as a deadlock: a wake-up that is lost, a sender that is not resumed.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use shuttle::thread;
pub(crate) use sky_monarch_core::{Error, ErrorKind, Result};

#[path = "../src/mesh/aside.rs"]
#[allow(dead_code, reason = "as the node has it")]
mod aside;
#[path = "../src/mesh/gather.rs"]
#[allow(dead_code, reason = "as the node has it")]
mod gather;
#[path = "../src/mesh/lead.rs"]
#[allow(dead_code, reason = "as the node has it")]
mod lead;
#[path = "mesh_model/link.rs"]
mod link;
#[path = "../src/mesh/mailbox.rs"]
#[allow(dead_code, reason = "as the node has it")]
mod mailbox;
#[path = "mesh_model/notifier.rs"]
mod notifier;
#[path = "../src/mesh/packet.rs"]
#[allow(dead_code, reason = "as the node has it")]
mod packet;
#[path = "mesh_model/payload.rs"]
mod payload;
#[path = "mesh_model/poller.rs"]
mod poller;
#[path = "mesh_model/shared.rs"]
mod shared;
#[path = "mesh_model/sync.rs"]
mod sync;

use gather::{Gather, Outcome, VALUE};
use mailbox::{Delivery, THROWN_AWAY};
use payload::{Blob, Payload};
use shared::Shared;

/// Of each test, twice as many of the shortest. What fails prints its schedule, for `shuttle::replay`.
const SEEDS: usize = 200;

/// Half of the schedules are drawn step by step, half by priorities that change a few times: those find what needs one
/// thread to be kept from going on for long.
fn check(seeds: usize, scenario: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(scenario.clone(), seeds / 2);
    shuttle::check_pct(scenario, seeds / 2, 3);
}

/// A node with its own thread, which ends when the node is closed.
fn start() -> (Arc<Shared>, thread::JoinHandle<()>) {
    let node = Shared::new();
    let own = Arc::clone(&node);
    (node, thread::spawn(move || own.stand_in()))
}

fn end(nodes: impl IntoIterator<Item = (Arc<Shared>, thread::JoinHandle<()>)>) {
    for (node, own) in nodes {
        node.close();
        own.join().expect("its own thread ends");
    }
}

/// An actor on a thread of its own: answers each message with what it carries, until its mailbox closes.
fn echo(node: &Arc<Shared>, most: usize) -> thread::JoinHandle<Vec<Bytes>> {
    let (node, mailbox) = (Arc::clone(node), Arc::clone(node.actor()));
    thread::spawn(move || {
        let mut heard = Vec::new();
        loop {
            mailbox.wait(None, true);
            let taken = mailbox.take(most);
            // Not only that of the mailbox: until it comes, this would go round and round.
            if taken.is_empty() && (mailbox.is_closed() || node.is_closing()) {
                return heard;
            }
            for delivery in taken {
                if let Delivery::Call(request) = delivery {
                    heard.push(request.blobs()[0].0.clone());
                    request.reply(VALUE, &Payload(request.blobs().to_vec())).expect("answered");
                }
            }
        }
    })
}

/// The value that a call has brought; none where it failed.
fn value(gather: &Gather) -> Option<Bytes> {
    assert!(gather.wait(None), "it ends");
    let mut answers = gather.take();
    assert_eq!(answers.len(), 1, "one answer");
    match answers.pop()?.outcome {
        Outcome::Answer { kind: VALUE, blobs } => Some(blobs[0].0.clone()),
        Outcome::Answer { kind: THROWN_AWAY, .. } | Outcome::Dead { .. } => None,
        other => panic!("{other:?}"),
    }
}

fn small(number: u8) -> Bytes {
    Bytes::from(vec![number])
}

#[test]
fn two_threads_that_wait_for_one_answer_each_both_get_it() {
    check(2 * SEEDS, || {
        let (a, b) = (start(), start());
        let link = Shared::connect(&a.0, &b.0);
        let actor = echo(&b.0, 1);
        let (node, other) = (Arc::clone(&a.0), Arc::clone(&link));
        let caller = thread::spawn(move || assert_eq!(value(&node.call(&other, &small(1))), Some(small(1))));
        assert_eq!(value(&a.0.call(&link, &small(2))), Some(small(2)));
        caller.join().expect("it ends");
        end([a, b]);
        actor.join().expect("it ends");
    });
}

#[test]
fn every_call_of_several_threads_is_answered_and_each_threads_arrive_in_order() {
    check(SEEDS, || {
        let (a, b) = (start(), start());
        let link = Shared::connect(&a.0, &b.0);
        let actor = echo(&b.0, 2);
        let callers: Vec<_> = (0..2_u8)
            .map(|me| {
                let (node, link) = (Arc::clone(&a.0), Arc::clone(&link));
                thread::spawn(move || {
                    let mut window = VecDeque::new();
                    for number in 0..4 {
                        window.push_back((number, node.call(&link, &small(10 * me + number))));
                        if window.len() == 3 {
                            let (number, gather) = window.pop_front().expect("three");
                            assert_eq!(value(&gather), Some(small(10 * me + number)));
                        }
                    }
                    for (number, gather) in window {
                        assert_eq!(value(&gather), Some(small(10 * me + number)));
                    }
                })
            })
            .collect();
        callers.into_iter().for_each(|caller| caller.join().expect("it ends"));
        assert_eq!(a.0.open_calls(), 0);
        end([a, b]);
        let heard: Vec<u8> = actor.join().expect("it ends").iter().map(|bytes| bytes[0]).collect();
        for me in 0..2 {
            let of_one: Vec<u8> = heard.iter().copied().filter(|number| number / 10 == me).collect();
            assert_eq!(of_one, (0..4).map(|number| 10 * me + number).collect::<Vec<_>>());
        }
    });
}

#[test]
fn what_was_laid_aside_leaves_by_itself_whatever_its_sender_does_then() {
    check(SEEDS, || {
        let (a, b) = (start(), start());
        let link = Shared::connect(&a.0, &b.0);
        let mailbox = Arc::clone(b.0.actor());
        // It answers once all has come, so that no call leaves because another one is waited for.
        let actor = thread::spawn(move || {
            let mut heard = Vec::new();
            while heard.len() < 3 {
                mailbox.wait(None, true);
                for delivery in mailbox.take(2) {
                    if let Delivery::Call(request) = delivery {
                        request.reply_soon(VALUE, &Payload(request.blobs().to_vec())).expect("answered");
                        heard.push(request.blobs()[0].0.clone());
                    }
                }
            }
            heard
        });
        let calls: Vec<_> = (0..3).map(|number| a.0.call_soon(&link, &small(number))).collect();
        // Neither side waits any more: the calls are there without it, and the answers.
        let heard = actor.join().expect("it ends");
        assert_eq!(heard, [small(0), small(1), small(2)], "in order");
        for gather in &calls {
            // Turns of the others, more than they need.
            for _ in 0..5_000 {
                if gather.is_ready() {
                    break;
                }
                thread::yield_now();
            }
            assert!(gather.is_ready(), "its answer leaves");
        }
        end([a, b]);
    });
}

#[test]
fn a_sender_that_was_stopped_by_a_full_mailbox_goes_on_and_overtakes_nobody() {
    // One of these fills a mailbox.
    let full = Bytes::from(vec![0_u8; 32 << 20]);
    check(SEEDS, move || {
        let (a, b) = (start(), start());
        let link = Shared::connect(&a.0, &b.0);
        let calls: Vec<_> = (0..5).map(|number| a.0.call(&link, &full.slice(number..))).collect();
        let actor = echo(&b.0, 1);
        for (number, gather) in calls.iter().enumerate() {
            assert_eq!(value(gather).map(|bytes| bytes.len()), Some(full.len() - number));
        }
        end([a, b]);
        let heard: Vec<usize> = actor.join().expect("it ends").iter().map(Bytes::len).collect();
        assert_eq!(heard, (0..5).map(|number| full.len() - number).collect::<Vec<_>>());
    });
}

#[test]
fn every_call_of_a_process_that_dies_ends() {
    check(SEEDS, || {
        let (a, b) = (start(), start());
        let link = Shared::connect(&a.0, &b.0);
        let actor = echo(&b.0, 1);
        let dying = Arc::clone(&link);
        let death = thread::spawn(move || {
            // The other end hangs up: what it had said before is read before that.
            dying.peer_link().hang_up();
        });
        let calls: Vec<_> = (0..4).map(|number| a.0.call(&link, &small(number))).collect();
        for (number, gather) in (0..).zip(&calls) {
            let found = value(gather);
            assert!(found.is_none() || found == Some(small(number)));
        }
        death.join().expect("it ends");
        assert_eq!(a.0.open_calls(), 0, "nothing is waited for");
        end([a, b]);
        actor.join().expect("it ends");
    });
}

#[test]
fn a_cancelled_call_ends_and_the_next_one_is_served() {
    check(SEEDS, || {
        let (a, b) = (start(), start());
        let link = Shared::connect(&a.0, &b.0);
        let actor = echo(&b.0, 2);
        let calls: Vec<_> = (0..3).map(|number| a.0.call(&link, &small(number))).collect();
        let cancelled = Arc::clone(&calls[1]);
        let other = thread::spawn(move || cancelled.cancel());
        assert_eq!(value(&calls[0]), Some(small(0)));
        assert!(calls[1].wait(None), "it ends");
        assert_eq!(value(&calls[2]), Some(small(2)));
        other.join().expect("it ends");
        end([a, b]);
        let heard = actor.join().expect("it ends");
        assert!(heard.len() == 3 || heard == [small(0), small(2)], "in order: {heard:?}");
    });
}

#[test]
fn a_loop_that_hears_through_a_notifier_misses_nothing_and_reads_no_socket() {
    check(SEEDS, || {
        let (a, b) = (start(), start());
        let link = Shared::connect(&a.0, &b.0);
        let mailbox = Arc::clone(b.0.actor());
        let serving = thread::spawn(move || {
            let notifier = Arc::new(notifier::Notifier::default());
            mailbox.notify(Arc::clone(&notifier));
            let mut count = 0;
            while !mailbox.is_closed() {
                notifier.wait();
                for delivery in mailbox.take(2) {
                    if let Delivery::Call(request) = delivery {
                        count += 1;
                        request.reply(VALUE, &Payload(vec![Blob(small(count))])).expect("answered");
                    }
                }
            }
        });
        let calls: Vec<_> = (0..3).map(|_| a.0.call(&link, &small(0))).collect();
        for (number, gather) in (1..).zip(&calls) {
            assert_eq!(value(gather), Some(small(number)));
        }
        end([a, b]);
        serving.join().expect("it ends");
    });
}
