//! Links between ranks: how a peer's memory comes to be mapped here.
//!
//! Every process that offers memory runs one [`LinkServer`]: an abstract unix socket (no file, gone with the process)
//! with a random name. [`LinkServer::grant`] answers 64 bytes, the IPC field of the connect record (INV-84): the number of
//! the grant and the socket's name, nothing secret. Works between unrelated processes; they must be of one user.
//!
//! A plugin carries the 64 bytes, and may carry them anywhere. So whoever asks proves that it is the rank that the grant is
//! for, of the very communicator: by a MAC with the group's key for links, which the hosts of a group have and no plugin
//! ([`Edge`]). The owner proves the same of itself with its answer. A proof holds for one owner, one asker, one grant and
//! one socket: who hears one cannot use it elsewhere.
//!
//! A pair can link later, without the others and without a plugin: what a rank hands to all at once is an *invitation*
//! ([`LinkServer::invite`]), a record of no grant, out of which each of the others makes the record of the grant that is for it.
//!
//! ```text
//! record    64   number 16 | zeros 16 | length of the name 1 | name
//! hello     64   magic 4 | number 16 | tenant 8 | asker's rank 4 | HMAC-SHA256(key, "asks" ...) 32
//! answer    56   magic 4 | status 4 | bytes of control 8 | bytes of hbm 8 | HMAC-SHA256(key, "grants" ... the 24 before) 32
//! where ... is   owner's rank 4 | asker's rank 4 | tenant 8 | number 16 | name
//! ```

use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit, Mac};
use rustix::event::Timespec;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix,
};

use sha2::Sha256;

use crate::limits::{LINK_GRACE, LINK_HELLO, LINK_PLACES, MAX_GRANTS, REFUSALS_LOGGED};
use crate::memory::segment::{Segment, SegmentError};
use crate::os::credentials::{self, Credentials, PeerPid};
use crate::os::dial::dial;
use crate::os::lock::lock;
use crate::os::log_rate::LogRate;
use crate::os::patience::{Wait, resumed};
use crate::os::random;

/// Bytes of the IPC field.
pub const IPC_BYTES: usize = 64;
const MAGIC: u32 = 0x6c63_6377;
/// Bytes of what an asker says.
pub const HELLO_BYTES: usize = 4 + NUMBER_BYTES + 8 + 4 + 32;
const ANSWER_HEAD: usize = 4 + 4 + 8 + 8;
const ANSWER_BYTES: usize = ANSWER_HEAD + 32;
const NUMBER_BYTES: usize = 16;

const GRANTED: u32 = 0;
const UNKNOWN: u32 = 1;
const OTHER_TENANT: u32 = 2;
const OTHER_END: u32 = 3;

/// Both ends of a link, and what only the hosts of their group have.
#[derive(Clone, Copy)]
pub struct Edge {
    /// The tenant; of two different ones nothing is linked.
    pub tenant: u64,
    /// The group's key for links.
    pub key: [u8; 32],
    /// Whose memory it is, as a rank of the communicator.
    pub owner: u32,
    /// Who maps it.
    pub asker: u32,
}

/// The key is not printed.
impl std::fmt::Debug for Edge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Edge { tenant, owner, asker, .. } = self;
        f.debug_struct("Edge")
            .field("tenant", tenant)
            .field("owner", owner)
            .field("asker", asker)
            .finish_non_exhaustive()
    }
}

impl Edge {
    /// The proof of one end, `what` it does, about the grant `number` of the server `name`.
    fn proof(&self, what: &[u8], number: &[u8; NUMBER_BYTES], name: &[u8]) -> Hmac<Sha256> {
        // A key shorter than a block is filled up with zeros.
        let mut key = [0; 64];
        key[..32].copy_from_slice(&self.key);
        let mut mac = Hmac::<Sha256>::new(&key.into());
        mac.update(what);
        mac.update(&self.owner.to_le_bytes());
        mac.update(&self.asker.to_le_bytes());
        mac.update(&self.tenant.to_le_bytes());
        mac.update(number);
        mac.update(name);
        mac
    }

    /// The record of the grant that is for the asker, out of the owner's invitation.
    ///
    /// # Errors
    /// [`LinkError::Malformed`] for an invitation that names no link server.
    pub fn invited(&self, invitation: &[u8]) -> Result<[u8; IPC_BYTES], LinkError> {
        let (number, name) = read_record(invitation)?;
        let drawn = self.proof(b"invites", &number, name).finalize().into_bytes();
        let mut number = [0; NUMBER_BYTES];
        number.copy_from_slice(&drawn[..NUMBER_BYTES]);
        Ok(record(&number, name))
    }

    /// What the asker says to the owner, whose record is `ipc`.
    ///
    /// # Errors
    /// [`LinkError::Malformed`] for a record that names no link server.
    pub fn hello(&self, ipc: &[u8]) -> Result<[u8; HELLO_BYTES], LinkError> {
        let (number, name) = read_record(ipc)?;
        let mut hello = [0; HELLO_BYTES];
        hello[..4].copy_from_slice(&MAGIC.to_le_bytes());
        hello[4..20].copy_from_slice(&number);
        hello[20..28].copy_from_slice(&self.tenant.to_le_bytes());
        hello[28..32].copy_from_slice(&self.asker.to_le_bytes());
        hello[32..].copy_from_slice(&self.proof(b"asks", &number, name).finalize().into_bytes());
        Ok(hello)
    }
}

