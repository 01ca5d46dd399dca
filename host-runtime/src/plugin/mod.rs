//! Plugins: reading, verifying, compiling, caching and instantiating components; limits; traps.
//!
//! Words that are easily mixed up: a *plugin* is a file; a [`Library`] is a plugin that was compiled and whose imports
//! this host serves; an [`Instance`] is a library in a store of its own, the unit of failure, of limits and of swapping.

pub mod cache;
pub mod check;
pub mod engine;
mod instance;
pub mod state;

use std::path::Path;
use std::sync::Arc;

use wasmtime::component::types::ComponentItem;
use wasmtime::component::{Component, ComponentExportIndex, InstancePre, Linker};

pub use instance::{Instance, Stop};
pub use state::HostState;

use crate::limits::MAX_PLUGIN_BYTES;
use check::ServedInterface;

/// A compiled plugin whose imports are served. Shared by all its instances.
pub struct Library {
    /// File name, for messages.
    pub name: String,
    /// SHA-256 of the file, in hex.
    pub digest: String,
    /// Bytes of the file.
    pub bytes: u64,
    component: Component,
    pre: InstancePre<HostState>,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").field("name", &self.name).field("digest", &self.digest).finish_non_exhaustive()
    }
}

/// What kind of plugin a file is loaded as; decides what it may import.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A libnccom.
    Transport,
    /// A libnccom-net.
    Net,
}

/// Reads a plugin file, within the size limit.
pub fn read(path: &Path) -> Result<Vec<u8>, String> {
    let file = std::fs::File::open(path).map_err(|e| format!("it cannot be opened: {e}"))?;
    let len = file.metadata().map_err(|e| format!("it cannot be inspected: {e}"))?.len();
    if len > MAX_PLUGIN_BYTES {
        return Err(format!("it has {len} bytes, more than the {MAX_PLUGIN_BYTES} a plugin may have"));
    }
    let mut bytes = Vec::new();
    use std::io::Read;
    file.take(MAX_PLUGIN_BYTES + 1).read_to_end(&mut bytes).map_err(|e| format!("it cannot be read: {e}"))?;
    Ok(bytes)
}

impl Library {
    /// Compiles `bytes` (or takes the compiled form from the cache), compares its imports with what this host serves, and
    /// links. `without` names callbacks this host does not serve. The error is a sentence without the plugin's name.
    pub fn link(name: &str, bytes: &[u8], kind: Kind, without: &[String]) -> Result<Arc<Library>, String> {
        let engine = engine::engine()?;
        match bytes.get(..8) {
            Some([0, b'a', b's', b'm', 0x0d, 0, 1, 0]) => {}
            Some([0, b'a', b's', b'm', 1, 0, 0, 0]) => {
                return Err("it is a core module, not a component: make a component of it (wit-component, or \
                            `cargo xtask guests`)"
                    .into());
            }
            _ => return Err("it is not a WebAssembly component".into()),
        }
        let component = cache::compile(engine, bytes).map_err(|e| format!("it does not compile: {e:#}"))?;
        let interfaces: &[ServedInterface] = if kind == Kind::Net { check::NET } else { check::TRANSPORT };
        check::imports(engine, &component, interfaces, without)?;
        let mut linker = Linker::new(engine);
        crate::hw::add_to_linker(&mut linker).map_err(|e| format!("the host's own functions do not link: {e:#}"))?;
        let pre = linker.instantiate_pre(&component).map_err(|e| {
            format!("an import has another type than this host serves: {e:#}; rebuild the plugin against wit/ of this release")
        })?;
        let digest = cache::content_hash(bytes);
        Ok(Arc::new(Library { name: name.to_string(), digest, bytes: bytes.len() as u64, component, pre }))
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
        let (full, _) = ty.exports(engine).find(|(n, _)| check::split_version(n).0 == name)?;
        self.component.get_export_index(None, full)
    }

    /// A function of an exported interface, by name.
    pub(crate) fn function(&self, interface: &ComponentExportIndex, name: &str) -> Option<ComponentExportIndex> {
        let (item, index) = self.component.get_export(Some(interface), name)?;
        matches!(item, ComponentItem::ComponentFunc(_)).then_some(index)
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
