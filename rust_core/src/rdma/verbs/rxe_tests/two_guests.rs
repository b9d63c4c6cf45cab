//! Owner and requester in a guest each, with an Ethernet between them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};

use super::*;

const LENGTH: usize = 16 * MIB;
/// Where the owner gives its handle away.
const PORT: u16 = 7007;

#[test]
#[ignore = "needs an RDMA device and a peer: make test-rdma"]
fn owner() {
    // The library comes over the wire to the host's files, which takes its time: before anybody waits for it.
    drop(Fabric::open(address()).expect("a device"));
    let owner = domain();
    let theirs = filled(LENGTH, 1);
    let handle = owner.register(theirs.clone(), Access::ReadWrite, 1).expect("room");
    let listener = TcpListener::bind((address(), PORT)).expect("a port");
    let (mut peer, _) = listener.accept().expect("the requester");
    peer.write_all((handle.to_text() + "\n").as_bytes()).expect("the requester");
    let mut word = [0; 1];
    peer.read_exact(&mut word).expect("it has written");
    let equal = same(bytes(&theirs), 9);
    peer.write_all(if equal { b"y" } else { b"n" }).expect("the requester");
    assert!(equal, "what arrived here");
    // Until this host loses its power.
    std::thread::sleep(LIMIT);
}

/// RoCE v2 is UDP, and nothing else between the two is: what comes of it is dropped on its way in.
fn swallow(verb: &str) {
    let rules: &[&[&str]] = match verb {
        // What is for this host is found in the table `local`: the rule has to come before that.
        "begin" => &[
            &["add", "pref", "10", "lookup", "local"],
            &["del", "pref", "0"],
            &["add", "pref", "5", "iif", "eth0", "ipproto", "udp", "blackhole"],
        ],
        _ => &[&["del", "pref", "5"]],
    };
    for rule in rules {
        let done = Command::new("ip").arg("rule").args(*rule).status().expect("iproute2");
        assert!(done.success(), "ip rule {rule:?}");
    }
}

#[test]
#[ignore = "needs an RDMA device and a peer: make test-rdma"]
fn requester() {
    drop(Fabric::open(address()).expect("a device"));
    let there: IpAddr =
        std::env::var("SKY_MONARCH_TEST_RDMA_PEER").expect("a peer").parse().expect("numeric");
    let mut peer = awaited("the owner", || TcpStream::connect((there, PORT)).ok());
    let mut handle = String::new();
    BufReader::new(peer.try_clone().expect("a socket")).read_line(&mut handle).expect("the owner");
    let handle = Handle::from_text(handle.trim()).expect("a handle");
    let (requester, mine) = (domain(), empty(LENGTH));
    let read = |by_whom: &Domain, options: &Options| {
        by_whom.read_into(std::slice::from_ref(&handle), 0, &mine, options)
    };

    // The first packets between two machines that have just booted may come late.
    awaited("a first read", || {
        let first = read(&requester, &over_verbs());
        first.map_err(|error| eprintln!("not yet: {error}")).ok()
    });
    // What nobody chose is the fabric.
    let began = Instant::now();
    let report = read(&requester, &by(None)).expect("read");
    eprintln!("{LENGTH} bytes from the other guest in {:?}", began.elapsed());
    assert_eq!(path_of(&report), Some(PathKind::Verbs));
    assert!(same(bytes(&mine), 1));
    let report = requester.write_from(&handle, 0, &filled(LENGTH, 9), &by(None)).expect("written");
    assert_eq!(path_of(&report), Some(PathKind::Verbs));
    peer.write_all(b"w").expect("the owner");
    let mut equal = [0; 1];
    peer.read_exact(&mut equal).expect("the owner");
    assert_eq!(&equal, b"y", "the owner has what was written");

    // A fabric that swallows packets: both have a device, and only trying tells.
    swallow("begin");
    let fresh = domain();
    let report = read(&fresh, &by(None)).expect("read all the same");
    assert_eq!(path_of(&report), Some(PathKind::Tcp));
    assert!(same(bytes(&mine), 9));
    let forced = read(&fresh, &over_verbs()).expect_err("what was asked for does not lead there");
    assert_eq!(forced.kind(), ErrorKind::Io, "{forced}");
    swallow("end");
    assert_eq!(path_of(&read(&domain(), &by(None)).expect("read")), Some(PathKind::Verbs), "again");

    // Its power goes: no packet says so.
    eprintln!("SKY-GUEST-KILL-THE-OTHER");
    let until = Instant::now() + LIMIT;
    let (error, took): (Error, Duration) = loop {
        let began = Instant::now();
        match read(&requester, &over_verbs()) {
            Ok(_) => assert!(Instant::now() < until, "the other guest lives"),
            Err(error) => break (error, began.elapsed()),
        }
    };
    assert!(matches!(error.kind(), ErrorKind::Closed | ErrorKind::TimedOut), "{error}");
    assert!(took < Duration::from_secs(30), "{took:?}");
    eprintln!("a host without power was given up after {took:?}: {error}");
}
