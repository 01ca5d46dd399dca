//! What the whole-system tests share.
//!
//! | module | holds |
//! |---|---|
//! | [`zoo`] | plugins of every kind, good and hostile, made in milliseconds without a compiler |

pub mod zoo;
