//! `cargo xtask soak` and `isolation`: builds what the program needs and runs it. The programs themselves are in
//! `tests/src/bin`; they read the options and print their own help.

use std::process::{self, Command};

use anyhow::{Result, bail};

use crate::Workspace;
use crate::step::{self, Failure};

/// Builds the guests and the program `name`; answers the command to run.
///
/// # Errors
/// A build failed.
pub fn command(workspace: &Workspace, name: &str) -> Result<Command> {
    workspace.build_guests()?;
    let mut cargo = workspace.cargo();
    // All of the workspace, so that dependencies keep the features they were built with.
    cargo.args(["build", "--release", "--workspace", "--bin", name]);
    let notice = format!("building {name}; the first time takes minutes, most of them for the WebAssembly runtime");
    let log = workspace.logs.join(format!("{name}.{}.log", process::id()));
    match step::run(&mut cargo, &notice, &log, crate::BUILD_LIMIT) {
        Ok(()) => {}
        Err(Failure::Refused(_, tail)) => {
            bail!("{name} did not build. The end of what cargo said (all of it: {}):\n{tail}", log.display())
        }
        Err(failure) => bail!("{name} did not build: cargo {}", failure.reason()),
    }
    let program = workspace.program(name)?;
    Ok(Command::new(program))
}
