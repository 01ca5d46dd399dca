//! One rank of a fault scenario, in a process of its own. `fault SCRIPT`; RANK, WORLD_SIZE and NEURON_RT_ROOT_COMM_ID say who
//! it is. Joins, prints `ready`, then runs the script: steps separated by spaces, a step is `name:argument:...`.
//!
//! | step | what it does |
//! |---|---|
//! | `all_reduce:T:OP:N`, `broadcast:T:N:ROOT`, `reduce:T:OP:N:ROOT`, `all_gather:T:N`, ... | a collective of N elements in private memory |
//! | `t_all_reduce:N` | all_reduce of fp32 in device memory |
//! | `barrier` | |
//! | `zero` | every collective with a count of 0, private and device memory |
//! | `odd` | all_reduce at every alignment from 1 to 15, with bytes around the buffers watched |
//! | `sleep:MS` | |
//! | `say:WORD`, `exit:CODE` | |
//! | `abort_in:MS` | a thread that says so and aborts twice after MS milliseconds |
//! | `free` | frees the communicator, and says how long that took |
//! | `twin`, `twin:STEP` | makes another communicator of the same ranks; a step on that one |
//! | `within:MS:STEP` | a step with a deadline of its own |
//! | `fails:STEP` | a step that must fail; prints `failed NUMBER NAME: text` and goes on |
//! | `loop` | all_reduce of 1 MiB in device memory for ever |
//! | `work:N` | N all_reduce calls of varying sizes, each verified |
//! | `fork` | forks; the child calls barrier; the parent says what the child said, then goes on |
//! | `open` | says how many descriptors are open |
//! | `direct` | says whether private memory is read directly |
//! | `bind` | gives this thread all CPUs, has the plugin bind it to all, and says which it has then |
//! | `host_loop:N` | broadcasts of N bytes of private memory for ever, each verified |
//! | `deny_readv` | from here on the kernel refuses this thread process_vm_readv |
//! | `gone:N` | rank 0 sends N bytes of private memory to rank 1, and the second half is not accessible |
//!
//! A failure prints `error NUMBER NAME: text`, before it whether a user's buffer was written and `dead RANK` if that one's end is
//! why, and exits with code 1.
//!
//! Variables: FAULT_ABORT_INIT_MS aborts the init after so long; FAULT_ITIMER_US has a signal interrupt every system call
//! at that rate; FAULT_SEGV installs a handler for SIGSEGV before the runtime opens, and faults after the script;
//! FAULT_DENY_READV has the kernel refuse process_vm_readv from the start; FAULT_CYCLES=N joins and frees N times in this process before it runs the script; FAULT_LOG prints warnings.
//!
//! `unsafe` stands here because forking, signals and timers are what is tested.

#![expect(unsafe_code, reason = "forks, signals, timers and memory that goes away are what is tested")]

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use sandbox::abort::AbortToken;
use sandbox::vars;
use tests::events::{self, Events};
use wccl::{CommOptions, Communicator, DataType, Error, Io, Peers, ReduceOp, Runtime, RuntimeConfig};

mod sys {
    //! The few calls of the C library that std does not offer.

    /// `struct itimerval`: interval and first, each seconds and microseconds.
    #[repr(C)]
    pub(crate) struct Itimerval(pub [i64; 2], pub [i64; 2]);

    unsafe extern "C" {
        pub(crate) fn fork() -> i32;
        pub(crate) fn _exit(code: i32) -> !;
        pub(crate) fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
        pub(crate) fn signal(number: i32, handler: usize) -> usize;
        pub(crate) fn siginterrupt(number: i32, flag: i32) -> i32;
        pub(crate) fn setitimer(which: i32, new: *const Itimerval, old: *mut Itimerval) -> i32;
        pub(crate) fn write(fd: i32, bytes: *const u8, n: usize) -> isize;
        pub(crate) fn prctl(option: i32, a: usize, b: usize, c: usize, d: usize) -> i32;
        pub(crate) fn mprotect(at: *mut u8, n: usize, access: i32) -> i32;
    }

    /// `struct sock_filter`: code, jumps if true and if false, operand.
    #[repr(C)]
    pub(crate) struct Filter(pub u16, pub u8, pub u8, pub u32);

    /// `struct sock_fprog`: how many instructions, and where.
    #[repr(C)]
    pub(crate) struct Program(pub u16, pub *const Filter);
}

