//! Finding a vendor's library and opening it, once, when it is first used.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

use super::error::{GpuError, GpuResult};

/// Not in libloading: only find what is loaded already.
const RTLD_NOLOAD: c_int = libc::RTLD_NOLOAD;

/// Exported by our software doubles alone.
const SIMULATED_MARK: &[u8] = b"sky_monarch_simulated\0";
/// Only tests set it.
const SIMULATED_ALLOWED: &str = "SKY_MONARCH_TEST_SIMULATED_GPU";

/// Where a library is looked for.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// What it is for, such as "HIP".
    pub purpose: &'static str,
    /// What its file name begins with, whatever version or hash follows, such as `libamdhip64`.
    pub stem: &'static str,
    /// Names for the linker, newest first.
    pub sonames: &'static [&'static str],
    /// Variable that names a file to use.
    pub override_env: &'static str,
    /// Variables that name an installation, whose `lib` folder is looked through last.
    pub home_envs: &'static [&'static str],
}

/// How a library came to be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// It was in the process before: torch brought it.
    Loaded,
    /// The override names it.
    Override,
    /// The linker found it.
    Linker,
    /// It lies in the installation that the environment names.
    Home,
}

impl Origin {
    /// Stable name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Loaded => "loaded",
            Self::Override => "override",
            Self::Linker => "linker",
            Self::Home => "home",
        }
    }
}

/// A library, open until the process ends: what these libraries start, they cannot undo.
#[derive(Debug)]
pub struct Library {
    handle: ManuallyDrop<Handle>,
    path: PathBuf,
    origin: Origin,
    simulated: bool,
}

impl Library {
    /// Open the copy that is loaded already; else the one that the override names; else the first that the linker
    /// knows; else the newest of the installation. Two copies of HIP in one process crash, so the order matters.
    ///
    /// # Errors
    /// [`GpuError::NotFound`] with each name tried; an override that cannot be opened is not passed over.
    pub fn open(names: &Names) -> GpuResult<Self> {
        let mut tried = Vec::new();
        let loaded = names.sonames.iter().map(PathBuf::from).chain(loaded_copies(names.stem));
        for name in loaded {
            if let Ok(handle) = dlopen(&name, RTLD_NOLOAD) {
                return Self::opened(handle, &name, Origin::Loaded);
            }
        }
        if let Some(path) =
            std::env::var_os(names.override_env).filter(|path| !path.is_empty()).map(PathBuf::from)
        {
            let handle = dlopen(&path, 0).map_err(|why| GpuError::NotFound {
                library: names.purpose,
                tried: vec![(format!("{} (of {})", path.display(), names.override_env), why)],
            })?;
            return Self::opened(handle, &path, Origin::Override);
        }
        for (name, origin) in names
            .sonames
            .iter()
            .map(|name| (PathBuf::from(name), Origin::Linker))
            .chain(installed(names).into_iter().map(|path| (path, Origin::Home)))
        {
            match dlopen(&name, 0) {
                Ok(handle) => return Self::opened(handle, &name, origin),
                Err(why) => tried.push((name.display().to_string(), why)),
            }
        }
        Err(GpuError::NotFound { library: names.purpose, tried })
    }

    fn opened(handle: Handle, name: &Path, origin: Origin) -> GpuResult<Self> {
        // SAFETY: the symbol's address is only compared with null.
        let simulated = unsafe { handle.get::<*mut c_void>(SIMULATED_MARK) }.is_ok();
        let mut library =
            Self { handle: ManuallyDrop::new(handle), path: name.to_owned(), origin, simulated };
        library.path = library.real_path().unwrap_or_else(|| name.to_owned());
        if simulated && std::env::var_os(SIMULATED_ALLOWED).is_none() {
            return Err(GpuError::Simulated(library.path));
        }
        Ok(library)
    }

    /// The file of this handle, as the linker has it.
    fn real_path(&self) -> Option<PathBuf> {
        // SAFETY: symbols that every library of these has; only their addresses are used.
        let address =
            [c"hipInit", c"cudaGetDeviceCount", c"cuInit", c"ncclGetVersion", c"ibv_get_device_list"]
                .iter()
                .find_map(|name| unsafe { self.handle.get::<*mut c_void>(name.to_bytes_with_nul()) }.ok())?;
        // SAFETY: all zero is a valid Dl_info.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: `info` is ours and the address is only looked up.
        if unsafe { libc::dladdr(*address, &mut info) } == 0 || info.dli_fname.is_null() {
            return None;
        }
        // SAFETY: the linker's own string, which lives as long as the library: for ever.
        let name = unsafe { CStr::from_ptr(info.dli_fname) };
        Some(PathBuf::from(std::ffi::OsStr::from_bytes(name.to_bytes())))
    }

