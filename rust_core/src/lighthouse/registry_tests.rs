//! Fencing, identity and life cycle, with a clock of our own.

use super::*;
use crate::lighthouse::refusal::MAX_ID_BYTES;
use proptest::prelude::*;
use tokio::sync::oneshot::error::TryRecvError;

const SECOND: Duration = Duration::from_secs(1);

struct Scene {
    registry: Registry,
    now: Instant,
    connection: ConnectionId,
}

type Waiting = (u64, oneshot::Receiver<Answer>);

fn is(replica: u32, generation: u64) -> Option<Identity> {
    Some(Identity { replica, generation })
}

fn options(min_replicas: usize, expect: usize) -> Options {
    Options { min_replicas, expect, join_timeout: 60 * SECOND, heartbeat_timeout: 5 * SECOND }
}

fn member(id: &str) -> QuorumMember {
    QuorumMember { replica_id: id.into(), step: 7, ..QuorumMember::default() }
}

fn quorum(waiting: &mut Waiting) -> Quorum {
    Arc::unwrap_or_clone(waiting.1.try_recv().expect("an answer").expect("a quorum"))
}

fn ids(quorum: &Quorum) -> Vec<&str> {
    quorum.participants.iter().map(|member| member.replica_id.as_str()).collect()
}

impl Scene {
    fn new(min_replicas: usize, expect: usize) -> Self {
        Self::with_ledger(min_replicas, expect, Ledger::open(None, "run").expect("no file"))
    }

    fn with_ledger(min_replicas: usize, expect: usize, ledger: Ledger) -> Self {
        let now = Instant::now();
        Self { registry: Registry::new(now, options(min_replicas, expect), ledger), now, connection: 0 }
    }

    fn ask(&mut self, id: &str, identity: Option<Identity>) -> Result<Waiting, Refusal> {
        self.connection += 1;
        self.registry.ask(self.now, self.connection, identity, member(id))
    }

    fn asks(&mut self, id: &str, identity: Option<Identity>) -> Waiting {
        self.ask(id, identity).expect("let in")
    }

    /// Time passes as the timer sees it; `alive` go on heartbeating, each with its own identity.
    fn pass(&mut self, time: Duration, alive: &[(&str, Option<Identity>)]) {
        let until = self.now + time;
        while self.now < until {
            self.now += self.registry.tick_interval();
            for (id, identity) in alive {
                self.registry.heartbeat(self.now, 1_000, *identity, id).expect("let in");
            }
            self.registry.tick(self.now);
        }
    }

    /// A lighthouse of three groups that was told of another number, as the next one finds it.
    fn scaled(replicas: u32, folder: &tempfile::TempDir) -> Self {
        let path = folder.path().join("lighthouse.state");
        let open = || Ledger::open(Some(&path), "run").expect("a ledger");
        let mut before = Self::with_ledger(1, 3, open());
        before.registry.expect(before.now, replicas);
        Self::with_ledger(1, 3, open())
    }

    /// Three groups in a first quorum.
    fn three() -> (Self, i64) {
        let mut scene = Self::new(2, 3);
        let mut waiting: Vec<Waiting> =
            (0..3).map(|replica| scene.asks(&format!("r{replica}:a"), is(replica, 1))).collect();
        let formed: Vec<Quorum> = waiting.iter_mut().map(quorum).collect();
        assert!(
            formed
                .iter()
                .all(|one| one.quorum_id == formed[0].quorum_id && ids(one) == ["r0:a", "r1:a", "r2:a"])
        );
        (scene, formed[0].quorum_id)
    }
}

#[test]
fn a_start_does_not_wait_for_a_replica_group_that_was_given_up() {
    let mut scene = Scene::new(1, 3);
    let mut first = scene.asks("a", is(0, 1));
    let mut second = scene.asks("b", is(1, 1));
    assert!(first.1.try_recv().is_err(), "the third is waited for");
    scene.registry.evict(scene.now, 2, FOR_GOOD);
    assert_eq!(ids(&quorum(&mut first)), ["a", "b"]);
    assert_eq!(ids(&quorum(&mut second)), ["a", "b"]);
    assert!(scene.ask("c", is(2, 9)).is_err(), "what is given up stays so");
}

