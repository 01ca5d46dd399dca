//! One tenant: what its plugins may use, what they have used, and the host facts they are shown.
//!
//! Everything a host function needs is here or in the store's own state; nothing is global but the engine.

pub mod supervisor;
pub mod throttle;

use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Instant;

use hw_bridge::exec::share::{Market, Share, Terms};
use hw_bridge::group::flight;
use hw_bridge::memory::hbm::{Hbm, HbmBuf, HbmError};
use hw_bridge::memory::links::LinkServer;
use hw_bridge::memory::segment::Segment;
use hw_bridge::model::{DeviceModel, IdMapSet};
use hw_bridge::os::bell::WaitMode;
use hw_bridge::os::lock::lock;
use hw_bridge::os::log_rate::LogRate;
use rustix::thread::CpuSet;

use crate::abort::WeakAbort;
use crate::accounts::{Account, Quota, TenantCounters};
use crate::error::Error;
use crate::limits::Limits;
use crate::objects::{CommCore, OpenNet};
use crate::policy::{Bytes, Policy, listed};
use crate::tenant::supervisor::Supervisor;
use crate::tenant::throttle::Allowance;

/// What the plugins of a tenant have, in all its instances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holds {
    /// Instances.
    pub instances: usize,
    /// Bytes of their linear memories and tables.
    pub memory: usize,
    /// Bootstrap sockets, those that wait for a successor included.
    pub sockets: usize,
    /// Names published on this machine.
    pub names: usize,
}

/// What a tenant is made of.
#[derive(Debug, Clone)]
pub struct TenantConfig {
    /// Its name, for messages.
    pub name: String,
    /// Its number; memory is never linked between different ones.
    pub id: u64,
    /// What an operator lets it do; without, its plugins may do what this process may.
    pub policy: Option<Arc<Policy>>,
    /// Whether its plugins are only looked at.
    pub examine: bool,
    /// What its plugins may use.
    pub limits: Limits,
    /// What it gets of what it and other tenants compete for.
    pub share: Terms,
    /// Where it meets the others; without, the tenants of this process meet one another.
    pub market: Option<Arc<Market>>,
    /// What its waiting ranks do with their cores.
    pub wait: WaitMode,
    /// Variables granted to its plugins.
    pub vars: BTreeMap<String, String>,
    /// Device memory of a core, bytes of address space.
    pub hbm_bytes: u64,
}

impl Default for TenantConfig {
    fn default() -> Self {
        TenantConfig {
            name: "default".into(),
            id: 0,
            policy: None,
            examine: false,
            limits: Limits::default(),
            share: Terms::default(),
            market: None,
            wait: WaitMode::default(),
            vars: BTreeMap::new(),
            hbm_bytes: 12 << 30,
        }
    }
}

/// A tenant runtime: "process" in the original's rules means one of these.
#[derive(Debug)]
pub struct Tenant {
    /// Its name, for messages.
    pub name: String,
    /// Its number; links between different ones are refused.
    pub id: u64,
    /// What an operator lets it do; without, it may do whatever this process may.
    pub policy: Option<Arc<Policy>>,
    /// Whether its plugins are only looked at.
    pub(crate) examined: bool,
    /// What its plugins may use.
    pub limits: Limits,
    /// What its waiting ranks do with their cores.
    pub wait: WaitMode,
    /// The modelled machine.
    pub device: Arc<DeviceModel>,
    /// Variables granted to plugins.
    pub(crate) vars: BTreeMap<String, String>,
    /// Tells the tenant runtimes of one process apart.
    pub(crate) number: u64,
    /// Counters.
    pub counters: Arc<TenantCounters>,
    /// How often its plugins stopped, and which may run again.
    pub supervisor: Supervisor,
    /// Guest time; unlimited without a policy.
    pub(crate) cpu: Option<Allowance>,
    /// Its share of what it and other tenants compete for.
    pub share: Arc<Share>,
    pub(crate) links: Arc<LinkServer>,
    net: Mutex<NetState>,
    pub(crate) tasks: Mutex<Tasks>,
    /// Instances of its plugins, and bytes of their linear memory and tables, bounded in [`Tenant::take_memory`].
    pub(crate) instances: Quota,
    pub(crate) memory: AtomicUsize,
    /// Lines of the host's about its plugins, and of the plugins' own.
    log_rate: LogRate,
    guest_rate: LogRate,
    /// Host names being looked up.
    pub(crate) resolving: Quota,
    /// Bootstrap sockets, those that wait for a successor included.
    pub(crate) sockets: Quota,
    /// Connections that have not shown yet that they are of a group, but for one of each listener.
    pub(crate) gates: Quota,
    /// Names published on this machine; each has a socket and a thread.
    pub(crate) names: Quota,
    pub(crate) maps: Mutex<IdMapSet>,
    hbm: Mutex<HashMap<i32, Weak<Hbm>>>,
    hbm_bytes: u64,
    comms: Mutex<HashMap<u64, Weak<CommCore>>>,
    next_comm: AtomicU64,
}

