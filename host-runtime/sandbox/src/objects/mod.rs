//! Host objects that guests hold by handle.
//!
//! A guest's handle is an index into its own instance's table; the engine checks its kind, and a handle of another
//! instance does not exist there. What must survive the guest is behind an `Arc` here.

pub(crate) mod gate;
pub(crate) mod handshake;
pub(crate) mod published;

use std::collections::{HashMap, HashSet};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use hw_bridge::exec::sequencer::Endpoint;
use hw_bridge::group::{Owner, Peer};
use hw_bridge::memory::hbm::Hbm;
use hw_bridge::memory::links::{Edge, Granted, IPC_BYTES, LinkError, LinkGrant, request};
use hw_bridge::model::{HostMem, IncrementRegister};
use hw_bridge::proxy::Proxy;

use crate::abort::AbortToken;
use crate::accounts::{Account, Counted};
use crate::key::GroupKey;
use crate::objects::gate::Gate;
use crate::objects::handshake::Dialled;
use hw_bridge::os::lock::lock;

/// An increment register.
#[derive(Debug, Clone)]
pub struct SemaphoreObject(pub Arc<IncrementRegister>);

/// Host memory with dynamic sizes.
#[derive(Debug, Clone)]
pub struct HostMemObject(pub Arc<Mutex<HostMem>>);

/// The opened net component.
#[derive(Debug, Clone)]
pub struct NetLibraryObject(pub Arc<dyn OpenNet>);

/// A net component that is open. What it is, is for the room that serves it to know.
pub trait OpenNet: std::any::Any + std::fmt::Debug + Send + Sync {}

/// A communicator's host side.
#[derive(Debug, Clone)]
pub struct CommunicatorObject(pub Arc<CommCore>);

/// One direction of one edge.
#[derive(Debug, Clone)]
pub struct ConnectorObject(pub Arc<Connector>);

/// What a connector stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connector {
    /// The communicator's id.
    pub comm: u64,
    /// The other end.
    pub peer: usize,
    /// The channel.
    pub channel: u32,
    /// Direction.
    pub is_send: bool,
}

/// A comm of the net plug-in; made with the work across servers.
#[derive(Debug)]
pub struct NetCommObject(pub u64);
/// A registration; made with the work across servers.
#[derive(Debug)]
pub struct RegistrationObject(pub u64);
/// A request; made with the work across servers.
#[derive(Debug)]
pub struct RequestObject(pub u64);
/// A named piece of memory; made with the work across servers.
#[derive(Debug)]
pub struct RegionObject(pub u64);

/// A listening bootstrap socket.
#[derive(Debug)]
pub struct ListenerObject {
    /// The socket.
    pub socket: std::net::TcpListener,
    /// Who has connected and not shown yet that it is of the group.
    pub(crate) gate: Gate,
    pub(crate) _counted: Counted,
}
/// A connected bootstrap socket.
#[derive(Debug)]
pub struct ConnectionObject {
    /// The socket.
    pub stream: std::net::TcpStream,
    /// What came for a receive that timed out; the next one begins with it.
    pub early: Vec<u8>,
    /// Until the other end has shown that it is of the group.
    pub(crate) dialled: Option<Dialled>,
    pub(crate) _counted: Counted,
}

/// A socket that a plugin left with the host.
#[derive(Debug)]
pub enum ParkedSocket {
    /// A listener.
    Listener(ListenerObject),
    /// A connection, with what came early.
    Connection(ConnectionObject),
}

/// The process that a service makes a communicator for.
#[derive(Debug, Clone)]
pub struct ClientProcess {
    /// What it says of itself.
    pub owner: Owner,
    /// The kernel's word that it is alive.
    pub pidfd: Arc<OwnedFd>,
    /// Device memory of the core it has leased.
    pub hbm: Arc<Hbm>,
}

/// Links of a client's communicator.
#[derive(Debug, Default)]
struct Passed {
    /// Ranks that were linked.
    ranks: HashSet<usize>,
    /// Those that the client does not have yet.
    waiting: Vec<Granted>,
}

/// What all ranks of a group were told, and the records of the grants that it stands for.
#[derive(Debug)]
struct Invited {
    invitation: [u8; IPC_BYTES],
    records: Vec<[u8; IPC_BYTES]>,
}

/// What of a communicator lives on the host: everything that must survive its plugin.
#[derive(Debug)]
pub struct CommCore {
    /// The number a library keys its plan by.
    pub id: u64,
    /// This rank.
    pub rank: usize,
    /// Ranks.
    pub nranks: usize,
    /// Of its group.
    pub key: GroupKey,
    /// The data plane.
    pub endpoint: Arc<Endpoint>,
    /// The network proxy.
    pub proxy: Mutex<Proxy>,
    /// Host memory with dynamic sizes, by the id that operation lists use.
    pub dynamic: Mutex<HashMap<u64, Arc<Mutex<HostMem>>>>,
    /// The switch that ends it.
    pub abort: AbortToken,
    /// Bootstrap sockets between two instances, by slot; closed with the communicator.
    pub parked: Mutex<HashMap<u32, ParkedSocket>>,
    account: Account,
    grants: Mutex<HashMap<usize, [u8; IPC_BYTES]>>,
    invited: Mutex<Option<Invited>>,
    client: Option<ClientProcess>,
    passed: Mutex<Passed>,
}

