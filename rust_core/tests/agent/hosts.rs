//! Hosts that were provisioned: what their agents do without a controller, against its word, and between each other; and
//! what the head's agent keeps for them.

use std::time::Duration;

use serde_json::json;
use sky_monarch_core::channel::Credentials;
use sky_monarch_core::lighthouse::ControlClient;
use sky_monarch_core::protocol::{Command, Event, Peer, ProbeTarget, Reached, SetupPlan, Slot};
use sky_monarch_core::wire::Address;
use sky_monarch_core::wire::tls::{Authority, Identity};

use crate::recovery::lighthouse_service;
use crate::scenario;
use crate::scene::*;

fn authority() -> Authority {
    Authority::new("run", Duration::from_secs(3600)).expect("an authority")
}

fn issued(by: &Authority, name: &str) -> Identity {
    by.issue(name).expect("a certificate")
}

fn private(config: &serde_json::Value, identities: serde_json::Value) {
    let path = config["private"].as_str().unwrap_or_default();
    std::fs::write(path, json!({"token": TOKEN, "identities": identities}).to_string()).expect("a file");
}

/// The agent of a host that was provisioned for the third time.
async fn provisioned(mutant: Option<&'static str>, limits: serde_json::Value) -> Scene {
    Scene::with(mutant, |config| {
        config["attempt"] = 3.into();
        for (name, value) in limits.as_object().into_iter().flatten() {
            config["limits"][name] = value.clone();
        }
    })
    .await
}

/// The head, with a lighthouse that hosts reach at two ports.
async fn head(run: &Authority) -> Scene {
    Scene::with(None, |config| {
        let identities = json!({"lighthouse": issued(run, "lighthouse"), "agent": issued(run, "head")});
        private(config, identities);
        let control = json!([
            format!("unix:{}/lighthouse.sock", config["run_dir"].as_str().unwrap_or_default()),
            "tls:127.0.0.1:0"
        ]);
        lighthouse_service(config, json!({"tls": true, "control": control}));
        // Nobody else takes these ports while no agent has them.
        config["services"][0]["listen"] = json!(["127.200.77.9:0", "127.200.77.9:0"]);
    })
    .await
}

/// Pid of the lighthouse that the agent keeps, and its two addresses.
fn lighthouse_of(scene: &Scene) -> Option<(u32, String, String)> {
    let file: serde_json::Value =
        serde_json::from_slice(&std::fs::read(scene.path("lighthouse.pid")).ok()?).ok()?;
    let pid = u32::try_from(file["pid"].as_u64()?).ok()?;
    let environ = std::fs::read_to_string(format!("/proc/{pid}/environ")).ok()?;
    let told = |name: &str| {
        let found = environ.split('\0').find_map(|pair| pair.strip_prefix(&format!("{name}=")));
        found.map(str::to_owned)
    };
    Some((pid, told("SKY_MONARCH_LIGHTHOUSE_ADDR")?, told("SKY_MONARCH_LIGHTHOUSE_CONTROL_ADDR")?))
}

async fn another_lighthouse(scene: &Scene, but: u32) -> Result<(u32, String, String), String> {
    eventually("a lighthouse runs", SOON, || {
        lighthouse_of(scene).is_some_and(|(pid, ..)| pid != but && alive(pid))
    })
    .await?;
    lighthouse_of(scene).ok_or_else(|| "it is gone again".to_owned())
}

/// What a supervisor on another host learns at that port.
async fn state_at(scene: &Scene, control: &str, identity: &Identity) -> sky_monarch_core::Result<String> {
    let address: Address = format!("tls:{control}").parse().expect("an address");
    let credentials = Credentials::new(scene.run_id.clone(), TOKEN).with_identity(identity.clone());
    ControlClient::new(address, credentials).state(SOON).await
}

