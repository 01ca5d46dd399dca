//! Hot swap: a tenant's plugin is replaced under running ranks, on all of them or on none, whatever becomes of any.
//!
//! Ranks are threads with a runtime of their own ([`Job`]), which control sockets tell apart as they do processes; where one is
//! stopped or killed they are processes of the program `swap_rank`.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tests::{reduction, zoo};
use wccl::swap::{self, Fault, Kind, Order, Outcome, Report, Step, coordinate};
use wccl::{Buffers, CommOptions, Communicator, DataType, Io, ReduceOp, Runtime, RuntimeConfig};

use crate::common::ranks::{Rank, spawn};
use crate::common::{HANG, PluginFile, config, free_port, plugin_file};

fn tenant(name: &str) -> String {
    format!("{name}.{}", std::process::id())
}

/// The plugin as another build: other bytes, the same behaviour but for `edits` of its life-cycle entries and its 37.
fn build(name: &str, edits: &[(&str, &str)]) -> PluginFile {
    let mut core = zoo::built("nccom.core.wasm").unwrap();
    let full: Vec<(String, &str)> = edits
        .iter()
        .map(|(f, body)| match f.starts_with("neuron-") {
            true => (format!("neuron:nccom/collectives#{f}"), *body),
            false => (format!("neuron:lifecycle/lifecycle@1.0.0#{f}"), *body),
        })
        .collect();
    let edits: Vec<(&str, &str)> = full.iter().map(|(f, b)| (f.as_str(), *b)).collect();
    if !edits.is_empty() {
        core = zoo::rewrite(&core, &edits).unwrap();
    }
    // A custom section with the name, so that no two builds have the same bytes.
    core.push(0);
    core.push(name.len() as u8 + 1);
    core.push(name.len() as u8);
    core.extend(name.as_bytes());
    plugin_file(name, &zoo::described(&core).unwrap())
}

/// `describe` with another schema that is written and read, in the record that the original answers.
const SCHEMA_9: &str = "(local i32) (local.set 0 (call $original)) (i32.store offset=24 (local.get 0) (i32.const 9)) \
     (i32.store (i32.load offset=28 (local.get 0)) (i32.const 9)) (local.get 0)";
/// `describe` with a shorter wire-compat.
const OTHER_WIRE: &str =
    "(local i32) (local.set 0 (call $original)) (i32.store offset=20 (local.get 0) (i32.const 5)) (local.get 0)";

/// `describe` with a shorter name of its schemas.
const OTHER_NAME: &str =
    "(local i32) (local.set 0 (call $original)) (i32.store offset=40 (local.get 0) (i32.const 5)) (local.get 0)";

/// `export-state` that answers NRT_FAILURE.
const NOT_EXPORTED: &str = "(local i32) (local.set 1 (call $original (local.get 0)))
  (i32.store (local.get 1) (i32.const 1)) (i32.store offset=4 (local.get 1) (i32.const 1)) (local.get 1)";

/// `neuron-get-comm-info` of three ranks, with each of the original's rings the other way round.
const OTHER_RINGS: &str = "(local i32 i32 i32 i32 i32)
  (local.set 2 (call $original (local.get 0) (local.get 1)))
  (local.set 3 (i32.load offset=76 (local.get 2)))
  (local.set 5 (i32.add (local.get 3) (i32.mul (i32.const 20) (i32.load offset=80 (local.get 2)))))
  (block (loop
    (br_if 1 (i32.ge_u (local.get 3) (local.get 5)))
    (local.set 4 (i32.load (local.get 3)))
    (i32.store (local.get 3) (i32.load offset=4 (local.get 3)))
    (i32.store offset=4 (local.get 3) (local.get 4))
    (local.set 6 (i32.load offset=8 (local.get 3)))
    (local.set 4 (i32.load offset=4 (local.get 6)))
    (i32.store offset=4 (local.get 6) (i32.load offset=8 (local.get 6)))
    (i32.store offset=8 (local.get 6) (local.get 4))
    (local.set 3 (i32.add (local.get 3) (i32.const 20)))
    (br 0)))
  (local.get 2)";

/// A body that does not come back.
const SPINS: &str = "(loop br 0) unreachable";
/// `import-state` that does not come back when it is asked again. Its memory is what an instance remembers.
const SPINS_AGAIN: &str = "(if (i32.ge_u (memory.size) (i32.const 64)) (then (loop br 0)))
  (drop (memory.grow (i32.const 64)))
  (call $original (local.get 0) (local.get 1) (local.get 2) (local.get 3))";
/// What is said of an instance that did not come back in time.
const LATE: &str = "the call went on after the deadline of its operation";

