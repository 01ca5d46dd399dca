//! A rank's side: joining through the root, the ring, the all-gather, and point-to-point messages (bootstrap 4.2, 4.4, 4.5).
//!
//! A [`Group`] owns every descriptor of the bootstrap; dropping it closes them all, which is `bootstrapAbort`, and an absent
//! group is the no-op the original asks for (INV-24).

use super::lobby::Lobby;
use super::root::watch_root;
use super::wire::{
    ANSWER_BYTES, Address, HELLO_BYTES, Hello, Info, Kind, MAX_REFUSAL, Purpose, RootAnswer, decode_refusal,
    encode_refusal,
};
use super::{LOOK_MS, Sockets, dial, expect, recv_any, recv_message, send_message};
use crate::fail::{Code, Failure, invalid};

/// How long a stranger on our listener may take to introduce itself.
const HELLO_MS: u32 = 5_000;

/// How long a rank that cannot send waits for the reason to come around.
const REASON_MS: u32 = 1_000;

/// One rank's bootstrap state.
#[derive(Debug)]
pub struct Group<S: Sockets> {
    /// This rank.
    pub rank: usize,
    /// World size.
    pub nranks: usize,
    /// Same on all ranks.
    pub cluster_id: u64,
    /// Same on all ranks.
    pub epoch: i64,
    /// Listen addresses in rank order.
    pub addresses: Vec<Address>,
    timeout_ms: u32,
    listener: S::Listener,
    /// Who has connected here and not spoken yet.
    lobby: Lobby<S::Conn>,
    next: Option<S::Conn>,
    prev: Option<S::Conn>,
    send: Vec<Option<S::Conn>>,
    recv: Vec<Option<S::Conn>>,
}

/// What a rank needs to join.
#[derive(Debug, Clone, Copy)]
pub struct Join {
    /// Where its root listens: the group's, or its server's local one.
    pub root: Address,
    /// Interface to listen on; the port is chosen by the kernel.
    pub interface: Address,
    /// This rank.
    pub rank: usize,
    /// World size.
    pub nranks: usize,
    /// For a global init.
    pub hash: Option<[u8; 16]>,
    /// Bound of every socket operation.
    pub timeout_ms: u32,
}

impl<S: Sockets> Group<S> {
    /// Reports to the root, wires the ring, gathers all addresses.
    pub fn join(s: &S, j: &Join) -> Result<Group<S>, Failure> {
        let ms = j.timeout_ms;
        let listener =
            s.listen(&j.interface.with_port(0), ms).map_err(|e| e.during("opening the bootstrap listener"))?;
        let mine = s.local(&listener)?;
        let info = Info { rank: j.rank as i32, nranks: j.nranks as i32, listen: mine, hash: j.hash };
        let at_root =
            |e: Failure| e.during(&format!("rank {} of {} reporting to the root at {}", j.rank, j.nranks, j.root));
        let until = s.now_ms() + u64::from(ms);
        let (root, answer) = loop {
            let left = until.saturating_sub(s.now_ms()) as u32;
            let root = s.connect(&j.root, left.max(1)).map_err(at_root)?;
            send_message(s, &root, Kind::InfoToRoot, &info.encode(), ms).map_err(at_root)?;
            let (kind, payload) =
                recv_any(s, &root, MAX_REFUSAL, until.saturating_sub(s.now_ms()).max(1) as u32).map_err(at_root)?;
            match kind {
                // The root of an earlier attempt, which is over; ours will listen here when that one is gone.
                Kind::Complete if s.now_ms() < until => drop(root),
                _ => break (root, expect(kind, payload, Kind::InfoFromRoot, ANSWER_BYTES).map_err(at_root)?),
            }
        };
        let answer = RootAnswer::decode(&answer)?;
        let mut g = Group {
            rank: j.rank,
            nranks: j.nranks,
            cluster_id: answer.cluster_id,
            epoch: answer.epoch,
            addresses: vec![mine; j.nranks],
            timeout_ms: ms,
            listener,
            lobby: Lobby::new(HELLO_MS.min(ms), HELLO_BYTES.max(MAX_REFUSAL)),
            next: None,
            prev: None,
            send: (0..j.nranks).map(|_| None).collect(),
            recv: (0..j.nranks).map(|_| None).collect(),
        };
        if j.nranks > 1 {
            // Until all are wired the root watches every rank; what it says ends the waits here.
            let mut header = None;
            let mut watch = || watch_root(s, &root, &mut header);
            let (next, prev) = ((j.rank + 1) % j.nranks, (j.rank + j.nranks - 1) % j.nranks);
            g.next =
                Some(g.dial(s, &answer.next, Purpose::Ring, &mut watch).map_err(|e| {
                    e.during(&format!("rank {} connecting to rank {next}, its ring successor", j.rank))
                })?);
            g.prev = Some(
                g.accept_from(s, prev, Purpose::Ring, &mut watch)
                    .map_err(|e| e.during("waiting for the ring predecessor"))?,
            );
        }
        send_message(s, &root, Kind::Joined, &[], ms).map_err(at_root)?;
        recv_message(s, &root, Kind::Complete, 0, ms).map_err(at_root)?;
        drop(root);
        if j.nranks > 1 {
            let all = g.all_gather(s, &mine.0, "addresses")?;
            g.addresses = all.chunks(28).map(Address::from_slice).collect::<Result<_, _>>()?;
        }
        Ok(g)
    }

