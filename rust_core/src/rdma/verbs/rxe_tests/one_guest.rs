//! Owner and requester in one guest: two ends of one device.

use super::*;
use crate::gpu::{self, MemoryKind, Platform, Stream};

/// Both ends of a connection, made here.
fn pairs(fabric: &Arc<Fabric>) -> (Pair, Pair) {
    let (mut left, mut right) = (Pair::new(fabric).expect("a pair"), Pair::new(fabric).expect("a pair"));
    left.join(&right.end()).expect("joins");
    right.join(&left.end()).expect("joins");
    (left, right)
}

/// Moves between `mine` and an address under a key.
fn moved(
    pair: &mut Pair,
    fabric: &Arc<Fabric>,
    direction: Direction,
    mine: &Memory,
    theirs: Keyed,
) -> Result<(), Failure> {
    let rights = if direction == Direction::FromThem { Rights::Target } else { Rights::Source };
    // The peer whose end would end the wait.
    let (watched, _held) = UnixStream::pair().expect("a socket");
    let limit = Instant::now() + LIMIT;
    // SAFETY: `mine` outlives what is registered of it, and whoever uses it after a failure drops the pair first.
    unsafe {
        let registered = Registered::host(fabric, mine.segments(), rights).expect("registered");
        let messages = fragments(&registered.keyed, &[theirs], pair.max_message());
        pair.transfer(direction, &messages, watched.as_raw_fd(), limit, |_| {})
    }
}

/// A process of this test, that does `role` and has `file` in common with us.
struct Other {
    process: Child,
    file: PathBuf,
}

impl Other {
    fn start(role: &str, file: &Path, given: &str) -> Self {
        let process = Command::new(std::env::current_exe().expect("a path"))
            .args(["--exact", &format!("rdma::verbs::rxe_tests::one_guest::child_{role}"), "--ignored"])
            .env("SKY_MONARCH_TEST_FILE", file)
            .env("SKY_MONARCH_TEST_GIVEN", given)
            .stdout(Stdio::null())
            .spawn()
            .expect("it starts");
        Self { process, file: file.to_owned() }
    }

    /// What it has written.
    fn said(&self) -> String {
        awaited("a word of the other process", || std::fs::read_to_string(&self.file).ok())
    }

    fn kill(&mut self) {
        self.process.kill().expect("it is ours");
        self.process.wait().expect("it is ours");
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _gone = self.process.kill();
        let _gone = self.process.wait();
    }
}

fn say(text: &str) {
    let file = PathBuf::from(std::env::var_os("SKY_MONARCH_TEST_FILE").expect("started by a test"));
    let whole = file.with_extension("part");
    std::fs::write(&whole, text).and_then(|()| std::fs::rename(whole, file)).expect("a writable folder");
}

#[test]
#[ignore = "needs an RDMA device: make test-rdma"]
fn bytes_arrive_equal_both_ways() {
    let (owner, requester) = (domain(), domain());
    for length in [MIB, 5 * MIB + 17, 64 * MIB] {
        let theirs = filled(length, 1);
        let handle = owner.register(theirs.clone(), Access::ReadWrite, 1).expect("room");
        let mine = empty(length);
        let began = Instant::now();
        let report =
            requester.read_into(std::slice::from_ref(&handle), 0, &mine, &over_verbs()).expect("read");
        let read = began.elapsed();
        assert_eq!((path_of(&report), report.bytes), (Some(PathKind::Verbs), length as u64));
        assert!(same(bytes(&mine), 1), "{length} bytes read");

        let other = filled(length - 5, 9);
        let began = Instant::now();
        let report = requester.write_from(&handle, 5, &other, &over_verbs()).expect("written");
        eprintln!("{length} bytes: read in {read:?}, written in {:?}", began.elapsed());
        assert_eq!(path_of(&report), Some(PathKind::Verbs));
        assert!(same(&bytes(&theirs)[..5], 1) && same(&bytes(&theirs)[5..], 9), "{length} bytes written");
        assert!(!owner.deregister(&handle, LIMIT).expect("nobody uses it"));
    }
}

