//! The inherited search: bandwidth-tier descent with a depth-first ring layout (topology-and-rings 4).
//!
//! Owns: tiers, budget, relaxations, second pass, channel doubling, the fall-back. The unit of layout is an
//! accelerator: its cores are visited in one run, in core order, because leaving it early only spends more of the
//! fabric. What is searched is the order of accelerators and the network devices at both ends.
//!
//! Every channel reserves its speed on each directed link of its way, so that the channels found never exceed any
//! cut. The budget counts link reservations and candidates tried, so that the answer depends on nothing but the graph.
//!
//! Two prunings keep the layout from walking dead ends: what is left must be reachable from where the ring stands,
//! and one accelerator that can close the ring must be left for the end. Among equally good ways the accelerator with
//! the fewest onward ways comes first.
//!
//! Relaxation order (the spec leaves it open): different orders per channel, worse paths between devices, other
//! network device at the end, worse paths to network devices, next tier. A tier that cannot beat what was found, by
//! the links of the narrowest accelerator and of the network devices, is passed over.

use super::{Graph, Origin};
use crate::topo::limits::MAX_LOCAL_RANKS;
use crate::topo::system::LinkType;
use crate::topo::{NodeType, PathType, System};
#[cfg(test)]
use std::collections::BTreeMap;

/// Speeds tried, GB/s (topology-and-rings 4).
pub const TIERS: [f32; 18] =
    [42.0, 30.0, 24.0, 21.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.4, 1.2, 0.24, 0.12];
/// What the whole descent may spend.
pub const BUDGET: i64 = 0x18_0000;
/// What one layout may spend when all channels have one order, and when they may differ.
pub const STEP_SAME: i64 = 0x400;
/// See [`STEP_SAME`].
pub const STEP_DIFFERENT: i64 = 0x4_0000;
/// What trying a candidate costs beside its reservations: the glance at the rest of the ring.
const CANDIDATE_COST: i64 = 8;
/// A tier below this share of what was found is not worth trying.
pub const TIER_RATIO: f32 = 0.49;
/// Channels at least this fast are split.
pub const DOUBLING_SPEED: f32 = 25.0;
/// Speed of the fall-back (upstream's).
const FALLBACK_SPEED: f32 = 0.1;

/// A way between two ends, as the layout needs it.
#[derive(Clone, Debug)]
struct Way {
    links: Vec<usize>,
    kind: PathType,
    width: f32,
}

/// What the layout works on.
struct Problem {
    /// Ranks' nodes of each accelerator.
    units: Vec<Vec<usize>>,
    /// Way through an accelerator's cores.
    inside: Vec<Way>,
    /// Way from the last core of one to the first of another, or of the same.
    between: Vec<Vec<Option<Way>>>,
    /// For each accelerator the others, best way first.
    near: Vec<Vec<usize>>,
    /// Network devices, if the ring crosses nodes.
    nets: Vec<i32>,
    /// `enter[n][u]`: from network device to first core; and its order of accelerators.
    enter: Vec<Vec<Option<Way>>>,
    near_net: Vec<Vec<usize>>,
    /// `leave[u][n]`: from last core to network device; and its order of devices.
    leave: Vec<Vec<Option<Way>>>,
    near_unit: Vec<Vec<usize>>,
    widths: Vec<f32>,
    /// Widths of the links that leave each accelerator; of the network devices.
    cuts: Vec<Vec<f32>>,
}

/// A set of accelerators.
#[derive(Clone, Copy, Default, PartialEq)]
struct Set([u64; MAX_LOCAL_RANKS / 64]);

