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
//! hello 77 bytes: rank u32 | kind u8 (0 message, 1 watch) | length u32 | attempt 20 | number 16 | tag 32, then the message
//! attempt: digest of the list of survivors 16 | how many attempts with that list came before u32
//! tag: HMAC-SHA256, by the group's secret, of: receiver's rank u32 | hello before the tag | message
//! ```
//!
//! Whoever waits dials a *watch* to the one it waits for: a refused or closed watch is a rank that is gone, known at once and
//! not by the deadline.
//!
//! Ranks come to an attempt at different times, and one may be in the next while another is still in this: what arrives for
//! another attempt is kept. A rank sends all its messages of one before it begins the next, so one that is heard of only with
//! another list has another list.
//!
//! The secret is derived from the group's key, on each host, and never sent: strays, other groups and plugins have no tag that
//! fits, and a message that somebody repeats has a number that was taken. A program that was given the port of a rank that died learns one message to that rank, which no other rank takes, and
//! can answer nothing. What it may do is look like a rank that lives and does not come; the deadline names that rank.
//! What a message says is an allegation of a peer all the same; lengths are bounded, every wait has a deadline.
//!
//! The addresses come through the library, and are its allegation: this process listens and dials only where the tenant's policy
//! lets a plugin (`network.listen`, `network.reach`), and never where the host itself listens. A client of a service has both
//! lists from it.
//!
//! A child that was forked from a rank and runs no other program holds the sockets of its parent, and a watch on that rank stays
//! open after its death. Whoever is linked to a rank sees its process end all the same.
//!
//! Threads: the caller's.
//!
//! [`shrink`]: crate::Communicator::shrink

use std::collections::{HashMap, HashSet};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit, Mac};
use hw_bridge::exec::sequencer::Endpoint;
use hw_bridge::os::patience::{Wait, passed};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sha2::Sha256;

use crate::api::communicator::Communicator;
use crate::api::groups::signature::SIGNATURE_BYTES;
use crate::api::groups::verdict::{DOWN_BYTES, Messages, patience};
use crate::error::Error;
use crate::plane::host::bad;
use crate::plane::join::Rendezvous;
use sandbox::imports::own;
use sandbox::imports::sockets::{bind, bound_buffers, decode, encode};
use sandbox::key::KEY_BYTES;
use sandbox::limits::ADDRESS_BYTES;
use sandbox::policy::{Reach, listed};

pub(super) const SECRET_BYTES: usize = KEY_BYTES;
const ATTEMPT_BYTES: usize = SIGNATURE_BYTES + 4;
/// What a rank says before the number that it draws for each message, and where the tag begins.
pub(super) const HEAD_BYTES: usize = 9 + ATTEMPT_BYTES;
const NONCE_BYTES: usize = 16;
const TAG_AT: usize = HEAD_BYTES + NONCE_BYTES;
/// Messages that are known again when somebody repeats them; a group that has had more makes no other attempt.
const MOST_HEARD: usize = 1 << 16;
const HELLO_BYTES: usize = TAG_AT + 32;
/// How long a stranger on the listener may take to say all.
const HELLO_WAIT: Duration = Duration::from_secs(2);
/// How long one attempt to reach a rank may take to connect, and then to say what it has to.
const TRY: Duration = Duration::from_secs(1);
/// Pause between two attempts to reach a rank whose queue of connections is full.
const PAUSE: Duration = Duration::from_millis(20);

/// Strangers heard at once; the oldest makes room.
const MOST_STRANGERS: usize = 64;
/// How long one sleeps between two looks.
const LOOK: Duration = Duration::from_millis(50);
/// A deadline of more than this is none.
const LONGEST: Duration = Duration::from_secs(365 * 86_400);

const MESSAGE: u8 = 0;
const WATCH: u8 = 1;

