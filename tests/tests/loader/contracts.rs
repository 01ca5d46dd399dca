//! The contracts under wit/ against what the originals have, against the host's own tables, and against the copies of
//! released packages under wit/history/.
//!
//! Checks that walk all contracts are functions that return complaints: one test finds none in the real contracts, another
//! breaks a contract in memory and finds the complaint, so that no check can pass by looking at nothing.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use sandbox::bindings::exports::neuron::nccom::collectives as bound;
use sandbox::bindings::neuron::nrt::types::NecPodType;
use sandbox::served::{CALLBACKS, NET, ServedInterface, TRANSPORT};
use sandbox::status::Status;
use sandbox::{entries, limits};
use wit_parser::{
    Docs, Function, FunctionKind, Handle, Interface, InterfaceId, Resolve, Stability, Type, TypeDef, TypeDefKind,
    TypeId, TypeOwner, WorldItem, WorldKey,
};

/// The contracts, dependencies first.
const FILES: [&str; 6] =
    ["nrt/nrt.wit", "hw/hw.wit", "nccom/nccom.wit", "net/net.wit", "lifecycle/lifecycle.wit", "worlds/worlds.wit"];

/// The released copies, dependencies first.
const RELEASED: [&str; 4] = ["neuron-nrt@2.0.0.wit", "neuron-hw-objects@1.0.0.wit", "neuron-nccom.wit", "nccl-net.wit"];

/// The packages of the contracts with their versions.
const PACKAGES: [(&str, Option<&str>); 6] = [
    ("neuron:nrt", Some("2.0.0")),
    ("neuron:hw", Some("1.0.0")),
    ("neuron:nccom", None),
    ("nccl:net", None),
    ("neuron:lifecycle", Some("1.0.0")),
    ("wccl:worlds", None),
];

/// Originals and their exports, in slot order (forward-abi 2).
const ENTRIES: [(&str, &str); 37] = [
    ("neuronGetVersionInfo", "neuron-get-version-info"),
    ("neuronGetUniqueId", "neuron-get-unique-id"),
    ("neuronInitGlobalComm", "neuron-init-global-comm"),
    ("neuronInitComm", "neuron-init-comm"),
    ("neuronBuildGraphComm", "neuron-build-graph-comm"),
    ("neuronGetCommInfo", "neuron-get-comm-info"),
    ("neuronFreeComm", "neuron-free-comm"),
    ("neuronExpandConnectivity", "neuron-expand-connectivity"),
    ("neuronStartNetworkProxy", "neuron-start-network-proxy"),
    ("neuronStopNetworkProxy", "neuron-stop-network-proxy"),
    ("neuronNetworkProxyProgress", "neuron-network-proxy-progress"),
    ("neuronBootstrapSend", "neuron-bootstrap-send"),
    ("neuronBootstrapRecv", "neuron-bootstrap-recv"),
    ("neuronBootstrapAllGather", "neuron-bootstrap-all-gather"),
    ("neuronPreferredNcRidNic", "neuron-preferred-nc-rid-nic"),
    ("neuronPreferredNcRidNicBdf", "neuron-preferred-nc-rid-nic-bdf"),
    ("neuronNetRegMr", "neuron-net-reg-mr"),
    ("neuronNetDeregMr", "neuron-net-dereg-mr"),
    ("neuronGetPeerDeviceId", "neuron-get-peer-device-id"),
    ("neuronSetAffinity", "neuron-set-affinity"),
    ("neuronGetNetConnector", "neuron-get-net-connector"),
    ("neuronInitNet", "neuron-init-net"),
    ("neuronFiniPlugin", "neuron-fini-plugin"),
    ("neuronGetOFIHandle", "neuron-get-ofi-handle"),
    ("neuronNetListen", "neuron-net-listen"),
    ("neuronNetConnect", "neuron-net-connect"),
    ("neuronNetAccept", "neuron-net-accept"),
    ("neuronNetRegMrOG", "neuron-net-reg-mr-og"),
    ("neuronNetDeregMrOG", "neuron-net-dereg-mr-og"),
    ("neuronNetGetMrKey", "neuron-net-get-mr-key"),
    ("neuronNetIsend", "neuron-net-isend"),
    ("neuronNetIrecv", "neuron-net-irecv"),
    ("neuronNetIflush", "neuron-net-iflush"),
    ("neuronNetTest", "neuron-net-test"),
    ("neuronNetCloseSend", "neuron-net-close-send"),
    ("neuronNetCloseRecv", "neuron-net-close-recv"),
    ("neuronNetCloseListen", "neuron-net-close-listen"),
];

/// The callbacks in the original's order, with what each returns (reverse-abi 3.1 and 4): `status` where the original
/// returns NRT_STATUS, else the type of the contract.
const RETURNS: [(&str, &str); 20] = [
    ("nec_inc_semaphore", ""),
    ("nec_get_device_count", "tuple<s32, list<s32>>"),
    ("nec_get_device_pci_bdf", "result<neuron:nrt/types.pci-bdf, s32>"),
    ("nec_get_virtual_core_size", "status"),
    ("nec_build_port_and_rid_map", "status"),
    ("nec_is_mla_available", "bool"),
    ("nec_mla_idx_to_rid", "s32"),
    ("nec_rid_to_mla_idx", "s32"),
    ("nec_get_peer_mla_idx", "s32"),
    ("nec_get_p2p_pod_peer_node", "result<s32, s32>"),
    ("nec_pod_node_can_access_peer_node", "status"),
    ("nec_ndl_printk", ""),
    ("nec_get_dynamic_send_size_bytes", "u64"),
    ("nec_get_dynamic_send_offset_bytes", "u64"),
    ("nec_get_dynamic_recv_offset_bytes", "u64"),
    ("nec_set_recv_size_bytes", ""),
    ("nrt_get_total_vnc_count", "status"),
    ("nrt_get_instance_info", "status"),
    ("nrt_get_version", "status"),
    ("nrt_get_libnccl_net", "result<own<neuron:nrt/types.net-library>, tuple<s32, string>>"),
];

