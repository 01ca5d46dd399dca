//! Faults that users of other systems met, run here as they would meet them, and the words they see. docs/faults.md lists
//! them.
//!
//! Every wait has a bound against hangs, [`support::HANG`]; where the product promises "within a second", the time is
//! measured and printed, and asserted with the margin [`support::SOON`], because machines that run tests are loaded.
//!
//! | file | holds |
//! |---|---|
//! | `calls` | faults of operations; ranks are processes of the program `fault` |
//! | `deadlines` | deadlines of single calls; ranks are threads |
//! | `direct` | faults of memory that peers read in place |
//! | `limits` | limits of the machine |
//! | `page` | each row of docs/faults.md names a test |
//! | `processes` | ranks as processes of the program `rank`: deaths, ranks that never come, what is left behind |
//! | `soak` | the short form of the soak |
//! | `start` | faults of starting a group |

#[path = "../common/mod.rs"]
mod common;

mod calls;
mod deadlines;
mod direct;
mod limits;
mod page;
mod processes;
mod soak;
mod start;
mod support;
