//! The net component: soft at the load, bound by one name, and reached by a transport through the host alone.

use tests::zoo::{self, Body, Plugin, REPLY, SCRATCH, ok_bytes};
use wccl::{Runtime, RuntimeConfig};

use crate::support::{Folder, assert_fits, config, loaded, log};

/// A world that exports one table.
fn world(table: &str) -> String {
    format!("package zoo:plugin; world plugin {{ import neuron:hw/log@1.0.0; export nccl:net/{table}; }}")
}

/// A net plugin whose v6 table is cut down to `keep`: name "zoo", 7 devices.
fn net(keep: &[&str]) -> Plugin {
    let mut p = Plugin::new(&world("nccl-net-plugin-v6")).unwrap();
    p.wit = cut("nccl-net-plugin-v6", keep, "");
    let name = p.text("zoo");
    let at = zoo::ANSWER;
    for entry in keep {
        match *entry {
            "name" => {
                let pair = format!("{name}").replace(") (", ")) (i32.store (i32.const ADDR2) (");
                let body = format!("(i32.store (i32.const {at}) {pair}) (i32.const {at})").replace("ADDR2", &(at + 4).to_string());
                p.body("name", body)
            }
            "init" | "fini" => p.body(entry, zoo::ok_unit()),
            "devices" => p.body(
                "devices",
                format!("(i32.store8 (i32.const {at}) (i32.const 0)) (i32.store (i32.const {}) (i32.const 7)) (i32.const {at})", at + 4),
            ),
            other => p.set(other, Body::Trap),
        };
    }
    p
}

/// The contracts with all functions of one net table removed but `keep`, and `more` declared.
fn cut(table: &str, keep: &[&str], more: &str) -> zoo::Wit {
    let mut wit = zoo::Wit::load().unwrap();
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../wit/net/net.wit")).unwrap();
    let start = text.find(&format!("interface {table} {{")).unwrap();
    let end = start + text[start..].find("\n}").unwrap();
    let kept: String = text[start..end]
        .lines()
        .filter(|l| !l.contains(": func(") || keep.iter().any(|k| l.trim_start().starts_with(&format!("{k}: func("))))
        .map(|l| format!("{l}\n"))
        .collect();
    wit.edit("net", &text[start..end], &format!("{kept}{more}")).unwrap();
    wit
}

/// A transport that goes the whole way when asked for an id: library, bind, name, init, devices; for 2 ranks also the
/// properties of device 0. The id holds the devices at 0 and the name from 4 on. An entry that fails answers its status.
fn transport() -> Plugin {
    let mut p = Plugin::lone_rank().unwrap();
    let (reply, answer) = (REPLY, zoo::ANSWER);
    // Answers of `bind` and `init` are the result of the entry itself, as far as an error goes.
    let or_leave = format!(
        "(if (i32.load8_u (i32.const {reply})) (then (memory.copy (i32.const {answer}) (i32.const {reply}) (i32.const 12)) (return (i32.const {answer}))))"
    );
    let uninitialized = format!(
        "(if (i32.load8_u (i32.const {reply})) (then
    (call $log.write (i32.const 0) (i32.load (i32.const {})) (i32.load (i32.const {})))
    (i32.store8 (i32.const {answer}) (i32.const 1)) (i32.store8 (i32.const {}) (i32.const 11)) (return (i32.const {answer}))))",
        reply + 8,
        reply + 12,
        answer + 4
    );
    let body = format!(
        "(memory.fill (i32.const {SCRATCH}) (i32.const 0) (i32.const 128))
  (call $nrt.nrt-get-libnccl-net (i32.const {reply})) {uninitialized}
  (call $net.bind (i32.load (i32.const {})) (i32.const {reply})) {or_leave}
  (call $net.name (i32.const {reply})) {or_leave}
  (memory.copy (i32.const {}) (i32.load (i32.const {})) (i32.load (i32.const {})))
  (call $net.init (i32.const {reply})) {or_leave}
  (call $net.devices (i32.const {reply})) {or_leave}
  (i32.store (i32.const {SCRATCH}) (i32.load (i32.const {})))
  (if (i32.eq (local.get 0) (i32.const 2)) (then (call $net.get-properties (i32.const 0) (i32.const {reply}))
    (if (i32.load8_u (i32.const {reply})) (then
      (i32.store8 (i32.const {answer}) (i32.const 1)) (memory.copy (i32.const {}) (i32.const {}) (i32.const 8)) (return (i32.const {answer}))))))
  {}",
        reply + 4,
        SCRATCH + 4,
        reply + 4,
        reply + 8,
        reply + 4,
        answer + 4,
        // The properties hold 64-bit numbers, so that their error stands at 8.
        reply + 8,
        ok_bytes(SCRATCH, 128)
    );
    p.body("neuron-get-unique-id", body);
    p
}

