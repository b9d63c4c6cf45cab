//! Entries of libibverbs. What is fast is not exported: see [`crate::gpu::abi::verbs::ContextOps`].

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use crate::gpu::abi::verbs::{
    Completion, CompletionChannel, CompletionQueue, Context, DeviceAttributes, DeviceObject, Gid, GidEntry,
    MemoryRegion, PortAttributes, ProtectionDomain, QueuePair, QueuePairAttributes, QueuePairInit,
    SendRequest,
};
use crate::gpu::error::{GpuError, GpuResult};
use crate::gpu::library::{Library, Names};

/// rdma-core's.
pub const VERBS_LIBRARY: Names = Names {
    purpose: "RDMA verbs",
    stem: "libibverbs",
    sonames: &["libibverbs.so.1"],
    override_env: "SKY_MONARCH_IBVERBS_LIB",
    home_envs: &[],
};

vendor_table! {
    /// libibverbs.
    pub struct VerbsTable {
        required {
            get_device_list ["ibv_get_device_list"]: fn(*mut c_int) -> *mut *mut DeviceObject;
            free_device_list ["ibv_free_device_list"]: fn(*mut *mut DeviceObject);
            get_device_name ["ibv_get_device_name"]: fn(*mut DeviceObject) -> *const c_char;
            open_device ["ibv_open_device"]: fn(*mut DeviceObject) -> *mut Context;
            close_device ["ibv_close_device"]: fn(*mut Context) -> c_int;
            query_device ["ibv_query_device"]: fn(*mut Context, *mut DeviceAttributes) -> c_int;
            query_port ["ibv_query_port"]: fn(*mut Context, u8, *mut PortAttributes) -> c_int;
            query_gid ["ibv_query_gid"]: fn(*mut Context, u8, c_int, *mut Gid) -> c_int;
            alloc_pd ["ibv_alloc_pd"]: fn(*mut Context) -> *mut ProtectionDomain;
            dealloc_pd ["ibv_dealloc_pd"]: fn(*mut ProtectionDomain) -> c_int;
            reg_mr ["ibv_reg_mr"]: fn(*mut ProtectionDomain, *mut c_void, usize, c_int) -> *mut MemoryRegion;
            dereg_mr ["ibv_dereg_mr"]: fn(*mut MemoryRegion) -> c_int;
            create_comp_channel ["ibv_create_comp_channel"]: fn(*mut Context) -> *mut CompletionChannel;
            destroy_comp_channel ["ibv_destroy_comp_channel"]: fn(*mut CompletionChannel) -> c_int;
            create_cq ["ibv_create_cq"]:
                fn(*mut Context, c_int, *mut c_void, *mut CompletionChannel, c_int) -> *mut CompletionQueue;
            destroy_cq ["ibv_destroy_cq"]: fn(*mut CompletionQueue) -> c_int;
            get_cq_event ["ibv_get_cq_event"]:
                fn(*mut CompletionChannel, *mut *mut CompletionQueue, *mut *mut c_void) -> c_int;
            ack_cq_events ["ibv_ack_cq_events"]: fn(*mut CompletionQueue, c_uint);
            create_qp ["ibv_create_qp"]: fn(*mut ProtectionDomain, *mut QueuePairInit) -> *mut QueuePair;
            modify_qp ["ibv_modify_qp"]: fn(*mut QueuePair, *mut QueuePairAttributes, c_int) -> c_int;
            destroy_qp ["ibv_destroy_qp"]: fn(*mut QueuePair) -> c_int;
            completion_text ["ibv_wc_status_str"]: fn(c_uint) -> *const c_char;
        }
        optional {
            reg_dmabuf_mr ["ibv_reg_dmabuf_mr"]:
                fn(*mut ProtectionDomain, u64, usize, u64, c_int, c_int) -> *mut MemoryRegion;
            query_gid_entry ["_ibv_query_gid_ex"]: fn(*mut Context, u32, u32, *mut GidEntry, u32, usize) -> c_int;
            fork_init ["ibv_fork_init"]: fn() -> c_int;
        }
    }
}

/// libibverbs, open.
pub struct Verbs {
    /// The exported entries.
    pub table: VerbsTable,
    /// The library.
    pub library: Library,
}

impl Verbs {
    /// The library, opened when it is first asked for; what went wrong then stays.
    ///
    /// # Errors
    /// Where it cannot be opened or lacks an entry.
    pub fn get() -> Result<&'static Self, &'static GpuError> {
        static VERBS: OnceLock<GpuResult<Verbs>> = OnceLock::new();
        VERBS
            .get_or_init(|| {
                let library = Library::open(&VERBS_LIBRARY)?;
                Ok(Self { table: VerbsTable::load(&library, 0)?, library })
            })
            .as_ref()
    }