impl Set {
    fn add(&mut self, i: usize) {
        if let Some(w) = self.0.get_mut(i / 64) {
            *w |= 1 << (i % 64);
        }
    }
    fn remove(&mut self, i: usize) {
        if let Some(w) = self.0.get_mut(i / 64) {
            *w &= !(1 << (i % 64));
        }
    }
    fn has(&self, i: usize) -> bool {
        self.0.get(i / 64).is_some_and(|w| w >> (i % 64) & 1 == 1)
    }
    fn and(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] & other.0[i]))
    }
    fn count(&self) -> u32 {
        self.0.iter().map(|w| w.count_ones()).sum()
    }
    fn first(&self) -> Option<usize> {
        let word = self.0.iter().position(|w| *w != 0)?;
        Some(word * 64 + self.0[word].trailing_zeros() as usize)
    }
    fn all(n: usize) -> Self {
        let mut set = Self::default();
        (0..n).for_each(|i| set.add(i));
        set
    }
}

/// What is allowed in one layout.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Knobs {
    speed: f32,
    type_intra: PathType,
    type_inter: PathType,
    cross_nic: bool,
    same: bool,
}

/// A laid channel: accelerators in order, network devices at both ends (indices), links used.
#[derive(Clone, Debug, PartialEq)]
struct Laid {
    order: Vec<usize>,
    ends: Option<(usize, usize)>,
    hops: usize,
}

#[derive(Clone, Debug, PartialEq)]
struct Found {
    knobs: Knobs,
    channels: Vec<Laid>,
}

impl Found {
    fn total(&self) -> f32 {
        self.channels.len() as f32 * self.knobs.speed
    }

    fn hops(&self) -> usize {
        self.channels.iter().map(|c| c.hops).sum()
    }

    /// More channels × speed; at the same, fewer links.
    fn beats(&self, other: Option<&Found>) -> bool {
        match other {
            None => !self.channels.is_empty(),
            Some(o) => (self.total(), o.hops()) > (o.total(), self.hops()),
        }
    }
}

impl Problem {
    fn of(system: &System) -> Self {
        let units = system.accelerators();
        let way = |a: usize, b: usize| system.path(a, b).map(|p| Way { links: p.links, kind: p.kind, width: p.width });
        let ends = |u: &Vec<usize>| (u.first().copied().unwrap_or(0), u.last().copied().unwrap_or(0));
        let inside = units
            .iter()
            .map(|u| {
                let start = Way { links: Vec::new(), kind: PathType::Loc, width: f32::INFINITY };
                u.windows(2).filter_map(|w| way(w[0], w[1])).fold(start, |mut all, next| {
                    all.links.extend(next.links);
                    all.kind = all.kind.max(next.kind);
                    all.width = all.width.min(next.width);
                    all
                })
            })
            .collect();
        let between: Vec<Vec<Option<Way>>> =
            units.iter().map(|u| units.iter().map(|v| way(ends(u).1, ends(v).0)).collect()).collect();
        let across = system.facts.multi_node;
        let net_nodes: Vec<usize> = if across { system.bucket(NodeType::Net).to_vec() } else { Vec::new() };
        let enter: Vec<Vec<Option<Way>>> =
            net_nodes.iter().map(|n| units.iter().map(|u| way(*n, ends(u).0)).collect()).collect();
        let leave: Vec<Vec<Option<Way>>> =
            units.iter().map(|u| net_nodes.iter().map(|n| way(ends(u).1, *n)).collect()).collect();
        let near =
            between.iter().enumerate().map(|(u, row)| sorted(row).into_iter().filter(|v| *v != u).collect()).collect();
        let near_net = enter.iter().map(|row| sorted(row)).collect();
        let near_unit = leave.iter().map(|row| sorted(row)).collect();
        let out_of = |nodes: &[usize]| -> Vec<f32> {
            let place = |n: usize| nodes.contains(&n) || is_place(system, nodes, n);
            let out = |fabric: bool| -> Vec<f32> {
                let out = system.links.iter().filter(|l| place(l.from) && !place(l.to));
                out.filter(|l| (l.kind == LinkType::Nvl) == fabric).map(|l| l.width).collect()
            };
            // As in the system's total: the fabric where there is one.
            let fabric = out(true);
            if fabric.is_empty() { out(false) } else { fabric }
        };
        let mut cuts = Vec::new();
        if units.len() > 1 {
            cuts.extend(units.iter().map(|u| out_of(u)));
        }
        if !net_nodes.is_empty() {
            cuts.push(net_nodes.iter().flat_map(|n| out_of(&[*n])).collect());
        }
        Self {
            inside,
            between,
            near,
            nets: net_nodes.iter().filter_map(|n| system.net(*n)).map(|n| n.dev).collect(),
            enter,
            near_net,
            leave,
            near_unit,
            widths: system.links.iter().map(|l| l.width).collect(),
            cuts,
            units,
        }
    }

