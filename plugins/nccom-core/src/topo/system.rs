//! The system graph: nodes in seven buckets, links with a type and a width, in canonical order.
//!
//! Owns: the graph's types and its construction from a document. Invariants: nodes are sorted by (bucket, identity)
//! and every node's links by (type, target), so that the result does not depend on the order of child elements; every
//! link has a twin in the other direction; CPUs are fully connected.
//!
//! An accelerator with several logical cores is a PCI node (its place on the bus) and an NVS node (its place in the
//! fabric), both with the gpus below them: the cores share the accelerator's links, and the search must see that.

use super::error::TopoError;
use super::limits::{MAX_LOCAL_RANKS, MAX_SYSTEM_NODES};
use super::machine::{Bdf, CpuMask, MachineFacts};
use super::paths::Paths;
use super::xml::{self, XmlElement};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Schema version this reader wants, and the one it reads on purpose only.
pub const TOPO_XML_VERSION: i64 = 1;
/// See [`TOPO_XML_VERSION`].
pub const TOPO_XML_VERSION_2: i64 = 2;

/// Node buckets, upstream's numbers; the seventh is unused (topology-and-rings 2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeType {
    /// A rank's device.
    Gpu = 0,
    /// A PCI switch, or an accelerator's place on the bus.
    Pci = 1,
    /// A fabric switch, or an accelerator's place in the fabric.
    Nvs = 2,
    /// A NUMA node.
    Cpu = 3,
    /// A network card.
    NetDevice = 4,
    /// A network device.
    Net = 5,
}

/// Number of buckets (the last is unused).
pub const NODE_BUCKETS: usize = 7;

/// Link types; numbers match [`PathType`] where both exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinkType {
    /// Fast fabric.
    Nvl,
    /// PCI.
    Pci,
    /// Between CPUs.
    Sys,
    /// To a network device.
    Net,
}

/// Path types, upstream's numbers: smaller is closer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PathType {
    /// The node itself.
    Loc = 0,
    /// Fast fabric only.
    Nvl = 1,
    /// At most one PCI switch.
    Pix = 2,
    /// Several PCI switches.
    Pxb = 3,
    /// Through a CPU.
    Phb = 4,
    /// Across CPUs.
    Sys = 5,
    /// Through the network.
    Net = 6,
}

impl PathType {
    /// All, closest first.
    pub const ALL: [Self; 7] = [Self::Loc, Self::Nvl, Self::Pix, Self::Pxb, Self::Phb, Self::Sys, Self::Net];

    /// The upstream name.
    pub fn name(self) -> &'static str {
        ["LOC", "NVL", "PIX", "PXB", "PHB", "SYS", "NET"][self as usize]
    }

    /// Reads a name or a number of 0 to 6.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        Self::ALL.into_iter().find(|t| t.name().eq_ignore_ascii_case(text) || (*t as u8).to_string() == text)
    }
}

/// Which node a node is.
#[derive(Clone, Debug, PartialEq)]
pub enum Detail {
    /// A rank's device.
    Gpu(Gpu),
    /// On the bus.
    Pci {
        /// An accelerator's place, not a switch.
        accelerator: bool,
    },
    /// In the fabric.
    Nvs {
        /// An accelerator's place, not a switch.
        accelerator: bool,
    },
    /// A NUMA node.
    Cpu {
        /// Its CPUs.
        affinity: CpuMask,
        /// Width of its links to other CPUs, GB/s.
        width: f32,
    },
    /// A network card.
    NetDevice,
    /// A network device.
    Net(Net),
}

/// A rank's device.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpu {
    /// Rank.
    pub rank: i32,
    /// Device: the logical core.
    pub dev: i32,
    /// Generation tag ("compute capability").
    pub sm: i32,
    /// Whether network devices reach its memory.
    pub gdr: bool,
    /// Accelerator.
    pub mla: i32,
    /// Logical core inside the accelerator.
    pub core: i32,
    /// Routing id, -1 if the document does not say.
    pub rid: i32,
}

