//! The soak: processes that run random collectives in random groups for as long as one likes, while ranks die and come late.
//!
//! `soak --seconds S --seed N` is the parent: it starts the ranks, tells them round by round what to do, and watches. What a
//! round does is a pure function of the seed and the round's number ([`plan`]), so a seed repeats a run but for the moments
//! at which things happen. A rank ([`rank`]) reads commands from stdin and answers each on stdout; results are checked by
//! the same reference that `wccl demo` and `bench` use.
//!
//! What counts as a fault: a wrong element or a byte outside the buffers; an error that does not name the rank that died or
//! was late; a rank that ends by itself; no answer within [`HANG`]; memory, descriptors, threads or mappings of a process
//! that grow beyond [`watch::Bounds`]; a process, memfd or socket that is left at the end. The first fault ends the run with
//! exit code 1 and the seed.
//!
//! Rank 0 is never killed: it lives through the whole run, and its memory is what is watched for longest.

mod plan;
mod rank;
mod watch;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Parser;

use plan::{Kind, Round};
use watch::{Left, Trend};

/// No answer for so long is a hang. Far above every deadline of the ranks.
const HANG: Duration = Duration::from_secs(90);
/// Deadline of an operation where nobody is meant to be missed.
const PATIENT_MS: u64 = 30_000;
/// Deadline of an operation in a round where a rank comes too late.
const SHORT_MS: u64 = 2_000;

/// Random collectives over processes that die and come late; fails at the first fault.
#[derive(Debug, Parser)]
#[command(name = "soak", max_term_width = 110)]
struct Args {
    /// How long, minutes
    #[arg(long, value_name = "M", default_value_t = 10.0, conflicts_with = "seconds")]
    minutes: f64,
    /// How long, seconds
    #[arg(long, value_name = "S")]
    seconds: Option<f64>,
    /// Repeats the rounds of an earlier run; default: from the clock
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Processes
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u64).range(2..=32))]
    ranks: u64,
    /// Be a rank: for the parent only.
    #[arg(long, hide = true)]
    rank: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.rank {
        return rank::serve();
    }
    let seconds = args.seconds.unwrap_or(args.minutes * 60.0);
    if !(seconds.is_finite() && (0.0..=1e7).contains(&seconds)) {
        eprintln!("soak: a time from 0 to 10000000 seconds is expected, not {seconds}");
        return ExitCode::from(2);
    }
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let seed = args.seed.unwrap_or(clock.as_millis() as u64 & 0xFFFF_FFFF);
    let n = args.ranks as usize;
    println!("# soak: {n} processes, {seconds} s, seed {seed}");
    let mut soak = Soak::new(n, seed);
    let result = soak.run(Duration::from_secs_f64(seconds));
    println!("# {}", soak.summary());
    match result {
        Ok(()) => {
            println!("# OK");
            ExitCode::SUCCESS
        }
        Err(e) => {
            println!("# FAULT in round {}: {e:#}", soak.round);
            println!("# repeat with --seed {seed} --ranks {n}");
            ExitCode::FAILURE
        }
    }
}

/// A rank's process.
struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    trend: Trend,
    /// The last command, for messages about a rank that does not answer.
    told: String,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    fn start() -> Result<Process> {
        let exe = std::env::current_exe().context("finding this program's file")?;
        let mut child = Command::new(exe)
            .arg("--rank")
            .env("WCCL_HBM_BYTES", (512u64 << 20).to_string())
            .env("NEURON_CCOM_SOCK_TIMEOUT", PATIENT_MS.to_string())
            .env("CCOM_SOCKET_IFNAME", "lo")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting a rank")?;
        let stdin = child.stdin.take();
        let out = child.stdout.take().context("a rank has no stdout")?;
        let (tx, lines) = channel();
        // The thread ends with the rank's stdout, or when nobody listens any more.
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if tx.send(line).is_err() {
                    break;
                }
            }
        });
        let trend = Trend::new(child.id());
        Ok(Process { child, stdin, lines, trend, told: "start".into() })
    }
}

/// What was done.
#[derive(Debug, Default)]
struct Counts {
    ops: u64,
    bytes: u64,
    groups: u64,
    deaths: u64,
    late_within: u64,
    late_beyond: u64,
}

struct Soak {
    seed: u64,
    processes: Vec<Process>,
    n: usize,
    round: u64,
    /// The group of all ranks exists.
    world: bool,
    counts: Counts,
    begun: Instant,
    /// Growth of process 0, which lives longest: for the summary.
    growth: Vec<(&'static str, i64)>,
}

impl Soak {
    fn new(n: usize, seed: u64) -> Soak {
        Soak {
            seed,
            processes: Vec::new(),
            n,
            round: 0,
            world: false,
            counts: Counts::default(),
            begun: Instant::now(),
            growth: Vec::new(),
        }
    }

