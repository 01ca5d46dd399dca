//! Discovery as a whole: synthesised servers, published documents, device sets, questions.

use super::xml::XmlElement;
use super::*;
use proptest::prelude::*;

const P4D: &str = include_str!("testdata/p4d-24xl-topo.xml");
const RING4: &str = include_str!("testdata/topo_4p1h.xml");
const PCIE8: &str = include_str!("testdata/topo_8p_pcie_2nic.xml");

fn unset(_: &str) -> Option<String> {
    None
}

fn with(name: &'static str, value: &'static str) -> impl Fn(&str) -> Option<String> {
    move |n| (n == name).then(|| value.to_string())
}

fn synthesized(family: u32, devices: i32, vcore: u32, nics: i32, gpus: i32, nodes: i32) -> System {
    let m = TableMachine::server(family, devices, vcore, nics);
    discover(&m, &m.ranks(gpus, nodes), 0, &unset, None).unwrap().0
}

fn studied(text: &str) -> System {
    let mut s = System::from_document(text, MachineFacts::default(), true).unwrap();
    s.prepare();
    s
}

#[test]
fn servers_of_every_platform_have_paths() {
    for (family, devices, vcore, nics, gpus) in [
        (2, 16, 1, 8, 32),
        (2, 16, 1, 0, 32),
        (4, 8, 1, 0, 16),
        (5, 16, 2, 16, 64),
        (14, 16, 1, 16, 128),
        (15, 16, 2, 16, 64),
        (2, 1, 1, 0, 1),
    ] {
        for nodes in [1, 2] {
            let s = synthesized(family, devices, vcore, nics, gpus, nodes);
            assert_eq!(s.bucket(NodeType::Gpu).len(), gpus as usize);
            assert_eq!(s.bucket(NodeType::Net).len(), nics as usize);
            for &a in s.bucket(NodeType::Gpu) {
                for &b in s.bucket(NodeType::Gpu).iter().chain(s.bucket(NodeType::Net)) {
                    let path = s.path(a, b).unwrap();
                    let info = s.path_info(a, b).unwrap();
                    assert_eq!((path.kind, path.width, path.links.len()), (info.kind, info.width, info.hops));
                    let mut at = a;
                    for link in path.links.iter().map(|l| &s.links[*l]) {
                        assert_eq!(link.from, at);
                        assert!(link.width >= path.width);
                        at = link.to;
                    }
                    assert_eq!(at, b);
                }
            }
            assert!(s.to_string().contains("GPU/0(0)"));
        }
    }
}

#[test]
fn cores_of_neighbours_talk_over_the_fabric() {
    let s = synthesized(5, 16, 2, 16, 64, 1);
    let kind = |a: i32, b: i32| s.path_info(s.node_of_rank(a).unwrap(), s.node_of_rank(b).unwrap()).unwrap().kind;
    assert_eq!(kind(0, 3), PathType::Nvl, "cores of one accelerator");
    assert_eq!(kind(0, 4), PathType::Nvl, "torus neighbours 0 and 1");
    assert_eq!(kind(0, 4 * 12 + 2), PathType::Nvl, "torus neighbours 0 and 12");
    assert_eq!(kind(0, 4 * 5), PathType::Phb, "0 and 5 are no neighbours");
    assert_eq!(kind(0, 4 * 10), PathType::Sys, "0 and 10 are no neighbours and on other CPUs");
    assert!(s.check_p2p(0, 4).p2p);
    assert!(!s.check_p2p(0, 20).p2p, "PHB is worse than the default level");
    assert!(!s.check_p2p(0, 1000).p2p, "unknown ranks are elsewhere");
    assert!(synthesized(2, 16, 1, 8, 32, 1).check_p2p(0, 20).p2p, "sunda reaches all of its server");
}

#[test]
fn the_p2p_variables_gate() {
    let m = TableMachine::server(5, 16, 2, 16);
    let check = |vars: &dyn Fn(&str) -> Option<String>, a, b| {
        discover(&m, &m.ranks(64, 1), 0, vars, None).unwrap().0.check_p2p(a, b).p2p
    };
    assert!(!check(&with("NCCL_P2P_DISABLE", "1"), 0, 4));
    assert!(check(&with("NCCL_P2P_DISABLE", "0"), 0, 4));
    assert!(check(&with("NCCL_P2P_LEVEL", "SYS"), 0, 40));
    assert!(check(&with("NCCL_P2P_LEVEL", "5"), 0, 40));
    assert!(!check(&with("NCCL_P2P_LEVEL", "LOC"), 0, 4));
    let bad = discover(&m, &m.ranks(64, 1), 0, &with("NCCL_P2P_LEVEL", "near"), None);
    assert!(matches!(bad, Err(TopoError::BadVariable { name: "NCCL_P2P_LEVEL", .. })));
}

