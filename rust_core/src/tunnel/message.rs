//! What is said before the bytes of a stream, and on a line: msgpack behind four bytes of length.

use std::net::SocketAddrV4;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::protocol::{self, certificate_name};
use crate::wire::io_error;
use crate::{Error, ErrorKind, Result};

/// Bytes of one message.
const MAX_BYTES: u32 = 4096;

/// The first words on every connection to the relay.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) version: u32,
    pub(super) run_id: String,
    pub(super) token: String,
    pub(super) host: String,
    pub(super) attempt: u32,
    pub(super) wish: Wish,
}

/// What the connection is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Wish {
    /// The line of a host: the relay says there who is wanted.
    Line,
    /// A stream to an address of the tunnel.
    Open { to: SocketAddrV4 },
    /// The other end of a stream that the line has told of.
    Take { id: u64 },
}

/// The relay's word on a wish. After it the connection is the line, or the stream.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Answer {
    pub(super) refused: Option<String>,
}

/// On a line, to the host: a stream is wanted.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Wanted {
    pub(super) id: u64,
    pub(super) port: u16,
}

/// On a line, from the host: it does not take that stream.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Declined {
    pub(super) id: u64,
    pub(super) why: String,
}

/// All that is read of a Hello before its version is known to be ours.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

/// Whether a Hello is one of this run, from the host that the certificate names.
pub(super) fn check(
    hello: &Hello,
    run_id: &str,
    token: &str,
    certificate: Option<&str>,
) -> Result<(), String> {
    if !bool::from(hello.token.as_bytes().ct_eq(token.as_bytes())) || hello.run_id != run_id {
        return Err("that is another run".to_owned());
    }
    let name = certificate_name(&hello.host, hello.attempt);
    if certificate != Some(name.as_str()) {
        let shown = certificate.unwrap_or("nobody");
        return Err(format!("the certificate of {shown} does not speak for {name}"));
    }
    Ok(())
}

/// Reads a Hello. [`ErrorKind::Refused`] where it is of another version.
pub(super) async fn hello(from: &mut (impl AsyncRead + Unpin)) -> Result<Hello> {
    let body = body(from).await?.ok_or_else(|| closed("it hung up before it said who it is"))?;
    let theirs = decode::<Versioned>(&body)?.version;
    if theirs != protocol::VERSION {
        let why = format!("protocol version {theirs}, this side speaks {}", protocol::VERSION);
        return Err(Error::new(ErrorKind::Refused, READ, why));
    }
    decode(&body)
}

/// Reads one message and no byte more: what follows it are the bytes of a stream. None where the peer has closed.
pub(super) async fn read<T: DeserializeOwned>(from: &mut (impl AsyncRead + Unpin)) -> Result<Option<T>> {
    body(from).await?.as_deref().map(decode).transpose()
}

/// Writes one message whole.
pub(super) async fn write<T: Serialize>(to: &mut (impl AsyncWrite + Unpin), message: &T) -> Result<()> {
    const WRITE: &str = "say something to the tunnel's other end";
    let body = rmp_serde::to_vec_named(message)
        .map_err(|error| Error::new(ErrorKind::InvalidInput, WRITE, error.to_string()))?;
    let length = u32::try_from(body.len()).ok().filter(|length| *length <= MAX_BYTES);
    let length = length.ok_or_else(|| Error::new(ErrorKind::TooLarge, WRITE, "the message is too long"))?;
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend(body);
    to.write_all(&bytes).await.map_err(|error| io_error(WRITE, error))?;
    to.flush().await.map_err(|error| io_error(WRITE, error))
}

const READ: &str = "hear the tunnel's other end";

fn closed(why: &str) -> Error {
    Error::new(ErrorKind::Closed, READ, why)
}

async fn body(from: &mut (impl AsyncRead + Unpin)) -> Result<Option<Vec<u8>>> {
    let mut length = [0; 4];
    match from.read_exact(&mut length).await {
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read.map_err(|error| io_error(READ, error))?,
    };
    let length = u32::from_le_bytes(length);
    if length > MAX_BYTES {
        return Err(Error::new(ErrorKind::TooLarge, READ, format!("a message of {length} bytes")));
    }
    let mut body = vec![0; length as usize];
    from.read_exact(&mut body).await.map_err(|error| io_error(READ, error))?;
    Ok(Some(body))
}

fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    rmp_serde::from_slice(body)
        .map_err(|error| Error::new(ErrorKind::Protocol, READ, error.to_string()).with_source(error))
}
