//! How the two ends of a bootstrap connection show one another that they know the key of their group, before a guest of either
//! reads a byte of it.
//!
//! ```text
//! dialler   magic 8 ‖ nonce 32 ‖ HMAC(key, dials ‖ nonce ‖ to)          at once; the guest's bytes may follow
//! acceptor                       HMAC(key, accepts ‖ nonce ‖ to)        when it has read and checked that
//! ```
//!
//! There is no round trip before the connection is the guest's: the acceptor checks before its guest gets the connection, the
//! dialler before its guest gets the first byte of it. If a dialler waited for an answer, ranks that dial one another in a ring
//! would all wait.
//!
//! `to` is the address that was dialled: a hello that somebody has recorded serves at no other listener, and a listener takes
//! each nonce once. What follows is neither encrypted nor authenticated: who can change the packets of a connection can change
//! what the guests say.
//!
//! Pure: bytes come from any [`Read`].

use std::collections::HashSet;
use std::io::{ErrorKind, Read};
use std::net::SocketAddr;

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::key::GroupKey;

/// What a dialler says first; the number is the version.
const MAGIC: [u8; 8] = *b"wccl-hi1";
/// Bytes of a nonce.
pub(crate) const NONCE: usize = 32;
/// Bytes of a proof.
pub(crate) const PROOF: usize = 32;
/// Bytes of what a dialler says first.
pub(crate) const HELLO: usize = MAGIC.len() + NONCE + PROOF;
/// Hellos that one listener takes: those of a group's ranks, which come a few times each.
pub(crate) const MOST_HELLOS: usize = 16_384;

/// The proof of one side. An address is the same one in whichever family it is written, and on whichever link.
fn proof(key: &GroupKey, label: &str, nonce: &[u8], to: SocketAddr) -> Hmac<Sha256> {
    let mut mac = key.tag(label);
    mac.update(nonce);
    match to.ip().to_canonical() {
        std::net::IpAddr::V4(ip) => mac.update(&ip.octets()),
        std::net::IpAddr::V6(ip) => mac.update(&ip.octets()),
    }
    mac.update(&to.port().to_be_bytes());
    mac
}

/// Why a peer is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unproven {
    /// It has closed, or the connection is broken.
    #[error("it closed the connection")]
    Closed,
    /// Its first bytes are not ours.
    #[error("its first bytes are not those of a host of this library")]
    Foreign,
    /// The proof is wrong.
    #[error(
        "it does not know the group's key for this address: it has another job secret or unique id, is another tenant's, comes through \
         an address translation, or is no rank at all"
    )]
    Key,
    /// The nonce was used before.
    #[error("it repeats what another connection began with: somebody has recorded that")]
    Replayed,
    /// The listener has taken as many as it takes.
    #[error("{MOST_HELLOS} others of the group came before it: a listener takes no more")]
    Many,
}

/// Reads what has come into `got`, from its `have`th byte on. `None` until all is there.
fn fill(from: &mut impl Read, got: &mut [u8], have: &mut usize) -> Result<Option<()>, Unproven> {
    while *have < got.len() {
        match from.read(&mut got[*have..]) {
            Ok(0) => return Err(Unproven::Closed),
            Ok(n) => *have += n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(_) => return Err(Unproven::Closed),
        }
    }
    Ok(Some(()))
}

/// A dialler that has not checked its peer's answer yet.
#[derive(Debug)]
pub(crate) struct Dialled {
    /// Where the listener is.
    pub(crate) to: SocketAddr,
    expected: Hmac<Sha256>,
    got: [u8; PROOF],
    have: usize,
}

impl Dialled {
    /// What to send to the listener at `to`, and what waits for its answer. `nonce` is random.
    pub(crate) fn new(key: &GroupKey, nonce: [u8; NONCE], to: SocketAddr) -> (Dialled, [u8; HELLO]) {
        let mut hello = [0; HELLO];
        hello[..MAGIC.len()].copy_from_slice(&MAGIC);
        hello[MAGIC.len()..MAGIC.len() + NONCE].copy_from_slice(&nonce);
        hello[MAGIC.len() + NONCE..].copy_from_slice(&proof(key, "dials", &nonce, to).finalize().into_bytes());
        (Dialled { to, expected: proof(key, "accepts", &nonce, to), got: [0; PROOF], have: 0 }, hello)
    }

    /// Reads of the answer what has come. Answers whether it has come as a whole and is right; after an error the connection is
    /// of no use.
    pub(crate) fn hear(&mut self, from: &mut impl Read) -> Result<bool, Unproven> {
        if fill(from, &mut self.got, &mut self.have)?.is_none() {
            return Ok(false);
        }
        // In constant time.
        self.expected.clone().verify_slice(&self.got).map(|()| true).map_err(|_| Unproven::Key)
    }
}

