//! The step language of schedules, and the sequencer that executes them.
//!
//! `host-runtime` compiles a collective into a [`Schedule`] for this rank, once; [`Lane::run`] executes it as often
//! as the user calls. In the steady state it allocates nothing, takes no lock, formats nothing and calls no component.
//!
//! An operation runs so: wait until the slot may be reused; put a small payload beside the record; publish the record
//! (header, buffer offsets) and the step "arrived"; execute the steps; publish "done". Steps that touch a peer's buffers
//! come after [`Step::Arrival`] of that peer, which compares the headers and checks the peer's offsets against its
//! mapping, so no byte moves between calls that do not match and none outside what the peer granted.
//!
//! One operation at a time in a lane: `run` takes the [`Lane`] by `&mut`. Lanes share the [`Endpoint`] (links, state of the
//! group) and run side by side, each on its caller's thread. [`crate::peers::Abort`] works from any thread.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::credentials::PeerPid;
use crate::dtype::ReduceOp;
use crate::flight::{Counters, State};
use crate::foreign::Unreadable;
use crate::hbm::{Hbm, HbmBuf};
use crate::limits::{
    INLINE_BYTES, LANES, LARGE_SLOT_BYTES, LARGE_SLOTS, MAX_LOCAL_RANKS, SLOT_BYTES, SLOTS, STAGE_BYTES, STREAM_BYTES,
};
use crate::peers::{Abort, Aside, Control, FLAG_PRIVATE, LaneView, NO_RANK, OpHeader, Peer, RankState, STEP_DONE};
use crate::reduce;
use crate::segment::SegmentError;
use crate::semaphore::{self, Fence, WaitPolicy, publish_fence};

/// How long a failed rank waits for peers that may still use its buffers.
const PATIENCE: Duration = Duration::from_millis(500);

/// A buffer that a step reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// This rank's input.
    In,
    /// This rank's output.
    Out,
    /// A peer's input, in its device memory or, if the schedule is `direct`, in its private memory.
    PeerIn(u16),
    /// A peer's output in its device memory.
    PeerOut(u16),
    /// The payload that came with a rank's arrival record; this rank's own included.
    Slot(u16),
    /// A rank's staging half for input pieces; this rank's own included.
    Stage(u16, u8),
    /// A rank's staging half for results; this rank's own included.
    Result(u16, u8),
}

impl Place {
    /// Whose scale a source here is multiplied by in a pre-scaled sum of `rank`: inputs are scaled, sums are not.
    #[inline]
    pub fn scaled_by(self, rank: usize) -> Option<usize> {
        match self {
            Place::In => Some(rank),
            Place::PeerIn(r) | Place::Slot(r) | Place::Stage(r, _) => Some(usize::from(r)),
            Place::Out | Place::PeerOut(_) | Place::Result(..) => None,
        }
    }
}

/// A position in a buffer, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct At(pub Place, pub u64);

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Wait for a peer's arrival record, compare headers, learn where its buffers are.
    Arrival(u16),
    /// Check that an arrived peer sends to this rank.
    SendsToMe(u16),
    /// Check that an arrived peer receives from this rank.
    ReceivesFromMe(u16),
    /// Wait until a peer has signalled this step of this operation.
    Wait {
        /// The peer.
        peer: u16,
        /// Its step.
        step: u16,
    },
    /// Tell the peers that this rank has come so far.
    Signal(u16),
    /// Move bytes.
    Copy {
        /// To.
        dst: At,
        /// From.
        src: At,
        /// Bytes.
        len: u64,
    },
    /// Reduce `n` sources, listed in [`Schedule::sources`] from `first`, in that order.
    Reduce {
        /// To; may be one of the sources.
        dst: At,
        /// First source.
        first: u32,
        /// Number of sources.
        n: u32,
        /// Elements.
        count: u64,
        /// Type of the reduction: the header's, or the sum that an average begins with.
        op: ReduceOp,
    },
    /// Divide by `n`: the end of an average whose sums were made pairwise.
    Average {
        /// What to divide.
        dst: At,
        /// Elements.
        count: u64,
        /// Divisor.
        n: u32,
    },
    /// Exchange bytes of two buffers: in-place all-to-all.
    Swap {
        /// One.
        a: At,
        /// The other.
        b: At,
        /// Bytes.
        len: u64,
    },
}

/// A compiled operation of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// What all ranks must agree on.
    pub header: OpHeader,
    /// Bytes of the input that travel with the record (at most [`LARGE_SLOT_BYTES`]); 0 for none.
    pub payload: u64,
    /// Bytes the payload has on any rank; decides where it lies. More than [`INLINE_BYTES`] in a pre-scaled sum, whose
    /// scale is in the record.
    pub slot_len: u64,
    /// Bytes of this rank's input.
    pub in_bytes: u64,
    /// Bytes of this rank's output.
    pub out_bytes: u64,
    /// Bytes of a peer's input, where it is one that the steps read.
    pub peer_in_bytes: u64,
    /// Bytes of a peer's output, where it is one that the steps touch.
    pub peer_out_bytes: u64,
    /// In the in-place form: the first byte of the input counted from the first byte of the output.
    pub in_place: Option<i64>,
    /// Whether staging halves are used.
    pub staged: bool,
    /// Whether inputs in private memory are read where they lie. Nothing else is done with a peer's: copies from
    /// [`Place::PeerIn`] are all that there may be.
    pub direct: bool,
    /// Digest of what all ranks must agree on and the header cannot hold (counts of each rank, pairs); 0 for nothing. A
    /// schedule with one has no inline payload: the record's words hold the digest.
    pub table: u64,
    /// The steps.
    pub steps: Vec<Step>,
    /// Sources of the reductions.
    pub sources: Vec<At>,
}

/// This rank's buffer for one call: device memory (which peers reach) or private memory (which they do not).
#[derive(Debug, Clone, Copy)]
pub struct LocalMem<'a> {
    ptr: *mut u8,
    len: u64,
    writable: bool,
    /// Device memory: its offset in the arena, the arena, and the buffer it is a part of.
    hbm: Option<u64>,
    arena: *const u8,
    buf: Option<&'a HbmBuf>,
    /// The buffers an operation uses of a whole arena.
    parts: &'a [&'a HbmBuf],
    life: PhantomData<&'a [u8]>,
}

