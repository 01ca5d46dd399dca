//! A value for one user at a time, where a use may take long: guest code runs in it, or another process is asked.
//!
//! Whoever comes meanwhile waits for as long as its own time allows, and no longer, which no lock does. What a use leaves there
//! stays, also if it ends by a panic.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard};

use hw_bridge::os::patience::Wait;

use hw_bridge::os::lock::lock;

/// The value, and whether somebody uses it.
#[derive(Debug, Default)]
pub(crate) struct Turns<T> {
    used: Mutex<bool>,
    left: Condvar,
    /// Locked by who has the turn alone.
    value: Mutex<T>,
}

/// A use of the value.
#[derive(Debug)]
pub(crate) struct Turn<'a, T>(&'a Turns<T>, MutexGuard<'a, T>);

impl<T> Turns<T> {
    pub(crate) fn new(value: T) -> Turns<T> {
        Turns { used: Mutex::default(), left: Condvar::new(), value: Mutex::new(value) }
    }

    /// Begins to use it as soon as nobody else does; nothing if the time is over before that.
    pub(crate) fn enter(&self, wait: &mut Wait) -> Option<Turn<'_, T>> {
        let mut used = lock(&self.used);
        while *used {
            used = self.left.wait_timeout(used, wait.left()?).unwrap_or_else(|p| p.into_inner()).0;
        }
        *used = true;
        drop(used);
        Some(Turn(self, lock(&self.value)))
    }
}

impl<T> Deref for Turn<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.1
    }
}

impl<T> DerefMut for Turn<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.1
    }
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        *lock(&self.0.used) = false;
        self.0.left.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn who_waits_for_a_turn_has_it_or_gives_up_at_his_own_time() {
        let turns = Turns::new(1);
        let soon = |ms| Wait::until(Instant::now() + Duration::from_millis(ms));
        let mut first = turns.enter(&mut soon(0)).unwrap();
        assert!(turns.enter(&mut soon(20)).is_none());
        std::thread::scope(|s| {
            let waits = s.spawn(|| turns.enter(&mut soon(20_000)).map(|turn| *turn));
            *first += 1;
            drop(first);
            assert_eq!(waits.join().unwrap(), Some(2));
        });
        let panics = std::panic::catch_unwind(|| {
            *turns.enter(&mut soon(0)).unwrap() = 3;
            let _turn = turns.enter(&mut soon(0)).unwrap();
            std::panic::resume_unwind(Box::new(()));
        });
        assert!(panics.is_err());
        assert_eq!(turns.enter(&mut soon(0)).map(|turn| *turn), Some(3));
    }
}
