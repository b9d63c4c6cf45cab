//! The software doubles, built here where nobody says where they are.

#![allow(dead_code, reason = "not every test needs both")]

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

fn built(package: &str, file: &str, env: &str) -> PathBuf {
    if let Some(built) = std::env::var_os(env) {
        return built.into();
    }
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let done = Command::new(cargo).args(["build", "--quiet", "--package", package]).status();
    assert!(done.expect("cargo runs").success(), "the double does not build");
    std::env::current_exe().expect("a path").ancestors().nth(2).expect("target/debug").join(file)
}

/// That of HIP, and of CUDA.
pub fn hip() -> PathBuf {
    // Once: between the starts of two ranks it would cost the time that these have to find each other.
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT
        .get_or_init(|| built("sky-monarch-double-hip", "libamdhip64.so", "SKY_MONARCH_TEST_HIP_DOUBLE"))
        .clone()
}

/// That of RCCL, and of NCCL.
pub fn ccl() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| built("sky-monarch-double-ccl", "librccl.so", "SKY_MONARCH_TEST_CCL_DOUBLE")).clone()
}