/// What a grant hands out.
#[derive(Debug, Clone)]
pub struct LinkGrant {
    /// To whom: to nobody else.
    pub edge: Edge,
    /// The communicator's control segment.
    pub control: Arc<Segment>,
    /// The core's device memory.
    pub hbm: Arc<Segment>,
    /// The process whose memory it is, where that is a client of this one.
    pub client: Option<Arc<OwnedFd>>,
}

/// A peer's memory as it was granted, not mapped yet: a service passes it on to its client.
#[derive(Debug)]
pub struct Granted {
    /// The peer's rank.
    pub rank: u32,
    /// Its control segment, and the bytes it says that has.
    pub control: (OwnedFd, u64),
    /// Its device memory, and the bytes it says that has.
    pub hbm: (OwnedFd, u64),
    /// Its process.
    pub pidfd: OwnedFd,
    /// Its number, if the kernel has said it already.
    pub pid: Option<PeerPid>,
}

impl Granted {
    /// Maps it.
    ///
    /// # Errors
    /// [`LinkError::Gone`] if the process has ended, [`LinkError::Malformed`] and [`LinkError::Segment`] for descriptors that
    /// are not what they were said to be.
    pub fn map(self) -> Result<Mapped, LinkError> {
        let pid = self.pid.map_or_else(|| credentials::pid_of(&self.pidfd), Ok).map_err(|e| match e.kind() {
            std::io::ErrorKind::InvalidData => {
                LinkError::Malformed("what should stand for the peer's process does not")
            }
            _ => LinkError::Gone(e),
        })?;
        let own = pid.here() == Some(std::process::id());
        Ok(Mapped {
            rank: self.rank,
            pid,
            control: Segment::from_peer(self.control.0, self.control.1)?,
            hbm: Segment::from_peer(self.hbm.0, self.hbm.1)?,
            pidfd: (!own).then_some(self.pidfd),
        })
    }
}

/// A peer's memory, mapped here.
#[derive(Debug)]
pub struct Mapped {
    /// The peer's rank.
    pub rank: u32,
    /// Its process, as the kernel says.
    pub pid: PeerPid,
    /// Its control segment.
    pub control: Segment,
    /// Its device memory.
    pub hbm: Segment,
    /// Readable once the process has ended; absent for a rank of this very process.
    pub pidfd: Option<OwnedFd>,
}

/// Why a link could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// A system call failed.
    #[error("{step} failed: {source}{}", crate::os::exhausted::limit_of_threads(source))]
    System {
        /// What was tried.
        step: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// The 64 bytes make no sense.
    #[error("the connect record of the peer is malformed: {0}; it was made by another transport or damaged on the way")]
    Malformed(&'static str),
    /// The owner said no.
    #[error("the peer refused the link: {0}")]
    Refused(String),
    /// The owner is gone or does not answer.
    #[error(
        "the peer that owns the memory does not answer: {0}; its process has ended or runs in another network namespace"
    )]
    Gone(std::io::Error),
    /// The user gave up meanwhile.
    #[error("the link was not waited for: the communicator was aborted")]
    Stopped,
    /// The owner's end would go unnoticed.
    #[error(
        "the peer runs in another PID namespace, where this kernel (before Linux 6.5) cannot watch it; start the ranks of one \
         server in one PID namespace"
    )]
    Unwatched,
    /// Too many grants.
    #[error("{MAX_GRANTS} links are open in this process; free communicators first")]
    TooMany,
    /// What was received cannot be mapped.
    #[error(transparent)]
    Segment(#[from] SegmentError),
}

fn sys(step: &'static str) -> impl FnOnce(std::io::Error) -> LinkError {
    move |source| LinkError::System { step, source }
}

type Grants = Arc<Mutex<HashMap<[u8; NUMBER_BYTES], LinkGrant>>>;

/// The process's giver of memory. Dropping it ends its thread and every grant; mappings that peers hold stay valid.
#[derive(Debug)]
pub struct LinkServer {
    name: Vec<u8>,
    grants: Grants,
    stop: OwnedFd,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl LinkServer {
    /// Binds a random abstract name and starts the serving thread, which sleeps while nobody asks.
    pub fn start() -> Result<LinkServer, LinkError> {
        LinkServer::hearing(LINK_HELLO, credentials::same_user)
    }

    /// The same; a peer whom `heard` names has `patience` to say what it wants.
    fn hearing(patience: Duration, heard: Heard) -> Result<LinkServer, LinkError> {
        crate::os::fork::mark_process();
        let drawn: [u8; 12] = random::bytes().map_err(sys("reading random bytes for a link name"))?;
        let name: Vec<u8> = b"wccl-".iter().copied().chain(drawn.iter().flat_map(|b| hex(*b))).collect();
        let addr = SocketAddr::from_abstract_name(&name).map_err(sys("naming the link socket"))?;
        let listener = UnixListener::bind_addr(&addr).map_err(sys("binding the link socket"))?;
        // A visitor that leaves between the wait and the accept must not block the thread.
        listener.set_nonblocking(true).map_err(sys("setting up the link socket"))?;
        let stop = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)
            .map_err(|e| LinkError::System { step: "making the link server's stop event", source: e.into() })?;
        let grants = Grants::default();
        let (for_thread, stop_copy) = (grants.clone(), stop.try_clone().map_err(sys("copying the stop event"))?);
        let own = name.clone();
        let thread = std::thread::Builder::new()
            .name("wccl-links".into())
            .spawn(move || serve(&listener, &stop_copy, &own, &for_thread, (patience, heard)))
            .map_err(sys("starting the link server's thread"))?;
        Ok(LinkServer { name, grants, stop, thread: Some(thread) })
    }

