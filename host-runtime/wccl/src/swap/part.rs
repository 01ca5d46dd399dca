//! What one participant of a swap does. See the phases in [`super`].

use std::cell::RefCell;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hw_bridge::exec::sequencer::{Closed, Lacking, Positions};
use hw_bridge::group::ballot::{Ballot, Decision, Phase, Vote};

use crate::plane::doors::{Passing, Shut};
use crate::plane::eras;
use crate::plane::host::Host;
use crate::plane::roster::Parked;
use crate::swap::candidate::{Candidate, digest_words};
use crate::swap::control::Answer;
use crate::swap::{Fault, Kind, Order, Outcome, Request, Step, Swaps, probation};
use hw_bridge::os::lock::lock;
use sandbox::limits::MESSAGE_PATIENCE;
use sandbox::store::Patience;

/// What a participant says that only does what others decided.
const GIVEN_UP: &str = "it was given up";
/// Longer than a signal takes to every thread.
const SIGNAL: Duration = Duration::from_millis(100);
/// How long a participant goes without a look while ranks stand still.
const QUICK: Duration = Duration::from_micros(200);
/// How long it waits for calls inside the old plugin while they do.
const LAST_SHUT: Duration = Duration::from_millis(100);
/// How long it goes without a look before that.
const CALM: Duration = Duration::from_millis(5);

/// Takes part, says what became of it, and stays for probation. The thread of [`crate::swap::Swaps::begin`].
pub(super) fn take(swaps: &Swaps, request: &Request, ballot: &Arc<Ballot>, stream: &UnixStream) {
    // Whoever asked may be gone; the others go on all the same.
    let _ = crate::message::send(stream, &Answer::Done, &[], Instant::now() + MESSAGE_PATIENCE);
    let order = &request.order;
    let part = Part { host: &swaps.host, request, order, ballot, ended: RefCell::default() };
    /// However the thread ends, the others are not kept waiting, nor the next swap out.
    struct Ends<'a>(&'a Swaps, &'a Ballot);
    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.1.decide(Decision::Abort);
            lock(&self.0.state).current = None;
        }
    }
    let ends = Ends(swaps, ballot);
    let outcome = part.run();
    std::mem::forget(ends);
    let stays = {
        let mut state = lock(&swaps.state);
        state.current = None;
        let (pause, text) = match &outcome {
            Outcome::Swapped { pause, generation, ended } => {
                state.counts.committed += 1;
                state.counts.rolled_back += u64::from(order.plugin.is_none());
                state.counts.last_pause = *pause;
                let back = if order.plugin.is_none() { format!("went back: {}; ", order.why) } else { String::new() };
                let ended = told(ended);
                (*pause, format!("{back}generation {generation} serves since then, after a pause of {pause:?}{ended}"))
            }
            Outcome::Possible(text) => (Duration::ZERO, text.clone()),
            Outcome::Kept(why) => {
                state.counts.refused += u64::from(!order.dry);
                (Duration::ZERO, format!("refused: {why}"))
            }
        };
        ballot.set_pause(request.place, pause);
        tracing::info!(tenant = %swaps.host.tenant.name, swap = request.id, "{text}");
        state.last = text;
        // The one that watches a probation may have waited for this.
        state.threads.iter().for_each(|t| t.thread().unpark());
        swaps.host.roster.probation().is_some_and(|p| p.swap == request.id)
    };
    ballot.set_phase(request.place, Phase::Done);
    let _ = crate::message::send(stream, &outcome, &[], Instant::now() + MESSAGE_PATIENCE);
    if stays {
        probation::watch(swaps, request.id);
    }
}

/// What `force` did, behind another sentence.
fn told(ended: &[String]) -> String {
    if ended.is_empty() { String::new() } else { format!("; --force ended {}", ended.join(", ")) }
}

struct Part<'a> {
    host: &'a Arc<Host>,
    request: &'a Request,
    order: &'a Order,
    ballot: &'a Arc<Ballot>,
    /// The calls that were ended.
    ended: RefCell<Vec<String>>,
}