    fn summary(&self) -> String {
        let c = &self.counts;
        let growth: Vec<String> = self.growth.iter().map(|(what, by)| format!("{what} {by:+}")).collect();
        format!(
            "{:.0} s: {} rounds, {} operations, {:.1} MB, {} groups, {} deaths, {} late, {} too late; growth of process 0: {}",
            self.begun.elapsed().as_secs_f64(),
            self.round,
            c.ops,
            c.bytes as f64 / 1e6,
            c.groups,
            c.deaths,
            c.late_within,
            c.late_beyond,
            if growth.is_empty() { "not known yet".into() } else { growth.join(", ") }
        )
    }

    fn run(&mut self, time: Duration) -> Result<()> {
        for _ in 0..self.n {
            self.processes.push(Process::start()?);
        }
        for r in 0..self.n {
            self.answer(r, "ready")?;
        }
        let mut said = Instant::now();
        loop {
            let round = plan::round(self.seed, self.round, self.n);
            self.play(&round).with_context(|| format!("{:?} of {:?}", round.kind, round.members))?;
            self.round += 1;
            if said.elapsed() >= Duration::from_secs(1) {
                said = Instant::now();
                println!("{}", self.summary());
            }
            if self.begun.elapsed() >= time {
                break;
            }
        }
        self.end()
    }

    fn tell(&mut self, r: usize, line: String) -> Result<()> {
        let p = &mut self.processes[r];
        let sent = p.stdin.as_mut().map(|to| writeln!(to, "{line}").and_then(|()| to.flush()));
        p.told = line;
        match sent {
            Some(Ok(())) => Ok(()),
            _ => bail!("process {r} (pid {}) takes no more commands: it has ended by itself", p.child.id()),
        }
    }

    /// The next line of a rank.
    fn hear(&mut self, r: usize) -> Result<String> {
        let p = &mut self.processes[r];
        match p.lines.recv_timeout(HANG) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => {
                bail!("hang: process {r} (pid {}) has not answered to `{}` for {HANG:?}", p.child.id(), p.told)
            }
            Err(RecvTimeoutError::Disconnected) => {
                let status = p.child.wait().map_or("unknown".into(), |s| s.to_string());
                bail!("process {r} (pid {}) ended by itself: {status}, at `{}`", p.child.id(), p.told)
            }
        }
    }

    /// An answer that begins with `word`; answers the rest.
    fn answer(&mut self, r: usize, word: &str) -> Result<String> {
        let line = self.hear(r)?;
        match line.strip_prefix(word) {
            Some(rest) => Ok(rest.trim().to_string()),
            None => bail!("process {r} answers `{line}` where `{word}` is expected"),
        }
    }

    /// Makes a group of `members` by an id that one of them makes.
    fn group(&mut self, key: &str, members: &[usize], maker: usize, timeout_ms: u64) -> Result<()> {
        let n = members.len();
        self.tell(maker, format!("id {n}"))?;
        let id = self.answer(maker, "id")?;
        for (rank, r) in members.iter().enumerate() {
            self.tell(*r, format!("join {key} {id} {rank} {n} {timeout_ms}"))?;
        }
        for r in members {
            self.answer(*r, "joined")?;
        }
        self.counts.groups += 1;
        Ok(())
    }

    fn drop_group(&mut self, key: &str, members: &[usize]) -> Result<()> {
        for r in members {
            self.tell(*r, format!("drop {key}"))?;
        }
        for r in members {
            self.answer(*r, "dropped")?;
        }
        Ok(())
    }

    fn play(&mut self, round: &Round) -> Result<()> {
        let all: Vec<usize> = (0..self.n).collect();
        match round.kind {
            Kind::Ops | Kind::LateWithin => {
                if !self.world {
                    self.group("world", &all, round.maker, PATIENT_MS)?;
                    self.world = true;
                }
                self.ops(round, &all)?;
                self.sample()?;
            }
            Kind::Death | Kind::LateBeyond => self.broken(round)?,
        }
        Ok(())
    }

