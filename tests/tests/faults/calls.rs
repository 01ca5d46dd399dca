//! Faults of operations: absent ranks, calls that do not match, deaths, aborts, odd sizes, signals, forks.

use std::time::{Duration, Instant};

use crate::support::{HANG, Rank, alone, fault, free_root, has, ready, soon, start};

#[test]
fn a_time_out_names_the_absent_rank() {
    let _one = alone();
    let vars = [("WCCL_TIMEOUT_MS", "2000")];
    let mut ranks = start(4, &vars, |r| if r == 2 { "barrier sleep:600000 barrier" } else { "barrier barrier" });
    ready(&ranks);
    let pid = format!("pid {}", ranks[2].pid());
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    for r in [0, 1, 3] {
        let e = ranks[r].error();
        if e.contains("timed out") {
            // Operation, sequence, who, where, and what it did last.
            has(
                &e,
                &["error 5 NRT_TIMEOUT", "operation #2 (barrier)", "timed out on rank", "after 2s", "rank 2", &pid],
            );
            has(&e, &[host.trim(), "its last operation was #1 (barrier), completed"]);
        } else {
            // A rank that was told by another that had waited a little longer.
            has(&e, &["operation #2 (barrier)", "timed out on rank", "rank 2", &pid]);
        }
    }
}

/// The deadline of one call holds for that call: the communicator's own, of 60 s, holds for another of the same ranks, which
/// waits for the late rank.
#[test]
fn a_deadline_of_one_call_names_the_absent_rank_and_holds_for_no_other() {
    let _one = alone();
    let vars = [("WCCL_TIMEOUT_MS", "60000")];
    let mut ranks = start(4, &vars, |r| {
        if r == 2 {
            "twin barrier sleep:3000 twin:barrier"
        } else {
            "twin barrier fails:within:1000:barrier twin:barrier"
        }
    });
    for r in [0, 1, 3] {
        // Who waited a little longer was told by another.
        has(&ranks[r].line("failed "), &["operation #2 (barrier)", "timed out on rank", "after 1s", "rank 2 (host"]);
    }
    ranks.iter_mut().for_each(|r| drop(r.good()));
}

/// The first operation of more than three ranks has all connected: its deadline ends that too, not the bootstrap's of 60 s. In
/// whatever order the ranks' deadlines pass, each says which rank has not come, and that a deadline has passed.
#[test]
fn a_deadline_ends_the_connecting_for_a_first_operation_and_names_the_absent_rank() {
    let _one = alone();
    let vars = [("WCCL_TIMEOUT_MS", "60000")];
    // Of ranks 0, 1 and 3, milliseconds. Ring neighbours hear from one another: 3 tells 0, and that one tells 1.
    for deadlines in [[3000; 3], [60_000, 60_000, 3000], [3000, 60_000, 6000]] {
        let deadline = |r: usize| deadlines[[0, 1, 2, 2][r]];
        let script = |r| if r == 2 { "sleep:600000".into() } else { format!("within:{}:barrier", deadline(r)) };
        let mut ranks = start(4, &vars, script);
        ready(&ranks);
        let errors = [0, 1, 3].map(|r| ranks[r].error());
        println!("{deadlines:?}: {errors:#?}");
        for e in &errors {
            has(
                e,
                &["barrier on rank", " timed out ", "rank 2 sent nothing", "the deadline of the operation has passed"],
            );
        }
        // One that comes a little later finds the communicator ended, with the same words.
        assert!(errors.iter().any(|e| e.starts_with("error 5 NRT_TIMEOUT")));
    }
}

/// What two ranks call, and the words of each side's view.
const MISMATCHES: [(&str, &str, [&str; 2]); 9] = [
    ("all_reduce:fp32:sum:100", "all_gather:fp32:100", ["all_reduce fp32 sum count 100", "all_gather fp32 count 100"]),
    ("all_reduce:fp32:sum:100", "all_reduce:fp32:sum:200", ["count 100", "count 200"]),
    ("all_reduce:fp32:sum:1", "all_reduce:fp32:sum:2", ["count 1 ", "count 2 "]),
    ("all_reduce:fp32:sum:100", "all_reduce:int32:sum:100", ["fp32 sum", "int32 sum"]),
    ("all_reduce:fp32:sum:100", "all_reduce:fp32:max:100", ["fp32 sum", "fp32 max"]),
    ("broadcast:fp32:100:0", "broadcast:fp32:100:1", ["root 0", "root 1"]),
    ("reduce:fp32:sum:3:0", "reduce:fp32:sum:3:1", ["root 0", "root 1"]),
    ("barrier all_reduce:fp32:sum:9", "all_reduce:fp32:sum:9 barrier", ["barrier", "all_reduce fp32 sum count 9"]),
    ("t_all_reduce:300000", "t_all_reduce:300001", ["count 300000", "count 300001"]),
];