/// The soft step's outcome (INV-17).
#[derive(Debug, Default)]
pub enum NetState {
    /// The step has not run.
    #[default]
    Unopened,
    /// No net component, and why.
    Absent(String),
    /// Opened; the library may bind it.
    Open(Arc<dyn OpenNet>),
}

/// The background tasks of a tenant.
#[derive(Debug, Default)]
pub(crate) struct Tasks {
    pub running: Vec<Task>,
    /// The runtime is going away: nothing new starts.
    pub closing: bool,
}

/// A background task of a plugin.
#[derive(Debug)]
pub(crate) struct Task {
    /// Not the switch itself: a task that has ended is here until the next one starts, its communicator is not.
    pub abort: WeakAbort,
    pub thread: std::thread::JoinHandle<()>,
}

/// CPUs of the process when its first tenant was opened.
pub(crate) fn own_cpus() -> &'static CpuSet {
    static OWN: OnceLock<CpuSet> = OnceLock::new();
    // If the kernel does not say, no thread is bound.
    OWN.get_or_init(|| rustix::thread::sched_getaffinity(Some(rustix::process::getpid())).unwrap_or_default())
}

impl Tenant {
    /// The tenant that `config` describes, on that device.
    ///
    /// # Errors
    /// [`Error::Limit`] if this process is out of what it needs.
    pub fn new(config: TenantConfig, device: Arc<DeviceModel>) -> Result<Arc<Tenant>, Error> {
        own_cpus();
        // The sentence of a link error names the limit behind it.
        let links = LinkServer::start()
            .map_err(|e| Error::Limit(format!("the link server of this process cannot be opened: {e}")))?;
        let limit = |e: &dyn std::fmt::Display| Error::Limit(format!("tenant {} cannot be opened: {e}", config.name));
        let market = config.market.clone().map_or_else(Market::of_process, Ok).map_err(|e| limit(&e))?;
        let share = Arc::new(Share::new(market, config.id, config.share).map_err(|e| limit(&e))?);
        Ok(Arc::new(Tenant {
            id: config.id,
            cpu: config.policy.as_ref().map(|p| Allowance::new(p.share.control_cpu, Instant::now())),
            name: config.name,
            policy: config.policy,
            examined: config.examine,
            limits: config.limits,
            wait: config.wait,
            device: device.clone(),
            vars: config.vars,
            number: {
                static NEXT: AtomicU64 = AtomicU64::new(1);
                NEXT.fetch_add(1, Ordering::Relaxed)
            },
            counters: Arc::default(),
            supervisor: Supervisor::default(),
            share,
            links: Arc::new(links),
            net: Mutex::default(),
            tasks: Mutex::default(),
            instances: Quota::default(),
            memory: AtomicUsize::new(0),
            log_rate: LogRate::default(),
            guest_rate: LogRate::default(),
            resolving: Quota::default(),
            sockets: Quota::default(),
            gates: Quota::default(),
            names: Quota::default(),
            maps: Mutex::new(IdMapSet::new(device)),
            hbm: Mutex::default(),
            hbm_bytes: config.hbm_bytes,
            comms: Mutex::default(),
            next_comm: AtomicU64::new(1),
        }))
    }

