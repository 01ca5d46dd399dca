//! Sharing one machine between tenants: whose turn it is to move bytes.
//!
//! What tenants compete for in here are cores and memory bandwidth. Both are taken by copies and reductions, which a lane
//! does in stretches of at most [`STRETCH_BYTES`]; before each it asks its tenant's [`Share`] for a turn (`Share::pace`).
//!
//! Tenants meet in a [`Market`]: one page of shared memory, a cache line for each tenant. Those of one process meet in the
//! process's own; those of several processes in one whose descriptor they were handed. The line of a tenant has:
//!
//! - its *virtual time*, bytes moved over weight: start-time fair queueing (Goyal, Vin, Cheng, "Start-time Fair Queuing",
//!   SIGCOMM 1996). Who is ahead of the least of the others by more than `LEAD` lets them catch up. Who was idle
//!   begins `LEAD` behind the least of those at work: idleness gives no more credit than that, and a short operation
//!   need not wait for a long one.
//! - until when it counts as *at work*. Only a moment longer than its last stretch: a tenant whose ranks wait for one
//!   another, are stopped or have died keeps nobody.
//! - when its *cap* next allows a byte.
//!
//! A turn comes by itself: nobody wakes who waits, so that a small operation pays nothing for those it is let past.
//! Whoever maps a market can write all of it, and so switch fairness off. The worst that does to another's stretch is a wait of
//! [`MAX_YIELD`] before it, and with a cap of [`MAX_CAP_WAIT`].

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use crate::limits::{
    ALONE_BYTES, AT_WORK, CAP_BURST, LEAD_BYTES, MARKET_TENANTS, MAX_CAP_WAIT, MAX_YIELD, NAP, OPERATION_COST,
    STRETCH_BYTES, TURN_POLL,
};
use crate::memory::segment::{Segment, SegmentError};
use crate::os::clock;

/// The weight of a tenant of which nothing else was said.
pub const DEFAULT_WEIGHT: u32 = 100;
/// How far a tenant's virtual time may be ahead of another's: [`LEAD_BYTES`] at the default weight.
const LEAD: u64 = (LEAD_BYTES << FRACTION) / DEFAULT_WEIGHT as u64;
/// Binary places of a virtual time behind the point: a small operation of a great weight is not nothing.
const FRACTION: u32 = 4;
/// Bytes of a market.
const MARKET_BYTES: u64 = 4096;

/// What one tenant gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// Its part of what tenants at work move, in relation to the others' weights; at least 1.
    pub weight: u32,
    /// Bytes a second that its ranks on this machine move at most, in all; none for no cap. Bytes copied and bytes read as
    /// sources of reductions count.
    pub bandwidth: Option<u64>,
    /// Operations in progress at a time in this process: lanes, each of which does one.
    pub slots: u32,
}

impl Default for Terms {
    fn default() -> Terms {
        Terms { weight: DEFAULT_WEIGHT, bandwidth: None, slots: u32::MAX }
    }
}

/// Why a tenant cannot enter a market.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShareError {
    /// It is full.
    #[error("{MARKET_TENANTS} tenants share this machine's bandwidth, and there is no room for another; close one")]
    Full,
    /// There is no such line.
    #[error("line {0} was handed out, a market has {MARKET_TENANTS}")]
    NoLine(u32),
    /// Its memory.
    #[error(transparent)]
    Memory(#[from] SegmentError),
}

/// Where tenants meet.
#[derive(Debug)]
pub struct Market {
    segment: Segment,
    /// The line of whoever this process works for, if somebody else holds it.
    line: Option<usize>,
}

#[repr(C)]
struct Page {
    /// Tenants that are here.
    tenants: Line<AtomicU32>,
    slots: [Line<Slot>; MARKET_TENANTS],
}

#[repr(C, align(64))]
struct Line<T>(T);

/// What a tenant shows the others.
#[derive(Debug)]
#[repr(C)]
struct Slot {
    /// The tenant's number in the upper 48 bits, its [`Share`]s in the lower 16; 0 if nobody is here.
    owner: AtomicU64,
    /// Bytes over weight; wraps around.
    time: AtomicU64,
    /// Until when it is at work, in nanoseconds of the monotonic clock.
    until: AtomicU64,
    /// When the bytes that it has moved were all due, by its cap.
    due: AtomicU64,
}

