//! The signature of a program's operations: two levels of MD5 (bootstrap 9.1). Ranks of a group compare it before they
//! make a communicator, so that programs that do not fit together are found before anything waits in one of them.
//!
//! The original computes it in its *parse* state only. Here that state is a type: a [`Program`] is being parsed, and
//! [`Program::finish`] turns it into a [`Signature`], which cannot be added to.
//!
//! ```text
//! inner, replica group      MD5( participants, u32 each | operations )
//! inner, set of pairs       MD5( source and target of each pair, u32 each | operations, projected )
//! outer                     MD5( inner digests, in the order of the program )
//!
//! SEND                      SEND u32 | size u64 | channel u32                    16 bytes
//! RECV                      SEND u32 | size u64 | own global device id u32       16 bytes  (INV-31)
//! any other                 op u32   | size u64 | following word u64             20 bytes
//! projected (pairs)         op u32 (RECV as SEND) | size u64                     12 bytes
//! ```
//!
//! All numbers are little-endian. The channel that a send uses is named by the global device id of its receiver, so both
//! ends of a pair hash the same bytes. The widths of the fields and the projection are not recorded; these are ours.

use md5::{Digest, Md5};

use crate::api::groups::listed;

/// Bytes of a signature.
pub const SIGNATURE_BYTES: usize = 16;
/// How SEND, and therefore RECV, is numbered in the hashed bytes.
pub const SEND: u32 = u32::MAX;

/// One operation of a program, as far as its peers must agree on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgramOp {
    /// Sends `size` elements over `channel`: the global device id of the receiver.
    Send {
        /// Elements.
        size: u64,
        /// Global device id of the receiver.
        channel: u32,
    },
    /// Receives `size` elements.
    Recv {
        /// Elements.
        size: u64,
    },
    /// Any other collective.
    Other {
        /// Its number.
        op: u32,
        /// Elements.
        size: u64,
        /// The word that follows the size in the program: type and reduction, say.
        word: u64,
    },
}

impl ProgramOp {
    fn hash(self, device: u32, into: &mut Md5) {
        let (op, size) = self.kind();
        into.update(op.to_le_bytes());
        into.update(size.to_le_bytes());
        match self {
            ProgramOp::Send { channel, .. } => into.update(channel.to_le_bytes()),
            ProgramOp::Recv { .. } => into.update(device.to_le_bytes()),
            ProgramOp::Other { word, .. } => into.update(word.to_le_bytes()),
        }
    }

    fn kind(self) -> (u32, u64) {
        match self {
            ProgramOp::Send { size, .. } | ProgramOp::Recv { size } => (SEND, size),
            ProgramOp::Other { op, size, .. } => (op, size),
        }
    }
}

/// A program in its parse state: groups and pairs are added in the order in which the program has them.
#[derive(Debug, Clone)]
pub struct Program {
    device: u32,
    outer: Md5,
    sets: usize,
    ops: usize,
}

impl Program {
    /// An empty program of the rank with global device id `device`: its rank in the world.
    pub fn new(device: u32) -> Program {
        Program { device, outer: Md5::new(), sets: 0, ops: 0 }
    }

    /// Adds a replica group and what it does.
    #[must_use]
    pub fn replica_group(mut self, participants: &[u32], ops: &[ProgramOp]) -> Program {
        let mut inner = Md5::new();
        participants.iter().for_each(|p| inner.update(p.to_le_bytes()));
        ops.iter().for_each(|op| op.hash(self.device, &mut inner));
        self.add(inner, ops.len());
        self
    }

    /// Adds a set of (source, target) pairs and what it does.
    #[must_use]
    pub fn pairs(mut self, pairs: &[(u32, u32)], ops: &[ProgramOp]) -> Program {
        let mut inner = Md5::new();
        for (source, target) in pairs {
            inner.update(source.to_le_bytes());
            inner.update(target.to_le_bytes());
        }
        for op in ops {
            let (kind, size) = op.kind();
            inner.update(kind.to_le_bytes());
            inner.update(size.to_le_bytes());
        }
        self.add(inner, ops.len());
        self
    }

    fn add(&mut self, inner: Md5, ops: usize) {
        self.outer.update(inner.finalize());
        (self.sets, self.ops) = (self.sets + 1, self.ops + ops);
    }

    /// Ends the parse state.
    pub fn finish(self) -> Signature {
        Signature { digest: self.outer.finalize().into(), sets: self.sets, ops: self.ops }
    }
}

