//! The control channel of a communicator inside a server: arrivals, op headers, deaths, aborts.
//!
//! Every rank owns one *control segment* and maps those of its peers. Only the owner writes its block and its lanes;
//! peers read them, and write nothing but its bells. The channel never passes through a plugin, so it works while a
//! plugin hangs.
//!
//! ```text
//! 0        ident | state + reason                            (one 4 KiB block)
//! 4 KiB    lane 0 | lane 1 | ... LANES                       (lane 0: blocking calls; the others: streams)
//!
//! lane     progress | bell | tally | flight records          (8 KiB, hot words on lines of their own)
//!          slot 0 | slot 1 | ... SLOTS                       (a 64-byte record, then the payload)
//!          stage in 0 | in 1 | result 0 | result 1           (STAGE_BYTES each, touched by private buffers only)
//!          large 0 | large 1 | ... LARGE_SLOTS               (payloads that are too large for the place beside a record)
//! ```
//!
//! A lane is a sequence of operations of its own: operations of different lanes run side by side and never wait for each
//! other. *progress* is `sequence << 16 | step`, only ever rises, and is the one word peers wait on. Step 1 is "arrived", and
//! [`STEP_DONE`] is "has read all it wanted of its peers". A *slot* is the arrival record of operation `sequence`, in
//! slot `sequence % SLOTS`; its tag is written last. A rank reuses a slot, or the place of a large payload, only after every
//! linked peer is done with the operation it held.
//!
//! What a peer writes is an allegation: headers are compared, offsets checked against the mapping, texts cleaned.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

use crate::credentials::PeerPid;
use crate::dtype::{DataType, ReduceOp};
use crate::flight::{self, Counters, Flight, Tally};
use crate::foreign::{Mark, Space};
use crate::limits::{INLINE_BYTES, LANES, LARGE_SLOT_BYTES, LARGE_SLOTS, REASON_BYTES, SLOT_BYTES, SLOTS, STAGE_BYTES};
use crate::links::Mapped;
use crate::segment::{Segment, SegmentError};
use crate::semaphore::{Bell, Fence, publish_fence};
use crate::shown::one_line;

const MAGIC: u64 = 0x316c_6363_776c_6377;
const BLOCK_BYTES: usize = 4096;
/// A record and the first line of its payload share a pair of lines, which processors fetch together.
const SLOT_STRIDE: usize = (SLOT_BYTES + 64).next_multiple_of(128);
/// In a lane: where the flight records, the slots, the staging halves and the large payloads begin.
const FLIGHT_AT: usize = 4096;
const SLOTS_AT: usize = FLIGHT_AT + flight::RING_BYTES;
const STAGE_AT: usize = (SLOTS_AT + SLOTS * SLOT_STRIDE).next_multiple_of(4096);
const LARGE_AT: usize = STAGE_AT + 4 * STAGE_BYTES;
const LANE_BYTES: usize = LARGE_AT + LARGE_SLOTS * LARGE_SLOT_BYTES;
/// Bytes of a control segment (address space; pages cost memory when touched).
pub const CONTROL_BYTES: usize = BLOCK_BYTES + LANES * LANE_BYTES;
/// Name of a control segment's memfd: how `wccl top` finds those of other processes.
pub const CONTROL_NAME: &str = "wccl-control";
/// The step of an operation that its rank has finished.
pub const STEP_DONE: u16 = 0xFFFF;
/// The step of an operation that its rank has announced.
pub const STEP_ARRIVED: u16 = 1;

/// "Nobody", where a record names whom a rank sends to and receives from.
pub const NO_RANK: u16 = u16::MAX;

/// What a record says beside the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Aside {
    /// Whom the rank sends to, [`NO_RANK`] for nobody.
    pub dst: u16,
    /// Whom it receives from.
    pub src: u16,
    /// Digest of the rings and of all headers before this one: it shows a difference in an operation in which the two
    /// ranks did not meet.
    pub digest: u32,
}

impl Aside {
    fn pack(self) -> u64 {
        u64::from(self.dst) | u64::from(self.src) << 16 | u64::from(self.digest) << 32
    }

    fn unpack(word: u64) -> Aside {
        Aside { dst: word as u16, src: (word >> 16) as u16, digest: (word >> 32) as u32 }
    }
}

/// Collective operations, as numbers in op headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// Every rank gets the reduction of all inputs.
    AllReduce = 1,
    /// Every rank gets the concatenation of all inputs.
    AllGather = 2,
    /// Rank r gets block r of the reduction.
    ReduceScatter = 3,
    /// Every rank gets the root's input.
    Broadcast = 4,
    /// The root gets the reduction.
    Reduce = 5,
    /// Rank r gets block r of every rank.
    AllToAll = 6,
    /// Every rank sends to one and receives from one.
    SendRecv = 7,
    /// Nothing moves; nobody leaves before all have come.
    Barrier = 8,
    /// All-gather of blocks of different sizes.
    AllGatherV = 9,
    /// Reduce-scatter of blocks of different sizes.
    ReduceScatterV = 10,
    /// All-to-all of blocks of different sizes.
    AllToAllV = 11,
    /// The root gets the concatenation of all inputs.
    Gather = 12,
    /// Rank r gets block r of the root's input.
    Scatter = 13,
    /// Some pairs: each rank sends to one at most and receives from one at most, and all know the pairs.
    Permute = 14,
    /// Sends and receives issued as one.
    Group = 15,
}

