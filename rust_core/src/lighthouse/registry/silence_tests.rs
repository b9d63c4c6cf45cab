//! Silence: noticed by itself, told once, taken back by asking again; and our own pauses, which are nobody's.

use super::*;

const ALIVE: [(&str, Option<Identity>); 2] = [
    ("r0:a", Some(Identity { replica: 0, generation: 1 })),
    ("r2:a", Some(Identity { replica: 2, generation: 1 })),
];

fn told(news: &mut broadcast::Receiver<Gone>) -> Vec<Gone> {
    std::iter::from_fn(|| news.try_recv().ok()).collect()
}

#[test]
fn a_silent_member_is_gone_at_the_very_moment_and_told_of_once_while_nobody_asks() {
    let (mut scene, first) = Scene::three();
    let (mut news, _) = scene.registry.subscribe();
    let due = scene.now + 5 * SECOND;
    scene.pass(19 * SECOND / 4, &ALIVE);
    assert_eq!((scene.registry.recheck_at(), told(&mut news)), (Some(due), vec![]));
    scene.now = due;
    scene.registry.tick(due);
    let gone = Gone { quorum_id: first, reason: "r1:a: silent 5.0 s".into() };
    assert_eq!(told(&mut news), [gone]);
    scene.pass(9 * SECOND, &ALIVE);
    assert_eq!(told(&mut news), [], "once");
    let shown = scene.registry.snapshot(scene.now);
    assert_eq!((shown.participants, shown.counters.drops["silent"]), (2, 1));
}

#[test]
fn a_silent_member_that_comes_back_holds_nobody_up_and_is_let_in_when_it_asks() {
    let (mut scene, first) = Scene::three();
    let (mut news, _) = scene.registry.subscribe();
    scene.pass(6 * SECOND, &ALIVE);
    assert_eq!(told(&mut news).len(), 1);
    scene.registry.heartbeat(scene.now, 9, is(1, 1), "r1:a").expect("its generation is not over");
    let (mut zero, mut two) = (scene.asks("r0:a", is(0, 1)), scene.asks("r2:a", is(2, 1)));
    assert_eq!(ids(&quorum(&mut zero)), ["r0:a", "r2:a"], "it was told that it is out");
    assert!(quorum(&mut two).quorum_id > first);

    let _back = scene.asks("r1:a", is(1, 1));
    let (mut zero, _two) = (scene.asks("r0:a", is(0, 1)), scene.asks("r2:a", is(2, 1)));
    assert_eq!(ids(&quorum(&mut zero)), ["r0:a", "r1:a", "r2:a"], "with the same generation");
    assert_eq!(told(&mut news), []);
    let history = scene.registry.snapshot(scene.now).history;
    let left = |at: usize| {
        history[at].left.iter().map(|one| (one.id.as_str(), one.why.as_str())).collect::<Vec<_>>()
    };
    assert_eq!((left(0), left(1), left(2)), (vec![], vec![("r1:a", "silent 5.0 s")], vec![]));
    assert_eq!(history[1].left[0].identity, is(1, 1));
    assert_eq!(history[1].reason, "silent 5.0 s: r1:a");
}

#[test]
fn a_member_that_asks_again_before_the_next_quorum_gets_one_of_a_new_id() {
    let (mut scene, first) = Scene::three();
    scene.pass(6 * SECOND, &ALIVE);
    let _back = scene.asks("r1:a", is(1, 1));
    let (_zero, mut two) = (scene.asks("r0:a", is(0, 1)), scene.asks("r2:a", is(2, 1)));
    let formed = quorum(&mut two);
    assert_eq!(ids(&formed), ["r0:a", "r1:a", "r2:a"]);
    assert!(formed.quorum_id > first, "the others were told that the first is over");
}

#[test]
fn an_evict_is_told_once_whatever_was_known_before() {
    let (mut scene, first) = Scene::three();
    let (mut news, _) = scene.registry.subscribe();
    scene.registry.evict(scene.now, 1, 1);
    scene.registry.evict(scene.now, 1, 1);
    scene.registry.evict(scene.now, 9, 1);
    assert_eq!(told(&mut news), [Gone { quorum_id: first, reason: "r1:a: evicted".into() }]);
    scene.pass(6 * SECOND, &ALIVE[..1]);
    assert_eq!(told(&mut news), [Gone { quorum_id: first, reason: "r2:a: silent 5.0 s".into() }]);
    scene.registry.evict(scene.now, 2, 1);
    assert_eq!(told(&mut news), [], "it was out already");
    let drops = scene.registry.snapshot(scene.now).counters.drops;
    assert_eq!((drops["evicted"], drops["silent"]), (1, 1));
}

#[test]
fn a_lighthouse_that_is_stopped_or_starved_blames_nobody() {
    let (mut scene, _) = Scene::three();
    let (mut news, _) = scene.registry.subscribe();
    for gap in [100 * SECOND, 7 * SECOND, SECOND, SECOND, SECOND, SECOND, SECOND, SECOND] {
        scene.now += gap;
        scene.registry.tick(scene.now);
    }
    assert_eq!(told(&mut news), []);
    assert_eq!(scene.registry.snapshot(scene.now).counters.pauses, 8);
    scene.pass(6 * SECOND, &ALIVE);
    assert_eq!(told(&mut news).len(), 1, "it does count while we listen");
}

#[test]
fn a_clock_that_was_read_before_the_lock_was_had_is_no_pause() {
    let (mut scene, _) = Scene::three();
    scene.pass(SECOND, &ALIVE);
    let late = scene.now - SECOND;
    scene.registry.heartbeat(late, 9, is(0, 1), "r0:a").expect("let in");
    scene.registry.tick(scene.now);
    assert_eq!(scene.registry.snapshot(scene.now).counters.pauses, 0);
}
