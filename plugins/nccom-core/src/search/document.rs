//! The graph document: upstream's schema, read and written (topology-and-rings 5.3, INV-48).
//!
//! `graphs version` holds `graph` elements with id, pattern, crossnic, nchannels, speedintra, speedinter, typeintra,
//! typeinter, samechannels; each `channel` lists its `net` and `gpu` children by `dev`. A `gpu` is named by device, a
//! `net` by plug-in index. A channel has no net, or two: one before its gpus and one behind them.

use super::{Graph, SearchError};
use crate::topo::limits::{MAX_CHANNELS, MAX_INTRA};
use crate::topo::xml::{self, XmlElement};
use crate::topo::{NodeType, PathType, System};

/// Version this reader wants.
pub const GRAPH_XML_VERSION: i64 = 1;

fn wrong(node: &str, what: impl Into<String>) -> SearchError {
    SearchError::Document { node: node.to_string(), what: what.into() }
}

fn need<'a>(e: &'a XmlElement, node: &str, name: &str) -> Result<&'a str, SearchError> {
    e.get(name).ok_or_else(|| wrong(node, format!("has no attribute '{name}', which the schema requires: add it")))
}

fn number<T: std::str::FromStr>(e: &XmlElement, node: &str, name: &str) -> Result<T, SearchError> {
    let value = need(e, node, name)?;
    value.trim().parse().map_err(|_| wrong(node, format!("has {name}='{value}' where a number was expected")))
}

fn path_type(e: &XmlElement, node: &str, name: &str) -> Result<PathType, SearchError> {
    let value = need(e, node, name)?;
    PathType::parse(value).ok_or_else(|| {
        wrong(node, format!("has {name}='{value}' where LOC, NVL, PIX, PXB, PHB, SYS or NET was expected"))
    })
}

fn speed(e: &XmlElement, node: &str, name: &str) -> Result<f32, SearchError> {
    let value: f32 = number(e, node, name)?;
    if value.is_finite() && value >= 0.0 {
        Ok(value)
    } else {
        Err(wrong(node, format!("has {name}='{value}' where GB/s of 0 or more were expected")))
    }
}

/// Loads the graph with the template's id; None if the document has none, or one without channels.
///
/// # Errors
/// [`SearchError::Version`] with the original's text; [`SearchError::Document`] for anything that does not fit this
/// node: a channel must name every local device once.
pub fn load(text: &str, system: &System, template: &Graph) -> Result<Option<Graph>, SearchError> {
    let root = xml::read(text)?;
    if root.name != "graphs" {
        return Err(wrong("the outermost element", format!("is <{}> where <graphs> was expected", root.name)));
    }
    let found: i64 = number(&root, "graphs", "version")?;
    if found != GRAPH_XML_VERSION {
        return Err(SearchError::Version { found, needed: GRAPH_XML_VERSION });
    }
    let id = template.id.to_string();
    let Some(element) = root.children_named("graph").find(|g| g.get("id").map(str::trim) == Some(id.as_str())) else {
        return Ok(None);
    };
    let node = format!("graph {id}");
    let mut graph = template.clone();
    graph.pattern = number(element, &node, "pattern")?;
    if graph.pattern != template.pattern {
        return Err(wrong(
            &node,
            format!("has pattern {} where {} (ring) was expected", graph.pattern, template.pattern),
        ));
    }
    graph.cross_nic = number(element, &node, "crossnic")?;
    graph.speed_intra = speed(element, &node, "speedintra")?;
    graph.speed_inter = speed(element, &node, "speedinter")?;
    graph.type_intra = path_type(element, &node, "typeintra")?;
    graph.type_inter = path_type(element, &node, "typeinter")?;
    graph.same_channels = number::<i64>(element, &node, "samechannels")? != 0;
    for channel in element.children_named("channel") {
        let node = format!("channel {} of graph {id}", graph.n_channels);
        if graph.n_channels >= MAX_CHANNELS || (graph.n_channels + 1) * template.local_ranks > MAX_INTRA {
            return Err(wrong(&node, format!("exceeds the limit of {MAX_CHANNELS} channels and {MAX_INTRA} places")));
        }
        let start = graph.intra.len();
        let mut nets = Vec::new();
        for child in &channel.children {
            match child.name.as_str() {
                "net" => nets.push((graph.intra.len() - start, number::<i32>(child, &node, "dev")?)),
                "gpu" => {
                    let dev: i32 = number(child, &node, "dev")?;
                    let mut gpus = system.bucket(NodeType::Gpu).iter().filter_map(|n| system.gpu(*n));
                    let gpu = gpus.find(|g| g.dev == dev).ok_or_else(|| {
                        wrong(
                            &node,
                            format!("names gpu {dev}, which no rank of this node has: use this node's devices"),
                        )
                    })?;
                    if graph.intra[start..].contains(&gpu.rank) {
                        return Err(wrong(&node, format!("names gpu {dev} twice; every device must come once")));
                    }
                    graph.intra.push(gpu.rank);
                }
                _ => {}
            }
        }
        let have = graph.intra.len() - start;
        if have != template.local_ranks {
            return Err(wrong(
                &node,
                format!("names {have} gpus where every one of the {} local devices was expected", template.local_ranks),
            ));
        }
        match nets.as_slice() {
            [] => graph.inter.extend([-1, -1]),
            [(0, first), (last, second)] if *last == have => graph.inter.extend([*first, *second]),
            _ => {
                return Err(wrong(&node, "needs one net before its gpus and one behind them, or none at all"));
            }
        }
        graph.n_channels += 1;
    }
    let stated: usize = number(element, &node, "nchannels")?;
    if stated != graph.n_channels {
        return Err(wrong(&node, format!("states {stated} channels but holds {}", graph.n_channels)));
    }
    Ok((graph.n_channels > 0).then_some(graph))
}

/// Writes a graph.
pub fn write(graph: &Graph, system: &System) -> String {
    let mut element = XmlElement::new("graph")
        .with("id", graph.id)
        .with("pattern", graph.pattern)
        .with("crossnic", graph.cross_nic)
        .with("nchannels", graph.n_channels)
        .with("speedintra", graph.speed_intra)
        .with("speedinter", graph.speed_inter)
        .with("typeintra", graph.type_intra.name())
        .with("typeinter", graph.type_inter.name())
        .with("samechannels", i32::from(graph.same_channels));
    for c in 0..graph.n_channels {
        let mut channel = XmlElement::new("channel");
        let net = |end: usize| graph.inter.get(2 * c + end).filter(|n| **n >= 0);
        let net = |end: usize| net(end).map(|n| XmlElement::new("net").with("dev", n));
        channel.children.extend(net(0));
        for rank in graph.channel(c) {
            let dev = system.node_of_rank(*rank).and_then(|n| system.gpu(n)).map_or(*rank, |g| g.dev);
            channel.children.push(XmlElement::new("gpu").with("dev", dev));
        }
        channel.children.extend(net(1));
        element.children.push(channel);
    }
    let mut root = XmlElement::new("graphs").with("version", GRAPH_XML_VERSION);
    root.children.push(element);
    xml::write(&root)
}