impl Part<'_> {
    fn run(&self) -> Outcome {
        match self.attempt() {
            Ok(outcome) => outcome,
            Err(why) => {
                if why != GIVEN_UP {
                    self.ballot.refuse(self.request.place, &why);
                }
                self.ballot.decide(Decision::Abort);
                // The first reason, which may be another's, is what is worth knowing.
                Outcome::Kept(self.reasons().unwrap_or(why) + &told(&self.ended.borrow()))
            }
        }
    }

    /// The reasons in the ballot.
    fn reasons(&self) -> Option<String> {
        let said = |v: usize| {
            let pid = self.request.pids.get(v).copied().unwrap_or(0);
            self.ballot.reason(v).map(|why| format!("pid {pid}: {why}"))
        };
        let all: Vec<String> = (0..self.ballot.voters()).filter_map(said).take(3).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    /// Faults that a test has put in.
    fn at(&self, step: Step) -> Result<(), String> {
        use rustix::process::{Signal, getpid, kill_process};
        for (at, fault) in &self.host.config.swap_faults {
            if *at != step {
                continue;
            }
            match fault {
                Fault::Fail => return Err(format!("a test wants {step:?} to fail")),
                Fault::Delay(d) => std::thread::sleep(*d),
                Fault::Stop | Fault::Kill => {
                    let signal = if *fault == Fault::Stop { Signal::STOP } else { Signal::KILL };
                    // It may come to another thread first; this one is not to go on meanwhile.
                    let _ = kill_process(getpid(), signal);
                    std::thread::sleep(SIGNAL);
                }
            }
        }
        Ok(())
    }

    fn given_up(&self) -> bool {
        self.ballot.decision() == Some(Decision::Abort)
    }

    /// Whether the swap goes on.
    fn goes_on(&self) -> Result<(), String> {
        if self.given_up() { Err(GIVEN_UP.into()) } else { Ok(()) }
    }

    fn attempt(&self) -> Result<Outcome, String> {
        let (request, order, ballot) = (self.request, self.order, self.ballot);
        // By the machine's clock, as for the operator's tool, which is not suspended with the job and gives the swap up by it: a job
        // that was suspended goes on with the plugin it has.
        let until = Instant::now() + order.timeout;
        self.at(Step::Load)?;
        if order.kind == Kind::Net {
            return self.net(until);
        }
        // It stays where it is until the decision.
        let parked = self.host.roster.parked();
        let mut candidate = Candidate::load(self.host, request, parked.as_ref())?;
        drop(parked);
        self.goes_on()?;
        self.at(Step::Prepare)?;
        let communicators = candidate.prepare(until)?;
        self.check_peers(&candidate)?;
        if order.dry {
            ballot.vote(request.place, candidate.vote(until));
            self.all_voted(until)?;
            let (name, how) =
                (&candidate.loaded.library.name, if order.stateless { "stateless" } else { "handed over" });
            return Ok(Outcome::Possible(format!("{name} would serve {communicators} communicators, plans {how}")));
        }
        self.goes_on()?;
        let exported = self.hand_over(&mut candidate, until)?;
        self.goes_on()?;
        self.at(Step::Vote)?;
        ballot.vote(request.place, candidate.vote(until));
        self.all_voted(until)?;
        self.at(Step::Quiesce)?;
        self.exchange(candidate, exported)
    }

    /// FREEZE, EXPORT, IMPORT; answers how many calls had entered the old plugin then. The doors open again: until the ranks
    /// stand still the old plugin serves, or an operation that comes after such a call would wait for it. They are shut for
    /// `quiesce`, at most until `until`.
    fn hand_over(&self, candidate: &mut Candidate, until: Instant) -> Result<u64, String> {
        let order = self.order;
        self.at(Step::Freeze)?;
        let until = until.min(Instant::now() + order.quiesce);
        let shut = self.shut(until)?;
        let _passing = Passing::begin();
        // Those that were made meanwhile.
        candidate.complete(until)?;
        self.check_peers(candidate)?;
        self.at(Step::Export)?;
        if order.plugin.is_none() {
            candidate.take_up_again();
        } else if !order.stateless {
            self.at(Step::Import)?;
            self.export(candidate, until)?;
        }
        Ok(shut.entered())
    }

    /// EXPORT and IMPORT, within `quiesce`, which is over at `until`.
    fn export(&self, candidate: &mut Candidate, until: Instant) -> Result<(), String> {
        candidate.hand_over(until, || self.goes_on()).map_err(|why| {
            if why == GIVEN_UP || Instant::now() < until {
                return why;
            }
            format!("{why}; plans are handed over within {:?}: `quiesce` gives them longer", self.order.quiesce)
        })
    }

    fn shut(&self, until: Instant) -> Result<Shut<'_>, String> {
        self.host.doors.shut(until, self.order.force).map_err(|inside| {
            format!(
                "{inside} calls are inside the old plugin, or make a communicator, and did not end in time; try again, or `force`"
            )
        })
    }

    /// Every rank of every communicator must take part, and be linked to all others: the rings may be any.
    fn check_peers(&self, candidate: &Candidate) -> Result<(), String> {
        for m in candidate.moves.iter().filter(|m| !m.plane.left()) {
            let (core, endpoint) = (m.plane.core(), &m.plane.core().endpoint);
            let (id, rank) = (core.id, core.rank);
            // Its peers are clients of this service too, and go by the rings they have.
            if core.is_clients() {
                continue;
            }
            if let Some((peer, pid)) = endpoint.peer_pids().find(|(_, pid)| !self.request.pids.contains(pid)) {
                return Err(format!(
                    "rank {peer} of communicator {id} (pid {pid}) takes no part in the swap: it has no control socket \
                     (WCCL_CONTROL=0), or came later"
                ));
            }
            if !m.plane.plan().rings.is_empty() && !endpoint.linked_to_all() && !endpoint.ending() {
                return Err(format!(
                    "rank {rank} of communicator {id} is linked to its ring neighbours only, and the new plugin may want other \
                     rings; the first collective that is no ring's, or `expand_connectivity`, links all"
                ));
            }
        }
        Ok(())
    }

    /// Waits for all votes; all must fit together.
    fn all_voted(&self, until: Instant) -> Result<(), String> {
        let ballot = self.ballot;
        if !ballot.wait(until, CALM, || self.given_up() || ballot.all(Phase::Voted)) {
            return Err(self.waited_for(Phase::Voted, "was not prepared", self.order.timeout));
        }
        self.goes_on()?;
        let mine = ballot.voted(self.request.place);
        for v in 0..ballot.voters() {
            let theirs = ballot.voted(v);
            if theirs.digest != mine.digest && (theirs.wire == 0 || theirs.wire != mine.wire) {
                let pid = self.request.pids.get(v).copied().unwrap_or(0);
                return Err(format!(
                    "the plugin that pid {pid} would load has other bytes, and the two do not declare the same wire-compat; \
                     give all the same file"
                ));
            }
        }
        Ok(())
    }

    fn waited_for(&self, phase: Phase, what: &str, after: Duration) -> String {
        let late = self.ballot.missing(phase);
        let pid = late.and_then(|v| self.request.pids.get(v)).copied().unwrap_or(0);
        let stopped =
            if hw_bridge::os::process::is_stopped(pid) { "; its process is stopped (SIGSTOP, a debugger)" } else { "" };
        format!("pid {pid} {what} within {after:?}{stopped}")
    }

    /// QUIESCE and COMMIT. `exported` calls had entered the old plugin when it exported.
    fn exchange(&self, mut candidate: Candidate, exported: u64) -> Result<Outcome, String> {
        let (request, order, ballot) = (self.request, self.order, self.ballot);
        let began = Instant::now();
        let until = began + order.quiesce;
        let planes: Vec<_> = candidate.moves.iter().map(|m| (m.plane.clone(), m.plane.plan())).collect();
        // All lanes of all communicators close before any says where it is: what a lane waits for in another one has then
        // been announced there.
        let closed: Vec<Closed<'_>> = planes.iter().map(|(p, _)| p.core().endpoint.close_gates()).collect();
        self.at(Step::Closed)?;
        let plans = candidate.plans();
        let mine: Vec<Positions> = closed.iter().zip(&plans).map(|(c, p)| c.publish(request.id, *p)).collect();
        ballot.ring();
        // Without rings there are no operations; in a communicator that is broken none will succeed, and who has left begins none.
        let stands = |i: usize| {
            let (plane, plan) = &planes[i];
            plan.rings.is_empty() || plane.left() || plane.core().endpoint.usable().is_err()
        };
        let mut clash = None;
        let mut boundaries: Vec<Option<Positions>> = vec![None; closed.len()];
        let mut lacking = String::new();
        let mut agreed = || {
            (0..closed.len()).all(|i| {
                if boundaries[i].is_some() {
                    return true;
                }
                match closed[i].boundary(request.id, &mine[i], plans[i]) {
                    Ok(b) => {
                        closed[i].raise(&b);
                        boundaries[i] = Some(b);
                        true
                    }
                    Err(Lacking::OtherRings(peer)) => {
                        let (id, rank) = (planes[i].0.core().id, planes[i].0.core().rank);
                        clash = Some(format!(
                            "rank {peer} of communicator {id} would go by other rings than rank {rank}: the plugins that they load, or \
                             the plans that these make, differ; give all the same file"
                        ));
                        true
                    }
                    Err(Lacking::Silent(peer)) => {
                        let core = planes[i].0.core();
                        lacking = format!("rank {peer} of communicator {} did not hold its operations", core.id);
                        stands(i)
                    }
                }
            })
        };
        let came = ballot.wait(until, QUICK, || self.given_up() || agreed());
        self.goes_on()?;
        if let Some(why) = clash {
            return Err(why);
        }
        if !came {
            return Err(format!("{lacking} within {:?}", order.quiesce));
        }
        ballot.set_phase(request.place, Phase::Agreed);
        let mut short = String::new();
        let mut idle = || {
            (0..closed.len()).all(|i| {
                let Some(boundary) = &boundaries[i] else { return true };
                let Some((lane, last)) = closed[i].short_of(boundary) else { return true };
                let core = planes[i].0.core();
                short = format!(
                    "rank {} of communicator {} did not come to operation #{} of lane {lane}: {last}",
                    core.rank, core.id, boundary[lane]
                );
                stands(i)
            })
        };
        // Who is waited for may be in one of the calls that `force` ends; who comes by itself needs none ended.
        let patience = if order.force { order.quiesce / 4 } else { order.quiesce };
        let mut came = ballot.wait(began + patience, QUICK, || self.given_up() || idle());
        if !came && order.force && ballot.wait(until, QUICK, || self.given_up() || ballot.all(Phase::Agreed)) {
            self.goes_on()?;
            self.end_calls(&candidate);
            came = ballot.wait(until, QUICK, || self.given_up() || idle());
        }
        self.goes_on()?;
        if !came {
            return Err(format!(
                "{short}, within {:?}; it may be busy elsewhere: try again, or wait longer",
                order.quiesce
            ));
        }
        let shut = self.shut(until.min(Instant::now() + LAST_SHUT))?;
        let _passing = Passing::begin();
        if candidate.complete(until)? != planes.len() {
            return Err("a communicator was made while the ranks came to a stand; try again".into());
        }
        if shut.entered() != exported && order.plugin.is_some() && !order.stateless {
            self.export(&mut candidate, until)?;
            if candidate.plans() != plans {
                return Err("the new plugin planned other rings when it was asked again; try again".into());
            }
        }
        if candidate.plans() != plans {
            return Err("a graph was built while the ranks came to a stand; try again".into());
        }
        self.check_peers(&candidate)?;
        self.at(Step::Ready)?;
        self.decide(until)?;
        // From here on nothing fails: the others do it too.
        let _ = self.at(Step::Commit);
        if order.force {
            self.end_calls(&candidate);
        }
        let until = Instant::now() + order.probation;
        let successor = candidate.loaded.library.clone();
        let (stops, _) = self.host.tenant.supervisor.stops(&successor.digest);
        let (generation, loaded, kept) = candidate.commit(|| drop(self.at(Step::Exchange)))?;
        drop(closed);
        let pause = began.elapsed();
        eras::note(self.host);
        let kept_by = Patience::Host(Instant::now() + order.quiesce);
        planes.iter().filter(|(p, _)| !p.left()).for_each(|(p, _)| p.keep_checkpoint(kept_by));
        let parked = Parked { loaded, kept, until, swap: request.id, pids: request.pids.clone(), successor, stops };
        // What failed in probation does not come back; what was parked before serves again. RETIRE, where there is no probation.
        let stays = order.plugin.is_some() && !order.probation.is_zero();
        drop(self.host.roster.park(stays.then_some(parked)));
        // Who left before it was parked found nothing to let go of.
        planes.iter().filter(|(p, _)| p.left()).for_each(|(p, _)| self.host.roster.leave(p.core().id));
        Ok(Outcome::Swapped { generation, pause, ended: self.ended.take() })
    }

    /// Ends the calls that are inside the old plugin.
    fn end_calls(&self, candidate: &Candidate) {
        let why = format!("a hot swap (--force, number {:x}) ended the call", self.request.id);
        let mut ended = self.ended.borrow_mut();
        ended.extend(candidate.end_calls(&why));
        ended.extend(self.host.roster.end_joins(&why));
    }

    /// Says that this participant holds still, and waits for the decision.
    fn decide(&self, until: Instant) -> Result<(), String> {
        let (request, order, ballot) = (self.request, self.order, self.ballot);
        ballot.set_phase(request.place, Phase::Ready);
        self.at(Step::Decide)?;
        let decided = ballot.wait(until, QUICK, || ballot.decision().is_some() || ballot.all(Phase::Ready));
        let decision = if ballot.all(Phase::Ready) {
            ballot.decide(Decision::Commit)
        } else {
            if !decided {
                ballot.refuse(request.place, &self.waited_for(Phase::Ready, "did not stand still", order.quiesce));
            }
            ballot.decide(Decision::Abort)
        };
        if decision == Decision::Commit { Ok(()) } else { Err(GIVEN_UP.into()) }
    }

    /// A net component: no lane runs by it, so there is nothing to bring to a stand but the calls of the library.
    fn net(&self, until: Instant) -> Result<Outcome, String> {
        let (order, host) = (self.order, self.host);
        let Some(path) = self.request.plugin(&host.tenant) else {
            return Err("a net plugin has no probation to go back from".into());
        };
        self.at(Step::Prepare)?;
        let new = sandbox::load::net::prepare(&host.tenant, &path)?;
        let digest = digest_words(new.digest().as_bytes());
        self.ballot.vote(self.request.place, Vote { digest, wire: 0 });
        self.all_voted(until)?;
        if order.dry {
            return Ok(Outcome::Possible(format!("{} would be the net plugin", path.display())));
        }
        self.at(Step::Quiesce)?;
        let began = Instant::now();
        let until = began + order.quiesce;
        let _shut = self.shut(until)?;
        self.decide(until)?;
        let generation = host.forward.loaded().map_or(0, |l| l.generation);
        // RETIRE: handles of the old one, if a library still has any, lead to the new one from here on.
        drop(sandbox::load::net::exchange(&host.tenant, new));
        Ok(Outcome::Swapped { generation, pause: began.elapsed(), ended: Vec::new() })
    }
}
