//! What an owner announces to those who do not know its handles yet.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::protocol::{MAX_NAME, MAX_TEXT};
use crate::{Error, ErrorKind, Result};

/// Announcements that stand at a time.
const MOST: usize = 256;

/// Texts by name, each with a serial number that only grows.
#[derive(Debug, Default)]
pub(super) struct Board {
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    texts: HashMap<String, (u64, String)>,
    /// Whatever has this serial number or a lower one is over.
    past: Option<u64>,
    closed: bool,
}

impl Board {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets peers find `text`, in place of what had this name.
    pub(super) fn announce(&self, name: &str, serial: u64, text: &str) -> Result<()> {
        let refuse = |kind, why: String| Err(Error::new(kind, "announce a handle", why));
        if name.len() > MAX_NAME || text.len() > MAX_TEXT {
            return refuse(ErrorKind::TooLarge, format!("{MAX_NAME} and {MAX_TEXT} bytes are allowed"));
        }
        let mut inner = self.lock();
        if inner.past.is_some_and(|past| serial <= past) {
            return refuse(ErrorKind::Stale, format!("{serial} is over"));
        }
        if inner.texts.len() >= MOST && !inner.texts.contains_key(name) {
            return refuse(ErrorKind::TooLarge, format!("{MOST} are announced already"));
        }
        inner.texts.insert(name.to_owned(), (serial, text.to_owned()));
        self.changed.notify_all();
        Ok(())
    }

    /// Takes back what was announced up to `serial`; who waits for any of it hears so.
    pub(super) fn retract(&self, serial: u64) {
        let mut inner = self.lock();
        inner.past = inner.past.max(Some(serial));
        inner.texts.retain(|_, (theirs, _)| *theirs > serial);
        self.changed.notify_all();
    }

    /// Wakes all who wait, with nothing.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// The text of `name` with `serial`, as soon as it is there.
    pub(super) fn lookup(&self, name: &str, serial: u64, deadline: Instant) -> Result<String> {
        let refuse = |kind, why: &str| Err(Error::new(kind, "look a handle up", why));
        let mut inner = self.lock();
        loop {
            if let Some((theirs, text)) = inner.texts.get(name)
                && *theirs == serial
            {
                return Ok(text.clone());
            }
            if inner.closed || inner.past.is_some_and(|past| serial <= past) {
                return refuse(ErrorKind::Stale, "its owner has gone on");
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return refuse(ErrorKind::TimedOut, "its owner has announced nothing");
            }
            inner = self.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    fn in_ms(ms: u64) -> Instant {
        Instant::now() + Duration::from_millis(ms)
    }

    #[test]
    fn what_is_waited_for_comes_or_is_over() {
        let board = Arc::new(Board::default());
        assert_eq!(board.lookup("a", 1, in_ms(5)).expect_err("nothing").kind(), ErrorKind::TimedOut);
        let waiting = |name: &'static str, serial| {
            let board = Arc::clone(&board);
            std::thread::spawn(move || board.lookup(name, serial, in_ms(10_000)))
        };
        let (comes, over) = (waiting("a", 5), waiting("b", 4));
        board.announce("a", 5, "text").expect("room");
        board.retract(4);
        assert_eq!(comes.join().expect("no panic").expect("there"), "text");
        assert_eq!(over.join().expect("no panic").expect_err("over").kind(), ErrorKind::Stale);
        assert_eq!(board.announce("a", 4, "old").expect_err("over").kind(), ErrorKind::Stale);
    }

    #[test]
    fn an_announcement_is_of_its_serial_number_alone() {
        let board = Board::default();
        board.announce("a", 5, "text").expect("room");
        assert_eq!(board.lookup("a", 6, in_ms(5)).expect_err("another").kind(), ErrorKind::TimedOut);
    }
}
