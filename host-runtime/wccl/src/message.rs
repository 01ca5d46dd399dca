//! Messages between processes of this machine: a length, then the postcard of one value, with descriptors beside it.
//!
//! The control socket of a rank and the sockets of the service both speak so. What comes is an allegation: the length is
//! checked before anything is allocated, the value must use all its bytes, descriptors beyond what the reader asked for are
//! closed, and every wait has a deadline.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use hw_bridge::os::patience::Wait;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use sandbox::limits::{MAX_MESSAGE_BYTES, MAX_MESSAGE_FDS};

/// Why a message did not come or go.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The other side closed the socket, or its process ended.
    #[error("the other side has closed the connection")]
    Closed,
    /// The deadline.
    #[error("nothing came or went within {0:?}")]
    Late(Duration),
    /// What came is not a message of this version.
    #[error("what came is no message that this version knows: {0}")]
    Malformed(String),
    /// What should go is larger than a message may be.
    #[error("a message of {0} bytes is more than the {MAX_MESSAGE_BYTES} one may have")]
    Large(usize),
    /// Nobody listens at the socket any more.
    #[error("its process has ended")]
    Ended,
    /// The socket is another user's.
    #[error("the socket is another user's")]
    Stranger,
    /// The system.
    #[error("the connection failed: {0}")]
    System(#[from] std::io::Error),
}

/// Waits until `fd` is ready or `until`.
fn ready(fd: impl AsFd, flags: PollFlags, began: Instant, until: Instant) -> Result<(), MessageError> {
    let mut wait = Wait::until(until).since(began);
    loop {
        let left = wait.left().unwrap_or_default();
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut [PollFd::new(&fd, flags)], Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(MessageError::System(e.into())),
            Ok(n) if n > 0 => return Ok(()),
            Ok(_) if left.is_zero() => return Err(MessageError::Late(began.elapsed())),
            Ok(_) => {}
        }
    }
}

/// Sends `value`, with `fds`, before `until`.
///
/// # Errors
/// [`MessageError`]; after one the stream is in the middle of a message and must be closed.
pub fn send<T: Serialize>(
    stream: &UnixStream,
    value: &T,
    fds: &[BorrowedFd<'_>],
    until: Instant,
) -> Result<(), MessageError> {
    let began = Instant::now();
    let body = postcard::to_stdvec(value).map_err(|e| MessageError::Malformed(e.to_string()))?;
    if body.len() > MAX_MESSAGE_BYTES {
        return Err(MessageError::Large(body.len()));
    }
    let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
    bytes.extend_from_slice(&body);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MESSAGE_FDS))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(MessageError::Malformed(format!("{} descriptors, {MAX_MESSAGE_FDS} can go at once", fds.len())));
    }
    let mut sent = 0;
    while sent < bytes.len() {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(stream, &[IoSlice::new(&bytes[sent..])], &mut beside, flags) {
            Ok(n) => {
                sent += n;
                // They went with the first byte.
                beside.clear();
            }
            Err(rustix::io::Errno::AGAIN) => ready(stream, PollFlags::OUT, began, until)?,
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => return Err(MessageError::Closed),
            Err(e) => return Err(MessageError::System(e.into())),
        }
    }
    Ok(())
}

/// Receives one value, with at most `most` descriptors beside it, before `until`, as [`receive_within`] of the longest message
/// there is.
///
/// # Errors
/// As there.
pub fn receive<T: DeserializeOwned>(
    stream: &UnixStream,
    most: usize,
    until: Instant,
) -> Result<(T, Vec<OwnedFd>), MessageError> {
    receive_within(stream, MAX_MESSAGE_BYTES, most, until)
}

