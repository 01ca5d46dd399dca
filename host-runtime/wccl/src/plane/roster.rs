//! Who is there: the planes of a runtime, the instances that join, and the library that served before the last swap.

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use crate::plane::{Plan, Plane};
use hw_bridge::os::lock::lock;
use sandbox::entries::Loaded;
use sandbox::store::{Instance, Library};

/// An instance and its handle of the communicator.
pub(crate) type Held = (Arc<Instance>, u32);

/// What a library had of a communicator: the communicator's id, the instance, the plan.
pub(crate) type Kept = (u64, Held, Arc<Plan>);

/// The library that served before, beside the one that serves.
#[derive(Debug, Clone)]
pub(crate) struct Parked {
    pub loaded: Loaded,
    /// What it had of each communicator.
    pub kept: Vec<Kept>,
    /// When it goes.
    pub until: Instant,
    /// Which swap parked it.
    pub swap: u64,
    /// Processes of those that took part in it.
    pub pids: Vec<u32>,
    /// The library that serves instead.
    pub successor: Arc<Library>,
    /// How often that had stopped before it served.
    pub stops: u64,
}

impl Parked {
    /// How much longer it stays.
    pub(crate) fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }
}

/// What of a parked library is worth knowing without a hold on its instances.
#[derive(Debug, Clone)]
pub(crate) struct Probation {
    /// Which swap parked it.
    pub swap: u64,
    /// How much longer it stays.
    pub left: Duration,
    /// The library.
    pub before: Arc<Library>,
    /// The one that serves instead.
    pub successor: Arc<Library>,
    /// How often that had stopped before it served.
    pub stops: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Roster {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    planes: Vec<Weak<Plane>>,
    /// Instances that join a group, and the ranks as which.
    joining: Vec<(Weak<Instance>, usize)>,
    parked: Option<Parked>,
    lost_checkpoints: u64,
}

impl Roster {
    /// Notes a communicator, for the swaps to come.
    pub(super) fn register(&self, plane: &Arc<Plane>) {
        let mut state = lock(&self.state);
        state.planes.retain(|p| p.strong_count() > 0);
        state.planes.push(Arc::downgrade(plane));
        if let Ok((joined, _)) = plane.control() {
            state.joining.retain(|(i, _)| i.as_ptr() != Arc::as_ptr(&joined));
        }
    }

    /// Notes an instance that is about to join a group as `rank`, for a swap that does not wait for it.
    pub(super) fn joins(&self, instance: &Arc<Instance>, rank: usize) {
        let mut state = lock(&self.state);
        state.joining.retain(|(i, _)| i.strong_count() > 0);
        state.joining.push((Arc::downgrade(instance), rank));
    }

    /// Ends the calls under way of instances that join a group; answers which.
    pub(crate) fn end_joins(&self, why: &str) -> Vec<String> {
        let joining: Vec<_> =
            lock(&self.state).joining.iter().filter_map(|(i, rank)| Some((i.upgrade()?, *rank))).collect();
        let ended = |(i, rank): &(Arc<Instance>, usize)| Some(format!("{} of rank {rank}", i.end_call(why)?));
        joining.iter().filter_map(ended).collect()
    }

    /// The planes that somebody uses.
    pub(crate) fn planes(&self) -> Vec<Arc<Plane>> {
        let planes = lock(&self.state).planes.clone();
        planes.iter().filter_map(Weak::upgrade).filter(|p| !p.left()).collect()
    }

    /// Lets go of what the plugin in probation had of a communicator that is left: nothing brings it back.
    pub(crate) fn leave(&self, comm: u64) {
        let mut state = lock(&self.state);
        let kept = state.parked.as_mut().and_then(|p| {
            let at = p.kept.iter().position(|(id, ..)| *id == comm)?;
            Some(p.kept.swap_remove(at))
        });
        // Not under the lock: it ends an instance.
        drop(state);
        drop(kept);
    }

    /// The library before, if it is still there to go back to.
    pub(crate) fn parked(&self) -> Option<Parked> {
        lock(&self.state).parked.clone()
    }

    /// Puts another one there, or none; answers what was there.
    pub(crate) fn park(&self, parked: Option<Parked>) -> Option<Parked> {
        std::mem::replace(&mut lock(&self.state).parked, parked)
    }

    /// The probation under way.
    pub(crate) fn probation(&self) -> Option<Probation> {
        let state = lock(&self.state);
        let p = state.parked.as_ref()?;
        let (before, successor) = (p.loaded.library.clone(), p.successor.clone());
        Some(Probation { swap: p.swap, left: p.left(), before, successor, stops: p.stops })
    }

    /// The first of some ranks whose process takes no part in the probation under way, and how long that lasts.
    pub(super) fn outsider(&self, mut ranks: impl Iterator<Item = (usize, u32)>) -> Option<(Duration, (usize, u32))> {
        let state = lock(&self.state);
        let parked = state.parked.as_ref()?;
        let outsider = ranks.find(|(_, pid)| !parked.pids.contains(pid))?;
        Some((parked.left(), outsider))
    }

    /// Counts a plan that is not kept.
    pub(super) fn lost_checkpoint(&self) {
        lock(&self.state).lost_checkpoints += 1;
    }

    /// Plans that were not kept so far.
    pub(crate) fn lost_checkpoints(&self) -> u64 {
        lock(&self.state).lost_checkpoints
    }
}
