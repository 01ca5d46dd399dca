//! Shared by the test binaries: a world of ranks as threads of this process, each with a runtime of its own, as separate
//! programs would have.
#![allow(dead_code)]

pub mod ranks;

use std::sync::Arc;
use std::time::Duration;

pub use tests::port::free as free_port;
use wccl::{CommOptions, Communicator, Runtime, RuntimeConfig};

/// Bound against hangs: far more than anything takes on a busy machine, so that it says nothing of speed.
pub const HANG: Duration = Duration::from_secs(240);

/// A configuration for tests: loopback only, little device memory, and deadlines that nothing comes near but a hang. A test that
/// is to meet a deadline sets its own, for what is to meet it.
pub fn config() -> RuntimeConfig {
    let mut c = RuntimeConfig { timeout: Duration::from_secs(120), hbm_bytes: 1 << 30, ..RuntimeConfig::default() };
    assert!(
        c.plugin.is_some(),
        "target/plugins/nccom.wasm is missing: run `cargo xtask guests` (cargo xtask test does)"
    );
    c.vars.insert("CCOM_SOCKET_IFNAME".into(), "lo".into());
    c.vars.insert("NEURON_CCOM_SOCK_TIMEOUT".into(), "120000".into());
    c
}

/// The same with every release of the transport.
pub fn releases() -> Vec<RuntimeConfig> {
    let of = |name: &str| RuntimeConfig { plugin: Some(release(name)), ..config() };
    ["nccom", "nccom-next"].map(of).into()
}

/// Where a release of the transport is.
pub fn release(name: &str) -> std::path::PathBuf {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/plugins").join(format!("{name}.wasm"));
    assert!(path.exists(), "target/plugins/{name}.wasm is missing: run `cargo xtask guests` (cargo xtask test does)");
    path
}

/// Runs `f` on every rank of a global group and answers the results in rank order. A rank that panics fails the test.
pub fn world<R: Send + 'static>(
    n: usize,
    config: &RuntimeConfig,
    f: impl Fn(Communicator) -> R + Send + Sync + 'static,
) -> Vec<R> {
    world_at(&format!("127.0.0.1:{}", free_port()), n, config, f)
}

/// The same, where they meet at `root`.
pub fn world_at<R: Send + 'static>(
    root: &str,
    n: usize,
    config: &RuntimeConfig,
    f: impl Fn(Communicator) -> R + Send + Sync + 'static,
) -> Vec<R> {
    let f = Arc::new(f);
    let threads: Vec<_> = (0..n)
        .map(|rank| {
            let (f, config, root) = (f.clone(), config.clone(), root.to_string());
            std::thread::Builder::new()
                .name(format!("rank-{rank}"))
                .spawn(move || {
                    let runtime = Runtime::open(config).unwrap();
                    if let Some(e) = runtime.load_error() {
                        panic!("{}", e.sentinel);
                    }
                    let comm = runtime
                        .init_comm(CommOptions::with_root(root, rank, n))
                        .unwrap_or_else(|e| panic!("rank {rank}: {e}"));
                    f(comm)
                })
                .unwrap()
        })
        .collect();
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

/// fp32 values as bytes.
pub fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Bytes as fp32 values.
pub fn values_of(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// A plugin file that is removed when dropped.
#[derive(Debug)]
pub struct PluginFile(std::path::PathBuf);

impl PluginFile {
    /// Where it is.
    pub fn path(&self) -> &std::path::Path {
        &self.0
    }
}

impl Drop for PluginFile {
    fn drop(&mut self) {
        // A leftover in the temporary folder is harmless.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Writes `bytes` as a plugin file of that name.
pub fn plugin_file(name: &str, bytes: &[u8]) -> PluginFile {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let nth = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let path =
        std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}-{nth}.wasm", std::process::id()));
    std::fs::write(&path, bytes).unwrap();
    PluginFile(path)
}