    /// Channels of a speed that the narrowest cut lets through, at most `max`.
    fn bound(&self, speed: f32, max: usize) -> usize {
        let through = |cut: &Vec<f32>| cut.iter().map(|w| (w / speed).floor() as usize).sum();
        self.cuts.iter().map(through).min().unwrap_or(max).min(max)
    }

    /// Path types that occur between devices, and to network devices: only these are worth allowing.
    fn types(&self) -> (Vec<PathType>, Vec<PathType>) {
        let collect = |rows: &[Vec<Option<Way>>], diagonal: bool| {
            let mut kinds: Vec<PathType> = Vec::new();
            for (i, row) in rows.iter().enumerate() {
                let ways = row.iter().enumerate().filter(|(j, _)| diagonal || *j != i);
                kinds.extend(ways.filter_map(|(_, w)| w.as_ref()).map(|w| w.kind));
            }
            kinds
        };
        let mut intra = collect(&self.between, self.units.len() == 1);
        let floor = self.inside.iter().map(|w| w.kind).max().unwrap_or(PathType::Loc);
        intra.push(floor.max(PathType::Nvl));
        intra.retain(|k| *k >= floor);
        let mut inter = collect(&self.enter, true);
        inter.extend(collect(&self.leave, true));
        for list in [&mut intra, &mut inter] {
            list.sort_unstable();
            list.dedup();
        }
        if inter.is_empty() {
            inter.push(PathType::Pix);
        }
        (intra, inter)
    }

    fn usable(&self, way: Option<&Way>, limit: PathType, k: &Knobs) -> bool {
        way.is_some_and(|w| w.kind <= limit && w.width >= k.speed)
    }

    /// For each accelerator where the knobs and what is left of the links let it lead.
    fn onward(&self, k: &Knobs, free: &[f32]) -> Vec<Set> {
        let open = |w: &Way| w.links.iter().all(|l| free.get(*l).is_some_and(|f| *f >= k.speed));
        let row = |(u, row): (usize, &Vec<Option<Way>>)| {
            let mut set = Set::default();
            for (v, way) in row.iter().enumerate() {
                if u != v && self.usable(way.as_ref(), k.type_intra, k) && way.as_ref().is_some_and(open) {
                    set.add(v);
                }
            }
            set
        };
        self.between.iter().enumerate().map(row).collect()
    }

    /// Accelerators from which a channel can be closed, by what it began with: the first accelerator inside a node,
    /// the network device across.
    fn exits(&self, k: &Knobs, begin: usize) -> Set {
        let mut set = Set::default();
        for u in 0..self.units.len() {
            let closes = if self.nets.is_empty() {
                self.usable(self.between[u][begin].as_ref(), k.type_intra, k)
            } else {
                let at = |n: usize| self.usable(self.leave[u][n].as_ref(), k.type_inter, k);
                if k.cross_nic { (0..self.nets.len()).any(at) } else { at(begin) }
            };
            if closes {
                set.add(u);
            }
        }
        set
    }