/// ncclNetPlugin_v6 by position; the byte is eight times that (net-plugin 3.1).
const NET_V6: [&str; 22] = [
    "name",
    "init",
    "fini",
    "devices",
    "getProperties",
    "listen",
    "connect",
    "accept",
    "regMr",
    "regMrDmaBuf",
    "deregMr",
    "isend",
    "irecv",
    "iflush",
    "test",
    "closeSend",
    "closeRecv",
    "closeListen",
    "getMrKey",
    "iwrite",
    "iwriteInline",
    "iread",
];

/// What v4 lacks of v5 (net-plugin 3.2).
const NOT_IN_V4: [&str; 5] = ["regMrDmaBuf", "getMrKey", "iwrite", "iwriteInline", "iread"];

/// NRT_STATUS in the original's order (reverse-abi 6).
const STATUSES: [(u32, &str); 28] = [
    (0, "SUCCESS"),
    (1, "FAILURE"),
    (2, "INVALID"),
    (3, "INVALID_HANDLE"),
    (4, "RESOURCE"),
    (5, "TIMEOUT"),
    (6, "HW_ERROR"),
    (7, "QUEUE_FULL"),
    (9, "LOAD_NOT_ENOUGH_NC"),
    (10, "UNSUPPORTED_NEFF_VERSION"),
    (11, "FAIL_HOST_MEM_ALLOC"),
    (13, "UNINITIALIZED"),
    (14, "CLOSED"),
    (15, "QUEUE_EMPTY"),
    (101, "EXEC_UNIT_UNRECOVERABLE"),
    (1002, "EXEC_BAD_INPUT"),
    (1003, "EXEC_COMPLETED_WITH_NUM_ERR"),
    (1004, "EXEC_COMPLETED_WITH_ERR"),
    (1005, "EXEC_NC_BUSY"),
    (1006, "EXEC_OOB"),
    (1100, "COLL_PENDING"),
    (1200, "EXEC_HW_ERR_COLLECTIVES"),
    (1201, "EXEC_HW_ERR_HBM_UE"),
    (1202, "EXEC_HW_ERR_NC_UE"),
    (1203, "EXEC_HW_ERR_DMA_ABORT"),
    (1204, "EXEC_SW_NQ_OVERFLOW"),
    (1205, "EXEC_HW_ERR_REPAIRABLE_HBM_UE"),
    (1206, "NETWORK_PROXY_FAILURE"),
];

fn wit() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../wit")
}

fn text(file: &str) -> String {
    let path = wit().join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{} cannot be read: {e}", path.display()))
}

/// Sources by name, dependencies first, resolved with every feature on.
fn resolve(sources: &[(String, String)]) -> Resolve {
    let mut all = Resolve { all_features: true, ..Resolve::default() };
    for (name, source) in sources {
        all.push_source(name, source).unwrap_or_else(|e| panic!("{name} does not resolve: {e:#}"));
    }
    all
}

fn sources(files: &[&str], dir: &str) -> Vec<(String, String)> {
    files.iter().map(|f| (format!("{dir}{f}"), text(&format!("{dir}{f}")))).collect()
}

fn contracts() -> Resolve {
    resolve(&sources(&FILES, ""))
}

fn released() -> Resolve {
    resolve(&sources(&RELEASED, "history/"))
}

/// The same sources with one edit, which must hit exactly one place of `file`.
fn edited(files: &[&str], dir: &str, file: &str, from: &str, to: &str) -> Resolve {
    let mut all = sources(files, dir);
    let source = &mut all.iter_mut().find(|s| s.0.ends_with(file)).expect("the file is one of the list").1;
    assert_eq!(source.matches(from).count(), 1, "the edit of {file} must hit one place: {from}");
    *source = source.replacen(from, to, 1);
    resolve(&all)
}

fn edited_contract(file: &str, from: &str, to: &str) -> Resolve {
    edited(&FILES, "", file, from, to)
}

/// The interface `package/name`, without a version.
fn find(r: &Resolve, name: &str) -> InterfaceId {
    let found = r.interfaces.iter().find(|(id, _)| label(r, *id) == name);
    found.unwrap_or_else(|| panic!("there is no interface {name}")).0
}

fn functions(r: &Resolve, name: &str) -> Vec<String> {
    r.interfaces[find(r, name)].functions.keys().cloned().collect()
}

/// `package/name` of an interface, without the version.
fn label(r: &Resolve, id: InterfaceId) -> String {
    let full = r.id_of(id).unwrap_or_default();
    full.split('@').next().unwrap_or_default().to_string()
}

/// An original name as a WIT name: `neuronGetOFIHandle` is `neuron-get-ofi-handle`, `nec_ndl_printk` is `nec-ndl-printk`.
fn kebab(original: &str) -> String {
    let letters: Vec<char> = original.chars().collect();
    let mut out = String::new();
    for (i, c) in letters.iter().enumerate() {
        let starts_word = c.is_uppercase()
            && i > 0
            && (letters[i - 1].is_lowercase() || letters.get(i + 1).is_some_and(|n| n.is_lowercase()));
        if starts_word {
            out.push('-');
        }
        out.push(if *c == '_' { '-' } else { c.to_ascii_lowercase() });
    }
    out
}

/// A type as text, with aliases followed to the type they stand for; two types are equal if and only if their texts are.
fn shape(r: &Resolve, ty: &Type) -> String {
    let optional = |t: &Option<Type>| t.as_ref().map_or("_".to_string(), |t| shape(r, t));
    let id = match ty {
        Type::Id(id) => *id,
        plain => return format!("{plain:?}").to_lowercase(),
    };
    let def = &r.types[id];
    match &def.kind {
        TypeDefKind::Type(t) => shape(r, t),
        TypeDefKind::Handle(Handle::Own(t)) => format!("own<{}>", shape(r, &Type::Id(*t))),
        TypeDefKind::Handle(Handle::Borrow(t)) => format!("borrow<{}>", shape(r, &Type::Id(*t))),
        _ if def.name.is_some() => named(r, def),
        TypeDefKind::Option(t) => format!("option<{}>", shape(r, t)),
        TypeDefKind::List(t) => format!("list<{}>", shape(r, t)),
        TypeDefKind::Result(t) => match (&t.ok, &t.err) {
            (ok, None) => format!("result<{}>", optional(ok)),
            (ok, err) => format!("result<{}, {}>", optional(ok), optional(err)),
        },
        TypeDefKind::Tuple(t) => {
            let all: Vec<String> = t.types.iter().map(|t| shape(r, t)).collect();
            format!("tuple<{}>", all.join(", "))
        }
        other => panic!("a contract uses a {}, which this test does not know", other.as_str()),
    }
}

