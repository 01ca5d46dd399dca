//! What one plugin may do: its tenant's policy, cut down to what the plugin asks for.
//!
//! A plugin asks with its imports, and with a manifest if it carries one: TOML in a custom section `wccl:manifest`, of the
//! component or of a core module in it, where a compiler puts it. What the manifest does not ask for is not given; what
//! it asks for beyond the policy refuses the plugin before anything of it runs. See docs/plugin-authors.md.

use std::collections::BTreeSet;
use std::fmt::Display;

use serde::Deserialize;

use crate::policy::{Bytes, HostName, Network, Reach, listed};
use crate::served::FILES;
use crate::tenant::Tenant;

const SECTION: &[u8] = b"wccl:manifest";
/// Bytes of a manifest.
const MAX_MANIFEST: usize = 16 << 10;

/// Why a plugin is not linked.
#[derive(Debug)]
pub(crate) struct Denied {
    /// The sentence.
    pub why: String,
    /// The key of the policy that would have to grant it.
    pub limit: Option<&'static str>,
}

impl From<String> for Denied {
    fn from(why: String) -> Denied {
        Denied { why, limit: None }
    }
}

/// What one plugin may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// Addresses it may listen on and connect to.
    pub network: Network,
    /// Variables whose files it may read or write.
    pub files: BTreeSet<String>,
    /// WASI interfaces it may import.
    pub wasi: BTreeSet<String>,
    /// Linear memory of one instance, bytes.
    pub memory: usize,
    /// Background tasks alive of its tenant when it starts one more.
    pub tasks: usize,
    /// Whether it is only looked at: what it asks for is compared with what is granted, and nothing of that is given. Its code
    /// computes and logs, and reaches no address, file, name of this machine or thread.
    pub examined: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Manifest {
    listen: Vec<Reach>,
    reach: Vec<Reach>,
    names: Option<Vec<HostName>>,
    files: BTreeSet<String>,
    memory: Option<Bytes>,
    tasks: Option<usize>,
}

impl Grant {
    /// What the policy of `tenant` grants to any of its plugins; without one all but WASI.
    pub(crate) fn of(tenant: &Tenant) -> Grant {
        let (memory, tasks, examined) = (tenant.limits.memory, tenant.limits.tasks, tenant.examined);
        match &tenant.policy {
            Some(p) => {
                let (network, files, wasi) = (p.network.clone(), p.files.clone(), p.wasi.clone());
                Grant { network, files, wasi, memory, tasks, examined }
            }
            None => Grant { memory, tasks, examined, ..Grant::default() },
        }
    }

    /// What of it is given to code that is only looked at. WASI interfaces stay if a policy names them: without them the
    /// plugin would not link, and none of those that can be granted reaches anything.
    fn given(self) -> Grant {
        if !self.examined {
            return self;
        }
        Grant { network: Network::default(), files: BTreeSet::new(), tasks: 0, ..self }
    }

    /// Cuts it down to what a plugin asks for.
    ///
    /// # Errors
    /// The key that is exceeded, what is asked for, and what is granted; or what is wrong with the manifest.
    pub(crate) fn cut_to(self, plugin: &[u8]) -> Result<Grant, Denied> {
        let manifest = match find(plugin) {
            Ok(None) => return Ok(self.given()),
            Ok(Some(text)) => std::str::from_utf8(text)
                .map_err(|e| e.to_string())
                .and_then(|text| toml::from_str::<Manifest>(text).map_err(|e| e.message().to_string())),
            Err(why) => Err(why.into()),
        };
        let m = manifest.map_err(|why| format!("its manifest (custom section wccl:manifest) cannot be read: {why}"))?;
        let within = |limit, asked: &[Reach], granted: &[Reach]| {
            let over = asked.iter().find(|a| !granted.iter().any(|g| g.holds_all(a)));
            over.map_or(Ok(()), |over| Err(beyond(limit, over, listed(granted))))
        };
        within("network.listen", &m.listen, &self.network.listen)?;
        within("network.reach", &m.reach, &self.network.reach)?;
        // One that asks for addresses and no names is of a time when those were one grant: it looks up what it is granted.
        let names = m.names.unwrap_or_else(|| self.network.names.clone());
        if let Some(over) = names.iter().find(|a| !self.network.names.iter().any(|g| g.holds_all(a))) {
            return Err(beyond("network.names", over, listed(&self.network.names)));
        }
        if let Some(file) = m.files.difference(&self.files).next() {
            return Err(beyond("files.read", file, listed(&self.files)));
        }
        let memory = m.memory.map_or(self.memory, |b| usize::try_from(b.0).unwrap_or(usize::MAX));
        if memory > self.memory {
            return Err(beyond("limits.memory", Bytes(memory as u64), Bytes(self.memory as u64)));
        }
        let tasks = m.tasks.unwrap_or(self.tasks);
        if tasks > self.tasks {
            return Err(beyond("limits.tasks", tasks, self.tasks));
        }
        let network = Network { listen: m.listen, reach: m.reach, names };
        Ok(Grant { network, files: m.files, memory, tasks, ..self }.given())
    }
}

impl Default for Grant {
    /// Without a policy.
    fn default() -> Grant {
        let limits = crate::limits::Limits::default();
        let files = FILES.iter().map(|(name, _)| name.to_string()).collect();
        let wasi = BTreeSet::new();
        let (memory, tasks) = (limits.memory, limits.tasks);
        Grant { network: Network::any(), files, wasi, memory, tasks, examined: false }
    }
}

/// A request that goes too far.
fn beyond(limit: &'static str, asked: impl Display, grants: impl Display) -> Denied {
    Denied { why: format!("its manifest asks for {asked}; {limit} grants {grants}"), limit: Some(limit) }
}

