//! The proxy: descriptor arrays in, one pass per tick (proxy-and-primitives 2 to 5).
//!
//! Passive: no thread, no blocking, no arithmetic on data. [`Proxy::start`] checks and queues what the producer built, under
//! its basic block; [`Proxy::progress`] is the tick that both the driver's native twin and the library's slot 10 reach, so
//! the two cannot differ. Bytes move through a [`NetPath`]; completion is reported to increment registers.
//!
//! What is here: blocks, current and pending, first touch, posting within 128 slots, completion in order, recycling, stop.
//! Dynamic sizes, flush and remote reads come with the network.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::model::{IncrementRegister, nec_inc_semaphore};

/// Streams of a communicator (NEC_MAX_STREAM_N).
pub const STREAMS: usize = 4;
/// Bytes of the packed records: operation, source, destination (reverse-abi 5.5, 5.6).
pub const RECORD_BYTES: [usize; 3] = [96, 72, 48];
/// Requests in flight of one op (NCCL_NET_NEURON_MAX_REQUESTS).
pub const MAX_IN_FLIGHT: usize = 128;
/// Modulus of the host index (net_idx_loop_size).
pub const LOOP_SIZE: u32 = 512;
/// The host index word by which the device says it is ready (C-04).
pub const READY: u32 = u32::MAX;

/// Moves the bytes of one entry. Handles and addresses are the producer's; the path knows what they mean.
pub trait NetPath: Send + std::fmt::Debug {
    /// Posts a transfer; `None` would block: the proxy tries again at the next tick.
    fn post(&mut self, entry: &Entry) -> Result<Option<u64>, String>;
    /// Bytes moved, once the request is complete; the request is gone then.
    fn test(&mut self, request: u64) -> Result<Option<u64>, String>;
}

/// Where the device tells the proxy how far it is.
#[derive(Debug, Default)]
pub struct HostIndex(AtomicU32);

impl HostIndex {
    /// The device's side: [`READY`] before an execution, then the number of buffers posted, modulo [`LOOP_SIZE`].
    pub fn raise(&self, value: u32) {
        self.0.store(value, Ordering::Release);
    }

    fn read(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }
}

/// One transfer, or a mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Send rather than receive.
    pub send: bool,
    /// Index of the owning operation.
    pub op: u32,
    /// Added to the completion report when it is done.
    pub complete: i32,
    /// Buffer: device address if not 0, else host address.
    pub addr: u64,
    /// Its registration.
    pub mhandle: u64,
    /// Bytes.
    pub size: u32,
    /// NET_TRANSFER 0, NET_OP_COMPLETE 1, EXEC_COMPLETE 2.
    pub mark: u32,
    /// Destination or source rank, −1 for none.
    pub rank: i32,
}

/// What of an operation the tick uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct OpInfo {
    handshake: [u64; 2],
    complete: [u64; 2],
    block: u32,
}

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProxyError {
    /// There are four streams.
    #[error("proxy stream {0} does not exist; streams are 0 to 3")]
    Stream(u32),
    /// The arrays break a rule of their format.
    #[error("the network operations of block {block} cannot be started: {why}")]
    Input {
        /// The basic block.
        block: u32,
        /// What is wrong.
        why: String,
    },
    /// There is no network here.
    #[error(
        "the network operations of block {block} cannot be started: this communicator has no network connector; every rank is on one server, or no net plugin is bound"
    )]
    NoPath {
        /// The basic block.
        block: u32,
    },
    /// A transfer failed; sticky.
    #[error("the network proxy failed: {0}")]
    Failed(String),
}

fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from(u32_at(b, at)) | u64::from(u32_at(b, at + 4)) << 32
}

#[derive(Debug)]
struct Queue {
    send: bool,
    entries: Arc<[Entry]>,
    ops: Arc<[OpInfo]>,
    host_index: Arc<HostIndex>,
    touched: bool,
    next: usize,
    tail: u32,
    in_flight: VecDeque<(Option<u64>, u32, i32)>,
    finished: bool,
}

#[derive(Debug, Default)]
struct Stream {
    current: Option<u32>,
    pending: Option<u32>,
    active: Vec<Queue>,
    waiting: BTreeMap<u32, Vec<Queue>>,
}

/// The proxy of one communicator.
#[derive(Debug, Default)]
pub struct Proxy {
    path: Option<Box<dyn NetPath>>,
    registers: HashMap<u64, Arc<IncrementRegister>>,
    streams: [Stream; STREAMS],
    fatal: Option<String>,
}

