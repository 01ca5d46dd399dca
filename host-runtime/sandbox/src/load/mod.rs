//! Plugins: reading, verifying, compiling, caching, linking.

#[expect(unsafe_code, reason = "code that was compiled before and kept is loaded")]
pub mod cache;
pub mod check;
mod cost;
pub mod net;
pub mod signing;
mod source;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use wasmtime::component::{Component, Linker};

pub use source::read;

use crate::limits::Limits;
use crate::store::{Denied, Grant, Library, engine};
use crate::tenant::Tenant;
use crate::text::line;

/// What kind of plugin a file is loaded as; decides what it may import.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PluginKind {
    /// A libnccom.
    Transport,
    /// A libnccom-net.
    Net,
}

/// A plugin file that its tenant may have, read once: the bytes that were checked are those that are compiled.
pub struct Source {
    path: PathBuf,
    bytes: Vec<u8>,
    digest: String,
}

impl Source {
    /// Reads the plugin that a tenant asks for. The error is a sentence without the plugin's name.
    pub fn read(tenant: &Tenant, path: &Path) -> Result<Source, String> {
        let bytes = source::read_for(tenant, path).map_err(|why| line(&why))?;
        let digest = cache::content_hash(&bytes);
        Ok(Source { path: path.into(), bytes, digest })
    }

    /// Where it was read.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its compiled form, if that is in use or kept: as long as the caller has it, a load costs milliseconds and not seconds.
    pub fn compiled(&self) -> Option<Arc<Component>> {
        cache::kept(engine::engine().ok()?, &self.digest)
    }

    /// Compiles and links it, by the one way that there is. The error is a sentence without the plugin's name.
    pub fn load(&self, tenant: &Tenant, kind: PluginKind, without: &[String]) -> Result<Arc<Library>, String> {
        let name =
            self.path.file_name().map_or_else(|| self.path.display().to_string(), |n| n.to_string_lossy().into());
        let linked =
            Library::link_within(&name, &self.bytes, &self.digest, kind, without, Grant::of(tenant), &tenant.limits);
        linked.map_err(|denied| match denied.limit {
            Some(limit) if tenant.policy.is_some() => {
                tenant.counters.refused(limit);
                line(&format!("{} (tenant {})", denied.why, tenant.name))
            }
            _ => line(&denied.why),
        })
    }
}

/// How the sentence begins of a component that is none, or damaged.
pub const DAMAGED: &str = "it does not compile";

/// Compiles a component that costs no more than `limits` allow, or takes the compiled form from the cache. `digest` is its hash.
fn compile(engine: &wasmtime::Engine, bytes: &[u8], digest: &str, limits: &Limits) -> Result<Arc<Component>, Denied> {
    cost::within(bytes, limits)?;
    cache::compile(engine, bytes, digest).map_err(|e| match hw_bridge::os::exhausted::may_make_code() {
        Ok(()) => format!("{DAMAGED}: {e:#}").into(),
        Err(forbidden) => format!("its code cannot be used: {forbidden}").into(),
    })
}

/// Names of all imports, and of all exports, of a component that need not link.
///
/// # Errors
/// A sentence, which begins with [`DAMAGED`] unless it is not compiled for what that would cost.
pub fn names(bytes: &[u8]) -> Result<(Vec<String>, Vec<String>), String> {
    let engine = engine::engine()?;
    let digest = cache::content_hash(bytes);
    let component = compile(engine, bytes, &digest, &Limits::default()).map_err(|denied| line(&denied.why))?;
    let ty = component.component_type();
    let imports = ty.imports(engine).map(|(name, _)| name.to_string()).collect();
    let exports = ty.exports(engine).map(|(name, _)| name.to_string()).collect();
    Ok((imports, exports))
}

impl Library {
    /// Compiles `bytes` (or takes the compiled form from the cache), compares its imports with what this host serves, and
    /// links, as for a tenant without a policy; a manifest counts. `without` names callbacks this host does not serve. The error is a sentence
    /// without the plugin's name.
    pub fn link(name: &str, bytes: &[u8], kind: PluginKind, without: &[String]) -> Result<Arc<Library>, String> {
        let digest = cache::content_hash(bytes);
        Library::link_within(name, bytes, &digest, kind, without, Grant::default(), &Limits::default())
            .map_err(|denied| line(&denied.why))
    }

    fn link_within(
        name: &str,
        bytes: &[u8],
        digest: &str,
        kind: PluginKind,
        without: &[String],
        most: Grant,
        limits: &Limits,
    ) -> Result<Arc<Library>, Denied> {
        let engine = engine::engine()?;
        match bytes.get(..8) {
            Some([0, b'a', b's', b'm', 0x0d, 0, 1, 0]) => {}
            Some([0, b'a', b's', b'm', 1, 0, 0, 0]) => {
                let what = "it is a core module, not a component: make a component of it (wit-component, or \
                            `cargo xtask guests`)";
                return Err(what.to_string().into());
            }
            _ => return Err("it is not a WebAssembly component".to_string().into()),
        }
        let grant = Arc::new(most.cut_to(bytes)?);
        let component = compile(engine, bytes, digest, limits)?;
        check::imports(engine, &component, kind, without, &grant.wasi)?;
        let mut linker = Linker::new(engine);
        crate::imports::add_to_linker(&mut linker)
            .and_then(|()| crate::imports::wasi::add_to_linker(&mut linker, &grant.wasi))
            .map_err(|e| format!("the host's own functions do not link: {e:#}"))?;
        let pre = linker.instantiate_pre(&component).map_err(|e| {
            format!("an import has another type than this host serves: {e:#}; rebuild the plugin against wit/ of this release")
        })?;
        Ok(Arc::new(Library {
            name: line(name),
            digest: digest.into(),
            bytes: bytes.len() as u64,
            grant,
            component,
            pre,
            slots: OnceLock::new(),
            version: OnceLock::new(),
        }))
    }
}
