//! Exactness: every type and operation, every small count and a sweep of large sizes, against scalar code of the test's own.
//!
//! The order of a reduction is the order of the ranks, whatever the algorithm, so results are compared bit for bit; only
//! the ring sums in its own order and rounds after each step, and is held to the bound that follows from it. Every rank
//! compares its own result with the same expectation, so that all ranks have the same bits.

pub(super) mod scalar;

use enc::Algorithm;
use scalar::{Codec, layout, reduced};
use wccl::{Communicator, DataType, DeviceMemory, Io, Peers, ReduceOp, RuntimeConfig};

use crate::common::{config, world};

/// Largest count of the exhaustive part.
const MOST: usize = 4097;
/// Bytes around an output that must stay as they were.
const MARGIN: usize = 32;
const FILL: u8 = 0xEE;
/// Scales of ranks: rounding, negative, one, tiny.
const SCALES: [f32; 5] = [0.1, -3.0, 1.0, 1.0 / 3.0, 0.0078125];

/// A small generator (xorshift64*), so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn of(rank: usize, seed: u64) -> Random {
        Random((rank as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ seed.wrapping_mul(0xD134_2543_DE82_EF95) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| (self.next() >> 32) as u8).collect()
    }

    /// `count` elements: any bits, so NaNs, infinities and subnormals too; half of them floats near one.
    fn elements(&mut self, dtype: DataType, count: usize) -> Vec<u8> {
        if !dtype.is_float() {
            return self.bytes(count * dtype.size());
        }
        let codec = Codec::new(dtype);
        let mut out = Vec::with_capacity(count * dtype.size());
        for _ in 0..count {
            let random = self.next();
            if random >> 63 == 0 {
                out.extend_from_slice(&random.to_le_bytes()[..dtype.size()]);
            } else {
                out.extend(codec.encode(near_one(random)));
            }
        }
        out
    }
}

/// A number with either sign and a magnitude from 0.5 to 1.5.
fn near_one(random: u64) -> f32 {
    let magnitude = 0.5 + (random >> 8 & 0xFFFF) as f32 / 65536.0;
    if random & 1 == 0 { magnitude } else { -magnitude }
}

/// The operations of a type: the plain ones, and the pre-scaled sum of floats.
fn operations(dtype: DataType) -> impl Iterator<Item = ReduceOp> {
    ReduceOp::ALL.into_iter().chain(dtype.is_float().then_some(ReduceOp::PreMulSum))
}

fn scales_of(op: ReduceOp, n: usize) -> Vec<f32> {
    if op == ReduceOp::PreMulSum { (0..n).map(|r| SCALES[r % SCALES.len()]).collect() } else { Vec::new() }
}

fn all_reduce(comm: &mut Communicator, io: Io<'_>, count: usize, dtype: DataType, op: ReduceOp, scales: &[f32]) {
    let (rank, count) = (comm.rank(), count as u64);
    match scales {
        [] => comm.raw().all_reduce(io, count, dtype, op),
        scales => comm.raw().all_reduce_scaled(io, count, dtype, scales[rank]),
    }
    .unwrap();
}

fn reduce_scatter(comm: &mut Communicator, io: Io<'_>, count: usize, dtype: DataType, op: ReduceOp, scales: &[f32]) {
    let (rank, count) = (comm.rank(), count as u64);
    match scales {
        [] => comm.raw().reduce_scatter(io, count, dtype, op),
        scales => comm.raw().reduce_scatter_scaled(io, count, dtype, scales[rank]),
    }
    .unwrap();
}

fn reduce(
    comm: &mut Communicator,
    io: Io<'_>,
    count: usize,
    dtype: DataType,
    op: ReduceOp,
    root: usize,
    scales: &[f32],
) {
    let (rank, count) = (comm.rank(), count as u64);
    match scales {
        [] => comm.raw().reduce(io, count, dtype, op, root),
        scales => comm.raw().reduce_scaled(io, count, dtype, root, scales[rank]),
    }
    .unwrap();
}

/// Buffers of one rank in one kind of memory, made once and used by every call.
struct Bench<'a> {
    comm: &'a mut Communicator,
    device: Option<(DeviceMemory, DeviceMemory)>,
    a: Vec<u8>,
    b: Vec<u8>,
}

