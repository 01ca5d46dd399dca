//! One tenant: what its plugins may use, what they have used, and the host facts they are shown.
//!
//! Everything a host function needs is here or in the store's own state; nothing is global but the engine.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use hw_bridge::exec::share::{Market, Share, Terms};
use hw_bridge::group::flight;
use hw_bridge::memory::hbm::{Hbm, HbmBuf, HbmError};
use hw_bridge::memory::links::LinkServer;
use hw_bridge::memory::segment::Segment;
use hw_bridge::model::{DeviceModel, IdMapSet};
use hw_bridge::os::log_rate::LogRate;

use crate::abort::WeakAbort;
use crate::error::Error;
use crate::hw::objects::CommCore;
use hw_bridge::os::bell::WaitMode;

use crate::limits::Limits;
use crate::net::NetLibrary;
use crate::nrt::RuntimeConfig;
use crate::plugin::supervisor::Supervisor;
use crate::plugin::throttle::Allowance;
use crate::policy::{Bytes, Policy, listed};

/// Counters of one tenant. `component_calls` counts every crossing between host and guest, in both directions.
#[derive(Debug, Default)]
pub struct Counters {
    component_calls: AtomicU64,
    host_calls: AtomicU64,
    traps: AtomicU64,
    throttled: AtomicU64,
    entries: AtomicU64,
    tasks: AtomicU64,
    refused: Mutex<BTreeMap<&'static str, u64>>,
    /// What the data planes of communicators that are gone counted.
    moved: Mutex<flight::Counters>,
}