impl Page {
    /// Has the line's new holder begin with nobody's debts: level with the least of the others, with all its cap.
    fn begin(&self, at: usize) {
        let taken = |(i, s): &(usize, &Line<Slot>)| *i != at && s.0.owner.load(Ordering::Relaxed) != 0;
        let mut others = self.slots.iter().enumerate().filter(taken).map(|(_, s)| s.0.time.load(Ordering::Relaxed));
        let first = others.next().unwrap_or(0);
        // Virtual times wrap around, so that they compare by their distance.
        let least = others.map(|t| t.wrapping_sub(first) as i64).fold(0, i64::min);
        let mine = &self.slots[at].0;
        mine.time.store(first.wrapping_add(least as u64), Ordering::Relaxed);
        mine.until.store(0, Ordering::Relaxed);
        mine.due.store(0, Ordering::Relaxed);
    }
}

const _: () = assert!(size_of::<Page>() as u64 == MARKET_BYTES);

impl Market {
    /// An empty one.
    pub fn create() -> Result<Market, SegmentError> {
        let segment = Segment::create("wccl-market", MARKET_BYTES)?;
        segment.commit(0, MARKET_BYTES)?;
        Ok(Market { segment, line: None })
    }

    /// One that other processes have made, or use as well.
    ///
    /// # Errors
    /// [`SegmentError`] if it is none.
    pub fn from_peer(fd: OwnedFd) -> Result<Market, SegmentError> {
        Ok(Market { segment: Segment::from_peer(fd, MARKET_BYTES)?, line: None })
    }

    /// One in which another process holds the tenant's line ([`Register`]) as long as this one uses it, and gives it up however
    /// this one ends.
    ///
    /// # Errors
    /// [`ShareError`] if it is none, or has no such line.
    pub fn held_by_peer(fd: OwnedFd, line: u32) -> Result<Market, ShareError> {
        let at = usize::try_from(line).ok().filter(|at| *at < MARKET_TENANTS).ok_or(ShareError::NoLine(line))?;
        Ok(Market { line: Some(at), ..Market::from_peer(fd)? })
    }

    /// Where the tenants of this process meet.
    pub fn of_process() -> Result<Arc<Market>, SegmentError> {
        static MARKET: OnceLock<Arc<Market>> = OnceLock::new();
        if let Some(market) = MARKET.get() {
            return Ok(market.clone());
        }
        let made = Arc::new(Market::create()?);
        Ok(MARKET.get_or_init(|| made).clone())
    }

