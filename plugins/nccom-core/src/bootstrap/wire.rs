//! The bytes of the bootstrap: addresses, ids, frames, records. Everything read here came from outside.
//!
//! Frame (our choice, bootstrap 4.6): `{ u32 kind, u32 flags = 0, u64 length }`, little-endian, then the payload.

use crate::bytes::{u32_at, u64_at};
use crate::fail::{Code, Failure, invalid};

/// The magic of the info record: `i l y a` in little-endian order.
pub const MAGIC: u32 = 0x6179_6c69;
/// Bytes of an info record without and with the hash tag.
pub const INFO_BYTES: [usize; 2] = [40, 56];
/// Bytes of the root's answer to one rank.
pub const ANSWER_BYTES: usize = 8 + 8 + 28;
/// Bytes of the hello on a connection between ranks.
pub const HELLO_BYTES: usize = 4 + 4 + 8 + 4;
/// Longest refusal: its head and its sentence.
pub const MAX_REFUSAL: usize = 1024;
const REFUSAL_HEAD: usize = 12;

/// A socket address as it travels: 28 bytes, family and port first (INV-21).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Address(pub [u8; 28]);

impl Address {
    /// From a slice of exactly 28 bytes.
    pub fn from_slice(b: &[u8]) -> Result<Address, Failure> {
        b.try_into().map(Address).map_err(|_| invalid(format!("a socket address has 28 bytes, not {}", b.len())))
    }

    /// The port.
    pub fn port(&self) -> u16 {
        u16::from_be_bytes([self.0[2], self.0[3]])
    }

    /// The same address with another port.
    pub fn with_port(mut self, port: u16) -> Address {
        self.0[2..4].copy_from_slice(&port.to_be_bytes());
        self
    }

    /// IPv6 rather than IPv4.
    pub fn is_v6(&self) -> bool {
        self.0[0] == 10
    }

    /// An address of this machine only.
    pub fn is_loopback(&self) -> bool {
        if self.is_v6() { self.0[8..23].iter().all(|b| *b == 0) && self.0[23] == 1 } else { self.0[4] == 127 }
    }

    /// An address of one link only: fe80::/10 or 169.254/16.
    pub fn is_link_local(&self) -> bool {
        if self.is_v6() { self.0[8] == 0xfe && self.0[9] & 0xc0 == 0x80 } else { self.0[4..6] == [169, 254] }
    }

    /// Number of the interface of a link-local IPv6 address, 0 for none.
    pub fn scope(&self) -> u32 {
        if self.is_v6() { u32_at(&self.0, 24) } else { 0 }
    }

    /// The address without its port.
    pub fn ip(&self) -> String {
        let text = self.with_port(0).to_string();
        text.strip_suffix(":0").unwrap_or(&text).to_string()
    }

    /// The id of a group whose root listens here: the address at byte 0, zero-padded to 128 (INV-20, INV-21).
    pub fn to_id(self) -> [u8; 128] {
        let mut id = [0; 128];
        id[..28].copy_from_slice(&self.0);
        id
    }

    /// The root's address in an id.
    pub fn of_id(id: &[u8]) -> Result<Address, Failure> {
        if id.len() != 128 {
            return Err(invalid(format!("a unique id has 128 bytes, this one has {}", id.len())));
        }
        let a = Address::from_slice(&id[..28])?;
        if !matches!(a.0[0], 2 | 10) || a.0[1] != 0 || a.port() == 0 {
            return Err(invalid(
                "the unique id holds no root address; it must come from neuronGetUniqueId of the group's root",
            ));
        }
        Ok(a)
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let b = &self.0;
        if self.is_v6() {
            let mut ip = [0u8; 16];
            ip.copy_from_slice(&b[8..24]);
            write!(f, "[{}]:{}", std::net::Ipv6Addr::from(ip), self.port())
        } else {
            write!(f, "{}.{}.{}.{}:{}", b[4], b[5], b[6], b[7], self.port())
        }
    }
}