impl Proxy {
    /// Gives the proxy its network and the increment registers by id.
    pub fn attach(&mut self, path: Box<dyn NetPath>, registers: HashMap<u64, Arc<IncrementRegister>>) {
        self.path = Some(path);
        self.registers = registers;
    }

    /// An increment register, by the id that operation lists use.
    pub fn register(&self, id: u64) -> Option<Arc<IncrementRegister>> {
        self.registers.get(&id).cloned()
    }

    /// The host index of a queued block, for the device's side.
    pub fn host_index(&self, stream: u32, block: u32, send: bool) -> Option<Arc<HostIndex>> {
        let s = self.streams.get(stream as usize)?;
        let queued = s.waiting.get(&block).into_iter().flatten().chain(&s.active);
        let mut found = queued.filter(|q| q.send == send && q.ops.iter().any(|o| o.block == block));
        found.next().map(|q| q.host_index.clone())
    }

    /// Checks and queues the operations of a block (proxy-and-primitives 4.2). All three arrays are packed records in the
    /// original's layout; what is wrong with them is an answer, never a panic.
    pub fn start(&mut self, stream: u32, block: u32, ops: &[u8], src: &[u8], dst: &[u8]) -> Result<(), ProxyError> {
        let bad = |why: String| ProxyError::Input { block, why };
        for (what, bytes, each) in [("operations", ops, 96), ("sources", src, 72), ("destinations", dst, 48)] {
            if bytes.len() % each != 0 {
                return Err(bad(format!("{} bytes of {what} are not whole records of {each}", bytes.len())));
            }
        }
        let infos: Arc<[OpInfo]> = ops
            .chunks_exact(96)
            .map(|b| OpInfo {
                handshake: [u64_at(b, 8), u64_at(b, 24)],
                complete: [u64_at(b, 16), u64_at(b, 32)],
                block: u32_at(b, 76),
            })
            .collect();
        let s = self.streams.get_mut(stream as usize).ok_or(ProxyError::Stream(stream))?;
        if infos.is_empty() && src.is_empty() && dst.is_empty() {
            return Ok(());
        }
        if self.path.is_none() {
            return Err(ProxyError::NoPath { block });
        }
        for (i, o) in infos.iter().enumerate() {
            if o.block != block {
                return Err(bad(format!("operation {i} belongs to block {}", o.block)));
            }
            for id in o.handshake.iter().chain(&o.complete) {
                if *id != 0 && !self.registers.contains_key(id) {
                    return Err(bad(format!("operation {i} names register {id}, which is not this communicator's")));
                }
            }
        }
        let mut queues = Vec::new();
        // Sends are saved before receives.
        for (send, bytes, each) in [(true, src, 72), (false, dst, 48)] {
            let entries: Arc<[Entry]> = bytes
                .chunks_exact(each)
                .map(|b| Entry {
                    send,
                    op: u32_at(b, 0),
                    complete: u32_at(b, 4) as i32,
                    addr: if u64_at(b, 8) != 0 { u64_at(b, 8) } else { u64_at(b, 16) },
                    mhandle: u64_at(b, 24),
                    size: u32_at(b, 32),
                    mark: u32_at(b, 36),
                    rank: u32_at(b, if send { 48 } else { 40 }) as i32,
                })
                .collect();
            let Some(last) = entries.last() else { continue };
            if last.mark != 2 {
                return Err(bad("the last entry of an array does not carry EXEC_COMPLETE (INV-63)".into()));
            }
            if let Some(e) = entries.iter().find(|e| e.mark > 2 || e.op as usize >= infos.len()) {
                return Err(bad(format!("an entry has mark {} and operation {} of {}", e.mark, e.op, infos.len())));
            }
            queues.push(Queue {
                send,
                entries,
                ops: infos.clone(),
                host_index: Arc::default(),
                touched: false,
                next: 0,
                tail: 0,
                in_flight: VecDeque::with_capacity(MAX_IN_FLIGHT),
                finished: false,
            });
        }
        s.waiting.entry(block).or_default().extend(queues);
        Ok(())
    }

    /// Frees what the stream holds, active and waiting.
    pub fn stop(&mut self, stream: u32) -> Result<(), ProxyError> {
        *self.streams.get_mut(stream as usize).ok_or(ProxyError::Stream(stream))? = Stream::default();
        Ok(())
    }