    fn dial(
        &self,
        s: &S,
        to: &Address,
        purpose: Purpose,
        watch: impl FnMut() -> Result<(), Failure>,
    ) -> Result<S::Conn, Failure> {
        let conn = dial(s, to, self.timeout_ms, watch)?;
        let hello = Hello { rank: self.rank as i32, cluster_id: self.cluster_id, purpose };
        send_message(s, &conn, Kind::Hello, &hello.encode(), self.timeout_ms)?;
        Ok(conn)
    }

    /// Accepts until rank `from` arrives for `purpose`. Point-to-point connections of other ranks are kept for later;
    /// strangers and ranks of other groups are closed.
    fn accept_from(
        &mut self,
        s: &S,
        from: usize,
        purpose: Purpose,
        mut watch: impl FnMut() -> Result<(), Failure>,
    ) -> Result<S::Conn, Failure> {
        let until = s.now_ms() + u64::from(self.timeout_ms);
        let watching = purpose == Purpose::Ring;
        loop {
            let spoken = self.lobby.next(s, &self.listener, until, watching, &mut watch).map_err(|e| {
                let who = format!("rank {} waiting for rank {from}", self.rank);
                if e.code == Code::Timeout && e.text.is_empty() {
                    let text = format!("{who}: Timeout waiting for incoming connection after {} ms", self.timeout_ms);
                    return Failure::new(Code::Timeout, text);
                }
                e.during(&who)
            });
            let (conn, Kind::Hello, payload) = spoken? else { continue };
            let Ok(hello) = Hello::decode(&payload) else { continue };
            let Some(rank) = usize::try_from(hello.rank).ok().filter(|r| *r < self.nranks) else { continue };
            if hello.cluster_id != self.cluster_id {
                continue;
            }
            if rank == from && hello.purpose == purpose {
                return Ok(conn);
            }
            if hello.purpose == Purpose::Peer {
                self.recv[rank] = Some(conn);
            }
        }
    }

    /// Ring all-gather: this rank's `block` in, all blocks in rank order out. Every rank gives the same length. After a
    /// failure the ring is gone: its neighbours may be in different steps, and a later block must not be taken for another.
    pub fn all_gather(&mut self, s: &S, block: &[u8], hint: &str) -> Result<Vec<u8>, Failure> {
        if self.nranks > 1 && (self.next.is_none() || self.prev.is_none()) {
            let text = format!("all-gather {hint}: the bootstrap ring of rank {} broke in an earlier call", self.rank);
            return Err(Failure::new(Code::Closed, text));
        }
        self.pass_round(s, block, hint).inspect_err(|e| self.give_up(s, e))
    }