/// One who has connected and not said all yet.
#[derive(Debug)]
pub(crate) struct Dialling {
    got: [u8; HELLO],
    have: usize,
}

impl Dialling {
    pub(crate) fn new() -> Dialling {
        Dialling { got: [0; HELLO], have: 0 }
    }

    /// Reads of the hello what has come, to the listener at `to`. Answers what to send back once it has come as a whole and is
    /// right: not a byte that follows it is read.
    pub(crate) fn hear(
        &mut self,
        from: &mut impl Read,
        key: &GroupKey,
        to: SocketAddr,
        heard: &mut Heard,
    ) -> Result<Option<[u8; PROOF]>, Unproven> {
        let whole = fill(from, &mut self.got, &mut self.have);
        let begun = self.have.min(MAGIC.len());
        if self.got[..begun] != MAGIC[..begun] {
            return Err(Unproven::Foreign);
        }
        if whole?.is_none() {
            return Ok(None);
        }
        let (nonce, said) = self.got[MAGIC.len()..].split_at(NONCE);
        // In constant time.
        proof(key, "dials", nonce, to).verify_slice(said).map_err(|_| Unproven::Key)?;
        heard.once(nonce)?;
        Ok(Some(proof(key, "accepts", nonce, to).finalize().into_bytes().into()))
    }
}

/// The nonces that a listener has taken.
#[derive(Debug, Default)]
pub(crate) struct Heard(HashSet<[u8; 16]>);

impl Heard {
    /// Takes one. Half of its bytes tell it from all others.
    fn once(&mut self, nonce: &[u8]) -> Result<(), Unproven> {
        let half = nonce.first_chunk::<16>().ok_or(Unproven::Foreign)?;
        if self.0.contains(half) {
            return Err(Unproven::Replayed);
        }
        if self.0.len() >= MOST_HELLOS {
            return Err(Unproven::Many);
        }
        self.0.insert(*half);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Bytes that come in pieces, then a socket that has no more, or has ended.
    struct Pieces<'a> {
        rest: &'a [u8],
        each: usize,
        ended: bool,
        dry: bool,
    }

