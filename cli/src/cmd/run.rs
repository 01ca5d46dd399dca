//! `wccl run`: starts a program once per rank.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use crate::launch::launcher::{self, Launch};

const EXAMPLES: &str = "\
Examples:
  wccl run -r 4 -- ./train --epochs 3
  wccl run -r 2 --tag -- sh -c 'echo rank $RANK of $WORLD_SIZE'

Each rank gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, NEURON_RT_ROOT_COMM_ID (another port than \
MASTER_PORT, and with a service the one that is set, if one is: it must be one that the tenant may listen on) and, unless it is set, CCOM_SOCKET_IFNAME=lo and a random WCCL_JOB_SECRET, by which the ranks know one another. Rank 0 reads stdin, the others read nothing.

When a rank fails, the others get SIGTERM and after --grace SIGKILL, and the failed one is named. The same happens when wccl \
itself is killed, SIGKILL included. When no rank runs any more, what ranks have started and left ends in the same way.

Signals to wccl are handed on to the ranks: HUP, USR1, USR2, WINCH, CONT; TSTP, which stops the ranks and then wccl; INT, TERM \
and QUIT, after which SIGKILL follows when the grace is over, or at a second Ctrl-C. A signal that wccl was started with as \
ignored (nohup) stays ignored.

Exit code: 0 if every rank ended with 0; that of the first rank that failed; 128 and the number of the signal that killed it; 1 if \
the ranks could not be started. A wccl that INT, TERM or QUIT asked to end ends by that signal when its ranks have ended; as the \
first process of a container it exits with 128 and its number.";

/// Arguments of `wccl run`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Ranks to start on this machine
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=4096))]
    ranks: u64,
    /// Put `[rank] ` before each line of output
    #[arg(long)]
    tag: bool,
    /// Socket of the service that has the devices and plugins (WCCL_SERVICE)
    #[arg(long, value_name = "SOCKET", env = "WCCL_SERVICE")]
    service: Option<std::path::PathBuf>,
    /// Seconds that ranks have to end in, after they were asked to and before SIGKILL
    #[arg(long, value_name = "S", default_value = "30", value_parser = crate::size::seconds)]
    grace: Duration,
    /// The program and its arguments
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

/// Starts the ranks and waits for all.
///
/// # Errors
/// The program cannot be started, or a rank failed.
pub fn start(args: &Args) -> anyhow::Result<ExitCode> {
    let (program, rest) =
        args.program.split_first().ok_or_else(|| crate::usage::UsageError("no program is named".into()))?;
    let group = Launch {
        ranks: args.ranks as usize,
        program: program.clone(),
        args: rest.to_vec(),
        vars: args.service.as_deref().map(launcher::served).unwrap_or_default(),
        tag: args.tag,
        stdin: true,
        grace: args.grace,
    };
    group.run()?;
    Ok(ExitCode::SUCCESS)
}