impl Op {
    /// All of them.
    pub const ALL: [Op; 15] = [
        Op::AllReduce,
        Op::AllGather,
        Op::ReduceScatter,
        Op::Broadcast,
        Op::Reduce,
        Op::AllToAll,
        Op::SendRecv,
        Op::Barrier,
        Op::AllGatherV,
        Op::ReduceScatterV,
        Op::AllToAllV,
        Op::Gather,
        Op::Scatter,
        Op::Permute,
        Op::Group,
    ];

    /// The name users know.
    pub fn name(self) -> &'static str {
        match self {
            Op::AllReduce => "all_reduce",
            Op::AllGather => "all_gather",
            Op::ReduceScatter => "reduce_scatter",
            Op::Broadcast => "broadcast",
            Op::Reduce => "reduce",
            Op::AllToAll => "all_to_all",
            Op::SendRecv => "send_recv",
            Op::Barrier => "barrier",
            Op::AllGatherV => "all_gather_v",
            Op::ReduceScatterV => "reduce_scatter_v",
            Op::AllToAllV => "all_to_all_v",
            Op::Gather => "gather",
            Op::Scatter => "scatter",
            Op::Permute => "permute",
            Op::Group => "group",
        }
    }

    fn from_u8(v: u8) -> Option<Op> {
        Op::ALL.into_iter().find(|o| *o as u8 == v)
    }
}

/// What a rank says it is about to do. Ranks whose headers differ are in different calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OpHeader {
    /// The collective.
    pub op: Op,
    /// Element type.
    pub dtype: DataType,
    /// Reduction, for those that reduce.
    pub redop: Option<ReduceOp>,
    /// Root, for those that have one, else 0.
    pub root: u16,
    /// Algorithm number; ranks that chose differently cannot work together.
    pub algorithm: u8,
    /// Whether buffers are private memory (staged) rather than device memory, and whether in place where it matters.
    pub flags: u8,
    /// Elements, as the caller counted them.
    pub count: u64,
}

impl OpHeader {
    /// `digest` with this header in it (FNV-1a over the packed words).
    pub(crate) fn digest(&self, digest: u32) -> u32 {
        let bytes = [self.pack().to_le_bytes(), self.count.to_le_bytes()];
        bytes.iter().flatten().fold(digest, |d, b| (d ^ u32::from(*b)).wrapping_mul(16_777_619))
    }

    pub(crate) fn pack(&self) -> u64 {
        let redop = self.redop.map_or(0xFF, |r| r as u8);
        u64::from(self.op as u8)
            | (self.dtype as u64 & 0xFF) << 8
            | u64::from(redop) << 16
            | u64::from(self.flags) << 24
            | u64::from(self.root) << 32
            | u64::from(self.algorithm) << 48
    }
}

/// A header in words, from the two packed ones of a peer.
pub(crate) fn describe(packed: u64, count: u64) -> String {
    let byte = |at: u32| (packed >> at) as u8;
    let op = Op::from_u8(byte(0)).map_or("unknown operation", Op::name);
    let mut s = op.to_string();
    if op == "barrier" {
        return s;
    }
    if let Some(d) = DataType::from_nrt(u32::from(byte(8))) {
        s += &format!(" {d}");
    }
    if let Some(r) = ReduceOp::ALL.into_iter().chain([ReduceOp::PreMulSum]).find(|r| *r as u8 == byte(16)) {
        s += &format!(" {r}");
    }
    s += &format!(" count {count}");
    if matches!(Op::from_u8(byte(0)), Some(Op::Broadcast | Op::Reduce | Op::Gather | Op::Scatter)) {
        s += &format!(" root {}", (packed >> 32) as u16);
    }
    let flags = byte(24);
    if flags & FLAG_PRIVATE != 0 {
        s += " private memory";
    }
    if flags & FLAG_IN_PLACE != 0 {
        s += " in place";
    }
    s + " by " + ALGORITHMS.get(usize::from(byte(48))).unwrap_or(&"an unknown algorithm")
}

/// Names of the numbers that [`OpHeader::algorithm`] holds; the algorithms themselves are the runtime's.
pub const ALGORITHMS: [&str; 9] =
    ["no algorithm", "one-hop", "mesh", "ring", "staged", "halving", "tree", "two-level", "direct"];

impl std::fmt::Display for OpHeader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&describe(self.pack(), self.count))
    }
}

/// Flag of [`OpHeader`]: the buffers are private memory of each process.
pub const FLAG_PRIVATE: u8 = 1;
/// Flag of [`OpHeader`]: input and output are the same memory, where that changes the schedule.
pub const FLAG_IN_PLACE: u8 = 2;

/// Life of a rank, as its peers see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum RankState {
    /// Takes part.
    Alive = 0,
    /// Freed its communicator.
    Closed = 1,
    /// Its user aborted the communicator.
    Aborted = 2,
    /// An operation failed there; the reason is beside.
    Failed = 3,
}

#[repr(C, align(128))]
struct Line<T>(T);

#[repr(C)]
struct Block {
    ident: Line<[AtomicU64; 16]>,
    state: Line<StateLine>,
    positions: Line<PositionsLine>,
}

