//! The control socket of a runtime: what operators ask of a running tenant.
//!
//! A unix socket in a directory that only this user can enter (`directory`); its name carries the tenant and the process, so
//! that it is found: `TENANT-PID-RANDOM`. Both sides ask the kernel who the other one is before a word is said, and speak with
//! processes of the same user only, as root too: a stranger is no participant of a swap, and the ballot is not for him. Messages
//! are [`crate::message`]'s. One thread serves, which sleeps while nobody asks and ends with the runtime; a swap has a thread of
//! its own, which keeps the connection it was asked on.

mod directory;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hw_bridge::group::ballot::Ballot;
use hw_bridge::os::credentials::{self, Credentials};
use hw_bridge::os::shown::one_line;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use serde::{Deserialize, Serialize};

use directory::Directory;

use crate::error::Error;
use crate::message::{self, MessageError};
use crate::swap::{Request, Status, Swaps};
use sandbox::limits::{MAX_QUESTION_BYTES, MAX_TENANT_TAG, MAX_VISITORS, MESSAGE_PATIENCE};

/// How often one is looked at that has said half a question.
const LOOK: Duration = Duration::from_millis(10);
/// How long one that was answered may be silent before it makes room: who asks for a swap speaks with all processes first.
const SILENT: Duration = Duration::from_secs(10);

/// What is asked.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Question {
    /// What the runtime is, and what its swaps are doing.
    Status,
    /// To take part in a swap, whose ballot comes along. [`Answer::Done`] is followed by a [`Outcome`](crate::swap::Outcome).
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

/// A tenant's name as it stands in the names of sockets, without a hyphen: what is unusual in it, or too long, is replaced by a
/// hash.
fn tag(tenant: &str) -> String {
    let usual = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
    if !tenant.is_empty() && tenant.len() <= MAX_TENANT_TAG && tenant.chars().all(usual) {
        return tenant.into();
    }
    let hash = tenant.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    format!("~{hash:016x}")
}

/// The process in the name of a socket.
fn process_of(name: &str) -> Option<u32> {
    name.split('-').nth(1)?.parse().ok()
}

/// Whether there is no such process here.
fn is_gone(pid: u32) -> bool {
    !std::path::Path::new(&format!("/proc/{pid}")).exists()
}

/// The control socket, while it is served.
#[derive(Debug)]
pub(crate) struct Control {
    directory: Directory,
    name: String,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    move |source| Error::System { what: what.into(), source }
}

impl Control {
    /// Opens the socket of a runtime, which lives by its own users. `None` if there is no directory for it, which the log says:
    /// a program that cannot be swapped runs all the same.
    ///
    /// # Errors
    /// [`Error::System`].
    pub(crate) fn start(swaps: &Arc<Swaps>) -> Result<Option<Control>, Error> {
        Control::start_in(&directory::places(), swaps)
    }

