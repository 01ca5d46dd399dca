//! The net component: the loader's soft step, and binding by the name `ncclNetPlugin_v6`.
//!
//! It lives in a store of its own; a transport reaches it only through the host. Opening it never changes the loader's
//! result (INV-17); a component without the v6 table is released and logged (INV-90).

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::abort::AbortToken;
use crate::bindings::net_plugin::exports::nccl::net::nccl_net_plugin_v6::{NcclError, Properties};
use crate::bindings::neuron::hw::net;
use crate::bindings::neuron::nrt::types::NrtStatus;
use crate::objects::{NetLibraryObject, OpenNet};
use crate::status::Status;
use crate::store::{HostState, Instance, Library, Patience};
use crate::tenant::{NetState, Tenant};
use crate::text::line;
use hw_bridge::os::lock::lock;
use wasmtime::component::{ComponentExportIndex, ComponentNamedList, ComponentType, Lift, Lower, Resource};

/// The one table that is bound.
pub const V6: &str = "nccl:net/nccl-net-plugin-v6";

/// An opened net component.
#[derive(Debug)]
pub struct NetLibrary {
    /// Its file.
    pub path: PathBuf,
    library: Arc<Library>,
    bound: Mutex<Option<Bound>>,
}

#[derive(Debug, Clone)]
struct Bound {
    instance: Arc<Instance>,
    table: ComponentExportIndex,
}

impl OpenNet for NetLibrary {}

/// The net component of a tenant, if one is open.
pub(crate) fn opened(tenant: &Tenant) -> Option<Arc<NetLibrary>> {
    let NetState::Open(open) = &*tenant.net() else { return None };
    let open: Arc<dyn std::any::Any + Send + Sync> = open.clone();
    // Nothing else is ever opened.
    open.downcast().ok()
}

impl NetLibrary {
    /// One that is bound by nobody.
    pub(crate) fn new(path: &Path, library: Arc<Library>) -> NetLibrary {
        NetLibrary { path: path.into(), library, bound: Mutex::default() }
    }

    /// Whether nobody holds its lock.
    #[cfg(test)]
    pub(crate) fn is_free(&self) -> bool {
        self.bound.try_lock().is_ok()
    }

    /// Brings it as far as the one that serves the tenant, if there is one.
    ///
    /// # Errors
    /// Why it does not come so far.
    pub(crate) fn follow(&self, tenant: &Arc<Tenant>) -> Result<(), String> {
        self.bind(tenant)?;
        if opened(tenant).is_some_and(|old| lock(&old.bound).is_some()) {
            let answer = self.call::<(), Result<(), NcclError>>("ncclNet.init", "init", ())?;
            return answer.map_err(|e| format!("ncclNet.init answered {}", e.name()));
        }
        // A library binds it when it wants it.
        *lock(&self.bound) = None;
        Ok(())
    }

    /// Content hash of its file.
    pub fn digest(&self) -> &str {
        &self.library.digest
    }

    /// Binds the v6 table by its exact name. The error is the original's text.
    pub fn bind(&self, tenant: &Arc<Tenant>) -> Result<(), String> {
        // Not held while the new instance is made, which runs code of the guest's: calls of the one that serves go on, and who
        // binds at the same time does not wait.
        let before = lock(&self.bound).clone();
        if let Some(Bound { instance, .. }) = before {
            if instance.stopped().is_none() {
                return Ok(());
            }
            tenant
                .supervisor
                .admit_again(&self.library.digest, &tenant.limits, Instant::now())
                .map_err(|refusal| format!("net plugin {} was not bound again: {refusal}", self.library.name))?;
        }
        let Some(table) = self.library.exported(V6) else {
            let offers: Vec<String> = self.library.exports().into_iter().map(|e| e.0).collect();
            return Err(format!(
                "Failed to find ncclNetPlugin_v6 symbol. Plugin {} offers {}; this host binds v6 and nothing else",
                self.library.name,
                if offers.is_empty() { "nothing".into() } else { offers.join(", ") }
            ));
        };
        let abort = AbortToken::new().map_err(|e| format!("the net plugin's abort event could not be made: {e}"))?;
        let state = HostState::new(tenant.clone(), Some(self.library.clone()), abort, None);
        let instance = Instance::new(&self.library, state, Patience::Usual)?;
        let mut bound = lock(&self.bound);
        // Of two that bind at once, the first one's serves.
        if bound.as_ref().is_none_or(|b| b.instance.stopped().is_some()) {
            let before = bound.replace(Bound { instance, table });
            drop(bound);
            drop(before);
        }
        Ok(())
    }

