//! `wccl info`: what this host is and allows.

use std::process::ExitCode;

use sandbox::limits::{Limits, MAX_PLUGIN_BYTES, MAX_SCHEDULES};
use wccl::{Launched, Runtime, RuntimeConfig};

use crate::size;
use crate::term::{self, Paint};

const EXAMPLES: &str = "\
Examples:
  wccl info
  NEURON_RT_FAKE_INSTANCE_TYPE=trn1.32xlarge wccl info
  WCCL_PLUGIN=my.wasm wccl info

Exit code: 0 if the plugin loads, else 1.";

/// Arguments of `wccl info`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {}

/// Prints it.
///
/// # Errors
/// A variable that makes no sense.
pub fn start(_: &Args) -> anyhow::Result<ExitCode> {
    let paint = Paint::stdout();
    let config = RuntimeConfig::from_env()?;
    // A runtime that is open has raised the limit of descriptors.
    let limits = hw_bridge::os::exhausted::limits();
    // With a service none of it runs here.
    let runtime = Runtime::open(RuntimeConfig { examine: config.service.is_none(), ..config })?;
    let (config, device) = (runtime.config(), &runtime.tenant().device);
    let mut lines = Vec::new();
    let mut head = |title: &str, rows: Vec<(&str, String)>| {
        if !lines.is_empty() {
            lines.push(String::new());
        }
        lines.push(paint.bold(title));
        lines.extend(rows.into_iter().map(|(k, v)| format!("  {k:<26}{v}")));
    };

    let info = device.instance_info();
    let version = device.version();
    let nics = device.nics();
    let speeds = nics.iter().map(|n| u64::from(n.speed_mbps)).sum::<u64>() / 1000;
    head(
        "Modelled server",
        vec![
            (
                "family",
                format!("{} ({}, revision {})", term::instance_type(device), info.arch_name, info.device_revision),
            ),
            (
                "devices",
                format!(
                    "{} of at most {}, on {} NUMA nodes",
                    device.device_count(),
                    device.max_devices(),
                    device.numa_node_count()
                ),
            ),
            (
                "cores",
                format!(
                    "{} logical ({} a device; {} physical a device, {} fused to one)",
                    device.total_vnc_count(),
                    device.logical_cores_per_device(),
                    device.cores_per_device(),
                    device.virtual_core_size()
                ),
            ),
            ("cores of this process", device.visible_cores().len().to_string()),
            ("device memory", format!("{} of address space a core", size::short(config.hbm_bytes))),
            ("NICs", format!("{}, {speeds} Gbit/s together", nics.len())),
            ("runtime played", version.rt_detail.to_string()),
        ],
    );

    let refused = runtime.load_error();
    let mut rows = vec![("file", config.plugin.as_ref().map_or("none".into(), |p| p.display().to_string()))];
    match (&refused, runtime.forward().version_info()) {
        (None, Ok(v)) => {
            let [a, b, c, d] = v.numbers;
            rows.push(("loads", paint.good(&format!("yes, {a}.{b}.{c}.{d}, compatibility {}", v.compatibility))));
        }
        (None, Err(e)) => rows.push(("loads", paint.bad(&format!("yes, but its probe fails: {e}")))),
        (Some(e), _) => rows.push(("loads", paint.bad(&format!("no: {}", e.sentinel)))),
    }
    rows.push(("net plugin", config.net_plugin.as_ref().map_or("none".into(), |p| p.display().to_string())));
    rows.push(("algorithm", config.algorithm.map_or("by size".into(), |a| format!("{}, forced", a.name()))));
    let one_hop =
        config.one_hop_max.map_or("depends on the collective and the group".into(), |b| format!("{b} bytes of a rank"));
    rows.push(("one hop up to", one_hop));
    let table = config.table.as_ref().map_or("none".into(), |t| format!("{} rows, {:08x}", t.rows().len(), t.digest()));
    rows.push(("choice table", table));
    rows.push(("deadline of a call", format!("{:?}", config.timeout)));
    head("Collectives plugin", rows);

    let job = match Launched::from_env() {
        Ok(job) => {
            let said = format!("{} of {}", job.rank, job.nranks);
            vec![("rank", said), ("meets at", job.root), ("as said by", job.from)]
        }
        Err(e) => vec![("rank", format!("none: {e}"))],
    };
    head("Job (what Communicator::from_env joins)", job);

    let mut rows = vec![("cores", cores()), ("features for reductions", features())];
    rows.extend(limits);
    head("This machine", rows);

    let l: &Limits = &config.limits;
    head(
        "Limits of a plugin",
        vec![
            ("policy", config.policy.as_ref().map_or("none".into(), |p| format!("of tenant {}", p.tenant))),
            ("file", size::short(MAX_PLUGIN_BYTES)),
            (
                "memory",
                format!("{} an instance, {} in all", size::short(l.memory as u64), size::short(l.memory_in_all as u64)),
            ),
            ("guest time", format!("{:?} a call", l.call)),
            ("handed over", format!("{} a host call", size::short(l.hostcall_bytes as u64))),
            ("table elements", l.table.to_string()),
            ("communicators", l.communicators.to_string()),
            ("background tasks", l.tasks.to_string()),
            ("sockets", format!("{} in all", l.sockets)),
            ("host objects", format!("{} an instance", l.objects)),
            ("log lines", format!("{} a second in all", l.log_rate)),
            ("ranks of a server", hw_bridge::limits::MAX_LOCAL_RANKS.to_string()),
            ("schedules kept", format!("{MAX_SCHEDULES} a communicator")),
        ],
    );

    let granted = sandbox::served::GRANTED;
    let value = |name: &str| config.vars.get(name).cloned().unwrap_or_else(|| paint.dim("not set"));
    lines.push(String::new());
    lines.push(paint.bold("Variables granted to plugins"));
    lines.extend(granted.iter().map(|name| format!("  {name:<34}{}", value(name))));
    term::print(&lines.join("\n"))?;
    Ok(if refused.is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn cores() -> String {
    std::thread::available_parallelism().map_or_else(|e| format!("unknown: {e}"), |n| n.to_string())
}

/// The processor features that the reduction kernels have variants for, as far as this processor has them.
#[cfg(target_arch = "x86_64")]
fn features() -> String {
    let all = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512dq", is_x86_feature_detected!("avx512dq")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
    ];
    let kernels = match all.map(|(_, yes)| yes) {
        [_, true, true, true, true, true] => "AVX-512",
        [true, true, ..] => "AVX2",
        _ => "portable",
    };
    let names: Vec<&str> = all.iter().filter(|(_, yes)| *yes).map(|(n, _)| *n).collect();
    format!("{}; {kernels} kernels serve", if names.is_empty() { "none".into() } else { names.join(" ") })
}

/// The processor features that the reduction kernels have variants for: none on this architecture.
#[cfg(not(target_arch = "x86_64"))]
fn features() -> String {
    "those of the build; portable kernels serve".into()
}
