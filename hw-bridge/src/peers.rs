//! The control channel of a communicator inside a server: arrivals, op headers, deaths, aborts.
//!
//! Every rank owns one *control segment* and maps those of its peers. Only the owner writes its block and its slots;
//! peers read them, and write nothing but its bell. The channel never passes through a plugin, so it works while a
//! plugin hangs.
//!
//! ```text
//! 0        ident | state + reason | progress | bell          (one 4 KiB block, hot words on lines of their own)
//! 4 KiB    slot 0 | slot 1 | ... SLOTS                       (a 64-byte record, then the payload)
//! ..       stage in 0 | in 1 | result 0 | result 1           (STAGE_BYTES each, touched by private buffers only)
//! ```
//!
//! *progress* is `sequence << 16 | step`, only ever rises, and is the one word peers wait on. Step 1 is "arrived", and
//! [`STEP_DONE`] is "has read all it wanted of its peers". A *slot* is the arrival record of operation `sequence`, in
//! slot `sequence % SLOTS`; its tag is written last. A rank reuses a slot only after every linked peer is done with the
//! operation it held.
//!
//! What a peer writes is an allegation: headers are compared, offsets checked against the mapping, texts cleaned.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::dtype::{DataType, ReduceOp};
use crate::limits::{INLINE_BYTES, REASON_BYTES, SLOT_BYTES, SLOTS, STAGE_BYTES};
use crate::links::Mapped;
use crate::segment::{Segment, SegmentError};
use crate::semaphore::{Bell, publish_fence};

const MAGIC: u64 = 0x316c_6363_776c_6377;
const BLOCK_BYTES: usize = 4096;
const SLOT_STRIDE: usize = SLOT_BYTES + 128;
const STAGE_AT: usize = (BLOCK_BYTES + SLOTS * SLOT_STRIDE).next_multiple_of(4096);
/// Bytes of a control segment (address space; pages cost memory when touched).
pub const CONTROL_BYTES: usize = STAGE_AT + 4 * STAGE_BYTES;
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
}

