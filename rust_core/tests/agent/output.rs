//! What ranks print.

use sky_monarch_core::protocol::{Event, Exit, RankCommand, Slot};

use crate::scenario;
use crate::scene::*;

const SLOT: Slot = Slot { replica: 0, rank: 0 };

async fn ended(scene: &Scene) -> Outcome {
    scene
        .event("the group is over", |e| {
            matches!(e, Event::GroupDone { .. } | Event::GroupGivenUp { .. }).then_some(())
        })
        .await
}

scenario!(output_is_kept_to_the_byte_and_its_tail_is_readable);
async fn output_is_kept_to_the_byte_and_its_tail_is_readable(mutant: Option<&'static str>) -> Outcome {
    let mut scene = Scene::new(mutant).await;
    let script = r#"
import os, sys
w = sys.stdout.buffer.write
w(b"\xff\xfe bad\r\n10%\r20%\r30%\n\x00nul\n")
for i in range(2000):
    w(b"%d" % i + b"x" * 300 + b"\n")
sys.stdout.flush()
sys.stderr.write("on stderr\n")
sys.stderr.flush()
os.write(1, b"no newline at the end")
os._exit(0)
"#;
    let mut wanted = b"\xff\xfe bad\r\n10%\r20%\r30%\n\x00nul\n".to_vec();
    for i in 0..2000 {
        wanted.extend(format!("{i}{}\n", "x".repeat(300)).bytes());
    }
    wanted.extend(b"on stderr\nno newline at the end");
    let mut plan = shell(0, "");
    plan.world_size = 4;
    plan.recovery.max_restarts = 0;
    plan.log_segment_bytes = 100_000;
    plan.command = RankCommand::Exec { argv: ["python3", "-c", script].map(str::to_owned).to_vec() };
    scene.send(start(plan)).await;
    ended(&scene).await?;
    let tail = scene
        .event("an exit with its last lines", |e| match e {
            Event::RankExited { exit: Exit::Code(0), tail, collateral: false, .. } => Some(tail.clone()),
            _ => None,
        })
        .await?;
    ensure(
        tail.len() == 20 && tail[18] == "on stderr" && tail[19] == "no newline at the end",
        format!("{tail:?}"),
    )?;
    for rank in 0..4 {
        let (first, bytes) = scene.log(Some(Slot { replica: 0, rank }), 1).await?;
        ensure(first == 0 && bytes == wanted, format!("rank {rank} differs"))?;
        let files = std::fs::read_dir(scene.path(&format!("logs/r0-{rank}"))).expect("a folder").count();
        ensure(files == wanted.len().div_ceil(100_000), format!("{files} files"))?;
    }
    Ok(())
}

scenario!(output_is_rotated_and_its_end_is_kept);
async fn output_is_rotated_and_its_end_is_kept(mutant: Option<&'static str>) -> Outcome {
    let mut scene = Scene::new(mutant).await;
    let mut plan = shell(0, "head -c 20000000 /dev/zero; echo the reason >&2; exit 1");
    plan.recovery.max_restarts = 0;
    plan.log_segment_bytes = 1_000_000;
    plan.log_segments = 3;
    scene.send(start(plan)).await;
    ended(&scene).await?;
    let (first, bytes) = scene.log(Some(SLOT), 1).await?;
    ensure(first == 18_000_000 && bytes.len() == 2_000_011, format!("{} bytes from {first}", bytes.len()))?;
    ensure(bytes.ends_with(b"\0the reason\n"), "the end is there")?;
    let names: Vec<_> = std::fs::read_dir(scene.path("logs/r0-0")).expect("a folder").flatten().collect();
    ensure(names.len() == 3, format!("{names:?}"))?;
    ensure(scene.path("logs/r0-0/g1-000018000000.log").exists(), format!("{names:?}"))
}

