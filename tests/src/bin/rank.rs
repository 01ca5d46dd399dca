//! One rank in a process of its own, for the tests across processes. `rank MODE`; RANK, WORLD_SIZE and
//! NEURON_RT_ROOT_COMM_ID say who it is. Prints `ready` once it is in the group, then what the mode says.

#![expect(unsafe_code, reason = "a rank that forks")]

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use sandbox::vars;
use tests::floats::{self, Digest};
use wccl::{CommOptions, Communicator, DataType, Io, ReduceOp, Runtime, RuntimeConfig};

fn number(name: &str) -> Result<usize> {
    variable(name)?.parse().with_context(|| format!("{name} is no number"))
}

fn variable(name: &str) -> Result<String> {
    vars::variable(name)?.with_context(|| format!("{name} is not set"))
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A launcher that is gone does not read.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

fn main() {
    if let Err(e) = run() {
        say(&format!("error: {e:#}"));
        std::process::exit(1);
    }
}

fn run() -> Result<()> {
    let mode = std::env::args().nth(1).unwrap_or_default();
    let (rank, n) = (number("RANK")?, number("WORLD_SIZE")?);
    let root = variable("NEURON_RT_ROOT_COMM_ID")?;
    let mut config = RuntimeConfig::from_env()?;
    config.vars.insert("CCOM_SOCKET_IFNAME".into(), "lo".into());
    let runtime = Runtime::open(config)?;
    if let Some(e) = runtime.load_error() {
        bail!("{}", e.sentinel);
    }
    let graph = mode != "bootstrap";
    let mut comm = runtime.init_comm(CommOptions { graph, ..CommOptions::with_root(root, rank, n) })?;
    say("ready");
    match mode.as_str() {
        "bootstrap" => bootstrap(&mut comm, &runtime),
        "loop" => loop_for_ever(&mut comm),
        "late" => {
            // The last rank never comes to the second operation.
            comm.barrier()?;
            if rank == n - 1 {
                for_ever();
            }
            Ok(comm.within(Duration::from_millis(700)).barrier()?)
        }
        "once" => {
            let mut ones = vec![1u8; 3000];
            comm.raw().all_reduce(Io::HostInPlace(&mut ones), 3000, DataType::Uint8, ReduceOp::Sum)?;
            ensure!(ones.iter().all(|v| usize::from(*v) == n), "wrong sum");
            say("done");
            Ok(())
        }
        "tally" => tally(&mut comm),
        "outlive" => outlive(&mut comm),
        "shrink" => shrink(&mut comm),
        "floats" => floats(&mut comm),
        "messages" => messages(&comm),
        _ => bail!("unknown mode `{mode}`"),
    }
}

/// Messages over the bootstrap of a group that may span modelled servers; then the graph, which needs a network there.
fn bootstrap(comm: &mut Communicator, runtime: &Runtime) -> Result<()> {
    let (rank, n) = (comm.rank(), comm.nranks());
    let info = comm.info();
    ensure!(info.rings.is_empty(), "rings before the graph was built");
    say(&format!(
        "info cluster {} epoch {} node {} of {} local {}",
        info.cluster_id, info.epoch, info.node, info.node_n, info.local_rank_n
    ));
    say(&format!("tasks {}", runtime.tenant().counters.tasks()));
    let all = comm.bootstrap_all_gather(&[rank as u8; 17])?;
    let expected: Vec<u8> = (0..n).flat_map(|r| [r as u8; 17]).collect();
    ensure!(all == expected, "all-gather differs");
    // Every pair, both ways, in the same order on all ranks.
    for distance in 1..n {
        let (to, from) = ((rank + distance) % n, (rank + n - distance) % n);
        comm.bootstrap_send(to as i32, &[rank as u8, distance as u8])?;
        ensure!(comm.bootstrap_recv(from as i32, 2)? == [from as u8, distance as u8], "message of rank {from} differs");
    }
    say("messages ok");
    match comm.build_graph() {
        Ok(()) => {
            comm.barrier()?;
            say("graph ok");
        }
        Err(e) => say(&format!("graph: {e}")),
    }
    // Nobody leaves while others still exchange.
    let _ = comm.bootstrap_all_gather(&[0]);
    Ok(())
}

/// Reductions of every float type, in both memories and on a thread of their own; then a digest of their bits.
fn floats(comm: &mut Communicator) -> Result<()> {
    let rank = comm.rank();
    let mut digest = Digest::default();
    for (dtype, op) in floats::calls() {
        let (mut mine, count) = (floats::input(rank, dtype), floats::COUNT as u64);
        let tensor = comm.allocate(mine.len() as u64)?;
        tensor.write(0, &mine)?;
        let all_reduce = |comm: &mut Communicator, io: Io<'_>| match op {
            ReduceOp::PreMulSum => comm.raw().all_reduce_scaled(io, count, dtype, floats::scale(rank)),
            op => comm.raw().all_reduce(io, count, dtype, op),
        };
        all_reduce(comm, Io::in_place(&tensor))?;
        // A thread has the state of the one that starts it.
        std::thread::scope(|s| s.spawn(|| all_reduce(comm, Io::HostInPlace(&mut mine))).join())
            .map_err(|_| anyhow!("a thread panicked"))??;
        digest.add(&mine);
        tensor.read(0, &mut mine)?;
        digest.add(&mine);
    }
    say(&format!("bits {digest}"));
    Ok(())
}

