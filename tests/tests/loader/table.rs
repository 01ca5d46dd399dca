//! The table "which plugin, loads or refused, status, sentence" as data.
//!
//! A row is one kind of plugin with one outcome; it may stand for several plugins, which then differ in what the sentence
//! names in braces. In a sentence `…` stands for anything (the engine's own words, mostly), PLUGIN for the file.

use anyhow::Result;
use sandbox::entries::{NAMES, ORIGINALS};
use sandbox::limits::MAX_PLUGIN_BYTES;
use tests::zoo::{self, ANSWER, Body, Plugin, REPLY, SCRATCH, TRANSPORT, init_comm, init_global_comm, ok_bytes};

/// What becomes of a plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Loads,
    Refused,
    /// Loads, and stops in this entry.
    Stops(Entry),
}

/// How a test reaches an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    UniqueId,
    GlobalComm,
    Comm,
    Graph,
}

impl Entry {
    pub const ALL: [Entry; 4] = [Entry::UniqueId, Entry::GlobalComm, Entry::Comm, Entry::Graph];

    fn slot(self) -> usize {
        match self {
            Entry::UniqueId => 1,
            Entry::GlobalComm => 2,
            Entry::Comm => 3,
            Entry::Graph => 4,
        }
    }

    pub fn original(self) -> &'static str {
        ORIGINALS[self.slot()]
    }

    fn name(self) -> &'static str {
        NAMES[self.slot()]
    }
}

/// What lies at the plugin's path.
pub enum File {
    Bytes(Vec<u8>),
    Nothing,
    Folder,
    /// A sparse file of this length.
    Long(u64),
}

/// One plugin of a row.
pub struct Case {
    /// What the sentence names in braces.
    pub names: Vec<(&'static str, String)>,
    pub make: Box<dyn Fn() -> Result<File>>,
}

/// One line of the document.
pub struct Row {
    pub what: &'static str,
    pub outcome: Outcome,
    pub sentence: &'static str,
    /// Whether guest time is limited to 300 ms.
    pub short: bool,
    pub cases: Vec<Case>,
}

/// One section of the document.
pub struct Group {
    pub title: &'static str,
    pub rows: Vec<Row>,
}

/// The whole table.
pub fn groups() -> Vec<Group> {
    vec![files(), reverse(), probes(), entries_at_load(), starts(), misbehaving()]
}

fn case(make: impl Fn() -> Result<File> + 'static) -> Case {
    Case { names: Vec::new(), make: Box::new(make) }
}

/// A transport that the gate lets in, changed by `f`.
fn changed(f: impl Fn(&mut Plugin) -> Result<()> + 'static) -> Case {
    case(move || {
        let mut p = Plugin::transport()?;
        f(&mut p)?;
        Ok(File::Bytes(p.build()?))
    })
}

fn row(what: &'static str, outcome: Outcome, sentence: &'static str, cases: Vec<Case>) -> Row {
    Row { what, outcome, sentence, short: false, cases }
}

fn refused(what: &'static str, sentence: &'static str, make: Case) -> Row {
    row(what, Outcome::Refused, sentence, vec![make])
}

fn loads(what: &'static str, make: Case) -> Row {
    row(what, Outcome::Loads, "", vec![make])
}

const NO_PROBE: &str = "Get Version Info API is not implemented by aws-neuronx-collectives.";

/// Bytes that look random and are the same in every run.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 24) as u8
        })
        .collect()
}

