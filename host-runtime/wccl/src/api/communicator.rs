//! A communicator: one rank's membership, its control plane (an instance of the library) and its data plane.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hw_bridge::group::flight::{self, Counters};
use hw_bridge::limits::LANES;

use crate::api::collectives::Engine;
use crate::api::groups::Groups;
use crate::api::memory::DeviceMemory;
use crate::api::messages::Messages;
use crate::api::runtime::Runtime;
use crate::api::streams::Stream;
use crate::config::RuntimeConfig;
use crate::error::Error;
use crate::launched::Launched;
use crate::plane::Seat;
use crate::plane::ask::{Answer, Ask};
use crate::plane::host::bad;
use crate::plane::join::{Joining, Place, Rendezvous};
use enc::table::Criteria;
use sandbox::abort::AbortToken;
use sandbox::bindings::exports::neuron::nccom::collectives::CommInfo;
use sandbox::key::GroupKey;
use sandbox::limits::ID_BYTES;
use sandbox::objects::CommCore;
use sandbox::store::Patience;
use sandbox::{id, job};

/// How to join.
#[derive(Debug, Clone)]
pub struct CommOptions {
    /// Where the group meets.
    pub rendezvous: Rendezvous,
    /// This rank.
    pub rank: usize,
    /// Ranks of the group.
    pub nranks: usize,
    /// The switch that ends the init and everything after it; made if absent.
    pub abort: Option<AbortToken>,
    /// Deadline of an operation, if not the runtime's.
    pub timeout: Option<Duration>,
    /// Build the ring graph and connect it. Without, the communicator has bootstrap messages and no collectives, until
    /// [`Communicator::build_graph`].
    pub graph: bool,
}

impl CommOptions {
    /// Joins by id.
    pub fn with_id(id: [u8; ID_BYTES], rank: usize, nranks: usize) -> CommOptions {
        CommOptions { rendezvous: Rendezvous::Id(id), rank, nranks, abort: None, timeout: None, graph: true }
    }

    /// Joins the job that the environment describes: what a launcher sets ([`Launched`]).
    ///
    /// # Errors
    /// [`Error::Config`] names the variable that is missing or wrong.
    pub fn from_env() -> Result<CommOptions, Error> {
        let Launched { rank, nranks, root, .. } = Launched::from_env()?;
        Ok(CommOptions::with_root(root, rank, nranks))
    }

    /// Joins the global group of a root.
    pub fn with_root(root: impl Into<String>, rank: usize, nranks: usize) -> CommOptions {
        CommOptions { rendezvous: Rendezvous::Root(root.into()), rank, nranks, abort: None, timeout: None, graph: true }
    }
}

/// One rank's communicator. Collectives are called by all ranks in the same order; one at a time.
#[derive(Debug)]
pub struct Communicator {
    pub(super) plane: Arc<Seat>,
    pub(super) engine: Engine,
    /// Where this rank runs; its sub-groups run there too.
    pub(super) place: Place,
    /// Communicators made of it.
    pub(super) groups: Groups,
    pub(super) messages: Messages,
}

/// A communicator or stream that has another deadline until this is dropped; made by [`Communicator::within`] and
/// [`Stream::within`].
#[derive(Debug)]
pub struct Within<'a, T> {
    of: &'a mut T,
    before: Duration,
    set: fn(&mut T, Duration),
}

impl<'a, T> Within<'a, T> {
    pub(super) fn new(of: &'a mut T, before: Duration, timeout: Duration, set: fn(&mut T, Duration)) -> Self {
        set(of, timeout);
        Within { of, before, set }
    }
}

impl<T> Deref for Within<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.of
    }
}

impl<T> DerefMut for Within<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.of
    }
}

impl<T> Drop for Within<'_, T> {
    fn drop(&mut self) {
        (self.set)(self.of, self.before);
    }
}

impl Communicator {
    /// Joins the job that the environment describes, with a runtime as it describes it: [`RuntimeConfig::from_env`],
    /// [`CommOptions::from_env`].
    ///
    /// # Errors
    /// Those of the two, [`Runtime::open`]'s, and of joining, [`Error::Group`], which says where rank and meeting place come from.
    pub fn from_env() -> Result<Communicator, Error> {
        let Launched { rank, nranks, root, from } = Launched::from_env()?;
        let runtime = Runtime::open(RuntimeConfig::from_env()?)?;
        runtime.init_comm(CommOptions::with_root(&root, rank, nranks)).map_err(|e| Error::Group {
            status: e.status(),
            what: format!("rank {rank} of {nranks} did not join at {root}, as by {from}: {e}"),
        })
    }

