//! Messages between two nodes of one process, so many as asked for: what `benches/instructions.py` counts.
//!
//! `mesh_messages call|window|send N`: calls one after the other, calls with a hundred on their way, or messages without
//! an answer.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sky_monarch_core::mesh::{Delivery, Gather, Mailbox, Node, NodeOptions, Target, VALUE};

const WINDOW: usize = 100;
const LIMIT: Option<Duration> = Some(Duration::from_secs(60));
const ACTOR: u64 = 1;

fn node(folder: &Path, name: &str) -> Node {
    let address = folder.join(name);
    let listener = OwnedFd::from(UnixListener::bind(&address).expect("a socket"));
    let limit = Duration::from_secs(60);
    let options = NodeOptions { address, token: "secret".to_owned(), send_limit: limit };
    Node::new(options, listener).expect("a node")
}

fn serve(mailbox: &Mailbox) {
    while !mailbox.is_closed() {
        mailbox.wait(LIMIT, true);
        for delivery in mailbox.take(64) {
            if let Delivery::Call(request) = delivery {
                let body = request.blobs()[0].bytes().cloned().unwrap_or_default();
                let answer = request.payload([&body[..]].into_iter()).expect("a payload");
                request.reply(VALUE, &answer).expect("answered");
            }
        }
    }
}

fn answered(gather: &Gather) {
    assert!(gather.wait(LIMIT), "it answers");
    assert_eq!(gather.take().len(), 1);
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let kind = arguments.next().expect("call, window or send");
    let number: usize = arguments.next().and_then(|text| text.parse().ok()).expect("how many");
    let folder = std::env::temp_dir().join(format!("sky-monarch-messages-{}", std::process::id()));
    std::fs::create_dir(&folder).expect("a folder");
    let (a, b) = (node(&folder, "a"), node(&folder, "b"));
    let mailbox = b.mailbox(ACTOR).expect("a mailbox");
    let serving = std::thread::spawn(move || serve(&mailbox));
    let target = [Target { address: b.address().to_owned(), place: String::new() }];
    // About what pickled arguments of a small call are.
    let payload = || a.payload(&target, [&[7_u8; 32][..]].into_iter()).expect("a payload");
    let call = || a.call(&target, ACTOR, "ping", &payload(), false).expect("sent");
    let mut waiting: VecDeque<Arc<Gather>> = VecDeque::new();
    for _ in 0..number {
        match kind.as_str() {
            "call" => answered(&call()),
            "window" => {
                waiting.push_back(call());
                if waiting.len() == WINDOW {
                    answered(&waiting.pop_front().expect("a hundred"));
                }
            }
            "send" => assert!(a.send(&target, ACTOR, "ping", &payload()).expect("sent").is_empty()),
            other => panic!("no {other}: call, window or send"),
        }
    }
    waiting.iter().for_each(|gather| answered(gather));
    answered(&call());
    drop((a, b));
    serving.join().expect("it ends");
    std::fs::remove_dir_all(&folder).expect("removed");
}
