//! What can be asked of a communicator: operations, element types, reductions.
//!
//! | room | owns |
//! |---|---|
//! | `operation` | the operations, and what each rank says it is about to do |
//! | `types` | NRT data types and reductions |

mod operation;
mod types;

pub(crate) use operation::describe;
pub use operation::{ALGORITHMS, FLAG_IN_PLACE, FLAG_PRIVATE, Facts, Op, OpHeader};
pub use types::{DataType, Fp8, ParseError, ReduceOp};
pub(crate) use types::{F32_NAN, decode_small, encode_small};
