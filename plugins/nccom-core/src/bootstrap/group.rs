//! A rank's side: joining through the root, the ring, the all-gather, and point-to-point messages (bootstrap 4.2, 4.4, 4.5).
//!
//! A [`Bootstrap`] owns every descriptor of the bootstrap; dropping it closes them all, which is `bootstrapAbort`, and an absent
//! group is the no-op the original asks for (INV-24).

use super::lobby::Lobby;
use super::root::{hear_out, report, watch_root};
use super::wire::{
    Address, HELLO_BYTES, Header, Info, MAX_REFUSAL, MessageKind, PeerHello, Purpose, RootAnswer, encode_refusal,
};
use super::{Ends, LOOK_MS, REASON_MS, Sockets, dial, reason, recv_message, send_message};
use crate::fail::{Code, Failure, invalid};

/// How long a stranger on our listener may take to introduce itself.
const HELLO_MS: u32 = 5_000;

/// The lobby of a rank whose waits last `ms`.
pub(super) fn hello_lobby<C>(ms: u32) -> Lobby<C> {
    Lobby::new(HELLO_MS.min(ms), HELLO_BYTES.max(MAX_REFUSAL))
}

/// A block of the ring that the sockets' buffers hold, whatever the system's settings.
const BUFFERED: usize = 16 << 10;

/// One rank's bootstrap state.
#[derive(Debug)]
pub struct Bootstrap<S: Ends> {
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
    pub(super) timeout_ms: u32,
    pub(super) listener: S::Listener,
    /// Who has connected here and not spoken yet.
    pub(super) lobby: Lobby<S::Conn>,
    pub(super) next: Option<S::Conn>,
    pub(super) prev: Option<S::Conn>,
    /// The first half of the predecessor's next message, if it came while links are made; the all-gather that ends that
    /// phase goes on with it.
    pub(super) heard: Option<Header>,
    pub(super) send: Vec<Option<S::Conn>>,
    /// With the first half of a message whose rest has not come.
    pub(super) recv: Vec<Option<(S::Conn, Option<Header>)>>,
}

/// What a rank needs to join.
#[derive(Debug, Clone, Copy)]
pub struct JoinParams {
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

impl<S: Sockets> Bootstrap<S> {
    /// Reports to the root, wires the ring, gathers all addresses.
    pub fn join(s: &S, j: &JoinParams) -> Result<Bootstrap<S>, Failure> {
        let ms = j.timeout_ms;
        let listener =
            s.listen(&j.interface.with_port(0), ms).map_err(|e| e.during("opening the bootstrap listener"))?;
        let mine = s.local(&listener)?;
        let info = Info { rank: j.rank as i32, nranks: j.nranks as i32, listen: mine, hash: j.hash };
        let at_root =
            |e: Failure| e.during(&format!("rank {} of {} reporting to the root at {}", j.rank, j.nranks, j.root));
        let (root, answer) = report(s, &j.root, &[info], ms).map_err(at_root)?;
        let mut header = None;
        let answer = RootAnswer::decode(&answer)?;
        let mut g = Bootstrap {
            rank: j.rank,
            nranks: j.nranks,
            cluster_id: answer.cluster_id,
            epoch: answer.epoch,
            addresses: vec![mine; j.nranks],
            timeout_ms: ms,
            listener,
            lobby: hello_lobby(ms),
            next: None,
            prev: None,
            heard: None,
            send: (0..j.nranks).map(|_| None).collect(),
            recv: (0..j.nranks).map(|_| None).collect(),
        };
        if let Err(e) = g.wire(s, &root, &answer.next, &mut header) {
            let e = hear_out(s, &root, &j.root, &mut header, ms, e);
            if e.origin.is_none() {
                // The root tells the others. One that is gone is missed by all.
                let told = Failure::new(e.code, format!("rank {} gave up while the ring was wired: {e}", j.rank));
                let _ = send_message(s, &root, MessageKind::Refusal, &encode_refusal(&told), LOOK_MS);
            }
            return Err(
                e.during(&format!("rank {} of {} joining the group of the root at {}", j.rank, j.nranks, j.root))
            );
        }
        drop(root);
        if j.nranks > 1 {
            let all = g.all_gather(s, &mine.0, "addresses")?;
            g.addresses = all.chunks(28).map(Address::from_slice).collect::<Result<_, _>>()?;
        }
        Ok(g)
    }

    /// Connects this rank's ring edges, and waits until all ranks have theirs. Until then the root watches every rank; what it
    /// says ends the waits here.
    fn wire(&mut self, s: &S, root: &S::Conn, successor: &Address, header: &mut Option<Header>) -> Result<(), Failure> {
        let (rank, n) = (self.rank, self.nranks);
        if n > 1 {
            let mut watch = || watch_root(s, root, header);
            let (next, prev) = ((rank + 1) % n, (rank + n - 1) % n);
            let dialled = self.dial(s, successor, Purpose::Ring, &mut watch);
            self.next = Some(
                dialled.map_err(|e| e.during(&format!("rank {rank} connecting to rank {next}, its ring successor")))?,
            );
            let came = self.accept_from(s, prev, Purpose::Ring, true, &mut watch);
            self.prev = Some(came.map_err(|e| e.during("waiting for the ring predecessor"))?);
        }
        send_message(s, root, MessageKind::Joined, &[], self.timeout_ms)?;
        recv_message(s, root, header, MessageKind::Complete, 0, self.timeout_ms).map(drop)
    }