impl<'a> LocalMem<'a> {
    /// No memory: a rank that only receives has no input, and the other way round.
    pub fn none() -> LocalMem<'static> {
        LocalMem {
            ptr: std::ptr::NonNull::<u8>::dangling().as_ptr(),
            len: 0,
            writable: true,
            hbm: Some(0),
            arena: std::ptr::null(),
            buf: None,
            parts: &[],
            life: PhantomData,
        }
    }

    /// `len` bytes of device memory from `offset`; `None` if they are not all inside the buffer.
    pub fn hbm(buf: &'a HbmBuf, offset: u64, len: u64) -> Option<LocalMem<'a>> {
        if offset.checked_add(len)? > buf.len() {
            return None;
        }
        let ptr = buf.ptr().wrapping_add(offset as usize);
        Some(LocalMem {
            ptr,
            len,
            writable: true,
            hbm: Some(buf.offset() + offset),
            arena: buf.hbm().segment().base(),
            buf: Some(buf),
            parts: &[],
            life: PhantomData,
        })
    }

    /// All of a core's device memory, for schedules whose positions are offsets in it. `parts` are the buffers that the
    /// operation uses: they must stay allocated while it runs, and are kept if it fails in a peer's hands.
    pub fn arena(hbm: &'a Hbm, parts: &'a [&'a HbmBuf]) -> LocalMem<'a> {
        let base = hbm.segment().base();
        let len = hbm.segment().len() as u64;
        LocalMem { ptr: base, len, writable: true, hbm: Some(0), arena: base, buf: None, parts, life: PhantomData }
    }

    /// Private memory to read from.
    pub fn input(bytes: &'a [u8]) -> LocalMem<'a> {
        LocalMem {
            ptr: bytes.as_ptr().cast_mut(),
            len: bytes.len() as u64,
            writable: false,
            hbm: None,
            arena: std::ptr::null(),
            buf: None,
            parts: &[],
            life: PhantomData,
        }
    }

    /// Private memory to write to.
    pub fn output(bytes: &'a mut [u8]) -> LocalMem<'a> {
        LocalMem {
            ptr: bytes.as_mut_ptr(),
            len: bytes.len() as u64,
            writable: true,
            hbm: None,
            arena: std::ptr::null(),
            buf: None,
            parts: &[],
            life: PhantomData,
        }
    }

    /// Private memory that is input and output at once; the input is `len` bytes from `offset`.
    pub fn in_place(bytes: &'a mut [u8], offset: usize, len: usize) -> Option<(LocalMem<'a>, LocalMem<'a>)> {
        if offset.checked_add(len)? > bytes.len() {
            return None;
        }
        let output = LocalMem::output(bytes);
        let input = LocalMem { ptr: output.ptr.wrapping_add(offset), len: len as u64, ..output };
        Some((input, output))
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether peers reach it.
    pub fn is_device(&self) -> bool {
        self.hbm.is_some()
    }

    /// How this memory and another lie to one another: the byte distance if they overlap.
    pub fn overlap(&self, other: &LocalMem<'_>) -> Option<i64> {
        let (a, b) = (self.ptr as u64, other.ptr as u64);
        let apart = self.len == 0 || other.len == 0 || a + self.len <= b || b + other.len <= a;
        if apart { None } else { Some(a.wrapping_sub(b) as i64) }
    }
}

/// A rank that an operation waited for in vain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Absent {
    /// The rank.
    pub rank: usize,
    /// Its process.
    pub pid: PeerPid,
    /// What it did last.
    pub last: String,
}

/// Why an operation failed. The communicator is broken afterwards.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpError {
    /// A peer's process ended.
    #[error(
        "operation #{seq} ({what}) failed on rank {rank}: the process of rank {peer} (pid {pid}) has ended; {last}"
    )]
    Died {
        /// This rank.
        rank: usize,
        /// Sequence number.
        seq: u64,
        /// The operation.
        what: String,
        /// Who died.
        peer: usize,
        /// Its process.
        pid: PeerPid,
        /// What it did last.
        last: String,
    },
    /// A peer left: closed, aborted or failed.
    #[error("operation #{seq} ({what}) failed on rank {rank}: rank {peer} (pid {pid}) {how}")]
    Left {
        /// This rank.
        rank: usize,
        /// Sequence number.
        seq: u64,
        /// The operation.
        what: String,
        /// Who left.
        peer: usize,
        /// Its process.
        pid: PeerPid,
        /// How and why.
        how: String,
        /// The reason the peer gave for its own failure, to be passed on.
        reason: String,
    },
    /// The deadline passed.
    #[error("operation #{seq} ({what}) timed out on rank {rank} after {after:?} without {}; see what those ranks are doing, or raise the deadline", absent_list(.absent))]
    Timeout {
        /// This rank.
        rank: usize,
        /// Sequence number.
        seq: u64,
        /// The operation.
        what: String,
        /// The deadline.
        after: Duration,
        /// Who was missing.
        absent: Vec<Absent>,
    },
    /// A peer is in another call.
    #[error(
        "mismatched collectives at operation #{seq}: rank {rank} calls {mine}, rank {peer} calls {theirs}; make all ranks issue the same calls in the same order"
    )]
    Mismatch {
        /// This rank.
        rank: usize,
        /// Sequence number.
        seq: u64,
        /// Our call.
        mine: String,
        /// The other rank.
        peer: usize,
        /// Its call.
        theirs: String,
    },
    /// A peer announced a buffer that is not in the memory it granted.
    #[error(
        "operation #{seq} failed on rank {rank}: rank {peer} announced a buffer outside its device memory, or an input that is too short; it runs another version or is corrupt"
    )]
    BadPeer {
        /// This rank.
        rank: usize,
        /// Sequence number.
        seq: u64,
        /// The peer.
        peer: usize,
    },
    /// A peer's input in private memory cannot be read.
    #[error(
        "operation #{seq} ({what}) failed on rank {rank}: the input of rank {peer} (pid {pid}), in its private memory, cannot be \
         read: {why}; WCCL_DIRECT=0 on any rank has private memory staged instead"
    )]
    Unreadable {
        /// This rank.
        rank: usize,
        /// Sequence number.
        seq: u64,
        /// The operation.
        what: String,
        /// Whose input.
        peer: usize,
        /// Its process.
        pid: PeerPid,
        /// Why.
        why: Unreadable,
    },
    /// The buffers do not fit the kind of schedule.
    #[error("the buffers of {what} on rank {rank} cannot be used: {why}")]
    Memory {
        /// This rank.
        rank: usize,
        /// The operation.
        what: String,
        /// What is wrong.
        why: &'static str,
    },
    /// Aborted here.
    #[error("operation #{seq} ({what}) was aborted on rank {rank}: {reason}")]
    Aborted {
        /// This rank.
        rank: usize,
        /// Sequence number.
        seq: u64,
        /// The operation.
        what: String,
        /// Why.
        reason: String,
    },
    /// The communicator failed before.
    #[error("the communicator of rank {rank} is no longer usable; it failed before: {first}")]
    Broken {
        /// This rank.
        rank: usize,
        /// The first failure.
        first: String,
    },
    /// The caller's buffer is too small.
    #[error("the {which} buffer of rank {rank} has {have} bytes, {what} needs {need}")]
    Buffer {
        /// This rank.
        rank: usize,
        /// Input or output.
        which: &'static str,
        /// Bytes there are.
        have: u64,
        /// Bytes needed.
        need: u64,
        /// The operation.
        what: String,
    },
    /// The tensor is in another core's device memory.
    #[error(
        "the {which} tensor of rank {rank} is in another core's device memory; allocate it on the communicator's core"
    )]
    WrongCore {
        /// This rank.
        rank: usize,
        /// Input or output.
        which: &'static str,
    },
    /// The schedule needs a peer that was never linked.
    #[error("rank {rank} has no link to rank {peer}; expand the communicator's connectivity first")]
    NotLinked {
        /// This rank.
        rank: usize,
        /// The peer.
        peer: usize,
    },
    /// This process was forked from the one that made the communicator.
    #[error(
        "{what} on rank {rank}: this process was forked from pid {parent}, which made the communicator; use it there, or open a runtime and a communicator of its own after an exec"
    )]
    Forked {
        /// This rank.
        rank: usize,
        /// The operation.
        what: String,
        /// The process that may use it.
        parent: u32,
    },
    /// Memory of a lane or for staging is not to be had.
    #[error("rank {rank} could not stage private memory: {reason}")]
    Stage {
        /// This rank.
        rank: usize,
        /// Why.
        reason: String,
    },
}

fn absent_list(absent: &[Absent]) -> String {
    // Linked peers are on this machine.
    let uname = rustix::system::uname();
    let host = uname.nodename().to_string_lossy();
    let each = absent.iter().map(|a| format!("rank {} (host {host}, pid {}): {}", a.rank, a.pid, a.last));
    each.collect::<Vec<_>>().join("; ")
}

