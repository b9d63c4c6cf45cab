//! Where a listener is: `unix:<path>` or `tls:<host>:<port>`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Deserializer};

use crate::{Error, ErrorKind, Result};

/// Longest path of a unix socket: `sun_path` has 108 bytes, one of them for the final NUL.
const MAX_UNIX_PATH: usize = 107;

/// Where a listener is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A unix socket, by absolute path.
    Unix(PathBuf),
    /// A TCP port that speaks TLS with certificates on both sides.
    Tls {
        /// Name or numeric address, IPv6 without brackets.
        host: String,
        /// Port; 0 lets a listener choose.
        port: u16,
    },
}

/// Reads a text, a list of texts or nothing: for fields that held one address before they held several.
pub(crate) fn one_or_several<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Form {
        One(String),
        Several(Vec<String>),
    }
    Ok(match Option::deserialize(from)? {
        None => Vec::new(),
        Some(Form::One(one)) => vec![one],
        Some(Form::Several(several)) => several,
    })
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: &str| {
            Err(Error::new(ErrorKind::InvalidInput, "read an address", format!("{text:?} {why}")))
        };
        if let Some(path) = text.strip_prefix("unix:") {
            if !path.starts_with('/') || path.contains('\0') {
                return bad("needs an absolute path after `unix:`");
            }
            if path.len() > MAX_UNIX_PATH {
                return bad(&format!("has {} bytes; the system allows {MAX_UNIX_PATH}", path.len()));
            }
            return Ok(Self::Unix(path.into()));
        }
        if let Some(rest) = text.strip_prefix("tls:") {
            let Some((host, port)) = rest.rsplit_once(':') else { return bad("needs `tls:<host>:<port>`") };
            let Ok(port) = port.parse() else { return bad("has no port between 0 and 65535 at its end") };
            let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
            let host = match bare {
                Some(inner) if inner.parse::<std::net::Ipv6Addr>().is_ok() => inner,
                Some(_) => return bad("has brackets around what is no IPv6 address"),
                None if host.is_empty() || host.contains([':', '/', '@', ' ']) => {
                    return bad("has no usable host");
                }
                None => host,
            };
            return Ok(Self::Tls { host: host.to_owned(), port });
        }
        bad("starts with neither `unix:` nor `tls:`")
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tls { host, port } if host.contains(':') => write!(f, "tls:[{host}]:{port}"),
            Self::Tls { host, port } => write!(f, "tls:{host}:{port}"),
        }
    }
}
