//! The control plane of a communicator: the instance of the library that plans for this rank, shared by the communicator
//! and its streams, or by a client of the service. An instance may be exchanged under them ([`crate::swap`]).
//!
//! Its users, communicator and streams, share a [`Seat`]. With the last of them the rank leaves: peers learn it at once, also
//! while a swap still holds the plane; then the library gets its free call.
//!
//! | file | holds |
//! |---|---|
//! | `ask` | the control calls as values, and who answers them |
//! | `here` | an instance of this process, which does |
//! | `join` | where a group meets, who joins, where that one runs |
//! | `host` | what the planes of a runtime share |
//! | `roster` | which planes there are, and the library before |
//! | `doors` | what a swap holds shut |
//! | `eras` | what is counted, by the plugin that served meanwhile |
//! | `used` | ids that have served |
//! | `info` | a plan, as it travels |
//! | `dump` | flight records for people |

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, RwLock};
use std::time::{Duration, Instant};

use hw_bridge::exec::sequencer::OpError;
use hw_bridge::group::RankState;
use hw_bridge::os::patience::{Wait, passed};

use crate::error::Error;
use crate::plane::ask::{Answer, Ask, ControlPlane};
use crate::plane::doors::Inside;
use crate::plane::here::Here;
use crate::plane::host::{Host, bad};
use crate::plane::join::{Joined, Joining, Place};
use crate::plane::roster::Held;
use crate::turns::Turns;
use enc::table::Criteria;
use sandbox::abort::AbortToken;
use sandbox::bindings::exports::neuron::nccom::collectives::CommInfo;
use sandbox::lifecycle::Checkpoint;
use sandbox::limits::FREE_PATIENCE;
use sandbox::objects::{ClientProcess, CommCore};
use sandbox::status::Status;
use sandbox::store::{Library, Patience};

pub(crate) mod ask;
pub(crate) mod doors;
mod dump;
pub(crate) mod eras;
pub(crate) mod here;
pub(crate) mod host;
mod info;
pub(crate) mod join;
pub(crate) mod roster;
#[cfg(test)]
mod tests;
mod used;

/// A wait that has no end by its caller's word ends all the same.
const ENDLESS: Duration = Duration::from_secs(365 * 86_400);

/// What the library planned for this rank, checked.
#[derive(Debug)]
pub(crate) struct Plan {
    pub info: CommInfo,
    /// Each in ring order from rank 0.
    pub rings: Arc<Vec<Vec<usize>>>,
}

#[derive(Debug)]
pub(crate) struct Plane {
    host: Arc<Host>,
    pub(crate) core: Arc<CommCore>,
    /// The core it runs on.
    logical_core: i32,
    /// Who answers its control calls.
    control: RwLock<Arc<dyn ControlPlane>>,
    /// What the plugin last said of its plan, for an instance in the place of one that stopped.
    checkpoint: Turns<Option<Checkpoint>>,
    plan: RwLock<Arc<Plan>>,
    /// Every pair is connected.
    expanded: AtomicBool,
    /// Who connects them, or looks whether somebody has.
    expanding: Turns<()>,
    /// Whether all ranks can read one another's private memory; agreed once, when every pair is linked.
    direct: OnceLock<bool>,
    /// The flight records of the first failure were written.
    dumped: AtomicBool,
    /// Nobody uses it any more.
    left: AtomicBool,
}

/// A use of a control plane.
#[derive(Debug)]
pub(crate) struct Seat(Arc<Plane>);

