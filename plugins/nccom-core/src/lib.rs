//! nccom: the libnccom of this project. A release of it is a WebAssembly component: a crate of a few lines that says what is
//! its own ([`Release`]) and exports the rest from here.
//!
//! Rooms in the order data flows; all but the last four are pure and tested natively, without a sandbox:
//!
//! | room | owns |
//! |---|---|
//! | [`bytes`], [`fail`] | numbers in bytes; failures |
//! | [`bootstrap`] | ids, the root, joining, the ring all-gather, point-to-point messages |
//! | [`peers`] | the 112-byte record, host and process hashes, nodes |
//! | [`topo`] | topology documents, system graph, paths |
//! | [`search`] | ring search |
//! | [`rings`] | preset, postset, ring checks, what channels are made of the rings, comm info |
//! | [`connect`] | transport selection, connect records, the order of connects |
//! | [`state`] | a plan as bytes, for another instance |
//! | `sources` | which sources it was built from, for the tag that ranks compare |
//! | `host` | the imports behind the rooms' traits |
//! | `plan` | what this library keeps of each communicator |
//! | `exports` | the 37 entries, the task entry, the life cycle |

pub mod bootstrap;
pub mod bytes;
pub mod connect;
pub mod fail;
pub mod peers;
pub mod rings;
pub mod search;
pub mod state;
pub mod topo;

/// What one release of the library decides by itself. All releases speak the same bootstrap and read the same states.
pub trait Release {
    /// Its name, as `describe` gives it.
    const NAME: &'static str;
    /// Four numbers with points between them.
    const VERSION: &'static str;
    /// Its own source text. With the sources of this crate it makes the tag by which the ranks of a group know that they run one
    /// build: `include_str!("lib.rs")`.
    const SOURCE: &'static str;
    /// The schema of [`state`] that it writes.
    const STATE_SCHEMA: u32;

    /// The channels' rings, at most 32, from the searched ones. `any_pair`: any two ranks can be connected, not only those
    /// that the search made neighbours. Every rank must come to the same rings.
    fn arrange(searched: &[rings::Ring], any_pair: bool) -> Vec<rings::Ring>;
}

// What is generated raises and lowers values by hand.
#[allow(missing_docs, unsafe_code)]
pub mod bindings {
    wit_bindgen::generate!({
        path: ["../../wit/nrt", "../../wit/hw", "../../wit/nccom", "../../wit/net", "../../wit/lifecycle", "../../wit/worlds"],
        world: "wccl:worlds/transport-swappable",
        features: ["hw", "lifecycle"],
        generate_all,
        pub_export_macro: true,
        default_bindings_module: "nccom_core::bindings",
    });
}

mod exports;
mod host;
mod plan;
mod sources;

pub use exports::Exports;