scenario!(all_generations_read_as_one_stream);
async fn all_generations_read_as_one_stream(mutant: Option<&'static str>) -> Outcome {
    let mut scene = Scene::new(mutant).await;
    let mut plan = shell(0, "echo generation $SKY_MONARCH_GENERATION; exit 1");
    plan.recovery.max_restarts = 2;
    scene.send(start(plan)).await;
    let (_, bytes) = scene.log(Some(SLOT), 0).await?;
    ensure(bytes == b"generation 1\ngeneration 2\ngeneration 3\n", String::from_utf8_lossy(&bytes))?;
    ensure(scene.log(Some(SLOT), 2).await?.1 == b"generation 2\n", "one generation alone")
}

scenario!(a_full_disk_costs_the_rank_its_log_and_not_its_life);
async fn a_full_disk_costs_the_rank_its_log_and_not_its_life(mutant: Option<&'static str>) -> Outcome {
    let scene = Scene::new(mutant).await;
    std::fs::create_dir_all(scene.path("logs/r0-0")).expect("a folder");
    std::os::unix::fs::symlink("/dev/full", scene.path("logs/r0-0/g1-000000000000.log")).expect("a link");
    scene.send(start(shell(0, "head -c 5000000 /dev/zero; echo; echo still here"))).await;
    scene
        .event("the rank ends in order", |e| match e {
            Event::RankExited { exit: Exit::Code(0), tail, .. } => {
                tail.last().is_some_and(|line| line.ends_with("still here")).then_some(())
            }
            _ => None,
        })
        .await?;
    scene
        .event("the loss is told", |e| match e {
            Event::Notice { message, .. } => message.contains("cannot be written").then_some(()),
            _ => None,
        })
        .await
}

scenario!(a_death_and_its_last_words_do_not_wait_for_the_disk);
async fn a_death_and_its_last_words_do_not_wait_for_the_disk(mutant: Option<&'static str>) -> Outcome {
    let scene = Scene::with(mutant, |config| config["limits"]["flush_s"] = 60.0.into()).await;
    let log = scene.path("logs/r0-0/g1-000000000000.log");
    std::fs::create_dir_all(scene.path("logs/r0-0")).expect("a folder");
    // Nobody reads from it: whoever opens it to write hangs.
    nix::unistd::mkfifo(&log, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    let mut plan = shell(0, "echo first; sleep 0.3; echo the reason >&2; exit 3");
    plan.recovery.max_restarts = 0;
    scene.send(start(plan)).await;
    let (tail, delay) = scene
        .until("the exit", |heard| {
            heard.events.iter().find_map(|(_, stamped)| match &stamped.event {
                Event::RankExited { tail, .. } => {
                    let now_ns = sky_monarch_core::agent::clock::mono_ns();
                    Some((tail.clone(), now_ns.saturating_sub(stamped.mono_ns)))
                }
                _ => None,
            })
        })
        .await?;
    ensure(tail == ["first", "the reason"], format!("{tail:?}"))?;
    ensure(delay < 15_000_000_000, format!("{delay} ns after the death"))
}

scenario!(the_secret_of_the_run_is_shown_nowhere);
async fn the_secret_of_the_run_is_shown_nowhere(mutant: Option<&'static str>) -> Outcome {
    let scene = Scene::new(mutant).await;
    let mut plan = shell(0, "echo $TORCHFT_LIGHTHOUSE; cat /proc/self/cmdline | tr '\\0' ' '; exit 1");
    plan.recovery.max_restarts = 0;
    plan.lighthouse_control = Some("unix:/nowhere".into());
    scene.send(start(plan)).await;
    ended(&scene).await?;
    let events = format!("{:?}", scene.events());
    let shown = events.contains("http://r0.g1.…@127.0.0.1:");
    ensure(shown && !events.contains("@127.0.0.1:9\"") && !events.contains(TOKEN), events)?;
    let log = std::fs::read_to_string(scene.path("agent.log")).unwrap_or_default();
    ensure(!log.contains(TOKEN), log)
}
