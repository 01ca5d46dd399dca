//! A plugin that is replaced, traps, hangs or is slow, under operations that do not notice.
//!
//! | file | holds |
//! |---|---|
//! | `all_or_none` | the protocol of a swap, and whatever may go wrong with it on any rank |
//! | `control` | control sockets: who is found at them, who is not |
//! | `proofs` | a plugin may trap, be aborted or be slow |
//! | `releases` | from one release of the transport to another and back |

#[path = "../common/mod.rs"]
mod common;

mod all_or_none;
mod control;
mod proofs;
mod releases;