/// A network device.
#[derive(Clone, Debug, PartialEq)]
pub struct Net {
    /// The plug-in's index.
    pub dev: i32,
    /// Name.
    pub name: String,
    /// Port.
    pub port: i32,
    /// Whether it reaches device memory.
    pub gdr: bool,
    /// PCI address of its card, as the document writes it.
    pub busid: String,
}

/// A directed link.
#[derive(Clone, Debug, PartialEq)]
pub struct TopoLink {
    /// From this node (index).
    pub from: usize,
    /// To this node (index).
    pub to: usize,
    /// Type.
    pub kind: LinkType,
    /// GB/s.
    pub width: f32,
}

/// A node.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// What it is.
    pub detail: Detail,
    /// Identity inside its bucket; what the canonical order sorts by.
    pub id: (u64, u64),
    /// Outgoing links (indices), canonical.
    pub links: Vec<usize>,
}

impl Node {
    /// Bucket.
    pub fn kind(&self) -> NodeType {
        match self.detail {
            Detail::Gpu(_) => NodeType::Gpu,
            Detail::Pci { .. } => NodeType::Pci,
            Detail::Nvs { .. } => NodeType::Nvs,
            Detail::Cpu { .. } => NodeType::Cpu,
            Detail::NetDevice => NodeType::NetDevice,
            Detail::Net(_) => NodeType::Net,
        }
    }
}

/// The system graph of one node, with its paths once they are computed.
#[derive(Clone, Debug, PartialEq)]
pub struct System {
    /// Nodes in canonical order: gpus first, by rank.
    pub nodes: Vec<Node>,
    /// Links.
    pub links: Vec<TopoLink>,
    /// Indices of the nodes of each bucket.
    pub buckets: [Vec<usize>; NODE_BUCKETS],
    /// What the machine is.
    pub facts: MachineFacts,
    /// Paths between all nodes; stale after any change of the graph.
    pub paths: Paths,
    /// Widest path the search may start at, GB/s.
    pub max_width: f32,
    /// Bandwidth no set of rings can exceed, GB/s: the narrowest cut round one accelerator, and across nodes the NICs.
    pub total_width: f32,
}

/// GB/s of one fast link, by generation tag. The Neuron values follow the products' published totals over four ports;
/// the others are upstream's for the tags of its own devices.
pub fn nvlink_width(sm: i32) -> f32 {
    match sm {
        2 => 48.0,
        3 => 160.0,
        4 => 320.0,
        60..=69 => 18.0,
        86 => 12.0,
        _ => 20.0,
    }
}

/// GB/s between a core and its accelerator's other cores.
fn core_width(sm: i32) -> f32 {
    4.0 * nvlink_width(sm)
}

/// GB/s of a PCI link: lanes × rate, where an unknown rate counts as 8 GT/s and an unknown width as 16 (upstream).
fn pci_width(speed: Option<&str>, width: Option<&str>) -> f32 {
    let rate = speed
        .and_then(|s| s.split_whitespace().next())
        .and_then(|s| s.parse::<f32>().ok())
        .filter(|r| r.is_finite())
        .unwrap_or(8.0);
    // Per lane, in units of 1/80 GB/s: what a lane carries after its line code.
    let lane = match rate {
        r if r <= 0.0 => 60.0,
        r if r < 4.0 => 15.0,
        r if r < 7.0 => 30.0,
        r if r < 12.0 => 60.0,
        r if r < 24.0 => 120.0,
        r if r < 48.0 => 240.0,
        _ => 480.0,
    };
    let lanes = width.and_then(|w| w.trim().parse::<f32>().ok()).filter(|w| *w > 0.0 && *w <= 64.0);
    lanes.unwrap_or(16.0) * lane / 80.0
}

/// GB/s between CPUs, upstream's by vendor.
fn sys_width(arch: &str, vendor: Option<&str>) -> f32 {
    match (arch, vendor) {
        ("arm64", _) => 6.0,
        ("ppc64", _) => 32.0,
        (_, Some("AuthenticAMD")) => 16.0,
        (_, Some("GenuineIntel")) => 9.0,
        _ => 8.0,
    }
}