    /// Names of the RDMA devices. A kernel without RDMA answers with a null list: that is no device, and no error.
    pub fn device_names(&self) -> Vec<String> {
        let mut count = 0;
        // SAFETY: writes the count and hands out a list that is freed below.
        let list = unsafe { (self.table.get_device_list)(&mut count) };
        if list.is_null() {
            return Vec::new();
        }
        let names = (0..usize::try_from(count).unwrap_or(0))
            .filter_map(|index| {
                // SAFETY: the list has `count` devices, whose names live as long as it does.
                let name = unsafe { (self.table.get_device_name)(*list.add(index)) };
                if name.is_null() {
                    return None;
                }
                // SAFETY: a C string of the library.
                Some(unsafe { std::ffi::CStr::from_ptr(name) }.to_string_lossy().into_owned())
            })
            .collect();
        // SAFETY: the list came from the library and is not used again.
        unsafe { (self.table.free_device_list)(list) };
        names
    }
}

/// Take up to `into.len()` completions, through the operations of the queue's context.
///
/// # Errors
/// What the provider returned, negative.
///
/// # Safety
/// The queue is alive and was made by a [`Verbs`].
pub unsafe fn poll_cq(queue: *mut CompletionQueue, into: &mut [Completion]) -> Result<usize, c_int> {
    // SAFETY: of the caller.
    let poll = unsafe { (*(*queue).context).ops.poll_cq }.ok_or(-libc::EOPNOTSUPP)?;
    let room = c_int::try_from(into.len()).unwrap_or(c_int::MAX);
    // SAFETY: `into` has room for as many.
    let count = unsafe { poll(queue, room, into.as_mut_ptr()) };
    usize::try_from(count).map_err(|_| count)
}

/// Have the queue's channel become readable at the next completion.
///
/// # Errors
/// The errno.
///
/// # Safety
/// As [`poll_cq`].
pub unsafe fn request_notice(queue: *mut CompletionQueue) -> Result<(), c_int> {
    // SAFETY: of the caller.
    let arm = unsafe { (*(*queue).context).ops.req_notify_cq }.ok_or(libc::EOPNOTSUPP)?;
    // SAFETY: of the caller.
    match unsafe { arm(queue, 0) } {
        0 => Ok(()),
        errno => Err(errno),
    }
}

/// Post a chain of requests, through the operations of the queue pair's context.
///
/// # Errors
/// The errno.
///
/// # Safety
/// The queue pair is alive, and so is what the requests name until they complete.
pub unsafe fn post_send(pair: *mut QueuePair, request: &mut SendRequest) -> Result<(), c_int> {
    let mut bad = std::ptr::null_mut();
    // SAFETY: of the caller.
    let post = unsafe { (*(*pair).context).ops.post_send }.ok_or(libc::EOPNOTSUPP)?;
    // SAFETY: of the caller.
    match unsafe { post(pair, request, &mut bad) } {
        0 => Ok(()),
        errno => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::zeroed;

    unsafe extern "C" fn one_completion(
        _: *mut CompletionQueue,
        room: c_int,
        into: *mut Completion,
    ) -> c_int {
        assert_eq!(room, 4);
        // SAFETY: there is room for four.
        unsafe { (*into).wr_id = 42 };
        1
    }

    #[test]
    fn a_call_through_the_operations_of_a_context_reaches_its_own_slot_and_an_empty_slot_is_an_error() {
        // SAFETY: all of it is pointers and integers, for which zero is a value.
        let (mut context, mut queue, mut pair, mut request) = unsafe {
            (zeroed::<Context>(), zeroed::<CompletionQueue>(), zeroed::<QueuePair>(), zeroed::<SendRequest>())
        };
        context.ops.poll_cq = Some(one_completion);
        queue.context = &raw mut context;
        pair.context = &raw mut context;
        // SAFETY: zero is a value of it.
        let mut into = [unsafe { zeroed::<Completion>() }; 4];
        // SAFETY: the queue is alive and so is its context.
        assert_eq!(unsafe { poll_cq(&raw mut queue, &mut into) }, Ok(1));
        assert_eq!(into[0].wr_id, 42);
        // SAFETY: as above.
        assert_eq!(unsafe { post_send(&raw mut pair, &mut request) }, Err(libc::EOPNOTSUPP));
    }
}
