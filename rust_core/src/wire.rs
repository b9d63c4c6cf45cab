//! Framed transport: who may connect, and how bytes become bounded frames.
//!
//! ```text
//!  u32 LE   length of what follows, checked against the bound before anything is allocated
//!  u8       version of this layout
//!  u16 LE   number of segments
//!  u32 LE   length of the header, then one u32 LE for each segment
//!  header   one msgpack value with named fields
//!  segments raw bytes, out of band: never copied into the header
//! ```
//!
//! Transports: `unix:<path>` (mode 0600, and both ends check that the other runs as the same user) and
//! `tls:<host>:<port>` (TLS 1.3, both ends show a certificate of the run's own authority). There is no plain TCP, so
//! nothing that listens beyond this machine can be without authentication.

mod address;
mod frame;
pub mod inherited;
mod stream;
pub mod tls;
mod unix;

pub use address::Address;
pub(crate) use address::one_or_several;
pub use frame::{Frame, FrameReader, FrameWriter, MAX_SEGMENTS, VERSION, decode};
pub(crate) use stream::io_error;
pub use stream::{Acceptor, Stream, dial};