/// Words of `Block::ident`.
mod ident {
    pub const MAGIC: usize = 0;
    /// Rank, and ranks << 32.
    pub const WHO: usize = 1;
    /// Whether the owner may skip the publisher's fence ([`crate::semaphore`]).
    pub const ASYMMETRIC: usize = 2;
    pub const PID: usize = 3;
    /// Number of the communicator: the same on all its ranks as far as their libraries number alike.
    pub const COMM: usize = 4;
    /// The clock and the counter of cycles at the same moment, for readers of flight records.
    pub const CLOCK_NS: usize = 5;
    pub const TICKS: usize = 6;
    pub const COMPONENT_CALLS: usize = 7;
    /// Bits of the lanes that have memory.
    pub const COMMITTED: usize = 8;
    /// Address of the owner's mark in its private memory, and the number there ([`crate::foreign`]).
    pub const MARK: [usize; 2] = [9, 10];
}

/// The first page of a lane.
#[repr(C)]
struct LaneHead {
    progress: Line<AtomicU64>,
    /// The last operation that the rank left with an error.
    left: Line<AtomicU64>,
    bell: Line<Bell>,
    tally: Line<Tally>,
}

/// Where the rank's lanes were when it last closed its gates.
#[repr(C)]
struct PositionsLine {
    /// Which closing; written last.
    id: AtomicU64,
    lanes: [AtomicU64; LANES],
    rings: AtomicU64,
}

#[repr(C)]
struct StateLine {
    state: AtomicU32,
    len: AtomicU32,
    reason: [AtomicU8; REASON_BYTES],
}

/// The 64-byte arrival record.
#[repr(C, align(64))]
struct Record {
    tag: AtomicU64,
    what: AtomicU64,
    count: AtomicU64,
    aside: AtomicU64,
    words: [AtomicU64; INLINE_BYTES / 8],
}

const _: () = assert!(size_of::<Record>() == 64 && size_of::<Block>() <= BLOCK_BYTES);
const _: () = assert!(size_of::<LaneHead>() <= FLIGHT_AT && LANE_BYTES % 4096 == 0 && SLOT_STRIDE % 128 == 0);

/// What a process says of itself when another makes a control segment for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// Its number.
    pub pid: u32,
    /// Whether it pays for fences ([`crate::semaphore::asymmetric`]).
    pub asymmetric: bool,
    /// Where its [`Mark`] is, and the number there.
    pub mark: [u64; 2],
}

/// Typed view of a control segment.
#[derive(Debug)]
pub struct Control {
    segment: Arc<Segment>,
    left: AtomicBool,
    /// The owner's process, where it is a linked peer's and the kernel gave a descriptor of it.
    owner: Option<OwnedFd>,
    /// What readers of this process's memory know it by; absent in a peer's.
    _mark: Option<Mark>,
}

/// One lane of a control segment.
#[derive(Debug, Clone, Copy)]
pub struct LaneView<'a> {
    base: *mut u8,
    life: std::marker::PhantomData<&'a Control>,
}

impl Control {
    /// Makes this rank's own.
    pub fn create(rank: u32, nranks: u32) -> Result<Control, SegmentError> {
        let (step, bytes) = ("reading random bytes", CONTROL_BYTES as u64);
        let mark = Mark::new().map_err(|source| SegmentError::System { step, bytes, source })?;
        let (pid, asymmetric) = (std::process::id(), crate::semaphore::asymmetric());
        let c = Control::create_for(rank, nranks, Owner { pid, asymmetric, mark: mark.words() })?;
        c.commit(0)?;
        Ok(Control { left: AtomicBool::new(false), _mark: Some(mark), ..c })
    }

    /// Makes that of another process, which takes it over by [`Control::adopt`]: only it says how the rank stands, and it has the
    /// memory of the lanes allocated, on its own account. The maker's is the first page.
    pub fn create_for(rank: u32, nranks: u32, owner: Owner) -> Result<Control, SegmentError> {
        let segment = Arc::new(Segment::create(CONTROL_NAME, CONTROL_BYTES as u64)?);
        let c = Control { segment, left: AtomicBool::new(true), owner: None, _mark: None };
        c.segment.commit(0, BLOCK_BYTES as u64)?;
        let word = |at: usize, v: u64| c.block().ident.0[at].store(v, Ordering::Relaxed);
        word(ident::WHO, u64::from(rank) | u64::from(nranks) << 32);
        word(ident::ASYMMETRIC, u64::from(owner.asymmetric));
        word(ident::PID, u64::from(owner.pid));
        ident::MARK.into_iter().zip(owner.mark).for_each(|(at, v)| word(at, v));
        let (ns, ticks) = flight::now();
        word(ident::CLOCK_NS, ns);
        word(ident::TICKS, ticks);
        c.block().ident.0[ident::MAGIC].store(MAGIC, Ordering::Release);
        Ok(c)
    }

    /// Takes over what a service made for rank `rank` of `nranks` in this process, known by `mark`.
    pub fn adopt(segment: Segment, rank: u32, nranks: u32, mark: Mark) -> Result<Control, SegmentError> {
        let c = Control::of_peer(segment, rank, nranks)?;
        if ident::MARK.map(|at| c.ident(at)) != mark.words() {
            return Err(SegmentError::Foreign("it was made for another process".into()));
        }
        c.commit(0)?;
        Ok(Control { left: AtomicBool::new(false), _mark: Some(mark), ..c })
    }

