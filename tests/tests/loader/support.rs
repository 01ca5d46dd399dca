//! Places for plugins, configurations, patterns for sentences, and the log as the calling thread saw it.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use tests::events::{self, Events};
pub use tests::sentence::fits;
use wccl::{Runtime, RuntimeConfig};

/// A folder of its own, gone when dropped.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Folder {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        start();
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("loader-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes a plugin and answers where it is.
    pub fn put(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A folder that stays is litter under target/, nothing more.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A small runtime that stays on this machine.
pub fn config(plugin: &Path) -> RuntimeConfig {
    RuntimeConfig {
        plugin: Some(plugin.to_path_buf()),
        net_plugin: None,
        vars: [("CCOM_SOCKET_IFNAME".to_string(), "lo".to_string())].into(),
        hbm_bytes: 64 << 20,
        ..RuntimeConfig::default()
    }
}

/// Opens a runtime with `plugin` and nothing special.
pub fn open(plugin: &Path) -> Runtime {
    Runtime::open(config(plugin)).unwrap()
}

/// Opens a runtime whose plugin must load.
pub fn loaded(config: RuntimeConfig) -> Runtime {
    let rt = Runtime::open(config).unwrap();
    assert_eq!(rt.load_error(), None);
    assert_eq!(rt.forward().slots(), [true; 37]);
    rt
}

/// The sentinel of a runtime whose plugin must not have loaded.
pub fn sentinel(rt: &Runtime) -> String {
    rt.load_error().expect("the plugin should have been refused").sentinel
}

#[track_caller]
pub fn assert_fits(pattern: &str, text: &str) {
    assert!(fits(pattern, text), "\nexpected: {pattern}\nbut was:  {text}");
}

thread_local! {
    static LINES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    static INSIDE: RefCell<Option<Box<dyn FnMut()>>> = const { RefCell::new(None) };
    static RUNNING: Cell<bool> = const { Cell::new(false) };
}

/// Keeps log lines per thread: a test sees its own.
fn collect(event: &tracing::Event<'_>) {
    let line = events::message(event);
    let inside = line.contains(INSIDE_MARK);
    LINES.with_borrow_mut(|all| all.push(line));
    if inside && let Some(mut f) = INSIDE.take() {
        f();
    }
}

/// A plugin that logs this gets the function given to [`on_mark`] run inside its callback.
pub const INSIDE_MARK: &str = "now inside a callback";

/// Runs `f` on this thread, inside the log callback, when a plugin next logs [`INSIDE_MARK`].
pub fn on_mark(f: impl FnMut() + 'static) {
    INSIDE.set(Some(Box::new(f)));
}

/// The log lines of this thread since the last call.
pub fn log() -> Vec<String> {
    LINES.take()
}

/// Once a process: collects the log, and keeps what is compiled under target/ and not in the user's cache.
fn start() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("loader-cache");
        // SAFETY: the environment of this process is read and written through the standard library only, which locks it;
        // no plugin has been opened yet, so that no resolver of the C library reads it beside us.
        unsafe { std::env::set_var("WCCL_CACHE_DIR", cache) };
        tracing::subscriber::set_global_default(Events(tracing::Level::INFO, collect)).unwrap();
    });
}
