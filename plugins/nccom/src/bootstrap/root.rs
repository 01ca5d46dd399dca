//! The root of a group: collects every rank's record, checks them, picks cluster id and epoch, answers.
//!
//! One body serves both shapes. A connection brings one record (flat), or those of a whole server in one message, from its
//! local root (hierarchical); the answer goes back on the same connection (C-14), as many answers as records.
//!
//! A wrong world size, a duplicate rank or another hash fails the group, and every connected rank is told why: there is no
//! partial world (INV-32). A connection with a foreign magic is refused by itself: a stray program must not end a job.

use super::wire::{Address, Info, Kind, MAX_REFUSAL, RootAnswer};
use super::{MAX_MESSAGE, Sockets, recv_any, send_message};
use crate::fail::{Code, Failure};

/// How long one connection may take to say what it wants. Connections are read one after the other, so a mute one costs
/// the group this much.
const HELLO_MS: u32 = 2_000;

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

struct Visitor<C> {
    conn: C,
    ranks: Vec<usize>,
}

fn refuse<S: Sockets>(s: &S, visitors: &[Visitor<S::Conn>], failure: &Failure) {
    let mut text = failure.text.as_bytes();
    text = &text[..text.len().min(MAX_REFUSAL)];
    for v in visitors {
        // A rank that is gone needs no answer.
        let _ = send_message(s, &v.conn, Kind::Refusal, text, HELLO_MS);
    }
}

/// The root gives up a little before the ranks that wait for it do, so that they hear who is missing.
fn patience(timeout_ms: u32) -> u64 {
    u64::from(timeout_ms - (timeout_ms / 10).min(1000))
}

/// Accepts until every rank reported, then answers all. `cluster_id` and `epoch` are the group's.
pub fn serve<S: Sockets>(
    s: &S,
    listener: &S::Listener,
    duty: Duty,
    cluster_id: u64,
    epoch: i64,
) -> Result<(), Failure> {
    let mut visitors: Vec<Visitor<S::Conn>> = Vec::new();
    let collected = collect(s, listener, duty, &mut visitors);
    let roll = match collected {
        Ok(roll) => roll,
        Err(e) => {
            refuse(s, &visitors, &e);
            return Err(e);
        }
    };
    let mut gone = None;
    for (i, v) in visitors.iter().enumerate() {
        let mut payload = Vec::with_capacity(v.ranks.len() * super::wire::ANSWER_BYTES);
        for r in &v.ranks {
            let Some(a) = roll.answer(*r, cluster_id, epoch) else { continue };
            payload.extend_from_slice(&a.encode());
        }
        if let Err(e) = send_message(s, &v.conn, Kind::InfoFromRoot, &payload, duty.timeout_ms) {
            let rank = v.ranks.first().copied().unwrap_or(0);
            let e = Failure::new(e.code, format!("rank {rank} left before the root could answer it"));
            refuse(s, &visitors[i + 1..], &e);
            gone = Some(e);
            break;
        }
    }
    gone.map_or(Ok(()), Err)
}