fn files() -> Group {
    let bytes =
        |what, sentence, make: fn() -> Result<Vec<u8>>| refused(what, sentence, case(move || Ok(File::Bytes(make()?))));
    const NOT_ONE: &str =
        "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: it is not a WebAssembly component";
    const BROKEN: &str =
        "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: it does not compile: …";
    // Ends inside a section at every one of them: an end between two sections is a smaller component, and has a row.
    let cut = |n: usize| {
        case(move || {
            let whole = Plugin::transport()?.build()?;
            let at = 9 + (whole.len() - 10) * n / 40;
            Ok(File::Bytes(whole[..at].to_vec()))
        })
    };
    let flipped = |n: usize| {
        case(move || {
            let mut all = b"\0asm\x0d\0\x01\0".to_vec();
            all.extend(noise(64 + 13 * n, 0x9e37_79b9 * (n as u64 + 1)));
            Ok(File::Bytes(all))
        })
    };
    Group {
        title: "Files",
        rows: vec![
            refused(
                "no file",
                "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: it cannot be opened: No such file or directory (os error 2)",
                case(|| Ok(File::Nothing)),
            ),
            refused(
                "a folder",
                "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: it is not a regular file",
                case(|| Ok(File::Folder)),
            ),
            refused(
                "a file longer than a plugin may be",
                "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: it has 67108865 bytes, more than the 67108864 a plugin may have",
                case(|| Ok(File::Long(MAX_PLUGIN_BYTES + 1))),
            ),
            bytes("an empty file", NOT_ONE, || Ok(Vec::new())),
            bytes("text", NOT_ONE, || Ok(b"(component)\n".to_vec())),
            bytes("seven bytes of a component's header", NOT_ONE, || Ok(b"\0asm\x0d\0\x01".to_vec())),
            row(
                "random bytes",
                Outcome::Refused,
                NOT_ONE,
                (0..8).map(|n| case(move || Ok(File::Bytes(noise(100 * n + 9, n as u64 + 77))))).collect(),
            ),
            row("a component's header, then random bytes", Outcome::Refused, BROKEN, (0..16).map(flipped).collect()),
            row("a component cut off inside a section", Outcome::Refused, BROKEN, (0..40).map(cut).collect()),
            bytes(
                "a core module",
                "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: it is a core module, not a component: make a component of it (wit-component, or `cargo xtask guests`)",
                || Ok(wat::parse_str(Plugin::transport()?.wat()?)?),
            ),
            bytes("a component without imports and exports", NO_PROBE, || Ok(wat::parse_str("(component)")?)),
            refused(
                "a component cut off before its exports",
                NO_PROBE,
                case(|| {
                    let whole = Plugin::transport()?.build()?;
                    let end = component_export(&whole)?;
                    Ok(File::Bytes(whole[..end].to_vec()))
                }),
            ),
            loads("the library of this project", case(|| Ok(File::Bytes(zoo::built("nccom.wasm")?)))),
            loads("its next release", case(|| Ok(File::Bytes(zoo::built("nccom-next.wasm")?)))),
            loads("the smallest transport: probe 89, every other entry NRT_FAILURE", changed(|_| Ok(()))),
        ],
    }
}

/// Where the first export section of a component begins.
fn component_export(component: &[u8]) -> Result<usize> {
    let mut depth = 0;
    let mut before = 8;
    for payload in wasmparser::Parser::new(0).parse_all(component) {
        match payload? {
            wasmparser::Payload::ModuleSection { .. } | wasmparser::Payload::ComponentSection { .. } => depth += 1,
            wasmparser::Payload::End(_) if depth > 0 => depth -= 1,
            wasmparser::Payload::ComponentExportSection(_) if depth == 0 => return Ok(before),
            other if depth == 0 => {
                if let Some((_, range)) = other.as_section() {
                    before = range.end as usize;
                }
            }
            _ => {}
        }
    }
    anyhow::bail!("the component has no exports")
}

/// A transport whose contracts gave `package` another version.
fn versioned(package: &'static str, old: Option<&'static str>, new: Option<&'static str>) -> Case {
    changed(move |p| p.wit.reversion(package, old, new))
}

/// A transport that also imports `interface` of a package of its own.
fn stranger(package: &'static str, interface: &'static str, text: &'static str) -> Case {
    changed(move |p| {
        p.wit.add("stranger", text);
        p.world = format!("package zoo:plugin; world plugin {{ include wccl:worlds/transport; import {package}; }}");
        p.import(interface, "ask");
        Ok(())
    })
}

