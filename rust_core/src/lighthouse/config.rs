//! `lighthouse.json`: what one lighthouse is told at its start.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::quorum::Options;
use crate::wire::one_or_several;
use crate::wire::tls::Identity;
use crate::{Error, ErrorKind, Result};

const OPERATION: &str = "read the lighthouse's configuration";

/// Configuration as written by the launcher. Unknown keys are refused: they would be ignored wishes.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Run that this lighthouse serves.
    pub run_id: String,
    /// Path of `private.json`, which holds the run's token; none: no authentication, loopback only.
    #[serde(default)]
    pub private: Option<PathBuf>,
    /// Whether the port speaks TLS, with a certificate of the run on both sides (`identities.lighthouse` in
    /// `private.json`); absent: wherever it is not on loopback, where it has to.
    #[serde(default)]
    pub tls: Option<bool>,
    /// Address to bind where no listening socket is inherited.
    #[serde(default = "default_listen")]
    pub listen: SocketAddr,
    /// Addresses of the control channel, `unix:<path>` or `tls:<host>:<port>`, one or several; none: nobody can evict.
    /// In place of (the first) `tls:` one stands a second inherited socket, where there is one.
    #[serde(default, deserialize_with = "one_or_several")]
    pub control: Vec<String>,
    /// File that keeps quorum ids and fences over restarts; none: they last as long as the process.
    #[serde(default)]
    pub state: Option<PathBuf>,
    /// Never form a quorum of fewer groups.
    pub min_replicas: usize,
    /// Groups that a start waits for; `min_replicas` where absent.
    #[serde(default)]
    pub expect: Option<usize>,
    /// Longest wait of a start, seconds.
    #[serde(default = "default_join_timeout_s")]
    pub join_timeout_s: f64,
    /// Silence after which a group counts as gone without being evicted, seconds.
    #[serde(default = "default_heartbeat_timeout_s")]
    pub heartbeat_timeout_s: f64,
    /// Niceness to take, -20 to 19.
    #[serde(default)]
    pub nice: Option<i32>,
    /// Command of the helper that serves a TCPStore for each quorum; none: each quorum has its members' own stores.
    #[serde(default)]
    pub store_argv: Option<Vec<String>>,
    /// Where it listens: an address of this machine that the ranks of all hosts reach; absent: that of the lighthouse,
    /// and where this is not loopback, nowhere. Stores know no authentication.
    #[serde(default)]
    pub address: Option<IpAddr>,
    /// `PATH` of that helper; none: this process's own.
    #[serde(default)]
    pub store_path: Option<String>,
    /// Which lighthouse the run uses; only `sky-monarch` is ours.
    #[serde(default = "default_kind")]
    pub kind: String,
}

fn default_listen() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

fn default_join_timeout_s() -> f64 {
    60.0
}

fn default_heartbeat_timeout_s() -> f64 {
    2.0
}

fn default_kind() -> String {
    "sky-monarch".into()
}

impl Config {
    /// Parses and checks `json`; touches nothing.
    pub fn parse(json: &str) -> Result<Self> {
        let config: Self = serde_json::from_str(json).map_err(|error| invalid(error.to_string()))?;
        let options = config.options()?;
        if options.min_replicas == 0 {
            return Err(invalid("min_replicas is 0; it must be at least 1"));
        }
        if options.expect < options.min_replicas {
            let (expect, min_replicas) = (options.expect, options.min_replicas);
            return Err(invalid(format!("expect is {expect}, less than min_replicas ({min_replicas})")));
        }
        if config.store_argv.as_ref().is_some_and(Vec::is_empty) {
            return Err(invalid("store_argv is empty"));
        }
        if config.address.is_some_and(|address| address.is_unspecified()) {
            return Err(invalid("address is no address that ranks can dial"));
        }
        if config.run_id.is_empty() {
            return Err(invalid("run_id is empty"));
        }
        if config.kind != "sky-monarch" {
            return Err(invalid(format!("kind is '{}'; this lighthouse is 'sky-monarch'", config.kind)));
        }
        if config.nice.is_some_and(|nice| !(-20..=19).contains(&nice)) {
            return Err(invalid("nice is outside -20..19"));
        }
        Ok(config)
    }

    /// The rules' knobs.
    pub fn options(&self) -> Result<Options> {
        Ok(Options {
            min_replicas: self.min_replicas,
            expect: self.expect.unwrap_or(self.min_replicas),
            join_timeout: seconds("join_timeout_s", self.join_timeout_s, 0.0)?,
            heartbeat_timeout: seconds("heartbeat_timeout_s", self.heartbeat_timeout_s, 0.05)?,
        })
    }

