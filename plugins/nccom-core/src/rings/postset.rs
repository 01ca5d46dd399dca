//! Postset: node segments become global rings (topology-and-rings 7).
//!
//! The doubled half of nccom is a copy, in the same direction, and is marked `duplicate`: the spec's certain statement is
//! "double by copying" (INV-51); "opposite direction" is its uncertain one.

use super::RingError;
use super::layout::Layout;
use super::record::TopoRanks;
use crate::topo::Family;
use crate::topo::limits::{MAX_CHANNELS, MAX_KANGA_PATHS, MAX_KANGA_RANKS};

/// `ncclRing` of one channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ring {
    /// Rank this one receives from.
    pub prev: i32,
    /// Rank this one sends to.
    pub next: i32,
    /// Every rank once, this one first.
    pub user_ranks: Vec<i32>,
    /// A copy of another channel.
    pub duplicate: bool,
}

impl Ring {
    /// The ring along `order`, which begins with this rank.
    pub fn new(order: Vec<i32>) -> Ring {
        let (prev, next) = (order[order.len() - 1], order[1 % order.len()]);
        Ring { prev, next, user_ranks: order, duplicate: false }
    }
}

/// The searched rings, and behind them their copies, as far as there is room (INV-51).
pub fn doubled(searched: &[Ring]) -> Vec<Ring> {
    let copies = searched.iter().map(|r| Ring { duplicate: true, ..r.clone() });
    searched.iter().cloned().chain(copies).take(MAX_CHANNELS).collect()
}

/// Of each searched ring with more than two ranks: itself, the opposite direction, and, if `any_pair` can be connected,
/// its every other rank first and then the rest, which other links carry. As far as there is room; the host uses the first
/// few, so they differ.
pub fn both_ways_and_strided(searched: &[Ring], any_pair: bool) -> Vec<Ring> {
    let arranged = searched.iter().flat_map(|ring| {
        let me = ring.user_ranks[0];
        let n = ring.user_ranks.len();
        let mut all = vec![ring.clone()];
        if n > 2 {
            let mut order = ring.user_ranks.clone();
            order[1..].reverse();
            all.push(Ring::new(order));
        }
        if n > 3 && any_pair {
            // All ranks count from rank 0.
            let zero = ring.user_ranks.iter().position(|r| *r == 0).unwrap_or(0);
            let at = |i: usize| ring.user_ranks[(zero + i) % n];
            let mut order: Vec<i32> = (0..n).step_by(2).chain((1..n).step_by(2)).map(at).collect();
            let mine = order.iter().position(|r| *r == me).unwrap_or(0);
            order.rotate_left(mine);
            all.push(Ring::new(order));
        }
        all
    });
    arranged.take(MAX_CHANNELS).collect()
}

/// What postset leaves in the communicator.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Channels {
    /// One ring a channel, at most 32; of postset the searched ones.
    pub rings: Vec<Ring>,
    /// Kangaring table: at most 4 paths; empty on every family but switch-v1 (INV-53).
    pub kangaring: Vec<Vec<i32>>,
}

/// Joins all ranks' fragments to the searched rings; the release arranges its channels from them ([`doubled`],
/// [`both_ways_and_strided`]). `all[r]` is rank r's record; `order` lists the nodes in ring order
/// ([`super::Pods::order`]).
///
/// # Errors
/// [`RingError`]: both ring defects with the original's texts, and records that do not fit.
pub fn postset(
    all: &[TopoRanks],
    layout: &Layout,
    order: &[usize],
    family: Family,
    rank: i32,
) -> Result<Channels, RingError> {
    let n = layout.ranks();
    if all.len() != n {
        return Err(RingError::Shape { what: "topology records", found: all.len(), expected: n });
    }
    let mut sorted = order.to_vec();
    sorted.sort_unstable();
    if !sorted.iter().copied().eq(0..layout.nodes.len()) {
        return Err(RingError::Shape { what: "nodes in the order", found: order.len(), expected: layout.nodes.len() });
    }
    // Ranks of unlike nodes may have found different numbers; only what all have can be closed.
    let found = all.iter().map(TopoRanks::channels).min().unwrap_or(0);
    let mut prev = Vec::with_capacity(found);
    let mut next = Vec::with_capacity(found);
    for c in 0..found {
        let (p, x) = join(all, layout, order, c)?;
        prev.push(p);
        next.push(x);
    }
    let rings = build_rings(found, rank, n, &prev, &next)?.into_iter().map(Ring::new).collect();
    let kangaring = if family.is_switch_v1() { kangaring(all, layout, order, &next)? } else { Vec::new() };
    Ok(Channels { rings, kangaring })
}

