//! `wccl top` and `wccl info`: what an operator asks of ranks and of the machine.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::{has, said, wccl};

/// Bound against hangs.
const HANG: Duration = Duration::from_secs(240);

/// A program under way, ended with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn parent(pid: u64) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// What `wccl top` says of the ranks of `launcher`, by rank, once `enough` of it.
fn seen(launcher: &Running, enough: impl Fn(&[Value]) -> bool) -> Vec<Value> {
    let begun = Instant::now();
    loop {
        let out = wccl().args(["top", "--once", "--json", "--flight"]).output().unwrap();
        let text = said(&out);
        let mut ranks: Vec<Value> = text
            .lines()
            .map(|l| serde_json::from_str::<Value>(l).unwrap())
            // Between them is the guard.
            .filter(|v| {
                let guard = parent(v["pid"].as_u64().unwrap());
                guard.and_then(|g| parent(g.into())) == Some(launcher.0.id())
            })
            .collect();
        ranks.sort_by_key(|v| v["rank"].as_u64());
        if enough(&ranks) {
            assert_eq!(out.status.code(), Some(0), "{text}");
            return ranks;
        }
        assert!(begun.elapsed() < HANG, "{text}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn top_shows_ranks_at_work_and_one_that_is_stopped() {
    let bench = ["bench", "-r", "2", "-c", "0", "-b", "1M", "-e", "1M", "-n", "1000000", "allreduce"];
    let launcher = Running(wccl().args(bench).stdout(Stdio::null()).spawn().unwrap());
    let ranks = seen(&launcher, |r| r.len() == 2 && r.iter().all(|v| v["ops"].as_u64() > Some(100)));
    for (i, v) in ranks.iter().enumerate() {
        assert_eq!((v["rank"].as_u64(), v["ranks"].as_u64(), &v["state"]), (Some(i as u64), Some(2), &"alive".into()));
        let last = v["flight"].as_array().unwrap().last().unwrap();
        has(last["what"].as_str().unwrap(), &["all_reduce fp32 sum count 262144 by "]);
        assert!(v["doing"].as_str().unwrap().contains("all_reduce fp32 sum count 262144"), "{v}");
    }
    let pid = ranks[1]["pid"].to_string();
    let table = said(&wccl().args(["top", "--once", "--pid", &pid]).output().unwrap());
    has(&table, &["waits/s", &pid, "1 of 2", "all_reduce"]);
    assert_eq!(table.lines().count(), 2, "the heading and the rank: {table}");

    assert!(Command::new("kill").args(["-s", "STOP", &pid]).status().unwrap().success());
    seen(&launcher, |r| r.len() == 2 && r[1]["state"] == "process stopped" && r[0]["state"] == "alive");
}

#[test]
fn top_on_nothing_says_so() {
    let own = std::process::id().to_string();
    let out = wccl().args(["top", "--once", "--pid", &own]).output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    has(&said(&out), &[&format!("process {own} is no rank of wccl, or none that this user may look at")]);
    let out = wccl().args(["top", "--once", "--pid", &own, "--json"]).output().unwrap();
    assert_eq!((out.status.code(), said(&out).as_str()), (Some(1), ""));
    for interval in ["0", "-1"] {
        let out = wccl().args(["top", "-i", interval]).output().unwrap();
        assert_eq!(out.status.code(), Some(2));
        has(&said(&out), &[&format!("--interval {interval}: at least 0.05 seconds are expected")]);
    }
}

/// The limits that matter, with the values of the process that asks.
#[test]
fn info_says_what_this_process_may_use() {
    let script = "ulimit -Sn 321 && ulimit -v 40000000 && exec \"$0\" info";
    let out = Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_wccl")])
        .env("NEURON_RT_FAKE_INSTANCE_TYPE", "trn1.32xlarge")
        .output()
        .unwrap();
    let text = said(&out);
    assert_eq!(out.status.code(), Some(0), "{text}");
    let row = |name: &str| text.lines().find(|l| l.trim_start().starts_with(name)).unwrap_or_else(|| panic!("{text}"));
    has(row("file descriptors"), &["321 (RLIMIT_NOFILE), hard limit "]);
    has(row("address space"), &["40960000000 (RLIMIT_AS)"]);
    has(row("threads and processes"), &["RLIMIT_NPROC", "pids.max"]);
    has(row("shared memory"), &["memory of the machine: ", " bytes", "memory.max", "RLIMIT_FSIZE", "not of /dev/shm"]);
    // As the variable has it.
    has(row("family"), &["trn1.32xlarge ("]);
}

/// A program that meets nobody finds out here which variable is to blame.
#[test]
fn info_says_which_job_the_launcher_has_described() {
    let job = |vars: &[(&str, &str)]| {
        let mut c = wccl();
        for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NEURON_RT_ROOT_COMM_ID"] {
            c.env_remove(name);
        }
        let out = c.arg("info").envs(vars.iter().copied()).output().unwrap();
        assert_eq!(out.status.code(), Some(0));
        said(&out)
    };
    let mpi = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "3"),
        ("MASTER_ADDR", "node7"),
        ("MASTER_PORT", "7777"),
    ];
    has(
        &job(&mpi),
        &[
            "1 of 3",
            "node7:7777",
            "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE (Open MPI), MASTER_ADDR and MASTER_PORT",
        ],
    );
    has(
        &job(&mpi[..1]),
        &["none: ", "OMPI_COMM_WORLD_RANK=1 is set and OMPI_COMM_WORLD_SIZE is not; Open MPI sets both"],
    );
}

/// Above all a policy must not be left out because its name cannot be read.
#[test]
fn a_variable_that_cannot_be_read_is_an_error_that_names_it() {
    use std::os::unix::ffi::OsStrExt;
    let bytes = std::ffi::OsStr::from_bytes(b"/none/\xff");
    for name in [
        "WCCL_POLICY",
        "WCCL_WAIT",
        "WCCL_TIMEOUT_MS",
        "WCCL_LOG",
        "WCCL_LOG_FORMAT",
        "NEURON_RT_VISIBLE_CORES",
        "NEURON_CCOM_SOCK_TIMEOUT",
        "CCOM_SOCKET_IFNAME",
    ] {
        let out = wccl().arg("info").env(name, bytes).output().unwrap();
        assert!(!out.status.success(), "{name}: {}", said(&out));
        has(&said(&out), &[name]);
    }
    // Where a path is meant, its bytes are the path.
    let out = wccl().arg("info").env("WCCL_PLUGIN", bytes).output().unwrap();
    has(&said(&out), &["/none/"]);
}
