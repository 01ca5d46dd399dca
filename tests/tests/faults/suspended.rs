//! Time in which a process was stopped is no waiting time of its own; that of one that is waited for is.

use std::time::Duration;

use crate::common::free_port;
use crate::common::ranks::{Rank, spawn};
use rustix::process::{Pid, Signal, kill_process};

/// A wait gives up after this.
const DEADLINE_MS: &str = "8000";
/// Longer than that.
const SUSPENDED: Duration = Duration::from_secs(11);
/// Operations that take much longer than it is until they are suspended.
const WORK: u32 = 20_000;

fn signal(rank: &Rank, signal: Signal) {
    kill_process(Pid::from_child(&rank.child), signal).unwrap();
}

fn start(script: &str, root: &str, rank: usize, n: usize) -> Rank {
    let vars = [("WCCL_TIMEOUT_MS", DEADLINE_MS), ("NEURON_CCOM_SOCK_TIMEOUT", DEADLINE_MS)];
    let command = std::process::Command::new(env!("CARGO_BIN_EXE_fault"));
    spawn(command, root, script, rank, n, &vars)
}

/// All ranks are stopped, for longer than their deadlines, and go on one after the other.
fn suspend(ranks: &[Rank]) {
    ranks.iter().for_each(|r| signal(r, Signal::STOP));
    std::thread::sleep(SUSPENDED);
    for r in ranks {
        signal(r, Signal::CONT);
        std::thread::sleep(Duration::from_millis(500));
    }
}

fn begins(rank: &Rank, with: &str) -> String {
    let line = rank.line();
    assert!(line.starts_with(with), "{line}");
    line
}

/// The one that waits goes on first of all.
#[test]
fn a_job_that_was_suspended_in_an_operation_completes_it() {
    let root = format!("127.0.0.1:{}", free_port());
    let scripts = ["say:waits barrier say:through", "say:late sleep:4000 barrier say:through"];
    let ranks: Vec<Rank> = scripts.iter().enumerate().map(|(r, s)| start(s, &root, r, 2)).collect();
    ranks.iter().for_each(|r| drop(begins(r, "ready")));
    begins(&ranks[0], "waits");
    begins(&ranks[1], "late");
    std::thread::sleep(Duration::from_secs(1));
    suspend(&ranks);
    ranks.iter().for_each(|r| drop(begins(r, "through")));
}

/// More than two are not all linked from the begin, and wait for one another in many ways: while the library connects them, in
/// the middle of their operations, and while they split.
#[test]
fn a_job_of_four_that_was_suspended_in_its_work_completes_it() {
    let root = format!("127.0.0.1:{}", free_port());
    let script = |late: &str| {
        let splits = format!("say:splits {late} twin twin:work:20 say:through");
        format!("say:connects {late} work:20 say:works work:{WORK} say:worked {splits}")
    };
    let (early, late) = (script("sleep:0"), script("sleep:4000"));
    let ranks: Vec<Rank> = (0..4).map(|r| start(if r == 3 { &late } else { &early }, &root, r, 4)).collect();
    ranks.iter().for_each(|r| drop(begins(r, "ready")));
    for (begun, ends) in [("connects", None), ("works", Some("worked")), ("splits", Some("through"))] {
        ranks.iter().for_each(|r| drop(begins(r, begun)));
        std::thread::sleep(Duration::from_millis(500));
        suspend(&ranks);
        ranks.iter().filter_map(|r| ends.map(|e| begins(r, e))).for_each(drop);
    }
}

/// The same while they wait for a rank that has not been started yet.
#[test]
fn a_job_that_was_suspended_while_it_started_starts() {
    let root = format!("127.0.0.1:{}", free_port());
    let mut ranks: Vec<Rank> = (0..2).map(|r| start("barrier say:through", &root, r, 3)).collect();
    // Long enough for both to have come to where they wait; if not, they have more time afterwards.
    std::thread::sleep(Duration::from_secs(2));
    ranks.iter().for_each(|r| signal(r, Signal::STOP));
    std::thread::sleep(SUSPENDED);
    ranks.iter().for_each(|r| signal(r, Signal::CONT));
    ranks.push(start("barrier say:through", &root, 2, 3));
    for r in &ranks {
        begins(r, "ready");
        begins(r, "through");
    }
}

/// One that alone is stopped is reported by those who wait for it, as ever.
#[test]
fn a_rank_that_alone_is_stopped_is_named_by_the_others() {
    let root = format!("127.0.0.1:{}", free_port());
    let ranks: Vec<Rank> =
        ["say:waits barrier", "sleep:600000"].iter().enumerate().map(|(r, s)| start(s, &root, r, 2)).collect();
    ranks.iter().for_each(|r| drop(begins(r, "ready")));
    begins(&ranks[0], "waits");
    signal(&ranks[1], Signal::STOP);
    let e = begins(&ranks[0], "error");
    assert!(e.contains("timed out") && e.contains("rank 1") && e.contains("its process is stopped"), "{e}");
}
