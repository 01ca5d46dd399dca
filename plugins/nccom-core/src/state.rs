//! A plan as bytes: what one instance exports and its successor imports.
//!
//! Two schemas, and this library reads both, so that a swap may go forward and back. A release that shall be gone back to
//! must read its successor's schema before that one comes out.
//!
//! | schema | layout |
//! |---|---|
//! | 1 | magic `pln1`, then the parts one after the other, ranks as 4 bytes |
//! | 2 | magic `pln2`, then sections (tag, bytes), each once and in any order, ranks as 2 bytes |
//!
//! Sockets do not travel: they are parked with the host, and a state names their slots. A checkpoint, taken while the
//! instance holds them itself, says that there are none.
//!
//! Bytes come from another plugin: everything is checked before it is followed.

use crate::bootstrap::group::Bootstrap;
use crate::bootstrap::head::{HEAD_BYTES, Head, MAX_RANKS};
use crate::bootstrap::parked::Slots;
use crate::bytes::{Reader, bad, put, u32_at};
use crate::fail::Failure;
use crate::peers::{PeerRecord, RECORD_BYTES};
use crate::rings::Ring;
use crate::topo::limits::{MAX_CHANNELS, MAX_KANGA_PATHS, MAX_MLA_CYCLES};

/// What the schemas are schemas of.
pub const NAME: &str = "nccom-plan";
/// Schemas that are read.
pub const READ: [u32; 2] = [1, 2];

const MAGIC: [u32; 2] = [0x316e_6c70, 0x326e_6c70];
/// Entries of a cycle over accelerators.
const MAX_CYCLE: usize = 32;

/// Sections of schema 2.
const HEAD: u32 = 1;
const RECORDS: u32 = 2;
const GRAPH: u32 = 3;
const WIRES: u32 = 4;

/// What a plan needs to go on elsewhere.
#[derive(Debug)]
pub struct PlanState {
    /// Who it is.
    pub head: Head,
    /// One a rank.
    pub records: Vec<PeerRecord>,
    /// Absent before the graph is built.
    pub graph: Option<FoundGraph>,
    /// The parked bootstrap; absent in a checkpoint.
    pub wires: Option<Bootstrap<Slots>>,
}

/// What the search found. A release arranges its channels from it, so another release gets the same to begin with.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FoundGraph {
    /// Rings, this rank first, without copies.
    pub searched: Vec<Ring>,
    /// Kangaring paths.
    pub kangaring: Vec<Vec<i32>>,
    /// Cycles over accelerators.
    pub cycles: Vec<Vec<i32>>,
}

/// Lists of the two schemas.
impl Reader<'_> {
    /// A number of entries, at most `most`.
    fn count(&mut self, most: usize, what: &str) -> Result<usize, Failure> {
        let n = self.u32()? as usize;
        if n > most { Err(bad(&format!("{n} {what}, at most {most} can be"))) } else { Ok(n) }
    }

    /// A rank or accelerator of `width` bytes; each schema holds what the other can.
    fn number(&mut self, width: usize) -> Result<i32, Failure> {
        let b = self.take(width)?;
        let n = if width == 2 { u32::from(u16::from_le_bytes([b[0], b[1]])) } else { u32_at(b, 0) };
        if n < MAX_RANKS { Ok(n as i32) } else { Err(bad(&format!("it names rank or accelerator {n}"))) }
    }

    fn list(&mut self, most: usize, width: usize) -> Result<Vec<i32>, Failure> {
        let n = self.count(most, "entries of a list")?;
        (0..n).map(|_| self.number(width)).collect()
    }
}

fn put_numbers(b: &mut Vec<u8>, numbers: &[i32], width: usize) {
    numbers.iter().for_each(|n| b.extend_from_slice(&n.to_le_bytes()[..width]));
}

fn put_lists(b: &mut Vec<u8>, lists: &[Vec<i32>], width: usize) {
    put(b, lists.len() as u32);
    for list in lists {
        put(b, list.len() as u32);
        put_numbers(b, list, width);
    }
}

/// Bytes of a rank in each schema.
fn width(schema: u32) -> usize {
    if schema == 1 { 4 } else { 2 }
}