    /// Views a peer's, after checking that it is one and whose.
    pub fn of_peer(segment: Segment, rank: u32, nranks: u32) -> Result<Control, SegmentError> {
        let c = Control::of_anyone(segment)?;
        let (r, n) = c.who();
        if (r, n) != (rank, nranks) {
            return Err(SegmentError::Foreign(format!(
                "it belongs to rank {r} of {n}, expected rank {rank} of {nranks}"
            )));
        }
        Ok(c)
    }

    /// Views a control segment of whoever, after checking that it is one: for those who watch.
    pub fn of_anyone(segment: Segment) -> Result<Control, SegmentError> {
        if segment.len() != CONTROL_BYTES {
            return Err(SegmentError::Foreign(format!(
                "its control block has {} bytes, {CONTROL_BYTES} expected",
                segment.len()
            )));
        }
        let c = Control { segment: Arc::new(segment), left: AtomicBool::new(true), owner: None, _mark: None };
        let magic = c.block().ident.0[ident::MAGIC].load(Ordering::Acquire);
        if magic != MAGIC {
            return Err(SegmentError::Foreign(format!("its control block has magic {magic:#x}")));
        }
        Ok(c)
    }

    fn ident(&self, at: usize) -> u64 {
        self.block().ident.0[at].load(Ordering::Relaxed)
    }

    /// Rank and ranks.
    pub fn who(&self) -> (u32, u32) {
        let who = self.ident(ident::WHO);
        (who as u32, (who >> 32) as u32)
    }

    /// The owner's process.
    pub fn pid(&self) -> u32 {
        self.ident(ident::PID) as u32
    }

    /// Number of the communicator in its process.
    pub fn comm(&self) -> u64 {
        self.ident(ident::COMM)
    }

    /// Says which communicator of its process this is.
    pub fn set_comm(&self, id: u64) {
        self.block().ident.0[ident::COMM].store(id, Ordering::Relaxed);
    }

    /// Calls of components in the owner's runtime when the communicator last called one: flat while it only moves data.
    pub fn component_calls(&self) -> u64 {
        self.ident(ident::COMPONENT_CALLS)
    }

    /// Notes the number of component calls.
    pub fn set_component_calls(&self, calls: u64) {
        self.block().ident.0[ident::COMPONENT_CALLS].store(calls, Ordering::Relaxed);
    }

    /// A moment in nanoseconds of the monotonic clock and in ticks of flight records.
    pub fn epoch(&self) -> (u64, u64) {
        (self.ident(ident::CLOCK_NS), self.ident(ident::TICKS))
    }

    /// Whether the owner pays for the fence when it goes to sleep, so that publishers need none.
    pub(crate) fn asymmetric(&self) -> bool {
        self.ident(ident::ASYMMETRIC) == 1
    }

    /// The memory, to be granted to peers.
    pub fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    fn block(&self) -> &Block {
        // SAFETY: the segment is CONTROL_BYTES long (made or checked so), page-aligned, and consists of atomics only
        // where Block lies, for which any bytes are valid; it lives as long as `self`.
        unsafe { &*self.segment.base().cast::<Block>() }
    }

