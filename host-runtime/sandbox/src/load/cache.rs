//! Compiled components on disk: keyed by the plugin's content and the engine's settings, compiled once per machine.
//!
//! Precompiled code runs with the host's rights, so it is loaded only from a directory that belongs to this user and that
//! nobody else can write, from a file of which the same is true, and only if the file's digest of its key and code matches: an
//! entry under another plugin's name is none. The directory is checked once it is open, and entries are opened beneath it.
//! Anything odd is a miss, never an error; that nothing can be kept is said once.
//!
//! All entries together have a bound, [`CACHE_BYTES`]: who stores one removes those that were not used for longest, but none
//! that is being read.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use cap_std::fs::{Dir, File, OpenOptions, OpenOptionsExt};
use hw_bridge::exec::reduce::in_default_float_state;
use hw_bridge::os::lock::lock;
use rustix::fs::FlockOperation;
use sha2::{Digest, Sha256};
use wasmtime::Engine;
use wasmtime::component::Component;

use crate::limits::CACHE_BYTES;
use crate::place::{directory, not_kept, ours};

/// How long to wait for another process that compiles the same plugin; it may be stopped.
const PATIENCE: Duration = Duration::from_secs(60);
/// Age at which a file that was being written is nobody's any more.
const ABANDONED: Duration = Duration::from_secs(3600);
const MAGIC: &[u8; 8] = b"wcclcwm2";

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Hash of a plugin's bytes, in hex.
pub fn content_hash(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn key(engine: &Engine, digest: &str) -> String {
    use std::hash::{Hash, Hasher};
    #[allow(deprecated)]
    let mut h = std::hash::SipHasher::new();
    engine.precompile_compatibility_hash().hash(&mut h);
    format!("{digest}-{:016x}", h.finish())
}

/// What this process has of each compiled plugin, by key.
static IN_USE: Mutex<BTreeMap<String, Held>> = Mutex::new(BTreeMap::new());
static LOADED: Condvar = Condvar::new();

enum Held {
    /// Somebody reads or compiles it.
    Awaited,
    Here(Weak<Component>),
}

/// The compiled form of `bytes`, whose hash is `digest`: the one that is in use in this process, else the cache's, else it is
/// compiled.
pub(super) fn compile(engine: &Engine, bytes: &[u8], digest: &str) -> wasmtime::Result<Arc<Component>> {
    let key = key(engine, digest);
    shared(&key, || kept_or_compiled(engine, bytes, &key))
}

/// The same without compiling anything: `None` if the plugin with this hash is neither in use nor kept.
pub(super) fn kept(engine: &Engine, digest: &str) -> Option<Arc<Component>> {
    let key = key(engine, digest);
    let from = || in_default_float_state(|| load(engine, &directory()?, &key));
    shared(&key, || from().ok_or_else(|| wasmtime::format_err!("it is not kept"))).ok()
}

/// What is in use under this key in this process, else what is made: all runtimes of a process share it, as long as one has it.
/// Who comes while another one makes it waits for that.
fn shared(key: &str, make: impl FnOnce() -> wasmtime::Result<Component>) -> wasmtime::Result<Arc<Component>> {
    let begun = Instant::now();
    let mut held = lock(&IN_USE);
    loop {
        match held.get(key) {
            Some(Held::Here(c)) if let Some(c) = c.upgrade() => return Ok(c),
            Some(Held::Awaited)
                if let left = PATIENCE.saturating_sub(begun.elapsed())
                    && !left.is_zero() =>
            {
                held = LOADED.wait_timeout(held, left).unwrap_or_else(PoisonError::into_inner).0;
            }
            _ => break,
        }
    }
    held.retain(|_, h| !matches!(h, Held::Here(c) if c.strong_count() == 0));
    held.insert(key.into(), Held::Awaited);
    drop(held);
    /// However it ends, nobody waits any more.
    struct Ends<'a>(&'a str, Weak<Component>);
    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            lock(&IN_USE).insert(self.0.into(), Held::Here(std::mem::take(&mut self.1)));
            LOADED.notify_all();
        }
    }
    let mut ends = Ends(key, Weak::new());
    let component = Arc::new(make()?);
    ends.1 = Arc::downgrade(&component);
    Ok(component)
}

/// Compiles `bytes`, or takes the compiled form from the cache. The compiler computes constants as this thread would: what is
/// kept is for other programs too, so it does in the default floating-point state, whichever this program is in. The threads
/// that are started for it inherit that.
fn kept_or_compiled(engine: &Engine, bytes: &[u8], key: &str) -> wasmtime::Result<Component> {
    in_default_float_state(|| kept_or_compiled_here(engine, bytes, key))
}

