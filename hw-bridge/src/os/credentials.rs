//! Who is at the other end of a unix socket, as the kernel says.
//!
//! A process in another PID namespace may have no pid here: the kernel answers 0 then, which `rustix`'s type for credentials
//! cannot hold, so the two options are read here.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// The peer of a connected unix socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// Its process.
    pub pid: PeerPid,
    /// Its effective user when it connected or listened.
    pub uid: u32,
}

/// A peer's process id in this process's PID namespace; 0 if it has none here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerPid(i32);

impl PeerPid {
    /// The id, if there is one here. Without it nothing in `/proc` is the peer's.
    pub fn here(self) -> Option<u32> {
        u32::try_from(self.0).ok().filter(|p| *p > 0)
    }
}

impl From<u32> for PeerPid {
    /// Of a process in this namespace.
    fn from(pid: u32) -> PeerPid {
        PeerPid(pid.cast_signed())
    }
}

impl std::fmt::Display for PeerPid {
    /// What follows the word "pid" in a message.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.here() {
            Some(pid) => pid.fmt(f),
            None => f.write_str("unknown here, other PID namespace"),
        }
    }
}

/// Reads an option of `SOL_SOCKET` whose value is a `T`.
///
/// # Safety
/// Any bytes that the kernel gives for `option` must be a valid `T`.
unsafe fn option<T>(socket: impl AsFd, option: i32) -> std::io::Result<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    let mut len = size_of::<T>() as libc::socklen_t;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: `value` has `len` bytes, and both outlive the call, which writes no more than that.
    let r = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, option, value.as_mut_ptr().cast(), &raw mut len) };
    if r != 0 {
        return Err(std::io::Error::last_os_error());
    }
    if len as usize != size_of::<T>() {
        return Err(std::io::ErrorKind::InvalidData.into());
    }
    // SAFETY: the kernel has filled it, and any bytes of this option are valid, as the caller promises.
    Ok(unsafe { value.assume_init() })
}

/// Who the peer is.
///
/// # Errors
/// The kernel's, for what is no connected unix socket.
pub fn of_peer(socket: impl AsFd) -> std::io::Result<Credentials> {
    // SAFETY: `ucred` is three integers.
    let cred: libc::ucred = unsafe { option(socket, libc::SO_PEERCRED) }?;
    Ok(Credentials { pid: PeerPid(cred.pid), uid: cred.uid })
}

/// Whether the peer is a process of this user, or of root.
pub fn same_user(cred: &Credentials) -> bool {
    cred.uid == rustix::process::geteuid().as_raw() || cred.uid == 0
}

/// Whether the peer is a process of this user, and of nobody else.
pub fn this_user(cred: &Credentials) -> bool {
    cred.uid == rustix::process::geteuid().as_raw()
}

