//! Headers of the frames between nodes.

use serde::{Deserialize, Serialize};

/// Version of these headers: nodes of different versions refuse each other.
pub(super) const VERSION: u32 = 2;

/// Where a part of the payload is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Part {
    /// The next segment of the frame.
    #[serde(rename = "s")]
    Segment,
    /// So many bytes at this offset of the shared memory that came with the frame.
    #[serde(rename = "m")]
    Shared(u64, u64),
}

/// What one node tells another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Packet {
    /// The first frame of a connection, from the side that dialled.
    #[serde(rename = "h")]
    Hello {
        /// See [`VERSION`].
        version: u32,
        /// Secret of the mesh.
        token: String,
        /// It gives memory back that it is lent. Who only passes messages on is sent sealed memory instead.
        borrows: bool,
    },
    /// A message for an actor.
    #[serde(rename = "c")]
    Call {
        /// Names the call among those of its sender; 0 where no answer is wanted.
        call: u64,
        /// Which of the call's targets this is.
        slot: u32,
        /// The actor, among those of the process.
        actor: u64,
        /// What it is asked for.
        method: String,
        /// Where in the mesh that was called this target is; empty where it is its own place. Behind a tab, in the first
        /// message of a handle: address of the process that has spawned the actor.
        place: String,
        /// Parts of the payload, in order.
        parts: Vec<Part>,
        /// Names the shared memory in a [`Packet::Release`]; 0 where its sender does not want it back.
        memory: u64,
    },
    /// The answer to one.
    #[serde(rename = "r")]
    Reply {
        /// As in the call.
        call: u64,
        /// As in the call.
        slot: u32,
        /// What the two sides agreed on: a value, an exception, one value of several.
        kind: u8,
        /// Parts of the payload, in order.
        parts: Vec<Part>,
        /// As in a call.
        memory: u64,
    },
    /// Nobody waits for the answer any more.
    #[serde(rename = "x")]
    Cancel {
        /// As in the call.
        call: u64,
        /// The actor that was called.
        actor: u64,
    },
    /// The second frame of a connection to the gateway of this host: the folder of the host that it is for.
    #[serde(rename = "f")]
    Far {
        /// Folder of the sockets there.
        folder: String,
    },
    /// A message for actors in one or several processes of another host.
    #[serde(rename = "m")]
    Cast {
        /// As in a call.
        call: u64,
        /// As in a call.
        actor: u64,
        /// As in a call.
        method: String,
        /// Name of each process's socket in its host's folder, slot and place.
        to: Vec<(String, u32, String)>,
        /// The answers may come together, once all are there.
        gather: bool,
        /// Parts of the payload, in order.
        parts: Vec<Part>,
    },
    /// Answers to a cast, all parts of which are segments.
    #[serde(rename = "a")]
    Replies {
        /// As in the call.
        call: u64,
        /// Slot, kind and number of segments of each.
        answers: Vec<(u32, u8, u16)>,
    },
    /// These targets of a cast will not answer: their process is gone.
    #[serde(rename = "g")]
    Gone {
        /// As in the call.
        call: u64,
        /// Which of its targets.
        slots: Vec<u32>,
        /// In words.
        reason: String,
    },
    /// A cast without an answer did not reach this process of the other host: it is gone.
    #[serde(rename = "u")]
    Undelivered {
        /// Of its socket.
        name: String,
        /// In words.
        reason: String,
    },
    /// The other host cannot be reached (any more). The last frame of a connection.
    #[serde(rename = "o")]
    Over {
        /// In words.
        reason: String,
    },
    /// Nothing of this side looks at lent memory any more.
    #[serde(rename = "l")]
    Release {
        /// As in the call or the reply.
        memory: u64,
        /// Nobody else may see it either: it may be filled again.
        clean: bool,
    },
}