    /// The descriptor, to be handed to other processes; none of one that came from there.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.segment.fd()
    }

    /// Tenants that are here.
    pub fn tenants(&self) -> u32 {
        self.page().tenants.0.load(Ordering::Relaxed)
    }

    #[inline]
    fn page(&self) -> &Page {
        // SAFETY: the segment is MARKET_BYTES long (made or checked so), as Page is, and page-aligned; Page consists of
        // atomics and padding only, for which any bytes are valid and which others may write; it lives as long as `self`.
        unsafe { &*self.segment.base().cast::<Page>() }
    }

    /// The place of tenant `id`, for one more share of it.
    fn enter(&self, id: u64) -> Option<usize> {
        if self.line.is_some() {
            return self.line;
        }
        let page = self.page();
        let who = id << 16;
        // The tenant's own line, wherever it is; then the first that is free. All look in the same order, so that two who
        // enter at once for one tenant meet there.
        for free_too in [false, true] {
            for (i, Line(slot)) in page.slots.iter().enumerate() {
                let mut now = slot.owner.load(Ordering::Acquire);
                while free_too && now == 0 || now & !0xFFFF == who && (1..0xFFFF).contains(&(now & 0xFFFF)) {
                    let next = if now == 0 { who | 1 } else { now + 1 };
                    match slot.owner.compare_exchange(now, next, Ordering::AcqRel, Ordering::Acquire) {
                        Ok(0) => {
                            page.tenants.0.fetch_add(1, Ordering::AcqRel);
                            page.begin(i);
                            return Some(i);
                        }
                        Ok(_) => return Some(i),
                        Err(other) => now = other,
                    }
                }
            }
        }
        None
    }

    fn leave(&self, at: usize) {
        if self.line.is_some() {
            return;
        }
        let page = self.page();
        let fewer = |now: u64| match now & 0xFFFF {
            // Somebody has written here who should not.
            0 => None,
            1 => Some(0),
            _ => Some(now - 1),
        };
        let left = page.slots[at].0.owner.fetch_update(Ordering::AcqRel, Ordering::Acquire, fewer);
        if left.is_ok_and(|before| before & 0xFFFF == 1) {
            page.tenants.0.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// The tenants of a market whose lines one process holds for all others: those may end in any way, and write what they like into
/// the market, but who is let in is decided here.
#[derive(Debug)]
pub struct Register {
    market: Arc<Market>,
    /// Of each line: its tenant, and how often it entered.
    lines: Mutex<[(u64, u32); MARKET_TENANTS]>,
}

impl Register {
    /// Of a market that nobody enters but by this.
    pub fn new(market: Arc<Market>) -> Register {
        Register { market, lines: Mutex::new([(0, 0); MARKET_TENANTS]) }
    }

    /// Where they meet.
    pub fn market(&self) -> &Market {
        &self.market
    }

    /// Holds the line of tenant `id` once more.
    ///
    /// # Errors
    /// [`ShareError::Full`].
    pub fn enter(self: &Arc<Self>, id: u64) -> Result<Entered, ShareError> {
        let mut lines = self.lines.lock().unwrap_or_else(|p| p.into_inner());
        let own = lines.iter().position(|(who, n)| *n > 0 && *who == id);
        let at = own.or_else(|| lines.iter().position(|(_, n)| *n == 0)).ok_or(ShareError::Full)?;
        lines[at] = (id, lines[at].1 + 1);
        if own.is_none() {
            self.market.page().begin(at);
            self.tell(&lines[..], at);
        }
        Ok(Entered { register: self.clone(), at })
    }

    /// Writes who has line `at`, and how many have one, whatever stands there.
    fn tell(&self, lines: &[(u64, u32)], at: usize) {
        let page = self.market.page();
        let (id, n) = lines[at];
        page.slots[at].0.owner.store(if n > 0 { id << 16 | 1 } else { 0 }, Ordering::Release);
        page.tenants.0.store(lines.iter().filter(|(_, n)| *n > 0).count() as u32, Ordering::Release);
    }
}

/// A tenant's line that a [`Register`] holds, until this is dropped.
#[derive(Debug)]
pub struct Entered {
    register: Arc<Register>,
    at: usize,
}

impl Entered {
    /// Its number, for [`Market::held_by_peer`].
    pub fn line(&self) -> u32 {
        self.at as u32
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut lines = self.register.lines.lock().unwrap_or_else(|p| p.into_inner());
        lines[self.at].1 -= 1;
        if lines[self.at].1 == 0 {
            self.register.tell(&lines[..], self.at);
        }
    }
}

/// One tenant's share, in one process. Ranks of the tenant hold it together.
#[derive(Debug)]
pub struct Share {
    market: Arc<Market>,
    at: usize,
    terms: Terms,
    /// Bytes of a stretch.
    stretch: u64,
    /// Others were at work when it was last looked.
    crowded: AtomicBool,
    lanes: AtomicU32,
}

impl Share {
    /// Enters `market` as tenant `id`, of which the lower 48 bits count. Shares of one tenant have one virtual time and one
    /// cap, in however many processes they are.
    ///
    /// # Errors
    /// [`ShareError::Full`].
    pub fn new(market: Arc<Market>, id: u64, terms: Terms) -> Result<Share, ShareError> {
        let at = market.enter(id).ok_or(ShareError::Full)?;
        let terms = Terms { weight: terms.weight.max(1), ..terms };
        // A hundredth of a second's bytes under a cap, in whole pages, so that no wait for it is long.
        let stretch = terms.bandwidth.map_or(STRETCH_BYTES, |b| (b / 100).clamp(4096, STRETCH_BYTES) & !4095);
        Ok(Share { market, at, terms, stretch, crowded: AtomicBool::new(false), lanes: AtomicU32::new(0) })
    }

    /// What it was given.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Takes one of the slots, for a lane; whether there was one.
    pub(crate) fn take_slot(&self) -> bool {
        let more = |n: u32| (n < self.terms.slots).then_some(n + 1);
        self.lanes.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    pub(crate) fn give_slot(&self) {
        self.lanes.fetch_sub(1, Ordering::AcqRel);
    }

    /// Bytes of a stretch of what begins now.
    #[inline]
    pub(crate) fn stretch(&self) -> u64 {
        self.stretch_of(self.is_free())
    }

    /// Bytes of a stretch, where that is known.
    #[inline]
    pub(crate) fn stretch_of(&self, free: bool) -> u64 {
        if free { ALONE_BYTES } else { self.stretch }
    }

    /// Whether there is nobody to share with, and no cap.
    #[inline]
    pub(crate) fn is_free(&self) -> bool {
        self.terms.bandwidth.is_none() && self.market.tenants() <= 1
    }

    /// Whether others were at work when this tenant last began an operation.
    #[inline]
    pub(crate) fn crowded(&self) -> bool {
        !self.is_free() && self.crowded.load(Ordering::Relaxed)
    }

    /// Waits for the turn of an operation, or of a whole small one of `bytes`.
    ///
    /// # Errors
    /// What `stop` says, which is asked while it waits.
    #[inline]
    pub(crate) fn begin<E>(&self, bytes: u64, stop: impl FnMut() -> Result<(), E>) -> Result<(), E> {
        if self.is_free() { Ok(()) } else { self.wait_turn(OPERATION_COST, bytes, stop) }
    }

    /// Waits for the turn of a stretch of `bytes`.
    ///
    /// # Errors
    /// As [`Share::begin`].
    #[inline]
    pub(crate) fn pace<E>(&self, bytes: u64, stop: impl FnMut() -> Result<(), E>) -> Result<(), E> {
        if self.is_free() { Ok(()) } else { self.wait_turn(0, bytes, stop) }
    }

    #[cold]
    fn wait_turn<E>(&self, cost: u64, bytes: u64, mut stop: impl FnMut() -> Result<(), E>) -> Result<(), E> {
        let mut now = clock::clock_ns();
        let from = self.allowed_from(now, bytes);
        while let Some(pause) = self.turn(now, from) {
            stop()?;
            std::thread::sleep(pause);
            now = clock::clock_ns();
        }
        // Virtual times count by their distance: nobody falls behind who moves nothing. And a line that is not written is one that
        // this tenant's ranks need not take from one another.
        if self.crowded.load(Ordering::Relaxed) {
            self.charge(bytes.saturating_add(cost));
        }
        Ok(())
    }

    #[inline]
    fn slot(&self) -> &Slot {
        &self.market.page().slots[self.at].0
    }

    /// The others that are here. Lines behind the last of them are not looked at.
    fn others(&self) -> impl Iterator<Item = &Slot> {
        let page = self.market.page();
        let tenants = page.tenants.0.load(Ordering::Relaxed) as usize;
        let slots = page.slots.iter().enumerate();
        let taken = slots.filter(|(i, s)| *i != self.at && s.0.owner.load(Ordering::Relaxed) != 0);
        taken.map(|(_, s)| &s.0).take(tenants.saturating_sub(1))
    }

    /// When the cap lets `bytes` be moved that were asked for `now`. They are taken from it here, so that lanes get what it
    /// lets them in the order in which they ask.
    fn allowed_from(&self, now: u64, bytes: u64) -> u64 {
        let Some(rate) = self.terms.bandwidth else { return now };
        let takes = bytes.saturating_mul(1_000_000_000) / rate.max(1);
        let latest = now.saturating_add(ns(MAX_CAP_WAIT));
        let next = |due: u64| Some(due.clamp(now, latest).saturating_add(takes));
        // The closure never declines: both are the time before.
        let (Ok(due) | Err(due)) = self.slot().due.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        due.saturating_sub(ns(CAP_BURST)).clamp(now, latest)
    }

    /// How long to wait before asking again for what the cap allows `from` then; none if it is this tenant's turn.
    fn turn(&self, now: u64, from: u64) -> Option<Duration> {
        let mine = self.slot();
        if now < from {
            // Not at work meanwhile: nobody need wait until it has caught up.
            return Some(Duration::from_nanos(from - now).min(NAP));
        }
        let waited = now - from;
        let time = mine.time.load(Ordering::Relaxed);
        // Virtual times wrap around, so that they compare by their distance.
        let behind_me = |s: &Slot| time.wrapping_sub(s.time.load(Ordering::Relaxed)) as i64;
        let mut ahead = self.others().filter(|s| s.at_work(now)).map(behind_me).max();
        if self.crowded.load(Ordering::Relaxed) != ahead.is_some() {
            self.crowded.store(ahead.is_some(), Ordering::Relaxed);
        }
        if !mine.at_work(now) {
            let least = ahead.map(|a| a.saturating_add(LEAD as i64));
            let lag = least.or_else(|| self.others().map(behind_me).min()).map_or(0, |a| a.min(0));
            // Another lane may do so at the same time, and one of them will do.
            let caught_up = time.wrapping_add(lag.unsigned_abs());
            let _ = mine.time.compare_exchange(time, caught_up, Ordering::Relaxed, Ordering::Relaxed);
            ahead = ahead.map(|a| a.saturating_sub(lag));
        }
        // Who waits already waits until the others have caught up, or sleeping and waking would be all it does.
        let allowed = if waited == 0 { LEAD as i64 } else { 0 };
        let waits = ahead.is_some_and(|a| a > allowed) && waited < ns(MAX_YIELD);
        // Each look takes a core from those who are let past, so they are few.
        let pause = if waits { waited.max(ns(TURN_POLL)).min(ns(MAX_YIELD) - waited) } else { 0 };
        // While there is nobody to see it, it may be half as old.
        let left = mine.until.load(Ordering::Relaxed).saturating_sub(now);
        if ahead.is_some() || !(ns(AT_WORK) / 2..=ns(AT_WORK)).contains(&left) {
            mine.until.store(now.saturating_add(pause + ns(AT_WORK)), Ordering::Relaxed);
        }
        waits.then_some(Duration::from_nanos(pause))
    }

    /// Notes what costs as much as moving `bytes`.
    fn charge(&self, bytes: u64) {
        self.slot().time.fetch_add((bytes << FRACTION) / u64::from(self.terms.weight), Ordering::Relaxed);
    }
}

impl Slot {
    fn at_work(&self, now: u64) -> bool {
        // A stamp further off than any that is set is no stamp.
        (1..=ns(MAX_YIELD + AT_WORK)).contains(&self.until.load(Ordering::Relaxed).saturating_sub(now))
    }
}

fn ns(d: Duration) -> u64 {
    d.as_nanos() as u64
}

impl Drop for Share {
    fn drop(&mut self) {
        // A forked child's page is its parent's.
        if !crate::os::fork::in_child() {
            self.market.leave(self.at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What a stretch and a nap take in the model, in nanoseconds.
    const STRETCH_TAKES: u64 = 25_000;
    const WAKING: u64 = 60_000;
    const SECOND: u64 = 1_000_000_000;

    /// A lane of a tenant that always has more to move, against a clock of the model's own.
    struct Lane<'a> {
        share: &'a Share,
        /// Bytes of its stretches, and what each costs besides.
        each: (u64, u64),
        asked: u64,
        /// When the cap lets it.
        from: Option<u64>,
        next: u64,
        /// The longest it waited for a turn, and all that it moved.
        longest: u64,
        moved: u64,
    }

    fn lane(share: &Share) -> Lane<'_> {
        Lane { share, each: (share.stretch(), 0), asked: 0, from: None, next: 0, longest: 0, moved: 0 }
    }

    /// Runs the lanes until `end`; `meddle` is what somebody else does to the market before each look.
    fn run(lanes: &mut [Lane<'_>], end: u64, mut meddle: impl FnMut(u64)) {
        let begun = lanes.iter().map(|l| l.next).min().unwrap();
        lanes.iter_mut().for_each(|l| (l.asked, l.next) = (begun, begun));
        loop {
            let lane = lanes.iter_mut().min_by_key(|l| l.next).unwrap();
            let now = lane.next;
            if now >= end {
                return;
            }
            meddle(now);
            let from = *lane.from.get_or_insert_with(|| lane.share.allowed_from(now, lane.each.0));
            match lane.share.turn(now, from) {
                Some(pause) => lane.next = now + ns(pause) + WAKING,
                None => {
                    lane.longest = lane.longest.max(now - lane.asked);
                    lane.share.charge(lane.each.0 + lane.each.1);
                    lane.from = None;
                    lane.moved += lane.each.0;
                    lane.next = now + STRETCH_TAKES * lane.each.0.max(8192) / STRETCH_BYTES;
                    lane.asked = lane.next;
                }
            }
        }
    }

    fn tenants(terms: &[Terms]) -> (Arc<Market>, Vec<Share>) {
        let market = Arc::new(Market::create().unwrap());
        let shares = terms.iter().zip(1..).map(|(t, id)| Share::new(market.clone(), id, *t).unwrap()).collect();
        (market, shares)
    }

    fn weighing(weight: u32) -> Terms {
        Terms { weight, ..Terms::default() }
    }

    /// A number of lanes for each tenant.
    fn lanes<'a>(shares: &'a [Share], each: &[usize]) -> Vec<Lane<'a>> {
        shares.iter().zip(each).flat_map(|(s, n)| (0..*n).map(move |_| lane(s))).collect()
    }

    fn moved(lanes: &[Lane<'_>], of: &Share) -> u64 {
        lanes.iter().filter(|l| std::ptr::eq(l.share, of)).map(|l| l.moved).sum()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

        /// Tenants that are always at work move bytes by their weights, however many lanes they do it with, and none starves.
        #[test]
        fn bytes_go_by_weight(
            weights in prop::collection::vec(50u32..=500, 2..4),
            count in prop::collection::vec(1usize..4, 3),
        ) {
            let (_market, shares) = tenants(&weights.iter().map(|w| weighing(*w)).collect::<Vec<_>>());
            let mut all = lanes(&shares, &count);
            run(&mut all, SECOND, |_| {});
            // Bytes that a unit of weight has moved: alike within the lead, and a stretch of each lane.
            let per: Vec<f64> =
                shares.iter().zip(&weights).map(|(s, w)| moved(&all, s) as f64 / f64::from(*w)).collect();
            let slack = LEAD_BYTES as f64 / 100.0 + 4.0 * STRETCH_BYTES as f64 / 50.0;
            for a in &per {
                for b in &per {
                    prop_assert!((a - b).abs() <= 2.0 * slack, "{per:?} of {weights:?} with {count:?} lanes");
                }
            }
            for lane in &all {
                prop_assert!(lane.longest <= ns(MAX_YIELD) + WAKING && lane.moved > 0);
            }
        }

        /// Whatever others write to the page, a stretch waits no longer than the bound: anything, or that they are at work and
        /// far behind.
        #[test]
        fn a_liar_delays_by_the_bound_at_most(
            words in prop::collection::vec(any::<(u64, u64, u64)>(), 1..20),
            behind in any::<bool>(),
        ) {
            let (market, shares) = tenants(&[weighing(100), weighing(100)]);
            let mut all = lanes(&shares[..1], &[2]);
            let mut next = words.iter().cycle();
            run(&mut all, SECOND / 10, |now| {
                let (time, until, mine) = *next.next().unwrap();
                let [own, lie] = [0, 1].map(|i| &market.page().slots[i].0);
                own.time.store(mine, Ordering::Relaxed);
                let (time, until) = if behind { (mine.wrapping_sub(1 << 62), now + ns(AT_WORK)) } else { (time, until) };
                lie.time.store(time, Ordering::Relaxed);
                lie.until.store(until, Ordering::Relaxed);
            });
            for lane in &all {
                prop_assert!(lane.longest <= ns(MAX_YIELD) + WAKING, "{} ns", lane.longest);
                prop_assert!(lane.moved > 0);
            }
        }
    }

    #[test]
    fn an_idle_tenant_gains_no_credit() {
        let (_market, shares) = tenants(&[weighing(100), weighing(100)]);
        let mut first = lanes(&shares[..1], &[2]);
        run(&mut first, SECOND, |_| {});
        let alone = first[0].next;
        // The other comes a second late: from then on both move the same.
        let mut both = lanes(&shares, &[2, 2]);
        both.iter_mut().for_each(|l| l.next = alone);
        run(&mut both, 2 * SECOND, |_| {});
        let (a, b) = (moved(&both, &shares[0]), moved(&both, &shares[1]));
        assert!(a.abs_diff(b) <= 2 * LEAD_BYTES + 4 * STRETCH_BYTES, "{a} and {b} bytes");
    }

    /// A latecomer with one small operation after another is let past at once, while one that floods waits.
    #[test]
    fn a_small_operation_does_not_wait_for_a_flood() {
        let (_market, shares) = tenants(&[weighing(100), weighing(100)]);
        let mut all = lanes(&shares, &[2, 2]);
        for l in &mut all[2..] {
            l.each = (1024, OPERATION_COST);
        }
        run(&mut all, SECOND / 10, |_| {});
        assert!(all[..2].iter().any(|l| l.longest > 0), "the flood never waited");
        // By its account, of which an operation's cost is the larger part, it has its half.
        let (flood, small) = (moved(&all, &shares[0]), moved(&all, &shares[1]) / 1024 * (1024 + OPERATION_COST));
        assert!(small.abs_diff(flood) <= 2 * LEAD_BYTES + 4 * STRETCH_BYTES, "{flood} and {small}");
    }

    #[test]
    fn a_cap_is_kept_by_all_lanes_and_processes_together() {
        for rate in [10_000_000, 1 << 30] {
            let capped = Terms { bandwidth: Some(rate), ..Terms::default() };
            let market = Arc::new(Market::create().unwrap());
            // The same tenant, from two processes.
            let shares = [(); 2].map(|()| Share::new(market.clone(), 7, capped).unwrap());
            let mut all = lanes(&shares, &[2, 1]);
            run(&mut all, 2 * SECOND, |_| {});
            let sum: u64 = all.iter().map(|l| l.moved).sum();
            // A hundredth of a second ahead, and a stretch that each lane is in.
            let most = 2 * rate + rate / 100 + 3 * shares[0].stretch();
            assert!(sum <= most && sum >= 2 * rate - 3 * shares[0].stretch(), "{sum} bytes, cap {}", 2 * rate);
            assert!(all.iter().all(|l| l.moved > 0));
        }
    }

    /// A cap that somebody else has overdrawn holds up one stretch for so long, and not for ever.
    #[test]
    fn a_cap_that_is_overdrawn_ends() {
        let (market, shares) = tenants(&[Terms { bandwidth: Some(1 << 30), ..Terms::default() }]);
        market.page().slots[0].0.due.store(u64::MAX, Ordering::Relaxed);
        let (mut now, from) = (0, shares[0].allowed_from(0, 4096));
        while let Some(pause) = shares[0].turn(now, from) {
            assert!(pause <= NAP);
            now += ns(pause);
        }
        assert_eq!(now, ns(MAX_CAP_WAIT));
    }

    #[test]
    fn a_wait_ends_when_it_is_told_to() {
        let (market, shares) = tenants(&[Terms { bandwidth: Some(1 << 30), ..Terms::default() }]);
        market.page().slots[0].0.due.store(u64::MAX, Ordering::Relaxed);
        let mut asked = 0;
        let stop = || {
            asked += 1;
            if asked == 3 { Err("aborted") } else { Ok(()) }
        };
        assert_eq!(shares[0].pace(4096, stop), Err("aborted"));
        assert_eq!(asked, 3);
    }

    #[test]
    fn one_tenant_is_free_and_asks_nobody() {
        let (market, shares) = tenants(&[weighing(100)]);
        let again = Share::new(market.clone(), 1, weighing(100)).unwrap();
        assert!(shares[0].is_free() && again.is_free());
        let other = Share::new(market.clone(), 2, weighing(100)).unwrap();
        assert!(!shares[0].is_free() && !other.is_free());
        drop(other);
        assert!(shares[0].is_free());
        let capped = Share::new(market, 1, Terms { bandwidth: Some(1), ..Terms::default() }).unwrap();
        assert!(!capped.is_free());
    }

    #[test]
    fn a_market_has_room_for_so_many_and_places_are_used_again() {
        let (market, mut shares) = tenants(&[weighing(100); MARKET_TENANTS]);
        assert!(matches!(Share::new(market.clone(), 99, weighing(1)), Err(ShareError::Full)));
        // Of a tenant that is there more may come.
        Share::new(market.clone(), 5, weighing(1)).unwrap();
        drop(shares.remove(3));
        Share::new(market.clone(), 99, weighing(1)).unwrap();
        drop(shares);
        assert_eq!(market.page().tenants.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn another_mapping_is_the_same_market() {
        let (market, shares) = tenants(&[weighing(100)]);
        let fd = market.fd().unwrap().try_clone_to_owned().unwrap();
        let elsewhere = Arc::new(Market::from_peer(fd).unwrap());
        let other = Share::new(elsewhere, 2, weighing(100)).unwrap();
        assert!(!shares[0].is_free());
        other.charge(1600);
        assert_eq!(market.page().slots[1].0.time.load(Ordering::Relaxed), (1600 << FRACTION) / 100);
        let small = Segment::create("test", 8192).unwrap();
        assert!(Market::from_peer(small.fd().unwrap().try_clone_to_owned().unwrap()).is_err());
    }

    /// Whose line somebody else holds, takes turns there, and leaves nothing behind nor takes anything along.
    #[test]
    fn a_line_that_somebody_else_holds_stays_his() {
        let market = Arc::new(Market::create().unwrap());
        let register = Arc::new(Register::new(market.clone()));
        let fd = || market.fd().unwrap().try_clone_to_owned().unwrap();
        let _other = register.enter(1).unwrap();
        let entered = [register.enter(2).unwrap(), register.enter(2).unwrap()];
        assert_eq!(entered.each_ref().map(Entered::line), [1, 1]);
        let held = Market::held_by_peer(fd(), 1).unwrap();
        let guest = Share::new(Arc::new(held), 2, weighing(200)).unwrap();
        guest.charge(1600);
        assert_eq!(market.page().slots[1].0.time.load(Ordering::Relaxed), (1600 << FRACTION) / 200);
        drop(guest);
        assert_eq!(market.tenants(), 2);
        // One that is killed does not get so far.
        let killed = Share::new(Arc::new(Market::held_by_peer(fd(), 1).unwrap()), 2, weighing(200));
        std::mem::forget(killed);
        let [one, two] = entered;
        drop(one);
        assert_eq!(market.tenants(), 2);
        drop(two);
        assert_eq!(market.tenants(), 1);
        let lines = MARKET_TENANTS as u32;
        assert!(matches!(Market::held_by_peer(fd(), lines), Err(ShareError::NoLine(n)) if n == lines));
    }

    /// Whatever a client writes into the market, tenants come and go.
    #[test]
    fn a_market_that_is_full_of_lies_lets_tenants_in() {
        let register = Arc::new(Register::new(Arc::new(Market::create().unwrap())));
        let page = register.market().page();
        let lie = || {
            page.slots.iter().for_each(|s| s.0.owner.store(u64::MAX, Ordering::Relaxed));
            page.tenants.0.store(u32::MAX, Ordering::Relaxed);
        };
        lie();
        let mut all: Vec<Entered> = (1..=MARKET_TENANTS as u64).map(|id| register.enter(id).unwrap()).collect();
        assert_eq!(register.market().tenants(), MARKET_TENANTS as u32);
        assert!(matches!(register.enter(99), Err(ShareError::Full)));
        lie();
        drop(all.pop());
        assert_eq!(register.market().tenants(), MARKET_TENANTS as u32 - 1);
        assert_eq!(register.enter(99).unwrap().line(), MARKET_TENANTS as u32 - 1);
    }

    #[test]
    fn a_tenant_has_one_line_and_no_predecessors_debts() {
        let (market, mut shares) = tenants(&[weighing(100); 3]);
        let of = |at: usize| &market.page().slots[at].0;
        shares[1].charge(5 << 20);
        shares[2].charge(3 << 20);
        shares[0].charge(1 << 40);
        of(0).until.store(u64::MAX, Ordering::Relaxed);
        of(0).due.store(u64::MAX, Ordering::Relaxed);
        // Its line is free, and before those of the others.
        drop(shares.remove(0));
        let again = Share::new(market.clone(), 3, weighing(100)).unwrap();
        assert_eq!((again.at, market.tenants()), (2, 2));
        let fresh = Share::new(market.clone(), 9, weighing(100)).unwrap();
        assert_eq!(fresh.at, 0);
        let least = of(2).time.load(Ordering::Relaxed);
        let now = [&of(0).time, &of(0).until, &of(0).due].map(|a| a.load(Ordering::Relaxed));
        assert_eq!(now, [least, 0, 0]);
    }

    #[test]
    fn slots_are_counted() {
        let (_market, shares) = tenants(&[Terms { slots: 2, ..Terms::default() }]);
        assert!(shares[0].take_slot() && shares[0].take_slot() && !shares[0].take_slot());
        shares[0].give_slot();
        assert!(shares[0].take_slot());
    }
}
