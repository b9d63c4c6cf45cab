//! Accelerators: what the host has, their memory and streams, and the vendors' libraries below.
//!
//! No vendor's library is linked. Each is opened when it is first used, so that one wheel serves hosts with AMD's
//! devices, with NVIDIA's and with none; code above is written once, against [`GpuRuntime`] or against CUDA's names in
//! [`compat::cuda`]. Nothing here may be called in a process that forks afterwards.

pub mod abi;
pub mod compat;
mod error;
mod host;
pub mod library;
pub mod mask;
mod memory;
mod platform;
mod report;
mod runtime;
mod stream;
pub mod table;
mod vendor;

pub use error::{ErrorClass, GpuError, GpuResult};
pub use host::HostRuntime;
pub use memory::{Memory, MemoryKind};
pub use platform::{Choice, FORCE_PLATFORM, Platform, Present, choose};
pub use report::report;
pub use runtime::{
    Capabilities, DeviceInfo, GpuRuntime, MemoryInfo, PointerInfo, PointerKind, RawMemory, Versions, runtime,
    runtime_of,
};
pub use stream::{Event, Stream};
pub use vendor::VendorRuntime;
