//! Frames and addresses: what goes in comes out, and what is no frame is refused without harm.

#![allow(missing_docs, clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;

use bytes::{Bytes, BytesMut};
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use sky_monarch_core::ErrorKind;
use sky_monarch_core::protocol::{Command, Hello, Report, SessionCommand, SessionReport, Welcome};
use sky_monarch_core::wire::{
    Acceptor, Address, Frame, FrameReader, FrameWriter, MAX_SEGMENTS, VERSION, decode,
};
use tokio::io::AsyncWriteExt;

const BOUND: u32 = 1 << 20;

async fn bytes_of(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    FrameWriter::new(&mut bytes, u32::MAX).write(frame).await.unwrap();
    bytes
}

fn some_frame(random: &mut StdRng) -> Frame {
    let mut blob = |most: usize| {
        let mut bytes = vec![0; random.random_range(0..=most)];
        random.fill_bytes(&mut bytes);
        Bytes::from(bytes)
    };
    let header = blob(300);
    let segments = (0..blob(5).len()).map(|_| blob(3000)).collect();
    Frame { header, segments }
}

#[tokio::test]
async fn frames_survive_any_way_of_being_cut_into_pieces() {
    for seed in 0..200 {
        let mut random = StdRng::seed_from_u64(seed);
        let frames: Vec<Frame> = (0..5).map(|_| some_frame(&mut random)).collect();
        let (mut near, far) = tokio::io::duplex(random.random_range(1..4000));
        let sent = frames.clone();
        let writing = tokio::spawn(async move {
            for frame in &sent {
                for piece in bytes_of(frame).await.chunks(random.random_range(1..600)) {
                    near.write_all(piece).await.unwrap();
                }
            }
        });
        let mut reader = FrameReader::new(far, BOUND);
        for frame in &frames {
            assert_eq!(reader.read().await.unwrap().as_ref(), Some(frame), "seed {seed}");
        }
        assert!(reader.read().await.unwrap().is_none(), "seed {seed}");
        writing.await.unwrap();
    }
}

#[tokio::test]
async fn random_and_damaged_bytes_never_panic_the_decoder() {
    for seed in 0..3000 {
        let mut random = StdRng::seed_from_u64(seed);
        let mut bytes = if seed % 2 == 0 {
            let mut noise = vec![0; random.random_range(0..400)];
            random.fill_bytes(&mut noise);
            // Half of the noise looks like a frame, so that what lies behind the first checks is reached.
            if seed % 4 == 0 && noise.len() > 5 {
                let len = u32::try_from(noise.len() - 4).unwrap();
                noise[..4].copy_from_slice(&len.to_le_bytes());
                noise[4] = VERSION;
            }
            noise
        } else {
            bytes_of(&some_frame(&mut random)).await
        };
        if !bytes.is_empty() {
            for _ in 0..random.random_range(0..4) {
                let at = random.random_range(0..bytes.len());
                bytes[at] = random.random();
            }
        }
        let mut buffer = BytesMut::from(&bytes[..]);
        while let Ok(Some(frame)) = decode(&mut buffer, BOUND) {
            drop(frame.message::<Hello>());
        }
    }
}

#[test]
fn random_headers_never_panic_any_message_type() {
    let seeds = [
        rmp_serde::to_vec_named(&Welcome { version: 1, refused: Some("no".into()) }).unwrap(),
        rmp_serde::to_vec_named(&SessionReport::Committed {
            step: 3,
            quorum_id: Some(4),
            participants: None,
            metrics: BTreeMap::from([("loss".to_owned(), 0.5)]),
        })
        .unwrap(),
        rmp_serde::to_vec_named(&Report::LogChunk { request: 1, offset: 2, data: vec![3; 30], eof: true })
            .unwrap(),
        rmp_serde::to_vec_named(&Command::Shutdown { grace_s: 1.0, reason: "over".into() }).unwrap(),
    ];
    for seed in 0..4000 {
        let mut random = StdRng::seed_from_u64(seed);
        let mut header = seeds[random.random_range(0..seeds.len())].clone();
        for _ in 0..random.random_range(0..6) {
            let at = random.random_range(0..header.len());
            header[at] = random.random();
        }
        header.truncate(random.random_range(0..=header.len()));
        let frame = Frame { header: header.into(), segments: Vec::new() };
        drop(frame.message::<Hello>());
        drop(frame.message::<Welcome>());
        drop(frame.message::<Command>());
        drop(frame.message::<Report>());
        drop(frame.message::<SessionReport>());
        drop(frame.message::<SessionCommand>());
    }
}

