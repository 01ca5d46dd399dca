//! The control plane of a communicator: the instance of the library that plans for this rank, shared by the communicator
//! and its streams, or by a client of the service. An instance may be exchanged under them ([`crate::swap`]).
//!
//! Its users, communicator and streams, share a [`Seat`]. With the last of them the rank leaves: peers learn it at once, also
//! while a swap still holds the plane; then the library gets its free call.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, RwLock};
use std::time::{Duration, Instant};

use hw_bridge::exec::sequencer::OpError;
use hw_bridge::group::RankState;
use hw_bridge::os::patience::{Wait, passed};

use crate::nrt::communicator::bad;
use crate::nrt::control::{Answer, Ask, Control, Here, Joined, Joining, Patience, Place};
use crate::nrt::dump;
use crate::nrt::runtime::Runtime;
use crate::swap::doors::Inside;
use crate::turns::Turns;
use enc::table::Policy;
use sandbox::abort::AbortToken;
use sandbox::bindings::exports::neuron::nccom::collectives::CommInfo;
use sandbox::error::Error;
use sandbox::lifecycle::Checkpoint;
use sandbox::limits::FREE_PATIENCE;
use sandbox::objects::{Client, CommCore};
use sandbox::status::Status;
use sandbox::store::{Instance, bounded};

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
    pub(super) runtime: Runtime,
    pub(crate) core: Arc<CommCore>,
    /// The core it runs on.
    logical_core: i32,
    /// Who answers its control calls.
    control: RwLock<Control>,
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
        runtime: &'a Runtime,
        joining: &Joining,
        abort: &AbortToken,
        client: Option<Client>,
    ) -> Result<(Arc<Seat>, Place, Inside<'a>), Error> {
        const ENTRY: &str = "neuronInitComm";
        let (inner, patience) = (&runtime.0, runtime.0.tenant.limits.entry);
        let inside = inner.doors.enter(ENTRY, patience)?;
        let Joined { control, core, info, place } = match &inner.service {
            Some(service) => service.join(runtime, joining, abort)?,
            None => Here::join(runtime, joining, abort, client)?,
        };
        let seat = Seat(Arc::new(Plane {
            runtime: runtime.clone(),
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
        inner.doors.settle(ENTRY, patience, || seat.register())??;
        Ok((Arc::new(seat), place, inside))
    }

    /// Has the swaps to come know it.
    fn register(&self) -> Result<(), Error> {
        let Plane { runtime, core, .. } = &**self;
        if let Control::Here(here) = self.who() {
            let joined = here.instance.library();
            if !runtime.0.forward.loaded().is_ok_and(|now| Arc::ptr_eq(&now.library, joined)) {
                let what = format!(
                    "rank {} made no communicator: a hot swap (--force) has replaced plugin {}, with which it joined; all \
                     ranks are to join again",
                    core.rank, joined.name
                );
                core.endpoint.fail(&what);
                return Err(Error::Group { what, status: Status::FAILURE });
            }
        }
        runtime.0.swaps.register(&self.0);
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
    fn who(&self) -> Control {
        self.control.read().unwrap_or_else(|p| p.into_inner()).clone()
    }

    /// The instance, and its handle of the communicator.
    ///
    /// # Errors
    /// [`Error::Usage`] if it is in another process.
    pub(crate) fn control(&self) -> Result<(Arc<Instance>, u32), Error> {
        match self.who() {
            Control::Here(here) => Ok((here.instance, here.handle)),
            Control::Served(_) => Err(Error::Usage("the library of this communicator is the service's".into())),
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

    /// Goes by a plan from now on; no operation is under way.
    pub(crate) fn set_plan(&self, plan: Arc<Plan>) {
        *self.plan.write().unwrap_or_else(|p| p.into_inner()) = plan;
    }

    /// What tells plans apart that operations cannot be done by together.
    pub(crate) fn digest(&self, plan: &Plan) -> u32 {
        let ranks = plan.rings.iter().flat_map(|r| r.iter().map(|r| *r as u32 + 1).chain([0]));
        // Ranks with different choice tables would not agree later on: they notice at once too.
        let table = self.runtime.0.config.table.as_ref().map_or(0, |t| t.digest());
        ranks.fold(0x811c_9dc5u32 ^ table, |d, r| (d ^ r).wrapping_mul(16_777_619))
    }

    pub(crate) fn set_control(&self, instance: Arc<Instance>, handle: u32) {
        let here = Here { runtime: self.runtime.clone(), instance, handle };
        *self.control.write().unwrap_or_else(|p| p.into_inner()) = Control::Here(here);
    }

    /// Passes the doors for a call with this patience: no swap comes until what is answered is dropped.
    ///
    /// # Errors
    /// [`Error::Frozen`].
    pub(crate) fn enter(&self, entry: &'static str, patience: Patience) -> Result<Inside<'_>, Error> {
        let inner = &self.runtime.0;
        let most = patience.until().map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()));
        inner.doors.enter(entry, most.min(inner.tenant.limits.entry))
    }

    /// Makes a control call.
    pub(crate) fn ask(&self, ask: Ask, patience: Patience) -> Result<Answer, Error> {
        if hw_bridge::os::fork::in_child() {
            return Err(Error::Forked { what: format!("the communicator of rank {}", self.core.rank) });
        }
        // Which is no call.
        if let (Ask::Stopped, Control::Here(here)) = (&ask, self.who()) {
            return here.ask(ask, patience);
        }
        const ENTRY: &str = "an entry of the library";
        let begun = Instant::now();
        let _inside = self.enter(ENTRY, patience)?;
        let serves = self.serving(ENTRY, patience.until(), begun)?;
        let answer = serves.ask(ask, patience.resumed(begun));
        self.core.endpoint.control().set_component_calls(self.runtime.component_calls());
        answer
    }

    /// Who is to be called, for a call of `entry` that began at `begun` and is over at `until`. An instance that has stopped is
    /// replaced by a new one with the plan of the last checkpoint, or without if the checkpoint is what stopped it, as often as
    /// the tenant's limits allow; of a plugin without checkpoints it stays, and answers what stopped it. Bootstrap connections
    /// ended with the old one.
    fn serving(&self, entry: &'static str, until: Option<Instant>, begun: Instant) -> Result<Control, Error> {
        let has_stopped = |who: &Control| matches!(who, Control::Here(here) if here.instance.stopped().is_some());
        let who = self.who();
        // One that stops in its probation gives way to the plugin before.
        if !has_stopped(&who) || self.runtime.0.swaps.on_probation() {
            return Ok(who);
        }
        let Control::Here(old) = &who else { return Ok(who) };
        // One at a time: who waited finds the new one.
        let longest = self.runtime.0.tenant.limits.entry;
        let mut wait = Wait::until(until.into_iter().fold(begun + longest, Instant::min)).since(begun);
        let late = || old.instance.late(entry, begun);
        let checkpoint = self.checkpoint.enter(&mut wait).ok_or_else(late)?;
        let who = self.who();
        let (Some(checkpoint), Control::Here(here), true) = (&*checkpoint, &who, has_stopped(&who)) else {
            return Ok(who);
        };
        let (instance, handle) = checkpoint.restore(&here.instance, &self.core, entry, until, begun)?;
        let made = Control::Here(Here { runtime: self.runtime.clone(), instance, handle });
        let mut control = self.control.write().unwrap_or_else(|p| p.into_inner());
        // A swap that did not wait for this call has put another one there.
        if matches!(&*control, Control::Here(now) if Arc::ptr_eq(&now.instance, &here.instance)) {
            *control = made;
        }
        Ok(control.clone())
    }

    /// Keeps the plan that the plugin has now, if it hands it out, until `until` at the latest. A service does so by itself.
    pub(crate) fn keep_checkpoint(&self, until: Option<Instant>) {
        while let Control::Here(here) = self.who() {
            // Whoever restores one has it; what that one keeps is as good.
            let Some(mut kept) = self.checkpoint.enter(&mut Wait::until(Instant::now())) else { return };
            *kept = Checkpoint::take((&*here.instance, here.handle), until).unwrap_or_else(|(why, without)| {
                let (tenant, comm) = (&self.runtime.0.tenant, self.core.id);
                if tenant.may_log() {
                    tracing::warn!(tenant = %tenant.name, comm, "no plan is kept for a restart of the plugin: {why}");
                }
                self.runtime.0.swaps.lost_checkpoint();
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
    pub(super) fn all_gather(&self, block: &[u8], patience: Patience) -> Result<Vec<u8>, Error> {
        match self.ask(Ask::AllGather { block: block.to_vec() }, patience)? {
            Answer::Bytes(all) => Ok(all),
            other => Err(other.unexpected("gathered blocks")),
        }
    }

    /// Leaves the flight records of the first failure that broke the communicator where the user wants them.
    #[cold]
    pub(super) fn dump_once(&self, error: &OpError) {
        let refused = matches!(
            error,
            OpError::Buffer { .. } | OpError::Memory { .. } | OpError::WrongCore { .. } | OpError::Forked { .. }
        );
        if !refused && !self.dumped.swap(true, Ordering::AcqRel) {
            dump::write(&self.core, self.runtime.0.config.flight_dir.as_deref(), error);
        }
    }

    /// Has the library connect every pair, once, within the deadline of the operation `what` that needs it.
    pub(super) fn expand_connectivity(&self, what: &'static str, timeout: Duration) -> Result<(), Error> {
        // A deadline beyond what the clock can say is none. It runs while another stream connects as well.
        let since = Instant::now();
        let until = since.checked_add(timeout);
        if self.expanded.load(Ordering::Acquire) {
            return Ok(self.core.endpoint.usable()?);
        }
        // Before its turn: a swap waits for who is inside, and who is inside may wait for his turn.
        let _inside = self.runtime.0.doors.enter(what, timeout)?;
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
        self.keep_checkpoint(None);
        Ok(())
    }

    /// Fails with what a linked rank has said that gave up; its connections would not say it.
    fn heed_peers(&self) -> Result<(), Error> {
        let endpoint = &self.core.endpoint;
        let failed = endpoint.peer_controls().map(|c| c.state()).find(|(state, _)| *state == RankState::Failed);
        if let Some((_, why)) = failed {
            endpoint.fail(&why);
            endpoint.usable()?;
        }
        Ok(())
    }

    /// Refuses a communicator with a rank that took no part in the swap which is in probation here: going back would leave that
    /// rank behind. The peers read why.
    ///
    /// # Errors
    /// [`Error::Group`].
    pub(super) fn check_members(&self) -> Result<(), Error> {
        let (core, endpoint) = (&self.core, &self.core.endpoint);
        // Its peers are clients of this service too.
        if core.is_clients() {
            return Ok(());
        }
        let Some((left, (peer, pid))) = self.runtime.0.swaps.outsider(endpoint.peer_pids()) else { return Ok(()) };
        let what = format!(
            "rank {} made no communicator with rank {peer}: its process (pid {pid}) took no part in the hot swap of tenant {} that is \
             in probation for another {left:?}, and could not go back with the others; join again after that",
            core.rank, self.runtime.0.tenant.name
        );
        endpoint.fail(&what);
        Err(Error::Group { what, status: Status::FAILURE })
    }

    /// Settles whether the ranks read one another's private memory: only if each can read all others and is allowed to. Every
    /// rank calls it, at the same point, when it is linked to all.
    pub(super) fn agree_on_direct(&self, patience: Patience) -> Result<(), Error> {
        let (rank, n) = (self.core.rank, self.core.nranks);
        if n == 1 || self.direct.get().is_some() {
            return Ok(());
        }
        let allowed = if self.runtime.0.config.direct { Ok(()) } else { Err("it is switched off here".to_string()) };
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
    pub(super) fn policy(&self) -> Policy<'_> {
        Policy { direct: self.direct.get() == Some(&true), ..self.runtime.0.config.policy() }
    }

    /// Whether linking the ring neighbours links all: with three ranks everybody is one.
    pub(super) fn linked_by_rings(&self) -> bool {
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
        plane.runtime.0.swaps.leave(plane.core.id);
        let doors = &plane.runtime.0.doors;
        let inside = doors.enter("neuronFreeComm", plane.runtime.0.tenant.limits.entry);
        // A plugin that does not come back from it is stopped.
        let until = Instant::now().checked_add(FREE_PATIENCE);
        if let Err(e) = inside.and_then(|_inside| bounded(until, || plane.who().free())) {
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

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use crate::nrt::{Rendezvous, RuntimeConfig};
    use crate::swap::Swaps;
    use sandbox::key::GroupKey;

    /// A group of one rank.
    fn group_of_one(runtime: &Runtime) -> Joining {
        // A key, as an id, is of one group.
        let key = GroupKey::of_id(&sandbox::id::draw().unwrap(), 0);
        Joining { rendezvous: Rendezvous::Id(runtime.start_root(1, key).unwrap()), key, rank: 0, nranks: 1, on: None }
    }

    /// A runtime with the plugin that `cargo xtask guests` builds, and a group of one rank.
    fn alone() -> (Runtime, Joining) {
        let mut c = RuntimeConfig { control: false, hbm_bytes: 1 << 20, ..RuntimeConfig::default() };
        c.vars.insert("CCOM_SOCKET_IFNAME".into(), "lo".into());
        c.limits.entry = Duration::from_secs(20);
        let runtime = Runtime::open(c).unwrap();
        let joining = group_of_one(&runtime);
        (runtime, joining)
    }

    #[test]
    fn a_call_waits_at_shut_doors_no_longer_than_its_deadline() {
        let (runtime, joining) = alone();
        let (seat, ..) = Seat::join(&runtime, &joining, &AbortToken::new().unwrap(), None).unwrap();
        let _shut = runtime.0.doors.shut(Instant::now() + FREE_PATIENCE, false).unwrap();
        for patience in [Patience::Waits, Patience::Operation] {
            match seat.ask(Ask::Info, patience(Instant::now() + Duration::from_millis(20))).unwrap_err() {
                Error::Frozen { waited, .. } => assert!(waited < runtime.0.tenant.limits.entry, "{waited:?}"),
                e => panic!("{e}"),
            }
        }
    }

    /// Nor does it wait longer for another call, or change what that one waits for.
    #[test]
    fn a_call_waits_behind_another_no_longer_than_its_deadline() {
        let (runtime, joining) = alone();
        let (seat, ..) = Seat::join(&runtime, &joining, &AbortToken::new().unwrap(), None).unwrap();
        let (instance, _) = seat.control().unwrap();
        let (inside, entered) = std::sync::mpsc::channel();
        let (done, asked) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|s| {
            s.spawn(|| {
                let waits = move |_: &mut _, _| {
                    inside.send(()).unwrap();
                    // It ends all the same if it is waited for.
                    let _ = asked.recv_timeout(Duration::from_secs(10));
                    Ok(())
                };
                instance.with("slow", waits).unwrap();
            });
            entered.recv().unwrap();
            for patience in [Patience::Waits, Patience::Operation] {
                match seat.ask(Ask::Info, patience(Instant::now() + Duration::from_millis(20))) {
                    Err(Error::Busy { inside: "slow", .. }) => {}
                    other => panic!("{other:?}"),
                }
            }
            let _ = done.send(());
        });
        seat.ask(Ask::Info, Patience::Usual).unwrap();
    }

    /// Stops the instance as a trap would.
    fn stop(seat: &Seat) {
        let (instance, _) = seat.control().unwrap();
        instance.with("trap", |_, _| Err::<(), _>(std::io::Error::other("a trap").into())).unwrap_err();
    }

    /// Neither for the restart itself, nor for another caller's.
    #[test]
    fn a_call_waits_for_a_restart_no_longer_than_its_deadline() {
        let (runtime, joining) = alone();
        let (seat, ..) = Seat::join(&runtime, &joining, &AbortToken::new().unwrap(), None).unwrap();
        seat.keep_checkpoint(None);
        stop(&seat);
        std::thread::sleep(runtime.0.tenant.limits.restart_pause);
        let late = |patience: Patience| match seat.ask(Ask::Info, patience) {
            Err(Error::Busy { inside: "restart", .. }) => {}
            other => panic!("{other:?}"),
        };
        let restarts = || runtime.0.tenant.supervisor.standing()[0].restarts;
        // Which is the deadline that has passed before it begins.
        late(Patience::Operation(Instant::now()));
        assert_eq!(restarts(), 0);
        let restarting = seat.checkpoint.enter(&mut Wait::until(Instant::now())).unwrap();
        for patience in [Patience::Waits, Patience::Operation] {
            late(patience(Instant::now() + Duration::from_millis(20)));
        }
        drop(restarting);
        seat.ask(Ask::Info, Patience::Operation(Instant::now() + FREE_PATIENCE)).unwrap();
        assert_eq!(restarts(), 1);
    }

    /// Nor for another stream, which has more time.
    #[test]
    fn an_operation_waits_for_who_connects_no_longer_than_its_deadline() {
        let (runtime, joining) = alone();
        let (seat, ..) = Seat::join(&runtime, &joining, &AbortToken::new().unwrap(), None).unwrap();
        let connecting = seat.expanding.enter(&mut Wait::until(Instant::now())).unwrap();
        let e = seat.expand_connectivity("barrier", Duration::from_millis(20)).unwrap_err();
        assert!(matches!(e, Error::Connecting { own: true, .. }), "{e}");
        assert!(e.to_string().ends_with("another stream of this rank is still connecting them"), "{e}");
        drop(connecting);
        seat.expand_connectivity("barrier", Duration::from_secs(20)).unwrap();
    }

    /// A swap that does not wait for a rank that joins leaves no communicator of the library before.
    #[test]
    fn who_joined_with_a_library_that_was_replaced_meanwhile_has_no_communicator() {
        let (runtime, joining) = alone();
        let (doors, both) = (&runtime.0.doors, Barrier::new(2));
        std::thread::scope(|s| {
            let joins = s.spawn(|| {
                let _inside = doors.enter("a call", Duration::ZERO).unwrap();
                both.wait();
                both.wait();
                Seat::join(&runtime, &joining, &AbortToken::new().unwrap(), None).map(|_| ())
            });
            both.wait();
            let shut = doors.shut(Instant::now(), true).unwrap();
            both.wait();
            while runtime.tenant().communicators() == 0 && !joins.is_finished() {
                std::thread::yield_now();
            }
            let plugin = runtime.config().plugin.clone().unwrap();
            let source = sandbox::entries::read(runtime.tenant(), &plugin).unwrap();
            let new = sandbox::entries::load(runtime.tenant(), &source, &[]).unwrap();
            runtime.0.forward.replace(new).unwrap();
            drop(shut);
            let e = joins.join().unwrap().unwrap_err().to_string();
            assert!(e.contains("has replaced plugin nccom.wasm") && e.contains("are to join again"), "{e}");
        });
        assert!(Swaps::status(&runtime).ranks.is_empty());
        // Who joins again has one.
        let joining = group_of_one(&runtime);
        let _made = Seat::join(&runtime, &joining, &AbortToken::new().unwrap(), None).unwrap();
        assert_eq!(Swaps::status(&runtime).ranks, [(0, 1)]);
    }

    /// What a plugin plans is an allegation: a ring that no walk round all ranks goes by is refused before anything is moved.
    #[test]
    fn a_plan_that_is_no_ring_of_all_ranks_is_refused() {
        use sandbox::bindings::exports::neuron::nccom::collectives::RingInfo;
        let planned = |prev: i32, next: i32, user_ranks: &[i32]| {
            let ring = RingInfo { prev, next, user_ranks: user_ranks.to_vec(), duplicate: false };
            check_rings(&info_with(vec![ring]), 1, 4)
        };
        assert_eq!(planned(3, 2, &[1, 2, 0, 3]).unwrap(), [[0, 3, 1, 2]]);
        let not_each_once = "is not every rank of 4 once";
        let wrong_neighbours = "do not fit [1, 2, 0, 3]";
        for (what, ring, says) in [
            ("a rank twice", planned(3, 2, &[1, 2, 2, 3]), not_each_once),
            ("one rank twice beside all others", planned(3, 2, &[1, 2, 0, 2, 3]), not_each_once),
            ("one missing", planned(3, 2, &[1, 2, 3]), not_each_once),
            ("no rank at all", planned(1, 1, &[]), not_each_once),
            ("a rank that is none", planned(4, 2, &[1, 2, 0, 4]), not_each_once),
            ("a negative one beside all others", planned(3, 2, &[1, 2, -1, 0, 3]), not_each_once),
            ("another rank first", planned(0, 1, &[2, 1, 3, 0]), "does not begin with this rank"),
            ("another one before", planned(0, 2, &[1, 2, 0, 3]), wrong_neighbours),
            ("another one after", planned(3, 0, &[1, 2, 0, 3]), wrong_neighbours),
        ] {
            let e = ring.expect_err(what).to_string();
            assert!(e.contains("planned ring 0 of rank 1 wrongly") && e.contains(says), "{what}: {e}");
        }
        // A good one before does not help a bad one.
        let good = RingInfo { prev: 0, next: 0, user_ranks: vec![0], duplicate: false };
        let bad = RingInfo { prev: 1, ..good.clone() };
        let e = check_rings(&info_with(vec![good, bad]), 0, 1).unwrap_err().to_string();
        assert!(e.contains("planned ring 1 of rank 0 wrongly"), "{e}");
    }

    fn info_with(rings: Vec<sandbox::bindings::exports::neuron::nccom::collectives::RingInfo>) -> CommInfo {
        CommInfo {
            cluster_id: 0,
            epoch: 0,
            neuron_dev: 0,
            rank: 0,
            rank_n: 0,
            local_rank_n: 0,
            node: 0,
            node_n: 0,
            enable_pod: false,
            pod: 0,
            pod_n: 0,
            pod_node: 0,
            pod_node_n: 0,
            peers: Vec::new(),
            rings,
            kangaring_paths: Vec::new(),
            mla_cycles: Vec::new(),
        }
    }
}