    fn dial(
        &self,
        s: &S,
        to: &Address,
        purpose: Purpose,
        watch: impl FnMut() -> Result<(), Failure>,
    ) -> Result<S::Conn, Failure> {
        let conn = dial(s, to, self.timeout_ms, watch)?;
        let hello = PeerHello { rank: self.rank as i32, cluster_id: self.cluster_id, purpose };
        send_message(s, &conn, MessageKind::Hello, &hello.encode(), self.timeout_ms)?;
        Ok(conn)
    }

    /// Accepts until rank `from` arrives for `purpose`. Point-to-point connections of other ranks are kept for later;
    /// strangers and ranks of other groups are closed.
    fn accept_from(
        &mut self,
        s: &S,
        from: usize,
        purpose: Purpose,
        watching: bool,
        mut watch: impl FnMut() -> Result<(), Failure>,
    ) -> Result<S::Conn, Failure> {
        let until = s.now_ms() + u64::from(self.timeout_ms);
        loop {
            let spoken = self.lobby.next(s, &self.listener, until, watching, &mut watch).map_err(|e| {
                let who = format!("rank {} waiting for rank {from}", self.rank);
                if e.code == Code::Timeout && e.text.is_empty() {
                    let text = format!("{who}: Timeout waiting for incoming connection after {} ms", self.timeout_ms);
                    return Failure::new(Code::Timeout, text).without(from);
                }
                missed(e, from).during(&who)
            });
            let (conn, MessageKind::Hello, payload) = spoken? else { continue };
            let Ok(hello) = PeerHello::decode(&payload) else { continue };
            let Some(rank) = usize::try_from(hello.rank).ok().filter(|r| *r < self.nranks) else { continue };
            if hello.cluster_id != self.cluster_id {
                continue;
            }
            if rank == from && hello.purpose == purpose {
                return Ok(conn);
            }
            if hello.purpose == Purpose::Peer {
                self.recv[rank] = Some((conn, None));
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
                // What ended its wait is in its own host's sentence, which does not travel.
                let late = match told.code {
                    Code::Overdue => format!("; the deadline of the operation has passed on rank {}", self.rank),
                    _ => String::new(),
                };
                told.origin = Some(format!("rank {} failed: {said}{late}", self.rank));
            }
            // A neighbour that is gone needs no reason. What it has not read yet may fill the socket, so it gets a look.
            let _ = send_message(s, next, MessageKind::Refusal, &encode_refusal(&told), LOOK_MS);
        }
        (self.next, self.prev, self.heard) = (None, None, None);
    }

    /// What a failure while links are made began with. A rank that failed has closed its connections, and whoever waited
    /// there sees no more than that; the reason is on its way around the ring.
    pub fn first_cause(&mut self, s: &S, e: Failure) -> Failure {
        let Some(prev) = &self.prev else { return e };
        if e.origin.is_some() || !(e.code.is_closed() || e.code == Code::Timeout) {
            return e;
        }
        if let Some(told) = reason(s, prev, &mut self.heard, REASON_MS.min(self.timeout_ms)) {
            return told;
        }
        let before = self.before();
        match watch_prev(s, prev, &mut self.heard, before) {
            Err(told) if told.origin.is_some() => told,
            Err(ended) if ended.code.is_closed() => gone(before, e),
            // It is there, or this rank may not look any more.
            _ => e,
        }
    }

    /// The ring predecessor.
    fn before(&self) -> usize {
        (self.rank + self.nranks - 1) % self.nranks
    }

    fn pass_round(&mut self, s: &S, block: &[u8], hint: &str) -> Result<Vec<u8>, Failure> {
        let (rank, n, len, ms) = (self.rank, self.nranks, block.len(), self.timeout_ms);
        let mut all = vec![0; n * len];
        all[rank * len..(rank + 1) * len].copy_from_slice(block);
        // A connection on which a send failed stays out: it may end in the middle of a message, and whatever followed would be
        // taken for the rest.
        let (Some(next), Some(prev)) = (self.next.take(), self.prev.take()) else { return Ok(all) };
        let mut header = self.heard.take();
        // If all sent first, blocks larger than the sockets' buffers could block the whole ring. Smaller ones are sent first by
        // all, so that nobody's own block waits for another one's.
        let receives_first = len > BUFFERED && rank % 2 == 1;
        for i in 0..n - 1 {
            let out = (rank + n - i) % n;
            let inn = (rank + n - i - 1) % n;
            let what = |e: Failure| e.during(&format!("all-gather {hint}, step {i}, rank {rank}"));
            if !receives_first {
                send_message(s, &next, MessageKind::Ring, &all[out * len..(out + 1) * len], ms)
                    .map_err(|e| what(self.of_next(s, &prev, &mut header, e)))?;
            }
            let got = match recv_message(s, &prev, &mut header, MessageKind::Ring, len, ms) {
                Ok(got) => got,
                Err(e) => {
                    self.next = Some(next);
                    let ahead = len <= BUFFERED;
                    let hops = if ahead { i } else { 2 * i + 1 - rank % 2 };
                    return Err(what(self.of_prev(s, &prev, &mut header, (hops.min(n - 2), ahead), e)));
                }
            };
            if receives_first {
                send_message(s, &next, MessageKind::Ring, &all[out * len..(out + 1) * len], ms)
                    .map_err(|e| what(self.of_next(s, &prev, &mut header, e)))?;
            }
            all[inn * len..(inn + 1) * len].copy_from_slice(&got);
        }
        (self.next, self.prev) = (Some(next), Some(prev));
        Ok(all)
    }

