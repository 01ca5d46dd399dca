//! A communicator: one rank's membership, its control plane (an instance of the library) and its data plane.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use hw_bridge::sequencer::Counters;
use wasmtime::component::Resource;

use super::collectives::Schedules;
use super::runtime::Runtime;
use super::tensor::Tensor;
use crate::abort::AbortToken;
use crate::bindings::exports::neuron::nccom::collectives::{
    CommInfo, EncPattern, HistogramConfig, NetConnectivity, NeuronDeviceInfo,
};
use crate::bindings::neuron::nrt::types::NecPodType;
use crate::error::Error;
use crate::forward::COLLECTIVES;
use crate::hw::objects::{CommCore, CommunicatorObject};
use crate::limits::{ID_BYTES, byte_list};
use crate::plugin::Instance;
use crate::tenant::lock;

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

/// The instance that serves this rank's control plane, and its handle of the communicator.
#[derive(Debug, Clone)]
struct Control {
    instance: Arc<Instance>,
    handle: u32,
}

/// One rank's communicator. Collectives are called by all ranks in the same order; one at a time.
#[derive(Debug)]
pub struct Communicator {
    pub(super) runtime: Runtime,
    pub(super) core: Arc<CommCore>,
    control: RwLock<Control>,
    info: CommInfo,
    pub(super) rings: Vec<Vec<usize>>,
    logical_core: i32,
    pub(super) timeout: Duration,
    pub(super) schedules: Mutex<Schedules>,
    /// Every pair is connected.
    expanded: AtomicBool,
}

pub(super) fn bad(what: String) -> Error {
    Error::Usage(what)
}

impl Communicator {
    pub(super) fn init(runtime: &Runtime, o: CommOptions) -> Result<Communicator, Error> {
        let (rank, n) = (o.rank, o.nranks);
        let (Ok(rank32), Ok(n32)) = (i32::try_from(rank), i32::try_from(n)) else {
            return Err(bad(format!("rank {rank} of {n} is too large")));
        };
        let inner = &runtime.0;
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
        let dev = device_info(runtime, rank.min(n.saturating_sub(1)), n.max(1))?;
        let logical_core = dev.nec_dev_id;
        let instance = loaded.instantiate(&inner.tenant, &abort, Some(logical_core))?;
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
        let mut made = Communicator {
            runtime: runtime.clone(),
            core,
            control: RwLock::new(Control { instance, handle }),
            info,
            rings: Vec::new(),
            logical_core,
            timeout: o.timeout.unwrap_or(inner.config.timeout),
            schedules: Mutex::default(),
            expanded: AtomicBool::new(false),
        };
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
        self.entry(|f, i, c| f.build_graph_comm(Some(i), c))?;
        let info = self.query_info()?;
        let rings = check_rings(&info, self.core.rank, self.core.nranks)?;
        if rings != self.rings {
            // Each rank can only check its own view; that all have the same is noticed when they meet.
            let ranks = rings.iter().flat_map(|r| r.iter().map(|r| *r as u32 + 1).chain([0]));
            let digest = ranks.fold(0x811c_9dc5u32, |d, r| (d ^ r).wrapping_mul(16_777_619));
            lock(&self.core.endpoint).set_plan(digest);
            *lock(&self.schedules) = Schedules::default();
            self.rings = rings;
        }
        self.info = info;
        Ok(())
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.core.rank
    }

    /// Ranks of the group.
    pub fn nranks(&self) -> usize {
        self.core.nranks
    }

    /// What the library planned: rings, peers, nodes.
    pub fn info(&self) -> &CommInfo {
        &self.info
    }

    /// The rings in use, each in ring order from rank 0.
    pub fn rings(&self) -> &[Vec<usize>] {
        &self.rings
    }

    /// The runtime it belongs to.
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// The logical core it runs on.
    pub fn logical_core(&self) -> i32 {
        self.logical_core
    }

    /// The switch that ends it from any thread.
    pub fn abort_token(&self) -> &AbortToken {
        &self.core.abort
    }

    /// Counters of the data plane.
    pub fn counters(&self) -> Counters {
        lock(&self.core.endpoint).counters()
    }

    /// What stopped the control plane, if anything did. The data plane goes on without it.
    pub fn control_stopped(&self) -> Option<String> {
        self.read_control().instance.stopped()
    }

