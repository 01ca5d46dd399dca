//! A communicator: one rank's membership, its control plane (an instance of the library) and its data plane.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hw_bridge::flight::{self, Counters};
use hw_bridge::limits::LANES;
use wasmtime::component::Resource;

use super::collectives::Engine;
use super::groups::Groups;
use super::plane::Plane;
use super::runtime::Runtime;
use super::streams::Stream;
use super::tensor::Tensor;
use crate::abort::AbortToken;
use crate::bindings::exports::neuron::nccom::collectives::{CommInfo, EncPattern, HistogramConfig, NeuronDeviceInfo};
use crate::bindings::neuron::nrt::types::NecPodType;
use crate::enc::table::Policy;
use crate::error::Error;
use crate::forward::COLLECTIVES;
use crate::hw::objects::{CommCore, CommunicatorObject};
use crate::limits::{ID_BYTES, byte_list};
use crate::plugin::Instance;

/// How the ranks of a group find one another.
#[derive(Debug, Clone)]
pub enum Rendezvous {
    /// An id from [`Runtime::unique_id`], handed out by the user.
    Id([u8; ID_BYTES]),
    /// `host:port` of the root, which rank 0 starts: a global communicator.
    Root(String),
}

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

    /// Joins the global group of a root.
    pub fn with_root(root: impl Into<String>, rank: usize, nranks: usize) -> CommOptions {
        CommOptions { rendezvous: Rendezvous::Root(root.into()), rank, nranks, abort: None, timeout: None, graph: true }
    }
}

/// One rank's communicator. Collectives are called by all ranks in the same order; one at a time.
#[derive(Debug)]
pub struct Communicator {
    plane: Arc<Plane>,
    pub(super) engine: Engine,
    /// Where this rank runs; its sub-groups run there too.
    pub(super) device: NeuronDeviceInfo,
    /// Communicators made of it.
    pub(super) groups: Groups,
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

pub(super) fn bad(what: String) -> Error {
    Error::Usage(what)
}

impl Communicator {
    pub(super) fn init(runtime: &Runtime, o: CommOptions) -> Result<Communicator, Error> {
        Communicator::init_on(runtime, o, None)
    }

    /// As a rank of a sub-group the communicator stays on `device`, where the rank is in the whole group.
    pub(super) fn init_on(
        runtime: &Runtime,
        o: CommOptions,
        device: Option<NeuronDeviceInfo>,
    ) -> Result<Communicator, Error> {
        let (rank, n) = (o.rank, o.nranks);
        let (Ok(rank32), Ok(n32)) = (i32::try_from(rank), i32::try_from(n)) else {
            return Err(bad(format!("rank {rank} of {n} is too large")));
        };
        let inner = &runtime.0;
        let _inside = inner.doors.enter("neuronInitComm", inner.tenant.limits.entry)?;
        let loaded = inner.forward.guarded("neuronInitComm")?;
        // Counted before the start: running out in the middle would look like a failure of whatever comes last.
        hw_bridge::exhausted::room_for(descriptors(rank, n))
            .map_err(|why| Error::Limit(format!("rank {rank} of {n} cannot join: it {why}")))?;
        let abort = match o.abort {
            Some(a) => a,
            None => AbortToken::new()
                .map_err(|source| Error::System { what: "making the abort event of a communicator".into(), source })?,
        };
        // The library answers for a rank outside the world; the device only needs a place that exists.
        let dev = match device {
            Some(d) => d,
            None => device_info(runtime, rank.min(n.saturating_sub(1)), n.max(1))?,
        };
        let instance = loaded.instantiate(&inner.tenant, &abort, Some(dev.nec_dev_id))?;
        let forward = &inner.forward;
        let made = match &o.rendezvous {
            Rendezvous::Id(id) => forward.init_comm(Some(&instance), n32, id, rank32, &dev, false)?,
            Rendezvous::Root(root) => {
                forward.init_global_comm(Some(&instance), rank32, n32, &dev, Some(root), "global comm")?
            }
        };
        let handle = made.rep();
        let core = instance
            .peek(|s| s.comm(&made))
            .map_err(|e| Error::Bug(format!("the communicator that init answered is not in its table: {e}")))?;
        if core.rank != rank || core.nranks != n {
            let (r, m) = (core.rank, core.nranks);
            return Err(bad(format!("the plugin made rank {r} of {m}, rank {rank} of {n} was asked for")));
        }
        let info = forward.get_comm_info(Some(&instance), Resource::new_borrow(handle), true)?;
        let lane =
            core.endpoint.lane(0)?.ok_or_else(|| Error::Bug(format!("communicator {} was made twice", core.id)))?;
        let plane = Arc::new(Plane::new(runtime.clone(), core, dev.nec_dev_id, instance, handle, info));
        inner.swaps.register(&plane);
        let mut made = Communicator {
            engine: Engine::new(plane.clone(), lane, o.timeout.unwrap_or(inner.config.timeout)),
            plane,
            device: dev,
            groups: Groups::default(),
        };
        made.groups.prepare(&made, &o.rendezvous)?;
        if o.graph {
            made.build_graph()?;
        }
        Ok(made)
    }

