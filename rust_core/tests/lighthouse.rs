//! The lighthouse over real sockets: gRPC for managers, the framed channel for supervisors, HTTP for readers.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sky_monarch_core::ErrorKind;
use sky_monarch_core::channel::{Channel, Credentials, Limits, connect};
use sky_monarch_core::lighthouse::{Config, ControlClient, Server};
use sky_monarch_core::protocol::{Command, Peer, Report, Slot};
use sky_monarch_core::torchft::lighthouse_service_client::LighthouseServiceClient;
use sky_monarch_core::torchft::{LighthouseHeartbeatRequest, LighthouseQuorumRequest, Quorum, QuorumMember};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;
use tonic::transport::{Channel as Grpc, Endpoint};
use tonic::{Code, Request, Status};

const TOKEN: &str = "s3cret-token";
const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(150);

/// One lighthouse, with a folder and a runtime of its own: all of it ends with the runtime, as with a process.
struct Lighthouse {
    folder: tempfile::TempDir,
    address: SocketAddr,
    runtime: Option<Runtime>,
    settings: Value,
}

impl Lighthouse {
    async fn start(settings: Value) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("private.json"), json!({"token": TOKEN, "envs": {}}).to_string())
            .unwrap();
        let (address, runtime) = Self::serve(folder.path(), &settings, "127.0.0.1:0").await;
        Self { folder, address, runtime: Some(runtime), settings }
    }

    async fn serve(folder: &Path, settings: &Value, listen: &str) -> (SocketAddr, Runtime) {
        let mut config = json!({
            "run_id": "run",
            "private": folder.join("private.json"),
            "listen": listen,
            "control": format!("unix:{}", folder.join("lighthouse.sock").display()),
            "state": folder.join("lighthouse.state"),
            "min_replicas": 2,
            "expect": 3,
            // Most managers here do not beat: however long a test is held up, nobody counts as silent for that.
            "heartbeat_timeout_s": 60,
        });
        config.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        let config = Config::parse(&config.to_string()).unwrap();
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let opening = runtime.spawn(async move { Server::open(&config, &BTreeMap::new()).await });
        let server = opening.await.unwrap().unwrap();
        let address = server.address();
        runtime.spawn(async move { server.serve().await.unwrap() });
        (address, runtime)
    }

    /// The process ends.
    async fn stop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        tokio::task::spawn_blocking(|| runtime.shutdown_timeout(LONG)).await.unwrap();
    }

    /// The process ends and is started again on the same port.
    async fn restart(&mut self) {
        self.stop().await;
        let listen = self.address.to_string();
        self.runtime = Some(Self::serve(self.folder.path(), &self.settings, &listen).await.1);
    }

    async fn manager(&self, replica: u32, generation: u64, id: &str) -> Manager {
        self.dial(&format!("r{replica}.g{generation}.{TOKEN}@"), id).await
    }

    async fn dial(&self, userinfo: &str, id: &str) -> Manager {
        let endpoint = Endpoint::from_shared(format!("http://{userinfo}{}", self.address)).unwrap();
        let client = LighthouseServiceClient::new(endpoint.connect().await.unwrap());
        Manager { client, id: id.into() }
    }

    fn supervisor(&self) -> ControlClient {
        let address =
            format!("unix:{}", self.folder.path().join("lighthouse.sock").display()).parse().unwrap();
        ControlClient::new(address, Credentials::new("run", TOKEN))
    }

    async fn snapshot(&self) -> Value {
        serde_json::from_str(&self.supervisor().state(LONG).await.unwrap()).unwrap()
    }

    async fn get(&self, path: &str, authorization: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{authorization}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.into())
    }

    /// Three groups of generation 1, in a first quorum.
    async fn three(&self) -> (Vec<Manager>, Quorum) {
        let mut managers = Vec::new();
        for replica in 0..3 {
            managers.push(self.manager(replica, 1, &format!("r{replica}:a")).await);
        }
        let mut asked: Vec<_> = managers.iter().map(Manager::ask).collect();
        let first = answered(asked.remove(0)).await.unwrap();
        for other in asked {
            assert_eq!(answered(other).await.unwrap().quorum_id, first.quorum_id);
        }
        assert_eq!(ids(&first), ["r0:a", "r1:a", "r2:a"]);
        (managers, first)
    }
}