    /// What its plugins have of what is bounded for all of them together.
    pub fn holds(&self) -> Holds {
        Holds {
            instances: self.instances.alive(),
            memory: self.memory.load(Ordering::Relaxed),
            sockets: self.sockets.alive(),
            names: self.names.alive(),
        }
    }

    /// What a communicator has of it.
    pub fn account(&self) -> Account {
        Account { tenant: self.id, links: self.links.clone(), counters: self.counters.clone() }
    }

    /// How its net step stands.
    pub(crate) fn net(&self) -> MutexGuard<'_, NetState> {
        lock(&self.net)
    }

    /// Lets go of its net component, which holds its tenant: they would keep one another.
    pub fn close_net(&self) {
        let net = std::mem::take(&mut *self.net());
        drop(net);
    }

    /// Counts so many more bytes of plugin memory, if there is room for them in all.
    ///
    /// # Errors
    /// The refusal.
    pub(crate) fn take_memory(&self, bytes: usize) -> Result<(), String> {
        let most = self.limits.memory_in_all;
        let more = |has: usize| has.checked_add(bytes).filter(|sum| *sum <= most);
        self.memory.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).map(drop).map_err(|has| {
            let (asked, has) = (Bytes(bytes as u64), Bytes(has as u64));
            let asked = format!("asked for {asked} of plugin memory beyond the {has} it has");
            self.refuse("limits.memory-in-all", &asked, Bytes(most as u64))
        })
    }

    /// Counts a refusal and says it: who was refused what, and what is granted under which key of the policy.
    pub fn refuse(&self, limit: &'static str, asked: &str, grants: impl Display) -> String {
        self.counters.refused(limit);
        format!("tenant {} {asked}; {limit} grants {grants}", self.name)
    }

    /// Whether the host may log one more line that the tenant's plugins have caused, in whichever instance or task.
    pub fn may_log(&self) -> bool {
        self.within_rate(&self.log_rate)
    }

    /// Whether a plugin of the tenant's may log one more line, in whichever instance or task.
    pub(crate) fn guest_may_log(&self) -> bool {
        self.within_rate(&self.guest_rate)
    }

    /// Whether one more line is within the tenant's rate in `rate`; what is not is counted as refused.
    fn within_rate(&self, rate: &LogRate) -> bool {
        let within = rate.admits(self.limits.log_rate, |n| self.tell_dropped_lines(n));
        if !within {
            self.counters.refused("limits.log-lines");
        }
        within
    }

    fn tell_dropped_lines(&self, n: u32) {
        tell_dropped_lines(&self.name, self.limits.log_rate, n);
    }

    /// Refuses a logical core that the policy does not grant.
    pub fn may_use_core(&self, core: i32) -> Result<(), Error> {
        match &self.policy {
            Some(p) if !p.devices.cores.contains(&core) => {
                let asked = format!("asked for logical core {core}");
                Err(Error::Limit(self.refuse("devices.cores", &asked, listed(&p.devices.cores))))
            }
            _ => Ok(()),
        }
    }

    /// The error of an allocation of `bytes` that found no room, as the policy's refusal if there is one.
    pub fn may_allocate(&self, bytes: u64, found: Result<HbmBuf, HbmError>) -> Result<HbmBuf, Error> {
        let over = bytes > self.hbm_bytes || matches!(found, Err(HbmError::Full { .. }));
        match &self.policy {
            Some(p) if over => {
                let used = found.err().map_or(String::new(), |e| format!(": {e}"));
                let asked = format!("asked for {bytes} bytes of device memory");
                Err(Error::Limit(self.refuse("devices.hbm", &asked, p.devices.hbm) + &used))
            }
            _ => Ok(found?),
        }
    }

    /// Device memory of a logical core; made when first asked for, freed with its last user.
    pub(crate) fn hbm(&self, core: i32) -> Result<Arc<Hbm>, Error> {
        let mut all = lock(&self.hbm);
        if let Some(h) = all.get(&core).and_then(Weak::upgrade) {
            return Ok(h);
        }
        let h = Hbm::new(self.hbm_bytes)?;
        all.insert(core, Arc::downgrade(&h));
        Ok(h)
    }

    /// Device memory of a logical core that a service made; the arena of before, if it is that.
    pub fn adopt_hbm(&self, core: i32, segment: Segment) -> Arc<Hbm> {
        let mut all = lock(&self.hbm);
        if let Some(h) = all.get(&core).and_then(Weak::upgrade)
            && h.segment().same_memory(&segment)
        {
            return h;
        }
        let h = Hbm::adopt(segment);
        all.insert(core, Arc::downgrade(&h));
        h
    }

    /// Registers a communicator's host object, within the quota.
    pub(crate) fn add_comm(
        &self,
        make: impl FnOnce(u64) -> Result<Arc<CommCore>, String>,
    ) -> Result<Arc<CommCore>, String> {
        let mut comms = lock(&self.comms);
        comms.retain(|_, c| c.strong_count() > 0);
        if comms.len() >= self.limits.communicators {
            let most = self.limits.communicators;
            return Err(self.refuse("limits.communicators", "asked for one more communicator", most));
        }
        let id = self.next_comm.fetch_add(1, Ordering::Relaxed);
        let comm = make(id)?;
        comms.insert(id, Arc::downgrade(&comm));
        Ok(comm)
    }

    /// Communicators alive now.
    pub fn communicators(&self) -> usize {
        let mut comms = lock(&self.comms);
        comms.retain(|_, c| c.strong_count() > 0);
        comms.len()
    }

    /// What the data planes of all communicators counted, of those that are gone too; a client's are as it says.
    pub fn moved(&self) -> flight::Counters {
        // In this order: one that ends in between is in the first sum as long as we hold it, and in the second one before.
        let alive: Vec<Arc<CommCore>> = lock(&self.comms).values().filter_map(Weak::upgrade).collect();
        let gone = self.counters.gone();
        alive.iter().fold(gone, |sum, c| sum + c.endpoint.control().counters())
    }

    /// Ends and joins the background tasks. Their waits see the abort at once.
    pub fn end_tasks(&self) {
        let tasks = {
            let mut all = lock(&self.tasks);
            all.closing = true;
            std::mem::take(&mut all.running)
        };
        for t in &tasks {
            t.abort.abort("the runtime is closing");
        }
        for t in tasks {
            // A task that panicked has already reported; there is nothing more to learn from the join.
            let _ = t.thread.join();
        }
    }

    /// Background tasks alive now.
    pub fn tasks_alive(&self) -> usize {
        lock(&self.tasks).running.iter().filter(|t| !t.thread.is_finished()).count()
    }
}

