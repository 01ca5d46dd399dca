//! Numbers in bytes, and bytes that are read from the front. They came from outside: nothing is followed that was not checked.

use crate::fail::{Code, Failure};

/// Little-endian u32 at `at`; the caller has checked the length.
pub fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// Little-endian u64 at `at`; the caller has checked the length.
pub fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from(u32_at(b, at)) | u64::from(u32_at(b, at + 4)) << 32
}

/// A state of another instance that makes no sense.
pub(crate) fn bad(what: &str) -> Failure {
    Failure::new(Code::Invalid, format!("the state of another instance cannot be taken over: {what}"))
}

/// Appends a little-endian u32.
pub(crate) fn put(b: &mut Vec<u8>, word: u32) {
    b.extend_from_slice(&word.to_le_bytes());
}

/// The state of another instance, read from the front, each piece checked to be there.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader(bytes)
    }

    pub(crate) fn take(&mut self, bytes: usize) -> Result<&'a [u8], Failure> {
        let (head, rest) = self.0.split_at_checked(bytes).ok_or_else(|| bad("it ends too early"))?;
        self.0 = rest;
        Ok(head)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Failure> {
        Ok(u32_at(self.take(4)?, 0))
    }

    pub(crate) fn end(&self) -> Result<(), Failure> {
        if self.0.is_empty() { Ok(()) } else { Err(bad(&format!("{} bytes are left over", self.0.len()))) }
    }
}