/// One rank's meeting place, and those of the others.
#[derive(Debug)]
pub(in crate::api) struct Beacon {
    rank: usize,
    listener: TcpListener,
    addresses: Vec<SocketAddr>,
    secret: Secret,
    strangers: Vec<Stranger>,
    arrived: Vec<Arrival>,
    /// Held open: a closed one says that this rank is gone.
    watches: Vec<TcpStream>,
    /// Attempts that this rank has begun, by list of survivors.
    begun: HashMap<[u8; SIGNATURE_BYTES], u32>,
    /// The numbers of the messages that were taken: who repeats what was recorded is not heard.
    heard: HashSet<[u8; NONCE_BYTES]>,
}

/// What the ranks of a group share; never printed.
#[derive(Clone, Copy)]
struct Secret([u8; SECRET_BYTES]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
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
    said: [u8; HELLO_BYTES + DOWN_BYTES],
    got: usize,
    begun: Instant,
}

impl Stranger {
    /// Bytes of its message, once it has said how many.
    fn len(&self) -> usize {
        u32::from_le_bytes([self.said[5], self.said[6], self.said[7], self.said[8]]) as usize
    }

    /// Reads what is there: whether it has said all. `None` for one that is gone or says what cannot be.
    fn hear(&mut self) -> Option<bool> {
        loop {
            let want = HELLO_BYTES + if self.got < HELLO_BYTES { 0 } else { self.len() };
            if self.got == want {
                return Some(true);
            }
            match self.stream.read(self.said.get_mut(self.got..want)?) {
                Ok(0) => return None,
                Ok(n) => self.got += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Some(false),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
    }
}

/// The tag of what a rank says to rank `to`.
fn tag(secret: &[u8; SECRET_BYTES], to: usize, head: &[u8], data: &[u8]) -> Hmac<Sha256> {
    // A key shorter than a block is filled up with zeros.
    let mut key = [0; 64];
    key[..SECRET_BYTES].copy_from_slice(secret);
    let mut mac = Hmac::<Sha256>::new(&key.into());
    mac.update(&(to as u32).to_le_bytes());
    mac.update(head);
    mac.update(data);
    mac
}

/// What a rank says to rank `to`: head, tag, message.
pub(super) fn sealed(secret: &[u8; SECRET_BYTES], to: usize, head: &[u8], data: &[u8]) -> std::io::Result<Vec<u8>> {
    let nonce: [u8; NONCE_BYTES] = hw_bridge::os::random::bytes()?;
    let head = [head, &nonce].concat();
    let tag = tag(secret, to, &head, data).finalize().into_bytes();
    Ok([&head, &tag[..], data].concat())
}

/// A message that waits to be fetched.
#[derive(Debug)]
struct Arrival {
    /// This rank has said that the sender has another list.
    told: bool,
    rank: usize,
    attempt: Attempt,
    data: Vec<u8>,
}

fn system(what: &str) -> impl Fn(std::io::Error) -> Error + '_ {
    move |source| Error::System { what: format!("{what} (check ulimit -n)"), source }
}

/// Has it never wait, and its connections hold no more in the kernel than those of a bootstrap: between shrinks nobody takes
/// them in.
fn ready(listener: TcpListener) -> std::io::Result<TcpListener> {
    listener.set_nonblocking(true)?;
    bound_buffers(&listener)?;
    Ok(listener)
}

impl Beacon {
    /// Opens this rank's and gathers all. Every rank of the group calls it, in its init.
    ///
    /// # Errors
    /// [`Error::System`] if no socket can be had, those of the bootstrap's all-gather, [`Error::Usage`] if the library
    /// answers addresses that cannot be, [`Error::Limit`] if the policy grants one of them not.
    pub(in crate::api) fn open(comm: &Communicator, at: &Rendezvous) -> Result<Beacon, Error> {
        let (tenant, network, rank) = (comm.runtime().tenant(), comm.runtime().host().network(), comm.rank());
        let refused =
            |limit, asked: String, grants: &[Reach]| Error::Limit(tenant.refuse(limit, &asked, listed(grants)));
        let here = own_address(at)?;
        let ports = network.listening(here.ip(), 0);
        if ports.is_empty() {
            let asked = format!("asked for a meeting place of rank {rank} on {}", here.ip());
            return Err(refused("network.listen", asked, &network.listen));
        }
        let listener = bind(here, &ports).and_then(ready).map_err(system("opening the rank's meeting place"))?;
        let mine = listener.local_addr().map_err(system("opening the rank's meeting place"))?;
        let all = comm.bootstrap_all_gather(&encode(&mine))?;
        let checked = |(r, b)| {
            let at = decode(b).map_err(|e| bad(format!("the meeting place of rank {r} cannot be: {e}")))?;
            let asked = || format!("asked to meet rank {r} at {at}, which its plugin gathered");
            if !network.may_reach(at.ip(), at.port()) {
                return Err(refused("network.reach", asked(), &network.reach));
            }
            if own::is_own(at) {
                return Err(refused("network.reach", asked() + ", where the host itself listens", &network.reach));
            }
            Ok(at)
        };
        let addresses = all.chunks(ADDRESS_BYTES).enumerate().map(checked).collect::<Result<Vec<_>, Error>>()?;
        let (strangers, arrived, watches, begun) = (Vec::new(), Vec::new(), Vec::new(), HashMap::new());
        let heard = HashSet::new();
        let secret = Secret(comm.core().key.meetings());
        Ok(Beacon { rank, listener, addresses, secret, strangers, arrived, watches, begun, heard })
    }

