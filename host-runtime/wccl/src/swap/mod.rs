//! Hot swap: replacing a tenant's library under running communicators, on all its ranks or on none.
//!
//! Schedules, links, memory and requests are the host's, so native work never stops for a swap; it only stands still for a
//! moment, at one boundary that all ranks agree on, because the rings may be others after it.
//!
//! ```text
//! participant (one per runtime)                                     old serves   data
//! LOAD       by another door than the first load                        yes      flows
//! PREPARE    an instance for each communicator                          yes      flows
//! FREEZE     the doors are shut: entries and new communicators wait      no      flows
//! EXPORT     old -> IMPORT new; what the new one plans is checked        no      flows
//! VOTE       in the ballot: digest and wire-compat; all must fit         yes     flows
//! QUIESCE    gates close; all lanes of all ranks come to the boundary    yes     stands
//!            the doors are shut; EXPORT again if the old one was called  no      stands
//! COMMIT     by the ballot's word: table, instances, rings; gates open   -       flows
//! PROBATION  the old library stays beside; a stop of the new one, in any instance, swaps back, everywhere
//! RETIRE     the old library goes, its memory with it
//! ```
//!
//! Whatever fails before COMMIT leaves the old library running and says why, on all participants: there is one decision
//! ([`hw_bridge::group::ballot`]), and only who has seen all participants ready can make it COMMIT. One swap at a time, two versions
//! alive at most. Whoever wants a swap ([`coordinate()`]) finds the tenant's control sockets ([`crate::control`]), and may die
//! at any time.
//!
//! | file | holds |
//! |---|---|
//! | `coordinate` | finding the participants, the ballot, what comes of it |
//! | `part` | what one participant does, in the order above |
//! | `candidate` | LOAD to IMPORT, for all communicators of a participant |
//! | `exported` | a plan between EXPORT and IMPORT: its schema, its checksum |
//! | `lifecycle` | the five entries of `neuron:lifecycle` |
//! | `doors` | holding the control plane shut |
//! | `probation` | what becomes of the old library |

mod candidate;
pub mod coordinate;
pub(crate) mod doors;
mod part;
mod probation;

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use hw_bridge::group::ballot::{Ballot, Decision};
use hw_bridge::os::shown::one_line;
use serde::{Deserialize, Serialize};

pub use coordinate::{Member, Order, Report, cancel, coordinate, status};

use crate::nrt::Runtime;
use crate::nrt::plane::Plane;
use candidate::Parked;
use hw_bridge::os::lock::lock;
use sandbox::store::Instance;

/// Longest time-out and probation.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// What is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// The collectives library.
    Transport,
    /// The net component.
    Net,
}

/// What a participant is asked to do.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Request {
    /// The ballot's number.
    pub id: u64,
    /// This participant's place in it.
    pub place: usize,
    /// Processes of all participants.
    pub pids: Vec<u32>,
    /// What is wanted.
    pub order: Order,
    /// The folder of whoever asks, from which the plugin's file is reached.
    pub folder: PathBuf,
}

impl Request {
    /// The plugin as `runtime`'s tenant asks for it: a mere name is its policy's to look up, if it has one.
    fn plugin(&self, runtime: &Runtime) -> Option<PathBuf> {
        let named = |p: &Path| p.parent().is_some_and(|dir| dir.as_os_str().is_empty());
        self.order.plugin.as_deref().map(|p| match runtime.0.tenant.policy.is_some() && named(p) {
            true => p.to_path_buf(),
            // One that begins at the root stays as it is.
            false => self.folder.join(p),
        })
    }
}

/// What became of a swap on one participant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The new plugin serves, from this generation of the table on.
    Swapped {
        /// One more with each swap.
        generation: u64,
        /// How long its operations stood still.
        pause: Duration,
        /// The calls that `force` ended.
        ended: Vec<String>,
    },
    /// It would take part.
    Possible(String),
    /// The old plugin serves; why.
    Kept(String),
}

impl Outcome {
    /// As it may be shown: a participant's words are its own.
    pub(crate) fn shown(self) -> Outcome {
        match self {
            Outcome::Swapped { generation, pause, ended } => {
                let ended = ended.iter().map(|entry| one_line(entry)).collect();
                Outcome::Swapped { generation, pause, ended }
            }
            Outcome::Possible(text) => Outcome::Possible(one_line(&text)),
            Outcome::Kept(why) => Outcome::Kept(one_line(&why)),
        }
    }
}

