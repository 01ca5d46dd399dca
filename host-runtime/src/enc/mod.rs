//! The algorithm engine: compiles a collective into this rank's [`Schedule`].
//!
//! Statically inside the runtime, as in the original: no `enc_*` crosses the boundary (INV-19). A schedule is a pure
//! function of the call, the rank and the rings that the library planned; it is compiled once and cached. Every rank
//! makes the same choice from the same call, and the op header carries the choice, so a disagreement is an error
//! and not a hang.
//!
//! | algorithm | what it does | syncs |
//! |---|---|---|
//! | one-hop | every rank writes its input beside its arrival record, reads all, reduces by itself | 1 |
//! | mesh | every rank reads its part from all peers' device memory and puts results where they must end | 2 |
//! | ring | pulls from the ring's previous rank, on the library's rings; needs only ring neighbours | 2(n-1) |
//! | staged | private memory passes in pieces through the communicator's segments | 1 or 2 a piece |
//!
//! Reductions take their sources in rank order (the ring: in ring order), so all ranks get the same bits.

pub mod check;
mod device;
mod explain;
mod one_hop;
mod private;
mod ring;

pub use explain::explain;
pub use private::max_private_bytes;

use hw_bridge::dtype::{DataType, ReduceOp};
use hw_bridge::limits::SLOT_BYTES;
use hw_bridge::peers::{FLAG_IN_PLACE, FLAG_PRIVATE, Op, OpHeader};
use hw_bridge::sequencer::{At, BadSchedule, Place, Schedule, Sealed, Step};

/// How a collective is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Algorithm {
    /// Write, flag, read all, reduce.
    OneHop = 1,
    /// Direct access to all peers' device memory.
    Mesh = 2,
    /// Along the library's rings.
    Ring = 3,
    /// Through staging halves: private memory.
    Staged = 4,
}

impl Algorithm {
    /// The name on the command line and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::OneHop => "one-hop",
            Algorithm::Mesh => "mesh",
            Algorithm::Ring => "ring",
            Algorithm::Staged => "staged",
        }
    }
}

impl std::str::FromStr for Algorithm {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "one-hop" => Ok(Algorithm::OneHop),
            "mesh" => Ok(Algorithm::Mesh),
            "ring" => Ok(Algorithm::Ring),
            "staged" => Ok(Algorithm::Staged),
            _ => Err(format!("unknown algorithm `{s}`; known are one-hop, mesh, ring, staged")),
        }
    }
}

/// One collective call, as far as the schedule depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Call {
    /// The collective.
    pub op: Op,
    /// Element type.
    pub dtype: DataType,
    /// Reduction; ignored by collectives that only move.
    pub redop: ReduceOp,
    /// Elements: of the whole vector (all_reduce, broadcast, reduce, send_recv), of one rank's input (all_gather), of
    /// one rank's output (reduce_scatter), of one block (all_to_all).
    pub count: u64,
    /// Root of broadcast and reduce.
    pub root: usize,
    /// Whom send_recv sends to.
    pub dst: Option<usize>,
    /// Whom send_recv receives from.
    pub src: Option<usize>,
    /// Private memory.
    pub private: bool,
    /// Input and output are the same memory.
    pub in_place: bool,
}

impl Call {
    /// Bytes of `count` elements; `None` beyond 2^64.
    pub fn bytes(&self) -> Option<u64> {
        self.count.checked_mul(self.dtype.size() as u64)
    }

    fn reduces(&self) -> bool {
        matches!(self.op, Op::AllReduce | Op::ReduceScatter | Op::Reduce)
    }

    /// Bytes a rank's arrival record would have to carry for one-hop.
    fn slot_bytes(&self, n: usize) -> Option<u64> {
        let b = self.bytes()?;
        match self.op {
            Op::ReduceScatter | Op::AllToAll => b.checked_mul(n as u64),
            _ => Some(b),
        }
    }
}

/// Which algorithm, if the user forces none. `one_hop_max` is the largest message (bytes of a rank's contribution)
/// that goes in one hop.
pub fn choose(call: &Call, n: usize, forced: Option<Algorithm>, one_hop_max: u64) -> Algorithm {
    let small = call.slot_bytes(n).is_some_and(|b| b <= one_hop_max.min(SLOT_BYTES as u64));
    if call.op == Op::Barrier || call.count == 0 {
        return Algorithm::OneHop;
    }
    match forced {
        Some(Algorithm::OneHop) if call.slot_bytes(n).is_some_and(|b| b <= SLOT_BYTES as u64) => Algorithm::OneHop,
        Some(Algorithm::Ring) if ring::serves(call.op) && !call.private => Algorithm::Ring,
        Some(Algorithm::Mesh) if !call.private => Algorithm::Mesh,
        Some(Algorithm::Staged) if call.private => Algorithm::Staged,
        _ if small => Algorithm::OneHop,
        _ if call.private => Algorithm::Staged,
        _ => Algorithm::Mesh,
    }
}

/// Ranks whose memory the schedule touches or waits for, other than `rank` itself.
pub fn needs(schedule: &Schedule) -> impl Iterator<Item = usize> + '_ {
    schedule.steps.iter().filter_map(|s| match s {
        Step::Arrival(p) | Step::Wait { peer: p, .. } => Some(usize::from(*p)),
        _ => None,
    })
}

