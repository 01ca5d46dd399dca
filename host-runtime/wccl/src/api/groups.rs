//! Communicators of some of a communicator's ranks: replica groups, split, shrink.
//!
//! | call | original | who takes part | how they agree |
//! |---|---|---|---|
//! | [`Communicator::replica_group`] | one communicator per set of bootstrap participants | the group | its program's signature, over the parent's bootstrap |
//! | [`Communicator::split`] | `ncclCommSplit`, `MPI_Comm_split` | all ranks | the table of colours, over the parent's bootstrap |
//! | [`Communicator::shrink`] | `ncclCommShrink` | those that are left | the list of survivors, over the ranks' meeting places |
//!
//! All three end alike: a verdict of the whole group (`verdict`), an id, and only then the library's `InitComm` (INV-29).
//! What of it goes over the bootstrap, which a plugin carries, is sealed (`sealed`); the meeting places are the host's own.
//! A rank stays on its device, so tensors of the parent serve in the new communicator.
//!
//! Invariants: one group or split is made at a time, and one shrink (the locks of `Groups`), because the messages of two
//! would mix; after a message was lost the parent's bootstrap is out of step and serves no more groups, which `shrink` does
//! not need. Threads: the caller's.

mod beacon;
#[doc(hidden)]
pub mod fuzzing;
mod pool;
mod sealed;
mod signature;
mod verdict;

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use beacon::{Beacon, Meeting};
use hmac::Mac;
use hw_bridge::os::patience::{passed, stopped_since};
use pool::Pool;
use sealed::Sealed;
use verdict::{Messages, Refusal, agree, patience};

pub use pool::PooledComm;
pub use signature::{Program, ProgramOp, SEND, SIGNATURE_BYTES, Signature};

use crate::api::communicator::{CommOptions, Communicator};
use crate::error::Error;
use crate::plane::host::bad;
use crate::plane::join::Rendezvous;
use hw_bridge::os::lock::lock;
use sandbox::key::{GroupKey, GroupKind};
use sandbox::limits::{GROUP_STREAMS, ID_BYTES, LISTED_RANKS};
use sandbox::status::Status;

/// A list of ranks for a message; a long one is cut.
fn listed(ranks: &[usize]) -> String {
    if ranks.len() <= LISTED_RANKS {
        return format!("{ranks:?}");
    }
    let shown: Vec<String> = ranks[..LISTED_RANKS].iter().map(usize::to_string).collect();
    format!("[{}, and {} more]", shown.join(", "), ranks.len() - LISTED_RANKS)
}

/// What a communicator keeps for the ones made of it.
#[derive(Debug, Default)]
pub(super) struct Groups {
    state: Mutex<State>,
    /// Absent in a group of one.
    beacon: OnceLock<Mutex<Beacon>>,
}

#[derive(Debug, Default)]
struct State {
    pool: Pool,
    /// Groups that were begun, by what tells their lists apart. All ranks of one count alike: what fails fails for all, or leaves
    /// the bootstrap out of step.
    begun: HashMap<(GroupKind, [u8; SIGNATURE_BYTES]), u32>,
    /// Splits that were begun; a row of one is none of another.
    splits: u32,
    /// Why the bootstrap serves no more groups.
    out_of_step: Option<String>,
}

impl State {
    /// The key of the next group of `members`, of a communicator with the key `of`.
    fn next_key(&mut self, of: GroupKey, kind: GroupKind, members: &[usize]) -> GroupKey {
        let list = *Signature::of_members("members", members).bytes();
        let count = self.begun.entry((kind, list)).or_default();
        let key = of.group(kind, members, *count);
        *count = count.wrapping_add(1);
        key
    }
}

impl Groups {
    /// Opens the meeting place; once, in the init, by every rank.
    pub(super) fn prepare(&self, comm: &Communicator, at: &Rendezvous) -> Result<(), Error> {
        if comm.nranks() > 1 {
            // The first one stays, and this is the first.
            let _ = self.beacon.set(Mutex::new(Beacon::open(comm, at)?));
        }
        Ok(())
    }
}

