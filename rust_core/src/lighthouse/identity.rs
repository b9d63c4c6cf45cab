//! Who a request comes from, as the userinfo of its URL says: `r<replica>.g<generation>.<secret>`.
//!
//! TorchFT's managers pass the whole `TORCHFT_LIGHTHOUSE` URL to their HTTP/2 client, which sends the userinfo in
//! `:authority`; that makes it the one place where unmodified managers can carry an identity and a secret.

use std::fmt;

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

/// One generation of one replica group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Identity {
    /// Replica group.
    pub replica: u32,
    /// Generation.
    pub generation: u64,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "replica {} generation {}", self.replica, self.generation)
    }
}

/// Why a request is not let in. The texts never repeat what was sent: it may hold a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unauthenticated {
    /// A token is set and the URL has no userinfo.
    NoUserinfo,
    /// The userinfo has another form.
    Malformed,
    /// The secret is missing or not this run's.
    WrongSecret,
}

impl fmt::Display for Unauthenticated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoUserinfo => "this lighthouse wants http://r<replica>.g<generation>.<secret>@host:port; the URL has no userinfo",
            Self::Malformed => "the URL's userinfo is not r<replica>.g<generation>.<secret>",
            Self::WrongSecret => "the secret in the URL is not this run's",
        })
    }
}

/// Checks `authority` (`[userinfo@]host:port`) against the run's `token`.
///
/// Without a token everyone is let in; a userinfo of our form still tells who it is, any other is ignored.
pub fn authenticate(
    authority: Option<&str>,
    token: Option<&str>,
) -> Result<Option<Identity>, Unauthenticated> {
    let userinfo = authority.and_then(|authority| authority.rsplit_once('@')).map(|(userinfo, _)| userinfo);
    let parsed = userinfo.map(parse_userinfo);
    let Some(token) = token else { return Ok(parsed.flatten().map(|(identity, _)| identity)) };
    let (identity, secret) = parsed.ok_or(Unauthenticated::NoUserinfo)?.ok_or(Unauthenticated::Malformed)?;
    match secret {
        Some(secret) if secret_matches(secret, token) => Ok(Some(identity)),
        _ => Err(Unauthenticated::WrongSecret),
    }
}

/// Compares in a time that depends on the lengths only. An empty token matches nothing.
pub fn secret_matches(given: &str, token: &str) -> bool {
    !token.is_empty() && bool::from(given.as_bytes().ct_eq(token.as_bytes()))
}

/// Splits `r<replica>.g<generation>[.<secret>]`; numbers in plain decimal digits, without sign or leading zeros.
fn parse_userinfo(userinfo: &str) -> Option<(Identity, Option<&str>)> {
    let mut parts = userinfo.splitn(3, '.');
    let replica = decimal(parts.next()?.strip_prefix('r')?)?;
    let generation = decimal(parts.next()?.strip_prefix('g')?)?;
    Some((Identity { replica, generation }, parts.next()))
}

fn decimal<T: std::str::FromStr>(digits: &str) -> Option<T> {
    let plain =
        digits.bytes().all(|byte| byte.is_ascii_digit()) && (digits == "0" || !digits.starts_with('0'));
    if plain { digits.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HOST: &str = "127.0.0.1:4000";

    fn with_token(userinfo: &str) -> Result<Option<Identity>, Unauthenticated> {
        authenticate(Some(&format!("{userinfo}@{HOST}")), Some("s3cret"))
    }

    #[test]
    fn the_right_secret_lets_in_and_names_the_generation() {
        assert_eq!(with_token("r1.g3.s3cret"), Ok(Some(Identity { replica: 1, generation: 3 })));
    }

    #[test]
    fn a_secret_may_hold_dots() {
        let found = authenticate(Some("r0.g1.a.b.c@h:1"), Some("a.b.c"));
        assert_eq!(found, Ok(Some(Identity { replica: 0, generation: 1 })));
    }

    #[test]
    fn whatever_lacks_the_secret_is_refused() {
        for userinfo in ["r1.g3.S3cret", "r1.g3.s3cre", "r1.g3.s3crett", "r1.g3.", "r1.g3"] {
            assert_eq!(with_token(userinfo), Err(Unauthenticated::WrongSecret), "{userinfo}");
        }
        for userinfo in [
            "",
            "s3cret",
            "r.g3.s3cret",
            "r1.3.s3cret",
            "r-1.g3.s3cret",
            "r+1.g1.s3cret",
            "r01.g3.s3cret",
            "r1.g3:s3cret",
            "r99999999999.g1.s3cret",
        ] {
            assert_eq!(with_token(userinfo), Err(Unauthenticated::Malformed), "{userinfo}");
        }
        assert_eq!(authenticate(Some(HOST), Some("s3cret")), Err(Unauthenticated::NoUserinfo));
        assert_eq!(authenticate(None, Some("s3cret")), Err(Unauthenticated::NoUserinfo));
        assert_eq!(authenticate(Some("r1.g3.@h:1"), Some("")), Err(Unauthenticated::WrongSecret));
    }

    #[test]
    fn without_a_token_strangers_are_let_in_and_identities_still_read() {
        assert_eq!(authenticate(Some(HOST), None), Ok(None));
        assert_eq!(authenticate(Some("user:pw@h:1"), None), Ok(None));
        assert_eq!(authenticate(Some("r2.g7@h:1"), None), Ok(Some(Identity { replica: 2, generation: 7 })));
    }

    #[test]
    fn a_refusal_never_repeats_what_was_sent() {
        for refusal in [Unauthenticated::NoUserinfo, Unauthenticated::Malformed, Unauthenticated::WrongSecret]
        {
            assert!(!refusal.to_string().contains("s3cret"));
        }
    }

    proptest! {
        #[test]
        fn any_identity_survives_the_round_trip(replica: u32, generation: u64, secret in "[!-?A-~]{1,40}") {
            let authority = format!("r{replica}.g{generation}.{secret}@h:1");
            prop_assert_eq!(authenticate(Some(&authority), Some(&secret)), Ok(Some(Identity { replica, generation })));
        }

        #[test]
        fn no_other_text_gets_past_a_token(authority in "\\PC{0,60}") {
            prop_assume!(!authority.contains("s3cret"));
            prop_assert!(authenticate(Some(&authority), Some("s3cret")).is_err());
        }
    }
}
