//! The peer record: 112 bytes a rank, gathered once (bootstrap 5), and the hashes that tell nodes and processes apart.

use crate::bytes::{u32_at, u64_at};
use crate::fail::{Code, Failure};
use crate::topo::RankInfo;

/// Bytes of a record.
pub const RECORD_BYTES: usize = 112;
/// Bytes of a host name in it.
pub const NAME_BYTES: usize = 20;

/// What every rank tells the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerRecord {
    /// Offset 0.
    pub rank: i32,
    /// Offset 4: logical core on the server.
    pub dev: i32,
    /// Offset 8: hash(machine) + hash(id) (our choice of place): says why two ranks are not on one server.
    pub machine: u64,
    /// Offset 16: hash(host) + hash(id) + virtual server id.
    pub host_hash: u64,
    /// Offset 24: hash(process) + hash(id).
    pub pid_hash: u64,
    /// Offset 32: device id of the shared-memory file system.
    pub shm_dev: u64,
    /// Offset 40: packed PCI address.
    pub bus_id: u64,
    /// Offset 48: routing id (our choice of place).
    pub rid: i32,
    /// Offset 52: core index on the accelerator (our choice of place).
    pub tpb_idx: i32,
    /// Offset 56: pod (our choice of place).
    pub pod_id: u64,
    /// Offset 64: pod type (our choice of place).
    pub pod_type: u32,
    /// Offset 68: host name for messages, as [`short_name`] makes it, then zeros (our choice of place).
    pub name: [u8; NAME_BYTES],
    /// Offset 88: meaningful inside the process only.
    pub comm: u64,
    /// Offset 96: silicon generation.
    pub comp_cap: i32,
    /// Offset 100.
    pub host_device_id: i32,
    /// Offset 104.
    pub mla_idx: i32,
    /// Offset 108.
    pub pod_node_id: i32,
}

impl PeerRecord {
    /// To bytes.
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut b = [0; RECORD_BYTES];
        let mut put32 = |at: usize, v: u32| b[at..at + 4].copy_from_slice(&v.to_le_bytes());
        put32(0, self.rank as u32);
        put32(4, self.dev as u32);
        put32(48, self.rid as u32);
        put32(52, self.tpb_idx as u32);
        put32(64, self.pod_type);
        put32(96, self.comp_cap as u32);
        put32(100, self.host_device_id as u32);
        put32(104, self.mla_idx as u32);
        put32(108, self.pod_node_id as u32);
        b[68..68 + NAME_BYTES].copy_from_slice(&self.name);
        for (at, v) in [
            (8, self.machine),
            (16, self.host_hash),
            (24, self.pid_hash),
            (32, self.shm_dev),
            (40, self.bus_id),
            (56, self.pod_id),
            (88, self.comm),
        ] {
            b[at..at + 8].copy_from_slice(&v.to_le_bytes());
        }
        b
    }

    /// From bytes; the record must be rank `rank`'s.
    pub fn decode(b: &[u8], rank: usize) -> Result<PeerRecord, Failure> {
        if b.len() != RECORD_BYTES {
            return Err(Failure::new(
                Code::Failure,
                format!("a peer record has {RECORD_BYTES} bytes, not {}", b.len()),
            ));
        }
        let i32_at = |at: usize| u32_at(b, at) as i32;
        if usize::try_from(i32_at(0)).ok() != Some(rank) {
            return Err(Failure::new(
                Code::Failure,
                format!("the peer record of rank {rank} says it is rank {}'s", i32_at(0)),
            ));
        }
        if !(0..32).contains(&i32_at(104)) {
            let text =
                format!("the peer record of rank {rank} names accelerator {}, a server has at most 32", i32_at(104));
            return Err(Failure::new(Code::Failure, text));
        }
        let mut name = [0; NAME_BYTES];
        name.copy_from_slice(&b[68..68 + NAME_BYTES]);
        Ok(PeerRecord {
            rank: i32_at(0),
            dev: i32_at(4),
            machine: u64_at(b, 8),
            host_hash: u64_at(b, 16),
            pid_hash: u64_at(b, 24),
            shm_dev: u64_at(b, 32),
            bus_id: u64_at(b, 40),
            rid: i32_at(48),
            tpb_idx: i32_at(52),
            pod_id: u64_at(b, 56),
            pod_type: u32_at(b, 64),
            name,
            comm: u64_at(b, 88),
            comp_cap: i32_at(96),
            host_device_id: i32_at(100),
            mla_idx: i32_at(104),
            pod_node_id: i32_at(108),
        })
    }

    /// Same node if and only if the host hashes are equal.
    pub fn same_node(&self, other: &PeerRecord) -> bool {
        self.host_hash == other.host_hash
    }

    /// Why the two are not on one server, and what to do; nothing if they are.
    pub fn apart(&self, other: &PeerRecord) -> Option<&'static str> {
        // Two virtual servers differ by the ids that were added, two real ones by a hash.
        let differs = self.host_hash.wrapping_sub(other.host_hash) as i64;
        if differs == 0 {
            None
        } else if self.machine != other.machine {
            Some("they run on different machines, or in containers that were given boot ids of their own")
        } else if differs.unsigned_abs() <= u64::from(u32::MAX) {
            Some("they are on different virtual servers (NEURON_RT_DBG_VIRTUAL_SERVER_SIZE)")
        } else {
            Some(
                "they run on one machine in different network namespaces, which memory is not shared across; give their \
                 containers one network namespace",
            )
        }
    }

    /// "rank 3 on host NAME", for messages.
    pub fn place(&self) -> String {
        let end = self.name.iter().position(|b| *b == 0).unwrap_or(NAME_BYTES);
        // The bytes are a peer's word.
        let name: String = String::from_utf8_lossy(&self.name[..end]).chars().filter(|c| !c.is_control()).collect();
        let name = if name.is_empty() { "without a name" } else { &name };
        format!("rank {} on host {name}", self.rank)
    }

    /// Same process if and only if both hashes are equal.
    pub fn same_process(&self, other: &PeerRecord) -> bool {
        self.same_node(other) && self.pid_hash == other.pid_hash
    }

    /// What topology and rings need of it.
    pub fn rank_info(&self) -> RankInfo {
        RankInfo {
            rank: self.rank,
            neuron_dev: self.dev,
            mla: self.mla_idx,
            core: self.tpb_idx,
            rid: self.rid,
            host_hash: self.host_hash,
            pod_id: self.pod_id,
            pod_node: self.pod_node_id,
        }
    }
}

