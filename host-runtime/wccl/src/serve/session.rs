//! One connection of a client: of a runtime, or of one of its communicators.
//!
//! The thread of [`serve`] reads; another one works, so that an abort or the end of the client reaches a request that is
//! under way. At the end, however it comes, the communicator is freed.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use hw_bridge::exec::share::{Entered, Register};
use hw_bridge::group::Owner;
use hw_bridge::memory::segment::Segment;
use hw_bridge::os::credentials::{self, Credentials};
use hw_bridge::os::shown::one_line;
use rustix::event::{PollFd, PollFlags, poll};

use crate::client::wire::{
    Greeting, Hello, Join, LINKS_AT_ONCE, Link, Meeting, PROTOCOL, Reply, Request, Said, Welcome,
};
use crate::error::Error;
use crate::message::{self, MessageError};
use crate::plane::Seat;
use crate::plane::ask::{Answer, Ask};
use crate::plane::join::{Joining, Place, Rendezvous};
use crate::serve::{Hosted, Lessee};
use hw_bridge::os::lock::lock;
use sandbox::abort::AbortToken;
use sandbox::limits::{MAX_HELLO_BYTES, MAX_REQUEST_BYTES, SERVICE_MESSAGE};
use sandbox::objects::ClientProcess;
use sandbox::status::Status;
use sandbox::store::Patience;

/// Characters of a client's that a message repeats.
const MAX_WORDS: usize = 400;

/// Serves a connection to its end.
pub(super) fn serve(hosted: &Arc<Hosted>, stream: &UnixStream, who: &Credentials) {
    let tenant = &hosted.policy.tenant;
    let lessee = match greet(hosted, stream, who) {
        Ok(lessee) => lessee,
        Err(why) => return hosted.log_refusal(&why),
    };
    tracing::debug!(%tenant, pid = %who.pid, uid = who.uid, "a client has connected");
    let why = match AbortToken::new() {
        Ok(abort) => converse(hosted, stream, lessee, &abort),
        Err(e) => format!("its abort event could not be made: {e}"),
    };
    tracing::debug!(%tenant, "a client's connection has ended: {why}");
}

/// Checks which version it speaks. The sentence of a refusal goes to the client too.
fn greet(hosted: &Arc<Hosted>, stream: &UnixStream, who: &Credentials) -> Result<Arc<Lessee>, String> {
    let until = Instant::now() + SERVICE_MESSAGE;
    let checked = (|| {
        let (hello, _) =
            message::receive_within::<Hello>(stream, MAX_HELLO_BYTES, 0, until).map_err(|e| e.to_string())?;
        if hello.protocol != PROTOCOL {
            let theirs = Hello { release: said(&hello.release), ..hello };
            let mine = Hello::mine();
            return Err(format!(
                "it speaks version {} of the protocol (release {}), this service version {} (release {}); use one release \
                 for both",
                theirs.protocol, theirs.release, mine.protocol, mine.release
            ));
        }
        let pidfd =
            credentials::process_of_peer(stream, who.pid).map_err(|e| format!("its process cannot be watched: {e}"))?;
        let session = hw_bridge::os::random::bytes()
            .map(u128::from_le_bytes)
            .map_err(|e| format!("there are no random bytes: {e}"))?;
        let (tenant, pidfd) = (hosted.policy.tenant.clone(), Arc::new(pidfd));
        let enter = |m: &Arc<Register>| m.enter(hosted.runtime.tenant().id);
        let entered = hosted.market.as_ref().map(enter).transpose().map_err(|e| e.to_string())?;
        let lessee = Arc::new(Lessee { tenant, pid: who.pid, pidfd, memory: Mutex::default(), entered });
        let mut runtimes = lock(&hosted.runtimes);
        runtimes.retain(|_, l| l.strong_count() > 0);
        runtimes.insert(session, Arc::downgrade(&lessee));
        Ok((lessee, session))
    })();
    let greeting = match &checked {
        Err(why) => Greeting::Refused { why: why.clone() },
        Ok((lessee, session)) => {
            let tenant = hosted.runtime.tenant();
            let longest = tenant.limits.wall + tenant.limits.entry + SERVICE_MESSAGE;
            Greeting::Welcome(Welcome {
                tenant: tenant.name.clone(),
                tenant_id: tenant.id,
                session: *session,
                sentinel: hosted.runtime.load_error().map(|e| e.sentinel),
                longest_ms: longest.as_millis() as u64,
                network: hosted.policy.network.clone(),
                share: {
                    let share = &hosted.policy.share;
                    (share.weight, share.bandwidth.map(|r| r.0), share.proxy_slots)
                },
                line: lessee.entered.as_ref().map(Entered::line),
            })
        }
    };
    let market: Vec<_> = match &greeting {
        Greeting::Welcome(_) => hosted.market.iter().filter_map(|m| m.market().fd()).collect(),
        Greeting::Refused { .. } => Vec::new(),
    };
    let said = message::send(stream, &greeting, &market, until);
    let (lessee, _) = checked?;
    said.map_err(|e| e.to_string())?;
    Ok(lessee)
}

