//! Collectives end to end: the real plugin, bootstrap over loopback, links, native schedules. Every result is compared with
//! an independent reference.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use enc::Algorithm;
use hw_bridge::exec::reduce;
use hw_bridge::limits::{LARGE_SLOT_BYTES, LARGE_SLOTS, SLOTS};
use wccl::{Communicator, DataType, DeviceMemory, Io, Peers, ReduceOp, Reduction, RuntimeConfig};

use crate::common::{HANG, config, releases, world};

/// Input of `rank`: any bytes do, the reference computes with the same.
fn input(rank: usize, seed: u64, bytes: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(rank as u64 + 1);
    (0..bytes)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 32) as u8
        })
        .collect()
}

/// Small whole numbers: sums and products of a few are exact in every type, so any order gives the same bits.
fn exact_input(rank: usize, dtype: DataType, count: usize) -> Vec<u8> {
    let one = |i: usize| ((i * 7 + rank * 3) % 3) as f32;
    let mut out = Vec::new();
    for i in 0..count {
        let v = one(i);
        match dtype {
            DataType::Fp32 | DataType::Fp32r => out.extend(v.to_le_bytes()),
            DataType::Bf16 => out.extend(((v.to_bits() >> 16) as u16).to_le_bytes()),
            DataType::Fp16 => out.extend([0u16, 0x3c00, 0x4000][v as usize].to_le_bytes()),
            DataType::Fp8E3 => out.push([0u8, 0x30, 0x40][v as usize]),
            DataType::Fp8E4 => out.push([0u8, 0x38, 0x40][v as usize]),
            DataType::Fp8E5 => out.push([0u8, 0x3c, 0x40][v as usize]),
            _ => {
                let mut b = vec![0; dtype.size()];
                b[0] = v as u8;
                out.extend(b);
            }
        }
    }
    out
}

/// One call on one kind of memory: writes `src`, runs, answers the output.
struct Run<'a> {
    comm: &'a mut Communicator,
    device: bool,
}