fn reverse() -> Group {
    let nrt = |new| versioned("neuron:nrt", Some("2.0.0"), new);
    let hw = |new| versioned("neuron:hw", Some("1.0.0"), Some(new));
    Group {
        title: "What a plugin imports (NRT_2.0.0)",
        rows: vec![
            loads("nrt 2.0.1: a patch is the same contract", nrt(Some("2.0.1"))),
            refused(
                "nrt 2.1.0: a later minor version",
                "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: it imports `neuron:nrt/types@2.1.0`; this host serves neuron:nrt/types@2.0.0 (same major, minor at most 0): use a host that serves it, or a plugin built for 2.0",
                nrt(Some("2.1.0")),
            ),
            refused(
                "nrt 3.0.0",
                "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: it imports `neuron:nrt/types@3.0.0`; this host serves neuron:nrt/types@2.0.0 (same major, minor at most 0): use a host that serves it, or a plugin built for 2.0",
                nrt(Some("3.0.0")),
            ),
            refused(
                "nrt 1.9.0",
                "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: it imports `neuron:nrt/types@1.9.0`; this host serves neuron:nrt/types@2.0.0 (same major, minor at most 0): use a host that serves it, or a plugin built for 2.0",
                nrt(Some("1.9.0")),
            ),
            refused(
                "nrt without a version",
                "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: it imports `neuron:nrt/types` without a version; this host serves neuron:nrt/types@2.0.0, and a function under another or no version does not count (INV-02): build the plugin against wit/ of this release",
                nrt(None),
            ),
            refused(
                "nrt 2.0.0-rc.1",
                "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: it imports `neuron:nrt/types@2.0.0-rc.1`; this host serves neuron:nrt/types@2.0.0 (same major, minor at most 0): use a host that serves it, or a plugin built for 2.0",
                nrt(Some("2.0.0-rc.1")),
            ),
            refused(
                "hw 1.1.0",
                "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: it imports `neuron:hw/objects@1.1.0`; this host serves neuron:hw/objects@1.0.0 (same major, minor at most 0): use a host that serves it, or a plugin built for 1.0",
                hw("1.1.0"),
            ),
            refused(
                "hw 2.0.0",
                "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: it imports `neuron:hw/objects@2.0.0`; this host serves neuron:hw/objects@1.0.0 (same major, minor at most 0): use a host that serves it, or a plugin built for 1.0",
                hw("2.0.0"),
            ),
            refused(
                "an interface of a package nobody knows",
                "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: it imports `acme:gadget/box@1.0.0`, which nobody serves here; a plugin may import neuron:nrt@2.0.0 and neuron:hw@1.0.0 only",
                stranger(
                    "acme:gadget/box@1.0.0",
                    "box",
                    "package acme:gadget@1.0.0; interface box { ask: func() -> u32; }",
                ),
            ),
            refused(
                "an interface of WASI",
                "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: it imports `wasi:cli/environment@0.2.0`; WASI is off for transports unless the tenant's policy grants the interface: build the plugin for wasm32-unknown-unknown",
                stranger(
                    "wasi:cli/environment@0.2.0",
                    "environment",
                    "package wasi:cli@0.2.0; interface environment { ask: func() -> list<tuple<string, string>>; }",
                ),
            ),
            refused(
                "a function of no interface",
                "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: it imports `ask`, which nobody serves here; a plugin may import neuron:nrt@2.0.0 and neuron:hw@1.0.0 only",
                changed(|p| {
                    p.world = "package zoo:plugin; world plugin { include wccl:worlds/transport; import ask: func(); }"
                        .into();
                    p.import("", "ask");
                    Ok(())
                }),
            ),
            refused(
                "an interface that neuron:hw does not have",
                "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: it imports `neuron:hw/gpu@1.0.0`, which nobody serves here; of that package this host serves neuron:hw/objects, …, neuron:hw/log",
                changed(|p| {
                    p.wit.edit(
                        "hw",
                        "interface clock {",
                        "interface gpu { ask: func() -> u32; }\n\n/// .\n@unstable(feature = hw)\ninterface clock {",
                    )?;
                    p.world = "package zoo:plugin; world plugin { include wccl:worlds/transport; import neuron:hw/gpu@1.0.0; }".into();
                    p.import("gpu", "ask");
                    Ok(())
                }),
            ),
            refused(
                "the control plane of libfabric, which is for net plugins and is not served yet",
                "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: it imports `neuron:hw/fabric@1.0.0`, which nobody serves here; of that package this host serves neuron:hw/objects, …, neuron:hw/log",
                changed(|p| {
                    p.world = "package zoo:plugin; world plugin { include wccl:worlds/transport; import neuron:hw/fabric@1.0.0; }".into();
                    p.import("fabric", "version");
                    Ok(())
                }),
            ),
            refused(
                "a 17th function of nec: the one an older header declares",
                "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: it imports `nec-get-dynamic-recv-size-bytes` of neuron:nrt/nec@2.0.0, which this host does not serve; the reverse leg is all or nothing: one missing callback refuses the plugin before anything of it runs (INV-08)",
                changed(|p| {
                    let add = "  nec-get-dynamic-recv-size-bytes: func(dyn-input: borrow<host-mem>, data-type-sz: u64, src-rank: s32, rank-n: s32) -> u64;\n\n  /// 16.";
                    p.wit.edit("nrt", "  /// 16.", &format!("  @since(version = 2.0.0)\n{add}"))?;
                    p.import("nec", "nec-get-dynamic-recv-size-bytes");
                    Ok(())
                }),
            ),
            refused(
                "a callback with another type",
                "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: an import has another type than this host serves: component imports instance `neuron:nrt/nec@2.0.0`, but a matching implementation was not found in the linker: instance export `nec-get-device-count` has the wrong type: …; rebuild the plugin against wit/ of this release",
                changed(|p| {
                    p.wit.redeclare(
                        "nrt",
                        "nec-get-device-count",
                        "nec-get-device-count: func(array-size: u64) -> tuple<s32, list<s32>>;",
                    )?;
                    p.import("nec", "nec-get-device-count");
                    Ok(())
                }),
            ),
            refused(
                "a function that an interface of neuron:hw does not have",
                "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: …`neuron:hw/log@1.0.0`…`shout`…",
                changed(|p| {
                    p.wit.edit(
                        "hw",
                        "  write: func(level: level, text: string);",
                        "  write: func(level: level, text: string);\n  shout: func();",
                    )?;
                    p.import("log", "shout");
                    Ok(())
                }),
            ),
            loads(
                "nothing of the 20 but one callback",
                changed(|p| {
                    p.import("nec", "nec-get-virtual-core-size");
                    Ok(())
                }),
            ),
        ],
    }
}

