//! What the whole-system tests share.
//!
//! | module | holds |
//! |---|---|
//! | [`zoo`] | plugins of every kind, good and hostile, made in milliseconds without a compiler |
//! | [`rewrite`] | the built library with single functions replaced by a trap or an endless loop |

pub mod rewrite;
pub mod zoo;