/// Message kinds. 1, 7 and 8 are the original's numbers for the three all-gathers; 2 to 6 are our choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum MessageKind {
    /// Ring all-gather block.
    Ring = 1,
    /// Records of ranks without the hash tag, 40 bytes each.
    InfoToRoot = 2,
    /// The root's answer.
    InfoFromRoot = 3,
    /// First message between two ranks.
    Hello = 4,
    /// Point-to-point payload.
    Data = 5,
    /// Why there will be no answer, or no further ring message: the group ends.
    Refusal = 6,
    /// Recursive-doubling block.
    Doubling = 7,
    /// Bruck block.
    Bruck = 8,
    /// A rank's word to its root that its ring edges are there. Our addition.
    Joined = 9,
    /// The root's word that all have joined. Our addition.
    Complete = 10,
    /// Records of ranks with the hash tag, 56 bytes each. Our addition.
    TaggedInfoToRoot = 11,
}

/// The end of a group as it travels: `{ u32 magic, u32 status, i32 rank, text }`, the rank being the one that does not come,
/// or -1. The magic keeps a stray program from ending a job.
pub fn encode_refusal(failure: &Failure) -> Vec<u8> {
    let told = failure.told();
    let mut len = told.len().min(MAX_REFUSAL - REFUSAL_HEAD);
    while !told.is_char_boundary(len) {
        len -= 1;
    }
    let mut b = Vec::with_capacity(REFUSAL_HEAD + len);
    b.extend_from_slice(&MAGIC.to_le_bytes());
    b.extend_from_slice(&failure.code.number().to_le_bytes());
    b.extend_from_slice(&failure.absent.and_then(|r| i32::try_from(r).ok()).unwrap_or(-1).to_le_bytes());
    b.extend_from_slice(&told.as_bytes()[..len]);
    b
}

/// The failure in a refusal; `None` for one that is not of this library.
pub fn decode_refusal(b: &[u8]) -> Option<Failure> {
    if b.len() < REFUSAL_HEAD || b.len() > MAX_REFUSAL || u32_at(b, 0) != MAGIC {
        return None;
    }
    let said: String = String::from_utf8_lossy(&b[REFUSAL_HEAD..]).chars().filter(|c| !c.is_control()).collect();
    let absent = usize::try_from(u32_at(b, 8) as i32).ok();
    Some(Failure { absent, ..Failure::of_peer(Code::of_number(u32_at(b, 4)), said) })
}

/// Frame header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What follows.
    pub kind: MessageKind,
    /// Payload bytes.
    pub len: u64,
}

impl Header {
    /// Bytes of a header.
    pub const BYTES: usize = 16;

    /// To bytes.
    pub fn encode(&self) -> [u8; 16] {
        let mut b = [0; 16];
        b[..4].copy_from_slice(&(self.kind as u32).to_le_bytes());
        b[8..].copy_from_slice(&self.len.to_le_bytes());
        b
    }

    /// From bytes; an unknown kind or a flag is a foreign peer.
    pub fn decode(b: &[u8]) -> Result<Header, Failure> {
        let foreign = || {
            Failure::new(
                Code::Failure,
                "a bootstrap message has no valid header; the peer is foreign or of another version",
            )
        };
        if b.len() != Header::BYTES || u32_at(b, 4) != 0 {
            return Err(foreign());
        }
        let kind = match u32_at(b, 0) {
            1 => MessageKind::Ring,
            2 => MessageKind::InfoToRoot,
            3 => MessageKind::InfoFromRoot,
            4 => MessageKind::Hello,
            5 => MessageKind::Data,
            6 => MessageKind::Refusal,
            7 => MessageKind::Doubling,
            8 => MessageKind::Bruck,
            9 => MessageKind::Joined,
            10 => MessageKind::Complete,
            11 => MessageKind::TaggedInfoToRoot,
            _ => return Err(foreign()),
        };
        Ok(Header { kind, len: u64_at(b, 8) })
    }
}

/// A rank's record to the root: 40 bytes, 56 with the hash tag (global init only).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Info {
    /// The sender.
    pub rank: i32,
    /// World size it believes in.
    pub nranks: i32,
    /// Where it accepts ring and peer connections.
    pub listen: Address,
    /// 8 bytes of the library's hash, 8 of the runtime's.
    pub hash: Option<[u8; 16]>,
}