    /// Makes `grant` available to its asker, who needs the returned 64 bytes for it.
    pub fn grant(&self, grant: LinkGrant) -> Result<[u8; IPC_BYTES], LinkError> {
        let ipc = self.draw()?;
        self.open(ipc, grant)?;
        Ok(ipc)
    }

    /// An invitation: 64 bytes for all, out of which each asker makes the record of its grant ([`Edge::invited`]), which
    /// [`LinkServer::grant_invited`] makes.
    pub fn invite(&self) -> Result<[u8; IPC_BYTES], LinkError> {
        self.draw()
    }

    /// As [`LinkServer::grant`], for an asker who has the invitation.
    pub fn grant_invited(&self, invitation: &[u8; IPC_BYTES], grant: LinkGrant) -> Result<[u8; IPC_BYTES], LinkError> {
        let ipc = grant.edge.invited(invitation)?;
        self.open(ipc, grant)?;
        Ok(ipc)
    }

    /// A record with a number that nobody had.
    fn draw(&self) -> Result<[u8; IPC_BYTES], LinkError> {
        let number: [u8; NUMBER_BYTES] =
            random::bytes().map_err(sys("reading random bytes for the number of a link"))?;
        Ok(record(&number, &self.name))
    }

    fn open(&self, ipc: [u8; IPC_BYTES], grant: LinkGrant) -> Result<(), LinkError> {
        let mut number = [0u8; NUMBER_BYTES];
        number.copy_from_slice(&ipc[..NUMBER_BYTES]);
        let mut grants = lock(&self.grants);
        if grants.len() >= MAX_GRANTS {
            return Err(LinkError::TooMany);
        }
        grants.insert(number, grant);
        Ok(())
    }

    /// Ends a grant; whoever already mapped the memory keeps it.
    pub fn revoke(&self, ipc: &[u8; IPC_BYTES]) {
        let mut number = [0u8; NUMBER_BYTES];
        number.copy_from_slice(&ipc[..NUMBER_BYTES]);
        lock(&self.grants).remove(&number);
    }
}

impl Drop for LinkServer {
    fn drop(&mut self) {
        if crate::os::fork::in_child() {
            // The server and its event are the parent's.
            std::mem::forget(self.thread.take());
            return;
        }
        // The event is ours and counts to 2^64: a write of 1 cannot fail in a way that matters.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn hex(b: u8) -> [u8; 2] {
    let digit = |n: u8| if n < 10 { b'0' + n } else { b'a' + n - 10 };
    [digit(b >> 4), digit(b & 15)]
}

/// Whether one is spoken with. [`credentials::same_user`], but in tests of users who are one.
type Heard = fn(&Credentials) -> bool;

/// One who has connected and not said all yet. Its stream does not block.
struct Visitor {
    stream: UnixStream,
    hello: [u8; HELLO_BYTES],
    got: usize,
    since: Instant,
}

impl Visitor {
    /// Who may speak.
    fn admit(stream: UnixStream, heard: Heard) -> Result<Visitor, LinkError> {
        let cred = credentials::of_peer(&stream).map_err(sys("asking who the peer is"))?;
        if !heard(&cred) {
            return Err(LinkError::Refused("it is another user's process".into()));
        }
        stream.set_nonblocking(true).map_err(sys("setting up a link"))?;
        Ok(Visitor { stream, hello: [0; HELLO_BYTES], got: 0, since: Instant::now() })
    }