    /// One of the [`LANES`].
    #[inline]
    pub fn lane(&self, lane: usize) -> LaneView<'_> {
        debug_assert!(lane < LANES);
        let at = BLOCK_BYTES + (lane % LANES) * LANE_BYTES;
        LaneView { base: self.segment.base().wrapping_add(at), life: std::marker::PhantomData }
    }

    /// Allocates a lane's head and slots, so that its first operations take no page fault and memory that is not there is
    /// an error here.
    pub fn commit(&self, lane: usize) -> Result<(), SegmentError> {
        let at = if lane == 0 { 0 } else { BLOCK_BYTES + lane * LANE_BYTES };
        let end = BLOCK_BYTES + lane * LANE_BYTES + STAGE_AT;
        self.segment.commit(at as u64, (end - at) as u64)?;
        self.block().ident.0[ident::COMMITTED].fetch_or(1 << lane, Ordering::Release);
        Ok(())
    }

    /// Allocates a lane's staging pages, before its first private buffer.
    pub fn commit_stage(&self, lane: usize) -> Result<(), SegmentError> {
        self.segment.commit((BLOCK_BYTES + lane * LANE_BYTES + STAGE_AT) as u64, 4 * STAGE_BYTES as u64)
    }

    /// Allocates a lane's places for large payloads, before its first one.
    pub fn commit_large(&self, lane: usize) -> Result<(), SegmentError> {
        let at = BLOCK_BYTES + lane * LANE_BYTES + LARGE_AT;
        self.segment.commit(at as u64, (LARGE_SLOTS * LARGE_SLOT_BYTES) as u64)
    }

    /// Says where the rank's lanes are, under the number of a closing of the gates ([`crate::sequencer::Closed`]).
    /// `rings` is a digest of the rings that it would go by afterwards.
    pub(crate) fn set_positions(&self, id: u64, positions: &[u64; LANES], rings: u64) {
        let line = &self.block().positions.0;
        // Who reads in between must not take one closing's positions for another's.
        line.id.store(0, Ordering::Release);
        std::sync::atomic::fence(Ordering::SeqCst);
        line.lanes.iter().zip(positions).for_each(|(to, p)| to.store(*p, Ordering::Relaxed));
        line.rings.store(rings, Ordering::Relaxed);
        line.id.store(id, Ordering::Release);
    }

    /// Where the rank's lanes were when it closed its gates under this number, if it has, and its digest of rings.
    pub(crate) fn positions(&self, id: u64) -> Option<([u64; LANES], u64)> {
        let line = &self.block().positions.0;
        let is_it = || line.id.load(Ordering::Acquire) == id;
        let lanes = || std::array::from_fn(|l| line.lanes[l].load(Ordering::Acquire));
        let read = is_it().then(|| (lanes(), line.rings.load(Ordering::Acquire)));
        read.filter(|_| is_it())
    }

    /// State of the rank and, unless alive, its reason.
    pub fn state(&self) -> (RankState, String) {
        let s = &self.block().state.0;
        let state = match s.state.load(Ordering::Acquire) {
            0 => return (RankState::Alive, String::new()),
            1 => RankState::Closed,
            2 => RankState::Aborted,
            _ => RankState::Failed,
        };
        let len = (s.len.load(Ordering::Relaxed) as usize).min(REASON_BYTES);
        let bytes: Vec<u8> = s.reason[..len].iter().map(|b| b.load(Ordering::Relaxed)).collect();
        let text = one_line(&String::from_utf8_lossy(&bytes));
        (state, text)
    }

    /// The state in words: `alive`, `closed`, `aborted: REASON`, `failed: REASON`, or `process ended` for a rank that did not
    /// get to say more.
    pub fn standing(&self) -> String {
        match self.state() {
            (RankState::Alive, _) if self.owner_ended() => "process ended".into(),
            (RankState::Alive, _) => "alive".into(),
            (RankState::Closed, _) => "closed".into(),
            (RankState::Aborted, why) => format!("aborted: {why}"),
            (RankState::Failed, why) => format!("failed: {why}"),
        }
    }

    /// Whether the owner's process has ended; `false` where that cannot be known.
    fn owner_ended(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let Some(fd) = &self.owner else { return false };
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut fds, Some(&now)), Ok(1))
    }

    /// The lanes that have memory. To look at another would allocate it, and is fatal where there is none.
    fn committed(&self) -> impl Iterator<Item = usize> {
        let bits = self.block().ident.0[ident::COMMITTED].load(Ordering::Acquire);
        (0..LANES).filter(move |l| bits >> l & 1 == 1)
    }

    /// What the rank has counted, all lanes together.
    pub fn counters(&self) -> Counters {
        self.committed().fold(Counters::default(), |sum, l| sum + self.lane(l).tally().read())
    }

    /// The last operations of the rank with their lanes, each lane's oldest first.
    pub fn records(&self) -> Vec<(usize, flight::Record)> {
        let (epoch, now) = (self.epoch(), flight::now());
        let of = |lane: usize| self.lane(lane).flight().read(epoch, now).into_iter().map(move |r| (lane, r));
        self.committed().flat_map(of).collect()
    }

    /// Whether the rank takes part, without the reason.
    #[inline]
    pub fn alive(&self) -> bool {
        self.block().state.0.state.load(Ordering::Acquire) == RankState::Alive as u32
    }

    /// Leaves the group, once: the first state that is not alive stays.
    pub fn leave(&self, state: RankState, reason: &str) {
        // A forked child has the parent's segment; what it does is not what the rank does.
        if crate::fork::in_child() {
            return;
        }
        let s = &self.block().state.0;
        // One leaver writes the reason: an abort may meet a failing operation. The claim is this process's own.
        if self.left.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut len = reason.len().min(REASON_BYTES);
        while !reason.is_char_boundary(len) {
            len -= 1;
        }
        for (to, b) in s.reason.iter().zip(&reason.as_bytes()[..len]) {
            to.store(*b, Ordering::Relaxed);
        }
        s.len.store(len as u32, Ordering::Relaxed);
        s.state.store(state as u32, Ordering::Release);
    }
}

