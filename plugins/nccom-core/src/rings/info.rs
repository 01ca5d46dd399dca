//! What `neuronGetCommInfo` answers (topology-and-rings 9, reverse-abi 5.8).

use super::RingError;
use super::layout::{Layout, Pods};
use super::postset::{Channels, Ring};
use crate::topo::RankInfo;
use crate::topo::limits::{MAX_CHANNELS, MAX_MLA_CYCLES};
use std::collections::BTreeSet;

/// `enc_peer_info` of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    /// Logical core on its server.
    pub neuron_dev: i32,
    /// Routing id.
    pub rid: i32,
    /// Core inside the accelerator.
    pub tpb_index: i32,
    /// Pod node, -1 without a pod.
    pub pod_node_id: i32,
}

/// `nccl_comm_info_t` without what bootstrap adds (cluster id, epoch).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommInfo {
    /// This rank's logical core.
    pub neuron_dev: i32,
    /// This rank.
    pub rank: i32,
    /// Ranks.
    pub rank_n: i32,
    /// Ranks of this node.
    pub local_rank_n: i32,
    /// This node.
    pub node: i32,
    /// Nodes.
    pub node_n: i32,
    /// Whether pods order the rings.
    pub enable_pod: bool,
    /// This node's pod.
    pub pod: i32,
    /// Pods; 0 without.
    pub pod_n: i32,
    /// This node inside its pod.
    pub pod_node: i32,
    /// Nodes of the pod; 0 without.
    pub pod_node_n: i32,
    /// One a rank; empty if the caller did not want them.
    pub peers: Vec<PeerInfo>,
    /// Channels, at most 32; none before the graph is built.
    pub rings: Vec<Ring>,
    /// Kangaring paths, at most 4.
    pub kangaring_paths: Vec<Vec<i32>>,
    /// Cycles over accelerators, at most 32.
    pub mla_cycles: Vec<Vec<i32>>,
}

/// Assembles the info. `channels` is None before the graph is built: then all channel counts are 0.
///
/// # Errors
/// [`RingError::Shape`] if records, layout and rank do not fit.
pub fn comm_info(
    rank: i32,
    ranks: &[RankInfo],
    layout: &Layout,
    pods: &Pods,
    channels: Option<&Channels>,
    mla_cycles: &[Vec<i32>],
    want_peers: bool,
) -> Result<CommInfo, RingError> {
    let expected = layout.ranks();
    let shape = RingError::Shape { what: "records", found: ranks.len(), expected };
    let me = usize::try_from(rank).ok().filter(|_| ranks.len() == expected);
    let (Some(own), Some(&node)) = (me.and_then(|r| ranks.get(r)), me.and_then(|r| layout.node_of.get(r))) else {
        return Err(shape);
    };
    let pod = pods.pod_of.get(node).copied().unwrap_or(0);
    let pod_members: BTreeSet<i32> =
        pods.pod_of.iter().zip(&pods.pod_node_of).filter(|(p, _)| **p == pod).map(|(_, n)| *n).collect();
    let on = |value: usize| if pods.enabled { value as i32 } else { 0 };
    let peer =
        |r: &RankInfo| PeerInfo { neuron_dev: r.neuron_dev, rid: r.rid, tpb_index: r.core, pod_node_id: r.pod_node };
    let channels = channels.cloned().unwrap_or_default();
    let cycles = if channels.rings.is_empty() { &[] } else { mla_cycles };
    Ok(CommInfo {
        neuron_dev: own.neuron_dev,
        rank,
        rank_n: expected as i32,
        local_rank_n: layout.nodes[node].len() as i32,
        node: node as i32,
        node_n: layout.nodes.len() as i32,
        enable_pod: pods.enabled,
        pod: on(pod),
        pod_n: on(pods.pod_of.iter().collect::<BTreeSet<_>>().len()),
        pod_node: if pods.enabled { pods.pod_node_of.get(node).copied().unwrap_or(0) } else { 0 },
        pod_node_n: on(pod_members.len()),
        peers: if want_peers { ranks.iter().map(peer).collect() } else { Vec::new() },
        rings: channels.rings.into_iter().take(MAX_CHANNELS).collect(),
        kangaring_paths: channels.kangaring,
        mla_cycles: cycles.iter().take(MAX_MLA_CYCLES).cloned().collect(),
    })
}
