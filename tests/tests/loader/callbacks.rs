//! The reverse leg from a plugin's side: all 20 callbacks called, each missing in turn, a host that serves more, re-entry.

use std::cell::RefCell;
use std::rc::Rc;

use sandbox::entries::NAMES;
use sandbox::served::CALLBACKS;
use sandbox::status::Status;
use sandbox::store::EntryCall;
use tests::zoo::{self, ANSWER, Plugin, REPLY, SCRATCH, ok_bytes};
use wccl::error::{Error, PluginError};
use wccl::{CommOptions, Runtime};

use crate::support::{Folder, INSIDE_MARK, assert_fits, config, loaded, log, on_mark, open};

/// A plugin that calls callback n (1 to 20, in the original's order) when asked for an id for n ranks, and answers the
/// reply as the first 64 bytes of the id. A plain number of 32 bits stands at 0.
fn caller() -> Plugin {
    let mut p = Plugin::lone_rank().unwrap();
    let text = p.text("callback 12");
    let pair = SCRATCH + 512;
    let reply = format!("(i32.const {REPLY})");
    let dev = "(i32.const 0)";
    // A handle that nobody gave; the five callbacks that take one are called with a real one further down.
    let forged = "(i32.const 7)";
    let calls = [
        format!("(call $nec.nec-inc-semaphore {forged} (i32.const 1))"),
        format!("(call $nec.nec-get-device-count (i32.const 3) {reply})"),
        format!("(call $nec.nec-get-device-pci-bdf (i32.const 1) {reply})"),
        format!("(call $nec.nec-get-virtual-core-size {reply})"),
        // Accelerators 0 and 1 are devices 0 and 1.
        format!(
            "(i32.store (i32.const {pair}) (i32.const 0)) (i32.store (i32.const {}) (i32.const 1))
  (call $nec.nec-build-port-and-rid-map {dev} (i32.const {pair}) (i32.const 2) (i32.const {pair}) (i32.const 2) {reply})",
            pair + 4
        ),
        format!("(i32.store {reply} (call $nec.nec-is-mla-available {dev} (i32.const 1)))"),
        format!("(i32.store {reply} (call $nec.nec-mla-idx-to-rid {dev} (i32.const 1)))"),
        format!("(i32.store {reply} (call $nec.nec-rid-to-mla-idx {dev} (call $nec.nec-mla-idx-to-rid {dev} (i32.const 1))))"),
        format!("(i32.store {reply} (call $nec.nec-get-peer-mla-idx {dev} (i32.const 0) (i32.const 0)))"),
        format!("(call $nec.nec-get-p2p-pod-peer-node (i32.const 0) (i32.const 0) (i32.const 1) {reply})"),
        format!("(call $nec.nec-pod-node-can-access-peer-node (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 1) {reply})"),
        format!("(call $nec.nec-ndl-printk {text} (i32.const 0))"),
        format!("(i64.store {reply} (call $nec.nec-get-dynamic-send-size-bytes {forged} (i64.const 4) (i32.const 0) (i32.const 1)))"),
        format!("(i64.store {reply} (call $nec.nec-get-dynamic-send-offset-bytes {forged} (i64.const 4) (i32.const 0) (i32.const 1)))"),
        format!("(i64.store {reply} (call $nec.nec-get-dynamic-recv-offset-bytes {forged} (i64.const 4) (i32.const 0) (i32.const 1)))"),
        format!("(call $nec.nec-set-recv-size-bytes {forged} (i64.const 8) (i64.const 4) (i32.const 0) (i32.const 1))"),
        format!("(call $nrt.nrt-get-total-vnc-count {reply})"),
        format!("(call $nrt.nrt-get-instance-info {reply})"),
        format!("(call $nrt.nrt-get-version {reply})"),
        format!("(call $nrt.nrt-get-libnccl-net {reply})"),
    ];
    let mut body = format!("(memory.fill {reply} (i32.const 0) (i32.const 64))");
    for (i, (call, (_, name))) in calls.iter().zip(CALLBACKS).enumerate() {
        assert!(call.contains(&format!(".{name} ")), "{name} is not call {}", i + 1);
        body += &format!("\n(if (i32.eq (local.get 0) (i32.const {})) (then {call}))", i + 1);
    }
    body += &format!("(memory.copy (i32.const {SCRATCH}) {reply} (i32.const 64)) {}", ok_bytes(SCRATCH, 128));
    p.body("neuron-get-unique-id", body);
    p
}

