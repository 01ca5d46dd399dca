//! A tenant under load: a group of ranks, threads of this process, that run all-reduce without a pause and check every
//! element of every result, while the transport under them is swapped. For the demo's second act and the test of swaps.
//!
//! That it is time to stop, or to rest, comes with the data: rank 0 puts it into the first element, the others nothing, so all
//! ranks learn it in the same round.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use wccl::swap::{Order, coordinate};
use wccl::{CommOptions, Communicator, DataType, DeviceMemory, Io, ReduceOp, Runtime, RuntimeConfig};

/// How long a rank may take for what it is told.
const PATIENCE: Duration = Duration::from_secs(60);

/// A group under load.
#[derive(Debug)]
pub struct Load {
    tenant: String,
    ranks: Vec<JoinHandle<anyhow::Result<LoadTally>>>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// What rank 0 hands on in its next round.
    stop: AtomicBool,
    rounds: AtomicU64,
    /// Rank 0's time in collectives.
    nanos: AtomicU64,
    failed: AtomicBool,
    rest: Mutex<Rest>,
    woken: Condvar,
}

#[derive(Debug, Default)]
struct Rest {
    /// What rank 0 hands on, too.
    wanted: bool,
    /// Ranks that rest.
    resting: usize,
    /// How often they were woken.
    woken: u64,
}

/// What rank 0 says in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word {
    GoOn = 0,
    Stop = 1,
    Rest = 2,
}

impl Shared {
    fn rest(&self) -> MutexGuard<'_, Rest> {
        self.rest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn word(&self) -> Word {
        match (self.stop.load(Ordering::Acquire), self.rest().wanted) {
            (true, _) => Word::Stop,
            (_, true) => Word::Rest,
            _ => Word::GoOn,
        }
    }

    /// A rank rests until it is woken, or is to stop.
    fn sleep(&self) {
        let mut rest = self.rest();
        let woken = rest.woken;
        rest.resting += 1;
        while rest.woken == woken && !self.stop.load(Ordering::Acquire) {
            rest = self.woken.wait(rest).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// What the ranks did.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoadTally {
    /// Operations that completed.
    pub done: u64,
    /// Elements that were wrong.
    pub wrong: u64,
}

/// What a group has done so far.
#[derive(Debug, Clone, Copy)]
pub struct LoadMark {
    at: Instant,
    rounds: u64,
    nanos: u64,
}

/// Between two marks.
#[derive(Debug, Clone, Copy)]
pub struct LoadRate {
    /// Rounds a second, the checks included.
    pub rounds: f64,
    /// Mean seconds of a collective.
    pub seconds: f64,
}

impl LoadMark {
    /// What was done from here to `end`.
    // The demo has no use for it.
    #[allow(dead_code)]
    pub fn until(self, end: LoadMark) -> LoadRate {
        let mut sum = Sum::default();
        sum.add(self, end);
        sum.rate()
    }

    /// The time from `begin` to here.
    // The test of swaps has no use for it.
    #[allow(dead_code)]
    pub fn since(self, begin: LoadMark) -> Duration {
        self.at - begin.at
    }
}

/// What was done in several stretches of time.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sum {
    time: Duration,
    rounds: u64,
    nanos: u64,
}

impl Sum {
    /// The stretch from `begin` to `end`, too.
    pub fn add(&mut self, begin: LoadMark, end: LoadMark) {
        self.time += end.at - begin.at;
        self.rounds += end.rounds - begin.rounds;
        self.nanos += end.nanos - begin.nanos;
    }

    /// The rate over all of them.
    pub fn rate(self) -> LoadRate {
        let rounds = self.rounds.max(1) as f64;
        LoadRate { rounds: rounds / self.time.as_secs_f64(), seconds: self.nanos as f64 / 1e9 / rounds }
    }
}

impl Load {
    /// Starts `n` ranks of a tenant, each with a runtime of its own, on messages of `count` fp32 elements.
    ///
    /// # Errors
    /// There is no port or no thread.
    pub fn start(config: &RuntimeConfig, n: usize, count: usize) -> anyhow::Result<Load> {
        let root = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).context("finding a port")?;
        let shared = Arc::new(Shared::default());
        let mut ranks = Vec::with_capacity(n);
        for rank in 0..n {
            let (config, shared) = (config.clone(), shared.clone());
            let name = format!("{}-{rank}", config.tenant);
            let spawned = std::thread::Builder::new().name(name).spawn(move || {
                let ran = run(config, &root.to_string(), rank, n, count, &shared);
                shared.failed.fetch_or(ran.is_err(), Ordering::Relaxed);
                ran.with_context(|| format!("rank {rank}"))
            });
            ranks.push(spawned.context("starting a rank")?);
        }
        Ok(Load { tenant: config.tenant.clone(), ranks, shared })
    }

    /// What has been done so far.
    pub fn mark(&self) -> LoadMark {
        let [rounds, nanos] = [&self.shared.rounds, &self.shared.nanos].map(|n| n.load(Ordering::Relaxed));
        LoadMark { at: Instant::now(), rounds, nanos }
    }

    /// Waits until `rounds` more rounds are done.
    ///
    /// # Errors
    /// A rank failed, or they take too long.
    pub fn go_on(&self, rounds: u64) -> anyhow::Result<()> {
        let until = self.mark().rounds + rounds;
        self.wait("the rounds", || self.shared.rounds.load(Ordering::Relaxed) >= until)
    }

