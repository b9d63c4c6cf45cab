//! Starts and ends in order.

use std::time::Duration;

use sky_monarch_core::protocol::{Cause, Command, Event, Exit, Peer, ProgressLimit, RankCommand, SetupPlan};

use crate::scenario;
use crate::scene::*;

fn children_of(pid: u32) -> Vec<(u32, char)> {
    let entries = std::fs::read_dir("/proc").expect("a process table").flatten();
    let stats = entries.filter_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut rest = stat.rsplit(')').next()?.split_whitespace();
        let state = rest.next()?.chars().next()?;
        Some((pid, state, rest.next()?.parse::<u32>().ok()?))
    });
    stats.filter(|(_, _, ppid)| *ppid == pid).map(|(pid, state, _)| (pid, state)).collect()
}

scenario!(fifty_starts_and_stops_leave_no_process_and_no_zombie);
async fn fifty_starts_and_stops_leave_no_process_and_no_zombie(mutant: Option<&'static str>) -> Outcome {
    let scene = Scene::new(mutant).await;
    for generation in 1..=50 {
        // Each leaves a zombie behind by its own (a child nobody waits for) and a detached sleeper.
        let mut plan = shell(0, "(setsid sleep 1000 &) ; (exit 3) & exec sleep 1000");
        plan.generation = generation;
        scene.send(start(plan)).await;
        scene.spawned(0, 0, generation).await?;
        scene.send(stop(0)).await;
        scene
            .event("it is stopped", |e| match e {
                Event::GroupStopped { generation: g, .. } => (*g == generation).then_some(()),
                _ => None,
            })
            .await?;
    }
    let agent = scene.agent_pid();
    eventually("the agent has no child", SOON, || children_of(agent).is_empty()).await?;
    ensure(marked(&scene.run_id).is_empty(), "nothing of the run is left")
}

scenario!(a_group_may_be_started_again_at_the_word_of_its_end, start_only_anew);
async fn a_group_may_be_started_again_at_the_word_of_its_end(mutant: Option<&'static str>) -> Outcome {
    let scene = Scene::new(mutant).await;
    // A lighthouse that never answers: for two seconds it is told of the end, which is known by then.
    let deaf = scene.path("deaf.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&deaf).map_err(|error| error.to_string())?;
    let mut plan = shell(0, "exit 1");
    plan.recovery.max_restarts = 0;
    plan.lighthouse_control = Some(format!("unix:{}", deaf.display()));
    scene.send(start(plan.clone())).await;
    let given_up = |generation| {
        move |e: &Event| match e {
            Event::GroupGivenUp { generation: g, .. } => (*g == generation).then_some(()),
            _ => None,
        }
    };
    scene.event("it is given up", given_up(1)).await?;
    plan.generation = 2;
    scene.send(start(plan)).await;
    scene.event("the next life ends too", given_up(2)).await?;
    let starts = scene.events().into_iter().filter(|e| matches!(e, Event::RankSpawned { .. })).count();
    ensure(starts == 2, format!("one start for each: {starts}"))
}

scenario!(a_stop_is_term_first_and_kill_after_the_grace_time);
async fn a_stop_is_term_first_and_kill_after_the_grace_time(mutant: Option<&'static str>) -> Outcome {
    let scene = Scene::new(mutant).await;
    // The first leaves at once, whatever time it has.
    for (replica, at_term, grace_s) in [(0, "echo told; exit 0", 60.0), (1, "", 0.8)] {
        scene.send(start(shell(replica, &listens(&scene, replica, at_term)))).await;
        scene.spawned(replica, 0, 1).await?;
        is_listening(&scene, replica).await?;
        scene.send(Command::StopGroup { replica, grace_s, reason: "enough".into() }).await;
    }
    for (replica, wanted) in [(0, Exit::Code(0)), (1, Exit::Signal(9))] {
        let (exit, tail) = scene
            .event("it ends", |e| match e {
                Event::RankExited { replica: r, exit, tail, collateral: true, .. } if *r == replica => {
                    Some((*exit, tail.clone()))
                }
                _ => None,
            })
            .await?;
        ensure(
            exit == wanted && (replica == 1 || tail.contains(&"told".to_owned())),
            format!("{exit:?} {tail:?}"),
        )?;
        scene
            .event("the cause is told", |e| match e {
                Event::GenerationEnded { replica: r, cause: Cause::Stopped { reason }, .. } => {
                    (*r == replica && reason == "enough").then_some(())
                }
                _ => None,
            })
            .await?;
    }
    Ok(())
}

scenario!(a_stopped_rank_costs_no_grace_time, wait_for_stopped);
async fn a_stopped_rank_costs_no_grace_time(mutant: Option<&'static str>) -> Outcome {
    let scene = Scene::new(mutant).await;
    // Longer than anything here waits.
    let grace_s = 120.0;
    let mut alone = session(0, "train", 100_000);
    alone.recovery.grace_s = grace_s;
    let mut shelled = shell(1, "sleep 1000");
    shelled.recovery.grace_s = grace_s;
    let mut replaced = session(2, "train", 100_000);
    replaced.recovery.grace_s = grace_s;
    replaced.recovery.progress_limit_s = ProgressLimit::Seconds(0.5);
    for plan in [alone, shelled, replaced] {
        scene.send(start(plan)).await;
    }
    for replica in 0..3 {
        let pid = scene.spawned(replica, 0, 1).await?;
        if replica == 2 {
            // A hang: something was committed, then nothing more.
            let commits = |e: &Event| matches!(e, Event::FirstCommit { replica: 2, .. }).then_some(());
            scene.event("it commits", commits).await?;
        }
        kill(pid, libc::SIGSTOP);
        eventually("it is stopped", SOON, || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.contains(") T ")
        })
        .await?;
    }
    for replica in 0..2 {
        scene.send(Command::StopGroup { replica, grace_s, reason: "enough".into() }).await;
        scene
            .event("it is stopped at once", |e| match e {
                Event::GroupStopped { replica: r, .. } => (*r == replica).then_some(()),
                _ => None,
            })
            .await?;
    }
    scene.spawned(2, 0, 2).await.map(drop)
}

