//! A round of answers that the death of a lighthouse has split.

use super::super::split::PATIENCE;
use super::*;

/// Members of a quorum under a lighthouse that has just taken over.
fn restored() -> (Scene, i64, broadcast::Receiver<Gone>) {
    let (before, quorum_id) = Scene::three();
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("state");
    let mut ledger = Ledger::open(Some(&path), "run").expect("fresh");
    ledger.entry = before.registry.ledger.entry.clone();
    ledger.store().expect("stored");
    let scene = Scene::with_ledger(2, 3, Ledger::open(Some(&path), "run").expect("read"));
    let (news, standing) = scene.registry.subscribe();
    assert_eq!(standing, None);
    (scene, quorum_id, news)
}

const ALL: [(&str, u32); 3] = [("r0:a", 0), ("r1:a", 1), ("r2:a", 2)];

fn alive() -> Vec<(&'static str, Option<Identity>)> {
    ALL.map(|(id, replica)| (id, is(replica, 1))).to_vec()
}

#[test]
fn members_that_do_not_ask_while_others_do_are_cut_loose_once_and_whoever_dials_late_hears_it_too() {
    let (mut scene, quorum_id, mut news) = restored();
    let _first = scene.asks("r0:a", is(0, 1));
    let due = scene.registry.recheck_at().expect("it will look by itself");
    assert!(due <= scene.now + PATIENCE, "a timer that comes late is no remedy");
    scene.now = due - Duration::from_millis(1);
    scene.registry.tick(scene.now);
    assert!(news.try_recv().is_err(), "they may be about to ask");
    scene.now = due;
    scene.registry.tick(scene.now);
    let gone = news.try_recv().expect("news");
    assert_eq!(gone.quorum_id, quorum_id);
    assert!(gone.reason.ends_with("r1:a, r2:a"), "{}", gone.reason);
    scene.pass(PATIENCE * 10, &alive());
    assert!(news.try_recv().is_err(), "it is said once");
    assert_eq!(scene.registry.subscribe().1, Some(gone));

    let mut late = [scene.asks("r1:a", is(1, 1)), scene.asks("r2:a", is(2, 1))];
    assert!(quorum(&mut late[0]).quorum_id > quorum_id, "what they were cut off from is over");
    assert_eq!(scene.registry.subscribe().1, None);
}

#[test]
fn members_that_all_ask_or_are_all_busy_are_left_alone() {
    let (mut scene, quorum_id, mut news) = restored();
    scene.pass(PATIENCE * 10, &alive());
    let mut waiting = ALL.map(|(id, replica)| scene.asks(id, is(replica, 1)));
    let next = waiting.each_mut().map(quorum);
    assert!(next.iter().all(|one| one.quorum_id > quorum_id));
    // A restart long ago excuses nobody: from here on, members that do not ask are merely slow.
    let _first = scene.asks("r0:a", is(0, 1));
    scene.pass(PATIENCE * 10, &alive());
    assert!(news.try_recv().is_err());
}

#[test]
fn the_first_quorum_of_all_has_no_split_round_before_it() {
    let mut scene = Scene::new(2, 3);
    let (mut news, _) = scene.registry.subscribe();
    let _first = scene.asks("r0:a", is(0, 1));
    scene.pass(PATIENCE * 10, &alive());
    assert!(news.try_recv().is_err());
}
