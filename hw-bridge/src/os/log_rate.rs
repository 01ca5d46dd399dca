//! Lines of the log that others can cause, within a rate.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The lines of the second that is under way. What is more than the rate is dropped, and counted.
#[derive(Debug)]
pub struct LogRate(Mutex<(Instant, u32)>);

impl Default for LogRate {
    fn default() -> LogRate {
        LogRate(Mutex::new((Instant::now(), 0)))
    }
}

impl LogRate {
    /// Whether one more line is within `most` a second. `tell` hears once for each second how many lines were too many in it,
    /// if any were: when the next line comes, or by [`LogRate::end`].
    pub fn admits(&self, most: u32, tell: impl FnOnce(u32)) -> bool {
        let (now, mut window) = (Instant::now(), self.0.lock().unwrap_or_else(|p| p.into_inner()));
        if now.duration_since(window.0) >= Duration::from_secs(1) {
            dropped(window.1, most, tell);
            *window = (now, 0);
        }
        window.1 = window.1.saturating_add(1);
        window.1 <= most
    }

    /// Tells what was dropped last.
    pub fn end(&mut self, most: u32, tell: impl FnOnce(u32)) {
        dropped(self.0.get_mut().unwrap_or_else(|p| p.into_inner()).1, most, tell);
    }
}

fn dropped(lines: u32, most: u32, tell: impl FnOnce(u32)) {
    if lines > most {
        tell(lines - most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_beyond_the_rate_is_counted_and_told_once() {
        let mut rate = LogRate::default();
        let admitted = (0..10).filter(|_| rate.admits(3, |n| panic!("{n} lines of a second that is not over")));
        assert_eq!(admitted.count(), 3);
        // As if the second were over.
        rate.0.get_mut().unwrap().0 -= Duration::from_secs(1);
        let mut told = 0;
        assert!(rate.admits(3, |n| told = n));
        assert_eq!(told, 7);
        rate.end(0, |n| told = n);
        assert_eq!(told, 1);
    }
}
