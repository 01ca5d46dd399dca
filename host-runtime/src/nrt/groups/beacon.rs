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
//! hello 45 bytes: token 16 | rank u32 | kind u8 (0 message, 1 watch) | length u32 | attempt 20, then the message
//! attempt: digest of the list of survivors 16 | how many attempts with that list came before u32
//! ```
//!
//! Whoever waits dials a *watch* to the one it waits for: a refused or closed watch is a rank that is gone, known at once and
//! not by the deadline.
//!
//! Ranks come to an attempt at different times, and one may be in the next while another is still in this: what arrives for
//! another attempt is kept. A rank sends all its messages of one before it begins the next, so one that is heard of only with
//! another list has another list.
//!
//! The token is a random one of rank 0: strays and other groups are closed. Addresses and messages are allegations of
//! peers and their plugins; lengths are bounded, every wait has a deadline. Threads: the caller's.
//!
//! [`shrink`]: crate::nrt::Communicator::shrink

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::signature::SIGNATURE_BYTES;
use super::verdict::{DOWN_BYTES, Messages};
use crate::error::Error;
use crate::hw::sockets::{decode, encode};
use crate::limits::ADDRESS_BYTES;
use crate::nrt::communicator::{Communicator, Rendezvous, bad};

const TOKEN_BYTES: usize = 16;
const BLOCK_BYTES: usize = ADDRESS_BYTES + TOKEN_BYTES;
const HELLO_BYTES: usize = TOKEN_BYTES + 9 + ATTEMPT_BYTES;
const ATTEMPT_BYTES: usize = SIGNATURE_BYTES + 4;
/// How long a stranger on the listener may take to introduce itself.
const HELLO_WAIT: Duration = Duration::from_secs(2);
/// How much longer than the deadline one waits for each rank that may itself be waiting.
const ROUND: Duration = Duration::from_millis(300);
/// Pause between two attempts to reach a rank whose queue of connections is full.
const PAUSE: Duration = Duration::from_millis(20);

/// Strangers heard at once; the oldest makes room.
const MOST_STRANGERS: usize = 64;
/// How long one sleeps while strangers have not said what they are.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// A deadline of more than this is none.
const LONGEST: Duration = Duration::from_secs(365 * 86_400);

const MESSAGE: u8 = 0;
const WATCH: u8 = 1;

/// One rank's meeting place, and those of the others.
#[derive(Debug)]
pub(in crate::nrt) struct Beacon {
    rank: usize,
    listener: TcpListener,
    addresses: Vec<SocketAddr>,
    token: [u8; TOKEN_BYTES],
    strangers: Vec<Stranger>,
    arrived: Vec<Arrival>,
    /// Held open: a closed one says that this rank is gone.
    watches: Vec<TcpStream>,
    /// Attempts that this rank has begun, by list of survivors.
    begun: HashMap<[u8; SIGNATURE_BYTES], u32>,
}

/// Which attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Attempt {
    survivors: [u8; SIGNATURE_BYTES],
    nth: u32,
}

/// A connection that has not said yet what it is. Not blocking.
#[derive(Debug)]
struct Stranger {
    stream: TcpStream,
    hello: [u8; HELLO_BYTES],
    got: usize,
    until: Instant,
}

/// A message that waits to be fetched.
#[derive(Debug)]
struct Arrival {
    /// This rank has said that the sender has another list.
    told: bool,
    rank: usize,
    attempt: Attempt,
    len: usize,
    stream: TcpStream,
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
        let listener = TcpListener::bind(here).map_err(system("opening the rank's meeting place"))?;
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
        let (strangers, arrived, watches, begun) = (Vec::new(), Vec::new(), Vec::new(), HashMap::new());
        Ok(Beacon { rank: comm.rank(), listener, addresses, token, strangers, arrived, watches, begun })
    }

    /// One of a group whose ranks all have this address, a port of the loopback interface, without a communicator.
    pub(super) fn alone(token: [u8; TOKEN_BYTES], ranks: usize) -> std::io::Result<Beacon> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let addresses = vec![listener.local_addr()?; ranks];
        let (strangers, arrived, watches, begun) = (Vec::new(), Vec::new(), Vec::new(), HashMap::new());
        Ok(Beacon { rank: 0, listener, addresses, token, strangers, arrived, watches, begun })
    }

    /// Where it is reached.
    pub(super) fn address(&self) -> SocketAddr {
        self.addresses[self.rank]
    }

    /// Whether a rank's meeting place is gone: its process has ended, or it has freed the communicator.
    pub(in crate::nrt) fn gone(&self, rank: usize) -> bool {
        let dialled = self.addresses.get(rank).map(|a| TcpStream::connect_timeout(a, Duration::from_millis(500)));
        matches!(dialled, Some(Err(e)) if e.kind() == ErrorKind::ConnectionRefused)
    }
}

/// The address of this machine on the way to the root of the group: where peers reach it.
fn own_address(at: &Rendezvous) -> Result<SocketAddr, Error> {
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
    // A link-local address keeps its scope.
    let free_port = |mut a: SocketAddr| {
        a.set_port(0);
        a
    };
    asked.map(free_port).map_err(system("finding this machine's address on the way to the root"))
}

