//! A client of the service: control calls go to it, data moves in this process.
//!
//! When the service is gone, control calls say so; operations that need none go on, since the memory is mapped here. What the two
//! say to one another is in [`wire`].

mod listener;
pub(crate) mod wire;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hw_bridge::exec::sequencer::Endpoint;
use hw_bridge::exec::share::Market;
use hw_bridge::group::{Control as ControlSegment, Peer};
use hw_bridge::memory::foreign::Mark;
use hw_bridge::memory::links::Granted;
use hw_bridge::memory::segment::Segment;
use hw_bridge::os::bell::{WaitPolicy, asymmetric};
use hw_bridge::os::dial::dial;
use hw_bridge::os::patience::Wait;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SocketAddrUnix;

use crate::client::wire::{Bound, Greeting, Hello, Join, LINKS_AT_ONCE, Link, Meeting, Reply, Request, Said, Welcome};
use crate::error::Error;
use crate::message::{self, MessageError};
use crate::plane::ask::{Answer, Ask, ControlPlane, Service};
use crate::plane::here::Here;
use crate::plane::host::Host;
use crate::plane::join::{Joined, Joining, Rendezvous};
use crate::turns::Turns;
use hw_bridge::os::lock::lock;
use sandbox::abort::AbortToken;
use sandbox::key::GroupKey;
use sandbox::limits::SERVICE_MESSAGE;
use sandbox::objects::CommCore;
use sandbox::policy::{Network, Rate, SharePolicy};
use sandbox::status::Status;
use sandbox::store::Patience;

/// The service, as a runtime knows it.
#[derive(Debug)]
pub(crate) struct Client {
    welcome: Welcome,
    market: Option<Arc<Market>>,
    socket: PathBuf,
    line: Mutex<Line>,
    calls: Arc<AtomicU64>,
}

/// One connection.
#[derive(Debug)]
struct Line {
    stream: UnixStream,
    socket: PathBuf,
    calls: Arc<AtomicU64>,
    longest: Duration,
    /// Why it serves no more.
    lost: Option<String>,
}

/// The control plane of one communicator, in the service.
#[derive(Debug)]
pub(crate) struct Served {
    line: Turns<Line>,
    /// Whom it reaches, and how long a call takes at most.
    socket: PathBuf,
    longest: Duration,
    core: Arc<CommCore>,
}

fn lost(socket: &Path, why: impl std::fmt::Display) -> Error {
    let what = format!(
        "the service at {} does not answer: {why}; operations that need no new connection go on, start it again for new \
         communicators",
        socket.display()
    );
    Error::Service { what, status: Status::CLOSED }
}

/// Connects, for the user `me`, to who may listen at a service's socket.
fn reach(socket: &Path, me: u32) -> Result<UnixStream, Error> {
    let at = SocketAddrUnix::new(socket);
    let reached = at.and_then(|at| dial(&at, None, Instant::now() + SERVICE_MESSAGE)).map_err(|e| {
        let hint = match e {
            Errno::ACCESS => "; its policy does not name this user",
            Errno::NOENT | Errno::CONNREFUSED => "; is `wccl serve` running?",
            _ => "",
        };
        let what = format!("the service at {} cannot be reached: {e}{hint}", socket.display());
        Error::Service { what, status: Status::CLOSED }
    })?;
    listener::check(&reached, socket, me).map_err(|why| {
        let what = format!("the service at {} is not believed to be one: {why}", socket.display());
        Error::Service { what, status: Status::INVALID }
    })?;
    Ok(reached)
}

impl Line {
    /// Answers what the service said, and the market's descriptor if it handed one.
    fn open(socket: &Path, calls: Arc<AtomicU64>) -> Result<(Line, Welcome, Option<OwnedFd>), Error> {
        let stream = reach(socket, rustix::process::geteuid().as_raw())?;
        let until = Instant::now() + SERVICE_MESSAGE;
        let said = message::send(&stream, &Hello::mine(), &[], until);
        // One that refuses may do so before it reads.
        let greeting = message::receive::<Greeting>(&stream, 1, until).map_err(|e| said.err().unwrap_or(e));
        let (greeting, mut fds) = greeting.map_err(|e| lost(socket, e))?;
        match greeting {
            Greeting::Welcome(welcome) => {
                let longest = Duration::from_millis(welcome.longest_ms);
                Ok((Line { stream, socket: socket.into(), calls, longest, lost: None }, welcome, fds.pop()))
            }
            Greeting::Refused { why } => {
                let what = format!("the service at {} refuses this process: {why}", socket.display());
                Err(Error::Service { what, status: Status::INVALID })
            }
        }
    }