impl<'a> LaneView<'a> {
    #[inline]
    fn head(&self) -> &'a LaneHead {
        // SAFETY: a lane begins at a page of the segment and has LANE_BYTES there; LaneHead consists of atomics, for which
        // any bytes are valid; the segment lives as long as the Control that 'a borrows.
        unsafe { &*self.base.cast::<LaneHead>() }
    }

    #[inline]
    fn slot(&self, seq: u64) -> *mut u8 {
        self.base.wrapping_add(SLOTS_AT + (seq as usize % SLOTS) * SLOT_STRIDE)
    }

    #[inline]
    fn record(&self, seq: u64) -> &'a Record {
        // SAFETY: `slot` is a multiple of 64 and the record ends before STAGE_AT <= LANE_BYTES; atomics only; the life is
        // as for `head`.
        unsafe { &*self.slot(seq).cast::<Record>() }
    }

    /// Where the payload of operation `seq` lies: in the record's line if it fits, else behind it, else among the large ones.
    #[inline]
    pub(crate) fn payload(&self, seq: u64, len: usize) -> *mut u8 {
        debug_assert!(len <= LARGE_SLOT_BYTES);
        if len > SLOT_BYTES {
            return self.base.wrapping_add(LARGE_AT + (seq as usize % LARGE_SLOTS) * LARGE_SLOT_BYTES);
        }
        self.slot(seq).wrapping_add(if len <= INLINE_BYTES { 64 - INLINE_BYTES } else { 64 })
    }

    /// Staging area: `result` picks the pair, `half` the piece's parity.
    #[inline]
    pub(crate) fn stage(&self, result: bool, half: usize) -> *mut u8 {
        self.base.wrapping_add(STAGE_AT + (usize::from(result) * 2 + half % 2) * STAGE_BYTES)
    }

    /// `sequence << 16 | step` of the rank.
    #[inline]
    pub fn progress(&self) -> u64 {
        self.head().progress.0.load(Ordering::Acquire)
    }

    #[inline]
    pub(crate) fn set_progress(&self, seq: u64, step: u16) {
        self.head().progress.0.store(seq << 16 | u64::from(step), Ordering::Release);
    }

    pub(crate) fn set_left(&self, seq: u64) {
        self.head().left.0.store(seq, Ordering::Release);
    }

    /// The last operation that the rank left with an error: it touches nothing for it any more.
    pub(crate) fn left(&self) -> u64 {
        self.head().left.0.load(Ordering::Acquire)
    }

    /// The owner's bell.
    #[inline]
    pub fn bell(&self) -> &'a Bell {
        &self.head().bell.0
    }

    /// The owner's counters.
    #[inline]
    pub fn tally(&self) -> &'a Tally {
        &self.head().tally.0
    }

    /// The owner's flight records.
    #[inline]
    pub fn flight(&self) -> &'a Flight {
        // SAFETY: Flight is RING_BYTES of atomics from a page of the lane on; the life is as for `head`.
        unsafe { &*self.base.wrapping_add(FLIGHT_AT).cast::<Flight>() }
    }

    /// Publishes the arrival record of operation `seq`; the payload must be in place.
    #[inline]
    pub(crate) fn publish(&self, seq: u64, header: &OpHeader, aside: Aside, words: Option<[u64; 4]>) {
        let r = self.record(seq);
        // Who reads the record that was here, as `call` does at any time, must not take a part of this one for it.
        r.tag.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        r.what.store(header.pack(), Ordering::Relaxed);
        r.count.store(header.count, Ordering::Relaxed);
        r.aside.store(aside.pack(), Ordering::Relaxed);
        if let Some(words) = words {
            for (to, w) in r.words.iter().zip(words) {
                to.store(w, Ordering::Relaxed);
            }
        }
        r.tag.store(seq, Ordering::Release);
        self.set_progress(seq, STEP_ARRIVED);
    }

    /// Whether the record of `seq` is there.
    #[inline]
    pub(crate) fn arrived(&self, seq: u64) -> bool {
        self.record(seq).tag.load(Ordering::Acquire) == seq
    }

    /// The rank's call of operation `seq` in words, while its record is kept.
    #[cold]
    pub(crate) fn call(&self, seq: u64) -> Option<String> {
        // The first look makes the record of `seq`, or what was written over it, visible. If any of what is read then is of a
        // later record, this fence meets the one in `publish`, and the second look sees that record's 0 or what came after;
        // no number comes twice.
        if !self.arrived(seq) {
            return None;
        }
        let r = self.record(seq);
        let (what, count) = (r.what.load(Ordering::Relaxed), r.count.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (r.tag.load(Ordering::Relaxed) == seq).then(|| describe(what, count))
    }

    /// Compares the rank's header of `seq` with ours; `Err` is the other's view in words.
    #[inline]
    pub(crate) fn same_call(&self, seq: u64, header: &OpHeader) -> Result<(), String> {
        let r = self.record(seq);
        let (what, count) = (r.what.load(Ordering::Relaxed), r.count.load(Ordering::Relaxed));
        if what == header.pack() && count == header.count {
            return Ok(());
        }
        let mut theirs = describe(what, count);
        if (what ^ header.pack()) & !(0xFF << 48) == 0 && count == header.count {
            theirs += " (WCCL_ALGO, WCCL_ONE_HOP_MAX or WCCL_TUNE_FILE differ between them";
            theirs += if header.op == Op::AllToAll { ", or only one is in place)" } else { ")" };
        }
        Err(theirs)
    }

    /// The words of a record without inline payload: where the rank's buffers lie in its device memory (input, output), or
    /// address and bytes of an input in private memory that peers read;
    /// the digest of what the header cannot hold (counts of each rank, pairs), and the bits of its scale.
    #[inline]
    pub(crate) fn words(&self, seq: u64) -> [u64; 4] {
        let r = self.record(seq);
        [0, 1, 2, 3].map(|i| r.words[i].load(Ordering::Relaxed))
    }

    /// What the record of `seq` says beside its header.
    #[inline]
    pub(crate) fn aside(&self, seq: u64) -> Aside {
        Aside::unpack(self.record(seq).aside.load(Ordering::Relaxed))
    }

    /// What the rank did last, in words: for messages about ranks that are missing.
    pub fn last_seen(&self, seq: u64) -> String {
        let p = self.progress();
        let (at, step) = (p >> 16, p as u16);
        if at == 0 {
            return "it has not started any operation".into();
        }
        let what = self.call(at).unwrap_or_else(|| "whose record is gone".into());
        match step {
            STEP_DONE => format!("its last operation was #{at} ({what}), completed"),
            _ if at == seq => format!("it is in operation #{at} ({what}) at step {step}"),
            _ => format!("it is still in operation #{at} ({what}) at step {step}"),
        }
    }
}

/// A linked peer.
#[derive(Debug)]
pub struct Peer {
    /// Its rank.
    pub rank: usize,
    /// Its process.
    pub pid: PeerPid,
    pub(crate) control: Control,
    pub(crate) hbm: Segment,
    /// Its private memory.
    pub(crate) space: Space,
}