impl Seat {
    /// Has a rank join a group, by the library here, for `client` if this is a service, or by the service; the swaps to come
    /// know its plane. A swap waits for who is inside, which lasts until what is answered last is dropped.
    ///
    /// # Errors
    /// The library's and the service's; [`Error::Frozen`]; [`Error::Group`] if a swap did not wait and put another library in
    /// the place of the one that joined, of which the peers read too.
    pub(crate) fn join<'a>(
        host: &'a Arc<Host>,
        joining: &Joining,
        abort: &AbortToken,
        client: Option<ClientProcess>,
    ) -> Result<(Arc<Seat>, Place, Inside<'a>), Error> {
        const ENTRY: &str = "neuronInitComm";
        let patience = host.tenant.limits.entry;
        let inside = host.doors.enter(ENTRY, patience)?;
        let Joined { control, core, info, place } = match &host.service {
            Some(service) => service.join(host, joining, abort)?,
            None => Here::join(host, joining, abort, client)?,
        };
        let seat = Seat(Arc::new(Plane {
            host: host.clone(),
            core,
            logical_core: place.core,
            control: RwLock::new(control),
            checkpoint: Turns::default(),
            plan: RwLock::new(Arc::new(Plan { info, rings: Arc::default() })),
            expanded: AtomicBool::new(false),
            expanding: Turns::default(),
            direct: OnceLock::new(),
            dumped: AtomicBool::new(false),
            left: AtomicBool::new(false),
        }));
        // A swap that goes on without this call has listed the planes to move.
        host.doors.settle(ENTRY, patience, || seat.register())??;
        Ok((Arc::new(seat), place, inside))
    }

    /// Has the swaps to come know it.
    fn register(&self) -> Result<(), Error> {
        let Plane { host, core, .. } = &**self;
        if let Some(here) = self.who().here() {
            let joined = here.instance.library();
            if !host.forward.loaded().is_ok_and(|now| Arc::ptr_eq(&now.library, joined)) {
                let what = format!(
                    "rank {} made no communicator: a hot swap (--force) has replaced plugin {}, with which it joined; all \
                     ranks are to join again",
                    core.rank, joined.name
                );
                core.endpoint.fail(&what, None);
                return Err(Error::Group { what, status: Status::FAILURE });
            }
        }
        host.roster.register(&self.0);
        Ok(())
    }
}

impl Deref for Seat {
    type Target = Plane;

    fn deref(&self) -> &Plane {
        &self.0
    }
}

impl Plane {
    fn who(&self) -> Arc<dyn ControlPlane> {
        self.control.read().unwrap_or_else(|p| p.into_inner()).clone()
    }

    /// The instance, and its handle of the communicator.
    ///
    /// # Errors
    /// [`Error::Usage`] if it is in another process.
    pub(crate) fn control(&self) -> Result<Held, Error> {
        match self.who().here() {
            Some(here) => Ok((here.instance.clone(), here.handle)),
            None => Err(Error::Usage("the library of this communicator is the service's".into())),
        }
    }

    /// Nobody uses it any more: its rank has left, or is about to.
    pub(crate) fn left(&self) -> bool {
        self.left.load(Ordering::Acquire)
    }

    pub(crate) fn core(&self) -> &Arc<CommCore> {
        &self.core
    }

    pub(crate) fn logical_core(&self) -> i32 {
        self.logical_core
    }

    pub(crate) fn plan(&self) -> Arc<Plan> {
        self.plan.read().unwrap_or_else(|p| p.into_inner()).clone()
    }

    /// Checks what a library planned for this rank.
    ///
    /// # Errors
    /// [`Error::Usage`] for rings that cannot be.
    pub(crate) fn check_plan(&self, info: CommInfo) -> Result<Plan, Error> {
        let rings = Arc::new(check_rings(&info, self.core.rank, self.core.nranks)?);
        Ok(Plan { info, rings })
    }

    /// Which library serves: what it planned is another one's after a swap that did not wait.
    pub(crate) fn serves(&self) -> Option<Arc<Library>> {
        self.who().here().map(|here| here.instance.library().clone())
    }

