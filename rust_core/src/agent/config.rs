//! What an agent is told when it starts: `agent.json`, and the secrets in `private.json`.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use super::doctor::Examination;
use super::notice::Notices;
use crate::wire::one_or_several;
use crate::wire::tls::Identity;
use crate::{Error, ErrorKind, Result};

/// `agent.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    /// The run this agent belongs to.
    pub run_id: String,
    /// Name of this host, unique in the run.
    pub host: String,
    /// How often this host has been provisioned; 0: never, it is simply there.
    #[serde(default)]
    pub attempt: u32,
    /// Run folder.
    pub run_dir: PathBuf,
    /// Working folder of ranks and `setup`, whatever their plans say: those were made on another host. None: as planned.
    #[serde(default)]
    pub workdir: Option<String>,
    /// What plans set goes on top of the environment that this agent was started with, not on top of nothing.
    #[serde(default)]
    pub inherit_env: bool,
    /// Path of `private.json`.
    pub private: PathBuf,
    /// Path of the socket that sessions dial.
    pub socket: PathBuf,
    /// Address of the controller.
    pub controller: String,
    /// Where ranks of other hosts reach those of this one; a number, no name.
    #[serde(default = "default_address")]
    pub address: IpAddr,
    /// Where the head's relay is, `tls:<host>:<port>`: this host and the others reach each other only through it.
    #[serde(default)]
    pub relay: Option<String>,
    /// Processes to keep alive beside the ranks; none but on the head.
    #[serde(default)]
    pub services: Vec<Service>,
    /// At the very end, how long to wait for a controller that does not answer.
    #[serde(default = "default_linger_s")]
    pub linger_s: f64,
    /// Bounds of waits that no job sets.
    #[serde(default)]
    pub limits: Limits,
    /// What looks at the host before its first group starts; none: nothing does.
    #[serde(default)]
    pub doctor: Option<Examination>,
    /// Where notices that this host is about to be taken away come from.
    #[serde(default)]
    pub notices: Notices,
}

/// A process that the agent keeps alive.
#[derive(Clone, Debug, Deserialize)]
pub struct Service {
    /// `controller`, `lighthouse`.
    pub name: String,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Variables on top of the agent's own environment.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// File that its output is appended to.
    pub log: PathBuf,
    /// File that names its pid.
    pub pid_file: PathBuf,
    /// Addresses to bind for it, one or two.
    #[serde(default, deserialize_with = "one_or_several")]
    pub listen: Vec<String>,
    /// How it learns of the address: `"reserve"` gives a number only, anything else the open sockets as fds 3 and 4.
    #[serde(default)]
    pub listen_env: Option<String>,
    /// A second process of it is kept started: it waits, before its first act, for the first one to end.
    #[serde(default)]
    pub spare: bool,
}

/// Bounds of waits that no job sets, in seconds.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// From the first rank that exits with code 0 to the last, where no session says more.
    pub siblings_s: f64,
    /// From the start of a group's first generation to the verdict that it has no session: a script may import for long
    /// before it makes one.
    pub session_s: f64,
    /// From the release of a group that is done to the end of its ranks. A last resort: how long a last evaluation may
    /// take is for the controller to decide, whose own limit is shorter.
    pub drain_s: f64,
    /// From SIGKILL to the end of a process tree.
    pub kill_s: f64,
    /// For an eviction that the lighthouse does not answer.
    pub evict_s: f64,
    /// For the controller to store the last events before the agent ends.
    pub flush_s: f64,
    /// From the start of a rank without a session to its standby. Those with one get it after the first commit, so this
    /// outlasts their imports, with which a standby must not compete.
    pub standby_s: f64,
    /// For a rank that hangs to write down where.
    pub stacks_s: f64,
    /// Without its controller for so long, an agent ends its ranks and itself: its place may have been given to another.
    /// 0: never. Absent: [`LEASE_S`] on a host that was provisioned, never on any other.
    pub lease_s: Option<f64>,
}

/// See [`Limits::lease_s`].
pub const LEASE_S: f64 = 600.0;

impl Default for Limits {
    fn default() -> Self {
        Self {
            siblings_s: 600.0,
            session_s: 10.0,
            drain_s: 900.0,
            kill_s: 60.0,
            evict_s: 10.0,
            flush_s: 5.0,
            standby_s: 30.0,
            stacks_s: 1.0,
            lease_s: None,
        }
    }
}

