//! The plan of a communicator as it travels; its types are generated and know nothing of serde.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use sandbox::bindings::exports::neuron::nccom::collectives::{CommInfo, PeerInfo, RingInfo};

#[derive(Serialize, Deserialize)]
struct Plan {
    cluster: (u64, i64),
    dev: i32,
    rank: [i32; 3],
    node: [i32; 2],
    enable_pod: bool,
    pod: [i32; 4],
    peers: Vec<[i32; 4]>,
    rings: Vec<(i32, i32, Vec<i32>, bool)>,
    kangaring_paths: Vec<Vec<i32>>,
    mla_cycles: Vec<Vec<i32>>,
}

pub(crate) fn serialize<S: Serializer>(i: &CommInfo, s: S) -> Result<S::Ok, S::Error> {
    Plan {
        cluster: (i.cluster_id, i.epoch),
        dev: i.neuron_dev,
        rank: [i.rank, i.rank_n, i.local_rank_n],
        node: [i.node, i.node_n],
        enable_pod: i.enable_pod,
        pod: [i.pod, i.pod_n, i.pod_node, i.pod_node_n],
        peers: i.peers.iter().map(|p| [p.neuron_dev, p.rid, p.tpb_index, p.pod_node_id]).collect(),
        rings: i.rings.iter().map(|r| (r.prev, r.next, r.user_ranks.clone(), r.duplicate)).collect(),
        kangaring_paths: i.kangaring_paths.clone(),
        mla_cycles: i.mla_cycles.clone(),
    }
    .serialize(s)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Box<CommInfo>, D::Error> {
    let p = Plan::deserialize(d)?;
    let peer =
        |[neuron_dev, rid, tpb_index, pod_node_id]: [i32; 4]| PeerInfo { neuron_dev, rid, tpb_index, pod_node_id };
    let ring = |(prev, next, user_ranks, duplicate)| RingInfo { prev, next, user_ranks, duplicate };
    let ([rank, rank_n, local_rank_n], [node, node_n]) = (p.rank, p.node);
    let [pod, pod_n, pod_node, pod_node_n] = p.pod;
    Ok(Box::new(CommInfo {
        cluster_id: p.cluster.0,
        epoch: p.cluster.1,
        neuron_dev: p.dev,
        rank,
        rank_n,
        local_rank_n,
        node,
        node_n,
        enable_pod: p.enable_pod,
        pod,
        pod_n,
        pod_node,
        pod_node_n,
        peers: p.peers.into_iter().map(peer).collect(),
        rings: p.rings.into_iter().map(ring).collect(),
        kangaring_paths: p.kangaring_paths,
        mla_cycles: p.mla_cycles,
    }))
}
