//! The program `wccl` as a launcher, when something goes wrong: one rank fails, and the group ends at once with its name and
//! its reason. docs/faults.md lists what is asserted here.

mod common;

use std::process::Output;
use std::time::{Duration, Instant};

use common::{has, said, wccl};

/// What the launcher may take on a loaded machine; the ranks that are to be ended would sleep far longer.
const SOON: Duration = Duration::from_secs(30);

/// Runs `script` once per rank by `wccl run`.
fn ranks(n: usize, script: &str) -> (Output, String) {
    let begun = Instant::now();
    let out = wccl()
        .args(["run", "-r", &n.to_string(), "--tag", "--", "sh", "-c", script, env!("CARGO_BIN_EXE_wccl")])
        .env("CCOM_SOCKET_IFNAME", "lo")
        .output()
        .unwrap();
    assert!(begun.elapsed() < SOON, "the group took {:?} to end", begun.elapsed());
    let text = said(&out);
    (out, text)
}

/// A plugin that does not load on one rank ends the group at once: the reason, the plugin, the rank.
#[test]
fn a_plugin_that_does_not_load_on_one_rank_ends_the_group_at_once() {
    let broken = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("broken-{}.wasm", std::process::id()));
    std::fs::write(&broken, b"\0asm this is no plugin").unwrap();
    let file = broken.display().to_string();
    let (out, said) =
        ranks(3, &format!("if [ $RANK = 1 ]; then WCCL_PLUGIN='{file}' exec \"$0\" info; fi; exec sleep 600"));
    std::fs::remove_file(&broken).unwrap();
    assert_eq!(out.status.code(), Some(1), "{said}");
    has(&said, &["Error opening libnccom.so, cannot use collective operations", &file]);
    has(&said, &["rank 1 of 3 (pid ", "exited with code 1; the 2 ranks still running were ended"]);
}

#[test]
fn a_rank_that_is_killed_is_named_with_its_signal() {
    let (out, said) = ranks(3, "if [ $RANK = 2 ]; then kill -SEGV $$; fi; exec sleep 600");
    assert_eq!(out.status.code(), Some(128 + 11), "{said}");
    has(&said, &["rank 2 of 3 (pid ", "was killed by signal 11 (SIGSEGV)"]);
}

/// The others may still say what they saw of a failure: they are ended a moment after it, not at once. Rank 0 speaks only when
/// the launcher has taken note of rank 1's end, which is when its number is free.
#[test]
fn the_others_say_their_last_words() {
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("last-words-{}", std::process::id()));
    let pid = file.display();
    let script = format!(
        "if [ $RANK = 1 ]; then echo $$ >'{pid}.new'; mv '{pid}.new' '{pid}'; exit 3; fi
         until [ -s '{pid}' ]; do sleep 0.01; done
         while kill -0 $(cat '{pid}') 2>/dev/null; do :; done
         echo 'rank 1 is gone, says rank 0'; exec sleep 600"
    );
    let (out, said) = ranks(2, &script);
    std::fs::remove_file(&file).unwrap();
    assert_eq!(out.status.code(), Some(3), "{said}");
    has(&said, &["[0] rank 1 is gone, says rank 0", "rank 1 of 2 (pid ", "exited with code 3"]);
}

/// A stopped rank does not keep the launcher from ending the group.
#[test]
fn a_stopped_rank_is_ended_with_the_others() {
    let (out, said) = ranks(2, "if [ $RANK = 1 ]; then sleep 0.5; exit 3; fi; kill -STOP $$; exec sleep 600");
    assert_eq!(out.status.code(), Some(3), "{said}");
    has(&said, &["rank 1 of 2 (pid ", "exited with code 3; the one rank still running was ended"]);
}

/// A whole run of the demo under a deadline: what a user of the program sees of a mistake in the environment.
#[test]
fn an_interface_that_does_not_exist_ends_a_demo_with_the_reason() {
    let out = wccl().args(["demo", "-r", "2"]).env("CCOM_SOCKET_IFNAME", "eth9").output().unwrap();
    assert_eq!(out.status.code(), Some(1), "{}", said(&out));
    has(
        &said(&out),
        &["No usable listening interface found", "lo (127.0.0.1)", "CCOM_SOCKET_IFNAME=eth9 matches none of them"],
    );
}

/// Both acts of the demo, and the last line that scripts look for.
#[test]
fn the_demo_ends_with_what_the_swaps_cost() {
    let out = wccl().args(["demo", "-r", "2"]).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{}", said(&out));
    has(&text, &["OK: every element of every result is right on all 2 ranks", "the call used more than its 300ms"]);
    let last: Vec<&str> = text.lines().last().unwrap_or_default().split(' ').collect();
    let [p99, ratio] = [5, last.len().saturating_sub(2)].map(|i| last.get(i).copied().unwrap_or_default());
    let expected = format!("swap: 20 swaps, pause p99 {p99} ms, 0 lost, 0 wrong, other tenant {ratio} x");
    assert_eq!(last.join(" "), expected);
    assert!(p99.parse::<f64>().is_ok_and(|p| p > 0.0) && ratio.parse::<f64>().is_ok_and(|r| r > 0.0), "{expected}");
}

#[test]
fn a_program_that_does_not_start_is_named() {
    for (program, words) in [("./no-such-program", "No such file"), ("/etc", "Permission denied")] {
        let out = wccl().args(["run", "-r", "2", "--", program]).output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{}", said(&out));
        has(&said(&out), &[&format!("starting {program} as rank 0: {words}")]);
    }
    let out = wccl().args(["run", "-r", "2"]).output().unwrap();
    assert_eq!(out.status.code(), Some(2), "{}", said(&out));
}
