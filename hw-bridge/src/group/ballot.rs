//! A ballot: one decision that several processes come to, whatever becomes of any of them.
//!
//! A small sealed memory region that every participant maps. The decision is *one word*, undecided at first, which anyone sets
//! once by compare-and-swap: to commit, which only who has seen all participants ready may do; or to abort, which anyone may
//! who cannot go on or does not want to wait. A participant that was stopped or came late finds the word and obeys; one that
//! died needs no more. So the outcome is never mixed, and nobody has to live for it.
//!
//! Beside it a record for each participant, which only that one writes: how far it is, what it votes, and why it refuses.
//! What a record holds is an allegation, as all that comes from another process.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::limits::{BALLOT_YIELDS, MAX_VOTERS, REASON_BYTES};
use crate::memory::segment::{Segment, SegmentError};
use crate::os::bell::Bell;
use crate::os::patience::Wait;
use crate::os::shown::one_line;

const MAGIC: u64 = 0x746f_6c6c_6162_6377;
const HEAD_BYTES: usize = 4096;
const RECORD_BYTES: usize = 2048;

/// What was decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// All do it.
    Commit = 1,
    /// Nobody does.
    Abort = 2,
}

/// How far a participant is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// It has not voted.
    Preparing = 0,
    /// It could do it, and says what with.
    Voted = 1,
    /// It knows where it will stand still.
    Agreed = 2,
    /// It holds still: the decision may be to commit.
    Ready = 3,
    /// It has done what was decided.
    Done = 4,
}

/// What a participant votes; those whose votes differ may not belong together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Vote {
    /// Digest of what it would go on with.
    pub digest: [u64; 4],
    /// Digest of what that speaks with its like; 0 for nothing.
    pub wire: u64,
}

#[repr(C)]
struct Head {
    magic: AtomicU64,
    id: AtomicU64,
    decision: AtomicU32,
    bell: Bell,
}

#[repr(C)]
struct Record {
    phase: AtomicU32,
    reason_len: AtomicU32,
    vote: [AtomicU64; 5],
    pause_ns: AtomicU64,
    reason: [AtomicU8; REASON_BYTES],
}

const _: () = assert!(size_of::<Head>() <= HEAD_BYTES && size_of::<Record>() <= RECORD_BYTES);

/// A mapped ballot.
#[derive(Debug)]
pub struct Ballot {
    segment: Segment,
    voters: usize,
}

fn bytes(voters: usize) -> u64 {
    (HEAD_BYTES + voters * RECORD_BYTES).next_multiple_of(4096) as u64
}

impl Ballot {
    /// Makes one for `voters` participants (1 to [`MAX_VOTERS`]), undecided; `id` is its number.
    ///
    /// # Errors
    /// [`SegmentError`].
    pub fn create(id: u64, voters: usize) -> Result<Ballot, SegmentError> {
        check(voters)?;
        let segment = Segment::create("wccl-ballot", bytes(voters))?;
        segment.commit(0, bytes(voters))?;
        let b = Ballot { segment, voters };
        b.head().id.store(id, Ordering::Relaxed);
        b.head().magic.store(MAGIC, Ordering::Release);
        Ok(b)
    }

    /// Maps one that another process made.
    ///
    /// # Errors
    /// [`SegmentError::Foreign`] for what is none, or not this one.
    pub fn open(fd: OwnedFd, id: u64, voters: usize) -> Result<Ballot, SegmentError> {
        check(voters)?;
        let b = Ballot { segment: Segment::from_peer(fd, bytes(voters))?, voters };
        let (magic, its) = (b.head().magic.load(Ordering::Acquire), b.head().id.load(Ordering::Relaxed));
        if (magic, its) != (MAGIC, id) {
            return Err(SegmentError::Foreign(format!("it is not ballot {id:#x} (magic {magic:#x}, id {its:#x})")));
        }
        Ok(b)
    }

