//! Standbys, the store's helper and the head's services.

use std::io::Read;
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use sky_monarch_core::agent::clock::mono_ns;
use sky_monarch_core::protocol::{Event, GroupPlan, RankCommand};

use crate::scenario;
use crate::scene::*;

/// The helper's side of its contract: answers each connection with the id of its store.
const STORE: &str = r#"
import array, socket, threading
control = socket.socket(fileno=3)
while True:
    data, fds, _, _ = socket.recv_fds(control, 4096, 1)
    if not data:
        break
    word, name = data.decode().split()
    if word == "open":
        listener = socket.socket(fileno=fds[0])
        listener.setblocking(True)
        def serve(listener=listener, name=name):
            while True:
                peer, _ = listener.accept()
                peer.sendall(b"store " + name.encode())
                peer.close()
        threading.Thread(target=serve, daemon=True).start()
        control.send(f"ready {name}\n".encode())
"#;

fn python_tree(folder: &Path) {
    for (name, text) in [
        ("helper/sky_monarch/__init__.py", ""),
        ("helper/sky_monarch/training/__init__.py", ""),
        ("helper/sky_monarch/training/store.py", STORE),
        ("slow_module.py", "import time; time.sleep(1.0); done_ns = time.monotonic_ns()"),
        (
            "train.py",
            "import os, time, slow_module\nopen('up-' + os.environ['SKY_MONARCH_GENERATION'], 'w').write(\
             os.environ['RANK'] + ' ' + os.environ['MASTER_PORT'] + ' ' + str(slow_module.done_ns))\ntime.sleep(1000)",
        ),
    ] {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(path, text).expect("a file");
    }
}

fn python(scene: &Scene) -> GroupPlan {
    python_tree(scene.folder.path());
    let mut plan = shell(0, "");
    plan.workdir = scene.folder.path().to_string_lossy().into_owned();
    // The worker is the real one. The store's is not: it would need torch.
    let package = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    plan.envs.insert("PYTHONPATH".into(), format!("{}:{package}", plan.workdir));
    plan.command = RankCommand::Exec { argv: ["python3", "train.py"].map(str::to_owned).to_vec() };
    plan
}

scenario!(a_standby_takes_over_with_its_imports_done, drop_restart);
async fn a_standby_takes_over_with_its_imports_done(mutant: Option<&'static str>) -> Outcome {
    let scene = Scene::new(mutant).await;
    let mut plan = python(&scene);
    plan.recovery.standby = 1;
    plan.preload = vec!["slow_module".into()];
    scene.send(start(plan)).await;
    let first = scene.spawned(0, 0, 1).await?;
    let standby = scene
        .event(
            "a standby is ready",
            |e| if let Event::StandbyReady { pid, .. } = e { Some(*pid) } else { None },
        )
        .await?;
    eventually("the rank is up", SOON, || scene.path("up-1").exists()).await?;
    let killed_ns = mono_ns();
    kill(first, libc::SIGKILL);
    let soon = if mutant.is_some() { Duration::from_secs(4) } else { SOON };
    // The file is there before its text is.
    let told = || -> Option<(String, u16, u64)> {
        let text = std::fs::read_to_string(scene.path("up-2")).ok()?;
        let mut words = text.split(' ');
        Some((words.next()?.to_owned(), words.next()?.parse().ok()?, words.next()?.parse().ok()?))
    };
    eventually("the next one is up", soon, || told().is_some()).await?;
    let warm = scene
        .event("a rank that was a standby", |e| match e {
            Event::RankSpawned { generation: 2, warm, pid, .. } => Some(*warm && *pid == standby),
            _ => None,
        })
        .await?;
    ensure(warm, "the next rank is no standby, or not the one that was ready")?;
    let (rank, port, imported_ns) = told().expect("it has told");
    ensure(rank == "0" && port != 0, format!("final values arrived: {rank} {port}"))?;
    ensure(
        imported_ns < killed_ns,
        format!("the second that its imports take ended at {imported_ns}, after the death at {killed_ns}"),
    )?;
    let next = |e: &Event| {
        if let Event::StandbyReady { pid, .. } = e { (*pid != standby).then_some(*pid) } else { None }
    };
    let next = scene.event("the slot has a new standby", next).await?;
    scene.send(stop(0)).await;
    scene.event("it is stopped", |e| matches!(e, Event::GroupStopped { .. }).then_some(())).await?;
    // What it was forked from stays, as long as the agent does: another group may need it.
    eventually("the standby is gone too", SOON, || {
        let left = marked(&scene.run_id);
        left.len() == 1 && !left.contains(&next)
    })
    .await
}

