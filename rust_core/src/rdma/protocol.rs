//! What owner and requester say to each other. Every length is known before it is read.
//!
//! ```text
//!  requester                        owner
//!  magic, version, nonce     ─▶
//!                            ◀─     magic, version, nonce, HMAC(secret, "owner" + both nonces)
//!  HMAC(secret, "requester" + …) ─▶
//!                            ◀─     Greeting
//!  Request                   ─▶     (checked: token, epoch, rights, range)
//!                            ◀─     Reply, and what belongs to it
//! ```
//!
//! The secret is never sent, and both ends prove that they have it before anything else of theirs is read. The bytes
//! themselves go unencrypted, as those of the collectives do.

use ring::hmac;

use crate::{Error, ErrorKind, Result};

pub(super) const MAGIC: [u8; 5] = *b"SKYR\x02";
pub(super) const NONCE: usize = 32;
pub(super) const PROOF: usize = 32;
/// Longest name of an announcement, and longest text of one.
pub(super) const MAX_NAME: usize = 256;
pub(super) const MAX_TEXT: usize = 64 * 1024;
/// Longest reason of a refusal.
const MAX_REASON: usize = 1024;
/// Segments of one grant: as many as one system call takes.
pub(super) const MAX_PARTS: usize = 1024;

/// Who proves something, so that no proof can be sent back.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Owner,
    Requester,
}

/// The secret of the run, as a key.
pub(super) struct Secret(hmac::Key);

impl Secret {
    pub(super) fn new(secret: &str) -> Result<Self> {
        if secret.is_empty() {
            return Err(Error::new(ErrorKind::InvalidInput, "open a domain", "the secret is empty"));
        }
        Ok(Self(hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes())))
    }

    pub(super) fn proof(&self, side: Side, requester: &[u8; NONCE], owner: &[u8; NONCE]) -> [u8; PROOF] {
        let tag = hmac::sign(&self.0, &said(side, requester, owner));
        let mut proof = [0; PROOF];
        proof.copy_from_slice(tag.as_ref());
        proof
    }

    /// In constant time.
    pub(super) fn verify(
        &self,
        side: Side,
        requester: &[u8; NONCE],
        owner: &[u8; NONCE],
        proof: &[u8],
    ) -> Result<()> {
        let verified = hmac::verify(&self.0, &said(side, requester, owner), proof);
        verified.map_err(|_| {
            let why = "it could not prove that it belongs to this run";
            Error::new(ErrorKind::Refused, "trust a peer", why)
        })
    }
}

fn said(side: Side, requester: &[u8; NONCE], owner: &[u8; NONCE]) -> Vec<u8> {
    let label: &[u8] = match side {
        Side::Owner => b"owner",
        Side::Requester => b"requester",
    };
    [&MAGIC[..], label, requester, owner].concat()
}

/// Where an owner is, for those who may reach its memory without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Greeting {
    pub pid: u32,
    /// Whether it lets others read and write its memory themselves.
    pub direct: bool,
    /// Of its PID namespace.
    pub pid_namespace: u64,
    /// Of its kernel, since the last boot.
    pub boot: [u8; 16],
    /// Random bytes, and where it keeps them: who reads them there has found the right process.
    pub cookie: [u8; 16],
    pub cookie_address: u64,
}

impl Greeting {
    pub(super) const LENGTH: usize = 4 + 1 + 8 + 16 + 16 + 8;

    pub(super) fn encode(&self) -> [u8; Self::LENGTH] {
        let mut out = [0; Self::LENGTH];
        let mut at = Put(&mut out);
        at.put(&self.pid.to_le_bytes());
        at.put(&[u8::from(self.direct)]);
        at.put(&self.pid_namespace.to_le_bytes());
        at.put(&self.boot);
        at.put(&self.cookie);
        at.put(&self.cookie_address.to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8; Self::LENGTH]) -> Self {
        let mut at = Take(bytes);
        Self {
            pid: u32::from_le_bytes(at.take()),
            direct: at.take::<1>()[0] != 0,
            pid_namespace: u64::from_le_bytes(at.take()),
            boot: at.take(),
            cookie: at.take(),
            cookie_address: u64::from_le_bytes(at.take()),
        }
    }
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Op {
    /// Send me the range.
    Read = 1,
    /// Take the range from me.
    Write = 2,
    /// Let me read the range myself.
    GrantRead = 3,
    /// Let me write the range myself.
    GrantWrite = 4,
    /// I have done what you granted; does it count?
    Release = 5,
    /// What is the digest of the range?
    Digest = 6,
    /// What was announced under the name of `length` bytes that follows?
    Lookup = 7,
    /// Here is my end of a queue pair, which follows: make yours, and tell me.
    Join = 8,
    /// Let me read the range by RDMA; with which keys?
    LendRead = 9,
    /// Let me write the range by RDMA; with which keys?
    LendWrite = 10,
    /// What you lent has failed: end your queue pair, then let the memory go. Does it still count?
    Quit = 11,
}

impl Op {
    const ALL: [Self; 11] = [
        Self::Read,
        Self::Write,
        Self::GrantRead,
        Self::GrantWrite,
        Self::Release,
        Self::Digest,
        Self::Lookup,
        Self::Join,
        Self::LendRead,
        Self::LendWrite,
        Self::Quit,
    ];
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub op: Op,
    /// Whether the bytes are followed by their digest.
    pub digest: bool,
    pub token: u64,
    pub epoch: u64,
    pub offset: u64,
    pub length: u64,
    /// How long the requester waits, in milliseconds.
    pub limit_ms: u64,
}

impl Request {
    pub(super) const LENGTH: usize = 2 + 5 * 8;