/// One replica group as a rank asks for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Its ranks.
    pub participants: Vec<usize>,
    /// The ranks that make the communicator, in its rank order. The same as the participants, but in hierarchical and pod
    /// layouts, where only some of them bootstrap together. This list is the pool's key.
    pub bootstrap_participants: Vec<usize>,
}

impl Group {
    /// A group whose participants bootstrap together.
    pub fn of(participants: impl Into<Vec<usize>>) -> Group {
        let participants = participants.into();
        Group { bootstrap_participants: participants.clone(), participants }
    }
}

/// How [`Communicator::replica_group`] makes a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupOptions {
    /// Stream, 0 to 3.
    pub stream: u32,
    /// Build and connect the rings. A communicator made without gets them when it is asked for again with.
    pub graph: bool,
}

impl Default for GroupOptions {
    fn default() -> Self {
        GroupOptions { stream: 0, graph: true }
    }
}

/// Replica groups that were checked: every rank of the world is in exactly one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaGroups {
    groups: Vec<Vec<usize>>,
    mine: usize,
}

impl ReplicaGroups {
    /// Checks the groups of a world of `world` ranks as rank `me` has them.
    ///
    /// # Errors
    /// [`Error::Usage`] with the list that is wrong: no groups, an empty one, a rank outside the world, a rank twice in a
    /// group or in two groups, this rank in none ("replica groups does not have myself"), another rank in none.
    pub fn new(groups: &[Vec<usize>], world: usize, me: usize) -> Result<ReplicaGroups, Error> {
        let all = || {
            let shown: Vec<String> = groups.iter().take(LISTED_RANKS).map(|g| listed(g)).collect();
            let more = groups.len().saturating_sub(LISTED_RANKS);
            let more = if more > 0 { format!(", and {more} more") } else { String::new() };
            format!("[{}{more}]", shown.join(", "))
        };
        if groups.is_empty() {
            return Err(bad(format!(
                "replica groups are empty; give a list that holds each of the {world} ranks once"
            )));
        }
        let mut owner: Vec<Option<usize>> = vec![None; world];
        for (i, group) in groups.iter().enumerate() {
            if group.is_empty() {
                return Err(bad(format!("replica group {i} of {} is empty; leave it out", all())));
            }
            for rank in group {
                let Some(place) = owner.get_mut(*rank) else {
                    return Err(bad(format!(
                        "replica group {i}, {}, holds rank {rank}, which is not one of the {world} ranks 0 to {}",
                        listed(group),
                        world.saturating_sub(1)
                    )));
                };
                match *place {
                    None => *place = Some(i),
                    Some(first) if first == i => {
                        return Err(bad(format!("replica group {i}, {}, holds rank {rank} twice", listed(group))));
                    }
                    Some(first) => {
                        return Err(bad(format!(
                            "replica groups overlap: rank {rank} is in group {first}, {}, and in group {i}, {}",
                            listed(&groups[first]),
                            listed(group)
                        )));
                    }
                }
            }
        }
        let Some(mine) = owner.get(me).copied().flatten() else {
            return Err(bad(format!(
                "replica groups does not have myself: rank {me} of {world} is in none of {}",
                all()
            )));
        };
        let absent: Vec<usize> = (0..world).filter(|r| owner[*r].is_none()).collect();
        if !absent.is_empty() {
            return Err(bad(format!(
                "replica groups have a gap: of the {world} ranks, {} are in none of {}; give each rank a group, of its own if it is alone",
                listed(&absent),
                all()
            )));
        }
        Ok(ReplicaGroups { groups: groups.to_vec(), mine })
    }

    /// The group of the rank that they were checked for.
    pub fn mine(&self) -> Group {
        Group::of(self.groups[self.mine].clone())
    }

    /// All of them, as given.
    pub fn all(&self) -> &[Vec<usize>] {
        &self.groups
    }
}

/// Pause before a library that found nothing is asked again.
const PAUSE: Duration = Duration::from_millis(5);

/// How long a message may take after the deadline of the whole.
const REACHED: Duration = Duration::from_millis(200);