/// Reads the attributes of one element and says where it stands if one is missing.
struct Attributes<'a> {
    element: &'a XmlElement,
    place: String,
}

impl<'a> Attributes<'a> {
    fn of(element: &'a XmlElement, above: &str) -> Self {
        let own = ["busid", "numaid", "dev", "name", "target"]
            .into_iter()
            .find_map(|n| element.get(n))
            .map(|v| format!(" {v}"))
            .unwrap_or_default();
        let place = match above {
            "" => format!("{}{own}", element.name),
            above => format!("{}{own} in {above}", element.name),
        };
        Self { element, place }
    }

    fn need(&self, attribute: &'static str) -> Result<&'a str, TopoError> {
        self.element.get(attribute).ok_or_else(|| TopoError::MissingAttribute { node: self.place.clone(), attribute })
    }

    fn bad(&self, attribute: &'static str, value: &str, expected: &'static str) -> TopoError {
        TopoError::BadAttribute { node: self.place.clone(), attribute, value: value.to_string(), expected }
    }

    fn number(&self, attribute: &'static str, value: &str) -> Result<i64, TopoError> {
        let value = value.trim();
        let parsed = match value.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16).ok().map(|v| v as i64),
            None => value.parse().ok(),
        };
        parsed.ok_or_else(|| self.bad(attribute, value, "a whole number"))
    }

    fn int(&self, attribute: &'static str) -> Result<i32, TopoError> {
        let value = self.need(attribute)?;
        i32::try_from(self.number(attribute, value)?)
            .map_err(|_| self.bad(attribute, value, "a whole number of 32 bits"))
    }

    fn int_or(&self, attribute: &'static str, default: i32) -> Result<i32, TopoError> {
        match self.element.get(attribute) {
            None => Ok(default),
            Some(_) => self.int(attribute),
        }
    }

    fn bus(&self, attribute: &'static str) -> Result<u64, TopoError> {
        let value = self.need(attribute)?;
        bus_number(value).ok_or_else(|| self.bad(attribute, value, "domain:bus:slot.func in hexadecimal"))
    }
}

fn bus_number(text: &str) -> Option<u64> {
    Bdf::parse(text)
        .map(|b| u64::from(b.domain) << 24 | u64::from(b.bus) << 16 | u64::from(b.slot) << 8 | u64::from(b.func))
}

/// Marks a fabric switch among NVS identities: before every accelerator.
const FABRIC_SWITCH_ID: (u64, u64) = (0, 0);

struct Builder {
    nodes: Vec<Node>,
    /// Directed widths by (from, to, type): parallel links add up, as upstream's do.
    widths: BTreeMap<(usize, usize, LinkType), f32>,
    /// Fabric endpoint (and generation tag) of each accelerator by bus number.
    endpoints: BTreeMap<u64, (usize, i32)>,
    /// Links named by an accelerator: (its bus number, target, class, count).
    fabric: Vec<(u64, u64, String, i32)>,
    /// PCI addresses seen, of network cards and of the rest: a second element of the same kind has no identity of its
    /// own. Published documents do have a switch and a card with one address.
    seen: BTreeSet<(u64, bool)>,
    local: Vec<i32>,
}

impl Builder {
    fn node(&mut self, detail: Detail, id: (u64, u64)) -> Result<usize, TopoError> {
        if self.nodes.len() >= MAX_SYSTEM_NODES {
            return Err(TopoError::TooMany { what: "devices", found: self.nodes.len() + 1, limit: MAX_SYSTEM_NODES });
        }
        self.nodes.push(Node { detail, id, links: Vec::new() });
        Ok(self.nodes.len() - 1)
    }

    fn directed(&mut self, from: usize, to: usize, kind: LinkType, width: f32) {
        *self.widths.entry((from, to, kind)).or_insert(0.0) += width;
    }

    fn connect(&mut self, a: usize, b: usize, kind: LinkType, width: f32) {
        self.directed(a, b, kind, width);
        self.directed(b, a, kind, width);
    }

