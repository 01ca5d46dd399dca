//! `cargo xtask soak`: builds what the soak needs and runs it. The program itself is `tests/src/bin/soak`; it reads the
//! options and prints its own help.

use std::process::{self, Command};

use anyhow::{Result, bail};

use crate::Workspace;
use crate::step::{self, Failure};

/// Builds the guests and the program; answers the command to run.
///
/// # Errors
/// A build failed.
pub fn command(workspace: &Workspace) -> Result<Command> {
    workspace.build_guests()?;
    let mut cargo = workspace.cargo();
    // All of the workspace, so that dependencies keep the features they were built with.
    cargo.args(["build", "--release", "--workspace", "--bin", "soak"]);
    let notice = "building the soak; the first time takes minutes, most of them for the WebAssembly runtime";
    let log = workspace.logs.join(format!("soak.{}.log", process::id()));
    match step::run(&mut cargo, notice, &log, crate::BUILD_LIMIT) {
        Ok(()) => {}
        Err(Failure::Refused(_, tail)) => {
            bail!("the soak did not build. The end of what cargo said (all of it: {}):\n{tail}", log.display())
        }
        Err(failure) => bail!("the soak did not build: cargo {}", failure.reason()),
    }
    let program = workspace.program("soak")?;
    Ok(Command::new(program))
}
