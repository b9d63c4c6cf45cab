//! The thread that looks at a communicator: nobody who calls has to wait for an error to meet it.

use std::time::Duration;

use super::shared::{Shared, overdue};
use crate::agent::mutant;
use crate::gpu::GpuError;
use crate::gpu::abi::ccl::CclResult;

/// Between two looks, where something is under way and where nothing is.
const BUSY: Duration = Duration::from_millis(5);
const IDLE: Duration = Duration::from_millis(50);

/// Look until the communicator is over.
pub fn watch(shared: &Shared) {
    loop {
        if mutant::is_on("comm_unwatched") {
            return;
        }
        let mut state = shared.state();
        let Some(said) = shared.asked(&state) else { return };
        let limit = shared.options.operation_limit;
        let settled = state.pending.settle();
        let oldest = state.calling.or_else(|| state.pending.oldest());
        let failed = match (said, settled, oldest) {
            (CclResult::SUCCESS | CclResult::IN_PROGRESS, Ok(()), Some((what, since)))
                if since.elapsed() > limit =>
            {
                Some(overdue(what, limit))
            }
            (CclResult::SUCCESS | CclResult::IN_PROGRESS, Ok(()), _) => None,
            // The device's own word is the better one: the library fails because of it.
            (_, Err(error), _) => Some(error),
            (code, Ok(()), _) => Some(asynchronous(shared, code)),
        };
        if let Some(error) = failed {
            drop(state);
            let lost = shared.fail(error);
            tracing::warn!(error = %lost, "a communicator is lost");
            return;
        }
        let pause = if oldest.is_some() { BUSY } else { IDLE };
        // Woken when it is over.
        drop(shared.changed.wait_timeout(state, pause));
    }
}

fn asynchronous(shared: &Shared, code: CclResult) -> GpuError {
    shared.error_of("ncclCommGetAsyncError", code, false)
}
