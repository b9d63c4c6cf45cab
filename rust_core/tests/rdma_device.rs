//! Memory of an accelerator that others read and write, on the software double: nothing of the host can follow its
//! addresses. `make test-rdma` has the same over RDMA.

#[path = "support/doubles.rs"]
mod doubles;

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use sky_monarch_core::ErrorKind;
use sky_monarch_core::gpu::{self, MemoryKind, Platform, Stream};
use sky_monarch_core::rdma::{Access, Domain, Limits, Memory, Options, PathKind, Segment, allocate};

const LIMIT: Duration = Duration::from_secs(30);
/// More than is staged at a time.
const LENGTH: usize = (16 << 20) + 17;

/// A process opens its libraries once, and this one is not to have the double.
#[test]
fn memory_of_an_accelerator_goes_through_the_host_and_is_never_followed() {
    let done = Command::new(std::env::current_exe().expect("a path"))
        .args(["--exact", "scenario", "--ignored"])
        .env("SKY_MONARCH_TEST_SIMULATED_GPU", "1")
        .env("SKY_MONARCH_HIP_LIB", doubles::hip())
        .output()
        .expect("it starts");
    let said = String::from_utf8_lossy(&done.stdout) + String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "started by another test"]
fn scenario() {
    let runtime = gpu::runtime_of(Platform::Rocm).expect("the double");
    let stream = Stream::new(runtime, 0).expect("a stream");
    let pattern = |seed: u8| (0..LENGTH).map(move |at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ seed);
    let pattern = |seed| pattern(seed).collect::<Vec<u8>>();
    let on_device = |content: &[u8]| {
        let kind = MemoryKind::Device { ordinal: 0 };
        let mut memory = gpu::Memory::new(runtime, kind, LENGTH).expect("room");
        memory.write(0, content, &stream, LIMIT).expect("a copy");
        Arc::new(memory)
    };
    let content = |memory: &gpu::Memory| {
        let mut found = vec![0; LENGTH];
        memory.read(0, &mut found, &stream, LIMIT).expect("a copy");
        found
    };
    let range = |memory: &Arc<gpu::Memory>| {
        let segment = Segment { address: memory.address() as usize, length: LENGTH };
        // SAFETY: an allocation of the runtime, which lives as long as its owner.
        unsafe { Memory::of_device(runtime, [segment], Arc::clone(memory)) }.expect("a range")
    };
    let open = || Domain::open([127, 0, 0, 1].into(), "the secret", Limits::default()).expect("a domain");
    let (owner, requester) = (open(), open());
    let (theirs, mine) = (on_device(&pattern(1)), on_device(&pattern(0)));
    let handle = owner.register(range(&theirs), Access::ReadWrite, 1).expect("room");

    let best = Options::new(LIMIT);
    let report = requester.read_into(std::slice::from_ref(&handle), 0, &range(&mine), &best).expect("read");
    assert_eq!(report.owners[0].path, Some(PathKind::Tcp), "the same host, and still");
    assert!(content(&mine) == pattern(1), "from device to device, checked on the way");
    requester.write_from(&handle, 0, &range(&on_device(&pattern(2))), &best).expect("written");
    assert!(content(&theirs) == pattern(2));

    // A part of it, to memory of the host and back.
    let host = allocate(1000).expect("room");
    requester.read_into(std::slice::from_ref(&handle), 77, &host, &best).expect("read");
    requester.write_from(&handle, 5, &host, &best).expect("written");
    assert!(content(&theirs)[5..1005] == pattern(2)[77..1077]);
    let outside = requester.read_into(std::slice::from_ref(&handle), LENGTH as u64 - 1, &host, &best);
    assert_eq!(outside.expect_err("outside").kind(), ErrorKind::OutOfBounds);
    for path in [PathKind::Cma, PathKind::Shm] {
        let options = Options { path: Some(path), ..Options::new(LIMIT) };
        let refused = requester.read_into(std::slice::from_ref(&handle), 0, &host, &options);
        assert_eq!(refused.expect_err("its address is none of the host's").kind(), ErrorKind::Io, "{path}");
    }
}
