//! Joining a group: where it meets, who joins, where that one runs.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::plane::ask::ControlPlane;
use crate::plane::host::{Host, bad};
use sandbox::bindings::exports::neuron::nccom::collectives::{CommInfo, HistogramConfig, NeuronDeviceInfo};
use sandbox::bindings::neuron::nrt::types::NecPodType;
use sandbox::key::GroupKey;
use sandbox::limits::{ADDRESS_BYTES, ID_BYTES};
use sandbox::objects::CommCore;

/// How the ranks of a group find one another.
#[derive(Clone)]
pub enum Rendezvous {
    /// An id from [`crate::Runtime::unique_id`], handed out by the user.
    Id([u8; ID_BYTES]),
    /// `host:port` of the root, which rank 0 starts: a global communicator.
    Root(String),
}

/// The secret part of an id is not printed.
impl std::fmt::Debug for Rendezvous {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Rendezvous::Id(id) => f.debug_tuple("Id").field(&&id[..ADDRESS_BYTES]).finish_non_exhaustive(),
            Rendezvous::Root(root) => f.debug_tuple("Root").field(root).finish(),
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
    pub control: Arc<dyn ControlPlane>,
    pub core: Arc<CommCore>,
    pub info: CommInfo,
    pub place: Place,
}

impl Place {
    /// Where rank `rank` of `n` runs.
    pub(crate) fn of(host: &Host, rank: usize, n: usize) -> Result<Place, Error> {
        let config = &host.config;
        let device = &host.tenant.device;
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
                let (name, cores) = (&host.tenant.name, &config.cores);
                Error::Config(format!("tenant {name} has the logical cores {cores:?}, none for rank {rank} of {n}"))
            })?;
            return Ok(Place { core, server });
        }
        let place = device.place(local as u32, here as u32).map_err(|e| Error::Config(e.to_string()))?;
        Ok(Place { core: place.logical_core as i32, server })
    }

    /// As the library is told (enc_neuron_device_info_t).
    pub(super) fn device_info(self, host: &Host) -> Result<NeuronDeviceInfo, Error> {
        let device = &host.tenant.device;
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
