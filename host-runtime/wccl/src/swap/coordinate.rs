//! Whoever wants a swap: finds the participants, makes the ballot, hears what became of it.
//!
//! The coordinator decides nothing that the participants could not decide without it; it may die at any time.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use hw_bridge::group::ballot::{Ballot, Decision};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::message::{self, MessageError};
use crate::swap::control::{self, Answer, Question};
use crate::swap::{Kind, LONGEST, Outcome, Request, Status};
use sandbox::limits::MESSAGE_PATIENCE;

/// Pause before a socket that has closed a connection is asked again.
const CLOSING: Duration = Duration::from_millis(5);

/// What is wanted of a tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The tenant's name.
    pub tenant: String,
    /// What is replaced.
    pub kind: Kind,
    /// The new plugin's file; `None` goes back to the one in probation. A name without a folder is looked up in the policy of a
    /// tenant that has one, and is a file of the current folder else.
    pub plugin: Option<PathBuf>,
    /// Why it goes back.
    pub why: String,
    /// Leave the plans of the old plugin behind: for one that hangs or has stopped. Rings stay as they are; what needs the
    /// bootstrap's connections (groups, `bootstrap_*`) fails afterwards.
    pub stateless: bool,
    /// Do not wait for calls that are inside the old plugin; they end with an error. Needs `stateless`.
    pub force: bool,
    /// Only ask what would happen.
    pub dry: bool,
    /// Bound of everything before the ranks stand still.
    pub timeout: Duration,
    /// Bound of standing still, and of shutting the control plane; a plugin that is inside then has half a second more.
    pub quiesce: Duration,
    /// How long the old plugin stays beside the new one, to serve again if that stops.
    pub probation: Duration,
}

impl Order {
    /// An order with the usual bounds (30 s, 2 s, 10 s), without a plugin yet.
    pub fn new(tenant: &str, kind: Kind) -> Order {
        Order {
            tenant: tenant.into(),
            kind,
            plugin: None,
            why: String::new(),
            stateless: false,
            force: false,
            dry: false,
            timeout: Duration::from_secs(30),
            quiesce: Duration::from_secs(2),
            probation: Duration::from_secs(10),
        }
    }

    /// The order to replace the collectives library of `tenant` by the plugin in `file`.
    pub fn transport(tenant: &str, file: impl Into<PathBuf>) -> Order {
        Order { plugin: Some(file.into()), ..Order::new(tenant, Kind::Transport) }
    }
}

/// One participant of a swap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// What it said of itself before.
    pub status: Status,
    /// What became of the swap there; `Err` if it did not say.
    pub outcome: Result<Outcome, String>,
}

/// What became of a swap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Its number.
    pub id: u64,
    /// All participants that live have the new plugin; otherwise all have the old one.
    pub committed: bool,
    /// Why not; empty if it was.
    pub reason: String,
    /// The participants.
    pub members: Vec<Member>,
}

impl Report {
    /// The longest time that operations stood still on a participant.
    pub fn pause(&self) -> Duration {
        let pause = |m: &Member| match &m.outcome {
            Ok(Outcome::Swapped { pause, .. }) => Some(*pause),
            _ => None,
        };
        self.members.iter().filter_map(pause).max().unwrap_or_default()
    }
}

fn refused(tenant: &str, reason: impl Into<String>) -> Error {
    Error::Swap { tenant: tenant.into(), reason: reason.into() }
}

/// What every runtime of a tenant says of itself, in the order of their ranks.
///
/// # Errors
/// [`Error::Swap`] if there is none, or one does not answer.
pub fn status(tenant: &str) -> Result<Vec<Status>, Error> {
    Ok(meet(tenant)?.into_iter().map(|(_, s)| s).collect())
}

/// Asks for a status. One that closes the connection may be about to close its socket: it is asked again until it answers, or the
/// kernel says that nobody listens.
fn status_of(found: &control::Found) -> Result<(UnixStream, Answer), MessageError> {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
    let begun = Instant::now();
    loop {
        let answer = control::ask(found, &Question::Status, &[]);
        let closed = match &answer {
            Err(MessageError::Closed) => true,
            Err(MessageError::System(e)) => matches!(e.kind(), ConnectionReset | BrokenPipe),
            _ => false,
        };
        if !closed || begun.elapsed() >= MESSAGE_PATIENCE {
            return answer;
        }
        std::thread::sleep(CLOSING);
    }
}

fn meet(tenant: &str) -> Result<Vec<(UnixStream, Status)>, Error> {
    let mut all = Vec::new();
    let (found, passed_over) = control::find(tenant)?;
    for found in found {
        match status_of(&found) {
            Ok((stream, Answer::Status(s))) if s.tenant == tenant => all.push((stream, s)),
            // A name that was shortened may be another's.
            Ok((_, Answer::Status(_))) => {}
            Ok(_) => return Err(refused(tenant, format!("pid {} answered something else than its status", found.pid))),
            // It has ended meanwhile, or left its socket behind.
            Err(MessageError::Ended) => {}
            Err(_) if found.gone() => {}
            Err(e) => {
                let stopped =
                    if hw_bridge::os::process::is_stopped(found.pid) { "; its process is stopped" } else { "" };
                return Err(refused(tenant, format!("pid {} does not answer: {e}{stopped}", found.pid)));
            }
        }
    }
    if all.is_empty() {
        let passed_over: Vec<String> = passed_over.iter().map(|why| format!("; {why}")).collect();
        return Err(refused(
            tenant,
            format!(
                "no runtime of that name is open on this machine, for this user, with a control socket (WCCL_CONTROL=0 has none){}",
                passed_over.concat()
            ),
        ));
    }
    all.sort_by_key(|(_, s)| (s.ranks.first().map(|r| r.0), s.pid));
    Ok(all)
}

