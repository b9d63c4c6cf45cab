//! Bounds of the tunnel.

use std::time::Duration;

/// How much and how long; the defaults are for a run of hundreds of hosts, tests have their own.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Streams of one host at a time, in both directions together.
    pub streams: usize,
    /// Streams of all hosts at a time, at the relay.
    pub all_streams: usize,
    /// Addresses at which an agent listens in place of other hosts' ranks.
    pub mirrors: usize,
    /// From a dialled connection to its handshake and first words.
    pub handshake: Duration,
    /// From the wish for a stream to its first byte.
    pub open: Duration,
    /// How long a wish waits for a host whose line is away: the relay, or that agent, was just started anew.
    pub line: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            streams: 1024,
            all_streams: 16 * 1024,
            mirrors: 8192,
            handshake: Duration::from_secs(5),
            open: Duration::from_secs(8),
            line: Duration::from_secs(2),
        }
    }
}
