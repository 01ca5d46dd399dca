//! The control plane in this process: an instance of the library, and its handle of the communicator.

use std::sync::Arc;

use crate::error::Error;
use crate::plane::ask::{Answer, Ask, ControlPlane};
use crate::plane::host::{Host, bad};
use crate::plane::join::{Joined, Joining, Place, Rendezvous};
use sandbox::abort::AbortToken;
use sandbox::bindings::exports::neuron::nccom::collectives::{EncPattern, NetConnectivity};
use sandbox::entries::{COLLECTIVES, Holder, Resource};
use sandbox::imports::sockets::decode;
use sandbox::limits::{ADDRESS_BYTES, byte_list};
use sandbox::objects::ClientProcess;
use sandbox::store::{EntryCall, Instance, Patience};

/// An instance of the library, and its handle of the communicator.
#[derive(Debug, Clone)]
pub(crate) struct Here {
    pub host: Arc<Host>,
    pub instance: Arc<Instance>,
    pub handle: u32,
}

impl Here {
    /// Makes an instance and has it join, for a client if this is a service.
    pub(crate) fn join(
        host: &Arc<Host>,
        j: &Joining,
        abort: &AbortToken,
        client: Option<ClientProcess>,
    ) -> Result<Joined, Error> {
        let (rank, n) = (j.rank, j.nranks);
        let (Ok(rank32), Ok(n32)) = (i32::try_from(rank), i32::try_from(n)) else {
            return Err(bad(format!("rank {rank} of {n} is too large")));
        };
        let loaded = host.forward.guarded("neuronInitComm")?;
        // The library answers for a rank outside the world; the device only needs a place that exists.
        let place = match j.on {
            Some(place) => place,
            None => Place::of(host, rank.min(n.saturating_sub(1)), n.max(1))?,
        };
        host.tenant.may_use_core(place.core)?;
        let dev = place.device_info(host)?;
        let holder = Holder { core: place.core, key: j.key, seat: Some((rank, n)), client };
        let instance = loaded.instantiate(&host.tenant, abort, holder, Patience::Usual)?;
        host.roster.joins(&instance, rank);
        let (forward, call) = (&host.forward, EntryCall::of(&instance));
        let made = match &j.rendezvous {
            Rendezvous::Id(id) => {
                // A rank whose join failed may try again as long as the root waits for it.
                if host.used.has(&j.key, rank) {
                    return Err(bad(format!(
                        "rank {rank} has joined by this unique id before, so the id is spent: it serves one group, once; make a new one \
                         with unique_id"
                    )));
                }
                let root = decode(&id[..ADDRESS_BYTES]).ok();
                instance.peek(|s| s.root = root);
                let made = forward.init_comm(call, n32, id, rank32, &dev, false)?;
                host.used.note(&j.key, rank);
                made
            }
            Rendezvous::Root(root) => {
                instance.peek(|s| s.root_name = root.rsplit_once(':').map(|(host, _)| host.into()));
                forward.init_global_comm(call, rank32, n32, &dev, Some(root), "global comm")?
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
        let info = forward.get_comm_info(call, Resource::new_borrow(handle), true)?;
        let here = Here { host: host.clone(), instance, handle };
        Ok(Joined { control: Arc::new(here), core, info, place })
    }
}

impl ControlPlane for Here {
    fn ask(&self, ask: Ask, patience: Patience) -> Result<Answer, Error> {
        const HINT: &str = "runtime";
        let call = EntryCall::of(&self.instance).within(patience);
        let (f, c) = (&self.host.forward, Resource::new_borrow(self.handle));
        Ok(match ask {
            Ask::BuildGraph => f.build_graph_comm(call, c).map(|()| Answer::Done)?,
            Ask::Info => Answer::Info(Box::new(f.get_comm_info(call, c, true)?)),
            Ask::Expand => f.expand_connectivity(call, c, NetConnectivity::Mesh).map(|()| Answer::Done)?,
            Ask::Progress { stream, block, idle, done } => {
                let (idle, done) = f.network_proxy_progress(call, c, stream, block, idle, done)?;
                Answer::Progress { idle, done }
            }
            Ask::Send { peer, data } => {
                within("neuron-bootstrap-send", data.len() as u64)?;
                f.bootstrap_send(call, c, peer, &data, HINT).map(|()| Answer::Done)?
            }
            Ask::Receive { peer, bytes } => {
                within("neuron-bootstrap-recv", bytes)?;
                Answer::Bytes(f.bootstrap_recv(call, c, peer, bytes, HINT)?)
            }
            Ask::AllGather { block } => {
                within("neuron-bootstrap-send", block.len() as u64)?;
                Answer::Bytes(f.bootstrap_all_gather(call, c, &block, HINT)?)
            }
            Ask::PeerDevice { peer } => Answer::Device(f.get_peer_device_id(call, c, peer)?),
            Ask::Affinity { mask, core } => Answer::Mask(f.set_affinity(call, c, mask.as_deref(), core)?),
            Ask::RingConnector { channel, is_send } => {
                let connector = f.get_net_connector(call, c, EncPattern::Ring, channel, is_send)?;
                self.instance.peek(|s| s.remove(connector));
                Answer::Done
            }
            Ask::Stopped => Answer::Stopped(self.instance.stopped()),
            Ask::Invite | Ask::Link { .. } => return Err(Error::Bug("the library was asked for a link".into())),
        })
    }

    /// Gives the library its free call, unless it has stopped.
    fn free(&self, patience: Patience) -> Result<(), Error> {
        if self.instance.stopped().is_some() {
            return Ok(());
        }
        let call = EntryCall::of(&self.instance).within(patience);
        Ok(self.host.forward.free_comm(call, Resource::new_borrow(self.handle))?)
    }

    fn here(&self) -> Option<&Here> {
        Some(self)
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
