//! A host that is looked at before its first group starts: what is told of it, when, and what is left of who looked.

use serde_json::json;
use sky_monarch_core::protocol::{Event, Finding, Peer};

use crate::scenario;
use crate::scene::*;

/// An agent whose host is looked at by a script of bash: `$1` is `--out`, `$2` the file.
async fn examined(mutant: Option<&'static str>, script: &str, strict: bool, limit_s: f64) -> Scene {
    let argv = ["bash", "-c", script, "look"];
    Scene::with(mutant, |config| {
        config["doctor"] = json!({"argv": argv, "limit_s": limit_s, "holds": true, "strict": strict});
    })
    .await
}

/// For one that is through in time.
const LONG_S: f64 = 60.0;

async fn findings(scene: &Scene) -> Result<Vec<Finding>, String> {
    scene
        .event("the host was looked at", |event| match event {
            Event::Examined { findings, .. } => Some(findings.clone()),
            _ => None,
        })
        .await
}

fn hellos(heard: &Heard) -> Vec<bool> {
    let examining = |peer: &Peer| matches!(peer, Peer::Agent { examining: true, .. });
    heard.hellos.iter().map(examining).collect()
}

scenario!(a_controller_is_to_wait_until_it_has_stored_what_was_found, no_examining);
async fn a_controller_is_to_wait_until_it_has_stored_what_was_found(mutant: Option<&'static str>) -> Outcome {
    let found = json!({"findings": [
        {"check": "gpu.access", "severity": "error", "message": "no", "fix": "join render"},
        {"check": "gpu.count", "severity": "ok", "message": "8 x MI300X", "fix": null},
    ], "healthy": false});
    let scene = examined(mutant, &format!("printf '%s' '{found}' > \"$2\""), false, LONG_S).await;
    let first = scene.until("a hello", |heard| hellos(heard).first().copied()).await?;
    ensure(first, "it says that it is being looked at")?;
    let told = findings(&scene).await?;
    let wanted = Finding {
        check: "gpu.access".into(),
        severity: "error".into(),
        message: "no".into(),
        fix: Some("join render".into()),
    };
    ensure(told.len() == 2 && told[0] == wanted, format!("{told:?}"))?;
    scene.hang_up();
    // That it is stored is seen at the next look.
    let again = scene.until("another hello", |heard| {
        let last = *hellos(heard).get(1..)?.last()?;
        if last {
            scene.hang_up();
        }
        (!last).then_some(())
    });
    again.await
}

scenario!(one_that_is_not_through_in_time_is_ended_with_all_that_it_has_started);
async fn one_that_is_not_through_in_time_is_ended_with_all_that_it_has_started(
    mutant: Option<&'static str>,
) -> Outcome {
    let scene = examined(mutant, "trap '' TERM; sleep 600 & sleep 600", true, 1.0).await;
    let told = findings(&scene).await?;
    let [only] = told.as_slice() else { return Err(format!("{told:?}")) };
    ensure(only.check == "doctor" && only.severity == "error", format!("{only:?}"))?;
    ensure(only.message.contains("it was not through after 1 s"), only.message.clone())?;
    ensure(marked(&scene.run_id).is_empty(), format!("{:?} are left", marked(&scene.run_id)))
}

scenario!(one_that_fails_is_told_of_and_held_against_a_host_only_where_that_is_asked_for);
async fn one_that_fails_is_told_of_and_held_against_a_host_only_where_that_is_asked_for(
    mutant: Option<&'static str>,
) -> Outcome {
    for (script, strict, severity, words) in [
        ("exit 3", false, "warning", "it ended with code 3"),
        ("kill -9 $$", true, "error", "it was ended by signal 9"),
        ("echo rubbish > \"$2\"", false, "warning", "expected value"),
        ("true", false, "warning", "No such file"),
    ] {
        let scene = examined(mutant, script, strict, LONG_S).await;
        let told = findings(&scene).await?;
        let [only] = told.as_slice() else { return Err(format!("{told:?}")) };
        ensure(only.severity == severity && only.message.contains(words), format!("{script}: {only:?}"))?;
        ensure(only.fix.as_deref().is_some_and(|fix| fix.contains("doctor: off")), format!("{only:?}"))?;
    }
    Ok(())
}
