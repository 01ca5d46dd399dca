//! The control plane of a communicator: the instance of the library that plans for this rank, shared by the communicator
//! and its streams, or by a client of the service. An instance may be exchanged under them ([`crate::swap`]).
//!
//! Dropped with its last user, communicator or stream: peers learn at once that the rank has left, then the library gets its
//! free call.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::time::{Duration, Instant};

use hw_bridge::peers::RankState;
use hw_bridge::sequencer::OpError;

use super::control::{Answer, Ask, Control, Here, Patience};
use super::dump;
use super::runtime::Runtime;
use crate::enc::table::Policy;
use crate::error::Error;
use crate::hw::objects::CommCore;
use crate::plugin::Instance;
use crate::tenant::lock;

#[derive(Debug)]
pub(crate) struct Plane {
    pub(super) runtime: Runtime,
    pub(crate) core: Arc<CommCore>,
    /// Who answers its control calls.
    control: RwLock<Control>,
    /// Every pair is connected.
    expanded: Mutex<bool>,
    /// Whether all ranks can read one another's private memory; agreed once, when every pair is linked.
    direct: OnceLock<bool>,
    /// The flight records of the first failure were written.
    dumped: AtomicBool,
}

impl Plane {
    pub(crate) fn new(runtime: Runtime, core: Arc<CommCore>, control: Control) -> Plane {
        Plane {
            runtime,
            core,
            control: RwLock::new(control),
            expanded: Mutex::new(false),
            direct: OnceLock::new(),
            dumped: AtomicBool::new(false),
        }
    }

    fn who(&self) -> Control {
        self.control.read().unwrap_or_else(|p| p.into_inner()).clone()
    }

    /// The instance, and its handle of the communicator.
    ///
    /// # Errors
    /// [`Error::Usage`] if it is in another process.
    pub(crate) fn control(&self) -> Result<(Arc<Instance>, u32), Error> {
        match self.who() {
            Control::Here(here) => Ok((here.instance, here.handle)),
            Control::Served(_) => Err(Error::Usage("the library of this communicator is the service's".into())),
        }
    }

    pub(crate) fn set_control(&self, instance: Arc<Instance>, handle: u32) {
        let here = Here { runtime: self.runtime.clone(), instance, handle };
        *self.control.write().unwrap_or_else(|p| p.into_inner()) = Control::Here(here);
    }

    /// Makes a control call.
    pub(crate) fn ask(&self, ask: Ask, patience: Patience) -> Result<Answer, Error> {
        if hw_bridge::fork::in_child() {
            return Err(Error::Forked { what: format!("the communicator of rank {}", self.core.rank) });
        }
        let answer = self.who().ask(ask, patience);
        self.core.endpoint.control().set_component_calls(self.runtime.component_calls());
        answer
    }

    /// Gathers one block of every rank over the bootstrap.
    pub(super) fn all_gather(&self, block: &[u8], patience: Patience) -> Result<Vec<u8>, Error> {
        match self.ask(Ask::AllGather { block: block.to_vec() }, patience)? {
            Answer::Bytes(all) => Ok(all),
            other => Err(other.unexpected("gathered blocks")),
        }
    }

    /// Leaves the flight records of the first failure that broke the communicator where the user wants them.
    #[cold]
    pub(super) fn dump_once(&self, error: &OpError) {
        let refused = matches!(
            error,
            OpError::Buffer { .. } | OpError::Memory { .. } | OpError::WrongCore { .. } | OpError::Forked { .. }
        );
        if !refused && !self.dumped.swap(true, Ordering::AcqRel) {
            dump::write(&self.core, self.runtime.0.config.flight_dir.as_deref(), error);
        }
    }

    /// Has the library connect every pair, once, within the deadline of the operation `what` that needs it.
    pub(super) fn expand_connectivity(&self, what: &'static str, timeout: Duration) -> Result<(), Error> {
        // A deadline beyond what the clock can say is none. It runs while another stream connects as well.
        let until = Instant::now().checked_add(timeout);
        let mut expanded = lock(&self.expanded);
        let endpoint = &self.core.endpoint;
        // Whoever had the lock may have broken the communicator in there.
        endpoint.usable()?;
        if *expanded {
            return Ok(());
        }
        // A neighbour that gave up waiting for this rank has said why; its connections would not.
        let failed = endpoint.peer_controls().map(|c| c.state()).find(|(state, _)| *state == RankState::Failed);
        if let Some((_, why)) = failed {
            endpoint.fail(&why);
            endpoint.usable()?;
        }
        let patience = Patience::operation(until);
        let connected = self.ask(Ask::Expand, patience).and_then(|_| self.agree_on_direct(patience));
        connected.map_err(|e| match until {
            Some(until) if until <= Instant::now() => {
                Error::Connecting { what, rank: self.core.rank, after: timeout, source: Box::new(e) }
            }
            _ => e,
        })?;
        *expanded = true;
        Ok(())
    }

    /// Settles whether the ranks read one another's private memory: only if each can read all others and is allowed to. Every
    /// rank calls it, at the same point, when it is linked to all.
    pub(super) fn agree_on_direct(&self, patience: Patience) -> Result<(), Error> {
        let (rank, n) = (self.core.rank, self.core.nranks);
        if n == 1 || self.direct.get().is_some() {
            return Ok(());
        }
        let allowed = if self.runtime.0.config.direct { Ok(()) } else { Err("it is switched off here".to_string()) };
        let can = allowed.and_then(|()| self.core.endpoint.reads_private());
        if let Err(why) = &can {
            tracing::info!("private memory is staged in communicator {}: rank {rank} says: {why}", self.core.id);
        }
        let mine = [u8::from(can.is_ok())];
        let all = self.all_gather(&mine, patience)?;
        // A plugin's answer is an allegation. Ranks that it gives different ones differ in their op headers.
        self.direct.get_or_init(|| all.len() == n && all.iter().all(|can| *can == 1));
        Ok(())
    }

    /// What the choice of algorithms goes by.
    pub(super) fn policy(&self) -> Policy<'_> {
        Policy { direct: self.direct.get() == Some(&true), ..self.runtime.0.config.policy() }
    }

    /// Whether linking the ring neighbours links all: with three ranks everybody is one.
    pub(super) fn linked_by_rings(&self) -> bool {
        self.core.nranks <= 3
    }

    /// Has the library connect what is more than ring neighbours, once (INV-81). The exchange needs every rank, so all decide
    /// alike: by the size alone, never by what this rank happens to be linked to. Whichever stream needs it first does it;
    /// the others wait.
    pub(crate) fn connect_all(&self, what: &'static str, timeout: Duration) -> Result<(), Error> {
        if self.linked_by_rings() { Ok(()) } else { self.expand_connectivity(what, timeout) }
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        if hw_bridge::fork::in_child() {
            // The parent's threads, locks and sockets are behind these; a child lets them be.
            std::mem::forget((self.core.clone(), self.runtime.clone()));
            if let Ok(control) = self.control.try_read() {
                std::mem::forget(control.clone());
            }
            return;
        }
        self.core.endpoint.close();
        if let Err(e) = self.who().free() {
            tracing::debug!("freeing communicator {}: {e}", self.core.id);
        }
    }
}
