//! A group of processes on this machine, one a rank: started, watched, and ended together.
//!
//! The first rank that fails ends all others, and is named. The [`guard`](crate::launch::guard) is the parent of the ranks; it ends all
//! that they started, also if this process goes, by whatever way.
//!
//! Signals to this process are the ranks': INT, TERM and QUIT are handed on and begin the end, the others are handed on and that is
//! all. Those that the kernel sends for a key at the terminal have reached the ranks, which are in the same process group.
//! What was ignored at the start (`nohup`) stays ignored.

use std::ffi::OsString;
use std::io::PipeReader;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use hw_bridge::os::control_group::{Groups, Kills};
use hw_bridge::os::signals::{Arrived, Signals, is_ignored};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, WaitOptions, getpid, kill_process, set_child_subreaper, wait};

use crate::launch::guard::{Event, Guard, HANDED_ON, RankEnd};
use crate::launch::output::Printing;
use crate::launch::tree;

/// Between the first request to end and SIGKILL, unless the user says otherwise.
pub const GRACE: Duration = Duration::from_secs(30);
/// How long the other ranks may go on when one has failed: to say what they saw of it, and to write flight records.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// After so long a second Ctrl-C means that the user does not want to wait: some tools send one signal twice at once.
const AGAIN: Duration = Duration::from_millis(500);

/// What to start.
#[derive(Debug)]
pub struct Launch {
    /// Ranks.
    pub ranks: usize,
    /// The program.
    pub program: OsString,
    /// Its arguments, the same for all ranks.
    pub args: Vec<OsString>,
    /// Variables beside those of the group.
    pub vars: Vec<(&'static str, OsString)>,
    /// Prefix each line of output with the rank.
    pub tag: bool,
    /// Rank 0 reads this program's stdin; the others read nothing.
    pub stdin: bool,
    /// What ranks, and what they started, have to end in before they are killed.
    pub grace: Duration,
}

/// A rank failed: the exit code that says so, and the sentence.
#[derive(Debug)]
pub struct JobFailed {
    /// The rank's exit code, or 128 and the signal that ended it.
    pub code: u8,
    what: String,
}

impl std::fmt::Display for JobFailed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for JobFailed {}

/// This program was asked to end by a signal, and has ended its ranks.
#[derive(Debug)]
pub struct Interrupted {
    /// Which.
    pub signal: Signal,
    what: Option<String>,
}

impl Interrupted {
    /// What there is to say beside it.
    pub fn said(&self) -> Option<&str> {
        self.what.as_deref()
    }
}

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ended by {}", name(self.signal.as_raw()))
    }
}

impl std::error::Error for Interrupted {}

impl Launch {
    /// Runs the group to its end.
    ///
    /// # Errors
    /// The program cannot be started; a rank failed ([`JobFailed`]: the sentence names it); a signal ended it ([`Interrupted`]).
    pub fn run(&self) -> anyhow::Result<()> {
        let taken: Vec<Signal> = HANDED_ON.into_iter().filter(|s| !is_ignored(*s)).chain([Signal::CHILD]).collect();
        // Before the threads that print.
        let signals = Signals::take(&taken).context("taking signals over")?;
        let ended = self.run_with(&signals);
        signals.give_back().context("giving signals back")?;
        ended
    }