impl Run<'_> {
    /// Separate input and output. The output is prefilled so that a byte that is not written is seen.
    fn apart(&mut self, src: &[u8], out: usize, f: impl FnOnce(&mut Communicator, Io<'_>)) -> Vec<u8> {
        let mut dst = vec![0xEE; out];
        if !self.device {
            f(self.comm, Io::Host { src, dst: &mut dst });
            return dst;
        }
        // An odd offset: nothing may depend on alignment.
        let (a, b) = (self.allocate(src.len() + 3), self.allocate(out + 5));
        a.write(3, src).unwrap();
        b.write(0, &vec![0xEE; out + 5]).unwrap();
        f(self.comm, Io::Device { src: (&a, 3), dst: (&b, 5) });
        let mut before = [0; 5];
        b.read(0, &mut before).unwrap();
        assert_eq!(before, [0xEE; 5], "bytes before the output were written");
        b.read(5, &mut dst).unwrap();
        dst
    }

    /// One buffer, whose first bytes are `buf`; in its device form the input begins at `at`, the output at `to`.
    fn in_place(
        &mut self,
        mut buf: Vec<u8>,
        at: usize,
        to: usize,
        f: impl FnOnce(&mut Communicator, Io<'_>),
    ) -> Vec<u8> {
        if !self.device {
            f(self.comm, Io::HostInPlace(&mut buf));
            return buf;
        }
        let t = self.allocate(buf.len());
        t.write(0, &buf).unwrap();
        f(self.comm, Io::Device { src: (&t, at as u64), dst: (&t, to as u64) });
        t.read(0, &mut buf).unwrap();
        buf
    }

    fn allocate(&self, bytes: usize) -> DeviceMemory {
        self.comm.allocate(bytes as u64).unwrap()
    }
}

/// The reduction of all ranks' inputs by the reference path, in rank order.
fn reduced(op: ReduceOp, dtype: DataType, inputs: &[Vec<u8>]) -> Vec<u8> {
    let mut out = vec![0; inputs[0].len()];
    let all: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    reduce::reduce_slices(op, dtype, &mut out, &all).unwrap();
    out
}

/// Every collective once, for one type, operation, count and kind of memory.
fn all_collectives(comm: &mut Communicator, device: bool, dtype: DataType, op: ReduceOp, count: usize, seed: u64) {
    let (rank, n) = (comm.rank(), comm.nranks());
    let size = dtype.size();
    let block = count * size;
    let ins: Vec<Vec<u8>> = (0..n).map(|r| exact_input(r, dtype, count)).collect();
    let wide: Vec<Vec<u8>> = (0..n).map(|r| exact_input(r + 5, dtype, count * n)).collect();
    let noise: Vec<Vec<u8>> = (0..n).map(|r| input(r, seed, block * n)).collect();
    let root = (seed as usize + 1) % n;
    let here = format!("rank {rank} of {n}, {dtype} {op} count {count}, device {device}");
    let mut run = Run { comm, device };
    let c = count as u64;

    let sum = reduced(op, dtype, &ins);
    let got = run.apart(&ins[rank], block, |comm, io| comm.raw().all_reduce(io, c, dtype, op).unwrap());
    assert_eq!(got, sum, "all_reduce {here}");
    let got = run.in_place(ins[rank].clone(), 0, 0, |comm, io| comm.raw().all_reduce(io, c, dtype, op).unwrap());
    assert_eq!(got, sum, "all_reduce in place {here}");

    let all: Vec<u8> = noise.iter().flat_map(|b| b[..block].to_vec()).collect();
    let got = run.apart(&noise[rank][..block], block * n, |comm, io| comm.raw().all_gather(io, c, dtype).unwrap());
    assert_eq!(got, all, "all_gather {here}");
    let mut buf = vec![0xEE; block * n];
    buf[rank * block..(rank + 1) * block].copy_from_slice(&noise[rank][..block]);
    let got = run.in_place(buf, rank * block, 0, |comm, io| comm.raw().all_gather(io, c, dtype).unwrap());
    assert_eq!(got, all, "all_gather in place {here}");

    let whole = reduced(op, dtype, &wide);
    let mine = &whole[rank * block..(rank + 1) * block];
    let got = run.apart(&wide[rank], block, |comm, io| comm.raw().reduce_scatter(io, c, dtype, op).unwrap());
    assert_eq!(got, mine, "reduce_scatter {here}");
    let got = run
        .in_place(wide[rank].clone(), 0, rank * block, |comm, io| comm.raw().reduce_scatter(io, c, dtype, op).unwrap());
    assert_eq!(&got[rank * block..(rank + 1) * block], mine, "reduce_scatter in place {here}");

    let src: &[u8] = if rank == root { &noise[root][..block] } else { &[] };
    let got = run.apart(src, block, |comm, io| comm.raw().broadcast(io, c, dtype, root).unwrap());
    assert_eq!(got, noise[root][..block], "broadcast {here}");
    let got =
        run.in_place(noise[rank][..block].to_vec(), 0, 0, |comm, io| comm.raw().broadcast(io, c, dtype, root).unwrap());
    assert_eq!(got, noise[root][..block], "broadcast in place {here}");

    let out = if rank == root { block } else { 0 };
    let got = run.apart(&ins[rank], out, |comm, io| comm.raw().reduce(io, c, dtype, op, root).unwrap());
    assert_eq!(got, sum[..out], "reduce {here}");
    let got = run.in_place(ins[rank].clone(), 0, 0, |comm, io| comm.raw().reduce(io, c, dtype, op, root).unwrap());
    assert_eq!(got, if rank == root { &sum } else { &ins[rank] }[..], "reduce in place {here}");

    let exchanged: Vec<u8> = noise.iter().flat_map(|b| b[rank * block..(rank + 1) * block].to_vec()).collect();
    let got = run.apart(&noise[rank], block * n, |comm, io| comm.raw().all_to_all(io, c, dtype).unwrap());
    assert_eq!(got, exchanged, "all_to_all {here}");
    let got = run.in_place(noise[rank].clone(), 0, 0, |comm, io| comm.raw().all_to_all(io, c, dtype).unwrap());
    assert_eq!(got, exchanged, "all_to_all in place {here}");

    let peers = Peers { dst: Some((rank + 1) % n), src: Some((rank + n - 1) % n) };
    let got = run.apart(&noise[rank][..block], block, |comm, io| comm.raw().send_recv(io, c, dtype, peers).unwrap());
    assert_eq!(got, noise[(rank + n - 1) % n][..block], "send_recv {here}");
    // Only rank 0 sends, only the last receives.
    let one_way = Peers { dst: (rank == 0).then_some(n - 1), src: (rank == n - 1).then_some(0) };
    let (src, out) = (if rank == 0 { &noise[0][..block] } else { &[][..] }, if rank == n - 1 { block } else { 0 });
    let got = run.apart(src, out, |comm, io| comm.raw().send_recv(io, c, dtype, one_way).unwrap());
    assert_eq!(got, noise[0][..out], "send_recv one way {here}");

    run.comm.barrier().unwrap();
}

#[test]
fn every_type_and_operation() {
    for n in [2usize, 3] {
        world(n, &config(), |mut comm| {
            for device in [true, false] {
                for dtype in DataType::ALL {
                    for op in ReduceOp::ALL {
                        for count in [1usize, 7, 1000] {
                            all_collectives(&mut comm, device, dtype, op, count, count as u64);
                        }
                    }
                }
            }
        });
    }
}

#[test]
fn every_rank_count_and_awkward_counts() {
    for (n, config) in (1..=16usize).flat_map(|n| releases().into_iter().map(move |c| (n, c))) {
        world(n, &config, |mut comm| {
            for device in [true, false] {
                for count in [0usize, 1, 2, 13, 255, 4099] {
                    all_collectives(&mut comm, device, DataType::Fp32, ReduceOp::Sum, count, count as u64);
                }
            }
        });
    }
}

#[test]
fn messages_of_many_pieces() {
    for n in [2usize, 3, 4] {
        world(n, &config(), |mut comm| {
            for device in [true, false] {
                for count in [200_003usize, 700_001] {
                    all_collectives(&mut comm, device, DataType::Fp32, ReduceOp::Sum, count, 3);
                }
                all_collectives(&mut comm, device, DataType::Uint8, ReduceOp::Max, 1_500_001, 4);
            }
        });
    }
}

fn forced(algorithm: Algorithm) -> RuntimeConfig {
    RuntimeConfig { algorithm: Some(algorithm), ..config() }
}

#[test]
fn along_the_rings_of_the_plugin() {
    let releases = || releases().into_iter().enumerate();
    for (n, (i, config)) in [2usize, 3, 4, 5, 8, 12].into_iter().flat_map(|n| releases().map(move |r| (n, r))) {
        let config = RuntimeConfig { algorithm: Some(Algorithm::Ring), ..config };
        world(n, &config, move |mut comm| {
            assert!(comm.rings().iter().all(|r| r.len() == n));
            // The second release turns every other one around.
            let turned = n > 2 && comm.rings()[1][1..].iter().rev().eq(&comm.rings()[0][1..]);
            assert_eq!(turned, n > 2 && i == 1, "{:?}", comm.rings());
            for op in ReduceOp::ALL {
                for count in [1usize, 5, 4099, 100_000] {
                    all_collectives(&mut comm, true, DataType::Fp32, op, count, 9);
                }
            }
            all_collectives(&mut comm, true, DataType::Int16, ReduceOp::Avg, 333, 2);
        });
    }
}

#[test]
fn every_size_in_one_hop_and_in_the_mesh() {
    for algorithm in [Algorithm::OneHop, Algorithm::Mesh] {
        world(3, &forced(algorithm), |mut comm| {
            for count in (0..260).chain([1000, 2047, 2730, 8192, 21_845, 65_536]) {
                all_collectives(&mut comm, true, DataType::Fp32, ReduceOp::Sum, count, 1);
            }
        });
    }
}

/// Many one-way operations: the root may not run over payloads that a slow reader still needs, wherever they lie (in the
/// record, beside it, among the large ones).
#[test]
fn a_fast_root_does_not_overrun_slow_readers() {
    for bytes in [4, 3000, LARGE_SLOT_BYTES] {
        world(3, &forced(Algorithm::OneHop), move |mut comm| {
            let rank = comm.rank();
            for i in 0..500u32 {
                let mut buf = vec![0; bytes];
                if rank == 0 {
                    buf.chunks_mut(4).for_each(|c| c.copy_from_slice(&i.to_le_bytes()));
                }
                if rank == 2 && i % 50 == 0 {
                    std::thread::sleep(std::time::Duration::from_millis(3));
                }
                comm.raw().broadcast(Io::HostInPlace(&mut buf), bytes as u64, DataType::Uint8, 0).unwrap();
                assert!(buf.chunks(4).all(|c| c == i.to_le_bytes()), "operation {i} of {bytes} bytes");
            }
        });
    }
}

/// A root is ahead of a reader that has not come by as many operations as there are places for payloads, and not by one more.
#[test]
fn a_root_is_ahead_by_as_many_payloads_as_there_are_places() {
    for (bytes, places) in [(3000, SLOTS), (LARGE_SLOT_BYTES, LARGE_SLOTS)] {
        let sent = Arc::new(AtomicUsize::new(0));
        world(2, &forced(Algorithm::OneHop), move |mut comm| {
            let mut buf = vec![0; bytes];
            // Both are linked, and the room for payloads is there.
            comm.raw().broadcast(Io::HostInPlace(&mut buf), bytes as u64, DataType::Uint8, 0).unwrap();
            comm.barrier().unwrap();
            // The barrier was an operation too: its place is free for what comes.
            let root = comm.rank() == 0;
            if !root {
                let until = Instant::now() + HANG;
                while sent.load(Ordering::Acquire) < places && Instant::now() < until {
                    std::thread::yield_now();
                }
                // Time enough for a root that does not wait to send the next.
                std::thread::sleep(Duration::from_millis(50));
                assert_eq!(sent.load(Ordering::Acquire), places, "of {bytes} bytes");
            }
            for i in 0..3 * places as u8 {
                if root {
                    buf.fill(i);
                }
                comm.raw().broadcast(Io::HostInPlace(&mut buf), bytes as u64, DataType::Uint8, 0).unwrap();
                assert!(buf.iter().all(|b| *b == i), "operation {i} of {bytes} bytes");
                if root {
                    sent.fetch_add(1, Ordering::Release);
                }
            }
        });
    }
}

#[test]
fn wrong_arguments_are_refused_before_anything_moves() {
    world(2, &config(), |mut comm| {
        let t = comm.allocate(64).unwrap();
        let big = comm.raw().all_reduce(Io::in_place(&t), 17, DataType::Fp32, ReduceOp::Sum).unwrap_err().to_string();
        assert!(big.contains("64 bytes") && big.contains("68 are needed"), "{big}");
        let root = comm.raw().broadcast(Io::in_place(&t), 1, DataType::Fp32, 2).unwrap_err().to_string();
        assert!(root.contains("root 2"), "{root}");
        let io = Io::Device { src: (&t, 0), dst: (&t, 4) };
        let overlap = comm.raw().all_reduce(io, 8, DataType::Fp32, ReduceOp::Sum).unwrap_err().to_string();
        assert!(overlap.contains("overlap by accident"), "{overlap}");
        let huge = comm
            .raw()
            .all_reduce(Io::in_place(&t), u64::MAX / 2, DataType::Fp32, ReduceOp::Sum)
            .unwrap_err()
            .to_string();
        assert!(huge.contains("larger than memory can be"), "{huge}");
        let me = comm.rank();
        let peers = Peers { dst: Some(me), src: Some(1 - me) };
        assert!(comm.raw().send_recv(Io::device(&t, &t), 1, DataType::Uint8, peers).is_err());
        // None of it used up an operation: the ranks still agree.
        comm.barrier().unwrap();
    });
}

#[test]
fn calls_that_do_not_match_are_told_to_both_sides() {
    let texts = world(2, &config(), |mut comm| {
        let mut buf = vec![0u8; 800];
        let count = if comm.rank() == 0 { 100 } else { 200 };
        comm.raw().all_reduce(Io::HostInPlace(&mut buf), count, DataType::Fp32, ReduceOp::Sum).unwrap_err().to_string()
    });
    for t in &texts {
        assert!(t.contains("count 100") && t.contains("count 200") || t.contains("mismatched"), "{t}");
    }
    assert!(texts.iter().any(|t| t.contains("mismatched collectives")), "{texts:?}");
}

#[test]
fn a_rank_that_never_arrives_is_named_when_the_deadline_passes() {
    let held = Arc::new(Barrier::new(3));
    let texts = world(3, &config(), move |mut comm| {
        comm.barrier().unwrap();
        let text = match comm.rank() {
            2 => String::new(),
            _ => comm.within(Duration::from_millis(300)).barrier().unwrap_err().to_string(),
        };
        // Rank 2 is there all the time, and takes no part.
        held.wait();
        text
    });
    for t in &texts[..2] {
        assert!(t.contains("rank 2") && t.contains("operation #2 (barrier)"), "{t}");
    }
    let first = texts[..2].iter().find(|t| t.contains("timed out")).unwrap();
    assert!(first.contains("300ms") && first.contains("its last operation was #1 (barrier), completed"), "{first}");
}

/// Two ranks that both believe to be the root wait for nobody, so nothing tells them apart in that call; the next one that
/// meets does, before it moves data.
#[test]
fn one_way_calls_that_differ_are_noticed_at_the_next_meeting() {
    let texts = world(2, &config(), |mut comm| {
        let root = comm.rank();
        let mut buf = [root as u8; 8];
        comm.raw().broadcast(Io::HostInPlace(&mut buf), 8, DataType::Uint8, root).unwrap();
        let e = comm
            .raw()
            .all_reduce(Io::HostInPlace(&mut buf), 8, DataType::Uint8, ReduceOp::Sum)
            .unwrap_err()
            .to_string();
        assert_eq!(buf, [root as u8; 8], "no data moved");
        e
    });
    // It is the first that is named, where their ways parted.
    assert!(texts.iter().any(|t| t.contains("mismatched collectives at operation #1")), "{texts:?}");
    assert!(texts.iter().any(|t| t.contains("root 0") && t.contains("root 1")), "{texts:?}");
}

/// A send whose receiver listens to somebody else is an error on the sender too, wherever the sender waits.
#[test]
fn a_send_to_a_rank_that_receives_from_another_fails() {
    for (device, direct) in [(true, true), (false, true), (false, false)] {
        let texts = world(3, &RuntimeConfig { direct, ..config() }, move |mut comm| {
            let rank = comm.rank();
            // 0 sends to 1, 1 receives from 2, 2 does nothing.
            let peers = [(Some(1), None), (None, Some(2)), (None, None)][rank];
            let peers = Peers { dst: peers.0, src: peers.1 };
            // Too much for one hop, which is one-way: there the sender has nothing to wait for.
            let n = 400_000usize;
            let (src, mut dst) = (vec![1u8; n], vec![0u8; n]);
            let r = if device {
                let (a, b) = (comm.allocate(n as u64).unwrap(), comm.allocate(n as u64).unwrap());
                comm.raw().send_recv(Io::device(&a, &b), n as u64, DataType::Uint8, peers)
            } else {
                comm.raw().send_recv(Io::Host { src: &src, dst: &mut dst }, n as u64, DataType::Uint8, peers)
            };
            r.err().map_or(String::new(), |e| e.to_string())
        });
        assert!(!texts[0].is_empty() && !texts[1].is_empty(), "{texts:?}");
        assert!(texts.iter().any(|t| t.contains("mismatched collectives")), "{texts:?}");
    }
}

/// A rank that leaves after it has arrived is noticed by a rank that waits for a third one.
#[test]
fn a_rank_that_leaves_in_the_middle_is_named_by_those_who_wait_for_another() {
    let failed = Arc::new(Barrier::new(2));
    let texts = world(3, &config(), move |mut comm| {
        let t = comm.allocate(1 << 20).unwrap();
        comm.barrier().unwrap();
        match comm.rank() {
            // Comes when rank 0 has failed.
            1 => drop(failed.wait()),
            2 => {
                let token = comm.abort_token().clone();
                std::thread::spawn(move || {
                    std::thread::sleep(std::time::Duration::from_millis(200));
                    token.abort("gone fishing");
                });
            }
            _ => {}
        }
        let e =
            comm.raw().all_reduce(Io::in_place(&t), 1 << 18, DataType::Fp32, ReduceOp::Sum).unwrap_err().to_string();
        if comm.rank() == 0 {
            failed.wait();
        }
        e
    });
    assert!(texts[0].contains("rank 2") && texts[0].contains("gone fishing"), "{}", texts[0]);
    assert!(texts[1].contains("gone fishing") || texts[1].contains("rank 0"), "{}", texts[1]);
    assert!(texts[2].contains("gone fishing"), "{}", texts[2]);
}

/// Uneven counts for `n` blocks, some of them 0.
fn uneven(n: usize, count: usize, turn: usize) -> Vec<u64> {
    (0..n).map(|i| [count, 0, 2 * count + 1, 1][(i + turn) % 4] as u64).collect()
}

/// First element of each block.
fn starts(counts: &[u64]) -> Vec<usize> {
    (0..counts.len()).map(|i| counts[..i].iter().sum::<u64>() as usize).collect()
}

/// The collectives that take a root or lists, once each, for one type, count and kind of memory.
fn listed_collectives(comm: &mut Communicator, device: bool, dtype: DataType, op: ReduceOp, count: usize, turn: usize) {
    let (rank, n) = (comm.rank(), comm.nranks());
    let size = dtype.size();
    let here = format!("rank {rank} of {n}, {dtype} {op} count {count} turn {turn}, device {device}");
    let block = count * size;
    let c = count as u64;
    let root = turn % n;
    let wide: Vec<Vec<u8>> = (0..n).map(|r| input(r, turn as u64, block * n)).collect();
    let mut run = Run { comm, device };

    let all: Vec<u8> = wide.iter().flat_map(|b| b[..block].to_vec()).collect();
    let out = if rank == root { &all[..] } else { &[] };
    let got = run.apart(&wide[rank][..block], out.len(), |comm, io| comm.raw().gather(io, c, dtype, root).unwrap());
    assert_eq!(got, out, "gather {here}");
    if rank == root {
        let mut buf = vec![0xEE; block * n];
        buf[rank * block..(rank + 1) * block].copy_from_slice(&wide[rank][..block]);
        let got = run.in_place(buf, rank * block, 0, |comm, io| comm.raw().gather(io, c, dtype, root).unwrap());
        assert_eq!(got, all, "gather in place {here}");
    } else {
        let got =
            run.in_place(wide[rank][..block].to_vec(), 0, 0, |comm, io| comm.raw().gather(io, c, dtype, root).unwrap());
        assert_eq!(got, wide[rank][..block], "gather in place {here}");
    }

    let mine = &wide[root][rank * block..(rank + 1) * block];
    let src: &[u8] = if rank == root { &wide[root] } else { &[] };
    let got = run.apart(src, block, |comm, io| comm.raw().scatter(io, c, dtype, root).unwrap());
    assert_eq!(got, mine, "scatter {here}");
    if rank == root {
        let got = run
            .in_place(wide[root].clone(), 0, rank * block, |comm, io| comm.raw().scatter(io, c, dtype, root).unwrap());
        assert_eq!(got, wide[root], "scatter in place {here}");
    } else {
        let got = run.in_place(vec![0xEE; block], 0, 0, |comm, io| comm.raw().scatter(io, c, dtype, root).unwrap());
        assert_eq!(got, mine, "scatter in place {here}");
    }

    // Every second rank sends, to the rank `turn` further on.
    let pairs: Vec<(usize, usize)> = (0..n).filter(|r| turn == 0 || r % 2 == 0).map(|r| (r, (r + turn) % n)).collect();
    let from = pairs.iter().find(|p| p.1 == rank).map(|p| p.0);
    let src: &[u8] = if pairs.iter().any(|p| p.0 == rank) { &wide[rank][..block] } else { &[] };
    let expected = from.map_or(&[][..], |p| &wide[p][..block]);
    let got = run.apart(src, expected.len(), |comm, io| comm.raw().permute(io, c, dtype, &pairs).unwrap());
    assert_eq!(got, expected, "permute {here}");

    let counts = uneven(n, count, turn);
    let at = starts(&counts);
    let total = counts.iter().sum::<u64>() as usize;
    let parts: Vec<Vec<u8>> = (0..n).map(|r| input(r + 9, 5, counts[r] as usize * size)).collect();
    let all = parts.concat();
    let got = run.apart(&parts[rank], all.len(), |comm, io| comm.raw().all_gather_v(io, &counts, dtype).unwrap());
    assert_eq!(got, all, "all_gather_v {here}");
    let mut buf = vec![0xEE; all.len()];
    buf[at[rank] * size..][..parts[rank].len()].copy_from_slice(&parts[rank]);
    let got = run.in_place(buf, at[rank] * size, 0, |comm, io| comm.raw().all_gather_v(io, &counts, dtype).unwrap());
    assert_eq!(got, all, "all_gather_v in place {here}");

    let ins: Vec<Vec<u8>> = (0..n).map(|r| exact_input(r, dtype, total)).collect();
    let sum = reduced(op, dtype, &ins);
    let mine = &sum[at[rank] * size..][..counts[rank] as usize * size];
    let got =
        run.apart(&ins[rank], mine.len(), |comm, io| comm.raw().reduce_scatter_v(io, &counts, dtype, op).unwrap());
    assert_eq!(got, mine, "reduce_scatter_v {here}");
    let got = run.in_place(ins[rank].clone(), 0, at[rank] * size, |comm, io| {
        comm.raw().reduce_scatter_v(io, &counts, dtype, op).unwrap();
    });
    assert_eq!(&got[at[rank] * size..][..mine.len()], mine, "reduce_scatter_v in place {here}");

    // A row, a column or neither is empty.
    let cell = |p: usize, q: usize| {
        if turn % 3 == 1 && p == 0 || turn % 3 == 2 && q == 0 { 0 } else { uneven(n, count, turn + p)[q] }
    };
    let row = |p: usize| (0..n).map(|q| cell(p, q)).collect::<Vec<u64>>();
    let recv: Vec<u64> = (0..n).map(|p| cell(p, rank)).collect();
    let sent: Vec<Vec<u8>> = (0..n).map(|p| input(p + 3, 7, row(p).iter().sum::<u64>() as usize * size)).collect();
    let expected: Vec<u8> = (0..n)
        .flat_map(|p| sent[p][starts(&row(p))[rank] * size..][..cell(p, rank) as usize * size].to_vec())
        .collect();
    let send = row(rank);
    let got =
        run.apart(&sent[rank], expected.len(), |comm, io| comm.raw().all_to_all_v(io, &send, &recv, dtype).unwrap());
    assert_eq!(got, expected, "all_to_all_v {here}");
}

#[test]
fn collectives_with_roots_and_lists() {
    for (n, config) in (1..=4usize).flat_map(|n| releases().into_iter().map(move |c| (n, c))) {
        world(n, &config, move |mut comm| {
            for device in [true, false] {
                for turn in 0..4 {
                    for count in [0usize, 1, 5, 1000, 4099] {
                        listed_collectives(&mut comm, device, DataType::Fp32, ReduceOp::Sum, count, turn);
                    }
                    listed_collectives(&mut comm, device, DataType::Uint8, ReduceOp::Max, 7, turn);
                    listed_collectives(&mut comm, device, DataType::Int64, ReduceOp::Avg, 333, turn);
                    listed_collectives(&mut comm, device, DataType::Bf16, ReduceOp::Sum, 300_001, turn);
                }
            }
            comm.barrier().unwrap();
        });
    }
}

#[test]
fn collectives_with_roots_and_lists_in_every_algorithm() {
    for algorithm in Algorithm::ALL {
        world(5, &forced(algorithm), move |mut comm| {
            for device in [true, false] {
                for (turn, count) in [(0, 9usize), (1, 2047), (2, 70_001), (3, 0)] {
                    listed_collectives(&mut comm, device, DataType::Int16, ReduceOp::Sum, count, turn);
                }
            }
        });
    }
}

#[test]
fn halving_trees_and_two_levels() {
    for algorithm in [Algorithm::Halving, Algorithm::Tree, Algorithm::TwoLevel] {
        for n in [2usize, 3, 4, 6, 7, 12] {
            world(n, &forced(algorithm), move |mut comm| {
                // Averages of floats go another way.
                for (op, dtype) in [(ReduceOp::Sum, DataType::Fp32), (ReduceOp::Avg, DataType::Int32)] {
                    for count in [1usize, 5, 4099, 100_000] {
                        all_collectives(&mut comm, true, dtype, op, count, count as u64);
                    }
                }
                // Every rank makes the inputs of all: more would take a busy machine longer than the deadline.
                let count = 3_000_001 / (n * n);
                all_collectives(&mut comm, true, DataType::Uint8, ReduceOp::Min, count, 4);
            });
        }
    }
}

/// Both sides of counts that do not fit are named on all ranks, nothing moves, and the communicator goes on.
#[test]
fn all_to_all_v_counts_that_do_not_fit_are_told_to_all() {
    for device in [true, false] {
        let texts = world(3, &config(), move |mut comm| {
            let rank = comm.rank();
            // Rank 2 expects 4 elements from rank 0, which sends 5.
            let (send, recv) = ([[5u64; 3], [5; 3], [5; 3]], [[5u64; 3], [5; 3], [4, 5, 5]]);
            let src = vec![rank as u8; 15];
            let mut dst = vec![0xEE; 15];
            let (a, b) = (comm.allocate(15).unwrap(), comm.allocate(15).unwrap());
            b.write(0, &dst).unwrap();
            let io = if device { Io::device(&a, &b) } else { Io::Host { src: &src, dst: &mut dst } };
            let e = comm.raw().all_to_all_v(io, &send[rank], &recv[rank], DataType::Uint8).unwrap_err().to_string();
            assert_eq!(dst, [0xEE; 15]);
            b.read(0, &mut dst).unwrap();
            assert_eq!(dst, [0xEE; 15]);
            comm.barrier().unwrap();
            e
        });
        for t in &texts {
            assert!(t.contains("rank 0 sends 5 elements to rank 2, which expects 4 from it"), "{t}");
        }
    }
}

#[test]
fn lists_that_differ_between_ranks_are_a_mismatch() {
    for device in [true, false] {
        for bytes in [40u64, 40_000] {
            let texts = world(2, &config(), move |mut comm| {
                let counts = if comm.rank() == 0 { [bytes / 4, bytes / 2] } else { [bytes / 2, bytes / 4] };
                let n = bytes as usize;
                let (src, mut dst) = (vec![1u8; n], vec![0xEE; n]);
                let (a, b) = (comm.allocate(bytes).unwrap(), comm.allocate(bytes).unwrap());
                let io = if device { Io::device(&a, &b) } else { Io::Host { src: &src, dst: &mut dst } };
                let e = comm.raw().all_gather_v(io, &counts, DataType::Uint8).unwrap_err().to_string();
                assert!(dst.iter().all(|b| *b == 0xEE), "bytes of a call that does not match were written");
                e
            });
            assert!(texts.iter().any(|t| t.contains("other counts or pairs")), "{texts:?}");
        }
    }
}

#[test]
fn wrong_lists_are_refused_before_anything_moves() {
    world(2, &config(), |mut comm| {
        let t = comm.allocate(64).unwrap();
        let u = comm.allocate(64).unwrap();
        let text = |r: Result<(), wccl::Error>| r.unwrap_err().to_string();
        let e = text(comm.raw().all_gather_v(Io::device(&t, &u), &[1], DataType::Uint8));
        assert!(e.contains("1 counts were passed, 2 ranks need one each"), "{e}");
        let e = text(comm.raw().all_gather_v(Io::device(&t, &u), &[u64::MAX, 2], DataType::Uint8));
        assert!(e.contains("larger than memory can be"), "{e}");
        let e = text(comm.raw().permute(Io::device(&t, &u), 1, DataType::Uint8, &[(0, 1), (0, 0)]));
        assert!(e.contains("a second time"), "{e}");
        let e = text(comm.raw().permute(Io::device(&t, &u), 1, DataType::Uint8, &[(0, 2)]));
        assert!(e.contains("not of the 2 ranks"), "{e}");
        let e = text(comm.raw().all_to_all_v(Io::device(&t, &u), &[60, 60], &[1, 1], DataType::Uint8));
        assert!(e.contains("64 bytes, 120 are needed"), "{e}");
        let e = text(comm.raw().all_to_all_v(Io::in_place(&t), &[1, 1], &[1, 1], DataType::Uint8));
        assert!(e.contains("overlap by accident"), "{e}");
        let e = text(comm.raw().gather(Io::device(&t, &u), 1, DataType::Uint8, 2));
        assert!(e.contains("root 2"), "{e}");
        comm.barrier().unwrap();
    });
}

#[test]
fn a_group_moves_all_its_sends_and_receives() {
    for n in 1..=4usize {
        // More transfers than fit in the first exchange, and fewer.
        for times in [1usize, 3] {
            world(n, &config(), move |mut comm| {
                let rank = comm.rank();
                for round in 0..3u64 {
                    for len in [0usize, 1, 33, 50_001] {
                        // Block (q, i) goes to rank q as its i-th.
                        let block =
                            |from: usize, to: usize, i: usize| input(from * 100 + to, round * 7 + i as u64, len + i);
                        let room = (n * times * (len + times)) as u64;
                        let (a, b) = (comm.allocate(room + 1).unwrap(), comm.allocate(room + 1).unwrap());
                        b.write(0, &vec![0xEE; room as usize + 1]).unwrap();
                        let place = |peer: usize, i: usize| ((peer * times + i) * (len + times)) as u64;
                        let mut group = comm.group();
                        for i in 0..times {
                            for peer in 0..n {
                                a.write(place(peer, i), &block(rank, peer, i)).unwrap();
                                let c = (len + i) as u64;
                                group.send(&a, place(peer, i), c, DataType::Uint8, peer).unwrap();
                                group.recv(&b, place(peer, i), c, DataType::Uint8, peer).unwrap();
                            }
                        }
                        group.run().unwrap();
                        for (peer, i) in (0..n).flat_map(|p| (0..times).map(move |i| (p, i))) {
                            let mut got = vec![0; len + times];
                            b.read(place(peer, i), &mut got).unwrap();
                            assert_eq!(got[..len + i], block(peer, rank, i), "n {n} len {len} from {peer} #{i}");
                            assert!(got[len + i..].iter().all(|b| *b == 0xEE), "bytes behind a receive were written");
                        }
                    }
                }
                // One pair only; the others bring empty groups.
                let t = comm.allocate(8).unwrap();
                t.write(0, &[rank as u8; 8]).unwrap();
                let mut group = comm.group();
                if n > 1 && rank == 0 {
                    group.send(&t, 0, 2, DataType::Fp32, n - 1).unwrap();
                }
                if n > 1 && rank == n - 1 {
                    group.recv(&t, 0, 2, DataType::Fp32, 0).unwrap();
                }
                group.run().unwrap();
                let mut got = [0; 8];
                t.read(0, &mut got).unwrap();
                assert_eq!(got, [if rank == n - 1 { 0 } else { rank as u8 }; 8]);
                comm.group().run().unwrap();
                comm.barrier().unwrap();
            });
        }
    }
}

#[test]
fn a_group_that_does_not_match_is_refused_on_all_ranks_and_the_communicator_goes_on() {
    let texts = world(3, &config(), |mut comm| {
        let t = comm.allocate(64).unwrap();
        let mut group = comm.group();
        assert!(group.send(&t, 60, 2, DataType::Fp32, 0).unwrap_err().to_string().contains("not inside a tensor"));
        assert!(group.send(&t, 0, 2, DataType::Fp32, 3).unwrap_err().to_string().contains("rank 3"));
        drop(group);
        let rank = comm.rank();
        let mut group = comm.group();
        if rank == 0 {
            group.send(&t, 0, 4, DataType::Fp32, 1).unwrap();
        }
        if rank == 1 {
            group.recv(&t, 0, 5, DataType::Fp32, 0).unwrap();
        }
        let e = group.run().unwrap_err().to_string();
        comm.barrier().unwrap();
        e
    });
    for t in &texts {
        assert!(t.contains("send 0 of rank 0 to rank 1 is 16 bytes of fp32, the receive there is 20"), "{t}");
    }
}

#[test]
fn many_small_reductions_in_one() {
    for n in [1usize, 3] {
        world(n, &config(), move |mut comm| {
            let rank = comm.rank();
            let counts = [0usize, 1, 7, 1000, 3, 40_000, 2, 15_000, 0, 5];
            let ins = |r: usize, i: usize| exact_input(r + i, DataType::Fp32, counts[i]);
            let want =
                |i: usize| reduced(ReduceOp::Sum, DataType::Fp32, &(0..n).map(|r| ins(r, i)).collect::<Vec<_>>());
            let mut host: Vec<Vec<u8>> = (0..counts.len()).map(|i| ins(rank, i)).collect();
            let tensors: Vec<DeviceMemory> = counts.iter().map(|c| comm.allocate(*c as u64 * 4 + 3).unwrap()).collect();
            for (i, t) in tensors.iter().enumerate() {
                t.write(3, &ins(rank, i)).unwrap();
            }
            let mut items: Vec<Reduction<'_>> = host.iter_mut().map(|b| Reduction::Host(b)).collect();
            for (tensor, count) in tensors.iter().zip(counts) {
                items.push(Reduction::Device { tensor, offset: 3, count: count as u64 });
            }
            let before = comm.counters().ops;
            comm.raw().all_reduce_many(&mut items, DataType::Fp32, ReduceOp::Sum).unwrap();
            assert!(comm.counters().ops - before <= 8, "{} operations for 20", comm.counters().ops - before);
            for i in 0..counts.len() {
                assert_eq!(host[i], want(i), "host {i}");
                let mut got = vec![0; counts[i] * 4];
                tensors[i].read(3, &mut got).unwrap();
                assert_eq!(got, want(i), "device {i}");
            }
            let mut odd = [0u8; 7];
            let e = comm.raw().all_reduce_many(&mut [Reduction::Host(&mut odd)], DataType::Fp32, ReduceOp::Sum);
            assert!(e.unwrap_err().to_string().contains("not whole fp32 elements"));
        });
    }
}