scenario!(standbys_that_cannot_live_are_not_tried_for_ever);
async fn standbys_that_cannot_live_are_not_tried_for_ever(mutant: Option<&'static str>) -> Outcome {
    let scene = Scene::new(mutant).await;
    let mut plan = python(&scene);
    // An interpreter that knows nothing of this product.
    plan.recovery.standby = 1;
    plan.envs.insert("PYTHONPATH".into(), "/nowhere".into());
    scene.send(start(plan)).await;
    scene
        .event("the reason is told", |e| match e {
            Event::Notice { message, .. } => message.contains("sky_monarch").then_some(()),
            _ => None,
        })
        .await?;
    let pid = scene.spawned(0, 0, 1).await?;
    kill(pid, libc::SIGKILL);
    scene.spawned(0, 0, 2).await.map(drop)
}

scenario!(the_first_connection_to_the_master_port_starts_the_store);
async fn the_first_connection_to_the_master_port_starts_the_store(mutant: Option<&'static str>) -> Outcome {
    let scene = Scene::new(mutant).await;
    let mut plan = python(&scene);
    plan.envs.insert("PYTHONPATH".into(), format!("{0}:{0}/helper", plan.workdir));
    scene.send(start(plan)).await;
    let first = scene.spawned(0, 0, 1).await?;
    // The file is there before its text is.
    let told = |name: &str| -> Option<u16> {
        std::fs::read_to_string(scene.path(name)).ok()?.split(' ').nth(1)?.parse().ok()
    };
    eventually("the rank is up", SOON, || told("up-1").is_some()).await?;
    ensure(!scene.path("logs/store").exists(), "no helper before somebody asks")?;
    let port = |name: &str| told(name).expect("a port");
    let ask = |port: u16| {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).map_err(|e| e.to_string())?;
        stream.set_read_timeout(Some(SOON)).map_err(|e| e.to_string())?;
        let mut text = String::new();
        stream.read_to_string(&mut text).map_err(|e| e.to_string())?;
        Ok::<_, String>(text)
    };
    let old = port("up-1");
    ensure(ask(old)? == "store 1" && ask(old)? == "store 1", "the helper serves the socket itself")?;
    kill(first, libc::SIGKILL);
    eventually("the next one is up", SOON, || told("up-2").is_some()).await?;
    ensure(ask(port("up-2"))? == "store 2", "each generation has its own")
}

scenario!(services_are_kept_alive_on_an_open_socket);
async fn services_are_kept_alive_on_an_open_socket(mutant: Option<&'static str>) -> Outcome {
    let script = r#"
import os, socket
s = socket.socket(fileno=int(os.environ["SKY_MONARCH_LISTEN_FD"]))
while True:
    peer, _ = s.accept()
    peer.sendall(str(os.getpid()).encode() + b" " + os.environ["SKY_MONARCH_DEMO_ADDR"].encode())
    peer.close()
"#;
    let mut scene = Scene::with(mutant, |config| {
        let dir = config["run_dir"].as_str().unwrap_or_default().to_owned();
        config["services"] = serde_json::json!([
            {"name": "demo", "argv": ["python3", "-c", script], "env": {}, "log": format!("{dir}/demo.log"),
             "pid_file": format!("{dir}/demo.pid"), "listen": "127.0.0.1:0", "listen_env": "fd"},
            {"name": "other", "argv": ["bash", "-c", "echo $SKY_MONARCH_DEMO_ADDR > addr.new; mv addr.new addr; sleep 1000"],
             "env": {}, "log": format!("{dir}/other.log"), "pid_file": format!("{dir}/other.pid")},
        ]);
        for service in config["services"].as_array_mut().expect("a list") {
            let script = service["argv"][2].as_str().unwrap_or_default().to_owned();
            service["argv"][2] = script.replace(" addr", &format!(" {dir}/addr")).into();
        }
    })
    .await;
    eventually("the address is told to all", SOON, || scene.path("addr").exists()).await?;
    let address = std::fs::read_to_string(scene.path("addr")).expect("a file").trim().to_owned();
    let ask = || {
        let mut text = String::new();
        let mut stream = TcpStream::connect(&address).map_err(|e| format!("refused: {e}"))?;
        stream.set_read_timeout(Some(SOON)).map_err(|e| e.to_string())?;
        stream.read_to_string(&mut text).map_err(|e| e.to_string())?;
        let (pid, told) = text.split_once(' ').ok_or("no answer")?;
        ensure(told == address, told)?;
        pid.parse::<u32>().map_err(|e| e.to_string())
    };
    let first = ask()?;
    for _ in 0..3 {
        let before = ask()?;
        kill(before, libc::SIGKILL);
        eventually("it is dead", SOON, || !alive(before)).await?;
        // No refused connect while it is down: the socket is the agent's.
        ensure(ask()? != before, "a new process answers")?;
    }
    let last = ask()?;
    // It serves before the agent has written who it is.
    let named = || -> Option<(u64, u64)> {
        let file = std::fs::read(scene.path("demo.pid")).ok()?;
        let file: serde_json::Value = serde_json::from_slice(&file).ok()?;
        Some((file["pid"].as_u64()?, file["start_ticks"].as_u64()?))
    };
    eventually("it is named", SOON, || {
        named().is_some_and(|(pid, since)| pid == u64::from(last) && since > 0)
    })
    .await?;
    ensure(last != first, "the last one is another one")?;
    scene.send(sky_monarch_core::protocol::Command::Shutdown { grace_s: 1.0, reason: "down".into() }).await;
    scene.agent_exit().await?;
    ensure(marked(&scene.run_id).is_empty(), "no service is left")
}