#[test]
fn an_evict_frees_waiting_survivors_at_once_and_names_the_last_quorum() {
    let (mut scene, first) = Scene::three();
    let (mut zero, mut two) = (scene.asks("r0:a", is(0, 1)), scene.asks("r2:a", is(2, 1)));
    assert_eq!(zero.1.try_recv(), Err(TryRecvError::Empty), "waits for replica 1");

    assert_eq!(scene.registry.evict(scene.now, 1, 1), Some(first));
    let formed = quorum(&mut zero);
    assert_eq!(ids(&formed), ["r0:a", "r2:a"]);
    assert_eq!(formed.quorum_id, first + 1);
    assert_eq!(quorum(&mut two), formed);
}

#[test]
fn an_evicted_generation_never_comes_back_and_the_next_one_does() {
    let (mut scene, _) = Scene::three();
    scene.registry.evict(scene.now, 1, 1);
    let identity = Identity { replica: 1, generation: 1 };
    let fenced = Refusal::Fenced { identity, fence: 2 };
    assert_eq!(scene.ask("r1:a", is(1, 1)).err(), Some(fenced.clone()));
    assert_eq!(scene.ask("r1:other", is(1, 1)).err(), Some(fenced.clone()));
    assert_eq!(scene.registry.heartbeat(scene.now, 9, is(1, 1), "r1:a"), Err(fenced));

    let mut all = [scene.asks("r0:a", is(0, 1)), scene.asks("r1:b", is(1, 2)), scene.asks("r2:a", is(2, 1))];
    // replica 1 did not ask in time for the first of these quorums, or it did: either way it is in the next
    let _ = all.iter_mut().map(|waiting| waiting.1.try_recv()).collect::<Vec<_>>();
    let mut again =
        [scene.asks("r0:a", is(0, 1)), scene.asks("r1:b", is(1, 2)), scene.asks("r2:a", is(2, 1))];
    assert_eq!(ids(&quorum(&mut again[2])), ["r0:a", "r1:b", "r2:a"]);
}

#[test]
fn an_evict_answers_the_pending_ask_of_the_dead() {
    let (mut scene, _) = Scene::three();
    let mut dead = scene.asks("r1:a", is(1, 1));
    scene.registry.evict(scene.now, 1, 1);
    assert!(matches!(dead.1.try_recv(), Ok(Err(Refusal::Fenced { fence: 2, .. }))));
}

#[test]
fn evicting_an_unknown_or_older_generation_harms_nobody() {
    let (mut scene, first) = Scene::three();
    assert_eq!(scene.registry.evict(scene.now, 1, 0), None);
    assert_eq!(scene.registry.evict(scene.now, 9, 4), None);
    let mut all: Vec<Waiting> =
        (0..3).map(|replica| scene.asks(&format!("r{replica}:a"), is(replica, 1))).collect();
    assert_eq!(quorum(&mut all[0]).quorum_id, first, "same members, same id");
}

#[test]
fn a_newer_generation_that_asks_ends_the_older_one() {
    let (mut scene, _) = Scene::three();
    scene.registry.heartbeat(scene.now, 9, is(1, 2), "r1:b").expect("a standby may heartbeat");
    let mut still = scene.asks("r1:a", is(1, 1));
    assert_eq!(still.1.try_recv(), Err(TryRecvError::Empty));
    let _new = scene.asks("r1:b", is(1, 2));
    assert!(matches!(still.1.try_recv(), Ok(Err(Refusal::Fenced { fence: 2, .. }))));
    assert!(scene.ask("r1:a", is(1, 1)).is_err());
}

#[test]
fn a_second_live_copy_is_refused_until_the_first_is_gone() {
    let (mut scene, _) = Scene::three();
    let identity = Identity { replica: 1, generation: 1 };
    let refusal = Refusal::SecondCopy { identity, holder: "r1:a".into() };
    assert_eq!(scene.ask("r1:copy", is(1, 1)).err(), Some(refusal.clone()));
    assert_eq!(scene.registry.heartbeat(scene.now, 77, is(1, 1), "r1:copy"), Err(refusal));
    let listed = scene.registry.snapshot(scene.now).replicas;
    assert_eq!(listed.iter().filter(|replica| replica.identity == is(1, 1)).count(), 1);

    // its connections close: it is gone, and the other one may take its place
    (0..100).for_each(|connection| scene.registry.disconnected(connection));
    scene.asks("r1:copy", is(1, 1));
    assert!(matches!(scene.ask("r1:a", is(1, 1)), Err(Refusal::SecondCopy { .. })));
}