/// What a runtime says of itself on its control socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Its process.
    pub pid: u32,
    /// Its tenant's name.
    pub tenant: String,
    /// File name of its library; the reason, if none is loaded.
    pub plugin: String,
    /// Content hash of that, in hexadecimal digits.
    pub digest: String,
    /// Of the table.
    pub generation: u64,
    /// Rank and ranks of each communicator.
    pub ranks: Vec<(usize, usize)>,
    /// What a swap is doing, in words; empty without one.
    pub swap: String,
    /// The swap that is in probation; a runtime that was opened since then has none.
    pub probation: Option<u64>,
    /// Of swaps.
    pub counts: Counts,
    /// What became of the last swap, in words.
    pub last: String,
}

impl Status {
    /// As it may be shown: what a process says of itself are its own words.
    pub(crate) fn shown(self) -> Status {
        let [tenant, plugin, digest, swap, last] =
            [&self.tenant, &self.plugin, &self.digest, &self.swap, &self.last].map(|text| one_line(text));
        Status { tenant, plugin, digest, swap, last, ..self }
    }
}

/// Counters of swaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counts {
    /// Committed, those that went back among them.
    pub committed: u64,
    /// Refused or given up before that.
    pub refused: u64,
    /// Went back within probation.
    pub rolled_back: u64,
    /// How long operations stood still in the last one that committed.
    pub last_pause: Duration,
    /// Plans that a plugin did not hand out when they were to be kept for a restart.
    pub lost_checkpoints: u64,
}

/// Where a swap is, for faults that tests put in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Before LOAD.
    Load,
    /// Before PREPARE.
    Prepare,
    /// Before FREEZE.
    Freeze,
    /// Before EXPORT.
    Export,
    /// Before IMPORT of the first communicator.
    Import,
    /// Before the vote.
    Vote,
    /// Before the gates close.
    Quiesce,
    /// When they are closed.
    Closed,
    /// At the boundary, before this is said.
    Ready,
    /// After it was said, before the decision is looked at.
    Decide,
    /// When the decision was to commit, before anything is exchanged.
    Commit,
    /// In the middle of the exchange.
    Exchange,
}

/// What happens there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The step fails; once it is decided, steps do not fail any more.
    Fail,
    /// It takes so much longer.
    Delay(Duration),
    /// The process stops itself, SIGSTOP.
    Stop,
    /// The process ends itself, SIGKILL.
    Kill,
}

/// The swaps of one runtime.
#[derive(Debug, Default)]
pub(crate) struct Swaps {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    planes: Vec<Weak<Plane>>,
    /// Instances that join a group, and the ranks as which.
    joining: Vec<(Weak<Instance>, usize)>,
    current: Option<(Arc<Ballot>, String)>,
    parked: Option<Parked>,
    counts: Counts,
    last: String,
    threads: Vec<JoinHandle<()>>,
    closing: bool,
}

impl Swaps {
    /// Notes a communicator, for the swaps to come.
    pub(crate) fn register(&self, plane: &Arc<Plane>) {
        let mut state = lock(&self.state);
        state.planes.retain(|p| p.strong_count() > 0);
        state.planes.push(Arc::downgrade(plane));
        if let Ok((joined, _)) = plane.control() {
            state.joining.retain(|(i, _)| i.as_ptr() != Arc::as_ptr(&joined));
        }
    }

    /// Notes an instance that is about to join a group as `rank`, for a swap that does not wait for it.
    pub(crate) fn joins(&self, instance: &Arc<Instance>, rank: usize) {
        let mut state = lock(&self.state);
        state.joining.retain(|(i, _)| i.strong_count() > 0);
        state.joining.push((Arc::downgrade(instance), rank));
    }