    /// Sends a request and waits for what answers it; `links` takes those that come before. An abort travels on.
    fn request(
        &mut self,
        request: &Request,
        patience: Patience,
        abort: Option<&AbortToken>,
        mut links: impl FnMut(Granted) -> Result<(), Error>,
    ) -> Result<(Reply, VecDeque<OwnedFd>), Error> {
        if let Some(why) = &self.lost {
            return Err(lost(&self.socket, why));
        }
        let now = Instant::now();
        let longest = now + self.longest;
        let until = patience.until().map_or(longest, |until| until.max(now).min(longest)) + SERVICE_MESSAGE;
        // Until it was answered in good order it is out of step.
        self.lost = Some("a request was not answered".into());
        let exchanged = (|| {
            message::send(&self.stream, request, &[], now + SERVICE_MESSAGE)?;
            let mut abort = abort;
            loop {
                if let Some(reason) = aborted(&self.stream, abort, until)? {
                    abort = None;
                    message::send(&self.stream, &Request::Abort { reason }, &[], Instant::now() + SERVICE_MESSAGE)?;
                    continue;
                }
                // It has begun to answer.
                let until = until.max(Instant::now() + SERVICE_MESSAGE);
                let (said, fds) = message::receive::<Said>(&self.stream, 3 * LINKS_AT_ONCE, until)?;
                self.calls.store(said.calls, Ordering::Relaxed);
                let mut fds = VecDeque::from(fds);
                let Reply::Links(new) = said.reply else { return Ok(Ok((said.reply, fds))) };
                for Link { rank, control, hbm } in new {
                    let (Some(a), Some(b), Some(pidfd)) = (fds.pop_front(), fds.pop_front(), fds.pop_front()) else {
                        return Err(MessageError::Malformed("a link without its descriptors".into()));
                    };
                    let granted = Granted { rank, control: (a, control), hbm: (b, hbm), pidfd, pid: None };
                    if let Err(e) = links(granted) {
                        return Ok(Err(e));
                    }
                }
            }
        })();
        match exchanged {
            Ok(answer) => {
                let (reply, fds) = answer?;
                self.lost = None;
                match reply {
                    Reply::Failed { status, what } => Err(Error::Service { what, status: Status(status) }),
                    reply => Ok((reply, fds)),
                }
            }
            Err(e) => {
                self.lost = Some(e.to_string());
                Err(lost(&self.socket, e))
            }
        }
    }
}

/// Waits until `stream` has something to read. Answers the reason of an abort that comes before.
fn aborted(stream: &UnixStream, abort: Option<&AbortToken>, until: Instant) -> Result<Option<String>, MessageError> {
    let begun = Instant::now();
    let mut wait = Wait::until(until);
    loop {
        let left = wait.left().unwrap_or_default();
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        let mut fds = vec![PollFd::new(stream, PollFlags::IN)];
        fds.extend(abort.map(|a| PollFd::from_borrowed_fd(a.event(), PollFlags::IN)));
        match poll(&mut fds, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(MessageError::System(e.into())),
            Ok(_) if fds.get(1).is_some_and(|f| !f.revents().is_empty()) => return Ok(abort.map(AbortToken::reason)),
            Ok(_) if !fds[0].revents().is_empty() => return Ok(None),
            Ok(_) if left.is_zero() => return Err(MessageError::Late(begun.elapsed())),
            Ok(_) => {}
        }
    }
}

fn unexpected(socket: &Path, what: &str) -> Error {
    lost(socket, format!("it answered {what} with something else"))
}

impl Client {
    /// Says hello to the service at `socket`.
    pub(crate) fn open(socket: &Path) -> Result<Client, Error> {
        let calls = Arc::<AtomicU64>::default();
        let (line, welcome, fd) = Line::open(socket, calls.clone())?;
        let market = match (welcome.line, fd) {
            (None, _) => None,
            (Some(at), Some(fd)) => Some(Arc::new(Market::held_by_peer(fd, at).map_err(|e| lost(socket, e))?)),
            (Some(_), None) => return Err(unexpected(socket, "a greeting")),
        };
        Ok(Client { welcome, market, socket: socket.into(), line: Mutex::new(line), calls })
    }