    /// Whether a ring could exist at all: every accelerator leads to every other over ways that are allowed, and
    /// across nodes some network device leads in at one and out at another.
    fn feasible(&self, k: &Knobs, onward: &[Set]) -> bool {
        let n = self.units.len();
        if self.inside.iter().any(|w| w.width < k.speed || w.kind > k.type_intra) {
            return false;
        }
        if !self.nets.is_empty() {
            let through = |net: usize| {
                let exits = self.exits(k, net);
                (0..n).any(|u| {
                    let mut others = exits;
                    if n > 1 {
                        others.remove(u);
                    }
                    self.usable(self.enter[net][u].as_ref(), k.type_inter, k) && others.first().is_some()
                })
            };
            if !(0..self.nets.len()).any(through) {
                return false;
            }
        }
        // Across nodes the ring need not close here, so that one start that reaches all is enough.
        let starts = if self.nets.is_empty() { 1 } else { n };
        (0..starts).any(|u| reaches(onward, u, Set::all(n)))
    }

    /// Lays as many channels as the knobs and `steps` allow.
    fn lay(&self, k: Knobs, max: usize, steps: i64) -> (Found, i64) {
        let onward = vec![self.onward(&k, &self.widths)];
        let mut layout = Layout {
            p: self,
            k,
            onward,
            exits: Set::default(),
            free: self.widths.clone(),
            undo: Vec::new(),
            steps,
            left: Set::all(self.units.len()),
            order: Vec::new(),
            ends: Vec::new(),
            done: Vec::new(),
        };
        let mut best = Found { knobs: k, channels: Vec::new() };
        if max > 0 && self.feasible(&k, layout.ahead()) {
            layout.run(max, &mut best);
        }
        (best, steps - layout.steps)
    }
}

/// Whether all of `left` but the start itself can be reached from a start through `left` alone.
fn reaches(onward: &[Set], start: usize, left: Set) -> bool {
    let mut missing = left;
    missing.remove(start);
    let mut frontier = Set::default();
    frontier.add(start);
    while let Some(u) = frontier.first() {
        frontier.remove(u);
        let found = onward.get(u).map(|o| o.and(&missing)).unwrap_or_default();
        for i in 0..found.0.len() {
            missing.0[i] &= !found.0[i];
            frontier.0[i] |= found.0[i];
        }
    }
    missing.first().is_none()
}

/// Whether a node is the bus or fabric place of the accelerator these gpus are on.
fn is_place(system: &System, gpus: &[usize], node: usize) -> bool {
    use crate::topo::system::Detail;
    let Some(n) = system.nodes.get(node) else {
        return false;
    };
    matches!(n.detail, Detail::Pci { accelerator: true } | Detail::Nvs { accelerator: true })
        && n.links.iter().filter_map(|l| system.links.get(*l)).any(|l| gpus.contains(&l.to))
}

/// Indices of the ways that exist, best first: type, links, wider, index.
fn sorted(row: &[Option<Way>]) -> Vec<usize> {
    let key = |i: &usize| row[*i].as_ref().map(|w| (w.kind, w.links.len(), -((w.width * 1000.0) as i64), *i));
    let mut order: Vec<usize> = (0..row.len()).filter(|i| row[*i].is_some()).collect();
    order.sort_by_key(key);
    order
}

/// One decision of the layout and what is left to try there.
struct Frame {
    candidates: Vec<usize>,
    next: usize,
    undo: usize,
    /// Forced by the first channel's order: costs nothing, since it branches nowhere.
    forced: bool,
}

/// Depth-first, on an explicit stack: a guest's stack is small and 16 channels of 32 accelerators are deep.
struct Layout<'a> {
    p: &'a Problem,
    k: Knobs,
    /// Width left on each link.
    free: Vec<f32>,
    /// Links reserved and what they had before, to be restored exactly.
    undo: Vec<(usize, f32)>,
    steps: i64,
    /// Where each accelerator leads under these knobs, as each channel that was begun found the links.
    onward: Vec<Vec<Set>>,
    /// Accelerators that can close the channel being laid.
    exits: Set,
    /// Accelerators the channel being laid has not visited.
    left: Set,
    /// The channel being laid.
    order: Vec<usize>,
    ends: Vec<usize>,
    done: Vec<Laid>,
}