impl Info {
    /// To bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut b = Vec::with_capacity(56);
        b.extend_from_slice(&MAGIC.to_le_bytes());
        b.extend_from_slice(&self.rank.to_le_bytes());
        b.extend_from_slice(&self.nranks.to_le_bytes());
        b.extend_from_slice(&self.listen.0);
        if let Some(h) = &self.hash {
            b.extend_from_slice(h);
        }
        b
    }

    /// The kind of a message of such records.
    pub fn kind(&self) -> MessageKind {
        if self.hash.is_some() { MessageKind::TaggedInfoToRoot } else { MessageKind::InfoToRoot }
    }

    /// The records of a message. Its kind says which they are: 280 bytes would be seven short ones, or five long ones.
    pub fn decode_all(kind: MessageKind, b: &[u8]) -> Result<Vec<Info>, Failure> {
        let each = match kind {
            MessageKind::InfoToRoot => INFO_BYTES[0],
            MessageKind::TaggedInfoToRoot => INFO_BYTES[1],
            _ => return Err(Failure::new(Code::Failure, format!("expected records of ranks, got {kind:?}"))),
        };
        if b.is_empty() || b.len() % each != 0 {
            let text = format!("a message of records of {each} bytes has {} bytes", b.len());
            return Err(Failure::new(Code::Failure, text));
        }
        b.chunks_exact(each).map(Info::decode).collect()
    }

    /// From bytes. A foreign magic is the failure whose sentence says so.
    pub fn decode(b: &[u8]) -> Result<Info, Failure> {
        if !INFO_BYTES.contains(&b.len()) {
            return Err(Failure::new(
                Code::Failure,
                format!("an info record has 40 or 56 bytes, this one has {}", b.len()),
            ));
        }
        if u32_at(b, 0) != MAGIC {
            let text = format!(
                "an info record has magic {:#010x}, expected {MAGIC:#010x}: a foreign program connected",
                u32_at(b, 0)
            );
            return Err(Failure::new(Code::Failure, text));
        }
        let hash = (b.len() == 56).then(|| {
            let mut h = [0; 16];
            h.copy_from_slice(&b[40..56]);
            h
        });
        let listen = Address::from_slice(&b[12..40])?;
        Ok(Info { rank: u32_at(b, 4) as i32, nranks: u32_at(b, 8) as i32, listen, hash })
    }
}

/// The root's answer: what the whole group shares, and where the rank's ring successor listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RootAnswer {
    /// Random, for logs and to tell groups apart.
    pub cluster_id: u64,
    /// Seconds since 1970 at the root.
    pub epoch: i64,
    /// Listen address of rank + 1.
    pub next: Address,
}

impl RootAnswer {
    /// To bytes.
    pub fn encode(&self) -> [u8; ANSWER_BYTES] {
        let mut b = [0; ANSWER_BYTES];
        b[..8].copy_from_slice(&self.cluster_id.to_le_bytes());
        b[8..16].copy_from_slice(&self.epoch.to_le_bytes());
        b[16..].copy_from_slice(&self.next.0);
        b
    }

    /// From bytes.
    pub fn decode(b: &[u8]) -> Result<RootAnswer, Failure> {
        if b.len() != ANSWER_BYTES {
            return Err(Failure::new(
                Code::Failure,
                format!("the root's answer has {ANSWER_BYTES} bytes, this one has {}", b.len()),
            ));
        }
        let next = Address::from_slice(&b[16..])?;
        Ok(RootAnswer { cluster_id: u64_at(b, 0), epoch: u64_at(b, 8) as i64, next })
    }
}

/// What a connection between two ranks is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Purpose {
    /// From the ring predecessor.
    Ring = 1,
    /// Point-to-point, from the sender.
    Peer = 2,
}

/// First message between ranks: a stranger or a rank of another group is recognised by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerHello {
    /// The sender.
    pub rank: i32,
    /// Its group.
    pub cluster_id: u64,
    /// What for.
    pub purpose: Purpose,
}