impl<'a> Bench<'a> {
    fn new(comm: &'a mut Communicator, device: bool, most: usize) -> Bench<'a> {
        let bytes = most + 2 * MARGIN;
        let tensor = |comm: &Communicator| comm.allocate(bytes as u64).unwrap();
        let device = device.then(|| (tensor(comm), tensor(comm)));
        Bench { comm, device, a: vec![0; bytes], b: vec![0; bytes] }
    }

    /// One call with separate buffers at odd addresses (`shift` picks them); answers the output, after a look at the
    /// bytes around it.
    fn apart(&mut self, src: &[u8], out: usize, shift: usize, f: impl FnOnce(&mut Communicator, Io<'_>)) -> &[u8] {
        let (from, to) = (shift * 5 % 16, MARGIN + shift * 7 % 16);
        self.b[..out + 2 * MARGIN].fill(FILL);
        match &self.device {
            None => {
                self.a[from..from + src.len()].copy_from_slice(src);
                f(self.comm, Io::Host { src: &self.a[from..from + src.len()], dst: &mut self.b[to..to + out] });
            }
            Some((a, b)) => {
                a.write(from as u64, src).unwrap();
                b.write(0, &self.b[..out + 2 * MARGIN]).unwrap();
                f(self.comm, Io::Device { src: (a, from as u64), dst: (b, to as u64) });
                b.read(0, &mut self.b[..out + 2 * MARGIN]).unwrap();
            }
        }
        self.framed(to, out)
    }

    /// One call in place: the buffer holds `content`; in it the input begins at `input`, the output at `output`.
    fn in_place(
        &mut self,
        content: &[u8],
        (input, output): (usize, usize),
        shift: usize,
        f: impl FnOnce(&mut Communicator, Io<'_>),
    ) -> &[u8] {
        let (at, len) = (MARGIN + shift * 7 % 16, content.len());
        self.b[..len + 2 * MARGIN].fill(FILL);
        self.b[at..at + len].copy_from_slice(content);
        match &self.device {
            None => f(self.comm, Io::HostInPlace(&mut self.b[at..at + len])),
            Some((_, b)) => {
                b.write(0, &self.b[..len + 2 * MARGIN]).unwrap();
                f(self.comm, Io::Device { src: (b, (at + input) as u64), dst: (b, (at + output) as u64) });
                b.read(0, &mut self.b[..len + 2 * MARGIN]).unwrap();
            }
        }
        self.framed(at, len)
    }

    fn framed(&self, at: usize, len: usize) -> &[u8] {
        let around = self.b[..at].iter().chain(&self.b[at + len..len + 2 * MARGIN]);
        assert!(around.clone().all(|byte| *byte == FILL), "a byte outside the output was written");
        &self.b[at..at + len]
    }
}

/// Where two results differ first, for a message.
fn same(got: &[u8], expected: &[u8], what: impl FnOnce() -> String) {
    if got != expected {
        let at = got.iter().zip(expected).position(|(a, b)| a != b);
        panic!("{}: first difference at byte {at:?}", what());
    }
}

/// all_reduce: every type, operation, count from 0 to [`MOST`], both memories; in place and not in turn.
fn every_count(n: usize) {
    world(n, &config(), move |mut comm| {
        let rank = comm.rank();
        for dtype in DataType::ALL {
            let size = dtype.size();
            let inputs: Vec<_> = (0..n).map(|r| Random::of(r, 1).elements(dtype, MOST + 7)).collect();
            for op in operations(dtype) {
                let scales = scales_of(op, n);
                let expected = reduced(dtype, op, &inputs, &scales);
                for device in [true, false] {
                    let mut bench = Bench::new(&mut comm, device, MOST * 8);
                    for count in 0..=MOST {
                        let range = count % 7 * size..(count % 7 + count) * size;
                        let run = |comm: &mut Communicator, io: Io<'_>| {
                            all_reduce(comm, io, count, dtype, op, &scales);
                        };
                        let input = &inputs[rank][range.clone()];
                        let got = if count % 2 == 0 {
                            bench.apart(input, input.len(), count, run)
                        } else {
                            bench.in_place(input, (0, 0), count, run)
                        };
                        same(got, &expected[range], || {
                            format!("all_reduce {dtype} {op} count {count} rank {rank} of {n} device {device}")
                        });
                    }
                }
            }
        }
    });
}

#[test]
fn every_type_operation_and_count_on_two_ranks() {
    every_count(2);
}

#[test]
fn every_type_operation_and_count_on_three_ranks() {
    every_count(3);
}

/// The other reducing collectives: every count for one type, a sample for the rest.
#[test]
fn scattered_and_rooted_reductions_of_every_count() {
    for n in [2usize, 3] {
        world(n, &config(), move |mut comm| {
            let rank = comm.rank();
            let sample = || [0, 1, 2, 3, 7, 8, 9, 31, 33, 64, 255, 1000, 2731, 4096, MOST].into_iter();
            for dtype in DataType::ALL {
                for op in operations(dtype) {
                    let (size, scales) = (dtype.size(), scales_of(op, n));
                    let inputs: Vec<_> = (0..n).map(|r| Random::of(r, 2).elements(dtype, MOST * n)).collect();
                    let all = reduced(dtype, op, &inputs, &scales);
                    for device in [true, false] {
                        let mut bench = Bench::new(&mut comm, device, MOST * 8 * n);
                        let exhaustive = dtype == DataType::Bf16 && op == ReduceOp::Sum;
                        let counts: Vec<usize> = if exhaustive { (0..=MOST).collect() } else { sample().collect() };
                        for count in counts {
                            let (block, root) = (count * size, count % n);
                            let what = |name| format!("{name} {dtype} {op} count {count} rank {rank} device {device}");
                            let (wide, mine) = (&inputs[rank][..n * block], &all[rank * block..][..block]);
                            let scatter = |comm: &mut Communicator, io: Io<'_>| {
                                reduce_scatter(comm, io, count, dtype, op, &scales);
                            };
                            let got = bench.apart(wide, block, count, scatter);
                            same(got, mine, || what("reduce_scatter"));
                            let got = bench.in_place(wide, (0, rank * block), count + 3, scatter);
                            same(&got[rank * block..][..block], mine, || what("reduce_scatter in place"));
                            let rooted = |comm: &mut Communicator, io: Io<'_>| {
                                reduce(comm, io, count, dtype, op, root, &scales);
                            };
                            let (input, out) = (&inputs[rank][..block], if rank == root { block } else { 0 });
                            let got = bench.apart(input, out, count, rooted);
                            same(got, &all[..out], || what("reduce"));
                            let got = bench.in_place(input, (0, 0), count + 3, rooted);
                            let expected = if rank == root { &all[..block] } else { input };
                            same(got, expected, || what("reduce in place"));
                        }
                    }
                }
            }
        });
    }
}

