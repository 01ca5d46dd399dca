//! Messages between two ranks, without the others: `send`, `receive`, with tags, as MPI has them.
//!
//! A [`Mailbox`] is one rank's end. A message goes from one call of `send` to one call of `recv` of the rank that it is for,
//! which names the sender or any, and the tag or any. It has nothing to do with the collectives of the communicator: no lane,
//! no sequence of operations, no digest, no gate of a swap. What fails here fails alone: a deadline, a message that is too long,
//! a peer that has left end the call that met them, and the communicator is as good as before.
//!
//! **Matching.** The receives of a rank are looked through in the order in which they were posted, the messages of one sender
//! in the order in which they were sent; so of two messages of one pair that a receive would take it takes the first, and of two
//! receives that want a message the first has it (MPI-4.1, 3.5). A receive from any rank looks at the ranks in turn, from the
//! one after whose message the last one took.
//!
//! **Where things are.** All of a pair is in the control segment of the *sender*, in its outbox for the receiver
//! ([`crate::group`]): envelopes in a ring, which the sender writes and the receiver reads in order, and slots for what has a
//! payload beside. Matching is the receiver's alone, in its own memory.
//!
//! | payload | goes |
//! |---|---|
//! | up to [`ENVELOPE_BYTES`] | in the envelope: one line |
//! | up to [`EAGER_BYTES`] | in the slot: two copies, and the sender is done at once |
//! | more, in device memory | is copied by the receiver from the sender's device memory |
//! | more, in private memory | is copied by the receiver from the sender's address space ([`crate::memory::foreign`]) |
//! | the same, where that may not be | in pieces through two staging halves of the outbox, which the sender fills |
//!
//! **Bounds.** The envelopes that a receiver has not read, [`ENVELOPES`], the messages that it keeps because none of its receives
//! wants them, [`UNEXPECTED`] of a sender, and the slots, [`MAIL_SLOTS`], bound what a sender can have on its way to one rank;
//! its further messages wait on its side, in order, in the memory of its program. A receiver whose unexpected messages of a
//! sender are all there is room for does not see what comes behind one more.
//!
//! **Who decides.** A message that has a slot has a word there, which says how it stands. Only compare-and-swap changes it, and it
//! holds the number of the message, so a slot that has another one by now answers nobody:
//!
//! ```text
//!                         receiver, matched             receiver, done
//! sender, assigned -> open ---------------> taken -----------------------> done
//!                      |  ^                  |  |  receiver may not read     ^
//!                      |  | receiver gives   |  v  it where it lies          |
//!                      |  +- it back --------+- staging ---------------------+
//!                      +---------------------+--+---> withdrawn (sender)
//! ```
//!
//! A sender whose deadline passes withdraws the message, taken or not, and may use its memory again as soon as that has
//! succeeded: a receiver that is just copying finds out when it wants to say that it is done, throws away what it has, and
//! posts the receive again. A receiver whose deadline passes gives back what is staged for it; what a thread is just copying it
//! lets end. So either both ends know a message to have arrived or neither. Either way the one that is left is matched anew, at
//! its place in the order; what was matched past the pair meanwhile stays so.
//!
//! **Order of memory.** An envelope's number is stored last, with release, and loaded first, with acquire: payload, state and
//! words are there when it is. `drained` is stored with release after an envelope was read, and loaded with acquire before its
//! place is written again. The change to *done* is a release, and the sender's look an acquire: what it writes afterwards
//! into the message's memory, or into the slot, nobody reads for that message any more. `filled` and `taken` are a release each
//! by who copied, and an acquire by who copies next into, or out of, the same half. Who publishes any of these looks for a
//! sleeper after a fence, who sleeps looks once more after announcing it ([`crate::os::bell`]).
//!
//! **Progress.** Whoever waits for, or tests, one operation of a mailbox moves on all of them; nobody else does. One lock guards the
//! mailbox; it is held for matching and small copies, never for a wait or a large copy. Large copies ask for their
//! tenant's turns ([`crate::exec::share`]).
//!
//! Threads: any number, side by side; operations are in the order in which calls take the lock.

