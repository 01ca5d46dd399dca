//! `wccl serve`: the service that owns the devices and the plugins of this machine.

use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use hw_bridge::exec::share::Market;
use hw_bridge::os::signals::Ending;
use wccl::metrics::{MetricsServer, Usage};
use wccl::serve::{ServeConfig, Server, identify};
use wccl::{Runtime, RuntimeConfig};

const EXAMPLES: &str = "\
Examples:
  wccl serve --policies /etc/wccl/tenants --sockets /run/wccl
  wccl bench --service /run/wccl/red.sock -r 2 -b 8 -e 64M allreduce

SIGTERM or Ctrl-C: no new communicators are made, and the service ends when the tenants have none left, or after --drain. A second \
one ends it at once; operations of programs that run go on, their control calls fail.

docs/service.md explains policies and sockets.";

/// How often one looks whether tenants still work.
const LOOK: Duration = Duration::from_millis(100);

/// Arguments of `wccl serve`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Directory of policies, TENANT.toml
    #[arg(long, value_name = "DIR")]
    policies: PathBuf,
    /// Directory of sockets, one a tenant; made if absent
    #[arg(long, value_name = "DIR")]
    sockets: PathBuf,
    /// Address at which metrics are handed out, such as 127.0.0.1:9464: `GET /metrics`
    #[arg(long, value_name = "ADDR:PORT", conflicts_with = "metrics_socket")]
    metrics: Option<SocketAddr>,
    /// The same at a unix socket, which is made
    #[arg(long, value_name = "PATH")]
    metrics_socket: Option<PathBuf>,
    /// The programs of all tenants take turns at moving data, by the weights of their policies: for programs that do not
    /// lie to one another (docs/sharing.md)
    #[arg(long)]
    take_turns: bool,
    /// Programs of tenants may run as the service's own user, where a policy names that one in service.uids, or none; and those
    /// of two tenants as one user. Such a program can read and change all that the service, or the other tenant, has
    /// (docs/service.md)
    #[arg(long)]
    allow_own_user: bool,
    /// Seconds that the end waits for tenants that have communicators
    #[arg(long, value_name = "S", default_value_t = 600)]
    drain: u64,
}

fn say(line: &str) {
    // Whoever reads may have gone away; the service goes on.
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Serves until a signal.
///
/// # Errors
/// A policy that cannot be used, sockets that cannot be opened.
pub fn start(args: &Args) -> anyhow::Result<ExitCode> {
    // Before the first thread.
    let ending = Ending::take().context("taking SIGTERM over")?;
    let config = ServeConfig {
        policies: args.policies.clone(),
        sockets: args.sockets.clone(),
        allow_own_user: args.allow_own_user,
        base: RuntimeConfig { service: None, ..RuntimeConfig::from_env()? },
        market: args.take_turns.then(Market::create).transpose()?.map(Arc::new),
        identify,
    };
    let server = Server::start(&config)?;
    for (tenant, socket, runtime) in server.tenants() {
        match runtime.load_error() {
            None => say(&format!("tenant {tenant}: {}", socket.display())),
            Some(e) => say(&format!("tenant {tenant}: {}, without collectives: {}", socket.display(), e.sentinel)),
        }
    }
    let runtimes: Vec<Runtime> = server.tenants().map(|t| t.2.clone()).collect();
    let usage = move || runtimes.iter().map(Usage::of).collect();
    let metrics = match (args.metrics, &args.metrics_socket) {
        (Some(address), _) => Some(MetricsServer::tcp(address, usage)?),
        (None, Some(path)) => {
            // The service's own of before: it was killed, or this path is somebody else's and the bind fails.
            if std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket()) {
                std::fs::remove_file(path).with_context(|| format!("replacing {}", path.display()))?;
            }
            Some(MetricsServer::unix(path, usage)?)
        }
        (None, None) => None,
    };
    if let Some(address) = metrics.as_ref().and_then(MetricsServer::address) {
        say(&format!("metrics: http://{address}/metrics"));
    }
    say("serving");
    while !ending.wait(None).context("waiting for a signal")? {}
    Ok(if drain(&server, &ending, Duration::from_secs(args.drain))? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Waits until no tenant has a communicator; whether it came to that.
fn drain(server: &Server, ending: &Ending, most: Duration) -> anyhow::Result<bool> {
    server.end();
    let begun = Instant::now();
    let mut said = Vec::new();
    loop {
        let working = server.working();
        if working.is_empty() {
            say("ended");
            return Ok(true);
        }
        let who: Vec<String> = working.iter().map(|(t, n)| format!("tenant {t} has {n}")).collect();
        let who = who.join(", ");
        if working != said {
            say(&format!("ending, but communicators are in use: {who}; a second signal ends the service at once"));
            said = working;
        }
        if begun.elapsed() >= most || ending.wait(Some(LOOK)).context("waiting for a signal")? {
            say(&format!("ended with communicators in use: {who}"));
            return Ok(false);
        }
    }
}