#[test]
fn deep_nesting_is_refused_before_it_spends_the_stack() {
    // Arrays of one element, a hundred thousand deep, in a field that nobody asked for.
    let mut header = vec![0x81, 0xa1, b'x'];
    header.extend(std::iter::repeat_n(0x91, 100_000));
    header.push(0xc0);
    let frame = Frame { header: header.into(), segments: Vec::new() };
    assert_eq!(frame.message::<Welcome>().unwrap_err().kind(), ErrorKind::Protocol);
    assert_eq!(frame.message::<SessionReport>().unwrap_err().kind(), ErrorKind::Protocol);
}

#[test]
fn bytes_after_a_message_are_refused() {
    let mut header = rmp_serde::to_vec_named(&SessionCommand::Release).unwrap();
    let frame = |header: &[u8]| Frame { header: Bytes::copy_from_slice(header), segments: Vec::new() };
    assert!(frame(&header).message::<SessionCommand>().is_ok());
    header.push(0xc0);
    let error = frame(&header).message::<SessionCommand>().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    assert!(error.to_string().contains("1 bytes follow"), "{error}");
}

#[test]
fn a_length_over_the_bound_is_refused_before_anything_is_allocated() {
    let mut buffer = BytesMut::from(&u32::MAX.to_le_bytes()[..]);
    let capacity = buffer.capacity();
    let error = decode(&mut buffer, BOUND).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooLarge);
    assert!(error.to_string().contains("4294967295 bytes; 1048576 are allowed"), "{error}");
    assert_eq!(buffer.capacity(), capacity);
    // One byte under and at the bound is a frame like any other.
    for (len, fits) in [(BOUND, true), (BOUND + 1, false)] {
        let mut buffer = BytesMut::from(&len.to_le_bytes()[..]);
        assert_eq!(decode(&mut buffer, BOUND).is_ok(), fits, "{len}");
    }
}

#[test]
fn another_layout_version_is_named_as_soon_as_its_byte_is_there() {
    let mut buffer = BytesMut::from(&[100, 0, 0, 0, 9][..]);
    let error = decode(&mut buffer, BOUND).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    assert!(error.to_string().contains("version 9; this side reads 1"), "{error}");
}

#[test]
fn the_writer_refuses_what_no_reader_would_take() {
    let many = Frame { header: Bytes::new(), segments: vec![Bytes::new(); MAX_SEGMENTS + 1] };
    assert_eq!(many.check(BOUND).unwrap_err().kind(), ErrorKind::TooLarge);
    let long = Frame { header: Bytes::from(vec![0; BOUND as usize]), segments: Vec::new() };
    assert_eq!(long.check(BOUND).unwrap_err().kind(), ErrorKind::TooLarge);
}

#[tokio::test]
async fn an_end_inside_a_frame_is_told_from_an_end_between_frames() {
    let bytes = bytes_of(&Frame::from_message(&SessionCommand::Release).unwrap()).await;
    let mut whole = FrameReader::new(&bytes[..], BOUND);
    assert!(whole.read().await.unwrap().is_some());
    assert!(whole.read().await.unwrap().is_none());
    for cut in 1..bytes.len() {
        let error = FrameReader::new(&bytes[..cut], BOUND).read().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed, "after {cut} bytes");
    }
}

#[test]
fn addresses_are_read_and_written_the_same_way() {
    for text in ["unix:/run/x.sock", "tls:127.0.0.1:0", "tls:head.example:29510", "tls:[::1]:7"] {
        assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
    }
    let long = format!("unix:/{}", "x".repeat(107));
    for text in [
        "",
        "unix:",
        "unix:relative",
        "unix:/a\0b",
        &long,
        "tcp:127.0.0.1:1",
        "tls:",
        "tls:host",
        "tls::1",
        "tls:host:65536",
        "tls:host:-1",
        "tls:::1:7",
        "tls:[x]:1",
        "tls:a@b:1",
        "http://127.0.0.1:1",
    ] {
        let error = text.parse::<Address>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{text:?}");
    }
}

#[tokio::test]
async fn a_unix_socket_is_private_replaces_a_dead_one_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.sock");
    let address: Address = format!("unix:{}", path.display()).parse().unwrap();

    let first = Acceptor::bind(&address, None).await.unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let taken = Acceptor::bind(&address, None).await.unwrap_err();
    assert_eq!(taken.kind(), ErrorKind::Io);
    assert!(taken.to_string().contains(path.to_str().unwrap()), "{taken}");
    drop(first);
    assert!(!path.exists());

    // A socket whose process died is still there, and nobody answers.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let second = Acceptor::bind(&address, None).await.unwrap();

    // A successor's socket is not removed by the end of its predecessor.
    std::fs::remove_file(&path).unwrap();
    let third = Acceptor::bind(&address, None).await.unwrap();
    drop(second);
    assert!(path.exists());
    drop(third);
    assert!(!path.exists());

    // What is no socket is never removed.
    std::fs::write(&path, "precious").unwrap();
    assert_eq!(Acceptor::bind(&address, None).await.unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
}
