//! The one engine of the process, and the ticker of guest deadlines.
//!
//! Every proposal that is off is written out, so that a new default of the runtime cannot slip in
//! (docs/decisions/0001-runtime.md). The ticker advances the epoch every [`TICK`] while a guest is on some stack, and
//! sleeps otherwise: an idle host uses no CPU.

use std::sync::{Condvar, Mutex, OnceLock};

use wasmtime::{Config, Engine, Strategy};

use crate::limits::{GUEST_STACK, TICK};

struct Shared {
    engine: Engine,
    active: Mutex<usize>,
    wake: Condvar,
}

static SHARED: OnceLock<Result<&'static Shared, String>> = OnceLock::new();

fn config() -> Config {
    let mut c = Config::new();
    c.strategy(Strategy::Cranelift);
    c.wasm_component_model(true);
    c.concurrency_support(false);
    c.wasm_component_model_error_context(false);
    c.wasm_component_model_gc(false);
    c.wasm_component_model_memory64(false);
    c.wasm_component_model_map(false);
    c.wasm_component_model_fixed_length_lists(false);
    c.wasm_component_model_implements(false);
    c.wasm_gc(false);
    c.wasm_function_references(false);
    c.wasm_exceptions(false);
    c.wasm_memory64(false);
    c.wasm_stack_switching(false);
    c.wasm_custom_page_sizes(false);
    c.wasm_wide_arithmetic(false);
    c.wasm_relaxed_simd(false);
    c.wasm_tail_call(false);
    c.shared_memory(false);
    c.epoch_interruption(true);
    c.max_wasm_stack(GUEST_STACK);
    // Small address-space reservations: a machine with a tight limit of address space can still load a plugin.
    c.memory_reservation(64 << 20);
    c.memory_guard_size(64 << 10);
    c
}

fn shared() -> Result<&'static Shared, String> {
    SHARED
        .get_or_init(|| {
            let engine =
                Engine::new(&config()).map_err(|e| format!("the WebAssembly engine could not be made: {e:#}"))?;
            let shared: &'static Shared =
                Box::leak(Box::new(Shared { engine, active: Mutex::new(0), wake: Condvar::new() }));
            std::thread::Builder::new().name("wccl-ticker".into()).spawn(move || tick(shared)).map_err(|e| {
                let limit = hw_bridge::os::exhausted::limit_of_threads(&e);
                format!("the deadline ticker could not be started: {e}{limit}")
            })?;
            Ok(shared)
        })
        .clone()
}

fn tick(shared: &'static Shared) {
    loop {
        {
            let mut active = shared.active.lock().unwrap_or_else(|p| p.into_inner());
            while *active == 0 {
                active = shared.wake.wait(active).unwrap_or_else(|p| p.into_inner());
            }
        }
        std::thread::sleep(TICK);
        shared.engine.increment_epoch();
    }
}

/// The process's engine.
pub fn engine() -> Result<&'static Engine, String> {
    Ok(&shared()?.engine)
}

/// Keeps the ticker running while a guest is on a stack.
#[derive(Debug)]
pub struct Ticking(());

impl Ticking {
    /// A guest is entered. The engine exists: it made the store.
    pub fn start() -> Ticking {
        if let Ok(s) = shared() {
            let mut active = s.active.lock().unwrap_or_else(|p| p.into_inner());
            *active += 1;
            if *active == 1 {
                s.wake.notify_one();
            }
        }
        Ticking(())
    }
}

impl Drop for Ticking {
    fn drop(&mut self) {
        if let Ok(s) = shared() {
            *s.active.lock().unwrap_or_else(|p| p.into_inner()) -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use wasmtime::Module;
    use wasmtime::component::Component;

    use super::*;

    /// What docs/threat-model.md says is off, and rests on.
    #[test]
    fn what_is_off_is_refused() {
        let engine = engine().unwrap();
        let modules = [
            ("memory64", "(module (memory i64 1))"),
            ("shared memory", "(module (memory 1 1 shared))"),
            ("pages of another size", "(module (memory 1 (pagesize 1)))"),
            ("GC", "(module (type (struct (field i32))))"),
            ("function references", "(module (type $f (func)) (func (param (ref $f))))"),
            ("exceptions", "(module (tag $t) (func (throw $t)))"),
            ("tail calls", "(module (func $f (return_call $f)))"),
            ("stack switching", "(module (type $f (func)) (type (cont $f)))"),
            (
                "relaxed SIMD",
                "(module (func (param v128 v128) (drop (i8x16.relaxed_swizzle (local.get 0) (local.get 1)))))",
            ),
            ("wide arithmetic", "(module (func (result i64 i64) (i64.mul_wide_u (i64.const 1) (i64.const 1))))"),
        ];
        for (what, text) in modules {
            assert!(Module::new(engine, wat::parse_str(text).unwrap()).is_err(), "{what} is on");
        }
        Module::new(engine, wat::parse_str("(module (memory 1) (func $f (call $f)))").unwrap()).unwrap();
        let components = [
            ("streams", "(component (type (stream u8)))"),
            ("futures", "(component (type (future u8)))"),
            ("error contexts", "(component (type error-context))"),
            ("lists of fixed length", "(component (type (list u8 4)))"),
            ("maps", "(component (type (map string u32)))"),
        ];
        for (what, text) in components {
            assert!(Component::new(engine, wat::parse_str(text).unwrap()).is_err(), "{what} are on");
        }
        Component::new(engine, wat::parse_str("(component (type (list u8)))").unwrap()).unwrap();
    }

    /// Its table of advisories was read for one version.
    #[test]
    fn the_threat_model_is_about_the_runtime_that_is_pinned() {
        let file =
            |name: &str| std::fs::read_to_string(format!("{}/../../{name}", env!("CARGO_MANIFEST_DIR"))).unwrap();
        let (lock, model) = (file("Cargo.lock"), file("docs/threat-model.md"));
        let pinned = |package: &str| {
            let entry = lock.split_once(&format!("name = \"{package}\"\nversion = \"")).expect(package).1;
            entry.split('"').next().unwrap().to_string()
        };
        let version = pinned("wasmtime");
        assert_eq!(version, pinned("wasmtime-wasi"));
        let said = format!("the lock file pins wasmtime and wasmtime-wasi {version}");
        assert!(model.contains(&said), "docs/threat-model.md: read the advisories since, and say `{said}`");
        assert!(!lock.contains("name = \"winch"), "the Winch compiler is compiled in");
    }
}
