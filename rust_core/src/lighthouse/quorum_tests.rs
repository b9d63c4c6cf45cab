//! The rules of [`super::quorum_compute`], by example and by property.

use super::*;
use proptest::prelude::*;

const OPTIONS: Options = Options {
    min_replicas: 2,
    expect: 4,
    join_timeout: Duration::from_secs(60),
    heartbeat_timeout: Duration::from_secs(5),
};

/// A clock that can look back.
fn noon() -> Instant {
    Instant::now() + Duration::from_secs(100_000)
}

struct Scene {
    now: Instant,
    state: State,
    options: Options,
}

impl Scene {
    fn new() -> Self {
        Self { now: noon(), state: State::default(), options: OPTIONS }
    }

    fn previous(mut self, ids: &[&str]) -> Self {
        self.state.previous = ids.iter().map(|id| PreviousMember { id: (*id).into(), gone: None }).collect();
        for id in ids {
            self.state.heard.insert((*id).into(), self.now);
        }
        self
    }

    fn asks(mut self, ids: &[&str]) -> Self {
        for id in ids {
            self.state.heard.insert((*id).into(), self.now);
            let ask = Ask { since: self.now, commit_failed: false, shrink_only: false };
            self.state.asks.insert((*id).into(), ask);
        }
        self
    }

    fn heard_ago(mut self, id: &str, seconds: u64) -> Self {
        self.state.heard.insert(id.into(), self.now - Duration::from_secs(seconds));
        self
    }

    fn evict(mut self, id: &str) -> Self {
        self.state.asks.remove(id);
        self.state.heard.remove(id);
        self.state
            .previous
            .iter_mut()
            .filter(|member| member.id == id)
            .for_each(|member| member.gone = Some(Departure::Evicted));
        self
    }

    fn decide(&self) -> Decision {
        quorum_compute(self.now, &self.state, &self.options)
    }

    fn formed(&self) -> (Vec<String>, bool, FormReason) {
        match self.decide() {
            Decision::Form { members, new_id, reason } => (members, new_id, reason),
            Decision::Wait { reason, .. } => panic!("waits: {reason}"),
        }
    }

    fn waits(&self) -> (WaitReason, Option<Instant>) {
        match self.decide() {
            Decision::Wait { reason, recheck_at } => (reason, recheck_at),
            Decision::Form { reason, .. } => panic!("formed: {reason}"),
        }
    }
}

#[test]
fn a_start_waits_for_the_expected_and_then_for_the_join_timeout() {
    let mut scene = Scene::new().asks(&["c", "a", "b"]);
    let (reason, recheck_at) = scene.waits();
    assert_eq!(reason, WaitReason::Starting { asked: 3, expected: 4 });
    assert_eq!(recheck_at, Some(scene.now + OPTIONS.join_timeout));

    let complete = Scene::new().asks(&["c", "a", "b", "d"]);
    assert_eq!(complete.formed().0, ["a", "b", "c", "d"], "sorted");

    scene.now += OPTIONS.join_timeout;
    for at in scene.state.heard.values_mut() {
        *at = scene.now;
    }
    assert_eq!(scene.formed().2, FormReason::JoinTimeout { asked: 3, expected: 4 });
}

#[test]
fn fewer_than_min_replicas_never_form_a_quorum() {
    let mut alone = Scene::new().asks(&["a"]);
    alone.now += OPTIONS.join_timeout * 2;
    alone.state.heard.insert("a".into(), alone.now);
    assert_eq!(alone.waits().0, WaitReason::TooFew { asked: 1, min_replicas: 2 });

    let survivor = Scene::new().previous(&["a", "b"]).asks(&["a"]).evict("b");
    assert_eq!(survivor.waits().0, WaitReason::TooFew { asked: 1, min_replicas: 2 });
}

