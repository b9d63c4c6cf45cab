//! libibverbs: what plain RC verbs need. `ibv_post_send` and its like are not exported; they are calls through the
//! table of operations that lies in each context.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::{offset_of, size_of};

use super::open_enum;

open_enum! {
    /// `enum ibv_wc_status`, those that decide what is done next.
    pub struct CompletionStatus(c_uint) {
        SUCCESS = 0 ["IBV_WC_SUCCESS"],
        LOCAL_LENGTH = 1 ["IBV_WC_LOC_LEN_ERR"],
        LOCAL_QUEUE_PAIR = 2 ["IBV_WC_LOC_QP_OP_ERR"],
        LOCAL_PROTECTION = 4 ["IBV_WC_LOC_PROT_ERR"],
        WORK_REQUEST_FLUSHED = 5 ["IBV_WC_WR_FLUSH_ERR"],
        REMOTE_INVALID_REQUEST = 9 ["IBV_WC_REM_INV_REQ_ERR"],
        REMOTE_ACCESS = 10 ["IBV_WC_REM_ACCESS_ERR"],
        REMOTE_OPERATION = 11 ["IBV_WC_REM_OP_ERR"],
        RETRIES_EXCEEDED = 12 ["IBV_WC_RETRY_EXC_ERR"],
        RECEIVER_NOT_READY = 13 ["IBV_WC_RNR_RETRY_EXC_ERR"],
    }
}

open_enum! {
    /// `enum ibv_wr_opcode`.
    pub struct WorkOpcode(c_uint) {
        RDMA_WRITE = 0 ["IBV_WR_RDMA_WRITE"],
        SEND = 2 ["IBV_WR_SEND"],
        RDMA_READ = 4 ["IBV_WR_RDMA_READ"],
    }
}

open_enum! {
    /// `enum ibv_qp_state`.
    pub struct QueuePairState(c_uint) {
        RESET = 0 ["IBV_QPS_RESET"],
        INIT = 1 ["IBV_QPS_INIT"],
        READY_TO_RECEIVE = 2 ["IBV_QPS_RTR"],
        READY_TO_SEND = 3 ["IBV_QPS_RTS"],
        ERROR = 6 ["IBV_QPS_ERR"],
    }
}

open_enum! {
    /// Bits of `enum ibv_access_flags`.
    pub struct Access(c_uint) {
        LOCAL_WRITE = 1 ["IBV_ACCESS_LOCAL_WRITE"],
        REMOTE_WRITE = 2 ["IBV_ACCESS_REMOTE_WRITE"],
        REMOTE_READ = 4 ["IBV_ACCESS_REMOTE_READ"],
    }
}

open_enum! {
    /// Bits of `enum ibv_qp_attr_mask`.
    pub struct AttributeMask(c_uint) {
        STATE = 1 ["IBV_QP_STATE"],
        ACCESS_FLAGS = 8 ["IBV_QP_ACCESS_FLAGS"],
        PKEY_INDEX = 16 ["IBV_QP_PKEY_INDEX"],
        PORT = 32 ["IBV_QP_PORT"],
        AV = 128 ["IBV_QP_AV"],
        PATH_MTU = 256 ["IBV_QP_PATH_MTU"],
        TIMEOUT = 512 ["IBV_QP_TIMEOUT"],
        RETRY_COUNT = 1024 ["IBV_QP_RETRY_CNT"],
        RNR_RETRY = 2048 ["IBV_QP_RNR_RETRY"],
        RQ_PSN = 4096 ["IBV_QP_RQ_PSN"],
        MAX_QP_RD_ATOMIC = 8192 ["IBV_QP_MAX_QP_RD_ATOMIC"],
        MIN_RNR_TIMER = 32768 ["IBV_QP_MIN_RNR_TIMER"],
        SQ_PSN = 65536 ["IBV_QP_SQ_PSN"],
        MAX_DEST_RD_ATOMIC = 131_072 ["IBV_QP_MAX_DEST_RD_ATOMIC"],
        DEST_QPN = 1_048_576 ["IBV_QP_DEST_QPN"],
    }
}

/// `IBV_QPT_RC`.
pub const QUEUE_PAIR_RC: c_uint = 2;
/// `IBV_SEND_SIGNALED`.
pub const SEND_SIGNALED: c_uint = 2;

open_enum! {
    /// `enum ibv_port_state`.
    pub struct PortState(c_uint) {
        DOWN = 1 ["IBV_PORT_DOWN"],
        ACTIVE = 4 ["IBV_PORT_ACTIVE"],
    }
}