    /// Goes by the plan that the library `serves` has made in `entry`: a graph, which stays.
    ///
    /// # Errors
    /// [`Error::Usage`] for other rings than before; [`Error::Group`] if a swap did not wait and put another library in the place
    /// of that one, of which the peers read too.
    pub(crate) fn take_over(
        &self,
        entry: &'static str,
        serves: &Option<Arc<Library>>,
        plan: Plan,
    ) -> Result<(), Error> {
        let rank = self.core.rank;
        self.host.doors.settle(entry, self.host.tenant.limits.entry, || {
            let same = |a: &Arc<Library>, b: &Arc<Library>| Arc::ptr_eq(a, b);
            if !serves.iter().zip(&self.serves()).all(|(a, b)| same(a, b)) {
                let what = format!(
                    "rank {rank} has no rings: a hot swap (--force) has replaced the plugin that planned them; all ranks are to \
                     join again"
                );
                self.core.endpoint.fail(&what, None);
                return Err(Error::Group { what, status: Status::FAILURE });
            }
            let before = self.plan();
            if !before.rings.is_empty() && before.rings != plan.rings {
                return Err(bad(format!(
                    "the plugin planned other rings for rank {rank} than before; a graph that is built stays, and so do its rings"
                )));
            }
            self.set_plan(Arc::new(plan));
            Ok(())
        })?
    }

    /// Goes by a plan from now on; no operation is under way.
    pub(crate) fn set_plan(&self, plan: Arc<Plan>) {
        *self.plan.write().unwrap_or_else(|p| p.into_inner()) = plan;
    }

    /// What tells plans apart that operations cannot be done by together.
    pub(crate) fn digest(&self, plan: &Plan) -> u32 {
        let ranks = plan.rings.iter().flat_map(|r| r.iter().map(|r| *r as u32 + 1).chain([0]));
        // Ranks with different choice tables would not agree later on: they notice at once too.
        let table = self.host.config.table.as_ref().map_or(0, |t| t.digest());
        ranks.fold(0x811c_9dc5u32 ^ table, |d, r| (d ^ r).wrapping_mul(16_777_619))
    }

    pub(crate) fn set_control(&self, (instance, handle): Held) {
        let here = Here { host: self.host.clone(), instance, handle };
        *self.control.write().unwrap_or_else(|p| p.into_inner()) = Arc::new(here);
    }