impl Op {
    /// All of them.
    pub const ALL: [Op; 8] = [
        Op::AllReduce,
        Op::AllGather,
        Op::ReduceScatter,
        Op::Broadcast,
        Op::Reduce,
        Op::AllToAll,
        Op::SendRecv,
        Op::Barrier,
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

    fn pack(&self) -> u64 {
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
fn describe(packed: u64, count: u64) -> String {
    let byte = |at: u32| (packed >> at) as u8;
    let op = Op::from_u8(byte(0)).map_or("unknown operation", Op::name);
    let mut s = op.to_string();
    if op == "barrier" {
        return s;
    }
    if let Some(d) = DataType::from_nrt(u32::from(byte(8))) {
        s += &format!(" {d}");
    }
    if let Some(r) = ReduceOp::ALL.into_iter().find(|r| *r as u8 == byte(16)) {
        s += &format!(" {r}");
    }
    s += &format!(" count {count}");
    if matches!(Op::from_u8(byte(0)), Some(Op::Broadcast | Op::Reduce)) {
        s += &format!(" root {}", (packed >> 32) as u16);
    }
    let flags = byte(24);
    if flags & FLAG_PRIVATE != 0 {
        s += " private memory";
    }
    if flags & FLAG_IN_PLACE != 0 {
        s += " in place";
    }
    s + &format!(" algorithm {}", byte(48))
}

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
    ident: Line<[AtomicU64; 4]>,
    state: Line<StateLine>,
    progress: Line<AtomicU64>,
    bell: Line<Bell>,
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

/// Typed view of a control segment.
#[derive(Debug)]
pub struct Control {
    segment: Arc<Segment>,
    left: AtomicBool,
}

impl Control {
    /// Makes this rank's own.
    pub fn create(rank: u32, nranks: u32) -> Result<Control, SegmentError> {
        let segment = Arc::new(Segment::create("wccl-control", CONTROL_BYTES as u64)?);
        // The slots are touched now, so that the first operations take no page fault and memory that is not there
        // is an error here.
        segment.commit(0, STAGE_AT as u64)?;
        let c = Control { segment, left: AtomicBool::new(false) };
        let ident = &c.block().ident.0;
        ident[1].store(u64::from(rank) | u64::from(nranks) << 32, Ordering::Relaxed);
        ident[0].store(MAGIC, Ordering::Release);
        Ok(c)
    }

    /// Views a peer's, after checking that it is one and whose.
    pub fn of_peer(segment: Segment, rank: u32, nranks: u32) -> Result<Control, SegmentError> {
        if segment.len() != CONTROL_BYTES {
            return Err(SegmentError::Foreign(format!(
                "its control block has {} bytes, {CONTROL_BYTES} expected",
                segment.len()
            )));
        }
        let c = Control { segment: Arc::new(segment), left: AtomicBool::new(true) };
        let ident = &c.block().ident.0;
        let (magic, who) = (ident[0].load(Ordering::Acquire), ident[1].load(Ordering::Relaxed));
        if magic != MAGIC {
            return Err(SegmentError::Foreign(format!("its control block has magic {magic:#x}")));
        }
        if who != u64::from(rank) | u64::from(nranks) << 32 {
            let (r, n) = (who as u32, who >> 32);
            return Err(SegmentError::Foreign(format!(
                "it belongs to rank {r} of {n}, expected rank {rank} of {nranks}"
            )));
        }
        Ok(c)
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

    fn record(&self, seq: u64) -> &Record {
        let at = BLOCK_BYTES + (seq as usize % SLOTS) * SLOT_STRIDE;
        // SAFETY: `at` is a multiple of 64 and the record ends before STAGE_AT <= CONTROL_BYTES; atomics only.
        unsafe { &*self.segment.base().add(at).cast::<Record>() }
    }

    /// Where the payload of operation `seq` lies: in the record's line if it fits, else behind it.
    #[inline]
    pub(crate) fn payload(&self, seq: u64, len: usize) -> *mut u8 {
        debug_assert!(len <= SLOT_BYTES);
        let at = BLOCK_BYTES + (seq as usize % SLOTS) * SLOT_STRIDE;
        let behind = if len <= INLINE_BYTES { 64 - INLINE_BYTES } else { 128 };
        self.segment.base().wrapping_add(at + behind)
    }

    /// Staging area: `result` picks the pair, `half` the piece's parity.
    #[inline]
    pub(crate) fn stage(&self, result: bool, half: usize) -> *mut u8 {
        self.segment.base().wrapping_add(STAGE_AT + (usize::from(result) * 2 + half % 2) * STAGE_BYTES)
    }

    /// Allocates the staging pages, before the first private buffer.
    pub fn commit_stage(&self) -> Result<(), SegmentError> {
        self.segment.commit(STAGE_AT as u64, 4 * STAGE_BYTES as u64)
    }

    /// `sequence << 16 | step` of the rank.
    #[inline]
    pub fn progress(&self) -> u64 {
        self.block().progress.0.load(Ordering::Acquire)
    }

    #[inline]
    pub(crate) fn set_progress(&self, seq: u64, step: u16) {
        self.block().progress.0.store(seq << 16 | u64::from(step), Ordering::Release);
    }

    /// The owner's bell.
    #[inline]
    pub fn bell(&self) -> &Bell {
        &self.block().bell.0
    }

    /// Publishes the arrival record of operation `seq`; the payload must be in place.
    #[inline]
    pub(crate) fn publish(&self, seq: u64, header: &OpHeader, aside: Aside, words: Option<[u64; 4]>) {
        let r = self.record(seq);
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
        let r = self.record(seq);
        let said = describe(r.what.load(Ordering::Relaxed), r.count.load(Ordering::Relaxed));
        self.arrived(seq).then_some(said)
    }

    /// Compares the rank's header of `seq` with ours; `Err` is the other's view in words.
    #[inline]
    pub(crate) fn same_call(&self, seq: u64, header: &OpHeader) -> Result<(), String> {
        let r = self.record(seq);
        let (what, count) = (r.what.load(Ordering::Relaxed), r.count.load(Ordering::Relaxed));
        if what == header.pack() && count == header.count { Ok(()) } else { Err(describe(what, count)) }
    }

    /// The words of a record without inline payload: where the rank's buffers lie in its device memory (input, output),
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
        let text = String::from_utf8_lossy(&bytes).chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        (state, text)
    }

    /// Whether the rank takes part, without the reason.
    #[inline]
    pub fn alive(&self) -> bool {
        self.block().state.0.state.load(Ordering::Acquire) == RankState::Alive as u32
    }

    /// Leaves the group, once: the first state that is not alive stays.
    pub fn leave(&self, state: RankState, reason: &str) {
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

    /// What the rank did last, in words: for messages about ranks that are missing.
    pub fn last_seen(&self, seq: u64) -> String {
        let p = self.progress();
        let (at, step) = (p >> 16, p as u16);
        if at == 0 {
            return "it has not started any operation".into();
        }
        let r = self.record(at);
        let what = describe(r.what.load(Ordering::Relaxed), r.count.load(Ordering::Relaxed));
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
    pub pid: i32,
    pub(crate) control: Control,
    pub(crate) hbm: Segment,
    pidfd: Option<std::os::fd::OwnedFd>,
}

impl Peer {
    /// Takes over what a link gave; checks that it is rank `rank` of `nranks`.
    pub fn new(mapped: Mapped, rank: usize, nranks: usize) -> Result<Peer, SegmentError> {
        if mapped.rank as usize != rank {
            return Err(SegmentError::Foreign(format!("it belongs to rank {}, expected rank {rank}", mapped.rank)));
        }
        let control = Control::of_peer(mapped.control, rank as u32, nranks as u32)?;
        Ok(Peer { rank, pid: mapped.pid, control, hbm: mapped.hbm, pidfd: mapped.pidfd })
    }

    /// The peer's control segment.
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// Whether its process has ended.
    pub fn dead(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let Some(fd) = &self.pidfd else { return false };
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut fds, Some(&now)), Ok(1))
    }
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
        publish_fence();
        self.control.bell().ring();
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
        let mine = Control::create(1, 2).unwrap();
        let seen = view(&mine, 1, 2).unwrap();
        assert!(!seen.arrived(1));
        let aside = Aside { dst: 3, src: NO_RANK, digest: 0xDEAD_BEEF };
        mine.publish(1, &header(), aside, Some([4096, 8192, 7, 9]));
        assert!(seen.arrived(1) && !seen.arrived(2));
        assert_eq!((seen.words(1), seen.aside(1)), ([4096, 8192, 7, 9], aside));
        assert_eq!(seen.same_call(1, &header()), Ok(()));
        let other = OpHeader { count: 200, ..header() };
        assert_eq!(seen.same_call(1, &other), Err("all_reduce fp32 sum count 100 algorithm 2".into()));
        assert_eq!(seen.progress(), 1 << 16 | 1);
    }

    #[test]
    fn a_foreign_block_is_refused() {
        let mine = Control::create(1, 2).unwrap();
        assert!(view(&mine, 0, 2).unwrap_err().to_string().contains("rank 1 of 2, expected rank 0 of 2"));
        mine.block().ident.0[0].store(1, Ordering::Relaxed);
        assert!(view(&mine, 1, 2).unwrap_err().to_string().contains("magic"));
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
        let record = std::ptr::from_ref(c.record(5)).cast::<u8>() as usize;
        assert_eq!(c.payload(5, INLINE_BYTES) as usize, record + 32);
        assert_eq!(c.payload(5, INLINE_BYTES + 1) as usize, record + 128);
    }
}
