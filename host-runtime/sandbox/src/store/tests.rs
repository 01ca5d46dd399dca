//! Instances: what stops them, and what does not.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use wasmtime::StoreContextMut;
use wasmtime::component::{Component, Linker};

use super::*;
use crate::abort::AbortToken;
use crate::error::Error;
use crate::limits::Limits;
use crate::status::Status;
use crate::tenant::{Tenant, limited};

const CALLS_BACK: &str = r#"(component
    (import "callback" (func $callback))
    (core func $lowered (canon lower (func $callback)))
    (core module $m
        (import "" "callback" (func $callback))
        (func (export "entry") call $callback)
        (func (export "spin") (loop br 0))
        (func (export "trap") unreachable)
        (func (export "chat") (loop call $callback br 0)))
    (core instance $i (instantiate $m (with "" (instance (export "callback" (func $lowered))))))
    (func (export "entry") (canon lift (core func $i "entry")))
    (func (export "spin") (canon lift (core func $i "spin")))
    (func (export "trap") (canon lift (core func $i "trap")))
    (func (export "chat") (canon lift (core func $i "chat"))))"#;

fn library(wat: &str, link: impl FnOnce(&mut Linker<HostState>)) -> Arc<Library> {
    let engine = engine::engine().unwrap();
    let component = Arc::new(Component::new(engine, wat::parse_str(wat).unwrap()).unwrap());
    let mut linker = Linker::<HostState>::new(engine);
    link(&mut linker);
    let pre = linker.instantiate_pre(&component).unwrap();
    Arc::new(Library {
        name: "calls-back".into(),
        digest: String::new(),
        bytes: 0,
        grant: Arc::default(),
        component,
        pre,
        slots: OnceLock::new(),
        version: OnceLock::new(),
    })
}

fn instance(limits: Limits, callback: impl Fn() + Send + Sync + 'static) -> (Arc<Instance>, Arc<Tenant>) {
    let callback = move |_: StoreContextMut<'_, HostState>, (): ()| {
        callback();
        Ok(())
    };
    let library = library(CALLS_BACK, |linker| linker.root().func_wrap("callback", callback).unwrap());
    let tenant = limited(limits);
    (Instance::new(&library, state(&tenant), Patience::Usual).unwrap(), tenant)
}

fn state(tenant: &Arc<Tenant>) -> HostState {
    HostState::new(tenant.clone(), None, AbortToken::new().unwrap(), None)
}

fn call(i: &Instance, name: &str) -> Result<(), Error> {
    call_as(i, "entry", name)
}

fn call_as(i: &Instance, entry: &'static str, name: &str) -> Result<(), Error> {
    call_within(i, Patience::Usual, entry, name)
}

fn call_within(i: &Instance, patience: Patience, entry: &'static str, name: &str) -> Result<(), Error> {
    let index = i.library().component.get_export_index(None, name).unwrap();
    i.with(entry, patience, None, |store, instance| {
        let f = instance.get_typed_func::<(), ()>(&mut *store, &index)?;
        f.call(store, ())
    })
    .map(|_| ())
}

/// Proves INV-10.
#[test]
fn an_instance_on_the_stack_is_never_entered_again() {
    let cell: Arc<OnceLock<Arc<Instance>>> = Arc::default();
    let seen: Arc<Mutex<Vec<(String, Status)>>> = Arc::default();
    let (inner, log) = (cell.clone(), seen.clone());
    let (outer, _) = instance(Limits::default(), move || {
        let again = call(inner.get().unwrap(), "entry").unwrap_err();
        log.lock().unwrap().push((again.to_string(), again.status()));
    });
    cell.set(outer.clone()).unwrap();
    // The refusal is the callback's to handle; the outer call goes on, and the instance serves again.
    for round in 1..=2 {
        call(&outer, "entry").unwrap();
        let texts = seen.lock().unwrap();
        assert_eq!(texts.len(), round);
        let (text, status) = &texts[0];
        assert!(text.contains("from inside one of its own callbacks"), "{text}");
        assert_eq!(*status, Status::INVALID);
    }
}

