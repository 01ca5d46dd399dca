//! The choice of algorithms as ranks meet: one table for all, or an error that says so.

use std::sync::Arc;

use enc::Algorithm;
use enc::table::Table;
use wccl::{CommOptions, Communicator, DataType, Error, Io, ReduceOp, Runtime, RuntimeConfig};

use crate::common::{bytes_of, config, free_port, world};

fn reduce(comm: &mut Communicator, count: u64) -> Result<(), Error> {
    let t = comm.allocate(count * 4)?;
    t.write(0, &bytes_of(&vec![1.0; count as usize]))?;
    comm.raw().all_reduce(Io::in_place(&t), count, DataType::Fp32, ReduceOp::Sum)?;
    let mut out = vec![0; t.len() as usize];
    t.read(0, &mut out)?;
    assert_eq!(out, bytes_of(&vec![comm.nranks() as f32; count as usize]));
    Ok(())
}

/// Two ranks with a configuration each; their results of one all_reduce.
fn two(configs: [RuntimeConfig; 2], adapt: fn(&mut Communicator)) -> Vec<Result<(), Error>> {
    let root = format!("127.0.0.1:{}", free_port());
    let ranks: Vec<_> = configs
        .into_iter()
        .enumerate()
        .map(|(rank, c)| {
            let root = root.clone();
            std::thread::spawn(move || {
                let mut comm = Runtime::open(c).unwrap().init_comm(CommOptions::with_root(root, rank, 2)).unwrap();
                adapt(&mut comm);
                reduce(&mut comm, 1000)
            })
        })
        .collect();
    ranks.into_iter().map(|r| r.join().unwrap()).collect()
}

fn table(text: &str) -> Option<Arc<Table>> {
    Some(Arc::new(text.parse().unwrap()))
}

#[test]
fn a_table_is_used_by_all_ranks() {
    let c = RuntimeConfig { table: table("wccl-tune 1\n* hbm 3 64K ring\n* hbm 3 * mesh\n"), ..config() };
    let shares = world(3, &c, |mut comm| {
        for count in [1u64, 100, 16_384, 16_385, 100_000] {
            reduce(&mut comm, count).unwrap();
        }
        // Bytes that reductions read tell which algorithm was used.
        [16_384u64, 16_385].map(|count| {
            let before = comm.counters().reduced;
            reduce(&mut comm, count).unwrap();
            (comm.counters().reduced - before) as f64 / (count * 4) as f64
        })
    });
    // Ring: n-1 times two sources of a third; mesh: three sources of a third.
    for [ring, mesh] in shares {
        assert!((1.30..1.37).contains(&ring) && (0.97..1.03).contains(&mesh), "{ring} {mesh}");
    }
}

/// Both would choose the same for this call, and still it is an error: they would not for another.
#[test]
fn ranks_with_other_tables_learn_it_at_their_first_meeting() {
    let a = RuntimeConfig { table: table("wccl-tune 1\n* hbm * 1M mesh\n"), ..config() };
    let b = RuntimeConfig { table: table("wccl-tune 1\n* hbm * 2M mesh\n"), ..config() };
    let said = two([a.clone(), b], |_| {});
    assert!(said.iter().all(Result::is_err), "{said:?}");
    let named = said.iter().any(|r| r.as_ref().is_err_and(|e| e.to_string().contains("WCCL_TUNE_FILE")));
    assert!(named, "{said:?}");
    let none = two([a.clone(), RuntimeConfig { table: None, ..a.clone() }], |_| {});
    assert!(none.iter().all(Result::is_err), "{none:?}");
    assert!(two([a.clone(), a], |_| {}).iter().all(Result::is_ok));
}

#[test]
fn ranks_that_force_other_algorithms_learn_it() {
    let said = two([config(), config()], |comm| {
        comm.set_algorithm(Some(if comm.rank() == 0 { Algorithm::Ring } else { Algorithm::Mesh }));
    });
    assert!(said.iter().all(Result::is_err), "{said:?}");
    let texts: Vec<String> = said.iter().map(|r| r.as_ref().unwrap_err().to_string()).collect();
    assert!(texts.iter().any(|t| t.contains("by ring") && t.contains("by mesh (WCCL_ALGO, ")), "{texts:?}");
}

#[test]
fn what_is_set_holds_from_the_next_call_on() {
    world(2, &config(), |mut comm| {
        for algorithm in [None, Some(Algorithm::Ring), Some(Algorithm::Mesh), Some(Algorithm::OneHop), None] {
            comm.set_algorithm(algorithm);
            reduce(&mut comm, 1000).unwrap();
        }
    });
}
