//! Limits of the process that run out, and what is left of ranks that are killed.

use std::collections::HashSet;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::time::Duration;

use crate::support::{Rank, alone, fault, fault_after, free_root, has, ready, start};

fn limited(before: &str, n: usize, vars: &[(&str, &str)], script: &str) -> Vec<Rank> {
    let root = free_root();
    (0..n).map(|r| Rank::start(fault_after(before, script), r, n, &root, vars)).collect()
}

/// The soft limit is raised; a hard one that is too low is one sentence before anything starts.
#[test]
fn few_descriptors_are_raised_or_named_with_the_need() {
    let _one = alone();
    limited("ulimit -Sn 64", 16, &[], "barrier work:4").iter_mut().for_each(|r| drop(r.good()));
    let mut ranks = limited("ulimit -n 64", 16, &[], "barrier");
    for r in &mut ranks {
        let e = r.error();
        has(&e, &["error 4 NRT_RESOURCE", &format!("rank {} of 16 cannot join: it needs", r.rank), "file descriptors"]);
        has(&e, &["RLIMIT_NOFILE allows 64 (hard limit 64)", "raise the hard limit to 128", "ulimit -Hn 128"]);
    }
}

/// What is counted before the start is enough: a full mesh of ranks opens no more.
#[test]
fn the_descriptors_counted_before_the_start_are_enough() {
    let _one = alone();
    let n = 8;
    let ranks = start(n, &[], |_| "open work:4 t_all_reduce:100000 open sleep:600000");
    for r in &ranks {
        let at_first: usize = r.line("open ")[5..].parse().unwrap();
        let at_last: usize = r.line("open ")[5..].parse().unwrap();
        // 16 of its own and of the process, 3 for each peer, and on rank 0 one for each rank: what init_comm asks for.
        let counted = 16 + 3 * (n - 1) + if r.rank == 0 { n } else { 0 };
        println!(
            "rank {}: {at_first}, later {at_last} descriptors; {counted} counted beside the process's own",
            r.rank
        );
        assert!(at_last <= counted + 12, "rank {} has {at_last} descriptors open, {counted} were counted", r.rank);
    }
}

#[test]
fn a_small_address_space_is_enough_and_one_too_small_is_named() {
    let _one = alone();
    // 2 GB of address space: no reservation of terabytes.
    limited("ulimit -v 2000000", 2, &[], "work:4").iter_mut().for_each(|r| drop(r.good()));
    // The default 12 GiB of device memory do not fit.
    let mut ranks = limited("ulimit -v 2000000", 2, &[("WCCL_HBM_BYTES", "12884901888")], "barrier");
    for r in &mut ranks {
        let e = r.error();
        has(
            &e,
            &[
                "error 4 NRT_RESOURCE",
                "12884901888-byte memory region",
                "RLIMIT_AS (address space) is 2048000000 bytes",
            ],
        );
        has(&e, &["ulimit -v", "WCCL_HBM_BYTES"]);
    }
}

/// The kernel would end the process by SIGXFSZ.
#[test]
fn a_limit_of_file_sizes_is_named() {
    let mut ranks = limited("ulimit -f 1000", 2, &[], "barrier");
    for r in &mut ranks {
        has(&r.error(), &["error 4 NRT_RESOURCE", "RLIMIT_FSIZE is ", "ulimit -f"]);
    }
}

/// Memory is neither locked nor taken from /dev/shm.
#[test]
fn neither_locked_memory_nor_dev_shm_is_needed() {
    let _one = alone();
    limited("ulimit -l 0", 2, &[], "work:4 t_all_reduce:1000000").iter_mut().for_each(|r| drop(r.good()));
    let allowed = Command::new("unshare").args(["-m", "true"]).status().is_ok_and(|s| s.success());
    assert!(allowed, "did not run: no mount namespaces here (needs root and util-linux)");
    let root = free_root();
    let body = "mount -t tmpfs -o size=4k none /dev/shm && exec \"$0\" \"$1\"";
    let mut ranks: Vec<Rank> = (0..2)
        .map(|r| {
            let mut c = Command::new("unshare");
            c.args(["-m", "sh", "-c", body, env!("CARGO_BIN_EXE_fault"), "work:4 t_all_reduce:1000000"]);
            Rank::start(c, r, 2, &root, &[])
        })
        .collect();
    ranks.iter_mut().for_each(|r| drop(r.good()));
}

