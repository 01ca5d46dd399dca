//! Where the ranks of a communicator find one another when the rest of it is broken: what [`shrink`] stands on.
//!
//! A shrink happens after a failure. The bootstrap ring is cut then, its point-to-point connections may hold messages that
//! nobody fetched, the plugin may have stopped, and the control channel of the communicator is closed. So each rank opens one
//! listening socket of the host's own while all is well, and the addresses are gathered once, in the init. Nobody waits on
//! the socket until a shrink; an idle one costs a descriptor and nothing else.
//!
//! A [`Meeting`] is one attempt. A message travels on a connection of its own, which the sender dials:
//!
//! ```text
//! hello 25 bytes: token 16 | rank u32 | kind u8 (0 message, 1 watch) | length u32, then the message
//! ```
//!
//! Whoever waits dials a *watch* to the one it waits for: a refused or closed watch is a rank that is gone, known at once and
//! not by the deadline. Both ends keep their connections until the attempt is over, so a connection whose other end is closed
//! belongs to an attempt that has ended and is dropped.
//!
//! The token is a random one of rank 0: strays and other groups are closed. Addresses and messages are allegations of
//! peers and their plugins; lengths are bounded, every wait has a deadline. Threads: the caller's.
//!
//! [`shrink`]: crate::nrt::Communicator::shrink

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::verdict::{DOWN_BYTES, Messages};
use crate::error::Error;
use crate::hw::sockets::{decode, encode};
use crate::limits::ADDRESS_BYTES;
use crate::nrt::communicator::{Communicator, Rendezvous, bad};

const TOKEN_BYTES: usize = 16;
const BLOCK_BYTES: usize = ADDRESS_BYTES + TOKEN_BYTES;
const HELLO_BYTES: usize = TOKEN_BYTES + 9;
/// How long a stranger on the listener may take to introduce itself.
const HELLO_WAIT: Duration = Duration::from_secs(2);
/// How much longer than the deadline one waits for each rank that may itself be waiting.
const ROUND: Duration = Duration::from_millis(300);
/// Pause between two attempts to reach a rank whose queue of connections is full.
const PAUSE: Duration = Duration::from_millis(20);

const MESSAGE: u8 = 0;
const WATCH: u8 = 1;

/// One rank's meeting place, and those of the others.
#[derive(Debug)]
pub(in crate::nrt) struct Beacon {
    rank: usize,
    listener: TcpListener,
    addresses: Vec<SocketAddr>,
    token: [u8; TOKEN_BYTES],
}

fn system(what: &str) -> impl Fn(std::io::Error) -> Error + '_ {
    move |source| Error::System { what: format!("{what} (check ulimit -n)"), source }
}

impl Beacon {
    /// Opens this rank's and gathers all. Every rank of the group calls it, in its init.
    ///
    /// # Errors
    /// [`Error::System`] if no socket can be had, those of the bootstrap's all-gather, [`Error::Usage`] if the library
    /// answers addresses that cannot be.
    pub(in crate::nrt) fn open(comm: &Communicator, at: &Rendezvous) -> Result<Beacon, Error> {
        let here = own_address(at)?;
        let listener = TcpListener::bind((here, 0)).map_err(system("opening the rank's meeting place"))?;
        listener.set_nonblocking(true).map_err(system("opening the rank's meeting place"))?;
        let mine = listener.local_addr().map_err(system("opening the rank's meeting place"))?;
        let mut block = encode(&mine);
        let mut token = [0u8; TOKEN_BYTES];
        rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty())
            .map_err(|e| system("reading random bytes")(e.into()))?;
        block.extend_from_slice(&token);
        let all = comm.bootstrap_all_gather(&block)?;
        let addresses = all
            .chunks(BLOCK_BYTES)
            .enumerate()
            .map(|(r, b)| {
                decode(&b[..ADDRESS_BYTES]).map_err(|e| bad(format!("the meeting place of rank {r} cannot be: {e}")))
            })
            .collect::<Result<Vec<_>, Error>>()?;
        token.copy_from_slice(&all[ADDRESS_BYTES..BLOCK_BYTES]);
        Ok(Beacon { rank: comm.rank(), listener, addresses, token })
    }

    /// Whether a rank's meeting place is gone: its process has ended, or it has freed the communicator.
    pub(in crate::nrt) fn gone(&self, rank: usize) -> bool {
        let dialled = self.addresses.get(rank).map(|a| TcpStream::connect_timeout(a, Duration::from_millis(500)));
        matches!(dialled, Some(Err(e)) if e.kind() == ErrorKind::ConnectionRefused)
    }
}

