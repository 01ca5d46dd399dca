//! Counted: in the steady state a collective allocates nothing and calls no component, and each rank moves as many bytes as
//! the algorithm's theory says, in no more instructions than are written down.
//!
//! The allocator of this binary counts for each thread by itself, so that what the test harness does elsewhere does not
//! matter.
//!
//! | file | holds |
//! |---|---|
//! | this | allocations, component calls, bytes |
//! | `instructions` | instructions of a call, by operation |
//! | `stepping` | how instructions are counted |

#![expect(unsafe_code, reason = "an allocator that counts")]

#[path = "../common/mod.rs"]
mod common;

#[cfg(target_arch = "x86_64")]
mod instructions;
#[cfg(target_arch = "x86_64")]
mod stepping;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{config, world};
use enc::Algorithm;
use hw_bridge::call::Op;
use hw_bridge::limits::STAGE_BYTES;
use sandbox::policy::{Rate, SharePolicy};
use wccl::{Communicator, DataType, DeviceMemory, Io, Peers, ReduceOp, RuntimeConfig};

thread_local! {
    // Neither lazily made nor dropped, so that the allocator may use it at any time.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is passed on to the system's allocator as it is; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        ALLOCATIONS.with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's contract.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn allocations() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

#[test]
fn the_allocator_counts_this_thread() {
    let before = allocations();
    drop(std::hint::black_box(Box::new(5u64)));
    assert_eq!(allocations(), before + 1);
    std::thread::spawn(|| drop(std::hint::black_box(vec![1u8; 100]))).join().unwrap();
    let after = allocations();
    assert!(after > before);
    assert_eq!(allocations(), after);
}

/// Buffers of a rank, in both memories.
struct Buffers {
    a: DeviceMemory,
    b: DeviceMemory,
    src: Vec<u8>,
    dst: Vec<u8>,
}

impl Buffers {
    fn new(comm: &Communicator, bytes: usize) -> Buffers {
        let tensor = || comm.allocate(bytes as u64).unwrap();
        Buffers { a: tensor(), b: tensor(), src: vec![0; bytes], dst: vec![0; bytes] }
    }

    /// Buffers as a call wants them: `src_len` and `dst_len` are for private memory, whose in-place form is one buffer.
    /// In device memory, in place, the block of `rank` is where the collective wants it.
    fn io(&mut self, op: Op, device: bool, in_place: bool, rank: usize, block: usize, n: usize) -> Io<'_> {
        let at = (rank * block) as u64;
        match (device, in_place) {
            (true, false) => Io::device(&self.a, &self.b),
            (true, true) => match op {
                Op::AllGather => Io::Device { src: (&self.a, at), dst: (&self.a, 0) },
                Op::ReduceScatter => Io::Device { src: (&self.a, 0), dst: (&self.a, at) },
                _ => Io::in_place(&self.a),
            },
            (false, false) => Io::Host { src: &self.src, dst: &mut self.dst },
            (false, true) => {
                let wide = matches!(op, Op::AllGather | Op::ReduceScatter | Op::AllToAll);
                Io::HostInPlace(&mut self.dst[..if wide { n * block } else { block }])
            }
        }
    }
}

/// What is counted here: the collectives whose bytes follow from one count. Those with lists cost a comparison of the lists
/// besides, and allocate when a list is new.
const COUNTED: [Op; 10] = [
    Op::AllReduce,
    Op::AllGather,
    Op::ReduceScatter,
    Op::Broadcast,
    Op::Reduce,
    Op::AllToAll,
    Op::SendRecv,
    Op::Barrier,
    Op::Gather,
    Op::Scatter,
];

/// Whether the test issues the in-place form.
fn has_in_place(op: Op) -> bool {
    !matches!(op, Op::SendRecv | Op::Gather | Op::Scatter)
}

