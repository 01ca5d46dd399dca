//! When a plugin that stopped may run again: after a pause that doubles, within a budget, then never.
//!
//! A stop is a trap or a broken limit of any instance of the plugin, not what the host ended because its caller aborted it, or for a
//! swap. One that stops more often than
//! [`Limits::restarts`](crate::limits::Limits) in its window is quarantined for the life of the tenant runtime: no further
//! instance of it is made, be it for a communicator, a task or a net plugin's binding; instances that run go on. An operator replaces it by a swap.
//!
//! Some stops are not blamed on the plugin: by a deadline that its caller has chosen, by too little time for a restart, for want of
//! memory that other instances of its tenant have. They bring no quarantine, but the pause, since a plugin can provoke them; and a
//! plugin in probation goes back for them too.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::thread::Thread;
use std::time::Instant;

use crate::error::NotCalled;
use crate::limits::{Limits, MAX_RESTART_PAUSE};
use hw_bridge::os::lock::lock;

/// How often each plugin of one tenant stopped, by the digest of its file.
#[derive(Debug, Default)]
pub struct Supervisor {
    plugins: Mutex<HashMap<String, Record>>,
    /// Unparked at each stop.
    watcher: Mutex<Option<Thread>>,
}

#[derive(Debug, Default)]
struct Record {
    name: String,
    /// All stops so far.
    count: u64,
    /// The stops of the last window that are blamed on it, the oldest first.
    stops: VecDeque<Instant>,
    /// Those that are not blamed on it: how many came one after another, each within a window of the one before, and the last.
    spared: Option<(u32, Instant)>,
    last: String,
    restarts: u64,
    quarantined: bool,
}

/// A plugin's standing, for metrics and messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// SHA-256 of its file, in hex.
    pub digest: String,
    /// File name.
    pub name: String,
    /// Instances that were made in the place of one that had stopped.
    pub restarts: u64,
    /// Whether no further instance of it is made.
    pub quarantined: bool,
    /// What stopped it last.
    pub last: String,
}

impl Supervisor {
    /// Notes that an instance of the plugin with this digest and file name stopped, and whether the plugin is to blame for it.
    pub(crate) fn note(&self, digest: &str, name: &str, limits: &Limits, cause: &str, blamed: bool, now: Instant) {
        let mut all = lock(&self.plugins);
        let record = all.entry(digest.to_string()).or_default();
        record.name = name.to_string();
        record.count += 1;
        record.last = cause.to_string();
        record.forget(limits, now);
        if blamed {
            record.stops.push_back(now);
        } else {
            let before = record.spared.map_or(0, |(n, _)| n);
            record.spared = Some((before.saturating_add(1), now));
        }
        if record.stops.len() > limits.restarts as usize && !record.quarantined {
            record.quarantined = true;
            let stops = record.stops.len();
            tracing::error!(plugin = name, digest, stops, "plugin quarantined: {cause}");
        }
        drop(all);
        if let Some(thread) = &*lock(&self.watcher) {
            thread.unpark();
        }
    }

    /// How often instances of the plugin with this digest have stopped so far, and what stopped the last one.
    pub fn stops(&self, digest: &str) -> (u64, String) {
        lock(&self.plugins).get(digest).map_or_else(Default::default, |r| (r.count, r.last.clone()))
    }

    /// How many of the last window are blamed on it.
    #[cfg(test)]
    pub(crate) fn blamed(&self, digest: &str) -> usize {
        lock(&self.plugins).get(digest).map_or(0, |r| r.stops.len())
    }

    /// Has the calling thread unparked at each stop from now on, in the place of the one that asked for it before.
    pub fn wake_me(&self) {
        *lock(&self.watcher) = Some(std::thread::current());
    }

    /// Whether a further instance of the plugin with this digest may be made.
    pub(crate) fn admit(&self, digest: &str, limits: &Limits) -> Result<(), NotCalled> {
        match lock(&self.plugins).get(digest) {
            Some(record) => record.check(limits),
            None => Ok(()),
        }
    }

    /// Whether an instance of it may be made in the place of one that stopped; counts it.
    pub(crate) fn admit_again(&self, digest: &str, limits: &Limits, now: Instant) -> Result<(), NotCalled> {
        let mut all = lock(&self.plugins);
        let record = all.entry(digest.to_string()).or_default();
        record.forget(limits, now);
        record.check(limits)?;
        let spared = record.spared.map_or(0, |(n, _)| n);
        let stops = (record.stops.len() as u32).saturating_add(spared);
        if let Some(latest) = record.stops.back().copied().max(record.spared.map(|(_, at)| at)) {
            let doubled = 1u32.checked_shl(stops - 1).unwrap_or(u32::MAX);
            let pause = limits.restart_pause.saturating_mul(doubled).min(MAX_RESTART_PAUSE);
            let left = pause.saturating_sub(now.saturating_duration_since(latest));
            if !left.is_zero() {
                return Err(NotCalled::Pausing { left, last: record.last.clone() });
            }
        }
        record.restarts += 1;
        Ok(())
    }

