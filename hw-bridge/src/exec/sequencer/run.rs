//! Executing a sealed schedule.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, Instant};

use super::{Absent, At, CallArgs, CallBuffers, Endpoint, Lane, OpError, Place, Sealed, Step};
use crate::call::ReduceOp;
use crate::exec::reduce;
use crate::group::flight::State;
use crate::group::{Aside, LaneAt, LaneView, NO_RANK, Peer, RankState, STEP_DONE, lanes};
use crate::limits::{MAX_LOCAL_RANKS, NAP, SLOTS};
use crate::memory::copy;
use crate::os::bell::{self, Bell};
use crate::os::patience::Wait;

/// How long a failed rank waits for peers that may still use its buffers.
const PATIENCE: Duration = Duration::from_millis(500);
/// How long a process may take from giving up its memory to its end, on a busy machine.
const DYING: Duration = Duration::from_secs(3);

/// `len` bytes in stretches of at most `most`: first byte and bytes of each.
#[inline]
fn stretches(len: u64, most: u64) -> impl Iterator<Item = (u64, u64)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let next = (at, most.min(len - at));
        at += next.1;
        (next.1 > 0).then_some(next)
    })
}

impl Lane {
    /// Executes `schedule` with these buffers.
    ///
    /// # Errors
    /// [`OpError`]; but for a call that was refused before it began (buffers, fork), the communicator is broken then.
    pub fn run(&mut self, schedule: &Sealed, buffers: &CallBuffers<'_>, args: &CallArgs) -> Result<(), OpError> {
        if self.endpoint.over() || crate::os::fork::in_child() {
            return Err(self.refused(schedule));
        }
        if !fit(&self.endpoint, schedule, buffers) {
            self.retract();
            return Err(misfit(&self.endpoint, schedule, buffers));
        }
        let (stage, large) = (schedule.staged && !self.stage_ready, schedule.sends_large() && !self.large_ready);
        if stage || large {
            self.make_room(stage, large)?;
        }
        if self.admitted != self.seq + 1 {
            self.begin()?;
        }
        if self.bells.len() != self.endpoint.links.load(Ordering::Acquire) {
            self.note_bells();
        }
        self.seq += 1;
        let (endpoint, seq) = (&*self.endpoint, self.seq);
        let alone = endpoint.share.is_free();
        let mut op = Running {
            endpoint,
            at: self.at,
            bells: &self.bells,
            mine: endpoint.control.lane_at(self.at),
            schedule,
            seq,
            slot: lanes::payload_at(seq, schedule.slot_len as usize),
            before: self.digest ^ self.plan,
            timeout: args.timeout,
            deadline: None,
            napped: false,
            paced: schedule.moved > endpoint.share.stretch_of(alone),
        };
        let mine = op.mine;
        mine.flight().begin(seq, schedule.words, schedule.moved);
        match op.run(alone, buffers, args, &mut self.drained, &mut self.bases) {
            Ok(()) => {
                mine.set_progress(seq, STEP_DONE);
                endpoint.ring_lane(self.at, &self.bells);
                // With the lists in it: ranks that did not meet in this operation notice at their next meeting.
                self.digest = (self.digest.rotate_left(5) ^ schedule.digest).wrapping_mul(0x9E37_79B1);
                mine.tally().op();
                mine.flight().end(seq, State::Done, op.napped || schedule.stamped);
                Ok(())
            }
            Err(e) => {
                op.failed(&e, buffers);
                Err(e)
            }
        }
    }

    /// Why nothing can be run.
    #[cold]
    fn refused(&self, schedule: &Sealed) -> OpError {
        let endpoint = &self.endpoint;
        let (rank, what) = (endpoint.rank, schedule.header.to_string());
        if let Some(first) = endpoint.broken.get() {
            return first.again(rank);
        }
        if endpoint.abort.aborted() {
            return OpError::Aborted { rank, seq: self.seq + 1, what, reason: endpoint.control.state().1 };
        }
        OpError::Forked { rank, what, parent: endpoint.control.pid() }
    }

