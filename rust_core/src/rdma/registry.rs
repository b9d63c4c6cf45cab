//! What this process has registered, who may use it, and who is using it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rand::Rng;

use super::handle::Access;
use super::memory::Memory;
use super::verbs::{self, Fabric, Region, Rights};
use crate::{Error, ErrorKind, Result};

/// Registrations that one process may have at a time.
const MOST: usize = 65_536;

/// What an operation wants to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Read,
    Write,
}

/// One registration. Its memory lives as long as anybody uses it.
#[derive(Debug)]
pub(super) struct Registration {
    /// For RDMA, since the first peer that comes by it. Above the memory, so that they end before it.
    regions: OnceLock<Option<Vec<Region>>>,
    pub memory: Memory,
    pub access: Access,
    pub epoch: u64,
    usage: Mutex<Usage>,
    free: Condvar,
}

#[derive(Debug, Default)]
struct Usage {
    readers: usize,
    writers: usize,
    withdrawn: bool,
    /// The owner has waited long enough: what is still being read does not count any more.
    revoked: bool,
}

/// The right to use a registration, until dropped.
#[derive(Debug)]
pub(super) struct Lease {
    registration: Arc<Registration>,
    purpose: Purpose,
}

impl Lease {
    pub(super) fn memory(&self) -> &Memory {
        &self.registration.memory
    }

    /// The memory as peers reach it by RDMA: registered once, for all of them. None where it has to be staged.
    pub(super) fn regions(&self, fabric: &Arc<Fabric>) -> Result<Option<&[Region]>> {
        let registration = &self.registration;
        if let Some(regions) = registration.regions.get() {
            return Ok(regions.as_deref());
        }
        let rights = match registration.access {
            Access::Read => Rights::RemoteRead,
            Access::ReadWrite => Rights::RemoteWrite,
        };
        // Two that come at a time do it twice, and one of them for nothing.
        let made = verbs::regions(fabric, &registration.memory, rights)?;
        Ok(registration.regions.get_or_init(|| made).as_deref())
    }

    /// Whether what was done under it counts: the owner may have gone on without waiting for it.
    pub(super) fn check(&self) -> Result<()> {
        if lock(&self.registration.usage).revoked {
            return Err(stale("its owner has withdrawn it meanwhile"));
        }
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut usage = lock(&self.registration.usage);
        match self.purpose {
            Purpose::Read => usage.readers -= 1,
            Purpose::Write => usage.writers -= 1,
        }
        self.registration.free.notify_all();
    }
}

/// All registrations of a domain, by token.
#[derive(Debug, Default)]
pub(super) struct Registry {
    by_token: Mutex<HashMap<u64, Arc<Registration>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds these locks can leave what they guard half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn stale(why: &str) -> Error {
    Error::new(ErrorKind::Stale, "use registered memory", why)
}

impl Registry {
    /// Takes `memory`, and returns its token.
    pub(super) fn register(&self, memory: Memory, access: Access, epoch: u64) -> Result<u64> {
        let registration = Arc::new(Registration {
            regions: OnceLock::new(),
            memory,
            access,
            epoch,
            usage: Mutex::default(),
            free: Condvar::new(),
        });
        let mut by_token = lock(&self.by_token);
        if by_token.len() >= MOST {
            let why = format!("{MOST} ranges are registered already");
            return Err(Error::new(ErrorKind::TooLarge, "register memory", why));
        }
        loop {
            let token: u64 = rand::rng().random();
            if let Entry::Vacant(free) = by_token.entry(token) {
                free.insert(registration);
                return Ok(token);
            }
        }
    }

    /// Checks token, epoch, rights and range, and holds the memory until the lease is dropped.
    pub(super) fn lease(&self, token: u64, epoch: u64, purpose: Purpose, range: (u64, u64)) -> Result<Lease> {
        let found = lock(&self.by_token).get(&token).cloned();
        let registration = found.ok_or_else(|| stale("it is not registered, or not any more"))?;
        if registration.epoch != epoch && !crate::agent::mutant::is_on("ignore_epoch") {
            return Err(stale(&format!("it is of epoch {}, not {epoch}", registration.epoch)));
        }
        if purpose == Purpose::Write && registration.access != Access::ReadWrite {
            return Err(Error::new(
                ErrorKind::Forbidden,
                "use registered memory",
                "it is not to be written to",
            ));
        }
        registration.memory.parts(range.0, range.1, 0)?;
        {
            let mut usage = lock(&registration.usage);
            if usage.withdrawn {
                return Err(stale("its owner has withdrawn it"));
            }
            match purpose {
                Purpose::Read => usage.readers += 1,
                Purpose::Write => usage.writers += 1,
            }
        }
        Ok(Lease { registration, purpose })
    }