/// What it asks of the host then is of the process that it is made for, not of this one.
#[test]
fn a_start_function_runs_for_the_client_of_its_instance() {
    use crate::entries::{Holder, Loaded, Version};
    use crate::objects::ClientProcess;
    let engine = engine::engine().unwrap();
    let wat = r#"(component
        (import "callback" (func $callback))
        (core func $lowered (canon lower (func $callback)))
        (core module $m (import "" "callback" (func $callback)) (start $callback))
        (core instance (instantiate $m (with "" (instance (export "callback" (func $lowered)))))))"#;
    let component = Arc::new(Component::new(engine, wat::parse_str(wat).unwrap()).unwrap());
    let seen: Arc<Mutex<Vec<Option<u32>>>> = Arc::default();
    let log = seen.clone();
    let mut linker = Linker::<HostState>::new(engine);
    linker
        .root()
        .func_wrap("callback", move |store, (): ()| {
            log.lock().unwrap().push(store.data().client.as_ref().map(|c| c.owner.pid));
            Ok(())
        })
        .unwrap();
    let pre = linker.instantiate_pre(&component).unwrap();
    let (grant, slots, version) = Default::default();
    let (name, digest) = ("starts".into(), String::new());
    let library = Arc::new(Library { name, digest, bytes: 0, grant, component, pre, slots, version });
    let tenant = limited(Limits::default());
    let abort = AbortToken::new().unwrap();
    let state = HostState::new(tenant.clone(), Some(library.clone()), abort.clone(), None);
    let instance = Instance::new(&library, state, Patience::Usual).unwrap();
    let loaded = Loaded { library, instance, version: Version::default(), generation: 0 };
    let owner = hw_bridge::group::Owner { pid: 4242, asymmetric: false, mark: [0; 2] };
    let flags = rustix::event::EventfdFlags::CLOEXEC;
    let pidfd = Arc::new(rustix::event::eventfd(0, flags).unwrap());
    let client = ClientProcess { owner, pidfd, hbm: hw_bridge::memory::hbm::Hbm::new(1 << 20).unwrap() };
    let holder = Holder { core: 0, key: crate::key::GroupKey::some(), seat: None, client: Some(client) };
    loaded.instantiate(&tenant, &abort, holder, Patience::Usual).unwrap();
    assert_eq!(*seen.lock().unwrap(), [None, Some(4242)]);
}

/// Neither a call nor a check of types waits for as long as that call takes; it is no fault of the plugin, and passes.
#[test]
fn an_instance_is_busy_behind_a_call_that_does_not_end_in_time() {
    let (inside, entered) = std::sync::mpsc::channel();
    let (done, checked) = std::sync::mpsc::channel::<()>();
    let (inside, checked) = (Mutex::new(inside), Mutex::new(checked));
    let (i, tenant) = instance(Limits::default(), move || {
        inside.lock().unwrap().send(()).unwrap();
        // It ends all the same if the others wait for it.
        let _ = checked.lock().unwrap().recv_timeout(Duration::from_secs(20));
    });
    let index = i.library().component.get_export_index(None, "spin").unwrap();
    std::thread::scope(|s| {
        let calls = s.spawn(|| call(&i, "entry"));
        entered.recv().unwrap();
        let soon = || Patience::Host(Instant::now() + Duration::from_millis(20));
        let said = "spin of plugin calls-back was not called on tenant default: entry has kept its instance busy for ";
        let e = i.typed::<(), u32>("spin", soon(), &index).unwrap_err();
        assert!(e.starts_with(said), "{e}");
        let e = call_within(&i, soon(), "spin", "spin").unwrap_err();
        assert!(matches!(e, Error::Busy { inside: "entry", .. }), "{e:?}");
        assert_eq!(e.status(), Status::TIMEOUT);
        assert!(e.to_string().starts_with(said), "{e}");
        assert_eq!((i.stopped(), tenant.counters.traps()), (None, 0));
        done.send(()).unwrap();
        calls.join().unwrap().unwrap();
    });
    let e = i.typed::<(), u32>("spin", Patience::Usual, &index).unwrap_err();
    assert!(e.starts_with("it has another type: "), "{e}");
}

#[test]
fn another_instance_may_be_entered_from_a_callback() {
    let (other, _) = instance(Limits::default(), || {});
    let (outer, _) = instance(Limits::default(), move || call(&other, "entry").unwrap());
    call(&outer, "entry").unwrap();
}