/// Decisions of a channel: enter (across nodes), one per accelerator, close.
#[derive(Clone, Copy, PartialEq)]
enum Decision {
    Enter,
    Unit,
    Close,
}

impl Layout<'_> {
    fn decision(&self) -> Decision {
        if !self.p.nets.is_empty() && self.ends.is_empty() {
            Decision::Enter
        } else if self.order.len() < self.p.units.len() {
            Decision::Unit
        } else {
            Decision::Close
        }
    }

    /// Where accelerators lead, for the channel being laid.
    fn ahead(&self) -> &[Set] {
        self.onward.last().map_or(&[], |o| o.as_slice())
    }

    fn frame(&self) -> Frame {
        let repeat = if self.k.same { self.done.first() } else { None };
        let mut forced = false;
        let candidates = match self.decision() {
            Decision::Enter => {
                let n = self.p.nets.len();
                // The next channel starts at the next device, so that channels spread over all.
                (0..n).map(|i| (self.done.len() + i) % n).collect()
            }
            Decision::Unit => match (repeat, self.order.last(), self.ends.first()) {
                (Some(first), _, _) => {
                    forced = true;
                    first.order.get(self.order.len()).copied().into_iter().collect()
                }
                (None, None, Some(net)) => self.p.near_net[*net].clone(),
                // A ring has no beginning: any start is as good as the first.
                (None, None, None) => vec![0],
                (None, Some(last), _) => {
                    let class = |u: usize| self.p.between[*last][u].as_ref().map(|w| (w.kind, w.links.len()));
                    let ahead = |u: usize| self.ahead().get(u).map_or(0, |o| o.and(&self.left).count());
                    let mut near: Vec<usize> =
                        self.p.near[*last].iter().copied().filter(|u| self.left.has(*u)).collect();
                    // Stable: what is equal in both stays in the order of quality.
                    near.sort_by_key(|u| (class(*u), ahead(*u)));
                    near
                }
            },
            Decision::Close => match (self.ends.first(), self.order.last()) {
                (None, _) => vec![0],
                (Some(net), _) if !self.k.cross_nic => vec![*net],
                (Some(_), Some(last)) => self.p.near_unit[*last].clone(),
                (Some(_), None) => Vec::new(),
            },
        };
        Frame { candidates, next: 0, undo: self.undo.len(), forced }
    }

    /// Reserves the speed on a way; false leaves a partial reservation for the caller to undo.
    fn reserve(&mut self, way: Option<&Way>, limit: PathType) -> bool {
        let Some(way) = way else { return false };
        if way.kind > limit {
            return false;
        }
        for &l in &way.links {
            self.steps -= 1;
            let free = self.free[l];
            if free < self.k.speed {
                return false;
            }
            self.undo.push((l, free));
            self.free[l] = free - self.k.speed;
        }
        true
    }

    fn restore(&mut self, mark: usize) {
        while self.undo.len() > mark {
            if let Some((l, width)) = self.undo.pop() {
                self.free[l] = width;
            }
        }
    }

    fn choose(&mut self, decision: Decision, candidate: usize) -> bool {
        let p = self.p;
        let (intra, inter) = (self.k.type_intra, self.k.type_inter);
        let fits = match decision {
            Decision::Enter => true,
            Decision::Unit => {
                let entered = match (self.order.last(), self.ends.first()) {
                    (Some(last), _) => self.reserve(p.between[*last][candidate].as_ref(), intra),
                    (None, Some(net)) => self.reserve(p.enter[*net][candidate].as_ref(), inter),
                    (None, None) => true,
                };
                entered && self.reserve(Some(&p.inside[candidate]), intra)
            }
            Decision::Close => match (self.order.first(), self.order.last(), self.ends.is_empty()) {
                (Some(_), Some(last), false) => self.reserve(p.leave[*last][candidate].as_ref(), inter),
                (Some(first), Some(last), true) => self.reserve(p.between[*last][*first].as_ref(), intra),
                _ => false,
            },
        };
        if fits {
            match decision {
                Decision::Enter | Decision::Close => self.ends.push(candidate),
                Decision::Unit => {
                    self.left.remove(candidate);
                    self.order.push(candidate);
                }
            }
            if self.order.is_empty() || (self.order.len() == 1 && p.nets.is_empty()) {
                self.exits = p.exits(&self.k, candidate);
            }
        }
        fits
    }

    /// Whether the rest of the channel can still be laid, as far as a glance tells.
    fn hopeful(&self) -> bool {
        let Some(&last) = self.order.last() else {
            return true;
        };
        if self.left.first().is_none() {
            return true;
        }
        self.exits.and(&self.left).first().is_some() && reaches(self.ahead(), last, self.left)
    }

    /// Takes back the last decision, which may be the last of a finished channel.
    fn take_back(&mut self) {
        if self.ends.is_empty()
            && self.order.is_empty()
            && let Some(laid) = self.done.pop()
        {
            self.onward.pop();
            let begin = laid.ends.map_or_else(|| laid.order.first().copied().unwrap_or(0), |e| e.0);
            self.exits = self.p.exits(&self.k, begin);
            self.left = Set::default();
            self.order = laid.order;
            self.ends = laid.ends.map_or_else(|| vec![0], |(a, b)| vec![a, b]);
        }
        let closing = if self.p.nets.is_empty() { 1 } else { 2 };
        if self.ends.len() == closing && self.order.len() == self.p.units.len() {
            self.ends.pop();
        } else if let Some(u) = self.order.pop() {
            self.left.add(u);
        } else {
            self.ends.pop();
        }
    }

    fn run(&mut self, max: usize, best: &mut Found) {
        let mut stack = vec![self.frame()];
        let mut taken: Vec<bool> = vec![false];
        while let (Some(frame), Some(was_taken)) = (stack.last_mut(), taken.last_mut()) {
            let mark = frame.undo;
            let candidate = frame.candidates.get(frame.next).copied();
            frame.next += 1;
            let forced = frame.forced;
            let undo_decision = std::mem::take(was_taken);
            if undo_decision {
                self.take_back();
            }
            self.restore(mark);
            let Some(candidate) = candidate else {
                stack.pop();
                taken.pop();
                continue;
            };
            let before = self.steps;
            let fits = self.choose(self.decision(), candidate);
            self.steps = if forced { before } else { self.steps - CANDIDATE_COST };
            if self.steps <= 0 {
                return;
            }
            if !fits {
                continue;
            }
            if let Some(t) = taken.last_mut() {
                *t = true;
            }
            if !self.hopeful() {
                continue;
            }
            let closing = if self.p.nets.is_empty() { 1 } else { 2 };
            if self.ends.len() == closing && self.order.len() == self.p.units.len() {
                let ends = match self.ends.as_slice() {
                    [a, b] if !self.p.nets.is_empty() => Some((*a, *b)),
                    _ => None,
                };
                let earlier: usize = self.done.iter().map(|d| d.hops).sum();
                let order = std::mem::take(&mut self.order);
                self.ends.clear();
                self.left = Set::all(self.p.units.len());
                self.done.push(Laid { order, ends, hops: self.undo.len() - earlier });
                let now = Found { knobs: self.k, channels: self.done.clone() };
                if now.beats(Some(best)) {
                    *best = now;
                }
                if self.done.len() >= max {
                    return;
                }
                self.onward.push(self.p.onward(&self.k, &self.free));
            }
            stack.push(self.frame());
            taken.push(false);
        }
    }
}

