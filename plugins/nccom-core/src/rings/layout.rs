//! Which ranks share a node, which nodes share a pod, and in which order rings visit nodes.

use super::RingError;
use crate::topo::limits::MAX_RANKS;
use crate::topo::{Family, RankInfo};
use std::collections::BTreeMap;

/// Ranks by node. Nodes are numbered by first appearance in rank order (topology-and-rings 9).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Node of each rank.
    pub node_of: Vec<usize>,
    /// Place of each rank among the ranks of its node.
    pub local_rank: Vec<usize>,
    /// Ranks of each node, ascending.
    pub nodes: Vec<Vec<i32>>,
}

impl Layout {
    /// Groups ranks by host hash, which is given per rank.
    ///
    /// # Errors
    /// [`RingError::Shape`] without a rank, or with more than the limit.
    pub fn of(host_hashes: &[u64]) -> Result<Self, RingError> {
        if host_hashes.is_empty() || host_hashes.len() > MAX_RANKS {
            return Err(RingError::Shape {
                what: "ranks",
                found: host_hashes.len(),
                expected: host_hashes.len().clamp(1, MAX_RANKS),
            });
        }
        let mut numbers: BTreeMap<u64, usize> = BTreeMap::new();
        let mut layout = Self { node_of: Vec::new(), local_rank: Vec::new(), nodes: Vec::new() };
        for (rank, hash) in host_hashes.iter().enumerate() {
            let node = *numbers.entry(*hash).or_insert(layout.nodes.len());
            if node == layout.nodes.len() {
                layout.nodes.push(Vec::new());
            }
            layout.node_of.push(node);
            layout.local_rank.push(layout.nodes[node].len());
            layout.nodes[node].push(rank as i32);
        }
        Ok(layout)
    }

    /// Groups ranks by the records, which must be one a rank in rank order.
    ///
    /// # Errors
    /// [`RingError::Shape`].
    pub fn of_ranks(ranks: &[RankInfo]) -> Result<Self, RingError> {
        if let Some(wrong) = ranks.iter().enumerate().position(|(i, r)| i32::try_from(i) != Ok(r.rank)) {
            return Err(RingError::Shape { what: "records in rank order", found: wrong, expected: ranks.len() });
        }
        Self::of(&ranks.iter().map(|r| r.host_hash).collect::<Vec<_>>())
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.node_of.len()
    }
}

/// Pods of a communicator, and the order in which rings visit nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pods {
    /// Whether pods order the rings: pods exist, several nodes, an UltraServer (topology-and-rings 7).
    pub enabled: bool,
    /// Pod of each node, numbered by first appearance; all 0 when not enabled.
    pub pod_of: Vec<usize>,
    /// Pod node id of each node; -1 when not enabled.
    pub pod_node_of: Vec<i32>,
    /// Nodes in ring order.
    pub order: Vec<usize>,
    /// Lines for the log.
    pub log: Vec<String>,
}

/// Builds pods and the node order. `pod_type` is `nec_pod_type_t`: 1 P2P and 2 SWITCH are pods. `peer(pod_node)` is the
/// pod node one step along the pod's ring, `nec_get_p2p_pod_peer_node` at distance 1; it is asked for P2P pods only.
///
/// Without pods nodes keep their numbers. With them, nodes of one pod stand together, pods by first appearance; inside
/// a pod from the lowest pod node id along the peers if that walk visits every node of the pod, else by pod node id.
///
/// # Errors
/// [`RingError::Shape`] if records and layout do not fit.
pub fn pods(
    layout: &Layout,
    ranks: &[RankInfo],
    family: Family,
    pod_type: u32,
    peer: &dyn Fn(i32) -> Option<i32>,
) -> Result<Pods, RingError> {
    if ranks.len() != layout.ranks() {
        return Err(RingError::Shape { what: "records", found: ranks.len(), expected: layout.ranks() });
    }
    let n = layout.nodes.len();
    let first = |node: usize| layout.nodes[node].first().and_then(|r| ranks.get(*r as usize));
    let in_pods = (0..n).all(|node| first(node).is_some_and(|r| r.pod_node >= 0));
    let enabled = matches!(pod_type, 1 | 2) && n > 1 && family.is_ultraserver() && in_pods;
    if !enabled {
        return Ok(Pods {
            enabled,
            pod_of: vec![0; n],
            pod_node_of: vec![-1; n],
            order: (0..n).collect(),
            log: Vec::new(),
        });
    }
    let mut log = vec!["POD is enabled".to_string()];
    let mut ids: Vec<u64> = Vec::new();
    let mut pod_of = Vec::new();
    let mut pod_node_of = Vec::new();
    for rank in (0..n).filter_map(first) {
        let pod = ids.iter().position(|id| *id == rank.pod_id).unwrap_or_else(|| {
            log.push(format!("Discovered a new Pod {:x}", rank.pod_id));
            ids.push(rank.pod_id);
            ids.len() - 1
        });
        pod_of.push(pod);
        pod_node_of.push(rank.pod_node);
    }
    let mut order = Vec::new();
    for pod in 0..ids.len() {
        let mut members: Vec<usize> = (0..n).filter(|node| pod_of[*node] == pod).collect();
        // Several nodes may share a pod node id (virtual servers): node number decides between them.
        members.sort_by_key(|node| (pod_node_of[*node], *node));
        let walked = if pod_type == 1 { along_peers(&members, &pod_node_of, peer) } else { None };
        order.extend(walked.unwrap_or(members));
    }
    Ok(Pods { enabled, pod_of, pod_node_of, order, log })
}

/// Follows the pod's own ring; None unless it visits each member once.
fn along_peers(members: &[usize], pod_node_of: &[i32], peer: &dyn Fn(i32) -> Option<i32>) -> Option<Vec<usize>> {
    let mut walked = vec![*members.first()?];
    let mut at = *pod_node_of.get(*members.first()?)?;
    // A pod may have nodes this communicator does not use; they are stepped over.
    for _ in 0..MAX_POD_STEPS {
        if walked.len() == members.len() {
            return Some(walked);
        }
        at = peer(at)?;
        if let Some(node) = members.iter().copied().find(|m| pod_node_of[*m] == at) {
            if walked.contains(&node) {
                return None;
            }
            walked.push(node);
        }
    }
    None
}

/// Steps along a pod's ring: far beyond the nodes of any pod, so that a host whose answers do not cycle cannot hold us.
const MAX_POD_STEPS: usize = 256;
