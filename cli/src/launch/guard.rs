//! The process between a launcher and its ranks: it starts them, says how they end, and ends all they ever started, also when
//! the launcher is gone, however it went: signal, crash, SIGKILL.
//!
//! ```text
//! launcher ── guard ─┬─ rank 0 ── what it starts …
//!                    ├─ rank 1
//!                    └─ what has lost its parent
//! ```
//!
//! The guard is a subreaper: a process below it that loses its parent becomes the guard's child, in whatever session or
//! process group it is. So [`tree::below`] is all that is left of a job, and nothing else. Orders and the ranks' own stdin,
//! stdout and stderr come over a socket, the guard's stdin; its end means that the launcher is gone.
//!
//! The end: ranks are asked by a signal and have the grace; when they are gone, what they left is asked by SIGTERM; at the
//! end of the grace all gets SIGKILL, until nothing is below. Stopped processes are continued, so that they hear it.
//!
//! Ranks stay in the process group of the launcher, so that keys at the terminal reach them and rank 0 can read from it.
//! The guard leaves that group once all are started: what ends a whole group does not end it.
//!
//! If the guard itself is killed, the kernel kills the ranks (`PR_SET_PDEATHSIG`), and what they had started comes to the
//! launcher, a subreaper too, which kills it. Not covered: guard and launcher killed at once, and processes that some rank
//! started with other rights than this user's.

use std::collections::HashSet;
use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use hw_bridge::os::signals::{Signals, dies_with_parent};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, Signal, WaitOptions, getpgid, getpgrp, getpid, kill_process, set_child_subreaper, setpgid, wait,
};
use serde::{Deserialize, Serialize};
use wccl::message::{MessageError, receive, send};

use crate::launch::tree;

/// How long the other side of the socket may take to read or to finish what it began to say.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long starting a program may take; its file may lie far away.
const START: Duration = Duration::from_secs(120);
/// How long ranks may take to stop by themselves before they are stopped.
const STOP: Duration = Duration::from_millis(500);
/// How often one looks whether what ranks left has ended: its ends do not all come to the guard.
const LOOK: Duration = Duration::from_millis(50);

/// Signals that are handed on to the ranks.
pub const HANDED_ON: [Signal; 9] = [
    Signal::INT,
    Signal::TERM,
    Signal::QUIT,
    Signal::HUP,
    Signal::USR1,
    Signal::USR2,
    Signal::WINCH,
    Signal::TSTP,
    Signal::CONT,
];

/// What the launcher asks for. Signals are numbers.
#[derive(Debug, Serialize, Deserialize)]
enum Order {
    /// Start a rank; its stdin, stdout and stderr come beside. Answered by `Started` or `NotStarted`.
    Start { rank: usize },
    /// All are started.
    All,
    /// Send this to every rank, or, if the launcher's process group has it already, to those that have left that.
    Signal { signal: i32, reached: bool },
    /// Stop the ranks, or, if they have the signal already, wait until they have stopped. Answered by `Stopped`.
    Stop { send: bool },
    /// End all, and begin with this signal, as above. Answered by `Done`.
    End { signal: i32, reached: bool },
    /// The grace is over.
    Kill,
}

/// What the guard says.
#[derive(Debug, Serialize, Deserialize)]
pub enum Event {
    /// The rank runs.
    Started {
        /// Its process.
        pid: i32,
    },
    /// The program could not be started.
    NotStarted {
        /// The kernel's number, 0 if there is none.
        code: i32,
        /// What went wrong.
        why: String,
    },
    /// Ranks have ended.
    RankEnd(Vec<RankEnd>),
    /// The ranks have stopped.
    Stopped,
    /// Nothing is left of the job, but for what cannot be ended.
    Done {
        /// Some did not end within the grace and were killed.
        forced: bool,
        /// Processes that cannot be ended.
        left: Vec<i32>,
        /// Why only the ranks themselves were looked after, if so.
        blind: Option<String>,
    },
}

/// How a rank ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankEnd {
    /// Which.
    pub rank: usize,
    /// Its process.
    pub pid: i32,
    /// As the kernel says it to a parent.
    pub status: i32,
}