    /// Where this process's tenant meets the others, if the service has them meet.
    pub(crate) fn market(&self) -> Option<Arc<Market>> {
        self.market.clone()
    }

    /// Name and number of the tenant that this process belongs to.
    pub(crate) fn tenant(&self) -> (String, u64) {
        (self.welcome.tenant.clone(), self.welcome.tenant_id)
    }

    /// What that tenant gets among others, by its policy.
    pub(crate) fn share(&self) -> SharePolicy {
        let (weight, bandwidth, proxy_slots) = self.welcome.share;
        SharePolicy { weight, bandwidth: bandwidth.map(Rate), proxy_slots, ..SharePolicy::default() }
    }

    /// Why its library did not load.
    pub(crate) fn sentinel(&self) -> Option<String> {
        self.welcome.sentinel.clone()
    }
}

impl Service for Client {
    fn component_calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    fn network(&self) -> &Network {
        &self.welcome.network
    }

    fn start_root(&self, nranks: i32, key: GroupKey) -> Result<Vec<u8>, Error> {
        let request = Request::UniqueId { nranks, key };
        match lock(&self.line).request(&request, Patience::Usual, None, |_| Ok(()))?.0 {
            Reply::UniqueId(id) => Ok(id),
            _ => Err(unexpected(&self.socket, "a request for an id")),
        }
    }

    fn join(&self, host: &Arc<Host>, j: &Joining, abort: &AbortToken) -> Result<Joined, Error> {
        let (mut line, ..) = Line::open(&self.socket, self.calls.clone())?;
        let mark = Mark::new()
            .map_err(|source| Error::System { what: "reading random bytes for a communicator".into(), source })?;
        let at = match &j.rendezvous {
            Rendezvous::Id(id) => Meeting::Id(id.to_vec()),
            Rendezvous::Root(root) => Meeting::Root(root.clone()),
        };
        let (rank, nranks, on) = (j.rank, j.nranks, j.on);
        let session = self.welcome.session;
        let request = Request::Join(Join {
            session,
            at,
            key: j.key,
            rank,
            nranks,
            on,
            asymmetric: asymmetric(),
            mark: mark.words(),
        });
        let mut links = Vec::new();
        let (reply, mut fds) = line.request(&request, Patience::Usual, Some(abort), |l| {
            links.push(l);
            Ok(())
        })?;
        let (Reply::Joined { comm, place, control, hbm, info: Answer::Info(info) }, Some(a), Some(b)) =
            (reply, fds.pop_front(), fds.pop_front())
        else {
            return Err(unexpected(&self.socket, "a request to join"));
        };
        let segment = |fd, len| Segment::adopt(fd, len).map_err(|e| lost(&self.socket, e));
        let own = ControlSegment::adopt(segment(a, control)?, rank as u32, nranks as u32, mark)
            .map_err(|e| lost(&self.socket, e))?;
        let hbm = host.tenant.adopt_hbm(place.core, segment(b, hbm)?);
        let cpus = std::thread::available_parallelism().map_or(1, |c| c.get());
        hw_bridge::os::fork::mark_process();
        let endpoint =
            Endpoint::of(own, hbm, WaitPolicy::of(host.config.wait, nranks, cpus), host.tenant.share.clone());
        let core = CommCore::new(comm, endpoint, abort.clone(), host.tenant.account(), None, j.key);
        links.into_iter().try_for_each(|l| link(&core, l))?;
        let served = Arc::new(Served::over(line, core.clone()));
        Ok(Joined { control: served, core, info: *info, place })
    }
}

/// Maps the memory of a linked peer.
fn link(core: &CommCore, granted: Granted) -> Result<(), Error> {
    let rank = granted.rank as usize;
    let mapped = granted.map().and_then(|m| Peer::new(m, rank, core.nranks).map_err(Into::into));
    let peer = mapped.map_err(|e| Error::Service {
        what: format!("the memory of rank {rank}, which the service granted, cannot be used: {e}"),
        status: Status::FAILURE,
    })?;
    core.endpoint.link(peer);
    Ok(())
}

impl Served {
    fn over(line: Line, core: Arc<CommCore>) -> Served {
        Served { socket: line.socket.clone(), longest: line.longest, line: Turns::new(line), core }
    }
}

