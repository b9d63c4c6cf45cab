//! The environment of a rank. Pure: the same plan, place and generation give the same variables.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use super::config::Token;
use super::evidence::Files;
use super::tree::{RUN_ID, SPAWN_ID};
use crate::protocol::{GroupPlan, RankCommand};

/// Every variable that hides devices. A rank gets one of them at the most: ROCm filters by `ROCR_` first and by
/// `HIP_` inside of what is left, so two of them name different devices. What its host hides stays hidden: Slurm says
/// in `ROCR_` which devices of a node a job may use.
const MASKS: [&str; 4] = [ROCR, "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"];
const ROCR: &str = "ROCR_VISIBLE_DEVICES";

/// What is the same for all ranks of an agent.
#[derive(Clone, Debug)]
pub struct RunEnv {
    /// The run.
    pub run_id: String,
    /// Its secret.
    pub token: Token,
    /// Address that sessions dial: `unix:<path>`.
    pub agent: String,
    /// Where ranks of other hosts reach those of this one.
    pub address: IpAddr,
    /// Where ranks say which other host's rank they are about to dial: `unix:<path>`; none without a tunnel.
    pub tunnel: Option<String>,
    /// Run folder.
    pub run_dir: PathBuf,
}

/// What is special about one process.
#[derive(Clone, Debug)]
pub struct Place<'a> {
    /// Rank inside the group.
    pub rank: u32,
    /// Generation; 0 for a standby.
    pub generation: u64,
    /// Port of the group's own store.
    pub master_port: u16,
    /// Marks the tree of the process.
    pub spawn_id: &'a str,
}

/// What all ranks of a job have in common, with the mark of one process. Nothing in it says which rank it is.
pub fn shared_env(run: &RunEnv, plan: &GroupPlan, spawn_id: &str) -> BTreeMap<String, String> {
    let mut env = plan.envs.clone();
    let kind = if plan.lighthouse_control.is_some() { "sky-monarch" } else { "torchft" };
    env.entry("OMP_NUM_THREADS".into()).or_insert_with(|| "1".into());
    // TorchFT logs the address of the lighthouse, secret and all, at `info`.
    env.entry("RUST_LOG".into()).or_insert_with(|| "error".into());
    env.entry("SKY_MONARCH_LIGHTHOUSE_KIND".into()).or_insert_with(|| kind.into());
    env.entry("SKY_MONARCH_MIN_REPLICAS".into()).or_insert_with(|| "1".into());
    env.insert(RUN_ID.into(), run.run_id.clone());
    env.insert(SPAWN_ID.into(), spawn_id.into());
    env.insert("PYTHONUNBUFFERED".into(), "1".into());
    if plan.device_env.is_some() && !plan.devices.is_empty() {
        for mask in MASKS {
            env.remove(mask);
        }
    }
    env
}

/// The whole environment of one rank.
pub fn rank_env(run: &RunEnv, plan: &GroupPlan, place: &Place<'_>) -> BTreeMap<String, String> {
    let Place { rank, generation, master_port, spawn_id } = *place;
    let mut env = shared_env(run, plan, spawn_id);
    let local_rank = plan.local_rank(rank);
    let (node, nodes, ranks) =
        plan.span.as_ref().map_or((0, 1, plan.world_size), |span| (span.node, span.nodes, span.ranks));
    let world_size = ranks.to_string();
    let rank_text = rank.to_string();
    // Part of the names in the group's store: where a host is new to the group, it must say the same as the others.
    let first = if plan.span.is_some() { 1 } else { plan.generation.max(1) };
    let restarts = generation.saturating_sub(first);
    let (master, master_port) = master(run, plan, master_port);
    let files = Files::new(&run.run_dir, plan.replica, rank, generation);
    let ours = [
        ("RANK", rank_text.clone()),
        ("LOCAL_RANK", local_rank.to_string()),
        ("WORLD_SIZE", world_size.clone()),
        ("LOCAL_WORLD_SIZE", plan.world_size.to_string()),
        ("GROUP_RANK", node.to_string()),
        ("GROUP_WORLD_SIZE", nodes.to_string()),
        ("ROLE_RANK", rank_text.clone()),
        ("ROLE_WORLD_SIZE", world_size),
        ("ROLE_NAME", "default".into()),
        ("MASTER_ADDR", master),
        ("MASTER_PORT", master_port),
        ("TORCHELASTIC_RUN_ID", run.run_id.clone()),
        ("TORCHELASTIC_RESTART_COUNT", restarts.to_string()),
        ("TORCHELASTIC_MAX_RESTARTS", plan.recovery.max_restarts.to_string()),
        ("TORCHELASTIC_USE_AGENT_STORE", "True".into()),
        ("TORCHELASTIC_ERROR_FILE", files.error.to_string_lossy().into_owned()),
        ("REPLICA_GROUP_ID", plan.replica.to_string()),
        ("NUM_REPLICA_GROUPS", plan.replicas.to_string()),
        ("SKY_MONARCH_AGENT", run.agent.clone()),
        ("SKY_MONARCH_ADDRESS", run.address.to_string()),
        ("SKY_MONARCH_TOKEN", run.token.reveal().into()),
        ("SKY_MONARCH_REPLICA", plan.replica.to_string()),
        ("SKY_MONARCH_RANK", rank_text),
        ("SKY_MONARCH_GENERATION", generation.to_string()),
        ("SKY_MONARCH_REPLICAS", plan.replicas.to_string()),
        ("SKY_MONARCH_STACKS", files.stacks.to_string_lossy().into_owned()),
    ];
    env.extend(ours.map(|(name, value)| (name.to_owned(), value)));
    if let Some(tunnel) = &run.tunnel {
        env.insert("SKY_MONARCH_TUNNEL".into(), tunnel.clone());
    }
    if !plan.lighthouse.is_empty() {
        env.insert("TORCHFT_LIGHTHOUSE".into(), lighthouse_url(run, plan, generation));
    }
    if let (Some(devices), Some(mask)) = (plan.devices.get(local_rank as usize), &plan.device_env) {
        let (name, value) = device_mask(&plan.envs, devices, mask);
        env.insert(name, value);
    }
    env
}