const SIGSEGV: i32 = 11;
const SIGALRM: i32 = 14;

extern "C" fn nothing(_: i32) {}

extern "C" fn report_and_exit(_: i32) {
    let text = b"own handler\n";
    // SAFETY: both calls are allowed in a signal handler; the bytes are static.
    unsafe {
        sys::write(1, text.as_ptr(), text.len());
        sys::_exit(77)
    }
}

fn number(name: &str) -> Result<usize> {
    let text = vars::variable(name)?.with_context(|| format!("{name} is not set"))?;
    text.parse().with_context(|| format!("{name}={text} is no number"))
}

fn optional(name: &str) -> Option<u64> {
    let text = vars::variable(name).unwrap_or_else(|e| panic!("{e}"))?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A test that is over does not read.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

fn main() -> ExitCode {
    let print = |e: &tracing::Event<'_>| say(&format!("log {}{}", e.metadata().level(), events::fields(e)));
    let printer = Events(tracing::Level::WARN, print);
    if optional("FAULT_LOG").is_some() && tracing::subscriber::set_global_default(printer).is_err() {
        say("the log is not printed: another subscriber is set");
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            if let Some(rank) = e.downcast_ref::<Error>().and_then(Error::dead_rank) {
                say(&format!("dead {rank}"));
            }
            say(&format!("error {}", told(&e)));
            ExitCode::FAILURE
        }
    }
}

fn told(e: &anyhow::Error) -> String {
    match e.downcast_ref::<Error>() {
        Some(known) => format!("{} {}: {known}", known.status().0, known.status().name()),
        None => format!("- -: {e:#}"),
    }
}

fn run() -> Result<()> {
    let script = std::env::args().nth(1).unwrap_or_default();
    let (rank, n) = (number("RANK")?, number("WORLD_SIZE")?);
    let root = vars::variable("NEURON_RT_ROOT_COMM_ID")?.context("NEURON_RT_ROOT_COMM_ID is not set")?;
    let segv = optional("FAULT_SEGV").is_some();
    if segv {
        let handler = report_and_exit as extern "C" fn(i32) as usize;
        // SAFETY: the handler only makes calls that are allowed in one.
        unsafe { sys::signal(SIGSEGV, handler) };
    }
    if let Some(us) = optional("FAULT_ITIMER_US") {
        let every = [0, us as i64];
        // SAFETY: the handler does nothing; the pointers are to a value that lives here, and null is allowed.
        unsafe {
            sys::signal(SIGALRM, nothing as extern "C" fn(i32) as usize);
            sys::siginterrupt(SIGALRM, 1);
            sys::setitimer(0, &sys::Itimerval(every, every), std::ptr::null_mut());
        }
    }
    if optional("FAULT_DENY_READV").is_some() {
        deny_readv()?;
    }
    let runtime = Runtime::open(RuntimeConfig::from_env()?)?;
    if let Some(e) = runtime.load_error() {
        bail!("{}", e.sentinel);
    }
    for _ in 0..optional("FAULT_CYCLES").unwrap_or(0) {
        let mut comm = runtime.init_comm(CommOptions::with_root(root.clone(), rank, n))?;
        comm.barrier()?;
    }
    let token = AbortToken::new()?;
    if let Some(ms) = optional("FAULT_ABORT_INIT_MS") {
        abort_in(ms, token.clone());
    }
    let options = CommOptions { abort: Some(token), ..CommOptions::with_root(root, rank, n) };
    let (mut comm, mut twin) = (Some(runtime.init_comm(options)?), None);
    say("ready");
    for step in script.split_whitespace() {
        let words: Vec<&str> = step.split(':').collect();
        take(&mut comm, &mut twin, &words).context_of_step(step)?;
    }
    say("done");
    if segv {
        // SAFETY: none; the fault is what is wanted, and the handler ends the process.
        unsafe { std::ptr::without_provenance_mut::<u8>(8).write_volatile(1) };
    }
    Ok(())
}

