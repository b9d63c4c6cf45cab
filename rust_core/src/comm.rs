//! Collectives between devices of several processes, over RCCL or NCCL, each of which ends.
//!
//! ```text
//!  who calls ──▶ Communicator ──submit──▶ library ──▶ stream of the device
//!                    ▲  │ marks it                        │
//!   first failure ───┘  └──▶ watcher: asynchronous error, what is overdue ──▶ abort, within its limit
//! ```
//! The libraries can hang at any call and on any stream, and only an abort frees what hangs. So a communicator is made
//! without blocking; a thread looks at it and at what is under way; its first failure aborts it, for good; and where even
//! the abort does not end, the process ends itself ([`WEDGED`]), which its agent answers with another one.

mod bounded;
mod buffer;
mod communicator;
mod pending;
mod shared;
mod watcher;

pub use bounded::WEDGED;
pub use buffer::{Buffer, width_of};
pub use communicator::{Communicator, Transfer, unique_id};
pub use shared::Options;