/// Both sides' view, on all ranks, before a user's buffer is written; also on the ranks that match one another.
#[test]
fn calls_that_do_not_match_are_shown_from_both_sides_on_all_ranks() {
    let _one = alone();
    for (most, odd, views) in MISMATCHES {
        // A rank that only sends does not wait for those who receive: it learns it in its next call.
        let one_way = most.starts_with("broadcast") || most.starts_with("reduce");
        let mut ranks = start(3, &[], |r| format!("{} barrier", if r == 1 { odd } else { most }));
        for r in &mut ranks {
            let (status, lines) = r.end();
            let said = lines.join("\n");
            assert!(!status.success(), "rank {} of {most} / {odd}: {said}", r.rank);
            has(&said, &["mismatched collectives at operation #1", "rank 1 calls"]);
            has(&said, &views);
            if !one_way {
                assert!(!said.contains("a user's buffer was written"), "rank {} of {most} / {odd}: {said}", r.rank);
            }
        }
    }
}

#[test]
fn a_rank_that_dies_in_an_operation_is_named_on_all_within_a_second() {
    let _one = alone();
    // The barrier has all connected, which is not what is looked at here.
    let mut ranks = start(4, &[], |_| "barrier say:met fails:loop barrier");
    ranks.iter().for_each(|r| drop(r.line("met")));
    std::thread::sleep(Duration::from_millis(300));
    let pid = format!("pid {}", ranks[3].pid());
    let begun = Instant::now();
    ranks[3].child.kill().unwrap();
    for rank in &mut ranks[..3] {
        has(&rank.line("failed "), &["all_reduce fp32 max count 262144", "rank 3", &pid, "has ended"]);
        // A program need not read the sentence.
        assert_eq!(rank.line("dead "), "dead 3");
        has(&rank.error(), &["is no longer usable; it failed before", "rank 3", &pid, "has ended"]);
    }
    soon("a death named on three ranks", begun);
}

/// From any thread, twice; in an operation, with the peer stopped; the abort and what it ends are both quick.
#[test]
fn an_abort_ends_an_operation_at_once_also_with_the_peer_stopped() {
    let _one = alone();
    let mut ranks =
        start(
            2,
            &[],
            |r| if r == 0 { "barrier say:met abort_in:1500 barrier" } else { "barrier say:met sleep:600000" },
        );
    ranks.iter().for_each(|r| drop(r.line("met")));
    ranks[1].signal("STOP");
    ranks[0].line("aborts");
    let begun = Instant::now();
    has(&ranks[0].error(), &["error 14 NRT_CLOSED", "was aborted on rank 0", "the user said stop"]);
    soon("an operation ended by an abort", begun);
    ranks[1].signal("CONT");
}

#[test]
fn an_abort_ends_an_init_at_once() {
    let root = free_root();
    let mut r = Rank::start(fault(""), 0, 2, &root, &[("FAULT_ABORT_INIT_MS", "1000")]);
    r.line("aborts");
    let begun = Instant::now();
    has(&r.error(), &["error 14 NRT_CLOSED", "the user said stop"]);
    soon("an init ended by an abort", begun);
}

/// The peer is stopped in the middle of the bootstrap: connects and exchanges with it hang until the abort.
#[test]
fn an_abort_ends_a_connect_to_a_stopped_peer() {
    let _one = alone();
    let root = free_root();
    // Stopped at different moments of its start, some of them before and some after it has reported to the root.
    for after in [0u64, 30, 60, 120] {
        let vars = [("FAULT_ABORT_INIT_MS", "1500")];
        let mut a = Rank::start(fault("barrier barrier"), 0, 2, &root, &vars);
        let b = Rank::start(fault("barrier sleep:600000 barrier"), 1, 2, &root, &[]);
        std::thread::sleep(Duration::from_millis(after));
        b.signal("STOP");
        a.line("aborts");
        let begun = Instant::now();
        if let Some(e) = a.end().1.iter().find(|l| l.starts_with("error ")) {
            has(e, &["the user said stop"]);
        }
        soon("a connect ended by an abort", begun);
    }
}

