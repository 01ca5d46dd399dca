//! What a lane did: counters and the last operations, in the control segment.
//!
//! The owner writes, in passing, with plain stores; peers and `wccl top` read. So a rank that hangs or has died can still be
//! asked what it did last, by everybody who has its segment mapped.
//!
//! Times are ticks of the processor's counter: reading it costs half as much as reading the clock. The segment holds one
//! moment in both, and whoever reads converts with that and a moment of its own. The end of an operation is stamped if it
//! waited or moves more than fits beside a record; others end within a microsecond or so of their start, and
//! carry the start.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::call::describe;
use crate::limits::FLIGHT_RECORDS;
use crate::os::clock::ticks;

/// Bytes of a lane's flight records.
pub const RING_BYTES: usize = FLIGHT_RECORDS * size_of::<Entry>();
const _: () = assert!(RING_BYTES % 4096 == 0);

/// Counters of a lane. One writer, so plain loads and stores.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Tally {
    ops: AtomicU64,
    copied: AtomicU64,
    reduced: AtomicU64,
    waits: AtomicU64,
    naps: AtomicU64,
    failures: AtomicU64,
}

/// Counters of one lane, or of several added up.
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
    /// Waits that had to give up spinning and sleep, or looked at deadlines and deaths.
    pub naps: u64,
    /// Operations that failed.
    pub failures: u64,
}

impl std::ops::Add for Counters {
    type Output = Counters;
    fn add(self, o: Counters) -> Counters {
        Counters {
            ops: self.ops.wrapping_add(o.ops),
            copied: self.copied.wrapping_add(o.copied),
            reduced: self.reduced.wrapping_add(o.reduced),
            waits: self.waits.wrapping_add(o.waits),
            naps: self.naps.wrapping_add(o.naps),
            failures: self.failures.wrapping_add(o.failures),
        }
    }
}

#[inline]
fn add(to: &AtomicU64, n: u64) {
    to.store(to.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

impl Tally {
    #[inline]
    pub(crate) fn op(&self) {
        add(&self.ops, 1);
    }

    #[inline]
    pub(crate) fn copied(&self, bytes: u64) {
        add(&self.copied, bytes);
    }

    #[inline]
    pub(crate) fn reduced(&self, bytes: u64) {
        add(&self.reduced, bytes);
    }

    #[inline]
    pub(crate) fn wait(&self) {
        add(&self.waits, 1);
    }

    pub(crate) fn nap(&self) {
        add(&self.naps, 1);
    }

    pub(crate) fn failure(&self) {
        add(&self.failures, 1);
    }

    /// The numbers as they are now.
    pub fn read(&self) -> Counters {
        let get = |a: &AtomicU64| a.load(Ordering::Relaxed);
        Counters {
            ops: get(&self.ops),
            copied: get(&self.copied),
            reduced: get(&self.reduced),
            waits: get(&self.waits),
            naps: get(&self.naps),
            failures: get(&self.failures),
        }
    }
}

/// How an operation stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum State {
    /// Begun and not ended.
    Running = 1,
    /// Ended well.
    Done = 2,
    /// Ended with an error.
    Failed = 3,
}

/// One operation; 64 bytes, a line of its own.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Entry {
    seq: AtomicU64,
    what: AtomicU64,
    count: AtomicU64,
    bytes: AtomicU64,
    start: AtomicU64,
    end: AtomicU64,
    state: AtomicU64,
}

/// The last operations of a lane.
#[derive(Debug)]
#[repr(C)]
pub struct Flight([Entry; FLIGHT_RECORDS]);

/// One operation as a reader sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Sequence number in its lane.
    pub seq: u64,
    /// The call in words.
    pub what: String,
    /// Number of the algorithm.
    pub algorithm: u8,
    /// Bytes of the larger of this rank's buffers.
    pub bytes: u64,
    /// When it began, nanoseconds of the monotonic clock.
    pub start_ns: u64,
    /// How long it took, or has taken until now.
    pub took: Duration,
    /// How it stands.
    pub state: State,
}

impl std::fmt::Display for Record {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = match self.state {
            State::Running => "running",
            State::Done => "done",
            State::Failed => "failed",
        };
        write!(f, "#{} {} {} bytes: {state}, {:.1?}", self.seq, self.what, self.bytes, self.took)
    }
}

impl Flight {
    #[inline]
    fn entry(&self, seq: u64) -> &Entry {
        &self.0[seq as usize % FLIGHT_RECORDS]
    }

