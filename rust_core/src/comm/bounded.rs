//! Calls that may never return.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::agent::mutant;

/// Exit code of a process that ended itself because a device or its library did not give it back (EX_TEMPFAIL).
pub const WEDGED: i32 = 75;

/// Between two looks: short at first, as most things take microseconds.
const FIRST_LOOK: Duration = Duration::from_micros(20);
const LAST_LOOK: Duration = Duration::from_millis(2);

/// Pauses that double.
pub struct Looks {
    begun: Instant,
    pause: Duration,
}

impl Looks {
    pub fn new() -> Self {
        Self { begun: Instant::now(), pause: FIRST_LOOK }
    }

    /// How long it has been.
    pub fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Pause until the next look.
    pub fn pause(&mut self) {
        std::thread::sleep(self.pause);
        self.pause = (self.pause * 2).min(LAST_LOOK);
    }
}

/// Run a call of a library in a thread of its own; where it does not return in time, this process ends itself. The thread
/// cannot be ended, and what it holds of the device comes back with the process alone.
pub fn or_end<T: Send + 'static>(
    what: &str,
    limit: Duration,
    call: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (done, outcome) = mpsc::sync_channel(1);
    std::thread::spawn(move || {
        // Nobody may wait any more: then the process ends anyway.
        let _unheard = done.send(call());
    });
    match outcome.recv_timeout(limit) {
        Ok(value) => value,
        Err(_) => end_process(what, limit),
    }
}

/// End this process at once, with one line that says why.
pub fn end_process(what: &str, limit: Duration) -> ! {
    let line = format!(
        "sky-monarch: {what} did not end within {:.1} s: only the end of this process gives its device back (exit code \
         {WEDGED})\n",
        limit.as_secs_f64()
    );
    tracing::error!(what, limit_s = limit.as_secs_f64(), "a device is not given back: this process ends");
    let code = if mutant::is_on("comm_ends_as_done") { 0 } else { WEDGED };
    // SAFETY: writes bytes of ours; `_exit` runs nothing of the libraries, whose clean-up would wait for the device.
    unsafe {
        libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len());
        libc::_exit(code)
    }
}
