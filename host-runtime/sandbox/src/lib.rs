//! The sandbox: loads a collectives library as a component, serves what it imports, calls what it exports.
//!
//! This is the only crate that names the WebAssembly runtime. A room names those below it in this table, never one above:
//!
//! | room | holds |
//! |---|---|
//! | [`lifecycle`] | `neuron:lifecycle`: what a hot swap asks of a plugin; a plan on its way from one instance to another |
//! | [`entries`] | the 37-slot table, gate 89, the sentinel, the wrappers |
//! | [`load`] | finding, verifying, compiling and caching a plugin |
//! | [`imports`] | the 16 + 4 callbacks, and the host side of `neuron:hw` |
//! | [`store`] | a component at work: library, instance, what its store holds; limits; traps |
//! | [`tenant`] | one tenant: what its plugins may use, and how often they stopped |
//! | [`policy`] | what an operator lets a tenant do, in one file |
//! | [`id`], `job` | unique ids; the secret of a job |
//! | [`error`] | what can go wrong |
//! | [`vars`], `file`, `place` | reading variables, files, and the user's own directory |
//! | [`status`], [`bindings`] | NRT_STATUS; the host side of the contracts, generated |
//! | [`objects`] | host objects that guests hold by handle |
//! | [`abort`], [`key`], [`accounts`] | ending a communicator; the key of a group; what a tenant has used |
//! | [`limits`], `served`, [`text`] | bounds; what this host serves, by name; a guest's words in a line |
//!
//! `unsafe` stands in [`load::cache`], which loads compiled code of its own, and nowhere else: the lint sees to it.

pub mod abort;
pub mod accounts;
pub mod bindings;
pub mod entries;
pub mod error;
mod file;
pub mod id;
pub mod imports;
pub mod job;
pub mod key;
pub mod lifecycle;
pub mod limits;
pub mod load;
pub mod objects;
mod place;
pub mod policy;
pub mod served;
pub mod status;
pub mod store;
pub mod tenant;
pub mod text;
pub mod vars;
