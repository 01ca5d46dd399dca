//! The directory of this user's own: compiled plugins, and the secret of its jobs.
//!
//! What is in it runs with the host's rights or opens a group, so it counts only if it belongs to this user and nobody else can
//! write it; it is checked once it is open.

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use cap_std::ambient_authority;
use cap_std::fs::{Dir, Metadata, MetadataExt};

use crate::vars;

/// Where compiled components are kept, by the variables that `look_up` knows: `WCCL_CACHE_DIR` (`off` for nowhere), else the
/// user's cache directory, if there is one.
pub(crate) fn place(look_up: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
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

/// Where compiled components are kept; `None` if there is no such place or it cannot be used, which is said.
pub(crate) fn directory() -> Option<Dir> {
    let path = place(|name| std::env::var_os(name))?;
    open(&path).inspect_err(|why| not_kept(&format!("{}: {why}", path.display()))).ok()
}

/// Says once that nothing is kept. Of the ranks of a job on one machine the first says it for all.
pub(crate) fn not_kept(why: &str) {
    static SAID: std::sync::Once = std::sync::Once::new();
    SAID.call_once(|| {
        let said = format!("compiled plugins are not kept, and every process compiles anew: {why}; set WCCL_CACHE_DIR");
        match std::env::var("LOCAL_RANK").is_ok_and(|rank| rank != "0") {
            true => tracing::debug!("{said}"),
            false => tracing::warn!("{said}"),
        }
    });
}

pub(crate) fn open(path: &Path) -> Result<Dir, String> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(|e| e.to_string())?;
    let dir = Dir::open_ambient_dir(path, ambient_authority()).map_err(|e| e.to_string())?;
    if !ours(&dir.dir_metadata().map_err(|e| e.to_string())?) {
        return Err("the directory is not ours alone".into());
    }
    Ok(dir)
}

/// Whether it belongs to this user, and nobody else may write it.
pub(crate) fn ours(meta: &Metadata) -> bool {
    meta.uid() == rustix::process::geteuid().as_raw() && meta.mode() & 0o022 == 0
}
