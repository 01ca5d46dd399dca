//! The targets under libFuzzer: `cargo xtask fuzz` builds and starts it. `WCCL_FUZZ_TARGET` names the target.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;

static TARGET: OnceLock<fuzz::Target> = OnceLock::new();

fuzz_target!(
    init: {
        // One that is no text is the name of no target, and refused as that.
        let name = std::env::var_os("WCCL_FUZZ_TARGET").unwrap_or_default();
        match fuzz::find(&name.to_string_lossy()) {
            Ok(target) => drop(TARGET.set(target)),
            Err(e) => {
                eprintln!("{e}");
                std::process::exit(2);
            }
        }
    },
    |data: &[u8]| {
        if let Some(target) = TARGET.get() {
            (target.run)(data);
        }
    }
);
