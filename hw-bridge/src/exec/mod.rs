//! Running what was compiled.
//!
//! | room | owns |
//! |---|---|
//! | [`sequencer`] | the step language, and executing it |
//! | [`mod@reduce`] | vectorised arithmetic over NRT data types |
//! | [`share`] | whose turn it is, among tenants |

#[expect(unsafe_code, reason = "arithmetic on raw memory, vector instructions")]
pub mod reduce;
#[expect(unsafe_code, reason = "runs steps on raw memory")]
pub mod sequencer;
#[expect(unsafe_code, reason = "a mapped page that tenants share")]
pub mod share;