#[test]
fn a_silent_first_copy_gives_way() {
    let (mut scene, _) = Scene::three();
    scene.pass(6 * SECOND, &[("r0:a", is(0, 1)), ("r2:a", is(2, 1))]);
    scene.asks("r1:copy", is(1, 1));
}

#[test]
fn a_wire_id_belongs_to_who_used_it_first() {
    let mut scene = Scene::new(1, 2);
    let _one = scene.asks("mine", is(0, 1));
    assert_eq!(scene.ask("mine", is(1, 1)).err(), Some(Refusal::TakenId));
    assert_eq!(scene.ask("mine", None).err(), Some(Refusal::TakenId));
    scene.asks("mine", is(0, 2)); // its own next generation
}

#[test]
fn two_copies_without_identity_cannot_be_told_apart_and_are_both_let_in() {
    let mut scene = Scene::new(1, 2);
    let mut one = scene.asks("r0:a", None);
    let mut two = scene.asks("r0:b", None);
    assert_eq!(ids(&quorum(&mut one)), ids(&quorum(&mut two)));
}

#[test]
fn an_ask_that_is_repeated_answers_only_the_newest() {
    let mut scene = Scene::new(1, 2);
    let mut first = scene.asks("r0:a", is(0, 1));
    let mut second = scene.asks("r0:a", is(0, 1));
    assert!(matches!(first.1.try_recv(), Ok(Err(Refusal::Repeated))));
    // the late end of the first request must not withdraw the second
    scene.registry.withdraw(scene.now, "r0:a", first.0);
    let _other = scene.asks("r1:a", is(1, 1));
    assert_eq!(ids(&quorum(&mut second)), ["r0:a", "r1:a"]);
}

#[test]
fn a_withdrawn_ask_counts_no_more() {
    let mut scene = Scene::new(1, 2);
    let gone = scene.asks("r0:a", is(0, 1));
    scene.registry.withdraw(scene.now, "r0:a", gone.0);
    let mut one = scene.asks("r1:a", is(1, 1));
    assert_eq!(one.1.try_recv(), Err(TryRecvError::Empty));
    let _two = scene.asks("r2:a", is(2, 1));
    assert_eq!(ids(&quorum(&mut one)), ["r1:a", "r2:a"]);
}

#[test]
fn a_silent_member_is_dropped_and_no_ghost_is_listed() {
    let (mut scene, _) = Scene::three();
    let mut zero = scene.asks("r0:a", is(0, 1));
    let mut two = scene.asks("r2:a", is(2, 1));
    let alive = [("r0:a", is(0, 1)), ("r2:a", is(2, 1))];
    scene.pass(4 * SECOND, &alive);
    assert_eq!(zero.1.try_recv(), Err(TryRecvError::Empty));
    scene.pass(2 * SECOND, &alive);
    assert_eq!(ids(&quorum(&mut zero)), ["r0:a", "r2:a"]);
    assert_eq!(ids(&quorum(&mut two)), ["r0:a", "r2:a"]);
    let snapshot = scene.registry.snapshot(scene.now);
    assert!(snapshot.replicas.iter().all(|replica| replica.id != "r1:a"));
    assert_eq!(snapshot.counters.drops["silent"], 1);
    scene.pass(SECOND, &alive);
    assert!(!scene.registry.known.contains_key("r1:a"), "forgotten, not only hidden");
}

