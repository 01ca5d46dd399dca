//! The boundary as a whole: which names cross it, which answers are statuses, where the enums begin; and a runtime without
//! any plugin.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddrV4};

use sandbox::bindings::exports::neuron::nccom::collectives::{EncPattern, NetConnectivity};
use sandbox::entries::NAMES;
use sandbox::load::PluginKind;
use sandbox::served::CALLBACKS;
use sandbox::status::Status;
use sandbox::store::Library;
use tests::zoo::{self, Body, Plugin, TRANSPORT, Wit};
use wccl::error::{Error, PluginError};
use wccl::{CommOptions, Runtime, RuntimeConfig};
use wit_parser::{Resolve, Type, TypeDefKind};

use crate::support::{Folder, config, loaded, log};

fn interface<'a>(resolve: &'a Resolve, package: &str, name: &str) -> &'a wit_parser::Interface {
    let found = resolve.packages.iter().find(|(_, p)| format!("{}:{}", p.name.namespace, p.name.name) == package);
    &resolve.interfaces[found.unwrap().1.interfaces[name]]
}

/// Whether a status can be the answer.
fn names_status(resolve: &Resolve, ty: &Type) -> bool {
    let Type::Id(id) = ty else { return false };
    let ty = &resolve.types[*id];
    match &ty.kind {
        TypeDefKind::Variant(_) => ty.name.as_deref() == Some("nrt-status"),
        TypeDefKind::Type(t) => names_status(resolve, t),
        TypeDefKind::Result(r) => [r.ok, r.err].iter().flatten().any(|t| names_status(resolve, t)),
        TypeDefKind::Tuple(t) => t.types.iter().any(|t| names_status(resolve, t)),
        _ => false,
    }
}

/// Of the 20, these six answer a status, and no other does.
///
/// Proves INV-11.
#[test]
fn most_callbacks_answer_no_status() {
    let (resolve, _) = Wit::load().unwrap().resolve(TRANSPORT).unwrap();
    let mut with = BTreeSet::new();
    let mut without = BTreeSet::new();
    for of in ["nec", "nrt"] {
        for (name, f) in &interface(&resolve, "neuron:nrt", of).functions {
            let status = f.result.is_some_and(|r| names_status(&resolve, &r));
            if status {
                with.insert(name.as_str())
            } else {
                without.insert(name.as_str())
            };
        }
    }
    let expected = [
        "nec-get-virtual-core-size",
        "nec-build-port-and-rid-map",
        "nec-pod-node-can-access-peer-node",
        "nrt-get-total-vnc-count",
        "nrt-get-instance-info",
        "nrt-get-version",
    ];
    assert_eq!(with, expected.into());
    assert_eq!(without.len(), 14);
    // On the other leg all but the probe do.
    for (name, f) in &interface(&resolve, "neuron:nccom", "collectives").functions {
        assert_eq!(f.result.is_some_and(|r| names_status(&resolve, &r)), name != NAMES[0], "{name}");
    }
}

/// RING is 0 and DEFAULT is 2, in the contract, in the host's types, and in what reaches a plugin; and a communicator begins
/// with DEFAULT: nobody asks for more connections until something needs them.
///
/// Proves INV-14.
#[test]
fn ring_is_0_and_a_communicator_starts_with_default_2() {
    let (resolve, _) = Wit::load().unwrap().resolve(TRANSPORT).unwrap();
    let cases = |name: &str| -> Vec<String> {
        let types = &interface(&resolve, "neuron:nccom", "collectives").types;
        match &resolve.types[types[name]].kind {
            TypeDefKind::Enum(e) => e.cases.iter().map(|c| c.name.clone()).collect(),
            other => panic!("{name} is {other:?}"),
        }
    };
    assert_eq!(cases("enc-pattern"), ["ring", "mesh", "invalid"]);
    assert_eq!(cases("net-connectivity"), ["mesh", "rdh", "default"]);
    assert_eq!((EncPattern::Ring as u32, NetConnectivity::Default as u32), (0, 2));

    // A plugin that answers as its status what it was asked: 1000 + pattern, 2000 + kind.
    let told = |base: u32| {
        let at = zoo::ANSWER;
        format!(
            "(call $objects.communicator.drop (local.get 0)) (i32.store8 (i32.const {at}) (i32.const 1)) (i32.store8 (i32.const {}) (i32.const 28))
  (i32.store (i32.const {}) (i32.add (i32.const {base}) (local.get 1))) (i32.const {at})",
            at + 4,
            at + 8
        )
    };
    let folder = Folder::new();
    let mut p = Plugin::lone_rank().unwrap();
    p.body("neuron-get-net-connector", told(1000));
    p.body("neuron-expand-connectivity", told(2000));
    let rt = loaded(config(&folder.put("plugin.wasm", &p.build().unwrap())));
    let mut comm = rt.init_comm(CommOptions::with_id([1; 128], 0, 1)).unwrap();
    let entries = rt.tenant().counters.entries();
    comm.barrier().unwrap();
    assert_eq!(rt.tenant().counters.entries(), entries, "connections were asked for that nothing needs");
    assert_eq!(comm.ring_connector(0, true).unwrap_err().status(), Status(1000));
    assert_eq!(comm.expand_connectivity().unwrap_err().status(), Status(2000));
}

