//! Instructions of one call on one of two ranks, from the public call to its return, outside waiting: printed as a table, and
//! held under bounds.
//!
//! The two ranks are threads. For each call the other rank goes first, and this one steps through its own ([`stepping`]), so
//! slowly that whatever it waits for has come: by its own counters a call that found anything missing is not counted. The
//! other never sleeps ([`WaitMode::Latency`]), so nobody need be woken. The number is the mean of as many calls in a row as a
//! lane has slots, so that the looks whether a slot is free again are in it with their part.
//!
//! The table: `cargo test --release -p tests --test counts instructions -- --nocapture`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hw_bridge::call::Op;
use hw_bridge::limits::SLOTS;
use hw_bridge::os::bell::WaitMode;
use wccl::{Communicator, RuntimeConfig};

use crate::common::{config, world};
use crate::stepping::instructions;
use crate::{Buffers, run};

/// Bytes of a block, and whether in device memory: the columns of [`MOST`].
const COLUMNS: [(usize, bool); 4] = [(8, false), (8, true), (1024, false), (1024, true)];

/// The rank that `run` makes the root.
const ROOT: usize = 1;

/// The operation, the rank that is counted, and how many instructions it may take: some 15 % more than it takes, for other
/// compilers and C libraries.
#[rustfmt::skip]
const MOST: [(Op, usize, [u64; 4]); 14] = [
    (Op::AllReduce, 0, [1030, 1080, 1260, 1450]),
    (Op::Broadcast, ROOT, [790, 840, 1000, 1050]),
    (Op::Broadcast, 0, [830, 850, 970, 1040]),
    (Op::Reduce, ROOT, [1020, 1070, 1150, 1310]),
    (Op::Reduce, 0, [680, 710, 800, 1280]),
    (Op::AllGather, 0, [960, 1010, 1290, 1400]),
    (Op::ReduceScatter, 0, [1040, 1090, 1310, 1370]),
    (Op::AllToAll, 0, [970, 1020, 1350, 1400]),
    (Op::SendRecv, 0, [980, 1030, 1220, 1540]),
    (Op::Barrier, 0, [820, 820, 820, 820]),
    (Op::Gather, ROOT, [950, 1000, 1180, 1360]),
    (Op::Gather, 0, [680, 700, 790, 910]),
    (Op::Scatter, ROOT, [800, 840, 1050, 1120]),
    (Op::Scatter, 0, [830, 850, 970, 1130]),
];

/// Calls before any is counted: all that is done once is done.
const WARM: u64 = 2 * SLOTS as u64;
/// Calls that are tried for as many that do not wait as there are slots.
const TRIED: u64 = 1000;

/// Who goes when. The rank that is counted says how many calls there are, the other how many it has begun.
#[derive(Default)]
struct Turns {
    calls: AtomicU64,
    begun: AtomicU64,
}

/// No further call comes.
const OVER: u64 = u64::MAX;

/// The mean number of instructions of one call of `op` on this rank.
fn counted(
    comm: &mut Communicator,
    buffers: &mut Buffers,
    op: Op,
    (block, device): (usize, bool),
    turns: &Turns,
) -> u64 {
    let (rank, n) = (comm.rank(), comm.nranks());
    let (mut sum, mut kept) = (0, 0);
    for i in 1..=WARM + TRIED {
        turns.calls.store(i, Ordering::Release);
        while turns.begun.load(Ordering::Acquire) < i {
            std::thread::yield_now();
        }
        let io = buffers.io(op, device, false, rank, block, n);
        if i <= WARM {
            run(comm, io, op, block / 4);
            continue;
        }
        // Time for the other to come to where it waits.
        std::thread::sleep(Duration::from_micros(200));
        let waits = comm.counters().waits;
        let (taken, ()) = instructions(|| run(comm, io, op, block / 4));
        if comm.counters().waits == waits {
            sum += taken;
            kept += 1;
        }
        if kept == SLOTS as u64 {
            break;
        }
    }
    turns.calls.store(OVER, Ordering::Release);
    assert_eq!(kept, SLOTS as u64, "{}: all but {kept} of {TRIED} calls waited", op.name());
    sum / kept
}

/// The other rank's part in it.
fn accompany(comm: &mut Communicator, buffers: &mut Buffers, op: Op, (block, device): (usize, bool), turns: &Turns) {
    let (rank, n) = (comm.rank(), comm.nranks());
    for i in 1.. {
        let calls = loop {
            let calls = turns.calls.load(Ordering::Acquire);
            if calls >= i {
                break calls;
            }
            std::thread::yield_now();
        };
        if calls == OVER {
            return;
        }
        turns.begun.store(i, Ordering::Release);
        run(comm, buffers.io(op, device, false, rank, block, n), op, block / 4);
    }
}

#[test]
fn a_call_takes_no_more_instructions_than_are_written_down() {
    let turns: Arc<Vec<Turns>> = Arc::new((0..MOST.len() * COLUMNS.len()).map(|_| Turns::default()).collect());
    let ranks = world(2, &RuntimeConfig { wait: WaitMode::Latency, ..config() }, move |mut comm| {
        let mut buffers = Buffers::new(&comm, 2 * 1024);
        let cases = MOST.iter().flat_map(|(op, who, _)| COLUMNS.map(|column| (*op, *who, column)));
        let one = |((op, who, column), turns)| match who == comm.rank() {
            true => Some(counted(&mut comm, &mut buffers, op, column, turns)),
            false => {
                accompany(&mut comm, &mut buffers, op, column, turns);
                None
            }
        };
        cases.zip(&*turns).map(one).collect::<Vec<Option<u64>>>()
    });
    let took: Vec<u64> = ranks[0].iter().zip(&ranks[1]).filter_map(|(a, b)| a.or(*b)).collect();
    println!("| instructions of a call | 8 B host | 8 B device | 1 KiB host | 1 KiB device |\n|---|---|---|---|---|");
    let mut over = Vec::new();
    for ((op, who, most), took) in MOST.iter().zip(took.chunks(COLUMNS.len())) {
        let role = match op.facts().has_root {
            true if *who == ROOT => ", root",
            true => ", other",
            false => "",
        };
        println!("| {}{role} | {} | {} | {} | {} |", op.name(), took[0], took[1], took[2], took[3]);
        over.extend(took.iter().zip(most).zip(COLUMNS).filter(|((took, most), _)| took > most).map(
            |((took, most), (bytes, device))| {
                format!("{}{role}, {bytes} B, device memory {device}: {took}, at most {most}", op.name())
            },
        ));
    }
    assert!(over.is_empty(), "more instructions than before:\n{}", over.join("\n"));
}