/// The manifest of a component. The file is not known to be one: whatever does not fit ends the search, and the compiler
/// says what is wrong.
fn find(component: &[u8]) -> Result<Option<&[u8]>, &'static str> {
    let mut found = None;
    // A core module is a section; its own sections are looked at after.
    let mut left = vec![component];
    while let Some(binary) = left.pop() {
        let mut rest = binary.get(8..).unwrap_or_default();
        while let Some((id, body, after)) = section(rest) {
            rest = after;
            match id {
                0 => {
                    let Some((name, data)) = size(body).and_then(|(n, rest)| rest.split_at_checked(n)) else {
                        continue;
                    };
                    if name != SECTION {
                        continue;
                    }
                    if found.replace(data).is_some() {
                        return Err("it has more than one");
                    }
                    if data.len() > MAX_MANIFEST {
                        return Err("it has more than 16 KiB");
                    }
                }
                1 if std::ptr::eq(binary, component) => left.push(body),
                _ => {}
            }
        }
    }
    Ok(found)
}

/// The first section of a binary: its id, its body, and what follows.
fn section(binary: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (id, rest) = binary.split_first()?;
    let (len, rest) = size(rest)?;
    let (body, after) = rest.split_at_checked(len)?;
    Some((*id, body, after))
}

/// A size in LEB128, and what follows.
fn size(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let mut n = 0;
    for (i, b) in bytes.iter().take(5).enumerate() {
        n |= usize::from(b & 0x7f) << (7 * i);
        if b & 0x80 == 0 {
            return Some((n, &bytes[i + 1..]));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A component with a core module in it; each with the custom sections given.
    fn component(outer: &[&str], inner: &[&str]) -> Vec<u8> {
        let custom = |text: &str| {
            let mut body = vec![SECTION.len() as u8];
            body.extend(SECTION);
            body.extend(text.as_bytes());
            let mut all = vec![0, body.len() as u8 | 0x80, 0];
            all[1..].copy_from_slice(&[body.len() as u8 & 0x7f | 0x80, (body.len() >> 7) as u8]);
            all.extend(body);
            all
        };
        let mut module = b"\0asm\x01\0\0\0".to_vec();
        module.extend(inner.iter().flat_map(|t| custom(t)));
        let mut all = b"\0asm\x0d\0\x01\0\x01".to_vec();
        all.extend([module.len() as u8 & 0x7f | 0x80, (module.len() >> 7) as u8]);
        all.extend(module);
        all.extend(outer.iter().flat_map(|t| custom(t)));
        all
    }

    fn cut(outer: &[&str], inner: &[&str]) -> Result<Grant, Denied> {
        Grant::default().cut_to(&component(outer, inner))
    }

    #[test]
    fn what_is_not_asked_for_is_not_given() {
        assert_eq!(cut(&[], &[]).unwrap(), Grant::default());
        for (outer, inner) in [
            (&["listen = [\"127.0.0.1:*\"]\ntasks = 2"][..], &[][..]),
            (&[], &["listen = [\"127.0.0.1:*\"]\ntasks = 2"]),
        ] {
            let g = cut(outer, inner).unwrap();
            assert_eq!((listed(&g.network.listen).as_str(), g.network.reach.len()), ("127.0.0.1:*", 0));
            assert_eq!((g.files.len(), g.tasks, g.memory), (0, 2, Grant::default().memory));
        }
    }

    #[test]
    fn what_is_beyond_the_grant_is_refused_by_its_key() {
        for (text, key) in [
            ("memory = \"1 GiB\"", "limits.memory"),
            ("tasks = 65", "limits.tasks"),
            ("files = [\"HOME\"]", "files.read"),
        ] {
            assert_eq!(cut(&[text], &[]).unwrap_err().limit, Some(key), "{text}");
        }
        let mut some = Grant::default();
        some.network.reach = vec!["10.0.0.0/8:1-9".parse().unwrap()];
        some.network.names = vec!["*.example".parse().unwrap()];
        let asked = |text: &str| some.clone().cut_to(&component(&[text], &[])).is_ok();
        assert!(asked("names = [\"a.example\"]") && !asked("names = [\"a.test\"]"));
        assert!(asked("reach = [\"10.1.0.0/16:2-9\"]"));
        assert!(!asked("reach = [\"10.1.0.0/16:2-10\"]") && !asked("reach = [\"0.0.0.0/0:2\"]"));
    }

    #[test]
    fn one_that_is_only_looked_at_is_checked_and_given_nothing() {
        let examined = || Grant { examined: true, ..Grant::default() };
        for manifest in [&[][..], &["listen = [\"127.0.0.1:*\"]\nfiles = [\"NCCL_TOPO_DUMP_FILE\"]\ntasks = 2"]] {
            let g = examined().cut_to(&component(manifest, &[])).unwrap();
            assert_eq!((g.network, g.files.len(), g.tasks), (Network::default(), 0, 0), "{manifest:?}");
        }
        let denied = examined().cut_to(&component(&["tasks = 65"], &[])).unwrap_err();
        assert_eq!(denied.limit, Some("limits.tasks"));
    }

    #[test]
    fn a_manifest_that_cannot_be_read_is_refused() {
        for (outer, inner) in [(&["tasks = 1"][..], &["tasks = 1"][..]), (&["task = 1"], &[]), (&["tasks"], &[])] {
            let denied = cut(outer, inner).unwrap_err();
            assert!(denied.why.contains("cannot be read") && denied.limit.is_none(), "{outer:?}: {denied:?}");
        }
        // What is cut off anywhere is no manifest, and no panic.
        let whole = component(&["tasks = 1"], &["memory = \"1 KiB\""]);
        for end in 0..whole.len() {
            let _ = find(&whole[..end]);
        }
    }
}