impl CommCore {
    /// `client` is whose it is, if another process's.
    pub fn new(
        id: u64,
        endpoint: Endpoint,
        abort: AbortToken,
        account: Account,
        client: Option<ClientProcess>,
        key: GroupKey,
    ) -> Arc<CommCore> {
        abort.attach(endpoint.abort_handle());
        endpoint.control().set_comm(id);
        Arc::new(CommCore {
            id,
            rank: endpoint.rank(),
            nranks: endpoint.nranks(),
            key,
            endpoint: Arc::new(endpoint),
            proxy: Mutex::default(),
            dynamic: Mutex::default(),
            abort,
            parked: Mutex::default(),
            account,
            grants: Mutex::default(),
            invited: Mutex::default(),
            client,
            passed: Mutex::default(),
        })
    }

    /// Whether a peer is linked.
    pub(crate) fn linked(&self, peer: usize) -> bool {
        self.endpoint.linked(peer) || lock(&self.passed).ranks.contains(&peer)
    }

    /// The process whose it is, if another one.
    pub fn client(&self) -> Option<&ClientProcess> {
        self.client.as_ref()
    }

    /// Whether its data plane is in another process, which is given the links.
    pub fn is_clients(&self) -> bool {
        self.client.is_some()
    }

    /// Keeps a link for the client.
    fn pass(&self, link: Granted) {
        let mut passed = lock(&self.passed);
        if passed.ranks.insert(link.rank as usize) {
            passed.waiting.push(link);
        }
    }

    /// Links that the client does not have yet.
    pub fn take_links(&self) -> Vec<Granted> {
        std::mem::take(&mut lock(&self.passed).waiting)
    }

    /// A link of its group, by which the rank `asker` maps the memory of the rank `owner`.
    fn edge(&self, owner: usize, asker: usize) -> Edge {
        // There are far fewer ranks than 2^32.
        Edge { tenant: self.account.tenant, key: self.key.links(), owner: owner as u32, asker: asker as u32 }
    }

    /// The tenant it belongs to.
    pub fn tenant_id(&self) -> u64 {
        self.account.tenant
    }

    /// The 64 bytes with which `peer`, and nobody else, maps this rank's memory; the same ones each time.
    pub(crate) fn offer(&self, peer: usize) -> Result<[u8; IPC_BYTES], String> {
        let mut grants = lock(&self.grants);
        if let Some(ipc) = grants.get(&peer) {
            return Ok(*ipc);
        }
        let ipc = self.account.links.grant(self.grant(peer)).map_err(|e| e.to_string())?;
        grants.insert(peer, ipc);
        Ok(ipc)
    }

    /// What `peer` is granted.
    fn grant(&self, peer: usize) -> LinkGrant {
        let (control, hbm) = (self.endpoint.control().segment().clone(), self.endpoint.hbm().segment().clone());
        let client = self.client.as_ref().map(|c| c.pidfd.clone());
        LinkGrant { edge: self.edge(self.rank, peer), control, hbm, client }
    }

    /// The 64 bytes with which any other rank of the group, and nobody else, maps this rank's memory when it wants to
    /// ([`CommCore::link_invited`]); the same ones each time.
    ///
    /// # Errors
    /// [`LinkError::TooMany`], [`LinkError::System`].
    pub fn invite(&self) -> Result<[u8; IPC_BYTES], LinkError> {
        let mut invited = lock(&self.invited);
        if let Some(made) = &*invited {
            return Ok(made.invitation);
        }
        let invitation = self.account.links.invite()?;
        let made = invited.insert(Invited { invitation, records: Vec::with_capacity(self.nranks) });
        for peer in (0..self.nranks).filter(|p| *p != self.rank) {
            made.records.push(self.account.links.grant_invited(&invitation, self.grant(peer))?);
        }
        Ok(invitation)
    }

    /// Maps the memory of rank `peer`, which has made this invitation, unless it is linked; or has it passed on to the
    /// client. Ends at `until`, or with the communicator.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn link_invited(&self, peer: usize, invitation: &[u8], until: Instant) -> Result<(), LinkError> {
        if peer >= self.nranks {
            return Err(LinkError::Malformed("it is of a rank that does not exist"));
        }
        if self.linked(peer) {
            return Ok(());
        }
        let record = self.edge(peer, self.rank).invited(invitation)?;
        self.link(peer, &record, self.abort.event(), until)
    }

    /// Maps the memory of rank `peer` by its record. Ends at `until`, or when `stop` becomes readable.
    pub(crate) fn link(
        &self,
        peer: usize,
        record: &[u8],
        stop: BorrowedFd<'_>,
        until: Instant,
    ) -> Result<(), LinkError> {
        let granted = request(record, &self.edge(peer, self.rank), Some(stop), until)?;
        if self.is_clients() {
            self.pass(granted);
        } else {
            self.endpoint.link(Peer::new(granted.map()?, peer, self.nranks)?);
        }
        Ok(())
    }
}

impl Drop for CommCore {
    fn drop(&mut self) {
        self.account.counters.moved(self.endpoint.control().counters());
        let invited = lock(&self.invited).take().map_or_else(Vec::new, |i| i.records);
        for ipc in lock(&self.grants).values().chain(&invited) {
            self.account.links.revoke(ipc);
        }
    }
}