/// Messages between the members of a group over their common bootstrap. The library's own deadline bounds each of its waits;
/// where that is too short, it is asked again.
struct Bootstrap<'a> {
    comm: &'a Communicator,
    members: &'a [usize],
    begun: Instant,
    /// A message was lost: later ones would be taken for it.
    lost: bool,
}

impl Bootstrap<'_> {
    /// Adds to a failed exchange whether the other one is there at all.
    fn about(&self, position: usize, e: &Error) -> String {
        let rank = self.members[position];
        let gone = self.comm.core().endpoint.peer_died(rank)
            || self.comm.groups.beacon.get().is_some_and(|b| lock(b).gone(rank));
        let state = if gone { "is gone: its process has ended or it has freed the communicator" } else { "lives" };
        format!("rank {rank} {state}; {e}")
    }
}

impl Messages for Bootstrap<'_> {
    fn members(&self) -> &[usize] {
        self.members
    }

    fn parent_ranks(&self) -> usize {
        self.comm.nranks()
    }

    fn send(&mut self, to: usize, data: &[u8]) -> Result<(), String> {
        // One that lives takes a message at once; nobody else may miss his for one that does not.
        let begun = self.begun + stopped_since(self.begun);
        let until = (begun + self.comm.runtime().config().socket_timeout()).max(Instant::now() + REACHED);
        self.comm.bootstrap_send_until(self.members[to] as i32, data, until).map_err(|e| {
            self.lost = true;
            self.about(to, &e)
        })
    }

    fn recv(&mut self, from: usize, bytes: usize, rounds: u32) -> Result<Vec<u8>, String> {
        loop {
            let until = self.begun + patience(self.comm.runtime().config().socket_timeout(), rounds);
            let by = until + stopped_since(self.begun);
            match self.comm.bootstrap_recv_until(self.members[from] as i32, bytes as u64, by) {
                Ok(got) => return Ok(got),
                // What was stopped within the call counts as well.
                Err(e) if e.status() == Status::TIMEOUT && !passed(until, self.begun) => std::thread::sleep(PAUSE),
                Err(e) => {
                    self.lost = true;
                    return Err(self.about(from, &e));
                }
            }
        }
    }
}

/// What is being made, for messages.
struct Purpose<'a> {
    what: String,
    members: &'a [usize],
    signature: &'a Signature,
    stream: u32,
}

impl Purpose<'_> {
    /// The sentence of a refusal.
    fn refused(&self, me: usize, why: Refusal) -> Error {
        let Purpose { what, members, signature, .. } = self;
        let group = listed(members);
        let (text, status) = match why {
            Refusal::Differ(a, b) => (
                format!(
                    "failed signature validation: mismatched collectives between the peers: rank {a} and rank {b} of \
                     {group} differ; rank {me} has {}; give all ranks of the group the same program",
                    signature.describe(members)
                ),
                Status::INVALID,
            ),
            Refusal::Silent { who, waiter, why } => {
                // Not all of it may have travelled.
                let why = if why.is_empty() { "its own error says more".into() } else { why };
                (
                    format!(
                        "rank {who} of {group} did not take part, rank {waiter} waited for it: {why}; no rank of the group \
                         made the communicator"
                    ),
                    Status::CLOSED,
                )
            }
            Refusal::NoId(why) => (format!("failed to get unique ID on rank {}: {why}", members[0]), Status::FAILURE),
            Refusal::Foreign(who) => (
                format!("rank {who} of {group} sent a message that cannot be; is it another version?"),
                Status::FAILURE,
            ),
        };
        Error::Group { what: format!("{what} {text}"), status }
    }

    fn no_init(&self, e: &Error) -> Error {
        let hint = if e.to_string().contains("Unsupported topology") {
            "; choose groups that cover 1, 4, 8 or 16 whole accelerators without a gap, or set \
             CCOM_DBG_DISABLE_VERIFY_TOPOLOGY=1 on all ranks"
        } else {
            ""
        };
        let (what, group, stream) = (&self.what, listed(self.members), self.stream);
        let status = e.status();
        Error::Group {
            what: format!(
                "{what} failed to init NCCL comm stream_id:{stream} of ranks {group} (in what follows, rank 0 is the \
                 first of them, rank 1 the second): {e}{hint}"
            ),
            status,
        }
    }
}