    /// One of a group whose ranks all have this address, a port of the loopback interface, without a communicator.
    pub(super) fn alone(secret: [u8; SECRET_BYTES], ranks: usize) -> std::io::Result<Beacon> {
        let listener = TcpListener::bind("127.0.0.1:0").and_then(ready)?;
        let addresses = vec![listener.local_addr()?; ranks];
        let (strangers, arrived, watches, begun) = (Vec::new(), Vec::new(), Vec::new(), HashMap::new());
        let heard = HashSet::new();
        let secret = Secret(secret);
        Ok(Beacon { rank: 0, listener, addresses, secret, strangers, arrived, watches, begun, heard })
    }

    /// Where it is reached.
    pub(super) fn address(&self) -> SocketAddr {
        self.addresses[self.rank]
    }

    /// Whether a rank's meeting place is gone: its process has ended, or it has freed the communicator.
    pub(in crate::api) fn gone(&self, rank: usize) -> bool {
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
                    let begun = Instant::now();
                    self.strangers.push(Stranger { stream, said: [0; HELLO_BYTES + DOWN_BYTES], got: 0, begun });
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
            match s.hear() {
                Some(true) => self.introduce(s),
                Some(false) if !passed(s.begun + HELLO_WAIT, s.begun) => self.strangers.push(s),
                _ => {}
            }
        }
    }

    fn introduce(&mut self, s: Stranger) {
        let Stranger { stream, said: b, got, .. } = s;
        let (head, data) = (&b[..TAG_AT], &b[HELLO_BYTES..got]);
        if tag(&self.secret.0, self.rank, head, data).verify_slice(&b[TAG_AT..HELLO_BYTES]).is_err() {
            return;
        }
        let word = |at: usize| u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]) as usize;
        let (rank, kind) = (word(0), b[4]);
        let mut survivors = [0; SIGNATURE_BYTES];
        survivors.copy_from_slice(&b[9..][..SIGNATURE_BYTES]);
        let attempt = Attempt { survivors, nth: word(HEAD_BYTES - 4) as u32 };
        let mut nonce = [0; NONCE_BYTES];
        nonce.copy_from_slice(&b[HEAD_BYTES..TAG_AT]);
        if self.heard.len() >= MOST_HEARD || !self.heard.insert(nonce) {
            return;
        }
        // Room for a few attempts of every rank; who sends more is out of order.
        let most = 8 * self.addresses.len();
        if self.watches.len() >= most {
            self.watches.retain(|s| !closed(s));
        }
        if kind == WATCH && self.watches.len() < most {
            self.watches.push(stream);
        } else if kind == MESSAGE && self.arrived.len() < most && rank < self.addresses.len() {
            self.arrived.push(Arrival { rank, attempt, data: data.to_vec(), told: false });
        }
    }
}

