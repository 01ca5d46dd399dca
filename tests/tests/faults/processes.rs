//! Ranks as processes: bootstrap over modelled servers, deaths, ranks that never come, and what is left behind.

use std::collections::HashSet;
use std::process::Command;
use std::time::{Duration, Instant};

use wccl::{CommOptions, Communicator, DataType, Io, ReduceOp, Runtime};

use crate::common::ranks::{Rank, spawn, start, start_at};
use crate::common::{HANG, config, free_port, world};

/// Small modelled servers: one trn1 accelerator of two cores each.
const SMALL: [(&str, &str); 3] = [
    ("NEURON_RT_FAKE_INSTANCE_TYPE", "trn1.2xlarge"),
    ("NEURON_DEVICE_COUNT", "1"),
    ("NEURON_RT_DBG_VIRTUAL_SERVER_SIZE", "2"),
];

/// Proves INV-22, INV-23, INV-25.
#[test]
fn hierarchical_bootstrap_over_small_servers() {
    for n in [4usize, 8] {
        let ranks = start("bootstrap", n, &SMALL);
        let mut groups = HashSet::new();
        for (r, rank) in ranks.iter().enumerate() {
            assert_eq!(rank.line(), "ready", "rank {r}");
            let info = rank.line();
            let (group, place) = info.split_once(" node ").unwrap();
            groups.insert(group.to_string());
            assert_eq!(place, format!("{} of {} local 2", r / 2, n / 2), "rank {r}");
            // Rank 0 starts the root; the first rank of every server starts its local root; nobody else starts anything.
            let tasks = usize::from(r == 0) + usize::from(r % 2 == 0);
            assert_eq!(rank.line(), format!("tasks {tasks}"), "rank {r}");
            assert_eq!(rank.line(), "messages ok", "rank {r}");
        }
        assert_eq!(groups.len(), 1, "cluster id and epoch are the group's: {groups:?}");
        // Across servers a ring edge needs the network, and there is no net plugin: the original's terminal message.
        let graphs: Vec<String> = ranks.iter().map(Rank::line).collect();
        assert!(
            graphs.iter().any(|g| g.contains("No transport found between devices")
                && g.contains("Possible replica group misconfiguration")),
            "{graphs:?}"
        );
    }
}

/// Proves INV-23.
#[test]
fn a_group_that_fits_one_server_is_flat() {
    let ranks = start("bootstrap", 2, &SMALL[..2]);
    for (r, rank) in ranks.iter().enumerate() {
        assert_eq!(rank.line(), "ready");
        assert!(rank.line().ends_with("node 0 of 1 local 2"));
        assert_eq!(rank.line(), format!("tasks {}", usize::from(r == 0)));
        assert_eq!(rank.line(), "messages ok");
        assert_eq!(rank.line(), "graph ok");
    }
}

/// A group by id is never global, so it is flat however large it is, and its root is started where the id was made.
///
/// Proves INV-22, INV-23.
#[test]
fn a_group_by_id_is_flat_even_beyond_one_server() {
    let mut c = config();
    let vars = |name: &str| SMALL.iter().find(|v| v.0 == name).map(|v| v.1.into());
    c.device = hw_bridge::model::DeviceConfig::from_vars(vars).unwrap();
    c.virtual_server_size = 2;
    let maker = Runtime::open(c.clone()).unwrap();
    let id = maker.unique_id(4).unwrap();
    let ranks: Vec<_> = (0..4)
        .map(|rank| {
            let c = c.clone();
            std::thread::spawn(move || {
                let runtime = Runtime::open(c).unwrap();
                let options = CommOptions { graph: false, ..CommOptions::with_id(id, rank, 4) };
                let comm = runtime.init_comm(options).unwrap();
                let all = comm.bootstrap_all_gather(&[rank as u8]).unwrap();
                assert_eq!(all, [0, 1, 2, 3]);
                runtime.tenant().counters.tasks()
            })
        })
        .collect();
    let tasks: Vec<u64> = ranks.into_iter().map(|t| t.join().unwrap()).collect();
    assert_eq!(tasks, [0, 0, 0, 0]);
    assert_eq!(maker.tenant().counters.tasks(), 1);
}