#[test]
fn guest_time_is_bounded_a_call_and_host_time_does_not_count() {
    let limits = Limits { call: Duration::from_millis(100), ..Limits::default() };
    // Each callback takes longer than the whole budget of the guest, on a core too.
    let (slow_host, tenant) = instance(limits, || {
        let until = crate::tenant::throttle::on_core() + Duration::from_millis(250);
        while crate::tenant::throttle::on_core() < until {}
    });
    for _ in 0..2 {
        call(&slow_host, "entry").unwrap();
    }
    assert!(tenant.counters.component_calls() >= 4);
    let e = call(&slow_host, "spin").unwrap_err().to_string();
    assert!(e.contains("its 100ms of guest time"), "{e}");
    assert_eq!(tenant.counters.traps(), 1);
}

/// It is said which entry stopped it, and not that the one did which was not called.
#[test]
fn an_instance_that_stopped_is_not_called() {
    let limits = Limits { call: Duration::from_millis(100), ..Limits::default() };
    let (i, tenant) = instance(limits, || {});
    let e = call_as(&i, "spin", "spin").unwrap_err();
    assert!(matches!(e, Error::Stopped { entry: "spin", .. }), "{e:?}");
    assert_eq!(e.status(), Status::FAILURE);
    let e = call(&i, "entry").unwrap_err();
    assert_eq!(e.status(), Status::FAILURE);
    assert_eq!(
        e.to_string(),
        "entry of plugin calls-back was not called on tenant default: its instance stopped before: the call used more \
         than its 100ms of guest time (in spin); data in flight goes on"
    );
    assert_eq!(tenant.counters.traps(), 1);
}

/// Which may be earlier than any other bound; the next call is not bounded by it.
#[test]
fn a_guest_does_not_outlast_the_operation_it_is_called_for() {
    for name in ["spin", "chat"] {
        let (i, _) = instance(Limits::default(), || {});
        let later = Patience::Host(Instant::now() + Duration::from_secs(60));
        call_within(&i, later, "entry", "entry").unwrap();
        let e = call_within(&i, Patience::Host(Instant::now()), "entry", name).unwrap_err().to_string();
        assert!(e.contains("went on after the deadline of its operation"), "{name}: {e}");
    }
    let (i, _) = instance(Limits { call: Duration::from_millis(900), ..Limits::default() }, || {});
    call_within(&i, Patience::Host(Instant::now()), "entry", "entry").unwrap();
    let e = call(&i, "spin").unwrap_err().to_string();
    assert!(e.contains("900ms of guest time"), "{e}");
}

/// What a caller ends is no fault of the plugin's, which a client of a service could else have quarantined for its tenant; a
/// trap of the plugin's own is one, whatever the caller does meanwhile.
#[test]
fn only_what_the_plugin_does_itself_is_counted_against_it() {
    let stops = |tenant: &Tenant| tenant.supervisor.blamed("");
    for name in ["spin", "chat"] {
        let (i, tenant) = instance(Limits::default(), || {});
        call_within(&i, Patience::Operation(Instant::now()), "entry", name).unwrap_err();
        assert_eq!((stops(&tenant), tenant.counters.traps()), (0, 1), "{name}: the caller's deadline");
        let (i, tenant) = instance(Limits::default(), || {});
        call_within(&i, Patience::Host(Instant::now()), "entry", name).unwrap_err();
        assert_eq!(stops(&tenant), 1, "{name}: the host's deadline");
        let (i, tenant) = instance(Limits::default(), || {});
        i.peek(|s| s.abort.abort("the user has changed his mind"));
        let e = call(&i, name).unwrap_err().to_string();
        assert!(e.contains("aborted: the user has changed his mind"), "{e}");
        assert_eq!((stops(&tenant), tenant.counters.traps()), (0, 1), "{name}: the caller's abort");
        // Its own time is over first, or its own trap comes.
        let (i, tenant) = instance(Limits { call: Duration::from_millis(50), ..Limits::default() }, || {});
        let later = Patience::Operation(Instant::now() + Duration::from_secs(60));
        call_within(&i, later, "entry", name).unwrap_err();
        assert_eq!(stops(&tenant), 1, "{name}: the plugin's time");
    }
    let (i, tenant) = instance(Limits::default(), || {});
    i.peek(|s| s.abort.abort("the user has changed his mind"));
    let e = call(&i, "trap").unwrap_err().to_string();
    assert!(e.contains("unreachable"), "{e}");
    assert_eq!(stops(&tenant), 1, "a trap after an abort");
    let (i, tenant) = instance(Limits::default(), || {});
    call_within(&i, Patience::Operation(Instant::now()), "entry", "trap").unwrap_err();
    assert_eq!(stops(&tenant), 1, "a trap after the caller's deadline");
}