/// The mask of a rank that has the `devices` of those that `inherited` leaves to its host, counted from 0.
fn device_mask(inherited: &BTreeMap<String, String>, devices: &[u32], ours: &str) -> (String, String) {
    let list = |name: &str| {
        let entries = inherited.get(name)?.split(',').map(|one| one.trim().to_owned());
        Some(entries.filter(|one| !one.is_empty()).collect::<Vec<_>>())
    };
    let outer = list(ROCR);
    let name = if outer.is_some() { ROCR } else { ours };
    let of = |all: &[String], index: &str| index.parse::<usize>().ok().and_then(|at| all.get(at).cloned());
    let inner = MASKS[1..].iter().find_map(|name| list(name));
    let left = match (outer, inner) {
        (Some(outer), Some(inner)) => Some(inner.iter().filter_map(|index| of(&outer, index)).collect()),
        (outer, inner) => outer.or(inner),
    };
    let chosen = devices.iter().filter_map(|device| match &left {
        Some(left) => left.get(*device as usize).cloned(),
        None => Some(device.to_string()),
    });
    (name.to_owned(), chosen.collect::<Vec<_>>().join(","))
}

/// Where the group's store is.
fn master(run: &RunEnv, plan: &GroupPlan, own_port: u16) -> (String, String) {
    let Some(span) = &plan.span else { return ("127.0.0.1".into(), own_port.to_string()) };
    match span.store.as_deref().and_then(|store| store.rsplit_once(':')) {
        Some((host, port)) => (host.trim_matches(['[', ']']).into(), port.into()),
        None => (run.address.to_string(), own_port.to_string()),
    }
}

/// TorchFT's clients pass the user part of the URL on: it says who asks, and proves it.
fn lighthouse_url(run: &RunEnv, plan: &GroupPlan, generation: u64) -> String {
    if plan.lighthouse_control.is_none() {
        return plan.lighthouse.clone();
    }
    match plan.lighthouse.split_once("://") {
        Some((scheme, host)) => {
            format!("{scheme}://r{}.g{generation}.{}@{host}", plan.replica, run.token.reveal())
        }
        None => plan.lighthouse.clone(),
    }
}

/// Hides the secret of the run in text for people: TorchFT prints the URL that holds it.
pub fn redact(text: &str, token: &Token) -> String {
    text.replace(token.reveal(), "…")
}

