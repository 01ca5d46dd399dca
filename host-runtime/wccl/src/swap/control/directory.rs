//! Where control sockets lie: a directory that nobody but this user can enter.
//!
//! A name that anyone can bind is no address: who binds it first is asked in the place of whom one meant. So the sockets lie
//! behind the file system's rights. The directory is opened once, without following a link in its name, its owner and mode are
//! those of what was opened, and whatever is done in it afterwards goes through that descriptor.
//!
//! A process that is killed leaves its socket behind. Nobody listens at such a one, which the kernel says to whoever connects
//! (`ECONNREFUSED`), whatever PID namespace its process lived in; it is removed by whoever finds that. For this to be certain a
//! socket gets its name only when it listens: it is bound under another one, which begins with [`UNDER_WAY`].

use std::io::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use hw_bridge::os::dial::dial;
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::SocketAddrUnix;

use crate::swap::control::{is_gone, process_of};

/// What the name of a socket begins with that does not listen yet. No tenant's tag does.
const UNDER_WAY: char = '+';
/// How often a socket is bound again whose file has gone: a process of another PID namespace took it for a dead one's.
const ATTEMPTS: usize = 8;

/// The directory, open.
#[derive(Debug, Clone)]
pub(crate) struct Directory(Arc<OwnedFd>);

/// Where it may be, best first. Sockets are made in the first that can be had and looked for in all of them, since not every
/// process of a user has the same environment, and a session's directory comes and goes.
pub(super) fn places() -> Vec<PathBuf> {
    let me = rustix::process::geteuid();
    let session = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|d| d.is_absolute());
    let mut all: Vec<PathBuf> = session.into_iter().map(|d| d.join("wccl")).collect();
    all.push(PathBuf::from(format!("/run/user/{}/wccl", me.as_raw())));
    // Only root can make one there, so that nobody else can take the name.
    all.extend(me.is_root().then(|| "/run/wccl-0".into()));
    all.push(PathBuf::from(format!("/tmp/wccl-{}", me.as_raw())));
    all.dedup();
    all
}

impl Directory {
    /// Opens the directory at `path`; `None` if there is none.
    ///
    /// # Errors
    /// Why it is not used, in a sentence.
    pub(super) fn open(path: &Path) -> Result<Option<Directory>, String> {
        let at = path.display();
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
        let fd = match rustix::fs::open(path, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            // What a link in its place is answered with.
            Err(Errno::NOTDIR | Errno::LOOP) => return Err(format!("{at} is not a directory")),
            Err(e) => return Err(format!("{at} cannot be opened: {e}")),
            Ok(fd) => fd,
        };
        let meta = rustix::fs::fstat(&fd).map_err(|e| format!("{at} cannot be inspected: {e}"))?;
        let (me, mode) = (rustix::process::geteuid().as_raw(), meta.st_mode & 0o7777);
        if meta.st_uid != me {
            return Err(format!("{at} belongs to user {}, not to this one ({me})", meta.st_uid));
        }
        if mode & 0o077 != 0 {
            return Err(format!("{at} has mode {mode:o}, with which others can enter it; 700 is expected"));
        }
        Ok(Some(Directory(Arc::new(fd))))
    }

    /// Opens the first of [`places`] that can be had, and makes it.
    ///
    /// # Errors
    /// Why none of them is used.
    pub(super) fn make(places: &[PathBuf]) -> Result<Directory, String> {
        let mut why = Vec::new();
        for path in places {
            let made = match std::fs::DirBuilder::new().mode(0o700).create(path) {
                Err(e) if e.kind() != ErrorKind::AlreadyExists => {
                    Err(format!("{} cannot be made: {e}", path.display()))
                }
                _ => Directory::open(path),
            };
            match made {
                Ok(Some(dir)) => return Ok(dir),
                Ok(None) => why.push(format!("{} has gone", path.display())),
                Err(e) => why.push(e),
            }
        }
        Err(why.join("; "))
    }