/// Calls `op` on fp32; root 1, or the ring's neighbours for send_recv.
fn run(comm: &mut Communicator, io: Io<'_>, op: Op, count: usize) {
    let (rank, n, c, dtype) = (comm.rank(), comm.nranks(), count as u64, DataType::Fp32);
    match op {
        Op::AllReduce => comm.raw().all_reduce(io, c, dtype, ReduceOp::Sum),
        Op::AllGather => comm.raw().all_gather(io, c, dtype),
        Op::ReduceScatter => comm.raw().reduce_scatter(io, c, dtype, ReduceOp::Sum),
        Op::Broadcast => comm.raw().broadcast(io, c, dtype, 1),
        Op::Reduce => comm.raw().reduce(io, c, dtype, ReduceOp::Sum, 1),
        Op::AllToAll => comm.raw().all_to_all(io, c, dtype),
        Op::SendRecv => {
            comm.raw().send_recv(io, c, dtype, Peers { dst: Some((rank + 1) % n), src: Some((rank + n - 1) % n) })
        }
        Op::Barrier => comm.barrier(),
        Op::Gather => comm.raw().gather(io, c, dtype, 1),
        Op::Scatter => comm.raw().scatter(io, c, dtype, 1),
        other => panic!("{} is not counted", other.name()),
    }
    .unwrap();
}

/// After a warm-up 10,000 mixed collectives on each rank: no allocation on any rank's thread, no component call. Nor where
/// every operation asks for its turn, as under a cap.
#[test]
fn nothing_is_allocated_and_no_component_called_in_the_steady_state() {
    let far_off = SharePolicy { bandwidth: Some(Rate(1 << 40)), ..SharePolicy::default() };
    for (n, share) in [(2usize, SharePolicy::default()), (3, SharePolicy::default()), (2, far_off)] {
        world(n, &RuntimeConfig { share, ..config() }, move |mut comm| {
            let rank = comm.rank();
            // From the inside of a record to several staging pieces.
            let counts = [1usize, 8, 9, 500, 3001, 20_000, 300_001];
            let mut buffers = Buffers::new(&comm, 300_001 * 4 * n);
            let runtime = comm.runtime().clone();
            // Device or private, in place or not.
            let mixed: Vec<(Op, bool, bool, usize)> = COUNTED
                .into_iter()
                .flat_map(|op| [(true, false), (true, true), (false, false), (false, true)].map(|m| (op, m.0, m.1)))
                .filter(|(op, _, in_place)| !in_place || has_in_place(*op))
                .flat_map(|(op, device, in_place)| counts.map(|count| (op, device, in_place, count)))
                .collect();
            let one = |comm: &mut Communicator, buffers: &mut Buffers, i: usize| {
                let (op, device, in_place, count) = mixed[i % mixed.len()];
                run(comm, buffers.io(op, device, in_place, rank, count * 4, n), op, count);
                // Large ones are few among the 10,000, for time; a step that visits all in turn.
                let scale = if count < 100_000 { 1.0 } else { 0.5 };
                let io = buffers.io(Op::AllReduce, device, true, rank, 64, n);
                comm.raw().all_reduce_scaled(io, 16, DataType::Fp32, scale).unwrap();
            };
            for i in 0..mixed.len() {
                one(&mut comm, &mut buffers, i);
            }
            comm.barrier().unwrap();
            let (before, calls, ops) = (allocations(), runtime.component_calls(), comm.counters().ops);
            for i in 0..5000 {
                // A stride that is prime to the list: neighbours in time differ in kind.
                one(&mut comm, &mut buffers, i * 101);
            }
            let (allocated, called) = (allocations() - before, runtime.component_calls() - calls);
            assert_eq!(comm.counters().ops - ops, 10_000);
            assert_eq!((allocated, called), (0, 0), "allocations and component calls of rank {rank} of {n}");
        });
    }
}

/// The typed form is the same call: it adds nothing to it.
#[test]
fn typed_calls_allocate_nothing_in_the_steady_state() {
    world(2, &config(), |mut comm| {
        let (mut x, mut y) = (comm.tensor_from(&[1.0f32; 300]).unwrap(), comm.tensor::<f32>(600).unwrap());
        let (mut a, mut b) = (vec![1u16; 300], [0u16; 600]);
        let mut all = |comm: &mut Communicator| {
            comm.all_reduce(&mut x, ReduceOp::Max).unwrap();
            comm.all_gather_into(&x, &mut y).unwrap();
            comm.reduce_scatter_into(&y, &mut x, ReduceOp::Min).unwrap();
            comm.broadcast(&mut a, 1).unwrap();
            comm.reduce(&mut a[..10], ReduceOp::Max, 0).unwrap();
            comm.all_gather_into(&a, &mut b).unwrap();
            comm.barrier().unwrap();
        };
        all(&mut comm);
        let (before, ops) = (allocations(), comm.counters().ops);
        for _ in 0..100 {
            all(&mut comm);
        }
        let counted = (allocations() - before, comm.counters().ops - ops);
        assert_eq!(counted, (0, 700));
    });
}

