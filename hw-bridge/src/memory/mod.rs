//! Memory, and reaching a peer's.
//!
//! | room | owns |
//! |---|---|
//! | [`segment`] | sealed memfds |
//! | [`hbm`] | device memory in them |
//! | [`copy`] | plain and streaming copies |
//! | [`foreign`] | reading the private memory of a peer |
//! | [`links`] | granting memory to a peer and mapping a peer's |

#[expect(unsafe_code, reason = "copies of raw memory, vector instructions")]
pub mod copy;
#[expect(unsafe_code, reason = "the system call that reads a peer's memory")]
pub mod foreign;
#[expect(unsafe_code, reason = "copies to and from raw device memory")]
pub mod hbm;
pub mod links;
pub mod segment;
