//! Prints what this crate declares of vendors' libraries, as JSON: `make test-abi` holds it to the vendors' own words.

use std::io::Write;
use std::mem::{offset_of, size_of};

use serde_json::{Value, json};
use sky_monarch_core::gpu::abi::{ccl, device, verbs};
use sky_monarch_core::gpu::table::ccl::CclTable;
use sky_monarch_core::gpu::table::device::{DriverTable, RuntimeTable};
use sky_monarch_core::gpu::table::verbs::VerbsTable;

macro_rules! enums {
    ($($module:ident::$Name:ident),* $(,)?) => {
        json!({ $( stringify!($Name): $module::$Name::DECLARED ),* })
    };
}

/// A struct under the names that C has for it, with the offsets of fields under C's names.
macro_rules! layout {
    ($Type:ty as [$($name:literal),*] { $($field:ident = $c:literal),* $(,)? }) => {
        json!({
            "names": [$($name),*],
            "size": size_of::<$Type>(),
            "offsets": { $( $c: offset_of!($Type, $field) ),* },
        })
    };
}

macro_rules! table {
    ($Table:ident) => {
        $Table::ENTRIES
            .iter()
            .map(|entry| json!({ "field": entry.field, "symbols": entry.symbols, "required": entry.required }))
            .collect::<Vec<Value>>()
    };
}

