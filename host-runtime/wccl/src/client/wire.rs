//! What a service and its clients say to one another.
//!
//! ```text
//! client                              service
//! Hello (protocol, release)      ->
//!                                <-   Greeting: Welcome, or Refused
//! Request                        ->
//!                                <-   Said: Links, as often as there are new ones, each with their descriptors
//!                                <-   Said: the answer, or Failed
//! Request::Abort                 ->   while the service works on another; has no answer
//! ```
//!
//! One request at a time on a connection. A runtime has a connection of its own, and each communicator has one: closing it
//! frees the communicator. [`Hello`] and [`Greeting::Refused`] stay as they are in every version, so that two of different
//! versions can say so.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::plane::ask::{Answer, Ask};
use crate::plane::join::Place;
use sandbox::key::GroupKey;
use sandbox::policy::Network;
use sandbox::store::Patience;

/// Version of everything below [`Hello`].
pub(crate) const PROTOCOL: u32 = 3;
/// Links that go in one message, each with three descriptors.
pub(crate) const LINKS_AT_ONCE: usize = 16;

/// A client's first message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub protocol: u32,
    pub release: String,
}

impl Hello {
    pub(crate) fn mine() -> Hello {
        Hello { protocol: PROTOCOL, release: env!("CARGO_PKG_VERSION").into() }
    }
}

/// The service's first message.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Greeting {
    Refused { why: String },
    Welcome(Welcome),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Welcome {
    pub tenant: String,
    pub tenant_id: u64,
    /// Names the runtime in its communicators' connections.
    pub session: u128,
    /// Why the tenant's library did not load.
    pub sentinel: Option<String>,
    /// Milliseconds after which the service has answered any request.
    pub longest_ms: u64,
    /// Where the client may listen and whom it may dial for what a plugin says.
    pub network: Network,
    /// What the tenant gets among others: weight, bytes a second, operations in progress.
    pub share: (u32, Option<u64>, u32),
    /// The tenant's line in the market whose descriptor comes with this, where the programs of all tenants take turns.
    pub line: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// An address for a group whose key the client has: the secret part of the id stays with it.
    UniqueId {
        nranks: i32,
        key: GroupKey,
    },
    Join(Join),
    Ask {
        ask: Ask,
        bound: Bound,
    },
    Abort {
        reason: String,
    },
    /// The library's free call; the client closes afterwards.
    Free,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Join {
    /// [`Welcome::session`] of the runtime's connection.
    pub session: u128,
    pub at: Meeting,
    /// The group's, which the client derived; [`Meeting::Id`] has no secret part.
    pub key: GroupKey,
    pub rank: usize,
    pub nranks: usize,
    pub on: Option<Place>,
    /// Of the client's process: whether it pays for fences, and its mark.
    pub asymmetric: bool,
    pub mark: [u64; 2],
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Meeting {
    Id(Vec<u8>),
    Root(String),
}

/// A [`Patience`] that travels: moments are milliseconds from now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Bound {
    Usual,
    Waits(u32),
    Operation(u32),
}

impl Bound {
    pub(crate) fn of(patience: Patience) -> Bound {
        let ms =
            |until: Instant| until.saturating_duration_since(Instant::now()).as_millis().try_into().unwrap_or(u32::MAX);
        match patience {
            Patience::Usual => Bound::Usual,
            Patience::Waits(until) => Bound::Waits(ms(until)),
            // To the service a client is a caller, whoever set it there.
            Patience::Operation(until) | Patience::Host(until) => Bound::Operation(ms(until)),
        }
    }

    pub(crate) fn patience(self) -> Patience {
        let until = |ms: u32| Instant::now() + Duration::from_millis(ms.into());
        match self {
            Bound::Usual => Patience::Usual,
            Bound::Waits(ms) => Patience::Waits(until(ms)),
            Bound::Operation(ms) => Patience::Operation(until(ms)),
        }
    }
}

/// A message of the service, with the tenant's component calls so far.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Said {
    pub calls: u64,
    pub reply: Reply,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// With control segment, device memory and process of each.
    Links(Vec<Link>),
    UniqueId(Vec<u8>),
    /// With the rank's control segment and its core's device memory.
    Joined {
        comm: u64,
        place: Place,
        /// Bytes of the two.
        control: u64,
        hbm: u64,
        /// [`Answer::Info`].
        info: Answer,
    },
    Answer(Answer),
    Failed {
        status: u32,
        what: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Link {
    pub rank: u32,
    /// Bytes of the two segments.
    pub control: u64,
    pub hbm: u64,
}
