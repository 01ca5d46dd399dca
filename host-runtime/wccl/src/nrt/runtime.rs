//! One tenant runtime: the modelled machine, the one load of the collectives library, the soft net step.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use enc::Algorithm;
use enc::table::{Policy, Table};
use hmac::Mac;
use hw_bridge::exec::share::{Market, Terms};
use hw_bridge::model::{DeviceConfig, DeviceModel};
use hw_bridge::os::bell::WaitMode;
use hw_bridge::os::lock::lock;
use sandbox::entries::{Forward, LoadError};
use sandbox::error::Error;
use sandbox::key::GroupKey;
use sandbox::limits::{ID_BYTES, Limits};
use sandbox::policy::{Network, Policy as TenantPolicy, Share};
use sandbox::served::GRANTED;
use sandbox::store::for_group;
use sandbox::tenant::{Tenant, TenantConfig};
use sandbox::{id, load, vars};

use crate::control::Control;
use crate::metrics::{self, Eras};
use crate::nrt::communicator::{CommOptions, Communicator};
use crate::serve::client::Service;
use crate::swap::doors::Doors;
use crate::swap::{Counts, Fault, Step, Swaps};

/// How to open a runtime.
#[derive(Debug, Clone)]
pub struct RuntimeConfig {
    /// The collectives plugin; `None` opens a runtime without collectives (INV-18). With a service it is the service's.
    pub plugin: Option<PathBuf>,
    /// The net plugin; `None` means no network between servers (INV-17).
    pub net_plugin: Option<PathBuf>,
    /// The modelled server.
    pub device: DeviceConfig,
    /// Variables granted to plugins, by name.
    pub vars: BTreeMap<String, String>,
    /// Tenant name, for messages.
    pub tenant: String,
    /// Tenant number; memory is never linked between different ones.
    pub tenant_id: u64,
    /// What an operator lets this tenant do. Its name, limits and device memory go before those here, and plugins are looked
    /// up by name in its directory. Without one, plugins may do what this process may.
    pub policy: Option<Arc<TenantPolicy>>,
    /// What plugins may use.
    pub limits: Limits,
    /// What the tenant gets of what it and other tenants compete for.
    pub share: Share,
    /// Where it meets the others; without, the tenants of this process meet one another.
    pub market: Option<Arc<Market>>,
    /// Socket of the service that owns the devices and the plugins; `None` has them in this process.
    pub service: Option<PathBuf>,
    /// Logical cores that the ranks of a server run on, in their order; empty for those of the device model.
    pub cores: Vec<i32>,
    /// Device memory of a core, bytes of address space.
    pub hbm_bytes: u64,
    /// What a rank does with its core while it waits.
    pub wait: WaitMode,
    /// Directory in which a failing communicator leaves its flight records; `None` writes none.
    pub flight_dir: Option<PathBuf>,
    /// Deadline of an operation: how long a rank waits for its peers.
    pub timeout: Duration,
    /// Ranks of one virtual server; 0 for whole servers. Must divide the world size.
    pub virtual_server_size: u32,
    /// Algorithm to use wherever it serves.
    pub algorithm: Option<Algorithm>,
    /// Largest contribution of a rank, in bytes, that goes in one hop, if the user says so: it goes before the table.
    /// Without, the table or the built-in rule.
    pub one_hop_max: Option<u64>,
    /// Measured choice of algorithms by size; the same on all ranks.
    pub table: Option<Arc<Table>>,
    /// Whether peers may read this rank's private memory during an operation, where the kernel lets them. One rank without
    /// keeps all from it.
    pub direct: bool,
    /// Whether operators can ask of this runtime, and swap its plugin, on a control socket ([`crate::control`]).
    pub control: bool,
    /// Whether the plugins are only looked at, as by `wccl plugin check`: loaded in this process, with none of what the
    /// policy grants them, and without a control socket. What is open then makes no group of more than one.
    pub examine: bool,
    /// Callbacks this host does not serve; for conformance tests of INV-08.
    pub without_callbacks: Vec<String>,
    /// What happens at which step of a swap; for tests of [`crate::swap`].
    pub swap_faults: Vec<(Step, Fault)>,
}

