//! The subcommands, one file each.
//!
//! | room | owns |
//! |---|---|
//! | `demo` and its `act_two`, `bench`, `peer`, `run`, `serve`, `plugin`, `tenant`, `swap`, `info`, `top` | subcommands (`peer` is the machine-readable form of `bench`) |
//! | `tune`, `explain`, `pingpong` | further forms of `bench`: what is fastest where, what would be done and why, messages |
//! | `worker` | starting ranks of one's own, and the hidden subcommand that is one |
//! | `sweep` | the collectives and sizes that a table goes through |

mod act_two;
pub mod bench;
pub mod demo;
mod explain;
pub mod info;
mod peer;
mod pingpong;
pub mod plugin;
pub mod run;
pub mod serve;
pub mod swap;
mod sweep;
pub mod tenant;
pub mod top;
mod tune;
pub mod worker;