fn named(r: &Resolve, def: &TypeDef) -> String {
    let name = def.name.as_deref().unwrap_or_default();
    match def.owner {
        TypeOwner::Interface(i) => format!("{}.{name}", label(r, i)),
        _ => name.to_string(),
    }
}

/// What a named type is.
fn definition(r: &Resolve, id: TypeId) -> String {
    match &r.types[id].kind {
        TypeDefKind::Record(t) => {
            let all: Vec<String> = t.fields.iter().map(|f| format!("{}: {}", f.name, shape(r, &f.ty))).collect();
            format!("record {{ {} }}", all.join(", "))
        }
        TypeDefKind::Variant(t) => {
            let case = |c: &wit_parser::Case| match &c.ty {
                Some(t) => format!("{}({})", c.name, shape(r, t)),
                None => c.name.clone(),
            };
            let all: Vec<String> = t.cases.iter().map(case).collect();
            format!("variant {{ {} }}", all.join(", "))
        }
        TypeDefKind::Enum(t) => {
            let all: Vec<&str> = t.cases.iter().map(|c| c.name.as_str()).collect();
            format!("enum {{ {} }}", all.join(", "))
        }
        TypeDefKind::Flags(t) => {
            let all: Vec<&str> = t.flags.iter().map(|c| c.name.as_str()).collect();
            format!("flags {{ {} }}", all.join(", "))
        }
        TypeDefKind::Resource => "resource".into(),
        TypeDefKind::Type(t) => format!("use of {}", shape(r, t)),
        _ => shape(r, &Type::Id(id)),
    }
}

fn signature(r: &Resolve, f: &Function) -> String {
    let params: Vec<String> = f.params.iter().map(|p| format!("{}: {}", p.name, shape(r, &p.ty))).collect();
    let kind = match f.kind {
        FunctionKind::Freestanding => "func",
        FunctionKind::Method(_) => "method",
        FunctionKind::Static(_) => "static func",
        FunctionKind::Constructor(_) => "constructor",
        _ => "async or accessor",
    };
    format!("{kind}({}) -> {}", params.join(", "), f.result.as_ref().map_or("()".into(), |t| shape(r, t)))
}

/// Types, then functions of an interface, as (name, what it is), in order.
fn items(r: &Resolve, interface: &Interface) -> Vec<(String, String)> {
    let types = interface.types.iter().map(|(name, id)| (format!("type {name}"), definition(r, *id)));
    let functions = interface.functions.iter().map(|(name, f)| (format!("function {name}"), signature(r, f)));
    types.chain(functions).collect()
}

/// What differs between a released interface and today's, one sentence each.
fn differences(old: &Resolve, new: &Resolve, name: &str) -> Vec<String> {
    let (was, is) = (items(old, &old.interfaces[find(old, name)]), items(new, &new.interfaces[find(new, name)]));
    let of = |list: &[(String, String)], item: &str| list.iter().find(|i| i.0 == item).map(|i| i.1.clone());
    let mut all = Vec::new();
    for (item, what) in &was {
        match of(&is, item) {
            None => all.push(format!("{name}: {item} is gone; it was {what}")),
            Some(now) if now != *what => all.push(format!("{name}: {item} was {what} and is now {now}")),
            Some(_) => {}
        }
    }
    for (item, what) in is.iter().filter(|i| of(&was, &i.0).is_none()) {
        all.push(format!("{name}: {item} is new: {what}"));
    }
    let order = |list: &[(String, String)]| -> Vec<String> { list.iter().map(|i| i.0.clone()).collect() };
    if all.is_empty() && order(&was) != order(&is) {
        all.push(format!("{name}: the order is now {:?}", order(&is)));
    }
    all
}

/// All differences between the released packages and today's; of neuron:hw only `objects` is released.
fn drift(old: &Resolve, new: &Resolve) -> Vec<String> {
    let mut all = Vec::new();
    for (id, package) in old.packages.iter() {
        let name = format!("{}:{}", package.name.namespace, package.name.name);
        let today = new
            .packages
            .iter()
            .find(|(_, p)| (&p.name.namespace, &p.name.name) == (&package.name.namespace, &package.name.name));
        let Some((_, today)) = today else {
            all.push(format!("{name}: the package is gone"));
            continue;
        };
        if today.name.version != package.name.version {
            all.push(format!("{name}: the version was {:?} and is now {:?}", package.name.version, today.name.version));
        }
        for interface in today.interfaces.keys().filter(|i| name != "neuron:hw" && !package.interfaces.contains_key(*i))
        {
            all.push(format!("{name}/{interface} is new"));
        }
        for interface in old.packages[id].interfaces.keys() {
            if today.interfaces.contains_key(interface) {
                all.extend(differences(old, new, &format!("{name}/{interface}")));
            } else {
                all.push(format!("{name}/{interface} is gone"));
            }
        }
    }
    all
}

/// Whether a type of this interface came by `use`.
fn used(r: &Resolve, id: TypeId) -> bool {
    let def = &r.types[id];
    match &def.kind {
        TypeDefKind::Type(Type::Id(from)) => r.types[*from].owner != def.owner,
        _ => false,
    }
}

