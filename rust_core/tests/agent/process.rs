//! The processes of a scene, as entry points of this very test binary.

use std::time::Duration;

use sky_monarch_core::channel::{Credentials, Limits, connect};
use sky_monarch_core::protocol::{Fault, Peer, SessionCommand, SessionReport, Slot, WAITING};

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The agent; does nothing when it is run as a test.
#[test]
fn agent_process() {
    let Some(path) = variable("TEST_AGENT_JSON") else { return };
    let code = std::fs::read_to_string(path).map(|json| sky_monarch_core::agent::run(&json));
    match code {
        Ok(Ok(code)) => std::process::exit(code),
        other => {
            eprintln!("{other:?}");
            std::process::exit(99);
        }
    }
}

/// The lighthouse; does nothing when it is run as a test.
#[test]
fn lighthouse_process() {
    let Some(json) = variable("TEST_LIGHTHOUSE_JSON") else { return };
    std::process::exit(sky_monarch_core::lighthouse::run(&json).unwrap_or(99));
}

/// A rank with a session; does nothing when it is run as a test.
#[test]
fn rank_process() {
    let Some(mode) = variable("TEST_RANK_MODE") else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    std::process::exit(runtime.block_on(rank(&mode)));
}

async fn rank(mode: &str) -> i32 {
    let number = |name: &str| variable(name).and_then(|text| text.parse::<u64>().ok()).unwrap_or_default();
    let slot =
        Slot { replica: number("SKY_MONARCH_REPLICA") as u32, rank: number("SKY_MONARCH_RANK") as u32 };
    let generation = number("SKY_MONARCH_GENERATION");
    let target = number("TEST_TARGET");
    let address = variable("SKY_MONARCH_AGENT").unwrap_or_default().parse().expect("an address");
    let credentials = Credentials::new(
        variable("SKY_MONARCH_RUN_ID").unwrap_or_default(),
        variable("SKY_MONARCH_TOKEN").unwrap_or_default(),
    );
    let peer = Peer::Session { slot, generation, pid: std::process::id(), target_step: Some(target) };
    let limit = Duration::from_secs(20);
    let limits = Limits::default();
    let dialled =
        connect::<SessionReport, SessionCommand>(&address, peer, &credentials, &limits, limit).await;
    let mut channel = match dialled {
        Ok(channel) => channel,
        Err(error) => {
            eprintln!("no session: {error}");
            return 9;
        }
    };
    // At its second step, or once there is a sign to: then all stop together, however late one of them has come.
    let sign = variable("TEST_SIGN").map(std::path::PathBuf::from);
    let stops = |step| generation == 1 && sign.as_ref().map_or(step == 2, |sign| sign.exists());
    for step in 1..=target {
        let committed = SessionReport::Committed {
            step,
            quorum_id: Some(7),
            participants: Some(1),
            metrics: Default::default(),
        };
        if channel.send(&committed).await.is_err() {
            return 8;
        }
        match mode {
            "early" if step == 3 => {
                tokio::time::sleep(Duration::from_millis(50)).await;
                return 0;
            }
            "waits" if stops(step) => {
                // As one that waits does, for a while: what it waits for does not come.
                let waits = SessionReport::Pause { what: WAITING.into(), limit_s: 0.1 };
                if channel.send(&waits).await.is_err() {
                    return 8;
                }
                std::future::pending().await
            }
            "silent" if stops(step) => std::future::pending().await,
            _ => {}
        }
        match tokio::time::timeout(Duration::from_millis(20), channel.recv()).await {
            Ok(Ok(SessionCommand::Drain { .. })) => return 0,
            Ok(Ok(SessionCommand::Inject { fault: Fault::Exit })) => return 1,
            // 0 is told beside answers (news.rs), when a session of the next generation may be here already.
            Ok(Ok(SessionCommand::Dead { quorum_id })) if mode == "hears" && quorum_id != 0 => {
                return quorum_id as i32;
            }
            Ok(Err(_)) => return 7,
            _ => {}
        }
    }
    let _ = channel.send(&SessionReport::Done { step: target }).await;
    loop {
        match channel.recv().await {
            Ok(SessionCommand::Release | SessionCommand::Drain { .. }) => return 0,
            Ok(_) => {}
            Err(_) => return 6,
        }
    }
}