/// Elements of part `i` of `n` of `count`.
fn part(count: usize, n: usize, i: usize) -> usize {
    count / n + usize::from(i < count % n)
}

/// Bytes (copied, read as sources of reductions) by one rank. `b` is the bytes of a block: of the vector (all_reduce,
/// broadcast, reduce, send_recv), of one rank's share (the others).
///
/// Where the formulae come from: each algorithm's description in `enc`; what each rank must at least read
/// and write of an operation is in Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
/// MPICH" (2005), section 4.
fn theory(algorithm: Algorithm, op: Op, rank: usize, n: usize, count: usize, in_place: bool) -> (usize, usize) {
    let b = count * 4;
    let own = if in_place { 0 } else { b };
    let root = rank == 1;
    match algorithm {
        // The contribution is copied beside the record once; every reader takes it from there.
        Algorithm::OneHop => match op {
            Op::AllReduce => (b, n * b),
            Op::ReduceScatter => (n * b, n * b),
            Op::AllGather => (b + (n - 1) * b + own, 0),
            Op::AllToAll => (n * b + (n - 1) * b + own, 0),
            Op::Gather => (if root { (n - 1) * b + own } else { b }, 0),
            Op::Scatter => (if root { n * b + own } else { b }, 0),
            Op::Broadcast => (b + if root { own } else { 0 }, 0),
            Op::Reduce => {
                if root {
                    (0, n * b)
                } else {
                    (b, 0)
                }
            }
            Op::SendRecv => (b + b, 0),
            Op::Barrier => (0, 0),
            other => panic!("no theory for {}", other.name()),
        },
        // Reads where the peers' tensors lie, writes where results must end: the minimum, since no byte is staged.
        Algorithm::Mesh => match op {
            // 1/n of the vector: reduced from n inputs, written to n − 1 others.
            Op::AllReduce => ((n - 1) * part(count, n, rank) * 4, n * part(count, n, rank) * 4),
            Op::Reduce => (0, n * part(count, n, rank) * 4),
            Op::ReduceScatter => (0, n * b),
            Op::AllGather => ((n - 1) * b + own, 0),
            // Of every pair the lower rank exchanges two blocks.
            Op::AllToAll => (if in_place { (n - 1 - rank) * 2 * b } else { n * b }, 0),
            Op::Broadcast => (if root { own } else { b }, 0),
            Op::SendRecv => (b, 0),
            Op::Barrier => (0, 0),
            Op::Gather => (if root { (n - 1) * b + own } else { 0 }, 0),
            Op::Scatter => (if root { own } else { b }, 0),
            other => panic!("no theory for {}", other.name()),
        },
        // n − 1 steps of one n-th each, twice: 2(n − 1)/n of the vector passes each rank, the first half of it reduced
        // with the rank's own input (two sources).
        Algorithm::Ring => match op {
            Op::AllReduce => ((n - 1) * b / n, 2 * (n - 1) * b / n),
            Op::AllGather => ((n - 1) * b + own, 0),
            other => panic!("no ring for {}", other.name()),
        },
        // What others read of a rank is staged once.
        Algorithm::Staged => match op {
            Op::AllReduce if n == 2 => (b, 2 * b),
            // Of each piece an n-th is reduced; the rest is staged before and copied out after, the n-th staged after.
            Op::AllReduce => {
                let piece = STAGE_BYTES / 2 / 4;
                let mine: usize = (0..count).step_by(piece).map(|at| part(piece.min(count - at), n, rank) * 4).sum();
                ((b - mine) + mine + (b - mine), n * mine)
            }
            Op::AllGather => (b + (n - 1) * b + own, 0),
            Op::ReduceScatter => (n * b, n * b),
            Op::AllToAll => (n * b + n * b, 0),
            Op::Broadcast => (b + if root { own } else { 0 }, 0),
            Op::Reduce => {
                if root {
                    (0, n * b)
                } else {
                    (b, 0)
                }
            }
            Op::SendRecv => (b + b, 0),
            Op::Barrier => (0, 0),
            Op::Gather => (if root { (n - 1) * b + own } else { b }, 0),
            Op::Scatter => (if root { (n - 1) * b + own } else { b }, 0),
            other => panic!("no theory for {}", other.name()),
        },
        // Powers of two: each step halves what is reduced from two sources, then doubles what is gathered.
        Algorithm::Halving => match op {
            Op::AllReduce => ((n - 1) * b / n, 2 * (n - 1) * b / n),
            Op::AllGather => ((n - 1) * b + own, 0),
            other => panic!("no halving for {}", other.name()),
        },
        // Each copies from its parent once, or reduces its own input and what each child has.
        Algorithm::Tree => match op {
            Op::Broadcast => (if root { own } else { b }, 0),
            Op::Reduce => {
                let v = (rank + n - 1) % n;
                let lowest = if v == 0 { n } else { v & v.wrapping_neg() };
                let children = (0..).map(|j| 1 << j).take_while(|step| *step < lowest && v + step < n).count();
                (0, if children > 0 { (children + 1) * b } else { 0 })
            }
            other => panic!("no tree for {}", other.name()),
        },
        // 1/g reduced inside the group of g; of that 1/m across the m groups, written to m - 1 outputs; the other parts pulled.
        Algorithm::TwoLevel => match op {
            Op::AllReduce => {
                let g = (1..=n.isqrt()).rev().find(|g| n % g == 0).unwrap();
                let m = n / g;
                let mine = part(count, g, rank % g);
                let share = part(mine, m, rank / g);
                (((m - 1) * share + count - mine) * 4, (g * mine + m * share) * 4)
            }
            other => panic!("no two levels for {}", other.name()),
        },
        // One copy of each byte, made by the kernel: as the mesh, without what that pushes.
        Algorithm::Direct => theory(Algorithm::Mesh, op, rank, n, count, in_place),
    }
}

