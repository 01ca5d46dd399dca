//! Collective communication between the ranks of a program, its transport a sandboxed component.
//!
//! *Wasm plans, native moves*: a component decides who talks to whom, over what, in which order; its decisions are plain
//! data, which [`enc`] compiles into schedules that `hw-bridge` executes with no component call in the steady state.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use wccl::{Communicator, Sum};
//!
//! let mut comm = Communicator::from_env()?;                   // what the launcher has set
//! let mut x = comm.tensor_from(&[1.0f32; 1000])?;             // device memory, which peers reach directly
//! comm.all_reduce(&mut x, Sum)?;                              // in place; all_reduce_into(&x, &mut y, Sum) otherwise
//! let mut private = vec![1.0f32; 1000];
//! comm.all_reduce(&mut private, Sum)?;                        // slices, arrays and vectors serve too
//! let gathered = comm.all_gather(&x)?;                        // a tensor of all ranks' elements
//!
//! let mut stream = comm.stream(0)?;                           // in the background; the same stream on all ranks
//! let pending = stream.all_reduce(x, Sum);                    // takes x; issuing never fails
//! let x = pending.wait()?;                                    // gives x back, with an error too
//!
//! comm.send(1, 7, &[2.5f32; 4])?;                             // to rank 1, tag 7, without the other ranks
//! let got = comm.recv(None, Some(7), &mut [0f32; 4])?;        // from any: got.from, got.len
//! # Ok(())
//! # }
//! ```
//!
//! [`CommOptions`] and [`Runtime`] join otherwise than by the environment. Bindings, and who knows an element type only when the
//! program runs, use the dynamic form: [`Communicator::raw`], [`Stream::raw`].
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
//! | [`error`] | what can go wrong |
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
pub mod error;
mod launched;
pub mod message;
pub mod metrics;
mod plane;
pub mod serve;
pub mod swap;
mod turns;

pub use api::{
    Buffer, BufferMut, Buffers, CommOptions, Communicator, Delivered, DeviceMemory, Element, Failed, Fp8E3, Fp8E4,
    Fp8E5, Fp32r, Group, InProcess, Io, Message, MessageBuffer, OnDevice, OwnedReduction, Payload, Peers, Pending,
    Progress, Raw, RawStream, Received, Reduction, ReductionOf, Room, Runtime, Stream, Tensor, Within, groups,
};
pub use config::RuntimeConfig;
pub use enc;
pub use error::Error;
pub use half::{bf16, f16};
pub use hw_bridge::call::ReduceOp::{Avg, Max, Min, Prod, Sum};
pub use hw_bridge::call::{DataType, ReduceOp};
pub use launched::Launched;
pub use plane::join::Rendezvous;
pub use sandbox::{abort, limits, policy, status, tenant, vars};
