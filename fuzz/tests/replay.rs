//! The fuzz targets over their kept inputs and seeded changes of them. Each runs in a process of its own: what panics, aborts,
//! hangs or takes too much memory fails here with its name and the input.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Far more than a target takes on a busy machine; it is a hang that is found by it.
const DEADLINE: Duration = Duration::from_secs(240);

#[test]
fn every_target_bears_its_inputs_and_changes_of_them() {
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let mut failed = Vec::new();
    for target in fuzz::TARGETS {
        let input = scratch.join(format!("fuzz-{}-{}", target.name, std::process::id()));
        let said = scratch.join(format!("fuzz-{}-{}.log", target.name, std::process::id()));
        let log = std::fs::File::create(&said).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_replay"))
            .arg(target.name)
            .arg(&input)
            // Changed plugins that compile are not to be kept.
            .env("WCCL_CACHE_DIR", "off")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let begun = Instant::now();
        let ended = loop {
            match child.try_wait().unwrap() {
                Some(status) => break Some(status),
                None if begun.elapsed() > DEADLINE => {
                    child.kill().unwrap();
                    child.wait().unwrap();
                    break None;
                }
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        let text = std::fs::read_to_string(&said).unwrap();
        std::fs::remove_file(&said).unwrap();
        if !ended.is_some_and(|status| status.success()) {
            let how = ended.map_or(format!("no end within {DEADLINE:?}"), |status| status.to_string());
            failed.push(format!("{}: {how}; the input is {}\n{text}", target.name, input.display()));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// A folder that no target reads would look like a test and be none.
#[test]
fn every_corpus_has_a_target() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for entry in std::fs::read_dir(corpus).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(fuzz::find(&name).is_ok(), "{name}");
    }
}
