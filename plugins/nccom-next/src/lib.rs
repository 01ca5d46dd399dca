//! nccom-next: of every searched ring both directions and a stride order, so that rings use links that nccom leaves idle.

use nccom_core::rings::{Ring, both_ways_and_strided};
use nccom_core::{Exports, Release};

/// This release.
#[derive(Debug)]
pub struct NccomNext;

impl Release for NccomNext {
    const NAME: &'static str = "nccom-next";
    const VERSION: &'static str = "2.32.0.0";
    const SOURCE: &'static str = include_str!("lib.rs");
    const STATE_SCHEMA: u32 = 2;

    fn arrange(searched: &[Ring], any_pair: bool) -> Vec<Ring> {
        both_ways_and_strided(searched, any_pair)
    }
}

/// The component.
pub type Component = Exports<NccomNext>;

// Natively the export names are no valid symbols for a linker's version script.
#[cfg(target_family = "wasm")]
nccom_core::bindings::export!(Component);
