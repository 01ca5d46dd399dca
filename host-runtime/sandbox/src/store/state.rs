//! What a store holds for its guest: handles, limits, the call's budget, and the sentences of what went wrong.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hw_bridge::os::patience::{Wait, passed, stopped_since, was_away};
use wasmtime::component::{Resource, ResourceTable};
use wasmtime::{CallHook, ResourceLimiter, Store, UpdateDeadline};
use wasmtime_wasi::WasiCtx;

use crate::abort::AbortToken;
use crate::accounts::Counted;
use crate::bindings::neuron::nrt::types::NrtStatus;
use crate::key::GroupKey;
use crate::limits::{MAX_CAUSES, MAX_CORE_INSTANCES, MAX_MEMORIES, MAX_TABLES, TABLE_ELEMENT, TICK};
use crate::objects::ClientProcess;
use crate::objects::published::Published;
use crate::status::Status;
use crate::store::{Grant, Library, Patience};
use crate::tenant::Tenant;
use crate::tenant::throttle::on_core;

/// How long a guest may take to come back after an abort, or after the deadline of the operation that it serves.
const GRACE: Duration = Duration::from_millis(500);

/// By whom or for what a call ends that does not come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The plugin has trapped, or reached a limit of its own.
    ByItself,
    /// Its caller has aborted it, or another plugin is wanted.
    ForCaller,
    /// A deadline that its caller has chosen, or too little time to begin with what it is to begin with.
    ForTime,
    /// Other instances of its tenant have the memory that it asked for last.
    ForRoom,
}

/// The data of every store.
pub struct HostState {
    pub(crate) table: ResourceTable,
    pub(crate) tenant: Arc<Tenant>,
    pub(crate) library: Option<Arc<Library>>,
    /// What the plugin may do.
    pub(crate) grant: Arc<Grant>,
    /// Made when WASI is first called.
    pub(crate) wasi: Option<Box<WasiCtx>>,
    pub(crate) abort: AbortToken,
    /// The rank that this instance joins as, and of how many: it makes no communicator of another.
    pub(crate) seat: Option<(usize, usize)>,
    /// Logical core of the rank this instance serves; none for the library instance and tasks.
    pub(crate) core: Option<i32>,
    /// The client process that this instance serves, in a service.
    pub(crate) client: Option<ClientProcess>,
    /// Of the group that it works for; the host's, which a guest never sees. Tasks have their spawner's.
    pub(crate) key: Option<GroupKey>,
    /// Where the root of the id listens by which it joins, if it joins by one.
    pub root: Option<SocketAddr>,
    /// How long to wait before the next one is dialled, since the last left before it had shown that it is of the group.
    pub(crate) absent: Duration,
    /// The host name of the root as its program wrote it, if it joins at `host:port`: it may be looked up.
    pub root_name: Option<String>,
    /// Everything that is logged on behalf of this instance stands in it.
    pub(crate) span: tracing::Span,
    pub(crate) published: Vec<Published>,
    /// The entry under way.
    pub(crate) entry: &'static str,
    /// Set once the instance is made: a start function may not start tasks.
    pub(crate) live: bool,
    /// It takes the place of an instance that stopped, and is being made ready for that.
    pub(crate) restarts: bool,
    /// Why the call under way is to end, if somebody wants that.
    pub(crate) unwanted: Arc<OnceLock<String>>,
    objects: usize,
    causes: Vec<String>,
    limit: Option<String>,
    /// Bytes of its linear memories, and of those and its tables together as its tenant counts them.
    memory: usize,
    held: usize,
    /// By whom or for what the call ends, if it does not come back.
    pub(crate) ended: Ended,
    /// How long the call under way may take.
    patience: Patience,
    /// When this call began; how long its thread had been on a core when the guest was last entered, and what it had used before.
    begun: Instant,
    entered: Duration,
    spent: Duration,
    /// When the guest was last entered or looked at: a stop of the process shows in it.
    looked: Instant,
    /// How long to sleep for what was used beyond the tenant's share of a core.
    owed: Duration,
    _counted: Counted,
}

