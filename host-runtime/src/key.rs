//! The key of a group: 32 secret bytes that each of its hosts derives from what its *program* was given, never from what a
//! plugin carried. By it the hosts of a group know one another: their links, their meeting places, their sockets.
//!
//! | a group made by | its key |
//! |---|---|
//! | a unique id | HMAC(secret part of the id, `id`, tenant's number) |
//! | `host:port` | HMAC(the job's secret, `root`, tenant's number, port) |
//! | a communicator, of some of its ranks | HMAC(that one's key, kind, members, how many with this list came before) |
//!
//! All are HMAC-SHA256 with a label for each use, so that no key can be had from another one but downwards. The tenant's
//! number stands in those that begin a chain: two tenants never share a key.
//!
//! A unique id is the address of the root and zeros where a plugin makes or reads it (INV-21); the host puts 32 random bytes
//! behind the address before the program sees it, and takes them out on the way back (docs/decisions/0005-group-keys.md).
//! Keys and secrets are in no log, no error text and no message but those between a program and its own service.

use std::os::unix::fs::OpenOptionsExt;

use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::error::Error;
use crate::limits::{ADDRESS_BYTES, ID_BYTES};
use crate::plugin::cache::directory;
use crate::plugin::source::{NONBLOCK, contents};
use crate::vars;

/// Bytes of a key, and of the secret part of an id.
pub(crate) const KEY_BYTES: usize = 32;
/// Where the secret part of an id ends; it begins behind the root's address.
const SECRET_END: usize = ADDRESS_BYTES + KEY_BYTES;
/// Least bytes of a job's secret that somebody chose.
const LEAST_SECRET: usize = 16;
/// Most bytes of a file with one.
const MOST_SECRET: u64 = 4096;

/// The key of a group; never printed.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct GroupKey([u8; KEY_BYTES]);

impl std::fmt::Debug for GroupKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GroupKey")
    }
}

impl PartialEq for GroupKey {
    /// Takes the same time for any two.
    fn eq(&self, other: &GroupKey) -> bool {
        self.0.iter().zip(other.0).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
    }
}

impl Eq for GroupKey {}

/// How a group of a communicator's ranks is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// A replica group of a program.
    Replica,
    /// The ranks of one colour.
    Split,
    /// Those that are left.
    Shrink,
}

impl Kind {
    fn label(self) -> &'static str {
        match self {
            Kind::Replica => "replica group",
            Kind::Split => "split",
            Kind::Shrink => "shrink",
        }
    }
}

/// A MAC with `key` for one use. The label's length goes first: no label and what follows it are those of another use.
fn mac(key: &[u8], label: &str) -> Hmac<Sha256> {
    // Keys of any length are taken; one of more than a block is hashed first, as RFC 2104 says.
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("a MAC takes a key of any length");
    mac.update(&[label.len() as u8]);
    mac.update(label.as_bytes());
    mac
}

fn key(mac: Hmac<Sha256>) -> GroupKey {
    GroupKey(mac.finalize().into_bytes().into())
}

impl GroupKey {
    /// Of a group that meets by an id with this secret part.
    pub(crate) fn of_id(secret: &[u8; KEY_BYTES], tenant: u64) -> GroupKey {
        let mut m = mac(secret, "id");
        m.update(&tenant.to_le_bytes());
        key(m)
    }

    /// Of a group that meets at a port, by the secret of its job. How many ranks it has is the root's to check, which says what
    /// does not fit.
    pub(crate) fn of_root(job: &JobSecret, tenant: u64, port: u16) -> GroupKey {
        let mut m = mac(&job.0, "root");
        m.update(&tenant.to_le_bytes());
        m.update(&port.to_le_bytes());
        key(m)
    }

    /// Of a group of some ranks of this one; `nth` is how many groups of the kind with this list came before.
    pub(crate) fn group(&self, kind: Kind, members: &[usize], nth: u32) -> GroupKey {
        let mut m = self.tag(kind.label());
        m.update(&(members.len() as u64).to_le_bytes());
        for rank in members {
            m.update(&(*rank as u64).to_le_bytes());
        }
        m.update(&nth.to_le_bytes());
        key(m)
    }

    /// By which its hosts know one another's links.
    pub(crate) fn links(&self) -> [u8; KEY_BYTES] {
        key(self.tag("links")).0
    }

    /// By which its hosts know one another's messages at their meeting places.
    pub(crate) fn meetings(&self) -> [u8; KEY_BYTES] {
        key(self.tag("meetings")).0
    }

