//! `cargo xtask fuzz`: the fuzz targets under libFuzzer, on the stable compiler and without cargo-fuzz.
//!
//! libFuzzer's C++ is built by its crate; the coverage it wants is switched on for this workspace's crates alone, by the script
//! `fuzz/rustc-with-coverage.sh`, in a target folder of its own, `target/fuzz`, so that other builds are not undone. New inputs
//! gather in `target/fuzz/corpus/TARGET`, findings in `target/fuzz/findings`.

use std::ffi::OsString;
use std::fs;
use std::process::{self, Command};

use anyhow::{Context, Result, bail};

use crate::step::{self, Failure, note};
use crate::{Usage, Workspace};

/// Seconds a target is tried, unless said otherwise.
const SECONDS: u64 = 180;
/// Seconds after which one input counts as a hang.
const HANG: u64 = 20;
/// Megabytes after which one input counts as a huge allocation.
const MEGABYTES: u64 = 2048;

/// Builds the fuzzer and tries one target, or all in turn; answers the exit code.
///
/// # Errors
/// A usage error; the fuzzer does not build; a finding.
pub fn run(workspace: &Workspace, arguments: &[OsString]) -> Result<u8> {
    let (wanted, seconds) = options(arguments)?;
    let known = targets(workspace)?;
    let chosen: Vec<&String> = match &wanted {
        None => known.iter().collect(),
        Some(name) if known.contains(name) => vec![name],
        Some(name) => {
            let known = known.join(", ");
            return Err(Usage(format!("There is no fuzz target \"{name}\"; there are {known}.")).into());
        }
    };
    compiler()?;
    // A target of its own tries the plugin of this project.
    workspace.build_guests()?;
    let mut cargo = workspace.cargo();
    cargo.args(["build", "--release", "--workspace", "--bin", "fuzz", "--features", "fuzz/libfuzzer"]);
    let place = workspace.root.join("target").join("fuzz");
    cargo.arg("--target-dir").arg(&place);
    cargo.env("RUSTC_WORKSPACE_WRAPPER", workspace.root.join("fuzz").join("rustc-with-coverage.sh"));
    let log = workspace.logs.join(format!("fuzz.{}.log", process::id()));
    match step::run(&mut cargo, "building the fuzzer; the first time takes minutes", &log, crate::BUILD_LIMIT) {
        Ok(()) => {}
        Err(Failure::Refused(_, tail)) => {
            bail!("the fuzzer did not build. The end of what cargo said (all of it: {}):\n{tail}", log.display())
        }
        Err(failure) => bail!("the fuzzer did not build: cargo {}", failure.reason()),
    }
    let program = place.join("release").join("fuzz");
    let findings = place.join("findings");
    fs::create_dir_all(&findings).with_context(|| format!("making {}", findings.display()))?;
    for name in chosen {
        let found = place.join("corpus").join(name);
        fs::create_dir_all(&found).with_context(|| format!("making {}", found.display()))?;
        note(&format!("target {name}, {seconds} s"));
        let mut fuzzer = Command::new(&program);
        // Changed plugins that compile are not to be kept.
        fuzzer.env("WCCL_FUZZ_TARGET", name).env("WCCL_CACHE_DIR", "off").current_dir(&place);
        fuzzer.arg(format!("-max_total_time={seconds}")).arg(format!("-timeout={HANG}"));
        fuzzer.arg(format!("-rss_limit_mb={MEGABYTES}")).arg("-print_final_stats=1");
        fuzzer.arg(format!("-artifact_prefix={}/{name}-", findings.display()));
        fuzzer.arg(&found).arg(workspace.root.join("fuzz").join("corpus").join(name));
        let code = crate::pass_on(&mut fuzzer)?;
        if code != 0 {
            bail!("target {name} found something (exit code {code}); the input is in {}", findings.display());
        }
    }
    Ok(0)
}

/// `[TARGET] [--seconds N]`, in any order.
fn options(arguments: &[OsString]) -> Result<(Option<String>, u64)> {
    let (mut target, mut seconds) = (None, SECONDS);
    let mut words = arguments.iter().map(|word| word.to_string_lossy());
    while let Some(word) = words.next() {
        let value = match word.as_ref() {
            "--seconds" => words.next(),
            other => match other.strip_prefix("--seconds=") {
                Some(value) => Some(value.to_owned().into()),
                None if other.starts_with('-') || target.is_some() => {
                    return Err(Usage(format!("fuzz does not know what \"{other}\" is for.")).into());
                }
                None => {
                    target = Some(other.to_owned());
                    continue;
                }
            },
        };
        seconds = match value.as_deref().map(str::parse) {
            Some(Ok(seconds @ 1..)) => seconds,
            _ => return Err(Usage("--seconds wants a number of seconds above 0.".into()).into()),
        };
    }
    Ok((target, seconds))
}

/// The targets: each has a folder of inputs.
fn targets(workspace: &Workspace) -> Result<Vec<String>> {
    let corpus = workspace.root.join("fuzz").join("corpus");
    let read = || -> std::io::Result<Vec<String>> {
        fs::read_dir(&corpus)?.map(|e| Ok(e?.file_name().to_string_lossy().into_owned())).collect()
    };
    let mut all = read().with_context(|| format!("reading {}", corpus.display()))?;
    all.sort();
    Ok(all)
}

/// Says what is missing before cargo fails somewhere in the middle.
fn compiler() -> Result<()> {
    let named = std::env::var_os("CXX").filter(|named| !named.is_empty()).unwrap_or_else(|| "c++".into());
    match Command::new(&named).arg("--version").output() {
        Ok(out) if out.status.success() => Ok(()),
        _ => bail!(
            "the fuzzer needs a C++ compiler for libFuzzer, and {} does not run; install one (Debian: g++) or name one in CXX",
            named.to_string_lossy()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(words: &[&str]) -> Result<(Option<String>, u64)> {
        options(&words.iter().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn a_target_and_seconds_in_any_order() {
        assert_eq!(read(&[]).unwrap(), (None, SECONDS));
        assert_eq!(read(&["table", "--seconds", "5"]).unwrap(), (Some("table".into()), 5));
        assert_eq!(read(&["--seconds=7", "links"]).unwrap(), (Some("links".into()), 7));
        for bad in [&["--seconds"][..], &["--seconds", "0"], &["--seconds=x"], &["a", "b"], &["--fast"]] {
            assert!(read(bad).unwrap_err().is::<Usage>(), "{bad:?}");
        }
    }
}
