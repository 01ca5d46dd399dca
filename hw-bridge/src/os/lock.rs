//! A mutex whose value stays in use after a panic of who had it: nothing here is left half-changed by one.

use std::sync::{Mutex, MutexGuard};

/// Locks `m`.
pub fn lock<T: ?Sized>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
