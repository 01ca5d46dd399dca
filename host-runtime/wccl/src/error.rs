//! What can go wrong, by cause: the caller, the plugin, a peer, the system, ourselves.

use std::time::Duration;

use hw_bridge::exec::sequencer::OpError;
use hw_bridge::memory::hbm::HbmError;
use hw_bridge::memory::links::LinkError;
use hw_bridge::p2p::P2pError;
use sandbox::status::Status;

/// What can go wrong with a plugin.
pub use sandbox::error::Error as PluginError;

/// An error of the runtime. [`Error::status`] gives the NRT_STATUS a C caller would see.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller passed something that cannot be.
    #[error("{0}")]
    Usage(String),
    /// A configuration variable or option makes no sense.
    #[error("{0}")]
    Config(String),
    /// A plugin did not load, answered with a status, stopped, or could not be called.
    #[error(transparent)]
    Plugin(PluginError),
    /// A swap held the control plane for longer than the call could wait.
    #[error(
        "{entry} was not called: a hot swap has kept the tenant's control plane shut for {waited:?}; call it again"
    )]
    Frozen {
        /// The entry.
        entry: &'static str,
        /// How long was waited.
        waited: Duration,
    },
    /// A hot swap was not made.
    #[error("tenant {tenant} was not swapped: {reason}")]
    Swap {
        /// The tenant.
        tenant: String,
        /// Who refused and why, and what to do.
        reason: String,
    },
    /// This process was forked from the one that owns what was used.
    #[error(
        "{what} belongs to the process that this one was forked from; use it there, or open a runtime and a communicator of its own after an exec"
    )]
    Forked {
        /// What was used.
        what: String,
    },
    /// The ranks of a group did not come to a communicator.
    #[error("{what}")]
    Group {
        /// Which group, who and why, and what to do.
        what: String,
        /// What a C caller would see.
        status: Status,
    },
    /// Not all ranks came while the connections were made that an operation needs.
    #[error(
        "{what} on rank {rank} timed out {} while all ranks were being connected, which happens once and which each must come to: {source}",
        if *.own { format!("after {after:?}") } else { format!("before its own {after:?} were over") }
    )]
    Connecting {
        /// The operation.
        what: &'static str,
        /// This rank.
        rank: usize,
        /// Its deadline.
        after: Duration,
        /// Whether that is the one that has passed, or another one was earlier: of a rank that has told this one, or of the library.
        own: bool,
        /// What the library said of it, with the rank that did not come and the deadline that passed.
        source: Box<Error>,
    },
    /// An operation failed.
    #[error(transparent)]
    Op(#[from] OpError),
    /// A message was not sent or received; the communicator is as it was, unless this says otherwise.
    #[error(transparent)]
    Message(P2pError),
    /// Two ranks could not be linked that exchange messages.
    #[error("rank {rank} could not be linked to rank {peer} for a message: {source}; the communicator is usable")]
    Link {
        /// This rank.
        rank: usize,
        /// The other one.
        peer: usize,
        /// Why.
        source: LinkError,
    },
    /// A limit of this process is too low for what was asked; the sentence names it, its value and the need.
    #[error("{0}")]
    Limit(String),
    /// The service said so, or does not answer.
    #[error("{what}")]
    Service {
        /// What it said, or why it does not answer.
        what: String,
        /// What a C caller would see.
        status: Status,
    },
    /// Device memory.
    #[error(transparent)]
    Memory(#[from] HbmError),
    /// The system refused something.
    #[error("{what}: {source}{}", hw_bridge::os::exhausted::limit_of_threads(source))]
    System {
        /// What was tried.
        what: String,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// Our own mistake.
    #[error("{0}; this is an error of wccl, please report it")]
    Bug(String),
}

impl From<PluginError> for Error {
    /// One cause is one variant, whichever crate met it first.
    fn from(e: PluginError) -> Error {
        match e {
            PluginError::Usage(what) => Error::Usage(what),
            PluginError::Config(what) => Error::Config(what),
            PluginError::Limit(what) => Error::Limit(what),
            PluginError::Memory(e) => Error::Memory(e),
            PluginError::System { what, source } => Error::System { what, source },
            PluginError::Bug(what) => Error::Bug(what),
            e => Error::Plugin(e),
        }
    }
}

impl Error {
    /// The status a C caller would see.
    pub fn status(&self) -> Status {
        match self {
            Error::Usage(_) | Error::Config(_) => Status::INVALID,
            Error::Plugin(e) => e.status(),
            Error::Swap { .. } => Status::FAILURE,
            Error::Group { status, .. } | Error::Service { status, .. } => *status,
            Error::Frozen { .. } | Error::Connecting { .. } => Status::TIMEOUT,
            Error::Op(OpError::Timeout { .. }) => Status::TIMEOUT,
            Error::Op(
                OpError::Mismatch { .. }
                | OpError::Buffer { .. }
                | OpError::Memory { .. }
                | OpError::Seat { .. }
                | OpError::WrongCore { .. }
                | OpError::Forked { .. },
            ) => Status::INVALID,
            Error::Op(OpError::Aborted { .. } | OpError::Broken { .. }) => Status::CLOSED,
            Error::Op(OpError::Stage { .. } | OpError::Slots { .. }) => Status::RESOURCE,
            Error::Op(_) => Status::EXEC_HW_ERR_COLLECTIVES,
            Error::Message(P2pError::Timeout { .. }) => Status::TIMEOUT,
            Error::Message(P2pError::Truncated { .. } | P2pError::NoRank { .. } | P2pError::Buffer { .. }) => {
                Status::INVALID
            }
            Error::Message(P2pError::Stopped { .. }) => Status::CLOSED,
            Error::Message(_) => Status::EXEC_HW_ERR_COLLECTIVES,
            Error::Link { source: LinkError::Gone(e), .. } if e.kind() == std::io::ErrorKind::TimedOut => {
                Status::TIMEOUT
            }
            Error::Link { source: LinkError::Stopped | LinkError::Gone(_), .. } => Status::CLOSED,
            Error::Link { .. } => Status::FAILURE,
            Error::Limit(_) | Error::Memory(_) | Error::System { .. } => Status::RESOURCE,
            Error::Forked { .. } => Status::INVALID,
            Error::Bug(_) => Status::FAILURE,
        }
    }

    /// The rank whose process has ended, if that is why.
    pub fn dead_rank(&self) -> Option<usize> {
        match self {
            Error::Op(e) => e.dead_rank(),
            Error::Connecting { source, .. } => source.dead_rank(),
            _ => None,
        }
    }
}

/// What collectives fail with too is the same error.
impl From<P2pError> for Error {
    fn from(e: P2pError) -> Error {
        match e {
            P2pError::Op(e) => Error::Op(e),
            e => Error::Message(e),
        }
    }
}