/// Collectives that the test of theory asks an algorithm for.
fn served(algorithm: Algorithm, op: Op) -> bool {
    match algorithm {
        Algorithm::OneHop | Algorithm::Mesh | Algorithm::Staged => true,
        Algorithm::Ring | Algorithm::Halving => matches!(op, Op::AllReduce | Op::AllGather),
        Algorithm::Tree => matches!(op, Op::Broadcast | Op::Reduce),
        Algorithm::TwoLevel => op == Op::AllReduce,
        Algorithm::Direct => !matches!(op, Op::AllReduce | Op::ReduceScatter | Op::Reduce),
    }
}

/// Every collective in every algorithm that serves it, in place and not.
#[test]
fn each_rank_moves_the_bytes_of_the_theory() {
    for algorithm in Algorithm::ALL {
        let ranks: &[usize] = match algorithm {
            // Other numbers of ranks fold some in before, which has no closed form.
            Algorithm::Halving => &[2, 4],
            // Prime numbers have no groups.
            Algorithm::TwoLevel => &[4, 6],
            _ => &[2, 3, 4, 5],
        };
        for &n in ranks {
            let forced = RuntimeConfig { algorithm: Some(algorithm), ..config() };
            world(n, &forced, move |mut comm| {
                let (rank, lanes) = (comm.rank(), comm.rings().len().clamp(1, 4));
                // The ring's formula wants parts that are all alike; the largest has several staging pieces.
                let counts = match algorithm {
                    Algorithm::OneHop => vec![1, 7, 401],
                    Algorithm::Ring | Algorithm::Halving => vec![n * lanes, 77 * n * lanes, 20_000 * n * lanes],
                    _ => vec![1, 3001, 300_001],
                };
                let mut buffers = Buffers::new(&comm, counts[2] * 4 * n);
                for op in COUNTED {
                    for (count, in_place) in counts.iter().flat_map(|c| [(*c, false), (*c, true)]) {
                        let device = match algorithm {
                            Algorithm::Staged | Algorithm::Direct => false,
                            Algorithm::OneHop => count % 2 == 1,
                            _ => true,
                        };
                        let not_direct = algorithm == Algorithm::Direct && op == Op::AllToAll && in_place;
                        if !served(algorithm, op) || not_direct || in_place && !has_in_place(op) {
                            continue;
                        }
                        let before = comm.counters();
                        run(&mut comm, buffers.io(op, device, in_place, rank, count * 4, n), op, count);
                        let after = comm.counters();
                        let moved = (after.copied - before.copied, after.reduced - before.reduced);
                        let (copied, reduced) = theory(algorithm, op, rank, n, count, in_place);
                        assert_eq!(
                            moved,
                            (copied as u64, reduced as u64),
                            "bytes copied and reduced: {algorithm:?} {} count {count} in place {in_place}, rank {rank} of {n}",
                            op.name()
                        );
                    }
                }
            });
        }
    }
}

