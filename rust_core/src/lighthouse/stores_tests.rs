//! Without torch: what a quorum gets where no helper comes, and what answers at the port of a closed store.
//! `tests/integration/test_lighthouse_stores.py` has the real helper and real clients.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};

use super::*;

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const LONG: Duration = Duration::from_secs(20);

fn command(argv: &[&str]) -> Command {
    Command { argv: argv.iter().map(|word| (*word).to_owned()).collect(), path: None }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_no_helper_comes_a_quorum_gets_no_store_and_no_more_are_tried() {
    let folder = tempfile::tempdir().expect("folder");
    let tries = folder.path().join("tries");
    let script = format!("echo x >> {}", tries.display());
    let stores = Stores::default();
    let keeper = tokio::spawn(stores.clone().keep(LOOPBACK, None, command(&["sh", "-c", &script])));
    assert!(!tries.exists(), "nobody has asked for a store");
    stores.want();
    let count = || std::fs::read_to_string(&tries).map_or(0, |text| text.lines().count());
    let deadline = Instant::now() + LONG;
    while count() < MAX_FAILURES as usize {
        assert_eq!(stores.take(1), None);
        assert!(Instant::now() < deadline, "tried {} times", count());
        sleep(Duration::from_millis(10)).await;
    }
    sleep(FIRST_DELAY * 8).await;
    assert_eq!((count(), stores.take(2)), (MAX_FAILURES as usize, None));
    keeper.abort();
}

#[tokio::test]
async fn stores_are_served_on_loopback_or_where_the_configuration_says() {
    let stores = Stores::default();
    stores.want();
    let everywhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    // it would go on for ever: the program exists
    timeout(LONG, stores.clone().keep(everywhere, None, command(&["sleep", "1000"])))
        .await
        .expect("gives up");
    // And here it does.
    let keeping = stores.keep(everywhere, Some(LOOPBACK), command(&["sleep", "1000"]));
    timeout(Duration::from_millis(200), keeping).await.expect_err("waits for its helper");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_store_answers_the_greeting_and_hangs_up_on_the_first_question() {
    let listener = TcpListener::bind((LOOPBACK, 0)).expect("bound");
    let address = listener.local_addr().expect("address");
    let mut tombstones = Tombstones::default();
    tombstones.add(listener);
    let heard = tokio::task::spawn_blocking(move || {
        let mut client = TcpStream::connect(address).expect("connected");
        client.set_read_timeout(Some(LONG)).expect("set");
        client.write_all(&[0, 0xce, 0xf7, 0x85, 0x3c, 0x0d, 1, 2, 3, 4]).expect("greeted");
        let mut number = [0; 4];
        client.read_exact(&mut number).expect("answered");
        client.write_all(b"x").expect("asked");
        (number, client.read(&mut [0; 8]).expect("the end"))
    });
    assert_eq!(heard.await.expect("no panic"), ([1, 2, 3, 4], 0));
    drop(tombstones);
    let deadline = Instant::now() + LONG;
    while TcpStream::connect(address).is_ok() {
        assert!(Instant::now() < deadline, "its port is freed");
        sleep(Duration::from_millis(5)).await;
    }
}
