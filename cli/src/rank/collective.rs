//! Collectives as the command line knows them: names, shapes, buffers, the call itself, and the check of its result.

use anyhow::Context;
use hw_bridge::call::Op;
use hw_bridge::limits::MAX_LOCAL_RANKS;
use wccl::{Communicator, DataType, DeviceMemory, Io, Peers, ReduceOp};

use crate::rank::reference::{Pattern, Tile, wrong_elements};

/// Bytes behind an output that must stay as they are.
pub const RIM: u64 = 64;
/// What an output holds before a checked call.
const UNTOUCHED: u8 = 0xA5;
const ENOMEM: i32 = 12;
/// Bytes moved at a time between device memory and the check.
const CHUNK: usize = 64 * 1024;

/// Reads a collective's name as users of nccom-test, nccl-tests and MPI write it.
///
/// # Errors
/// A sentence with the names that exist.
pub fn parse(name: &str) -> Result<Op, String> {
    let plain: String = name.chars().filter(|c| !matches!(c, '_' | '-' | ' ')).collect();
    let plain = plain.to_ascii_lowercase();
    let plain = plain.strip_suffix("perf").unwrap_or(&plain);
    Ok(match plain {
        "allreduce" | "allr" | "ar" => Op::AllReduce,
        "allgather" | "allg" | "ag" => Op::AllGather,
        "reducescatter" | "redsct" | "reds" | "rs" => Op::ReduceScatter,
        "broadcast" | "bcast" | "bc" => Op::Broadcast,
        "reduce" | "red" => Op::Reduce,
        "alltoall" | "all2all" | "a2a" => Op::AllToAll,
        "sendrecv" | "sendreceive" | "sr" => Op::SendRecv,
        "barrier" => Op::Barrier,
        "allgatherv" | "agv" => Op::AllGatherV,
        "reducescatterv" | "rsv" => Op::ReduceScatterV,
        "alltoallv" | "a2av" => Op::AllToAllV,
        "gather" => Op::Gather,
        "scatter" => Op::Scatter,
        "permute" => Op::Permute,
        "group" => Op::Group,
        _ => {
            return Err(format!(
                "`{name}` is not a collective; use one of allreduce, allgather, reduce_scatter, broadcast, reduce, alltoall, \
                 sendrecv, barrier, allgatherv, reduce_scatter_v, alltoallv, gather, scatter, permute, group (short: allr, allg, \
                 redsct, bcast, red, a2a, sr, agv, rsv, a2av)"
            ));
        }
    })
}

/// Algorithm and bus bandwidth in GB/s (10^9 bytes a second), as nccl-tests define them: `bytes` is the larger of a
/// rank's buffers, and the factor makes the bus bandwidth comparable with a link's.
pub fn bandwidth(op: Op, bytes: u64, nranks: usize, us: f64) -> (f64, f64) {
    if us <= 0.0 {
        return (0.0, 0.0);
    }
    let n = nranks as f64;
    let alg = bytes as f64 / us / 1e3;
    let factor = match op {
        Op::AllReduce => 2.0 * (n - 1.0) / n,
        Op::Barrier => 0.0,
        _ if is_blocked(op) => (n - 1.0) / n,
        _ => 1.0,
    };
    (alg, alg * factor)
}

/// Whether the larger buffer holds a block for each rank.
pub fn is_blocked(op: Op) -> bool {
    matches!(
        op,
        Op::AllGather
            | Op::ReduceScatter
            | Op::AllToAll
            | Op::AllGatherV
            | Op::ReduceScatterV
            | Op::AllToAllV
            | Op::Gather
            | Op::Scatter
            | Op::Group
    )
}

/// Elements of each of `n` blocks of the forms with lists: `count` in the mean, every other pair uneven.
fn uneven(count: u64, n: usize) -> [u64; MAX_LOCAL_RANKS] {
    let mut all = [0; MAX_LOCAL_RANKS];
    for (i, c) in all.iter_mut().enumerate().take(n) {
        let more = count - count / 3;
        *c = match i % 4 {
            _ if i % 2 == 0 && i + 1 == n => count,
            0 => count + more,
            1 => count - more,
            _ => count,
        };
    }
    all
}

