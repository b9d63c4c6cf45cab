//! The table of RCCL drives a software double of it: three real processes, memory of a double of HIP.
//!
//! What is shown is the declarations, the calling convention and the states of a communicator; nothing of RCCL itself.

#[path = "support/doubles.rs"]
mod doubles;

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sky_monarch_core::gpu::abi::ccl::{CclResult, CommunicatorHandle, Config, DataType, ReduceOp, UniqueId};
use sky_monarch_core::gpu::table::ccl::Ccl;
use sky_monarch_core::gpu::{Memory, MemoryKind, Platform, Stream, runtime};

const LIMIT: Duration = Duration::from_secs(20);
const RANKS: usize = 3;

/// Start one rank of a scenario; the ranks find each other by a file in `folder`.
fn start(scenario: &str, rank: usize, folder: &Path, env: &[(&str, &str)]) -> Child {
    Command::new(std::env::current_exe().expect("a path"))
        .args(["--exact", &format!("scenario::{scenario}"), "--ignored", "--nocapture"])
        .env("SKY_MONARCH_TEST_SIMULATED_GPU", "1")
        .env("SKY_MONARCH_GPU_PLATFORM", "rocm")
        .env("SKY_MONARCH_HIP_LIB", doubles::hip())
        .env("SKY_MONARCH_RCCL_LIB", doubles::ccl())
        .env("SCENARIO_RANK", rank.to_string())
        .env("SCENARIO_FOLDER", folder)
        .envs(env.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a rank starts")
}

fn ends_well(rank: Child) {
    let done = rank.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&done.stderr).into_owned() + &String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && said.contains("1 passed") && said.contains("SIMULATED"), "{said}");
}

fn all_end_well(scenario: &str, env: &[(&str, &str)]) {
    let folder = tempfile::tempdir().expect("a folder");
    let ranks: Vec<Child> = (0..RANKS).map(|rank| start(scenario, rank, folder.path(), env)).collect();
    ranks.into_iter().for_each(ends_well);
}

#[test]
fn three_processes_reduce_gather_scatter_and_send() {
    all_end_well("uses_every_collective", &[]);
}

#[test]
fn a_start_with_a_rank_missing_stays_in_progress_and_can_be_aborted() {
    let folder = tempfile::tempdir().expect("a folder");
    let ranks: Vec<Child> =
        (0..RANKS - 1).map(|rank| start("waits_for_who_does_not_come", rank, folder.path(), &[])).collect();
    ranks.into_iter().for_each(ends_well);
}

#[test]
fn a_death_is_an_asynchronous_error_to_who_waits_for_it_and_an_abort_frees_the_stream() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut ranks: Vec<Child> =
        (0..RANKS).map(|rank| start("loses_a_peer", rank, folder.path(), &[])).collect();
    let victim = ranks.pop().expect("the last");
    ranks.into_iter().for_each(ends_well);
    let status = victim.wait_with_output().expect("it ended").status;
    assert_eq!(status.signal(), Some(libc::SIGKILL));
}

#[test]
fn a_collective_that_hangs_is_ended_by_an_abort() {
    all_end_well("aborts_what_hangs", &[("SKY_DOUBLE_CCL_FAULT", "hang")]);
}

/// What each rank does.
mod scenario {
    use super::*;

    struct Rank {
        rank: usize,
        ccl: &'static Ccl,
        handle: CommunicatorHandle,
        stream: Stream,
    }

    fn check(result: CclResult) {
        assert_eq!(result, CclResult::SUCCESS);
    }

