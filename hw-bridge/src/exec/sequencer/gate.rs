//! Gates: where the operations of a communicator stop, all ranks at the same one, so that what they run by can be exchanged.
//!
//! Each lane has a gate, which every operation passes before anything else is done for it ([`Lane::begin`]). A lane first
//! announces the number of its next operation, then looks whether the gate is shut. Whoever closes the gates shuts them, then
//! looks at what was announced; between the two of each side lies a fence, as with a [`crate::os::bell::Bell`]: a lane that has
//! not seen the gate shut was seen. So an announced operation is either inside or waits at its gate, and none is lost.
//!
//! A gate that was opened stays shut for its own lane until the next operation has passed it, so that a lane which was idle
//! learns of it, be it after several closings, or in the middle of one that lets its operation begin.
//!
//! The *boundary* of a lane is the largest number that any rank has announced there. Programs that issue the same operations
//! on all ranks can always come to it: what the rank that is furthest waited for, it had announced. An open gate costs a
//! store and a load.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};

use super::{Endpoint, Lane, OpError};
use crate::group::STEP_DONE;
use crate::limits::{LANES, NAP};
use crate::os::bell::{Fence, heavy_fence, publish_fence};
use crate::os::lock::lock;

/// The gate of one lane.
#[derive(Debug, Default)]
pub(super) struct Gate {
    /// From a closing until an operation has passed after the opening.
    shut: AtomicBool,
    /// The operation that the lane is in, or wants to begin, or has ended last.
    announced: AtomicU64,
    /// While it is closed: operations up to this one may begin. `shut` changes under it.
    closed: Mutex<Option<u64>>,
    moved: Condvar,
}

/// Numbers of operations, one for each lane.
pub type Positions = [u64; LANES];

impl Lane {
    /// Announces the lane's next operation and waits while its gate is closed. Whatever an operation is chosen by must be
    /// looked at after this; [`Lane::run`] does it for those who have not. Answers whether the gate was closed since an operation
    /// last passed it open, so that what was known may be old.
    ///
    /// # Errors
    /// [`OpError::Broken`] if the communicator ends meanwhile, [`OpError::Forked`].
    #[inline]
    pub fn begin(&mut self) -> Result<bool, OpError> {
        let next = self.seq + 1;
        if self.admitted == next {
            return Ok(false);
        }
        let gate = &self.endpoint.gates[self.index];
        gate.announced.store(next, Ordering::Relaxed);
        publish_fence(if self.endpoint.fenced.load(Ordering::Relaxed) { Fence::Full } else { Fence::Light });
        if gate.shut.load(Ordering::Relaxed) {
            self.wait_at_gate(next)?;
            self.admitted = next;
            return Ok(true);
        }
        self.admitted = next;
        Ok(false)
    }

    /// Takes back what [`Lane::begin`] announced: the operation does not come.
    #[cold]
    pub fn retract(&mut self) {
        self.admitted = self.seq;
        self.endpoint.gates[self.index].announced.store(self.seq, Ordering::Release);
    }

    #[cold]
    fn wait_at_gate(&mut self, next: u64) -> Result<(), OpError> {
        let endpoint = self.endpoint.clone();
        if crate::os::fork::in_child() {
            let (rank, parent) = (endpoint.rank, endpoint.control.pid());
            return Err(OpError::Forked { rank, what: "an operation".into(), parent });
        }
        let gate = &endpoint.gates[self.index];
        let mut closed = lock(&gate.closed);
        loop {
            match *closed {
                None => {
                    // The first operation after it was opened looks.
                    gate.shut.store(false, Ordering::Relaxed);
                    return Ok(());
                }
                Some(last) if next <= last => return Ok(()),
                Some(_) => {}
            }
            if let Err(e) = endpoint.usable() {
                drop(closed);
                self.retract();
                return Err(e);
            }
            closed = gate.moved.wait_timeout(closed, NAP).unwrap_or_else(|p| p.into_inner()).0;
        }
    }
}

/// Why there is no boundary yet, or at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lacking {
    /// This rank has not published.
    Silent(usize),
    /// This rank would go by other rings.
    OtherRings(usize),
}

/// Gates that are closed, until this is dropped.
#[derive(Debug)]
pub struct Closed<'a>(&'a Endpoint);

