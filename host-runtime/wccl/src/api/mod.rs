//! What programs use. The head of the crate shows it in use.
//!
//! | file | holds |
//! |---|---|
//! | `runtime` | an open runtime |
//! | `communicator` | one rank's membership |
//! | `element` | the element types |
//! | `tensor`, `buffer` | typed device memory; what a call may be given |
//! | `typed` | the collectives, blocking |
//! | `streams` | in the background |
//! | `raw`, `memory` | both in the dynamic form, for bindings |
//! | `collectives` | the engine under all of them |
//! | `messages` | from one rank to another, without the others |
//! | `grouped` | several sends and receives as one |
//! | [`groups`] | communicators of some of the ranks |

mod buffer;
mod collectives;
mod communicator;
mod element;
mod grouped;
pub mod groups;
mod memory;
mod messages;
mod raw;
mod runtime;
mod streams;
mod tensor;
mod typed;

pub use buffer::{Buffer, BufferMut, InProcess, OnDevice};
pub use collectives::{OwnedReduction, Peers, Reduction, ReductionOf};
pub use communicator::{CommOptions, Communicator, Within};
pub use element::{Element, Fp8E3, Fp8E4, Fp8E5, Fp32r};
pub use grouped::Group;
pub use hw_bridge::p2p::Received;
pub use memory::{DeviceMemory, Io};
pub use messages::{Delivered, Message, MessageBuffer, Payload, Room};
pub use raw::{Raw, RawStream};
pub use runtime::Runtime;
pub use streams::{Buffers, Failed, Pending, Progress, Stream};
pub use tensor::Tensor;