#[expect(unsafe_code, reason = "copies between the callers' memory and what ranks share")]
mod copies;
mod error;
mod matching;
mod requests;
#[cfg(test)]
mod tests;

pub use error::P2pError;
pub use requests::{Finished, Owned, Request};

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::exec::sequencer::{Endpoint, LocalMem, OpError};
use crate::group::flight::Tally;
use crate::group::{Control, Outbox};
use crate::limits::{EAGER_BYTES, ENVELOPE_BYTES, ENVELOPES, MAIL_SLOTS, MAIL_STAGE_BYTES, NAP, UNEXPECTED};
use crate::memory::foreign::Space;
use crate::memory::segment::Segment;
use crate::os::bell;
use crate::os::lock::lock;
use crate::os::patience::Wait;
use copies::Memory;
use matching::{Id, Operation, Stage, State, Withdrawn};

// The limits that the head of this file speaks of.
const _: [usize; 5] = [ENVELOPE_BYTES, EAGER_BYTES, ENVELOPES, MAIL_SLOTS, UNEXPECTED];

/// What a receive got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Who sent it.
    pub from: usize,
    /// Its tag.
    pub tag: u32,
    /// Its bytes, which lie at the begin of the buffer.
    pub len: u64,
}

/// One rank's end of its messages.
#[derive(Debug)]
pub struct Mailbox {
    endpoint: Arc<Endpoint>,
    /// This process, as a peer would read it.
    own: Space,
    /// Private memory is read where it lies, if the kernel lets it.
    direct: bool,
    state: Mutex<State>,
}

/// The other end of a pair: a linked peer, or this rank itself.
#[derive(Clone, Copy)]
struct End<'a> {
    control: &'a Control,
    hbm: &'a Segment,
    space: &'a Space,
}

impl Mailbox {
    /// The messages of `endpoint`'s rank. Without `direct` private memory is staged, as it is where the kernel refuses to have it
    /// read.
    pub fn new(endpoint: Arc<Endpoint>, direct: bool) -> Mailbox {
        let own = Space::new(std::process::id().into(), endpoint.control().mark());
        let state = Mutex::new(State::new(endpoint.nranks()));
        Mailbox { endpoint, own, direct, state }
    }

    /// The rank's data plane.
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    /// Sends `mem` to rank `to`, which may be this one. A message of up to [`EAGER_BYTES`] is sent when it is on its way, which a
    /// full outbox delays; a larger one when the receiver has it. `timeout` bounds the wait for that, from when this rank has to
    /// sleep in it, and anew as long as the receiver copies.
    ///
    /// # Errors
    /// [`P2pError`]; the message was not sent then, and no part of it is received. After [`P2pError::Timeout`] all is as
    /// before.
    pub fn send(&self, to: usize, tag: u32, mem: LocalMem<'_>, timeout: Duration) -> Result<(), P2pError> {
        let op = self.sending(to, tag, &mem)?;
        self.blocking(op, timeout).map(|_| ())
    }

    /// Receives into `mem` the next message of rank `from`, or of any that is linked, with this tag, or any. `timeout` as in
    /// [`Mailbox::send`].
    ///
    /// # Errors
    /// [`P2pError`]. After [`P2pError::Timeout`] all is as before, but for the content of `mem`; after
    /// [`P2pError::Truncated`] the message is gone.
    pub fn recv(
        &self,
        from: Option<usize>,
        tag: Option<u32>,
        mem: LocalMem<'_>,
        timeout: Duration,
    ) -> Result<Received, P2pError> {
        let op = self.receiving(from, tag, &mem)?;
        self.blocking(op, timeout)
    }

