//! What the plugin reads, compiled natively, and what the host reads of a plugin.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use hw_bridge::model::IncrementRegister;
use hw_bridge::proxy::{Entry, NetPath, Proxy, READY};
use nccom_core::bootstrap::wire::{self, Address, Header, Info, PeerHello, RootAnswer};
use nccom_core::connect::P2pInfo;
use nccom_core::peers::{PeerRecord, RECORD_BYTES};
use nccom_core::rings::{Layout, TOPO_RANKS_BYTES, TopoRanks, both_ways_and_strided, doubled, pods, postset};
use nccom_core::search::{self, Graph, RUNTIME_NAME};
use nccom_core::state::{self, PlanState};
use nccom_core::topo::limits::MAX_CHANNELS;
use nccom_core::topo::{Family, MachineFacts, System, xml};
use sandbox::load::PluginKind;
use sandbox::store::Library;
use tests::zoo::Plugin;

/// Facts by a byte: every family there is, with one and two cores in a logical one.
fn facts(byte: u8) -> MachineFacts {
    let virtual_core_size = 1 + u32::from(byte & 1);
    MachineFacts {
        family: Family(u32::from(byte >> 1)),
        virtual_core_size,
        cores_per_device: 8,
        multi_node: byte & 0x80 != 0,
        ..MachineFacts::default()
    }
}

/// A topology document behind a byte that chooses the server.
pub fn topology(data: &[u8]) {
    let [server, text @ ..] = data else { return };
    let text = String::from_utf8_lossy(text);
    let document = match xml::read(&text) {
        Ok(document) => document,
        Err(e) => return assert!(!e.to_string().is_empty()),
    };
    let written = xml::write(&document);
    assert_eq!(xml::read(&written).map(|d| xml::write(&d)), Ok(written));
    let mut system = match System::from_element(&document, facts(*server), true) {
        Ok(system) => system,
        Err(e) => return assert!(!e.to_string().is_empty()),
    };
    system.prepare();
    for vars in [|_: &str| None, |name: &str| (name == search::USE_NEW_ALGORITHM).then(|| "1".to_string())] {
        match search::compute(&system, &vars, None, RUNTIME_NAME) {
            Ok(found) => {
                let again = search::document::write(&found.graph, &system);
                assert!(xml::read(&again).is_ok(), "{again}");
            }
            Err(e) => assert!(!e.to_string().is_empty()),
        }
    }
}

/// A graph document for a server that is known.
pub fn graph(data: &[u8]) {
    static SYSTEM: OnceLock<System> = OnceLock::new();
    let system = SYSTEM.get_or_init(|| {
        let text = include_str!("../../plugins/nccom-core/src/topo/testdata/topo_4p1h.xml");
        let mut system =
            System::from_document(text, MachineFacts::default(), true).expect("the document is a published one");
        system.prepare();
        system
    });
    let text = String::from_utf8_lossy(data);
    let template = Graph::template(system.ranks().len());
    match search::document::load(&text, system, &template) {
        Ok(Some(graph)) => {
            let written = search::document::write(&graph, system);
            assert_eq!(search::document::load(&written, system, &template), Ok(Some(graph)));
        }
        Ok(None) => {}
        Err(e) => assert!(!e.to_string().is_empty()),
    }
}

/// A message of the bootstrap: a byte that chooses the kind, then its bytes. What is read is written as it was.
pub fn bootstrap(data: &[u8]) {
    let [kind, b @ ..] = data else { return };
    match kind % 10 {
        0 => Header::decode(b).map_or((), |h| assert_eq!(h.encode(), b)),
        1 => Info::decode(b).map_or((), |i| assert_eq!(i.encode(), b)),
        2 => RootAnswer::decode(b).map_or((), |a| assert_eq!(a.encode(), b)),
        3 => PeerHello::decode(b).map_or((), |h| assert_eq!(h.encode(), b)),
        4 => {
            if let Some(failure) = wire::decode_refusal(b) {
                // A text that was no UTF-8 grows when it is read and may be cut when it is handed on; from then on it stays.
                let again = wire::encode_refusal(&failure);
                let stays = wire::decode_refusal(&again).map(|failure| wire::encode_refusal(&failure));
                assert_eq!(stays, Some(again));
            }
        }
        5 => {
            if let Ok(a) = Address::of_id(b) {
                assert_eq!(Address::of_id(&a.to_id()), Ok(a));
                assert!(!a.ip().is_empty() && !a.to_string().is_empty());
                let _ = (a.is_loopback(), a.is_link_local());
            }
        }
        6 => {
            let text = String::from_utf8_lossy(b);
            if let Ok(wire::RootId::Address(a)) = wire::parse_root_id(&text) {
                assert!(a.to_string().ends_with(&format!(":{}", a.port())));
            }
        }
        7 => PeerRecord::decode(b, 1).map_or((), |r| assert_eq!(PeerRecord::decode(&r.encode(), 1), Ok(r))),
        8 => P2pInfo::decode(b).map_or((), |i| assert_eq!(P2pInfo::decode(&i.encode()), Ok(i))),
        _ => rings(b),
    }
}

