//! A part of a replica group that has several hosts: what dies is ended here at once, what is next the controller says.

use sky_monarch_core::protocol::{Cause, Command, Event, GroupPlan, Span};

use crate::recovery::{control_of, with_lighthouse};
use crate::scenario;
use crate::scene::*;

/// The part of one rank on a host of two.
fn part(node: u32, generation: u64, script: &str) -> GroupPlan {
    let mut plan = shell(0, script);
    let store = (node > 0).then(|| "127.0.0.1:9".to_owned());
    plan.span = Some(Span { node, nodes: 2, first_rank: node, ranks: 2, store });
    plan.generation = generation;
    plan
}

fn end(generation: u64, reason: &str) -> Command {
    Command::EndGeneration { replica: 0, generation, reason: reason.into() }
}

/// Waits for the end of a generation; its cause.
async fn ended(scene: &Scene, generation: u64) -> Result<Cause, String> {
    let end = |event: &Event| match event {
        Event::GenerationEnded { generation: of, cause, .. } if *of == generation => Some(cause.clone()),
        _ => None,
    };
    scene.event(&format!("end of generation {generation}"), end).await
}

scenario!(a_part_that_dies_is_evicted_and_starts_again_only_as_it_is_told, restart_alone, skip_evict);
async fn a_part_that_dies_is_evicted_and_starts_again_only_as_it_is_told(
    mutant: Option<&'static str>,
) -> Outcome {
    let scene = with_lighthouse(mutant).await;
    let control = control_of(&scene);
    let with_control = |plan: GroupPlan| GroupPlan { lighthouse_control: control.clone(), ..plan };
    scene.send(start(with_control(part(0, 1, "sleep 1000")))).await;
    let victim = scene.spawned(0, 0, 1).await?;
    let store = |event: &Event| match event {
        Event::GenerationStarted { generation: 1, store, .. } => Some(store.clone()),
        _ => None,
    };
    let store = scene.event("start", store).await?;
    ensure(
        store.is_some_and(|store| store.starts_with("127.0.0.1:")),
        "the others are told where the store is",
    )?;
    kill(victim, libc::SIGKILL);
    ensure(matches!(ended(&scene, 1).await?, Cause::RankExited { rank: 0, .. }), "the cause is its own")?;
    let events = scene.events();
    ensure(
        events.iter().any(|event| matches!(event, Event::Evicted { generation: 1, .. })),
        "it was evicted before anybody was asked",
    )?;
    // The number of the next generation is the controller's, which knows of others.
    scene.send(start(with_control(part(0, 3, "sleep 1000")))).await;
    scene.spawned(0, 0, 3).await?;
    let alone = scene.events().into_iter().find(|event| {
        matches!(event, Event::RestartScheduled { .. } | Event::GenerationStarted { generation: 2, .. })
    });
    ensure(alone.is_none(), format!("it has started by itself: {alone:?}"))
}

scenario!(a_generation_that_is_over_on_another_host_ends_here_at_once, deaf_to_other_hosts);
async fn a_generation_that_is_over_on_another_host_ends_here_at_once(
    mutant: Option<&'static str>,
) -> Outcome {
    let scene = Scene::new(mutant).await;
    scene.send(start(part(1, 1, "sleep 1000"))).await;
    let first = scene.spawned(0, 1, 1).await?;
    scene.send(end(1, "rank 0 was killed")).await;
    let cause = ended(&scene, 1).await?;
    ensure(cause == Cause::Elsewhere { reason: "rank 0 was killed".into() }, format!("{cause:?}"))?;
    ensure(!alive(first), "it is told when nothing is left")?;
    scene.send(start(part(1, 2, "sleep 1000"))).await;
    let second = scene.spawned(0, 1, 2).await?;
    // What comes late, of a generation that is over, ends nothing; whoever asks again is told again.
    scene.send(end(1, "late")).await;
    scene.send(end(2, "timely")).await;
    let cause = ended(&scene, 2).await?;
    ensure(cause == Cause::Elsewhere { reason: "timely".into() }, format!("{cause:?}"))?;
    ensure(!alive(second), "the second one is over, too")?;
    scene.send(end(2, "again")).await;
    scene
        .until("the end, told again", |heard| {
            let ends = heard.events.iter().filter(|(_, stamped)| {
                matches!(&stamped.event, Event::GenerationEnded { generation: 2, .. })
            });
            (ends.count() == 2).then_some(())
        })
        .await
}

scenario!(a_part_that_is_done_starts_again_with_its_group_and_stops_with_it);
async fn a_part_that_is_done_starts_again_with_its_group_and_stops_with_it(
    mutant: Option<&'static str>,
) -> Outcome {
    let scene = Scene::new(mutant).await;
    scene.send(start(part(1, 1, "true"))).await;
    let done = |event: &Event| matches!(event, Event::GroupDone { generation: 1, .. }).then_some(());
    scene.event("done", done).await?;
    scene.send(end(1, "rank 0 was killed")).await;
    ensure(matches!(ended(&scene, 1).await?, Cause::Elsewhere { .. }), "nothing of it counts any more")?;
    scene.send(start(part(1, 2, "true"))).await;
    scene.spawned(0, 1, 2).await?;
    let done = |event: &Event| matches!(event, Event::GroupDone { generation: 2, .. }).then_some(());
    scene.event("done again", done).await?;
    // Other parts may still run: that this one is over has to be said.
    scene.send(stop(0)).await;
    scene.event("stop", |event| matches!(event, Event::GroupStopped { replica: 0, .. }).then_some(())).await
}

scenario!(a_part_that_was_stopped_is_started_again_though_all_of_it_is_not_gone_yet);
async fn a_part_that_was_stopped_is_started_again_though_all_of_it_is_not_gone_yet(
    mutant: Option<&'static str>,
) -> Outcome {
    let scene = Scene::new(mutant).await;
    scene.send(start(part(1, 1, "trap '' TERM; sleep 1000 & wait; wait"))).await;
    let first = scene.spawned(0, 1, 1).await?;
    scene.send(stop(0)).await;
    scene.send(start(part(1, 2, "sleep 1000"))).await;
    scene.spawned(0, 1, 2).await?;
    ensure(!alive(first), "there is never more than one")
}
