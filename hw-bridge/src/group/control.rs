//! The control segment of one rank: who it is, how it stands, where its lanes are.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::flight::{self, Counters, Tally};
use super::lanes::LaneView;
use super::layout::*;
use super::outbox::Outbox;
use crate::limits::{
    EAGER_BYTES, LANES, LARGE_SLOT_BYTES, LARGE_SLOTS, MAIL_STAGE_BYTES, MAX_LOCAL_RANKS, REASON_BYTES, STAGE_BYTES,
};
use crate::memory::foreign::Mark;
use crate::memory::segment::{Segment, SegmentError};
use crate::os::bell::Bell;
use crate::os::clock;
use crate::os::shown::one_line;

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

/// What a process says of itself when another makes a control segment for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// Its number.
    pub pid: u32,
    /// Whether it pays for fences ([`crate::os::bell::asymmetric`]).
    pub asymmetric: bool,
    /// Where its [`Mark`] is, and the number there.
    pub mark: [u64; 2],
}

/// Where a lane begins, in the control segment of any rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LaneAt(usize);

impl LaneAt {
    pub(crate) fn of(lane: usize) -> LaneAt {
        debug_assert!(lane < LANES);
        LaneAt(BLOCK_BYTES + (lane % LANES) * LANE_BYTES)
    }
}

/// Typed view of a control segment.
#[derive(Debug)]
pub struct Control {
    segment: Arc<Segment>,
    /// Ranks of the group, which its size was made or checked by.
    nranks: usize,
    left: AtomicBool,
    /// The owner's process, where it is a linked peer's and the kernel gave a descriptor of it.
    pub(super) owner: Option<OwnedFd>,
    /// What readers of this process's memory know it by; absent in a peer's.
    _mark: Option<Mark>,
}

impl Control {
    /// Makes this rank's own.
    pub fn create(rank: u32, nranks: u32) -> Result<Control, SegmentError> {
        let (step, bytes) = ("reading random bytes", control_bytes(nranks as usize) as u64);
        let mark = Mark::new().map_err(|source| SegmentError::System { step, bytes, source })?;
        let (pid, asymmetric) = (std::process::id(), crate::os::bell::asymmetric());
        let c = Control::create_for(rank, nranks, Owner { pid, asymmetric, mark: mark.words() })?;
        c.commit(0)?;
        Ok(Control { left: AtomicBool::new(false), _mark: Some(mark), ..c })
    }

    /// Makes that of another process, which takes it over by [`Control::adopt`]: only it says how the rank stands, and it has the
    /// memory of the lanes allocated, on its own account. The maker's is the first page.
    pub fn create_for(rank: u32, nranks: u32, owner: Owner) -> Result<Control, SegmentError> {
        let ranks = nranks as usize;
        let segment = Arc::new(Segment::create(CONTROL_NAME, control_bytes(ranks) as u64)?);
        let c = Control { segment, nranks: ranks, left: AtomicBool::new(true), owner: None, _mark: None };
        c.segment.commit(0, BLOCK_BYTES as u64)?;
        let word = |at: usize, v: u64| c.block().ident.0[at].store(v, Ordering::Relaxed);
        word(ident::WHO, u64::from(rank) | u64::from(nranks) << 32);
        word(ident::ASYMMETRIC, u64::from(owner.asymmetric));
        word(ident::PID, u64::from(owner.pid));
        ident::MARK.into_iter().zip(owner.mark).for_each(|(at, v)| word(at, v));
        let (ns, ticks) = clock::now();
        word(ident::CLOCK_NS, ns);
        word(ident::TICKS, ticks);
        c.block().ident.0[ident::MAGIC].store(MAGIC, Ordering::Release);
        Ok(c)
    }

