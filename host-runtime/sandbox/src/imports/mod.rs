//! The host side of `neuron:hw`: thin; checks every handle and limit, then calls the system or `hw-bridge`.
//!
//! A guest's argument is an allegation. What is wrong with one is answered with a status, and a sentence stays behind
//! for the entry that fails; only what the original would assert ends the instance.

#[doc(hidden)]
pub mod fuzzing;
pub mod nec;
pub mod net;
pub mod own;
pub(crate) mod rendezvous;
pub mod sockets;
pub(crate) mod system;
mod tasks;
pub(crate) mod wasi;

use wasmtime::component::{HasSelf, Linker, Resource};

use crate::bindings::neuron::hw::{links, objects as wit_objects, proxy};
use crate::bindings::neuron::nrt::types::NrtStatus;
use crate::bindings::{LinkOptions, TransportSwappable};
use crate::limits::byte_list;
use crate::objects::{self, CommCore, CommunicatorObject, Connector, ConnectorObject};
use crate::status::Status;
use crate::store::HostState;
use hw_bridge::exec::sequencer::Endpoint;
use hw_bridge::group::Control;
use hw_bridge::os::bell::WaitPolicy;
use hw_bridge::os::lock::lock;

type Answer<T> = Result<T, NrtStatus>;
type Trap<T> = wasmtime::Result<T>;

/// Adds everything a plugin of any world may import.
pub(crate) fn add_to_linker(linker: &mut Linker<HostState>) -> wasmtime::Result<()> {
    let mut served = LinkOptions::default();
    served.hw(true);
    TransportSwappable::add_to_linker::<_, HasSelf<_>>(linker, &served, |s| s)
}

impl HostState {
    /// The communicator behind a handle. The engine has checked owner and kind.
    pub fn comm(&self, handle: &Resource<CommunicatorObject>) -> Trap<std::sync::Arc<CommCore>> {
        Ok(self.table.get(handle)?.0.clone())
    }

    /// A rank of a communicator, checked.
    fn peer_of(&mut self, comm: &CommCore, peer: i32) -> Answer<usize> {
        match usize::try_from(peer) {
            Ok(p) if p < comm.nranks => Ok(p),
            _ => {
                let n = comm.nranks;
                Err(self.fail(Status::INVALID, format!("the plugin named peer {peer}, the communicator has {n} ranks")))
            }
        }
    }
}

/// Drop functions of resources that are plain objects.
macro_rules! plain_resources {
    ($($host:path : $object:ty),* $(,)?) => {
        $(impl $host for HostState {
            fn drop(&mut self, handle: Resource<$object>) -> Trap<()> {
                self.remove(handle);
                Ok(())
            }
        })*
    };
}

plain_resources! {
    wit_objects::HostListener: objects::ListenerObject,
    wit_objects::HostConnection: objects::ConnectionObject,
    wit_objects::HostNetComm: objects::NetCommObject,
    wit_objects::HostRegistration: objects::RegistrationObject,
    wit_objects::HostRequest: objects::RequestObject,
    wit_objects::HostRegion: objects::RegionObject,
    crate::bindings::neuron::nrt::types::HostSemaphore: objects::SemaphoreObject,
    crate::bindings::neuron::nrt::types::HostHostMem: objects::HostMemObject,
    crate::bindings::neuron::nrt::types::HostNetLibrary: objects::NetLibraryObject,
}

impl wit_objects::Host for HostState {}
impl crate::bindings::neuron::nrt::types::Host for HostState {}