/// The records of all ranks: a peer record each, then the fragments of the rings.
fn rings(b: &[u8]) {
    let [server, pod_type, step, b @ ..] = b else { return };
    let n = b.len() / (RECORD_BYTES + TOPO_RANKS_BYTES);
    let (peers, fragments) = b.split_at(n * RECORD_BYTES);
    let peers: Result<Vec<_>, _> =
        peers.chunks(RECORD_BYTES).enumerate().map(|(r, b)| PeerRecord::decode(b, r)).collect();
    let Ok(peers) = peers else { return };
    let ranks: Vec<_> = peers.iter().map(PeerRecord::rank_info).collect();
    let Ok(layout) = Layout::of_ranks(&ranks) else { return };
    let family = facts(*server).family;
    let peer = |node: i32| node.checked_add(i32::from(*step)).map(|at| at % 4);
    let Ok(pods) = pods(&layout, &ranks, family, u32::from(*pod_type), &peer) else { return };
    let fragments = fragments.chunks_exact(TOPO_RANKS_BYTES).take(n).map(TopoRanks::decode);
    let Ok(all) = fragments.collect::<Result<Vec<_>, _>>() else { return };
    for rank in 0..n as i32 {
        match postset(&all, &layout, &pods.order, family, rank) {
            // A ring goes through every rank once, whatever the records say.
            Ok(channels) => {
                for ring in &channels.rings {
                    let mut sorted = ring.user_ranks.clone();
                    sorted.sort_unstable();
                    assert!(sorted.into_iter().eq(0..n as i32), "{ring:?}");
                }
            }
            Err(e) => assert!(!e.to_string().is_empty()),
        }
    }
}

/// The state of another instance behind a byte that chooses the schema: what is read is the same in every schema, and every
/// release arranges rings from it that hold each rank once.
pub fn state_import(data: &[u8]) {
    let [schema, bytes @ ..] = data else { return };
    let state = match PlanState::decode(u32::from(*schema), bytes) {
        Ok(state) => state,
        Err(e) => return assert!(!e.text.is_empty()),
    };
    let said = format!("{state:?}");
    for schema in state::READ {
        let b = state::encode(schema, &state.head, &state.records, state.graph.as_ref(), state.wires.as_ref());
        assert_eq!(PlanState::decode(schema, &b).map(|s| format!("{s:?}")).as_ref(), Ok(&said));
    }
    let ranks: Vec<_> = state.records.iter().map(PeerRecord::rank_info).collect();
    let Ok(layout) = Layout::of_ranks(&ranks) else { return };
    let pods = pods(&layout, &ranks, Family(15), state.records[state.head.rank].pod_type, &|_| None);
    assert!(pods.is_ok());
    let Some(graph) = state.graph else { return };
    for rings in [doubled(&graph.searched), both_ways_and_strided(&graph.searched, true)] {
        assert!(rings.len() <= MAX_CHANNELS);
        for ring in rings {
            let mut sorted = ring.user_ranks.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..state.head.nranks as i32), "{ring:?}");
            assert_eq!(ring.user_ranks[0], state.head.rank as i32);
        }
    }
}

/// Completes a request at its second test; refuses every fourth post.
#[derive(Debug, Default)]
pub(super) struct Wire {
    tests: HashMap<u64, u32>,
    posts: u64,
}

impl NetPath for Wire {
    fn post(&mut self, _: &Entry) -> Result<Option<u64>, String> {
        self.posts += 1;
        if self.posts % 4 == 0 {
            return Ok(None);
        }
        self.tests.insert(self.posts, 0);
        Ok(Some(self.posts))
    }

    fn test(&mut self, request: u64) -> Result<Option<u64>, String> {
        let n = self.tests.get_mut(&request).ok_or("it was never posted, or is done")?;
        *n += 1;
        Ok((*n >= 2).then(|| {
            self.tests.remove(&request);
            8
        }))
    }
}

/// Lists of network operations: how many of each, the block, then the records; then ticks while the device goes on.
pub fn proxy(data: &[u8]) {
    let [stream, ops, sends, block, device, b @ ..] = data else { return };
    let mut p = Proxy::default();
    let done = Arc::new(IncrementRegister::recording(64));
    p.attach(Box::new(Wire::default()), HashMap::from([(1, done)]));
    let (stream, block) = (u32::from(*stream), u32::from(*block));
    let (ops, rest) = b.split_at((usize::from(*ops) * 96).min(b.len()));
    let (src, dst) = rest.split_at((usize::from(*sends) * 72).min(rest.len()));
    let started = p.start(stream, block, ops, src, dst);
    if let Err(e) = started {
        assert!(!e.to_string().is_empty());
    }
    for tick in 0..16u32 {
        for send in [true, false] {
            if let Some(index) = p.host_index(stream, block, send) {
                index.raise(if tick == 0 { READY } else { tick * u32::from(*device) });
            }
        }
        if let Err(e) = p.progress(stream, block) {
            assert!(!e.to_string().is_empty());
        }
    }
    let _ = p.stop(stream);
}