/// Where buffers lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BufferMemory {
    /// Modelled device memory, which all ranks of the server reach
    Hbm,
    /// Private memory of each process
    Host,
}

impl BufferMemory {
    /// As it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            BufferMemory::Hbm => "hbm",
            BufferMemory::Host => "host",
        }
    }
}

/// One collective call.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// The collective.
    pub op: Op,
    /// Element type.
    pub dtype: DataType,
    /// Reduction, if it computes.
    pub redop: ReduceOp,
    /// Elements, counted as the runtime's API does.
    pub count: u64,
    /// Root, if it has one.
    pub root: usize,
    /// Input and output in the same memory.
    pub in_place: bool,
    /// Makes its inputs differ from another case's.
    pub seed: u64,
}

/// Memory of one rank.
#[derive(Debug)]
enum Mem {
    Hbm(DeviceMemory),
    /// The bytes begin at an offset, which makes them page-aligned.
    Host(Vec<u8>, usize),
}

/// The two buffers of a rank: input, and output where it is another.
#[derive(Debug)]
pub struct RankBuffers {
    a: Mem,
    b: Mem,
    len: u64,
}

impl Mem {
    fn new(comm: &Communicator, memory: BufferMemory, bytes: u64) -> anyhow::Result<Mem> {
        Ok(match memory {
            BufferMemory::Hbm => Mem::Hbm(comm.allocate(bytes)?),
            BufferMemory::Host => {
                let wanted = usize::try_from(bytes).ok().and_then(|b| b.checked_add(4096));
                let wanted = wanted.with_context(|| format!("{bytes} bytes are more than memory can be"))?;
                let mut v = Vec::new();
                if v.try_reserve_exact(wanted).is_err() {
                    let limit = hw_bridge::os::exhausted::limit_behind(&std::io::Error::from_raw_os_error(ENOMEM));
                    anyhow::bail!("{bytes} bytes of host memory cannot be had{limit}");
                }
                v.resize(wanted, 0u8);
                let at = v.as_ptr().align_offset(4096).min(4096);
                Mem::Host(v, at)
            }
        })
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> anyhow::Result<()> {
        match self {
            Mem::Hbm(t) => t.write(at, bytes)?,
            Mem::Host(v, start) => {
                let at = *start + at as usize;
                v.get_mut(at..at + bytes.len()).context("a write beyond the buffer")?.copy_from_slice(bytes);
            }
        }
        Ok(())
    }

    fn read(&self, at: u64, bytes: &mut [u8]) -> anyhow::Result<()> {
        match self {
            Mem::Hbm(t) => t.read(at, bytes)?,
            Mem::Host(v, start) => {
                let at = *start + at as usize;
                bytes.copy_from_slice(v.get(at..at + bytes.len()).context("a read beyond the buffer")?);
            }
        }
        Ok(())
    }

    fn fill(&mut self, at: u64, len: u64, byte: u8) -> anyhow::Result<()> {
        let piece = [byte; 4096];
        let mut done = 0;
        while done < len {
            let n = (len - done).min(piece.len() as u64);
            self.write(at + done, &piece[..n as usize])?;
            done += n;
        }
        Ok(())
    }

    fn put(&mut self, part: &Part<'_>, size: u64) -> anyhow::Result<()> {
        let (mut at, end, mut element) = (part.at, part.at + part.count * size, part.start);
        while at < end {
            let piece = part.tile.piece(element, end - at);
            anyhow::ensure!(!piece.is_empty(), "the reference is shorter than the buffer");
            self.write(at, piece)?;
            at += piece.len() as u64;
            element += piece.len() as u64 / size;
        }
        Ok(())
    }

    /// Elements that are not what they must be.
    fn wrong(&self, part: &Part<'_>, size: u64) -> anyhow::Result<u64> {
        let mut got = vec![0; CHUNK];
        let (mut at, end, mut element, mut wrong) = (part.at, part.at + part.count * size, part.start, 0);
        while at < end {
            let piece = part.tile.piece(element, (end - at).min(CHUNK as u64));
            anyhow::ensure!(!piece.is_empty(), "the reference is shorter than the buffer");
            let got = &mut got[..piece.len()];
            self.read(at, got)?;
            wrong += wrong_elements(got, piece, size as usize);
            at += piece.len() as u64;
            element += piece.len() as u64 / size;
        }
        Ok(wrong)
    }

    /// Bytes of a range that are not `byte`.
    fn touched(&self, at: u64, len: u64, byte: u8) -> anyhow::Result<u64> {
        let mut got = vec![0; CHUNK];
        let (mut done, mut touched) = (0, 0);
        while done < len {
            let n = (len - done).min(CHUNK as u64);
            let got = &mut got[..n as usize];
            self.read(at + done, got)?;
            touched += got.iter().filter(|b| **b != byte).count() as u64;
            done += n;
        }
        Ok(touched)
    }
}

/// `count` elements at byte `at` that are elements `start..` of a tile.
struct Part<'a> {
    at: u64,
    count: u64,
    tile: &'a Tile,
    start: u64,
}