fn main() -> std::io::Result<()> {
    let declared = json!({
        "enums": enums!(
            device::Status, device::CopyKind, device::PointerAttribute, device::MemoryType, device::HipAttribute,
            device::CudaAttribute, device::AllocationType, device::HandleType, device::RangeHandleType,
            device::LocationType, device::AccessFlags, device::Granularity, ccl::CclResult, ccl::DataType,
            ccl::ReduceOp, verbs::CompletionStatus, verbs::WorkOpcode, verbs::QueuePairState, verbs::Access,
            verbs::AttributeMask, verbs::PortState,
        ),
        "constants": {
            "hipStreamNonBlocking": device::STREAM_NON_BLOCKING,
            "cudaStreamNonBlocking": device::STREAM_NON_BLOCKING,
            "hipEventDisableTiming": device::EVENT_DISABLE_TIMING,
            "cudaEventDisableTiming": device::EVENT_DISABLE_TIMING,
            "hipHostMallocPortable": device::HOST_ALLOC_PORTABLE,
            "cudaHostAllocPortable": device::HOST_ALLOC_PORTABLE,
            "IBV_QPT_RC": verbs::QUEUE_PAIR_RC,
            "IBV_SEND_SIGNALED": verbs::SEND_SIGNALED,
            "IBV_LINK_LAYER_INFINIBAND": verbs::LINK_LAYER_INFINIBAND,
            "IBV_LINK_LAYER_ETHERNET": verbs::LINK_LAYER_ETHERNET,
        },
        "device_structs": [
            layout!(device::Uuid as ["hipUUID", "CUuuid"] {}),
            layout!(device::IpcMemHandle as ["hipIpcMemHandle_t", "cudaIpcMemHandle_t"] {}),
            layout!(device::MemLocation as ["hipMemLocation", "CUmemLocation"] { kind = "type", id = "id" }),
            layout!(device::MemAccessDesc as ["hipMemAccessDesc", "CUmemAccessDesc"] {
                location = "location", flags = "flags",
            }),
            layout!(device::MemAllocationProp as ["hipMemAllocationProp", "CUmemAllocationProp"] {
                kind = "type", requested_handle_types = "requestedHandleTypes", location = "location",
                win32_handle_meta_data = "win32HandleMetaData", alloc_flags = "allocFlags",
            }),
        ],
        "ccl_structs": [
            layout!(ccl::UniqueId as ["ncclUniqueId"] { internal = "internal" }),
            layout!(ccl::Config as ["ncclConfig_t"] {
                blocking = "blocking", net_name = "netName", split_share = "splitShare",
            }),
        ],
        "verbs_structs": [
            layout!(verbs::Context as ["struct ibv_context"] { device = "device", ops = "ops", async_fd = "async_fd" }),
            layout!(verbs::ContextOps as ["struct ibv_context_ops"] {
                poll_cq = "poll_cq", req_notify_cq = "req_notify_cq", post_send = "post_send", post_recv = "post_recv",
            }),
            layout!(verbs::ProtectionDomain as ["struct ibv_pd"] { context = "context" }),
            layout!(verbs::MemoryRegion as ["struct ibv_mr"] {
                context = "context", pd = "pd", addr = "addr", length = "length", lkey = "lkey", rkey = "rkey",
            }),
            layout!(verbs::CompletionChannel as ["struct ibv_comp_channel"] { context = "context", fd = "fd" }),
            layout!(verbs::CompletionQueue as ["struct ibv_cq"] { context = "context", channel = "channel" }),
            layout!(verbs::QueuePair as ["struct ibv_qp"] { context = "context", qp_num = "qp_num" }),
            layout!(verbs::DeviceAttributes as ["struct ibv_device_attr"] {
                max_mr_size = "max_mr_size", max_qp_wr = "max_qp_wr", max_cqe = "max_cqe",
                max_qp_rd_atom = "max_qp_rd_atom", max_qp_init_rd_atom = "max_qp_init_rd_atom",
                max_pkeys = "max_pkeys", phys_port_cnt = "phys_port_cnt",
            }),
            layout!(verbs::PortAttributes as ["struct ibv_port_attr"] {
                state = "state", active_mtu = "active_mtu", gid_tbl_len = "gid_tbl_len", max_msg_sz = "max_msg_sz",
                lid = "lid", link_layer = "link_layer", flags = "flags",
            }),
            layout!(verbs::GidEntry as ["struct ibv_gid_entry"] {
                gid = "gid", gid_index = "gid_index", port_num = "port_num", gid_type = "gid_type",
                ndev_ifindex = "ndev_ifindex",
            }),
            layout!(verbs::QueuePairInit as ["struct ibv_qp_init_attr"] {
                send_cq = "send_cq", recv_cq = "recv_cq", srq = "srq", cap = "cap", qp_type = "qp_type",
                sq_sig_all = "sq_sig_all",
            }),
            layout!(verbs::QueuePairAttributes as ["struct ibv_qp_attr"] {
                qp_state = "qp_state", path_mtu = "path_mtu", rq_psn = "rq_psn", dest_qp_num = "dest_qp_num",
                qp_access_flags = "qp_access_flags", cap = "cap", ah_attr = "ah_attr", pkey_index = "pkey_index",
                max_rd_atomic = "max_rd_atomic", min_rnr_timer = "min_rnr_timer", port_num = "port_num",
                timeout = "timeout", retry_cnt = "retry_cnt", rnr_retry = "rnr_retry", rate_limit = "rate_limit",
            }),
            layout!(verbs::AddressAttributes as ["struct ibv_ah_attr"] {
                grh = "grh", dlid = "dlid", is_global = "is_global", port_num = "port_num",
            }),
            layout!(verbs::GlobalRoute as ["struct ibv_global_route"] {
                dgid = "dgid", sgid_index = "sgid_index", hop_limit = "hop_limit", traffic_class = "traffic_class",
            }),
            layout!(verbs::ScatterGather as ["struct ibv_sge"] { addr = "addr", length = "length", lkey = "lkey" }),
            layout!(verbs::SendRequest as ["struct ibv_send_wr"] {
                wr_id = "wr_id", next = "next", sg_list = "sg_list", num_sge = "num_sge", opcode = "opcode",
                send_flags = "send_flags", remote_addr = "wr.rdma.remote_addr", rkey = "wr.rdma.rkey",
            }),
            layout!(verbs::ReceiveRequest as ["struct ibv_recv_wr"] {
                wr_id = "wr_id", next = "next", sg_list = "sg_list", num_sge = "num_sge",
            }),
            layout!(verbs::Completion as ["struct ibv_wc"] {
                wr_id = "wr_id", status = "status", opcode = "opcode", vendor_err = "vendor_err",
                byte_len = "byte_len", qp_num = "qp_num",
            }),
        ],
        "runtime": table!(RuntimeTable),
        "driver": table!(DriverTable),
        "ccl": table!(CclTable),
        "verbs": table!(VerbsTable),
    });
    writeln!(std::io::stdout(), "{declared}")
}
