//! Graph search: which ring orders, over which network devices, at which speed.
//!
//! Owns: the ring template and its answer ([`Graph`]), the choice of a search ([`compute`]), the inherited
//! bandwidth-tier descent ([`inherited`]), the fork search ([`fork`]), the graph document ([`document`]), and what is
//! derived from a graph: network device of a channel and point-to-point channels ([`channels`]).
//! Spec: topology-and-rings 1, 3.1, 4, 5, 7.1, 7.2; INV-40, 41, 45 to 48, 52, 54.
//!
//! Invariants: one algorithm, RING, and no cost model; every rank of a node computes the same graph; every search is
//! bounded by a count of steps, never by time.

pub mod channels;
pub mod document;
pub mod fork;
pub mod inherited;

pub use channels::{P2pChannels, net_dev, p2p_channels};

use crate::topo::limits::{MAX_SEARCH_CHANNELS, MIN_SEARCH_CHANNELS};
use crate::topo::{PathType, System};
use std::fmt;

/// RING in the *topology* pattern numbering; the op pattern 0 of the same name is another enumeration.
pub const PATTERN_RING: i32 = 4;
/// What the runtime must call itself for the graph to be searched rather than loaded (topology-and-rings 3.1).
pub const RUNTIME_NAME: &str = "Neuron Runtime";
/// The knob that selects the fork search.
pub const USE_NEW_ALGORITHM: &str = "NCCL_GRAPH_USE_NEW_ALGORITHM";
/// The variable that names a graph document.
pub const GRAPH_FILE: &str = "NCCL_GRAPH_FILE";

/// `ncclTopoGraph` (topology-and-rings 3): template in, wiring out.
#[derive(Clone, Debug, PartialEq)]
pub struct Graph {
    /// Always 0: there is one graph.
    pub id: i32,
    /// Always [`PATTERN_RING`].
    pub pattern: i32,
    /// 2 in the template; in the answer whether rings enter and leave over different network devices.
    pub cross_nic: i32,
    /// Always 0 (INV-41).
    pub coll_net: i32,
    /// Channels wanted at least.
    pub min_channels: usize,
    /// Channels wanted at most.
    pub max_channels: usize,
    /// Channels found.
    pub n_channels: usize,
    /// GB/s of a channel inside the node.
    pub speed_intra: f32,
    /// GB/s of a channel between nodes.
    pub speed_inter: f32,
    /// Worst path type between devices.
    pub type_intra: PathType,
    /// Worst path type to network devices.
    pub type_inter: PathType,
    /// Whether all channels have one device order.
    pub same_channels: bool,
    /// Links used by all channels.
    pub n_hops: usize,
    /// Ranks of this node: the length of a row of `intra`.
    pub local_ranks: usize,
    /// `intra[local_ranks * c + g]`: rank at position g of channel c.
    pub intra: Vec<i32>,
    /// `inter[2c]`, `inter[2c + 1]`: network device of the head and of the others; -1 without any.
    pub inter: Vec<i32>,
    /// Cross-rack lane assignment (fork).
    pub cross_rack_to_rack: bool,
    /// Kangaring paths of this node: groups of a primary rank and up to three secondaries, -1 beyond. Filled by the
    /// fork search on switch-v1 only (INV-53).
    pub kangaring: Vec<Vec<[i32; 4]>>,
}

impl Graph {
    /// The one template: ring, crossNic 2, no CollNet, 1 to 16 channels (topology-and-rings 1, INV-40, INV-41).
    pub fn template(local_ranks: usize) -> Self {
        Self {
            id: 0,
            pattern: PATTERN_RING,
            cross_nic: 2,
            coll_net: 0,
            min_channels: MIN_SEARCH_CHANNELS,
            max_channels: MAX_SEARCH_CHANNELS,
            n_channels: 0,
            speed_intra: 0.0,
            speed_inter: 0.0,
            type_intra: PathType::Loc,
            type_inter: PathType::Loc,
            same_channels: true,
            n_hops: 0,
            local_ranks,
            intra: Vec::new(),
            inter: Vec::new(),
            cross_rack_to_rack: false,
            kangaring: Vec::new(),
        }
    }

    /// Ranks of a channel in ring order; empty for a channel that does not exist.
    pub fn channel(&self, c: usize) -> &[i32] {
        let start = c.saturating_mul(self.local_ranks);
        self.intra.get(start..start.saturating_add(self.local_ranks)).unwrap_or(&[])
    }
}

