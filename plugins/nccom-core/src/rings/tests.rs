//! Preset, gather, postset: the whole way with every rank's view.

use super::*;
use crate::search::{self, Graph, RUNTIME_NAME};
use crate::topo::limits::{MAX_CHANNELS, MAX_KANGA_PATHS};
use crate::topo::{Family, RankInfo, TableMachine, discover};
use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::BTreeSet;

fn unset(_: &str) -> Option<String> {
    None
}

/// A graph of given local orders.
fn graph_of(orders: &[Vec<i32>]) -> Graph {
    let mut g = Graph::template(orders.first().map_or(0, Vec::len));
    g.n_channels = orders.len();
    g.intra = orders.concat();
    g.inter = vec![-1; 2 * orders.len()];
    g
}

/// Gathers every rank's record and joins them as every rank would.
fn join_all(graphs: &[Graph], layout: &Layout, order: &[usize], family: Family) -> Vec<Channels> {
    let records: Vec<TopoRanks> = (0..layout.ranks())
        .map(|r| {
            let mine = preset(&graphs[layout.node_of[r]], r as i32, family).unwrap().0;
            TopoRanks::decode(&mine.encode()).unwrap()
        })
        .collect();
    let joined = |r: usize| postset(&records, layout, order, family, r as i32).unwrap();
    (0..layout.ranks()).map(joined).map(|c| Channels { rings: doubled(&c.rings), ..c }).collect()
}

fn check_rings(views: &[Channels]) {
    let n = views.len() as i32;
    let count = views[0].rings.len();
    for (r, view) in views.iter().enumerate() {
        assert_eq!(view.rings.len(), count);
        for (c, ring) in view.rings.iter().enumerate() {
            assert_eq!(ring.user_ranks[0], r as i32);
            assert_eq!(ring.user_ranks.iter().collect::<BTreeSet<_>>().len() as i32, n);
            let behind = &views[ring.next as usize].rings[c];
            let before = &views[ring.prev as usize].rings[c];
            assert_eq!((behind.prev, before.next), (r as i32, r as i32));
            assert_eq!(ring.user_ranks[1 % n as usize], ring.next);
            assert_eq!(ring.user_ranks[n as usize - 1], ring.prev);
        }
    }
}

/// Proves INV-49.
#[test]
fn head_and_tail_are_the_network_ends() {
    let graph = graph_of(&[vec![6, 4, 7, 5], vec![4, 5, 6, 7]]);
    for (rank, prev, next) in [(6, -1, 4), (4, 6, 7), (7, 4, 5), (5, 7, -1)] {
        let (record, segments) = preset(&graph, rank, Family(5)).unwrap();
        assert_eq!((record.ring_recv[0], record.ring_send[0]), (6, 5), "rank {rank}");
        assert_eq!((record.ring_prev[0], record.ring_next[0]), (prev, next), "rank {rank}");
        assert_eq!((record.ring_recv[1], record.ring_send[1]), (4, 7), "rank {rank}");
        assert_eq!(segments[0], NodeNeighbours { prev, next });
        // Copied to the second half.
        assert_eq!(segments.len(), 4);
        assert_eq!(segments[..2], segments[2..]);
        assert_eq!(record.channels(), 2);
    }
    assert_eq!(preset(&graph, 9, Family(5)), Err(RingError::NotInGraph { rank: 9, channel: 0 }));
}

/// Proves INV-41.
#[test]
fn tree_fields_travel_as_zeros() {
    let m = TableMachine::server(15, 16, 2, 16);
    let (system, _) = discover(&m, &m.ranks(64, 1), 0, &unset, None).unwrap();
    let graph = search::compute(&system, &unset, None, RUNTIME_NAME).unwrap().graph;
    assert_eq!(graph.coll_net, 0);
    for rank in 0..64 {
        let bytes = preset(&graph, rank, Family(15)).unwrap().0.encode();
        assert!(bytes[512..896].iter().all(|b| *b == 0), "rank {rank}");
        assert!(bytes[..512].iter().any(|b| *b != 0));
    }
}

