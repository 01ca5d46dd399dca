//! nccom: every searched ring, and a copy of each.

use nccom_core::rings::{Ring, doubled};
use nccom_core::{Exports, Release};

/// This release.
#[derive(Debug)]
pub struct Nccom;

impl Release for Nccom {
    const NAME: &'static str = "nccom";
    const VERSION: &'static str = "2.31.24.0";
    const SOURCE: &'static str = include_str!("lib.rs");
    const STATE_SCHEMA: u32 = 1;

    fn arrange(searched: &[Ring], _any_pair: bool) -> Vec<Ring> {
        doubled(searched)
    }
}

/// The component.
pub type Component = Exports<Nccom>;

// Natively the export names are no valid symbols for a linker's version script.
#[cfg(target_family = "wasm")]
nccom_core::bindings::export!(Component);
