//! What a group decides before any of its ranks makes the communicator (bootstrap 9, steps 1 to 4).
//!
//! Two shapes over the same positions `0 .. n` (INV-30):
//!
//! ```text
//! up, binary tree       children 2r+1 and 2r+2; each sends 17 bytes: signature 16 | verdict 1
//! down, hypercube       from r with its lowest bit cleared; 129 bytes: id 128 | validity 1
//! ```
//!
//! Nobody goes on with its own comparison (INV-29): the root's validity is the AND over the tree, and [`agree`] gives an id
//! only with that. A verdict of "no" has no use for the signature or the id, so those bytes say why: which two ranks
//! differ, or who was silent, in the parent's ranks. One that cannot be heard or reached does not stop the others from being
//! told.
//!
//! Threads: none of its own; every wait is in [`Messages`] and has a deadline there.

use std::time::Duration;

use hw_bridge::os::shown::one_line;

use crate::api::groups::listed;
use crate::api::groups::signature::SIGNATURE_BYTES;
use sandbox::limits::ID_BYTES;

/// Bytes of a message up.
pub(crate) const UP_BYTES: usize = SIGNATURE_BYTES + 1;
/// Bytes of a message down.
pub(crate) const DOWN_BYTES: usize = ID_BYTES + 1;

/// How much longer than the deadline one waits for each wait that may come before: time for a rank that begins later, and for
/// its sentence to arrive.
const ROUND: Duration = Duration::from_secs(1);

/// The longest wait for a position that may itself wait `rounds` times, with a deadline of `timeout`.
pub(super) fn patience(timeout: Duration, rounds: u32) -> Duration {
    timeout.saturating_add(ROUND.min(timeout).saturating_mul(rounds))
}

const DIFFER: u8 = 0;
const AGREED: u8 = 1;
const SILENT: u8 = 2;
const NO_ID: u8 = 3;

/// Messages between the positions of a group, in order, each of a length that both sides know.
pub(crate) trait Messages {
    /// The members' ranks in the parent, by position.
    fn members(&self) -> &[usize];
    /// Ranks of the parent.
    fn parent_ranks(&self) -> usize;
    /// Sends `data` to position `to`.
    fn send(&mut self, to: usize, data: &[u8]) -> Result<(), String>;
    /// Receives exactly `bytes` from position `from`. `rounds` is how many waits of others may come before: by [`patience`]
    /// the wait is so much longer, counted from the begin of the whole, so that the sentence of the one who waited in vain
    /// arrives before the reader gives up.
    fn recv(&mut self, from: usize, bytes: usize, rounds: u32) -> Result<Vec<u8>, String>;
}

/// Why there is no communicator. Ranks are the parent's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The signatures of two ranks differ.
    Differ(usize, usize),
    /// `waiter` heard nothing of, or could not reach, `who`.
    Silent {
        /// The silent one.
        who: usize,
        /// Who waited.
        waiter: usize,
        /// What the wait ended with; cut where it travelled.
        why: String,
    },
    /// The first member could not make an id.
    NoId(String),
    /// A peer sent what cannot be.
    Foreign(usize),
}

impl Refusal {
    fn code(&self) -> u8 {
        match self {
            Refusal::Differ(..) => DIFFER,
            Refusal::Silent { .. } | Refusal::Foreign(_) => SILENT,
            Refusal::NoId(_) => NO_ID,
        }
    }

    /// Fills `room` with as much as it holds: two ranks, then text, zero-padded. The few bytes of a message up hold no text.
    fn write(&self, room: &mut [u8]) {
        let (a, b, text) = match self {
            Refusal::Differ(a, b) => (*a, *b, ""),
            Refusal::Silent { who, waiter, why } => (*who, *waiter, why.as_str()),
            Refusal::NoId(why) => (0, 0, why.as_str()),
            Refusal::Foreign(who) => (*who, *who, "its message cannot be"),
        };
        room.fill(0);
        room[..4].copy_from_slice(&(a as u32).to_le_bytes());
        room[4..8].copy_from_slice(&(b as u32).to_le_bytes());
        let mut end = if room.len() > SIGNATURE_BYTES { text.len().min(room.len() - 8) } else { 0 };
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        room[8..8 + end].copy_from_slice(&text.as_bytes()[..end]);
    }

    /// Reads what [`Refusal::write`] wrote, from `sender` of a parent of `n` ranks. What a peer says is an allegation.
    fn read(code: u8, room: &[u8], n: usize, sender: usize) -> Refusal {
        let word = |at: usize| u32::from_le_bytes([room[at], room[at + 1], room[at + 2], room[at + 3]]) as usize;
        let (a, b) = (word(0), word(4));
        let text = || {
            let text = String::from_utf8_lossy(&room[8..]);
            one_line(text.trim_end_matches('\0'))
        };
        match code {
            DIFFER if a < n && b < n => Refusal::Differ(a, b),
            SILENT if a < n && b < n => Refusal::Silent { who: a, waiter: b, why: text() },
            NO_ID => Refusal::NoId(text()),
            _ => Refusal::Foreign(sender),
        }
    }
}