impl Default for RuntimeConfig {
    fn default() -> Self {
        RuntimeConfig {
            plugin: default_plugin(),
            net_plugin: None,
            device: DeviceConfig::default(),
            vars: BTreeMap::new(),
            tenant: "default".into(),
            tenant_id: 0,
            policy: None,
            limits: Limits::default(),
            share: Share::default(),
            market: None,
            service: None,
            cores: Vec::new(),
            hbm_bytes: 12 << 30,
            wait: WaitMode::default(),
            flight_dir: None,
            timeout: Duration::from_secs(120),
            virtual_server_size: 0,
            algorithm: None,
            one_hop_max: None,
            table: None,
            direct: true,
            control: true,
            examine: false,
            without_callbacks: Vec::new(),
            swap_faults: Vec::new(),
        }
    }
}

/// The plugin that `cargo xtask guests` builds, beside this program's target directory.
fn default_plugin() -> Option<PathBuf> {
    let exe = std::env::current_exe().ok()?;
    let mut dir = exe.parent();
    for _ in 0..4 {
        let here = dir?.join("plugins").join("nccom.wasm");
        if here.is_file() {
            return Some(here);
        }
        dir = dir?.parent();
    }
    None
}

impl RuntimeConfig {
    /// The configuration that the process environment describes: `WCCL_POLICY`, `WCCL_PLUGIN`, `WCCL_NET_PLUGIN`, `WCCL_SERVICE`,
    /// `WCCL_TIMEOUT_MS`, `WCCL_ALGO`, `WCCL_ONE_HOP_MAX`, `WCCL_TUNE_FILE`, `WCCL_DIRECT`, `WCCL_CONTROL`, the device variables, and the
    /// variables granted to plugins (docs/environment.md).
    ///
    /// # Errors
    /// [`Error::Config`] names the variable and what was expected: one that is set and cannot be read does not count as unset.
    pub fn from_env() -> Result<RuntimeConfig, Error> {
        Self::from_vars(|name| std::env::var_os(name))
    }

    /// The same from any look-up.
    ///
    /// # Errors
    /// As [`RuntimeConfig::from_env`].
    pub fn from_vars(look_up: impl Fn(&str) -> Option<OsString>) -> Result<RuntimeConfig, Error> {
        let var = |name: &str| vars::text(name, look_up(name));
        let path = |name: &str| vars::path(look_up(name));
        let number = |name: &str| {
            var(name)?.map_or(Ok(None), |v| {
                let parsed = v.trim().parse::<u64>();
                parsed.map(Some).map_err(|_| Error::Config(format!("{name}={v}: a whole number was expected")))
            })
        };
        let mut c = RuntimeConfig {
            device: DeviceConfig::from_vars(&look_up).map_err(|e| Error::Config(e.to_string()))?,
            ..RuntimeConfig::default()
        };
        if let Some(path) = path("WCCL_POLICY") {
            let policy = TenantPolicy::read(&path).map_err(|e| Error::Config(format!("WCCL_POLICY: {e}")))?;
            c.plugin = policy.plugins.allowed.first().map(|a| policy.plugins.directory.join(&a.file.0));
            c.policy = Some(Arc::new(policy));
        }
        if let Some(p) = path("WCCL_PLUGIN") {
            c.plugin = Some(p);
        }
        c.net_plugin = path("WCCL_NET_PLUGIN");
        c.service = path("WCCL_SERVICE");
        if let Some(ms) = number("WCCL_TIMEOUT_MS")? {
            if ms == 0 {
                return Err(Error::Config("WCCL_TIMEOUT_MS=0: a number of milliseconds above 0 was expected".into()));
            }
            c.timeout = Duration::from_millis(ms);
        }
        if let Some(mode) = var("WCCL_WAIT")? {
            c.wait = mode.parse().map_err(|e| Error::Config(format!("WCCL_WAIT: {e}")))?;
        }
        c.flight_dir = path("WCCL_FLIGHT_DIR");
        if let Some(name) = var("WCCL_ALGO")? {
            c.algorithm = Some(name.parse().map_err(|e| Error::Config(format!("WCCL_ALGO: {e}")))?);
        }
        if let Some(bytes) = number("WCCL_ONE_HOP_MAX")? {
            c.one_hop_max = Some(bytes);
        }
        if let Some(path) = path("WCCL_TUNE_FILE") {
            let table = Table::read(&path).map_err(|e| Error::Config(format!("WCCL_TUNE_FILE: {e}")))?;
            c.table = Some(Arc::new(table));
        }
        if let Some(on) = number("WCCL_DIRECT")? {
            c.direct = on != 0;
        }
        if let Some(on) = number("WCCL_CONTROL")? {
            c.control = on != 0;
        }
        if let Some(bytes) = number("WCCL_HBM_BYTES")? {
            c.hbm_bytes = bytes;
        }
        if let Some(ranks) = number("NEURON_RT_DBG_VIRTUAL_SERVER_SIZE")? {
            c.virtual_server_size = u32::try_from(ranks).map_err(|_| {
                Error::Config(format!("NEURON_RT_DBG_VIRTUAL_SERVER_SIZE={ranks} is more ranks than a world can have"))
            })?;
        }
        for name in GRANTED {
            if let Some(v) = var(name)? {
                c.vars.insert((*name).into(), v);
            }
        }
        Ok(c)
    }