/// A guest that always comes out before a tick has passed is bounded all the same, by its own time and in all.
#[test]
fn a_loop_over_host_calls_is_bounded() {
    let (quick, _) = instance(Limits { call: Duration::from_millis(50), ..Limits::default() }, || {});
    let e = call(&quick, "chat").unwrap_err().to_string();
    assert!(e.contains("50ms of guest time"), "{e}");
    let limits = Limits { wall: Duration::from_millis(200), ..Limits::default() };
    let (slow, _) = instance(limits, || std::thread::sleep(Duration::from_millis(20)));
    let e = call(&slow, "chat").unwrap_err().to_string();
    assert!(e.contains("200ms in all"), "{e}");
}

/// Its start function calls back until it is told to go on.
const STARTS: &str = r#"(component
    (import "again" (func $again (result bool)))
    (core func $lowered (canon lower (func $again)))
    (core module $m
        (import "" "again" (func $again (result i32)))
        (func $start (loop (br_if 0 (call $again))))
        (start $start)
        (func (export "entry"))
        (func (export "trap") unreachable))
    (core instance $i (instantiate $m (with "" (instance (export "again" (func $lowered))))))
    (func (export "entry") (canon lift (core func $i "entry")))
    (func (export "trap") (canon lift (core func $i "trap"))))"#;

fn starts(again: impl Fn() -> bool + Send + Sync + 'static) -> (Arc<Library>, Arc<Tenant>) {
    let again = move |_: StoreContextMut<'_, HostState>, (): ()| Ok((again(),));
    // What stopped runs again at once.
    let limits = Limits { restart_pause: Duration::ZERO, wall: Duration::from_secs(20), ..Limits::default() };
    (library(STARTS, |linker| linker.root().func_wrap("again", again).unwrap()), limited(limits))
}

/// What the deadline of its caller cuts short is no stop of the plugin, which runs for the next one.
#[test]
fn a_restart_does_not_outlast_the_call_that_it_is_for() {
    let spins = Arc::new(AtomicBool::new(false));
    let again = spins.clone();
    let (library, tenant) = starts(move || again.load(Ordering::Relaxed));
    let serves = Instance::renewable(&library, state(&tenant)).unwrap();
    let gone = Instance::new(&library, state(&tenant), Patience::Usual).unwrap();
    for i in [&serves, &gone] {
        call_as(i, "trap", "trap").unwrap_err();
    }
    let soon = || Patience::Host(Instant::now() + Duration::from_millis(50));
    spins.store(true, Ordering::Relaxed);
    let e = call_within(&serves, soon(), "entry", "entry").unwrap_err();
    assert!(matches!(e, Error::Busy { entry: "entry", inside: "restart", .. }), "{e}");
    assert_eq!(e.status(), Status::TIMEOUT);
    let e = gone.successor("restart", soon()).map(drop).unwrap_err();
    assert!(matches!(e, Error::Busy { inside: "restart", .. }), "{e}");
    assert_eq!(tenant.supervisor.blamed(&library.digest), 2);
    spins.store(false, Ordering::Relaxed);
    call(&serves, "entry").unwrap();
    let new = gone.successor("restart", Patience::Host(Instant::now() + Duration::from_secs(600))).unwrap();
    call(&new, "entry").unwrap();
}

/// Nobody who wants the old one waits behind the start function of the new one.
#[test]
fn an_instance_is_read_while_another_one_is_made_in_its_place() {
    let (inside, entered) = std::sync::mpsc::channel();
    let (done, was_read) = std::sync::mpsc::channel::<()>();
    let both = Mutex::new((inside, was_read));
    let holds = Arc::new(AtomicBool::new(false));
    let again = holds.clone();
    let (library, tenant) = starts(move || {
        if again.load(Ordering::Relaxed) {
            let (inside, was_read) = &*both.lock().unwrap();
            inside.send(()).unwrap();
            // It ends all the same if it is waited for.
            let _ = was_read.recv_timeout(Duration::from_secs(10));
        }
        false
    });
    let (serves, gone) = (
        Instance::renewable(&library, state(&tenant)).unwrap(),
        Instance::new(&library, state(&tenant), Patience::Usual).unwrap(),
    );
    for i in [&serves, &gone] {
        call_as(i, "trap", "trap").unwrap_err();
    }
    holds.store(true, Ordering::Relaxed);
    for old in [&gone, &serves] {
        std::thread::scope(|s| {
            let restarts = s.spawn(|| {
                if Arc::ptr_eq(old, &gone) {
                    gone.successor("restart", Patience::Usual).map(drop)
                } else {
                    call(old, "entry")
                }
            });
            entered.recv().unwrap();
            let begun = Instant::now();
            old.peek(|s| s.seat = None);
            let waited = begun.elapsed();
            let _ = done.send(());
            restarts.join().unwrap().unwrap();
            assert!(waited < Duration::from_secs(5), "{waited:?}");
        });
    }
}