fn kept_or_compiled_here(engine: &Engine, bytes: &[u8], key: &str) -> wasmtime::Result<Component> {
    let Some(dir) = directory() else { return on_threads(engine, bytes) };
    if let Some(c) = load(engine, &dir, key) {
        return Ok(c);
    }
    // One compiles, the others wait and find it; without a lock (odd file system) both compile.
    let lock =
        dir.open_with(format!("{key}.lock"), OpenOptions::new().create(true).truncate(false).write(true).mode(0o600));
    let locked = lock.as_ref().is_ok_and(|f| locked_within(f, PATIENCE));
    if locked && let Some(c) = load(engine, &dir, key) {
        return Ok(c);
    }
    let component = on_threads(engine, bytes)?;
    match store(&component, &dir, key) {
        Ok(()) => {
            if let Err(e) = trim(&dir, CACHE_BYTES, &entry(key)) {
                tracing::debug!("the compile cache was not trimmed: {e}");
            }
        }
        Err(e) => not_kept(&e.to_string()),
    }
    Ok(component)
}

/// Compiles on a thread for each core, or on as many as can be started: the library that the runtime takes its threads from
/// panics where a limit of threads is reached. On this thread alone if it comes to that.
fn on_threads(engine: &Engine, bytes: &[u8]) -> wasmtime::Result<Component> {
    let most = std::thread::available_parallelism().map_or(1, usize::from);
    let pool = |n| rayon::ThreadPoolBuilder::new().num_threads(n).thread_name(|_| "wccl-compile".into()).build();
    let halves = std::iter::successors(Some(most), |n| (*n > 1).then_some(n / 2));
    let alone = || rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build();
    match halves.map(pool).find_map(Result::ok).or_else(|| alone().ok()) {
        Some(pool) => pool.install(|| Component::new(engine, bytes)),
        // This thread is such a pool already, of another time.
        None => Component::new(engine, bytes),
    }
}

/// What another process has removed is gone as well.
fn gone(removed: std::io::Result<()>) -> std::io::Result<()> {
    removed.or_else(|e| if e.kind() == std::io::ErrorKind::NotFound { Ok(()) } else { Err(e) })
}

/// Removes what was not used for longest until all entries have at most `most` bytes; not `keep`, and none that is being read.
fn trim(dir: &Dir, most: u64, keep: &str) -> std::io::Result<()> {
    let mut entries = Vec::new();
    for e in dir.entries()?.flatten() {
        let Ok(name) = e.file_name().into_string() else { continue };
        let Ok(meta) = e.metadata() else { continue };
        let used = meta.modified().map_or(std::time::UNIX_EPOCH, |t| t.into_std());
        // What a process left that was killed while it wrote.
        let abandoned = name.contains(".tmp") && used.elapsed().is_ok_and(|age| age > ABANDONED);
        if abandoned {
            gone(dir.remove_file(&name))?;
        } else if name.ends_with(".cwasm") {
            entries.push((used, meta.len(), name));
        }
    }
    let mut all: u64 = entries.iter().map(|e| e.1).sum();
    entries.sort();
    for (_, len, name) in entries.into_iter().filter(|e| e.2 != keep) {
        if all <= most {
            break;
        }
        let free =
            dir.open(&name).is_ok_and(|f| rustix::fs::flock(&f, FlockOperation::NonBlockingLockExclusive).is_ok());
        if free {
            gone(dir.remove_file(&name))?;
            // Its lock goes too; whoever waits for it finds nothing and compiles.
            let _ = dir.remove_file(name.replace(".cwasm", ".lock"));
            all -= len;
        }
    }
    Ok(())
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
    // Its process's number alone is that of others too, in other threads and PID namespaces.
    let temp = format!("{key}.tmp{:016x}", u64::from_ne_bytes(hw_bridge::os::random::bytes()?));
    let mut f = dir.open_with(&temp, OpenOptions::new().create(true).truncate(true).write(true).mode(0o600))?;
    f.write_all(MAGIC)?;
    f.write_all(&digest(key, &code))?;
    f.write_all(&code)?;
    dir.rename(&temp, dir, entry(key))
}

