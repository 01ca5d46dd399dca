//! The fork search: Hamiltonian cycles over accelerators with an edge priority that the walk itself moves
//! (topology-and-rings 5).
//!
//! Owns: the dispatch to a calculator by family (INV-46), the platform facts, the device graph with localities and
//! mutable priorities (INV-47), the expansion of device paths to ranks, duplication and rotation to one path a NIC
//! lane (at most 4), the cycles over accelerators, and the kangaring groups of switch-v1.
//!
//! A node is one accelerator; its sequencer engines and cores come in when a path is expanded. What the spec leaves
//! open: a cycle is closed only at full depth; an edge inside the fabric rises by 2, one through the switch by 1, never
//! above the ceiling, which is the number of paths wanted times 2; taking a step back restores exactly what was.

use super::{Graph, SearchError, document};
use crate::topo::limits::{FORK_SEARCH_STEPS, MAX_KANGA_PATHS, MAX_KANGA_RANKS, MAX_MLA_CYCLES};
use crate::topo::{Family, NodeType, PathType, System};
use std::collections::BTreeMap;

/// How near two sequencer engines are; smaller is tried first (topology-and-rings 5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Locality {
    /// Memory of one engine.
    SharedMemory = 0,
    /// Another accelerator, over a port.
    RemoteMla = 1,
    /// The other die of an accelerator.
    D2d = 2,
    /// Another accelerator, through the switch.
    Rmtv = 3,
    /// The same accelerator.
    Local = 4,
}

/// The four calculators, in the order their families are tested (INV-46).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calculator {
    /// Switch-v1, itself a TRN3 family: tested first.
    Trn3SwitchV1,
    /// TRN3.
    Trn3,
    /// TRN2.
    Trn2,
    /// Everything else, also Inf2.
    Trn1,
}

/// Whether a family is of one kind.
type IsFamily = fn(Family) -> bool;

impl Calculator {
    /// The calculator of a family.
    pub fn choose(family: Family) -> Self {
        Self::TESTS.iter().find(|(is, _)| is(family)).map_or(Self::Trn1, |(_, calculator)| *calculator)
    }

    /// The tests of the family, in their order (INV-46); Trn1 is what is left.
    const TESTS: [(IsFamily, Calculator); 3] =
        [(Family::is_switch_v1, Self::Trn3SwitchV1), (Family::is_trn3, Self::Trn3), (Family::is_trn2, Self::Trn2)];

    /// The platform facts of the generation. Peer counts per engine are not recorded; these are four ports over the
    /// engines of an accelerator, one other die where there is one, one switch partner where there is a switch.
    pub fn platform(self) -> Platform {
        let (engines, remote, d2d, rmtv) = match self {
            Self::Trn1 => (2, 2, 0, 0),
            Self::Trn2 | Self::Trn3 => (4, 1, 1, 0),
            Self::Trn3SwitchV1 => (4, 1, 1, 16),
        };
        Platform { engines_per_accelerator: engines, remote_peers: remote, d2d_peers: d2d, rmtv_peers: rmtv }
    }
}

/// What a generation's platform object supplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Platform {
    /// Sequencer engines of an accelerator.
    pub engines_per_accelerator: usize,
    /// Peers of an engine over ports.
    pub remote_peers: usize,
    /// Peers of an engine on the other die.
    pub d2d_peers: usize,
    /// Peers of an engine through the switch.
    pub rmtv_peers: usize,
}

/// What a calculator asks of the search.
#[derive(Clone, Debug, PartialEq)]
pub struct PathQuery {
    /// Logical cores that carry a rank, a bit each.
    pub available: u128,
    /// Silicon generation.
    pub generation: u32,
    /// Platform facts.
    pub platform: Platform,
    /// Physical cores of an engine.
    pub cores_per_engine: u32,
    /// Physical cores of a logical core.
    pub virtual_core_size: u32,
    /// Paths wanted at most.
    pub max_paths: usize,
}

/// A directed edge of the device graph.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceEdge {
    /// Node it leads to.
    pub target: usize,
    /// How near that is.
    pub locality: Locality,
    /// Moved by the walk: raised when the edge is taken, lowered when the step is taken back.
    pub priority: u32,
}

/// The device graph. The ceiling of the priorities lives here.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    edges: Vec<Vec<DeviceEdge>>,
    ceiling: u32,
    steps: u32,
    /// Tests switch the moving priority off to see that it matters.
    moving: bool,
}