/// The graph belongs to its own entry: init leaves no rings, with and without the graph bypassed, and building them twice
/// changes nothing.
///
/// Proves INV-55.
#[test]
fn the_graph_is_built_by_its_own_entry_only() {
    let root = format!("127.0.0.1:{}", free_port());
    let ranks: Vec<_> = (0..2)
        .map(|rank| {
            let root = root.clone();
            std::thread::spawn(move || {
                let runtime = Runtime::open(config()).unwrap();
                let options = CommOptions { graph: false, ..CommOptions::with_root(root, rank, 2) };
                let mut comm = runtime.init_comm(options).unwrap();
                assert!(comm.info().rings.is_empty() && comm.query_info().unwrap().rings.is_empty());
                assert!(comm.ring_connector(0, true).is_err());
                let e = comm.barrier().unwrap_err().to_string();
                assert!(e.contains("build_graph"), "{e}");
                comm.build_graph().unwrap();
                let rings = comm.rings().to_vec();
                assert!(!rings.is_empty());
                comm.ring_connector(0, true).unwrap();
                comm.build_graph().unwrap();
                assert_eq!(*comm.rings(), rings);
                comm.barrier().unwrap();
            })
        })
        .collect();
    ranks.into_iter().for_each(|t| t.join().unwrap());
}

/// A communicator starts with DEFAULT: it is connected along its rings and no further, until an operation needs more.
///
/// Proves INV-14.
#[test]
fn a_communicator_starts_connected_along_its_rings_only() {
    world(6, &config(), |mut comm| {
        let (rank, n) = (comm.rank(), comm.nranks());
        let mut along = HashSet::new();
        for ring in comm.rings().iter() {
            let at = ring.iter().position(|r| *r == rank).unwrap();
            along.extend([ring[(at + 1) % n], ring[(at + n - 1) % n]]);
        }
        assert!(along.len() < n - 1, "rings lead to everybody, so that nothing can be seen: {along:?}");
        let linked = |comm: &Communicator| -> HashSet<usize> {
            (0..n).filter(|r| *r != rank && comm.core().endpoint.linked(*r)).collect()
        };
        assert_eq!(linked(&comm), along);
        let t = comm.allocate(1 << 20).unwrap();
        comm.raw().all_reduce(Io::in_place(&t), 1 << 18, DataType::Fp32, ReduceOp::Sum).unwrap();
        assert_eq!(linked(&comm).len(), n - 1);
    });
}

/// After a P2P connect the host does nothing for it: no proxy, no semaphore, no call of the component.
///
/// Proves INV-85.
#[test]
fn nothing_works_for_a_connected_p2p_edge() {
    world(2, &config(), |mut comm| {
        comm.barrier().unwrap();
        let tenant = comm.runtime().tenant().clone();
        // The root's task ends by itself once all ranks are joined. From then on no thread is the edge's: nothing of the host's
        // or the guest's is left to work for it.
        let until = Instant::now() + HANG;
        while tenant.tasks_alive() > 0 {
            assert!(Instant::now() < until, "a background task lives on");
            std::thread::sleep(Duration::from_millis(5));
        }
        let host_calls = tenant.counters.host_calls();
        let calls = comm.runtime().component_calls();
        let mut buf = vec![1u8; 100_000];
        for _ in 0..20 {
            comm.raw().all_gather(Io::HostInPlace(&mut buf), 50_000, DataType::Uint8).unwrap();
        }
        assert_eq!(comm.runtime().component_calls(), calls);
        assert_eq!((tenant.counters.host_calls(), tenant.tasks_alive()), (host_calls, 0));
        let mut proxy = comm.core().proxy.lock().unwrap();
        for stream in 0..4 {
            assert_eq!(proxy.progress(stream, 0).unwrap(), (true, true), "nothing was ever queued");
        }
        // And nothing could be: a P2P communicator has no network connector.
        assert!(proxy.start(0, 0, &[0; 96], &[], &[]).unwrap_err().to_string().contains("no network connector"));
    });
}

/// Killing one rank in mid-run ends the others long before their deadline, and they name it.
#[test]
fn a_killed_rank_is_named_by_the_others_at_once() {
    // The deadline is later than a line is waited for.
    let mut ranks = start("loop", 3, &[("WCCL_TIMEOUT_MS", "600000")]);
    for r in &ranks {
        assert_eq!(r.line(), "ready");
    }
    // In an operation, most likely; what is said is the same before it.
    std::thread::sleep(Duration::from_millis(300));
    let pid = ranks[1].child.id();
    ranks[1].child.kill().unwrap();
    for r in [0, 2] {
        let rest = ranks[r].rest();
        let said = rest.last().unwrap();
        assert!(
            said.starts_with("error:") && said.contains("rank 1") && said.contains(&format!("pid {pid}")),
            "{said}"
        );
        assert!(!ranks[r].child.wait().unwrap().success());
    }
}