    /// A name in it, as a path: short, whatever the directory's own is, and of the directory that was checked.
    fn at(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.0.as_raw_fd()))
    }

    /// A listening socket of that name, which nobody has yet.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn listen(&self, name: &str) -> std::io::Result<UnixListener> {
        let under_way = format!("{UNDER_WAY}{name}");
        let mut attempts = 0;
        loop {
            let listener = UnixListener::bind(self.at(&under_way))?;
            match rustix::fs::renameat(&*self.0, &under_way, &*self.0, name) {
                Ok(()) => return Ok(listener),
                Err(Errno::NOENT) if attempts < ATTEMPTS => attempts += 1,
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Connects to the socket of that name before `until`.
    ///
    /// # Errors
    /// The kernel's: `CONNREFUSED` if nobody listens at it.
    pub(super) fn dial(&self, name: &str, until: Instant) -> Result<std::os::unix::net::UnixStream, Errno> {
        dial(&SocketAddrUnix::new(self.at(name))?, None, until)
    }

    /// Removes a socket, if it is there.
    pub(super) fn remove(&self, name: &str) {
        // One that another has removed is gone as well; one that cannot be removed is found dead again.
        let _ = rustix::fs::unlinkat(&*self.0, name, AtFlags::empty());
    }

    /// The names of the sockets in it, without those that are known to be left over: of a process that is gone and with nobody
    /// who listens. These are removed.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn sockets(&self) -> std::io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(self.at("."))? {
            let Ok(name) = entry?.file_name().into_string() else { continue };
            if !process_of(name.trim_start_matches(UNDER_WAY)).is_some_and(is_gone) {
                names.extend((!name.starts_with(UNDER_WAY)).then_some(name));
                continue;
            }
            // The process may be another PID namespace's, or have left the socket to a child.
            let dead =
                name.starts_with(UNDER_WAY) || matches!(self.dial(&name, Instant::now()), Err(Errno::CONNREFUSED));
            if dead { self.remove(&name) } else { names.push(name) }
        }
        Ok(names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    /// A place of its own, removed at the end.
    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Place {
            let at = std::env::temp_dir().join(format!("wccl-control-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&at);
            std::fs::create_dir(&at).unwrap();
            Place(at)
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            // A leftover in the temporary folder is harmless.
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn only_a_directory_that_nobody_else_can_enter_is_used() {
        let place = Place::new("rights");
        let at = place.0.join("wccl");
        assert!(Directory::open(&at).unwrap().is_none());
        Directory::make(std::slice::from_ref(&at)).unwrap();
        assert_eq!(std::fs::metadata(&at).unwrap().mode() & 0o7777, 0o700);
        let refused = |says: &str| {
            let e = Directory::make(std::slice::from_ref(&at)).unwrap_err();
            assert!(e.contains(says) && e.contains(at.to_str().unwrap()), "{e}");
            assert_eq!(Directory::open(&at).unwrap_err(), e);
        };
        for mode in [0o701, 0o710, 0o770, 0o1777] {
            std::fs::set_permissions(&at, std::fs::Permissions::from_mode(mode)).unwrap();
            refused(&format!("has mode {mode:o}"));
        }
        // Ours, but elsewhere: whoever can write the parent may exchange what the link points to.
        let elsewhere = place.0.join("elsewhere");
        Directory::make(std::slice::from_ref(&elsewhere)).unwrap();
        std::fs::remove_dir(&at).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &at).unwrap();
        refused("is not a directory");
        std::fs::remove_file(&at).unwrap();
        std::fs::write(&at, "").unwrap();
        refused("is not a directory");
        // The next place serves where one does not.
        Directory::make(&[at, elsewhere]).unwrap();
    }

    /// Root gives one away for it; to everybody else root's is another's.
    #[test]
    fn a_directory_of_another_user_is_not_used() {
        let place = Place::new("owner");
        let at = place.0.join("wccl");
        Directory::make(std::slice::from_ref(&at)).unwrap();
        let (at, owner) = match std::os::unix::fs::chown(&at, Some(65_534), None) {
            Ok(()) => (at, 65_534),
            Err(_) => (PathBuf::from("/"), 0),
        };
        let e = Directory::make(&[at]).unwrap_err();
        assert!(e.contains(&format!("belongs to user {owner}")), "{e}");
    }

    #[test]
    fn what_a_dead_process_left_is_removed_and_what_listens_stays() {
        let place = Place::new("stale");
        let dir = Directory::make(&[place.0.join("wccl")]).unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let (gone, me) = (child.id(), std::process::id());
        // Of a process that is not here any more: with somebody who listens (a child, another PID namespace), and without.
        let listens = dir.listen(&format!("red-{gone}-1")).unwrap();
        drop(dir.listen(&format!("red-{gone}-2")).unwrap());
        drop(UnixListener::bind(dir.at(&format!("+red-{gone}-3"))).unwrap());
        let mine = dir.listen(&format!("red-{me}-4")).unwrap();
        let names = || {
            let mut names = dir.sockets().unwrap();
            names.sort();
            names
        };
        let mut want = vec![format!("red-{gone}-1"), format!("red-{me}-4")];
        want.sort();
        assert_eq!(names(), want);
        assert_eq!(std::fs::read_dir(dir.at(".")).unwrap().count(), 2);
        drop((listens, mine));
        // Whose number another process has now is found out by who dials.
        assert_eq!(names(), [format!("red-{me}-4")]);
        let until = Instant::now() + std::time::Duration::from_secs(10);
        assert_eq!(dir.dial(&format!("red-{me}-4"), until).unwrap_err(), Errno::CONNREFUSED);
    }
}