fn tell_dropped_lines(tenant: &str, rate: u32, n: u32) {
    tracing::warn!(%tenant, "{n} log lines of plugins were dropped; limits.log-lines grants {rate} a second");
}

impl Drop for Tenant {
    fn drop(&mut self) {
        let (name, rate) = (&self.name, self.limits.log_rate);
        for lines in [&mut self.log_rate, &mut self.guest_rate] {
            lines.end(rate, |n| tell_dropped_lines(name, rate, n));
        }
    }
}

/// A tenant with these limits and nothing else of its own, for the tests of this crate.
#[cfg(test)]
pub(crate) fn limited(limits: Limits) -> Arc<Tenant> {
    let device = DeviceModel::new(Default::default()).unwrap();
    Tenant::new(TenantConfig { limits, ..TenantConfig::default() }, Arc::new(device)).unwrap()
}

/// A tenant of a policy with these lines under `[network]`.
#[cfg(test)]
pub(crate) fn networked(network: &str) -> Arc<Tenant> {
    let text =
        format!("tenant = \"red\"\n[plugins]\ndirectory = \"/\"\nallow = [{{ file = \"a\" }}]\n[network]\n{network}");
    let policy = Arc::new(crate::policy::Policy::parse(std::path::Path::new("red.toml"), &text).unwrap());
    let device = DeviceModel::new(Default::default()).unwrap();
    let config = TenantConfig { name: "red".into(), policy: Some(policy), ..TenantConfig::default() };
    Tenant::new(config, Arc::new(device)).unwrap()
}
