//! Compiled components on disk: keyed by the plugin's content and the engine's settings, compiled once per machine.
//!
//! Precompiled code runs with the host's rights, so it is loaded only from a directory that belongs to this user and that
//! nobody else can write, and only if the file's own digest matches. Anything odd is a miss, never an error.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use sha2::{Digest, Sha256};
use wasmtime::Engine;
use wasmtime::component::Component;

/// How long to wait for another process that compiles the same plugin; it may be stopped.
const PATIENCE: Duration = Duration::from_secs(60);
const MAGIC: &[u8; 8] = b"wcclcwm1";

/// Where compiled components are kept: `$WCCL_CACHE_DIR`, else the user's cache directory; `None` if there is none or it
/// is not ours alone.
fn directory() -> Option<PathBuf> {
    let dir = match std::env::var_os("WCCL_CACHE_DIR") {
        Some(d) if d.is_empty() => return None,
        Some(d) => PathBuf::from(d),
        None => match std::env::var_os("XDG_CACHE_HOME").filter(|d| !d.is_empty()) {
            Some(d) => PathBuf::from(d).join("wccl"),
            None => PathBuf::from(std::env::var_os("HOME")?).join(".cache").join("wccl"),
        },
    };
    DirBuilder::new().recursive(true).mode(0o700).create(&dir).ok()?;
    let meta = std::fs::symlink_metadata(&dir).ok()?;
    let ours = meta.is_dir() && meta.uid() == rustix::process::geteuid().as_raw() && meta.mode() & 0o022 == 0;
    if !ours {
        tracing::warn!(dir = %dir.display(), "the compile cache is not used: the directory is not ours alone");
    }
    ours.then_some(dir)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Hash of a plugin's bytes, in hex.
pub fn content_hash(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn key(engine: &Engine, bytes: &[u8]) -> String {
    use std::hash::{Hash, Hasher};
    #[allow(deprecated)]
    let mut h = std::hash::SipHasher::new();
    engine.precompile_compatibility_hash().hash(&mut h);
    format!("{}-{:016x}", content_hash(bytes), h.finish())
}

/// Compiles `bytes`, or takes the compiled form from the cache.
pub fn compile(engine: &Engine, bytes: &[u8]) -> wasmtime::Result<Component> {
    let Some(dir) = directory() else { return Component::new(engine, bytes) };
    let path = dir.join(format!("{}.cwasm", key(engine, bytes)));
    if let Some(c) = load(engine, &path) {
        return Ok(c);
    }
    // One compiles, the others wait and find it; without a lock (odd file system) both compile.
    let lock =
        OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path.with_extension("lock"));
    let locked = lock.as_ref().is_ok_and(|f| locked_within(f, PATIENCE));
    if locked && let Some(c) = load(engine, &path) {
        return Ok(c);
    }
    let component = Component::new(engine, bytes)?;
    if let Err(e) = store(&component, &path) {
        tracing::debug!("the compiled plugin was not cached: {e}");
    }
    Ok(component)
}

/// Takes the lock, waiting for whoever compiles; after `patience` it is done without.
fn locked_within(file: &File, patience: Duration) -> bool {
    let begun = Instant::now();
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return true,
            Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) if begun.elapsed() < patience => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(_) => return false,
        }
    }
}

fn store(component: &Component, path: &Path) -> std::io::Result<()> {
    let code = component.serialize().map_err(std::io::Error::other)?;
    let temp = path.with_extension(format!("tmp{}", std::process::id()));
    let mut f = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&temp)?;
    f.write_all(MAGIC)?;
    f.write_all(&Sha256::digest(&code))?;
    f.write_all(&code)?;
    std::fs::rename(&temp, path)
}

fn load(engine: &Engine, path: &Path) -> Option<Component> {
    let mut f = File::open(path).ok()?;
    let meta = f.metadata().ok()?;
    if meta.uid() != rustix::process::geteuid().as_raw() || meta.mode() & 0o022 != 0 {
        return None;
    }
    let mut all = Vec::new();
    f.read_to_end(&mut all).ok()?;
    let code = all.get(40..)?;
    if &all[..8] != MAGIC || all[8..40] != Sha256::digest(code)[..] {
        tracing::warn!(file = %path.display(), "a damaged entry of the compile cache is ignored");
        return None;
    }
    // SAFETY: the bytes come from a file in a directory that only this user can write (checked), were written by `store`
    // of this program with this key, and are unchanged (digest checked); the engine checks its own version and settings.
    match unsafe { Component::deserialize(engine, code) } {
        Ok(c) => Some(c),
        Err(e) => {
            tracing::debug!("an entry of the compile cache does not fit this engine: {e}");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stored_component_is_loaded_and_a_damaged_one_is_a_miss() {
        let engine = Engine::default();
        let dir = std::env::temp_dir().join(format!("wccl-cache-test-{}", std::process::id()));
        DirBuilder::new().recursive(true).mode(0o700).create(&dir).unwrap();
        let path = dir.join("x.cwasm");
        let empty_component = b"\0asm\x0d\0\x01\0";
        let c = Component::new(&engine, empty_component).unwrap();
        store(&c, &path).unwrap();
        assert!(load(&engine, &path).is_some());
        let mut bytes = std::fs::read(&path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert!(load(&engine, &path).is_none());
        std::fs::write(&path, b"short").unwrap();
        assert!(load(&engine, &path).is_none());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