/// Receives one value of at most `bytes`, with at most `most` descriptors beside it, before `until`.
///
/// # Errors
/// [`MessageError`]; whatever descriptors came are closed. After one the stream must be closed, but for [`MessageError::Late`] before the first byte.
pub fn receive_within<T: DeserializeOwned>(
    stream: &UnixStream,
    bytes: usize,
    most: usize,
    until: Instant,
) -> Result<(T, Vec<OwnedFd>), MessageError> {
    let (mut fds, began) = (Vec::new(), Instant::now());
    let mut head = [0; 4];
    fill(stream, &mut head, &mut fds, most, began, until)?;
    let len = u32::from_le_bytes(head) as usize;
    if len > bytes {
        return Err(MessageError::Malformed(format!("it says that it has {len} bytes, at most {bytes} are read")));
    }
    let mut body = vec![0; len];
    fill(stream, &mut body, &mut fds, most, began, until)?;
    Ok((parse(&body)?, fds))
}

/// Reads the value of one message. Public for the fuzz targets.
///
/// # Errors
/// [`MessageError::Malformed`].
pub fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, MessageError> {
    match postcard::take_from_bytes(body) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(MessageError::Malformed(format!("{} bytes too many", rest.len()))),
        Err(e) => Err(MessageError::Malformed(e.to_string())),
    }
}

