//! The root of a group: collects every rank's record, checks them, picks cluster id and epoch, answers.
//!
//! One body serves both shapes. A connection brings one record (flat), or those of a whole server in one message, from its
//! local root (hierarchical); the answer goes back on the same connection (C-14), as many answers as records.
//!
//! A wrong world size, a duplicate rank or another hash fails the group, and every connected rank is told why: there is no
//! partial world (INV-32). A connection with a foreign magic is refused by itself: a stray program must not end a job, and
//! one that says nothing must not hold it up.
//!
//! After the answers the root stays until every rank has said [`MessageKind::Joined`], then says [`MessageKind::Complete`] to all. A rank
//! that leaves before is noticed here, where its connection ends, and named to all the others at once.

use std::collections::BTreeSet;

use super::lobby::Lobby;
use super::wire::{
    ANSWER_BYTES, Address, Header, Info, MAGIC, MAX_REFUSAL, MessageKind, RootAnswer, decode_refusal, encode_refusal,
};
use super::{
    LOOK_MS, Look, MAX_MESSAGE, REASON_MS, Sockets, expect, look, reason, recv_any, recv_message, send_message,
};
use crate::fail::{Code, Failure};

/// How long one connection may take to say what it wants.
const HELLO_MS: u32 = 2_000;
/// How long the root of a group that failed tells those who come later, before it tells rank 0. With rank 0 the root's own
/// process usually ends, and who comes then waits until its time is up.
const LINGER_MS: u32 = 2_000;

/// What a root was started for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Duty {
    /// World size.
    pub nranks: u32,
    /// Bound of every wait.
    pub timeout_ms: u32,
}

/// Records so far. Pure: this is where the group's rules are.
#[derive(Debug)]
pub struct Roll {
    nranks: usize,
    infos: Vec<Option<Info>>,
    hash: Option<Option<[u8; 16]>>,
}

impl Roll {
    /// An empty roll of `nranks` ranks.
    pub fn new(nranks: usize) -> Roll {
        Roll { nranks, infos: vec![None; nranks], hash: None }
    }

    /// Adds a record, or says why the group fails.
    pub fn add(&mut self, info: Info) -> Result<(), Failure> {
        let fail = |text: String| Err(Failure::new(Code::Failure, text));
        let n = self.nranks;
        if usize::try_from(info.nranks).ok() != Some(n) {
            return fail(format!(
                "rank {} believes in a world of {} ranks, the root in {n}; start all ranks with the same size",
                info.rank, info.nranks
            ));
        }
        let Some(place) = usize::try_from(info.rank).ok().and_then(|r| self.infos.get_mut(r)) else {
            return fail(format!("a rank says it is rank {} of {n}", info.rank));
        };
        if let Some(first) = place {
            return fail(format!(
                "rank {} joined twice, from {} and from {}; two processes claim the same rank",
                info.rank, first.listen, info.listen
            ));
        }
        match self.hash {
            None => self.hash = Some(info.hash),
            Some(h) if h == info.hash => {}
            Some(_) => {
                return fail(format!(
                    "rank {} ({}) runs another build than the first rank that joined (git hash mismatch); install one version everywhere",
                    info.rank, info.listen
                ));
            }
        }
        *place = Some(info);
        Ok(())
    }

    /// Ranks that have not joined.
    pub fn missing(&self) -> Vec<usize> {
        (0..self.nranks).filter(|r| self.infos[*r].is_none()).collect()
    }

    /// The answer for `rank`; `None` while its successor is missing.
    pub fn answer(&self, rank: usize, cluster_id: u64, epoch: i64) -> Option<RootAnswer> {
        let next = self.infos[(rank + 1) % self.nranks]?.listen;
        Some(RootAnswer { cluster_id, epoch, next })
    }

    /// Who is missing, in words.
    pub fn absence(&self, ms: u64) -> String {
        let missing = self.missing();
        let n = self.nranks;
        let shown: Vec<String> = missing.iter().take(16).map(usize::to_string).collect();
        let more = if missing.len() > 16 { format!(" and {} more", missing.len() - 16) } else { String::new() };
        format!("{}/{n} ranks joined after {ms} ms: missing {}{more}", n - missing.len(), shown.join(", "))
    }
}

/// A connection that brought records.
struct Visitor<C> {
    conn: C,
    ranks: Vec<i32>,
    header: std::cell::Cell<Option<Header>>,
    /// Its ranks' ring edges are there.
    joined: std::cell::Cell<bool>,
}

