//! Reading a file that may be anything: no device, no pipe, no more than it may have.

use std::fs::File;
use std::io::Read;

/// Not blocking: a pipe must not hold its reader up.
pub(crate) const NONBLOCK: i32 = rustix::fs::OFlags::NONBLOCK.bits() as i32;

/// What is in a regular file, of at most `most` bytes.
pub(crate) fn contents(file: std::io::Result<File>, what: &str, most: u64) -> Result<Vec<u8>, String> {
    let file = file.map_err(|e| format!("it cannot be opened: {e}"))?;
    let meta = file.metadata().map_err(|e| format!("it cannot be inspected: {e}"))?;
    if !meta.is_file() {
        return Err("it is not a regular file".into());
    }
    let len = meta.len();
    if len > most {
        return Err(format!("it has {len} bytes, more than the {most} a {what} may have"));
    }
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).map_err(|e| format!("it cannot be read: {e}"))?;
    if bytes.len() as u64 > most {
        return Err(format!("it grew beyond the {most} bytes a {what} may have while it was read"));
    }
    Ok(bytes)
}
