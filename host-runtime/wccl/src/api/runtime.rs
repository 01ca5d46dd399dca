//! One tenant runtime: the modelled machine, the one load of the collectives library, the soft net step.

use std::sync::{Arc, OnceLock};

use crate::error::Error;
use hw_bridge::model::DeviceModel;
use sandbox::entries::{Forward, LoadError};
use sandbox::key::GroupKey;
use sandbox::limits::ID_BYTES;
use sandbox::tenant::Tenant;
use sandbox::{id, load};

use crate::api::communicator::{CommOptions, Communicator};
use crate::client::Client;
use crate::config::RuntimeConfig;
use crate::plane::ask::Service;
use crate::plane::eras;
use crate::plane::host::Host;
use crate::swap::control::Control;
use crate::swap::{Counts, Swaps};

/// An open runtime. Cloning gives another handle of the same one.
#[derive(Debug, Clone)]
pub struct Runtime(pub(crate) Arc<Inner>);

/// What ends with its last user.
#[derive(Debug)]
pub(crate) struct Inner {
    host: Arc<Host>,
    pub swaps: Arc<Swaps>,
    control: OnceLock<Control>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if hw_bridge::os::fork::in_child() {
            // The tasks and the link server are the parent's.
            std::mem::forget(self.host.clone());
            return;
        }
        self.swaps.close();
        self.host.tenant.end_tasks();
        self.host.tenant.close_net();
    }
}

impl Runtime {
    /// Builds the device model, then makes the one attempt to load the collectives library, then the soft step for the net
    /// component. A failed load does not fail this: [`Runtime::load_error`] tells, and collectives answer NRT_FAILURE
    /// (INV-06, INV-18). Raises this process's soft limit of file descriptors to the hard one.
    ///
    /// # Errors
    /// [`Error::Config`] for a device that cannot be, [`Error::Limit`] for a process that is out of resources,
    /// [`Error::Service`] for a service that does not answer or does not serve this process.
    pub fn open(mut config: RuntimeConfig) -> Result<Runtime, Error> {
        // Distributions set a low soft limit for the sake of programs that use select(); a rank needs a few for each peer.
        hw_bridge::os::exhausted::raise_descriptors();
        let device = Arc::new(DeviceModel::new(config.device.clone()).map_err(|e| Error::Config(e.to_string()))?);
        if config.examine {
            (config.service, config.control) = (None, false);
        }
        let service = config.service.as_deref().map(Client::open).transpose()?;
        if let Some(s) = &service {
            (config.tenant, config.tenant_id) = s.tenant();
            config.share = s.share();
            config.market = s.market().or(config.market);
        }
        match &config.policy {
            Some(p) => {
                (config.tenant, config.tenant_id) = (p.tenant.clone(), p.tenant_id());
                (config.limits, config.hbm_bytes, config.share) = (p.limits, p.devices.hbm.0, p.share);
            }
            // A bootstrap waits several times; its bound in all must not end what its own time-out still allows.
            None => config.limits.wall = config.limits.wall.max(config.socket_timeout() * 5),
        }
        let tenant = Tenant::new(config.tenant_config(), device)?;
        let forward = Forward::default();
        if let Some(client) = service {
            if let Some(sentinel) = client.sentinel() {
                forward.failed_elsewhere(sentinel);
            }
            // The plugin is the service's.
            let config = RuntimeConfig { plugin: None, net_plugin: None, ..config };
            let service: Box<dyn Service> = Box::new(client);
            return Ok(Runtime::of(Host::new(tenant, forward, config, Some(service))));
        }
        match &config.plugin {
            Some(path) => {
                if let Err(e) = forward.load_once(&tenant, path, &config.without_callbacks) {
                    tracing::warn!("{}", e.sentinel);
                }
            }
            None => forward.none_configured(),
        }
        load::net::open(&tenant, config.net_plugin.as_deref());
        let runtime = Runtime::of(Host::new(tenant, forward, config, None));
        // The first plugin's counts are its own whenever somebody asks for them first.
        eras::note(runtime.host());
        if runtime.config().control
            && let Some(control) = Control::start(&runtime.0.swaps)?
        {
            // It was not set before.
            let _ = runtime.0.control.set(control);
        }
        Ok(runtime)
    }

    fn of(host: Arc<Host>) -> Runtime {
        let swaps = Swaps::new(host.clone());
        Runtime(Arc::new(Inner { host, swaps, control: OnceLock::new() }))
    }

    /// What its planes share.
    pub(crate) fn host(&self) -> &Arc<Host> {
        &self.0.host
    }

    /// Why the collectives library did not load, if it did not.
    pub fn load_error(&self) -> Option<LoadError> {
        let sentinel = self.host().forward.sentinel()?;
        Some(LoadError { status: sandbox::status::Status::FAILURE, sentinel })
    }

    /// The tenant: limits, counters, device model.
    pub fn tenant(&self) -> &Arc<Tenant> {
        &self.host().tenant
    }

    /// The slot table.
    pub fn forward(&self) -> &Forward {
        &self.host().forward
    }

    /// How it was opened.
    pub fn config(&self) -> &RuntimeConfig {
        &self.host().config
    }

    /// Starts a root for a group of `nranks` and answers the id to hand to its ranks. Whoever has it is one of them: 32 of its
    /// bytes are the group's secret, which neither a plugin nor the network sees; hand it on as you would a password.
    ///
    /// # Errors
    /// [`Error::Plugin`].
    pub fn unique_id(&self, nranks: usize) -> Result<[u8; ID_BYTES], Error> {
        let secret = id::draw()?;
        let id = self.host().start_root(nranks, GroupKey::of_id(&secret, self.tenant().id))?;
        Ok(id::with_secret(id, &secret))
    }

    /// Joins a group as one rank: bootstrap, topology, rings, links.
    ///
    /// # Errors
    /// As [`Runtime::unique_id`], and [`Error::Usage`] for a rank or size that cannot be.
    pub fn init_comm(&self, options: CommOptions) -> Result<Communicator, Error> {
        Communicator::init(self, options)
    }

    /// Counters of the hot swaps that this runtime took part in ([`crate::swap`]).
    pub fn swaps(&self) -> Counts {
        self.0.swaps.counts()
    }

    /// Crossings between host and components so far; with a service, those of the tenant when it last answered.
    pub fn component_calls(&self) -> u64 {
        self.host().component_calls()
    }
}