/// Numbers of the callbacks that take a handle.
const WITH_HANDLE: [usize; 5] = [1, 13, 14, 15, 16];

fn word(reply: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(reply[at..at + 4].try_into().unwrap())
}

/// One plugin imports all 20 and gets an answer of each from this host: the 15 that need no handle answer what the
/// modelled machine is, the others check the handle first. Most answers are no status.
///
/// Proves INV-08, INV-11.
#[test]
fn all_twenty_are_served_and_answer_for_themselves() {
    let folder = Folder::new();
    let path = folder.put("plugin.wasm", &caller().build().unwrap());
    let rt = loaded(config(&path));
    let device = rt.tenant().device.clone();
    log();
    let mut replies = vec![[0u8; 128]; 21];
    for n in (1..=20).filter(|n| !WITH_HANDLE.contains(n)) {
        let calls = rt.tenant().counters.host_calls();
        // What the plugin answers; as an id it would be refused.
        let reply = rt
            .forward()
            .get_unique_id(EntryCall::library(), n as i32, "")
            .unwrap_or_else(|e| panic!("callback {n}: {e}"));
        replies[n] = reply.try_into().unwrap();
        assert!(rt.tenant().counters.host_calls() > calls, "callback {n} did not reach the host");
    }
    let r = |n: usize| replies[n].as_slice();
    // 2: a count, and the list apart from it.
    let all = device.available_devices().len() as u32;
    assert_eq!((word(r(2), 0), word(r(2), 8)), (all, all.min(3)));
    // 3: domain, bus, slot, function.
    let bdf = device.device_pci_bdf(1).unwrap();
    assert_eq!(r(3)[0], 0);
    assert_eq!((word(r(3), 4), word(r(3), 8), r(3)[12], r(3)[13]), (bdf.domain, bdf.bus, bdf.slot, bdf.func));
    // 4 and 17: a status beside a count.
    assert_eq!((r(4)[0], word(r(4), 4)), (0, device.virtual_core_size()));
    assert_eq!((r(17)[0], word(r(17), 4)), (0, device.total_vnc_count()));
    // 5 to 9: a bool and numbers as they are.
    assert_eq!(r(5)[0], 0);
    assert_eq!(word(r(6), 0), 1);
    assert_eq!(word(r(7), 0) as i32, device.device(1).unwrap().rid);
    assert_eq!(word(r(8), 0), 1);
    assert!([1, -22].contains(&(word(r(9), 0) as i32)), "two accelerators are there: {}", word(r(9), 0) as i32);
    // 10: the int of the original is not a status: it is negative.
    assert_eq!(r(10)[0] == 0, device.p2p_pod_peer_node(0, 0, 1).is_ok());
    if r(10)[0] == 1 {
        assert_eq!(word(r(10), 4) as i32, -22);
    }
    // 11: no pod, no access to another node.
    assert_eq!((r(11)[0], word(r(11), 4)), (0, 0));
    assert!(log().iter().any(|l| l == "callback 12"));
    let info = device.instance_info();
    assert_eq!((r(18)[0], word(r(18), 4), word(r(18), 8)), (0, info.family.number(), info.size.number()));
    // 19: eight bytes of discriminant, then 2.31.24.0.
    let version: Vec<u32> = (0..4).map(|i| word(r(19), 8 + 8 * i)).collect();
    assert_eq!((r(19)[0], version), (0, vec![2, 31, 24, 0]));
    // 20: no net plugin; an error number and a text, no status.
    assert_eq!((r(20)[0], word(r(20), 4)), (1, 2));

    for n in WITH_HANDLE {
        let err = open(&path).unique_id(n).unwrap_err();
        assert!(
            matches!(err, Error::Plugin(PluginError::Stopped { .. })),
            "callback {n} took a handle that nobody gave: {err}"
        );
        assert_fits("…handle index 7…", &err.to_string());
    }
}