scenario!(a_lighthouse_that_is_restarted_serves_its_hosts_at_the_same_two_ports);
async fn a_lighthouse_that_is_restarted_serves_its_hosts_at_the_same_two_ports(
    _: Option<&'static str>,
) -> Outcome {
    let run = authority();
    let scene = head(&run).await;
    let host = issued(&run, "host-1-a1");
    let (mut pid, address, control) = another_lighthouse(&scene, 0).await?;
    ensure(address != control, "one for managers, one for supervisors")?;
    for _ in 0..2 {
        state_at(&scene, &control, &host).await.map_err(|error| error.to_string())?;
        // Of managers' port the handshake is enough: only with a certificate of the run does it succeed.
        let stranger = issued(&authority(), "host-1-a1");
        let stranger = Identity { ca_pem: host.ca_pem.clone(), ..stranger };
        let refused = state_at_once(&scene, &control, &stranger).await;
        ensure(refused.is_err(), "a stranger got in")?;
        kill(pid, libc::SIGKILL);
        let next = another_lighthouse(&scene, pid).await?;
        ensure((&next.1, &next.2) == (&address, &control), "other ports")?;
        pid = next.0;
    }
    Ok(())
}

async fn state_at_once(
    scene: &Scene,
    control: &str,
    identity: &Identity,
) -> sky_monarch_core::Result<String> {
    let address: Address = format!("tls:{control}").parse().expect("an address");
    let credentials = Credentials::new(scene.run_id.clone(), TOKEN).with_identity(identity.clone());
    ControlClient::new(address, credentials).state(Duration::from_millis(500)).await
}

scenario!(an_agent_in_place_of_a_dead_one_has_the_ports_that_hosts_know);
async fn an_agent_in_place_of_a_dead_one_has_the_ports_that_hosts_know(_: Option<&'static str>) -> Outcome {
    let run = authority();
    let mut scene = head(&run).await;
    let (pid, address, control) = another_lighthouse(&scene, 0).await?;
    scene.kill_agent();
    eventually("its services die with it", SOON, || !alive(pid)).await?;
    scene.start_agent();
    let (_, address_then, control_then) = another_lighthouse(&scene, pid).await?;
    ensure((address_then, control_then) == (address, control.clone()), "other ports")?;
    state_at(&scene, &control, &issued(&run, "host-1-a1")).await.map(drop).map_err(|error| error.to_string())
}

scenario!(without_its_controller_for_the_length_of_its_lease_a_host_ends_its_ranks, no_lease);
async fn without_its_controller_for_the_length_of_its_lease_a_host_ends_its_ranks(
    mutant: Option<&'static str>,
) -> Outcome {
    let mut scene = provisioned(mutant, json!({"lease_s": 3.0})).await;
    scene.send(start(session(0, "train", 100_000))).await;
    let pid = scene.spawned(0, 0, 1).await?;
    tokio::time::sleep(Duration::from_millis(3500)).await;
    ensure(alive(pid), "a lease is renewed by being connected")?;
    // A controller that is killed and comes back in time changes nothing.
    let before = scene.heard.lock().expect("no poison").hellos.len();
    scene.hang_up();
    scene.until("it dials again", |heard| (heard.hellos.len() > before).then_some(())).await?;
    tokio::time::sleep(Duration::from_millis(3500)).await;
    ensure(alive(pid), "it came back in time")?;
    scene.stop_controller();
    let code = scene.agent_exit().await?;
    ensure(code == 1 && !alive(pid) && marked(&scene.run_id).is_empty(), format!("exit code {code}"))?;
    let log = std::fs::read_to_string(scene.path("agent.log")).unwrap_or_default();
    ensure(!scene.path("private.json").exists(), format!("its secrets are gone: {log}"))
}

scenario!(a_host_that_is_simply_there_has_no_lease);
async fn a_host_that_is_simply_there_has_no_lease(mutant: Option<&'static str>) -> Outcome {
    // The default of a host that was provisioned would be 600 s: here it is none at all, whatever happens.
    let scene = Scene::new(mutant).await;
    scene.send(start(session(0, "train", 100_000))).await;
    let pid = scene.spawned(0, 0, 1).await?;
    scene.stop_controller();
    tokio::time::sleep(Duration::from_secs(2)).await;
    ensure(alive(pid) && scene.path("private.json").exists(), "it goes on")
}

