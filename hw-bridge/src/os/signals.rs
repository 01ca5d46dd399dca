//! Signals as something to wait for, for programs that end in good order or hand signals on, and what a process inherits of
//! them.
//!
//! Taken signals are blocked and read from a descriptor. That works also in the first process of a container (PID 1), for
//! which the kernel's defaults do not apply: a signal that is blocked is never dropped.

use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// A signal that came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrived {
    /// Which.
    pub signal: Signal,
    /// The kernel sent it, for a key at the terminal or its end: the whole process group has got it.
    pub by_kernel: bool,
}

/// Signals that the thread which makes it, and those started afterwards, get no more: they are read here.
pub struct Signals {
    of: OwnedFd,
    set: libc::sigset_t,
}

/// The set of `signals`.
fn set_of(signals: &[Signal]) -> libc::sigset_t {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: sigemptyset initialises the set; sigaddset gets numbers of signals that exist.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for s in signals {
            libc::sigaddset(set.as_mut_ptr(), s.as_raw());
        }
        set.assume_init()
    }
}

fn mask(how: i32, set: &libc::sigset_t) -> std::io::Result<()> {
    // SAFETY: the set is initialised and outlives the call, which writes nothing.
    match unsafe { libc::pthread_sigmask(how, set, std::ptr::null_mut()) } {
        0 => Ok(()),
        e => Err(std::io::Error::from_raw_os_error(e)),
    }
}

fn set_default(signal: Signal) -> std::io::Result<()> {
    // SAFETY: SIG_DFL is no function, so none of this process's can be called by it.
    match unsafe { libc::signal(signal.as_raw(), libc::SIG_DFL) } {
        libc::SIG_ERR => Err(std::io::Error::last_os_error()),
        _ => Ok(()),
    }
}

impl Signals {
    /// Takes them. Call it before other threads are started: they inherit it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn take(signals: &[Signal]) -> std::io::Result<Signals> {
        let set = set_of(signals);
        mask(libc::SIG_BLOCK, &set)?;
        // SAFETY: the set is initialised; signalfd makes a fresh descriptor, which nobody else knows.
        unsafe {
            match libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) {
                -1 => Err(std::io::Error::last_os_error()),
                fd => Ok(Signals { of: OwnedFd::from_raw_fd(fd), set }),
            }
        }
    }

    /// This thread gets them again, those that came and were not read at once. Dropping alone leaves them taken.
    ///
    /// # Errors
    /// The kernel's.
    pub fn give_back(self) -> std::io::Result<()> {
        mask(libc::SIG_UNBLOCK, &self.set)
    }

    /// One that has come, without waiting.
    ///
    /// # Errors
    /// The kernel's.
    pub fn next(&self) -> std::io::Result<Option<Arrived>> {
        let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::read(&self.of, &mut info) {
            Ok(_) => {}
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
            Err(e) => return Err(e.into()),
        }
        // ssi_signo, ssi_errno and ssi_code are the first three words.
        let word = |i: usize| i32::from_ne_bytes([info[4 * i], info[4 * i + 1], info[4 * i + 2], info[4 * i + 3]]);
        Ok(Signal::from_named_raw(word(0)).map(|signal| Arrived { signal, by_kernel: word(2) == libc::SI_KERNEL }))
    }

    /// Waits for one, at most so long if that is given.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait(&self, most: Option<Duration>) -> std::io::Result<Option<Arrived>> {
        let most = most.map(|m| Timespec { tv_sec: m.as_secs() as i64, tv_nsec: i64::from(m.subsec_nanos()) });
        match poll(&mut [PollFd::new(&self.of, PollFlags::IN)], most.as_ref()) {
            Ok(0) | Err(rustix::io::Errno::INTR) => Ok(None),
            Ok(_) => self.next(),
            Err(e) => Err(e.into()),
        }
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.of.as_fd()
    }
}

/// SIGTERM and SIGINT, taken.
pub struct Ending(Signals);

impl Ending {
    /// Call it before other threads are started: they inherit it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn take() -> std::io::Result<Ending> {
        Signals::take(&[Signal::TERM, Signal::INT]).map(Ending)
    }

    /// Waits for one of them, at most so long if that is given: whether one came.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait(&self, most: Option<Duration>) -> std::io::Result<bool> {
        Ok(self.0.wait(most)?.is_some())
    }
}