const fn default_address() -> IpAddr {
    IpAddr::V4(Ipv4Addr::LOCALHOST)
}

const fn default_linger_s() -> f64 {
    30.0
}

/// The one secret that the agent itself needs. Its `Debug` shows nothing.
#[derive(Clone, Deserialize)]
pub struct Token(String);

impl Token {
    /// The secret itself.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// What `private.json` holds for the agent.
#[derive(Clone, Debug)]
pub struct Secrets {
    /// The run's token.
    pub token: Token,
    /// This host's certificate; none: nothing beyond this machine can be dialled.
    pub identity: Option<Identity>,
}

#[derive(Deserialize)]
struct Private {
    token: Token,
    #[serde(default)]
    identities: Identities,
}

#[derive(Default, Deserialize)]
struct Identities {
    agent: Option<Identity>,
}

impl Config {
    /// Reads `agent.json` from its text and checks what can be checked before any side effect.
    pub fn parse(json: &str) -> Result<Self> {
        let bad = |message: String| Error::new(ErrorKind::InvalidInput, "read agent.json", message);
        let config: Self = serde_json::from_str(json).map_err(|cause| bad(cause.to_string()))?;
        for (field, value) in
            [("run_id", &config.run_id), ("host", &config.host), ("controller", &config.controller)]
        {
            if value.is_empty() {
                return Err(bad(format!("`{field}` is empty")));
            }
        }
        if !config.run_dir.is_dir() {
            return Err(bad(format!("`run_dir` is no folder: {}", config.run_dir.display())));
        }
        let seconds = [
            ("linger_s", config.linger_s),
            ("limits.siblings_s", config.limits.siblings_s),
            ("limits.session_s", config.limits.session_s),
            ("limits.drain_s", config.limits.drain_s),
            ("limits.kill_s", config.limits.kill_s),
            ("limits.evict_s", config.limits.evict_s),
            ("limits.flush_s", config.limits.flush_s),
            ("limits.standby_s", config.limits.standby_s),
            ("limits.stacks_s", config.limits.stacks_s),
            ("limits.lease_s", config.limits.lease_s.unwrap_or_default()),
            ("doctor.limit_s", config.doctor.as_ref().map_or(0.0, |doctor| doctor.limit_s)),
        ];
        if let Some((field, value)) = seconds.into_iter().find(|(_, value)| !(0.0..=1e9).contains(value)) {
            return Err(bad(format!("`{field}` is {value}, not a number of seconds")));
        }
        if config.doctor.as_ref().is_some_and(|doctor| doctor.argv.is_empty()) {
            return Err(bad("`doctor` has an empty `argv`".into()));
        }
        config.notices.check().map_err(|problem| bad(format!("`notices`: {problem}")))?;
        for service in &config.services {
            if service.argv.is_empty() {
                return Err(bad(format!("service `{}` has an empty `argv`", service.name)));
            }
            if service.listen.len() > 2 {
                return Err(bad(format!("service `{}` listens at more than two addresses", service.name)));
            }
        }
        Ok(config)
    }

    /// How long this agent may be without its controller; none: for ever.
    pub fn lease(&self) -> Option<Duration> {
        let default_s = if self.attempt > 0 { LEASE_S } else { 0.0 };
        let lease_s = self.limits.lease_s.unwrap_or(default_s);
        (lease_s > 0.0).then(|| Duration::from_secs_f64(lease_s))
    }

    /// Reads the agent's secrets from `private.json`.
    pub fn secrets(&self) -> Result<Secrets> {
        let text = std::fs::read_to_string(&self.private).map_err(|cause| {
            let message = format!("{}: {cause}", self.private.display());
            Error::new(ErrorKind::Io, "read private.json", message).with_source(cause)
        })?;
        // The error of serde_json quotes no values of strings, but is left out all the same: the file is all secrets.
        let private: Private = serde_json::from_str(&text).map_err(|_| {
            Error::new(
                ErrorKind::InvalidInput,
                "read private.json",
                "it holds no `token`, or damaged `identities`",
            )
        })?;
        if private.token.0.is_empty() {
            return Err(Error::new(ErrorKind::InvalidInput, "read private.json", "`token` is empty"));
        }
        Ok(Secrets { token: private.token, identity: private.identities.agent })
    }
}