impl<C> Visitor<C> {
    fn new(conn: C, ranks: Vec<i32>) -> Visitor<C> {
        Visitor { conn, ranks, header: Default::default(), joined: Default::default() }
    }

    fn name(&self) -> String {
        match self.ranks[..] {
            [one] => format!("rank {one}"),
            [first, .., last] => format!("a server's root, of ranks {first} to {last},"),
            [] => "a rank".into(),
        }
    }
}

/// Tells a connection that the group ends.
fn refuse<S: Sockets>(s: &S, conn: &S::Conn, failure: &Failure) {
    // A rank that is gone needs no answer.
    let _ = send_message(s, conn, MessageKind::Refusal, &encode_refusal(failure), HELLO_MS);
}

/// Who has not wired its ring edges. One that waits for its predecessor is none of those if there are others.
fn unwired<C>(visitors: &[Visitor<C>], nranks: u32) -> String {
    let lacks = |rank: i32| visitors.iter().any(|v| !v.joined.get() && v.ranks.contains(&rank));
    let before = |rank: i32| (rank - 1).rem_euclid(nranks as i32);
    let all: Vec<&Visitor<C>> = visitors.iter().filter(|v| !v.joined.get()).collect();
    let first: Vec<&Visitor<C>> = all.iter().copied().filter(|v| v.ranks.iter().any(|r| !lacks(before(*r)))).collect();
    let named = if first.is_empty() { all } else { first };
    named.iter().map(|v| v.name()).collect::<Vec<_>>().join(", ")
}

/// The records that a visitor brings; none for what is no record of ours, which does not matter. Ours of another form come from a
/// rank of another build, which ends the group (INV-32).
fn records<S: Sockets>(s: &S, conn: &S::Conn, kind: MessageKind, payload: &[u8]) -> Result<Option<Vec<Info>>, Failure> {
    let ours = matches!(kind, MessageKind::InfoToRoot | MessageKind::TaggedInfoToRoot)
        && payload.starts_with(&MAGIC.to_le_bytes());
    match Info::decode_all(kind, payload) {
        Ok(infos) => Ok(Some(infos)),
        Err(e) if ours => {
            let text = format!(
                "a rank runs another build of the collectives plugin than its root ({}); install one version everywhere",
                e.text
            );
            let failure = Failure::new(Code::Failure, text);
            refuse(s, conn, &failure);
            Err(failure)
        }
        Err(_) => Ok(None),
    }
}

/// Tells all visitors, and for a while those who come later, that the group ends; those that brought rank 0 last. A rank that
/// was told and comes again belongs to a new attempt: it is asked to wait for that one's root.
fn refuse_all<S: Sockets>(
    s: &S,
    listener: &S::Listener,
    lobby: &mut Lobby<S::Conn>,
    duty: Duty,
    visitors: &[Visitor<S::Conn>],
    failure: &Failure,
) {
    // After this root's own time-out nobody is waited for: the ranks' time is nearly up.
    let own = failure.code == Code::Timeout && failure.origin.is_none();
    let linger = if own { 0 } else { LINGER_MS.min(duty.timeout_ms / 4) };
    let until = s.now_ms() + u64::from(linger);
    let mut told: BTreeSet<i32> = visitors.iter().flat_map(|v| v.ranks.iter().copied()).collect();
    // Who said that it will not come is not waited for.
    told.extend(failure.absent.and_then(|r| i32::try_from(r).ok()));
    // The first that brought rank 0: one that claims to be it too is told now.
    let last = visitors.iter().position(|v| v.ranks.contains(&0));
    let now = visitors.iter().enumerate().filter(|(i, _)| Some(*i) != last);
    now.for_each(|(_, v)| refuse(s, &v.conn, failure));
    // Without rank 0 nobody's end takes this root along but its runtime's.
    while told.len() < duty.nranks as usize {
        // The time is up, or the runtime closes.
        let Ok((conn, kind, payload)) = lobby.next(s, listener, until, false, || Ok(())) else { break };
        let Ok(infos) = Info::decode_all(kind, &payload) else { continue };
        let ranks: Vec<i32> = infos.iter().map(|i| i.rank).collect();
        if ranks.iter().any(|r| told.contains(r)) {
            let _ = send_message(s, &conn, MessageKind::Complete, &[], HELLO_MS);
        } else {
            refuse(s, &conn, failure);
            told.extend(ranks);
        }
    }
    // Who has not spoken is of a new attempt, or tries again.
    for (conn, _) in lobby.who() {
        let _ = send_message(s, conn, MessageKind::Complete, &[], LOOK_MS);
    }
    if let Some(v) = last.and_then(|i| visitors.get(i)) {
        refuse(s, &v.conn, failure);
    }
}

