//! The control calls of a communicator, as values, and who answers them.
//!
//! A communicator asks its library for things by [`Ask`]s. [`Here`] answers them from an instance in this process; a
//! [`Served`] sends them to the service, where a `Here` answers them all the same.

use std::sync::Arc;
use std::time::Instant;

use hw_bridge::os::patience::resumed;
use sandbox::entries::Resource;
use serde::{Deserialize, Serialize};

use crate::nrt::communicator::{Rendezvous, bad};
use crate::nrt::runtime::Runtime;
use crate::serve::client::Served;
use crate::serve::wire;
use sandbox::abort::AbortToken;
use sandbox::bindings::exports::neuron::nccom::collectives::{
    CommInfo, EncPattern, HistogramConfig, NetConnectivity, NeuronDeviceInfo,
};
use sandbox::bindings::neuron::nrt::types::NecPodType;
use sandbox::entries::COLLECTIVES;
use sandbox::error::Error;
use sandbox::imports::sockets::decode;
use sandbox::key::GroupKey;
use sandbox::limits::{ADDRESS_BYTES, byte_list};
use sandbox::objects::{Client, CommCore};
use sandbox::store::{Instance, bounded_by_caller, waiting};

/// A control call of a communicator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// Slot 4.
    BuildGraph,
    /// Slot 5.
    Info,
    /// Slot 7: every pair.
    Expand,
    /// Slot 10.
    Progress { stream: u32, block: u32, idle: bool, done: bool },
    /// Slot 11.
    Send { peer: i32, data: Vec<u8> },
    /// Slot 12.
    Receive { peer: i32, bytes: u64 },
    /// Slot 13.
    AllGather { block: Vec<u8> },
    /// Slot 18.
    PeerDevice { peer: i32 },
    /// Slot 19.
    Affinity { mask: Option<Vec<u64>>, core: i32 },
    /// Slot 20.
    RingConnector { channel: i32, is_send: bool },
    /// What stopped the instance; no call of it.
    Stopped,
}

/// What a control call answers. Each [`Ask`] has its own form.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Answer {
    Done,
    Info(#[serde(with = "wire::info")] Box<CommInfo>),
    Progress { idle: bool, done: bool },
    Bytes(Vec<u8>),
    Device(i32),
    Mask(Vec<u64>),
    Stopped(Option<String>),
}

impl Answer {
    /// An answer of another form than was asked for.
    pub(super) fn unexpected(self, ask: &'static str) -> Error {
        Error::Bug(format!("a control call for {ask} was answered with {self:?}"))
    }
}

/// How long a control call may take, beside the library's own deadlines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    /// As long as these say.
    Usual,
    /// No wait in it outlasts the moment, be it for another call of the instance, for a restart, or the guest's own; a guest
    /// that goes on has the library's time. The call may be made again.
    Waits(Instant),
    /// It serves an operation that gives up then: the instance is stopped if it does not come back.
    Operation(Instant),
}

impl Patience {
    /// Of an operation that ends at `until`, or never.
    pub(super) fn operation(until: Option<Instant>) -> Patience {
        until.map_or(Patience::Usual, Patience::Operation)
    }

    /// When it ends, if it does before the library's own deadlines.
    pub(crate) fn until(self) -> Option<Instant> {
        match self {
            Patience::Usual => None,
            Patience::Waits(until) | Patience::Operation(until) => Some(until),
        }
    }

    /// The same later on, for a call that knows nothing of a stop of the process since then.
    pub(crate) fn resumed(self, since: Instant) -> Patience {
        match self {
            Patience::Usual => Patience::Usual,
            Patience::Waits(until) => Patience::Waits(resumed(until, since)),
            Patience::Operation(until) => Patience::Operation(resumed(until, since)),
        }
    }
}

/// Where a rank runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    /// Logical core.
    pub core: i32,
    /// Virtual server.
    pub server: u32,
}

/// Who joins what.
#[derive(Debug, Clone)]
pub(crate) struct Joining {
    /// An id without its secret part.
    pub rendezvous: Rendezvous,
    /// The group's.
    pub key: GroupKey,
    pub rank: usize,
    pub nranks: usize,
    /// A rank of a sub-group stays where it is in the whole group.
    pub on: Option<Place>,
}

