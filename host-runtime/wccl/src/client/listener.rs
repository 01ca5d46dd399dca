//! Who listens at a service's socket, asked of the kernel before a word is said to it: the first requests hold a group's key.
//!
//! The name of a socket says who listens only if nobody else can put another socket in its place. So the directory that holds
//! the name must be writable by its owner alone, and its owner must be who listens: the service's user, who makes the directory
//! ([`crate::serve::Server::start`]). Whose directory that is to be a client cannot know; docs/threat-model.md says what follows.
//!
//! Root could read the key anyway, and this user's own processes have it.

use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use hw_bridge::os::credentials;

/// The directory in which a socket's name lies: its owner, and its mode.
#[derive(Debug, Clone, Copy)]
struct Place {
    owner: u32,
    mode: u32,
}

/// Whether who listens at `socket`, at the other end of `stream`, is to be spoken with by the user `me`.
///
/// # Errors
/// Why not, in a sentence.
pub(super) fn check(stream: &UnixStream, socket: &Path, me: u32) -> Result<(), String> {
    let who = credentials::of_peer(stream).map_err(|e| format!("the kernel does not say who listens there: {e}"))?;
    // Not followed to its end: who can write the directory of a link says where it leads.
    let dir = socket.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let meta = std::fs::metadata(dir).map_err(|e| format!("its directory {} cannot be inspected: {e}", dir.display()));
    let place = meta.map(|m| Place { owner: m.uid(), mode: m.mode() & 0o7777 });
    trusted(who.uid, me, place, dir)
}

/// Whether `me` may speak with user `who`, who listens under a name in `dir`.
fn trusted(who: u32, me: u32, place: Result<Place, String>, dir: &Path) -> Result<(), String> {
    if who == 0 || who == me {
        return Ok(());
    }
    let at = dir.display();
    let Place { owner, mode } = place?;
    // The sticky bit keeps a name from being taken away, not from being taken first.
    if mode & 0o022 != 0 {
        return Err(format!(
            "user {who} listens there, in a directory that others than its owner can write ({at}, user {owner}, mode {mode:o}), so \
             it may be anybody; have the owner take that away (chmod go-w {at}), or the service use a directory of its own \
             (wccl serve --sockets)"
        ));
    }
    if who != owner {
        return Err(format!(
            "user {who} listens there, and user {owner} was expected, whose the directory {at} is; have the service's user own the \
             directory, or the service use another one (wccl serve --sockets)"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_root_this_user_and_the_owner_of_a_directory_of_its_own_are_spoken_with() {
        let dir = Path::new("/run/wccl");
        let says = |who, owner, mode| trusted(who, 1000, Ok(Place { owner, mode }), dir);
        for (who, owner, mode) in [
            (990, 990, 0o711),
            (990, 990, 0o755),
            (990, 990, 0o1700),
            // In whatever place.
            (0, 990, 0o711),
            (0, 1001, 0o777),
            (1000, 0, 0o1777),
        ] {
            assert_eq!(says(who, owner, mode), Ok(()), "{who} in {owner}'s, {mode:o}");
        }
        for (who, owner, mode, why) in [
            (1001, 990, 0o711, "user 1001 listens there, and user 990 was expected"),
            (1001, 1000, 0o700, "user 1001 listens there, and user 1000 was expected"),
            (1001, 0, 0o755, "user 1001 listens there, and user 0 was expected"),
            (1001, 0, 0o1777, "user 1001 listens there, in a directory that others than its owner can write"),
            // Its owner, but anybody could be.
            (990, 990, 0o777, "chmod go-w /run/wccl"),
            (990, 990, 0o1777, "user 990, mode 1777"),
            (990, 990, 0o771, "(/run/wccl, user 990, mode 771)"),
        ] {
            let e = says(who, owner, mode).unwrap_err();
            assert!(e.contains(why), "{e}");
        }
        let unknown = Err("its directory cannot be inspected".to_string());
        assert_eq!(trusted(1001, 1000, unknown.clone(), dir), unknown.clone().map(|_: Place| ()));
        assert_eq!(trusted(0, 1000, unknown, dir), Ok(()));
    }
}