impl RankBuffers {
    /// Two buffers for cases of up to `bytes`.
    ///
    /// # Errors
    /// There is not that much memory.
    pub fn new(comm: &Communicator, memory: BufferMemory, bytes: u64) -> anyhow::Result<RankBuffers> {
        let len = bytes.checked_add(RIM).with_context(|| format!("{bytes} bytes are more than memory can be"))?;
        Ok(RankBuffers { a: Mem::new(comm, memory, len)?, b: Mem::new(comm, memory, len)?, len })
    }

    /// Zeros both as far as a case of `bytes` reaches.
    ///
    /// # Errors
    /// The case is larger than the buffers.
    pub fn zero(&mut self, bytes: u64) -> anyhow::Result<()> {
        let len = (bytes + RIM).min(self.len);
        self.a.fill(0, len, 0)?;
        self.b.fill(0, len, 0)
    }
}

impl Case {
    /// The case of `bytes` in the larger of a rank's buffers, rounded down to whole elements per rank; at least one, unless
    /// `bytes` is 0.
    pub fn of_bytes(op: Op, dtype: DataType, redop: ReduceOp, bytes: u64, nranks: usize) -> Case {
        let blocks = if is_blocked(op) { nranks as u64 } else { 1 };
        let count = bytes / dtype.size() as u64 / blocks;
        let count = match op {
            Op::Barrier => 0,
            _ if bytes > 0 => count.max(1),
            _ => 0,
        };
        Case { op, dtype, redop, count, root: 0, in_place: false, seed: 0 }
    }

    /// Bytes of the larger of one rank's buffers.
    pub fn bytes(&self, nranks: usize) -> u64 {
        let blocks = if is_blocked(self.op) { nranks as u64 } else { 1 };
        self.count.saturating_mul(blocks).saturating_mul(self.dtype.size() as u64)
    }

    fn block(&self) -> u64 {
        self.count * self.dtype.size() as u64
    }

    /// Elements that rank p sends to rank q in all_to_all_v: every row and every column is a turned `uneven`.
    fn sent(&self, p: usize, q: usize, n: usize) -> u64 {
        uneven(self.count, n)[(p + q) % n]
    }

    /// Whom send_recv sends to and receives from: a circle.
    pub fn peers(&self, rank: usize, n: usize) -> Peers {
        Peers { dst: Some((rank + 1) % n), src: Some((rank + n - 1) % n) }
    }