impl std::fmt::Debug for HostState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostState").field("tenant", &self.tenant.name).field("core", &self.core).finish_non_exhaustive()
    }
}

impl HostState {
    pub(crate) fn new(
        tenant: Arc<Tenant>,
        library: Option<Arc<Library>>,
        abort: AbortToken,
        core: Option<i32>,
    ) -> Self {
        let grant = library.as_ref().map_or_else(|| Arc::new(Grant::of(&tenant)), |l| l.grant.clone());
        let counted = tenant.instances.count();
        let (plugin, version) = library.as_ref().map_or(("", ""), |l| (l.name.as_str(), l.version()));
        // Of the highest level, or a filter that shows warnings would not show whose they are.
        let span = tracing::error_span!("plugin", tenant = %tenant.name, plugin, version, rank = tracing::field::Empty);
        HostState {
            table: handles(&tenant),
            span,
            tenant,
            library,
            grant,
            wasi: None,
            abort,
            seat: None,
            core,
            client: None,
            key: None,
            root: None,
            absent: Duration::ZERO,
            root_name: None,
            published: Vec::new(),
            entry: "",
            live: false,
            restarts: false,
            unwanted: Arc::default(),
            objects: 0,
            causes: Vec::new(),
            limit: None,
            memory: 0,
            held: 0,
            ended: Ended::ByItself,
            begun: Instant::now(),
            patience: Patience::Usual,
            entered: on_core(),
            spent: Duration::ZERO,
            looked: Instant::now(),
            owed: Duration::ZERO,
            _counted: counted,
        }
    }

    /// Makes a store whose calls are counted, bounded in time and memory, and abortable.
    pub(crate) fn into_store(self, engine: &wasmtime::Engine) -> Store<HostState> {
        let fuel = self.tenant.limits.hostcall_bytes;
        let mut store = Store::new(engine, self);
        store.set_hostcall_fuel(fuel);
        store.limiter(|s| s);
        store.call_hook(|mut ctx, hook| {
            match hook {
                CallHook::CallingWasm => {
                    let s = ctx.data_mut();
                    s.tenant.counters.entering();
                    s.pay();
                    s.throttle();
                    s.resumed();
                }
                CallHook::CallingHost => {
                    let s = ctx.data_mut();
                    s.tenant.counters.calling_host();
                    s.charge();
                    s.throttle();
                    s.within_budget()?;
                }
                // Time inside a host function does not count for the call's bound; it does for the tenant's share of a core.
                CallHook::ReturningFromHost => {
                    ctx.data_mut().resumed();
                    ctx.set_epoch_deadline(1);
                }
                CallHook::ReturningFromWasm => ctx.data_mut().charge(),
            }
            Ok(())
        });
        store.set_epoch_deadline(1);
        store.epoch_deadline_callback(|mut ctx| {
            let s = ctx.data_mut();
            s.charge();
            s.throttle();
            s.within_budget()?;
            Ok(UpdateDeadline::Continue(1))
        });
        store
    }

    /// The guest's time runs from here.
    fn resumed(&mut self) {
        (self.entered, self.looked) = (on_core(), Instant::now());
    }

    /// Counts the guest's time on a core since it was last looked at: what the machine has for others meanwhile is not its doing. A
    /// tick comes through a host call of the engine's own, so the same stretch is looked at twice.
    fn charge(&mut self) {
        let now = on_core();
        self.spent += now.saturating_sub(self.entered);
        self.entered = now;
        // A tick comes sooner: the process was stopped, which no deadline of the call is to know.
        let now = Instant::now();
        was_away(std::mem::replace(&mut self.looked, now), now, TICK);
        self.pay();
    }

    fn pay(&mut self) {
        if let Some(cpu) = &self.tenant.cpu {
            self.owed = cpu.charge();
        }
    }

