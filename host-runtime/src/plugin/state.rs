//! What a store holds for its guest: handles, limits, the call's budget, and the sentences of what went wrong.

use std::sync::Arc;
use std::time::Instant;

use wasmtime::component::{Resource, ResourceTable};
use wasmtime::{CallHook, ResourceLimiter, Store, UpdateDeadline};

use crate::abort::AbortToken;
use crate::bindings::neuron::nrt::types::NrtStatus;
use crate::hw::rendezvous::Published;
use crate::limits::{MAX_CAUSES, TICK};
use crate::plugin::Library;
use crate::status::Status;
use crate::tenant::Tenant;

/// The data of every store.
pub struct HostState {
    pub(crate) table: ResourceTable,
    pub(crate) tenant: Arc<Tenant>,
    pub(crate) library: Option<Arc<Library>>,
    pub(crate) abort: AbortToken,
    /// Logical core of the rank this instance serves; none for the library instance and tasks.
    pub(crate) core: Option<i32>,
    pub(crate) published: Vec<Published>,
    pub(crate) sockets: usize,
    objects: usize,
    causes: Vec<String>,
    limit: Option<String>,
    ticks: u64,
    log_window: (Instant, u32),
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
        HostState {
            table: ResourceTable::new(),
            tenant,
            library,
            abort,
            core,
            published: Vec::new(),
            sockets: 0,
            objects: 0,
            causes: Vec::new(),
            limit: None,
            ticks: 0,
            log_window: (Instant::now(), 0),
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
                CallHook::CallingWasm => ctx.data().tenant.counters.entering(),
                CallHook::CallingHost => ctx.data().tenant.counters.calling_host(),
                // Time inside a host function does not count: the next tick is a whole one away again.
                CallHook::ReturningFromHost => ctx.set_epoch_deadline(1),
                CallHook::ReturningFromWasm => {}
            }
            Ok(())
        });
        store.set_epoch_deadline(1);
        store.epoch_deadline_callback(|mut ctx| {
            let s = ctx.data_mut();
            if s.abort.aborted() {
                return Err(wasmtime::format_err!("aborted: {}", s.abort.reason()));
            }
            if s.ticks == 0 {
                let most = s.tenant.limits.call;
                s.limit = Some(format!("the call used more than its {most:?} of guest time"));
                return Ok(UpdateDeadline::Interrupt);
            }
            s.ticks -= 1;
            Ok(UpdateDeadline::Continue(1))
        });
        store
    }

    /// Before a call: a fresh budget, no old sentences.
    pub(crate) fn begin_call(&mut self) {
        self.ticks = (self.tenant.limits.call.as_millis() / TICK.as_millis()).max(1) as u64;
        self.causes.clear();
        self.limit = None;
    }

    /// Notes why a host function answers with a status; shown with the entry that fails. Returns the status.
    pub(crate) fn fail(&mut self, status: Status, why: impl Into<String>) -> NrtStatus {
        self.note(why.into());
        status.into()
    }

    /// Notes a sentence; the first few stay, which are the innermost causes.
    pub(crate) fn note(&mut self, why: String) {
        if self.causes.len() < MAX_CAUSES {
            self.causes.push(why);
        }
    }

    /// The sentences of the call, and the limit that stopped it.
    pub(crate) fn take_causes(&mut self) -> (Vec<String>, Option<String>) {
        (std::mem::take(&mut self.causes), self.limit.take())
    }

    /// Puts a host object into the guest's table, within the quota.
    pub(crate) fn add<T: Send + 'static>(&mut self, object: T) -> Result<Resource<T>, NrtStatus> {
        if self.objects >= self.tenant.limits.objects {
            let most = self.tenant.limits.objects;
            return Err(self.fail(Status::RESOURCE, format!("the instance already holds {most} host objects")));
        }
        match self.table.push(object) {
            Ok(r) => {
                self.objects += 1;
                Ok(r)
            }
            Err(e) => Err(self.fail(Status::RESOURCE, format!("the handle table is full: {e}"))),
        }
    }

    /// Forgets a host object whose handle was dropped or given back.
    pub(crate) fn remove<T: 'static>(&mut self, handle: Resource<T>) -> Option<T> {
        let object = self.table.delete(handle).ok()?;
        self.objects -= 1;
        Some(object)
    }

    /// Whether one more log line is within the rate.
    pub(crate) fn may_log(&mut self) -> bool {
        let now = Instant::now();
        if now.duration_since(self.log_window.0).as_secs() >= 1 {
            self.log_window = (now, 0);
        }
        self.log_window.1 += 1;
        self.log_window.1 <= self.tenant.limits.log_rate
    }
}

impl ResourceLimiter for HostState {
    fn memory_growing(&mut self, _: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        let most = self.tenant.limits.memory;
        if desired > most {
            self.limit = Some(format!("the instance asked for {desired} bytes of memory, its limit is {most}"));
        }
        Ok(desired <= most)
    }

    fn table_growing(&mut self, _: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        let most = self.tenant.limits.table;
        if desired > most {
            self.limit = Some(format!("the instance asked for a table of {desired} elements, its limit is {most}"));
        }
        Ok(desired <= most)
    }

    fn instances(&self) -> usize {
        16
    }

    fn tables(&self) -> usize {
        16
    }

    fn memories(&self) -> usize {
        4
    }
}