/// Runs the descent. The answer always has a channel.
pub fn search(system: &System, template: &Graph, log: &mut Vec<String>) -> (Graph, Origin) {
    let p = Problem::of(system);
    let mut max = template.max_channels;
    if p.units.iter().map(Vec::len).sum::<usize>() == 1 && p.nets.is_empty() {
        // A rank alone has no link to divide.
        max = 1;
    }
    let mut budget = BUDGET;
    let start = TIERS.iter().position(|t| *t <= system.max_width).unwrap_or(TIERS.len() - 1);
    let (intra, inter) = p.types();
    let mut best: Option<Found> = None;
    'tiers: for (i, &speed) in TIERS.iter().enumerate().skip(start) {
        let bound = p.bound(speed, max);
        if let Some(found) = &best {
            if speed / found.knobs.speed <= TIER_RATIO {
                break;
            }
            if bound as f32 * speed <= found.total() {
                continue;
            }
        }
        if bound == 0 && i + 1 < TIERS.len() {
            continue;
        }
        for &type_inter in &inter {
            for cross_nic in [false, true] {
                if cross_nic && p.nets.len() < 2 {
                    continue;
                }
                for &type_intra in &intra {
                    // Worse paths only while there is no ring over better ones, at whatever speed.
                    if best.as_ref().is_some_and(|f| type_intra > f.knobs.type_intra || type_inter > f.knobs.type_inter)
                    {
                        continue;
                    }
                    for same in [true, false] {
                        let knobs = Knobs { speed, type_intra, type_inter, cross_nic, same };
                        let step = if same { STEP_SAME } else { STEP_DIFFERENT };
                        let (found, spent) = p.lay(knobs, max, step);
                        budget -= spent;
                        if found.beats(best.as_ref()) {
                            best = Some(found);
                        }
                        let Some(found) = &best else { continue };
                        if found.total() >= system.total_width {
                            break 'tiers;
                        }
                        if found.knobs.speed == speed && found.channels.len() >= bound {
                            continue 'tiers;
                        }
                        if budget < 0 {
                            break 'tiers;
                        }
                    }
                    if best.as_ref().is_some_and(|f| f.knobs.speed == speed) {
                        continue 'tiers;
                    }
                }
            }
        }
        if budget < 0 {
            break;
        }
    }
    if best.is_none() {
        best = last_resort(&p, max, &intra, &inter);
    }
    let Some(mut found) = best else {
        log.push(format!("Could not find a path for pattern {}, falling back to simple order", template.pattern));
        return (simple_order(system, template), Origin::Fallback);
    };
    // Second pass: both speeds of a ring are one, so it starts again at the tier that was found and looks, with orders
    // that differ, for more channels of it.
    if found.channels.len() < p.bound(found.knobs.speed, max) {
        let knobs = Knobs { same: false, ..found.knobs };
        let (again, _) = p.lay(knobs, max, STEP_DIFFERENT);
        if again.beats(Some(&found)) {
            found = again;
        }
    }
    (graph_of(system, template, &p, &found), Origin::Inherited)
}