#[test]
#[ignore = "needs an RDMA device: make test-rdma"]
fn what_the_owner_does_not_allow_is_refused_by_its_kind() {
    let (owner, requester) = (domain(), domain());
    let theirs = filled(1000, 1);
    let handle = owner.register(theirs.clone(), Access::ReadWrite, 1).expect("room");
    let locked = owner.register(theirs.clone(), Access::Read, 1).expect("room");
    let mine = empty(10);
    let read = |handle: &Handle, offset| {
        requester.read_into(std::slice::from_ref(handle), offset, &mine, &over_verbs()).map_err(|e| e.kind())
    };
    let write = |handle: &Handle, offset| {
        requester.write_from(handle, offset, &mine, &over_verbs()).map_err(|error| error.kind())
    };
    read(&handle, 990).expect("inside");
    for offset in [991, 1000, 1 << 63] {
        assert_eq!(read(&handle, offset), Err(ErrorKind::OutOfBounds));
        assert_eq!(write(&handle, offset), Err(ErrorKind::OutOfBounds));
    }
    read(&locked, 0).expect("to be read");
    assert_eq!(write(&locked, 0), Err(ErrorKind::Forbidden));
    let old = Handle { epoch: 0, ..handle.clone() };
    assert_eq!(
        (read(&old, 0), write(&old, 0)),
        (Err(ErrorKind::Stale), Err(ErrorKind::Stale)),
        "an old epoch"
    );
    owner.deregister(&handle, LIMIT).expect("nobody uses it");
    assert_eq!(read(&handle, 0), Err(ErrorKind::Stale), "withdrawn");
    assert!(same(bytes(&theirs), 1), "nothing was written");
}

/// What no requester of ours does: it uses a key for what it was not lent for, and one that was taken back.
#[test]
#[ignore = "needs an RDMA device: make test-rdma"]
fn a_key_opens_nothing_but_what_it_was_lent_for_and_a_failed_pair_is_flushed() {
    let fabric = Fabric::open(address()).expect("a device");
    let (theirs, mine) = (filled(MIB, 1), filled(MIB, 7));
    let at = |key| Keyed { segment: theirs.segments()[0], key };
    let lent = regions(&fabric, &theirs, Rights::RemoteRead).expect("registered").expect("of the host");
    let key = lent[0].remote_key();

    let (mut left, _right) = pairs(&fabric);
    let refused = moved(&mut left, &fabric, Direction::ToThem, &mine, at(key)).expect_err("only to be read");
    assert_eq!((refused.error.kind(), refused.fabric), (ErrorKind::Forbidden, false), "{}", refused.error);
    assert!(same(bytes(&theirs), 1), "nothing was written");
    let flushed = moved(&mut left, &fabric, Direction::FromThem, &mine, at(key)).expect_err("in error");
    assert_eq!(flushed.error.kind(), ErrorKind::Closed);
    assert!(flushed.error.to_string().contains("WORK_REQUEST_FLUSHED"), "{}", flushed.error);
    drop(left);

    let (mut left, _right) = pairs(&fabric);
    moved(&mut left, &fabric, Direction::FromThem, &mine, at(key)).expect("a new pair and its own key");
    assert!(same(bytes(&mine), 1));
    let wrong = moved(&mut left, &fabric, Direction::FromThem, &mine, at(key ^ 0x55)).expect_err("no key");
    assert_eq!(wrong.error.kind(), ErrorKind::Forbidden, "{}", wrong.error);
    drop(left);

    drop(lent);
    let (mut left, _right) = pairs(&fabric);
    let gone = moved(&mut left, &fabric, Direction::FromThem, &mine, at(key)).expect_err("taken back");
    assert_eq!(gone.error.kind(), ErrorKind::Forbidden, "{}", gone.error);
}

