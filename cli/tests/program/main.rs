//! The program `wccl` as a user runs it: each test starts it, and looks at what it prints and how it ends.
//!
//! | file | holds |
//! |---|---|
//! | `bench` | `wccl bench`: what it explains, measures, writes and draws |
//! | `ends` | how a group of `wccl run` ends, and signals to the launcher |
//! | `launch` | `wccl run`, when something goes wrong |
//! | `limits` | what the machine, a container or a hardened service does not give |
//! | `look` | `wccl top` and `wccl info` |

#[path = "../common/mod.rs"]
mod common;

mod bench;
#[expect(unsafe_code, reason = "what runs between fork and exec")]
mod ends;
mod launch;
#[expect(unsafe_code, reason = "what runs between fork and exec")]
mod limits;
mod look;