    /// Several groups beside the one of all ranks, and lists of operations in all of them, in one order that all ranks know.
    fn ops(&mut self, round: &Round, all: &[usize]) -> Result<()> {
        for (i, g) in round.groups.iter().enumerate() {
            self.group(&format!("g{i}"), &g.members, g.maker, PATIENT_MS)?;
        }
        let mut expected: Vec<(usize, u64)> = Vec::new();
        for (i, list) in round.lists.iter().enumerate() {
            let (key, members) = match list.group {
                Some(g) => (format!("g{g}"), &round.groups[g].members[..]),
                None => ("world".into(), all),
            };
            for r in members {
                if round.kind == Kind::LateWithin && i == 0 && *r == round.victim {
                    self.tell(*r, format!("sleep {}", round.ms))?;
                }
                self.tell(*r, format!("ops {key} {} {}", list.seed, list.count))?;
                expected.push((*r, list.count));
            }
        }
        self.counts.late_within += u64::from(round.kind == Kind::LateWithin);
        for (r, count) in expected {
            let done = self.answer(r, "done")?;
            self.counts.ops += count;
            self.counts.bytes += done.parse::<u64>().with_context(|| format!("process {r} says done `{done}`"))?;
        }
        for (i, g) in round.groups.iter().enumerate() {
            self.drop_group(&format!("g{i}"), &g.members)?;
        }
        Ok(())
    }

    /// A group that runs until one of it dies or comes too late: all others must name it, and all go on afterwards.
    fn broken(&mut self, round: &Round) -> Result<()> {
        let death = round.kind == Kind::Death;
        let members = &round.members;
        self.group("b", members, round.maker, if death { PATIENT_MS } else { SHORT_MS })?;
        let place = members.iter().position(|r| *r == round.victim).context("the victim is not in its group")?;
        // The first operation of a group has the library connect all ranks, which is not bounded by the operation's deadline.
        for r in members {
            self.tell(*r, format!("ops b {} 1", round.lists[0].seed))?;
        }
        for r in members {
            self.answer(*r, "done")?;
        }
        // "rank 1 (pid 7)" of a death, "rank 1 (host H, pid 7)" of a time-out.
        let (rank, pid) = (format!("rank {place} ("), format!("pid {})", self.processes[round.victim].child.id()));
        for r in members {
            if !death && *r == round.victim {
                self.tell(*r, format!("sleep {}", SHORT_MS * 3 / 2))?;
            }
            let which = if death { "any" } else { "meeting" };
            self.tell(*r, format!("until b {} {which}", round.lists[0].seed))?;
        }
        if death {
            std::thread::sleep(Duration::from_millis(round.ms));
            let p = &mut self.processes[round.victim];
            p.child.kill().context("killing a rank")?;
            p.child.wait().context("waiting for a killed rank")?;
        }
        for r in members.iter().filter(|r| **r != round.victim) {
            let said = self.answer(*r, "failed")?;
            if !said
                .split(&rank)
                .skip(1)
                .any(|rest| rest.split_once(')').is_some_and(|(who, _)| who.ends_with(&pid[..pid.len() - 1])))
            {
                bail!("process {r} does not name {rank}{pid} as the cause, but says: {said}");
            }
        }
        if death {
            self.counts.deaths += 1;
            let left: Vec<usize> = members.iter().copied().filter(|r| *r != round.victim).collect();
            self.drop_group("b", &left)?;
            if self.world {
                let left: Vec<usize> = (0..self.n).filter(|r| *r != round.victim).collect();
                self.drop_group("world", &left)?;
                self.world = false;
            }
            self.processes[round.victim] = Process::start()?;
            self.answer(round.victim, "ready")?;
        } else {
            self.counts.late_beyond += 1;
            self.answer(round.victim, "failed")?;
            self.drop_group("b", members)?;
        }
        Ok(())
    }

    fn sample(&mut self) -> Result<()> {
        for (r, p) in self.processes.iter_mut().enumerate() {
            p.trend.sample()?;
            let growth = p.trend.growth()?;
            if r == 0 {
                self.growth = growth;
            }
        }
        Ok(())
    }

    /// Ends all ranks in good order and looks for what is left.
    fn end(&mut self) -> Result<()> {
        let pids: Vec<u32> = self.processes.iter().map(|p| p.child.id()).collect();
        let held = Left::held_by(&pids)?;
        if self.world {
            self.drop_group("world", &(0..self.n).collect::<Vec<_>>())?;
        }
        for r in 0..self.n {
            self.tell(r, "quit".into())?;
            self.answer(r, "bye")?;
            let p = &mut self.processes[r];
            p.stdin = None;
            let status = p.child.wait().context("waiting for a rank")?;
            if !status.success() {
                bail!("process {r} (pid {}) ended with {status} after `quit`", p.child.id());
            }
        }
        held.are_gone(&pids)
    }
}