/// The collectives that only move: every count of bytes, a sample for the wider types. Chosen by size, and by the two ways of
/// private memory.
#[test]
fn moves_of_every_count() {
    let algorithms = [None, Some(Algorithm::Staged), Some(Algorithm::Direct)];
    for (n, algorithm) in [2usize, 3].into_iter().flat_map(|n| algorithms.map(|a| (n, a))) {
        world(n, &RuntimeConfig { algorithm, ..config() }, move |mut comm| {
            let rank = comm.rank();
            for dtype in [DataType::Uint8, DataType::Fp16, DataType::Fp32, DataType::Int64] {
                let size = dtype.size();
                let inputs: Vec<_> = (0..n).map(|r| Random::of(r, 3).bytes(MOST * n * size)).collect();
                let step = if size == 1 { 1 } else { 97 };
                let memories: &[bool] = if algorithm.is_none() { &[true, false] } else { &[false] };
                for &device in memories {
                    let mut bench = Bench::new(&mut comm, device, MOST * 8 * n);
                    for count in (0..=MOST).step_by(step) {
                        let (block, c, root) = (count * size, count as u64, count % n);
                        let what = |name| {
                            format!("{name} {dtype} count {count} rank {rank} of {n} device {device} by {algorithm:?}")
                        };
                        let own = &inputs[rank][..block];

                        let gathered: Vec<u8> = inputs.iter().flat_map(|i| &i[..block]).copied().collect();
                        let gather = |comm: &mut Communicator, io: Io<'_>| comm.raw().all_gather(io, c, dtype).unwrap();
                        let got = bench.apart(own, n * block, count, gather);
                        same(got, &gathered, || what("all_gather"));
                        let mut content = vec![FILL; n * block];
                        content[rank * block..][..block].copy_from_slice(own);
                        let got = bench.in_place(&content, (rank * block, 0), count, gather);
                        same(got, &gathered, || what("all_gather in place"));

                        let exchanged: Vec<u8> =
                            inputs.iter().flat_map(|i| &i[rank * block..][..block]).copied().collect();
                        let exchange =
                            |comm: &mut Communicator, io: Io<'_>| comm.raw().all_to_all(io, c, dtype).unwrap();
                        let got = bench.apart(&inputs[rank][..n * block], n * block, count, exchange);
                        same(got, &exchanged, || what("all_to_all"));
                        let got = bench.in_place(&inputs[rank][..n * block], (0, 0), count, exchange);
                        same(got, &exchanged, || what("all_to_all in place"));

                        let spread = |comm: &mut Communicator, io: Io<'_>| {
                            comm.raw().broadcast(io, c, dtype, root).unwrap();
                        };
                        let got = bench.apart(if rank == root { own } else { &[] }, block, count, spread);
                        same(got, &inputs[root][..block], || what("broadcast"));
                        let got = bench.in_place(own, (0, 0), count, spread);
                        same(got, &inputs[root][..block], || what("broadcast in place"));

                        let peers = Peers { dst: Some((rank + 1) % n), src: Some((rank + n - 1) % n) };
                        let got = bench.apart(own, block, count, |comm, io| {
                            comm.raw().send_recv(io, c, dtype, peers).unwrap();
                        });
                        same(got, &inputs[(rank + n - 1) % n][..block], || what("send_recv"));
                    }
                }
            }
        });
    }
}

