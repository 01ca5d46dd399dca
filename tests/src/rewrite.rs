//! Plugins made by rewriting the built one: seconds, not a cargo build each.
//!
//! The core module that `cargo xtask guests` leaves beside the component still has its world in a custom section, so a
//! changed module becomes a component again in one step.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use wasm_encoder::reencode::{Reencode, RoundtripReencoder};

/// What a function is replaced by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Body {
    /// `unreachable`
    Trap,
    /// A loop without an end.
    Loop,
}

/// The core module of the built nccom.
pub fn built_core() -> Vec<u8> {
    let plugin = host_runtime::nrt::RuntimeConfig::default()
        .plugin
        .expect("target/plugins/nccom.wasm: run `cargo xtask guests`");
    let core = plugin.with_file_name("nccom.core.wasm");
    std::fs::read(&core).unwrap_or_else(|e| panic!("{}: {e}; run `cargo xtask guests`", core.display()))
}

struct Replace {
    target: u32,
    body: Body,
    next: u32,
}

impl Reencode for Replace {
    type Error = std::convert::Infallible;

    fn parse_function_body(
        &mut self,
        code: &mut wasm_encoder::CodeSection,
        func: wasmparser::FunctionBody<'_>,
    ) -> Result<(), wasm_encoder::reencode::Error<Self::Error>> {
        let index = self.next;
        self.next += 1;
        if index != self.target {
            return wasm_encoder::reencode::utils::parse_function_body(self, code, func);
        }
        let mut f = wasm_encoder::Function::new([]);
        let mut i = f.instructions();
        match self.body {
            Body::Trap => i.unreachable(),
            Body::Loop => i.loop_(wasm_encoder::BlockType::Empty).br(0).end().unreachable(),
        };
        f.instructions().end();
        code.function(&f);
        Ok(())
    }
}

/// `core` with the export of entry `name` (a function of `neuron:nccom/collectives`) replaced, as a component.
pub fn with_body(name: &str, body: Body, core: &[u8]) -> Vec<u8> {
    let symbol = format!("neuron:nccom/collectives#{name}");
    let (mut imported, mut target) = (0, None);
    for payload in wasmparser::Parser::new(0).parse_all(core) {
        match payload.unwrap() {
            wasmparser::Payload::ImportSection(s) => {
                imported += s
                    .into_imports()
                    .filter(|i| {
                        matches!(
                            i.as_ref().unwrap().ty,
                            wasmparser::TypeRef::Func(_) | wasmparser::TypeRef::FuncExact(_)
                        )
                    })
                    .count() as u32;
            }
            wasmparser::Payload::ExportSection(s) => {
                for e in s {
                    let e = e.unwrap();
                    if e.name == symbol {
                        target = Some(e.index);
                    }
                }
            }
            _ => {}
        }
    }
    let target = target.unwrap_or_else(|| panic!("the core module has no export {symbol}")) - imported;
    let mut module = wasm_encoder::Module::new();
    Replace { target, body, next: 0 }.parse_core_module(&mut module, wasmparser::Parser::new(0), core).unwrap();
    componentise(&module.finish())
}

/// The same library as another build: other bytes, so another digest.
pub fn second_build(core: &[u8]) -> Vec<u8> {
    let mut module = wasm_encoder::Module::new();
    RoundtripReencoder.parse_core_module(&mut module, wasmparser::Parser::new(0), core).unwrap();
    module.section(&wasm_encoder::CustomSection { name: "wccl:build".into(), data: b"second".into() });
    componentise(&module.finish())
}

fn componentise(core: &[u8]) -> Vec<u8> {
    wit_component::ComponentEncoder::default().validate(true).module(core).unwrap().encode().unwrap()
}

/// A plugin file that is removed when dropped.
#[derive(Debug)]
pub struct PluginFile(PathBuf);

impl PluginFile {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for PluginFile {
    fn drop(&mut self) {
        // A leftover in the temporary folder is harmless.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Writes `bytes` as `NAME-….wasm` into the temporary folder.
pub fn plugin_file(name: &str, bytes: &[u8]) -> PluginFile {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let unique = format!("{name}-{}-{}.wasm", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(unique);
    std::fs::write(&path, bytes).unwrap();
    PluginFile(path)
}