    /// A MAC by this key for the use `label`, which nothing else has.
    pub(crate) fn tag(&self, label: &str) -> Hmac<Sha256> {
        mac(&self.0, label)
    }
}

/// What the processes of a job share that meet at `host:port`; never printed.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct JobSecret(Vec<u8>);

impl std::fmt::Debug for JobSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JobSecret")
    }
}

/// The secret of this process's job: `WCCL_JOB_SECRET`, else what the file `WCCL_JOB_SECRET_FILE` holds, else the user's own.
///
/// # Errors
/// [`Error::Config`] names the variable and what was expected, or all three if there is none; no text repeats a secret.
pub(crate) fn job_secret() -> Result<JobSecret, Error> {
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
    dir.and_then(|dir| crate::job::own(&dir)).map(|secret| JobSecret(secret.to_vec())).map_err(|why| {
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

/// Random bytes for the secret part of an id.
///
/// # Errors
/// [`Error::System`] if the system gives none.
pub(crate) fn draw() -> Result<[u8; KEY_BYTES], Error> {
    let what = || "reading random bytes for a unique id".to_string();
    hw_bridge::os::random::bytes().map_err(|source| Error::System { what: what(), source })
}

/// What a plugin answered as an id: an address and zeros (INV-20, INV-21).
///
/// # Errors
/// [`Error::Usage`] for another length, or bytes behind the address: the place of the secret is the host's.
pub(crate) fn answered(id: Vec<u8>) -> Result<[u8; ID_BYTES], Error> {
    let len = id.len();
    let id: [u8; ID_BYTES] = id.try_into().map_err(|_| {
        Error::Usage(format!("the plugin answered an id of {len} bytes, {ID_BYTES} are required (INV-20)"))
    })?;
    if let Some(at) = id[ADDRESS_BYTES..].iter().position(|b| *b != 0) {
        return Err(Error::Usage(format!(
            "the plugin answered an id whose byte {} is not zero; it is the root's address in {ADDRESS_BYTES} bytes, and zeros \
             (INV-21): the host puts the group's secret there",
            ADDRESS_BYTES + at
        )));
    }
    Ok(id)
}

/// An id as the program gets it.
pub(crate) fn with_secret(mut public: [u8; ID_BYTES], secret: &[u8; KEY_BYTES]) -> [u8; ID_BYTES] {
    public[ADDRESS_BYTES..SECRET_END].copy_from_slice(secret);
    public
}

/// An id as the plugin sees it, without what is behind the address.
pub(crate) fn public(id: &[u8; ID_BYTES]) -> [u8; ID_BYTES] {
    let mut public = [0; ID_BYTES];
    public[..ADDRESS_BYTES].copy_from_slice(&id[..ADDRESS_BYTES]);
    public
}

/// The secret part of an id that a program brings.
///
/// # Errors
/// [`Error::Usage`] for one without: nobody could tell its group's members from others.
pub(crate) fn secret_of(id: &[u8; ID_BYTES]) -> Result<[u8; KEY_BYTES], Error> {
    let mut secret = [0; KEY_BYTES];
    secret.copy_from_slice(&id[ADDRESS_BYTES..SECRET_END]);
    if secret == [0; KEY_BYTES] {
        return Err(Error::Usage(format!(
            "the unique id has no secret part (bytes {ADDRESS_BYTES} to {}), so no unique_id made it; hand all {ID_BYTES} bytes of \
             one that Runtime::unique_id answered to every rank",
            SECRET_END - 1
        )));
    }
    Ok(secret)
}

/// The port that a `host:port` ends with; 0 where there is none, which the library refuses.
pub(crate) fn port_of(root: &str) -> u16 {
    root.rsplit_once(':').and_then(|(_, port)| port.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
impl GroupKey {
    /// Some key.
    pub(crate) fn some() -> GroupKey {
        GroupKey([0x4B; KEY_BYTES])
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn job(text: &[u8]) -> JobSecret {
        JobSecret(text.to_vec())
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    /// Computed with Python's `hmac`, from what the module's header says.
    #[test]
    fn keys_are_what_the_header_says() {
        let secret: [u8; KEY_BYTES] = std::array::from_fn(|i| i as u8);
        let id = GroupKey::of_id(&secret, 7);
        assert_eq!(hex(&id.0), VECTORS[0]);
        assert_eq!(hex(&GroupKey::of_root(&job(b"a secret of sixteen"), 7, 4567).0), VECTORS[1]);
        assert_eq!(hex(&id.group(Kind::Replica, &[0, 2], 0).0), VECTORS[2]);
        assert_eq!(hex(&id.group(Kind::Split, &[0, 2], 1).0), VECTORS[3]);
        assert_eq!(hex(&id.group(Kind::Shrink, &[1], 0).0), VECTORS[4]);
        assert_eq!(hex(&id.links()), VECTORS[5]);
        assert_eq!(hex(&id.meetings()), VECTORS[6]);
    }

    const VECTORS: [&str; 7] = [
        "01982674f9a81e18dc782d42fe323a215919ac856490e886fb108d39e1da93b3",
        "1edeed32d10379cf47689e794db72d73f1779c801ee3379a3d4896faa95be5aa",
        "c6a679f32156e6a92947e5d95de1bb170023cae3dc93d10d89d2b4b6d7298052",
        "b492192d4535ab558133990f56ea99695cb3540bc655e4c829a39e30420018ad",
        "de39444868adea43a5e49b0a0460cc9f011268b8925fc79c60a795d761560e60",
        "f1a2f391d9d75a60202d67e70dba5c71aa901f8840c46b6a9ba46f8d80d69ab7",
        "c3852aa0c6ed59d00190adf616c4df4b4ab3e6453678dfc7a12c7923b565a114",
    ];

    #[test]
    fn each_input_of_a_key_changes_it() {
        let (a, b) = ([1; KEY_BYTES], [2; KEY_BYTES]);
        let (k, l) = (GroupKey::of_id(&a, 0), GroupKey::of_id(&b, 0));
        let (s, t) = (job(&[1; KEY_BYTES]), job(&[2; KEY_BYTES]));
        let mut all = vec![
            k,
            l,
            GroupKey::of_id(&a, 1),
            GroupKey::of_root(&s, 0, 5),
            GroupKey::of_root(&t, 0, 5),
            GroupKey::of_root(&s, 1, 5),
            GroupKey::of_root(&s, 0, 6),
            GroupKey(k.links()),
            GroupKey(l.links()),
            GroupKey(k.meetings()),
            GroupKey(l.meetings()),
        ];
        for kind in [Kind::Replica, Kind::Split, Kind::Shrink] {
            for (members, nth) in [(&[0, 1][..], 0), (&[0, 1], 1), (&[1, 0], 0), (&[0], 1), (&[0, 1, 0], 0), (&[], 0)] {
                all.extend([k.group(kind, members, nth), l.group(kind, members, nth)]);
            }
        }
        let different: HashSet<[u8; KEY_BYTES]> = all.iter().map(|k| k.0).collect();
        assert_eq!(different.len(), all.len());
    }

    #[test]
    fn no_key_is_printed() {
        assert_eq!(format!("{:?} {:?}", GroupKey::some(), job(b"0123456789abcdef")), "GroupKey JobSecret");
        let e = chosen("WCCL_JOB_SECRET", b"short\n").unwrap_err().to_string();
        assert!(e.contains("WCCL_JOB_SECRET holds 5 bytes") && !e.contains("short"), "{e}");
        assert_eq!(chosen("x", b"0123456789abcdef\n").unwrap(), job(b"0123456789abcdef"));
    }

    /// Proves INV-20, INV-21.
    #[test]
    fn an_id_has_its_secret_outside_the_plugin_only() {
        let mut plugins = vec![0; ID_BYTES];
        plugins[..ADDRESS_BYTES].fill(0xAB);
        let public_part = answered(plugins.clone()).unwrap();
        let secret = draw().unwrap();
        let id = with_secret(public_part, &secret);
        assert_eq!((secret_of(&id).unwrap(), public(&id)), (secret, public_part));
        let e = secret_of(&public_part).unwrap_err().to_string();
        assert!(e.contains("no secret part (bytes 28 to 59)"), "{e}");
        for at in [28, 59, 60, 127] {
            let mut wrong = plugins.clone();
            wrong[at] = 1;
            let e = answered(wrong).unwrap_err().to_string();
            assert!(e.contains(&format!("whose byte {at} is not zero")), "{e}");
        }
        assert!(answered(vec![0; 127]).unwrap_err().to_string().contains("an id of 127 bytes"));
    }

    #[test]
    fn the_port_of_a_root_is_its_last_part() {
        for (text, port) in
            [("10.0.0.1:4567", 4567), ("[fd00::1%eth0]:80", 80), ("node-1:9", 9), ("node", 0), ("node:x", 0), ("", 0)]
        {
            assert_eq!(port_of(text), port, "{text}");
        }
    }
}