/// No function of any contract is the algorithm engine's, and what the built library exports and imports of the two legs is
/// 37 and at most the 20.
///
/// Proves INV-19.
#[test]
fn the_boundary_is_37_and_20_names() {
    let (resolve, _) = Wit::load().unwrap().resolve(TRANSPORT).unwrap();
    for (_, interface) in resolve.interfaces.iter() {
        for name in interface.functions.keys() {
            assert!(!name.split(['.', ']']).any(|part| part.starts_with("enc-")), "{name} crosses the boundary");
        }
    }
    let names = |package: &str, of: &str| -> Vec<String> {
        interface(&resolve, package, of).functions.keys().cloned().collect()
    };
    assert_eq!(names("neuron:nccom", "collectives"), NAMES);
    let reverse = [names("neuron:nrt", "nec"), names("neuron:nrt", "nrt")].concat();
    assert_eq!(reverse, CALLBACKS.map(|c| c.1));
    assert_eq!((NAMES.len(), reverse.len()), (37, 20));
    for local in ["nec-get-version-info", "nec-get-dynamic-recv-size-bytes"] {
        assert!(!reverse.iter().any(|n| n == local || n.starts_with("nec-vil-")));
    }

    for name in ["nccom.wasm", "nccom-next.wasm"] {
        let library = Library::link(name, &zoo::built(name).unwrap(), PluginKind::Transport, &[]).unwrap();
        let ours: Vec<String> = library
            .exports()
            .into_iter()
            .flat_map(|(_, functions)| functions)
            .filter(|f| f.starts_with("neuron-"))
            .collect();
        assert_eq!(ours, NAMES);
        for (name, functions) in library.imports() {
            assert!(name.starts_with("neuron:nrt/") || name.starts_with("neuron:hw/"), "{name}");
            for f in functions.iter().filter(|_| name.starts_with("neuron:nrt/")) {
                assert!(reverse.contains(f), "{f} of {name}");
            }
        }
    }
}

/// Proves INV-18.
#[test]
fn without_any_plugin_the_runtime_runs_and_only_collectives_fail() {
    let folder = Folder::new();
    let rt = Runtime::open(RuntimeConfig { plugin: None, ..config(&folder.path("unused")) }).unwrap();
    assert_eq!(
        rt.load_error().unwrap().sentinel,
        "Error opening libnccom.so, cannot use collective operations! no collectives plugin is configured"
    );
    assert_eq!(rt.tenant().device.total_vnc_count(), rt.tenant().device.visible_cores().len() as u32);
    log();
    for _ in 0..2 {
        let err = rt.unique_id(2).unwrap_err();
        assert_eq!(err.status(), Status(1));
        assert!(matches!(err, Error::Plugin(PluginError::NotLoaded { .. })));
        assert_eq!(rt.init_comm(CommOptions::with_root("127.0.0.1:1", 0, 2)).unwrap_err().status(), Status(1));
        assert_eq!(rt.forward().version_info().unwrap_err().status(), Status(1));
    }
    assert_eq!(log().iter().filter(|l| l.starts_with("NCCL init error:")).count(), 1);
    assert!(rt.forward().guards().iter().all(|g| g.1 == Some(Status(1))));
    assert_eq!(rt.component_calls(), 0);
}

/// A contradiction of the plugin's is the plugin's: an id of another length is refused with a sentence.
#[test]
fn an_id_has_128_bytes() {
    let folder = Folder::new();
    for len in [0, 127, 129] {
        let mut p = Plugin::lone_rank().unwrap();
        p.body("neuron-get-unique-id", zoo::ok_bytes(zoo::SCRATCH, len));
        let rt = loaded(config(&folder.put("plugin.wasm", &p.build().unwrap())));
        let err = rt.unique_id(1).unwrap_err().to_string();
        assert_eq!(err, format!("the plugin answered an id of {len} bytes, 128 are required (INV-20)"));
    }
    let mut p = Plugin::lone_rank().unwrap();
    p.set("neuron-get-unique-id", Body::Trap);
    assert!(matches!(
        loaded(config(&folder.put("plugin.wasm", &p.build().unwrap()))).unique_id(1),
        Err(Error::Plugin(PluginError::Stopped { .. }))
    ));
}