/// Elements of the repeated part of a large buffer: a prime, so that no piece or part begins at its start again.
const PERIOD: usize = 65_521;

/// `pattern` over and over, into `buffer`.
fn repeat(pattern: &[u8], buffer: &mut [u8]) {
    for chunk in buffer.chunks_mut(pattern.len()) {
        chunk.copy_from_slice(&pattern[..chunk.len()]);
    }
}

/// all_reduce of 64 KiB to 64 MiB: each type and operation up to 4 MiB, each type and each operation up to 64 MiB.
#[test]
fn large_sizes_of_every_type_and_operation() {
    world(2, &config(), |mut comm| {
        let (rank, n) = (comm.rank(), comm.nranks());
        let mut buffer = vec![0; (64 << 20) + 64];
        let tensor = comm.allocate(buffer.len() as u64).unwrap();
        for (i, dtype) in DataType::ALL.into_iter().enumerate() {
            let size = dtype.size();
            let inputs: Vec<_> = (0..n).map(|r| Random::of(r, 4).elements(dtype, PERIOD)).collect();
            for (j, op) in operations(dtype).enumerate() {
                let scales = scales_of(op, n);
                let expected = reduced(dtype, op, &inputs, &scales);
                let largest = (j == i % 6 || j == 4 && i % 6 == 5).then_some((64 << 20) - 8);
                for bytes in [(64 << 10) + 8, (1 << 20) - 24, (4 << 20) + 40].into_iter().chain(largest) {
                    for device in [true, false] {
                        let (count, at) = (bytes / size, (i + j) % 16);
                        let content = &mut buffer[at..at + count * size];
                        repeat(&inputs[rank], content);
                        if device {
                            tensor.write(at as u64, content).unwrap();
                            let io = Io::Device { src: (&tensor, at as u64), dst: (&tensor, at as u64) };
                            all_reduce(&mut comm, io, count, dtype, op, &scales);
                            tensor.read(at as u64, content).unwrap();
                        } else {
                            all_reduce(&mut comm, Io::HostInPlace(content), count, dtype, op, &scales);
                        }
                        for (k, got) in content.chunks(PERIOD * size).enumerate() {
                            same(got, &expected[..got.len()], || {
                                format!("{dtype} {op} {bytes} bytes, rank {rank}, device {device}, repetition {k}")
                            });
                        }
                    }
                }
            }
        }
    });
}

fn forced(algorithm: Algorithm) -> RuntimeConfig {
    RuntimeConfig { algorithm: Some(algorithm), ..config() }
}

