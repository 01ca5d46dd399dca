//! The program `wccl`, as a library: the binary is a call of [`main`], and tests and fuzzing use the rest.
//!
//! | room | holds |
//! |---|---|
//! | `cmd` | the subcommands, one file each, and what they share of their ranks |
//! | [`page`] | the page that shows a bench |
//! | [`rank`] | one rank of a demo or a bench: its seat, the calls, the results that must come out, timing |
//! | `launch` | processes of a group: start, watch, end; what they write |
//! | [`size`], `term`, `log`, `usage` | sizes and times as users write them; terminal output; what to log; wrong command lines |
//!
//! Exit codes: 0 done, 1 failed, 2 wrongly used; where ranks are started, that of the first that failed.

#![forbid(unsafe_code)]

mod cmd;
mod launch;
mod log;
pub mod page;
pub mod rank;
pub mod size;
mod term;
mod usage;

use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use sandbox::vars;
use tracing_subscriber::EnvFilter;

use crate::cmd::{bench, demo, info, plugin, run, serve, swap, tenant, top, worker};
use crate::launch::guard;
use crate::launch::launcher::{Interrupted, JobFailed};
use crate::log::{LOG_FORMAT, LogFormat};
use crate::usage::UsageError;

const EXAMPLES: &str = "\
Examples:
  wccl demo                                  Four ranks run and verify every collective
  wccl bench -r 2 -b 8 -e 64M -f 4 allreduce allgather
  wccl run -r 4 --tag -- ./my-program ARGS   Start a program once per rank
  wccl plugin inspect target/plugins/nccom.wasm
  wccl plugin check my-plugin.wasm           Would this host load it, and if not why
  wccl tenant check red.toml                 What a policy lets a tenant do
  wccl swap start default --plugin new.wasm  Replace the plugin of a running job
  wccl top                                   What the ranks on this machine are doing
  wccl info                                  The modelled server, the plugin, the limits

Exit codes: 0 done, 1 failed, 2 wrongly used; where ranks are started, that of the first that failed.";

#[derive(Parser)]
#[command(name = "wccl", version, about, after_help = EXAMPLES, max_term_width = 110)]
#[command(propagate_version = true, arg_required_else_help = true)]
struct Cli {
    /// What to log to stderr: error, warn, info, debug, trace, or per module like `sandbox=debug,warn`
    #[arg(long, global = true, env = "WCCL_LOG", value_name = "FILTER")]
    log: Option<String>,
    /// How to log: `text`, or `json` with a line an event
    #[arg(long, global = true, env = "WCCL_LOG_FORMAT", value_name = "FORMAT", default_value = "text")]
    log_format: LogFormat,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show that it works: start ranks, run every collective, verify every element
    Demo(demo::Args),
    /// Measure collectives, with the options of nccom-test and nccl-tests
    Bench(Box<bench::Args>),
    /// Start a program once per rank, with the variables that such programs expect
    Run(run::Args),
    /// Own the devices and plugins of this machine, and serve programs of several tenants
    Serve(serve::Args),
    /// Look into a plugin, ask whether this host would load it, or sign it
    #[command(subcommand)]
    Plugin(plugin::Command),
    /// What a policy lets a tenant do
    #[command(subcommand)]
    Tenant(tenant::Command),
    /// Replace the plugin of a running job, on all its ranks or on none
    #[command(subcommand)]
    Swap(swap::Command),
    /// The modelled server, the default plugin, limits and granted variables
    Info(info::Args),
    /// What the ranks on this machine are doing right now
    Top(top::Args),
    /// One rank of a demo or a bench.
    #[command(name = "__worker", hide = true)]
    Worker(worker::Args),
    /// The parent of the ranks of a group.
    #[command(name = "__guard", hide = true)]
    Guard(guard::Args),
}

fn start_log(cli: &Cli) -> anyhow::Result<()> {
    // Who asks about a plugin, or needs one, prints the reason of a refused load by itself.
    let usual = match cli.command {
        Command::Plugin(_) | Command::Info(_) => "off",
        Command::Worker(_) => "warn,wccl::api::runtime=off",
        _ => "warn",
    };
    let filter = match &cli.log {
        Some(f) => EnvFilter::try_new(f).map_err(|e| UsageError(format!("--log (or WCCL_LOG) is `{f}`: {e}")))?,
        None => EnvFilter::try_new(usual).context("making the default log filter")?,
    };
    let format = *LOG_FORMAT.get_or_init(|| cli.log_format);
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => log.with_ansi(std::io::stderr().is_terminal() && term::colours_wanted()).init(),
        LogFormat::Json => log.json().flatten_event(true).with_span_list(false).init(),
    }
    Ok(())
}

