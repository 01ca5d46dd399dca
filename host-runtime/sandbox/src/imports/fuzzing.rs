//! The start of a connection for the fuzz targets: what strangers say at a listener, and what they answer. Not for programs.

use std::net::{Ipv4Addr, SocketAddr};

use crate::key::{GroupKey, KEY_BYTES};
use crate::objects::handshake::{Dialled, Dialling, Heard, NONCE, Unproven};

/// A stranger that says or answers `data` in two pieces, of which the first byte says where they part: nobody takes it for a
/// member, and nobody waits for more than it can say.
pub fn handshake(data: &[u8]) {
    let [at, data @ ..] = data else { return };
    let (first, rest) = data.split_at(usize::from(*at).min(data.len()));
    let (key, to) = (GroupKey::of_id(&[7; KEY_BYTES], 0), SocketAddr::from((Ipv4Addr::LOCALHOST, 7)));
    let (mut visitor, mut heard) = (Dialling::new(), Heard::default());
    let (mut dialled, hello) = Dialled::new(&key, [9; NONCE], to);
    // An empty piece is the end of the connection.
    for mut piece in [first, rest].into_iter().filter(|p| !p.is_empty()) {
        match visitor.hear(&mut piece, &key, to, &mut heard) {
            Ok(None) => unreachable!("a slice that has ended is a connection that has"),
            Ok(Some(_)) => assert!(data.starts_with(&hello), "a stranger was taken for a member"),
            Err(Unproven::Closed) => continue,
            Err(_) => break,
        }
    }
    for mut piece in [first, rest].into_iter().filter(|p| !p.is_empty()) {
        assert_ne!(dialled.hear(&mut piece), Ok(true), "a stranger's answer was believed");
    }
}
