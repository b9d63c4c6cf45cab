//! News of a death that another host has seen: from the lighthouse to the sessions here.

use sky_monarch_core::channel::{Channel, Credentials, Limits, Listener};
use sky_monarch_core::lighthouse::protocol::{
    LighthouseAnswer, LighthouseCommand, LighthouseReply, LighthouseRequest,
};
use sky_monarch_core::protocol::{Event, Exit, Peer};
use sky_monarch_core::wire::Address;

use crate::recovery::control_of;
use crate::scenario;
use crate::scene::*;

type Line = Channel<LighthouseAnswer, LighthouseRequest>;

/// The lighthouse's end of the control channel, in the hands of the test.
async fn listen(scene: &Scene) -> Listener {
    let address: Address = control_of(scene).unwrap_or_default().parse().expect("an address");
    let credentials = Credentials::new(scene.run_id.clone(), TOKEN);
    Listener::bind(&address, credentials, Limits::default()).await.expect("a free address")
}

/// The agent's one line.
async fn dialled(listener: &mut Listener) -> Result<Line, String> {
    let pending = tokio::time::timeout(SOON, listener.accept()).await.map_err(|_| "the agent never dials")?;
    let pending = pending.map_err(|error| error.to_string())?;
    ensure(matches!(pending.peer(), Peer::Supervisor { .. }), format!("{:?}", pending.peer()))?;
    pending.welcome().await.map_err(|error| error.to_string())
}

async fn tell(line: &Line, quorum_id: i64) {
    let reply = LighthouseReply::Gone { quorum_id, reason: "replica 7 is silent".into() };
    line.send(&LighthouseAnswer { seq: 0, reply }).await.expect("a line");
}

/// Answers one eviction, with news in between that must not be taken for the answer.
async fn evict(line: &mut Line) -> Result<u32, String> {
    let asked = tokio::time::timeout(SOON, line.recv()).await.map_err(|_| "nobody is evicted")?;
    let LighthouseRequest { seq, command } = asked.map_err(|error| error.to_string())?;
    let LighthouseCommand::Evict { replica, .. } = command else { return Err(format!("{command:?}")) };
    tell(line, 0).await;
    for seq in [seq + 1000, seq] {
        let reply = LighthouseReply::Evicted { quorum_id: None };
        line.send(&LighthouseAnswer { seq, reply }).await.expect("a line");
    }
    Ok(replica)
}

async fn leaves_with(scene: &Scene, replica: u32, generation: u64, code: i32) -> Outcome {
    scene
        .event(&format!("r{replica}.g{generation} hears of {code}"), |event| match event {
            Event::RankExited { replica: r, generation: g, exit, .. }
                if (*r, *g) == (replica, generation) =>
            {
                Some(*exit)
            }
            _ => None,
        })
        .await
        .and_then(|exit| ensure(exit == Exit::Code(code), format!("{exit:?}")))
}

async fn trains(scene: &Scene, replica: u32, generation: u64) -> Outcome {
    scene
        .event(&format!("r{replica}.g{generation} commits"), |event| match event {
            Event::FirstCommit { replica: r, generation: g, .. } => {
                ((*r, *g) == (replica, generation)).then_some(())
            }
            _ => None,
        })
        .await
}

scenario!(news_of_a_death_elsewhere_reaches_every_session_here_and_outlives_a_lighthouse, drop_news);
async fn news_of_a_death_elsewhere_reaches_every_session_here_and_outlives_a_lighthouse(
    mutant: Option<&'static str>,
) -> Outcome {
    let scene = Scene::new(mutant).await;
    let mut lighthouse = listen(&scene).await;
    for replica in 0..2 {
        let mut plan = session(replica, "hears", 1_000_000);
        plan.lighthouse_control = control_of(&scene);
        scene.send(start(plan)).await;
    }
    let mut line = dialled(&mut lighthouse).await?;
    for replica in 0..2 {
        trains(&scene, replica, 1).await?;
    }
    tell(&line, 41).await;
    let mut evicted = [evict(&mut line).await?, evict(&mut line).await?];
    evicted.sort_unstable();
    ensure(evicted == [0, 1], format!("{evicted:?}"))?;
    for replica in 0..2 {
        leaves_with(&scene, replica, 1, 41).await?;
        trains(&scene, replica, 2).await?;
    }

    // Nothing is asked for meanwhile: the line comes back by itself.
    drop(line);
    lighthouse.close().await;
    let mut lighthouse = listen(&scene).await;
    let mut line = dialled(&mut lighthouse).await?;
    tell(&line, 42).await;
    evict(&mut line).await?;
    evict(&mut line).await?;
    for replica in 0..2 {
        leaves_with(&scene, replica, 2, 42).await?;
        trains(&scene, replica, 3).await?;
    }
    Ok(())
}