    fn pci(&mut self, element: &XmlElement, above: &str, parent: usize, multi: bool) -> Result<(), TopoError> {
        let at = Attributes::of(element, above);
        let bus = at.bus("busid")?;
        at.need("class")?;
        let card = element.children_named("nic").next().is_some();
        if !self.seen.insert((bus, card)) {
            return Err(TopoError::Duplicate { what: at.place });
        }
        let width = pci_width(element.get("link_speed"), element.get("link_width"));
        let mut gpus = Vec::new();
        for gpu in element.children_named("gpu") {
            let g = Attributes::of(gpu, &at.place);
            let rank = g.int_or("rank", -1)?;
            let dev = g.int("dev")?;
            let sm = g.int("sm")?;
            let detail = Gpu {
                rank,
                dev,
                sm,
                gdr: g.int_or("gdr", 1)? != 0,
                mla: g.int_or("mla", dev)?,
                core: g.int_or("core", 0)?,
                rid: g.int_or("rid", -1)?,
            };
            let mut fabric = Vec::new();
            for link in gpu.children.iter().filter(|c| matches!(c.name.as_str(), "nvlink" | "xgmi")) {
                let l = Attributes::of(link, &g.place);
                let count = l.int("count")?;
                if !(1..=1024).contains(&count) {
                    return Err(l.bad("count", l.need("count")?, "a number of links from 1 to 1024"));
                }
                let class = link.get("tclass").unwrap_or(super::synth::CLASS_ACCELERATOR);
                fabric.push((bus, l.bus("target")?, class.to_string(), count));
            }
            // A gpu without a rank is none of ours, and neither are its links. Which ranks are of this node is
            // decided when the graph is trimmed: until then another node's device is one that paths may cross.
            if rank >= 0 {
                gpus.push(detail);
                self.fabric.extend(fabric);
            }
        }
        if gpus.len() > MAX_LOCAL_RANKS {
            return Err(TopoError::TooMany {
                what: "ranks on one accelerator",
                found: gpus.len(),
                limit: MAX_LOCAL_RANKS,
            });
        }
        gpus.sort_by_key(|g| (g.core, g.dev, g.rank));
        let sm = gpus.first().map_or(0, |g| g.sm);
        let own = match gpus.len() {
            1 if !multi => {
                let gpu = gpus.remove(0);
                let id = (u64::from(gpu.rank.unsigned_abs()), bus);
                let node = self.node(Detail::Gpu(gpu), id)?;
                self.endpoints.insert(bus, (node, sm));
                node
            }
            0 => {
                let accelerator = false;
                match card {
                    true => self.node(Detail::NetDevice, (bus, 0))?,
                    false => self.node(Detail::Pci { accelerator }, (bus, 0))?,
                }
            }
            _ => {
                let place = self.node(Detail::Pci { accelerator: true }, (bus, 0))?;
                let fabric = self.node(Detail::Nvs { accelerator: true }, (1, bus))?;
                self.endpoints.insert(bus, (fabric, sm));
                for gpu in gpus {
                    let id = (u64::from(gpu.rank.unsigned_abs()), bus);
                    let node = self.node(Detail::Gpu(gpu), id)?;
                    self.connect(node, place, LinkType::Pci, width);
                    self.connect(node, fabric, LinkType::Nvl, core_width(sm));
                }
                place
            }
        };
        self.connect(own, parent, LinkType::Pci, width);
        for nic in element.children_named("nic") {
            for net in nic.children_named("net") {
                self.net(net, &at.place, own, bus, at.need("busid")?)?;
            }
        }
        for child in element.children_named("pci") {
            self.pci(child, &at.place, own, multi)?;
        }
        Ok(())
    }

