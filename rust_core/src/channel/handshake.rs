//! The first two frames of every connection: who dials, and whether that is welcome.

use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

use super::pump::{self, Reader, Writer};
use super::{Channel, Credentials, Limits};
use crate::protocol::{self, Hello, Peer, Welcome};
use crate::wire::{self, Address, Frame, FrameReader, FrameWriter, Stream};
use crate::{Error, ErrorKind, Result};

/// Bytes of a Hello or a Welcome. An agent's Hello lists its groups, about 100 bytes each.
const MAX_HANDSHAKE_FRAME: u32 = 1 << 20;

/// All that is read of a Hello before its version is known to be ours.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

pub(super) fn halves(stream: Stream) -> (Reader, Writer) {
    let (read, write) = stream.split();
    let reader: Reader = FrameReader::new(Box::pin(read), MAX_HANDSHAKE_FRAME);
    let writer: Writer = FrameWriter::new(Box::pin(write), MAX_HANDSHAKE_FRAME);
    (reader, writer)
}

/// Dials `address`, says who we are and waits for the answer, all within `deadline`.
///
/// [`ErrorKind::Refused`] with the peer's reason where it does not want us (another try will not help),
/// [`ErrorKind::Closed`] where nobody listens, [`ErrorKind::TimedOut`] where nobody answers.
pub async fn connect<Out, In>(
    address: &Address,
    peer: Peer,
    credentials: &Credentials,
    limits: &Limits,
    deadline: Duration,
) -> Result<Channel<Out, In>>
where
    Out: Serialize,
    In: DeserializeOwned + Send + 'static,
{
    let dialling = async {
        let identity = credentials.identity.as_ref();
        let stream = wire::dial(address, identity, &credentials.server_name).await?;
        let (mut reader, mut writer) = halves(stream);
        let hello = Hello {
            version: protocol::VERSION,
            run_id: credentials.run_id.clone(),
            token: credentials.token.clone(),
            peer,
        };
        // A listener may refuse, and hang up, before it has read our words: its answer counts, not our failed write.
        let said = writer.write(&Frame::from_message(&hello)?).await;
        let welcome = reader.read().await;
        let welcome = match (welcome, said) {
            (Ok(Some(frame)), _) => frame,
            (Ok(None), Ok(())) => {
                return Err(Error::new(ErrorKind::Closed, DIAL, "the peer hung up without an answer"));
            }
            (Err(error), Ok(())) | (_, Err(error)) => return Err(error),
        };
        check_version(&welcome)?;
        if let Some(reason) = welcome.message::<Welcome>()?.refused {
            return Err(Error::new(ErrorKind::Refused, DIAL, reason));
        }
        Ok(pump::start(reader, writer, limits, None))
    };
    let late =
        |_| Error::new(ErrorKind::TimedOut, DIAL, format!("no answer from {address} within {deadline:?}"));
    tokio::time::timeout(deadline, dialling).await.map_err(late)?
}

const DIAL: &str = "connect";

fn check_version(welcome: &Frame) -> Result<()> {
    let theirs = welcome.message::<Versioned>()?.version;
    let refused = welcome.message::<Welcome>().ok().and_then(|welcome| welcome.refused);
    if theirs == protocol::VERSION || refused.is_some() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Refused, DIAL, versions(theirs, protocol::VERSION)))
}

fn versions(theirs: u32, ours: u32) -> String {
    format!(
        "the peer speaks protocol version {theirs}, this side speaks {ours}: use one release of sky-monarch"
    )
}

/// Reads a Hello and checks what needs no application: version, token, run.
pub(super) async fn receive(reader: &mut Reader, credentials: &Credentials) -> Result<Hello> {
    let refused = |reason: String| Err(Error::new(ErrorKind::Refused, "accept a peer", reason));
    let Some(frame) = reader.read().await? else {
        return Err(Error::new(ErrorKind::Closed, "accept a peer", "it hung up before it said who it is"));
    };
    let theirs = frame.message::<Versioned>()?.version;
    if theirs != protocol::VERSION {
        return refused(versions(theirs, protocol::VERSION));
    }
    let hello: Hello = frame.message()?;
    if !bool::from(hello.token.as_bytes().ct_eq(credentials.token.as_bytes())) {
        return refused("the token is not this run's".to_owned());
    }
    if hello.run_id != credentials.run_id {
        return refused(format!("this is run {:?}, not {:?}", credentials.run_id, hello.run_id));
    }
    Ok(hello)
}

/// Answers a Hello.
pub(super) async fn answer(writer: &mut Writer, refused: Option<String>) -> Result<()> {
    let welcome = Welcome { version: protocol::VERSION, refused };
    writer.write(&Frame::from_message(&welcome)?).await
}