    /// Lets the guest's thread sleep for what its tenant has used beyond its share of a core. It is no guest time; the bounds of
    /// the call and its abort end it.
    fn throttle(&mut self) {
        let owed = std::mem::take(&mut self.owed);
        if owed.is_zero() {
            return;
        }
        self.tenant.counters.throttled();
        // However it ends: the bounds are looked at next. A call that is overdue already sleeps too, or its grace would be free.
        let end = self.begun.checked_add(self.tenant.limits.wall).unwrap_or_else(|| Instant::now() + owed);
        let _ = self.rest(owed, end);
        self.resumed();
    }

    /// When a wait of `ms` in a host function ends, by the call's clock ([`HostState::wait_until`]): no single wait outlasts the
    /// call's bound in all, its caller's, nor the operation.
    pub(crate) fn deadline(&self, ms: u32) -> Instant {
        let asked = self.now() + Duration::from_millis(u64::from(ms));
        let wall = self.begun.checked_add(self.tenant.limits.wall);
        [wall, self.patience.until()].into_iter().flatten().fold(asked, Instant::min)
    }

    /// What the call's clock says, which does not run while the process is stopped.
    pub(crate) fn now(&self) -> Instant {
        self.by_the_calls_clock(Instant::now())
    }

    /// A moment of the machine's clock, from now on, by the call's.
    pub(crate) fn by_the_calls_clock(&self, moment: Instant) -> Instant {
        moment.checked_sub(stopped_since(self.begun)).unwrap_or(moment)
    }

    /// As [`HostState::deadline`], by the machine's clock.
    pub(crate) fn real_deadline(&self, ms: u32) -> Instant {
        self.deadline(ms) + stopped_since(self.begun)
    }

    /// A wait of the call's until a moment of its clock.
    pub(crate) fn wait_until(&self, until: Instant) -> Wait {
        Wait::until(until).since(self.begun)
    }

    /// Whether a moment of the call's clock has come.
    pub(crate) fn passed(&self, until: Instant) -> bool {
        passed(until, self.begun)
    }

    /// Whether the operation that this call serves has given up.
    pub(crate) fn overdue(&self) -> bool {
        self.patience.stops().is_some_and(|until| self.passed(until))
    }

    /// Whether the waits of this call are over.
    pub(crate) fn waited(&self) -> bool {
        self.patience.waits().is_some_and(|until| self.passed(until))
    }

    /// Whether the caller for whom a stopped instance was to be replaced had no more time.
    pub(crate) fn cut_short(&self) -> bool {
        self.restarts && self.ended == Ended::ForTime
    }

    /// The bounds of a call, looked at whenever the guest comes out, for a host call or a tick. An abort is answered by the
    /// host functions that wait, with a status; a guest that goes on all the same is ended.
    fn within_budget(&mut self) -> wasmtime::Result<()> {
        if self.abort.aborted_for().is_some_and(|ago| ago > GRACE) {
            self.ended = Ended::ForCaller;
            return Err(wasmtime::format_err!("aborted: {}", self.abort.reason()));
        }
        let (call, wall) = (self.tenant.limits.call, self.tenant.limits.wall);
        let (why, ended) = if let Some(why) = self.unwanted.get() {
            (why.clone(), Ended::ForCaller)
        } else if self.spent > call {
            self.tenant.counters.refused("limits.call");
            (format!("the call used more than its {call:?} of guest time"), Ended::ByItself)
        } else if self.over(wall) {
            return Err(self.out_of_time("the call went on"));
        } else if self
            .patience
            .stops()
            .is_some_and(|until| until.checked_add(GRACE).is_some_and(|end| self.passed(end)))
        {
            ("the call went on after the deadline of its operation".to_string(), self.overdue_for())
        } else {
            return Ok(());
        };
        self.ends(why.clone(), ended);
        Err(wasmtime::format_err!("{why}"))
    }

    /// Notes the limit that stops the call if it does not come back, and for what that is.
    fn ends(&mut self, why: String, ended: Ended) {
        (self.limit, self.ended) = (Some(why), ended);
    }

