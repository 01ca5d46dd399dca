//! One library in one store: entered by one call at a time, from any thread, never while it is already on a stack.
//!
//! A trap, a passed deadline or a broken limit poisons the store; the instance then answers every call with the sentence
//! that says what stopped it. Nothing the host needs for data in flight is inside.
//!
//! Guests plan with floats, and all ranks must come to one plan: whatever floating-point state the program left its thread in,
//! a guest runs in the default one.

use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::{self, ThreadId};
use std::time::Instant;

use hw_bridge::exec::reduce::in_default_float_state;
use hw_bridge::os::patience::Wait;
use wasmtime::Store;
use wasmtime::component::{ComponentExportIndex, ComponentNamedList, Lift, Lower};

use crate::error::{Error, NotCalled};
use crate::key::GroupKey;
use crate::limits::GUEST_STACK;
use crate::store::engine::Ticking;
use crate::store::{Ended, HostState, Library, Patience};
use crate::tenant::Tenant;
use crate::tenant::throttle::Working;
use crate::text::line;
use hw_bridge::os::lock::lock;

/// A library in its own store.
#[derive(Debug)]
pub struct Instance {
    library: Arc<Library>,
    tenant: Arc<Tenant>,
    busy: Mutex<Option<Inside>>,
    idle: Condvar,
    unwanted: Arc<OnceLock<String>>,
    inner: Mutex<Inner>,
    /// What stopped it, for those who only ask.
    ended: Mutex<Option<String>>,
    /// Made anew when it is called after it stopped: it keeps nothing from one call to the next.
    renewable: bool,
}

/// The call that is inside.
#[derive(Debug, Clone, Copy)]
struct Inside {
    entry: &'static str,
    /// On whose stack the instance is.
    thread: ThreadId,
}

struct Inner {
    store: Store<HostState>,
    instance: wasmtime::component::Instance,
    stopped: Option<String>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("stopped", &self.stopped).finish_non_exhaustive()
    }
}

/// Why an instance does not serve any more.
pub type Stop = String;

/// Why there is no new instance.
struct Unmade {
    why: String,
    /// It is the deadline of the call that it was to be made for.
    late: bool,
}

/// Holds the instance entered; leaves it when dropped.
struct Entered<'a>(&'a Instance, #[allow(dead_code)] (Ticking, Working<'a>));

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        *lock(&self.0.busy) = None;
        self.0.idle.notify_one();
    }
}

impl Instance {
    /// Instantiates `library` in a store with `state`. A start function that traps is the error's sentence.
    pub(crate) fn new(library: &Arc<Library>, state: HostState, patience: Patience) -> Result<Arc<Instance>, String> {
        Instance::make(library, state, patience, false)
    }

    /// The same, for calls that need nothing of one another: after a stop the next call runs in a new store, as often as the
    /// tenant's limits allow.
    pub(crate) fn renewable(library: &Arc<Library>, state: HostState) -> Result<Arc<Instance>, String> {
        Instance::make(library, state, Patience::Usual, true)
    }

    fn make(
        library: &Arc<Library>,
        state: HostState,
        patience: Patience,
        renewable: bool,
    ) -> Result<Arc<Instance>, String> {
        let tenant = state.tenant.clone();
        let (store, instance) = Instance::store(library, state, patience).map_err(|unmade| unmade.why)?;
        Ok(Instance::of(library, &tenant, store, instance, renewable))
    }

    fn of(
        library: &Arc<Library>,
        tenant: &Arc<Tenant>,
        store: Store<HostState>,
        instance: wasmtime::component::Instance,
        renewable: bool,
    ) -> Arc<Instance> {
        Arc::new(Instance {
            library: library.clone(),
            tenant: tenant.clone(),
            busy: Mutex::default(),
            idle: Condvar::new(),
            unwanted: store.data().unwanted.clone(),
            inner: Mutex::new(Inner { store, instance, stopped: None }),
            ended: Mutex::default(),
            renewable,
        })
    }

