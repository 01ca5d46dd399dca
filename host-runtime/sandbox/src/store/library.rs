//! A compiled plugin whose imports are served.

use std::sync::{Arc, OnceLock};

use wasmtime::component::types::ComponentItem;
use wasmtime::component::{Component, ComponentExportIndex, InstancePre};

use super::{Grant, HostState};
use crate::served::split_version;

/// A compiled plugin whose imports are served. Shared by all its instances.
pub struct Library {
    /// File name, for messages; fit for a line.
    pub name: String,
    /// SHA-256 of the file, in hex.
    pub digest: String,
    /// Bytes of the file.
    pub bytes: u64,
    /// What its instances may do.
    pub grant: Arc<Grant>,
    pub(crate) component: Arc<Component>,
    pub(crate) pre: InstancePre<HostState>,
    /// The 37 entries, once the gate was passed. Indices are the component's own: they stand here so that an instance is
    /// only ever called through those of its library.
    pub(crate) slots: OnceLock<[ComponentExportIndex; 37]>,
    /// What the probe answered, in words.
    pub(crate) version: OnceLock<String>,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").field("name", &self.name).field("digest", &self.digest).finish_non_exhaustive()
    }
}

impl Library {
    /// Its version, once the probe was asked; empty before.
    pub fn version(&self) -> &str {
        self.version.get().map_or("", String::as_str)
    }

    /// Notes the version; the first time counts.
    pub(crate) fn set_version(&self, numbers: [u64; 4]) {
        let [major, minor, patch, maintenance] = numbers;
        let _ = self.version.set(format!("{major}.{minor}.{patch}.{maintenance}"));
    }

    /// Imports by name, each with its functions.
    pub fn imports(&self) -> Vec<(String, Vec<String>)> {
        let engine = self.component.engine();
        let ty = self.component.component_type();
        ty.imports(engine).map(|(name, item)| (name.to_string(), functions(engine, &item.ty))).collect()
    }

    /// Exports by name, each with its functions.
    pub fn exports(&self) -> Vec<(String, Vec<String>)> {
        let engine = self.component.engine();
        let ty = self.component.component_type();
        ty.exports(engine).map(|(name, item)| (name.to_string(), functions(engine, &item.ty))).collect()
    }

    /// The exported interface `name`, whatever version is written on it.
    pub(crate) fn exported(&self, name: &str) -> Option<ComponentExportIndex> {
        let engine = self.component.engine();
        let ty = self.component.component_type();
        let (full, _) = ty.exports(engine).find(|(n, _)| split_version(n).0 == name)?;
        self.component.get_export_index(None, full)
    }

    /// A function of an exported interface, by name.
    pub(crate) fn function(&self, interface: &ComponentExportIndex, name: &str) -> Option<ComponentExportIndex> {
        let (item, index) = self.component.get_export(Some(interface), name)?;
        matches!(item, ComponentItem::ComponentFunc(_)).then_some(index)
    }

    /// Notes the 37 entries; the first time counts.
    pub(crate) fn set_slots(&self, slots: [ComponentExportIndex; 37]) {
        // A library is resolved once, by the loader that made it.
        let _ = self.slots.set(slots);
    }

    /// The entry of slot `slot`; absent in a library that has not passed the gate.
    pub(crate) fn slot(&self, slot: usize) -> Option<&ComponentExportIndex> {
        self.slots.get()?.get(slot)
    }

    pub(crate) fn pre(&self) -> &InstancePre<HostState> {
        &self.pre
    }
}

fn functions(engine: &wasmtime::Engine, item: &ComponentItem) -> Vec<String> {
    match item {
        ComponentItem::ComponentInstance(i) => i
            .exports(engine)
            .filter(|(_, item)| matches!(item.ty, ComponentItem::ComponentFunc(_)))
            .map(|(name, _)| name.to_string())
            .collect(),
        _ => Vec::new(),
    }
}
