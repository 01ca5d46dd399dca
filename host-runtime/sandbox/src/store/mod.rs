//! Components at work: a compiled plugin, an instance of it in a store of its own, what the store holds.
//!
//! Words that are easily mixed up: a *plugin* is a file; a [`Library`] is a plugin that was compiled and whose imports
//! this host serves; an [`Instance`] is a library in a store of its own, the unit of failure, of limits and of swapping.

mod call;
pub mod engine;
mod grant;
mod instance;
mod library;
mod state;
#[cfg(test)]
mod tests;
mod wait;

pub use call::{EntryCall, Patience};
pub(crate) use grant::Denied;
pub use grant::Grant;
pub use instance::{Instance, Stop};
pub use library::Library;
pub(crate) use state::Ended;
pub use state::HostState;
pub(crate) use wait::Waited;
