//! What becomes of the library that served before: it stays beside the new one for a while, and serves again if that traps.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Kind;
use super::coordinate::{Order, coordinate};
use crate::nrt::Runtime;
use crate::tenant::lock;

/// How often it is looked whether an instance has stopped.
const LOOK: Duration = Duration::from_millis(20);
/// How often a swap that goes back is tried: another rank may try it too, or stand still for a moment.
const TRIES: u32 = 5;

/// Waits for the end of probation, on the thread that made swap `swap`, and retires the old library; goes back if an instance
/// of the new one stops before. The tenant had counted `traps` before the swap.
pub(super) fn watch(runtime: Runtime, swap: u64, traps: u64) {
    let (swaps, counters) = (runtime.0.swaps.clone(), runtime.0.tenant.counters.clone());
    // The runtime lives by its users, not by this thread.
    let weak = Arc::downgrade(&runtime.0);
    drop(runtime);
    let mut tries = 0;
    let mut state = lock(&swaps.state);
    // What failed in going back is another swap's, whose thread looks after itself.
    while !state.closing && state.parked.as_ref().is_some_and(|p| p.swap == swap) {
        if state.current.is_none() && state.parked.as_ref().is_some_and(|p| p.until <= Instant::now()) {
            let retired = state.parked.take();
            drop(state);
            drop(retired);
            return;
        }
        drop(state);
        if tries < TRIES && counters.traps() != traps {
            let Some(runtime) = weak.upgrade().map(Runtime) else { return };
            if let Some(why) = stopped(&runtime) {
                tries += 1;
                go_back(&runtime, &why);
            }
        }
        state = lock(&swaps.state);
        // What woke it is looked at above.
        state = swaps.changed.wait_timeout(state, LOOK).unwrap_or_else(|p| p.into_inner()).0;
    }
}

/// What stopped an instance that serves, if anything did.
fn stopped(runtime: &Runtime) -> Option<String> {
    let of = |p: &Arc<crate::nrt::plane::Plane>| {
        let why = p.control().ok()?.0.stopped()?;
        Some(format!("the new plugin stopped for communicator {} of rank {}: {why}", p.core().id, p.core().rank))
    };
    runtime.0.swaps.planes().iter().find_map(of)
}

fn go_back(runtime: &Runtime, why: &str) {
    let tenant = &runtime.0.tenant.name;
    tracing::error!(tenant = %tenant, "{why}; going back to the plugin before");
    let order = Order { why: why.into(), plugin: None, ..Order::new(tenant, Kind::Transport) };
    match coordinate(&order) {
        Ok(report) if report.committed => {}
        Ok(report) => {
            tracing::error!(tenant = %tenant, "going back failed: {}", report.reason);
            // Two that try at once should not do so again.
            std::thread::sleep(LOOK + Duration::from_millis(u64::from(std::process::id() % 100)));
        }
        Err(e) => tracing::error!(tenant = %tenant, "going back failed: {e}"),
    }
}
