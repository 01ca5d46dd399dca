//! The control plane of a communicator: the instance of the library that plans for this rank, shared by the communicator
//! and its streams. An instance may be exchanged under them ([`crate::swap`]).
//!
//! Dropped with its last user, communicator or stream: peers learn at once that the rank has left, then the library gets its
//! free call.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::time::{Duration, Instant};

use hw_bridge::peers::RankState;
use hw_bridge::sequencer::OpError;
use wasmtime::component::Resource;

use super::dump;
use super::runtime::Runtime;
use crate::bindings::exports::neuron::nccom::collectives::NetConnectivity;
use crate::enc::table::Policy;
use crate::error::Error;
use crate::forward::Forward;
use crate::hw::objects::{CommCore, CommunicatorObject};
use crate::plugin::{Instance, bounded};
use crate::swap::Checkpoint;
use crate::tenant::lock;

#[derive(Debug)]
pub(crate) struct Plane {
    pub(super) runtime: Runtime,
    pub(super) core: Arc<CommCore>,
    /// The instance, and its handle of the communicator.
    control: RwLock<(Arc<Instance>, u32)>,
    /// What the plugin last said of its plan, for an instance in the place of one that stopped.
    checkpoint: Mutex<Option<Checkpoint>>,
    /// Every pair is connected.
    expanded: Mutex<bool>,
    /// Whether all ranks can read one another's private memory; agreed once, when every pair is linked.
    direct: OnceLock<bool>,
    /// The flight records of the first failure were written.
    dumped: AtomicBool,
}

impl Plane {
    pub(super) fn new(runtime: Runtime, core: Arc<CommCore>, instance: Arc<Instance>, handle: u32) -> Plane {
        Plane {
            runtime,
            core,
            control: RwLock::new((instance, handle)),
            checkpoint: Mutex::default(),
            expanded: Mutex::new(false),
            direct: OnceLock::new(),
            dumped: AtomicBool::new(false),
        }
    }

    pub(crate) fn control(&self) -> (Arc<Instance>, u32) {
        self.control.read().unwrap_or_else(|p| p.into_inner()).clone()
    }

    pub(crate) fn set_control(&self, instance: Arc<Instance>, handle: u32) {
        *self.control.write().unwrap_or_else(|p| p.into_inner()) = (instance, handle);
    }

    pub(super) fn entry<T>(
        &self,
        f: impl FnOnce(&Forward, &Instance, Resource<CommunicatorObject>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        if hw_bridge::fork::in_child() {
            return Err(Error::Forked { what: format!("the communicator of rank {}", self.core.rank) });
        }
        let (instance, handle) = self.serving()?;
        let answer = f(&self.runtime.0.forward, &instance, Resource::new_borrow(handle));
        self.core.endpoint.control().set_component_calls(self.runtime.component_calls());
        answer
    }

    /// The instance to call. One that has stopped is replaced by a new one with the plan of the last checkpoint, as often as the
    /// tenant's limits allow; without a checkpoint it stays, and answers what stopped it. Bootstrap connections ended with the
    /// old one.
    fn serving(&self) -> Result<(Arc<Instance>, u32), Error> {
        let (instance, handle) = self.control();
        if instance.stopped().is_none() {
            return Ok((instance, handle));
        }
        // One at a time: who waited finds the new one.
        let checkpoint = lock(&self.checkpoint);
        let (instance, handle) = self.control();
        let Some(checkpoint) = checkpoint.as_ref().filter(|_| instance.stopped().is_some()) else {
            return Ok((instance, handle));
        };
        let made = checkpoint.restore(&instance, &self.core)?;
        self.set_control(made.0.clone(), made.1);
        Ok(made)
    }

    /// Keeps the plan that the plugin has now, if it hands it out.
    pub(super) fn keep_checkpoint(&self) {
        let mut kept = lock(&self.checkpoint);
        let (instance, handle) = self.control();
        *kept = Checkpoint::take(&instance, handle);
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
        let connect = || self.entry(|f, i, c| f.expand_connectivity(Some(i), c, NetConnectivity::Mesh));
        let connected = bounded(until, connect).and_then(|()| bounded(until, || self.agree_on_direct()));
        connected.map_err(|e| match until {
            Some(until) if until <= Instant::now() => {
                Error::Connecting { what, rank: self.core.rank, after: timeout, source: Box::new(e) }
            }
            _ => e,
        })?;
        *expanded = true;
        self.keep_checkpoint();
        Ok(())
    }

    /// Settles whether the ranks read one another's private memory: only if each can read all others and is allowed to. Every
    /// rank calls it, at the same point, when it is linked to all.
    pub(super) fn agree_on_direct(&self) -> Result<(), Error> {
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
        let all = self.entry(|f, i, c| f.bootstrap_all_gather(Some(i), c, &mine, "runtime"))?;
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
        if self.control().0.stopped().is_none()
            && let Err(e) = self.entry(|f, i, c| f.free_comm(Some(i), c))
        {
            tracing::debug!("freeing communicator {}: {e}", self.core.id);
        }
    }
}
