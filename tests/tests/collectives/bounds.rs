//! Bounds: no collective reads or writes a byte outside its buffers, and no count is too large to be answered.
//!
//! Private buffers lie against pages that may not be accessed, so that a touch ends the test program with SIGSEGV. In
//! device memory, where peers reach a whole arena, the bytes around a buffer are compared.

use enc::Algorithm;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use wccl::{Communicator, DataType, Error, Io, Peers, ReduceOp, RuntimeConfig};

use crate::common::{config, world};

const PAGE: usize = 4096;

/// Private memory between two inaccessible pages.
struct Fenced {
    base: *mut u8,
    body: usize,
}

impl Fenced {
    /// Room for `len` bytes, rounded up to pages.
    fn new(len: usize) -> Fenced {
        let body = len.next_multiple_of(PAGE).max(PAGE);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice, of which nobody else knows.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), body + 2 * PAGE, access, MapFlags::PRIVATE) };
        let base = base.unwrap().cast::<u8>();
        for guard in [0, PAGE + body] {
            // SAFETY: a page of the mapping just made, to which there is no reference.
            unsafe { mprotect(base.add(guard).cast(), PAGE, MprotectFlags::empty()) }.unwrap();
        }
        Fenced { base, body }
    }

    /// `len` bytes that end `gap` bytes below the upper guard, or begin `gap` bytes above the lower one.
    fn bytes(&mut self, len: usize, at_end: bool, gap: usize) -> &mut [u8] {
        assert!(len + gap <= self.body);
        let at = PAGE + if at_end { self.body - len - gap } else { gap };
        // SAFETY: inside the body, as just asserted, which is readable, writable, initialised (by the kernel, to zero)
        // and borrowed with `self`.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(at), len) }
    }
}

impl Drop for Fenced {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; no reference into it is left.
        unsafe { munmap(self.base.cast(), self.body + 2 * PAGE) }.unwrap();
    }
}

/// The guards are what the tests below rest on.
#[test]
fn the_guards_are_armed() {
    let fenced = Fenced::new(10);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let access = |at: usize| {
        let mut lines = maps.lines().filter_map(|line| {
            let (range, rest) = line.split_once(' ')?;
            let (from, to) = range.split_once('-')?;
            let (from, to) = (usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?);
            (from..to).contains(&at).then(|| rest[..4].to_string())
        });
        lines.next().unwrap_or_else(|| "none".into())
    };
    let at = fenced.base.addr();
    assert_eq!([at, at + PAGE, at + 2 * PAGE].map(access), ["---p", "rw-p", "---p"]);
}

/// What a rank brings: any bytes will do.
fn byte(rank: usize, i: usize) -> u8 {
    (i.wrapping_mul(31) ^ i >> 8).wrapping_add(rank * 101 + 7) as u8
}

fn input(rank: usize, len: usize) -> impl Iterator<Item = u8> {
    (0..len).map(move |i| byte(rank, i))
}

fn fill(to: &mut [u8], rank: usize) {
    let len = to.len();
    for (to, from) in to.iter_mut().zip(input(rank, len)) {
        *to = from;
    }
}

/// Where the two buffers of a call lie.
#[derive(Debug, Clone, Copy)]
struct Place {
    at_end: bool,
    src_gap: usize,
    dst_gap: usize,
}