fn collect<S: Sockets>(
    s: &S,
    listener: &S::Listener,
    duty: Duty,
    visitors: &mut Vec<Visitor<S::Conn>>,
) -> Result<Roll, Failure> {
    let mut roll = Roll::new(duty.nranks as usize);
    let late = |roll: &Roll| Failure::new(Code::Timeout, roll.absence(patience(duty.timeout_ms)));
    // The clock starts anew with the first rank, because a root may be made long before its ranks are; strays do not move it.
    let mut until = s.now_ms() + patience(duty.timeout_ms);
    let mut started = false;
    while !roll.missing().is_empty() {
        let left = until.saturating_sub(s.now_ms());
        if left == 0 {
            return Err(late(&roll));
        }
        let conn = match s.accept(listener, left as u32) {
            Ok(c) => c,
            Err(e) if e.code == Code::Timeout => return Err(late(&roll)),
            Err(e) => return Err(e),
        };
        let (kind, payload) = match recv_any(s, &conn, MAX_MESSAGE, HELLO_MS.min(duty.timeout_ms)) {
            Ok(m) => m,
            // A stray connection: not one of ours.
            Err(_) => continue,
        };
        if kind == Kind::Refusal {
            return Err(Failure::new(Code::Failure, String::from_utf8_lossy(&payload).into_owned()));
        }
        if kind != Kind::InfoToRoot || payload.is_empty() {
            continue;
        }
        let each = if payload.len() % super::wire::INFO_BYTES[1] == 0 { 56 } else { 40 };
        let Ok(infos) = payload.chunks(each).map(Info::decode).collect::<Result<Vec<Info>, Failure>>() else {
            continue;
        };
        if !started {
            started = true;
            until = s.now_ms() + patience(duty.timeout_ms);
        }
        let ranks = infos.iter().map(|i| usize::try_from(i.rank).unwrap_or(0)).collect();
        visitors.push(Visitor { conn, ranks });
        for info in infos {
            roll.add(info)?;
        }
    }
    Ok(roll)
}

/// A server's local root: collects the records of ranks `first .. first + count`, forwards them in one message, and hands
/// the answers back.
pub fn serve_local<S: Sockets>(
    s: &S,
    listener: &S::Listener,
    root: &Address,
    first: u32,
    count: u32,
    duty: Duty,
) -> Result<(), Failure> {
    let mut visitors: Vec<Visitor<S::Conn>> = Vec::new();
    let result = (|| {
        let mut infos: Vec<Info> = Vec::new();
        let started = s.now_ms();
        while infos.len() < count as usize {
            let left = (started + patience(duty.timeout_ms)).saturating_sub(s.now_ms());
            // No time left: not even a connection that is already there, or a stream of strays would never end.
            let accepted =
                if left == 0 { Err(Failure::new(Code::Timeout, "")) } else { s.accept(listener, left as u32) };
            let conn = accepted.map_err(|e| {
                let here: Vec<i32> = infos.iter().map(|i| i.rank).collect();
                let lacking: Vec<String> =
                    (first..first + count).filter(|r| !here.contains(&(*r as i32))).map(|r| r.to_string()).collect();
                Failure::new(
                    e.code,
                    format!("the local root of ranks {first} to {} misses {}", first + count - 1, lacking.join(", ")),
                )
            })?;
            let Ok((Kind::InfoToRoot, payload)) = recv_any(s, &conn, 56, HELLO_MS.min(duty.timeout_ms)) else {
                continue;
            };
            let Ok(info) = Info::decode(&payload) else { continue };
            visitors.push(Visitor { conn, ranks: vec![] });
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
            infos.push(info);
        }
        let up = s.connect(root, duty.timeout_ms)?;
        let payload: Vec<u8> = infos.iter().flat_map(Info::encode).collect();
        send_message(s, &up, Kind::InfoToRoot, &payload, duty.timeout_ms)?;
        let bytes = infos.len() * super::wire::ANSWER_BYTES;
        super::recv_message(s, &up, Kind::InfoFromRoot, bytes, duty.timeout_ms)
    })();
    match result {
        Ok(answers) => {
            for (v, a) in visitors.iter().zip(answers.chunks(super::wire::ANSWER_BYTES)) {
                send_message(s, &v.conn, Kind::InfoFromRoot, a, duty.timeout_ms)?;
            }
            Ok(())
        }
        Err(e) => {
            refuse(s, &visitors, &e);
            if let Ok(up) = s.connect(root, HELLO_MS.min(duty.timeout_ms)) {
                // The global root then fails the whole group at once instead of waiting.
                let _ = send_message(s, &up, Kind::Refusal, e.text.as_bytes(), HELLO_MS);
            }
            Err(e)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::RootId;
    use super::super::wire::parse_root_id;
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
