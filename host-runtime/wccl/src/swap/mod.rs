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
//! alive at most. Whoever wants a swap ([`coordinate()`]) finds the tenant's control sockets (`control`), and may die
//! at any time.
//!
//! | file | holds |
//! |---|---|
//! | `coordinate` | finding the participants, the ballot, what comes of it |
//! | `part` | what one participant does, in the order above |
//! | `candidate` | LOAD to IMPORT, for all communicators of a participant |
//! | `control` | the socket on which operators ask of a running tenant |
//! | `probation` | what becomes of the old library |

mod candidate;
pub(crate) mod control;
pub mod coordinate;
mod part;
mod probation;

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use hw_bridge::group::ballot::{Ballot, Decision};
use hw_bridge::os::shown::one_line;
use serde::{Deserialize, Serialize};

pub use crate::config::{Fault, Step};
pub use coordinate::{Member, Order, Report, cancel, coordinate, status};

use crate::plane::host::Host;
use hw_bridge::os::lock::lock;
use sandbox::tenant::Tenant;

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
    /// The plugin as `tenant` asks for it: a mere name is its policy's to look up, if it has one.
    fn plugin(&self, tenant: &Tenant) -> Option<PathBuf> {
        let named = |p: &Path| p.parent().is_some_and(|dir| dir.as_os_str().is_empty());
        self.order.plugin.as_deref().map(|p| match tenant.policy.is_some() && named(p) {
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

/// The swaps of one runtime. Its state is locked before the roster's.
#[derive(Debug)]
pub(crate) struct Swaps {
    host: Arc<Host>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    current: Option<(Arc<Ballot>, String)>,
    counts: Counts,
    last: String,
    threads: Vec<JoinHandle<()>>,
    closing: bool,
}

impl Swaps {
    pub(crate) fn new(host: Arc<Host>) -> Arc<Swaps> {
        Arc::new(Swaps { host, state: Mutex::default() })
    }

    /// Counters.
    pub(crate) fn counts(&self) -> Counts {
        Counts { lost_checkpoints: self.host.roster.lost_checkpoints(), ..lock(&self.state).counts }
    }

    /// Begins to take part in a swap, on a thread of its own that says on `stream` what became of it.
    ///
    /// # Errors
    /// Why not: another swap is under way, or the last one is in probation.
    fn begin(self: &Arc<Self>, request: Request, ballot: Ballot, stream: UnixStream) -> Result<(), String> {
        let mut state = lock(&self.state);
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
        match (self.host.roster.probation(), &order.plugin) {
            (Some(p), Some(_)) => {
                return Err(format!(
                    "the swap before is in probation for another {:?}, and two versions at most are alive; wait for its end",
                    p.left
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
        let (swaps, for_thread) = (self.clone(), ballot.clone());
        let thread = std::thread::Builder::new()
            .name("wccl-swap".into())
            .spawn(move || part::take(&swaps, &request, &for_thread, &stream))
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
    fn cancel(&self) -> Result<(), String> {
        let current = lock(&self.state).current.as_ref().map(|(ballot, _)| ballot.clone());
        match current.map(|ballot| ballot.decide(Decision::Abort)) {
            None => Err("no swap is under way".into()),
            Some(Decision::Commit) => Err("the swap is decided already".into()),
            Some(Decision::Abort) => Ok(()),
        }
    }

    /// What the runtime says of itself.
    pub(crate) fn status(&self) -> Status {
        let host = &self.host;
        let (plugin, digest, generation) = match host.forward.loaded() {
            Ok(l) => (l.library.name.clone(), l.library.digest.clone(), l.generation),
            Err(why) => (why, String::new(), 0),
        };
        let ranks = host.roster.planes().iter().map(|p| (p.core().rank, p.core().nranks)).collect();
        let counts = self.counts();
        let state = lock(&self.state);
        let probation = host.roster.probation();
        let swap = match (&state.current, &probation) {
            (Some((_, doing)), _) => doing.clone(),
            (None, Some(p)) => format!("{} beside, in probation", p.before.name),
            (None, None) => String::new(),
        };
        Status {
            pid: std::process::id(),
            tenant: host.tenant.name.clone(),
            plugin,
            digest,
            generation,
            ranks,
            swap,
            probation: probation.as_ref().map(|p| p.swap),
            counts,
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
            // One that panicked has already reported.
            let _ = thread.join();
        }
        drop(self.host.roster.park(None));
    }
}