/// One step: those that say which communicator are here, the others are carried out on one.
fn take(comm: &mut Option<Communicator>, twin: &mut Option<Communicator>, words: &[&str]) -> Result<()> {
    const NONE: &str = "the communicator is freed, or not made";
    match words {
        ["free"] => {
            let begun = Instant::now();
            drop(comm.take());
            say(&format!("freed in {} ms", begun.elapsed().as_millis()));
            Ok(())
        }
        ["twin"] => {
            *twin = comm.as_ref().context(NONE)?.split(Some(0), 0)?;
            Ok(())
        }
        ["twin", step @ ..] => carry_out(twin.as_mut().context(NONE)?, step),
        ["fails", step @ ..] => {
            let Err(e) = take(comm, twin, step) else { bail!("it went through") };
            say(&format!("failed {}", told(&e)));
            Ok(())
        }
        step => carry_out(comm.as_mut().context(NONE)?, step),
    }
}

/// Keeps errors of the runtime as they are, for their status, and puts the step before others.
trait OfStep {
    fn context_of_step(self, step: &str) -> Result<()>;
}

impl OfStep for Result<()> {
    fn context_of_step(self, step: &str) -> Result<()> {
        self.map_err(|e| if e.is::<Error>() { e } else { e.context(format!("step {step}")) })
    }
}

fn abort_in(ms: u64, token: AbortToken) {
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(ms));
        // Before it: what the abort ends may end the process before this thread goes on.
        say("aborts");
        token.abort("the user said stop");
        token.abort("and again");
    });
}

/// Runs a collective on private buffers whose output is watched.
fn watched(
    comm: &mut Communicator,
    input: usize,
    output: usize,
    f: impl FnOnce(&mut Communicator, Io<'_>) -> Result<(), Error>,
) -> Result<()> {
    let (src, mut dst) = (vec![1u8; input], vec![0xA5u8; output]);
    let answer = f(comm, Io::Host { src: &src, dst: &mut dst });
    if answer.is_err() {
        let written = dst.iter().any(|b| *b != 0xA5) || src.iter().any(|b| *b != 1);
        say(if written { "a user's buffer was written" } else { "no user's buffer was written" });
    }
    Ok(answer?)
}

fn carry_out(comm: &mut Communicator, words: &[&str]) -> Result<()> {
    let n = comm.nranks();
    let num = |i: usize| -> Result<usize> { Ok(words.get(i).context("an argument is missing")?.parse()?) };
    let word = |i: usize| words.get(i).copied().context("an argument is missing");
    match word(0)? {
        "barrier" => Ok(comm.barrier()?),
        "all_reduce" => {
            let (t, op, count): (DataType, ReduceOp, _) = (word(1)?.parse()?, word(2)?.parse()?, num(3)?);
            let bytes = count * t.size();
            watched(comm, bytes, bytes, |c, io| c.raw().all_reduce(io, count as u64, t, op))
        }
        "reduce" => {
            let (t, op, count, root): (DataType, ReduceOp, _, _) =
                (word(1)?.parse()?, word(2)?.parse()?, num(3)?, num(4)?);
            let bytes = count * t.size();
            watched(comm, bytes, bytes, |c, io| c.raw().reduce(io, count as u64, t, op, root))
        }
        "broadcast" => {
            let (t, count, root): (DataType, _, _) = (word(1)?.parse()?, num(2)?, num(3)?);
            let bytes = count * t.size();
            watched(comm, bytes, bytes, |c, io| c.raw().broadcast(io, count as u64, t, root))
        }
        "all_gather" => {
            let (t, count): (DataType, _) = (word(1)?.parse()?, num(2)?);
            let bytes = count * t.size();
            watched(comm, bytes, n * bytes, |c, io| c.raw().all_gather(io, count as u64, t))
        }
        "t_all_reduce" => {
            let count = num(1)?;
            let (a, b) = (comm.allocate(4 * count as u64)?, comm.allocate(4 * count as u64)?);
            b.write(0, &vec![0xA5; 4 * count])?;
            let answer = comm.raw().all_reduce(Io::device(&a, &b), count as u64, DataType::Fp32, ReduceOp::Sum);
            if answer.is_err() {
                let mut now = vec![0; 4 * count];
                b.read(0, &mut now)?;
                let written = now.iter().any(|b| *b != 0xA5);
                say(if written { "a user's buffer was written" } else { "no user's buffer was written" });
            }
            Ok(answer?)
        }
        "zero" => zero(comm),
        "odd" => odd(comm),
        "work" => work(comm, num(1)?),
        "loop" => {
            let t = comm.allocate(1 << 20)?;
            loop {
                comm.raw().all_reduce(Io::in_place(&t), 1 << 18, DataType::Fp32, ReduceOp::Max)?;
            }
        }
        "sleep" => {
            // Signals end a sleep early only by being counted off it: std goes on.
            std::thread::sleep(Duration::from_millis(num(1)? as u64));
            Ok(())
        }
        "say" => {
            say(word(1)?);
            Ok(())
        }
        "exit" => std::process::exit(num(1)? as i32),
        "abort_in" => {
            abort_in(num(1)? as u64, comm.abort_token().clone());
            Ok(())
        }
        "open" => {
            say(&format!("open {}", std::fs::read_dir("/proc/self/fd")?.count() - 1));
            Ok(())
        }
        "fork" => fork(comm),
        "within" => {
            let deadline = Duration::from_millis(num(1)? as u64);
            carry_out(&mut comm.within(deadline), words.get(2..).context("a step is missing")?)
        }
        "direct" => {
            say(&format!("direct {}", comm.criteria().direct));
            Ok(())
        }
        "bind" => {
            let mut all = CpuSet::new();
            (0..CpuSet::MAX_CPU).for_each(|cpu| all.set(cpu));
            sched_setaffinity(None, &all)?;
            comm.set_affinity(Some(&[u64::MAX; 16]), -1)?;
            let has = sched_getaffinity(None)?;
            let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| has.is_set(*cpu)).collect();
            say(&format!("bound to {cpus:?}"));
            Ok(())
        }
        "host_loop" => host_loop(comm, num(1)?),
        "deny_readv" => deny_readv(),
        "gone" => gone(comm, num(1)?),
        other => bail!("unknown step `{other}`"),
    }
}

