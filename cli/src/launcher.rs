//! A group of processes on this machine, one a rank: started, watched, and ended together.
//!
//! The first rank that fails ends all others, and is named. If the launcher itself goes, by whatever way, the
//! [`guard`](crate::guard) ends what it started.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::{Context, bail};

use crate::guard::{self, Guard};

/// Bytes after which an unfinished line of a tagged rank is printed as it is.
const MAX_LINE: u64 = 64 * 1024;
/// How long the other ranks may go on when one has failed: to say what they saw of it.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long output of ranks that have ended is waited for: a grandchild may hold the pipe.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

/// What to start.
#[derive(Debug)]
pub struct Group {
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
}

struct Rank {
    rank: usize,
    child: Child,
    handle: OwnedFd,
}

/// Ends what still runs, also when starting the group fails half-way.
struct Running {
    ranks: Vec<Rank>,
}

impl Drop for Running {
    fn drop(&mut self) {
        guard::end(&self.ranks.iter().map(|r| &r.handle).collect::<Vec<_>>());
        for r in &mut self.ranks {
            // It was sent SIGKILL at the latest; waiting only takes it off the process table.
            let _ = r.child.wait();
        }
    }
}

impl Group {
    /// Runs the group to its end.
    ///
    /// # Errors
    /// The program cannot be started, or a rank failed: the sentence names it.
    pub fn run(&self) -> anyhow::Result<()> {
        let vars = group_variables(self.ranks)?;
        let mut guard = Guard::start()?;
        let (done, output) = channel::<()>();
        let mut running = Running { ranks: Vec::with_capacity(self.ranks) };
        for rank in 0..self.ranks {
            let r = self.spawn(rank, &vars, &done)?;
            guard.add(r.child.id())?;
            running.ranks.push(r);
        }
        drop(done);
        let result = watch(&mut running, self.ranks);
        drop(running);
        drain(&output);
        result
    }

    fn spawn(&self, rank: usize, vars: &[(&str, OsString)], done: &Sender<()>) -> anyhow::Result<Rank> {
        let name = self.program.to_string_lossy();
        let mut command = Command::new(&self.program);
        command.args(&self.args).envs(vars.iter().map(|(k, v)| (*k, v))).envs(self.vars.iter().map(|(k, v)| (*k, v)));
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
        command.stdin(if self.stdin && rank == 0 { Stdio::inherit() } else { Stdio::null() });
        if self.tag {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        let mut child = command.spawn().with_context(|| format!("starting {name} as rank {rank}"))?;
        let handle = match guard::open(child.id()) {
            Ok(h) => h,
            Err(e) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(e)
                    .with_context(|| format!("watching the process of rank {rank} (needs Linux 5.3, see ulimit -n)"));
            }
        };
        if let Some(out) = child.stdout.take() {
            forward(rank, out, std::io::stdout(), done.clone())?;
        }
        if let Some(err) = child.stderr.take() {
            forward(rank, err, std::io::stderr(), done.clone())?;
        }
        Ok(Rank { rank, child, handle })
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
    let mut secret = [0; 32];
    hw_bridge::links::fill_random(&mut secret).context("asking the kernel for random numbers")?;
    Ok(secret.iter().map(|b| format!("{b:02x}")).collect())
}

fn watch(running: &mut Running, ranks: usize) -> anyhow::Result<()> {
    while !running.ranks.is_empty() {
        let handles: Vec<&OwnedFd> = running.ranks.iter().map(|r| &r.handle).collect();
        let ended = guard::wait(&handles, None).context("waiting for the ranks")?;
        let mut failed: Vec<(usize, u32, ExitStatus)> = Vec::new();
        let mut still = Vec::new();
        for (mut r, ended) in running.ranks.drain(..).zip(ended) {
            if !ended {
                still.push(r);
                continue;
            }
            let status = r.child.wait().with_context(|| format!("waiting for rank {}", r.rank))?;
            if !status.success() {
                failed.push((r.rank, r.child.id(), status));
            }
        }
        running.ranks = still;
        // A rank that was killed is the cause of what its peers report.
        failed.sort_by_key(|(rank, _, status)| (status.signal().is_none(), *rank));
        if let Some((rank, pid, status)) = failed.first() {
            // The others may have something to say of it, and flight records to write.
            let begun = std::time::Instant::now();
            while !running.ranks.is_empty() && begun.elapsed() < LAST_WORDS {
                let handles: Vec<&OwnedFd> = running.ranks.iter().map(|r| &r.handle).collect();
                let left = LAST_WORDS.saturating_sub(begun.elapsed());
                let ended = guard::wait(&handles, Some(left)).context("waiting for the other ranks")?;
                let mut still = Vec::new();
                for (mut r, ended) in running.ranks.drain(..).zip(ended) {
                    if ended {
                        r.child.wait().with_context(|| format!("waiting for rank {}", r.rank))?;
                    } else {
                        still.push(r);
                    }
                }
                running.ranks = still;
            }
            let others = running.ranks.len();
            let ended = match others {
                0 => String::new(),
                1 => "; the one rank still running was ended".into(),
                _ => format!("; the {others} ranks still running were ended"),
            };
            let of = if ranks > 1 { format!("rank {rank} of {ranks}") } else { "the only rank".into() };
            bail!("{of} (pid {pid}) {}{ended}", describe(*status));
        }
    }
    Ok(())
}

/// How a process ended, in words.
fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with code {code}"),
        (None, Some(signal)) => {
            let name = match signal {
                1 => " (SIGHUP)",
                2 => " (SIGINT)",
                4 => " (SIGILL)",
                6 => " (SIGABRT)",
                7 => " (SIGBUS)",
                8 => " (SIGFPE)",
                9 => " (SIGKILL)",
                11 => " (SIGSEGV)",
                13 => " (SIGPIPE)",
                15 => " (SIGTERM)",
                _ => "",
            };
            format!("was killed by signal {signal}{name}")
        }
        (None, None) => format!("ended: {status}"),
    }
}