/// Tells a root that `rank` will not come, so that the group ends now and not when the time is up. A root that is not there
/// within `HELLO_MS` cannot be told.
pub fn withdraw<S: Sockets>(s: &S, root: &Address, rank: usize, nranks: usize, why: &Failure, ms: u32) {
    let ms = ms.min(HELLO_MS);
    let begun = s.now_ms();
    while s.now_ms() - begun < u64::from(ms) {
        // Looks only: that the root cannot be reached is not why this rank fails.
        let conn = match s.connect(root, LOOK_MS) {
            Ok(conn) => conn,
            // The root may be about to listen.
            Err(e) if e.code == Code::Timeout => continue,
            // What fails at once will fail again.
            Err(_) => return,
        };
        let said = if why.told().is_empty() { "its own error says why" } else { why.told() };
        let text = format!("rank {rank} of {nranks} gave up before it joined: {said}");
        let told = Failure::new(why.code, text).without(rank);
        let _ = send_message(s, &conn, MessageKind::Refusal, &encode_refusal(&told), ms);
        return;
    }
}

/// Asks whoever listens at `root` to take `info` in: fails with the reason if it is the root of this very group, to which
/// another process has come as this rank. Anything else there is no reason to fail.
pub fn claim<S: Sockets>(s: &S, root: &Address, info: &Info, ms: u32) -> Result<(), Failure> {
    let until = s.now_ms() + u64::from(ms);
    let Ok(conn) = s.connect(root, LOOK_MS.min(ms)) else { return Ok(()) };
    if send_message(s, &conn, info.kind(), &info.encode(), LOOK_MS).is_err() {
        return Ok(());
    }
    let mut header = None;
    while s.now_ms() < until {
        match look(s, &conn, &mut header, MAX_REFUSAL, LOOK_MS) {
            Look::Nothing => {}
            Look::Message(MessageKind::Refusal, payload) => return decode_refusal(&payload).map_or(Ok(()), Err),
            Look::Message(..) | Look::Gone => return Ok(()),
        }
    }
    Ok(())
}

/// The root gives up a little before the ranks that wait for it do, so that they hear who is missing.
fn patience(timeout_ms: u32) -> u64 {
    u64::from(timeout_ms - (timeout_ms / 10).min(1000))
}

/// Whether a wait in the lobby ended with its time. A time-out that a rank reports has that rank's sentence.
fn timed_out(e: &Failure) -> bool {
    e.code == Code::Timeout && e.text.is_empty()
}

/// Accepts until every rank reported, answers all, and stays until all are wired. `cluster_id` and `epoch` are the group's.
pub fn serve<S: Sockets>(
    s: &S,
    listener: &S::Listener,
    duty: Duty,
    cluster_id: u64,
    epoch: i64,
) -> Result<(), Failure> {
    let mut visitors: Vec<Visitor<S::Conn>> = Vec::new();
    let mut lobby = Lobby::new(HELLO_MS.min(duty.timeout_ms), MAX_MESSAGE);
    let ended = collect(s, listener, duty, &mut lobby, &mut visitors).and_then(|roll| {
        for v in &visitors {
            let mut payload = Vec::with_capacity(v.ranks.len() * ANSWER_BYTES);
            for r in v.ranks.iter().filter_map(|r| usize::try_from(*r).ok()) {
                let Some(a) = roll.answer(r, cluster_id, epoch) else { continue };
                payload.extend_from_slice(&a.encode());
            }
            // One that cannot be answered has left: the next look at its connection says so to all.
            let _ = send_message(s, &v.conn, MessageKind::InfoFromRoot, &payload, duty.timeout_ms);
        }
        see_off(s, listener, &mut lobby, duty, &visitors, || Ok(()))
    });
    match ended {
        Ok(()) => complete(s, &visitors, &lobby),
        Err(e) => {
            refuse_all(s, listener, &mut lobby, duty, &visitors, &e);
            Err(e)
        }
    }
}

/// All have joined: the ranks need this root no more. Who waits in the lobby is of another group, as soon as this one is told.
fn complete<S: Sockets>(s: &S, visitors: &[Visitor<S::Conn>], lobby: &Lobby<S::Conn>) -> Result<(), Failure> {
    for conn in visitors.iter().map(|v| &v.conn).chain(lobby.who().map(|(conn, _)| conn)) {
        // One that has left just now is found by its ring neighbours.
        let _ = send_message(s, conn, MessageKind::Complete, &[], HELLO_MS);
    }
    Ok(())
}