    /// What its tenant is made of.
    fn tenant_config(&self) -> TenantConfig {
        let share = self.share;
        TenantConfig {
            name: self.tenant.clone(),
            id: self.tenant_id,
            policy: self.policy.clone(),
            examine: self.examine,
            limits: self.limits,
            share: Terms {
                weight: share.weight,
                bandwidth: share.bandwidth.map(|rate| rate.0),
                slots: share.proxy_slots,
            },
            market: self.market.clone(),
            wait: self.wait,
            vars: self.vars.clone(),
            hbm_bytes: self.hbm_bytes,
        }
    }

    /// What the choice of algorithms goes by, as far as a rank knows it by itself: [`Communicator::policy`] is all of it.
    pub fn policy(&self) -> Policy<'_> {
        let table = self.table.as_deref();
        Policy { forced: self.algorithm, one_hop_max: self.one_hop_max, table, direct: false }
    }
}

/// An open runtime. Cloning gives another handle of the same one.
#[derive(Debug, Clone)]
pub struct Runtime(pub(crate) Arc<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    pub tenant: Arc<Tenant>,
    pub forward: Forward,
    pub config: RuntimeConfig,
    /// What a swap holds shut.
    pub doors: Doors,
    pub swaps: Arc<Swaps>,
    pub eras: Mutex<Eras>,
    control: OnceLock<Control>,
    /// Who was made a member by an id.
    pub used: Used,
    /// What has the plugins, if not this process.
    pub service: Option<Service>,
}

/// Memberships that are remembered; who has an older id has tried it since, or never will.
const MOST_USED: usize = 4096;

/// Who was made a member by an id, the newest last: an id serves once, and who tries again is told so before it waits.
#[derive(Debug, Default)]
pub(crate) struct Used(Mutex<VecDeque<[u8; 16]>>);

impl Used {
    fn tag(key: &GroupKey, rank: usize) -> [u8; 16] {
        let mut tag = key.tag("used");
        tag.update(&(rank as u64).to_le_bytes());
        tag.finalize().into_bytes().first_chunk().copied().unwrap_or_default()
    }

    /// Whether this rank of the group with this key was made here.
    pub(crate) fn has(&self, key: &GroupKey, rank: usize) -> bool {
        lock(&self.0).contains(&Used::tag(key, rank))
    }

    /// It was.
    pub(crate) fn note(&self, key: &GroupKey, rank: usize) {
        let mut all = lock(&self.0);
        if all.len() >= MOST_USED {
            all.pop_front();
        }
        all.push_back(Used::tag(key, rank));
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if hw_bridge::os::fork::in_child() {
            // The tasks and the link server are the parent's.
            std::mem::forget(self.tenant.clone());
            return;
        }
        self.swaps.close();
        self.tenant.end_tasks();
        self.tenant.close_net();
    }
}

