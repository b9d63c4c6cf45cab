//! The host is about to be taken away: whoever says so, groups leave in order, and the agent is gone in time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::json;
use sky_monarch_core::protocol::{Event, Exit};
use time::OffsetDateTime;
use time::format_description::well_known::{Rfc2822, Rfc3339};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;

use crate::scenario;
use crate::scene::*;

const LEAVES: &str = "echo told; exit 0";
const EVENTS: &str = "/metadata/scheduledevents?api-version=2020-07-01";
/// For a service that wants no header: everybody brings this one.
const ANYBODY: &str = "";
const NAME: &str = "/metadata/instance/compute/name?api-version=2021-02-01&format=text";

/// A metadata service on loopback: answers by method and path, to whoever brings the header that it wants.
#[derive(Clone, Default)]
struct Service {
    answers: Arc<Mutex<HashMap<String, String>>>,
    asked: Arc<Mutex<HashMap<String, u32>>>,
}

impl Service {
    /// Serves; returns its address too. The header is one line, in lower case.
    async fn start(header: &'static str) -> (Self, String) {
        let service = Self::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let shared = service.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let service = shared.clone();
                tokio::spawn(async move {
                    let (read, mut write) = stream.split();
                    let mut lines = BufReader::new(read).lines();
                    while let Ok(Some(first)) = lines.next_line().await {
                        let mut is_welcome = false;
                        while let Ok(Some(line)) = lines.next_line().await {
                            is_welcome |= line.to_lowercase() == header; // or the empty line, of anybody
                            if line.is_empty() {
                                break;
                            }
                        }
                        let what = first.trim_end_matches(" HTTP/1.1").to_owned();
                        let answer = service.answers.lock().expect("no poison").get(&what).cloned();
                        let (status, body) = match answer {
                            // The token of EC2 is not asked for with itself.
                            Some(body) if is_welcome || what.starts_with("PUT") => ("200 OK", body),
                            Some(_) => ("400 Bad Request", String::new()),
                            None => ("404 Not Found", String::new()),
                        };
                        *service.asked.lock().expect("no poison").entry(what).or_default() += 1;
                        let length = body.len();
                        let text = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n{body}");
                        if write.write_all(text.as_bytes()).await.is_err() {
                            break;
                        }
                    }
                });
            }
        });
        (service, url)
    }

    fn says(&self, what: &str, body: impl Into<String>) {
        self.answers.lock().expect("no poison").insert(what.to_owned(), body.into());
    }

    /// Waits until that was asked for a few times more.
    async fn is_asked(&self, what: &str) -> Outcome {
        let times = || self.asked.lock().expect("no poison").get(what).copied().unwrap_or_default();
        let before = times();
        eventually("the service is asked", SOON, || times() >= before + 3).await
    }
}

/// A host that is asked for notices in that way.
async fn host(mutant: Option<&'static str>, notices: serde_json::Value) -> Scene {
    Scene::with(mutant, |config| config["notices"] = notices.clone()).await
}

async fn told(scene: &Scene) -> Result<(String, String, f64), String> {
    let told = |event: &Event| match event {
        Event::HostLeaving { kind, reason, grace_s } => Some((kind.clone(), reason.clone(), *grace_s)),
        _ => None,
    };
    scene.event("the host is leaving", told).await
}

/// The rank was told, and has left by itself; so has the agent.
async fn left_in_order(scene: &mut Scene) -> Outcome {
    let code = scene.agent_exit().await?;
    ensure(code == 143, format!("exit code {code}"))?;
    scene
        .event("the rank left in order", |event| match event {
            Event::RankExited { exit: Exit::Code(0), tail, .. } => {
                tail.contains(&"told".to_owned()).then_some(())
            }
            _ => None,
        })
        .await
}

/// Waits for a rank that does that at SIGTERM.
async fn running(scene: &Scene, at_term: &str, grace_s: f64) -> Outcome {
    let mut plan = shell(0, &listens(scene, 0, at_term));
    plan.recovery.grace_s = grace_s;
    scene.send(start(plan)).await;
    scene.spawned(0, 0, 1).await?;
    is_listening(scene, 0).await
}