impl Topology {
    /// The device graph of a system: a port's edge is RemoteMla, one through the switch Rmtv.
    fn of(system: &System, units: &[Vec<usize>], request: &PathQuery) -> Self {
        let per_unit = |peers: usize| peers * request.platform.engines_per_accelerator;
        let mut edges = Vec::new();
        for (u, from) in units.iter().enumerate() {
            let mut row = Vec::new();
            for (v, to) in units.iter().enumerate().filter(|(v, _)| *v != u) {
                let (Some(a), Some(b)) = (from.last(), to.first()) else {
                    continue;
                };
                let Some(path) = system.path(*a, *b).filter(|p| p.kind == PathType::Nvl) else {
                    continue;
                };
                let over = |l: &usize| system.links.get(*l).map(|l| l.to);
                let crossed: Vec<usize> = path.links.iter().filter_map(over).filter(|n| n != b).collect();
                let through_gpu = crossed.iter().any(|n| system.gpu(*n).is_some());
                let fabric_switch = |n: &usize| {
                    use crate::topo::system::Detail;
                    system.nodes.get(*n).is_some_and(|n| n.detail == Detail::Nvs { accelerator: false })
                };
                if through_gpu {
                    continue;
                }
                let locality = if crossed.iter().any(fabric_switch) { Locality::Rmtv } else { Locality::RemoteMla };
                row.push(DeviceEdge { target: v, locality, priority: 0 });
            }
            row.sort_by_key(|e| (e.locality, e.target));
            let mut counts: BTreeMap<Locality, usize> = BTreeMap::new();
            row.retain(|e| {
                let count = counts.entry(e.locality).or_insert(0);
                *count += 1;
                let limit = match e.locality {
                    Locality::Rmtv => per_unit(request.platform.rmtv_peers),
                    _ => per_unit(request.platform.remote_peers),
                };
                *count <= limit
            });
            edges.push(row);
        }
        Self { edges, ceiling: 2 * request.max_paths as u32, steps: FORK_SEARCH_STEPS, moving: true }
    }

    /// Edges of a node in the order they are tried: locality, then priority as it is now.
    fn frontier(&self, node: usize) -> Vec<usize> {
        let Some(edges) = self.edges.get(node) else {
            return Vec::new();
        };
        let mut order: Vec<usize> = (0..edges.len()).collect();
        order.sort_by_key(|e| (edges[*e].locality, edges[*e].priority, edges[*e].target));
        order
    }

    /// Raises an edge; returns what it was.
    fn raise(&mut self, node: usize, edge: usize) -> u32 {
        let (ceiling, moving) = (self.ceiling, self.moving);
        let Some(e) = self.edges.get_mut(node).and_then(|row| row.get_mut(edge)) else {
            return 0;
        };
        let before = e.priority;
        let step = if e.locality == Locality::RemoteMla { 2 } else { 1 };
        if moving {
            e.priority = (before + step).min(ceiling);
        }
        before
    }

    fn lower(&mut self, node: usize, edge: usize, before: u32) {
        if let Some(e) = self.edges.get_mut(node).and_then(|row| row.get_mut(edge)) {
            e.priority = before;
        }
    }

    /// One Hamiltonian path from node 0; a cycle if `close`. The edges of the path found stay raised, so that the next
    /// path prefers others; without a path every priority is what it was.
    fn find(&mut self, close: bool) -> Option<Vec<usize>> {
        let n = self.edges.len();
        self.steps = FORK_SEARCH_STEPS;
        let mut visited = vec![false; n];
        *visited.first_mut()? = true;
        let mut path = vec![0];
        self.walk(&mut path, &mut visited, close).then_some(path)
    }

    fn walk(&mut self, path: &mut Vec<usize>, visited: &mut [bool], close: bool) -> bool {
        let Some(&node) = path.last() else {
            return false;
        };
        let full = path.len() == visited.len();
        if full && (!close || visited.len() == 1) {
            return true;
        }
        for edge in self.frontier(node) {
            let Some(target) = self.edges.get(node).and_then(|r| r.get(edge)).map(|e| e.target) else {
                continue;
            };
            // Closing only at full depth; until then every visited node is taken.
            let closes = full && target == 0;
            if visited[target] && !closes {
                continue;
            }
            if self.steps == 0 {
                return false;
            }
            self.steps -= 1;
            let before = self.raise(node, edge);
            if closes {
                return true;
            }
            visited[target] = true;
            path.push(target);
            if self.walk(path, visited, close) {
                return true;
            }
            path.pop();
            visited[target] = false;
            self.lower(node, edge, before);
        }
        false
    }