impl Beacon {
    /// Takes in every connection that waits, and sorts in those that have said what they are. Never waits: a stranger that
    /// says nothing costs a place until it is late.
    fn accept_all(&mut self) {
        for _ in 0..MOST_STRANGERS {
            match self.listener.accept() {
                Ok((stream, _)) if stream.set_nonblocking(true).is_ok() => {
                    if self.strangers.len() >= MOST_STRANGERS {
                        self.strangers.remove(0);
                    }
                    let until = Instant::now() + HELLO_WAIT;
                    self.strangers.push(Stranger { stream, hello: [0; HELLO_BYTES], got: 0, until });
                }
                Ok(_) => {}
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                // Out of descriptors, say: tried again, and the deadline names who was not heard.
                Err(e) => {
                    tracing::warn!("rank {} cannot take a connection in: {e} (check ulimit -n)", self.rank);
                    std::thread::sleep(PAUSE);
                    break;
                }
            }
        }
        for mut s in std::mem::take(&mut self.strangers) {
            match s.stream.read(&mut s.hello[s.got..]) {
                Ok(0) => continue,
                Ok(n) => s.got += n,
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(_) => continue,
            }
            if s.got == HELLO_BYTES {
                self.introduce(s);
            } else if Instant::now() < s.until {
                self.strangers.push(s);
            }
        }
    }

    fn introduce(&mut self, s: Stranger) {
        let Stranger { stream, hello: b, .. } = s;
        if b[..TOKEN_BYTES] != self.token || stream.set_nonblocking(false).is_err() {
            return;
        }
        let word = |at: usize| u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]) as usize;
        let (rank, kind, len) = (word(TOKEN_BYTES), b[TOKEN_BYTES + 4], word(TOKEN_BYTES + 5));
        let mut survivors = [0; SIGNATURE_BYTES];
        survivors.copy_from_slice(&b[TOKEN_BYTES + 9..][..SIGNATURE_BYTES]);
        let attempt = Attempt { survivors, nth: word(HELLO_BYTES - 4) as u32 };
        // Room for a few attempts of every rank; who sends more is out of order.
        let most = 8 * self.addresses.len();
        if self.watches.len() >= most {
            self.watches.retain(|s| !closed(s));
        }
        if kind == WATCH && self.watches.len() < most {
            self.watches.push(stream);
        } else if kind == MESSAGE && self.arrived.len() < most && rank < self.addresses.len() && len <= DOWN_BYTES {
            self.arrived.push(Arrival { rank, attempt, len, stream, told: false });
        }
    }
}

/// One attempt of some ranks to agree: positions `0 .. members.len()`.
#[derive(Debug)]
pub(super) struct Meeting<'a> {
    beacon: &'a mut Beacon,
    members: &'a [usize],
    attempt: Attempt,
    until: Instant,
}