    /// Notes that `seq` begins, by the words of its header.
    #[inline]
    pub(crate) fn begin(&self, seq: u64, [what, count]: [u64; 2], bytes: u64) {
        let e = self.entry(seq);
        let now = ticks();
        // No sequence number while the fields are of two operations.
        e.seq.store(0, Ordering::Relaxed);
        std::sync::atomic::fence(Ordering::Release);
        e.state.store(State::Running as u64, Ordering::Relaxed);
        e.what.store(what, Ordering::Relaxed);
        e.count.store(count, Ordering::Relaxed);
        e.bytes.store(bytes, Ordering::Relaxed);
        e.start.store(now, Ordering::Relaxed);
        e.end.store(now, Ordering::Relaxed);
        e.seq.store(seq, Ordering::Release);
    }

    /// Notes how `seq` ended; `stamp` if the time is worth reading the counter again.
    #[inline]
    pub(crate) fn end(&self, seq: u64, state: State, stamp: bool) {
        let e = self.entry(seq);
        if stamp {
            e.end.store(ticks(), Ordering::Relaxed);
        }
        e.state.store(state as u64, Ordering::Release);
    }

    /// The operations that are still there, the oldest first. `epoch` is the segment's moment
    /// ([`crate::group::Control::epoch`]), `now` the reader's. What is being overwritten while it is read is left out.
    pub fn read(&self, epoch: (u64, u64), now: (u64, u64)) -> Vec<Record> {
        // A reader in the same instant as the epoch has nothing to convert by; then a tick counts as a nanosecond.
        let ticks = now.1.saturating_sub(epoch.1);
        let scale = if ticks == 0 { 1.0 } else { now.0.saturating_sub(epoch.0) as f64 / ticks as f64 };
        let ns = |from: u64, to: u64| (to.saturating_sub(from) as f64 * scale) as u64;
        let mut all: Vec<Record> = self.0.iter().filter_map(|e| e.snapshot(epoch, now, ns)).collect();
        all.sort_by_key(|r| r.seq);
        all
    }
}

impl Entry {
    fn snapshot(&self, epoch: (u64, u64), now: (u64, u64), ns: impl Fn(u64, u64) -> u64) -> Option<Record> {
        let get = |a: &AtomicU64| a.load(Ordering::Acquire);
        let seq = get(&self.seq);
        // The state before the end: an operation that is done has its end.
        let state = get(&self.state);
        let (what, count, bytes) = (get(&self.what), get(&self.count), get(&self.bytes));
        let (start, end) = (get(&self.start), get(&self.end));
        let state = match state {
            1 => State::Running,
            2 => State::Done,
            3 => State::Failed,
            _ => return None,
        };
        if seq == 0 || get(&self.seq) != seq {
            return None;
        }
        let until = if state == State::Running { now.1 } else { end };
        Some(Record {
            seq,
            what: describe([what, count]),
            algorithm: (what >> 48) as u8,
            bytes,
            start_ns: epoch.0.saturating_add(ns(epoch.1, start)),
            took: Duration::from_nanos(ns(start, until)),
            state,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{DataType, Op, OpHeader, ReduceOp};
    use crate::os::clock::now;

    #[test]
    fn the_last_operations_are_there_with_their_times() {
        let flight = Flight(std::array::from_fn(|_| Entry::default()));
        let epoch = now();
        let header = OpHeader {
            op: Op::AllReduce,
            dtype: DataType::Fp32,
            redop: Some(ReduceOp::Sum),
            root: 0,
            algorithm: 2,
            flags: 0,
            count: 10,
        };
        let last = FLIGHT_RECORDS as u64 + 3;
        for seq in 1..=last {
            flight.begin(seq, header.words(), 40);
            if seq == last - 1 {
                std::thread::sleep(Duration::from_millis(20));
                flight.end(seq, State::Failed, true);
            } else if seq < last {
                flight.end(seq, State::Done, false);
            }
        }
        std::thread::sleep(Duration::from_millis(20));
        let all = flight.read(epoch, now());
        assert_eq!(all.len(), FLIGHT_RECORDS);
        assert_eq!((all[0].seq, all[0].state, all[0].bytes), (4, State::Done, 40));
        let (failed, running) = (&all[FLIGHT_RECORDS - 2], &all[FLIGHT_RECORDS - 1]);
        assert_eq!((failed.state, running.state), (State::Failed, State::Running));
        for r in [failed, running] {
            assert!(r.took >= Duration::from_millis(19) && r.took < Duration::from_secs(20), "{r}");
        }
        assert!(failed.start_ns >= epoch.0 && failed.start_ns < running.start_ns);
        assert_eq!(failed.algorithm, 2);
        assert!(running.to_string().starts_with("#67 all_reduce fp32 sum count 10 by mesh 40 bytes: running, "));
    }

    #[test]
    fn tallies_add_up() {
        let t = Tally::default();
        t.op();
        t.copied(3);
        t.reduced(4);
        t.wait();
        let c = t.read() + t.read();
        assert_eq!((c.ops, c.copied, c.reduced, c.waits, c.naps, c.failures), (2, 6, 8, 2, 0, 0));
    }
}