/// Everything allowed, one tier after the other: taken when the budget went on tiers and types that had no ring.
fn last_resort(p: &Problem, max: usize, intra: &[PathType], inter: &[PathType]) -> Option<Found> {
    let type_intra = intra.last().copied().unwrap_or(PathType::Sys);
    let type_inter = inter.last().copied().unwrap_or(PathType::Sys);
    TIERS.iter().find_map(|&speed| {
        let knobs = Knobs { speed, type_intra, type_inter, cross_nic: true, same: true };
        let (found, _) = p.lay(knobs, max, 4 * STEP_SAME);
        (!found.channels.is_empty()).then_some(found)
    })
}

fn graph_of(system: &System, template: &Graph, p: &Problem, found: &Found) -> Graph {
    let k = found.knobs;
    let rank = |node: &usize| system.gpu(*node).map(|g| g.rank);
    let mut graph = Graph {
        cross_nic: i32::from(k.cross_nic),
        speed_intra: k.speed,
        speed_inter: k.speed,
        type_intra: k.type_intra,
        type_inter: k.type_inter,
        same_channels: found.channels.iter().all(|c| Some(&c.order) == found.channels.first().map(|f| &f.order)),
        ..template.clone()
    };
    for channel in &found.channels {
        let ranks: Vec<i32> = channel.order.iter().filter_map(|u| p.units.get(*u)).flatten().filter_map(rank).collect();
        let net = |i: usize| p.nets.get(i).copied().unwrap_or(-1);
        let nearest = |rank: Option<&i32>| rank.and_then(|r| system.nearest_net(*r).ok()).unwrap_or(-1);
        graph.inter.extend(match channel.ends {
            Some((a, b)) => [net(a), net(b)],
            None => [nearest(ranks.first()), nearest(ranks.last())],
        });
        graph.intra.extend(ranks);
        graph.n_channels += 1;
        graph.n_hops += channel.hops;
    }
    double(&mut graph);
    graph
}