#[test]
fn whoever_was_away_heals_even_at_the_step_of_the_others() {
    let (mut scene, first) = Scene::three();
    let (alive, all) = ([("r0:a", is(0, 1)), ("r2:a", is(2, 1))], [is(0, 1), is(1, 1), is(2, 1)]);
    scene.pass(6 * SECOND, &alive);
    let mut waiting: Vec<Waiting> =
        all.iter().enumerate().map(|(replica, who)| scene.asks(&format!("r{replica}:a"), *who)).collect();
    let formed: Vec<Quorum> = waiting.iter_mut().map(quorum).collect();
    assert!(formed[0].quorum_id > first);
    let steps = |one: &Quorum| one.participants.iter().map(|member| member.step).collect::<Vec<_>>();
    assert!(formed.iter().all(|one| steps(one) == [7, 6, 7]), "{formed:?}");
    // Healed, it is one of them.
    let mut waiting: Vec<Waiting> =
        all.iter().enumerate().map(|(replica, who)| scene.asks(&format!("r{replica}:a"), *who)).collect();
    assert_eq!(steps(&quorum(&mut waiting[0])), [7, 7, 7]);
}

#[test]
fn whoever_was_away_and_is_ahead_is_believed() {
    let (mut scene, _) = Scene::three();
    scene.pass(6 * SECOND, &[("r0:a", is(0, 1)), ("r2:a", is(2, 1))]);
    let ahead = QuorumMember { step: 8, ..member("r1:a") };
    scene.connection += 1;
    let _one = scene.registry.ask(scene.now, scene.connection, is(1, 1), ahead).expect("let in");
    let mut zero = scene.asks("r0:a", is(0, 1));
    let _two = scene.asks("r2:a", is(2, 1));
    let formed = quorum(&mut zero);
    assert_eq!(formed.participants.iter().map(|member| member.step).collect::<Vec<_>>(), [7, 8, 7]);
}

#[test]
fn whoever_never_heartbeats_lives_as_long_as_its_request_is_open() {
    let (mut scene, _) = Scene::three();
    let mut zero = scene.asks("r0:a", is(0, 1));
    let mut two = scene.asks("r2:a", is(2, 1));
    scene.pass(6 * SECOND, &[]);
    assert_eq!(ids(&quorum(&mut zero)), ["r0:a", "r2:a"], "replica 1 did not ask and is silent");
    assert_eq!(ids(&quorum(&mut two)), ["r0:a", "r2:a"]);

    // one that heartbeats and stops doing so is not counted, its open request notwithstanding
    scene.registry.heartbeat(scene.now, 1_000, is(2, 1), "r2:a").expect("let in");
    let mut two = scene.asks("r2:a", is(2, 1));
    scene.pass(6 * SECOND, &[("r0:a", is(0, 1))]);
    assert_eq!(two.1.try_recv(), Err(TryRecvError::Empty));
    let _one = scene.asks("r1:b", is(1, 2));
    let mut zero = scene.asks("r0:a", is(0, 1));
    assert_eq!(ids(&quorum(&mut zero)), ["r0:a", "r1:b"]);
}

#[test]
fn a_pause_of_the_lighthouse_itself_drops_nobody() {
    let (mut scene, first) = Scene::three();
    let mut zero = scene.asks("r0:a", is(0, 1));
    scene.now += 100 * SECOND; // stopped, nobody could be heard
    scene.registry.tick(scene.now);
    assert_eq!(zero.1.try_recv(), Err(TryRecvError::Empty));
    let _others = [scene.asks("r1:a", is(1, 1)), scene.asks("r2:a", is(2, 1))];
    assert_eq!(quorum(&mut zero).quorum_id, first);
    assert_eq!(scene.registry.snapshot(scene.now).counters.pauses, 1);
}

#[test]
fn a_restart_keeps_fences_and_members_and_renews_the_id() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("state");
    let open = || Ledger::open(Some(&path), "run").expect("state");
    let mut scene = Scene::with_ledger(1, 3, open());
    let mut first: Vec<Waiting> =
        (0..3).map(|replica| scene.asks(&format!("r{replica}:a"), is(replica, 4))).collect();
    let last_id = quorum(&mut first[0]).quorum_id;
    scene.registry.evict(scene.now, 1, 4);
    drop(scene);

    let mut scene = Scene::with_ledger(1, 3, open());
    assert!(matches!(scene.ask("r1:a", is(1, 4)), Err(Refusal::Fenced { fence: 5, .. })));
    assert_eq!(scene.registry.evict(scene.now, 2, 3), None);
    let mut zero = scene.asks("r0:a", is(0, 4));
    assert_eq!(zero.1.try_recv(), Err(TryRecvError::Empty), "replica 2 may still live");
    assert_eq!(scene.registry.evict(scene.now, 2, 4), Some(last_id));
    // replica 1 was in the stored quorum and evicted: it must not be waited for
    let formed = quorum(&mut zero);
    assert_eq!(ids(&formed), ["r0:a"]);
    assert!(formed.quorum_id > last_id);
}