    /// For what a call ends when its deadline has passed: one that the host has set is as long as any plugin needs, unless it is for
    /// making an instance in a stopped one's place.
    fn overdue_for(&self) -> Ended {
        if self.restarts || !matches!(self.patience, Patience::Host(_)) { Ended::ForTime } else { Ended::ByItself }
    }

    /// Whether the call has taken so long in all.
    fn over(&self, wall: Duration) -> bool {
        self.begun.checked_add(wall).is_some_and(|end| self.passed(end))
    }

    /// The end of a guest whose call has no time left: in all, or for its operation.
    pub(crate) fn out_of_time(&mut self, what: &str) -> wasmtime::Error {
        let wall = self.tenant.limits.wall;
        let (why, ended) = if self.over(wall) {
            self.tenant.counters.refused("limits.call-in-all");
            (format!("the call took more than {wall:?} in all, waits included"), Ended::ByItself)
        } else if self.overdue() {
            (format!("{what}: the deadline of its operation has passed"), self.overdue_for())
        } else {
            (format!("{what}: the time that its caller gave it for waits has passed"), Ended::ForTime)
        };
        self.ends(why.clone(), ended);
        wasmtime::format_err!("{why}")
    }

    /// Before a call of `entry`: a fresh budget, no old sentences.
    pub(crate) fn begin_call(&mut self, entry: &'static str, patience: Patience) {
        self.entry = entry;
        self.begun = Instant::now();
        self.patience = patience;
        self.entered = on_core();
        self.spent = Duration::ZERO;
        self.looked = self.begun;
        self.ended = Ended::ByItself;
        self.absent = Duration::ZERO;
        self.causes.clear();
        self.limit = None;
    }

    /// Notes why a host function answers with a status; shown with the entry that fails. Returns the status.
    pub(crate) fn fail(&mut self, status: Status, why: impl Into<String>) -> NrtStatus {
        self.note(why.into());
        status.into()
    }

    /// Refuses what is beyond a limit of the tenant, by the policy's key: counted, and noted as by [`HostState::fail`].
    pub(crate) fn refuse(
        &mut self,
        status: Status,
        limit: &'static str,
        asked: &str,
        grants: impl std::fmt::Display,
    ) -> NrtStatus {
        let why = self.tenant.refuse(limit, asked, grants);
        self.fail(status, why)
    }

    /// Notes a sentence; the first few stay, which are the innermost causes.
    pub(crate) fn note(&mut self, why: String) {
        if self.causes.len() < MAX_CAUSES {
            // The guest's words may be in it.
            let clean = crate::text::line(&why);
            // What is tried again says the same again.
            if self.causes.last() != Some(&clean) {
                self.causes.push(clean);
            }
        }
    }

    /// The sentences of the call, and the limit that stopped it.
    pub(crate) fn take_causes(&mut self) -> (Vec<String>, Option<String>) {
        (std::mem::take(&mut self.causes), self.limit.take())
    }

    /// Puts a host object into the guest's table, within the quota.
    pub fn add<T: Send + 'static>(&mut self, object: T) -> Result<Resource<T>, NrtStatus> {
        if self.objects >= self.tenant.limits.objects {
            let most = self.tenant.limits.objects;
            return Err(self.refuse(Status::RESOURCE, "limits.objects", "asked for one more host object", most));
        }
        match self.table.push(object) {
            Ok(r) => {
                self.objects += 1;
                Ok(r)
            }
            Err(e) => Err(self.fail(Status::RESOURCE, format!("the handle table is full: {e}"))),
        }
    }

    /// Lets go of everything the guest held: after it stopped, nobody can use it, and peers should see it closed.
    pub(crate) fn release(&mut self) {
        self.table = handles(&self.tenant);
        self.published.clear();
        self.objects = 0;
    }

    /// Forgets a host object whose handle was dropped or given back.
    pub fn remove<T: 'static>(&mut self, handle: Resource<T>) -> Option<T> {
        let object = self.table.delete(handle).ok()?;
        self.objects -= 1;
        Some(object)
    }

    /// Whether one more line of the guest's is within the tenant's rate.
    pub(crate) fn may_log(&self) -> bool {
        self.tenant.guest_may_log()
    }
}