    /// What is wrong with a call before it begins.
    fn admit(&self, peer: Option<usize>, which: &'static str, mem: &LocalMem<'_>) -> Result<(), P2pError> {
        let endpoint = &self.endpoint;
        let (rank, nranks) = (endpoint.rank(), endpoint.nranks());
        if crate::os::fork::in_child() {
            let parent = endpoint.control().pid();
            return Err(OpError::Forked { rank, what: "a message".into(), parent }.into());
        }
        endpoint.usable()?;
        if let Some(peer) = peer.filter(|p| *p >= nranks) {
            return Err(P2pError::NoRank { rank, nranks, peer });
        }
        if !mem.is_of(endpoint.hbm()) {
            return Err(OpError::WrongCore { rank, which }.into());
        }
        match peer {
            Some(peer) if !endpoint.linked(peer) => Err(OpError::NotLinked { rank, peer }.into()),
            _ => Ok(()),
        }
    }

    fn sending(&self, to: usize, tag: u32, mem: &LocalMem<'_>) -> Result<Operation, P2pError> {
        self.admit(Some(to), "input", mem)?;
        // What is copied at once is; the rest asks as it goes.
        let at_once = if mem.len > EAGER_BYTES as u64 { 0 } else { mem.len };
        self.endpoint.share().begin(at_once, || self.endpoint.usable())?;
        Ok(Operation::new(true, Some(to), Some(tag), Memory::of(mem)))
    }

