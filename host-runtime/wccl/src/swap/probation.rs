//! What becomes of the library that served before: it stays beside the new one for a while, and serves again if that stops.

use std::time::{Duration, Instant};

use crate::swap::coordinate::{Order, coordinate};
use crate::swap::{Kind, Swaps};
use hw_bridge::os::lock::lock;

/// The least pause before a swap that goes back is tried again; it doubles. Another rank may try it too, or stand still for a
/// moment.
const PAUSE: Duration = Duration::from_millis(20);

/// Waits for the end of probation, on the thread that made swap `swap`, and retires the old library; goes back if an instance
/// of the new one stops before, whatever it was for: a communicator that is gone or was never made is as good a sign. The
/// thread is unparked when one stops, when a swap ends, and when the runtime closes.
pub(super) fn watch(swaps: &Swaps, swap: u64) {
    let (tenant, roster) = (&swaps.host.tenant, &swaps.host.roster);
    tenant.supervisor.wake_me();
    // Two processes that try at once should not do so again.
    let mut pause = PAUSE + Duration::from_millis(u64::from(std::process::id() % 100));
    let mut next = Instant::now();
    loop {
        let state = lock(&swaps.state);
        // What failed in going back is another swap's, whose thread looks after itself.
        let Some(p) = roster.probation().filter(|p| p.swap == swap && !state.closing) else { return };
        if p.left.is_zero() && state.current.is_none() {
            let retired = roster.park(None);
            drop(state);
            // Not under the lock: it ends instances.
            drop(retired);
            return;
        }
        drop(state);
        let (stops, last) = tenant.supervisor.stops(&p.successor.digest);
        let patience = next.saturating_duration_since(Instant::now());
        if stops == p.stops || !patience.is_zero() || p.left.is_zero() {
            let wait = if stops == p.stops { p.left } else { p.left.min(patience) };
            // At least for a moment: the time may be over while a swap that goes back is under way.
            std::thread::park_timeout(wait.max(PAUSE));
            continue;
        }
        let why = format!("the new plugin {} stopped in pid {}: {last}", p.successor.name, std::process::id());
        go_back(&tenant.name, &why);
        next = Instant::now() + pause;
        pause *= 2;
    }
}

fn go_back(tenant: &str, why: &str) {
    tracing::error!(tenant = %tenant, "{why}; going back to the plugin before");
    let order = Order { why: why.into(), plugin: None, ..Order::new(tenant, Kind::Transport) };
    match coordinate(&order) {
        Ok(report) if report.committed => {}
        Ok(report) => tracing::error!(tenant = %tenant, "going back failed: {}", report.reason),
        Err(e) => tracing::error!(tenant = %tenant, "going back failed: {e}"),
    }
}
