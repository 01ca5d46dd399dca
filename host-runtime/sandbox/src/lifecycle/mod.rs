//! The five entries of `neuron:lifecycle`, found by look-up: a plugin may be without.
//!
//! Each is called with a [`Patience`]: a swap holds others up meanwhile.

mod checkpoint;
mod exported;

pub use checkpoint::Checkpoint;
pub use exported::{Exported, fits};

use std::time::Instant;

use wasmtime::component::{ComponentNamedList, ComponentType, Lift, Lower, Resource};

use crate::bindings::exports::neuron::lifecycle::lifecycle::Description;
use crate::bindings::neuron::nrt::types::NrtStatus;
use crate::limits::byte_list;
use crate::objects::CommunicatorObject;
use crate::status::Status;
use crate::store::{Instance, Patience};

const LIFECYCLE: &str = "neuron:lifecycle/lifecycle";

/// An instance, and its handle of a communicator.
pub type HeldRef<'a> = (&'a Instance, u32);

fn call<P, R>(instance: &Instance, patience: Patience, name: &'static str, params: P) -> Result<R, String>
where
    P: ComponentNamedList + Lower,
    R: Lift + ComponentType + 'static,
    (R,): ComponentNamedList + Lift,
{
    let library = instance.library();
    let found = library.exported(LIFECYCLE).and_then(|i| library.function(&i, name));
    let index = found.ok_or_else(|| format!("{} has no `{name}` of {LIFECYCLE}", library.name))?;
    // A guest that is overdue before it begins would be ended for nothing.
    if patience.until().is_some_and(|until| until <= Instant::now()) {
        return Err(format!("`{name}` of {} was not called: the time is over", library.name));
    }
    let typed = instance.typed::<P, R>(name, patience, &index);
    typed.map_err(|e| format!("`{name}` of {}: {e}", library.name))?;
    instance.call::<P, R>(name, patience, None, &index, params).map(|r| r.0).map_err(|e| e.to_string())
}

fn asked<R>(held: HeldRef<'_>, name: &'static str, answer: Result<Result<R, NrtStatus>, String>) -> Result<R, String> {
    answer?.map_err(|s| format!("`{name}` of {} answered {}", held.0.library().name, Status::from(&s)))
}

fn of_comm(held: HeldRef<'_>, patience: Patience, name: &'static str) -> Result<(), String> {
    let comm = Resource::<CommunicatorObject>::new_borrow(held.1);
    asked(held, name, call::<_, Result<(), NrtStatus>>(held.0, patience, name, (comm,)))
}

/// What a plugin says of itself.
pub fn describe(instance: &Instance, patience: Patience) -> Result<Description, String> {
    call::<(), Description>(instance, patience, "describe", ())
}

/// Between two operations: the plugin changes nothing of a communicator until it is resumed.
pub fn quiesce(held: HeldRef<'_>, patience: Patience) -> Result<(), String> {
    of_comm(held, patience, "quiesce")
}

/// The plugin serves the communicator (again).
pub fn resume(held: HeldRef<'_>, patience: Patience) -> Result<(), String> {
    of_comm(held, patience, "resume")
}

/// Whether a plugin has the interface.
pub fn offered(instance: &Instance) -> bool {
    instance.library().exported(LIFECYCLE).is_some()
}

/// Bytes of a plan.
fn most(held: HeldRef<'_>, entry: &str) -> usize {
    let limit = held.0.tenant().limits.state;
    byte_list(LIFECYCLE, entry).map_or(limit, |b| limit.min(b as usize))
}

/// The plan of a quiesced communicator. The plugin describes itself as `writer`.
pub fn export(held: HeldRef<'_>, patience: Patience, writer: &Description) -> Result<Exported, String> {
    let comm = Resource::<CommunicatorObject>::new_borrow(held.1);
    let answer = call::<_, Result<Vec<u8>, NrtStatus>>(held.0, patience, "export-state", (comm,));
    let state = asked(held, "export-state", answer)?;
    let most = most(held, "export-state");
    if state.len() > most {
        let (name, bytes) = (&held.0.library().name, state.len());
        return Err(format!("`export-state` of {name} answered {bytes} bytes, {most} are allowed"));
    }
    Ok(Exported::seal(writer, state))
}

/// Hands a plan to a plugin that describes itself as `reader`.
pub fn import(held: HeldRef<'_>, patience: Patience, reader: &Description, plan: &Exported) -> Result<(), String> {
    let (schema, state) = plan.open(reader, most(held, "import-state"))?;
    let comm = Resource::<CommunicatorObject>::new_borrow(held.1);
    let answer = call::<_, Result<(), NrtStatus>>(held.0, patience, "import-state", (comm, schema, state));
    asked(held, "import-state", answer)
}