    /// A failure to send to the ring successor, with what it means: if that one has failed, its reason is on its way around
    /// the ring.
    fn of_next(&self, s: &S, prev: &S::Conn, header: &mut Option<Header>, e: Failure) -> Failure {
        let next = (self.rank + 1) % self.nranks;
        if !e.code.is_closed() {
            return missed(e, next).during(&format!("rank {next} takes nothing"));
        }
        reason(s, prev, header, REASON_MS.min(self.timeout_ms)).unwrap_or_else(|| gone(next, e))
    }

    /// A failure to receive from the ring predecessor, with what it means. Whoever stands still is `hops` places before the
    /// predecessor, or nearer, and the time of all that wait for it ends together: the one behind it says its name, so the
    /// others hear their predecessor out, the longer the further away it may be. With `ahead` all have sent their own blocks
    /// before they waited: those that are nearer have come, and nothing must be heard to know who has not.
    fn of_prev(
        &self,
        s: &S,
        prev: &S::Conn,
        header: &mut Option<Header>,
        (hops, ahead): (usize, bool),
        e: Failure,
    ) -> Failure {
        let (n, from) = (self.nranks, self.before());
        if e.origin.is_some() {
            return e;
        }
        if e.code.is_closed() {
            return gone(from, e);
        }
        if !e.code.is_late() {
            return e;
        }
        // Whoever is overdue may not wait any more.
        let told = (hops > 0 && e.code == Code::Timeout)
            .then(|| reason(s, prev, header, REASON_MS.min(self.timeout_ms).saturating_mul(hops as u32)));
        told.flatten().unwrap_or_else(|| {
            let first = (from + n - hops) % n;
            match (hops, ahead) {
                (0, _) => e.during(&format!("rank {from} sent nothing")).without(from),
                (_, true) => e
                    .during(&format!("rank {first} sent nothing, or one from there to rank {from} passes nothing on"))
                    .without(first),
                _ => e.during(&format!(
                    "rank {from} sent nothing: it, or one before it from rank {first} on, has not come"
                )),
            }
        })
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
        self.send_while(s, peer, data, hint, || Ok(()))
    }

    /// Receives the next message of `peer`; the lengths must match. One that comes too late is the next call's.
    pub fn recv(&mut self, s: &S, peer: i32, bytes: usize, hint: &str) -> Result<Vec<u8>, Failure> {
        self.recv_while(s, peer, bytes, hint, false, || Ok(()))
    }

    /// Waits until all ranks have come to make links between every pair: the one that has not is what all name then, and nobody
    /// blames a rank that waits for another itself.
    pub fn assemble(&mut self, s: &S) -> Result<(), Failure> {
        self.all_gather(s, &[0], "p2pconnect").map(drop)
    }

    /// [`Bootstrap::send`] for the making of links, which all ranks do at once: it also ends when a rank before this one on the
    /// ring has failed. Such a phase begins after an all-gather, and ends with one or with [`Bootstrap::give_up`].
    pub fn send_linking(&mut self, s: &S, peer: i32, data: &[u8], hint: &str) -> Result<(), Failure> {
        self.listening(s, |g, watch| g.send_while(s, peer, data, hint, watch))
    }

    /// [`Bootstrap::recv`] for the making of links, as [`Bootstrap::send_linking`].
    pub fn recv_linking(&mut self, s: &S, peer: i32, bytes: usize, hint: &str) -> Result<Vec<u8>, Failure> {
        self.listening(s, |g, watch| g.recv_while(s, peer, bytes, hint, true, watch))
    }

    /// Runs `f` with a look at the ring predecessor for it to take while it waits.
    fn listening<R>(&mut self, s: &S, f: impl FnOnce(&mut Self, &mut dyn FnMut() -> Result<(), Failure>) -> R) -> R {
        let (prev, mut heard, from) = (self.prev.take(), self.heard.take(), self.before());
        let r = f(self, &mut || prev.as_ref().map_or(Ok(()), |prev| watch_prev(s, prev, &mut heard, from)));
        (self.prev, self.heard) = (prev, heard);
        r
    }

    fn send_while(
        &mut self,
        s: &S,
        peer: i32,
        data: &[u8],
        hint: &str,
        watch: impl FnMut() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let p = self.peer(peer)?;
        let what = |e: Failure| missed(e, p).during(&format!("bootstrap send {hint} to rank {p}"));
        if self.send[p].is_none() {
            self.send[p] = Some(self.dial(s, &self.addresses[p], Purpose::Peer, watch).map_err(what)?);
        }
        // A connection that failed in the middle of a message is of no use any more.
        match self.send[p].take() {
            Some(conn) => {
                send_message(s, &conn, MessageKind::Data, data, self.timeout_ms).map_err(what)?;
                self.send[p] = Some(conn);
                Ok(())
            }
            None => Err(Failure::new(Code::Failure, "the connection that was just opened is gone")),
        }
    }

