//! What gateways tell each other: headers of the frames between hosts.

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::wire::Frame;

/// Version of these headers, and of the packets inside: gateways of different versions refuse each other.
pub(super) const PROTOCOL: u32 = 3;

/// One hop.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Hop {
    /// The first frame, from both sides.
    #[serde(rename = "h")]
    Hello {
        /// See [`PROTOCOL`].
        protocol: u32,
        /// Of the installation.
        version: String,
        /// Folder of the host's sockets, which names it.
        folder: String,
        /// What people call it.
        host: String,
        /// Names what both say to each other from here on.
        line: u64,
        /// Where they go on over another connection: counted hops that were heard so far.
        heard: Option<u64>,
    },
    /// In place of it: why not.
    #[serde(rename = "n")]
    Refused {
        /// In words.
        reason: String,
    },
    /// In place of a hello, from a process that outlives it: the gateway of a host was killed.
    #[serde(rename = "k")]
    Killed {
        /// Folder of the host.
        folder: String,
        /// As in its hello: nobody else knows it.
        line: u64,
    },
    /// Somebody is there, and has heard so many hops: all but these and the first ones are counted.
    #[serde(rename = "i")]
    Ping {
        /// Since the first one.
        heard: u64,
    },
    /// The hub has lost a host.
    #[serde(rename = "g")]
    Gone {
        /// Which.
        folder: String,
        /// In words.
        reason: String,
    },
    /// A host has the place of a lost one, or of a process of one: says the hub.
    #[serde(rename = "p")]
    Placed {
        /// Folder of the lost one, or address of the process.
        folder: String,
        /// Folder of the other.
        by: String,
    },
    /// Of a session.
    #[serde(rename = "s")]
    Session {
        /// Folder of the host that it goes to.
        to: String,
        /// Folder of the host that it comes from.
        from: String,
        /// Names the session.
        number: u64,
        /// What.
        what: What,
    },
}

/// What happens in a session.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum What {
    /// It begins.
    #[serde(rename = "o")]
    Open,
    /// A packet between nodes, with its segments.
    #[serde(rename = "f")]
    Frame {
        /// Header of the packet.
        #[serde(with = "serde_bytes")]
        header: Vec<u8>,
        /// The memory that goes with it has come before it, in chunks.
        memory: bool,
    },
    /// A piece of the memory of the next frame, as the one segment.
    #[serde(rename = "c")]
    Chunk,
    /// So much has been taken: so much more may be sent.
    #[serde(rename = "w")]
    Credit {
        /// In the measure of [`super::session::cost`].
        cost: u32,
    },
    /// It is over.
    #[serde(rename = "x")]
    Close {
        /// In words.
        reason: String,
    },
}

impl Hop {
    /// As a frame.
    pub(super) fn frame(&self, segments: Vec<bytes::Bytes>) -> Result<Frame> {
        Ok(Frame { segments, ..Frame::from_message(self)? })
    }
}