    pub(crate) fn call<P, R>(&self, entry: &'static str, name: &str, params: P) -> Result<R, String>
    where
        P: ComponentNamedList + Lower,
        R: Lift + ComponentType + 'static,
        (R,): ComponentNamedList + Lift,
    {
        let Bound { instance, table } =
            lock(&self.bound).clone().ok_or("the net plugin is not bound; call bind first")?;
        let index = self
            .library
            .function(&table, name)
            .ok_or_else(|| format!("net plugin {} has no entry `{name}` in ncclNetPlugin_v6", self.library.name))?;
        instance
            .typed::<P, R>(entry, Patience::Usual, &index)
            .map_err(|e| format!("entry `{name}` of net plugin {}: {e}", self.library.name))?;
        let answer = instance.call::<P, R>(entry, Patience::Usual, None, &index, params);
        answer.map(|r| r.0).map_err(|e| e.to_string())
    }
}

/// `nrt_get_libnccl_net`: the handle of the opened component, or error number and text.
pub(crate) fn handle(state: &mut HostState) -> Result<Resource<NetLibraryObject>, (i32, String)> {
    let open = match &*state.tenant.net() {
        NetState::Open(l) => Ok(l.clone()),
        NetState::Absent(why) => Err((2, why.clone())),
        NetState::Unopened => Err((2, "the runtime has not come to its net plugin yet".into())),
    };
    state.add(NetLibraryObject(open?)).map_err(|s| (Status::from(&s).0 as i32, "no handle could be made".into()))
}

impl HostState {
    fn opened(&mut self) -> Result<Arc<NetLibrary>, NrtStatus> {
        opened(&self.tenant).ok_or_else(|| self.fail(Status::UNINITIALIZED, "there is no net plugin"))
    }

    fn net_call<P, T>(&mut self, entry: &'static str, name: &str, params: P) -> Result<T, NrtStatus>
    where
        P: ComponentNamedList + Lower,
        T: Lift + ComponentType + 'static,
    {
        let answer = self.opened()?.call::<P, Result<T, NcclError>>(entry, name, params);
        match answer {
            Ok(Ok(t)) => Ok(t),
            Ok(Err(e)) => Err(self.fail(Status::FAILURE, format!("{entry} of the net plugin answered {}", e.name()))),
            Err(why) => Err(self.fail(Status::FAILURE, why)),
        }
    }
}

impl net::Host for HostState {
    fn bind(&mut self, library: Resource<NetLibraryObject>) -> wasmtime::Result<Result<(), NrtStatus>> {
        let library: Arc<dyn std::any::Any + Send + Sync> = self.table.get(&library)?.0.clone();
        let tenant = self.tenant.clone();
        let Ok(library) = library.downcast::<NetLibrary>() else {
            return Ok(Err(self.fail(Status::INVALID_HANDLE, "the handle is of no net plugin")));
        };
        Ok(library.bind(&tenant).map_err(|why| {
            if tenant.may_log() {
                tracing::info!(tenant = %tenant.name, "{}", line(&why));
            }
            self.fail(Status::FAILURE, why)
        }))
    }

    fn name(&mut self) -> wasmtime::Result<Result<String, NrtStatus>> {
        let open = match self.opened() {
            Ok(o) => o,
            Err(s) => return Ok(Err(s)),
        };
        Ok(open.call::<(), String>("ncclNet.name", "name", ()).map_err(|why| self.fail(Status::FAILURE, why)))
    }

    fn init(&mut self) -> wasmtime::Result<Result<(), NrtStatus>> {
        Ok(self.net_call("ncclNet.init", "init", ()))
    }

    fn devices(&mut self) -> wasmtime::Result<Result<i32, NrtStatus>> {
        Ok(self.net_call("ncclNet.devices", "devices", ()))
    }

    fn get_properties(&mut self, dev: i32) -> wasmtime::Result<Result<net::Properties, NrtStatus>> {
        let answer = self.net_call::<_, Properties>("ncclNet.getProperties", "get-properties", (dev,));
        Ok(answer.map(|p| net::Properties {
            name: p.name,
            pci_path: p.pci_path,
            guid: p.guid,
            ptr_support: p.ptr_support,
            speed: p.speed,
            port: p.port,
            max_comms: p.max_comms,
            max_recvs: p.max_recvs,
        }))
    }

    fn fini(&mut self) -> wasmtime::Result<Result<(), NrtStatus>> {
        let answer = self.net_call("ncclNet.fini", "fini", ());
        if let Ok(open) = self.opened() {
            let before = lock(&open.bound).take();
            drop(before);
        }
        Ok(answer)
    }
}
