//! `Communicator` on the software doubles, in real processes: every collective, and every way in which one is lost.
//!
//! What is shown is its states, limits and classes of error, under the names of either vendor; nothing of RCCL or NCCL.

#[path = "support/doubles.rs"]
mod doubles;

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sky_monarch_core::comm::{Buffer, Communicator, Options, Transfer, WEDGED, unique_id};
use sky_monarch_core::gpu::abi::ccl::{DataType, ReduceOp};
use sky_monarch_core::gpu::{ErrorClass, GpuError, GpuResult, Memory, MemoryKind, Stream, runtime};

use doubles::{ccl, hip};

const LIMIT: Duration = Duration::from_secs(20);
const FLAVOURS: [&str; 2] = ["rocm", "cuda"];

/// A run of a scenario by several processes.
struct Run<'a> {
    flavour: &'a str,
    scenario: &'a str,
    ranks: u32,
    /// How many of them are started.
    started: u32,
    library: PathBuf,
    env: &'a [(&'a str, &'a str)],
}

impl<'a> Run<'a> {
    fn new(flavour: &'a str, scenario: &'a str, env: &'a [(&'a str, &'a str)]) -> Self {
        Self { flavour, scenario, ranks: 3, started: 3, library: ccl(), env }
    }

    fn start(&self, rank: u32, folder: &Path) -> Child {
        let mut command = Command::new(std::env::current_exe().expect("a path"));
        command.args(["--exact", &format!("scenario::{}", self.scenario), "--ignored", "--nocapture"]);
        command.env("SKY_MONARCH_TEST_SIMULATED_GPU", "1").env("SKY_MONARCH_GPU_PLATFORM", self.flavour);
        for variable in ["SKY_MONARCH_HIP_LIB", "SKY_MONARCH_CUDART_LIB", "SKY_MONARCH_CUDA_LIB"] {
            command.env(variable, hip());
        }
        for variable in ["SKY_MONARCH_RCCL_LIB", "SKY_MONARCH_NCCL_LIB"] {
            command.env(variable, &self.library);
        }
        command.env("SCENARIO_RANK", rank.to_string()).env("SCENARIO_RANKS", self.ranks.to_string());
        command.env("SCENARIO_FOLDER", folder).envs(self.env.iter().copied());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a rank starts")
    }

    fn all(&self) -> Vec<Ended> {
        let folder = tempfile::tempdir().expect("a folder");
        let ranks: Vec<Child> = (0..self.started).map(|rank| self.start(rank, folder.path())).collect();
        ranks.into_iter().map(Ended::of).collect()
    }

    fn all_end_well(&self) {
        self.all().iter().for_each(Ended::well);
    }
}

struct Ended {
    code: Option<i32>,
    signal: Option<i32>,
    said: String,
    last: String,
}

impl Ended {
    fn of(rank: Child) -> Self {
        let done = rank.wait_with_output().expect("it ends");
        let stderr = String::from_utf8_lossy(&done.stderr).into_owned();
        let last = stderr.lines().last().unwrap_or_default().to_owned();
        let said = stderr + &String::from_utf8_lossy(&done.stdout);
        Self { code: done.status.code(), signal: done.status.signal(), said, last }
    }

    fn well(&self) {
        let fine = self.code == Some(0) && self.said.contains("1 passed") && self.said.contains("SIMULATED");
        assert!(fine, "{:?}, {:?}: {}", self.code, self.signal, self.said);
    }
}

#[test]
fn three_processes_use_every_collective_under_either_vendors_names() {
    for flavour in FLAVOURS {
        Run::new(flavour, "uses_every_collective", &[]).all_end_well();
    }
}

#[test]
fn calls_that_are_in_progress_for_a_while_are_waited_through() {
    Run::new("rocm", "uses_every_collective", &[("SKY_DOUBLE_CCL_FAULT", "late")]).all_end_well();
}

#[test]
fn a_library_from_before_the_configuration_grew_gets_the_one_it_knows() {
    Run::new("cuda", "uses_every_collective", &[("SKY_DOUBLE_CCL_VERSION", "21602")]).all_end_well();
}

#[test]
fn a_start_to_which_a_rank_does_not_come_ends_with_its_limit_and_may_be_tried_again() {
    for flavour in FLAVOURS {
        let env = [("SCENARIO_START_S", "0.4")];
        Run { started: 2, ..Run::new(flavour, "is_not_joined", &env) }.all_end_well();
    }
}

