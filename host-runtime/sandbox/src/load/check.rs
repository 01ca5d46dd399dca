//! Our own link diagnostics: before the engine links anything, every import is compared with what this host serves, and
//! a mismatch is one sentence that names plugin, interface, version wanted, versions served, and what to do.
//!
//! Version rule (stricter than the engine's, as ELF is): same major, wanted minor at most the served one; an import
//! without a version satisfies nothing that is served with one (INV-02).

use std::collections::BTreeSet;

use wasmtime::Engine;
use wasmtime::component::Component;
use wasmtime::component::types::ComponentItem;

use crate::load::PluginKind;
use crate::served::{CALLBACKS, NET, NET_TYPES, Numbers, ServedInterface, TRANSPORT, WASI, split_version};
use crate::store::Denied;

/// Compares all imports of `component` with what this host serves to that kind of plugin, less the callbacks in `without`
/// (tests take single ones away, INV-08) and with what is granted of WASI.
pub(super) fn imports(
    engine: &Engine,
    component: &Component,
    kind: PluginKind,
    without: &[String],
    wasi: &BTreeSet<String>,
) -> Result<(), Denied> {
    imports_of(engine, component, kind, if kind == PluginKind::Net { NET } else { TRANSPORT }, without, wasi)
}

/// The same with what is served as a list, which may have several versions of one interface: a host that adds one serves the
/// others as before (INV-09).
fn imports_of(
    engine: &Engine,
    component: &Component,
    kind: PluginKind,
    interfaces: &[ServedInterface],
    without: &[String],
    wasi: &BTreeSet<String>,
) -> Result<(), Denied> {
    for (import, item) in component.component_type().imports(engine) {
        let (name, version, text) = split_version(import);
        // The types that the exported tables of a net plug-in share; the package has no version, and nothing is called.
        if kind == PluginKind::Net && import == NET_TYPES {
            continue;
        }
        if name.starts_with("wasi:") {
            let served = wasi.contains(name) && matches!(version, Some((0, 2, _)));
            if served {
                continue;
            }
            return Err(Denied { why: ungranted(import, name), limit: Some("wasi.grant") });
        }
        let versions: Vec<Numbers> = interfaces.iter().filter(|s| s.name == name).map(|s| s.version).collect();
        let Some(&(a, b, _)) = versions.first() else {
            return Err(unknown(import, name, interfaces).into());
        };
        let offers: Vec<String> = versions.iter().map(|(a, b, c)| format!("{name}@{a}.{b}.{c}")).collect();
        let offers = offers.join(", ");
        match (version, text) {
            (None, None) => {
                return Err(format!(
                    "it imports `{name}` without a version; this host serves {offers}, and a function under another or no \
                     version does not count (INV-02): build the plugin against wit/ of this release"
                )
                .into());
            }
            (Some((major, minor, _)), _) if versions.iter().any(|(a, b, _)| major == *a && minor <= *b) => {}
            _ => {
                return Err(format!(
                    "it imports `{import}`; this host serves {offers} (same major, minor at most {b}): use a host that \
                     serves it, or a plugin built for {a}.{b}"
                )
                .into());
            }
        }
        let ComponentItem::ComponentInstance(instance) = item.ty else {
            return Err(format!(
                "it imports `{import}` as something that is not an interface: rebuild it against wit/"
            )
            .into());
        };
        for (function, item) in instance.exports(engine) {
            if !matches!(item.ty, ComponentItem::ComponentFunc(_)) {
                continue;
            }
            let is_callback = CALLBACKS.iter().any(|(i, f)| *i == name && *f == function);
            let missing = name.starts_with("neuron:nrt/") && !is_callback || without.iter().any(|w| w == function);
            if missing {
                return Err(format!(
                    "it imports `{function}` of {import}, which this host does not serve; the reverse leg is all or \
                     nothing: one missing callback refuses the plugin before anything of it runs (INV-08)"
                )
                .into());
            }
        }
    }
    Ok(())
}

fn ungranted(import: &str, name: &str) -> String {
    if WASI.contains(&name) {
        format!(
            "it imports `{import}`; WASI is off for transports unless the tenant's policy grants the interface: build the \
             plugin for wasm32-unknown-unknown"
        )
    } else {
        format!(
            "it imports `{import}`, which no policy can grant; of WASI 0.2 this host has {}: build the plugin for \
             wasm32-unknown-unknown",
            WASI.join(", ")
        )
    }
}

fn unknown(import: &str, name: &str, interfaces: &[ServedInterface]) -> String {
    let package = name.split('/').next().unwrap_or(name);
    let same: Vec<&str> = interfaces.iter().map(|s| s.name).filter(|n| n.starts_with(package)).collect();
    if same.is_empty() {
        format!(
            "it imports `{import}`, which nobody serves here; a plugin may import neuron:nrt@2.0.0 and neuron:hw@1.0.0 only"
        )
    } else {
        format!("it imports `{import}`, which nobody serves here; of that package this host serves {}", same.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::served::served;

    #[test]
    fn versions_are_split() {
        assert_eq!(split_version("a:b/c"), ("a:b/c", None, None));
        assert_eq!(split_version("a:b/c@1.2.3"), ("a:b/c", Some((1, 2, 3)), Some("1.2.3")));
        assert_eq!(split_version("a:b/c@1.2.3-rc.1").1, None);
        assert_eq!(split_version("a:b/c@1.2.3.4").1, None);
    }

    /// A host that adds a namespace beside the old one, before or behind it, serves plugins of the old as before; nothing is
    /// asked of the new one, and who wants it is served by that host alone.
    ///
    /// Proves INV-09.
    #[test]
    fn a_host_that_adds_another_namespace_stays_compatible() {
        let engine = crate::store::engine::engine().unwrap();
        let wants = |version: &str| {
            let text = format!(
                "(component (import \"neuron:nrt/nec@{version}\" (instance (export \"nec-get-device-count\" (func)))))"
            );
            Component::new(engine, wat::parse_str(text).unwrap()).unwrap()
        };
        let (old, new) = (wants("2.0.0"), wants("3.0.0"));
        let added = [served("neuron:nrt/nec", (3, 0, 0), false)];
        let (before, behind) = ([&added, TRANSPORT].concat(), [TRANSPORT, &added].concat());
        let loads = |component: &Component, interfaces: &[ServedInterface]| {
            imports_of(engine, component, PluginKind::Transport, interfaces, &[], &BTreeSet::new()).map_err(|d| d.why)
        };
        for host in [TRANSPORT, &before, &behind] {
            assert_eq!(loads(&old, host), Ok(()));
        }
        assert!(loads(&new, TRANSPORT).unwrap_err().contains("this host serves neuron:nrt/nec@2.0.0"));
        for host in [&before, &behind] {
            assert_eq!(loads(&new, host), Ok(()));
        }
    }
}