    /// Elements of `rank`'s input and output; 0 where it has none.
    fn elements(&self, rank: usize, n: usize) -> (u64, u64) {
        let mine = uneven(self.count, n)[rank];
        let (block, all) = (self.count, self.count * n as u64);
        let root = |yes| if rank == self.root { yes } else { 0 };
        match self.op {
            Op::AllReduce | Op::SendRecv => (block, block),
            Op::AllGather => (block, all),
            Op::ReduceScatter => (all, block),
            Op::AllToAll | Op::Group | Op::AllToAllV => (all, all),
            Op::AllGatherV => (mine, all),
            Op::ReduceScatterV => (all, mine),
            Op::Gather => (block, root(all)),
            Op::Scatter => (root(all), block),
            // The last sends to nobody and the first receives from nobody.
            Op::Permute => (if rank + 1 < n { block } else { 0 }, if rank > 0 { block } else { 0 }),
            Op::Broadcast => (root(block), block),
            Op::Reduce => (block, root(block)),
            Op::Barrier => (0, 0),
        }
    }

    /// First byte of input and output in the buffer that holds both.
    fn places(&self, rank: usize, n: usize) -> (u64, u64) {
        let mine = rank as u64 * self.block();
        let before = uneven(self.count, n)[..rank].iter().sum::<u64>() * self.dtype.size() as u64;
        match self.op {
            Op::AllGather => (mine, 0),
            Op::ReduceScatter => (0, mine),
            Op::Gather if rank == self.root => (mine, 0),
            Op::Scatter if rank == self.root => (0, mine),
            Op::AllGatherV => (before, 0),
            Op::ReduceScatterV => (0, before),
            _ => (0, 0),
        }
    }

    /// Calls the collective. Allocates nothing, but for a group.
    ///
    /// # Errors
    /// The runtime's.
    pub fn issue(&self, comm: &mut Communicator, buffers: &mut RankBuffers) -> Result<(), wccl::Error> {
        let (rank, n) = (comm.rank(), comm.nranks());
        let (count, dtype) = (self.count, self.dtype);
        if self.op == Op::Group {
            return self.issue_group(comm, buffers);
        }
        let counts = uneven(self.count, n);
        let counts = &counts[..n];
        let RankBuffers { a, b, .. } = buffers;
        let io = match (a, b) {
            (Mem::Hbm(a), _) if self.in_place => {
                let (i, o) = self.places(rank, n);
                Io::Device { src: (a, i), dst: (a, o) }
            }
            (Mem::Host(a, at), _) if self.in_place => Io::HostInPlace(&mut a[*at..]),
            (Mem::Hbm(a), Mem::Hbm(b)) => Io::device(a, b),
            (Mem::Host(a, i), Mem::Host(b, o)) => Io::Host { src: &a[*i..], dst: &mut b[*o..] },
            // Both are made by one constructor from one kind.
            _ => {
                return Err(wccl::Error::Bug("the two buffers of a case are of different memory".into()));
            }
        };
        match self.op {
            Op::AllReduce => comm.raw().all_reduce(io, count, dtype, self.redop),
            Op::AllGather => comm.raw().all_gather(io, count, dtype),
            Op::ReduceScatter => comm.raw().reduce_scatter(io, count, dtype, self.redop),
            Op::Broadcast => comm.raw().broadcast(io, count, dtype, self.root),
            Op::Reduce => comm.raw().reduce(io, count, dtype, self.redop, self.root),
            Op::AllToAll => comm.raw().all_to_all(io, count, dtype),
            Op::SendRecv => comm.raw().send_recv(io, count, dtype, self.peers(rank, n)),
            Op::Barrier => comm.barrier(),
            Op::AllGatherV => comm.raw().all_gather_v(io, counts, dtype),
            Op::ReduceScatterV => comm.raw().reduce_scatter_v(io, counts, dtype, self.redop),
            Op::AllToAllV => {
                // What goes to a rank and what comes from it are as long.
                let mut row = [0; MAX_LOCAL_RANKS];
                row.iter_mut().enumerate().take(n).for_each(|(q, c)| *c = self.sent(rank, q, n));
                comm.raw().all_to_all_v(io, &row[..n], &row[..n], dtype)
            }
            Op::Gather => comm.raw().gather(io, count, dtype, self.root),
            Op::Scatter => comm.raw().scatter(io, count, dtype, self.root),
            Op::Permute => {
                let pairs: [(usize, usize); MAX_LOCAL_RANKS] = std::array::from_fn(|r| (r, r + 1));
                comm.raw().permute(io, count, dtype, &pairs[..n - 1])
            }
            Op::Group => Ok(()),
        }
    }

