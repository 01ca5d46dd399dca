//! Where a plugin's bytes come from. With a policy: a name in its directory, with the pin and the signature that it asks for.
//!
//! The bytes that were checked are the bytes that are compiled: a file is read once.

use std::path::{Component, Path};

use cap_std::ambient_authority;
use cap_std::fs::{Dir, OpenOptions, OpenOptionsExt};
use ed25519_dalek::Signature;
use sha2::{Digest, Sha256};

use crate::file::{NONBLOCK, contents};
use crate::limits::MAX_PLUGIN_BYTES;
use crate::policy::{Plugins, listed};
use crate::tenant::Tenant;

/// Bytes of a signature file: 128 hexadecimal digits and the end of a line; 64 bytes if it is not text.
const MAX_SIGNATURE_BYTES: u64 = 130;

/// Reads a plugin file, within the size limit.
///
/// # Errors
/// A sentence without the plugin's name.
pub fn read(path: &Path) -> Result<Vec<u8>, String> {
    use std::os::unix::fs::OpenOptionsExt;
    let file = std::fs::OpenOptions::new().read(true).custom_flags(NONBLOCK).open(path);
    contents(file, "plugin", MAX_PLUGIN_BYTES)
}

/// Reads the plugin that a tenant asks for: any file without a policy, else one that its policy allows.
pub(super) fn read_for(tenant: &Tenant, path: &Path) -> Result<Vec<u8>, String> {
    let Some(policy) = &tenant.policy else { return read(path) };
    allowed(&policy.plugins, path).map_err(|(asked, grants)| {
        tenant.refuse("plugins.allow", &format!("asked for plugin {}, {asked}", path.display()), grants)
    })
}

/// The error: what is wrong with what was asked for, and what is granted.
fn allowed(plugins: &Plugins, path: &Path) -> Result<Vec<u8>, (String, String)> {
    let grants = || format!("{} in {}", listed(plugins.allowed.iter().map(|a| &a.file.0)), plugins.directory.display());
    let refused = |asked: &str| (asked.to_string(), grants());
    let (parent, last) = (path.parent(), path.components().next_back());
    let Some(Component::Normal(name)) =
        last.filter(|_| parent.is_some_and(|dir| dir.as_os_str().is_empty() || dir == plugins.directory))
    else {
        return Err(refused("which is not a name in its directory"));
    };
    let Some(entry) = plugins.allowed.iter().find(|a| *a.file.0 == *name) else {
        return Err(refused("which is not listed"));
    };
    let dir = Dir::open_ambient_dir(&plugins.directory, ambient_authority())
        .map_err(|e| (format!("but the directory cannot be opened: {e}"), grants()))?;
    // A link that leaves the directory is not followed.
    let open = |name: &str| dir.open_with(name, OpenOptions::new().read(true).custom_flags(NONBLOCK));
    let file = |name: &str, what, most| contents(open(name).map(cap_std::fs::File::into_std), what, most);
    let bytes = file(&entry.file.0, "plugin", MAX_PLUGIN_BYTES).map_err(|e| (format!("but {e}"), grants()))?;
    let digest = Sha256::digest(&bytes);
    if let Some(pin) = &entry.sha256
        && pin.0 != digest[..]
    {
        return Err((
            format!("whose SHA-256 is {}", crate::load::cache::hex(&digest)),
            format!("{} only", crate::load::cache::hex(&pin.0)),
        ));
    }
    if !plugins.signers.is_empty() {
        let signers = || "what one of its signers has signed".to_string();
        let signature = format!("{}.sig", entry.file.0);
        let text = file(&signature, "signature", MAX_SIGNATURE_BYTES)
            .map_err(|e| (format!("but of {signature}: {e}"), signers()))?;
        let signature = parse_signature(&text)
            .ok_or_else(|| (format!("but {signature} is neither 64 bytes nor 128 hexadecimal digits"), signers()))?;
        if !plugins.signers.iter().any(|s| s.0.verify_strict(&bytes, &signature).is_ok()) {
            return Err(("whose signature is of other bytes or by another key".into(), signers()));
        }
    }
    Ok(bytes)
}

fn parse_signature(text: &[u8]) -> Option<Signature> {
    if let Ok(raw) = text.try_into() {
        return Some(Signature::from_bytes(raw));
    }
    let text = std::str::from_utf8(text).ok()?.trim_end();
    if text.len() != 128 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let mut raw = [0; 64];
    for (i, byte) in raw.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(Signature::from_bytes(&raw))
}
