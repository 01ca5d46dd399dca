//! Groups: sends and receives of tensors, several to and from several ranks, issued as one operation, blocking or on a stream.
//!
//! A rank knows only its own. So a group begins with a small exchange of all descriptions (rank, offset in device memory,
//! bytes, type), in one hop; a second one follows if a rank has more than [`GROUP_AT_ONCE`]. Every rank then matches all of
//! them, so that all come to the same answer, and compiles a schedule whose positions are offsets in the whole device memory.
//! A repeated group is found by its descriptions: it costs the exchange and their comparison.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;

use hw_bridge::call::{DataType, Op};
use hw_bridge::exec::sequencer::{Arena, CallBuffers, LocalMem, OpError, Sealed};
use hw_bridge::memory::hbm::HbmBuf;

use crate::api::collectives::{Engine, call};
use crate::api::communicator::Communicator;
use crate::api::memory::DeviceMemory;
use crate::api::streams::{Pending, Stream};
use crate::error::Error;
use crate::plane::host::bad;
use enc::{Call, Lists, Move};
use sandbox::limits::{GROUP_AT_ONCE, MAX_GROUP};
use sandbox::objects::CommCore;

/// Words of one description.
const WORDS: usize = 3;

/// Sends and receives to be issued as one; made by [`Communicator::group`], which borrows the tensors, or by
/// [`Stream::group`], which owns them meanwhile. All ranks make a group, if an empty one.
///
/// The sends of one rank to another are matched with that one's receives from it, in order. A rank may send to itself. What is
/// received must not overlap anything else of the group on that rank.
#[derive(Debug)]
pub struct Group<I, T> {
    /// What issues it.
    issuer: I,
    core: Arc<CommCore>,
    words: Vec<u64>,
    tensors: Vec<T>,
}

/// One send or receive as it is exchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    peer: usize,
    sends: bool,
    /// NRT number of the element type.
    dtype: u32,
    at: u64,
    bytes: u64,
}

impl Entry {
    fn pack(self) -> [u64; WORDS] {
        [self.peer as u64 | u64::from(self.sends) << 32 | u64::from(self.dtype) << 40, self.at, self.bytes]
    }

    /// A peer's words are an allegation: its rank is checked by the caller, its offsets when it arrives.
    fn unpack(words: &[u64]) -> Entry {
        let w = words[0];
        Entry {
            peer: w as u32 as usize,
            sends: w >> 32 & 1 == 1,
            dtype: (w >> 40) as u32,
            at: words[1],
            bytes: words[2],
        }
    }

    fn tell(&self) -> String {
        let name = DataType::from_nrt(self.dtype).map_or("unknown type", DataType::name);
        format!("{} bytes of {name}", self.bytes)
    }
}

impl Communicator {
    /// Begins a group of sends and receives.
    pub fn group<'t>(&mut self) -> Group<&mut Communicator, &'t DeviceMemory> {
        Group { core: self.core().clone(), issuer: self, words: Vec::new(), tensors: Vec::new() }
    }
}

impl Stream {
    /// As [`Communicator::group`], to be run in the background.
    pub fn group(&mut self) -> Group<&mut Stream, Arc<DeviceMemory>> {
        Group { core: self.core().clone(), issuer: self, words: Vec::new(), tensors: Vec::new() }
    }
}

impl<I, T: Deref<Target = DeviceMemory>> Group<I, T> {
    /// Sends `count` elements of `tensor` from byte `at` on to rank `peer`.
    ///
    /// # Errors
    /// [`Error::Usage`] if they are not inside the tensor, the rank does not exist or the group is full;
    /// [`Error::Op`] for a tensor of another core. The group stays as it was.
    pub fn send(&mut self, tensor: T, at: u64, count: u64, dtype: DataType, peer: usize) -> Result<&mut Self, Error> {
        self.add(true, tensor, at, count, dtype, peer)
    }

    /// Receives `count` elements from rank `peer` into `tensor` from byte `at` on.
    ///
    /// # Errors
    /// As [`Group::send`].
    pub fn recv(&mut self, tensor: T, at: u64, count: u64, dtype: DataType, peer: usize) -> Result<&mut Self, Error> {
        self.add(false, tensor, at, count, dtype, peer)
    }

    fn add(
        &mut self,
        sends: bool,
        t: T,
        at: u64,
        count: u64,
        dtype: DataType,
        peer: usize,
    ) -> Result<&mut Self, Error> {
        let (rank, n) = (self.core.rank, self.core.nranks);
        let which = if sends { "send" } else { "receive" };
        if peer >= n {
            return Err(bad(format!("group: a {which} names rank {peer}, which is not one of the {n} ranks")));
        }
        if self.words.len() >= MAX_GROUP * WORDS {
            return Err(bad(format!(
                "group: rank {rank} has more than {MAX_GROUP} sends and receives; make two groups"
            )));
        }
        let bytes = count.checked_mul(dtype.size() as u64);
        let Some(bytes) = bytes.filter(|b| b.checked_add(at).is_some_and(|end| end <= t.len())) else {
            return Err(bad(format!(
                "group: a {which} on rank {rank} of {count} {dtype} elements at offset {at} is not inside a tensor of {} bytes",
                t.len()
            )));
        };
        if !std::ptr::eq(&**t.0.hbm(), &**self.core.endpoint.hbm()) {
            return Err(OpError::WrongCore { rank, which: if sends { "input" } else { "output" } }.into());
        }
        let at = t.0.offset() + at;
        self.words.extend(Entry { peer, sends, dtype: dtype.nrt(), at, bytes }.pack());
        self.tensors.push(t);
        Ok(self)
    }
}