/// Proves INV-50.
#[test]
fn both_ring_defects_are_found() {
    let prev = vec![vec![3, 0, 1, 2]];
    let good = vec![vec![1, 2, 3, 0]];
    assert_eq!(build_rings(1, 2, 4, &prev, &good), Ok(vec![vec![2, 3, 0, 1]]));
    // 0 → 1 → 2 → 1 → 2: four steps from 0 end at 2.
    let error = build_rings(1, 0, 4, &prev, &[vec![1, 2, 1, 0]]).unwrap_err();
    assert_eq!(error, RingError::NoLoop { ring: 0, end: 2, rank: 0 });
    assert_eq!(error.to_string(), "Error : ring 0 does not loop back to start (2 != 0)");
    // 0 → 1 → 0 → 1 → 0 closes but visits two.
    let rings = [good[0].clone(), vec![1, 0, 3, 2]];
    let error = build_rings(2, 0, 4, &[prev[0].clone(), vec![1, 0, 3, 2]], &rings).unwrap_err();
    assert_eq!(error, RingError::Misses { ring: 1, rank: 2 });
    assert_eq!(error.to_string(), "Error : ring 1 does not contain rank 2");
    for open in [-1, 4, i32::MAX, i32::MIN] {
        let error = build_rings(1, 0, 4, &prev, &[vec![1, open, 3, 0]]).unwrap_err();
        assert_eq!(error, RingError::NoLoop { ring: 0, end: open, rank: 0 });
    }
    assert!(matches!(build_rings(1, 0, 4, &[vec![3, 0, 0, 2]], &good), Err(RingError::Contradiction { .. })));
    assert!(build_rings(1, 4, 4, &prev, &good).is_err());
    assert!(build_rings(2, 0, 4, &prev, &good).is_err());
}

/// Proves INV-51.
#[test]
fn channels_are_doubled_by_copying_and_clamped_to_32() {
    let layout = Layout::of(&[1, 1, 1, 2, 2, 2]).unwrap();
    for found in [1, 2, 5, 16, 17, 31, 32] {
        // Every channel another order, so that a copy is recognised as one.
        let rotated =
            |base: i32| -> Vec<Vec<i32>> { (0..found).map(|c| (0..3).map(|i| base + (i + c) % 3).collect()).collect() };
        let graphs = [graph_of(&rotated(0)), graph_of(&rotated(3))];
        let views = join_all(&graphs, &layout, &[0, 1], Family(5));
        check_rings(&views);
        let rings = &views[4].rings;
        let found = found as usize;
        assert_eq!(rings.len(), (2 * found).min(MAX_CHANNELS));
        for (c, ring) in rings.iter().enumerate() {
            assert_eq!(ring.duplicate, c >= found);
            if c >= found {
                let original = &rings[c - found];
                assert_eq!(
                    (ring.prev, ring.next, &ring.user_ranks),
                    (original.prev, original.next, &original.user_ranks)
                );
            }
        }
    }
}

#[test]
fn unlike_nodes_use_the_channels_both_have() {
    let layout = Layout::of(&[7, 7, 8]).unwrap();
    let graphs = [graph_of(&[vec![0, 1], vec![1, 0], vec![0, 1]]), graph_of(&[vec![2]])];
    let views = join_all(&graphs, &layout, &[0, 1], Family(5));
    check_rings(&views);
    assert_eq!(views[0].rings.len(), 2);
}

#[test]
fn records_from_peers_are_not_trusted() {
    let layout = Layout::of(&[1, 1, 2, 2]).unwrap();
    let graphs = [graph_of(&[vec![0, 1]]), graph_of(&[vec![2, 3]])];
    let good: Vec<TopoRanks> = (0..4).map(|r| preset(&graphs[r as usize / 2], r, Family(5)).unwrap().0).collect();
    let join = |all: &[TopoRanks]| postset(all, &layout, &[0, 1], Family(5), 0);
    assert!(join(&good).is_ok());
    type Change = fn(&mut TopoRanks);
    let changes: [(Change, &str); 5] = [
        (|t| t.ring_send[0] = 99, "tail"),
        (|t| t.ring_send[0] = -5, "tail"),
        (|t| t.ring_recv[0] = 0, "head"),
        (|t| t.ring_next[0] = i32::MAX, "successor"),
        (|t| t.ring_prev[0] = 1, "predecessor"),
    ];
    for (change, what) in changes {
        let mut all = good.clone();
        change(&mut all[2]);
        let error = join(&all).unwrap_err();
        assert!(matches!(&error, RingError::BadRecord { rank: 2, what: w, .. } if *w == what), "{error}");
    }
    assert!(matches!(join(&good[..3]), Err(RingError::Shape { .. })));
    assert!(matches!(postset(&good, &layout, &[0, 0], Family(5), 0), Err(RingError::Shape { .. })));
    let mut zero = good.clone();
    zero[1] = TopoRanks::empty();
    assert_eq!(join(&zero), Ok(Channels::default()), "a rank without channels leaves none");
}