    fn net(&mut self, net: &XmlElement, above: &str, card: usize, bus: u64, busid: &str) -> Result<(), TopoError> {
        let at = Attributes::of(net, above);
        let dev = at.int("dev")?;
        let detail = Net {
            dev,
            name: at.need("name")?.to_string(),
            port: at.int_or("port", 0)?,
            gdr: at.int_or("gdr", 1)? != 0,
            busid: busid.to_string(),
        };
        // Unknown or zero speed counts as 10 Gb/s, as upstream.
        let speed = at.int_or("speed", 10_000)?;
        let speed = if speed > 0 { speed } else { 10_000 };
        let id = (u64::from(dev.unsigned_abs()) << 1 | u64::from(dev < 0), bus);
        // Published documents number two cards' devices alike; on one card a number and a port are one device.
        let twice = |n: &Node| matches!(&n.detail, Detail::Net(other) if n.id == id && other.port == detail.port);
        if self.nodes.iter().any(twice) {
            return Err(TopoError::Duplicate { what: at.place });
        }
        let node = self.node(Detail::Net(detail), id)?;
        self.connect(card, node, LinkType::Net, speed as f32 / 8000.0);
        Ok(())
    }

    fn fabric_links(&mut self) -> Result<(), TopoError> {
        let mut switch = None;
        for (bus, target, class, count) in std::mem::take(&mut self.fabric) {
            let Some(&(from, sm)) = self.endpoints.get(&bus) else {
                continue;
            };
            let width = nvlink_width(sm) * count as f32;
            if class == super::synth::CLASS_FABRIC_SWITCH {
                // All fabric switches are one node, as upstream: which of them carries a transfer is the fabric's.
                let to = match switch {
                    Some(to) => to,
                    None => self.node(Detail::Nvs { accelerator: false }, FABRIC_SWITCH_ID)?,
                };
                switch = Some(to);
                self.connect(from, to, LinkType::Nvl, width);
            } else if let Some(&(to, _)) = self.endpoints.get(&target)
                && to != from
            {
                self.directed(from, to, LinkType::Nvl, width);
            }
        }
        // A link that only one end names works both ways.
        let one_way: Vec<_> = self
            .widths
            .iter()
            .filter(|((a, b, kind), _)| !self.widths.contains_key(&(*b, *a, *kind)))
            .map(|((a, b, kind), w)| (*b, *a, *kind, *w))
            .collect();
        for (a, b, kind, width) in one_way {
            self.directed(a, b, kind, width);
        }
        Ok(())
    }
}

impl System {
    /// Reads a document and builds the graph, paths not yet computed.
    ///
    /// # Errors
    /// See [`System::from_element`]; [`TopoError::Xml`] for text that is no document.
    pub fn from_document(text: &str, facts: MachineFacts, allow_version_2: bool) -> Result<Self, TopoError> {
        Self::from_element(&xml::read(text)?, facts, allow_version_2)
    }

