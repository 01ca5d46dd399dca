//! The public API: [`Runtime`], [`Communicator`], [`Tensor`], [`Io`]; communicators of a communicator's ranks in [`groups`].
//!
//! ```text
//! let runtime = Runtime::open(RuntimeConfig::from_env()?)?;
//! let id = runtime.unique_id(nranks)?;                        // on one rank; hand it to the others
//! let mut comm = runtime.init_comm(CommOptions::with_id(id, rank, nranks))?;
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

mod collectives;
mod communicator;
pub(crate) mod control;
mod dump;
mod grouped;
pub mod groups;
pub(crate) mod plane;
mod runtime;
mod streams;
mod tensor;

pub use collectives::{OwnedReduction, Peers, Reduction, ReductionOf};
pub use communicator::{CommOptions, Communicator, Rendezvous, Within};
pub use grouped::Group;
pub(crate) use runtime::Inner;
pub use runtime::{Runtime, RuntimeConfig};
pub use streams::{Buffers, Finished, Request, Stream};
pub use tensor::{Io, Tensor};