/// Items without a doc comment.
fn undocumented(r: &Resolve) -> Vec<String> {
    let mut all = Vec::new();
    let mut check = |what: String, docs: &Docs| {
        if docs.contents.as_ref().is_none_or(|c| c.trim().is_empty()) {
            all.push(what);
        }
    };
    for (_, p) in r.packages.iter() {
        check(format!("package {}", p.name), &p.docs);
    }
    for (_, w) in r.worlds.iter() {
        check(format!("world {}", w.name), &w.docs);
    }
    for (id, i) in r.interfaces.iter() {
        let name = label(r, id);
        check(format!("interface {name}"), &i.docs);
        for (f, def) in &i.functions {
            check(format!("{name}: function {f}"), &def.docs);
        }
        for (t, id) in i.types.iter().filter(|(_, id)| !used(r, **id)) {
            let def = &r.types[*id];
            check(format!("{name}: type {t}"), &def.docs);
            match &def.kind {
                TypeDefKind::Variant(v) => {
                    v.cases.iter().for_each(|c| check(format!("{name}: case {}.{}", t, c.name), &c.docs));
                }
                // A byte list says its length and its content, an option what its absence means; other fields may speak for
                // themselves.
                TypeDefKind::Record(rec) => {
                    for f in &rec.fields {
                        let shape = shape(r, &f.ty);
                        if shape.contains("list<u8>") || shape.starts_with("option<") {
                            check(format!("{name}: field {}.{}", t, f.name), &f.docs);
                        }
                    }
                }
                _ => {}
            }
        }
    }
    all
}

/// Items whose stability is not written as their package's rule says.
fn unstamped(r: &Resolve) -> Vec<String> {
    let mut all = Vec::new();
    for (id, i) in r.interfaces.iter() {
        let name = label(r, id);
        let (package, _) = name.split_once('/').unwrap_or((&name, ""));
        let since =
            |s: &Stability, version: &str| matches!(s, Stability::Stable { since, .. } if since.to_string() == version);
        // Inside a released interface every item is stamped; an unstable one is unstable as a whole.
        let version = match package {
            "neuron:nrt" => "2.0.0",
            "neuron:hw" | "neuron:lifecycle" if matches!(i.stability, Stability::Unstable { .. }) => continue,
            "neuron:hw" | "neuron:lifecycle" => "1.0.0",
            _ => continue,
        };
        let own_types = i.types.iter().filter(|(_, id)| !used(r, **id));
        let stamps = [(String::new(), &i.stability)]
            .into_iter()
            .chain(own_types.map(|(t, id)| (format!(".{t}"), &r.types[*id].stability)))
            .chain(i.functions.iter().map(|(f, def)| (format!(".{f}"), &def.stability)));
        all.extend(
            stamps
                .filter(|(_, s)| !since(s, version))
                .map(|(item, s)| format!("{name}{item} must carry @since(version = {version}), has {s:?}")),
        );
    }
    all
}

/// Whether a list of what `of` names is anywhere inside a type.
fn has_list(r: &Resolve, ty: &Type, of: fn(&Type) -> bool) -> bool {
    let Type::Id(id) = ty else { return false };
    let any = |t: &Option<Type>| t.as_ref().is_some_and(|t| has_list(r, t, of));
    match &r.types[*id].kind {
        TypeDefKind::List(t) | TypeDefKind::FixedLengthList(t, _) if of(t) => true,
        TypeDefKind::Type(t) | TypeDefKind::Option(t) | TypeDefKind::List(t) => has_list(r, t, of),
        TypeDefKind::Record(t) => t.fields.iter().any(|f| has_list(r, &f.ty, of)),
        TypeDefKind::Tuple(t) => t.types.iter().any(|t| has_list(r, t, of)),
        TypeDefKind::Variant(t) => t.cases.iter().any(|c| any(&c.ty)),
        TypeDefKind::Result(t) => any(&t.ok) || any(&t.err),
        TypeDefKind::FixedLengthList(t, _) => has_list(r, t, of),
        _ => false,
    }
}

/// Functions with such a list, by (interface, function).
fn list_functions(r: &Resolve, of: fn(&Type) -> bool) -> Vec<(String, String)> {
    let mut all = Vec::new();
    for (id, i) in r.interfaces.iter() {
        for (name, f) in &i.functions {
            if f.params.iter().map(|p| &p.ty).chain(&f.result).any(|t| has_list(r, t, of)) {
                all.push((label(r, id), name.clone()));
            }
        }
    }
    all
}

/// Functions with a byte list.
fn byte_functions(r: &Resolve) -> Vec<(String, String)> {
    list_functions(r, |t| *t == Type::U8)
}

/// What is wrong between the contracts' byte lists and the host's table of limits.
fn byte_list_faults(r: &Resolve, table: &[(&str, &str, u64)]) -> Vec<String> {
    let mut all = Vec::new();
    let mut hit = BTreeSet::new();
    for (interface, function) in byte_functions(r) {
        // The first row that matches decides, as in `limits::byte_list`.
        let row = table.iter().position(|(i, f, _)| interface.starts_with(i) && (*f == "*" || *f == function));
        match row {
            Some(row) => {
                hit.insert(row);
            }
            None => all.push(format!("{interface}.{function} has a byte list, and limits::BYTE_LISTS no limit for it")),
        }
    }
    for (i, row) in table.iter().enumerate() {
        if !hit.contains(&i) {
            all.push(format!("no function needs the row {row:?} of limits::BYTE_LISTS"));
        }
        let whole = r.interfaces.iter().any(|(id, _)| label(r, id) == row.0);
        let package = PACKAGES.iter().any(|(p, _)| *p == row.0);
        if !whole && !package {
            all.push(format!("the row {row:?} of limits::BYTE_LISTS names neither an interface nor a package"));
        }
        if row.2 == 0 {
            all.push(format!("the row {row:?} of limits::BYTE_LISTS allows nothing"));
        }
    }
    all
}

/// Imports and exports of a world, with versions.
fn world(r: &Resolve, name: &str) -> (BTreeSet<String>, BTreeSet<String>) {
    let (_, w) = r.worlds.iter().find(|(_, w)| w.name == name).unwrap_or_else(|| panic!("there is no world {name}"));
    let names = |map: &mut dyn Iterator<Item = (&WorldKey, &WorldItem)>| -> BTreeSet<String> {
        map.map(|(key, item)| match item {
            WorldItem::Interface { id, .. } => r.id_of(*id).unwrap_or_default(),
            _ => format!("not an interface: {}", r.name_world_key(key)),
        })
        .collect()
    };
    (names(&mut w.imports.iter()), names(&mut w.exports.iter()))
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|n| n.to_string()).collect()
}

fn hw(names: &[&str]) -> Vec<String> {
    names.iter().map(|n| format!("neuron:hw/{n}@1.0.0")).collect()
}

