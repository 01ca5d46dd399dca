//! nccom-stuck: a release with a bug. It arranges rings for ever, so it hangs when a graph is built or a state is imported.
//! The demo and the tests show with it that a host stops such a plugin.

use nccom_core::rings::Ring;
use nccom_core::{Exports, Release};

/// This release.
#[derive(Debug)]
pub struct NccomStuck;

impl Release for NccomStuck {
    const NAME: &'static str = "nccom-stuck";
    const VERSION: &'static str = "2.32.1.0";
    const SOURCE: &'static str = include_str!("lib.rs");
    const STATE_SCHEMA: u32 = 1;

    fn arrange(_searched: &[Ring], _any_pair: bool) -> Vec<Ring> {
        loop {
            std::hint::spin_loop();
        }
    }
}

/// The component.
pub type Component = Exports<NccomStuck>;

// Natively the export names are no valid symbols for a linker's version script.
#[cfg(target_family = "wasm")]
nccom_core::bindings::export!(Component);
