//! Which message goes to which receive, and what each operation waits for.

use std::collections::VecDeque;
use std::fmt;

use super::copies::{End, Job, Memory, Work, piece_bytes};
use super::{Mailbox, Owned, P2pError, Received};
use crate::exec::sequencer::OpError;
use crate::group::{Envelope, SlotKind, SlotStanding};
use crate::limits::{EAGER_BYTES, ENVELOPE_BYTES, ENVELOPES, MAIL_SLOTS, MAIL_STAGE_BYTES, UNEXPECTED};
use crate::memory::segment::SegmentError;

/// What a peer did of which nothing more is read.
const CORRUPT: &str = "wrote an envelope that cannot be";

/// The place of an operation.
pub(super) type Id = usize;

/// A send or a receive.
#[derive(Debug)]
pub(super) struct Operation {
    /// Its number among all of this rank.
    number: u64,
    pub(super) send: bool,
    /// Whom it sends to or receives from; a receive from any rank has none.
    pub(super) peer: Option<usize>,
    tag: Option<u32>,
    memory: Memory,
    /// What keeps the memory, where that is not a caller who waits.
    pub(super) owned: Option<Owned>,
    /// Nobody will ask for its result.
    pub(super) detached: bool,
    pub(super) stage: Stage,
    /// Bytes that were copied for it, staged ones for a send.
    moved: u64,
}

/// How an operation stands.
#[derive(Debug)]
pub(super) enum Stage {
    /// A send that is not on its way: it waits for room in the outbox.
    Pending,
    /// A send that is on its way.
    Sent {
        slot: usize,
        seq: u64,
    },
    /// A receive without a message.
    Posted,
    /// A receive whose message is to be staged, or is being staged.
    Staged(Matched),
    /// A copy is to be made, or is being made.
    Busy,
    Done(Result<Received, P2pError>),
}

/// A message that a receive has.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matched {
    pub(super) from: usize,
    seq: u64,
    pub(super) envelope: Envelope,
    /// The sender has been asked to stage it.
    asked: bool,
    /// Pieces that were read.
    pub(super) pieces: u64,
}

/// A message that no receive wanted yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrived {
    seq: u64,
    pub(super) tag: u32,
    envelope: Envelope,
}

/// What came of taking an operation back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Withdrawn {
    /// Nothing will happen with its memory any more.
    Back,
    /// It was done before.
    Done,
    /// A copy is being made for it.
    Busy,
}

/// What one rank has sent to this one.
#[derive(Debug, Default)]
pub(super) struct Inbound {
    /// The number of the last message whose envelope was read.
    read: u64,
    /// Its outbox for this rank has memory.
    open: bool,
    /// In the order in which they were sent.
    pub(super) unexpected: VecDeque<Arrived>,
    /// Receives whose messages are to be staged; the first one's is.
    staging: VecDeque<Id>,
    /// Its private memory cannot be read.
    unreadable: bool,
    /// It wrote what cannot be: nothing more is read.
    corrupt: bool,
}

/// What this rank has sent to one.
#[derive(Debug)]
pub(super) struct Outbound {
    /// The number of the last message that is on its way.
    sent: u64,
    open: bool,
    /// Sends that wait for room, in order.
    pub(super) pending: VecDeque<Id>,
    slots: [Held; MAIL_SLOTS],
    /// Bits of the slots whose payloads have memory.
    committed: u64,
    stage_ready: bool,
    /// Whose message is being staged, and how many pieces of it were.
    staging: Option<(Id, u64)>,
}

const _: () = assert!(MAIL_SLOTS <= 64);

/// Who has a slot.
#[derive(Debug, Clone, Copy)]
enum Held {
    Free,
    /// A small message, which nobody here waits for.
    Eager(u64),
    Operation,
}

#[derive(Debug)]
pub(super) struct State {
    operations: Vec<Option<Operation>>,
    free: Vec<Id>,
    number: u64,
    /// Receives without a message, in the order in which they were posted.
    posted: VecDeque<Id>,
    pub(super) inbound: Box<[Inbound]>,
    pub(super) outbound: Box<[Outbound]>,
    /// Sends that are on their way and not done.
    sent: Vec<Id>,
    pub(super) jobs: VecDeque<Job>,
    /// The rank that a receive from any looks at first.
    turn: usize,
    /// Something was done since threads of this rank were last woken.
    news: bool,
}

