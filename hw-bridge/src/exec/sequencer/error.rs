//! Why an operation failed.

use std::time::Duration;

use crate::group::RankState;
use crate::memory::foreign::Unreadable;
use crate::os::credentials::PeerPid;

/// A rank that an operation waited for in vain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Absent {
    /// The rank.
    pub rank: usize,
    /// Its process.
    pub pid: PeerPid,
    /// What it did last.
    pub last: String,
}

/// Why an operation failed. The communicator is broken afterwards.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    /// A peer's process ended.
    #[error(
        "operation #{seq} ({what}) failed on rank {rank}: the process of rank {peer} (pid {pid}) has ended; {last}"
    )]
    Died {
        /// This rank.
        rank: usize,
        /// Sequence number.
        seq: u64,
        /// The operation.
        what: String,
        /// Who died.
        peer: usize,
        /// Its process.
        pid: PeerPid,
        /// What it did last.
        last: String,
    },
    /// A peer left: closed, aborted or failed.
    #[error("operation #{seq} ({what}) failed on rank {rank}: rank {peer} (pid {pid}) {}", how(*.state, .reason))]
    Left {
        /// This rank.
        rank: usize,
        /// Sequence number.
        seq: u64,
        /// The operation.
        what: String,
        /// Who left.
        peer: usize,
        /// Its process.
        pid: PeerPid,
        /// How: closed, aborted or failed.
        state: RankState,
        /// Why, as the peer says; nothing if it closed. That of a failure is passed on.
        reason: String,
        /// The rank whose process has ended, if the peer says that this is why.
        dead: Option<usize>,
    },
    /// The deadline passed.
    #[error("operation #{seq} ({what}) timed out on rank {rank} after {after:?} without {}; see what those ranks are doing, or raise the deadline", absent_list(.absent))]
    Timeout {
        /// This rank.
        rank: usize,
        /// Sequence number.
        seq: u64,
        /// The operation.
        what: String,
        /// The deadline.
        after: Duration,
        /// Who was missing.
        absent: Vec<Absent>,
    },
    /// A peer is in another call.
    #[error(
        "mismatched collectives at operation #{seq}: rank {rank} calls {mine}, rank {peer} calls {theirs}; make all ranks issue the same calls in the same order"
    )]
    Mismatch {
        /// This rank.
        rank: usize,
        /// Sequence number.
        seq: u64,
        /// Our call.
        mine: String,
        /// The other rank.
        peer: usize,
        /// Its call.
        theirs: String,
    },
    /// A peer announced a buffer that is not in the memory it granted.
    #[error(
        "operation #{seq} failed on rank {rank}: rank {peer} announced a buffer outside its device memory, or an input that is too short; it runs another version or is corrupt"
    )]
    BadPeer {
        /// This rank.
        rank: usize,
        /// Sequence number.
        seq: u64,
        /// The peer.
        peer: usize,
    },
    /// A peer's input in private memory cannot be read.
    #[error(
        "operation #{seq} ({what}) failed on rank {rank}: the input of rank {peer} (pid {pid}), in its private memory, cannot be \
         read: {why}; WCCL_DIRECT=0 on any rank has private memory staged instead"
    )]
    Unreadable {
        /// This rank.
        rank: usize,
        /// Sequence number.
        seq: u64,
        /// The operation.
        what: String,
        /// Whose input.
        peer: usize,
        /// Its process.
        pid: PeerPid,
        /// Why.
        why: Unreadable,
    },
    /// A schedule that was checked for another rank, or another number of ranks.
    #[error(
        "{what} cannot run on rank {rank} of {nranks}: its schedule was checked for rank {} of {}; this is an error of who compiled it",
        sealed.0, sealed.1
    )]
    Seat {
        /// This rank.
        rank: usize,
        /// Ranks.
        nranks: usize,
        /// The operation.
        what: String,
        /// The rank and the ranks of the schedule.
        sealed: (usize, usize),
    },
    /// The buffers do not fit the kind of schedule.
    #[error("the buffers of {what} on rank {rank} cannot be used: {why}")]
    Memory {
        /// This rank.
        rank: usize,
        /// The operation.
        what: String,
        /// What is wrong.
        why: &'static str,
    },
    /// Aborted here.
    #[error("operation #{seq} ({what}) was aborted on rank {rank}: {reason}")]
    Aborted {
        /// This rank.
        rank: usize,
        /// Sequence number.
        seq: u64,
        /// The operation.
        what: String,
        /// Why.
        reason: String,
    },
    /// The communicator failed before.
    #[error("the communicator of rank {rank} is no longer usable; it failed before: {first}")]
    Broken {
        /// This rank.
        rank: usize,
        /// The first failure.
        first: String,
        /// The rank whose process has ended, if that is why.
        dead: Option<usize>,
    },
    /// The caller's buffer is too small.
    #[error("the {which} buffer of rank {rank} has {have} bytes, {what} needs {need}")]
    Buffer {
        /// This rank.
        rank: usize,
        /// Input or output.
        which: &'static str,
        /// Bytes there are.
        have: u64,
        /// Bytes needed.
        need: u64,
        /// The operation.
        what: String,
    },
    /// The tensor is in another core's device memory.
    #[error(
        "the {which} tensor of rank {rank} is in another core's device memory; allocate it on the communicator's core"
    )]
    WrongCore {
        /// This rank.
        rank: usize,
        /// Input or output.
        which: &'static str,
    },
    /// The schedule needs a peer that was never linked.
    #[error("rank {rank} has no link to rank {peer}; expand the communicator's connectivity first")]
    NotLinked {
        /// This rank.
        rank: usize,
        /// The peer.
        peer: usize,
    },
    /// This process was forked from the one that made the communicator.
    #[error(
        "{what} on rank {rank}: this process was forked from pid {parent}, which made the communicator; use it there, or open a runtime and a communicator of its own after an exec"
    )]
    Forked {
        /// This rank.
        rank: usize,
        /// The operation.
        what: String,
        /// The process that may use it.
        parent: u32,
    },
    /// The tenant may have no further operation in progress.
    #[error(
        "rank {rank} can have no further sequence of operations: its tenant may have {slots} operations in progress in this \
         process, one for each communicator and each stream; free some, or raise share.proxy-slots"
    )]
    Slots {
        /// This rank.
        rank: usize,
        /// What its tenant may have.
        slots: u32,
    },
    /// Memory of a lane or for staging is not to be had.
    #[error("rank {rank} could not stage private memory: {reason}")]
    Stage {
        /// This rank.
        rank: usize,
        /// Why.
        reason: String,
    },
}

impl OpError {
    /// The rank whose process has ended, if that is why: one that this rank saw end, or that a peer says has.
    pub fn dead_rank(&self) -> Option<usize> {
        match self {
            OpError::Died { peer, .. } => Some(*peer),
            OpError::Left { dead, .. } | OpError::Broken { dead, .. } => *dead,
            _ => None,
        }
    }
}

fn how(state: RankState, reason: &str) -> String {
    match state {
        RankState::Closed => "has freed its communicator".into(),
        RankState::Aborted => format!("aborted: {reason}"),
        _ => format!("failed: {reason}"),
    }
}

fn absent_list(absent: &[Absent]) -> String {
    // Linked peers are on this machine.
    let uname = rustix::system::uname();
    let host = uname.nodename().to_string_lossy();
    let each = absent.iter().map(|a| format!("rank {} (host {host}, pid {}): {}", a.rank, a.pid, a.last));
    each.collect::<Vec<_>>().join("; ")
}