#[test]
fn a_live_member_that_has_not_asked_is_waited_for_until_it_falls_silent() {
    let scene = Scene::new().previous(&["a", "b", "c"]).asks(&["a", "b"]).heard_ago("c", 3);
    let (reason, recheck_at) = scene.waits();
    assert_eq!(reason, WaitReason::MembersMissing { missing: vec!["c".into()] });
    assert_eq!(recheck_at, Some(scene.now + Duration::from_secs(2)));

    let later = scene.heard_ago("c", 5);
    let (members, new_id, reason) = later.formed();
    assert_eq!((members, new_id), (vec!["a".into(), "b".into()], true));
    assert_eq!(
        reason,
        FormReason::Changed {
            joined: vec![],
            evicted: vec![],
            silent: vec![("c".into(), Duration::from_secs(5))]
        }
    );
}

#[test]
fn an_evicted_member_frees_the_others_at_once() {
    let scene = Scene::new().previous(&["a", "b", "c"]).asks(&["a", "b"]).evict("c");
    let (members, new_id, reason) = scene.formed();
    assert_eq!((members, new_id), (vec!["a".into(), "b".into()], true));
    assert_eq!(reason, FormReason::Changed { joined: vec![], evicted: vec!["c".into()], silent: vec![] });
}

#[test]
fn a_newcomer_that_only_heartbeats_holds_nobody_up() {
    let scene = Scene::new().previous(&["a", "b"]).asks(&["a", "b"]).heard_ago("n", 0);
    assert_eq!(scene.formed(), (vec!["a".into(), "b".into()], false, FormReason::Unchanged));
    let asked = scene.asks(&["n"]);
    assert_eq!(asked.formed().0, ["a", "b", "n"]);
}

#[test]
fn a_failed_commit_renews_the_id_of_the_same_members() {
    let mut scene = Scene::new().previous(&["a", "b"]).asks(&["a", "b"]);
    scene.state.asks.get_mut("b").expect("b asks").commit_failed = true;
    assert!(scene.formed().1);
    assert_eq!(scene.formed().2, FormReason::CommitFailed { failed: vec!["b".into()] });
}

#[test]
fn a_shrink_only_asker_keeps_newcomers_out() {
    let mut scene = Scene::new().previous(&["a", "b"]).asks(&["a", "b", "n"]);
    scene.state.asks.get_mut("a").expect("a asks").shrink_only = true;
    assert_eq!(scene.formed(), (vec!["a".into(), "b".into()], false, FormReason::Unchanged));
}

#[test]
fn a_replacement_under_the_same_wire_id_gets_a_new_quorum_id() {
    let scene = Scene::new().previous(&["a", "b"]).evict("b").asks(&["a", "b"]);
    assert!(scene.formed().1);
}

#[test]
fn when_all_members_are_gone_it_starts_again_without_waiting_for_groups_given_up() {
    let scene = Scene::new().previous(&["a", "b", "c"]).evict("a").evict("b").evict("c").asks(&["x", "y"]);
    assert_eq!(scene.waits().0, WaitReason::Starting { asked: 2, expected: 3 });
    assert_eq!(scene.asks(&["z"]).formed().2, FormReason::Started { expected: 3 });
}

#[test]
fn a_silent_asker_is_left_out() {
    let scene = Scene::new().previous(&["a", "b", "c"]).asks(&["a", "b", "c"]).heard_ago("c", 9);
    assert_eq!(scene.formed().0, ["a", "b"]);
}

#[test]
fn every_decision_says_why() {
    let scenes = [
        Scene::new(),
        Scene::new().asks(&["a"]),
        Scene::new().asks(&["a", "b"]),
        Scene::new().asks(&["a", "b", "c", "d"]),
        Scene::new().previous(&["a", "b"]).asks(&["a"]),
        Scene::new().previous(&["a", "b"]).asks(&["a", "b"]),
        Scene::new().previous(&["a", "b", "c"]).evict("c").asks(&["a", "b", "d"]),
    ];
    for scene in scenes {
        let said = match scene.decide() {
            Decision::Form { reason, .. } => reason.to_string(),
            Decision::Wait { reason, .. } => reason.to_string(),
        };
        assert!(!said.is_empty());
    }
}

