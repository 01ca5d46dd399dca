//! Collective communication between the ranks of a program, its transport a sandboxed component.
//!
//! *Wasm plans, native moves*: a component decides who talks to whom, over what, in which order; its decisions are plain
//! data, which [`enc`] compiles into schedules that `hw-bridge` executes with no component call in the steady state.
//!
//! ```text
//! let mut comm = Communicator::from_env()?;                   // what the launcher set; or:
//! let runtime = Runtime::open(RuntimeConfig::from_env()?)?;
//! let id = runtime.unique_id(nranks)?;                        // on one rank; hand it to the others
//! let mut comm = runtime.init_comm(CommOptions::with_id(id, rank, nranks))?;
//!
//! let t = comm.tensor(4 * 1024)?;
//! comm.all_reduce(Io::in_place(&t), 1024, DataType::Fp32, ReduceOp::Sum)?;
//! ```
//!
//! In the background, on a stream, which takes the buffers and gives them back:
//!
//! ```text
//! let mut stream = comm.stream(0)?;                           // the same stream on all ranks
//! let request = stream.all_reduce(Buffers::in_place(&Arc::new(t)), 1024, DataType::Fp32, ReduceOp::Sum)?;
//! let buffers = request.wait()?;                              // or test(), or wait_for(patience)
//! ```
//!
//! With a deadline of its own: `comm.within(deadline).barrier()?`, `stream.within(deadline).barrier()?`.
//!
//! Some of the ranks: [`groups`]. Several sends and receives as one: [`Communicator::group`].
//!
//! Each room names only those above it:
//!
//! | room | holds |
//! |---|---|
//! | `turns` | a value for one user at a time |
//! | [`message`] | messages between processes of this machine |
//! | `config` | how a runtime is opened |
//! | `launched` | where a process stands in its job, as its launcher says |
//! | `plane` | the control plane of a rank: who plans for it, what that planned, the doors a swap holds shut |
//! | `client` | the control plane in another process: a client of the service |
//! | [`swap`] | replacing a tenant's library under running communicators; the socket on which operators ask for it |
//! | `api` | what programs use, all of it at the crate's root: runtime, communicators, streams, tensors, [`groups`] |
//! | [`serve`] | the service that owns the devices of a machine |
//! | [`metrics`] | what tenants have used, as Prometheus reads it |

#![forbid(unsafe_code)]

mod api;
mod client;
mod config;
mod launched;
pub mod message;
pub mod metrics;
mod plane;
pub mod serve;
pub mod swap;
mod turns;

pub use api::{
    Buffers, CommOptions, Communicator, Finished, Group, Io, OwnedReduction, Peers, Reduction, ReductionOf, Request,
    Runtime, Stream, Tensor, Within, groups,
};
pub use config::RuntimeConfig;
pub use enc;
pub use hw_bridge::call::{DataType, ReduceOp};
pub use launched::Launched;
pub use plane::join::Rendezvous;
pub use sandbox::{abort, error, limits, policy, status, tenant, vars};