    fn run_with(&self, signals: &Signals) -> anyhow::Result<()> {
        // If the guard is killed, what is left of the ranks comes here.
        set_child_subreaper(Some(getpid())).context("becoming the parent of processes that lose theirs")?;
        let mut vars = group_variables(self.ranks)?;
        vars.extend(self.vars.iter().cloned());
        let guard = Guard::start(&self.program, &self.args, &vars, self.grace)?;
        let mut watch = Watch {
            group: self,
            signals,
            guard,
            guard_ended: false,
            running: 0,
            failed: None,
            asked: None,
            ending: false,
            hurried: false,
            suspends: false,
            done: None,
            kills: Groups::own().kills(),
        };
        let mut printing = self.tag.then(Printing::prepare).transpose()?;
        let mut pipes = Pipes::default();
        let begun = watch.start_all(&mut pipes);
        // Those that run have something to say also if not all could be started.
        let printed = printing.as_mut().map_or(Ok(()), |p| p.start(pipes.outs, pipes.errs));
        let ran = begun.and_then(|early| printed.and_then(|()| watch.run(early)));
        // So they are to end.
        let ended = watch.end();
        if let Some(p) = &mut printing {
            p.job_is_over();
            watch.until_printed(p)?;
        }
        ran.and(ended)?;
        watch.verdict()
    }
}

/// What ranks write into, from the first rank on.
#[derive(Default)]
struct Pipes {
    outs: Vec<PipeReader>,
    errs: Vec<PipeReader>,
}

/// One run of a group.
struct Watch<'a> {
    group: &'a Launch,
    signals: &'a Signals,
    guard: Guard,
    /// It was waited for.
    guard_ended: bool,
    /// Ranks that run.
    running: usize,
    /// The rank that failed first, and how many others ran when they were ended.
    failed: Option<(RankEnd, usize)>,
    /// The signal that asked this process to end, and when.
    asked: Option<(Signal, Instant)>,
    /// The guard was told to end all.
    ending: bool,
    /// Somebody did not want to wait for the grace.
    hurried: bool,
    /// This process stops when the ranks have.
    suspends: bool,
    /// What the guard said last.
    done: Option<Event>,
    /// What the kernel had killed for want of memory when the group started.
    kills: Kills,
}

