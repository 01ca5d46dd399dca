//! `wccl info` of a plugin that would do more than be looked at.

use std::path::Path;
use std::process::Command;

use tests::zoo::{self, Plugin, REPLY, SCRATCH};
use wccl::{Runtime, RuntimeConfig};

/// Its probe runs for what is printed of it, with nothing of what a program's plugin has.
#[test]
fn info_only_looks_at_the_plugin() {
    let mut p = Plugin::lone_rank().unwrap();
    let dump = p.text("NCCL_TOPO_DUMP_FILE");
    let write = format!("(call $files.write {dump} (i32.const {SCRATCH}) (i32.const 1) (i32.const {REPLY}))");
    p.body("neuron-get-version-info", write + &zoo::probe(Some(89)));
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("look-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (plugin, dump) = (dir.join("writes.wasm"), dir.join("dump.xml"));
    std::fs::write(&plugin, p.build().unwrap()).unwrap();
    let mut program = Command::new(env!("CARGO_BIN_EXE_program"));
    let out = program.arg("info").env("WCCL_PLUGIN", &plugin).env("NCCL_TOPO_DUMP_FILE", &dump).output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success() && said.contains("writes.wasm"), "{said}");
    assert!(!dump.exists());
    // A program's does write it.
    let mut config = RuntimeConfig { plugin: Some(plugin), control: false, ..RuntimeConfig::default() };
    config.vars.insert("NCCL_TOPO_DUMP_FILE".into(), dump.to_str().unwrap().into());
    let runtime = Runtime::open(config).unwrap();
    assert!(runtime.load_error().is_none() && dump.exists());
    std::fs::remove_dir_all(&dir).unwrap();
}