fn probe(body: String) -> Case {
    let body = std::rc::Rc::new(body);
    changed(move |p| {
        p.body("neuron-get-version-info", body.as_str());
        Ok(())
    })
}

/// What the engine says when a call hands over more than the tenant's limit for one host call.
const HOST_CALL: &str = "the instance handed over more than its 16777216 bytes in one host call";
/// What it says when the guest's stack is used up.
const STACK: &str = "the instance used more than its 524288 bytes of stack";

/// Ways to misbehave, as bodies that go on if they are survived; with the sentence of each.
fn crimes() -> Vec<(&'static str, &'static str, &'static str, bool)> {
    vec![
        ("traps", "unreachable", "wasm trap: wasm `unreachable` instruction executed", false),
        ("runs for ever", "(loop $again (br $again))", "the call used more than its 300ms of guest time", true),
        (
            "takes memory without end",
            "(loop $more (br_if $more (i32.ne (memory.grow (i32.const 64)) (i32.const -1)))) unreachable",
            "the instance asked for 67239936 bytes of memory, its limit is 67108864",
            false,
        ),
        (
            "hands over a text of 32 MiB",
            "(drop (memory.grow (i32.const 512))) (call $log.write (i32.const 2) (i32.const 65536) (i32.const 33554432))",
            HOST_CALL,
            false,
        ),
        (
            "hands over a text that lies outside its memory",
            "(call $log.write (i32.const 2) (i32.const 65536) (i32.const 0x7fffffff))",
            "string pointer/length out of bounds of memory",
            false,
        ),
        ("calls itself without end", "(call $deep)", STACK, false),
    ]
}

