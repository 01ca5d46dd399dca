//! Tenants: what each may use, how they share a machine, and the service that keeps them apart.
//!
//! | file | holds |
//! |---|---|
//! | `policy` | what a policy grants, and that nothing else is had |
//! | `serve` | the service, and everything that may go wrong between it and its clients |
//! | `share` | tenants that take turns |

#[path = "../common/mod.rs"]
mod common;

mod policy;
mod serve;
mod share;

use std::sync::{Mutex, Once};

use tests::events::{self, Events};

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps what any thread of this process logs from now on, up to INFO.
fn keep_log() {
    static ONCE: Once = Once::new();
    let keep = |e: &tracing::Event<'_>| LINES.lock().unwrap().push(events::fields(e));
    ONCE.call_once(|| tracing::subscriber::set_global_default(Events(tracing::Level::INFO, keep)).unwrap());
}

/// The lines that were kept and have all of `words`. Other tests' are among what was kept: let a word be of this test alone.
fn logged(words: &[&str]) -> Vec<String> {
    let lines = LINES.lock().unwrap();
    lines.iter().filter(|l| words.iter().all(|w| l.contains(w))).cloned().collect()
}