impl Drop for HostState {
    fn drop(&mut self) {
        self.tenant.memory.fetch_sub(self.held, Ordering::Relaxed);
    }
}

/// An empty table of handles. WASI's objects are not counted one by one, so the table itself has the limit.
fn handles(tenant: &Tenant) -> ResourceTable {
    let mut table = ResourceTable::new();
    table.set_max_capacity(tenant.limits.objects);
    table
}

impl HostState {
    /// Counts so many more bytes for the tenant, or notes that it may not have them.
    fn hold(&mut self, more: usize) -> bool {
        match self.tenant.take_memory(more) {
            Ok(()) => {
                self.held += more;
                // What it was short of before it has now.
                if self.ended == Ended::ForRoom {
                    (self.limit, self.ended) = (None, Ended::ByItself);
                }
            }
            Err(why) => {
                // What is more than all may have together is not others' doing.
                let alone = self.held.saturating_add(more) > self.tenant.limits.memory_in_all;
                self.ends(why, if alone { Ended::ByItself } else { Ended::ForRoom });
                return false;
            }
        }
        true
    }
}

impl ResourceLimiter for HostState {
    fn memory_growing(&mut self, current: usize, desired: usize, most: Option<usize>) -> wasmtime::Result<bool> {
        // The engine would refuse it next, and what is counted here stays counted: a failure is not told in a way that says
        // which growth it is of.
        if most.is_some_and(|most| desired > most) {
            return Ok(false);
        }
        // All memories of the instance together.
        let most = self.grant.memory;
        let more = desired.saturating_sub(current);
        let total = self.memory.saturating_add(more);
        if total > most {
            self.tenant.counters.refused("limits.memory");
            self.ends(format!("the instance asked for {total} bytes of memory, its limit is {most}"), Ended::ByItself);
            return Ok(false);
        }
        if !self.hold(more) {
            return Ok(false);
        }
        self.memory = total;
        Ok(true)
    }

    fn table_growing(&mut self, current: usize, desired: usize, most: Option<usize>) -> wasmtime::Result<bool> {
        if most.is_some_and(|most| desired > most) {
            return Ok(false);
        }
        let most = self.tenant.limits.table;
        if desired > most {
            self.tenant.counters.refused("limits.table");
            self.ends(
                format!("the instance asked for a table of {desired} elements, its limit is {most}"),
                Ended::ByItself,
            );
            return Ok(false);
        }
        Ok(self.hold(desired.saturating_sub(current).saturating_mul(TABLE_ELEMENT)))
    }

    fn instances(&self) -> usize {
        MAX_CORE_INSTANCES
    }

    fn tables(&self) -> usize {
        MAX_TABLES
    }

