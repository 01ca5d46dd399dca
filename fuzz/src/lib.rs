//! Fuzz targets: one plain function for each kind of bytes that come from outside.
//!
//! A target may panic on nothing, whatever it is given; where more is promised (what is printed is read back, a schedule
//! that was sealed stays inside its buffers), it asserts that. Two programs call them: `fuzz` under libFuzzer (`cargo
//! xtask fuzz`), and `replay` in the tests, over the kept inputs in `corpus/TARGET/` and small changes of them.
//!
//! | target | bytes of | read by |
//! |---|---|---|
//! | `table` | `WCCL_TUNE_FILE` | `enc::table` |
//! | `schedule` | a compiler of schedules gone wrong | `Schedule::seal`, `enc::check` |
//! | `topology`, `graph` | `NCCL_TOPO_FILE`, `NCCL_GRAPH_FILE` | `nccom_core::topo`, `nccom_core::search` |
//! | `bootstrap` | ranks and strangers on the bootstrap's sockets | `nccom_core::bootstrap::wire` and the records |
//! | `state-import` | the plan that another instance exported | `nccom_core::state` |
//! | `proxy` | the plugin's lists of network operations | `hw_bridge::proxy` |
//! | `loader` | a plugin file | `sandbox::load` |
//! | `guest` | a plugin that runs: what it calls of the host, in which order, with what | `sandbox::imports` |
//! | `control`, `operation` | a peer's control segment | `wccl top`, the sequencer |
//! | `links` | both ends of a link | `hw_bridge::memory::links` |
//! | `handshake` | who dials a bootstrap socket, or answers there | `sandbox::imports`, the handshake |
//! | `groups` | a group's meeting places and verdicts | `wccl::groups` |
//! | `environment` | variables | `RuntimeConfig`, `DeviceModel` |
//! | `policy` | a tenant's policy | `sandbox::policy` |
//! | `sizes` | the command line | `wccl` |
//! | `results` | files of `bench --peer-results` | `wccl bench --plot` |

#![forbid(unsafe_code)]

mod calls;
mod choice;
mod guest;
mod leak;
mod peer;
mod service;
mod user;

/// A target: its name, the function, and how many changed inputs a replay tries (fewer where one costs more).
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// On the command line, and the folder of its corpus.
    pub name: &'static str,
    /// What is called.
    pub run: fn(&[u8]),
    /// Changed inputs of a replay.
    pub changes: usize,
}

const fn target(name: &'static str, run: fn(&[u8]), changes: usize) -> Target {
    Target { name, run, changes }
}

/// All of them.
pub const TARGETS: [Target; 19] = [
    target("table", choice::table, 3000),
    target("schedule", choice::schedule, 3000),
    target("topology", guest::topology, 500),
    target("graph", guest::graph, 2000),
    target("bootstrap", guest::bootstrap, 5000),
    target("state-import", guest::state_import, 5000),
    target("proxy", guest::proxy, 5000),
    target("loader", guest::loader, 30),
    target("guest", calls::guest, 300),
    target("control", peer::control, 300),
    target("operation", peer::operation, 200),
    target("links", peer::links, 300),
    target("groups", peer::groups, 300),
    target("handshake", sandbox::imports::fuzzing::handshake, 5000),
    target("service", service::service, 300),
    target("environment", user::environment, 3000),
    target("policy", user::policy, 5000),
    target("sizes", user::sizes, 5000),
    target("results", user::results, 2000),
];

/// The target of that name.
///
/// # Errors
/// A sentence with the names that exist.
pub fn find(name: &str) -> Result<Target, String> {
    TARGETS.into_iter().find(|t| t.name == name).ok_or_else(|| {
        let known: Vec<&str> = TARGETS.iter().map(|t| t.name).collect();
        format!("There is no fuzz target `{name}`; there are {}.", known.join(", "))
    })
}