    /// Builds the graph of a document, paths not yet computed.
    ///
    /// # Errors
    /// [`TopoError::Version`] for another schema version than 1 (or 2 on purpose), [`TopoError::MissingAttribute`] and
    /// [`TopoError::BadAttribute`] with node and attribute, [`TopoError::Duplicate`], [`TopoError::NoCpu`],
    /// [`TopoError::TooMany`].
    pub fn from_element(root: &XmlElement, facts: MachineFacts, allow_version_2: bool) -> Result<Self, TopoError> {
        check_root(root, allow_version_2)?;
        let mut b = Builder {
            nodes: Vec::new(),
            widths: BTreeMap::new(),
            endpoints: BTreeMap::new(),
            fabric: Vec::new(),
            seen: BTreeSet::new(),
            local: facts.local_ranks.clone(),
        };
        // One form for all accelerators of a document: mixed forms would compare unlike paths.
        let multi = root.children.iter().any(has_shared_accelerator);
        let mut cpus = Vec::new();
        for cpu in root.children_named("cpu") {
            let at = Attributes::of(cpu, "");
            let numa = at.int("numaid")?;
            let arch = at.need("arch")?;
            let affinity = match cpu.get("affinity") {
                None => CpuMask::default(),
                Some(text) => CpuMask::from_hex(text)
                    .ok_or_else(|| at.bad("affinity", text, "hexadecimal words of 32 bits, at most 1024 CPUs"))?,
            };
            let width = sys_width(arch, cpu.get("vendor"));
            let id = (u64::from(numa.unsigned_abs()) << 1 | u64::from(numa < 0), 0);
            if cpus.iter().any(|c: &usize| b.nodes.get(*c).is_some_and(|n| n.id == id)) {
                return Err(TopoError::Duplicate { what: at.place });
            }
            let node = b.node(Detail::Cpu { affinity, width }, id)?;
            cpus.push(node);
            for pci in cpu.children_named("pci") {
                b.pci(pci, &at.place, node, multi)?;
            }
            // Network devices without a place on a bus hang under the CPU itself.
            for nic in cpu.children_named("nic") {
                for net in nic.children_named("net") {
                    let dev = Attributes::of(net, &at.place).int("dev")?;
                    let card = b.node(Detail::NetDevice, (u64::MAX, u64::from(dev.unsigned_abs())))?;
                    b.connect(card, node, LinkType::Pci, pci_width(None, None));
                    b.net(net, &at.place, card, u64::MAX, "")?;
                }
            }
        }
        if cpus.is_empty() {
            return Err(TopoError::NoCpu);
        }
        b.fabric_links()?;
        for (i, &a) in cpus.iter().enumerate() {
            for &c in cpus.get(i + 1..).unwrap_or(&[]) {
                let width = |n: usize| match b.nodes.get(n).map(|n| &n.detail) {
                    Some(Detail::Cpu { width, .. }) => *width,
                    _ => 0.0,
                };
                let width = width(a).min(width(c));
                b.connect(a, c, LinkType::Sys, width);
            }
        }
        let mut ranks: Vec<i32> = b
            .nodes
            .iter()
            .filter_map(|n| match &n.detail {
                Detail::Gpu(g) => Some(g.rank),
                _ => None,
            })
            .collect();
        ranks.sort_unstable();
        if let Some(twice) = ranks.windows(2).find(|w| w[0] == w[1]) {
            return Err(TopoError::Duplicate { what: format!("rank {}", twice[0]) });
        }
        if let Some(rank) = b.local.iter().find(|r| ranks.binary_search(r).is_err()) {
            return Err(TopoError::RankWithoutDevice { rank: *rank });
        }
        Ok(Self::canonical(b.nodes, b.widths, facts))
    }

    /// Sorts nodes and links and fills the buckets.
    fn canonical(nodes: Vec<Node>, widths: BTreeMap<(usize, usize, LinkType), f32>, facts: MachineFacts) -> Self {
        let mut order: Vec<usize> = (0..nodes.len()).collect();
        order.sort_by_key(|i| (nodes[*i].kind(), nodes[*i].id));
        let mut place = vec![0; nodes.len()];
        for (new, old) in order.iter().enumerate() {
            place[*old] = new;
        }
        let mut slots: Vec<Option<Node>> = nodes.into_iter().map(Some).collect();
        let mut nodes: Vec<Node> = order.iter().filter_map(|old| slots[*old].take()).collect();
        let mut links: Vec<TopoLink> = widths
            .into_iter()
            .map(|((from, to, kind), width)| TopoLink { from: place[from], to: place[to], kind, width })
            .collect();
        links.sort_by_key(|l| (l.from, l.kind, l.to));
        let mut buckets: [Vec<usize>; NODE_BUCKETS] = Default::default();
        for (i, node) in nodes.iter_mut().enumerate() {
            node.links.clear();
            buckets[node.kind() as usize].push(i);
        }
        for (i, link) in links.iter().enumerate() {
            nodes[link.from].links.push(i);
        }
        Self { nodes, links, buckets, facts, paths: Paths::default(), max_width: 0.0, total_width: 0.0 }
    }

    /// The graph without the nodes `keep` refuses; paths are stale afterwards.
    pub(super) fn retain(&mut self, keep: &dyn Fn(usize) -> bool) {
        let kept: Vec<usize> = (0..self.nodes.len()).filter(|i| keep(*i)).collect();
        let place: BTreeMap<usize, usize> = kept.iter().enumerate().map(|(new, old)| (*old, new)).collect();
        let nodes = kept.iter().map(|i| self.nodes[*i].clone()).collect();
        let widths = self
            .links
            .iter()
            .filter_map(|l| Some(((*place.get(&l.from)?, *place.get(&l.to)?, l.kind), l.width)))
            .collect();
        let facts = std::mem::take(&mut self.facts);
        *self = Self::canonical(nodes, widths, facts);
    }