/// Bytes copied by a rank in a collective with lists. `input` is its whole input, `read` what others read of it, each byte
/// once; `gets` what it receives, also from itself.
fn copied(algorithm: Algorithm, input: usize, read: usize, gets: usize) -> usize {
    match algorithm {
        // The input goes beside the record if anybody reads it.
        Algorithm::OneHop => gets + if read > 0 { input } else { 0 },
        Algorithm::Mesh => gets,
        Algorithm::Staged => gets + read,
        other => panic!("no lists in {}", other.name()),
    }
}

/// The forms with lists, with blocks of different sizes and empty ones.
#[test]
fn each_rank_moves_the_bytes_of_its_lists() {
    for algorithm in [Algorithm::OneHop, Algorithm::Mesh, Algorithm::Staged] {
        for n in [2usize, 3, 4] {
            let forced = RuntimeConfig { algorithm: Some(algorithm), ..config() };
            world(n, &forced, move |mut comm| {
                let (rank, device, dtype) = (comm.rank(), algorithm != Algorithm::Staged, DataType::Fp32);
                // The largest has several staging pieces.
                let unit = if algorithm == Algorithm::OneHop { 37 } else { 60_001 };
                let block = |i: usize| [2, 0, 1, 3][i % 4] * unit;
                let counts: Vec<usize> = (0..n).map(block).collect();
                // What p sends to q.
                let cell = |p: usize, q: usize| block(p * 3 + q);
                let total: usize = counts.iter().sum();
                let row: usize = (0..n).map(|q| cell(rank, q)).sum();
                let column: usize = (0..n).map(|p| cell(p, rank)).sum();
                let mut buffers = Buffers::new(&comm, (total + row + column) * 4);
                let long = |list: Vec<usize>| list.into_iter().map(|c| c as u64).collect::<Vec<u64>>();
                let mut moved = |comm: &mut Communicator, run: &dyn Fn(&mut Communicator, Io<'_>)| {
                    let before = comm.counters();
                    run(comm, buffers.io(Op::AllGatherV, device, false, rank, 0, n));
                    let after = comm.counters();
                    ((after.copied - before.copied) as usize, (after.reduced - before.reduced) as usize)
                };
                let mine = counts[rank];
                let lists = long(counts.clone());
                let got = moved(&mut comm, &|comm, io| comm.raw().all_gather_v(io, &lists, dtype).unwrap());
                let want = (copied(algorithm, mine * 4, mine * 4, total * 4), 0);
                assert_eq!(got, want, "{algorithm:?} all_gather_v, rank {rank} of {n}");

                let got = moved(&mut comm, &|comm, io| {
                    comm.raw().reduce_scatter_v(io, &lists, dtype, ReduceOp::Sum).unwrap()
                });
                // Reduced where the inputs are, or all parts put where the others read them.
                let want = (if algorithm == Algorithm::Mesh { 0 } else { total * 4 }, n * mine * 4);
                assert_eq!(got, want, "{algorithm:?} reduce_scatter_v, rank {rank} of {n}");

                let (send, recv) =
                    (long((0..n).map(|q| cell(rank, q)).collect()), long((0..n).map(|p| cell(p, rank)).collect()));
                let got = moved(&mut comm, &|comm, io| comm.raw().all_to_all_v(io, &send, &recv, dtype).unwrap());
                // Each rank knows its own row and column only: those of all, 8 bytes a number, go to all ranks first.
                let rows = (1 + n) * 2 * n * 8;
                let want = (rows + copied(algorithm, row * 4, (row - cell(rank, rank)) * 4, column * 4), 0);
                assert_eq!(got, want, "{algorithm:?} all_to_all_v, rank {rank} of {n}");

                // A shift by one, without its last pair; and a rank that sends to itself.
                for pairs in [(0..n - 1).map(|r| (r, r + 1)).collect(), vec![(0, 0)]] as [Vec<(usize, usize)>; 2] {
                    let got = moved(&mut comm, &|comm, io| comm.raw().permute(io, unit as u64, dtype, &pairs).unwrap());
                    let sends = pairs.iter().any(|p| p.0 == rank && p.1 != rank);
                    let gets = pairs.iter().any(|p| p.1 == rank);
                    let bytes = |yes: bool| if yes { unit * 4 } else { 0 };
                    let want = (copied(algorithm, unit * 4, bytes(sends), bytes(gets)), 0);
                    assert_eq!(got, want, "{algorithm:?} permute {pairs:?}, rank {rank} of {n}");
                }
            });
        }
    }
}