    /// Up to `max` paths, no two the same.
    fn paths(&mut self, max: usize, close: bool) -> Vec<Vec<usize>> {
        let mut paths: Vec<Vec<usize>> = Vec::new();
        while paths.len() < max {
            match self.find(close) {
                Some(path) if !paths.iter().any(|p| *p == path || is_reverse(p, &path)) => paths.push(path),
                _ => break,
            }
        }
        paths
    }
}

/// Whether two cycles with one start run through the same nodes in opposite directions.
fn is_reverse(a: &[usize], b: &[usize]) -> bool {
    a.len() == b.len() && a.first() == b.first() && a.iter().skip(1).eq(b.iter().skip(1).rev())
}

/// Turns a path so that it starts at position `by`.
fn rotate(path: &[usize], by: usize) -> Vec<usize> {
    let mut path = path.to_vec();
    if !path.is_empty() {
        let by = by % path.len();
        path.rotate_left(by);
    }
    path
}

/// One path a lane, at most [`MAX_KANGA_PATHS`]: those found, then copies of them whose start is rotated. Rotating
/// needs a cycle; a path that does not close is copied as it is.
fn duplicate(base: &[Vec<usize>], lanes: usize, cycle: bool) -> Vec<Vec<usize>> {
    let lanes = lanes.clamp(base.len().min(MAX_KANGA_PATHS), MAX_KANGA_PATHS);
    let by = |path: &[usize], lane: usize| {
        if cycle { rotate(path, lane * path.len() / lanes) } else { path.to_vec() }
    };
    (0..lanes).filter_map(|lane| base.get(lane % base.len().max(1)).map(|p| by(p, lane))).collect()
}

fn request(system: &System, calculator: Calculator, max_paths: usize) -> PathQuery {
    let mut available = 0u128;
    for gpu in system.bucket(NodeType::Gpu).iter().filter_map(|n| system.gpu(*n)) {
        if let Ok(bit) = u32::try_from(gpu.dev) {
            available |= 1u128.checked_shl(bit).unwrap_or(0);
        }
    }
    let platform = calculator.platform();
    PathQuery {
        available,
        generation: system.facts.family.generation(),
        platform,
        cores_per_engine: (system.facts.cores_per_device / platform.engines_per_accelerator as u32).max(1),
        virtual_core_size: system.facts.virtual_core_size,
        max_paths,
    }
}

/// Device paths: cycles where the ring must close here, else cycles or, failing that, open paths.
fn device_paths(system: &System, units: &[Vec<usize>], request: &PathQuery) -> (Vec<Vec<usize>>, bool) {
    let mut topology = Topology::of(system, units, request);
    let cycles = topology.paths(request.max_paths, true);
    if !cycles.is_empty() || !system.facts.multi_node {
        return (cycles, true);
    }
    (topology.paths(request.max_paths, false), false)
}

/// Fills the template by device paths; None if there is no Hamiltonian ring over the fabric.
///
/// # Errors
/// [`SearchError`] if the graph document this search writes is not one the reader accepts: a defect of this module.
pub fn search(system: &System, template: &Graph, log: &mut Vec<String>) -> Result<Option<Graph>, SearchError> {
    let calculator = Calculator::choose(system.facts.family);
    let request = request(system, calculator, MAX_KANGA_PATHS);
    let units = system.accelerators();
    let (base, cycle) = device_paths(system, &units, &request);
    if base.is_empty() {
        log.push(format!("{calculator:?} found no path over {} devices", units.len()));
        return Ok(None);
    }
    let lanes = system.bucket(NodeType::Net).len();
    let paths = duplicate(&base, lanes, cycle);
    let mut graph = template.clone();
    graph.cross_nic = 1;
    graph.cross_rack_to_rack = system.facts.multi_node && system.facts.family.is_switch_v1();
    let ranks_of = |path: &[usize]| -> Vec<i32> {
        let nodes = path.iter().filter_map(|u| units.get(*u)).flatten();
        nodes.filter_map(|n| system.gpu(*n)).map(|g| g.rank).collect()
    };
    // Rings of both directions: the fabric's links carry both ways at once.
    for path in &paths {
        push_channel(system, &mut graph, ranks_of(path), log);
    }
    if graph.local_ranks > 2 {
        for path in &paths {
            let reversed = ranks_of(path).into_iter().rev().collect();
            push_channel(system, &mut graph, reversed, log);
        }
    }
    rate(system, &mut graph);
    // The original's route into the graph struct: written as a document and read back.
    let text = document::write(&graph, system);
    let Some(mut graph) = document::load(&text, system, &graph_template(&graph))? else {
        return Ok(None);
    };
    graph.cross_rack_to_rack = system.facts.multi_node && system.facts.family.is_switch_v1();
    if system.facts.family.is_switch_v1() {
        graph.kangaring = kangaring(system, &request, &units, &paths, log);
    }
    Ok(Some(graph))
}

