//! Flight records for people: read from control segments, written where the user asked for them when a communicator fails.

use std::fmt::Write;
use std::path::Path;

use hw_bridge::exec::sequencer::OpError;
use hw_bridge::group::Control;

use sandbox::objects::CommCore;

fn section(text: &mut String, control: &Control) {
    let (rank, n) = control.who();
    // Writing into a string cannot fail.
    let _ = writeln!(text, "rank {rank} of {n}, pid {}: {}", control.pid(), control.standing());
    for (lane, r) in control.records() {
        let at = r.start_ns as f64 / 1e9;
        let _ = match lane {
            0 => writeln!(text, "  {at:.6} {r}"),
            _ => writeln!(text, "  {at:.6} stream {} {r}", lane - 1),
        };
    }
}

/// Writes what this rank and its linked peers did last to a file in `dir`, and says so in the log.
pub(super) fn write(core: &CommCore, dir: Option<&Path>, error: &OpError) {
    let Some(dir) = dir else {
        tracing::info!(
            comm = core.id,
            rank = core.rank,
            "set WCCL_FLIGHT_DIR to have the last operations written to a file"
        );
        return;
    };
    let mut text = format!("{error}\n\nTimes are seconds of the monotonic clock.\n\n");
    section(&mut text, core.endpoint.control());
    core.endpoint.peer_controls().for_each(|c| section(&mut text, c));
    let (tenant, id, rank) = (core.tenant_id(), core.id, core.rank);
    let file = dir.join(format!("wccl-flight-{tenant}-{id}-{rank}-{}.txt", std::process::id()));
    // Never through what somebody else has put there.
    let written = std::fs::File::create_new(&file).and_then(|mut f| std::io::Write::write_all(&mut f, text.as_bytes()));
    match written {
        Ok(()) => tracing::warn!("the last operations of rank {} and its peers are in {}", core.rank, file.display()),
        Err(e) => {
            tracing::warn!("the flight records of rank {} could not be written to {}: {e}", core.rank, file.display())
        }
    }
}