scenario!(a_group_without_a_session_tells_that_its_ranks_are_up);
async fn a_group_without_a_session_tells_that_its_ranks_are_up(mutant: Option<&'static str>) -> Outcome {
    let scene = Scene::new(mutant).await;
    let mut plain = shell(0, "sleep 1000");
    plain.world_size = 2;
    scene.send(start(plain)).await;
    scene.send(start(session(1, "train", 200))).await;
    scene
        .event("the ranks are up", |e| {
            matches!(e, Event::RanksUp { replica: 0, generation: 1 }).then_some(())
        })
        .await?;
    scene.event("the other is done", |e| matches!(e, Event::GroupDone { .. }).then_some(())).await?;
    let told: Vec<Event> =
        scene.events().into_iter().filter(|e| matches!(e, Event::RanksUp { .. })).collect();
    ensure(told.len() == 1, format!("once, and never of a group with a session: {told:?}"))
}

scenario!(shutdown_ends_everything_and_the_agent);
async fn shutdown_ends_everything_and_the_agent(mutant: Option<&'static str>) -> Outcome {
    let mut scene = Scene::new(mutant).await;
    for replica in 0..2 {
        scene.send(start(shell(replica, "sleep 1000 & sleep 1000"))).await;
        scene.spawned(replica, 0, 1).await?;
    }
    scene.send(Command::Shutdown { grace_s: 1.0, reason: "down".into() }).await;
    let code = scene.agent_exit().await?;
    ensure(code == 0, format!("exit code {code}"))?;
    let stopped = scene.events().iter().filter(|e| matches!(e, Event::GroupStopped { .. })).count();
    ensure(stopped == 2, "both groups were reported")?;
    ensure(marked(&scene.run_id).is_empty() && !scene.path("agent.sock").exists(), "nothing is left")
}