    pub(super) fn encode(&self) -> [u8; Self::LENGTH] {
        let mut out = [0; Self::LENGTH];
        let mut at = Put(&mut out);
        at.put(&[self.op as u8, u8::from(self.digest)]);
        for number in [self.token, self.epoch, self.offset, self.length, self.limit_ms] {
            at.put(&number.to_le_bytes());
        }
        out
    }

    pub(super) fn decode(bytes: &[u8; Self::LENGTH]) -> Result<Self> {
        let mut at = Take(bytes);
        let [op, digest] = at.take();
        let known = Op::ALL.into_iter().find(|known| *known as u8 == op);
        let op = known.ok_or_else(|| {
            Error::new(ErrorKind::Protocol, "read a request", format!("{op} is no operation"))
        })?;
        let mut number = || u64::from_le_bytes(at.take());
        Ok(Self {
            op,
            digest: digest != 0,
            token: number(),
            epoch: number(),
            offset: number(),
            length: number(),
            limit_ms: number(),
        })
    }
}

/// How every answer begins: yes and a number, or no and the length of the reason.
pub(super) const REPLY: usize = 1 + 8;

/// Kinds of error that travel, and their numbers.
const KINDS: [(ErrorKind, u8); 9] = [
    (ErrorKind::Stale, 1),
    (ErrorKind::OutOfBounds, 2),
    (ErrorKind::Forbidden, 3),
    (ErrorKind::TimedOut, 4),
    (ErrorKind::TooLarge, 5),
    (ErrorKind::Corrupt, 6),
    (ErrorKind::Protocol, 7),
    (ErrorKind::Io, 8),
    (ErrorKind::Device, 9),
];

/// An answer, with the reason where it is no.
pub(super) fn encode_reply(outcome: &Result<u64>) -> Vec<u8> {
    match outcome {
        Ok(value) => [&[0][..], &value.to_le_bytes()].concat(),
        Err(error) => {
            let code = KINDS.iter().find(|(kind, _)| *kind == error.kind()).map_or(8, |(_, code)| *code);
            let reason = error.message().as_bytes();
            let reason = &reason[..reason.len().min(MAX_REASON)];
            [&[code][..], &(reason.len() as u64).to_le_bytes(), reason].concat()
        }
    }
}

/// The beginning of an answer: its number, or the kind of error and the length of the reason that follows.
pub(super) fn decode_reply(bytes: &[u8; REPLY]) -> Result<Result<u64, (ErrorKind, usize)>> {
    let mut at = Take(bytes);
    let [code] = at.take();
    let value = u64::from_le_bytes(at.take());
    if code == 0 {
        return Ok(Ok(value));
    }
    let kind = KINDS.iter().find(|(_, known)| *known == code).map(|(kind, _)| *kind);
    match kind {
        Some(kind) if value <= MAX_REASON as u64 => Ok(Err((kind, value as usize))),
        _ => Err(Error::new(ErrorKind::Protocol, "read an answer", "it is none")),
    }
}

pub(super) struct Put<'a>(pub &'a mut [u8]);

impl Put<'_> {
    pub(super) fn put(&mut self, bytes: &[u8]) {
        let (head, rest) = std::mem::take(&mut self.0).split_at_mut(bytes.len());
        head.copy_from_slice(bytes);
        self.0 = rest;
    }
}

pub(super) struct Take<'a>(pub &'a [u8]);

impl Take<'_> {
    pub(super) fn take<const N: usize>(&mut self) -> [u8; N] {
        let (head, rest) = self.0.split_at(N);
        self.0 = rest;
        let mut out = [0; N];
        out.copy_from_slice(head);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_way() {
        let request =
            Request { op: Op::Digest, digest: true, token: 1, epoch: 2, offset: 3, length: 4, limit_ms: 5 };
        assert_eq!(Request::decode(&request.encode()).expect("one"), request);
        let greeting = Greeting {
            pid: 7,
            direct: true,
            pid_namespace: 8,
            boot: [9; 16],
            cookie: [10; 16],
            cookie_address: 11,
        };
        assert_eq!(Greeting::decode(&greeting.encode()), greeting);
    }

    #[test]
    fn each_kind_of_refusal_arrives_as_itself() {
        for (kind, _) in KINDS {
            let reply = encode_reply(&Err(Error::new(kind, "do it", "because")));
            let head: [u8; REPLY] = reply[..REPLY].try_into().expect("long enough");
            assert_eq!(decode_reply(&head).expect("one"), Err((kind, 7)));
            assert_eq!(&reply[REPLY..], b"because");
        }
    }

    #[test]
    fn what_is_no_message_is_refused() {
        assert_eq!(Request::decode(&[0xff; Request::LENGTH]).expect_err("none").kind(), ErrorKind::Protocol);
        assert_eq!(decode_reply(&[0xff; REPLY]).expect_err("none").kind(), ErrorKind::Protocol);
        assert_eq!(decode_reply(&[1; REPLY]).expect_err("an endless reason").kind(), ErrorKind::Protocol);
    }

    #[test]
    fn a_proof_is_of_one_side_one_secret_and_one_connection() {
        let secret = Secret::new("s").expect("not empty");
        let (a, b) = ([1; NONCE], [2; NONCE]);
        let proof = secret.proof(Side::Owner, &a, &b);
        secret.verify(Side::Owner, &a, &b, &proof).expect("its own");
        let refused = [
            secret.verify(Side::Requester, &a, &b, &proof),
            secret.verify(Side::Owner, &b, &a, &proof),
            Secret::new("t").expect("not empty").verify(Side::Owner, &a, &b, &proof),
            secret.verify(Side::Owner, &a, &b, &proof[..16]),
        ];
        for outcome in refused {
            assert_eq!(outcome.expect_err("another").kind(), ErrorKind::Refused);
        }
    }
}
