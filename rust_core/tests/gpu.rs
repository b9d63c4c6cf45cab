//! What stands above the vendors' libraries, on a software double of them: under AMD's names and under CUDA's.
//!
//! A process opens its libraries once, so each scenario runs in a process of its own: this test, started again.

#[path = "support/doubles.rs"]
mod doubles;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use sky_monarch_core::gpu::compat::cuda;
use sky_monarch_core::gpu::{
    ErrorClass, Event, GpuError, GpuRuntime, Memory, MemoryKind, Platform, PointerKind, Stream, runtime,
    runtime_of,
};

const LIMIT: Duration = Duration::from_secs(10);
const FLAVOURS: [&str; 2] = ["rocm", "cuda"];
const DEVICE: MemoryKind = MemoryKind::Device { ordinal: 1 };

/// The double, built here where nobody says where it is.
fn double() -> &'static Path {
    static DOUBLE: OnceLock<PathBuf> = OnceLock::new();
    DOUBLE.get_or_init(doubles::hip)
}

/// Run a scenario in a process of its own.
fn run(flavour: &str, scenario: &str, library: &Path, env: &[(&str, &str)]) -> Output {
    let mut command = Command::new(std::env::current_exe().expect("a path"));
    command.args(["--exact", &format!("scenario::{scenario}"), "--ignored", "--nocapture"]);
    command.env("SKY_MONARCH_TEST_SIMULATED_GPU", "1").env("SKY_MONARCH_GPU_PLATFORM", flavour);
    for variable in ["SKY_MONARCH_HIP_LIB", "SKY_MONARCH_CUDART_LIB", "SKY_MONARCH_CUDA_LIB"] {
        command.env(variable, library);
    }
    command.envs(env.iter().copied());
    command.output().expect("the scenario starts")
}

fn holds(flavour: &str, scenario: &str, env: &[(&str, &str)]) {
    let done = run(flavour, scenario, double(), env);
    let said = String::from_utf8_lossy(&done.stderr).into_owned() + &String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{flavour}, {scenario}: {said}");
    assert!(said.contains("1 passed"), "{scenario} is a scenario: {said}");
    assert!(said.contains("SIMULATED"), "{said}");
}

/// A copy of the double without one of its entries.
fn without(symbol: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let mut bytes = std::fs::read(double()).expect("the double");
    let name = format!("\0{symbol}\0");
    let mut found = 0;
    for at in 0..bytes.len() - name.len() {
        if &bytes[at..at + name.len()] == name.as_bytes() {
            bytes[at + 1] = b'x';
            found += 1;
        }
    }
    assert!(found > 0, "{symbol} is not in the double");
    let path = folder.path().join("libamdhip64.so");
    std::fs::write(&path, bytes).expect("a copy");
    (folder, path)
}

#[test]
fn one_program_runs_on_either_vendors_devices() {
    for flavour in FLAVOURS {
        holds(flavour, "uses_devices", &[]);
        holds(flavour, "uses_cudas_names", &[]);
    }
}

#[test]
fn memory_of_a_device_faults_when_the_host_reads_it() {
    use std::os::unix::process::ExitStatusExt;
    for flavour in FLAVOURS {
        let done = run(flavour, "reads_a_device_from_the_host", double(), &[]);
        assert_eq!(done.status.signal(), Some(libc::SIGSEGV), "{done:?}");
    }
}

#[test]
fn a_device_that_hangs_ends_no_wait_but_by_its_limit_and_is_lost_to_the_process() {
    for flavour in FLAVOURS {
        holds(flavour, "waits_for_what_does_not_end", &[("SKY_DOUBLE_FAULT", "hang")]);
    }
}

#[test]
fn an_error_that_comes_later_is_met_at_the_wait_and_classed() {
    for flavour in FLAVOURS {
        holds(flavour, "meets_an_error_at_the_wait", &[("SKY_DOUBLE_FAULT", "async:700")]);
    }
}

#[test]
fn a_device_that_gives_back_other_bytes_is_reported() {
    for flavour in FLAVOURS {
        holds(flavour, "reports_a_corrupt_device", &[("SKY_DOUBLE_FAULT", "corrupt")]);
    }
}