/// What the ring may be off by. Every one of its n − 1 steps rounds to f32 and then to the type, so a sum is off by at
/// most (1 + u + v)^(n−1) − 1 times the sum of the magnitudes, where u and v are half a unit of the type's and of f32's last
/// place (relative); a product by as much of itself. A division for an average and each multiplication by a scale are
/// one more step. Results below the normal range add half the smallest number for each rounding.
fn ring_bound(dtype: DataType, op: ReduceOp, values: &[f64], smallest: f64) -> f64 {
    let n = values.len();
    let (_, mantissa) = layout(dtype);
    let step = 2f64.powi(-mantissa - 1) + 2f64.powi(-24);
    let steps = n as i32 - 1 + i32::from(matches!(op, ReduceOp::Avg | ReduceOp::PreMulSum));
    let relative = (1.0 + step).powi(steps) - 1.0;
    let size = match op {
        ReduceOp::Prod => values.iter().product::<f64>().abs(),
        ReduceOp::Avg => values.iter().map(|v| v.abs()).sum::<f64>() / n as f64,
        _ => values.iter().map(|v| v.abs()).sum(),
    };
    relative * size + f64::from(steps) * smallest / 2.0
}

/// Around the ring the order is the ring's: integers, max and min are exact all the same, floats within the bound. All
/// ranks have the same bits.
#[test]
fn the_ring_keeps_its_bound_and_all_ranks_agree() {
    for n in [2usize, 3, 4, 5] {
        let results = world(n, &forced(Algorithm::Ring), move |mut comm| {
            let rank = comm.rank();
            let mut results = Vec::new();
            for dtype in DataType::ALL {
                let count = 5003;
                for op in operations(dtype) {
                    let scales = scales_of(op, n);
                    let exact = !dtype.is_float() || matches!(op, ReduceOp::Max | ReduceOp::Min);
                    let inputs: Vec<Vec<u8>> = (0..n)
                        .map(|r| {
                            let mut random = Random::of(r, 5);
                            if exact {
                                return random.elements(dtype, count);
                            }
                            let codec = Codec::new(dtype);
                            (0..count).flat_map(|_| codec.encode(near_one(random.next()))).collect()
                        })
                        .collect();
                    let mut bench = Bench::new(&mut comm, true, count * 8);
                    let got = bench.apart(&inputs[rank], inputs[rank].len(), n, |comm, io| {
                        all_reduce(comm, io, count, dtype, op, &scales);
                    });
                    if exact {
                        same(got, &reduced(dtype, op, &inputs, &scales), || format!("{dtype} {op} on {n} ranks"));
                    } else {
                        let (codec, size) = (Codec::new(dtype), dtype.size());
                        let smallest = codec.smallest();
                        for at in (0..got.len()).step_by(size) {
                            let values: Vec<f64> = (0..n)
                                .map(|r| {
                                    let scale = scales.get(r).copied().unwrap_or(1.0);
                                    f64::from(codec.decode(&inputs[r][at..at + size])) * f64::from(scale)
                                })
                                .collect();
                            let sum = values.iter().sum::<f64>();
                            let truth = match op {
                                ReduceOp::Prod => values.iter().product(),
                                ReduceOp::Avg => sum / n as f64,
                                _ => sum,
                            };
                            let value = f64::from(codec.decode(&got[at..at + size]));
                            let bound = ring_bound(dtype, op, &values, smallest);
                            assert!(
                                (value - truth).abs() <= bound,
                                "{dtype} {op} on {n} ranks at byte {at}: {value} instead of {truth}, bound {bound}"
                            );
                        }
                    }
                    results.push(got.to_vec());
                }
            }
            results
        });
        assert!(results.iter().all(|r| *r == results[0]), "{n} ranks have different results");
    }
}

/// Small whole numbers, whose products with powers of two and sums are exact in every float type and order.
fn whole(rank: usize, dtype: DataType, count: usize) -> Vec<u8> {
    let codec = Codec::new(dtype);
    (0..count).flat_map(|i| codec.encode(((i * 7 + rank * 3) % 3) as f32)).collect()
}

/// A count whose wider types need several staging halves.
const LARGE: usize = 140_001;