    /// The tick: one pass over the stream's current block, never blocks (INV-67). Answers (idle, done), before any AND.
    pub fn progress(&mut self, stream: u32, block: u32) -> Result<(bool, bool), ProxyError> {
        let Proxy { path, registers, streams, fatal } = self;
        let s = streams.get_mut(stream as usize).ok_or(ProxyError::Stream(stream))?;
        if let Some(why) = fatal {
            return Err(ProxyError::Failed(why.clone()));
        }
        if s.active.is_empty() {
            // Nothing runs: take the block asked for, or the one that was noted to follow.
            s.current = None;
            for next in [s.pending.take(), Some(block)].into_iter().flatten() {
                if let Some(queued) = s.waiting.remove(&next) {
                    s.active = queued;
                    s.current = Some(next);
                    break;
                }
            }
        }
        if s.current.is_some_and(|c| c != block) {
            s.pending = Some(block);
        }
        if s.current.is_none() {
            return Ok((true, true));
        }
        let Some(path) = path else { return Err(ProxyError::NoPath { block }) };
        let (mut idle, mut done) = (true, true);
        for q in &mut s.active {
            match q.step(path.as_mut(), registers) {
                Ok(moved) => idle &= !moved,
                Err(why) => {
                    *fatal = Some(why.clone());
                    return Err(ProxyError::Failed(why));
                }
            }
            done &= q.finished;
        }
        if done {
            // Drained ops are re-armed for the next execution of their block, not freed (INV-68).
            let current = s.current.take().unwrap_or(block);
            let mut drained = std::mem::take(&mut s.active);
            drained.iter_mut().for_each(Queue::rearm);
            s.waiting.entry(current).or_default().extend(drained);
            if s.pending.is_some() {
                return Ok((false, false));
            }
        }
        Ok((idle, done))
    }
}

impl Queue {
    fn rearm(&mut self) {
        self.touched = false;
        self.next = 0;
        self.tail = 0;
        self.finished = false;
    }

