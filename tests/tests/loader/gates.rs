//! The gates one by one: two skew axes, the probe first, all or nothing, once, and what the probe may write.

use sandbox::entries::{EXEMPT, NAMES, ORIGINALS, Resource};
use sandbox::status::Status;
use sandbox::store::EntryCall;
use tests::zoo::{self, ANSWER, Body, Plugin, TRANSPORT};
use wccl::error::{Error, PluginError};
use wccl::{CommOptions, Runtime};

use crate::support::{Folder, assert_fits, config, loaded, log, open, sentinel};

/// A transport with the given number, whose reverse leg has the given version.
fn skewed(number: u64, nrt: &str) -> Vec<u8> {
    let mut p = Plugin::transport().unwrap();
    p.body(NAMES[0], zoo::probe(Some(number)));
    if nrt != "2.0.0" {
        p.wit.reversion("neuron:nrt", Some("2.0.0"), Some(nrt)).unwrap();
    }
    p.build().unwrap()
}

/// Each axis refuses by itself, whatever the other one says; and a wrong name stops a plugin before it can say its number.
///
/// Proves INV-01, INV-02.
#[test]
fn the_two_axes_are_independent() {
    let folder = Folder::new();
    let open_skewed = |number, nrt| {
        let rt = open(&folder.put("plugin.wasm", &skewed(number, nrt)));
        (rt.load_error().map(|e| e.sentinel), rt.component_calls())
    };
    let (both, calls) = open_skewed(89, "2.0.0");
    assert_eq!(both, None);
    assert!(calls > 0, "the probe was not called");
    let (number, calls) = open_skewed(90, "2.0.0");
    assert_fits("Incompatible version …Compatibility id: 90, expected: 89", &number.unwrap());
    assert!(calls > 0);
    for wrong in [89, 90] {
        let (name, calls) = open_skewed(wrong, "3.0.0");
        assert_fits("…it imports `neuron:nrt/types@3.0.0`; this host serves neuron:nrt/types@2.0.0…", &name.unwrap());
        assert_eq!(calls, 0, "a plugin whose imports are not served was entered");
    }
}

/// The probe is the first thing that is looked at, and a wrong number the last.
///
/// Proves INV-04.
#[test]
fn the_probe_decides_before_anything_else_is_looked_up() {
    let folder = Folder::new();
    let mut alone = Plugin::new(TRANSPORT).unwrap();
    alone.wit.redeclare("nccom", NAMES[0], "neuron-get-version-info: func() -> version-info;").unwrap();
    for name in &NAMES[1..] {
        alone.wit.redeclare("nccom", name, "").unwrap();
    }
    let rt = open(&folder.put("alone.wasm", &alone.build().unwrap()));
    assert_eq!(sentinel(&rt), "Get Version Info API is not implemented by aws-neuronx-collectives.");
    assert_eq!(rt.component_calls(), 0, "a probe of another type was called");

    for (number, missing) in [(90, NAMES[5]), (0, NAMES[1])] {
        let mut p = Plugin::transport().unwrap();
        p.body(NAMES[0], zoo::probe(Some(number)));
        p.wit.redeclare("nccom", missing, "").unwrap();
        log();
        let rt = open(&folder.put("number.wasm", &p.build().unwrap()));
        assert_fits(&format!("…Compatibility id: {number}, expected: 89"), &sentinel(&rt));
        let said = log();
        assert!(!said.iter().any(|l| l.contains("cannot find symbol")), "something else was looked up: {said:?}");
        assert_eq!(rt.forward().slots(), [false; 37], "slot 0 was left");
    }
    // The same plugin with the right number gets as far as the missing entry.
    let mut p = Plugin::transport().unwrap();
    p.wit.redeclare("nccom", NAMES[5], "").unwrap();
    log();
    let rt = open(&folder.put("number.wasm", &p.build().unwrap()));
    assert_fits("cannot find symbol \"neuronGetCommInfo\"…", &sentinel(&rt));
    let said = log();
    assert!(said.iter().any(|l| l == "Using CCOM 2.31.24.0-00000000"), "{said:?}");
    assert!(said.iter().any(|l| l.contains("cannot find symbol \"neuronGetCommInfo\"")), "{said:?}");
}

