//! The share of a core that a tenant's plugins may use, in all its instances together.
//!
//! What counts is the time that a thread was on a core from when it entered an instance until it left it: the guest's, and that of
//! host functions, of instantiation and of the kernel on its behalf. A guest that only ever asks the host for something is no
//! lighter a neighbour than one that computes.

use std::cell::Cell;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use hw_bridge::os::lock::lock;

/// What may be used at once after a rest: so much time's share.
const BURST: Duration = Duration::from_secs(1);
/// The debt that is waited out. A neighbour is pushed off its core each time that a wait ends, and few of its operations are to
/// meet that; what one of them then loses is the kernel's time slice.
const GRAIN: Duration = Duration::from_millis(10);

thread_local! {
    /// This thread's time on a core that is counted already; none while it is in no instance. The clock is the thread's own, so
    /// what is counted of it is too.
    static COUNTED: Cell<Option<Duration>> = const { Cell::new(None) };
}

/// How long this thread has been on a core.
pub fn on_core() -> Duration {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec.max(0) as u64, t.tv_nsec as u32)
}

/// What this thread does until it is dropped, it does for a tenant's plugin.
#[derive(Debug)]
pub(crate) struct Working<'a> {
    cpu: Option<&'a Allowance>,
    outermost: bool,
}

impl<'a> Working<'a> {
    /// Begins, for a tenant with that allowance. One plugin of a tenant that calls another stays in the first one's work.
    pub(crate) fn on(cpu: Option<&'a Allowance>) -> Working<'a> {
        let outermost = COUNTED.get().is_none();
        if cpu.is_some() && outermost {
            COUNTED.set(Some(on_core()));
        }
        Working { cpu, outermost }
    }
}

impl Drop for Working<'_> {
    fn drop(&mut self) {
        if let (Some(cpu), true) = (self.cpu, self.outermost) {
            cpu.charge();
            COUNTED.set(None);
        }
    }
}

/// Time on a core as tokens: they come at a steady rate, and a call may overdraw them, which it or the next one then waits out.
#[derive(Debug)]
pub(crate) struct Allowance {
    percent: u32,
    /// When it was last counted, and what was there; less than none is a debt. Nanoseconds.
    left: Mutex<(Instant, i128)>,
}

impl Allowance {
    /// A share of one core, 1 to 100 per cent.
    pub(crate) fn new(percent: u32, now: Instant) -> Allowance {
        Allowance { percent, left: Mutex::new((now, i128::from(percent) * BURST.as_nanos() as i128 / 100)) }
    }

    /// Takes what this thread has used since it was last charged, and answers how long it is to wait before it goes on.
    pub(crate) fn charge(&self) -> Duration {
        let now = on_core();
        let used = COUNTED.get().map_or(Duration::ZERO, |since| now.saturating_sub(since));
        COUNTED.set(COUNTED.get().map(|_| now));
        self.take(used, Instant::now())
    }

    /// Takes what was `used` until `now`, and answers how long to wait.
    pub(crate) fn take(&self, used: Duration, now: Instant) -> Duration {
        let percent = i128::from(self.percent);
        let share = |time: Duration| percent * time.as_nanos() as i128 / 100;
        let mut left = lock(&self.left);
        let (since, before) = *left;
        let after = (before + share(now.saturating_duration_since(since))).min(share(BURST)) - used.as_nanos() as i128;
        *left = (now.max(since), after);
        if -after < GRAIN.as_nanos() as i128 {
            return Duration::ZERO;
        }
        Duration::from_nanos(u64::try_from(-after * 100 / percent).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_used_at_once_or_bit_by_bit_and_never_more() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let ms = Duration::from_millis;
        let tenth = Allowance::new(10, begin);
        assert_eq!(tenth.take(ms(100), at(0)), ms(0));
        assert_eq!(tenth.take(ms(10), at(0)), ms(100));
        // The wait pays the debt; a rest fills it up to the burst and no further.
        assert_eq!(tenth.take(ms(0), at(100)), ms(0));
        assert_eq!(tenth.take(ms(10), at(100)), ms(100));
        assert_eq!(tenth.take(ms(100), at(1_000_000)), ms(0));
        assert_eq!(tenth.take(ms(10), at(1_000_000)), ms(100));
        // Another thread may have looked at the clock earlier.
        assert_eq!(tenth.take(ms(1), at(0)), ms(110));
    }

    #[test]
    fn a_small_debt_is_waited_out_with_the_next() {
        let begin = Instant::now();
        let half = Allowance::new(50, begin);
        let us = Duration::from_micros;
        assert_eq!(half.take(us(509_999), begin), us(0));
        assert_eq!(half.take(us(1), begin), us(20_000));
    }

    /// Time asleep, and outside of any instance, is not the plugin's; nested work is counted once.
    #[test]
    fn a_thread_pays_for_its_time_on_a_core_inside() {
        let spin = |time: Duration| {
            let until = on_core() + time;
            while on_core() < until {}
        };
        let ms = Duration::from_millis;
        let left = |a: &Allowance| lock(&a.left).1 / 1_000_000;
        let all = Allowance::new(1, Instant::now());
        let before = left(&all);
        spin(ms(20));
        all.charge();
        assert_eq!(left(&all), before);
        {
            let _work = Working::on(Some(&all));
            std::thread::sleep(ms(20));
            spin(ms(20));
            let _inner = Working::on(Some(&all));
            spin(ms(20));
        }
        let used = before - left(&all);
        assert!((39..60).contains(&used), "{used} ms");
    }
}