/// Proves INV-53.
#[test]
fn kangaring_tables_only_on_switch_v1_and_by_copying() {
    for (family, nodes, gpus) in
        [(15, 1, 64), (15, 2, 32), (15, 4, 16), (15, 1, 4), (14, 1, 64), (5, 2, 32), (2, 1, 32)]
    {
        let m = TableMachine::server(family, 16, if family == 2 { 1 } else { 2 }, 16);
        let ranks = m.ranks(gpus, nodes);
        let graphs: Vec<Graph> = (0..nodes)
            .map(|node| {
                // The fork search on every family: what must not depend on it is the table.
                let on = |n: &str| (n == search::USE_NEW_ALGORITHM).then(|| "1".to_string());
                let (system, _) = discover(&m, &ranks, node * gpus, &on, None).unwrap();
                search::compute(&system, &on, None, RUNTIME_NAME).unwrap().graph
            })
            .collect();
        let layout = Layout::of_ranks(&ranks).unwrap();
        let order: Vec<usize> = (0..nodes as usize).collect();
        let views = join_all(&graphs, &layout, &order, Family(family));
        check_rings(&views);
        let table = &views[0].kangaring;
        assert!(views.iter().all(|v| v.kangaring == *table), "every rank has the same table");
        if family != 15 {
            assert!(table.is_empty(), "family {family}");
            // Not even if a graph carried paths.
            let mut forged = graphs[0].clone();
            forged.kangaring = vec![vec![[0, 1, 2, 3]]];
            let record = preset(&forged, 0, Family(family)).unwrap().0;
            assert_eq!(record.jbog_kangaring_path, [[0; 4]; 4]);
            continue;
        }
        assert_eq!(table.len(), graphs[0].kangaring.len());
        assert!((1..=MAX_KANGA_PATHS).contains(&table.len()));
        for (k, path) in table.iter().enumerate() {
            // By copying: path k is made of the nodes' groups of path k, each unbroken.
            for group in graphs.iter().flat_map(|g| &g.kangaring[k]) {
                let members: Vec<i32> = group.iter().copied().filter(|r| *r >= 0).collect();
                assert!(path.windows(members.len()).any(|w| w == members), "{members:?} in path {k}: {path:?}");
            }
            assert_eq!(path.iter().collect::<BTreeSet<_>>().len(), (nodes * gpus) as usize);
        }
    }
    // Beyond 64 ranks a row has no room: no table rather than a cut one.
    let m = TableMachine::server(15, 16, 2, 16);
    let ranks = m.ranks(64, 2);
    let (system, _) = discover(&m, &ranks, 0, &unset, None).unwrap();
    let first = search::compute(&system, &unset, None, RUNTIME_NAME).unwrap().graph;
    let (system, _) = discover(&m, &ranks, 64, &unset, None).unwrap();
    let second = search::compute(&system, &unset, None, RUNTIME_NAME).unwrap().graph;
    let views = join_all(&[first, second], &Layout::of_ranks(&ranks).unwrap(), &[0, 1], Family(15));
    check_rings(&views);
    assert!(views[0].kangaring.is_empty());
}

/// Proves INV-54.
#[test]
fn inert_variables_are_never_read() {
    const INERT: [&str; 21] = [
        "NCCL_MIN_NRINGS",
        "NCCL_MAX_NRINGS",
        "NCCL_MIN_NCHANNELS",
        "NCCL_MAX_NCHANNELS",
        "NCCL_BUFFSIZE",
        "NCCL_LL_BUFFSIZE",
        "NCCL_LL128_BUFFSIZE",
        "NCCL_CROSS_NIC",
        "NCCL_P2P_READ_ENABLE",
        "NCCL_NET_GDR_READ",
        "NCCL_CHECK_POINTERS",
        "NCCL_IGNORE_CPU_AFFINITY",
        "NCCL_GRAPH_DUMP_FILE_RANK",
        "NCCL_TOPO_DUMP_FILE_RANK",
        "NCCL_GROUP_CUDA_STREAM",
        "NCCL_REPORT_CONNECT_PROGRESS",
        "NCCL_PROTO",
        "NCCL_ALGO",
        "NCCL_NTHREADS",
        "NCCL_THREAD_THRESHOLDS",
        "NCCL_TREE_THRESHOLD",
    ];
    let asked = RefCell::new(BTreeSet::new());
    let whole = |family: u32, vars: &dyn Fn(&str) -> Option<String>| {
        let m = TableMachine::server(family, 16, if family == 2 { 1 } else { 2 }, 8);
        let ranks = m.ranks(32, 2);
        let layout = Layout::of_ranks(&ranks).unwrap();
        let mut graphs = Vec::new();
        for node in 0..2 {
            let (system, dump) = discover(&m, &ranks, 32 * node, vars, None).unwrap();
            let graph = search::compute(&system, vars, None, RUNTIME_NAME).unwrap();
            let p2p = search::p2p_channels(&system, 32);
            let affinity = system.affinity(32 * node).unwrap();
            graphs.push((graph, dump, p2p, affinity, system.check_p2p(32 * node, 32 * node + 9)));
        }
        let only: Vec<Graph> = graphs.iter().map(|g| g.0.graph.clone()).collect();
        let views = join_all(&only, &layout, &[0, 1], Family(family));
        (graphs, views)
    };
    for family in [2, 5, 14, 15] {
        let plain = whole(family, &|name| {
            asked.borrow_mut().insert(name.to_string());
            None
        });
        for value in ["0", "1", "2", "-2", "Tree"] {
            let set = whole(family, &|name| INERT.contains(&name).then(|| value.to_string()));
            assert!(set == plain, "family {family}, inert variables at {value}");
        }
    }
    for name in INERT {
        assert!(!asked.borrow().contains(name), "{name} was looked up");
    }
    assert!(asked.borrow().contains(search::USE_NEW_ALGORITHM), "the recorder works");
}