/// A client's words, as far as a line of the log and a terminal can have them.
fn said(text: &str) -> String {
    one_line(&text.chars().take(MAX_WORDS).collect::<String>())
}

/// Reads until the client, its process or the service ends; answers why it ended.
fn converse(hosted: &Arc<Hosted>, stream: &UnixStream, lessee: Arc<Lessee>, abort: &AbortToken) -> String {
    let busy = AtomicBool::new(false);
    let (orders, todo) = sync_channel(1);
    std::thread::scope(|s| {
        let pidfd = lessee.pidfd.clone();
        let worker = Worker { hosted, stream, lessee, abort, joined: None };
        let spawned =
            std::thread::Builder::new().name("wccl-service".into()).spawn_scoped(s, || worker.run(todo, &busy));
        if let Err(e) = spawned {
            return format!("there is no thread for it: {e}");
        }
        let why = loop {
            let ended = match next(stream, &pidfd, &hosted.stop) {
                Ok(Request::Abort { reason }) => {
                    abort.abort(&said(&reason));
                    continue;
                }
                Ok(request) => {
                    if busy.swap(true, Ordering::AcqRel) {
                        break "it made a request before the one before was answered".into();
                    }
                    match orders.try_send(request) {
                        Ok(()) => continue,
                        Err(TrySendError::Full(_)) => "it made a request before the one before was answered".into(),
                        // The worker could not write to it.
                        Err(TrySendError::Disconnected(_)) => "it does not read".to_string(),
                    }
                }
                Err(why) => why,
            };
            break ended;
        };
        // Nobody waits for what is under way, and an ending service for nothing.
        if busy.load(Ordering::Acquire) || hosted.ending.load(Ordering::Acquire) {
            abort.abort(&why);
        }
        // Whoever writes to it meanwhile is not to wait.
        let _ = stream.shutdown(std::net::Shutdown::Both);
        drop(orders);
        why
    })
}

/// The next request; the error is why there is none.
fn next(stream: &UnixStream, process: &OwnedFd, stop: &OwnedFd) -> Result<Request, String> {
    loop {
        let mut fds =
            [stream.as_fd(), process.as_fd(), stop.as_fd()].map(|f| PollFd::from_borrowed_fd(f, PollFlags::IN));
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(format!("waiting for it failed: {e}")),
            Ok(_) if !fds[2].revents().is_empty() => return Err("the service has ended".into()),
            Ok(_) if !fds[1].revents().is_empty() => return Err("the client's process has ended".into()),
            Ok(_) => {}
        }
        let until = Instant::now() + SERVICE_MESSAGE;
        return match message::receive_within::<Request>(stream, MAX_REQUEST_BYTES, 0, until) {
            Ok((request, _)) => Ok(request),
            Err(MessageError::Closed) => Err("the client has closed its connection".into()),
            Err(e) => Err(e.to_string()),
        };
    }
}

struct Worker<'a> {
    hosted: &'a Arc<Hosted>,
    stream: &'a UnixStream,
    lessee: Arc<Lessee>,
    abort: &'a AbortToken,
    joined: Option<Arc<Seat>>,
}