fn silent(m: &impl Messages, who: usize, waiter: usize, why: String) -> Refusal {
    let members = m.members();
    Refusal::Silent { who: members[who], waiter: members[waiter], why }
}

/// Children of a position in the binary tree.
fn children(r: usize, n: usize) -> impl Iterator<Item = usize> {
    [2 * r + 1, 2 * r + 2].into_iter().filter(move |c| *c < n)
}

/// Levels of the tree below a position.
fn height(mut r: usize, n: usize) -> u32 {
    let mut levels = 0;
    while 2 * r + 1 < n {
        r = 2 * r + 1;
        levels += 1;
    }
    levels
}

/// The ranks below a position in the binary tree.
fn below(m: &impl Messages, r: usize, n: usize) -> Vec<usize> {
    let mut found: Vec<usize> = Vec::new();
    let mut level: Vec<usize> = children(r, n).collect();
    while !level.is_empty() {
        found.extend(level.iter().map(|p| m.members()[*p]));
        level = level.into_iter().flat_map(|p| children(p, n)).collect();
    }
    found
}

/// The verdict of the group, and its id. `id` is asked of position 0 alone, and only once all agree: an id that nobody
/// will use would leave a root waiting.
///
/// # Errors
/// [`Refusal`], on every position that could be told; no rank may make the communicator then.
pub(crate) fn agree(
    m: &mut impl Messages,
    r: usize,
    n: usize,
    signature: &[u8; SIGNATURE_BYTES],
    id: impl FnOnce() -> Result<[u8; ID_BYTES], String>,
) -> Result<[u8; ID_BYTES], Refusal> {
    let mine = up(m, r, n, signature);
    let mut outcome = if r == 0 {
        mine.and_then(|()| id().map_err(Refusal::NoId))
    } else {
        // What this rank refused stays refused, whatever it hears.
        hear(m, r, n).and_then(|id| mine.map(|()| id))
    };
    let mut down = told(&outcome);
    let mut step = mask(r, n) >> 1;
    while step != 0 {
        if r + step < n
            && let Err(why) = m.send(r + step, &down)
            && outcome.is_ok()
        {
            // Those that are still to be told need not wait for it in the init. Whoever has the id already misses it there.
            outcome = Err(silent(m, r + step, r, why));
            down = told(&outcome);
        }
        step >>= 1;
    }
    outcome
}

/// The message down that says `outcome`.
fn told(outcome: &Result<[u8; ID_BYTES], Refusal>) -> [u8; DOWN_BYTES] {
    let mut down = [0; DOWN_BYTES];
    match outcome {
        Ok(id) => {
            down[..ID_BYTES].copy_from_slice(id);
            down[ID_BYTES] = AGREED;
        }
        Err(why) => {
            why.write(&mut down[..ID_BYTES]);
            down[ID_BYTES] = why.code();
        }
    }
    down
}

/// The tree, upward: hears the children, tells the parent.
fn up(m: &mut impl Messages, r: usize, n: usize, signature: &[u8; SIGNATURE_BYTES]) -> Result<(), Refusal> {
    let mut mine = Ok(());
    for child in children(r, n) {
        let heard = match m.recv(child, UP_BYTES, height(r, n)) {
            Err(why) => {
                let first = below(m, child, n);
                let first = if first.is_empty() {
                    String::new()
                } else {
                    format!(" (it hears ranks {} first)", listed(&first))
                };
                Err(silent(m, child, r, why + &first))
            }
            Ok(b) if b.len() != UP_BYTES => Err(Refusal::Foreign(m.members()[child])),
            Ok(b) if b[SIGNATURE_BYTES] != AGREED => {
                let (bound, sender) = (m.parent_ranks(), m.members()[child]);
                Err(Refusal::read(b[SIGNATURE_BYTES], &b[..SIGNATURE_BYTES], bound, sender))
            }
            Ok(b) if b[..SIGNATURE_BYTES] != signature[..] => Err(Refusal::Differ(m.members()[r], m.members()[child])),
            Ok(_) => Ok(()),
        };
        // Every child is heard, whatever the one before said: its message must not stay behind.
        mine = mine.and(heard);
    }
    if r > 0 {
        let mut bytes = [0; UP_BYTES];
        match &mine {
            Ok(()) => {
                bytes[..SIGNATURE_BYTES].copy_from_slice(signature);
                bytes[SIGNATURE_BYTES] = AGREED;
            }
            Err(why) => {
                why.write(&mut bytes[..SIGNATURE_BYTES]);
                bytes[SIGNATURE_BYTES] = why.code();
            }
        }
        // A parent that is gone is missed by its own parent, who tells all.
        if let Err(why) = m.send((r - 1) >> 1, &bytes) {
            tracing::debug!("the verdict of position {r} did not reach its parent: {why}");
        }
    }
    mine
}

