//! Memory of one process that another one reads and writes, without a copy in between.
//!
//! ```text
//!  owner                                        requester
//!  Domain ── register(memory) ─▶ Handle ──…──▶  Domain ── read_into / write_from ──▶ Path: cma | shm | verbs | tcp
//!    Registry: token, epoch, bounds, rights         │
//!    Server: one thread a connection ◀══ TCP ═══════┘ every operation asks here first
//! ```
//!
//! Whatever path moves the bytes, the owner is asked over an authenticated connection before each operation, and
//! holds what was registered until the operation has said that it is over. So all paths refuse alike
//! ([`ErrorKind::OutOfBounds`], [`ErrorKind::Forbidden`], [`ErrorKind::Stale`]), a dead peer is
//! [`ErrorKind::Closed`] on all of them, and none outlives its deadline ([`ErrorKind::TimedOut`]).
//!
//! [`ErrorKind::OutOfBounds`]: crate::ErrorKind::OutOfBounds
//! [`ErrorKind::Forbidden`]: crate::ErrorKind::Forbidden
//! [`ErrorKind::Stale`]: crate::ErrorKind::Stale
//! [`ErrorKind::Closed`]: crate::ErrorKind::Closed
//! [`ErrorKind::TimedOut`]: crate::ErrorKind::TimedOut

mod board;
mod cma;
mod connection;
mod domain;
mod gather;
mod handle;
mod memory;
mod path;
mod protocol;
mod registry;
mod server;
mod serving;
mod shm;
mod socket;
mod staging;
mod tcp;
mod verbs;

pub use domain::{Domain, Limits};
pub use gather::{Options, OwnerReport, Report};
pub use handle::{Access, Handle};
pub use memory::{Memory, Segment};
pub use path::PathKind;
pub use shm::allocate;
pub use staging::{Carrier, Room};
pub use verbs::{Placement, Way};