#[test]
fn names_become_kebab_names() {
    for (original, kebabed) in
        [("getMrKey", "get-mr-key"), ("neuronNetRegMrOG", "neuron-net-reg-mr-og"), ("a_b", "a-b")]
    {
        assert_eq!(kebab(original), kebabed);
    }
}

#[test]
fn packages_and_versions_are_the_agreed_ones() {
    let r = contracts();
    let found: BTreeSet<(String, Option<String>)> = r
        .packages
        .iter()
        .map(|(_, p)| (format!("{}:{}", p.name.namespace, p.name.name), p.name.version.as_ref().map(|v| v.to_string())))
        .collect();
    let agreed = PACKAGES.iter().map(|(n, v)| (n.to_string(), v.map(str::to_string))).collect();
    assert_eq!(found, agreed);
    // One file a package, and every file is in the list.
    let on_disk: BTreeSet<String> = std::fs::read_dir(wit())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|dir| dir != "history")
        .collect();
    assert_eq!(on_disk, FILES.iter().map(|f| f.split('/').next().unwrap().to_string()).collect());
}

#[test]
fn the_collectives_are_the_37_in_slot_order() {
    let r = contracts();
    let exported = functions(&r, "neuron:nccom/collectives");
    assert_eq!(exported.len(), 37);
    for (slot, (original, export)) in ENTRIES.iter().enumerate() {
        assert_eq!(exported[slot], *export, "slot {slot}");
        assert_eq!(kebab(original), *export, "slot {slot}");
        assert_eq!((entries::ORIGINALS[slot], entries::NAMES[slot]), (*original, *export), "slot {slot}");
    }
    // All but the probe answer a status.
    let interface = &r.interfaces[find(&r, "neuron:nccom/collectives")];
    for (slot, f) in interface.functions.values().enumerate() {
        let result = f.result.as_ref().map_or(String::new(), |t| shape(&r, t));
        let fallible = result.starts_with("result<") && result.ends_with(", neuron:nrt/types.nrt-status>");
        assert_eq!(fallible, slot != 0, "slot {slot} returns {result}");
    }
}

#[test]
fn the_collectives_define_no_resource() {
    let r = contracts();
    let own = &r.interfaces[find(&r, "neuron:nccom/collectives")];
    let resources: Vec<&String> = own
        .types
        .iter()
        .filter(|(_, id)| matches!(r.types[**id].kind, TypeDefKind::Resource))
        .map(|(n, _)| n)
        .collect();
    assert_eq!(resources, Vec::<&String>::new());
    assert!(own.functions.values().all(|f| matches!(f.kind, FunctionKind::Freestanding)));
}

#[test]
fn the_callbacks_are_16_and_4_in_order() {
    let r = contracts();
    let (nec, nrt) = (functions(&r, "neuron:nrt/nec"), functions(&r, "neuron:nrt/nrt"));
    assert_eq!((nec.len(), nrt.len()), (16, 4));
    let served = nec.iter().map(|f| ("neuron:nrt/nec", f)).chain(nrt.iter().map(|f| ("neuron:nrt/nrt", f)));
    for (i, (interface, function)) in served.enumerate() {
        assert_eq!(*function, kebab(RETURNS[i].0), "callback {i}");
        assert_eq!((interface, function.as_str()), CALLBACKS[i], "callback {i}");
    }
    assert_eq!(functions(&r, "neuron:nrt/types"), Vec::<String>::new());
}

/// Proves INV-11.
#[test]
fn each_callback_returns_what_its_original_returns() {
    let r = contracts();
    let mut with_status = 0;
    for (i, (original, returns)) in RETURNS.iter().enumerate() {
        let (interface, function) = CALLBACKS[i];
        let def = &r.interfaces[find(&r, interface)].functions[function];
        let shape = def.result.as_ref().map_or(String::new(), |t| shape(&r, t));
        let status = shape.starts_with("result<") && shape.ends_with(", neuron:nrt/types.nrt-status>");
        if *returns == "status" {
            with_status += 1;
            assert!(status, "{original} returns NRT_STATUS, its import {shape}");
        } else {
            assert_eq!(shape, *returns, "{original}");
            assert!(!shape.contains("nrt-status"), "{original}");
        }
    }
    assert_eq!(with_status, 6);
}

/// Proves INV-19.
#[test]
fn no_function_of_the_algorithm_engine_crosses() {
    let r = contracts();
    let (imports, exports) = world(&r, "transport");
    let crossing = |names: &BTreeSet<String>, package: &str| -> Vec<String> {
        let of_package = names.iter().filter(|n| n.starts_with(package));
        of_package.flat_map(|n| functions(&r, n.split('@').next().unwrap())).collect()
    };
    let (forward, reverse) = (crossing(&exports, "neuron:nccom"), crossing(&imports, "neuron:nrt"));
    assert_eq!((forward.len(), reverse.len()), (37, 20));
    assert!(forward.iter().all(|n| n.starts_with("neuron-")), "{forward:?}");
    assert!(reverse.iter().all(|n| n.starts_with("nec-") || n.starts_with("nrt-")), "{reverse:?}");
    // What else is imported or exported are host services of our own, under other names.
    for (id, i) in r.interfaces.iter() {
        for name in i.functions.keys() {
            let local = ["enc-", "encd-", "nec-vil-", "nec-get-version-info"];
            assert!(!local.iter().any(|p| name.starts_with(p)), "{}.{name} is local to the runtime", label(&r, id));
        }
    }
}

/// Proves INV-91.
#[test]
fn the_net_table_has_the_order_of_the_original() {
    let r = contracts();
    let v6 = functions(&r, "nccl:net/nccl-net-plugin-v6");
    assert_eq!(v6, NET_V6.map(kebab));
    let interface = &r.interfaces[find(&r, "nccl:net/nccl-net-plugin-v6")];
    let byte = |name: &str| 8 * v6.iter().position(|f| f == name).unwrap();
    assert_eq!((byte("init"), byte("devices")), (8, 24));
    // Each entry's comment says position and byte.
    for (position, f) in interface.functions.values().enumerate() {
        let docs = f.docs.contents.clone().unwrap_or_default();
        let says = format!("{position}, byte {}", 8 * position);
        assert!(docs == says || docs.starts_with(&format!("{says}:")), "{}: {docs}", f.name);
    }
}

