//! Reading the private memory of a linked peer: one copy, made by the kernel (`process_vm_readv`).
//!
//! The kernel decides whether this process may read that one (ptrace(2), "Ptrace access mode checking": the same user, a
//! process that can be dumped, no rule of Yama or of a seccomp filter against it), and checks every address: one that is not
//! mapped there is an error here and never a fault. What a peer says of its memory is an allegation, but a wrong one gives
//! bytes of its own process or none. Nothing is ever written to a peer.
//!
//! A process number can pass to another process, and a process can become another program. So each read also fetches the
//! peer's [`Mark`], a random number that lies where the peer said when it was linked: all that one call reads is of one
//! address space, and the right number there proves whose the bytes are.
//!
//! Invariants: a read is complete or an error. Threads: any.

use rustix::io::Errno;

use crate::os::credentials::PeerPid;
use crate::os::random;

/// Bytes of one system call. The kernel moves at most 2 GiB less a page in one.
const CALL_BYTES: u64 = 1 << 30;

/// A random number at a fixed address of this process, by which readers know it.
#[derive(Debug)]
pub struct Mark(Box<u64>);

impl Mark {
    /// A fresh one.
    ///
    /// # Errors
    /// The kernel's, if it has no random bytes.
    pub fn new() -> std::io::Result<Mark> {
        Ok(Mark(Box::new(u64::from_ne_bytes(random::bytes()?))))
    }

    /// Its address and the number there, for peers.
    pub fn words(&self) -> [u64; 2] {
        [std::ptr::from_ref(&*self.0).addr() as u64, *self.0]
    }
}

/// Why a peer's private memory was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unreadable {
    /// The kernel does not let this process read that one.
    #[error(
        "the kernel refuses it ({0}), because of a seccomp filter, Yama's ptrace_scope, another user or PR_SET_DUMPABLE"
    )]
    Refused(Errno),
    /// The bytes are not there, or the kernel reads them for nobody.
    #[error(
        "{got} of {len} bytes at {at:#x} are there ({}); a buffer must stay mapped until the call returns, and must be memory \
         that the kernel reads for others, no mapping of a device or of memfd_secret",
        Errno::FAULT
    )]
    Unmapped {
        /// The address in the peer.
        at: u64,
        /// Bytes that could be read.
        got: u64,
        /// Bytes asked for.
        len: u64,
    },
    /// It is in another PID namespace.
    #[error("its process has no number here, it is in another PID namespace")]
    Elsewhere,
    /// The process has ended, or its main thread has.
    #[error("the process, or its main thread, has ended ({})", Errno::SRCH)]
    Gone,
    /// The process is not the one that was linked.
    #[error("its number belongs to another process or program now")]
    Stranger,
    /// Something else.
    #[error("the kernel says {0}")]
    Other(Errno),
}

/// A linked peer's address space.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Space {
    /// None if the process has no number here.
    pid: Option<i32>,
    /// Address of the mark, and the number there, as the peer announced them.
    mark: [u64; 2],
}

impl Space {
    pub(crate) fn new(pid: PeerPid, mark: [u64; 2]) -> Space {
        Space { pid: pid.here().and_then(|pid| pid.try_into().ok()), mark }
    }

    /// Whether it can be read at all.
    pub(crate) fn probe(&self) -> Result<(), Unreadable> {
        // SAFETY: no byte is written.
        unsafe { self.read(self.mark[0], std::ptr::dangling_mut(), 0) }
    }

    /// Copies `len` bytes from the address `from` there to `dst` here: all of them, or an error.
    ///
    /// # Safety
    /// `dst` must be valid for writing `len` bytes.
    pub(crate) unsafe fn read(&self, from: u64, dst: *mut u8, len: u64) -> Result<(), Unreadable> {
        let pid = self.pid.ok_or(Unreadable::Elsewhere)?;
        let mut done = 0;
        loop {
            let part = (len - done).min(CALL_BYTES);
            let at = from.wrapping_add(done);
            // SAFETY: done + part <= len.
            match unsafe { self.call(pid, at, dst.wrapping_add(done as usize), part) } {
                Err(Errno::INTR) => continue,
                Err(e @ (Errno::PERM | Errno::ACCESS | Errno::NOSYS)) => return Err(Unreadable::Refused(e)),
                Err(Errno::SRCH) => return Err(Unreadable::Gone),
                Err(Errno::FAULT) => return Err(Unreadable::Unmapped { at, got: 0, len: part }),
                Err(e) => return Err(Unreadable::Other(e)),
                Ok((got, _)) if got < part => return Err(Unreadable::Unmapped { at, got, len: part }),
                // The mark comes last, so it is there only if all before it is.
                Ok((got, mark)) if got < part + 8 || mark != self.mark[1] => return Err(Unreadable::Stranger),
                Ok(_) => done += part,
            }
            if done == len {
                return Ok(());
            }
        }
    }