scenario!(sigterm_is_a_notice_that_drains_the_ranks_and_ends_the_agent);
async fn sigterm_is_a_notice_that_drains_the_ranks_and_ends_the_agent(
    mutant: Option<&'static str>,
) -> Outcome {
    let mut scene = Scene::new(mutant).await;
    let mut plan = shell(0, &listens(&scene, 0, "echo told; sleep 0.3; exit 0"));
    plan.recovery.grace_s = 60.0; // it leaves much sooner
    scene.send(start(plan)).await;
    scene.spawned(0, 0, 1).await?;
    is_listening(&scene, 0).await?;
    kill(scene.agent_pid(), libc::SIGTERM);
    let code = scene.agent_exit().await?;
    ensure(code == 143, format!("exit code {code}"))?;
    scene
        .event("the rank used its grace time", |e| match e {
            Event::RankExited { exit: Exit::Code(0), tail, .. } => {
                tail.contains(&"told".to_owned()).then_some(())
            }
            _ => None,
        })
        .await
}

scenario!(without_a_session_a_group_is_done_when_all_its_ranks_exited_with_0);
async fn without_a_session_a_group_is_done_when_all_its_ranks_exited_with_0(
    mutant: Option<&'static str>,
) -> Outcome {
    // Siblings that end have the time that they need.
    let scene = Scene::with(mutant, |config| config["limits"]["siblings_s"] = 60.0.into()).await;
    let mut plan = shell(0, "sleep 0.$((RANK * 3)); exit 0");
    plan.world_size = 3;
    scene.send(start(plan)).await;
    scene
        .event("it is done", |e| {
            matches!(e, Event::GroupDone { generation: 1, step: None, .. }).then_some(())
        })
        .await?;
    let exits =
        scene.events().iter().filter(|e| matches!(e, Event::RankExited { collateral: false, .. })).count();
    ensure(exits == 3, format!("{exits} exits before"))?;
    let scene = Scene::new(mutant).await;
    let mut uneven = shell(1, "test $RANK = 0 || sleep 1000");
    uneven.world_size = 2;
    uneven.recovery.max_restarts = 0;
    scene.send(start(uneven)).await;
    scene
        .event("siblings that never end do not hold a group for ever", |e| match e {
            Event::GroupGivenUp { replica: 1, cause: Cause::ProgressLimit { .. }, .. } => Some(()),
            _ => None,
        })
        .await
}

scenario!(a_done_group_keeps_its_donors_until_the_release);
async fn a_done_group_keeps_its_donors_until_the_release(mutant: Option<&'static str>) -> Outcome {
    let scene = Scene::new(mutant).await;
    scene.send(start(session(0, "train", 5))).await;
    let pid = scene.spawned(0, 0, 1).await?;
    scene.event("it is done", |e| matches!(e, Event::GroupDone { step: Some(5), .. }).then_some(())).await?;
    tokio::time::sleep(Duration::from_millis(500)).await;
    ensure(alive(pid), "the donor is up")?;
    scene.send(Command::Release).await;
    scene
        .event("it leaves by itself", |e| match e {
            Event::RankExited { exit: Exit::Code(0), collateral: false, .. } => Some(()),
            _ => None,
        })
        .await
}

scenario!(without_a_controller_the_agent_goes_on_and_ends_when_all_is_done);
async fn without_a_controller_the_agent_goes_on_and_ends_when_all_is_done(
    mutant: Option<&'static str>,
) -> Outcome {
    let mut scene = Scene::with(mutant, |config| {
        config["controller"] =
            format!("unix:{}/later.sock", config["run_dir"].as_str().unwrap_or_default()).into();
        config["linger_s"] = 1.0.into(); // ten times that where nobody ever asks
    })
    .await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    // Nothing was ever asked of it: it waits. (Its controller was never there, so a second scene tells the rest.)
    ensure(alive(scene.agent_pid()), "it waits for a first command")?;
    scene.kill_agent();
    let mut scene = Scene::with(mutant, |config| config["linger_s"] = 0.5.into()).await;
    scene.send(start(session(0, "train", 60))).await;
    scene.spawned(0, 0, 1).await?;
    scene.stop_controller();
    let code = scene.agent_exit().await?;
    ensure(code == 0 && marked(&scene.run_id).is_empty(), format!("exit code {code}"))
}