    /// Closes the ring, the reason first: it goes around, and every rank's next all-gather fails at once with it.
    pub fn give_up(&mut self, s: &S, why: &Failure) {
        if let Some(next) = &self.next {
            let mut told = why.clone();
            if told.origin.is_none() {
                let said = if told.text.is_empty() { "its own error says why" } else { &told.text };
                told.origin = Some(format!("rank {} failed: {said}", self.rank));
            }
            // A neighbour that is gone needs no reason. What it has not read yet may fill the socket, so it gets a look.
            let _ = send_message(s, next, Kind::Refusal, &encode_refusal(&told, None), LOOK_MS);
        }
        (self.next, self.prev) = (None, None);
    }

    fn pass_round(&self, s: &S, block: &[u8], hint: &str) -> Result<Vec<u8>, Failure> {
        let (n, len, ms) = (self.nranks, block.len(), self.timeout_ms);
        let mut all = vec![0; n * len];
        all[self.rank * len..(self.rank + 1) * len].copy_from_slice(block);
        let (Some(next), Some(prev)) = (&self.next, &self.prev) else { return Ok(all) };
        for i in 0..n - 1 {
            let out = (self.rank + n - i) % n;
            let inn = (self.rank + n - i - 1) % n;
            let what = |e: Failure| e.during(&format!("all-gather {hint}, step {i}, rank {}", self.rank));
            // Odd ranks receive first, so that blocks larger than the sockets' buffers cannot block the whole ring.
            if self.rank % 2 == 0 {
                send_message(s, next, Kind::Ring, &all[out * len..(out + 1) * len], ms)
                    .map_err(|e| what(self.of_next(s, prev, e)))?;
            }
            let got = recv_message(s, prev, Kind::Ring, len, ms).map_err(|e| what(self.of_prev(e)))?;
            if self.rank % 2 == 1 {
                send_message(s, next, Kind::Ring, &all[out * len..(out + 1) * len], ms)
                    .map_err(|e| what(self.of_next(s, prev, e)))?;
            }
            all[inn * len..(inn + 1) * len].copy_from_slice(&got);
        }
        Ok(all)
    }

    /// A failure to send to the ring successor, with what it means: if that one has failed, its reason is on its way around
    /// the ring.
    fn of_next(&self, s: &S, prev: &S::Conn, e: Failure) -> Failure {
        let until = s.now_ms() + u64::from(REASON_MS.min(self.timeout_ms));
        while e.code == Code::Closed && s.now_ms() < until {
            match recv_any(s, prev, super::MAX_MESSAGE, LOOK_MS) {
                Ok((Kind::Refusal, payload)) => {
                    if let Some((told, _)) = decode_refusal(&payload) {
                        return told;
                    }
                }
                // What was sent before the reason, or nothing yet.
                Ok(_) => {}
                Err(e) if e.code == Code::Timeout => {}
                Err(_) => break,
            }
        }
        let next = (self.rank + 1) % self.nranks;
        e.during(&format!("rank {next} closed its connection: its process has ended, or see its own error"))
    }

    /// A failure to receive from the ring predecessor, with what it means.
    fn of_prev(&self, e: Failure) -> Failure {
        let prev = (self.rank + self.nranks - 1) % self.nranks;
        match e.code {
            _ if e.origin.is_some() => e,
            Code::Closed => {
                e.during(&format!("rank {prev} closed its connection: its process has ended, or see its own error"))
            }
            Code::Timeout => e.during(&format!("rank {prev} sent nothing")),
            _ => e,
        }
    }

    fn peer(&self, peer: i32) -> Result<usize, Failure> {
        match usize::try_from(peer) {
            Ok(p) if p < self.nranks && p != self.rank => Ok(p),
            _ => Err(invalid(format!(
                "rank {} of {} cannot exchange bootstrap messages with rank {peer}",
                self.rank, self.nranks
            ))),
        }
    }

