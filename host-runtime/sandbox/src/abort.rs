//! Ending a communicator from another thread: during init (a guest blocked in accept), in an operation, or idle.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use hw_bridge::os::lock::lock;

/// Cloneable; all clones are one switch. [`AbortToken::abort`] returns at once, in any state, as often as one likes.
#[derive(Debug, Clone)]
pub struct AbortToken(Arc<Inner>);

/// The same for who must not keep what the switch reaches: of no effect once nobody else has it.
#[derive(Debug)]
pub(crate) struct WeakAbort(Weak<Inner>);

impl WeakAbort {
    pub(crate) fn abort(&self, reason: &str) {
        if let Some(inner) = self.0.upgrade() {
            AbortToken(inner).abort(reason);
        }
    }
}

#[derive(Debug)]
struct Inner {
    flag: AtomicBool,
    reason: Mutex<String>,
    at: OnceLock<Instant>,
    event: OwnedFd,
    endpoints: Mutex<Vec<hw_bridge::group::Abort>>,
}

impl AbortToken {
    /// A switch that is off.
    pub fn new() -> std::io::Result<AbortToken> {
        let event =
            rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK)?;
        Ok(AbortToken(Arc::new(Inner {
            flag: AtomicBool::new(false),
            reason: Mutex::default(),
            at: OnceLock::new(),
            event,
            endpoints: Mutex::default(),
        })))
    }

    /// Ends whatever waits and whatever begins later. The first reason stays.
    pub fn abort(&self, reason: &str) {
        if hw_bridge::os::fork::in_child() {
            // The event is the parent's as well.
            return;
        }
        {
            // The reason first: whoever sees the flag reads it.
            let mut first = lock(&self.0.reason);
            if !self.aborted() {
                *first = reason.to_string();
                // The first one, under the lock: nobody else sets it.
                let _ = self.0.at.set(Instant::now());
                self.0.flag.store(true, Ordering::SeqCst);
            }
        }
        // The event is never read, so it stays readable for every waiter; its counter cannot overflow.
        let _ = rustix::io::write(&self.0.event, &1u64.to_ne_bytes());
        for endpoint in &*lock(&self.0.endpoints) {
            endpoint.abort(reason);
        }
    }

    pub(crate) fn downgrade(&self) -> WeakAbort {
        WeakAbort(Arc::downgrade(&self.0))
    }

    /// Whether it happened.
    pub fn aborted(&self) -> bool {
        self.0.flag.load(Ordering::Acquire)
    }

    /// How long ago it happened.
    pub(crate) fn aborted_for(&self) -> Option<Duration> {
        if self.aborted() { self.0.at.get().map(Instant::elapsed) } else { None }
    }

    /// Why it happened.
    pub fn reason(&self) -> String {
        lock(&self.0.reason).clone()
    }

    /// Becomes readable when it happens: for waits on sockets.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.0.event.as_fd()
    }

    /// Lets the switch reach a data plane too; one token may serve several communicators.
    pub(crate) fn attach(&self, endpoint: hw_bridge::group::Abort) {
        // Stored before the look: an abort in between finds it. Those of communicators that are gone make room.
        let mut endpoints = lock(&self.0.endpoints);
        endpoints.retain(|e| !e.is_last());
        endpoints.push(endpoint.clone());
        drop(endpoints);
        if self.aborted() {
            endpoint.abort(&self.reason());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_stays_and_the_event_is_readable_for_ever() {
        let t = AbortToken::new().unwrap();
        assert!(!t.aborted());
        t.abort("first");
        t.abort("second");
        assert_eq!(t.reason(), "first");
        for _ in 0..2 {
            let mut fds = [rustix::event::PollFd::new(&t, rustix::event::PollFlags::IN)];
            let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            assert_eq!(rustix::event::poll(&mut fds, Some(&none)).unwrap(), 1);
        }
    }

    impl AsFd for AbortToken {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.event()
        }
    }
}