impl Communicator {
    /// The communicator of a replica group: of those ranks of `group` that bootstrap together, in that order. Made once per
    /// list of bootstrap participants (INV-28), by all of them at the same point of the program; a later request for the same
    /// list answers the same communicator, and builds its graph if only now it is wanted.
    ///
    /// Before it is made, all compare the signature of their programs; if two differ, no rank goes on (INV-29).
    ///
    /// # Errors
    /// [`Error::Usage`] for a group that cannot be, [`Error::Group`] for programs that differ, a rank that does not take
    /// part, or an init that fails.
    pub fn replica_group(
        &self,
        group: &Group,
        program: &Signature,
        options: GroupOptions,
    ) -> Result<PooledComm, Error> {
        let (rank, n) = (self.rank(), self.nranks());
        let members = &group.bootstrap_participants;
        check_members(group, rank, n)?;
        if options.stream >= GROUP_STREAMS {
            let stream = options.stream;
            return Err(bad(format!(
                "stream {stream} of a group: there are {GROUP_STREAMS}, 0 to {}",
                GROUP_STREAMS - 1
            )));
        }
        let key = pool::key(members);
        let mut state = lock(&self.groups.state);
        if let Some(found) = state.pool.find(&key) {
            // Another thread may hold the communicator and ask its parent for something.
            drop(state);
            let mut comm = found.lock();
            if options.graph && comm.rings().is_empty() {
                comm.build_graph()?;
            }
            drop(comm);
            return Ok(found);
        }
        let id = state.pool.next_id();
        let purpose = Purpose { what: format!("[gid: {id}]"), members, signature: program, stream: options.stream };
        let made = self.make(&mut state, GroupKind::Replica, &purpose, options.graph)?;
        Ok(state.pool.add(key, id, options.stream, made))
    }

    /// Pooled communicators of this one that somebody holds.
    pub fn pooled(&self) -> usize {
        lock(&self.groups.state).pool.alive()
    }

    /// Splits the ranks by colour, as `ncclCommSplit` and `MPI_Comm_split` do: those of one colour get a communicator, in
    /// the order of `key`, ties in the order of their ranks. All ranks call it; one without a colour takes part in the
    /// exchange and gets nothing.
    ///
    /// # Errors
    /// [`Error::Plugin`] of the exchange, [`Error::Group`] as [`Communicator::replica_group`].
    pub fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Communicator>, Error> {
        let mut state = lock(&self.groups.state);
        in_step(&state)?;
        let mut row = [0u8; ROW_BYTES];
        row[0] = u8::from(color.is_some());
        row[1..5].copy_from_slice(&color.unwrap_or(0).to_le_bytes());
        row[5..].copy_from_slice(&key.to_le_bytes());
        let (of, nth) = (self.core().key, state.splits);
        state.splits = nth.wrapping_add(1);
        let block = proven_row(of, nth, self.rank(), &row);
        let all = self.bootstrap_all_gather(&block).inspect_err(|e| state.out_of_step = Some(e.to_string()))?;
        let all = rows(of, nth, &all).map_err(|rank| Error::Group {
            what: format!(
                "split: what the plugin gathered as rank {rank}'s colour is not what that rank said; no communicator is made of it"
            ),
            status: Status::FAILURE,
        })?;
        let Some(mine) = color else { return Ok(None) };
        let members = colour(&all, mine);
        let signature = Signature::of_members("split", &members);
        let what = format!("split, colour {mine}:");
        let purpose = Purpose { what, members: &members, signature: &signature, stream: 0 };
        let graph = self.wants_graph();
        self.make(&mut state, GroupKind::Split, &purpose, graph).map(Some)
    }