    /// A block to every rank and one from every rank.
    fn issue_group(&self, comm: &mut Communicator, buffers: &mut RankBuffers) -> Result<(), wccl::Error> {
        let n = comm.nranks();
        let (Mem::Hbm(a), Mem::Hbm(b)) = (&buffers.a, &buffers.b) else {
            return Err(wccl::Error::Usage("a group moves tensors in device memory only".into()));
        };
        let mut group = comm.group();
        for r in 0..n {
            let at = r as u64 * self.block();
            group.send(a, at, self.count, self.dtype, r)?.recv(b, at, self.count, self.dtype, r)?;
        }
        group.run()
    }

    /// Fills the input, calls once, and counts the elements of this rank that are wrong: in the output, in an input that
    /// had to stay as it was, and bytes touched behind the output or where a rank has none.
    ///
    /// # Errors
    /// The runtime's.
    pub fn check(&self, comm: &mut Communicator, buffers: &mut RankBuffers) -> anyhow::Result<u64> {
        let (rank, n) = (comm.rank(), comm.nranks());
        let size = self.dtype.size() as u64;
        let redop = self.op.facts().reduces.then_some(self.redop);
        let pattern = Pattern { dtype: self.dtype, redop, nranks: n, seed: self.seed };
        let (ins, outs) = self.elements(rank, n);
        let (in_at, out_at) = if self.in_place { self.places(rank, n) } else { (0, 0) };
        let whole = self.bytes(n);
        let input = pattern.input(rank, ins);
        let input = Part { at: in_at, count: ins, tile: &input, start: 0 };

        buffers.a.fill(0, whole + RIM, UNTOUCHED)?;
        if !self.in_place {
            buffers.b.fill(0, whole + RIM, UNTOUCHED)?;
        }
        buffers.a.put(&input, size)?;
        self.issue(comm, buffers)?;

        let tiles = self.expected(&pattern, rank, n);
        let out = if self.in_place { &buffers.a } else { &buffers.b };
        let mut wrong = 0;
        let mut at = out_at;
        for (tile, start, count) in &tiles {
            wrong += out.wrong(&Part { at, count: *count, tile, start: *start }, size)?;
            at += count * size;
        }
        if !self.in_place {
            wrong += buffers.a.wrong(&input, size)?;
            // Nothing behind the output, which is all of the buffer on a rank without one.
            let end = outs * size;
            wrong += buffers.b.touched(end, whole + RIM - end, UNTOUCHED)?.div_ceil(size);
        } else {
            wrong += buffers.a.touched(whole, RIM, UNTOUCHED)?.div_ceil(size);
        }
        Ok(wrong)
    }

    /// What `rank` must receive: blocks one after the other, each from an element of a tile on, and their elements.
    fn expected(&self, p: &Pattern, rank: usize, n: usize) -> Vec<(Tile, u64, u64)> {
        let (count, mine) = (self.count, rank as u64 * self.count);
        let counts = uneven(count, n);
        let before = counts[..rank].iter().sum::<u64>();
        match self.op {
            Op::AllReduce => vec![(p.reduction(count), 0, count)],
            Op::Reduce if rank == self.root => vec![(p.reduction(count), 0, count)],
            Op::Gather if rank != self.root => Vec::new(),
            Op::Reduce | Op::Barrier => Vec::new(),
            Op::Broadcast => vec![(p.input(self.root, count), 0, count)],
            Op::AllGather | Op::Gather => (0..n).map(|r| (p.input(r, count), 0, count)).collect(),
            Op::ReduceScatter => vec![(p.reduction(mine + count), mine, count)],
            Op::Scatter => vec![(p.input(self.root, mine + count), mine, count)],
            Op::AllToAll | Op::Group => (0..n).map(|r| (p.input(r, mine + count), mine, count)).collect(),
            Op::SendRecv => self.peers(rank, n).src.map(|r| (p.input(r, count), 0, count)).into_iter().collect(),
            Op::Permute if rank > 0 => vec![(p.input(rank - 1, count), 0, count)],
            Op::Permute => Vec::new(),
            Op::AllGatherV => (0..n).map(|r| (p.input(r, counts[r]), 0, counts[r])).collect(),
            Op::ReduceScatterV => vec![(p.reduction(before + counts[rank]), before, counts[rank])],
            Op::AllToAllV => {
                let from = |r: usize| {
                    let at = (0..rank).map(|q| self.sent(r, q, n)).sum::<u64>();
                    let count = self.sent(r, rank, n);
                    (p.input(r, at + count), at, count)
                };
                (0..n).map(from).collect()
            }
        }
    }