impl Counters {
    pub(crate) fn entering(&self) {
        self.component_calls.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn calling_host(&self) {
        self.component_calls.fetch_add(1, Ordering::Relaxed);
        self.host_calls.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn trapped(&self) {
        self.traps.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn throttled(&self) {
        self.throttled.fetch_add(1, Ordering::Relaxed);
    }

    /// Times that a plugin had used up its tenant's share of a core and slept.
    pub fn throttles(&self) -> u64 {
        self.throttled.load(Ordering::Relaxed)
    }

    pub(crate) fn entry(&self) {
        self.entries.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn task(&self) {
        self.tasks.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a refusal by the policy's key, such as `network.listen`.
    pub(crate) fn refused(&self, limit: &'static str) {
        *lock(&self.refused).entry(limit).or_default() += 1;
    }

    /// Refusals so far, by the policy's key.
    pub fn refusals(&self) -> BTreeMap<&'static str, u64> {
        lock(&self.refused).clone()
    }

    pub(crate) fn moved(&self, by: flight::Counters) {
        let mut sum = lock(&self.moved);
        *sum = *sum + by;
    }

    /// Background tasks started.
    pub fn tasks(&self) -> u64 {
        self.tasks.load(Ordering::Relaxed)
    }

    /// Crossings so far, host to guest and guest to host.
    pub fn component_calls(&self) -> u64 {
        self.component_calls.load(Ordering::Relaxed)
    }

    /// Of these, guest to host.
    pub fn host_calls(&self) -> u64 {
        self.host_calls.load(Ordering::Relaxed)
    }

    /// Instances that trapped, ran out of time or over a limit.
    pub fn traps(&self) -> u64 {
        self.traps.load(Ordering::Relaxed)
    }

    /// Library entries called.
    pub fn entries(&self) -> u64 {
        self.entries.load(Ordering::Relaxed)
    }
}

/// How many of something a tenant has, in all its instances together. Clones are one count.
#[derive(Debug, Clone, Default)]
pub(crate) struct Quota(Arc<AtomicUsize>);

/// One of them, until it is dropped.
#[derive(Debug)]
pub(crate) struct Counted(Quota);

impl Quota {
    /// Counts one more, unless there are `most` already.
    pub(crate) fn take(&self, most: usize) -> Option<Counted> {
        let more = |n| (n < most).then_some(n + 1);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| Counted(self.clone()))
    }

    /// Counts one more, however many there are.
    pub(crate) fn count(&self) -> Counted {
        self.0.fetch_add(1, Ordering::Relaxed);
        Counted(self.clone())
    }

    /// How many there are now.
    pub(crate) fn alive(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
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
    pub counters: Arc<Counters>,
    /// How often its plugins stopped, and which may run again.
    pub supervisor: Supervisor,
    /// Guest time; unlimited without a policy.
    pub(crate) cpu: Option<Allowance>,
    /// Its share of what it and other tenants compete for.
    pub share: Arc<Share>,
    pub(crate) links: LinkServer,
    pub(crate) net: Mutex<NetState>,
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
pub(crate) enum NetState {
    /// The step has not run.
    #[default]
    Unopened,
    /// No net component, and why.
    Absent(String),
    /// Opened; the library may bind it.
    Open(Arc<NetLibrary>),
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

pub(crate) fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|p| p.into_inner())
}

impl Tenant {
    /// The tenant that `config` describes, on that device.
    pub(crate) fn new(config: &RuntimeConfig, device: Arc<DeviceModel>) -> Result<Arc<Tenant>, Error> {
        crate::hw::system::own_cpus();
        // The sentence of a link error names the limit behind it.
        let links = LinkServer::start()
            .map_err(|e| Error::Limit(format!("the link server of this process cannot be opened: {e}")))?;
        let c = config.share;
        let terms = Terms { weight: c.weight, bandwidth: c.bandwidth.map(|rate| rate.0), slots: c.proxy_slots };
        let limit = |e: &dyn std::fmt::Display| Error::Limit(format!("tenant {} cannot be opened: {e}", config.tenant));
        let market = config.market.clone().map_or_else(Market::of_process, Ok).map_err(|e| limit(&e))?;
        let share = Arc::new(Share::new(market, config.tenant_id, terms).map_err(|e| limit(&e))?);
        Ok(Arc::new(Tenant {
            name: config.tenant.clone(),
            id: config.tenant_id,
            cpu: config.policy.as_ref().map(|p| Allowance::new(p.share.control_cpu, Instant::now())),
            policy: config.policy.clone(),
            examined: config.examine,
            limits: config.limits,
            wait: config.wait,
            device: device.clone(),
            vars: config.vars.clone(),
            number: {
                static NEXT: AtomicU64 = AtomicU64::new(1);
                NEXT.fetch_add(1, Ordering::Relaxed)
            },
            counters: Arc::default(),
            supervisor: Supervisor::default(),
            share,
            links,
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
    pub(crate) fn refuse(&self, limit: &'static str, asked: &str, grants: impl Display) -> String {
        self.counters.refused(limit);
        format!("tenant {} {asked}; {limit} grants {grants}", self.name)
    }

    /// Whether the host may log one more line that the tenant's plugins have caused, in whichever instance or task.
    pub(crate) fn may_log(&self) -> bool {
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
    pub(crate) fn may_use_core(&self, core: i32) -> Result<(), Error> {
        match &self.policy {
            Some(p) if !p.devices.cores.contains(&core) => {
                let asked = format!("asked for logical core {core}");
                Err(Error::Limit(self.refuse("devices.cores", &asked, listed(&p.devices.cores))))
            }
            _ => Ok(()),
        }
    }

    /// The error of an allocation of `bytes` that found no room, as the policy's refusal if there is one.
    pub(crate) fn may_allocate(&self, bytes: u64, found: Result<HbmBuf, HbmError>) -> Result<HbmBuf, Error> {
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
    pub(crate) fn adopt_hbm(&self, core: i32, segment: Segment) -> Arc<Hbm> {
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
        let gone = *lock(&self.counters.moved);
        alive.iter().fold(gone, |sum, c| sum + c.endpoint.control().counters())
    }

    /// Ends and joins the background tasks. Their waits see the abort at once.
    pub(crate) fn end_tasks(&self) {
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
    Tenant::new(&RuntimeConfig { limits, ..RuntimeConfig::default() }, Arc::new(device)).unwrap()
}

/// A tenant of a policy with these lines under `[network]`.
#[cfg(test)]
pub(crate) fn networked(network: &str) -> Arc<Tenant> {
    let text =
        format!("tenant = \"red\"\n[plugins]\ndirectory = \"/\"\nallow = [{{ file = \"a\" }}]\n[network]\n{network}");
    let policy = Arc::new(crate::policy::Policy::parse(std::path::Path::new("red.toml"), &text).unwrap());
    let device = DeviceModel::new(Default::default()).unwrap();
    let config = RuntimeConfig { tenant: "red".into(), policy: Some(policy), ..RuntimeConfig::default() };
    Tenant::new(&config, Arc::new(device)).unwrap()
}

/// Runs `f` as this user. Of its thread alone, which ends; the kernel keeps who one was that connected or began to listen.
#[cfg(test)]
pub(crate) fn as_user<R: Send>(uid: u32, f: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|s| {
        let runs = s.spawn(|| {
            if uid != rustix::process::geteuid().as_raw() {
                let uid = rustix::process::Uid::from_raw(uid);
                rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            }
            f()
        });
        runs.join().unwrap()
    })
}