/// The secret part of an id, which makes a group's key, is the program's and the host's: a plugin may not choose it, does not
/// see it, and nothing of it is in what the host has a plugin carry to other ranks.
///
/// Proves INV-21.
#[test]
fn a_plugin_sees_no_secret_of_a_group() {
    let folder = Folder::new();
    let root = zoo::address(&SocketAddrV4::new(Ipv4Addr::LOCALHOST, 4567));
    // Four places of 1 KiB: the id it answers, the id it is given, what it is to gather, the record of a link.
    let [answers, given, gathered, record] = [0, 1, 2, 3].map(|i| zoo::SCRATCH + 1024 * i);
    let plugin = |behind: &str| {
        let mut p = Plugin::lone_rank().unwrap();
        p.gathers(&[SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9); 2]);
        let drops = "(call $objects.communicator.drop (local.get 0))";
        // What it is to gather, one after the other from the middle on, behind how much of it there was before.
        let gathers = format!(
            "(memory.copy (i32.add (i32.const {}) (i32.load (i32.const {gathered}))) (local.get 1) (local.get 2))
             (i32.store (i32.const {gathered}) (i32.add (i32.load (i32.const {gathered})) (local.get 2)))
             {} (i32.store (i32.const {}) (i32.mul (local.get 2) (i32.const 2)))",
            gathered + 512,
            zoo::ok_bytes(zoo::SCRATCH + 512, 0).rsplit_once("(i32.const").unwrap().0,
            zoo::ANSWER + 8,
        );
        p.body("neuron-bootstrap-all-gather", format!("{gathers} {drops} (i32.const {})", zoo::ANSWER));
        let bytes: String = root.iter().map(|b| format!("\\{b:02x}")).collect();
        p.extra(&format!("(data (i32.const {answers}) \"{bytes}{behind}\")"));
        p.body("neuron-get-unique-id", zoo::ok_bytes(answers, 128));
        let keep = format!(
            "(memory.copy (i32.const {given}) (i32.load offset=4 (local.get 0)) (i32.load offset=8 (local.get 0)))"
        );
        p.body("neuron-init-comm", format!("{keep} {}", zoo::init_comm("nop")));
        // From place 1 + the peer, as many bytes as are asked for.
        p.body(
            "neuron-bootstrap-recv",
            format!(
                "(call $links.offer (local.get 0) (i32.const 1) (i32.const {reply})) {drops}
                 (memory.copy (i32.const {record}) (i32.load (i32.const {})) (i32.const 64))
                 (i32.store8 (i32.const {a}) (i32.const 0))
                 (i32.store (i32.const {}) (i32.add (i32.const {given}) (i32.mul (local.get 1) (i32.const 1024))))
                 (i32.store (i32.const {}) (i32.wrap_i64 (local.get 2))) (i32.const {a})",
                zoo::REPLY + 4,
                zoo::ANSWER + 4,
                zoo::ANSWER + 8,
                reply = zoo::REPLY,
                a = zoo::ANSWER,
            ),
        );
        loaded(config(&folder.put("plugin.wasm", &p.build().unwrap())))
    };
    let e = plugin("\\01").unique_id(2).unwrap_err().to_string();
    assert!(e.contains("an id whose byte 28 is not zero") && e.contains("INV-21"), "{e}");

    let rt = plugin("");
    let (id, another) = (rt.unique_id(2).unwrap(), rt.unique_id(2).unwrap());
    assert_eq!((&id[..28], &id[60..]), (&root[..], &[0; 68][..]));
    let secret = &id[28..60];
    assert_ne!(secret, &another[28..60]);
    assert!(secret.iter().any(|b| *b != 0));
    let without = [&id[..28], &[0; 100]].concat().try_into().unwrap();
    let e = rt.init_comm(CommOptions::with_id(without, 0, 2)).unwrap_err().to_string();
    assert!(e.contains("the unique id has no secret part"), "{e}");
    let options = CommOptions { graph: false, ..CommOptions::with_id(id, 0, 2) };
    assert!(!format!("{options:?}").contains(&format!("{:?}", &secret[..4]).replace(['[', ']'], "")), "{options:?}");
    let comm = rt.init_comm(options).unwrap();
    assert_eq!(comm.bootstrap_recv(0, 128).unwrap(), without, "the id that it is given");
    let gathered = comm.bootstrap_recv(1, 1024).unwrap();
    assert_eq!(gathered[..4], [28 + 64, 0, 0, 0], "the host has it gather an address, an invitation, and no more");
    let record = comm.bootstrap_recv(2, 1024).unwrap();
    assert_eq!(record[16..32], [0; 16], "a record is a number and a name");
    for carried in [&gathered, &record] {
        assert!(!carried.windows(8).any(|w| secret.windows(8).any(|s| s == w)));
    }
}
