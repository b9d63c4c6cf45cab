//! A reliable connected queue pair: from nothing to ready, what is posted on it, and its end.
//!
//! ```text
//!  new ─▶ INIT ── join(peer's end) ─▶ RTR ─▶ RTS ── transfer ─▶ RTS
//!                                              └─ anything fails ─▶ destroyed: it is made anew at the next use
//! ```

use std::ffi::c_int;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Instant;

use rand::Rng;

use super::endpoint::Endpoint;
use super::fabric::{Fabric, errno, failed};
use super::fragments::Fragment;
use super::outcome::{self, Failure};
use super::port::Layer;
use crate::gpu::abi::verbs::{
    Access, AttributeMask, Completion, CompletionChannel, CompletionQueue, CompletionStatus, QUEUE_PAIR_RC,
    QueuePair, QueuePairAttributes, QueuePairInit, QueuePairState, SEND_SIGNALED, ScatterGather, SendRequest,
    WorkOpcode,
};
use crate::gpu::table::verbs::{poll_cq, post_send, request_notice};
use crate::{Error, ErrorKind, Result};

/// Requests under way at a time: enough to fill a link, and a bound of what is lost.
const DEPTH: u32 = 16;
/// 4.096 us * 2^16 = 268 ms; seven times that are the 2 s after which a peer is given up on every other way, too.
const TIMEOUT: u8 = 16;
/// Not 7: rdma_rxe takes that for "without an end", and a dead peer is then waited for until the deadline.
const RETRIES: u8 = 6;
/// 0.64 ms, where the peer's queue is not ready: never, without receives.
const NOT_READY_TIMER: u8 = 12;
const HOPS: u8 = 255;

const CONNECT: &str = "connect a queue pair";

/// What is to be done to a range of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdma) enum Direction {
    /// Read from it.
    FromThem,
    /// Write to it.
    ToThem,
}

/// One queue pair with a completion queue of its own.
pub(in crate::rdma) struct Pair {
    raw: *mut QueuePair,
    queue: *mut CompletionQueue,
    channel: *mut CompletionChannel,
    fabric: Arc<Fabric>,
    sequence: u32,
    depth: u32,
}

// SAFETY: one thread at a time uses it, and the library does not mind which.
unsafe impl Send for Pair {}

impl Drop for Pair {
    fn drop(&mut self) {
        let table = &self.fabric.verbs.table;
        // SAFETY: made by us, in this order, and each destroyed once. After the queue pair's end the device touches no
        // memory because of it any more, neither ours nor, for a peer, what we have registered.
        let codes = unsafe {
            [
                if self.raw.is_null() { 0 } else { (table.destroy_qp)(self.raw) },
                if self.queue.is_null() { 0 } else { (table.destroy_cq)(self.queue) },
                if self.channel.is_null() { 0 } else { (table.destroy_comp_channel)(self.channel) },
            ]
        };
        if codes != [0; 3] {
            tracing::warn!(?codes, "a queue pair was not destroyed");
        }
    }
}