    /// To be passed to the participants; absent in one that was opened.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.segment.fd()
    }

    /// Participants.
    pub fn voters(&self) -> usize {
        self.voters
    }

    fn head(&self) -> &Head {
        // SAFETY: the segment has at least HEAD_BYTES (made or checked so), is page-aligned, and Head consists of atomics,
        // for which any bytes are valid; it lives as long as `self`.
        unsafe { &*self.segment.base().cast::<Head>() }
    }

    fn record(&self, voter: usize) -> &Record {
        let at = HEAD_BYTES + voter.min(self.voters - 1) * RECORD_BYTES;
        // SAFETY: the segment has `voters` records (its size was made or checked so) and RECORD_BYTES is a multiple of
        // Record's alignment; atomics only; the life is as for `head`.
        unsafe { &*self.segment.base().wrapping_add(at).cast::<Record>() }
    }

    /// The decision, if there is one.
    pub fn decision(&self) -> Option<Decision> {
        match self.head().decision.load(Ordering::Acquire) {
            0 => None,
            1 => Some(Decision::Commit),
            _ => Some(Decision::Abort),
        }
    }

    /// Decides, unless it was decided; answers what holds. To commit, all must be [`Phase::Ready`].
    pub fn decide(&self, wanted: Decision) -> Decision {
        let set = self.head().decision.compare_exchange(0, wanted as u32, Ordering::AcqRel, Ordering::Acquire);
        match set {
            Ok(_) => {
                self.ring();
                wanted
            }
            Err(1) => Decision::Commit,
            Err(_) => Decision::Abort,
        }
    }

    /// How far a participant is.
    pub fn phase(&self, voter: usize) -> Phase {
        match self.record(voter).phase.load(Ordering::Acquire) {
            0 => Phase::Preparing,
            1 => Phase::Voted,
            2 => Phase::Agreed,
            3 => Phase::Ready,
            _ => Phase::Done,
        }
    }

    /// Says how far participant `voter`, who calls, is.
    pub fn set_phase(&self, voter: usize, phase: Phase) {
        self.record(voter).phase.store(phase as u32, Ordering::Release);
        self.ring();
    }

    /// Whether all are at least that far.
    pub fn all(&self, phase: Phase) -> bool {
        (0..self.voters).all(|v| self.phase(v) >= phase)
    }

    /// The first that is not that far.
    pub fn missing(&self, phase: Phase) -> Option<usize> {
        (0..self.voters).find(|v| self.phase(*v) < phase)
    }

    /// Votes.
    pub fn vote(&self, voter: usize, vote: Vote) {
        let words = &self.record(voter).vote;
        words.iter().zip(vote.digest.iter().chain([&vote.wire])).for_each(|(to, w)| to.store(*w, Ordering::Relaxed));
        self.set_phase(voter, Phase::Voted);
    }

    /// What a participant voted.
    pub fn voted(&self, voter: usize) -> Vote {
        let w = &self.record(voter).vote;
        let word = |i: usize| w[i].load(Ordering::Relaxed);
        Vote { digest: std::array::from_fn(word), wire: word(4) }
    }

    /// Notes why `voter`, who calls, does not go on. The first reason stays.
    pub fn refuse(&self, voter: usize, why: &str) {
        let r = self.record(voter);
        if r.reason_len.load(Ordering::Relaxed) != 0 {
            return;
        }
        let mut len = why.len().min(REASON_BYTES);
        while !why.is_char_boundary(len) {
            len -= 1;
        }
        r.reason.iter().zip(&why.as_bytes()[..len]).for_each(|(to, b)| to.store(*b, Ordering::Relaxed));
        r.reason_len.store(len as u32, Ordering::Release);
    }

    /// Why a participant does not go on, if it said so.
    pub fn reason(&self, voter: usize) -> Option<String> {
        let r = self.record(voter);
        let len = (r.reason_len.load(Ordering::Acquire) as usize).min(REASON_BYTES);
        let bytes: Vec<u8> = r.reason[..len].iter().map(|b| b.load(Ordering::Relaxed)).collect();
        let clean = one_line(&String::from_utf8_lossy(&bytes));
        (len > 0).then_some(clean)
    }

    /// Notes how long `voter`, who calls, held still.
    pub fn set_pause(&self, voter: usize, pause: Duration) {
        self.record(voter).pause_ns.store(pause.as_nanos() as u64, Ordering::Relaxed);
    }

    /// How long a participant held still; zero if it did not.
    pub fn pause(&self, voter: usize) -> Duration {
        Duration::from_nanos(self.record(voter).pause_ns.load(Ordering::Relaxed))
    }

    /// Wakes those who wait, to look again.
    pub fn ring(&self) {
        self.head().bell.ring();
    }

    /// Waits until `ready`, at most until `until`; answers whether it is. `nap` is how long it may go without a look when
    /// nobody rings.
    pub fn wait(&self, until: Instant, nap: Duration, mut ready: impl FnMut() -> bool) -> bool {
        for _ in 0..BALLOT_YIELDS {
            if ready() {
                return true;
            }
            std::thread::yield_now();
        }
        let mut wait = Wait::until(until).stepping(nap);
        loop {
            if ready() {
                return true;
            }
            let Some(left) = wait.left() else { return false };
            self.head().bell.sleep(left, &mut ready);
        }
    }
}

