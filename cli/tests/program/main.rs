//! The program `wccl` as a user runs it: each test starts it, and looks at what it prints and how it ends.
//!
//! | file | holds |
//! |---|---|
//! | `bench` | `wccl bench`: what it explains, measures, writes and draws |
//! | `launch` | `wccl run`, when something goes wrong |
//! | `look` | `wccl top` and `wccl info` |

#[path = "../common/mod.rs"]
mod common;

mod bench;
mod launch;
mod look;
