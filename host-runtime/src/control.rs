//! The control socket of a runtime: what operators ask of a running tenant.
//!
//! An abstract unix socket, so that nothing is left behind by a process that is killed; its name carries the tenant and the
//! process, so that it is found in `/proc/net/unix`: `wccl-control-TENANT-PID-N`. Processes of the same user, and of root, are
//! answered, nobody else. Messages are [`crate::message`]'s. One thread serves, which sleeps while nobody asks and ends with
//! the runtime; a swap has a thread of its own, which keeps the connection it was asked on.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Weak;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hw_bridge::ballot::Ballot;
use hw_bridge::credentials;
use hw_bridge::dial::dial;
use hw_bridge::shown::one_line;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::SocketAddrUnix;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::limits::{MAX_TENANT_TAG, MAX_VISITORS, MESSAGE_PATIENCE};
use crate::message::{self, MessageError};
use crate::nrt::Runtime;
use crate::swap::{Request, Status, Swaps};

const PREFIX: &str = "wccl-control-";

/// What is asked.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Question {
    /// What the runtime is, and what its swaps are doing.
    Status,
    /// To take part in a swap, whose ballot comes along. [`Answer::Done`] is followed by a [`crate::swap::Outcome`].
    Swap(Request),
    /// To give up the swap under way.
    Cancel,
}

/// What is answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// To [`Question::Status`].
    Status(Status),
    /// It is done, or begun.
    Done,
    /// It is not; why.
    Refused(String),
}

impl Answer {
    /// As it may be shown on a terminal.
    fn shown(self) -> Answer {
        match self {
            Answer::Status(status) => Answer::Status(status.shown()),
            Answer::Refused(why) => Answer::Refused(one_line(&why)),
            Answer::Done => Answer::Done,
        }
    }
}

/// A tenant's name as it stands in the names of sockets: what is unusual in it, or too long, is replaced by a hash.
fn tag(tenant: &str) -> String {
    let usual = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
    if !tenant.is_empty() && tenant.len() <= MAX_TENANT_TAG && tenant.chars().all(usual) {
        return tenant.into();
    }
    let hash = tenant.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    format!("~{hash:016x}")
}

/// The control socket, while it is served.
#[derive(Debug)]
pub(crate) struct Control {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    move |source| Error::System { what: what.into(), source }
}

impl Control {
    /// Opens the socket of `runtime`, which lives by its own users.
    ///
    /// # Errors
    /// [`Error::System`].
    pub(crate) fn start(runtime: &Runtime) -> Result<Control, Error> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let (tag, pid) = (tag(&runtime.0.tenant.name), std::process::id());
        let listener = loop {
            let name = format!("{PREFIX}{tag}-{pid}-{}", NEXT.fetch_add(1, Ordering::Relaxed));
            let address = SocketAddr::from_abstract_name(name).map_err(system("naming a control socket"))?;
            match UnixListener::bind_addr(&address) {
                // A process of another PID namespace has this one's number.
                Err(e) if e.kind() == std::io::ErrorKind::AddrInUse => {}
                bound => break bound.map_err(system("binding a control socket"))?,
            }
        };
        listener.set_nonblocking(true).map_err(system("setting up a control socket"))?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(|e| system("making a stop event")(e.into()))?;
        let (stopped, runtime) =
            (stop.try_clone().map_err(system("copying a stop event"))?, std::sync::Arc::downgrade(&runtime.0));
        let thread = std::thread::Builder::new()
            .name("wccl-control".into())
            .spawn(move || serve(&listener, &stopped, &runtime))
            .map_err(system("starting the thread of a control socket"))?;
        Ok(Control { stop, thread: Some(thread) })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if hw_bridge::fork::in_child() {
            // The thread and the event are the parent's.
            std::mem::forget(thread);
            return;
        }
        // The event counts to 2^64: a write of 1 cannot fail in a way that matters.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        // The last user of a runtime may be the thread that answers for it.
        if thread.thread().id() != std::thread::current().id() {
            // One that panicked has already reported.
            let _ = thread.join();
        }
    }
}

