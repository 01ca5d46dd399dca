//! Pages that show what was measured.

pub mod plot;