    impl Rank {
        /// Come to the communicator: rank 0 makes its id, and the others read it.
        fn come() -> Self {
            // SAFETY: ends this process where it hangs; the test that started it then fails.
            unsafe { libc::alarm(60) };
            let gpu = runtime().expect("the double of HIP");
            let ccl = Ccl::of(Platform::Rocm).expect("the double of RCCL");
            assert!(ccl.library.simulated());
            let rank: usize = std::env::var("SCENARIO_RANK").expect("set").parse().expect("a number");
            let file = PathBuf::from(std::env::var_os("SCENARIO_FOLDER").expect("set")).join("id");
            let mut id = UniqueId { internal: [0; 128] };
            if rank == 0 {
                // SAFETY: writes the id.
                check(unsafe { (ccl.table.get_unique_id)(&mut id) });
                std::fs::write(file.with_extension("new"), id.internal).expect("written");
                std::fs::rename(file.with_extension("new"), &file).expect("renamed");
            } else {
                let begun = Instant::now();
                while !file.exists() {
                    assert!(begun.elapsed() < LIMIT, "no id");
                    std::thread::sleep(Duration::from_millis(5));
                }
                id.internal.copy_from_slice(&std::fs::read(&file).expect("the id"));
            }
            let mut config = Config::non_blocking(ccl.version);
            let mut handle = std::ptr::null_mut();
            // SAFETY: all of it lives as long as the call.
            let result = unsafe {
                (ccl.table.comm_init_rank_config)(&mut handle, RANKS as i32, id, rank as i32, &mut config)
            };
            assert_eq!(result, CclResult::IN_PROGRESS);
            Self { rank, ccl, handle, stream: Stream::new(gpu, 0).expect("a stream") }
        }

        fn state(&self) -> CclResult {
            let mut state = CclResult::SUCCESS;
            // SAFETY: the communicator is alive.
            check(unsafe { (self.ccl.table.comm_get_async_error)(self.handle, &mut state) });
            state
        }

        fn until(&self, wanted: CclResult) {
            let begun = Instant::now();
            while self.state() != wanted {
                assert!(begun.elapsed() < LIMIT, "{:?} where {wanted:?} should be", self.state());
                std::thread::sleep(Duration::from_millis(2));
            }
        }

        fn memory(&self, bytes: &[u8]) -> Memory {
            let gpu = runtime().expect("open");
            let mut memory =
                Memory::new(gpu, MemoryKind::Device { ordinal: 0 }, bytes.len()).expect("memory");
            memory.write(0, bytes, &self.stream, LIMIT).expect("written");
            memory
        }

        fn all_reduce(&self, memory: &Memory, count: usize, dtype: DataType, op: ReduceOp) -> CclResult {
            let at = memory.address() as *mut std::ffi::c_void;
            // SAFETY: in place; the memory lives until the stream is done.
            unsafe {
                (self.ccl.table.all_reduce)(at, at, count, dtype, op, self.handle, self.stream.handle())
            }
        }

        fn bytes(&self, memory: &Memory) -> Vec<u8> {
            let mut back = vec![0; memory.bytes()];
            memory.read(0, &mut back, &self.stream, LIMIT).expect("read");
            back
        }

        fn abort(&self) {
            // SAFETY: not used again.
            check(unsafe { (self.ccl.table.comm_abort)(self.handle) });
        }
    }

