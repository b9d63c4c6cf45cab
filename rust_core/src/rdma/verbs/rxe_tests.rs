//! On a real device. `make test-rdma` runs these in virtual machines whose kernel has `rdma_rxe`: RoCE v2 in software.

use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::domain::{Domain, Limits};
use super::super::gather::{Options, Report};
use super::super::handle::{Access, Handle};
use super::super::memory::{self, Memory, Segment};
use super::super::path::PathKind;
use super::super::shm::allocate;
use super::fragments::{Keyed, fragments};
use super::outcome::Failure;
use super::owner::regions;
use super::pair::{Direction, Pair};
use super::region::{Region, Registered, Rights};
use super::{Fabric, Way};
use crate::{Error, ErrorKind};

mod one_guest;
mod two_guests;

const SECRET: &str = "the secret of the virtual machines";
const MIB: usize = 1 << 20;
const LIMIT: Duration = Duration::from_secs(120);

/// Where this guest is reached.
fn address() -> IpAddr {
    let address = std::env::var("SKY_MONARCH_TEST_RDMA_ADDRESS").expect("`make test-rdma` runs this");
    address.parse().expect("numeric")
}

fn domain() -> Domain {
    Domain::open(address(), SECRET, Limits::default()).expect("an address of this guest")
}

/// Bytes in which each place can be told from its neighbours, over and over.
fn block(seed: u8) -> Vec<u8> {
    (0..65_521u32).map(|at| (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8) ^ seed).collect()
}

fn bytes(memory: &Memory) -> &[u8] {
    // SAFETY: one segment, alive as long as `memory`; only the transfers that are waited for change it.
    unsafe { memory::bytes(memory.segments()[0]) }
}

fn empty(length: usize) -> Memory {
    allocate(length).expect("room")
}

fn filled(length: usize, seed: u8) -> Memory {
    let (memory, block) = (empty(length), block(seed));
    let at = memory.segments()[0].address as *mut u8;
    for from in (0..length).step_by(block.len()) {
        // SAFETY: inside of what was just allocated.
        unsafe {
            std::ptr::copy_nonoverlapping(block.as_ptr(), at.add(from), block.len().min(length - from))
        };
    }
    memory
}

fn same(found: &[u8], seed: u8) -> bool {
    let block = block(seed);
    found.chunks(block.len()).all(|part| *part == block[..part.len()])
}

/// One stream: these machines are slow, and each piece has a limit of its own.
fn by(path: Option<PathKind>) -> Options {
    Options { path, streams: Some(1), ..Options::new(LIMIT) }
}

fn over_verbs() -> Options {
    by(Some(PathKind::Verbs))
}

fn path_of(report: &Report) -> Option<PathKind> {
    report.owners[0].path
}

/// Until `found` has something, which comes within seconds.
fn awaited<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + LIMIT;
    loop {
        if let Some(one) = found() {
            return one;
        }
        assert!(Instant::now() < until, "{what} does not come");
        std::thread::sleep(Duration::from_millis(20));
    }
}
