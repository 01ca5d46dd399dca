//! Faults of the start: ranks that never come, come twice, come late, fail, die; strangers; names and interfaces.

use std::io::Write;
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::{HANG, Rank, alone, fault, fault_after, free_root, has, ready, soon, start};

/// Starts the ranks of a group of `n` that are listed; `vars` gives each rank's variables.
fn some(n: usize, root: &str, ranks: &[usize], vars: impl Fn(usize) -> Vec<(&'static str, String)>) -> Vec<Rank> {
    ranks
        .iter()
        .map(|r| {
            let mine = vars(*r);
            let mine: Vec<(&str, &str)> = mine.iter().map(|(k, v)| (*k, v.as_str())).collect();
            Rank::start(fault("barrier"), *r, n, root, &mine)
        })
        .collect()
}

#[test]
fn a_world_of_two_with_one_rank_says_who_is_missing() {
    let mut ranks = some(2, &free_root(), &[0], |_| vec![("NEURON_CCOM_SOCK_TIMEOUT", "2000".into())]);
    has(&ranks[0].error(), &["error 5 NRT_TIMEOUT", "neuronInitGlobalComm", "1/2 ranks joined after", "missing 1"]);
}

/// A plugin that does not load on one rank: that rank says why at once. It never reaches the group, so the others learn by
/// their deadline who is missing; a launcher ends them at once (`wccl run`, see cli/tests/program/launch.rs).
#[test]
fn a_rank_whose_plugin_does_not_load_says_why_and_is_missed_by_the_others() {
    let broken = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("broken-{}.wasm", std::process::id()));
    std::fs::write(&broken, b"\0asm this is no plugin").unwrap();
    let file = broken.display().to_string();
    let mut ranks = some(3, &free_root(), &[0, 1, 2], |r| {
        let mut vars = vec![("NEURON_CCOM_SOCK_TIMEOUT", "10000".to_string())];
        if r == 1 {
            vars.push(("WCCL_PLUGIN", file.clone()));
        }
        vars
    });
    let begun = Instant::now();
    has(&ranks[1].error(), &["Error opening libnccom.so, cannot use collective operations", &file]);
    soon("a broken plugin told", begun);
    for r in [0, 2] {
        has(&ranks[r].error(), &["error 5 NRT_TIMEOUT", "2/3 ranks joined", "missing 1"]);
    }
    std::fs::remove_file(&broken).unwrap();
}

/// A plugin that fails on one rank before it has joined: all learn the reason and the rank at once, with one status.
#[test]
fn an_interface_that_does_not_exist_is_named_with_those_that_do_and_told_to_all() {
    let root = free_root();
    let vars = |r| if r == 1 { vec![("CCOM_SOCKET_IFNAME", "eth9".to_string())] } else { vec![] };
    let mut ranks = some(3, &root, &[0], vars);
    // A root that is not there for seconds could not be told.
    drop(listening(&root));
    ranks.extend(some(3, &root, &[1, 2], vars));
    let begun = Instant::now();
    let words =
        ["No usable listening interface found", "lo (127.0.0.1)", "CCOM_SOCKET_IFNAME=eth9 matches none of them"];
    has(&ranks[1].error(), &["error 2 NRT_INVALID"]);
    for r in [0, 2] {
        let e = ranks[r].error();
        has(&e, &["error 2 NRT_INVALID", "rank 1 of 3 gave up before it joined"]);
        has(&e, &words);
    }
    soon("a failure before the join told to all", begun);
}

#[test]
fn two_processes_with_one_rank_are_both_named() {
    let _one = alone();
    let begun = Instant::now();
    let mut ranks = some(3, &free_root(), &[0, 1, 1], |_| vec![]);
    for r in &mut ranks {
        let e = r.error();
        has(&e, &["rank 1 joined twice, from 127.0.0.1:", " and from 127.0.0.1:", "two processes claim the same rank"]);
    }
    soon("two ranks 1 told", begun);
    // Two ranks 0: the second finds the root's port taken, and asks whose it is.
    let begun = Instant::now();
    let mut ranks = some(2, &free_root(), &[0, 0], |_| vec![]);
    for r in &mut ranks {
        has(&r.error(), &["rank 0 joined twice, from 127.0.0.1:", "two processes claim the same rank"]);
    }
    soon("two ranks 0 told", begun);
}