fn check(voters: usize) -> Result<(), SegmentError> {
    match voters {
        1..=MAX_VOTERS => Ok(()),
        _ => Err(SegmentError::Foreign(format!("{voters} participants, 1 to {MAX_VOTERS} can be"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(voters: usize) -> (Ballot, Ballot) {
        let a = Ballot::create(7, voters).unwrap();
        let fd = a.fd().unwrap().try_clone_to_owned().unwrap();
        let b = Ballot::open(fd, 7, voters).unwrap();
        (a, b)
    }

    #[test]
    fn the_first_decision_holds_everywhere() {
        for (first, second) in [(Decision::Commit, Decision::Abort), (Decision::Abort, Decision::Commit)] {
            let (a, b) = pair(2);
            assert_eq!((a.decision(), b.decision()), (None, None));
            assert_eq!(a.decide(first), first);
            assert_eq!(b.decide(second), first);
            assert_eq!((a.decision(), b.decision()), (Some(first), Some(first)));
        }
    }

    /// Many threads want both at once: all get the same answer.
    #[test]
    fn a_race_has_one_outcome() {
        for _ in 0..200 {
            let (a, b) = pair(1);
            let outcomes: Vec<Decision> = std::thread::scope(|s| {
                let one = s.spawn(|| a.decide(Decision::Commit));
                let other = s.spawn(|| b.decide(Decision::Abort));
                [one.join().unwrap(), other.join().unwrap()].into()
            });
            assert_eq!(outcomes[0], outcomes[1]);
        }
    }

    #[test]
    fn votes_phases_and_reasons_are_seen_by_the_others() {
        let (a, b) = pair(3);
        let vote = Vote { digest: [1, 2, 3, 4], wire: 5 };
        a.vote(0, vote);
        assert_eq!((b.voted(0), b.phase(0), b.missing(Phase::Voted)), (vote, Phase::Voted, Some(1)));
        b.set_phase(1, Phase::Ready);
        a.vote(2, vote);
        assert!(a.all(Phase::Voted) && !a.all(Phase::Ready));
        assert_eq!(a.reason(1), None);
        b.refuse(1, "line\nbreak");
        b.refuse(1, "later");
        b.refuse(2, &"é".repeat(REASON_BYTES));
        assert_eq!(a.reason(1).unwrap(), "line break");
        assert_eq!(a.reason(2).unwrap(), "é".repeat(REASON_BYTES / 2));
        b.set_pause(1, Duration::from_micros(12));
        assert_eq!(a.pause(1), Duration::from_micros(12));
    }

    #[test]
    fn who_waits_is_woken_or_gives_up() {
        let (a, b) = pair(1);
        let far = Instant::now() + Duration::from_secs(60);
        let waits = std::thread::spawn(move || a.wait(far, Duration::from_secs(60), || a.decision().is_some()));
        std::thread::sleep(Duration::from_millis(20));
        b.decide(Decision::Abort);
        assert!(waits.join().unwrap());
        assert!(!b.wait(Instant::now() + Duration::from_millis(5), Duration::from_millis(1), || false));
    }

    #[test]
    fn what_is_no_ballot_is_refused() {
        let a = Ballot::create(7, 2).unwrap();
        let fd = || a.fd().unwrap().try_clone_to_owned().unwrap();
        assert!(Ballot::open(fd(), 8, 2).unwrap_err().to_string().contains("not ballot 0x8"));
        assert!(Ballot::open(fd(), 7, 20).is_err());
        assert!(Ballot::create(7, 0).is_err() && Ballot::create(7, MAX_VOTERS + 1).is_err());
        let other = Segment::create("x", bytes(2)).unwrap();
        assert!(Ballot::open(other.fd().unwrap().try_clone_to_owned().unwrap(), 7, 2).is_err());
    }
}