    fn floats(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn integers(values: &[i32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn halves(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes()).collect()
    }

    #[test]
    #[ignore = "runs as one of several processes"]
    fn uses_every_collective() {
        let own = Rank::come();
        own.until(CclResult::SUCCESS);
        let (mut count, mut rank) = (0, 0);
        // SAFETY: the communicator is alive.
        unsafe {
            check((own.ccl.table.comm_count)(own.handle, &mut count));
            check((own.ccl.table.comm_user_rank)(own.handle, &mut rank));
        }
        assert_eq!((count as usize, rank as usize), (RANKS, own.rank));
        let mine = own.rank as f32 + 1.0;

        let sum = own.memory(&floats(&[mine, 0.5, -mine]));
        check(own.all_reduce(&sum, 3, DataType::FLOAT32, ReduceOp::SUM));
        assert_eq!(own.bytes(&sum), floats(&[6.0, 1.5, -6.0]));

        let average = own.memory(&halves(&[mine, 4.0]));
        check(own.all_reduce(&average, 2, DataType::BFLOAT16, ReduceOp::AVG));
        assert_eq!(own.bytes(&average), halves(&[2.0, 4.0]));

        let most = own.memory(&integers(&[own.rank as i32, -7, 9, -(own.rank as i32)]));
        check(own.all_reduce(&most, 4, DataType::INT32, ReduceOp::MAX));
        assert_eq!(own.bytes(&most), integers(&[2, -7, 9, 0]));
        let too_many = own.all_reduce(&most, 1_000_000, DataType::INT32, ReduceOp::MAX);
        assert_eq!(too_many, CclResult::INVALID_ARGUMENT, "it leaves its allocation");
        assert_eq!(own.all_reduce(&most, 4, DataType(77), ReduceOp::MAX), CclResult::INVALID_ARGUMENT);

        let (part, whole) = (own.memory(&floats(&[mine])), own.memory(&floats(&[0.0; RANKS])));
        let (from, to) = (part.address() as *const _, whole.address() as *mut _);
        let stream = own.stream.handle();
        // SAFETY: all of it lives until the stream is done.
        unsafe {
            check((own.ccl.table.all_gather)(from, to, 1, DataType::FLOAT32, own.handle, stream));
            assert_eq!(own.bytes(&whole), floats(&[1.0, 2.0, 3.0]));
            let (send, receive) = (whole.address() as *const _, part.address() as *mut _);
            check((own.ccl.table.reduce_scatter)(
                send,
                receive,
                1,
                DataType::FLOAT32,
                ReduceOp::SUM,
                own.handle,
                stream,
            ));
            assert_eq!(own.bytes(&part), floats(&[3.0 * mine]));
            check((own.ccl.table.broadcast)(from, receive, 1, DataType::FLOAT32, 1, own.handle, stream));
            assert_eq!(own.bytes(&part), floats(&[6.0]));
            match own.rank {
                0 => check((own.ccl.table.send)(send, 3, DataType::FLOAT32, 2, own.handle, stream)),
                2 => check((own.ccl.table.recv)(to, 3, DataType::FLOAT32, 0, own.handle, stream)),
                _ => {}
            }
            own.stream.wait(LIMIT).expect("done");
            check((own.ccl.table.comm_finalize)(own.handle));
            check((own.ccl.table.comm_destroy)(own.handle));
        }
    }

    #[test]
    #[ignore = "runs as one of several processes"]
    fn waits_for_who_does_not_come() {
        let own = Rank::come();
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(own.state(), CclResult::IN_PROGRESS);
        let memory = own.memory(&floats(&[1.0]));
        assert_eq!(own.all_reduce(&memory, 1, DataType::FLOAT32, ReduceOp::SUM), CclResult::INVALID_USAGE);
        own.abort();
    }

    #[test]
    #[ignore = "runs as one of several processes"]
    fn loses_a_peer() {
        let own = Rank::come();
        own.until(CclResult::SUCCESS);
        let memory = own.memory(&floats(&[1.0; 1000]));
        check(own.all_reduce(&memory, 1000, DataType::FLOAT32, ReduceOp::SUM));
        own.stream.wait(LIMIT).expect("all are there");
        if own.rank == RANKS - 1 {
            // SAFETY: ends this process, which is what the others have to meet.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        check(own.all_reduce(&memory, 1000, DataType::FLOAT32, ReduceOp::SUM));
        // Rank 0 waits for the dead one; rank 1 waits for rank 0, and meets the error once that has aborted.
        own.until(CclResult::REMOTE_ERROR);
        own.abort();
        own.stream.wait(LIMIT).expect("an abort frees the stream");
    }

    #[test]
    #[ignore = "runs as one of several processes"]
    fn aborts_what_hangs() {
        let own = Rank::come();
        own.until(CclResult::SUCCESS);
        let memory = own.memory(&floats(&[1.0]));
        check(own.all_reduce(&memory, 1, DataType::FLOAT32, ReduceOp::SUM));
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(own.state(), CclResult::SUCCESS, "nothing says that it hangs");
        own.abort();
        own.stream.wait(LIMIT).expect("an abort frees the stream");
    }
}