    fn recv_while(
        &mut self,
        s: &S,
        peer: i32,
        bytes: usize,
        hint: &str,
        watching: bool,
        mut watch: impl FnMut() -> Result<(), Failure>,
    ) -> Result<Vec<u8>, Failure> {
        let p = self.peer(peer)?;
        let what = |e: Failure| missed(e, p).during(&format!("bootstrap receive {hint} from rank {p}"));
        if self.recv[p].is_none() {
            let conn = self.accept_from(s, p, Purpose::Peer, watching, &mut watch).map_err(what)?;
            self.recv[p] = Some((conn, None));
        }
        match self.recv[p].take() {
            Some((conn, mut header)) => {
                let until = s.now_ms() + u64::from(self.timeout_ms);
                let got = loop {
                    if let Err(e) = watch() {
                        break Err(e);
                    }
                    let left = until.saturating_sub(s.now_ms()) as u32;
                    // The last wait is longer than a look, so that the host says what it waited for.
                    let last = !watching || left <= 2 * LOOK_MS;
                    let ms = if last { left.max(1) } else { LOOK_MS };
                    match recv_message(s, &conn, &mut header, MessageKind::Data, bytes, ms) {
                        Err(e) if e.code == Code::Timeout && !last => {}
                        answer => break answer,
                    }
                };
                // Nothing is lost by a time-out; any other failure is the connection's end.
                if got.as_ref().map_or_else(|e| e.code.is_late(), |_| true) {
                    self.recv[p] = Some((conn, header));
                }
                got.map_err(what)
            }
            None => Err(Failure::new(Code::Failure, "the connection that was just accepted is gone")),
        }
    }
}

/// A failure of this rank's wait for `rank`, which is blamed if it was in vain.
fn missed(e: Failure, rank: usize) -> Failure {
    if e.code.is_late() && e.origin.is_none() { e.without(rank) } else { e }
}

/// A failure that rank `rank`, which should be there, is gone.
fn gone(rank: usize, e: Failure) -> Failure {
    e.during(&format!("rank {rank} closed its connection: its process has ended, or see its own error"))
}

/// One look at the ring predecessor, rank `from`, while links are made: a failure if it has failed, or has handed on that
/// another one did. `heard` keeps what belongs to its next all-gather.
fn watch_prev<S: Sockets>(s: &S, prev: &S::Conn, heard: &mut Option<Header>, from: usize) -> Result<(), Failure> {
    if heard.is_none() {
        match s.recv(prev, Header::BYTES, 0) {
            Ok(b) => *heard = Some(Header::decode(&b)?),
            Err(e) if e.code == Code::Timeout => return Ok(()),
            Err(e) if e.code.is_closed() => return Err(gone(from, e)),
            // This rank's own: the operation's deadline has passed, say.
            Err(e) => return Err(e),
        }
    }
    match heard {
        // It has its links.
        Some(h) if h.kind == MessageKind::Ring => Ok(()),
        _ => Err(reason(s, prev, heard, REASON_MS).unwrap_or_else(|| gone(from, Failure::new(Code::Closed, "")))),
    }
}

#[cfg(test)]
mod tests {
    use super::super::root::{Duty, serve, serve_local};
    use super::super::std_sockets::{Failing, StdSockets, loopback};
    use super::*;
    use crate::bootstrap::recv_any;
    use crate::bootstrap::wire::MAGIC;
    use std::io::Write;
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    fn join(root: Address, rank: usize, nranks: usize, ms: u32) -> Result<Bootstrap<StdSockets>, Failure> {
        Bootstrap::join(
            &StdSockets,
            &JoinParams { root, interface: loopback(), rank, nranks, hash: None, timeout_ms: ms },
        )
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
                    let mut g = join(root, r, n, 120_000).unwrap();
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
            let (at, root) = started_root(n as u32, 120_000);
            run_all(n, |_| at);
            root.join().unwrap().unwrap();
        }
    }