/// `NEURON_CCOM_SOCK_TIMEOUT` as the library reads it, or its default; the library refuses what is no number.
fn socket_timeout(config: &RuntimeConfig) -> Duration {
    let ms = config.vars.get("NEURON_CCOM_SOCK_TIMEOUT").and_then(|v| v.trim().parse::<u32>().ok());
    Duration::from_millis(u64::from(ms.unwrap_or(120_000)))
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
        let service = config.service.as_deref().map(Service::open).transpose()?;
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
            None => config.limits.wall = config.limits.wall.max(socket_timeout(&config) * 5),
        }
        let tenant = Tenant::new(config.tenant_config(), device)?;
        let forward = Forward::default();
        if let Some(service) = service {
            if let Some(sentinel) = service.sentinel() {
                forward.failed_elsewhere(sentinel);
            }
            // The plugin is the service's.
            let config = RuntimeConfig { plugin: None, net_plugin: None, ..config };
            let (doors, swaps, eras, control, used) = Default::default();
            let service = Some(service);
            return Ok(Runtime(Arc::new(Inner {
                tenant,
                forward,
                config,
                service,
                doors,
                swaps,
                eras,
                control,
                used,
            })));
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
        let (doors, swaps, eras, control, used) = Default::default();
        let runtime =
            Runtime(Arc::new(Inner { tenant, forward, config, service: None, doors, swaps, eras, control, used }));
        // The first plugin's counts are its own whenever somebody asks for them first.
        metrics::note(&runtime);
        if runtime.0.config.control
            && let Some(control) = Control::start(&runtime)?
        {
            // It was not set before.
            let _ = runtime.0.control.set(control);
        }
        Ok(runtime)
    }

    /// Bound of each wait on a socket of the bootstrap.
    pub(super) fn socket_timeout(&self) -> Duration {
        socket_timeout(&self.0.config)
    }

    /// Where this process listens, and whom it dials, for what a plugin says: the tenant's policy, or the service's for it.
    pub(super) fn network(&self) -> Network {
        match (&self.0.service, &self.0.tenant.policy) {
            (Some(service), _) => service.network().clone(),
            (None, Some(policy)) => policy.network.clone(),
            (None, None) => Network::any(),
        }
    }

    /// Whether there are collectives, here or in the service.
    pub(super) fn collectives(&self, entry: &'static str) -> Result<(), Error> {
        if self.0.service.is_some() && self.0.forward.sentinel().is_none() {
            return Ok(());
        }
        self.0.forward.guarded(entry).map(|_| ())
    }

    /// Why the collectives library did not load, if it did not.
    pub fn load_error(&self) -> Option<LoadError> {
        let sentinel = self.0.forward.sentinel()?;
        Some(LoadError { status: sandbox::status::Status::FAILURE, sentinel })
    }

    /// The tenant: limits, counters, device model.
    pub fn tenant(&self) -> &Arc<Tenant> {
        &self.0.tenant
    }

    /// The slot table.
    pub fn forward(&self) -> &Forward {
        &self.0.forward
    }

    /// How it was opened.
    pub fn config(&self) -> &RuntimeConfig {
        &self.0.config
    }

    /// Starts a root for a group of `nranks` and answers the id to hand to its ranks. Whoever has it is one of them: 32 of its
    /// bytes are the group's secret, which neither a plugin nor the network sees; hand it on as you would a password.
    ///
    /// # Errors
    /// [`Error::NotLoaded`], [`Error::Entry`], [`Error::Stopped`].
    pub fn unique_id(&self, nranks: usize) -> Result<[u8; ID_BYTES], Error> {
        let secret = id::draw()?;
        let id = self.start_root(nranks, GroupKey::of_id(&secret, self.0.tenant.id))?;
        Ok(id::with_secret(id, &secret))
    }

    /// Starts a root for the group with this key, here or in the service; answers its id without a secret part.
    pub(crate) fn start_root(&self, nranks: usize, key: GroupKey) -> Result<[u8; ID_BYTES], Error> {
        let n = i32::try_from(nranks).map_err(|_| Error::Usage(format!("a group of {nranks} ranks is too large")))?;
        let _inside = self.0.doors.enter("neuronGetUniqueId", self.0.tenant.limits.entry)?;
        self.collectives("neuronGetUniqueId")?;
        let id = match &self.0.service {
            Some(service) => service.start_root(n, key)?,
            None => for_group(key, || self.0.forward.get_unique_id(None, n, "unique id"))?,
        };
        id::answered(id)
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
        match &self.0.service {
            Some(service) => service.component_calls(),
            None => self.0.tenant.counters.component_calls(),
        }
    }
}
