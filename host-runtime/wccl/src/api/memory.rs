//! Buffers of a collective in the dynamic form: bytes in device memory, or private memory of the process.

use std::sync::Arc;

use hw_bridge::call::Op;
use hw_bridge::exec::sequencer::{CallBuffers, LocalMem};
use hw_bridge::memory::hbm::HbmBuf;

use crate::error::Error;

/// A piece of a core's device memory, which the peers of a communicator reach directly. Freed when dropped.
///
/// Peers read and write it while a collective that was given it runs, as a device would; reading it meanwhile gives
/// whatever is there.
#[derive(Debug)]
pub struct DeviceMemory(pub(crate) Arc<HbmBuf>);

impl DeviceMemory {
    /// Bytes.
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Copies `bytes` in at `offset`.
    ///
    /// # Errors
    /// [`Error::Usage`] if they do not fit.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let ok = self.0.write(offset, bytes);
        self.inside(ok, offset, bytes.len())
    }

    /// Copies bytes from `offset` out.
    ///
    /// # Errors
    /// [`Error::Usage`] if the range is not all inside.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let ok = self.0.read(offset, bytes);
        self.inside(ok, offset, bytes.len())
    }

    fn inside(&self, ok: bool, offset: u64, len: usize) -> Result<(), Error> {
        if ok {
            return Ok(());
        }
        Err(Error::Usage(format!("{len} bytes at offset {offset} are not inside a tensor of {} bytes", self.len())))
    }
}

/// Input and output of one call. What a collective does not use of them (a broadcast's input off the root) is ignored.
#[derive(Debug)]
pub enum Io<'a> {
    /// Two places in device memory; they may be the same, as NCCL's in-place rules say.
    Device {
        /// Input and its first byte.
        src: (&'a DeviceMemory, u64),
        /// Output and its first byte.
        dst: (&'a DeviceMemory, u64),
    },
    /// Private memory of the process.
    Host {
        /// Input.
        src: &'a [u8],
        /// Output.
        dst: &'a mut [u8],
    },
    /// Private memory that is both. For all_gather, all_gather_v and gather (on its root) the input is the rank's block of the
    /// output; for reduce_scatter, reduce_scatter_v and scatter (on its root) the output is the rank's block of the input.
    HostInPlace(&'a mut [u8]),
}

impl<'a> Io<'a> {
    /// Two places.
    pub fn device(src: &'a DeviceMemory, dst: &'a DeviceMemory) -> Io<'a> {
        Io::Device { src: (src, 0), dst: (dst, 0) }
    }

    /// One place that is both, for collectives whose input and output have the same size.
    pub fn in_place(t: &'a DeviceMemory) -> Io<'a> {
        Io::Device { src: (t, 0), dst: (t, 0) }
    }

    pub(super) fn is_device(&self) -> bool {
        matches!(self, Io::Device { .. })
    }
}

/// What a call needs of its buffers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub op: Op,
    pub rank: usize,
    /// Bytes of input and output on this rank; 0 where it has none.
    pub in_bytes: u64,
    pub out_bytes: u64,
    /// In the in-place form: where the smaller buffer begins in the larger one.
    pub at: u64,
}

/// Input and output, and whether they are the same memory in the way the collective allows.
#[inline(always)]
pub(super) fn resolve<'a>(io: Io<'a>, s: Shape) -> Result<(CallBuffers<'a>, bool), Error> {
    let short = |which, have, need| short(s.op, s.rank, which, have, need);
    let (input, output) = match io {
        Io::Device { src, dst } => {
            let take = |which, t: (&'a DeviceMemory, u64), need| {
                if need == 0 {
                    return Ok(LocalMem::none());
                }
                LocalMem::hbm(&t.0.0, t.1, need).ok_or_else(|| short(which, t.0.len().saturating_sub(t.1), need))
            };
            (take("input", src, s.in_bytes)?, take("output", dst, s.out_bytes)?)
        }
        Io::Host { src, dst } => {
            let (a, b) = (src.len() as u64, dst.len() as u64);
            if a < s.in_bytes {
                return Err(short("input", a, s.in_bytes));
            }
            if b < s.out_bytes {
                return Err(short("output", b, s.out_bytes));
            }
            (LocalMem::input(&src[..s.in_bytes as usize]), LocalMem::output(&mut dst[..s.out_bytes as usize]))
        }
        Io::HostInPlace(buf) => {
            let (have, need) = (buf.len() as u64, s.in_bytes.max(s.out_bytes));
            if have < need {
                return Err(short("buffer", have, need));
            }
            if s.in_bytes == 0 || s.out_bytes == 0 {
                // One side only: nothing can overlap.
                let buf = &mut buf[..need as usize];
                let none = LocalMem::output(&mut []);
                let used = LocalMem::output(buf);
                let (input, output) = if s.in_bytes == 0 { (none, used) } else { (used, none) };
                return Ok((CallBuffers::new(input, output), false));
            }
            let buf = &mut buf[..need as usize];
            let pair = match s.op {
                Op::AllGather | Op::AllGatherV | Op::Gather => {
                    LocalMem::in_place(buf, s.at as usize, s.in_bytes as usize)
                }
                Op::ReduceScatter | Op::ReduceScatterV | Op::Scatter => {
                    LocalMem::in_place(buf, s.at as usize, s.out_bytes as usize).map(|(a, b)| (b, a))
                }
                _ => LocalMem::in_place(buf, 0, need as usize),
            };
            pair.ok_or_else(|| short("buffer", have, need))?
        }
    };
    let buffers = CallBuffers::new(input, output);
    let Some(distance) = buffers.overlap() else { return Ok((buffers, false)) };
    let allowed = match s.op {
        Op::AllGather | Op::AllGatherV | Op::Gather => distance == s.at as i64,
        Op::ReduceScatter | Op::ReduceScatterV | Op::Scatter => distance == -(s.at as i64),
        Op::SendRecv | Op::Permute | Op::AllToAllV | Op::Group => false,
        _ => distance == 0,
    };
    if allowed { Ok((buffers, true)) } else { Err(accident(s.op, s.rank, distance)) }
}

#[cold]
fn short(op: Op, rank: usize, which: &str, have: u64, need: u64) -> Error {
    Error::Usage(format!("the {which} of {} on rank {rank} has {have} bytes, {need} are needed", op.name()))
}

#[cold]
fn accident(op: Op, rank: usize, distance: i64) -> Error {
    Error::Usage(format!(
        "input and output of {} on rank {rank} overlap by accident ({distance} bytes apart); use separate buffers, or the \
         in-place form",
        op.name()
    ))
}