    /// Ends the calls under way of instances that join a group; answers which.
    fn end_joins(&self, why: &str) -> Vec<String> {
        let joining: Vec<_> =
            lock(&self.state).joining.iter().filter_map(|(i, rank)| Some((i.upgrade()?, *rank))).collect();
        let ended = |(i, rank): &(Arc<Instance>, usize)| Some(format!("{} of rank {rank}", i.end_call(why)?));
        joining.iter().filter_map(ended).collect()
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

    fn planes(&self) -> Vec<Arc<Plane>> {
        let planes = lock(&self.state).planes.clone();
        planes.iter().filter_map(Weak::upgrade).filter(|p| !p.left()).collect()
    }

    /// Whether the plugin before is still there to go back to.
    pub(crate) fn on_probation(&self) -> bool {
        lock(&self.state).parked.is_some()
    }

    /// The first of some ranks whose process takes no part in the probation under way, and how long that lasts.
    pub(crate) fn outsider(&self, ranks: impl Iterator<Item = (usize, u32)>) -> Option<(Duration, (usize, u32))> {
        let state = lock(&self.state);
        let parked = state.parked.as_ref()?;
        let outsider = ranks.into_iter().find(|(_, pid)| !parked.pids.contains(pid))?;
        Some((parked.left(), outsider))
    }

    /// Counts a plan that is not kept.
    pub(crate) fn lost_checkpoint(&self) {
        lock(&self.state).counts.lost_checkpoints += 1;
    }

    /// Counters.
    pub(crate) fn counts(&self) -> Counts {
        lock(&self.state).counts
    }

    /// Begins to take part in a swap, on a thread of its own that says on `stream` what became of it.
    ///
    /// # Errors
    /// Why not: another swap is under way, or the last one is in probation.
    pub(crate) fn begin(runtime: &Runtime, request: Request, ballot: Ballot, stream: UnixStream) -> Result<(), String> {
        let swaps = &runtime.0.swaps;
        let mut state = lock(&swaps.state);
        if state.closing {
            return Err("the runtime is closing".into());
        }
        let order = &request.order;
        if [order.timeout, order.quiesce, order.probation].into_iter().any(|t| t > LONGEST) {
            return Err(format!("a time-out and a probation are at most {LONGEST:?}"));
        }
        if order.force && !order.stateless {
            return Err(
                "`force` needs `stateless`: a plugin whose calls are ended cannot be asked for its plans".into()
            );
        }
        if let Some((_, doing)) = &state.current {
            return Err(format!("another swap is under way ({doing}); one at a time"));
        }
        match (&state.parked, &order.plugin) {
            (Some(p), Some(_)) => {
                return Err(format!(
                    "the swap before is in probation for another {:?}, and two versions at most are alive; wait for its end",
                    p.left()
                ));
            }
            (None, None) => return Err("there is no plugin in probation to go back to".into()),
            _ => {}
        }
        let ballot = Arc::new(ballot);
        let doing = match &order.plugin {
            Some(p) if order.dry => format!("planning for {}", p.display()),
            Some(p) => format!("swapping to {}", p.display()),
            None => "going back".to_string(),
        };
        let (runtime, for_thread) = (runtime.clone(), ballot.clone());
        let thread = std::thread::Builder::new()
            .name("wccl-swap".into())
            .spawn(move || part::take(runtime, &request, &for_thread, &stream))
            .map_err(|e| format!("its thread cannot be started: {e}"))?;
        state.threads.retain(|t| !t.is_finished());
        state.threads.push(thread);
        state.current = Some((ballot, doing));
        Ok(())
    }

    /// Has the swap under way given up, if that is still possible.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn cancel(&self) -> Result<(), String> {
        let current = lock(&self.state).current.as_ref().map(|(ballot, _)| ballot.clone());
        match current.map(|ballot| ballot.decide(Decision::Abort)) {
            None => Err("no swap is under way".into()),
            Some(Decision::Commit) => Err("the swap is decided already".into()),
            Some(Decision::Abort) => Ok(()),
        }
    }

    /// What a runtime says of itself.
    pub(crate) fn status(runtime: &Runtime) -> Status {
        let inner = &runtime.0;
        let (plugin, digest, generation) = match inner.forward.loaded() {
            Ok(l) => (l.library.name.clone(), l.library.digest.clone(), l.generation),
            Err(why) => (why, String::new(), 0),
        };
        let ranks = inner.swaps.planes().iter().map(|p| (p.core().rank, p.core().nranks)).collect();
        let state = lock(&inner.swaps.state);
        let swap = match (&state.current, &state.parked) {
            (Some((_, doing)), _) => doing.clone(),
            (None, Some(p)) => format!("{} beside, in probation", p.loaded.library.name),
            (None, None) => String::new(),
        };
        Status {
            pid: std::process::id(),
            tenant: inner.tenant.name.clone(),
            plugin,
            digest,
            generation,
            ranks,
            swap,
            probation: state.parked.as_ref().map(|p| p.swap),
            counts: state.counts,
            last: state.last.clone(),
        }
    }

    /// The runtime goes away: nothing is waited for any more.
    pub(crate) fn close(&self) {
        let threads = {
            let mut state = lock(&self.state);
            state.closing = true;
            if let Some((ballot, _)) = &state.current {
                ballot.decide(Decision::Abort);
            }
            std::mem::take(&mut state.threads)
        };
        for thread in threads {
            // It may watch a probation.
            thread.thread().unpark();
            // The last user of the runtime may have been such a thread.
            if thread.thread().id() != std::thread::current().id() {
                // One that panicked has already reported.
                let _ = thread.join();
            }
        }
        let parked = lock(&self.state).parked.take();
        drop(parked);
    }
}
