//! Waits of host functions: each ends with the call's deadlines and its abort.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use hw_bridge::os::patience;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::HostState;

/// How a wait ended.
pub(crate) enum Waited {
    Ready,
    Late,
    /// Aborted, or begun after the deadline of the operation.
    Ended,
}

impl HostState {
    /// Waits until `fd` is ready, the deadline, or the abort.
    pub(crate) fn wait(&self, fd: impl AsFd, flags: PollFlags, deadline: Instant) -> Waited {
        self.wait_any(&[fd.as_fd()], flags, deadline)
    }

    /// The same for any of several.
    pub(crate) fn wait_any(&self, of: &[BorrowedFd<'_>], flags: PollFlags, deadline: Instant) -> Waited {
        if self.overdue() {
            return Waited::Ended;
        }
        let mut wait = self.wait_until(deadline);
        loop {
            let left = wait.left().unwrap_or_default();
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            let event = PollFd::from_borrowed_fd(self.abort.event(), PollFlags::IN);
            let of = of.iter().map(|fd| PollFd::from_borrowed_fd(*fd, flags));
            let mut fds: Vec<PollFd<'_>> = std::iter::once(event).chain(of).collect();
            let polled = poll(&mut fds, Some(&timeout));
            // Also when it is over: the guest's own clock is to know of a stop.
            let late = wait.left().is_none();
            match polled {
                Err(rustix::io::Errno::INTR) => continue,
                Err(_) => return Waited::Ready,
                Ok(_) if !fds[0].revents().is_empty() => return Waited::Ended,
                Ok(_) if fds[1..].iter().any(|fd| !fd.revents().is_empty()) => return Waited::Ready,
                Ok(_) if late => return Waited::Late,
                Ok(_) => {}
            }
        }
    }

    /// Sleeps for a pause, unless aborted or late.
    pub(crate) fn pause(&self, pause: Duration, deadline: Instant) -> Waited {
        if self.overdue() { Waited::Ended } else { self.rest(pause, deadline) }
    }

    /// The same, also after the deadline of the operation.
    pub(crate) fn rest(&self, pause: Duration, deadline: Instant) -> Waited {
        let (mut rest, mut wait) = (patience::Wait::until(Instant::now() + pause), self.wait_until(deadline));
        let event = self.abort.event();
        loop {
            let left = rest.left().unwrap_or_default().min(wait.left().unwrap_or_default());
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            let mut fds = [PollFd::from_borrowed_fd(event, PollFlags::IN)];
            match poll(&mut fds, Some(&timeout)) {
                Ok(n) if n > 0 => return Waited::Ended,
                _ if wait.left().is_none() => return Waited::Late,
                _ if rest.left().is_none() => return Waited::Ready,
                _ => {}
            }
        }
    }
}