/// A table is whole or empty, and the sentinel says which.
///
/// Proves INV-03.
#[test]
fn the_table_has_two_states() {
    let folder = Folder::new();
    let good = open(&folder.put("good.wasm", &Plugin::transport().unwrap().build().unwrap()));
    assert_eq!((good.forward().slots(), good.forward().sentinel()), ([true; 37], None));
    // One missing of 37 takes back the 36 that were found, the last as well as the first.
    for missing in [1, 18, 36] {
        let mut p = Plugin::transport().unwrap();
        p.wit.redeclare("nccom", NAMES[missing], "").unwrap();
        let bad = open(&folder.put("bad.wasm", &p.build().unwrap()));
        assert_eq!(bad.forward().slots(), [false; 37]);
        assert!(bad.forward().sentinel().unwrap().contains(ORIGINALS[missing]));
    }
}

/// The probe is called once, the wrappers never lead to a second attempt, and the text is reported once.
///
/// Proves INV-05, INV-06.
#[test]
fn a_failed_load_is_never_tried_again() {
    let folder = Folder::new();
    let mut p = Plugin::lone_rank().unwrap();
    let asked = p.text("the probe was asked");
    let answer = zoo::probe(Some(88));
    p.body(NAMES[0], format!("(call $log.write (i32.const 2) {asked}) {answer}"));
    log();
    let path = folder.put("plugin.wasm", &p.build().unwrap());
    let rt = open(&path);
    // The file is a good plugin from here on: an attempt would succeed.
    folder.put("plugin.wasm", &Plugin::lone_rank().unwrap().build().unwrap());
    let calls = rt.component_calls();
    // The two exempt entries pass the guard by: what they find is an empty slot, not the sentinel, and nothing is reported yet.
    // The progress of the network proxy is unreachable then; reached all the same, it calls nothing.
    let version = rt.forward().version_info().unwrap_err();
    let nobody = Resource::new_borrow(0);
    let progress = rt.forward().network_proxy_progress(EntryCall::library(), nobody, 0, 0, true, true).unwrap_err();
    for (e, empty) in [(version, "the version slot is empty"), (progress, "the slot is empty")] {
        assert!(matches!(&e, PluginError::NotLoaded { sentinel, .. } if sentinel == empty), "{e}");
        assert_eq!(e.status(), Status::FAILURE);
    }
    let said = log();
    assert!(!said.iter().any(|l| l.starts_with("NCCL init error")), "{said:?}");
    assert_eq!(EXEMPT, [ORIGINALS[0], ORIGINALS[10]]);
    for _ in 0..3 {
        for (entry, status) in rt.forward().guards() {
            assert_eq!(status, Some(Status::FAILURE), "{entry}");
        }
        assert!(matches!(rt.unique_id(1), Err(Error::Plugin(PluginError::NotLoaded { .. }))));
        assert!(rt.init_comm(CommOptions::with_id([1; 128], 0, 1)).is_err());
        assert_eq!(rt.forward().version_info().unwrap_err().status(), Status::FAILURE);
    }
    assert_eq!(rt.component_calls(), calls);
    assert_eq!(rt.tenant().counters.entries(), 1);
    let asked = said.iter().filter(|l| *l == "the probe was asked").count();
    let said = log();
    assert_eq!(asked + said.iter().filter(|l| *l == "the probe was asked").count(), 1, "{said:?}");
    assert_eq!(said.iter().filter(|l| l.starts_with("NCCL init error: Incompatible version")).count(), 1, "{said:?}");
    assert!(open(&path).load_error().is_none());
}

/// A wrapper passes any status on as it came, and says which request failed.
#[test]
fn statuses_pass_verbatim() {
    let folder = Folder::new();
    for (status, name) in [
        (2, "NRT_INVALID (2)"),
        (1206, "NRT_NETWORK_PROXY_FAILURE (1206)"),
        (77, "UNKNOWN (77)"),
        (0, "NRT_FAILURE (1)"),
    ] {
        let mut p = Plugin::transport().unwrap();
        p.set("neuron-get-unique-id", Body::Status(status));
        let rt = loaded(config(&folder.put("plugin.wasm", &p.build().unwrap())));
        log();
        let err = rt.unique_id(2).unwrap_err();
        // An error of "success" must not look like success.
        assert_eq!(err.status(), Status(if status == 0 { 1 } else { status }));
        assert_eq!(
            err.to_string(),
            format!("neuronGetUniqueId of plugin plugin.wasm failed on tenant default: {name}")
        );
        assert!(log().iter().any(|l| l == "failed neuronGetUniqueId request to NCCL"));
    }
}

