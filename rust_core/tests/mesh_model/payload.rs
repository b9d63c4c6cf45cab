//! What a message carries: here only how many bytes.

use bytes::Bytes;

use crate::Result;

#[derive(Clone, Debug, Default)]
pub struct Blob(pub Bytes);

impl Blob {
    pub const fn bytes(&self) -> Option<&Bytes> {
        Some(&self.0)
    }
}

/// Never there.
#[derive(Clone, Debug)]
pub enum Memory {}

impl Memory {
    pub const fn id(&self) -> u64 {
        match *self {}
    }
}

pub struct Packed {
    pub parts: Vec<crate::packet::Part>,
    pub segments: Vec<Bytes>,
    pub memory: Option<Memory>,
}

#[derive(Clone, Debug, Default)]
pub struct Payload(pub Vec<Blob>);

impl Payload {
    pub fn from_parts<'a>(parts: impl Iterator<Item = &'a [u8]>) -> Result<Self> {
        Ok(Self(parts.map(|part| Blob(Bytes::copy_from_slice(part))).collect()))
    }

    pub fn packed(&self) -> Packed {
        Packed {
            parts: Vec::new(),
            segments: self.0.iter().map(|blob| blob.0.clone()).collect(),
            memory: None,
        }
    }

    pub fn blobs(&self) -> Result<Vec<Blob>> {
        Ok(self.0.clone())
    }
}