    /// Has the library build the ring graph and connect it (slot 4), and takes its rings over. All ranks call it; a graph
    /// that is built stays.
    ///
    /// # Errors
    /// [`Error::Entry`] (no transport between two ranks, say), [`Error::Stopped`], [`Error::Usage`] for a wrong plan.
    pub fn build_graph(&mut self) -> Result<(), Error> {
        // No swap comes between what is built and what is taken over.
        let (doors, patience) = (&self.plane.runtime.0.doors, self.plane.runtime.0.tenant.limits.entry);
        let _inside = doors.enter("neuronBuildGraphComm", patience)?;
        self.entry(|f, i, c| f.build_graph_comm(Some(i), c))?;
        let plan = self.plane.check_plan(self.query_info()?)?;
        self.plane.set_plan(plan);
        self.engine.refresh();
        if self.plane.linked_by_rings() {
            self.plane.agree_on_direct()?;
        }
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
        &self.plane.runtime
    }

    /// What the choice of algorithms goes by. Whether private memory is read directly is agreed when every pair of ranks is
    /// linked: with more than three ranks by the first operation that is no ring's.
    pub fn policy(&self) -> Policy<'_> {
        self.engine.policy()
    }

    /// The logical core it runs on.
    pub fn logical_core(&self) -> i32 {
        self.device.nec_dev_id
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
        connected.inspect_err(|e| self.core().endpoint.fail(&e.to_string()))?;
        let Some(lane) = self.core().endpoint.lane(index + 1)? else {
            return Err(bad(format!("stream {index} of rank {} was taken before", self.rank())));
        };
        let engine = self.engine.beside(lane);
        Stream::start(index, engine)
    }

    /// Streams of a communicator.
    pub const STREAMS: usize = LANES - 1;

    /// What stopped the control plane, if anything did. The data plane goes on without it.
    pub fn control_stopped(&self) -> Option<String> {
        self.plane.control().0.stopped()
    }

    /// The host object.
    pub fn core(&self) -> &Arc<CommCore> {
        &self.plane.core
    }