/// The signature of a program, with how much of it there was, for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signature {
    digest: [u8; SIGNATURE_BYTES],
    sets: usize,
    ops: usize,
}

impl Signature {
    /// The 16 bytes that travel.
    pub fn bytes(&self) -> &[u8; SIGNATURE_BYTES] {
        &self.digest
    }

    /// What a group is asked to agree on when no program is: the members of a split or shrunk communicator.
    pub(super) fn of_members(purpose: &str, members: &[usize]) -> Signature {
        let mut h = Md5::new();
        h.update(purpose.as_bytes());
        members.iter().for_each(|m| h.update((*m as u64).to_le_bytes()));
        Signature { digest: h.finalize().into(), sets: 0, ops: 0 }
    }

    /// What this rank has, in words.
    pub(super) fn describe(&self, members: &[usize]) -> String {
        let hex: String = self.digest.iter().map(|b| format!("{b:02x}")).collect();
        if self.sets == 0 && self.ops == 0 {
            return format!("members {}, signature {hex}", listed(members));
        }
        format!("{} operations in {} groups or sets of pairs, signature {hex}", self.ops, self.sets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(s: Signature) -> String {
        s.bytes().iter().map(|b| format!("{b:02x}")).collect()
    }

    /// Expected values: `hashlib.md5` over bytes laid out by hand.
    #[test]
    fn digests_equal_those_of_another_implementation() {
        let op = ProgramOp::Other { op: 1, size: 1024, word: 7 };
        assert_eq!(hex(Program::new(0).finish()), "d41d8cd98f00b204e9800998ecf8427e");
        let one = Program::new(0).replica_group(&[0, 1], &[op]).finish();
        assert_eq!(hex(one), "5c095b69be10a74b5acb1a9c25f2eb6c");
        let send = ProgramOp::Send { size: 64, channel: 3 };
        let both = Program::new(2).replica_group(&[0, 1], &[op]).pairs(&[(2, 3)], &[send, op]).finish();
        assert_eq!(hex(both), "c433233675146352dd262f066cd419f4");
    }

    /// Proves INV-31.
    #[test]
    fn both_ends_of_a_pair_have_one_signature() {
        let of = |device: u32, op| Program::new(device).replica_group(&[2, 5], &[op]).finish();
        let (sender, receiver) = (of(2, ProgramOp::Send { size: 9, channel: 5 }), of(5, ProgramOp::Recv { size: 9 }));
        assert_eq!(hex(sender), "bf3379ba371dc33abd6a665d65fc4fbb");
        assert_eq!(sender.bytes(), receiver.bytes());
        // The device id is the receiver's: another receiver is another signature, and so is another size.
        assert_ne!(sender.bytes(), of(4, ProgramOp::Recv { size: 9 }).bytes());
        assert_ne!(sender.bytes(), of(5, ProgramOp::Recv { size: 8 }).bytes());
        // In a set of pairs too.
        let of = |device: u32, op| Program::new(device).pairs(&[(2, 5)], &[op]).finish();
        let (a, b) = (of(2, ProgramOp::Send { size: 9, channel: 5 }), of(5, ProgramOp::Recv { size: 9 }));
        assert_eq!(a.bytes(), b.bytes());
    }

    #[test]
    fn order_members_and_operations_all_count() {
        let a = ProgramOp::Other { op: 1, size: 8, word: 0 };
        let b = ProgramOp::Other { op: 2, size: 8, word: 0 };
        let mut seen = std::collections::HashSet::new();
        for p in [
            Program::new(0).replica_group(&[0, 1], &[a, b]),
            Program::new(0).replica_group(&[0, 1], &[b, a]),
            Program::new(0).replica_group(&[1, 0], &[a, b]),
            Program::new(0).replica_group(&[0, 1], &[a]),
            Program::new(0).replica_group(&[0, 1], &[a]).replica_group(&[0, 1], &[b]),
            Program::new(0).pairs(&[(0, 1)], &[a, b]),
            Program::new(0).pairs(&[(0, 1)], &[a]),
        ] {
            assert!(seen.insert(*p.finish().bytes()));
        }
        // A pair set does not look at what follows the size.
        let c = ProgramOp::Other { op: 1, size: 8, word: 5 };
        let pairs = |op| Program::new(0).pairs(&[(0, 1)], &[op]).finish();
        assert_eq!(pairs(a), pairs(c));
    }
}
