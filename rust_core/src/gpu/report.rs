//! What the libraries and devices of this host say of themselves, for `doctor`. Loads the libraries and asks each device,
//! so it runs in a process of its own that is ended when it takes too long.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::error::GpuResult;
use super::library::{Library, loaded_copies};
use super::memory::{Memory, MemoryKind};
use super::platform::{self, Platform};
use super::runtime::{GpuRuntime, vendor_of};
use super::stream::Stream;
use super::table::ccl::Ccl;
use super::table::verbs::Verbs;

/// Bytes that are copied to each device and back to see that it works.
const SMOKE_BYTES: usize = 1 << 20;
/// Bytes of each copy that is measured.
const BENCH_BYTES: usize = 64 << 20;
const BENCH_COPIES: u32 = 8;
/// For one copy of either: they take milliseconds.
const COPY_LIMIT: Duration = Duration::from_secs(10);

/// A library that was looked for.
#[derive(Debug, Serialize)]
pub struct LibraryReport {
    name: &'static str,
    path: Option<String>,
    origin: Option<&'static str>,
    version: Option<String>,
    simulated: bool,
    error: Option<String>,
    /// Files of it that this process has loaded; more than one is a fault.
    copies: Vec<String>,
    capabilities: Vec<&'static str>,
}

/// A device that was tried.
#[derive(Debug, Default, Serialize)]
pub struct DeviceReport {
    ordinal: u32,
    pci: Option<String>,
    uuid: Option<String>,
    multiprocessors: Option<u32>,
    free_bytes: Option<u64>,
    total_bytes: Option<u64>,
    /// Whether bytes came back from the device as they were sent.
    works: bool,
    /// As copied by the device, GiB/s; where it was asked for.
    to_device_gibps: Option<f64>,
    from_device_gibps: Option<f64>,
    inside_gibps: Option<f64>,
    error: Option<String>,
}

/// All of it.
#[derive(Debug, Serialize)]
pub struct Report {
    platform: &'static str,
    reason: String,
    simulated: bool,
    libraries: Vec<LibraryReport>,
    devices: Vec<DeviceReport>,
    rdma_devices: Vec<String>,
    error: Option<String>,
    /// Plain copies within the host's memory, one thread, GiB/s; where it was asked for.
    host_copy_gibps: Option<f64>,
}

/// Look at this process's platform and try each of its devices; with `bench` measure copies too.
pub fn report(bench: bool) -> Report {
    let (platform, reason, refused) = match platform::current() {
        Ok(choice) => (choice.platform, choice.reason.clone(), None),
        Err(error) => (Platform::Host, "the host's own memory".into(), Some(error.to_string())),
    };
    let mut report = Report {
        platform: platform.name(),
        reason,
        simulated: false,
        libraries: Vec::new(),
        devices: Vec::new(),
        rdma_devices: Vec::new(),
        error: refused,
        host_copy_gibps: bench.then(host_copy_gibps),
    };
    match vendor_of(platform) {
        Ok(Some(vendor)) => {
            report.simulated = vendor.simulated();
            let stem = if platform == Platform::Rocm { "libamdhip64" } else { "libcudart" };
            let mut library = opened(runtime_name(platform), stem, vendor.library());
            library.version = Some(vendor.version().to_string());
            let can = vendor.capabilities();
            library.capabilities = named(&[
                ("virtual_memory", can.virtual_memory),
                ("dmabuf", can.dmabuf),
                ("pointer_attributes", can.pointer_attributes),
            ]);
            report.libraries.push(library);
            match vendor.device_count() {
                Ok(count) => {
                    report.devices = (0..count).map(|ordinal| device(vendor, ordinal, bench)).collect()
                }
                Err(error) => report.error = Some(error.to_string()),
            }
        }
        Ok(None) => {}
        Err(error) => report.libraries.push(missing(runtime_name(platform), error.to_string())),
    }
    if platform != Platform::Host {
        report.libraries.push(match Ccl::of(platform) {
            Ok(ccl) => {
                let rocm = platform == Platform::Rocm;
                let mut library = opened(
                    if rocm { "RCCL" } else { "NCCL" },
                    if rocm { "librccl" } else { "libnccl" },
                    &ccl.library,
                );
                library.version = Some(ccl.version_text());
                let can = ccl.capabilities();
                library.capabilities = named(&[
                    ("split", can.split),
                    ("shrink", can.shrink),
                    ("revoke", can.revoke),
                    ("grow", can.grow),
                    ("suspend", can.suspend),
                    ("scalable_init", can.scalable_init),
                    ("window", can.window),
                ]);
                library
            }
            Err(error) => {
                missing(if platform == Platform::Rocm { "RCCL" } else { "NCCL" }, error.to_string())
            }
        });
    }
    report.libraries.push(match Verbs::get() {
        Ok(verbs) => {
            report.rdma_devices = verbs.device_names();
            let mut library = opened("verbs", "libibverbs", &verbs.library);
            library.capabilities = named(&[("dmabuf", verbs.table.reg_dmabuf_mr.is_some())]);
            library
        }
        Err(error) => missing("verbs", error.to_string()),
    });
    report
}

