//! Two releases of the transport. A running communicator goes from one to the other and back, and keeps its bootstrap
//! connections; whatever needs them works on the new instance.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tests::zoo;
use wccl::swap::{Order, Report, coordinate};
use wccl::{CommOptions, Communicator, DataType, Io, ReduceOp, Runtime, RuntimeConfig};

use crate::common::{HANG, bytes_of, config, free_port, plugin_file, release, values_of, world};

/// A tenant of the test's own, whose ranks are threads.
fn tenant(name: &str) -> RuntimeConfig {
    RuntimeConfig { tenant: format!("{name}.{}", std::process::id()), ..config() }
}

/// Swaps all ranks of `comm`'s tenant to `file`: rank 0 does it, when all have come, and the others wait for it outside of the
/// library. `swaps` counts them. Answers rank 0's report.
fn swap(comm: &mut Communicator, swaps: &AtomicUsize, nth: usize, file: &Path) -> Option<Report> {
    comm.barrier().unwrap();
    if comm.rank() == 0 {
        let tenant = comm.runtime().config().tenant.clone();
        let order =
            Order { timeout: HANG, quiesce: HANG / 2, probation: Duration::ZERO, ..Order::transport(&tenant, file) };
        let report = coordinate(&order);
        swaps.store(nth, Ordering::Release);
        return Some(report.unwrap());
    }
    let until = Instant::now() + HANG;
    while swaps.load(Ordering::Acquire) < nth {
        assert!(Instant::now() < until, "rank 0 did not swap");
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

fn committed(report: Option<Report>) {
    assert!(report.iter().all(|r| r.committed), "{report:?}");
}

fn sum_of_ones(comm: &mut Communicator) {
    let t = comm.allocate(4096).unwrap();
    t.write(0, &bytes_of(&[1.0; 1024])).unwrap();
    comm.raw().all_reduce(Io::in_place(&t), 1024, DataType::Fp32, ReduceOp::Sum).unwrap();
    let mut out = vec![0; 4096];
    t.read(0, &mut out).unwrap();
    let n = comm.nranks() as f32;
    assert!(values_of(&out).iter().all(|v| *v == n));
}

/// Messages that are under way during a swap arrive; gathering, groups and connecting work after it, every time.
#[test]
fn bootstrap_connections_survive_swaps_there_and_back() {
    for n in [3usize, 4] {
        let swaps = Arc::new(AtomicUsize::new(0));
        world(n, &tenant(&format!("there-and-back-{n}")), move |mut comm| {
            let rank = comm.rank();
            let (to, from) = (((rank + 1) % n) as i32, ((rank + n - 1) % n) as i32);
            let planned = comm.query_info().unwrap();
            if n > 3 {
                // A swap of more than three ranks wants them linked.
                comm.expand_connectivity().unwrap();
            }
            for turn in 0..4u8 {
                comm.bootstrap_send(to, &[turn; 9]).unwrap();
                let next = turn % 2 == 0;
                let path = release(if next { "nccom-next" } else { "nccom" });
                committed(swap(&mut comm, &swaps, turn as usize + 1, &path));
                assert_eq!(comm.bootstrap_recv(from, 9).unwrap(), [turn; 9]);
                let all = comm.bootstrap_all_gather(&[rank as u8, turn]).unwrap();
                assert!((0..n).all(|r| all[2 * r..2 * r + 2] == [r as u8, turn]), "{all:?}");
                sum_of_ones(&mut comm);
                let info = comm.query_info().unwrap();
                assert_eq!((info.cluster_id, info.epoch), (planned.cluster_id, planned.epoch));
                assert_eq!((&info.mla_cycles, &info.kangaring_paths), (&planned.mla_cycles, &planned.kangaring_paths));
                let turned = info.rings[1].next == info.rings[0].prev;
                assert_eq!(turned, next, "the successor plans its own rings");
                if !next {
                    let orders = |i: &[_]| format!("{i:?}");
                    assert_eq!(orders(&info.rings), orders(&planned.rings), "and the way back leads to the old ones");
                }
                (0..info.rings.len() as i32).for_each(|c| comm.ring_connector(c, true).unwrap());
                // With three ranks the swap itself has connected nobody.
                comm.expand_connectivity().unwrap();
                let mut half = comm.split(Some(rank as u32 % 2), 0).unwrap().unwrap();
                sum_of_ones(&mut half);
                if rank != n - 1 {
                    sum_of_ones(&mut comm.shrink(&[n - 1]).unwrap());
                }
                comm.barrier().unwrap();
            }
            assert!(comm.control_stopped().is_none());
        });
    }
}

/// Messages go on while a swap is made: they pass no gate, and every one arrives.
#[test]
fn messages_go_on_during_swaps() {
    let n = 4;
    let swaps = Arc::new(AtomicUsize::new(0));
    world(n, &tenant("under-messages"), move |mut comm| {
        let rank = comm.rank();
        let (to, from) = ((rank + 1) % n, (rank + n - 1) % n);
        comm.expand_connectivity().unwrap();
        comm.barrier().unwrap();
        let tenant = comm.runtime().config().tenant.clone();
        std::thread::scope(|s| {
            if rank == 0 {
                let swaps = &swaps;
                s.spawn(move || {
                    for name in ["nccom-next", "nccom"] {
                        let file = release(name);
                        let order = Order {
                            timeout: HANG,
                            quiesce: HANG / 2,
                            probation: Duration::ZERO,
                            ..Order::transport(&tenant, &file)
                        };
                        committed(Some(coordinate(&order).unwrap()));
                        swaps.fetch_add(1, Ordering::AcqRel);
                    }
                });
            }
            // Round and round, until rank 0 has seen both swaps and says so in its last message, which is handed on.
            let (mut got, mut said, mut heard, mut round) = (vec![0; 20_000], false, false, 0u32);
            while !said || !heard {
                let len = [8, 4000, 20_000][round as usize % 3];
                let sends = (!said).then(|| {
                    said = heard || rank == 0 && swaps.load(Ordering::Acquire) == 2;
                    comm.isend(to, u32::from(said), vec![round as u8; len]).unwrap()
                });
                if !heard {
                    let r = comm.recv(Some(from), None, &mut got[..]).unwrap();
                    assert!(r.len as usize == len && got[..len].iter().all(|b| *b == round as u8), "round {round}");
                    heard = r.tag == 1;
                }
                sends.into_iter().for_each(|s| assert!(s.wait().result.is_ok()));
                round += 1;
            }
        });
        sum_of_ones(&mut comm);
    });
}

/// Three swaps in a row without anything between them: what is parked is handed on as it is.
#[test]
fn parked_connections_are_handed_on_from_swap_to_swap() {
    let swaps = AtomicUsize::new(0);
    world(2, &tenant("handed-on"), move |mut comm| {
        for (i, name) in ["nccom-next", "nccom", "nccom-next"].into_iter().enumerate() {
            committed(swap(&mut comm, &swaps, i + 1, &release(name)));
        }
        assert_eq!(comm.bootstrap_all_gather(&[comm.rank() as u8]).unwrap(), [0, 1]);
    });
}

/// A successor that stops in its import is refused, and the old one has its connections again.
#[test]
fn connections_come_back_when_a_swap_is_refused() {
    let core = zoo::built("nccom-next.core.wasm").unwrap();
    let deaf = zoo::rewrite(&core, &[("neuron:lifecycle/lifecycle@1.0.0#import-state", "unreachable")]).unwrap();
    let file = plugin_file("does-not-import", &zoo::described(&deaf).unwrap());
    let swaps = AtomicUsize::new(0);
    world(2, &tenant("refused"), move |mut comm| {
        if let Some(report) = swap(&mut comm, &swaps, 1, file.path()) {
            assert!(!report.committed && report.reason.contains("import-state"), "{report:?}");
        }
        assert_eq!(comm.bootstrap_all_gather(&[comm.rank() as u8]).unwrap(), [0, 1]);
        sum_of_ones(&mut comm);
    });
}

/// A release that hangs in its import is stopped by its deadline and refused; the old one goes on.
#[test]
fn a_release_that_hangs_is_refused() {
    let mut tenant = tenant("hangs");
    tenant.limits.call = Duration::from_secs(2);
    let swaps = AtomicUsize::new(0);
    world(2, &tenant, move |mut comm| {
        if let Some(report) = swap(&mut comm, &swaps, 1, &release("nccom-stuck")) {
            assert!(!report.committed && report.reason.contains("of guest time"), "{report:?}");
        }
        assert_eq!(comm.bootstrap_all_gather(&[comm.rank() as u8]).unwrap(), [0, 1]);
        sum_of_ones(&mut comm);
    });
}

/// Swaps in the middle of checked all-reduces of four ranks: nothing is lost, nothing wrong.
#[test]
fn swaps_under_load_lose_nothing() {
    let out = std::process::Command::new(env!("CARGO_BIN_EXE_swaps"))
        .arg("20")
        .env("CCOM_SOCKET_IFNAME", "lo")
        .env("WCCL_PLUGIN", release("nccom"))
        .output()
        .unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{said}");
    let last = said.lines().rfind(|l| l.starts_with("swaps: ")).unwrap();
    assert!(last.starts_with("swaps: 20 swaps, ") && last.ends_with(" operations, 0 lost, 0 wrong"), "{said}");
}

/// Two ranks with libraries of other sources are refused by the root of a global group, and both are told; a library that was
/// built twice from the same sources is one.
///
/// Proves INV-32.
#[test]
fn ranks_with_libraries_of_other_sources_do_not_meet() {
    let built_again = plugin_file("built-again", &std::fs::read(release("nccom")).unwrap());
    for (second, meet) in [(built_again.path().to_path_buf(), true), (release("nccom-next"), false)] {
        let root = format!("127.0.0.1:{}", free_port());
        let ranks = [release("nccom"), second].into_iter().enumerate().map(|(rank, plugin)| {
            let (root, config) = (root.clone(), RuntimeConfig { plugin: Some(plugin), ..config() });
            std::thread::spawn(move || {
                let runtime = Runtime::open(config).unwrap();
                runtime.init_comm(CommOptions::with_root(root, rank, 2)).map(|mut comm| sum_of_ones(&mut comm))
            })
        });
        for rank in ranks.collect::<Vec<_>>() {
            match rank.join().unwrap() {
                Ok(()) => assert!(meet, "they met"),
                Err(e) => assert!(!meet && e.to_string().contains("git hash mismatch"), "{e}"),
            }
        }
    }
}

/// The rings of the library are the searched ones and a copy of each, in their order, at most 32.
///
/// Proves INV-51.
#[test]
fn the_library_doubles_its_rings_by_copying() {
    for n in [2usize, 3, 4] {
        world(n, &config(), |comm| {
            let rings = comm.rings().to_vec();
            let (searched, copies) = rings.split_at(rings.len() / 2);
            assert!(!searched.is_empty() && rings.len() <= 32 && searched == copies, "{rings:?}");
        });
    }
}
