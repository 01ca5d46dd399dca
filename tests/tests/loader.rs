//! The loader against plugins of every kind: what it lets in, what it refuses and with which sentence, and what a plugin
//! that misbehaves after the load can do (forward-abi, reverse-abi; INV-01 to INV-19).
//!
//! `table` holds the plugins as data; docs/loader-zoo.md is written from it.

#[path = "loader/support.rs"]
mod support;

#[path = "loader/boundary.rs"]
mod boundary;
#[path = "loader/by_hand.rs"]
mod by_hand;
#[path = "loader/callbacks.rs"]
mod callbacks;
#[path = "loader/gates.rs"]
mod gates;
#[path = "loader/net.rs"]
mod net;
#[path = "loader/table.rs"]
mod table;
#[path = "loader/whole_table.rs"]
mod whole_table;