/// Eight replicas, each in any situation.
fn any_scene() -> impl Strategy<Value = (State, Options, Instant)> {
    let replica =
        (any::<bool>(), any::<bool>(), any::<bool>(), 0_u64..8, any::<bool>(), 0_u64..90, any::<bool>());
    let replicas = proptest::collection::vec(replica, 8);
    (replicas, 1_usize..5, 0_usize..4).prop_map(|(replicas, min_replicas, more)| {
        let now = noon();
        let mut state = State::default();
        for (index, (was_in, evicted, asks, silent_s, failed, asked_s, heard)) in
            replicas.into_iter().enumerate()
        {
            let id = format!("r{index}");
            if was_in {
                state
                    .previous
                    .push(PreviousMember { id: id.clone(), gone: evicted.then_some(Departure::Evicted) });
            }
            // what is evicted has left asks and heard; whoever asks was heard
            if !(was_in && evicted) && (heard || asks) {
                state.heard.insert(id.clone(), now - Duration::from_secs(silent_s));
                if asks {
                    let since = now - Duration::from_secs(asked_s);
                    state.asks.insert(id, Ask { since, commit_failed: failed, shrink_only: false });
                }
            }
        }
        (state, Options { min_replicas, expect: min_replicas + more, ..OPTIONS }, now)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn members_are_live_askers_sorted_and_enough((state, options, now) in any_scene()) {
        if let Decision::Form { members, .. } = quorum_compute(now, &state, &options) {
            prop_assert!(members.len() >= options.min_replicas);
            prop_assert!(members.windows(2).all(|pair| pair[0] < pair[1]));
            for id in &members {
                prop_assert!(state.asks.contains_key(id) && state.is_alive(id, now, &options));
            }
        }
    }

    #[test]
    fn no_live_member_is_left_behind((state, options, now) in any_scene()) {
        if let Decision::Form { members, .. } = quorum_compute(now, &state, &options) {
            for member in state.previous.iter().filter(|member| member.gone.is_none()) {
                prop_assert!(members.contains(&member.id) || !state.is_alive(&member.id, now, &options));
            }
        }
    }

    #[test]
    fn an_id_is_kept_only_by_the_same_members_without_a_failed_commit((state, options, now) in any_scene()) {
        if let Decision::Form { members, new_id, .. } = quorum_compute(now, &state, &options) {
            let same = state.previous.iter().map(|member| &member.id).eq(members.iter())
                && state.previous.iter().all(|member| member.gone.is_none());
            let failed = members.iter().any(|id| state.asks[id].commit_failed);
            prop_assert_eq!(new_id, !same || failed);
        }
    }

    #[test]
    fn a_wait_for_time_ends_at_its_recheck((state, options, now) in any_scene()) {
        if let Decision::Wait { reason, recheck_at: Some(at) } = quorum_compute(now, &state, &options) {
            prop_assert!(at > now);
            // everyone that asks goes on heartbeating; nobody else says anything
            let mut later = state.clone();
            for id in later.asks.keys().cloned().collect::<Vec<_>>() {
                if state.is_alive(&id, now, &options) {
                    later.heard.insert(id, at);
                }
            }
            let then = quorum_compute(at, &later, &options);
            prop_assert!(!matches!(&then, Decision::Wait { reason: same, .. } if *same == reason), "{then:?}");
        }
    }

    #[test]
    fn evicting_whoever_is_missing_leaves_nobody_missing((state, options, now) in any_scene()) {
        if let Decision::Wait { reason: WaitReason::MembersMissing { missing }, .. } = quorum_compute(now, &state, &options) {
            let mut told = state.clone();
            for member in told.previous.iter_mut().filter(|member| missing.contains(&member.id)) {
                member.gone = Some(Departure::Evicted);
                told.heard.remove(&member.id);
            }
            let then = quorum_compute(now, &told, &options);
            let still = matches!(&then, Decision::Wait { reason: WaitReason::MembersMissing { .. }, .. });
            prop_assert!(!still, "{then:?}");
        }
    }

    #[test]
    fn the_same_input_gives_the_same_answer((state, options, now) in any_scene()) {
        prop_assert_eq!(quorum_compute(now, &state, &options), quorum_compute(now, &state, &options));
    }
}
