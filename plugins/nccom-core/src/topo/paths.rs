//! Paths through the system graph, trimming, and the numbers the search starts from.
//!
//! Owns: `ComputePaths`, `TrimSystem`, `SearchInit` and the order they run in (INV-42): paths, trim, paths again,
//! because trimming renumbers nodes and may remove what a path crossed. A path has the fewest hops, among those the
//! greatest minimum width, among those the closest type, among those the canonical predecessor.
//!
//! Devices do not forward for others: a path crosses a gpu only as the one middle of a fast gpu-gpu-gpu path, and an
//! accelerator's fabric place only as source's or target's own. Where two gpus may not talk directly the path is led
//! through a CPU.

use super::machine::P2pPolicy;
use super::system::{Detail, LinkType, NodeType, PathType, System};
use std::collections::BTreeMap;

/// Width of the path of a node to itself, GB/s (upstream's).
pub const LOC_WIDTH: f32 = 5000.0;

/// How one node is reached from one source.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Step {
    /// Link it is reached by; `usize::MAX` at the source.
    link: usize,
    hops: u16,
    /// PCI switches on the way.
    switches: u16,
    kind: PathType,
    width: f32,
}

/// A path: its links in order, worst type, minimum width.
#[derive(Clone, Debug, PartialEq)]
pub struct Path {
    /// Links (indices), from source to target. Their number is the hop count.
    pub links: Vec<usize>,
    /// Worst type.
    pub kind: PathType,
    /// Minimum width, GB/s.
    pub width: f32,
}

/// What a path is without its links.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PathInfo {
    /// Worst type.
    pub kind: PathType,
    /// Minimum width, GB/s.
    pub width: f32,
    /// Hop count.
    pub hops: usize,
}

/// All paths: a tree of predecessors per source, and the paths that were led through a CPU.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Paths {
    trees: Vec<Vec<Option<Step>>>,
    through_cpu: BTreeMap<(usize, usize), Path>,
}

impl System {
    /// The path between two nodes.
    pub fn path(&self, from: usize, to: usize) -> Option<Path> {
        match self.paths.through_cpu.get(&(from, to)) {
            Some(path) => Some(path.clone()),
            None => self.direct_path(from, to),
        }
    }

    /// Type, width and hops of a path, without its links.
    pub fn path_info(&self, from: usize, to: usize) -> Option<PathInfo> {
        if let Some(path) = self.paths.through_cpu.get(&(from, to)) {
            return Some(PathInfo { kind: path.kind, width: path.width, hops: path.links.len() });
        }
        let step = self.step(from, to)?;
        Some(PathInfo { kind: step.kind, width: step.width, hops: usize::from(step.hops) })
    }

    fn step(&self, from: usize, to: usize) -> Option<Step> {
        self.paths.trees.get(from)?.get(to).copied().flatten()
    }

    /// The path before any was led through a CPU.
    pub(super) fn direct_path(&self, from: usize, to: usize) -> Option<Path> {
        let end = self.step(from, to)?;
        let mut links = Vec::with_capacity(usize::from(end.hops));
        let mut at = to;
        while at != from {
            let step = self.step(from, at)?;
            links.push(step.link);
            at = self.links.get(step.link)?.from;
        }
        links.reverse();
        Some(Path { links, kind: end.kind, width: end.width })
    }

    /// Computes all paths (topology-and-rings 2.2).
    pub fn compute_paths(&mut self) {
        let trees = (0..self.nodes.len()).map(|source| self.tree(source)).collect();
        self.paths = Paths { trees, through_cpu: BTreeMap::new() };
        let mut through = BTreeMap::new();
        let gpus = self.bucket(NodeType::Gpu).to_vec();
        for &a in &gpus {
            for &b in &gpus {
                if a != b && !self.p2p_by_path(a, b).p2p {
                    self.lead_through_cpu(a, b, &mut through);
                }
            }
            for &net in self.bucket(NodeType::Net) {
                let direct = self.gpu(a).is_some_and(|g| g.gdr) && self.net(net).is_some_and(|n| n.gdr);
                if !direct {
                    self.lead_through_cpu(a, net, &mut through);
                    self.lead_through_cpu(net, a, &mut through);
                }
            }
        }
        self.paths.through_cpu = through;
    }