    /// Allocates what the lane's first staged operation, or its first large payload, writes to.
    #[cold]
    fn make_room(&mut self, stage: bool, large: bool) -> Result<(), OpError> {
        let control = &self.endpoint.control;
        let room = if stage { control.commit_stage(self.index) } else { Ok(()) };
        let room = room.and_then(|()| if large { control.commit_large(self.index) } else { Ok(()) });
        if let Err(e) = room {
            let e = OpError::Stage { rank: self.endpoint.rank, reason: e.to_string() };
            self.endpoint.fail(&e.to_string(), None);
            self.retract();
            return Err(e);
        }
        self.stage_ready |= stage;
        self.large_ready |= large;
        Ok(())
    }
}

/// Whether the schedule is for this rank, and the buffers for the schedule.
#[inline]
fn fit(endpoint: &Endpoint, s: &Sealed, buffers: &CallBuffers<'_>) -> bool {
    let CallBuffers { input, output, .. } = buffers;
    let overlaps_well = match buffers.overlap() {
        None => true,
        // The same first byte, or one rank's block inside the other buffer: what the in-place forms are.
        Some(d) => {
            d == 0
                || s.in_place == Some(d)
                || s.in_bytes != s.out_bytes && d.unsigned_abs() % s.in_bytes.min(s.out_bytes).max(1) == 0
        }
    };
    s.seat == (endpoint.rank, endpoint.nranks)
        && input.len >= s.in_bytes
        && output.len >= s.out_bytes
        && (s.out_bytes == 0 || output.is_writable())
        && input.serves(s.in_bytes, s.private)
        && output.serves(s.out_bytes, s.private)
        && overlaps_well
        && input.is_of(&endpoint.hbm)
        && output.is_of(&endpoint.hbm)
}

/// Which of what [`fit`] looks at is wrong.
#[cold]
fn misfit(endpoint: &Endpoint, s: &Sealed, buffers: &CallBuffers<'_>) -> OpError {
    let (rank, nranks, what) = (endpoint.rank, endpoint.nranks, s.header.to_string());
    if s.seat != (rank, nranks) {
        return OpError::Seat { rank, nranks, what, sealed: s.seat };
    }
    let both = [("input", &buffers.input, s.in_bytes), ("output", &buffers.output, s.out_bytes)];
    if let Some((which, mem, need)) = both.into_iter().find(|(_, mem, need)| mem.len < *need) {
        return OpError::Buffer { rank, which, have: mem.len, need, what };
    }
    let why = if s.out_bytes > 0 && !buffers.output.is_writable() {
        "the output is read-only memory"
    } else if both.iter().any(|(_, mem, need)| !mem.serves(*need, s.private)) {
        "the schedule is for the other kind of memory"
    } else if let Some((which, ..)) = both.iter().find(|(_, mem, _)| !mem.is_of(&endpoint.hbm)) {
        return OpError::WrongCore { rank, which };
    } else {
        "input and output overlap by accident"
    };
    OpError::Memory { rank, what, why }
}

/// One operation, from when it has its number until it is done.
struct Running<'a> {
    endpoint: &'a Endpoint,
    at: LaneAt,
    bells: &'a [AtomicPtr<Bell>],
    /// This rank's lane.
    mine: LaneView<'a>,
    schedule: &'a Sealed,
    seq: u64,
    /// Where in a lane its payload is.
    slot: usize,
    /// Digest of the plan and of all operations before this one.
    before: u32,
    timeout: Duration,
    /// When the wait gives up, and how many bytes the rank that it waits for had moved when that was set.
    deadline: Option<(Wait, u64)>,
    /// Some wait of the operation was not over soon.
    napped: bool,
    /// Its stretches wait for their turns; a smaller one waits once, when it begins.
    paced: bool,
}