#[test]
fn nodes_are_numbered_by_first_appearance() {
    let layout = Layout::of(&[9, 4, 9, 1, 4]).unwrap();
    assert_eq!(layout.node_of, vec![0, 1, 0, 2, 1]);
    assert_eq!(layout.local_rank, vec![0, 0, 1, 0, 1]);
    assert_eq!(layout.nodes, vec![vec![0, 2], vec![1, 4], vec![3]]);
    assert!(Layout::of(&[]).is_err());
}

fn pod_ranks(pods: &[(u64, i32)]) -> Vec<RankInfo> {
    pods.iter()
        .enumerate()
        .map(|(i, (pod_id, pod_node))| RankInfo {
            rank: i as i32,
            neuron_dev: 3,
            rid: 40 + i as i32,
            core: 1,
            host_hash: i as u64,
            pod_id: *pod_id,
            pod_node: *pod_node,
            ..RankInfo::default()
        })
        .collect()
}

#[test]
fn pod_order_keeps_pods_together() {
    let ranks = pod_ranks(&[(7, 2), (8, 0), (7, 0), (8, 1), (7, 1), (7, 3)]);
    let layout = Layout::of_ranks(&ranks).unwrap();
    let ring = |n: i32| Some((n + 3) % 4);
    let p2p = pods(&layout, &ranks, Family(9), 1, &ring).unwrap();
    assert!(p2p.enabled);
    assert_eq!(p2p.order, vec![2, 5, 0, 4, 1, 3], "along the peers: pod nodes 0 3 2 1, then 0 1");
    assert_eq!(p2p.log, ["POD is enabled", "Discovered a new Pod 7", "Discovered a new Pod 8"]);
    let switch = pods(&layout, &ranks, Family(15), 2, &|_| None).unwrap();
    assert_eq!(switch.order, vec![2, 4, 0, 5, 1, 3], "by pod node id");
    let stuck = pods(&layout, &ranks, Family(9), 1, &Some).unwrap();
    assert_eq!(stuck.order, switch.order, "peers that lead nowhere are not followed");
    for (family, kind) in [(9, 0), (9, 3), (5, 1), (2, 2)] {
        let none = pods(&layout, &ranks, Family(family), kind, &ring).unwrap();
        assert!(!none.enabled && none.order == (0..6).collect::<Vec<_>>());
    }
    // Rings follow that order.
    let graphs: Vec<Graph> = (0..6).map(|r| graph_of(&[vec![r]])).collect();
    let views = join_all(&graphs, &layout, &p2p.order, Family(9));
    check_rings(&views);
    assert_eq!(views[2].rings[0].user_ranks, vec![2, 5, 0, 4, 1, 3]);
    let info = comm_info(4, &ranks, &layout, &p2p, Some(&views[4]), &[vec![0, 1]], true).unwrap();
    assert_eq!((info.enable_pod, info.pod, info.pod_n, info.pod_node, info.pod_node_n), (true, 0, 2, 1, 4));
    assert_eq!(info.peers[1], PeerInfo { neuron_dev: 3, rid: 41, tpb_index: 1, pod_node_id: 0 });
    assert_eq!((info.rank_n, info.local_rank_n, info.node, info.node_n), (6, 1, 4, 6));
    assert_eq!((info.rings.len(), info.mla_cycles.len()), (2, 1));
    let bare =
        comm_info(4, &ranks, &layout, &pods(&layout, &ranks, Family(9), 0, &ring).unwrap(), None, &[vec![0]], false);
    let bare = bare.unwrap();
    assert_eq!((bare.enable_pod, bare.pod, bare.pod_n, bare.pod_node, bare.pod_node_n), (false, 0, 0, 0, 0));
    assert!(bare.peers.is_empty() && bare.rings.is_empty() && bare.mla_cycles.is_empty());
    assert!(comm_info(6, &ranks, &layout, &p2p, None, &[], false).is_err());
}