fn graph_template(graph: &Graph) -> Graph {
    Graph { n_channels: 0, intra: Vec::new(), inter: Vec::new(), kangaring: Vec::new(), ..graph.clone() }
}

fn push_channel(system: &System, graph: &mut Graph, ranks: Vec<i32>, log: &mut Vec<String>) {
    let net = |rank: Option<&i32>| rank.and_then(|r| system.nearest_net(*r).ok()).unwrap_or(-1);
    let ends = [net(ranks.first()), net(ranks.last())];
    log.push(format!("Channel {} uses NICs {} {}", graph.n_channels, ends[0], ends[1]));
    graph.inter.extend(ends);
    graph.intra.extend(ranks);
    graph.n_channels += 1;
}

/// Speeds and types of laid channels: every link divided by the channels that cross it.
fn rate(system: &System, graph: &mut Graph) {
    let node = |rank: &i32| system.node_of_rank(*rank);
    let mut load: BTreeMap<usize, u32> = BTreeMap::new();
    let across = system.facts.multi_node && !system.bucket(NodeType::Net).is_empty();
    (graph.type_intra, graph.type_inter) = (PathType::Loc, PathType::Loc);
    for c in 0..graph.n_channels {
        let row = graph.channel(c).to_vec();
        let mut hops: Vec<(Option<usize>, Option<usize>, bool)> =
            row.windows(2).map(|w| (node(&w[0]), node(&w[1]), false)).collect();
        let net = |end: usize| {
            let dev = graph.inter.get(2 * c + end);
            system.bucket(NodeType::Net).iter().copied().find(|n| system.net(*n).map(|n| n.dev).as_ref() == dev)
        };
        if across {
            hops.push((net(0), row.first().and_then(node), true));
            hops.push((row.last().and_then(node), net(1), true));
        } else {
            hops.push((row.last().and_then(node), row.first().and_then(node), false));
        }
        for (a, b, inter) in hops {
            let Some(path) = a.zip(b).and_then(|(a, b)| system.path(a, b)) else {
                continue;
            };
            let worst = if inter { &mut graph.type_inter } else { &mut graph.type_intra };
            *worst = (*worst).max(path.kind);
            graph.n_hops += path.links.len();
            for l in path.links {
                *load.entry(l).or_insert(0) += 1;
            }
        }
    }
    let share = |(l, n): (&usize, &u32)| system.links.get(*l).map(|l| l.width / *n as f32);
    let speed = load.iter().filter_map(share).fold(system.max_width, f32::min);
    (graph.speed_intra, graph.speed_inter) = (speed, speed);
    graph.same_channels = (1..graph.n_channels).all(|c| graph.channel(c) == graph.channel(0));
}

/// Cycles over accelerators for the runtime (topology-and-rings 8.3): the first device-level cycle, the first other one
/// that shares no link with it (failing that, the second), and the reverses of both, each from its lowest accelerator,
/// duplicates dropped. Four of them let the runtime use its hybrid ring; more would share links. Empty for fewer than
/// three accelerators or without a cycle.
pub fn mla_cycles(system: &System, log: &mut Vec<String>) -> Vec<Vec<i32>> {
    let units = system.accelerators();
    let mut cycles: Vec<Vec<i32>> = Vec::new();
    if units.len() > 2 {
        let request = request(system, Calculator::choose(system.facts.family), MAX_KANGA_PATHS);
        let mla = |u: &usize| {
            let first = units.get(*u).and_then(|unit| unit.first());
            first.and_then(|n| system.gpu(*n)).map(|g| g.mla)
        };
        let mut paths = Topology::of(system, &units, &request).paths(MAX_KANGA_PATHS, true);
        if let [first, rest @ ..] = paths.as_slice() {
            let other = rest.iter().find(|p| !shares_link(first, p)).or(rest.first());
            paths = std::iter::once(first).chain(other).cloned().collect();
        }
        for path in paths {
            let forward: Vec<i32> = path.iter().filter_map(mla).collect();
            let backward: Vec<i32> = path.iter().rev().filter_map(mla).collect();
            for mut cycle in [forward, backward] {
                let lowest = cycle.iter().enumerate().min_by_key(|(_, m)| **m).map_or(0, |(i, _)| i);
                cycle.rotate_left(lowest);
                if !cycles.contains(&cycle) && cycles.len() < MAX_MLA_CYCLES {
                    cycles.push(cycle);
                }
            }
        }
    }
    log.push(format!("built {} mla cycles", cycles.len()));
    cycles
}

