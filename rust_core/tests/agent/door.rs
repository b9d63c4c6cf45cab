//! The agent's door to the lighthouse: the real agent, the real lighthouse, and clients in the place of ranks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use sky_monarch_core::channel::Credentials;
use sky_monarch_core::lighthouse::ControlClient;
use sky_monarch_core::torchft::lighthouse_service_client::LighthouseServiceClient;
use sky_monarch_core::torchft::{LighthouseHeartbeatRequest, LighthouseQuorumRequest, Quorum, QuorumMember};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use crate::recovery::{control_of, with_lighthouse};
use crate::scenario;
use crate::scene::*;

/// Leaves the URL it was given in a file named after its replica and generation.
const RANK: &str = "echo $TORCHFT_LIGHTHOUSE > .url && mv .url url-$SKY_MONARCH_REPLICA-$SKY_MONARCH_GENERATION; exec sleep 1000";

/// Starts a group whose rank waits, and returns the URL of its first generation.
pub async fn open(scene: &Scene, replica: u32, lighthouse: &str) -> Result<String, String> {
    let mut plan = shell(replica, RANK);
    let folder = scene.path(&format!("rank-{replica}"));
    std::fs::create_dir_all(&folder).expect("a folder");
    plan.workdir = folder.to_string_lossy().into_owned();
    plan.lighthouse = lighthouse.into();
    plan.lighthouse_control = control_of(scene);
    scene.send(start(plan)).await;
    url(scene, replica, 1).await
}

async fn url(scene: &Scene, replica: u32, generation: u64) -> Result<String, String> {
    let path = scene.path(&format!("rank-{replica}/url-{replica}-{generation}"));
    eventually("the rank has its URL", SOON, || path.exists()).await?;
    Ok(std::fs::read_to_string(path).expect("a file").trim().to_owned())
}

fn pid_of_lighthouse(scene: &Scene) -> Option<u32> {
    let file: Value = serde_json::from_slice(&std::fs::read(scene.path("lighthouse.pid")).ok()?).ok()?;
    file["pid"].as_u64()?.try_into().ok()
}

/// Where the lighthouse itself listens.
pub async fn lighthouse_of(scene: &Scene) -> Result<String, String> {
    eventually("the lighthouse runs", SOON, || pid_of_lighthouse(scene).is_some()).await?;
    let pid = pid_of_lighthouse(scene).unwrap_or_default();
    let environ = std::fs::read_to_string(format!("/proc/{pid}/environ")).expect("its environment");
    let found = environ.split('\0').find_map(|pair| pair.strip_prefix("SKY_MONARCH_LIGHTHOUSE_ADDR="));
    Ok(format!("http://{}", found.ok_or("no address")?))
}

pub async fn state(scene: &Scene) -> Value {
    let address = control_of(scene).unwrap_or_default().parse().expect("an address");
    let client = ControlClient::new(address, Credentials::new(scene.run_id.clone(), TOKEN));
    serde_json::from_str(&client.state(SOON).await.expect("a lighthouse")).expect("JSON")
}

async fn asking(scene: &Scene) -> Vec<bool> {
    let state = state(scene).await;
    state["replicas"].as_array().into_iter().flatten().map(|one| one["asking"] == true).collect()
}

