//! What programs compute: every operation, algorithm, type and size, in groups of every kind. Ranks are threads of this
//! process, each with a runtime of its own.
//!
//! | file | holds |
//! |---|---|
//! | `bounds` | no byte outside of a buffer is touched, no count is too large |
//! | `choice` | the choice of algorithms as ranks meet |
//! | `end_to_end` | each operation from the bootstrap to the result |
//! | `exact` | every type and size, bit for bit |
//! | `floats` | floating-point states that programs change, and averages of large numbers |
//! | `groups` | replica groups, split, shrink |
//! | `messages` | messages between two ranks |
//! | `snippets` | the Rust of the docs, which is compiled here |
//! | `streams` | operations in the background |
//! | `typed` | typed buffers: each call against what it should give, in both memories and in the background |

#[path = "../common/mod.rs"]
mod common;

#[expect(unsafe_code, reason = "buffers between pages that may not be touched")]
mod bounds;
mod choice;
mod end_to_end;
mod exact;
mod floats;
mod groups;
mod messages;
mod snippets;
mod streams;
mod typed;