impl ControlPlane for Served {
    fn ask(&self, ask: Ask, patience: Patience) -> Result<Answer, Error> {
        let begun = Instant::now();
        // One call at a time goes over it, and each may take as long as it says.
        let mut wait = Wait::until(patience.until().unwrap_or(begun + self.longest));
        let Some(mut line) = self.line.enter(&mut wait) else {
            let (at, waited) = (self.socket.display(), begun.elapsed());
            let what = format!(
                "the service at {at} was not asked: another call of this communicator has kept its connection busy for \
                 {waited:?}; call it again when that has come back"
            );
            return Err(Error::Service { what, status: Status::TIMEOUT });
        };
        let patience = patience.resumed(begun);
        let request = Request::Ask { ask, bound: Bound::of(patience) };
        match line.request(&request, patience, Some(&self.core.abort), |l| link(&self.core, l))?.0 {
            Reply::Answer(answer) => Ok(answer),
            _ => Err(unexpected(&line.socket, "a control call")),
        }
    }

    fn free(&self, _: Patience) -> Result<(), Error> {
        // Closing the connection frees it too: a service that hangs does not hold this process up.
        let now = Instant::now();
        let Some(mut line) = self.line.enter(&mut Wait::until(now)) else { return Ok(()) };
        line.request(&Request::Free, Patience::Waits(now), None, |_| Ok(())).map(|_| ())
    }

    fn here(&self) -> Option<&Here> {
        None
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::api::Runtime;
    use crate::config::RuntimeConfig;
    use crate::plane::Seat;
    use hw_bridge::os::credentials::as_user;

    /// The service has much time for the other one.
    #[test]
    fn a_call_waits_behind_another_no_longer_than_its_deadline() {
        let mut c = RuntimeConfig { control: false, hbm_bytes: 1 << 20, ..RuntimeConfig::default() };
        c.vars.insert("CCOM_SOCKET_IFNAME".into(), "lo".into());
        let runtime = Runtime::open(c).unwrap();
        let key = GroupKey::of_id(&sandbox::id::draw().unwrap(), 0);
        let rendezvous = Rendezvous::Id(runtime.host().start_root(1, key).unwrap());
        let joining = Joining { rendezvous, key, rank: 0, nranks: 1, on: None };
        let (seat, ..) = Seat::join(runtime.host(), &joining, &AbortToken::new().unwrap(), None).unwrap();
        // A service that does not answer.
        let (stream, mut mute) = UnixStream::pair().unwrap();
        let longest = Duration::from_secs(600);
        let line = Line { stream, socket: "here".into(), calls: Arc::default(), longest, lost: None };
        let served = Served::over(line, seat.core().clone());
        std::thread::scope(|s| {
            let first = s.spawn(|| served.ask(Ask::Info, Patience::Usual));
            mute.read_exact(&mut [0]).unwrap();
            for patience in [Patience::Waits, Patience::Operation] {
                let e = served.ask(Ask::Info, patience(Instant::now() + Duration::from_millis(20))).unwrap_err();
                assert_eq!(e.status(), Status::TIMEOUT, "{e}");
                assert!(e.to_string().contains("has kept its connection busy for"), "{e}");
            }
            drop(mute);
            first.join().unwrap().unwrap_err();
        });
    }

    /// Whoever it is reads nothing: there is no key before the kernel has said who listens.
    #[test]
    fn a_stranger_at_the_services_path_is_told_nothing() {
        let mine = rustix::process::geteuid().as_raw();
        // Root is believed wherever it listens, and only root can listen as somebody else; any other user asks as somebody else.
        let (who, me) = if mine == 0 { (65_533, 0) } else { (mine, mine + 1) };
        let dir = std::env::temp_dir().join(format!("wccl-listener-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).unwrap();
        std::os::unix::fs::chown(&dir, Some(who), None).unwrap();
        let mode = |mode| std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(mode)).unwrap();
        mode(0o777);
        let socket = dir.join("red.sock");
        let listener = as_user(who, || UnixListener::bind(&socket).unwrap()).unwrap();
        let e = reach(&socket, me).unwrap_err().to_string();
        assert!(e.contains(&format!("user {who} listens there, in a directory that others")), "{e}");
        let (mut told, _) = listener.accept().unwrap();
        assert_eq!(told.read(&mut [0]).unwrap(), 0);
        mode(0o711);
        reach(&socket, me).unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
