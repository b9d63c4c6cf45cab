//! One frame: a msgpack header and raw segments, and how both are found in a stream of bytes.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::{Error, ErrorKind, Result};

/// Version of the layout of a frame (not of the messages inside: that is [`crate::protocol::VERSION`]).
pub const VERSION: u8 = 1;

/// Segments that one frame may have.
pub const MAX_SEGMENTS: usize = 1024;

/// Length of the length.
const PREFIX: usize = 4;
/// Version, number of segments, length of the header.
const FIXED: usize = 1 + 2 + 4;
/// Room made for one read while no frame is under way, and at most while one is.
const READ_SMALL: usize = 16 * 1024;
const READ_LARGE: usize = 1024 * 1024;
/// Nesting that a header may have. Our messages need 8; a hostile one must not spend the stack.
const MAX_DEPTH: usize = 64;

/// One frame. Cloning it copies no payload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    /// One msgpack value with named fields.
    pub header: Bytes,
    /// Raw bytes that belong to it.
    pub segments: Vec<Bytes>,
}

impl Frame {
    /// A frame with `message` as its header and no segments.
    pub fn from_message<T: Serialize>(message: &T) -> Result<Self> {
        let header = rmp_serde::to_vec_named(message).map_err(|error| {
            Error::new(ErrorKind::InvalidInput, "encode a message", error.to_string()).with_source(error)
        })?;
        Ok(Self { header: header.into(), segments: Vec::new() })
    }

    /// The same with fields that have a place instead of a name, which takes half as long: [`message`](Self::message)
    /// reads both. For messages whose two sides are of one version.
    pub fn from_compact<T: Serialize>(message: &T) -> Result<Self> {
        let mut header = Vec::with_capacity(64);
        rmp_serde::encode::write(&mut header, message).map_err(|error| {
            Error::new(ErrorKind::InvalidInput, "encode a message", error.to_string()).with_source(error)
        })?;
        Ok(Self { header: header.into(), segments: Vec::new() })
    }

    /// The header as a message. [`ErrorKind::Protocol`] where it is not one, or where bytes follow it.
    pub fn message<T: DeserializeOwned>(&self) -> Result<T> {
        let what = std::any::type_name::<T>();
        let bad =
            |why: String| Error::new(ErrorKind::Protocol, "decode a message", format!("no {what}: {why}"));
        let mut rest = &self.header[..];
        let mut decoder = rmp_serde::Deserializer::new(&mut rest);
        decoder.set_max_depth(MAX_DEPTH);
        let message = T::deserialize(&mut decoder).map_err(|error| bad(error.to_string()))?;
        drop(decoder);
        if !rest.is_empty() {
            return Err(bad(format!("{} bytes follow it", rest.len())));
        }
        Ok(message)
    }

    /// Length on the wire without the four bytes of the length itself: what the bound applies to.
    pub fn wire_len(&self) -> usize {
        let payload: usize = self.segments.iter().map(Bytes::len).sum();
        FIXED + 4 * self.segments.len() + self.header.len() + payload
    }

    /// Refuses what the other side would refuse too.
    pub fn check(&self, max_frame: u32) -> Result<()> {
        if self.segments.len() > MAX_SEGMENTS {
            return Err(too_large(format!("{} segments; {MAX_SEGMENTS} are allowed", self.segments.len())));
        }
        check_len(self.wire_len(), max_frame)
    }

    /// Everything before the segments.
    pub(crate) fn head(&self) -> Result<BytesMut> {
        self.head_with_room(0)
    }

    /// All of it, as it travels.
    pub(crate) fn whole(&self) -> Result<Bytes> {
        let mut bytes = self.head_with_room(self.segments.iter().map(Bytes::len).sum())?;
        for segment in &self.segments {
            bytes.put_slice(segment);
        }
        Ok(bytes.freeze())
    }

    fn head_with_room(&self, room: usize) -> Result<BytesMut> {
        let overflow = |_| too_large("a length does not fit into 32 bits".to_owned());
        let len = PREFIX + FIXED + 4 * self.segments.len() + self.header.len();
        let mut head = BytesMut::with_capacity(len + room);
        head.put_u32_le(u32::try_from(self.wire_len()).map_err(overflow)?);
        head.put_u8(VERSION);
        head.put_u16_le(u16::try_from(self.segments.len()).map_err(overflow)?);
        head.put_u32_le(u32::try_from(self.header.len()).map_err(overflow)?);
        for segment in &self.segments {
            head.put_u32_le(u32::try_from(segment.len()).map_err(overflow)?);
        }
        head.put_slice(&self.header);
        Ok(head)
    }
}

fn too_large(what: String) -> Error {
    Error::new(ErrorKind::TooLarge, "frame a message", what)
}

fn check_len(len: usize, max_frame: u32) -> Result<()> {
    if len > max_frame as usize {
        return Err(too_large(format!("the frame has {len} bytes; {max_frame} are allowed")));
    }
    Ok(())
}

