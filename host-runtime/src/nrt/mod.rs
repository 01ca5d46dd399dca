//! The public API: [`Runtime`], [`Communicator`], [`Tensor`], [`Io`].
//!
//! ```text
//! let runtime = Runtime::open(RuntimeConfig::from_env()?)?;
//! let id = runtime.unique_id(nranks)?;                        // on one rank; hand it to the others
//! let mut comm = runtime.init_comm(CommOptions::with_id(id, rank, nranks))?;
//! let t = comm.tensor(4 * 1024)?;
//! comm.all_reduce(Io::in_place(&t), 1024, DataType::Fp32, ReduceOp::Sum)?;
//! ```

mod collectives;
mod communicator;
mod group;
mod runtime;
mod tensor;

pub use collectives::{Peers, Reduction};
pub use communicator::{CommOptions, Communicator, Rendezvous};
pub use group::Group;
pub use runtime::{Runtime, RuntimeConfig};
pub use tensor::{Io, Tensor};