/// Operations of all kinds of memory, with their results checked; then what they moved.
fn tally(comm: &mut Communicator) -> Result<()> {
    let (rank, n) = (comm.rank(), comm.nranks());
    const COUNT: usize = 1 << 16;
    let (t, all) = (comm.allocate(4 * COUNT as u64)?, comm.allocate((4 * COUNT * n) as u64)?);
    let fill = |of: usize| -> Vec<u8> { (0..COUNT).flat_map(|i| ((i * 7 + of * 13) as u32).to_le_bytes()).collect() };
    let sum: Vec<u8> =
        (0..COUNT).flat_map(|i| (0..n).map(|r| (i * 7 + r * 13) as u32).sum::<u32>().to_le_bytes()).collect();
    let everything: Vec<u8> = (0..n).flat_map(fill).collect();
    for round in 0..20 {
        t.write(0, &fill(rank))?;
        comm.raw().all_gather(Io::device(&t, &all), COUNT as u64, DataType::Uint32)?;
        let mut got = vec![0; 4 * COUNT * n];
        all.read(0, &mut got)?;
        ensure!(got == everything, "all-gather differs in round {round}");
        comm.raw().all_reduce(Io::in_place(&t), COUNT as u64, DataType::Uint32, ReduceOp::Sum)?;
        let mut got = vec![0; 4 * COUNT];
        t.read(0, &mut got)?;
        ensure!(got == sum, "all-reduce in device memory differs in round {round}");
        let mut private = fill(rank);
        comm.raw().all_reduce(Io::HostInPlace(&mut private), COUNT as u64, DataType::Uint32, ReduceOp::Sum)?;
        ensure!(private == sum, "all-reduce in private memory differs in round {round}");
        comm.barrier()?;
        if round == 0 {
            say("warm");
        }
    }
    let c = comm.counters();
    say(&format!("{} operations, {} bytes copied, {} reduced, {} failures", c.ops, c.copied, c.reduced, c.failures));
    for_ever();
    Ok(())
}

/// Waits to be killed; not for ever, should nobody do it.
fn for_ever() {
    std::thread::sleep(Duration::from_secs(900));
}

/// Runs until the file UNTIL is there, on all ranks; then says what operations and control calls come to.
fn outlive(comm: &mut Communicator) -> Result<()> {
    let until = PathBuf::from(variable("UNTIL")?);
    let mut seen = [0u8];
    comm.barrier()?;
    say("warm");
    while seen[0] == 0 {
        seen[0] = until.exists().into();
        comm.raw().all_reduce(Io::HostInPlace(&mut seen), 1, DataType::Uint8, ReduceOp::Max)?;
    }
    say("operations go on");
    match comm.bootstrap_all_gather(&[0]) {
        Ok(_) => say("control calls go on"),
        Err(e) => say(&format!("control: {e}")),
    }
    comm.barrier()?;
    Ok(())
}

mod sys {
    //! The calls of the C library that std does not offer.

    unsafe extern "C" {
        pub(crate) fn fork() -> i32;
        pub(crate) fn _exit(code: i32) -> !;
    }
}