impl Group<&mut Communicator, &DeviceMemory> {
    /// Issues them. All ranks call it.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]. Sends and receives that do not match, or overlap, are an [`Error::Usage`] on all ranks
    /// that names both sides; nothing has moved, and the communicator goes on.
    pub fn run(self) -> Result<(), Error> {
        self.issuer.engine.group(&self.words, &self.tensors)
    }
}

impl Group<&mut Stream, Arc<DeviceMemory>> {
    /// Issues them in the background; the request gives the tensors back. All ranks call it.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`]. What comes with the request is as in the blocking form.
    pub fn run(self) -> Pending<Vec<Arc<DeviceMemory>>> {
        let words = self.words;
        self.issuer.issue(Op::Group, self.tensors, move |engine, tensors| engine.group(&words, tensors))
    }
}

impl Engine {
    fn group<T: Deref<Target = DeviceMemory>>(&mut self, words: &[u64], tensors: &[T]) -> Result<(), Error> {
        self.check_ready(Op::Group)?;
        let (mut mine, mut all) = self.take_scratch();
        let schedule = self.group_schedule(words, &mut mine, &mut all);
        self.give_scratch(mine, all);
        let hbm = self.plane.core.endpoint.hbm().clone();
        let tensors: Vec<&HbmBuf> = tensors.iter().map(|t| &*t.0).collect();
        let arena = Arena { hbm: &hbm, parts: &tensors };
        let all = LocalMem::arena(&arena);
        self.execute(&*schedule?, &CallBuffers::new(all, all))
    }

    /// Exchanges the descriptions of all ranks; answers the schedule that follows from them.
    fn group_schedule(&mut self, words: &[u64], mine: &mut Vec<u8>, all: &mut Vec<u8>) -> Result<Arc<Sealed>, Error> {
        let n = self.plane.core.nranks;
        let entries = words.len() / WORDS;
        // Once with the first few, and again with all if a rank has more.
        let mut room = GROUP_AT_ONCE;
        loop {
            mine.clear();
            mine.extend((entries as u64).to_le_bytes());
            mine.extend(words.iter().take(room * WORDS).flat_map(|w| w.to_le_bytes()));
            mine.resize(8 * (1 + room * WORDS), 0);
            self.exchange(Op::Group, DataType::Uint8, mine, all)?;
            let most = all.chunks(mine.len()).map(|theirs| word(theirs, 0)).max().unwrap_or(0);
            if most > MAX_GROUP as u64 {
                return Err(bad(format!("group: a rank announced {most} sends and receives, {MAX_GROUP} is the most")));
            }
            if most as usize <= room {
                break;
            }
            room = most as usize;
        }
        let key = call(Op::Group, DataType::Uint8, 0);
        self.listed_schedule(key, all, |engine| {
            let words: Vec<u64> = (0..all.len() / 8).map(|i| word(all, i)).collect();
            let moves = matched(&words, n)?;
            let count = moves.iter().map(|m| m.bytes).fold(0u64, u64::saturating_add);
            engine.compile_listed(&Call { count, ..key }, Lists::Moves(&moves))
        })
    }
}

fn word(bytes: &[u8], i: usize) -> u64 {
    let mut w = [0; 8];
    w.copy_from_slice(&bytes[i * 8..i * 8 + 8]);
    u64::from_le_bytes(w)
}