    /// Takes over what a service made for rank `rank` of `nranks` in this process, known by `mark`.
    pub fn adopt(segment: Segment, rank: u32, nranks: u32, mark: Mark) -> Result<Control, SegmentError> {
        let c = Control::of_peer(segment, rank, nranks)?;
        if c.mark() != mark.words() {
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
        let len = segment.len();
        if len < OUTBOXES_AT {
            let why = format!("its control block has {len} bytes, at least {OUTBOXES_AT} expected");
            return Err(SegmentError::Foreign(why));
        }
        let segment = Arc::new(segment);
        let mut c = Control { segment, nranks: 0, left: AtomicBool::new(true), owner: None, _mark: None };
        let magic = c.block().ident.0[ident::MAGIC].load(Ordering::Acquire);
        if magic != MAGIC {
            return Err(SegmentError::Foreign(format!("its control block has magic {magic:#x}")));
        }
        let nranks = c.who().1 as usize;
        if nranks > MAX_LOCAL_RANKS || len != control_bytes(nranks) {
            let why = format!("its control block has {len} bytes, which is not what one of {nranks} ranks has");
            return Err(SegmentError::Foreign(why));
        }
        // What was checked holds, whatever is written there later.
        c.nranks = nranks;
        Ok(c)
    }

    pub(super) fn ident(&self, at: usize) -> u64 {
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
        // SAFETY: the segment is at least OUTBOXES_AT long (made or checked so), page-aligned, and consists of atomics only
        // where Block lies, for which any bytes are valid; it lives as long as `self`.
        unsafe { &*self.segment.base().cast::<Block>() }
    }

    /// One of the [`LANES`].
    #[inline]
    pub fn lane(&self, lane: usize) -> LaneView<'_> {
        self.lane_at(LaneAt::of(lane))
    }

    /// The lane that begins there.
    #[inline]
    pub(crate) fn lane_at(&self, LaneAt(at): LaneAt) -> LaneView<'_> {
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