    /// Withdraws a registration: refuses new operations, and waits for those under way.
    ///
    /// After `limit` those that read are revoked: they fail, whatever they have read. [`ErrorKind::TimedOut`] where
    /// something may still be *written* then; its memory stays alive until that has ended. True if something was revoked.
    pub(super) fn deregister(&self, token: u64, limit: Duration) -> Result<bool> {
        let Some(registration) = lock(&self.by_token).remove(&token) else { return Ok(false) };
        let deadline = Instant::now() + limit;
        let mut usage = lock(&registration.usage);
        usage.withdrawn = true;
        if crate::agent::mutant::is_on("withdraw_at_once") {
            return Ok(false);
        }
        while usage.readers + usage.writers > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                usage.revoked = true;
                if usage.writers == 0 {
                    return Ok(true);
                }
                let why = format!("{} operations may still write to it", usage.writers);
                return Err(Error::new(ErrorKind::TimedOut, "deregister memory", why));
            }
            usage = registration.free.wait_timeout(usage, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::super::memory::Segment;
    use super::*;

    struct Owner(Arc<AtomicBool>);

    impl Drop for Owner {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    fn registered(access: Access) -> (Registry, u64, Arc<AtomicBool>) {
        let (registry, freed) = (Registry::default(), Arc::new(AtomicBool::new(false)));
        let segment = Segment { address: 0x1000, length: 100 };
        // SAFETY: nothing here reads it.
        let memory = unsafe { Memory::new([segment], Owner(Arc::clone(&freed))) }.expect("valid");
        let token = registry.register(memory, access, 7).expect("room");
        (registry, token, freed)
    }

    fn kind(outcome: Result<Lease>) -> ErrorKind {
        outcome.expect_err("refused").kind()
    }

    #[test]
    fn each_wrong_request_is_refused_by_its_kind() {
        let (registry, token, _) = registered(Access::Read);
        assert_eq!(kind(registry.lease(token ^ 1, 7, Purpose::Read, (0, 1))), ErrorKind::Stale);
        assert_eq!(kind(registry.lease(token, 8, Purpose::Read, (0, 1))), ErrorKind::Stale);
        assert_eq!(kind(registry.lease(token, 7, Purpose::Write, (0, 1))), ErrorKind::Forbidden);
        assert_eq!(kind(registry.lease(token, 7, Purpose::Read, (99, 2))), ErrorKind::OutOfBounds);
        registry.lease(token, 7, Purpose::Read, (0, 100)).expect("all of it").check().expect("counts");
    }

    #[test]
    fn an_owner_frees_nothing_that_an_operation_uses() {
        let (registry, token, freed) = registered(Access::ReadWrite);
        let lease = registry.lease(token, 7, Purpose::Write, (0, 100)).expect("allowed");
        let late = registry.deregister(token, Duration::from_millis(20)).expect_err("in use");
        assert_eq!(late.kind(), ErrorKind::TimedOut);
        assert!(!freed.load(Ordering::SeqCst));
        assert_eq!(kind(registry.lease(token, 7, Purpose::Read, (0, 1))), ErrorKind::Stale, "no new ones");
        drop(lease);
        assert!(freed.load(Ordering::SeqCst), "with the last operation");
    }

    #[test]
    fn a_reader_that_does_not_end_is_revoked() {
        let (registry, token, _) = registered(Access::Read);
        let lease = registry.lease(token, 7, Purpose::Read, (0, 100)).expect("allowed");
        assert!(registry.deregister(token, Duration::from_millis(20)).expect("goes on"));
        assert_eq!(lease.check().expect_err("too late").kind(), ErrorKind::Stale);
    }

    #[test]
    fn the_owner_waits_for_a_reader_that_ends_in_time() {
        let (registry, token, _) = registered(Access::Read);
        let lease = registry.lease(token, 7, Purpose::Read, (0, 100)).expect("allowed");
        let reader = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            lease.check()
        });
        assert!(!registry.deregister(token, Duration::from_secs(10)).expect("waited"));
        reader.join().expect("no panic").expect("what it has read counts");
    }
}
