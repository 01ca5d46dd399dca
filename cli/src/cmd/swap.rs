//! `wccl swap`: replaces the plugin of a running job, on all its ranks or on none.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use wccl::swap::{self, Kind, Member, Order, Outcome, Report, Status};

use crate::term::{self, Paint};
use crate::usage::UsageError;

const EXAMPLES: &str = "\
Examples:
  wccl swap status my-tenant
  wccl swap plan my-tenant --plugin new.wasm       Would it go? Nothing is held up
  wccl swap start my-tenant --plugin new.wasm      All ranks or none, under load
  wccl swap start my-tenant --plugin new.wasm --stateless --force   The old one hangs
  wccl swap cancel my-tenant

The tenant of a program is `default` unless it says another. docs/swap.md says what happens in which order.
Exit codes: 0 done (plan: possible), 1 refused, 2 wrongly used.";

/// What to replace, and how.
#[derive(Debug, clap::Args)]
pub struct What {
    /// The tenant
    tenant: String,
    /// The new collectives plugin
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
    /// The new net plugin
    #[arg(long, value_name = "FILE", conflicts_with = "plugin")]
    net: Option<PathBuf>,
    /// Leave the old plugin's plans behind: for one that hangs, has stopped, or writes what the new one cannot read
    #[arg(long)]
    stateless: bool,
    /// Do not wait for calls that are inside the old plugin
    #[arg(long, requires = "stateless")]
    force: bool,
    /// Seconds for loading and preparing, while data flows
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    timeout: Duration,
    /// Seconds that ranks may stand still
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = seconds)]
    quiesce: Duration,
    /// Seconds that the old plugin stays beside, to serve again if the new one stops
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    probation: Duration,
}

/// Subcommands of `wccl swap`.
#[derive(Debug, clap::Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum Command {
    /// Load and prepare the new plugin everywhere, say what would happen, and drop it
    Plan(What),
    /// Replace it, and say what became of it on each rank
    Start(What),
    /// What each rank runs, and what its swaps are doing
    Status {
        /// The tenant
        tenant: String,
    },
    /// Have the swap under way given up, if it is not decided
    Cancel {
        /// The tenant
        tenant: String,
    },
}

fn seconds(text: &str) -> Result<Duration, String> {
    let parsed = text.parse::<f64>().ok().and_then(|s| Duration::try_from_secs_f64(s).ok());
    parsed
        .filter(|d| *d <= Duration::from_secs(86_400))
        .ok_or_else(|| "a number of seconds up to 86400 was expected".into())
}

/// Runs a subcommand.
///
/// # Errors
/// What stands in the way, in words.
pub fn start(command: &Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Plan(what) => swap_or_plan(what, true),
        Command::Start(what) => swap_or_plan(what, false),
        Command::Status { tenant } => {
            for status in swap::status(tenant)? {
                term::print(&told(&status))?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Command::Cancel { tenant } => {
            let done = swap::cancel(tenant)?;
            term::print(&format!("given up on {done} processes; the plugin they had runs on"))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn swap_or_plan(what: &What, dry: bool) -> anyhow::Result<ExitCode> {
    let (kind, plugin) = match (&what.plugin, &what.net) {
        (Some(file), _) => (Kind::Transport, file),
        (None, Some(file)) => (Kind::Net, file),
        (None, None) => return Err(UsageError("name the new plugin with --plugin FILE or --net FILE".into()).into()),
    };
    let order = Order {
        plugin: Some(plugin.clone()),
        stateless: what.stateless,
        force: what.force,
        dry,
        timeout: what.timeout,
        quiesce: what.quiesce,
        probation: what.probation,
        ..Order::new(&what.tenant, kind)
    };
    let report = swap::coordinate(&order)?;
    for member in &report.members {
        term::print(&outcome(member))?;
    }
    let possible = dry && report.members.iter().all(|m| matches!(m.outcome, Ok(Outcome::Possible(_))));
    term::print(&verdict(&report, possible, what))?;
    Ok(ExitCode::from(u8::from(!possible && !report.committed)))
}

fn verdict(report: &Report, possible: bool, what: &What) -> String {
    let (paint, tenant) = (Paint::stdout(), &what.tenant);
    if possible {
        return format!("{}: nothing was changed", paint.good("possible"));
    }
    if report.committed {
        let watch = if what.net.is_none() && !what.probation.is_zero() {
            format!("; in probation for {:?}, `wccl swap status {tenant}` tells", what.probation)
        } else {
            String::new()
        };
        return format!("{}, the longest pause was {:?}{watch}", paint.good("swapped"), report.pause());
    }
    format!("{}: {}; the plugin before runs on", paint.bad("refused"), report.reason)
}

fn who(status: &Status) -> String {
    let ranks: Vec<String> = status.ranks.iter().map(|(r, n)| format!("{r} of {n}")).collect();
    let ranks = if ranks.is_empty() { "no communicator".into() } else { format!("rank {}", ranks.join(", ")) };
    format!("pid {} ({ranks})", status.pid)
}

fn outcome(member: &Member) -> String {
    let text = match &member.outcome {
        Ok(Outcome::Swapped { generation, pause, ended }) => {
            let ended = if ended.is_empty() { String::new() } else { format!("; --force ended {}", ended.join(", ")) };
            format!("swapped, generation {generation}, pause {pause:?}{ended}")
        }
        Ok(Outcome::Possible(text)) => text.clone(),
        Ok(Outcome::Kept(why)) => format!("kept what it had: {why}"),
        Err(why) => format!("unknown: {why}"),
    };
    format!("{}: {text}", who(&member.status))
}

fn told(s: &Status) -> String {
    let short = s.digest.get(..12).unwrap_or("no plugin");
    let swap = if s.swap.is_empty() { "no swap under way" } else { &s.swap };
    let last = if s.last.is_empty() { String::new() } else { format!("; the last one: {}", s.last) };
    let c = s.counts;
    let lost = match c.lost_checkpoints {
        0 => String::new(),
        n => format!(", {n} plans not kept for a restart"),
    };
    format!(
        "{}: {} ({short}), generation {}; {swap}; {} committed, {} refused, {} went back{lost}{last}",
        who(s),
        s.plugin,
        s.generation,
        c.committed,
        c.refused,
        c.rolled_back
    )
}