/// One rank's data plane of one communicator: what its lanes share.
#[derive(Debug)]
pub struct Endpoint {
    rank: usize,
    nranks: usize,
    control: Arc<Control>,
    hbm: Arc<Hbm>,
    peers: Box<[OnceLock<Peer>]>,
    policy: WaitPolicy,
    abort: Abort,
    broken: OnceLock<String>,
    /// Some rank cannot have our fences executed for us.
    fenced: AtomicBool,
    /// Digest of the rings.
    plan: AtomicU32,
    /// Lanes that were handed out.
    taken: [AtomicBool; LANES],
}

/// What a call passes beside its schedule and buffers.
#[derive(Debug, Clone, Copy)]
pub struct CallArgs {
    /// Whom a send_recv sends to.
    pub dst: Option<usize>,
    /// Whom a send_recv receives from.
    pub src: Option<usize>,
    /// This rank's scale of a pre-scaled sum; matters to nothing else.
    pub scale: f32,
    /// Bounds each wait, from when this rank has to sleep in it: an operation that moves on does not time out.
    pub timeout: Duration,
}

/// A sequence of operations of its own: the state that only the thread inside needs.
#[derive(Debug)]
pub struct Lane {
    endpoint: Arc<Endpoint>,
    index: usize,
    seq: u64,
    /// Every linked peer is known to be done with this operation.
    drained: u64,
    stage_ready: bool,
    large_ready: bool,
    digest: u32,
    /// Kept between operations, so that a small one need not clear it; absent while one runs.
    bases: Option<Box<Bases>>,
}

impl Endpoint {
    /// The data plane of `rank` of `nranks`, before any link. `nranks` is at most [`MAX_LOCAL_RANKS`].
    pub fn new(rank: usize, nranks: usize, hbm: Arc<Hbm>, policy: WaitPolicy) -> Result<Endpoint, SegmentError> {
        crate::fork::mark_process();
        let control = Arc::new(Control::create(rank as u32, nranks as u32)?);
        let abort = Abort::new(control.clone());
        Ok(Endpoint {
            rank,
            nranks,
            control,
            hbm,
            peers: (0..nranks).map(|_| OnceLock::new()).collect(),
            policy,
            abort,
            broken: OnceLock::new(),
            fenced: AtomicBool::new(!semaphore::asymmetric()),
            plan: AtomicU32::new(0),
            taken: Default::default(),
        })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks of the communicator.
    pub fn nranks(&self) -> usize {
        self.nranks
    }

    /// This rank's control segment, to be granted.
    pub fn control(&self) -> &Arc<Control> {
        &self.control
    }

    /// The core's device memory, to be granted.
    pub fn hbm(&self) -> &Arc<Hbm> {
        &self.hbm
    }

    /// Adds a linked peer; the first link to a rank stays.
    pub fn link(&self, peer: Peer) {
        if !peer.control.asymmetric() {
            self.fenced.store(true, Ordering::Release);
        }
        if let Some(place) = self.peers.get(peer.rank) {
            // A second link to the same rank is dropped.
            let _ = place.set(peer);
        }
    }

    /// Whether `rank` is linked (a rank is linked to itself).
    pub fn linked(&self, rank: usize) -> bool {
        rank == self.rank || self.peer(rank).is_some()
    }

    #[inline]
    fn peer(&self, rank: usize) -> Option<&Peer> {
        self.peers.get(rank).and_then(OnceLock::get)
    }

    fn linked_peers(&self) -> impl Iterator<Item = &Peer> {
        self.peers.iter().filter_map(OnceLock::get)
    }

    /// Whether the process of a linked rank has ended. Of one that is not linked nothing is known.
    pub fn peer_died(&self, rank: usize) -> bool {
        self.linked_peers().any(|p| p.rank == rank && p.dead())
    }

    /// Control segments of the linked peers, for those who watch.
    pub fn peer_controls(&self) -> impl Iterator<Item = &Control> {
        self.linked_peers().map(|p| &p.control)
    }

    /// Whether this rank can read the private memory of all others. What the kernel said when each was linked.
    ///
    /// # Errors
    /// A sentence about the first rank that it cannot read.
    pub fn reads_private(&self) -> Result<(), String> {
        (0..self.nranks).filter(|p| *p != self.rank).try_for_each(|p| match self.peer(p) {
            Some(peer) => peer.readable.map_err(|e| format!("rank {p} (pid {}) cannot be read: {e}", peer.pid)),
            None => Err(format!("rank {p} is not linked")),
        })
    }

    /// Handle that ends operations from another thread.
    pub fn abort_handle(&self) -> Abort {
        self.abort.clone()
    }

    /// Counters so far, of all lanes.
    pub fn counters(&self) -> Counters {
        let lanes = (0..LANES).filter(|l| self.taken[*l].load(Ordering::Acquire));
        lanes.fold(Counters::default(), |sum, l| sum + self.control.lane(l).tally().read())
    }

    /// Notes a digest of the rings this rank works with; ranks that were given different ones notice at their first meeting.
    pub fn set_plan(&self, digest: u32) {
        self.plan.store(digest, Ordering::Release);
    }

    /// Hands out one of the [`LANES`], once.
    ///
    /// # Errors
    /// [`OpError::Stage`] if there is no memory for it.
    pub fn lane(self: &Arc<Endpoint>, index: usize) -> Result<Option<Lane>, OpError> {
        let Some(taken) = self.taken.get(index) else { return Ok(None) };
        if taken.swap(true, Ordering::AcqRel) {
            return Ok(None);
        }
        if let Err(e) = self.control.commit(index) {
            taken.store(false, Ordering::Release);
            return Err(OpError::Stage { rank: self.rank, reason: e.to_string() });
        }
        let bases = Some(Box::new(Bases::none()));
        let endpoint = self.clone();
        let (stage_ready, large_ready) = (false, false);
        Ok(Some(Lane { endpoint, index, seq: 0, drained: 0, stage_ready, large_ready, digest: 0, bases }))
    }

    /// Leaves the group because this rank cannot go on; peers learn why instead of waiting.
    pub fn fail(&self, why: &str) {
        // This rank's own lanes learn it first: what they would say of a peer would only be an echo.
        self.broken.get_or_init(|| why.to_string());
        self.control.leave(RankState::Failed, why);
        self.ring_all();
    }

    /// Whether operations can be begun.
    ///
    /// # Errors
    /// [`OpError::Broken`] with the first failure, or what the abort said.
    pub fn usable(&self) -> Result<(), OpError> {
        if let Some(first) = self.broken.get() {
            return Err(OpError::Broken { rank: self.rank, first: first.clone() });
        }
        if self.abort.aborted() {
            return Err(OpError::Broken { rank: self.rank, first: format!("aborted: {}", self.control.state().1) });
        }
        Ok(())
    }

    /// Leaves the group in good order; peers that still wait for this rank learn it.
    pub fn close(&self) {
        self.control.leave(RankState::Closed, "");
        self.ring_all();
    }

    /// Wakes every lane of every peer, and of this rank.
    fn ring_all(&self) {
        publish_fence(Fence::Full);
        for control in self.peer_controls().chain([&*self.control]) {
            for lane in 0..LANES {
                control.lane(lane).bell().ring_if_sleeping();
            }
        }
    }

    #[inline]
    fn ring_lane(&self, lane: usize) {
        publish_fence(if self.fenced.load(Ordering::Relaxed) { Fence::Full } else { Fence::Light });
        for peer in self.linked_peers() {
            peer.control.lane(lane).bell().ring_if_sleeping();
        }
    }
}

impl Lane {
    /// The data plane it belongs to.
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    /// Sequence number of the last operation begun.
    pub fn seq(&self) -> u64 {
        self.seq
    }

    #[inline]
    fn mine(&self) -> LaneView<'_> {
        self.endpoint.control.lane(self.index)
    }

