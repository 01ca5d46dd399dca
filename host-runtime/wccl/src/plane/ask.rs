//! The control calls of a communicator, as values, and who answers them: this process ([`crate::plane::here`]), or a service that
//! it is a client of.

use std::fmt::Debug;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::plane::here::Here;
use crate::plane::host::Host;
use crate::plane::info;
use crate::plane::join::{Joined, Joining};
use sandbox::abort::AbortToken;
use sandbox::bindings::exports::neuron::nccom::collectives::CommInfo;
use sandbox::key::GroupKey;
use sandbox::policy::Network;
use sandbox::store::Patience;

/// Who answers the control calls of a communicator.
pub(crate) trait ControlPlane: Debug + Send + Sync {
    /// Makes a call.
    ///
    /// # Errors
    /// The library's, and those of the way there.
    fn ask(&self, ask: Ask, patience: Patience) -> Result<Answer, Error>;

    /// Ends the library's side of the communicator (slot 6); a service has its own patience with that.
    ///
    /// # Errors
    /// As [`ControlPlane::ask`].
    fn free(&self, patience: Patience) -> Result<(), Error>;

    /// The instance, if it is one of this process.
    fn here(&self) -> Option<&Here>;
}

/// What has the plugins of a runtime, if not its process.
pub(crate) trait Service: Debug + Send + Sync {
    /// Starts a root for the group with this key; answers its id without a secret part.
    ///
    /// # Errors
    /// The library's and the service's.
    fn start_root(&self, nranks: i32, key: GroupKey) -> Result<Vec<u8>, Error>;

    /// Has the service join for this process, and takes over the memory it grants.
    ///
    /// # Errors
    /// The library's and the service's.
    fn join(&self, host: &Arc<Host>, joining: &Joining, abort: &AbortToken) -> Result<Joined, Error>;

    /// Where the tenant's processes may listen and whom they may reach for what a plugin says, by its policy.
    fn network(&self) -> &Network;

    /// Crossings between host and components, as it said last.
    fn component_calls(&self) -> u64;
}

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
    /// What stopped the instance; no call of it, and neither are the next two.
    Stopped,
    /// What any rank of the group can link this one by.
    Invite,
    /// Links the rank `peer`, which has made this invitation.
    Link { peer: usize, invitation: Vec<u8> },
}

/// What a control call answers. Each [`Ask`] has its own form.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Answer {
    Done,
    Info(#[serde(with = "info")] Box<CommInfo>),
    Progress { idle: bool, done: bool },
    Bytes(Vec<u8>),
    Device(i32),
    Mask(Vec<u64>),
    Stopped(Option<String>),
}

impl Answer {
    /// An answer of another form than was asked for.
    pub(crate) fn unexpected(self, ask: &'static str) -> Error {
        Error::Bug(format!("a control call for {ask} was answered with {self:?}"))
    }
}