#[test]
fn what_no_replica_id_can_be_is_refused() {
    let mut scene = Scene::new(1, 1);
    for id in [String::new(), "x".repeat(MAX_ID_BYTES + 1)] {
        assert!(matches!(scene.ask(&id, None), Err(Refusal::Malformed(_))));
    }
    assert_eq!(scene.registry.snapshot(scene.now).counters.refusals["malformed"], 2);
}

#[test]
fn the_history_says_why_and_is_bounded() {
    let mut scene = Scene::new(1, 1);
    for generation in 1..400 {
        drop(scene.asks("r0", is(0, generation)));
    }
    let snapshot = scene.registry.snapshot(scene.now);
    assert_eq!(snapshot.history.len(), HISTORY);
    assert!(snapshot.history.windows(2).all(|pair| pair[0].quorum_id < pair[1].quorum_id));
    assert!(snapshot.history.iter().all(|record| !record.reason.is_empty() && record.members[0].step == 7));
    assert!(scene.registry.held.len() <= HELD_GENERATIONS);
}

/// What may happen to a lighthouse, in any order.
#[derive(Clone, Debug)]
enum Act {
    Ask { replica: u32, generation: u64, copy: bool },
    Heartbeat { replica: u32, generation: u64, copy: bool },
    Evict { replica: u32, generation: u64 },
    Withdraw { index: usize },
    Disconnect { connection: ConnectionId },
    Pass { tenths: u32 },
    Restart,
}