    #[inline]
    fn of<'a>(&self, peer: &'a Peer) -> LaneView<'a> {
        peer.control.lane(self.index)
    }

    #[inline]
    fn ring_peers(&self) {
        self.endpoint.ring_lane(self.index);
    }

    /// Executes `schedule` with these buffers.
    ///
    /// # Errors
    /// [`OpError`]; but for a call that was refused before it began (buffers, fork), the communicator is broken then.
    pub fn run(
        &mut self,
        schedule: &Sealed,
        input: LocalMem<'_>,
        output: LocalMem<'_>,
        args: &CallArgs,
    ) -> Result<(), OpError> {
        let endpoint = &self.endpoint;
        if let Some(first) = endpoint.broken.get() {
            return Err(OpError::Broken { rank: endpoint.rank, first: first.clone() });
        }
        if endpoint.abort.aborted() {
            let (rank, seq, what) = (endpoint.rank, self.seq + 1, schedule.header.to_string());
            return Err(OpError::Aborted { rank, seq, what, reason: endpoint.control.state().1 });
        }
        if crate::fork::in_child() {
            let (rank, what, parent) = (endpoint.rank, schedule.header.to_string(), endpoint.control.pid());
            return Err(OpError::Forked { rank, what, parent });
        }
        self.check_buffers(schedule, &input, &output)?;
        self.seq += 1;
        let rank16 = |r: Option<usize>| r.map_or(NO_RANK, |r| r as u16);
        let plan = self.endpoint.plan.load(Ordering::Acquire);
        let aside = Aside { dst: rank16(args.dst), src: rank16(args.src), digest: self.digest ^ plan };
        self.mine().flight().begin(self.seq, &schedule.header, schedule.moved);
        let mut wait = WaitCtx {
            header: &schedule.header,
            seq: self.seq,
            timeout: args.timeout,
            deadline: None,
            last_wait: schedule.last_wait,
            napped: false,
        };
        let done = self.run_steps(schedule, &input, &output, aside, args.scale, &mut wait);
        let stamp = wait.napped || schedule.slot_len == 0;
        match done {
            Ok(()) => {
                self.mine().set_progress(self.seq, STEP_DONE);
                self.ring_peers();
                // The lists as well: ranks that did not meet in this operation notice at their next meeting.
                self.digest = schedule.header.digest(self.digest) ^ (schedule.table ^ schedule.table >> 32) as u32;
                self.mine().tally().op();
                self.mine().flight().end(self.seq, State::Done, stamp);
                Ok(())
            }
            Err(e) => {
                self.mine().tally().failure();
                self.mine().flight().end(self.seq, State::Failed, true);
                // A reason that came from a peer is passed on as it is, so that the first one reaches everybody.
                match &e {
                    OpError::Left { reason, .. } if !reason.is_empty() => self.endpoint.fail(reason),
                    _ => self.endpoint.fail(&e.to_string()),
                }
                // From here on this rank touches nothing of its peers' in this lane, whatever its state says.
                self.mine().set_left(self.seq);
                if !schedule.reached.is_empty() || schedule.reaches_me {
                    self.let_peers_finish(&input, &output);
                }
                Err(e)
            }
        }
    }

    /// After a failure: peers may still be inside the operation, with this rank's buffers in their hands. Waits a moment for
    /// them; memory that one of them may still touch is kept for good rather than handed to another tensor.
    #[cold]
    fn let_peers_finish(&self, input: &LocalMem<'_>, output: &LocalMem<'_>) {
        let seq = self.seq;
        // A peer that enters the operation now looks at our state, which says that we left, or we see that it entered.
        semaphore::heavy_fence();
        // A peer's state is no answer: another of its threads may have set it while this lane's still copies.
        let inside = |p: &Peer| {
            let lane = self.of(p);
            let progress = lane.progress();
            progress >> 16 == seq && progress as u16 != STEP_DONE && lane.left() != seq && !p.dead()
        };
        let until = Instant::now() + PATIENCE;
        while self.endpoint.linked_peers().any(inside) {
            if Instant::now() >= until {
                let parts = input.parts.iter().chain(output.parts).copied();
                for buf in [input.buf, output.buf].into_iter().flatten().chain(parts) {
                    buf.keep();
                }
                return;
            }
            std::thread::yield_now();
        }
    }

    fn check_buffers(&mut self, s: &Sealed, input: &LocalMem<'_>, output: &LocalMem<'_>) -> Result<(), OpError> {
        for (which, mem, need) in [("input", input, s.in_bytes), ("output", output, s.out_bytes)] {
            if mem.len < need {
                let (rank, have, what) = (self.endpoint.rank, mem.len, s.header.to_string());
                return Err(OpError::Buffer { rank, which, have, need, what });
            }
        }
        let private = s.header.flags & FLAG_PRIVATE != 0;
        let overlap_ok = match input.overlap(output) {
            None => true,
            // The same first byte, or one rank's block inside the other buffer: what the in-place forms are.
            Some(d) => {
                d == 0
                    || s.in_place == Some(d)
                    || s.in_bytes != s.out_bytes && d.unsigned_abs() % s.in_bytes.min(s.out_bytes).max(1) == 0
            }
        };
        let why = if s.out_bytes > 0 && !output.writable {
            "the output is read-only memory"
        } else if [(input, s.in_bytes), (output, s.out_bytes)].iter().any(|(m, n)| *n > 0 && m.is_device() == private) {
            "the schedule is for the other kind of memory"
        } else if !overlap_ok {
            "input and output overlap by accident"
        } else {
            ""
        };
        if !why.is_empty() {
            return Err(OpError::Memory { rank: self.endpoint.rank, what: s.header.to_string(), why });
        }
        for (which, mem) in [("input", input), ("output", output)] {
            if !mem.arena.is_null() && mem.arena != self.endpoint.hbm.segment().base() {
                return Err(OpError::WrongCore { rank: self.endpoint.rank, which });
            }
        }
        let (stage, large) = (s.staged && !self.stage_ready, s.sends_large() && !self.large_ready);
        if stage || large { self.make_room(stage, large) } else { Ok(()) }
    }

    /// Allocates what the lane's first staged operation, or its first large payload, writes to.
    #[cold]
    fn make_room(&mut self, stage: bool, large: bool) -> Result<(), OpError> {
        let control = &self.endpoint.control;
        let room = if stage { control.commit_stage(self.index) } else { Ok(()) };
        let room = room.and_then(|()| if large { control.commit_large(self.index) } else { Ok(()) });
        if let Err(e) = room {
            let e = OpError::Stage { rank: self.endpoint.rank, reason: e.to_string() };
            self.endpoint.fail(&e.to_string());
            return Err(e);
        }
        self.stage_ready |= stage;
        self.large_ready |= large;
        Ok(())
    }

    fn run_steps(
        &mut self,
        s: &Sealed,
        input: &LocalMem<'_>,
        output: &LocalMem<'_>,
        aside: Aside,
        scale: f32,
        wait: &mut WaitCtx<'_>,
    ) -> Result<(), OpError> {
        let seq = self.seq;
        self.drain(seq, s.ahead(), wait)?;
        let mut bases = self.bases.take().unwrap_or_else(|| Box::new(Bases::none()));
        bases.begin(input.ptr, output.ptr, self.endpoint.nranks);
        bases.scales[self.endpoint.rank] = scale;
        if s.payload > 0 {
            let dst = self.mine().payload(seq, s.slot_len as usize);
            // SAFETY: the payload is at most LARGE_SLOT_BYTES (checked when the schedule was sealed) and lies in our own slot,
            // which `drain` found unused; the input has `in_bytes >= payload` bytes (checked above).
            unsafe { reduce::copy(dst, input.ptr, s.payload as usize) };
            self.mine().tally().copied(s.payload);
        }
        let inline = s.slot_len > 0 && s.slot_len as usize <= INLINE_BYTES;
        let buffers = match s.direct {
            true => [input.ptr.addr() as u64, s.in_bytes],
            false => [input.hbm.unwrap_or(0), output.hbm.unwrap_or(0)],
        };
        let words = (!inline).then(|| [buffers[0], buffers[1], s.table, u64::from(scale.to_bits())]);
        self.mine().publish(seq, &s.header, aside, words);
        self.ring_peers();
        let done = s.steps.iter().try_for_each(|step| self.step(s, step, &mut bases, wait));
        self.bases = Some(bases);
        done?;
        // What was read from a peer counts only if the peer had not left meanwhile: a failed rank's buffers may go.
        std::sync::atomic::fence(Ordering::Acquire);
        for p in &s.reached {
            self.still_there(usize::from(*p), wait)?;
        }
        Ok(())
    }

    /// Fails if a peer whose buffers this operation uses has left before it was done with the operation.
    #[inline]
    fn still_there(&self, peer: usize, wait: &WaitCtx<'_>) -> Result<(), OpError> {
        match self.endpoint.peer(peer) {
            Some(p) if !p.control.alive() && self.of(p).progress() < wait.seq << 16 | u64::from(STEP_DONE) => {
                Err(self.left(p, wait))
            }
            _ => Ok(()),
        }
    }

    #[cold]
    fn left(&self, p: &Peer, wait: &WaitCtx<'_>) -> OpError {
        let (state, reason) = p.control.state();
        let how = match state {
            RankState::Closed => "has freed its communicator".into(),
            RankState::Aborted => format!("aborted: {reason}"),
            _ => format!("failed: {reason}"),
        };
        let reason = if state == RankState::Failed { reason } else { String::new() };
        let (rank, seq, what) = (self.endpoint.rank, wait.seq, wait.header.to_string());
        OpError::Left { rank, seq, what, peer: p.rank, pid: p.pid, how, reason }
    }

    /// Waits until every linked peer is done with the operation that was `ahead` operations ago: its slot is to be reused.
    fn drain(&mut self, seq: u64, ahead: u64, wait: &mut WaitCtx<'_>) -> Result<(), OpError> {
        let Some(need) = seq.checked_sub(ahead).filter(|n| *n > self.drained) else { return Ok(()) };
        let mut least = u64::MAX;
        for p in 0..self.endpoint.nranks {
            if self.endpoint.peer(p).is_none() {
                continue;
            }
            self.wait_progress(p, need << 16 | u64::from(STEP_DONE), wait)?;
            if let Some(peer) = self.endpoint.peer(p) {
                let progress = self.of(peer).progress();
                let done =
                    if progress as u16 == STEP_DONE { progress >> 16 } else { (progress >> 16).saturating_sub(1) };
                least = least.min(done);
            }
        }
        self.drained = least.min(seq - 1);
        Ok(())
    }

    fn wait_progress(&self, peer: usize, target: u64, wait: &mut WaitCtx<'_>) -> Result<(), OpError> {
        let Some(p) = self.endpoint.peer(peer) else {
            return Err(OpError::NotLinked { rank: self.endpoint.rank, peer });
        };
        let theirs = self.of(p);
        if theirs.progress() >= target {
            return Ok(());
        }
        self.mine().tally().wait();
        wait.deadline = None;
        semaphore::wait(
            self.mine().bell(),
            self.endpoint.policy,
            || theirs.progress() >= target,
            || self.check(wait, |q| q.progress() < target, peer),
        )
    }

    fn wait_arrival(&self, peer: usize, wait: &mut WaitCtx<'_>) -> Result<(), OpError> {
        let Some(p) = self.endpoint.peer(peer) else {
            return Err(OpError::NotLinked { rank: self.endpoint.rank, peer });
        };
        let seq = wait.seq;
        let theirs = self.of(p);
        if theirs.arrived(seq) {
            return Ok(());
        }
        self.mine().tally().wait();
        wait.deadline = None;
        semaphore::wait(
            self.mine().bell(),
            self.endpoint.policy,
            || theirs.arrived(seq),
            || self.check(wait, |q| !q.arrived(seq), peer),
        )
    }

    /// Looks at everything that can end a wait early. `missing` tells which peers the step still lacks.
    #[cold]
    fn check(
        &self,
        wait: &mut WaitCtx<'_>,
        missing: impl Fn(LaneView<'_>) -> bool,
        waited: usize,
    ) -> Result<(), OpError> {
        let endpoint = &*self.endpoint;
        let (rank, seq) = (endpoint.rank, wait.seq);
        wait.napped = true;
        self.mine().tally().nap();
        let what = || wait.header.to_string();
        if endpoint.abort.aborted() {
            return Err(OpError::Aborted { rank, seq, what: what(), reason: endpoint.control.state().1 });
        }
        if let Some(first) = endpoint.broken.get() {
            return Err(OpError::Broken { rank, first: first.clone() });
        }
        // A peer that is gone ends the wait if this step lacks it, or a later one will.
        let last = seq << 16 | u64::from(wait.last_wait);
        let lacking = |p: &Peer| missing(self.of(p)) || self.of(p).progress() < last;
        for p in endpoint.linked_peers() {
            // The last look is after the state: it may have finished this very operation before it left.
            if lacking(p) && !p.control.alive() && lacking(p) {
                return Err(self.left(p, wait));
            }
            if lacking(p) && p.dead() && lacking(p) {
                let last = self.of(p).last_seen(seq);
                return Err(OpError::Died { rank, seq, what: what(), peer: p.rank, pid: p.pid, last });
            }
        }
        let now = Instant::now();
        // A time-out beyond what the clock can say is none.
        let Some(end) = now.checked_add(wait.timeout) else { return Ok(()) };
        let deadline = *wait.deadline.get_or_insert(end);
        if now < deadline {
            return Ok(());
        }
        let mut absent: Vec<Absent> = Vec::new();
        let mut come: Vec<Absent> = Vec::new();
        for p in endpoint.linked_peers().filter(|p| missing(self.of(p)) || p.rank == waited) {
            let mut last = self.of(p).last_seen(seq);
            if p.pid.here().is_some_and(crate::peers::is_stopped) {
                last += "; its process is stopped (SIGSTOP, a debugger)";
            }
            let a = Absent { rank: p.rank, pid: p.pid, last };
            // Who has not come at all goes first: those who have come may be waiting for it themselves.
            if self.of(p).progress() >> 16 < seq { absent.push(a) } else { come.push(a) }
        }
        absent.append(&mut come);
        Err(OpError::Timeout { rank, seq, what: what(), after: wait.timeout, absent })
    }

    #[inline]
    fn step(&mut self, s: &Sealed, step: &Step, bases: &mut Bases, wait: &mut WaitCtx<'_>) -> Result<(), OpError> {
        match *step {
            Step::Arrival(peer) => self.arrival(s, usize::from(peer), bases, wait)?,
            Step::Wait { peer, step } => {
                self.wait_progress(usize::from(peer), wait.seq << 16 | u64::from(step), wait)?
            }
            Step::SendsToMe(peer) => self.meant_for_me(s, usize::from(peer), true)?,
            Step::ReceivesFromMe(peer) => self.meant_for_me(s, usize::from(peer), false)?,
            Step::Signal(step) => {
                self.mine().set_progress(wait.seq, step);
                self.ring_peers();
            }
            Step::Copy { dst, src: At(Place::PeerIn(peer), from), len } if s.direct => {
                let dst = self.at(s, dst, bases, wait.seq);
                // SAFETY: as for Copy.
                unsafe { self.read_private(usize::from(peer), from, dst, len, bases, wait)? };
                self.mine().tally().copied(len);
            }
            Step::Copy { dst, src, len } => {
                let (dst, src) = (self.at(s, dst, bases, wait.seq), self.at(s, src, bases, wait.seq));
                // SAFETY: `at` gives pointers into memory that is mapped for the whole operation; the schedule was
                // sealed, so position + len lies inside in_bytes/out_bytes (checked here against the caller's buffers
                // and, on arrival, the peer's), the slot or the staging half; no other rank writes `dst` now.
                unsafe {
                    match s.streaming {
                        true => reduce::copy_nt(dst, src, len as usize),
                        false => reduce::copy(dst, src, len as usize),
                    }
                };
                self.mine().tally().copied(len);
            }
            Step::Reduce { dst, first, n, count, op } => {
                let mut sources = [std::ptr::null::<u8>(); MAX_LOCAL_RANKS];
                let listed = &s.sources[first as usize..first as usize + n as usize];
                for (to, from) in sources.iter_mut().zip(listed) {
                    *to = self.at(s, *from, bases, wait.seq);
                }
                let dst = self.at(s, dst, bases, wait.seq);
                // SAFETY: as for Copy, for dst and each of the n sources; dst equals a source or overlaps none.
                unsafe {
                    if op == ReduceOp::PreMulSum {
                        let mut scales = [1.0; MAX_LOCAL_RANKS];
                        for (to, from) in scales.iter_mut().zip(listed) {
                            *to = self.scale_of(*from, bases);
                        }
                        let scales = &scales[..n as usize];
                        reduce::reduce_scaled(s.header.dtype, dst, &sources[..n as usize], scales, count as usize)
                    } else {
                        reduce::reduce(op, s.header.dtype, dst, &sources[..n as usize], count as usize)
                    }
                };
                self.mine().tally().reduced(u64::from(n) * count * s.header.dtype.size() as u64);
            }
            Step::Average { dst, count, n } => {
                let dst = self.at(s, dst, bases, wait.seq);
                // SAFETY: as for Copy.
                unsafe { reduce::scale_avg(s.header.dtype, dst, count as usize, n as usize) };
            }
            Step::Swap { a, b, len } => {
                let (a, b) = (self.at(s, a, bases, wait.seq), self.at(s, b, bases, wait.seq));
                // SAFETY: as for Copy; the two ranges belong to different ranks' buffers, and the pair's other rank
                // leaves both alone (the lower rank of a pair swaps).
                unsafe { std::ptr::swap_nonoverlapping(a, b, len as usize) };
                self.mine().tally().copied(2 * len);
            }
        }
        Ok(())
    }

    #[inline]
    fn arrival(&mut self, s: &Sealed, peer: usize, bases: &mut Bases, wait: &mut WaitCtx<'_>) -> Result<(), OpError> {
        self.wait_arrival(peer, wait)?;
        let Some(p) = self.endpoint.peer(peer) else {
            return Err(OpError::NotLinked { rank: self.endpoint.rank, peer });
        };
        let seq = wait.seq;
        if let Err(theirs) = self.of(p).same_call(seq, &s.header) {
            let (rank, mine) = (self.endpoint.rank, s.header.to_string());
            return Err(OpError::Mismatch { rank, seq, mine, peer, theirs });
        }
        let plan = self.endpoint.plan.load(Ordering::Acquire);
        if self.of(p).aside(seq).digest != self.digest ^ plan {
            let rank = self.endpoint.rank;
            // Where it began, if that is not long ago: in a one-way operation the two need not have met.
            let began = (seq.saturating_sub(SLOTS as u64 - 1).max(1)..seq).find_map(|at| {
                let (mine, theirs) = (self.mine().call(at)?, self.of(p).call(at)?);
                (mine != theirs).then_some(OpError::Mismatch { rank, seq: at, mine, peer, theirs })
            });
            if let Some(e) = began {
                return Err(e);
            }
            let mine = s.header.to_string();
            let theirs =
                format!("{mine} after other operations than ours, on other rings, or by another WCCL_TUNE_FILE");
            return Err(OpError::Mismatch { rank, seq, mine, peer, theirs });
        }
        // A peer that announced this operation and then gave it up, for want of this rank perhaps, does not take part.
        self.still_there(peer, wait)?;
        let Some(p) = self.endpoint.peer(peer) else {
            return Err(OpError::NotLinked { rank: self.endpoint.rank, peer });
        };
        let inline = s.slot_len > 0 && s.slot_len as usize <= INLINE_BYTES;
        if !inline {
            let [input, output, table, scale] = self.of(p).words(seq);
            if table != s.table {
                let (rank, mine) = (self.endpoint.rank, s.header.to_string());
                let theirs = format!("{mine} with other counts or pairs in its lists");
                return Err(OpError::Mismatch { rank, seq, mine, peer, theirs });
            }
            bases.scales[peer] = f32::from_bits(scale as u32);
            if s.direct {
                // That the calls match fixes how long the input is; what a peer of another make announces is looked at here.
                if output < s.extents[peer].0 {
                    return Err(OpError::BadPeer { rank: self.endpoint.rank, seq, peer });
                }
                bases.private_in[peer] = input;
            } else if s.header.flags & FLAG_PRIVATE == 0 {
                // A rank without that buffer (a reduce's output off the root) announces any offset; only one that the
                // steps use must fit.
                let (need_in, need_out) = s.extents[peer];
                let (a, b) = (p.hbm.at(input, need_in), p.hbm.at(output, need_out));
                if a.is_none() && need_in > 0 || b.is_none() && need_out > 0 {
                    return Err(OpError::BadPeer { rank: self.endpoint.rank, seq, peer });
                }
                *bases.peer_in[peer].get_mut() = a.unwrap_or(std::ptr::null_mut());
                *bases.peer_out[peer].get_mut() = b.unwrap_or(std::ptr::null_mut());
            }
        }
        Ok(())
    }

    /// Copies from the input of an arrived peer, in its private memory.
    ///
    /// # Safety
    /// `dst` must be valid for writing `len` bytes.
    unsafe fn read_private(
        &self,
        peer: usize,
        from: u64,
        dst: *mut u8,
        len: u64,
        bases: &Bases,
        wait: &WaitCtx<'_>,
    ) -> Result<(), OpError> {
        let (rank, seq) = (self.endpoint.rank, wait.seq);
        let Some(p) = self.endpoint.peer(peer) else { return Err(OpError::NotLinked { rank, peer }) };
        // SAFETY: the caller's contract.
        let read = unsafe { p.space.read(bases.private_in[peer].wrapping_add(from), dst, len) };
        read.or_else(|why| {
            // A rank that leaves takes its buffers along: that it left is what there is to say.
            self.still_there(peer, wait)?;
            let (what, pid) = (wait.header.to_string(), p.pid);
            if why == Unreadable::Gone || p.dead() {
                return Err(OpError::Died { rank, seq, what, peer, pid, last: self.of(p).last_seen(seq) });
            }
            Err(OpError::Unreadable { rank, seq, what, peer, pid, why })
        })
    }

    /// Whether an arrived peer sends to this rank, respectively receives from it.
    fn meant_for_me(&self, s: &Schedule, peer: usize, sends: bool) -> Result<(), OpError> {
        let aside = self.endpoint.peer(peer).map(|p| self.of(p).aside(self.seq));
        let whom = aside.map_or(NO_RANK, |a| if sends { a.dst } else { a.src });
        if usize::from(whom) == self.endpoint.rank {
            return Ok(());
        }
        let (mine, theirs) = if sends { ("from", "to") } else { ("to", "from") };
        let named = if whom == NO_RANK { "nobody".into() } else { format!("rank {whom}") };
        let mine = format!("{} {mine} rank {peer}", s.header);
        let theirs = format!("{} {theirs} {named}", s.header);
        Err(OpError::Mismatch { rank: self.endpoint.rank, seq: self.seq, mine, peer, theirs })
    }

    #[inline]
    fn at(&self, s: &Schedule, at: At, bases: &Bases, seq: u64) -> *mut u8 {
        let base = match at.0 {
            Place::In => bases.own_in.load(Ordering::Relaxed),
            Place::Out => bases.own_out.load(Ordering::Relaxed),
            Place::PeerIn(p) => bases.peer_in[usize::from(p)].load(Ordering::Relaxed),
            Place::PeerOut(p) => bases.peer_out[usize::from(p)].load(Ordering::Relaxed),
            Place::Slot(r) => self.lane_of(r).payload(seq, s.slot_len as usize),
            Place::Stage(r, half) => self.lane_of(r).stage(false, usize::from(half)),
            Place::Result(r, half) => self.lane_of(r).stage(true, usize::from(half)),
        };
        base.wrapping_add(at.1 as usize)
    }

    /// What a source of a pre-scaled sum is multiplied by.
    #[inline]
    fn scale_of(&self, at: At, bases: &Bases) -> f32 {
        at.0.scaled_by(self.endpoint.rank).map_or(1.0, |r| bases.scales[r])
    }

    #[inline]
    fn lane_of(&self, rank: u16) -> LaneView<'_> {
        match self.endpoint.peer(usize::from(rank)) {
            Some(p) => self.of(p),
            // Sealed schedules name a peer's memory only after its Arrival step, which fails for one without a link.
            None => self.mine(),
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.close();
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // One that was never used can be taken again; another's sequence would have to be known to go on.
        if self.seq == 0 {
            self.endpoint.taken[self.index].store(false, Ordering::Release);
        }
    }
}