/// The five callbacks that take a handle, with handles that the host gave for ids of this communicator. The send size is the
/// one whose arguments are reshaped.
///
/// Proves INV-08, INV-12, INV-13.
#[test]
fn the_five_with_a_handle_answer_through_a_plugin() {
    use hw_bridge::model::{HostMem, IncrementRegister};
    use hw_bridge::proxy::{Entry, NetPath};
    use std::collections::HashMap;
    use std::sync::{Arc, Mutex};

    #[derive(Debug)]
    struct NoWire;
    impl NetPath for NoWire {
        fn post(&mut self, _: &Entry) -> Result<Option<u64>, String> {
            Err("nothing is posted here".into())
        }
        fn test(&mut self, _: u64) -> Result<Option<u64>, String> {
            Err("nothing is posted here".into())
        }
    }

    let mut p = Plugin::lone_rank().unwrap();
    let (reply, handle) = (format!("(i32.const {REPLY})"), format!("(i32.load offset=4 (i32.const {REPLY}))"));
    // The entry's peer says which callback; its answer is the callback's. Size 2, rank 3, world 4.
    let offset =
        |name: &str| format!("(i32.wrap_i64 (call $nec.{name} {handle} (i64.const 2) (i32.const 3) (i32.const 4)))");
    let calls = [
        (1, format!("(call $nec.nec-inc-semaphore {handle} (i32.const 5)) (local.set 1 (i32.const 0))")),
        (13, format!("(local.set 1 {})", offset("nec-get-dynamic-send-size-bytes"))),
        (14, format!("(local.set 1 {})", offset("nec-get-dynamic-send-offset-bytes"))),
        (15, format!("(local.set 1 {})", offset("nec-get-dynamic-recv-offset-bytes"))),
        (
            16,
            format!(
                "(call $nec.nec-set-recv-size-bytes {handle} (i64.const 40) (i64.const 8) (i32.const 3) (i32.const 4))
  (local.set 1 (i32.const 0))"
            ),
        ),
    ];
    let mut body = format!(
        "(if (i32.eq (local.get 1) (i32.const 1))
  (then (call $proxy.register (local.get 0) (i64.const 11) {reply}))
  (else (call $proxy.dynamic-sizes (local.get 0) (i64.const 12) {reply})))
(call $objects.communicator.drop (local.get 0))
(block $done"
    );
    for (n, call) in calls {
        body += &format!("\n(if (i32.eq (local.get 1) (i32.const {n})) (then {call} (br $done)))");
    }
    body += &format!(
        ")\n(i32.store8 (i32.const {ANSWER}) (i32.const 0)) (i32.store offset=4 (i32.const {ANSWER}) (local.get 1)) (i32.const {ANSWER})"
    );
    p.body("neuron-get-peer-device-id", body);

    let folder = Folder::new();
    let rt = loaded(config(&folder.put("plugin.wasm", &p.build().unwrap())));
    let id = rt.unique_id(1).unwrap();
    let comm = rt.init_comm(CommOptions::with_id(id, 0, 1)).unwrap();
    let register = Arc::new(IncrementRegister::recording(4));
    comm.core().proxy.lock().unwrap().attach(Box::new(NoWire), HashMap::from([(11, register.clone())]));
    let sizes = HostMem::new(4).unwrap();
    sizes.set_send(3, 13, 103).unwrap();
    sizes.set_send(2, 12, 102).unwrap();
    sizes.set_recv_offset(3, 203).unwrap();
    let sizes = Arc::new(Mutex::new(sizes));
    comm.core().dynamic.lock().unwrap().insert(12, sizes.clone());

    assert_eq!(comm.peer_device_id(1).unwrap(), 0);
    assert_eq!((register.recorded(), register.value()), (vec![5], 5));
    // Passed on as they came, size and rank would give count[2] * 3 = 36.
    assert_eq!(comm.peer_device_id(13).unwrap(), 13 * 2);
    assert_eq!(comm.peer_device_id(14).unwrap(), 103 * 2);
    assert_eq!(comm.peer_device_id(15).unwrap(), 203 * 2);
    assert_eq!(comm.peer_device_id(16).unwrap(), 0);
    assert_eq!(sizes.lock().unwrap().recv_count(3).unwrap(), 5);
}

/// 20 hosts, each without one callback. The plugin's probe would log; it never comes to that.
///
/// Proves INV-08.
#[test]
fn one_callback_missing_refuses_before_anything_runs() {
    let folder = Folder::new();
    let mut p = caller();
    let asked = p.text("the probe was asked");
    let answer = zoo::probe(Some(89));
    p.body(NAMES[0], format!("(call $log.write (i32.const 2) {asked}) {answer}"));
    let path = folder.put("plugin.wasm", &p.build().unwrap());
    for (interface, name) in CALLBACKS {
        let mut c = config(&path);
        c.without_callbacks = vec![name.into()];
        log();
        let rt = Runtime::open(c).unwrap();
        let e = rt.load_error().unwrap_or_else(|| panic!("a host without {name} was good enough"));
        assert_eq!(e.status, Status::FAILURE);
        assert_fits(
            &format!(
                "Error opening libnccom.so…plugin.wasm: it imports `{name}` of {interface}@2.0.0, which this host does not serve; …"
            ),
            &e.sentinel,
        );
        assert_eq!(rt.component_calls(), 0, "{name}: the plugin was entered");
        assert!(!log().iter().any(|l| l == "the probe was asked"));
        assert_eq!(rt.forward().slots(), [false; 37]);
    }
    // With all 20 it is asked.
    log();
    loaded(config(&path));
    assert!(log().iter().any(|l| l == "the probe was asked"));
}