/// Proves INV-92.
#[test]
fn the_older_net_tables_are_shorter() {
    let r = contracts();
    let list = |version: u32| functions(&r, &format!("nccl:net/nccl-net-plugin-v{version}"));
    let (v6, v5, v4) = (list(6), list(5), list(4));
    assert_eq!((v6.len(), v5.len(), v4.len()), (22, 21, 16));
    assert_eq!(v6.iter().filter(|n| *n != "fini").collect::<Vec<_>>(), v5.iter().collect::<Vec<_>>());
    for (slot, name) in v6.iter().enumerate().skip(3) {
        assert_eq!(&v5[slot - 1], name, "v5 has everything after fini one slot lower");
    }
    let kept: Vec<&String> = v5.iter().filter(|n| !NOT_IN_V4.iter().any(|x| kebab(x) == **n)).collect();
    assert_eq!(kept, v4.iter().collect::<Vec<_>>());
    // v5 and v6 have the same calls; v4 shares the registrations.
    let of = |version: u32, name: &str| {
        signature(&r, &r.interfaces[find(&r, &format!("nccl:net/nccl-net-plugin-v{version}"))].functions[name])
    };
    v5.iter().for_each(|name| assert_eq!(of(5, name), of(6, name), "{name}"));
    for name in ["reg-mr", "dereg-mr"] {
        assert_eq!(of(4, name), of(6, name), "{name}");
    }
    let (_, exports) = world(&r, "net-plugin-legacy");
    let tables = [6, 5, 4].map(|v| format!("nccl:net/nccl-net-plugin-v{v}"));
    assert_eq!(exports, tables.into_iter().collect());
}

#[test]
fn statuses_are_the_28_and_any_other() {
    let r = contracts();
    let TypeDefKind::Variant(v) = &r.types[r.interfaces[find(&r, "neuron:nrt/types")].types["nrt-status"]].kind else {
        panic!("nrt-status is a variant");
    };
    assert_eq!(v.cases.len(), 29);
    assert_eq!(Status::ALL.map(|s| s.0), STATUSES.map(|s| s.0));
    for (case, (number, name)) in v.cases.iter().zip(STATUSES) {
        assert_eq!((case.name.as_str(), case.ty), (kebab(name).as_str(), None));
        let docs = case.docs.contents.clone().unwrap_or_default();
        let says = format!("{number} NRT_{name}");
        assert!(docs == says || docs.starts_with(&format!("{says}:")), "{}: {docs}", case.name);
        assert_eq!(Status(number).name(), format!("NRT_{name}"));
    }
    assert_eq!((v.cases[28].name.as_str(), v.cases[28].ty), ("other", Some(Type::U32)));
}

/// Proves INV-14.
#[test]
fn zero_means_ring_and_default_connectivity_is_two() {
    let r = contracts();
    let cases = |interface: &str, name: &str| -> Vec<String> {
        let TypeDefKind::Enum(e) = &r.types[r.interfaces[find(&r, interface)].types[name]].kind else {
            panic!("{name} is an enum");
        };
        e.cases.iter().map(|c| c.name.clone()).collect()
    };
    let collectives = "neuron:nccom/collectives";
    assert_eq!(cases(collectives, "enc-pattern"), ["ring", "mesh", "invalid"]);
    assert_eq!(cases(collectives, "net-connectivity"), ["mesh", "rdh", "default"]);
    assert_eq!(cases(collectives, "net-addr-mark"), ["net-transfer", "net-op-complete", "exec-complete"]);
    assert_eq!(
        cases(collectives, "ofi-comm-type"),
        ["net-send-comm", "net-recv-comm", "net-recv-listen-comm", "local-recv-comm", "local-send-comm"]
    );
    assert_eq!(cases("neuron:nrt/types", "nec-pod-type"), ["none", "p2p", "switch", "invalid"]);
    // And so in the code that both sides are built from.
    assert_eq!((bound::EncPattern::Ring as u32, bound::NetConnectivity::Default as u32), (0, 2));
    assert_eq!((bound::NetConnectivity::Mesh as u32, bound::NetAddrMark::ExecComplete as u32), (0, 2));
    assert_eq!(NecPodType::Switch as u32, 2);
}

#[test]
fn every_item_is_documented() {
    assert_eq!(undocumented(&contracts()), Vec::<String>::new());
    let broken = edited_contract("nrt.wit", "    /// 2 NRT_INVALID: bad argument\n", "");
    assert_eq!(undocumented(&broken), ["neuron:nrt/types: case nrt-status.invalid"]);
    let broken = edited_contract("nccom.wit", "  /// 6 neuronFreeComm: forget the plan of this communicator\n", "");
    assert_eq!(undocumented(&broken), ["neuron:nccom/collectives: function neuron-free-comm"]);
}

#[test]
fn every_item_says_since_when_it_is_there() {
    assert_eq!(unstamped(&contracts()), Vec::<String>::new());
    let broken =
        edited_contract("nrt.wit", "  @since(version = 2.0.0)\n  nec-is-mla-available", "  nec-is-mla-available");
    let all = unstamped(&broken);
    assert!(all.len() == 1 && all[0].starts_with("neuron:nrt/nec.nec-is-mla-available must carry"), "{all:?}");
    let broken = edited_contract("hw.wit", "@unstable(feature = hw)\ninterface random", "interface random");
    let all = unstamped(&broken);
    assert!(all.len() == 2 && all[0].starts_with("neuron:hw/random must carry"), "{all:?}");
}

#[test]
fn every_byte_list_has_a_limit_and_every_limit_a_byte_list() {
    let r = contracts();
    assert_eq!(byte_list_faults(&r, limits::BYTE_LISTS), Vec::<String>::new());
    // The look-up of the host answers for the same functions.
    for (interface, function) in byte_functions(&r) {
        assert!(limits::byte_list(&interface, &function).is_some(), "{interface}.{function}");
    }
    // Bytes inside a record inside a list are found, and so is a row that nobody needs.
    let broken = edited_contract(
        "hw.wit",
        "  nics: func() -> list<nic>;",
        "  record raw { inner: option<list<u8>> }\n  nics: func() -> list<raw>;",
    );
    let all = byte_list_faults(&broken, limits::BYTE_LISTS);
    assert!(all.len() == 1 && all[0].starts_with("neuron:hw/pci.nics has a byte list"), "{all:?}");
    let mut table = vec![("neuron:hw/clock", "*", 1)];
    table.extend(limits::BYTE_LISTS);
    let all = byte_list_faults(&r, &table);
    assert!(all.len() == 1 && all[0].starts_with("no function needs the row (\"neuron:hw/clock\""), "{all:?}");
}

