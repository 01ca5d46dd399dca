//! The step language of schedules, and the sequencer that executes them.
//!
//! `host-runtime` compiles a collective into a [`Schedule`] for this rank, once; [`Endpoint::run`] executes it as often
//! as the user calls. In the steady state it allocates nothing, takes no lock, formats nothing and calls no component.
//!
//! An operation runs so: wait until the slot may be reused; put a small payload beside the record; publish the record
//! (header, buffer offsets) and the step "arrived"; execute the steps; publish "done". Steps that touch a peer's buffers
//! come after [`Step::Arrival`] of that peer, which compares the headers and checks the peer's offsets against its
//! mapping, so no byte moves between calls that do not match and none outside what the peer granted.
//!
//! One operation at a time: `run` takes the endpoint by `&mut`. [`crate::peers::Abort`] works from any thread.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::dtype::ReduceOp;
use crate::hbm::{Hbm, HbmBuf};
use crate::limits::{INLINE_BYTES, MAX_LOCAL_RANKS, SLOT_BYTES, SLOTS, STAGE_BYTES};
use crate::peers::{Abort, Aside, Control, FLAG_PRIVATE, NO_RANK, OpHeader, Peer, RankState, STEP_DONE};
use crate::reduce;
use crate::segment::SegmentError;
use crate::semaphore::{self, WaitPolicy, publish_fence};

/// How long a failed rank waits for peers that may still use its buffers.
const PATIENCE: Duration = Duration::from_millis(500);

/// A buffer that a step reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// This rank's input.
    In,
    /// This rank's output.
    Out,
    /// A peer's input in its device memory.
    PeerIn(u16),
    /// A peer's output in its device memory.
    PeerOut(u16),
    /// The payload beside a rank's arrival record; this rank's own included.
    Slot(u16),
    /// A rank's staging half for input pieces; this rank's own included.
    Stage(u16, u8),
    /// A rank's staging half for results; this rank's own included.
    Result(u16, u8),
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
    /// Bytes of the input that travel beside the record (at most [`SLOT_BYTES`]); 0 for none.
    pub payload: u64,
    /// Bytes the payload has on any rank; decides where it lies.
    pub slot_len: u64,
    /// Bytes of this rank's input.
    pub in_bytes: u64,
    /// Bytes of this rank's output.
    pub out_bytes: u64,
    /// Bytes of a peer's input, where it is one that the steps read.
    pub peer_in_bytes: u64,
    /// Bytes of a peer's output, where it is one that the steps touch.
    pub peer_out_bytes: u64,
    /// Whether staging halves are used.
    pub staged: bool,
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
            life: PhantomData,
        })
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
    pub pid: i32,
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
        pid: i32,
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
        pid: i32,
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
        "operation #{seq} failed on rank {rank}: rank {peer} announced a buffer outside its device memory; it runs another version or is corrupt"
    )]
    BadPeer {
        /// This rank.
        rank: usize,
        /// Sequence number.
        seq: u64,
        /// The peer.
        peer: usize,
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
    /// Memory for staging is not to be had.
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

/// Counters of one endpoint; plain numbers, read between operations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Operations completed.
    pub ops: u64,
    /// Bytes copied by this rank, payloads included.
    pub copied: u64,
    /// Bytes read as sources of reductions by this rank.
    pub reduced: u64,
    /// Waits that did not find their condition at once.
    pub waits: u64,
}

/// One rank's data plane of one communicator.
#[derive(Debug)]
pub struct Endpoint {
    rank: usize,
    nranks: usize,
    control: Arc<Control>,
    hbm: Arc<Hbm>,
    peers: Vec<Option<Peer>>,
    seq: u64,
    /// Every linked peer is known to be done with this operation.
    drained: u64,
    policy: WaitPolicy,
    abort: Abort,
    broken: Option<String>,
    stage_ready: bool,
    digest: u32,
    counters: Counters,
}