impl<'a> Meeting<'a> {
    /// Begins an attempt of `members`, whose digest is `survivors`.
    pub(super) fn begin(
        beacon: &'a mut Beacon,
        members: &'a [usize],
        survivors: &[u8; SIGNATURE_BYTES],
        timeout: Duration,
    ) -> Meeting<'a> {
        // A deadline beyond what the clock can say is as good as none.
        let until = Instant::now() + timeout.min(LONGEST);
        beacon.accept_all();
        beacon.watches.retain(|s| !closed(s));
        // Nobody fetches any more what came for attempts that are over.
        let begun = &mut beacon.begun;
        beacon.arrived.retain(|a| begun.get(&a.attempt.survivors).is_none_or(|n| a.attempt.nth >= *n));
        let count = begun.entry(*survivors).or_default();
        let attempt = Attempt { survivors: *survivors, nth: *count };
        *count = count.wrapping_add(1);
        Meeting { beacon, members, attempt, until }
    }

    fn dial(&self, to: usize, kind: u8, data: &[u8], until: Instant) -> Result<TcpStream, String> {
        let rank = self.members[to];
        let at = self.beacon.addresses[rank];
        let mut bytes = Vec::with_capacity(HELLO_BYTES + data.len());
        bytes.extend_from_slice(&self.beacon.token);
        bytes.extend_from_slice(&(self.beacon.rank as u32).to_le_bytes());
        bytes.push(kind);
        bytes.extend_from_slice(&(data.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&self.attempt.survivors);
        bytes.extend_from_slice(&self.attempt.nth.to_le_bytes());
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
                Err(e) if e.kind() == ErrorKind::ConnectionRefused => return Err(gone(rank)),
                Err(e) if Instant::now() >= until => return Err(format!("rank {rank} at {at} was not reached: {e}")),
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    /// The message of a position, if it has arrived.
    fn take(&mut self, from: usize, bytes: usize, until: Instant) -> Option<Result<Vec<u8>, String>> {
        let (rank, mine) = (self.members[from], self.attempt);
        let (arrived, begun) = (&mut self.beacon.arrived, &self.beacon.begun);
        let Some(i) = arrived.iter().position(|a| a.rank == rank && a.attempt == mine) else {
            // One of an attempt that is over comes from a rank that is late; it will hear how that one ended.
            let over = |a: &Attempt| begun.get(&a.survivors).is_some_and(|n| a.nth < *n);
            let other = arrived.iter_mut().find(|a| a.rank == rank && !a.told && !over(&a.attempt));
            let me = self.beacon.rank;
            // Once: it may come to this list later, and its message may be wanted when this rank comes to its list.
            return other
                .map(|a| a.told = true)
                .map(|()| Err(format!("rank {rank} excludes other ranks than rank {me} does")));
        };
        let mut a = arrived.remove(i);
        if a.len != bytes {
            return Some(Err(format!("rank {rank} sent {} bytes where {bytes} belong", a.len)));
        }
        let mut data = vec![0; bytes];
        let read = read_exactly(&mut a.stream, &mut data, until);
        Some(read.map(|()| data).map_err(|e| format!("rank {rank} left in mid-sentence: {e}")))
    }
}

fn gone(rank: usize) -> String {
    format!("rank {rank} is gone: its process has ended or it has freed the communicator")
}

impl Messages for Meeting<'_> {
    fn members(&self) -> &[usize] {
        self.members
    }

    fn parent_ranks(&self) -> usize {
        self.beacon.addresses.len()
    }

    fn send(&mut self, to: usize, data: &[u8]) -> Result<(), String> {
        // Closed at once: the message stays with its receiver.
        self.dial(to, MESSAGE, data, self.until).map(drop)
    }

    fn recv(&mut self, from: usize, bytes: usize, rounds: u32) -> Result<Vec<u8>, String> {
        let until = self.until + ROUND * rounds;
        self.beacon.accept_all();
        if let Some(got) = self.take(from, bytes, until) {
            return got;
        }
        let watch = self.dial(from, WATCH, &[], until);
        loop {
            // Looked at before the connections are taken in: what it sent before it left is there by then.
            let left = match &watch {
                Err(why) => Some(why.clone()),
                Ok(s) if closed(s) => Some(gone(self.members[from])),
                Ok(_) => None,
            };
            self.beacon.accept_all();
            if let Some(got) = self.take(from, bytes, until) {
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
                // Strangers are looked at now and then; what is written to a watch is of no interest.
                let timeout = if self.beacon.strangers.is_empty() { timeout } else { LOOK };
                let mut fds = [PollFd::new(&self.beacon.listener, PollFlags::IN), PollFd::new(s, PollFlags::RDHUP)];
                // A signal only makes the loop look once more.
                let _ = poll(&mut fds, Some(&timeout));
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn beacon(token: [u8; TOKEN_BYTES]) -> Beacon {
        Beacon::alone(token, 2).unwrap()
    }

    fn hello(token: [u8; TOKEN_BYTES], rank: u32, kind: u8) -> Vec<u8> {
        let mut b = token.to_vec();
        b.extend_from_slice(&rank.to_le_bytes());
        b.push(kind);
        b.extend_from_slice(&0u32.to_le_bytes());
        b.resize(HELLO_BYTES, 0);
        b
    }

    #[test]
    fn mute_strangers_cost_no_time_and_keep_nobody_out() {
        let mut b = beacon([7; TOKEN_BYTES]);
        let at = b.addresses[0];
        let mute: Vec<TcpStream> = (0..MOST_STRANGERS / 2).map(|_| TcpStream::connect(at).unwrap()).collect();
        let mut slow = TcpStream::connect(at).unwrap();
        let words = hello([7; TOKEN_BYTES], 1, MESSAGE);
        slow.write_all(&words[..10]).unwrap();
        let mut wrong = TcpStream::connect(at).unwrap();
        wrong.write_all(&hello([8; TOKEN_BYTES], 1, MESSAGE)).unwrap();
        let begun = Instant::now();
        while b.strangers.len() <= mute.len() {
            b.accept_all();
        }
        slow.write_all(&words[10..]).unwrap();
        while b.arrived.is_empty() {
            b.accept_all();
        }
        assert!(begun.elapsed() < HELLO_WAIT, "one after the other they would take a minute");
        assert_eq!((b.arrived.len(), b.arrived[0].rank), (1, 1), "the wrong token is nobody's");
        // Late ones are let go.
        while !b.strangers.is_empty() {
            b.accept_all();
        }
        drop(mute);
    }

    #[test]
    fn another_list_is_told_once() {
        let mut b = beacon([7; TOKEN_BYTES]);
        let mut other = TcpStream::connect(b.addresses[0]).unwrap();
        let mut words = hello([7; TOKEN_BYTES], 1, MESSAGE);
        words[HELLO_BYTES - ATTEMPT_BYTES] = 9;
        other.write_all(&words).unwrap();
        while b.arrived.is_empty() {
            b.accept_all();
        }
        let until = Instant::now() + Duration::from_secs(1);
        let mut m = Meeting::begin(&mut b, &[0, 1], &[1; SIGNATURE_BYTES], Duration::MAX);
        assert!(m.take(1, 0, until).unwrap().unwrap_err().contains("excludes other ranks"));
        assert!(m.take(1, 0, until).is_none());
    }
}