/// Copies a rank's output line by line, each with the rank before it.
fn forward(
    rank: usize,
    from: impl Read + Send + 'static,
    mut to: impl Write + Send + 'static,
    done: Sender<()>,
) -> anyhow::Result<()> {
    std::thread::Builder::new()
        .name(format!("wccl-output-{rank}"))
        .spawn(move || {
            let mut from = BufReader::new(from);
            let mut line = Vec::new();
            loop {
                line.clear();
                line.extend_from_slice(format!("[{rank}] ").as_bytes());
                let prefix = line.len();
                // The pipe is drained to its end even if nobody reads what we print, so that the rank is never blocked.
                match (&mut from).take(MAX_LINE).read_until(b'\n', &mut line) {
                    Ok(n) if n > 0 => {}
                    _ => break,
                }
                if line.len() > prefix && line.last() != Some(&b'\n') {
                    line.push(b'\n');
                }
                let _ = to.write_all(&line).and_then(|()| to.flush());
            }
            drop(done);
        })
        .with_context(|| format!("starting the thread that prints the output of rank {rank}"))?;
    Ok(())
}

/// Waits until all output was copied.
fn drain(output: &Receiver<()>) {
    // Nothing is ever sent; the end of all senders is the end of all output.
    let _ = output.recv_timeout(LAST_OUTPUT);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(ranks: usize, script: &str) -> Group {
        let args = vec!["-c".into(), script.into()];
        Group { ranks, program: "sh".into(), args, vars: Vec::new(), tag: false, stdin: false }
    }

    /// What [`Group::run`] does, but for the guard, which is a process of the real program.
    fn run(g: &Group) -> anyhow::Result<()> {
        let vars = group_variables(g.ranks)?;
        let (done, _) = channel();
        let mut running = Running { ranks: Vec::new() };
        for rank in 0..g.ranks {
            running.ranks.push(g.spawn(rank, &vars, &done)?);
        }
        watch(&mut running, g.ranks)
    }

    #[test]
    fn ranks_get_their_variables() {
        let check = "test $WORLD_SIZE = 3 && test $RANK = $LOCAL_RANK && test $RANK -lt 3 && \
                     test $MASTER_ADDR = 127.0.0.1 && test $NEURON_RT_ROOT_COMM_ID != 127.0.0.1:$MASTER_PORT && \
                     test -n \"$CCOM_SOCKET_IFNAME\" && test -n \"$WCCL_JOB_SECRET$WCCL_JOB_SECRET_FILE\"";
        run(&shell(3, check)).unwrap();
    }

    #[test]
    fn the_failed_rank_is_named_and_the_others_are_ended() {
        // The others would sleep far longer than any test run.
        let e = run(&shell(3, "if test $RANK = 1; then exit 7; fi; exec sleep 3600")).unwrap_err().to_string();
        assert!(e.contains("rank 1 of 3") && e.contains("code 7") && e.contains("2 ranks still running"), "{e}");
        let e = run(&shell(2, "if test $RANK = 0; then kill -9 $$; fi; exec sleep 3600")).unwrap_err().to_string();
        assert!(e.contains("rank 0 of 2") && e.contains("signal 9 (SIGKILL)"), "{e}");
    }

    #[test]
    fn a_rank_that_ignores_sigterm_is_killed() {
        let e =
            run(&shell(2, "if test $RANK = 0; then sleep 0.3; exit 1; fi; trap '' TERM; while :; do sleep 1; done"));
        assert!(e.unwrap_err().to_string().contains("rank 0 of 2"));
    }

    #[test]
    fn a_program_that_does_not_exist_is_named() {
        let e = format!("{:#}", run(&Group { program: "./no-such-program".into(), ..shell(1, "") }).unwrap_err());
        assert!(e.contains("no-such-program as rank 0"), "{e}");
    }
}