/// Whatever the other instances of its tenant leave it: what the plugin does itself counts.
#[test]
fn a_stop_for_want_of_what_other_instances_have_is_no_fault_of_the_plugin() {
    const GROWS: &str = r#"(component
        (core module $m
            (memory 1)
            (func (export "grow") (if (i32.eq (memory.grow (i32.const 32)) (i32.const -1)) (then unreachable)))
            (func (export "too-much") (if (i32.eq (memory.grow (i32.const 80)) (i32.const -1)) (then unreachable)))
            (func (export "both") (drop (memory.grow (i32.const 32))) (loop br 0)))
        (core instance $i (instantiate $m))
        (func (export "grow") (canon lift (core func $i "grow")))
        (func (export "too-much") (canon lift (core func $i "too-much")))
        (func (export "both") (canon lift (core func $i "both"))))"#;
    const MIB: usize = 1 << 20;
    let (call, restart_pause) = (Duration::from_millis(100), Duration::ZERO);
    let limits = Limits { memory_in_all: 4 * MIB, call, restart_pause, ..Limits::default() };
    let (library, tenant) = (library(GROWS, |_| {}), limited(limits));
    let i = Instance::renewable(&library, state(&tenant)).unwrap();
    let stops = || tenant.supervisor.blamed(&library.digest);
    let others = 3 * MIB;
    tenant.take_memory(others).unwrap();
    let says = |name, text: &str| {
        let e = call_as(&i, "entry", name).unwrap_err().to_string();
        assert!(e.contains(text), "{e}");
    };
    says("grow", "limits.memory-in-all");
    assert_eq!((stops(), tenant.counters.traps()), (0, 1));
    // A plugin in probation goes back for it all the same.
    assert_eq!(tenant.supervisor.stops(&library.digest).0, 1);
    // More than all may have together: nobody else need have any.
    says("too-much", "limits.memory-in-all");
    assert_eq!(stops(), 1);
    // Of two reasons the last one counts.
    says("both", "of guest time");
    assert_eq!(stops(), 2);
    tenant.memory.fetch_sub(others, Ordering::Relaxed);
    call_as(&i, "entry", "grow").unwrap();
}

/// Nor is what a swap ends, which has no time for it; a trap of the plugin's own is counted, though a swap wanted it ended.
#[test]
fn a_stop_for_a_swap_is_not_counted_and_a_trap_after_it_is() {
    let stops = |tenant: &Tenant| tenant.supervisor.stops("").0;
    for name in ["spin", "chat"] {
        let limits = Limits { call: Duration::from_secs(60), wall: Duration::from_secs(60), ..Limits::default() };
        let (i, tenant) = instance(limits, || {});
        std::thread::scope(|s| {
            let calls = s.spawn(|| call(&i, name));
            // Nobody is inside yet.
            while i.end_call("ended for a swap").is_none() {
                assert!(!calls.is_finished(), "{name}");
                std::thread::yield_now();
            }
            let e = calls.join().unwrap().unwrap_err().to_string();
            assert!(e.contains("ended for a swap"), "{name}: {e}");
        });
        assert_eq!((stops(&tenant), tenant.counters.traps()), (0, 1), "{name}");
    }
    // Where a tick comes between the two the swap has ended it: another one is tried.
    let begun = Instant::now();
    loop {
        let (i, tenant) = instance(Limits::default(), || {});
        i.peek(|s| s.unwanted.set("ended for a swap".into())).unwrap();
        let e = call(&i, "trap").unwrap_err().to_string();
        let trapped = e.contains("unreachable");
        assert!(trapped || e.contains("ended for a swap"), "{e}");
        assert_eq!((stops(&tenant), tenant.counters.traps()), (u64::from(trapped), 1), "{e}");
        if trapped {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{e}");
    }
}
