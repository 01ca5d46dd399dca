//! What the whole-system tests share.
//!
//! | module | holds |
//! |---|---|
//! | [`sentence`] | patterns for sentences that are expected |
//! | [`zoo`] | plugins of every kind, good and hostile, made in milliseconds without a compiler |

pub mod sentence;
pub mod zoo;