    fn store(
        library: &Arc<Library>,
        state: HostState,
        patience: Patience,
    ) -> Result<(Store<HostState>, wasmtime::component::Instance), Unmade> {
        let refused = |why| Unmade { why, late: false };
        let engine = crate::store::engine::engine().map_err(refused)?;
        let tenant = state.tenant.clone();
        // Whatever it is for: a communicator, a task, the net plugin's first binding.
        tenant.supervisor.admit(&library.digest, &tenant.limits).map_err(|refusal| refused(refusal.to_string()))?;
        let _working = Working::on(tenant.cpu.as_ref());
        let mut store = state.into_store(engine);
        store.data_mut().begin_call("instantiate", patience);
        let span = store.data().span.clone();
        let _logged = span.enter();
        let ticking = Ticking::start();
        let made = in_default_float_state(|| library.pre().instantiate(&mut store));
        drop(ticking);
        let instance = made.map_err(|e| {
            let (_, limit) = store.data_mut().take_causes();
            let why = limit
                .unwrap_or_else(|| format!("it stopped while it was instantiated: {}", cause_of(&e, store.data())));
            note_stop(library, store.data(), &why);
            Unmade { why, late: store.data().cut_short() }
        })?;
        store.data_mut().live = true;
        Ok((store, instance))
    }

    /// What the store begins with that takes the place of one with `old`, which has stopped.
    fn state_again(&self, old: &HostState) -> HostState {
        let mut state = HostState::new(self.tenant.clone(), Some(self.library.clone()), old.abort.clone(), old.core);
        state.client.clone_from(&old.client);
        // What serves no communicator has the key of a group only within a call that is for it; one that was not left in order
        // still has it.
        state.key = old.key.filter(|_| !self.renewable);
        state.seat = old.seat;
        state.restarts = true;
        state
    }

    /// A new store with `state` for a call with this patience, as often as the tenant's limits allow. Guest code runs in here: no
    /// lock is held that somebody else may want.
    fn store_again(
        &self,
        state: HostState,
        entry: &'static str,
        patience: Patience,
    ) -> Result<(Store<HostState>, wasmtime::component::Instance), Error> {
        let (library, tenant, begun) = (&self.library, &self.tenant, Instant::now());
        let refused = |refusal| self.supervised(entry, refusal);
        tenant.supervisor.admit_again(&library.digest, &tenant.limits, begun).map_err(refused)?;
        // Whatever ends with it for its caller: a guest that is not made by then is of no use to him.
        let made =
            Instance::store(library, state, Patience::host(patience.until())).map_err(|unmade| match unmade.late {
                true => self.late(entry, begun),
                false => self.stop_error(entry, unmade.why, Vec::new()),
            })?;
        if tenant.may_log() {
            tracing::warn!(tenant = %tenant.name, plugin = %library.name, "plugin started again");
        }
        Ok(made)
    }

    /// An instance of the same library in the place of this one, which has stopped, for a call with this patience. What stops it
    /// is no fault of the plugin's once that has ended, until it is said to be [`Instance::restarted`].
    pub(crate) fn successor(&self, entry: &'static str, patience: Patience) -> Result<Arc<Instance>, Error> {
        let state = self.peek(|old| self.state_again(old));
        let (store, instance) = self.store_again(state, entry, patience)?;
        Ok(Instance::of(&self.library, &self.tenant, store, instance, false))
    }

    /// It has all that it is to begin with.
    pub(crate) fn restarted(&self) {
        self.peek(|s| s.restarts = false);
    }

    /// A restart that began at `begun` had no time left for it, or not enough: whoever calls next tries again.
    pub fn late(&self, entry: &'static str, begun: Instant) -> Error {
        let (plugin, tenant) = (self.library.name.clone(), self.tenant.name.clone());
        Error::Busy { entry, plugin, tenant, inside: "restart", waited: begun.elapsed() }
    }

    /// Has it run in a new store if it has stopped and is renewable, for a call with this patience. Its caller has entered it.
    fn renew(&self, entry: &'static str, patience: Patience) -> Result<(), Error> {
        if !self.renewable {
            return Ok(());
        }
        let inner = lock(&self.inner);
        if inner.stopped.is_none() {
            return Ok(());
        }
        let state = self.state_again(inner.store.data());
        drop(inner);
        let (mut store, instance) = self.store_again(state, entry, patience)?;
        store.data_mut().restarts = false;
        let old = std::mem::replace(&mut *lock(&self.inner), Inner { store, instance, stopped: None });
        *lock(&self.ended) = None;
        drop(old);
        Ok(())
    }