struct Pair {
    folder: Folder,
    config: RuntimeConfig,
}

fn pair(net: Option<&[u8]>) -> Pair {
    let folder = Folder::new();
    let mut config = config(&folder.put("plugin.wasm", &transport().build().unwrap()));
    config.net_plugin = net.map(|bytes| folder.put("net.wasm", bytes));
    Pair { folder, config }
}

fn with(net: &Plugin) -> (Pair, Runtime) {
    let p = pair(Some(&net.build().unwrap()));
    let rt = loaded(p.config.clone());
    (p, rt)
}

/// A bound net component is replaced under the library that uses it; one that does not start is refused.
#[test]
fn a_net_component_is_swapped_under_a_library() {
    use wccl::swap::{Kind, Order, coordinate};
    let v6 = ["name", "init", "devices"];
    let Pair { folder, mut config } = pair(Some(&net(&v6).build().unwrap()));
    config.tenant = format!("net-swap.{}", std::process::id());
    let rt = loaded(config.clone());
    assert_eq!(rt.unique_id(1).unwrap()[0], 7);
    let at = zoo::ANSWER;
    let mut eight = net(&v6);
    eight.body(
        "devices",
        format!(
            "(i32.store8 (i32.const {at}) (i32.const 0)) (i32.store (i32.const {}) (i32.const 8)) (i32.const {at})",
            at + 4
        ),
    );
    let mut no_init = net(&v6);
    no_init.set("init", Body::Trap);
    let order = |name: &str, plugin: &Plugin| {
        let file = folder.put(name, &plugin.build().unwrap());
        Order { plugin: Some(file), ..Order::new(&config.tenant, Kind::Net) }
    };
    let report = coordinate(&order("no-init.wasm", &no_init)).unwrap();
    assert!(!report.committed && report.reason.contains("ncclNet.init"), "{}", report.reason);
    assert_eq!(rt.unique_id(1).unwrap()[0], 7);
    let report = coordinate(&order("eight.wasm", &eight)).unwrap();
    assert!(report.committed, "{}", report.reason);
    assert_eq!((rt.unique_id(1).unwrap()[0], rt.swaps().committed, rt.swaps().refused), (8, 1, 1));
}

/// The handle of the runtime, the name it is bound by, and three entries of a plugin that has no more than three.
///
/// Proves INV-90.
#[test]
fn a_transport_reaches_the_v6_table_through_the_host() {
    log();
    let (_folder, rt) = with(&net(&["name", "init", "devices"]));
    assert!(log().iter().any(|l| l == "dlopened libnccom-net.so"));
    for _ in 0..2 {
        let id = rt.unique_id(1).unwrap();
        assert_eq!((id[..4].to_vec(), &id[4..7], &id[7..16]), (vec![7, 0, 0, 0], b"zoo".as_slice(), [0; 9].as_slice()));
    }
    // An entry that the table does not have is a failure of that call, with a sentence.
    let err = rt.unique_id(2).unwrap_err().to_string();
    assert_eq!(
        err,
        "neuronGetUniqueId of plugin plugin.wasm failed on tenant default: NRT_FAILURE (1): net plugin net.wasm has no entry `get-properties` in ncclNetPlugin_v6"
    );
    assert!(rt.unique_id(1).is_ok());
}

/// Proves INV-90.
#[test]
fn nothing_but_v6_is_bound() {
    let mut old = Plugin::new(&world("nccl-net-plugin-v5")).unwrap();
    old.wit = cut("nccl-net-plugin-v5", &["init"], "");
    let (_folder, rt) = with(&old);
    log();
    let err = rt.unique_id(1).unwrap_err().to_string();
    assert_fits(
        "neuronGetUniqueId of plugin plugin.wasm failed on tenant default: NRT_FAILURE (1): Failed to find ncclNetPlugin_v6 symbol. Plugin net.wasm offers nccl:net/nccl-net-plugin-v5; this host binds v6 and nothing else",
        &err,
    );
    assert!(log().iter().any(|l| l.starts_with("Failed to find ncclNetPlugin_v6 symbol")));

    let (_folder, rt) = with(&Plugin::new("package zoo:plugin; world plugin {}").unwrap());
    assert_fits(
        "…Failed to find ncclNetPlugin_v6 symbol. Plugin net.wasm offers nothing; …",
        &rt.unique_id(1).unwrap_err().to_string(),
    );
}