    /// Reads what is there: whether it has said all.
    fn hear(&mut self) -> Result<bool, LinkError> {
        while self.got < HELLO_BYTES {
            match self.stream.read(&mut self.hello[self.got..]) {
                Ok(0) => return Err(LinkError::Refused("it closed before it said what it wants".into())),
                Ok(n) => self.got += n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(sys("reading a link's hello")(e)),
            }
        }
        Ok(true)
    }
}

/// Hears all who come side by side, so that one who says nothing costs the others nothing. In a full house the oldest makes
/// room, once it has had the time that a hello takes which is on its way; those that find no place wait in the kernel's queue.
fn serve(listener: &UnixListener, stop: &OwnedFd, name: &[u8], grants: &Grants, (hello, heard): (Duration, Heard)) {
    use rustix::event::{PollFd, PollFlags, poll};
    let refused = LogRate::default();
    let more = |n| tracing::warn!("{n} more links were not made");
    let told = |e: LinkError| {
        if refused.admits(REFUSALS_LOGGED, more) {
            tracing::warn!("a link was not made: {e}");
        }
    };
    // The oldest first.
    let mut visitors: Vec<Visitor> = Vec::new();
    loop {
        let no_room = crowded(&visitors);
        let patience = if no_room { LINK_GRACE } else { hello };
        let left = visitors.first().map(|v| {
            let left = (v.since + patience).saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
        });
        let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
        fds.extend(visitors.iter().map(|v| PollFd::new(&v.stream, PollFlags::IN)));
        fds.extend((!no_room).then(|| PollFd::new(listener, PollFlags::IN)));
        match poll(&mut fds, left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => {
                tracing::error!("the link server stops: waiting for peers failed: {e}");
                return;
            }
        }
        if !fds[0].revents().is_empty() {
            return;
        }
        drop(fds);
        let now = Instant::now();
        for mut v in std::mem::take(&mut visitors) {
            match v.hear() {
                Ok(true) => answer(v.stream, &v.hello, name, grants).unwrap_or_else(told),
                Ok(false) if now.saturating_duration_since(v.since) < hello => visitors.push(v),
                Ok(false) => told(LinkError::Refused("it did not say in time what it wants".into())),
                Err(e) => told(e),
            }
        }
        if crowded(&visitors) {
            continue;
        }
        match listener.accept() {
            Ok((stream, _)) => match Visitor::admit(stream, heard) {
                Ok(v) => {
                    if visitors.len() >= LINK_PLACES {
                        visitors.remove(0);
                        told(LinkError::Refused("it had not said what it wants when others came".into()));
                    }
                    visitors.push(v);
                }
                Err(e) => told(e),
            },
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            // Out of descriptors and the like: whoever asked times out with its own message.
            Err(e) => {
                tracing::warn!("accepting a link failed: {e}");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// Whether there is no place for one more, yet.
fn crowded(visitors: &[Visitor]) -> bool {
    visitors.len() >= LINK_PLACES && visitors[0].since.elapsed() < LINK_GRACE
}

/// Answers one that has said all. The socket's buffer is empty and takes the answer.
fn answer(mut stream: UnixStream, hello: &[u8; HELLO_BYTES], name: &[u8], grants: &Grants) -> Result<(), LinkError> {
    let mut number = [0u8; NUMBER_BYTES];
    number.copy_from_slice(&hello[4..20]);
    let word = |at: usize| u32::from_le_bytes([hello[at], hello[at + 1], hello[at + 2], hello[at + 3]]);
    let tenant = u64::from(word(20)) | u64::from(word(24)) << 32;
    let found = (word(0) == MAGIC).then(|| lock(grants).get(&number).cloned()).flatten();
    let Some(LinkGrant { edge, control, hbm, client }) = found else {
        return refuse(&mut stream, UNKNOWN, "it names no grant of this process".into());
    };
    if edge.tenant != tenant {
        return refuse(&mut stream, OTHER_TENANT, "it belongs to another tenant".into());
    }
    if edge.asker != word(28) || edge.proof(b"asks", &number, name).verify_slice(&hello[32..]).is_err() {
        let why = format!(
            "rank {} asked for the memory that rank {} grants to rank {}, and has not the key of its communicator",
            word(28),
            edge.owner,
            edge.asker
        );
        return refuse(&mut stream, OTHER_END, why);
    }
    let (Some(a), Some(b)) = (control.fd(), hbm.fd()) else {
        return Err(LinkError::Refused("its grant holds memory of another process".into()));
    };
    let mut out = head(GRANTED, control.len() as u64, hbm.len() as u64).to_vec();
    let mut proof = edge.proof(b"grants", &number, name);
    proof.update(&out);
    out.extend_from_slice(&proof.finalize().into_bytes());
    let fds: Vec<BorrowedFd<'_>> = [a, b].into_iter().chain(client.as_ref().map(|c| c.as_fd())).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    rustix::net::sendmsg(&stream, &[IoSlice::new(&out)], &mut control, SendFlags::NOSIGNAL)
        .map_err(|e| LinkError::System { step: "passing memory to a peer", source: e.into() })?;
    Ok(())
}

/// The begin of an answer.
fn head(status: u32, control: u64, hbm: u64) -> [u8; ANSWER_HEAD] {
    let mut head = [0; ANSWER_HEAD];
    head[..4].copy_from_slice(&MAGIC.to_le_bytes());
    head[4..8].copy_from_slice(&status.to_le_bytes());
    head[8..16].copy_from_slice(&control.to_le_bytes());
    head[16..].copy_from_slice(&hbm.to_le_bytes());
    head
}

/// Says no; the rest of the answer is zeros. `why` is for the owner's log.
fn refuse(stream: &mut UnixStream, status: u32, why: String) -> Result<(), LinkError> {
    let mut out = [0; ANSWER_BYTES];
    out[..ANSWER_HEAD].copy_from_slice(&head(status, 0, 0));
    stream.write_all(&out).map_err(sys("refusing a link"))?;
    Err(LinkError::Refused(why))
}

/// Lets the next read or write of `stream` last until `deadline` at most, which was set at `since`.
fn bound(stream: &UnixStream, deadline: Instant, since: Instant) -> Result<(), LinkError> {
    let deadline = resumed(deadline, since);
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(LinkError::Gone(std::io::ErrorKind::TimedOut.into()));
    }
    stream.set_read_timeout(Some(left)).map_err(sys("setting a link's time-out"))?;
    stream.set_write_timeout(Some(left)).map_err(sys("setting a link's time-out"))
}

/// Waits until `stream` can be read, at most until `deadline`, which was set at `since`, or until `stop` is readable.
fn readable(
    stream: &UnixStream,
    stop: Option<BorrowedFd<'_>>,
    deadline: Instant,
    since: Instant,
) -> Result<(), LinkError> {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut wait = Wait::until(deadline).since(since);
    loop {
        let left = wait.left().unwrap_or_default();
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        let mut fds: Vec<PollFd<'_>> = vec![PollFd::new(stream, PollFlags::IN)];
        fds.extend(stop.map(|s| PollFd::from_borrowed_fd(s, PollFlags::IN)));
        match poll(&mut fds, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(sys("waiting for a link's answer")(e.into())),
            Ok(_) if fds.get(1).is_some_and(|s| !s.revents().is_empty()) => return Err(LinkError::Stopped),
            Ok(_) if !fds[0].revents().is_empty() => return Ok(()),
            Ok(_) if left.is_zero() => return Err(LinkError::Gone(std::io::ErrorKind::TimedOut.into())),
            Ok(_) => {}
        }
    }
}

/// A record of number and name; a name fits, as it was made or read.
fn record(number: &[u8; NUMBER_BYTES], name: &[u8]) -> [u8; IPC_BYTES] {
    let mut ipc = [0u8; IPC_BYTES];
    ipc[..NUMBER_BYTES].copy_from_slice(number);
    ipc[32] = name.len() as u8;
    ipc[33..33 + name.len()].copy_from_slice(name);
    ipc
}

/// Number and name in a record. These bytes came from a guest: they must not open a connection to something else than a link
/// server.
fn read_record(ipc: &[u8]) -> Result<([u8; NUMBER_BYTES], &[u8]), LinkError> {
    if ipc.len() != IPC_BYTES {
        return Err(LinkError::Malformed("it is not 64 bytes"));
    }
    let mut number = [0; NUMBER_BYTES];
    number.copy_from_slice(&ipc[..NUMBER_BYTES]);
    let name = ipc.get(33..33 + usize::from(ipc[32])).unwrap_or_default();
    let plain = |h: &[u8]| h.len() == 24 && h.iter().all(u8::is_ascii_hexdigit);
    match name.strip_prefix(b"wccl-") {
        Some(h) if plain(h) => Ok((number, name)),
        _ => Err(LinkError::Malformed("it names no link server")),
    }
}

/// Asks the owner of the record `ipc` for its memory, as the asker of `edge`, and maps it. Ends at `deadline`, or when `stop`
/// becomes readable.
///
/// # Errors
/// [`LinkError`]; [`LinkError::Refused`] if the record is of another communicator, or of other ranks;
/// [`LinkError::Gone`] if the owner's process has ended or does not answer.
pub fn connect(ipc: &[u8], edge: &Edge, stop: Option<BorrowedFd<'_>>, deadline: Instant) -> Result<Mapped, LinkError> {
    request(ipc, edge, stop, deadline)?.map()
}

/// As [`connect`], without mapping anything.
///
/// # Errors
/// As [`connect`].
pub fn request(ipc: &[u8], edge: &Edge, stop: Option<BorrowedFd<'_>>, deadline: Instant) -> Result<Granted, LinkError> {
    request_of(ipc, edge, stop, deadline, credentials::same_user)
}

fn request_of(
    ipc: &[u8],
    edge: &Edge,
    stop: Option<BorrowedFd<'_>>,
    deadline: Instant,
    heard: Heard,
) -> Result<Granted, LinkError> {
    let begun = Instant::now();
    let hello = edge.hello(ipc)?;
    let (number, name) = read_record(ipc)?;
    let to = SocketAddrUnix::new_abstract_name(name).map_err(|_| LinkError::Malformed("it names no socket"))?;
    let mut stream = dial(&to, stop, deadline).map_err(|e| match e {
        Errno::CANCELED => LinkError::Stopped,
        Errno::AGAIN => LinkError::Gone(std::io::ErrorKind::TimedOut.into()),
        e => LinkError::Gone(e.into()),
    })?;
    let cred = credentials::of_peer(&stream).map_err(sys("asking who the peer is"))?;
    if !heard(&cred) {
        return Err(LinkError::Refused("the owner is another user's process".into()));
    }
    // Before it answers, after which it hangs up: until then the connection tells that it lives.
    let watched = watch(&stream, cred.pid);
    bound(&stream, deadline, begun)?;
    stream.write_all(&hello).map_err(LinkError::Gone)?;

    let mut out = [0u8; ANSWER_BYTES];
    let mut fds: Vec<OwnedFd> = Vec::with_capacity(3);
    let mut got = 0;
    while got < out.len() {
        readable(&stream, stop, deadline, begun)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let r = rustix::net::recvmsg(
            stream.as_fd(),
            &mut [IoSliceMut::new(&mut out[got..])],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        );
        let n = match r {
            Ok(m) => m.bytes,
            Err(rustix::io::Errno::INTR) => continue,
            Err(rustix::io::Errno::AGAIN) => return Err(LinkError::Gone(std::io::ErrorKind::TimedOut.into())),
            Err(e) => return Err(LinkError::Gone(e.into())),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if n == 0 {
            return Err(LinkError::Gone(std::io::ErrorKind::UnexpectedEof.into()));
        }
        got += n;
    }
    let word = |at: usize| u32::from_le_bytes([out[at], out[at + 1], out[at + 2], out[at + 3]]);
    let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
    if word(0) != MAGIC {
        return Err(LinkError::Malformed("the owner answered with a foreign magic"));
    }
    let refused = match word(4) {
        GRANTED => None,
        OTHER_TENANT => Some("the memory belongs to another tenant".to_string()),
        OTHER_END => Some(format!(
            "it grants the memory to another rank, or in another communicator, than rank {} that asked rank {} for it; the plugin \
             has mixed up the connect records of two groups",
            edge.asker, edge.owner
        )),
        _ => Some("the record is not or no longer valid; the peer has freed its communicator".to_string()),
    };
    if let Some(why) = refused {
        return Err(LinkError::Refused(why));
    }
    let mut proof = edge.proof(b"grants", &number, name);
    proof.update(&out[..ANSWER_HEAD]);
    if proof.verify_slice(&out[ANSWER_HEAD..]).is_err() {
        return Err(LinkError::Malformed("its owner is no host of this communicator"));
    }
    let mut fds = fds.into_iter();
    let (Some(control), Some(hbm)) = (fds.next(), fds.next()) else {
        return Err(LinkError::Malformed("the owner passed no memory (check ulimit -n on both sides)"));
    };
    // Memory of a client of the owner comes with the client's process.
    let (pidfd, pid) = match fds.next() {
        Some(clients) => (clients, None),
        None => (watched?, Some(cred.pid)),
    };
    Ok(Granted { rank: edge.owner, control: (control, long(8)), hbm: (hbm, long(16)), pidfd, pid })
}

/// What becomes readable when the process behind `stream` ends. The socket itself gives it, in whatever PID namespace that
/// lives; a kernel before 6.5 knows only pids.
fn watch(stream: &UnixStream, pid: PeerPid) -> Result<OwnedFd, LinkError> {
    credentials::process_of_peer(stream, pid).map_err(|e| match Errno::from_io_error(&e) {
        Some(Errno::OPNOTSUPP) => LinkError::Unwatched,
        Some(Errno::SRCH | Errno::NODATA) => LinkError::Gone(e),
        // What kernels before 6.15 say of a process that has ended and was waited for.
        Some(Errno::INVAL) => LinkError::Gone(Errno::SRCH.into()),
        _ => sys("watching the peer's process")(e),
    })
}

#[cfg(test)]
#[expect(unsafe_code, reason = "looks at bytes of both mappings")]
mod tests {
    use super::*;

    /// From rank 3 to rank 1.
    fn edge(tenant: u64) -> Edge {
        Edge { tenant, key: [9; 32], owner: 3, asker: 1 }
    }

    fn grant(tenant: u64) -> LinkGrant {
        LinkGrant {
            edge: edge(tenant),
            control: Arc::new(Segment::create("c", 4096).unwrap()),
            hbm: Arc::new(Segment::create("h", 8192).unwrap()),
            client: None,
        }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    #[test]
    fn a_grant_is_mapped_by_its_number_and_only_by_it() {
        let server = LinkServer::start().unwrap();
        let g = grant(7);
        let ipc = server.grant(g.clone()).unwrap();
        let m = connect(&ipc, &edge(7), None, soon()).unwrap();
        assert_eq!((m.rank, m.control.len(), m.hbm.len()), (3, 4096, 8192));
        // SAFETY: both mappings are 8192 bytes; this thread alone uses them.
        unsafe {
            g.hbm.base().add(100).write(42);
            assert_eq!(m.hbm.base().add(100).read(), 42);
        }
        let mut wrong = ipc;
        wrong[0] ^= 1;
        assert!(
            connect(&wrong, &edge(7), None, soon())
                .unwrap_err()
                .to_string()
                .contains("record is not or no longer valid")
        );
        assert!(connect(&ipc, &edge(8), None, soon()).unwrap_err().to_string().contains("another tenant"));
        server.revoke(&ipc);
        assert!(connect(&ipc, &edge(7), None, soon()).is_err());
        assert_eq!(lock(&server.grants).len(), 0);
        drop(server);
        assert!(matches!(connect(&ipc, &edge(7), None, soon()), Err(LinkError::Gone(_))));
    }

    /// Nobody else gets what is granted to one rank of one communicator, whatever record it shows.
    #[test]
    fn a_grant_is_for_one_rank_of_one_communicator() {
        let server = LinkServer::start().unwrap();
        let ipc = server.grant(grant(7)).unwrap();
        let right = edge(7);
        let wrong = [
            Edge { key: [8; 32], ..right },
            Edge { owner: 2, ..right },
            Edge { asker: 0, ..right },
            Edge { owner: 1, asker: 3, ..right },
        ];
        for e in wrong {
            let said = connect(&ipc, &e, None, soon()).unwrap_err().to_string();
            let ends = format!("than rank {} that asked rank {} for it", e.asker, e.owner);
            assert!(said.contains("in another communicator") && said.contains(&ends), "{said}");
        }
        // A proof for another server's grant of that number is none here.
        let other = LinkServer::start().unwrap();
        let theirs = other.grant(grant(7)).unwrap();
        let mut moved = ipc;
        moved[32..].copy_from_slice(&theirs[32..]);
        let heard = right.hello(&moved).unwrap();
        let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(&server.name).unwrap()).unwrap();
        stream.write_all(&heard).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        assert_eq!((answer.len(), answer[4]), (ANSWER_BYTES, OTHER_END as u8));
        assert!(connect(&ipc, &right, None, soon()).is_ok());
    }

    /// An owner without the key cannot put its own memory in the place of a rank's.
    /// All see the invitation; each makes its own record out of it, and none without the key.
    #[test]
    fn who_is_invited_links_without_the_others() {
        let server = LinkServer::start().unwrap();
        let invitation = server.invite().unwrap();
        let other = LinkGrant { edge: Edge { asker: 2, ..edge(7) }, ..grant(7) };
        let ipc = server.grant_invited(&invitation, grant(7)).unwrap();
        server.grant_invited(&invitation, other.clone()).unwrap();
        for e in [edge(7), other.edge] {
            let m = connect(&e.invited(&invitation).unwrap(), &e, None, soon()).unwrap();
            assert_eq!((m.rank, m.control.len()), (3, 4096));
        }
        assert!(connect(&invitation, &edge(7), None, soon()).is_err(), "it is no record");
        let stranger = Edge { key: [8; 32], ..edge(7) };
        assert!(connect(&stranger.invited(&invitation).unwrap(), &stranger, None, soon()).is_err());
        assert!(connect(&ipc, &stranger, None, soon()).is_err());
        server.revoke(&ipc);
        assert!(connect(&ipc, &edge(7), None, soon()).is_err());
        assert!(matches!(edge(7).invited(&[0; IPC_BYTES]), Err(LinkError::Malformed(_))));
    }

    #[test]
    fn an_owner_that_is_no_host_of_the_communicator_is_not_believed() {
        let name = format!("wccl-{:024x}", std::process::id());
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        let mut ipc = [0u8; IPC_BYTES];
        ipc[32] = name.len() as u8;
        ipc[33..33 + name.len()].copy_from_slice(name.as_bytes());
        std::thread::scope(|s| {
            let asks = s.spawn(|| connect(&ipc, &edge(7), None, soon()));
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; HELLO_BYTES]).unwrap();
            let mut out = head(GRANTED, 4096, 8192).to_vec();
            let strangers = Edge { key: [8; 32], ..edge(7) };
            let mut proof = strangers.proof(b"grants", &[0; NUMBER_BYTES], name.as_bytes());
            proof.update(&out);
            out.extend_from_slice(&proof.finalize().into_bytes());
            stream.write_all(&out).unwrap();
            let e = asks.join().unwrap().unwrap_err();
            assert!(matches!(e, LinkError::Malformed("its owner is no host of this communicator")), "{e}");
        });
    }

    #[test]
    fn no_key_of_a_link_is_printed() {
        let said = format!("{:?}", grant(7));
        assert!(said.contains("owner: 3, asker: 1, ..") && !said.contains("9, 9"), "{said}");
    }

    #[test]
    fn a_link_to_an_owner_that_does_not_answer_is_ended_by_its_stop() {
        // A listener that accepts nobody.
        let name = b"wccl-00112233445566778899aabb";
        let addr = SocketAddr::from_abstract_name(name).unwrap();
        let _mute = UnixListener::bind_addr(&addr).unwrap();
        let mut ipc = [0u8; IPC_BYTES];
        ipc[32] = name.len() as u8;
        ipc[33..33 + name.len()].copy_from_slice(name);
        let stop = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&stop, &1u64.to_ne_bytes()).unwrap();
        let late = Instant::now() + Duration::from_secs(600);
        assert!(matches!(connect(&ipc, &edge(0), Some(stop.as_fd()), late), Err(LinkError::Stopped)));
    }

    /// From its begin to its end: the owner takes the connection in when the deadline has passed by the machine's clock.
    #[test]
    fn a_request_has_the_time_that_was_stopped_in_it() {
        use crate::os::patience::was_away;
        let name = format!("wccl-{:024x}", u64::from(std::process::id()) | 1 << 40);
        let fd = rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, None).unwrap();
        rustix::net::bind(&fd, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
        rustix::net::listen(&fd, 0).unwrap();
        let listener = UnixListener::from(fd);
        let to = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        // There is no room for it.
        let full: Vec<_> = std::iter::from_fn(|| dial(&to, None, Instant::now()).ok()).take(100).collect();
        let mut ipc = [0u8; IPC_BYTES];
        ipc[32] = name.len() as u8;
        ipc[33..33 + name.len()].copy_from_slice(name.as_bytes());
        let until = Instant::now() + Duration::from_secs(8);
        std::thread::scope(|s| {
            let asks = s.spawn(|| request(&ipc, &edge(7), None, until));
            std::thread::sleep(Duration::from_secs(5));
            let now = Instant::now();
            assert!(was_away(now - Duration::from_secs(5), now, Duration::ZERO));
            std::thread::sleep(until.saturating_duration_since(Instant::now()) + Duration::from_millis(300));
            let taken: Vec<_> = (0..=full.len()).map(|_| listener.accept().unwrap().0).collect();
            let mut hello = [0; HELLO_BYTES];
            (&taken[full.len()]).read_exact(&mut hello).unwrap();
            assert_eq!(&hello[..4], &MAGIC.to_le_bytes());
            drop(taken);
            assert!(matches!(asks.join().unwrap(), Err(LinkError::Gone(_))));
        });
    }

    #[test]
    fn the_process_of_a_grant_is_its_clients() {
        let server = LinkServer::start().unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        let ipc = server.grant(LinkGrant { client: Some(Arc::new(pidfd)), ..grant(7) }).unwrap();
        let m = connect(&ipc, &edge(7), None, soon()).unwrap();
        assert_eq!((m.pid.here(), m.pidfd.is_some()), (Some(child.id()), true));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(matches!(connect(&ipc, &edge(7), None, soon()), Err(LinkError::Gone(_))));
        let no_process = Some(Arc::new(OwnedFd::from(std::fs::File::open("/dev/null").unwrap())));
        let ipc = server.grant(LinkGrant { client: no_process, ..grant(7) }).unwrap();
        assert!(matches!(connect(&ipc, &edge(7), None, soon()), Err(LinkError::Malformed(_))));
        // This very process needs no watching.
        let ipc = server.grant(grant(7)).unwrap();
        assert!(connect(&ipc, &edge(7), None, soon()).unwrap().pidfd.is_none());
    }

    #[test]
    fn malformed_records_are_refused() {
        assert!(matches!(connect(&[0; 63], &edge(0), None, soon()), Err(LinkError::Malformed(_))));
        assert!(matches!(connect(&[0; 64], &edge(0), None, soon()), Err(LinkError::Malformed(_))));
        assert!(matches!(connect(&[0xFF; 64], &edge(0), None, soon()), Err(LinkError::Malformed(_))));
    }

    /// However many there are of them: ones that say nothing, or not all.
    #[test]
    fn peers_that_say_nothing_hold_nobody_up() {
        // Who waits for one of them waits for ever.
        let server = LinkServer::hearing(Duration::from_secs(3600), credentials::same_user).unwrap();
        let ipc = server.grant(grant(0)).unwrap();
        let addr = SocketAddr::from_abstract_name(&server.name).unwrap();
        let visitor = || UnixStream::connect_addr(&addr).unwrap();
        let mut few = [visitor(), visitor()];
        few[1].write_all(&[1; HELLO_BYTES - 1]).unwrap();
        connect(&ipc, &edge(0), None, soon()).unwrap();
        // More than there are places for.
        let _many: Vec<_> = (0..100).map(|_| visitor()).collect();
        connect(&ipc, &edge(0), None, soon()).unwrap();
    }

    #[test]
    fn a_peer_that_does_not_say_in_time_what_it_wants_is_let_go() {
        let server = LinkServer::hearing(Duration::from_millis(20), credentials::same_user).unwrap();
        let mut mute = UnixStream::connect_addr(&SocketAddr::from_abstract_name(&server.name).unwrap()).unwrap();
        mute.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(mute.read(&mut [0]).unwrap(), 0);
    }

    /// Nobody of another user is granted anything, whatever he knows, or hears who asks. Only root can be two users; where another
    /// one runs this its own processes are taken for the strangers.
    #[test]
    fn another_user_is_neither_served_nor_asked() {
        use rustix::process::{Uid, geteuid};
        let root = geteuid().is_root();
        let heard: Heard = if root { credentials::same_user } else { |c| !credentials::same_user(c) };
        let told = |mut stream: &UnixStream| {
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            match stream.read(&mut [0]) {
                Ok(n) => n,
                // With what was said unread.
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => 0,
                Err(e) => panic!("{e}"),
            }
        };
        let server = LinkServer::hearing(LINK_HELLO, heard).unwrap();
        let ipc = server.grant(grant(7)).unwrap();
        let name = format!("wccl-{:024x}", u64::from(std::process::id()) | 2 << 40);
        let listener = std::thread::scope(|s| {
            let stranger = s.spawn(|| {
                if root {
                    let uid = Uid::from_raw(65_533);
                    // Of this thread, which ends; the kernel keeps who it was when it connected, or began to listen.
                    rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
                }
                let at = |name: &[u8]| SocketAddr::from_abstract_name(name).unwrap();
                let mut asks = UnixStream::connect_addr(&at(&server.name)).unwrap();
                // Whether it finds the connection closed already does not matter.
                let _ = asks.write_all(&edge(7).hello(&ipc).unwrap());
                assert_eq!(told(&asks), 0);
                UnixListener::bind_addr(&at(name.as_bytes())).unwrap()
            });
            stranger.join().unwrap()
        });
        let mut theirs = [0u8; IPC_BYTES];
        theirs[32] = name.len() as u8;
        theirs[33..33 + name.len()].copy_from_slice(name.as_bytes());
        let e = request_of(&theirs, &edge(7), None, soon(), heard).unwrap_err().to_string();
        assert!(e.contains("the owner is another user's process"), "{e}");
        assert_eq!(told(&listener.accept().unwrap().0), 0);
    }
}
