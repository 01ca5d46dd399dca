//! Bootstrap: from a root address to a group whose ranks know each other (bootstrap.md).
//!
//! Written over [`Sockets`], so that the same code runs in the sandbox (over `neuron:hw/sockets`) and in native tests
//! (over the system's). Rooms: [`wire`] the bytes, [`lobby`] who has connected and not spoken yet, [`root`] who collects,
//! [`group`] what a rank does, [`head`] who it is, [`parked`] a group between two instances.
//!
//! A group comes about as a whole or not at all, and whoever fails says why: the root keeps every rank's connection until all
//! rings are wired and tells all what ended one of them; later a rank that fails hands the reason on around the ring.

pub mod group;
pub mod head;
pub mod lobby;
pub mod parked;
pub mod root;
pub mod wire;

#[cfg(test)]
pub(crate) mod std_sockets;

use crate::fail::{Code, Failure};
use wire::{Address, Header, MessageKind};

/// What stands for sockets: the sockets themselves, or where they are kept.
pub trait Ends {
    /// A listening socket; dropped means closed.
    type Listener;
    /// A connection; dropped means closed.
    type Conn;
}

/// Sockets with deadlines. Every call is bounded by its `ms`; expiry is a failure, never a retry (INV-26).
pub trait Sockets: Ends {
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
    /// Receives exactly `bytes`. A time-out loses nothing: the next call begins with what has come so far, so a call with
    /// a few milliseconds, or none, is a look.
    fn recv(&self, conn: &Self::Conn, bytes: usize, ms: u32) -> Result<Vec<u8>, Failure>;
    /// Milliseconds of a clock that never goes back.
    fn now_ms(&self) -> u64;
}

/// A wait of at most this many milliseconds is a look: the host leaves no sentence when it finds nothing.
pub const LOOK_MS: u32 = 50;

/// How long a rank whose wait was in vain, or that cannot send, waits for the reason that another one hands on.
pub(crate) const REASON_MS: u32 = 1_000;

/// Short attempts of [`dial`]; then long ones, in which a lost packet is sent again.
const SHORT_ATTEMPTS: u32 = 20;
const LONG_ATTEMPT_MS: u32 = 3_000;

/// Connects by many attempts, short at first, with a look at whatever `meanwhile` watches between them.
pub fn dial<S: Sockets>(
    s: &S,
    to: &Address,
    ms: u32,
    mut meanwhile: impl FnMut() -> Result<(), Failure>,
) -> Result<S::Conn, Failure> {
    let begun = s.now_ms();
    let mut tried = 0;
    loop {
        meanwhile()?;
        let spent = s.now_ms() - begun;
        let left = u64::from(ms).saturating_sub(spent) as u32;
        let attempt = if tried < SHORT_ATTEMPTS { LOOK_MS } else { LONG_ATTEMPT_MS };
        tried += 1;
        // The last attempt leaves the host's sentence, which says what the system answered.
        let last = left <= 2 * attempt;
        match s.connect(to, if last { left.max(1) } else { attempt }) {
            Err(e) if e.code == Code::Timeout && !last => {}
            answer => return answer,
        }
    }
}

/// What one look at a connection found.
pub(crate) enum Look {
    /// Nothing yet.
    Nothing,
    /// A message.
    Message(MessageKind, Vec<u8>),
    /// It is closed, or what came is not of this library.
    Gone,
}

/// Looks for a message without waiting. `header` keeps the first half of one between looks.
pub(crate) fn look<S: Sockets>(s: &S, conn: &S::Conn, header: &mut Option<Header>, most: usize, ms: u32) -> Look {
    match recv_any(s, conn, header, most, ms) {
        Ok((kind, payload)) => Look::Message(kind, payload),
        Err(e) if e.code == Code::Timeout => Look::Nothing,
        Err(_) => Look::Gone,
    }
}

/// The reason that another one hands on over `conn`, if it comes within `ms`; messages before it are passed over.
pub(crate) fn reason<S: Sockets>(s: &S, conn: &S::Conn, header: &mut Option<Header>, ms: u32) -> Option<Failure> {
    let until = s.now_ms() + u64::from(ms);
    loop {
        let left = until.saturating_sub(s.now_ms()) as u32;
        match look(s, conn, header, MAX_MESSAGE, left.min(LOOK_MS)) {
            Look::Message(MessageKind::Refusal, payload) => {
                if let Some(told) = wire::decode_refusal(&payload) {
                    return Some(told);
                }
            }
            Look::Message(..) => {}
            Look::Nothing if left > 0 => {}
            Look::Nothing | Look::Gone => return None,
        }
    }
}

/// Largest payload of one message: with its header it is one `send` of the host's sockets.
pub const MAX_MESSAGE: usize = 65_536 - Header::BYTES;

/// Sends one framed message.
pub fn send_message<S: Sockets>(
    s: &S,
    conn: &S::Conn,
    kind: MessageKind,
    payload: &[u8],
    ms: u32,
) -> Result<(), Failure> {
    if payload.len() > MAX_MESSAGE {
        let text = format!("a bootstrap message has at most {MAX_MESSAGE} bytes, this one has {}", payload.len());
        return Err(Failure::new(Code::Invalid, text));
    }
    let mut bytes = Header { kind, len: payload.len() as u64 }.encode().to_vec();
    bytes.extend_from_slice(payload);
    s.send(conn, &bytes, ms)
}

/// Receives one framed message of any kind, at most `most` payload bytes. `header` keeps the first half of one whose rest has
/// not come: after a time-out the next call goes on with it.
pub fn recv_any<S: Sockets>(
    s: &S,
    conn: &S::Conn,
    header: &mut Option<Header>,
    most: usize,
    ms: u32,
) -> Result<(MessageKind, Vec<u8>), Failure> {
    let h = match *header {
        Some(h) => h,
        None => Header::decode(&s.recv(conn, Header::BYTES, ms)?)?,
    };
    if h.len > most as u64 {
        let text = format!(
            "a bootstrap message announces {} bytes, at most {most} were expected; the peer is foreign or damaged",
            h.len
        );
        return Err(Failure::new(Code::Failure, text));
    }
    *header = Some(h);
    let payload = s.recv(conn, h.len as usize, ms)?;
    *header = None;
    Ok((h.kind, payload))
}

/// Receives one message of the kind and length expected, as [`recv_any`]; a refusal carries the other side's sentence.
pub fn recv_message<S: Sockets>(
    s: &S,
    conn: &S::Conn,
    header: &mut Option<Header>,
    want: MessageKind,
    bytes: usize,
    ms: u32,
) -> Result<Vec<u8>, Failure> {
    let (kind, payload) = recv_any(s, conn, header, bytes.max(wire::MAX_REFUSAL), ms)?;
    expect(kind, payload, want, bytes)
}

/// The payload of a message, if it is the kind and length expected.
fn expect(kind: MessageKind, payload: Vec<u8>, want: MessageKind, bytes: usize) -> Result<Vec<u8>, Failure> {
    if kind == MessageKind::Refusal
        && let Some(f) = wire::decode_refusal(&payload)
    {
        return Err(f);
    }
    if kind != want || payload.len() != bytes {
        let text = format!("expected a bootstrap message {want:?} of {bytes} bytes, got {kind:?} of {}", payload.len());
        return Err(Failure::new(Code::Failure, text));
    }
    Ok(payload)
}