#[test]
fn one_rank_is_its_own_ring() {
    let layout = Layout::of(&[5]).unwrap();
    let views = join_all(&[graph_of(&[vec![0]])], &layout, &[0], Family(2));
    assert_eq!(views[0].rings[0], Ring { prev: 0, next: 0, user_ranks: vec![0], duplicate: false });
    assert_eq!(views[0].rings.len(), 2);
}

/// What nccom-next makes of the searched rings.
#[test]
fn both_directions_and_a_stride_order_close_on_every_rank() {
    for n in 1..=9usize {
        let searched = |rank: usize| vec![Ring::new((0..n).map(|i| ((i + rank) % n) as i32).collect()); 2];
        for any_pair in [false, true] {
            let views: Vec<Channels> = (0..n)
                .map(|r| both_ways_and_strided(&searched(r), any_pair))
                .map(|rings| Channels { rings, kangaring: Vec::new() })
                .collect();
            check_rings(&views);
            let each = 1 + usize::from(n > 2) + usize::from(n > 3 && any_pair);
            assert_eq!(views[0].rings.len(), 2 * each);
            let orders: BTreeSet<&Vec<i32>> = views[0].rings[..each].iter().map(|r| &r.user_ranks).collect();
            assert_eq!(orders.len(), each, "no two are the same");
        }
    }
    assert_eq!(both_ways_and_strided(&vec![Ring::new((0..8).collect()); 20], true).len(), MAX_CHANNELS);
    let stride = &both_ways_and_strided(&[Ring::new(vec![1, 2, 3, 0])], true)[2];
    assert_eq!((stride.prev, stride.next, &stride.user_ranks), (2, 3, &vec![1, 3, 0, 2]));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    /// Random splits of ranks over nodes, random local orders, random node order.
    #[test]
    fn rings_close_and_hold_every_rank(
        hashes in prop::collection::vec(0u64..6, 1..40),
        channels in 1usize..20,
        seed in any::<u64>(),
    ) {
        let layout = Layout::of(&hashes).unwrap();
        let mut state = seed;
        let mut next = |n: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % n
        };
        let mut shuffle = |list: &[i32]| {
            let mut list = list.to_vec();
            for i in (1..list.len()).rev() {
                list.swap(i, next(i + 1));
            }
            list
        };
        let graphs: Vec<Graph> = layout
            .nodes
            .iter()
            .map(|ranks| graph_of(&(0..channels).map(|_| shuffle(ranks)).collect::<Vec<_>>()))
            .collect();
        let nodes: Vec<i32> = (0..layout.nodes.len() as i32).collect();
        let order: Vec<usize> = shuffle(&nodes).into_iter().map(|n| n as usize).collect();
        let views = join_all(&graphs, &layout, &order, Family(5));
        check_rings(&views);
        prop_assert_eq!(views[0].rings.len(), (2 * channels).min(MAX_CHANNELS));
        // Ranks of one node stand together.
        for ring in &views[0].rings {
            let changes = (0..hashes.len())
                .filter(|i| hashes[ring.user_ranks[*i] as usize] != hashes[ring.user_ranks[(i + 1) % hashes.len()] as usize])
                .count();
            prop_assert!(changes <= layout.nodes.len());
        }
    }

    #[test]
    fn forged_records_never_panic(words in prop::collection::vec(-3i32..9, 240), which in 0usize..4) {
        let layout = Layout::of(&[1, 1, 2, 2]).unwrap();
        let graphs = [graph_of(&[vec![0, 1]]), graph_of(&[vec![2, 3]])];
        let mut all: Vec<TopoRanks> = (0..4).map(|r| preset(&graphs[r as usize / 2], r, Family(5)).unwrap().0).collect();
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        all[which] = TopoRanks::decode(&bytes).unwrap();
        for family in [5, 15] {
            if let Ok(channels) = postset(&all, &layout, &[0, 1], Family(family), 0) {
                for ring in channels.rings {
                    prop_assert_eq!(ring.user_ranks.iter().collect::<BTreeSet<_>>().len(), 4);
                }
            }
        }
    }
}
