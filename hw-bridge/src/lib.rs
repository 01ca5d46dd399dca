//! The modelled device and everything native that moves data.
//!
//! This crate knows nothing of WebAssembly. It owns the memory (HBM arenas, control segments), the links between
//! ranks, the reductions, and the sequencer that executes a compiled schedule; `wccl` decides what to run.
//!
//! A room names those below it in this table, never one above:
//!
//! | room | owns |
//! |---|---|
//! | [`proxy`] | the proxy's tick over network operations |
//! | [`p2p`] | messages between two ranks, without the others |
//! | [`exec`] | runs a sealed schedule: wait, copy, reduce, signal, post |
//! | [`group`] | the control channel of a communicator: arrivals, op headers, deaths, aborts |
//! | [`memory`] | sealed memfds, device memory, links, a peer's private memory |
//! | [`call`] | operations, element types, reductions |
//! | [`model`] | instance families, cores, accelerator maps, PCI addresses, pods |
//! | [`os`] | what is asked of the operating system, each thing in one place |
//! | [`limits`] | every limit of this crate |
//!
//! `unsafe` stands in the modules that are marked so, for the reason beside each, and nowhere else: the lint refuses it in
//! any other, and a mark without need.

pub mod call;
pub mod exec;
pub mod group;
pub mod limits;
pub mod memory;
pub mod model;
pub mod os;
pub mod p2p;
pub mod proxy;