/// The death of a rank ends the messages from and to it, at once and by its name, and no others.
#[test]
fn a_killed_rank_ends_its_own_messages_only() {
    // The deadline is later than a line is waited for.
    for direct in ["1", "0"] {
        let mut ranks = start("messages", 4, &[("WCCL_TIMEOUT_MS", "600000"), ("WCCL_DIRECT", direct)]);
        for r in &ranks {
            assert_eq!((r.line().as_str(), r.line().as_str()), ("ready", "messages ok"));
        }
        let pid = ranks[3].child.id();
        ranks[3].kill();
        for (r, rank) in ranks[..2].iter().enumerate() {
            for what in ["receive: receive #", "send: send #"] {
                let said = rank.line();
                let names = said.contains(&format!("rank 3 (pid {pid}) has left: process ended"));
                assert!(said.starts_with(what) && names && said.contains(&format!("on rank {r}")), "{said}");
            }
            assert_eq!(rank.line(), "the others go on");
        }
    }
}

/// The survivors of a rank leave what each did last, that rank with them, and say of each how it stands.
#[test]
fn survivors_leave_the_flight_records_of_a_killed_rank() {
    let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("flight-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let mut ranks = start("loop", 3, &[("WCCL_FLIGHT_DIR", dir.to_str().unwrap())]);
    for r in &ranks {
        assert_eq!(r.line(), "ready");
    }
    std::thread::sleep(Duration::from_millis(300));
    let victim = ranks[1].child.id();
    ranks[1].kill();
    for r in [0, 2] {
        ranks[r].rest();
        let pid = ranks[r].child.id();
        let ended = format!("-{r}-{pid}.txt");
        let file = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path());
        let file = file.into_iter().find(|f| f.to_str().unwrap().ends_with(&ended)).expect("a file of the rank");
        let text = std::fs::read_to_string(file).unwrap();
        for words in [
            format!("\nrank {r} of 3, pid {pid}: failed: operation #"),
            format!("\nrank 1 of 3, pid {victim}: process ended\n"),
            " all_reduce fp32 max count 262144 ".into(),
        ] {
            assert!(text.contains(&words), "{words}: {text}");
        }
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

/// A rank in a PID namespace of its own sees no pid of the others: their end is noticed all the same, and no other process is
/// taken for them.
#[test]
fn the_end_of_a_rank_in_another_pid_namespace_is_noticed() {
    let namespaces = Command::new("unshare").args(["-p", "-f", "true"]).status();
    assert!(namespaces.is_ok_and(|s| s.success()), "did not run: PID namespaces need root and util-linux");
    for victim in [0, 1] {
        let root = format!("127.0.0.1:{}", free_port());
        let program = env!("CARGO_BIN_EXE_rank");
        let mut inside = Command::new("unshare");
        inside.args(["-p", "-f", "--kill-child", program]);
        let mut ranks: Vec<Rank> = [Command::new(program), inside]
            .into_iter()
            .enumerate()
            .map(|(rank, command)| spawn(command, &root, "loop", rank, 2, &[]))
            .collect();
        for r in &ranks {
            assert_eq!(r.line(), "ready");
        }
        // What is killed of rank 1 is its launcher, which takes it along.
        ranks[victim].child.kill().unwrap();
        let said = ranks[1 - victim].rest().pop().unwrap();
        let pid = if victim == 0 { "pid unknown here, other PID namespace" } else { "pid " };
        let named = format!("rank {victim} ({pid}");
        assert!(said.starts_with("error:") && said.contains(&named), "{said}");
        assert!(said.contains("has ended"), "{said}");
        assert!(!ranks[1 - victim].child.wait().unwrap().success());
    }
}

/// Proves INV-26.
#[test]
fn a_rank_that_never_starts_is_named_when_the_bootstrap_times_out() {
    let root = format!("127.0.0.1:{}", free_port());
    let mut c = config();
    c.vars.insert("NEURON_CCOM_SOCK_TIMEOUT".into(), "3000".into());
    let runtime = Runtime::open(c).unwrap();
    let e = runtime.init_comm(CommOptions::with_root(root, 0, 3)).unwrap_err().to_string();
    assert!(e.contains("1/3 ranks joined") && e.contains("missing 1, 2"), "{e}");
}

#[test]
fn a_rank_that_comes_too_late_is_named_by_the_operation() {
    let ranks = start("late", 3, &[]);
    for r in &ranks[..2] {
        assert_eq!(r.line(), "ready");
        let said = r.line();
        assert!(said.contains("rank 2") && said.contains("operation #2 (barrier)"), "{said}");
    }
}

/// Nothing is left of a killed group: no process, no file in the shared-memory file system, no listening port.
#[test]
fn a_killed_group_leaves_nothing_behind() {
    let shm = || -> HashSet<_> {
        std::fs::read_dir("/dev/shm").map(|d| d.flatten().map(|e| e.file_name()).collect()).unwrap_or_default()
    };
    let before = shm();
    let mut ranks = start("loop", 2, &[]);
    for r in &ranks {
        assert_eq!(r.line(), "ready");
    }
    // What the two hold: inodes of their sockets.
    let held: HashSet<String> = ranks
        .iter()
        .flat_map(|r| std::fs::read_dir(format!("/proc/{}/fd", r.child.id())).unwrap().flatten())
        .filter_map(|fd| std::fs::read_link(fd.path()).ok())
        .filter_map(|to| Some(to.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_string()))
        .collect();
    let open = || {
        let mut all = HashSet::new();
        for table in ["unix", "tcp", "tcp6"] {
            let text = std::fs::read_to_string(format!("/proc/net/{table}")).unwrap();
            all.extend(text.split_whitespace().map(str::to_string));
        }
        all
    };
    assert!(!held.is_disjoint(&open()), "the ranks listen and are connected");
    let pids: Vec<u32> = ranks.iter().map(|r| r.child.id()).collect();
    for r in &mut ranks {
        r.kill();
    }
    assert_eq!(shm(), before);
    let now = open();
    assert!(held.iter().all(|inode| !now.contains(inode)), "sockets are left");
    for pid in pids {
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }
}

/// A fixed port may be used again and again.
#[test]
fn repeated_runs_on_one_port() {
    let root = format!("127.0.0.1:{}", free_port());
    for _ in 0..5 {
        let ranks = start_at(&root, "once", 2, &[]);
        for r in &ranks {
            assert_eq!((r.line(), r.line()), ("ready".into(), "done".into()));
        }
    }
}

/// Runs the program `rank` as rank 0 and 1 with the arguments of `unshare`, each under a host name of its own.
fn two_hosts(namespaces: &str, mode: &str, vars: &[(&str, &str)]) -> Vec<Rank> {
    let possible = Command::new("unshare").args([namespaces, "hostname", "red"]).status();
    assert!(
        possible.is_ok_and(|s| s.success()),
        "did not run: `unshare {namespaces} hostname red` fails here; user namespaces and the programs of util-linux and \
         hostname are needed"
    );
    let root = format!("127.0.0.1:{}", free_port());
    let start = |(rank, host)| {
        let mut command = Command::new("unshare");
        command.args([namespaces, "sh", "-c", "hostname \"$0\" && exec \"$@\"", host, env!("CARGO_BIN_EXE_rank")]);
        spawn(command, &root, mode, rank, 2, vars)
    };
    ["red", "blue"].into_iter().enumerate().map(start).collect()
}

/// As containers on one machine have them that share its network. Their memory is shared, of device and process.
#[test]
fn ranks_under_different_host_names_are_on_one_server() {
    for rank in two_hosts("-Uru", "once", &[]) {
        assert_eq!((rank.line(), rank.line()), ("ready".into(), "done".into()));
    }
}

/// Proves INV-82: where the first transport declines, the next is asked; without one the sentence says where both ranks are.
#[test]
fn ranks_that_no_transport_serves_are_named_with_their_hosts() {
    let names = |said: &str| {
        assert!(said.contains("No transport found between devices"), "{said}");
        assert!(said.contains("rank 0 on host red") && said.contains("rank 1 on host blue"), "{said}");
        assert!(said.contains("NET_NEURON: this release has no network between servers"), "{said}");
    };
    for (var, value, why) in [
        ("NCCL_P2P_DISABLE", "1", "P2P: NCCL_P2P_DISABLE forbids it"),
        ("NEURON_RT_DBG_VIRTUAL_SERVER_SIZE", "1", "P2P: they are on different virtual servers"),
    ] {
        let ranks = two_hosts("-Uru", "once", &[(var, value)]);
        let said: Vec<String> = ranks.iter().map(Rank::line).collect();
        // One may hear of it from the other.
        said.iter().for_each(|s| names(s));
        assert!(said.iter().all(|s| s.contains(why)), "{said:?}");
    }
}