fn any_act() -> impl Strategy<Value = Act> {
    let who = || (0_u32..3, 0_u64..4, proptest::bool::weighted(0.2));
    prop_oneof![
        8 => who().prop_map(|(replica, generation, copy)| Act::Ask { replica, generation, copy }),
        3 => who().prop_map(|(replica, generation, copy)| Act::Heartbeat { replica, generation, copy }),
        2 => (0_u32..3, 0_u64..4).prop_map(|(replica, generation)| Act::Evict { replica, generation }),
        1 => (0_usize..30).prop_map(|index| Act::Withdraw { index }),
        1 => (0_u64..30).prop_map(|connection| Act::Disconnect { connection }),
        2 => (1_u32..80).prop_map(|tenths| Act::Pass { tenths }),
        1 => Just(Act::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// I1 and I7: one live generation a group in each quorum, none below its fence, and ids that only grow.
    #[test]
    fn whatever_happens_ids_grow_and_a_group_votes_once(acts in proptest::collection::vec(any_act(), 1..120)) {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("state");
        let open = || Ledger::open(Some(&path), "run").expect("state");
        let mut scene = Scene::with_ledger(1, 2, open());
        let mut waiting: Vec<(String, Waiting)> = Vec::new();
        let (mut members_of, mut last_id) = (BTreeMap::<i64, Vec<String>>::new(), 0);
        for act in acts {
            let name = |replica, generation, copy| format!("r{replica}.{generation}.{copy}");
            match act {
                Act::Ask { replica, generation, copy } => {
                    let id = name(replica, generation, copy);
                    if let Ok(asked) = scene.ask(&id, is(replica, generation)) {
                        waiting.push((id, asked));
                    }
                }
                Act::Heartbeat { replica, generation, copy } => {
                    let id = name(replica, generation, copy);
                    let _ = scene.registry.heartbeat(scene.now, 5, is(replica, generation), &id);
                }
                Act::Evict { replica, generation } => {
                    scene.registry.evict(scene.now, replica, generation);
                    let fence = scene.registry.ledger.entry.fences[&replica];
                    prop_assert!(fence > generation);
                }
                Act::Withdraw { index } => {
                    if let Some((id, asked)) = waiting.get(index) {
                        scene.registry.withdraw(scene.now, id, asked.0);
                    }
                }
                Act::Disconnect { connection } => scene.registry.disconnected(connection),
                Act::Pass { tenths } => scene.pass(tenths * SECOND / 10, &[]),
                Act::Restart => {
                    let fences = scene.registry.ledger.entry.fences.clone();
                    scene = Scene::with_ledger(1, 2, open());
                    waiting.clear();
                    prop_assert_eq!(&scene.registry.ledger.entry.fences, &fences);
                }
            }
            prop_assert_eq!(scene.registry.waiters.keys().collect::<Vec<_>>(), scene.registry.state.asks.keys().collect::<Vec<_>>());
            for (id, asked) in &mut waiting {
                let Ok(Ok(formed)) = asked.1.try_recv() else { continue };
                let members: Vec<String> = ids(&formed).into_iter().map(str::to_owned).collect();
                prop_assert!(members.contains(id));
                prop_assert!(formed.quorum_id >= last_id);
                last_id = formed.quorum_id;
                let known = members_of.entry(formed.quorum_id).or_insert_with(|| members.clone());
                prop_assert_eq!(&*known, &members, "an id names one set of members");
                let mut groups: Vec<&str> = members.iter().map(|member| &member[..2]).collect();
                groups.dedup();
                prop_assert_eq!(groups.len(), members.len(), "a group votes once: {:?}", members);
            }
        }
    }
}

#[test]
fn the_snapshot_says_when_a_group_last_waited() {
    let (mut scene, _) = Scene::three();
    let all: Vec<(String, _)> = (0..3).map(|replica| (format!("r{replica}:a"), is(replica, 1))).collect();
    let alive: Vec<(&str, _)> = all.iter().map(|(id, identity)| (id.as_str(), *identity)).collect();
    scene.pass(3 * SECOND, &alive);
    let _waiting = scene.asks("r1:a", is(1, 1));
    let idle = |scene: &Scene| -> Vec<Option<f64>> {
        scene.registry.snapshot(scene.now).replicas.iter().map(|replica| replica.idle_s).collect()
    };
    let seen = idle(&scene);
    assert_eq!(seen[1], Some(0.0), "it waits");
    assert!(seen[0].is_some_and(|idle_s| (2.9..4.0).contains(&idle_s)), "{seen:?}");
    scene.registry.heartbeat(scene.now, 9, is(5, 1), "r5:a").expect("let in");
    assert_eq!(idle(&scene)[3], None, "it has never asked");
}

#[path = "registry/silence_tests.rs"]
mod silence;

#[path = "registry/split_tests.rs"]
mod split;

#[test]
fn a_start_waits_for_the_number_of_groups_that_a_run_was_scaled_to() {
    let folder = tempfile::tempdir().expect("folder");
    let mut fewer = Scene::scaled(2, &folder);
    let mut first = fewer.asks("r0:a", is(0, 1));
    assert_eq!(first.1.try_recv(), Err(TryRecvError::Empty), "it waits for a second one");
    let mut second = fewer.asks("r1:a", is(1, 1));
    assert_eq!(ids(&quorum(&mut first)), ["r0:a", "r1:a"], "and for no third");
    quorum(&mut second);

    let folder = tempfile::tempdir().expect("folder");
    let mut more = Scene::scaled(4, &folder);
    let mut waiting: Vec<Waiting> =
        (0..4).map(|replica| more.asks(&format!("r{replica}:a"), is(replica, 1))).collect();
    assert_eq!(ids(&quorum(&mut waiting[0])).len(), 4);
}

#[test]
fn a_group_that_is_gone_for_good_counts_once_where_the_run_was_scaled_below_it() {
    let folder = tempfile::tempdir().expect("folder");
    let mut scene = Scene::scaled(2, &folder);
    scene.registry.evict(scene.now, 2, FOR_GOOD);
    let mut first = scene.asks("r0:a", is(0, 1));
    assert_eq!(first.1.try_recv(), Err(TryRecvError::Empty), "the second one is still to come");
    scene.registry.expect(scene.now, 0);
    assert_eq!(ids(&quorum(&mut first)), ["r0:a"], "never fewer than a quorum needs, and no more");
}