fn serve(listener: &UnixListener, stop: &OwnedFd, runtime: &Weak<crate::nrt::Inner>) {
    let mut visitors: Vec<UnixStream> = Vec::new();
    loop {
        let all = [PollFd::new(listener, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
        let mut fds: Vec<_> = all.into_iter().chain(visitors.iter().map(|v| PollFd::new(v, PollFlags::IN))).collect();
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => {
                tracing::error!("the control socket is not served any more: waiting failed: {e}");
                return;
            }
        }
        let ready: Vec<bool> = fds.iter().map(|f| !f.revents().is_empty()).collect();
        if ready[1] {
            return;
        }
        let asking = ready[2..].iter();
        visitors = std::mem::take(&mut visitors)
            .into_iter()
            .zip(asking)
            .filter_map(|(v, asks)| if *asks { answer(v, runtime) } else { Some(v) })
            .collect();
        if ready[0] {
            match listener.accept() {
                Ok((stream, _)) => {
                    let ours = credentials::of_peer(&stream).is_ok_and(|c| credentials::same_user(&c));
                    if ours && visitors.len() < MAX_VISITORS {
                        visitors.push(stream);
                    }
                }
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(e) => {
                    tracing::warn!("a visitor of the control socket was not let in: {e}");
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        }
    }
}

/// Answers one question of a visitor; answers the visitor, unless it went, or a swap's thread speaks with it from here on.
fn answer(stream: UnixStream, runtime: &Weak<crate::nrt::Inner>) -> Option<UnixStream> {
    let until = Instant::now() + MESSAGE_PATIENCE;
    let (question, mut fds) = message::receive::<Question>(&stream, 1, until).ok()?;
    let runtime = runtime.upgrade().map(Runtime)?;
    let answer = match question {
        Question::Status => Answer::Status(Swaps::status(&runtime)),
        Question::Cancel => runtime.0.swaps.cancel().map_or_else(Answer::Refused, |()| Answer::Done),
        Question::Swap(request) => {
            let opened = match fds.pop() {
                Some(fd) => Ballot::open(fd, request.id, request.pids.len()).map_err(|e| e.to_string()),
                None => Err("its ballot did not come along".into()),
            };
            let to = stream.try_clone().ok()?;
            match opened.and_then(|ballot| Swaps::begin(&runtime, request, ballot, to)) {
                Ok(()) => return None,
                Err(why) => Answer::Refused(why),
            }
        }
    };
    message::send(&stream, &answer, &[], until).ok().map(|()| stream)
}

/// A control socket that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    name: String,
    /// Its process.
    pub pid: u32,
}

impl Found {
    /// Whether its process has ended; a child of it may still hold the socket.
    pub fn gone(&self) -> bool {
        !std::path::Path::new(&format!("/proc/{}", self.pid)).exists()
    }
}

/// The control sockets of a tenant on this machine.
///
/// # Errors
/// [`Error::System`] if the kernel's list cannot be read.
pub fn find(tenant: &str) -> Result<Vec<Found>, Error> {
    let list = std::fs::read_to_string("/proc/net/unix").map_err(system("reading /proc/net/unix"))?;
    let begin = format!("@{PREFIX}{}-", tag(tenant));
    let mut found: Vec<Found> = list
        .lines()
        .filter_map(|line| {
            let (at, rest) = line.split_once(&begin)?;
            // The flags say that it listens; connections have the name too.
            let listens = at.split_whitespace().nth(3).is_some_and(|flags| flags == "00010000");
            let pid = rest.split('-').next()?.parse().ok()?;
            listens.then(|| Found { name: format!("{}{rest}", &begin[1..]), pid })
        })
        .filter(|f| !f.gone())
        .collect();
    found.sort_by(|a, b| (a.pid, &a.name).cmp(&(b.pid, &b.name)));
    found.dedup();
    Ok(found)
}

/// Connects to a control socket and asks; answers the connection, for further questions, and the answer.
///
/// # Errors
/// [`MessageError`].
pub fn ask(to: &Found, question: &Question, fds: &[BorrowedFd<'_>]) -> Result<(UnixStream, Answer), MessageError> {
    let at = SocketAddrUnix::new_abstract_name(to.name.as_bytes()).map_err(std::io::Error::from)?;
    let stream = dial(&at, None, Instant::now() + MESSAGE_PATIENCE).map_err(std::io::Error::from)?;
    // Root asks whom it likes.
    if !rustix::process::geteuid().is_root() && !credentials::same_user(&credentials::of_peer(&stream)?) {
        return Err(MessageError::Stranger);
    }
    let answer = ask_on(&stream, question, fds)?;
    Ok((stream, answer))
}

/// Asks on a connection.
///
/// # Errors
/// [`MessageError`].
pub fn ask_on(stream: &UnixStream, question: &Question, fds: &[BorrowedFd<'_>]) -> Result<Answer, MessageError> {
    let until = Instant::now() + MESSAGE_PATIENCE;
    message::send(stream, question, fds, until)?;
    message::receive::<Answer>(stream, 0, until).map(|(answer, _)| answer.shown())
}