    /// The name of the reduction, or a dash.
    pub fn redop_name(&self) -> &'static str {
        if self.op.facts().reduces { self.redop.name() } else { "-" }
    }

    /// The root, or -1, as nccl-tests prints it.
    pub fn root_number(&self) -> i64 {
        if self.op.facts().has_root { self.root as i64 } else { -1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_as_users_write_them() {
        for (name, op) in [
            ("allreduce", Op::AllReduce),
            ("all_reduce", Op::AllReduce),
            ("All-Reduce", Op::AllReduce),
            ("allr", Op::AllReduce),
            ("all_reduce_perf", Op::AllReduce),
            ("allg", Op::AllGather),
            ("redsct", Op::ReduceScatter),
            ("reduce_scatter", Op::ReduceScatter),
            ("bcast", Op::Broadcast),
            ("reduce", Op::Reduce),
            ("all_to_all", Op::AllToAll),
            ("alltoall", Op::AllToAll),
            ("a2a", Op::AllToAll),
            ("sendrecv", Op::SendRecv),
            ("send_recv", Op::SendRecv),
        ] {
            assert_eq!(parse(name), Ok(op), "{name}");
        }
        for op in Op::ALL {
            assert_eq!(parse(op.name()), Ok(op));
        }
        for name in ["", "all", "reduceall", "perf"] {
            assert!(parse(name).unwrap_err().contains("allreduce"), "{name}");
        }
    }

    #[test]
    fn bytes_are_rounded_down_to_whole_elements_per_rank() {
        let case = |op, bytes, n| {
            let c = Case::of_bytes(op, DataType::Fp32, ReduceOp::Sum, bytes, n);
            (c.count, c.bytes(n))
        };
        assert_eq!(case(Op::AllReduce, 1023, 4), (255, 1020));
        assert_eq!(case(Op::AllGather, 1024, 3), (85, 1020));
        assert_eq!(case(Op::ReduceScatter, 8, 4), (1, 16));
        assert_eq!(case(Op::AllToAll, 64, 4), (4, 64));
        assert_eq!(case(Op::SendRecv, 1, 4), (1, 4));
        assert_eq!(case(Op::AllGather, 0, 4), (0, 0));
        assert_eq!(case(Op::Barrier, 64, 4), (0, 0));
    }

    #[test]
    fn bandwidths_follow_nccl_tests() {
        // 1 GB in one second.
        let bw = |op, n| bandwidth(op, 1_000_000_000, n, 1e6);
        assert_eq!(bw(Op::AllReduce, 4), (1.0, 1.5));
        assert_eq!(bw(Op::AllGather, 4), (1.0, 0.75));
        assert_eq!(bw(Op::Broadcast, 4), (1.0, 1.0));
        assert_eq!(bw(Op::Barrier, 4), (1.0, 0.0));
        assert_eq!(bw(Op::AllReduce, 1), (1.0, 0.0));
        assert_eq!(bandwidth(Op::AllReduce, 8, 2, 0.0), (0.0, 0.0));
    }
}