/// Compiles `call` for `rank` of `n`. `rings` are the library's rings, each every rank once, in ring order.
pub fn compile(
    call: &Call,
    rank: usize,
    n: usize,
    algorithm: Algorithm,
    rings: &[Vec<usize>],
) -> Result<Sealed, BadSchedule> {
    let mut b = Builder::new(call, rank, n, algorithm);
    if n == 1 {
        b.alone();
    } else {
        match algorithm {
            Algorithm::OneHop => one_hop::build(&mut b),
            Algorithm::Mesh => device::build(&mut b),
            Algorithm::Ring => ring::build(&mut b, rings),
            Algorithm::Staged => private::build(&mut b),
        }
    }
    b.schedule.seal(rank, n)
}

/// A schedule in the making. `size` is the element size; lengths are bytes.
struct Builder<'a> {
    call: &'a Call,
    rank: usize,
    n: usize,
    size: u64,
    bytes: u64,
    schedule: Schedule,
}

impl<'a> Builder<'a> {
    fn new(call: &'a Call, rank: usize, n: usize, algorithm: Algorithm) -> Self {
        // An overflow makes buffers of 2^64 bytes, which no caller has: the run is refused by size.
        let bytes = call.bytes().unwrap_or(u64::MAX);
        let all = bytes.saturating_mul(n as u64);
        let root = rank == call.root;
        let (in_bytes, out_bytes) = match call.op {
            Op::AllReduce => (bytes, bytes),
            Op::AllGather => (bytes, all),
            Op::ReduceScatter => (all, bytes),
            Op::AllToAll => (all, all),
            Op::Broadcast => (if root { bytes } else { 0 }, bytes),
            Op::Reduce => (bytes, if root { bytes } else { 0 }),
            Op::SendRecv => (if call.dst.is_some() { bytes } else { 0 }, if call.src.is_some() { bytes } else { 0 }),
            Op::Barrier => (0, 0),
        };
        let peer_in_bytes = if matches!(call.op, Op::Broadcast | Op::SendRecv) { bytes } else { in_bytes };
        let peer_out_bytes = match call.op {
            Op::Reduce => bytes,
            Op::SendRecv => 0,
            _ => out_bytes,
        };
        let in_place_matters = call.op == Op::AllToAll && call.in_place && algorithm == Algorithm::Mesh;
        let header = OpHeader {
            op: call.op,
            dtype: call.dtype,
            redop: call.reduces().then_some(call.redop),
            root: if matches!(call.op, Op::Broadcast | Op::Reduce) { call.root as u16 } else { 0 },
            algorithm: algorithm as u8,
            flags: if call.private { FLAG_PRIVATE } else { 0 } | if in_place_matters { FLAG_IN_PLACE } else { 0 },
            count: call.count,
        };
        let schedule = Schedule {
            header,
            payload: 0,
            slot_len: 0,
            in_bytes,
            out_bytes,
            peer_in_bytes,
            peer_out_bytes,
            staged: false,
            table: 0,
            steps: Vec::new(),
            sources: Vec::new(),
        };
        Builder { call, rank, n, size: call.dtype.size() as u64, bytes, schedule }
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        // Each rank starts behind itself, so that not all read the same peer first.
        let (rank, n) = (self.rank, self.n);
        (1..n).map(move |i| (rank + i) % n)
    }

    fn push(&mut self, step: Step) {
        self.schedule.steps.push(step);
    }

    fn arrivals(&mut self) {
        for p in self.others() {
            self.push(Step::Arrival(p as u16));
        }
    }

    fn wait_all(&mut self, step: u16) {
        for p in self.others() {
            self.push(Step::Wait { peer: p as u16, step });
        }
    }

    fn copy(&mut self, dst: At, src: At, len: u64) {
        if len > 0 {
            self.push(Step::Copy { dst, src, len });
        }
    }

    fn reduce(&mut self, dst: At, sources: impl IntoIterator<Item = At>, count: u64, op: ReduceOp) {
        if count == 0 {
            return;
        }
        let first = self.schedule.sources.len() as u32;
        self.schedule.sources.extend(sources);
        let n = self.schedule.sources.len() as u32 - first;
        self.push(Step::Reduce { dst, first, n, count, op });
    }

    /// One rank: its own input is the result.
    fn alone(&mut self) {
        let moves = match self.call.op {
            Op::Barrier => false,
            Op::SendRecv => self.call.dst.is_some() && self.call.src.is_some(),
            _ => true,
        };
        if moves && !self.call.in_place {
            self.copy(At(Place::Out, 0), At(Place::In, 0), self.bytes);
        }
    }

    /// Elements and first element of part `i` of `parts` of `count` elements: equal but for the first few.
    fn part(count: u64, parts: usize, i: usize) -> (u64, u64) {
        let (parts, i) = (parts as u64, i as u64);
        let (each, more) = (count / parts, count % parts);
        (each + u64::from(i < more), i * each + i.min(more))
    }
}

#[cfg(test)]
mod proofs;
#[cfg(test)]
mod tests;