/// The words of a command of the form `<python> [options] x.py …` or `<python> [options] -m mod …`.
pub fn python_command(command: &RankCommand) -> Option<&[String]> {
    let RankCommand::Exec { argv } = command else { return None };
    let version = argv.first()?.rsplit('/').next()?.strip_prefix("python")?;
    if !version.chars().all(|c| c.is_ascii_digit() || c == '.') {
        return None;
    }
    let mut words = argv[1..].iter().map(String::as_str);
    loop {
        match words.next()? {
            "-W" | "-X" | "--check-hash-based-pycs" => drop(words.next()?),
            "-m" => return words.next().is_some_and(|module| !module.is_empty()).then_some(argv.as_slice()),
            // A script from standard input or the command line, and what never gets to a script.
            "-" | "-i" | "-h" | "-V" | "--help" | "--version" => return None,
            word if word.starts_with("-c") || word.ends_with(".pyc") => return None,
            word if word.starts_with('-') => {}
            script => return (!script.is_empty()).then_some(argv.as_slice()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::protocol::{ProgressLimit, Recovery, Span, StandbyStart, StandbyUntil};

    fn run() -> RunEnv {
        let token = serde_json::from_str("\"s3cret\"").expect("a token is a string");
        RunEnv {
            run_id: "demo-1".into(),
            token,
            agent: "unix:/run/agent.sock".into(),
            address: Ipv4Addr::LOCALHOST.into(),
            tunnel: None,
            run_dir: "/runs/demo-1".into(),
        }
    }

    fn plan() -> GroupPlan {
        GroupPlan {
            replica: 1,
            replicas: 4,
            world_size: 2,
            span: None,
            generation: 1,
            command: RankCommand::Exec { argv: vec!["python".into(), "train.py".into()] },
            workdir: "/".into(),
            envs: BTreeMap::new(),
            devices: Vec::new(),
            device_env: None,
            lighthouse: "http://127.0.0.1:29510".into(),
            lighthouse_control: None,
            recovery: Recovery {
                max_restarts: 3,
                window_s: 100.0,
                spent_s: Vec::new(),
                backoff_s: 1.0,
                backoff_max_s: 5.0,
                startup_limit_s: None,
                progress_limit_s: ProgressLimit::Off,
                grace_s: 1.0,
                standby: 0,
                standby_until: StandbyUntil::Imports,
                standby_start: StandbyStart::Fork,
            },
            preload: Vec::new(),
            injections: Vec::new(),
            log_segment_bytes: 1 << 20,
            log_segments: 4,
        }
    }

    fn env(plan: &GroupPlan) -> BTreeMap<String, String> {
        rank_env(&run(), plan, &Place { rank: 1, generation: 3, master_port: 4242, spawn_id: "a-1" })
    }

    #[test]
    fn a_rank_gets_what_torch_elastic_torchft_and_sessions_ask_for() {
        let env = env(&plan());
        for (name, value) in [
            ("RANK", "1"),
            ("LOCAL_RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("GROUP_RANK", "0"),
            ("GROUP_WORLD_SIZE", "1"),
            ("ROLE_NAME", "default"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "4242"),
            ("TORCHELASTIC_RESTART_COUNT", "2"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("REPLICA_GROUP_ID", "1"),
            ("NUM_REPLICA_GROUPS", "4"),
            ("TORCHFT_LIGHTHOUSE", "http://127.0.0.1:29510"),
            ("SKY_MONARCH_GENERATION", "3"),
            ("SKY_MONARCH_LIGHTHOUSE_KIND", "torchft"),
            ("OMP_NUM_THREADS", "1"),
        ] {
            assert_eq!(env.get(name).map(String::as_str), Some(value), "{name}");
        }
    }

    #[test]
    fn ranks_of_a_group_on_several_hosts_are_told_its_size_and_where_its_store_is() {
        let span = |node, store: Option<&str>| {
            let mut plan = plan();
            // The second host has come anew, for the third generation.
            plan.generation = if node > 0 { 3 } else { 1 };
            let (nodes, first_rank, store) = (2, node * 2, store.map(str::to_owned));
            plan.span = Some(Span { node, nodes, first_rank, ranks: 4, store });
            plan.devices = vec![vec![0], vec![1]];
            plan.device_env = Some("HIP_VISIBLE_DEVICES".into());
            let place = Place { rank: node * 2 + 1, generation: 3, master_port: 4242, spawn_id: "a-1" };
            rank_env(&run(), &plan, &place)
        };
        let near = [("RANK", "1"), ("GROUP_RANK", "0"), ("MASTER_PORT", "4242")];
        let far = [("RANK", "3"), ("GROUP_RANK", "1"), ("MASTER_PORT", "29400"), ("MASTER_ADDR", "10.0.0.7")];
        let both = [
            ("LOCAL_RANK", "1"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("GROUP_WORLD_SIZE", "2"),
            ("ROLE_WORLD_SIZE", "4"),
            ("TORCHELASTIC_RESTART_COUNT", "2"),
            ("HIP_VISIBLE_DEVICES", "1"),
        ];
        for (env, own) in [(span(0, None), &near[..]), (span(1, Some("10.0.0.7:29400")), &far[..])] {
            for (name, value) in own.iter().chain(&both) {
                assert_eq!(env.get(*name).map(String::as_str), Some(*value), "{name}");
            }
        }
        assert_eq!(span(1, Some("[fd00::1]:7"))["MASTER_ADDR"], "fd00::1");
    }

    #[test]
    fn the_users_values_arrive_unchanged_and_never_beat_ours() {
        let mut plan = plan();
        let odd = "a$b\"c`d'\n=é";
        for (name, value) in [("ODD", odd), ("OMP_NUM_THREADS", "8"), ("RANK", "99"), ("EMPTY", "")] {
            plan.envs.insert(name.into(), value.into());
        }
        let env = env(&plan);
        assert_eq!((env["ODD"].as_str(), env["OMP_NUM_THREADS"].as_str()), (odd, "8"));
        assert_eq!((env["RANK"].as_str(), env["EMPTY"].as_str()), ("1", ""));
    }

    #[test]
    fn our_lighthouse_learns_who_asks_and_text_for_people_does_not_show_the_secret() {
        let mut plan = plan();
        plan.lighthouse_control = Some("unix:/x".into());
        let url = env(&plan)["TORCHFT_LIGHTHOUSE"].clone();
        assert_eq!(url, "http://r1.g3.s3cret@127.0.0.1:29510");
        assert!(!redact(&url, &run().token).contains("s3cret"));
    }

    #[test]
    fn a_rank_gets_exactly_one_mask_whatever_it_would_inherit() {
        type Inherited = &'static [(&'static str, &'static str)];
        let cases: &[(Inherited, &str, &str)] = &[
            (&[], "HIP_VISIBLE_DEVICES", "2,3"),
            // As Slurm leaves two, or four, of a node's eight devices to a job.
            (&[(ROCR, "4,5")], ROCR, ""),
            (&[(ROCR, "4,5,6,7")], ROCR, "6,7"),
            (&[(ROCR, " GPU-1a, GPU-2b ,GPU-3c,GPU-4d")], ROCR, "GPU-3c,GPU-4d"),
            (&[(ROCR, "4,5,6,7"), ("HIP_VISIBLE_DEVICES", "3,2,1,0")], ROCR, "5,4"),
            (&[(ROCR, "4,5"), ("HIP_VISIBLE_DEVICES", "2,3")], ROCR, ""),
            (&[(ROCR, "")], ROCR, ""),
            (&[("HIP_VISIBLE_DEVICES", "4,5,6,7")], "HIP_VISIBLE_DEVICES", "6,7"),
            (&[("CUDA_VISIBLE_DEVICES", "4,5,6,7")], "HIP_VISIBLE_DEVICES", "6,7"),
            (&[("HIP_VISIBLE_DEVICES", "")], "HIP_VISIBLE_DEVICES", ""),
        ];
        for (inherited, name, value) in cases {
            let mut plan = plan();
            plan.envs.extend(inherited.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
            plan.devices = vec![vec![0, 1], vec![2, 3]];
            plan.device_env = Some("HIP_VISIBLE_DEVICES".into());
            let masks: Vec<_> =
                env(&plan).into_iter().filter(|(name, _)| MASKS.contains(&name.as_str())).collect();
            assert_eq!(masks, [((*name).to_owned(), (*value).to_owned())], "{inherited:?}");
        }
        let mut none = plan();
        none.devices = vec![vec![], vec![]];
        none.device_env = Some("HIP_VISIBLE_DEVICES".into());
        assert_eq!(env(&none)["HIP_VISIBLE_DEVICES"], "", "no device is not all devices");
    }

    #[test]
    fn without_devices_the_masks_stay_as_they_are() {
        let mut plan = plan();
        plan.envs.insert("ROCR_VISIBLE_DEVICES".into(), "5".into());
        assert_eq!(env(&plan)["ROCR_VISIBLE_DEVICES"], "5");
    }

    #[test]
    fn only_plain_python_commands_can_be_kept_warm() {
        let exec = |argv: &[&str]| RankCommand::Exec { argv: argv.iter().map(|s| (*s).to_owned()).collect() };
        for (argv, warm) in [
            (&["python", "train.py", "--lr", "1"][..], true),
            (&["/venv/bin/python3.11", "-m", "train"], true),
            (&["python", "-c", "pass"], false),
            (&["python", "-u", "-W", "ignore", "train.py"], true),
            (&["python", "-"], false),
            (&["python", "-u"], false),
            (&["torchrun", "train.py"], false),
            (&["pythonw", "train.py"], false),
            (&["python"], false),
        ] {
            assert_eq!(python_command(&exec(argv)).is_some(), warm, "{argv:?}");
        }
        assert!(python_command(&RankCommand::Shell { script: "python train.py".into() }).is_none());
    }
}