impl wit_objects::HostCommunicator for HostState {
    fn create(&mut self, rank: i32, rank_n: i32) -> Trap<Answer<Resource<CommunicatorObject>>> {
        let most = hw_bridge::limits::MAX_LOCAL_RANKS;
        let (Ok(r), Ok(n)) = (usize::try_from(rank), usize::try_from(rank_n)) else {
            return Ok(Err(self.fail(Status::INVALID, format!("the plugin asked for rank {rank} of {rank_n}"))));
        };
        if r >= n || n > most {
            let why = format!("the plugin asked for rank {r} of {n}; a communicator has at most {most} ranks here");
            return Ok(Err(self.fail(Status::INVALID, why)));
        }
        let (Some(core), Some(key)) = (self.core, self.key) else {
            let why = "a communicator can only be made by an init entry, on a rank's core";
            return Ok(Err(self.fail(Status::UNINITIALIZED, why)));
        };
        // The hosts of a group prove to one another which rank they are: that is the program's word, not the plugin's.
        if self.seat != Some((r, n)) {
            let joins = self.seat.map_or("no rank joins".into(), |(r, n)| format!("rank {r} of {n} joins"));
            let why = format!("the plugin asked for rank {r} of {n} where {joins}");
            return Ok(Err(self.fail(Status::INVALID, why)));
        }
        self.span.record("rank", r);
        let tenant = self.tenant.clone();
        let (abort, client) = (self.abort.clone(), self.client.clone());
        let made = tenant.clone().add_comm(|id| {
            let cpus = std::thread::available_parallelism().map_or(1, |c| c.get());
            let (policy, share) = (WaitPolicy::of(tenant.wait, n, cpus), tenant.share.clone());
            let endpoint = match &client {
                None => {
                    let hbm = tenant.hbm(core).map_err(|e| e.to_string())?;
                    Endpoint::new(r, n, hbm, policy, share)
                }
                Some(c) => Control::create_for(r as u32, n as u32, c.owner)
                    .map(|control| Endpoint::of(control, c.hbm.clone(), policy, share)),
            };
            Ok(CommCore::new(id, endpoint.map_err(|e| e.to_string())?, abort, tenant.account(), client, key))
        });
        match made {
            Ok(core) => Ok(self.add(CommunicatorObject(core))),
            Err(why) => Ok(Err(self.fail(Status::RESOURCE, why))),
        }
    }

    fn id(&mut self, comm: Resource<CommunicatorObject>) -> Trap<u64> {
        Ok(self.comm(&comm)?.id)
    }

    fn drop(&mut self, handle: Resource<CommunicatorObject>) -> Trap<()> {
        self.remove(handle);
        Ok(())
    }
}

impl wit_objects::HostConnector for HostState {
    fn duplicate(&mut self, handle: Resource<ConnectorObject>) -> Trap<Resource<ConnectorObject>> {
        let copy = self.table.get(&handle)?.clone();
        self.add(copy).map_err(|_| wasmtime::format_err!("the instance has used up its handles"))
    }

    fn drop(&mut self, handle: Resource<ConnectorObject>) -> Trap<()> {
        self.remove(handle);
        Ok(())
    }
}

impl links::Host for HostState {
    fn offer(&mut self, comm: Resource<CommunicatorObject>, peer: i32) -> Trap<Answer<Vec<u8>>> {
        let comm = self.comm(&comm)?;
        let peer = match self.peer_of(&comm, peer) {
            Ok(p) => p,
            Err(s) => return Ok(Err(s)),
        };
        Ok(comm.offer(peer).map(|ipc| ipc.to_vec()).map_err(|why| self.fail(Status::RESOURCE, why)))
    }

    fn connect(
        &mut self,
        comm: Resource<CommunicatorObject>,
        peer: i32,
        channel: u32,
        is_send: bool,
        ipc: Vec<u8>,
        deadline_ms: u32,
    ) -> Trap<Answer<Resource<ConnectorObject>>> {
        let comm = self.comm(&comm)?;
        let peer = match self.peer_of(&comm, peer) {
            Ok(p) => p,
            Err(s) => return Ok(Err(s)),
        };
        if !comm.linked(peer) {
            let deadline = self.real_deadline(deadline_ms);
            use hw_bridge::memory::links::LinkError;
            match comm.link(peer, &ipc, self.abort.event(), deadline) {
                Ok(()) => {}
                Err(e) => {
                    // A peer that is gone is the same kind of failure whether a socket or a link tells.
                    let (status, why) = match e {
                        LinkError::Gone(_) if self.overdue() => (sockets::OVERDUE, sockets::HAS_PASSED.into()),
                        LinkError::Gone(_) => (Status::CLOSED, e.to_string()),
                        LinkError::Stopped => (Status::CLOSED, format!("{e}: {}", self.abort.reason())),
                        _ => (Status::FAILURE, e.to_string()),
                    };
                    let why = format!("no link from rank {} to rank {peer}: {why}", comm.rank);
                    return Ok(Err(self.fail(status, why)));
                }
            }
        }
        let connector = Connector { comm: comm.id, peer, channel, is_send };
        Ok(self.add(ConnectorObject(std::sync::Arc::new(connector))))
    }
}