/// `IBV_LINK_LAYER_INFINIBAND`.
pub const LINK_LAYER_INFINIBAND: u8 = 1;
/// `IBV_LINK_LAYER_ETHERNET`.
pub const LINK_LAYER_ETHERNET: u8 = 2;

macro_rules! opaque {
    ($($(#[$doc:meta])* $Name:ident),* $(,)?) => {
        $( $(#[$doc])* #[repr(C)] pub struct $Name { _private: [u8; 0] } )*
    };
}
opaque! {
    /// `struct ibv_device`.
    DeviceObject,
    /// `struct ibv_srq`.
    SharedReceiveQueue,
}

/// An operation that nothing here calls, or one kept for the library's own older callers.
type Unused = *const c_void;

/// `struct ibv_context_ops`.
#[repr(C)]
pub struct ContextOps {
    unused_0: [Unused; 11],
    /// `ibv_poll_cq`: how many completions were written, or a negative error.
    pub poll_cq: Option<unsafe extern "C" fn(*mut CompletionQueue, c_int, *mut Completion) -> c_int>,
    /// `ibv_req_notify_cq`: 0 or an errno.
    pub req_notify_cq: Option<unsafe extern "C" fn(*mut CompletionQueue, c_int) -> c_int>,
    unused_13: [Unused; 12],
    /// `ibv_post_send`: 0 or an errno.
    pub post_send:
        Option<unsafe extern "C" fn(*mut QueuePair, *mut SendRequest, *mut *mut SendRequest) -> c_int>,
    /// `ibv_post_recv`: 0 or an errno.
    pub post_recv:
        Option<unsafe extern "C" fn(*mut QueuePair, *mut ReceiveRequest, *mut *mut ReceiveRequest) -> c_int>,
    unused_27: [Unused; 5],
}

/// `struct ibv_context`, up to what is read of it.
#[repr(C)]
pub struct Context {
    /// Its device.
    pub device: *mut DeviceObject,
    /// Its operations.
    pub ops: ContextOps,
    cmd_fd: c_int,
    /// Readable when an asynchronous event waits.
    pub async_fd: c_int,
}

/// `struct ibv_pd`.
#[repr(C)]
pub struct ProtectionDomain {
    /// Its context.
    pub context: *mut Context,
    handle: u32,
}

/// `struct ibv_mr`.
#[repr(C)]
pub struct MemoryRegion {
    /// Its context.
    pub context: *mut Context,
    /// Its protection domain.
    pub pd: *mut ProtectionDomain,
    /// Where it begins.
    pub addr: *mut c_void,
    /// Bytes.
    pub length: usize,
    handle: u32,
    /// Key for this host's own requests.
    pub lkey: u32,
    /// Key for a peer's requests.
    pub rkey: u32,
}

/// `struct ibv_comp_channel`.
#[repr(C)]
pub struct CompletionChannel {
    /// Its context.
    pub context: *mut Context,
    /// Readable when a completion queue that was armed has something.
    pub fd: c_int,
    refcnt: c_int,
}

/// `struct ibv_cq`, up to what is read of it.
#[repr(C)]
pub struct CompletionQueue {
    /// Its context.
    pub context: *mut Context,
    /// Its channel; null where it has none.
    pub channel: *mut CompletionChannel,
}

/// `struct ibv_qp`, up to what is read of it.
#[repr(C)]
pub struct QueuePair {
    /// Its context.
    pub context: *mut Context,
    unused: [*mut c_void; 5],
    handle: u32,
    /// Its number, which the peer is told.
    pub qp_num: u32,
}

/// `struct ibv_device_attr`.
#[repr(C)]
#[allow(missing_docs, reason = "fields of the InfiniBand specification")]
pub struct DeviceAttributes {
    pub fw_ver: [c_char; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    unused: [c_int; 16],
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

/// `struct ibv_port_attr`. The exported `ibv_query_port` fills all but what was added last.
#[repr(C)]
#[allow(missing_docs, reason = "fields of the InfiniBand specification")]
pub struct PortAttributes {
    pub state: PortState,
    pub max_mtu: c_uint,
    pub active_mtu: c_uint,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
}

/// `union ibv_gid`.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gid {
    /// As on the wire; `::ffff:a.b.c.d` for RoCE v2 over IPv4.
    pub raw: [u8; 16],
}

/// `struct ibv_gid_entry`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct GidEntry {
    /// The GID.
    pub gid: Gid,
    /// Its index.
    pub gid_index: u32,
    /// The port it belongs to.
    pub port_num: u32,
    /// 0 InfiniBand, 1 RoCE v1, 2 RoCE v2.
    pub gid_type: u32,
    /// The network interface behind it.
    pub ndev_ifindex: u32,
}

/// `struct ibv_global_route`.
#[repr(C)]
#[allow(missing_docs, reason = "fields of the InfiniBand specification")]
#[derive(Clone, Copy, Debug, Default)]
pub struct GlobalRoute {
    pub dgid: Gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[repr(C)]
#[allow(missing_docs, reason = "fields of the InfiniBand specification")]
#[derive(Clone, Copy, Debug, Default)]
pub struct AddressAttributes {
    pub grh: GlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[allow(missing_docs, reason = "fields of the InfiniBand specification")]
#[derive(Clone, Copy, Debug, Default)]
pub struct QueuePairLimits {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
#[allow(missing_docs, reason = "fields of the InfiniBand specification")]
pub struct QueuePairInit {
    pub qp_context: *mut c_void,
    pub send_cq: *mut CompletionQueue,
    pub recv_cq: *mut CompletionQueue,
    pub srq: *mut SharedReceiveQueue,
    pub cap: QueuePairLimits,
    pub qp_type: c_uint,
    pub sq_sig_all: c_int,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[allow(missing_docs, reason = "fields of the InfiniBand specification")]
#[derive(Clone, Copy, Debug)]
pub struct QueuePairAttributes {
    pub qp_state: QueuePairState,
    pub cur_qp_state: QueuePairState,
    pub path_mtu: c_uint,
    pub path_mig_state: c_uint,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    pub cap: QueuePairLimits,
    pub ah_attr: AddressAttributes,
    pub alt_ah_attr: AddressAttributes,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

/// `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ScatterGather {
    /// Address on this host.
    pub addr: u64,
    /// Bytes.
    pub length: u32,
    /// Key of the memory region.
    pub lkey: u32,
}

/// `struct ibv_send_wr`, with the remote address of an RDMA operation in its union.
#[repr(C)]
pub struct SendRequest {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// The request after this one; null at the end.
    pub next: *mut SendRequest,
    /// What is sent, or where what is read goes.
    pub sg_list: *mut ScatterGather,
    /// How many.
    pub num_sge: c_int,
    /// What to do.
    pub opcode: WorkOpcode,
    /// Bits, such as [`SEND_SIGNALED`].
    pub send_flags: c_uint,
    imm_data: u32,
    /// Address at the peer.
    pub remote_addr: u64,
    /// The peer's key for it.
    pub rkey: u32,
    rest: [u64; 9],
}

/// `struct ibv_recv_wr`.
#[repr(C)]
pub struct ReceiveRequest {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// The request after this one; null at the end.
    pub next: *mut ReceiveRequest,
    /// Where what comes goes.
    pub sg_list: *mut ScatterGather,
    /// How many.
    pub num_sge: c_int,
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// Of the request that is done.
    pub wr_id: u64,
    /// How it ended.
    pub status: CompletionStatus,
    /// What it was; undefined unless it succeeded.
    pub opcode: c_uint,
    /// The vendor's own number.
    pub vendor_err: u32,
    /// Bytes moved.
    pub byte_len: u32,
    imm_data: u32,
    /// Of the queue pair.
    pub qp_num: u32,
    src_qp: u32,
    wc_flags: c_uint,
    pkey_index: u16,
    slid: u16,
    sl: u8,
    dlid_path_bits: u8,
}

const _: () = {
    assert!(offset_of!(Context, ops) == 8 && offset_of!(Context, async_fd) == 268);
    assert!(size_of::<ContextOps>() == 256);
    assert!(offset_of!(ContextOps, poll_cq) == 88 && offset_of!(ContextOps, req_notify_cq) == 96);
    assert!(offset_of!(ContextOps, post_send) == 200 && offset_of!(ContextOps, post_recv) == 208);
    assert!(size_of::<QueuePairAttributes>() == 144 && size_of::<QueuePairInit>() == 64);
    assert!(
        size_of::<SendRequest>() == 128 && size_of::<ReceiveRequest>() == 32 && size_of::<Completion>() == 48
    );
    assert!(size_of::<DeviceAttributes>() == 232 && offset_of!(DeviceAttributes, phys_port_cnt) == 227);
    assert!(size_of::<PortAttributes>() == 52 && offset_of!(PortAttributes, link_layer) == 46);
    assert!(
        size_of::<MemoryRegion>() == 48 && size_of::<GidEntry>() == 32 && size_of::<ScatterGather>() == 16
    );
};