#[test]
fn worlds_import_and_export_what_they_should() {
    let r = contracts();
    let mut imports = set(&["neuron:nrt/types@2.0.0", "neuron:nrt/nec@2.0.0", "neuron:nrt/nrt@2.0.0"]);
    imports.extend(hw(&[
        "objects",
        "links",
        "sockets",
        "rendezvous",
        "tasks",
        "net",
        "proxy",
        "identity",
        "pci",
        "affinity",
        "config",
        "files",
        "clock",
        "random",
        "log",
    ]));
    let mut exports = set(&["neuron:nccom/collectives", "neuron:hw/task-entry@1.0.0"]);
    assert_eq!(world(&r, "transport"), (imports.clone(), exports.clone()));
    exports.insert("neuron:lifecycle/lifecycle@1.0.0".into());
    assert_eq!(world(&r, "transport-swappable"), (imports, exports));

    // The two packages' types come with what uses them.
    let mut imports = set(&["neuron:nrt/types@2.0.0", "nccl:net/types"]);
    imports.extend(hw(&["objects", "fabric", "pci", "config", "clock", "log"]));
    assert_eq!(world(&r, "net-plugin"), (imports.clone(), set(&["nccl:net/nccl-net-plugin-v6"])));
    assert_eq!(world(&r, "net-plugin-legacy").0, imports);
    assert_eq!(r.worlds.len(), 4);
}

#[test]
fn the_host_serves_what_the_worlds_import() {
    let r = contracts();
    let name = |s: &ServedInterface| {
        let (a, b, c) = s.version;
        format!("{}@{a}.{b}.{c}", s.name)
    };
    let served: BTreeSet<String> = TRANSPORT.iter().map(name).collect();
    assert_eq!(served, world(&r, "transport").0);
    for s in TRANSPORT.iter().chain(NET) {
        assert_eq!(s.types_only, functions(&r, s.name).is_empty(), "{}", s.name);
    }
    // Of what a net plug-in calls, only the fabric is declared and not served yet.
    let calls: BTreeSet<String> = world(&r, "net-plugin")
        .0
        .into_iter()
        .filter(|n| !functions(&r, n.split('@').next().unwrap()).is_empty())
        .collect();
    let served: BTreeSet<String> = NET.iter().filter(|s| !s.types_only).map(name).collect();
    assert_eq!(calls.difference(&served).collect::<Vec<_>>(), ["neuron:hw/fabric@1.0.0"]);
    assert_eq!(served.difference(&calls).count(), 0);
}