impl Pair {
    /// A fresh one, that nobody can reach yet.
    pub(in crate::rdma) fn new(fabric: &Arc<Fabric>) -> Result<Self> {
        let table = &fabric.verbs.table;
        let depth = DEPTH.min(fabric.max_requests);
        let sequence = rand::rng().random::<u32>() >> 8;
        let mut pair = Self {
            raw: std::ptr::null_mut(),
            queue: std::ptr::null_mut(),
            channel: std::ptr::null_mut(),
            fabric: Arc::clone(fabric),
            sequence,
            depth,
        };
        let no = |what: &str| failed(CONNECT, &format!("no {what} on {}", fabric.device), errno());
        // SAFETY: the device is open.
        pair.channel = unsafe { (table.create_comp_channel)(fabric.context) };
        if pair.channel.is_null() {
            return Err(no("completion channel"));
        }
        // SAFETY: the channel is alive, and its descriptor is its own.
        let nonblocking = unsafe {
            let fd = (*pair.channel).fd;
            let flags = libc::fcntl(fd, libc::F_GETFL);
            libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK)
        };
        if nonblocking != 0 {
            return Err(no("completion channel that does not block"));
        }
        // One more for the receives that are never posted.
        let entries = (depth + 1) as c_int;
        // SAFETY: the device is open and the channel alive.
        pair.queue =
            unsafe { (table.create_cq)(fabric.context, entries, std::ptr::null_mut(), pair.channel, 0) };
        if pair.queue.is_null() {
            return Err(no("completion queue"));
        }
        // SAFETY: pointers and numbers, for which zero is a value.
        let mut wanted: QueuePairInit = unsafe { std::mem::zeroed() };
        wanted.send_cq = pair.queue;
        wanted.recv_cq = pair.queue;
        wanted.qp_type = QUEUE_PAIR_RC;
        wanted.cap.max_send_wr = depth;
        wanted.cap.max_recv_wr = 1;
        wanted.cap.max_send_sge = 1;
        wanted.cap.max_recv_sge = 1;
        // SAFETY: all that it names is alive.
        pair.raw = unsafe { (table.create_qp)(fabric.domain, &mut wanted) };
        if pair.raw.is_null() {
            return Err(no("queue pair"));
        }
        pair.modify(QueuePairState::INIT, "INIT", |to| {
            to.port_num = fabric.port;
            to.qp_access_flags = Access::REMOTE_READ.0 | Access::REMOTE_WRITE.0;
            &[AttributeMask::PKEY_INDEX, AttributeMask::PORT, AttributeMask::ACCESS_FLAGS]
        })?;
        Ok(pair)
    }

    /// What the peer has to know.
    pub(in crate::rdma) fn end(&self) -> Endpoint {
        Endpoint {
            layer: self.fabric.layer,
            mtu: self.fabric.mtu,
            reads: self.fabric.reads.0,
            // SAFETY: alive.
            number: unsafe { (*self.raw).qp_num },
            sequence: self.sequence,
            lid: self.fabric.lid,
            gid: self.fabric.gid.gid,
        }
    }

    /// Makes it ready to talk to the peer's end, and to be talked to.
    ///
    /// [`ErrorKind::Io`] where the two are on different fabrics, [`ErrorKind::Device`] where the device says no.
    pub(in crate::rdma) fn join(&mut self, peer: &Endpoint) -> Result<()> {
        self.end().shares_a_fabric(peer)?;
        let (fabric, sequence) = (Arc::clone(&self.fabric), self.sequence);
        self.modify(QueuePairState::READY_TO_RECEIVE, "RTR", |to| {
            to.path_mtu = u32::from(fabric.mtu.min(peer.mtu));
            to.dest_qp_num = peer.number;
            to.rq_psn = peer.sequence;
            to.max_dest_rd_atomic = fabric.reads.0;
            to.min_rnr_timer = NOT_READY_TIMER;
            to.ah_attr.port_num = fabric.port;
            to.ah_attr.dlid = peer.lid;
            if fabric.layer == Layer::Ethernet {
                to.ah_attr.is_global = 1;
                to.ah_attr.grh.dgid.raw = peer.gid;
                // The choice looks at 256 entries.
                to.ah_attr.grh.sgid_index = fabric.gid.index as u8;
                to.ah_attr.grh.hop_limit = HOPS;
            }
            &[
                AttributeMask::AV,
                AttributeMask::PATH_MTU,
                AttributeMask::DEST_QPN,
                AttributeMask::RQ_PSN,
                AttributeMask::MAX_DEST_RD_ATOMIC,
                AttributeMask::MIN_RNR_TIMER,
            ]
        })?;
        self.modify(QueuePairState::READY_TO_SEND, "RTS", |to| {
            to.sq_psn = sequence;
            to.timeout = TIMEOUT;
            to.retry_cnt = RETRIES;
            to.rnr_retry = RETRIES;
            to.max_rd_atomic = fabric.reads.1.min(peer.reads).max(1);
            &[
                AttributeMask::SQ_PSN,
                AttributeMask::TIMEOUT,
                AttributeMask::RETRY_COUNT,
                AttributeMask::RNR_RETRY,
                AttributeMask::MAX_QP_RD_ATOMIC,
            ]
        })
    }

    fn modify(
        &mut self,
        state: QueuePairState,
        name: &str,
        fill: impl FnOnce(&mut QueuePairAttributes) -> &'static [AttributeMask],
    ) -> Result<()> {
        // SAFETY: numbers, for which zero is a value.
        let mut to: QueuePairAttributes = unsafe { std::mem::zeroed() };
        to.qp_state = state;
        let mask = fill(&mut to).iter().fold(AttributeMask::STATE.0, |mask, bit| mask | bit.0);
        // SAFETY: alive.
        let code = unsafe { (self.fabric.verbs.table.modify_qp)(self.raw, &mut to, mask as c_int) };
        if code != 0 {
            return Err(failed(CONNECT, &format!("{} does not go to {name}", self.fabric.device), code));
        }
        Ok(())
    }

    /// Largest message.
    pub(super) fn max_message(&self) -> u32 {
        self.fabric.max_message
    }

    /// Moves all of `fragments`; `done` hears of each that is, in order.
    ///
    /// Ends with the first failure: the queue pair is then in error, and to be dropped before anything of `fragments` is
    /// freed. `peer` is a connection to the owner, whose end ends the wait, too.
    ///
    /// # Safety
    /// What is mine of `fragments` must be registered, and stay so until this is done or the pair is dropped.
    pub(super) unsafe fn transfer(
        &mut self,
        direction: Direction,
        fragments: &[Fragment],
        peer: RawFd,
        deadline: Instant,
        mut done: impl FnMut(&Fragment),
    ) -> Result<(), Failure> {
        let (mut posted, mut completed) = (0, 0);
        while completed < fragments.len() {
            while posted < fragments.len() && posted - completed < self.depth as usize {
                // SAFETY: as the caller promises.
                unsafe { self.post(direction, &fragments[posted], posted as u64)? };
                posted += 1;
            }
            for completion in self.completions(peer, deadline)? {
                if let Some(failure) = outcome::failure(completion.status, &self.text(completion.status)) {
                    return Err(failure);
                }
                // A queue pair of this kind does what it was asked in order.
                done(&fragments[completed]);
                completed += 1;
            }
        }
        Ok(())
    }

    unsafe fn post(&mut self, direction: Direction, one: &Fragment, id: u64) -> Result<(), Failure> {
        let mut local = ScatterGather {
            addr: one.mine.segment.address as u64,
            // No longer than a message.
            length: one.mine.segment.length as u32,
            lkey: one.mine.key,
        };
        // SAFETY: pointers and numbers, for which zero is a value.
        let mut request: SendRequest = unsafe { std::mem::zeroed() };
        request.wr_id = id;
        request.sg_list = &raw mut local;
        request.num_sge = 1;
        request.opcode = match direction {
            Direction::FromThem => WorkOpcode::RDMA_READ,
            Direction::ToThem => WorkOpcode::RDMA_WRITE,
        };
        request.send_flags = SEND_SIGNALED;
        request.remote_addr = one.their_address as u64;
        request.rkey = one.their_key;
        // SAFETY: the pair is alive, the request is copied, and what it names is as the caller promises.
        unsafe { post_send(self.raw, &mut request) }.map_err(|errno| {
            let error = std::io::Error::from_raw_os_error(errno);
            Failure::of_fabric(ErrorKind::Io, format!("the device does not take a request: {error}"))
        })
    }

    /// At least one completion, waited for.
    fn completions(&mut self, peer: RawFd, deadline: Instant) -> Result<Vec<Completion>, Failure> {
        loop {
            let found = self.polled()?;
            if !found.is_empty() {
                return Ok(found);
            }
            // SAFETY: alive.
            unsafe { request_notice(self.queue) }.map_err(device)?;
            // What came before it was armed makes no noise.
            let found = self.polled()?;
            if !found.is_empty() {
                return Ok(found);
            }
            self.wait(peer, deadline)?;
        }
    }

    fn polled(&mut self) -> Result<Vec<Completion>, Failure> {
        // SAFETY: numbers, for which zero is a value.
        let mut found = [unsafe { std::mem::zeroed::<Completion>() }; DEPTH as usize];
        // SAFETY: alive.
        let count = unsafe { poll_cq(self.queue, &mut found) }.map_err(device)?;
        Ok(found[..count].to_vec())
    }

    /// Until the channel has something, the peer hangs up, or the deadline is over.
    fn wait(&mut self, peer: RawFd, deadline: Instant) -> Result<(), Failure> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::new(ErrorKind::TimedOut, outcome::MOVE, "the deadline has passed").into());
        }
        // SAFETY: alive.
        let channel = unsafe { (*self.channel).fd };
        let mut watched = [
            libc::pollfd { fd: channel, events: libc::POLLIN, revents: 0 },
            libc::pollfd { fd: peer, events: libc::POLLRDHUP, revents: 0 },
        ];
        let limit = c_int::try_from(left.as_millis()).unwrap_or(c_int::MAX).max(1);
        // SAFETY: two entries.
        let ready = unsafe { libc::poll(watched.as_mut_ptr(), 2, limit) };
        if ready < 0 && errno() != libc::EINTR {
            return Err(device(errno()));
        }
        if watched[0].revents & libc::POLLIN != 0 {
            let (mut queue, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: both are alive; an event is acknowledged as soon as it is had, so none is when they end.
            unsafe {
                let table = &self.fabric.verbs.table;
                if (table.get_cq_event)(self.channel, &mut queue, &mut context) == 0 {
                    (table.ack_cq_events)(queue, 1);
                }
            }
        } else if watched[1].revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0 {
            return Err(Error::new(ErrorKind::Closed, outcome::MOVE, "the peer hung up").into());
        }
        Ok(())
    }

    fn text(&self, status: CompletionStatus) -> String {
        // SAFETY: takes any number.
        let text = unsafe { (self.fabric.verbs.table.completion_text)(status.0) };
        if text.is_null() {
            return String::new();
        }
        // SAFETY: a constant of the library.
        unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

fn device(errno: c_int) -> Failure {
    let error = std::io::Error::from_raw_os_error(errno.abs());
    Failure::of_fabric(ErrorKind::Io, format!("the device failed: {error}"))
}
