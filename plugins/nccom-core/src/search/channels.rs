//! What is derived from a finished graph: the network device of a channel and the point-to-point channels.

use super::Graph;
use crate::topo::limits::MAX_CHANNELS;
use crate::topo::{NodeType, PathType, System, TopoError};

/// `netDev`, exactly (topology-and-rings 7.2, INV-52): the head rank takes the first device of the channel's pair,
/// everyone else the second. Without a graph the nearest device. -1 means the node has none.
///
/// # Errors
/// [`TopoError::UnknownRank`] and [`TopoError::NoNet`] without a graph, or with one that has no channel.
pub fn net_dev(system: &System, rank: i32, graph: Option<&Graph>, channel: usize) -> Result<i32, TopoError> {
    let Some(graph) = graph.filter(|g| g.n_channels > 0) else {
        return system.nearest_net(rank);
    };
    let c = channel % graph.n_channels;
    let count = system.bucket(NodeType::Gpu).len();
    let head = graph.intra.get(c * count).copied();
    let dir = usize::from(head != Some(rank));
    graph.inter.get(2 * c + dir).copied().ok_or(TopoError::NoNet)
}

/// Point-to-point channels of a communicator (topology-and-rings 7.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct P2pChannels {
    /// Channels: a power of two, or 32.
    pub channels: usize,
    /// Channels towards one peer.
    pub per_peer: usize,
    /// Order of the channels: bit reversal of the index.
    pub order: Vec<usize>,
}

/// Computes the point-to-point channels from the communicator's channel count (after doubling) and the fast paths.
/// The compute-capability arms are leftovers: every Neuron tag falls in the last.
pub fn p2p_channels(system: &System, n_channels: usize) -> P2pChannels {
    if n_channels > MAX_CHANNELS {
        // The original stops here: the order is not computed and the count per peer keeps its start value, 1.
        return P2pChannels { channels: MAX_CHANNELS, per_peer: 1, order: Vec::new() };
    }
    let base = n_channels.max(1);
    let mut best = usize::MAX;
    let gpus = system.bucket(NodeType::Gpu);
    for &a in gpus {
        let Some(gpu) = system.gpu(a) else { continue };
        let divisor = match gpu.sm {
            86 => 12.0,
            60..=69 => 18.0,
            _ => 21.0,
        };
        for &b in gpus.iter().filter(|b| **b != a) {
            if let Some(path) = system.path_info(a, b).filter(|p| p.kind == PathType::Nvl) {
                best = best.min(2 * ((path.width / divisor).floor() as usize).max(1));
            }
        }
    }
    let per_peer = best.min(base).next_power_of_two();
    let channels = base.next_power_of_two();
    let bits = channels.trailing_zeros();
    let reverse = |i: usize| (0..bits).fold(0, |r, b| r | ((i >> b) & 1) << (bits - 1 - b));
    P2pChannels { channels, per_peer, order: (0..channels).map(reverse).collect() }
}