/// The launcher's side.
#[derive(Debug)]
pub struct Guard {
    pid: u32,
    stream: UnixStream,
}

impl Guard {
    /// Starts a guard of ranks that run `program` with `args`, in an environment with `vars`.
    ///
    /// # Errors
    /// This program cannot be started again.
    pub fn start(
        program: &OsString,
        args: &[OsString],
        vars: &[(&str, OsString)],
        grace: Duration,
    ) -> anyhow::Result<Guard> {
        let exe = std::env::current_exe().context("finding this program's file")?;
        let (stream, far) = UnixStream::pair().context("making a socket to the process that guards the ranks")?;
        let mut command = Command::new(exe);
        command.args(["__guard", "--grace", &grace.as_secs_f64().to_string(), "--"]).arg(program).args(args);
        command.envs(vars.iter().map(|(k, v)| (*k, v))).stdin(OwnedFd::from(far)).stdout(Stdio::null());
        let child = command.spawn().context("starting the process that guards the ranks")?;
        Ok(Guard { pid: child.id(), stream })
    }

    /// Its process. The end of it is the caller's to wait for.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// What to poll for events.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    fn order(&self, order: &Order, fds: &[BorrowedFd<'_>]) -> anyhow::Result<()> {
        send(&self.stream, order, fds, Instant::now() + PATIENCE).with_context(|| self.about())
    }

    fn about(&self) -> String {
        format!("the process that guards the ranks (pid {}) does not answer", self.pid)
    }

    /// What it says next.
    ///
    /// # Errors
    /// It says nothing for long, or is gone.
    pub fn event(&self) -> anyhow::Result<Event> {
        receive(&self.stream, 0, Instant::now() + START).map(|(e, _)| e).with_context(|| self.about())
    }

    /// Orders the start of a rank, which [`event`](Guard::event) reports.
    ///
    /// # Errors
    /// The guard is gone; so for all orders.
    pub fn start_rank(&self, rank: usize, stdio: [BorrowedFd<'_>; 3]) -> anyhow::Result<()> {
        self.order(&Order::Start { rank }, &stdio)
    }

    /// Says that all ranks were started.
    ///
    /// # Errors
    /// The guard is gone.
    pub fn all_started(&self) -> anyhow::Result<()> {
        self.order(&Order::All, &[])
    }

    /// Sends a signal to every rank.
    ///
    /// # Errors
    /// The guard is gone.
    pub fn signal(&self, signal: Signal, reached: bool) -> anyhow::Result<()> {
        self.order(&Order::Signal { signal: signal.as_raw(), reached }, &[])
    }

    /// Stops the ranks; `send` false: they have SIGTSTP already.
    ///
    /// # Errors
    /// The guard is gone.
    pub fn stop(&self, send: bool) -> anyhow::Result<()> {
        self.order(&Order::Stop { send }, &[])
    }

    /// Begins the end of all, by this signal; `reached`: the launcher's process group has it already.
    ///
    /// # Errors
    /// The guard is gone.
    pub fn end(&self, signal: Signal, reached: bool) -> anyhow::Result<()> {
        self.order(&Order::End { signal: signal.as_raw(), reached }, &[])
    }

    /// Ends the grace.
    ///
    /// # Errors
    /// The guard is gone.
    pub fn kill(&self) -> anyhow::Result<()> {
        self.order(&Order::Kill, &[])
    }
}

/// Arguments of the hidden subcommand.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Seconds between the first request to end and SIGKILL.
    #[arg(long, value_parser = crate::size::seconds)]
    grace: Duration,
    /// What a rank is.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

/// A rank that runs.
struct Rank {
    rank: usize,
    pid: Pid,
    stopped: bool,
}

/// The end has begun.
struct Ending {
    /// When SIGKILL comes.
    until: Instant,
    /// What of that which the ranks left was asked to end. A shell that was about to start a program may not have heard it.
    asked: HashSet<(i32, u64, String)>,
    forced: bool,
}

/// The guard's side.
struct Below {
    program: Vec<OsString>,
    grace: Duration,
    /// The launcher's process group, in which ranks begin.
    group: Pid,
    running: Vec<Rank>,
    /// When ranks that have not stopped by themselves are stopped.
    stopping: Option<Instant>,
    ending: Option<Ending>,
}