impl Operation {
    pub(super) fn new(send: bool, peer: Option<usize>, tag: Option<u32>, memory: Memory) -> Operation {
        let stage = if send { Stage::Pending } else { Stage::Posted };
        Operation { number: 0, send, peer, tag, memory, owned: None, detached: false, stage, moved: 0 }
    }

    fn wants(&self, from: usize, tag: u32) -> bool {
        self.peer.is_none_or(|p| p == from) && self.tag.is_none_or(|t| t == tag)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, len) = (self.number, self.memory.len);
        match (self.send, self.peer) {
            (true, to) => write!(f, "send #{number} to rank {}", to.unwrap_or(0))?,
            (false, Some(p)) => write!(f, "receive #{number} from rank {p}")?,
            (false, None) => write!(f, "receive #{number} from any rank")?,
        }
        match self.tag {
            Some(tag) => write!(f, " (tag {tag}, ")?,
            None => f.write_str(" (any tag, ")?,
        }
        write!(f, "{}{len} bytes)", if self.send { "" } else { "up to " })
    }
}

impl State {
    pub(super) fn new(nranks: usize) -> State {
        let outbound = || Outbound {
            sent: 0,
            open: false,
            pending: VecDeque::new(),
            slots: [Held::Free; MAIL_SLOTS],
            committed: 0,
            stage_ready: false,
            staging: None,
        };
        State {
            operations: Vec::new(),
            free: Vec::new(),
            number: 0,
            posted: VecDeque::new(),
            inbound: (0..nranks).map(|_| Inbound::default()).collect(),
            outbound: (0..nranks).map(|_| outbound()).collect(),
            sent: Vec::new(),
            jobs: VecDeque::new(),
            turn: 0,
            news: false,
        }
    }

    pub(super) fn add(&mut self, op: Operation) -> Id {
        self.number += 1;
        let op = Some(Operation { number: self.number, ..op });
        match self.free.pop() {
            Some(id) => {
                self.operations[id] = op;
                id
            }
            None => {
                self.operations.push(op);
                self.operations.len() - 1
            }
        }
    }

    pub(super) fn operation(&self, id: Id) -> Option<&Operation> {
        self.operations.get(id).and_then(Option::as_ref)
    }

    pub(super) fn operation_mut(&mut self, id: Id) -> Option<&mut Operation> {
        self.operations.get_mut(id).and_then(Option::as_mut)
    }

    pub(super) fn is_done(&self, id: Id) -> bool {
        self.operation(id).is_none_or(|op| matches!(op.stage, Stage::Done(_)))
    }

    /// Takes an operation out that is done, or was taken back: its result if it has one, and what kept its memory.
    pub(super) fn remove(&mut self, id: Id) -> (Option<Result<Received, P2pError>>, Option<Owned>) {
        let Some(op) = self.operations.get_mut(id).and_then(Option::take) else { return (None, None) };
        self.free.push(id);
        let result = match op.stage {
            Stage::Done(result) => Some(result),
            _ => None,
        };
        (result, op.owned)
    }

    /// Places of operations that there are.
    #[cfg(test)]
    pub(super) fn places(&self) -> usize {
        self.operations.len()
    }

    /// The number of the last operation.
    #[cfg(test)]
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn all_sends(&self) -> Vec<Id> {
        (0..self.operations.len()).filter(|id| self.operation(*id).is_some_and(|op| op.send)).collect()
    }

    fn set_stage(&mut self, id: Id, stage: Stage) {
        if let Some(op) = self.operation_mut(id) {
            op.stage = stage;
        }
    }

    /// The first receive that wants a message: its position among the posted.
    fn who_wants(&self, from: usize, tag: u32) -> Option<usize> {
        self.posted.iter().position(|id| self.operation(*id).is_some_and(|op| op.wants(from, tag)))
    }

    /// Whether some receive waits for rank `from`.
    fn waits_for(&self, from: usize) -> bool {
        let waits = |id: &Id| self.operation(*id).is_some_and(|op| op.peer.is_none_or(|p| p == from));
        self.posted.iter().any(waits)
    }

    /// Puts a receive where its number belongs among the posted.
    fn insert_posted(&mut self, id: Id) {
        self.set_stage(id, Stage::Posted);
        let number = |id: &Id| self.operation(*id).map_or(0, |op| op.number);
        let at = self.posted.partition_point(|p| number(p) < number(&id));
        self.posted.insert(at, id);
    }