    fn entry<T>(
        &self,
        f: impl FnOnce(&crate::forward::Forward, &Instance, Resource<CommunicatorObject>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.plane.entry(f)
    }

    /// Asks the library again what it planned (slot 5).
    ///
    /// # Errors
    /// [`Error::Entry`], [`Error::Stopped`].
    pub fn query_info(&self) -> Result<CommInfo, Error> {
        self.entry(|f, i, c| f.get_comm_info(Some(i), c, true))
    }

    /// Device of a rank, from the peer records (slot 18).
    ///
    /// # Errors
    /// [`Error::Entry`] for a rank outside the group, [`Error::Stopped`].
    pub fn peer_device_id(&self, peer: i32) -> Result<i32, Error> {
        self.entry(|f, i, c| f.get_peer_device_id(Some(i), c, peer))
    }

    /// Sends a control message over the bootstrap (slot 11), at most 65,520 bytes.
    ///
    /// # Errors
    /// [`Error::Entry`], [`Error::Stopped`].
    pub fn bootstrap_send(&self, peer: i32, data: &[u8]) -> Result<(), Error> {
        within("neuron-bootstrap-send", data.len() as u64)?;
        self.entry(|f, i, c| f.bootstrap_send(Some(i), c, peer, data, "runtime"))
    }

    /// Receives a control message of exactly `bytes` (slot 12).
    ///
    /// # Errors
    /// [`Error::Entry`], [`Error::Stopped`].
    pub fn bootstrap_recv(&self, peer: i32, bytes: u64) -> Result<Vec<u8>, Error> {
        within("neuron-bootstrap-recv", bytes)?;
        let got = self.entry(|f, i, c| f.bootstrap_recv(Some(i), c, peer, bytes, "runtime"))?;
        exactly("neuronBootstrapRecv", got, bytes)
    }

    /// As [`Communicator::bootstrap_send`], but no wait in it outlasts `until`.
    pub(super) fn bootstrap_send_until(&self, peer: i32, data: &[u8], until: Instant) -> Result<(), Error> {
        within("neuron-bootstrap-send", data.len() as u64)?;
        self.entry(|f, i, c| waiting_until(i, until, || f.bootstrap_send(Some(i), c, peer, data, "runtime")))
    }

    /// As [`Communicator::bootstrap_recv`], but no wait in it outlasts `until`.
    pub(super) fn bootstrap_recv_until(&self, peer: i32, bytes: u64, until: Instant) -> Result<Vec<u8>, Error> {
        within("neuron-bootstrap-recv", bytes)?;
        let got =
            self.entry(|f, i, c| waiting_until(i, until, || f.bootstrap_recv(Some(i), c, peer, bytes, "runtime")))?;
        exactly("neuronBootstrapRecv", got, bytes)
    }

    /// Gathers one block of every rank over the bootstrap (slot 13).
    ///
    /// # Errors
    /// [`Error::Entry`], [`Error::Stopped`].
    pub fn bootstrap_all_gather(&self, block: &[u8]) -> Result<Vec<u8>, Error> {
        within("neuron-bootstrap-send", block.len() as u64)?;
        let got = self.entry(|f, i, c| f.bootstrap_all_gather(Some(i), c, block, "runtime"))?;
        exactly("neuronBootstrapAllGather", got, (block.len() * self.nranks()) as u64)
    }

    /// Binds the calling thread near the communicator's device, or to `mask` (slot 19); answers the mask before.
    ///
    /// # Errors
    /// [`Error::Entry`], [`Error::Stopped`].
    pub fn set_affinity(&self, mask: Option<&[u64]>, core: i32) -> Result<Vec<u64>, Error> {
        self.entry(|f, i, c| f.set_affinity(Some(i), c, mask, core))
    }

    /// Whether a ring edge has a connector (slot 20).
    ///
    /// # Errors
    /// [`Error::Entry`] if there is none, [`Error::Stopped`].
    pub fn ring_connector(&self, channel: i32, is_send: bool) -> Result<(), Error> {
        self.entry(|f, i, c| {
            let connector = f.get_net_connector(Some(i), c, EncPattern::Ring, channel, is_send)?;
            i.peek(|s| s.remove(connector));
            Ok(())
        })
    }

    /// One tick of the proxy through the component (slot 10): (idle, done), ANDed with what is passed.
    ///
    /// # Errors
    /// [`Error::Entry`] with status 1206, [`Error::Stopped`].
    pub fn proxy_progress_through_component(
        &self,
        stream: u32,
        block: u32,
        idle: bool,
        done: bool,
    ) -> Result<(bool, bool), Error> {
        self.entry(|f, i, c| f.network_proxy_progress(Some(i), c, stream, block, idle, done))
    }

    /// Connects every pair of ranks (slot 7); called once, by all ranks, before the first schedule that needs it.
    ///
    /// # Errors
    /// [`Error::Entry`], [`Error::Stopped`], [`Error::Connecting`] if the deadline of operations is over before.
    pub fn expand_connectivity(&self) -> Result<(), Error> {
        self.plane.expand_connectivity("expand_connectivity", self.timeout())
    }

    /// Allocates `bytes` of this core's device memory, zeroed.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn tensor(&self, bytes: u64) -> Result<Tensor, Error> {
        Ok(Tensor(self.core().endpoint.hbm().alloc(bytes)?))
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

/// Checks a message against its entry's limit before it is lowered into the guest.
fn within(function: &str, bytes: u64) -> Result<(), Error> {
    let most = byte_list(COLLECTIVES, function).unwrap_or(0);
    if bytes <= most {
        return Ok(());
    }
    Err(bad(format!("{function}: a message has at most {most} bytes, {bytes} were asked for")))
}

/// Makes a call of an instance whose waits end at `until`, after which it may be made again.
fn waiting_until<R>(instance: &Instance, until: Instant, call: impl FnOnce() -> R) -> R {
    instance.peek(|s| s.waits_until = Some(until));
    let answer = call();
    instance.peek(|s| s.waits_until = None);
    answer
}

/// Checks what a plugin answered: its words are an allegation.
fn exactly(entry: &str, got: Vec<u8>, bytes: u64) -> Result<Vec<u8>, Error> {
    if got.len() as u64 == bytes {
        return Ok(got);
    }
    Err(bad(format!("{entry} of the plugin answered {} bytes, {bytes} were asked for", got.len())))
}

/// Where a rank runs, as the library is told (enc_neuron_device_info_t).
fn device_info(runtime: &Runtime, rank: usize, n: usize) -> Result<NeuronDeviceInfo, Error> {
    let config = runtime.config();
    let device = &runtime.tenant().device;
    let size = config.virtual_server_size as usize;
    if size > 0 && !n.is_multiple_of(size) {
        return Err(Error::Config(format!(
            "NEURON_RT_DBG_VIRTUAL_SERVER_SIZE={size} does not divide the world size {n}"
        )));
    }
    let cores = device.total_vnc_count() as usize;
    // Whole servers hold consecutive blocks of ranks.
    let per_server = if size > 0 { size } else { cores.min(n).max(1) };
    let (server, local) = (rank / per_server, rank % per_server);
    let here = per_server.min(n - server * per_server);
    let place = device.place(local as u32, here as u32).map_err(|e| Error::Config(e.to_string()))?;
    let pod = device.pod();
    Ok(NeuronDeviceInfo {
        nec_dev_id: place.logical_core as i32,
        mla_idx: place.mla_idx,
        tpb_idx: place.core as i32,
        host_device_id: place.host_device_id,
        routing_id: place.rid,
        pod_id: pod.pod_id,
        pod_type: match pod.pod_type {
            hw_bridge::device::PodType::None => NecPodType::None,
            hw_bridge::device::PodType::P2p => NecPodType::P2p,
            hw_bridge::device::PodType::Switch => NecPodType::Switch,
            _ => NecPodType::Invalid,
        },
        pod_node_id: pod.node_id,
        virtual_server_id: if size > 0 { server as u32 } else { 0 },
        histogram: HistogramConfig {
            enable: false,
            bucket_usecs: 0,
            num_buckets: 0,
            per_neff_warmup: 0,
            warmup: 0,
            output_path: String::new(),
        },
    })
}
