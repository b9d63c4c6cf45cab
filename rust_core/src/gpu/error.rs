//! What a vendor's library says went wrong, and what to do about it.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::Platform;
use super::abi::ccl::CclResult;
use super::abi::device::Status;
use crate::error::ErrorKind;

/// What the one who called can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// Try again, or do without: the device is as it was.
    Retryable,
    /// The communicator is lost; the devices are not.
    CommunicatorFatal,
    /// This process has lost its device: only a new process gets it back.
    DeviceFatal,
    /// The call itself, or what is installed, is wrong: trying again changes nothing.
    Permanent,
}

/// An error of a device, its runtime or a communication library.
#[derive(Debug)]
#[non_exhaustive]
pub enum GpuError {
    /// A call returned an error.
    Status {
        /// The entry, as the vendor names it.
        api: &'static str,
        /// What it returned.
        code: Status,
        /// The vendor's text for it.
        text: String,
    },
    /// No copy of the library could be opened.
    NotFound {
        /// What it is for, such as "HIP".
        library: &'static str,
        /// Each name that was tried with what the linker said.
        tried: Vec<(String, String)>,
    },
    /// The library lacks an entry that every supported release has.
    MissingSymbol {
        /// The file.
        path: PathBuf,
        /// The entry.
        symbol: &'static str,
        /// The version that the library says, where it says one.
        version: Option<String>,
    },
    /// A call of a communication library returned an error.
    Ccl {
        /// The entry, as both vendors name it.
        api: &'static str,
        /// What it returned.
        code: CclResult,
        /// The library's own words for it.
        text: String,
        /// The communicator was only being made: nothing that was in use is lost.
        starting: bool,
    },
    /// The communicator was ended before, or by this.
    Lost {
        /// Why.
        why: String,
        /// What can be done.
        class: ErrorClass,
    },
    /// The library is there, but not this ability.
    Unsupported {
        /// What was asked.
        what: &'static str,
        /// Why not, and what would help.
        why: String,
    },
    /// The argument cannot be used.
    Invalid(String),
    /// It was not done in time: the device hangs, or is far slower than it should be.
    TimedOut {
        /// What was waited for.
        what: &'static str,
        /// How long.
        after: Duration,
    },
    /// A simulated library was met outside tests.
    Simulated(PathBuf),
}

/// Result of this part.
pub type GpuResult<T> = Result<T, GpuError>;

impl GpuError {
    /// What the one who called can do.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Status { code, .. } => match *code {
                Status::ECC_UNCORRECTABLE
                | Status::ILLEGAL_ADDRESS
                | Status::CONTEXT_IS_DESTROYED
                | Status::LAUNCH_FAILURE
                | Status::UNKNOWN => ErrorClass::DeviceFatal,
                Status::OUT_OF_MEMORY | Status::NOT_READY => ErrorClass::Retryable,
                _ => ErrorClass::Permanent,
            },
            Self::Ccl { code, starting, .. } => match *code {
                CclResult::INVALID_ARGUMENT | CclResult::INVALID_USAGE => ErrorClass::Permanent,
                // A call of the device's runtime failed inside: what is left of the device is not known.
                CclResult::UNHANDLED_DEVICE_ERROR => ErrorClass::DeviceFatal,
                _ if *starting => ErrorClass::Retryable,
                _ => ErrorClass::CommunicatorFatal,
            },
            Self::Lost { class, .. } => *class,
            // What hangs is not given back: only the end of the process ends it.
            Self::TimedOut { .. } => ErrorClass::DeviceFatal,
            _ => ErrorClass::Permanent,
        }
    }

    /// What a call returned; `None` where no call was made.
    pub fn code(&self) -> Option<Status> {
        match self {
            Self::Status { code, .. } => Some(*code),
            _ => None,
        }
    }
}