    /// Has all ranks rest, so that another group has the machine, until they are woken.
    ///
    /// # Errors
    /// A rank failed, or they take too long.
    // The demo has no use for it.
    #[allow(dead_code)]
    pub fn rest(&self) -> anyhow::Result<()> {
        self.shared.rest().wanted = true;
        self.wait("coming to rest", || self.shared.rest().resting == self.ranks.len())
    }

    /// Wakes them.
    #[allow(dead_code)]
    pub fn wake(&self) {
        let mut rest = self.shared.rest();
        *rest = Rest { wanted: false, resting: 0, woken: rest.woken + 1 };
        self.shared.woken.notify_all();
    }

    /// Swaps the transport of all ranks to the one in `file`. Answers the longest time that operations stood still on a rank.
    ///
    /// # Errors
    /// The swap was refused; the reason.
    pub fn swap(&self, file: &Path) -> anyhow::Result<Duration> {
        // The next one may follow at once.
        let order = Order { probation: Duration::ZERO, ..Order::transport(&self.tenant, file) };
        let report = coordinate(&order)?;
        if !report.committed {
            bail!("the swap of tenant {} was refused: {}", self.tenant, report.reason);
        }
        if report.members.len() != self.ranks.len() {
            bail!("{} of {} ranks took part in the swap", report.members.len(), self.ranks.len());
        }
        Ok(report.pause())
    }

    /// Ends the group. Answers what all ranks did; with nothing lost, all have done the same number of operations.
    ///
    /// # Errors
    /// The first rank's that failed.
    pub fn stop(self) -> anyhow::Result<Vec<LoadTally>> {
        {
            // Whoever is about to rest has looked, or will see it.
            let _rest = self.shared.rest();
            self.shared.stop.store(true, Ordering::Release);
            self.shared.woken.notify_all();
        }
        let ended = self.ranks.into_iter().map(|t| t.join().unwrap_or_else(|_| bail!("a rank panicked")));
        ended.collect::<Vec<_>>().into_iter().collect()
    }

    fn wait(&self, what: &str, done: impl Fn() -> bool) -> anyhow::Result<()> {
        let until = Instant::now() + PATIENCE;
        while !done() {
            if self.shared.failed.load(Ordering::Relaxed) {
                bail!("a rank failed; stopping says why");
            }
            if Instant::now() >= until {
                bail!("{what} did not end within {PATIENCE:?}");
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }
}

fn run(
    config: RuntimeConfig,
    root: &str,
    rank: usize,
    n: usize,
    count: usize,
    shared: &Shared,
) -> anyhow::Result<LoadTally> {
    let runtime = Runtime::open(config)?;
    if let Some(e) = runtime.load_error() {
        bail!("{}", e.sentinel);
    }
    let mut comm = runtime.init_comm(CommOptions::with_root(root, rank, n))?;
    let t = comm.allocate(count as u64 * 4)?;
    let mut tally = LoadTally::default();
    let mut bytes = vec![0u8; count * 4];
    loop {
        let word = if rank == 0 { shared.word() } else { Word::GoOn };
        let (word, seconds) = round(&mut comm, &t, &mut bytes, word, &mut tally)?;
        if rank == 0 {
            shared.nanos.fetch_add((seconds * 1e9) as u64, Ordering::Relaxed);
            shared.rounds.fetch_add(1, Ordering::Relaxed);
        }
        match word {
            Word::GoOn => {}
            Word::Rest => shared.sleep(),
            Word::Stop => return Ok(tally),
        }
    }
}

/// One checked all-reduce. Answers what rank 0 says in it, and the seconds of the operation.
fn round(
    comm: &mut Communicator,
    t: &DeviceMemory,
    bytes: &mut [u8],
    word: Word,
    tally: &mut LoadTally,
) -> anyhow::Result<(Word, f64)> {
    let (rank, n, turn) = (comm.rank() as u64, comm.nranks() as u64, tally.done);
    // Whole numbers far below 2^24: sums are exact in any order.
    let value = |i: usize, rank: u64| ((turn + i as u64) % 1021 * (rank + 1)) as f32;
    for (i, b) in bytes.chunks_exact_mut(4).enumerate() {
        b.copy_from_slice(&if i == 0 { f32::from(word as u8) } else { value(i, rank) }.to_le_bytes());
    }
    t.write(0, bytes)?;
    let begin = Instant::now();
    comm.raw().all_reduce(Io::in_place(t), bytes.len() as u64 / 4, DataType::Fp32, ReduceOp::Sum)?;
    let seconds = begin.elapsed().as_secs_f64();
    t.read(0, bytes)?;
    let mut sums = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let word = match sums.next() {
        Some(1.0) => Word::Stop,
        Some(2.0) => Word::Rest,
        _ => Word::GoOn,
    };
    let ranks = (n * (n + 1) / 2) as f32;
    tally.wrong += sums.enumerate().filter(|(i, v)| *v != value(i + 1, 0) * ranks).count() as u64;
    tally.done += 1;
    Ok((word, seconds))
}

/// Operations that some ranks have done and others have not, and wrong elements.
pub fn lost_and_wrong(all: &[LoadTally]) -> (u64, u64) {
    let most = all.iter().map(|t| t.done).max().unwrap_or(0);
    all.iter().fold((0, 0), |(lost, wrong), t| (lost + most - t.done, wrong + t.wrong))
}

/// The `p`-th of a hundred of some times, in milliseconds; 0 of none.
pub fn percentile_ms(times: &mut [Duration], p: usize) -> f64 {
    times.sort_unstable();
    times.get((times.len() * p / 100).min(times.len().saturating_sub(1))).map_or(0.0, |t| t.as_secs_f64() * 1e3)
}