impl<'a> Running<'a> {
    #[inline]
    fn of(&self, peer: &'a Peer) -> LaneView<'a> {
        peer.control.lane_at(self.at)
    }

    #[inline]
    fn peer(&self, rank: usize) -> Result<&'a Peer, OpError> {
        #[cold]
        fn not_linked(rank: usize, peer: usize) -> OpError {
            OpError::NotLinked { rank, peer }
        }
        self.endpoint.peer(rank).ok_or_else(|| not_linked(self.endpoint.rank, rank))
    }

    #[inline]
    fn run(
        &mut self,
        alone: bool,
        buffers: &CallBuffers<'_>,
        args: &CallArgs,
        drained: &mut u64,
        bases: &mut Bases,
    ) -> Result<(), OpError> {
        let (endpoint, s, seq) = (self.endpoint, self.schedule, self.seq);
        if !alone {
            endpoint.share.begin(if self.paced { 0 } else { s.moved }, || self.told_to_stop())?;
        }
        if let Some(need) = seq.checked_sub(s.ahead).filter(|n| n > drained) {
            *drained = self.drain(need)?;
        }
        bases.begin(buffers, s);
        *bases.lanes[endpoint.rank].get_mut() = self.mine.first();
        bases.scales[endpoint.rank] = args.scale;
        if s.payload > 0 {
            let dst = self.mine.first().wrapping_add(self.slot);
            // SAFETY: the payload is at most LARGE_SLOT_BYTES (checked when the schedule was sealed) and lies in our own slot,
            // which `drain` found unused; the input has `in_bytes >= payload` bytes (checked by `fit`).
            unsafe { copy::copy(dst, buffers.input.ptr, s.payload as usize) };
            self.mine.tally().copied(s.payload);
        }
        let aside = Aside { dst: args.dst, src: args.src, digest: self.before };
        let words = (!s.inline).then(|| {
            let [a, b] = match s.direct {
                true => [buffers.input.ptr.addr() as u64, s.in_bytes],
                false => [buffers.input.offset_in(&endpoint.hbm), buffers.output.offset_in(&endpoint.hbm)],
            };
            [a, b, s.table, u64::from(args.scale.to_bits())]
        });
        self.mine.publish(seq, s.words, aside, words);
        endpoint.ring_lane(self.at, self.bells);
        for step in &s.steps {
            self.step(step, bases)?;
        }
        // What was read from a peer counts only if the peer had not left meanwhile: a failed rank's buffers may go.
        std::sync::atomic::fence(Ordering::Acquire);
        for p in &s.reached {
            self.still_there(self.peer(usize::from(*p))?)?;
        }
        Ok(())
    }

    /// Notes that it failed, and tells the peers.
    #[cold]
    fn failed(&self, e: &OpError, buffers: &CallBuffers<'_>) {
        let (mine, s) = (self.mine, self.schedule);
        mine.tally().failure();
        mine.flight().end(self.seq, State::Failed, true);
        // A reason that came from a peer is passed on as it is, so that the first one reaches everybody.
        match e {
            OpError::Left { state: RankState::Failed, reason, dead, .. } if !reason.is_empty() => {
                self.endpoint.fail(reason, *dead)
            }
            _ => self.endpoint.fail(&e.to_string(), e.dead_rank()),
        }
        // From here on this rank touches nothing of its peers' in this lane, whatever its state says.
        mine.set_left(self.seq);
        if !s.reached.is_empty() || s.reaches_me {
            self.let_peers_finish(buffers);
        }
    }