/// Proves INV-43.
#[test]
fn only_complete_sets_of_1_4_8_or_16_devices() {
    let m = TableMachine::server(5, 16, 2, 0);
    let all = m.ranks(64, 1);
    let on = |devices: &[i32], vars: &dyn Fn(&str) -> Option<String>| {
        let ranks: Vec<RankInfo> = all.iter().filter(|r| devices.contains(&r.mla)).cloned().collect();
        discover(&m, &ranks, ranks[0].rank, vars, None).map(|_| ())
    };
    let range = |n: i32| (0..n).collect::<Vec<_>>();
    for n in 1..=16 {
        let result = on(&range(n), &unset);
        if [1, 4, 8, 16].contains(&n) {
            assert_eq!(result, Ok(()), "{n}");
        } else {
            let error = result.unwrap_err();
            assert_eq!(error, TopoError::DeviceCount { found: n as usize });
            let text = format!("expects 1, 4, 8, or 16 local devices but got {n}");
            assert!(error.to_string().contains(&text), "{error}");
        }
        assert_eq!(on(&range(n), &with(verify::DISABLE_VERIFY, "1")), Ok(()), "{n}");
        assert_eq!(on(&range(n), &with(verify::DISABLE_VERIFY, "0")).is_ok(), [1, 4, 8, 16].contains(&n));
    }
    assert_eq!(on(&[4, 5, 6, 7], &unset), Ok(()));
    let gap = on(&[0, 1, 4, 6], &unset).unwrap_err();
    assert_eq!(
        gap.to_string(),
        "Unsupported topology. Devices with IDs 2 and 5 are part of topology but devices with those IDs are missing"
    );
    assert_eq!(on(&[0, 1, 4, 6], &with(verify::DISABLE_VERIFY, "1")), Ok(()));
    // A device of the rank set that the graph does not hold.
    let (system, _) = discover(&m, &all[..16], 0, &unset, None).unwrap();
    let ranks: Vec<RankInfo> = all[4..20].to_vec();
    assert_eq!(
        verify::verify(&system, &ranks.iter().collect::<Vec<_>>(), &unset),
        Err(TopoError::MissingDevices { first: 4, last: 4 })
    );
}

#[test]
fn a_published_document_gets_this_runs_devices() {
    let mut m = TableMachine::server(5, 8, 2, 4);
    let bus = [0x10, 0x10, 0x20, 0x20, 0x90, 0x90, 0xa0, 0xa0];
    for (i, bus) in bus.into_iter().enumerate() {
        m.bdfs.insert(i as i32, Bdf { domain: 0, bus, slot: 0x1c + (i as u8 % 2), func: 0 });
    }
    for (i, bus) in [0x10, 0x20, 0x90, 0xa0].into_iter().enumerate() {
        m.nics[i].bdf = Bdf { domain: 0, bus, slot: 0x1b, func: 0 };
    }
    let ranks = m.ranks(32, 2);
    let (s, dump) = discover(&m, &ranks, 3, &unset, Some(P4D)).unwrap();
    assert_eq!(s.ranks(), (0..32).collect::<Vec<_>>());
    for rank in 0..32 {
        assert_eq!(s.nearest_net(rank), Ok(rank / 8), "rank {rank}: the NIC behind its switch");
    }
    assert_eq!(s.affinity(0).unwrap().to_string(), "000000ff,ffff0000,00ffffff");
    assert_eq!(s.affinity(31).unwrap().to_string(), "ffffff00,0000ffff,ff000000");
    assert!(dump.contains("subsystem_vendor=\"0x10de\""), "unknown attributes are kept");
    // The dump is a document of the same graph.
    let (again, dump_again) = discover(&m, &ranks, 3, &unset, Some(&dump)).unwrap();
    assert_eq!(dump_again, dump);
    assert!(again == s);
    // Every rank of the node finds the same.
    for rank in [0, 17, 31] {
        assert!(discover(&m, &ranks, rank, &unset, Some(P4D)).unwrap() == (s.clone(), dump.clone()));
    }
}

