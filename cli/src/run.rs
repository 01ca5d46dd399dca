//! `wccl run`: starts a program once per rank.

use std::ffi::OsString;
use std::process::ExitCode;

use crate::launcher::{self, Group};

const EXAMPLES: &str = "\
Examples:
  wccl run -r 4 -- ./train --epochs 3
  wccl run -r 2 --tag -- sh -c 'echo rank $RANK of $WORLD_SIZE'

Each rank gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, NEURON_RT_ROOT_COMM_ID (another port than \
MASTER_PORT, and with a service the one that is set, if one is: it must be one that the tenant may listen on) and, unless it is set, CCOM_SOCKET_IFNAME=lo and a random WCCL_JOB_SECRET, by which the ranks know one another. Rank 0 reads stdin, the others read nothing.

When a rank fails, the others get SIGTERM and two seconds later SIGKILL, and the failed one is named. The same happens when \
wccl itself ends, by Ctrl-C or any signal, SIGKILL included. Not covered: processes that a rank started and that do not end with it.

Exit code: 0 if every rank ended with 0, else 1.";

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
    #[arg(long, value_name = "SOCKET")]
    service: Option<std::path::PathBuf>,
    /// The program and its arguments
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

/// Starts the ranks and waits for all.
///
/// # Errors
/// The program cannot be started, or a rank failed.
pub fn start(args: &Args) -> anyhow::Result<ExitCode> {
    let (program, rest) = args.program.split_first().ok_or_else(|| crate::Usage("no program is named".into()))?;
    let group = Group {
        ranks: args.ranks as usize,
        program: program.clone(),
        args: rest.to_vec(),
        vars: args.service.as_deref().map(launcher::served).unwrap_or_default(),
        tag: args.tag,
        stdin: true,
    };
    group.run()?;
    Ok(ExitCode::SUCCESS)
}