struct WaitCtx<'a> {
    header: &'a OpHeader,
    seq: u64,
    timeout: Duration,
    deadline: Option<Instant>,
    last_wait: u16,
    /// Some wait of the operation was not over soon.
    napped: bool,
}

/// Where the buffers of an operation lie. Atomic pointers only so that a lane can be moved between threads and looked at from
/// several; nobody else writes them, and a relaxed load is a plain one.
#[derive(Debug)]
struct Bases {
    own_in: AtomicPtr<u8>,
    own_out: AtomicPtr<u8>,
    peer_in: [AtomicPtr<u8>; MAX_LOCAL_RANKS],
    peer_out: [AtomicPtr<u8>; MAX_LOCAL_RANKS],
    /// Addresses of inputs in the peers' own address spaces.
    private_in: [u64; MAX_LOCAL_RANKS],
    /// Scales of a pre-scaled sum, by rank.
    scales: [f32; MAX_LOCAL_RANKS],
}

impl Bases {
    fn none() -> Bases {
        let all = || std::array::from_fn(|_| AtomicPtr::default());
        let (own_in, own_out) = Default::default();
        let (private_in, scales) = ([0; MAX_LOCAL_RANKS], [1.0; MAX_LOCAL_RANKS]);
        Bases { own_in, own_out, peer_in: all(), peer_out: all(), private_in, scales }
    }