    fn memories(&self) -> usize {
        MAX_MEMORIES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limits;
    use crate::tenant::limited;

    fn instance(tenant: &Arc<Tenant>) -> HostState {
        HostState::new(tenant.clone(), None, AbortToken::new().unwrap(), None)
    }

    const MIB: usize = 1 << 20;

    #[test]
    fn memory_is_bounded_for_all_instances_of_a_tenant_together() {
        let tenant = limited(Limits { memory: 4 * MIB, memory_in_all: 6 * MIB, table: 1 << 17, ..Limits::default() });
        let (mut one, mut other) = (instance(&tenant), instance(&tenant));
        assert!(one.memory_growing(0, 3 * MIB, None).unwrap());
        // Beyond what the memory's own type allows, nothing is counted.
        for _ in 0..100 {
            assert!(!one.memory_growing(3 * MIB, 4 * MIB, Some(3 * MIB)).unwrap());
        }
        assert!(other.memory_growing(0, 2 * MIB, None).unwrap());
        assert!(!other.memory_growing(2 * MIB, 4 * MIB, None).unwrap() && other.ended == Ended::ForRoom);
        let (_, limit) = other.take_causes();
        let says = "tenant default asked for 2 MiB of plugin memory beyond the 5 MiB it has; limits.memory-in-all grants 6 MiB";
        assert_eq!(limit.as_deref(), Some(says));
        assert_eq!(tenant.counters.refusals()["limits.memory-in-all"], 1);
        // Tables are memory too.
        assert!(other.table_growing(0, MIB / TABLE_ELEMENT, None).unwrap());
        assert!(!other.table_growing(MIB / TABLE_ELEMENT, MIB / TABLE_ELEMENT + 1, None).unwrap());
        // What an instance had is given back with it.
        drop(one);
        assert!(other.memory_growing(2 * MIB, 4 * MIB, None).unwrap());
        drop(other);
        assert_eq!(tenant.memory.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn instances_that_grow_at_once_do_not_get_past_the_bound() {
        let tenant = limited(Limits { memory_in_all: 100 * MIB, ..Limits::default() });
        let begin = std::sync::Barrier::new(4);
        let got: usize = std::thread::scope(|s| {
            let grow = || {
                let mut instance = instance(&tenant);
                begin.wait();
                let got = (0..50).filter(|n| instance.memory_growing(n * MIB, (n + 1) * MIB, None).unwrap()).count();
                // Nothing is given back before all have asked.
                begin.wait();
                got
            };
            let threads = [(); 4].map(|()| s.spawn(grow));
            threads.into_iter().map(|t| t.join().unwrap()).sum()
        });
        assert_eq!(got, 100);
    }

    #[test]
    fn the_rate_of_log_lines_is_one_for_all_instances() {
        let tenant = limited(Limits { log_rate: 3, ..Limits::default() });
        let instances = [(); 4].map(|()| instance(&tenant));
        let begun = Instant::now();
        let admitted = instances.iter().flat_map(|i| [i.may_log(), i.may_log()]).filter(|may| *may).count();
        // However long it took: each further second admits three more.
        assert!(admitted <= 3 * (1 + begun.elapsed().as_secs() as usize), "{admitted}");
    }

    /// A client of a service chooses each of them.
    #[test]
    fn a_deadline_of_its_caller_is_not_blamed_on_the_plugin() {
        let tenant = limited(Limits::default());
        let now = Instant::now();
        for (patience, restarts, ended) in [
            (Patience::Host(now), false, Ended::ByItself),
            (Patience::Host(now), true, Ended::ForTime),
            (Patience::Operation(now), false, Ended::ForTime),
            (Patience::Waits(now), false, Ended::ForTime),
        ] {
            let mut s = HostState::new(tenant.clone(), None, AbortToken::new().unwrap(), None);
            s.restarts = restarts;
            s.begin_call("entry", patience);
            s.out_of_time("a poll");
            assert_eq!((s.ended, s.cut_short()), (ended, restarts), "{patience:?}");
            s.begin_call("entry", Patience::Usual);
            assert_eq!(s.ended, Ended::ByItself);
        }
    }

    /// Or a plugin that had been refused some could trap at will.
    #[test]
    fn memory_that_came_after_all_is_no_excuse() {
        let tenant = limited(Limits { memory_in_all: 4 << 20, ..Limits::default() });
        let mut s = HostState::new(tenant.clone(), None, AbortToken::new().unwrap(), None);
        tenant.take_memory(4 << 20).unwrap();
        assert!(!s.memory_growing(0, 1 << 20, None).unwrap() && s.ended == Ended::ForRoom);
        tenant.memory.fetch_sub(4 << 20, Ordering::Relaxed);
        assert!(s.memory_growing(0, 1 << 20, None).unwrap());
        assert_eq!((s.ended, s.take_causes().1), (Ended::ByItself, None));
    }
}