/// The upstream library's string hash (djb2 with xor).
pub fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(5381, |h: u64, b| h.wrapping_mul(33) ^ u64::from(*b))
}

/// Host hash of a rank. `host` is what the host names its server by, a boot of a machine and a network namespace, and no host
/// name; the id makes the hash differ between communicators, the virtual server makes two virtual servers on one machine two
/// hosts (INV-27).
pub fn host_hash(host: &str, id: &[u8], virtual_server_id: u32) -> u64 {
    hash(host.as_bytes()).wrapping_add(hash(id)).wrapping_add(u64::from(virtual_server_id))
}

/// Hash of a rank's machine.
pub fn machine_hash(machine: &str, id: &[u8]) -> u64 {
    hash(machine.as_bytes()).wrapping_add(hash(id))
}

/// A host name as a record has it: beginning and end of a long one, since names of one cluster differ in either.
pub fn short_name(name: &str) -> [u8; NAME_BYTES] {
    const DOTS: &str = "…";
    let short = if name.len() <= NAME_BYTES {
        name.to_string()
    } else {
        let room = NAME_BYTES - DOTS.len();
        let (head, tail) = (name.floor_char_boundary(room / 2), name.ceil_char_boundary(name.len() - room.div_ceil(2)));
        format!("{}{DOTS}{}", &name[..head], &name[tail..])
    };
    let mut bytes = [0; NAME_BYTES];
    bytes[..short.len()].copy_from_slice(short.as_bytes());
    bytes
}

