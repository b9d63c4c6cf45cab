//! What an owner gives away so that others can reach its memory.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::{Error, ErrorKind, Result};

/// What others may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Read.
    Read,
    /// Read and write.
    ReadWrite,
}

/// A registered range of another process. Plain data: whoever holds it and the secret of the run may use it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Handle {
    /// Where its owner is asked; numeric, so that no name has to resolve.
    pub address: SocketAddr,
    /// Bytes.
    pub length: u64,
    /// What others may do.
    pub access: Access,
    /// Of the owner's: a handle of another epoch is stale.
    pub epoch: u64,
    /// Random: handles of an owner that was restarted at the same address are stale, too.
    pub token: u64,
    /// Of an accelerator: nothing of the host can be mapped or attached.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub device: bool,
}

impl Handle {
    /// As text, for a store or a message.
    pub fn to_text(&self) -> String {
        // Plain fields: there is nothing that could fail.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The handle of [`Handle::to_text`]. [`ErrorKind::InvalidInput`] where it is none.
    pub fn from_text(text: &str) -> Result<Self> {
        serde_json::from_str(text).map_err(|error| {
            Error::new(ErrorKind::InvalidInput, "read a handle", error.to_string()).with_source(error)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_survives_the_way_as_text() {
        let handle = Handle {
            address: "127.0.0.1:80".parse().expect("numeric"),
            length: u64::MAX,
            access: Access::ReadWrite,
            epoch: 3,
            token: u64::MAX - 1,
            device: true,
        };
        assert_eq!(Handle::from_text(&handle.to_text()).expect("one"), handle);
    }

    #[test]
    fn what_is_no_handle_is_refused() {
        for text in
            ["", "{}", "[]", r#"{"address":"localhost:80","length":1,"access":"read","epoch":1,"token":1}"#]
        {
            assert_eq!(Handle::from_text(text).expect_err("none").kind(), ErrorKind::InvalidInput, "{text}");
        }
    }
}