    /// Proves INV-25.
    #[test]
    fn a_hierarchical_group_agrees_on_everything() {
        let (n, per) = (7u32, 3u32);
        let (at, root) = started_root(n, 120_000);
        let locals: Vec<(Address, _)> = (0..n.div_ceil(per))
            .map(|node| {
                let l = StdSockets.listen(&loopback(), 1000).unwrap();
                let here = StdSockets.local(&l).unwrap();
                let (first, count) = (node * per, per.min(n - node * per));
                let duty = Duty { nranks: n, timeout_ms: 120_000 };
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
        let e = join(at, 0, 2, 600).unwrap_err();
        assert!(e.text.contains("1/2 ranks joined") && e.text.contains("missing 1"), "{e}");
        assert!(root.join().unwrap().is_err());
        // Nobody listens at all: connecting is bounded too.
        assert_eq!(join(at, 0, 2, 200).unwrap_err().code, Code::Timeout);
    }

    /// However short the time is, a rank that hears the root's word says who is missing, and one that hears nothing says so,
    /// and of whom. The root's word comes after the rank's time here, as it does on a busy machine.
    #[test]
    fn a_late_word_of_the_root_is_heard_and_a_mute_root_is_named() {
        for (ms, mute) in [(100, false), (100, true), (900, false)] {
            let l = StdSockets.listen(&loopback(), 1_000).unwrap();
            let at = StdSockets.local(&l).unwrap();
            let rank = std::thread::spawn(move || join(at, 0, 2, ms).map(drop).unwrap_err());
            let conn = StdSockets.accept(&l, 10_000).unwrap();
            let (kind, _) = recv_any(&StdSockets, &conn, &mut None, 100, 10_000).unwrap();
            assert_eq!(kind, MessageKind::InfoToRoot);
            if !mute {
                std::thread::sleep(Duration::from_millis(u64::from(ms) + 100));
                let missing = Failure::new(Code::Timeout, "1/2 ranks joined after 90 ms: missing 1");
                send_message(&StdSockets, &conn, MessageKind::Refusal, &encode_refusal(&missing), 1_000).unwrap();
            }
            let e = rank.join().unwrap();
            assert_eq!(e.code, Code::Timeout);
            let nothing = format!("heard nothing from the root at {at} in time ({ms} ms)");
            let said = if mute { nothing.as_str() } else { "1/2 ranks joined after 90 ms: missing 1" };
            assert!(e.text.contains(said), "{ms} ms: {e}");
        }
    }

    /// A rank that reports and then stands still is named by the root to all, whichever of them waits for it.
    #[test]
    fn a_rank_that_never_wires_its_ring_is_named_to_all() {
        let (at, root) = started_root(3, 2_000);
        let ranks: Vec<_> = (0..2).map(|r| std::thread::spawn(move || join(at, r, 3, 2_000).map(drop))).collect();
        let conn = StdSockets.connect(&at, 5_000).unwrap();
        let mute = StdSockets.listen(&loopback(), 1000).unwrap();
        let info = Info { rank: 2, nranks: 3, listen: StdSockets.local(&mute).unwrap(), hash: None };
        send_message(&StdSockets, &conn, info.kind(), &info.encode(), 5_000).unwrap();
        for r in ranks {
            let e = r.join().unwrap().unwrap_err();
            // Rank 0 only waits for rank 2.
            assert!(e.text.ends_with("the ring is not wired on rank 2"), "{e}");
        }
        assert!(root.join().unwrap().is_err());
    }

    /// A rank's own time-out keeps its sentence: the root does not say in its place that others are missing.
    #[test]
    fn a_time_out_that_a_rank_reports_is_handed_on_as_it_is() {
        for nranks in [2, 3] {
            let (at, root) = started_root(nranks, 60_000);
            let other =
                (nranks == 3).then(|| std::thread::spawn(move || join(at, 1, 3, 60_000).map(drop).unwrap_err()));
            let conn = StdSockets.connect(&at, 5_000).unwrap();
            let info = Info { rank: 0, nranks: nranks as i32, listen: at, hash: None };
            send_message(&StdSockets, &conn, info.kind(), &info.encode(), 5_000).unwrap();
            let late = Failure::new(Code::Timeout, "rank 0 waited for its name server");
            if let Some(other) = other {
                // From a server's root, say, which no record came with.
                let conn = StdSockets.connect(&at, 5_000).unwrap();
                send_message(&StdSockets, &conn, MessageKind::Refusal, &encode_refusal(&late), 5_000).unwrap();
                assert!(other.join().unwrap().text.contains(&late.text));
            } else {
                send_message(&StdSockets, &conn, MessageKind::Refusal, &encode_refusal(&late), 5_000).unwrap();
            }
            let e = root.join().unwrap().unwrap_err();
            assert_eq!((e.code, e.told()), (Code::Timeout, late.text.as_str()));
        }
    }

    /// Proves INV-32.
    #[test]
    fn a_duplicate_fails_the_group_and_a_stranger_does_not() {
        let (at, root) = started_root(2, 120_000);
        let mut stray = std::net::TcpStream::connect(("127.0.0.1", at.port())).unwrap();
        let mut bytes = [0u8; 56];
        bytes[0] = 2;
        bytes[8] = 40;
        bytes[16..20].copy_from_slice(&(MAGIC ^ 1).to_le_bytes());
        stray.write_all(&bytes).unwrap();
        let first = std::thread::spawn(move || join(at, 0, 2, 120_000));
        let second = join(at, 0, 2, 120_000);
        for r in [first.join().unwrap(), second] {
            let e = r.unwrap_err();
            assert!(e.text.contains("rank 0 joined twice"), "{e}");
        }
        assert!(root.join().unwrap().unwrap_err().text.contains("joined twice"));
    }

    /// A rank of a build whose records have another form is told so, and so are all others.
    ///
    /// Proves INV-32.
    #[test]
    fn a_rank_of_another_build_is_refused_at_once() {
        let (at, root) = started_root(2, 120_000);
        let first = std::thread::spawn(move || join(at, 0, 2, 120_000));
        let mut old = std::net::TcpStream::connect(("127.0.0.1", at.port())).unwrap();
        let mut bytes = [0u8; 16 + 56];
        bytes[0] = 2;
        bytes[8] = 56;
        bytes[16..20].copy_from_slice(&MAGIC.to_le_bytes());
        old.write_all(&bytes).unwrap();
        let why = "a rank runs another build of the collectives plugin than its root";
        let e = first.join().unwrap().unwrap_err();
        assert!(e.text.contains(why), "{e}");
        assert!(root.join().unwrap().unwrap_err().text.contains(why));
    }

    /// Ranks whose libraries were built from other sources do not make a group, also where only one of them has a tag; those of
    /// one source do.
    ///
    /// Proves INV-32.
    #[test]
    fn ranks_of_other_sources_are_refused_and_those_of_the_same_are_not() {
        let (one, other) = (Some([7; 16]), Some([7, 7, 7, 7, 7, 7, 7, 8, 7, 7, 7, 7, 7, 7, 7, 7]));
        for (tags, same) in [([one, one], true), ([one, other], false), ([one, None], false), ([None, one], false)] {
            let (at, root) = started_root(2, 20_000);
            let ranks: Vec<_> = (0..2)
                .map(|rank| {
                    let hash = tags[rank];
                    let j = JoinParams { root: at, interface: loopback(), rank, nranks: 2, hash, timeout_ms: 20_000 };
                    std::thread::spawn(move || Bootstrap::join(&StdSockets, &j).map(drop))
                })
                .collect();
            for r in ranks {
                match r.join().unwrap() {
                    Ok(()) => assert!(same, "{tags:?}"),
                    Err(e) => assert!(!same && e.text.contains("(git hash mismatch)"), "{tags:?}: {e}"),
                }
            }
            assert_eq!(root.join().unwrap().is_ok(), same, "{tags:?}");
        }
    }

    /// Mute and foreign connections on the root's port and on a rank's cost the group nothing, however many there are.
    #[test]
    fn strangers_do_not_hold_a_group_up() {
        let (at, root) = started_root(2, 120_000);
        let strangers: Vec<_> = (0..240u8)
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
        // Read one after the other, the mute ones alone would take 240 seconds, which the ranks do not wait.
        let ranks: Vec<_> = (0..2).map(|r| std::thread::spawn(move || join(at, r, 2, 120_000).map(drop))).collect();
        for r in ranks {
            r.join().unwrap().unwrap();
        }
        root.join().unwrap().unwrap();
        drop(strangers);
    }

    /// A rank that reports and then goes is named to all others, with one status, and before the time is up.
    #[test]
    fn a_rank_that_leaves_the_bootstrap_is_named_to_all() {
        for late in [false, true] {
            let (at, root) = started_root(3, 60_000);
            let ranks: Vec<_> =
                (0..2).map(|r| std::thread::spawn(move || join(at, 2 * r, 3, 60_000).map(drop).unwrap_err())).collect();
            if late {
                std::thread::sleep(Duration::from_millis(200));
            }
            let conn = StdSockets.connect(&at, 5_000).unwrap();
            let nobody = StdSockets.local(&StdSockets.listen(&loopback(), 1000).unwrap()).unwrap();
            let info = Info { rank: 1, nranks: 3, listen: nobody, hash: None };
            send_message(&StdSockets, &conn, info.kind(), &info.encode(), 5_000).unwrap();
            drop(conn);
            for r in ranks {
                let e = r.join().unwrap();
                assert_eq!(e.code, Code::Closed, "{e}");
                assert!(e.text.contains("rank 1 left the bootstrap"), "{e}");
            }
            assert_eq!(root.join().unwrap().unwrap_err().code, Code::Closed);
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
        let (at, root) = started_root(n as u32, 120_000);
        let ranks: Vec<_> = (0..n)
            .map(|r| {
                std::thread::spawn(move || {
                    let mut g = join(at, r, n, 120_000).unwrap();
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

    /// Links are made, each rank waits for another one, and only one of them for the rank that goes: all name that one.
    #[test]
    fn a_rank_that_goes_while_links_are_made_is_named_by_all() {
        let n = 4;
        let gone = 1;
        for waits_for in [[1usize, 1, 3, 0], [3, 3, 0, 2], [2, 2, 3, 2]] {
            let (at, root) = started_root(n as u32, 120_000);
            let ranks = (0..n).map(|r| {
                std::thread::spawn(move || {
                    let mut g = join(at, r, n, 120_000).unwrap();
                    if r == gone {
                        std::thread::sleep(Duration::from_millis(100));
                        return None;
                    }
                    let e = g.recv_linking(&StdSockets, waits_for[r] as i32, 5, "test").unwrap_err();
                    let e = g.first_cause(&StdSockets, e);
                    g.give_up(&StdSockets, &e);
                    Some(e)
                })
            });
            let ranks: Vec<_> = ranks.collect();
            for (r, e) in ranks.into_iter().map(|t| t.join().unwrap()).enumerate() {
                let Some(e) = e else { continue };
                assert_eq!(e.code, Code::Closed, "rank {r}: {e}");
                assert!(e.text.contains("rank 1 closed its connection"), "rank {r}: {e}");
            }
            root.join().unwrap().unwrap();
        }
    }

    /// All ranks of a group that has joined, for a test that goes from one to the other.
    fn joined(n: usize, ms: u32) -> Vec<Bootstrap<StdSockets>> {
        let (at, root) = started_root(n as u32, ms);
        let ranks: Vec<_> = (0..n).map(|r| std::thread::spawn(move || join(at, r, n, ms).unwrap())).collect();
        let all = ranks.into_iter().map(|t| t.join().unwrap()).collect();
        root.join().unwrap().unwrap();
        all
    }

    /// Whoever needed the rank that failed sees no more than a closed connection: what is behind it comes around the ring.
    #[test]
    fn a_connection_that_ends_while_links_are_made_is_traced_to_the_rank_that_failed() {
        let s = &StdSockets;
        for why in [Some("no memory for the control block"), None] {
            let mut ranks = joined(3, 120_000);
            let mut failed = ranks.remove(1);
            let (code, said) = match why {
                Some(why) => {
                    failed.give_up(s, &Failure::new(Code::Other(4), why));
                    (Code::Other(4), format!("rank 1 failed: {why}"))
                }
                None => (Code::Closed, "rank 1 closed its connection".to_string()),
            };
            drop(failed);
            for g in ranks.iter_mut().rev() {
                // Of this rank's own, or of another one already: that is the cause.
                for own in [Failure::new(Code::Invalid, "own"), Failure::of_peer(Code::Closed, "own".into())] {
                    assert_eq!(g.first_cause(s, own.clone()), own);
                }
                let e = g.first_cause(s, Failure::new(Code::Closed, "the peer refused the link"));
                assert_eq!(e.code, code, "rank {}: {e}", g.rank);
                assert!(e.text.contains(&said), "rank {}: {e}", g.rank);
                g.give_up(s, &e);
            }
        }
    }

    /// Neither a connection that cannot be made nor one on which nothing comes hides that a rank before this one has failed.
    #[test]
    fn a_rank_that_fails_ends_what_others_send_and_receive_while_links_are_made() {
        let s = &StdSockets;
        let mut ranks = joined(3, 4_000);
        let (mut last, mut failed, mut first) = (ranks.remove(2), ranks.remove(1), ranks.remove(0));
        first.send_linking(s, 2, &[7; 5], "test").unwrap();
        assert_eq!(last.recv_linking(s, 0, 5, "test").unwrap(), [7; 5]);
        failed.give_up(s, &Failure::new(Code::Other(4), "no memory for the control block"));
        drop(failed);
        let e = last.recv_linking(s, 0, 5, "test").unwrap_err();
        assert!(e.text.contains("rank 1 failed: no memory for the control block"), "{e}");
        last.give_up(s, &e);
        // Nobody listens there any more.
        let e = first.send_linking(s, 1, &[7; 5], "test").unwrap_err();
        assert!(e.text.contains("rank 1 failed: no memory for the control block"), "{e}");
    }

    /// A predecessor that is through says so before the others are: its word is kept for the all-gather.
    #[test]
    fn a_rank_that_has_its_links_first_costs_the_others_nothing() {
        let n = 3;
        let (at, root) = started_root(n as u32, 120_000);
        let ranks = (0..n).map(|r| {
            std::thread::spawn(move || {
                let mut g = join(at, r, n, 120_000).unwrap();
                match r {
                    0 => {}
                    // Rank 0's word comes in this wait.
                    1 => {
                        assert_eq!(g.recv_linking(&StdSockets, 2, 5, "test").unwrap(), [7; 5]);
                        assert!(g.heard.is_some());
                    }
                    _ => {
                        std::thread::sleep(Duration::from_millis(300));
                        g.send_linking(&StdSockets, 1, &[7; 5], "test").unwrap();
                    }
                }
                g.all_gather(&StdSockets, &[r as u8], "done").unwrap()
            })
        });
        let ranks: Vec<_> = ranks.collect();
        for t in ranks {
            assert_eq!(t.join().unwrap(), [0, 1, 2]);
        }
        root.join().unwrap().unwrap();
    }

    /// All wait for the one that does not come, most of them through others; all say its name.
    #[test]
    fn the_rank_that_stands_still_in_an_all_gather_is_named_by_all() {
        let n = 4;
        let worlds = [(2, 1), (1, 1), (2, BUFFERED + 1), (1, BUFFERED + 1)].map(|(still, bytes)| {
            std::thread::spawn(move || {
                let (at, root) = started_root(n as u32, 3_000);
                let done = std::sync::Arc::new(std::sync::Barrier::new(n));
                let ranks = (0..n).map(|r| {
                    let done = done.clone();
                    std::thread::spawn(move || {
                        let mut g = join(at, r, n, 3_000).unwrap();
                        let e = (r != still).then(|| g.all_gather(&StdSockets, &vec![0; bytes], "test").unwrap_err());
                        done.wait();
                        e
                    })
                });
                let ranks: Vec<_> = ranks.collect();
                for e in ranks.into_iter().filter_map(|t| t.join().unwrap()) {
                    assert_eq!(e.code, Code::Timeout, "{e}");
                    assert!(e.text.contains(&format!("rank {still} sent nothing")), "{bytes} bytes: {e}");
                }
                root.join().unwrap().unwrap();
            })
        });
        worlds.into_iter().for_each(|w| w.join().unwrap());
    }

    /// All wait for one that does not come, and the time of an operation is up on one rank first, whichever that is: it knows who
    /// has not come, and all that it tells say the same, with the rank whose deadline it was.
    #[test]
    fn the_absent_rank_and_the_deadline_are_named_whoever_is_late_first() {
        let (n, absent) = (4, 1);
        for first in [2, 3, 0] {
            let mut ranks = joined(n, 120_000);
            let _absent = ranks.remove(absent);
            let mut waiting: Vec<_> = ranks
                .into_iter()
                .map(|g| {
                    let s = Failing::default();
                    let (rank, overdue, receives) = (g.rank, s.overdue.clone(), s.receives.clone());
                    let mut g: Bootstrap<Failing> = g.exchange(Ok, Ok).unwrap();
                    let ended = std::thread::spawn(move || g.assemble(&s).unwrap_err());
                    (rank, overdue, receives, ended)
                })
                .collect();
            // The blocks of all that are here have come everywhere, header and payload, and the next one is waited for.
            for (rank, _, receives, _) in &waiting {
                let blocks = (rank + n - absent) % n - 1;
                while receives.load(Ordering::Acquire) < 2 * blocks + 1 {
                    std::thread::yield_now();
                }
            }
            // The ring goes from the absent rank to 2, 3, 0: who comes after the first one is told, the others' own time passes.
            waiting.sort_by_key(|(rank, ..)| ((rank + n - first) % n, *rank));
            let mut ended = Vec::new();
            for (rank, overdue, _, thread) in waiting {
                let told =
                    (first..first + n).position(|r| r % n == rank) < (first..first + n).position(|r| r % n == absent);
                overdue.store(rank == first || !told, Ordering::Release);
                ended.push((rank, rank != first && told, thread.join().unwrap()));
            }
            for (rank, told, e) in ended {
                assert_eq!((e.code.number(), e.absent), (5, Some(absent)), "late first: {first}, rank {rank}: {e}");
                assert!(e.text.contains("rank 1 sent nothing"), "{e}");
                // Whoever was not told by the first one may still have been told by another whose own time passed.
                let passed = "the deadline of the operation has passed on rank ";
                assert_eq!(e.origin.is_some(), e.text.contains(passed), "rank {rank}: {e}");
                if told {
                    assert!(e.text.contains(&format!("{passed}{first}")), "rank {rank}: {e}");
                }
            }
        }
    }

    /// What a rank says after a message that it could not send to its end would be taken for the rest of that message.
    #[test]
    fn nothing_follows_half_a_ring_message() {
        let (at, root) = started_root(2, 120_000);
        let other = std::thread::spawn(move || {
            let mut g = join(at, 1, 2, 120_000).unwrap();
            g.all_gather(&StdSockets, &[7; 60], "test")
        });
        let g = join(at, 0, 2, 120_000).unwrap();
        let s = Failing::default();
        s.cut.set(true);
        let mut g: Bootstrap<Failing> = Bootstrap {
            rank: g.rank,
            nranks: g.nranks,
            cluster_id: g.cluster_id,
            epoch: g.epoch,
            addresses: g.addresses,
            timeout_ms: g.timeout_ms,
            listener: g.listener,
            lobby: g.lobby,
            next: g.next,
            prev: g.prev,
            heard: g.heard,
            send: g.send,
            recv: g.recv,
        };
        let e = g.all_gather(&s, &[7; 60], "test").unwrap_err();
        assert!(e.text.contains("rank 1 takes nothing"), "{e}");
        let e = other.join().unwrap().unwrap_err();
        assert_eq!(e.code, Code::Closed, "{e}");
        root.join().unwrap().unwrap();
    }

    #[test]
    fn a_rank_that_cannot_connect_does_not_try_for_ever_to_say_so() {
        let s = Failing::default();
        let root = loopback().with_port(9);
        super::super::root::withdraw(&s, &root, 1, 2, &invalid("there is no interface eth9"), 5_000);
        assert_eq!(s.dialled.get(), 1);
    }

    /// A message that comes after its reader's time is the next reader's, whole.
    #[test]
    fn a_receive_that_was_too_early_loses_nothing() {
        let (at, root) = started_root(2, 1_500);
        let (tell, told) = std::sync::mpsc::channel();
        let sender = std::thread::spawn(move || {
            let mut g = join(at, 0, 2, 1_500).unwrap();
            g.send(&StdSockets, 1, &[1; 5], "first").unwrap();
            told.recv().unwrap();
            g.send(&StdSockets, 1, &[2; 5], "second").unwrap();
            g
        });
        let mut g = join(at, 1, 2, 1_500).unwrap();
        assert_eq!(g.recv(&StdSockets, 0, 5, "first").unwrap(), [1; 5]);
        assert_eq!(g.recv(&StdSockets, 0, 5, "second").unwrap_err().code, Code::Timeout);
        tell.send(()).unwrap();
        assert_eq!(g.recv(&StdSockets, 0, 5, "second").unwrap(), [2; 5]);
        sender.join().unwrap();
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