#[test]
fn the_death_of_a_rank_is_the_loss_of_the_communicator_and_of_nothing_else() {
    for flavour in FLAVOURS {
        let ended = Run::new(flavour, "loses_a_peer", &[]).all();
        assert_eq!(ended[2].signal, Some(libc::SIGKILL), "{}", ended[2].said);
        ended[..2].iter().for_each(Ended::well);
    }
}

#[test]
fn a_collective_that_hangs_is_aborted_at_its_limit_whether_anybody_waits_or_not() {
    for scenario in ["waits_for_what_hangs", "looks_away_from_what_hangs"] {
        let env = [("SKY_DOUBLE_CCL_FAULT", "hang"), ("SCENARIO_OPERATION_S", "0.3")];
        Run::new("rocm", scenario, &env).all_end_well();
    }
}

#[test]
fn where_not_even_the_abort_ends_the_process_ends_itself_and_says_why_last() {
    for scenario in ["waits_for_what_hangs", "drops_what_hangs"] {
        let env = [
            ("SKY_DOUBLE_CCL_FAULT", "abort-hang"),
            ("SCENARIO_OPERATION_S", "0.3"),
            ("SCENARIO_ABORT_S", "0.5"),
        ];
        let begun = Instant::now();
        for ended in Run::new("rocm", scenario, &env).all() {
            assert_eq!(ended.code, Some(WEDGED), "{}", ended.said);
            assert!(
                ended.last.contains("the abort of a communicator did not end within 0.5 s")
                    && ended.last.contains("exit code 75"),
                "{}",
                ended.last
            );
        }
        assert!(begun.elapsed() < 2 * LIMIT, "{:?}", begun.elapsed());
    }
}

#[test]
fn an_error_that_comes_later_is_met_by_the_watcher_and_classed() {
    for (fault, class) in
        [("async:6", "CommunicatorFatal"), ("async:3", "CommunicatorFatal"), ("async:1", "DeviceFatal")]
    {
        let env = [("SKY_DOUBLE_CCL_FAULT", fault), ("SCENARIO_CLASS", class)];
        Run { ranks: 2, started: 2, ..Run::new("cuda", "meets_an_error", &env) }.all_end_well();
    }
}

#[test]
fn a_library_without_an_entry_is_refused_with_its_version_when_it_is_opened() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut bytes = std::fs::read(ccl()).expect("the double");
    let name = b"\0ncclCommFinalize\0";
    let places: Vec<usize> =
        bytes.windows(name.len()).enumerate().filter(|(_, at)| at == name).map(|(at, _)| at).collect();
    assert!(!places.is_empty());
    places.into_iter().for_each(|at| bytes[at + 1] = b'x');
    let library = folder.path().join("librccl.so");
    std::fs::write(&library, bytes).expect("a copy");
    for flavour in FLAVOURS {
        let env = [("SKY_DOUBLE_CCL_VERSION", "21304")];
        let run = Run::new(flavour, "misses_an_entry", &env);
        Run { started: 1, library: library.clone(), ..run }.all_end_well();
    }
}

#[test]
fn what_cannot_be_used_is_refused_before_the_library_is_called() {
    Run { ranks: 1, started: 1, ..Run::new("rocm", "refuses_what_cannot_be_used", &[]) }.all_end_well();
}

#[test]
fn a_host_without_accelerators_has_no_communicator() {
    let error = unique_id(sky_monarch_core::gpu::Platform::Host).expect_err("there is none");
    assert!(error.to_string().contains("this host has no accelerators"), "{error}");
}

/// What each rank does.
mod scenario {
    use super::*;

    struct Rank {
        rank: u32,
        ranks: u32,
        stream: Stream,
        folder: PathBuf,
        options: Options,
    }

    fn seconds(name: &str, default_s: f64) -> Duration {
        let said = std::env::var(name).ok().map(|text| text.parse().expect("a number"));
        Duration::from_secs_f64(said.unwrap_or(default_s))
    }

    fn number(name: &str) -> u32 {
        std::env::var(name).expect("set").parse().expect("a number")
    }

