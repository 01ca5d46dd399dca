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
//! | halving | recursive halving and doubling: log2(n) partners | 2 log2(n) |
//! | tree | binomial tree, in pieces that follow one another | log2(n) + pieces |
//! | two-level | inside groups of about √n ranks, across them, inside again | 4 |
//! | direct | the kernel copies from the peers' private memory; only moves, and only where it lets all ranks | 2 |
//!
//! Reductions take their sources in rank order (the ring: in ring order), so all ranks get the same bits. Averages of floats
//! are taken only where one rank has all sources of an element at once (one-hop, mesh, staged), and are finite where the
//! sources are.
//!
//! | room | owns |
//! |---|---|
//! | [`check`], `proofs` | whether a schedule does what it is for, in every order of events |
//! | [`table`] | the choice among algorithms by size, measured |
//! | `one_hop`, `ring`, `halving`, `tree`, `two_level`, `device`, `private`, `moves` | the algorithms |
//! | `explain` | a schedule in words |

#![forbid(unsafe_code)]

pub mod check;
mod device;
mod explain;
mod halving;
mod moves;
mod one_hop;
mod private;
mod ring;
pub mod table;
mod tree;
mod two_level;

pub use explain::explain;
pub use moves::Move;
pub use private::max_private_bytes;

use hw_bridge::call::{DataType, FLAG_IN_PLACE, FLAG_PRIVATE, Op, OpHeader, ReduceOp};
use hw_bridge::exec::sequencer::{At, BadSchedule, Place, Schedule, Sealed, Step};
use hw_bridge::limits::{INLINE_BYTES, LARGE_SLOT_BYTES};

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
    /// Recursive halving and doubling.
    Halving = 5,
    /// Binomial trees, in pieces.
    Tree = 6,
    /// Inside groups, across them, inside again.
    TwoLevel = 7,
    /// Straight from the peers' private memory, by the kernel.
    Direct = 8,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Algorithm; 8] = [
        Algorithm::OneHop,
        Algorithm::Mesh,
        Algorithm::Ring,
        Algorithm::Staged,
        Algorithm::Halving,
        Algorithm::Tree,
        Algorithm::TwoLevel,
        Algorithm::Direct,
    ];

    /// The name on the command line and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::OneHop => "one-hop",
            Algorithm::Mesh => "mesh",
            Algorithm::Ring => "ring",
            Algorithm::Staged => "staged",
            Algorithm::Halving => "halving",
            Algorithm::Tree => "tree",
            Algorithm::TwoLevel => "two-level",
            Algorithm::Direct => "direct",
        }
    }
}

impl std::str::FromStr for Algorithm {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        Algorithm::ALL.into_iter().find(|a| a.name() == s).ok_or_else(|| {
            let known: Vec<&str> = Algorithm::ALL.iter().map(|a| a.name()).collect();
            format!("unknown algorithm `{s}`; known are {}", known.join(", "))
        })
    }
}