impl Endpoint {
    /// Closes the gates of all lanes: no operation begins that was not announced. One closes them at a time.
    pub fn close_gates(&self) -> Closed<'_> {
        for gate in &self.gates {
            let mut closed = lock(&gate.closed);
            *closed = Some(0);
            gate.shut.store(true, Ordering::Relaxed);
        }
        heavy_fence();
        Closed(self)
    }

    /// Whether every other rank is linked.
    pub fn linked_to_all(&self) -> bool {
        (0..self.nranks).all(|r| self.linked(r))
    }

    /// A linked rank, or this one, has left or ended: no operation will succeed any more.
    pub fn ending(&self) -> bool {
        self.usable().is_err() || self.linked_peers().any(|p| !p.control.alive() || p.dead())
    }

    /// Processes of the linked ranks, as far as they have a pid here.
    pub fn peer_pids(&self) -> impl Iterator<Item = (usize, u32)> {
        self.linked_peers().filter_map(|p| Some((p.rank, p.pid.here()?)))
    }
}

impl Closed<'_> {
    /// Publishes what this rank's lanes have announced, under the number `id` that all ranks use for this closing, and a digest of
    /// the rings that it would go by when the gates open again.
    pub fn publish(&self, id: u64, rings: u64) -> Positions {
        let mine = std::array::from_fn(|l| self.0.gates[l].announced.load(Ordering::Acquire));
        self.0.control.set_positions(id, &mine, rings);
        mine
    }

    /// The boundary, once all linked ranks have published under `id`. One that has left or ended announces nothing any more: what
    /// it has done counts, and what the others still do without it may succeed.
    ///
    /// # Errors
    /// [`Lacking`].
    pub fn boundary(&self, id: u64, mine: &Positions, rings: u64) -> Result<Positions, Lacking> {
        let mut all = *mine;
        for p in self.0.linked_peers() {
            let theirs = match p.control.positions(id) {
                Some((_, other)) if other != rings => return Err(Lacking::OtherRings(p.rank)),
                Some((theirs, _)) => theirs,
                // A lane that this rank has not used has no operation of both.
                None if !p.control.alive() || p.dead() => {
                    let done = |l: usize| if mine[l] > 0 { p.control.lane(l).progress() >> 16 } else { 0 };
                    std::array::from_fn(done)
                }
                None => return Err(Lacking::Silent(p.rank)),
            };
            all.iter_mut().zip(theirs).for_each(|(a, b)| *a = (*a).max(b));
        }
        Ok(all)
    }

    /// Lets operations up to the boundary begin.
    pub fn raise(&self, boundary: &Positions) {
        for (gate, last) in self.0.gates.iter().zip(boundary) {
            *lock(&gate.closed) = Some(*last);
            gate.moved.notify_all();
        }
    }

    /// The first lane whose operation at the boundary is not done, and what it did last.
    pub fn short_of(&self, boundary: &Positions) -> Option<(usize, String)> {
        let short = |l: usize| {
            let target = boundary[l] << 16 | u64::from(STEP_DONE);
            let taken = self.0.taken[l].load(Ordering::Acquire);
            // A lane that nobody took has no memory to look at.
            boundary[l] > 0 && (!taken || self.0.control.lane(l).progress() < target)
        };
        let l = (0..LANES).find(|l| short(*l))?;
        let taken = self.0.taken[l].load(Ordering::Acquire);
        let last = if taken { self.0.control.lane(l).last_seen(boundary[l]) } else { "it is not in use".into() };
        Some((l, last))
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        for gate in &self.0.gates {
            *lock(&gate.closed) = None;
            gate.moved.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::exec::share::{Market, Share, Terms};
    use crate::memory::hbm::Hbm;
    use crate::os::bell::WaitPolicy;

    /// A lane learns of each exchange before it does anything for its next operation, also if that one may begin while the gates
    /// are closed for a further exchange, because another rank had announced it.
    #[test]
    fn a_lane_that_was_idle_learns_of_every_closing() {
        const LANE: usize = 1;
        let share = Share::new(Arc::new(Market::create().unwrap()), 0, Terms::default()).unwrap();
        let policy = WaitPolicy::for_ranks(1, 1);
        let endpoint = Arc::new(Endpoint::new(0, 1, Hbm::new(1 << 20).unwrap(), policy, Arc::new(share)).unwrap());
        let mut lane = endpoint.lane(LANE).unwrap().unwrap();
        let mut next = |closed_since: bool| {
            assert_eq!(lane.begin().unwrap(), closed_since, "operation {}", lane.seq + 1);
            lane.seq += 1;
        };
        let close = |id: u64, announced: u64| {
            let closed = endpoint.close_gates();
            let mut boundary = closed.publish(id, 0);
            boundary[LANE] = boundary[LANE].max(announced);
            closed.raise(&boundary);
            closed
        };
        next(false);
        drop(close(1, 0));
        let second = close(2, 2);
        next(true);
        drop(second);
        next(true);
        next(false);
        drop(close(3, 0));
        drop(close(4, 0));
        next(true);
        next(false);
    }
}