impl PeerHello {
    /// To bytes.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut b = [0; HELLO_BYTES];
        b[..4].copy_from_slice(&MAGIC.to_le_bytes());
        b[4..8].copy_from_slice(&self.rank.to_le_bytes());
        b[8..16].copy_from_slice(&self.cluster_id.to_le_bytes());
        b[16..].copy_from_slice(&(self.purpose as u32).to_le_bytes());
        b
    }

    /// From bytes.
    pub fn decode(b: &[u8]) -> Result<PeerHello, Failure> {
        let foreign = || Failure::new(Code::Failure, "a connection did not begin with a hello of this library");
        if b.len() != HELLO_BYTES || u32_at(b, 0) != MAGIC {
            return Err(foreign());
        }
        let purpose = match u32_at(b, 16) {
            1 => Purpose::Ring,
            2 => Purpose::Peer,
            _ => return Err(foreign()),
        };
        Ok(PeerHello { rank: u32_at(b, 4) as i32, cluster_id: u64_at(b, 8), purpose })
    }
}

/// A root comm id in one of the three forms the original accepts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RootId {
    /// A literal address.
    Address(Address),
    /// A name to resolve.
    Name(String, u16),
}

/// Parses `<ipv4>:<port> | [<ipv6>]:<port> | <hostname>:<port>`.
pub fn parse_root_id(text: &str) -> Result<RootId, Failure> {
    let bad = || {
        invalid(format!(
            "Invalid Comm Id [{}], please use format: <ipv4>:<port> | [<ipv6>]:<port> | <hostname>:<port>",
            text.chars().take(300).collect::<String>()
        ))
    };
    let (host, port) = text.rsplit_once(':').ok_or_else(bad)?;
    let port: u16 = port.parse().map_err(|_| bad())?;
    let mut b = [0u8; 28];
    b[2..4].copy_from_slice(&port.to_be_bytes());
    if let Some(v6) = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
        let (ip, scope) = v6.split_once('%').map_or((v6, None), |(ip, s)| (ip, Some(s)));
        let ip: std::net::Ipv6Addr = ip.parse().map_err(|_| bad())?;
        b[0] = 10;
        b[8..24].copy_from_slice(&ip.octets());
        if let Some(s) = scope {
            b[24..28].copy_from_slice(&s.parse::<u32>().map_err(|_| bad())?.to_le_bytes());
        }
        return Ok(RootId::Address(Address(b)));
    }
    if let Ok(ip) = host.parse::<std::net::Ipv4Addr>() {
        b[0] = 2;
        b[4..8].copy_from_slice(&ip.octets());
        return Ok(RootId::Address(Address(b)));
    }
    let fits = !host.is_empty() && host.len() <= 253;
    let plain = host.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_'));
    if fits && plain { Ok(RootId::Name(host.to_string(), port)) } else { Err(bad()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn addr() -> Address {
        match parse_root_id("10.1.2.3:4567") {
            Ok(RootId::Address(a)) => a,
            other => panic!("{other:?}"),
        }
    }

    /// Proves INV-20, INV-21.
    #[test]
    fn an_id_is_128_bytes_with_the_address_first_and_zeros_behind() {
        let id = addr().to_id();
        assert_eq!(id.len(), 128);
        assert_eq!(id[..28], addr().0);
        assert!(id[28..].iter().all(|b| *b == 0));
        assert_eq!(&id[2..4], &4567u16.to_be_bytes());
        assert_eq!(Address::of_id(&id).unwrap(), addr());
        assert!(Address::of_id(&id[..127]).unwrap_err().text.contains("128 bytes"));
        assert!(Address::of_id(&[0; 128]).unwrap_err().text.contains("no root address"));
        assert!(Address::of_id(&addr().with_port(0).to_id()).is_err());
    }

    #[test]
    fn records_have_the_documented_sizes_and_magic() {
        let mut i = Info { rank: 3, nranks: 8, listen: addr(), hash: None };
        assert_eq!(i.encode().len(), 40);
        assert_eq!(&i.encode()[..4], b"ilya");
        assert_eq!(Info::decode(&i.encode()).unwrap(), i);
        i.hash = Some([7; 16]);
        assert_eq!(i.encode().len(), 56);
        assert_eq!(Info::decode(&i.encode()).unwrap(), i);
        let mut foreign = i.encode();
        foreign[0] ^= 1;
        assert!(Info::decode(&foreign).unwrap_err().text.contains("foreign"));
    }

    /// Five records with the tag are as long as seven without.
    #[test]
    fn records_are_told_apart_by_kind_and_not_by_length() {
        let plain = |rank| Info { rank, nranks: 8, listen: addr(), hash: None };
        let tagged = |rank| Info { hash: Some([7; 16]), ..plain(rank) };
        for infos in [(0..7).map(plain).collect::<Vec<_>>(), (0..5).map(tagged).collect()] {
            let bytes: Vec<u8> = infos.iter().flat_map(Info::encode).collect();
            assert_eq!(bytes.len(), 280);
            assert_eq!(Info::decode_all(infos[0].kind(), &bytes).unwrap(), infos);
            assert!(Info::decode_all(infos[0].kind(), &bytes[1..]).is_err());
        }
        assert!(Info::decode_all(MessageKind::InfoToRoot, &[]).is_err());
        assert!(Info::decode_all(MessageKind::Data, &tagged(0).encode()).is_err());
    }

    #[test]
    fn a_refusal_keeps_status_and_sentence_and_a_foreign_one_is_none() {
        let f = Failure::new(Code::Closed, "rank 3 left").during("here");
        let b = encode_refusal(&f);
        let got = decode_refusal(&b).unwrap();
        assert_eq!((got.code, got.told(), got.absent), (Code::Closed, "here: rank 3 left", None));
        // Handed on, it stays as it was; only the rank that shows it puts words before it.
        assert_eq!(encode_refusal(&got.during("there")), b);
        assert_eq!(decode_refusal(&encode_refusal(&f.without(3))).unwrap().absent, Some(3));
        let long = encode_refusal(&Failure::new(Code::Other(4), "é".repeat(2000)));
        assert!(long.len() <= MAX_REFUSAL);
        assert_eq!(decode_refusal(&long).unwrap().code, Code::Other(4));
        let mut foreign = b.clone();
        foreign[0] ^= 1;
        assert_eq!(decode_refusal(&foreign), None);
        assert_eq!(decode_refusal(&b[..7]), None);
    }

    #[test]
    fn root_ids_in_three_forms() {
        assert_eq!(addr().to_string(), "10.1.2.3:4567");
        match parse_root_id("[fe80::1%3]:80").unwrap() {
            RootId::Address(a) => assert_eq!((a.to_string(), a.scope()), ("[fe80::1]:80".into(), 3)),
            other => panic!("{other:?}"),
        }
        let kinds = |text: &str| match parse_root_id(text) {
            Ok(RootId::Address(a)) => (a.is_loopback(), a.is_link_local(), a.ip()),
            other => panic!("{other:?}"),
        };
        assert_eq!(kinds("127.0.1.1:5"), (true, false, "127.0.1.1".into()));
        assert_eq!(kinds("[::1]:5"), (true, false, "[::1]".into()));
        assert_eq!(kinds("[fe80::1%3]:5"), (false, true, "[fe80::1]".into()));
        assert_eq!(kinds("169.254.1.1:5"), (false, true, "169.254.1.1".into()));
        assert_eq!(kinds("10.0.0.1:5"), (false, false, "10.0.0.1".into()));
        // The longest name that DNS allows.
        let full = [&"a".repeat(63), &"b".repeat(63), &"c".repeat(63), &"d".repeat(61)].map(String::as_str).join(".");
        assert_eq!(full.len(), 253);
        assert_eq!(parse_root_id(&format!("{full}:1")).unwrap(), RootId::Name(full.clone(), 1));
        assert!(parse_root_id(&format!("{full}e:1")).is_err());
        let long = format!("{}.example:1", "a".repeat(200));
        assert!(matches!(parse_root_id(&long), Ok(RootId::Name(_, 1))));
        for bad in ["", "x", "host:", ":5", "host:70000", "::1:5", "[::1]", "a b:3", &"h".repeat(400)] {
            assert!(parse_root_id(bad).unwrap_err().text.contains("please use format"), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn nothing_from_outside_panics(bytes in prop::collection::vec(any::<u8>(), 0..80), text in ".{0,40}") {
            let _ = Header::decode(&bytes);
            let _ = Info::decode(&bytes);
            let _ = RootAnswer::decode(&bytes);
            let _ = decode_refusal(&bytes);
            let _ = PeerHello::decode(&bytes);
            let _ = Address::of_id(&bytes);
            let _ = parse_root_id(&text);
        }
    }
}
