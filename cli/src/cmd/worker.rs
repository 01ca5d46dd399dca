//! One rank of a demo or a bench: starting it, and the hidden subcommand that it is.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use enc::Algorithm;
use hw_bridge::limits::MAX_LOCAL_RANKS;
use sandbox::vars;
use serde::{Deserialize, Serialize};

use crate::cmd::{bench, demo, explain, peer, pingpong, tune};
use crate::launch::launcher::{self, GRACE, Launch};

/// Options of every subcommand that starts ranks of its own.
#[derive(Debug, Clone, clap::Args)]
pub struct Ranks {
    /// Ranks to start on this machine, each a process; more than there are cores works
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_LOCAL_RANKS as u64))]
    #[arg(default_value = "4")]
    pub ranks: u64,
    /// The collectives plugin, if not the one built by `cargo xtask guests`
    #[arg(long, value_name = "FILE", env = "WCCL_PLUGIN")]
    pub plugin: Option<PathBuf>,
    /// Socket of the service that has the devices and plugins (`wccl serve`); without, each rank has its own
    #[arg(long, value_name = "SOCKET", env = "WCCL_SERVICE")]
    pub service: Option<PathBuf>,
    /// Algorithm to use wherever it serves, as WCCL_ALGO: one-hop, mesh, ring, staged, halving, tree, two-level;
    /// default: by size
    #[arg(long, value_name = "NAME")]
    pub algo: Option<Algorithm>,
}

/// What a rank is to do. The launcher hands it to all ranks alike.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Job {
    /// The demo.
    Demo(demo::Job),
    /// The table of `bench`.
    Bench(bench::Job),
    /// The lines of `bench --peer`.
    Peer(peer::Job),
    /// `bench --tune`.
    Tune(tune::Job),
    /// `bench --explain`.
    Explain(explain::Job),
    /// `bench --pingpong`.
    PingPong(pingpong::PingJob),
}

/// Arguments of the hidden subcommand.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The job, as JSON.
    job: String,
}

/// Starts one process a rank for `job` and waits for all.
///
/// # Errors
/// A rank failed; the sentence names it.
pub fn launch(ranks: &Ranks, job: &Job, log: Option<&str>) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("finding this program's file")?.into_os_string();
    let json = serde_json::to_string(job).context("writing the job of the ranks")?;
    let mut vars = Vec::new();
    if let Some(log) = log {
        vars.push(("WCCL_LOG", OsString::from(log)));
    }
    if crate::log::LOG_FORMAT.get() == Some(&crate::log::LogFormat::Json) {
        vars.push(("WCCL_LOG_FORMAT", "json".into()));
    }
    if let Some(plugin) = &ranks.plugin {
        vars.push(("WCCL_PLUGIN", plugin.clone().into_os_string()));
    }
    if let Some(service) = &ranks.service {
        vars.extend(launcher::served(service));
    }
    if let Some(algorithm) = ranks.algo {
        vars.push(("WCCL_ALGO", algorithm.name().into()));
    }
    let args = vec!["__worker".into(), json.into()];
    Launch { ranks: ranks.ranks as usize, program, args, vars, tag: false, stdin: false, grace: GRACE }.run()
}

/// The hidden subcommand.
///
/// # Errors
/// Whatever stops this rank.
pub fn start(args: &Args) -> anyhow::Result<ExitCode> {
    let job: Job = serde_json::from_str(&args.job).context("reading this rank's job")?;
    let rank: usize = variable("RANK")?;
    let n: usize = variable("WORLD_SIZE")?;
    let done = match job {
        Job::Demo(j) => demo::work(&j, rank, n),
        Job::Bench(j) => bench::work(&j, rank, n),
        Job::Peer(j) => peer::work(&j, rank, n),
        Job::Tune(j) => tune::work(&j, rank, n),
        Job::Explain(j) => explain::work(&j, rank, n),
        Job::PingPong(j) => pingpong::work(&j, rank, n),
    };
    done.with_context(|| format!("rank {rank}"))
}

fn variable(name: &str) -> anyhow::Result<usize> {
    let text = vars::variable(name)?
        .with_context(|| format!("{name} is not set; ranks are started by `wccl demo` or `wccl bench`"))?;
    text.parse().with_context(|| format!("{name}={text}: a whole number was expected"))
}
