//! How a runtime is opened.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use enc::Algorithm;
use enc::table::{Criteria, Table};
use hw_bridge::exec::share::{Market, Terms};
use hw_bridge::model::DeviceConfig;
use hw_bridge::os::bell::WaitMode;
use sandbox::limits::Limits;
use sandbox::policy::{Policy, SharePolicy};
use sandbox::served::GRANTED;
use sandbox::tenant::TenantConfig;
use sandbox::vars;

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
    pub policy: Option<Arc<Policy>>,
    /// What plugins may use.
    pub limits: Limits,
    /// What the tenant gets of what it and other tenants compete for.
    pub share: SharePolicy,
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
    /// Whether operators can ask of this runtime, and swap its plugin, on a control socket ([`crate::swap`]).
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
            share: SharePolicy::default(),
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
            let policy = Policy::read(&path).map_err(|e| Error::Config(format!("WCCL_POLICY: {e}")))?;
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

    /// Bound of each wait on a socket of the bootstrap: `NEURON_CCOM_SOCK_TIMEOUT` as the library reads it, or its default; the
    /// library refuses what is no number.
    pub(crate) fn socket_timeout(&self) -> Duration {
        let ms = self.vars.get("NEURON_CCOM_SOCK_TIMEOUT").and_then(|v| v.trim().parse::<u32>().ok());
        Duration::from_millis(u64::from(ms.unwrap_or(120_000)))
    }

    /// What its tenant is made of.
    pub(crate) fn tenant_config(&self) -> TenantConfig {
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

    /// What the choice of algorithms goes by, as far as a rank knows it by itself: [`crate::Communicator::criteria`] is all of it.
    pub fn criteria(&self) -> Criteria<'_> {
        let table = self.table.as_deref();
        Criteria { forced: self.algorithm, one_hop_max: self.one_hop_max, table, direct: false }
    }
}

/// Where a swap is, for faults that tests put in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Before LOAD.
    Load,
    /// Before PREPARE.
    Prepare,
    /// Before FREEZE.
    Freeze,
    /// Before EXPORT.
    Export,
    /// Before IMPORT of the first communicator.
    Import,
    /// Before the vote.
    Vote,
    /// Before the gates close.
    Quiesce,
    /// When they are closed.
    Closed,
    /// At the boundary, before this is said.
    Ready,
    /// After it was said, before the decision is looked at.
    Decide,
    /// When the decision was to commit, before anything is exchanged.
    Commit,
    /// In the middle of the exchange.
    Exchange,
}

/// What happens there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The step fails; once it is decided, steps do not fail any more.
    Fail,
    /// It takes so much longer.
    Delay(Duration),
    /// The process stops itself, SIGSTOP.
    Stop,
    /// The process ends itself, SIGKILL.
    Kill,
}