fn fill(
    stream: &UnixStream,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    most: usize,
    began: Instant,
    until: Instant,
) -> Result<(), MessageError> {
    let mut got = 0;
    while got < bytes.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MESSAGE_FDS))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        match recvmsg(stream, &mut [IoSliceMut::new(&mut bytes[got..])], &mut beside, flags) {
            Ok(m) if m.bytes == 0 => return Err(MessageError::Closed),
            Ok(m) => got += m.bytes,
            Err(rustix::io::Errno::AGAIN) => {
                ready(stream, PollFlags::IN, began, until)?;
                continue;
            }
            Err(rustix::io::Errno::INTR) => continue,
            Err(rustix::io::Errno::CONNRESET) => return Err(MessageError::Closed),
            Err(e) => return Err(MessageError::System(e.into())),
        }
        for m in beside.drain() {
            if let RecvAncillaryMessage::ScmRights(came) = m {
                fds.extend(came);
            }
        }
        // The kernel has closed what did not fit beside it.
        if fds.len() > most {
            return Err(MessageError::Malformed(format!("{} descriptors came with it, {most} may", fds.len())));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[test]
    fn a_value_and_its_descriptors_arrive() {
        let (a, b) = UnixStream::pair().unwrap();
        let (mut near, far) = UnixStream::pair().unwrap();
        let long = vec![7u8; 1 << 20];
        let sender = std::thread::spawn(move || {
            send(&a, &("word".to_string(), long), &[far.as_fd()], soon()).unwrap();
            send(&a, &1u32, &[], soon()).unwrap();
        });
        let ((word, bytes), mut fds) = receive::<(String, Vec<u8>)>(&b, 1, soon()).unwrap();
        assert_eq!((word.as_str(), bytes.len(), fds.len()), ("word", 1 << 20, 1));
        let (next, none) = receive::<u32>(&b, 1, soon()).unwrap();
        assert_eq!((next, none.len()), (1, 0));
        sender.join().unwrap();
        UnixStream::from(fds.remove(0)).write_all(b"through").unwrap();
        let mut through = [0; 7];
        near.read_exact(&mut through).unwrap();
        assert_eq!(&through, b"through");
    }

    #[test]
    fn what_is_no_message_is_refused_and_silence_ends() {
        let (mut a, b) = UnixStream::pair().unwrap();
        let e = receive::<u32>(&b, 0, Instant::now() + Duration::from_millis(20)).unwrap_err();
        assert!(matches!(e, MessageError::Late(_)), "{e}");
        a.write_all(&u32::MAX.to_le_bytes()).unwrap();
        let e = receive::<u32>(&b, 0, soon()).unwrap_err().to_string();
        assert!(e.contains("says that it has 4294967295 bytes"), "{e}");
        assert!(parse::<u32>(&[1, 2]).unwrap_err().to_string().contains("1 bytes too many"));
        assert!(parse::<(u32, String)>(&[1, 200]).is_err());
        drop(a);
        assert!(matches!(receive::<u32>(&b, 0, soon()), Err(MessageError::Closed)));
        assert!(matches!(send(&b, &1u32, &[], soon()), Err(MessageError::Closed)));
    }

    #[test]
    fn descriptors_that_nobody_asked_for_are_an_error_and_closed() {
        for (sent, most) in [(1, 0), (3, 2), (MAX_MESSAGE_FDS, 1)] {
            let (a, b) = UnixStream::pair().unwrap();
            let (mut near, far) = UnixStream::pair().unwrap();
            send(&a, &1u32, &vec![far.as_fd(); sent], soon()).unwrap();
            drop(far);
            let e = receive::<u32>(&b, most, soon()).unwrap_err().to_string();
            assert!(e.contains(&format!("{sent} descriptors came with it, {most} may")), "{e}");
            near.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            assert_eq!(near.read(&mut [0]).unwrap(), 0, "one of {sent} is still open");
        }
    }

    /// They are counted over the whole message, in whichever part they come.
    #[test]
    fn descriptors_beside_a_later_part_count_too() {
        for (first, later, most) in [(0, 1, 0), (1, 2, 2)] {
            let (mut a, b) = UnixStream::pair().unwrap();
            let beside = vec![a.as_fd(); first + later];
            // To the reader the second message, of five bytes, is the rest of one whose length has come.
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MESSAGE_FDS))];
            let mut with_head = SendAncillaryBuffer::new(&mut space);
            assert!(first == 0 || with_head.push(SendAncillaryMessage::ScmRights(&beside[..first])));
            sendmsg(&a, &[IoSlice::new(&5u32.to_le_bytes())], &mut with_head, SendFlags::NOSIGNAL).unwrap();
            send(&a, &1u32, &beside[first..], soon()).unwrap();
            let e = receive::<(u32, u8)>(&b, most, soon()).unwrap_err().to_string();
            let says = format!("{} descriptors came with it, {most} may", first + later);
            assert!(e.contains(&says), "{e}");
            a.write_all(&[0]).unwrap();
        }
    }

    /// The deadline is the message's: one that comes byte by byte has no more time than another.
    #[test]
    fn a_message_that_trickles_in_is_late() {
        let (mut a, b) = UnixStream::pair().unwrap();
        let bytes = 2000u32;
        let trickle = std::thread::spawn(move || {
            a.write_all(&bytes.to_le_bytes()).unwrap();
            // Until the reader has gone, or has taken all.
            (0..bytes).take_while(|_| a.write_all(&[0]).is_ok()).for_each(|_| {
                std::thread::sleep(Duration::from_millis(5));
            });
        });
        let e = receive::<u32>(&b, 0, Instant::now() + Duration::from_millis(100)).unwrap_err();
        assert!(matches!(e, MessageError::Late(_)), "{e}");
        drop(b);
        trickle.join().unwrap();
    }

    #[test]
    fn a_message_that_is_too_large_is_not_sent() {
        let (a, _b) = UnixStream::pair().unwrap();
        let e = send(&a, &vec![0u8; MAX_MESSAGE_BYTES + 1], &[], soon()).unwrap_err();
        assert!(matches!(e, MessageError::Large(_)), "{e}");
    }

    /// Of its deadline too: what was stopped before its first byte counts for all of it.
    #[test]
    fn a_message_has_the_time_that_was_stopped_before_it_began() {
        let (mut a, b) = UnixStream::pair().unwrap();
        let until = Instant::now() + Duration::from_secs(8);
        let sender = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_secs(5));
            let now = Instant::now();
            assert!(hw_bridge::os::patience::was_away(now - Duration::from_secs(5), now, Duration::ZERO));
            a.write_all(&1u32.to_le_bytes()).unwrap();
            // Past the deadline by the machine's clock, and not by that of the process.
            std::thread::sleep(until.saturating_duration_since(Instant::now()) + Duration::from_millis(400));
            a.write_all(&[7]).unwrap();
        });
        assert_eq!(receive::<u8>(&b, 0, until).unwrap().0, 7);
        sender.join().unwrap();
    }
}