    fn lead_through_cpu(&self, from: usize, to: usize, through: &mut BTreeMap<(usize, usize), Path>) {
        let crosses_cpu = self.direct_path(from, to).is_some_and(|p| {
            let kind = |l: &usize| self.links.get(*l).and_then(|l| self.nodes.get(l.to)).map(|n| n.kind());
            p.links.iter().any(|l| kind(l) == Some(NodeType::Cpu))
        });
        if crosses_cpu {
            return;
        }
        let gpu_end = if self.gpu(from).is_some() { from } else { to };
        let Some(cpu) = self.nearest_cpu(gpu_end) else {
            return;
        };
        if let (Some(mut first), Some(second)) = (self.direct_path(from, cpu), self.direct_path(cpu, to)) {
            first.links.extend(second.links);
            first.kind = first.kind.max(second.kind);
            first.width = first.width.min(second.width);
            through.insert((from, to), first);
        }
    }

    /// The CPU with the fewest hops, lowest number first.
    pub fn nearest_cpu(&self, node: usize) -> Option<usize> {
        let cpus = self.bucket(NodeType::Cpu).iter().copied();
        cpus.filter_map(|c| Some((self.step(node, c)?.hops, c))).min().map(|(_, c)| c)
    }

    /// Breadth-first from one node, level by level.
    fn tree(&self, source: usize) -> Vec<Option<Step>> {
        let mut tree: Vec<Option<Step>> = vec![None; self.nodes.len()];
        let start = Step { link: usize::MAX, hops: 0, switches: 0, kind: PathType::Loc, width: LOC_WIDTH };
        tree[source] = Some(start);
        let mut frontier = vec![source];
        while !frontier.is_empty() {
            let mut next = Vec::new();
            for &at in &frontier {
                let Some(here) = tree[at] else { continue };
                for &l in &self.nodes[at].links {
                    let link = &self.links[l];
                    if !self.may_continue(source, at, here, link.kind, link.to) {
                        continue;
                    }
                    let there = self.follow(here, l);
                    let better = match tree[link.to] {
                        None => {
                            next.push(link.to);
                            true
                        }
                        Some(old) => {
                            old.hops == there.hops
                                && (there.width > old.width || (there.width == old.width && there.kind < old.kind))
                        }
                    };
                    if better {
                        tree[link.to] = Some(there);
                    }
                }
            }
            next.sort_unstable();
            frontier = next;
        }
        tree
    }

    /// Whether a path that came to `at` may leave it over a link.
    fn may_continue(&self, source: usize, at: usize, here: Step, kind: LinkType, to: usize) -> bool {
        if at == source {
            return true;
        }
        let target = self.nodes[to].kind();
        let came_from = self.links.get(here.link).map(|l| &self.nodes[l.from].detail);
        match &self.nodes[at].detail {
            Detail::Gpu(_) => {
                let from_gpu = matches!(came_from, Some(Detail::Gpu(_)));
                from_gpu
                    && here.hops == 1
                    && here.kind == PathType::Nvl
                    && kind == LinkType::Nvl
                    && target == NodeType::Gpu
            }
            Detail::Nvs { accelerator: true } => matches!(came_from, Some(Detail::Gpu(_))) || target == NodeType::Gpu,
            // The fabric does not lead to the bus, a network device leads nowhere.
            Detail::Nvs { accelerator: false } => kind == LinkType::Nvl,
            Detail::Net(_) => false,
            Detail::Pci { .. } | Detail::Cpu { .. } | Detail::NetDevice => true,
        }
    }

    fn follow(&self, here: Step, l: usize) -> Step {
        let link = &self.links[l];
        let is_switch = matches!(self.nodes[link.to].detail, Detail::Pci { accelerator: false });
        let switches = here.switches + u16::from(is_switch);
        let at_cpu = |n: usize| self.nodes[n].kind() == NodeType::Cpu;
        let kind = match link.kind {
            LinkType::Nvl => PathType::Nvl,
            LinkType::Sys => PathType::Sys,
            // Only how the card is reached counts, not what is behind it.
            LinkType::Net => PathType::Loc,
            LinkType::Pci if at_cpu(link.from) || at_cpu(link.to) => PathType::Phb,
            LinkType::Pci if switches > 1 => PathType::Pxb,
            LinkType::Pci => PathType::Pix,
        };
        Step { link: l, hops: here.hops + 1, switches, kind: here.kind.max(kind), width: here.width.min(link.width) }
    }

