//! The plan of a communicator as its plugin last handed it out: what an instance begins with that takes the place of one
//! which stopped.

use std::sync::Arc;

use super::lifecycle;
use crate::error::Error;
use crate::hw::objects::{CommCore, CommunicatorObject};
use crate::plugin::Instance;

#[derive(Debug)]
pub(crate) struct Checkpoint {
    schema: u32,
    state: Vec<u8>,
}

impl Checkpoint {
    /// Between two calls of an instance; nothing if the plugin has no life-cycle interface or hands out nothing.
    pub(crate) fn take(held: lifecycle::Held<'_>) -> Option<Checkpoint> {
        let schema = lifecycle::describe(held.0).ok()?.state_schema;
        let state = lifecycle::export(held, held.0.tenant().limits.state).ok()?;
        Some(Checkpoint { schema, state })
    }

    /// A new instance with this plan in the place of `stopped`, and its handle of the communicator.
    ///
    /// # Errors
    /// [`Error::Supervised`] if the plugin may not run again (yet), [`Error::Stopped`] if it does not take its plan.
    pub(crate) fn restore(&self, stopped: &Instance, core: &Arc<CommCore>) -> Result<(Arc<Instance>, u32), Error> {
        let instance = stopped.successor("restart")?;
        let handle = instance
            .peek(|s| s.add(CommunicatorObject(core.clone())))
            .map_err(|_| Error::Bug("a fresh instance has no room for one handle".into()))?;
        let held = (&*instance, handle.rep());
        match lifecycle::import(held, self.schema, &self.state).and_then(|()| lifecycle::resume(held)) {
            Ok(()) => Ok((instance, handle.rep())),
            Err(why) => Err(instance.stop_error("import-state", why, Vec::new())),
        }
    }
}