/// Whether two cycles use one link, in whatever direction.
fn shares_link(a: &[usize], b: &[usize]) -> bool {
    let links = |p: &[usize]| -> Vec<(usize, usize)> {
        let next = p.iter().cycle().skip(1);
        p.iter().zip(next).map(|(x, y)| (*x.min(y), *x.max(y))).collect()
    };
    let of_b = links(b);
    links(a).iter().any(|l| of_b.contains(l))
}

/// Accelerators of one jbog. Not recorded; a server's worth of accelerators.
const MLA_PER_JBOG: i32 = 16;

/// Kangaring groups along the paths: the cores of one engine index on an accelerator pair, lowest core first: that is
/// the primary, the others are its secondaries (topology-and-rings 8).
fn kangaring(
    system: &System,
    request: &PathQuery,
    units: &[Vec<usize>],
    paths: &[Vec<usize>],
    log: &mut Vec<String>,
) -> Vec<Vec<[i32; 4]>> {
    let gpus: Vec<_> = system.bucket(NodeType::Gpu).iter().filter_map(|n| system.gpu(*n)).collect();
    let mut jbogs: Vec<i32> = gpus.iter().map(|g| g.mla / MLA_PER_JBOG).collect();
    jbogs.sort_unstable();
    jbogs.dedup();
    if !(1..=3).contains(&jbogs.len()) || gpus.len() > MAX_KANGA_RANKS || request.virtual_core_size == 0 {
        log.push("built 0 kangaring paths".to_string());
        return Vec::new();
    }
    let engine = |core: i32| core.saturating_mul(request.virtual_core_size as i32) / request.cores_per_engine as i32;
    let mut table = Vec::new();
    for path in paths.iter().take(MAX_KANGA_PATHS) {
        let mut pairs: Vec<i32> = Vec::new();
        for gpu in path.iter().filter_map(|u| units.get(*u)?.first()).filter_map(|n| system.gpu(*n)) {
            if !pairs.contains(&(gpu.mla / 2)) {
                pairs.push(gpu.mla / 2);
            }
        }
        let mut row = Vec::new();
        for pair in pairs {
            for e in 0..request.platform.engines_per_accelerator as i32 {
                let mut members: Vec<_> = gpus.iter().filter(|g| g.mla / 2 == pair && engine(g.core) == e).collect();
                members.sort_by_key(|g| (g.core, g.mla, g.rank));
                for group in members.chunks(4) {
                    let mut ranks = [-1; 4];
                    for (slot, gpu) in ranks.iter_mut().zip(group) {
                        *slot = gpu.rank;
                    }
                    row.push(ranks);
                }
            }
        }
        table.push(row);
    }
    log.push(format!("built {} kangaring paths", table.len()));
    for (k, row) in table.iter().enumerate() {
        let text: Vec<String> = row.iter().flatten().filter(|r| **r >= 0).map(|r| r.to_string()).collect();
        log.push(format!("kangaring path[{k}]={}", text.join(" ")));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topo::{RankInfo, TableMachine, discover};

    fn torus(family: u32) -> System {
        let m = TableMachine::server(family, 16, 2, 16);
        let ranks: Vec<RankInfo> = m.ranks(64, 1);
        discover(&m, &ranks, 0, &|_| None, None).unwrap().0
    }

    fn topology(system: &System) -> Topology {
        let request = request(system, Calculator::choose(system.facts.family), MAX_KANGA_PATHS);
        Topology::of(system, &system.accelerators(), &request)
    }

    /// Proves INV-46.
    #[test]
    fn families_are_tested_switch_first() {
        // Family 15 is a TRN3 family as well: only the order of the tests sends it to its own calculator.
        assert!(Family(15).is_trn3());
        // TRN3 and TRN2 have no family in common, so that only the table itself shows which of them is tested first.
        let order = Calculator::TESTS.map(|(_, calculator)| calculator);
        assert_eq!(order, [Calculator::Trn3SwitchV1, Calculator::Trn3, Calculator::Trn2]);
        for (family, expected) in [
            (15, Calculator::Trn3SwitchV1),
            (14, Calculator::Trn3),
            (5, Calculator::Trn2),
            (13, Calculator::Trn2),
            (2, Calculator::Trn1),
            (4, Calculator::Trn1),
            (7, Calculator::Trn1),
            (0, Calculator::Trn1),
        ] {
            assert_eq!(Calculator::choose(Family(family)), expected, "family {family}");
        }
    }

    /// Proves INV-47.
    #[test]
    fn the_priority_is_state_of_the_walk() {
        let system = torus(5);
        let fresh = topology(&system);
        // Raised on commit: the edges of the path found, and no others, stay raised.
        let mut t = fresh.clone();
        let first = t.find(true).unwrap();
        let mut on_path = 0;
        for (u, row) in t.edges.iter().enumerate() {
            let at = first.iter().position(|n| *n == u).unwrap();
            let next = first[(at + 1) % first.len()];
            for e in row {
                assert_eq!(e.priority, if e.target == next { 2 } else { 0 }, "{u} -> {}", e.target);
                on_path += usize::from(e.target == next);
            }
        }
        assert_eq!(on_path, 16);
        // It decides what comes next: with a standing priority the second walk is the first again.
        let second = t.find(true).unwrap();
        assert_ne!(second, first);
        let mut still = Topology { moving: false, ..fresh.clone() };
        assert_eq!(still.find(true).unwrap(), first);
        assert_eq!(still.find(true).unwrap(), first);
        // Never above the ceiling, which the topology keeps.
        for _ in 0..20 {
            t.find(true);
        }
        assert!(t.edges.iter().flatten().all(|e| e.priority <= t.ceiling));
        assert!(t.edges.iter().flatten().any(|e| e.priority == t.ceiling));
        // Lowered on backtrack: a walk without success leaves no trace, although it went forward and back.
        let mut cut = fresh.clone();
        for row in &mut cut.edges {
            row.retain(|e| e.target != 5);
        }
        let before = cut.clone();
        assert_eq!(cut.find(true), None);
        assert!(cut.steps < FORK_SEARCH_STEPS);
        assert_eq!(cut.edges, before.edges);
    }

    #[test]
    fn cycles_visit_every_accelerator_over_links_that_exist() {
        let system = torus(5);
        let mut log = Vec::new();
        let cycles = mla_cycles(&system, &mut log);
        assert_eq!(cycles.len(), 4, "{cycles:?}");
        assert_eq!(log, ["built 4 mla cycles"]);
        for (i, cycle) in cycles.iter().enumerate() {
            assert!(!cycles[..i].contains(cycle));
            let mut sorted = cycle.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..16).collect::<Vec<_>>());
            for (i, a) in cycle.iter().enumerate() {
                let b = cycle[(i + 1) % 16];
                let (dr, dc) = ((a / 4 - b / 4).rem_euclid(4), (a % 4 - b % 4).rem_euclid(4));
                assert!(matches!((dr, dc), (0, 1 | 3) | (1 | 3, 0)), "{a} and {b} are no neighbours");
            }
        }
        assert!(shares_link(&[0, 1, 2], &[2, 1, 0]));
        assert!(!shares_link(&[0, 1, 2, 3, 4], &[0, 2, 4, 1, 3]));
    }

    #[test]
    fn copies_are_rotated_and_at_most_four() {
        let base = vec![vec![0, 1, 2, 3, 4, 5, 6, 7]];
        let lanes = duplicate(&base, 16, true);
        assert_eq!(lanes.len(), MAX_KANGA_PATHS);
        assert_eq!(lanes.iter().map(|l| l[0]).collect::<Vec<_>>(), vec![0, 2, 4, 6]);
        assert_eq!(duplicate(&base, 0, true), base);
        assert_eq!(duplicate(&base, 3, false), vec![base[0].clone(); 3]);
    }
}