impl fmt::Display for Graph {
    /// The original's log line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Pattern {}, crossNic {}, nChannels {}, speed {:.6}/{:.6}, type {}/{}, sameChannels {}",
            self.pattern,
            self.cross_nic,
            self.n_channels,
            self.speed_intra,
            self.speed_inter,
            self.type_intra.name(),
            self.type_inter.name(),
            i32::from(self.same_channels)
        )
    }
}

/// Where a graph came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A graph document.
    File,
    /// The fork search.
    Fork,
    /// The tier descent.
    Inherited,
    /// Nothing was found: simple order.
    Fallback,
}

/// A finished search.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchOutcome {
    /// The graph; at least one channel.
    pub graph: Graph,
    /// Who made it.
    pub origin: Origin,
    /// Lines for the log, in order, the original's texts.
    pub log: Vec<String>,
}

/// Why no graph could be made.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum SearchError {
    /// The graph document is not well formed.
    Xml(crate::topo::xml::XmlError),
    /// The graph document has another version; the text is the original's.
    Version {
        /// Version it states.
        found: i64,
        /// Version needed.
        needed: i64,
    },
    /// An element lacks what it must have, or has a value that cannot be used.
    Document {
        /// The element.
        node: String,
        /// What is wrong and what was expected.
        what: String,
    },
    /// A graph must be loaded but there is no document.
    NoGraphFile {
        /// Why one is needed.
        reason: &'static str,
    },
    /// The system holds no rank.
    NoRank,
}

impl fmt::Display for SearchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Xml(e) => write!(f, "{e}"),
            Self::Version { found, needed } => {
                write!(f, "XML Graph has wrong version {found}, {needed} needed")
            }
            Self::Document { node, what } => write!(f, "{node} of the graph document {what}"),
            Self::NoGraphFile { reason } => write!(
                f,
                "a graph document is needed because {reason}, but none could be read: set NCCL_GRAPH_FILE to a readable file"
            ),
            Self::NoRank => write!(f, "the system graph holds no rank of this node: run topology discovery first"),
        }
    }
}

impl std::error::Error for SearchError {}

impl From<crate::topo::xml::XmlError> for SearchError {
    fn from(e: crate::topo::xml::XmlError) -> Self {
        Self::Xml(e)
    }
}

/// `ncclTopoCompute`: fills the ring template (topology-and-rings 3.1). `graph_file` is the content of
/// `NCCL_GRAPH_FILE`; `runtime_name` is what the runtime calls itself: any other than [`RUNTIME_NAME`] has its graph
/// loaded, never searched.
///
/// The knob [`USE_NEW_ALGORITHM`] is off by default and selects the fork search where both exist; switch-v1 always
/// uses the fork search (INV-45). A fork search that finds no ring leaves the template to the inherited search.
///
/// # Errors
/// [`SearchError`]: only for documents and for a system without ranks; a search itself always ends with a graph.
pub fn compute(
    system: &System,
    vars: &dyn Fn(&str) -> Option<String>,
    graph_file: Option<&str>,
    runtime_name: &str,
) -> Result<SearchOutcome, SearchError> {
    let ranks = system.ranks();
    if ranks.is_empty() {
        return Err(SearchError::NoRank);
    }
    let mut log = Vec::new();
    let template = Graph::template(ranks.len());
    let named = vars(GRAPH_FILE).is_some();
    if named || graph_file.is_some() || runtime_name != RUNTIME_NAME {
        let reason = if named { "NCCL_GRAPH_FILE is set" } else { "the runtime is not \"Neuron Runtime\"" };
        let text = graph_file.ok_or(SearchError::NoGraphFile { reason })?;
        if let Some(graph) = document::load(text, system, &template)? {
            log.push(format!("Search {} : {} channels loaded from XML graph", graph.id, graph.n_channels));
            return Ok(SearchOutcome { graph, origin: Origin::File, log });
        }
    }
    let knob = crate::topo::flag(vars, USE_NEW_ALGORITHM);
    if let Some(value) = vars(USE_NEW_ALGORITHM) {
        log.push(format!("{USE_NEW_ALGORITHM} set by environment to {value}"));
    }
    if (knob || system.facts.family.is_switch_v1())
        && let Some(graph) = fork::search(system, &template, &mut log)?
    {
        return Ok(SearchOutcome { graph, origin: Origin::Fork, log });
    }
    let (graph, origin) = inherited::search(system, &template, &mut log);
    Ok(SearchOutcome { graph, origin, log })
}

#[cfg(test)]
mod tests;