/// Process hash of a rank.
pub fn pid_hash(process: &str, id: &[u8]) -> u64 {
    hash(process.as_bytes()).wrapping_add(hash(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> PeerRecord {
        PeerRecord {
            rank: 2,
            dev: 3,
            machine: 12,
            host_hash: 0x1122_3344_5566_7788,
            pid_hash: 9,
            shm_dev: 26,
            bus_id: 0x10_20,
            rid: 5,
            tpb_idx: 1,
            pod_id: 77,
            pod_type: 1,
            name: short_name("red"),
            comm: 4,
            comp_cap: 3,
            host_device_id: 6,
            mla_idx: 7,
            pod_node_id: -1,
        }
    }

    #[test]
    fn the_record_is_112_bytes_at_the_recorded_offsets() {
        let b = record().encode();
        assert_eq!(b.len(), 112);
        assert_eq!((u32_at(&b, 0), u32_at(&b, 4)), (2, 3));
        assert_eq!((u64_at(&b, 16), u64_at(&b, 24)), (0x1122_3344_5566_7788, 9));
        assert_eq!((u64_at(&b, 8), &b[68..72]), (12, &b"red\0"[..]));
        assert_eq!((u64_at(&b, 88), u32_at(&b, 96), u32_at(&b, 100), u32_at(&b, 104)), (4, 3, 6, 7));
        assert_eq!(PeerRecord::decode(&b, 2).unwrap(), record());
        assert!(PeerRecord::decode(&b, 3).unwrap_err().text.contains("rank 2's"));
        assert!(PeerRecord::decode(&b[1..], 2).is_err());
    }

    #[test]
    fn a_rank_is_named_with_its_host() {
        let named = |name: &str| PeerRecord { name: short_name(name), ..record() }.place();
        assert_eq!(named("ip-10-0-12-34"), "rank 2 on host ip-10-0-12-34");
        assert_eq!(named("exactly-20-bytes-ab."), "rank 2 on host exactly-20-bytes-ab.");
        assert_eq!(named("ip-10-0-12-34.ec2.internal"), "rank 2 on host ip-10-0-….internal");
        assert_eq!(named("trainer-worker-0-abcdef-17"), "rank 2 on host trainer-…abcdef-17");
        // Cut between characters, wherever that is.
        for n in 0..40 {
            let name = format!("{}{}", "x".repeat(n), "ä".repeat(40 - n));
            let place = named(&name);
            assert!(place.contains('…') && !place.contains('\u{fffd}'), "{place}");
        }
        assert_eq!(named(""), "rank 2 on host without a name");
        assert_eq!(named("a\n\u{1b}[2Jb"), "rank 2 on host a[2Jb");
        let wrong = PeerRecord { name: [0xff; NAME_BYTES], ..record() };
        assert!(wrong.place().starts_with("rank 2 on host \u{fffd}"));
    }

    /// As the host words them: network namespace, then boot.
    #[test]
    fn why_two_ranks_are_not_on_one_server_is_known() {
        let id = [7u8; 128];
        let at = |machine: &str, network: u64, virtual_server: u32| PeerRecord {
            machine: machine_hash(machine, &id),
            host_hash: host_hash(&format!("{network}/{machine}"), &id, virtual_server),
            ..record()
        };
        let boots = ["4bca0b9d-1c27-4d4a-9c3b-5f0d2f7a9a01", "4bca0b9d-1c27-4d4a-9c3b-5f0d2f7a9a02"];
        let here = at(boots[0], 4026531840, 0);
        assert_eq!(here.apart(&at(boots[0], 4026531840, 0)), None);
        for (other, why) in [
            (at(boots[1], 4026531840, 0), "different machines"),
            (at(boots[1], 4026532211, 2), "different machines"),
            (at(boots[0], 4026531841, 0), "one machine in different network namespaces"),
            (at(boots[0], 4026532299, 0), "one machine in different network namespaces"),
            (at(boots[0], 4026532299, 1), "one machine in different network namespaces"),
            (at(boots[0], 4026531840, 1), "different virtual servers"),
            (at(boots[0], 4026531840, u32::MAX), "different virtual servers"),
        ] {
            assert!(!here.same_node(&other));
            for said in [here.apart(&other), other.apart(&here)] {
                assert!(said.is_some_and(|s| s.contains(why)), "{said:?}, not {why}");
            }
        }
    }

    /// Proves INV-27.
    #[test]
    fn virtual_servers_and_ids_change_the_hashes() {
        let (id, other) = ([1u8; 128], [2u8; 128]);
        assert_eq!(host_hash("h", &id, 3), host_hash("h", &id, 0) + 3);
        assert_ne!(host_hash("h", &id, 0), host_hash("h", &other, 0));
        assert_ne!(pid_hash("1", &id), pid_hash("1", &other));
        assert_ne!(host_hash("h", &id, 0), host_hash("g", &id, 0));
        // All 128 bytes count.
        let mut last = id;
        last[127] = 9;
        assert_ne!(host_hash("h", &id, 0), host_hash("h", &last, 0));
        let a = record();
        let b = PeerRecord { pid_hash: 1, ..a };
        assert!(a.same_node(&b) && !a.same_process(&b) && a.same_process(&a));
    }
}
