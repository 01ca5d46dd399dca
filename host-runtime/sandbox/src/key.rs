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

use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

/// Bytes of a key, and of the secret part of an id.
pub const KEY_BYTES: usize = 32;

/// The key of a group; never printed.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct GroupKey([u8; KEY_BYTES]);

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
pub enum GroupKind {
    /// A replica group of a program.
    Replica,
    /// The ranks of one colour.
    Split,
    /// Those that are left.
    Shrink,
}

impl GroupKind {
    fn label(self) -> &'static str {
        match self {
            GroupKind::Replica => "replica group",
            GroupKind::Split => "split",
            GroupKind::Shrink => "shrink",
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
    pub fn of_id(secret: &[u8; KEY_BYTES], tenant: u64) -> GroupKey {
        let mut m = mac(secret, "id");
        m.update(&tenant.to_le_bytes());
        key(m)
    }

    /// Of a group that meets at a port, by the secret of its job. How many ranks it has is the root's to check, which says what
    /// does not fit.
    pub fn of_root(job: &JobSecret, tenant: u64, port: u16) -> GroupKey {
        let mut m = mac(&job.0, "root");
        m.update(&tenant.to_le_bytes());
        m.update(&port.to_le_bytes());
        key(m)
    }

    /// Of a group of some ranks of this one; `nth` is how many groups of the kind with this list came before.
    pub fn group(&self, kind: GroupKind, members: &[usize], nth: u32) -> GroupKey {
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
    pub fn meetings(&self) -> [u8; KEY_BYTES] {
        key(self.tag("meetings")).0
    }

    /// A MAC by this key for the use `label`, which nothing else has.
    pub fn tag(&self, label: &str) -> Hmac<Sha256> {
        mac(&self.0, label)
    }
}

/// What the processes of a job share that meet at `host:port`; never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct JobSecret(pub(crate) Vec<u8>);

impl std::fmt::Debug for JobSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JobSecret")
    }
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
        assert_eq!(hex(&id.group(GroupKind::Replica, &[0, 2], 0).0), VECTORS[2]);
        assert_eq!(hex(&id.group(GroupKind::Split, &[0, 2], 1).0), VECTORS[3]);
        assert_eq!(hex(&id.group(GroupKind::Shrink, &[1], 0).0), VECTORS[4]);
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
        for kind in [GroupKind::Replica, GroupKind::Split, GroupKind::Shrink] {
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
    }
}