    /// Sends a message; the connection is opened at the first one.
    pub fn send(&mut self, s: &S, peer: i32, data: &[u8], hint: &str) -> Result<(), Failure> {
        let p = self.peer(peer)?;
        let what = |e: Failure| e.during(&format!("bootstrap send {hint} to rank {p}"));
        if self.send[p].is_none() {
            self.send[p] = Some(self.dial(s, &self.addresses[p], Purpose::Peer, || Ok(())).map_err(what)?);
        }
        // A connection that failed in the middle of a message is of no use any more.
        match self.send[p].take() {
            Some(conn) => {
                send_message(s, &conn, Kind::Data, data, self.timeout_ms).map_err(what)?;
                self.send[p] = Some(conn);
                Ok(())
            }
            None => Err(Failure::new(Code::Failure, "the connection that was just opened is gone")),
        }
    }

    /// Receives the next message of `peer`; the lengths must match.
    pub fn recv(&mut self, s: &S, peer: i32, bytes: usize, hint: &str) -> Result<Vec<u8>, Failure> {
        let p = self.peer(peer)?;
        let what = |e: Failure| e.during(&format!("bootstrap receive {hint} from rank {p}"));
        if self.recv[p].is_none() {
            let conn = self.accept_from(s, p, Purpose::Peer, || Ok(())).map_err(what)?;
            self.recv[p] = Some(conn);
        }
        match self.recv[p].take() {
            Some(conn) => {
                let got = recv_message(s, &conn, Kind::Data, bytes, self.timeout_ms).map_err(what)?;
                self.recv[p] = Some(conn);
                Ok(got)
            }
            None => Err(Failure::new(Code::Failure, "the connection that was just accepted is gone")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::root::{Duty, serve, serve_local};
    use super::super::std_sockets::{StdSockets, loopback};
    use super::*;
    use crate::bootstrap::wire::MAGIC;
    use std::io::Write;
    use std::time::{Duration, Instant};

    fn join(root: Address, rank: usize, nranks: usize, ms: u32) -> Result<Group<StdSockets>, Failure> {
        Group::join(&StdSockets, &Join { root, interface: loopback(), rank, nranks, hash: None, timeout_ms: ms })
    }

    fn started_root(nranks: u32, ms: u32) -> (Address, std::thread::JoinHandle<Result<(), Failure>>) {
        let l = StdSockets.listen(&loopback(), ms).unwrap();
        let at = StdSockets.local(&l).unwrap();
        (at, std::thread::spawn(move || serve(&StdSockets, &l, Duty { nranks, timeout_ms: ms }, 0xC1, 77)))
    }

    fn run_all(n: usize, at: impl Fn(usize) -> Address) {
        let threads: Vec<_> = (0..n)
            .map(|r| {
                let root = at(r);
                std::thread::spawn(move || {
                    let mut g = join(root, r, n, 10_000).unwrap();
                    let all = g.all_gather(&StdSockets, &[r as u8; 5], "test").unwrap();
                    let (to, from) = ((r + 1) % n, (r + n - 1) % n);
                    if n > 1 {
                        g.send(&StdSockets, to as i32, &[r as u8, 1], "a").unwrap();
                        g.send(&StdSockets, to as i32, &[r as u8, 2, 3], "b").unwrap();
                        assert_eq!(g.recv(&StdSockets, from as i32, 2, "a").unwrap(), [from as u8, 1]);
                        assert_eq!(g.recv(&StdSockets, from as i32, 3, "b").unwrap(), [from as u8, 2, 3]);
                    }
                    (g.cluster_id, g.epoch, g.addresses.clone(), all)
                })
            })
            .collect();
        let results: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
        let expected: Vec<u8> = (0..n).flat_map(|r| [r as u8; 5]).collect();
        for r in &results {
            assert_eq!((r.0, r.1), (0xC1, 77));
            assert_eq!(r.2, results[0].2);
            assert_eq!(r.3, expected);
        }
        let ports: std::collections::HashSet<u16> = results[0].2.iter().map(Address::port).collect();
        assert_eq!(ports.len(), n);
    }

    /// Proves INV-25.
    #[test]
    fn a_flat_group_agrees_on_everything() {
        for n in [1usize, 2, 3, 5, 8] {
            let (at, root) = started_root(n as u32, 10_000);
            run_all(n, |_| at);
            root.join().unwrap().unwrap();
        }
    }

    /// Proves INV-25.
    #[test]
    fn a_hierarchical_group_agrees_on_everything() {
        let (n, per) = (7u32, 3u32);
        let (at, root) = started_root(n, 10_000);
        let locals: Vec<(Address, _)> = (0..n.div_ceil(per))
            .map(|node| {
                let l = StdSockets.listen(&loopback(), 1000).unwrap();
                let here = StdSockets.local(&l).unwrap();
                let (first, count) = (node * per, per.min(n - node * per));
                let duty = Duty { nranks: n, timeout_ms: 10_000 };
                (here, std::thread::spawn(move || serve_local(&StdSockets, &l, &at, first, count, duty)))
            })
            .collect();
        let places: Vec<Address> = locals.iter().map(|l| l.0).collect();
        run_all(n as usize, |r| places[r / per as usize]);
        for (_, t) in locals {
            t.join().unwrap().unwrap();
        }
        root.join().unwrap().unwrap();
    }

    /// Proves INV-26.
    #[test]
    fn an_absent_rank_is_named_when_the_time_is_up() {
        let (at, root) = started_root(2, 600);
        let begun = Instant::now();
        let e = join(at, 0, 2, 600).unwrap_err();
        assert!(e.text.contains("1/2 ranks joined") && e.text.contains("missing 1"), "{e}");
        assert!(begun.elapsed() < Duration::from_secs(10));
        assert!(root.join().unwrap().is_err());
        // Nobody listens at all: connecting is bounded too.
        assert_eq!(join(at, 0, 2, 200).unwrap_err().code, Code::Timeout);
    }

    /// Proves INV-32.
    #[test]
    fn a_duplicate_fails_the_group_and_a_stranger_does_not() {
        let (at, root) = started_root(2, 5_000);
        let mut stray = std::net::TcpStream::connect(("127.0.0.1", at.port())).unwrap();
        let mut bytes = [0u8; 56];
        bytes[0] = 2;
        bytes[8] = 40;
        bytes[16..20].copy_from_slice(&(MAGIC ^ 1).to_le_bytes());
        stray.write_all(&bytes).unwrap();
        let first = std::thread::spawn(move || join(at, 0, 2, 5_000));
        let second = join(at, 0, 2, 5_000);
        for r in [first.join().unwrap(), second] {
            let e = r.unwrap_err();
            assert!(e.text.contains("rank 0 joined twice"), "{e}");
        }
        assert!(root.join().unwrap().unwrap_err().text.contains("joined twice"));
    }

    /// Mute and foreign connections on the root's port and on a rank's cost the group nothing, however many there are.
    #[test]
    fn strangers_do_not_hold_a_group_up() {
        let (at, root) = started_root(2, 20_000);
        let strangers: Vec<_> = (0..40u8)
            .map(|i| {
                let mut stray = std::net::TcpStream::connect(("127.0.0.1", at.port())).unwrap();
                // Every second one is mute; the others say something foreign, some of it like a refusal.
                let foreign = [[0x5a; 24], [0; 24], *b"\x06\0\0\0\0\0\0\0\x08\0\0\0\0\0\0\0GET / HT"];
                if i % 2 == 0 {
                    stray.write_all(&foreign[usize::from(i / 2) % 3]).unwrap();
                }
                stray
            })
            .collect();
        let begun = Instant::now();
        let ranks: Vec<_> = (0..2).map(|r| std::thread::spawn(move || join(at, r, 2, 20_000).map(drop))).collect();
        for r in ranks {
            r.join().unwrap().unwrap();
        }
        root.join().unwrap().unwrap();
        // Read one after the other, the mute ones alone would take 40 seconds.
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        drop(strangers);
    }

    /// A rank that reports and then goes is named to all others, with one status, and long before the time is up.
    #[test]
    fn a_rank_that_leaves_the_bootstrap_is_named_to_all() {
        for late in [false, true] {
            let (at, root) = started_root(3, 60_000);
            let begun = Instant::now();
            let ranks: Vec<_> =
                (0..2).map(|r| std::thread::spawn(move || join(at, 2 * r, 3, 60_000).map(drop).unwrap_err())).collect();
            if late {
                std::thread::sleep(Duration::from_millis(200));
            }
            let conn = StdSockets.connect(&at, 5_000).unwrap();
            let nobody = StdSockets.local(&StdSockets.listen(&loopback(), 1000).unwrap()).unwrap();
            let info = Info { rank: 1, nranks: 3, listen: nobody, hash: None };
            send_message(&StdSockets, &conn, Kind::InfoToRoot, &info.encode(), 5_000).unwrap();
            drop(conn);
            for r in ranks {
                let e = r.join().unwrap();
                assert_eq!(e.code, Code::Closed, "{e}");
                assert!(e.text.contains("rank 1 left the bootstrap"), "{e}");
            }
            assert_eq!(root.join().unwrap().unwrap_err().code, Code::Closed);
            assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
        }
    }

    #[test]
    fn a_rank_that_gives_up_before_it_joins_ends_the_wait_of_the_others() {
        let (at, root) = started_root(2, 60_000);
        let first = std::thread::spawn(move || join(at, 0, 2, 60_000).map(drop).unwrap_err());
        super::super::root::withdraw(&StdSockets, &at, 1, 2, &invalid("there is no interface eth9"), 5_000);
        let e = first.join().unwrap();
        assert_eq!(e.code, Code::Invalid);
        assert!(e.text.contains("rank 1 of 2 gave up before it joined: there is no interface eth9"), "{e}");
        assert!(root.join().unwrap().is_err());
    }

    /// The reason of a rank that fails after the bootstrap goes around the ring: all have its status and its sentence.
    #[test]
    fn a_later_failure_goes_around_the_ring() {
        let n = 4;
        let (at, root) = started_root(n as u32, 20_000);
        let ranks: Vec<_> = (0..n)
            .map(|r| {
                std::thread::spawn(move || {
                    let mut g = join(at, r, n, 20_000).unwrap();
                    if r == 2 {
                        g.give_up(&StdSockets, &Failure::new(Code::Other(4), "no memory for the control block"));
                        return None;
                    }
                    let e = g.all_gather(&StdSockets, &[0], "test").unwrap_err();
                    // The next one fails at once, too.
                    assert_eq!(g.all_gather(&StdSockets, &[0], "test").unwrap_err().code, Code::Closed);
                    Some(e)
                })
            })
            .collect();
        let failures: Vec<Failure> = ranks.into_iter().filter_map(|t| t.join().unwrap()).collect();
        assert_eq!(failures.len(), 3);
        for e in failures {
            assert_eq!(e.code, Code::Other(4), "{e}");
            assert!(e.text.contains("rank 2 failed: no memory for the control block"), "{e}");
        }
        root.join().unwrap().unwrap();
    }

    #[test]
    fn messages_to_oneself_or_nobody_are_invalid() {
        let (at, root) = started_root(1, 5_000);
        let mut g = join(at, 0, 1, 5_000).unwrap();
        root.join().unwrap().unwrap();
        for peer in [0, 1, -1] {
            assert_eq!(g.send(&StdSockets, peer, &[1], "x").unwrap_err().code, Code::Invalid);
            assert_eq!(g.recv(&StdSockets, peer, 1, "x").unwrap_err().code, Code::Invalid);
        }
    }
}