const DEEP: &str = "(func $deep (call $deep) (drop (i32.load (i32.const 0))))";

fn probes() -> Group {
    let mut rows = vec![
        refused(
            "no probe",
            NO_PROBE,
            changed(|p| {
                p.wit.redeclare("nccom", NAMES[0], "")?;
                strip_probe(p)
            }),
        ),
        refused(
            "a probe with another parameter",
            NO_PROBE,
            changed(|p| p.wit.redeclare("nccom", NAMES[0], "neuron-get-version-info: func(n: u64) -> version-info;")),
        ),
        refused(
            "a probe whose record has one field more",
            NO_PROBE,
            changed(|p| {
                p.wit.edit(
                    "nccom",
                    "    compatibility-version: option<u64>,",
                    "    compatibility-version: option<u64>,\n    more: u64,",
                )?;
                p.set(NAMES[0], Body::Trap);
                Ok(())
            }),
        ),
        refused(
            "the interface under another package's name",
            NO_PROBE,
            case(|| {
                let mut p = Plugin::transport()?;
                p.world = "package zoo:plugin; world plugin { export collectives: interface { neuron-get-version-info: func(n: u32) -> u32; } }".into();
                p.set(NAMES[0], Body::Trap);
                Ok(File::Bytes(p.build()?))
            }),
        ),
    ];
    for (what, id) in [("88", Some(88)), ("90", Some(90)), ("2^64 - 1", Some(u64::MAX))] {
        let sentence = match what {
            "88" => "Incompatible version of aws-neuronx-collectives.  Compatibility id: 88, expected: 89",
            "90" => "Incompatible version of aws-neuronx-collectives.  Compatibility id: 90, expected: 89",
            _ => {
                "Incompatible version of aws-neuronx-collectives.  Compatibility id: 18446744073709551615, expected: 89"
            }
        };
        let name = match what {
            "88" => "compatibility id 88",
            "90" => "compatibility id 90",
            _ => "compatibility id 2^64 - 1",
        };
        rows.push(refused(name, sentence, probe(zoo::probe(id))));
    }
    const ABSENT: &str = "Incompatible version of aws-neuronx-collectives.  Compatibility id: 0, expected: 89";
    rows.push(refused("no compatibility id", ABSENT, probe(zoo::probe(None))));
    rows.push(refused(
        "a later library that writes the id only into 64 bytes or more: this host has room for 56",
        ABSENT,
        probe(writes_id_from(64)),
    ));
    rows.push(loads("a library that writes the id only into 56 bytes or more", probe(writes_id_from(56))));
    rows.push(loads(
        "collectives@9.9.9: a version on the export changes nothing",
        versioned("neuron:nccom", None, Some("9.9.9")),
    ));
    for (what, crime, sentence, short) in crimes() {
        let (what, sentence) = (leak(format!("a probe that {what}")), leak(stopped("neuronGetVersionInfo", sentence)));
        let mut r = refused(
            what,
            sentence,
            changed(move |p| {
                p.extra(DEEP);
                p.body(NAMES[0], format!("{crime} {}", zoo::probe(Some(89))));
                Ok(())
            }),
        );
        r.short = short;
        rows.push(r);
    }
    let hash = |at: u32, len: u32| {
        let mut body = zoo::probe(Some(89));
        let end = body.rfind("(i32.const").unwrap_or(0);
        body.insert_str(end, &format!("(drop (memory.grow (i32.const 700))) (i32.store8 (i32.const {}) (i32.const 1)) (i32.store (i32.const {}) (i32.const {at})) (i32.store (i32.const {}) (i32.const {len})) ", ANSWER + 32, ANSWER + 36, ANSWER + 40));
        probe(body)
    };
    rows.push(refused(
        "a probe whose hash has 32 MiB",
        leak(stopped("neuronGetVersionInfo", HOST_CALL)),
        hash(65_536, 32 << 20),
    ));
    rows.push(refused(
        "a probe whose hash lies outside its memory",
        leak(stopped("neuronGetVersionInfo", "list pointer/length out of bounds of memory")),
        hash(65_536, 0x7fff_ffff),
    ));
    rows.push(refused(
        "a probe that answers from an address outside its memory",
        leak(stopped("neuronGetVersionInfo", "pointer out of bounds of memory")),
        probe("(i32.const -8)".into()),
    ));
    Group { title: "The probe and the number 89", rows }
}