    pub(super) fn init(runtime: &Runtime, mut o: CommOptions) -> Result<Communicator, Error> {
        runtime.host().collectives("neuronInitComm")?;
        let tenant = runtime.tenant().id;
        let key = match &mut o.rendezvous {
            Rendezvous::Id(id) => {
                let key = GroupKey::of_id(&id::secret_of(id)?, tenant);
                *id = id::public(id);
                key
            }
            Rendezvous::Root(root) => GroupKey::of_root(&job::job_secret()?, tenant, id::port_of(root)),
        };
        Communicator::init_on(runtime, o, key, None)
    }

    /// Joins the group with this key; an id in `o` has no secret part. As a rank of a sub-group the communicator stays at `on`,
    /// where the rank is in the whole group.
    pub(super) fn init_on(
        runtime: &Runtime,
        o: CommOptions,
        key: GroupKey,
        on: Option<Place>,
    ) -> Result<Communicator, Error> {
        let (rank, n) = (o.rank, o.nranks);
        // Counted before the start: running out in the middle would look like a failure of whatever comes last.
        hw_bridge::os::exhausted::room_for(descriptors(rank, n))
            .map_err(|why| Error::Limit(format!("rank {rank} of {n} cannot join: it {why}")))?;
        let abort = match o.abort {
            Some(a) => a,
            None => AbortToken::new()
                .map_err(|source| Error::System { what: "making the abort event of a communicator".into(), source })?,
        };
        let joining = Joining { rendezvous: o.rendezvous, key, rank, nranks: n, on };
        // No swap comes before its graph is built.
        let (plane, place, _inside) = Seat::join(runtime.host(), &joining, &abort, None)?;
        let core = &plane.core;
        let lane =
            core.endpoint.lane(0)?.ok_or_else(|| Error::Bug(format!("communicator {} was made twice", core.id)))?;
        let mut made = Communicator {
            engine: Engine::new(plane.clone(), lane, o.timeout.unwrap_or(runtime.config().timeout), runtime.clone()),
            plane,
            place,
            groups: Groups::default(),
            messages: Messages::default(),
        };
        made.groups.prepare(&made, &joining.rendezvous)?;
        made.messages.prepare(&made)?;
        if o.graph {
            made.build_graph()?;
        }
        Ok(made)
    }

    /// Has the library build the ring graph and connect it (slot 4), and takes its rings over. All ranks call it; a graph
    /// that is built stays.
    ///
    /// # Errors
    /// [`Error::Plugin`] (no transport between two ranks, say), [`Error::Usage`] for a wrong plan.
    pub fn build_graph(&mut self) -> Result<(), Error> {
        // No swap comes between what is built and what is taken over.
        const ENTRY: &str = "neuronBuildGraphComm";
        let _inside = self.plane.enter(ENTRY, Patience::Usual)?;
        let serves = self.plane.serves();
        self.plane.ask(Ask::BuildGraph, Patience::Usual)?;
        self.plane.check_members()?;
        let plan = self.plane.check_plan(self.query_info()?)?;
        self.plane.take_over(ENTRY, &serves, plan)?;
        self.engine.refresh();
        if self.plane.linked_by_rings() {
            self.plane.agree_on_direct(Patience::Usual)?;
        }
        self.plane.keep_checkpoint(Patience::Usual);
        Ok(())
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.plane.core.rank
    }

    /// Ranks of the group.
    pub fn nranks(&self) -> usize {
        self.plane.core.nranks
    }

    /// What the library planned: rings, peers, nodes.
    pub fn info(&self) -> CommInfo {
        self.plane.plan().info.clone()
    }

    /// The rings in use, each in ring order from rank 0: those that the last operation of this rank went by. A hot swap changes
    /// them before the next one.
    pub fn rings(&self) -> Arc<Vec<Vec<usize>>> {
        self.engine.rings().clone()
    }

    /// The runtime it belongs to.
    pub fn runtime(&self) -> &Runtime {
        self.engine.runtime()
    }