/// Splits fast channels by copying them: twice the channels, half the speed. The speed is divided by how many copies
/// a channel got at most, so that no link carries more than before.
pub(super) fn double(graph: &mut Graph) {
    while graph.n_channels > 0 && graph.n_channels < graph.max_channels && graph.speed_intra >= DOUBLING_SPEED {
        let old = graph.n_channels;
        let new = (2 * old).min(graph.max_channels);
        let copies = new.div_ceil(old) as f32;
        for c in old..new {
            let row = graph.channel(c - old).to_vec();
            graph.intra.extend(row);
            let ends: Vec<i32> = (0..2).filter_map(|e| graph.inter.get(2 * (c - old) + e).copied()).collect();
            graph.inter.extend(ends);
        }
        graph.n_channels = new;
        graph.speed_intra /= copies;
        graph.speed_inter /= copies;
    }
}

/// One channel in rank order, types 6: what is left when no ring was found.
fn simple_order(system: &System, template: &Graph) -> Graph {
    let ranks = system.ranks();
    let nearest = |rank: Option<&i32>| rank.and_then(|r| system.nearest_net(*r).ok()).unwrap_or(-1);
    Graph {
        n_channels: 1,
        cross_nic: 0,
        speed_intra: FALLBACK_SPEED,
        speed_inter: FALLBACK_SPEED,
        type_intra: PathType::Net,
        type_inter: PathType::Net,
        inter: vec![nearest(ranks.first()), nearest(ranks.last())],
        intra: ranks,
        ..template.clone()
    }
}

/// Load of every link by a graph's channels, GB/s; for tests of the cut.
#[cfg(test)]
pub(super) fn loads(system: &System, graph: &Graph) -> BTreeMap<usize, f32> {
    let mut load = BTreeMap::new();
    for c in 0..graph.n_channels {
        let row = graph.channel(c);
        let mut hops: Vec<(usize, usize)> = Vec::new();
        let node = |r: &i32| system.node_of_rank(*r).unwrap();
        hops.extend(row.windows(2).map(|w| (node(&w[0]), node(&w[1]))));
        let nets: Vec<usize> = system.bucket(NodeType::Net).to_vec();
        if system.facts.multi_node && !nets.is_empty() {
            // Devices of one number cannot be told apart: what crosses them is not counted.
            let net = |d: i32| {
                let mut found = nets.iter().filter(|n| system.net(**n).unwrap().dev == d);
                let first = *found.next().unwrap();
                found.next().is_none().then_some(first)
            };
            hops.extend(net(graph.inter[2 * c]).map(|n| (n, node(&row[0]))));
            hops.extend(net(graph.inter[2 * c + 1]).map(|n| (node(&row[row.len() - 1]), n)));
        } else {
            hops.push((node(&row[row.len() - 1]), node(&row[0])));
        }
        for (a, b) in hops {
            for l in system.path(a, b).unwrap().links {
                *load.entry(l).or_insert(0.0) += graph.speed_intra;
            }
        }
    }
    load
}
