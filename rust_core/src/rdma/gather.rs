//! One range from several owners at once, piece by piece.
//!
//! Each owner has threads of its own, which take the next piece as soon as they are done with one: a fast owner gives
//! more. Pieces get smaller towards the end, so that no owner is waited for while the others have nothing left to give.
//! A piece that an owner does not give, or gives wrong, is read from another, and that owner is asked for nothing
//! more. What is right says the *truth*: the first owner, or after its end the next one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::connection::{Ask, Connection, DEVICE_STALL};
use super::handle::Handle;
use super::memory::{self, Memory, Place};
use super::path::{self, Path, PathKind};
use super::protocol::Op;
use super::server::Shared;
use super::staging::{self, Staging};
use crate::agent::mutant;
use crate::{Error, ErrorKind, Result};

const MIB: u64 = 1 << 20;
/// Bounds of a piece: what is worth a question, and what is lost with an owner.
const PIECE: (u64, u64) = (MIB, 16 * MIB);
/// A piece is this part of a thread's share of what is left: the last ones are short on all of them.
const SHARE: u64 = 2;
/// Threads together, where nobody says otherwise.
const THREADS: usize = 4;
/// An owner that gives less than this is as good as dead.
const SLOWEST_BYTES_PER_S: u64 = MIB;
const GRACE: Duration = Duration::from_secs(3);

/// How a range is moved.
#[derive(Clone, Debug)]
pub struct Options {
    /// The end of all of it.
    pub limit: Duration,
    /// Whether each piece is checked against the digest of the owner that decides.
    pub digest: bool,
    /// Whether a piece is left as it is where its digest is that of the owner that decides.
    pub keep: bool,
    /// Threads, and connections, for each owner; none for what is usual.
    pub streams: Option<usize>,
    /// None for the best one.
    pub path: Option<PathKind>,
    /// Set from elsewhere: no new piece is begun.
    pub cancelled: Arc<AtomicBool>,
}

impl Options {
    /// Checked, by the best path.
    pub fn new(limit: Duration) -> Self {
        Self { limit, digest: true, keep: false, streams: None, path: None, cancelled: Arc::default() }
    }
}

/// What was moved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// All of it.
    pub bytes: u64,
    /// By owner, in order.
    pub owners: Vec<OwnerReport>,
    /// Of them, those that were there already.
    pub kept: u64,
    /// Pieces that had to be moved again.
    pub again: u64,
}

/// What one owner gave.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnerReport {
    /// Bytes.
    pub bytes: u64,
    /// How they came; none where none came.
    pub path: Option<PathKind>,
    /// Why it was asked for nothing more; none where it did all it was asked for.
    pub lost: Option<String>,
}

struct Piece {
    offset: u64,
    length: u64,
}

/// What a thread keeps from one piece to the next.
#[derive(Default)]
struct Tools {
    path: Option<Box<dyn Path>>,
    /// Who decides, and the connection to it.
    truth: Option<(usize, Connection)>,
}

#[derive(Default)]
struct State {
    /// Nobody was asked for what lies from here on.
    next: u64,
    /// Given back.
    pending: Vec<Piece>,
    under_way: usize,
    truth: usize,
    report: Report,
    lost: Vec<Option<Error>>,
}

struct Work<'a> {
    near: &'a Shared,
    owners: &'a [Handle],
    /// Of the range in the owners.
    offset: u64,
    mine: &'a Memory,
    options: &'a Options,
    writes: bool,
    threads: u64,
    /// Of one piece.
    most: u64,
    deadline: Instant,
    state: Mutex<State>,
    changed: Condvar,
}

/// Fills `into` with the same range of `owners`.
pub(super) fn read(
    near: &Shared,
    owners: &[Handle],
    offset: u64,
    into: &Memory,
    options: &Options,
) -> Result<Report> {
    run(near, owners, offset, into, options, false)
}

/// Writes `from` into `owner`.
pub(super) fn write(
    near: &Shared,
    owner: &Handle,
    offset: u64,
    from: &Memory,
    options: &Options,
) -> Result<Report> {
    run(near, std::slice::from_ref(owner), offset, from, options, true)
}