/// The address of this machine on the way to the root of the group: where peers reach it.
fn own_address(at: &Rendezvous) -> Result<IpAddr, Error> {
    let root = match at {
        Rendezvous::Id(id) => decode(&id[..ADDRESS_BYTES]).map_err(bad)?,
        Rendezvous::Root(text) => match text.parse() {
            Ok(a) => a,
            // The library has found it a moment ago.
            Err(_) => text
                .to_socket_addrs()
                .ok()
                .and_then(|mut a| a.next())
                .ok_or_else(|| bad(format!("the root {text} has no address")))?,
        },
    };
    let any: IpAddr = if root.is_ipv6() { IpAddr::from([0u16; 8]) } else { IpAddr::from([0u8; 4]) };
    // Connecting a datagram socket sends nothing; it asks the kernel which way it would take.
    let asked = UdpSocket::bind((any, 0)).and_then(|s| s.connect(root).and_then(|()| s.local_addr()));
    asked.map(|a| a.ip()).map_err(system("finding this machine's address on the way to the root"))
}

/// One attempt of some ranks to agree: positions `0 .. members.len()`.
#[derive(Debug)]
pub(super) struct Meeting<'a> {
    beacon: &'a Beacon,
    members: &'a [usize],
    until: Instant,
    arrived: Vec<(usize, TcpStream, usize)>,
    /// Kept open until the attempt is over: a closed connection says that its rank has left.
    kept: Vec<TcpStream>,
}

impl<'a> Meeting<'a> {
    /// Begins an attempt, after letting go of what earlier ones left.
    pub(super) fn begin(beacon: &'a Beacon, members: &'a [usize], timeout: Duration) -> Meeting<'a> {
        let until = Instant::now() + timeout;
        let mut m = Meeting { beacon, members, until, arrived: Vec::new(), kept: Vec::new() };
        m.accept_all();
        m.arrived.retain(|(_, s, _)| !closed(s));
        m.kept.retain(|s| !closed(s));
        m
    }

    fn dial(&self, to: usize, kind: u8, data: &[u8], until: Instant) -> Result<TcpStream, String> {
        let rank = self.members[to];
        let at = self.beacon.addresses[rank];
        let mut bytes = Vec::with_capacity(HELLO_BYTES + data.len());
        bytes.extend_from_slice(&self.beacon.token);
        bytes.extend_from_slice(&(self.beacon.rank as u32).to_le_bytes());
        bytes.push(kind);
        bytes.extend_from_slice(&(data.len() as u32).to_le_bytes());
        bytes.extend_from_slice(data);
        loop {
            let left = until.saturating_duration_since(Instant::now()).clamp(PAUSE, Duration::from_secs(1));
            let tried = TcpStream::connect_timeout(&at, left).and_then(|mut s| {
                s.set_write_timeout(Some(left))?;
                s.write_all(&bytes)?;
                Ok(s)
            });
            match tried {
                Ok(s) => return Ok(s),
                Err(e) if e.kind() == ErrorKind::ConnectionRefused => {
                    return Err(format!(
                        "rank {rank} is gone: its process has ended or it has freed the communicator ({at} refuses)"
                    ));
                }
                Err(e) if Instant::now() >= until => return Err(format!("rank {rank} at {at} was not reached: {e}")),
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    /// Takes in every connection that waits.
    fn accept_all(&mut self) {
        loop {
            match self.beacon.listener.accept() {
                Ok((mut s, _)) => {
                    let Some((rank, kind, len)) = self.hello(&mut s) else { continue };
                    match self.members.iter().position(|m| *m == rank) {
                        Some(p) if kind == MESSAGE && len <= DOWN_BYTES => self.arrived.push((p, s, len)),
                        // A watch, or a rank that has another list of survivors: it must not take us for dead.
                        _ => self.kept.push(s),
                    }
                }
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                // Out of descriptors, say: tried again, and the deadline names who was not heard.
                Err(e) => {
                    tracing::warn!("rank {} cannot take a connection in: {e} (check ulimit -n)", self.beacon.rank);
                    return std::thread::sleep(PAUSE);
                }
            }
        }
    }

    fn hello(&self, s: &mut TcpStream) -> Option<(usize, u8, usize)> {
        let mut b = [0u8; HELLO_BYTES];
        read_exactly(s, &mut b, Instant::now() + HELLO_WAIT).ok()?;
        let word = |at: usize| u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]) as usize;
        (b[..TOKEN_BYTES] == self.beacon.token).then(|| (word(TOKEN_BYTES), b[TOKEN_BYTES + 4], word(TOKEN_BYTES + 5)))
    }

    /// The message of a position, if it has arrived.
    fn take(&mut self, from: usize, bytes: usize, until: Instant) -> Option<Result<Vec<u8>, String>> {
        let i = self.arrived.iter().position(|(p, ..)| *p == from)?;
        let (_, mut s, len) = self.arrived.remove(i);
        if len != bytes {
            return Some(Err(format!("rank {} sent {len} bytes where {bytes} belong", self.members[from])));
        }
        let mut data = vec![0; bytes];
        let read = read_exactly(&mut s, &mut data, until);
        self.kept.push(s);
        Some(read.map(|()| data).map_err(|e| format!("rank {} left in mid-sentence: {e}", self.members[from])))
    }
}

