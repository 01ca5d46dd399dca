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
//! `unsafe` stands in the modules that are marked below, for the reason beside each, and nowhere else: the lint refuses it in
//! any other, and a mark without need.

#![deny(unsafe_code)]

#[expect(unsafe_code, reason = "mapped words that several processes share")]
pub mod ballot;
pub mod control_group;
#[expect(unsafe_code, reason = "socket options that rustix does not have")]
pub mod credentials;
pub mod device;
pub mod dial;
pub mod dtype;
pub mod exhausted;
#[cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "the cycle counter"))]
pub mod flight;
#[expect(unsafe_code, reason = "the system call that reads a peer's memory")]
pub mod foreign;
#[expect(unsafe_code, reason = "a page that the kernel wipes in a child")]
pub mod fork;
#[expect(unsafe_code, reason = "copies to and from raw device memory")]
pub mod hbm;
pub mod limits;
pub mod links;
pub mod log_rate;
pub mod patience;
#[expect(unsafe_code, reason = "mapped words that the ranks share")]
pub mod peers;
pub mod proxy;
#[expect(unsafe_code, reason = "arithmetic on raw memory, vector instructions")]
pub mod reduce;
pub mod segment;
pub mod semaphore;
#[expect(unsafe_code, reason = "runs steps on raw memory")]
pub mod sequencer;
#[expect(unsafe_code, reason = "a mapped page that tenants share")]
pub mod share;
pub mod shown;
#[expect(unsafe_code, reason = "masks, dispositions, and what runs between fork and exec")]
pub mod signals;
