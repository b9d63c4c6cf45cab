//! A rank's end of a communicator.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::bounded::{Looks, or_end};
use super::buffer::{Buffer, fits};
use super::pending::Keep;
use super::shared::{Failure, Handle, Options, Shared, overdue};
use super::watcher;
use crate::gpu::abi::ccl::{CclResult, CommunicatorHandle, Config, DataType, ReduceOp, UniqueId};
use crate::gpu::abi::device::StreamHandle;
use crate::gpu::table::ccl::{Ccl, CclTable};
use crate::gpu::{ErrorClass, GpuError, GpuResult, GpuRuntime, Platform};

/// One direction between two ranks.
#[derive(Clone, Copy, Debug)]
pub enum Transfer {
    /// To another rank.
    Send {
        /// Which.
        to: u32,
        /// What.
        from: Buffer,
    },
    /// From another rank, which sends as many bytes.
    Receive {
        /// Which.
        from: u32,
        /// Where to.
        into: Buffer,
    },
}

/// A new id, which one rank makes and all ranks start with. Secret: who has it and reaches these hosts can join.
///
/// # Errors
/// Where the platform has no library of this kind, or that finds no network interface.
pub fn unique_id(platform: Platform) -> GpuResult<[u8; 128]> {
    let ccl = Ccl::of(platform).map_err(again)?;
    let mut id = UniqueId { internal: [0; 128] };
    // SAFETY: writes the id.
    match unsafe { (ccl.table.get_unique_id)(&mut id) } {
        CclResult::SUCCESS => Ok(id.internal),
        code => Err(GpuError::Ccl { api: "ncclGetUniqueId", code, text: ccl.text_of(code), starting: true }),
    }
}

/// An error that stays with the library, once more.
fn again(error: &GpuError) -> GpuError {
    GpuError::Unsupported { what: "a communicator", why: error.to_string() }
}

/// A rank's end of a communicator. To drop it is to abort it.
pub struct Communicator {
    shared: Arc<Shared>,
    /// One call at a time.
    turn: Mutex<()>,
    watcher: Option<JoinHandle<()>>,
    rank: u32,
    ranks: u32,
}

impl Communicator {
    /// Join as `rank` of `ranks` with the device `ordinal`; returns once all have come.
    ///
    /// # Errors
    /// [`ErrorClass::Retryable`] where not all came in time, or one of them failed: with another id it may succeed. Others
    /// where there is no library or no such device.
    pub fn start(
        runtime: &'static dyn GpuRuntime,
        ordinal: u32,
        id: &[u8],
        (rank, ranks): (u32, u32),
        options: Options,
    ) -> GpuResult<Self> {
        let internal: [u8; 128] =
            id.try_into().map_err(|_| GpuError::Invalid(format!("an id of {} bytes, not 128", id.len())))?;
        let number = |value| c_int::try_from(value).map_err(|_| GpuError::Invalid(format!("rank {value}")));
        let (own, all) = (number(rank)?, number(ranks)?);
        if rank >= ranks {
            return Err(GpuError::Invalid(format!("rank {rank} of {ranks}")));
        }
        let ccl = Ccl::of(runtime.platform()).map_err(again)?;
        let api = "ncclCommInitRankConfig";
        let mut config = Config::non_blocking(ccl.version);
        let mut handle = std::ptr::null_mut();
        let mut returned = CclResult::INTERNAL_ERROR;
        runtime.on_device(ordinal, &mut || {
            let id = UniqueId { internal };
            // SAFETY: all of it lives as long as the call, which copies the configuration.
            returned = unsafe { (ccl.table.comm_init_rank_config)(&mut handle, all, id, own, &mut config) };
        })?;
        if handle.is_null() {
            return Err(GpuError::Ccl { api, code: returned, text: ccl.text_of(returned), starting: true });
        }
        let shared = Arc::new(Shared::new(ccl, (runtime, ordinal), options, handle));
        shared.through(api, returned, options.start_limit, true).map_err(|error| shared.fail(error))?;
        let watched = Arc::clone(&shared);
        let watcher = std::thread::Builder::new()
            .name("communicator".into())
            .spawn(move || watcher::watch(&watched))
            .map_err(|cause| {
                shared.fail(GpuError::Invalid(format!("no thread for a communicator: {cause}")))
            })?;
        Ok(Self { shared, turn: Mutex::new(()), watcher: Some(watcher), rank, ranks })
    }

    /// Which one this is.
    pub const fn rank(&self) -> u32 {
        self.rank
    }

    /// How many there are.
    pub const fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Why it is over; none while it is not.
    pub fn failure(&self) -> Option<GpuError> {
        let state = self.shared.state();
        state.handle.is_none().then(|| Shared::lost(&state))
    }