/// Each broadcast has other bytes than the one before; all of them must be there.
fn host_loop(comm: &mut Communicator, bytes: usize) -> Result<()> {
    let mut buffer = vec![0u8; bytes];
    for i in 0.. {
        let byte = i as u8;
        buffer.fill(if comm.rank() == 0 { byte } else { !byte });
        comm.raw().broadcast(Io::HostInPlace(&mut buffer), bytes as u64, DataType::Uint8, 0)?;
        ensure!(buffer.iter().all(|b| *b == byte), "broadcast {i} brought other bytes");
        if i == 0 {
            say("looping");
        }
    }
    Ok(())
}

/// A seccomp filter: process_vm_readv fails with EPERM in this thread and those that it starts.
fn deny_readv() -> Result<()> {
    const READV: u32 = if cfg!(target_arch = "x86_64") { 310 } else { 270 };
    const NO_NEW_PRIVS: i32 = 38;
    const SECCOMP: i32 = 22;
    const FILTER: usize = 2;
    let filter = [
        // Load the number of the call; if it is this one, EPERM, else let it through.
        sys::Filter(0x20, 0, 0, 0),
        sys::Filter(0x15, 0, 1, READV),
        sys::Filter(0x06, 0, 0, 0x0005_0001),
        sys::Filter(0x06, 0, 0, 0x7FFF_0000),
    ];
    let program = sys::Program(filter.len() as u16, filter.as_ptr());
    // SAFETY: the program and its filter live through the calls, which only read them.
    let done = unsafe {
        sys::prctl(NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && sys::prctl(SECCOMP, FILTER, (&raw const program).addr(), 0, 0) == 0
    };
    ensure!(done, "the seccomp filter was not installed: {}", std::io::Error::last_os_error());
    Ok(())
}

/// What a wrong program does: its input is no longer there when a peer reads it.
fn gone(comm: &mut Communicator, bytes: usize) -> Result<()> {
    const PAGE: usize = 4096;
    let rank = comm.rank();
    let mut buffer = vec![1u8; bytes + 4 * PAGE];
    let from = buffer.as_ptr().align_offset(PAGE);
    let half = buffer[from..].as_mut_ptr().wrapping_add((bytes / 2).next_multiple_of(PAGE));
    // SAFETY: whole pages of the buffer, which this process does not touch until they are accessible again.
    let access = |access: i32| unsafe { sys::mprotect(half, bytes / 2, access) };
    let peers = Peers { dst: (rank == 0).then_some(1), src: (rank == 1).then_some(0) };
    let mut dst = vec![0xA5u8; bytes];
    if rank == 0 {
        ensure!(access(0) == 0, "mprotect: {}", std::io::Error::last_os_error());
    }
    let (src, dst): (&[u8], &mut [u8]) = (&buffer[from..from + bytes], &mut dst);
    let answer = comm.raw().send_recv(Io::Host { src, dst }, bytes as u64, DataType::Uint8, peers);
    ensure!(rank != 0 || access(3) == 0, "mprotect: {}", std::io::Error::last_os_error());
    Ok(answer?)
}

/// A call of no elements is a call: it synchronises, and touches nothing.
fn zero(comm: &mut Communicator) -> Result<()> {
    use DataType::Fp32;
    use ReduceOp::Sum;
    let peers = Peers {
        dst: Some((comm.rank() + 1) % comm.nranks()),
        src: Some((comm.rank() + comm.nranks() - 1) % comm.nranks()),
    };
    let t = comm.allocate(0)?;
    for device in [false, true] {
        let io = || if device { Io::device(&t, &t) } else { Io::Host { src: &[], dst: &mut [] } };
        comm.raw().all_reduce(io(), 0, Fp32, Sum)?;
        comm.raw().all_gather(io(), 0, Fp32)?;
        comm.raw().reduce_scatter(io(), 0, Fp32, Sum)?;
        comm.raw().broadcast(io(), 0, Fp32, 0)?;
        comm.raw().reduce(io(), 0, Fp32, Sum, 0)?;
        comm.raw().all_to_all(io(), 0, Fp32)?;
        comm.raw().send_recv(io(), 0, Fp32, peers)?;
        say(if device { "zero in device memory" } else { "zero in private memory" });
    }
    Ok(())
}

/// Buffers at every alignment; the bytes before and behind stay.
fn odd(comm: &mut Communicator) -> Result<()> {
    const ROOM: usize = 64;
    let n = comm.nranks();
    for at in 1..16usize {
        for count in [1usize, 3, 7, 4097] {
            let bytes = count * 4;
            let mut src = vec![0xEEu8; bytes + 2 * ROOM];
            let mut dst = src.clone();
            let (from, to) = (at, 16 - at);
            src[from..from + bytes].copy_from_slice(&[1f32; 4097].map(f32::to_le_bytes).as_flattened()[..bytes]);
            let io = Io::Host { src: &src[from..from + bytes], dst: &mut dst[to..to + bytes] };
            comm.raw().all_reduce(io, count as u64, DataType::Fp32, ReduceOp::Sum)?;
            let right = (n as f32).to_le_bytes();
            ensure!(dst[to..to + bytes].chunks(4).all(|c| c == right), "wrong sum at alignment {at}, count {count}");
            let around = dst[..to].iter().chain(&dst[to + bytes..]).all(|b| *b == 0xEE);
            ensure!(around, "bytes around the output were written at alignment {at}, count {count}");
        }
    }
    Ok(())
}

fn work(comm: &mut Communicator, calls: usize) -> Result<()> {
    let n = comm.nranks();
    for i in 0..calls {
        let count = [1usize, 100, 5_000, 300_000][i % 4];
        let mut ones = vec![1u8; count];
        comm.raw().all_reduce(Io::HostInPlace(&mut ones), count as u64, DataType::Uint8, ReduceOp::Sum)?;
        ensure!(ones.iter().all(|v| usize::from(*v) == n), "wrong sum in call {i}");
    }
    Ok(())
}

/// The child of a fork must not use the communicator; the parent must not notice that it tried.
fn fork(comm: &mut Communicator) -> Result<()> {
    // SAFETY: no other thread of this program holds a lock that the child needs: the runtime's own threads sleep, and the
    // child only makes the one call under test, writes a line and ends.
    match unsafe { sys::fork() } {
        -1 => bail!("fork failed: {}", std::io::Error::last_os_error()),
        0 => {
            let said = comm.barrier().map_or_else(|e| e.to_string(), |()| "the child's barrier went through".into());
            say(&format!("child: {said}"));
            // SAFETY: ends the child without running destructors that belong to the parent.
            unsafe { sys::_exit(0) }
        }
        child => {
            let mut status = 0;
            // SAFETY: the pointer is to a local; the child is ours.
            while unsafe { sys::waitpid(child, &mut status, 0) } == -1 {
                let e = std::io::Error::last_os_error();
                ensure!(e.kind() == std::io::ErrorKind::Interrupted, "waiting for the child: {e}");
            }
            ensure!(status == 0, "the child ended with status {status}");
            Ok(())
        }
    }
}
