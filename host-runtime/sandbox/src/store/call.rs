//! What every call of an instance has beside its entry and that one's parameters: who receives it, how long it may take, which
//! group it is for.

use std::time::Instant;

use hw_bridge::os::patience::resumed;

use crate::key::GroupKey;
use crate::store::Instance;

/// How long a call may take, beside the limits of its tenant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Patience {
    /// As long as these say.
    #[default]
    Usual,
    /// No wait in it outlasts the moment, be it for another call of the instance, for a restart, or the guest's own; a guest
    /// that goes on has the library's time. The call may be made again.
    Waits(Instant),
    /// It serves an operation that gives up then, which its caller chooses as he likes: the instance is stopped if it does not come
    /// back, and the plugin has done nothing wrong.
    Operation(Instant),
    /// The host has set it, as long as any plugin needs: the instance is stopped if it does not come back, which is the plugin's
    /// fault.
    Host(Instant),
}

impl Patience {
    /// Of an operation that ends at `until`, or never.
    pub fn operation(until: Option<Instant>) -> Patience {
        until.map_or(Patience::Usual, Patience::Operation)
    }

    /// Of the host, until `until` or for ever.
    pub fn host(until: Option<Instant>) -> Patience {
        until.map_or(Patience::Usual, Patience::Host)
    }

    /// When it ends, if it does before the limits of its tenant.
    pub fn until(self) -> Option<Instant> {
        match self {
            Patience::Usual => None,
            Patience::Waits(until) | Patience::Operation(until) | Patience::Host(until) => Some(until),
        }
    }

    /// When the guest is stopped that has not come back.
    pub(crate) fn stops(self) -> Option<Instant> {
        match self {
            Patience::Usual | Patience::Waits(_) => None,
            Patience::Operation(until) | Patience::Host(until) => Some(until),
        }
    }

    /// When its waits end, of a guest that is not stopped then.
    pub(crate) fn waits(self) -> Option<Instant> {
        match self {
            Patience::Waits(until) => Some(until),
            Patience::Usual | Patience::Operation(_) | Patience::Host(_) => None,
        }
    }

    /// The same later on, for a call that knows nothing of a stop of the process since then.
    #[must_use]
    pub fn resumed(self, since: Instant) -> Patience {
        match self {
            Patience::Usual => Patience::Usual,
            Patience::Waits(until) => Patience::Waits(resumed(until, since)),
            Patience::Operation(until) => Patience::Operation(resumed(until, since)),
            Patience::Host(until) => Patience::Host(resumed(until, since)),
        }
    }
}

/// A call of one of the 37 entries.
#[derive(Debug, Clone, Copy)]
pub struct EntryCall<'a> {
    /// Who receives it; `None` is the library instance.
    pub instance: Option<&'a Instance>,
    /// How long it may take.
    pub patience: Patience,
    /// The key of the group that it is for, of an instance that has none of its own: what it opens and starts in there is that
    /// group's.
    pub group: Option<GroupKey>,
}

impl<'a> EntryCall<'a> {
    /// Of the library instance, as long as its tenant's limits allow.
    pub fn library() -> EntryCall<'a> {
        EntryCall { instance: None, patience: Patience::Usual, group: None }
    }

    /// Of a communicator's instance.
    pub fn of(instance: &'a Instance) -> EntryCall<'a> {
        EntryCall { instance: Some(instance), ..EntryCall::library() }
    }

    /// The same with so much patience.
    #[must_use]
    pub fn within(self, patience: Patience) -> EntryCall<'a> {
        EntryCall { patience, ..self }
    }

    /// The same for the group with this key.
    #[must_use]
    pub fn for_group(self, key: GroupKey) -> EntryCall<'a> {
        EntryCall { group: Some(key), ..self }
    }
}
