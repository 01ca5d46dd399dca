//! The modelled device and everything native that moves data.
//!
//! This crate knows nothing of WebAssembly. It owns the memory (HBM arenas, control segments), the links between
//! ranks, the reductions, and the sequencer that executes a compiled schedule; `host-runtime` decides what to run.
//!
//! | room | owns |
//! |---|---|
//! | [`ballot`] | one decision that several processes come to |
//! | [`dtype`], [`mod@reduce`] | NRT data types, and vectorised arithmetic over them |
//! | [`device`] | instance families, cores, accelerator maps, PCI addresses, pods |
//! | [`segment`], [`hbm`] | sealed memfds, and device memory in them |
//! | [`exhausted`] | which limit of the process is behind an error, and how to raise it |
//! | [`control_group`] | limits of control groups of either version, and kills for want of memory |
//! | [`credentials`], [`mod@dial`] | who is behind a unix socket; connecting to one |
//! | [`log_rate`] | lines of the log that others can cause, within a rate |
//! | [`foreign`] | reading the private memory of a peer |
//! | [`links`] | granting memory to a peer and mapping a peer's |
//! | [`semaphore`] | waiting: spin, yield, futex |
//! | [`patience`] | deadlines, by a clock that does not run while the process is stopped |
//! | [`flight`] | what a lane did: counters, the last operations |
//! | [`fork`] | whether this process is a forked child |
//! | [`peers`] | the control channel of a communicator: arrivals, op headers, deaths, aborts |
//! | [`proxy`] | the proxy's tick over network operations |
//! | [`share`] | whose turn it is, among tenants |
//! | [`sequencer`] | the step language, and executing it |
//! | [`signals`] | waiting for signals; what a process inherits of them |
//!
//! `unsafe` stands in `reduce`, `peers`, `ballot` and `sequencer`, which compute on raw or shared memory, in `flight` (the cycle counter),
//! in `fork` (a page the kernel wipes), in `share` (a page that tenants share), in `credentials` (socket options), in `signals` (masks,
//! dispositions, and what runs between fork and exec) and in `foreign` (a system call), and nowhere else.

pub mod ballot;
pub mod control_group;
pub mod credentials;
pub mod device;
pub mod dial;
pub mod dtype;
pub mod exhausted;
pub mod flight;
pub mod foreign;
pub mod fork;
pub mod hbm;
pub mod limits;
pub mod links;
pub mod log_rate;
pub mod patience;
pub mod peers;
pub mod proxy;
pub mod reduce;
pub mod segment;
pub mod semaphore;
pub mod sequencer;
pub mod share;
pub mod shown;
pub mod signals;