impl Peer {
    /// Takes over what a link gave; checks that it is rank `rank` of `nranks`.
    pub fn new(mapped: Mapped, rank: usize, nranks: usize) -> Result<Peer, SegmentError> {
        if mapped.rank as usize != rank {
            return Err(SegmentError::Foreign(format!("it belongs to rank {}, expected rank {rank}", mapped.rank)));
        }
        let mut control = Control::of_peer(mapped.control, rank as u32, nranks as u32)?;
        control.owner = mapped.pidfd;
        let space = Space::new(mapped.pid, ident::MARK.map(|at| control.ident(at)));
        Ok(Peer { rank, pid: mapped.pid, control, hbm: mapped.hbm, space })
    }

    /// The peer's control segment.
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// Whether its process has ended.
    pub fn dead(&self) -> bool {
        self.control.owner_ended()
    }
}

/// Whether a process is stopped (SIGSTOP, a debugger), as far as this namespace can see.
pub fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name, which is in parentheses and may hold anything.
    stat.rsplit_once(')').is_some_and(|(_, rest)| matches!(rest.trim_start().chars().next(), Some('T' | 't')))
}

/// Ends a communicator's operations from any thread, in any state, as often as one likes.
#[derive(Debug, Clone)]
pub struct Abort {
    flag: Arc<AtomicBool>,
    control: Arc<Control>,
}

impl Abort {
    pub(crate) fn new(control: Arc<Control>) -> Abort {
        Abort { flag: Arc::new(AtomicBool::new(false)), control }
    }

    /// Makes the operation under way, and every later one, end with an error here; peers learn of it within a nap.
    pub fn abort(&self, reason: &str) {
        // The reason first: whoever sees the flag reads it.
        self.control.leave(RankState::Aborted, reason);
        self.flag.store(true, Ordering::Release);
        publish_fence(Fence::Full);
        for lane in 0..LANES {
            self.control.lane(lane).bell().ring();
        }
    }

    /// Whether the communicator is gone and only this handle keeps its segment.
    pub fn is_last(&self) -> bool {
        Arc::strong_count(&self.control) == 1
    }

