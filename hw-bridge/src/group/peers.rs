//! A linked peer, and the end of a communicator's operations.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::control::{Control, RankState};
use super::layout::ident;
use crate::limits::LANES;
use crate::memory::foreign::Space;
use crate::memory::links::Mapped;
use crate::memory::segment::{Segment, SegmentError};
use crate::os::bell::{Fence, publish_fence};
use crate::os::credentials::PeerPid;

/// A linked peer.
#[derive(Debug)]
pub struct Peer {
    /// Its rank.
    pub rank: usize,
    /// Its process.
    pub pid: PeerPid,
    pub(crate) control: Control,
    pub(crate) hbm: Segment,
    /// Its private memory.
    pub(crate) space: Space,
}

impl Peer {
    /// Takes over what a link gave; checks that it is rank `rank` of `nranks`.
    pub fn new(mapped: Mapped, rank: usize, nranks: usize) -> Result<Peer, SegmentError> {
        if mapped.rank as usize != rank {
            return Err(SegmentError::Foreign(format!("it belongs to rank {}, expected rank {rank}", mapped.rank)));
        }
        let mut control = Control::of_peer(mapped.control, rank as u32, nranks as u32)?;
        control.owner = mapped.pidfd;
        let space = Space::new(mapped.pid, ident::MARK.map(|at| control.ident(at)));
        Ok(Peer { rank, pid: mapped.pid, control, hbm: mapped.hbm, space })
    }

    /// The peer's control segment.
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// Whether its process has ended.
    pub fn dead(&self) -> bool {
        self.control.owner_ended()
    }
}

/// Ends a communicator's operations from any thread, in any state, as often as one likes.
#[derive(Debug, Clone)]
pub struct Abort {
    flag: Arc<AtomicBool>,
    control: Arc<Control>,
}

impl Abort {
    pub(crate) fn new(control: Arc<Control>) -> Abort {
        Abort { flag: Arc::new(AtomicBool::new(false)), control }
    }

    /// Makes the operation under way, and every later one, end with an error here; peers learn of it within a nap.
    pub fn abort(&self, reason: &str) {
        // The reason first: whoever sees the flag reads it.
        self.control.leave(RankState::Aborted, reason, None);
        self.flag.store(true, Ordering::Release);
        publish_fence(Fence::Full);
        for lane in 0..LANES {
            self.control.lane(lane).bell().ring();
        }
        self.control.mail_bell().ring();
    }

    /// Whether the communicator is gone and only this handle keeps its segment.
    pub fn is_last(&self) -> bool {
        Arc::strong_count(&self.control) == 1
    }

    /// Whether it happened.
    pub fn aborted(&self) -> bool {
        self.flag.load(Ordering::Acquire)
    }
}