/// One look at every visitor: whether all have joined. One that leaves before the group is complete ends it: others wait for
/// a connection that it will never make.
fn watch<S: Sockets>(s: &S, visitors: &[Visitor<S::Conn>]) -> Result<bool, Failure> {
    for v in visitors {
        let mut header = v.header.take();
        let found = look(s, &v.conn, &mut header, MAX_REFUSAL, 0);
        v.header.set(header);
        match found {
            Look::Nothing => {}
            Look::Message(MessageKind::Joined, _) => v.joined.set(true),
            Look::Message(MessageKind::Refusal, payload) => {
                let text = || Failure::new(Code::Failure, format!("{} ended the bootstrap", v.name()));
                return Err(decode_refusal(&payload).unwrap_or_else(text));
            }
            Look::Message(..) | Look::Gone => {
                let text = format!(
                    "{} left the bootstrap before the group was complete: its process has ended, or see its own error",
                    v.name()
                );
                return Err(Failure::new(Code::Closed, text));
            }
        }
    }
    Ok(visitors.iter().all(|v| v.joined.get()))
}

/// Waits until every visitor has said that its ranks are wired.
fn see_off<S: Sockets>(
    s: &S,
    listener: &S::Listener,
    lobby: &mut Lobby<S::Conn>,
    duty: Duty,
    visitors: &[Visitor<S::Conn>],
    mut meanwhile: impl FnMut() -> Result<(), Failure>,
) -> Result<(), Failure> {
    let patience = patience(duty.timeout_ms);
    let until = s.now_ms() + patience;
    loop {
        let mut all = false;
        // The lobby's rounds give the pauses, and whoever comes now is told that the group has all its ranks.
        let round = s.now_ms() + u64::from(LOOK_MS);
        let late = lobby.next(s, listener, round.min(until), true, || {
            meanwhile()?;
            all = watch(s, visitors)?;
            // Ends the round: what is left of the pause is not needed.
            if all { Err(Failure::new(Code::Other(0), "")) } else { Ok(()) }
        });
        match late {
            _ if all => return Ok(()),
            Ok((conn, kind, payload)) => {
                if let Some(i) = Info::decode_all(kind, &payload).ok().and_then(|all| all.first().copied()) {
                    let (who, n) = (i.rank, duty.nranks);
                    let text = format!("rank {who} joined twice: all {n} ranks had joined when it came");
                    refuse(s, &conn, &Failure::new(Code::Failure, text));
                }
            }
            Err(e) if timed_out(&e) => {
                if s.now_ms() >= until {
                    let text =
                        format!("after {patience} ms the ring is not wired on {}", unwired(visitors, duty.nranks));
                    return Err(Failure::new(Code::Timeout, text));
                }
            }
            Err(e) => return Err(e),
        }
    }
}

fn collect<S: Sockets>(
    s: &S,
    listener: &S::Listener,
    duty: Duty,
    lobby: &mut Lobby<S::Conn>,
    visitors: &mut Vec<Visitor<S::Conn>>,
) -> Result<Roll, Failure> {
    let mut roll = Roll::new(duty.nranks as usize);
    // The clock starts anew with the first rank, because a root may be made long before its ranks are; strays do not move it.
    let mut until = s.now_ms() + patience(duty.timeout_ms);
    let mut started = false;
    while !roll.missing().is_empty() {
        let watching = !visitors.is_empty();
        let (conn, kind, payload) = match lobby.next(s, listener, until, watching, || watch(s, visitors).map(drop)) {
            Ok(spoken) => spoken,
            Err(e) if timed_out(&e) => {
                return Err(Failure::new(Code::Timeout, roll.absence(patience(duty.timeout_ms))));
            }
            Err(e) => return Err(e),
        };
        if kind == MessageKind::Refusal
            && let Some(why) = decode_refusal(&payload)
        {
            return Err(why);
        }
        let Some(infos) = records(s, &conn, kind, &payload)? else { continue };
        if !started {
            started = true;
            until = s.now_ms() + patience(duty.timeout_ms);
        }
        visitors.push(Visitor::new(conn, infos.iter().map(|i| i.rank).collect()));
        for info in infos {
            roll.add(info)?;
        }
    }
    Ok(roll)
}

