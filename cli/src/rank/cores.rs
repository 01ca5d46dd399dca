//! Cores that ranks of this program have to themselves, known among all jobs of one user.
//!
//! A rank that binds itself to a core holds a lock on a file that stands for the core, in a directory of its user under
//! /tmp, as long as it runs. Jobs that do not see that directory (another user's, another container's) are not known: where the
//! directory cannot be used nothing is bound.

use std::fs::{DirBuilder, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use rustix::fs::{FlockOperation, OFlags};

/// A core that nobody else of this user binds to, until this is dropped.
#[derive(Debug)]
pub struct Core {
    /// Its number.
    pub number: usize,
    _lock: File,
}

fn directory() -> PathBuf {
    // The same for all of a user's sessions, which $XDG_RUNTIME_DIR and $TMPDIR are not.
    PathBuf::from(format!("/tmp/wccl-cores-{}", rustix::process::geteuid().as_raw()))
}

/// Takes a free one of `cores`, `first` before the others; `None` if all are taken.
///
/// # Errors
/// One cannot know which are free.
pub fn take(cores: &[usize], first: usize) -> anyhow::Result<Option<Core>> {
    take_in(&directory(), cores, first)
}

fn take_in(dir: &Path, cores: &[usize], first: usize) -> anyhow::Result<Option<Core>> {
    let about = || format!("using {}", dir.display());
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(e).with_context(about),
        _ => {}
    }
    // Whoever may write there can make this wait for nothing, or lock what it likes.
    let meta = std::fs::symlink_metadata(dir).with_context(about)?;
    let own = meta.uid() == rustix::process::geteuid().as_raw() && meta.is_dir() && meta.mode() & 0o077 == 0;
    ensure!(own, "{} is not a directory of this user alone", dir.display());
    let others = cores.iter().enumerate().filter(|(i, _)| *i != first).map(|(_, c)| *c);
    for number in cores.get(first).copied().into_iter().chain(others) {
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).write(true).mode(0o600).custom_flags(OFlags::NOFOLLOW.bits() as i32);
        let lock = options.open(dir.join(format!("{number}.lock"))).with_context(about)?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(Core { number, _lock: lock })),
            Err(rustix::io::Errno::WOULDBLOCK) => {}
            Err(e) => return Err(e).with_context(about),
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_is_taken_once_and_free_again_later() {
        let dir = std::env::temp_dir().join(format!("wccl-cores-test-{}", std::process::id()));
        let number = |c: &Option<Core>| c.as_ref().map(|c| c.number);
        let one = take_in(&dir, &[4, 7], 0).unwrap();
        // The first choice of another job's first rank is taken.
        let two = take_in(&dir, &[4, 7], 0).unwrap();
        assert_eq!((number(&one), number(&two)), (Some(4), Some(7)));
        assert_eq!(number(&take_in(&dir, &[4, 7], 1).unwrap()), None);
        drop(one);
        assert_eq!(number(&take_in(&dir, &[4, 7], 1).unwrap()), Some(4));
        drop(two);
        assert_eq!(number(&take_in(&dir, &[4, 7], 1).unwrap()), Some(7));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_directory_that_others_can_write_is_not_used() {
        let dir = std::env::temp_dir().join(format!("wccl-cores-open-{}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&dir).unwrap();
        std::fs::set_permissions(&dir, std::os::unix::fs::PermissionsExt::from_mode(0o770)).unwrap();
        assert!(take_in(&dir, &[0], 0).unwrap_err().to_string().contains("this user alone"));
        std::fs::remove_dir_all(&dir).unwrap();
        let link = dir.with_extension("link");
        std::os::unix::fs::symlink("/tmp", &link).unwrap();
        assert!(take_in(&link, &[0], 0).is_err());
        std::fs::remove_file(&link).unwrap();
    }
}