    /// Nodes of a bucket, canonical order.
    pub fn bucket(&self, kind: NodeType) -> &[usize] {
        &self.buckets[kind as usize]
    }

    /// The gpu of a node.
    pub fn gpu(&self, node: usize) -> Option<&Gpu> {
        match self.nodes.get(node).map(|n| &n.detail) {
            Some(Detail::Gpu(g)) => Some(g),
            _ => None,
        }
    }

    /// The network device of a node.
    pub fn net(&self, node: usize) -> Option<&Net> {
        match self.nodes.get(node).map(|n| &n.detail) {
            Some(Detail::Net(n)) => Some(n),
            _ => None,
        }
    }

    /// Node of a rank.
    pub fn node_of_rank(&self, rank: i32) -> Option<usize> {
        self.bucket(NodeType::Gpu).iter().copied().find(|n| self.gpu(*n).is_some_and(|g| g.rank == rank))
    }

    /// Local ranks, ascending: the order of the gpu bucket.
    pub fn ranks(&self) -> Vec<i32> {
        self.bucket(NodeType::Gpu).iter().filter_map(|n| self.gpu(*n)).map(|g| g.rank).collect()
    }

    /// The gpus that share an accelerator, in order of their lowest rank; inside one by core.
    pub fn accelerators(&self) -> Vec<Vec<usize>> {
        let mut groups: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for &node in self.bucket(NodeType::Gpu) {
            // The second part of a gpu's identity is the bus number of its accelerator.
            groups.entry(self.nodes[node].id.1).or_default().push(node);
        }
        let mut groups: Vec<Vec<usize>> = groups.into_values().collect();
        for group in &mut groups {
            group.sort_by_key(|n| self.gpu(*n).map(|g| (g.core, g.dev)));
        }
        groups.sort_by_key(|g| g.iter().copied().min());
        groups
    }
}

fn has_shared_accelerator(element: &XmlElement) -> bool {
    (element.name == "pci" && element.children_named("gpu").filter(|g| super::merge::has_rank(g)).count() > 1)
        || element.children.iter().any(has_shared_accelerator)
}

/// Refuses what is no topology document or one of another version, before anything else of it is looked at.
pub(super) fn check_root(root: &XmlElement, allow_version_2: bool) -> Result<(), TopoError> {
    if root.name != "system" {
        return Err(TopoError::WrongRoot { found: root.name.clone() });
    }
    let at = Attributes::of(root, "");
    let found = at.number("version", at.need("version")?)?;
    match found {
        TOPO_XML_VERSION => Ok(()),
        TOPO_XML_VERSION_2 if allow_version_2 => Ok(()),
        _ => Err(TopoError::Version { found, needed: TOPO_XML_VERSION }),
    }
}

impl fmt::Display for System {
    /// The graph as lines: one a node with its links, for the log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "=== System : maxWidth {:.1} totalWidth {:.1} ===", self.max_width, self.total_width)?;
        for (i, node) in self.nodes.iter().enumerate() {
            write!(f, "{}", self.label(i))?;
            for link in node.links.iter().filter_map(|l| self.links.get(*l)) {
                write!(f, " {:?}[{:.1}]-{}", link.kind, link.width, self.label(link.to))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

impl System {
    /// A node's name for messages.
    pub fn label(&self, node: usize) -> String {
        let Some(n) = self.nodes.get(node) else {
            return format!("?{node}");
        };
        match &n.detail {
            Detail::Gpu(g) => format!("GPU/{}({})", g.dev, g.rank),
            Detail::Net(net) => format!("NET/{}", net.dev),
            Detail::Cpu { .. } => format!("CPU/{}", n.id.0 >> 1),
            Detail::Pci { .. } => format!("PCI/{:x}", n.id.0),
            Detail::NetDevice => format!("NIC/{:x}", n.id.0),
            Detail::Nvs { accelerator: false } => "NVS/0".to_string(),
            Detail::Nvs { .. } => format!("NVS/{:x}", n.id.1),
        }
    }
}
