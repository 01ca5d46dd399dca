//! What can go wrong with a plugin, by cause: the caller, the plugin, the system, ourselves.

use std::time::Duration;

use crate::status::Status;

/// Why a plugin that stopped is not called, and no instance made in the place of the one that did.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotCalled {
    /// It stopped too often.
    Quarantined {
        /// Stops in the window.
        stops: usize,
        /// The window.
        window: Duration,
        /// What stopped it last.
        last: String,
    },
    /// It stopped a moment ago.
    Pausing {
        /// How much longer.
        left: Duration,
        /// What stopped it.
        last: String,
    },
    /// This instance stopped, and no other takes its place.
    Gone {
        /// What stopped it, and in which entry.
        last: String,
    },
}

impl std::fmt::Display for NotCalled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NotCalled::Quarantined { stops, window, last } => write!(
                f,
                "it is quarantined: it stopped {stops} time{} in {window:?}, the last time because {last}; replace it \
                 (`wccl swap start`), or open the runtime again with a plugin that works",
                if *stops == 1 { "" } else { "s" }
            ),
            NotCalled::Pausing { left, last } => {
                write!(f, "it stopped a moment ago ({last}) and runs again in {left:?}; try again then")
            }
            NotCalled::Gone { last } => write!(f, "its instance stopped before: {last}"),
        }
    }
}

/// An error of the host of plugins. [`Error::status`] gives the NRT_STATUS a C caller would see.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller passed something that cannot be.
    #[error("{0}")]
    Usage(String),
    /// A configuration variable or option makes no sense.
    #[error("{0}")]
    Config(String),
    /// The collectives library did not load; every guarded wrapper answers so for the life of the runtime (INV-06).
    #[error("collectives are not available: {entry} was not called, because the load failed: {sentinel}")]
    NotLoaded {
        /// The entry asked for.
        entry: &'static str,
        /// Why the load failed.
        sentinel: String,
    },
    /// An entry of the library answered with a status.
    #[error("{entry} of plugin {plugin} failed on tenant {tenant}: {status}{}", listed(.causes))]
    Entry {
        /// The entry.
        entry: &'static str,
        /// The plugin.
        plugin: String,
        /// The tenant.
        tenant: String,
        /// What it answered.
        status: Status,
        /// Sentences that belong to it, the innermost first.
        causes: Vec<String>,
    },
    /// The plugin stopped before, and does not run again: not yet, or not at all, or not in an instance that had left no plan.
    #[error("{entry} of plugin {plugin} was not called on tenant {tenant}: {refusal}; data in flight goes on")]
    Supervised {
        /// The entry.
        entry: &'static str,
        /// The plugin.
        plugin: String,
        /// The tenant.
        tenant: String,
        /// Quarantine, a pause, or an instance that is gone.
        refusal: NotCalled,
    },
    /// The instance trapped, ran out of time or over a limit in this call.
    #[error("plugin {plugin} stopped in {entry} on tenant {tenant}: {cause}; data in flight goes on{}", listed(.causes))]
    Stopped {
        /// The entry.
        entry: &'static str,
        /// The plugin.
        plugin: String,
        /// The tenant.
        tenant: String,
        /// Trap, deadline or limit.
        cause: String,
        /// Sentences the host or guest left.
        causes: Vec<String>,
    },
    /// A library entry was called from inside a callback (INV-10).
    #[error(
        "{entry} of plugin {plugin} was called from inside one of its own callbacks; a nec_* or nrt_* callback must never enter the library (INV-10)"
    )]
    Reentered {
        /// The entry.
        entry: &'static str,
        /// The plugin.
        plugin: String,
    },
    /// Another call of the same instance did not end before this one's deadline. The instance is well: the call can be made again.
    #[error(
        "{entry} of plugin {plugin} was not called on tenant {tenant}: {inside} has kept its instance busy for {waited:?}; \
         call it again when that has come back"
    )]
    Busy {
        /// The entry.
        entry: &'static str,
        /// The plugin.
        plugin: String,
        /// The tenant.
        tenant: String,
        /// The entry that is inside.
        inside: &'static str,
        /// How long was waited.
        waited: std::time::Duration,
    },
    /// A limit of this process is too low for what was asked; the sentence names it, its value and the need.
    #[error("{0}")]
    Limit(String),
    /// Device memory.
    #[error(transparent)]
    Memory(#[from] hw_bridge::memory::hbm::HbmError),
    /// The system refused something.
    #[error("{what}: {source}{}", hw_bridge::os::exhausted::limit_of_threads(source))]
    System {
        /// What was tried.
        what: String,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// Our own mistake.
    #[error("{0}; this is an error of wccl, please report it")]
    Bug(String),
}

fn listed(causes: &[String]) -> String {
    if causes.is_empty() { String::new() } else { format!(": {}", causes.join("; ")) }
}

impl Error {
    /// The status a C caller would see.
    pub fn status(&self) -> Status {
        match self {
            Error::Usage(_) | Error::Config(_) => Status::INVALID,
            Error::NotLoaded { .. } | Error::Stopped { .. } | Error::Supervised { .. } => Status::FAILURE,
            // The plugin has done nothing wrong: whoever called has, or may call again.
            Error::Reentered { .. } => Status::INVALID,
            Error::Entry { status, .. } => *status,
            Error::Busy { .. } => Status::TIMEOUT,
            Error::Limit(_) | Error::Memory(_) | Error::System { .. } => Status::RESOURCE,
            Error::Bug(_) => Status::FAILURE,
        }
    }
}