    impl Rank {
        fn come() -> Self {
            // SAFETY: ends this process where it hangs; the test that started it then fails.
            unsafe { libc::alarm(60) };
            let gpu = runtime().expect("the double of the runtime");
            assert!(gpu.simulated());
            Self {
                rank: number("SCENARIO_RANK"),
                ranks: number("SCENARIO_RANKS"),
                stream: Stream::new(gpu, 1).expect("a stream"),
                folder: std::env::var_os("SCENARIO_FOLDER").expect("set").into(),
                options: Options {
                    start_limit: seconds("SCENARIO_START_S", 20.0),
                    operation_limit: seconds("SCENARIO_OPERATION_S", 20.0),
                    abort_limit: seconds("SCENARIO_ABORT_S", 10.0),
                },
            }
        }

        /// Rank 0 makes the id, and the others read it.
        fn id(&self) -> Vec<u8> {
            let file = self.folder.join("id");
            if self.rank == 0 {
                let id = unique_id(runtime().expect("open").platform()).expect("an id");
                std::fs::write(file.with_extension("new"), id).expect("written");
                std::fs::rename(file.with_extension("new"), &file).expect("renamed");
            }
            let begun = Instant::now();
            while !file.exists() {
                assert!(begun.elapsed() < LIMIT, "no id");
                std::thread::sleep(Duration::from_millis(5));
            }
            std::fs::read(&file).expect("the id")
        }

        fn try_join(&self, id: &[u8]) -> GpuResult<Communicator> {
            let gpu = runtime().expect("open");
            Communicator::start(gpu, 1, id, (self.rank, self.ranks), self.options)
        }

        fn join(&self) -> Communicator {
            self.try_join(&self.id()).expect("all come")
        }

        fn memory(&self, bytes: &[u8]) -> Memory {
            let gpu = runtime().expect("open");
            let mut memory =
                Memory::new(gpu, MemoryKind::Device { ordinal: 1 }, bytes.len()).expect("memory");
            memory.write(0, bytes, &self.stream, LIMIT).expect("written");
            memory
        }

        fn bytes(&self, memory: &Memory) -> Vec<u8> {
            let mut back = vec![0; memory.bytes()];
            memory.read(0, &mut back, &self.stream, LIMIT).expect("read");
            back
        }

        fn sum(&self, comm: &Communicator, memory: &Memory) -> GpuResult<()> {
            let all = (whole(memory), whole(memory));
            // SAFETY: in place; the memory outlives the stream's work in every scenario.
            unsafe { comm.all_reduce(all, DataType::FLOAT32, ReduceOp::SUM, self.stream.handle(), nothing()) }
        }

        fn wait(&self, comm: &Communicator) -> GpuResult<()> {
            // SAFETY: the stream is alive.
            unsafe { comm.wait(self.stream.handle(), LIMIT) }
        }
    }

    fn whole(memory: &Memory) -> Buffer {
        Buffer { address: memory.address(), bytes: memory.bytes() }
    }

    fn nothing() -> Box<dyn std::any::Any + Send> {
        Box::new(())
    }

    fn floats(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn halves(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes()).collect()
    }