    /// Puts a message back where its number belongs among the unexpected.
    fn insert_unexpected(&mut self, m: &Matched) {
        let kept = &mut self.inbound[m.from].unexpected;
        let at = kept.partition_point(|a| a.seq < m.seq);
        kept.insert(at, Arrived { seq: m.seq, tag: m.envelope.tag, envelope: m.envelope });
    }
}

#[cfg(test)]
impl Outbound {
    /// Slots whose payloads have memory.
    pub(super) fn payloads(&self) -> u32 {
        self.committed.count_ones()
    }
}

impl Mailbox {
    /// Ends an operation.
    pub(super) fn done(&self, st: &mut State, id: Id, result: Result<Received, P2pError>) {
        let tally = self.endpoint.control().mail_tally();
        if result.is_ok() {
            tally.op()
        } else {
            tally.failure()
        }
        st.news = true;
        if st.operation(id).is_some_and(|op| op.detached) {
            st.remove(id);
        } else {
            st.set_stage(id, Stage::Done(result));
        }
    }

    /// Ends an operation because of what its peer wrote.
    fn bad_peer(&self, st: &mut State, id: Id, peer: usize, how: &'static str) {
        let what = st.operation(id).map_or_else(String::new, Operation::to_string);
        self.done(st, id, Err(P2pError::BadPeer { rank: self.endpoint.rank(), what, peer, how }));
    }

    /// Sends what is pending for rank `to` as far as there is room.
    pub(super) fn push(&self, st: &mut State, to: usize) {
        let mut any = false;
        while let Some(&id) = st.outbound[to].pending.front() {
            match self.announce(st, to, id) {
                Ok(true) => any = true,
                Ok(false) => break,
                Err(e) => {
                    let (rank, reason) = (self.endpoint.rank(), e.to_string());
                    self.done(st, id, Err(OpError::Stage { rank, reason }.into()));
                }
            }
            st.outbound[to].pending.pop_front();
        }
        if any {
            self.ring(to);
        }
    }

    /// Puts a message on its way, if there is room.
    fn announce(&self, st: &mut State, to: usize, id: Id) -> Result<bool, SegmentError> {
        let control = self.endpoint.control();
        let (Some(outbox), Some(op)) = (self.to(to), st.operations.get(id).and_then(Option::as_ref)) else {
            return Ok(true);
        };
        let out = &mut st.outbound[to];
        if !out.open {
            control.open_outbox(to)?;
            out.open = true;
        }
        let seq = out.sent + 1;
        // What the reader says that it has not been sent yet leaves no room.
        if seq.wrapping_sub(outbox.drained()) > ENVELOPES as u64 {
            return Ok(false);
        }
        let len = op.memory.len;
        let (kind, at) = match op.memory.device {
            _ if len <= ENVELOPE_BYTES as u64 => (SlotKind::Inline, 0),
            _ if len <= EAGER_BYTES as u64 => (SlotKind::Eager, 0),
            Some(offset) => (SlotKind::Device, offset),
            None if self.direct => (SlotKind::Private, op.memory.address()),
            None => (SlotKind::Staged, 0),
        };
        let mut envelope = Envelope { tag: op.tag.unwrap_or(0), kind, slot: 0, len, at, payload: [0; ENVELOPE_BYTES] };
        if kind == SlotKind::Inline {
            self.enclose(&op.memory, &mut envelope);
        } else {
            let free = |k: &usize| match out.slots[*k] {
                Held::Free => true,
                Held::Eager(seq) => outbox.standing(*k, seq) != Some(SlotStanding::Open),
                Held::Operation => false,
            };
            let Some(slot) = (0..MAIL_SLOTS).find(free) else { return Ok(false) };
            envelope.slot = slot;
            if kind == SlotKind::Eager {
                if out.committed >> slot & 1 == 0 {
                    control.commit_payload(to, slot)?;
                    out.committed |= 1 << slot;
                }
                self.put_in(&op.memory, to, slot);
                out.slots[slot] = Held::Eager(seq);
            } else {
                out.slots[slot] = Held::Operation;
            }
            outbox.assign(slot, seq);
        }
        outbox.publish(seq, &envelope);
        out.sent = seq;
        if matches!(kind, SlotKind::Inline | SlotKind::Eager) {
            self.done(st, id, Ok(Received { from: to, tag: envelope.tag, len }));
        } else {
            st.set_stage(id, Stage::Sent { slot: envelope.slot, seq });
            st.sent.push(id);
        }
        Ok(true)
    }