/// A file with some of its bytes replaced: places of three bytes, a value each.
fn changed(file: &[u8], changes: &[u8]) -> Vec<u8> {
    let (mut file, len) = (file.to_vec(), file.len());
    for change in changes.chunks_exact(4) {
        let at = u32::from_le_bytes([change[0], change[1], change[2], 0]) as usize;
        file[at % len] = change[3];
    }
    file
}

/// A plugin against other contracts than these: three bytes choose what becomes of a function or a package; absent if what
/// comes out is no contract.
fn against(edits: &[u8]) -> Option<Vec<u8>> {
    const FUNCTIONS: [(&str, &str); 8] = [
        ("hw", "listen"),
        ("hw", "accept"),
        ("hw", "park"),
        ("hw", "get-properties"),
        ("hw", "host"),
        ("hw", "nics"),
        ("nrt", "nec-get-device-count"),
        ("nrt", "nrt-get-libnccl-net"),
    ];
    const TYPES: [&str; 8] = [
        "",
        "u8",
        "list<u8>",
        "string",
        "result",
        "option<tuple<s32, string>>",
        "result<listener, nrt-status>",
        "list<list<u8>>",
    ];
    const VERSIONS: [Option<&str>; 6] =
        [None, Some("1.0.1"), Some("1.9.0"), Some("2.1.0"), Some("0.1.0"), Some("4294967296.0.0")];
    let mut p = Plugin::transport().ok()?;
    for edit in edits.chunks_exact(3).take(4) {
        let [what, from, to] = [edit[0], edit[1], edit[2]].map(usize::from);
        let (contract, function) = FUNCTIONS[what / 4 % FUNCTIONS.len()];
        let (param, answer) = (TYPES[from % TYPES.len()], TYPES[to % TYPES.len()]);
        match what % 4 {
            0 => p.wit.redeclare(contract, function, "").ok()?,
            1 => {
                let param = if param.is_empty() { String::new() } else { format!("x: {param}") };
                let answer = if answer.is_empty() { String::new() } else { format!(" -> {answer}") };
                p.wit.redeclare(contract, function, &format!("{function}: func({param}){answer};")).ok()?;
            }
            2 => p.wit.reversion("neuron:hw", Some("1.0.0"), VERSIONS[to % VERSIONS.len()]).ok()?,
            _ => p.wit.reversion("neuron:nrt", Some("2.0.0"), VERSIONS[to % VERSIONS.len()]).ok()?,
        }
    }
    // Only what is imported is in the file.
    for import in p.importable().ok()? {
        let (interface, function) = import.name.trim_start_matches('$').split_once('.')?;
        p.import(interface, function);
    }
    p.build().ok()
}

/// A plugin file. With a first byte of 0 the rest is the file; with 1 it is the text of one; with 2 it changes bytes of the
/// plugin of this project, if that was built, which takes long to compile; with 3 it changes the contracts that a plugin is
/// built against; else it changes bytes of a small plugin.
pub fn loader(data: &[u8]) {
    static REAL: OnceLock<Vec<u8>> = OnceLock::new();
    static SMALL: OnceLock<Vec<u8>> = OnceLock::new();
    let real = || {
        let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/plugins/nccom.wasm");
        std::fs::read(&built).unwrap_or_else(|e| panic!("{}: {e}; `cargo xtask guests` builds it", built.display()))
    };
    let small = || Plugin::lone_rank().and_then(|p| p.build()).unwrap_or_else(|e| panic!("the zoo makes none: {e:#}"));
    let [form, rest @ ..] = data else { return };
    let file = match form {
        0 => rest.to_vec(),
        1 => match wat::parse_bytes(rest) {
            Ok(file) => file.into_owned(),
            Err(_) => return,
        },
        2 => changed(REAL.get_or_init(real), rest),
        3 => match against(rest) {
            Some(file) => file,
            None => return,
        },
        _ => changed(SMALL.get_or_init(small), rest),
    };
    let kind = if rest.len() % 2 == 0 { PluginKind::Transport } else { PluginKind::Net };
    match Library::link("fuzz", &file, kind, &[]) {
        Ok(library) => drop((library.imports(), library.exports())),
        Err(e) => assert!(!e.is_empty()),
    }
}
