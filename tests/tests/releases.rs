//! Two releases of the transport. A running communicator goes from one to the other and back, and keeps its bootstrap
//! connections; whatever needs them works on the new instance.

mod common;

use common::{bytes_of, config, plugin_file, release, values_of, world};
use host_runtime::nrt::{Communicator, Io};
use host_runtime::{DataType, ReduceOp};
use tests::zoo;

fn sum_of_ones(comm: &mut Communicator) {
    let t = comm.tensor(4096).unwrap();
    t.write(0, &bytes_of(&[1.0; 1024])).unwrap();
    comm.all_reduce(Io::in_place(&t), 1024, DataType::Fp32, ReduceOp::Sum).unwrap();
    let mut out = vec![0; 4096];
    t.read(0, &mut out).unwrap();
    let n = comm.nranks() as f32;
    assert!(values_of(&out).iter().all(|v| *v == n));
}

/// Messages that are under way during a swap arrive; gathering, groups and connecting work after it, every time.
#[test]
fn bootstrap_connections_survive_swaps_there_and_back() {
    for n in [3usize, 4] {
        world(n, &config(), move |mut comm| {
            let (rank, runtime) = (comm.rank(), comm.runtime().clone());
            let (to, from) = (((rank + 1) % n) as i32, ((rank + n - 1) % n) as i32);
            let planned = comm.query_info().unwrap();
            if n > 3 {
                // The swap would do it, and take the message that is under way for one of its own.
                comm.expand_connectivity().unwrap();
            }
            for turn in 0..4u8 {
                comm.bootstrap_send(to, &[turn; 9]).unwrap();
                let next = turn % 2 == 0;
                let path = release(if next { "nccom-next" } else { "nccom" });
                runtime.replace_library(&path, &[&comm]).unwrap();
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

/// Three swaps in a row without anything between them: what is parked is handed on as it is.
#[test]
fn parked_connections_are_handed_on_from_swap_to_swap() {
    world(2, &config(), move |comm| {
        let runtime = comm.runtime().clone();
        for name in ["nccom-next", "nccom", "nccom-next"] {
            runtime.replace_library(&release(name), &[&comm]).unwrap();
        }
        assert_eq!(comm.bootstrap_all_gather(&[comm.rank() as u8]).unwrap(), [0, 1]);
    });
}

/// A successor that cannot import gets no plan; the sockets stay with the host until the communicator ends, and then the
/// peer learns of it.
#[test]
fn what_a_successor_does_not_take_ends_with_the_communicator() {
    let core = zoo::built("nccom-next.core.wasm").unwrap();
    let deaf = zoo::rewrite(&core, &[("neuron:lifecycle/lifecycle@1.0.0#import-state", "unreachable")]).unwrap();
    let file = plugin_file("does-not-import", &zoo::described(&deaf).unwrap());
    let path: std::path::PathBuf = file.path().into();
    world(2, &config(), move |comm| {
        if comm.rank() == 0 {
            // Whether that is refused, or goes on without a plan, is the swap's to say: either way nothing is lost yet.
            let _ = comm.runtime().clone().replace_library(&path, &[&comm]);
            comm.bootstrap_all_gather(&[0]).map(drop).unwrap_or(());
        } else {
            let e = comm.bootstrap_all_gather(&[1]).and_then(|_| comm.bootstrap_all_gather(&[1])).unwrap_err();
            assert!(e.to_string().contains("closed its connection"), "{e}");
        }
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