/// A plugin of a time when the contract had half of its functions, when the host served fewer interfaces and no package but
/// one: what was added since does not concern it.
///
/// Proves INV-09.
#[test]
fn a_host_that_serves_more_stays_compatible() {
    let folder = Folder::new();
    let mut p = Plugin::lone_rank().unwrap();
    for (i, (interface, name)) in CALLBACKS.iter().enumerate() {
        match i % 2 {
            0 => p.wit.redeclare("nrt", name, "").unwrap(),
            _ => drop(p.import(interface.trim_start_matches("neuron:nrt/"), name)),
        }
    }
    // Of neuron:hw only what the 37 entries' types need.
    p.world = "package zoo:plugin; world plugin { import neuron:nrt/nec@2.0.0; import neuron:nrt/nrt@2.0.0; import neuron:hw/objects@1.0.0; export neuron:nccom/collectives; }".into();
    p.wit.edit("worlds", "  import neuron:hw/clock@1.0.0;\n  import neuron:hw/random@1.0.0;\n", "").unwrap();
    p.wit.edit("hw", "\ninterface random {", "\ninterface chance {").unwrap();
    let rt = loaded(config(&folder.put("plugin.wasm", &p.build().unwrap())));
    assert_eq!(rt.unique_id(1).unwrap()[..28], [0; 28]);
    let mut comm = rt.init_comm(wccl::CommOptions::with_id([1; 128], 0, 1)).unwrap();
    comm.barrier().unwrap();
}

/// A callback that came back into the library would enter an instance that is on the stack. The host's log runs inside a
/// callback, so that a log that calls the runtime tries exactly this: it is refused with a sentence, the instance goes on,
/// and another instance may be entered.
///
/// Proves INV-10.
#[test]
fn an_instance_on_the_stack_is_never_entered_again() {
    let folder = Folder::new();
    let mut p = Plugin::lone_rank().unwrap();
    let mark = p.text(INSIDE_MARK);
    p.body(
        "neuron-get-unique-id",
        format!("(call $nec.nec-ndl-printk {mark} (i32.const 0)) {}", ok_bytes(SCRATCH, 128)),
    );
    let path = folder.put("plugin.wasm", &p.build().unwrap());
    let (rt, other) = (loaded(config(&path)), loaded(config(&path)));
    let seen = Rc::new(RefCell::new(Vec::new()));
    let (inside, note) = (rt.clone(), seen.clone());
    on_mark(move || {
        let version = inside.forward().version_info().map(|v| v.compatibility).map_err(Error::from);
        let id = inside.unique_id(1).map(|_| 0);
        let elsewhere = other.forward().version_info().map(|v| v.compatibility).map_err(Error::from);
        note.borrow_mut().extend([version, id, elsewhere]);
    });
    assert_eq!(rt.unique_id(1).unwrap()[..28], [0; 28]);
    let seen = seen.borrow();
    assert_eq!(seen.len(), 3, "the callback did not run");
    for (answer, entry) in seen[..2].iter().zip(["neuronGetVersionInfo", "neuronGetUniqueId"]) {
        let err = answer.as_ref().unwrap_err();
        assert!(matches!(err, Error::Plugin(PluginError::Reentered { .. })), "{err}");
        assert_eq!(err.status(), Status::INVALID);
        assert_eq!(
            err.to_string(),
            format!(
                "{entry} of plugin plugin.wasm was called from inside one of its own callbacks; a nec_* or nrt_* callback must never enter the library (INV-10)"
            )
        );
    }
    assert_eq!(*seen[2].as_ref().unwrap(), 89);
    assert_eq!(rt.unique_id(1).unwrap()[..28], [0; 28]);
    assert_eq!(rt.tenant().counters.traps(), 0);
}