/// A communicator that was joined.
#[derive(Debug)]
pub(crate) struct Joined {
    pub control: Control,
    pub core: Arc<CommCore>,
    pub info: CommInfo,
    pub place: Place,
}

/// Who answers the control calls of a communicator.
#[derive(Debug, Clone)]
pub(crate) enum Control {
    /// An instance in this process.
    Here(Here),
    /// The service.
    Served(Arc<Served>),
}

impl Control {
    /// Makes a call.
    pub(crate) fn ask(&self, ask: Ask, patience: Patience) -> Result<Answer, Error> {
        match self {
            Control::Here(here) => here.ask(ask, patience),
            Control::Served(served) => served.ask(ask, patience),
        }
    }

    /// Ends the library's side of the communicator (slot 6).
    pub(crate) fn free(&self) -> Result<(), Error> {
        match self {
            Control::Here(here) => here.free(),
            Control::Served(served) => served.free(),
        }
    }
}

/// An instance of the library, and its handle of the communicator.
#[derive(Debug, Clone)]
pub(crate) struct Here {
    pub runtime: Runtime,
    pub instance: Arc<Instance>,
    pub handle: u32,
}

impl Here {
    /// Makes an instance and has it join, for a client if this is a service.
    pub(crate) fn join(
        runtime: &Runtime,
        j: &Joining,
        abort: &AbortToken,
        client: Option<Client>,
    ) -> Result<Joined, Error> {
        let (rank, n) = (j.rank, j.nranks);
        let (Ok(rank32), Ok(n32)) = (i32::try_from(rank), i32::try_from(n)) else {
            return Err(bad(format!("rank {rank} of {n} is too large")));
        };
        let inner = &runtime.0;
        let loaded = inner.forward.guarded("neuronInitComm")?;
        // The library answers for a rank outside the world; the device only needs a place that exists.
        let place = match j.on {
            Some(place) => place,
            None => Place::of(runtime, rank.min(n.saturating_sub(1)), n.max(1))?,
        };
        inner.tenant.may_use_core(place.core)?;
        let dev = place.device_info(runtime)?;
        let instance = loaded.instantiate(&inner.tenant, abort, Some(place.core), j.key, Some((rank, n)), client)?;
        inner.swaps.joins(&instance, rank);
        let forward = &inner.forward;
        let made = match &j.rendezvous {
            Rendezvous::Id(id) => {
                // A rank whose join failed may try again as long as the root waits for it.
                if inner.used.has(&j.key, rank) {
                    return Err(bad(format!(
                        "rank {rank} has joined by this unique id before, so the id is spent: it serves one group, once; make a new one \
                         with unique_id"
                    )));
                }
                let root = decode(&id[..ADDRESS_BYTES]).ok();
                instance.peek(|s| s.root = root);
                let made = forward.init_comm(Some(&instance), n32, id, rank32, &dev, false)?;
                inner.used.note(&j.key, rank);
                made
            }
            Rendezvous::Root(root) => {
                instance.peek(|s| s.root_name = root.rsplit_once(':').map(|(host, _)| host.into()));
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
        let here = Here { runtime: runtime.clone(), instance, handle };
        Ok(Joined { control: Control::Here(here), core, info, place })
    }

    pub(crate) fn ask(&self, ask: Ask, patience: Patience) -> Result<Answer, Error> {
        match patience {
            Patience::Usual => self.call(ask),
            Patience::Operation(until) => bounded_by_caller(until, || self.call(ask)),
            Patience::Waits(until) => waiting(until, || self.call(ask)),
        }
    }

    fn call(&self, ask: Ask) -> Result<Answer, Error> {
        const HINT: &str = "runtime";
        let (f, i, c) = (&self.runtime.0.forward, Some(&*self.instance), Resource::new_borrow(self.handle));
        Ok(match ask {
            Ask::BuildGraph => f.build_graph_comm(i, c).map(|()| Answer::Done)?,
            Ask::Info => Answer::Info(Box::new(f.get_comm_info(i, c, true)?)),
            Ask::Expand => f.expand_connectivity(i, c, NetConnectivity::Mesh).map(|()| Answer::Done)?,
            Ask::Progress { stream, block, idle, done } => {
                let (idle, done) = f.network_proxy_progress(i, c, stream, block, idle, done)?;
                Answer::Progress { idle, done }
            }
            Ask::Send { peer, data } => {
                within("neuron-bootstrap-send", data.len() as u64)?;
                f.bootstrap_send(i, c, peer, &data, HINT).map(|()| Answer::Done)?
            }
            Ask::Receive { peer, bytes } => {
                within("neuron-bootstrap-recv", bytes)?;
                Answer::Bytes(f.bootstrap_recv(i, c, peer, bytes, HINT)?)
            }
            Ask::AllGather { block } => {
                within("neuron-bootstrap-send", block.len() as u64)?;
                Answer::Bytes(f.bootstrap_all_gather(i, c, &block, HINT)?)
            }
            Ask::PeerDevice { peer } => Answer::Device(f.get_peer_device_id(i, c, peer)?),
            Ask::Affinity { mask, core } => Answer::Mask(f.set_affinity(i, c, mask.as_deref(), core)?),
            Ask::RingConnector { channel, is_send } => {
                let connector = f.get_net_connector(i, c, EncPattern::Ring, channel, is_send)?;
                self.instance.peek(|s| s.remove(connector));
                Answer::Done
            }
            Ask::Stopped => Answer::Stopped(self.instance.stopped()),
        })
    }

    /// Gives the library its free call, unless it has stopped.
    pub(crate) fn free(&self) -> Result<(), Error> {
        if self.instance.stopped().is_some() {
            return Ok(());
        }
        self.runtime.0.forward.free_comm(Some(&self.instance), Resource::new_borrow(self.handle))
    }
}

/// Checks a message against its entry's limit before it is lowered into the guest.
fn within(function: &str, bytes: u64) -> Result<(), Error> {
    let most = byte_list(COLLECTIVES, function).unwrap_or(0);
    if bytes <= most {
        return Ok(());
    }
    Err(bad(format!("{function}: a message has at most {most} bytes, {bytes} were asked for")))
}

impl Place {
    /// Where rank `rank` of `n` runs.
    pub(crate) fn of(runtime: &Runtime, rank: usize, n: usize) -> Result<Place, Error> {
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
        let server = if size > 0 { server as u32 } else { 0 };
        if !config.cores.is_empty() {
            let core = config.cores.get(local).copied().ok_or_else(|| {
                let (name, cores) = (&runtime.tenant().name, &config.cores);
                Error::Config(format!("tenant {name} has the logical cores {cores:?}, none for rank {rank} of {n}"))
            })?;
            return Ok(Place { core, server });
        }
        let place = device.place(local as u32, here as u32).map_err(|e| Error::Config(e.to_string()))?;
        Ok(Place { core: place.logical_core as i32, server })
    }

    /// As the library is told (enc_neuron_device_info_t).
    fn device_info(self, runtime: &Runtime) -> Result<NeuronDeviceInfo, Error> {
        let device = &runtime.tenant().device;
        let core = u32::try_from(self.core).map_err(|_| bad(format!("there is no logical core {}", self.core)))?;
        let place = device.core_place(core).map_err(|e| Error::Config(e.to_string()))?;
        let pod = device.pod();
        Ok(NeuronDeviceInfo {
            nec_dev_id: self.core,
            mla_idx: place.mla_idx,
            tpb_idx: place.core as i32,
            host_device_id: place.host_device_id,
            routing_id: place.rid,
            pod_id: pod.pod_id,
            pod_type: match pod.pod_type {
                hw_bridge::model::PodType::None => NecPodType::None,
                hw_bridge::model::PodType::P2p => NecPodType::P2p,
                hw_bridge::model::PodType::Switch => NecPodType::Switch,
                _ => NecPodType::Invalid,
            },
            pod_node_id: pod.node_id,
            virtual_server_id: self.server,
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
}
