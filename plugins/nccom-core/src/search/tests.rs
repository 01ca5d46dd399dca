//! Searches as a whole: template, tiers, knobs, documents, devices of channels.

use super::inherited::{DOUBLING_SPEED, TIERS, loads};
use super::*;
use crate::topo::limits::{MAX_CHANNELS, MAX_SEARCH_CHANNELS};
use crate::topo::xml::{self, XmlElement};
use crate::topo::{MachineFacts, NodeType, TableMachine, discover};
use std::cell::RefCell;
use std::collections::BTreeSet;

const RING4: &str = include_str!("../topo/testdata/topo_4p1h.xml");
const PCIE8: &str = include_str!("../topo/testdata/topo_8p_pcie_2nic.xml");

fn unset(_: &str) -> Option<String> {
    None
}

fn knob(value: &'static str) -> impl Fn(&str) -> Option<String> {
    move |n| (n == USE_NEW_ALGORITHM).then(|| value.to_string())
}

fn system(family: u32, devices: i32, vcore: u32, nics: i32, gpus: i32, nodes: i32) -> System {
    let m = TableMachine::server(family, devices, vcore, nics);
    let off = |n: &str| (n == crate::topo::verify::DISABLE_VERIFY).then(|| "1".to_string());
    discover(&m, &m.ranks(gpus, nodes), 0, &off, None).unwrap().0
}

fn studied(text: &str, nodes: bool) -> System {
    let facts = MachineFacts { multi_node: nodes, ..MachineFacts::default() };
    let mut s = System::from_document(text, facts, true).unwrap();
    s.prepare();
    s
}

/// What must hold for every graph.
fn check(system: &System, outcome: &SearchOutcome) {
    let g = &outcome.graph;
    assert!((1..=MAX_SEARCH_CHANNELS).contains(&g.n_channels), "{g}");
    assert_eq!(g.intra.len(), g.n_channels * g.local_ranks);
    assert_eq!(g.inter.len(), 2 * g.n_channels);
    assert_eq!((g.id, g.pattern, g.coll_net), (0, 4, 0));
    let mut ranks = system.ranks();
    ranks.sort_unstable();
    for c in 0..g.n_channels {
        let mut row = g.channel(c).to_vec();
        row.sort_unstable();
        assert_eq!(row, ranks, "channel {c}");
    }
    if outcome.origin == Origin::Fallback {
        return;
    }
    for (l, load) in loads(system, g) {
        let link = &system.links[l];
        assert!(
            load <= link.width * 1.0001,
            "{g}: {load} on {} -> {}: {}",
            system.label(link.from),
            system.label(link.to),
            link.width
        );
    }
    if g.local_ranks > 1 {
        for n in system.bucket(NodeType::Gpu) {
            let cut: f32 = system.nodes[*n].links.iter().map(|l| system.links[*l].width).sum();
            assert!(g.n_channels as f32 * g.speed_intra <= cut * 1.0001, "{g}: cut {cut}");
        }
    }
}

fn search(system: &System, vars: &dyn Fn(&str) -> Option<String>) -> SearchOutcome {
    let outcome = compute(system, vars, None, RUNTIME_NAME).unwrap();
    check(system, &outcome);
    outcome
}

/// Proves INV-40, INV-41.
#[test]
fn one_ring_graph_and_no_choice_of_algorithm() {
    let t = Graph::template(8);
    assert_eq!((t.id, t.pattern, t.cross_nic, t.coll_net, t.min_channels, t.max_channels), (0, 4, 2, 0, 1, 16));
    let s = system(5, 16, 2, 16, 64, 2);
    let asked = RefCell::new(BTreeSet::new());
    let vars = |n: &str| {
        asked.borrow_mut().insert(n.to_string());
        None
    };
    let plain = search(&s, &vars).graph;
    assert_eq!(plain.pattern, PATTERN_RING);
    assert_eq!(plain.coll_net, 0);
    // No name of an algorithm, a protocol or a threshold is ever asked for, and setting them changes nothing.
    let known: BTreeSet<String> = [GRAPH_FILE, USE_NEW_ALGORITHM].map(String::from).into();
    assert!(asked.borrow().is_subset(&known), "{:?}", asked.borrow());
    let choosing = |n: &str| match n {
        "NCCL_ALGO" | "NCCL_PROTO" => Some("Tree".to_string()),
        "NCCL_NTHREADS" | "NCCL_THREAD_THRESHOLDS" | "NCCL_TREE_THRESHOLD" | "NCCL_COLLNET_ENABLE" => Some("1".into()),
        _ => None,
    };
    assert!(search(&s, &choosing).graph == plain);
}

