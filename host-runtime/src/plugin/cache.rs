//! Compiled components on disk: keyed by the plugin's content and the engine's settings, compiled once per machine.
//!
//! Precompiled code runs with the host's rights, so it is loaded only from a directory that belongs to this user and that
//! nobody else can write, from a file of which the same is true, and only if the file's digest of its key and code matches: an
//! entry under another plugin's name is none. The directory is checked once it is open, and entries are opened beneath it.
//! Anything odd is a miss, never an error.

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::io::{Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cap_std::ambient_authority;
use cap_std::fs::{Dir, File, Metadata, MetadataExt, OpenOptions, OpenOptionsExt};
use rustix::fs::FlockOperation;
use sha2::{Digest, Sha256};
use wasmtime::Engine;
use wasmtime::component::Component;

use crate::vars;

/// How long to wait for another process that compiles the same plugin; it may be stopped.
const PATIENCE: Duration = Duration::from_secs(60);
const MAGIC: &[u8; 8] = b"wcclcwm2";

/// Where compiled components are kept, by the variables that `look_up` knows: `WCCL_CACHE_DIR` (`off` for nowhere), else the
/// user's cache directory, if there is one.
fn place(look_up: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let path = |name| vars::path(look_up(name));
    match path("WCCL_CACHE_DIR") {
        Some(d) if d.as_os_str() == "off" => None,
        Some(d) => Some(d),
        None => match path("XDG_CACHE_HOME") {
            Some(d) => Some(d.join("wccl")),
            None => Some(path("HOME")?.join(".cache").join("wccl")),
        },
    }
}

/// Where compiled components are kept; `None` if there is no such place or it is not ours alone.
pub(crate) fn directory() -> Option<Dir> {
    open(&place(|name| std::env::var_os(name))?)
}

fn open(path: &Path) -> Option<Dir> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).ok()?;
    let dir = Dir::open_ambient_dir(path, ambient_authority()).ok()?;
    if !ours(&dir.dir_metadata().ok()?) {
        tracing::warn!(dir = %path.display(), "the compile cache is not used: the directory is not ours alone");
        return None;
    }
    Some(dir)
}

/// Whether it belongs to this user, and nobody else may write it.
fn ours(meta: &Metadata) -> bool {
    meta.uid() == rustix::process::geteuid().as_raw() && meta.mode() & 0o022 == 0
}

pub(super) fn hex(bytes: &[u8]) -> String {
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
pub(super) fn compile(engine: &Engine, bytes: &[u8]) -> wasmtime::Result<Component> {
    let Some(dir) = directory() else { return Component::new(engine, bytes) };
    let key = key(engine, bytes);
    if let Some(c) = load(engine, &dir, &key) {
        return Ok(c);
    }
    // One compiles, the others wait and find it; without a lock (odd file system) both compile.
    let lock =
        dir.open_with(format!("{key}.lock"), OpenOptions::new().create(true).truncate(false).write(true).mode(0o600));
    let locked = lock.as_ref().is_ok_and(|f| locked_within(f, PATIENCE));
    if locked && let Some(c) = load(engine, &dir, &key) {
        return Ok(c);
    }
    let component = Component::new(engine, bytes)?;
    if let Err(e) = store(&component, &dir, &key) {
        tracing::debug!("the compiled plugin was not cached: {e}");
    }
    Ok(component)
}

fn entry(key: &str) -> String {
    format!("{key}.cwasm")
}

/// What binds an entry's code to its key.
fn digest(key: &str, code: &[u8]) -> [u8; 32] {
    Sha256::new().chain_update(key).chain_update([0]).chain_update(code).finalize().into()
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

fn store(component: &Component, dir: &Dir, key: &str) -> std::io::Result<()> {
    let code = component.serialize().map_err(std::io::Error::other)?;
    let temp = format!("{key}.tmp{}", std::process::id());
    let mut f = dir.open_with(&temp, OpenOptions::new().create(true).truncate(true).write(true).mode(0o600))?;
    f.write_all(MAGIC)?;
    f.write_all(&digest(key, &code))?;
    f.write_all(&code)?;
    dir.rename(&temp, dir, entry(key))
}

fn load(engine: &Engine, dir: &Dir, key: &str) -> Option<Component> {
    let mut f = dir.open(entry(key)).ok()?;
    if !ours(&f.metadata().ok()?) {
        tracing::warn!(key, "an entry of the compile cache that is not ours alone is ignored");
        return None;
    }
    let mut all = Vec::new();
    f.read_to_end(&mut all).ok()?;
    let code = all.get(40..)?;
    if &all[..8] != MAGIC || all[8..40] != digest(key, code) {
        tracing::warn!(key, "a damaged entry of the compile cache is ignored");
        return None;
    }
    // SAFETY: the bytes come from a file in a directory that only this user can write (checked), were written by `store`
    // of this program with this key, and are unchanged (digest of key and code checked); the engine checks its own version and settings.
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

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    }

    #[test]
    fn an_empty_variable_is_an_unset_one() {
        let at = |vars: &[(&str, &str)]| place(|n| vars.iter().find(|v| v.0 == n).map(|v| v.1.into()));
        let home = Some(PathBuf::from("/h/.cache/wccl"));
        assert_eq!(at(&[("HOME", "/h")]), home);
        assert_eq!(at(&[("WCCL_CACHE_DIR", ""), ("XDG_CACHE_HOME", ""), ("HOME", "/h")]), home);
        assert_eq!(at(&[("WCCL_CACHE_DIR", "/c"), ("HOME", "/h")]), Some("/c".into()));
        assert_eq!(at(&[("XDG_CACHE_HOME", "/x"), ("HOME", "/h")]), Some("/x/wccl".into()));
        assert_eq!(at(&[("HOME", "")]), None);
        assert_eq!(at(&[("WCCL_CACHE_DIR", "off"), ("HOME", "/h")]), None);
    }

    #[test]
    fn a_stored_component_is_loaded_and_a_tampered_one_is_a_miss() {
        let engine = Engine::default();
        let at = std::env::temp_dir().join(format!("wccl-cache-test-{}", std::process::id()));
        let dir = open(&at).unwrap();
        let empty_component = b"\0asm\x0d\0\x01\0";
        let c = Component::new(&engine, empty_component).unwrap();
        store(&c, &dir, "x").unwrap();
        let (x, y) = (at.join("x.cwasm"), at.join("y.cwasm"));
        assert!(load(&engine, &dir, "x").is_some());
        // Whole, but another plugin's.
        std::fs::copy(&x, &y).unwrap();
        assert!(load(&engine, &dir, "y").is_none());
        // One that somebody else may have written, or put there.
        set_mode(&x, 0o620);
        assert!(load(&engine, &dir, "x").is_none());
        set_mode(&x, 0o600);
        assert!(load(&engine, &dir, "x").is_some());
        let outside = at.with_extension("outside");
        std::fs::rename(&x, &outside).unwrap();
        std::os::unix::fs::symlink(&outside, &x).unwrap();
        assert!(load(&engine, &dir, "x").is_none());
        std::fs::rename(&outside, &x).unwrap();
        let mut bytes = std::fs::read(&x).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        std::fs::write(&x, &bytes).unwrap();
        assert!(load(&engine, &dir, "x").is_none());
        std::fs::write(&x, b"short").unwrap();
        assert!(load(&engine, &dir, "x").is_none());
        for mode in [0o720, 0o702] {
            set_mode(&at, mode);
            assert!(open(&at).is_none());
        }
        std::fs::remove_dir_all(&at).unwrap();
    }
}
