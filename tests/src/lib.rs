//! What the whole-system tests share.
//!
//! | module | holds |
//! |---|---|
//! | [`events`] | log events as they come |
//! | [`floats`] | inputs that a floating-point state would change, and a digest of results |
//! | [`port`] | ports that nobody else gets |
//! | [`reduction`] | the numbers of an all-reduce that is checked |
//! | [`sentence`] | patterns for sentences that are expected |
//! | [`zoo`] | plugins of every kind, good and hostile, made in milliseconds without a compiler |

#![forbid(unsafe_code)]

pub mod events;
pub mod floats;
pub mod port;
pub mod reduction;
pub mod sentence;
pub mod zoo;