impl Below {
    fn start(&mut self, rank: usize, stdio: Vec<OwnedFd>) -> anyhow::Result<i32> {
        let (program, args) = self.program.split_first().context("no program")?;
        let [stdin, stdout, stderr] = <[OwnedFd; 3]>::try_from(stdio).ok().context("a rank without stdin or output")?;
        let mut command = Command::new(program);
        command.args(args).env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
        command.stdin(stdin).stdout(stdout).stderr(stderr);
        // Tied to this thread, the only one, which lives as long as the guard.
        dies_with_parent(&mut command);
        let pid = command.spawn()?.id() as i32;
        self.running.push(Rank {
            rank,
            pid: Pid::from_raw(pid).context("a process without a number")?,
            stopped: false,
        });
        Ok(pid)
    }

    /// To ranks that have not been waited for, so that the number is theirs; `reached`: not to those in the launcher's group.
    fn send(&self, signal: i32, reached: bool) {
        if let Some(s) = Signal::from_named_raw(signal) {
            let left = |r: &&Rank| !reached || getpgid(Some(r.pid)).is_ok_and(|group| group != self.group);
            for r in self.running.iter().filter(left) {
                // One that has ended meanwhile needs none.
                let _ = kill_process(r.pid, s);
            }
        }
    }

    fn end(&mut self, signal: Option<(i32, bool)>) {
        if let Some((signal, reached)) = signal {
            self.send(signal, reached);
        }
        self.send(Signal::CONT.as_raw(), false);
        let now = Instant::now();
        let until = now.checked_add(self.grace).unwrap_or(now);
        self.ending.get_or_insert(Ending { until, asked: HashSet::new(), forced: false });
        self.stopping = None;
    }

    /// Takes note of what has ended or stopped; answers the ranks that have ended.
    fn reap(&mut self) -> Vec<RankEnd> {
        let mut ended = Vec::new();
        // No children at all is an error, and means the same as none that has changed.
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG | WaitOptions::UNTRACED | WaitOptions::CONTINUED) {
            let Some(i) = self.running.iter().position(|r| r.pid == pid) else { continue };
            if status.stopped() || status.continued() {
                self.running[i].stopped = status.stopped();
            } else {
                let rank = self.running.remove(i).rank;
                ended.push(RankEnd { rank, pid: pid.as_raw_nonzero().get(), status: status.as_raw() });
            }
        }
        ended
    }

    /// Whether the ranks have stopped, after they were to.
    fn stopped(&mut self) -> bool {
        let Some(until) = self.stopping else { return false };
        let late = Instant::now() >= until;
        if !late && self.running.iter().any(|r| !r.stopped) {
            return false;
        }
        for r in self.running.iter().filter(|r| !r.stopped) {
            let _ = kill_process(r.pid, Signal::STOP);
        }
        self.stopping = None;
        true
    }

    /// Goes on with the end; the event when it is done.
    fn finish(&mut self) -> Option<Event> {
        let ending = self.ending.as_mut()?;
        let now = Instant::now();
        let late = now >= ending.until;
        if !late && !self.running.is_empty() {
            return None;
        }
        let (left, blind) = match tree::below() {
            Ok(left) => (left, None),
            Err(e) => (Vec::new(), Some(format!("{e:#}"))),
        };
        let nothing = left.is_empty() && self.running.is_empty();
        if nothing || now >= ending.until + tree::GONE {
            let left = left.iter().map(|p| p.pid).collect();
            return Some(Event::Done { forced: ending.forced, left, blind });
        }
        if late {
            ending.forced = true;
            for p in &left {
                p.send(Signal::KILL);
            }
            // Also where /proc does not show them.
            self.send(Signal::KILL.as_raw(), false);
        } else {
            for p in left {
                if !ending.asked.contains(&p.identity) {
                    p.send(Signal::TERM);
                    p.send(Signal::CONT);
                    ending.asked.insert(p.identity);
                }
            }
        }
        None
    }

    /// When to look again if nothing happens.
    fn next_look(&self) -> Option<Duration> {
        let now = Instant::now();
        let ending = self.ending.as_ref().map(|e| match e.until.saturating_duration_since(now) {
            Duration::ZERO => tree::LOOK,
            left if self.running.is_empty() => left.min(LOOK),
            left => left,
        });
        let stopping = self.stopping.map(|s| s.saturating_duration_since(now));
        ending.into_iter().chain(stopping).min()
    }

    /// Follows one order; the answer, if it has one at once.
    fn follow(&mut self, order: Order, fds: Vec<OwnedFd>) -> Option<Event> {
        match order {
            Order::Start { rank } => {
                return Some(match self.start(rank, fds) {
                    Ok(pid) => Event::Started { pid },
                    Err(e) => {
                        let code = e.downcast_ref::<std::io::Error>().and_then(|e| e.raw_os_error()).unwrap_or(0);
                        Event::NotStarted { code, why: format!("{e:#}") }
                    }
                });
            }
            // A group of its own; if the kernel does not give it one, the guard is in the launcher's.
            Order::All => {
                let _ = setpgid(None, None);
            }
            Order::Signal { signal, reached } => {
                if signal == Signal::CONT.as_raw() {
                    self.stopping = None;
                }
                self.send(signal, reached);
            }
            Order::Stop { send } => {
                if send {
                    self.send(Signal::TSTP.as_raw(), false);
                }
                self.stopping = Some(Instant::now() + STOP);
            }
            Order::End { signal, reached } => self.end(Some((signal, reached))),
            Order::Kill => {
                self.end(None);
                if let Some(ending) = &mut self.ending {
                    ending.until = ending.until.min(Instant::now());
                }
            }
        }
        None
    }
}