impl fmt::Display for GpuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status { api, code, text } => write!(f, "{api} returned {} ({code:?}): {text}", code.0),
            Self::NotFound { library, tried } => {
                let names: Vec<&str> = tried.iter().map(|(name, _)| name.as_str()).collect();
                write!(f, "no {library} library was found; tried {}", names.join(", "))?;
                // "No such file" is said of every name; another reason is the one that matters.
                match tried.iter().find(|(_, why)| !why.contains("No such file")) {
                    Some((name, why)) => write!(f, "; {name}: {why}"),
                    None => Ok(()),
                }
            }
            Self::MissingSymbol { path, symbol, version } => {
                let version =
                    version.as_ref().map(|version| format!(" (version {version})")).unwrap_or_default();
                write!(
                    f,
                    "{}{version} has no {symbol}: it is older than what is supported, or another library",
                    path.display()
                )
            }
            Self::Ccl { api, code, text, .. } => write!(f, "{api} returned {} ({code:?}): {text}", code.0),
            Self::Lost { why, class: ErrorClass::Retryable } => write!(f, "no communicator was made: {why}"),
            Self::Lost { why, .. } => write!(f, "the communicator is lost: {why}"),
            Self::Unsupported { what, why } => write!(f, "{what} is not supported here: {why}"),
            Self::TimedOut { what, after } => {
                write!(f, "{what} was not done after {:.1} s; its device hangs", after.as_secs_f64())
            }
            Self::Invalid(message) => f.write_str(message),
            Self::Simulated(path) => {
                write!(f, "{} is a SIMULATED device library; it is refused outside tests", path.display())
            }
        }
    }
}

impl std::error::Error for GpuError {}

impl From<GpuError> for crate::Error {
    fn from(error: GpuError) -> Self {
        let kind = match error {
            GpuError::Invalid(_) => ErrorKind::InvalidInput,
            GpuError::TimedOut { .. } => ErrorKind::TimedOut,
            GpuError::Ccl { .. } | GpuError::Lost { .. } => match error.class() {
                ErrorClass::Permanent => ErrorKind::InvalidInput,
                ErrorClass::Retryable => ErrorKind::NotJoined,
                ErrorClass::CommunicatorFatal => ErrorKind::Communicator,
                ErrorClass::DeviceFatal => ErrorKind::Device,
            },
            _ => ErrorKind::Device,
        };
        let is_of_several = matches!(error, GpuError::Ccl { .. } | GpuError::Lost { .. });
        let operation = if is_of_several { "use a communicator" } else { "use a device" };
        Self::new(kind, operation, error.to_string()).with_source(error)
    }
}

/// The platform's name in a message.
impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(code: i32) -> GpuError {
        GpuError::Status { api: "hipMalloc", code: Status(code), text: "text".into() }
    }

    #[test]
    fn an_error_says_what_was_called_and_what_can_be_done() {
        for code in [214, 700, 709, 719, 999] {
            assert_eq!(status(code).class(), ErrorClass::DeviceFatal, "{code}");
        }
        assert_eq!(status(2).class(), ErrorClass::Retryable);
        assert_eq!(status(101).class(), ErrorClass::Permanent);
        assert_eq!(status(101).to_string(), "hipMalloc returned 101 (INVALID_DEVICE): text");
        assert_eq!(
            status(1052).to_string(),
            "hipMalloc returned 1052 (Status(1052)): text",
            "unknown values survive"
        );
    }

    #[test]
    fn what_a_communication_library_returns_is_classed_by_what_is_left() {
        let class = |code, starting| {
            GpuError::Ccl { api: "ncclAllReduce", code, text: String::new(), starting }.class()
        };
        for code in
            [CclResult::SYSTEM_ERROR, CclResult::INTERNAL_ERROR, CclResult::REMOTE_ERROR, CclResult(42)]
        {
            assert_eq!(class(code, false), ErrorClass::CommunicatorFatal, "{code:?}");
            assert_eq!(class(code, true), ErrorClass::Retryable, "{code:?}");
        }
        for starting in [true, false] {
            assert_eq!(class(CclResult::UNHANDLED_DEVICE_ERROR, starting), ErrorClass::DeviceFatal);
            assert_eq!(class(CclResult::INVALID_USAGE, starting), ErrorClass::Permanent);
        }
    }

    #[test]
    fn a_library_that_is_there_and_cannot_be_loaded_is_what_the_message_is_about() {
        let tried = vec![
            ("libamdhip64.so.7".into(), "libamdhip64.so.7: No such file or directory".into()),
            ("libamdhip64.so.6".into(), "libdrm.so.2: version `X' not found".into()),
        ];
        let text = GpuError::NotFound { library: "HIP", tried }.to_string();
        assert!(text.ends_with("libamdhip64.so.6: libdrm.so.2: version `X' not found"), "{text}");
    }
}
