//! Deadlines of waits, by a clock that does not run while this process is stopped.
//!
//! A job that is suspended as a whole (SIGSTOP, a debugger, the freezer of its control group) and goes on later has lost nothing:
//! no rank was waiting for another. But the machine's clock ran on, and by it every deadline has passed. The kernel does not tell a
//! process that it was stopped; a wait that sleeps in short steps sees it all the same, because a step took far longer than it
//! was to take. That is what a [`Wait`] looks for, and what it finds is noted for the whole process: what was stopped in one wait of
//! a call counts for the call ([`stopped_since`]).
//!
//! A thread that merely got no core looks the same, if it got none for [`STOPPED`] beyond its step. To count that as a stop makes
//! a deadline later by as much, which harms nobody; but waits must end on the most crowded machine too. So the last [`MAX_STOPS`]
//! are known and no more: a wait is credited that many stops at most, however long each was. Starved by a second or two at a
//! time, a wait ends a minute or two late.
//!
//! Whoever waits for a process that alone is stopped is not stopped itself: its time runs, and it says who did not come.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::limits::{MAX_STOPS, STOPPED, WAIT_STEP};

/// When this process did not run, as one of its threads saw it.
#[derive(Debug, Clone, Copy)]
struct Stop {
    from: Instant,
    to: Instant,
}

impl Stop {
    fn long(&self) -> Duration {
        self.to.saturating_duration_since(self.from)
    }
}

/// What is known of stops.
#[derive(Debug)]
struct Stops {
    /// The last ones, in the order in which they were seen; no two are of one moment.
    last: VecDeque<Stop>,
    /// All together.
    all: Duration,
}

impl Stops {
    /// Notes what a thread saw. Of what several threads saw of one stop the longest holds: each saw it from somewhere within its
    /// own step on. It is never their union, or threads that starve in turns would make one stop without end.
    fn note(&mut self, seen: Stop) {
        let (mut longest, mut known) = (seen, Duration::ZERO);
        self.last.retain(|s| {
            let apart = s.to <= seen.from || seen.to <= s.from;
            if !apart {
                known += s.long();
                longest = if s.long() > longest.long() { *s } else { longest };
            }
            apart
        });
        self.all += longest.long().saturating_sub(known);
        if self.last.len() == MAX_STOPS {
            self.last.pop_front();
        }
        self.last.push_back(longest);
    }

    fn since(&self, since: Instant) -> Duration {
        self.last.iter().map(|s| s.to.saturating_duration_since(s.from.max(since))).sum()
    }

    /// The same of those that had begun at `now`: a test of this file has its own time, far ahead of that of the others.
    fn between(&self, since: Instant, now: Instant) -> Duration {
        let begun = self.last.iter().filter(|s| s.from <= now);
        begun.map(|s| s.to.saturating_duration_since(s.from.max(since))).sum()
    }
}

fn stops() -> MutexGuard<'static, Stops> {
    static STOPS: Mutex<Stops> = Mutex::new(Stops { last: VecDeque::new(), all: Duration::ZERO });
    // What is in it is right at any moment.
    STOPS.lock().unwrap_or_else(|p| p.into_inner())
}

/// How long this process has been stopped since `since`, as far as its waits have seen it.
pub fn stopped_since(since: Instant) -> Duration {
    stops().since(since)
}

/// A deadline that was set before `since`, for what knows nothing of a stop of this process since then.
pub fn resumed(until: Instant, since: Instant) -> Instant {
    until.checked_add(stopped_since(since)).unwrap_or(until)
}

/// How long it has been stopped in all.
pub fn stopped_in_all() -> Duration {
    stops().all
}

/// Notes a stop if more time has gone by between two looks of a thread, the second of which was to come after `step` at most;
/// answers whether it has.
pub fn was_away(looked: Instant, now: Instant, step: Duration) -> bool {
    let beyond = now.saturating_duration_since(looked).checked_sub(step).filter(|d| *d > STOPPED);
    let from = beyond.and_then(|d| now.checked_sub(d));
    from.inspect(|from| stops().note(Stop { from: *from, to: now })).is_some()
}

/// Whether a deadline that was set at `since` has passed.
pub fn passed(until: Instant, since: Instant) -> bool {
    let now = Instant::now();
    now >= until && until.checked_add(stopped_since(since)).is_some_and(|until| now >= until)
}