fn run(
    near: &Shared,
    owners: &[Handle],
    offset: u64,
    mine: &Memory,
    options: &Options,
    writes: bool,
) -> Result<Report> {
    let total = mine.length();
    if owners.is_empty() {
        return Err(Error::new(ErrorKind::InvalidInput, MOVE, "there is no owner"));
    }
    if offset.checked_add(total).is_none() {
        return Err(Error::new(
            ErrorKind::OutOfBounds,
            MOVE,
            format!("bytes {offset} to {offset} + {total}"),
        ));
    }
    let streams = options.streams.unwrap_or(THREADS / owners.len()).clamp(1, 64);
    let streams = streams.min(usize::try_from(total.div_ceil(PIECE.0)).unwrap_or(64).max(1));
    // An empty range is asked for, too: the handle may be stale.
    let pending = if total == 0 { vec![Piece { offset: 0, length: 0 }] } else { Vec::new() };
    if !writes && !options.keep {
        mine.expect_all();
    }
    let threads = (owners.len() * streams) as u64;
    let most = if mine.is_of_host() { PIECE.1 } else { staging::MOST };
    let work = Work {
        near,
        owners,
        offset,
        mine,
        options,
        writes,
        threads,
        most,
        deadline: Instant::now() + options.limit,
        state: Mutex::new(State {
            pending,
            report: Report { owners: vec![OwnerReport::default(); owners.len()], ..Report::default() },
            lost: owners.iter().map(|_| None).collect(),
            ..State::default()
        }),
        changed: Condvar::new(),
    };
    if owners.len() * streams == 1 {
        work.with(0);
    } else {
        std::thread::scope(|scope| {
            for index in 0..owners.len() * streams {
                let work = &work;
                scope.spawn(move || work.with(index % owners.len()));
            }
        });
    }
    work.outcome()
}

const MOVE: &str = "move memory between processes";