    /// The address of an entry; `None` where the library lacks it.
    pub fn symbol(&self, name: &str) -> Option<*mut c_void> {
        let name = std::ffi::CString::new(name).ok()?;
        // SAFETY: nothing is done with the address here; who turns it into a function answers for its type.
        let symbol = unsafe { self.handle.get::<*mut c_void>(name.as_bytes_with_nul()) }.ok()?;
        Some(*symbol).filter(|address| !address.is_null())
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How it came to be used.
    pub const fn origin(&self) -> Origin {
        self.origin
    }

    /// Whether it is one of our doubles.
    pub const fn simulated(&self) -> bool {
        self.simulated
    }
}

fn dlopen(name: &Path, flags: c_int) -> Result<Handle, String> {
    // SAFETY: opening runs the library's initialisers, which is what its user asks for; with RTLD_NOLOAD none run.
    unsafe { Handle::open(Some(name), RTLD_NOW | RTLD_LOCAL | flags) }.map_err(|error| {
        let mut text = error.to_string();
        if let Some(source) = std::error::Error::source(&error) {
            text = source.to_string();
        }
        text
    })
}

/// Whether a file name is that of the library: `libamdhip64.so.7`, or `libamdhip64-3f2a.so` in a repaired wheel.
fn is_named(file: &str, stem: &str) -> bool {
    file.strip_prefix(stem)
        .is_some_and(|rest| rest.starts_with(".so") || (rest.starts_with('-') && rest.contains(".so")))
}

/// The files of this library that the process has loaded, under whatever name. Asks the linker, not the library.
pub fn loaded_copies(stem: &str) -> Vec<PathBuf> {
    struct Search<'a> {
        stem: &'a str,
        found: Vec<PathBuf>,
    }
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
        // SAFETY: the linker passes a valid record and the search given below.
        let (name, search): (*const c_char, &mut Search<'_>) =
            unsafe { ((*info).dlpi_name, &mut *search.cast::<Search<'_>>()) };
        if !name.is_null() {
            // SAFETY: the linker's own string.
            let path = Path::new(std::ffi::OsStr::from_bytes(unsafe { CStr::from_ptr(name) }.to_bytes()));
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            if is_named(&file, search.stem) {
                search.found.push(path.to_owned());
            }
        }
        0
    }
    let mut search = Search { stem, found: Vec::new() };
    // SAFETY: `visit` gets the search as it was passed and keeps nothing.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

/// Copies in the installations that the environment names: a release of tomorrow has another soname.
fn installed(names: &Names) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = names
        .home_envs
        .iter()
        .filter_map(std::env::var_os)
        .chain(names.home_envs.contains(&"ROCM_PATH").then(|| "/opt/rocm".into()))
        .flat_map(|home| std::fs::read_dir(Path::new(&home).join("lib")).into_iter().flatten().flatten())
        .map(|entry| entry.path())
        .filter(|path| is_named(&path.file_name().unwrap_or_default().to_string_lossy(), names.stem))
        .collect();
    found.sort();
    found.reverse();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOWHERE: Names = Names {
        purpose: "nothing",
        stem: "libskynothing",
        sonames: &["libskynothing.so.9", "libskynothing.so.8"],
        override_env: "SKY_MONARCH_TEST_NO_SUCH_OVERRIDE",
        home_envs: &[],
    };

    #[test]
    fn a_library_that_is_nowhere_is_an_error_that_names_each_place() {
        let error = Library::open(&NOWHERE).expect_err("there is none");
        let text = error.to_string();
        assert!(text.contains("libskynothing.so.9, libskynothing.so.8"), "{text}");
    }

    #[test]
    fn names_with_versions_and_with_hashes_are_the_librarys_and_longer_names_are_not() {
        for name in ["libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.7.1.0", "libamdhip64-3f2a.so.6"] {
            assert!(is_named(name, "libamdhip64"), "{name}");
        }
        for name in ["libamdhip64x.so", "libamdhip6.so", "amdhip64.so", "libamdhip64.a"] {
            assert!(!is_named(name, "libamdhip64"), "{name}");
        }
    }

    #[test]
    fn a_copy_that_the_process_has_is_found_by_its_file_and_used_before_any_other() {
        let libc_copies = loaded_copies("libc");
        assert_eq!(libc_copies.len(), 1, "{libc_copies:?}");
        let names = Names { purpose: "libc", stem: "libc", ..NOWHERE };
        let library = Library::open(&names).expect("it is loaded");
        assert_eq!(library.origin(), Origin::Loaded);
        assert!(library.symbol("memcpy").is_some() && library.symbol("no_such_entry").is_none());
    }
}