/// One wait with a deadline, for whoever sleeps in steps.
#[derive(Debug, Clone, Copy)]
pub struct Wait {
    until: Instant,
    since: Instant,
    step: Duration,
    looked: Instant,
}

impl Wait {
    /// A wait that begins now and ends at `until`.
    pub fn until(until: Instant) -> Wait {
        let now = Instant::now();
        Wait { until, since: now, step: WAIT_STEP, looked: now }
    }

    /// The same, of a deadline that was set at `since`: what has been stopped since then counts too.
    pub fn since(self, since: Instant) -> Wait {
        Wait { since, ..self }
    }

    /// The same, in other steps than [`WAIT_STEP`].
    pub fn stepping(self, step: Duration) -> Wait {
        Wait { step, ..self }
    }

    /// How long to sleep before the next look, at most a step; `None` once the time is over.
    pub fn left(&mut self) -> Option<Duration> {
        self.left_at(Instant::now())
    }

    fn left_at(&mut self, now: Instant) -> Option<Duration> {
        was_away(std::mem::replace(&mut self.looked, now), now, self.step);
        let until = match self.until > now {
            true => self.until,
            // A time beyond what the clock can say has not come.
            false => self.until.checked_add(stops().between(self.since, now))?,
        };
        Some(until.saturating_duration_since(now)).filter(|left| !left.is_zero()).map(|left| left.min(self.step))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn stop(begin: Instant, from: u32, to: u32) -> Stop {
        Stop { from: begin + S * from / 10, to: begin + S * to / 10 }
    }

    #[test]
    fn a_stop_that_several_saw_counts_once_and_as_long_as_the_longest_saw_it() {
        let begin = Instant::now();
        let mut stops = Stops { last: VecDeque::new(), all: Duration::ZERO };
        for (from, to) in [(5, 90), (1, 90), (30, 91)] {
            stops.note(stop(begin, from, to));
        }
        assert_eq!(stops.since(begin), S * 89 / 10);
        stops.note(stop(begin, 100, 150));
        assert_eq!(stops.since(begin), S * 139 / 10);
        // A deadline that was set later has less of it.
        assert_eq!(stops.since(begin + S * 12), S * 3);
        assert_eq!((stops.since(begin + S * 15), stops.all), (Duration::ZERO, S * 139 / 10));
    }

    /// However crowded the machine is: threads that starve in turns do not stop the clock.
    #[test]
    fn what_a_wait_is_credited_has_an_end() {
        let begin = Instant::now();
        let mut stops = Stops { last: VecDeque::new(), all: Duration::ZERO };
        for i in 0..100_000 {
            stops.note(stop(begin, 5 * i, 5 * i + 11));
        }
        assert!(stops.last.len() <= MAX_STOPS);
        assert!(stops.since(begin) <= S * 11 / 10 * MAX_STOPS as u32, "{:?}", stops.since(begin));
    }

    #[test]
    fn a_wait_is_credited_what_it_was_away_and_no_other_time() {
        // Far from what the clock says, so that no stop of another test's is near.
        let begin = Instant::now() + S * 1_000_000;
        let mut wait = Wait { until: begin + S * 5, since: begin, step: S / 100, looked: begin };
        let at = |tenths: u32| begin + S * tenths / 10;
        assert_eq!(wait.left_at(at(0)), Some(S / 100));
        // A second late is nothing yet.
        assert_eq!(wait.left_at(at(10)), Some(S / 100));
        // 9 s away: of the 5 s, 4 are left but for the step.
        assert_eq!(wait.left_at(at(100)), Some(S / 100));
        let mut on = |tenths| {
            wait.looked = at(tenths);
            wait.left_at(at(tenths))
        };
        assert_eq!(on(139), Some(S / 100));
        assert_eq!(on(140), None);
        let mut next = Wait { until: at(141), since: at(135), step: S / 100, looked: at(135) };
        assert_eq!(next.left_at(at(135)), Some(S / 100));
        assert_eq!(next.left_at(at(141)), None, "a deadline that was set afterwards is what it was");
        let mut later = Wait { until: begin + S * 5, since: begin, step: S / 100, looked: at(136) };
        assert!(later.left_at(at(136)).is_some(), "another wait of the same deadline");
        assert!(stopped_since(begin) == S * 9 - S / 100);
    }
}
