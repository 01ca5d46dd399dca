//! The doors of a tenant's control plane: every entry into its library passes them, and a swap can hold them shut.
//!
//! Data operations pass no door; they have gates of their own ([`hw_bridge::exec::sequencer::Closed`]).

use std::cell::Cell;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use hw_bridge::limits::WAIT_STEP;
use hw_bridge::os::patience::Wait;

use crate::error::Error;
use hw_bridge::os::lock::lock;

thread_local! {
    /// Calls of this thread that are inside: an entry that is made by another one does not wait for what that one holds up.
    static INSIDE: Cell<usize> = const { Cell::new(0) };
}

#[derive(Debug, Default)]
struct State {
    inside: usize,
    shut: bool,
    /// Whoever holds them shut does not wait for those who are inside.
    leaves: bool,
    /// Calls so far.
    entered: u64,
}

/// The doors of one runtime.
#[derive(Debug, Default)]
pub(crate) struct Doors {
    state: Mutex<State>,
    changed: Condvar,
}

/// A call inside; outside when dropped.
#[derive(Debug)]
pub(crate) struct Inside<'a>(&'a Doors);

/// The doors are shut until this is dropped.
#[derive(Debug)]
pub(crate) struct Shut<'a>(&'a Doors);

/// Lets this thread through shut doors until it is dropped: what a swap itself calls.
#[derive(Debug)]
pub(crate) struct Passing(());

impl Passing {
    pub(crate) fn begin() -> Passing {
        INSIDE.set(INSIDE.get() + 1);
        Passing(())
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        INSIDE.set(INSIDE.get() - 1);
    }
}

impl Doors {
    /// Enters, for `entry`; waits while a swap holds the doors shut, at most `patience`.
    ///
    /// # Errors
    /// [`Error::Frozen`].
    pub(crate) fn enter(&self, entry: &'static str, patience: Duration) -> Result<Inside<'_>, Error> {
        let mut state = self.wait(entry, patience, |s| s.shut && INSIDE.get() == 0)?;
        state.inside += 1;
        state.entered += 1;
        INSIDE.set(INSIDE.get() + 1);
        Ok(Inside(self))
    }

    /// Does `what` while no swap goes on without those who are inside: waits for the end of one that does, at most `patience`,
    /// and no other begins to before it is done.
    ///
    /// # Errors
    /// [`Error::Frozen`].
    pub(crate) fn settle<R>(
        &self,
        entry: &'static str,
        patience: Duration,
        what: impl FnOnce() -> R,
    ) -> Result<R, Error> {
        let _held = self.wait(entry, patience, |s| s.leaves)?;
        Ok(what())
    }

    /// The state, as soon as it does not hold `entry` up.
    fn wait(
        &self,
        entry: &'static str,
        patience: Duration,
        held_up: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'_, State>, Error> {
        let begun = Instant::now();
        let mut wait = begun.checked_add(patience).map(Wait::until);
        let mut state = lock(&self.state);
        while held_up(&state) {
            // A patience beyond what the clock can say has no end.
            let Some(left) = wait.as_mut().map_or(Some(WAIT_STEP), Wait::left) else {
                return Err(Error::Frozen { entry, waited: begun.elapsed() });
            };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(|p| p.into_inner()).0;
        }
        Ok(state)
    }

    /// Shuts the doors and waits until nobody is inside, at most until `until`; with `leave` it does not wait for those who
    /// are. Answers how many were still inside when the time was over.
    pub(crate) fn shut(&self, until: Instant, leave: bool) -> Result<Shut<'_>, usize> {
        let mut state = lock(&self.state);
        (state.shut, state.leaves) = (true, leave);
        let shut = Shut(self);
        let mut wait = Wait::until(until);
        while state.inside > 0 && !leave {
            let Some(left) = wait.left() else {
                let inside = state.inside;
                drop(state);
                return Err(inside);
            };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(|p| p.into_inner()).0;
        }
        drop(state);
        Ok(shut)
    }
}

impl Shut<'_> {
    /// How many calls have entered so far: what was exported from a library is old if there were more since.
    pub(crate) fn entered(&self) -> u64 {
        lock(&self.0.state).entered
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        INSIDE.set(INSIDE.get() - 1);
        lock(&self.0.state).inside -= 1;
        self.0.changed.notify_all();
    }
}

impl Drop for Shut<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        (state.shut, state.leaves) = (false, false);
        drop(state);
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[test]
    fn shut_doors_hold_who_is_outside_and_wait_for_who_is_inside() {
        let doors = Doors::default();
        let inside = doors.enter("a", Duration::ZERO).unwrap();
        assert_eq!(doors.shut(Instant::now(), false).unwrap_err(), 1);
        // A refusal opens them again.
        drop(doors.enter("b", Duration::ZERO).unwrap());
        drop(doors.shut(Instant::now(), true).unwrap());
        drop(inside);
        let shut = doors.shut(soon(), false).unwrap();
        assert_eq!(shut.entered(), 2);
        let e = doors.enter("c", Duration::from_millis(5)).unwrap_err().to_string();
        assert!(e.contains("c was not called") && e.contains("hot swap"), "{e}");
        {
            let _passing = Passing::begin();
            drop(doors.enter("d", Duration::ZERO).unwrap());
        }
        std::thread::scope(|s| {
            let waits = s.spawn(|| doors.enter("e", Duration::from_secs(10)).map(drop));
            std::thread::sleep(Duration::from_millis(20));
            drop(shut);
            waits.join().unwrap().unwrap();
        });
    }

    #[test]
    fn who_is_left_inside_settles_when_the_doors_open() {
        let doors = Doors::default();
        let _inside = doors.enter("joins", Duration::ZERO).unwrap();
        assert_eq!(doors.settle("joins", Duration::ZERO, || 1).unwrap(), 1);
        // One that waits for it must not be waited for.
        std::thread::scope(|s| {
            let shuts = s.spawn(|| doors.shut(Instant::now() + Duration::from_millis(50), false).map(drop));
            while !lock(&doors.state).shut && !shuts.is_finished() {
                std::thread::yield_now();
            }
            doors.settle("joins", Duration::ZERO, || ()).unwrap();
            assert_eq!(shuts.join().unwrap().unwrap_err(), 1);
        });
        let shut = doors.shut(soon(), true).unwrap();
        let e = doors.settle("joins", Duration::from_millis(5), || ()).unwrap_err().to_string();
        assert!(e.contains("joins was not called"), "{e}");
        drop(shut);
        doors.settle("joins", Duration::ZERO, || ()).unwrap();
    }

    /// What an entry calls while it is inside must not wait for the doors that wait for it.
    #[test]
    fn who_is_inside_enters_again() {
        let doors = Doors::default();
        let outer = doors.enter("outer", Duration::ZERO).unwrap();
        std::thread::scope(|s| {
            let shuts = s.spawn(|| doors.shut(soon(), false).map(drop));
            std::thread::sleep(Duration::from_millis(20));
            drop(doors.enter("inner", Duration::ZERO).unwrap());
            drop(outer);
            shuts.join().unwrap().unwrap();
        });
    }
}
