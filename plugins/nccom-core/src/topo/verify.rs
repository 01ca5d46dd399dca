//! `verifyTopology`: device sets the rings are made for (topology-and-rings 2.3, INV-43).

use super::error::TopoError;
use super::machine::RankInfo;
use super::system::{NodeType, System};
use std::collections::BTreeSet;

/// Numbers of local devices that are supported.
pub const LEGAL_DEVICE_COUNTS: [usize; 4] = [1, 4, 8, 16];

/// The variable that turns both checks off.
pub const DISABLE_VERIFY: &str = "CCOM_DBG_DISABLE_VERIFY_TOPOLOGY";

/// Checks the accelerators of the local ranks. Complete means: no gap between the lowest and the highest id, and
/// every one of them in the system graph. The two ids of the message are the first and the last missing one.
///
/// # Errors
/// [`TopoError::MissingDevices`], then [`TopoError::DeviceCount`].
pub fn verify(system: &System, local: &[&RankInfo], vars: &dyn Fn(&str) -> Option<String>) -> Result<(), TopoError> {
    if super::flag(vars, DISABLE_VERIFY) {
        return Ok(());
    }
    let wanted: BTreeSet<i32> = local.iter().map(|r| r.mla).collect();
    let ranked: BTreeSet<i32> =
        system.bucket(NodeType::Gpu).iter().filter_map(|n| system.gpu(*n)).map(|g| g.mla).collect();
    if let (Some(low), Some(high)) = (wanted.first(), wanted.last()) {
        // Counting instead of walking the range: ids come from peers and may be far apart.
        let complete = i64::from(*high) - i64::from(*low) + 1 == wanted.len() as i64;
        let absent: Vec<i32> = wanted.iter().copied().filter(|d| !ranked.contains(d)).collect();
        if !complete || !absent.is_empty() {
            let mut first = absent.first().copied();
            let mut last = absent.last().copied();
            let ids: Vec<i32> = wanted.iter().copied().collect();
            for gap in ids.windows(2).filter(|w| w[1] - 1 > w[0]) {
                first = Some(first.map_or(gap[0] + 1, |f| f.min(gap[0] + 1)));
                last = Some(last.map_or(gap[1] - 1, |l| l.max(gap[1] - 1)));
            }
            return Err(TopoError::MissingDevices { first: first.unwrap_or(*low), last: last.unwrap_or(*high) });
        }
    }
    if !LEGAL_DEVICE_COUNTS.contains(&wanted.len()) {
        return Err(TopoError::DeviceCount { found: wanted.len() });
    }
    Ok(())
}
