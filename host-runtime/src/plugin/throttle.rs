//! The share of a core that a tenant's plugins may use, in all its instances together.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::tenant::lock;

/// What may be used at once after a rest: so much time's share.
const BURST: Duration = Duration::from_secs(1);

/// Guest time as tokens: they come at a steady rate, and a call may overdraw them, which it or the next one then waits out.
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

    /// Takes what a guest has used until `now`, and answers how long it is to wait before it goes on.
    pub(crate) fn take(&self, used: Duration, now: Instant) -> Duration {
        let percent = i128::from(self.percent);
        let share = |time: Duration| percent * time.as_nanos() as i128 / 100;
        let mut left = lock(&self.left);
        let (since, before) = *left;
        let after = (before + share(now.saturating_duration_since(since))).min(share(BURST)) - used.as_nanos() as i128;
        *left = (now.max(since), after);
        let debt = u64::try_from((-after).max(0) * 100 / percent).unwrap_or(u64::MAX);
        Duration::from_nanos(debt)
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
        assert_eq!(tenth.take(ms(1), at(100)), ms(10));
        assert_eq!(tenth.take(ms(100), at(1_000_000)), ms(0));
        assert_eq!(tenth.take(ms(1), at(1_000_000)), ms(10));
        // Another thread may have looked at the clock earlier.
        assert_eq!(tenth.take(ms(1), at(0)), ms(20));
    }
}
