//! What programs use: [`Runtime`], [`Communicator`], [`Stream`], [`Tensor`], [`Io`]; communicators of a communicator's ranks in
//! [`groups`]. The head of the crate shows it in use.

mod collectives;
mod communicator;
mod grouped;
pub mod groups;
mod runtime;
mod streams;
mod tensor;

pub use collectives::{OwnedReduction, Peers, Reduction, ReductionOf};
pub use communicator::{CommOptions, Communicator, Within};
pub use grouped::Group;
pub use runtime::Runtime;
pub use streams::{Buffers, Finished, Request, Stream};
pub use tensor::{Io, Tensor};
