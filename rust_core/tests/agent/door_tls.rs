//! The door and a lighthouse that speaks TLS: the real agent, the real lighthouse, each with a certificate of the run.

use std::time::Duration;

use serde_json::json;
use sky_monarch_core::ErrorKind;
use sky_monarch_core::lighthouse_client::{LighthouseClient, Member};
use sky_monarch_core::wire::tls::{Authority, Identity};

use crate::door::{lighthouse_of, open, quick_quorum, state};
use crate::recovery::lighthouse_service;
use crate::scenario;
use crate::scene::*;

fn authority() -> Authority {
    Authority::new("run", Duration::from_secs(3600)).expect("an authority")
}

fn issued(by: &Authority, name: &str) -> Identity {
    by.issue(name).expect("a certificate")
}

/// A scene whose lighthouse and agent have these certificates.
async fn scene_of(lighthouse: &Identity, agent: &Identity) -> Scene {
    Scene::with(None, |config| {
        let private = json!({"token": TOKEN, "identities": {"lighthouse": lighthouse, "agent": agent}});
        let path = config["private"].as_str().unwrap_or_default();
        std::fs::write(path, private.to_string()).expect("a file");
        lighthouse_service(config, json!({"tls": true}));
    })
    .await
}

/// What a rank says first, through the door to the lighthouse that is dialled with `scheme`.
async fn first_word(scene: &Scene, scheme: &str) -> Result<sky_monarch_core::Result<()>, String> {
    let lighthouse = lighthouse_of(scene).await?.replacen("http", scheme, 1);
    let client = LighthouseClient::connect(&open(scene, 0, &lighthouse).await?, SOON).await;
    Ok(client.map_err(|error| error.to_string())?.heartbeat("r0:a", SOON).await)
}

async fn refused(scene: &Scene, scheme: &str, words: &str) -> Outcome {
    let error = first_word(scene, scheme).await?.err().ok_or("it was heard")?;
    let text = error.to_string();
    ensure(error.kind() == ErrorKind::Closed && text.contains(words) && !text.contains(TOKEN), text)?;
    let known = state(scene).await;
    ensure(known["replicas"] == json!([]) && known["counters"]["heartbeats"] == 0, format!("{known}"))
}

fn member(replica: u32) -> Member {
    Member {
        replica_id: format!("r{replica}:a"),
        address: String::new(),
        store_address: String::new(),
        step: 5,
        world_size: 1,
        shrink_only: false,
        data: String::new(),
        commit_failures: 0,
    }
}

scenario!(a_quorum_forms_through_doors_that_dial_with_the_certificates_of_the_run);
async fn a_quorum_forms_through_doors_that_dial_with_the_certificates_of_the_run(
    _: Option<&'static str>,
) -> Outcome {
    let run = authority();
    let scene = scene_of(&issued(&run, "lighthouse"), &issued(&run, "host-0")).await;
    let lighthouse = lighthouse_of(&scene).await?.replacen("http", "https", 1);
    let mut asked = Vec::new();
    for replica in 0..2 {
        let url = open(&scene, replica, &lighthouse).await?;
        ensure(url.starts_with("http://"), "a rank speaks plaintext, on loopback, to its own agent")?;
        let client = LighthouseClient::connect(&url, SOON).await.map_err(|error| error.to_string())?;
        client.heartbeat(&format!("r{replica}:a"), SOON).await.map_err(|error| error.to_string())?;
        asked.push(tokio::spawn(async move { client.quorum(member(replica), SOON).await }));
    }
    for asked in asked {
        let quorum = asked.await.expect("a task").map_err(|error| error.to_string())?;
        ensure(quorum.participants.len() == 2, format!("{quorum:?}"))?;
    }
    Ok(())
}

scenario!(the_way_through_the_door_is_short_with_certificates_too);
async fn the_way_through_the_door_is_short_with_certificates_too(_: Option<&'static str>) -> Outcome {
    let run = authority();
    let scene = scene_of(&issued(&run, "lighthouse"), &issued(&run, "host-0")).await;
    let lighthouse = lighthouse_of(&scene).await?.replacen("http", "https", 1);
    let (zero, one) = (open(&scene, 0, &lighthouse).await?, open(&scene, 1, &lighthouse).await?);
    let took = quick_quorum("through the door, with TLS", &zero, &one).await?;
    // Loose: a machine may be busy. One connection carries all, so there is no handshake for each.
    ensure(took < Duration::from_millis(200), format!("{took:?}"))
}

scenario!(a_lighthouse_without_the_name_of_one_is_told_nothing);
async fn a_lighthouse_without_the_name_of_one_is_told_nothing(_: Option<&'static str>) -> Outcome {
    let run = authority();
    // Any host of the run has such a certificate: it must not pose as the lighthouse.
    let scene = scene_of(&issued(&run, "host-1"), &issued(&run, "host-0")).await;
    refused(&scene, "https", "not valid for name").await
}

scenario!(a_lighthouse_of_another_authority_is_told_nothing);
async fn a_lighthouse_of_another_authority_is_told_nothing(_: Option<&'static str>) -> Outcome {
    let (run, other) = (authority(), authority());
    let scene = scene_of(&issued(&other, "lighthouse"), &issued(&run, "host-0")).await;
    refused(&scene, "https", "certificate").await
}

scenario!(an_agent_of_another_authority_is_not_heard);
async fn an_agent_of_another_authority_is_not_heard(_: Option<&'static str>) -> Outcome {
    let (run, other) = (authority(), authority());
    let lighthouse = issued(&run, "lighthouse");
    // It even trusts the right authority: only its own certificate is wrong.
    let agent = Identity { ca_pem: lighthouse.ca_pem.clone(), ..issued(&other, "host-0") };
    let scene = scene_of(&lighthouse, &agent).await;
    refused(&scene, "https", "the lighthouse is away").await
}

scenario!(plaintext_is_not_heard_where_tls_is_spoken);
async fn plaintext_is_not_heard_where_tls_is_spoken(_: Option<&'static str>) -> Outcome {
    let run = authority();
    let scene = scene_of(&issued(&run, "lighthouse"), &issued(&run, "host-0")).await;
    refused(&scene, "http", "the lighthouse is away").await
}
