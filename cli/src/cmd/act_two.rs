//! The demo's second act: two tenants share this machine, each a group of ranks under load with every element checked. The
//! first one's transport is swapped back and forth; the second one starts a plugin that never comes back.
//!
//! What the second one loses by the swaps is measured against the same load without them: both tenants work all the time, and
//! each stretch with a swap is followed by one as long without, so that whatever else the machine does meets both alike.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use sandbox::limits::Limits;
use wccl::error::{Error, PluginError};
use wccl::{CommOptions, Runtime, RuntimeConfig};

use crate::rank::load::{Load, Sum, lost_and_wrong, percentile_ms};
use crate::term::ProgressLine;

const RANKS: usize = 2;
/// 64 KiB a message.
const COUNT: usize = 16 << 10;
const SWAPS: usize = 20;
/// Swaps before the comparison begins: a machine that has never run a release compiles it at its first one.
const WARM: usize = 2;
/// Rounds of the swapping tenant after each swap.
const ROUNDS: u64 = 10;
/// Time a call of the plugin that never comes back has.
const CALL: Duration = Duration::from_millis(300);

/// Runs it. Answers whether nothing was lost and nothing wrong. Without the other releases beside the
/// plugin there is no second act, and it says so.
///
/// # Errors
/// A tenant failed.
pub fn run(plugin: Option<&Path>) -> anyhow::Result<bool> {
    let progress = ProgressLine::start(true, "two tenants under load");
    let say = |text: &str| progress.print(text);
    let mut config = RuntimeConfig::from_env()?;
    if let Some(plugin) = plugin {
        config.plugin = Some(plugin.into());
    }
    config.vars.entry("CCOM_SOCKET_IFNAME".into()).or_insert("lo".into());
    let first = config.plugin.clone().context("there is no collectives plugin")?;
    let [next, stuck] = ["nccom-next.wasm", "nccom-stuck.wasm"].map(|name| first.with_file_name(name));
    for path in [&next, &stuck] {
        if !path.exists() {
            say(&format!("No second act: it needs {}, which `cargo xtask guests` builds", path.display()))?;
            return Ok(true);
        }
    }
    // Tenants of their own: whoever else runs on this machine is left alone.
    let pid = std::process::id();
    let tenant = |name: &str, id| RuntimeConfig { tenant: format!("{name}.{pid}"), tenant_id: id, ..config.clone() };
    let releases = [&first, &next];
    say("")?;
    say(&format!("Second act: two tenants, {RANKS} ranks each, all-reduce without a pause, every element checked"))?;
    let blue = Load::start(&tenant("blue", 1), RANKS, COUNT)?;
    let green = Load::start(&tenant("green", 2), RANKS, COUNT)?;
    let ran = (|| -> anyhow::Result<_> {
        blue.go_on(ROUNDS)?;
        green.go_on(ROUNDS)?;
        let mut pauses = Vec::with_capacity(SWAPS);
        let [mut with, mut without] = [Sum::default(); 2];
        for i in 0..SWAPS {
            let begin = green.mark();
            pauses.push(blue.swap(releases[(i + 1) % 2])?);
            blue.go_on(ROUNDS)?;
            let end = green.mark();
            if i >= WARM {
                std::thread::sleep(end.since(begin));
                with.add(begin, end);
                without.add(end, green.mark());
            }
        }
        say(&format!("blue     swapped {SWAPS} times between nccom and nccom-next, in the middle of its work"))?;
        let [with, without] = [with, without].map(|s| s.rate());
        let [is, was] = [with, without].map(|r| r.seconds * 1e6);
        say(&format!(
            "green    its all-reduce took {is:.0} us while blue swapped, and {was:.0} us in as long between the swaps, blue \
             working all the time"
        ))?;
        let stopped = endless(&RuntimeConfig { plugin: Some(stuck), ..tenant("green", 2) })?;
        say(&format!("green    started a plugin that never comes back: {stopped}"))?;
        green.go_on(ROUNDS)?;
        blue.go_on(ROUNDS)?;
        say("         its other group and the other tenant went on")?;
        Ok((percentile_ms(&mut pauses, 99), with.rounds / without.rounds))
    })();
    // A rank that failed says why, which is more than that it did not come.
    let all = [blue.stop().context("tenant blue")?, green.stop().context("tenant green")?];
    let (p99, ratio) = ran?;
    let [(lost, wrong), (l, w)] = all.map(|tallies| lost_and_wrong(&tallies));
    let (lost, wrong) = (lost + l, wrong + w);
    say(&format!(
        "swap: {SWAPS} swaps, pause p99 {p99:.1} ms, {lost} lost, {wrong} wrong, other tenant {ratio:.2} x its rate under the \
         same load without swaps"
    ))?;
    Ok(lost + wrong == 0)
}

/// Joins a group with a plugin that hangs; answers what the host said when it stopped it.
fn endless(config: &RuntimeConfig) -> anyhow::Result<String> {
    let limits = Limits { call: CALL, ..config.limits };
    let runtime = Runtime::open(RuntimeConfig { limits, ..config.clone() })?;
    let id = runtime.unique_id(1)?;
    match runtime.init_comm(CommOptions::with_id(id, 0, 1)) {
        Err(e @ Error::Plugin(PluginError::Stopped { .. })) => Ok(e.to_string()),
        Err(e) => Err(e.into()),
        Ok(_) => bail!("a plugin that never comes back came back"),
    }
}
