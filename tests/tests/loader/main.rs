//! The loader against plugins of every kind: what it lets in, what it refuses and with which sentence, and what a plugin
//! that misbehaves after the load can do (forward-abi, reverse-abi; INV-01 to INV-19). And the contracts that both sides
//! are built from.
//!
//! `table` holds the plugins as data; docs/loader-zoo.md is written from it. `contracts` reads wit/ and opens no plugin.

#[expect(unsafe_code, reason = "a variable for this process, before there are threads")]
mod support;

mod boundary;
mod by_hand;
mod callbacks;
mod contracts;
mod gates;
mod look;
mod net;
mod table;
mod whole_table;