    /// Looks for a message for a receive among those that nobody wanted; posts it if there is none.
    pub(super) fn post(&self, st: &mut State, id: Id) {
        let n = self.endpoint.nranks();
        let Some(from) = st.operation(id).map(|op| op.peer) else { return };
        let (first, ranks) = from.map_or((st.turn, n), |p| (p, 1));
        for p in (first..first + ranks).map(|p| p % n) {
            let wanted = |st: &State| {
                let op = st.operation(id)?;
                st.inbound[p].unexpected.iter().position(|m| op.wants(p, m.tag))
            };
            while let Some(at) = wanted(st) {
                let Some(m) = st.inbound[p].unexpected.remove(at) else { break };
                if self.deliver(st, id, p, m.seq, m.envelope) {
                    return;
                }
            }
        }
        match from.filter(|p| st.inbound[*p].corrupt) {
            Some(p) => self.bad_peer(st, id, p, CORRUPT),
            None => st.insert_posted(id),
        }
    }

    /// Moves on what can be moved on without a wait.
    pub(super) fn progress(&self, st: &mut State) {
        for at in (0..st.sent.len()).rev() {
            self.look_after(st, at);
        }
        for to in 0..self.endpoint.nranks() {
            if !st.outbound[to].pending.is_empty() {
                self.push(st, to);
            }
            if !st.inbound[to].staging.is_empty() {
                self.staged(st, to);
            }
        }
        self.take_in(st);
        self.tell(st);
    }

    /// Wakes the threads of this rank that may wait for what was done.
    pub(super) fn tell(&self, st: &mut State) {
        if std::mem::take(&mut st.news) {
            self.ring(self.endpoint.rank());
        }
    }

    /// Looks how a send stands, the one at `at` of those on their way.
    fn look_after(&self, st: &mut State, at: usize) {
        let id = st.sent[at];
        let Some(op) = st.operation(id) else { return };
        let (&Stage::Sent { slot, seq }, Some(to)) = (&op.stage, op.peer) else { return };
        let (len, tag) = (op.memory.len, op.tag.unwrap_or(0));
        let Some(outbox) = self.to(to) else { return };
        let mine = st.outbound[to].staging.filter(|(who, _)| *who == id).map(|(_, filled)| filled);
        match outbox.standing(slot, seq) {
            Some(SlotStanding::Done) => {
                self.release(st, id, to, slot);
                self.done(st, id, Ok(Received { from: to, tag, len }));
            }
            Some(SlotStanding::Open | SlotStanding::Taken) => {
                if mine.is_some() {
                    // It was given back, and begins anew for the next receive.
                    outbox.set_filled(seq, 0);
                    st.outbound[to].staging = None;
                }
            }
            Some(SlotStanding::Staging) => {
                let filled = match (mine, st.outbound[to].staging) {
                    (Some(filled), _) => filled,
                    // The one before has been read, and is not looked after yet.
                    (None, Some(_)) => return,
                    (None, None) => {
                        if !st.outbound[to].stage_ready {
                            if let Err(e) = self.endpoint.control().commit_mail_stage(to) {
                                let (rank, reason) = (self.endpoint.rank(), e.to_string());
                                if self.withdraw(st, id) == Withdrawn::Back {
                                    self.done(st, id, Err(OpError::Stage { rank, reason }.into()));
                                }
                                return;
                            }
                            st.outbound[to].stage_ready = true;
                        }
                        st.outbound[to].staging = Some((id, 0));
                        0
                    }
                };
                let piece = piece_bytes(len, filled);
                // A copy that is stopped at once would be employed again for ever: whoever waits takes the message back.
                if piece > 0 && filled.wrapping_sub(outbox.taken(seq)) < 2 && self.endpoint.usable().is_ok() {
                    let work = Work::Fill { to, slot, seq, piece: filled, len: piece };
                    self.employ(st, id, work);
                }
            }
            Some(SlotStanding::Withdrawn) | None => {
                self.release(st, id, to, slot);
                self.bad_peer(st, id, to, "wrote over the slot of the message");
            }
        }
    }