/// Matches the sends and receives of all ranks. `words` are as many for each rank: how many entries, then the entries.
fn matched(words: &[u64], n: usize) -> Result<Vec<Move>, Error> {
    let each = words.len() / n;
    let mut pairs: HashMap<(usize, usize), (Vec<Entry>, Vec<Entry>)> = HashMap::new();
    for (rank, words) in words.chunks(each).enumerate() {
        let entries = words[1..].chunks(WORDS).take(words[0] as usize).map(Entry::unpack);
        let mut mine: Vec<Entry> = entries.collect();
        for e in &mine {
            if e.peer >= n || e.at.checked_add(e.bytes).is_none() {
                return Err(bad(format!("group: rank {rank} announced a transfer that cannot be: {e:?}")));
            }
            if e.sends {
                pairs.entry((rank, e.peer)).or_default().0.push(*e);
            } else {
                pairs.entry((e.peer, rank)).or_default().1.push(*e);
            }
        }
        // What is received overlaps nothing: sorted by place, neither the furthest receive nor, for a receive, the
        // furthest send before it reaches into it.
        mine.retain(|e| e.bytes > 0);
        mine.sort_unstable_by_key(|e| (e.at, e.sends));
        let (mut sent, mut received) = (0, 0);
        for e in &mine {
            if e.at < received || !e.sends && e.at < sent {
                return Err(bad(format!(
                    "group: on rank {rank} the {} with rank {} overlaps another buffer of the group; use separate buffers",
                    if e.sends { "send" } else { "receive" },
                    e.peer
                )));
            }
            let end = if e.sends { &mut sent } else { &mut received };
            *end = (*end).max(e.at + e.bytes);
        }
    }
    let mut moves = Vec::new();
    let mut sorted: Vec<_> = pairs.into_iter().collect();
    sorted.sort_unstable_by_key(|(pair, _)| *pair);
    for ((src, dst), (sends, receives)) in sorted {
        if sends.len() != receives.len() {
            return Err(bad(format!(
                "group: rank {src} sends to rank {dst} {} times, which receives from it {} times; nothing was moved",
                sends.len(),
                receives.len()
            )));
        }
        for (i, (s, r)) in sends.iter().zip(&receives).enumerate() {
            if (s.bytes, s.dtype) != (r.bytes, r.dtype) {
                return Err(bad(format!(
                    "group: send {i} of rank {src} to rank {dst} is {}, the receive there is {}; nothing was moved",
                    s.tell(),
                    r.tell()
                )));
            }
            moves.push(Move { src, src_at: s.at, dst, dst_at: r.at, bytes: s.bytes });
        }
    }
    Ok(moves)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send(peer: usize, at: u64, bytes: u64) -> Entry {
        Entry { peer, sends: true, dtype: DataType::Uint8.nrt(), at, bytes }
    }

    fn recv(peer: usize, at: u64, bytes: u64) -> Entry {
        Entry { sends: false, ..send(peer, at, bytes) }
    }

    fn matched_of(ranks: &[&[Entry]]) -> Result<Vec<Move>, String> {
        let room = ranks.iter().map(|r| r.len()).max().unwrap_or(0);
        let mut words = Vec::new();
        for r in ranks {
            words.push(r.len() as u64);
            words.extend(r.iter().flat_map(|e| e.pack()));
            words.resize(words.len() + (room - r.len()) * WORDS, 0);
        }
        matched(&words, ranks.len()).map_err(|e| e.to_string())
    }

    #[test]
    fn sends_meet_receives_in_order_for_each_pair() {
        let got = matched_of(&[
            &[send(1, 0, 10), send(1, 100, 20), send(0, 5, 1), recv(0, 50, 1)],
            &[recv(0, 7, 10), recv(0, 70, 20)],
        ]);
        let m = |src, src_at, dst, dst_at, bytes| Move { src, src_at, dst, dst_at, bytes };
        assert_eq!(got.unwrap(), [m(0, 5, 0, 50, 1), m(0, 0, 1, 7, 10), m(0, 100, 1, 70, 20)]);
    }

    #[test]
    fn what_does_not_match_is_told_with_both_sides() {
        let e = matched_of(&[&[send(1, 0, 10)], &[recv(0, 0, 11)]]).unwrap_err();
        assert!(e.contains("send 0 of rank 0 to rank 1 is 10 bytes of uint8, the receive there is 11 bytes"), "{e}");
        let e = matched_of(&[&[send(1, 0, 10)], &[]]).unwrap_err();
        assert!(e.contains("rank 0 sends to rank 1 1 times") && e.contains("0 times"), "{e}");
        let other = Entry { dtype: DataType::Int8.nrt(), ..recv(0, 0, 10) };
        assert!(matched_of(&[&[send(1, 0, 10)], &[other]]).unwrap_err().contains("int8"));
        assert!(matched_of(&[&[send(7, 0, 10)], &[]]).unwrap_err().contains("cannot be"));
        assert!(matched_of(&[&[send(0, u64::MAX, 10)], &[]]).unwrap_err().contains("cannot be"));
    }

    #[test]
    fn received_ranges_overlap_nothing_else() {
        let both = |a: Entry, b: Entry| matched_of(&[&[a, b], &[send(0, 0, 10), recv(0, 50, 10)]]);
        assert!(both(recv(1, 0, 10), send(1, 10, 10)).is_ok());
        assert!(both(recv(1, 10, 10), send(1, 0, 10)).is_ok());
        for at in [1, 5, 9, 10, 11, 19] {
            let e = both(recv(1, 10, 10), send(1, at, 10)).unwrap_err();
            assert!(e.contains("overlaps another buffer"), "{at} {e}");
        }
        let e = matched_of(&[&[recv(1, 0, 10), recv(1, 9, 10)], &[send(0, 0, 10), send(0, 0, 10)]]).unwrap_err();
        assert!(e.contains("overlaps"), "{e}");
        // Sending the same bytes twice is fine.
        assert!(matched_of(&[&[recv(1, 0, 10), recv(1, 10, 10)], &[send(0, 0, 10), send(0, 5, 10)]]).is_ok());
    }
}
