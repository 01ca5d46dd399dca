//! What is measured on the whole process, its descriptors, threads and memory: one test at a time, with no other beside it.
//!
//! A test binary runs its tests as threads of one process, so each test here holds [`ALONE`] as long as it runs. A test that
//! measures nothing of the process belongs into another binary.
//!
//! | file | holds |
//! |---|---|
//! | `abort` | an init that is aborted leaves no descriptor |
//! | `unload` | a plugin that is loaded and unloaded again and again leaves nothing |

#[path = "../common/mod.rs"]
mod common;

mod abort;
mod unload;

use std::sync::{Mutex, MutexGuard, PoisonError};

static ALONE: Mutex<()> = Mutex::new(());

/// Waits until no other test runs; the next one runs when the guard is dropped.
fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