    /// What the owner has for rank `to`, if that is one of the group. There must be memory for it ([`Control::has_outbox`]).
    #[inline]
    pub(crate) fn outbox(&self, to: usize) -> Option<Outbox<'_>> {
        (to < self.nranks).then(|| Outbox::new(self.segment.base().wrapping_add(OUTBOXES_AT + to * OUTBOX_BYTES), self))
    }

    /// Allocates the head and the envelopes of the outbox for rank `to`, and lets that look into it from now on.
    pub(crate) fn open_outbox(&self, to: usize) -> Result<(), SegmentError> {
        self.segment.commit((OUTBOXES_AT + to * OUTBOX_BYTES) as u64, PAYLOADS_AT as u64)?;
        self.block().outboxes.0[to / 64].fetch_or(1 << (to % 64), Ordering::Release);
        Ok(())
    }

    /// Whether the outbox for rank `to` has memory: to look at one that has not would allocate it.
    #[inline]
    pub(crate) fn has_outbox(&self, to: usize) -> bool {
        self.block().outboxes.0.get(to / 64).is_some_and(|bits| bits.load(Ordering::Acquire) >> (to % 64) & 1 == 1)
    }

    /// Allocates the payload of a slot of the outbox for rank `to`, before its first one.
    pub(crate) fn commit_payload(&self, to: usize, slot: usize) -> Result<(), SegmentError> {
        let at = OUTBOXES_AT + to * OUTBOX_BYTES + PAYLOADS_AT + slot * EAGER_BYTES;
        self.segment.commit(at as u64, EAGER_BYTES as u64)
    }

    /// Allocates the staging halves of the outbox for rank `to`, before their first message.
    pub(crate) fn commit_mail_stage(&self, to: usize) -> Result<(), SegmentError> {
        let at = OUTBOXES_AT + to * OUTBOX_BYTES + MAIL_STAGE_AT;
        self.segment.commit(at as u64, 2 * MAIL_STAGE_BYTES as u64)
    }

    /// The bell of whoever waits here for a message, or for one to be taken.
    #[inline]
    pub(crate) fn mail_bell(&self) -> &Bell {
        &self.block().mail.0
    }

    /// What messages have cost here.
    #[inline]
    pub(crate) fn mail_tally(&self) -> &Tally {
        &self.block().mail_tally.0
    }

    /// Where the owner's mark is, and the number there.
    pub(crate) fn mark(&self) -> [u64; 2] {
        ident::MARK.map(|at| self.ident(at))
    }

    /// Says where the rank's lanes are, under the number of a closing of the gates ([`crate::exec::sequencer::Closed`]).
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

    /// The rank whose process has ended, if that is why the rank failed: as it says.
    pub fn dead_rank(&self) -> Option<usize> {
        let s = &self.block().state.0;
        let failed = s.state.load(Ordering::Acquire) == RankState::Failed as u32;
        let dead = failed.then(|| s.dead.load(Ordering::Relaxed).checked_sub(1)).flatten();
        dead.filter(|dead| *dead < self.who().1).map(|dead| dead as usize)
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
    pub(super) fn owner_ended(&self) -> bool {
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

    /// What the rank has counted, all lanes and messages together.
    pub fn counters(&self) -> Counters {
        self.committed().fold(self.mail_tally().read(), |sum, l| sum + self.lane(l).tally().read())
    }

    /// The last operations of the rank with their lanes, each lane's oldest first.
    pub fn records(&self) -> Vec<(usize, flight::Record)> {
        let (epoch, now) = (self.epoch(), clock::now());
        let of = |lane: usize| self.lane(lane).flight().read(epoch, now).into_iter().map(move |r| (lane, r));
        self.committed().flat_map(of).collect()
    }

    /// Whether the rank takes part, without the reason.
    #[inline]
    pub fn alive(&self) -> bool {
        self.block().state.0.state.load(Ordering::Acquire) == RankState::Alive as u32
    }

    /// Leaves the group, once: the first state that is not alive stays. `dead` is the rank whose process has ended, if that is why.
    pub fn leave(&self, state: RankState, reason: &str, dead: Option<usize>) {
        // A forked child has the parent's segment; what it does is not what the rank does.
        if crate::os::fork::in_child() {
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
        s.dead.store(dead.map_or(0, |rank| rank as u32 + 1), Ordering::Relaxed);
        s.state.store(state as u32, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::super::lanes::{Aside, payload_at, stage_at};
    use super::*;
    use crate::call::{DataType, Op, OpHeader, ReduceOp, describe};
    use crate::limits::{INLINE_BYTES, SLOT_BYTES, SLOTS};

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
        Control::of_peer(Segment::from_peer(fd, c.segment.len() as u64)?, rank, nranks)
    }

    #[test]
    fn a_peer_sees_arrival_header_and_words() {
        let owner = Control::create(1, 2).unwrap();
        let viewer = view(&owner, 1, 2).unwrap();
        let (mine, seen) = (owner.lane(2), viewer.lane(2));
        assert!(!seen.arrived(1));
        let aside = Aside { dst: 3, src: NO_RANK, digest: 0xDEAD_BEEF };
        mine.publish(1, header().words(), aside, Some([4096, 8192, 7, 9]));
        assert!(seen.arrived(1) && !seen.arrived(2));
        assert_eq!((seen.words(1), seen.aside(1)), ([4096, 8192, 7, 9], aside));
        assert_eq!(seen.same_call(1, header().words()), Ok(()));
        let other = OpHeader { count: 200, ..header() };
        assert_eq!(seen.same_call(1, other.words()), Err("all_reduce fp32 sum count 100 by mesh".into()));
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
                    lane.publish(seq, said(seq).words(), none, None);
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
                    assert_eq!(text, describe(header.words()), "#{seq}");
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
        let segment = || Segment::adopt(fd(), control_bytes(2) as u64).unwrap();
        let strange = Control::adopt(segment(), 1, 2, Mark::new().unwrap()).unwrap_err();
        assert!(strange.to_string().contains("for another process"), "{strange}");
        let own = Control::adopt(segment(), 1, 2, mark).unwrap();
        own.commit(1).unwrap();
        // Whoever made it says nothing of the rank.
        made.leave(RankState::Closed, "", None);
        assert_eq!((own.pid(), own.state().0), (7, RankState::Alive));
        own.leave(RankState::Failed, "why", Some(1));
        assert_eq!((made.state(), made.dead_rank()), ((RankState::Failed, "why".into()), Some(1)));
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
        made.leave(RankState::Failed, "why", None);
        assert_eq!((made.counters(), made.records()), (Counters::default(), Vec::new()));
        assert_eq!(bytes(), BLOCK_BYTES);
        let own = Control::adopt(Segment::adopt(fd(), control_bytes(1) as u64).unwrap(), 0, 1, mark).unwrap();
        assert!(bytes() >= BLOCK_BYTES + STAGE_AT, "the client's first lane has its memory");
        drop(own);
    }

    #[test]
    fn a_foreign_block_is_refused() {
        let mine = Control::create(1, 2).unwrap();
        assert!(view(&mine, 0, 2).unwrap_err().to_string().contains("rank 1 of 2, expected rank 0 of 2"));
        // One that says that it has more ranks has no room for their outboxes.
        for nranks in [3, u64::from(u32::MAX)] {
            mine.block().ident.0[ident::WHO].store(1 | nranks << 32, Ordering::Relaxed);
            let e = view(&mine, 1, 2).unwrap_err().to_string();
            assert!(e.contains(&format!("not what one of {nranks} ranks has")), "{e}");
        }
        mine.block().ident.0[0].store(1, Ordering::Relaxed);
        assert!(view(&mine, 1, 2).unwrap_err().to_string().contains("magic"));
    }

    #[test]
    fn outboxes_take_memory_one_by_one() {
        let owner = Control::create(0, 3).unwrap();
        let viewer = view(&owner, 0, 3).unwrap();
        let bytes = || rustix::fs::fstat(owner.segment.fd().unwrap()).unwrap().st_blocks as usize * 512;
        let before = bytes();
        assert!(
            (0..3).all(|to| !viewer.has_outbox(to)) && viewer.outbox(3).is_none() && !viewer.has_outbox(usize::MAX)
        );
        owner.open_outbox(2).unwrap();
        assert!(viewer.has_outbox(2) && !viewer.has_outbox(1));
        assert_eq!(bytes() - before, PAYLOADS_AT);
        owner.commit_payload(2, 1).unwrap();
        owner.commit_mail_stage(2).unwrap();
        assert_eq!(bytes() - before, PAYLOADS_AT + EAGER_BYTES + 2 * MAIL_STAGE_BYTES);
        let end = viewer.outbox(2).unwrap().half(1) as usize + MAIL_STAGE_BYTES;
        assert_eq!(end, viewer.segment.base() as usize + control_bytes(3));
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
        owner.lane(2).flight().begin(1, header().words(), 400);
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
        assert_eq!(standing(|c| c.leave(RankState::Closed, "", None)), "closed");
        assert_eq!(standing(|c| c.leave(RankState::Aborted, "enough", None)), "aborted: enough");
        assert_eq!(
            standing(|c| c.leave(RankState::Failed, "operation #1 failed", None)),
            "failed: operation #1 failed"
        );
    }

    #[test]
    fn the_first_reason_stays_and_is_cut_at_a_character() {
        let c = Control::create(0, 2).unwrap();
        c.leave(RankState::Failed, &"é".repeat(REASON_BYTES), Some(1));
        c.leave(RankState::Closed, "later", None);
        let (state, text) = c.state();
        assert_eq!((state, c.dead_rank()), (RankState::Failed, Some(1)));
        assert_eq!(text, "é".repeat(REASON_BYTES / 2));
    }

    /// It is the word of a peer.
    #[test]
    fn a_dead_rank_is_one_of_the_group() {
        let of = |state, dead| {
            let c = Control::create(0, 2).unwrap();
            assert_eq!(c.dead_rank(), None);
            c.leave(state, "", dead);
            c.dead_rank()
        };
        assert_eq!(of(RankState::Failed, None), None);
        assert_eq!(of(RankState::Failed, Some(0)), Some(0));
        assert_eq!(of(RankState::Failed, Some(2)), None);
        assert_eq!(of(RankState::Closed, Some(1)), None);
    }

    #[test]
    fn a_tiny_payload_lies_in_the_line_of_its_record() {
        let c = Control::create(0, 1).unwrap();
        let lane = c.lane(LANES - 1);
        let first = lane.first() as usize;
        let record = std::ptr::from_ref(lane.record(5)).cast::<u8>() as usize;
        let payload = |seq, len| first + payload_at(seq, len);
        assert_eq!(payload(5, INLINE_BYTES), record + 32);
        assert_eq!(payload(5, INLINE_BYTES + 1), record + 64);
        assert_eq!(record % 128, 0);
        assert_eq!(payload(5, SLOT_BYTES), record + 64);
        assert_eq!(payload(LARGE_SLOTS as u64, SLOT_BYTES + 1), first + stage_at(true, 1) + STAGE_BYTES);
        let end = payload(LARGE_SLOTS as u64 - 1, LARGE_SLOT_BYTES) + LARGE_SLOT_BYTES;
        assert_eq!(end, c.segment.base() as usize + OUTBOXES_AT);
    }
}