/// `prev` and `next` of every rank in one ring: the segments, and tail of a node → head of the following one.
fn join(all: &[TopoRanks], layout: &Layout, order: &[usize], c: usize) -> Result<(Vec<i32>, Vec<i32>), RingError> {
    let local = |node: usize, whose: i32, what: &'static str, named: i32| {
        let known = usize::try_from(named).ok().and_then(|r| layout.node_of.get(r));
        if known == Some(&node) { Ok(named as usize) } else { Err(RingError::BadRecord { rank: whose, what, named }) }
    };
    let mut prev = Vec::with_capacity(all.len());
    let mut next = Vec::with_capacity(all.len());
    for (r, record) in all.iter().enumerate() {
        let (node, rank) = (layout.node_of[r], r as i32);
        for (what, value) in [("predecessor", record.ring_prev[c]), ("successor", record.ring_next[c])] {
            if value != -1 {
                local(node, rank, what, value)?;
            }
        }
        prev.push(record.ring_prev[c]);
        next.push(record.ring_next[c]);
    }
    for (k, &node) in order.iter().enumerate() {
        let following = order[(k + 1) % order.len()];
        let first = |node: usize| layout.nodes[node].first().copied().unwrap_or(0);
        let (a, b) = (first(node), first(following));
        let tail = local(node, a, "tail", all[a as usize].ring_send[c])?;
        let head = local(following, b, "head", all[b as usize].ring_recv[c])?;
        next[tail] = head as i32;
        prev[head] = tail as i32;
    }
    Ok((prev, next))
}

/// `ncclBuildRings`: follows `next` from `rank` and stores what it visits, so that every row starts with this rank.
///
/// # Errors
/// [`RingError::NoLoop`] if a walk does not end at its start, [`RingError::Misses`] if it misses a rank (INV-50), with
/// the original's texts; [`RingError::Contradiction`] if `prev` does not undo `next`.
pub fn build_rings(
    nrings: usize,
    rank: i32,
    nranks: usize,
    prev: &[Vec<i32>],
    next: &[Vec<i32>],
) -> Result<Vec<Vec<i32>>, RingError> {
    if usize::try_from(rank).map_or(true, |r| r >= nranks) {
        return Err(RingError::Shape { what: "ranks at least", found: nranks, expected: rank.max(0) as usize + 1 });
    }
    if prev.len() < nrings || next.len() < nrings {
        return Err(RingError::Shape { what: "rings", found: prev.len().min(next.len()), expected: nrings });
    }
    let mut rings = Vec::with_capacity(nrings);
    for ring in 0..nrings {
        let mut row = Vec::with_capacity(nranks);
        let mut seen = vec![false; nranks];
        let mut current = rank;
        for _ in 0..nranks {
            let at = usize::try_from(current).ok();
            let step = at.and_then(|at| Some((seen.get_mut(at)?, *next[ring].get(at)?)));
            let Some((seen, following)) = step else {
                // The walk left the communicator: -1 or a rank nobody has.
                return Err(RingError::NoLoop { ring, end: current, rank });
            };
            *seen = true;
            row.push(current);
            current = following;
        }
        if current != rank {
            return Err(RingError::NoLoop { ring, end: current, rank });
        }
        if let Some(missing) = seen.iter().position(|s| !s) {
            return Err(RingError::Misses { ring, rank: missing as i32 });
        }
        let undone = |r: &i32| {
            let back = next[ring].get(*r as usize).and_then(|x| prev[ring].get(usize::try_from(*x).ok()?));
            back == Some(r)
        };
        if let Some(rank) = row.iter().find(|r| !undone(r)) {
            return Err(RingError::Contradiction { ring, rank: *rank });
        }
        rings.push(row);
    }
    Ok(rings)
}

/// Copies the fragments to the table: path k takes the groups in the order in which ring k, from the first node's head,
/// meets their members (topology-and-rings 8.1).
fn kangaring(
    all: &[TopoRanks],
    layout: &Layout,
    order: &[usize],
    next: &[Vec<i32>],
) -> Result<Vec<Vec<i32>>, RingError> {
    let n = layout.ranks();
    let paths = |r: &TopoRanks| r.jbog_kangaring_path.iter().position(|g| g[0] < 0).unwrap_or(MAX_KANGA_PATHS);
    // A record without a fragment is all zero; with one, its group names the rank itself.
    let has = |(r, record): (usize, &TopoRanks)| record.jbog_kangaring_path[0].contains(&(r as i32));
    if n > MAX_KANGA_RANKS || next.is_empty() || !all.iter().enumerate().all(has) {
        return Ok(Vec::new());
    }
    let count = all.iter().map(paths).min().unwrap_or(0);
    let head = order.first().and_then(|node| layout.nodes[*node].first()).map_or(0, |r| all[*r as usize].ring_recv[0]);
    let mut table = Vec::with_capacity(count);
    for k in 0..count {
        let along = &next[k % next.len()];
        let mut path: Vec<i32> = Vec::with_capacity(n);
        let mut at = head;
        for _ in 0..n {
            let Some(record) = usize::try_from(at).ok().and_then(|r| all.get(r)) else {
                break;
            };
            if !path.contains(&at) {
                let group = record.jbog_kangaring_path[k].iter().copied().filter(|r| *r >= 0);
                path.extend(group);
            }
            at = along[at as usize];
        }
        let mut sorted = path.clone();
        sorted.sort_unstable();
        sorted.dedup();
        if path.len() != n || !sorted.iter().copied().eq(0..n as i32) {
            return Err(RingError::Kangaring { path: k, found: sorted.len(), expected: n });
        }
        table.push(path);
    }
    Ok(table)
}