/// No thread can be started: only a user other than root has that limit. The program is reached by a descriptor: another user may
/// not be let into the directory where it lies.
#[test]
fn a_limit_of_threads_is_named() {
    let file = std::fs::File::open(env!("CARGO_BIN_EXE_fault")).unwrap();
    rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
    let program = format!("/proc/self/fd/{}", file.as_raw_fd());
    let mut c = match rustix::process::geteuid().is_root() {
        true => {
            let mut c = Command::new("setpriv");
            c.args(["--reuid=65534", "--regid=65534", "--clear-groups", "prlimit", "--nproc=1", &program, "barrier"]);
            c
        }
        false => {
            let mut c = Command::new("prlimit");
            c.args(["--nproc=1", &program, "barrier"]);
            c
        }
    };
    c.current_dir("/");
    // That user has no secret of its own here.
    let vars = [("WCCL_CACHE_DIR", "off"), ("WCCL_JOB_SECRET", "of a user without a home")];
    let e = Rank::start(c, 0, 1, &free_root(), &vars).error();
    has(&e, &["RLIMIT_NPROC (threads and processes of this user) is 1", "ulimit -u"]);
}

/// Killed again and again at any moment, ranks leave no process, no memory, no socket that anybody listens at. (Of control sockets a
/// file stays, until the next process looks: the tests of these.)
#[test]
fn ranks_that_are_killed_again_and_again_leave_nothing() {
    let _one = alone();
    let shm = || -> HashSet<_> {
        std::fs::read_dir("/dev/shm").map(|d| d.flatten().map(|e| e.file_name()).collect()).unwrap_or_default()
    };
    let sockets = || {
        let text = std::fs::read_to_string("/proc/net/unix").unwrap();
        text.lines().filter(|l| l.contains("@wccl-")).map(str::to_string).collect::<HashSet<String>>()
    };
    let files = shm();
    for after in [20u64, 60, 120, 250, 400, 600] {
        let mut ranks = start(2, &[], |_| "loop");
        std::thread::sleep(Duration::from_millis(after));
        let inodes: HashSet<String> = ranks
            .iter()
            .flat_map(|r| std::fs::read_dir(format!("/proc/{}/fd", r.pid())).into_iter().flatten().flatten())
            .filter_map(|fd| Some(std::fs::read_link(fd.path()).ok()?.to_str()?.to_string()))
            .filter_map(|to| Some(to.strip_prefix("socket:[")?.strip_suffix(']')?.to_string()))
            .collect();
        for r in &mut ranks {
            r.child.kill().unwrap();
            r.child.wait().unwrap();
        }
        let left: Vec<String> =
            sockets().into_iter().filter(|l| l.split_whitespace().any(|w| inodes.contains(w))).collect();
        assert!(left.is_empty(), "sockets are left after {after} ms: {left:?}");
        for r in &ranks {
            assert!(!std::path::Path::new(&format!("/proc/{}", r.pid())).exists());
        }
    }
    let new: Vec<_> = shm().difference(&files).cloned().collect();
    assert!(!new.iter().any(|f| f.to_string_lossy().contains("wccl")), "files are left in /dev/shm: {new:?}");
}

/// A fault of the program itself reaches the handler that it had installed before the runtime opened.
#[test]
fn a_fault_of_the_program_reaches_its_own_handler() {
    let root = free_root();
    let vars = [("FAULT_SEGV", "1")];
    let mut ranks: Vec<Rank> = (0..2).map(|r| Rank::start(fault("work:4"), r, 2, &root, &vars)).collect();
    ready(&ranks);
    for r in &mut ranks {
        let (status, lines) = r.end();
        assert_eq!(status.code(), Some(77), "{lines:?}");
        assert!(lines.iter().any(|l| l == "own handler"), "{lines:?}");
    }
}
