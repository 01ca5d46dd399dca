//! The plan of a communicator as its plugin last handed it out: what an instance begins with that takes the place of one
//! which stopped.

use std::sync::Arc;
use std::time::Instant;

use hw_bridge::os::patience::passed;

use crate::error::Error;
use crate::lifecycle;
use crate::lifecycle::exported::Exported;
use crate::objects::{CommCore, CommunicatorObject};
use crate::store::{Instance, Patience};

/// What an instance begins with: a plan; or none, where the plugin stopped while it was asked for it.
#[derive(Debug)]
pub struct Checkpoint(Option<Exported>);

impl Checkpoint {
    /// Between two calls of an instance; nothing if the plugin has no life-cycle interface.
    ///
    /// # Errors
    /// Why the plugin did not hand out its plan. If that stopped it, the error has a checkpoint without: a trap poisons the store,
    /// so what can be kept is only that there may be a new one.
    pub fn take(
        held: lifecycle::HeldRef<'_>,
        patience: Patience,
    ) -> Result<Option<Checkpoint>, (String, Option<Checkpoint>)> {
        if !lifecycle::offered(held.0) {
            return Ok(None);
        }
        let plan = lifecycle::describe(held.0, patience).and_then(|writer| lifecycle::export(held, patience, &writer));
        let lost = |why| (why, held.0.stopped().map(|_| Checkpoint(None)));
        plan.map(|plan| Some(Checkpoint(Some(plan)))).map_err(lost)
    }

    /// A new instance with this plan in the place of `stopped`, and its handle of the communicator, for a call of `entry` with this
    /// patience that began at `begun`.
    ///
    /// # Errors
    /// [`Error::Supervised`] if the plugin may not run again (yet), [`Error::Stopped`] if it does not take its plan,
    /// [`Error::Busy`] if it had not the time to, which is no fault of its: the next call may try.
    pub fn restore(
        &self,
        stopped: &Instance,
        core: &Arc<CommCore>,
        entry: &'static str,
        patience: Patience,
        begun: Instant,
    ) -> Result<(Arc<Instance>, u32), Error> {
        let late = || patience.until().is_some_and(|until| passed(until, begun));
        // Each call has a clock of its own, which knows nothing of a stop of the process in the one before.
        let by = || Patience::host(patience.resumed(begun).until());
        // A guest that is overdue before it begins would be ended for nothing.
        if late() {
            return Err(stopped.late(entry, begun));
        }
        let instance = stopped.successor("restart", by()).map_err(|e| match e {
            Error::Busy { .. } => stopped.late(entry, begun),
            e => e,
        })?;
        let handle = instance
            .peek(|s| s.add(CommunicatorObject(core.clone())))
            .map_err(|_| Error::Bug("a fresh instance has no room for one handle".into()))?;
        let held = (&*instance, handle.rep());
        let taken = match &self.0 {
            Some(plan) => lifecycle::describe(held.0, by())
                .and_then(|reader| lifecycle::import(held, by(), &reader, plan))
                .and_then(|()| lifecycle::resume(held, by())),
            None => Ok(()),
        };
        match taken {
            Ok(()) => {
                instance.restarted();
                Ok((instance, handle.rep()))
            }
            Err(_) if late() => Err(instance.late(entry, begun)),
            Err(why) => Err(instance.stop_error("import-state", why, Vec::new())),
        }
    }
}
