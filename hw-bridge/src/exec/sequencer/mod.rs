//! The step language of schedules, and the sequencer that executes them.
//!
//! `enc` compiles a collective into a [`Schedule`] for this rank, once; [`Lane::run`] executes it as often
//! as the user calls. In the steady state it allocates nothing, takes no lock, formats nothing and calls no component.
//!
//! An operation runs so: wait until the slot may be reused; put a small payload beside the record; publish the record
//! (header, buffer offsets) and the step "arrived"; execute the steps; publish "done". Steps that touch a peer's buffers
//! come after [`Step::Arrival`] of that peer, which compares the headers and checks the peer's offsets against its
//! mapping, so no byte moves between calls that do not match and none outside what the peer granted.
//!
//! One operation at a time in a lane: `run` takes the [`Lane`] by `&mut`. Lanes share the [`Endpoint`] (links, state of the
//! group) and run side by side, each on its caller's thread. [`crate::group::Abort`] works from any thread.

mod error;
mod gate;
mod memory;
mod run;
mod schedule;

pub use error::{Absent, OpError};
pub use gate::{Closed, Lacking, Positions};
pub use memory::{Arena, CallBuffers, LocalMem};
pub use schedule::{At, BadSchedule, Place, Schedule, Sealed, Step};

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::exec::share::Share;
use crate::group::{Abort, Control, LaneAt, Peer, RankState};
use crate::limits::LANES;
use crate::memory::hbm::Hbm;
use crate::memory::segment::SegmentError;
use crate::os::bell::{self, Bell, Fence, WaitPolicy, publish_fence};
use run::Bases;

/// One rank's data plane of one communicator: what its lanes share.
#[derive(Debug)]
pub struct Endpoint {
    rank: usize,
    nranks: usize,
    control: Arc<Control>,
    hbm: Arc<Hbm>,
    peers: Box<[OnceLock<Peer>]>,
    /// How many of them there are.
    links: AtomicUsize,
    policy: WaitPolicy,
    share: Arc<Share>,
    abort: Abort,
    broken: OnceLock<FirstFailure>,
    /// Some rank cannot have our fences executed for us.
    fenced: AtomicBool,
    /// Lanes that were handed out.
    taken: [AtomicBool; LANES],
    gates: [gate::Gate; LANES],
}

/// What a call passes beside its schedule and buffers.
#[derive(Debug, Clone, Copy)]
pub struct CallArgs {
    /// Whom a send_recv sends to, [`NO_RANK`](crate::group::NO_RANK) for nobody.
    pub dst: u16,
    /// Whom a send_recv receives from.
    pub src: u16,
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
    at: LaneAt,
    seq: u64,
    /// The operation that has passed the gate.
    admitted: u64,
    /// Every linked peer is known to be done with this operation.
    drained: u64,
    stage_ready: bool,
    large_ready: bool,
    digest: u32,
    /// A digest of the rings and the table that its schedules are made by.
    plan: u32,
    /// Kept between operations, so that a small one need not clear it.
    bases: Box<Bases>,
    /// Bells of all linked peers, if there are as many as [`Endpoint::links`] says. Valid as long as the endpoint is.
    bells: Vec<AtomicPtr<Bell>>,
}

/// Why a communicator is not usable any more.
#[derive(Debug)]
struct FirstFailure {
    why: String,
    /// The rank whose process has ended, if that is why.
    dead: Option<usize>,
}

impl FirstFailure {
    /// The error of what is tried afterwards.
    fn again(&self, rank: usize) -> OpError {
        OpError::Broken { rank, first: self.why.clone(), dead: self.dead }
    }
}

impl Endpoint {
    /// The data plane of `rank` of `nranks`, before any link, which takes its turns by `share`. `nranks` is at most
    /// [`MAX_LOCAL_RANKS`](crate::limits::MAX_LOCAL_RANKS).
    pub fn new(
        rank: usize,
        nranks: usize,
        hbm: Arc<Hbm>,
        policy: WaitPolicy,
        share: Arc<Share>,
    ) -> Result<Endpoint, SegmentError> {
        crate::os::fork::mark_process();
        Ok(Endpoint::of(Control::create(rank as u32, nranks as u32)?, hbm, policy, share))
    }

    /// The data plane over a control segment that this process has, or has made for another.
    pub fn of(control: Control, hbm: Arc<Hbm>, policy: WaitPolicy, share: Arc<Share>) -> Endpoint {
        let (rank, nranks) = control.who();
        let (rank, nranks) = (rank as usize, nranks as usize);
        let control = Arc::new(control);
        let abort = Abort::new(control.clone());
        Endpoint {
            rank,
            nranks,
            control,
            hbm,
            peers: (0..nranks).map(|_| OnceLock::new()).collect(),
            links: AtomicUsize::new(0),
            policy,
            share,
            abort,
            broken: OnceLock::new(),
            fenced: AtomicBool::new(!bell::asymmetric()),
            taken: Default::default(),
            gates: Default::default(),
        }
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
        // A second link to the same rank is dropped.
        if self.peers.get(peer.rank).is_some_and(|place| place.set(peer).is_ok()) {
            self.links.fetch_add(1, Ordering::Release);
        }
    }

    /// Whether `rank` is linked (a rank is linked to itself).
    pub fn linked(&self, rank: usize) -> bool {
        rank == self.rank || self.peer(rank).is_some()
    }