/// Reports records to a root; its connection, and as many answers. A root that is over, of an earlier attempt or of another group,
/// is dialled again until the time is up: the own one will listen there when that one is gone.
pub(crate) fn report<S: Sockets>(
    s: &S,
    root: &Address,
    infos: &[Info],
    ms: u32,
) -> Result<(S::Conn, Vec<u8>), Failure> {
    let until = s.now_ms() + u64::from(ms);
    let payload: Vec<u8> = infos.iter().flat_map(Info::encode).collect();
    let (kind, bytes) = (infos.first().map_or(MessageKind::InfoToRoot, Info::kind), infos.len() * ANSWER_BYTES);
    loop {
        let left = until.saturating_sub(s.now_ms()) as u32;
        let conn = s.connect(root, left.max(1))?;
        let mut header = None;
        let answer = send_message(s, &conn, kind, &payload, ms)
            // The root's clock began with the first report, so this wait is the longer one.
            .and_then(|()| recv_any(s, &conn, &mut header, bytes.max(MAX_REFUSAL), ms));
        match answer {
            Ok((MessageKind::Complete, _)) if s.now_ms() < until => {}
            Err(e) if e.code == Code::Absent && s.now_ms() < until => {}
            Ok((kind, payload)) => return Ok((conn, expect(kind, payload, MessageKind::InfoFromRoot, bytes)?)),
            Err(e) => return Err(hear_out(s, &conn, root, &mut header, ms, e)),
        }
    }
}

/// A server's local root: collects the records of ranks `first .. first + count`, forwards them in one message, hands the
/// answers back, and stays until the whole group is wired.
pub fn serve_local<S: Sockets>(
    s: &S,
    listener: &S::Listener,
    root: &Address,
    first: u32,
    count: u32,
    duty: Duty,
) -> Result<(), Failure> {
    let mut visitors: Vec<Visitor<S::Conn>> = Vec::new();
    let mut lobby = Lobby::new(HELLO_MS.min(duty.timeout_ms), MAX_REFUSAL);
    let mut up = None;
    let result = (|| {
        let infos = collect_local(s, listener, first, count, duty, &mut lobby, &mut visitors)?;
        let (conn, answers) = report(s, root, &infos, duty.timeout_ms)?;
        let (conn, mut header) = (up.insert(conn), None);
        for (v, a) in visitors.iter().zip(answers.chunks(ANSWER_BYTES)) {
            // One that cannot be answered has left: the next look at its connection says so to all.
            let _ = send_message(s, &v.conn, MessageKind::InfoFromRoot, a, duty.timeout_ms);
        }
        see_off(s, listener, &mut lobby, duty, &visitors, || watch_root(s, conn, &mut header))?;
        send_message(s, conn, MessageKind::Joined, &[], duty.timeout_ms)?;
        recv_message(s, conn, &mut header, MessageKind::Complete, 0, duty.timeout_ms)
            .map_err(|e| hear_out(s, conn, root, &mut header, duty.timeout_ms, e))
    })();
    match result {
        Ok(_) => complete(s, &visitors, &lobby),
        Err(e) => {
            visitors.iter().for_each(|v| refuse(s, &v.conn, &e));
            // The global root then fails the whole group at once instead of waiting.
            let up = up.map_or_else(|| s.connect(root, HELLO_MS.min(duty.timeout_ms)), Ok);
            if let Ok(up) = up {
                let _ = send_message(s, &up, MessageKind::Refusal, &encode_refusal(&e), HELLO_MS);
            }
            Err(e)
        }
    }
}

/// One look at the connection to a root: fails with what it says, or if it is gone.
pub(crate) fn watch_root<S: Sockets>(s: &S, conn: &S::Conn, header: &mut Option<Header>) -> Result<(), Failure> {
    match look(s, conn, header, MAX_REFUSAL, 0) {
        Look::Nothing => Ok(()),
        Look::Message(MessageKind::Refusal, payload) => Err(decode_refusal(&payload)
            .unwrap_or_else(|| Failure::new(Code::Failure, "the bootstrap root ended the group without a reason"))),
        Look::Message(kind, _) => {
            Err(Failure::new(Code::Failure, format!("the bootstrap root said {kind:?} out of turn")))
        }
        Look::Gone => {
            let text =
                "the bootstrap root is gone: the process that ran it (of rank 0, or of the id's maker) has ended";
            Err(Failure::new(Code::Closed, text))
        }
    }
}