    /// A communicator of all ranks but `excluded`, as `ncclCommShrink` makes it after a failure: ranks keep their order.
    /// Every rank that is left calls it with the same list; the excluded ones do not, and may be dead. This communicator may be
    /// broken, its library stopped: nothing of it is used but the ranks' meeting places and whose process has ended, and no
    /// excluded rank is asked or read. It is to be dropped afterwards; its tensors serve in the new one.
    ///
    /// A rank waits for the others as long as an operation does; one that is gone is noticed at once.
    ///
    /// # Errors
    /// [`Error::Usage`] for a list that cannot be, [`Error::Group`] if the survivors' lists differ or one of them does not take
    /// part, which names it: call again with it on the list.
    pub fn shrink(&self, excluded: &[usize]) -> Result<Communicator, Error> {
        let (rank, n) = (self.rank(), self.nranks());
        for (i, r) in excluded.iter().enumerate() {
            let list = listed(excluded);
            if *r >= n {
                return Err(bad(format!("shrink without {list}: rank {r} is not one of the {n} ranks")));
            }
            if excluded[..i].contains(r) {
                return Err(bad(format!("shrink without {list}: rank {r} is listed twice")));
            }
            if *r == rank {
                return Err(bad(format!("shrink without {list}: rank {rank} is one of them and must not call it")));
            }
        }
        let members: Vec<usize> = (0..n).filter(|r| !excluded.contains(r)).collect();
        let signature = Signature::of_members("shrink", &members);
        let what = format!("shrink without {}:", listed(excluded));
        let purpose = Purpose { what, members: &members, signature: &signature, stream: 0 };
        let (graph, of) = (self.wants_graph(), self.core().key);
        match self.groups.beacon.get() {
            Some(beacon) => {
                let mut beacon = lock(beacon);
                let endpoint = Some(&*self.core().endpoint);
                let mut meeting = Meeting::begin(&mut beacon, &members, signature.bytes(), self.timeout(), endpoint);
                let key = of.group(GroupKind::Shrink, &members, meeting.nth());
                let id = self.decide(&purpose, key, &mut meeting)?;
                self.join(&purpose, id, key, graph)
            }
            // A group of one has nobody to ask.
            None => {
                let key = lock(&self.groups.state).next_key(of, GroupKind::Shrink, &members);
                let id = self.runtime().host().start_root(1, key)?;
                self.join(&purpose, id, key, graph)
            }
        }
    }

    fn wants_graph(&self) -> bool {
        !self.rings().is_empty()
    }

    /// Verdict and id over the bootstrap, then the init.
    fn make(
        &self,
        state: &mut State,
        kind: GroupKind,
        purpose: &Purpose<'_>,
        graph: bool,
    ) -> Result<Communicator, Error> {
        in_step(state)?;
        let parent = self.core().key;
        let key = state.next_key(parent, kind, purpose.members);
        let bootstrap = Bootstrap { comm: self, members: purpose.members, begun: Instant::now(), lost: false };
        let mut messages = Sealed::new(bootstrap, parent, key, self.rank());
        let decided = self.decide(purpose, key, &mut messages);
        if messages.broken || messages.by.lost {
            let why = decided.as_ref().err().map_or_else(String::new, Error::to_string);
            state.out_of_step = Some(why);
        }
        self.join(purpose, decided?, key, graph)
    }

    /// The id that travels has no secret part: the ranks have the key.
    fn decide(
        &self,
        purpose: &Purpose<'_>,
        key: GroupKey,
        messages: &mut impl Messages,
    ) -> Result<[u8; ID_BYTES], Error> {
        let (r, n) = (self.position(purpose.members)?, purpose.members.len());
        let id = || self.runtime().host().start_root(n, key).map_err(|e| e.to_string());
        agree(messages, r, n, purpose.signature.bytes(), id).map_err(|why| purpose.refused(self.rank(), why))
    }

    fn join(
        &self,
        purpose: &Purpose<'_>,
        id: [u8; ID_BYTES],
        key: GroupKey,
        graph: bool,
    ) -> Result<Communicator, Error> {
        let (r, n) = (self.position(purpose.members)?, purpose.members.len());
        let options = CommOptions { graph, timeout: Some(self.timeout()), ..CommOptions::with_id(id, r, n) };
        Communicator::init_on(self.runtime(), options, key, Some(self.place)).map_err(|e| purpose.no_init(&e))
    }

    fn position(&self, members: &[usize]) -> Result<usize, Error> {
        let me = self.rank();
        let found = members.iter().position(|m| *m == me);
        found.ok_or_else(|| Error::Bug(format!("rank {me} makes a group {} without itself", listed(members))))
    }
}