/// Every rank's own scale reaches all others, in every algorithm, memory and collective, in place and not, whatever lies
/// beside the record.
#[test]
fn pre_scaled_sums_across_ranks_in_every_algorithm() {
    for algorithm in [Algorithm::OneHop, Algorithm::Mesh, Algorithm::Ring, Algorithm::Staged] {
        for n in 1..=5usize {
            world(n, &forced(algorithm), move |mut comm| {
                let rank = comm.rank();
                let counts = [0usize, 1, 2, 3, 4, 7, 8, 9, 16, 31, 32, 33, 100, 1000, 2730, LARGE];
                let ring = algorithm == Algorithm::Ring;
                for dtype in DataType::ALL.into_iter().filter(|d| d.is_float()) {
                    let (size, op) = (dtype.size(), ReduceOp::PreMulSum);
                    let scales: Vec<f32> = match ring {
                        true => [1.0, 2.0, 0.5, -1.0, -0.5][..n].to_vec(),
                        false => (0..n).map(|r| SCALES[(r + n) % SCALES.len()]).collect(),
                    };
                    let patterns: Vec<Vec<u8>> = (0..n)
                        .map(|r| match ring {
                            true => whole(r, dtype, 5003),
                            false => Random::of(r, 6).elements(dtype, 5003),
                        })
                        .collect();
                    let repeated = |pattern: &[u8]| {
                        let mut all = vec![0; LARGE * n * size];
                        repeat(pattern, &mut all);
                        all
                    };
                    let inputs: Vec<_> = patterns.iter().map(|p| repeated(p)).collect();
                    let all = repeated(&reduced(dtype, op, &patterns, &scales));
                    for device in [true, false] {
                        let mut bench = Bench::new(&mut comm, device, LARGE * n * size);
                        for count in counts {
                            let (block, root) = (count * size, count % n);
                            let what = |name| format!("{name} {dtype} count {count} rank {rank} of {n} {algorithm:?}");
                            let run = |comm: &mut Communicator, io: Io<'_>| {
                                all_reduce(comm, io, count, dtype, op, &scales);
                            };
                            let input = &inputs[rank][..block];
                            same(bench.apart(input, block, count, run), &all[..block], || what("all_reduce"));
                            let got = bench.in_place(input, (0, 0), count, run);
                            same(got, &all[..block], || what("all_reduce in place"));
                            let scatter = |comm: &mut Communicator, io: Io<'_>| {
                                reduce_scatter(comm, io, count, dtype, op, &scales);
                            };
                            let (wide, mine) = (&inputs[rank][..n * block], &all[rank * block..][..block]);
                            same(bench.apart(wide, block, count, scatter), mine, || what("reduce_scatter"));
                            let got = bench.in_place(wide, (0, rank * block), count, scatter);
                            same(&got[rank * block..][..block], mine, || what("reduce_scatter in place"));
                            let rooted = |comm: &mut Communicator, io: Io<'_>| {
                                reduce(comm, io, count, dtype, op, root, &scales);
                            };
                            let out = if rank == root { block } else { 0 };
                            same(bench.apart(input, out, count, rooted), &all[..out], || what("reduce"));
                        }
                    }
                }
            });
        }
    }
}

#[test]
fn a_scale_in_the_wrong_place_is_refused_before_anything_moves() {
    world(2, &config(), |mut comm| {
        let mut buf = vec![0; 64];
        let e =
            comm.raw().all_reduce_scaled(Io::HostInPlace(&mut buf), 4, DataType::Int32, 0.5).unwrap_err().to_string();
        assert!(e.contains("all_reduce_scaled") && e.contains("int32") && e.contains("use a float type"), "{e}");
        let e = comm.raw().all_reduce(Io::HostInPlace(&mut buf), 4, DataType::Fp32, ReduceOp::PreMulSum).unwrap_err();
        assert!(e.to_string().contains("call all_reduce_scaled instead"), "{e}");
        let e = comm.raw().reduce_scatter_scaled(Io::HostInPlace(&mut buf), 4, DataType::Uint8, 0.5).unwrap_err();
        assert!(e.to_string().contains("reduce_scatter_scaled"), "{e}");
        let e = comm.raw().reduce_scaled(Io::HostInPlace(&mut buf), 4, DataType::Uint64, 0, 0.5).unwrap_err();
        assert!(e.to_string().contains("uint64"), "{e}");
        // None of it used up an operation.
        comm.barrier().unwrap();
    });
}

#[test]
fn a_pre_scaled_sum_does_not_match_a_plain_one() {
    let texts = world(2, &config(), |mut comm| {
        let mut buf = [0; 16];
        let io = Io::HostInPlace(&mut buf);
        let result = match comm.rank() {
            0 => comm.raw().all_reduce_scaled(io, 4, DataType::Fp32, 0.5),
            _ => comm.raw().all_reduce(io, 4, DataType::Fp32, ReduceOp::Sum),
        };
        result.unwrap_err().to_string()
    });
    assert!(texts.iter().any(|t| t.contains("fp32 pre_mul_sum") && t.contains("fp32 sum")), "{texts:?}");
}