/// Has whatever swap of a tenant is under way given up; answers how many participants did so.
///
/// # Errors
/// [`Error::Swap`] if there is none, or it is decided.
pub fn cancel(tenant: &str) -> Result<usize, Error> {
    let (mut done, mut why) = (0, String::new());
    for (stream, status) in meet(tenant)? {
        match control::ask_on(&stream, &Question::Cancel, &[]) {
            Ok(Answer::Done) => done += 1,
            Ok(Answer::Refused(reason)) => why = format!("there is nothing to cancel on pid {}: {reason}", status.pid),
            Ok(_) => why = format!("pid {} answered something else", status.pid),
            Err(e) => why = format!("pid {}: {e}", status.pid),
        }
    }
    if done > 0 { Ok(done) } else { Err(refused(tenant, why)) }
}

/// Makes a swap, or asks what it would do, and answers what became of it: that it was refused is a [`Report`] too.
///
/// # Errors
/// [`Error::Swap`] if it cannot even begin: no participant, one that does not answer, another swap under way;
/// [`Error::System`].
pub fn coordinate(order: &Order) -> Result<Report, Error> {
    let tenant = &order.tenant;
    let folder = match order.plugin.as_deref().is_some_and(|p| !p.is_absolute()) {
        true => std::env::current_dir()
            .map_err(|source| Error::System { what: "finding the current folder".into(), source })?,
        false => PathBuf::new(),
    };
    let mut met = meet(tenant)?;
    if order.plugin.is_none() {
        // Whoever was opened since the swap has nothing to go back to. One that has not ended it yet is none of those.
        met.retain(|(_, s)| s.probation.is_some() || !s.swap.is_empty());
    }
    if met.is_empty() {
        return Err(refused(tenant, "there is no plugin in probation to go back to"));
    }
    let system = |what: &str, source: std::io::Error| Error::System { what: what.into(), source };
    let number = hw_bridge::os::random::bytes().map_err(|e| system("reading a random number for a swap", e))?;
    let id = u64::from_le_bytes(number) | 1;
    let ballot = Ballot::create(id, met.len()).map_err(|e| refused(tenant, e.to_string()))?;
    let Some(fd) = ballot.fd() else { return Err(Error::Bug("a ballot that was just made has no descriptor".into())) };
    let pids: Vec<u32> = met.iter().map(|(_, s)| s.pid).collect();
    for (place, (stream, status)) in met.iter().enumerate() {
        let request = Request { id, place, pids: pids.clone(), order: order.clone(), folder: folder.clone() };
        let why = match control::ask_on(stream, &Question::Swap(request), &[fd]) {
            Ok(Answer::Done) => continue,
            Ok(Answer::Refused(why)) => why,
            Ok(_) => "it answered something else".into(),
            Err(e) => e.to_string(),
        };
        ballot.decide(Decision::Abort);
        return Err(refused(tenant, format!("pid {}: {why}", status.pid)));
    }
    let mut outcomes = hear(order, &ballot, &met);
    let members: Vec<Member> =
        met.into_iter().map(|(_, status)| Member { status, outcome: outcomes.remove(0) }).collect();
    let committed = ballot.decision() == Some(Decision::Commit);
    let reason = if committed { String::new() } else { reason_of(&ballot, &members) };
    Ok(Report { id, committed, reason, members })
}

/// Hears from all participants. One that ends before the decision is a reason to give up at once.
fn hear(order: &Order, ballot: &Ballot, met: &[(UnixStream, Status)]) -> Vec<Result<Outcome, String>> {
    let mut heard: Vec<Option<Result<Outcome, String>>> = vec![None; met.len()];
    let until = Instant::now() + order.timeout.min(LONGEST) + order.quiesce.min(LONGEST) * 2 + MESSAGE_PATIENCE;
    while heard.iter().any(Option::is_none) {
        let open: Vec<usize> = (0..met.len()).filter(|i| heard[*i].is_none()).collect();
        let mut fds: Vec<PollFd<'_>> =
            open.iter().map(|i| PollFd::from_borrowed_fd(met[*i].0.as_fd(), PollFlags::IN)).collect();
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut fds, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => continue,
            Ok(n) if n > 0 => {}
            _ => {
                ballot.decide(Decision::Abort);
                for i in open {
                    heard[i] = Some(Err(
                        "it did not say in time what became of it; it obeys the decision when it goes on".into(),
                    ));
                }
                break;
            }
        }
        let ready: Vec<usize> =
            open.iter().zip(&fds).filter(|(_, f)| !f.revents().is_empty()).map(|(i, _)| *i).collect();
        for i in ready {
            let got = message::receive::<Outcome>(&met[i].0, 0, Instant::now() + MESSAGE_PATIENCE);
            heard[i] = Some(got.map(|(outcome, _)| outcome.shown()).map_err(|e| {
                ballot.decide(Decision::Abort);
                format!("it ended, or closed its socket, before it said what became of it ({e})")
            }));
        }
    }
    heard.into_iter().map(|h| h.unwrap_or_else(|| Err("it was not heard".into()))).collect()
}

/// Why a swap was not committed: what the participants wrote into the ballot first of all.
fn reason_of(ballot: &Ballot, members: &[Member]) -> String {
    let mut said = members.iter().enumerate().filter_map(|(v, m)| Some((m.status.pid, ballot.reason(v)?)));
    if let Some((pid, why)) = said.next() {
        return format!("pid {pid}: {why}");
    }
    let lost = members.iter().find_map(|m| Some((m.status.pid, m.outcome.as_ref().err()?)));
    match lost {
        Some((pid, why)) => format!("pid {pid}: {why}"),
        None => "it was cancelled".into(),
    }
}