    /// Reduce what all ranks send; each receives the result. In place where both are the same.
    ///
    /// # Errors
    /// What cannot be used is refused before the library is called; [`GpuError::Lost`] where the communicator is over, or
    /// is so by this.
    ///
    /// # Safety
    /// Here and below: the memory lives until the stream has done it, as `keep` sees to it; nobody else uses it before. The
    /// stream is the runtime's, of this device, and alive.
    pub unsafe fn all_reduce(
        &self,
        (send, receive): (Buffer, Buffer),
        dtype: DataType,
        op: ReduceOp,
        stream: StreamHandle,
        keep: Keep,
    ) -> GpuResult<()> {
        let count = self.checked(&[send, receive], dtype)?;
        fits(receive, send, 1, "what receives")?;
        // SAFETY: of the caller.
        unsafe {
            self.submit("an all_reduce", "ncclAllReduce", stream, keep, |ccl, comm| {
                (ccl.all_reduce)(at(send), at(receive), count, dtype, op, comm, stream)
            })
        }
    }

    /// Send what rank `root` has to all.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    ///
    /// # Safety
    /// As [`Self::all_reduce`].
    pub unsafe fn broadcast(
        &self,
        (send, receive): (Buffer, Buffer),
        dtype: DataType,
        root: u32,
        stream: StreamHandle,
        keep: Keep,
    ) -> GpuResult<()> {
        let count = self.checked(&[send, receive], dtype)?;
        fits(receive, send, 1, "what receives")?;
        let root = self.rank_number(root)?;
        // SAFETY: of the caller.
        unsafe {
            self.submit("a broadcast", "ncclBroadcast", stream, keep, |ccl, comm| {
                (ccl.broadcast)(at(send), at(receive), count, dtype, root, comm, stream)
            })
        }
    }

    /// Receive what all ranks send, in their order.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    ///
    /// # Safety
    /// As [`Self::all_reduce`].
    pub unsafe fn all_gather(
        &self,
        (send, receive): (Buffer, Buffer),
        dtype: DataType,
        stream: StreamHandle,
        keep: Keep,
    ) -> GpuResult<()> {
        let count = self.checked(&[send, receive], dtype)?;
        fits(receive, send, self.ranks as usize, "what receives")?;
        // SAFETY: of the caller.
        unsafe {
            self.submit("an all_gather", "ncclAllGather", stream, keep, |ccl, comm| {
                (ccl.all_gather)(at(send), at(receive), count, dtype, comm, stream)
            })
        }
    }

    /// Reduce what all ranks send; each receives its part of the result.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    ///
    /// # Safety
    /// As [`Self::all_reduce`].
    pub unsafe fn reduce_scatter(
        &self,
        (send, receive): (Buffer, Buffer),
        dtype: DataType,
        op: ReduceOp,
        stream: StreamHandle,
        keep: Keep,
    ) -> GpuResult<()> {
        self.checked(&[send, receive], dtype)?;
        let count = receive.count(dtype)?;
        fits(send, receive, self.ranks as usize, "what is sent")?;
        // SAFETY: of the caller.
        unsafe {
            self.submit("a reduce_scatter", "ncclReduceScatter", stream, keep, |ccl, comm| {
                (ccl.reduce_scatter)(at(send), at(receive), count, dtype, op, comm, stream)
            })
        }
    }

    /// Send to and receive from other ranks, all at once: none of it waits for another.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    ///
    /// # Safety
    /// As [`Self::all_reduce`].
    pub unsafe fn exchange(&self, transfers: &[Transfer], stream: StreamHandle, keep: Keep) -> GpuResult<()> {
        for transfer in transfers {
            let (Transfer::Send { to: peer, from: buffer } | Transfer::Receive { from: peer, into: buffer }) =
                *transfer;
            self.rank_number(peer)?;
            self.checked(&[buffer], DataType::UINT8)?;
        }
        if transfers.is_empty() {
            return Ok(());
        }
        // SAFETY: of the caller. A group that was begun is ended whatever its calls return.
        unsafe {
            self.submit("a send or receive", "ncclGroupEnd", stream, keep, |ccl, comm| {
                let begun = (ccl.group_start)();
                if begun != CclResult::SUCCESS {
                    return begun;
                }
                let failed = transfers.iter().find_map(|transfer| {
                    let returned = match *transfer {
                        Transfer::Send { to, from } => {
                            (ccl.send)(at(from), from.bytes, DataType::UINT8, to as c_int, comm, stream)
                        }
                        Transfer::Receive { from, into } => {
                            (ccl.recv)(at(into), into.bytes, DataType::UINT8, from as c_int, comm, stream)
                        }
                    };
                    (!matches!(returned, CclResult::SUCCESS | CclResult::IN_PROGRESS)).then_some(returned)
                });
                let ended = (ccl.group_end)();
                failed.unwrap_or(ended)
            })
        }
    }