/// A failed wait for the root at `at`, or for what the root watches over. One whose time is up hears the root out, which is
/// about to say who is missing; a root that says nothing is what failed.
pub(crate) fn hear_out<S: Sockets>(
    s: &S,
    conn: &S::Conn,
    at: &Address,
    header: &mut Option<Header>,
    ms: u32,
    e: Failure,
) -> Failure {
    if e.code != Code::Timeout || e.origin.is_some() {
        return e;
    }
    reason(s, conn, header, REASON_MS).unwrap_or_else(|| {
        let text =
            format!("heard nothing from the root at {at} in time ({ms} ms): is the process that runs it stopped?");
        let said = if e.text.is_empty() { text } else { format!("{text} {}", e.text) };
        Failure::new(Code::Timeout, said)
    })
}

fn collect_local<S: Sockets>(
    s: &S,
    listener: &S::Listener,
    first: u32,
    count: u32,
    duty: Duty,
    lobby: &mut Lobby<S::Conn>,
    visitors: &mut Vec<Visitor<S::Conn>>,
) -> Result<Vec<Info>, Failure> {
    let mut infos: Vec<Info> = Vec::new();
    // Before the group's root gives up, so that it hears which ones of this server are missing.
    let until = s.now_ms() + patience(patience(duty.timeout_ms) as u32);
    while infos.len() < count as usize {
        let watching = !visitors.is_empty();
        let spoken = lobby.next(s, listener, until, watching, || watch(s, visitors).map(drop)).map_err(|e| {
            if !timed_out(&e) {
                return e;
            }
            let here: Vec<i32> = infos.iter().map(|i| i.rank).collect();
            let lacking: Vec<String> =
                (first..first + count).filter(|r| !here.contains(&(*r as i32))).map(|r| r.to_string()).collect();
            Failure::new(
                e.code,
                format!("the local root of ranks {first} to {} misses {}", first + count - 1, lacking.join(", ")),
            )
        });
        let (conn, kind, payload) = spoken?;
        if kind == MessageKind::Refusal
            && let Some(failure) = decode_refusal(&payload)
        {
            return Err(failure);
        }
        let Some(&[info]) = records(s, &conn, kind, &payload)?.as_deref() else { continue };
        visitors.push(Visitor::new(conn, vec![info.rank]));
        let local = u32::try_from(info.rank).is_ok_and(|r| (first..first + count).contains(&r));
        if !local {
            return Err(Failure::new(
                Code::Failure,
                format!("rank {} reported to the local root of ranks {first} to {}", info.rank, first + count - 1),
            ));
        }
        if infos.iter().any(|i| i.rank == info.rank) {
            return Err(Failure::new(Code::Failure, format!("rank {} joined twice on one server", info.rank)));
        }
        if let Some(first) = infos.first().filter(|i| i.hash != info.hash) {
            let text = format!(
                "rank {} runs another build than rank {} on the same server (git hash mismatch); install one version everywhere",
                info.rank, first.rank
            );
            return Err(Failure::new(Code::Failure, text));
        }
        infos.push(info);
    }
    Ok(infos)
}

#[cfg(test)]
mod tests {
    use super::super::wire::{RootId, parse_root_id};
    use super::*;

    fn info(rank: i32, nranks: i32, port: u16) -> Info {
        let Ok(RootId::Address(listen)) = parse_root_id(&format!("127.0.0.1:{port}")) else { panic!() };
        Info { rank, nranks, listen, hash: None }
    }

    /// Proves INV-32.
    #[test]
    fn size_range_duplicate_and_hash_are_refused() {
        let mut roll = Roll::new(2);
        roll.add(info(0, 2, 10)).unwrap();
        assert!(roll.add(info(1, 3, 11)).unwrap_err().text.contains("world of 3 ranks, the root in 2"));
        assert!(roll.add(info(2, 2, 11)).unwrap_err().text.contains("rank 2 of 2"));
        assert!(roll.add(info(-1, 2, 11)).is_err());
        let twice = roll.add(info(0, 2, 12)).unwrap_err().text;
        assert!(twice.contains("127.0.0.1:10") && twice.contains("127.0.0.1:12"), "{twice}");
        let other = Info { hash: Some([1; 16]), ..info(1, 2, 11) };
        assert!(roll.add(other).unwrap_err().text.contains("git hash mismatch"));
        assert_eq!(roll.absence(5000), "1/2 ranks joined after 5000 ms: missing 1");
        assert_eq!(roll.answer(0, 1, 2), None);
        roll.add(info(1, 2, 11)).unwrap();
        assert_eq!(roll.answer(1, 1, 2).unwrap().next.port(), 10);
    }
}