    /// All plugins that ever stopped.
    pub fn standing(&self) -> Vec<Standing> {
        let all = lock(&self.plugins);
        let mut standing: Vec<Standing> = all
            .iter()
            .map(|(digest, r)| Standing {
                digest: digest.clone(),
                name: r.name.clone(),
                restarts: r.restarts,
                quarantined: r.quarantined,
                last: r.last.clone(),
            })
            .collect();
        standing.sort_by(|a, b| a.digest.cmp(&b.digest));
        standing
    }
}

impl Record {
    /// Forgets the stops before the window, but not those that led to a quarantine.
    fn forget(&mut self, limits: &Limits, now: Instant) {
        while !self.quarantined
            && self.stops.front().is_some_and(|s| now.saturating_duration_since(*s) > limits.restart_window)
        {
            self.stops.pop_front();
        }
        self.spared = self.spared.filter(|(_, at)| now.saturating_duration_since(*at) <= limits.restart_window);
    }

    fn check(&self, limits: &Limits) -> Result<(), NotCalled> {
        if !self.quarantined {
            return Ok(());
        }
        let last = self.last.clone();
        Err(NotCalled::Quarantined { stops: self.stops.len(), window: limits.restart_window, last })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const LIMITS: fn() -> Limits = || Limits {
        restarts: 2,
        restart_window: Duration::from_secs(60),
        restart_pause: Duration::from_secs(1),
        ..Limits::default()
    };

    #[test]
    fn pauses_double_and_the_budget_ends_in_quarantine() {
        let (s, limits, start) = (Supervisor::default(), LIMITS(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let stop = |seconds| s.note("d", "p.wasm", &limits, "a trap", true, at(seconds));
        stop(0);
        let e = s.admit_again("d", &limits, at(0)).unwrap_err();
        assert_eq!(e, NotCalled::Pausing { left: Duration::from_secs(1), last: "a trap".into() });
        s.admit_again("d", &limits, at(1)).unwrap();
        stop(2);
        assert!(
            matches!(s.admit_again("d", &limits, at(3)), Err(NotCalled::Pausing { left, .. }) if left.as_secs() == 1)
        );
        s.admit_again("d", &limits, at(4)).unwrap();
        stop(5);
        let e = s.admit_again("d", &limits, at(1000)).unwrap_err().to_string();
        assert!(e.contains("stopped 3 times in 60s, the last time because a trap"), "{e}");
        // Other plugins of the tenant are not concerned.
        s.admit_again("other", &limits, at(5)).unwrap();
        let standing = s.standing();
        assert_eq!((standing[0].restarts, standing[0].quarantined, standing[0].name.as_str()), (2, true, "p.wasm"));
    }

    /// Or a plugin that has others take all memory, and stops for want of it, would be started again without end.
    #[test]
    fn stops_that_it_is_not_blamed_for_have_pauses_and_no_quarantine() {
        let (s, limits, start) = (Supervisor::default(), LIMITS(), Instant::now());
        let mut now = start;
        for nth in 0..20 {
            s.note("d", "p.wasm", &limits, "no room", false, now);
            let Err(NotCalled::Pausing { left, .. }) = s.admit_again("d", &limits, now) else { panic!("no pause") };
            assert_eq!(left, Duration::from_secs(1 << nth.min(10)).min(MAX_RESTART_PAUSE), "{nth}");
            now += left;
            s.admit_again("d", &limits, now).unwrap();
        }
        assert_eq!(s.stops("d"), (20, "no room".into()));
        // A quiet window later the first pause is short again.
        now += limits.restart_window + Duration::from_secs(1);
        s.note("d", "p.wasm", &limits, "a trap", true, now);
        assert!(
            matches!(s.admit_again("d", &limits, now), Err(NotCalled::Pausing { left, .. }) if left.as_secs() == 1)
        );
    }

    #[test]
    fn a_pause_has_a_longest_length() {
        let (s, start) = (Supervisor::default(), Instant::now());
        let limits = Limits { restarts: 100, ..LIMITS() };
        // The pause of the 6th stop would be longer; that of the 40th is more than a number holds.
        for stops in 1..=40 {
            s.note("d", "p.wasm", &limits, "a trap", true, start);
            let Err(NotCalled::Pausing { left, .. }) = s.admit_again("d", &limits, start) else { panic!("no pause") };
            let doubled = Duration::from_secs(1 << (stops - 1).min(10));
            assert_eq!(left, doubled.min(MAX_RESTART_PAUSE), "after {stops} stops");
        }
    }

    #[test]
    fn stops_before_the_window_are_forgotten() {
        let (s, limits, start) = (Supervisor::default(), LIMITS(), Instant::now());
        for minute in 0..100 {
            let now = start + Duration::from_secs(61 * minute);
            s.note("d", "p.wasm", &limits, "a trap", true, now);
            s.admit_again("d", &limits, now + Duration::from_secs(1)).unwrap();
        }
        assert!(!s.standing()[0].quarantined);
        // But they stay counted.
        assert_eq!((s.stops("d"), s.stops("other").0), ((100, "a trap".into()), 0));
    }
}