/// What belongs to a call and is too long for it; all ranks must pass the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lists<'a> {
    /// Nothing.
    None,
    /// Elements of each rank's block: its input in all_gather_v, its output in reduce_scatter_v.
    Counts(&'a [u64]),
    /// all_to_all_v: n rows of n; row p has the elements that rank p sends to each rank.
    Matrix(&'a [u64]),
    /// permute: who sends to whom.
    Pairs(&'a [(usize, usize)]),
    /// group: the moves, by offsets in the ranks' whole device memory.
    Moves(&'a [Move]),
}

impl Lists<'_> {
    /// Appends the numbers as bytes, eight each.
    pub fn bytes(&self, out: &mut Vec<u8>) {
        let mut push = |x: u64| out.extend_from_slice(&x.to_le_bytes());
        match self {
            Lists::None => {}
            Lists::Counts(x) | Lists::Matrix(x) => x.iter().copied().for_each(push),
            Lists::Pairs(x) => x.iter().flat_map(|(a, b)| [*a as u64, *b as u64]).for_each(push),
            Lists::Moves(x) => {
                for m in *x {
                    [m.src as u64, m.src_at, m.dst as u64, m.dst_at, m.bytes].into_iter().for_each(&mut push);
                }
            }
        }
    }

    /// FNV-1a over the numbers, never 0; 0 for no list.
    pub fn digest(&self) -> u64 {
        let fold =
            |d: u64, x: u64| x.to_le_bytes().iter().fold(d, |d, b| (d ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
        let seed = 0xcbf2_9ce4_8422_2325;
        let all = |words: &mut dyn Iterator<Item = u64>| words.fold(seed, fold).max(1);
        match self {
            Lists::None => 0,
            Lists::Counts(x) | Lists::Matrix(x) => all(&mut x.iter().copied()),
            Lists::Pairs(x) => all(&mut x.iter().flat_map(|(a, b)| [*a as u64, *b as u64])),
            Lists::Moves(x) => {
                all(&mut x.iter().flat_map(|m| [m.src as u64, m.src_at, m.dst as u64, m.dst_at, m.bytes]))
            }
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
    /// one rank's output (reduce_scatter), of one block (all_to_all, gather, scatter, permute), of all blocks of the call
    /// (the forms with lists).
    pub count: u64,
    /// Root of broadcast, reduce, gather and scatter.
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

    /// Bytes a rank's arrival record would have to carry for one-hop; `None` if that is not how it goes.
    fn slot_bytes_with(&self, lists: Lists<'_>, n: usize) -> Option<u64> {
        let b = self.bytes()?;
        let size = self.dtype.size() as u64;
        let most = |all: &mut dyn Iterator<Item = u64>| all.max().unwrap_or(0).checked_mul(size);
        match (self.op, lists) {
            (Op::ReduceScatter | Op::AllToAll | Op::Scatter, _) => b.checked_mul(n as u64),
            (Op::AllGatherV, Lists::Counts(counts)) => most(&mut counts.iter().copied()),
            (Op::AllToAllV, Lists::Matrix(matrix)) => most(&mut matrix.chunks(n).map(|row| row.iter().sum())),
            // The inputs are all of the device memory.
            (Op::Group, _) => (b == 0).then_some(0),
            _ => Some(b),
        }
    }
}

/// Largest contribution of a rank, in bytes, that goes in one hop if the user sets no limit. `few` are one or two ranks. Only a
/// function of what all ranks know.
///
/// Measured on two cores. Where peers reach one another's memory, what the second meeting of the mesh costs is soon less than
/// what slots cost, in each of which data comes over from another core's cache; private memory is copied twice either way. In
/// one-way collectives nobody waits for all, which counts most where ranks share cores.
fn one_hop_limit(op: Op, private: bool, few: bool) -> u64 {
    const KIB: u64 = 1024;
    match (private, op) {
        (true, Op::Reduce | Op::Permute) if !few => 64 * KIB,
        (true, Op::Broadcast | Op::Reduce | Op::SendRecv | Op::Gather | Op::Scatter | Op::Permute) => 256 * KIB,
        (true, Op::ReduceScatter | Op::ReduceScatterV | Op::AllToAll | Op::AllToAllV) if few => 128 * KIB,
        (true, Op::ReduceScatter | Op::ReduceScatterV | Op::AllToAll | Op::AllToAllV) => 64 * KIB,
        (true, _) => 8 * KIB,
        (false, Op::Broadcast) if few => 2 * KIB,
        (false, _) if few => 256,
        (false, Op::Broadcast | Op::SendRecv | Op::Scatter) => 64 * KIB,
        (false, Op::Reduce | Op::Gather | Op::Permute) => 16 * KIB,
        (false, _) => 2 * KIB,
    }
}

/// Whether a collective only moves bytes, between memories that have ends: what can be read where it lies.
fn only_moves(op: Op) -> bool {
    !matches!(op, Op::AllReduce | Op::ReduceScatter | Op::ReduceScatterV | Op::Reduce | Op::Barrier | Op::Group)
}

/// Largest contribution of a rank, in bytes, that goes otherwise although all ranks can read one another's private memory; `None`
/// for what never goes directly by itself.
///
/// Measured on two cores: a read costs a system call and the look-up of each page, so by the byte it is slower than a copy, of
/// which staging makes two. Where one rank reads all (gather), or ranks share cores and all read the same, two copies that
/// others share are less.
fn direct_above(op: Op, few: bool) -> Option<u64> {
    const KIB: u64 = 1024;
    match op {
        Op::Broadcast if few => Some(64 * KIB),
        Op::AllGather | Op::AllGatherV | Op::AllToAll | Op::AllToAllV | Op::SendRecv | Op::Scatter if few => {
            Some(16 * KIB)
        }
        Op::AllToAll | Op::AllToAllV | Op::Scatter => Some(128 * KIB),
        Op::SendRecv => Some(256 * KIB),
        _ => None,
    }
}

/// Bytes of one rank's buffers in one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Of its input.
    pub input: u64,
    /// Of its output.
    pub output: u64,
    /// In the in-place form: where the smaller one begins in the larger one.
    pub at: u64,
}

/// Sizes of the buffers of `rank` of `n`. Sizes that overflow become 2^64 - 1, which no buffer has.
pub fn sizes(call: &Call, lists: Lists<'_>, rank: usize, n: usize) -> Sizes {
    let size = call.dtype.size() as u64;
    let block = call.bytes().unwrap_or(u64::MAX);
    let all = block.saturating_mul(n as u64);
    let only = |yes: bool, bytes: u64| if yes { bytes } else { 0 };
    let root = rank == call.root;
    let (input, output, at) = match (call.op, lists) {
        (Op::AllReduce, _) => (block, block, 0),
        (Op::AllGather, _) => (block, all, (rank as u64).saturating_mul(block)),
        (Op::ReduceScatter, _) => (all, block, (rank as u64).saturating_mul(block)),
        (Op::AllToAll, _) => (all, all, 0),
        (Op::Broadcast, _) => (only(root, block), block, 0),
        (Op::Reduce, _) => (block, only(root, block), 0),
        (Op::SendRecv, _) => (only(call.dst.is_some(), block), only(call.src.is_some(), block), 0),
        (Op::Gather, _) => (block, only(root, all), (rank as u64).saturating_mul(block)),
        (Op::Scatter, _) => (only(root, all), block, (rank as u64).saturating_mul(block)),
        (Op::AllGatherV | Op::ReduceScatterV, Lists::Counts(counts)) => {
            let bytes = |counts: &[u64]| counts.iter().fold(0u64, |sum, c| sum.saturating_add(*c)).saturating_mul(size);
            let (mine, all, at) = (bytes(&counts[rank..=rank]), bytes(counts), bytes(&counts[..rank]));
            if call.op == Op::AllGatherV { (mine, all, at) } else { (all, mine, at) }
        }
        (Op::AllToAllV, Lists::Matrix(m)) => {
            let sum =
                |of: &mut dyn Iterator<Item = &u64>| of.fold(0u64, |s, c| s.saturating_add(*c)).saturating_mul(size);
            (sum(&mut m[rank * n..(rank + 1) * n].iter()), sum(&mut m.iter().skip(rank).step_by(n)), 0)
        }
        (Op::Permute, Lists::Pairs(pairs)) => {
            let (sends, gets) = (pairs.iter().any(|p| p.0 == rank), pairs.iter().any(|p| p.1 == rank));
            (only(sends, block), only(gets, block), 0)
        }
        (Op::Group, Lists::Moves(moves)) => {
            let end = |of: &mut dyn Iterator<Item = u64>| of.max().unwrap_or(0);
            (
                end(&mut moves.iter().filter(|m| m.src == rank).map(|m| m.src_at.saturating_add(m.bytes))),
                end(&mut moves.iter().filter(|m| m.dst == rank).map(|m| m.dst_at.saturating_add(m.bytes))),
                0,
            )
        }
        _ => (0, 0, 0),
    };
    Sizes { input, output, at }
}

/// Whether there is a schedule for this call by this algorithm; what needs more than the call to tell (the lists) is looked
/// at by [`choose_with`].
pub fn serves(algorithm: Algorithm, call: &Call, n: usize) -> bool {
    let device = !call.private;
    let moves_nothing = call.op == Op::Barrier || call.count == 0;
    match algorithm {
        Algorithm::OneHop => {
            moves_nothing || call.slot_bytes_with(Lists::None, n).is_some_and(|b| b <= LARGE_SLOT_BYTES as u64)
        }
        _ if moves_nothing => false,
        Algorithm::Mesh => device,
        Algorithm::Staged => call.private,
        // In place, both ranks of a pair would have to read before either writes.
        Algorithm::Direct => call.private && only_moves(call.op) && !(call.op == Op::AllToAll && call.in_place),
        // From here on partial sums travel, in the element type. One that is too large for it would be lost, though the average
        // of all is not too large.
        _ if call.op.facts().reduces && call.redop == ReduceOp::Avg && call.dtype.is_float() => false,
        Algorithm::Ring => device && ring::serves(call.op),
        // Partial sums of these lie where inputs lie elsewhere: they would be scaled again.
        _ if call.op.facts().reduces && call.redop == ReduceOp::PreMulSum => false,
        Algorithm::Halving => device && halving::serves(call.op),
        Algorithm::Tree => device && tree::serves(call),
        Algorithm::TwoLevel => device && two_level::serves(call.op, n),
    }
}

/// Which algorithm, if the user forces none. `one_hop_max` is the largest contribution of a rank, in bytes, that goes in one
/// hop, if the user sets one. `direct` is whether all ranks can read one another's private memory. A forced algorithm is taken
/// where it serves.
pub fn choose(call: &Call, n: usize, forced: Option<Algorithm>, one_hop_max: Option<u64>, direct: bool) -> Algorithm {
    choose_with(call, Lists::None, n, forced, one_hop_max, direct)
}

/// As [`choose`], for a call with lists.
pub fn choose_with(
    call: &Call,
    lists: Lists<'_>,
    n: usize,
    forced: Option<Algorithm>,
    one_hop_max: Option<u64>,
    direct: bool,
) -> Algorithm {
    if call.op == Op::Barrier || call.count == 0 {
        return Algorithm::OneHop;
    }
    let slot = call.slot_bytes_with(lists, n);
    let fits = |most: u64| slot.is_some_and(|b| b <= most.min(LARGE_SLOT_BYTES as u64));
    let few = n <= 2;
    let direct = direct && serves(Algorithm::Direct, call, n);
    let above = direct_above(call.op, few).filter(|_| direct);
    let small = || one_hop_limit(call.op, call.private, few).min(above.unwrap_or(u64::MAX));
    match forced {
        Some(Algorithm::OneHop) if fits(u64::MAX) => Algorithm::OneHop,
        Some(Algorithm::Direct) if direct => Algorithm::Direct,
        Some(a) if !matches!(a, Algorithm::OneHop | Algorithm::Direct) && serves(a, call, n) => a,
        _ if fits(one_hop_max.unwrap_or_else(small)) => Algorithm::OneHop,
        _ if above.is_some_and(|above| slot.is_none_or(|b| b > above)) => Algorithm::Direct,
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

/// How many of the library's rings an algorithm uses; 0 if it does not go along rings.
pub fn rings_used(algorithm: Algorithm, rings: &[Vec<usize>]) -> usize {
    if algorithm == Algorithm::Ring { rings.len().clamp(1, ring::MAX_RINGS) } else { 0 }
}

/// Compiles `call` for `rank` of `n`. `rings` are the library's rings, each every rank once, in ring order.
///
/// # Errors
/// [`BadSchedule`]: an error of ours.
pub fn compile(
    call: &Call,
    rank: usize,
    n: usize,
    algorithm: Algorithm,
    rings: &[Vec<usize>],
) -> Result<Sealed, BadSchedule> {
    compile_with(call, Lists::None, rank, n, algorithm, rings)
}

/// As [`compile`], for a call with lists. Lists must have been checked: right lengths, ranks below `n`, no overflow.
///
/// # Errors
/// [`BadSchedule`]: an error of ours.
pub fn compile_with(
    call: &Call,
    lists: Lists<'_>,
    rank: usize,
    n: usize,
    algorithm: Algorithm,
    rings: &[Vec<usize>],
) -> Result<Sealed, BadSchedule> {
    let mut b = Builder::new(call, lists, rank, n, algorithm);
    if moves::is_listed(call.op) {
        moves::build(&mut b, algorithm);
    } else if n == 1 {
        b.alone();
    } else {
        match algorithm {
            Algorithm::OneHop => one_hop::build(&mut b),
            Algorithm::Mesh => device::build(&mut b),
            Algorithm::Ring => ring::build(&mut b, rings),
            Algorithm::Staged => private::build(&mut b),
            Algorithm::Halving => halving::build(&mut b),
            Algorithm::Tree => tree::build(&mut b),
            Algorithm::TwoLevel => two_level::build(&mut b),
            // The mesh of those that only move: receivers pull, owners wait for their readers.
            Algorithm::Direct => {
                b.schedule.direct = true;
                device::build(&mut b);
            }
        }
    }
    b.schedule.seal(rank, n)
}

/// Compiles the exchange that comes before a call whose lists no rank has whole: each rank's input is `words` 64-bit
/// numbers, each gets all. Its header names `op` and `dtype`, so that a rank in another call is told what this one does.
///
/// # Errors
/// [`BadSchedule`] if the words do not fit beside an arrival record.
pub fn compile_exchange(op: Op, dtype: DataType, words: u64, rank: usize, n: usize) -> Result<Sealed, BadSchedule> {
    let of_bytes = Call {
        op: Op::AllGather,
        dtype: DataType::Uint64,
        redop: ReduceOp::Sum,
        count: words,
        root: 0,
        dst: None,
        src: None,
        private: true,
        in_place: false,
    };
    let mut b = Builder::new(&of_bytes, Lists::None, rank, n, Algorithm::OneHop);
    if n == 1 {
        b.alone();
    } else {
        one_hop::build(&mut b);
        // The mark of the exchange is in the words of the record, behind which the payload then lies.
        b.schedule.slot_len = b.schedule.slot_len.max(INLINE_BYTES as u64 + 1);
    }
    b.schedule.table = EXCHANGE;
    b.schedule.header = OpHeader { op, dtype, ..b.schedule.header };
    b.schedule.seal(rank, n)
}

/// What an exchange has for a table: no list has this digest but by accident.
const EXCHANGE: u64 = 0x6567_6e61_6863_7845;

/// The largest block of a call in private memory with lists: whether its pieces can be numbered.
pub fn fits_private(call: &Call, lists: Lists<'_>, n: usize) -> bool {
    if call.op == Op::ReduceScatterV {
        return private::fits_reduce_scatter_v(call, lists);
    }
    moves::fits_private(call, lists, n)
}

/// A schedule in the making. `size` is the element size; lengths are bytes.
struct Builder<'a> {
    call: &'a Call,
    lists: Lists<'a>,
    rank: usize,
    n: usize,
    size: u64,
    bytes: u64,
    schedule: Schedule,
}

impl<'a> Builder<'a> {
    fn new(call: &'a Call, lists: Lists<'a>, rank: usize, n: usize, algorithm: Algorithm) -> Self {
        // An overflow makes buffers of 2^64 bytes, which no caller has: the run is refused by size.
        let bytes = call.bytes().unwrap_or(u64::MAX);
        let Sizes { input: in_bytes, output: out_bytes, at } = sizes(call, lists, rank, n);
        let most = |of: fn(Sizes) -> u64| (0..n).map(|r| of(sizes(call, lists, r, n))).max().unwrap_or(0);
        let (peer_in_bytes, peer_out_bytes) = match call.op {
            Op::Broadcast | Op::SendRecv => (bytes, if call.op == Op::Broadcast { bytes } else { 0 }),
            Op::Reduce => (bytes, bytes),
            op if moves::is_listed(op) || op == Op::ReduceScatterV => (most(|s| s.input), 0),
            _ => (in_bytes, out_bytes),
        };
        let in_place = match call.op {
            _ if !call.in_place => None,
            Op::ReduceScatter | Op::ReduceScatterV | Op::Scatter => Some(-(at as i64)),
            _ => Some(at as i64),
        };
        // In place it is another schedule, but in one hop.
        let in_place_matters = call.op == Op::AllToAll && call.in_place && algorithm != Algorithm::OneHop;
        let header = OpHeader {
            op: call.op,
            dtype: call.dtype,
            redop: call.op.facts().reduces.then_some(call.redop),
            root: if call.op.facts().has_root { call.root as u16 } else { 0 },
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
            in_place,
            staged: false,
            direct: false,
            table: lists.digest(),
            steps: Vec::new(),
            sources: Vec::new(),
        };
        Builder { call, lists, rank, n, size: call.dtype.size() as u64, bytes, schedule }
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

    /// One rank: its own input is the result, scaled if it has a scale.
    fn alone(&mut self) {
        if self.call.op.facts().reduces && self.call.redop == ReduceOp::PreMulSum {
            return self.reduce(At(Place::Out, 0), [At(Place::In, 0)], self.call.count, ReduceOp::PreMulSum);
        }
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