#[test]
fn rings_for_every_count_of_local_ranks() {
    for gpus in (1..=16).chain([32, 64]) {
        for (family, devices, vcore) in [(2, 16, 1), (5, 16, 2), (14, 16, 2), (15, 16, 2)] {
            let gpus = gpus.min(if family == 2 { 32 } else { 64 });
            for (nics, nodes) in [(0, 1), (8, 1), (8, 2), (16, 3), (0, 2)] {
                let s = system(family, devices, vcore, nics, gpus, nodes);
                let outcome = search(&s, &unset);
                assert_ne!(
                    outcome.origin,
                    Origin::Fallback,
                    "family {family}, {gpus} ranks, {nics} NICs, {nodes} nodes"
                );
                let g = outcome.graph;
                if nics > 0 {
                    assert!(g.inter.iter().all(|n| (0..nics).contains(n)));
                } else {
                    assert!(g.inter.iter().all(|n| *n == -1));
                }
            }
        }
    }
}

#[test]
fn a_torus_is_filled_over_the_fabric_alone() {
    let s = system(5, 16, 2, 16, 64, 1);
    let g = search(&s, &unset).graph;
    assert_eq!(g.type_intra, PathType::Nvl);
    assert!(g.n_channels > 1 && g.speed_intra < DOUBLING_SPEED, "{g}");
    let s = system(5, 16, 2, 16, 64, 2);
    let g = search(&s, &unset).graph;
    assert_eq!((g.type_intra, g.type_inter), (PathType::Nvl, PathType::Pix), "{g}");
    let used: BTreeSet<i32> = g.inter.iter().copied().collect();
    assert_eq!(used.len(), 16, "every NIC works: {:?}", g.inter);
}

#[test]
fn published_machines_get_rings() {
    for (text, across) in [(RING4, false), (RING4, true), (PCIE8, false), (PCIE8, true)] {
        let s = studied(text, across);
        let outcome = search(&s, &unset);
        assert_eq!(outcome.origin, Origin::Inherited);
    }
    let g = search(&studied(RING4, false), &unset).graph;
    assert_eq!(g.type_intra, PathType::Nvl, "four devices wired as a ring need nothing else");
    let pcie = studied(PCIE8, false);
    let g = search(&pcie, &unset).graph;
    assert!(TIERS.contains(&g.speed_intra), "{g}");
}

#[test]
fn the_graph_is_a_function_of_the_machine() {
    let m = TableMachine::server(5, 16, 2, 16);
    let ranks = m.ranks(64, 2);
    let of = |rank| search(&discover(&m, &ranks, rank, &unset, None).unwrap().0, &unset);
    let first = of(0);
    assert!(of(0) == first);
    for rank in [1, 31, 63] {
        assert!(of(rank) == first, "rank {rank} computes another graph");
    }
}

#[test]
fn nothing_found_is_simple_order() {
    // 0.05 GB/s: below the last tier.
    let text = r#"<system version="1"><cpu numaid="0" arch="x86_64">
        <pci busid="0:1:0.0" class="0" link_speed="2.5 GT/s" link_width="0.2"><gpu dev="0" sm="3" rank="0"/></pci>
        <pci busid="0:2:0.0" class="0" link_speed="2.5 GT/s" link_width="0.2"><gpu dev="1" sm="3" rank="1"/></pci>
      </cpu></system>"#;
    let s = studied(text, false);
    let outcome = compute(&s, &unset, None, RUNTIME_NAME).unwrap();
    assert_eq!(outcome.origin, Origin::Fallback);
    assert_eq!(outcome.graph.intra, vec![0, 1]);
    assert_eq!((outcome.graph.type_intra as i32, outcome.graph.type_inter as i32), (6, 6));
    assert!(outcome.log.iter().any(|l| l.ends_with("falling back to simple order")), "{:?}", outcome.log);
}

/// Proves INV-45.
#[test]
fn the_new_algorithm_is_off_but_for_switch_v1() {
    for family in [2, 5, 14] {
        let s = system(family, 16, if family == 2 { 1 } else { 2 }, 8, 32, 1);
        assert_eq!(search(&s, &unset).origin, Origin::Inherited, "family {family}");
        assert_eq!(search(&s, &knob("0")).origin, Origin::Inherited, "family {family}");
        let on = search(&s, &knob("1"));
        assert_eq!(on.origin, Origin::Fork, "family {family}");
        assert!(on.log.iter().any(|l| l.contains("set by environment")));
    }
    let s = system(15, 16, 2, 16, 64, 1);
    for vars in [&unset as &dyn Fn(&str) -> Option<String>, &knob("0"), &knob("1")] {
        assert_eq!(search(&s, vars).origin, Origin::Fork);
    }
    // Where the fork search has no ring, the inherited one fills the template.
    let lone = system(5, 16, 2, 0, 4 * 3, 1);
    assert_eq!(search(&lone, &knob("1")).origin, Origin::Inherited);
}