#[test]
fn a_communicator_is_freed_at_once_with_its_peer_stopped_and_after_an_abort() {
    let _one = alone();
    let mut ranks = start(2, &[], |r| {
        if r == 0 { "barrier say:met abort_in:0 sleep:1500 free" } else { "barrier say:met sleep:600000" }
    });
    ranks.iter().for_each(|r| drop(r.line("met")));
    ranks[1].signal("STOP");
    let freed = ranks[0].line("freed in ");
    let ms: u64 = freed.split_whitespace().nth(2).unwrap().parse().unwrap();
    println!("{freed}");
    assert!(Duration::from_millis(ms) < HANG, "{freed}");
    ranks[0].good();
}

#[test]
fn a_count_of_zero_works_on_every_collective() {
    let mut ranks = start(3, &[], |_| "zero barrier");
    for r in &mut ranks {
        let lines = r.good();
        assert!(lines.iter().any(|l| l == "zero in device memory"), "{lines:?}");
    }
}

/// A call of no elements is an operation like any other: a rank that does not make it is missed.
#[test]
fn a_count_of_zero_still_synchronises() {
    let vars = [("WCCL_TIMEOUT_MS", "1500")];
    let mut ranks = start(2, &vars, |r| if r == 0 { "all_reduce:fp32:sum:0" } else { "sleep:600000" });
    has(&ranks[0].error(), &["operation #1 (all_reduce fp32 sum count 0", "timed out on rank 0", "rank 1"]);
}

#[test]
fn buffers_at_any_alignment_work_and_no_byte_around_them_is_written() {
    start(2, &[], |_| "odd").iter_mut().for_each(|r| drop(r.good()));
}

/// Processor time and affinity of idle ranks, from the kernel.
#[test]
fn idle_communicators_use_no_cpu_and_threads_inherit_the_affinity() {
    let _one = alone();
    let root = free_root();
    let n = 8;
    let mut ranks: Vec<Rank> = (0..n)
        .map(|r| {
            let mut c = std::process::Command::new("taskset");
            c.args(["-c", "0", env!("CARGO_BIN_EXE_fault"), "barrier say:idle sleep:600000"]);
            Rank::start(c, r, n, &root, &[])
        })
        .collect();
    for r in &ranks {
        r.line("idle");
    }
    let ticks = |r: &Rank| -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", r.pid())).unwrap();
        let after = stat.rsplit_once(')').unwrap().1;
        after.split_whitespace().skip(11).take(2).map(|t| t.parse::<u64>().unwrap()).sum()
    };
    // What they still do after the barrier ends some time, sooner or later.
    let begun = Instant::now();
    loop {
        let before: Vec<u64> = ranks.iter().map(ticks).collect();
        std::thread::sleep(Duration::from_secs(1));
        let used: Vec<u64> = ranks.iter().zip(before).map(|(r, b)| ticks(r) - b).collect();
        println!("ticks (of 10 ms) in a second of 8 idle ranks: {used:?}");
        if used.iter().sum::<u64>() <= 8 {
            break;
        }
        assert!(begun.elapsed() < HANG, "idle ranks use {used:?} ticks in a second");
    }
    for r in &mut ranks {
        for task in std::fs::read_dir(format!("/proc/{}/task", r.pid())).unwrap().flatten() {
            let status = std::fs::read_to_string(task.path().join("status")).unwrap();
            let allowed = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).unwrap();
            assert_eq!(allowed.trim(), "0", "{status}");
        }
    }
}

/// A plugin binds its caller's thread within the CPUs that the process had when its first tenant was opened, though the
/// program has taken more since then.
#[test]
fn a_plugin_binds_a_thread_within_the_first_cpus_of_the_process() {
    let mut command = std::process::Command::new("taskset");
    command.args(["-c", "0", env!("CARGO_BIN_EXE_fault"), "bind"]);
    let mut rank = Rank::start(command, 0, 1, &free_root(), &[]);
    assert_eq!(rank.line("bound to"), "bound to [0]");
    rank.good();
}

/// A signal every millisecond interrupts whatever system call runs, from before the runtime opens.
#[test]
fn a_storm_of_signals_disturbs_neither_init_nor_operations() {
    let _one = alone();
    let vars = [("FAULT_ITIMER_US", "1000")];
    start(3, &vars, |_| "work:40 t_all_reduce:1000 barrier").iter_mut().for_each(|r| drop(r.good()));
}

#[test]
fn a_forked_child_gets_a_clean_error_and_its_parent_is_unharmed() {
    let mut ranks = start(2, &[], |r| if r == 0 { "barrier fork work:8" } else { "barrier work:8" });
    let said = ranks[0].line("child: ");
    has(&said, &["forked"]);
    ranks.iter_mut().for_each(|r| drop(r.good()));
}