/// Forks a child that holds all this process has open until it is killed; answers its pid.
fn fork_a_sleeper() -> Result<i32> {
    // SAFETY: the child only sleeps and ends, which needs no lock that another thread may hold.
    match unsafe { sys::fork() } {
        -1 => bail!("fork failed: {}", std::io::Error::last_os_error()),
        0 => {
            for_ever();
            // SAFETY: ends the child without running destructors that belong to the parent.
            unsafe { sys::_exit(0) }
        }
        child => Ok(child),
    }
}

/// Runs until an operation fails, unless the survivors are to shrink at once; then tries the lists of EXCLUDE (`3;2,3`) in
/// turn, saying what each attempt ended with, and uses what it gets. The rank LEAVES exits first of all. The rank FORKS has a
/// child that runs no other program and outlives it. The rank LATE waits for the file UNTIL before it shrinks.
fn shrink(comm: &mut Communicator) -> Result<()> {
    let rank = comm.rank();
    if number("LEAVES").is_ok_and(|r| r == rank) {
        std::process::exit(0);
    }
    let t = comm.allocate(4096)?;
    if vars::variable("AT_ONCE")?.is_none() {
        // The first one connects every pair.
        comm.raw().all_reduce(Io::in_place(&t), 1024, DataType::Fp32, ReduceOp::Max)?;
        say("running");
        if number("FORKS").is_ok_and(|r| r == rank) {
            say(&format!("child {}", fork_a_sleeper()?));
        }
        while comm.raw().all_reduce(Io::in_place(&t), 1024, DataType::Fp32, ReduceOp::Max).is_ok() {}
        say("broken");
    }
    if number("LATE").is_ok_and(|r| r == rank) {
        let until = PathBuf::from(variable("UNTIL")?);
        while !until.exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    for list in variable("EXCLUDE")?.split(';') {
        let excluded: Vec<usize> = list.split(',').map(str::parse).collect::<Result<_, _>>()?;
        match comm.shrink(&excluded) {
            Err(e) => say(&format!("shrink: {e}")),
            Ok(mut smaller) => {
                // The tensor of the broken communicator serves in the new one.
                t.write(0, &1u32.to_le_bytes().repeat(1024))?;
                smaller.raw().all_reduce(Io::in_place(&t), 1024, DataType::Uint32, ReduceOp::Sum)?;
                let mut sum = [0; 4];
                t.read(4092, &mut sum)?;
                say(&format!("rank {} of {} sum {}", smaller.rank(), smaller.nranks(), u32::from_le_bytes(sum)));
                return smaller.barrier().map_err(Into::into);
            }
        }
    }
    bail!("no list of EXCLUDE led to a communicator")
}

/// Every rank sends to every other one and takes what comes; then the last rank waits to be killed, the first two are met by its
/// death, and exchange messages after it.
fn messages(comm: &Communicator) -> Result<()> {
    const LEN: usize = 100_000;
    let (rank, n) = (comm.rank(), comm.nranks());
    let content = |from: usize| vec![from as u8 + 1; LEN];
    let others = || (0..n).filter(move |p| *p != rank);
    let sent: Vec<_> = others().map(|to| comm.isend(to, 1, content(rank))).collect::<Result<_, _>>()?;
    let mut got = vec![0; LEN];
    for _ in others() {
        let from = comm.recv(None, Some(1), &mut got[..])?.from;
        ensure!(got == content(from), "the message of rank {from} differs");
    }
    for s in sent {
        s.wait().result?;
    }
    say("messages ok");
    if rank > 1 {
        for_ever();
    }
    let last = comm.irecv(Some(n - 1), None, vec![0; 8])?;
    let e = last.wait().result.err().context("a message of a rank that sent none")?;
    say(&format!("receive: {e}"));
    let e = comm.send(n - 1, 2, &got[..]).err().context("a rank that has ended took a message")?;
    say(&format!("send: {e}"));
    comm.send(1 - rank, 3, &[rank as u8][..])?;
    comm.recv(None, Some(3), &mut got[..])?;
    ensure!(usize::from(got[0]) == 1 - rank, "another message");
    say("the others go on");
    Ok(())
}

fn loop_for_ever(comm: &mut Communicator) -> Result<()> {
    let t = comm.allocate(1 << 20)?;
    loop {
        comm.raw().all_reduce(Io::in_place(&t), 1 << 18, DataType::Fp32, ReduceOp::Max)?;
    }
}