    /// The error that the communicator is lost with, once it is.
    fn failure(comm: &Communicator) -> GpuError {
        let begun = Instant::now();
        loop {
            if let Some(error) = comm.failure() {
                return error;
            }
            assert!(begun.elapsed() < LIMIT, "it goes on");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    #[test]
    #[ignore = "runs as one of several processes"]
    fn uses_every_collective() {
        let own = Rank::come();
        let comm = own.join();
        assert_eq!((comm.rank(), comm.ranks()), (own.rank, 3));
        let (mine, stream) = (own.rank as f32 + 1.0, own.stream.handle());
        let sum = own.memory(&floats(&[mine, 0.5, -mine]));
        own.sum(&comm, &sum).expect("put");
        own.wait(&comm).expect("done");
        assert_eq!(own.bytes(&sum), floats(&[6.0, 1.5, -6.0]));

        let average = own.memory(&halves(&[mine, 4.0]));
        let (part, all) = (own.memory(&floats(&[mine])), own.memory(&floats(&[0.0; 3])));
        let back = own.memory(&floats(&[0.0]));
        let sent = own.memory(&vec![own.rank as u8; 1 << 20]);
        let (left, right) = (own.memory(&[9; 1 << 20]), own.memory(&[9; 1 << 20]));
        let (before, after) = ((own.rank + 2) % 3, (own.rank + 1) % 3);
        // SAFETY: all of it lives until the stream is done.
        unsafe {
            let both = (whole(&average), whole(&average));
            comm.all_reduce(both, DataType::BFLOAT16, ReduceOp::AVG, stream, nothing()).expect("put");
            let ends = (whole(&part), whole(&all));
            comm.all_gather(ends, DataType::FLOAT32, stream, nothing()).expect("put");
            let ends = (whole(&all), whole(&back));
            comm.reduce_scatter(ends, DataType::FLOAT32, ReduceOp::SUM, stream, nothing()).expect("put");
            let ends = (whole(&part), whole(&part));
            comm.broadcast(ends, DataType::FLOAT32, 1, stream, nothing()).expect("put");
            // More than sockets buffer, in both directions at once.
            let transfers = [
                Transfer::Send { to: before, from: whole(&sent) },
                Transfer::Send { to: after, from: whole(&sent) },
                Transfer::Receive { from: before, into: whole(&left) },
                Transfer::Receive { from: after, into: whole(&right) },
            ];
            comm.exchange(&transfers, stream, nothing()).expect("put");
        }
        own.wait(&comm).expect("done");
        assert_eq!(own.bytes(&average), halves(&[2.0, 4.0]));
        assert_eq!(own.bytes(&all), floats(&[1.0, 2.0, 3.0]));
        assert_eq!(own.bytes(&back), floats(&[3.0 * mine]));
        assert_eq!(own.bytes(&part), floats(&[2.0]));
        assert!(own.bytes(&left).iter().all(|byte| *byte == before as u8));
        assert!(own.bytes(&right).iter().all(|byte| *byte == after as u8));
        comm.close(LIMIT).expect("in order");
    }

    #[test]
    #[ignore = "runs as one of several processes"]
    fn is_not_joined() {
        let own = Rank::come();
        let id = own.id();
        let begun = Instant::now();
        let error = own.try_join(&id).err().expect("a rank is missing");
        assert_eq!(error.class(), ErrorClass::Retryable, "{error}");
        assert!(error.to_string().contains("a rank is missing"), "{error}");
        assert!(begun.elapsed() < LIMIT, "{:?}", begun.elapsed());
    }

    #[test]
    #[ignore = "runs as one of several processes"]
    fn loses_a_peer() {
        let own = Rank::come();
        let comm = own.join();
        let memory = own.memory(&floats(&[1.0; 1000]));
        own.sum(&comm, &memory).expect("put");
        own.wait(&comm).expect("all are there");
        if own.rank == 2 {
            // SAFETY: ends this process, which is what the others have to meet.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        // The one that waits for the dead one hears of it; the others do once that has aborted.
        let lost = own.sum(&comm, &memory).and_then(|()| own.wait(&comm)).expect_err("a rank is dead");
        assert_eq!(lost.class(), ErrorClass::CommunicatorFatal, "{lost}");
        let again = own.sum(&comm, &memory).expect_err("it is over");
        assert!(matches!(again, GpuError::Lost { class: ErrorClass::CommunicatorFatal, .. }), "{again}");
        assert_eq!(again.to_string(), lost.to_string(), "the first reason stays");
        own.stream.wait(LIMIT).expect("nothing of it is left on the stream");
        drop(comm);
        assert_eq!(own.bytes(&own.memory(&[7; 64])), [7; 64], "the device works on");
    }

    #[test]
    #[ignore = "runs as one of several processes"]
    fn waits_for_what_hangs() {
        let own = Rank::come();
        let comm = own.join();
        let memory = own.memory(&floats(&[1.0]));
        own.sum(&comm, &memory).expect("put");
        let begun = Instant::now();
        let error = own.wait(&comm).expect_err("it hangs");
        assert_eq!(error.class(), ErrorClass::CommunicatorFatal, "{error}");
        assert!(error.to_string().contains("an all_reduce was not done after 0.3 s"), "{error}");
        assert!(begun.elapsed() < LIMIT, "{:?}", begun.elapsed());
        own.stream.wait(LIMIT).expect("the abort has freed it");
    }

    #[test]
    #[ignore = "runs as one of several processes"]
    fn looks_away_from_what_hangs() {
        let own = Rank::come();
        let comm = own.join();
        let memory = own.memory(&floats(&[1.0]));
        let kept = std::sync::Arc::new(());
        let all = (whole(&memory), whole(&memory));
        // SAFETY: in place; the memory lives to the end.
        unsafe {
            let keep = Box::new(std::sync::Arc::clone(&kept));
            comm.all_reduce(all, DataType::FLOAT32, ReduceOp::SUM, own.stream.handle(), keep).expect("put");
        }
        assert_eq!(std::sync::Arc::strong_count(&kept), 2, "kept while it is under way");
        assert_eq!(failure(&comm).class(), ErrorClass::CommunicatorFatal);
        own.stream.wait(LIMIT).expect("the abort has freed it");
        drop(comm);
        assert_eq!(std::sync::Arc::strong_count(&kept), 1, "let go of");
    }

    #[test]
    #[ignore = "runs as one of several processes"]
    fn drops_what_hangs() {
        let own = Rank::come();
        let comm = own.join();
        let memory = own.memory(&floats(&[1.0]));
        own.sum(&comm, &memory).expect("put");
        drop(comm);
        panic!("its abort hangs");
    }

    #[test]
    #[ignore = "runs as one of several processes"]
    fn meets_an_error() {
        let own = Rank::come();
        let comm = own.join();
        let memory = own.memory(&floats(&[1.0]));
        own.sum(&comm, &memory).expect("put");
        let error = failure(&comm);
        assert_eq!(format!("{:?}", error.class()), std::env::var("SCENARIO_CLASS").expect("set"), "{error}");
        assert!(error.to_string().contains("ncclCommGetAsyncError returned"), "{error}");
    }

    #[test]
    #[ignore = "runs as one of several processes"]
    fn misses_an_entry() {
        let _own = Rank::come();
        let text = unique_id(runtime().expect("open").platform()).expect_err("it is refused").to_string();
        assert!(text.contains("(version 2.13.4) has no ncclCommFinalize"), "{text}");
    }

    #[test]
    #[ignore = "runs as one of several processes"]
    fn refuses_what_cannot_be_used() {
        let own = Rank::come();
        let gpu = runtime().expect("open");
        for (id, of) in [(vec![1; 127], (0, 1)), (own.id(), (1, 1))] {
            let error = Communicator::start(gpu, 1, &id, of, own.options).err().expect("refused");
            assert_eq!(error.class(), ErrorClass::Permanent, "{error}");
        }
        assert!(Communicator::start(gpu, 9, &own.id(), (0, 1), own.options).is_err(), "no such device");
        let comm = own.join();
        let stream = own.stream.handle();
        let memory = own.memory(&floats(&[1.0; 4]));
        let elsewhere = Memory::new(gpu, MemoryKind::Device { ordinal: 0 }, 16).expect("memory");
        let pinned = Memory::new(gpu, MemoryKind::Pinned, 16).expect("memory");
        let host = [0_u8; 16];
        let on_host = Buffer { address: host.as_ptr() as u64, bytes: 16 };
        let good = whole(&memory);
        for (send, receive, dtype, said) in [
            (good, Buffer { bytes: 8, ..good }, DataType::FLOAT32, "what receives has 8 bytes"),
            (Buffer { bytes: 15, ..good }, good, DataType::FLOAT32, "are no elements of 4 bytes"),
            (good, good, DataType(77), "elements of type DataType(77)"),
            (good, whole(&elsewhere), DataType::FLOAT32, "of device 0, not of device 1"),
            (whole(&pinned), good, DataType::INT8, "memory of the host, not of device 1"),
            (on_host, good, DataType::INT8, "memory of the host, not of device 1"),
        ] {
            // SAFETY: refused.
            let refused =
                unsafe { comm.all_reduce((send, receive), dtype, ReduceOp::SUM, stream, nothing()) };
            let error = refused.expect_err("refused");
            assert!(error.to_string().contains(said), "{error}");
            assert_eq!(error.class(), ErrorClass::Permanent, "{error}");
        }
        // SAFETY: refused.
        let refused = unsafe {
            let ends = (good, good);
            [
                comm.broadcast(ends, DataType::FLOAT32, 1, stream, nothing()),
                comm.exchange(&[Transfer::Send { to: 1, from: good }], stream, nothing()),
            ]
        };
        for refused in refused {
            let text = refused.expect_err("no such rank").to_string();
            assert!(text.contains("rank 1 of a communicator of 1"), "{text}");
        }
        own.sum(&comm, &memory).expect("none of it has cost the communicator");
        own.wait(&comm).expect("done");
        comm.close(LIMIT).expect("in order");
    }
}
