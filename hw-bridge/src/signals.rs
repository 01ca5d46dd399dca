//! SIGTERM and SIGINT as something to wait for, for programs that end in good order.

use std::os::fd::{FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Takes SIGTERM and SIGINT from the thread that makes it and from those started afterwards.
#[derive(Debug)]
pub struct Ending(OwnedFd);

impl Ending {
    /// Call it before other threads are started: they inherit it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn take() -> std::io::Result<Ending> {
        // SAFETY: the set is initialised by sigemptyset before it is read, and outlives the calls; signalfd makes a fresh
        // descriptor, which nobody else knows.
        unsafe {
            let mut set = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
            libc::sigemptyset(set.as_mut_ptr());
            libc::sigaddset(set.as_mut_ptr(), libc::SIGTERM);
            libc::sigaddset(set.as_mut_ptr(), libc::SIGINT);
            let blocked = libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
            if blocked != 0 {
                return Err(std::io::Error::from_raw_os_error(blocked));
            }
            match libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) {
                -1 => Err(std::io::Error::last_os_error()),
                fd => Ok(Ending(OwnedFd::from_raw_fd(fd))),
            }
        }
    }

    /// Waits for one of them, at most so long if that is given: whether one came.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait(&self, most: Option<Duration>) -> std::io::Result<bool> {
        let most = most.map(|m| Timespec { tv_sec: m.as_secs() as i64, tv_nsec: i64::from(m.subsec_nanos()) });
        match poll(&mut [PollFd::new(&self.0, PollFlags::IN)], most.as_ref()) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(false),
            Ok(_) => {}
            Err(e) => return Err(e.into()),
        }
        match rustix::io::read(&self.0, &mut [0u8; size_of::<libc::signalfd_siginfo>()]) {
            Ok(_) => Ok(true),
            Err(rustix::io::Errno::AGAIN) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_waited_for_once() {
        // In a thread of its own, which alone has them blocked and is the one that gets them.
        let got = std::thread::spawn(|| {
            let ending = Ending::take().unwrap();
            let none = ending.wait(Some(Duration::ZERO)).unwrap();
            // SAFETY: the signal goes to this thread, where it is blocked.
            unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGTERM) };
            let one = ending.wait(Some(Duration::from_secs(10))).unwrap();
            (none, one, ending.wait(Some(Duration::ZERO)).unwrap())
        });
        assert_eq!(got.join().unwrap(), (false, true, false));
    }
}