const fn runtime_name(platform: Platform) -> &'static str {
    if matches!(platform, Platform::Rocm) { "HIP" } else { "CUDA" }
}

fn named(all: &[(&'static str, bool)]) -> Vec<&'static str> {
    all.iter().filter(|(_, has)| *has).map(|(name, _)| *name).collect()
}

fn opened(name: &'static str, stem: &str, library: &Library) -> LibraryReport {
    LibraryReport {
        name,
        path: Some(library.path().display().to_string()),
        origin: Some(library.origin().name()),
        version: None,
        simulated: library.simulated(),
        error: None,
        copies: loaded_copies(stem).iter().map(|path| path.display().to_string()).collect(),
        capabilities: Vec::new(),
    }
}

fn missing(name: &'static str, error: String) -> LibraryReport {
    LibraryReport {
        name,
        path: None,
        origin: None,
        version: None,
        simulated: false,
        error: Some(error),
        copies: Vec::new(),
        capabilities: Vec::new(),
    }
}

fn device(runtime: &'static dyn GpuRuntime, ordinal: u32, bench: bool) -> DeviceReport {
    let mut report = DeviceReport { ordinal, ..DeviceReport::default() };
    if let Err(error) = try_device(runtime, &mut report, bench) {
        report.error = Some(error.to_string());
    }
    report
}

fn try_device(runtime: &'static dyn GpuRuntime, report: &mut DeviceReport, bench: bool) -> GpuResult<()> {
    let ordinal = report.ordinal;
    let info = runtime.device(ordinal)?;
    report.pci = Some(info.pci);
    report.uuid = info.uuid;
    report.multiprocessors = Some(info.multiprocessors);
    let memory = runtime.memory_info(ordinal)?;
    report.free_bytes = Some(memory.free_bytes);
    report.total_bytes = Some(memory.total_bytes);

    let stream = Stream::new(runtime, ordinal)?;
    let sent: Vec<u8> = (0..SMOKE_BYTES).map(|index| (index ^ (index >> 8)) as u8).collect();
    let mut back = vec![0; SMOKE_BYTES];
    let mut there = Memory::new(runtime, MemoryKind::Device { ordinal }, SMOKE_BYTES)?;
    there.write(0, &sent, &stream, COPY_LIMIT)?;
    there.read(0, &mut back, &stream, COPY_LIMIT)?;
    report.works = sent == back;
    if bench && report.works {
        let mut pinned = Memory::new(runtime, MemoryKind::Pinned, BENCH_BYTES)?;
        let mut first = Memory::new(runtime, MemoryKind::Device { ordinal }, BENCH_BYTES)?;
        let mut second = Memory::new(runtime, MemoryKind::Device { ordinal }, BENCH_BYTES)?;
        report.to_device_gibps = Some(copies(&mut first, &pinned, &stream)?);
        report.inside_gibps = Some(copies(&mut second, &first, &stream)?);
        report.from_device_gibps = Some(copies(&mut pinned, &second, &stream)?);
    }
    Ok(())
}

fn gibps(bytes: usize, taken: Duration) -> f64 {
    bytes as f64 / taken.as_secs_f64().max(1e-9) / f64::from(1 << 30)
}

/// One warm-up, then so many copies in a row.
fn copies(to: &mut Memory, from: &Memory, stream: &Stream) -> GpuResult<f64> {
    // SAFETY: both live until the wait; where it is given up, neither is freed.
    unsafe { to.copy_from(from, BENCH_BYTES, stream)? };
    stream.wait(COPY_LIMIT)?;
    let begun = Instant::now();
    for _ in 0..BENCH_COPIES {
        // SAFETY: as above.
        unsafe { to.copy_from(from, BENCH_BYTES, stream)? };
    }
    stream.wait(COPY_LIMIT)?;
    Ok(gibps(BENCH_BYTES * BENCH_COPIES as usize, begun.elapsed()))
}

fn host_copy_gibps() -> f64 {
    let from = vec![1_u8; BENCH_BYTES];
    let mut to = vec![0_u8; BENCH_BYTES];
    let begun = Instant::now();
    for _ in 0..BENCH_COPIES {
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
    }
    gibps(BENCH_BYTES * BENCH_COPIES as usize, begun.elapsed())
}
