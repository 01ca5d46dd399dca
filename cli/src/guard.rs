//! Ends the processes of a launcher that is gone, however it went: signal, crash, SIGKILL.
//!
//! The guard is a process beside the launcher's children, in a process group of its own so that Ctrl-C at the terminal does
//! not reach it. The launcher writes the id of each child to its stdin, one a line, and waits for one byte of answer; the
//! guard has opened a pidfd by then, so a number that is used again later is no danger. When its stdin ends, the launcher
//! is gone or done, and whatever still runs is ended: SIGTERM, and SIGKILL two seconds later.
//!
//! Not covered: processes that a child started and that outlive it, and the guard's own death by SIGKILL.

use std::io::{BufRead, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// Between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(2);

/// A descriptor that stands for process `pid`, which has not been waited for.
///
/// # Errors
/// Those of the kernel; the process is gone, or there are too many descriptors.
pub fn open(pid: u32) -> std::io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| std::io::Error::other("a process id out of range"))?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// Waits until one of the processes has ended or the time is over; says which have ended.
///
/// # Errors
/// Those of poll.
pub fn wait(processes: &[&OwnedFd], most: Option<Duration>) -> std::io::Result<Vec<bool>> {
    let mut fds: Vec<PollFd<'_>> = processes.iter().map(|p| PollFd::new(*p, PollFlags::IN)).collect();
    let deadline = most.map(|m| Instant::now() + m);
    loop {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let left = left.map(|l| Timespec { tv_sec: l.as_secs() as i64, tv_nsec: i64::from(l.subsec_nanos()) });
        match poll(&mut fds, left.as_ref()) {
            Ok(_) => return Ok(fds.iter().map(|f| !f.revents().is_empty()).collect()),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Ends the processes: SIGTERM, and SIGKILL for those that still run after two seconds.
pub fn end(processes: &[&OwnedFd]) {
    for p in processes {
        // A process that has ended meanwhile is what is wanted.
        let _ = pidfd_send_signal(p, Signal::TERM);
    }
    let deadline = Instant::now() + GRACE;
    let mut left = processes.to_vec();
    while !left.is_empty() && Instant::now() < deadline {
        let Ok(ended) = wait(&left, Some(deadline.saturating_duration_since(Instant::now()))) else { break };
        let mut ended = ended.iter();
        left.retain(|_| ended.next() != Some(&true));
    }
    for p in left {
        let _ = pidfd_send_signal(p, Signal::KILL);
    }
}

/// The launcher's side.
#[derive(Debug)]
pub struct Guard {
    process: Child,
    to: Option<ChildStdin>,
    from: ChildStdout,
}

impl Guard {
    /// Starts a guard.
    ///
    /// # Errors
    /// This program cannot be started again.
    pub fn start() -> anyhow::Result<Guard> {
        let exe = std::env::current_exe().context("finding this program's file")?;
        let mut process = Command::new(exe)
            .arg("__guard")
            .env_remove("WCCL_LOG")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .context("starting the process that guards the ranks")?;
        let (Some(to), Some(from)) = (process.stdin.take(), process.stdout.take()) else {
            anyhow::bail!("the process that guards the ranks has no pipes");
        };
        Ok(Guard { process, to: Some(to), from })
    }

    /// Puts a process under guard; it must not have been waited for.
    ///
    /// # Errors
    /// The guard is gone.
    pub fn add(&mut self, pid: u32) -> anyhow::Result<()> {
        let answered =
            self.to.as_mut().is_some_and(|to| writeln!(to, "{pid}").is_ok()) && self.from.read_exact(&mut [0]).is_ok();
        anyhow::ensure!(answered, "the process that guards the ranks (pid {}) is gone", self.process.id());
        Ok(())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.to = None;
        // It ends by itself when its stdin does; its exit code says nothing.
        let _ = self.process.wait();
    }
}

/// The guard's side: the hidden subcommand.
pub fn serve() -> anyhow::Result<ExitCode> {
    let mut processes = Vec::new();
    let mut out = std::io::stdout();
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        if let Some(p) = line.trim().parse().ok().and_then(|pid| open(pid).ok()) {
            processes.push(p);
        }
        if out.write_all(b".").and_then(|()| out.flush()).is_err() {
            break;
        }
    }
    end(&processes.iter().collect::<Vec<_>>());
    Ok(ExitCode::SUCCESS)
}