/// A state as bytes of `schema`, 1 or 2.
pub fn encode(
    schema: u32,
    head: &Head,
    records: &[PeerRecord],
    graph: Option<&FoundGraph>,
    wires: Option<&Bootstrap<Slots>>,
) -> Vec<u8> {
    let parts = [
        (HEAD, head.encode()),
        (RECORDS, records.iter().flat_map(PeerRecord::encode).collect()),
        (GRAPH, graph.map_or_else(Vec::new, |g| g.encode(width(schema)))),
        (WIRES, wires.map_or_else(Vec::new, Bootstrap::encode)),
    ];
    let mut b = Vec::new();
    put(&mut b, MAGIC[usize::from(schema != 1)]);
    for (tag, bytes) in parts {
        if schema != 1 {
            put(&mut b, tag);
        }
        // Of what may be absent the first schema needs the length as well.
        if schema != 1 || matches!(tag, GRAPH | WIRES) {
            put(&mut b, bytes.len() as u32);
        }
        b.extend_from_slice(&bytes);
    }
    b
}

impl PlanState {
    /// From bytes of `schema`.
    ///
    /// # Errors
    /// [`Code::Invalid`](crate::fail::Code) with what is wrong.
    pub fn decode(schema: u32, bytes: &[u8]) -> Result<PlanState, Failure> {
        if !READ.contains(&schema) {
            return Err(bad(&format!("schema {schema}, {READ:?} are read")));
        }
        let mut r = Reader::new(bytes);
        if r.u32()? != MAGIC[schema as usize - 1] {
            return Err(bad("no valid header"));
        }
        let (head, records, graph, wires);
        if schema == 1 {
            head = r.take(HEAD_BYTES)?;
            records = r.take(Head::decode(head)?.nranks * RECORD_BYTES)?;
            let n = r.u32()? as usize;
            graph = r.take(n)?;
            let n = r.u32()? as usize;
            wires = r.take(n)?;
            r.end()?;
        } else {
            let mut sections: [Option<&[u8]>; 4] = [None; 4];
            while r.end().is_err() {
                let (tag, n) = (r.u32()?, r.u32()? as usize);
                let at = (tag as usize).checked_sub(1).and_then(|i| sections.get_mut(i));
                let at = at.ok_or_else(|| bad(&format!("section {tag} is not known")))?;
                if at.replace(r.take(n)?).is_some() {
                    return Err(bad(&format!("section {tag} is there twice")));
                }
            }
            let [Some(h), Some(p), Some(g), Some(w)] = sections else { return Err(bad("a section is missing")) };
            (head, records, graph, wires) = (h, p, g, w);
        }
        let head = Head::decode(head)?;
        if records.len() != head.nranks * RECORD_BYTES {
            return Err(bad(&format!("{} bytes of records of {} ranks", records.len(), head.nranks)));
        }
        Ok(PlanState {
            head,
            records: records
                .chunks(RECORD_BYTES)
                .enumerate()
                .map(|(r, b)| PeerRecord::decode(b, r))
                .collect::<Result<_, _>>()?,
            graph: present(graph, |r| FoundGraph::decode(r, head, width(schema)))?,
            wires: present(wires, |r| Bootstrap::decode(r, head))?,
        })
    }
}