    /// Drops gpus of other nodes, and whatever is on no remaining rank's path to another rank, to a network device or
    /// to its CPU. Paths are stale afterwards.
    pub fn trim(&mut self) {
        let local = self.facts.local_ranks.clone();
        let mine = |g: i32| local.is_empty() || local.contains(&g);
        let gpus: Vec<usize> =
            self.bucket(NodeType::Gpu).iter().copied().filter(|n| self.gpu(*n).is_some_and(|g| mine(g.rank))).collect();
        let mut keep = vec![false; self.nodes.len()];
        let mut mark = |path: Option<Path>| {
            for link in path.iter().flat_map(|p| &p.links).filter_map(|l| self.links.get(*l)) {
                for end in [link.from, link.to] {
                    let foreign = self.gpu(end).is_some_and(|g| !mine(g.rank));
                    keep[end] |= !foreign;
                }
            }
        };
        for &gpu in &gpus {
            for &other in gpus.iter().chain(self.bucket(NodeType::Net)) {
                mark(self.direct_path(gpu, other));
                mark(self.path(gpu, other));
            }
            // Without its way to a CPU a gpu would be cut off when a path over a dropped gpu goes.
            mark(self.nearest_cpu(gpu).and_then(|cpu| self.direct_path(gpu, cpu)));
        }
        for gpu in gpus {
            keep[gpu] = true;
        }
        self.retain(&|node| keep[node]);
    }

    /// `SearchInit`: where the tiers start and what no set of rings can exceed.
    pub fn search_init(&mut self) {
        let gpus = self.bucket(NodeType::Gpu);
        let nets = self.bucket(NodeType::Net);
        let across = self.facts.multi_node && !nets.is_empty();
        let targets = if across { nets } else { gpus };
        let mut max = 0.0f32;
        for &a in gpus {
            for &b in targets.iter().filter(|b| **b != a) {
                max = max.max(self.path_info(a, b).map_or(0.0, |p| p.width));
            }
        }
        let mut total = f32::INFINITY;
        let groups = self.accelerators();
        for group in &groups {
            let inside = |n: usize| group.contains(&n) || self.own_place(group, n);
            let cut = |fabric: bool| -> f32 {
                let out = self.links.iter().filter(|l| inside(l.from) && !inside(l.to));
                out.filter(|l| (l.kind == LinkType::Nvl) == fabric).map(|l| l.width).sum()
            };
            // The fabric where there is one: the bus beside it carries other things.
            let width = if cut(true) > 0.0 { cut(true) } else { cut(false) };
            total = total.min(width);
        }
        if across {
            let width = |n: &usize| -> f32 {
                self.nodes[*n].links.iter().filter_map(|l| self.links.get(*l)).map(|l| l.width).sum()
            };
            let all: f32 = nets.iter().map(width).sum();
            total = if groups.len() > 1 { total.min(all) } else { all };
        } else if groups.len() <= 1 {
            total = max;
        }
        self.max_width = if max > 0.0 { max } else { LOC_WIDTH };
        self.total_width = if total.is_finite() && total > 0.0 { total } else { self.max_width };
    }

    /// Whether a node is the bus or fabric place of an accelerator.
    fn own_place(&self, group: &[usize], node: usize) -> bool {
        let accelerator =
            matches!(self.nodes[node].detail, Detail::Pci { accelerator: true } | Detail::Nvs { accelerator: true });
        accelerator && self.nodes[node].links.iter().filter_map(|l| self.links.get(*l)).any(|l| group.contains(&l.to))
    }

    /// The stages in their order: paths, trim, paths, search numbers (INV-42).
    pub fn prepare(&mut self) {
        self.compute_paths();
        self.trim();
        self.compute_paths();
        self.search_init();
    }
}

/// Answer of [`System::check_p2p`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct P2pCheck {
    /// Whether the two may talk directly.
    pub p2p: bool,
    /// Whether the receiver reads; always false, its parameter is a constant "unset" (transports 3.1).
    pub use_read: bool,
    /// The one rank between them on a fast path.
    pub intermediate: Option<i32>,
}

impl System {
    /// Policy by path type alone. The default level is PXB; on sunda it is SYS, because there every accelerator of a
    /// server reaches every other (transports 3.1).
    pub(super) fn p2p_by_path(&self, a: usize, b: usize) -> P2pCheck {
        let none = P2pCheck { p2p: false, use_read: false, intermediate: None };
        let P2pPolicy { disabled, level } = self.facts.p2p;
        let (Some(path), Some(gpu)) = (self.direct_path(a, b), self.gpu(a)) else {
            return none;
        };
        let default = if gpu.sm == 2 { PathType::Sys } else { PathType::Pxb };
        if disabled || path.kind > level.unwrap_or(default) {
            return none;
        }
        let middle = match path.links.as_slice() {
            [first, _] if path.kind == PathType::Nvl => {
                self.links.get(*first).and_then(|l| self.gpu(l.to)).map(|g| g.rank)
            }
            _ => None,
        };
        P2pCheck { p2p: true, use_read: false, intermediate: middle }
    }
}

#[cfg(test)]
mod tests {
    use super::super::machine::MachineFacts;
    use super::*;