impl Drop for Lighthouse {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

#[derive(Clone)]
struct Manager {
    client: LighthouseServiceClient<Grpc>,
    id: String,
}

type Asked = JoinHandle<Result<Quorum, Status>>;

impl Manager {
    fn ask(&self) -> Asked {
        self.ask_within(LONG)
    }

    fn ask_within(&self, deadline: Duration) -> Asked {
        let (mut client, replica_id) = (self.client.clone(), self.id.clone());
        tokio::spawn(async move {
            let requester = QuorumMember { replica_id, step: 5, world_size: 1, ..QuorumMember::default() };
            let mut request = Request::new(LighthouseQuorumRequest { requester: Some(requester) });
            request.set_timeout(deadline);
            Ok(client.quorum(request).await?.into_inner().quorum.unwrap())
        })
    }

    /// Asks, and again where the connection broke, as managers do that are given retries.
    fn ask_persistently(&self) -> Asked {
        let manager = self.clone();
        tokio::spawn(async move {
            let deadline = Instant::now() + LONG;
            loop {
                match manager.ask().await.unwrap() {
                    Err(status) if cut_off(&status) && Instant::now() < deadline => {
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                    answer => return answer,
                }
            }
        })
    }

    async fn heartbeat(&mut self) -> Result<(), Status> {
        let request = LighthouseHeartbeatRequest { replica_id: self.id.clone() };
        self.client.heartbeat(request).await.map(drop)
    }

    /// Heartbeats until dropped.
    fn beat(&self) -> AbortOnDrop {
        let mut manager = self.clone();
        AbortOnDrop(tokio::spawn(async move {
            loop {
                let _ = manager.heartbeat().await;
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }))
    }
}

struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn cut_off(status: &Status) -> bool {
    matches!(status.code(), Code::Unknown | Code::Unavailable | Code::Cancelled | Code::Internal)
}

fn ids(quorum: &Quorum) -> Vec<&str> {
    quorum.participants.iter().map(|member| member.replica_id.as_str()).collect()
}

async fn answered(asked: Asked) -> Result<Quorum, Status> {
    tokio::time::timeout(LONG, asked).await.expect("an answer in time").unwrap()
}

async fn still_waits(asked: &mut Asked) {
    assert!(tokio::time::timeout(SHORT, asked).await.is_err(), "it must wait");
}

async fn eventually(what: &str, mut check: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !check().await {
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quorum_forms_once_the_expected_groups_ask_and_carries_what_they_said() {
    let lighthouse = Lighthouse::start(json!({})).await;
    let mut zero = lighthouse.manager(0, 1, "r0:a").await.ask();
    let mut one = lighthouse.manager(1, 1, "r1:a").await.ask();
    still_waits(&mut zero).await;
    still_waits(&mut one).await;
    let two = answered(lighthouse.manager(2, 1, "r2:a").await.ask()).await.unwrap();
    assert_eq!(answered(zero).await.unwrap(), two);
    assert_eq!(answered(one).await.unwrap(), two);
    assert!(
        two.created.is_some()
            && two.participants.iter().all(|member| member.step == 5 && member.world_size == 1)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_goes_on_without_the_late_after_the_join_timeout() {
    let lighthouse = Lighthouse::start(json!({"join_timeout_s": 0.3})).await;
    let began = Instant::now();
    let zero = lighthouse.manager(0, 1, "r0:a").await.ask();
    let one = answered(lighthouse.manager(1, 1, "r1:a").await.ask()).await.unwrap();
    assert_eq!(answered(zero).await.unwrap(), one);
    assert!(began.elapsed() >= Duration::from_millis(300), "{:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_evict_frees_waiting_survivors_at_once_and_the_replacement_joins() {
    let lighthouse = Lighthouse::start(json!({})).await; // silence alone would free them after a minute
    let (managers, first) = lighthouse.three().await;
    let (mut zero, mut two) = (managers[0].ask(), managers[2].ask());
    still_waits(&mut zero).await;
    still_waits(&mut two).await;

    let supervisor = lighthouse.supervisor();
    assert_eq!(supervisor.evict(1, 1, LONG).await.unwrap(), Some(first.quorum_id));
    let second = answered(zero).await.unwrap();
    assert_eq!(answered(two).await.unwrap(), second);
    assert_eq!(ids(&second), ["r0:a", "r2:a"]);
    assert!(second.quorum_id > first.quorum_id);

    let replacement = lighthouse.manager(1, 2, "r1:b").await.ask();
    eventually("the replacement asks", async || lighthouse.snapshot().await["replicas"][1]["asking"] == true)
        .await;
    let zero = managers[0].ask();
    let third = answered(managers[2].ask()).await.unwrap();
    assert_eq!(answered(zero).await.unwrap(), third);
    assert_eq!(answered(replacement).await.unwrap(), third);
    assert_eq!(ids(&third), ["r0:a", "r1:b", "r2:a"]);
    assert_eq!(
        supervisor.evict(1, 1, LONG).await.unwrap(),
        Some(first.quorum_id),
        "a repeated evict harms nobody"
    );
    assert_eq!(supervisor.evict(7, 1, LONG).await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fenced_generation_is_refused_with_the_reason() {
    let lighthouse = Lighthouse::start(json!({})).await;
    let (mut managers, _) = lighthouse.three().await;
    let pending = managers[1].ask();
    eventually("replica 1 asks", async || lighthouse.snapshot().await["replicas"][1]["asking"] == true).await;
    lighthouse.supervisor().evict(1, 1, LONG).await.unwrap();

    let refused = [
        answered(pending).await.unwrap_err(),
        answered(managers[1].ask()).await.unwrap_err(),
        managers[1].heartbeat().await.unwrap_err(),
        answered(lighthouse.manager(1, 1, "r1:another").await.ask()).await.unwrap_err(),
        answered(lighthouse.manager(1, 0, "r1:older").await.ask()).await.unwrap_err(),
    ];
    for status in refused {
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(
            status.message().contains("replica 1 generation") && status.message().contains("2 is the first"),
            "{status}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_live_copy_is_refused_until_the_first_is_gone() {
    let lighthouse = Lighthouse::start(json!({})).await;
    let (mut managers, first) = lighthouse.three().await;
    let mut copy = lighthouse.manager(1, 1, "r1:copy").await;
    for status in [copy.heartbeat().await.unwrap_err(), answered(copy.ask()).await.unwrap_err()] {
        assert_eq!(status.code(), Code::AlreadyExists);
        assert!(status.message().contains("r1:a"), "{status}");
    }
    let again: Vec<_> = managers.iter().map(Manager::ask).collect();
    for asked in again {
        let quorum = answered(asked).await.unwrap();
        assert_eq!((quorum.quorum_id, quorum.participants), (first.quorum_id, first.participants.clone()));
    }

    drop(managers.remove(1)); // its connection closes: the process is gone
    eventually("the copy is let in", async || copy.heartbeat().await.is_ok()).await;
    let asked = copy.ask();
    eventually("the copy asks", async || lighthouse.snapshot().await["replicas"][1]["asking"] == true).await;
    let _others = [managers[0].ask(), managers[1].ask()];
    assert_eq!(ids(&answered(asked).await.unwrap()), ["r0:a", "r1:copy", "r2:a"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_or_runs_out_of_time_is_waited_with_no_more() {
    let lighthouse = Lighthouse::start(json!({})).await;
    let gone = lighthouse.manager(0, 1, "r0:a").await;
    let asked = gone.ask();
    eventually("it asks", async || lighthouse.snapshot().await["replicas"][0]["asking"] == true).await;
    asked.abort();
    drop(gone);
    eventually("its ask is dropped", async || lighthouse.snapshot().await["replicas"][0]["asking"] == false)
        .await;

    let late = lighthouse.manager(1, 1, "r1:a").await.ask_within(SHORT);
    assert!(matches!(answered(late).await.unwrap_err().code(), Code::DeadlineExceeded | Code::Cancelled));
    eventually("both are withdrawn", async || lighthouse.snapshot().await["counters"]["withdrawn"] == 2)
        .await;

    // neither of the two is in the quorum that the next three form
    let mut all: Vec<_> = Vec::new();
    for replica in 2..5 {
        all.push(lighthouse.manager(replica, 1, &format!("r{replica}:a")).await.ask());
    }
    assert_eq!(ids(&answered(all.remove(0)).await.unwrap()), ["r2:a", "r3:a", "r4:a"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fewer_than_min_replicas_never_form_a_quorum() {
    let lighthouse = Lighthouse::start(json!({"join_timeout_s": 2.0})).await;
    let (managers, _) = lighthouse.three().await;
    let supervisor = lighthouse.supervisor();
    supervisor.evict(1, 1, LONG).await.unwrap();
    supervisor.evict(2, 1, LONG).await.unwrap();
    let mut alone = managers[0].ask();
    // Longer than for who may still come.
    let waits = tokio::time::timeout(Duration::from_millis(2500), &mut alone).await;
    assert!(waits.is_err(), "it must wait");
    let shown = lighthouse.snapshot().await;
    assert_eq!(shown["waiting_for"], "1 asked, min_replicas is 2");
    let back = answered(lighthouse.manager(1, 2, "r1:b").await.ask()).await.unwrap();
    assert_eq!(answered(alone).await.unwrap(), back);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_member_is_dropped_and_never_listed_again() {
    let lighthouse = Lighthouse::start(json!({"heartbeat_timeout_s": 2.0})).await;
    let began = Instant::now();
    let (managers, _) = lighthouse.three().await;
    let _beats = [managers[0].beat(), managers[2].beat()];
    let two = managers[2].ask();
    let quorum = answered(managers[0].ask()).await.unwrap();
    assert!(began.elapsed() >= Duration::from_secs(2), "a live connection is no reason to be dropped sooner");
    assert_eq!(ids(&quorum), ["r0:a", "r2:a"]);
    assert_eq!(answered(two).await.unwrap(), quorum);
    let shown = lighthouse.snapshot().await;
    assert!(shown["replicas"].as_array().unwrap().iter().all(|replica| replica["id"] != "r1:a"), "{shown}");
    let reason = shown["history"][1]["reason"].as_str().unwrap();
    let silent_s = reason.split_once("silent ").and_then(|(_, rest)| rest.split_once(" s: r1:a"));
    let silent_s: f64 = silent_s.unwrap_or_else(|| panic!("{shown}")).0.parse().unwrap();
    assert!((2.0..LONG.as_secs_f64()).contains(&silent_s), "{shown}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_on_the_same_port_keeps_fences_and_never_reuses_an_id() {
    let mut lighthouse = Lighthouse::start(json!({})).await;
    let (managers, first) = lighthouse.three().await;
    lighthouse.supervisor().evict(1, 1, LONG).await.unwrap();
    let waiting = managers[0].ask();
    eventually("it asks", async || lighthouse.snapshot().await["replicas"][0]["asking"] == true).await;
    lighthouse.restart().await;
    assert!(cut_off(&answered(waiting).await.unwrap_err()));

    assert_eq!(answered(managers[1].ask_persistently()).await.unwrap_err().code(), Code::FailedPrecondition);
    let mut zero = managers[0].ask_persistently();
    still_waits(&mut zero).await; // replica 2 may still live: it was a member
    let second = answered(managers[2].ask_persistently()).await.unwrap();
    assert_eq!(answered(zero).await.unwrap(), second);
    assert_eq!(ids(&second), ["r0:a", "r2:a"]);
    assert!(second.quorum_id > first.quorum_id);

    lighthouse.restart().await;
    let zero = managers[0].ask_persistently();
    let third = answered(managers[2].ask_persistently()).await.unwrap();
    assert_eq!(answered(zero).await.unwrap(), third);
    assert!(third.quorum_id > second.quorum_id, "the same members, yet not the same id");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_lacks_the_secret_is_refused_and_cannot_take_part() {
    let lighthouse = Lighthouse::start(json!({"min_replicas": 1, "expect": 1})).await;
    for userinfo in ["", "r1.g1@", "r1.g1.wrong@", "r1.g1.s3cret-toke@", "s3cret-token@", "x:s3cret-token@"] {
        let mut stranger = lighthouse.dial(userinfo, "r1:a").await;
        for status in [stranger.heartbeat().await.unwrap_err(), answered(stranger.ask()).await.unwrap_err()] {
            assert_eq!(status.code(), Code::Unauthenticated, "{userinfo}");
            assert!(!status.message().contains(TOKEN) && !status.message().contains("wrong"));
        }
    }
    assert_eq!(lighthouse.snapshot().await["replicas"], json!([]));
    answered(lighthouse.manager(1, 1, "r1:a").await.ask()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plain_managers_without_identity_are_served_where_no_token_is_set() {
    let lighthouse = Lighthouse::start(json!({"private": null, "control": null, "expect": 2})).await;
    let zero = lighthouse.dial("", "train_0:uuid").await.ask();
    let one = answered(lighthouse.dial("", "train_1:uuid").await.ask()).await.unwrap();
    assert_eq!(ids(&one), ["train_0:uuid", "train_1:uuid"]);
    assert_eq!(answered(zero).await.unwrap(), one);
    assert_eq!(lighthouse.get("/status.json", "").await.0, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_and_metrics_show_steps_and_reasons_to_who_has_the_token() {
    let lighthouse = Lighthouse::start(json!({})).await;
    let (_managers, first) = lighthouse.three().await;
    for path in ["/status.json", "/metrics"] {
        for authorization in [
            "",
            "authorization: Bearer\r\n",
            "authorization: Bearer wrong\r\n",
            "authorization: Basic s3cret-token\r\n",
        ] {
            assert_eq!(lighthouse.get(path, authorization).await.0, 401, "{path} {authorization}");
        }
    }
    let bearer = format!("authorization: Bearer {TOKEN}\r\n");
    let (code, body) = lighthouse.get("/status.json", &bearer).await;
    let shown: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((code, &shown["run_id"]), (200, &json!("run")));
    let shown = &shown["lighthouse"];
    assert_eq!(shown["quorum_id"], first.quorum_id);
    assert_eq!(shown["history"][0]["reason"], "all 3 expected replicas asked");
    assert_eq!(shown["replicas"][2]["step"], 5);
    assert_eq!(
        (&shown["replicas"][2]["replica"], &shown["replicas"][2]["generation"]),
        (&json!(2), &json!(1))
    );
    let (code, text) = lighthouse.get("/metrics", &bearer).await;
    assert_eq!(code, 200);
    for line in [
        "sky_monarch_lighthouse_participants 3",
        "sky_monarch_lighthouse_step{id=\"r1:a\",replica=\"1\",generation=\"1\"} 5",
        "sky_monarch_lighthouse_quorums_total{reason=\"started\"} 1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    assert_eq!(
        lighthouse.get("/replica/r1:a/kill", &bearer).await.0,
        401,
        "TorchFT's page that ends a trainer: nothing here, and no answer that looks like a success"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_control_channel_is_for_supervisors_of_this_run() {
    let lighthouse = Lighthouse::start(json!({})).await;
    let address =
        format!("unix:{}", lighthouse.folder.path().join("lighthouse.sock").display()).parse().unwrap();
    let stranger = ControlClient::new(address, Credentials::new("run", "wrong"));
    assert_eq!(stranger.evict(0, 1, LONG).await.unwrap_err().kind(), ErrorKind::Refused);

    let address =
        format!("unix:{}", lighthouse.folder.path().join("lighthouse.sock").display()).parse().unwrap();
    let peer = Peer::Session { slot: Slot { replica: 0, rank: 0 }, generation: 1, pid: 1, target_step: None };
    let credentials = Credentials::new("run", TOKEN);
    let dialled: Result<Channel<Command, Report>, _> =
        connect(&address, peer, &credentials, &Limits::default(), LONG).await;
    assert_eq!(dialled.unwrap_err().kind(), ErrorKind::Refused);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_evict_outlasts_a_restart_of_the_lighthouse_and_gives_up_at_its_deadline() {
    let mut lighthouse = Lighthouse::start(json!({})).await;
    let (_managers, first) = lighthouse.three().await;
    let supervisor = lighthouse.supervisor();
    supervisor.state(LONG).await.unwrap();
    lighthouse.stop().await;
    let error = supervisor.evict(1, 1, SHORT).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);

    let evicting = tokio::spawn(async move { supervisor.evict(1, 1, LONG).await });
    tokio::time::sleep(SHORT).await;
    lighthouse.restart().await;
    assert_eq!(evicting.await.unwrap().unwrap(), Some(first.quorum_id));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_would_be_open_to_others_is_refused_before_anything_is_bound() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    for settings in [
        json!({"listen": "0.0.0.0:0"}),
        json!({"control": "unix:/tmp/x.sock"}),
        json!({"control": "tls:127.0.0.1:0"}),
        json!({"private": folder.path().join("none.json")}),
    ] {
        let mut config = json!({"run_id": "run", "min_replicas": 1, "state": state});
        config.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        let config = Config::parse(&config.to_string()).unwrap();
        let error =
            Server::open(&config, &BTreeMap::new()).await.err().unwrap_or_else(|| panic!("{settings}"));
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    }
}