/// Waits until as many replicas ask as that.
async fn until_asking(scene: &Scene, count: usize, soon: Duration) -> Outcome {
    let deadline = Instant::now() + soon;
    while asking(scene).await.iter().filter(|asks| **asks).count() != count {
        ensure(Instant::now() < deadline, format!("never {count} askers: {}", state(scene).await))?;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// What a manager does, by hand.
#[derive(Clone)]
struct Manager {
    client: LighthouseServiceClient<Channel>,
    id: String,
}

impl Manager {
    async fn dial(url: &str, id: &str) -> Self {
        let channel = Endpoint::from_shared(url.to_owned()).expect("a URL").connect().await;
        Self { client: LighthouseServiceClient::new(channel.expect("a door")), id: id.into() }
    }

    async fn beat(&self) -> Result<(), Status> {
        let request = LighthouseHeartbeatRequest { replica_id: self.id.clone() };
        self.client.clone().heartbeat(request).await.map(drop)
    }

    fn ask(&self, limit: Duration) -> JoinHandle<Result<Quorum, Status>> {
        let (mut client, replica_id) = (self.client.clone(), self.id.clone());
        tokio::spawn(async move {
            let requester = QuorumMember { replica_id, step: 5, world_size: 1, ..QuorumMember::default() };
            let mut request = Request::new(LighthouseQuorumRequest { requester: Some(requester) });
            request.set_timeout(limit);
            Ok(client.quorum(request).await?.into_inner().quorum.expect("a quorum"))
        })
    }

    async fn refused(&self) -> Result<[Status; 2], String> {
        let beaten = self.beat().await.err().ok_or("a heartbeat got in")?;
        let asked = self.ask(SOON).await.expect("a task");
        Ok([beaten, asked.err().ok_or("a question got in")?])
    }
}

async fn answer(asked: JoinHandle<Result<Quorum, Status>>) -> Result<Quorum, String> {
    let joined = tokio::time::timeout(SOON, asked).await.map_err(|_| "no answer in time")?;
    joined.expect("a task").map_err(|status| status.to_string())
}

scenario!(a_fenced_generation_is_refused_at_the_door_and_the_lighthouse_is_not_asked, door_no_fence);
async fn a_fenced_generation_is_refused_at_the_door_and_the_lighthouse_is_not_asked(
    mutant: Option<&'static str>,
) -> Outcome {
    let scene = with_lighthouse(mutant).await;
    let lighthouse = lighthouse_of(&scene).await?;
    let first = open(&scene, 0, &lighthouse).await?;
    ensure(!first.ends_with(&lighthouse[7..]), "ranks are led to the door")?;
    let old = Manager::dial(&first, "r0:a").await;
    old.beat().await.map_err(|status| status.to_string())?;
    kill(scene.spawned(0, 0, 1).await?, libc::SIGKILL);
    let second = url(&scene, 0, 2).await?;

    let over = "replica 0 generation 1 is over: generation 2 is the first let in";
    let nobody = "is not live on this host";
    let other =
        |replica: u32, generation: u64| second.replacen("r0.g2.", &format!("r{replica}.g{generation}."), 1);
    for (manager, words) in [
        (old, over),
        (Manager::dial(&first, "r0:b").await, over),
        (Manager::dial(&other(0, 3), "r0:c").await, nobody),
        (Manager::dial(&other(7, 1), "r7:a").await, nobody),
    ] {
        for status in manager.refused().await? {
            let right = status.code() == Code::FailedPrecondition && status.message().contains(words);
            ensure(right, format!("{status}"))?;
        }
    }
    let live = Manager::dial(&second, "r0:d").await;
    live.beat().await.map_err(|status| status.to_string())?;
    let counters = state(&scene).await["counters"].clone();
    ensure(counters["refusals"]["fenced"].as_u64().unwrap_or(0) == 0, format!("it was asked: {counters}"))
}

scenario!(a_stranger_is_refused_at_the_door, door_no_secret);
async fn a_stranger_is_refused_at_the_door(mutant: Option<&'static str>) -> Outcome {
    let scene = with_lighthouse(mutant).await;
    let lighthouse = lighthouse_of(&scene).await?;
    let url = open(&scene, 0, &lighthouse).await?;
    let host = url.rsplit_once('@').ok_or("no secret in the URL")?.1.to_owned();
    for userinfo in ["", "r0.g1@", "r0.g1.wrong@", "r0.g1.0123456789abcde@", "x:0123456789abcdef@"] {
        let stranger = Manager::dial(&format!("http://{userinfo}{host}"), "r0:a").await;
        for status in stranger.refused().await? {
            ensure(status.code() == Code::Unauthenticated, format!("{userinfo}: {status}"))?;
            ensure(!status.message().contains(TOKEN), "a refusal tells no secret")?;
        }
    }
    ensure(state(&scene).await["replicas"] == serde_json::json!([]), "nobody of them is known")?;
    for page in ["/status.json", "/metrics"] {
        let mut stream = tokio::net::TcpStream::connect(&host).await.expect("a door");
        let request = format!(
            "GET {page} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\nconnection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.expect("written");
        let mut words = Vec::new();
        let _ = tokio::time::timeout(SOON, stream.read_to_end(&mut words)).await.expect("an end");
        ensure(!words.starts_with(b"HTTP/1.1 200"), "pages are the lighthouse's own")?;
    }
    Ok(())
}

scenario!(what_ends_at_the_door_ends_at_the_lighthouse, door_keeps_links);
async fn what_ends_at_the_door_ends_at_the_lighthouse(mutant: Option<&'static str>) -> Outcome {
    let soon = if mutant.is_some() { Duration::from_secs(3) } else { SOON };
    let scene = with_lighthouse(mutant).await;
    let lighthouse = lighthouse_of(&scene).await?;
    let url = open(&scene, 0, &lighthouse).await?;
    let first = Manager::dial(&url, "r0:a").await;

    let asked = first.ask(SOON);
    until_asking(&scene, 1, soon).await?;
    asked.abort();
    until_asking(&scene, 0, soon).await?;
    let late = first.ask(Duration::from_millis(200)).await.expect("a task").expect_err("nobody else asks");
    ensure(matches!(late.code(), Code::DeadlineExceeded | Code::Cancelled), late.to_string())?;
    until_asking(&scene, 0, soon).await?;

    let copy = Manager::dial(&url, "r0:copy").await;
    let status = copy.beat().await.err().ok_or("two copies of one group")?;
    ensure(status.code() == Code::AlreadyExists && status.message().contains("r0:a"), status.to_string())?;
    // Its process is gone, question and all: what is left at the lighthouse is a closed connection.
    let asked = first.ask(SOON);
    until_asking(&scene, 1, soon).await?;
    asked.abort();
    drop((first, asked.await));
    let deadline = Instant::now() + soon;
    while copy.beat().await.is_err() {
        ensure(Instant::now() < deadline, "the first still counts as live")?;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

scenario!(a_question_outlives_the_death_of_the_lighthouse, door_gives_up);
async fn a_question_outlives_the_death_of_the_lighthouse(mutant: Option<&'static str>) -> Outcome {
    let scene = with_lighthouse(mutant).await;
    let lighthouse = lighthouse_of(&scene).await?;
    let zero = Manager::dial(&open(&scene, 0, &lighthouse).await?, "r0:a").await;
    let one = Manager::dial(&open(&scene, 1, &lighthouse).await?, "r1:a").await;
    let asked = zero.ask(SOON);
    until_asking(&scene, 1, SOON).await?;
    let before = pid_of_lighthouse(&scene);
    kill(before.ok_or("no lighthouse")?, libc::SIGKILL);
    eventually("another one is up", SOON, || {
        pid_of_lighthouse(&scene).is_some_and(|pid| Some(pid) != before)
    })
    .await?;
    let other = one.ask(SOON);
    let quorum = answer(asked).await?;
    ensure(quorum.participants.len() == 2 && answer(other).await? == quorum, format!("{quorum:?}"))?;
    one.beat().await.map_err(|status| status.to_string())
}

scenario!(who_is_alone_with_the_answer_of_a_dead_lighthouse_is_cut_loose, ignore_split);
async fn who_is_alone_with_the_answer_of_a_dead_lighthouse_is_cut_loose(
    mutant: Option<&'static str>,
) -> Outcome {
    let soon = if mutant.is_some() { Duration::from_secs(3) } else { SOON };
    let scene = with_lighthouse(mutant).await;
    let lighthouse = lighthouse_of(&scene).await?;
    let zero = Manager::dial(&open(&scene, 0, &lighthouse).await?, "r0:a").await;
    let one = Manager::dial(&open(&scene, 1, &lighthouse).await?, "r1:a").await;
    let (asked, other) = (zero.ask(SOON), one.ask(SOON));
    let quorum = answer(asked).await?;
    answer(other).await?;
    kill(pid_of_lighthouse(&scene).ok_or("no lighthouse")?, libc::SIGKILL);

    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let address = control_of(&scene).unwrap_or_default().parse().expect("an address");
    let supervisor = ControlClient::new(address, Credentials::new(scene.run_id.clone(), TOKEN))
        .with_news(Arc::new(move |quorum_id, reason| drop(tell.send((quorum_id, reason.to_owned())))));
    let standing = tokio::spawn(async move { supervisor.stay_connected().await });
    // The other one was answered, as far as anybody knows, and is in a collective with this one.
    let asked = zero.ask(SOON);
    let heard = tokio::time::timeout(soon, told.recv()).await;
    standing.abort();
    let (floor, reason) = heard.map_err(|_| "nobody hears of it")?.ok_or("no line")?;
    ensure(floor == quorum.quorum_id && reason.contains("r1:a"), format!("{floor}: {reason}"))?;
    let next = one.ask(SOON);
    ensure(answer(next).await?.quorum_id > floor && answer(asked).await?.quorum_id > floor, "a fresh one")
}

scenario!(a_question_waits_for_an_absent_lighthouse_no_longer_than_its_own_deadline);
async fn a_question_waits_for_an_absent_lighthouse_no_longer_than_its_own_deadline(
    mutant: Option<&'static str>,
) -> Outcome {
    let scene = with_lighthouse(mutant).await;
    let manager = Manager::dial(&open(&scene, 0, "http://127.0.0.1:9").await?, "r0:a").await;
    let began = Instant::now();
    let status = manager.beat().await.err().ok_or("nobody is there")?;
    ensure(status.code() == Code::Unavailable && !status.message().contains(TOKEN), status.to_string())?;
    ensure(began.elapsed() < Duration::from_secs(10), "a heartbeat does not wait")?;
    let began = Instant::now();
    let status =
        manager.ask(Duration::from_millis(400)).await.expect("a task").err().ok_or("nobody is there")?;
    let took = began.elapsed();
    let late = matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled | Code::Unavailable);
    ensure(late && !status.message().contains(TOKEN), status.to_string())?;
    ensure(took > Duration::from_millis(290) && took < Duration::from_secs(10), format!("{took:?}"))
}

scenario!(the_way_through_the_door_is_short);
async fn the_way_through_the_door_is_short(mutant: Option<&'static str>) -> Outcome {
    let scene = with_lighthouse(mutant).await;
    let lighthouse = lighthouse_of(&scene).await?;
    let direct = |replica: u32| lighthouse.replacen("http://", &format!("http://r{replica}.g1.{TOKEN}@"), 1);
    let ways = [
        ("direct", direct(2), direct(3)),
        ("through the door", open(&scene, 0, &lighthouse).await?, open(&scene, 1, &lighthouse).await?),
    ];
    let mut took = Vec::new();
    for (way, zero, one) in ways {
        took.push(quick_quorum(way, &zero, &one).await?);
        for replica in [2, 3] {
            let address = control_of(&scene).unwrap_or_default().parse().expect("an address");
            let client = ControlClient::new(address, Credentials::new(scene.run_id.clone(), TOKEN));
            client.evict(replica, 1, SOON).await.map_err(|error| error.to_string())?;
        }
    }
    // Loose enough for a build without optimisation on a machine that builds something else at the same time.
    ensure(took[1] < took[0] * 4 + Duration::from_millis(2), format!("{took:?}"))
}

/// From the questions of two groups to their answers, many times: what nine of ten take longer than.
pub async fn quick_quorum(way: &str, zero: &str, one: &str) -> Result<Duration, String> {
    let managers =
        [Manager::dial(zero, &format!("{way}:0")).await, Manager::dial(one, &format!("{way}:1")).await];
    let (mut beats, mut quorums) = (Vec::new(), Vec::new());
    // What the way itself takes: the median would be that of whatever else this machine does.
    for _ in 0..200 {
        let began = Instant::now();
        managers[0].beat().await.map_err(|status| status.to_string())?;
        beats.push(began.elapsed());
        let began = Instant::now();
        let asked = managers.each_ref().map(|manager| manager.ask(SOON));
        for asked in asked {
            ensure(answer(asked).await?.participants.len() == 2, "a quorum of two")?;
        }
        quorums.push(began.elapsed());
    }
    beats.sort();
    quorums.sort();
    let (beat, quorum) = (beats[beats.len() / 10], quorums[quorums.len() / 10]);
    eprintln!("{way}: a heartbeat {beat:?}, a quorum of two {quorum:?} (tenth parts of {})", quorums.len());
    Ok(quorum)
}
