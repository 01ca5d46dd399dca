//! Every bound of topology, search and rings, in one table, each with its reason.

/// Bytes of a document: what the host's `files` interface hands over at most.
pub const MAX_XML_BYTES: usize = 4 << 20;
/// Elements of a document: the original's DOM has this many slots (topology-and-rings 2.2).
pub const MAX_XML_NODES: usize = 10_432;
/// Nesting of elements. Real documents stay below 12; the bound keeps dropping a tree shallow.
pub const MAX_XML_DEPTH: usize = 32;
/// Attributes of one element. The schema knows at most 10; the rest is room for unknown ones, which are kept.
pub const MAX_XML_ATTRIBUTES: usize = 64;
/// Bytes of a name or of an attribute value.
pub const MAX_XML_TEXT: usize = 1024;
/// Ranks on one node: `intra[8192]` of the original's graph over 32 channels.
pub const MAX_LOCAL_RANKS: usize = 256;
/// Ranks of a communicator. Bounds what a forged record can make us allocate.
pub const MAX_RANKS: usize = 1 << 20;
/// Nodes of a system graph. Path computation is quadratic in it.
pub const MAX_SYSTEM_NODES: usize = 2048;
/// CPUs of a mask: the host's `affinity` interface takes 16 words of 64 (architecture, `neuron:hw/affinity`).
pub const MAX_CPUS: usize = 1024;
/// Ports of an accelerator (reverse-abi 3.3).
pub const PORTS: u32 = 4;
/// Channels a communicator can have (topology-and-rings 7, INV-51).
pub const MAX_CHANNELS: usize = 32;
/// Channels the ring template asks for at least and at most (topology-and-rings 1).
pub const MIN_SEARCH_CHANNELS: usize = 1;
/// See [`MIN_SEARCH_CHANNELS`].
pub const MAX_SEARCH_CHANNELS: usize = 16;
/// Integers of `graph.intra` and `graph.inter` (topology-and-rings 3).
pub const MAX_INTRA: usize = 8192;
/// Kangaring paths, and the integers of one row of the table (topology-and-rings 8.1).
pub const MAX_KANGA_PATHS: usize = 4;
/// See [`MAX_KANGA_PATHS`].
pub const MAX_KANGA_RANKS: usize = 64;
/// Cycles over accelerators that are reported (`mla_cycles[32]`, reverse-abi 5.8).
pub const MAX_MLA_CYCLES: usize = 32;
/// Edges that one fork search may try before it answers "no path". A 32-accelerator torus needs a few hundred.
pub const FORK_SEARCH_STEPS: u32 = 1 << 16;