/// What a net plugin does wrong is a failure of the call that reached it; the transport's instance lives on.
#[test]
fn a_net_plugin_that_misbehaves_fails_the_call_and_not_the_transport() {
    let at = zoo::ANSWER;
    let system_error = format!(
        "(i32.store8 (i32.const {at}) (i32.const 1)) (i32.store8 (i32.const {}) (i32.const 1)) (i32.const {at})",
        at + 1
    );
    for (body, sentence) in [
        (system_error.as_str(), "ncclNet.init of the net plugin answered …system-error…"),
        (
            "unreachable",
            "plugin net.wasm stopped in ncclNet.init on tenant default: wasm trap: wasm `unreachable` instruction executed; …",
        ),
        (
            "(loop $l (br $l)) unreachable",
            "plugin net.wasm stopped in ncclNet.init on tenant default: the call used more than its 300ms of guest time; …",
        ),
    ] {
        let mut n = net(&["name", "init", "devices"]);
        n.body("init", body);
        let p = pair(Some(&n.build().unwrap()));
        let mut c = p.config.clone();
        c.limits.call = std::time::Duration::from_millis(300);
        let rt = loaded(c);
        let err = rt.unique_id(1).unwrap_err().to_string();
        assert_fits(
            &format!("neuronGetUniqueId of plugin plugin.wasm failed on tenant default: NRT_FAILURE (1): {sentence}"),
            &err,
        );
        assert_eq!(rt.forward().version_info().unwrap().compatibility, 89, "the transport's instance is gone");
        drop(p.folder);
    }
    let mut other_type = net(&["name", "init", "devices"]);
    other_type.wit = cut("nccl-net-plugin-v6", &["name", "init"], "  devices: func() -> s64;");
    other_type.set("devices", Body::Trap);
    let (_folder, rt) = with(&other_type);
    assert_fits(
        "…entry `devices` of net plugin net.wasm: it has another type: …",
        &rt.unique_id(1).unwrap_err().to_string(),
    );
}

/// No file, a broken file, none configured, one with imports nobody serves: collectives load all the same, and the library
/// is told why there is no net plugin.
///
/// Proves INV-17.
#[test]
fn the_net_step_never_changes_the_loaders_result() {
    let stranger = {
        let mut n = net(&["name", "init", "devices"]);
        n.world =
            "package zoo:plugin; world plugin { import neuron:hw/sockets@1.0.0; export nccl:net/nccl-net-plugin-v6; }"
                .into();
        n.import("sockets", "interfaces");
        n.build().unwrap()
    };
    let truncated = net(&["name"]).build().unwrap()[..200].to_vec();
    let missing = pair(None);
    let mut absent = missing.config.clone();
    absent.net_plugin = Some(missing.folder.path("no-such-net.wasm"));
    let cases = [
        (missing.config.clone(), "no net plugin is configured"),
        (absent, "…no-such-net.wasm: it cannot be opened: No such file or directory (os error 2)"),
    ];
    let files = [
        (b"text".to_vec(), "…net.wasm: it is not a WebAssembly component"),
        (truncated, "…net.wasm: it does not compile: …"),
        (stranger, "…net.wasm: it imports `neuron:hw/sockets@1.0.0`, which nobody serves here; …"),
    ];
    let pairs: Vec<(Pair, &str)> = files.iter().map(|(bytes, why)| (pair(Some(bytes)), *why)).collect();
    let all = cases.into_iter().chain(pairs.iter().map(|(p, why)| (p.config.clone(), *why)));
    for (c, why) in all {
        log();
        let rt = loaded(c);
        let said = log();
        assert!(said.iter().any(|l| l.starts_with("no network between servers: ")), "{said:?}");
        let err = rt.unique_id(1).unwrap_err().to_string();
        assert_fits(
            &format!("neuronGetUniqueId of plugin plugin.wasm failed on tenant default: NRT_UNINITIALIZED (13): {why}"),
            &err,
        );
        assert!(rt.init_comm(wccl::CommOptions::with_id([1; 128], 0, 1)).is_ok());
    }
    // A component that has no v6 table opens; it is the bind that fails.
    let (_folder, rt) = with(&Plugin::new("package zoo:plugin; world plugin {}").unwrap());
    assert_eq!(rt.load_error(), None);
}