    /// What the choice of algorithms goes by. Whether private memory is read directly is agreed when every pair of ranks is
    /// linked: with more than three ranks by the first operation that is no ring's.
    pub fn criteria(&self) -> Criteria<'_> {
        self.engine.criteria()
    }

    /// The logical core it runs on.
    pub fn logical_core(&self) -> i32 {
        self.place.core
    }

    /// The switch that ends it from any thread.
    pub fn abort_token(&self) -> &AbortToken {
        &self.plane.core.abort
    }

    /// Counters of the data plane, all streams together.
    pub fn counters(&self) -> Counters {
        self.core().endpoint.control().counters()
    }

    /// The last operations, of blocking calls (lane 0) and streams (lanes from 1), the oldest first: the flight recorder.
    /// Works at any time, also when the communicator is broken.
    pub fn flight(&self) -> Vec<(usize, flight::Record)> {
        self.core().endpoint.control().records()
    }

    /// The flight recorders of the linked peers, read from their memory: what ranks did last that do not answer any more.
    pub fn peer_flights(&self) -> Vec<(usize, Vec<(usize, flight::Record)>)> {
        self.core().endpoint.peer_controls().map(|c| (c.who().0 as usize, c.records())).collect()
    }

    /// Deadline of an operation.
    pub fn timeout(&self) -> Duration {
        self.engine.timeout
    }

    /// Deadline of the operations from now on: how long one waits for peers that do not come.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.engine.timeout = timeout;
    }

    /// The communicator with another deadline, for one call: `comm.within(deadline).barrier()`; or for several, until what
    /// this answers is dropped, which gives the old deadline back.
    ///
    /// [`Duration::ZERO`] is an operation that fails as soon as it would have to wait for longer than a moment;
    /// [`Duration::MAX`] is one that waits for ever, for a peer that lives.
    pub fn within(&mut self, timeout: Duration) -> Within<'_, Communicator> {
        Within::new(self, self.timeout(), timeout, Communicator::set_timeout)
    }

    /// Stream `index` of [`Communicator::STREAMS`]: operations that run in the background, in order among themselves and side
    /// by side with other streams and with blocking calls. All ranks use the same streams for the same operations. Each can
    /// be taken once; its thread starts here and inherits this one's affinity. Deadline and algorithm are the
    /// communicator's of this moment.
    ///
    /// The first one has the library connect every pair of more than three ranks, so all ranks take their first stream at
    /// the same point. The rank leaves the group when the communicator and its streams are dropped.
    ///
    /// # Errors
    /// [`Error::Usage`] for a stream that does not exist or was taken, or before [`Communicator::build_graph`];
    /// [`Error::Connecting`] if not all ranks come before the deadline of operations is over; [`Error::System`] if there can be no further thread, [`Error::Op`] if there is no memory for it.
    pub fn stream(&self, index: usize) -> Result<Stream, Error> {
        if self.rings().is_empty() && self.nranks() > 1 {
            return Err(bad(format!("rank {}: call build_graph on all ranks before taking a stream", self.rank())));
        }
        if index >= Self::STREAMS {
            return Err(bad(format!("stream {index} does not exist; there are {}, from 0", Self::STREAMS)));
        }
        let connected = self.plane.connect_all("taking a stream", self.timeout());
        connected.inspect_err(|e| self.core().endpoint.fail(&e.to_string(), e.dead_rank()))?;
        let Some(lane) = self.core().endpoint.lane(index + 1)? else {
            return Err(bad(format!("stream {index} of rank {} was taken before", self.rank())));
        };
        let engine = self.engine.beside(lane);
        Stream::start(index, engine)
    }

    /// Streams of a communicator.
    pub const STREAMS: usize = LANES - 1;

    /// What stopped the control plane, if anything did and it has not been started again: the next call of it does that, with
    /// the last plan and without the bootstrap's connections, as often as the tenant's limits allow. The data plane goes on
    /// without it.
    pub fn control_stopped(&self) -> Option<String> {
        match self.plane.ask(Ask::Stopped, Patience::Usual) {
            Ok(Answer::Stopped(why)) => why,
            Ok(other) => Some(other.unexpected("what stopped it").to_string()),
            Err(e) => Some(e.to_string()),
        }
    }

    /// The host object.
    pub fn core(&self) -> &Arc<CommCore> {
        &self.plane.core
    }

    /// Asks the library again what it planned (slot 5).
    ///
    /// # Errors
    /// [`Error::Plugin`].
    pub fn query_info(&self) -> Result<CommInfo, Error> {
        match self.plane.ask(Ask::Info, Patience::Usual)? {
            Answer::Info(info) => Ok(*info),
            other => Err(other.unexpected("what was planned")),
        }
    }

    /// Device of a rank, from the peer records (slot 18).
    ///
    /// # Errors
    /// [`Error::Plugin`], also for a rank outside the group.
    pub fn peer_device_id(&self, peer: i32) -> Result<i32, Error> {
        match self.plane.ask(Ask::PeerDevice { peer }, Patience::Usual)? {
            Answer::Device(id) => Ok(id),
            other => Err(other.unexpected("a device")),
        }
    }

    /// Sends a control message over the bootstrap (slot 11), at most 65,520 bytes.
    ///
    /// # Errors
    /// [`Error::Plugin`].
    pub fn bootstrap_send(&self, peer: i32, data: &[u8]) -> Result<(), Error> {
        self.control_send(peer, data, Patience::Usual)
    }

    /// Receives a control message of exactly `bytes` (slot 12).
    ///
    /// # Errors
    /// [`Error::Plugin`].
    pub fn bootstrap_recv(&self, peer: i32, bytes: u64) -> Result<Vec<u8>, Error> {
        self.control_receive(peer, bytes, Patience::Usual)
    }

    /// As [`Communicator::bootstrap_send`], but no wait in it outlasts `until`.
    pub(super) fn bootstrap_send_until(&self, peer: i32, data: &[u8], until: Instant) -> Result<(), Error> {
        self.control_send(peer, data, Patience::Waits(until))
    }

    /// As [`Communicator::bootstrap_recv`], but no wait in it outlasts `until`.
    pub(super) fn bootstrap_recv_until(&self, peer: i32, bytes: u64, until: Instant) -> Result<Vec<u8>, Error> {
        self.control_receive(peer, bytes, Patience::Waits(until))
    }

    fn control_send(&self, peer: i32, data: &[u8], patience: Patience) -> Result<(), Error> {
        self.plane.ask(Ask::Send { peer, data: data.to_vec() }, patience).map(|_| ())
    }

    fn control_receive(&self, peer: i32, bytes: u64, patience: Patience) -> Result<Vec<u8>, Error> {
        match self.plane.ask(Ask::Receive { peer, bytes }, patience)? {
            Answer::Bytes(got) => exactly("neuronBootstrapRecv", got, bytes),
            other => Err(other.unexpected("a message")),
        }
    }

    /// Gathers one block of every rank over the bootstrap (slot 13).
    ///
    /// # Errors
    /// [`Error::Plugin`].
    pub fn bootstrap_all_gather(&self, block: &[u8]) -> Result<Vec<u8>, Error> {
        let got = self.plane.all_gather(block, Patience::Usual)?;
        exactly("neuronBootstrapAllGather", got, (block.len() * self.nranks()) as u64)
    }

    /// Binds the calling thread near the communicator's device, or to `mask` (slot 19); answers the mask before.
    ///
    /// # Errors
    /// [`Error::Plugin`].
    pub fn set_affinity(&self, mask: Option<&[u64]>, core: i32) -> Result<Vec<u64>, Error> {
        match self.plane.ask(Ask::Affinity { mask: mask.map(<[u64]>::to_vec), core }, Patience::Usual)? {
            Answer::Mask(before) => Ok(before),
            other => Err(other.unexpected("a mask")),
        }
    }

    /// Whether a ring edge has a connector (slot 20).
    ///
    /// # Errors
    /// [`Error::Plugin`], also if there is none.
    pub fn ring_connector(&self, channel: i32, is_send: bool) -> Result<(), Error> {
        self.plane.ask(Ask::RingConnector { channel, is_send }, Patience::Usual).map(|_| ())
    }

    /// One tick of the proxy through the component (slot 10): (idle, done), ANDed with what is passed.
    ///
    /// # Errors
    /// [`Error::Plugin`]; an entry's own failure has status 1206.
    pub fn proxy_progress_through_component(
        &self,
        stream: u32,
        block: u32,
        idle: bool,
        done: bool,
    ) -> Result<(bool, bool), Error> {
        match self.plane.ask(Ask::Progress { stream, block, idle, done }, Patience::Usual)? {
            Answer::Progress { idle, done } => Ok((idle, done)),
            other => Err(other.unexpected("progress")),
        }
    }

    /// Connects every pair of ranks (slot 7); called once, by all ranks, before the first schedule that needs it.
    ///
    /// # Errors
    /// [`Error::Plugin`], [`Error::Connecting`] if the deadline of operations is over before.
    pub fn expand_connectivity(&self) -> Result<(), Error> {
        self.plane.expand_connectivity("expand_connectivity", self.timeout())
    }

    /// Allocates `bytes` of this core's device memory, zeroed: a [`crate::Tensor`] without a type.
    ///
    /// # Errors
    /// [`Error::Memory`]; [`Error::Limit`] for more than the tenant's policy grants.
    pub fn allocate(&self, bytes: u64) -> Result<DeviceMemory, Error> {
        let found = self.core().endpoint.hbm().alloc(bytes);
        Ok(DeviceMemory(Arc::new(self.runtime().tenant().may_allocate(bytes, found)?)))
    }
}

/// File descriptors that a communicator of `n` ranks needs on `rank`: for each peer a handle of its process and the two
/// bootstrap connections of the link exchange; the ring, listeners, events and memory of the rank itself; on rank 0 the root's
/// connections.
fn descriptors(rank: usize, n: usize) -> u64 {
    const OWN: u64 = 16;
    let n = n as u64;
    OWN + 3 * n.saturating_sub(1) + if rank == 0 { n } else { 0 }
}

/// Checks what a plugin answered: its words are an allegation.
fn exactly(entry: &str, got: Vec<u8>, bytes: u64) -> Result<Vec<u8>, Error> {
    if got.len() as u64 == bytes {
        return Ok(got);
    }
    Err(bad(format!("{entry} of the plugin answered {} bytes, {bytes} were asked for", got.len())))
}