impl Worker<'_> {
    fn run(mut self, todo: Receiver<Request>, busy: &AtomicBool) {
        for request in todo {
            let answer = self.answer(request);
            busy.store(false, Ordering::Release);
            let reply = answer.unwrap_or_else(|e| Reply::Failed { status: e.status().0, what: e.to_string() });
            // Links that were made before a request failed are made.
            if let Err(e) = self.links().and_then(|()| self.say(reply)) {
                tracing::debug!(tenant = %self.hosted.policy.tenant, "a client was not answered: {e}");
                break;
            }
        }
        // Whoever reads learns that nobody works any more.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }

    fn say(&self, reply: Reply) -> Result<(), MessageError> {
        let granted = match (&reply, &self.joined) {
            (Reply::Joined { .. }, Some(plane)) => {
                let e = &plane.core.endpoint;
                [e.control().segment(), e.hbm().segment()].into_iter().filter_map(|s| s.fd()).collect()
            }
            _ => Vec::new(),
        };
        self.send(reply, &granted)
    }

    fn send(&self, reply: Reply, fds: &[BorrowedFd<'_>]) -> Result<(), MessageError> {
        let calls = self.hosted.runtime.component_calls();
        message::send(self.stream, &Said { calls, reply }, fds, Instant::now() + SERVICE_MESSAGE)
    }

    /// Passes new links on.
    fn links(&self) -> Result<(), MessageError> {
        let Some(plane) = &self.joined else { return Ok(()) };
        for some in plane.core.take_links().chunks(LINKS_AT_ONCE) {
            let links = some.iter().map(|g| Link { rank: g.rank, control: g.control.1, hbm: g.hbm.1 }).collect();
            let fds: Vec<_> = some.iter().flat_map(|g| [&g.control.0, &g.hbm.0, &g.pidfd]).map(AsFd::as_fd).collect();
            self.send(Reply::Links(links), &fds)?;
        }
        Ok(())
    }

    fn answer(&mut self, request: Request) -> Result<Reply, Error> {
        let runtime = &self.hosted.runtime;
        let new_work = matches!(request, Request::UniqueId { .. } | Request::Join(_));
        if new_work && self.hosted.ending.load(Ordering::Acquire) {
            let what = "the service is ending: it makes no new communicators".into();
            return Err(Error::Service { what, status: Status::CLOSED });
        }
        match request {
            Request::UniqueId { nranks, key } => {
                let n = usize::try_from(nranks)
                    .map_err(|_| Error::Usage(format!("a group of {nranks} ranks cannot be")))?;
                Ok(Reply::UniqueId(runtime.host().start_root(n, key)?.to_vec()))
            }
            Request::Join(join) => self.join(join),
            Request::Ask { ask: Ask::Affinity { .. }, .. } => Err(Error::Usage(
                "set_affinity binds the thread that the plugin runs on, which is the service's; bind this process's own \
                 threads by the system's means (taskset, sched_setaffinity)"
                    .into(),
            )),
            Request::Ask { ask, bound } => match &self.joined {
                Some(plane) => {
                    let (plans, patience) = (matches!(ask, Ask::BuildGraph | Ask::Expand), bound.patience());
                    // No swap comes between what is planned and what is kept of it.
                    let _inside = plans.then(|| plane.enter("an entry of the library", patience)).transpose()?;
                    let answer = plane.ask(ask, patience)?;
                    if plans {
                        plane.keep_checkpoint(Patience::Usual);
                    }
                    Ok(Reply::Answer(answer))
                }
                None => Err(Error::Usage("this connection has joined no communicator".into())),
            },
            Request::Free => {
                // Its end has the library free it.
                self.joined = None;
                Ok(Reply::Answer(Answer::Done))
            }
            Request::Abort { .. } => Err(Error::Bug("an abort came to the worker".into())),
        }
    }

    fn join(&mut self, j: Join) -> Result<Reply, Error> {
        let runtime = &self.hosted.runtime;
        if self.joined.is_some() {
            return Err(Error::Usage("this connection has joined a communicator already".into()));
        }
        let found = lock(&self.hosted.runtimes).get(&j.session).and_then(std::sync::Weak::upgrade);
        // Its runtime's connection is another one, of the same process.
        let lessee = found.filter(|l| l.pid == self.lessee.pid).ok_or_else(|| {
            Error::Usage("this connection names no runtime of its process that has a connection".into())
        })?;
        let rendezvous = match j.at {
            Meeting::Root(root) => Rendezvous::Root(root),
            Meeting::Id(id) => {
                Rendezvous::Id(id.try_into().map_err(|_| Error::Usage("an id has another length".into()))?)
            }
        };
        let (rank, nranks) = (j.rank, j.nranks);
        let place = match j.on {
            Some(place) => place,
            None => Place::of(runtime.host(), rank.min(nranks.saturating_sub(1)), nranks.max(1))?,
        };
        let hbm = self.hosted.lease(place.core, &lessee)?;
        let owner = Owner { pid: lessee.pid.here().unwrap_or(0), asymmetric: j.asymmetric, mark: j.mark };
        let client = ClientProcess { owner, pidfd: lessee.pidfd.clone(), hbm };
        self.lessee = lessee;
        let joining = Joining { rendezvous, key: j.key, rank, nranks, on: Some(place) };
        let (plane, place, _inside) = Seat::join(runtime.host(), &joining, self.abort, Some(client))?;
        let core = &plane.core;
        let bytes = |s: &Segment| s.len() as u64;
        let (control, hbm) = (bytes(core.endpoint.control().segment()), bytes(core.endpoint.hbm().segment()));
        let (comm, info) = (core.id, plane.plan().info.clone());
        self.joined = Some(plane);
        Ok(Reply::Joined { comm, place, control, hbm, info: Answer::Info(Box::new(info)) })
    }
}
