//! The one error type of the core: what kind, during what, and why.

use std::fmt;

/// What went wrong, for the caller to act on. Each kind maps to exactly one Python exception class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The caller passed something that cannot be used.
    InvalidInput,
    /// The peer is unknown, speaks another version or failed to prove who it is.
    Refused,
    /// A deadline passed.
    TimedOut,
    /// The peer or the local end is gone.
    Closed,
    /// A frame or a queue exceeds its bound.
    TooLarge,
    /// Bytes that are not what the protocol allows.
    Protocol,
    /// The operating system said no.
    Io,
    /// A quorum could not be formed.
    Quorum,
    /// An accelerator, its library or its mask cannot be used.
    Device,
    /// A communicator could not be made; the devices are as they were, and another attempt may succeed.
    NotJoined,
    /// A communicator is lost: its ranks need another one.
    Communicator,
    /// A range is not inside the registered memory.
    OutOfBounds,
    /// The owner of the memory does not allow that.
    Forbidden,
    /// The owner of the memory has withdrawn it, or has it no more as of this epoch.
    Stale,
    /// Bytes are not what their digest says.
    Corrupt,
}

impl ErrorKind {
    /// Every kind, for tests that hold the mapping to Python complete.
    pub const ALL: [Self; 15] = [
        Self::InvalidInput,
        Self::Refused,
        Self::TimedOut,
        Self::Closed,
        Self::TooLarge,
        Self::Protocol,
        Self::Io,
        Self::Quorum,
        Self::Device,
        Self::NotJoined,
        Self::Communicator,
        Self::OutOfBounds,
        Self::Forbidden,
        Self::Stale,
        Self::Corrupt,
    ];

    /// Stable name, as Python and the logs show it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::InvalidInput => "invalid_input",
            Self::Refused => "refused",
            Self::TimedOut => "timed_out",
            Self::Closed => "closed",
            Self::TooLarge => "too_large",
            Self::Protocol => "protocol",
            Self::Io => "io",
            Self::Quorum => "quorum",
            Self::Device => "device",
            Self::NotJoined => "not_joined",
            Self::Communicator => "communicator",
            Self::OutOfBounds => "out_of_bounds",
            Self::Forbidden => "forbidden",
            Self::Stale => "stale",
            Self::Corrupt => "corrupt",
        }
    }
}

/// An error of the core.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    operation: &'static str,
    message: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// Result of the core.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind`, met during `operation` (a verb phrase, such as "dial the controller").
    pub fn new(kind: ErrorKind, operation: &'static str, message: impl Into<String>) -> Self {
        Self { kind, operation, message: message.into(), source: None }
    }

    /// The same, keeping what caused it.
    #[must_use]
    pub fn with_source(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.source = Some(Box::new(source));
        self
    }

    /// An operating-system error met during `operation`.
    pub fn io(operation: &'static str, source: std::io::Error) -> Self {
        let kind = match source.kind() {
            std::io::ErrorKind::TimedOut => ErrorKind::TimedOut,
            std::io::ErrorKind::UnexpectedEof
            | std::io::ErrorKind::BrokenPipe
            | std::io::ErrorKind::ConnectionReset
            | std::io::ErrorKind::ConnectionAborted => ErrorKind::Closed,
            _ => ErrorKind::Io,
        };
        Self::new(kind, operation, source.to_string()).with_source(source)
    }

    /// What went wrong.
    pub const fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Why, without the operation: for a peer that knows what it tried.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "could not {}: {}", self.operation, self.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}