scenario!(a_fenced_host_ends_its_ranks_and_itself_at_once, deaf_to_fence);
async fn a_fenced_host_ends_its_ranks_and_itself_at_once(mutant: Option<&'static str>) -> Outcome {
    let reason = "fenced: host host-0 is at attempt 4";
    for at_handshake in [false, true] {
        let mut scene = provisioned(mutant, json!({})).await;
        // One that would take its time, if it had any.
        let mut plan = shell(0, "trap '' TERM; while :; do sleep 0.05; done");
        plan.recovery.grace_s = 120.0;
        scene.send(start(plan)).await;
        let pid = scene.spawned(0, 0, 1).await?;
        if at_handshake {
            *scene.refusal.lock().expect("no poison") = Some(reason.to_owned());
            scene.hang_up();
        } else {
            scene.send(Command::Dropped { reason: reason.to_owned() }).await;
        }
        let code = scene.agent_exit().await?;
        ensure(code == 0 && !alive(pid) && marked(&scene.run_id).is_empty(), format!("exit code {code}"))?;
    }
    Ok(())
}

scenario!(any_other_refusal_is_no_fence);
async fn any_other_refusal_is_no_fence(mutant: Option<&'static str>) -> Outcome {
    let scene = provisioned(mutant, json!({})).await;
    scene.send(start(session(0, "train", 100_000))).await;
    let pid = scene.spawned(0, 0, 1).await?;
    for reason in ["host host-0 has an agent already, pid 7", "the journal is fenced: by nobody"] {
        let before = scene.heard.lock().expect("no poison").hellos.len();
        scene.send(Command::Dropped { reason: reason.into() }).await;
        scene.until("it dials again", |heard| (heard.hellos.len() > before).then_some(())).await?;
    }
    ensure(alive(pid), "its rank was not touched")
}

scenario!(hosts_find_out_whom_they_reach_and_name_the_pair_that_cannot_talk);
async fn hosts_find_out_whom_they_reach_and_name_the_pair_that_cannot_talk(
    mutant: Option<&'static str>,
) -> Outcome {
    let run = authority();
    let scene = Scene::with(mutant, |config| {
        config["attempt"] = 2.into();
        private(config, json!({"agent": issued(&run, "host-0-a2")}));
    })
    .await;
    let own = |heard: &Heard| match heard.hellos.first() {
        Some(Peer::Agent { probe, attempt: 2, .. }) => probe.clone(),
        _ => None,
    };
    let own = scene.until("it says where it answers", own).await?;
    // Nobody else takes a port there meanwhile.
    let closed = std::net::TcpListener::bind("127.200.77.5:0").and_then(|bound| bound.local_addr());
    let closed = closed.expect("an address").to_string();
    let target =
        |host: &str, address: &str| ProbeTarget { host: host.into(), attempt: 2, address: address.into() };
    let targets = vec![target("host-0", &own), target("host-1", &closed), target("host-1", &own)];
    scene.send(Command::Probe { targets, deadline_s: 20.0 }).await;
    let (from, reached) = scene
        .event("the answer", |e| match e {
            Event::Reached { from, targets } => Some((from.clone(), targets.clone())),
            _ => None,
        })
        .await?;
    let [good, refused, posing] = reached.as_slice() else { return Err(format!("{reached:?}")) };
    ensure(from == "127.0.0.1" && good.ok && good.rtt_s.is_some(), format!("{from} {good:?}"))?;
    let says = |reached: &Reached, words: &str| {
        let pair = format!("host-0 (127.0.0.1) cannot reach host-1 ({}): ", reached.address);
        let error = reached.error.clone().unwrap_or_default();
        ensure(!reached.ok && error.starts_with(&pair) && error.contains(words), error)
    };
    says(refused, "refused")?;
    // Two private networks may use the same address: who answers there counts.
    says(posing, "is not host-1-a2")
}