/// Text for the life of the process; there is one table.
fn leak(text: String) -> &'static str {
    Box::leak(text.into_boxed_str())
}

/// The sentinel of a probe that stopped.
fn stopped(entry: &str, cause: &str) -> String {
    format!("Error opening libnccom.so, cannot use collective operations! {}", stop_sentence(entry, cause))
}

fn stop_sentence(entry: &str, cause: &str) -> String {
    format!("plugin plugin.wasm stopped in {entry} on tenant default: {cause}; data in flight goes on")
}

/// A probe that clears the hash from 48 bytes of room on and writes the id from `room` on.
pub fn writes_id_from(room: u32) -> String {
    let id = zoo::probe(Some(89));
    let no_id = zoo::probe(None);
    format!("(if (result i32) (i32.ge_u (local.get 0) (i32.const {room})) (then {id}) (else {no_id}))")
}

/// Forgets the body of a probe that the contract does not have any more.
fn strip_probe(p: &mut Plugin) -> Result<()> {
    let wit = p.wit.clone();
    *p = Plugin::new(TRANSPORT)?;
    p.default = Body::Status(1);
    p.wit = wit;
    Ok(())
}

fn entries_at_load() -> Group {
    let others = || NAMES.iter().zip(ORIGINALS).skip(1);
    let missing = others().map(|(name, original)| Case {
        names: vec![("symbol", original.into())],
        ..changed(move |p| p.wit.redeclare("nccom", name, ""))
    });
    let answers = others().map(|(name, original)| Case {
        names: vec![("symbol", original.into())],
        ..changed(move |p| p.wit.redeclare("nccom", name, &format!("{name}: func() -> result<f64, nrt-status>;")))
    });
    let asks = others().map(|(name, original)| Case {
        names: vec![("symbol", original.into())],
        ..changed(move |p| {
            let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../wit/nccom/nccom.wit"))?;
            let start = format!("\n  {name}: func(");
            let at = text.find(&start).ok_or_else(|| anyhow::anyhow!("{name} is not declared"))? + start.len();
            let rest = &text[at..text[at..].find(';').map_or(text.len(), |e| at + e + 1)];
            let comma = if rest.starts_with(')') { "" } else { ", " };
            p.wit.redeclare("nccom", name, &format!("{name}: func(one-more: s8{comma}{rest}"))?;
            // One parameter more moves the borrowed ones; none of these bodies runs.
            p.default = Body::Trap;
            Ok(())
        })
    });
    Group {
        title: "The other 36 entries",
        rows: vec![
            row(
                "one entry is missing",
                Outcome::Refused,
                "cannot find symbol \"{symbol}\" in NCCL. Reason: it is not exported",
                missing.collect(),
            ),
            row(
                "one entry answers something else",
                Outcome::Refused,
                "cannot find symbol \"{symbol}\" in NCCL. Reason: it has another type: …",
                answers.collect(),
            ),
            row(
                "one entry asks for one parameter more",
                Outcome::Refused,
                "cannot find symbol \"{symbol}\" in NCCL. Reason: it has another type: …",
                asks.collect(),
            ),
            refused(
                "the last entry is missing and the first has another type: the first is named",
                "cannot find symbol \"neuronGetUniqueId\" in NCCL. Reason: it has another type: …",
                changed(|p| {
                    p.wit.redeclare("nccom", NAMES[36], "")?;
                    p.wit.redeclare("nccom", NAMES[1], "neuron-get-unique-id: func() -> result<u32, nrt-status>;")
                }),
            ),
        ],
    }
}