    /// One pass; whether anything was posted or completed.
    fn step(
        &mut self,
        path: &mut dyn NetPath,
        registers: &HashMap<u64, Arc<IncrementRegister>>,
    ) -> Result<bool, String> {
        let side = usize::from(!self.send);
        let store = |id: u64, amount: u32| {
            if let Some(r) = registers.get(&id) {
                nec_inc_semaphore(&**r, amount);
            }
        };
        if self.finished {
            return Ok(false);
        }
        if !self.touched {
            if self.host_index.read() != READY {
                return Ok(false);
            }
            self.host_index.raise(0);
            if let Some(op) = self.ops.first() {
                store(op.handshake[side], 1);
            }
            self.touched = true;
            return Ok(true);
        }
        let mut moved = false;
        let posted_by_device = (self.host_index.read() % LOOP_SIZE + LOOP_SIZE - self.tail) % LOOP_SIZE;
        let mut may = posted_by_device;
        while let Some(e) = self.entries.get(self.next) {
            if e.mark == 0 {
                if may == 0 || self.in_flight.len() == MAX_IN_FLIGHT {
                    break;
                }
                let request = if e.size == 0 { None } else { Some(path.post(e)?) };
                match request {
                    Some(None) => break,
                    other => self.in_flight.push_back((other.flatten(), e.op, e.complete)),
                }
                self.tail = (self.tail + 1) % LOOP_SIZE;
                may -= 1;
                moved = true;
            }
            self.next += 1;
        }
        // Completions are reported in order: stop at the first that is not done.
        while let Some((request, op, complete)) = self.in_flight.front().copied() {
            if let Some(r) = request
                && path.test(r)?.is_none()
            {
                break;
            }
            self.in_flight.pop_front();
            moved = true;
            if self.in_flight.is_empty() && self.next == self.entries.len() {
                // Reset before the last report: the device may answer it with the next execution's READY at once.
                self.host_index.raise(0);
            }
            if complete > 0 {
                store(self.ops[op as usize].complete[side], complete as u32);
            }
        }
        self.finished = self.next == self.entries.len() && self.in_flight.is_empty();
        Ok(moved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Completes each request at the second test.
    #[derive(Debug, Default)]
    struct SlowPath {
        tests: HashMap<u64, u32>,
        next: u64,
        refuse_every: u64,
    }

    impl NetPath for SlowPath {
        fn post(&mut self, entry: &Entry) -> Result<Option<u64>, String> {
            if entry.size == 666 {
                return Err("rail 0 is gone".into());
            }
            self.next += 1;
            if self.refuse_every > 0 && self.next.is_multiple_of(self.refuse_every) {
                return Ok(None);
            }
            self.tests.insert(self.next, 0);
            Ok(Some(self.next))
        }

        fn test(&mut self, request: u64) -> Result<Option<u64>, String> {
            let n = self.tests.get_mut(&request).ok_or("unknown request")?;
            *n += 1;
            Ok((*n > 1).then_some(1))
        }
    }

    fn records(block: u32, sizes: &[u32]) -> (Vec<u8>, Vec<u8>) {
        let mut op = vec![0u8; 96];
        op[8..16].copy_from_slice(&1u64.to_le_bytes());
        op[16..24].copy_from_slice(&2u64.to_le_bytes());
        op[76..80].copy_from_slice(&block.to_le_bytes());
        let mut src = Vec::new();
        for (mark, size) in sizes.iter().map(|s| (0u32, *s)).chain([(2, 0)]) {
            let mut e = vec![0u8; 72];
            e[4..8].copy_from_slice(&1u32.to_le_bytes());
            e[32..36].copy_from_slice(&size.to_le_bytes());
            e[36..40].copy_from_slice(&mark.to_le_bytes());
            src.extend(e);
        }
        (op, src)
    }

    fn proxy(path: SlowPath) -> (Proxy, Arc<IncrementRegister>) {
        let done = Arc::new(IncrementRegister::new());
        let mut p = Proxy::default();
        p.attach(Box::new(path), HashMap::from([(1, Arc::new(IncrementRegister::new())), (2, done.clone())]));
        (p, done)
    }

    #[test]
    fn a_block_runs_to_its_end_in_order_and_is_armed_again() {
        let (mut p, done) = proxy(SlowPath { refuse_every: 3, ..SlowPath::default() });
        let (ops, src) = records(7, &[10, 0, 10, 10]);
        p.start(1, 7, &ops, &src, &[]).unwrap();
        for round in 1..=2u32 {
            let index = p.host_index(1, 7, true).unwrap();
            assert_eq!(p.progress(1, 7).unwrap(), (true, false), "not ready yet");
            index.raise(READY);
            assert_eq!(p.progress(1, 7).unwrap(), (false, false));
            index.raise(4);
            let mut ticks = 0;
            while !p.progress(1, 7).unwrap().1 {
                ticks += 1;
                assert!(ticks < 50);
            }
            assert_eq!(done.value(), 4 * round);
        }
        p.stop(1).unwrap();
        assert_eq!(p.progress(1, 7).unwrap(), (true, true));
    }

    #[test]
    fn nothing_queued_is_idle_and_done() {
        let (mut p, _) = proxy(SlowPath::default());
        assert_eq!(p.progress(0, 1).unwrap(), (true, true));
        assert_eq!(p.progress(4, 1), Err(ProxyError::Stream(4)));
    }

    #[test]
    fn malformed_arrays_are_refused() {
        let (mut p, _) = proxy(SlowPath::default());
        let (ops, src) = records(1, &[8]);
        assert!(p.start(0, 1, &ops[..95], &src, &[]).unwrap_err().to_string().contains("whole records of 96"));
        assert!(p.start(0, 2, &ops, &src, &[]).unwrap_err().to_string().contains("belongs to block 1"));
        assert!(p.start(0, 1, &ops, &src[..72], &[]).unwrap_err().to_string().contains("EXEC_COMPLETE"));
        let mut foreign = ops.clone();
        foreign[16] = 99;
        assert!(p.start(0, 1, &foreign, &src, &[]).unwrap_err().to_string().contains("register 99"));
        assert_eq!(Proxy::default().start(0, 1, &ops, &src, &[]), Err(ProxyError::NoPath { block: 1 }));
    }

    #[test]
    fn a_failed_transfer_is_sticky() {
        let (mut p, _) = proxy(SlowPath::default());
        let (ops, src) = records(1, &[666]);
        p.start(0, 1, &ops, &src, &[]).unwrap();
        let index = p.host_index(0, 1, true).unwrap();
        index.raise(READY);
        p.progress(0, 1).unwrap();
        index.raise(1);
        for _ in 0..2 {
            assert_eq!(p.progress(0, 1), Err(ProxyError::Failed("rail 0 is gone".into())));
        }
    }
}