#[test]
#[ignore = "needs an RDMA device: make test-rdma"]
fn a_peer_that_is_not_there_is_given_up_within_seconds() {
    let fabric = Fabric::open(address()).expect("a device");
    let (mut left, right) = pairs(&fabric);
    drop(right);
    let (mine, theirs) = (empty(4096), filled(4096, 1));
    let lent = regions(&fabric, &theirs, Rights::RemoteRead).expect("registered").expect("of the host");
    let at = Keyed { segment: theirs.segments()[0], key: lent[0].remote_key() };
    let began = Instant::now();
    let dead = moved(&mut left, &fabric, Direction::FromThem, &mine, at).expect_err("nobody answers");
    assert_eq!((dead.error.kind(), dead.fabric), (ErrorKind::Closed, true), "{}", dead.error);
    assert!(dead.error.to_string().contains("RETRIES_EXCEEDED"), "{}", dead.error);
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
}

#[test]
#[ignore = "started by another test"]
fn child_owner() {
    let owner = domain();
    let handle = owner.register(filled(3 * MIB, 1), Access::ReadWrite, 1).expect("room");
    say(&handle.to_text());
    std::thread::sleep(LIMIT);
}

#[test]
#[ignore = "needs an RDMA device: make test-rdma"]
fn an_owner_that_is_killed_ends_what_was_under_way_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut other = Other::start("owner", &folder.path().join("handle"), "");
    let handle = Handle::from_text(&other.said()).expect("a handle");
    let requester = domain();
    let (reading, mine) = (std::sync::atomic::AtomicUsize::new(0), empty(3 * MIB));
    let ended = std::thread::scope(|scope| {
        let reads = scope.spawn(|| {
            loop {
                let read = requester.read_into(std::slice::from_ref(&handle), 0, &mine, &over_verbs());
                match read {
                    Ok(_) => reading.fetch_add(1, std::sync::atomic::Ordering::SeqCst),
                    Err(error) => return (error, Instant::now()),
                };
            }
        });
        awaited("a first read", || (reading.load(std::sync::atomic::Ordering::SeqCst) > 0).then_some(()));
        std::thread::sleep(Duration::from_millis(50));
        other.kill();
        let killed = Instant::now();
        let (error, at) = reads.join().expect("no panic");
        (error, at.saturating_duration_since(killed))
    });
    assert_eq!(ended.0.kind(), ErrorKind::Closed, "{}", ended.0);
    assert!(ended.1 < Duration::from_secs(10), "{:?}", ended.1);
}

#[test]
#[ignore = "started by another test"]
fn child_writer() {
    let handle = Handle::from_text(&std::env::var("SKY_MONARCH_TEST_GIVEN").expect("a handle")).expect("one");
    let (requester, mine) = (domain(), filled(3 * MIB, 9));
    loop {
        requester.write_from(&handle, 0, &mine, &over_verbs()).expect("the owner lives");
        say("written");
    }
}

#[test]
#[ignore = "needs an RDMA device: make test-rdma"]
fn memory_that_a_killed_writer_was_writing_to_is_the_owners_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let (owner, theirs) = (domain(), filled(3 * MIB, 1));
    let handle = owner.register(theirs.clone(), Access::ReadWrite, 1).expect("room");
    let mut other = Other::start("writer", &folder.path().join("said"), &handle.to_text());
    other.said();
    std::thread::sleep(Duration::from_millis(30));
    other.kill();
    let began = Instant::now();
    owner.deregister(&handle, LIMIT).expect("its connection has ended, and with it its queue pair");
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    // SAFETY: nobody but us may write there any more: that is what is tested.
    unsafe { std::ptr::write_bytes(theirs.segments()[0].address as *mut u8, 0, 3 * MIB) };
    std::thread::sleep(Duration::from_millis(500));
    assert!(bytes(&theirs).iter().all(|one| *one == 0), "nothing arrives late");
}

#[test]
#[ignore = "needs an RDMA device: make test-rdma"]
fn on_one_host_the_kernel_copies_and_the_fabric_is_not_asked() {
    let (owner, requester) = (domain(), domain());
    let handle = owner.register(filled(MIB, 1), Access::Read, 1).expect("room");
    let mine = empty(MIB);
    let report = requester.read_into(&[handle], 0, &mine, &by(None)).expect("read");
    assert_eq!(path_of(&report), Some(PathKind::Shm));
}