    /// The host object.
    pub fn core(&self) -> &Arc<CommCore> {
        &self.core
    }

    pub(crate) fn control(&self) -> (Arc<Instance>, u32) {
        let c = self.read_control();
        (c.instance, c.handle)
    }

    pub(crate) fn set_control(&self, instance: Arc<Instance>, handle: u32) {
        *self.control.write().unwrap_or_else(|p| p.into_inner()) = Control { instance, handle };
    }

    fn read_control(&self) -> Control {
        self.control.read().unwrap_or_else(|p| p.into_inner()).clone()
    }

    fn entry<T>(
        &self,
        f: impl FnOnce(&crate::forward::Forward, &Instance, Resource<CommunicatorObject>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let c = self.read_control();
        f(&self.runtime.0.forward, &c.instance, Resource::new_borrow(c.handle))
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

    /// Gathers one block of every rank over the bootstrap (slot 13).
    ///
    /// # Errors
    /// [`Error::Entry`], [`Error::Stopped`].
    pub fn bootstrap_all_gather(&self, block: &[u8]) -> Result<Vec<u8>, Error> {
        within("neuron-bootstrap-send", block.len() as u64)?;
        let got = self.entry(|f, i, c| f.bootstrap_all_gather(Some(i), c, block, "runtime"))?;
        exactly("neuronBootstrapAllGather", got, (block.len() * self.core.nranks) as u64)
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
    /// [`Error::Entry`], [`Error::Stopped`].
    pub fn expand_connectivity(&self) -> Result<(), Error> {
        self.entry(|f, i, c| f.expand_connectivity(Some(i), c, NetConnectivity::Mesh))
    }

    /// Has the library connect what is more than ring neighbours, once (INV-81). The exchange needs every rank, so all decide
    /// alike: by the size alone, never by what this rank happens to be linked to.
    pub(crate) fn connect_all(&self) -> Result<(), Error> {
        // With three ranks everybody is a ring neighbour.
        if self.core.nranks <= 3 || self.expanded.load(Ordering::Acquire) {
            return Ok(());
        }
        self.expand_connectivity()?;
        self.expanded.store(true, Ordering::Release);
        Ok(())
    }

    /// Allocates `bytes` of this core's device memory, zeroed.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn tensor(&self, bytes: u64) -> Result<Tensor, Error> {
        let hbm = lock(&self.core.endpoint).hbm().clone();
        Ok(Tensor(hbm.alloc(bytes)?))
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // Peers learn at once; the library then gets its free call, and a stopped one is simply gone.
        lock(&self.core.endpoint).close();
        if self.control_stopped().is_none()
            && let Err(e) = self.entry(|f, i, c| f.free_comm(Some(i), c))
        {
            tracing::debug!("freeing communicator {}: {e}", self.core.id);
        }
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

/// Takes the planned rings over: each must hold every rank once, and fit its own neighbours. A plugin's plan is an
/// allegation; a wrong one is refused here and not found later as a hang. Rotated to begin with rank 0, so that all
/// ranks count positions alike.
fn check_rings(info: &CommInfo, rank: usize, n: usize) -> Result<Vec<Vec<usize>>, Error> {
    let wrong = |i: usize, what: String| bad(format!("the plugin planned ring {i} of rank {rank} wrongly: {what}"));
    let mut rings = Vec::new();
    for (i, ring) in info.rings.iter().enumerate() {
        let order: Vec<usize> = ring.user_ranks.iter().filter_map(|r| usize::try_from(*r).ok()).collect();
        let mut sorted = order.clone();
        sorted.sort_unstable();
        if sorted != (0..n).collect::<Vec<_>>() {
            return Err(wrong(i, format!("{:?} is not every rank of {n} once", ring.user_ranks)));
        }
        if order[0] != rank {
            return Err(wrong(i, format!("{:?} does not begin with this rank", ring.user_ranks)));
        }
        if ring.next != order[1 % n] as i32 || ring.prev != order[n - 1] as i32 {
            return Err(wrong(
                i,
                format!("neighbours {} and {} do not fit {:?}", ring.prev, ring.next, ring.user_ranks),
            ));
        }
        let zero = order.iter().position(|r| *r == 0).unwrap_or(0);
        rings.push(order[zero..].iter().chain(&order[..zero]).copied().collect());
    }
    Ok(rings)
}