impl Work<'_> {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One thread of one owner.
    fn with(&self, owner: usize) {
        let mut tools = Tools::default();
        while let Some(piece) = self.take(owner) {
            match self.piece(owner, &piece, &mut tools) {
                Ok(kind) => self.done(owner, &piece, kind),
                Err((at, error)) => self.give_back(piece, at, error),
            }
        }
    }

    /// The next piece for `owner`; none where it has nothing more to do.
    fn take(&self, owner: usize) -> Option<Piece> {
        let mut state = self.lock();
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if state.lost[owner].is_some() || left.is_zero() || self.options.cancelled.load(Ordering::Relaxed)
            {
                return None;
            }
            let piece = state.pending.pop().or_else(|| self.cut(&mut state));
            if piece.is_some() {
                state.under_way += 1;
                return piece;
            }
            if state.under_way == 0 {
                return None;
            }
            // What is under way may come back.
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The next piece of what nobody was asked for yet.
    fn cut(&self, state: &mut State) -> Option<Piece> {
        let left = self.mine.length() - state.next;
        let length = (left / self.threads / SHARE).clamp(PIECE.0, self.most).min(left);
        let offset = state.next;
        state.next += length;
        (length > 0).then_some(Piece { offset, length })
    }

    fn done(&self, owner: usize, piece: &Piece, moved: Option<PathKind>) {
        let mut state = self.lock();
        state.under_way -= 1;
        state.report.bytes += piece.length;
        match moved {
            Some(kind) => {
                let report = &mut state.report.owners[owner];
                report.bytes += piece.length;
                report.path = Some(kind);
            }
            None => state.report.kept += piece.length,
        }
        self.changed.notify_all();
    }

    /// Another owner is to move it: `at` has failed.
    fn give_back(&self, piece: Piece, at: usize, error: Error) {
        let mut state = self.lock();
        state.under_way -= 1;
        state.report.again += 1;
        if state.lost[at].is_none() {
            tracing::info!(address = %self.owners[at].address, %error, "an owner gives nothing more");
            state.report.owners[at].lost = Some(error.to_string());
            state.lost[at] = Some(error);
        }
        if let Some(next) = state.lost.iter().position(Option::is_none)
            && state.lost[state.truth].is_some()
        {
            state.truth = next;
        }
        if !mutant::is_on("forget_lost_pieces") {
            state.pending.push(piece);
        }
        self.changed.notify_all();
    }

    /// Moves a piece, and says how; none where it was there already. Who is to blame comes with the error.
    fn piece(
        &self,
        owner: usize,
        piece: &Piece,
        tools: &mut Tools,
    ) -> Result<Option<PathKind>, (usize, Error)> {
        let Tools { path, truth } = tools;
        let blame = |error| (owner, error);
        let handle = &self.owners[owner];
        let grace = if handle.device || !self.mine.is_of_host() { DEVICE_STALL } else { GRACE };
        let limit = grace + Duration::from_secs_f64(piece.length as f64 / SLOWEST_BYTES_PER_S as f64);
        let mut deadline = self.deadline.min(Instant::now() + limit);
        let path = match path {
            Some(open) => open,
            None => path.insert(path::open(handle, self.near, self.options.path, deadline).map_err(blame)?),
        };
        let (offset, length) = (self.offset + piece.offset, piece.length);
        let mut ask = Ask { handle, offset, length, digest: self.options.digest, deadline };
        let mine = self.mine.parts(piece.offset, piece.length, usize::MAX).map_err(blame)?;
        let taken = match self.mine.place() {
            // SAFETY: of an accelerator, as `of_device` was promised, and `self.mine` outlives the operation.
            Place::Device(runtime) => unsafe { path.takes_device(*runtime, &mine, &ask, self.writes) },
            Place::Host | Place::Carried(_) => false,
        };
        let mut staging = None;
        if !taken && !self.mine.is_of_host() {
            // The owner is not to blame for a wait for our own buffers.
            staging = Staging::of(&self.near.taken, self.mine, &mine, self.deadline).map_err(blame)?;
            deadline = self.deadline.min(Instant::now() + limit);
            ask.deadline = deadline;
        }
        let mine = staging.as_ref().map_or(mine, |staging| vec![staging.segment()]);
        if self.writes {
            if let Some(staging) = &mut staging {
                staging.fill().map_err(blame)?;
            }
            // SAFETY: a `Memory` can be read, or else what stands in for it.
            unsafe { path.write(&ask, &mine) }.map_err(blame)?;
            return Ok(Some(path.kind()));
        }
        let asked = self.ask_truth(owner, path.kind(), &ask, truth)?;
        let mut right = None;
        if self.options.keep {
            if let Some(staging) = &mut staging {
                staging.fill().map_err(blame)?;
            }
            // SAFETY: a `Memory` can be read. The owner that decides computes its own meanwhile.
            let here = unsafe { memory::digest(&mine) };
            right = Self::hear_truth(asked, truth, deadline)?;
            if right == Some(here) || mutant::is_on("keep_everything") {
                return Ok(None);
            }
        }
        // SAFETY: a `Memory` that is written to can be.
        let digest = unsafe { path.read(&ask, &mine) }.map_err(blame)?;
        if let Some(staging) = &mut staging {
            staging.drain().map_err(blame)?;
        }
        if right.is_none() {
            right = Self::hear_truth(asked, truth, deadline)?;
        }
        if right.is_some_and(|right| right != digest) && !mutant::is_on("trust_digests") {
            let why = "it gave other bytes than the owner that decides";
            return Err(blame(Error::new(ErrorKind::Corrupt, "read the memory of a peer", why)));
        }
        Ok(Some(path.kind()))
    }

    /// The answer of who decides, where it was asked.
    fn hear_truth(
        asked: Option<usize>,
        truth: &mut Option<(usize, Connection)>,
        deadline: Instant,
    ) -> Result<Option<u64>, (usize, Error)> {
        let (Some(judge), Some((_, connection))) = (asked, truth.as_mut()) else { return Ok(None) };
        let right = connection.socket.until(deadline, connection.stall).and_then(|()| connection.answer());
        right.map(Some).map_err(|error| (judge, error))
    }

    /// Asks who decides for the digest of a piece, which it computes while the piece is read.
    fn ask_truth(
        &self,
        owner: usize,
        kind: PathKind,
        ask: &Ask<'_>,
        open: &mut Option<(usize, Connection)>,
    ) -> Result<Option<usize>, (usize, Error)> {
        let truth = self.lock().truth;
        // Over TCP its own word comes with the bytes.
        let comes = truth == owner && kind == PathKind::Tcp;
        if !self.options.keep && (!self.options.digest || comes) {
            return Ok(None);
        }
        let handle = &self.owners[truth];
        let asking = || -> Result<()> {
            if open.as_ref().is_none_or(|(at, _)| *at != truth) {
                *open = Some((truth, Connection::open_for(handle, &self.near.secret, ask.deadline)?));
            }
            if let Some((_, connection)) = open {
                connection.socket.until(ask.deadline, connection.stall)?;
                connection.socket.write(&Ask { handle, ..*ask }.request(Op::Digest).encode())?;
            }
            Ok(())
        };
        let mut asking = asking;
        asking().map_err(|error| (truth, error))?;
        Ok(Some(truth))
    }

    fn outcome(self) -> Result<Report> {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        if state.pending.is_empty() && state.under_way == 0 && state.report.bytes == self.mine.length() {
            return Ok(state.report);
        }
        if self.options.cancelled.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Closed, MOVE, "it was cancelled"));
        }
        let errors: Vec<&Error> = state.lost.iter().flatten().collect();
        if errors.len() < self.owners.len() || errors.is_empty() {
            return Err(Error::new(ErrorKind::TimedOut, MOVE, "the deadline has passed"));
        }
        let reasons: Vec<String> = self
            .owners
            .iter()
            .zip(&errors)
            .map(|(owner, error)| format!("{}: {}", owner.address, error.message()))
            .collect();
        Err(Error::new(errors[0].kind(), MOVE, reasons.join("; ")))
    }
}