#[test]
fn documents_that_do_not_fit_name_node_and_attribute() {
    let m = TableMachine::server(5, 4, 2, 0);
    let load = |text: &str| discover(&m, &m.ranks(16, 1), 0, &unset, Some(text)).unwrap_err();
    let two = load(RING4).to_string();
    assert!(two.contains("wrong version 2, 1 needed"), "{two}");
    assert!(System::from_document(RING4, MachineFacts::default(), true).is_ok());
    let six = RING4.replace("version=\"2\"", "version=\"6\"");
    assert!(System::from_document(&six, MachineFacts::default(), true).is_err());
    assert!(matches!(load("<graphs version='1'/>"), TopoError::WrongRoot { .. }));
    assert_eq!(load("<system version='1'/>"), TopoError::NoCpu);
    for (from, to, node, attribute) in [
        ("numaid=\"0\" ", "", "cpu", "numaid"),
        ("arch=\"x86_64\" ", "", "cpu 0", "arch"),
        ("busid=\"0000:1a:00.0\" ", "", "pci in pci 0000:18:00.0", "busid"),
        ("sm=\"64\" ", "", "gpu 0 in pci 0000:1d:00.0", "sm"),
        ("target=\"0000:20:00.0\" ", "", "xgmi in gpu 0", "target"),
        ("speed=\"100000\" ", "speed=\"fast\" ", "net 0 in pci 0000:1a:00.0", "speed"),
        ("name=\"mlx5_0\" ", "", "net 0", "name"),
        ("affinity=\"0003ff", "affinity=\"xyz", "cpu 0", "affinity"),
        ("count=\"1\"", "count=\"-7\"", "xgmi 0000:20:00.0", "count"),
    ] {
        let text = RING4.replacen(from, to, 1);
        assert_ne!(text, RING4, "{from}");
        let error = System::from_document(&text, MachineFacts::default(), true).unwrap_err().to_string();
        assert!(error.contains(node) && error.contains(attribute), "{error}");
    }
    let twice = RING4.replace("0000:20:00.0", "0000:1d:00.0");
    assert!(matches!(System::from_document(&twice, MachineFacts::default(), true), Err(TopoError::Duplicate { .. })));
    let ranks = RING4.replace("rank=\"1\"", "rank=\"0\"");
    assert!(matches!(System::from_document(&ranks, MachineFacts::default(), true), Err(TopoError::Duplicate { .. })));
}

fn shuffled(e: &XmlElement, seed: &mut u64) -> XmlElement {
    let mut children: Vec<XmlElement> = e.children.iter().map(|c| shuffled(c, seed)).collect();
    for i in (1..children.len()).rev() {
        *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        children.swap(i, (*seed >> 33) as usize % (i + 1));
    }
    XmlElement { name: e.name.clone(), attributes: e.attributes.clone(), children }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn child_order_changes_nothing(seed in any::<u64>(), which in 0usize..3) {
        let m = TableMachine::server(5, 16, 2, 16);
        let ranks = m.ranks(64, 2);
        let text = match which {
            0 => discover(&m, &ranks, 0, &unset, None).unwrap().1,
            1 => RING4.to_string(),
            _ => PCIE8.to_string(),
        };
        let root = xml::read(&text).unwrap();
        let mixed = shuffled(&root, &mut { seed });
        prop_assert!(studied(&xml::write(&mixed)) == studied(&text));
    }
}

#[test]
fn preferred_nics() {
    let m = TableMachine::server(2, 16, 1, 8);
    let ranks = m.ranks(8, 1);
    let (s, _) = discover(&m, &ranks, 0, &unset, None).unwrap();
    // Four accelerators carry ranks, two a switch; the four NICs of the NUMA node are spread over the two switches.
    assert_eq!(s.preferred_net(0, 0).unwrap(), (0, "0000:c0:1d.0".to_string()));
    assert_eq!(s.preferred_net(1, 3).unwrap().0, 2);
    assert_eq!(s.preferred_net(9, 3).unwrap().0, 2, "an unknown core of a known accelerator");
    assert_eq!(s.preferred_net(0, 15).unwrap().0, 4, "no rank there: its NUMA node's lowest");
    assert_eq!(s.preferred_net(0, 99).unwrap().0, 0, "nothing known: the lowest");
    let none = synthesized(2, 16, 1, 0, 8, 1);
    assert_eq!(none.preferred_net(0, 0), Err(TopoError::NoNet));
    assert_eq!(none.nearest_net(0), Err(TopoError::NoNet));
    assert_eq!(none.nearest_net(77), Err(TopoError::UnknownRank { rank: 77 }));
}

#[test]
fn two_ranks_on_one_core_are_refused() {
    let m = TableMachine::server(5, 1, 2, 0);
    let mut ranks = m.ranks(4, 1);
    ranks[3].neuron_dev = 1;
    let error = discover(&m, &ranks, 0, &unset, None).unwrap_err();
    assert!(error.to_string().contains("device 1 (ranks 1 and 3)"), "{error}");
    assert_eq!(discover(&m, &ranks, 9, &unset, None), Err(TopoError::NoLocalRank { rank: 9 }));
}