/// Whether this process ignores a signal, as whoever started it may have asked for (`nohup`).
pub fn is_ignored(signal: Signal) -> bool {
    // SAFETY: the kernel fills the action, which is plain data; nothing is changed.
    unsafe {
        let mut action = std::mem::zeroed::<libc::sigaction>();
        libc::sigaction(signal.as_raw(), std::ptr::null(), &mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
    }
}

/// Undoes what a parent may have left behind and no program expects: SIGCHLD that is ignored, by which the ends of children
/// cannot be learned, and signals that are blocked.
///
/// # Errors
/// The kernel's.
pub fn forget_inherited() -> std::io::Result<()> {
    set_default(Signal::CHILD)?;
    mask(libc::SIG_SETMASK, &set_of(&[]))
}

/// Ends this process by a signal, so that its parent sees that. Comes back if the signal does not end it: the first process of a
/// container cannot be ended so.
pub fn end_by(signal: Signal) {
    // No core of a process that did nothing wrong.
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Core, none);
    // If one of these fails the caller goes on and ends otherwise.
    let _ = set_default(signal).and_then(|()| mask(libc::SIG_UNBLOCK, &set_of(&[signal])));
    let _ = rustix::process::kill_process(rustix::process::getpid(), signal);
}

/// The process that `command` starts gets SIGKILL when the thread that starts it has ended, which its children do not inherit;
/// and what this thread has taken is not blocked there.
pub fn dies_with_parent(command: &mut Command) {
    let parent = rustix::process::getpid();
    let none = set_of(&[]);
    // SAFETY: the closure runs between fork and exec: it makes three system calls and neither allocates nor locks.
    unsafe {
        command.pre_exec(move || {
            mask(libc::SIG_SETMASK, &none)?;
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // It may have gone before.
            match getppid().map(Pid::as_raw_nonzero) == Some(parent.as_raw_nonzero()) {
                true => Ok(()),
                false => Err(std::io::Error::from_raw_os_error(libc::ESRCH)),
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    /// In a thread of its own, which alone has the signals blocked and is the one that gets them.
    fn alone<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
        std::thread::spawn(body).join().unwrap()
    }

    fn send_to_this_thread(signal: i32) {
        // SAFETY: the signal goes to this thread, where it is blocked.
        unsafe { libc::pthread_kill(libc::pthread_self(), signal) };
    }

    #[test]
    fn a_signal_is_waited_for_once() {
        let got = alone(|| {
            let ending = Ending::take().unwrap();
            let none = ending.wait(Some(Duration::ZERO)).unwrap();
            send_to_this_thread(libc::SIGTERM);
            let one = ending.wait(Some(Duration::from_secs(10))).unwrap();
            (none, one, ending.wait(Some(Duration::ZERO)).unwrap())
        });
        assert_eq!(got, (false, true, false));
    }

    /// Also those that a process ignores unless it says otherwise.
    #[test]
    fn taken_signals_say_which_they_are_and_whether_the_kernel_sent_them() {
        let all = [Signal::WINCH, Signal::CONT, Signal::USR1];
        let got = alone(move || {
            let signals = Signals::take(&all).unwrap();
            all.map(|s| {
                send_to_this_thread(s.as_raw());
                signals.wait(Some(Duration::from_secs(10))).unwrap()
            })
        });
        assert_eq!(got, all.map(|signal| Some(Arrived { signal, by_kernel: false })));
    }

    #[test]
    fn an_ignored_signal_is_known() {
        assert!(!is_ignored(Signal::CHILD));
        // Rust's start-up code ignores it in every program.
        assert!(is_ignored(Signal::PIPE));
    }

    #[test]
    fn what_is_taken_here_is_not_blocked_in_a_child() {
        let blocked = alone(|| {
            let _taken = Signals::take(&[Signal::USR2]).unwrap();
            let mut command = Command::new("cat");
            command.arg("/proc/self/status");
            dies_with_parent(&mut command);
            String::from_utf8(command.output().unwrap().stdout).unwrap()
        });
        assert!(blocked.contains("SigBlk:\t0000000000000000"), "{blocked}");
    }

    /// A thread is the parent, as far as the kernel is concerned; a process that starts late is covered too.
    #[test]
    fn a_child_dies_with_the_thread_that_started_it() {
        let mut child = alone(|| {
            let mut command = Command::new("sleep");
            command.arg("3600");
            dies_with_parent(&mut command);
            command.spawn().unwrap()
        });
        assert_eq!(child.wait().unwrap().signal(), Some(9));
    }
}