    /// After a failure: peers may still be inside the operation, with this rank's buffers in their hands. Waits a moment for
    /// them; memory that one of them may still touch is kept for good rather than handed to another tensor.
    fn let_peers_finish(&self, buffers: &CallBuffers<'_>) {
        let seq = self.seq;
        // A peer that enters the operation now looks at our state, which says that we left, or we see that it entered.
        bell::heavy_fence();
        // A peer's state is no answer: another of its threads may have set it while this lane's still copies.
        let inside = |p: &'a Peer| {
            let lane = self.of(p);
            let progress = lane.progress();
            progress >> 16 == seq && progress as u16 != STEP_DONE && lane.left() != seq && !p.dead()
        };
        let until = Instant::now() + PATIENCE;
        while self.endpoint.linked_peers().any(inside) {
            if Instant::now() >= until {
                buffers.input.keep();
                buffers.output.keep();
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Fails if a peer whose buffers this operation uses has left before it was done with the operation.
    #[inline]
    fn still_there(&self, p: &'a Peer) -> Result<(), OpError> {
        if !p.control.alive() && self.of(p).progress() < self.seq << 16 | u64::from(STEP_DONE) {
            return Err(self.left(p));
        }
        Ok(())
    }

    #[cold]
    fn left(&self, p: &Peer) -> OpError {
        let (state, reason) = p.control.state();
        let (rank, seq, what) = (self.endpoint.rank, self.seq, self.what());
        OpError::Left { rank, seq, what, peer: p.rank, pid: p.pid, state, reason, dead: p.control.dead_rank() }
    }

    /// The operation in words.
    fn what(&self) -> String {
        self.schedule.header.to_string()
    }

    /// Waits until every linked peer is done with operation `need`, whose slot is to be reused; answers with which they all are
    /// by now.
    fn drain(&mut self, need: u64) -> Result<u64, OpError> {
        let mut least = self.seq - 1;
        for p in self.endpoint.linked_peers() {
            self.wait_progress(p, need << 16 | u64::from(STEP_DONE))?;
            let progress = self.of(p).progress();
            let done = if progress as u16 == STEP_DONE { progress >> 16 } else { (progress >> 16).saturating_sub(1) };
            least = least.min(done);
        }
        Ok(least)
    }

    #[inline]
    fn wait_progress(&mut self, p: &'a Peer, target: u64) -> Result<(), OpError> {
        self.wait_for(p, |q| q.progress() >= target)
    }

    /// Waits until a peer has `come` so far.
    #[inline]
    fn wait_for(&mut self, p: &'a Peer, come: impl Fn(LaneView<'_>) -> bool) -> Result<(), OpError> {
        if come(self.of(p)) { Ok(()) } else { self.wait_on(p, come) }
    }

    #[inline(never)]
    fn wait_on(&mut self, p: &'a Peer, come: impl Fn(LaneView<'_>) -> bool) -> Result<(), OpError> {
        let (mine, theirs) = (self.mine, self.of(p));
        mine.tally().wait();
        self.deadline = None;
        let missing = |q: LaneView<'_>| !come(q);
        bell::wait(mine.bell(), self.endpoint.wait_policy(), || come(theirs), || self.check(missing, p))
    }

    /// Fails if this rank was aborted, or another of its lanes has failed.
    fn told_to_stop(&self) -> Result<(), OpError> {
        let endpoint = self.endpoint;
        let rank = endpoint.rank;
        if endpoint.abort.aborted() {
            return Err(OpError::Aborted {
                rank,
                seq: self.seq,
                what: self.what(),
                reason: endpoint.control.state().1,
            });
        }
        match endpoint.broken.get() {
            Some(first) => Err(first.again(rank)),
            None => Ok(()),
        }
    }

    /// Bytes of a stretch.
    #[inline]
    fn stretch(&self) -> u64 {
        if self.paced { self.endpoint.share.stretch() } else { u64::MAX }
    }

    /// Before a stretch of `bytes`: the tenant's turn.
    #[inline]
    fn pause(&self, bytes: u64) -> Result<(), OpError> {
        if !self.paced {
            return Ok(());
        }
        self.told_to_stop()?;
        self.endpoint.share.pace(bytes, || self.told_to_stop())
    }

