//! What the planes of a runtime share: its tenant, the library's table, the doors, who is there.

use std::sync::{Arc, Mutex};

use crate::config::RuntimeConfig;
use crate::error::Error;
use crate::plane::ask::Service;
use crate::plane::doors::Doors;
use crate::plane::eras::Eras;
use crate::plane::roster::Roster;
use crate::plane::used::Used;
use sandbox::entries::Forward;
use sandbox::id;
use sandbox::key::GroupKey;
use sandbox::limits::ID_BYTES;
use sandbox::policy::Network;
use sandbox::store::EntryCall;
use sandbox::tenant::Tenant;

/// A mistake of whoever calls.
pub(crate) fn bad(what: String) -> Error {
    Error::Usage(what)
}

#[derive(Debug)]
pub(crate) struct Host {
    pub tenant: Arc<Tenant>,
    pub forward: Forward,
    pub config: RuntimeConfig,
    /// What a swap holds shut.
    pub doors: Doors,
    pub roster: Roster,
    pub eras: Mutex<Eras>,
    /// Who was made a member by an id.
    pub used: Used,
    /// What has the plugins, if not this process.
    pub service: Option<Box<dyn Service>>,
}

impl Host {
    pub(crate) fn new(
        tenant: Arc<Tenant>,
        forward: Forward,
        config: RuntimeConfig,
        service: Option<Box<dyn Service>>,
    ) -> Arc<Host> {
        let (doors, roster, eras, used) = Default::default();
        Arc::new(Host { tenant, forward, config, doors, roster, eras, used, service })
    }

    /// Where this process listens, and whom it dials, for what a plugin says: the tenant's policy, or the service's for it.
    pub(crate) fn network(&self) -> Network {
        match (&self.service, &self.tenant.policy) {
            (Some(service), _) => service.network().clone(),
            (None, Some(policy)) => policy.network.clone(),
            (None, None) => Network::any(),
        }
    }

    /// Whether there are collectives, here or in the service.
    ///
    /// # Errors
    /// [`Error::Plugin`].
    pub(crate) fn collectives(&self, entry: &'static str) -> Result<(), Error> {
        if self.service.is_some() && self.forward.sentinel().is_none() {
            return Ok(());
        }
        Ok(self.forward.guarded(entry).map(drop)?)
    }

    /// Starts a root for the group with this key, here or in the service; answers its id without a secret part.
    ///
    /// # Errors
    /// [`Error::Plugin`], the service's.
    pub(crate) fn start_root(&self, nranks: usize, key: GroupKey) -> Result<[u8; ID_BYTES], Error> {
        let n = i32::try_from(nranks).map_err(|_| bad(format!("a group of {nranks} ranks is too large")))?;
        let _inside = self.doors.enter("neuronGetUniqueId", self.tenant.limits.entry)?;
        self.collectives("neuronGetUniqueId")?;
        let id = match &self.service {
            Some(service) => service.start_root(n, key)?,
            None => self.forward.get_unique_id(EntryCall::library().for_group(key), n, "unique id")?,
        };
        Ok(id::answered(id)?)
    }

    /// Crossings between host and components so far; with a service, those of the tenant when it last answered.
    pub(crate) fn component_calls(&self) -> u64 {
        match &self.service {
            Some(service) => service.component_calls(),
            None => self.tenant.counters.component_calls(),
        }
    }
}
