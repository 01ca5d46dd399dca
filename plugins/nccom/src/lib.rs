//! nccom: the libnccom of this project, as a WebAssembly component.
//!
//! Rooms in the order data flows; all but the last three are pure and tested natively, without a sandbox:
//!
//! | room | owns |
//! |---|---|
//! | [`bootstrap`] | ids, the root, joining, the ring all-gather, point-to-point messages |
//! | [`peers`] | the 112-byte record, host and process hashes, nodes |
//! | [`topo`] | topology documents, system graph, paths |
//! | [`search`] | ring search |
//! | [`rings`] | preset, postset, ring checks, comm info |
//! | [`connect`] | transport selection, connect records, the order of connects |
//! | `host` | the imports behind the rooms' traits |
//! | `plan` | what this library keeps of each communicator |
//! | `exports` | the 37 entries, the task entry, the life cycle |

pub mod bootstrap;
pub mod connect;
pub mod fail;
pub mod peers;
pub mod rings;
pub mod search;
pub mod topo;

#[allow(missing_docs)]
mod bindings {
    wit_bindgen::generate!({
        path: ["../../wit/nrt", "../../wit/hw", "../../wit/nccom", "../../wit/net", "../../wit/lifecycle", "../../wit/worlds"],
        world: "wccl:worlds/transport-swappable",
        features: ["hw", "lifecycle"],
        generate_all,
    });

    // Natively the export names are no valid symbols for a linker's version script.
    #[cfg(target_family = "wasm")]
    use crate::exports::Nccom;
    #[cfg(target_family = "wasm")]
    export!(Nccom);
}

mod exports;
mod host;
mod plan;