/// Every collective once on fenced buffers, checked. `count` is in bytes for the moves, in halves for the reductions, so
/// that elements straddle pages and words.
fn all_collectives(comm: &mut Communicator, a: &mut Fenced, b: &mut Fenced, count: usize, place: Place) {
    let (rank, n) = (comm.rank(), comm.nranks());
    let (c, root) = (count as u64, count % n);
    let what = format!("rank {rank} of {n}, count {count}, {place:?}");
    let check = |got: &[u8], expected: &mut dyn Iterator<Item = u8>, name: &str| {
        assert!(got.iter().copied().eq(expected), "{name}: wrong result, {what}");
    };
    let mut apart = |comm: &mut Communicator,
                     src: usize,
                     dst: usize,
                     f: &mut dyn FnMut(&mut Communicator, Io<'_>),
                     look: &dyn Fn(&[u8])| {
        let src = a.bytes(src, place.at_end, place.src_gap);
        let dst = b.bytes(dst, place.at_end, place.dst_gap);
        fill(src, rank);
        dst.fill(0xEE);
        f(comm, Io::Host { src, dst });
        look(dst);
    };
    let dtype = DataType::Uint8;

    // Sums of halves in 16-bit integers.
    let sum = |from: usize, count: usize| {
        (0..count).flat_map(move |i| {
            let word = |r: usize| u16::from_le_bytes([byte(r, from + 2 * i), byte(r, from + 2 * i + 1)]);
            (0..n).fold(0u16, |sum, r| sum.wrapping_add(word(r))).to_le_bytes()
        })
    };
    let (wide, op) = (DataType::Uint16, ReduceOp::Sum);
    apart(comm, 2 * count, 2 * count, &mut |comm, io| comm.raw().all_reduce(io, c, wide, op).unwrap(), &|got| {
        check(got, &mut sum(0, count), "all_reduce");
    });
    let scatter = &mut |comm: &mut Communicator, io: Io<'_>| comm.raw().reduce_scatter(io, c, wide, op).unwrap();
    apart(comm, 2 * count * n, 2 * count, scatter, &|got| {
        check(got, &mut sum(2 * count * rank, count), "reduce_scatter");
    });
    let out = if rank == root { 2 * count } else { 0 };
    apart(comm, 2 * count, out, &mut |comm, io| comm.raw().reduce(io, c, wide, op, root).unwrap(), &|got| {
        check(got, &mut sum(0, out / 2), "reduce");
    });

    apart(comm, count, count * n, &mut |comm, io| comm.raw().all_gather(io, c, dtype).unwrap(), &|got| {
        check(got, &mut (0..n).flat_map(|r| input(r, count)), "all_gather");
    });
    apart(comm, count * n, count * n, &mut |comm, io| comm.raw().all_to_all(io, c, dtype).unwrap(), &|got| {
        let block = |r: usize| (count * rank..count * (rank + 1)).map(move |i| byte(r, i));
        check(got, &mut (0..n).flat_map(block), "all_to_all");
    });
    let src = if rank == root { count } else { 0 };
    apart(comm, src, count, &mut |comm, io| comm.raw().broadcast(io, c, dtype, root).unwrap(), &|got| {
        check(got, &mut input(root, count), "broadcast");
    });
    let peers = Peers { dst: Some((rank + 1) % n), src: Some((rank + n - 1) % n) };
    apart(comm, count, count, &mut |comm, io| comm.raw().send_recv(io, c, dtype, peers).unwrap(), &|got| {
        check(got, &mut input((rank + n - 1) % n, count), "send_recv");
    });

    // In place, at the same edge.
    let one = b.bytes(2 * count, place.at_end, place.dst_gap);
    fill(one, rank);
    comm.raw().all_reduce(Io::HostInPlace(one), c, wide, op).unwrap();
    check(one, &mut sum(0, count), "all_reduce in place");
    let all = b.bytes(count * n, place.at_end, place.dst_gap);
    fill(all, rank);
    comm.raw().all_to_all(Io::HostInPlace(all), c, dtype).unwrap();
    let block = |r: usize| (count * rank..count * (rank + 1)).map(move |i| byte(r, i));
    check(all, &mut (0..n).flat_map(block), "all_to_all in place");
    all.fill(0xEE);
    fill(&mut all[rank * count..(rank + 1) * count], rank);
    comm.raw().all_gather(Io::HostInPlace(all), c, dtype).unwrap();
    check(all, &mut (0..n).flat_map(|r| input(r, count)), "all_gather in place");
}

/// Buffers that end at an inaccessible page or begin behind one, and 1 to 15 bytes from it; small odd counts, and ones of
/// several staging pieces. Chosen by size, staged, and read by the kernel.
#[test]
fn no_collective_touches_a_byte_outside_private_buffers() {
    let algorithms = [None, Some(Algorithm::Staged), Some(Algorithm::Direct)];
    for (n, algorithm) in [2usize, 3].into_iter().flat_map(|n| algorithms.map(|a| (n, a))) {
        world(n, &RuntimeConfig { algorithm, ..config() }, move |mut comm| {
            let largest = 700_001;
            let mut buffers = [Fenced::new(2 * largest * n + 16), Fenced::new(2 * largest * n + 16)];
            let [a, b] = &mut buffers;
            for at_end in [false, true] {
                for gap in 0..16 {
                    let place = Place { at_end, src_gap: gap, dst_gap: gap * 7 % 16 };
                    let counts = [0usize, 1, 2, 3, 5, 7, 15, 17, 31, 33, 63, 65, 127, 129, 257, 4095, 4097, 8191];
                    for count in counts {
                        all_collectives(&mut comm, a, b, count, place);
                    }
                }
                for count in [65_537, largest] {
                    all_collectives(&mut comm, a, b, count, Place { at_end, src_gap: 0, dst_gap: 0 });
                }
            }
        });
    }
}

/// In device memory peers write straight into a rank's output: what lies around it stays as it was, in every algorithm.
#[test]
fn no_peer_writes_beside_an_output_in_device_memory() {
    for algorithm in [Algorithm::OneHop, Algorithm::Mesh, Algorithm::Ring] {
        let forced = RuntimeConfig { algorithm: Some(algorithm), ..config() };
        world(3, &forced, move |mut comm| {
            let (rank, n) = (comm.rank(), comm.nranks());
            let (src, dst) = (comm.allocate(8192).unwrap(), comm.allocate(32_768).unwrap());
            for (turn, count) in
                [1usize, 2, 3, 7, 15, 16, 17, 63, 65, 255, 257, 1000].into_iter().cycle().take(96).enumerate()
            {
                let (c, root, to) = (count as u64, turn % n, 64 + turn % 16);
                let mut image = vec![0xEE; 32_768];
                dst.write(0, &image).unwrap();
                src.write(turn as u64 % 16, &input(rank, count * n).collect::<Vec<u8>>()).unwrap();
                let io = Io::Device { src: (&src, turn as u64 % 16), dst: (&dst, to as u64) };
                let (dtype, op) = (DataType::Uint8, ReduceOp::Max);
                let most = |i: usize| (0..n).map(|r| byte(r, i)).max().unwrap();
                let result: Vec<u8> = match turn / 12 {
                    0 => {
                        comm.raw().all_reduce(io, c, dtype, op).unwrap();
                        (0..count).map(most).collect()
                    }
                    1 => {
                        comm.raw().all_gather(io, c, dtype).unwrap();
                        (0..n).flat_map(|r| input(r, count)).collect()
                    }
                    2 => {
                        comm.raw().reduce_scatter(io, c, dtype, op).unwrap();
                        (count * rank..count * (rank + 1)).map(most).collect()
                    }
                    3 => {
                        comm.raw().broadcast(io, c, dtype, root).unwrap();
                        input(root, count).collect()
                    }
                    4 => {
                        comm.raw().reduce(io, c, dtype, op, root).unwrap();
                        (0..if rank == root { count } else { 0 }).map(most).collect()
                    }
                    5 => {
                        comm.raw().all_to_all(io, c, dtype).unwrap();
                        (0..n).flat_map(|r| (count * rank..count * (rank + 1)).map(move |i| byte(r, i))).collect()
                    }
                    6 => {
                        let peers = Peers { dst: Some((rank + 1) % n), src: Some((rank + n - 1) % n) };
                        comm.raw().send_recv(io, c, dtype, peers).unwrap();
                        input((rank + n - 1) % n, count).collect()
                    }
                    _ => {
                        comm.barrier().unwrap();
                        Vec::new()
                    }
                };
                image[to..to + result.len()].copy_from_slice(&result);
                let mut got = vec![0; image.len()];
                // A peer that is still writing here would be an error too: the operation is over.
                dst.read(0, &mut got).unwrap();
                assert!(got == image, "{algorithm:?} turn {turn} count {count} rank {rank}");
            }
        });
    }
}

/// More elements than a signed 32-bit number can count. Takes 4 GiB of memory: one tensor of 2 GiB and a byte on each of
/// two ranks, reduced in place.
#[test]
fn more_than_two_to_the_31_elements() {
    let c = RuntimeConfig { hbm_bytes: 3 << 30, ..config() };
    world(2, &c, |mut comm| {
        let (rank, count) = (comm.rank(), (1u64 << 31) + 1);
        let tensor = comm.allocate(count).unwrap();
        // A prime period, so that a part that lands elsewhere is seen.
        let pattern = |rank: usize| -> Vec<u8> { input(rank, 1_048_573).collect() };
        let (mine, expected) = (pattern(rank), pattern(0).into_iter().zip(pattern(1)));
        let expected: Vec<u8> = expected.map(|(a, b)| a.wrapping_add(b)).collect();
        let pieces = || (0..count).step_by(mine.len()).map(|at| (at, mine.len().min((count - at) as usize)));
        for (at, len) in pieces() {
            tensor.write(at, &mine[..len]).unwrap();
        }
        comm.raw().all_reduce(Io::in_place(&tensor), count, DataType::Uint8, ReduceOp::Sum).unwrap();
        let mut got = vec![0; mine.len()];
        for (at, len) in pieces() {
            tensor.read(at, &mut got[..len]).unwrap();
            assert!(got[..len] == expected[..len], "rank {rank}: wrong result from byte {at}");
        }
        // One copy of that length: what rank 0 spoils at the ends and around 2^31 comes back from the root.
        let spoiled = [0, 1, (1 << 31) - 1, 1 << 31];
        let right = |at: u64| expected[(at % mine.len() as u64) as usize];
        if rank == 0 {
            spoiled.into_iter().for_each(|at| tensor.write(at, &[!right(at)]).unwrap());
        }
        comm.raw().broadcast(Io::in_place(&tensor), count, DataType::Uint8, 1).unwrap();
        for at in spoiled {
            tensor.read(at, &mut got[..1]).unwrap();
            assert_eq!(got[0], right(at), "rank {rank}, byte {at}");
        }
    });
}

/// Counts up to 2^64 − 1: refused as the caller's error, in words, before anything moves; never a panic, and the ranks
/// still agree afterwards.
#[test]
fn counts_near_the_end_of_the_numbers_are_refused() {
    world(2, &config(), |mut comm| {
        let tensor = comm.allocate(64).unwrap();
        let (a, mut b) = ([0u8; 64], [0u8; 64]);
        let near = |x: u64| [x.wrapping_sub(1), x, x.wrapping_add(1)];
        let counts = [1u64 << 31, 1 << 32, 1 << 60, 1 << 61, 1 << 62, 1 << 63, u64::MAX - 1].into_iter().flat_map(near);
        let counts = counts.chain([u64::MAX / 2, u64::MAX / 3, u64::MAX / 4, u64::MAX / 8, i64::MAX as u64]);
        // Counts that wrap to nothing are the ones above the end.
        for count in counts.filter(|count| *count > 1000) {
            for dtype in [DataType::Uint8, DataType::Fp16, DataType::Fp32, DataType::Int64] {
                let op = ReduceOp::Sum;
                let peers = Peers { dst: Some(1 - comm.rank()), src: Some(1 - comm.rank()) };
                for device in [true, false] {
                    for which in 0..8 {
                        let io = match device {
                            true => Io::in_place(&tensor),
                            false if which % 2 == 0 => Io::HostInPlace(&mut b),
                            false => Io::Host { src: &a, dst: &mut b },
                        };
                        let result = match which {
                            0 => comm.raw().all_reduce(io, count, dtype, op),
                            1 => comm.raw().all_gather(io, count, dtype),
                            2 => comm.raw().reduce_scatter(io, count, dtype, op),
                            3 => comm.raw().broadcast(io, count, dtype, 0),
                            4 => comm.raw().reduce(io, count, dtype, op, 0),
                            5 => comm.raw().all_to_all(io, count, dtype),
                            6 => comm.raw().send_recv(io, count, dtype, peers),
                            _ if dtype.is_float() => comm.raw().all_reduce_scaled(io, count, dtype, 0.5),
                            _ => continue,
                        };
                        let what = format!("collective {which} of {count} {dtype}, device {device}");
                        match result {
                            Err(Error::Usage(text)) => assert!(
                                text.contains("needed") || text.contains("larger than memory"),
                                "{what}: {text}"
                            ),
                            other => panic!("{what}: {other:?}"),
                        }
                    }
                }
            }
        }
        comm.barrier().unwrap();
    });
}