fn in_step(state: &State) -> Result<(), Error> {
    match &state.out_of_step {
        None => Ok(()),
        Some(why) => Err(Error::Group {
            what: format!(
                "the bootstrap of this communicator makes no more groups since one of them failed ({why}); shrink does not \
                 need it"
            ),
            status: Status::CLOSED,
        }),
    }
}

fn check_members(group: &Group, rank: usize, n: usize) -> Result<(), Error> {
    for (name, list) in
        [("participants", &group.participants), ("bootstrap participants", &group.bootstrap_participants)]
    {
        let shown = listed(list);
        let mut seen = vec![false; n];
        for r in list {
            match seen.get_mut(*r) {
                None => return Err(bad(format!("{name} {shown}: rank {r} is not one of the {n} ranks"))),
                Some(s) if *s => return Err(bad(format!("{name} {shown}: rank {r} is listed twice"))),
                Some(s) => *s = true,
            }
        }
        if !seen[rank] {
            return Err(bad(format!("{name} {shown}: replica groups does not have myself, rank {rank}")));
        }
    }
    Ok(())
}

/// Of a rank in a split: whether it has a colour, the colour, the key.
const ROW_BYTES: usize = 9;

/// What rank `rank` says of itself in the `nth` split of a communicator with the key `of`, and what proves it: the plugin that
/// gathers the rows decides about nobody's colour.
fn proven_row(of: GroupKey, nth: u32, rank: usize, row: &[u8]) -> Vec<u8> {
    [row, &row_tag(of, nth, rank, row).finalize().into_bytes()].concat()
}

fn row_tag(of: GroupKey, nth: u32, rank: usize, row: &[u8]) -> hmac::Hmac<sha2::Sha256> {
    let mut mac = of.tag("split row");
    for part in [&nth.to_le_bytes(), &(rank as u32).to_le_bytes(), row] {
        mac.update(part);
    }
    mac
}

/// The rows of all ranks, without their proofs.
///
/// # Errors
/// The first rank whose row is not its own.
fn rows(of: GroupKey, nth: u32, gathered: &[u8]) -> Result<Vec<u8>, usize> {
    let mut table = Vec::new();
    for (rank, block) in gathered.chunks(ROW_BYTES + 32).enumerate() {
        let (row, proof) = block.split_at_checked(ROW_BYTES).ok_or(rank)?;
        row_tag(of, nth, rank, row).verify_slice(proof).map_err(|_| rank)?;
        table.extend_from_slice(row);
    }
    Ok(table)
}