/// What a buffer of `room` bytes gets of a probe: (hash, compatibility id) written or not. The host asks with 56; the probe
/// under test is asked with `room` by a probe around it, which answers 89 and tells through the maintenance number what it
/// saw.
fn written(core: &[u8], room: u32) -> (bool, bool) {
    let around = format!(
        "(local $answer i32)
  (local.set $answer (call $original (i32.const {room})))
  (i64.store offset=24 (local.get $answer) (i64.extend_i32_u (i32.add
    (i32.load8_u offset=32 (local.get $answer))
    (i32.mul (i32.const 2) (i32.load8_u offset=48 (local.get $answer))))))
  (i32.store8 offset=48 (local.get $answer) (i32.const 1))
  (i64.store offset=56 (local.get $answer) (i64.const 89))
  (local.get $answer)"
    );
    let core = zoo::rewrite(core, &[("neuron:nccom/collectives#neuron-get-version-info", &around)]).unwrap();
    let folder = Folder::new();
    let rt = loaded(config(&folder.put("plugin.wasm", &zoo::described(&core).unwrap())));
    let saw = rt.forward().version_info().unwrap().numbers[3];
    assert!(saw < 4);
    (saw & 1 == 1, saw & 2 == 2)
}

/// The library of this project, asked with every room around the two thresholds; and the host, which has room for 56.
///
/// Proves INV-07.
#[test]
fn the_probe_writes_what_the_buffer_has_room_for() {
    let core = zoo::built("nccom.core.wasm").unwrap();
    for (room, hash, id) in [
        (0, false, false),
        (47, false, false),
        (48, true, false),
        (55, true, false),
        (56, true, true),
        (u32::MAX, true, true),
    ] {
        assert_eq!(written(&core, room), (hash, id), "{room} bytes of room");
    }
    // With 55 bytes of room there is no id, and without one the gate is shut.
    let short = "(call $original (i32.sub (local.get 0) (i32.const 1)))";
    let core = zoo::rewrite(&core, &[("neuron:nccom/collectives#neuron-get-version-info", short)]).unwrap();
    let folder = Folder::new();
    let rt = open(&folder.put("plugin.wasm", &zoo::described(&core).unwrap()));
    assert_fits("…Compatibility id: 0, expected: 89", &sentinel(&rt));
    // What this host passes.
    let mut p = Plugin::transport().unwrap();
    let tells = format!(
        "(local $n i64) (local.set $n (i64.extend_i32_u (local.get 0))) {} (i64.store (i32.const {}) (local.get $n))",
        zoo::probe(Some(89)).trim_end_matches(&format!("(i32.const {ANSWER})")),
        ANSWER + 24
    );
    p.body(NAMES[0], format!("{tells} (i32.const {ANSWER})"));
    let rt = loaded(config(&folder.put("plugin.wasm", &p.build().unwrap())));
    assert_eq!(rt.forward().version_info().unwrap().numbers, [2, 31, 24, 56]);
}

/// The library of this project with one body replaced: the entry stops, and the runtime lives on.
#[test]
fn the_real_library_may_misbehave_too() {
    let core = zoo::built("nccom.core.wasm").unwrap();
    let folder = Folder::new();
    let replaced = |entry: &str, body: &str| {
        let core = zoo::rewrite(&core, &[(&format!("{}#{entry}", zoo::COLLECTIVES), body)]).unwrap();
        let mut c = config(&folder.put("plugin.wasm", &zoo::described(&core).unwrap()));
        c.limits.call = std::time::Duration::from_millis(300);
        loaded(c)
    };
    let one = |rt: &Runtime| rt.unique_id(1).and_then(|id| rt.init_comm(CommOptions::with_id(id, 0, 1)));
    for (entry, original, body, cause) in [
        ("neuron-init-comm", "neuronInitComm", "unreachable", "wasm trap: wasm `unreachable` instruction executed"),
        (
            "neuron-build-graph-comm",
            "neuronBuildGraphComm",
            "(loop $l (br $l)) unreachable",
            "the call used more than its 300ms of guest time",
        ),
        (
            "neuron-get-comm-info",
            "neuronGetCommInfo",
            "(drop (call $original (local.get 0) (local.get 1))) unreachable",
            "wasm trap: wasm `unreachable` instruction executed",
        ),
    ] {
        let rt = replaced(entry, body);
        let err = one(&rt).map(drop).unwrap_err();
        assert!(matches!(&err, Error::Plugin(PluginError::Stopped { entry, .. }) if *entry == original), "{err}");
        assert_fits(
            &format!("plugin plugin.wasm stopped in {original} on tenant default: {cause}; …"),
            &err.to_string(),
        );
        assert_eq!((rt.tenant().communicators(), rt.load_error()), (0, None));
        assert!(rt.unique_id(1).is_ok(), "the library instance went down with a communicator's");
    }
    let rt = replaced("neuron-fini-plugin", "unreachable");
    let mut comm = one(&rt).unwrap();
    comm.barrier().unwrap();
}
