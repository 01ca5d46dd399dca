//! `wccl bench --pingpong`: a message from rank 0 to rank 1 and back, by `send` and `recv`; half of the round is what one takes.
//!
//! Further ranks stand by. Every byte of the last round of each size is compared.

use std::process::ExitCode;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use wccl::Error;
use wccl::{Communicator, DeviceMemory, Received};

use crate::rank::collective::BufferMemory;
use crate::rank::measure::number;
use crate::rank::member;
use crate::term::{Paint, ProgressLine};

/// What a rank needs to know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PingJob {
    /// Bytes of the messages.
    pub sizes: Vec<u64>,
    /// Timed rounds of each size.
    pub iters: u32,
    /// Rounds before them.
    pub warmup: u32,
    /// Where the buffers lie.
    pub memory: BufferMemory,
}

/// A message's memory.
enum MessageMemory {
    Hbm(DeviceMemory),
    Host(Vec<u8>),
}

impl MessageMemory {
    fn send(&self, comm: &Communicator, to: usize) -> Result<(), Error> {
        match self {
            MessageMemory::Hbm(t) => comm.send(to, 0, t),
            MessageMemory::Host(b) => comm.send(to, 0, &b[..]),
        }
    }

    fn recv(&mut self, comm: &Communicator, from: usize) -> Result<Received, Error> {
        match self {
            MessageMemory::Hbm(t) => comm.recv(Some(from), Some(0), &*t),
            MessageMemory::Host(b) => comm.recv(Some(from), Some(0), &mut b[..]),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        match self {
            MessageMemory::Hbm(t) => t.write(0, bytes),
            MessageMemory::Host(b) => {
                b.copy_from_slice(bytes);
                Ok(())
            }
        }
    }

    fn holds(&self, bytes: &[u8]) -> Result<bool, Error> {
        match self {
            MessageMemory::Hbm(t) => {
                let mut got = vec![0; bytes.len()];
                t.read(0, &mut got)?;
                Ok(got == bytes)
            }
            MessageMemory::Host(b) => Ok(b == bytes),
        }
    }
}

/// One rank.
///
/// # Errors
/// Joining or a message failed, or one arrived that is not what was sent.
pub fn work(job: &PingJob, rank: usize, n: usize) -> anyhow::Result<ExitCode> {
    let progress = ProgressLine::start(rank == 0, "loading the plugin and joining the group");
    let say = |text: &str| if rank == 0 { progress.print(text) } else { Ok(()) };
    let mut m = member::join(rank, n)?;
    let paint = Paint::stdout();
    say(&format!(
        "# wccl {}: messages between two ranks on one server, {} buffers; {} warm-up and {} timed rounds a size; GB is 10^9 bytes",
        env!("CARGO_PKG_VERSION"),
        job.memory.name(),
        job.warmup,
        job.iters
    ))?;
    say(&paint.bold(&format!("#{:>12}{:>11}{:>11}{:>11}{:>9}", "size", "median", "p99", "min", "bw")))?;
    say(&paint.dim(&format!("#{:>12}{:>11}{:>11}{:>11}{:>9}", "(B)", "(us)", "(us)", "(us)", "(GB/s)")))?;
    for size in &job.sizes {
        progress.phase(&crate::size::short(*size));
        if let Some(us) = rounds(job, &m.comm, *size)? {
            let at = |part: usize| us[(us.len() * part / 100).min(us.len() - 1)];
            let bandwidth = if at(50) > 0.0 { *size as f64 / at(50) / 1e3 } else { 0.0 };
            let columns = [at(50), at(99), at(0)].map(number);
            say(&format!(" {size:>12}{:>11}{:>11}{:>11}{:>9}", columns[0], columns[1], columns[2], number(bandwidth)))?;
        }
    }
    m.comm.barrier()?;
    say(&format!("# {}", paint.good("OK: every message arrived as it was sent")))?;
    Ok(ExitCode::SUCCESS)
}

/// The rounds of one size: on rank 0 half of what each took, in microseconds, sorted.
fn rounds(job: &PingJob, comm: &Communicator, size: u64) -> anyhow::Result<Option<Vec<f64>>> {
    let rank = comm.rank();
    if rank > 1 {
        return Ok(None);
    }
    let mut place = match job.memory {
        BufferMemory::Hbm => MessageMemory::Hbm(comm.allocate(size)?),
        BufferMemory::Host => MessageMemory::Host(vec![0; usize::try_from(size)?]),
    };
    let content: Vec<u8> = (0..size).map(|i| (i * 31 + (i >> 8) + 1) as u8).collect();
    let mut us = Vec::with_capacity(job.iters as usize);
    if rank == 0 {
        place.write(&content)?;
    }
    for round in 0..job.warmup + job.iters {
        if rank == 0 {
            let start = Instant::now();
            place.send(comm, 1)?;
            place.recv(comm, 1)?;
            let took = start.elapsed().as_nanos() as f64 / 2e3;
            us.extend((round >= job.warmup).then_some(took));
        } else {
            place.recv(comm, 0)?;
            place.send(comm, 0)?;
        }
    }
    anyhow::ensure!(place.holds(&content)?, "a message of {size} bytes is not what was sent");
    us.sort_by(f64::total_cmp);
    Ok((rank == 0).then_some(us))
}