    /// Has a copy made for an operation.
    fn employ(&self, st: &mut State, id: Id, work: Work) {
        if let Some(op) = st.operation_mut(id) {
            op.stage = Stage::Busy;
            let job = Job::new(id, work, &op.memory);
            st.jobs.push_back(job);
        }
    }

    /// A send is no longer on its way.
    fn release(&self, st: &mut State, id: Id, to: usize, slot: usize) {
        let out = &mut st.outbound[to];
        out.slots[slot] = Held::Free;
        out.staging = out.staging.filter(|(who, _)| *who != id);
        st.sent.retain(|s| *s != id);
    }

    /// Reads the envelopes that receives wait for, one of each rank at a time, and no more at once than ranks can have announced:
    /// one that goes on writing is not to keep everybody else.
    fn take_in(&self, st: &mut State) {
        let n = self.endpoint.nranks();
        for _ in 0..ENVELOPES {
            let mut more = false;
            if st.posted.is_empty() {
                return;
            }
            let first = st.turn;
            for p in (first..first + n).map(|p| p % n) {
                more |= st.waits_for(p) && self.read_one(st, p);
            }
            if !more {
                return;
            }
        }
    }

    /// Reads one envelope of rank `p`, if there is one; whether there was.
    fn read_one(&self, st: &mut State, p: usize) -> bool {
        let rank = self.endpoint.rank();
        let inbound = &mut st.inbound[p];
        if !inbound.open {
            inbound.open = self.end(p).is_some_and(|end| end.control.has_outbox(rank));
        }
        if !inbound.open || inbound.corrupt {
            return false;
        }
        let Some(outbox) = self.from(p) else { return false };
        let seq = inbound.read + 1;
        // What this rank has sent to itself it knows; what else stands there a peer has written.
        if p == rank && seq > st.outbound[rank].sent {
            return false;
        }
        let Some(envelope) = outbox.envelope(seq) else { return false };
        let Ok(envelope) = envelope else {
            inbound.corrupt = true;
            let of_it = |id: &Id| st.operation(*id).is_some_and(|op| op.peer == Some(p));
            let lost: Vec<Id> = st.posted.iter().copied().filter(of_it).collect();
            st.posted.retain(|id| !lost.contains(id));
            for id in lost {
                self.bad_peer(st, id, p, CORRUPT);
            }
            return false;
        };
        let wanted = st.who_wants(p, envelope.tag);
        let inbound = &mut st.inbound[p];
        if wanted.is_none() && inbound.unexpected.len() >= UNEXPECTED {
            return false;
        }
        inbound.read = seq;
        outbox.set_drained(seq);
        match wanted.and_then(|at| st.posted.remove(at)) {
            None => st.inbound[p].unexpected.push_back(Arrived { seq, tag: envelope.tag, envelope }),
            Some(id) if self.deliver(st, id, p, seq, envelope) => {}
            // The message is gone, and the receive still waits.
            Some(id) => st.insert_posted(id),
        }
        self.ring(p);
        true
    }

    /// Gives a message to a receive that is not posted (any more); `false` if the sender has taken it back.
    fn deliver(&self, st: &mut State, id: Id, from: usize, seq: u64, envelope: Envelope) -> bool {
        let (Some(outbox), Some(op)) = (self.from(from), st.operation(id)) else { return false };
        let Envelope { tag, kind, slot, len, .. } = envelope;
        let any = op.peer.is_none();
        let have = op.memory.len;
        let inline = kind == SlotKind::Inline;
        let fits = len <= have;
        if !fits || inline || kind == SlotKind::Eager {
            if fits {
                self.take_out(&op.memory, from, &envelope);
            }
            let what = if fits { String::new() } else { op.to_string() };
            if !inline {
                if !outbox.turn(slot, seq, SlotStanding::Open, SlotStanding::Done) {
                    return false;
                }
                self.ring(from);
            }
            let rank = self.endpoint.rank();
            let result = match fits {
                true => Ok(Received { from, tag, len }),
                false => Err(P2pError::Truncated { rank, what, from, tag, sent: len, have }),
            };
            self.done(st, id, result);
        } else {
            if !outbox.turn(slot, seq, SlotStanding::Open, SlotStanding::Taken) {
                return false;
            }
            let matched = Matched { from, seq, envelope, asked: false, pieces: 0 };
            let inbound = &mut st.inbound[from];
            if kind == SlotKind::Staged || kind == SlotKind::Private && (inbound.unreadable || !self.direct) {
                inbound.staging.push_back(id);
                st.set_stage(id, Stage::Staged(matched));
                self.staged(st, from);
            } else {
                self.employ(st, id, Work::Whole(matched));
            }
        }
        if any {
            st.turn = (from + 1) % self.endpoint.nranks();
        }
        true
    }