fn preempt(machine: &str, left_s: i64) -> String {
    let when = OffsetDateTime::now_utc() + time::Duration::seconds(left_s);
    let when = when.format(&Rfc2822).expect("a time").replace("+0000", "GMT");
    json!({"DocumentIncarnation": 1, "Events": [{
        "EventId": "A123BC45-1234-5678-AB90-ABCDEF123456", "EventStatus": "Scheduled", "EventType": "Preempt",
        "ResourceType": "VirtualMachine", "Resources": [machine], "NotBefore": when, "Description": "",
        "EventSource": "Platform", "DurationInSeconds": -1,
    }]})
    .to_string()
}

scenario!(azures_notice_ends_the_machine_that_it_names, deaf_to_clouds, heed_all_notices);
async fn azures_notice_ends_the_machine_that_it_names(mutant: Option<&'static str>) -> Outcome {
    let (azure, url) = Service::start("metadata: true").await;
    let (name, events) = (format!("GET {NAME}"), format!("GET {EVENTS}"));
    azure.says(&name, "trainer_1");
    azure.says(&events, r#"{"DocumentIncarnation": 0, "Events": []}"#);
    let mut scene = host(mutant, json!({"kind": "azure", "url": url, "every_s": 0.1})).await;
    running(&scene, LEAVES, 60.0).await?;
    azure.says(&events, preempt("trainer_0", 30));
    azure.is_asked(&events).await?;
    let has_left = |scene: &Scene| scene.events().iter().any(|e| matches!(e, Event::HostLeaving { .. }));
    ensure(!has_left(&scene), "another machine of the scale set was meant")?;
    azure.says(&events, preempt("trainer_1", 30));
    let (kind, reason, grace_s) = told(&scene).await?;
    ensure(
        kind == "azure" && reason.contains("Preempt") && (20.0..=30.0).contains(&grace_s),
        format!("{kind} {reason} {grace_s}"),
    )?;
    left_in_order(&mut scene).await
}

scenario!(other_clouds_are_asked_in_their_own_ways, deaf_to_clouds);
async fn other_clouds_are_asked_in_their_own_ways(mutant: Option<&'static str>) -> Outcome {
    let soon = (OffsetDateTime::now_utc() + time::Duration::seconds(90)).format(&Rfc3339).expect("a time");
    let own = "ocid1.instance.oc1.phx.unique_ID";
    let oracle = json!({"id": own, "state": "Running", "shape": "VM.Standard.E3.Flex"}).to_string();
    let action = json!({"action": "terminate", "time": soon}).to_string();
    // What is there before, and what is there then.
    let cases = [
        (
            "gcp",
            "metadata-flavor: google",
            vec![("GET /computeMetadata/v1/instance/preempted", "FALSE".into())],
            ("GET /computeMetadata/v1/instance/preempted", "TRUE".to_owned()),
        ),
        (
            "aws",
            "x-aws-ec2-metadata-token: secret",
            vec![("PUT /latest/api/token", "secret".to_owned())],
            ("GET /latest/meta-data/spot/instance-action", action),
        ),
        (
            "oci",
            "authorization: bearer oracle",
            vec![("GET /opc/v2/instance/", oracle)],
            ("GET /opc/v2/instance/", json!({"id": own, "state": "Terminating"}).to_string()),
        ),
    ];
    for (kind, header, before, (what, then)) in cases {
        let (service, url) = Service::start(header).await;
        for (path, text) in before {
            service.says(path, text);
        }
        let mut scene = host(mutant, json!({"kind": kind, "url": url, "every_s": 0.1})).await;
        running(&scene, LEAVES, 60.0).await?;
        service.is_asked(what).await?;
        service.says(what, then);
        let said = told(&scene).await?;
        ensure(said.0 == kind, format!("{said:?}"))?;
        left_in_order(&mut scene).await?;
    }
    Ok(())
}

scenario!(oracles_event_is_heard_through_a_relay, deaf_to_clouds);
async fn oracles_event_is_heard_through_a_relay(mutant: Option<&'static str>) -> Outcome {
    let own = "ocid1.instance.oc1.phx.unique_ID";
    let event = |of: &str| {
        let when = OffsetDateTime::now_utc().format(&Rfc3339).expect("a time");
        json!({
            "eventType": "com.oraclecloud.computeapi.instancepreemptionaction", "cloudEventsVersion": "0.1",
            "source": "ComputeApi", "eventTime": when,
            "data": {"resourceId": of, "additionalDetails": {"preemptionAction": "TERMINATE"}},
        })
        .to_string()
    };
    let (metadata, url) = Service::start("authorization: bearer oracle").await;
    metadata.says("GET /opc/v2/instance/", json!({"id": own, "state": "Running"}).to_string());
    let (relay, events) = Service::start(ANYBODY).await;
    relay.says("GET /last", "");
    let notices = json!({"kind": "oci", "url": url, "events": format!("{events}/last"), "every_s": 0.1});
    let mut scene = host(mutant, notices).await;
    running(&scene, LEAVES, 60.0).await?;
    relay.says("GET /last", event("ocid1.instance.oc1.phx.other"));
    relay.is_asked("GET /last").await?;
    relay.says("GET /last", event(own));
    let (kind, _, grace_s) = told(&scene).await?;
    ensure(kind == "oci" && (100.0..=120.0).contains(&grace_s), format!("{kind} {grace_s}"))?;
    left_in_order(&mut scene).await
}

scenario!(a_service_that_does_not_answer_is_told_once_and_costs_nothing_else);
async fn a_service_that_does_not_answer_is_told_once_and_costs_nothing_else(
    mutant: Option<&'static str>,
) -> Outcome {
    // Nobody else takes a port there meanwhile.
    let free = TcpListener::bind("127.200.77.8:0").await.expect("a port").local_addr().expect("an address");
    let scene =
        host(mutant, json!({"kind": "azure", "url": format!("http://{free}"), "every_s": 0.05})).await;
    running(&scene, LEAVES, 60.0).await?;
    let notice = |event: &Event| match event {
        Event::Notice { message, .. } => message.contains("notices of pre-emption").then(|| message.clone()),
        _ => None,
    };
    let message = scene.event("it is told", notice).await?;
    ensure(message.contains("azure"), message)?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let count = scene.events().iter().filter(|event| notice(event).is_some()).count();
    ensure(count == 1 && alive(scene.agent_pid()), format!("told {count} times"))
}

scenario!(sigusr1_is_a_warning_with_the_time_that_was_agreed_on, whole_grace);
async fn sigusr1_is_a_warning_with_the_time_that_was_agreed_on(mutant: Option<&'static str>) -> Outcome {
    let grace_s = 10.0;
    let mut scene = host(mutant, json!({"warning_s": grace_s})).await;
    // Deaf, and with a job that lets it be so for long: the host's end is what counts.
    running(&scene, "", 600.0).await?;
    kill(scene.agent_pid(), libc::SIGUSR1);
    let since = Instant::now();
    let said = told(&scene).await?;
    ensure(said.0 == "sigusr1" && (said.2 - grace_s).abs() < 0.01, format!("{said:?}"))?;
    // The mutant's own limit would be shorter than what it is to be caught with.
    while scene.agent_exit().await.is_err() && since.elapsed() < SOON {}
    let took_s = since.elapsed().as_secs_f64();
    // Two seconds of it are the agent's own.
    ensure((grace_s - 2.5..grace_s).contains(&took_s), format!("the agent was gone after {took_s} s"))
}

scenario!(a_hooks_notice_is_heeded_and_its_file_is_gone_with_the_agent, deaf_to_hooks);
async fn a_hooks_notice_is_heeded_and_its_file_is_gone_with_the_agent(
    mutant: Option<&'static str>,
) -> Outcome {
    let mut scene = Scene::new(mutant).await;
    running(&scene, LEAVES, 60.0).await?;
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).expect("a clock");
    let until = (now.tv_sec() as u64 + 30) * 1_000_000_000;
    let written = json!({"reason": "the pod is evicted", "until_mono_ns": until}).to_string();
    std::fs::write(scene.path(".notice"), written).expect("a file");
    std::fs::rename(scene.path(".notice"), scene.path("notice-host-0.json")).expect("a rename");
    let (kind, reason, grace_s) = told(&scene).await?;
    ensure(
        (kind.as_str(), reason.as_str()) == ("hook", "the pod is evicted")
            && (20.0..=30.0).contains(&grace_s),
        format!("{kind} {reason} {grace_s}"),
    )?;
    left_in_order(&mut scene).await?;
    ensure(!scene.path("notice-host-0.json").exists(), "the file is gone")
}