fn starts() -> Group {
    let mut rows = Vec::new();
    // Host functions are not reachable yet when a start function runs, so that those two would be traps like any other.
    for (what, crime, sentence, short) in crimes().into_iter().filter(|c| !c.0.starts_with("hands over")) {
        let why = match what {
            "runs for ever" | "takes memory without end" => sentence.to_string(),
            _ => format!("it stopped while it was instantiated: {sentence}"),
        };
        let sentence =
            leak(format!("Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: {why}"));
        let mut r = refused(
            leak(format!("a start function that {what}")),
            sentence,
            changed(move |p| {
                p.extra(DEEP);
                p.start = Some(crime.into());
                Ok(())
            }),
        );
        r.short = short;
        rows.push(r);
    }
    rows.push(refused(
        "a memory that begins above the limit",
        "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: the instance asked for 67174400 bytes of memory, its limit is 67108864",
        changed(|p| {
            p.pages = 1025;
            Ok(())
        }),
    ));
    rows.push(refused(
        "a table that begins above the limit",
        "Error opening libnccom.so, cannot use collective operations! plugin PLUGIN: the instance asked for a table of 20000 elements, its limit is 10000",
        changed(|p| {
            p.extra("(table 20000 funcref)");
            Ok(())
        }),
    ));
    Group { title: "What runs before the probe", rows }
}

/// A transport for one rank that does `crime` in `entry`; for entries of a communicator only in the tenant's first one.
fn criminal(entry: Entry, crime: &'static str) -> Case {
    case(move || {
        let mut p = Plugin::lone_rank()?;
        p.extra(DEEP);
        let made = format!("(i32.load (i32.const {}))", REPLY + 4);
        let first = |handle: &str| {
            format!("(if (i64.eq (call $objects.communicator.id {handle}) (i64.const 1)) (then {crime}))")
        };
        let body = match entry {
            Entry::UniqueId => format!("{crime} {}", ok_bytes(SCRATCH, 128)),
            Entry::GlobalComm => init_global_comm(&first(&made)),
            Entry::Comm => init_comm(&first(&made)),
            Entry::Graph => {
                format!("{} (call $objects.communicator.drop (local.get 0)) {}", first("(local.get 0)"), zoo::ok_unit())
            }
        };
        p.body(entry.name(), body);
        Ok(File::Bytes(p.build()?))
    })
}

fn misbehaving() -> Group {
    let mut rows = Vec::new();
    for (what, crime, sentence, short) in crimes() {
        for entry in Entry::ALL {
            let what = leak(format!("`{}` {what}", entry.name()));
            let sentence = leak(stop_sentence(entry.original(), sentence));
            let mut r = row(what, Outcome::Stops(entry), sentence, vec![criminal(entry, crime)]);
            r.short = short;
            rows.push(r);
        }
    }
    let lie = |what: &'static str, entry: Entry, sentence: &str, body: String| {
        let make = case(move || {
            let mut p = Plugin::lone_rank()?;
            p.body(entry.name(), body.as_str());
            Ok(File::Bytes(p.build()?))
        });
        row(what, Outcome::Stops(entry), leak(stop_sentence(entry.original(), sentence)), vec![make])
    };
    rows.push(lie(
        "`neuron-get-unique-id` answers a list that lies outside its memory",
        Entry::UniqueId,
        "list pointer/length out of bounds of memory",
        ok_bytes(65_536, 0x7fff_ffff),
    ));
    rows.push(lie(
        "`neuron-get-unique-id` answers neither success nor error",
        Entry::UniqueId,
        "invalid expected discriminant",
        format!("(i32.store8 (i32.const {ANSWER}) (i32.const 7)) (i32.const {ANSWER})"),
    ));
    rows.push(lie(
        "`neuron-get-unique-id` answers from an odd address",
        Entry::UniqueId,
        "return pointer not aligned",
        format!("(i32.const {})", ANSWER + 1),
    ));
    Group { title: "After the load", rows }
}