impl Endpoint {
    /// The data plane of `rank` of `nranks`, before any link. `nranks` is at most [`MAX_LOCAL_RANKS`].
    pub fn new(rank: usize, nranks: usize, hbm: Arc<Hbm>, policy: WaitPolicy) -> Result<Endpoint, SegmentError> {
        let control = Arc::new(Control::create(rank as u32, nranks as u32)?);
        let abort = Abort::new(control.clone());
        let peers = (0..nranks).map(|_| None).collect();
        Ok(Endpoint {
            rank,
            nranks,
            control,
            hbm,
            peers,
            seq: 0,
            drained: 0,
            policy,
            abort,
            broken: None,
            stage_ready: false,
            digest: 0,
            counters: Counters::default(),
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
    pub fn link(&mut self, peer: Peer) {
        if let Some(place @ None) = self.peers.get_mut(peer.rank) {
            *place = Some(peer);
        }
    }

    /// Whether `rank` is linked (a rank is linked to itself).
    pub fn linked(&self, rank: usize) -> bool {
        rank == self.rank || self.peers.get(rank).is_some_and(Option::is_some)
    }

    /// Handle that ends operations from another thread.
    pub fn abort_handle(&self) -> Abort {
        self.abort.clone()
    }

    /// Counters so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Sequence number of the last operation begun.
    pub fn seq(&self) -> u64 {
        self.seq
    }

    /// Notes a digest of the rings this rank works with; ranks that were given different ones notice at their first meeting.
    pub fn set_plan(&mut self, digest: u32) {
        self.digest ^= digest;
    }

    /// Leaves the group because this rank cannot go on; peers learn why instead of waiting.
    pub fn fail(&mut self, why: &str) {
        self.control.leave(RankState::Failed, why);
        self.ring_peers();
        self.broken.get_or_insert_with(|| why.to_string());
    }

    /// Leaves the group in good order; peers that still wait for this rank learn it.
    pub fn close(&self) {
        self.control.leave(RankState::Closed, "");
        self.ring_peers();
    }

    fn ring_peers(&self) {
        publish_fence();
        for peer in self.peers.iter().flatten() {
            peer.control.bell().ring_if_sleeping();
        }
    }

    /// Executes `schedule` with these buffers. `timeout` bounds each wait, from when this rank has to sleep in it: an
    /// operation that moves on does not time out. `dst` and `src` are the peers of a send_recv.
    pub fn run(
        &mut self,
        schedule: &Sealed,
        input: LocalMem<'_>,
        output: LocalMem<'_>,
        dst: Option<usize>,
        src: Option<usize>,
        timeout: Duration,
    ) -> Result<(), OpError> {
        if let Some(first) = &self.broken {
            return Err(OpError::Broken { rank: self.rank, first: first.clone() });
        }
        if self.abort.aborted() {
            let (rank, seq, what) = (self.rank, self.seq + 1, schedule.header.to_string());
            return Err(OpError::Aborted { rank, seq, what, reason: self.control.state().1 });
        }
        self.check_buffers(schedule, &input, &output)?;
        self.seq += 1;
        let rank16 = |r: Option<usize>| r.map_or(NO_RANK, |r| r as u16);
        let aside = Aside { dst: rank16(dst), src: rank16(src), digest: self.digest };
        match self.run_steps(schedule, &input, &output, aside, timeout) {
            Ok(()) => {
                self.control.set_progress(self.seq, STEP_DONE);
                self.ring_peers();
                self.digest = schedule.header.digest(self.digest);
                self.counters.ops += 1;
                Ok(())
            }
            Err(e) => {
                // A reason that came from a peer is passed on as it is, so that the first one reaches everybody.
                match &e {
                    OpError::Left { reason, .. } if !reason.is_empty() => self.fail(reason),
                    _ => self.fail(&e.to_string()),
                }
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
        let inside = |p: &Peer| {
            let progress = p.control.progress();
            progress >> 16 == seq && progress as u16 != STEP_DONE && p.control.alive() && !p.dead()
        };
        let until = Instant::now() + PATIENCE;
        while self.peers.iter().flatten().any(inside) {
            if Instant::now() >= until {
                for buf in [input.buf, output.buf].into_iter().flatten() {
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
                let (rank, have, what) = (self.rank, mem.len, s.header.to_string());
                return Err(OpError::Buffer { rank, which, have, need, what });
            }
        }
        let private = s.header.flags & FLAG_PRIVATE != 0;
        let overlap_ok = match input.overlap(output) {
            None => true,
            // The same first byte, or one rank's block inside the other buffer: what the in-place forms are.
            Some(d) => {
                d == 0 || s.in_bytes != s.out_bytes && d.unsigned_abs() % s.in_bytes.min(s.out_bytes).max(1) == 0
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
            return Err(OpError::Memory { rank: self.rank, what: s.header.to_string(), why });
        }
        for (which, mem) in [("input", input), ("output", output)] {
            if !mem.arena.is_null() && mem.arena != self.hbm.segment().base() {
                return Err(OpError::WrongCore { rank: self.rank, which });
            }
        }
        if s.staged && !self.stage_ready {
            if let Err(e) = self.control.commit_stage() {
                let e = OpError::Stage { rank: self.rank, reason: e.to_string() };
                self.fail(&e.to_string());
                return Err(e);
            }
            self.stage_ready = true;
        }
        Ok(())
    }

    fn run_steps(
        &mut self,
        s: &Sealed,
        input: &LocalMem<'_>,
        output: &LocalMem<'_>,
        aside: Aside,
        timeout: Duration,
    ) -> Result<(), OpError> {
        let seq = self.seq;
        let mut wait = WaitCtx { header: &s.header, seq, timeout, deadline: None, last_wait: s.last_wait };
        self.drain(seq, &mut wait)?;
        let mut bases = Bases {
            own_in: input.ptr,
            own_out: output.ptr,
            peer_in: [std::ptr::null_mut(); MAX_LOCAL_RANKS],
            peer_out: [std::ptr::null_mut(); MAX_LOCAL_RANKS],
        };
        if s.payload > 0 {
            let dst = self.control.payload(seq, s.slot_len as usize);
            // SAFETY: the payload is at most SLOT_BYTES (asserted when the schedule was sealed) and lies in our own slot,
            // which `drain` found unused; the input has `in_bytes >= payload` bytes (checked above).
            unsafe { reduce::copy(dst, input.ptr, s.payload as usize) };
            self.counters.copied += s.payload;
        }
        let inline = s.slot_len > 0 && s.slot_len as usize <= INLINE_BYTES;
        let words = (!inline).then(|| [input.hbm.unwrap_or(0), output.hbm.unwrap_or(0), s.table, 0]);
        self.control.publish(seq, &s.header, aside, words);
        self.ring_peers();
        for step in &s.steps {
            self.step(s, step, &mut bases, &mut wait)?;
        }
        // What was read from a peer counts only if the peer had not left meanwhile: a failed rank's buffers may go.
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        for p in &s.reached {
            self.still_there(usize::from(*p), &wait)?;
        }
        Ok(())
    }

    /// Fails if a peer whose buffers this operation uses has left before it was done with the operation.
    #[inline]
    fn still_there(&self, peer: usize, wait: &WaitCtx<'_>) -> Result<(), OpError> {
        match &self.peers[peer] {
            Some(p) if !p.control.alive() && p.control.progress() < wait.seq << 16 | u64::from(STEP_DONE) => {
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
        let (rank, seq, what) = (self.rank, wait.seq, wait.header.to_string());
        OpError::Left { rank, seq, what, peer: p.rank, pid: p.pid, how, reason }
    }

    /// Waits until every linked peer is done with the operation whose slot is to be reused.
    fn drain(&mut self, seq: u64, wait: &mut WaitCtx<'_>) -> Result<(), OpError> {
        let Some(need) = seq.checked_sub(SLOTS as u64).filter(|n| *n > self.drained) else { return Ok(()) };
        let mut least = u64::MAX;
        for p in 0..self.nranks {
            if self.peers[p].is_none() {
                continue;
            }
            self.wait_progress(p, need << 16 | u64::from(STEP_DONE), wait)?;
            if let Some(peer) = &self.peers[p] {
                let progress = peer.control.progress();
                let done =
                    if progress as u16 == STEP_DONE { progress >> 16 } else { (progress >> 16).saturating_sub(1) };
                least = least.min(done);
            }
        }
        self.drained = least.min(seq - 1);
        Ok(())
    }

    fn wait_progress(&mut self, peer: usize, target: u64, wait: &mut WaitCtx<'_>) -> Result<(), OpError> {
        let Some(p) = &self.peers[peer] else {
            return Err(OpError::NotLinked { rank: self.rank, peer });
        };
        if p.control.progress() >= target {
            return Ok(());
        }
        self.counters.waits += 1;
        wait.deadline = None;
        let this = &*self;
        semaphore::wait(
            this.control.bell(),
            this.policy,
            || p.control.progress() >= target,
            || this.check(wait, |q| q.control.progress() < target, peer),
        )
    }

    fn wait_arrival(&mut self, peer: usize, wait: &mut WaitCtx<'_>) -> Result<(), OpError> {
        let Some(p) = &self.peers[peer] else {
            return Err(OpError::NotLinked { rank: self.rank, peer });
        };
        let seq = wait.seq;
        if p.control.arrived(seq) {
            return Ok(());
        }
        self.counters.waits += 1;
        wait.deadline = None;
        let this = &*self;
        semaphore::wait(
            this.control.bell(),
            this.policy,
            || p.control.arrived(seq),
            || this.check(wait, |q| !q.control.arrived(seq), peer),
        )
    }

    /// Looks at everything that can end a wait early. `missing` tells which peers the step still lacks.
    #[cold]
    fn check(&self, wait: &mut WaitCtx<'_>, missing: impl Fn(&Peer) -> bool, waited: usize) -> Result<(), OpError> {
        let (rank, seq) = (self.rank, wait.seq);
        let what = || wait.header.to_string();
        if self.abort.aborted() {
            return Err(OpError::Aborted { rank, seq, what: what(), reason: self.control.state().1 });
        }
        // A peer that is gone ends the wait if this step lacks it, or a later one will.
        let last = seq << 16 | u64::from(wait.last_wait);
        let lacking = |p: &Peer| missing(p) || p.control.progress() < last;
        for p in self.peers.iter().flatten() {
            // The last look is after the state: it may have finished this very operation before it left.
            if lacking(p) && !p.control.alive() && lacking(p) {
                return Err(self.left(p, wait));
            }
            if lacking(p) && p.dead() && lacking(p) {
                let last = p.control.last_seen(seq);
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
        for p in self.peers.iter().flatten().filter(|p| missing(p) || p.rank == waited) {
            absent.push(Absent { rank: p.rank, pid: p.pid, last: p.control.last_seen(seq) });
        }
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
                self.control.set_progress(wait.seq, step);
                self.ring_peers();
            }
            Step::Copy { dst, src, len } => {
                let (dst, src) = (self.at(s, dst, bases, wait.seq), self.at(s, src, bases, wait.seq));
                // SAFETY: `at` gives pointers into memory that is mapped for the whole operation; the schedule was
                // sealed, so position + len lies inside in_bytes/out_bytes (checked here against the caller's buffers
                // and, on arrival, the peer's), the slot or the staging half; no other rank writes `dst` now.
                unsafe { reduce::copy(dst, src, len as usize) };
                self.counters.copied += len;
            }
            Step::Reduce { dst, first, n, count, op } => {
                let mut sources = [std::ptr::null::<u8>(); MAX_LOCAL_RANKS];
                let listed = &s.sources[first as usize..first as usize + n as usize];
                for (to, from) in sources.iter_mut().zip(listed) {
                    *to = self.at(s, *from, bases, wait.seq);
                }
                let dst = self.at(s, dst, bases, wait.seq);
                // SAFETY: as for Copy, for dst and each of the n sources; dst equals a source or overlaps none.
                unsafe { reduce::reduce(op, s.header.dtype, dst, &sources[..n as usize], count as usize) };
                self.counters.reduced += u64::from(n) * count * s.header.dtype.size() as u64;
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
                self.counters.copied += 2 * len;
            }
        }
        Ok(())
    }

    #[inline]
    fn arrival(&mut self, s: &Sealed, peer: usize, bases: &mut Bases, wait: &mut WaitCtx<'_>) -> Result<(), OpError> {
        self.wait_arrival(peer, wait)?;
        let Some(p) = &self.peers[peer] else { return Err(OpError::NotLinked { rank: self.rank, peer }) };
        let seq = wait.seq;
        if let Err(theirs) = p.control.same_call(seq, &s.header) {
            let (rank, mine) = (self.rank, s.header.to_string());
            return Err(OpError::Mismatch { rank, seq, mine, peer, theirs });
        }
        if p.control.aside(seq).digest != self.digest {
            let rank = self.rank;
            // Where it began, if that is not long ago: in a one-way operation the two need not have met.
            let began = (seq.saturating_sub(SLOTS as u64 - 1).max(1)..seq).find_map(|at| {
                let (mine, theirs) = (self.control.call(at)?, p.control.call(at)?);
                (mine != theirs).then_some(OpError::Mismatch { rank, seq: at, mine, peer, theirs })
            });
            if let Some(e) = began {
                return Err(e);
            }
            let mine = s.header.to_string();
            let theirs = format!("{mine} after other operations than ours, or on other rings");
            return Err(OpError::Mismatch { rank, seq, mine, peer, theirs });
        }
        if s.reached.contains(&(peer as u16)) {
            self.still_there(peer, wait)?;
        }
        let Some(p) = &self.peers[peer] else { return Err(OpError::NotLinked { rank: self.rank, peer }) };
        let inline = s.slot_len > 0 && s.slot_len as usize <= INLINE_BYTES;
        if !inline {
            let [input, output, table, _] = p.control.words(seq);
            if table != s.table {
                let (rank, mine) = (self.rank, s.header.to_string());
                let theirs = format!("{mine} with other counts or pairs in its lists");
                return Err(OpError::Mismatch { rank, seq, mine, peer, theirs });
            }
            if s.header.flags & FLAG_PRIVATE == 0 {
                // A rank without that buffer (a reduce's output off the root) announces any offset; only one that the
                // steps use must fit.
                let (a, b) = (p.hbm.at(input, s.peer_in_bytes), p.hbm.at(output, s.peer_out_bytes));
                if a.is_none() && s.touches(Place::PeerIn(peer as u16))
                    || b.is_none() && s.touches(Place::PeerOut(peer as u16))
                {
                    return Err(OpError::BadPeer { rank: self.rank, seq, peer });
                }
                bases.peer_in[peer] = a.unwrap_or(std::ptr::null_mut());
                bases.peer_out[peer] = b.unwrap_or(std::ptr::null_mut());
            }
        }
        Ok(())
    }

    /// Whether an arrived peer sends to this rank, respectively receives from it.
    fn meant_for_me(&self, s: &Schedule, peer: usize, sends: bool) -> Result<(), OpError> {
        let aside = self.peers[peer].as_ref().map(|p| p.control.aside(self.seq));
        let whom = aside.map_or(NO_RANK, |a| if sends { a.dst } else { a.src });
        if usize::from(whom) == self.rank {
            return Ok(());
        }
        let (mine, theirs) = if sends { ("from", "to") } else { ("to", "from") };
        let named = if whom == NO_RANK { "nobody".into() } else { format!("rank {whom}") };
        let mine = format!("{} {mine} rank {peer}", s.header);
        let theirs = format!("{} {theirs} {named}", s.header);
        Err(OpError::Mismatch { rank: self.rank, seq: self.seq, mine, peer, theirs })
    }

    #[inline]
    fn at(&self, s: &Schedule, at: At, bases: &Bases, seq: u64) -> *mut u8 {
        let base = match at.0 {
            Place::In => bases.own_in,
            Place::Out => bases.own_out,
            Place::PeerIn(p) => bases.peer_in[usize::from(p)],
            Place::PeerOut(p) => bases.peer_out[usize::from(p)],
            Place::Slot(r) => self.control_of(r).payload(seq, s.slot_len as usize),
            Place::Stage(r, half) => self.control_of(r).stage(false, usize::from(half)),
            Place::Result(r, half) => self.control_of(r).stage(true, usize::from(half)),
        };
        base.wrapping_add(at.1 as usize)
    }

    #[inline]
    fn control_of(&self, rank: u16) -> &Control {
        match self.peers.get(usize::from(rank)) {
            Some(Some(p)) => &p.control,
            // Sealed schedules name a peer's memory only after its Arrival step, which fails for one without a link.
            _ => &self.control,
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.close();
    }
}

struct WaitCtx<'a> {
    header: &'a OpHeader,
    seq: u64,
    timeout: Duration,
    deadline: Option<Instant>,
    last_wait: u16,
}

struct Bases {
    own_in: *mut u8,
    own_out: *mut u8,
    peer_in: [*mut u8; MAX_LOCAL_RANKS],
    peer_out: [*mut u8; MAX_LOCAL_RANKS],
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

    /// Checks that every step stays inside its buffers and that peers are used only after they arrived. Everything the
    /// sequencer relies on for memory safety is checked here, once, when a schedule is compiled.
    pub fn seal(self, rank: usize, nranks: usize) -> Result<Sealed, BadSchedule> {
        let dtype = self.header.dtype;
        let bad = |step: usize, why: String| BadSchedule { step, what: self.header.to_string(), why };
        if nranks > MAX_LOCAL_RANKS || rank >= nranks {
            return Err(bad(0, format!("rank {rank} of {nranks}")));
        }
        if self.slot_len > SLOT_BYTES as u64 || self.payload > self.slot_len || self.payload > self.in_bytes {
            return Err(bad(0, format!("payload {} in a slot of {}", self.payload, self.slot_len)));
        }
        if self.table != 0 && self.slot_len > 0 && self.slot_len as usize <= INLINE_BYTES {
            return Err(bad(0, "a record with inline payload has no room for the digest of a table".into()));
        }
        let (mut signalled, mut last_wait) = (1u16, 0u16);
        let mut arrived = vec![false; nranks];
        arrived[rank] = true;
        let inside = |at: At, len: u64, arrived: &[bool], step: usize| -> Result<(), BadSchedule> {
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
            if peer_memory && (who == rank || self.header.flags & FLAG_PRIVATE != 0) {
                return Err(bad(step, format!("{at:?} is not a peer's device memory")));
            }
            if peer_memory && self.slot_len > 0 && self.slot_len as usize <= INLINE_BYTES {
                return Err(bad(step, format!("{at:?}: a record with inline payload has no offsets")));
            }
            match at.1.checked_add(len) {
                Some(end) if end <= limit => Ok(()),
                _ => Err(bad(step, format!("{len} bytes at {at:?}, limit {limit}"))),
            }
        };
        for (i, step) in self.steps.iter().enumerate() {
            match *step {
                Step::Arrival(p) | Step::SendsToMe(p) | Step::Wait { peer: p, .. }
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
                }
                Step::Swap { a, b, len } => {
                    inside(a, len, &arrived, i)?;
                    inside(b, len, &arrived, i)?;
                    if a.0 == b.0 {
                        return Err(bad(i, "swaps a buffer with itself".into()));
                    }
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
        // Peers reach this rank's buffers in every schedule whose records carry offsets of device memory.
        let reaches_me = self.header.flags & FLAG_PRIVATE == 0 && self.slot_len == 0;
        Ok(Sealed { schedule: self, reached, reaches_me, last_wait })
    }
}

/// A schedule that was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sealed {
    schedule: Schedule,
    /// Peers whose buffers the steps touch.
    reached: Vec<u16>,
    /// Whether peers may touch this rank's buffers.
    reaches_me: bool,
    /// Highest step waited for.
    last_wait: u16,
}

impl std::ops::Deref for Sealed {
    type Target = Schedule;
    fn deref(&self) -> &Schedule {
        &self.schedule
    }
}