    /// For an operation of `n` ranks: nothing of the one before is left.
    #[inline]
    fn begin(&mut self, own_in: *mut u8, own_out: *mut u8, n: usize) {
        (*self.own_in.get_mut(), *self.own_out.get_mut()) = (own_in, own_out);
        for p in self.peer_in[..n].iter_mut().chain(&mut self.peer_out[..n]) {
            *p.get_mut() = std::ptr::null_mut();
        }
        self.private_in[..n].fill(0);
        self.scales[..n].fill(1.0);
    }
}

/// Why a schedule is not executable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("step {step} of the schedule for {what} is invalid: {why}; this is an error of wccl, please report it")]
pub struct BadSchedule {
    /// Index of the step.
    pub step: usize,
    /// The operation.
    pub what: String,
    /// What is wrong.
    pub why: String,
}

impl Schedule {
    /// How many operations a rank may be ahead of its slowest reader in this one.
    pub fn ahead(&self) -> u64 {
        if self.slot_len > SLOT_BYTES as u64 { LARGE_SLOTS as u64 } else { SLOTS as u64 }
    }

    /// Whether this rank writes a payload that has no room beside its record.
    fn sends_large(&self) -> bool {
        self.payload > 0 && self.slot_len > SLOT_BYTES as u64
    }