    #[inline]
    pub(crate) fn peer(&self, rank: usize) -> Option<&Peer> {
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

    /// Whether this rank can read the private memory of all others. The kernel is asked.
    ///
    /// # Errors
    /// A sentence about the first rank that it cannot read.
    pub fn reads_private(&self) -> Result<(), String> {
        (0..self.nranks).filter(|p| *p != self.rank).try_for_each(|p| match self.peer(p) {
            Some(peer) => peer.space.probe().map_err(|e| format!("rank {p} (pid {}) cannot be read: {e}", peer.pid)),
            None => Err(format!("rank {p} is not linked")),
        })
    }

    /// Handle that ends operations from another thread.
    pub fn abort_handle(&self) -> Abort {
        self.abort.clone()
    }

    /// Hands out one of the [`LANES`], once.
    ///
    /// # Errors
    /// [`OpError::Slots`] if the tenant has used up its slots, [`OpError::Stage`] if there is no memory for it.
    pub fn lane(self: &Arc<Endpoint>, index: usize) -> Result<Option<Lane>, OpError> {
        let Some(taken) = self.taken.get(index) else { return Ok(None) };
        if taken.swap(true, Ordering::AcqRel) {
            return Ok(None);
        }
        if !self.share.take_slot() {
            taken.store(false, Ordering::Release);
            return Err(OpError::Slots { rank: self.rank, slots: self.share.terms().slots });
        }
        if let Err(e) = self.control.commit(index) {
            self.share.give_slot();
            taken.store(false, Ordering::Release);
            return Err(OpError::Stage { rank: self.rank, reason: e.to_string() });
        }
        let endpoint = self.clone();
        let (stage_ready, large_ready) = (false, false);
        Ok(Some(Lane {
            endpoint,
            index,
            at: LaneAt::of(index),
            seq: 0,
            admitted: 0,
            drained: 0,
            stage_ready,
            large_ready,
            digest: 0,
            plan: 0,
            bases: Box::new(Bases::none()),
            bells: Vec::new(),
        }))
    }

    /// Leaves the group because this rank cannot go on; peers learn why instead of waiting, and whose process has ended if that
    /// is why.
    pub fn fail(&self, why: &str, dead: Option<usize>) {
        // This rank's own lanes learn it first: what they would say of a peer would only be an echo.
        self.broken.get_or_init(|| FirstFailure { why: why.to_string(), dead });
        self.control.leave(RankState::Failed, why, dead);
        self.ring_all();
    }

    /// Whether operations can be begun.
    ///
    /// # Errors
    /// [`OpError::Broken`] with the first failure, or what the abort said.
    pub fn usable(&self) -> Result<(), OpError> {
        if let Some(first) = self.broken.get() {
            return Err(first.again(self.rank));
        }
        if self.abort.aborted() {
            let first = format!("aborted: {}", self.control.state().1);
            return Err(OpError::Broken { rank: self.rank, first, dead: None });
        }
        Ok(())
    }

    /// Whether [`Endpoint::usable`] says that they cannot.
    #[inline]
    fn over(&self) -> bool {
        self.broken.get().is_some() || self.abort.aborted()
    }

    /// Leaves the group in good order; peers that still wait for this rank learn it.
    pub fn close(&self) {
        self.control.leave(RankState::Closed, "", None);
        self.ring_all();
    }

    /// Wakes whoever waits, in every lane and for messages, of every peer and of this rank.
    fn ring_all(&self) {
        publish_fence(Fence::Full);
        for control in self.peer_controls().chain([&*self.control]) {
            for lane in 0..LANES {
                control.lane(lane).bell().ring_if_sleeping();
            }
            control.mail_bell().ring_if_sleeping();
        }
    }

    /// The fence between what is published and a look whether somebody sleeps.
    #[inline]
    pub(crate) fn publish_fence(&self) {
        publish_fence(if self.fenced.load(Ordering::Relaxed) { Fence::Full } else { Fence::Light });
    }

    /// How a wait begins: soon asleep while other tenants are at work.
    #[inline]
    pub(crate) fn wait_policy(&self) -> WaitPolicy {
        if self.share.crowded() { WaitPolicy::CROWDED } else { self.policy }
    }

    /// Whose turn it is to move bytes.
    #[inline]
    pub(crate) fn share(&self) -> &Share {
        &self.share
    }

    /// Wakes the peers that sleep in a lane, whose bells are `bells` if no link was added since they were noted.
    #[inline]
    fn ring_lane(&self, lane: LaneAt, bells: &[AtomicPtr<Bell>]) {
        self.publish_fence();
        if bells.len() != self.links.load(Ordering::Acquire) {
            return self.ring_all_in(lane);
        }
        for bell in bells {
            // SAFETY: a bell in the control segment of a linked peer, which stays mapped as long as this endpoint lives.
            unsafe { &*bell.load(Ordering::Relaxed) }.ring_if_sleeping();
        }
    }

    #[cold]
    fn ring_all_in(&self, lane: LaneAt) {
        self.linked_peers().for_each(|peer| peer.control.lane_at(lane).bell().ring_if_sleeping());
    }
}

impl Lane {
    /// Notes a digest of what the lane's schedules are made by, such as rings: ranks whose schedules were made by others notice at
    /// their first meeting.
    pub fn set_plan(&mut self, digest: u32) {
        self.plan = digest;
    }

    /// Notes the bells of the peers that are linked by now.
    #[cold]
    fn note_bells(&mut self) {
        let bell = |p: &Peer| AtomicPtr::new(std::ptr::from_ref(p.control.lane_at(self.at).bell()).cast_mut());
        self.bells = self.endpoint.linked_peers().map(bell).collect();
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.close();
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.endpoint.share.give_slot();
        // One that was never used can be taken again; another's sequence would have to be known to go on.
        if self.seq == 0 {
            self.endpoint.taken[self.index].store(false, Ordering::Release);
        }
    }
}