#[test]
fn a_root_that_starts_late_is_waited_for() {
    let root = free_root();
    let mut early = some(3, &root, &[1, 2], |_| vec![]);
    std::thread::sleep(Duration::from_secs(3));
    let mut late = some(3, &root, &[0], |_| vec![]);
    early.iter_mut().chain(&mut late).for_each(|r| drop(r.good()));
}

/// A stranger's connection to the root, as soon as that listens.
fn listening(root: &str) -> TcpStream {
    let until = Instant::now() + HANG;
    loop {
        match TcpStream::connect(root) {
            Ok(s) => return s,
            Err(e) => assert!(Instant::now() < until, "the root does not listen: {e}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Mute and foreign connections on the root's port, from before the ranks to their end.
#[test]
fn strangers_on_the_roots_port_cost_a_group_nothing() {
    let _one = alone();
    let root = free_root();
    let mut first = some(2, &root, &[0], |_| vec![]);
    let mut strangers = Vec::new();
    while strangers.len() < 300 {
        let mut s = listening(&root);
        if strangers.len() % 2 == 0 {
            s.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curious\r\n\r\n").unwrap();
        }
        strangers.push(s);
    }
    let begun = Instant::now();
    let mut second = some(2, &root, &[1], |_| vec![]);
    first[0].good();
    second[0].good();
    // Read one after the other, the 150 mute ones would cost 300 seconds, which is more than a rank is waited for.
    soon("a group with 300 strangers", begun);
    drop(strangers);
}

/// A foreign program on the root's port: the rank that should listen there says so.
#[test]
fn a_root_port_that_stays_taken_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let root = taken.local_addr().unwrap().to_string();
    let mut ranks = some(2, &root, &[0], |_| vec![("NEURON_CCOM_SOCK_TIMEOUT", "3500".into())]);
    let e = ranks[0].error();
    has(&e, &["starting the bootstrap root at", &root, "stayed in use", "choose another port"]);
}

/// The root of a group that is over, or one of another job, may still listen where the own one will: who has dialled it waits for
/// its own.
#[test]
fn a_rank_that_met_another_groups_root_joins_its_own() {
    let over = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let root = over.local_addr().unwrap().to_string();
    let mut second = some(2, &root, &[1], |_| vec![]);
    // One is closed in good order, one has been let in by nobody when the other root goes.
    drop(over.accept().unwrap());
    let queued = rustix::event::PollFd::new(&over, rustix::event::PollFlags::IN);
    let most = rustix::event::Timespec { tv_sec: HANG.as_secs() as i64, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut [queued], Some(&most)).unwrap(), 1);
    drop(over);
    let mut first = some(2, &root, &[0], |_| vec![]);
    first[0].good();
    second[0].good();
}

#[test]
fn many_joins_in_one_process_and_many_runs_on_one_port_need_no_waiting() {
    let _one = alone();
    let begun = Instant::now();
    start(2, &[("FAULT_CYCLES", "200")], |_| "barrier").iter_mut().for_each(|r| drop(r.good()));
    println!("200 joins in one process: {} ms", begun.elapsed().as_millis());
    let root = free_root();
    for _ in 0..10 {
        some(2, &root, &[0, 1], |_| vec![]).iter_mut().for_each(|r| drop(r.good()));
    }
}

/// Ports of the kernel's own choice are few: a range of 50, in a network namespace of its own.
#[test]
fn few_ephemeral_ports_are_enough() {
    let _one = alone();
    let up = "ip link set lo up && echo 40000 40049 > /proc/sys/net/ipv4/ip_local_port_range && cd /";
    let two = "(RANK=1 FAULT_CYCLES=4 \"$0\" barrier &) && RANK=0 FAULT_CYCLES=4 exec \"$0\" barrier";
    let c = in_namespace(&format!("{up} && {two}"));
    let lines = Rank::start(c, 0, 2, "127.0.0.1:39000", &[]).end().1;
    assert_eq!(lines.iter().filter(|l| *l == "done").count(), 2, "{lines:?}");
}

/// A shell script in a network namespace of its own.
fn in_namespace(script: &str) -> Command {
    let allowed = Command::new("unshare").args(["-n", "true"]).status().is_ok_and(|s| s.success());
    assert!(allowed, "did not run: no network namespaces here (needs root and util-linux)");
    let mut c = Command::new("unshare");
    c.args(["-n", "sh", "-c", script, env!("CARGO_BIN_EXE_fault")]);
    c
}

const TWO: &str = "(RANK=1 \"$0\" barrier &) && RANK=0 exec \"$0\" barrier";

/// An interface with nothing but a link-local address is not chosen: the sentence says that there is none, and of which
/// family the root is.
#[test]
fn link_local_addresses_are_not_chosen() {
    let _one = alone();
    let up = "ip link set lo up && ip addr add fe80::77/64 dev lo nodad";
    let gone = "ip addr del 127.0.0.1/8 dev lo; ip addr del ::1/128 dev lo; ip route add local 10.77.0.0/24 dev lo";
    let c = in_namespace(&format!("{up}; {gone}; RANK=0 exec \"$0\" barrier"));
    let e = Rank::start(c, 0, 2, "10.77.0.1:7700", &[("CCOM_SOCKET_IFNAME", "")]).error();
    has(&e, &["No usable listening interface found: this machine has ", "the root 10.77.0.1:7700 is IPv4"]);
}

/// A root that is link-local itself is joined over its link, if it says which link that is.
#[test]
fn a_link_local_root_is_joined_over_its_link() {
    let _one = alone();
    let up = "ip link set lo up && ip addr add fe80::77/64 dev lo nodad";
    let c = in_namespace(&format!("{up} && {TWO}"));
    let nothing = ("CCOM_SOCKET_IFNAME", "");
    let (status, lines) = Rank::start(c, 0, 2, "[fe80::77%1]:7703", &[nothing]).end();
    assert!(status.success() && lines.iter().filter(|l| *l == "done").count() == 2, "{lines:?}");
    let c = in_namespace(&format!("{up} && RANK=0 exec \"$0\" barrier"));
    let e = Rank::start(c, 0, 2, "[fe80::77]:7704", &[nothing]).error();
    has(&e, &["Invalid Comm Id [[fe80::77]:7704]", "needs the number of its interface", "[fe80::1%2]:7704"]);
}

#[test]
fn a_loopback_address_with_a_root_elsewhere_is_warned_of() {
    let _one = alone();
    // The root's address is reached over loopback, but no interface carries it.
    let up = "ip link set lo up && ip route add local 10.77.0.0/24 dev lo";
    let c = in_namespace(&format!("{up} && {TWO}"));
    let (status, lines) = Rank::start(c, 0, 2, "10.77.0.1:7701", &[("FAULT_LOG", "1")]).end();
    let said = lines.join("\n");
    assert!(status.success(), "{said}");
    has(&said, &["the bootstrap address of this rank is loopback (127.0.0.1)", "the root is at 10.77.0.1:7701"]);
    has(&said, &["CCOM_SOCKET_IFNAME"]);
}

#[test]
fn a_host_name_of_the_root_that_means_loopback_is_warned_of() {
    let _one = alone();
    let script = format!(
        "mount -t tmpfs none /mnt && echo '127.0.1.1 node-a.example' > /mnt/hosts && mount --bind /mnt/hosts /etc/hosts && {TWO}"
    );
    let allowed = Command::new("unshare").args(["-m", "true"]).status().is_ok_and(|s| s.success());
    assert!(allowed, "did not run: no mount namespaces here (needs root and util-linux)");
    let mut c = Command::new("unshare");
    c.args(["-m", "sh", "-c", &script, env!("CARGO_BIN_EXE_fault")]);
    let port = free_root().rsplit_once(':').unwrap().1.to_string();
    let (status, lines) = Rank::start(c, 0, 2, &format!("node-a.example:{port}"), &[("FAULT_LOG", "1")]).end();
    let said = lines.join("\n");
    assert!(status.success(), "{said}");
    has(&said, &["the root's host name node-a.example means 127.0.1.1 here, a loopback address"]);
}

#[test]
fn both_address_families_are_named_when_they_do_not_fit() {
    let _one = alone();
    let c = in_namespace("ip link set lo up; ip addr del ::1/128 dev lo; RANK=0 exec \"$0\" barrier");
    let e = Rank::start(c, 0, 2, "127.0.0.1:7702", &[("CCOM_SOCKET_FAMILY", "AF_INET6")]).error();
    has(&e, &["lo (127.0.0.1)", "CCOM_SOCKET_FAMILY=AF_INET6 is asked for", "the root 127.0.0.1:7702 is IPv4"]);
}

#[test]
fn roots_are_named_by_address_of_either_family_or_by_host_name() {
    let port = || free_root().rsplit_once(':').unwrap().1.to_string();
    for root in [format!("[::1]:{}", port()), format!("localhost:{}", port())] {
        let missing =
            root.starts_with('[') && TcpStream::connect(("::1", 1)).is_err_and(|e| e.raw_os_error() == Some(99));
        assert!(!missing, "did not run: no IPv6 here");
        some(2, &root, &[0, 1], |_| vec![]).iter_mut().for_each(|r| drop(r.good()));
    }
    // A name of 253 characters is looked up, one of 254 is refused with the forms there are.
    let name = |n: usize| {
        format!("{}.invalid", ["a".repeat(60), "b".repeat(60), "c".repeat(60), "d".repeat(n - 191)].join("."))
    };
    let brief = |_| vec![("NEURON_CCOM_SOCK_TIMEOUT", "20000".to_string())];
    let long = some(2, &format!("{}:7", name(253)), &[1], brief).remove(0).error();
    has(&long, &["looking up host name aaaa"]);
    let e = some(2, &format!("{}:7", name(254)), &[1], |_| vec![]).remove(0).error();
    has(&e, &["Invalid Comm Id", "please use format: <ipv4>:<port> | [<ipv6>]:<port> | <hostname>:<port>"]);
}

/// A document that an image left in the environment: the rank that has it names variable and file, the others the rank.
#[test]
fn a_graph_file_that_is_missing_is_named_with_its_variable_and_told_to_all() {
    let mut ranks = some(3, &free_root(), &[0, 1, 2], |r| {
        if r == 2 { vec![("NCCL_GRAPH_FILE", "/nowhere/graph.xml".to_string())] } else { vec![] }
    });
    let begun = Instant::now();
    let e = ranks[2].error();
    has(&e, &["NCCL_GRAPH_FILE", "/nowhere/graph.xml", "No such file or directory"]);
    for r in [0, 1] {
        let told = ranks[r].error();
        has(&told, &["rank 2 failed: ", "/nowhere/graph.xml", "NCCL_GRAPH_FILE", "error 2 NRT_INVALID"]);
    }
    soon("a missing file told to all", begun);
}

/// A rank is killed at different moments of its start. The others name it, all with one status, long before their time-out; one that
/// came when the root had already gone cannot know, and says where it waited.
#[test]
fn a_rank_killed_while_it_connects_is_named_with_one_status_on_all() {
    let _one = alone();
    let mut in_bootstrap = 0;
    let moments = (24..=60).step_by(3).chain([80, 120]);
    let all = moments.clone().count();
    let brief = |_| vec![("NEURON_CCOM_SOCK_TIMEOUT", "30000".to_string())];
    for after in moments {
        let root = free_root();
        let mut ranks = some(4, &root, &[0, 1, 2, 3], brief);
        std::thread::sleep(Duration::from_millis(after));
        ranks[1].child.kill().unwrap();
        if ranks[1].end().1.iter().any(|l| l == "ready") {
            continue;
        }
        let begun = Instant::now();
        // Killed before it reported, it is a rank that never came: not what is looked at here.
        let first = {
            std::thread::sleep(Duration::from_secs(1));
            ranks[0].child.try_wait().unwrap()
        };
        if first.is_none() {
            continue;
        }
        in_bootstrap += 1;
        for r in [0, 2, 3] {
            let e = ranks[r].error();
            if r != 0 && e.starts_with("error 5 NRT_TIMEOUT") {
                has(&e, &[&root]);
                continue;
            }
            assert!(e.starts_with("error 14 NRT_CLOSED") || e.starts_with("error 1200"), "rank {r}, {after} ms: {e}");
            has(&e, &["rank 1"]);
        }
        soon("a death in the bootstrap told to all", begun);
    }
    println!("{in_bootstrap} of {all} kills met the bootstrap");
}

#[test]
fn a_script_in_the_shell_is_a_rank_like_any_other() {
    let root = free_root();
    let mut ranks: Vec<Rank> = (0..2).map(|r| Rank::start(fault_after("true", "barrier"), r, 2, &root, &[])).collect();
    ready(&ranks);
    ranks.iter_mut().for_each(|r| drop(r.good()));
}

/// A network namespace that nobody has set up: each rank says at once that loopback is down, and what to do.
#[test]
fn loopback_that_is_down_is_named() {
    let _one = alone();
    let allowed = Command::new("unshare").args(["-Urn", "true"]).status().is_ok_and(|s| s.success());
    assert!(allowed, "did not run: no user and network namespaces here (the decision itself has a unit test)");
    for rank in 0..2 {
        let mut c = Command::new("unshare");
        c.args(["-Urn", env!("CARGO_BIN_EXE_fault"), "barrier"]);
        let e = Rank::start(c, rank, 2, "127.0.0.1:39001", &[("NEURON_CCOM_SOCK_TIMEOUT", "60000")]).error();
        has(&e, &["the loopback interface `lo` is down", "`ip link set lo up`"]);
    }
    // One that was up once has its address all the same.
    let down = "ip link set lo up && ip link set lo down && RANK=0 exec \"$0\" barrier";
    let mut c = Command::new("unshare");
    c.args(["-Urn", "sh", "-c", down, env!("CARGO_BIN_EXE_fault")]);
    let e = Rank::start(c, 0, 2, "127.0.0.1:39001", &[("NEURON_CCOM_SOCK_TIMEOUT", "60000")]).error();
    has(&e, &["the loopback interface `lo` is down"]);
}

/// Ranks of different jobs that meet at one place are strangers: the one that came says what is to be the same, the root waits
/// for its own and says who is missing.
#[test]
fn ranks_with_different_job_secrets_do_not_join_one_another() {
    let root = free_root();
    let mut ranks = some(2, &root, &[0, 1], |r| {
        let mut vars = vec![("NEURON_CCOM_SOCK_TIMEOUT", "6000".to_string())];
        vars.push(("WCCL_JOB_SECRET", format!("the secret of job number {r}")));
        vars
    });
    let stranger = ranks[1].error();
    has(
        &stranger,
        &[
            "rank 1 of 2 reporting to the root at",
            "before it had shown that it knows the group's key",
            "WCCL_JOB_SECRET",
        ],
    );
    assert!(!stranger.contains("the secret of"), "{stranger}");
    has(&ranks[0].error(), &["1/2 ranks joined", "missing 1"]);
    // The same one, from a variable on one rank and a file on the other.
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("job-secret-{}", std::process::id()));
    std::fs::write(&file, "the secret of both jobs\n").unwrap();
    let mut ranks = some(2, &free_root(), &[0, 1], |r| match r {
        0 => vec![("WCCL_JOB_SECRET", "the secret of both jobs".to_string())],
        _ => vec![("WCCL_JOB_SECRET_FILE", file.display().to_string())],
    });
    ranks.iter_mut().for_each(|r| drop(r.good()));
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn a_job_without_a_secret_says_where_one_may_come_from() {
    let of = |vars: &[(&'static str, &str)]| {
        some(1, &free_root(), &[0], |_| vars.iter().map(|(k, v)| (*k, v.to_string())).collect())[0].error()
    };
    let e = of(&[("WCCL_JOB_SECRET", ""), ("WCCL_JOB_SECRET_FILE", ""), ("WCCL_CACHE_DIR", "off")]);
    has(&e, &["WCCL_JOB_SECRET and WCCL_JOB_SECRET_FILE are not set", "the user's own", "the same on all ranks"]);
    let e = of(&[("WCCL_JOB_SECRET", "too short")]);
    has(&e, &["WCCL_JOB_SECRET holds 9 bytes; a job's secret has at least 16"]);
    assert!(!e.contains("too short"), "{e}");
    let e = of(&[("WCCL_JOB_SECRET_FILE", "/dev/zero")]);
    has(&e, &["WCCL_JOB_SECRET_FILE=/dev/zero: it is not a regular file"]);
}