fn rewritten(text: &str, change: impl Fn(&mut XmlElement)) -> String {
    let mut root = xml::read(text).unwrap();
    change(&mut root);
    xml::write(&root)
}

/// Proves INV-48.
#[test]
fn a_graph_file_in_the_inherited_schema_is_accepted() {
    let s = system(5, 16, 2, 16, 64, 2);
    let found = search(&s, &unset).graph;
    let text = document::write(&found, &s);
    let named = |n: &str| (n == GRAPH_FILE).then(|| "graph.xml".to_string());
    let loaded = compute(&s, &named, Some(&text), RUNTIME_NAME).unwrap();
    assert_eq!(loaded.origin, Origin::File);
    assert_eq!(loaded.graph.intra, found.intra);
    assert_eq!(loaded.graph.inter, found.inter);
    assert_eq!((loaded.graph.speed_intra, loaded.graph.type_inter), (found.speed_intra, found.type_inter));
    assert_eq!(loaded.log, [format!("Search 0 : {} channels loaded from XML graph", found.n_channels)]);
    // As upstream writes it, by hand.
    let four = studied(RING4, true);
    let hand = r#"<graphs version="1"><graph id="0" pattern="4" crossnic="0" nchannels="1" speedintra="24"
        speedinter="10" typeintra="NVL" typeinter="PIX" samechannels="1"><channel><net dev="0"/>
        <gpu dev="2"/><gpu dev="0"/><gpu dev="1"/><gpu dev="3"/><net dev="0"/></channel></graph></graphs>"#;
    let g = compute(&four, &unset, Some(hand), RUNTIME_NAME).unwrap().graph;
    assert_eq!((g.n_channels, &g.intra[..], &g.inter[..]), (1, &[2, 0, 1, 3][..], &[0, 0][..]));
    // Another version is refused with the original's text.
    let other = rewritten(hand, |r| r.set("version", 7));
    let error = compute(&four, &unset, Some(&other), RUNTIME_NAME).unwrap_err();
    assert_eq!(error.to_string(), "XML Graph has wrong version 7, 1 needed");
    // A document without this graph leaves the search to find one.
    let absent = rewritten(hand, |r| r.children[0].set("id", 3));
    assert_eq!(compute(&four, &unset, Some(&absent), RUNTIME_NAME).unwrap().origin, Origin::Inherited);
    // Not searched, but loaded: another runtime, or a file that could not be read.
    assert_eq!(compute(&four, &unset, Some(hand), "Other Runtime").unwrap().origin, Origin::File);
    assert!(matches!(compute(&four, &unset, None, "Other Runtime"), Err(SearchError::NoGraphFile { .. })));
    assert!(matches!(compute(&four, &named, None, RUNTIME_NAME), Err(SearchError::NoGraphFile { .. })));
}

#[test]
fn graph_files_that_do_not_fit_are_refused() {
    let s = studied(RING4, true);
    let text = document::write(&search(&s, &unset).graph, &s);
    type Change = fn(&mut XmlElement);
    let cases: [(&str, Change); 10] = [
        ("expected", |r| r.name = "graph".into()),
        ("pattern", |r| r.children[0].set("pattern", 1)),
        ("typeintra", |r| r.children[0].set("typeintra", "FAR")),
        ("speedinter", |r| r.children[0].set("speedinter", "NaN")),
        ("nchannels", |r| r.children[0].attributes.retain(|a| a.0 != "nchannels")),
        ("states", |r| r.children[0].set("nchannels", 99)),
        ("gpu 77", |r| r.children[0].children[0].children[1].set("dev", 77)),
        ("twice", |r| {
            let dev = r.children[0].children[0].children[1].get("dev").unwrap().to_string();
            r.children[0].children[0].children[2].set("dev", dev);
        }),
        ("expected", |r| drop(r.children[0].children[0].children.remove(1))),
        ("net", |r| drop(r.children[0].children[0].children.remove(0))),
    ];
    for (word, change) in cases {
        let bad = rewritten(&text, change);
        let error = compute(&s, &unset, Some(&bad), RUNTIME_NAME).unwrap_err().to_string();
        assert!(error.contains(word), "{word}: {error}");
    }
}