    /// Whether any step uses `place`.
    fn touches(&self, place: Place) -> bool {
        self.sources.iter().any(|at| at.0 == place)
            || self.steps.iter().any(|s| match s {
                Step::Copy { dst, src, .. } => dst.0 == place || src.0 == place,
                Step::Swap { a, b, .. } => a.0 == place || b.0 == place,
                Step::Reduce { dst, .. } | Step::Average { dst, .. } => dst.0 == place,
                _ => false,
            })
    }

    /// Whether a step uses a peer's private memory in another way than to copy from its input.
    fn misuses_private(&self, step: &Step) -> bool {
        let peers = |at: &At| self.direct && matches!(at.0, Place::PeerIn(_) | Place::PeerOut(_));
        match step {
            Step::Copy { dst, src, .. } => peers(dst) || self.direct && matches!(src.0, Place::PeerOut(_)),
            Step::Swap { a, b, .. } => peers(a) || peers(b),
            // No reduction of a direct schedule has a peer's input among its sources.
            Step::Reduce { dst, .. } => peers(dst) || self.sources.iter().any(peers),
            Step::Average { dst, .. } => peers(dst),
            _ => false,
        }
    }

    /// Checks that every step stays inside its buffers and that peers are used only after they arrived. Everything the
    /// sequencer relies on for memory safety is checked here, once, when a schedule is compiled.
    pub fn seal(self, rank: usize, nranks: usize) -> Result<Sealed, BadSchedule> {
        let dtype = self.header.dtype;
        let bad = |step: usize, why: String| BadSchedule { step, what: self.header.to_string(), why };
        if nranks > MAX_LOCAL_RANKS || rank >= nranks {
            return Err(bad(0, format!("rank {rank} of {nranks}")));
        }
        if self.slot_len > LARGE_SLOT_BYTES as u64 || self.payload > self.slot_len || self.payload > self.in_bytes {
            return Err(bad(0, format!("payload {} in a slot of {}", self.payload, self.slot_len)));
        }
        if self.table != 0 && self.slot_len > 0 && self.slot_len as usize <= INLINE_BYTES {
            return Err(bad(0, "a record with inline payload has no room for the digest of a table".into()));
        }
        let scaled = self.header.redop == Some(ReduceOp::PreMulSum);
        if scaled && self.slot_len > 0 && self.slot_len as usize <= INLINE_BYTES {
            return Err(bad(0, "a record with inline payload has no room for the scale of a pre-scaled sum".into()));
        }
        if scaled && !dtype.is_float() {
            return Err(bad(0, format!("a pre-scaled sum of {dtype}")));
        }
        let private = self.header.flags & FLAG_PRIVATE != 0;
        if self.direct && (!private || self.slot_len > 0) {
            return Err(bad(0, "only a schedule for private memory without payload is direct".into()));
        }
        if let Some(i) = self.steps.iter().position(|s| self.misuses_private(s)) {
            return Err(bad(i, "a peer's private memory can be copied from and nothing else".into()));
        }
        let (mut signalled, mut last_wait) = (1u16, 0u16);
        let mut arrived = vec![false; nranks];
        arrived[rank] = true;
        // What a step reads and what it writes of one buffer must be the same or apart; declared in-place buffers are one.
        let clash = |a: At, b: At, len: u64, same_is_fine: bool| {
            let lies = |at: At| match (at.0, self.in_place) {
                (Place::In, Some(d)) => (Place::Out, i128::from(at.1) + i128::from(d)),
                (place, _) => (place, i128::from(at.1)),
            };
            let ((p, x), (q, y), len) = (lies(a), lies(b), i128::from(len));
            p == q && if x == y { !same_is_fine && len > 0 } else { x < y + len && y < x + len }
        };
        let mut extents = vec![(0u64, 0u64); nranks];
        let mut inside = |at: At, len: u64, arrived: &[bool], step: usize| -> Result<(), BadSchedule> {
            if let Place::Stage(_, half @ 2..) | Place::Result(_, half @ 2..) = at.0 {
                return Err(bad(step, format!("{at:?}: half {half} of two")));
            }
            let (limit, who) = match at.0 {
                Place::In => (self.in_bytes, rank),
                Place::Out => (self.out_bytes, rank),
                Place::PeerIn(p) => (self.peer_in_bytes, usize::from(p)),
                Place::PeerOut(p) => (self.peer_out_bytes, usize::from(p)),
                Place::Slot(r) => (self.slot_len, usize::from(r)),
                Place::Stage(r, _) | Place::Result(r, _) => {
                    (if self.staged { STAGE_BYTES as u64 } else { 0 }, usize::from(r))
                }
            };
            if !arrived.get(who).copied().unwrap_or(false) {
                return Err(bad(step, format!("{at:?} is used before rank {who} has arrived")));
            }
            let peer_memory = matches!(at.0, Place::PeerIn(_) | Place::PeerOut(_));
            if peer_memory && (who == rank || private && !self.direct) {
                return Err(bad(step, format!("{at:?} is not memory of a peer that this schedule reaches")));
            }
            if peer_memory && self.slot_len > 0 && self.slot_len as usize <= INLINE_BYTES {
                return Err(bad(step, format!("{at:?}: a record with inline payload has no offsets")));
            }
            match at.1.checked_add(len) {
                Some(end) if end <= limit => {
                    match at.0 {
                        Place::PeerIn(_) => extents[who].0 = extents[who].0.max(end),
                        Place::PeerOut(_) => extents[who].1 = extents[who].1.max(end),
                        _ => {}
                    }
                    Ok(())
                }
                _ => Err(bad(step, format!("{len} bytes at {at:?}, limit {limit}"))),
            }
        };
        // Inputs are the callers', who may have lent them for reading; of a peer's control segment only its bells are written.
        let mine = |at: At, step: usize| match at.0 {
            Place::Out | Place::PeerOut(_) => Ok(()),
            Place::Slot(r) | Place::Stage(r, _) | Place::Result(r, _) if usize::from(r) == rank => Ok(()),
            _ => Err(bad(step, format!("{at:?} is not rank {rank}'s to write"))),
        };
        for (i, step) in self.steps.iter().enumerate() {
            match *step {
                Step::Copy { dst, .. } | Step::Reduce { dst, .. } | Step::Average { dst, .. } => mine(dst, i)?,
                Step::Swap { a, b, .. } => mine(a, i).and_then(|()| mine(b, i))?,
                _ => {}
            }
            match *step {
                Step::Arrival(p) | Step::SendsToMe(p) | Step::ReceivesFromMe(p) | Step::Wait { peer: p, .. }
                    if usize::from(p) >= nranks || usize::from(p) == rank =>
                {
                    return Err(bad(i, format!("waits for rank {p} of {nranks}")));
                }
                Step::Arrival(p) => arrived[usize::from(p)] = true,
                // The step shares a word with the sequence: it must rise, and never look like "arrived" or "done".
                Step::Signal(step) if step <= signalled || step == STEP_DONE => {
                    return Err(bad(i, format!("signals step {step} after {signalled}")));
                }
                Step::Signal(step) => signalled = step,
                Step::Wait { step, .. } if step < 2 || step == STEP_DONE => {
                    return Err(bad(i, format!("waits for step {step}")));
                }
                Step::Wait { step, .. } => last_wait = last_wait.max(step),
                Step::SendsToMe(_) | Step::ReceivesFromMe(_) => {}
                Step::Copy { dst, src, len } => {
                    inside(dst, len, &arrived, i)?;
                    inside(src, len, &arrived, i)?;
                    if clash(dst, src, len, false) {
                        return Err(bad(i, "copies onto itself".into()));
                    }
                }
                Step::Swap { a, b, len } => {
                    inside(a, len, &arrived, i)?;
                    inside(b, len, &arrived, i)?;
                    if a.0 == b.0 || clash(a, b, len, false) {
                        return Err(bad(i, "swaps a buffer with itself".into()));
                    }
                }
                // The peers' scales are known only where all agree that it is such a sum.
                Step::Reduce { op: ReduceOp::PreMulSum, .. } if !scaled => {
                    return Err(bad(i, "a pre-scaled sum in another operation".into()));
                }
                Step::Reduce { dst, first, n, count, .. } => {
                    let len = count.checked_mul(dtype.size() as u64).ok_or_else(|| bad(i, "size overflows".into()))?;
                    inside(dst, len, &arrived, i)?;
                    let end = first as usize + n as usize;
                    if n == 0 || n as usize > MAX_LOCAL_RANKS || end > self.sources.len() {
                        return Err(bad(i, format!("{n} sources from {first} of {}", self.sources.len())));
                    }
                    for src in &self.sources[first as usize..end] {
                        inside(*src, len, &arrived, i)?;
                        if clash(dst, *src, len, true) {
                            return Err(bad(i, "reduces into a part of its source".into()));
                        }
                    }
                }
                Step::Average { dst, count, n } => {
                    let len = count.checked_mul(dtype.size() as u64).ok_or_else(|| bad(i, "size overflows".into()))?;
                    inside(dst, len, &arrived, i)?;
                    if n == 0 {
                        return Err(bad(i, "divides by zero".into()));
                    }
                }
            }
        }
        let reached =
            (0..nranks as u16).filter(|p| self.touches(Place::PeerIn(*p)) || self.touches(Place::PeerOut(*p)));
        let reached: Vec<u16> = reached.collect();
        // Peers reach this rank's buffers in every schedule whose records tell where they are.
        let reaches_me = (!private || self.direct) && self.slot_len == 0;
        // The buffers of a group are views of all device memory; what it moves is what it copies.
        let copies = self.steps.iter().map(|s| if let Step::Copy { len, .. } = s { *len } else { 0 });
        let moved = match self.header.op {
            crate::peers::Op::Group => copies.sum(),
            _ => self.in_bytes.max(self.out_bytes),
        };
        let streaming = reaches_me && self.header.redop.is_none() && moved >= STREAM_BYTES;
        Ok(Sealed { schedule: self, reached, extents, reaches_me, last_wait, moved, streaming })
    }
}

/// A schedule that was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sealed {
    schedule: Schedule,
    /// Peers whose buffers the steps touch.
    reached: Vec<u16>,
    /// How far into each rank's input and output the steps reach, in bytes.
    extents: Vec<(u64, u64)>,
    /// Whether peers may touch this rank's buffers.
    reaches_me: bool,
    /// Highest step waited for.
    last_wait: u16,
    /// Bytes of the larger of this rank's buffers; of a group, bytes this rank copies.
    moved: u64,
    /// Whether copies go past the caches: nothing that a large move writes is read again by it.
    streaming: bool,
}

impl std::ops::Deref for Sealed {
    type Target = Schedule;
    fn deref(&self) -> &Schedule {
        &self.schedule
    }
}