#[test]
#[ignore = "needs an RDMA device: make test-rdma"]
fn a_domain_that_holds_its_bytes_back_lends_nothing() {
    let limits = Limits { bytes_per_s: Some(1 << 30), ..Limits::default() };
    let (owner, requester) = (Domain::open(address(), SECRET, limits).expect("one"), domain());
    let handle = owner.register(filled(MIB, 1), Access::Read, 1).expect("room");
    let mine = empty(MIB);
    let read = |options: &Options| requester.read_into(std::slice::from_ref(&handle), 0, &mine, options);
    assert_eq!(read(&over_verbs()).expect_err("held back").kind(), ErrorKind::Io);
    assert_eq!(path_of(&read(&by(None)).expect("read")), Some(PathKind::Tcp));
}

/// The accelerator is our software double, whose memory no host can follow, as a real one's; the NIC and its refusals
/// are the kernel's.
#[test]
#[ignore = "needs an RDMA device: make test-rdma"]
fn memory_of_an_accelerator_is_staged_where_the_device_takes_neither_a_dmabuf_nor_its_address() {
    let runtime = gpu::runtime_of(Platform::Rocm).expect("the double");
    assert!(runtime.simulated());
    let length = 20 * MIB + 17;
    let stream = Stream::new(runtime, 0).expect("a stream");
    let on_device = |seed: Option<u8>| {
        let kind = MemoryKind::Device { ordinal: 0 };
        let mut memory = gpu::Memory::new(runtime, kind, length).expect("room");
        if let Some(seed) = seed {
            memory.write(0, bytes(&filled(length, seed)), &stream, LIMIT).expect("a copy");
        }
        Arc::new(memory)
    };
    let range = |memory: &Arc<gpu::Memory>| {
        let segment = Segment { address: memory.address() as usize, length };
        // SAFETY: an allocation of the runtime, which lives as long as its owner.
        unsafe { Memory::of_device(runtime, [segment], Arc::clone(memory)) }.expect("a range")
    };
    let holds = |memory: &Arc<gpu::Memory>, seed| {
        let mut found = vec![0; length];
        memory.read(0, &mut found, &stream, LIMIT).expect("a copy");
        same(&found, seed)
    };

    let (theirs, mine) = (on_device(Some(1)), on_device(None));
    let fabric = Fabric::open(address()).expect("a device");
    // SAFETY: as above.
    let (region, placement) =
        unsafe { Region::device(&fabric, runtime, range(&theirs).segments()[0], Rights::RemoteRead) };
    assert!(region.is_none(), "{placement}");
    assert_eq!(placement.way, Way::Staging);
    let [(Way::Dmabuf, dmabuf), (Way::PeerMemory, peer)] = &placement.refused[..] else {
        panic!("{placement}");
    };
    assert!(dmabuf.contains("os error 95"), "the device has no dmabufs: {dmabuf}");
    assert!(peer.contains("os error 14"), "the kernel finds no pages there: {peer}");

    let (owner, requester) = (domain(), domain());
    let handle = owner.register(range(&theirs), Access::ReadWrite, 1).expect("room");
    for path in [PathKind::Verbs, PathKind::Tcp] {
        let report = requester.read_into(std::slice::from_ref(&handle), 0, &range(&mine), &by(Some(path)));
        assert_eq!(path_of(&report.expect("read")), Some(path));
        assert!(holds(&mine, if path == PathKind::Verbs { 1 } else { 9 }), "{path}: read");
        let seed = if path == PathKind::Verbs { 9 } else { 4 };
        let other = on_device(Some(seed));
        let report = requester.write_from(&handle, 0, &range(&other), &by(Some(path)));
        assert_eq!(path_of(&report.expect("written")), Some(path));
        assert!(holds(&theirs, seed), "{path}: written");
    }
    let cma = requester.read_into(&[handle], 0, &range(&mine), &by(Some(PathKind::Cma)));
    assert_eq!(cma.expect_err("no host can follow its address").kind(), ErrorKind::Io);
}
