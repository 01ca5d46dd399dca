//! Collective communication between the ranks of a program, its transport a sandboxed component.
//!
//! *Wasm plans, native moves*: a component decides who talks to whom, over what, in which order; its decisions are plain
//! data, which [`enc`] compiles into schedules that `hw-bridge` executes with no component call in the steady state.
//!
//! | room | holds |
//! |---|---|
//! | [`nrt`] | the public API |
//! | [`control`] | the socket on which operators ask of a running tenant |
//! | [`serve`] | the service that owns the devices of a machine, and its clients |
//! | [`message`] | messages between processes of this machine |
//! | [`metrics`] | what tenants have used, as Prometheus reads it |
//! | [`swap`] | replacing a tenant's library under running communicators |

#![forbid(unsafe_code)]

pub mod control;
pub mod message;
pub mod metrics;
pub mod nrt;
pub mod serve;
pub mod swap;
mod turns;

pub use enc;
pub use hw_bridge::call::{DataType, ReduceOp};
pub use sandbox::{abort, error, limits, policy, status, tenant, vars};
