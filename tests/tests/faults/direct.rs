//! Faults of private memory that peers read: a kernel that refuses it, at the start or later; deaths; buffers that go.

use std::time::Instant;

use crate::support::{Rank, alone, fault, free_root, has, ready, soon, start};

/// Whether the kernel lets processes of one user read each other's memory: not under Yama's scopes, but for root.
fn permitted() -> bool {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let scope: u32 = scope.trim().parse().unwrap_or(0);
    let allowed = scope == 0 || scope < 3 && rustix::process::geteuid().is_root();
    if !allowed {
        println!("Yama's ptrace_scope is {scope}: the ranks of this test stage their private memory");
    }
    allowed
}

/// Ranks with variables of their own, all with one script.
fn with_vars(n: usize, script: &str, vars: impl Fn(usize) -> Vec<(&'static str, &'static str)>) -> Vec<Rank> {
    let root = free_root();
    (0..n).map(|r| Rank::start(fault(script), r, n, &root, &vars(r))).collect()
}

/// Whatever the choice by size would be.
const DIRECT: [(&str, &str); 1] = [("WCCL_ALGO", "direct")];

const MOVES: &str = "broadcast:uint8:1000000:1 all_gather:uint8:500000 direct broadcast:fp32:300000:0";

#[test]
fn one_rank_that_may_not_read_or_does_not_want_to_has_all_stage() {
    let _one = alone();
    for n in [2, 4] {
        for odd in ["", "FAULT_DENY_READV", "WCCL_DIRECT"] {
            let value = if odd == "WCCL_DIRECT" { "0" } else { "1" };
            let mut ranks = with_vars(n, MOVES, |r| {
                let mut vars = DIRECT.to_vec();
                vars.extend((r == 1 && !odd.is_empty()).then_some((odd, value)));
                vars
            });
            let said = format!("direct {}", odd.is_empty() && permitted());
            for r in &mut ranks {
                let lines = r.good();
                assert!(lines.contains(&said), "{n} ranks, {odd} on rank 1: rank {} said {lines:?}", r.rank);
            }
        }
    }
}

#[test]
fn a_kernel_that_refuses_to_read_a_peer_later_is_an_error_that_names_the_switch() {
    let _one = alone();
    if !permitted() {
        return;
    }
    let send = "broadcast:uint8:1000000:0";
    let mut ranks = start(3, &DIRECT, |r| {
        if r == 2 { format!("{send} deny_readv {send} {send}") } else { format!("{send} {send} {send}") }
    });
    ready(&ranks);
    let pid = format!("pid {}", ranks[0].pid());
    for r in &mut ranks {
        let e = r.error();
        has(&e, &["NRT_EXEC_HW_ERR_COLLECTIVES", "operation #2 (broadcast uint8 count 1000000 root 0 private memory"]);
        has(&e, &["on rank 2", "the input of rank 0", &pid, "the kernel refuses it", "seccomp", "WCCL_DIRECT=0"]);
    }
}

#[test]
fn a_buffer_that_is_not_there_any_more_is_named_and_never_half_a_result() {
    let _one = alone();
    if !permitted() {
        return;
    }
    let mut ranks = start(2, &DIRECT, |_| "gone:2000000");
    ready(&ranks);
    let pid = format!("pid {}", ranks[0].pid());
    for r in &mut ranks {
        let e = r.error();
        has(&e, &["operation #1 (send_recv", "failed on rank 1", "the input of rank 0", &pid, " bytes at 0x"]);
        has(&e, &["must stay mapped until the call returns", "WCCL_DIRECT=0"]);
    }
}

#[test]
fn a_rank_that_dies_while_its_private_memory_is_read_is_named_on_all() {
    let _one = alone();
    // The root dies, then one of its readers.
    for victim in [0, 2] {
        let mut ranks = start(3, &DIRECT, |_| "host_loop:30000000");
        ranks.iter().for_each(|r| drop(r.line("looping")));
        let pid = format!("pid {}", ranks[victim].pid());
        let begun = Instant::now();
        ranks[victim].child.kill().unwrap();
        for r in ranks.iter_mut().filter(|r| r.rank != victim) {
            let e = r.error();
            has(&e, &["broadcast uint8 count 30000000", &format!("rank {victim}"), &pid, "has ended"]);
        }
        soon("a death named on two ranks", begun);
    }
}
