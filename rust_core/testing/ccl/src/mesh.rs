//! A socket to every other rank.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::Transfer;
use crate::reduce::{finish, reduce};

const PAUSE: Duration = Duration::from_millis(2);

pub struct Mesh {
    pub rank: usize,
    pub ranks: usize,
    peers: Vec<Option<UnixStream>>,
    aborted: Arc<AtomicBool>,
}

impl Mesh {
    /// Meet every other rank under a name: each dials those before it and is dialled by those after it.
    pub fn meet(name: &str, rank: usize, ranks: usize, aborted: &Arc<AtomicBool>) -> Result<Self> {
        let address = |rank: usize| SocketAddr::from_abstract_name(format!("sky-double-{name}-{rank}"));
        let listener = UnixListener::bind_addr(&address(rank)?)?;
        listener.set_nonblocking(true)?;
        let mut peers: Vec<Option<UnixStream>> = (0..ranks).map(|_| None).collect();
        for (other, place) in peers.iter_mut().enumerate().take(rank) {
            let mut stream = retry(aborted, || UnixStream::connect_addr(&address(other)?))?;
            stream.write_all(&(rank as u32).to_le_bytes())?;
            *place = Some(stream);
        }
        for _ in rank + 1..ranks {
            let (mut stream, _) = retry(aborted, || listener.accept())?;
            stream.set_nonblocking(false)?;
            let mut who = [0; 4];
            stream.read_exact(&mut who)?;
            peers[u32::from_le_bytes(who) as usize] = Some(stream);
        }
        for stream in peers.iter().flatten() {
            stream.set_read_timeout(Some(PAUSE))?;
            stream.set_write_timeout(Some(PAUSE))?;
        }
        Ok(Self { rank, ranks, peers, aborted: aborted.clone() })
    }

    pub fn send(&mut self, to: usize, bytes: &[u8]) -> Result<()> {
        send(self.peer(to)?, bytes, &self.aborted)
    }

    /// Read all of it, unless the communicator is aborted before.
    pub fn receive(&mut self, from: usize, into: &mut [u8]) -> Result<()> {
        receive(self.peer(from)?, into, &self.aborted)
    }

    /// All at once: a thread for each peer and direction, in the order of the calls.
    pub fn exchange(&mut self, transfers: Vec<Transfer>) -> Result<()> {
        let mut sends: Vec<Vec<&[u8]>> = vec![Vec::new(); self.ranks];
        let mut receives: Vec<Vec<&mut [u8]>> = (0..self.ranks).map(|_| Vec::new()).collect();
        for transfer in transfers {
            match transfer {
                Transfer::Send(to, bytes) => sends[to].push(bytes),
                Transfer::Receive(from, into) => receives[from].push(into),
            }
        }
        for (into, bytes) in receives[self.rank].drain(..).zip(sends[self.rank].drain(..)) {
            into.copy_from_slice(bytes);
        }
        let aborted = &self.aborted;
        std::thread::scope(|scope| {
            let mut under_way = Vec::new();
            for (peer, (sends, receives)) in sends.into_iter().zip(receives).enumerate() {
                if sends.is_empty() && receives.is_empty() {
                    continue;
                }
                let stream = self.peer(peer)?;
                under_way.push(
                    scope.spawn(move || sends.into_iter().try_for_each(|bytes| send(stream, bytes, aborted))),
                );
                under_way.push(
                    scope.spawn(move || {
                        receives.into_iter().try_for_each(|into| receive(stream, into, aborted))
                    }),
                );
            }
            under_way
                .into_iter()
                .try_for_each(|one| one.join().unwrap_or_else(|_| Err(Error::other("a thread panicked"))))
        })
    }

    /// Rank 0 collects, reduces in the order of ranks, and hands out: every rank gets the same bits.
    pub fn all_reduce(&mut self, send: &[u8], receive: &mut [u8], dtype: i32, op: i32) -> Result<()> {
        if self.rank != 0 {
            self.send(0, send)?;
            return self.receive(0, receive);
        }
        let mut all = send.to_vec();
        let mut other = vec![0; send.len()];
        for rank in 1..self.ranks {
            self.receive(rank, &mut other)?;
            reduce(&mut all, &other, dtype, op);
        }
        finish(&mut all, self.ranks, dtype, op);
        for rank in 1..self.ranks {
            self.send(rank, &all)?;
        }
        receive.copy_from_slice(&all);
        Ok(())
    }

    pub fn broadcast(&mut self, send: &[u8], receive: &mut [u8], root: usize) -> Result<()> {
        if self.rank != root {
            return self.receive(root, receive);
        }
        for rank in (0..self.ranks).filter(|rank| *rank != root) {
            self.send(rank, send)?;
        }
        receive.copy_from_slice(send);
        Ok(())
    }

    fn peer(&self, rank: usize) -> Result<&UnixStream> {
        self.peers.get(rank).and_then(Option::as_ref).ok_or_else(|| Error::other("no such peer"))
    }
}

fn send(mut stream: &UnixStream, bytes: &[u8], aborted: &AtomicBool) -> Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match stream.write(&bytes[done..]) {
            Ok(count) => done += count,
            Err(error) if is_pause(&error) && !aborted.load(Ordering::SeqCst) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn receive(mut stream: &UnixStream, into: &mut [u8], aborted: &AtomicBool) -> Result<()> {
    let mut done = 0;
    while done < into.len() {
        match stream.read(&mut into[done..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => done += count,
            Err(error) if is_pause(&error) && !aborted.load(Ordering::SeqCst) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn is_pause(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// A rank that does not come is waited for until the communicator is aborted.
fn retry<T>(aborted: &AtomicBool, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match attempt() {
            Ok(value) => return Ok(value),
            Err(error) if aborted.load(Ordering::SeqCst) => return Err(error),
            Err(error) if is_pause(&error) || error.kind() == ErrorKind::ConnectionRefused => {
                std::thread::sleep(PAUSE)
            }
            Err(error) => return Err(error),
        }
    }
}
