//! What is a host's own in plans that were made on another: where its files are, and what its shell would know.

use std::collections::BTreeMap;

use super::config::Config;

/// Of SkyPilot's variables only those that hold something to prove oneself with are kept from ranks.
const SKYPILOT: &str = "SKYPILOT_";
const SECRET_WORDS: [&str; 7] = ["TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "KEY", "AUTH", "ENDPOINT"];
/// Ours say which run, agent or rank a process is: a child is told anew.
const OURS: &str = "SKY_MONARCH_";
/// What a session is told of its checkpoints; `staging` in it is a folder of the host.
const CHECKPOINT: &str = "SKY_MONARCH_CHECKPOINT";

/// What plans get on this host.
#[derive(Clone, Debug, Default)]
pub struct Host {
    name: String,
    workdir: Option<String>,
    /// The agent's environment, beneath what a plan sets.
    base: BTreeMap<String, String>,
    /// Where files wait for their upload; none: where the plan says.
    staging: Option<String>,
}

impl Host {
    /// Reads what the configuration changes; `environment` is the agent's own.
    pub fn new(config: &Config, environment: impl IntoIterator<Item = (String, String)>) -> Self {
        let base = if config.inherit_env {
            environment.into_iter().filter(|(name, _)| !is_private(name)).collect()
        } else {
            BTreeMap::new()
        };
        let staging = config.run_dir.join("checkpoints").to_string_lossy().into_owned();
        let staging = (config.attempt > 0).then_some(staging);
        Self { name: config.host.clone(), workdir: config.workdir.clone(), base, staging }
    }

    /// Its name, unique in the run.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes a plan's working folder and environment this host's.
    pub fn settle(&self, workdir: &mut String, envs: &mut BTreeMap<String, String>) {
        if let Some(own) = &self.workdir {
            workdir.clone_from(own);
        }
        for (name, value) in &self.base {
            envs.entry(name.clone()).or_insert_with(|| value.clone());
        }
        if let (Some(own), Some(checkpoint)) = (&self.staging, envs.get_mut(CHECKPOINT))
            && let Ok(mut told) = serde_json::from_str::<serde_json::Value>(checkpoint)
            && let Some(staging) = told.get_mut("staging")
        {
            *staging = own.clone().into();
            *checkpoint = told.to_string();
        }
    }
}

fn is_private(name: &str) -> bool {
    let is_secret = |rest: &str| SECRET_WORDS.iter().any(|word| rest.contains(word));
    name.starts_with(OURS) || name.strip_prefix(SKYPILOT).is_some_and(is_secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn host(more: serde_json::Value) -> Host {
        let folder = std::env::temp_dir();
        let mut json = serde_json::json!({
            "run_id": "run", "host": "job-h0", "run_dir": folder, "private": "/p", "socket": "/s",
            "controller": "unix:/c",
        });
        json.as_object_mut().expect("a map").extend(more.as_object().expect("a map").clone());
        let environment = map(&[
            ("PATH", "/usr/bin"),
            ("ROCM_PATH", "/opt/rocm"),
            ("SKYPILOT_NODE_RANK", "0"),
            ("SKYPILOT_SERVICE_ACCOUNT_TOKEN", "s3cret"),
            ("SKYPILOT_API_SERVER_ENDPOINT", "https://user:s3cret@sky"),
            ("SKY_MONARCH_ENROLMENT", "s3cret"),
            ("SKY_MONARCH_RUN_ID", "run"),
        ]);
        Host::new(&Config::parse(&json.to_string()).expect("a configuration"), environment)
    }

    #[test]
    fn a_host_of_its_own_keeps_its_folder_and_its_environment_and_no_secret_of_others() {
        let host = host(serde_json::json!({"attempt": 2, "workdir": "/home/me/work", "inherit_env": true}));
        let (mut workdir, mut envs) = ("/head/job".to_owned(), map(&[("PATH", "/job/bin"), ("LR", "1")]));
        host.settle(&mut workdir, &mut envs);
        assert_eq!(workdir, "/home/me/work");
        let wanted =
            [("PATH", "/job/bin"), ("LR", "1"), ("ROCM_PATH", "/opt/rocm"), ("SKYPILOT_NODE_RANK", "0")];
        assert_eq!(envs, map(&wanted));
    }

    #[test]
    fn where_nothing_says_so_a_plan_stays_as_it_is() {
        let (mut workdir, mut envs) = ("/job".to_owned(), map(&[(CHECKPOINT, r#"{"staging":"/head/run"}"#)]));
        let before = envs.clone();
        host(serde_json::json!({})).settle(&mut workdir, &mut envs);
        assert_eq!((workdir.as_str(), envs), ("/job", before));
    }

    #[test]
    fn checkpoints_wait_for_their_upload_in_a_folder_of_the_host() {
        let host = host(serde_json::json!({"attempt": 1}));
        for (told, is_changed) in [
            (r#"{"to":"s3://b/c","staging":"/head/run/checkpoints"}"#, true),
            (r#"{"to":"/shared"}"#, false),
            ("no JSON", false),
        ] {
            let mut envs = map(&[(CHECKPOINT, told)]);
            host.settle(&mut String::new(), &mut envs);
            let own = std::env::temp_dir().join("checkpoints").to_string_lossy().into_owned();
            assert_eq!(envs[CHECKPOINT].contains(&own), is_changed, "{envs:?}");
            assert!(is_changed || envs[CHECKPOINT] == told);
        }
    }
}
