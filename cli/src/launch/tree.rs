//! The processes below this one, as /proc shows them: children, their children, and so on.
//!
//! In a process that is a subreaper (`PR_SET_CHILD_SUBREAPER`) that is everything its children ever started and that still runs,
//! whatever its session or process group: who loses its parent comes to the subreaper.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, getpid, pidfd_open, pidfd_send_signal};

/// How often one looks whether processes that were killed are gone.
pub const LOOK: Duration = Duration::from_millis(10);
/// How long a process that was killed may take to go; one that hangs in the kernel takes longer.
pub const GONE: Duration = Duration::from_secs(10);

/// What a line of /proc says of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stat {
    program: String,
    parent: i32,
    /// It has ended and is waited for by its parent.
    ended: bool,
    /// Ticks after the machine's start: with its number, this tells a process from one that has the number later.
    began: u64,
}

/// Reads /proc/PID/stat. The name of the program, in brackets, may hold anything.
fn parse(stat: &str) -> Option<Stat> {
    let (program, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    let threads: u32 = fields.nth(15)?.parse().ok()?;
    let began = fields.nth(1)?.parse().ok()?;
    // The first thread of a process may end before the others.
    Some(Stat { program: program.into(), parent, ended: matches!(state, "Z" | "X") && threads <= 1, began })
}

fn stat(pid: i32) -> Option<Stat> {
    parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// A process below this one.
#[derive(Debug)]
pub struct Process {
    /// Its number.
    pub pid: i32,
    /// Its number and when it began: this process and no other; and its program, which `exec` changes.
    pub identity: (i32, u64, String),
    handle: OwnedFd,
}

impl Process {
    /// Sends it a signal; whether there was one to send it to, and the right to.
    pub fn send(&self, signal: Signal) -> bool {
        pidfd_send_signal(&self.handle, signal).is_ok()
    }
}

/// Those below this process that run.
///
/// # Errors
/// /proc cannot be read, or is another PID namespace's, whose numbers mean other processes.
pub fn below() -> anyhow::Result<Vec<Process>> {
    let me = getpid().as_raw_nonzero().get();
    let own = std::fs::read_link("/proc/self").context("reading /proc/self")?;
    ensure!(own.as_os_str() == me.to_string().as_str(), "/proc is that of another PID namespace");
    let mut of: HashMap<i32, Vec<(i32, Stat)>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").context("reading /proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else { continue };
        // Who has gone meanwhile is not below.
        if let Some(s) = stat(pid) {
            of.entry(s.parent).or_default().push((pid, s));
        }
    }
    let mut found = Vec::new();
    let mut parents = vec![me];
    while let Some(parent) = parents.pop() {
        for (pid, s) in of.remove(&parent).unwrap_or_default() {
            parents.push(pid);
            if s.ended {
                continue;
            }
            let Some(handle) = Pid::from_raw(pid).and_then(|p| pidfd_open(p, PidfdFlags::empty()).ok()) else {
                continue;
            };
            // The number may have become another process's before the handle was had, but not since.
            if stat(pid).is_some_and(|now| now.began == s.began) {
                found.push(Process { pid, identity: (pid, s.began, s.program), handle });
            }
        }
    }
    Ok(found)
}

/// Kills what is below this process, again and again, until nothing is; answers what is left after [`GONE`].
///
/// # Errors
/// Those of [`below`].
pub fn kill() -> anyhow::Result<Vec<i32>> {
    let begun = Instant::now();
    loop {
        // This process is the parent of those that lost theirs.
        while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
        let left = below()?;
        if left.is_empty() || begun.elapsed() > GONE {
            return Ok(left.iter().map(|p| p.pid).collect());
        }
        for p in left {
            p.send(Signal::KILL);
        }
        std::thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_line_of_proc_is_read_whatever_the_program_is_called() {
        let rest = "4 77 77 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 12345 0 0";
        let s = Stat { program: "sleep".into(), parent: 4, ended: false, began: 12345 };
        assert_eq!(parse(&format!("12 (sleep) S {rest}")), Some(s.clone()));
        let odd = Stat { program: "a) Z (b c".into(), ..s.clone() };
        assert_eq!(parse(&format!("12 (a) Z (b c) R {rest}\n")), Some(odd));
        assert_eq!(parse(&format!("12 (sleep) Z {rest}")), Some(Stat { ended: true, ..s.clone() }));
        // Its other threads go on.
        assert_eq!(parse(&format!("12 (sleep) Z {}", rest.replace("20 0 1 0", "20 0 3 0"))), Some(s));
        for bad in ["", "12", "12 (sleep", "12 (sleep) S", "12 (sleep) S x y"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn grandchildren_are_found_and_get_signals() {
        let mut child = Command::new("sh");
        let mut child = child.args(["-c", "sleep 3600 & echo $!; wait"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let (own, grand) = (child.id() as i32, line.trim().parse::<i32>().unwrap());
        let found = below().unwrap();
        for pid in [own, grand] {
            assert!(found.iter().find(|p| p.pid == pid).is_some_and(|p| p.send(Signal::KILL)), "{pid} in {found:?}");
        }
        child.wait().unwrap();
        assert!(below().unwrap().iter().all(|p| p.pid != own));
    }
}