fn dispatch(cli: Cli) -> anyhow::Result<ExitCode> {
    start_log(&cli)?;
    let log = cli.log.as_deref();
    match cli.command {
        Command::Demo(a) => demo::start(&a, log),
        Command::Bench(a) => bench::start(&a, log),
        Command::Run(a) => run::start(&a),
        Command::Serve(a) => serve::start(&a),
        Command::Plugin(c) => plugin::start(&c),
        Command::Tenant(c) => tenant::start(&c),
        Command::Swap(c) => swap::start(&c),
        Command::Info(a) => info::start(&a),
        Command::Top(a) => top::start(&a),
        Command::Worker(a) => worker::start(&a),
        Command::Guard(a) => guard::serve(&a),
    }
}

/// An error with its causes, each said once: some name theirs already.
fn told(e: &anyhow::Error) -> String {
    e.chain().map(ToString::to_string).fold(String::new(), |said, cause| match said {
        said if said.is_empty() => cause,
        said if said.contains(&cause) => said,
        said => format!("{said}: {cause}"),
    })
}

/// The command line, with the variables that stand for options, which are read as all are ([`vars`]): a blank one counts as unset;
/// one that is not UTF-8 where no path is meant is an error that names it, whatever would have been read from it.
fn read() -> anyhow::Result<Cli> {
    fn unset(arg: clap::Arg, unreadable: &mut Option<String>) -> clap::Arg {
        let Some(name) = arg.get_env() else { return arg };
        let value = std::env::var_os(name);
        // A path is any bytes.
        if arg.get_value_parser().type_id() == std::any::TypeId::of::<std::path::PathBuf>() {
            return if vars::path(value).is_some() { arg } else { arg.env(None) };
        }
        match vars::text(&name.to_string_lossy(), value) {
            Ok(Some(_)) => arg,
            Ok(None) => arg.env(None),
            Err(e) => {
                unreadable.get_or_insert(e.to_string());
                arg.env(None)
            }
        }
    }
    fn unset_all(command: clap::Command, unreadable: &mut Option<String>) -> clap::Command {
        command.mut_args(|a| unset(a, unreadable)).mut_subcommands(|c| unset_all(c, unreadable))
    }
    let mut unreadable = None;
    let matches = unset_all(Cli::command(), &mut unreadable).get_matches();
    if let Some(why) = unreadable {
        return Err(UsageError(why).into());
    }
    Ok(Cli::from_arg_matches(&matches).unwrap_or_else(|e| e.exit()))
}

/// The program: reads the command line, does it, says what went wrong; answers the exit code.
pub fn main() -> ExitCode {
    // A guard keeps what its launcher has blocked for it: what is sent to all of a group must not end it before it has begun.
    if std::env::args_os().nth(1).is_none_or(|a| a != "__guard") {
        // If the kernel refuses even this, what follows says so better.
        let _ = hw_bridge::os::signals::forget_inherited();
    }
    match read().and_then(dispatch) {
        Ok(code) => code,
        Err(e) => {
            if let Some(i) = e.downcast_ref::<Interrupted>() {
                if let Some(said) = i.said() {
                    let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("wccl: {said}\n").as_bytes());
                }
                hw_bridge::os::signals::end_by(i.signal);
                return ExitCode::from(128 + i.signal.as_raw() as u8);
            }
            let usage = e.downcast_ref::<UsageError>().is_some();
            let failed = e.downcast_ref::<JobFailed>().map_or(1, |f| f.code);
            // Whoever reads our output went away: nothing is wrong here, and nobody is left to tell.
            let unread = e.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe);
            if !unread {
                // Stderr may be gone as well.
                let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("wccl: {}\n", told(&e)).as_bytes());
            }
            ExitCode::from(if usage { 2 } else { failed })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_said_once() {
        let source = std::io::Error::from_raw_os_error(2);
        let text = source.to_string();
        let e = wccl::Error::System { what: "reading the policies in /none".into(), source };
        let said = told(&anyhow::Error::from(e).context("serving"));
        assert_eq!(said, format!("serving: reading the policies in /none: {text}"));
    }
}