    fn receiving(&self, from: Option<usize>, tag: Option<u32>, mem: &LocalMem<'_>) -> Result<Operation, P2pError> {
        self.admit(from, "output", mem)?;
        if !mem.is_writable() {
            let (rank, what) = (self.endpoint.rank(), "a receive".into());
            return Err(OpError::Memory { rank, what, why: "the output is read-only memory" }.into());
        }
        self.endpoint.share().begin(mem.len.min(EAGER_BYTES as u64), || self.endpoint.usable())?;
        Ok(Operation::new(false, from, tag, Memory::of(mem)))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Begins an operation. Its memory must stay as it is until that is done, or was given up.
    fn begin(&self, op: Operation) -> Id {
        let mut st = self.state();
        let (send, peer) = (op.send, op.peer);
        let id = st.add(op);
        match (send, peer) {
            (true, Some(to)) => {
                st.outbound[to].pending.push_back(id);
                self.push(&mut st, to);
            }
            _ => self.post(&mut st, id),
        }
        self.tell(&mut st);
        id
    }

    /// An operation whose memory is the caller's, who waits.
    fn blocking(&self, op: Operation, timeout: Duration) -> Result<Received, P2pError> {
        /// Gets the memory back, however the wait ends.
        struct Held<'a>(&'a Mailbox, Id);
        impl Drop for Held<'_> {
            fn drop(&mut self) {
                self.0.give_up(self.1);
            }
        }
        let held = Held(self, self.begin(op));
        let id = held.1;
        let mut deadline = Deadline { timeout, since: None, wait: None };
        self.wait(id, || {
            self.check(id, &mut deadline);
            true
        });
        std::mem::forget(held);
        self.take(id).0
    }

    /// Waits until the operation is done, or `goes_on` says that it is enough; whether it is done.
    fn wait(&self, id: Id, mut goes_on: impl FnMut() -> bool) -> bool {
        if self.advance(id) {
            return true;
        }
        let control = self.endpoint.control();
        // The tally has one writer: who has the lock.
        let count = |what: fn(&Tally)| what((self.state(), control.mail_tally()).1);
        count(Tally::wait);
        let ready = || self.advance(id);
        let check = || {
            count(Tally::nap);
            if goes_on() { Ok(()) } else { Err(()) }
        };
        bell::wait(control.mail_bell(), self.endpoint.wait_policy(), ready, check).is_ok()
    }

    /// The result of an operation that is done, and the buffer that it owned; its place is free then.
    fn take(&self, id: Id) -> (Result<Received, P2pError>, Option<Owned>) {
        let (result, buffer) = self.state().remove(id);
        (result.expect("only who began an operation removes it, once, when it is done"), buffer)
    }

    /// Ends an operation whatever it takes, so that its memory is the caller's again: a copy that is under way is waited for,
    /// which has nobody else to wait for.
    fn give_up(&self, id: Id) {
        loop {
            let mut st = self.state();
            if self.withdraw(&mut st, id) != Withdrawn::Busy {
                st.remove(id);
                return;
            }
            drop(st);
            self.advance(id);
            std::thread::yield_now();
        }
    }

    /// Moves on whatever can be, with nothing to wait for; whether the operation is done. It comes back now and then from work that
    /// does not end, so that whoever waits looks at his own time.
    fn advance(&self, id: Id) -> bool {
        let mut st = self.state();
        for _ in 0..AT_ONCE {
            if st.is_done(id) {
                return true;
            }
            self.progress(&mut st);
            if st.is_done(id) {
                return true;
            }
            let Some(job) = st.jobs.pop_front() else { return false };
            drop(st);
            let end = self.copy(&job);
            st = self.state();
            self.finish(&mut st, job, end);
        }
        st.is_done(id)
    }

    /// Looks at everything that can end a wait early, and ends the operation then: it has been taken back, and is done with the
    /// error.
    #[cold]
    fn check(&self, id: Id, deadline: &mut Deadline) {
        let stopped = self.endpoint.usable().err();
        let mut st = self.state();
        // The last look is after the states of the peers.
        let gone = self.who_left(&st, id);
        self.progress(&mut st);
        let Some(op) = st.operation(id).filter(|op| !matches!(op.stage, Stage::Done(_))) else { return };
        let rank = self.endpoint.rank();
        let late = deadline.passed(self.moved(op));
        let why = match (stopped, gone) {
            (Some(why), _) => P2pError::Stopped { rank, what: op.to_string(), why: Box::new(why) },
            (None, Some(gone)) => gone,
            (None, None) if late => {
                let (what, after, last) = (op.to_string(), deadline.timeout, self.outlook(&st, op));
                P2pError::Timeout { rank, what, after, last }
            }
            (None, None) => return,
        };
        // Otherwise it has just been done, or is being copied at this moment.
        if self.withdraw(&mut st, id) == Withdrawn::Back {
            self.done(&mut st, id, Err(why));
        }
    }

    /// Why an operation cannot be done any more by those who would have to.
    fn who_left(&self, st: &State, id: Id) -> Option<P2pError> {
        let op = st.operation(id)?;
        let rank = self.endpoint.rank();
        let left = |p: usize| self.endpoint.peer(p).is_none_or(|peer| !peer.control.alive() || peer.dead());
        match op.peer {
            Some(p) => {
                let peer = self.endpoint.peer(p).filter(|_| left(p))?;
                let (what, pid, how) = (op.to_string(), peer.pid, peer.control.standing());
                Some(P2pError::Left { rank, what, peer: p, pid, how })
            }
            None => {
                // Another thread of this rank may send to it; but who waits for any rank waits for the others.
                let mut others = (0..self.endpoint.nranks()).filter(|p| *p != rank).peekable();
                others.peek()?;
                others.all(left).then(|| {
                    let how = |p: usize| {
                        let peer = self.endpoint.peer(p)?;
                        Some(format!("rank {p} (pid {}): {}", peer.pid, peer.control.standing()))
                    };
                    let each: Vec<String> = (0..self.endpoint.nranks()).filter_map(how).collect();
                    P2pError::NobodyLeft { rank, what: op.to_string(), each: each.join("; ") }
                })
            }
        }
    }

    /// What is known of an operation that was not done in time.
    fn outlook(&self, st: &State, op: &Operation) -> String {
        let rank = self.endpoint.rank();
        let name = |p: usize| match self.endpoint.peer(p) {
            Some(peer) if peer.pid.here().is_some_and(crate::os::process::is_stopped) => {
                format!("rank {p} (pid {}, which is stopped: SIGSTOP, a debugger)", peer.pid)
            }
            Some(peer) => format!("rank {p} (pid {})", peer.pid),
            None => format!("rank {rank} (itself)"),
        };
        match (op.send, op.peer) {
            (true, Some(to)) => match op.stage {
                Stage::Pending => {
                    let before = st.outbound[to].pending.len().saturating_sub(1);
                    format!(
                        "{} has not taken enough of what was sent to it before, and {before} more messages wait with this one",
                        name(to)
                    )
                }
                _ => format!("{} has posted no receive for it, or does not look after its messages", name(to)),
            },
            (_, from) => {
                let looked = from.map_or_else(|| "no rank".into(), name);
                let kept = |p: usize| st.inbound[p].unexpected.iter().map(move |m| (p, m.tag));
                let whose: Vec<usize> = from.map_or_else(|| (0..self.endpoint.nranks()).collect(), |p| vec![p]);
                let waiting: Vec<(usize, u32)> = whose.into_iter().flat_map(kept).collect();
                let few = |(p, tag): &(usize, u32)| format!("tag {tag} of rank {p}");
                let shown: Vec<String> = waiting.iter().take(4).map(few).collect();
                match waiting.len() {
                    0 => format!("{looked} has sent such a message, and none with another tag waits here"),
                    n => format!(
                        "{looked} has sent such a message; {n} with other tags wait here ({}{})",
                        shown.join(", "),
                        if n > shown.len() { ", ..." } else { "" }
                    ),
                }
            }
        }
    }

    /// The other end of the pair with rank `p`.
    #[inline]
    fn end(&self, p: usize) -> Option<End<'_>> {
        if p == self.endpoint.rank() {
            let (control, hbm) = (&**self.endpoint.control(), &**self.endpoint.hbm().segment());
            return Some(End { control, hbm, space: &self.own });
        }
        self.endpoint.peer(p).map(|peer| End { control: &peer.control, hbm: &peer.hbm, space: &peer.space })
    }

    /// What rank `p` has for this rank. There must be memory for it.
    #[inline]
    fn from(&self, p: usize) -> Option<Outbox<'_>> {
        self.end(p)?.control.outbox(self.endpoint.rank())
    }

    /// What this rank has for rank `p`.
    #[inline]
    fn to(&self, p: usize) -> Option<Outbox<'_>> {
        self.endpoint.control().outbox(p)
    }

    /// Wakes rank `p` if it waits: something was published for it.
    #[inline]
    fn ring(&self, p: usize) {
        self.endpoint.publish_fence();
        if let Some(end) = self.end(p) {
            end.control.mail_bell().ring_if_sleeping();
        }
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        // What nobody has taken yet goes with its memory; receives are this rank's own affair.
        let mut st = self.state();
        if crate::os::fork::in_child() {
            return;
        }
        for id in st.all_sends() {
            // Nobody copies, since nobody is here.
            self.withdraw(&mut st, id);
        }
    }
}

/// Copies that one look makes.
const AT_ONCE: usize = 64;

/// When an operation gives up.
#[derive(Debug)]
struct Deadline {
    timeout: Duration,
    /// When it was issued, where that is what counts.
    since: Option<Instant>,
    /// The clock, and what had been moved when it was set.
    wait: Option<(Wait, u64)>,
}

impl Deadline {
    /// Whether it has passed without anything having been moved; begins it at the first look.
    fn passed(&mut self, moved: u64) -> bool {
        let now = Instant::now();
        let since = self.since.unwrap_or(now);
        // A time-out beyond what the clock can say is none.
        let Some(until) = since.checked_add(self.timeout) else { return false };
        let (wait, before) = self.wait.get_or_insert_with(|| (Wait::until(until).since(since).stepping(NAP), moved));
        if wait.left().is_some() {
            return false;
        }
        // A peer decides when a byte is moved: one now and then is no progress.
        if moved < before.saturating_add(MAIL_STAGE_BYTES as u64) {
            return true;
        }
        self.wait = now.checked_add(self.timeout).map(|until| (Wait::until(until).stepping(NAP), moved));
        false
    }
}
