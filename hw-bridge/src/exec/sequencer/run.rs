//! Executing a sealed schedule.

use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, Instant};

use super::{Absent, At, CallArgs, Lane, LocalMem, OpError, Place, Schedule, Sealed, Step};
use crate::call::{FLAG_PRIVATE, OpHeader, ReduceOp};
use crate::exec::reduce;
use crate::group::flight::State;
use crate::group::{Aside, LaneView, NO_RANK, Peer, RankState, STEP_DONE};
use crate::limits::{INLINE_BYTES, MAX_LOCAL_RANKS, NAP, SLOT_BYTES, SLOTS};
use crate::memory::copy;
use crate::os::bell;
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
            return Err(first.again(endpoint.rank));
        }
        if endpoint.abort.aborted() {
            let (rank, seq, what) = (endpoint.rank, self.seq + 1, schedule.header.to_string());
            return Err(OpError::Aborted { rank, seq, what, reason: endpoint.control.state().1 });
        }
        if crate::os::fork::in_child() {
            let (rank, what, parent) = (endpoint.rank, schedule.header.to_string(), endpoint.control.pid());
            return Err(OpError::Forked { rank, what, parent });
        }
        let fits = self.check_buffers(schedule, &input, &output);
        if let Err(e) = fits.and_then(|()| self.begin().map(drop)) {
            self.retract();
            return Err(e);
        }
        self.seq += 1;
        let rank16 = |r: Option<usize>| r.map_or(NO_RANK, |r| r as u16);
        let aside = Aside { dst: rank16(args.dst), src: rank16(args.src), digest: self.digest ^ self.plan };
        self.mine().flight().begin(self.seq, &schedule.header, schedule.moved);
        let mut wait = WaitCtx {
            header: &schedule.header,
            seq: self.seq,
            timeout: args.timeout,
            deadline: None,
            last_wait: schedule.last_wait,
            napped: false,
            paced: schedule.moved > self.endpoint.share.stretch(),
        };
        let done = self.run_steps(schedule, &input, &output, aside, args.scale, &mut wait);
        let stamp = wait.napped || schedule.slot_len == 0 || schedule.slot_len > SLOT_BYTES as u64;
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
                    OpError::Left { state: RankState::Failed, reason, dead, .. } if !reason.is_empty() => {
                        self.endpoint.fail(reason, *dead)
                    }
                    _ => self.endpoint.fail(&e.to_string(), e.dead_rank()),
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
        bell::heavy_fence();
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
        let endpoint = &self.endpoint;
        if s.seat != (endpoint.rank, endpoint.nranks) {
            let (rank, nranks, what) = (endpoint.rank, endpoint.nranks, s.header.to_string());
            return Err(OpError::Seat { rank, nranks, what, sealed: s.seat });
        }
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
            self.endpoint.fail(&e.to_string(), None);
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
        let whole = if wait.paced { 0 } else { s.moved };
        self.endpoint.share.begin(whole, || self.told_to_stop(wait))?;
        self.drain(seq, s.ahead(), wait)?;
        let mut bases = self.bases.take().unwrap_or_else(|| Box::new(Bases::none()));
        bases.begin(input.ptr, output.ptr, self.endpoint.nranks);
        bases.scales[self.endpoint.rank] = scale;
        if s.payload > 0 {
            let dst = self.mine().payload(seq, s.slot_len as usize);
            // SAFETY: the payload is at most LARGE_SLOT_BYTES (checked when the schedule was sealed) and lies in our own slot,
            // which `drain` found unused; the input has `in_bytes >= payload` bytes (checked above).
            unsafe { copy::copy(dst, input.ptr, s.payload as usize) };
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
        let (rank, seq, what) = (self.endpoint.rank, wait.seq, wait.header.to_string());
        OpError::Left { rank, seq, what, peer: p.rank, pid: p.pid, state, reason, dead: p.control.dead_rank() }
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

    #[inline]
    fn wait_progress(&self, peer: usize, target: u64, wait: &mut WaitCtx<'_>) -> Result<(), OpError> {
        self.wait_for(peer, wait, |q| q.progress() >= target)
    }

    #[inline]
    fn wait_arrival(&self, peer: usize, wait: &mut WaitCtx<'_>) -> Result<(), OpError> {
        let seq = wait.seq;
        self.wait_for(peer, wait, |q| q.arrived(seq))
    }

    /// Waits until a peer has `come` so far.
    fn wait_for(
        &self,
        peer: usize,
        wait: &mut WaitCtx<'_>,
        come: impl Fn(LaneView<'_>) -> bool,
    ) -> Result<(), OpError> {
        let Some(p) = self.endpoint.peer(peer) else {
            return Err(OpError::NotLinked { rank: self.endpoint.rank, peer });
        };
        let theirs = self.of(p);
        if come(theirs) {
            return Ok(());
        }
        self.mine().tally().wait();
        wait.deadline = None;
        let missing = |q: LaneView<'_>| !come(q);
        bell::wait(self.mine().bell(), self.endpoint.wait_policy(), || come(theirs), || self.check(wait, missing, peer))
    }

    /// Fails if this rank was aborted, or another of its lanes has failed.
    fn told_to_stop(&self, wait: &WaitCtx<'_>) -> Result<(), OpError> {
        let endpoint = &*self.endpoint;
        let rank = endpoint.rank;
        if endpoint.abort.aborted() {
            let (seq, what) = (wait.seq, wait.header.to_string());
            return Err(OpError::Aborted { rank, seq, what, reason: endpoint.control.state().1 });
        }
        match endpoint.broken.get() {
            Some(first) => Err(first.again(rank)),
            None => Ok(()),
        }
    }

    /// Before a stretch of `bytes`: the tenant's turn.
    #[inline]
    fn pause(&self, bytes: u64, wait: &WaitCtx<'_>) -> Result<(), OpError> {
        if !wait.paced {
            return Ok(());
        }
        self.told_to_stop(wait)?;
        self.endpoint.share.pace(bytes, || self.told_to_stop(wait))
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
        self.told_to_stop(wait)?;
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
        // A time-out beyond what the clock can say is none.
        let Some(end) = Instant::now().checked_add(wait.timeout) else { return Ok(()) };
        // The rank that is waited for may be at work in this very operation, in one long step.
        let worked = endpoint.peer(waited).map_or(0, |p| {
            let counted = self.of(p).tally().read();
            counted.copied.wrapping_add(counted.reduced)
        });
        let fresh = || (Wait::until(end).stepping(NAP), worked);
        let (deadline, before) = wait.deadline.get_or_insert_with(fresh);
        if deadline.left().is_some() {
            return Ok(());
        }
        if worked != *before {
            wait.deadline = Some(fresh());
            return Ok(());
        }
        let mut absent: Vec<Absent> = Vec::new();
        let mut come: Vec<Absent> = Vec::new();
        for p in endpoint.linked_peers().filter(|p| missing(self.of(p)) || p.rank == waited) {
            let mut last = self.of(p).last_seen(seq);
            if p.pid.here().is_some_and(crate::os::process::is_stopped) {
                last += "; its process is stopped (SIGSTOP, a debugger)";
            }
            let a = Absent { rank: p.rank, pid: p.pid, last };
            // Who has not come at all goes first, then the one that is waited for: the others may wait for them themselves.
            match self.of(p).progress() >> 16 < seq {
                true => absent.push(a),
                false if p.rank == waited => come.insert(0, a),
                false => come.push(a),
            }
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
                for (at, len) in stretches(len, self.endpoint.share.stretch()) {
                    self.told_to_stop(wait)?;
                    self.pause(len, wait)?;
                    let dst = dst.wrapping_add(at as usize);
                    // SAFETY: as for Copy.
                    unsafe { self.read_private(usize::from(peer), from + at, dst, len, bases, wait)? };
                    self.mine().tally().copied(len);
                }
            }
            Step::Copy { dst, src, len } => {
                let (dst, src) = (self.at(s, dst, bases, wait.seq), self.at(s, src, bases, wait.seq));
                for (at, len) in stretches(len, self.endpoint.share.stretch()) {
                    self.pause(len, wait)?;
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
                    self.mine().tally().copied(len);
                }
            }
            Step::Reduce { dst, first, n, count, op } => {
                let mut sources = [std::ptr::null::<u8>(); MAX_LOCAL_RANKS];
                let listed = &s.sources[first as usize..first as usize + n as usize];
                for (to, from) in sources.iter_mut().zip(listed) {
                    *to = self.at(s, *from, bases, wait.seq);
                }
                let dst = self.at(s, dst, bases, wait.seq);
                let scales = (op == ReduceOp::PreMulSum).then(|| {
                    let mut scales = [1.0; MAX_LOCAL_RANKS];
                    for (to, from) in scales.iter_mut().zip(listed) {
                        *to = self.scale_of(*from, bases);
                    }
                    scales
                });
                let (dtype, size) = (s.header.dtype, s.header.dtype.size() as u64);
                let sources = &mut sources[..n as usize];
                // Stretches are whole pages, and so whole elements.
                for (at, len) in stretches(count * size, self.endpoint.share.stretch()) {
                    self.pause(u64::from(n) * len, wait)?;
                    let (dst, count) = (dst.wrapping_add(at as usize), (len / size) as usize);
                    // SAFETY: as for Copy, for dst and each of the n sources, which are moved on by every stretch; dst
                    // equals a source or overlaps none.
                    unsafe {
                        match &scales {
                            Some(by) => reduce::reduce_scaled(dtype, dst, sources, &by[..n as usize], count),
                            None => reduce::reduce(op, dtype, dst, sources, count),
                        }
                    };
                    self.mine().tally().reduced(u64::from(n) * len);
                    for from in &mut *sources {
                        *from = from.wrapping_add(len as usize);
                    }
                }
            }
            Step::Average { dst, count, n } => {
                let dst = self.at(s, dst, bases, wait.seq);
                let (dtype, size) = (s.header.dtype, s.header.dtype.size() as u64);
                for (at, len) in stretches(count * size, self.endpoint.share.stretch()) {
                    self.pause(len, wait)?;
                    // SAFETY: as for Copy.
                    unsafe {
                        reduce::scale_avg(dtype, dst.wrapping_add(at as usize), (len / size) as usize, n as usize)
                    };
                }
            }
            Step::Swap { a, b, len } => {
                let (a, b) = (self.at(s, a, bases, wait.seq), self.at(s, b, bases, wait.seq));
                for (at, len) in stretches(len, self.endpoint.share.stretch()) {
                    self.pause(2 * len, wait)?;
                    let (a, b) = (a.wrapping_add(at as usize), b.wrapping_add(at as usize));
                    // SAFETY: as for Copy; the two ranges belong to different ranks' buffers, and the pair's other rank
                    // leaves both alone (the lower rank of a pair swaps).
                    unsafe { std::ptr::swap_nonoverlapping(a, b, len as usize) };
                    self.mine().tally().copied(2 * len);
                }
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
        if self.of(p).aside(seq).digest != self.digest ^ self.plan {
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
                    // One that sends to nobody has none, and is told so.
                    if s.steps.contains(&Step::SendsToMe(peer as u16)) {
                        self.meant_for_me(s, peer, true)?;
                    }
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

struct WaitCtx<'a> {
    header: &'a OpHeader,
    seq: u64,
    timeout: Duration,
    /// When the wait gives up, and how many bytes the rank that it waits for had moved when that was set.
    deadline: Option<(Wait, u64)>,
    last_wait: u16,
    /// Some wait of the operation was not over soon.
    napped: bool,
    /// Its stretches wait for their turns; a smaller one waits once, when it begins.
    paced: bool,
}

/// Where the buffers of an operation lie. Atomic pointers only so that a lane can be moved between threads and looked at from
/// several; nobody else writes them, and a relaxed load is a plain one.
#[derive(Debug)]
pub(super) struct Bases {
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
    pub(super) fn none() -> Bases {
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