    /// Passes the doors for a call with this patience: no swap comes until what is answered is dropped.
    ///
    /// # Errors
    /// [`Error::Frozen`].
    pub(crate) fn enter(&self, entry: &'static str, patience: Patience) -> Result<Inside<'_>, Error> {
        let most = patience.until().map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()));
        self.host.doors.enter(entry, most.min(self.host.tenant.limits.entry))
    }

    /// Makes a control call.
    pub(crate) fn ask(&self, ask: Ask, patience: Patience) -> Result<Answer, Error> {
        if hw_bridge::os::fork::in_child() {
            return Err(Error::Forked { what: format!("the communicator of rank {}", self.core.rank) });
        }
        // Which are no calls: neither a swap nor another call is waited for.
        let who = self.who();
        match (&ask, who.here()) {
            (Ask::Stopped, Some(here)) => return here.ask(ask, patience),
            (Ask::Invite | Ask::Link { .. }, None) => return who.ask(ask, patience),
            (Ask::Invite, Some(_)) => {
                let invitation = self.core.invite().map_err(|e| Error::Limit(e.to_string()))?;
                return Ok(Answer::Bytes(invitation.to_vec()));
            }
            (Ask::Link { peer, invitation }, Some(_)) => {
                let until = patience.until().unwrap_or_else(|| Instant::now() + self.host.tenant.limits.entry);
                let (rank, peer) = (self.core.rank, *peer);
                self.core.link_invited(peer, invitation, until).map_err(|source| Error::Link { rank, peer, source })?;
                return Ok(Answer::Done);
            }
            _ => {}
        }
        const ENTRY: &str = "an entry of the library";
        let begun = Instant::now();
        let _inside = self.enter(ENTRY, patience)?;
        let serves = self.serving(ENTRY, patience, begun)?;
        let answer = serves.ask(ask, patience.resumed(begun));
        self.core.endpoint.control().set_component_calls(self.host.component_calls());
        answer
    }

    /// Who is to be called, for a call of `entry` with this patience that began at `begun`. An instance that has stopped is
    /// replaced by a new one with the plan of the last checkpoint, or without if the checkpoint is what stopped it, as often as
    /// the tenant's limits allow; of a plugin without checkpoints it stays, and answers what stopped it. Bootstrap connections
    /// ended with the old one.
    fn serving(&self, entry: &'static str, patience: Patience, begun: Instant) -> Result<Arc<dyn ControlPlane>, Error> {
        let stopped = |who: &Arc<dyn ControlPlane>| who.here().filter(|h| h.instance.stopped().is_some()).cloned();
        let who = self.who();
        // One that stops in its probation gives way to the plugin before.
        let Some(old) = stopped(&who).filter(|_| self.host.roster.probation().is_none()) else { return Ok(who) };
        // One at a time: who waited finds the new one.
        let longest = self.host.tenant.limits.entry;
        let mut wait = Wait::until(patience.until().into_iter().fold(begun + longest, Instant::min)).since(begun);
        let checkpoint = self.checkpoint.enter(&mut wait).ok_or_else(|| old.instance.late(entry, begun))?;
        let who = self.who();
        let (Some(checkpoint), Some(old)) = (&*checkpoint, stopped(&who)) else { return Ok(who) };
        let (instance, handle) = checkpoint.restore(&old.instance, &self.core, entry, patience, begun)?;
        let mut control = self.control.write().unwrap_or_else(|p| p.into_inner());
        // A swap that did not wait for this call has put another one there.
        if control.here().is_some_and(|now| Arc::ptr_eq(&now.instance, &old.instance)) {
            *control = Arc::new(Here { host: self.host.clone(), instance, handle });
        }
        Ok(control.clone())
    }

    /// Keeps the plan that the plugin has now, if it hands it out. A service does so by itself.
    pub(crate) fn keep_checkpoint(&self, patience: Patience) {
        while let Some(here) = self.who().here() {
            // Whoever restores one has it; what that one keeps is as good.
            let Some(mut kept) = self.checkpoint.enter(&mut Wait::until(Instant::now())) else { return };
            *kept = Checkpoint::take((&*here.instance, here.handle), patience).unwrap_or_else(|(why, without)| {
                let (tenant, comm) = (&self.host.tenant, self.core.id);
                if tenant.may_log() {
                    tracing::warn!(tenant = %tenant.name, comm, "no plan is kept for a restart of the plugin: {why}");
                }
                self.host.roster.lost_checkpoint();
                without
            });
            drop(kept);
            // A swap that did not wait for this call has put another one there, and found it taken.
            if self.control().is_ok_and(|(now, _)| Arc::ptr_eq(&now, &here.instance)) {
                return;
            }
        }
    }

    /// Gathers one block of every rank over the bootstrap.
    pub(crate) fn all_gather(&self, block: &[u8], patience: Patience) -> Result<Vec<u8>, Error> {
        match self.ask(Ask::AllGather { block: block.to_vec() }, patience)? {
            Answer::Bytes(all) => Ok(all),
            other => Err(other.unexpected("gathered blocks")),
        }
    }

    /// Leaves the flight records of the first failure that broke the communicator where the user wants them.
    #[cold]
    pub(crate) fn dump_once(&self, error: &OpError) {
        let refused = matches!(
            error,
            OpError::Buffer { .. } | OpError::Memory { .. } | OpError::WrongCore { .. } | OpError::Forked { .. }
        );
        if !refused && !self.dumped.swap(true, Ordering::AcqRel) {
            dump::write(&self.core, self.host.config.flight_dir.as_deref(), error);
        }
    }

    /// Has the library connect every pair, once, within the deadline of the operation `what` that needs it.
    pub(crate) fn expand_connectivity(&self, what: &'static str, timeout: Duration) -> Result<(), Error> {
        // A deadline beyond what the clock can say is none. It runs while another stream connects as well.
        let since = Instant::now();
        let until = since.checked_add(timeout);
        if self.expanded.load(Ordering::Acquire) {
            return Ok(self.core.endpoint.usable()?);
        }
        // Before its turn: a swap waits for who is inside, and who is inside may wait for his turn.
        let _inside = self.host.doors.enter(what, timeout)?;
        let mut wait = Wait::until(until.unwrap_or(since + ENDLESS)).since(since);
        let Some(_turn) = self.expanding.enter(&mut wait) else {
            let busy = "another stream of this rank is still connecting them".to_string();
            let source = Box::new(Error::Group { what: busy, status: Status::TIMEOUT });
            return Err(Error::Connecting { what, rank: self.core.rank, after: timeout, own: true, source });
        };
        let endpoint = &self.core.endpoint;
        // Whoever had his turn before may have broken the communicator.
        endpoint.usable()?;
        if self.expanded.load(Ordering::Acquire) {
            return Ok(());
        }
        if let Err(told) = self.heed_peers() {
            // Ranks that are linked to others wait for this one in there: the library hands on what it can hear without a wait.
            let _ = self.ask(Ask::Expand, Patience::Operation(Instant::now()));
            return Err(told);
        }
        // Each call has a clock of its own, which knows nothing of a stop in the one before.
        let patience = || Patience::operation(until).resumed(since);
        let connected = self
            .ask(Ask::Expand, patience())
            .and_then(|_| self.check_members())
            .and_then(|()| self.agree_on_direct(patience()));
        connected.map_err(|e| {
            let own = until.is_some_and(|until| passed(until, since));
            // Whoever hears that another rank's time is up has the same error, a little earlier.
            if own || e.status() == Status::TIMEOUT {
                Error::Connecting { what, rank: self.core.rank, after: timeout, own, source: Box::new(e) }
            } else {
                e
            }
        })?;
        self.expanded.store(true, Ordering::Release);
        self.keep_checkpoint(Patience::Usual);
        Ok(())
    }

    /// Fails with what a linked rank has said that gave up; its connections would not say it.
    fn heed_peers(&self) -> Result<(), Error> {
        let endpoint = &self.core.endpoint;
        let mut said = endpoint.peer_controls().map(|c| (c.state(), c.dead_rank()));
        if let Some(((_, why), dead)) = said.find(|((state, _), _)| *state == RankState::Failed) {
            endpoint.fail(&why, dead);
            endpoint.usable()?;
        }
        Ok(())
    }

    /// Refuses a communicator with a rank that took no part in the swap which is in probation here: going back would leave that
    /// rank behind. The peers read why.
    ///
    /// # Errors
    /// [`Error::Group`].
    pub(crate) fn check_members(&self) -> Result<(), Error> {
        let (core, endpoint) = (&self.core, &self.core.endpoint);
        // Its peers are clients of this service too.
        if core.is_clients() {
            return Ok(());
        }
        let Some((left, (peer, pid))) = self.host.roster.outsider(endpoint.peer_pids()) else { return Ok(()) };
        let what = format!(
            "rank {} made no communicator with rank {peer}: its process (pid {pid}) took no part in the hot swap of tenant {} that is \
             in probation for another {left:?}, and could not go back with the others; join again after that",
            core.rank, self.host.tenant.name
        );
        endpoint.fail(&what, None);
        Err(Error::Group { what, status: Status::FAILURE })
    }

    /// Settles whether the ranks read one another's private memory: only if each can read all others and is allowed to. Every
    /// rank calls it, at the same point, when it is linked to all.
    pub(crate) fn agree_on_direct(&self, patience: Patience) -> Result<(), Error> {
        let (rank, n) = (self.core.rank, self.core.nranks);
        if n == 1 || self.direct.get().is_some() {
            return Ok(());
        }
        let allowed = if self.host.config.direct { Ok(()) } else { Err("it is switched off here".to_string()) };
        let can = allowed.and_then(|()| self.core.endpoint.reads_private());
        if let Err(why) = &can {
            tracing::info!("private memory is staged in communicator {}: rank {rank} says: {why}", self.core.id);
        }
        let mine = [u8::from(can.is_ok())];
        let all = self.all_gather(&mine, patience).or_else(|e| self.heed_peers().and(Err(e)))?;
        // A plugin's answer is an allegation. Ranks that it gives different ones differ in their op headers.
        self.direct.get_or_init(|| all.len() == n && all.iter().all(|can| *can == 1));
        Ok(())
    }

    /// What the choice of algorithms goes by.
    pub(crate) fn criteria(&self) -> Criteria<'_> {
        Criteria { direct: self.direct.get() == Some(&true), ..self.host.config.criteria() }
    }

    /// Whether linking the ring neighbours links all: with three ranks everybody is one.
    pub(crate) fn linked_by_rings(&self) -> bool {
        self.core.nranks <= 3
    }

    /// Has the library connect what is more than ring neighbours, once (INV-81). The exchange needs every rank, so all decide
    /// alike: by the size alone, never by what this rank happens to be linked to. Whichever stream needs it first does it;
    /// the others wait.
    pub(crate) fn connect_all(&self, what: &'static str, timeout: Duration) -> Result<(), Error> {
        if self.linked_by_rings() { Ok(()) } else { self.expand_connectivity(what, timeout) }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if hw_bridge::os::fork::in_child() {
            // The parent's threads, locks and sockets are behind it; a child lets them be.
            std::mem::forget(self.0.clone());
            return;
        }
        let plane = &self.0;
        plane.left.store(true, Ordering::Release);
        plane.core.endpoint.close();
        plane.host.roster.leave(plane.core.id);
        let doors = &plane.host.doors;
        let inside = doors.enter("neuronFreeComm", plane.host.tenant.limits.entry);
        // A plugin that does not come back from it is stopped.
        let patience = Patience::host(Instant::now().checked_add(FREE_PATIENCE));
        if let Err(e) = inside.and_then(|_inside| plane.who().free(patience)) {
            tracing::debug!("freeing communicator {}: {e}", plane.core.id);
        }
    }
}