#[test]
fn a_death_in_a_copy_is_the_death_of_its_process_alone() {
    use std::os::unix::process::ExitStatusExt;
    let done = run("rocm", "uses_devices", double(), &[("SKY_DOUBLE_FAULT", "death")]);
    assert_eq!(done.status.signal(), Some(libc::SIGKILL));
}

#[test]
fn a_library_without_an_optional_entry_does_without_and_one_without_a_required_is_refused() {
    let (_folder, path) = without("hipMemGetHandleForAddressRange");
    let done = run("rocm", "has_no_dmabuf", &path, &[]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let (_folder, path) = without("hipStreamQuery");
    let done = run("rocm", "is_refused_for_hip_stream_query", &path, &[]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn hip_5_is_understood_though_it_numbers_memory_otherwise() {
    holds("rocm", "speaks_to_hip_5", &[("SKY_DOUBLE_VERSION", "50221153")]);
}

#[test]
fn a_host_of_either_vendor_without_devices_has_none() {
    for flavour in FLAVOURS {
        holds(flavour, "has_no_devices", &[("SKY_DOUBLE_DEVICES", "0")]);
    }
}

#[test]
fn a_double_is_refused_where_no_test_asks_for_it() {
    let mut command = Command::new(std::env::current_exe().expect("a path"));
    command.args(["--exact", "scenario::is_refused_as_simulated", "--ignored", "--nocapture"]);
    command.env_remove("SKY_MONARCH_TEST_SIMULATED_GPU").env("SKY_MONARCH_HIP_LIB", double());
    let done = command.output().expect("it starts");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// What the processes do.
mod scenario {
    use super::*;

    fn open() -> &'static dyn GpuRuntime {
        // SAFETY: ends this process where it hangs; the test that started it then fails.
        unsafe { libc::alarm(60) };
        runtime().expect("the double opens")
    }

    fn pattern(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|index| (index * 7 + (index >> 8)) as u8).collect()
    }

    fn current() -> i32 {
        let mut device = -1;
        // SAFETY: writes one int.
        assert_eq!(unsafe { cuda::cudaGetDevice(&mut device) }, cuda::cudaSuccess);
        device
    }

    #[test]
    #[ignore = "runs in a process of its own"]
    fn uses_devices() {
        let gpu = open();
        assert!(gpu.simulated() && gpu.capabilities().virtual_memory && gpu.capabilities().dmabuf);
        assert_eq!(gpu.device_count().expect("an answer"), 2);
        let device = gpu.device(1).expect("a device");
        assert_eq!(
            (device.pci.as_str(), device.multiprocessors, device.warp_size),
            ("0000:15:00.0", 304, 64)
        );
        assert_eq!(device.uuid.as_deref(), Some("abc0000000000001"));
        assert!(gpu.device(2).is_err());

        let stream = Stream::new(gpu, 1).expect("a stream");
        let before = gpu.memory_info(1).expect("memory").free_bytes;
        let sent = pattern(100_000);
        let mut memory = Memory::new(gpu, DEVICE, sent.len()).expect("memory");
        assert!(gpu.memory_info(1).expect("memory").free_bytes < before);
        assert_eq!(current(), 0, "no call moves the thread to another device");
        memory.write(0, &sent, &stream, LIMIT).expect("written");
        let mut back = vec![0; sent.len()];
        memory.read(0, &mut back, &stream, LIMIT).expect("read");
        assert!(sent == back);
        memory.read(99_000, &mut back[..1000], &stream, LIMIT).expect("the end");
        assert!(back[..1000] == sent[99_000..]);

        let pointer = gpu.pointer(memory.address() + 5).expect("known");
        assert_eq!((pointer.kind, pointer.ordinal), (PointerKind::Device, Some(1)));
        let here = pattern(1);
        assert_eq!(gpu.pointer(here.as_ptr() as u64).expect("an answer").kind, PointerKind::Host);
        let range = gpu.allocation_of(memory.address() + 5).expect("known");
        assert!(range.start == memory.address() && range.end - range.start >= sent.len() as u64);
        drop(gpu.export_dmabuf(range).expect("exported"));
        assert!(gpu.export_dmabuf(memory.address() + 1..memory.address() + 4097).is_err(), "not whole pages");

        let exportable = Memory::new(gpu, MemoryKind::Exportable { ordinal: 0 }, 1000).expect("memory");
        drop(exportable.export().expect("exported"));
        assert!(memory.export().is_err(), "it was not asked to be");

        orders_by_events(gpu);
        drop(memory);
        drop(exportable);
        assert_eq!(gpu.memory_info(1).expect("memory").free_bytes, before, "all of it was given back");
        // SAFETY: no arguments.
        let left = unsafe { cuda::cudaGetLastError() };
        assert_eq!(left, cuda::cudaSuccess, "what failed left no error behind");
    }

    /// A copy on one stream that waits for one on another sees what that brought; time passes between two events.
    fn orders_by_events(gpu: &'static dyn GpuRuntime) {
        let (first, second) =
            (Stream::new(gpu, 0).expect("a stream"), Stream::new(gpu, 0).expect("a stream"));
        let (begin, end) =
            (Event::new(gpu, 0, true).expect("event"), Event::new(gpu, 0, true).expect("event"));
        let mut source = Memory::new(gpu, MemoryKind::Device { ordinal: 0 }, 4096).expect("memory");
        let mut middle = Memory::new(gpu, MemoryKind::Device { ordinal: 0 }, 4096).expect("memory");
        let mut target = Memory::new(gpu, MemoryKind::Device { ordinal: 0 }, 4096).expect("memory");
        source.write(0, &pattern(4096), &first, LIMIT).expect("written");
        begin.record(&first).expect("recorded");
        for _ in 0..5 {
            // SAFETY: all live until the waits below.
            unsafe { middle.copy_from(&source, 4096, &first) }.expect("put");
        }
        end.record(&first).expect("recorded");
        second.wait_event(&end).expect("waits");
        // SAFETY: as above.
        unsafe { target.copy_from(&middle, 4096, &second) }.expect("put");
        second.wait(LIMIT).expect("done");
        let mut back = vec![0; 4096];
        target.read(0, &mut back, &second, LIMIT).expect("read");
        assert!(back == pattern(4096));
        end.wait(LIMIT).expect("done");
        let taken = end.since(&begin).expect("both are timed");
        assert!(taken >= Duration::from_millis(5) && taken < LIMIT, "{taken:?}");
    }

    #[test]
    #[ignore = "runs in a process of its own"]
    fn uses_cudas_names() {
        use cuda::*;
        let (mut count, mut address, mut kind, mut bus) = (0, std::ptr::null_mut(), 0_u32, 0);
        let mut base: CUdeviceptr = 0;
        let mut room = 0;
        // SAFETY: each call gets what CUDA's documentation asks for.
        unsafe {
            assert_eq!(cuInit(0), CUDA_SUCCESS);
            assert_eq!(cudaGetDeviceCount(&mut count), cudaSuccess);
            assert_eq!(cuDeviceGetAttribute(&mut bus, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 1), CUDA_SUCCESS);
            assert_eq!(cudaMalloc(&mut address, 8192), cudaSuccess);
            let out = (&raw mut kind).cast();
            let at = address as CUdeviceptr;
            assert_eq!(cuPointerGetAttribute(out, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at + 7), CUDA_SUCCESS);
            assert_eq!(cuMemGetAddressRange(&mut base, &mut room, at + 7), CUDA_SUCCESS);
            let mut sent = pattern(8192);
            assert_eq!(cudaMemcpy(address, sent.as_ptr().cast(), 8192, cudaMemcpyHostToDevice), cudaSuccess);
            sent.fill(0);
            assert_eq!(
                cudaMemcpy(sent.as_mut_ptr().cast(), address, 8192, cudaMemcpyDeviceToHost),
                cudaSuccess
            );
            assert!(sent == pattern(8192));
            assert_eq!(cudaFree(address), cudaSuccess);
            assert_eq!(cudaSetDevice(9).0, 101);
            assert_eq!(cudaGetLastError().0, 101, "an error of CUDA's own names stays, as CUDA has it");
        }
        assert_eq!((count, bus, kind, base, room), (2, 0x15, CU_MEMORYTYPE_DEVICE, address as u64, 8192));
    }

    #[test]
    #[ignore = "runs in a process of its own"]
    fn reads_a_device_from_the_host() {
        let memory = Memory::new(open(), DEVICE, 4096).expect("memory");
        // SAFETY: it is not safe: this has to fault.
        let byte = unsafe { std::ptr::read_volatile(memory.address() as *const u8) };
        panic!("read {byte}");
    }

    #[test]
    #[ignore = "runs in a process of its own"]
    fn waits_for_what_does_not_end() {
        let gpu = open();
        let stream = Stream::new(gpu, 1).expect("a stream");
        let mut memory = Memory::new(gpu, DEVICE, 4096).expect("memory");
        let begun = Instant::now();
        let error =
            memory.write(0, &pattern(4096), &stream, Duration::from_millis(200)).expect_err("it hangs");
        assert!(
            matches!(error, GpuError::TimedOut { .. }) && error.class() == ErrorClass::DeviceFatal,
            "{error}"
        );
        drop(memory);
        drop(stream);
        assert!(begun.elapsed() < 2 * LIMIT, "freeing waits for the device, so nothing is freed");
    }

    #[test]
    #[ignore = "runs in a process of its own"]
    fn meets_an_error_at_the_wait() {
        let gpu = open();
        let stream = Stream::new(gpu, 1).expect("a stream");
        let mut memory = Memory::new(gpu, DEVICE, 4096).expect("memory");
        let error = memory.write(0, &pattern(4096), &stream, LIMIT).expect_err("an error");
        assert_eq!((error.code().expect("a code").0, error.class()), (700, ErrorClass::DeviceFatal));
        assert!(error.to_string().contains("StreamQuery returned 700"), "{error}");
        assert!(error.to_string().contains("an illegal memory access"), "{error}");
    }

    #[test]
    #[ignore = "runs in a process of its own"]
    fn reports_a_corrupt_device() {
        let report = serde_json::to_value(sky_monarch_core::gpu::report(false)).expect("JSON");
        assert_eq!(
            (&report["simulated"], &report["devices"][1]["works"]),
            (&true.into(), &false.into()),
            "{report}"
        );
    }

    #[test]
    #[ignore = "runs in a process of its own"]
    fn has_no_dmabuf() {
        let gpu = open();
        assert!(!gpu.capabilities().dmabuf && gpu.capabilities().virtual_memory);
        let error = gpu.export_dmabuf(0..4096).expect_err("no entry");
        assert!(
            error.to_string().starts_with("hipMemGetHandleForAddressRange is not supported here"),
            "{error}"
        );
    }

    #[test]
    #[ignore = "runs in a process of its own"]
    fn is_refused_for_hip_stream_query() {
        let error = runtime().err().expect("it is refused");
        assert!(error.to_string().contains("has no hipStreamQuery"), "{error}");
    }

    #[test]
    #[ignore = "runs in a process of its own"]
    fn speaks_to_hip_5() {
        let gpu = open();
        let memory = Memory::new(gpu, DEVICE, 4096).expect("memory");
        assert_eq!(gpu.pointer(memory.address()).expect("known").kind, PointerKind::Device);
        let pinned = Memory::new(gpu, MemoryKind::Pinned, 4096).expect("memory");
        assert_eq!(gpu.pointer(pinned.address()).expect("known").kind, PointerKind::Host);
        assert!(!gpu.capabilities().virtual_memory, "its allocation properties lie otherwise");
        let refused = Memory::new(gpu, MemoryKind::Exportable { ordinal: 0 }, 4096).err().expect("refused");
        assert!(refused.to_string().contains("version 50221153"), "{refused}");
    }

    #[test]
    #[ignore = "runs in a process of its own"]
    fn has_no_devices() {
        let gpu = open();
        assert_eq!(gpu.device_count().expect("no device is no error"), 0);
        assert!(gpu.device(0).is_err());
        // SAFETY: no arguments.
        assert_eq!(unsafe { cuda::cudaGetLastError() }, cuda::cudaSuccess);
    }

    #[test]
    #[ignore = "runs in a process of its own"]
    fn is_refused_as_simulated() {
        let error = runtime_of(Platform::Rocm).err().expect("it is refused");
        assert!(matches!(error, GpuError::Simulated(_)), "{error}");
    }
}