    /// Moves on the message of rank `p` whose turn at the staging halves it is, and lets go of those that it has taken back.
    fn staged(&self, st: &mut State, p: usize) {
        let Some(outbox) = self.from(p) else { return };
        let is_gone = |op: &Operation| match &op.stage {
            Stage::Staged(m) => {
                let standing = outbox.standing(m.envelope.slot, m.seq);
                !matches!(standing, Some(SlotStanding::Taken | SlotStanding::Staging))
            }
            _ => false,
        };
        let gone = |st: &State| st.inbound[p].staging.iter().copied().find(|id| st.operation(*id).is_some_and(is_gone));
        while let Some(id) = gone(st) {
            st.inbound[p].staging.retain(|s| *s != id);
            self.again(st, id);
        }
        let Some(&id) = st.inbound[p].staging.front() else { return };
        let Some(Stage::Staged(m)) = st.operation_mut(id).map(|op| &mut op.stage) else { return };
        let (slot, seq) = (m.envelope.slot, m.seq);
        if m.asked {
            if outbox.filled(seq) > m.pieces {
                let work = Work::Drain(*m);
                self.employ(st, id, work);
            }
        } else if outbox.filled(seq) == 0 {
            // Otherwise a receive had it before and gave it back, which its sender is to see first.
            outbox.set_taken(seq, 0);
            m.asked = outbox.turn(slot, seq, SlotStanding::Taken, SlotStanding::Staging);
            self.ring(p);
        }
    }

    /// A receive has lost its message.
    fn again(&self, st: &mut State, id: Id) {
        if let Some(op) = st.operation_mut(id) {
            op.moved = 0;
        }
        self.post(st, id);
    }

    /// Takes note of a copy that was made.
    pub(super) fn finish(&self, st: &mut State, job: Job, end: End) {
        let id = job.id;
        let rank = self.endpoint.rank();
        let tally = self.endpoint.control().mail_tally();
        let stopped = |st: &State, why| {
            let what = st.operation(id).map_or_else(String::new, Operation::to_string);
            Err(P2pError::Stopped { rank, what, why: Box::new(why) })
        };
        match (job.what, end) {
            (Work::Fill { to, slot, seq, piece, len }, end) => {
                st.set_stage(id, Stage::Sent { slot, seq });
                let (Some(outbox), End::Copied) = (self.to(to), end) else {
                    // Whoever waits for it finds out, and takes it back.
                    return;
                };
                tally.copied(len);
                if let Some(op) = st.operation_mut(id) {
                    op.moved += len;
                }
                st.outbound[to].staging = Some((id, piece + 1));
                outbox.set_filled(seq, piece + 1);
                self.ring(to);
            }
            (Work::Whole(m), End::Copied) => {
                tally.copied(m.envelope.len);
                self.received(st, id, &m, SlotStanding::Taken);
            }
            (Work::Drain(m), End::Copied) => {
                let Some(outbox) = self.from(m.from) else { return };
                let len = piece_bytes(m.envelope.len, m.pieces);
                tally.copied(len);
                if let Some(op) = st.operation_mut(id) {
                    op.moved += len;
                }
                let m = Matched { pieces: m.pieces + 1, ..m };
                if piece_bytes(m.envelope.len, m.pieces) == 0 {
                    st.inbound[m.from].staging.retain(|s| *s != id);
                    self.received(st, id, &m, SlotStanding::Staging);
                } else {
                    outbox.set_taken(m.seq, m.pieces);
                    outbox.set_moved(m.envelope.slot, m.pieces * MAIL_STAGE_BYTES as u64);
                    self.ring(m.from);
                    st.set_stage(id, Stage::Staged(m));
                }
            }
            (Work::Whole(m), End::Unreadable) => {
                st.inbound[m.from].unreadable = true;
                st.inbound[m.from].staging.push_back(id);
                st.set_stage(id, Stage::Staged(m));
            }
            (Work::Whole(m) | Work::Drain(m), End::Stopped(why)) => {
                st.inbound[m.from].staging.retain(|s| *s != id);
                let result = stopped(st, why);
                self.done(st, id, result);
            }
            (Work::Whole(m) | Work::Drain(m), End::Outside | End::Unreadable) => {
                st.inbound[m.from].staging.retain(|s| *s != id);
                if let Some(outbox) = self.from(m.from) {
                    outbox.turn(m.envelope.slot, m.seq, SlotStanding::Taken, SlotStanding::Done);
                    self.ring(m.from);
                }
                self.bad_peer(st, id, m.from, "announced a message outside its device memory");
            }
        }
        self.tell(st);
    }