    /// Wait until a stream has done all that was put on it.
    ///
    /// # Errors
    /// [`GpuError::Lost`]: the communicator is over, or not even this limit was enough and it is so now. What was on the
    /// stream is then off it, done or not.
    ///
    /// # Safety
    /// The stream is the runtime's, and alive.
    pub unsafe fn wait(&self, stream: StreamHandle, limit: Duration) -> GpuResult<()> {
        let mut looks = Looks::new();
        loop {
            if self.shared.state().handle.is_none() {
                self.abort(); // waits until nothing of it is left
                return Err(Shared::lost(&self.shared.state()));
            }
            // SAFETY: of the caller.
            match unsafe { self.shared.runtime.stream_idle(stream) } {
                Ok(true) => {
                    // A stream that an abort of another thread has freed is idle, too.
                    let over = self.failure();
                    return over.map_or(Ok(()), Err);
                }
                Ok(false) => {}
                Err(error) => return Err(self.shared.fail(error)),
            }
            if looks.elapsed() >= limit {
                let what = self.shared.state().pending.oldest().map_or("a stream", |(what, _)| what);
                return Err(self.shared.fail(overdue(what, limit)));
            }
            looks.pause();
        }
    }

    /// End it for all ranks: whoever is at something with this one has an error. Does nothing where it is over.
    pub fn abort(&self) {
        let why = "it was aborted".into();
        self.shared.abort(Failure { why, class: ErrorClass::CommunicatorFatal });
    }

    /// End it in order, which every rank has to do: what is under way is finished before.
    ///
    /// # Errors
    /// As [`Self::wait`]; it is aborted then.
    pub fn close(self, limit: Duration) -> GpuResult<()> {
        let begun = Instant::now();
        let mut looks = Looks::new();
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let mut state = self.shared.state();
            if state.handle.is_none() {
                return Err(Shared::lost(&state));
            }
            let settled = state.pending.settle();
            let oldest = state.pending.oldest();
            drop(state);
            match (settled, oldest) {
                (Err(error), _) => return Err(self.shared.fail(error)),
                (Ok(()), None) => break,
                (Ok(()), Some((what, _))) if begun.elapsed() >= limit => {
                    return Err(self.shared.fail(overdue(what, limit)));
                }
                _ => looks.pause(),
            }
        }
        let Handle(handle) = self.shared.handle()?;
        // SAFETY: alive; this thread has the turn.
        let returned = unsafe { (self.shared.ccl.table.comm_finalize)(handle) };
        let left = limit.saturating_sub(begun.elapsed());
        self.shared
            .through("ncclCommFinalize", returned, left, false)
            .map_err(|error| self.shared.fail(error))?;
        let Some(handle) = self.shared.state().handle.take() else { return Ok(()) };
        let destroy = self.shared.ccl.table.comm_destroy;
        or_end("the end of a communicator", self.shared.options.abort_limit, move || {
            let Handle(handle) = { handle };
            // SAFETY: taken: nobody calls with it any more.
            unsafe { destroy(handle) }
        });
        self.shared.set_over();
        drop(turn);
        Ok(())
    }

    fn rank_number(&self, rank: u32) -> GpuResult<c_int> {
        if rank < self.ranks {
            return Ok(rank as c_int);
        }
        Err(GpuError::Invalid(format!("rank {rank} of a communicator of {}", self.ranks)))
    }

    /// How many elements the first buffer holds, where all are good.
    fn checked(&self, buffers: &[Buffer], dtype: DataType) -> GpuResult<usize> {
        let mut count = None;
        for buffer in buffers {
            let own = buffer.count(dtype)?;
            buffer.is_on(self.shared.runtime, self.shared.ordinal)?;
            count.get_or_insert(own);
        }
        Ok(count.unwrap_or(0))
    }

    /// Call the library, wait until the call is through, and mark what it put on the stream.
    ///
    /// # Safety
    /// Of the one who calls a collective.
    unsafe fn submit(
        &self,
        what: &'static str,
        api: &'static str,
        stream: StreamHandle,
        keep: Keep,
        call: impl FnOnce(&CclTable, CommunicatorHandle) -> CclResult,
    ) -> GpuResult<()> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let mut looks = Looks::new();
        let Handle(handle) = loop {
            let mut state = self.shared.state();
            if !state.pending.is_full() {
                let handle = state.handle.ok_or_else(|| Shared::lost(&state))?;
                state.calling = Some((what, Instant::now()));
                break handle;
            }
            // The watcher ends it where that does not become less.
            drop(state);
            looks.pause();
        };
        let returned = call(&self.shared.ccl.table, handle);
        let through = self.shared.through(api, returned, self.shared.options.operation_limit, false);
        let mut state = self.shared.state();
        state.calling = None;
        // Also where it failed: a part of it may be on the stream.
        let on = (self.shared.runtime, self.shared.ordinal);
        // SAFETY: of the caller.
        let marked = unsafe { state.pending.put(what, on, stream, keep) };
        drop(state);
        through.and(marked).map_err(|error| self.shared.fail(error))
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.abort();
        if let Some(watcher) = self.watcher.take() {
            // It ends with the communicator. A panic of it has been printed.
            let _panicked = watcher.join();
        }
    }
}

fn at(buffer: Buffer) -> *mut c_void {
    buffer.address as *mut c_void
}