    impl Read for Pieces<'_> {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            self.dry = !self.dry;
            if self.rest.is_empty() && self.ended {
                return Ok(0);
            }
            if self.rest.is_empty() || self.dry {
                return Err(ErrorKind::WouldBlock.into());
            }
            let n = self.each.min(into.len()).min(self.rest.len());
            into[..n].copy_from_slice(&self.rest[..n]);
            self.rest = &self.rest[n..];
            Ok(n)
        }
    }

    fn pieces(rest: &[u8], each: usize) -> Pieces<'_> {
        Pieces { rest, each, ended: true, dry: false }
    }

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    const HERE: &str = "10.0.0.1:4567";

    fn key(i: u8) -> GroupKey {
        GroupKey::of_id(&[i; 32], 0)
    }

    /// What an acceptor makes of these bytes, whenever they come.
    fn accept(bytes: &[u8], each: usize, k: &GroupKey, to: &str, heard: &mut Heard) -> Result<[u8; PROOF], Unproven> {
        let (mut from, mut visitor) = (pieces(bytes, each), Dialling::new());
        loop {
            if let Some(answer) = visitor.hear(&mut from, k, at(to), heard)? {
                return Ok(answer);
            }
        }
    }

    fn answered(mut dialled: Dialled, bytes: &[u8], each: usize) -> Result<(), Unproven> {
        let mut from = pieces(bytes, each);
        while !dialled.hear(&mut from)? {}
        Ok(())
    }

    #[test]
    fn two_with_one_key_know_one_another_and_nobody_else() {
        let (mine, others) = (key(1), key(2));
        let (dialled, hello) = Dialled::new(&mine, [7; NONCE], at(HERE));
        let mut heard = Heard::default();
        assert_eq!(accept(&hello, 99, &others, HERE, &mut heard), Err(Unproven::Key));
        let answer = accept(&hello, 99, &mine, HERE, &mut heard).unwrap();
        answered(dialled, &answer, 99).unwrap();
        // Recorded: at the same listener, and at others.
        assert_eq!(accept(&hello, 99, &mine, HERE, &mut heard), Err(Unproven::Replayed));
        for other in ["10.0.0.1:4568", "10.0.0.2:4567"] {
            assert_eq!(accept(&hello, 99, &mine, other, &mut Heard::default()), Err(Unproven::Key));
        }
        // An answer to another one, and the dialler's own proof in the place of one.
        let (other, _) = Dialled::new(&mine, [8; NONCE], at(HERE));
        assert_eq!(answered(other, &answer, 99), Err(Unproven::Key));
        let (mirrored, hello) = Dialled::new(&mine, [9; NONCE], at(HERE));
        assert_eq!(answered(mirrored, &hello[HELLO - PROOF..], 99), Err(Unproven::Key));
    }

    #[test]
    fn an_address_is_the_same_in_whichever_form_it_is_written() {
        let k = key(1);
        let (_, hello) = Dialled::new(&k, [7; NONCE], at(HERE));
        accept(&hello, 99, &k, "[::ffff:10.0.0.1]:4567", &mut Heard::default()).unwrap();
        // Each end has its own number for the link.
        let (_, hello) = Dialled::new(&k, [7; NONCE], at("[fe80::1%2]:4567"));
        accept(&hello, 99, &k, "[fe80::1%3]:4567", &mut Heard::default()).unwrap();
    }

    #[test]
    fn foreign_bytes_are_known_by_the_first_one_that_differs() {
        let (k, mut heard) = (key(1), Heard::default());
        // 28 bytes that begin as a record of the guests' own protocol does, and nothing after.
        for foreign in [&b"ilya\0\0\0\0\x02\0\0\0"[..], b"GET / HTTP/1.1\r\n\r\n", b"wccl-hi0", b"wX"] {
            let mut from = Pieces { ended: false, ..pieces(foreign, 99) };
            let mut visitor = Dialling::new();
            let said =
                std::iter::repeat_with(|| visitor.hear(&mut from, &k, at(HERE), &mut heard)).find(|r| *r != Ok(None));
            assert_eq!(said, Some(Err(Unproven::Foreign)));
        }
        assert_eq!(accept(b"wccl", 99, &k, HERE, &mut heard), Err(Unproven::Closed));
        assert_eq!(accept(b"", 99, &k, HERE, &mut heard), Err(Unproven::Closed));
    }

    #[test]
    fn a_listener_takes_so_many_and_keeps_refusing_what_it_knows() {
        let mut heard = Heard::default();
        let nonce = |i: usize| [i.to_le_bytes(), [1; 8]].concat();
        for i in 0..MOST_HELLOS {
            heard.once(&nonce(i)).unwrap();
        }
        assert_eq!(heard.once(&nonce(MOST_HELLOS)), Err(Unproven::Many));
        assert_eq!(heard.once(&nonce(0)), Err(Unproven::Replayed));
    }

    proptest! {
        #[test]
        fn pieces_of_any_size_say_the_same_and_what_follows_is_left(
            nonce: [u8; NONCE], each in 1usize..100, after in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            let k = key(1);
            let (dialled, hello) = Dialled::new(&k, nonce, at(HERE));
            let said = [&hello[..], &after].concat();
            let (mut from, mut visitor, mut heard) = (pieces(&said, each), Dialling::new(), Heard::default());
            let answer = loop {
                if let Some(answer) = visitor.hear(&mut from, &k, at(HERE), &mut heard).unwrap() {
                    break answer;
                }
            };
            prop_assert_eq!(from.rest, &after);
            prop_assert_eq!(answered(dialled, &answer, each), Ok(()));
        }

        #[test]
        fn a_bit_that_differs_is_noticed(nonce: [u8; NONCE], bit in 0usize..HELLO * 8, of_answer in 0usize..PROOF * 8) {
            let k = key(1);
            let (dialled, mut hello) = Dialled::new(&k, nonce, at(HERE));
            let mut answer = accept(&hello, 99, &k, HERE, &mut Heard::default()).unwrap();
            hello[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(accept(&hello, 99, &k, HERE, &mut Heard::default()).is_err());
            answer[of_answer / 8] ^= 1 << (of_answer % 8);
            prop_assert_eq!(answered(dialled, &answer, 99), Err(Unproven::Key));
        }

        #[test]
        fn any_bytes_are_refused_or_too_short(bytes in prop::collection::vec(any::<u8>(), 0..120), each in 1usize..100) {
            let k = key(1);
            prop_assert!(accept(&bytes, each, &k, HERE, &mut Heard::default()).is_err());
            let behind = [&MAGIC[..], &bytes].concat();
            prop_assert!(accept(&behind, each, &k, HERE, &mut Heard::default()).is_err());
            let (dialled, _) = Dialled::new(&k, [1; NONCE], at(HERE));
            prop_assert!(answered(dialled, &bytes, each).is_err());
        }
    }
}