/// Takes the planned rings over: each must hold every rank once, and fit its own neighbours. A plugin's plan is an
/// allegation; a wrong one is refused here and not found later as a hang. Rotated to begin with rank 0, so that all
/// ranks count positions alike.
fn check_rings(info: &CommInfo, rank: usize, n: usize) -> Result<Vec<Vec<usize>>, Error> {
    let wrong = |i: usize, what: String| bad(format!("the plugin planned ring {i} of rank {rank} wrongly: {what}"));
    let mut rings = Vec::new();
    for (i, ring) in info.rings.iter().enumerate() {
        let order: Vec<usize> = ring.user_ranks.iter().filter_map(|r| usize::try_from(*r).ok()).collect();
        let mut sorted = order.clone();
        sorted.sort_unstable();
        // What is no rank at all is in neither.
        if order.len() != ring.user_ranks.len() || sorted != (0..n).collect::<Vec<_>>() {
            return Err(wrong(i, format!("{:?} is not every rank of {n} once", ring.user_ranks)));
        }
        if order[0] != rank {
            return Err(wrong(i, format!("{:?} does not begin with this rank", ring.user_ranks)));
        }
        if ring.next != order[1 % n] as i32 || ring.prev != order[n - 1] as i32 {
            return Err(wrong(
                i,
                format!("neighbours {} and {} do not fit {:?}", ring.prev, ring.next, ring.user_ranks),
            ));
        }
        let zero = order.iter().position(|r| *r == 0).unwrap_or(0);
        rings.push(order[zero..].iter().chain(&order[..zero]).copied().collect());
    }
    Ok(rings)
}