    /// One system call: `len` bytes and the mark behind them. Answers how many bytes it moved, and the mark.
    ///
    /// # Safety
    /// `dst` must be valid for writing `len` bytes.
    unsafe fn call(&self, pid: i32, from: u64, dst: *mut u8, len: u64) -> Result<(u64, u64), Errno> {
        let mut mark = 0u64;
        let place = |at: *mut u8, len: u64| libc::iovec { iov_base: at.cast(), iov_len: len as usize };
        // The other process's addresses: the kernel looks them up there, this process never does.
        let there = |at: u64| std::ptr::without_provenance_mut(at as usize);
        let to = [place(dst, len), place((&raw mut mark).cast(), 8)];
        let from = [place(there(from), len), place(there(self.mark[0]), 8)];
        // SAFETY: the lists have two entries each and live through the call; the kernel writes to `dst`, which has `len` bytes
        // by this function's contract, and to the local.
        let got = unsafe { libc::process_vm_readv(pid, to.as_ptr(), 2, from.as_ptr(), 2, 0) };
        match u64::try_from(got) {
            Ok(got) => Ok((got, mark)),
            Err(_) => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn me(mark: &Mark) -> Space {
        Space::new(std::process::id().into(), mark.words())
    }

    fn read(space: &Space, from: u64, dst: &mut [u8]) -> Result<(), Unreadable> {
        // SAFETY: the slice is valid for writing its length.
        unsafe { space.read(from, dst.as_mut_ptr(), dst.len() as u64) }
    }

    #[test]
    fn bytes_are_read_whole_and_only_of_the_marked_process() {
        let (mark, other) = (Mark::new().unwrap(), Mark::new().unwrap());
        let src: Vec<u8> = (0..100_000u32).map(|i| (i * 7) as u8).collect();
        let from = src.as_ptr().addr() as u64;
        let mut dst = vec![0; src.len()];
        assert_eq!(me(&mark).probe(), Ok(()));
        assert_eq!(read(&me(&mark), from, &mut dst), Ok(()));
        assert_eq!(dst, src);
        // Another number than what is there.
        let [at, _] = mark.words();
        let wrong = Space::new(std::process::id().into(), [at, other.words()[1]]);
        assert_eq!(
            (wrong.probe(), read(&wrong, from, &mut dst)),
            (Err(Unreadable::Stranger), Err(Unreadable::Stranger))
        );
        // A process that announced none, as one of another version would.
        let none = Space::new(std::process::id().into(), [0, 0]);
        assert!(none.probe().is_err() && read(&none, from, &mut dst).is_err());
    }

    #[test]
    fn what_is_not_mapped_is_an_error_that_says_how_much_was_there() {
        let mark = Mark::new().unwrap();
        let page = rustix::param::page_size();
        let mut pages = memmap2::MmapMut::map_anon(3 * page).unwrap();
        pages.fill(9);
        let base = pages.as_ptr().addr() as u64;
        // SAFETY: nothing refers to the last page any more, and the mapping is dropped without being read.
        unsafe {
            let last = pages.as_mut_ptr().wrapping_add(2 * page);
            rustix::mm::mprotect(last.cast(), page, rustix::mm::MprotectFlags::empty()).unwrap();
        }
        let mut dst = vec![0; 3 * page];
        let (whole, at) = (dst.len() as u64, base + 2 * page as u64);
        let e = read(&me(&mark), base, &mut dst).unwrap_err();
        assert_eq!(e, Unreadable::Unmapped { at: base, got: 2 * page as u64, len: whole });
        assert_eq!(read(&me(&mark), at, &mut dst[..8]).unwrap_err(), Unreadable::Unmapped { at, got: 0, len: 8 });
        let text = e.to_string();
        assert!(text.contains(&format!("{} of {whole} bytes at {base:#x}", 2 * page)), "{text}");
    }

    #[test]
    fn a_process_that_has_ended_is_gone() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = PeerPid::from(child.id());
        child.wait().unwrap();
        assert_eq!(Space::new(pid, Mark::new().unwrap().words()).probe(), Err(Unreadable::Gone));
    }
}