    pub(crate) fn supervised(&self, entry: &'static str, refusal: NotCalled) -> Error {
        let (plugin, tenant) = (self.library.name.clone(), self.tenant.name.clone());
        Error::Supervised { entry, plugin, tenant, refusal }
    }

    /// The library it runs.
    pub fn library(&self) -> &Arc<Library> {
        &self.library
    }

    /// The tenant it belongs to.
    pub(crate) fn tenant(&self) -> &Arc<Tenant> {
        &self.tenant
    }

    /// The name of the tenant it belongs to.
    pub fn tenant_name(&self) -> &str {
        &self.tenant.name
    }

    /// What stopped it, if anything did.
    pub fn stopped(&self) -> Option<Stop> {
        // Not `inner`, which a call under way holds.
        lock(&self.ended).clone()
    }

    fn enter(&self, entry: &'static str, patience: Patience) -> Result<Entered<'_>, Error> {
        let (begun, thread) = (Instant::now(), thread::current().id());
        let deadline = patience.until().into_iter().fold(begun + self.tenant.limits.entry, Instant::min);
        let mut wait = Wait::until(deadline);
        let mut busy = lock(&self.busy);
        while let Some(Inside { entry: inside, thread: whose }) = *busy {
            // The engine does not check re-entry in our configuration; entering a store that is on the stack would also be a
            // second borrow of it (INV-10).
            if whose == thread {
                return Err(Error::Reentered { entry, plugin: self.library.name.clone() });
            }
            let Some(left) = wait.left() else {
                let waited = deadline.saturating_duration_since(begun);
                let (plugin, tenant) = (self.library.name.clone(), self.tenant.name.clone());
                return Err(Error::Busy { entry, plugin, tenant, inside, waited });
            };
            busy = self.idle.wait_timeout(busy, left).unwrap_or_else(|p| p.into_inner()).0;
        }
        *busy = Some(Inside { entry, thread });
        drop(busy);
        Ok(Entered(self, (Ticking::start(), Working::on(self.tenant.cpu.as_ref()))))
    }

    pub(crate) fn stop_error(&self, entry: &'static str, cause: String, causes: Vec<String>) -> Error {
        Error::Stopped { entry, plugin: self.library.name.clone(), tenant: self.tenant.name.clone(), cause, causes }
    }

    /// Calls the export `index` as `entry`, for a group if it has none of its own. A trap poisons the instance. Sentences that
    /// host functions left are returned beside the answer.
    pub(crate) fn call<P, R>(
        &self,
        entry: &'static str,
        patience: Patience,
        group: Option<GroupKey>,
        index: &ComponentExportIndex,
        params: P,
    ) -> Result<(R, Vec<String>), Error>
    where
        P: ComponentNamedList + Lower,
        R: Lift + wasmtime::component::ComponentType + 'static,
        (R,): ComponentNamedList + Lift,
    {
        self.with(entry, patience, group, |store, instance| {
            let f = instance.get_typed_func::<P, (R,)>(&mut *store, index)?;
            f.call(store, params).map(|r| r.0)
        })
    }

    /// Runs `f` inside the instance, as one call.
    pub fn with<R>(
        &self,
        entry: &'static str,
        patience: Patience,
        group: Option<GroupKey>,
        f: impl FnOnce(&mut Store<HostState>, wasmtime::component::Instance) -> wasmtime::Result<R>,
    ) -> Result<(R, Vec<String>), Error> {
        let begun = Instant::now();
        let _entered = self.enter(entry, patience)?;
        self.renew(entry, patience.resumed(begun))?;
        let patience = patience.resumed(begun);
        let mut inner = lock(&self.inner);
        let Inner { store, instance, stopped } = &mut *inner;
        if let Some(cause) = stopped {
            return Err(self.supervised(entry, NotCalled::Gone { last: cause.clone() }));
        }
        let span = store.data().span.clone();
        let _logged = span.enter();
        self.tenant.counters.entry();
        let fuel = self.tenant.limits.hostcall_bytes;
        store.data_mut().begin_call(entry, patience);
        store.set_hostcall_fuel(fuel);
        store.set_epoch_deadline(1);
        // Until the call has come back in good order the instance counts as stopped: a panic of the host in the middle must
        // not leave a half-unwound store in use.
        *stopped = Some(format!("a call did not come back (in {entry})"));
        let own = store.data().key;
        store.data_mut().key = group.or(own);
        let answer = in_default_float_state(|| f(&mut *store, *instance));
        store.data_mut().key = own;
        *stopped = None;
        match answer {
            Ok(r) => {
                let (causes, _) = store.data_mut().take_causes();
                Ok((r, causes))
            }
            Err(e) => {
                let (causes, limit) = store.data_mut().take_causes();
                let cause = limit.unwrap_or_else(|| cause_of(&e, store.data()));
                let why = format!("{cause} (in {entry})");
                note_stop(&self.library, store.data(), &why);
                if self.tenant.may_log() {
                    tracing::error!(tenant = %self.tenant.name, plugin = %self.library.name, entry, "plugin stopped: {cause}");
                }
                *lock(&self.ended) = Some(why.clone());
                *stopped = Some(why);
                store.data_mut().release();
                Err(self.stop_error(entry, cause, causes))
            }
        }
    }

    /// Ends the call under way, if there is one, when the guest is next looked at; its caller reads why. The instance serves
    /// no more calls then. Answers the entry, the first time.
    pub fn end_call(&self, why: &str) -> Option<&'static str> {
        let inside = *lock(&self.busy);
        // The first reason stays.
        inside.filter(|_| self.unwanted.set(why.into()).is_ok()).map(|inside| inside.entry)
    }