    /// Whether it happened.
    pub fn aborted(&self) -> bool {
        self.flag.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> OpHeader {
        OpHeader {
            op: Op::AllReduce,
            dtype: DataType::Fp32,
            redop: Some(ReduceOp::Sum),
            root: 0,
            algorithm: 2,
            flags: 0,
            count: 100,
        }
    }

    fn view(c: &Control, rank: u32, nranks: u32) -> Result<Control, SegmentError> {
        let fd = c.segment.fd().unwrap().try_clone_to_owned().unwrap();
        Control::of_peer(Segment::from_peer(fd, CONTROL_BYTES as u64)?, rank, nranks)
    }

    #[test]
    fn a_peer_sees_arrival_header_and_words() {
        let owner = Control::create(1, 2).unwrap();
        let viewer = view(&owner, 1, 2).unwrap();
        let (mine, seen) = (owner.lane(2), viewer.lane(2));
        assert!(!seen.arrived(1));
        let aside = Aside { dst: 3, src: NO_RANK, digest: 0xDEAD_BEEF };
        mine.publish(1, &header(), aside, Some([4096, 8192, 7, 9]));
        assert!(seen.arrived(1) && !seen.arrived(2));
        assert_eq!((seen.words(1), seen.aside(1)), ([4096, 8192, 7, 9], aside));
        assert_eq!(seen.same_call(1, &header()), Ok(()));
        let other = OpHeader { count: 200, ..header() };
        assert_eq!(seen.same_call(1, &other), Err("all_reduce fp32 sum count 100 by mesh".into()));
        assert_eq!(seen.progress(), 1 << 16 | 1);
        // Lanes have nothing to do with one another.
        assert!(!viewer.lane(1).arrived(1) && viewer.lane(1).progress() == 0);
    }

    /// A record that is written over meanwhile is gone, and not half of each.
    #[test]
    fn a_call_is_told_whole_or_not_at_all() {
        use std::sync::atomic::AtomicBool;
        let owner = Control::create(0, 2).unwrap();
        let (viewer, done) = (view(&owner, 0, 2).unwrap(), AtomicBool::new(false));
        let said = |seq: u64| {
            let (op, count) = if seq % 2 == 0 { (Op::AllReduce, seq) } else { (Op::AllGather, seq << 32) };
            OpHeader { op, count, ..header() }
        };
        std::thread::scope(|s| {
            s.spawn(|| {
                let lane = owner.lane(0);
                let none = Aside { dst: NO_RANK, src: NO_RANK, digest: 0 };
                // Each goes into the place of one of another operation.
                (1..200_000u64).for_each(|n| {
                    let seq = n * (SLOTS as u64 + 1);
                    lane.publish(seq, &said(seq), none, None);
                });
                done.store(true, Ordering::Release);
            });
            let lane = viewer.lane(0);
            let mut told = 0u64;
            while !done.load(Ordering::Acquire) {
                let seq = lane.progress() >> 16;
                if seq == 0 {
                    continue;
                }
                if let Some(text) = lane.call(seq) {
                    let header = said(seq);
                    assert_eq!(text, describe(header.pack(), header.count), "#{seq}");
                    told += 1;
                }
            }
            // The last one stays.
            let last = lane.progress() >> 16;
            assert!(lane.call(last).is_some(), "{told} were told");
        });
    }

    #[test]
    fn what_is_made_for_a_process_is_only_its_own() {
        let mark = Mark::new().unwrap();
        let owner = Owner { pid: 7, asymmetric: true, mark: mark.words() };
        let made = Control::create_for(1, 2, owner).unwrap();
        let fd = || made.segment.fd().unwrap().try_clone_to_owned().unwrap();
        let segment = || Segment::adopt(fd(), CONTROL_BYTES as u64).unwrap();
        let strange = Control::adopt(segment(), 1, 2, Mark::new().unwrap()).unwrap_err();
        assert!(strange.to_string().contains("for another process"), "{strange}");
        let own = Control::adopt(segment(), 1, 2, mark).unwrap();
        own.commit(1).unwrap();
        // Whoever made it says nothing of the rank.
        made.leave(RankState::Closed, "");
        assert_eq!((own.pid(), own.state().0), (7, RankState::Alive));
        own.leave(RankState::Failed, "why");
        assert_eq!(made.state(), (RankState::Failed, "why".into()));
    }

    /// What a service makes for its clients is on the clients' account: whoever allocates a page is charged for it.
    #[test]
    fn what_is_made_for_a_process_takes_its_makers_memory_for_a_page() {
        let mark = Mark::new().unwrap();
        let owner = Owner { pid: 7, asymmetric: true, mark: mark.words() };
        let made = Control::create_for(0, 1, owner).unwrap();
        let fd = || made.segment.fd().unwrap().try_clone_to_owned().unwrap();
        let bytes = || rustix::fs::fstat(fd()).unwrap().st_blocks as usize * 512;
        assert_eq!(bytes(), BLOCK_BYTES);
        // Nor does it when it looks, or says that it leaves.
        made.leave(RankState::Failed, "why");
        assert_eq!((made.counters(), made.records()), (Counters::default(), Vec::new()));
        assert_eq!(bytes(), BLOCK_BYTES);
        let own = Control::adopt(Segment::adopt(fd(), CONTROL_BYTES as u64).unwrap(), 0, 1, mark).unwrap();
        assert!(bytes() >= BLOCK_BYTES + STAGE_AT, "the client's first lane has its memory");
        drop(own);
    }

    #[test]
    fn a_foreign_block_is_refused() {
        let mine = Control::create(1, 2).unwrap();
        assert!(view(&mine, 0, 2).unwrap_err().to_string().contains("rank 1 of 2, expected rank 0 of 2"));
        mine.block().ident.0[0].store(1, Ordering::Relaxed);
        assert!(view(&mine, 1, 2).unwrap_err().to_string().contains("magic"));
    }

    #[test]
    fn looking_at_lanes_takes_no_memory() {
        let owner = Control::create(0, 1).unwrap();
        let viewer = view(&owner, 0, 1).unwrap();
        let blocks = || rustix::fs::fstat(owner.segment.fd().unwrap()).unwrap().st_blocks;
        let before = blocks();
        assert_eq!((viewer.records(), viewer.counters()), (Vec::new(), Counters::default()));
        assert_eq!(blocks(), before);
        owner.commit(2).unwrap();
        owner.lane(2).tally().op();
        owner.lane(2).flight().begin(1, &header(), 400);
        assert_eq!(viewer.counters().ops, 1);
        assert_eq!(viewer.records().iter().map(|(lane, r)| (*lane, r.seq)).collect::<Vec<_>>(), [(2, 1)]);
    }

    #[test]
    fn standing_is_one_phrase_a_state() {
        let standing = |leave: fn(&Control)| {
            let c = Control::create(0, 2).unwrap();
            leave(&c);
            c.standing()
        };
        assert_eq!(standing(|_| ()), "alive");
        assert_eq!(standing(|c| c.leave(RankState::Closed, "")), "closed");
        assert_eq!(standing(|c| c.leave(RankState::Aborted, "enough")), "aborted: enough");
        assert_eq!(standing(|c| c.leave(RankState::Failed, "operation #1 failed")), "failed: operation #1 failed");
    }

    #[test]
    fn the_first_reason_stays_and_is_cut_at_a_character() {
        let c = Control::create(0, 2).unwrap();
        c.leave(RankState::Failed, &"é".repeat(REASON_BYTES));
        c.leave(RankState::Closed, "later");
        let (state, text) = c.state();
        assert_eq!(state, RankState::Failed);
        assert_eq!(text, "é".repeat(REASON_BYTES / 2));
    }

    #[test]
    fn a_tiny_payload_lies_in_the_line_of_its_record() {
        let c = Control::create(0, 1).unwrap();
        let lane = c.lane(LANES - 1);
        let record = std::ptr::from_ref(lane.record(5)).cast::<u8>() as usize;
        assert_eq!(lane.payload(5, INLINE_BYTES) as usize, record + 32);
        assert_eq!(lane.payload(5, INLINE_BYTES + 1) as usize, record + 64);
        assert_eq!(record % 128, 0);
        assert_eq!(lane.payload(5, SLOT_BYTES) as usize, record + 64);
        assert_eq!(lane.payload(LARGE_SLOTS as u64, SLOT_BYTES + 1), lane.stage(true, 1).wrapping_add(STAGE_BYTES));
        let end = lane.payload(LARGE_SLOTS as u64 - 1, LARGE_SLOT_BYTES) as usize + LARGE_SLOT_BYTES;
        assert_eq!(end, c.segment.base() as usize + CONTROL_BYTES);
    }
}