/// The hidden subcommand.
///
/// # Errors
/// It was not started by a launcher, or the kernel refuses what a guard needs.
pub fn serve(args: &Args) -> anyhow::Result<ExitCode> {
    // What is sent to all of a terminal or a container is the launcher's to hear.
    let taken: Vec<Signal> = HANDED_ON.into_iter().chain([Signal::CHILD]).collect();
    let signals = Signals::take(&taken).context("taking signals over")?;
    set_child_subreaper(Some(getpid())).context("becoming the parent of processes that lose theirs")?;
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().context("taking the launcher's socket")?;
    ensure!(rustix::net::sockopt::socket_type(&stdin).is_ok(), "the guard is started by wccl itself");
    let stream = UnixStream::from(stdin);
    let (program, grace) = (args.program.clone(), args.grace);
    let mut below = Below { program, grace, group: getpgrp(), running: Vec::new(), stopping: None, ending: None };
    let mut launcher = Some(stream);
    loop {
        let look = below.next_look();
        let look = look.map(|l| Timespec { tv_sec: l.as_secs() as i64, tv_nsec: i64::from(l.subsec_nanos()) });
        let mut fds = vec![PollFd::new(&signals, PollFlags::IN)];
        fds.extend(launcher.as_ref().map(|l| PollFd::new(l, PollFlags::IN)));
        match poll(&mut fds, look.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e).context("waiting for the ranks"),
        }
        let ordered = fds.get(1).is_some_and(|f| !f.revents().is_empty());
        while signals.next().context("reading signals")?.is_some() {}
        let mut events = Vec::new();
        let ended = below.reap();
        if !ended.is_empty() {
            events.push(Event::RankEnd(ended));
        }
        let mut gone = false;
        if ordered && let Some(stream) = &launcher {
            match receive(stream, 3, Instant::now() + PATIENCE) {
                Ok((order, fds)) => events.extend(below.follow(order, fds)),
                Err(_) => gone = true,
            }
        }
        if below.stopped() {
            events.push(Event::Stopped);
        }
        let done = below.finish();
        let last = done.is_some();
        for event in events.iter().chain(&done) {
            let told = |l: &UnixStream| -> Result<(), MessageError> { send(l, event, &[], Instant::now() + PATIENCE) };
            gone |= launcher.as_ref().is_some_and(|l| told(l).is_err());
        }
        if last {
            return Ok(ExitCode::SUCCESS);
        }
        if gone {
            launcher = None;
            below.end(Some((Signal::TERM.as_raw(), false)));
        }
    }
}