/// One attempt of some ranks to agree: positions `0 .. members.len()`.
#[derive(Debug)]
pub(super) struct Meeting<'a> {
    beacon: &'a mut Beacon,
    members: &'a [usize],
    attempt: Attempt,
    begun: Instant,
    timeout: Duration,
    endpoint: Option<&'a Endpoint>,
}

impl<'a> Meeting<'a> {
    /// Begins an attempt of `members`, whose digest is `survivors`. `endpoint` knows whose process has ended.
    pub(super) fn begin(
        beacon: &'a mut Beacon,
        members: &'a [usize],
        survivors: &[u8; SIGNATURE_BYTES],
        timeout: Duration,
        endpoint: Option<&'a Endpoint>,
    ) -> Meeting<'a> {
        // A deadline beyond what the clock can say is as good as none.
        let (begun_at, timeout) = (Instant::now(), timeout.min(LONGEST));
        beacon.accept_all();
        beacon.watches.retain(|s| !closed(s));
        // Nobody fetches any more what came for attempts that are over.
        let begun = &mut beacon.begun;
        beacon.arrived.retain(|a| begun.get(&a.attempt.survivors).is_none_or(|n| a.attempt.nth >= *n));
        let count = begun.entry(*survivors).or_default();
        let attempt = Attempt { survivors: *survivors, nth: *count };
        *count = count.wrapping_add(1);
        Meeting { beacon, members, attempt, begun: begun_at, timeout, endpoint }
    }

    /// How many attempts of the same list came before.
    pub(super) fn nth(&self) -> u32 {
        self.attempt.nth
    }

    fn dial(&self, to: usize, kind: u8, data: &[u8], until: Instant) -> Result<TcpStream, String> {
        let rank = self.members[to];
        let at = self.beacon.addresses[rank];
        let mut head = Vec::with_capacity(HEAD_BYTES);
        head.extend_from_slice(&(self.beacon.rank as u32).to_le_bytes());
        head.push(kind);
        head.extend_from_slice(&(data.len() as u32).to_le_bytes());
        head.extend_from_slice(&self.attempt.survivors);
        head.extend_from_slice(&self.attempt.nth.to_le_bytes());
        let mut wait = Wait::until(until).since(self.begun).stepping(TRY);
        loop {
            // Another number each time: what was taken half-way is no repetition.
            let bytes =
                sealed(&self.beacon.secret.0, rank, &head, data).map_err(|e| format!("no random number: {e}"))?;
            // Once at least.
            let mut left = || wait.left().unwrap_or_default().max(PAUSE);
            let tried = TcpStream::connect_timeout(&at, left()).and_then(|mut s| {
                s.set_write_timeout(Some(left()))?;
                s.write_all(&bytes)?;
                Ok(s)
            });
            match tried {
                Ok(s) => return Ok(s),
                Err(e) if e.kind() == ErrorKind::ConnectionRefused => return Err(gone(rank)),
                Err(e) if wait.left().is_none() => return Err(format!("rank {rank} at {at} was not reached: {e}")),
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    /// The message of a position, if it has arrived.
    fn take(&mut self, from: usize, bytes: usize) -> Option<Result<Vec<u8>, String>> {
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
        let data = arrived.remove(i).data;
        if data.len() != bytes {
            return Some(Err(format!("rank {rank} sent {} bytes where {bytes} belong", data.len())));
        }
        Some(Ok(data))
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
        self.dial(to, MESSAGE, data, self.begun + self.timeout).map(drop)
    }

    fn recv(&mut self, from: usize, bytes: usize, rounds: u32) -> Result<Vec<u8>, String> {
        let until = self.begun + patience(self.timeout, rounds);
        self.beacon.accept_all();
        if let Some(got) = self.take(from, bytes) {
            return got;
        }
        let watch = self.dial(from, WATCH, &[], until);
        let mut wait = Wait::until(until).since(self.begun);
        loop {
            // Looked at before the connections are taken in: what it sent before it left is there by then.
            let left = match &watch {
                Err(why) => Some(why.clone()),
                Ok(s) if closed(s) => Some(gone(self.members[from])),
                Ok(_) if self.endpoint.is_some_and(|e| e.peer_died(self.members[from])) => {
                    Some(gone(self.members[from]))
                }
                Ok(_) => None,
            };
            // Before who has connected is looked at: a stop of the process is no time of theirs.
            let more = wait.left();
            self.beacon.accept_all();
            if let Some(got) = self.take(from, bytes) {
                return got;
            }
            if let Some(why) = left {
                return Err(why);
            }
            let Some(left) = more else {
                let rank = self.members[from];
                return Err(format!("rank {rank} lives but did not come in time; it must call the same function"));
            };
            if let Ok(s) = &watch {
                // Strangers and the process are looked at now and then; what is written to a watch is of no interest.
                let left = left.min(LOOK);
                let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
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

#[cfg(test)]
mod tests {
    use super::*;

    use sandbox::limits::SOCKET_BUFFER;

    fn beacon(secret: [u8; SECRET_BYTES]) -> Beacon {
        Beacon::alone(secret, 2).unwrap()
    }

    /// A message of rank 1 to rank `to`, for the attempt whose survivors have the digest `survivors`.
    fn hello(secret: [u8; SECRET_BYTES], to: usize, survivors: u8, data: &[u8]) -> Vec<u8> {
        let mut b = 1u32.to_le_bytes().to_vec();
        b.push(MESSAGE);
        b.extend_from_slice(&(data.len() as u32).to_le_bytes());
        b.extend_from_slice(&[survivors; SIGNATURE_BYTES]);
        b.extend_from_slice(&0u32.to_le_bytes());
        sealed(&secret, to, &b, data).unwrap()
    }

    /// What somebody has recorded on the network and says again takes no place.
    #[test]
    fn a_message_is_taken_once() {
        let secret = [3; SECRET_BYTES];
        let mut b = beacon(secret);
        let (once, other) = (hello(secret, 0, 1, &[9; 17]), hello(secret, 0, 1, &[9; 17]));
        assert_ne!(once, other);
        for _ in 0..3 {
            let mut recorded = TcpStream::connect(b.address()).unwrap();
            recorded.write_all(&once).unwrap();
            // Closed by the other end once it was heard.
            let begun = Instant::now();
            recorded.set_nonblocking(true).unwrap();
            while !closed(&recorded) {
                b.accept_all();
                assert!(begun.elapsed() < Duration::from_secs(60), "it was not heard");
            }
        }
        assert_eq!(b.arrived.len(), 1);
        TcpStream::connect(b.address()).unwrap().write_all(&other).unwrap();
        let begun = Instant::now();
        while b.arrived.len() < 2 {
            b.accept_all();
            assert!(begun.elapsed() < Duration::from_secs(60), "another one of the same words was not taken");
        }
    }

    /// Whoever holds the port of a rank that died hears what is meant for that rank. It does not hear the secret, and what it
    /// heard opens no other rank's door, changed or not.
    #[test]
    fn the_holder_of_a_dead_ranks_port_learns_nothing_that_another_rank_takes() {
        let secret = [0x5A; SECRET_BYTES];
        let mut dialler = beacon(secret);
        let stolen = TcpListener::bind("127.0.0.1:0").unwrap();
        dialler.addresses[1] = stolen.local_addr().unwrap();
        let mut m = Meeting::begin(&mut dialler, &[0, 1], &[1; SIGNATURE_BYTES], Duration::from_secs(20), None);
        m.send(1, &[9; 17]).unwrap();
        let mut heard = Vec::new();
        stolen.accept().unwrap().0.read_to_end(&mut heard).unwrap();
        assert_eq!(heard.len(), HELLO_BYTES + 17);
        assert!(!heard.windows(8).any(|w| w == [0x5A; 8]), "the secret stays at home");

        let mut b = beacon(secret);
        let at = b.addresses[0];
        let say = |words: &[u8]| TcpStream::connect(at).unwrap().write_all(words).unwrap();
        say(&heard);
        let mut changed = hello(secret, 0, 1, &[9; 17]);
        *changed.last_mut().unwrap() ^= 1;
        say(&changed);
        // A length that cannot be.
        let mut long = hello(secret, 0, 1, &[]);
        long[5..9].copy_from_slice(&u32::MAX.to_le_bytes());
        say(&long);
        say(&hello(secret, 0, 1, &[9; 17]));
        while b.arrived.is_empty() {
            b.accept_all();
        }
        b.accept_all();
        assert_eq!((b.arrived.len(), b.arrived[0].data.as_slice()), (1, [9; 17].as_slice()));
    }

    #[test]
    fn mute_strangers_cost_no_time_and_keep_nobody_out() {
        let mut b = beacon([7; SECRET_BYTES]);
        let at = b.addresses[0];
        let mute: Vec<TcpStream> = (0..MOST_STRANGERS / 2).map(|_| TcpStream::connect(at).unwrap()).collect();
        let mut slow = TcpStream::connect(at).unwrap();
        let words = hello([7; SECRET_BYTES], 0, 0, &[]);
        slow.write_all(&words[..10]).unwrap();
        let mut wrong = TcpStream::connect(at).unwrap();
        wrong.write_all(&hello([8; SECRET_BYTES], 0, 0, &[])).unwrap();
        while b.strangers.len() <= mute.len() {
            b.accept_all();
        }
        slow.write_all(&words[10..]).unwrap();
        while b.arrived.is_empty() {
            b.accept_all();
        }
        assert!(b.strangers.len() >= mute.len(), "it was heard while the mute ones were still waited for");
        assert_eq!((b.arrived.len(), b.arrived[0].rank), (1, 1), "another group's secret is nobody's");
        // Late ones are let go.
        while !b.strangers.is_empty() {
            b.accept_all();
        }
        drop(mute);
    }

    /// What waits in the kernel's queue, for as long as the communicator lives, is bounded.
    #[test]
    fn strangers_have_the_buffers_of_a_bootstrap() {
        use rustix::net::sockopt::{socket_recv_buffer_size, socket_send_buffer_size};
        let mut b = beacon([7; SECRET_BYTES]);
        let _stranger = TcpStream::connect(b.address()).unwrap();
        let begun = Instant::now();
        while b.strangers.is_empty() {
            b.accept_all();
            assert!(begun.elapsed() < Duration::from_secs(60), "it was not taken in");
        }
        let of = &b.strangers[0].stream;
        // The kernel's number is twice what was asked for.
        let sizes = [socket_recv_buffer_size(of).unwrap(), socket_send_buffer_size(of).unwrap()];
        assert_eq!(sizes, [2 * SOCKET_BUFFER; 2]);
    }

    #[test]
    fn another_list_is_told_once() {
        let mut b = beacon([7; SECRET_BYTES]);
        let mut other = TcpStream::connect(b.addresses[0]).unwrap();
        other.write_all(&hello([7; SECRET_BYTES], 0, 9, &[])).unwrap();
        while b.arrived.is_empty() {
            b.accept_all();
        }
        let mut m = Meeting::begin(&mut b, &[0, 1], &[1; SIGNATURE_BYTES], Duration::MAX, None);
        assert!(m.take(1, 0).unwrap().unwrap_err().contains("excludes other ranks"));
        assert!(m.take(1, 0).is_none());
    }
}
