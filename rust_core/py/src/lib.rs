//! `sky_monarch._core`: converts, releases the GIL, calls the core, maps the error.

mod actor_gateway;
mod actor_mailbox;
mod actor_node;
mod actor_payload;
mod agent_client;
mod carrier;
mod channel_client;
mod channel_server;
mod communicator;
mod convert;
mod error;
mod gpu;
mod lighthouse_client;
mod lighthouse_control;
mod rdma;
mod runtime;
mod services;

use pyo3::prelude::*;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<actor_gateway::ActorGateway>()?;
    module.add_class::<actor_mailbox::ActorMailbox>()?;
    module.add_class::<actor_mailbox::ActorRequest>()?;
    module.add_class::<actor_node::ActorNode>()?;
    module.add_class::<actor_node::ActorNotifier>()?;
    module.add_class::<actor_node::ActorReplies>()?;
    module.add_class::<actor_node::ActorTargets>()?;
    module.add_class::<actor_payload::ActorBuffer>()?;
    module.add_class::<agent_client::AgentClient>()?;
    module.add_class::<channel_client::ChannelClient>()?;
    module.add_class::<channel_server::ChannelServer>()?;
    module.add_class::<communicator::Communicator>()?;
    module.add_class::<communicator::DeviceBuffer>()?;
    module.add_function(wrap_pyfunction!(communicator::communicator_id, module)?)?;
    module.add_class::<lighthouse_client::LighthouseClient>()?;
    module.add_class::<lighthouse_control::LighthouseControl>()?;
    module.add_function(wrap_pyfunction!(actor_node::die_with_parent, module)?)?;
    module.add_function(wrap_pyfunction!(actor_gateway::actor_host_killed, module)?)?;
    module.add_function(wrap_pyfunction!(actor_payload::actor_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(error::error_kinds, module)?)?;
    module.add_function(wrap_pyfunction!(error::raise_kind, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::gpu_report, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::visible_devices, module)?)?;
    module.add_class::<rdma::RdmaDomain>()?;
    module.add_class::<rdma::SharedBuffer>()?;
    module.add_function(wrap_pyfunction!(rdma::buffer_segment, module)?)?;
    module.add_function(wrap_pyfunction!(carrier::end_carriers, module)?)?;
    module.add_function(wrap_pyfunction!(carrier::is_device_memory, module)?)?;
    module.add_function(wrap_pyfunction!(services::adopt_orphans, module)?)?;
    module.add_function(wrap_pyfunction!(services::end_descendants, module)?)?;
    module.add_function(wrap_pyfunction!(services::settle_forked, module)?)?;
    module.add_function(wrap_pyfunction!(services::issue_identities, module)?)?;
    module.add_function(wrap_pyfunction!(services::issue_identity, module)?)?;
    module.add_function(wrap_pyfunction!(services::make_authority, module)?)?;
    module.add_function(wrap_pyfunction!(services::run_agent, module)?)?;
    module.add_function(wrap_pyfunction!(services::run_lighthouse, module)?)?;
    module.add_function(wrap_pyfunction!(services::run_relay, module)?)?;
    module.add("PROTOCOL_VERSION", sky_monarch_core::protocol::VERSION)?;
    Ok(())
}