/// The ranks of one colour from the gathered table, by key and rank.
fn colour(table: &[u8], mine: u32) -> Vec<usize> {
    let mut found: Vec<(i32, usize)> = Vec::new();
    for (rank, b) in table.chunks_exact(ROW_BYTES).enumerate() {
        let word = |at: usize| u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
        if b[0] == 1 && word(1) == mine {
            found.push((word(5) as i32, rank));
        }
    }
    found.sort_unstable();
    found.into_iter().map(|(_, rank)| rank).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(groups: &[&[usize]], world: usize, me: usize) -> String {
        let groups: Vec<Vec<usize>> = groups.iter().map(|g| g.to_vec()).collect();
        ReplicaGroups::new(&groups, world, me).unwrap_err().to_string()
    }

    #[test]
    fn wrong_replica_groups_are_refused_with_the_list() {
        let overlap = refused(&[&[0, 1], &[1, 2, 3]], 4, 0);
        assert!(overlap.contains("rank 1 is in group 0, [0, 1], and in group 1, [1, 2, 3]"), "{overlap}");
        let gap = refused(&[&[0, 1], &[3]], 4, 0);
        assert!(gap.contains("gap: of the 4 ranks, [2] are in none of [[0, 1], [3]]"), "{gap}");
        let me = refused(&[&[0, 1], &[3]], 4, 2);
        assert!(me.contains("replica groups does not have myself: rank 2 of 4 is in none of [[0, 1], [3]]"), "{me}");
        let outside = refused(&[&[0, 1], &[2, 9]], 4, 0);
        assert!(outside.contains("group 1, [2, 9], holds rank 9") && outside.contains("0 to 3"), "{outside}");
        let twice = refused(&[&[0, 0], &[1]], 2, 0);
        assert!(twice.contains("group 0, [0, 0], holds rank 0 twice"), "{twice}");
        assert!(refused(&[], 2, 0).contains("empty"));
        assert!(refused(&[&[0, 1], &[]], 2, 0).contains("replica group 1 of [[0, 1], []] is empty"));
        let long: Vec<usize> = (1..100).collect();
        let cut = refused(&[&long], 100, 0);
        assert!(cut.contains("and 67 more") && cut.len() < 400, "{cut}");
        let fine = ReplicaGroups::new(&[vec![2, 0], vec![1]], 3, 0).unwrap();
        assert_eq!(fine.mine().participants, [2, 0]);
    }

    /// Whoever gathers the rows can change none, give one to another rank, or keep one for a later split.
    #[test]
    fn a_row_of_a_split_is_its_ranks_own() {
        let key = GroupKey::of_id(&[0x4B; 32], 0);
        let said: Vec<[u8; ROW_BYTES]> = (0..3).map(|rank| [1, rank, 0, 0, 0, 0, 0, 0, 0]).collect();
        let all: Vec<Vec<u8>> = said.iter().enumerate().map(|(rank, row)| proven_row(key, 7, rank, row)).collect();
        assert_eq!(rows(key, 7, &all.concat()).unwrap(), said.concat());
        let mut changed = all.clone();
        changed[1][1] = 0;
        assert_eq!(rows(key, 7, &changed.concat()), Err(1));
        let exchanged = [all[1].clone(), all[0].clone(), all[2].clone()];
        assert_eq!(rows(key, 7, &exchanged.concat()), Err(0));
        assert_eq!(rows(key, 8, &all.concat()), Err(0));
        assert_eq!(rows(GroupKey::of_id(&[1; 32], 0), 7, &all.concat()), Err(0));
        assert_eq!(rows(key, 7, &all.concat()[..2 * (ROW_BYTES + 32) + 5]), Err(2));
    }

    #[test]
    fn colours_are_ordered_by_key_then_rank() {
        let mut table = Vec::new();
        for (has, color, key) in [(1u8, 7u32, 5i32), (1, 7, -1), (0, 0, -9), (1, 8, 0), (1, 7, 5)] {
            table.push(has);
            table.extend(color.to_le_bytes());
            table.extend(key.to_le_bytes());
        }
        assert_eq!(colour(&table, 7), [1, 0, 4]);
        assert_eq!(colour(&table, 8), [3]);
        assert_eq!(colour(&table, 0), [] as [usize; 0], "no colour is not colour 0");
    }

    /// The key is the list's bytes, in its order.
    ///
    /// Proves INV-28.
    #[test]
    fn the_key_is_the_bytes_of_the_list() {
        assert_eq!(pool::key(&[1, 258]), [1, 0, 0, 0, 2, 1, 0, 0]);
        assert_ne!(pool::key(&[0, 1]), pool::key(&[1, 0]));
    }

    /// All ranks of a group come to the same key, whatever other groups each was in before; a later group of the same ranks, and
    /// one of another kind, has another.
    #[test]
    fn each_group_of_the_same_ranks_has_a_key_of_its_own() {
        let (of, mut one, mut other) = (GroupKey::of_id(&[0x4B; 32], 0), State::default(), State::default());
        let first = one.next_key(of, GroupKind::Split, &[0, 1]);
        other.next_key(of, GroupKind::Split, &[1, 2]);
        other.next_key(of, GroupKind::Replica, &[0, 1]);
        assert_eq!(first, other.next_key(of, GroupKind::Split, &[0, 1]));
        let second = one.next_key(of, GroupKind::Split, &[0, 1]);
        assert_ne!(first, second);
        assert_eq!(second, other.next_key(of, GroupKind::Split, &[0, 1]));
        assert_ne!(one.next_key(of, GroupKind::Replica, &[0, 1]), first);
    }
}
