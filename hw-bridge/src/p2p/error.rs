//! Why a message was not sent or received.

use std::time::Duration;

use crate::exec::sequencer::OpError;
use crate::os::credentials::PeerPid;

/// Why a message was not sent or received. Only [`P2pError::Stopped`] and what [`P2pError::Op`] says so of are about more than
/// the one operation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum P2pError {
    /// The deadline passed; the operation was taken back.
    #[error("{what} was not done on rank {rank} within {after:?}: {last}; the communicator is usable")]
    Timeout {
        /// This rank.
        rank: usize,
        /// The operation.
        what: String,
        /// The deadline.
        after: Duration,
        /// What is known of the other end.
        last: String,
    },
    /// The message is longer than the buffer. It is gone; its sender has sent it.
    #[error(
        "{what} failed on rank {rank}: rank {from} sent {sent} bytes with tag {tag}, and the buffer has {have}; the message is lost"
    )]
    Truncated {
        /// This rank.
        rank: usize,
        /// The operation.
        what: String,
        /// Who sent it.
        from: usize,
        /// Its tag.
        tag: u32,
        /// Its bytes.
        sent: u64,
        /// Bytes of the buffer.
        have: u64,
    },
    /// The other end has left: closed, aborted, failed or dead.
    #[error("{what} failed on rank {rank}: rank {peer} (pid {pid}) has left: {how}")]
    Left {
        /// This rank.
        rank: usize,
        /// The operation.
        what: String,
        /// Who left.
        peer: usize,
        /// Its process.
        pid: PeerPid,
        /// How, and why if it said so.
        how: String,
    },
    /// A receive from any rank, and all others have left.
    #[error("{what} failed on rank {rank}: all other ranks have left: {each}")]
    NobodyLeft {
        /// This rank.
        rank: usize,
        /// The operation.
        what: String,
        /// How each left.
        each: String,
    },
    /// A peer wrote what cannot be.
    #[error("{what} failed on rank {rank}: rank {peer} {how}; it runs another version or is corrupt")]
    BadPeer {
        /// This rank.
        rank: usize,
        /// The operation.
        what: String,
        /// The peer.
        peer: usize,
        /// What it did.
        how: &'static str,
    },
    /// This rank was aborted, or failed in another operation.
    #[error("{what} was ended on rank {rank}: {why}")]
    Stopped {
        /// This rank.
        rank: usize,
        /// The operation.
        what: String,
        /// Why.
        why: Box<OpError>,
    },
    /// There is no such rank.
    #[error("rank {rank} of {nranks} cannot exchange messages with rank {peer}, which does not exist")]
    NoRank {
        /// This rank.
        rank: usize,
        /// Ranks.
        nranks: usize,
        /// Who was asked for.
        peer: usize,
    },
    /// The buffer is none of this device's, or there is no memory for it.
    #[error(
        "the buffer of {what} on rank {rank} cannot be used: it has {have} bytes, and {len} from byte {offset} were given"
    )]
    Buffer {
        /// This rank.
        rank: usize,
        /// The operation.
        what: &'static str,
        /// Bytes there are.
        have: u64,
        /// First byte.
        offset: u64,
        /// Bytes asked for.
        len: u64,
    },
    /// It did not begin, for a reason that collectives have too.
    #[error(transparent)]
    Op(#[from] OpError),
}