/// Says in a file who serves, and answers each connection with its pid. A spare waits for its word first.
const SPARED: &str = r#"
import os, socket, sys
if os.environ.get("SKY_MONARCH_SPARE"):
    open(os.environ["DIR"] + f"/spare-{os.getpid()}", "w").close()
    if not sys.stdin.buffer.read(1):
        sys.exit(0)
s = socket.socket(fileno=int(os.environ["SKY_MONARCH_LISTEN_FD"]))
while True:
    peer, _ = s.accept()
    peer.sendall(str(os.getpid()).encode())
    peer.close()
"#;

scenario!(a_service_that_dies_goes_on_as_its_spare, promote_no_spare);
async fn a_service_that_dies_goes_on_as_its_spare(mutant: Option<&'static str>) -> Outcome {
    // Nobody else takes a port there meanwhile.
    let port = std::net::TcpListener::bind("127.200.77.4:0").and_then(|free| free.local_addr());
    let port = port.expect("a port");
    let mut scene = Scene::with(mutant, |config| {
        let dir = config["run_dir"].as_str().unwrap_or_default().to_owned();
        config["services"] = serde_json::json!([
            {"name": "demo", "argv": ["python3", "-c", SPARED], "env": {"DIR": dir}, "log": format!("{dir}/demo.log"),
             "pid_file": format!("{dir}/demo.pid"), "listen": port.to_string(), "spare": true},
        ]);
    })
    .await;
    let spares = |but: &[u32]| {
        let names = std::fs::read_dir(scene.folder.path()).expect("a folder").flatten();
        let pids =
            names.filter_map(|name| name.file_name().to_str()?.strip_prefix("spare-")?.parse::<u32>().ok());
        pids.filter(|pid| alive(*pid) && !but.contains(pid)).collect::<Vec<_>>()
    };
    let ask = || {
        let mut text = String::new();
        let mut stream = TcpStream::connect(port).map_err(|e| format!("refused: {e}"))?;
        stream.set_read_timeout(Some(SOON)).map_err(|e| e.to_string())?;
        stream.read_to_string(&mut text).map_err(|e| e.to_string())?;
        text.parse::<u32>().map_err(|e| e.to_string())
    };
    eventually("the service is up", SOON, || ask().is_ok()).await?;
    let mut serving = ask()?;
    for _ in 0..2 {
        eventually("there is a spare", SOON, || spares(&[serving]).len() == 1).await?;
        let spare = spares(&[serving])[0];
        kill(serving, libc::SIGKILL);
        eventually("the dead one is gone", SOON, || !alive(serving)).await?;
        ensure(ask()? == spare, "the spare goes on in its place")?;
        // It serves before the agent has written who it is.
        let named = || std::fs::read_to_string(scene.path("demo.pid")).unwrap_or_default();
        eventually("it is named", SOON, || named().contains(&format!("\"pid\":{spare},"))).await?;
        serving = spare;
    }
    // A spare that dies before it is needed is replaced, and costs the service nothing.
    eventually("there is another one", SOON, || spares(&[serving]).len() == 1).await?;
    let idle = spares(&[serving])[0];
    kill(idle, libc::SIGKILL);
    eventually("and another", SOON, || spares(&[serving, idle]).len() == 1).await?;
    ensure(ask()? == serving, "the service was not touched")?;
    // One that is stopped could not serve, and is passed over.
    let stopped = spares(&[serving, idle])[0];
    kill(stopped, libc::SIGSTOP);
    eventually("it is stopped", SOON, || {
        std::fs::read_to_string(format!("/proc/{stopped}/stat")).unwrap_or_default().contains(") T ")
    })
    .await?;
    kill(serving, libc::SIGKILL);
    eventually("the dead one is gone", SOON, || !alive(serving)).await?;
    ensure(ask()? != stopped, "somebody serves who can")?;
    eventually("the stopped one is ended", SOON, || !alive(stopped)).await?;
    scene.send(sky_monarch_core::protocol::Command::Shutdown { grace_s: 1.0, reason: "down".into() }).await;
    scene.agent_exit().await?;
    ensure(marked(&scene.run_id).is_empty(), "neither service nor spare is left")
}
