//! Faults that users of other systems met, run here as they would meet them, and the words they see. docs/faults.md lists
//! them.
//!
//! Every wait has a bound against hangs, [`support::HANG`]. Where the product promises "within a second", the time is printed; what
//! is asserted is that nobody waited for a deadline: the ranks' are later than that bound, where a test sets none.
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
//! | `suspended` | a job, or one rank of it, that is stopped and goes on |

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
mod suspended;