    /// The lighthouse's secrets, read from `private`.
    pub fn read_secrets(&self) -> Result<Option<Secrets>> {
        self.private.as_deref().map(secrets_in).transpose()
    }
}

/// What `private.json` holds for the lighthouse.
pub struct Secrets {
    /// The run's token.
    pub token: String,
    /// Its certificate; none: it can serve loopback only.
    pub identity: Option<Identity>,
}

#[derive(Deserialize)]
struct Private {
    token: String,
    #[serde(default)]
    identities: Identities,
}

#[derive(Default, Deserialize)]
struct Identities {
    lighthouse: Option<Identity>,
}

fn secrets_in(path: &Path) -> Result<Secrets> {
    const OPERATION: &str = "read the run's secrets";
    let named =
        |why: &str| Error::new(ErrorKind::InvalidInput, OPERATION, format!("{}: {why}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| named(&error.to_string()).with_source(error))?;
    // serde's message would quote the file, and with it the token
    let private: Private = serde_json::from_str(&text)
        .map_err(|_| named("no JSON object with a text 'token', or damaged 'identities'"))?;
    if private.token.is_empty() {
        return Err(named("the token is empty"));
    }
    Ok(Secrets { token: private.token, identity: private.identities.lighthouse })
}

fn seconds(name: &str, value: f64, least: f64) -> Result<Duration> {
    const DAY_S: f64 = 86_400.0;
    if !(least..=DAY_S).contains(&value) {
        return Err(invalid(format!("{name} is {value}; it must be {least} to {DAY_S}")));
    }
    Ok(Duration::from_secs_f64(value))
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, OPERATION, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_is_one_address_or_several() {
        for (given, read) in [
            ("null", &[][..]),
            (r#""unix:/a""#, &["unix:/a"]),
            (r#"["unix:/a", "tls:127.0.0.1:0"]"#, &["unix:/a", "tls:127.0.0.1:0"]),
        ] {
            let json = format!(r#"{{"run_id": "a", "min_replicas": 1, "control": {given}}}"#);
            assert_eq!(Config::parse(&json).expect("parses").control, read);
        }
    }

    #[test]
    fn what_is_left_out_takes_its_default() {
        let config = Config::parse(r#"{"run_id": "a", "min_replicas": 2}"#).expect("parses");
        let options = config.options().expect("options");
        assert_eq!((options.min_replicas, options.expect), (2, 2));
        assert_eq!(options.heartbeat_timeout, Duration::from_secs(2));
        assert!(config.listen.ip().is_loopback());
    }

    #[test]
    fn what_cannot_be_used_is_refused_by_name() {
        let cases = [
            (r#"{"run_id": "a"}"#, "min_replicas"),
            (r#"{"run_id": "a", "min_replicas": 0}"#, "min_replicas"),
            (r#"{"run_id": "a", "min_replicas": 2, "expect": 1}"#, "expect"),
            (r#"{"run_id": "a", "min_replicas": 1, "join_timeout_s": -1}"#, "join_timeout_s"),
            (r#"{"run_id": "a", "min_replicas": 1, "join_timeout_s": 1e300}"#, "join_timeout_s"),
            (r#"{"run_id": "a", "min_replicas": 1, "heartbeat_timeout_s": 0}"#, "heartbeat_timeout_s"),
            (r#"{"run_id": "a", "min_replicas": 1, "nice": 20}"#, "nice"),
            (r#"{"run_id": "a", "min_replicas": 1, "min_replica": 1}"#, "min_replica"),
            (r#"{"run_id": "a", "min_replicas": 1, "listen": "localhost"}"#, "socket address"),
            (r#"{"run_id": "a", "min_replicas": 1, "kind": "torchft"}"#, "kind"),
            (r#"{"run_id": "", "min_replicas": 1}"#, "run_id"),
            (r#"{"run_id": "a", "min_replicas": 1, "store_argv": []}"#, "store_argv"),
            (r#"{"run_id": "a", "min_replicas": 1, "address": "0.0.0.0"}"#, "address"),
        ];
        for (json, named) in cases {
            let error = Config::parse(json).expect_err(json);
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.to_string().contains(named), "{error}");
        }
    }

    #[test]
    fn a_broken_private_file_is_reported_without_its_content() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("private.json");
        std::fs::write(&path, r#"{"token": ["s3cret"]}"#).expect("written");
        let error = secrets_in(&path).err().expect("no text");
        assert!(
            error.to_string().contains("private.json") && !format!("{error:?}").contains("s3cret"),
            "{error:?}"
        );
    }
}
