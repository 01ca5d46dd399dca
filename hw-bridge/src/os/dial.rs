//! Connecting to a unix socket of this machine, without waiting for ever.

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::os::patience::Wait;

/// Pause between two attempts, nanoseconds.
const PAUSE: i64 = 1_000_000;

/// Connects before `until`. A full backlog (who listens is stopped, or slow) is tried again; a blocking connect would wait for
/// ever. Answers a blocking stream.
///
/// # Errors
/// The kernel's: `AGAIN` if the backlog stayed full. `CANCELED` once `stop` is readable.
pub fn dial(to: &SocketAddrUnix, stop: Option<BorrowedFd<'_>>, until: Instant) -> Result<UnixStream, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let mut wait = Wait::until(until);
    loop {
        match connect(&fd, to) {
            Ok(()) => break,
            Err(Errno::AGAIN | Errno::INTR) if wait.left().is_some() => {}
            Err(e) => return Err(e),
        }
        let mut fds: Vec<_> = stop.iter().map(|s| PollFd::from_borrowed_fd(*s, PollFlags::IN)).collect();
        // A signal only makes the pause shorter.
        if matches!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: PAUSE })), Ok(1)) {
            return Err(Errno::CANCELED);
        }
    }
    let stream = UnixStream::from(fd);
    stream.set_nonblocking(false).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::INVAL))?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::time::Duration;

    #[test]
    fn a_full_backlog_is_waited_for_until_the_deadline_or_the_stop() {
        let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let name = SocketAddrUnix::new_abstract_name(format!("wccl-dial-{}", std::process::id()).as_bytes()).unwrap();
        rustix::net::bind(&fd, &name).unwrap();
        assert_eq!(dial(&name, None, Instant::now()).unwrap_err(), Errno::CONNREFUSED);
        rustix::net::listen(&fd, 0).unwrap();
        let waiting: Vec<_> = std::iter::from_fn(|| dial(&name, None, Instant::now()).ok()).take(100).collect();
        assert!(waiting.len() < 100, "the backlog has an end");
        let soon = || Instant::now() + Duration::from_millis(20);
        assert_eq!(dial(&name, None, soon()).unwrap_err(), Errno::AGAIN);
        let (stop, mut end) = UnixStream::pair().unwrap();
        std::io::Write::write_all(&mut end, b"!").unwrap();
        let far = Instant::now() + Duration::from_secs(60);
        assert_eq!(dial(&name, Some(stop.as_fd()), far).unwrap_err(), Errno::CANCELED);
        // Room comes while it is waited for.
        let listener = std::os::unix::net::UnixListener::from(fd);
        let dialing = std::thread::spawn(move || dial(&name, None, far));
        listener.accept().unwrap();
        dialing.join().unwrap().unwrap();
    }
}
