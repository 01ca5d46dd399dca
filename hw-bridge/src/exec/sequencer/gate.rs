//! Gates: where the operations of a communicator stop, all ranks at the same one, so that what they run by can be exchanged.
//!
//! Each lane has a gate, which every operation passes before anything else is done for it ([`Lane::begin`]). A lane first
//! announces the number of its next operation, then looks at the gate's limit. Whoever closes the gates lowers the limits,
//! then looks at what was announced; between the two of each side lies a fence, as with a [`crate::os::bell::Bell`]: a lane
//! that has not seen the limit was seen. So an announced operation is either inside or waits at its gate, and none is lost.
//!
//! The *boundary* of a lane is the largest number that any rank has announced there. Programs that issue the same operations
//! on all ranks can always come to it: what the rank that is furthest waited for, it had announced. An open gate costs a
//! store and a load.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

use super::{Endpoint, Lane, OpError};
use crate::group::STEP_DONE;
use crate::limits::{LANES, NAP};
use crate::os::bell::{Fence, heavy_fence, publish_fence};

/// The gate of one lane.
#[derive(Debug)]
pub(super) struct Gate {
    /// Operations up to this one may begin.
    limit: AtomicU64,
    /// The operation that the lane is in, or wants to begin, or has ended last.
    announced: AtomicU64,
    closed: Mutex<bool>,
    moved: Condvar,
}

impl Default for Gate {
    fn default() -> Gate {
        let (announced, closed, moved) = Default::default();
        Gate { limit: AtomicU64::new(u64::MAX), announced, closed, moved }
    }
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.closed.lock().unwrap_or_else(|p| p.into_inner())
    }
}

/// Numbers of operations, one for each lane.
pub type Positions = [u64; LANES];

impl Lane {
    /// Announces the lane's next operation and waits while its gate is closed. Whatever an operation is chosen by must be
    /// looked at after this; [`Lane::run`] does it for those who have not. Answers whether the gate was closed since the
    /// operation before, so that what was known may be old.
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
        if next > gate.limit.load(Ordering::Relaxed) {
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
        let mut closed = gate.lock();
        loop {
            if !*closed {
                // The first operation after it was opened has looked.
                gate.limit.store(u64::MAX, Ordering::Relaxed);
                return Ok(());
            }
            if next <= gate.limit.load(Ordering::Relaxed) {
                return Ok(());
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
            *gate.lock() = true;
            gate.limit.store(0, Ordering::Relaxed);
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
        for (gate, limit) in self.0.gates.iter().zip(boundary) {
            let _closed = gate.lock();
            gate.limit.store(*limit, Ordering::Relaxed);
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
            *gate.lock() = false;
            gate.moved.notify_all();
        }
    }
}