impl Messages for Meeting<'_> {
    fn send(&mut self, to: usize, data: &[u8]) -> Result<(), String> {
        let s = self.dial(to, MESSAGE, data, self.until)?;
        self.kept.push(s);
        Ok(())
    }

    fn recv(&mut self, from: usize, bytes: usize, rounds: u32) -> Result<Vec<u8>, String> {
        let until = self.until + ROUND * rounds;
        self.accept_all();
        if let Some(got) = self.take(from, bytes, until) {
            return got;
        }
        let watch = self.dial(from, WATCH, &[], until);
        loop {
            // Looked at before the connections are taken in: what it sent before it left is there by then.
            let left = match &watch {
                Err(why) => Some(why.clone()),
                Ok(s) if closed(s) => Some(self.departed(from)),
                Ok(_) => None,
            };
            self.accept_all();
            if let Some(got) = self.take(from, bytes, until) {
                if let Ok(s) = watch {
                    self.kept.push(s);
                }
                return got;
            }
            if let Some(why) = left {
                return Err(why);
            }
            let wait = until.saturating_duration_since(Instant::now());
            if wait.is_zero() {
                let rank = self.members[from];
                return Err(format!("rank {rank} lives but did not come in time; it must call the same function"));
            }
            if let Ok(s) = &watch {
                let timeout = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
                let events = PollFlags::IN | PollFlags::RDHUP;
                let mut fds = [PollFd::new(&self.beacon.listener, PollFlags::IN), PollFd::new(s, events)];
                // A signal only makes the loop look once more.
                let _ = poll(&mut fds, Some(&timeout));
            }
        }
    }
}

impl Meeting<'_> {
    fn departed(&self, from: usize) -> String {
        let rank = self.members[from];
        if self.beacon.gone(rank) {
            format!("rank {rank} is gone: its process has ended or it has freed the communicator")
        } else {
            format!("rank {rank} has given up")
        }
    }
}

/// Whether the other end is closed.
fn closed(s: &TcpStream) -> bool {
    let mut fds = [PollFd::new(s, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let ends = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    matches!(poll(&mut fds, Some(&now)), Ok(n) if n > 0) && fds[0].revents().intersects(ends)
}

/// Fills `to`, by `until` at the latest however slowly the bytes come.
fn read_exactly(s: &mut TcpStream, to: &mut [u8], until: Instant) -> std::io::Result<()> {
    let mut got = 0;
    while got < to.len() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        s.set_read_timeout(Some(left))?;
        match s.read(&mut to[got..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => got += n,
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