/// Proves INV-52.
#[test]
fn the_network_device_of_a_channel() {
    let s = system(2, 16, 1, 8, 8, 2);
    let mut g = Graph::template(8);
    g.n_channels = 2;
    g.intra = vec![3, 2, 1, 0, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7];
    g.inter = vec![10, 11, 12, 13];
    for channel in 0..8 {
        for rank in 0..8 {
            let head = [3, 0][channel % 2];
            let expected = [[10, 11], [12, 13]][channel % 2][usize::from(rank != head)];
            assert_eq!(net_dev(&s, rank, Some(&g), channel), Ok(expected), "rank {rank}, channel {channel}");
        }
    }
    for rank in 0..8 {
        assert_eq!(net_dev(&s, rank, None, 5), s.nearest_net(rank));
    }
    assert!(net_dev(&s, 99, None, 0).is_err());
}

#[test]
fn p2p_channels_follow_the_fast_paths() {
    let of = |text: &str, n| p2p_channels(&studied(text, false), n);
    // 20 GB/s a link, divisor 18 for tag 64: 2 × max(1, 18/18) = 2.
    let p = of(RING4, 12);
    assert_eq!((p.channels, p.per_peer), (16, 2));
    assert_eq!(p.order, vec![0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15]);
    // No fast path: as many as there are.
    assert_eq!((of(PCIE8, 3).channels, of(PCIE8, 3).per_peer), (4, 4));
    assert_eq!((of(PCIE8, 0).channels, of(PCIE8, 0).per_peer), (1, 1));
    assert_eq!(of(RING4, MAX_CHANNELS + 1).channels, MAX_CHANNELS);
    // Neuron tags fall in the last arm: floor(160 / 21) = 7, times 2.
    let neuron = system(5, 16, 2, 0, 64, 1);
    assert_eq!((p2p_channels(&neuron, 32).channels, p2p_channels(&neuron, 32).per_peer), (32, 16));
}

#[test]
fn a_graph_prints_as_the_original_does() {
    let mut g = Graph::template(1);
    g.n_channels = 2;
    g.speed_intra = 21.0;
    g.speed_inter = 12.0;
    g.type_intra = PathType::Nvl;
    g.type_inter = PathType::Phb;
    assert_eq!(
        g.to_string(),
        "Pattern 4, crossNic 2, nChannels 2, speed 21.000000/12.000000, type NVL/PHB, sameChannels 1"
    );
}

fn reversed(e: &XmlElement) -> XmlElement {
    let children = e.children.iter().rev().map(reversed).collect();
    XmlElement { name: e.name.clone(), attributes: e.attributes.clone(), children }
}

/// Writes ranked gpus under the accelerators of a document that has none (AWS's).
fn give_ranks(e: &mut XmlElement, rank: &mut i32) {
    if e.get("class").is_some_and(|c| c.starts_with("0x0302")) && e.children.is_empty() {
        e.children.push(XmlElement::new("gpu").with("dev", *rank).with("sm", 80).with("rank", *rank));
        *rank += 1;
    }
    e.children.iter_mut().for_each(|c| give_ranks(c, rank));
}

/// Every document from a real machine: read and written stably, the same rings whatever the order of elements, and never
/// the fall-back.
#[test]
fn every_document_of_the_collection_gets_rings() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/topo/testdata");
    let mut pending = vec![root];
    let mut seen = 0;
    while let Some(path) = pending.pop() {
        if path.is_dir() {
            pending.extend(std::fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
            continue;
        }
        if path.extension().is_none_or(|e| e != "xml") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let mut document = xml::read(&text).unwrap();
        assert_eq!(xml::read(&xml::write(&document)).unwrap(), document, "{path:?}");
        let version: i64 = document.get("version").unwrap().parse().unwrap();
        let strict = System::from_element(&document, MachineFacts::default(), false);
        match version {
            1 => assert!(strict.is_ok(), "{path:?}"),
            _ => assert_eq!(strict.unwrap_err(), crate::topo::TopoError::Version { found: version, needed: 1 }),
        }
        give_ranks(&mut document, &mut 0);
        for multi_node in [false, true] {
            let facts = MachineFacts { multi_node, ..MachineFacts::default() };
            let mut s = System::from_element(&document, facts.clone(), true).unwrap();
            s.prepare();
            let outcome = search(&s, &unset);
            let mut mirrored = System::from_element(&reversed(&document), facts, true).unwrap();
            mirrored.prepare();
            assert!(mirrored == s && search(&mirrored, &unset) == outcome, "{path:?}: child order matters");
            assert_ne!(outcome.origin, Origin::Fallback, "{path:?}");
            println!("{:24} across {multi_node:5} {}", path.file_name().unwrap().to_string_lossy(), outcome.graph);
        }
        seen += 1;
    }
    assert_eq!(seen, 31);
}
