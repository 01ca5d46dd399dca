//! The library that is to take over, with an instance for each communicator of this runtime: LOAD, PREPARE, EXPORT, IMPORT.
//!
//! Dropped before it was committed, it lets the old instances go on.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hw_bridge::group::ballot::Vote;
use sha2::{Digest, Sha256};

use crate::error::Error;
use crate::plane::host::Host;
use crate::plane::roster::{Held, Kept, Parked};
use crate::plane::{Plan, Plane};
use crate::swap::Request;
use sandbox::entries::{self, Holder, Loaded, Resource};
use sandbox::lifecycle;
use sandbox::lifecycle::fits;
use sandbox::load::Source;
use sandbox::objects::CommunicatorObject;
use sandbox::store::{EntryCall, Patience};
use sandbox::text::line;

/// What the old plugin has at least for the call by which it serves on.
const RESUMES: Duration = Duration::from_millis(500);

/// A digest as a ballot holds it.
pub(super) fn digest_words(bytes: &[u8]) -> [u64; 4] {
    let sum = Sha256::digest(bytes);
    std::array::from_fn(|i| u64::from_le_bytes(std::array::from_fn(|j| sum[i * 8 + j])))
}

/// Does what comes before anybody stands still on a thread that makes room for all others: reading, hashing and mapping a plugin
/// is ten milliseconds of a core, which the operations of every tenant here would lose otherwise. A thread of its own, since
/// one that has made room may not take it back.
fn making_room<T: Send>(work: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
    let work = || {
        // Nobody is refused less than there is.
        let _ = rustix::process::nice(19);
        work()
    };
    std::thread::scope(|s| {
        let thread = std::thread::Builder::new().name("wccl-prepare".into()).spawn_scoped(s, work);
        let thread = thread.map_err(|e| {
            let limit = hw_bridge::os::exhausted::limit_of_threads(&e);
            format!("the thread that prepares the plugin cannot be started: {e}{limit}")
        })?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// One communicator that moves.
#[derive(Debug)]
pub(super) struct Move {
    pub plane: Arc<Plane>,
    new: Held,
    old: Held,
    /// What the new one planned.
    plan: Option<Arc<Plan>>,
}

/// The library, and its moves.
#[derive(Debug)]
pub(super) struct Candidate {
    host: Arc<Host>,
    pub loaded: Loaded,
    pub moves: Vec<Move>,
    /// Instances that go back to work, where a swap goes back.
    kept: Vec<Kept>,
}

impl Candidate {
    /// LOAD: the gate of the first load, by another door.
    pub fn load(host: &Arc<Host>, request: &Request, parked: Option<&Parked>) -> Result<Candidate, String> {
        // Without one there would be nothing to exchange, after all had agreed.
        host.forward.loaded()?;
        let (loaded, kept) = match (request.plugin(&host.tenant), parked) {
            (Some(path), _) => {
                let load = |source: &Source| {
                    entries::load(&host.tenant, source, &host.config.without_callbacks).map_err(|e| e.sentinel)
                };
                // A compilation is seconds of every core: it would never come to its end where it makes room.
                let (source, loaded) = making_room(|| {
                    let source = entries::read(&host.tenant, &path).map_err(|e| e.sentinel)?;
                    let loaded = source.compiled().map(|_in_use| load(&source)).transpose()?;
                    Ok((source, loaded))
                })?;
                (loaded.map_or_else(|| load(&source), Ok)?, Vec::new())
            }
            (None, Some(p)) => (p.loaded.clone(), p.kept.clone()),
            (None, None) => return Err("there is no plugin to go back to".into()),
        };
        Ok(Candidate { host: host.clone(), loaded, moves: Vec::new(), kept })
    }

    /// PREPARE: an instance for each communicator, made by `until`, while nobody stands still yet; answers how many there are.
    pub fn prepare(&mut self, until: Instant) -> Result<usize, String> {
        making_room(|| self.complete(until))
    }

    /// An instance for each communicator that has none yet, made by `until`; answers how many there are.
    pub fn complete(&mut self, until: Instant) -> Result<usize, String> {
        for plane in self.host.roster.planes() {
            if let Some(m) = self.moves.iter_mut().find(|m| Arc::ptr_eq(&m.plane, &plane)) {
                // It may have been started again meanwhile.
                m.old = plane.control().map_err(|e| e.to_string())?;
                continue;
            }
            let core = plane.core().clone();
            let back = self.kept.iter().find(|(id, (i, _), _)| *id == core.id && i.stopped().is_none());
            let new = match back {
                Some((_, control, _)) => control.clone(),
                None => {
                    let (logical, client) = (plane.logical_core(), core.client().cloned());
                    let holder = Holder { core: logical, key: core.key, seat: None, client };
                    let (tenant, patience) = (&self.host.tenant, Patience::Host(until));
                    let made = self.loaded.instantiate(tenant, &core.abort, holder, patience);
                    let instance = made.map_err(|e| e.to_string())?;
                    let handle = instance
                        .peek(|s| s.add(CommunicatorObject(core)))
                        .map_err(|_| "a fresh instance has no room for one handle".to_string())?;
                    (instance, handle.rep())
                }
            };
            let old = plane.control().map_err(|e| e.to_string())?;
            self.moves.push(Move { plane, new, old, plan: None });
        }
        Ok(self.moves.len())
    }

    /// What goes into the ballot; the plugin has until `until` to say it.
    pub fn vote(&self, until: Instant) -> Vote {
        let wire = lifecycle::describe(&self.loaded.instance, Patience::Host(until));
        let wire = wire.map_or(0, |d| digest_words(d.wire_compat.as_bytes())[0]);
        Vote { digest: digest_words(self.loaded.library.digest.as_bytes()), wire }
    }

    /// EXPORT and IMPORT of one communicator after the other, and a look at what the new one plans. The doors are shut; when
    /// they open, the old plugin serves on, and what was exported holds until it is called. Ends soon after `until`: an instance
    /// that does not come back by then is stopped.
    pub fn hand_over(&mut self, until: Instant, goes_on: impl Fn() -> Result<(), String>) -> Result<(), String> {
        if self.moves.is_empty() {
            return Ok(());
        }
        let about = |e: String| format!("{e}; `stateless` would leave the plans of the old plugin behind");
        let by = Patience::Host(until);
        let new = lifecycle::describe(&self.loaded.instance, by).map_err(about)?;
        let old = lifecycle::describe(&self.moves[0].old.0, by).map_err(about)?;
        if old.wire_compat != new.wire_compat {
            return Err(about(format!(
                "the connections that are handed over speak `{}` and the new plugin `{}`",
                line(&old.wire_compat),
                line(&new.wire_compat)
            )));
        }
        fits(&old.schema_name, old.state_schema, &new).map_err(about)?;
        // A rank that has left may have freed its plan.
        for m in self.moves.iter_mut().filter(|m| !m.plane.left()) {
            goes_on()?;
            let (id, rank) = (m.plane.core().id, m.plane.core().rank);
            let of = |e: String| format!("communicator {id} of rank {rank}: {e}");
            let before = (&*m.old.0, m.old.1);
            lifecycle::quiesce(before, by).map_err(|e| about(of(e)))?;
            let held = (&*m.new.0, m.new.1);
            let forward = &self.host.forward;
            let moved = lifecycle::export(before, by, &old).map_err(about).and_then(|plan| {
                lifecycle::import(held, by, &new, &plan)?;
                lifecycle::resume(held, by)?;
                let info = forward.get_comm_info(EntryCall::of(held.0).within(by), Resource::new_borrow(held.1), true);
                info.map_err(Error::from).and_then(|info| m.plane.check_plan(info)).map_err(|e| e.to_string())
            });
            // Whatever came of it, it is called again as soon as the doors open.
            let resumed = lifecycle::resume(before, Patience::Host(until.max(Instant::now() + RESUMES)));
            m.plan = Some(Arc::new(moved.map_err(of)?));
            resumed.map_err(of)?;
        }
        Ok(())
    }

    /// Goes back: communicators that were there before have the plans of then, the others keep theirs, and so does one whose graph
    /// was built since.
    pub fn take_up_again(&mut self) {
        for m in &mut self.moves {
            let before = self.kept.iter().find(|(id, ..)| *id == m.plane.core().id);
            m.plan = before.map(|(_, _, plan)| plan.clone()).filter(|plan| !plan.rings.is_empty());
        }
    }

    /// A digest of what each communicator would go by.
    pub fn plans(&self) -> Vec<u64> {
        let digest = |m: &Move| u64::from(m.plane.digest(m.plan.as_ref().unwrap_or(&m.plane.plan())));
        self.moves.iter().map(digest).collect()
    }

    /// Ends the calls that are inside the old plugin; answers which.
    pub fn end_calls(&self, why: &str) -> Vec<String> {
        let ended = |m: &Move| {
            let (core, entry) = (m.plane.core(), m.old.0.end_call(why)?);
            Some(format!("{entry} of communicator {} of rank {}", core.id, core.rank))
        };
        self.moves.iter().filter_map(ended).collect()
    }

    /// COMMIT: the table, every communicator's instance, its rings. Gates are closed, doors are shut. Answers the generation,
    /// and what was there before.
    pub fn commit(mut self, exchange: impl Fn()) -> Result<(u64, Loaded, Vec<Kept>), String> {
        let mut kept = Vec::with_capacity(self.moves.len());
        for m in self.moves.drain(..) {
            let before = m.plane.plan();
            m.plane.set_control(m.new);
            if let Some(plan) = m.plan {
                m.plane.set_plan(plan);
            }
            kept.push((m.plane.core().id, m.old, before));
            exchange();
        }
        let (generation, old) = self.host.forward.replace(self.loaded.clone()).map_err(|e| e.to_string())?;
        Ok((generation, Loaded::clone(&old), kept))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Runtime;
    use crate::config::RuntimeConfig;
    use crate::plane::Seat;
    use crate::plane::join::{Joining, Rendezvous};
    use sandbox::abort::AbortToken;
    use sandbox::bindings::exports::neuron::nccom::collectives::{CommInfo, RingInfo};
    use sandbox::key::GroupKey;

    /// Going back forgets no graph that was built since: what ran by it would find no rings.
    #[test]
    fn a_graph_that_was_built_in_probation_stays_when_the_plugin_before_serves_again() {
        let mut c = RuntimeConfig { control: false, hbm_bytes: 1 << 20, ..RuntimeConfig::default() };
        c.vars.insert("CCOM_SOCKET_IFNAME".into(), "lo".into());
        let runtime = Runtime::open(c).unwrap();
        let host = runtime.host();
        let key = GroupKey::of_id(&sandbox::id::draw().unwrap(), 0);
        let rendezvous = Rendezvous::Id(host.start_root(1, key).unwrap());
        let joining = Joining { rendezvous, key, rank: 0, nranks: 1, on: None };
        let (seat, ..) = Seat::join(host, &joining, &AbortToken::new().unwrap(), None).unwrap();
        let before = seat.plan();
        let ring = RingInfo { prev: 0, next: 0, user_ranks: vec![0], duplicate: false };
        let planned = |rings| CommInfo { rings: vec![ring.clone(); rings], ..before.info.clone() };
        let with = |rings| Arc::new(seat.check_plan(planned(rings)).unwrap());
        let back = |then: Arc<Plan>, now: Arc<Plan>| {
            seat.set_plan(now);
            let held = seat.control().unwrap();
            let mut candidate = Candidate {
                host: host.clone(),
                loaded: Loaded::clone(&host.forward.loaded().unwrap()),
                moves: vec![Move {
                    plane: host.roster.planes().remove(0),
                    new: held.clone(),
                    old: held.clone(),
                    plan: None,
                }],
                kept: vec![(seat.core().id, held, then)],
            };
            candidate.take_up_again();
            let m = candidate.moves.remove(0);
            m.plan.unwrap_or_else(|| m.plane.plan()).rings.len()
        };
        assert_eq!(back(with(0), with(1)), 1);
        assert_eq!(back(with(2), with(1)), 2);
        assert_eq!(back(with(0), with(0)), 0);
    }
}
