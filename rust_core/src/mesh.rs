//! Messages between actors of different processes: what carries a call there and its answer back.
//!
//! ```text
//!  Node::call ─▶ Link ═══ unix socket ═══ Link ─▶ Mailbox ─▶ Request    (the worker's own thread takes it)
//!  Gather     ◀─ Link ═══════════════════ Link ◀───────────  Request::reply
//! ```
//!
//! One [`Node`] a process. A sender writes to its socket itself; who waits for something reads the sockets itself
//! (`lead.rs`): between two busy processes a call passes through two threads, not six. Nothing here decodes what it
//! carries: bodies are bytes, and large ones are shared memory whose descriptor travels beside the frame.
//!
//! Frames are those of [`crate::wire`]. The first one of a connection proves that its sender knows the token; both
//! ends run as the same user. Queues are bounded: a full mailbox stops the reading of those connections alone whose
//! calls it has no room for.

mod aside;
mod copying;
mod far;
mod gateway;
mod gather;
mod lead;
mod link;
mod mailbox;
mod memory;
mod node;
mod notifier;
mod packet;
mod payload;
mod poller;
mod shared;
mod sync;
mod undelivered;

pub use copying::{Pages, copy};
pub use gateway::{Event, Gateway, GatewayOptions, report_killed};
pub use gather::{Answer, Gather, Outcome, VALUE};
pub use mailbox::{Delivery, Mailbox, Request, THROWN_AWAY};
pub use node::{Node, NodeOptions, Target};
pub use notifier::Notifier;
pub use payload::{Blob, Payload, SHARED_FROM};