scenario!(an_address_that_is_not_the_hosts_own_is_found_out_before_anything_runs);
async fn an_address_that_is_not_the_hosts_own_is_found_out_before_anything_runs(
    mutant: Option<&'static str>,
) -> Outcome {
    let run = authority();
    let mut scene = Scene::with(mutant, |config| {
        config["attempt"] = 1.into();
        config["address"] = "192.0.2.1".into();
        private(config, json!({"agent": issued(&run, "host-0-a1")}));
    })
    .await;
    let code = scene.agent_exit().await?;
    let log = std::fs::read_to_string(scene.path("agent.log")).unwrap_or_default();
    ensure(code != 0 && log.contains("`address` is 192.0.2.1"), format!("{code}: {log}"))
}

scenario!(plans_get_the_folder_and_the_environment_of_the_host);
async fn plans_get_the_folder_and_the_environment_of_the_host(mutant: Option<&'static str>) -> Outcome {
    let mut scene = Scene::with(mutant, |config| {
        config["attempt"] = 1.into();
        config["workdir"] = config["run_dir"].clone();
        config["inherit_env"] = true.into();
    })
    .await;
    // Of the agent's own environment only cargo's names are certain in a test.
    let script = "pwd; echo \"${CARGO_PKG_NAME-unset} ${LR-unset} ${TEST_AGENT_JSON:+told}\"";
    let envs = shell(0, "").envs.into_iter().chain([("LR".to_owned(), "1".to_owned())]).collect();
    let workdir = "/nowhere/on/this/host".to_owned();
    scene.send(Command::Setup(SetupPlan { script: script.into(), workdir, envs, timeout_s: 60.0 })).await;
    let mut plan = shell(0, script);
    plan.workdir = "/nowhere/on/this/host".into();
    plan.envs.insert("LR".into(), "1".into());
    scene.send(start(plan)).await;
    let folder = std::fs::canonicalize(scene.folder.path()).expect("a folder");
    let wanted = format!("{}\nsky-monarch-core 1 told\n", folder.display());
    for slot in [None, Some(Slot { replica: 0, rank: 0 })] {
        let (_, bytes) = scene.log(slot, 0).await?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        ensure(text.starts_with(&wanted), format!("{slot:?}: {text}"))?;
    }
    Ok(())
}

scenario!(a_host_that_may_have_a_successor_leaves_its_place_in_the_lighthouse_open);
async fn a_host_that_may_have_a_successor_leaves_its_place_in_the_lighthouse_open(
    mutant: Option<&'static str>,
) -> Outcome {
    let scene = Scene::with(mutant, |config| {
        config["attempt"] = 1.into();
        lighthouse_service(config, json!({}));
    })
    .await;
    let control = crate::recovery::control_of(&scene).ok_or("no address")?;
    let mut plan = shell(0, "sleep 1; exit 1");
    plan.recovery.max_restarts = 0;
    plan.lighthouse_control = Some(control.clone());
    scene.send(start(plan)).await;
    scene.spawned(0, 0, 1).await?;
    scene.stop_controller();
    let client = ControlClient::new(
        control.parse().expect("an address"),
        Credentials::new(scene.run_id.clone(), TOKEN),
    );
    // It is given up where nobody hears of it; the lighthouse does, of that generation alone.
    let deadline = std::time::Instant::now() + SOON;
    loop {
        let state = client.state(SOON).await.map_err(|error| error.to_string())?;
        let state: serde_json::Value = serde_json::from_str(&state).map_err(|error| error.to_string())?;
        // Its end, and that it was given up.
        if state["counters"]["evictions"] == 2 {
            return ensure(state["fences"]["0"] == 2, format!("the next generation may come: {state}"));
        }
        ensure(std::time::Instant::now() < deadline, format!("never given up: {state}"))?;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
