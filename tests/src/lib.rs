//! What the whole-system tests share.
//!
//! | module | holds |
//! |---|---|
//! | [`reduction`] | the numbers of an all-reduce that is checked |
//! | [`sentence`] | patterns for sentences that are expected |
//! | [`zoo`] | plugins of every kind, good and hostile, made in milliseconds without a compiler |

pub mod reduction;
pub mod sentence;
pub mod zoo;
