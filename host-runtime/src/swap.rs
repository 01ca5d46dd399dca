//! Replacing a library under running communicators.
//!
//! LOAD and PREPARE beside the old one; EXPORT and IMPORT where both sides have `neuron:lifecycle` and the schema fits,
//! else the plan `stateless`; COMMIT exchanges the slot table and every communicator's control plane. Schedules, links and
//! memory are the host's, so native work never stops.

use std::path::Path;

use wasmtime::component::Resource;

use crate::bindings::exports::neuron::lifecycle::lifecycle::Description;
use crate::bindings::neuron::nrt::types::NrtStatus;
use crate::error::Error;
use crate::forward;
use crate::hw::objects::CommunicatorObject;
use crate::limits::byte_list;
use crate::nrt::{Communicator, Runtime};
use crate::plugin::Instance;

const LIFECYCLE: &str = "neuron:lifecycle/lifecycle";

fn call<P, R>(instance: &Instance, name: &'static str, params: P) -> Option<Result<R, Error>>
where
    P: wasmtime::component::ComponentNamedList + wasmtime::component::Lower,
    R: wasmtime::component::Lift + wasmtime::component::ComponentType + 'static,
    (R,): wasmtime::component::ComponentNamedList + wasmtime::component::Lift,
{
    let library = instance.library();
    let index = library.function(&library.exported(LIFECYCLE)?, name)?;
    if instance.typed::<P, R>(&index).is_err() {
        return None;
    }
    Some(instance.call::<P, R>(name, &index, params).map(|r| r.0))
}

/// What a plugin says of itself, if it has the life-cycle interface.
pub(crate) fn describe(instance: &Instance) -> Option<Description> {
    call::<(), Description>(instance, "describe", ())?.ok()
}

/// The old plugin's plan of one communicator, with its schema; `None` means stateless.
fn export(old: &Instance, comm: &Resource<CommunicatorObject>) -> Option<(u32, Vec<u8>)> {
    let schema = describe(old)?.state_schema;
    let handle = || Resource::<CommunicatorObject>::new_borrow(comm.rep());
    match call::<_, Result<(), NrtStatus>>(old, "quiesce", (handle(),))? {
        Ok(Ok(())) => {}
        _ => return None,
    }
    match call::<_, Result<Vec<u8>, NrtStatus>>(old, "export-state", (handle(),))? {
        Ok(Ok(state)) if state.len() as u64 <= byte_list(LIFECYCLE, "export-state").unwrap_or(0) => {
            Some((schema, state))
        }
        _ => None,
    }
}

fn import(new: &Instance, comm: &Resource<CommunicatorObject>, schema: u32, state: &[u8]) -> bool {
    let handle = || Resource::<CommunicatorObject>::new_borrow(comm.rep());
    if !describe(new).is_some_and(|d| d.reads_schemas.contains(&schema)) {
        return false;
    }
    let imported = call::<_, Result<(), NrtStatus>>(new, "import-state", (handle(), schema, state));
    if !matches!(imported, Some(Ok(Ok(())))) {
        return false;
    }
    matches!(call::<_, Result<(), NrtStatus>>(new, "resume", (handle(),)), Some(Ok(Ok(()))))
}

pub(crate) fn replace(runtime: &Runtime, path: &Path, communicators: &[&Communicator]) -> Result<u64, Error> {
    let inner = &runtime.0;
    let loaded = forward::load(&inner.tenant, path, &inner.config.without_callbacks)
        .map_err(|e| Error::Plugin { path: path.into(), reason: format!("{}; the old library runs on", e.sentinel) })?;
    for comm in communicators {
        if !std::sync::Arc::ptr_eq(&comm.runtime().0, inner) {
            return Err(Error::Usage("a communicator of another runtime cannot be moved".into()));
        }
        // Bootstrap connections stay behind, so what still needs them must be done first.
        comm.plane().connect_all("replace_library", comm.timeout())?;
    }
    let mut moves = Vec::with_capacity(communicators.len());
    for comm in communicators {
        let instance = loaded.instantiate(&inner.tenant, comm.abort_token(), Some(comm.logical_core()))?;
        let handle = instance
            .peek(|s| s.add(CommunicatorObject(comm.core().clone())))
            .map_err(|_| Error::Bug("a fresh instance has no room for one handle".into()))?;
        let (old, old_handle) = comm.plane().control()?;
        let state = export(&old, &Resource::new_borrow(old_handle));
        let kept = state.is_some_and(|(schema, state)| import(&instance, &handle, schema, &state));
        if !kept {
            tracing::info!(comm = comm.core().id, "the plan was not handed over: stateless");
        }
        moves.push((instance, handle.rep()));
    }
    let generation = inner.forward.replace(loaded)?;
    for (comm, (instance, handle)) in communicators.iter().zip(moves) {
        comm.plane().set_control(instance, handle);
    }
    tracing::info!(generation, plugin = %path.display(), "library replaced");
    Ok(generation)
}
