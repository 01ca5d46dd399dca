//! Bootstrap: from a root address to a group whose ranks know each other (bootstrap.md).
//!
//! Written over [`Sockets`], so that the same code runs in the sandbox (over `neuron:hw/sockets`) and in native tests
//! (over the system's). Rooms: [`wire`] the bytes, [`root`] who collects, [`group`] what a rank does.

pub mod group;
pub mod root;
pub mod wire;

#[cfg(test)]
pub(crate) mod std_sockets;

use crate::fail::{Code, Failure};
use wire::{Address, Header, Kind};

/// Sockets with deadlines. Every call is bounded by its `ms`; expiry is a failure, never a retry (INV-26).
pub trait Sockets {
    /// A listening socket; dropped means closed.
    type Listener;
    /// A connection; dropped means closed.
    type Conn;
    /// Binds and listens.
    fn listen(&self, at: &Address, ms: u32) -> Result<Self::Listener, Failure>;
    /// Where a listener really is.
    fn local(&self, listener: &Self::Listener) -> Result<Address, Failure>;
    /// One connection.
    fn accept(&self, listener: &Self::Listener, ms: u32) -> Result<Self::Conn, Failure>;
    /// Connects, trying again until the deadline.
    fn connect(&self, to: &Address, ms: u32) -> Result<Self::Conn, Failure>;
    /// Sends all.
    fn send(&self, conn: &Self::Conn, data: &[u8], ms: u32) -> Result<(), Failure>;
    /// Receives exactly `bytes`.
    fn recv(&self, conn: &Self::Conn, bytes: usize, ms: u32) -> Result<Vec<u8>, Failure>;
    /// Milliseconds of a clock that never goes back.
    fn now_ms(&self) -> u64;
}

/// Largest payload of one message: with its header it is one `send` of the host's sockets.
pub const MAX_MESSAGE: usize = 65_536 - Header::BYTES;

/// Sends one framed message.
pub fn send_message<S: Sockets>(s: &S, conn: &S::Conn, kind: Kind, payload: &[u8], ms: u32) -> Result<(), Failure> {
    if payload.len() > MAX_MESSAGE {
        let text = format!("a bootstrap message has at most {MAX_MESSAGE} bytes, this one has {}", payload.len());
        return Err(Failure::new(Code::Invalid, text));
    }
    let mut bytes = Header { kind, len: payload.len() as u64 }.encode().to_vec();
    bytes.extend_from_slice(payload);
    s.send(conn, &bytes, ms)
}

/// Receives one framed message of any kind, at most `most` payload bytes.
pub fn recv_any<S: Sockets>(s: &S, conn: &S::Conn, most: usize, ms: u32) -> Result<(Kind, Vec<u8>), Failure> {
    let header = Header::decode(&s.recv(conn, Header::BYTES, ms)?)?;
    if header.len > most as u64 {
        let text = format!(
            "a bootstrap message announces {} bytes, at most {most} were expected; the peer is foreign or damaged",
            header.len
        );
        return Err(Failure::new(Code::Failure, text));
    }
    Ok((header.kind, s.recv(conn, header.len as usize, ms)?))
}

/// Receives one message of the kind and length expected; a refusal carries the other side's sentence.
pub fn recv_message<S: Sockets>(s: &S, conn: &S::Conn, want: Kind, bytes: usize, ms: u32) -> Result<Vec<u8>, Failure> {
    let (kind, payload) = recv_any(s, conn, bytes.max(wire::MAX_REFUSAL), ms)?;
    if kind == Kind::Refusal {
        let said: String = String::from_utf8_lossy(&payload).chars().filter(|c| !c.is_control()).collect();
        return Err(Failure::new(Code::Failure, format!("the bootstrap root refused the group: {said}")));
    }
    if kind != want || payload.len() != bytes {
        let text = format!("expected a bootstrap message {want:?} of {bytes} bytes, got {kind:?} of {}", payload.len());
        return Err(Failure::new(Code::Failure, text));
    }
    Ok(payload)
}