    /// Type-checks the export that is to be called as `entry`, after the call that is inside.
    ///
    /// # Errors
    /// That it has another type; or that the call inside did not end in time.
    pub(crate) fn typed<P, R>(
        &self,
        entry: &'static str,
        patience: Patience,
        index: &ComponentExportIndex,
    ) -> Result<(), String>
    where
        P: ComponentNamedList + Lower,
        R: Lift + wasmtime::component::ComponentType + 'static,
        (R,): ComponentNamedList + Lift,
    {
        let _entered = self.enter(entry, patience).map_err(|e| e.to_string())?;
        let mut inner = lock(&self.inner);
        let Inner { store, instance, .. } = &mut *inner;
        let found = instance.get_typed_func::<P, (R,)>(&mut *store, index);
        found.map(|_| ()).map_err(|e| format!("it has another type: {}", root(&e)))
    }

    /// Reads the store's state between calls.
    pub fn peek<R>(&self, f: impl FnOnce(&mut HostState) -> R) -> R {
        f(lock(&self.inner).store.data_mut())
    }
}

/// Counts a stop of an instance of `library`.
fn note_stop(library: &Library, state: &HostState, why: &str) {
    let tenant = &state.tenant;
    tenant.counters.trapped();
    let blamed = match state.ended {
        Ended::ForCaller => return,
        Ended::ForTime | Ended::ForRoom => false,
        Ended::ByItself => true,
    };
    tenant.supervisor.note(&library.digest, &library.name, &tenant.limits, why, blamed, Instant::now());
}

/// What stopped a call, with the limit named where one did.
fn cause_of(e: &wasmtime::Error, state: &HostState) -> String {
    if matches!(e.downcast_ref::<wasmtime::Trap>(), Some(wasmtime::Trap::StackOverflow)) {
        return format!("the instance used more than its {GUEST_STACK} bytes of stack");
    }
    let text = root(e);
    // The engine has no type for this one.
    if text.contains("fuel allocated for hostcalls has been exhausted") {
        return format!(
            "the instance handed over more than its {} bytes in one host call",
            state.tenant.limits.hostcall_bytes
        );
    }
    text
}

/// The innermost cause, without the guest's backtrace, as a line.
fn root(e: &wasmtime::Error) -> String {
    line(&e.root_cause().to_string())
}
