//! The secret of a job: chosen by a variable or in a file, else that which a user's own jobs share.
//!
//! The user's own is a file beside the cache of compiled code, made once. Ranks of a job that start together may all find it absent: each writes one of its own and links it to the name, which one of
//! them can; all read what is there then. It is believed only if it is this user's and nobody else can read or write it, in a
//! directory that nobody else can write.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt as _;

use cap_std::fs::{Dir, MetadataExt, OpenOptions, OpenOptionsExt};
use hw_bridge::os::random;

use crate::error::Error;
use crate::file::{NONBLOCK, contents};
use crate::key::{JobSecret, KEY_BYTES};
use crate::place::directory;
use crate::vars;

/// Least bytes of a job's secret that somebody chose.
const LEAST_SECRET: usize = 16;
/// Most bytes of a file with one.
const MOST_SECRET: u64 = 4096;

/// Its name in the directory.
const NAME: &str = "job-secret";

/// The secret of this process's job: `WCCL_JOB_SECRET`, else what the file `WCCL_JOB_SECRET_FILE` holds, else the user's own.
///
/// # Errors
/// [`Error::Config`] names the variable and what was expected, or all three if there is none; no text repeats a secret.
pub fn job_secret() -> Result<JobSecret, Error> {
    let set = |name: &str| vars::path(std::env::var_os(name));
    if let Some(text) = set("WCCL_JOB_SECRET") {
        return chosen("WCCL_JOB_SECRET", text.as_os_str().as_encoded_bytes());
    }
    if let Some(path) = set("WCCL_JOB_SECRET_FILE") {
        let named = format!("WCCL_JOB_SECRET_FILE={}", path.display());
        let file = std::fs::OpenOptions::new().read(true).custom_flags(NONBLOCK).open(&path);
        let text = contents(file, "job's secret", MOST_SECRET);
        return chosen(&named, &text.map_err(|why| Error::Config(format!("{named}: {why}")))?);
    }
    let dir = directory().ok_or_else(|| "there is no cache directory that is this user's alone".to_string());
    dir.and_then(|dir| own(&dir)).map(|secret| JobSecret(secret.to_vec())).map_err(|why| {
        Error::Config(format!(
            "the ranks of a group that meets at host:port know one another by a secret, and this process has none: \
             WCCL_JOB_SECRET and WCCL_JOB_SECRET_FILE are not set, and the user's own in the cache directory cannot be had: {why}; \
             set one of the two to the same on all ranks (`wccl run` does)"
        ))
    })
}

/// A secret that somebody chose, without the line end that an editor puts behind it.
fn chosen(from: &str, text: &[u8]) -> Result<JobSecret, Error> {
    let text = text.trim_ascii();
    if text.len() < LEAST_SECRET {
        let have = text.len();
        return Err(Error::Config(format!(
            "{from} holds {have} bytes; a job's secret has at least {LEAST_SECRET}, such as those of `openssl rand -hex 32`"
        )));
    }
    Ok(JobSecret(text.to_vec()))
}

/// The secret in `dir`, which is this user's alone.
///
/// # Errors
/// Why there is none, as a clause.
fn own(dir: &Dir) -> Result<[u8; KEY_BYTES], String> {
    if let Some(secret) = read(dir)? {
        return Ok(secret);
    }
    make(dir).map_err(|e| format!("the file {NAME} cannot be made: {e}"))?;
    read(dir)?.ok_or_else(|| format!("the file {NAME} is gone again"))
}