/// The lowest bit of `r` that is set; the first power of two from `n` on for position 0.
fn mask(r: usize, n: usize) -> usize {
    let mut mask = 1;
    while mask & r == 0 && mask < n {
        mask <<= 1;
    }
    mask
}

/// The hypercube, downward: hears the verdict of the whole tree.
fn hear(m: &mut impl Messages, r: usize, n: usize) -> Result<[u8; ID_BYTES], Refusal> {
    let from = r & !mask(r, n);
    // The whole tree, the id, and every hop to here.
    let rounds = height(0, n) + 1 + r.count_ones();
    let bytes = match m.recv(from, DOWN_BYTES, rounds) {
        Ok(b) => b,
        Err(why) => return Err(silent(m, from, r, why)),
    };
    let (bound, sender) = (m.parent_ranks(), m.members()[from]);
    let Ok(bytes) = <[u8; DOWN_BYTES]>::try_from(bytes.as_slice()) else { return Err(Refusal::Foreign(sender)) };
    let mut id = [0; ID_BYTES];
    id.copy_from_slice(&bytes[..ID_BYTES]);
    if bytes[ID_BYTES] == AGREED { Ok(id) } else { Err(Refusal::read(bytes[ID_BYTES], &id, bound, sender)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::sync::{Arc, Mutex};

    type Sent = Arc<Mutex<Vec<(usize, usize, usize)>>>;

    /// Messages between threads; a position that ends or never begins closes its channels, as a process would.
    struct Wires {
        me: usize,
        members: Vec<usize>,
        to: Vec<Sender<Vec<u8>>>,
        from: Vec<Receiver<Vec<u8>>>,
        sent: Sent,
    }

    /// Position p is rank 100 - p of the parent.
    fn named(p: usize) -> usize {
        100 - p
    }

    impl Messages for Wires {
        fn members(&self) -> &[usize] {
            &self.members
        }
        fn parent_ranks(&self) -> usize {
            101
        }
        fn send(&mut self, to: usize, data: &[u8]) -> Result<(), String> {
            self.sent.lock().unwrap().push((self.me, to, data.len()));
            self.to[to].send(data.to_vec()).map_err(|_| "closed".into())
        }
        fn recv(&mut self, from: usize, bytes: usize, _: u32) -> Result<Vec<u8>, String> {
            let b = self.from[from].recv_timeout(std::time::Duration::from_secs(20)).map_err(|_| "closed")?;
            assert_eq!(b.len(), bytes, "{from} -> {}", self.me);
            Ok(b)
        }
    }

    fn wires(n: usize, sent: &Sent) -> Vec<Wires> {
        let members: Vec<usize> = (0..n).map(named).collect();
        let wire = |me| Wires { me, members: members.clone(), to: Vec::new(), from: Vec::new(), sent: sent.clone() };
        let mut all: Vec<Wires> = (0..n).map(wire).collect();
        for from in 0..n {
            for to in 0..n {
                let (tx, rx) = channel();
                all[from].to.push(tx);
                all[to].from.push(rx);
            }
        }
        all
    }

    type Outcome = Option<Result<[u8; ID_BYTES], Refusal>>;
    /// From, to, bytes.
    type Message = (usize, usize, usize);

    /// Runs a group in which position p has `signatures[p]`, or is dead. Answers each one's outcome, how many called
    /// InitComm, how many ids were made, and every message.
    fn group(signatures: &[Option<u8>]) -> (Vec<Outcome>, usize, usize, Vec<Message>) {
        let n = signatures.len();
        let (sent, inits, ids) = (Sent::default(), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let threads: Vec<_> = wires(n, &sent)
            .into_iter()
            .zip(signatures.to_vec())
            .map(|(mut w, signature)| {
                let (inits, ids) = (inits.clone(), ids.clone());
                std::thread::spawn(move || {
                    let signature = [signature?; SIGNATURE_BYTES];
                    let r = w.me;
                    let got = agree(&mut w, r, n, &signature, || {
                        ids.fetch_add(1, Ordering::SeqCst);
                        Ok([42; ID_BYTES])
                    });
                    if got.is_ok() {
                        inits.fetch_add(1, Ordering::SeqCst);
                    }
                    Some(got)
                })
            })
            .collect();
        let all = threads.into_iter().map(|t| t.join().unwrap()).collect();
        let messages = sent.lock().unwrap().clone();
        (all, inits.load(Ordering::SeqCst), ids.load(Ordering::SeqCst), messages)
    }

    /// Proves INV-29, INV-30.
    #[test]
    fn all_agree_over_two_shapes() {
        for n in 1..=17usize {
            let (all, inits, ids, messages) = group(&vec![Some(7); n]);
            assert!(all.iter().all(|o| *o == Some(Ok([42; ID_BYTES]))), "{n}: {all:?}");
            assert_eq!((inits, ids), (n, 1));
            let sorted: BTreeSet<_> = messages.iter().copied().collect();
            assert_eq!(sorted.len(), messages.len(), "no message twice");
            // Up: to the parent of a heap. Down: from the rank without its lowest bit.
            let up = (1..n).map(|r| (r, (r - 1) / 2, 17));
            let down = (1..n).map(|r| (r & (r - 1), r, 129));
            assert_eq!(sorted, up.chain(down).collect::<BTreeSet<_>>(), "{n} ranks");
        }
    }

    /// One rank with another program, anywhere: nobody calls InitComm, no id is made, everybody hears which two differ.
    ///
    /// Proves INV-29.
    #[test]
    fn one_that_differs_stops_all() {
        for n in 2..=17usize {
            for odd in 0..n {
                let mut signatures = vec![Some(7); n];
                signatures[odd] = Some(8);
                let (all, inits, ids, messages) = group(&signatures);
                assert_eq!((inits, ids), (0, 0), "rank {odd} of {n}");
                for o in &all {
                    let Some(Err(Refusal::Differ(a, b))) = o else { panic!("rank {odd} of {n}: {o:?}") };
                    assert!(*a == named(odd) || *b == named(odd), "rank {odd} of {n}: {a} and {b}");
                }
                assert_eq!(all.iter().collect::<Vec<_>>(), vec![&all[0]; n], "one sentence for all");
                assert_eq!(messages.len(), 2 * (n - 1), "nothing stays behind");
            }
        }
    }

    /// Proves INV-29.
    #[test]
    fn one_that_is_dead_stops_all_and_is_named() {
        for n in 2..=17usize {
            for dead in 0..n {
                let mut signatures = vec![Some(7); n];
                signatures[dead] = None;
                let (all, inits, ids, _) = group(&signatures);
                assert_eq!((inits, ids), (0, 0), "rank {dead} of {n}");
                for (r, o) in all.iter().enumerate().filter(|(r, _)| *r != dead) {
                    let Some(Err(Refusal::Silent { who, .. })) = o else { panic!("rank {dead} of {n}: {r} {o:?}") };
                    assert_eq!(*who, named(dead), "rank {dead} of {n}, said by {r}");
                }
            }
        }
    }

    #[test]
    fn an_id_that_cannot_be_made_is_told_to_all() {
        let n = 5;
        let threads: Vec<_> = wires(n, &Sent::default())
            .into_iter()
            .map(|mut w| {
                std::thread::spawn(move || {
                    let r = w.me;
                    agree(&mut w, r, n, &[1; SIGNATURE_BYTES], || Err("out of sockets".into()))
                })
            })
            .collect();
        for t in threads {
            assert_eq!(t.join().unwrap(), Err(Refusal::NoId("out of sockets".into())));
        }
    }

    /// Peers' words are checked: a code or position that cannot be is the sender's fault, and long texts are cut.
    #[test]
    fn refusals_travel_and_nonsense_is_refused() {
        let mut room = [0; ID_BYTES];
        let long = "ä".repeat(200);
        Refusal::Silent { who: 3, waiter: 1, why: long.clone() }.write(&mut room);
        let Refusal::Silent { who: 3, waiter: 1, why } = Refusal::read(SILENT, &room, 4, 0) else { panic!() };
        assert!(why.len() == 120 && long.starts_with(&why));
        assert_eq!(Refusal::read(SILENT, &room, 3, 2), Refusal::Foreign(2));
        assert_eq!(Refusal::read(9, &room, 4, 2), Refusal::Foreign(2));
        let mut small = [0; SIGNATURE_BYTES];
        Refusal::Differ(2, 5).write(&mut small);
        assert_eq!(Refusal::read(DIFFER, &small, 6, 0), Refusal::Differ(2, 5));
        Refusal::Silent { who: 3, waiter: 1, why: long }.write(&mut small);
        let said = Refusal::Silent { who: 3, waiter: 1, why: String::new() };
        assert_eq!(Refusal::read(SILENT, &small, 4, 0), said, "half a word helps nobody");
    }
}
