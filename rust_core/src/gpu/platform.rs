//! Which vendor's devices a host has.

use std::path::Path;
use std::sync::OnceLock;

use super::error::{GpuError, GpuResult};
use super::library::loaded_copies;

/// Variable that forces a platform: `rocm`, `cuda` or `host`.
pub const FORCE_PLATFORM: &str = "SKY_MONARCH_GPU_PLATFORM";

/// Whose devices are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Platform {
    /// AMD's, through HIP and RCCL.
    Rocm,
    /// NVIDIA's, through CUDA and NCCL.
    Cuda,
    /// None: memory of the host.
    Host,
}

impl Platform {
    /// Stable name, as the variable takes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rocm => "rocm",
            Self::Cuda => "cuda",
            Self::Host => "host",
        }
    }
}

/// What of each vendor is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Present {
    /// AMD's kernel driver.
    pub rocm_driver: bool,
    /// NVIDIA's kernel driver.
    pub cuda_driver: bool,
    /// HIP is loaded in this process: its torch is a ROCm build.
    pub rocm_loaded: bool,
    /// CUDA's runtime is loaded in this process.
    pub cuda_loaded: bool,
}

impl Present {
    /// Look below `root` (`/` for this host), and at what this process has loaded. Opens no device.
    pub fn look(root: &Path) -> Self {
        let exists = |path: &str| root.join(path).exists();
        Self {
            rocm_driver: exists("dev/kfd"),
            cuda_driver: exists("dev/nvidiactl") || exists("proc/driver/nvidia/version"),
            rocm_loaded: !loaded_copies("libamdhip64").is_empty(),
            cuda_loaded: !loaded_copies("libcudart").is_empty(),
        }
    }
}

/// A platform and why it is the one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The platform.
    pub platform: Platform,
    /// Why, for a person.
    pub reason: String,
}

/// Choose by what is forced, else by what is there. Devices of both vendors are an answer too: that of the process's own
/// torch, else AMD's.
///
/// # Errors
/// [`GpuError::Invalid`] where `forced` is no platform.
pub fn choose(forced: Option<&str>, present: Present) -> GpuResult<Choice> {
    let because = |platform, reason: &str| Ok(Choice { platform, reason: reason.into() });
    match forced.filter(|name| !name.is_empty()) {
        Some("rocm") => return because(Platform::Rocm, "SKY_MONARCH_GPU_PLATFORM says so"),
        Some("cuda") => return because(Platform::Cuda, "SKY_MONARCH_GPU_PLATFORM says so"),
        Some("host") => return because(Platform::Host, "SKY_MONARCH_GPU_PLATFORM says so"),
        Some(other) => {
            return Err(GpuError::Invalid(format!(
                "{FORCE_PLATFORM}={other}: no such platform; set it to rocm, cuda or host, or leave it out"
            )));
        }
        None => {}
    }
    match (present.rocm_driver, present.cuda_driver) {
        (true, false) => because(Platform::Rocm, "/dev/kfd is here"),
        (false, true) => because(Platform::Cuda, "NVIDIA's driver is here"),
        (false, false) => because(Platform::Host, "no driver of AMD or NVIDIA is here"),
        (true, true) if present.cuda_loaded && !present.rocm_loaded => {
            because(Platform::Cuda, "devices of both vendors are here, and this process has CUDA loaded")
        }
        (true, true) if present.rocm_loaded => {
            because(Platform::Rocm, "devices of both vendors are here, and this process has HIP loaded")
        }
        (true, true) => because(
            Platform::Rocm,
            "devices of both vendors are here; SKY_MONARCH_GPU_PLATFORM=cuda chooses the others",
        ),
    }
}

/// This process's platform: chosen once, when it is first asked for.
///
/// # Errors
/// As [`choose`].
pub fn current() -> Result<&'static Choice, &'static GpuError> {
    static CURRENT: OnceLock<GpuResult<Choice>> = OnceLock::new();
    CURRENT
        .get_or_init(|| {
            let forced = std::env::var_os(FORCE_PLATFORM).map(|value| value.to_string_lossy().into_owned());
            choose(forced.as_deref(), Present::look(Path::new("/")))
        })
        .as_ref()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: Present =
        Present { rocm_driver: true, cuda_driver: true, rocm_loaded: false, cuda_loaded: false };

    fn platform(forced: Option<&str>, present: Present) -> Platform {
        choose(forced, present).expect("it is a platform").platform
    }

    #[test]
    fn the_platform_is_that_of_the_driver_that_is_there() {
        let none = Present::default();
        assert_eq!(platform(None, none), Platform::Host);
        assert_eq!(platform(None, Present { rocm_driver: true, ..none }), Platform::Rocm);
        assert_eq!(platform(None, Present { cuda_driver: true, ..none }), Platform::Cuda);
        // A CUDA build of torch on a host without devices loads CUDA's runtime all the same.
        assert_eq!(platform(None, Present { cuda_loaded: true, ..none }), Platform::Host);
        assert_eq!(platform(None, Present { rocm_driver: true, cuda_loaded: true, ..none }), Platform::Rocm);
    }

    #[test]
    fn both_vendors_are_an_answer_and_the_process_itself_decides() {
        assert_eq!(platform(None, BOTH), Platform::Rocm);
        assert_eq!(platform(None, Present { cuda_loaded: true, ..BOTH }), Platform::Cuda);
        assert_eq!(platform(None, Present { rocm_loaded: true, cuda_loaded: true, ..BOTH }), Platform::Rocm);
        assert!(choose(None, BOTH).expect("an answer").reason.contains("SKY_MONARCH_GPU_PLATFORM=cuda"));
    }

    #[test]
    fn what_is_forced_wins_and_a_typo_is_refused() {
        for (name, wanted) in [("rocm", Platform::Rocm), ("cuda", Platform::Cuda), ("host", Platform::Host)] {
            assert_eq!(platform(Some(name), BOTH), wanted);
            assert_eq!(wanted.name(), name);
        }
        assert_eq!(platform(Some(""), Present::default()), Platform::Host);
        let error = choose(Some("ROCM7"), BOTH).expect_err("no platform");
        assert!(error.to_string().contains("set it to rocm, cuda or host"), "{error}");
    }

    #[test]
    fn presence_is_read_below_the_root_that_is_given() {
        let root = tempfile::tempdir().expect("a folder");
        assert!(!Present::look(root.path()).rocm_driver);
        std::fs::create_dir(root.path().join("dev")).expect("a folder");
        std::fs::write(root.path().join("dev/kfd"), b"").expect("a file");
        std::fs::write(root.path().join("dev/nvidiactl"), b"").expect("a file");
        let present = Present::look(root.path());
        assert!(present.rocm_driver && present.cuda_driver);
    }
}
