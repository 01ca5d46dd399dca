//! `wccl tenant`: what a policy file lets a tenant do, in words.

use std::path::PathBuf;
use std::process::ExitCode;

use sandbox::policy::Policy;

use crate::term;

const EXAMPLES: &str = "\
Examples:
  wccl tenant check red.toml                 What may it do; or which line is wrong
  WCCL_POLICY=red.toml wccl plugin check nccom.wasm
                                             Would its plugin load under it

Reads the file only: that the plugins are there and are the right ones is seen when they are loaded.
The keys are in docs/tenants.md. Exit code: 0 if the policy can be used, else 1.";

/// Subcommands of `wccl tenant`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Say in plain words what the tenant of a policy file may do
    #[command(after_help = EXAMPLES)]
    Check {
        /// A policy (TOML)
        file: PathBuf,
    },
}

/// Runs the subcommand.
///
/// # Errors
/// The policy cannot be read, or a line of it is wrong.
pub fn start(command: &Command) -> anyhow::Result<ExitCode> {
    let Command::Check { file } = command;
    let policy = Policy::read(file)?;
    term::print(policy.to_string().trim_end())?;
    Ok(ExitCode::SUCCESS)
}