/// Takes one whole frame off the front of `buffer`; none where more bytes are needed.
///
/// Allocates nothing but the list of segments: header and segments share the memory of `buffer`.
/// [`ErrorKind::TooLarge`] and [`ErrorKind::Protocol`] are final: the stream cannot be read any further.
pub fn decode(buffer: &mut BytesMut, max_frame: u32) -> Result<Option<Frame>> {
    let Some(len) = announced_len(buffer) else { return Ok(None) };
    check_len(len, max_frame)?;
    let bad = |why: String| Error::new(ErrorKind::Protocol, "read a frame", why);
    // The version is looked at as soon as it is there: a stranger's bytes are not waited for.
    if let Some(&version) = buffer.get(PREFIX)
        && version != VERSION
    {
        return Err(bad(format!("its layout has version {version}; this side reads {VERSION}")));
    }
    if len < FIXED {
        return Err(bad(format!("{len} bytes are no whole frame")));
    }
    if buffer.len() < PREFIX + len {
        return Ok(None);
    }
    let mut body = buffer.split_to(PREFIX + len).freeze();
    body.advance(PREFIX + 1);
    let count = usize::from(body.get_u16_le());
    let header_len = body.get_u32_le() as usize;
    if count > MAX_SEGMENTS || body.len() < 4 * count {
        return Err(bad(format!("{count} segments do not fit")));
    }
    let lens: Vec<usize> = (0..count).map(|_| body.get_u32_le() as usize).collect();
    // No overflow: at most 1025 values of 32 bits in 64.
    if header_len + lens.iter().sum::<usize>() != body.len() {
        return Err(bad("the lengths of its parts do not add up".to_owned()));
    }
    let header = body.split_to(header_len);
    let segments = lens.into_iter().map(|len| body.split_to(len)).collect();
    Ok(Some(Frame { header, segments }))
}

fn announced_len(buffer: &[u8]) -> Option<usize> {
    let prefix: [u8; PREFIX] = buffer.get(..PREFIX)?.try_into().ok()?;
    Some(u32::from_le_bytes(prefix) as usize)
}

/// Reads frames off a stream.
#[derive(Debug)]
pub struct FrameReader<R> {
    stream: R,
    buffer: BytesMut,
    max_frame: u32,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// Reads frames of at most `max_frame` bytes.
    pub fn new(stream: R, max_frame: u32) -> Self {
        Self { stream, buffer: BytesMut::new(), max_frame }
    }

    /// The same stream, bytes read ahead included, with another bound.
    #[must_use]
    pub fn with_max_frame(mut self, max_frame: u32) -> Self {
        self.max_frame = max_frame;
        self
    }

    /// The next frame; none when the peer closed between two frames. Cancel safe.
    pub async fn read(&mut self) -> Result<Option<Frame>> {
        loop {
            if let Some(frame) = decode(&mut self.buffer, self.max_frame)? {
                return Ok(Some(frame));
            }
            // Room grows with what has arrived, not with what was announced: a length alone reserves nothing.
            let missing =
                announced_len(&self.buffer).map_or(0, |len| (PREFIX + len).saturating_sub(self.buffer.len()));
            self.buffer.reserve(missing.clamp(READ_SMALL, READ_LARGE));
            let count = self.stream.read_buf(&mut self.buffer).await;
            // A process that is killed says no farewell of TLS either. What it has sent is whole or it is not: frames
            // have lengths, so that nothing is taken for whole that somebody has cut off.
            let cut = count.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::UnexpectedEof);
            if cut {
                let what = "the peer ended without closing the connection";
                return Err(Error::new(ErrorKind::Closed, "read from a connection", what));
            }
            match count.map_err(|error| super::stream::io_error("read from a connection", error))? {
                0 if self.buffer.is_empty() => return Ok(None),
                0 => {
                    let what = "the peer closed the connection inside a frame";
                    return Err(Error::new(ErrorKind::Closed, "read from a connection", what));
                }
                _ => {}
            }
        }
    }
}

/// Writes frames to a stream.
#[derive(Debug)]
pub struct FrameWriter<W> {
    stream: W,
    max_frame: u32,
}

impl<W: AsyncWrite + Unpin> FrameWriter<W> {
    /// Writes frames of at most `max_frame` bytes.
    pub const fn new(stream: W, max_frame: u32) -> Self {
        Self { stream, max_frame }
    }

    /// The same stream with another bound.
    #[must_use]
    pub fn with_max_frame(mut self, max_frame: u32) -> Self {
        self.max_frame = max_frame;
        self
    }

    /// Writes one frame whole. Not cancel safe: after a cancelled write the stream is of no use.
    pub async fn write(&mut self, frame: &Frame) -> Result<()> {
        frame.check(self.max_frame)?;
        let head = frame.head()?;
        let writing = async {
            self.stream.write_all(&head).await?;
            for segment in &frame.segments {
                self.stream.write_all(segment).await?;
            }
            self.stream.flush().await
        };
        writing.await.map_err(|error| super::stream::io_error("write to a connection", error))
    }

    /// Says that no more frames come.
    pub async fn shutdown(&mut self) -> Result<()> {
        self.stream.shutdown().await.map_err(|error| super::stream::io_error("close a connection", error))
    }
}