impl proxy::Host for HostState {
    fn start(
        &mut self,
        comm: Resource<CommunicatorObject>,
        stream: u32,
        block: u32,
        ops: Vec<u8>,
        src: Vec<u8>,
        dst: Vec<u8>,
    ) -> Trap<Answer<()>> {
        let comm = self.comm(&comm)?;
        let most = byte_list("neuron:hw/proxy", "start").unwrap_or(0);
        if let Some(list) = [&ops, &src, &dst].into_iter().find(|l| l.len() as u64 > most) {
            let why = format!("a list of network operations has at most {most} bytes, the plugin gave {}", list.len());
            return Ok(Err(self.fail(Status::INVALID, why)));
        }
        let started = lock(&comm.proxy).start(stream, block, &ops, &src, &dst);
        Ok(started.map_err(|e| self.fail(Status::INVALID, e.to_string())))
    }

    fn stop(&mut self, comm: Resource<CommunicatorObject>, stream: u32) -> Trap<Answer<()>> {
        let comm = self.comm(&comm)?;
        let stopped = lock(&comm.proxy).stop(stream);
        Ok(stopped.map_err(|e| self.fail(Status::INVALID, e.to_string())))
    }

    fn register(
        &mut self,
        comm: Resource<CommunicatorObject>,
        id: u64,
    ) -> Trap<Answer<Resource<objects::SemaphoreObject>>> {
        let comm = self.comm(&comm)?;
        let found = lock(&comm.proxy).register(id);
        Ok(match found {
            Some(r) => self.add(objects::SemaphoreObject(r)),
            None => Err(self.fail(Status::INVALID_HANDLE, format!("communicator {} has no register {id}", comm.id))),
        })
    }

    fn dynamic_sizes(
        &mut self,
        comm: Resource<CommunicatorObject>,
        id: u64,
    ) -> Trap<Answer<Resource<objects::HostMemObject>>> {
        let comm = self.comm(&comm)?;
        let found = lock(&comm.dynamic).get(&id).cloned();
        Ok(match found {
            Some(m) => self.add(objects::HostMemObject(m)),
            None => {
                Err(self.fail(Status::INVALID_HANDLE, format!("communicator {} has no dynamic sizes {id}", comm.id)))
            }
        })
    }

    fn progress(&mut self, comm: Resource<CommunicatorObject>, stream: u32, block: u32) -> Trap<Answer<(bool, bool)>> {
        let comm = self.comm(&comm)?;
        let ticked = lock(&comm.proxy).progress(stream, block);
        Ok(ticked.map_err(|e| self.fail(Status::NETWORK_PROXY_FAILURE, e.to_string())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abort::AbortToken;
    use crate::key::GroupKey;
    use crate::limits::Limits;
    use crate::tenant::limited;
    use wit_objects::HostCommunicator as _;

    /// Else a plugin would have its host prove that it is another rank.
    #[test]
    fn a_communicator_is_made_of_the_rank_that_joins_and_of_no_other() {
        let tenant = limited(Limits::default());
        let mut s = HostState::new(tenant, None, AbortToken::new().unwrap(), Some(0));
        (s.key, s.seat) = (Some(GroupKey::some()), Some((1, 3)));
        for (rank, ranks) in [(0, 3), (2, 3), (1, 2)] {
            assert!(s.create(rank, ranks).unwrap().is_err());
            let said = s.take_causes().0.join("; ");
            let wants = format!("the plugin asked for rank {rank} of {ranks} where rank 1 of 3 joins");
            assert!(said.contains(&wants), "{said}");
        }
        assert!(s.create(1, 3).unwrap().is_ok());
        s.seat = None;
        assert!(s.create(1, 3).unwrap().is_err());
        assert!(s.take_causes().0.join("; ").contains("where no rank joins"));
    }
}
