//! Whether each crate by itself is built of the same dependencies as the whole workspace: a feature that only the whole one has means
//! that `-p CRATE` builds them anew, minutes where the WebAssembly runtime is among them. A crate whose own tree gives a dependency
//! fewer features names it with all of them (Cargo.toml of the workspace, at its end).

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// What is built alone: by whoever works at one of them.
const ALONE: [&str; 8] = ["hw-bridge", "enc", "sandbox", "wccl", "wccl-cli", "tests", "fuzz", "xtask"];

/// Dependencies of a selection of packages, each with its features.
fn built(mut cargo: Command, select: &[&str]) -> Result<BTreeSet<String>> {
    cargo.args(["tree", "--edges", "normal,build,dev", "--prefix", "none", "--no-dedupe", "--format", "{p} [{f}]"]);
    let out = cargo.args(select).output().context("cargo could not be started")?;
    if !out.status.success() {
        bail!("cargo tree {} failed: {}", select.join(" "), String::from_utf8_lossy(&out.stderr).trim());
    }
    Ok(lines(&String::from_utf8_lossy(&out.stdout)))
}

/// Name, version and features of each line; where it lies and whether it was shown before are nobody's.
fn lines(tree: &str) -> BTreeSet<String> {
    let line = |l: &str| {
        let (package, features) = l.split_once(" [")?;
        let package: Vec<&str> = package.split(' ').take(2).collect();
        let features = features.split(']').next()?;
        Some(format!("{} [{features}]", package.join(" ")))
    };
    tree.lines().filter_map(line).collect()
}

/// The faults, in sentences.
///
/// # Errors
///
/// When cargo cannot say.
pub fn check(cargo: impl Fn() -> Command) -> Result<Vec<String>> {
    let whole = built(cargo(), &["--workspace"])?;
    let mut faults = Vec::new();
    for name in ALONE {
        for other in built(cargo(), &["--package", name])?.difference(&whole) {
            faults.push(format!("`-p {name}` builds {other} anew, which the workspace has with other features"));
        }
    }
    Ok(faults)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_package_and_its_features() {
        let all =
            lines("a v1.0.0 [std] (*)\na v1.0.0 [std]\nb v2.0.0 (proc-macro) []\nc v0.1.0 (/somewhere) [x,y]\n\n");
        let want = ["a v1.0.0 [std]", "b v2.0.0 []", "c v0.1.0 [x,y]"].map(str::to_string);
        assert_eq!(all, BTreeSet::from(want));
    }
}
