//! The short form of the soak (`cargo xtask soak` is the long one): 20 seconds, one seed, everything at least once.

use std::process::Command;

use crate::support::{HANG, alone};

#[test]
fn a_short_soak_finds_no_fault() {
    let _alone = alone();
    let out = Command::new(env!("CARGO_BIN_EXE_soak")).args(["--seconds", "20", "--seed", "1"]).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{text}{}", String::from_utf8_lossy(&out.stderr));
    let summary = text.lines().rev().find(|l| l.contains(" rounds, ")).unwrap_or_default();
    for none in [" 0 operations", " 0 groups", " 0 deaths", " 0 late,", " 0 too late"] {
        assert!(!summary.contains(none), "{summary}");
    }
}

#[test]
fn wrong_calls_are_refused() {
    for args in [&["--seconds", "-1"][..], &["--ranks", "1"], &["--minutes", "1", "--seconds", "1"], &["--fast"]] {
        let out = Command::new(env!("CARGO_BIN_EXE_soak")).args(args).output().unwrap();
        assert_eq!(out.status.code(), Some(2), "{args:?}");
    }
}

/// The soak itself can fail: a rank that dies by another hand is a fault, and the seed is said.
#[test]
fn a_death_that_was_not_planned_is_a_fault() {
    let _alone = alone();
    let soak = Command::new(env!("CARGO_BIN_EXE_soak"))
        .args(["--seconds", "60", "--seed", "3", "--ranks", "3"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let parent = soak.id().to_string();
    // Its children, the first of which is process 0: that one is never killed by the soak.
    let children = || -> Vec<u32> {
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        let pids = all.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
        let mine = pids.filter(|pid| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)) == Some(&parent)
        });
        mine.collect()
    };
    let begun = std::time::Instant::now();
    while children().len() < 3 {
        assert!(begun.elapsed() < HANG, "the ranks never start");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let first = children().into_iter().min().unwrap().to_string();
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert!(Command::new("kill").args(["-KILL", &first]).status().unwrap().success());
    let out = soak.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert_eq!(out.status.code(), Some(1), "{text}");
    assert!(text.contains("# FAULT in round") && text.contains("# repeat with --seed 3 --ranks 3"), "{text}");
}