/// The secret, if it has been made.
fn read(dir: &Dir) -> Result<Option<[u8; KEY_BYTES]>, String> {
    let io = |e: std::io::Error| format!("the file {NAME} cannot be read: {e}");
    let mut file = match dir.open_with(NAME, OpenOptions::new().read(true).custom_flags(NONBLOCK)) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io(e)),
    };
    let meta = file.metadata().map_err(io)?;
    let me = rustix::process::geteuid().as_raw();
    if !meta.is_file() || meta.uid() != me || meta.mode() & 0o077 != 0 {
        return Err(format!(
            "{NAME} is to be a file of user {me} that nobody else can read or write (mode 0600); remove it, and all ranks that run \
             start again with another one"
        ));
    }
    let mut secret = Vec::new();
    (&mut file).take(KEY_BYTES as u64 + 1).read_to_end(&mut secret).map_err(io)?;
    let bytes = meta.len();
    let secret =
        secret.try_into().map_err(|_| format!("{NAME} has {bytes} bytes, {KEY_BYTES} are expected; remove it"))?;
    Ok(Some(secret))
}

/// Makes one, unless somebody else does.
fn make(dir: &Dir) -> std::io::Result<()> {
    let (secret, tag): ([u8; KEY_BYTES], [u8; 8]) = (random::bytes()?, random::bytes()?);
    // Of this call alone, also where processes of several PID namespaces share the directory.
    let temp = format!("{NAME}.{:016x}", u64::from_le_bytes(tag));
    let mut file = dir.open_with(&temp, OpenOptions::new().create_new(true).write(true).mode(0o600))?;
    // Whole before it has its name.
    let made = file.write_all(&secret).and_then(|()| file.sync_all()).and_then(|()| dir.hard_link(&temp, dir, NAME));
    // One that stays is no secret of anybody's.
    let _ = dir.remove_file(&temp);
    match made {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => Err(e),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Place {
            let at = std::env::temp_dir().join(format!("wccl-job-test-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&at);
            std::fs::create_dir(&at).unwrap();
            Place(at)
        }

        fn dir(&self) -> Dir {
            Dir::open_ambient_dir(&self.0, cap_std::ambient_authority()).unwrap()
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            // A leftover in the temporary folder is harmless.
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn all_who_come_together_have_one_secret() {
        let place = Place::new("race");
        let start = std::sync::Barrier::new(8);
        let all: HashSet<[u8; KEY_BYTES]> = std::thread::scope(|s| {
            let each = || {
                start.wait();
                own(&place.dir()).unwrap()
            };
            let ranks: Vec<_> = (0..8).map(|_| s.spawn(each)).collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        });
        assert_eq!(all.len(), 1);
        assert_ne!(all, HashSet::from([[0; KEY_BYTES]]));
        // Nothing else is left, and the file is the user's alone.
        let names: Vec<_> = std::fs::read_dir(&place.0).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, [NAME]);
        assert_eq!(std::fs::metadata(place.0.join(NAME)).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(own(&place.dir()).unwrap(), *all.iter().next().unwrap());
    }

    #[test]
    fn a_file_that_others_can_read_or_that_is_cut_is_no_secret() {
        let place = Place::new("odd");
        own(&place.dir()).unwrap();
        let file = place.0.join(NAME);
        let said = |why: &str| {
            let e = own(&place.dir()).unwrap_err();
            assert!(e.contains(why), "{e}");
        };
        for mode in [0o640, 0o604, 0o620, 0o602] {
            std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).unwrap();
            said("nobody else can read or write");
        }
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
        for bytes in [0, 31, 33, 4096] {
            std::fs::write(&file, vec![1; bytes]).unwrap();
            said(&format!("has {bytes} bytes, 32 are expected"));
        }
        std::fs::remove_file(&file).unwrap();
        std::fs::create_dir(&file).unwrap();
        said("is to be a file");
    }

    #[test]
    fn a_secret_that_is_too_short_is_refused_and_not_repeated() {
        let e = chosen("WCCL_JOB_SECRET", b"short\n").unwrap_err().to_string();
        assert!(e.contains("WCCL_JOB_SECRET holds 5 bytes") && !e.contains("short"), "{e}");
        assert_eq!(chosen("x", b"0123456789abcdef\n").unwrap(), JobSecret(b"0123456789abcdef".to_vec()));
    }
}