    /// Looks at everything that can end a wait early. `missing` tells which peers the step still lacks.
    #[cold]
    fn check(&mut self, missing: impl Fn(LaneView<'_>) -> bool, waited: &'a Peer) -> Result<(), OpError> {
        let endpoint = self.endpoint;
        let (rank, seq) = (endpoint.rank, self.seq);
        self.napped = true;
        self.mine.tally().nap();
        self.told_to_stop()?;
        // A peer that is gone ends the wait if this step lacks it, or a later one will.
        let last = seq << 16 | u64::from(self.schedule.last_wait);
        let lacking = |p: &'a Peer| missing(self.of(p)) || self.of(p).progress() < last;
        for p in endpoint.linked_peers() {
            // The last look is after the state: it may have finished this very operation before it left.
            if lacking(p) && !p.control.alive() && lacking(p) {
                return Err(self.left(p));
            }
            if lacking(p) && p.dead() && lacking(p) {
                let last = self.of(p).last_seen(seq);
                return Err(OpError::Died { rank, seq, what: self.what(), peer: p.rank, pid: p.pid, last });
            }
        }
        // A time-out beyond what the clock can say is none.
        let Some(end) = Instant::now().checked_add(self.timeout) else { return Ok(()) };
        // The rank that is waited for may be at work in this very operation, in one long step.
        let counted = self.of(waited).tally().read();
        let worked = counted.copied.wrapping_add(counted.reduced);
        let fresh = || (Wait::until(end).stepping(NAP), worked);
        let (deadline, before) = self.deadline.get_or_insert_with(fresh);
        if deadline.left().is_some() {
            return Ok(());
        }
        if worked != *before {
            self.deadline = Some(fresh());
            return Ok(());
        }
        let mut absent: Vec<Absent> = Vec::new();
        let mut come: Vec<Absent> = Vec::new();
        for p in endpoint.linked_peers().filter(|p| missing(self.of(p)) || p.rank == waited.rank) {
            let mut last = self.of(p).last_seen(seq);
            if p.pid.here().is_some_and(crate::os::process::is_stopped) {
                last += "; its process is stopped (SIGSTOP, a debugger)";
            }
            let a = Absent { rank: p.rank, pid: p.pid, last };
            // Who has not come at all goes first, then the one that is waited for: the others may wait for them themselves.
            match self.of(p).progress() >> 16 < seq {
                true => absent.push(a),
                false if p.rank == waited.rank => come.insert(0, a),
                false => come.push(a),
            }
        }
        absent.append(&mut come);
        Err(OpError::Timeout { rank, seq, what: self.what(), after: self.timeout, absent })
    }

    #[inline]
    fn step(&mut self, step: &Step, bases: &mut Bases) -> Result<(), OpError> {
        let s = self.schedule;
        match *step {
            Step::Arrival(peer) => self.arrival(self.peer(usize::from(peer))?, bases)?,
            Step::Wait { peer, step } => {
                self.wait_progress(self.peer(usize::from(peer))?, self.seq << 16 | u64::from(step))?
            }
            Step::SendsToMe(peer) => self.meant_for_me(self.peer(usize::from(peer))?, true)?,
            Step::ReceivesFromMe(peer) => self.meant_for_me(self.peer(usize::from(peer))?, false)?,
            Step::Signal(step) => {
                self.mine.set_progress(self.seq, step);
                self.endpoint.ring_lane(self.at, self.bells);
            }
            Step::Copy { dst, src: At(Place::PeerIn(peer), from), len } if s.direct => {
                let dst = self.place(dst, bases);
                for (at, len) in stretches(len, self.stretch()) {
                    self.told_to_stop()?;
                    self.pause(len)?;
                    let dst = dst.wrapping_add(at as usize);
                    // SAFETY: as for Copy.
                    unsafe { self.read_private(self.peer(usize::from(peer))?, from + at, dst, len, bases)? };
                    self.mine.tally().copied(len);
                }
            }
            Step::Copy { dst, src, len } => {
                let (dst, src) = (self.place(dst, bases), self.place(src, bases));
                for (at, len) in stretches(len, self.stretch()) {
                    self.pause(len)?;
                    let (dst, src) = (dst.wrapping_add(at as usize), src.wrapping_add(at as usize));
                    // SAFETY: `at` gives pointers into memory that is mapped for the whole operation; the schedule was
                    // sealed, so position + len lies inside in_bytes/out_bytes (checked here against the caller's buffers
                    // and, on arrival, the peer's), the slot or the staging half; no other rank writes `dst` now.
                    unsafe {
                        match s.streaming {
                            true => copy::copy_nt(dst, src, len as usize),
                            false => copy::copy(dst, src, len as usize),
                        }
                    };
                    self.mine.tally().copied(len);
                }
            }
            Step::Reduce { dst, first, n, count, op } => {
                let mut sources = [const { MaybeUninit::<*const u8>::uninit() }; MAX_LOCAL_RANKS];
                let listed = &s.sources[first as usize..first as usize + n as usize];
                for (to, from) in sources.iter_mut().zip(listed) {
                    to.write(self.place(*from, bases));
                }
                // SAFETY: as many as are listed have been written; there is room for more than a sealed schedule lists.
                let sources = unsafe { sources[..listed.len()].assume_init_mut() };
                let dst = self.place(dst, bases);
                let scales = (op == ReduceOp::PreMulSum).then(|| {
                    let mut scales = [1.0; MAX_LOCAL_RANKS];
                    for (to, from) in scales.iter_mut().zip(listed) {
                        *to = self.scale_of(*from, bases);
                    }
                    scales
                });
                let (dtype, size) = (s.header.dtype, s.header.dtype.size() as u64);
                // Stretches are whole pages, and so whole elements.
                let (mut at, total, most) = (0, count * size, self.stretch());
                loop {
                    let len = most.min(total - at);
                    self.pause(u64::from(n) * len)?;
                    let (dst, count) = (dst.wrapping_add(at as usize), (len >> size.trailing_zeros()) as usize);
                    // SAFETY: as for Copy, for dst and each of the n sources, which are moved on by every stretch; dst
                    // equals a source or overlaps none.
                    unsafe {
                        match &scales {
                            Some(by) => reduce::reduce_scaled(dtype, dst, sources, &by[..n as usize], count),
                            None => reduce::reduce(op, dtype, dst, sources, count),
                        }
                    };
                    self.mine.tally().reduced(u64::from(n) * len);
                    at += len;
                    if at == total {
                        break;
                    }
                    advance(sources, len as usize);
                }
            }
            Step::Average { dst, count, n } => {
                let dst = self.place(dst, bases);
                let (dtype, size) = (s.header.dtype, s.header.dtype.size() as u64);
                for (at, len) in stretches(count * size, self.stretch()) {
                    self.pause(len)?;
                    // SAFETY: as for Copy.
                    unsafe {
                        reduce::scale_avg(dtype, dst.wrapping_add(at as usize), (len / size) as usize, n as usize)
                    };
                }
            }
            Step::Swap { a, b, len } => {
                let (a, b) = (self.place(a, bases), self.place(b, bases));
                for (at, len) in stretches(len, self.stretch()) {
                    self.pause(2 * len)?;
                    let (a, b) = (a.wrapping_add(at as usize), b.wrapping_add(at as usize));
                    // SAFETY: as for Copy; the two ranges belong to different ranks' buffers, and the pair's other rank
                    // leaves both alone (the lower rank of a pair swaps).
                    unsafe { std::ptr::swap_nonoverlapping(a, b, len as usize) };
                    self.mine.tally().copied(2 * len);
                }
            }
        }
        Ok(())
    }

    #[inline]
    fn arrival(&mut self, p: &'a Peer, bases: &mut Bases) -> Result<(), OpError> {
        let (s, seq) = (self.schedule, self.seq);
        let theirs = self.of(p);
        *bases.lanes[p.rank].get_mut() = theirs.first();
        self.wait_for(p, |q| q.arrived(seq))?;
        if let Err(call) = theirs.same_call(seq, s.words) {
            return Err(self.mismatch(p, self.what(), call));
        }
        if theirs.aside(seq).digest != self.before {
            return Err(self.other_past(p));
        }
        // A peer that announced this operation and then gave it up, for want of this rank perhaps, does not take part.
        self.still_there(p)?;
        if s.inline {
            return Ok(());
        }
        let [input, output, table, scale] = theirs.words(seq);
        if table != s.table {
            let mine = self.what();
            let call = format!("{mine} with other counts or pairs in its lists");
            return Err(self.mismatch(p, mine, call));
        }
        bases.scales[p.rank] = f32::from_bits(scale as u32);
        let (need_in, need_out) = s.extents[p.rank];
        if s.direct {
            // That the calls match fixes how long the input is; what a peer of another make announces is looked at here.
            if output < need_in {
                // One that sends to nobody has none, and is told so.
                if s.steps.contains(&Step::SendsToMe(p.rank as u16)) {
                    self.meant_for_me(p, true)?;
                }
                return Err(OpError::BadPeer { rank: self.endpoint.rank, seq, peer: p.rank });
            }
            bases.private_in[p.rank] = input;
        } else if !s.private {
            // A rank without that buffer (a reduce's output off the root) announces any offset; only one that the
            // steps use must fit.
            let (a, b) = (p.hbm.at(input, need_in), p.hbm.at(output, need_out));
            if a.is_none() && need_in > 0 || b.is_none() && need_out > 0 {
                return Err(OpError::BadPeer { rank: self.endpoint.rank, seq, peer: p.rank });
            }
            *bases.peer_in[p.rank].get_mut() = a.unwrap_or(std::ptr::null_mut());
            *bases.peer_out[p.rank].get_mut() = b.unwrap_or(std::ptr::null_mut());
        }
        Ok(())
    }

    #[cold]
    fn mismatch(&self, p: &Peer, mine: String, theirs: String) -> OpError {
        OpError::Mismatch { rank: self.endpoint.rank, seq: self.seq, mine, peer: p.rank, theirs }
    }

    /// A peer is in this very call, but after others than this rank.
    #[cold]
    fn other_past(&self, p: &'a Peer) -> OpError {
        let seq = self.seq;
        // Where it began, if that is not long ago: in a one-way operation the two need not have met.
        let began = (seq.saturating_sub(SLOTS as u64 - 1).max(1)..seq).find_map(|at| {
            let (mine, theirs) = (self.mine.call(at)?, self.of(p).call(at)?);
            let rank = self.endpoint.rank;
            (mine != theirs).then_some(OpError::Mismatch { rank, seq: at, mine, peer: p.rank, theirs })
        });
        began.unwrap_or_else(|| {
            let mine = self.what();
            let theirs =
                format!("{mine} after other operations than ours, on other rings, or by another WCCL_TUNE_FILE");
            self.mismatch(p, mine, theirs)
        })
    }

    /// Copies from the input of an arrived peer, in its private memory.
    ///
    /// # Safety
    /// `dst` must be valid for writing `len` bytes.
    unsafe fn read_private(
        &self,
        p: &'a Peer,
        from: u64,
        dst: *mut u8,
        len: u64,
        bases: &Bases,
    ) -> Result<(), OpError> {
        let (rank, seq, peer) = (self.endpoint.rank, self.seq, p.rank);
        // SAFETY: the caller's contract.
        let read = unsafe { p.space.read(bases.private_in[peer].wrapping_add(from), dst, len) };
        read.or_else(|why| {
            // A rank that leaves takes its buffers along: that it left is what there is to say.
            self.still_there(p)?;
            let (what, pid) = (self.what(), p.pid);
            // The memory of a process goes a moment before the kernel tells of its end.
            let until = Instant::now() + DYING;
            while !p.dead() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            if p.dead() {
                return Err(OpError::Died { rank, seq, what, peer, pid, last: self.of(p).last_seen(seq) });
            }
            Err(OpError::Unreadable { rank, seq, what, peer, pid, why })
        })
    }

    /// Whether an arrived peer sends to this rank, respectively receives from it.
    fn meant_for_me(&self, p: &'a Peer, sends: bool) -> Result<(), OpError> {
        let aside = self.of(p).aside(self.seq);
        let whom = if sends { aside.dst } else { aside.src };
        if usize::from(whom) == self.endpoint.rank {
            return Ok(());
        }
        let (mine, theirs) = if sends { ("from", "to") } else { ("to", "from") };
        let named = if whom == NO_RANK { "nobody".into() } else { format!("rank {whom}") };
        let what = self.what();
        Err(self.mismatch(p, format!("{what} {mine} rank {}", p.rank), format!("{what} {theirs} {named}")))
    }

    /// Where `at` is. Sealed schedules name a peer's memory only after its arrival.
    #[inline(always)]
    fn place(&self, at: At, bases: &Bases) -> *mut u8 {
        let lane = |r: u16| bases.lanes[usize::from(r)].load(Ordering::Relaxed);
        let base = match at.0 {
            Place::In => bases.own_in.load(Ordering::Relaxed),
            Place::Out => bases.own_out.load(Ordering::Relaxed),
            Place::PeerIn(p) => bases.peer_in[usize::from(p)].load(Ordering::Relaxed),
            Place::PeerOut(p) => bases.peer_out[usize::from(p)].load(Ordering::Relaxed),
            Place::Slot(r) => lane(r).wrapping_add(self.slot),
            Place::Stage(r, half) => lane(r).wrapping_add(lanes::stage_at(false, usize::from(half))),
            Place::Result(r, half) => lane(r).wrapping_add(lanes::stage_at(true, usize::from(half))),
        };
        base.wrapping_add(at.1 as usize)
    }

    /// What a source of a pre-scaled sum is multiplied by.
    #[inline]
    fn scale_of(&self, at: At, bases: &Bases) -> f32 {
        at.0.scaled_by(self.endpoint.rank).map_or(1.0, |r| bases.scales[r])
    }
}

/// Moves sources on to their next stretch, which few operations have.
#[cold]
fn advance(sources: &mut [*const u8], by: usize) {
    for from in sources {
        *from = from.wrapping_add(by);
    }
}

/// Where the buffers of an operation lie. Atomic pointers only so that a lane can be moved between threads and looked at from
/// several; nobody else writes them, and a relaxed load is a plain one.
#[derive(Debug)]
pub(super) struct Bases {
    own_in: AtomicPtr<u8>,
    own_out: AtomicPtr<u8>,
    /// This rank's lane, and those of peers that have arrived.
    lanes: [AtomicPtr<u8>; MAX_LOCAL_RANKS],
    peer_in: [AtomicPtr<u8>; MAX_LOCAL_RANKS],
    peer_out: [AtomicPtr<u8>; MAX_LOCAL_RANKS],
    /// Addresses of inputs in the peers' own address spaces.
    private_in: [u64; MAX_LOCAL_RANKS],
    /// Scales of a pre-scaled sum, by rank.
    scales: [f32; MAX_LOCAL_RANKS],
}

impl Bases {
    pub(super) fn none() -> Bases {
        let all = || std::array::from_fn(|_| AtomicPtr::default());
        let (own_in, own_out) = Default::default();
        let (private_in, scales) = ([0; MAX_LOCAL_RANKS], [1.0; MAX_LOCAL_RANKS]);
        Bases { own_in, own_out, lanes: all(), peer_in: all(), peer_out: all(), private_in, scales }
    }

    /// For an operation by `s`: what it uses of the one before is cleared.
    #[inline]
    fn begin(&mut self, buffers: &CallBuffers<'_>, s: &Sealed) {
        (*self.own_in.get_mut(), *self.own_out.get_mut()) = (buffers.input.ptr, buffers.output.ptr);
        for p in &s.reached {
            let p = usize::from(*p);
            *self.peer_in[p].get_mut() = std::ptr::null_mut();
            *self.peer_out[p].get_mut() = std::ptr::null_mut();
            self.private_in[p] = 0;
        }
    }
}