/// A part that may be absent, then it has no bytes; one that is there is read to its end.
fn present<T>(bytes: &[u8], read: impl FnOnce(&mut Reader<'_>) -> Result<T, Failure>) -> Result<Option<T>, Failure> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let mut r = Reader::new(bytes);
    let part = read(&mut r)?;
    r.end()?;
    Ok(Some(part))
}

impl FoundGraph {
    fn encode(&self, width: usize) -> Vec<u8> {
        let mut b = Vec::new();
        put(&mut b, self.searched.len() as u32);
        self.searched.iter().for_each(|r| put_numbers(&mut b, &r.user_ranks, width));
        put_lists(&mut b, &self.kangaring, width);
        put_lists(&mut b, &self.cycles, width);
        b
    }

    fn decode(r: &mut Reader<'_>, h: Head, width: usize) -> Result<FoundGraph, Failure> {
        let (rank, nranks) = (h.rank, h.nranks);
        let rings = r.count(MAX_CHANNELS, "rings")?;
        let mut searched = Vec::with_capacity(rings);
        for _ in 0..rings {
            let order = (0..nranks).map(|_| r.number(width)).collect::<Result<Vec<_>, _>>()?;
            let mut sorted = order.clone();
            sorted.sort_unstable();
            if !sorted.into_iter().eq(0..nranks as i32) || order[0] != rank as i32 {
                return Err(bad("a ring is not every rank once, from this one on"));
            }
            searched.push(Ring::new(order));
        }
        let mut lists = |most: usize, entries: usize, what: &str| -> Result<Vec<Vec<i32>>, Failure> {
            (0..r.count(most, what)?).map(|_| r.list(entries, width)).collect()
        };
        let kangaring = lists(MAX_KANGA_PATHS, nranks, "kangaring paths")?;
        let cycles = lists(MAX_MLA_CYCLES, MAX_CYCLE, "cycles")?;
        Ok(FoundGraph { searched, kangaring, cycles })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(rank: usize) -> PeerRecord {
        PeerRecord::decode(
            &{
                let mut b = [0; RECORD_BYTES];
                b[..4].copy_from_slice(&(rank as u32).to_le_bytes());
                b[16..24].copy_from_slice(&7u64.to_le_bytes());
                b
            },
            rank,
        )
        .unwrap()
    }

    fn state(nranks: usize, parked: bool) -> PlanState {
        let rank = 1 % nranks;
        let order: Vec<i32> = (0..nranks).map(|i| ((i + rank) % nranks) as i32).collect();
        let graph = FoundGraph {
            searched: vec![Ring::new(order); 2],
            kangaring: vec![(0..nranks as i32).collect()],
            cycles: vec![vec![0, 3, 2]],
        };
        let head = Head { rank, nranks, dev: 5, timeout_ms: 15_000, cluster_id: u64::MAX - 1, epoch: -2 };
        PlanState {
            head,
            records: (0..nranks).map(record).collect(),
            graph: Some(graph),
            wires: parked.then(|| Bootstrap::parked_example(head)),
        }
    }

    fn bytes(s: &PlanState, schema: u32) -> Vec<u8> {
        encode(schema, &s.head, &s.records, s.graph.as_ref(), s.wires.as_ref())
    }

    #[test]
    fn a_state_comes_back_from_both_schemas_with_and_without_sockets() {
        for schema in READ {
            for (n, parked) in [(1, false), (2, true), (4, false), (5, true)] {
                let s = state(n, parked);
                let back = PlanState::decode(schema, &bytes(&s, schema)).unwrap();
                assert_eq!(format!("{back:?}"), format!("{s:?}"));
            }
            let plain = PlanState { graph: None, ..state(3, true) };
            assert!(PlanState::decode(schema, &bytes(&plain, schema)).unwrap().graph.is_none());
        }
    }

    #[test]
    fn a_damaged_state_is_refused_with_the_reason() {
        let said = |schema, b: &[u8]| PlanState::decode(schema, b).unwrap_err().text;
        let one = bytes(&state(4, true), 1);
        assert!(said(3, &one).contains("schema 3"));
        assert!(said(2, &one).contains("no valid header"));
        assert!(said(1, &[&one[..], &[0]].concat()).contains("1 bytes are left over"));
        for n in 0..one.len() {
            assert!(PlanState::decode(1, &one[..n]).is_err(), "{n}");
        }
        let two = bytes(&state(4, true), 2);
        let head = &two[4..4 + 8 + HEAD_BYTES];
        assert!(said(2, &[&two[..], head].concat()).contains("section 1 is there twice"));
        assert!(said(2, &two[..4 + 8 + HEAD_BYTES]).contains("a section is missing"));
        let mut twice = state(4, false);
        twice.graph.as_mut().unwrap().searched[0].user_ranks = vec![1, 2, 3, 3];
        for schema in READ {
            assert!(said(schema, &bytes(&twice, schema)).contains("not every rank once"));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(schema in 1u32..3, at in 0usize..2000, with: u8, cut in 0usize..2000) {
            let mut b = bytes(&state(4, true), schema);
            let n = b.len();
            b[at % n] ^= with;
            b.truncate(n - cut % n);
            let _ = PlanState::decode(schema, &b);
        }
    }
}
