//! One rank of a job whose plugin is swapped, in a process of its own. RANK, WORLD_SIZE and NEURON_RT_ROOT_COMM_ID say who it
//! is, SWAP_TENANT whose; SWAP_FAULT=STEP:WHAT(:MS)? puts a fault into its swaps (`Ready:Stop`, `Import:Fail`, `Vote:Delay:50`).
//!
//! Prints `ready`, then reduces for ever, verifying every element of every result, until rank 0 reads a line; all ranks then
//! stop after the same operation and print `done OPERATIONS`. A failed operation prints `error TEXT`; the rank then waits for its
//! end, so that a swap that is under way can be followed to its own.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use sandbox::vars;
use tests::reduction;
use wccl::swap::{Fault, Step};
use wccl::{CommOptions, Communicator, DataType, Io, ReduceOp, Runtime, RuntimeConfig};

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A test that is over does not read.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

fn variable(name: &str) -> Result<String> {
    vars::variable(name)?.with_context(|| format!("{name} is not set"))
}

fn fault(text: &str) -> Result<(Step, Fault)> {
    const STEPS: [Step; 12] = [
        Step::Load,
        Step::Prepare,
        Step::Freeze,
        Step::Export,
        Step::Import,
        Step::Vote,
        Step::Quiesce,
        Step::Closed,
        Step::Ready,
        Step::Decide,
        Step::Commit,
        Step::Exchange,
    ];
    let mut words = text.split(':');
    let name = words.next().unwrap_or_default();
    let step = STEPS.into_iter().find(|s| format!("{s:?}") == name).with_context(|| format!("no step `{name}`"))?;
    let what = match words.next() {
        Some("Fail") => Fault::Fail,
        Some("Stop") => Fault::Stop,
        Some("Kill") => Fault::Kill,
        Some("Delay") => Fault::Delay(Duration::from_millis(words.next().context("no milliseconds")?.parse()?)),
        other => bail!("no fault {other:?}"),
    };
    Ok((step, what))
}

fn main() {
    if let Err(e) = run() {
        say(&format!("error {e:#}"));
        std::process::exit(1);
    }
}

fn run() -> Result<()> {
    let (rank, n): (usize, usize) = (variable("RANK")?.parse()?, variable("WORLD_SIZE")?.parse()?);
    let mut config = RuntimeConfig::from_env()?;
    config.vars.insert("CCOM_SOCKET_IFNAME".into(), "lo".into());
    config.tenant = variable("SWAP_TENANT")?;
    if let Some(text) = vars::variable("SWAP_FAULT")? {
        config.swap_faults.push(fault(&text)?);
    }
    let runtime = Runtime::open(config)?;
    if let Some(e) = runtime.load_error() {
        bail!("{}", e.sentinel);
    }
    let root = variable("NEURON_RT_ROOT_COMM_ID")?;
    let mut comm = runtime.init_comm(CommOptions::with_root(root, rank, n))?;
    let enough = Arc::new(AtomicBool::new(false));
    if rank == 0 {
        let enough = enough.clone();
        std::thread::spawn(move || {
            let mut line = String::new();
            // An end of the input is an answer too.
            let _ = std::io::stdin().read_line(&mut line);
            enough.store(true, Ordering::Release);
        });
    }
    match work(&mut comm, &enough) {
        Ok(ops) => say(&format!("done {ops}")),
        Err(e) => {
            say(&format!("error {e:#}"));
            std::thread::sleep(Duration::from_secs(60));
        }
    }
    Ok(())
}

/// Reduces until rank 0 has enough; answers how often.
fn work(comm: &mut Communicator, enough: &AtomicBool) -> Result<u32> {
    let most = 1 << 16;
    let t = comm.allocate(4 * most)?;
    let mut ops = 0u32;
    loop {
        // Sizes of every algorithm.
        let count = [4, 1000, 20_000, most][ops as usize % 4];
        let mut bytes = reduction::filled(comm.rank(), count as usize, ops, enough.load(Ordering::Acquire));
        t.write(0, &bytes)?;
        comm.raw().all_reduce(Io::in_place(&t), count, DataType::Uint32, ReduceOp::Sum)?;
        t.read(0, &mut bytes)?;
        let end = reduction::checked(&bytes, comm.nranks(), ops)?;
        ops += 1;
        if ops == 8 {
            say("ready");
        }
        if end {
            return Ok(ops);
        }
    }
}