impl Watch<'_> {
    /// Starts the ranks; answers those that have ended meanwhile.
    fn start_all(&mut self, pipes: &mut Pipes) -> anyhow::Result<Vec<RankEnd>> {
        let nothing = std::fs::File::open("/dev/null").context("opening /dev/null")?;
        let mut early = Vec::new();
        let program = self.group.program.to_string_lossy();
        for rank in 0..self.group.ranks {
            let (stdin, stdout, stderr) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
            let stdin = if self.group.stdin && rank == 0 { stdin.as_fd() } else { nothing.as_fd() };
            if self.group.tag {
                let pipe =
                    || std::io::pipe().with_context(|| format!("making the pipes of rank {rank} (see ulimit -n)"));
                let ((out, stdout), (err, stderr)) = (pipe()?, pipe()?);
                self.guard.start_rank(rank, [stdin, stdout.as_fd(), stderr.as_fd()])?;
                pipes.outs.push(out);
                pipes.errs.push(err);
            } else {
                self.guard.start_rank(rank, [stdin, stdout.as_fd(), stderr.as_fd()])?;
            }
            loop {
                match self.guard.event()? {
                    Event::Started { .. } => break self.running += 1,
                    Event::RankEnd(ended) => {
                        self.running -= ended.len();
                        early.extend(ended);
                    }
                    Event::NotStarted { code, why } => {
                        let why = match code {
                            0 => anyhow::Error::msg(why),
                            code => std::io::Error::from_raw_os_error(code).into(),
                        };
                        return Err(why.context(format!("starting {program} as rank {rank}")));
                    }
                    other => bail!("the process that guards the ranks said {other:?} while they were started"),
                }
            }
        }
        self.guard.all_started()?;
        Ok(early)
    }

    /// Waits until all ranks have ended.
    fn run(&mut self, early: Vec<RankEnd>) -> anyhow::Result<()> {
        let mut last_words = None;
        // What came while ranks were started has not reached all of them.
        while let Some(s) = self.signals.next().context("reading signals")? {
            self.hear(Arrived { by_kernel: false, ..s })?;
        }
        self.note(early, &mut last_words);
        while self.running > 0 {
            let now = Instant::now();
            if last_words.is_some_and(|until| now >= until) && !self.ending {
                break;
            }
            let left = last_words.filter(|_| !self.ending).map(|until: Instant| until.saturating_duration_since(now));
            let Some(ended) = self.step(left)? else { break };
            self.note(ended, &mut last_words);
        }
        Ok(())
    }

    /// Takes note of ranks that have ended.
    fn note(&mut self, mut ended: Vec<RankEnd>, last_words: &mut Option<Instant>) {
        ended.retain(|e| e.status != 0);
        // A rank that was killed is the cause of what its peers report.
        ended.sort_by_key(|e| (ExitStatus::from_raw(e.status).signal().is_none(), e.rank));
        // To end by the signal that asked for the end, or with the code that shells give to that, is no failure.
        let asked = self.asked.map(|(s, _)| 128 + s.as_raw() as u8);
        let first = ended.into_iter().find(|e| Some(status_code(e.status)) != asked);
        if let Some(first) = first
            && self.failed.is_none()
        {
            self.failed = Some((first, 0));
            *last_words = Some(Instant::now() + LAST_WORDS);
        }
    }

    /// Waits for what comes next, at most so long; the ranks that have ended, `None` when all is done.
    fn step(&mut self, most: Option<Duration>) -> anyhow::Result<Option<Vec<RankEnd>>> {
        let most = most.map(|m| Timespec { tv_sec: m.as_secs() as i64, tv_nsec: i64::from(m.subsec_nanos()) });
        let mut fds =
            [PollFd::new(&self.signals, PollFlags::IN), PollFd::from_borrowed_fd(self.guard.as_fd(), PollFlags::IN)];
        match poll(&mut fds, most.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e).context("waiting for the ranks"),
        }
        let told = !fds[1].revents().is_empty();
        while let Some(s) = self.signals.next().context("reading signals")? {
            self.hear(s)?;
        }
        if !told {
            return Ok(Some(Vec::new()));
        }
        match self.guard.event()? {
            Event::RankEnd(ended) => {
                self.running -= ended.len();
                Ok(Some(ended))
            }
            Event::Stopped => {
                if std::mem::take(&mut self.suspends) {
                    // Goes on here after SIGCONT.
                    kill_process(getpid(), Signal::STOP).context("stopping this process")?;
                }
                Ok(Some(Vec::new()))
            }
            done @ Event::Done { .. } => {
                self.done = Some(done);
                Ok(None)
            }
            other => bail!("the process that guards the ranks said {other:?} while they ran"),
        }
    }

    /// Does what a signal asks for.
    fn hear(&mut self, arrived: Arrived) -> anyhow::Result<()> {
        let signal = arrived.signal;
        // The end of a terminal is told to the leader of its session alone.
        let reached = arrived.by_kernel && signal != Signal::HUP;
        match signal {
            // All that loses its parent in a container comes to its first process.
            Signal::CHILD => self.reap(),
            Signal::INT | Signal::TERM | Signal::QUIT => {
                match self.asked {
                    None if !self.ending => self.begin_end(signal, reached)?,
                    Some((_, since)) if signal == Signal::INT && since.elapsed() >= AGAIN => {
                        self.hurried = true;
                        self.guard.kill()?;
                    }
                    _ => self.guard.signal(signal, reached)?,
                }
                self.asked.get_or_insert((signal, Instant::now()));
            }
            Signal::TSTP => {
                self.suspends = true;
                self.guard.stop(!reached)?;
            }
            _ => {
                if signal == Signal::CONT {
                    self.suspends = false;
                }
                self.guard.signal(signal, reached)?;
            }
        }
        Ok(())
    }

    /// Has the guard end all, with this signal, which those ranks have already that are still in this process's group if it was
    /// sent to all of that.
    fn begin_end(&mut self, signal: Signal, reached: bool) -> anyhow::Result<()> {
        self.ending = true;
        if let Some((_, others)) = &mut self.failed {
            *others = self.running;
        }
        self.guard.end(signal, reached)
    }

    fn reap(&mut self) {
        // No children at all is an error, and means the same as none that has ended.
        while let Ok(Some((pid, _))) = wait(WaitOptions::NOHANG) {
            self.guard_ended |= pid.as_raw_nonzero().get() as u32 == self.guard.pid();
        }
    }

    /// Ends what is left of the job, and waits for it. Without the guard it is killed.
    fn end(&mut self) -> anyhow::Result<()> {
        let ended = self.end_by_guard();
        if ended.is_err() {
            let left = tree::kill()?;
            anyhow::ensure!(left.is_empty(), "processes {left:?} cannot be ended");
        }
        ended
    }

    fn end_by_guard(&mut self) -> anyhow::Result<()> {
        if !self.ending {
            self.begin_end(Signal::TERM, false)?;
        }
        while self.done.is_none() {
            if let Some(ended) = self.step(None)? {
                self.note(ended, &mut None);
            }
        }
        // It exits now; whoever looks after this process has ended finds none of it.
        let begun = Instant::now();
        while !self.guard_ended && begun.elapsed() < tree::GONE {
            self.reap();
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Waits until the output is printed. If nobody reads it, a signal ends that.
    fn until_printed(&mut self, printing: &Printing) -> anyhow::Result<()> {
        loop {
            let mut fds = [PollFd::new(&self.signals, PollFlags::IN), PollFd::new(printing.ended(), PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e).context("waiting for the output of the ranks"),
            }
            if !fds[1].revents().is_empty() {
                return Ok(());
            }
            while let Some(s) = self.signals.next().context("reading signals")? {
                match s.signal {
                    Signal::CHILD => self.reap(),
                    Signal::INT | Signal::TERM | Signal::QUIT => {
                        self.asked.get_or_insert((s.signal, Instant::now()));
                        return Ok(());
                    }
                    _ => {}
                }
            }
        }
    }

    /// What came of it all.
    fn verdict(&self) -> anyhow::Result<()> {
        let mut what = self.failed.map(|(e, others)| (status_code(e.status), self.sentence(&e, others)));
        if let Some(Event::Done { forced, left, blind }) = &self.done {
            if let Some(why) = blind {
                tracing::warn!("{why}: processes that ranks started were not looked after");
            }
            let grace = self.group.grace;
            let more = match (forced, left.is_empty()) {
                (_, false) => format!("processes {left:?}, which ranks had started, cannot be ended"),
                (true, _) if self.hurried => "what had not ended at the second Ctrl-C was killed".into(),
                (true, _) => format!("what had not ended {grace:?} after it was asked to was killed (--grace)"),
                _ => String::new(),
            };
            if !more.is_empty() {
                what = Some(match what {
                    Some((code, what)) => (code, format!("{what}; {more}")),
                    None => (0, more),
                });
            }
        }
        match (self.asked, what) {
            (Some((signal, _)), what) => Err(Interrupted { signal, what: what.map(|w| w.1) }.into()),
            (None, Some((0, what))) => {
                tracing::warn!("{what}");
                Ok(())
            }
            (None, Some((code, what))) => Err(JobFailed { code, what }.into()),
            (None, None) => Ok(()),
        }
    }

    fn sentence(&self, e: &RankEnd, others: usize) -> String {
        let ended = match others {
            0 => String::new(),
            1 => "; the one rank still running was ended".into(),
            _ => format!("; the {others} ranks still running were ended"),
        };
        let (rank, pid, ranks) = (e.rank, e.pid, self.group.ranks);
        let status = ExitStatus::from_raw(e.status);
        // A rank that the kernel killed for want of memory looks like any that got SIGKILL.
        let why = (status.signal() == Some(Signal::KILL.as_raw())).then(|| self.kills.since()).flatten();
        let why = why.map_or_else(String::new, |why| format!(": {why}"));
        let of = if ranks > 1 { format!("rank {rank} of {ranks}") } else { "the only rank".into() };
        format!("{of} (pid {pid}) {}{why}{ended}", describe(status))
    }
}

/// Variables of ranks that a service serves. Its policy says where a tenant's root may listen: a place that the user has chosen goes
/// before a free one of the machine's.
pub fn served(service: &Path) -> Vec<(&'static str, OsString)> {
    const ROOT: &str = "NEURON_RT_ROOT_COMM_ID";
    let chosen = std::env::var_os(ROOT).filter(|root| !root.is_empty());
    [("WCCL_SERVICE", service.into())].into_iter().chain(chosen.map(|root| (ROOT, root))).collect()
}

/// The variables of a group that programs of this kind read, with ports that were free a moment ago.
fn group_variables(ranks: usize) -> anyhow::Result<Vec<(&'static str, OsString)>> {
    let free = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("finding a free port on 127.0.0.1");
    // Both are open at once, so that they differ: a program's own store and the bootstrap must not meet on one port.
    let (master, root) = (free()?, free()?);
    let port = |l: &TcpListener| l.local_addr().map(|a| a.port()).context("asking for a free port");
    let mut vars: Vec<(&str, OsString)> = vec![
        ("WORLD_SIZE", ranks.to_string().into()),
        ("LOCAL_WORLD_SIZE", ranks.to_string().into()),
        ("MASTER_ADDR", "127.0.0.1".into()),
        ("MASTER_PORT", port(&master)?.to_string().into()),
        ("NEURON_RT_ROOT_COMM_ID", format!("127.0.0.1:{}", port(&root)?).into()),
    ];
    // The ranks know one another by it. One that the user has chosen is inherited.
    if ["WCCL_JOB_SECRET", "WCCL_JOB_SECRET_FILE"].iter().all(|v| std::env::var_os(v).is_none_or(|v| v.is_empty())) {
        vars.push(("WCCL_JOB_SECRET", job_secret()?.into()));
    }
    if std::env::var_os("CCOM_SOCKET_IFNAME").is_none() {
        vars.push(("CCOM_SOCKET_IFNAME", "lo".into()));
    }
    Ok(vars)
}

/// A secret of this job's own, as text.
fn job_secret() -> anyhow::Result<String> {
    let secret: [u8; 32] = hw_bridge::os::random::bytes().context("asking the kernel for random numbers")?;
    Ok(secret.iter().map(|b| format!("{b:02x}")).collect())
}

/// The exit code that shells give to a process that ended so.
fn status_code(status: i32) -> u8 {
    let status = ExitStatus::from_raw(status);
    status.code().or(status.signal().map(|s| 128 + s)).and_then(|c| u8::try_from(c).ok()).unwrap_or(1)
}

/// A signal in words.
fn name(signal: i32) -> String {
    let name = match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        10 => "SIGUSR1",
        11 => "SIGSEGV",
        12 => "SIGUSR2",
        13 => "SIGPIPE",
        15 => "SIGTERM",
        24 => "SIGXCPU",
        25 => "SIGXFSZ",
        31 => "SIGSYS",
        _ => return format!("signal {signal}"),
    };
    format!("signal {signal} ({name})")
}

/// How a process ended, in words.
fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with code {code}"),
        (None, Some(signal)) => format!("was killed by {}", name(signal)),
        (None, None) => format!("ended: {status}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_has_words_and_the_code_that_shells_give_it() {
        for (status, code, words) in [
            (42 << 8, 42, "exited with code 42"),
            (255 << 8, 255, "exited with code 255"),
            (9, 137, "was killed by signal 9 (SIGKILL)"),
            // With a core.
            (0x80 | 11, 139, "was killed by signal 11 (SIGSEGV)"),
            (64, 192, "was killed by signal 64"),
        ] {
            assert_eq!((status_code(status), describe(ExitStatus::from_raw(status)).as_str()), (code, words));
        }
    }
}