/// A descriptor that becomes readable when the peer's process ends, whatever PID namespace it lives in.
///
/// # Errors
/// `ENOPROTOOPT` before Linux 6.5, `ESRCH` or `ENODATA` if it has ended.
pub fn pidfd_of_peer(socket: impl AsFd) -> std::io::Result<OwnedFd> {
    // SAFETY: the value is one integer.
    let fd: i32 = unsafe { option(socket, libc::SO_PEERPIDFD) }?;
    // SAFETY: the kernel has just opened it for this call (close-on-exec, as every pidfd), and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The same on every kernel. Before Linux 6.5 the socket knows only the number `pid`, which may be another process's by the time
/// that one is opened. So what was opened counts only if the connection is still open afterwards: then the peer, which holds its
/// other end, lives, and two living processes do not have one number. (An end that was left to a child proves nothing of its
/// parent; our sockets are closed on exec.)
///
/// # Errors
/// `ESRCH`, `ENODATA` or `EINVAL` if it has ended; `EOPNOTSUPP` if it has no number here and the kernel knows only those.
pub fn process_of_peer(socket: impl AsFd, pid: PeerPid) -> std::io::Result<OwnedFd> {
    match pidfd_of_peer(&socket) {
        Err(e) if e.raw_os_error() == Some(libc::ENOPROTOOPT) => by_number(&socket, pid),
        opened => opened,
    }
}

fn by_number(socket: impl AsFd, pid: PeerPid) -> std::io::Result<OwnedFd> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::io::Errno;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    let number = pid.here().and_then(|p| Pid::from_raw(p.cast_signed())).ok_or(Errno::OPNOTSUPP)?;
    let opened = pidfd_open(number, PidfdFlags::empty())?;
    let mut fds = [PollFd::new(&socket, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    loop {
        match poll(&mut fds, Some(&now)) {
            Ok(0) => return Ok(opened),
            Ok(_) => return Err(Errno::SRCH.into()),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// The process that a pidfd stands for. Its number is unknown where `/proc` shows another PID namespace than this process's.
///
/// # Errors
/// `ESRCH` if it has ended, [`std::io::ErrorKind::InvalidData`] for what is no pidfd.
pub fn pid_of(pidfd: impl AsFd) -> std::io::Result<PeerPid> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_fd().as_raw_fd()))?;
    let pid = text.lines().find_map(|l| l.strip_prefix("Pid:")?.trim().parse().ok());
    match pid {
        Some(-1) => Err(std::io::Error::from_raw_os_error(libc::ESRCH)),
        Some(pid) => {
            let me = std::fs::read_link("/proc/self")?;
            let ours = me.to_str().and_then(|me| me.parse().ok()) == Some(std::process::id());
            Ok(PeerPid(if ours { pid } else { 0 }))
        }
        None => Err(std::io::ErrorKind::InvalidData.into()),
    }
}

/// Runs `f` as this user, on a thread of its own, which ends: the kernel keeps who one was that connected or began to listen. For
/// those who are root, as tests may be.
///
/// # Errors
/// The kernel's, for a user that one may not become.
pub fn as_user<R: Send>(uid: u32, f: impl FnOnce() -> R + Send) -> std::io::Result<R> {
    let runs = || {
        if uid != rustix::process::geteuid().as_raw() {
            let uid = rustix::process::Uid::from_raw(uid);
            rustix::thread::set_thread_res_uid(uid, uid, uid)?;
        }
        Ok(f())
    };
    std::thread::scope(|s| match s.spawn(runs).join() {
        Ok(answer) => answer,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_peer_has_its_pid_and_user_and_a_stranger_none() {
        let (a, _b) = UnixStream::pair().unwrap();
        let cred = of_peer(&a).unwrap();
        assert_eq!(cred.pid.here(), Some(std::process::id()));
        assert!(same_user(&cred) && this_user(&cred));
        let other = Credentials { uid: cred.uid + 1, ..cred };
        assert!(!same_user(&other) && !this_user(&other));
        assert_eq!(cred.pid.to_string(), std::process::id().to_string());
        let elsewhere = PeerPid(0);
        assert_eq!((elsewhere.here(), elsewhere.to_string().as_str()), (None, "unknown here, other PID namespace"));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(of_peer(&file).is_err() && pidfd_of_peer(&file).is_err());
    }

    #[test]
    fn a_pidfd_says_whose_it_is_and_another_file_does_not() {
        use rustix::process::{Pid, PidfdFlags, pidfd_open};
        let open = |pid: u32| pidfd_open(Pid::from_raw(pid.cast_signed()).unwrap(), PidfdFlags::empty()).unwrap();
        assert_eq!(pid_of(open(std::process::id())).unwrap().here(), Some(std::process::id()));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let fd = open(child.id());
        assert_eq!(pid_of(&fd).unwrap(), PeerPid::from(child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(pid_of(&fd).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(pid_of(&file).unwrap_err().kind(), std::io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_number_is_believed_only_while_the_connection_is_open() {
        let (a, b) = UnixStream::pair().unwrap();
        let me = of_peer(&a).unwrap().pid;
        assert_eq!(pid_of(by_number(&a, me).unwrap()).unwrap(), me);
        // Whoever has the number now, it need not be who was there.
        drop(b);
        assert_eq!(by_number(&a, me).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        assert_eq!(by_number(&a, PeerPid(0)).unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
    }

    #[test]
    fn the_pidfd_of_a_peer_is_not_readable_while_it_lives() {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let (a, _b) = UnixStream::pair().unwrap();
        let fd = match pidfd_of_peer(&a) {
            Ok(fd) => fd,
            Err(e) => {
                assert_eq!(e.raw_os_error(), Some(libc::ENOPROTOOPT), "only an old kernel has none");
                return;
            }
        };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&now)), Ok(0));
        // That it becomes readable is tried across PID namespaces, in the package of whole-system tests.
    }
}
