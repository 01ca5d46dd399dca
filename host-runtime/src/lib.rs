//! The native host: plays libnrt, runs the collectives library as a sandboxed component, moves data natively.
//!
//! *Wasm plans, native moves*: a component decides who talks to whom, over what, in which order; its decisions are plain
//! data, which [`enc`] compiles into schedules that `hw-bridge` executes with no component call in the steady state.
//!
//! | room | holds |
//! |---|---|
//! | [`nrt`] | the public API |
//! | [`forward`] | the 37-slot table, gate 89, the sentinel, the wrappers |
//! | [`reverse`] | the 16 + 4 callbacks |
//! | [`hw`] | the host side of `neuron:hw` |
//! | `job` | the secret that a user's own jobs share |
//! | `key` | the secret by which the hosts of a group know one another |
//! | [`net`] | binding a net component |
//! | [`plugin`] | compiling, caching, instantiating components; limits; traps |
//! | [`policy`] | what an operator lets a tenant do, in one file |
//! | [`control`] | the socket on which operators ask of a running tenant |
//! | [`serve`] | the service that owns the devices of a machine, and its clients |
//! | [`message`] | messages between processes of this machine |
//! | [`metrics`] | what tenants have used, as Prometheus reads it |
//! | [`tenant`] | what a tenant may use and has used |
//! | [`vars`] | how values of variables are read |
//! | [`swap`] | replacing a tenant's library under running communicators |
//!
//! This is the only crate that names the WebAssembly runtime. `unsafe` stands in [`plugin::cache`], which loads compiled code of
//! its own, and nowhere else: the lint sees to it.

#![deny(unsafe_code)]

pub mod abort;
pub mod bindings;
pub mod control;
pub mod error;
pub mod forward;
pub mod hw;
mod job;
pub(crate) mod key;
pub mod limits;
pub mod message;
pub mod metrics;
pub mod net;
pub mod nrt;
pub mod plugin;
pub mod policy;
pub mod reverse;
pub mod serve;
pub mod status;
pub mod swap;
pub mod tenant;
mod turns;
pub mod vars;

pub use hw_bridge::call::{DataType, ReduceOp};