    /// The same, in the first of these places that can be had.
    fn start_in(places: &[PathBuf], swaps: &Arc<Swaps>) -> Result<Option<Control>, Error> {
        let tenant = &swaps.host.tenant.name;
        let without = |why: &str| {
            tracing::warn!(
                tenant = %tenant,
                "there is no control socket, so that `wccl swap` does not find this process: {why}; name a directory of this \
                 user's in XDG_RUNTIME_DIR, or set WCCL_CONTROL=0"
            );
            Ok(None)
        };
        let directory = match Directory::make(places) {
            Ok(directory) => directory,
            Err(why) => return without(&why),
        };
        // What others have left; who cannot look finds none.
        let _ = directory.sockets();
        let random = hw_bridge::os::random::bytes().map_err(system("reading a random number for a control socket"))?;
        let name = format!("{}-{}-{:016x}", tag(tenant), std::process::id(), u64::from_ne_bytes(random));
        let listener = match directory.listen(&name) {
            Ok(listener) => listener,
            // The file system, not this process: it is read-only, say, or full.
            Err(e) if !matches!(Errno::from_io_error(&e), Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => {
                return without(&format!("none can be made in its directory: {e}"));
            }
            Err(e) => return Err(system("opening a control socket")(e)),
        };
        let started = Control::serve(listener, swaps, credentials::this_user);
        let (stop, thread) = started.inspect_err(|_| directory.remove(&name))?;
        Ok(Some(Control { directory, name, stop, thread: Some(thread) }))
    }

    /// Starts the thread, which hears whom `heard` names; answers the event that ends it too.
    fn serve(listener: UnixListener, swaps: &Arc<Swaps>, heard: Heard) -> Result<(OwnedFd, JoinHandle<()>), Error> {
        listener.set_nonblocking(true).map_err(system("setting up a control socket"))?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(|e| system("making a stop event")(e.into()))?;
        let (stopped, swaps) = (stop.try_clone().map_err(system("copying a stop event"))?, Arc::downgrade(swaps));
        let thread = std::thread::Builder::new()
            .name("wccl-control".into())
            .spawn(move || serve(&listener, &stopped, &swaps, heard))
            .map_err(system("starting the thread of a control socket"))?;
        Ok((stop, thread))
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if hw_bridge::os::fork::in_child() {
            // The thread, the event and the socket are the parent's.
            std::mem::forget(thread);
            return;
        }
        self.directory.remove(&self.name);
        // The event counts to 2^64: a write of 1 cannot fail in a way that matters.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        // One that panicked has already reported.
        let _ = thread.join();
    }
}

/// Whether one is spoken with. [`credentials::this_user`], but in tests of users who are one.
type Heard = fn(&Credentials) -> bool;

/// One who has connected.
struct Visitor {
    stream: UnixStream,
    /// When the first half of a question was seen.
    half_since: Option<Instant>,
    /// When a question of its was answered last.
    answered: Option<Instant>,
}

/// What of a question is there.
enum There {
    Nothing,
    Half,
    Whole,
    /// It has left, or says what cannot be.
    Gone,
}

impl Visitor {
    /// Looks without taking anything, so that nobody is waited for.
    fn there(&self) -> There {
        let mut head = [0; 4];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let seen = match rustix::net::recv(&self.stream, &mut head, flags) {
            Ok((_, 0)) => return There::Gone,
            Ok((_, n)) => n,
            Err(Errno::AGAIN | Errno::INTR) => return There::Nothing,
            Err(_) => return There::Gone,
        };
        if seen < head.len() {
            return There::Half;
        }
        let bytes = u32::from_le_bytes(head) as usize;
        if bytes > MAX_QUESTION_BYTES {
            return There::Gone;
        }
        match rustix::io::ioctl_fionread(&self.stream) {
            Ok(n) if n >= (head.len() + bytes) as u64 => There::Whole,
            Ok(_) => There::Half,
            Err(_) => There::Gone,
        }
    }
}

/// Hears all visitors side by side: a question is read when all of it is there, so one who says nothing, or half, holds nobody
/// up. When there is no place left the oldest makes room that has asked nothing yet, else one that was answered long ago; else
/// who comes is sent away.
fn serve(listener: &UnixListener, stop: &OwnedFd, swaps: &Weak<Swaps>, heard: Heard) {
    // Who spoke last comes last.
    let mut visitors: Vec<Visitor> = Vec::new();
    loop {
        let mut fds = vec![PollFd::new(stop, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
        // One with half a question would be ready all the time: it is looked at now and then.
        let (half, mute): (Vec<_>, Vec<_>) = visitors.iter().partition(|v| v.half_since.is_some());
        fds.extend(mute.iter().map(|v| PollFd::new(&v.stream, PollFlags::IN)));
        let look = Timespec { tv_sec: 0, tv_nsec: LOOK.as_nanos() as i64 };
        match poll(&mut fds, (!half.is_empty()).then_some(&look)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => {
                tracing::error!("the control socket is not served any more: waiting failed: {e}");
                return;
            }
        }
        if !fds[0].revents().is_empty() {
            return;
        }
        drop(fds);
        let mut spoken = Vec::new();
        for mut v in std::mem::take(&mut visitors) {
            match v.there() {
                There::Nothing => visitors.push(v),
                There::Half => {
                    let since = *v.half_since.get_or_insert_with(Instant::now);
                    if since.elapsed() < MESSAGE_PATIENCE {
                        visitors.push(v);
                    }
                }
                There::Whole => {
                    let answered = Some(Instant::now());
                    spoken.extend(answer(v.stream, swaps).map(|stream| Visitor { stream, half_since: None, answered }));
                }
                There::Gone => {}
            }
        }
        visitors.extend(spoken);
        match listener.accept() {
            Ok((stream, _)) => {
                if credentials::of_peer(&stream).is_ok_and(|c| heard(&c)) {
                    let full = visitors.len() >= MAX_VISITORS;
                    let asked_nothing = |v: &Visitor| v.answered.is_none();
                    let silent = |v: &Visitor| v.answered.is_some_and(|at| at.elapsed() >= SILENT);
                    let goes = || visitors.iter().position(asked_nothing).or_else(|| visitors.iter().position(silent));
                    if let Some(at) = full.then(goes).flatten() {
                        visitors.remove(at);
                    }
                    if visitors.len() < MAX_VISITORS {
                        visitors.push(Visitor { stream, half_since: None, answered: None });
                    }
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

/// Answers a question that is there as a whole; answers the visitor, unless it went, or a swap's thread speaks with it from here
/// on.
fn answer(stream: UnixStream, swaps: &Weak<Swaps>) -> Option<UnixStream> {
    // What is there is not waited for, and an answer fits the buffer of one that has read those before.
    let now = Instant::now();
    let (question, mut fds) = message::receive_within::<Question>(&stream, MAX_QUESTION_BYTES, 1, now).ok()?;
    let swaps = swaps.upgrade()?;
    let answer = match question {
        Question::Status => Answer::Status(swaps.status()),
        Question::Cancel => swaps.cancel().map_or_else(Answer::Refused, |()| Answer::Done),
        Question::Swap(request) => {
            let opened = match fds.pop() {
                Some(fd) => Ballot::open(fd, request.id, request.pids.len()).map_err(|e| e.to_string()),
                None => Err("its ballot did not come along".into()),
            };
            let to = stream.try_clone().ok()?;
            match opened.and_then(|ballot| swaps.begin(request, ballot, to)) {
                Ok(()) => return None,
                Err(why) => Answer::Refused(why),
            }
        }
    };
    message::send(&stream, &answer, &[], now).ok().map(|()| stream)
}

/// A control socket that was found.
#[derive(Debug, Clone)]
pub struct Found {
    directory: Directory,
    name: String,
    /// Its process.
    pub pid: u32,
}

impl Found {
    /// Whether its process has ended; a child of it may still hold the socket.
    pub fn gone(&self) -> bool {
        is_gone(self.pid)
    }
}

/// The control sockets of a tenant on this machine, of this user's processes; and of the places where they could be, why some
/// are not looked at.
///
/// # Errors
/// [`Error::System`] if a directory cannot be read.
pub fn find(tenant: &str) -> Result<(Vec<Found>, Vec<String>), Error> {
    let (tag, mut found, mut passed_over) = (tag(tenant), Vec::new(), Vec::new());
    for place in directory::places() {
        let directory = match Directory::open(&place) {
            Ok(Some(directory)) => directory,
            Ok(None) => continue,
            Err(why) => {
                passed_over.push(why);
                continue;
            }
        };
        for name in directory.sockets().map_err(system("looking for control sockets"))? {
            let pid = process_of(&name).filter(|pid| !is_gone(*pid));
            let Some(pid) = pid.filter(|_| name.split('-').next() == Some(&tag)) else { continue };
            found.push(Found { directory: directory.clone(), name, pid });
        }
    }
    found.sort_by(|a, b| (a.pid, &a.name).cmp(&(b.pid, &b.name)));
    // Two places may be one directory.
    found.dedup_by(|a, b| a.name == b.name);
    Ok((found, passed_over))
}

/// Connects to a control socket and asks; answers the connection, for further questions, and the answer.
///
/// # Errors
/// [`MessageError`]: [`MessageError::Ended`] if nobody listens any more.
pub fn ask(to: &Found, question: &Question, fds: &[BorrowedFd<'_>]) -> Result<(UnixStream, Answer), MessageError> {
    ask_one(to, question, fds, credentials::this_user)
}

fn ask_one(
    to: &Found,
    question: &Question,
    fds: &[BorrowedFd<'_>],
    heard: Heard,
) -> Result<(UnixStream, Answer), MessageError> {
    let stream = to.directory.dial(&to.name, Instant::now() + MESSAGE_PATIENCE).map_err(|e| match e {
        Errno::CONNREFUSED | Errno::NOENT => {
            to.directory.remove(&to.name);
            MessageError::Ended
        }
        e => MessageError::System(e.into()),
    })?;
    // Nothing is said to anybody else, the ballot least of all.
    if !heard(&credentials::of_peer(&stream)?) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Runtime;
    use crate::config::RuntimeConfig;
    use hw_bridge::os::credentials::as_user;
    use std::io::{Read, Write};
    use std::os::unix::fs::PermissionsExt;
    use std::sync::Mutex;

    /// Ones that say nothing, or half a question, keep nobody out and hold nobody up: who asks waits for an answer no longer than
    /// one of them would be waited for.
    #[test]
    fn mute_visitors_keep_nobody_from_asking() {
        let at = std::env::temp_dir().join(format!("wccl-control-mute-{}.sock", std::process::id()));
        let _ = std::fs::remove_file(&at);
        let runtime = Runtime::open(RuntimeConfig::default()).unwrap();
        let (stop, thread) =
            Control::serve(UnixListener::bind(&at).unwrap(), &runtime.0.swaps, credentials::this_user).unwrap();
        let visitor = || UnixStream::connect(&at).unwrap();
        let status = |stream: &UnixStream| {
            let answer = ask_on(stream, &Question::Status, &[]);
            assert!(matches!(answer, Ok(Answer::Status(_))), "{answer:?}");
        };
        let mute: Vec<_> = (0..3 * MAX_VISITORS).map(|_| visitor()).collect();
        status(&visitor());
        let half: Vec<_> = (0..MAX_VISITORS)
            .map(|i| {
                let mut half = visitor();
                half.write_all(&[200, 0, 0, 0, 1][..1 + i % 5]).unwrap();
                half
            })
            .collect();
        let asks = visitor();
        // The second question on the same connection, also when others have come since, as after the first one of who asks for a swap.
        status(&asks);
        let _more: Vec<_> = (0..3 * MAX_VISITORS).map(|_| visitor()).collect();
        status(&visitor());
        status(&asks);
        drop((mute, half));
        rustix::io::write(&stop, &1u64.to_ne_bytes()).unwrap();
        thread.join().unwrap();
        std::fs::remove_file(&at).unwrap();
    }

    /// Who is another one's stranger: the users of two sides, and how each knows its own. Only root can be two users; where
    /// another one runs this its own processes are taken for the strangers.
    fn strangers() -> (Vec<(u32, u32)>, Heard) {
        match rustix::process::geteuid().as_raw() {
            0 => (vec![(0, 65_533), (65_533, 0)], credentials::this_user),
            me => (vec![(me, me)], |c| !credentials::this_user(c)),
        }
    }

    /// What there is to read before the other side closes, which it may do with a question unread.
    fn told(mut stream: &UnixStream) -> usize {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        match stream.read(&mut [0]) {
            Ok(n) => n,
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => 0,
            Err(e) => panic!("{e}"),
        }
    }

    /// Root is one where another user's process listens.
    #[test]
    fn a_stranger_is_told_nothing_and_his_question_is_not_answered() {
        let runtime = Runtime::open(RuntimeConfig::default()).unwrap();
        let (sides, heard) = strangers();
        for (i, (listens, visits)) in sides.into_iter().enumerate() {
            let at = std::env::temp_dir().join(format!("wccl-control-strangers-{}-{i}.sock", std::process::id()));
            let _ = std::fs::remove_file(&at);
            let listener = UnixListener::bind(&at).unwrap();
            std::fs::set_permissions(&at, std::fs::Permissions::from_mode(0o777)).unwrap();
            let (stop, thread) =
                as_user(listens, || Control::serve(listener, &runtime.0.swaps, heard).unwrap()).unwrap();
            let visit = |asks: bool| {
                let visitor = UnixStream::connect(&at).unwrap();
                if asks {
                    // Whether it finds the connection closed already does not matter.
                    let until = Instant::now() + MESSAGE_PATIENCE;
                    let _ = message::send(&visitor, &Question::Status, &[], until);
                }
                told(&visitor)
            };
            assert_eq!(as_user(visits, || (visit(false), visit(true))).unwrap(), (0, 0), "{visits} visits {listens}");
            rustix::io::write(&stop, &1u64.to_ne_bytes()).unwrap();
            thread.join().unwrap();
            std::fs::remove_file(&at).unwrap();
        }
    }

    /// However it came to lie where this user's sockets do.
    #[test]
    fn a_stranger_who_listens_is_not_asked() {
        let place = std::env::temp_dir().join(format!("wccl-control-listens-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&place);
        std::fs::create_dir(&place).unwrap();
        std::fs::set_permissions(&place, std::fs::Permissions::from_mode(0o777)).unwrap();
        let (sides, heard) = strangers();
        let outside = place.join("outside");
        let listener = as_user(sides[0].1, || UnixListener::bind(&outside).unwrap()).unwrap();
        let directory = Directory::make(&[place.join("wccl")]).unwrap();
        let name = format!("red-{}-1", std::process::id());
        std::fs::rename(&outside, place.join("wccl").join(&name)).unwrap();
        let found = Found { directory, name, pid: std::process::id() };
        let e = ask_one(&found, &Question::Status, &[], heard).unwrap_err();
        assert!(matches!(e, MessageError::Stranger), "{e}");
        assert_eq!(told(&listener.accept().unwrap().0), 0);
        std::fs::remove_dir_all(&place).unwrap();
    }

    /// What is logged meanwhile.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<String>>);

    impl tracing::Subscriber for Lines {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::Id {
            tracing::Id::from_u64(1)
        }

        fn event(&self, e: &tracing::Event<'_>) {
            let mut text = self.0.lock().unwrap();
            e.record(&mut |field: &tracing::field::Field, value: &dyn std::fmt::Debug| {
                *text += &format!("{} {field}={value:?}\n", e.metadata().level());
            });
        }

        fn record(&self, _: &tracing::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::Id, _: &tracing::Id) {}
        fn enter(&self, _: &tracing::Id) {}
        fn exit(&self, _: &tracing::Id) {}
    }

    /// One is needed for swaps alone.
    #[test]
    fn a_program_without_a_directory_runs_and_cannot_be_found() {
        let taken = std::env::temp_dir().join(format!("wccl-control-taken-{}", std::process::id()));
        std::fs::write(&taken, "").unwrap();
        let runtime = Runtime::open(RuntimeConfig { control: false, ..RuntimeConfig::default() }).unwrap();
        let places = [taken.clone(), taken.join("wccl")];
        let lines = Lines::default();
        let started = || Control::start_in(&places, &runtime.0.swaps).unwrap();
        assert!(tracing::subscriber::with_default(lines.clone(), started).is_none());
        let said = lines.0.lock().unwrap().clone();
        let has = |words: &[&str]| words.iter().all(|w| said.contains(w));
        assert!(
            has(&["WARN", "there is no control socket", "does not find this process", "is not a directory"]),
            "{said}"
        );
        assert_eq!(std::fs::metadata(&taken).unwrap().len(), 0);
        runtime.unique_id(1).unwrap();
        // In a place that can be had there would be one.
        let place = taken.with_extension("free");
        let control = Control::start_in(&[taken.clone(), place.clone()], &runtime.0.swaps).unwrap().unwrap();
        assert_eq!(control.directory.sockets().unwrap(), [&*control.name]);
        drop(control);
        std::fs::remove_file(&taken).unwrap();
        std::fs::remove_dir_all(&place).unwrap();
    }
}
