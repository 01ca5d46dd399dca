//! The service: tenants' processes that move data through memory it grants, and everything that may go wrong between them.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hw_bridge::exec::share::Market;
use hw_bridge::memory::segment::Segment;
use hw_bridge::os::credentials::Credentials;
use sandbox::abort::AbortToken;
use tests::zoo;
use wccl::metrics::{FAMILIES, Usage};
use wccl::serve::{ServeConfig, Server, identify};
use wccl::swap::{Kind, Order, Outcome, coordinate};
use wccl::{CommOptions, DataType, Io, ReduceOp, Runtime, RuntimeConfig};

use crate::common::ranks::{Rank, start, start_at};
use crate::common::{HANG, PluginFile, config, plugin_file, world_at};

/// Policies and sockets of one test, in a directory of its own.
struct Place(PathBuf, Vec<String>);

impl Drop for Place {
    fn drop(&mut self) {
        // A leftover in the temporary folder is harmless.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Ports of the `i`th of `n` tenants, none of which the kernel gives to others: no two may have one in common.
fn ports(i: usize, n: usize) -> (u16, u16) {
    let each = 12_000 / n;
    let first = 20_000 + i * each;
    (first as u16, (first + each - 1) as u16)
}

impl Place {
    /// `policies`: name, logical cores, further lines.
    fn new(name: &str, policies: &[(&str, &[i32], &str)]) -> Place {
        let dir = std::env::temp_dir().join(format!("wccl-serve-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(dir.join("policies")).unwrap();
        let plugin = config().plugin.unwrap();
        let directory = plugin.parent().unwrap().canonicalize().unwrap();
        for (i, (tenant, cores, more)) in policies.iter().enumerate() {
            let (first, last) = ports(i, policies.len());
            let text = format!(
                "tenant = \"{tenant}\"\n[plugins]\ndirectory = {directory:?}\nallow = [{{ file = \"nccom.wasm\" }}, {{ file = \"nccom-next.wasm\" }}]\n\
                 [devices]\ncores = {cores:?}\nhbm = \"256 MiB\"\n[network]\nlisten = [\"127.0.0.1:{first}-{last}\"]\n\
                 reach = [\"127.0.0.1:*\"]\n{more}"
            );
            std::fs::write(dir.join("policies").join(format!("{tenant}.toml")), text).unwrap();
        }
        Place(dir, policies.iter().map(|p| p.0.to_string()).collect())
    }

    /// Where ranks of `tenant` may meet.
    fn root(&self, tenant: &str) -> String {
        let i = self.1.iter().position(|t| t == tenant).unwrap();
        let (first, last) = ports(i, self.1.len());
        format!("127.0.0.1:{}", tests::port::free_of(first..=last))
    }

    /// Has a tenant's policy allow these plugins in the place of the others.
    fn allow(&self, tenant: &str, files: &[&PluginFile]) {
        let policy = self.0.join("policies").join(format!("{tenant}.toml"));
        let directory = files[0].path().parent().unwrap().canonicalize().unwrap();
        let name = |f: &&PluginFile| format!("{{ file = {:?} }}", f.path().file_name().unwrap());
        let files: Vec<String> = files.iter().map(name).collect();
        let plugins = |line: &str| match line.split(' ').next() {
            Some("directory") => format!("directory = {directory:?}"),
            Some("allow") => format!("allow = [{}]", files.join(", ")),
            _ => line.into(),
        };
        let text: Vec<String> = std::fs::read_to_string(&policy).unwrap().lines().map(plugins).collect();
        std::fs::write(policy, text.join("\n")).unwrap();
    }

    fn config(&self) -> ServeConfig {
        let (policies, sockets) = (self.0.join("policies"), self.0.join("sockets"));
        ServeConfig { policies, sockets, base: config(), market: None, allow_own_user: true, identify }
    }

    fn serve(&self) -> Server {
        Server::start(&self.config()).unwrap()
    }

    fn socket(&self, tenant: &str) -> PathBuf {
        self.0.join("sockets").join(format!("{tenant}.sock"))
    }

    /// Ranks of `tenant`, each a process.
    fn ranks(&self, tenant: &str, mode: &str, n: usize, vars: &[(&str, &str)]) -> Vec<Rank> {
        let socket = self.socket(tenant);
        let vars: Vec<_> = vars.iter().copied().chain([("WCCL_SERVICE", socket.to_str().unwrap())]).collect();
        start_at(&self.root(tenant), mode, n, &vars)
    }

    /// A configuration of a client in this process.
    fn client(&self, tenant: &str) -> RuntimeConfig {
        RuntimeConfig { service: Some(self.socket(tenant)), ..config() }
    }
}

fn calls(server: &Server, tenant: &str) -> u64 {
    server.tenants().find(|t| t.0 == tenant).unwrap().2.component_calls()
}

/// Waits until no tenant has a communicator.
fn idle(server: &Server) {
    let begun = Instant::now();
    while !server.working().is_empty() {
        assert!(begun.elapsed() < HANG, "still in use: {:?}", server.working());
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn refusal(socket: &Path, config: RuntimeConfig) -> String {
    let e = Runtime::open(RuntimeConfig { service: Some(socket.into()), ..config });
    e.map(|_| ()).unwrap_err().to_string()
}

/// Two tenants with two processes each: right results, the same bytes as without a service, no call of a component while
/// data moves.
#[test]
fn processes_of_two_tenants_move_data_as_without_a_service() {
    let place = Place::new("two", &[("red", &[0, 1], ""), ("blue", &[2, 3], "")]);
    let server = place.serve();
    let embedded = start("tally", 2, &[]);
    let served = [place.ranks("red", "tally", 2, &[]), place.ranks("blue", "tally", 2, &[])];
    for r in served.iter().chain([&embedded]).flatten() {
        assert_eq!((r.line().as_str(), r.line().as_str()), ("ready", "warm"));
    }
    let before = [calls(&server, "red"), calls(&server, "blue")];
    assert!(before.iter().all(|c| *c > 0), "the service plans: {before:?}");
    let expected: Vec<String> = embedded.iter().map(Rank::line).collect();
    assert!(expected[0].starts_with("80 operations, "), "{}", expected[0]);
    for ranks in &served {
        assert_eq!(ranks.iter().map(Rank::line).collect::<Vec<_>>(), expected);
    }
    assert_eq!([calls(&server, "red"), calls(&server, "blue")], before);
    // Each rank has done 80 operations.
    let runtimes: Vec<Usage> = server.tenants().map(|t| Usage::of(t.2)).collect();
    let metrics = wccl::metrics::text(&runtimes);
    let labels = format!("tenant=\"red\",plugin=\"nccom.wasm\",version=\"{}\"", runtimes[1].version);
    assert!(runtimes[1].version.split('.').count() == 4, "{metrics}");
    for line in [
        format!("wccl_operations_total{{{labels}}} 160\n"),
        format!("wccl_communicators{{{labels}}} 2\n"),
        // The library's, and one for each rank.
        format!("wccl_instances{{{labels}}} 3\n"),
        format!("wccl_component_calls_total{{{labels}}} {}\n", before[0]),
        format!("wccl_traps_total{{{labels}}} 0\n"),
    ] {
        assert!(metrics.contains(&line), "{line}{metrics}");
    }
    assert_eq!(server.working(), [("blue".to_string(), 2), ("red".to_string(), 2)]);
    drop(served);
    idle(&server);
}

/// Programs of two tenants that always have something to move take turns by their weights; a tenant is gone from their market
/// when its last program is, however that ends.
#[test]
fn programs_of_tenants_take_turns_where_the_service_has_them_meet() {
    let place =
        Place::new("turns", &[("heavy", &[0, 1], "[share]\nweight = 1000"), ("light", &[2, 3], "[share]\nweight = 1")]);
    let market = Arc::new(Market::create().unwrap());
    let server = Server::start(&ServeConfig { market: Some(market.clone()), ..place.config() }).unwrap();
    assert_eq!(market.tenants(), 0, "nobody moves anything in the service");
    let [heavy, light] = ["heavy", "light"].map(|tenant| place.ranks(tenant, "loop", 2, &[]));
    for r in heavy.iter().chain(&light) {
        assert_eq!(r.line(), "ready");
    }
    assert_eq!(market.tenants(), 2);
    let bytes = FAMILIES.iter().position(|f| f.0 == "wccl_moved_bytes_total").unwrap();
    let moved = || {
        let all: Vec<u64> = server.tenants().map(|t| Usage::of(t.2).values[bytes]).collect();
        [all[0], all[1]]
    };
    // Each had half of what is moved if they did not know of one another; a stretch of time in which the machine is busy with
    // something else proves nothing.
    let begun = Instant::now();
    loop {
        let before = moved();
        let [h, l] = loop {
            let now = moved();
            let [h, l] = [now[0] - before[0], now[1] - before[1]];
            if h + l > 1 << 30 {
                break [h, l];
            }
            assert!(begun.elapsed() < HANG, "{h} and {l} bytes");
            std::thread::sleep(Duration::from_millis(10));
        };
        if h > 3 * l {
            break;
        }
        assert!(begun.elapsed() < HANG, "{h} and {l} bytes, by weights of 1000 and 1");
    }
    drop(light);
    let begun = Instant::now();
    while market.tenants() > 1 {
        assert!(begun.elapsed() < HANG, "{} tenants", market.tenants());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whatever step a client is in when it is killed, the service frees what it had, and serves the next ones on the same cores.
#[test]
fn a_client_killed_at_any_step_leaves_nothing_behind() {
    let place = Place::new("killed", &[("red", &[0, 1], "")]);
    let server = place.serve();
    for ms in [0, 5, 10, 20, 30, 40, 60, 80, 120, 200, 400] {
        let mut ranks = place.ranks("red", "loop", 2, &[("WCCL_TIMEOUT_MS", "10000")]);
        let working = ms == 400;
        if working {
            assert!(ranks.iter().all(|r| r.line() == "ready"));
        }
        std::thread::sleep(Duration::from_millis(ms));
        ranks[1].kill();
        let pid = ranks[1].child.id();
        if working {
            // In an operation: the other one learns it from the process, at once.
            let said = ranks[0].rest().pop().unwrap();
            assert!(said.contains("rank 1") && said.contains(&format!("pid {pid}")), "{said}");
        }
        drop(ranks);
        idle(&server);
    }
    let ranks = place.ranks("red", "once", 2, &[]);
    for r in &ranks {
        assert_eq!(r.rest(), ["ready", "done"]);
    }
}

/// Messages between ranks that are no neighbours: each is linked by the service, which calls no component for it.
#[test]
fn served_processes_exchange_messages() {
    let place = Place::new("messages", &[("red", &[0, 1, 2, 3, 4, 5], "")]);
    let server = place.serve();
    let mut ranks = place.ranks("red", "messages", 6, &[("WCCL_TIMEOUT_MS", "600000")]);
    assert!(ranks.iter().all(|r| r.line() == "ready"));
    let before = calls(&server, "red");
    for r in &ranks {
        assert_eq!(r.line(), "messages ok");
    }
    assert_eq!(calls(&server, "red"), before);
    ranks[5].kill();
    for r in &ranks[..2] {
        let said = [r.line(), r.line(), r.line()];
        assert!(said[0].contains("rank 5") && said[1].contains("rank 5") && said[2] == "the others go on", "{said:?}");
    }
}

/// Split, shrink and streams, whose control calls go through the service.
#[test]
fn groups_and_streams_work_in_a_served_process() {
    let place = Place::new("groups", &[("red", &[0, 1, 2, 3], "")]);
    let server = place.serve();
    world_at(&place.root("red"), 4, &place.client("red"), |mut comm| {
        let rank = comm.rank();
        let t = comm.allocate(4096).unwrap();
        t.write(0, &(rank as u32).to_le_bytes().repeat(1024)).unwrap();
        let first = |t: &wccl::DeviceMemory| {
            let mut b = [0; 4];
            t.read(0, &mut b).unwrap();
            u32::from_le_bytes(b)
        };
        let mut half = comm.split(Some(rank as u32 % 2), 0).unwrap().unwrap();
        // A tensor of the whole serves in the part.
        half.raw().all_reduce(Io::in_place(&t), 1024, DataType::Uint32, ReduceOp::Sum).unwrap();
        assert_eq!(first(&t), if rank.is_multiple_of(2) { 2 } else { 4 });
        let mut stream = comm.stream(0).unwrap();
        stream.barrier().wait().unwrap();
        let mut private = vec![1u8; 100_000];
        comm.raw().all_reduce(Io::HostInPlace(&mut private), 100_000, DataType::Uint8, ReduceOp::Sum).unwrap();
        assert!(private.iter().all(|v| *v == 4));
        assert_eq!(comm.peer_device_id((rank as i32 + 1) % 4).unwrap(), (rank as i32 + 1) % 4);
        comm.barrier().unwrap();
        if rank < 3 {
            let mut fewer = comm.shrink(&[3]).unwrap();
            t.write(0, &1u32.to_le_bytes().repeat(1024)).unwrap();
            fewer.raw().all_reduce(Io::in_place(&t), 1024, DataType::Uint32, ReduceOp::Sum).unwrap();
            assert_eq!(first(&t), 3);
        }
        let e = comm.set_affinity(None, 0).unwrap_err().to_string();
        assert!(e.contains("the service's"), "{e}");
        assert_eq!(comm.control_stopped(), None);
    });
    idle(&server);
}

/// A tenant's name that no other run of these tests has: a swap is of all that bear it on the machine.
fn of_this_process(name: &str) -> String {
    format!("{name}{}", std::process::id())
}

/// A tenant's plugin is swapped while its processes work: they do not notice, and the new one answers what is asked afterwards.
#[test]
fn a_served_tenant_is_swapped_while_its_processes_work() {
    let tenant = &of_this_process("swapped");
    let place = Place::new("swap", &[(tenant, &[0, 1], "")]);
    let server = place.serve();
    let until = place.0.join("until");
    let ranks = place.ranks(tenant, "outlive", 2, &[("UNTIL", until.to_str().unwrap())]);
    for r in &ranks {
        assert_eq!((r.line().as_str(), r.line().as_str()), ("ready", "warm"));
    }
    let first = config().plugin.unwrap().canonicalize().unwrap();
    let releases = [first.clone(), first.with_file_name("nccom-next.wasm")];
    for i in 1..6 {
        let patient = Order { timeout: HANG, quiesce: HANG / 2, ..Order::transport(tenant, &releases[i % 2]) };
        let order = Order { probation: Duration::ZERO, ..patient };
        let report = coordinate(&order).unwrap();
        assert!(report.committed && report.members.len() == 1, "{}", report.reason);
    }
    let usage: Vec<Usage> = server.tenants().map(|t| Usage::of(t.2)).collect();
    assert_eq!((usage[0].plugin.as_str(), usage[0].swaps), ("nccom-next.wasm", [5, 0, 0]));
    // Each has its own counts. A look that changes nothing is no swap.
    let metrics = wccl::metrics::text(&usage);
    let entries = |plugin: &str| {
        let line = format!("wccl_entries_total{{tenant=\"{tenant}\",plugin=\"{plugin}\"");
        let found = metrics.lines().find(|l| l.starts_with(&line)).unwrap_or_else(|| panic!("{line}: {metrics}"));
        found.rsplit(' ').next().unwrap().parse::<u64>().unwrap()
    };
    let both = entries("nccom.wasm") + entries("nccom-next.wasm");
    assert!(both == usage[0].values[FAMILIES.iter().position(|f| f.0 == "wccl_entries_total").unwrap()], "{metrics}");
    assert!(entries("nccom.wasm") > 0, "{metrics}");
    // One that the policy does not list is none, whatever it is for.
    for (kind, dry) in [(Kind::Transport, false), (Kind::Net, false), (Kind::Transport, true)] {
        let order = Order::transport(tenant, first.with_file_name("nccom-stuck.wasm"));
        let report = coordinate(&Order { kind, dry, ..order }).unwrap();
        assert!(!report.committed && report.reason.contains("which is not listed"), "{}", report.reason);
    }
    let swaps: Vec<_> = server.tenants().map(|t| Usage::of(t.2).swaps).collect();
    assert_eq!(swaps[0], [5, 2, 0]);
    std::fs::write(&until, "").unwrap();
    for r in &ranks {
        assert_eq!((r.line().as_str(), r.line().as_str()), ("operations go on", "control calls go on"));
    }
}

/// Waits until `done`.
fn eventually(what: &str, done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < HANG, "{what}");
        std::thread::yield_now();
    }
}

/// A swap waits for a communicator that the service is making: else one of its ranks would be the old plugin's.
#[test]
fn a_swap_waits_for_a_served_rank_that_joins() {
    let tenant = &of_this_process("joins");
    let place = Place::new("joins", &[(tenant, &[0, 1], "")]);
    let server = place.serve();
    let root = place.root(tenant);
    let [first, second] = [(); 2].map(|()| Runtime::open(place.client(tenant)).unwrap());
    let join = |runtime: Runtime, rank| {
        let options = CommOptions::with_root(root.clone(), rank, 2);
        std::thread::spawn(move || runtime.init_comm(options).unwrap())
    };
    let before = calls(&server, tenant);
    let first = join(first, 0);
    eventually("rank 0 does not join", || calls(&server, tenant) > before);
    let next = config().plugin.unwrap().canonicalize().unwrap().with_file_name("nccom-next.wasm");
    let order = Order { quiesce: HANG, ..Order::transport(tenant, next) };
    let report = coordinate(&Order { quiesce: Duration::from_millis(300), ..order.clone() }).unwrap();
    assert!(!report.committed && report.reason.contains("1 calls are inside the old plugin, or make"), "{report:?}");
    let made = [first, join(second, 1)].map(|rank| rank.join().unwrap());
    let report = coordinate(&order).unwrap();
    assert!(report.committed, "{}", report.reason);
    assert!(made.iter().all(|comm| comm.query_info().is_ok()));
}

/// A swap comes before a plan is made or after it is kept for a restart: else the new plugin would be started again with the old one's.
#[test]
fn a_swap_waits_until_a_service_has_kept_a_plan() {
    let tenant = &of_this_process("keeps");
    let core = zoo::built("nccom.core.wasm").unwrap();
    let hangs = ("neuron:lifecycle/lifecycle@1.0.0#export-state", "(loop br 0) unreachable");
    let [old, new] = [&[hangs][..], &[]]
        .map(|edits| plugin_file("keeps", &zoo::described(&zoo::rewrite(&core, edits).unwrap()).unwrap()));
    let place = Place::new("keeps", &[(tenant, &[0], "")]);
    place.allow(tenant, &[&old, &new]);
    let server = place.serve();
    let runtime = Runtime::open(place.client(tenant)).unwrap();
    let id = runtime.unique_id(1).unwrap();
    let options = CommOptions { graph: false, ..CommOptions::with_id(id, 0, 1) };
    let mut comm = runtime.init_comm(options).unwrap();
    let entries = || server.tenants().next().unwrap().2.tenant().counters.entries();
    let before = entries();
    let builds = std::thread::spawn(move || comm.build_graph());
    eventually("no plan is kept", || entries() == before + ["build-graph", "describe", "export-state"].len() as u64);
    let order = Order { stateless: true, quiesce: Duration::from_millis(300), ..Order::transport(tenant, new.path()) };
    let report = coordinate(&order).unwrap();
    assert!(!report.committed && report.reason.contains("1 calls are inside the old plugin"), "{report:?}");
    let report = coordinate(&Order { force: true, quiesce: Duration::from_secs(5), ..order }).unwrap();
    assert!(report.committed, "{}", report.reason);
    let Ok(Outcome::Swapped { ended, .. }) = &report.members[0].outcome else { panic!("{report:?}") };
    assert_eq!(*ended, ["export-state of communicator 1 of rank 0"]);
    // The new plugin has no plan.
    assert!(builds.join().unwrap().is_err());
}

/// The new plugin stops in a client's graph: the client ends its connection at once, and the service goes back all the same.
#[test]
fn a_served_tenant_goes_back_when_a_join_stops_the_new_plugin() {
    let tenant = &of_this_process("tried");
    let place = Place::new("probation", &[(tenant, &[0], "")]);
    // What the policy lists, with the second file as a build that traps.
    let (first, directory) = (config().plugin.unwrap().canonicalize().unwrap(), place.0.join("plugins"));
    let policy = place.0.join("policies").join(format!("{tenant}.toml"));
    let text = std::fs::read_to_string(&policy).unwrap();
    let listed = format!("{:?}", first.parent().unwrap());
    assert!(text.contains(&listed));
    std::fs::write(&policy, text.replace(&listed, &format!("{directory:?}"))).unwrap();
    std::fs::create_dir(&directory).unwrap();
    let (good, traps) = (directory.join("nccom.wasm"), directory.join("nccom-next.wasm"));
    std::fs::copy(&first, &good).unwrap();
    let edit = [("neuron:nccom/collectives#neuron-build-graph-comm", "unreachable")];
    let core = zoo::rewrite(&zoo::built("nccom.core.wasm").unwrap(), &edit).unwrap();
    std::fs::write(&traps, zoo::described(&core).unwrap()).unwrap();

    let base = RuntimeConfig { plugin: Some(good), ..config() };
    let server = Server::start(&ServeConfig { base, ..place.config() }).unwrap();
    let report = coordinate(&Order { quiesce: HANG / 2, probation: HANG, ..Order::transport(tenant, &traps) }).unwrap();
    assert!(report.committed, "{}", report.reason);
    let client = Runtime::open(place.client(tenant)).unwrap();
    let joins = || client.init_comm(CommOptions::with_root(place.root(tenant), 0, 1)).map(drop);
    let e = joins().unwrap_err().to_string();
    assert!(e.contains("unreachable"), "{e}");
    let begun = Instant::now();
    while server.tenants().next().unwrap().2.swaps().rolled_back == 0 {
        assert!(begun.elapsed() < HANG, "the service does not go back");
        std::thread::sleep(Duration::from_millis(5));
    }
    joins().unwrap();
}

/// When the service is gone, operations go on, and control calls say what happened.
#[test]
fn data_planes_outlive_the_service() {
    let place = Place::new("outlive", &[("red", &[0, 1], "")]);
    let server = place.serve();
    let until = place.0.join("gone");
    let ranks = place.ranks("red", "outlive", 2, &[("UNTIL", until.to_str().unwrap())]);
    for r in &ranks {
        assert_eq!((r.line().as_str(), r.line().as_str()), ("ready", "warm"));
    }
    drop(server);
    assert!(!place.socket("red").exists());
    std::fs::write(until, "").unwrap();
    for r in &ranks {
        assert_eq!(r.line(), "operations go on");
        let said = r.line();
        assert!(said.contains("red.sock does not answer") && said.contains("operations that need no new"), "{said}");
    }
    assert!(refusal(&place.socket("red"), config()).contains("is `wccl serve` running?"));
}

/// A core is one runtime's at a time, of the tenant's, within its memory.
#[test]
fn leases_are_exclusive_and_within_the_policy() {
    let place = Place::new("leases", &[("red", &[5], ""), ("blue", &[5, 6], "")]);
    let server = place.serve();
    let alone = |tenant: &str| {
        let runtime = Runtime::open(place.client(tenant)).unwrap();
        let id = runtime.unique_id(1).unwrap();
        runtime.init_comm(CommOptions::with_id(id, 0, 1))
    };
    let comm = alone("red").unwrap();
    assert_eq!(comm.logical_core(), 5);
    let e = comm.allocate(1 << 30).unwrap_err().to_string();
    assert!(e.contains("device memory is full") && e.contains("of 268435456 bytes"), "{e}");
    let t = comm.allocate(100).unwrap();
    t.write(0, &[7; 100]).unwrap();
    let e = alone("red").unwrap_err().to_string();
    assert!(e.contains("core 5 is leased to another runtime (tenant red, pid"), "{e}");
    // Whose it is, is no other tenant's business.
    let e = alone("blue").unwrap_err().to_string();
    assert!(e.contains("core 5 is leased to a runtime of another tenant, until"), "{e}");
    assert!(!e.contains("pid") && !e.contains("tenant red"), "{e}");
    drop((t, comm));
    // The next one finds it zeroed.
    let next = alone("blue").unwrap();
    let mut seen = [1; 100];
    next.allocate(100).unwrap().read(0, &mut seen).unwrap();
    assert_eq!(seen, [0; 100]);
    drop(next);
    let e = refusal_of_two(&place);
    assert!(e.contains("tenant red has the logical cores [5], none for rank 1 of 2"), "{e}");
    idle(&server);
}

/// What rank 1 of 2 gets that has no core.
fn refusal_of_two(place: &Place) -> String {
    let runtime = Runtime::open(place.client("red")).unwrap();
    let id = runtime.unique_id(2).unwrap();
    runtime.init_comm(CommOptions::with_id(id, 1, 2)).unwrap_err().to_string()
}

#[test]
fn an_abort_reaches_a_request_that_is_under_way() {
    let place = Place::new("abort", &[("red", &[0, 1], "")]);
    let mut patient = place.config();
    patient.base.vars.insert("NEURON_CCOM_SOCK_TIMEOUT".into(), "600000".into());
    let server = Server::start(&patient).unwrap();
    let runtime = Runtime::open(place.client("red")).unwrap();
    let abort = AbortToken::new().unwrap();
    let mut options = CommOptions::with_root(place.root("red"), 0, 2);
    options.abort = Some(abort.clone());
    let before = calls(&server, "red");
    let joining = std::thread::spawn(move || runtime.init_comm(options).unwrap_err().to_string());
    // Rank 1 never comes; the bootstrap would wait for ten minutes.
    eventually("rank 0 does not join", || calls(&server, "red") > before);
    let begun = Instant::now();
    abort.abort("the user has changed his mind");
    let e = joining.join().unwrap();
    assert!(begun.elapsed() < HANG, "{e}");
    assert!(e.contains("the user has changed his mind"), "{e}");
    idle(&server);
}

/// The kernel says who connects; nobody else is served, whichever socket it finds.
#[test]
fn another_user_and_another_tenants_socket_are_refused() {
    let me = rustix::process::geteuid().as_raw();
    let other = format!("[service]\nuids = [{}]\n", me + 1);
    let place = Place::new("users", &[("red", &[0], ""), ("blue", &[1], &other)]);
    let server = place.serve();
    let e = refusal(&place.socket("blue"), config());
    assert!(e.contains(&format!("user {me} is not one of tenant blue")), "{e}");
    Runtime::open(place.client("red")).unwrap();
    drop(server);
    // And one whom the kernel calls another is no owner of the service.
    let identify: fn(&UnixStream) -> std::io::Result<Credentials> =
        |s| wccl::serve::identify(s).map(|c| Credentials { uid: c.uid + 1, ..c });
    let server = Server::start(&ServeConfig { identify, ..place.config() }).unwrap();
    let e = refusal(&place.socket("red"), config());
    assert!(e.contains(&format!("user {} is not one of tenant red", me + 1)), "{e}");
    Runtime::open(place.client("blue")).unwrap();
    let nobody: fn(&UnixStream) -> std::io::Result<Credentials> = |_| Err(std::io::ErrorKind::NotConnected.into());
    drop(server);
    let _server = Server::start(&ServeConfig { identify: nobody, ..place.config() }).unwrap();
    let e = refusal(&place.socket("red"), config());
    assert!(e.contains("the kernel does not say who it is"), "{e}");
}

/// Strangers who come again and again get their answer, and fill neither the log nor the tenant's connections.
#[test]
fn a_crowd_of_strangers_leaves_few_lines_and_takes_no_place() {
    crate::keep_log();
    let me = rustix::process::geteuid().as_raw();
    let place = Place::new("crowd", &[("flooded", &[0], "[service]\nclients = 1\n")]);
    static STRANGE: AtomicBool = AtomicBool::new(true);
    let identify: fn(&UnixStream) -> std::io::Result<Credentials> = |s| {
        let uid = |uid| uid + u32::from(STRANGE.load(Ordering::Relaxed));
        wccl::serve::identify(s).map(|c| Credentials { uid: uid(c.uid), ..c })
    };
    let server = Server::start(&ServeConfig { identify, ..place.config() }).unwrap();
    let (begun, mut crowd) = (Instant::now(), 0);
    let may_be = || hw_bridge::limits::REFUSALS_LOGGED as usize * (begun.elapsed().as_secs() as usize + 2);
    // As many as prove something, however slowly they come.
    while crowd < 400 || crowd < 2 * may_be() {
        let e = refusal(&place.socket("flooded"), config());
        assert!(e.contains(&format!("user {} is not one of tenant flooded", me + 1)), "{e}");
        assert!(begun.elapsed() < HANG, "{crowd} strangers");
        crowd += 1;
    }
    let lines = crate::logged(&["one of tenant flooded"]).len();
    assert!((1..=may_be()).contains(&lines), "{lines} lines of {crowd}, {} may be", may_be());
    STRANGE.store(false, Ordering::Relaxed);
    Runtime::open(place.client("flooded")).unwrap();
    drop(server);
}

/// Bytes that are no message, too many, of another version, or too late end their own connection and nothing else.
#[test]
fn what_a_stranger_sends_ends_his_connection_only() {
    let place = Place::new("garbage", &[("red", &[0], "[service]\nclients = 4\n")]);
    let server = place.serve();
    let visit = |bytes: &[u8]| {
        let mut s = UnixStream::connect(place.socket("red")).unwrap();
        s.set_read_timeout(Some(HANG)).unwrap();
        s.write_all(bytes).unwrap();
        let mut said = Vec::new();
        // It may be closed before all was read.
        let _ = s.read_to_end(&mut said);
        String::from_utf8_lossy(&said).into_owned()
    };
    let framed = |body: &[u8]| [&(body.len() as u32).to_le_bytes(), body].concat();
    assert!(
        visit(&framed(b"\x63\x019"))
            .contains("it speaks version 99 of the protocol (release 9), this service version 3")
    );
    assert!(visit(&u32::MAX.to_le_bytes()).contains("says that it has 4294967295 bytes"));
    // It is told before it has sent them: no memory is kept for it meanwhile.
    assert!(visit(&(4097u32).to_le_bytes()).contains("says that it has 4097 bytes, at most 4096 are read"));
    assert!(visit(&framed(&[0xFF; 40])).contains("no message that this version knows"));
    // After a hello in good order.
    let release = env!("CARGO_PKG_VERSION").as_bytes();
    let hello = framed(&[&[3, release.len() as u8], release].concat());
    for request in [framed(&[99]), framed(&[0xFF; 64]), ((128u32 << 10) + 1).to_le_bytes().to_vec()] {
        let said = visit(&[&hello[..], &request].concat());
        assert!(said.contains("red") && said.len() < 200, "welcomed, then closed: {said:?}");
    }
    // Requests that make no sense are answered; a second one before that ends the connection.
    let mut s = UnixStream::connect(place.socket("red")).unwrap();
    s.set_read_timeout(Some(HANG)).unwrap();
    s.write_all(&[&hello[..], &framed(&[2, 1, 0])].concat()).unwrap();
    let mut said = [0; 4096];
    let begun = Instant::now();
    let mut all = String::new();
    while !all.contains("has joined no communicator") {
        assert!(begun.elapsed() < HANG);
        let n = s.read(&mut said).unwrap();
        assert!(n > 0, "closed after {all:?}");
        all += &String::from_utf8_lossy(&said[..n]);
    }
    drop(s);
    // More connections than the policy has, none of which says anything; others take the places of those that are let go.
    let mute = || -> Vec<_> { (0..4).map(|_| UnixStream::connect(place.socket("red")).unwrap()).collect() };
    let (begun, mut there, mut since) = (Instant::now(), mute(), Instant::now());
    loop {
        let e = Runtime::open(place.client("red")).map(|_| ()).err().map(|e| e.to_string());
        match e {
            Some(e) if e.contains("has 4 connections, as many as its policy allows") => break,
            _ => assert!(begun.elapsed() < HANG, "{e:?}"),
        }
        if since.elapsed() > sandbox::limits::SERVICE_MESSAGE {
            there.clear();
            (there, since) = (mute(), Instant::now());
        }
    }
    drop(there);
    let begun = Instant::now();
    while let Err(e) = Runtime::open(place.client("red")) {
        assert!(begun.elapsed() < HANG, "{e}");
        std::thread::sleep(Duration::from_millis(20));
    }
    idle(&server);
}

#[test]
fn one_service_has_a_directory_and_replaces_what_a_killed_one_left() {
    let place = Place::new("stale", &[("red", &[0], "")]);
    let server = place.serve();
    let e = Server::start(&place.config()).map(|_| ()).unwrap_err().to_string();
    assert!(e.contains("another service serves") && e.contains("sockets"), "{e}");
    Runtime::open(place.client("red")).unwrap();
    drop(server);
    let stale = UnixListener::bind(place.socket("red")).unwrap();
    drop(stale);
    assert!(place.socket("red").exists() && UnixStream::connect(place.socket("red")).is_err());
    let server = place.serve();
    Runtime::open(place.client("red")).unwrap();
    drop(server);
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(place.0.join("sockets"), std::fs::Permissions::from_mode(0o777)).unwrap();
    let e = Server::start(&place.config()).map(|_| ()).unwrap_err().to_string();
    assert!(e.contains("that nobody else can write"), "{e}");
}

/// A service that is ending makes no new communicators, and says who still has some.
#[test]
fn an_ending_service_finishes_what_there_is() {
    let place = Place::new("ending", &[("red", &[0], "")]);
    let server = place.serve();
    let runtime = Runtime::open(place.client("red")).unwrap();
    let comm = runtime.init_comm(CommOptions::with_id(runtime.unique_id(1).unwrap(), 0, 1)).unwrap();
    server.end();
    assert_eq!(server.working(), [("red".to_string(), 1)]);
    let e = runtime.unique_id(1).unwrap_err().to_string();
    assert!(e.contains("the service is ending"), "{e}");
    comm.query_info().unwrap();
    drop(comm);
    idle(&server);
}

/// The plugins of all tenants run in the service, which does not let one wait in the place of another.
#[test]
fn tenants_that_may_listen_at_one_place_are_not_served() {
    let place = Place::new("overlap", &[("red", &[0], ""), ("blue", &[1], "")]);
    let policy = place.0.join("policies").join("blue.toml");
    let text = std::fs::read_to_string(&policy).unwrap();
    std::fs::write(&policy, text.replace("127.0.0.1:26000-31999", "127.0.0.1:25000-31999")).unwrap();
    let e = Server::start(&place.config()).map(|_| ()).unwrap_err().to_string();
    let both = "tenants blue and red may both listen on 127.0.0.1:25000-25999";
    assert!(e.contains(both) && e.contains("network.listen"), "{e}");
    // Nothing is left of it: with ports of its own the tenant is served.
    std::fs::write(&policy, text).unwrap();
    place.serve();
}

/// A tenant's program that runs as the service's own user can read all that the service has: that is asked for, never assumed.
#[test]
fn the_services_own_user_is_served_only_where_that_was_asked_for() {
    let me = rustix::process::geteuid().as_raw();
    let (other, both) =
        (format!("[service]\nuids = [{}]\n", me + 1), format!("[service]\nuids = [{}, {me}]\n", me + 1));
    for (blue, how) in [("", "names no users in service.uids"), (&both, "names that one in service.uids")] {
        let place = Place::new("own-user", &[("red", &[0], &other), ("blue", &[1], blue)]);
        let strict = ServeConfig { allow_own_user: false, ..place.config() };
        let e = Server::start(&strict).map(|_| ()).unwrap_err().to_string();
        let who = format!("tenant blue: its programs would run as the service's own user ({me})");
        assert!(e.contains(&who) && e.contains(how) && e.contains("--allow-own-user"), "{e}");
        assert!(!place.socket("red").exists());
        drop(place.serve());
    }
    let place = Place::new("own-user", &[("red", &[0], &other)]);
    Server::start(&ServeConfig { allow_own_user: false, ..place.config() }).unwrap();
}

/// Two tenants of one user could be each other, and trace each other: that is asked for too.
#[test]
fn two_tenants_are_served_to_one_user_only_where_that_was_asked_for() {
    let me = rustix::process::geteuid().as_raw();
    let users = |of: &[u32]| format!("[service]\nuids = {of:?}\n");
    let (red, blue) = (users(&[me + 1, me + 2]), users(&[me + 2, me + 3]));
    let place = Place::new("one-user", &[("red", &[0], &red), ("blue", &[1], &blue)]);
    let strict = ServeConfig { allow_own_user: false, ..place.config() };
    let e = Server::start(&strict).map(|_| ()).unwrap_err().to_string();
    let says = format!("tenants blue and red both name user {} in service.uids", me + 2);
    assert!(e.contains(&says) && e.contains("--allow-own-user"), "{e}");
    assert!(!place.socket("red").exists() && !place.socket("blue").exists());
    drop(place.serve());
    let blue = users(&[me + 3]);
    let place = Place::new("one-user-each", &[("red", &[0], &red), ("blue", &[1], &blue)]);
    Server::start(&ServeConfig { allow_own_user: false, ..place.config() }).unwrap();
}

/// An editor that has a policy open leaves a link to nowhere beside it, and copies of another state.
#[test]
fn what_editors_leave_beside_a_policy_keeps_no_service_from_starting() {
    let place = Place::new("editors", &[("red", &[0], "")]);
    let policies = place.0.join("policies");
    std::os::unix::fs::symlink("somebody@somewhere.4711:1", policies.join(".#red.toml")).unwrap();
    for copy in ["red.toml~", "#red.toml#", ".red.toml.swp", "#red.toml"] {
        std::fs::write(policies.join(copy), "half a pol").unwrap();
    }
    let server = place.serve();
    assert_eq!(server.tenants().map(|t| t.0).collect::<Vec<_>>(), ["red"]);
}

/// A name is the policy's to look up, wherever the operator stands; a path is a path.
#[test]
fn a_swap_names_a_plugin_as_the_policy_does() {
    let tenant = &of_this_process("named");
    let place = Place::new("named", &[(tenant, &[0], "")]);
    let _server = place.serve();
    let order = |plugin: &str| Order { probation: Duration::ZERO, ..Order::transport(tenant, plugin) };
    let report = coordinate(&order("nccom-next.wasm")).unwrap();
    assert!(report.committed, "{report:?}");
    let report = coordinate(&order("nccom-other.wasm")).unwrap();
    assert!(!report.committed && report.reason.contains("which is not listed"), "{report:?}");
    let report = coordinate(&order("./nccom.wasm")).unwrap();
    assert!(!report.committed && report.reason.contains("which is not a name in its directory"), "{report:?}");
}

/// Where the ranks of a client meet is what the tenant's plugin gathers; the client goes there only if the service's policy for
/// the tenant lets a plugin.
#[test]
fn a_client_meets_its_peers_only_where_the_services_policy_lets_it() {
    let listener = TcpListener::bind("127.0.0.2:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let there = match listener.local_addr().unwrap() {
        SocketAddr::V4(a) => a,
        SocketAddr::V6(a) => panic!("{a}"),
    };
    let mut p = zoo::Plugin::lone_rank().unwrap();
    p.gathers(&[there; 2]);
    let plugin = plugin_file("meets", &p.build().unwrap());
    let place = Place::new("meets", &[("red", &[0, 1], "")]);
    place.allow("red", &[&plugin]);
    let _server = place.serve();
    let client = Runtime::open(place.client("red")).unwrap();
    let by_id = CommOptions::with_id(zoo::unique_id(1), 0, 2);
    let timeout = Some(Duration::from_millis(300));
    let joined = client.init_comm(CommOptions { graph: false, timeout, ..by_id });
    let e = joined.and_then(|comm| comm.shrink(&[])).map(drop).unwrap_err().to_string();
    let asked = format!(
        "tenant red asked to meet rank 0 at {there}, which its plugin gathered; network.reach grants 127.0.0.1:*"
    );
    assert_eq!(e, asked);
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock, "the client came to it");
}

/// Memory of this process, mapped once more, that begins with these bytes: as a client keeps what it was given.
fn kept(begins: &[u8]) -> Segment {
    let memory =
        |fd: &Path| std::fs::read_link(fd).is_ok_and(|to| to.as_os_str().as_bytes().starts_with(b"/memfd:wccl-hbm"));
    let all = std::fs::read_dir("/proc/self/fd").unwrap().map(|e| e.unwrap().path()).filter(|fd| memory(fd));
    // One that another test has closed meanwhile, or put something else in its place, is none.
    let opened = all.filter_map(|fd| std::fs::File::options().read(true).write(true).open(fd).ok());
    let begun = |file: &std::fs::File| {
        let mut seen = vec![0; begins.len()];
        file.read_exact_at(&mut seen, 0).is_ok() && seen == begins
    };
    let file = opened.into_iter().find(begun).expect("the memory of a lease");
    let len = file.metadata().unwrap().len();
    Segment::adopt(file.into(), len).unwrap()
}

/// What a client kept mapped of a lease that is over is nobody else's memory, and is not what the next one gets.
#[test]
#[expect(unsafe_code, reason = "writes where a hostile client would")]
fn memory_that_is_kept_mapped_is_not_the_next_holders() {
    let place = Place::new("kept", &[("red", &[5], ""), ("blue", &[5], "")]);
    let server = place.serve();
    let alone = |tenant: &str| {
        let runtime = Runtime::open(place.client(tenant)).unwrap();
        let id = runtime.unique_id(1).unwrap();
        runtime.init_comm(CommOptions::with_id(id, 0, 1)).unwrap()
    };
    let first = alone("red");
    let t = first.allocate(4096).unwrap();
    let mark = format!("the memory of a lease of {}", std::process::id());
    t.write(0, mark.as_bytes()).unwrap();
    let kept = kept(mark.as_bytes());
    drop((t, first));
    for holder in ["blue", "red"] {
        let next = alone(holder);
        assert_eq!(next.logical_core(), 5);
        let t = next.allocate(4096).unwrap();
        // SAFETY: it is mapped, has more bytes, and this thread alone uses it.
        unsafe { kept.base().write_bytes(0xee, 4096) };
        let mut seen = [1; 4096];
        t.read(0, &mut seen).unwrap();
        assert!(seen == [0; 4096], "{holder} sees what another one has written");
        // Nor does the first one see what the next one writes.
        t.write(0, &[7; 4096]).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { kept.base().read() }, 0xee, "{holder}");
        drop((t, next));
    }
    idle(&server);
}