    /// All of a message is there: the receive is done, unless the sender has taken the message back.
    fn received(&self, st: &mut State, id: Id, m: &Matched, from: SlotStanding) {
        let Envelope { tag, slot, len, .. } = m.envelope;
        if self.from(m.from).is_some_and(|outbox| outbox.turn(slot, m.seq, from, SlotStanding::Done)) {
            self.ring(m.from);
            self.done(st, id, Ok(Received { from: m.from, tag, len }));
        } else {
            self.again(st, id);
        }
    }

    /// Bytes that were moved for an operation, by whichever end; of either no more than it has, whatever a peer says.
    pub(super) fn moved(&self, op: &Operation) -> u64 {
        let most = op.memory.len;
        let theirs = match (&op.stage, op.peer) {
            (Stage::Sent { slot, .. }, Some(to)) => self.to(to).map_or(0, |outbox| outbox.moved(*slot)),
            _ => 0,
        };
        op.moved.min(most).saturating_add(theirs.min(most))
    }

    /// Takes an operation back, unless it is done or a copy is being made for it. The caller removes it.
    pub(super) fn withdraw(&self, st: &mut State, id: Id) -> Withdrawn {
        let Some(op) = st.operation(id) else { return Withdrawn::Done };
        match (&op.stage, op.peer) {
            (Stage::Done(_), _) => Withdrawn::Done,
            (Stage::Busy, _) => Withdrawn::Busy,
            (Stage::Pending, to) => {
                if let Some(to) = to {
                    st.outbound[to].pending.retain(|p| *p != id);
                }
                Withdrawn::Back
            }
            (&Stage::Sent { slot, seq }, Some(to)) => {
                let Some(outbox) = self.to(to) else { return Withdrawn::Busy };
                // A thread of this very process reads the memory of a message to itself once that is taken.
                let own = to == self.endpoint.rank();
                let from = [SlotStanding::Open, SlotStanding::Taken, SlotStanding::Staging];
                let back = |from: &SlotStanding| {
                    !(own && *from == SlotStanding::Taken) && outbox.turn(slot, seq, *from, SlotStanding::Withdrawn)
                };
                if from.iter().any(back) {
                    self.release(st, id, to, slot);
                    return Withdrawn::Back;
                }
                // Done, or changed between two looks: whoever calls looks again.
                Withdrawn::Busy
            }
            (Stage::Posted, _) => {
                st.posted.retain(|p| *p != id);
                Withdrawn::Back
            }
            (Stage::Staged(m), _) => {
                let m = *m;
                st.inbound[m.from].staging.retain(|s| *s != id);
                let from = if m.asked { SlotStanding::Staging } else { SlotStanding::Taken };
                let kept = self
                    .from(m.from)
                    .is_some_and(|outbox| outbox.turn(m.envelope.slot, m.seq, from, SlotStanding::Open));
                if kept {
                    self.ring(m.from);
                    self.return_to_others(st, &m);
                }
                Withdrawn::Back
            }
            (Stage::Sent { .. }, None) => Withdrawn::Busy,
        }
    }

    /// A message has lost its receive: the next one that wants it has it.
    fn return_to_others(&self, st: &mut State, m: &Matched) {
        let Some(at) = st.who_wants(m.from, m.envelope.tag) else { return st.insert_unexpected(m) };
        let Some(id) = st.posted.remove(at) else { return };
        if !self.deliver(st, id, m.from, m.seq, m.envelope) {
            st.insert_posted(id);
        }
    }
}