#[test]
fn released_packages_have_not_changed() {
    let changed = drift(&released(), &contracts());
    assert!(
        changed.is_empty(),
        "a released package never changes, because plugins are out there that were built against it. Undo this, or put what \
         is new under a new version beside the old one and freeze that under wit/history/:\n  {}",
        changed.join("\n  ")
    );
    let frozen: BTreeSet<String> = std::fs::read_dir(wit().join("history"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|f| f.ends_with(".wit"))
        .collect();
    assert_eq!(frozen, set(&RELEASED), "a released file is compared only if this test names it");
}

#[test]
fn a_change_of_a_released_package_is_seen() {
    let old = released();
    let edits = [
        // A case that goes, fields and cases that change places, types, parameters, results, names, additions.
        ("nrt.wit", "    /// 7 NRT_QUEUE_FULL\n    queue-full,\n", "", "neuron:nrt/types: type nrt-status was variant"),
        (
            "nrt.wit",
            "    bus: u32,\n    slot: u8,",
            "    slot: u8,\n    bus: u32,",
            "neuron:nrt/types: type pci-bdf was record",
        ),
        (
            "nrt.wit",
            "func(neuron-dev: s32)",
            "func(neuron-dev: u32)",
            "neuron:nrt/nec: function nec-get-device-pci-bdf was",
        ),
        (
            "nrt.wit",
            "nec-get-virtual-core-size: func() -> result<u32",
            "nec-get-virtual-core-size: func() -> result<u64",
            "size was func() -> result<u32,",
        ),
        (
            "nccom.wit",
            "{ ring, mesh, invalid }",
            "{ mesh, ring, invalid }",
            "neuron:nccom/collectives: type enc-pattern was enum { ring",
        ),
        ("nccom.wit", "neuron-free-comm:", "neuron-drop-comm:", "function neuron-free-comm is gone"),
        (
            "nccom.wit",
            "neuron-net-dereg-mr-og: func(comm: borrow<net-comm>, mhandle: registration)",
            "neuron-net-dereg-mr-og: func(comm: borrow<net-comm>, mhandle: borrow<registration>)",
            "borrow<neuron:hw/objects.registration>",
        ),
        ("nccom.wit", "package neuron:nccom;", "package neuron:nccom@1.0.0;", "neuron:nccom: the version was None"),
        (
            "net.wit",
            "  /// 3, byte 24\n",
            "  extra: func();\n  /// 3, byte 24\n",
            "nccl:net/nccl-net-plugin-v6: function extra is new",
        ),
        (
            "hw.wit",
            "    id: func() -> u64;",
            "    id: func() -> u32;",
            "neuron:hw/objects: function [method]communicator.id was method",
        ),
        (
            "hw.wit",
            "    create: static func(rank: s32, ",
            "    create: static func(rang: s32, ",
            "[static]communicator.create was static",
        ),
    ];
    for (file, from, to, says) in edits {
        // Without the worlds, which would not resolve with some of the edits.
        let found = drift(&old, &edited(&FILES[..4], "", file, from, to));
        assert!(!found.is_empty() && found.iter().any(|f| f.contains(says)), "{file}: {from} -> {to}: {found:?}");
    }
    // Order alone.
    let swapped = edited_contract(
        "net.wit",
        "  /// 15, byte 120\n  close-send: func(send-comm: u64) -> result<_, nccl-error>;\n  /// 16, byte 128\n  close-recv: func(recv-comm: u64) -> result<_, nccl-error>;\n",
        "  /// 16, byte 128\n  close-recv: func(recv-comm: u64) -> result<_, nccl-error>;\n  /// 15, byte 120\n  close-send: func(send-comm: u64) -> result<_, nccl-error>;\n",
    );
    let found = drift(&old, &swapped);
    assert!(found.len() == 1 && found[0].contains("the order is now"), "{found:?}");
    // Comments are free, and so is what was not released.
    let free = edited_contract("nrt.wit", "    /// 5 NRT_TIMEOUT\n", "    /// 5 NRT_TIMEOUT: it took too long\n");
    assert_eq!(drift(&old, &free), Vec::<String>::new());
    let free = edited_contract("hw.wit", "  get-u64: func() -> u64;", "  get-u64: func() -> s64;");
    assert_eq!(drift(&old, &free), Vec::<String>::new());
}

/// What each function that carries numbers in bulk carries. None of it is a tensor's content: that is neither here nor behind a
/// resource, since those that stand for memory have no function. A new row is to say the same of its own.
const IN_BULK: &[(&str, &str)] = &[
    ("neuron:nrt/nec.nec-get-device-count", "numbers of devices"),
    ("neuron:nrt/nec.nec-build-port-and-rid-map", "numbers of devices"),
    ("neuron:hw/links.offer", "the connect record of a link, which names memory"),
    ("neuron:hw/links.connect", "the connect record of a link, which names memory"),
    ("neuron:hw/sockets.interfaces", "addresses"),
    ("neuron:hw/sockets.resolve", "addresses"),
    ("neuron:hw/sockets.listen", "an address"),
    ("neuron:hw/sockets.local-address", "an address"),
    ("neuron:hw/sockets.accept", "an address"),
    ("neuron:hw/sockets.connect", "an address"),
    ("neuron:hw/sockets.send", "what plugins say to one another"),
    ("neuron:hw/sockets.recv", "what plugins say to one another"),
    ("neuron:hw/rendezvous.publish", "a key and an address"),
    ("neuron:hw/rendezvous.lookup", "a key and an address"),
    ("neuron:hw/tasks.spawn", "the plugin's own state"),
    ("neuron:hw/task-entry.run", "the plugin's own state"),
    ("neuron:hw/proxy.start", "records of a proxy: ids of objects, addresses"),
    ("neuron:hw/affinity.get", "a mask of CPUs"),
    ("neuron:hw/affinity.set", "a mask of CPUs"),
    ("neuron:hw/affinity.local", "a mask of CPUs"),
    ("neuron:hw/files.read", "a file of the program's"),
    ("neuron:hw/files.write", "a file of the program's"),
    ("neuron:nccom/collectives.neuron-get-version-info", "a hash of sources"),
    ("neuron:nccom/collectives.neuron-get-unique-id", "an id"),
    ("neuron:nccom/collectives.neuron-init-comm", "an id"),
    ("neuron:nccom/collectives.neuron-get-comm-info", "ranks in their order"),
    ("neuron:nccom/collectives.neuron-bootstrap-send", "what hosts say to one another through their plugins"),
    ("neuron:nccom/collectives.neuron-bootstrap-recv", "what hosts say to one another through their plugins"),
    ("neuron:nccom/collectives.neuron-bootstrap-all-gather", "what hosts say to one another through their plugins"),
    ("neuron:nccom/collectives.neuron-set-affinity", "a mask of CPUs"),
    ("neuron:nccom/collectives.neuron-net-listen", "the handle of a listener"),
    ("neuron:nccom/collectives.neuron-net-connect", "the handle of a listener"),
    ("nccl:net/nccl-net-plugin-v6.listen", "the handle of a listener"),
    ("nccl:net/nccl-net-plugin-v6.connect", "the handle of a listener"),
    ("nccl:net/nccl-net-plugin-v5.listen", "the handle of a listener"),
    ("nccl:net/nccl-net-plugin-v5.connect", "the handle of a listener"),
    ("nccl:net/nccl-net-plugin-v4.listen", "the handle of a listener"),
    ("nccl:net/nccl-net-plugin-v4.connect", "the handle of a listener"),
    ("neuron:lifecycle/lifecycle.describe", "numbers of schemas"),
    ("neuron:lifecycle/lifecycle.export-state", "the plugin's own state"),
    ("neuron:lifecycle/lifecycle.import-state", "the plugin's own state"),
];

#[test]
fn no_function_carries_the_content_of_device_memory() {
    let bulk =
        |r: &Resolve| -> Vec<(String, String)> { list_functions(r, |t| !matches!(t, Type::Id(_) | Type::String)) };
    let unknown = |r: &Resolve| -> Vec<String> {
        let names = bulk(r).into_iter().map(|(interface, function)| format!("{interface}.{function}"));
        names.filter(|n| !IN_BULK.iter().any(|row| row.0 == n)).collect()
    };
    let r = contracts();
    assert_eq!(unknown(&r), Vec::<String>::new());
    assert_eq!(bulk(&r).len(), IN_BULK.len());
    let of_resources = |r: &Resolve| -> Vec<String> {
        let all = r.interfaces.iter().flat_map(|(_, i)| i.functions.values());
        all.filter(|f| !matches!(f.kind, FunctionKind::Freestanding)).map(|f| f.name.clone()).collect()
    };
    let harmless = ["[static]communicator.create", "[method]communicator.id", "[method]connector.duplicate"];
    assert_eq!(of_resources(&r), harmless);
    // What would read or write a tensor is seen, however it is put.
    let more = |what: &str| {
        edited_contract("hw.wit", "  nics: func() -> list<nic>;", &format!("  nics: func() -> list<nic>;\n  {what}"))
    };
    for what in ["load: func(at: u64) -> result<list<f32>>;", "load: func(at: u64, data: list<u16>);"] {
        assert_eq!(unknown(&more(what)), ["neuron:hw/pci.load"]);
    }
    assert_eq!(of_resources(&more("resource memory { read: func(at: u64) -> u64; }")).len(), harmless.len() + 1);
}
