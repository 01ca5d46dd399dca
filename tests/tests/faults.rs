//! Faults that users of other systems met, run here as they would meet them: ranks are processes of the bin `fault`, and the
//! words they see are asserted. docs/faults.md lists them.
//!
//! Every wait has a bound against hangs, [`support::HANG`]; where the product promises "within a second", the time is
//! measured and printed, and asserted with the margin [`support::SOON`], because machines that run tests are loaded.

mod common;

#[path = "faults/calls.rs"]
mod calls;
#[path = "faults/direct.rs"]
mod direct;
#[path = "faults/limits.rs"]
mod limits;
#[path = "faults/page.rs"]
mod page;
#[path = "faults/start.rs"]
mod start;
#[path = "faults/support.rs"]
mod support;