scenario!(events_arrive_again_after_a_reconnect_and_the_hello_tells_the_present);
async fn events_arrive_again_after_a_reconnect_and_the_hello_tells_the_present(
    mutant: Option<&'static str>,
) -> Outcome {
    let scene = Scene::new(mutant).await;
    scene.send(start(shell(0, "sleep 1000"))).await;
    let pid = scene.spawned(0, 0, 1).await?;
    scene.hang_up();
    kill(pid, libc::SIGKILL);
    let next = scene.spawned(0, 0, 2).await?;
    let hellos = scene.until("a second hello", |h| (h.hellos.len() > 1).then(|| h.hellos.clone())).await?;
    let incarnations: Vec<u64> = hellos
        .iter()
        .filter_map(|peer| if let Peer::Agent { incarnation, .. } = peer { Some(*incarnation) } else { None })
        .collect();
    ensure(incarnations.windows(2).all(|pair| pair[0] == pair[1]), "the same agent")?;
    let seqs: Vec<u64> = {
        let mut seqs: Vec<u64> =
            scene.heard.lock().expect("no poison").events.iter().map(|(_, e)| e.seq).collect();
        seqs.sort_unstable();
        seqs.dedup();
        seqs
    };
    let all: Vec<u64> = (1..=seqs.len() as u64).collect();
    ensure(seqs == all && alive(next), format!("a gap in {seqs:?}"))
}

scenario!(setup_runs_once_with_its_limit_and_nothing_of_it_stays);
async fn setup_runs_once_with_its_limit_and_nothing_of_it_stays(mutant: Option<&'static str>) -> Outcome {
    let finished = |e: &Event| match e {
        Event::SetupFinished { exit, timed_out, tail } => Some((*exit, *timed_out, tail.clone())),
        _ => None,
    };
    let plan = |script: &str, timeout_s: f64| {
        let envs = shell(0, "").envs;
        Command::Setup(SetupPlan { script: script.into(), workdir: "/".into(), envs, timeout_s })
    };
    let mut scene = Scene::new(mutant).await;
    scene.send(plan("(setsid sleep 1000 &); echo boom >&2; false | cat; echo not reached", 60.0)).await;
    let result = scene.event("setup ends", finished).await?;
    ensure(result == (Exit::Code(1), false, vec!["boom".to_owned()]), format!("{result:?}"))?;
    ensure(scene.log(None, 0).await?.1 == b"boom\n", "its output is kept")?;
    ensure(marked(&scene.run_id).is_empty(), "nothing of it is left")?;
    drop(scene);
    let scene = Scene::new(mutant).await;
    scene.send(plan("echo slow; sleep 1000", 3.0)).await;
    let (_, timed_out, tail) = scene.event("setup ends", finished).await?;
    ensure(timed_out && tail == ["slow"] && marked(&scene.run_id).is_empty(), format!("{tail:?}"))
}

scenario!(a_rank_inherits_nothing_that_it_should_not);
async fn a_rank_inherits_nothing_that_it_should_not(mutant: Option<&'static str>) -> Outcome {
    let mut scene = Scene::new(mutant).await;
    let script = "import os, signal
print(sorted(os.listdir('/proc/self/fd'))[:3], len(os.listdir('/proc/self/fd')))
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL)
print(os.getpid() == os.getsid(0), os.nice(0), os.environ['ODD'] == 'a$b\"c`d\\'\\n=\u{e9}', os.environ.get('CARGO'))";
    let mut plan = shell(0, "");
    plan.envs.insert("ODD".into(), "a$b\"c`d'\n=é".into());
    plan.command = RankCommand::Exec { argv: ["python3", "-c", script].map(str::to_owned).to_vec() };
    scene.send(start(plan)).await;
    let (_, bytes) = scene.log(Some(sky_monarch_core::protocol::Slot { replica: 0, rank: 0 }), 0).await?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    // Four descriptors: 0, 1, 2 and the one that lists them.
    // SAFETY: integers only.
    let nice = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
    ensure(text == format!("['0', '1', '2'] 4\nset() True\nTrue {nice} True None\n"), text)
}
