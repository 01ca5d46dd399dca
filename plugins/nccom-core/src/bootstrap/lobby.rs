//! The lobby of a listener: connections that were accepted and have not said yet what they want.
//!
//! All are listened to at once, so that a mute or foreign one costs the others nothing. It is closed when its time is up, or
//! at the first byte that is not of this library. There are `MOST` at a time; more wait in the kernel's queue.

use super::wire::{Header, MessageKind};
use super::{LOOK_MS, Look, Sockets, look};
use crate::fail::{Code, Failure};

/// Connections that are listened to at a time.
const MOST: usize = 256;
/// The pause between two rounds begins with this many milliseconds, and doubles up to [`LOOK_MS`].
const FIRST_PAUSE: u32 = 1;

/// Who waits to be heard.
#[derive(Debug)]
pub struct Lobby<C> {
    waiting: Vec<Waiting<C>>,
    /// How long one may stay silent, milliseconds.
    hello_ms: u32,
    /// Payload bytes a first message may have.
    most: usize,
    pause: u32,
}

/// One that was accepted. Absent, `until` is set when it is first listened to.
#[derive(Debug)]
struct Waiting<C> {
    conn: C,
    header: Option<Header>,
    until: Option<u64>,
}

impl<C> Lobby<C> {
    /// An empty one: a connection has `hello_ms` for its first message of at most `most` payload bytes.
    pub fn new(hello_ms: u32, most: usize) -> Lobby<C> {
        Lobby { waiting: Vec::new(), hello_ms, most, pause: FIRST_PAUSE }
    }

    /// The next connection that has spoken, with its message. `until` is on the clock of [`Sockets::now_ms`]; `meanwhile`
    /// is called between two rounds, and its failure ends the wait. Without one to watch, `watching` is false, and an empty
    /// lobby sleeps until somebody connects.
    ///
    /// # Errors
    /// [`Code::Timeout`] at `until`; what `meanwhile` says; what accepting says.
    pub fn next<S: Sockets<Conn = C>>(
        &mut self,
        s: &S,
        listener: &S::Listener,
        until: u64,
        watching: bool,
        mut meanwhile: impl FnMut() -> Result<(), Failure>,
    ) -> Result<(C, MessageKind, Vec<u8>), Failure> {
        self.pause = FIRST_PAUSE;
        loop {
            meanwhile()?;
            // A full lobby has its pause at the first one's side.
            let full = self.waiting.len() >= MOST;
            if let Some(spoken) = self.listen(s, if full { self.pause } else { 0 }) {
                return Ok(spoken);
            }
            let left = until.saturating_sub(s.now_ms());
            if left == 0 {
                return Err(Failure::new(Code::Timeout, ""));
            }
            let left = u32::try_from(left).unwrap_or(u32::MAX);
            if self.waiting.len() >= MOST {
                self.slow_down();
                continue;
            }
            let idle = self.waiting.is_empty() && !watching;
            match s.accept(listener, if idle { left } else { self.pause.min(left) }) {
                Ok(conn) => {
                    self.enter(conn, None);
                    self.pause = FIRST_PAUSE;
                }
                // It had all the time there is; whoever bounds this call may have given it less than was asked for.
                Err(e) if e.code == Code::Timeout && idle => return Err(Failure::new(Code::Timeout, "")),
                Err(e) if e.code == Code::Timeout => self.slow_down(),
                Err(e) => return Err(e),
            }
        }
    }

    /// Lets one in that was accepted, with the first half of its message if that has come.
    pub(super) fn enter(&mut self, conn: C, header: Option<Header>) {
        self.waiting.push(Waiting { conn, header, until: None });
    }

    /// Who waits, with the first halves of their messages.
    pub(super) fn who(&self) -> impl Iterator<Item = (&C, Option<Header>)> {
        self.waiting.iter().map(|w| (&w.conn, w.header))
    }

    /// The same lobby with other ends of its connections.
    pub(super) fn exchange<D>(self, mut conn: impl FnMut(C) -> Result<D, Failure>) -> Result<Lobby<D>, Failure> {
        let mut there = Lobby::new(self.hello_ms, self.most);
        for w in self.waiting {
            there.enter(conn(w.conn)?, w.header);
        }
        Ok(there)
    }

    fn slow_down(&mut self) {
        self.pause = (self.pause * 2).min(LOOK_MS);
    }

    /// One round: the first that has said all, if any; those that will not are closed. The first one is given `ms`.
    fn listen<S: Sockets<Conn = C>>(&mut self, s: &S, ms: u32) -> Option<(C, MessageKind, Vec<u8>)> {
        let now = s.now_ms();
        let mut i = 0;
        while let Some(w) = self.waiting.get_mut(i) {
            let until = *w.until.get_or_insert(now + u64::from(self.hello_ms));
            match look(s, &w.conn, &mut w.header, self.most, if i == 0 { ms } else { 0 }) {
                Look::Message(kind, payload) => return Some((self.waiting.remove(i).conn, kind, payload)),
                Look::Nothing if now < until => i += 1,
                Look::Nothing | Look::Gone => drop(self.waiting.remove(i)),
            }
        }
        None
    }
}