fn load(engine: &Engine, dir: &Dir, key: &str) -> Option<Component> {
    let mut f = dir.open(entry(key)).ok()?;
    let meta = f.metadata().ok()?;
    if !ours(&meta) {
        tracing::warn!(key, "an entry of the compile cache that is not ours alone is ignored");
        return None;
    }
    // It is in use, and it was used now; where that cannot be said it may be removed early, which costs a compilation.
    let _ = rustix::fs::flock(&f, FlockOperation::NonBlockingLockShared);
    let now = |nsec| rustix::fs::Timespec { tv_sec: 0, tv_nsec: nsec };
    let times = rustix::fs::Timestamps {
        last_access: now(rustix::fs::UTIME_OMIT),
        last_modification: now(rustix::fs::UTIME_NOW),
    };
    let _ = rustix::fs::futimens(&f, &times);
    // Room for all of it at once: as it grows it would be copied.
    let mut all = Vec::with_capacity(meta.len() as usize + 1);
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
    use crate::place::{open, place};
    use cap_std::ambient_authority;
    use std::path::{Path, PathBuf};

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
            assert!(open(&at).is_err());
        }
        std::fs::remove_dir_all(&at).unwrap();
    }

    /// Those that were not used for longest go first; what is in use, and what was stored just now, stays.
    #[test]
    fn the_cache_is_trimmed_to_its_bound_and_never_what_is_in_use() {
        let at = std::env::temp_dir().join(format!("wccl-cache-trim-{}", std::process::id()));
        let dir = open(&at).unwrap();
        let day = Duration::from_secs(86_400);
        let begun = std::time::SystemTime::now() - 10 * day;
        for (i, name) in ["a.cwasm", "a.lock", "b.cwasm", "c.cwasm", "d.cwasm", "e.tmp7"].into_iter().enumerate() {
            std::fs::write(at.join(name), [0; 100]).unwrap();
            let file = std::fs::File::options().write(true).open(at.join(name)).unwrap();
            file.set_modified(begun + i as u32 * day).unwrap();
        }
        let left = || {
            let mut all: Vec<_> =
                std::fs::read_dir(&at).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            all.sort();
            all
        };
        trim(&dir, 400, "d.cwasm").unwrap();
        assert_eq!(left(), ["a.cwasm", "a.lock", "b.cwasm", "c.cwasm", "d.cwasm"]);
        // The oldest but one is being read.
        let read = std::fs::File::open(at.join("b.cwasm")).unwrap();
        rustix::fs::flock(&read, FlockOperation::LockShared).unwrap();
        trim(&dir, 200, "d.cwasm").unwrap();
        assert_eq!(left(), ["b.cwasm", "d.cwasm"]);
        drop(read);
        trim(&dir, 0, "d.cwasm").unwrap();
        assert_eq!(left(), ["d.cwasm"]);
        std::fs::remove_dir_all(&at).unwrap();
    }

    /// What is used is new again.
    #[test]
    fn an_entry_that_is_loaded_is_not_the_oldest_any_more() {
        let engine = Engine::default();
        let at = std::env::temp_dir().join(format!("wccl-cache-used-{}", std::process::id()));
        let dir = open(&at).unwrap();
        store(&Component::new(&engine, b"\0asm\x0d\0\x01\0").unwrap(), &dir, "x").unwrap();
        let old = std::time::SystemTime::now() - Duration::from_secs(86_400);
        let file = std::fs::File::options().write(true).open(at.join("x.cwasm")).unwrap();
        file.set_modified(old).unwrap();
        assert!(load(&engine, &dir, "x").is_some());
        assert!(file.metadata().unwrap().modified().unwrap() > old + Duration::from_secs(3600));
        std::fs::remove_dir_all(&at).unwrap();
    }

    /// Whoever asks while it is in use gets the same code, at the same time too; one that does not compile keeps nobody waiting.
    #[test]
    fn what_is_in_use_is_shared_and_a_failure_is_not() {
        let engine = Engine::default();
        // Of this run alone: no cache has it.
        let bytes = wat::parse_str(format!("(component (core module (func (export \"{}\"))))", line!())).unwrap();
        let digest = format!("test-shared-{}", std::process::id());
        let first = std::thread::scope(|s| {
            let all: Vec<_> = (0..4).map(|_| s.spawn(|| compile(&engine, &bytes, &digest).unwrap())).collect();
            all.into_iter().map(|t| t.join().unwrap()).reduce(|a, b| {
                assert!(Arc::ptr_eq(&a, &b));
                b
            })
        })
        .unwrap();
        assert!(Arc::ptr_eq(&first, &kept(&engine, &digest).unwrap()));
        assert!(Arc::ptr_eq(&first, &compile(&engine, &bytes, &digest).unwrap()));
        let gone = Arc::downgrade(&first);
        drop(first);
        assert!(gone.upgrade().is_none());
        let digest = format!("test-bad-{}", std::process::id());
        for _ in 0..2 {
            assert!(compile(&engine, b"no component", &digest).is_err());
        }
        assert!(kept(&engine, &digest).is_none());
        if let Some(dir) = directory() {
            for name in dir.entries().unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()) {
                if name.starts_with(&format!("test-shared-{}-", std::process::id())) || name.starts_with(&digest) {
                    dir.remove_file(name).unwrap();
                }
            }
        }
    }

    /// Runs `f` on a thread that rounds up and has zeros for subnormals, as a program may leave one.
    #[cfg(target_arch = "x86_64")]
    fn in_another_float_state<R: Send>(f: impl FnOnce() -> R + Send) -> R {
        std::thread::scope(|s| {
            let changed = s.spawn(|| {
                let (mut before, state) = (0u32, 0x1F80u32 | 1 << 15 | 1 << 6 | 0b10 << 13);
                // SAFETY: four bytes are written, four read; the state is put back before the thread goes on.
                unsafe {
                    std::arch::asm!("stmxcsr [{}]", "ldmxcsr [{}]", in(reg) &raw mut before, in(reg) &raw const state);
                }
                let answer = f();
                // SAFETY: four bytes are read.
                unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const before) };
                answer
            });
            changed.join().unwrap()
        })
    }

    /// The compiler computes constants, on threads that inherit their state.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn code_does_not_depend_on_the_float_state_of_who_has_it_compiled() {
        let engine = crate::store::engine::engine().unwrap();
        // A subnormal product, a sum that is rounded; beside others, so that there is work for every thread.
        let function = "(func (export \"{}\") (result f64) (f64.add (f64.promote_f32 (f32.mul (f32.const 0x1p-100) (f32.const \
                        0x1p-40))) (f64.add (f64.const 1) (f64.const 0x1p-60))))";
        let functions: String = (0..64).map(|i| function.replace("{}", &i.to_string())).collect();
        let bytes = wat::parse_str(format!("(component (core module {functions}))")).unwrap();
        let code = |key: &str| {
            let made = kept_or_compiled(engine, &bytes, &format!("test-{}-{key}", std::process::id())).unwrap();
            made.serialize().unwrap()
        };
        let (usual, changed) = (code("usual"), in_another_float_state(|| code("changed")));
        if let Some(dir) = directory() {
            for (key, suffix) in [("usual", "cwasm"), ("usual", "lock"), ("changed", "cwasm"), ("changed", "lock")] {
                let _ = dir.remove_file(format!("test-{}-{key}.{suffix}", std::process::id()));
            }
        }
        assert!(usual == changed, "other code");
    }

    /// Code of another user is none, and what others may put there neither. Root gives directory and entry away for it; to
    /// everybody else root's are another's.
    #[test]
    fn what_another_user_owns_is_not_used() {
        let at = std::env::temp_dir().join(format!("wccl-cache-owner-{}", std::process::id()));
        let (engine, dir) = (Engine::default(), open(&at).unwrap());
        store(&Component::new(&engine, b"\0asm\x0d\0\x01\0").unwrap(), &dir, "x").unwrap();
        assert!(load(&engine, &dir, "x").is_some());
        let entry = at.join("x.cwasm");
        let gives_away = |path: &Path| std::os::unix::fs::chown(path, Some(65_534), None).is_ok();
        let anothers = if gives_away(&entry) {
            assert!(load(&engine, &dir, "x").is_none(), "an entry");
            assert!(gives_away(&at));
            at.clone()
        } else {
            // Nobody but root can have an entry of root's here; the check of both is one, and it is asked about one of root's.
            let root = Dir::open_ambient_dir("/", ambient_authority()).unwrap();
            assert!(!ours(&root.open("etc/passwd").unwrap().metadata().unwrap()));
            PathBuf::from("/")
        };
        assert!(open(&anothers).unwrap_err().contains("not ours alone"));
        std::fs::remove_dir_all(&at).unwrap();
    }

    /// What was compiled with other settings is another entry, so that code without the checks of this engine is not loaded.
    #[test]
    fn an_entry_is_bound_to_the_settings_of_the_engine() {
        let with = |set: fn(&mut wasmtime::Config)| {
            let mut config = wasmtime::Config::new();
            set(&mut config);
            Engine::new(&config).unwrap()
        };
        let usual = with(|_| {});
        assert_eq!(key(&usual, "digest"), key(&with(|_| {}), "digest"));
        assert_ne!(key(&usual, "digest"), key(&usual, "other"));
        // Without what ends guests, and with other bounds.
        let others = [
            with(|c| {
                c.epoch_interruption(true);
            }),
            with(|c| {
                c.memory_guard_size(64 << 10);
            }),
        ];
        let at = std::env::temp_dir().join(format!("wccl-cache-settings-{}", std::process::id()));
        let dir = open(&at).unwrap();
        let empty_component = b"\0asm\x0d\0\x01\0";
        for (i, other) in others.iter().enumerate() {
            assert_ne!(key(&usual, "digest"), key(other, "digest"), "{i}");
            // Under this engine's own name it would not be loaded either.
            store(&Component::new(other, empty_component).unwrap(), &dir, "x").unwrap();
            assert!(load(other, &dir, "x").is_some() && load(&usual, &dir, "x").is_none(), "{i}");
        }
        std::fs::remove_dir_all(&at).unwrap();
    }
}