    /// Ranks 0 and 2 are joined by fast links only over rank 1.
    const CHAIN: &str = r#"<system version="1"><cpu numaid="0" arch="x86_64">
        <pci busid="0000:01:00.0" class="0x060400">
          <pci busid="0000:02:00.0" class="0x120000"><gpu dev="0" sm="70" rank="0">
            <nvlink target="0000:03:00.0" count="1"/></gpu></pci>
          <pci busid="0000:03:00.0" class="0x120000"><gpu dev="1" sm="70" rank="1">
            <nvlink target="0000:04:00.0" count="2"/></gpu></pci>
        </pci>
        <pci busid="0000:05:00.0" class="0x060400">
          <pci busid="0000:04:00.0" class="0x120000"><gpu dev="2" sm="70" rank="2"/></pci>
        </pci>
        <pci busid="0000:06:00.0" class="0x060400"><pci busid="0000:07:00.0" class="0x060400"/></pci>
      </cpu></system>"#;

    fn system(text: &str, local: &[i32]) -> System {
        let facts = MachineFacts { local_ranks: local.to_vec(), ..MachineFacts::default() };
        System::from_document(text, facts, true).unwrap()
    }

    #[test]
    fn a_path_has_hops_worst_type_and_least_width() {
        let mut s = system(CHAIN, &[]);
        s.compute_paths();
        let (a, b, c) = (s.node_of_rank(0).unwrap(), s.node_of_rank(1).unwrap(), s.node_of_rank(2).unwrap());
        assert_eq!(s.path_info(a, b), Some(PathInfo { kind: PathType::Nvl, width: 20.0, hops: 1 }));
        assert_eq!(s.path_info(b, c), Some(PathInfo { kind: PathType::Nvl, width: 40.0, hops: 1 }));
        let over = s.path(a, c).unwrap();
        assert_eq!((over.kind, over.width, over.links.len()), (PathType::Nvl, 20.0, 2));
        assert_eq!(s.p2p_by_path(a, c).intermediate, Some(1));
        assert_eq!(s.p2p_by_path(a, b).intermediate, None);
        assert_eq!(s.path_info(a, a), Some(PathInfo { kind: PathType::Loc, width: LOC_WIDTH, hops: 0 }));
    }

    /// Proves INV-42.
    #[test]
    fn paths_are_computed_again_after_trimming() {
        let mut s = system(CHAIN, &[0, 2]);
        s.compute_paths();
        let (a, c) = (s.node_of_rank(0).unwrap(), s.node_of_rank(2).unwrap());
        assert_eq!(s.path_info(a, c).unwrap().kind, PathType::Nvl, "over rank 1, which is on another node");
        s.prepare();
        assert_eq!(s.ranks(), vec![0, 2]);
        assert_eq!(s.bucket(NodeType::Pci).len(), 2, "the unused switches are gone");
        let (a, c) = (s.node_of_rank(0).unwrap(), s.node_of_rank(2).unwrap());
        let path = s.path(a, c).unwrap();
        assert_eq!(path.kind, PathType::Phb, "the matrix of before is invalid: rank 1 is gone");
        assert!(path.links.iter().all(|l| s.links.get(*l).is_some()));
        let again = {
            let mut t = s.clone();
            t.compute_paths();
            t
        };
        assert_eq!(again.paths, s.paths, "the stored paths are those of the trimmed graph");
    }

    #[test]
    fn devices_that_may_not_talk_meet_at_a_cpu() {
        let text = r#"<system version="1"><cpu numaid="0" arch="x86_64"><pci busid="0:1:0.0" class="0x060400">
            <pci busid="0:2:0.0" class="0x12"><gpu dev="0" sm="3" rank="0"/></pci>
            <pci busid="0:3:0.0" class="0x12"><gpu dev="1" sm="3" rank="1"/></pci>
            <pci busid="0:4:0.0" class="0x02"><nic><net name="a" dev="0" gdr="0"/></nic></pci>
          </pci></cpu></system>"#;
        let mut s = system(text, &[]);
        s.compute_paths();
        let (a, b) = (s.node_of_rank(0).unwrap(), s.node_of_rank(1).unwrap());
        let net = s.bucket(NodeType::Net)[0];
        assert_eq!(s.path_info(a, b).unwrap().kind, PathType::Pix);
        assert_eq!(s.path_info(a, net).unwrap().kind, PathType::Phb, "no GDR: through the CPU");
        s.facts.p2p.disabled = true;
        s.compute_paths();
        let path = s.path_info(a, b).unwrap();
        assert_eq!((path.kind, path.hops), (PathType::Phb, 4));
    }
}