/// Waits until all runtimes of a tenant have gone back; answers what they say of it.
fn went_back(tenant: &str) -> Vec<String> {
    let until = Instant::now() + HANG;
    loop {
        let all = swap::status(tenant).unwrap();
        if all.iter().all(|s| s.counts.rolled_back == 1) {
            return all.into_iter().map(|s| s.last).collect();
        }
        assert!(Instant::now() < until, "{all:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// How long a swap by force waits for calls that will not come back, and for whatever else a busy machine holds up.
const FORCE: Duration = Duration::from_secs(5);

/// An order without probation, whose bounds only a hang comes near.
fn patient(tenant: &str, file: impl Into<PathBuf>) -> Order {
    Order { timeout: HANG, quiesce: HANG / 2, probation: Duration::ZERO, ..Order::transport(tenant, file) }
}

/// Ranks that reduce all the time, verifying every result.
struct Job {
    tenant: String,
    stop: Arc<AtomicBool>,
    ops: Arc<AtomicU64>,
    ranks: Vec<JoinHandle<Communicator>>,
}

/// One checked all-reduce; answers whether rank 0 has enough.
fn reduce(comm: &mut Communicator, stop: bool, ops: u32) -> bool {
    let count = [1, 33, 3000][ops as usize % 3];
    let mut bytes = reduction::filled(comm.rank(), count, ops, stop);
    comm.raw().all_reduce(Io::HostInPlace(&mut bytes), count as u64, DataType::Uint32, ReduceOp::Sum).unwrap();
    reduction::checked(&bytes, comm.nranks(), ops).unwrap()
}

impl Job {
    /// Starts `n` ranks that do `work` between their reductions.
    fn start_with(
        name: &str,
        n: usize,
        adapt: impl Fn(usize, &mut RuntimeConfig),
        work: impl Fn(&mut Communicator, u32) + Send + Sync + 'static,
    ) -> Job {
        let (tenant, stop, ops) = (tenant(name), Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let root = format!("127.0.0.1:{}", free_port());
        let work = Arc::new(work);
        let ranks = (0..n)
            .map(|rank| {
                let mut c = config();
                c.tenant = tenant.clone();
                adapt(rank, &mut c);
                let (stop, ops, root, work) = (stop.clone(), ops.clone(), root.clone(), work.clone());
                std::thread::spawn(move || {
                    let runtime = Runtime::open(c).unwrap();
                    let mut comm = runtime.init_comm(CommOptions::with_root(root, rank, n)).unwrap();
                    let mut done = 0;
                    loop {
                        let end = reduce(&mut comm, stop.load(Ordering::Acquire), done);
                        work(&mut comm, done);
                        done += 1;
                        ops.fetch_max(u64::from(done), Ordering::AcqRel);
                        if end {
                            return comm;
                        }
                    }
                })
            })
            .collect();
        let job = Job { tenant, stop, ops, ranks };
        job.goes_on();
        job
    }

    fn start(name: &str, n: usize, adapt: impl Fn(usize, &mut RuntimeConfig)) -> Job {
        Job::start_with(name, n, adapt, |_, _| ())
    }

    /// Some more operations are made.
    fn goes_on(&self) {
        let (from, until) = (self.ops.load(Ordering::Acquire), Instant::now() + HANG);
        while self.ops.load(Ordering::Acquire) < from + 10 {
            assert!(
                Instant::now() < until && !self.ranks.iter().any(JoinHandle::is_finished),
                "the ranks do not go on"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// One that waits for as long as a busy machine takes. A test that is to see it give up says when.
    fn order(&self, file: &PluginFile) -> Order {
        patient(&self.tenant, file.path())
    }

    /// The plugin that serves, and the generation: the same on all ranks.
    fn serves(&self) -> (String, u64) {
        let all = swap::status(&self.tenant).unwrap();
        assert_eq!(all.len(), self.ranks.len());
        let of = |s: &swap::Status| (s.plugin.clone(), s.digest.clone(), s.generation);
        assert!(all.iter().all(|s| of(s) == of(&all[0])), "mixed: {all:?}");
        (all[0].plugin.clone(), all[0].generation)
    }

    /// A swap that must be refused with these words; the old plugin serves everywhere and the ranks go on.
    fn refuses(&self, order: &Order, words: &[&str]) {
        let before = self.serves();
        let reason = match coordinate(order) {
            Ok(report) => {
                assert!(!report.committed, "{report:?}");
                assert!(report.members.iter().all(|m| !matches!(m.outcome, Ok(Outcome::Swapped { .. }))), "{report:?}");
                report.reason
            }
            Err(e) => e.to_string(),
        };
        assert!(words.iter().all(|w| reason.contains(w)), "{words:?} are not in: {reason}");
        self.goes_on();
        assert_eq!(self.serves(), before);
    }

    fn commits(&self, order: &Order) -> Report {
        let report = coordinate(order).unwrap();
        assert!(report.committed, "{}", report.reason);
        let swapped = |m: &swap::Member| matches!(m.outcome, Ok(Outcome::Swapped { .. }));
        assert!(report.members.iter().all(swapped), "{report:?}");
        eprintln!("pause {:?}", report.pause());
        self.goes_on();
        assert_eq!(self.serves().0, order.plugin.as_ref().unwrap().file_name().unwrap().to_str().unwrap());
        report
    }

    /// Ends the ranks after the same operation, and answers their communicators.
    fn end(self) -> Vec<Communicator> {
        self.stop.store(true, Ordering::Release);
        self.ranks.into_iter().map(|r| r.join().unwrap()).collect()
    }
}

fn no_change(_: usize, _: &mut RuntimeConfig) {}

#[test]
fn ranks_under_load_swap_back_and_forth() {
    let job = Job::start("load", 4, no_change);
    let (a, b) = (build("a", &[]), build("b", &[]));
    for file in [&a, &b, &a, &b] {
        job.commits(&job.order(file));
    }
    assert_eq!(job.serves().1, 4);
    for comm in job.end() {
        let counts = comm.runtime().swaps();
        assert_eq!((counts.committed, counts.refused, counts.rolled_back), (4, 0, 0));
        assert!(counts.last_pause > Duration::ZERO);
        // The plan came along.
        comm.ring_connector(0, true).unwrap();
        assert_eq!(comm.query_info().unwrap().rings.len(), comm.rings().len());
        assert!(comm.control_stopped().is_none());
    }
}

/// A plan that is only asked for, one that is refused and one that is cancelled change nothing.
#[test]
fn a_plan_changes_nothing() {
    let job = Job::start("plan", 2, no_change);
    let file = build("planned", &[]);
    let report = coordinate(&Order { dry: true, ..job.order(&file) }).unwrap();
    assert!(!report.committed && report.members.len() == 2);
    for m in &report.members {
        let Ok(Outcome::Possible(text)) = &m.outcome else { panic!("{m:?}") };
        assert!(text.contains("1 communicators"), "{text}");
    }
    assert_eq!(job.serves().1, 0);
    let e = coordinate(&Order::transport("nobody.at.all", file.path())).unwrap_err().to_string();
    assert!(e.contains("nobody.at.all was not swapped: no runtime of that name"), "{e}");
    let e = swap::cancel(&job.tenant).unwrap_err().to_string();
    assert!(e.contains("no swap is under way"), "{e}");
    job.refuses(&Order { force: true, ..job.order(&file) }, &["`force` needs `stateless`"]);
    job.end();
}

/// Quiesce and resume without a swap: the last step before the decision fails.
#[test]
fn a_failure_at_each_step_leaves_the_old_plugin_running() {
    let steps = [
        Step::Load,
        Step::Prepare,
        Step::Freeze,
        Step::Export,
        Step::Import,
        Step::Vote,
        Step::Quiesce,
        Step::Closed,
        Step::Ready,
    ];
    let file = build("unwanted", &[]);
    for step in steps {
        let job = Job::start(&format!("fails-{step:?}"), 2, |rank, c| {
            if rank == 1 {
                c.swap_faults.push((step, Fault::Fail));
            }
        });
        job.refuses(&job.order(&file), &[&format!("a test wants {step:?} to fail")]);
        for comm in job.end() {
            assert_eq!(comm.runtime().swaps().refused, 1);
            // The old instance was resumed: its entries serve.
            comm.query_info().unwrap();
        }
    }
}

#[test]
fn a_rank_that_is_late_at_any_step_is_waited_for() {
    let steps =
        [Step::Load, Step::Freeze, Step::Vote, Step::Closed, Step::Ready, Step::Decide, Step::Commit, Step::Exchange];
    let (a, b) = (build("late-a", &[]), build("late-b", &[]));
    let job = Job::start("late", 2, |rank, c| {
        if rank == 1 {
            c.swap_faults.extend(steps.map(|s| (s, Fault::Delay(Duration::from_millis(60)))));
        }
    });
    job.commits(&job.order(&a));
    job.commits(&job.order(&b));
    job.end();
}

#[test]
fn two_at_once_are_refused_and_one_is_cancelled() {
    let job = Job::start("twice", 2, |_, c| c.swap_faults.push((Step::Prepare, Fault::Delay(Duration::from_secs(6)))));
    let file = build("slow", &[]);
    let order = job.order(&file);
    let first = std::thread::spawn(move || coordinate(&order));
    let until = Instant::now() + HANG;
    while !swap::status(&job.tenant).unwrap().iter().all(|s| s.swap.contains("swapping to")) {
        assert!(Instant::now() < until);
    }
    let e = coordinate(&job.order(&file)).unwrap_err().to_string();
    assert!(e.contains("another swap is under way"), "{e}");
    assert_eq!(swap::cancel(&job.tenant).unwrap(), 2);
    let report = first.join().unwrap().unwrap();
    assert!(!report.committed, "{report:?}");
    job.goes_on();
    assert_eq!(job.serves().1, 0);
    job.end();
}

/// Traps in each entry of the life cycle, a schema that is not read, another wire-compat, too large a state.
#[test]
fn a_new_plugin_that_fails_in_its_life_cycle_is_refused() {
    let job = Job::start("zoo", 2, no_change);
    for (name, edits, words) in [
        ("no-describe", vec![("describe", "unreachable")], "unreachable"),
        ("no-import", vec![("import-state", "unreachable")], "unreachable"),
        ("no-resume", vec![("resume", "unreachable")], "unreachable"),
        ("no-info", vec![("neuron-get-comm-info", "unreachable")], "unreachable"),
        ("schema-9", vec![("describe", SCHEMA_9)], "schema `nccom-plan` 1, the new one reads `nccom-plan` [9, 2]"),
        ("other-name", vec![("describe", OTHER_NAME)], "of schema `nccom-plan` 1, the new one reads `nccom` [1, 2]"),
        ("other-wire", vec![("describe", OTHER_WIRE)], "speak `nccom-bootstrap-3` and the new plugin `nccom`"),
        ("no-89", vec![("neuron-get-version-info", "unreachable")], "unreachable"),
    ] {
        let file = build(name, &edits);
        job.refuses(&job.order(&file), &[words]);
    }
    let broken = plugin_file("not-a-plugin", b"\0asm\x0d\0\x01\0");
    job.refuses(&job.order(&broken), &["Get Version Info API is not implemented"]);
    // What cannot be handed over is left behind on request.
    let file = build("schema-9-again", &[("describe", SCHEMA_9)]);
    job.commits(&Order { stateless: true, ..job.order(&file) });
    job.end();
}

/// A plugin that does not come back from a life-cycle entry is ended when the time is over that a swap has for it, and not when
/// its own limits end it.
#[test]
fn a_plugin_that_hangs_in_its_life_cycle_is_waited_for_no_longer_than_the_swap_may_take() {
    let quick = Duration::from_millis(300);
    let job = Job::start("spins", 2, no_change);
    for entry in ["import-state", "resume", "neuron-get-comm-info"] {
        let file = build(&format!("spins-in-{entry}"), &[(entry, SPINS)]);
        job.refuses(
            &Order { quiesce: quick, ..job.order(&file) },
            &[LATE, "within 300ms: `quiesce` gives them longer"],
        );
    }
    job.end();
    let old = build("old-spins", &[("quiesce", SPINS)]);
    let path: PathBuf = old.path().into();
    let job = Job::start("old-spins", 2, |_, c| c.plugin = Some(path.clone()));
    let file = build("after-spinning", &[]);
    job.refuses(&Order { quiesce: quick, ..job.order(&file) }, &[LATE, "stateless"]);
    job.commits(&Order { stateless: true, ..job.order(&file) });
    for comm in job.end() {
        assert!(comm.control_stopped().is_none());
    }
}

/// The old plugin was called after it had exported, so it is all done again while operations stand.
#[test]
fn a_plugin_that_hangs_while_operations_stand_lets_them_go_on() {
    let between = |_: usize, c: &mut RuntimeConfig| {
        c.swap_faults.push((Step::Quiesce, Fault::Delay(Duration::from_millis(200))));
    };
    let job = Job::start_with("stands", 2, between, |comm, _| {
        comm.query_info().unwrap();
    });
    let file = build("spins-again", &[("import-state", SPINS_AGAIN)]);
    job.refuses(&Order { quiesce: Duration::from_millis(500), ..job.order(&file) }, &[LATE, "import-state"]);
    job.end();
}

/// The plan that is kept for a restart has its time too: the calls into the library wait for it.
#[test]
fn a_new_plugin_that_hangs_over_its_plan_when_it_is_exchanged_goes_back() {
    let job = Job::start("hangs-over-plan", 2, no_change);
    let file = build("hangs-over-plan", &[("export-state", SPINS)]);
    let order = Order { quiesce: Duration::from_millis(300), probation: HANG, ..job.order(&file) };
    let report = coordinate(&order).unwrap();
    assert!(report.committed, "{}", report.reason);
    for last in went_back(&job.tenant) {
        assert!(last.contains(&format!("{LATE} (in export-state)")), "{last}");
    }
    job.goes_on();
    for comm in job.end() {
        comm.query_info().unwrap();
    }
}

/// An old plugin that cannot hand over is replaced without; one that traps meanwhile takes nothing with it but itself.
#[test]
fn an_old_plugin_that_fails_in_its_life_cycle_is_replaced_stateless() {
    for entry in ["quiesce", "export-state"] {
        let old = build(&format!("old-{entry}"), &[(entry, "unreachable")]);
        let path: PathBuf = old.path().into();
        let job = Job::start(&format!("old-{entry}"), 2, |_, c| c.plugin = Some(path.clone()));
        let file = build("after", &[]);
        job.refuses(&job.order(&file), &["unreachable", "stateless"]);
        job.commits(&Order { stateless: true, ..job.order(&file) });
        for comm in job.end() {
            assert!(comm.control_stopped().is_none());
        }
    }
    let c = |c: &mut RuntimeConfig| c.limits.state = 64;
    let job = Job::start("large", 2, |_, config| c(config));
    let file = build("after-large", &[]);
    job.refuses(&job.order(&file), &["bytes, 64 are allowed"]);
    job.end();
}

/// A plan that cannot be kept for a restart is not kept. Where that stopped the plugin it starts again, without a plan.
#[test]
fn a_plan_that_is_not_handed_out_costs_the_plan_alone() {
    for (name, edit, stops) in [("keeps-its-plan", NOT_EXPORTED, false), ("traps-over-its-plan", "unreachable", true)] {
        let plugin = build(name, &[("export-state", edit)]);
        let runtime = Runtime::open(RuntimeConfig { plugin: Some(plugin.path().into()), ..config() }).unwrap();
        let root = format!("127.0.0.1:{}", free_port());
        let mut comm = runtime.init_comm(CommOptions::with_root(root, 0, 1)).unwrap();
        assert_eq!((runtime.swaps().lost_checkpoints, comm.control_stopped().is_some()), (1, stops));
        let until = Instant::now() + HANG;
        let answer = loop {
            match comm.peer_device_id(0) {
                // Within the pause before a restart.
                Err(e) if e.to_string().contains("runs again in") => assert!(Instant::now() < until, "{e}"),
                answer => break answer.map_err(|e| e.to_string()),
            }
        };
        if stops {
            let e = answer.unwrap_err();
            assert!(e.starts_with("neuronGetPeerDeviceId of plugin traps-over-its-plan") && e.contains("NRT_"), "{e}");
        } else {
            answer.unwrap();
        }
        assert!(comm.control_stopped().is_none());
        reduce(&mut comm, false, 0);
    }
}

/// An old plugin that hangs in a call holds a swap up, and is replaced by force; the caller reads why its call ended.
#[test]
fn an_old_plugin_that_hangs_is_replaced_by_force() {
    let hangs = build("hangs", &[("neuron-get-peer-device-id", "(loop br 0) unreachable")]);
    let path: PathBuf = hangs.path().into();
    let (caller, errors) = (Arc::new(Mutex::new(None)), Arc::new(Mutex::new(Vec::new())));
    let (calls, noted) = (caller.clone(), errors.clone());
    let job = Job::start_with(
        "force",
        2,
        |_, c| c.plugin = Some(path.clone()),
        move |comm, op| {
            if comm.rank() == 1 && op == 50 {
                let tenant = comm.runtime().tenant().clone();
                *calls.lock().unwrap() = Some((tenant.counters.entries(), tenant));
                noted.lock().unwrap().push(comm.peer_device_id(0).unwrap_err().to_string());
            }
        },
    );
    let until = Instant::now() + HANG;
    let inside = || caller.lock().unwrap().as_ref().is_some_and(|(before, tenant)| tenant.counters.entries() > *before);
    while !inside() {
        assert!(Instant::now() < until, "rank 1 does not call");
        std::thread::yield_now();
    }
    let file = build("instead", &[]);
    let report = coordinate(&Order { quiesce: Duration::from_millis(300), ..job.order(&file) }).unwrap();
    assert!(!report.committed && report.reason.contains("1 calls are inside the old plugin"), "{}", report.reason);
    let report = job.commits(&Order { stateless: true, force: true, quiesce: FORCE, ..job.order(&file) });
    let ended = |rank: usize| match &report.members[rank].outcome {
        Ok(Outcome::Swapped { ended, .. }) => ended.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!((ended(0).len(), ended(1)), (0, vec!["neuronGetPeerDeviceId of communicator 1 of rank 1".to_string()]));
    job.end();
    let errors = errors.lock().unwrap();
    assert!(errors.len() == 1 && errors[0].contains("a hot swap (--force"), "{errors:?}");
}

/// Two ranks that have a second communicator beside the one they reduce on, and where the ranks of that are kept.
fn start_with_second(
    name: &str,
    adapt: impl Fn(usize, &mut RuntimeConfig),
) -> (Job, Arc<[Mutex<Option<Communicator>>; 2]>) {
    let seconds: Arc<[Mutex<Option<Communicator>>; 2]> = Arc::default();
    let (port, kept) = (free_port(), seconds.clone());
    let job = Job::start_with(name, 2, adapt, move |comm, op| {
        if op == 0 {
            let options = CommOptions::with_root(format!("127.0.0.1:{port}"), comm.rank(), 2);
            *kept[comm.rank()].lock().unwrap() = Some(comm.runtime().init_comm(options).unwrap());
        }
    });
    (job, seconds)
}

/// Force ends a call when it next comes out of what it waits for.
fn brief_waits(c: &mut RuntimeConfig) {
    c.vars.insert("NEURON_CCOM_SOCK_TIMEOUT".into(), "15000".into());
}

/// What is refused has ended nobody's call; what is done ends those that are inside then.
#[test]
fn force_ends_calls_only_when_nothing_else_is_in_the_way() {
    let file = build("forced", &[]);
    for fails in [Some(Step::Closed), Some(Step::Ready), None] {
        let (job, seconds) = start_with_second(&format!("forced-{fails:?}"), |rank, c| {
            brief_waits(c);
            // The rank that fails is not the one whose call would be ended.
            if rank == 0 {
                c.swap_faults.extend(fails.map(|step| (step, Fault::Fail)));
            }
        });
        let receiver = seconds[1].lock().unwrap().take().unwrap();
        let receives = std::thread::spawn(move || receiver.bootstrap_recv(0, 5));
        // The call is inside as soon as it is in the way.
        let patient = Order { stateless: true, quiesce: Duration::from_millis(100), ..job.order(&file) };
        let until = Instant::now() + HANG;
        loop {
            let report = coordinate(&patient).unwrap();
            if report.reason.contains("1 calls are inside the old plugin") {
                break;
            }
            assert!(Instant::now() < until && fails.is_some(), "{report:?}");
        }
        // In probation the old plugin keeps its connections: without, the call could end with the other side's.
        let order = Order { stateless: true, force: true, quiesce: FORCE, probation: HANG, ..job.order(&file) };
        if let Some(step) = fails {
            job.refuses(&order, &[&format!("a test wants {step:?} to fail")]);
            seconds[0].lock().unwrap().as_ref().unwrap().bootstrap_send(1, b"hello").unwrap();
            assert_eq!(receives.join().unwrap().unwrap(), b"hello");
        } else {
            let report = job.commits(&order);
            let Ok(Outcome::Swapped { ended, .. }) = &report.members[1].outcome else { panic!("{report:?}") };
            assert_eq!(*ended, ["neuronBootstrapRecv of communicator 2 of rank 1"], "{report:?}");
            let e = receives.join().unwrap().unwrap_err().to_string();
            assert!(e.contains("a hot swap (--force"), "{e}");
        }
        job.end();
    }
}

/// A rank that waits for others to join is inside the old plugin too, though it has no communicator yet.
#[test]
fn force_ends_the_making_of_a_communicator() {
    let runtimes: Arc<[Mutex<Option<Runtime>>; 2]> = Arc::default();
    let kept = runtimes.clone();
    let job = Job::start_with(
        "joining",
        2,
        |_, c| brief_waits(c),
        move |comm, op| {
            if op == 0 {
                *kept[comm.rank()].lock().unwrap() = Some(comm.runtime().clone());
            }
        },
    );
    let runtime = runtimes[1].lock().unwrap().take().unwrap();
    let tenant = runtime.tenant().clone();
    let before = tenant.counters.entries();
    let options = CommOptions::with_root(format!("127.0.0.1:{}", free_port()), 0, 2);
    let joins = std::thread::spawn(move || runtime.init_comm(options).unwrap_err().to_string());
    let until = Instant::now() + HANG;
    while tenant.counters.entries() == before {
        assert!(Instant::now() < until);
        std::thread::yield_now();
    }
    let file = build("joined-anew", &[]);
    let order = Order { stateless: true, ..job.order(&file) };
    let brief = Order { quiesce: Duration::from_millis(300), ..order.clone() };
    job.refuses(&brief, &["1 calls are inside the old plugin, or make a communicator"]);
    let report = job.commits(&Order { force: true, quiesce: FORCE, ..order });
    let Ok(Outcome::Swapped { ended, .. }) = &report.members[1].outcome else { panic!("{report:?}") };
    assert_eq!(*ended, ["neuronInitGlobalComm of rank 0"], "{report:?}");
    let e = joins.join().unwrap();
    assert!(e.contains("a hot swap (--force"), "{e}");
    drop(runtimes[0].lock().unwrap().take());
    job.end();
}

/// Waits until a tenant has as many communicators.
fn has_communicators(runtime: &Runtime, n: usize) {
    let until = Instant::now() + HANG;
    while runtime.tenant().communicators() != n {
        assert!(Instant::now() < until, "{} communicators", runtime.tenant().communicators());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The plugin before is kept for communicators that may go back to it, not for those that are gone.
#[test]
fn a_communicator_that_is_left_in_probation_is_gone() {
    let job = Job::start("left", 2, no_change);
    let file = build("outlived", &[]);
    job.commits(&Order { probation: 10 * HANG, ..job.order(&file) });
    let tenant = job.tenant.clone();
    let comms = job.end();
    let runtimes: Vec<Runtime> = comms.iter().map(|c| c.runtime().clone()).collect();
    drop(comms);
    runtimes.iter().for_each(|r| has_communicators(r, 0));
    assert!(swap::status(&tenant).unwrap().iter().all(|s| s.probation.is_some()));
}

/// Who drops a communicator has left it for its peers, whatever a swap is doing with it.
#[test]
fn a_communicator_that_is_dropped_during_a_swap_is_left_at_once() {
    let (job, seconds) = start_with_second("dropped", |_, c| {
        c.swap_faults.push((Step::Freeze, Fault::Delay(Duration::from_secs(10))));
    });
    let file = build("dropping", &[]);
    let order = Order { probation: 10 * HANG, ..job.order(&file) };
    let swap = std::thread::spawn(move || coordinate(&order).unwrap());
    let under_way = || swap::status(&job.tenant).unwrap().iter().all(|s| s.swap.contains("swapping to"));
    let until = Instant::now() + HANG;
    while !under_way() {
        assert!(Instant::now() < until);
    }
    // All communicators have an instance of the new plugin by then.
    std::thread::sleep(Duration::from_millis(500));
    let mut stays = seconds[0].lock().unwrap().take().unwrap();
    let leaves = seconds[1].lock().unwrap().take().unwrap();
    let runtime = leaves.runtime().clone();
    drop(leaves);
    let e = stays.barrier().unwrap_err().to_string();
    assert!(e.contains("rank 1"), "{e}");
    assert!(under_way(), "the swap was over before rank 0 learned it");
    // What was left is in nobody's way, and is not kept in probation.
    let report = swap.join().unwrap();
    assert!(report.committed, "{}", report.reason);
    has_communicators(&runtime, 1);
    job.goes_on();
    drop(runtime);
    job.end();
}

/// Streams, groups and blocking calls in flight on several lanes; a communicator that is made meanwhile.
#[test]
fn streams_groups_and_new_communicators_are_swapped_with() {
    let job = Job::start_with("streams", 3, no_change, |comm, op| {
        if op % 40 != 0 {
            return;
        }
        let mut stream = match comm.stream(0) {
            Ok(s) => s,
            // Taken by the pass before, whose sequence has to be known.
            Err(_) => return,
        };
        let n = comm.nranks();
        let t = Arc::new(comm.allocate(4096).unwrap());
        for _ in 0..400 {
            t.write(0, &1u32.to_le_bytes().repeat(1024)).unwrap();
            let request = stream.raw().all_reduce(Buffers::in_place(&t), 1024, DataType::Uint32, ReduceOp::Sum);
            let other = comm.allocate(64).unwrap();
            let (next, before) = ((comm.rank() + 1) % n, (comm.rank() + n - 1) % n);
            let mut group = comm.group();
            group.send(&other, 0, 4, DataType::Uint32, next).unwrap();
            group.recv(&other, 32, 4, DataType::Uint32, before).unwrap();
            group.run().unwrap();
            comm.barrier().unwrap();
            request.wait().unwrap();
            let mut sum = [0; 4];
            t.read(4092, &mut sum).unwrap();
            assert_eq!(u32::from_le_bytes(sum), n as u32);
        }
    });
    let (a, b) = (build("streams-a", &[]), build("streams-b", &[]));
    for file in [&a, &b, &a, &b] {
        job.commits(&job.order(file));
    }
    job.end();
}

#[test]
fn communicators_come_and_go_while_swaps_are_made() {
    let port = free_port();
    let job = Job::start_with("comes", 2, no_change, move |comm, op| {
        if op % 5 == 0 {
            let root = format!("127.0.0.1:{port}");
            let options = CommOptions::with_root(root, comm.rank(), 2);
            let mut second = comm.runtime().init_comm(options).unwrap();
            assert!(!reduce(&mut second, false, op));
        }
    });
    let (a, b) = (build("comes-a", &[]), build("comes-b", &[]));
    let mut committed = 0;
    for file in [&a, &b, &a, &b, &a, &b] {
        // A communicator in the making holds a swap up, and one that has been held up for too long refuses.
        let report = coordinate(&job.order(file)).unwrap();
        committed += u64::from(report.committed);
        job.goes_on();
    }
    assert!(committed > 0);
    assert_eq!(job.serves().1, committed);
    job.end();
}

/// The new plugin plans another ring: all ranks, on all lanes, take it between the same two operations; lanes that were idle
/// meanwhile too. Ranks on different rings would tell at once.
#[test]
fn rings_change_on_all_ranks_between_the_same_two_operations() {
    use std::collections::BTreeMap;
    let streams: Mutex<BTreeMap<usize, wccl::Stream>> = Default::default();
    let usual: Arc<std::sync::OnceLock<Arc<Vec<Vec<usize>>>>> = Arc::default();
    let first = usual.clone();
    let job = Job::start_with(
        "rings",
        3,
        |_, c| c.algorithm = Some(enc::Algorithm::Ring),
        move |comm, op| {
            let (rank, n) = (comm.rank(), comm.nranks() as u32);
            first.get_or_init(|| comm.rings());
            let t = Arc::new(comm.allocate(4096).unwrap());
            let ones = || t.write(0, &1u32.to_le_bytes().repeat(1024)).unwrap();
            let sums = || {
                let mut out = vec![0; 4096];
                t.read(0, &mut out).unwrap();
                assert_eq!(out, n.to_le_bytes().repeat(1024));
            };
            ones();
            comm.raw().all_reduce(Io::in_place(&t), 1024, DataType::Uint32, ReduceOp::Sum).unwrap();
            sums();
            // The stream's lane is idle most of the time.
            if op % 16 == 0 {
                let taken = streams.lock().unwrap().remove(&rank);
                let mut stream = taken.unwrap_or_else(|| comm.stream(0).unwrap());
                ones();
                stream.raw().all_reduce(Buffers::in_place(&t), 1024, DataType::Uint32, ReduceOp::Sum).wait().unwrap();
                sums();
                streams.lock().unwrap().insert(rank, stream);
            }
        },
    );
    let (other, same) = (build("other-ring", &[("neuron-get-comm-info", OTHER_RINGS)]), build("usual-ring", &[]));
    for _ in 0..10 {
        job.commits(&job.order(&other));
        job.commits(&job.order(&same));
    }
    job.commits(&job.order(&other));
    for comm in job.end() {
        let other: Vec<Vec<usize>> = usual.get().unwrap().iter().map(|r| vec![r[0], r[2], r[1]]).collect();
        assert_eq!(*comm.rings(), other);
        assert_eq!(comm.info().rings.len(), other.len());
    }
}

/// One rank would go by other rings than its peers: nobody swaps.
#[test]
fn ranks_that_plan_different_rings_keep_the_old_ones() {
    let job = Job::start("clash", 3, no_change);
    let only_rank_1 =
        "(if (i32.ne (i32.load (i32.load offset=8 (local.get 3))) (i32.const 1)) (then (return (local.get 2))))";
    let edit = OTHER_RINGS.replacen("(block", &format!("{only_rank_1} (block"), 1);
    let file = build("clashes", &[("neuron-get-comm-info", &edit)]);
    job.refuses(&job.order(&file), &["would go by other rings than rank", "give all the same file"]);
    let usual = build("clashes-not", &[]);
    job.commits(&job.order(&usual));
    job.end();
}

/// A plugin that is called between its export and the stand exports again; what is planned of that must be what was agreed on.
#[test]
fn a_plan_that_differs_when_it_is_handed_over_again_is_refused() {
    let job = Job::start_with(
        "again",
        3,
        |_, c| c.swap_faults.push((Step::Vote, Fault::Delay(Duration::from_millis(200)))),
        |comm, _| {
            comm.peer_device_id(0).unwrap();
        },
    );
    // At the far end of the stack a word counts how often this instance was asked.
    let asked = "(i32.store (i32.const 16) (i32.add (i32.load (i32.const 16)) (i32.const 1)))
        (if (i32.eq (i32.load (i32.const 16)) (i32.const 1)) (then (return (local.get 2))))";
    let edit = OTHER_RINGS.replacen("(block", &format!("{asked} (block"), 1);
    let file = build("changes-its-mind", &[("neuron-get-comm-info", &edit)]);
    job.refuses(&job.order(&file), &["planned other rings when it was asked again"]);
    let usual = build("keeps-its-mind", &[]);
    job.commits(&job.order(&usual));
    job.end();
}

/// The new plugin may want any rings, which takes links to all.
#[test]
fn ranks_that_are_linked_to_their_neighbours_only_do_not_swap() {
    let n = 4;
    let (root, unused) = (format!("127.0.0.1:{}", free_port()), Arc::new(Mutex::new(Vec::new())));
    let kept = unused.clone();
    let job = Job::start_with("neighbours", n, no_change, move |comm, op| {
        if op == 0 {
            let options = CommOptions::with_root(root.clone(), comm.rank(), n);
            let second = comm.runtime().init_comm(options).unwrap();
            kept.lock().unwrap().push(second);
        }
    });
    let file = build("wants-more", &[]);
    let says = "of communicator 2 is linked to its ring neighbours only";
    job.refuses(&job.order(&file), &[says, "the first collective that is no ring's"]);
    let seconds = std::mem::take(&mut *unused.lock().unwrap());
    let used = seconds.into_iter().map(|mut comm| {
        std::thread::spawn(move || {
            reduce(&mut comm, false, 0);
            comm
        })
    });
    let used: Vec<_> = used.collect();
    let used: Vec<_> = used.into_iter().map(|t| t.join().unwrap()).collect();
    job.commits(&job.order(&file));
    drop(used);
    job.end();
}

/// The new plugin traps within probation: all ranks go back, also those where it did not.
#[test]
fn a_trap_in_probation_brings_the_old_plugin_back() {
    let job = Job::start_with("probation", 2, no_change, |comm, op| {
        // Only rank 1 calls the entry in which the new plugin traps.
        if comm.rank() == 1 && op % 20 == 0 {
            let _ = comm.peer_device_id(0);
        }
    });
    let before = job.serves();
    let file = build("traps-later", &[("neuron-get-peer-device-id", "unreachable")]);
    let order = Order { probation: HANG, ..job.order(&file) };
    let report = coordinate(&order).unwrap();
    assert!(report.committed, "{}", report.reason);
    went_back(&job.tenant);
    job.goes_on();
    assert_eq!(job.serves(), (before.0, 2));
    for s in swap::status(&job.tenant).unwrap() {
        assert!(s.last.contains("went back") && s.last.contains("unreachable"), "{}", s.last);
        assert_eq!((s.counts.committed, s.swap.as_str()), (2, ""));
    }
    for comm in job.end() {
        comm.peer_device_id(0).unwrap();
        assert!(comm.control_stopped().is_none());
    }
}

/// Where no communicator has the instance that stopped: it was not made, it is gone, or the library itself was called.
#[test]
fn a_trap_in_probation_counts_wherever_it_was() {
    for entry in ["neuron-init-global-comm", "neuron-build-graph-comm", "neuron-get-unique-id"] {
        let tenant = tenant(entry);
        let runtimes = [0; 2].map(|_| Runtime::open(RuntimeConfig { tenant: tenant.clone(), ..config() }).unwrap());
        let uses = || {
            runtimes[1].unique_id(1)?;
            let root = format!("127.0.0.1:{}", free_port());
            runtimes[1].init_comm(CommOptions::with_root(root, 0, 1)).map(drop)
        };
        let file = build(entry, &[(entry, "unreachable")]);
        let report = coordinate(&Order { probation: HANG, ..patient(&tenant, file.path()) }).unwrap();
        assert!(report.committed, "{}", report.reason);
        let e = uses().unwrap_err().to_string();
        assert!(e.contains("unreachable"), "{e}");
        for last in went_back(&tenant) {
            let words = format!("stopped in pid {}: wasm trap: wasm `unreachable`", std::process::id());
            assert!(last.contains("went back: the new plugin ") && last.contains(&words), "{last}");
        }
        uses().unwrap();
    }
}

/// An instance that its own user's abort ended says nothing of the plugin.
#[test]
fn an_abort_in_probation_is_no_reason_to_go_back() {
    let tenant = tenant("aborted");
    let runtime = Runtime::open(RuntimeConfig { tenant: tenant.clone(), ..config() }).unwrap();
    let file = build("ends-late", &[("neuron-get-peer-device-id", SPINS), ("neuron-get-unique-id", "unreachable")]);
    let report = coordinate(&Order { probation: HANG, ..patient(&tenant, file.path()) }).unwrap();
    assert!(report.committed, "{}", report.reason);
    let comm = runtime.init_comm(CommOptions::with_root(format!("127.0.0.1:{}", free_port()), 0, 1)).unwrap();
    comm.abort_token().abort("its user has had enough");
    let e = comm.peer_device_id(0).unwrap_err().to_string();
    assert!(e.contains("had enough") && comm.control_stopped().is_some(), "{e}");
    // Time to go back, for who would.
    std::thread::sleep(Duration::from_millis(200));
    assert!(swap::status(&tenant).unwrap()[0].probation.is_some());
    let e = runtime.unique_id(1).unwrap_err().to_string();
    assert!(e.contains("unreachable"), "{e}");
    let said = went_back(&tenant);
    assert!(said[0].contains("(in neuronGetUniqueId)"), "{said:?}");
}

/// A runtime that was opened since the swap has nothing to go back to, and keeps nobody from it. A communicator with it could
/// not go back, so there is none while the probation lasts.
#[test]
fn a_runtime_that_is_opened_in_probation_is_no_part_of_it() {
    let (traps, runtimes) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
    let (wanted, opened) = (traps.clone(), runtimes.clone());
    let job = Job::start_with("newcomer", 2, no_change, move |comm, op| {
        if op == 0 {
            opened.lock().unwrap().push(comm.runtime().clone());
        }
        if comm.rank() == 1 && wanted.load(Ordering::Acquire) {
            let _ = comm.peer_device_id(0);
        }
    });
    let before = job.serves();
    let file = build("traps-beside", &[("neuron-get-peer-device-id", "unreachable")]);
    let report = coordinate(&Order { probation: HANG, ..job.order(&file) }).unwrap();
    assert!(report.committed, "{}", report.reason);

    // Another process of the tenant comes, and wants a communicator.
    let root = format!("127.0.0.1:{}", free_port());
    let vars = [("SWAP_TENANT", job.tenant.as_str()), ("WCCL_PLUGIN", file.path().to_str().unwrap())];
    let newcomer = spawn(Command::new(env!("CARGO_BIN_EXE_swap_rank")), &root, "", 1, 2, &vars);
    let member = runtimes.lock().unwrap()[0].clone();
    let e = member.init_comm(CommOptions::with_root(root, 0, 2)).unwrap_err().to_string();
    let words =
        format!("its process (pid {}) took no part in the hot swap of tenant {}", newcomer.child.id(), job.tenant);
    assert!(e.contains(&words) && e.contains(" that is in probation for another "), "{e}");
    let said = newcomer.line();
    assert!(said.starts_with("error") && said.contains(&words), "{said}");

    // Others go back without those that came.
    let late = Runtime::open(RuntimeConfig { tenant: job.tenant.clone(), ..config() }).unwrap();
    traps.store(true, Ordering::Release);
    let until = Instant::now() + HANG;
    while member.swaps().rolled_back == 0 {
        assert!(Instant::now() < until, "{:?}", swap::status(&job.tenant));
        std::thread::sleep(Duration::from_millis(5));
    }
    job.goes_on();
    assert_eq!((late.swaps().committed, late.swaps().refused), (0, 0));
    drop((late, newcomer));
    assert_eq!(job.serves(), (before.0, 2));
    drop((member, runtimes.lock().unwrap().drain(..)));
    job.end();
}

/// Two versions at most: no third one before the first has gone.
#[test]
fn a_swap_in_probation_keeps_the_next_one_out() {
    let job = Job::start("beside", 2, no_change);
    let (a, b) = (build("beside-a", &[]), build("beside-b", &[]));
    job.commits(&Order { probation: Duration::from_secs(10), ..job.order(&a) });
    job.refuses(&job.order(&b), &["is in probation for another"]);
    let until = Instant::now() + HANG;
    while swap::status(&job.tenant).unwrap().iter().any(|s| !s.swap.is_empty()) {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(5));
    }
    job.commits(&job.order(&b));
    job.end();
}

/// A rank without a control socket cannot be left out.
#[test]
fn a_rank_without_a_control_socket_keeps_the_job_as_it_is() {
    let job = Job::start("without", 2, |rank, c| c.control = rank == 0);
    let file = build("half", &[]);
    let order = Order { quiesce: Duration::from_millis(300), ..job.order(&file) };
    let report = coordinate(&order).unwrap();
    assert!(!report.committed);
    // In one process the pids do not tell; the rank is missed when operations are to stand still.
    assert!(report.reason.contains("did not hold its operations"), "{}", report.reason);
    job.goes_on();
    job.end();
}

#[test]
fn a_transport_is_no_net_plugin() {
    let job = Job::start("net", 2, no_change);
    let transport = build("transport", &[]);
    job.refuses(&Order { kind: Kind::Net, ..job.order(&transport) }, &["net plugin", "transport"]);
    job.refuses(&Order { kind: Kind::Net, plugin: None, ..job.order(&transport) }, &["no plugin in probation"]);
    job.end();
}

/// Ranks as processes.
struct Processes {
    tenant: String,
    ranks: Vec<Rank>,
}

impl Processes {
    /// `fault` is rank 1's.
    fn start(name: &str, n: usize, fault: &str) -> Processes {
        Processes::start_with(name, n, fault, |_, _| ())
    }

    fn start_with(name: &str, n: usize, fault: &str, adapt: impl Fn(usize, &mut Command)) -> Processes {
        let (tenant, root) = (tenant(name), format!("127.0.0.1:{}", free_port()));
        let ranks: Vec<Rank> = (0..n)
            .map(|rank| {
                let mut command = Command::new(env!("CARGO_BIN_EXE_swap_rank"));
                command.stdin(Stdio::piped());
                adapt(rank, &mut command);
                let mut vars = vec![("SWAP_TENANT", tenant.as_str())];
                if rank == 1 && !fault.is_empty() {
                    vars.push(("SWAP_FAULT", fault));
                }
                spawn(command, &root, "", rank, n, &vars)
            })
            .collect();
        ranks.iter().for_each(|r| assert_eq!(r.line(), "ready"));
        Processes { tenant, ranks }
    }

    fn generations(&self) -> Vec<u64> {
        swap::status(&self.tenant).unwrap().iter().map(|s| s.generation).collect()
    }

    /// All ranks stop after the same operation, every result right.
    fn end(mut self) {
        let mut input = self.ranks[0].child.stdin.take().unwrap();
        // The rank may have failed, which its lines tell.
        let _ = writeln!(input, "enough");
        let last: Vec<String> = self.ranks.iter().map(Rank::line).collect();
        assert!(last[0].starts_with("done") && last.iter().all(|l| *l == last[0]), "{last:?}");
    }
}

fn signal(rank: &Rank, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(rank.child.id() as i32).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

#[test]
fn four_processes_swap_under_load() {
    let job = Processes::start("processes", 4, "");
    let (a, b) = (build("process-a", &[]), build("process-b", &[]));
    for (i, file) in [&a, &b, &a, &b].into_iter().enumerate() {
        let report = coordinate(&patient(&job.tenant, file.path())).unwrap();
        assert!(report.committed, "{}", report.reason);
        eprintln!("pause {:?}", report.pause());
        assert_eq!(job.generations(), [i as u64 + 1; 4]);
    }
    job.end();
}

/// Each process finds another file under the same path. Builds that speak the same may be beside each other, others not.
#[test]
fn processes_that_load_other_bytes_swap_only_if_they_speak_the_same() {
    let folders = [0, 1].map(|rank| {
        let folder = format!("mixed-{}-{rank}", std::process::id());
        PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(folder)
    });
    folders.iter().for_each(|f| std::fs::create_dir_all(f).unwrap());
    let job = Processes::start_with("mixed", 2, "", |rank, command| {
        command.current_dir(&folders[rank]);
    });
    let order = Order { stateless: true, ..patient(&job.tenant, "/proc/self/cwd/next.wasm") };
    for (edits, committed) in [(&[("describe", OTHER_WIRE)][..], false), (&[], true)] {
        for (rank, edits) in [&[], edits].into_iter().enumerate() {
            let file = build(&format!("mixed-{rank}"), edits);
            std::fs::copy(file.path(), folders[rank].join("next.wasm")).unwrap();
        }
        let report = coordinate(&order).unwrap();
        assert_eq!(report.committed, committed, "{}", report.reason);
        let why = "has other bytes, and the two do not declare the same wire-compat; give all the same file";
        assert_eq!(report.reason.contains(why), !committed, "{}", report.reason);
        assert_eq!(job.generations(), [u64::from(committed); 2]);
    }
    job.end();
    // Folders that stay are litter under target/, nothing more.
    folders.iter().for_each(|f| drop(std::fs::remove_dir_all(f)));
}

/// A process of the job that takes no part is named, before anything stands still.
#[test]
fn a_process_without_a_control_socket_keeps_the_others_from_swapping() {
    let job = Processes::start_with("hidden", 2, "", |rank, command| {
        command.env("WCCL_CONTROL", if rank == 0 { "1" } else { "0" });
    });
    let file = build("hides", &[]);
    let report = coordinate(&Order::transport(&job.tenant, file.path())).unwrap();
    let says = format!("rank 1 of communicator 1 (pid {}) takes no part in the swap", job.ranks[1].child.id());
    assert!(!report.committed && report.reason.contains(&says), "{}", report.reason);
    assert_eq!(job.generations(), [0]);
    job.end();
}

/// Stopped at a step, a rank keeps all from swapping or swaps with them when it goes on: never is one left behind.
#[test]
fn a_rank_that_is_stopped_at_any_step_leaves_no_mixture() {
    let steps = [
        ("Load", false),
        ("Freeze", false),
        ("Import", false),
        ("Vote", false),
        ("Closed", false),
        ("Ready", false),
        ("Decide", true),
        ("Commit", true),
        ("Exchange", true),
    ];
    let file = build("stopped", &[]);
    // Compiled, so that the bounds below are of the swap alone.
    drop(Runtime::open(RuntimeConfig { plugin: Some(file.path().into()), ..config() }).unwrap());
    for (step, committed) in steps {
        let job = Processes::start(&format!("stop-{step}"), 3, &format!("{step}:Stop"));
        // The others are to give up before rank 1 goes on, or are not to give up.
        let (timeout, quiesce) =
            if committed { (HANG, HANG / 2) } else { (Duration::from_secs(8), Duration::from_secs(2)) };
        let order = Order { timeout, quiesce, ..patient(&job.tenant, file.path()) };
        let swap = std::thread::spawn(move || coordinate(&order).unwrap());
        let until = Instant::now() + HANG;
        while !hw_bridge::os::process::is_stopped(job.ranks[1].child.id()) {
            assert!(Instant::now() < until && !swap.is_finished(), "{step}: rank 1 did not stop");
            std::thread::sleep(Duration::from_millis(5));
        }
        let goes_on = || signal(&job.ranks[1], rustix::process::Signal::CONT);
        let report = if committed {
            // Long enough for the others to be done, most likely.
            std::thread::sleep(Duration::from_millis(1500));
            goes_on();
            swap.join().unwrap()
        } else {
            let report = swap.join().unwrap();
            goes_on();
            report
        };
        assert_eq!(report.committed, committed, "{step}: {report:?}");
        if !committed {
            assert!(!report.reason.is_empty(), "{step}");
        }
        assert_eq!(job.generations(), [u64::from(committed); 3], "{step}");
        job.end();
    }
}

/// Killed at a step, a rank leaves the survivors with the same plugin; their operations fail as after any death.
#[test]
fn a_rank_that_is_killed_at_any_step_leaves_no_mixture() {
    let file = build("killed", &[]);
    for step in ["Load", "Freeze", "Import", "Vote", "Closed", "Ready", "Decide", "Commit", "Exchange"] {
        let job = Processes::start(&format!("kill-{step}"), 3, &format!("{step}:Kill"));
        let order = Order { probation: Duration::ZERO, ..Order::transport(&job.tenant, file.path()) };
        let begun = Instant::now();
        let report = coordinate(&order).unwrap();
        eprintln!("{step}: committed {} after {:?}: {}", report.committed, begun.elapsed(), report.reason);
        let outcomes: Vec<bool> = report
            .members
            .iter()
            .filter_map(|m| m.outcome.as_ref().ok())
            .map(|o| matches!(o, Outcome::Swapped { .. }))
            .collect();
        assert!(outcomes.len() == 2 && outcomes.iter().all(|o| *o == report.committed), "{step}: {report:?}");
        for rank in [&job.ranks[0], &job.ranks[2]] {
            let said = rank.line();
            assert!(said.starts_with("error") && said.contains("rank 1"), "{step}: {said}");
        }
    }
}
